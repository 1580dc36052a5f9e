//! Queries a QEMU's monitor beside the product.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// The time limit of an answer, on any slow machine.
const LIMIT: Duration = Duration::from_secs(300);

/// A client of QEMU's control socket that waits for each answer.
pub(crate) struct Monitor(BufReader<UnixStream>);

impl Monitor {
    pub(crate) fn connect(path: &Path) -> Self {
        let socket = UnixStream::connect(path).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        let mut monitor = Self(BufReader::new(socket));
        monitor.read();
        monitor.ask("qmp_capabilities");
        monitor
    }

    fn read(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    pub(crate) fn ask(&mut self, command: &str) -> Value {
        self.ask_with(command, &json!({}))
    }

    pub(crate) fn ask_with(&mut self, command: &str, arguments: &Value) -> Value {
        let line = json!({ "execute": command, "arguments": arguments }).to_string() + "\n";
        self.0.get_mut().write_all(line.as_bytes()).unwrap();
        loop {
            let mut answer = self.read();
            if answer.get("event").is_none() {
                assert!(answer.get("return").is_some(), "{command}: {answer}");
                return answer["return"].take();
            }
        }
    }
}
