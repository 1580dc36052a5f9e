//! Decides which of a connection's threads reads its requests. One thread reads and carries them
//! out in order: handing each to another thread would cost more than most of them take. Only a
//! request that waits for another party ([`others_go_on`]) lets another thread read the requests
//! behind it.
//!
//! QEMU (10.0 at least) may withhold a reply from the guest while another request waits, until the
//! next reply arrives (docs/decisions/0030). So a connection is hung up on which a request waits,
//! another was answered, and nothing happens any more: its client reconnects, and repeats the
//! unanswered requests.

use std::cell::RefCell;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Limits on the requests of a connection that wait while others proceed, and on the bytes of their
/// payloads.
const WAITING_MAX: usize = 16;
const WAITING_BYTES_MAX: usize = 32 << 20;

thread_local! {
    /// The turn of this thread, in the middle of a request with a payload of this length.
    static OWN: RefCell<Option<(Turn, usize)>> = const { RefCell::new(None) };
    /// The connection whose request this thread carries out.
    static CONNECTION: RefCell<Option<Arc<Turns>>> = const { RefCell::new(None) };
}

/// Returns whether the client of the request that this thread carries out is gone: nothing more of
/// its connection is read. It is detected only while others proceed, and is to be checked
/// periodically there, and once more when the wait has ended: such a request must not be carried
/// out, since the client repeats it.
pub(crate) fn client_is_gone() -> bool {
    CONNECTION.with_borrow(|of| of.as_ref().is_some_and(|turns| turns.is_over_by_now()))
}

/// Waits for something that may take long. Meanwhile another thread reads the requests behind this
/// one, if this thread carries out a request and not too many wait already.
pub fn others_go_on<T>(wait: impl FnOnce() -> T) -> T {
    let own = OWN.take();
    let (turn, bytes) = match own {
        Some((turn, bytes)) if turn.0.may_wait(bytes) => (turn, bytes),
        kept => {
            OWN.set(kept);
            return wait();
        }
    };
    let waiting = Waiting(turn.0.clone(), bytes);
    drop(turn);
    let done = wait();
    drop(waiting);
    done
}

/// The turns of one connection.
#[derive(Debug)]
pub(super) struct Turns {
    state: Mutex<State>,
    changed: Condvar,
    hang_up: HangUp,
}

/// How a connection is hung up whose client may withhold a reply.
pub struct HangUp {
    /// The time without a request or a reply.
    pub after: Duration,
    /// Closes the connection at once, in both directions.
    pub close: Box<dyn Fn() + Send + Sync>,
}

impl fmt::Debug for HangUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HangUp")
            .field("after", &self.after)
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct State {
    taken: bool,
    ended: bool,
    /// The threads, and those of them that wait in the middle of a request or have the turn.
    threads: usize,
    busy: usize,
    waiting: usize,
    waiting_bytes: usize,
    /// Requests that are being carried out, and do not wait.
    doing: usize,
    /// Whether a request was answered while another waited.
    answered_beside: bool,
    /// The time of the last request or reply.
    at: Instant,
}

impl State {
    /// Returns whether the client may be withholding a reply.
    fn may_be_kept_back(&self, quiet: Duration) -> bool {
        self.waiting > 0 && self.doing == 0 && self.answered_beside && self.at.elapsed() >= quiet
    }
}

/// The turn to read requests, held until it is dropped.
#[derive(Debug)]
pub(super) struct Turn(Arc<Turns>);

