//! The server's side of checkpoints: requests and answers on a socket, a line of JSON for each.
//!
//! ```text
//! ──prepare──▶   writes wait, and none is under way
//! ◀───held────
//! ──commit───▶   the next round begins, the log is there, writes go on
//! ◀─committed─
//! ──copied───▶   the image was read up to here
//! ◀───valid───   and what was read is as it was at the checkpoint
//! ──shipped──▶   the copy of a closed round is durable
//! ◀───done────   the image is durable too, and the round is forgotten
//! ```
//!
//! A connection that ends opens the gate and ends the log. A checkpoint does not outlive the
//! server: rounds do, so that the next checkpoint has all changes.

use super::copy_log::CopyLog;
use super::gate::Gate;
use super::record::WriteMap;
use super::rounds::{self, Changed};
use crate::disk::{Disk, RawDisk};
use crate::files::RealFiles;
use crate::front::folder::{FolderError, FrontFolder, failed};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Longest request or answer, in bytes.
pub(super) const LINE_BYTES_MAX: u64 = 4096;
/// Longest time that a guest's writes wait for a checkpoint, whatever is asked for.
const HOLD_MAX: Duration = Duration::from_secs(2);
/// Time for a client to take an answer.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Ask {
    /// What is the current round?
    Current,
    /// Close the gate.
    Prepare {
        /// The first round whose changes are to be copied; `None` for the whole image.
        from: Option<u64>,
        hold_ms: u64,
        log_bytes_max: u64,
    },
    Commit,
    Copied {
        to: u64,
    },
    Shipped {
        round: u64,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Answer {
    Current {
        round: u64,
    },
    Held,
    Committed {
        round: u64,
        image_bytes: u64,
    },
    /// A round whose changes are to be copied was forgotten.
    Forgotten,
    Valid,
    Done,
    Failed {
        why: String,
    },
}

/// Writes a line.
pub(super) fn send(mut stream: &UnixStream, what: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(what).map_err(io::Error::other)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Reads a line; `None` at the end.
pub(super) fn receive<T: for<'a> Deserialize<'a>>(
    stream: &mut BufReader<UnixStream>,
) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    let read = stream.take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
    match read {
        0 => Ok(None),
        _ => serde_json::from_slice(&line)
            .map(Some)
            .map_err(io::Error::other),
    }
}

/// Accepts connections. One of them at a time has a checkpoint.
pub(super) fn listen(folder: &FrontFolder, gate: &Arc<Gate>) -> Result<(), FolderError> {
    let path = folder.checkpoints();
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(&path, error)),
        _ => {}
    }
    let listener = UnixListener::bind(&path).map_err(|error| failed(&path, error))?;
    let (folder, gate) = (folder.clone(), gate.clone());
    let is_taken = Arc::new(AtomicBool::new(false));
    let accept = move || {
        // A client that cannot be accepted connects again.
        for stream in listener.incoming().flatten() {
            let mut session = Session {
                folder: folder.clone(),
                gate: gate.clone(),
                is_taken: is_taken.clone(),
                state: State::Idle,
            };
            let spawned = thread::Builder::new()
                .name("checkpoint".to_owned())
                .spawn(move || session.run(stream));
            // Without a thread the stream is closed, and the client connects again.
            drop(spawned);
        }
    };
    let spawned = thread::Builder::new()
        .name("checkpoints".to_owned())
        .spawn(accept);
    spawned.map(drop).map_err(|error| failed(&path, error))
}

#[derive(Debug)]
enum State {
    Idle,
    /// The gate is closed.
    Held(Option<Box<Prepared>>),
    /// The log is kept.
    Committed(Arc<CopyLog>),
}

#[derive(Debug)]
struct Prepared {
    /// The round that is closed.
    round: u64,
    next: WriteMap,
    log: CopyLog,
}

#[derive(Debug)]
struct Session {
    folder: FrontFolder,
    gate: Arc<Gate>,
    is_taken: Arc<AtomicBool>,
    state: State,
}

type Refusal = String;

fn text(error: impl ToString) -> Refusal {
    error.to_string()
}

impl Session {
    fn run(&mut self, stream: UnixStream) -> io::Result<()> {
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut lines = BufReader::new(stream);
        while let Some(ask) = receive(&mut lines)? {
            let answer = self.carry_out(ask);
            let answer = answer.unwrap_or_else(|why| Answer::Failed { why });
            send(lines.get_ref(), &answer)?;
        }
        Ok(())
    }

