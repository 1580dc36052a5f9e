//! Samples of a guest's memory and disks, encoded as they would be sent: how many bytes will
//! travel, and how long encoding them takes.
//!
//! Up to [`SCANNED_MAX`] blocks spread over all of the memory tell how much of it is zero or
//! repeats. Up to [`WINDOWS`] runs of neighbouring blocks, each as long as a frame, are encoded by
//! the encoder and the compression policy of a move. The spread between the runs is the uncertainty
//! of their mean. Reading does not stop the guest, and encoding ends after [`ENCODE_WITHIN`].

use crate::source::local_disks::LocalDisk;
use crate::source::sender::Encoding;
use longhaul_codec::{
    BlockId, Compression, CompressionPolicy, Decision, DigestKey, Encoder, Hasher, Staged,
    fingerprint, is_zero,
};
use longhaul_engine::forecast::Guess;
use longhaul_hypervisor::memory::GuestMemory;
use longhaul_protocol::message::SampledBlock;
use longhaul_protocol::{BLOCK_SIZE, BlockRange, RegionId, RegionSpec};
use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

type Block = [u8; BLOCK_SIZE];

/// Number of blocks of memory that are read to see how many are zero or repeat: 16 MiB.
const SCANNED_MAX: u64 = 1 << 12;
/// Number of runs of blocks that are encoded.
const WINDOWS: usize = 16;
/// Number of runs that are encoded even if they take longer than [`ENCODE_WITHIN`].
const WINDOWS_MIN: usize = 4;
/// Time after which no further run is encoded.
const ENCODE_WITHIN: Duration = Duration::from_millis(200);
/// Number of blocks read at once.
const BATCH: usize = 64;
/// The assumed rate of a link that has not been measured, in bytes per second.
const RATE_UNSEEN: f64 = 12.5e6;
/// The queue of a link that is full, in bytes.
const QUEUE_BYTES: usize = 1 << 20;
/// The smallest spread of a sampled mean.
const SPREAD_MIN: f64 = 0.04;
/// The spread of a mean of fewer than [`WINDOWS_MIN`] runs.
const SPREAD_FEW: f64 = 0.3;
/// A content that the sample has twice is assumed to repeat at most this often.
const REPEATS_MAX: f64 = 4.0;
/// Number of blocks of memory, and of each disk, whose digests are compared with what a destination
/// has.
const DIGESTS: u64 = 256;
/// Number of blocks of memory that are read for these.
const DIGESTS_READ: u64 = 4096;
/// Limit on the extents that are searched of a disk.
const EXTENTS_MAX: usize = 4096;

/// How content travels, by a sample of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sampled {
    /// Estimated bytes that are not zero.
    pub(crate) used_bytes: u64,
    /// Estimated bytes on the link, if all of it is sent once.
    pub(crate) sent_bytes: Guess,
    /// Estimated time of encoding it, in seconds.
    pub(crate) work_s: f64,
    /// The part of it in which memory is read and digested, in seconds.
    pub(crate) read_s: f64,
}

impl Sampled {
    const NOTHING: Self = Self {
        used_bytes: 0,
        sent_bytes: Guess::exactly(0.0),
        work_s: 0.0,
        read_s: 0.0,
    };

    /// Returns the bytes on the link for each byte that is not zero.
    pub(crate) fn share(&self) -> Option<f64> {
        (self.used_bytes > 0).then(|| self.sent_bytes.likely / self.used_bytes as f64)
    }

    /// Adds other content, which was sampled on its own.
    pub(crate) fn and(self, other: Self) -> Self {
        let [one, two] = [self, other].map(|it| it.sent_bytes);
        let likely = one.likely + two.likely;
        let deviation = (one.likely * one.spread).hypot(two.likely * two.spread);
        let spread = match likely > 0.0 {
            true => deviation / likely,
            false => 0.0,
        };
        Self {
            used_bytes: self.used_bytes.saturating_add(other.used_bytes),
            sent_bytes: Guess::new(likely, spread),
            work_s: self.work_s + other.work_s,
            read_s: self.read_s + other.read_s,
        }
    }
}

