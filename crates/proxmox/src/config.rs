//! The file of a guest, `/etc/pve/qemu-server/VMID.conf`.
//!
//! ```text
//! #notes, a line each
//! cores: 2
//! scsi0: local:100/vm-100-disk-0.qcow2,size=32G
//!
//! [PENDING]          changes for the next start
//! [special:cloudinit]
//! [before-upgrade]   a snapshot
//! ```
//!
//! Lines that are not understood are kept as they are.

use std::fmt;

/// The maximum size of a file, in bytes. That of Proxmox VE's own file system is the same.
pub const BYTES_MAX: usize = 1 << 20;
/// The maximum number of lines.
const LINES_MAX: usize = 10_000;

/// Why the file of a guest is not understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// It is too large.
    #[error("it has more than {BYTES_MAX} bytes or {LINES_MAX} lines")]
    TooLarge,
    /// A line is not of the known form.
    #[error("line {number} is neither `key: value` nor the head of a section")]
    Line {
        /// Its number, from 1 on.
        number: usize,
    },
    /// A line has a control character.
    #[error("line {number} has a control character")]
    Control {
        /// Its number, from 1 on.
        number: usize,
    },
    /// A key appears twice in a section.
    #[error("line {number} has `{key}` again")]
    Twice {
        /// Its number, from 1 on.
        number: usize,
        /// The key.
        key: String,
    },
}

/// One line.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Line {
    /// An empty line.
    Empty,
    /// A line of the notes, with its `#`.
    Note(String),
    /// A setting.
    Setting { key: String, value: String },
}

/// The settings of a guest, or of one of its snapshots.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Section {
    /// What is between its brackets; empty for the first one.
    name: String,
    lines: Vec<Line>,
}

/// The file of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestConfig {
    /// The first one is the guest's as it is now.
    sections: Vec<Section>,
}

/// Returns whether a text is the key of a setting.
fn is_key(text: &str) -> bool {
    let letters = text.trim_end_matches(|c: char| c.is_ascii_digit());
    letters.starts_with(|c: char| c.is_ascii_lowercase())
        && letters
            .chars()
            .all(|c| c.is_ascii_lowercase() || matches!(c, '_' | '-'))
}

impl GuestConfig {
    /// Reads a file.
    ///
    /// # Errors
    /// When it is not that of a guest.
    pub fn read(text: &str) -> Result<Self, ConfigError> {
        if text.len() > BYTES_MAX || text.lines().count() > LINES_MAX {
            return Err(ConfigError::TooLarge);
        }
        let mut sections = vec![Section::default()];
        for (at, line) in text.lines().enumerate() {
            let number = at + 1;
            let trimmed = line.trim_end();
            if trimmed.chars().any(|c| c.is_control() && c != '\t') {
                return Err(ConfigError::Control { number });
            }
            let head = trimmed
                .strip_prefix('[')
                .and_then(|it| it.strip_suffix(']'));
            if let Some(name) = head.filter(|name| !name.is_empty()) {
                sections.push(Section {
                    name: name.to_owned(),
                    lines: Vec::new(),
                });
                continue;
            }
            // There is always one.
            let Some(section) = sections.last_mut() else {
                break;
            };
            if trimmed.is_empty() {
                section.lines.push(Line::Empty);
                continue;
            }
            if trimmed.starts_with('#') {
                section.lines.push(Line::Note(trimmed.to_owned()));
                continue;
            }
            let parts = trimmed.split_once(':');
            let Some((key, value)) = parts.filter(|(key, _)| is_key(key)) else {
                return Err(ConfigError::Line { number });
            };
            let key = key.to_owned();
            let has = |line: &Line| matches!(line, Line::Setting { key: it, .. } if *it == key);
            if section.lines.iter().any(has) {
                return Err(ConfigError::Twice { number, key });
            }
            section.lines.push(Line::Setting {
                key,
                value: value.trim().to_owned(),
            });
        }
        Ok(Self { sections })
    }

    fn now(&self) -> impl Iterator<Item = &Line> {
        self.sections.iter().take(1).flat_map(|it| &it.lines)
    }

    /// Returns the settings of the guest as it is now, in their order.
    pub fn settings(&self) -> impl Iterator<Item = (&str, &str)> {
        self.now().filter_map(|line| match line {
            Line::Setting { key, value } => Some((key.as_str(), value.as_str())),
            Line::Empty | Line::Note(_) => None,
        })
    }

    /// Returns a setting of the guest as it is now.
    pub fn get(&self, key: &str) -> Option<&str> {
        let mut settings = self.settings();
        settings.find_map(|(it, value)| (it == key).then_some(value))
    }

