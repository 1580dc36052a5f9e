//! The order of durability: first data, then the masks that declare it present, then flushes
//! complete.
//!
//! ```text
//! Idle --- flush, or enough data -------> Data --- synced ---> Masks --- stored ---> Idle
//!                                           +--- no mask has changed ---------------^
//! ```
//!
//! The masks of a round are taken when it begins: the content that they declare present was written
//! before the sync. A flush that arrives during a round waits for the next one.

use super::{ChunkMask, Output, RequestId};
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

/// Data that is made durable at once, at most,
const UNSYNCED_BYTES_MAX: u64 = 32 << 20;
/// and the longest time that it waits for that.
const UNSYNCED_TIME_MAX: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Step {
    #[default]
    Idle,
    Data,
    Masks,
}

#[derive(Debug, Default)]
pub(super) struct Rounds {
    step: Step,
    /// Chunks whose stored mask is outdated.
    changed: BTreeSet<usize>,
    /// Masks of the round.
    masks: Vec<ChunkMask>,
    waiting: Vec<RequestId>,
    in_round: Vec<RequestId>,
    unsynced_bytes: u64,
    unsynced_since: Option<Duration>,
    /// Whether a round is requested.
    asked: bool,
    /// Whether something could not be made durable.
    broken: bool,
}

impl Rounds {
    /// Records that the masks of these chunks have changed.
    pub(super) fn changed(&mut self, chunks: impl IntoIterator<Item = usize>) {
        self.changed.extend(chunks);
    }

    /// Counts bytes that were written to the disk.
    pub(super) fn written(&mut self, bytes: u64) {
        self.unsynced_bytes += bytes;
    }

    pub(super) fn settle(&mut self) {
        self.asked |= self.unsynced_bytes > 0 || !self.changed.is_empty();
    }

    pub(super) fn is_due(&mut self, now: Duration) -> bool {
        if self.unsynced_bytes == 0 && self.changed.is_empty() {
            self.unsynced_since = None;
            return false;
        }
        let since = *self.unsynced_since.get_or_insert(now);
        let old = now.saturating_sub(since) >= UNSYNCED_TIME_MAX;
        old || self.unsynced_bytes >= UNSYNCED_BYTES_MAX
    }

    /// Returns whether all data is durable; masks may still have to be stored.
    pub(super) fn is_durable(&self) -> bool {
        self.unsynced_bytes == 0 && self.step == Step::Idle
    }

    pub(super) fn is_settled(&self) -> bool {
        let nothing = self.changed.is_empty() && self.unsynced_bytes == 0 && !self.asked;
        nothing && self.step == Step::Idle && !self.broken
    }

    /// Returns whether every mask is stored in its current state, after its data.
    pub(super) fn are_masks_stored(&self) -> bool {
        let in_round = self.step == Step::Masks || !self.masks.is_empty();
        self.changed.is_empty() && !in_round && !self.broken
    }

    pub(super) fn flush(&mut self, id: RequestId, outputs: &mut VecDeque<Output>) {
        match self.broken {
            true => outputs.push_back(Output::FlushFailed(id)),
            false => self.waiting.push(id),
        }
    }

    /// Begins a round if one is requested. Masks count only once the list has arrived.
    pub(super) fn begin(
        &mut self,
        listed: bool,
        mask: impl Fn(usize) -> ChunkMask,
        outputs: &mut VecDeque<Output>,
    ) {
        let needed = self.asked || !self.waiting.is_empty();
        if self.step != Step::Idle || !needed || self.broken {
            return;
        }
        self.asked = false;
        self.unsynced_bytes = 0;
        self.unsynced_since = None;
        self.in_round = std::mem::take(&mut self.waiting);
        if listed {
            let changed = std::mem::take(&mut self.changed);
            self.masks = changed.into_iter().map(mask).collect();
        }
        self.step = Step::Data;
        outputs.push_back(Output::SyncData);
    }

    pub(super) fn data_synced(&mut self, ok: bool, outputs: &mut VecDeque<Output>) {
        if self.step != Step::Data {
            return;
        }
        if ok && !self.masks.is_empty() {
            self.step = Step::Masks;
            outputs.push_back(Output::StoreMasks(std::mem::take(&mut self.masks)));
        } else {
            self.end(ok, outputs);
        }
    }

    pub(super) fn masks_stored(&mut self, ok: bool, outputs: &mut VecDeque<Output>) {
        if self.step == Step::Masks {
            self.end(ok, outputs);
        }
    }

    fn end(&mut self, ok: bool, outputs: &mut VecDeque<Output>) {
        if !ok {
            return self.give_up(outputs);
        }
        self.step = Step::Idle;
        let flushes = std::mem::take(&mut self.in_round);
        outputs.extend(flushes.into_iter().map(Output::Flushed));
    }

    /// Records that something could not be made durable.
    pub(super) fn give_up(&mut self, outputs: &mut VecDeque<Output>) {
        self.step = Step::Idle;
        self.broken = true;
        let in_round = std::mem::take(&mut self.in_round);
        let all = in_round
            .into_iter()
            .chain(std::mem::take(&mut self.waiting));
        outputs.extend(all.map(Output::FlushFailed));
    }
}
