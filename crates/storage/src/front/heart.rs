//! The heartbeat of a server: it reports to the supervisor how long the oldest request has been in
//! the server's own code ([`pulse`]).

use crate::pulse;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Time between two beats.
pub const INTERVAL: Duration = Duration::from_millis(200);
/// The name of the heartbeat thread.
pub(super) const HEART: &str = "heart";
/// The first bytes of a beat, which distinguish it from anything else.
const MAGIC: &[u8; 8] = b"lh-beat\n";
/// Bytes of a beat: the magic, and a time in milliseconds, little-endian.
pub(super) const BEAT_BYTES: usize = 16;

/// Parses a beat.
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

/// A thread that sends beats. It does nothing else, and accesses no disk.
#[derive(Debug)]
pub(super) struct Heart(Arc<Beats>);

#[derive(Debug)]
struct Beats {
    socket: UnixDatagram,
    heard: AtomicBool,
}

impl Heart {
    /// Sends beats on a datagram socket for as long as the process runs and the socket has a
    /// receiver.
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

    /// Returns whether the last beat had a receiver.
    pub(super) fn is_heard(&self) -> bool {
        self.0.heard.load(Ordering::Relaxed)
    }

    /// Sends a beat now. Returns whether it had a receiver.
    pub(super) fn beat(&self) -> bool {
        self.0.beat()
    }
}

impl Beats {
    fn beat(&self) -> bool {
        let heard = match self.socket.send(&beat(pulse::oldest())) {
            Ok(_) => true,
            // A receiver whose queue is full has had enough beats.
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
    use std::time::Instant;

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