impl Turns {
    pub(super) fn new(hang_up: HangUp) -> Self {
        Self {
            state: Mutex::new(State {
                taken: false,
                ended: false,
                threads: 0,
                busy: 0,
                waiting: 0,
                waiting_bytes: 0,
                doing: 0,
                answered_beside: false,
                at: Instant::now(),
            }),
            changed: Condvar::new(),
            hang_up,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No operation under the lock leaves the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one more thread if one is needed, which can continue should the reading one wait.
    pub(super) fn needs_another(&self) -> bool {
        let mut state = self.lock();
        let needs = state.threads == state.busy && !state.ended && state.threads < WAITING_MAX + 2;
        state.threads += usize::from(needs);
        needs
    }

    /// Corrects the count for a thread that could not be started.
    pub(super) fn is_missing(&self) {
        self.lock().threads -= 1;
    }

    /// Waits for the turn; `None` when nothing more is read.
    pub(super) fn take(self: &Arc<Self>) -> Option<Turn> {
        let turned = |state: &mut State| state.taken && !state.ended;
        let waited = self.changed.wait_while(self.lock(), turned);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        if state.ended {
            return None;
        }
        state.taken = true;
        state.busy += 1;
        Some(Turn(self.clone()))
    }

    /// Ends the reading of requests.
    pub(super) fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }

    /// Returns whether nothing more is read.
    pub(super) fn is_over(&self) -> bool {
        self.lock().ended
    }

    /// Returns whether nothing more is read, and hangs up a connection whose client may withhold a
    /// reply. None of its requests is being carried out at that moment or afterwards, so the
    /// client's repetitions are not overtaken by the first attempts.
    fn is_over_by_now(&self) -> bool {
        let mut state = self.lock();
        if !state.ended && state.may_be_kept_back(self.hang_up.after) {
            (self.hang_up.close)();
            state.ended = true;
            self.changed.notify_all();
        }
        state.ended
    }

    /// Ends the connection should this thread panic, which would leave its request unanswered.
    pub(super) fn end_in_panic(&self) -> impl Drop {
        struct Ending<'a>(&'a Turns);
        impl Drop for Ending<'_> {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    self.0.end();
                }
            }
        }
        Ending(self)
    }

    fn may_wait(&self, bytes: usize) -> bool {
        let mut state = self.lock();
        let others = state.threads > state.busy;
        let may = others
            && state.waiting < WAITING_MAX
            && state.waiting_bytes + bytes <= WAITING_BYTES_MAX;
        if may {
            state.waiting += 1;
            state.waiting_bytes += bytes;
            state.busy += 1;
            state.doing -= 1;
        }
        may
    }
}

impl Turn {
    /// Carries out and answers a request with a payload of this length; the turn is kept unless it
    /// was given up. `None` when the connection has ended since the request was read: its client
    /// repeats it.
    pub(super) fn during<T>(
        self,
        bytes: usize,
        work: impl FnOnce() -> T,
    ) -> Option<(T, Option<Self>)> {
        let turns = self.0.clone();
        {
            let mut state = turns.lock();
            if state.ended {
                return None;
            }
            state.doing += 1;
            state.at = Instant::now();
        }
        CONNECTION.set(Some(turns.clone()));
        OWN.set(Some((self, bytes)));
        let done = work();
        CONNECTION.set(None);
        let mut state = turns.lock();
        state.doing -= 1;
        state.at = Instant::now();
        state.answered_beside |= state.waiting > 0;
        drop(state);
        Some((done, OWN.take().map(|(turn, _)| turn)))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.taken = false;
        state.busy -= 1;
        // The request of a panicking thread would stay unanswered.
        state.ended |= std::thread::panicking();
        drop(state);
        self.0.changed.notify_one();
    }
}

/// A thread that waits in the middle of a request.
struct Waiting(Arc<Turns>, usize);

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.waiting -= 1;
        state.waiting_bytes -= self.1;
        state.busy -= 1;
        state.doing += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_read_before_the_end_is_not_done_after_it() {
        let turns = Arc::new(Turns::new(HangUp {
            after: Duration::MAX,
            close: Box::new(|| ()),
        }));
        let turn = turns.take().unwrap();
        let (done, back) = turn.during(512, || 7).unwrap();
        assert_eq!(done, 7);
        turns.end();
        assert!(back.unwrap().during(512, || 8).is_none());
        assert!(turns.take().is_none());
    }
}
