//! Receives the reports of the program in the guest, from any host.

use crate::error::{During, LabError};
use longhaul_history::order::Told;
use serde::Deserialize;
use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

const CONNECT_EVERY: Duration = Duration::from_millis(2);
const LONGEST_LINE: u64 = 64 << 10;

/// The reports so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Heard {
    /// The acknowledged operations.
    pub told: Told,
    /// Sectors written with content.
    pub written: u64,
    /// Sectors that the guest has read and compared.
    pub verified: u64,
    /// The number of errors.
    pub errors: u64,
    /// The first of them.
    pub first_error: Option<String>,
    /// Whether it has ended and has read everything once more.
    pub ended: bool,
}

/// A line of the program's output.
#[derive(Debug, Deserialize)]
struct Report {
    done: u64,
    mask: u32,
    quiet: bool,
    written: u64,
    verified: u64,
    errors: u64,
    first_error: Option<String>,
    ended: bool,
}

/// Listens to the program on every attached socket.
#[derive(Debug, Default)]
pub(super) struct Teller {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    closed: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    heard: Heard,
    sockets: HashMap<PathBuf, UnixStream>,
    /// The sockets that are listened on, connected or not.
    attached: HashSet<PathBuf>,
}

impl Teller {
    /// Listens on a channel's socket from its creation, once: QEMU has one connection at a time.
    pub(super) fn attach(&self, socket: &Path) -> Result<(), LabError> {
        if !self.shared.state().attached.insert(socket.to_owned()) {
            return Ok(());
        }
        let (shared, path) = (self.shared.clone(), socket.to_owned());
        thread::Builder::new()
            .name("history".to_owned())
            .spawn(move || shared.listen(&path))
            .map(drop)
            .during(|| "start a thread".to_owned())
    }

    /// Sends a line if the guest is connected; returns whether it was.
    pub(super) fn send(&self, line: &str) -> Result<bool, LabError> {
        match self.shared.state().sockets.values().next() {
            None => Ok(false),
            Some(mut socket) => socket
                .write_all(format!("{line}\n").as_bytes())
                .map(|()| true)
                .during(|| "write to the guest's channel for histories".to_owned()),
        }
    }

    pub(super) fn heard(&self) -> Heard {
        self.shared.state().heard.clone()
    }

    /// Returns whether some socket is connected, so that more reports may arrive.
    pub(super) fn is_connected(&self) -> bool {
        !self.shared.state().sockets.is_empty()
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Relaxed);
        for socket in self.shared.state().sockets.values() {
            // It may be closed already.
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reconnects whenever the socket breaks: a guest may return to a host that it left.
    fn listen(&self, path: &Path) {
        while !self.closed.load(Ordering::Relaxed) {
            if let Ok(socket) = UnixStream::connect(path)
                && let Ok(writing) = socket.try_clone()
            {
                self.state().sockets.insert(path.to_owned(), writing);
                self.read(socket);
                self.state().sockets.remove(path);
            }
            thread::sleep(CONNECT_EVERY);
        }
    }

    /// Reads until the socket ends, including data that QEMU sent before it was killed.
    fn read(&self, socket: UnixStream) {
        let mut reader = BufReader::new(socket);
        let mut line = String::new();
        loop {
            line.clear();
            match reader.by_ref().take(LONGEST_LINE).read_line(&mut line) {
                Ok(length) if length > 0 => self.take_line(&line),
                _ => return,
            }
        }
    }

    fn take_line(&self, line: &str) {
        // A line truncated by a crash is ignored.
        let Ok(report) = serde_json::from_str::<Report>(line) else {
            return;
        };
        let heard = &mut self.state().heard;
        heard.told = heard.told.and(Told {
            done: report.done,
            mask: report.mask,
            quiet: report.quiet,
        });
        heard.written = heard.written.max(report.written);
        heard.verified = heard.verified.max(report.verified);
        heard.errors = heard.errors.max(report.errors);
        heard.first_error = heard.first_error.take().or(report.first_error);
        heard.ended |= report.ended;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::wait_until;
    use std::os::unix::net::UnixListener;

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn all_that_was_sent_before_the_end_is_heard_on_every_socket() {
        let folder = tempfile::tempdir().unwrap();
        let teller = Teller::default();
        let paths = ["here", "there"].map(|name| folder.path().join(name));
        for path in &paths {
            teller.attach(path).unwrap();
        }
        assert!(!teller.send("nobody is there").unwrap());
        let listener = UnixListener::bind(&paths[0]).unwrap();
        let (mut guest, _) = listener.accept().unwrap();
        assert!(wait_until(LIMIT, || teller.send("start").unwrap()));
        let mut line = [0; 6];
        guest.read_exact(&mut line).unwrap();
        assert_eq!(&line, b"start\n");
        let say = |done: u64, rest: &str| {
            format!(
                "{{\"done\":{done},\"mask\":5,\"quiet\":false,\"written\":8,\"verified\":3,\
                 \"errors\":{rest}}}\n"
            )
        };
        let lines = say(7, "0,\"ended\":false") + "noise\n{\"done\":99";
        guest.write_all(lines.as_bytes()).unwrap();
        drop((guest, listener));
        assert!(wait_until(LIMIT, || !teller.is_connected()));
        assert_eq!(teller.heard().told.done, 7);

        let listener = UnixListener::bind(&paths[1]).unwrap();
        let (mut moved, _) = listener.accept().unwrap();
        let lines = say(6, "0,\"ended\":false") + &say(9, "1,\"first_error\":\"e\",\"ended\":true");
        moved.write_all(lines.as_bytes()).unwrap();
        assert!(wait_until(LIMIT, || teller.heard().ended));
        let heard = teller.heard();
        assert_eq!((heard.told.done, heard.told.mask), (9, 5));
        assert_eq!((heard.errors, heard.first_error.as_deref()), (1, Some("e")));
    }
}
