//! The plan's question to a destination: how much of a guest's content it has from an earlier stay
//! of the guest.

use crate::channel::{self, TalkError};
use crate::source::local_disks::LocalDisk;
use crate::source::prediction::Holds;
use crate::source::qemu::SourceQemu;
use crate::source::sample;
use longhaul_codec::{DigestKey, Hasher};
use longhaul_protocol::limits::SAMPLES_MAX;
use longhaul_protocol::message::{
    DisksOffer, KnownQuery, Offer, Query, SampledBlock, ToDestination, ToSource,
};
use longhaul_protocol::wire::VERSION_OF_KNOWN;
use longhaul_protocol::{Attempt, Generation, MigrationId, RegionSpec, port};
use longhaul_transport::{ChannelError, Control};
use std::time::Duration;
use tokio::task::block_in_place;

/// Time limit for the answer, for which the destination reads up to [`SAMPLES_MAX`] blocks.
const ANSWER_WITHIN: Duration = Duration::from_secs(20);

/// A sample of a guest's memory, as digests.
pub(crate) struct Sample {
    key: [u8; 32],
    regions: Vec<RegionSpec>,
    blocks: Vec<SampledBlock>,
}

impl Sample {
    /// Takes a sample. Returns `None` if there are no random numbers for its key.
    pub(crate) fn take(outbound: &SourceQemu) -> Option<Self> {
        let mut key = [0; 32];
        getrandom::fill(&mut key).ok()?;
        let (memory, places) = outbound.memory();
        let regions = outbound.regions().to_vec();
        let hasher = Hasher::new(DigestKey(key));
        let blocks = block_in_place(|| sample::memory_digests(&memory, &regions, &places, &hasher));
        Some(Self {
            key,
            regions,
            blocks,
        })
    }

    /// Returns the regions of the memory. Those of disks follow them.
    pub(crate) fn regions(&self) -> &[RegionSpec] {
        &self.regions
    }
}

/// Asks a destination how much of a sample of a guest's memory and disks it has.
pub(crate) async fn ask(
    control: &Control,
    (query, generation): (Query, Generation),
    sample: Sample,
    disks: &[LocalDisk],
) -> Holds {
    if control.peer().version < VERSION_OF_KNOWN {
        return Holds::Unknown;
    }
    match count(control, (query, generation), sample, disks).await {
        Ok((0, _)) => Holds::Nothing,
        Ok((found, asked)) => Holds::Sampled(found, asked.saturating_sub(found)),
        Err(error) => {
            tracing::warn!(%error, "the destination does not say what it has of a guest");
            Holds::Unknown
        }
    }
}

/// Returns how many of the sampled blocks the destination has, and how many there are.
async fn count(
    control: &Control,
    (mut query, generation): (Query, Generation),
    sample: Sample,
    disks: &[LocalDisk],
) -> Result<(u64, u64), TalkError> {
    let Sample {
        key,
        mut regions,
        blocks: mut samples,
    } = sample;
    let hasher = Hasher::new(DigestKey(key));
    for disk in disks {
        regions.push(disk.spec.clone());
        samples.extend(block_in_place(|| sample::disk_digests(disk, &hasher)));
    }
    samples.truncate(SAMPLES_MAX);
    let asked = samples.len() as u64;
    port::take(&mut query.guest);
    let offer = Offer {
        migration: MigrationId([0; 8]),
        attempt: Attempt(0),
        generation,
        guest: query.guest,
        machine: query.machine,
        regions,
        digest_key: key,
        paused: false,
        verify: false,
        patience_ms: 0,
        early_release: false,
    };
    let offered = DisksOffer {
        offer,
        disks: disks.iter().map(|disk| disk.offered.clone()).collect(),
    };
    let question = ToDestination::QueryKnown(Box::new(KnownQuery { offered, samples }));
    let channel = control.open().await.map_err(ChannelError::from)?;
    let (mut sender, mut receiver) = channel::as_source(channel);
    sender.send(&question)?;
    match receiver.recv_within(ANSWER_WITHIN).await? {
        ToSource::Known { found } => Ok((u64::from(found).min(asked), asked)),
        _ => Err(TalkError::Unfit(
            "a question about content is answered by Known",
        )),
    }
}