/// Samples a guest's memory for a link of this rate, in bytes per second.
pub(crate) fn memory(
    memory: &GuestMemory,
    regions: &[RegionSpec],
    places: &BTreeMap<RegionId, usize>,
    encoding: Encoding,
    rate: Option<f64>,
) -> Option<Sampled> {
    let total: u64 = regions.iter().map(|spec| spec.blocks).sum();
    let step = total.div_ceil(SCANNED_MAX).max(1);
    let placed = regions
        .iter()
        .filter_map(|spec| Some((spec, *places.get(&spec.id)?)));
    let mut scan = Scan::default();
    let began = Instant::now();
    for (spec, place) in placed {
        let blocks: Vec<u64> = (0..spec.blocks).step_by(step as usize).collect();
        for batch in blocks.chunks(BATCH) {
            scan.read(memory, place, batch);
        }
    }
    if scan.read == 0 {
        return None;
    }
    let whole = total as f64 / scan.read as f64;
    // The sender reads and digests all of it too.
    let reading_s = began.elapsed().as_secs_f64() * whole;
    let used_blocks = scan.used.len() as f64 * whole;
    let single = scan.single_blocks(whole) * whole;
    let mut runs = Runs::new(encoding, rate);
    let starts = scan.used.len();
    for window in 0..WINDOWS.min(starts) {
        let at = window * starts / WINDOWS.min(starts);
        let Some((place, start)) = scan.used.get(at).copied() else {
            break;
        };
        let most = memory.blocks().get(place).map_or(0, |block| block.blocks());
        let count = (runs.run_blocks() as u64).min(most.saturating_sub(start));
        let mut content = vec![[0; BLOCK_SIZE]; count as usize];
        let range = BlockRange::new(start, count);
        let read = memory.look(place, &[range], content.as_flattened_mut());
        if read.is_err() {
            continue;
        }
        content.retain(|block| !is_zero(block));
        if !runs.add(&content) {
            break;
        }
    }
    let (bytes, work_s) = runs.of_blocks(single);
    Some(Sampled {
        used_bytes: (used_blocks * BLOCK_SIZE as f64) as u64,
        sent_bytes: bytes,
        work_s: reading_s + work_s,
        read_s: reading_s,
    })
}

/// Samples disks for a link of this rate, in bytes per second; `None` if there are none.
pub(crate) fn disks(disks: &[LocalDisk], encoding: Encoding, rate: Option<f64>) -> Option<Sampled> {
    let sampled = disks.iter().map(|one| disk(one, encoding, rate));
    let sampled = sampled.reduce(Sampled::and);
    tracing::debug!(?sampled, "a sample of a guest's disks");
    sampled
}

fn disk(disk: &LocalDisk, encoding: Encoding, rate: Option<f64>) -> Sampled {
    let used = disk.used_blocks(EXTENTS_MAX);
    let blocks: u64 = used.iter().map(|range| range.count).sum();
    if blocks == 0 {
        return Sampled::NOTHING;
    }
    let mut runs = Runs::new(encoding, rate);
    let (mut read_blocks, mut content_blocks) = (0_u64, 0_u64);
    for window in 0..WINDOWS as u64 {
        let Some(range) = at(&used, window * blocks / WINDOWS as u64) else {
            break;
        };
        let count = range.count.min(runs.run_blocks() as u64);
        let mut content = vec![[0; BLOCK_SIZE]; count as usize];
        let range = BlockRange::new(range.start, count);
        if crate::disks::read_blocks(&disk.disk, range, content.as_flattened_mut()).is_err() {
            continue;
        }
        read_blocks += count;
        content.retain(|block| !is_zero(block));
        content_blocks += content.len() as u64;
        if !runs.add(&content) {
            break;
        }
    }
    let part = content_blocks as f64 / read_blocks.max(1) as f64;
    let allocated = disk.offered.allocated_bytes as f64 / BLOCK_SIZE as f64;
    let used = match disk.is_on_volume() {
        // Its used bytes are those that are not zero.
        true => allocated,
        false => allocated * part,
    };
    let (sent_bytes, work_s) = runs.of_blocks(used);
    Sampled {
        used_bytes: (used * BLOCK_SIZE as f64) as u64,
        sent_bytes,
        work_s,
        read_s: 0.0,
    }
}

