//! Attempts that were closed recently.

use crate::handover::ledger::Ledger;
use crate::host::lock::lock;
use longhaul_protocol::{AttemptId, HostId};
use std::collections::VecDeque;
use std::sync::Mutex;

/// Limit on the number of closed attempts that are remembered.
const CLOSED_MAX: usize = 256;

/// Attempts that were closed recently. A delayed question about one of them must not count as a
/// question about an attempt that never began: that would make a record that is never removed. A
/// delayed offer of one of them is refused, since its source would not return for the result.
#[derive(Default)]
pub(crate) struct Closed(Mutex<VecDeque<(HostId, AttemptId)>>);

impl Closed {
    /// Removes the journal of an attempt that is closed on both sides, and ends what it has left
    /// undone of its guest.
    pub(crate) fn add(&self, source: HostId, ledger: Ledger) {
        let attempt = (source, ledger.attempt_id());
        let mut closed = lock(&self.0);
        closed.truncate(CLOSED_MAX - 1);
        closed.push_front(attempt);
        drop(closed);
        // An attempt that never began here names no guest.
        if !ledger.guest.is_empty() {
            ledger.context.parts.guests.settle_guest(&ledger.guest);
        }
        ledger.remove_journal();
    }

    /// Returns whether an attempt was closed here recently.
    pub(crate) fn has(&self, source: HostId, attempt: AttemptId) -> bool {
        lock(&self.0).contains(&(source, attempt))
    }
}
