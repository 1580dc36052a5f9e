//! Defines a line of the matrix: a QEMU command line with placeholders, and what it needs.

use longhaul_lab::error::{During, LabError};
use serde::{Deserialize, Deserializer, Serialize, de};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Limits of files of lines.
const FILE_BYTES_MAX: u64 = 1 << 20;
const LINES_MAX: usize = 1000;
const WORDS_MAX: usize = 1000;
const PARTS_MAX: usize = 64;
const ID_BYTES_MAX: usize = 48;

/// The words by which guests of libvirt and of Proxmox VE are known, and what hides them.
const MANAGERS: [(&str, &str); 2] = [("/libvirt/", "/lv/"), ("/qemu-server/", "/qs/")];

/// A command line, and what it needs to start.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// Its name, unique in a run.
    pub id: String,
    /// The program that writes such lines, or `script`.
    pub tool: String,
    /// The year of the source.
    pub year: u32,
    /// Where the line comes from.
    pub source: String,
    /// The version of QEMU.
    pub qemu: String,
    /// The words after the program, with placeholders such as `{DISK1}`.
    pub argv: Vec<String>,
    /// The kind of each disk, by placeholder.
    #[serde(default)]
    pub disks: BTreeMap<String, DiskKind>,
    /// The text of files that the line reads, by placeholder.
    #[serde(default)]
    pub files: BTreeMap<String, String>,
    /// QMP commands to execute after the start, with their arguments.
    #[serde(default)]
    pub after: Vec<(String, Value)>,
    /// A process that must run beside QEMU.
    #[serde(default)]
    pub helper: Option<Helper>,
    /// What was changed in the source's line.
    #[serde(default)]
    pub changes: Vec<String>,
    /// Anything else about it.
    #[serde(default)]
    pub note: String,
    /// The required result; without one, a refusal is allowed.
    #[serde(default)]
    pub expect: Option<Expectation>,
}

/// The content of a disk, and the way in which it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
pub enum DiskKind {
    /// A raw image of 64 MiB.
    #[serde(rename = "raw")]
    Raw,
    /// A raw image of 16 MiB.
    #[serde(rename = "raw16")]
    SmallRaw,
    /// A qcow2 image.
    #[serde(rename = "qcow2")]
    Qcow2,
    /// A qcow2 image with a persistent bitmap `b0`.
    #[serde(rename = "qcow2-bitmap")]
    Qcow2WithBitmap,
    /// A qcow2 image on a raw one that other guests use too: a linked clone.
    #[serde(rename = "qcow2-clone")]
    Clone,
    /// The last of three qcow2 images: two snapshots, and what was written since.
    #[serde(rename = "qcow2-chain")]
    Chain,
    /// The same on a raw image, where the names of the images are relative.
    #[serde(rename = "qcow2-relative")]
    RelativeChain,
    /// An image of VMware's format.
    #[serde(rename = "vmdk")]
    Vmdk,
    /// A volume: a loop device on a raw image.
    #[serde(rename = "block")]
    Volume,
    /// A read-only image that only the first host has.
    #[serde(rename = "seed")]
    Seed,
    /// Variables of UEFI firmware in a raw file.
    #[serde(rename = "vars-raw")]
    RawVariables,
    /// The same in a qcow2 image.
    #[serde(rename = "vars-qcow2")]
    Qcow2Variables,
}

/// A process beside QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Helper {
    /// An emulated TPM, at the socket whose name ends with `.swtpm`.
    Swtpm,
}

/// The result that a line must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expectation {
    /// It moves, and moves back.
    Moves,
    /// It moves; the way back is refused for a reason that contains this.
    MovesThere(String),
    /// It is refused for a reason that contains this.
    Refused(String),
}