/// Returns the digests of blocks that are spread over a guest's memory and are not zero.
pub(crate) fn memory_digests(
    memory: &GuestMemory,
    regions: &[RegionSpec],
    places: &BTreeMap<RegionId, usize>,
    hasher: &Hasher,
) -> Vec<SampledBlock> {
    let total: u64 = regions.iter().map(|spec| spec.blocks).sum();
    let step = total.div_ceil(DIGESTS_READ).max(1) as usize;
    let mut digests = Vec::new();
    for spec in regions {
        let Some(place) = places.get(&spec.id) else {
            continue;
        };
        for block in (0..spec.blocks).step_by(step) {
            let mut content = [0; BLOCK_SIZE];
            let read = memory.look(*place, &[BlockRange::new(block, 1)], &mut content);
            if read.is_ok() && !is_zero(&content) {
                digests.push(SampledBlock {
                    region: spec.id,
                    block,
                    digest: hasher.digest(&content).0,
                });
            }
        }
    }
    thinned(digests, DIGESTS)
}

/// Returns the digests of blocks that are spread over a disk and are not zero.
pub(crate) fn disk_digests(disk: &LocalDisk, hasher: &Hasher) -> Vec<SampledBlock> {
    let used = disk.used_blocks(EXTENTS_MAX);
    let blocks: u64 = used.iter().map(|range| range.count).sum();
    let numbers = (0..DIGESTS.min(blocks)).map(|number| number * blocks / DIGESTS.min(blocks));
    let read = numbers.filter_map(|number| {
        let block = at(&used, number)?.start;
        let mut content = [0; BLOCK_SIZE];
        let range = BlockRange::new(block, 1);
        let read = crate::disks::read_blocks(&disk.disk, range, &mut content);
        let is_used = read.is_ok() && !is_zero(&content);
        is_used.then(|| SampledBlock {
            region: disk.spec.id,
            block,
            digest: hasher.digest(&content).0,
        })
    });
    read.collect()
}

/// Returns at most this many of the values, evenly spread.
fn thinned<T: Copy>(values: Vec<T>, most: u64) -> Vec<T> {
    let step = (values.len() as u64).div_ceil(most).max(1) as usize;
    values.into_iter().step_by(step).collect()
}

/// Returns the rest of the range that has the block with this number among all blocks of ranges.
fn at(ranges: &[BlockRange], mut number: u64) -> Option<BlockRange> {
    for range in ranges {
        if number < range.count {
            return Some(BlockRange::new(range.start + number, range.count - number));
        }
        number -= range.count;
    }
    None
}

/// What is seen of the blocks that are read one by one.
#[derive(Default)]
struct Scan {
    read: u64,
    /// The blocks that are not zero.
    used: Vec<(usize, u64)>,
    /// How often each content was seen.
    seen: HashMap<u64, u32>,
}

impl Scan {
    fn read(&mut self, memory: &GuestMemory, place: usize, blocks: &[u64]) {
        let ranges: Vec<BlockRange> = blocks.iter().map(|it| BlockRange::new(*it, 1)).collect();
        let mut content = vec![[0; BLOCK_SIZE]; blocks.len()];
        let looked = memory.look(place, &ranges, content.as_flattened_mut());
        // A block that is not there yet is not sampled.
        if looked.is_err() {
            return;
        }
        self.read += blocks.len() as u64;
        for (block, content) in blocks.iter().zip(&content) {
            if !is_zero(content) {
                self.used.push((place, *block));
                *self.seen.entry(fingerprint(content)).or_default() += 1;
            }
        }
    }

