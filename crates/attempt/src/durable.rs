//! What an attempt makes durable, and tries again when that fails.

use longhaul_engine::handover::Record;
use std::time::Duration;

/// Between two tries of an action that failed here.
pub(crate) const RETRY_EVERY: Duration = Duration::from_secs(1);

/// The first record after which a note is not made again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// The journal is removed after it.
    Closed,
    /// The guest's name is free after it: a later attempt may have noted something by then.
    Aborted,
}

/// The pending records and notes of one end. `N` is a note of who may run the guest.
#[derive(Debug, Clone)]
pub(crate) struct Durable<N> {
    order: Order,
    /// A record that waits for its next try, or CLOSED that waits for the rest.
    unwritten: Option<Record>,
    /// A note that is being made, or waits for its next try.
    unnoted: Option<N>,
    /// Whether that note has failed.
    note_failed: bool,
    retry_at: Option<Duration>,
}

impl<N: Clone + PartialEq> Durable<N> {
    pub(crate) fn new(order: Order) -> Self {
        Self {
            order,
            unwritten: None,
            unnoted: None,
            note_failed: false,
            retry_at: None,
        }
    }

    /// Returns whether a record can be written now. One after which the note is not made again
    /// waits for it, and until `settled` holds.
    pub(crate) fn may_write(&mut self, record: &Record, settled: bool) -> bool {
        let last = match self.order {
            Order::Closed => matches!(record, Record::Closed { .. }),
            Order::Aborted => matches!(record, Record::Closed { .. } | Record::Aborted { .. }),
        };
        let waits = last && !(settled && self.unnoted.is_none());
        if waits {
            self.unwritten = Some(record.clone());
        }
        !waits
    }

    /// Keeps a record for its next try.
    pub(crate) fn keep(&mut self, record: Record, now: Duration) {
        self.unwritten = Some(record);
        self.retry(now);
    }

    /// Begins a note. It replaces an earlier one that could not be made.
    pub(crate) fn note(&mut self, note: N) {
        self.unnoted = Some(note);
        self.note_failed = false;
    }

    pub(crate) fn noted(&mut self, note: &N) {
        if self.unnoted.as_ref() == Some(note) {
            self.unnoted = None;
        }
    }

    pub(crate) fn note_failed(&mut self, note: &N, now: Duration) {
        if self.unnoted.as_ref() == Some(note) {
            self.note_failed = true;
            self.retry(now);
        }
    }

    /// Schedules the next try.
    pub(crate) fn retry(&mut self, now: Duration) {
        self.retry_at.get_or_insert(now + RETRY_EVERY);
    }

    pub(crate) fn retry_at(&self) -> Option<Duration> {
        self.retry_at
    }

    /// Takes a due retry: the note to make again, if one failed, and whether a retry is due.
    pub(crate) fn due(&mut self, now: Duration) -> (bool, Option<N>) {
        if self.retry_at.is_none_or(|at| at > now) {
            return (false, None);
        }
        self.retry_at = None;
        let failed = std::mem::take(&mut self.note_failed);
        (true, self.unnoted.clone().filter(|_| failed))
    }

    /// Takes the record that waits, if it can be written now.
    pub(crate) fn take_unwritten(&mut self, settled: bool) -> Option<Record> {
        let record = self.unwritten.take()?;
        self.may_write(&record, settled).then_some(record)
    }
}