    /// Changes a setting of the guest as it is now, or adds it.
    pub fn set(&mut self, key: &str, value: &str) {
        let Some(now) = self.sections.first_mut() else {
            return;
        };
        for line in &mut now.lines {
            if let Line::Setting { key: it, value: of } = line
                && it == key
            {
                value.clone_into(of);
                return;
            }
        }
        let line = Line::Setting {
            key: key.to_owned(),
            value: value.to_owned(),
        };
        let end = now.lines.iter().rposition(|line| *line != Line::Empty);
        now.lines.insert(end.map_or(0, |end| end + 1), line);
    }

    /// Keeps only settings of the guest as it is now for which this holds.
    pub fn retain(&mut self, mut wanted: impl FnMut(&str) -> bool) {
        if let Some(now) = self.sections.first_mut() {
            now.lines
                .retain(|line| !matches!(line, Line::Setting { key, .. } if !wanted(key)));
        }
    }

    /// Removes everything but the guest as it is now: snapshots, and changes for its next start.
    pub fn keep_only_now(&mut self) {
        self.sections.truncate(1);
    }

    /// Returns the lock that keeps Proxmox VE's commands away from the guest.
    pub fn lock(&self) -> Option<&str> {
        self.get("lock")
    }

    /// Returns the names of its snapshots.
    pub fn snapshots(&self) -> impl Iterator<Item = &str> {
        let sections = self.sections.iter().skip(1);
        let names = sections.map(|section| section.name.as_str());
        names.filter(|name| !name.starts_with("special:") && *name != "PENDING")
    }

    /// Returns the keys of its changes for the next start.
    pub fn pending(&self) -> impl Iterator<Item = &str> {
        let pending = self
            .sections
            .iter()
            .skip(1)
            .filter(|it| it.name == "PENDING");
        let lines = pending.flat_map(|section| &section.lines);
        lines.filter_map(|line| match line {
            Line::Setting { key, .. } => Some(key.as_str()),
            Line::Empty | Line::Note(_) => None,
        })
    }
}

impl fmt::Display for GuestConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, section) in self.sections.iter().enumerate() {
            if at > 0 {
                writeln!(f, "[{}]", section.name)?;
            }
            for line in &section.lines {
                match line {
                    Line::Empty => writeln!(f)?,
                    Line::Note(text) => writeln!(f, "{text}")?,
                    Line::Setting { key, value } => writeln!(f, "{key}: {value}")?,
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
#a note
#another%3A one
boot: order=scsi0;ide2
cores: 2
scsi0: local:100/vm-100-disk-0.qcow2,size=32G
unknown_key: whatever, it is

[PENDING]
memory: 4096
delete: balloon

[special:cloudinit]
name: web

[before-upgrade]
cores: 1
snaptime: 1700000000
";

    #[test]
    fn a_file_is_written_as_it_was_read() {
        let mut config = GuestConfig::read(TEXT).unwrap();
        assert_eq!(config.to_string(), TEXT);
        assert_eq!(config.get("cores"), Some("2"));
        assert_eq!(config.get("memory"), None);
        assert_eq!(config.lock(), None);
        assert_eq!(config.snapshots().collect::<Vec<_>>(), ["before-upgrade"]);
        assert_eq!(config.pending().collect::<Vec<_>>(), ["memory", "delete"]);
        config.set("lock", "migrate");
        config.set("cores", "4");
        let expected = TEXT
            .replace("cores: 2", "cores: 4")
            .replace("it is\n", "it is\nlock: migrate\n");
        assert_eq!(config.to_string(), expected);
        config.keep_only_now();
        config.retain(|key| key == "cores");
        assert_eq!(config.to_string(), "#a note\n#another%3A one\ncores: 4\n\n");
    }

    #[test]
    fn what_is_no_file_of_a_guest_is_refused() {
        for (text, expected) in [
            ("cores 2", ConfigError::Line { number: 1 }),
            ("cores: 2\nCores: 2", ConfigError::Line { number: 2 }),
            ("a: b\u{7}", ConfigError::Control { number: 1 }),
            (
                "a: b\nb: c\na: d",
                ConfigError::Twice {
                    number: 3,
                    key: "a".to_owned(),
                },
            ),
        ] {
            assert_eq!(GuestConfig::read(text), Err(expected), "{text}");
        }
        let large = "#\n".repeat(LINES_MAX + 1);
        assert_eq!(GuestConfig::read(&large), Err(ConfigError::TooLarge));
        assert!(GuestConfig::read("").unwrap().to_string().is_empty());
    }
}
