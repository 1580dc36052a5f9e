//! Talks to the arena inside a guest and records the arrival times of its heartbeats.

use crate::interrupt;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

const CONNECT_EVERY: Duration = Duration::from_millis(2);
/// How long none of a guest's sockets may be connected.
const CONNECTED_WITHIN: Duration = Duration::from_secs(30);
/// How long the reader blocks on a silent socket before it checks whether to end.
const READ_SLICE: Duration = Duration::from_millis(100);
/// How long a wait blocks before it checks for an interrupt.
const SLICE: Duration = Duration::from_millis(200);
const LONGEST_LINE: u64 = 64 << 10;
const FAULTS_KEPT: usize = 64;

/// The content of the arena and the way it is rewritten.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    /// `random`, `text` or `mix`.
    pub content: String,
    /// Bytes of pages.
    pub arena_bytes: u64,
    /// The part of them that is rewritten; 0: all.
    pub working_set_bytes: u64,
    /// Pages rewritten per second.
    pub pages_per_s: u64,
    /// Bytes changed in a rewritten page.
    pub write_bytes: u64,
    /// The number of writing threads.
    pub writers: u32,
    /// Pages verified per second.
    pub verify_pages_per_s: u64,
    /// The seed of the content.
    pub seed: u64,
}

impl Workload {
    /// Pages rewritten per second by an arena that is to write as fast as the machine allows: 4
    /// GiB.
    pub const AS_FAST_AS_IT_CAN: u64 = 1 << 20;
}

/// A heartbeat with its arrival time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beat {
    /// When it arrived, by the laboratory's monotonic clock.
    pub at: Instant,
    /// Its number; the guest also counts those that it could not send.
    pub number: u64,
    /// Time since the arena started, by the guest's own clock.
    pub clock_us: u64,
    /// Pages rewritten so far.
    pub writes: u64,
    /// Pages verified so far.
    pub verified: u64,
    /// Pages found wrong so far.
    pub errors: u64,
    /// Units of work of a workload beside the arena so far, where one runs.
    pub work: Option<u64>,
}

impl Beat {
    /// Returns the measure of the guest's progress: its workload's work, or the arena's own.
    pub fn work(&self) -> u64 {
        self.work.unwrap_or(self.writes + self.verified)
    }
}

/// The sockets of heartbeats, which distinguish one copy of a guest from two.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Origins {
    /// The number of new heartbeats from another socket than the one before: once a move.
    pub switches: u64,
    /// The arrival of the heartbeat that was the latest of these.
    pub switched_at: Option<Instant>,
    /// The number of repeated heartbeats, already received from another socket: at most a buffer's
    /// worth a move, and hundreds a second with a second copy.
    pub repeated: u64,
}

/// A page with wrong content.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Fault {
    /// The page's number in the arena.
    #[serde(rename = "fault")]
    pub page: u64,
    /// The expected content.
    pub expected: String,
    /// The actual content.
    pub found: String,
}

/// The result of verifying every page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verified {
    /// Pages checked.
    pub pages: u64,
    /// Pages that were wrong.
    pub errors: u64,
}

/// Why the arena could not be queried.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// No socket of the guest is connected.
    #[error("the guest's arena cannot be reached: none of its sockets is there")]
    NotConnected,
    /// The guest did not answer.
    #[error("the guest's arena did not {what} within {} s", limit.as_secs())]
    TimedOut {
        /// The expected event.
        what: String,
        /// The time limit.
        limit: Duration,
    },
    /// The arena refused.
    #[error("the guest's arena refused: {0}")]
    Refused(String),
    /// The user interrupted.
    #[error("the guest's arena was not waited for: interrupted")]
    Interrupted,
    /// The socket broke.
    #[error("writing to the guest's arena: {0}")]
    Write(#[from] io::Error),
}

/// The arena of one guest, on any host: it listens on every attached socket.
#[derive(Debug)]
pub struct Arena {
    shared: Arc<Shared>,
    next_id: u64,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    closed: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    beats: Vec<Beat>,
    faults: Vec<Fault>,
    answers: HashMap<u64, Value>,
    sockets: HashMap<PathBuf, UnixStream>,
    /// The sockets that are listened on, connected or not.
    attached: HashSet<PathBuf>,
    /// The time of the last heartbeat on each socket, new or not.
    heard: HashMap<PathBuf, Instant>,
    /// The socket of the latest heartbeat: commands go there.
    current: Option<PathBuf>,
    origins: Origins,
    bad_lines: u64,
}