    /// Estimates how many of the sampled blocks travel in full: a repeated one is referred to. Of a
    /// content that is in the memory twice, a sample of one block in `step` seldom has both.
    fn single_blocks(&self, step: f64) -> f64 {
        let repeats: f64 = self
            .seen
            .values()
            .map(|count| match count {
                0 | 1 => 0.0,
                2 => step.min(REPEATS_MAX),
                count => f64::from(count - 1),
            })
            .sum();
        let used = self.used.len() as f64;
        (used - repeats).max(used * 0.05)
    }
}

/// Encodes runs of blocks.
struct Runs {
    encoding: Encoding,
    policy: CompressionPolicy,
    rate: f64,
    encoder: Encoder,
    hasher: Hasher,
    began: Instant,
    blocks: u64,
    work: Duration,
    /// The bytes per block of each run.
    shares: Vec<f64>,
}

impl Runs {
    fn new(encoding: Encoding, rate: Option<f64>) -> Self {
        Self {
            encoding,
            policy: CompressionPolicy::new(1),
            rate: rate.filter(|rate| *rate > 0.0).unwrap_or(RATE_UNSEEN),
            encoder: Encoder::new(),
            // The digests leave nothing but a frame's length.
            hasher: Hasher::new(DigestKey([0; 32])),
            began: Instant::now(),
            blocks: 0,
            work: Duration::ZERO,
            shares: Vec::new(),
        }
    }

    fn compression(&self) -> Compression {
        let chosen = self.encoding.compression;
        chosen.unwrap_or_else(|| self.policy.choose(Some(self.rate), QUEUE_BYTES, 0))
    }

    /// Returns the length of a run.
    fn run_blocks(&self) -> usize {
        self.compression().frame_blocks()
    }

    /// Encodes a run. Returns false if there is no time for another.
    fn add(&mut self, content: &[Block]) -> bool {
        let compression = self.compression();
        for content in content.chunks(compression.frame_blocks()) {
            let began = Instant::now();
            let mut staged = Vec::new();
            self.hasher.stage(content, &mut staged);
            let decisions: Vec<Decision> = staged
                .iter()
                .map(|staged| match staged {
                    Staged::Zero => Decision::Zero,
                    Staged::Content(digest) => Decision::Literal { digest: *digest },
                })
                .collect();
            let ids: Vec<BlockId> = (0..content.len() as u64)
                .map(|block| BlockId {
                    region: RegionId(0),
                    block: self.blocks + block,
                })
                .collect();
            let prepared = Instant::now();
            let frame =
                match self
                    .encoder
                    .encode_frame(self.blocks, &ids, content, &decisions, compression)
                {
                    Ok(frame) => frame,
                    Err(error) => {
                        tracing::warn!(%error, "cannot encode a sample of a guest");
                        return false;
                    }
                };
            let (preparing, encoding) = (prepared - began, prepared.elapsed());
            let (payload, stored) = (frame.payload_bytes, frame.stored_bytes);
            self.policy
                .observe(compression, payload, stored, preparing, encoding);
            self.blocks += content.len() as u64;
            self.work += began.elapsed();
            self.shares
                .push(frame.bytes.len() as f64 / content.len() as f64);
        }
        self.shares.len() < WINDOWS_MIN || self.began.elapsed() < ENCODE_WITHIN
    }

