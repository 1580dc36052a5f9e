//! Blocks of memory by `postcopy` that travel before the guest is stopped: those that it uses at
//! once and does not write, such as its code. Without them it would wait a round trip for each, one
//! after the other. The stop waits for them for a limited time.

use super::{Source, SourceError};
use longhaul_protocol::{BlockRange, RegionId};
use std::time::Duration;

/// Limits on the time in which these blocks have to be named, and to be sent after that.
const NAMED_WITHIN: Duration = Duration::from_secs(2);
const SENT_WITHIN: Duration = Duration::from_secs(3);

/// The state of these blocks.
#[derive(Debug, Default)]
pub(super) enum Ahead {
    /// There are none, or the stop no longer waits for them.
    #[default]
    Nothing,
    /// They will be named. The stop has waited for that since the time, if it has.
    Sought(Option<Duration>),
    /// They are known, and travel when a pass has named all blocks: it names those again that were
    /// sent before.
    Named(RegionId, Vec<u64>),
    /// They travel, until this time at most.
    Travels(RegionId, Duration),
}

impl Source {
    /// Lets the stop wait until the blocks that travel ahead are [named](Source::ahead), or known
    /// to be none.
    pub fn seek_ahead(&mut self) {
        self.ahead = Ahead::Sought(None);
    }

    /// Names blocks of memory of which nothing has to travel before the switchover, in the order in
    /// which they travel ahead.
    pub fn ahead(&mut self, id: RegionId, blocks: Vec<u64>) -> Result<(), SourceError> {
        let fills = self.region(id, BlockRange::new(0, 0))?.fills();
        if matches!(self.ahead, Ahead::Sought(_)) {
            self.ahead = match fills && !self.frozen && !blocks.is_empty() {
                true => Ahead::Named(id, blocks),
                false => Ahead::Nothing,
            };
        }
        Ok(())
    }

    /// Records that no block is known to be used.
    pub fn nothing_ahead(&mut self) {
        self.ahead = Ahead::Nothing;
    }

    /// Returns whether the stop waits for blocks that travel ahead. A pass has been read.
    pub(super) fn waits_for_ahead(&mut self, now: Duration) -> bool {
        let waits = match &mut self.ahead {
            Ahead::Nothing => false,
            Ahead::Sought(since) => {
                let since = *since.get_or_insert(now);
                now.saturating_sub(since) < NAMED_WITHIN
            }
            Ahead::Named(id, blocks) => {
                let (id, blocks) = (*id, std::mem::take(blocks));
                let map = &mut self.regions[id].map;
                map.expect(blocks.into_iter().map(|block| block as usize));
                self.ahead = Ahead::Travels(id, now + SENT_WITHIN);
                true
            }
            Ahead::Travels(id, until) => now < *until && self.regions[*id].map.expects(),
        };
        if !waits {
            if let Ahead::Travels(id, _) = self.ahead {
                self.regions[id].map.expect_nothing();
            }
            self.ahead = Ahead::Nothing;
        }
        waits
    }
}
