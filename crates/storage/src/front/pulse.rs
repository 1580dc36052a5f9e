//! What the threads of a server say of themselves to whoever supervises it: how long the oldest
//! request has been with the server's own code.
//!
//! Time that a request spends [`elsewhere`] is not the server's: a file system may take minutes, a
//! link may be cut for an hour, and to kill the server would mend neither.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Time between two beats.
pub const INTERVAL: Duration = Duration::from_millis(200);
/// The name of the thread that beats.
pub(super) const HEART: &str = "heart";
/// What a beat begins with, so that nothing else is taken for one.
const MAGIC: &[u8; 8] = b"lh-beat\n";
/// Bytes of a beat: the magic, and a time in milliseconds, little-endian.
pub(super) const BEAT_BYTES: usize = 16;

/// Of each thread: since when it is with the server's own code, in milliseconds since the first
/// thread began, plus one; 0 when it is not.
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
        // The clock is asked only where its answer is needed: it is asked in every request.
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

/// Sets what this thread says of itself back, also when it panics.
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

/// Does a request with the server's own code.
pub fn request<T>(work: impl FnOnce() -> T) -> T {
    OWN.with_borrow_mut(|own| own.get_or_insert_with(Own::new).mark(true));
    let _back = Back(false);
    work()
}

/// Waits, in the middle of a request or otherwise, for something that does not depend on the server:
/// a file, a link, a peer.
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

/// How long the oldest request has been with the server's own code.
pub fn oldest() -> Duration {
    let threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
    let threads = threads.iter().filter_map(Weak::upgrade);
    let since = threads.map(|since| since.load(Ordering::Relaxed));
    let oldest = since.filter(|since_ms| *since_ms > 0).min();
    oldest.map_or(Duration::ZERO, |since_ms| {
        start()
            .elapsed()
            .saturating_sub(Duration::from_millis(since_ms))
    })
}

/// What a beat says, if it is one.
pub(super) fn read_beat(bytes: &[u8]) -> Option<Duration> {
    let oldest_ms = bytes.strip_prefix(MAGIC)?.try_into().ok()?;
    Some(Duration::from_millis(u64::from_le_bytes(oldest_ms)))
}

fn beat(oldest: Duration) -> [u8; BEAT_BYTES] {
    let mut beat = [0; BEAT_BYTES];
    beat[..8].copy_from_slice(MAGIC);
    let oldest_ms = u64::try_from(oldest.as_millis()).unwrap_or(u64::MAX);
    beat[8..].copy_from_slice(&oldest_ms.to_le_bytes());
    beat
}

/// A thread that beats. It does nothing else, and touches no disk.
#[derive(Debug)]
pub(super) struct Heart(Arc<Beats>);

#[derive(Debug)]
struct Beats {
    socket: UnixDatagram,
    heard: AtomicBool,
}

impl Heart {
    /// Beats on a datagram socket for as long as the process runs and somebody hears it.
    pub(super) fn start(socket: OwnedFd) -> io::Result<Self> {
        let socket = UnixDatagram::from(socket);
        socket.set_nonblocking(true)?;
        let beats = Arc::new(Beats {
            socket,
            heard: AtomicBool::new(true),
        });
        let beating = beats.clone();
        thread::Builder::new()
            .name(HEART.to_owned())
            .spawn(move || {
                while beating.beat() {
                    thread::sleep(INTERVAL);
                }
            })?;
        Ok(Self(beats))
    }

    /// Whether somebody was there to hear the last beat.
    pub(super) fn is_heard(&self) -> bool {
        self.0.heard.load(Ordering::Relaxed)
    }

    /// Beats now; whether somebody is there to hear it.
    pub(super) fn beat(&self) -> bool {
        self.0.beat()
    }
}

impl Beats {
    fn beat(&self) -> bool {
        let heard = match self.socket.send(&beat(oldest())) {
            Ok(_) => true,
            // Who does not take them now has heard enough.
            Err(error) => matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
            ),
        };
        self.heard.store(heard, Ordering::Relaxed);
        heard
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_with_the_server_counts_and_time_elsewhere_does_not() {
        // The only test that uses it in this process, but for those of a few milliseconds.
        const LONG: Duration = Duration::from_millis(300);
        elsewhere(|| ());
        let (seen, after) = request(|| {
            thread::sleep(LONG);
            let seen = thread::spawn(oldest).join().unwrap();
            elsewhere(|| assert!(oldest() < LONG));
            (seen, oldest())
        });
        assert!(seen >= LONG - Duration::from_millis(2), "{seen:?}");
        assert!(after < LONG, "{after:?}");
        let panicked = thread::spawn(|| request(|| panic!("as meant"))).join();
        panicked.unwrap_err();
        assert!(oldest() < LONG);
    }

    #[test]
    fn beats_are_told_from_anything_else() {
        let time = Duration::from_millis(1234);
        assert_eq!(read_beat(&beat(time)), Some(time));
        for wrong in [&b""[..], b"running 1 test\n", MAGIC, &[0; BEAT_BYTES]] {
            assert_eq!(read_beat(wrong), None);
        }
    }

    #[test]
    fn a_heart_knows_when_nobody_hears_it() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        let heart = Heart::start(theirs.into()).unwrap();
        let mut beat = [0; BEAT_BYTES];
        assert_eq!(ours.recv(&mut beat).unwrap(), BEAT_BYTES);
        read_beat(&beat).unwrap();
        assert!(heart.is_heard());
        drop(ours);
        let until = Instant::now() + Duration::from_secs(60);
        while heart.is_heard() {
            assert!(Instant::now() < until, "it beats for nobody");
            thread::sleep(Duration::from_millis(5));
        }
    }
}
