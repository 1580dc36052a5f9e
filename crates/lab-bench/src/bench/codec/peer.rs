//! Runs CloudNet's pipelines as a baseline, by the encoder and decoder of `longhaul-cloudnet`.

use longhaul_cloudnet::{CACHE_BYTES, blocks, strings};

use super::measure::{Clock, Cost};
use super::{Block, Pipeline, wrong};
use longhaul_lab::error::LabError;

/// The number of pages encoded, sent and decoded at a time, as in Longhaul's frames.
const BATCH: usize = 64;

/// An encoder, its decoder, and the bytes between them.
pub(super) struct CloudNet {
    ends: Ends,
    bytes: Vec<u8>,
}

/// The two ends; their caches are allocated before anything is measured.
enum Ends {
    Blocks(Box<(blocks::Encoder, blocks::Decoder)>),
    Strings(Box<(strings::Encoder, strings::Decoder)>),
}

impl CloudNet {
    /// Creates fixed blocks and deltas.
    pub(super) fn blocks(block_bytes: usize, pages: usize) -> Result<Self, LabError> {
        let config = blocks::Config {
            block_bytes,
            cache_bytes: CACHE_BYTES,
            redundancy: true,
            deltas: true,
            pages: pages as u64,
        };
        let ends = (|| {
            Ok::<_, longhaul_cloudnet::ConfigError>((
                blocks::Encoder::new(config)?,
                blocks::Decoder::new(config)?,
            ))
        })();
        let ends = ends.map_err(|error| wrong(&error))?;
        Ok(Self::of(Ends::Blocks(Box::new(ends))))
    }

    /// Creates strings found by Rabin fingerprints.
    pub(super) fn strings(fingerprints: usize, pages: usize) -> Result<Self, LabError> {
        let config = strings::Config {
            fingerprints,
            cache_bytes: CACHE_BYTES,
            pages: pages as u64,
        };
        let ends = (|| {
            Ok::<_, longhaul_cloudnet::ConfigError>((
                strings::Encoder::new(config)?,
                strings::Decoder::new(config)?,
            ))
        })();
        let ends = ends.map_err(|error| wrong(&error))?;
        Ok(Self::of(Ends::Strings(Box::new(ends))))
    }

    fn of(ends: Ends) -> Self {
        Self {
            ends,
            bytes: Vec::new(),
        }
    }
}

impl Pipeline for CloudNet {
    fn clear(&mut self) {
        match &mut self.ends {
            Ends::Blocks(ends) => {
                ends.0.clear();
                ends.1.clear();
            }
            Ends::Strings(ends) => {
                ends.0.clear();
                ends.1.clear();
            }
        }
    }

    fn send(
        &mut self,
        first: usize,
        blocks: &[Block],
        destination: &mut [Block],
    ) -> Result<Cost, LabError> {
        let mut cost = Cost {
            bytes: size_of_val(blocks),
            ..Cost::default()
        };
        let mut number = first as u64;
        for batch in blocks.chunks(BATCH) {
            let mut clock = Clock::start()?;
            self.bytes.clear();
            for page in batch {
                match &mut self.ends {
                    Ends::Blocks(ends) => ends.0.page(number, page, &mut self.bytes),
                    Ends::Strings(ends) => ends.0.page(number, page, &mut self.bytes),
                }
                .map_err(|error| wrong(&error))?;
                number += 1;
            }
            clock.lap(&mut cost.frame)?;
            cost.sent += self.bytes.len();
            let apply = |number: u64, page: &Block| destination[number as usize] = *page;
            match &mut self.ends {
                Ends::Blocks(ends) => ends.1.pages(&self.bytes, apply),
                Ends::Strings(ends) => ends.1.pages(&self.bytes, apply),
            }
            .map_err(|error| wrong(&error))?;
            clock.lap(&mut cost.decode)?;
        }
        Ok(cost)
    }
}