impl Arena {
    /// Creates an arena without a connection.
    pub fn new() -> Self {
        Self {
            shared: Arc::default(),
            next_id: 1,
        }
    }

    /// Listens on a channel's socket from its creation, once: QEMU has one connection at a time.
    pub fn attach(&self, socket: &Path) -> io::Result<()> {
        if !self.shared.state().attached.insert(socket.to_owned()) {
            return Ok(());
        }
        let (shared, path) = (self.shared.clone(), socket.to_owned());
        thread::Builder::new()
            .name("arena".to_owned())
            .spawn(move || shared.listen(&path))?;
        Ok(())
    }

    /// Fills the arena and starts to rewrite it.
    pub fn start(&mut self, workload: &Workload, limit: Duration) -> Result<u64, ArenaError> {
        let command = start_command(workload);
        let answer = self.ask(command, limit)?;
        Ok(answer.get("pages").and_then(Value::as_u64).unwrap_or(0))
    }

    /// Changes the number of pages rewritten per second; 0 stops it.
    pub fn set_rate(&mut self, pages_per_s: u64, limit: Duration) -> Result<(), ArenaError> {
        self.ask(
            json!({"command": "rate", "pages_per_s": pages_per_s}),
            limit,
        )
        .map(drop)
    }

    /// Verifies every page.
    pub fn verify(&mut self, limit: Duration) -> Result<Verified, ArenaError> {
        let answer = self.ask(json!({"command": "verify"}), limit)?;
        let number = |key| answer.get(key).and_then(Value::as_u64);
        match (number("pages"), number("found_errors")) {
            (Some(pages), Some(errors)) => Ok(Verified { pages, errors }),
            _ => Err(ArenaError::Refused(answer.to_string())),
        }
    }

    /// Starts a workload beside the arena: one of the guest's programs for that.
    pub fn start_program(&mut self, name: &str, limit: Duration) -> Result<(), ArenaError> {
        let command = json!({"command": "workload", "name": name});
        self.ask(command, limit).map(drop)
    }

    /// Stops the workload beside the arena and lets it verify its state; returns the number of
    /// errors since its start, and the first of them.
    pub fn check_program(&mut self, limit: Duration) -> Result<(u64, String), ArenaError> {
        let answer = self.ask(json!({"command": "check"}), limit)?;
        let errors = answer.get("found_errors").and_then(Value::as_u64);
        let first = answer.get("first_error").and_then(Value::as_str);
        match (errors, first) {
            (Some(errors), Some(first)) => Ok((errors, first.to_owned())),
            _ => Err(ArenaError::Refused(answer.to_string())),
        }
    }

    /// Waits for a heartbeat that was sent after this call, and returns it.
    pub fn wait_for_beat(&self, limit: Duration) -> Result<Beat, ArenaError> {
        let known = self.shared.state().beats.len();
        let state = self.shared.wait(limit, |state| state.beats.len() > known);
        state
            .and_then(|state| state.beats.last().copied())
            .ok_or(ArenaError::TimedOut {
                what: "send a heartbeat".to_owned(),
                limit,
            })
    }

    /// Returns all heartbeats in the order of arrival.
    pub fn beats(&self) -> Vec<Beat> {
        self.shared.state().beats.clone()
    }

    /// Returns the latest heartbeat.
    pub fn last_beat(&self) -> Option<Beat> {
        self.shared.state().beats.last().copied()
    }

    /// Returns the first pages that were found wrong.
    pub fn faults(&self) -> Vec<Fault> {
        self.shared.state().faults.clone()
    }

    /// Returns the socket of the latest heartbeat.
    pub fn heard_on(&self) -> Option<PathBuf> {
        self.shared.state().current.clone()
    }

    /// Returns the origins of heartbeats so far.
    pub fn origins(&self) -> Origins {
        self.shared.state().origins.clone()
    }

    /// Drops all heartbeats but the last, for a guest that is observed for hours.
    pub fn forget_beats(&self) {
        let mut state = self.shared.state();
        let last = state.beats.last().copied();
        state.beats.clear();
        state.beats.extend(last);
    }

    /// Forgets the guest, which has ended: heartbeats of its next boot count from one.
    pub fn forget_boot(&self) {
        let mut state = self.shared.state();
        state.beats.clear();
        state.faults.clear();
        state.current = None;
    }

