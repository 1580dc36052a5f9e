//! What of a disk is at its destination: which blocks are still at the source, what may be written
//! over, and what has to be durable before what.
//!
//! ```text
//! Copying --- list, last part ---> Listed --- sealed ---> the guest may run here
//!    ^                               |
//!    +---- a new connection ---------+        (until it is sealed)
//! ```
//!
//! *Copying*: whatever comes is applied. *Listed*: the source has said what it still has; all else is
//! here as soon as the frames from before the list have come. Of what is missing,
//!
//! - a frame brings a block only if no write of the guest has touched it: what is written here wins;
//! - a read, and a write of a part of a block, wait for it, and it is asked for;
//! - a write of all of it needs nothing, and the source is told that the block need not come.
//!
//! Whoever owns one keeps these rules:
//!
//! 1. `accepts`, the writing of what it accepts, and `arrived` happen under one lock, which `begin`
//!    and `done` take as well.
//! 2. What `arrived` and `done` return is noted, before that lock is given back and before the guest
//!    is answered, where the death of the agent does not reach it but a power cut does (a file in
//!    memory). With it a restarted agent goes on ([`Presence::restored`]).
//! 3. Steps of durability are done in the order in which [`Presence::poll`] gives them: data is synced,
//!    then masks are stored and synced, then a flush is answered. After a power cut the stored masks
//!    are what is known.
//! 4. That a step has failed outlives the owner as long as the host runs ([`Presence::give_up_durability`]).

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

/// Which blocks of a chunk are still at the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkMask {
    /// The chunk.
    pub chunk: u32,
    /// The blocks, the first in the lowest bit.
    pub missing: u64,
}

/// What the owner has to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Do these bytes of the request on the local disk, then report it `done`.
    Go(RequestId, std::ops::Range<u64>),
    /// Answer this request with an error: the source cannot read what it waited for.
    Unreadable(RequestId),
    /// Tell the source that somebody waits for these blocks.
    Want(BlockRange),
    /// Tell the source that these blocks need not come.
    Superseded(BlockRange),
    /// Make durable what has been written to the disk so far, then report it `data_synced`.
    SyncData,
    /// Store these masks and make that durable, then report it `masks_stored`.
    StoreMasks(Vec<ChunkMask>),
    /// Answer this flush.
    Flushed(RequestId),
    /// Answer this flush with an error: nobody knows what is durable any more.
    FlushFailed(RequestId),
}