impl FromStr for Expectation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (word, reason) = text.split_once(':').unwrap_or((text, ""));
        let reason = reason.trim().to_owned();
        match (word, reason.is_empty()) {
            ("moves", true) => Ok(Self::Moves),
            ("moves-there", false) => Ok(Self::MovesThere(reason)),
            ("refused", false) => Ok(Self::Refused(reason)),
            _ => Err(format!(
                "`{text}` is none of moves, moves-there:REASON, refused:REASON"
            )),
        }
    }
}

impl fmt::Display for Expectation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Moves => f.write_str("moves"),
            Self::MovesThere(reason) => write!(f, "moves-there:{reason}"),
            Self::Refused(reason) => write!(f, "refused:{reason}"),
        }
    }
}

impl<'de> Deserialize<'de> for Expectation {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

impl Serialize for Expectation {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Line {
    /// Returns the placeholders in its words, files and commands.
    pub fn placeholders(&self) -> BTreeSet<String> {
        let after = self.after.iter().map(|(_, value)| value.to_string());
        let texts = self.argv.iter().chain(self.files.values()).cloned();
        let mut found = BTreeSet::new();
        for text in texts.chain(after) {
            for part in text.split('{').skip(1) {
                if let Some((name, _)) = part.split_once('}')
                    && is_placeholder(name)
                {
                    found.insert(name.to_owned());
                }
            }
        }
        found
    }

    /// Returns whether a word of it belongs to a manager of guests.
    pub fn names_a_manager(&self) -> bool {
        let has = |text: &String| MANAGERS.iter().any(|(word, _)| text.contains(word));
        self.argv.iter().chain(self.files.values()).any(has)
    }

    /// Replaces the words by which a manager's guests are known.
    pub fn hide_managers(&mut self) {
        for text in self.argv.iter_mut().chain(self.files.values_mut()) {
            for (word, other) in MANAGERS {
                *text = text.replace(word, other);
            }
        }
    }

    fn check(&self) -> Result<(), String> {
        let id = &self.id;
        if !is_id(id) {
            return Err(format!(
                "the id `{id}` is not made of at most {ID_BYTES_MAX} of a-z, 0-9, `.` and `-`"
            ));
        }
        let parts = [self.disks.len(), self.files.len(), self.after.len()];
        if self.argv.is_empty() || self.argv.len() > WORDS_MAX {
            return Err(format!("{id} has no words, or more than {WORDS_MAX}"));
        }
        if parts.iter().any(|count| *count > PARTS_MAX) {
            return Err(format!("{id} has more than {PARTS_MAX} of something"));
        }
        let keys = self.disks.keys().chain(self.files.keys());
        if let Some(key) = keys.into_iter().find(|key| !is_placeholder(key)) {
            return Err(format!("{id}: `{key}` is no placeholder such as DISK1"));
        }
        Ok(())
    }
}

fn is_id(text: &str) -> bool {
    let fits = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-');
    (1..=ID_BYTES_MAX).contains(&text.len()) && text.bytes().all(fits) && !text.starts_with('.')
}

fn is_placeholder(name: &str) -> bool {
    let fits = |byte: u8| matches!(byte, b'A'..=b'Z' | b'0'..=b'9' | b'_');
    name.starts_with(|first: char| first.is_ascii_uppercase()) && name.bytes().all(fits)
}

/// Replaces the placeholders in a text.
pub fn fill(text: &str, values: &BTreeMap<String, String>) -> String {
    let mut filled = text.to_owned();
    for (key, value) in values {
        filled = filled.replace(&format!("{{{key}}}"), value);
    }
    filled
}

/// Reads lines from files, and from the files `*.json` of folders.
///
/// # Errors
/// When a file cannot be read, or is not made of lines.
pub fn load(paths: &[PathBuf]) -> Result<Vec<Line>, LabError> {
    let mut lines: Vec<Line> = Vec::new();
    for path in paths {
        for file in files(path)? {
            lines.extend(parse(&file)?);
        }
    }
    let mut ids = BTreeSet::new();
    if let Some(line) = lines.iter().find(|line| !ids.insert(line.id.clone())) {
        return Err(LabError::Which(format!("two lines are called {}", line.id)));
    }
    match lines.len() {
        0 => Err(LabError::Which("these files have no lines".to_owned())),
        1..=LINES_MAX => Ok(lines),
        _ => Err(LabError::Which(format!("more than {LINES_MAX} lines"))),
    }
}

fn files(path: &Path) -> Result<Vec<PathBuf>, LabError> {
    let reading = || format!("read {}", path.display());
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(path).during(reading)? {
        let file = entry.during(reading)?.path();
        if file.extension().is_some_and(|ending| ending == "json") {
            found.push(file);
        }
    }
    found.sort();
    Ok(found)
}

/// Reads a file of one line or several, one JSON document after the other.
fn parse(path: &Path) -> Result<Vec<Line>, LabError> {
    let answer = |message: String| LabError::Answer {
        what: path.display().to_string(),
        message,
    };
    let reading = || format!("read {}", path.display());
    if fs::metadata(path).during(reading)?.len() > FILE_BYTES_MAX {
        return Err(answer(format!("it has more than {FILE_BYTES_MAX} bytes")));
    }
    let text = fs::read_to_string(path).during(reading)?;
    let documents = serde_json::Deserializer::from_str(&text).into_iter::<Line>();
    documents
        .map(|line| {
            let line = line.map_err(|error| answer(error.to_string()))?;
            line.check().map_err(answer)?;
            Ok(line)
        })
        .collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn line(more: &str) -> String {
        format!(
            r#"{{"id":"a-1","tool":"script","year":2026,"source":"own","qemu":"10.0",
                "argv":["-drive","file={{DISK1}},if=virtio","-qmp","unix:/run/libvirt/{{RUN}}"]
                {more}}}"#
        )
    }