    /// Returns the sockets with a heartbeat since then: more than one means two copies of a guest.
    pub fn heard_since(&self, since: Instant) -> Vec<PathBuf> {
        let state = self.shared.state();
        let heard = state.heard.iter().filter(|(_, at)| **at >= since);
        heard.map(|(path, _)| path.clone()).collect()
    }

    fn ask(&mut self, mut command: Value, limit: Duration) -> Result<Value, ArenaError> {
        let id = self.next_id;
        self.next_id += 1;
        let what = command
            .get("command")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        command["id"] = json!(id);
        {
            // After a move its socket on the other host may be a moment away.
            let is_connected = |state: &State| {
                let current = state.current.as_ref();
                current.is_some_and(|path| state.sockets.contains_key(path))
            };
            let within = limit.min(CONNECTED_WITHIN);
            let state = self.shared.wait_patiently(within, is_connected)?;
            let state = state.ok_or(ArenaError::NotConnected)?;
            let path = state.current.as_ref().ok_or(ArenaError::NotConnected)?;
            let mut socket = state.sockets.get(path).ok_or(ArenaError::NotConnected)?;
            socket.write_all(format!("{command}\n").as_bytes())?;
        }
        let answer = self
            .shared
            .wait_patiently(limit, |state| state.answers.contains_key(&id))?
            .and_then(|mut state| state.answers.remove(&id))
            .ok_or(ArenaError::TimedOut { what, limit })?;
        match answer.get("error").and_then(Value::as_str) {
            Some(problem) => Err(ArenaError::Refused(problem.to_owned())),
            None => Ok(answer),
        }
    }
}

impl Default for Arena {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Returns the state once `done` holds for it; `None` after the time limit.
    fn wait(
        &self,
        limit: Duration,
        mut done: impl FnMut(&State) -> bool,
    ) -> Option<MutexGuard<'_, State>> {
        let (state, result) = self
            .changed
            .wait_timeout_while(self.state(), limit, |state| !done(state))
            .unwrap_or_else(PoisonError::into_inner);
        (!result.timed_out()).then_some(state)
    }

    /// As [`Self::wait`], for waits of minutes: also ends at an interrupt.
    fn wait_patiently(
        &self,
        limit: Duration,
        done: impl Fn(&State) -> bool,
    ) -> Result<Option<MutexGuard<'_, State>>, ArenaError> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let found = self.wait(left.min(SLICE), &done);
            if found.is_some() || left.is_zero() {
                return Ok(found);
            }
            if interrupt::requested() {
                return Err(ArenaError::Interrupted);
            }
        }
    }

    /// Reconnects whenever the socket breaks: a guest may return to a host that it left.
    fn listen(&self, path: &Path) {
        while !self.closed() {
            match UnixStream::connect(path) {
                Ok(socket) => {
                    // The end of a socket shows in the missing heartbeats.
                    let _ = self.read(path, socket);
                    self.state().sockets.remove(path);
                }
                Err(_) => thread::sleep(CONNECT_EVERY),
            }
        }
    }

    fn read(&self, path: &Path, socket: UnixStream) -> io::Result<()> {
        socket.set_read_timeout(Some(READ_SLICE))?;
        self.state()
            .sockets
            .insert(path.to_owned(), socket.try_clone()?);
        let mut reader = BufReader::new(socket);
        let mut line = Vec::new();
        while !self.closed() {
            match reader.read_until(b'\n', &mut line) {
                Ok(0) => break,
                Ok(_) if line.ends_with(b"\n") => {
                    self.take_line(path, &line, Instant::now());
                    line.clear();
                }
                Ok(_) => {}
                Err(error) if is_timeout(&error) => {}
                Err(error) => return Err(error),
            }
            if line.len() as u64 > LONGEST_LINE {
                line.clear();
            }
        }
        Ok(())
    }

    fn take_line(&self, path: &Path, line: &[u8], at: Instant) {
        let value: Value = serde_json::from_slice(line).unwrap_or(Value::Null);
        let number = |key| value.get(key).and_then(Value::as_u64);
        let mut state = self.state();
        if let Some(beat) = number("beat") {
            state.heard.insert(path.to_owned(), at);
            let newest = state.beats.last().is_none_or(|last| last.number < beat);
            let elsewhere = state.current.as_deref().is_some_and(|known| known != path);
            if newest && elsewhere {
                state.origins.switches += 1;
                state.origins.switched_at = Some(at);
            }
            state.origins.repeated += u64::from(!newest && elsewhere);
            // A buffer that both QEMUs had may arrive twice; only newer numbers count.
            if newest {
                state.current = Some(path.to_owned());
                state.beats.push(Beat {
                    at,
                    number: beat,
                    clock_us: number("clock_us").unwrap_or(0),
                    writes: number("writes").unwrap_or(0),
                    verified: number("verified").unwrap_or(0),
                    errors: number("errors").unwrap_or(0),
                    work: number("work"),
                });
            }
        } else if let Some(id) = number("answer") {
            state.answers.insert(id, value);
        } else if let Ok(fault) = serde_json::from_value::<Fault>(value) {
            if state.faults.len() < FAULTS_KEPT {
                state.faults.push(fault);
            }
        } else {
            state.bad_lines += 1;
        }
        drop(state);
        self.changed.notify_all();
    }
}

