//! The gate that a guest's writes pass: it is closed for the moment of a checkpoint.

use super::copy_log::CopyLog;
use super::record::{WriteMap, is_wanted};
use crate::front::watched::WriteSink;
use crate::nbd::others_go_on;
use crate::pulse::elsewhere;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The time between two attempts to make a mask durable without which no write begins.
const AGAIN: Duration = Duration::from_millis(200);

/// What a guest's writes pass.
#[derive(Debug)]
pub(super) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Until when it is closed. After that it opens by itself.
    closed: Option<Instant>,
    /// Writes that have passed and are not complete.
    under_way: u64,
    number: u64,
    round: Arc<WriteMap>,
    log: Option<Arc<CopyLog>>,
}

impl Gate {
    /// Returns an open gate; writes are recorded in this round.
    pub(super) fn new((number, round): (u64, WriteMap)) -> Self {
        Self {
            state: Mutex::new(State {
                closed: None,
                under_way: 0,
                number,
                round: Arc::new(round),
                log: None,
            }),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of the current round.
    pub(super) fn round(&self) -> u64 {
        self.lock().number
    }

    /// Closes the gate until this moment at the latest, and waits until no write is under way.
    /// Returns whether that is so; otherwise the gate is open again.
    pub(super) fn close(&self, until: Instant) -> bool {
        let mut state = self.lock();
        state.closed = Some(until);
        while state.under_way > 0 {
            let Some(left) = until.checked_duration_since(Instant::now()) else {
                break;
            };
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let is_closed = state.under_way == 0 && Instant::now() < until;
        if !is_closed {
            self.open(state);
        }
        is_closed
    }

    fn open(&self, mut state: MutexGuard<'_, State>) {
        state.closed = None;
        drop(state);
        self.changed.notify_all();
    }

    /// Opens the gate.
    pub(super) fn release(&self) {
        self.open(self.lock());
    }

    /// Opens the gate, if it is still closed, and lets all later writes go to the next round and to
    /// this log. `last` completes the log by what the round before has recorded. Returns the log;
    /// `None` if the gate was open.
    pub(super) fn switch(
        &self,
        round: WriteMap,
        mut log: CopyLog,
        last: impl FnOnce(&WriteMap, &mut CopyLog) -> io::Result<()>,
    ) -> io::Result<Option<Arc<CopyLog>>> {
        let mut state = self.lock();
        let Some(until) = state.closed else {
            return Ok(None);
        };
        last(&state.round, &mut log)?;
        if Instant::now() >= until {
            self.open(state);
            return Ok(None);
        }
        let log = Arc::new(log);
        state.number += 1;
        state.round = Arc::new(round);
        state.log = Some(log.clone());
        self.open(state);
        Ok(Some(log))
    }

    /// Ends the log of a checkpoint.
    pub(super) fn end_log(&self) {
        self.lock().log = None;
    }

    /// Waits while the gate is closed, and passes it.
    fn pass(&self) -> io::Result<(Arc<WriteMap>, Option<Arc<CopyLog>>)> {
        let mut state = self.lock();
        if state.closed.is_some() {
            drop(state);
            others_go_on(|| elsewhere(|| self.wait_until_open()));
            is_wanted()?;
            return self.pass();
        }
        state.under_way += 1;
        Ok((state.round.clone(), state.log.clone()))
    }

    fn wait_until_open(&self) {
        let mut state = self.lock();
        while let Some(until) = state.closed {
            let Some(left) = until.checked_duration_since(Instant::now()) else {
                self.open(state);
                return;
            };
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn leave(&self) {
        let mut state = self.lock();
        state.under_way -= 1;
        let waits = state.closed.is_some() && state.under_way == 0;
        drop(state);
        if waits {
            self.changed.notify_all();
        }
    }
}

impl WriteSink for Arc<Gate> {
    fn begins(&self, bytes: &Range<u64>) -> io::Result<()> {
        let (round, log) = self.pass()?;
        // Like a disk that does not answer, for as long as the record cannot be made.
        while round.note(bytes).is_err() {
            others_go_on(|| elsewhere(|| thread::sleep(AGAIN)));
            if let Err(error) = is_wanted() {
                self.leave();
                return Err(error);
            }
        }
        if let Some(log) = log {
            elsewhere(|| log.keep(bytes));
        }
        Ok(())
    }

    fn done(&self, _: Range<u64>) {
        self.leave();
    }

    fn took(&self, _: Duration) {}
}
