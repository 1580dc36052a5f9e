//! Fuzzes the decoding of frames: the result is within the limits, or an error that changes
//! nothing.

use longhaul_codec::{
    BlockId, BlockSink, BlockWrite, Content, DecodeError, Decoder, DigestKey, FrameError, Limits,
};
use longhaul_protocol::{BLOCK_SIZE, MigrationId, RegionId};
use std::cell::Cell;
use std::convert::Infallible;

/// Lengths of regions 0 to 3, in blocks.
const REGIONS: [u64; 4] = [512, 1, 0, 1 << 32];

/// Decodes `data` as a frame.
pub(crate) fn run(data: &[u8]) {
    let mut decoder = Decoder::new(DigestKey([42; 32]));
    let limits = Limits::default();
    let mut sink = Checked::default();
    let first = match decoder.decode(data, &limits, &mut sink) {
        Ok(outcome) => outcome,
        Err(DecodeError::Frame(_)) => {
            assert_eq!((sink.applied, sink.asked.get()), (0, 0));
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let rejected: u64 = first.rejected.iter().map(|(_, range)| range.count).sum();
    assert_eq!(first.applied, sink.applied);
    assert_eq!(first.applied + first.stale + rejected, sink.asked.get());
    assert!(sink.asked.get() <= limits.frame_blocks as u64);
    // A decoder with history gives the same answer, unless the frame was the first in order.
    let again = decoder.decode(data, &limits, &mut Checked::default());
    match again {
        Err(DecodeError::Frame(FrameError::Order {
            order: 0,
            expected: 1,
        })) => {}
        again => assert_eq!(again.ok(), Some(first)),
    }
}

/// A destination that checks its requests, and refuses every third block as stale.
#[derive(Default)]
struct Checked {
    asked: Cell<u64>,
    applied: u64,
}

fn check(id: BlockId) {
    assert!(id.block < REGIONS[usize::from(id.region.0)]);
}

impl BlockSink for Checked {
    type Error = Infallible;

    fn region_blocks(&self, region: RegionId) -> Option<u64> {
        REGIONS.get(usize::from(region.0)).copied()
    }

    fn accepts(&self, id: BlockId, _: u64) -> bool {
        check(id);
        self.asked.set(self.asked.get() + 1);
        !id.block.is_multiple_of(3)
    }

    fn read(&mut self, id: BlockId, content: &mut [u8; BLOCK_SIZE]) -> bool {
        check(id);
        content.fill(id.block as u8);
        !id.block.is_multiple_of(5)
    }

    fn read_shared(
        &mut self,
        migration: MigrationId,
        id: BlockId,
        content: &mut [u8; BLOCK_SIZE],
    ) -> bool {
        content.fill(id.block as u8);
        migration.0[0].is_multiple_of(2)
    }

    fn apply(&mut self, _: u64, writes: &[BlockWrite<'_>]) -> Result<(), Infallible> {
        for write in writes {
            assert!(write.range.count > 0);
            for block in write.range.blocks() {
                check(BlockId {
                    region: write.region,
                    block,
                });
                self.applied += 1;
            }
            if let Content::Bytes(bytes) = write.content {
                assert_eq!(bytes.len() as u64, write.range.count * BLOCK_SIZE as u64);
            }
        }
        Ok(())
    }
}