fn start_command(workload: &Workload) -> Value {
    json!({
        "command": "start",
        "content": workload.content,
        "arena_bytes": workload.arena_bytes,
        "working_set_bytes": workload.working_set_bytes,
        "pages_per_s": workload.pages_per_s,
        "write_bytes": workload.write_bytes,
        "writers": workload.writers,
            "verify_pages_per_s": workload.verify_pages_per_s,
        "seed": workload.seed,
    })
}

fn is_timeout(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn a_guest_is_heard_on_the_socket_that_it_moved_to() {
        let folder = tempfile::tempdir().unwrap();
        let (here, there) = (folder.path().join("here"), folder.path().join("there"));
        let listener = UnixListener::bind(&here).unwrap();
        let (mut arena, began) = (Arena::new(), Instant::now());
        arena.attach(&here).unwrap();
        arena.attach(&there).unwrap();
        let (mut guest, _) = listener.accept().unwrap();
        guest
            .write_all(b"garbage\n{\"beat\":1,\"writes\":5,\"verified\":2}\n")
            .unwrap();
        wait_for_beat(&arena, 1);
        assert_eq!(arena.last_beat().unwrap().work(), 7);
        assert_eq!(arena.heard_on(), Some(here));

        let listener = UnixListener::bind(&there).unwrap();
        let (mut moved, _) = listener.accept().unwrap();
        moved
            .write_all(b"{\"beat\":1}\n{\"beat\":2,\"errors\":3,\"work\":9}\n")
            .unwrap();
        wait_for_beat(&arena, 2);
        assert_eq!(arena.last_beat().unwrap().work(), 9);
        assert_eq!(arena.heard_on(), Some(there));
        assert_eq!(arena.beats().len(), 2);
        assert_eq!(arena.heard_since(began).len(), 2);
        let origins = Origins {
            switches: 1,
            switched_at: arena.last_beat().map(|beat| beat.at),
            repeated: 1,
        };
        assert_eq!(arena.origins(), origins);
        assert!(arena.heard_since(Instant::now()).is_empty());

        let answering = thread::spawn(move || {
            let mut line = String::new();
            BufReader::new(moved.try_clone().unwrap())
                .read_line(&mut line)
                .unwrap();
            let id = serde_json::from_str::<Value>(&line).unwrap()["id"]
                .as_u64()
                .unwrap();
            let fault = "{\"fault\":7,\"expected\":\"a\",\"found\":\"b\"}";
            let answer = format!("{fault}\n{{\"answer\":{id},\"pages\":9,\"found_errors\":1}}\n");
            moved.write_all(answer.as_bytes()).unwrap();
            moved
        });
        assert_eq!(
            arena.verify(LIMIT).unwrap(),
            Verified {
                pages: 9,
                errors: 1
            }
        );
        assert_eq!(arena.faults()[0].page, 7);
        drop(answering.join().unwrap());
    }

    #[test]
    fn silence_is_an_error_that_names_what_was_asked() {
        let mut arena = Arena::new();
        let error = arena.verify(Duration::from_millis(1)).unwrap_err();
        assert!(matches!(error, ArenaError::NotConnected), "{error}");
        let error = arena
            .wait_for_beat(Duration::from_millis(1))
            .unwrap_err()
            .to_string();
        assert!(error.contains("send a heartbeat"), "{error}");
    }

    fn wait_for_beat(arena: &Arena, number: u64) {
        let done = |state: &State| state.beats.last().is_some_and(|beat| beat.number == number);
        assert!(arena.shared.wait(LIMIT, done).is_some());
    }
}
