//! Mirroring of a region: it is copied while the guest keeps writing, then each write completes
//! only when the destination has it (paper 000, section 3.2).
//!
//! ```text
//! Copying --- copied once, and little is left or it gets no less ---> Following
//! Following --- nothing is left ---> InStep
//! Following, InStep --- the connection is lost ---> Copying
//! ```
//!
//! In Following and InStep the guest waits for its writes, but never while there is no connection.
//! This slows a guest that writes faster than the link carries down to the link's throughput;
//! otherwise the mirror would never be in step. Meanwhile the blocks of waiting writes and all
//! other blocks that must be there get half of the link each, and the queue is kept short, since a
//! new write waits behind it.

use super::{Class, Region, Source, SourceError};
use crate::chunk;
use longhaul_codec::BlockId;
use longhaul_protocol::{BLOCK_SIZE, BlockRange, RegionId};
use std::collections::VecDeque;
use std::time::Duration;

/// So few pending blocks arrive soon: writes may begin to wait.
const LEFT_BLOCKS_FEW: u64 = 256;
/// The pending blocks shrink if they are at most this share of those one round before.
const PROGRESS: f64 = 0.9;

/// The share of the link for blocks that no write waits for.
pub(super) const BESIDE_WRITES_SHARE: f64 = 0.5;
/// How far one of the two kinds may be ahead of its share, in blocks.
pub(super) const AHEAD_BLOCKS_MAX: f64 = 256.0;
/// Limits on a frame of blocks that no write waits for: its time on the link, or its blocks.
const FRAME_TIME: Duration = Duration::from_millis(10);
const FRAME_BLOCKS_MIN: usize = 16;

/// The owner's name for a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WriteId(pub u64);

/// When a write may complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// At once.
    Now,
    /// When [`Source::poll_answer`] names it.
    Later,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Copying,
    Following,
    InStep,
}

/// A write that the guest waits for.
#[derive(Debug)]
struct Held {
    id: WriteId,
    /// Frames from this one on have content that is new enough.
    from_seq: u32,
    /// The blocks that have not arrived, by chunk.
    missing: Vec<(usize, u64)>,
}

/// The state of a mirror.
#[derive(Debug, Default)]
pub(super) struct Mirror {
    phase: Phase,
    /// Blocks taken and blocks pending when the round began.
    round: Option<(u64, u64)>,
    held: Vec<Held>,
}

impl Mirror {
    pub(super) fn is_in_step(&self) -> bool {
        self.phase == Phase::InStep
    }

    /// Returns whether the guest waits for its writes.
    pub(super) fn holds(&self) -> bool {
        self.phase != Phase::Copying
    }

    /// Returns whether a write is waiting now.
    pub(super) fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }

    /// Handles a lost connection: no write waits, and the copy falls behind from now on.
    pub(super) fn lost(&mut self, answers: &mut VecDeque<WriteId>) {
        *self = Self {
            held: std::mem::take(&mut self.held),
            ..Self::default()
        };
        answers.extend(self.held.drain(..).map(|held| held.id));
    }

    /// Records that the destination has these blocks as frame `seq` carried them.
    pub(super) fn arrived(
        &mut self,
        region: RegionId,
        blocks: &[BlockId],
        seq: u32,
        answers: &mut VecDeque<WriteId>,
    ) {
        let newer = |held: &&mut Held| held.from_seq <= seq;
        for held in self.held.iter_mut().filter(newer) {
            for id in blocks.iter().filter(|id| id.region == region) {
                let chunk = chunk::of(id.block);
                let mut parts = held.missing.iter_mut();
                if let Some((_, mask)) = parts.find(|(n, _)| *n == chunk) {
                    *mask &= !chunk::bit(id.block);
                }
            }
            held.missing.retain(|(_, mask)| *mask != 0);
        }
        let arrived = self.held.extract_if(.., |held| held.missing.is_empty());
        answers.extend(arrived.map(|held| held.id));
    }
}

impl Region {
    /// Updates the state of the mirror.
    fn follow(&mut self, connected: bool) {
        // Blocks of waiting writes arrive before those writes complete.
        let waited_for = self.map.pending(Class::Wanted);
        let left = self.map.pending_total() - waited_for;
        let copied = self.map.pending(Class::Cold) == 0;
        let taken = self.taken_blocks;
        let Some(mirror) = &mut self.mirror else {
            return;
        };
        if mirror.phase == Phase::Copying && copied && connected {
            let (began, left_then) = *mirror.round.get_or_insert((taken, left));
            let over = taken - began >= left_then;
            let slow = over && left as f64 > PROGRESS * left_then as f64;
            if left <= LEFT_BLOCKS_FEW || slow {
                mirror.phase = Phase::Following;
            } else if over {
                mirror.round = Some((taken, left));
            }
        }
        if mirror.phase == Phase::Following && left == 0 {
            mirror.phase = Phase::InStep;
        }
    }
}

impl Source {
    /// Records a write to a region whose writes are reported one by one, after the disk has it.
    /// Returns when the write may complete.
    pub fn written_by(
        &mut self,
        region: RegionId,
        range: BlockRange,
        id: WriteId,
    ) -> Result<Answer, SourceError> {
        self.written(region, range)?;
        let (from_seq, connected) = (self.next_seq, self.connected);
        let region = self.region(region, range)?;
        region.follow(connected);
        let Some(mirror) = &mut region.mirror else {
            return Ok(Answer::Now);
        };
        if mirror.phase == Phase::Copying || range.count == 0 {
            return Ok(Answer::Now);
        }
        mirror.held.push(Held {
            id,
            from_seq,
            missing: chunk::pieces(range).collect(),
        });
        for block in range.blocks() {
            region.map.want(block as usize);
        }
        Ok(Answer::Later)
    }

    /// Returns a write that may complete now.
    pub fn poll_answer(&mut self) -> Option<WriteId> {
        self.answers.pop_front()
    }

    /// Returns whether the guest waits for writes to any mirror.
    pub(super) fn mirrors_hold(&self) -> bool {
        let mut mirrors = self.regions.iter().filter_map(|it| it.mirror.as_ref());
        !self.frozen && mirrors.any(Mirror::holds)
    }

    /// Returns the limit on blocks in a frame that no write waits for.
    pub(super) fn beside_writes(&self, max_blocks: usize) -> usize {
        let Some(link) = self.link else {
            return max_blocks;
        };
        let bytes = link.rate_bytes_per_s * FRAME_TIME.as_secs_f64();
        let blocks = bytes / self.costs.block().clamp(1.0, BLOCK_SIZE as f64);
        max_blocks.min((blocks as usize).max(FRAME_BLOCKS_MIN))
    }

    /// Updates the state of all mirrors. Returns whether all of them are in step.
    pub(super) fn follow_mirrors(&mut self) -> bool {
        let connected = self.connected;
        let regions = self.regions.iter_mut();
        regions.for_each(|region| region.follow(connected));
        !self.regions.iter().any(Region::is_behind)
    }
}