/// A list that cannot be one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ListError {
    /// It is of another region, or names chunks that the region does not have.
    #[error("the list names what is no part of this disk")]
    Unknown,
    /// A part is missing or came twice.
    #[error("a part of the list begins at chunk {chunk}, and another was expected")]
    Order {
        /// Where it begins.
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

/// One disk on its way in, and while what is left of it is fetched.
#[derive(Debug)]
pub struct Presence {
    region: RegionId,
    blocks: u64,
    epoch: Epoch,
    phase: Phase,
    /// Frames from this number on bring what is missing.
    from_seq: u64,
    sealed: bool,
    /// Blocks that are still at the source, by chunk.
    missing: Vec<u64>,
    missing_blocks: u64,
    written_blocks: Vec<u16>,
    guest: Guest,
    rounds: Rounds,
    outputs: VecDeque<Output>,
}

impl Presence {
    /// A disk of which nothing has arrived.
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

    /// A disk that was handed over before this agent was started, as it was `noted` last, or, after a
    /// power cut, as it was `stored` last. Either way, what was stored says what has yet to be stored.
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
        // No connection is there yet.
        restored.epoch = Epoch(0);
        Ok(restored)
    }

    /// Its region.
    pub fn region(&self) -> RegionId {
        self.region
    }

    fn chunks(&self) -> u32 {
        chunk::count(self.blocks) as u32
    }

    // The source.

    /// A new connection. What was on its way on the old one is sent again; before anything else the
    /// source is to be told what is [missing](Presence::lacks).
    pub fn connected(&mut self, epoch: Epoch) {
        self.epoch = epoch;
        if self.sealed {
            // All that comes from now on is what is left.
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

    /// A part of the source's list.
    pub fn listed(&mut self, list: &List) -> Result<(), ListError> {
        if self.sealed {
            // A source that has not heard of READY: what is missing is said here from now on.
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

    /// Blocks of a chunk are not here.
    fn lack(&mut self, chunk: usize, mask: u64) {
        let more = mask & !self.missing[chunk];
        self.missing[chunk] |= more;
        self.missing_blocks += u64::from(more.count_ones());
        self.rounds.changed([chunk]);
    }

    /// Blocks that a frame was to bring could not be used, and the source has been told so.
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

    /// Nothing that was sent before the list is taken any more: all of it is here.
    pub fn seal(&mut self) {
        self.sealed = true;
    }

    /// Whether a block that a frame of this connection brings is to be written.
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

    /// Accepted blocks have been written. Returns what is to be noted.
    pub fn arrived(&mut self, range: BlockRange, seq: u64) -> Vec<ChunkMask> {
        self.rounds.written(range.count * BLOCK_SIZE as u64);
        if self.phase != Phase::Listed || seq < self.from_seq {
            return Vec::new();
        }
        self.present(range)
    }

    /// What the source has to send: a part of the list, from this chunk on. Also says where the next
    /// part begins.
    pub fn lacks(&self, from_chunk: u32, entries_max: usize) -> (Vec<Remaining>, Option<u32>) {
        remaining::collect(from_chunk..self.chunks(), entries_max, |chunk| {
            let written = self.written_blocks.get(chunk).copied().unwrap_or(0);
            (mask(&self.missing, chunk), written)
        })
    }

    // What is here.

    /// Whether a block is still at the source, as far as that has said so.
    pub fn is_missing(&self, block: u64) -> bool {
        mask(&self.missing, chunk::of(block)) & chunk::bit(block) != 0
    }

    /// These blocks are here now. Returns the masks that have changed.
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

    /// How many blocks the disk has, as far as its source may have something of it.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// How many blocks are still at the source, as far as it has said.
    pub fn missing_blocks(&self) -> u64 {
        self.missing_blocks
    }

    /// Whether the source has said what it still has.
    pub fn is_listed(&self) -> bool {
        self.phase == Phase::Listed
    }

    /// Whether all content that came is durable.
    pub fn is_durable(&self) -> bool {
        self.rounds.is_durable()
    }

    /// Whether everything that came is durable, and so is the list: READY asks for it.
    pub fn is_settled(&self) -> bool {
        self.is_listed() && self.rounds.is_settled()
    }

    /// Whether nothing is left at the source, durably: ALL-PRESENT asks for it. What the guest writes
    /// all the time does not matter for that.
    pub fn is_whole(&self) -> bool {
        self.is_listed() && self.missing_blocks == 0 && self.rounds.are_masks_stored()
    }

    // Durability.

    /// Makes everything durable that came so far, if anything did.
    pub fn settle(&mut self) {
        self.rounds.settle();
        self.begin_round();
    }

    /// Makes durable what came, when there is enough of it or it is old enough.
    pub fn tick(&mut self, now: Duration) {
        if self.rounds.is_due(now) {
            self.settle();
        }
    }

    /// The disk's data is durable as of [`Output::SyncData`], or it failed.
    pub fn data_synced(&mut self, ok: bool) {
        self.rounds.data_synced(ok, &mut self.outputs);
        self.begin_round();
    }

    /// The masks of [`Output::StoreMasks`] are durable, or it failed.
    pub fn masks_stored(&mut self, ok: bool) {
        self.rounds.masks_stored(ok, &mut self.outputs);
        self.begin_round();
    }

    /// Something could not be made durable before this agent was started, and nobody knows what: a system tells of
    /// lost data once. No flush succeeds any more, and nothing is ever whole, until the host is started anew and
    /// only what was stored counts.
    pub fn give_up_durability(&mut self) {
        self.rounds.give_up(&mut self.outputs);
    }

    fn begin_round(&mut self) {
        let listed = self.is_listed();
        let missing = &self.missing;
        let mask_of = |chunk| chunk_mask(missing, chunk);
        self.rounds.begin(listed, mask_of, &mut self.outputs);
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }
}

/// The blocks of a chunk that are missing; none of one that does not exist.
fn mask(missing: &[u64], chunk: usize) -> u64 {
    missing.get(chunk).copied().unwrap_or(0)
}

fn chunk_mask(missing: &[u64], chunk: usize) -> ChunkMask {
    ChunkMask {
        chunk: chunk as u32,
        missing: mask(missing, chunk),
    }
}
