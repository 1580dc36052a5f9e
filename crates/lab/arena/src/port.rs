//! Implements the port to the laboratory: lines in both directions, without blocking writes.

use crate::sys::O_NONBLOCK;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

const PORTS: &str = "/sys/class/virtio-ports";
const LONGEST_LINE: usize = 4096;
const LONGEST_QUEUE: usize = 256 << 10;

/// An open port; the other end may be absent at any time.
pub(crate) struct Port {
    file: File,
    input: Vec<u8>,
    output: Vec<u8>,
}

impl Port {
    /// Returns the device of the virtio-serial port of this name, if there is one.
    pub(crate) fn find(name: &str) -> Option<PathBuf> {
        let link = Path::new("/dev/virtio-ports").join(name);
        if link.exists() {
            return Some(link);
        }
        let ports = fs::read_dir(PORTS).ok()?;
        ports.filter_map(Result::ok).find_map(|port| {
            let found = fs::read_to_string(port.path().join("name")).ok()?;
            (found.trim() == name).then(|| Path::new("/dev").join(port.file_name()))
        })
    }

    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(O_NONBLOCK)
            .open(path)?;
        Ok(Self {
            file,
            input: Vec::new(),
            output: Vec::new(),
        })
    }

    /// Returns the lines received since the last call.
    pub(crate) fn read_lines(&mut self) -> io::Result<Vec<String>> {
        let mut buffer = [0; 4096];
        loop {
            match self.file.read(&mut buffer) {
                // The other end is not connected.
                Ok(0) => break,
                Ok(length) => self.input.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if self.input.len() > 16 * LONGEST_LINE {
                break;
            }
        }
        let mut lines = Vec::new();
        while let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.input.drain(..=end).collect();
            lines.push(String::from_utf8_lossy(&line).into_owned());
        }
        if self.input.len() > LONGEST_LINE {
            self.input.clear();
        }
        Ok(lines)
    }

    /// Queues a line that must arrive; it is kept while the other end is absent, up to a limit.
    pub(crate) fn send(&mut self, line: &str) {
        if self.output.len() + line.len() <= LONGEST_QUEUE {
            self.output.extend_from_slice(line.as_bytes());
        }
    }

    /// Sends a line if that is possible at once, and drops it otherwise.
    pub(crate) fn send_or_drop(&mut self, line: &str) -> io::Result<()> {
        self.flush()?;
        if self.output.is_empty() {
            self.output.extend_from_slice(line.as_bytes());
            self.flush()?;
            if self.output.len() == line.len() {
                self.output.clear();
            }
        }
        Ok(())
    }

    /// Writes as much as the port takes without blocking.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        while !self.output.is_empty() {
            let length = self.output.len().min(4096);
            match self.file.write(&self.output[..length]) {
                Ok(written) => drop(self.output.drain(..written)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
