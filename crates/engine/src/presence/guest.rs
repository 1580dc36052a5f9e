//! The guest's requests to a disk of which some blocks are missing.

use super::{ChunkMask, Output, Phase, Presence};
use crate::chunk;
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Limit on concurrent requests.
const REQUESTS_MAX: usize = 4096;
const BLOCK: u64 = BLOCK_SIZE as u64;

/// The owner's name for a pending request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// What a request of the guest does to a range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Read them.
    Read,
    /// Write them, or zero them.
    Write,
    /// Discard them: the guest no longer needs their content.
    Discard,
}

/// The outcome of a new request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Begin {
    /// Perform the request on these bytes of the local disk, then report it done. A discard may
    /// have shrunk to nothing.
    Go(Range<u64>),
    /// The request waits for the source: [`Output::Go`] follows.
    Wait,
}

/// An invalid request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// It exceeds the disk.
    #[error("a request beyond the end of the disk")]
    Beyond,
    /// Another request with this name is pending.
    #[error("two requests have the same name")]
    Twice,
    /// Too many requests are pending.
    #[error("more than {REQUESTS_MAX} requests at a time")]
    TooMany,
}

#[derive(Debug)]
struct Request {
    operation: Operation,
    bytes: Range<u64>,
    /// Blocks that have to be here first.
    needs: BTreeSet<u64>,
    going: bool,
}

/// The pending requests.
#[derive(Debug, Default)]
pub(super) struct Guest {
    requests: BTreeMap<RequestId, Request>,
    /// Missing blocks that are being written as a whole, with the number of requests that write
    /// them.
    intents: BTreeMap<u64, u32>,
    /// Missing blocks that requests wait for.
    wanted: BTreeSet<u64>,
}

impl Guest {
    pub(super) fn intends(&self, block: u64) -> bool {
        self.intents.contains_key(&block)
    }

    /// Returns the wanted blocks as ranges.
    pub(super) fn wanted(&self) -> Vec<BlockRange> {
        ranges(self.wanted.iter().copied())
    }

    /// Forgets that these blocks are wanted. A peer may name far more blocks than are.
    fn want_no_more(&mut self, range: BlockRange) {
        let wanted = self.wanted.range(range.start..range.end());
        let wanted: Vec<u64> = wanted.copied().collect();
        for block in wanted {
            self.wanted.remove(&block);
        }
    }
}

impl Request {
    /// Returns the blocks that the request covers completely.
    fn whole_blocks(&self) -> BlockRange {
        let (first, end) = (self.bytes.start.div_ceil(BLOCK), self.bytes.end / BLOCK);
        BlockRange::new(first, end.saturating_sub(first))
    }

    /// Returns every block that the request touches.
    fn blocks(&self) -> BlockRange {
        let first = self.bytes.start / BLOCK;
        BlockRange::new(first, self.bytes.end.div_ceil(BLOCK).saturating_sub(first))
    }

    /// Returns whether the request needs the old content of a block that it touches.
    fn reads(&self, block: u64) -> bool {
        match self.operation {
            Operation::Read => true,
            Operation::Write | Operation::Discard => {
                let whole = self.whole_blocks();
                !(whole.start..whole.end()).contains(&block)
            }
        }
    }
}

impl Presence {
    /// Begins a request of the guest.
    pub fn begin(
        &mut self,
        id: RequestId,
        operation: Operation,
        bytes: Range<u64>,
    ) -> Result<Begin, RequestError> {
        let size = self.blocks * BLOCK;
        if bytes.start > bytes.end || bytes.end > size {
            return Err(RequestError::Beyond);
        }
        if self.guest.requests.contains_key(&id) {
            return Err(RequestError::Twice);
        }
        if self.guest.requests.len() >= REQUESTS_MAX {
            return Err(RequestError::TooMany);
        }
        let mut request = Request {
            operation,
            bytes,
            needs: BTreeSet::new(),
            going: false,
        };
        if operation == Operation::Discard {
            let whole = request.whole_blocks();
            request.bytes = whole.start * BLOCK..whole.end() * BLOCK;
        }
        if self.phase == Phase::Listed && !request.bytes.is_empty() {
            let missing = request.blocks().blocks().filter(|b| self.is_missing(*b));
            request.needs = missing.filter(|block| request.reads(*block)).collect();
        }
        let needs = &request.needs;
        let guest = &mut self.guest;
        let news: Vec<u64> = needs
            .iter()
            .copied()
            .filter(|block| !guest.intents.contains_key(block) && guest.wanted.insert(*block))
            .collect();
        self.outputs
            .extend(ranges(news.into_iter()).into_iter().map(Output::Want));
        let bytes = request.bytes.clone();
        let waits = !request.needs.is_empty();
        self.guest.requests.insert(id, request);
        if waits {
            return Ok(Begin::Wait);
        }
        self.go(id);
        Ok(Begin::Go(bytes))
    }

