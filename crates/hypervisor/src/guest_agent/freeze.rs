//! Freezes the file systems of a guest by its agent, so that its disks need no repair as they are
//! at that moment.
//!
//! Programs in the guest that write wait until the file systems are thawed. So a process of its
//! own, the *guard*, freezes and thaws them. It thaws them when it is told to, when the program
//! that started it has ended, and in any case after [`FROZEN_MAX`]. It notes the guest's port in a
//! file meanwhile. If the guard is killed, the program that started it thaws them. If both are
//! killed, the next agent does ([`thaw_noted`]).

use super::{Agent, AgentError, TALK_TIMEOUT};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

/// The longest time from the order to freeze to the order to thaw. Windows thaws by itself after 10
/// seconds.
pub const FROZEN_MAX: Duration = Duration::from_secs(10);
/// Time for the guard to say how it went, beside the times that it waits.
const GUARD_PATIENCE: Duration = Duration::from_secs(10);
/// The wait before another attempt to thaw.
const THAW_AGAIN: Duration = Duration::from_secs(1);
/// The maximum length of what a guard says, in bytes.
const WORD_BYTES_MAX: u64 = 4096;

const FREEZE: &str = "guest-fsfreeze-freeze";
const THAW: &str = "guest-fsfreeze-thaw";

/// What a guard says, in a line each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Word {
    /// They are frozen: how many.
    Frozen(u64),
    /// They could not be frozen in time, and the order to thaw is under way.
    Late,
    /// They are thawed, as asked: how many.
    Thawed(u64),
    /// They are not frozen, or not any more.
    Failed(String),
}

/// Why file systems were not frozen until they were thawed.
#[derive(Debug, thiserror::Error)]
pub enum FreezeError {
    /// The guard cannot be started.
    #[error("the process that freezes file systems cannot be started: {0}")]
    Guard(#[from] io::Error),
    /// The guard says so.
    #[error("{0}")]
    Failed(String),
    /// The agent has not frozen them in time.
    #[error("the guest agent did not freeze its file systems within {} s", FROZEN_MAX.as_secs())]
    Late,
    /// The guard has ended without a word.
    #[error("the process that freezes file systems has ended")]
    Ended,
    /// The guard says nothing.
    #[error("the process that freezes file systems does not answer")]
    Silent,
}

/// Returns how many file systems an agent speaks of.
fn count(command: &'static str, answer: &Value) -> Result<u64, AgentError> {
    answer.as_u64().ok_or(AgentError::Answer(command))
}

/// Thaws the file systems of a guest, however long its agent takes. Returns how many.
///
/// # Errors
/// When there is no QEMU behind the port.
pub async fn thaw(port: &Path) -> Result<u64, AgentError> {
    let mut is_said = false;
    loop {
        let talk = async {
            let mut agent = Agent::connect(port).await?;
            count(THAW, &agent.ask(THAW, json!({})).await?)
        };
        let error = match timeout(TALK_TIMEOUT, talk).await {
            Ok(Ok(count)) => return Ok(count),
            Ok(Err(error)) => error,
            Err(_) => AgentError::Silent,
        };
        if let AgentError::Port(error) = &error
            && matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            )
        {
            return Err(AgentError::Port(io::Error::new(
                error.kind(),
                error.to_string(),
            )));
        }
        if !std::mem::replace(&mut is_said, true) {
            tracing::warn!(port = %port.display(), %error, "file systems are not thawed yet");
        }
        sleep(THAW_AGAIN).await;
    }
}

/// Thaws the file systems that the guards of an earlier time have noted in a folder, and could not
/// thaw.
///
/// # Errors
/// When the folder cannot be read.
pub async fn thaw_noted(folder: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let note = entry?.path();
        let port = PathBuf::from(std::ffi::OsString::from_vec(fs::read(&note)?));
        match thaw(&port).await {
            Ok(count) => tracing::warn!(port = %port.display(), count, "thawed file systems"),
            // The guest is gone.
            Err(error) => tracing::info!(port = %port.display(), %error, "nothing to thaw"),
        }
        remove(&note);
    }
    Ok(())
}

fn remove(note: &Path) {
    if let Err(error) = fs::remove_file(note)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::error!(note = %note.display(), %error, "cannot be removed");
    }
}

