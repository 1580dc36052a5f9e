//! How much of a guest's RAM changes, from the content of a sample of its blocks.

use super::guest_memory::{AccessError, GuestMemory};
use longhaul_protocol::{BLOCK_SIZE, BlockRange};

/// One block of this many is looked at, between these bounds.
const ONE_OF: u64 = 64;
const SAMPLES_MIN: u64 = 1024;
const SAMPLES_MAX: u64 = 8192;
/// Blocks that are read at once.
const BATCH: usize = 64;

/// The content of some blocks at one moment.
#[derive(Debug)]
pub(crate) struct Sample {
    places: Vec<(usize, Vec<u64>)>,
    hashes: Vec<u64>,
    total_blocks: u64,
}

impl Sample {
    /// Looks at blocks spread over all of the RAM that can be read from outside.
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

    /// How many blocks of the RAM have changed since, as far as the sample tells.
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
                memory.read(*index, &ranges, content)?;
                hashes.extend(content.chunks(BLOCK_SIZE).map(hash));
            }
        }
        Ok(hashes)
    }
}

/// One place in every `step`, not always the same one.
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

/// Tells contents apart; nobody has an interest in fooling it.
fn hash(content: &[u8]) -> u64 {
    let (words, _) = content.as_chunks();
    words.iter().fold(0, |hash: u64, word| {
        let mixed = (hash ^ u64::from_le_bytes(*word)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed.rotate_left(29)
    })
}

/// The first block of 4 KiB from which on at least `wanted` blocks are not zero; 0 where there
/// are not that many.
pub(crate) fn start_of_last_non_zero(
    memory: &GuestMemory,
    block: usize,
    wanted: u64,
) -> Result<u64, AccessError> {
    let mut end = memory.blocks().get(block).map_or(0, |block| block.blocks());
    let mut content = vec![0; BATCH * BLOCK_SIZE];
    let mut found = 0;
    while end > 0 {
        let start = end.saturating_sub(BATCH as u64);
        let content = content
            .get_mut(..(end - start) as usize * BLOCK_SIZE)
            .unwrap_or_default();
        memory.read(block, &[BlockRange::new(start, end - start)], content)?;
        for (index, block) in content.chunks(BLOCK_SIZE).enumerate().rev() {
            found += u64::from(block.iter().any(|byte| *byte != 0));
            if found == wanted {
                return Ok(start + index as u64);
            }
        }
        end = start;
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
    fn any_byte_counts() {
        let mut content = [0_u8; BLOCK_SIZE];
        let zero = hash(&content);
        for at in [0, 1, 2048, 4095] {
            content[at] = 1;
            assert_ne!(hash(&content), zero, "{at}");
            content[at] = 0;
        }
    }
}
