//! Which of a connection's threads reads its requests. One reads and does them, one after the other:
//! to hand each to another thread costs more than most of them take. Only a request that waits for
//! somebody else ([`others_go_on`]) lets another thread read what comes behind it.

use std::cell::RefCell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Requests of a connection that may wait while others go on, and the bytes of their payloads.
const WAITING_MAX: usize = 16;
const WAITING_BYTES_MAX: usize = 32 << 20;

thread_local! {
    /// The turn of this thread, in the middle of a request of so many bytes.
    static OWN: RefCell<Option<(Turn, usize)>> = const { RefCell::new(None) };
    /// The connection whose request this thread does.
    static CONNECTION: RefCell<Option<Arc<Turns>>> = const { RefCell::new(None) };
}

/// Whether nobody waits any more for the request that this thread does: of its connection nothing more is
/// read. Only seen while others go on.
pub(crate) fn client_is_gone() -> bool {
    CONNECTION.with_borrow(|of| of.as_ref().is_some_and(|turns| turns.is_over()))
}

/// Waits for something that may take long. Meanwhile another thread reads the requests behind this
/// one, if this is in the middle of one, and not too many wait already.
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
#[derive(Debug, Default)]
pub(super) struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    taken: bool,
    ended: bool,
    /// Threads, and those of them that wait in the middle of a request or have the turn.
    threads: usize,
    busy: usize,
    waiting: usize,
    waiting_bytes: usize,
}

/// The turn to read requests, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn(Arc<Turns>);

impl Turns {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing is done under it that could leave it half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more thread, if there is need of one: another can go on should the one that reads wait.
    pub(super) fn needs_another(&self) -> bool {
        let mut state = self.lock();
        let needs = state.threads == state.busy && !state.ended && state.threads < WAITING_MAX + 2;
        state.threads += usize::from(needs);
        needs
    }

    /// A thread that was counted is not there.
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

    /// Nothing more is read.
    pub(super) fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }

    /// Whether nothing more is read.
    pub(super) fn is_over(&self) -> bool {
        self.lock().ended
    }

    /// Ends the connection should this thread panic: nobody would answer its request.
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
        }
        may
    }
}

impl Turn {
    /// Does a request with a payload of so many bytes; the turn is back unless it was given up.
    pub(super) fn during<T>(self, bytes: usize, work: impl FnOnce() -> T) -> (T, Option<Self>) {
        CONNECTION.set(Some(self.0.clone()));
        OWN.set(Some((self, bytes)));
        let done = work();
        CONNECTION.set(None);
        (done, OWN.take().map(|(turn, _)| turn))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.taken = false;
        state.busy -= 1;
        // Nobody would answer the request of a thread that panics.
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
    }
}
