//! The pulse of a server: how long the oldest request has been in the server's own code. Its
//! heartbeat ([`crate::front`]) reports that to the supervisor.
//!
//! Time that a request spends [`elsewhere`] does not count: a file system may take minutes, a link
//! may be down for an hour, and killing the server would help with neither.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// For each thread: since when its request has been in the server's own code, in milliseconds since
/// the first thread began, plus one; 0 outside of it.
static THREADS: Mutex<Vec<Weak<AtomicU64>>> = Mutex::new(Vec::new());
static START: OnceLock<Instant> = OnceLock::new();

thread_local! {
    static OWN: RefCell<Option<Own>> = const { RefCell::new(None) };
}

struct Own {
    start: Instant,
    since_ms: Arc<AtomicU64>,
}

impl Own {
    fn new() -> Self {
        let since_ms = Arc::new(AtomicU64::new(0));
        let mut threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| thread.strong_count() > 0);
        threads.push(Arc::downgrade(&since_ms));
        drop(threads);
        let start = start();
        Self { start, since_ms }
    }

    fn mark(&self, inside: bool) {
        // The clock is read only where needed: this runs in every request.
        let since_ms = match inside {
            true => u64::try_from(self.start.elapsed().as_millis()).map_or(u64::MAX, |ms| ms + 1),
            false => 0,
        };
        self.since_ms.store(since_ms, Ordering::Relaxed);
    }

    fn is_inside(&self) -> bool {
        self.since_ms.load(Ordering::Relaxed) > 0
    }
}

fn start() -> Instant {
    *START.get_or_init(Instant::now)
}

/// Restores this thread's mark, even when it panics.
struct Back(bool);

impl Drop for Back {
    fn drop(&mut self) {
        OWN.with_borrow(|own| {
            if let Some(own) = own {
                own.mark(self.0);
            }
        });
    }
}

/// Carries out a request in the server's own code.
pub fn request<T>(work: impl FnOnce() -> T) -> T {
    OWN.with_borrow_mut(|own| own.get_or_insert_with(Own::new).mark(true));
    let _back = Back(false);
    work()
}

/// Waits, in the middle of a request or otherwise, for something that does not depend on the
/// server: a file, a link, a peer.
pub fn elsewhere<T>(wait: impl FnOnce() -> T) -> T {
    let inside = OWN.with_borrow(|own| match own {
        Some(own) if own.is_inside() => {
            own.mark(false);
            true
        }
        _ => false,
    });
    let _back = inside.then(|| Back(true));
    wait()
}

/// Returns how long the oldest request has been in the server's own code.
pub fn oldest() -> Duration {
    let threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
    let threads = threads.iter().filter_map(Weak::upgrade);
    let since = threads.map(|since| since.load(Ordering::Relaxed));
    since.filter_map(time_since).max().unwrap_or_default()
}

/// Returns the time since a mark, if it is one.
fn time_since(since_ms: u64) -> Option<Duration> {
    let since = Duration::from_millis(since_ms);
    (since_ms > 0).then(|| start().elapsed().saturating_sub(since))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// Returns how long this thread's request has been in the server's own code.
    fn own() -> Option<Duration> {
        let since_ms = |own: &Own| own.since_ms.load(Ordering::Relaxed);
        OWN.with_borrow(|own| time_since(own.as_ref().map_or(0, since_ms)))
    }

    #[test]
    fn time_with_the_server_counts_and_time_elsewhere_does_not() {
        const LONG: Duration = Duration::from_millis(20);
        elsewhere(|| assert_eq!(own(), None));
        request(|| {
            thread::sleep(LONG);
            let oldest = thread::spawn(oldest).join().unwrap();
            // In whole milliseconds, rounded down at the start.
            assert!(oldest >= LONG - Duration::from_millis(2), "{oldest:?}");
            let back = elsewhere(|| {
                assert_eq!(own(), None);
                Instant::now()
            });
            let since_back = own().unwrap();
            assert!(since_back <= back.elapsed() + Duration::from_millis(2));
        });
        assert_eq!(own(), None);
        let panicked = || {
            let work = std::panic::AssertUnwindSafe(|| request(|| panic!("as meant")));
            std::panic::catch_unwind(work).unwrap_err();
            own()
        };
        assert_eq!(thread::spawn(panicked).join().unwrap(), None);
    }
}
