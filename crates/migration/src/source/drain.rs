//! The drain at the source: the blocks of a departed guest's memory and disks that the destination
//! misses are sent until it has all of them.

use crate::disks::left_images;
use crate::source::convergence;
use crate::source::left_memory::{LeftContent, LeftMemory};
use crate::source::sender::{Encoding, Line, Sending};
use crate::source::verified_ranges::Checked;
use crate::source::verify::{Image, Rest};
use longhaul_api::{Convergence, RegionProgress, Report};
use longhaul_codec::{BlockId, DigestKey};
use longhaul_engine::chunk::CHUNK_BLOCKS;
use longhaul_engine::source::{Source, SourceError};
use longhaul_engine::strategy::Strategy;
use longhaul_protocol::limits::RANGES_MAX;
use longhaul_protocol::message::{ToDestination, ToSource};
use longhaul_protocol::{BLOCK_SIZE, BlockRange, MigrationId, RegionId, RegionKind, RegionSpec};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time for the destination to say that it has all of the memory that was sent.
const STUCK_AFTER: Duration = Duration::from_secs(10);

/// The drain of a guest's memory and disks.
pub(crate) struct Drain {
    sending: Arc<Sending>,
    regions: BTreeMap<RegionId, Region>,
    /// Whether it began over the connection that the destination had READY on.
    goes_on: bool,
    /// Since when nothing is left to send over that connection.
    drained_at: Option<Instant>,
    /// The connection, until the destination has listed all its missing blocks and it is used.
    line: Option<Arc<Line>>,
    unreadable: BTreeSet<BlockId>,
    /// Unreadable blocks that have yet to be reported to the destination.
    unsaid: Vec<BlockId>,
    /// The comparison when all blocks are there, if it was requested.
    rest: Option<Rest>,
}

struct Region {
    name: String,
    kind: RegionKind,
    chunks: u32,
    /// Number of chunks for which the destination has listed its missing blocks.
    heard: u32,
}

/// Creates the drain from the notes of an earlier agent. Returns `None` if neither memory nor a
/// disk has to be drained.
pub(crate) fn left(
    state: &Path,
    guest: &str,
    migration: MigrationId,
    memory: Option<LeftMemory>,
) -> io::Result<Option<Drain>> {
    let mut left = left_images::left(state, guest, migration)?;
    left.sort_by_key(|image| image.left.region);
    let of_disks = left.first().map(|image| image.left.digest_key);
    let of_memory = memory.as_ref().map(|memory| memory.note.digest_key);
    let Some(key) = of_memory.or(of_disks).map(DigestKey) else {
        return Ok(None);
    };
    let foreign = |error: SourceError| {
        io::Error::other(format!("its regions are not those of its move: {error}"))
    };
    let of_memory = memory.as_ref().map(|memory| memory.note.regions.clone());
    let of_memory = of_memory.unwrap_or_default();
    let wish = convergence::wish(&Convergence::default(), Duration::ZERO);
    let engine = Source::new(Strategy::POSTCOPY, &of_memory, wish, Duration::ZERO);
    let mut engine = engine.map_err(foreign)?;
    let mut images = Vec::new();
    for image in &left {
        let spec = RegionSpec {
            id: image.left.region,
            name: image.disk.clone(),
            blocks: image.left.blocks,
            durable: true,
            starts_zero: true,
        };
        engine.add(&spec, Strategy::POSTCOPY).map_err(foreign)?;
        let disk = image.open()?;
        let disk = Arc::new(disk);
        images.push(Image { spec, disk });
    }
    engine.frozen();
    engine.closed();
    let disks = images.iter();
    let disks = disks.map(|image| (image.spec.id, image.disk.clone()));
    let content = Box::new(LeftContent {
        memory,
        disks: disks.collect(),
    });
    let encoding = Encoding::new(&Default::default(), 0);
    // No block is known to be equal, and no guest's requests compete with the reads.
    let checked = Checked::of(images.iter().map(|image| &image.spec));
    let of = (migration, key);
    let sending = Sending::new(engine, of, content, encoding, checked);
    let verify = left.iter().all(|image| image.left.verify);
    // The earlier agent may have died before it noted this.
    left_images::note_content(state, guest, migration);
    Ok(Some(Drain::begin(&sending, &of_memory, images, verify)))
}

impl Drain {
    /// Returns what sends the blocks.
    pub(crate) fn sending(&self) -> &Arc<Sending> {
        &self.sending
    }

