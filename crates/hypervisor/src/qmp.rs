//! Implements a small, tolerant QMP client: one connection to one QEMU's control socket.
//!
//! It knows the shape of QMP's messages and not their schema, so that newer versions of QEMU work.
//! Answers are matched by id, in any order; events go to every listener; a command that timed out
//! leaves the connection usable.

use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

/// The maximum length of a line from QEMU, in bytes.
pub const LINE_BYTES_MAX: usize = 16 << 20;
/// The maximum number of commands that may wait for their answer.
pub const PENDING_MAX: usize = 256;
/// The maximum number of events that QEMU may send before its greeting.
const EVENTS_BEFORE_GREETING_MAX: usize = 256;
/// The number of events kept for a slow listener.
const EVENTS_KEPT: usize = 1024;
/// The number of commands queued for a QEMU that does not read.
const COMMANDS_QUEUED: usize = 64;
/// The time limit of an ordinary command, where the caller has no reason for another.
pub const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit of a question, from QEMU's last answer. A busy emulated processor keeps QEMU
/// from its answers for long.
pub const QUESTION_TIMEOUT: Duration = Duration::from_secs(30);

/// A connection to a QEMU; clones share it, and it closes with the last of them.
#[derive(Clone)]
pub struct Qmp {
    connection: Arc<Connection>,
}

/// A QEMU's version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// First number.
    pub major: u32,
    /// Second number.
    pub minor: u32,
    /// Third number.
    pub micro: u32,
}

/// An event that QEMU reported.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Its name, such as `STOP`.
    pub name: String,
    /// Its data; null where there are none.
    pub data: Value,
    /// QEMU's time of the event, since the Unix epoch.
    pub at: Duration,
}

/// Why a command has no result.
#[derive(Debug, Clone, thiserror::Error)]
pub enum QmpError {
    /// No process listens on the socket.
    #[error("cannot reach QEMU on its QMP socket {}: {why}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        why: String,
    },
    /// The socket accepts a connection and sends nothing.
    #[error(
        "another client holds this guest's QMP socket {} (no greeting in {:.1} s; QEMU talks to \
         one client at a time): close that client, or see whether QEMU hangs",
        path.display(), waited.as_secs_f64()
    )]
    Busy {
        /// The socket.
        path: PathBuf,
        /// How long it was silent.
        waited: Duration,
    },
    /// The peer on the socket does not speak QMP.
    #[error("{} is not a QMP socket: {why}", path.display())]
    NotQmp {
        /// The socket.
        path: PathBuf,
        /// Its output.
        why: String,
    },
    /// The connection ended, so the command's result is unknown.
    #[error("QEMU's QMP connection {} ended: {why}", path.display())]
    Closed {
        /// The socket.
        path: PathBuf,
        /// Why it ended.
        why: String,
    },
    /// No answer arrived in time; the command's result is unknown.
    #[error("QEMU did not answer `{command}` within {:.1} s", waited.as_secs_f64())]
    Timeout {
        /// The command.
        command: String,
        /// The time waited.
        waited: Duration,
    },
    /// QEMU refused.
    #[error("QEMU refused `{command}`: {description}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's error class, such as `GenericError` or `CommandNotFound`.
        class: String,
        /// QEMU's error message.
        description: String,
    },
    /// An answer lacks an expected part.
    #[error("QEMU's answer to `{command}` is not understood: {why}")]
    Answer {
        /// The command.
        command: String,
        /// The missing part.
        why: String,
    },
}

impl QmpError {
    /// Returns whether QEMU does not know the command.
    pub fn is_unknown_command(&self) -> bool {
        matches!(self, Self::Refused { class, .. } if class == "CommandNotFound")
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

impl fmt::Debug for Qmp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qmp")
            .field("path", &self.connection.shared.path)
            .field("version", &self.connection.version)
            .finish()
    }
}

impl Qmp {
    /// Connects to the socket at `path` and makes it ready for commands.
    pub async fn connect(path: &Path, timeout: Duration) -> Result<Self, QmpError> {
        let deadline = Instant::now() + timeout;
        let busy = || QmpError::Busy {
            path: path.to_owned(),
            waited: timeout,
        };
        let stream = match timeout_at(deadline, UnixStream::connect(path)).await {
            Err(_) => return Err(busy()),
            // The queue of clients that wait to be accepted is full.
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::WouldBlock => {
                return Err(busy());
            }
            Ok(Err(error)) => {
                return Err(QmpError::Connect {
                    path: path.to_owned(),
                    why: error.to_string(),
                });
            }
            Ok(Ok(stream)) => stream,
        };
        let left = deadline.saturating_duration_since(Instant::now());
        Self::over(stream, path, left).await
    }

