//! The presence of a disk's content at the destination: which blocks are missing, which may be
//! overwritten, and in which order things become durable.
//!
//! ```text
//! Copying --- list, last part ---> Listed --- sealed ---> the guest may run here
//!    ^                               |
//!    +---- a new connection ---------+        (until it is sealed)
//! ```
//!
//! *Copying*: every arriving block is applied. *Listed*: the source has said which blocks it still
//! holds; all others are here as soon as the frames from before the list have arrived. For missing
//! blocks,
//!
//! - a frame brings a block only if no write of the guest has touched it: local writes win;
//! - a read, or a write of a part of a block, waits for the block, and the block is requested;
//! - a write of a whole block needs nothing, and the source is told that the block need not travel.
//!
//! The owner of a presence keeps these rules:
//!
//! 1. `accepts`, the writing of accepted blocks, and `arrived` happen under one lock, which `begin`
//!    and `done` take as well.
//! 2. The results of `arrived` and `done` are recorded before that lock is released and before the
//!    guest's request completes, in a place that survives the death of the agent but not a power
//!    cut (a file in memory). A restarted agent continues from it ([`Presence::restored`]).
//! 3. Steps of durability are carried out in the order in which [`Presence::poll`] returns them:
//!    data is synced, then masks are stored and synced, then a flush is completed. After a power
//!    cut the stored masks are authoritative.
//! 4. The failure of a step is remembered beyond the owner, as long as the host runs
//!    ([`Presence::give_up_durability`]).

mod guest;
mod rounds;

use crate::chunk;
use crate::remaining::{self, List, Remaining};
use guest::Guest;
use longhaul_protocol::{BLOCK_SIZE, BlockRange, Epoch, RegionId};
use rounds::Rounds;
use std::collections::VecDeque;
use std::time::Duration;

pub use guest::{Begin, Operation, RequestError, RequestId};

/// The missing blocks of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkMask {
    /// The chunk.
    pub chunk: u32,
    /// The missing blocks, the first in the lowest bit.
    pub missing: u64,
}

/// The owner's next action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Perform the request on these bytes of the local disk, then report it `done`.
    Go(RequestId, std::ops::Range<u64>),
    /// Fail this request: the source cannot read the blocks that it waited for.
    Unreadable(RequestId),
    /// Tell the source that the guest waits for these blocks.
    Want(BlockRange),
    /// Tell the source that these blocks need not travel.
    Superseded(BlockRange),
    /// Make the data written to the disk so far durable, then report it `data_synced`.
    SyncData,
    /// Store these masks durably, then report it `masks_stored`.
    StoreMasks(Vec<ChunkMask>),
    /// Complete this flush.
    Flushed(RequestId),
    /// Fail this flush: it is unknown which data is durable.
    FlushFailed(RequestId),
}

/// An invalid list of missing blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ListError {
    /// It belongs to another region, or names chunks that the region does not have.
    #[error("the list names what is no part of this disk")]
    Unknown,
    /// A part is missing or arrived twice.
    #[error("a part of the list begins at chunk {chunk}, and another was expected")]
    Order {
        /// Where the part begins.
        chunk: u32,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Copying,
    /// The next part begins at this chunk.
    Listing(u32),
    Listed,
}

/// One disk while it arrives, and while its missing blocks are fetched.
#[derive(Debug)]
pub struct Presence {
    region: RegionId,
    blocks: u64,
    epoch: Epoch,
    phase: Phase,
    /// Frames from this number on bring missing blocks.
    from_seq: u64,
    sealed: bool,
    /// The missing blocks, by chunk.
    missing: Vec<u64>,
    missing_blocks: u64,
    written_blocks: Vec<u16>,
    guest: Guest,
    rounds: Rounds,
    outputs: VecDeque<Output>,
}

impl Presence {
    /// Creates the presence of a disk of which nothing has arrived.
    pub fn new(region: RegionId, blocks: u64) -> Self {
        Self {
            region,
            blocks,
            epoch: Epoch(1),
            phase: Phase::Copying,
            from_seq: u64::MAX,
            sealed: false,
            missing: Vec::new(),
            missing_blocks: 0,
            written_blocks: Vec::new(),
            guest: Guest::default(),
            rounds: Rounds::default(),
            outputs: VecDeque::new(),
        }
    }