    fn load_text(text: &str) -> Result<Vec<Line>, LabError> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("lines.json"), text).unwrap();
        fs::write(folder.path().join("README.md"), "no line").unwrap();
        load(&[folder.path().to_owned()])
    }

    #[test]
    fn a_file_has_one_line_or_several() {
        let two = line("") + &line("").replace("a-1", "a-2");
        let ids = |text: &str| -> Vec<String> {
            let lines = load_text(text).unwrap().into_iter();
            lines.map(|line| line.id).collect()
        };
        assert_eq!(ids(&line("")), ["a-1"]);
        assert_eq!(ids(&two), ["a-1", "a-2"]);
    }

    #[test]
    fn what_is_no_line_is_refused() {
        for text in [
            String::new(),
            line("") + &line(""),
            line(r#","expect":"perhaps""#),
            line(r#","unknown":1"#),
            line(r#","disks":{"disk":"raw"}"#),
            line("").replace("a-1", "../a"),
        ] {
            assert!(load_text(&text).is_err(), "{text}");
        }
    }

    #[test]
    fn placeholders_are_found_and_filled() {
        let line = load_text(&line(r#","after":[["x",{"path":"{FILE}"}]]"#)).unwrap();
        let found: Vec<String> = line[0].placeholders().into_iter().collect();
        assert_eq!(found, ["DISK1", "FILE", "RUN"]);
        let values = BTreeMap::from([("DISK1".to_owned(), "/d".to_owned())]);
        assert_eq!(fill(r#"{"a":"{DISK1}"}"#, &values), r#"{"a":"/d"}"#);
    }

    #[test]
    fn a_manager_s_words_are_replaced() {
        let mut line = load_text(&line("")).unwrap().remove(0);
        assert!(line.names_a_manager());
        line.hide_managers();
        assert!(!line.names_a_manager());
        assert_eq!(line.argv[3], "unix:/run/lv/{RUN}");
    }

    #[test]
    fn expectations_are_written_as_they_are_read() {
        for text in ["moves", "moves-there:it exists", "refused:its TPM"] {
            assert_eq!(text.parse::<Expectation>().unwrap().to_string(), text);
        }
        assert!("refused".parse::<Expectation>().is_err());
    }
}
