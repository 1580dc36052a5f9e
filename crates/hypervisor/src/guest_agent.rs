//! Measures and corrects a guest's clock after a move, by the QEMU guest agent. For a guest without
//! an agent it reads the real-time clock. [`freeze`] freezes its file systems.
//!
//! The agent speaks JSON over a virtio-serial port. Its answers are from the guest, so every line
//! has a length limit, and the whole conversation a time limit.

pub mod freeze;

use crate::qmp::{COMMAND_TIMEOUT, Qmp};
use serde_json::{Value, json};
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Name of the agent's port.
pub const PORT: &str = "org.qemu.guest_agent.0";
/// The maximum length of a line from an agent, in bytes.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// The maximum number of lines that are skipped before the agent's answer.
const LINES_SKIPPED_MAX: usize = 16;
/// The time limit for the whole conversation with an agent.
const TALK_TIMEOUT: Duration = Duration::from_secs(2);
/// The smallest error that is corrected: the query itself takes about as long.
const SET_FROM: Duration = Duration::from_millis(100);
/// The byte before the answer to a delimited command.
const DELIMITER: u8 = 0xff;

/// The offset of a guest's clock from this host's, in milliseconds; negative: behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    /// The offset when first measured.
    pub before_ms: i64,
    /// The final offset.
    pub after_ms: i64,
    /// Whether the guest agent reported it; otherwise it is the real-time clock, to the second.
    pub by_agent: bool,
    /// Whether the clock was set.
    pub set: bool,
}