    /// Begins a flush of the guest.
    pub fn flush(&mut self, id: RequestId) {
        self.rounds.flush(id, &mut self.outputs);
        self.begin_round();
    }

    /// Begins to perform a request: blocks that it writes as a whole are not fetched meanwhile.
    fn go(&mut self, id: RequestId) {
        let Some(request) = self.guest.requests.get_mut(&id) else {
            return;
        };
        request.going = true;
        if request.operation == Operation::Read {
            return;
        }
        let whole = request.whole_blocks();
        for block in whole.blocks().filter(|_| self.phase == Phase::Listed) {
            if self.is_missing(block) {
                *self.guest.intents.entry(block).or_default() += 1;
            }
        }
    }

    /// Ends a request that was told to go, successfully or not. Returns the masks to record before
    /// the guest's request completes.
    pub fn done(&mut self, id: RequestId, ok: bool) -> Vec<ChunkMask> {
        let Some(request) = self.guest.requests.remove(&id) else {
            return Vec::new();
        };
        if request.operation == Operation::Read {
            return Vec::new();
        }
        let whole = request.whole_blocks();
        let mut intended = Vec::new();
        for block in whole.blocks() {
            if let Some(writers) = self.guest.intents.get_mut(&block) {
                *writers -= 1;
                if *writers == 0 {
                    self.guest.intents.remove(&block);
                }
                intended.push(block);
            }
        }
        if !ok {
            // The block may have arrived meanwhile, and was not accepted.
            let again = intended
                .into_iter()
                .filter(|block| self.is_missing(*block) && !self.guest.intents.contains_key(block));
            let again: Vec<u64> = again.collect();
            self.guest.wanted.extend(again.iter().copied());
            self.outputs
                .extend(ranges(again.into_iter()).into_iter().map(Output::Want));
            return Vec::new();
        }
        let written = request.bytes.end.saturating_sub(request.bytes.start);
        self.rounds.written(written);
        let missing = intended.into_iter().filter(|block| self.is_missing(*block));
        let superseded = ranges(missing.collect::<Vec<_>>().into_iter());
        let mut changed = Vec::new();
        for range in superseded {
            self.outputs.push_back(Output::Superseded(range));
            changed.extend(self.present(range));
        }
        changed
    }

    /// Records that these blocks are here: requests that waited for nothing else proceed.
    pub(super) fn wake(&mut self, range: BlockRange) {
        self.guest.want_no_more(range);
        let mut ready = Vec::new();
        for (id, request) in &mut self.guest.requests {
            if request.going {
                continue;
            }
            request
                .needs
                .retain(|block| !(range.start..range.end()).contains(block));
            if request.needs.is_empty() {
                ready.push((*id, request.bytes.clone()));
            }
        }
        for (id, bytes) in ready {
            self.go(id);
            self.outputs.push_back(Output::Go(id, bytes));
        }
    }

    /// Drops a waiting request. A request that was told to go has to be reported done.
    pub fn forget(&mut self, id: RequestId) {
        let requests = &mut self.guest.requests;
        if requests.get(&id).is_some_and(|request| !request.going) {
            requests.remove(&id);
        }
    }

    /// Records that the source cannot read these blocks: requests that wait for one of them fail,
    /// and a later request makes the source try again.
    pub fn unreadable(&mut self, range: BlockRange) {
        self.guest.want_no_more(range);
        let waits = |request: &Request| {
            let mut needs = request.needs.iter();
            !request.going && needs.any(|block| (range.start..range.end()).contains(block))
        };
        let requests = self.guest.requests.iter();
        let refused: Vec<RequestId> = requests
            .filter(|(_, request)| waits(request))
            .map(|(id, _)| *id)
            .collect();
        for id in refused {
            self.guest.requests.remove(&id);
            self.outputs.push_back(Output::Unreadable(id));
        }
    }

    /// Returns the number of requests that wait for the source.
    pub fn waiting(&self) -> usize {
        let requests = self.guest.requests.values();
        requests.filter(|request| !request.going).count()
    }
}

/// Returns ascending blocks as ranges of at most a chunk each.
fn ranges(blocks: impl Iterator<Item = u64>) -> Vec<BlockRange> {
    let mut ranges: Vec<BlockRange> = Vec::new();
    for block in blocks {
        match ranges.last_mut() {
            Some(last) if last.end() == block && chunk::of(last.start) == chunk::of(block) => {
                last.count += 1;
            }
            _ => ranges.push(BlockRange::new(block, 1)),
        }
    }
    ranges
}