    /// Makes an existing connection ready for commands; `path` is its name.
    pub async fn over(
        stream: UnixStream,
        path: &Path,
        timeout: Duration,
    ) -> Result<Self, QmpError> {
        let deadline = Instant::now() + timeout;
        let (reader, writer) = stream.into_split();
        let mut lines = Lines::new(reader);
        let mut greeting = next_line(&mut lines, path, deadline, timeout).await?;
        // Events during the connection setup may arrive before the greeting.
        for _ in 0..EVENTS_BEFORE_GREETING_MAX {
            if !is_event(&greeting) {
                break;
            }
            greeting = next_line(&mut lines, path, deadline, timeout).await?;
        }
        let version = greeted_version(&greeting).ok_or_else(|| QmpError::NotQmp {
            path: path.to_owned(),
            why: format!("it greets with `{}`", excerpt(&greeting)),
        })?;
        let qmp = Self::start(path, version, lines, writer);
        let left = deadline.saturating_duration_since(Instant::now());
        qmp.execute("qmp_capabilities", json!({}), left).await?;
        Ok(qmp)
    }

    fn start(path: &Path, version: Version, lines: Lines, writer: OwnedWriteHalf) -> Self {
        let shared = Arc::new(Shared {
            path: path.to_owned(),
            state: Mutex::new(State::default()),
            events: broadcast::Sender::new(EVENTS_KEPT),
            closed: watch::Sender::new(false),
        });
        let (commands, queue) = mpsc::channel(COMMANDS_QUEUED);
        let reading = tokio::spawn(read_all(lines, Arc::clone(&shared)));
        let writing = tokio::spawn(write_all(writer, queue, Arc::clone(&shared)));
        Self {
            connection: Arc::new(Connection {
                version,
                shared,
                commands,
                next_id: AtomicU64::new(1),
                tasks: [reading, writing],
            }),
        }
    }

    /// Returns the version in QEMU's greeting.
    pub fn version(&self) -> Version {
        self.connection.version
    }

    /// Returns the socket that this is connected to.
    pub fn path(&self) -> &Path {
        &self.connection.shared.path
    }

    /// Returns a receiver of all later events.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.connection.shared.events.subscribe()
    }

    /// Returns whether the connection has ended.
    pub fn is_closed(&self) -> bool {
        *self.connection.shared.closed.borrow()
    }

    /// Waits until the connection has ended, which it does when QEMU ends.
    pub async fn closed(&self) {
        let mut closed = self.connection.shared.closed.subscribe();
        // An error would mean that the sender is gone, and `self` holds it.
        let _ = closed.wait_for(|closed| *closed).await;
    }

    /// Executes a command and returns its result.
    ///
    /// After a time-out a late answer is dropped; the connection stays usable. Dropping the future
    /// does not withdraw the command once it is queued.
    pub async fn execute(
        &self,
        command: &str,
        arguments: Value,
        timeout: Duration,
    ) -> Result<Value, QmpError> {
        match timeout_at(Instant::now() + timeout, self.exchange(command, arguments)).await {
            Err(_) => Err(QmpError::Timeout {
                command: command.to_owned(),
                waited: timeout,
            }),
            Ok(result) => result,
        }
    }

    /// Executes a command that changes nothing. Many may be asked at once: the time limit is
    /// [`QUESTION_TIMEOUT`] from QEMU's last answer.
    pub async fn ask(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let mut exchange = pin!(self.exchange(command, arguments));
        let mut since = Instant::now();
        loop {
            if let Ok(result) = timeout_at(since + QUESTION_TIMEOUT, &mut exchange).await {
                return result;
            }
            match self.connection.shared.state().answered_at {
                Some(answered_at) if answered_at > since => since = answered_at,
                _ => break,
            }
        }
        Err(QmpError::Timeout {
            command: command.to_owned(),
            waited: QUESTION_TIMEOUT,
        })
    }

    async fn exchange(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let id = self.connection.next_id.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        self.connection.shared.expect(id, command, answer)?;
        let _forget = Forget {
            shared: &self.connection.shared,
            id,
        };
        let mut message = json!({"execute": command, "id": id});
        if arguments.as_object().is_some_and(|map| !map.is_empty()) {
            message["arguments"] = arguments;
        }
        let mut line = message.to_string().into_bytes();
        line.push(b'\n');
        // When the writer has ended, the state has the reason, and `answered` fails.
        let _ = self.connection.commands.send(line).await;
        match answered.await {
            Err(_) => Err(self.connection.shared.closed_error()),
            Ok(Err(refusal)) => Err(QmpError::Refused {
                command: command.to_owned(),
                class: refusal.class,
                description: refusal.description,
            }),
            Ok(Ok(value)) => Ok(value),
        }
    }

    /// Executes a command without arguments, with the default time limit.
    pub async fn query(&self, command: &str) -> Result<Value, QmpError> {
        self.execute(command, json!({}), COMMAND_TIMEOUT).await
    }

    /// Executes a line of the human monitor, and returns its output.
    pub async fn hmp(&self, line: &str, timeout: Duration) -> Result<String, QmpError> {
        let arguments = json!({"command-line": line});
        let value = self
            .execute("human-monitor-command", arguments, timeout)
            .await?;
        match value {
            Value::String(text) => Ok(text),
            other => Err(QmpError::Answer {
                command: format!("human-monitor-command {line}"),
                why: format!("`{}` is not a text", excerpt(other.to_string().as_bytes())),
            }),
        }
    }
}