    /// Restores the presence of a disk that was handed over before this agent started, from the
    /// masks that were `noted` last or, after a power cut, `stored` last. In both cases the stored
    /// masks determine what has yet to be stored.
    pub fn restored(
        region: RegionId,
        blocks: u64,
        noted: &[Remaining],
        stored: &[Remaining],
    ) -> Result<Self, ListError> {
        let mut restored = Self::new(region, blocks);
        let chunks = 0..restored.chunks();
        if !remaining::are_within(stored, &chunks) {
            return Err(ListError::Unknown);
        }
        restored.listed(&List {
            region,
            from_chunk: 0,
            from_seq: 0,
            remaining: noted.to_vec(),
            next_chunk: None,
        })?;
        for part in stored {
            let chunks = part.chunk..part.chunk + part.chunks;
            restored.rounds.changed(chunks.map(|chunk| chunk as usize));
        }
        restored.sealed = true;
        // There is no connection yet.
        restored.epoch = Epoch(0);
        Ok(restored)
    }

    /// Returns its region.
    pub fn region(&self) -> RegionId {
        self.region
    }

    fn chunks(&self) -> u32 {
        chunk::count(self.blocks) as u32
    }

    // The source.

    /// Begins a new connection. The source repeats what was in flight on the old one; before
    /// anything else it is to be told which blocks are [missing](Presence::lacks).
    pub fn connected(&mut self, epoch: Epoch) {
        self.epoch = epoch;
        if self.sealed {
            // From now on only missing blocks arrive.
            self.from_seq = 0;
        } else {
            self.phase = Phase::Copying;
            self.from_seq = u64::MAX;
        }
        let told = |output: &Output| matches!(output, Output::Want(_) | Output::Superseded(_));
        self.outputs.retain(|output| !told(output));
        for range in self.guest.wanted() {
            self.outputs.push_back(Output::Want(range));
        }
    }

    /// Takes a part of the source's list.
    pub fn listed(&mut self, list: &List) -> Result<(), ListError> {
        if self.sealed {
            // A source that has not seen READY: from now on the destination says which blocks are
            // missing.
            return Ok(());
        }
        let chunks = self.chunks();
        let end = list.next_chunk.unwrap_or(chunks);
        let of_part = list.from_chunk..end;
        let ends = list.next_chunk.is_none() || of_part.contains(&list.from_chunk) && end < chunks;
        let within = remaining::are_within(&list.remaining, &of_part);
        if list.region != self.region || !within || !ends {
            return Err(ListError::Unknown);
        }
        let expected = match self.phase {
            Phase::Listing(next) => next,
            Phase::Copying | Phase::Listed => 0,
        };
        if list.from_chunk != expected && list.from_chunk != 0 {
            let chunk = list.from_chunk;
            return Err(ListError::Order { chunk });
        }
        if list.from_chunk == 0 {
            let had = (0..).zip(&self.missing).filter(|(_, mask)| **mask != 0);
            self.rounds.changed(had.map(|(chunk, _)| chunk));
            self.missing = vec![0; chunks as usize];
            self.written_blocks = vec![0; chunks as usize];
            self.missing_blocks = 0;
        }
        for part in &list.remaining {
            for chunk in part.chunk..part.chunk + part.chunks {
                let at = chunk as usize;
                self.written_blocks[at] = part.written_blocks;
                self.lack(at, part.mask & chunk::whole(at, self.blocks));
            }
        }
        self.from_seq = list.from_seq;
        self.phase = match list.next_chunk {
            Some(next) => Phase::Listing(next),
            None => Phase::Listed,
        };
        Ok(())
    }

    /// Records that blocks of a chunk are missing.
    fn lack(&mut self, chunk: usize, mask: u64) {
        let more = mask & !self.missing[chunk];
        self.missing[chunk] |= more;
        self.missing_blocks += u64::from(more.count_ones());
        self.rounds.changed([chunk]);
    }

    /// Records that blocks of a frame could not be used, which the source has been told.
    pub fn rejected(&mut self, range: BlockRange, seq: u64) {
        if self.sealed || seq >= self.from_seq || self.phase != Phase::Listed {
            return;
        }
        for (chunk, mask) in chunk::pieces(range) {
            if chunk < self.missing.len() {
                self.lack(chunk, mask & chunk::whole(chunk, self.blocks));
            }
        }
    }

    /// Stops accepting frames from before the list: all of them have arrived.
    pub fn seal(&mut self) {
        self.sealed = true;
    }

    /// Returns whether a block in a frame of this connection is to be written.
    pub fn accepts(&self, epoch: Epoch, block: u64, seq: u64) -> bool {
        if epoch != self.epoch || block >= self.blocks {
            return false;
        }
        match self.phase {
            Phase::Copying | Phase::Listing(_) => true,
            Phase::Listed if seq < self.from_seq => !self.sealed,
            Phase::Listed => self.is_missing(block) && !self.guest.intends(block),
        }
    }

