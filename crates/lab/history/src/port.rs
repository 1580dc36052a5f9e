//! Implements the port to the laboratory: one line in, then lines out, each after the one before
//! was sent.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// The port's name.
pub(crate) const NAME: &str = "history";
const PORTS: &str = "/sys/class/virtio-ports";
const LONGEST_LINE: usize = 4096;

/// The open port. A write blocks while the other end is absent, as during a move.
pub(crate) struct Port(File);

impl Port {
    /// Returns the port and the start command, once both are there.
    pub(crate) fn start_line() -> io::Result<Option<(Self, String)>> {
        let Some(path) = find() else {
            return Ok(None);
        };
        let mut file = OpenOptions::new().read(true).write(true).open(path)?;
        let mut line = Vec::new();
        let mut byte = [0];
        while line.len() < LONGEST_LINE {
            // A port whose other end is absent returns nothing.
            if file.read(&mut byte)? == 0 {
                return Ok(None);
            }
            if byte == *b"\n" {
                let line = String::from_utf8_lossy(&line).into_owned();
                return Ok(Some((Self(file), line)));
            }
            line.push(byte[0]);
        }
        Err(io::Error::other("a line without end"))
    }

    pub(crate) fn send(&mut self, line: &str) -> io::Result<()> {
        self.0.write_all(format!("{line}\n").as_bytes())
    }
}

fn find() -> Option<PathBuf> {
    let ports = fs::read_dir(PORTS).ok()?;
    ports.filter_map(Result::ok).find_map(|port| {
        let found = fs::read_to_string(port.path().join("name")).ok()?;
        (found.trim() == NAME).then(|| Path::new("/dev").join(port.file_name()))
    })
}

/// Returns a number of a flat JSON object.
pub(crate) fn number(line: &str, key: &str) -> Option<u64> {
    let (_, rest) = line.split_once(&format!("\"{key}\":"))?;
    let rest = rest.trim_start();
    let end = rest.find(|it: char| !it.is_ascii_digit());
    rest[..end.unwrap_or(rest.len())].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read() {
        let line = r#"{"command":"start","seed":7,"disks": 2}"#;
        assert_eq!(number(line, "seed"), Some(7));
        assert_eq!(number(line, "disks"), Some(2));
        assert_eq!(number(line, "depth"), None);
        assert_eq!(number(line, "command"), None);
    }
}