/// Is the guard: freezes the file systems of the guest with this port, says so, and thaws them when
/// `asks` has anything to read or has ended, and at the latest after [`FROZEN_MAX`].
pub async fn guard(
    port: &Path,
    note: &Path,
    asks: impl AsyncRead + Unpin,
    says: impl AsyncWrite + Unpin,
) {
    guard_for(FROZEN_MAX, (port, note), asks, says).await;
}

async fn guard_for(
    longest: Duration,
    (port, note): (&Path, &Path),
    asks: impl AsyncRead + Unpin,
    mut says: impl AsyncWrite + Unpin,
) {
    let mut say = async |word: &Word| {
        let text = serde_json::to_string(word).unwrap_or_default();
        // Who asked may have ended.
        let _ = says.write_all(format!("{text}\n").as_bytes()).await;
        let _ = says.flush().await;
    };
    let word = match freeze(longest, (port, note), asks, &mut say).await {
        Ok(0) => Word::Failed("there were no frozen file systems".to_owned()),
        Ok(count) => Word::Thawed(count),
        Err(error) => Word::Failed(error.to_string()),
    };
    remove(note);
    say(&word).await;
}

async fn freeze(
    longest: Duration,
    (port, note): (&Path, &Path),
    mut asks: impl AsyncRead + Unpin,
    say: &mut impl AsyncFnMut(&Word),
) -> Result<u64, AgentError> {
    // Nothing is ordered before the agent has answered: another client may have the port, and QEMU
    // would pass on later what waits here.
    let connected = timeout(TALK_TIMEOUT, Agent::connect(port)).await;
    let mut agent = connected.unwrap_or(Err(AgentError::Silent))?;
    if let Some(folder) = note.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(note, port.as_os_str().as_bytes())?;
    let until = Instant::now() + longest;
    agent.question(FREEZE, json!({})).await?;
    let mut held = Err(AgentError::Silent);
    let answered = match timeout_at(until, agent.answer(FREEZE)).await {
        // It has thawed what it had frozen. If another program has frozen them, that one thaws.
        Ok(Err(error @ AgentError::Refused { .. })) => return Err(error),
        Ok(answer) => {
            match answer.and_then(|answer| count(FREEZE, &answer)) {
                Ok(count) => {
                    say(&Word::Frozen(count)).await;
                    let mut asked = [0];
                    tokio::select! {
                        _ = asks.read(&mut asked) => held = Ok(()),
                        () = sleep_until(until) => held = Err(AgentError::Frozen),
                    }
                }
                Err(error) => held = Err(error),
            }
            true
        }
        Err(_) => {
            say(&Word::Late).await;
            false
        }
    };
    let thawed = thaw_now(&mut agent, answered).await;
    let count = match thawed {
        Ok(count) => count,
        Err(_) => thaw(port).await?,
    };
    held.map(|()| count)
}

/// Thaws over the connection that is there, with the answer to the order to freeze before it if
/// that is still to come.
async fn thaw_now(agent: &mut Agent, answered: bool) -> Result<u64, AgentError> {
    agent.question(THAW, json!({})).await?;
    if !answered && let Err(error) = agent.answer(FREEZE).await {
        tracing::warn!(%error, "the late answer to the order to freeze");
    }
    count(THAW, &agent.answer(THAW).await?)
}

/// Frozen file systems of a guest. Dropped, they are thawed.
#[derive(Debug)]
pub struct Frozen {
    asks: Option<ChildStdin>,
    words: Receiver<Word>,
}

impl Frozen {
    /// Freezes file systems. `guard` is the program that calls [`guard`] with this port.
    ///
    /// # Errors
    /// When they are not frozen. What may be frozen nevertheless is thawed.
    pub fn begin(mut guard: Command, port: &Path) -> Result<Self, FreezeError> {
        guard.stdin(Stdio::piped()).stdout(Stdio::piped());
        // What interrupts a command at a terminal does not reach it.
        let mut child = guard.process_group(0).spawn()?;
        let (asks, says) = (child.stdin.take(), child.stdout.take());
        let (sender, words) = mpsc::channel();
        let port = port.to_owned();
        thread::spawn(move || listen(child, says, &sender, &port));
        let frozen = Self { asks, words };
        match frozen.word(TALK_TIMEOUT + FROZEN_MAX + GUARD_PATIENCE)? {
            Word::Frozen(_) => Ok(frozen),
            word => Err(word.into()),
        }
    }

    fn word(&self, within: Duration) -> Result<Word, FreezeError> {
        self.words
            .recv_timeout(within)
            .map_err(|error| match error {
                RecvTimeoutError::Timeout => FreezeError::Silent,
                RecvTimeoutError::Disconnected => FreezeError::Ended,
            })
    }