    /// Records that accepted blocks have been written. Returns the masks to record.
    pub fn arrived(&mut self, range: BlockRange, seq: u64) -> Vec<ChunkMask> {
        self.rounds.written(range.count * BLOCK_SIZE as u64);
        if self.phase != Phase::Listed || seq < self.from_seq {
            return Vec::new();
        }
        self.present(range)
    }

    /// Returns a part of the list of missing blocks from this chunk on, and where the next part
    /// begins.
    pub fn lacks(&self, from_chunk: u32, entries_max: usize) -> (Vec<Remaining>, Option<u32>) {
        remaining::collect(from_chunk..self.chunks(), entries_max, |chunk| {
            let written = self.written_blocks.get(chunk).copied().unwrap_or(0);
            (mask(&self.missing, chunk), written)
        })
    }

    // Presence.

    /// Returns whether a block is missing, as far as the source has listed its blocks.
    pub fn is_missing(&self, block: u64) -> bool {
        mask(&self.missing, chunk::of(block)) & chunk::bit(block) != 0
    }

    /// Records that these blocks are here now. Returns the masks that have changed.
    fn present(&mut self, range: BlockRange) -> Vec<ChunkMask> {
        let mut changed = Vec::new();
        for (at, piece) in chunk::pieces(range) {
            let came = piece & mask(&self.missing, at);
            if came == 0 {
                continue;
            }
            self.missing[at] &= !came;
            self.missing_blocks -= u64::from(came.count_ones());
            self.rounds.changed([at]);
            changed.push(chunk_mask(&self.missing, at));
            for range in chunk::runs(at, came) {
                self.wake(range);
            }
        }
        changed
    }

    /// Returns the length in blocks of the part of the disk that the source may hold.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Returns how many blocks are missing, as far as the source has listed them.
    pub fn missing_blocks(&self) -> u64 {
        self.missing_blocks
    }

    /// Returns whether the source has listed the blocks that it still holds.
    pub fn is_listed(&self) -> bool {
        self.phase == Phase::Listed
    }

    /// Returns whether all received content is durable.
    pub fn is_durable(&self) -> bool {
        self.rounds.is_durable()
    }

    /// Returns whether all received content and the list are durable, which READY requires.
    pub fn is_settled(&self) -> bool {
        self.is_listed() && self.rounds.is_settled()
    }

    /// Returns whether no block is missing, durably, which ALL-PRESENT requires. It does not depend
    /// on the guest's ongoing writes.
    pub fn is_whole(&self) -> bool {
        self.is_listed() && self.missing_blocks == 0 && self.rounds.are_masks_stored()
    }

    // Durability.

    /// Makes all received content durable, if there is any that is not.
    pub fn settle(&mut self) {
        self.rounds.settle();
        self.begin_round();
    }

    /// Makes received content durable once there is enough of it or it is old enough.
    pub fn tick(&mut self, now: Duration) {
        if self.rounds.is_due(now) {
            self.settle();
        }
    }

    /// Reports that the disk's data is durable as of [`Output::SyncData`], or that the sync failed.
    pub fn data_synced(&mut self, ok: bool) {
        self.rounds.data_synced(ok, &mut self.outputs);
        self.begin_round();
    }

    /// Reports that the masks of [`Output::StoreMasks`] are durable, or that storing them failed.
    pub fn masks_stored(&mut self, ok: bool) {
        self.rounds.masks_stored(ok, &mut self.outputs);
        self.begin_round();
    }

    /// Records that something could not be made durable before this agent started, and that it is
    /// unknown what: the system reports lost data only once. From then on every flush fails, and
    /// the disk never counts as complete, until the host is restarted and only the stored masks
    /// count.
    pub fn give_up_durability(&mut self) {
        self.rounds.give_up(&mut self.outputs);
    }

    fn begin_round(&mut self) {
        let listed = self.is_listed();
        let missing = &self.missing;
        let mask_of = |chunk| chunk_mask(missing, chunk);
        self.rounds.begin(listed, mask_of, &mut self.outputs);
    }

    /// Returns the next action.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }
}

/// Returns the missing blocks of a chunk; none for a chunk that does not exist.
fn mask(missing: &[u64], chunk: usize) -> u64 {
    missing.get(chunk).copied().unwrap_or(0)
}

fn chunk_mask(missing: &[u64], chunk: usize) -> ChunkMask {
    ChunkMask {
        chunk: chunk as u32,
        missing: mask(missing, chunk),
    }
}