/// Why the guest agent could not be used.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The port cannot be used.
    #[error("the guest agent's port cannot be used: {0}")]
    Port(#[from] io::Error),
    /// It sent no answer.
    #[error("the guest agent did not answer within {} s", TALK_TIMEOUT.as_secs())]
    Silent,
    /// File systems were frozen for too long.
    #[error("the file systems were frozen for {} s, and were thawed", freeze::FROZEN_MAX.as_secs())]
    Frozen,
    /// Its answer is not understood.
    #[error("the guest agent's answer to `{0}` is not understood")]
    Answer(&'static str),
    /// It refused a command.
    #[error("the guest agent refused `{command}`: {why}")]
    Refused {
        /// The command.
        command: &'static str,
        /// Its error message.
        why: String,
    },
}

/// The agent at the other end of a port.
struct Agent {
    port: BufReader<UnixStream>,
    /// The beginning of the next line.
    line: Vec<u8>,
}

impl Agent {
    /// Connects and resets the agent's parser.
    async fn connect(path: &Path) -> Result<Self, AgentError> {
        const SYNC: &str = "guest-sync-delimited";
        let port = BufReader::new(UnixStream::connect(path).await?);
        let mut agent = Self {
            port,
            line: Vec::new(),
        };
        // This byte resets an agent in the middle of another client's line; otherwise the agent
        // reports it as an error, ahead of the delimiter.
        agent.port.get_mut().write_all(&[DELIMITER]).await?;
        let id = now() % 1_000_000_000;
        let id = u64::try_from(id).map_err(|_| AgentError::Answer(SYNC))?;
        agent.question(SYNC, json!({ "id": id })).await?;
        for _ in 0..LINES_SKIPPED_MAX {
            let line = agent.line(SYNC).await?;
            let start = line.iter().rposition(|byte| *byte == DELIMITER);
            let Some(start) = start else { continue };
            let answer: Option<Value> = serde_json::from_slice(&line[start + 1..]).ok();
            if answer.is_some_and(|answer| answer["return"] == id) {
                return Ok(agent);
            }
        }
        Err(AgentError::Answer(SYNC))
    }

    async fn question(&mut self, command: &str, arguments: Value) -> io::Result<()> {
        let question = json!({"execute": command, "arguments": arguments});
        let line = format!("{question}\n");
        self.port.get_mut().write_all(line.as_bytes()).await
    }

    /// Reads a line. If the future is dropped, the next one goes on with it.
    async fn line(&mut self, command: &'static str) -> Result<Vec<u8>, AgentError> {
        let room = LINE_BYTES_MAX.saturating_sub(self.line.len() as u64);
        let mut limited = (&mut self.port).take(room);
        limited.read_until(b'\n', &mut self.line).await?;
        let line = std::mem::take(&mut self.line);
        match line.last() {
            Some(b'\n') => Ok(line),
            _ => Err(AgentError::Answer(command)),
        }
    }

    async fn ask(&mut self, command: &'static str, arguments: Value) -> Result<Value, AgentError> {
        self.question(command, arguments).await?;
        self.answer(command).await
    }

    /// Reads the answer to a command.
    async fn answer(&mut self, command: &'static str) -> Result<Value, AgentError> {
        let line = self.line(command).await?;
        let answer: Option<Value> = serde_json::from_slice(&line).ok();
        let mut answer = answer.ok_or(AgentError::Answer(command))?;
        if let Some(error) = answer.get("error") {
            let why = error["desc"].as_str().unwrap_or("without a reason");
            let why = why.chars().filter(|c| !c.is_control()).take(200).collect();
            return Err(AgentError::Refused { command, why });
        }
        let value = answer.get_mut("return").map(Value::take);
        value.ok_or(AgentError::Answer(command))
    }

    /// Returns the offset of the guest's clock, in milliseconds.
    async fn off_ms(&mut self) -> Result<i64, AgentError> {
        const GET: &str = "guest-get-time";
        let asked = now();
        let theirs = self.ask(GET, json!({})).await?;
        let ours = asked + (now() - asked) / 2;
        let theirs = theirs.as_i64().ok_or(AgentError::Answer(GET))?;
        i64::try_from((i128::from(theirs) - ours) / 1_000_000).map_err(|_| AgentError::Answer(GET))
    }

    async fn set_right(&mut self) -> Result<Clock, AgentError> {
        let small = |off_ms: i64| u128::from(off_ms.unsigned_abs()) < SET_FROM.as_millis();
        let before_ms = self.off_ms().await?;
        let mut clock = Clock {
            before_ms,
            after_ms: before_ms,
            by_agent: true,
            set: false,
        };
        if small(before_ms) {
            return Ok(clock);
        }
        let time = i64::try_from(now()).unwrap_or(i64::MAX);
        let set = self.ask("guest-set-time", json!({ "time": time })).await;
        clock.after_ms = self.off_ms().await?;
        // An agent that cannot also set the hardware clock reports failure.
        clock.set = set.is_ok() || small(clock.after_ms);
        if let Err(error) = set {
            tracing::info!(%error, ?clock, "setting a guest's clock");
        }
        Ok(clock)
    }
}

/// Returns the offset of the clock by the guest agent, and sets the clock where it is off.
pub async fn set_right(port: &Path) -> Result<Clock, AgentError> {
    let talk = async { Agent::connect(port).await?.set_right().await };
    timeout(TALK_TIMEOUT, talk)
        .await
        .unwrap_or(Err(AgentError::Silent))
}

/// Returns whether a program in the guest has opened a port, to avoid waiting for an absent agent.
pub async fn is_open(qmp: &Qmp, port: &Path) -> bool {
    let devices = qmp
        .execute("query-chardev", json!({}), COMMAND_TIMEOUT)
        .await;
    let Ok(Value::Array(devices)) = devices else {
        return false;
    };
    // For example `unix:PATH,server=on`, with more text around it where a client is connected.
    let named = format!("unix:{}", port.display());
    devices.iter().any(|device| {
        let name = device["filename"].as_str().unwrap_or_default();
        name.contains(&named) && device["frontend-open"] == true
    })
}

/// Returns the offset of a guest's real-time clock, which is readable from outside.
pub async fn real_time_clock(qmp: &Qmp) -> Option<Clock> {
    let question = json!({"path": "/machine", "property": "rtc-time"});
    let theirs = qmp.ask("qom-get", question).await.ok()?;
    let ours = now() / 1_000_000_000;
    let field = |name: &str| theirs[name].as_i64();
    let days = days(
        field("tm_year")? + 1900,
        field("tm_mon")? + 1,
        field("tm_mday")?,
    );
    let theirs = ((days * 24 + field("tm_hour")?) * 60 + field("tm_min")?) * 60 + field("tm_sec")?;
    let off_s = i64::try_from(i128::from(theirs) - ours).ok()?;
    let off_ms = off_s.checked_mul(1000)?;
    Some(Clock {
        before_ms: off_ms,
        after_ms: off_ms,
        by_agent: false,
        set: false,
    })
}

/// Returns the days from 1970 to a date of the Gregorian calendar.
fn days(year: i64, month: i64, day: i64) -> i64 {
    // Years begin in March: the leap day is their last.
    let year = if month <= 2 { year - 1 } else { year };
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    365 * year + leap_days + of_year - 719_468
}

/// Returns nanoseconds since 1970.
fn now() -> i128 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| i128::try_from(now.as_nanos()).unwrap_or(i128::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use std::sync::{Arc, Mutex};
    use tokio::net::UnixListener;

    /// The behaviour of a simulated agent.
    #[derive(Clone, Copy)]
    struct Behaviour {
        off_ms: i64,
        /// Bytes that it sends first.
        noise: &'static [u8],
        /// It sets the clock and reports an error.
        complains: bool,
        /// A command that it never answers.
        deaf_to: &'static str,
    }

    const GOOD: Behaviour = Behaviour {
        off_ms: 0,
        noise: b"",
        complains: false,
        deaf_to: "",
    };

    /// Returns a simulated agent and the commands that it received.
    fn fake(behaviour: Behaviour) -> (tempfile::TempDir, PathBuf, Arc<Mutex<Vec<String>>>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("port");
        let listener = UnixListener::bind(&path).unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&asked);
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let mut stream = BufReader::new(stream);
            assert_eq!(stream.read_u8().await.unwrap(), DELIMITER);
            stream.get_mut().write_all(behaviour.noise).await.unwrap();
            let mut off_ms = behaviour.off_ms;
            let mut line = String::new();
            while stream
                .read_line(&mut line)
                .await
                .is_ok_and(|bytes| bytes > 0)
            {
                let question: Value = serde_json::from_str(&line).unwrap();
                line.clear();
                let command = question["execute"].as_str().unwrap().to_owned();
                log.lock().unwrap().push(command.clone());
                let time = now() + i128::from(off_ms) * 1_000_000;
                let refused = json!({"error": {"class": "GenericError", "desc": "no\u{7}"}});
                let answer = match command.as_str() {
                    deaf if deaf == behaviour.deaf_to => continue,
                    "guest-sync-delimited" => json!({"return": question["arguments"]["id"]}),
                    "guest-get-time" => json!({"return": i64::try_from(time).unwrap()}),
                    _ => {
                        let time = question["arguments"]["time"].as_i64().unwrap();
                        off_ms = i64::try_from((i128::from(time) - now()) / 1_000_000).unwrap();
                        match behaviour.complains {
                            true => refused,
                            false => json!({"return": {}}),
                        }
                    }
                };
                let delimiter: &[u8] = match command.ends_with("delimited") {
                    true => &[DELIMITER],
                    false => b"",
                };
                let bytes = [delimiter, answer.to_string().as_bytes(), b"\n"].concat();
                stream.get_mut().write_all(&bytes).await.unwrap();
            }
        });
        (folder, path, asked)
    }

    #[tokio::test]
    async fn a_clock_that_is_off_is_set_right() {
        for complains in [false, true] {
            let (_folder, path, asked) = fake(Behaviour {
                off_ms: -90_000,
                noise: b"{\"return\": 7}\n{\"error\": {\"desc\": \"stray\"}}\nhalf a li",
                complains,
                ..GOOD
            });
            let clock = set_right(&path).await.unwrap();
            assert!((-95_000..=-85_000).contains(&clock.before_ms), "{clock:?}");
            assert!((-5_000..=5_000).contains(&clock.after_ms), "{clock:?}");
            assert!(clock.by_agent);
            // A busy machine may exceed the tolerance.
            assert!(clock.set || complains, "{clock:?}");
            let expected = [
                "guest-sync-delimited",
                "guest-get-time",
                "guest-set-time",
                "guest-get-time",
            ];
            assert_eq!(*asked.lock().unwrap(), expected);
        }
    }

    #[tokio::test]
    async fn an_agent_that_makes_no_sense_is_left_alone() {
        static ENDLESS: [u8; 70_000] = [b'x'; 70_000];
        static LINES: [u8; 40] = [b'\n'; 40];
        for noise in [&ENDLESS[..], &LINES] {
            let (_folder, path, asked) = fake(Behaviour { noise, ..GOOD });
            let error = set_right(&path).await.unwrap_err();
            assert!(matches!(error, AgentError::Answer(_)), "{error}");
            assert!(asked.lock().unwrap().len() <= 1);
        }
        let folder = tempfile::tempdir().unwrap();
        let error = set_right(&folder.path().join("none")).await.unwrap_err();
        assert!(matches!(error, AgentError::Port(_)), "{error}");
        let far = Behaviour {
            off_ms: i64::MAX / 2_000_000,
            deaf_to: "guest-set-time",
            ..GOOD
        };
        let (_folder, path, _asked) = fake(far);
        let error = set_right(&path).await.unwrap_err();
        assert!(matches!(error, AgentError::Silent), "{error}");
    }

    #[test]
    fn dates_are_counted() {
        assert_eq!(days(1970, 1, 1), 0);
        assert_eq!(days(2000, 2, 29), 11_016);
        assert_eq!(days(2026, 11, 21), 20_778);
    }
}