    /// Returns the bytes on the link of this many such blocks, and the time of encoding them in
    /// seconds.
    fn of_blocks(&self, blocks: f64) -> (Guess, f64) {
        let count = self.shares.len() as f64;
        if count == 0.0 {
            return (Guess::exactly(0.0), 0.0);
        }
        let mean = self.shares.iter().sum::<f64>() / count;
        let squares = self.shares.iter().map(|share| (share - mean).powi(2));
        let deviation = (squares.sum::<f64>() / count).sqrt();
        let spread = match self.shares.len() < WINDOWS_MIN {
            true => SPREAD_FEW,
            false => (deviation / mean / count.sqrt()).max(SPREAD_MIN),
        };
        let work_s = self.work.as_secs_f64() * blocks / self.blocks.max(1) as f64;
        (Guess::new(mean * blocks, spread), work_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_api::Encoding as Chosen;

    fn runs() -> Runs {
        Runs::new(Encoding::new(&Chosen::default(), 1 << 30), Some(12.5e6))
    }

    fn noise(seed: u64) -> Block {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut block = [0; BLOCK_SIZE];
        for byte in &mut block {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *byte = state as u8;
        }
        block
    }

    #[test]
    fn content_without_patterns_travels_at_its_own_size() {
        let mut runs = runs();
        for run in 0..8 {
            let content: Vec<Block> = (0..64).map(|block| noise(run * 64 + block)).collect();
            runs.add(&content);
        }
        let (bytes, work_s) = runs.of_blocks(1000.0);
        let whole = 1000.0 * BLOCK_SIZE as f64;
        assert!(
            bytes.likely > whole && bytes.likely < whole * 1.02,
            "{bytes:?}"
        );
        assert_eq!(bytes.spread, SPREAD_MIN);
        assert!(work_s > 0.0);
    }

    #[test]
    fn runs_that_differ_make_the_mean_uncertain() {
        let mut runs = runs();
        for run in 0..8 {
            let content: Vec<Block> = match run % 2 {
                0 => (0..64).map(noise).collect(),
                _ => (0..64).map(|block| [block as u8 + 1; BLOCK_SIZE]).collect(),
            };
            runs.add(&content);
        }
        let (bytes, _) = runs.of_blocks(1000.0);
        assert!(bytes.spread > 0.2, "{bytes:?}");
        assert!(bytes.likely < 0.7 * 1000.0 * BLOCK_SIZE as f64);
    }

    #[test]
    fn few_runs_say_little() {
        let mut runs = runs();
        assert_eq!(runs.of_blocks(1000.0).0, Guess::exactly(0.0));
        runs.add(&[noise(1)]);
        assert_eq!(runs.of_blocks(1000.0).0.spread, SPREAD_FEW);
    }

    #[test]
    fn repeated_content_is_sent_once() {
        let scan = |counts: &[u32]| Scan {
            read: 100,
            used: vec![(0, 0); counts.iter().sum::<u32>() as usize],
            seen: (0..).zip(counts.iter().copied()).collect(),
        };
        assert_eq!(scan(&[1; 10]).single_blocks(1.0), 10.0);
        assert_eq!(scan(&[1, 1, 2]).single_blocks(1.0), 3.0);
        assert_eq!(scan(&[10, 1]).single_blocks(8.0), 2.0);
        assert_eq!(scan(&[1, 1, 1, 1, 1, 1, 2]).single_blocks(100.0), 4.0);
    }

    #[test]
    fn a_block_is_found_by_its_number_among_ranges() {
        let ranges = [BlockRange::new(10, 5), BlockRange::new(100, 2)];
        assert_eq!(at(&ranges, 0), Some(BlockRange::new(10, 5)));
        assert_eq!(at(&ranges, 4), Some(BlockRange::new(14, 1)));
        assert_eq!(at(&ranges, 5), Some(BlockRange::new(100, 2)));
        assert_eq!(at(&ranges, 7), None);
    }

    #[test]
    fn a_sample_is_thinned_evenly() {
        assert_eq!(thinned(vec![1, 2, 3], 3), [1, 2, 3]);
        assert_eq!(thinned((0..10).collect(), 4), [0, 3, 6, 9]);
        assert!(thinned(Vec::<u8>::new(), 4).is_empty());
    }

    #[test]
    fn samples_add_up() {
        let one = Sampled {
            used_bytes: 100,
            sent_bytes: Guess::new(30.0, 0.1),
            work_s: 1.0,
            read_s: 0.5,
        };
        let both = one.and(one);
        assert_eq!((both.used_bytes, both.work_s), (200, 2.0));
        assert_eq!(both.sent_bytes.likely, 60.0);
        assert!((both.sent_bytes.spread - 0.1 / 2_f64.sqrt()).abs() < 1e-9);
        assert_eq!(one.and(Sampled::NOTHING), one);
        assert_eq!((one.share(), Sampled::NOTHING.share()), (Some(0.3), None));
    }
}
