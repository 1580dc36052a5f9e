//! Implements the part of QMP that the baselines need: one command at a time on an exclusive
//! socket.

use crate::error::{During, LabError};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

const CONNECT_LIMIT: Duration = Duration::from_secs(30);
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
const LONGEST_LINE: u64 = 1 << 20;

/// An exclusive connection to a QEMU.
#[derive(Debug)]
pub struct Qmp {
    path: PathBuf,
    reader: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects as soon as the socket exists.
    ///
    /// # Errors
    /// When it does not exist in time, or is not a QEMU's.
    pub fn connect(path: &Path) -> Result<Self, LabError> {
        let began = Instant::now();
        let socket = loop {
            match UnixStream::connect(path) {
                Ok(socket) => break socket,
                Err(_) if began.elapsed() < CONNECT_LIMIT => {
                    thread::sleep(Duration::from_millis(5));
                }
                Err(error) => {
                    return Err(error).during(|| format!("connect to {}", path.display()));
                }
            }
        };
        socket
            .set_read_timeout(Some(ANSWER_LIMIT))
            .during(|| format!("prepare {}", path.display()))?;
        let mut qmp = Self {
            path: path.to_owned(),
            reader: BufReader::new(socket),
        };
        qmp.read()?;
        qmp.execute("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Executes a command and returns its result.
    ///
    /// # Errors
    /// When QEMU refuses it or does not answer.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, LabError> {
        let line = json!({"execute": command, "arguments": arguments});
        let path = self.path.clone();
        self.reader
            .get_mut()
            .write_all(format!("{line}\n").as_bytes())
            .during(|| format!("ask QEMU at {} to {command}", path.display()))?;
        loop {
            let mut message = self.read()?;
            if let Some(result) = message.get_mut("return") {
                return Ok(result.take());
            }
            if let Some(error) = message.get("error") {
                return Err(self.unexpected(command, &error.to_string()));
            }
        }
    }

    fn read(&mut self) -> Result<Value, LabError> {
        let mut line = String::new();
        let path = self.path.clone();
        let length = self
            .reader
            .by_ref()
            .take(LONGEST_LINE)
            .read_line(&mut line)
            .during(|| format!("read what QEMU says at {}", path.display()))?;
        if length == 0 {
            return Err(self.unexpected("", "it ended"));
        }
        serde_json::from_str(&line).map_err(|error| self.unexpected("", &error.to_string()))
    }

    fn unexpected(&self, command: &str, message: &str) -> LabError {
        LabError::Answer {
            what: format!("QEMU at {} {command}", self.path.display())
                .trim_end()
                .to_owned(),
            message: message.to_owned(),
        }
    }
}