    /// Begins the drain of this memory and these disks, because the guest runs at the destination.
    /// It uses a connection that begins with the lists of missing blocks.
    pub(crate) fn begin(
        sending: &Arc<Sending>,
        memory: &[RegionSpec],
        images: Vec<Image>,
        verify: bool,
    ) -> Self {
        sending.disconnect();
        let disks = images.iter().map(|image| &image.spec);
        let mut drain = Self::of(sending, memory.iter().chain(disks));
        drain.rest = (verify && !images.is_empty()).then(|| Rest::of(sending, images));
        drain
    }

    /// Goes on with this memory over the current connection, over which the destination has got the
    /// lists: no page waits for another one.
    pub(crate) fn go_on(sending: &Arc<Sending>, memory: &[RegionSpec]) -> Self {
        let mut drain = Self::of(sending, memory.iter());
        drain.goes_on = true;
        drain
    }

    fn of<'a>(sending: &Arc<Sending>, specs: impl Iterator<Item = &'a RegionSpec>) -> Self {
        sending.engine().handed_over();
        let region = |spec: &RegionSpec| Region {
            name: spec.name.clone(),
            kind: spec.kind(),
            chunks: spec.blocks.div_ceil(CHUNK_BLOCKS) as u32,
            heard: 0,
        };
        Self {
            sending: sending.clone(),
            regions: specs.map(|spec| (spec.id, region(spec))).collect(),
            goes_on: false,
            drained_at: None,
            line: None,
            unreadable: BTreeSet::new(),
            unsaid: Vec::new(),
            rest: None,
        }
    }

    /// Returns whether all was sent over the connection that it began over, and the destination
    /// still lacks something: it has to say what, over a new one.
    pub(crate) fn is_stuck(&mut self) -> bool {
        if !self.goes_on || !self.sending.engine().is_drained() {
            self.drained_at = None;
            return false;
        }
        let since = *self.drained_at.get_or_insert_with(Instant::now);
        since.elapsed() > STUCK_AFTER
    }

    /// Returns whether it needs no other connection than the one that it began over.
    pub(crate) fn goes_on(&self) -> bool {
        self.goes_on
    }

    /// Takes a new connection, over which the destination first lists its missing blocks.
    pub(crate) fn connected(&mut self, line: Arc<Line>) {
        self.goes_on = false;
        self.sending.disconnect();
        self.regions.values_mut().for_each(|it| it.heard = 0);
        self.line = Some(line);
        // Missing blocks are read again.
        self.unreadable.clear();
        self.unsaid.clear();
        if let Some(rest) = &mut self.rest {
            rest.connected();
        }
    }

    /// Waits for the next message of the comparison. Safe to cancel.
    pub(crate) async fn next(&mut self) -> ToDestination {
        match &mut self.rest {
            Some(rest) => rest.next().await,
            None => std::future::pending().await,
        }
    }

    /// Returns what the comparison found wrong, for which the images here are retained.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.rest.as_ref().and_then(Rest::trouble)
    }

    /// Adds the result of the comparison to a report.
    pub(crate) fn report(&self, report: &mut Report) {
        if let Some(rest) = &self.rest {
            rest.report(report);
        }
    }

    /// Handles a message of the destination. Returns false if the message is not about the drain.
    pub(crate) fn hear(&mut self, message: &ToSource) -> Result<bool, SourceError> {
        match message {
            ToSource::Missing(missing) => {
                let chunks = missing.from_chunk..missing.to_chunk;
                let mut engine = self.sending.engine();
                engine.missing(missing.region, chunks, &missing.lacks)?;
                drop(engine);
                if let Some(region) = self.regions.get_mut(&missing.region)
                    && region.heard == missing.from_chunk
                {
                    region.heard = missing.to_chunk;
                }
                self.use_line();
            }
            ToSource::Want { region, ranges } => {
                for range in ranges {
                    self.wanted(*region, *range)?;
                }
                self.sending.wake();
            }
            ToSource::Superseded { region, ranges } => {
                let mut engine = self.sending.engine();
                for range in ranges {
                    engine.superseded(*region, *range)?;
                    // The destination no longer needs these blocks.
                    let within = |block: &BlockId| {
                        block.region == *region && (range.start..range.end()).contains(&block.block)
                    };
                    self.unreadable.retain(|block| !within(block));
                }
            }
            ToSource::Digests {
                region,
                range,
                digests,
            } => {
                if let Some(rest) = &mut self.rest {
                    rest.answered(*region, *range, digests.clone());
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn wanted(&mut self, region: RegionId, range: BlockRange) -> Result<(), SourceError> {
        self.sending.engine().wanted(region, range)?;
        let block = |block| BlockId { region, block };
        let asked = block(range.start)..block(range.end());
        let tried: Vec<BlockId> = self.unreadable.range(asked).copied().collect();
        for block in tried {
            // The destination asks for the block, so it is reported again if it is still
            // unreadable.
            match self.sending.can_be_read(block) {
                true => drop(self.unreadable.remove(&block)),
                false => self.unsaid.push(block),
            }
        }
        Ok(())
    }

    fn use_line(&mut self) {
        let mut regions = self.regions.values();
        let all = regions.all(|region| region.heard == region.chunks);
        if all && let Some(line) = self.line.take() {
            self.sending.connect(line);
            self.sending.wake();
        }
    }

    /// Returns the first unreadable byte of each disk that has one.
    pub(crate) fn unreadable_bytes(&self) -> BTreeMap<RegionId, u64> {
        let mut first = BTreeMap::new();
        for block in &self.unreadable {
            let byte = block.block * BLOCK_SIZE as u64;
            first.entry(block.region).or_insert(byte);
        }
        first
    }

    /// Returns the progress of the drain of each region, for the API.
    pub(crate) fn progress(&self) -> Vec<RegionProgress> {
        let unreadable = self.unreadable_bytes();
        let pending = self.sending.engine().pending_by_region();
        let drained = pending
            .into_iter()
            .filter(|(spec, _)| self.regions.contains_key(&spec.id));
        let region = |(spec, pending): (RegionSpec, u64)| RegionProgress {
            blocks_total: spec.blocks,
            blocks_settled: spec.blocks.saturating_sub(pending),
            blocks_pending: pending,
            disk: spec.kind() == RegionKind::Disk,
            strategy: None,
            why: None,
            waiting: None,
            unreadable_byte: unreadable.get(&spec.id).copied(),
            name: spec.name,
        };
        drained.map(region).collect()
    }

    /// Returns the messages that report unreadable blocks.
    pub(crate) fn unreadable(&mut self) -> Vec<ToDestination> {
        for (block, why) in self.sending.take_unreadable() {
            if self.unreadable.insert(block) {
                let region = self.regions.get(&block.region);
                if region.is_some_and(|it| it.kind == RegionKind::Disk) {
                    let disk = region.map(|region| &region.name);
                    let byte = block.block * BLOCK_SIZE as u64;
                    tracing::error!(disk, byte, "cannot be read: {why}");
                }
            }
            self.unsaid.push(block);
        }
        let unsaid = std::mem::take(&mut self.unsaid);
        let said = unsaid.chunks(RANGES_MAX).flat_map(|blocks| {
            let of_region = blocks.chunk_by(|one, next| one.region == next.region);
            of_region.filter_map(|blocks| {
                Some(ToDestination::Unreadable {
                    region: blocks.first()?.region,
                    ranges: blocks
                        .iter()
                        .map(|block| BlockRange::new(block.block, 1))
                        .collect(),
                })
            })
        });
        said.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disks::exports::{LeftDisk, tests::note_left};
    use longhaul_storage::disk::{ImageIdentity, RawDisk};
    use std::fs;

    /// A file of the same length under the same path may be a backup or a template.
    #[tokio::test(flavor = "multi_thread")]
    async fn nothing_is_sent_of_another_image_than_the_guest_has_left() {
        let folder = tempfile::tempdir().unwrap();
        let (state, migration) = (folder.path(), MigrationId([7; 8]));
        let (image, own) = (state.join("disk.raw"), state.join("own.raw"));
        let bytes = 256 * BLOCK_SIZE;
        fs::write(&image, vec![1; bytes]).unwrap();
        let disk = RawDisk::open_to_read(&image).unwrap();
        let note = LeftDisk {
            migration,
            region: RegionId(1),
            blocks: 256,
            grows: false,
            digest_key: [1; 32],
            verify: false,
            identity: Some(ImageIdentity::of(&disk).unwrap()),
        };
        note_left(state, ("web-7", 0), &image, note);
        let found = || left(state, "web-7", migration, None);
        assert!(found().unwrap().is_some());

        fs::rename(&image, &own).unwrap();
        fs::write(&image, vec![2; bytes]).unwrap();
        let why = found().err().unwrap().to_string();
        assert!(why.contains("is not the image"), "{why}");
        fs::rename(&own, &image).unwrap();
        assert!(found().unwrap().is_some());

        // Content that is changed in place makes another image, too.
        fs::write(&image, vec![2; bytes]).unwrap();
        let why = found().err().unwrap().to_string();
        assert!(why.contains("its content at byte 0 has changed"), "{why}");
        fs::write(&image, vec![1; bytes]).unwrap();
        assert!(found().unwrap().is_some());
    }
}
