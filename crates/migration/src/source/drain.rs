//! The drain at the source: the disk blocks of a departed guest that the destination misses are
//! sent until it has all of them.

use crate::disks::left_images;
use crate::source::convergence;
use crate::source::sender::{Content, Encoding, Line, Sending};
use crate::source::verified_ranges::Checked;
use crate::source::verify::{Image, Rest};
use longhaul_api::{Convergence, RegionProgress, Report};
use longhaul_codec::{BlockId, DigestKey};
use longhaul_engine::chunk::CHUNK_BLOCKS;
use longhaul_engine::source::{Source, SourceError};
use longhaul_engine::strategy::Strategy;
use longhaul_protocol::limits::RANGES_MAX;
use longhaul_protocol::message::{ToDestination, ToSource};
use longhaul_protocol::{BLOCK_SIZE, BlockRange, MigrationId, RegionId, RegionSpec};
use longhaul_storage::disk::RawDisk;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The drain of a guest's disks.
pub(crate) struct Drain {
    sending: Arc<Sending>,
    disks: BTreeMap<RegionId, Disk>,
    /// The connection, until the destination has listed all its missing blocks and it is used.
    line: Option<Arc<Line>>,
    unreadable: BTreeSet<BlockId>,
    /// Unreadable blocks that have yet to be reported to the destination.
    unsaid: Vec<BlockId>,
    /// The comparison when all blocks are there, if it was requested.
    rest: Option<Rest>,
}

struct Disk {
    name: String,
    chunks: u32,
    /// Number of chunks for which the destination has listed its missing blocks.
    heard: u32,
}

/// The images of a departed guest's disks, as an earlier agent has noted them.
struct Images(BTreeMap<RegionId, Arc<RawDisk>>);

impl Content for Images {
    fn read(&self, blocks: &[BlockId], into: &mut [[u8; BLOCK_SIZE]]) -> Result<(), String> {
        let mut done = 0;
        for same in blocks.chunk_by(|one, next| one.region == next.region) {
            let Some(block) = same.first() else { continue };
            let disk = self.0.get(&block.region).ok_or("there is no such disk")?;
            crate::disks::read_each(disk, same, &mut into[done..done + same.len()])?;
            done += same.len();
        }
        Ok(())
    }
}

/// Creates the drain from the notes of an earlier agent. Returns `None` if no disk has to be
/// drained.
pub(crate) fn left(state: &Path, guest: &str, migration: MigrationId) -> io::Result<Option<Drain>> {
    let mut left = left_images::left(state, guest, migration)?;
    left.sort_by_key(|image| image.left.region);
    let Some(first) = left.first() else {
        return Ok(None);
    };
    let key = DigestKey(first.left.digest_key);
    let wish = convergence::wish(&Convergence::default(), Duration::ZERO);
    let engine = Source::new(Strategy::PRECOPY, &[], wish, Duration::ZERO);
    let mut engine = engine.map_err(io::Error::other)?;
    let mut images = Vec::new();
    for image in &left {
        let spec = RegionSpec {
            id: image.left.region,
            name: image.disk.clone(),
            blocks: image.left.blocks,
            durable: true,
            starts_zero: true,
        };
        engine.add(&spec, Strategy::POSTCOPY).map_err(|error| {
            io::Error::other(format!("its disks are not those of its move: {error}"))
        })?;
        let disk = image.open()?;
        let disk = Arc::new(disk);
        images.push(Image { spec, disk });
    }
    engine.closed();
    let disks = images.iter();
    let disks = disks.map(|image| (image.spec.id, image.disk.clone()));
    let content = Box::new(Images(disks.collect()));
    let encoding = Encoding::new(&Default::default(), 0);
    // No block is known to be equal, and no guest's requests compete with the reads.
    let checked = Checked::of(images.iter().map(|image| &image.spec));
    let of = (migration, key);
    let sending = Sending::new(engine, of, content, encoding, checked);
    let verify = left.iter().all(|image| image.left.verify);
    // The earlier agent may have died before it noted this.
    left_images::note_content(state, guest, migration);
    Ok(Some(Drain::begin(&sending, images, verify)))
}

impl Drain {
    /// Returns what sends the blocks.
    pub(crate) fn sending(&self) -> &Arc<Sending> {
        &self.sending
    }

    /// Begins the drain of these regions, because the guest runs at the destination.
    pub(crate) fn begin(sending: &Arc<Sending>, images: Vec<Image>, verify: bool) -> Self {
        // The drain uses a connection that begins with the lists of missing blocks.
        sending.disconnect();
        sending.engine().handed_over();
        let disk = |spec: &RegionSpec| Disk {
            name: spec.name.clone(),
            chunks: spec.blocks.div_ceil(CHUNK_BLOCKS) as u32,
            heard: 0,
        };
        let specs = images.iter().map(|image| &image.spec);
        Self {
            sending: sending.clone(),
            disks: specs.map(|spec| (spec.id, disk(spec))).collect(),
            line: None,
            unreadable: BTreeSet::new(),
            unsaid: Vec::new(),
            rest: verify.then(|| Rest::of(sending, images)),
        }
    }

    /// Takes a new connection, over which the destination first lists its missing blocks.
    pub(crate) fn connected(&mut self, line: Arc<Line>) {
        self.sending.disconnect();
        self.disks.values_mut().for_each(|disk| disk.heard = 0);
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
                if let Some(disk) = self.disks.get_mut(&missing.region)
                    && disk.heard == missing.from_chunk
                {
                    disk.heard = missing.to_chunk;
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
        let all = self.disks.values().all(|disk| disk.heard == disk.chunks);
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

    /// Returns the progress of the drain of each disk, for the API.
    pub(crate) fn progress(&self) -> Vec<RegionProgress> {
        let unreadable = self.unreadable_bytes();
        let pending = self.sending.engine().pending_by_region();
        let disks = pending
            .into_iter()
            .filter(|(spec, _)| self.disks.contains_key(&spec.id));
        let region = |(spec, pending): (RegionSpec, u64)| RegionProgress {
            blocks_total: spec.blocks,
            blocks_settled: spec.blocks.saturating_sub(pending),
            blocks_pending: pending,
            disk: true,
            strategy: None,
            why: None,
            waiting: None,
            unreadable_byte: unreadable.get(&spec.id).copied(),
            name: spec.name,
        };
        disks.map(region).collect()
    }

    /// Returns the messages that report unreadable blocks.
    pub(crate) fn unreadable(&mut self) -> Vec<ToDestination> {
        for (block, why) in self.sending.take_unreadable() {
            if self.unreadable.insert(block) {
                let disk = self.disks.get(&block.region).map(|disk| &disk.name);
                let byte = block.block * BLOCK_SIZE as u64;
                tracing::error!(disk, byte, "cannot be read: {why}");
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
    use longhaul_storage::disk::ImageIdentity;
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
        let found = || left(state, "web-7", migration);
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
