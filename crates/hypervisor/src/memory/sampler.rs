//! Estimates how much of a guest's RAM changes, from a sample of its blocks.

use super::guest_memory::{AccessError, GuestMemory};
use longhaul_codec::{fingerprint, is_zero};
use longhaul_protocol::{BLOCK_SIZE, BlockRange};

/// One block of this many is sampled, between these bounds.
const ONE_OF: u64 = 64;
const SAMPLES_MIN: u64 = 4096;
const SAMPLES_MAX: u64 = 8192;
/// The number of blocks read at once.
const BATCH: usize = 64;
/// The number of zero blocks that are all read before the steps grow: 8 GiB.
const ZEROS_SEEN_WHOLE: u64 = 1 << 21;

/// The content of some blocks at one moment.
#[derive(Debug)]
pub(crate) struct Sample {
    places: Vec<(usize, Vec<u64>)>,
    hashes: Vec<u64>,
    total_blocks: u64,
}

impl Sample {
    /// Samples blocks spread over all RAM that is readable from outside.
    pub(crate) fn take(memory: &GuestMemory) -> Result<Self, AccessError> {
        let direct = memory.blocks().iter().enumerate();
        let direct: Vec<(usize, u64)> = direct
            .filter(|(_, block)| !block.is_kept())
            .map(|(index, block)| (index, block.blocks()))
            .collect();
        let total_blocks: u64 = direct.iter().map(|(_, blocks)| blocks).sum();
        let wanted = (total_blocks / ONE_OF).clamp(SAMPLES_MIN, SAMPLES_MAX);
        let step = (total_blocks / wanted).max(1);
        let places: Vec<(usize, Vec<u64>)> = direct
            .into_iter()
            .map(|(index, blocks)| (index, spread(blocks, step)))
            .collect();
        let mut sample = Self {
            places,
            hashes: Vec::new(),
            total_blocks,
        };
        sample.hashes = sample.look(memory)?;
        Ok(sample)
    }

    /// Estimates how many blocks of the RAM have changed since the sample.
    pub(crate) fn changed_blocks(&self, memory: &GuestMemory) -> Result<u64, AccessError> {
        let now = self.look(memory)?;
        let pairs = self.hashes.iter().zip(&now);
        let changed = pairs.filter(|(before, now)| before != now).count() as u64;
        let looked_at = (self.hashes.len() as u64).max(1);
        Ok(changed.saturating_mul(self.total_blocks) / looked_at)
    }

    fn look(&self, memory: &GuestMemory) -> Result<Vec<u64>, AccessError> {
        let mut content = vec![0; BATCH * BLOCK_SIZE];
        let mut hashes = Vec::with_capacity(self.hashes.len());
        for (index, places) in &self.places {
            for batch in places.chunks(BATCH) {
                let ranges: Vec<BlockRange> = batch
                    .iter()
                    .map(|place| BlockRange::new(*place, 1))
                    .collect();
                let content = content
                    .get_mut(..batch.len() * BLOCK_SIZE)
                    .unwrap_or_default();
                memory.look(*index, &ranges, content)?;
                hashes.extend(content.chunks(BLOCK_SIZE).map(fingerprint));
            }
        }
        Ok(hashes)
    }
}

/// Returns one place in every `step`, at varying offsets.
fn spread(blocks: u64, step: u64) -> Vec<u64> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut places = Vec::new();
    let mut first = 0;
    while first < blocks {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let place = first + (state >> 33) % step;
        if place < blocks {
            places.push(place);
        }
        first += step;
    }
    places
}

/// Returns a block of 4 KiB from which on at least `wanted` blocks are not zero, near the end; 0
/// where there are fewer. Of a large stretch of zeros only a part is read.
pub(crate) fn start_of_last_non_zero(
    memory: &GuestMemory,
    block: usize,
    wanted: u64,
) -> Result<u64, AccessError> {
    let batch = BATCH as u64;
    let mut start = memory.blocks().get(block).map_or(0, |block| block.blocks());
    let mut content = vec![0; BATCH * BLOCK_SIZE];
    let (mut found, mut step, mut zeros) = (0, batch, 0);
    while start > 0 {
        let before = start;
        start = start.saturating_sub(step);
        let count = batch.min(before - start);
        let content = content
            .get_mut(..count as usize * BLOCK_SIZE)
            .unwrap_or_default();
        memory.look(block, &[BlockRange::new(start, count)], content)?;
        let mut non_zero = false;
        let (blocks, _) = content.as_chunks::<BLOCK_SIZE>();
        for (index, block) in blocks.iter().enumerate().rev() {
            if !is_zero(block) {
                non_zero = true;
                found += 1;
            }
            if found >= wanted {
                return Ok(start + index as u64);
            }
        }
        zeros = if non_zero { 0 } else { zeros + step };
        step = match zeros > ZEROS_SEEN_WHOLE {
            true => step + step / 4,
            false => batch,
        };
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_spread_over_everything() {
        let places = spread(10_000, 64);
        assert!((150..=157).contains(&places.len()), "{}", places.len());
        assert!(places.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(places.iter().all(|place| *place < 10_000));
    }

    #[test]
    fn the_last_content_is_found_behind_zeros() {
        let mut ram = vec![0_u8; 4000 * BLOCK_SIZE];
        let memory = GuestMemory::of_own("pc.ram", &ram);
        assert_eq!(start_of_last_non_zero(&memory, 0, 128), Ok(0));
        for page in 500..1000 {
            ram[page * BLOCK_SIZE + 77] = 1;
        }
        let start = start_of_last_non_zero(&memory, 0, 128).unwrap();
        assert!((500..=872).contains(&start), "{start}");
        for page in 3900..4000 {
            ram[page * BLOCK_SIZE] = 1;
        }
        assert_eq!(start_of_last_non_zero(&memory, 0, 100), Ok(3900));
    }

    #[test]
    fn changes_are_estimated() {
        let mut ram = vec![0_u8; 4096 * BLOCK_SIZE];
        let memory = GuestMemory::of_own("pc.ram", &ram);
        let sample = Sample::take(&memory).unwrap();
        assert_eq!(sample.changed_blocks(&memory), Ok(0));
        for page in 1000..3000 {
            ram[page * BLOCK_SIZE + 4095] = 1;
        }
        let changed = sample.changed_blocks(&memory).unwrap();
        assert!((1900..2100).contains(&changed), "{changed}");
    }
}
