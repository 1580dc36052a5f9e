//! The guest's requests to a disk of which a part is still at the source.

use super::{ChunkMask, Output, Phase, Presence};
use crate::chunk;
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Requests at a time, at most.
const REQUESTS_MAX: usize = 4096;
const BLOCK: u64 = BLOCK_SIZE as u64;

/// The owner's name for a request that is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// What the guest wants done to a range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Read them.
    Read,
    /// Write them, or make them zero.
    Write,
    /// It needs their content no more.
    Discard,
}

/// What becomes of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Begin {
    /// Do these bytes on the local disk, then report it done. A discard may have shrunk to nothing.
    Go(Range<u64>),
    /// It waits for the source: [`Output::Go`] says when.
    Wait,
}

/// A request that cannot be one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// It is not within the disk.
    #[error("a request beyond the end of the disk")]
    Beyond,
    /// Another one of this name is under way.
    #[error("two requests have the same name")]
    Twice,
    /// More at a time than are kept.
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

/// Requests under way.
#[derive(Debug, Default)]
pub(super) struct Guest {
    requests: BTreeMap<RequestId, Request>,
    /// Missing blocks that are being written as a whole, and by how many.
    intents: BTreeMap<u64, u32>,
    /// Missing blocks that somebody waits for.
    wanted: BTreeSet<u64>,
}

impl Guest {
    pub(super) fn intends(&self, block: u64) -> bool {
        self.intents.contains_key(&block)
    }

    /// What is waited for, as ranges.
    pub(super) fn wanted(&self) -> Vec<BlockRange> {
        ranges(self.wanted.iter().copied())
    }
}

impl Request {
    /// The blocks that it covers from end to end.
    fn whole_blocks(&self) -> BlockRange {
        let (first, end) = (self.bytes.start.div_ceil(BLOCK), self.bytes.end / BLOCK);
        BlockRange::new(first, end.saturating_sub(first))
    }

    /// Every block that it touches.
    fn blocks(&self) -> BlockRange {
        let first = self.bytes.start / BLOCK;
        BlockRange::new(first, self.bytes.end.div_ceil(BLOCK).saturating_sub(first))
    }

    /// Of the blocks that it touches, those whose content it needs.
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
    /// The guest asks for something.
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

    /// The guest asks for what it wrote to be durable.
    pub fn flush(&mut self, id: RequestId) {
        self.rounds.flush(id, &mut self.outputs);
        self.begin_round();
    }

    /// A request begins to be done: what it writes as a whole is not fetched meanwhile.
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

    /// A request that was told to go has been done, or has failed. Returns what is to be noted before
    /// the guest is answered.
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
            // It may have come meanwhile, and was turned away.
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

    /// These blocks are here: who waited for nothing else goes on.
    pub(super) fn wake(&mut self, range: BlockRange) {
        // A peer may name far more blocks than the guest waits for.
        let wanted = self.guest.wanted.range(range.start..range.end());
        let wanted: Vec<u64> = wanted.copied().collect();
        for block in wanted {
            self.guest.wanted.remove(&block);
        }
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

    /// Nobody waits for this request any more. One that was told to go has to be reported done.
    pub fn forget(&mut self, id: RequestId) {
        let requests = &mut self.guest.requests;
        if requests.get(&id).is_some_and(|request| !request.going) {
            requests.remove(&id);
        }
    }

    /// The source cannot read these blocks: whoever waits for one of them is refused, and whoever asks
    /// for one later has the source try again.
    pub fn unreadable(&mut self, range: BlockRange) {
        for block in range.blocks() {
            self.guest.wanted.remove(&block);
        }
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

    /// Requests that wait for the source.
    pub fn waiting(&self) -> usize {
        let requests = self.guest.requests.values();
        requests.filter(|request| !request.going).count()
    }
}

/// Ascending blocks as ranges, none of them over more than a chunk.
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