struct Connection {
    version: Version,
    shared: Arc<Shared>,
    commands: mpsc::Sender<Vec<u8>>,
    next_id: AtomicU64,
    tasks: [JoinHandle<()>; 2],
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// State shared by the two tasks and all waiting callers.
struct Shared {
    path: PathBuf,
    state: Mutex<State>,
    events: broadcast::Sender<Event>,
    closed: watch::Sender<bool>,
}

#[derive(Default)]
struct State {
    pending: HashMap<u64, oneshot::Sender<Result<Value, Refusal>>>,
    answered_at: Option<Instant>,
    ended: Option<String>,
}

struct Refusal {
    class: String,
    description: String,
}

/// Removes a command from the list of waiting ones, however its wait ends.
struct Forget<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.shared.state().pending.remove(&self.id);
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // No holder of the lock can panic half-way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn expect(
        &self,
        id: u64,
        command: &str,
        answer: oneshot::Sender<Result<Value, Refusal>>,
    ) -> Result<(), QmpError> {
        let mut state = self.state();
        if state.ended.is_some() {
            drop(state);
            return Err(self.closed_error());
        }
        if state.pending.len() >= PENDING_MAX {
            return Err(QmpError::Refused {
                command: command.to_owned(),
                class: "Busy".to_owned(),
                description: format!("{PENDING_MAX} commands wait for QEMU already"),
            });
        }
        state.pending.insert(id, answer);
        Ok(())
    }

    fn closed_error(&self) -> QmpError {
        let why = self.state().ended.clone();
        QmpError::Closed {
            path: self.path.clone(),
            why: why.unwrap_or_else(|| "it was closed here".to_owned()),
        }
    }

    fn end(&self, why: String) {
        let mut state = self.state();
        if state.ended.is_none() {
            tracing::debug!(path = %self.path.display(), why, "QMP connection ended");
            state.ended = Some(why);
        }
        state.pending.clear();
        drop(state);
        self.closed.send_replace(true);
    }

    /// Processes one message; an error ends the connection.
    fn take(&self, line: &[u8]) -> Result<(), String> {
        let message: Map<String, Value> = serde_json::from_slice(line)
            .map_err(|_| format!("QEMU sent `{}`, which is not QMP", excerpt(line)))?;
        if let Some(event) = event(&message) {
            // There may be no listener.
            let _ = self.events.send(event);
            return Ok(());
        }
        let Some(id) = message.get("id").and_then(Value::as_u64) else {
            tracing::warn!(
                path = %self.path.display(),
                message = excerpt(line),
                "QEMU sent a message that answers nothing"
            );
            return Ok(());
        };
        let waiting = {
            let mut state = self.state();
            state.answered_at = Some(Instant::now());
            state.pending.remove(&id)
        };
        let Some(answer) = waiting else {
            tracing::debug!(id, "answer to a command that nobody waits for");
            return Ok(());
        };
        let result = match (message.get("return"), message.get("error")) {
            (Some(value), _) => Ok(value.clone()),
            (None, Some(error)) => Err(Refusal {
                class: text(error, "class").unwrap_or("GenericError").to_owned(),
                description: text(error, "desc").unwrap_or("no reason given").to_owned(),
            }),
            (None, None) => Err(Refusal {
                class: "GenericError".to_owned(),
                description: "an answer without a result".to_owned(),
            }),
        };
        // The caller may have stopped waiting.
        let _ = answer.send(result);
        Ok(())
    }
}