    fn carry_out(&mut self, ask: Ask) -> Result<Answer, Refusal> {
        let record = self.folder.tracked_writes();
        match (ask, &self.state) {
            (Ask::Current, _) => {
                let round = self.gate.round();
                Ok(Answer::Current { round })
            }
            (
                Ask::Prepare {
                    from,
                    hold_ms,
                    log_bytes_max,
                },
                State::Idle,
            ) => self.prepare(from, Duration::from_millis(hold_ms), log_bytes_max),
            (Ask::Commit, State::Held(_)) => self.commit(),
            (Ask::Copied { to }, State::Committed(log)) => {
                log.copied(to);
                match log.lost() {
                    None => Ok(Answer::Valid),
                    Some(why) => Err(why.to_owned()),
                }
            }
            (Ask::Shipped { round }, _) => {
                // What was copied may not be on the disk yet: without its record, a power cut would
                // leave an image that differs from the copy.
                let spec = self.folder.spec().map_err(text)?;
                let image = RawDisk::open(&spec.image, spec.size).map_err(text)?;
                image.flush().map_err(text)?;
                let closed = self.gate.round().saturating_sub(1);
                rounds::forget(&RealFiles, &record, round.min(closed)).map_err(text)?;
                self.end();
                Ok(Answer::Done)
            }
            (ask, state) => Err(format!("{ask:?} does not follow {state:?}")),
        }
    }

    fn prepare(
        &mut self,
        from: Option<u64>,
        hold: Duration,
        log_bytes_max: u64,
    ) -> Result<Answer, Refusal> {
        if self.is_taken.swap(true, Ordering::AcqRel) {
            return Err("another checkpoint of this disk is being copied".to_owned());
        }
        let made = self.make(from, log_bytes_max);
        let made = made.inspect_err(|_| self.is_taken.store(false, Ordering::Release))?;
        let Some(prepared) = made else {
            self.is_taken.store(false, Ordering::Release);
            return Ok(Answer::Forgotten);
        };
        self.state = State::Held(Some(Box::new(prepared)));
        // Everything slow is done.
        if !self.gate.close(Instant::now() + hold.min(HOLD_MAX)) {
            self.end();
            let ms = hold.min(HOLD_MAX).as_millis();
            return Err(format!(
                "writes that had begun were not complete after {ms} ms"
            ));
        }
        Ok(Answer::Held)
    }

    /// Makes the next round and the log; `None` if a round was forgotten.
    fn make(&self, from: Option<u64>, log_bytes_max: u64) -> Result<Option<Prepared>, Refusal> {
        let record = self.folder.tracked_writes();
        let round = self.gate.round();
        rounds::forget_unused(&RealFiles, &record, round).map_err(text)?;
        rounds::merge(&RealFiles, &record).map_err(text)?;
        let changed = match from {
            Some(from) => {
                let changed = Changed::between(&RealFiles, &record, (from, round)).map_err(text)?;
                let Some(changed) = changed else {
                    return Ok(None);
                };
                changed.with_growth()
            }
            None => std::iter::once(0..u64::MAX).collect(),
        };
        let log = CopyLog::create(&self.folder, &changed, log_bytes_max).map_err(text)?;
        let next = rounds::create(&RealFiles, &record, round + 1, log.image_bytes());
        let next = next.map_err(text)?;
        Ok(Some(Prepared { round, next, log }))
    }

    fn commit(&mut self) -> Result<Answer, Refusal> {
        let State::Held(prepared) = &mut self.state else {
            return Err("nothing is prepared".to_owned());
        };
        let Some(prepared) = prepared.take() else {
            return Err("it was committed already".to_owned());
        };
        let Prepared { round, next, log } = *prepared;
        let switched = self.gate.switch(next, log, |last, log| {
            last.ranges().iter().for_each(|range| log.want(range));
            log.grow()
        });
        let log = match switched {
            Ok(Some(log)) => log,
            Ok(None) => {
                self.end();
                return Err("writes waited too long, and have gone on".to_owned());
            }
            Err(error) => {
                self.end();
                return Err(error.to_string());
            }
        };
        let image_bytes = log.image_bytes();
        self.state = State::Committed(log);
        Ok(Answer::Committed { round, image_bytes })
    }

    /// Lets the guest go on as before.
    fn end(&mut self) {
        match std::mem::replace(&mut self.state, State::Idle) {
            // Another session may have a checkpoint.
            State::Idle => return,
            State::Held(_) => self.gate.release(),
            State::Committed(_) => self.gate.end_log(),
        }
        self.is_taken.store(false, Ordering::Release);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end();
    }
}