    /// Thaws them. Returns how many were frozen until now.
    ///
    /// # Errors
    /// When they were not frozen all the time, or that is not known.
    pub fn thaw(mut self) -> Result<u64, FreezeError> {
        // What it reads is the end.
        drop(self.asks.take());
        match self.word(GUARD_PATIENCE)? {
            Word::Thawed(count) => Ok(count),
            word => Err(word.into()),
        }
    }
}

impl From<Word> for FreezeError {
    fn from(word: Word) -> Self {
        match word {
            Word::Late => Self::Late,
            Word::Failed(why) => Self::Failed(why),
            Word::Frozen(_) | Word::Thawed(_) => Self::Ended,
        }
    }
}

/// Passes on what a guard says, until it ends. If it ends without having thawed, this does.
fn listen(mut guard: Child, says: Option<ChildStdout>, words: &Sender<Word>, port: &Path) {
    let mut is_over = false;
    if let Some(says) = says {
        let mut says = BufReader::new(says);
        let mut line = String::new();
        while (&mut says)
            .take(WORD_BYTES_MAX)
            .read_line(&mut line)
            .is_ok_and(|bytes| bytes > 0)
        {
            let Ok(word) = serde_json::from_str::<Word>(&line) else {
                break;
            };
            line.clear();
            is_over = matches!(word, Word::Thawed(_) | Word::Failed(_));
            // Nobody may wait for it any more.
            let _ = words.send(word);
        }
    }
    let ended = guard.wait();
    if is_over {
        return;
    }
    tracing::error!(?ended, port = %port.display(), "the guard of frozen file systems has ended");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let thawed = runtime.map_err(AgentError::Port);
    match thawed.and_then(|runtime| runtime.block_on(thaw(port))) {
        Ok(count) => tracing::warn!(count, port = %port.display(), "thawed file systems"),
        Err(error) => tracing::info!(%error, port = %port.display(), "nothing to thaw"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};
    use tokio::io::AsyncBufReadExt;
    use tokio::net::{UnixListener, UnixStream};

    /// A guest with an agent.
    #[derive(Debug, Clone, Default)]
    struct Guest {
        frozen: Arc<Mutex<bool>>,
        log: Arc<Mutex<Vec<String>>>,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Temper {
        Good,
        /// It takes longer than it may.
        Slow,
        Refuses,
        /// It answers nothing that is understood, and freezes.
        Babbles,
        /// It hangs up when it is to thaw, the first time.
        HangsUp,
        /// It thaws by itself.
        Thaws,
    }

    const SHORT: Duration = Duration::from_millis(300);

    impl Guest {
        fn answer(&self, temper: Temper, question: &Value) -> Option<Value> {
            let command = question["execute"].as_str().unwrap();
            let mut log = self.log.lock().unwrap();
            log.push(command.to_owned());
            let mut frozen = self.frozen.lock().unwrap();
            Some(match (command, temper) {
                ("guest-sync-delimited", _) => json!({"return": question["arguments"]["id"]}),
                (FREEZE, Temper::Refuses) => json!({"error": {"desc": "cannot"}}),
                (FREEZE, Temper::Babbles) => {
                    *frozen = true;
                    json!({"return": "many"})
                }
                (FREEZE, _) => {
                    *frozen = temper != Temper::Thaws;
                    json!({"return": 2})
                }
                (THAW, Temper::HangsUp) if log.iter().filter(|it| *it == THAW).count() == 1 => {
                    return None;
                }
                (THAW, _) => json!({"return": if std::mem::take(&mut *frozen) { 2 } else { 0 }}),
                _ => unreachable!("{question}"),
            })
        }

        async fn serve(self, temper: Temper, stream: UnixStream) {
            let mut stream = tokio::io::BufReader::new(stream);
            assert_eq!(stream.read_u8().await.unwrap(), super::super::DELIMITER);
            let mut line = String::new();
            // The answer to the order to freeze, until it is told to thaw.
            let mut late = Vec::new();
            while stream
                .read_line(&mut line)
                .await
                .is_ok_and(|bytes| bytes > 0)
            {
                let question: Value = serde_json::from_str(&line).unwrap();
                line.clear();
                let Some(answer) = self.answer(temper, &question) else {
                    return;
                };
                let text = match question["execute"] == "guest-sync-delimited" {
                    true => [&[0xff], answer.to_string().as_bytes(), b"\n"].concat(),
                    false => format!("{answer}\n").into_bytes(),
                };
                if question["execute"] == FREEZE && temper == Temper::Slow {
                    late = text;
                    continue;
                }
                let text = [std::mem::take(&mut late), text].concat();
                if stream.get_mut().write_all(&text).await.is_err() {
                    return;
                }
            }
        }

        fn begin(temper: Temper, port: &Path) -> Self {
            let guest = Self::default();
            let listener = UnixListener::bind(port).unwrap();
            let served = guest.clone();
            tokio::spawn(async move {
                loop {
                    let (stream, _) = listener.accept().await.unwrap();
                    served.clone().serve(temper, stream).await;
                }
            });
            guest
        }
    }

    /// Runs a guard with a time limit, which is asked to thaw after another time. Returns what it
    /// said.
    async fn said(temper: Temper, limit: Duration, asks_after: Duration) -> Vec<Word> {
        let folder = tempfile::tempdir().unwrap();
        let (port, note) = (
            folder.path().join("port"),
            folder.path().join("frozen/web-7"),
        );
        let guest = Guest::begin(temper, &port);
        let (ours, theirs) = tokio::io::duplex(64);
        let (mut heard, says) = tokio::io::duplex(4096);
        let noted = note.clone();
        let asks = async {
            sleep(asks_after).await;
            let is_frozen = *guest.frozen.lock().unwrap();
            // While they are frozen, the note is there.
            assert!(!is_frozen || fs::read(&noted).unwrap() == port.as_os_str().as_bytes());
            drop(ours);
        };
        tokio::join!(guard_for(limit, (&port, &note), theirs, says), asks);
        assert!(!*guest.frozen.lock().unwrap());
        assert!(!note.exists());
        let mut text = String::new();
        heard.read_to_string(&mut text).await.unwrap();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    #[tokio::test]
    async fn file_systems_are_frozen_until_they_are_to_be_thawed() {
        let soon = SHORT / 6;
        // Only what waits for a limit has a short one.
        let long = FROZEN_MAX * 10;
        assert_eq!(
            said(Temper::Good, long, soon).await,
            [Word::Frozen(2), Word::Thawed(2)]
        );
        let failed = |why: &dyn ToString| Word::Failed(why.to_string());
        // Nobody asks in time.
        assert_eq!(
            said(Temper::Good, SHORT, SHORT * 20).await,
            [Word::Frozen(2), failed(&AgentError::Frozen)]
        );
        assert_eq!(
            said(Temper::Slow, SHORT, soon).await,
            [Word::Late, failed(&AgentError::Silent)]
        );
        assert_eq!(
            said(Temper::HangsUp, long, soon).await,
            [Word::Frozen(2), Word::Thawed(2)]
        );
        assert_eq!(
            said(Temper::Babbles, long, soon).await,
            [failed(&AgentError::Answer(FREEZE))]
        );
        assert_eq!(
            said(Temper::Thaws, long, soon).await,
            [
                Word::Frozen(2),
                failed(&"there were no frozen file systems")
            ]
        );
        assert!(matches!(
            &said(Temper::Refuses, long, soon).await[..],
            [Word::Failed(_)]
        ));
    }

    #[tokio::test]
    async fn what_another_program_has_frozen_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let port = folder.path().join("port");
        let guest = Guest::begin(Temper::Refuses, &port);
        let note = folder.path().join("note");
        guard(&port, &note, tokio::io::empty(), tokio::io::sink()).await;
        let log = guest.log.lock().unwrap().clone();
        assert_eq!(log, ["guest-sync-delimited", FREEZE]);
    }

    #[tokio::test]
    async fn what_a_killed_guard_has_noted_is_thawed() {
        let folder = tempfile::tempdir().unwrap();
        let (port, notes) = (folder.path().join("port"), folder.path().join("frozen"));
        thaw_noted(&notes).await.unwrap();
        fs::create_dir(&notes).unwrap();
        fs::write(notes.join("web-7"), port.as_os_str().as_bytes()).unwrap();
        fs::write(notes.join("gone"), "/nowhere").unwrap();
        let guest = Guest::begin(Temper::Good, &port);
        *guest.frozen.lock().unwrap() = true;
        thaw_noted(&notes).await.unwrap();
        assert!(!*guest.frozen.lock().unwrap());
        assert_eq!(fs::read_dir(&notes).unwrap().count(), 0);
    }
}