async fn read_all(mut lines: Lines, shared: Arc<Shared>) {
    let why = loop {
        let taken = match lines.next().await {
            Ok(line) => shared.take(&line),
            Err(why) => Err(why),
        };
        if let Err(why) = taken {
            break why;
        }
    };
    shared.end(why);
}

async fn write_all(
    mut writer: OwnedWriteHalf,
    mut queue: mpsc::Receiver<Vec<u8>>,
    shared: Arc<Shared>,
) {
    while let Some(line) = queue.recv().await {
        if let Err(error) = writer.write_all(&line).await {
            shared.end(format!("writing failed: {error}"));
            return;
        }
    }
}

/// The lines of a stream, none longer than [`LINE_BYTES_MAX`].
struct Lines {
    reader: BufReader<OwnedReadHalf>,
}

impl Lines {
    fn new(reader: OwnedReadHalf) -> Self {
        Self {
            reader: BufReader::new(reader),
        }
    }

    /// Returns the next non-empty line, without its end; an error says why there is none.
    async fn next(&mut self) -> Result<Vec<u8>, String> {
        loop {
            let mut line = Vec::new();
            let mut limited = (&mut self.reader).take(LINE_BYTES_MAX as u64 + 1);
            match limited.read_until(b'\n', &mut line).await {
                Err(error) => return Err(format!("reading failed: {error}")),
                Ok(0) => return Err("QEMU closed it".to_owned()),
                Ok(_) if line.last() != Some(&b'\n') && line.len() > LINE_BYTES_MAX => {
                    return Err(format!("a line is longer than {LINE_BYTES_MAX} bytes"));
                }
                Ok(_) if line.last() != Some(&b'\n') => {
                    return Err("QEMU closed it in the middle of a message".to_owned());
                }
                Ok(_) => {}
            }
            let blank = line.trim_ascii().is_empty();
            if !blank {
                return Ok(line);
            }
        }
    }
}

/// Returns the next line that QEMU sends before a deadline.
async fn next_line(
    lines: &mut Lines,
    path: &Path,
    deadline: Instant,
    waited: Duration,
) -> Result<Vec<u8>, QmpError> {
    let path = || path.to_owned();
    match timeout_at(deadline, lines.next()).await {
        Err(_) => Err(QmpError::Busy {
            path: path(),
            waited,
        }),
        Ok(line) => line.map_err(|why| QmpError::NotQmp { path: path(), why }),
    }
}

/// Returns whether a line is an event.
fn is_event(line: &[u8]) -> bool {
    let said: Result<Value, _> = serde_json::from_slice(line);
    said.is_ok_and(|said| said.get("event").is_some())
}

fn greeted_version(line: &[u8]) -> Option<Version> {
    let greeting: Value = serde_json::from_slice(line).ok()?;
    version_of(greeting.get("QMP")?.get("version")?)
}

/// Parses the result of `query-version`, which a greeting contains too.
pub(crate) fn version_of(value: &Value) -> Option<Version> {
    let number = |name| u32::try_from(value.get("qemu")?.get(name)?.as_u64()?).ok();
    Some(Version {
        major: number("major")?,
        minor: number("minor")?,
        micro: number("micro")?,
    })
}

fn event(message: &Map<String, Value>) -> Option<Event> {
    let name = message.get("event")?.as_str()?.to_owned();
    let number = |name| message.get("timestamp")?.get(name)?.as_u64();
    // QEMU sends -1 if its clock failed.
    let micros = u32::try_from(number("microseconds").unwrap_or(0)).unwrap_or(0);
    Some(Event {
        name,
        data: message.get("data").cloned().unwrap_or(Value::Null),
        at: Duration::from_secs(number("seconds").unwrap_or(0))
            .saturating_add(Duration::from_micros(micros.into())),
    })
}

fn text<'a>(value: &'a Value, name: &str) -> Option<&'a str> {
    value.get(name)?.as_str()
}

/// Returns the beginning of a peer's bytes, safe for display.
fn excerpt(bytes: &[u8]) -> String {
    let shown = &bytes[..bytes.len().min(80)];
    let text = String::from_utf8_lossy(shown);
    text.trim_end().escape_default().to_string()
}

#[cfg(test)]
#[path = "qmp_tests.rs"]
mod tests;
