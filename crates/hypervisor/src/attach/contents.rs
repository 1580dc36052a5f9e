//! Describes what a guest has in small files of its host: their content goes into the description.

use super::describe::Describing;
use super::more_options::{Content, is_text};
use super::options::{CommandLine, shown};
use crate::hardware::content;
use crate::hardware::families::{CONTENTS_BYTES_MAX, FW_CFG};
use crate::process::ProcessId;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// How long after the start of its QEMU a file counts as written before it.
const SLACK: Duration = Duration::from_secs(2);

impl Describing<'_> {
    /// Adds the files of the firmware interface to the settings.
    pub(super) fn firmware_files(
        &mut self,
        line: &CommandLine,
        settings: &mut BTreeMap<String, String>,
    ) {
        let mut bytes_left = CONTENTS_BYTES_MAX;
        for file in &line.firmware_files {
            let (key, value) = match &file.content {
                Content::Text(text) if is_text(text) => ("string", text.clone()),
                Content::Text(text) if text.len() <= bytes_left => {
                    bytes_left -= text.len();
                    ("content", content::write(text.as_bytes()))
                }
                Content::Text(_) => {
                    self.too_large(&file.name);
                    continue;
                }
                Content::File(path) => match self.content(path, bytes_left) {
                    Ok(Some(bytes)) => {
                        bytes_left -= bytes.len();
                        ("content", content::write(&bytes))
                    }
                    Ok(None) => {
                        self.too_large(&file.name);
                        continue;
                    }
                    Err(error) => {
                        self.refuse(
                            format!(
                                "option -fw_cfg {} of its command line: {}: {error}",
                                shown(&file.name),
                                shown(path)
                            ),
                            "put back the file that the guest was started with, or restart the \
                             guest",
                        );
                        continue;
                    }
                },
            };
            let pairs = [("name", file.name.clone()), (key, value)];
            let pairs = pairs.map(|(key, value)| (key.to_owned(), value));
            FW_CFG.add(settings, pairs);
        }
        // A picture that the firmware shows: nothing depends on it.
        if let Some(path) = &line.splash
            && let Ok(Some(bytes)) = self.content(path, bytes_left)
        {
            settings.insert("boot.splash".to_owned(), content::write(&bytes));
        }
    }

    fn too_large(&mut self, name: &str) {
        self.refuse(
            format!(
                "option -fw_cfg {} of its command line: more than {} KiB of contents do not move \
                 along",
                shown(name),
                CONTENTS_BYTES_MAX >> 10
            ),
            "give the guest a disk with it",
        );
    }

    /// Returns the content of a file as QEMU read it when it started; `None` where it is longer.
    fn content(&self, path: &str, bytes_max: usize) -> io::Result<Option<Vec<u8>>> {
        let path = self.names.seen_by_it(path);
        if is_newer(&path, self.names.pid)? {
            let text = "it was changed after the guest's start";
            return Err(io::Error::other(text));
        }
        let mut bytes = Vec::new();
        let limit = bytes_max as u64 + 1;
        File::open(&path)?.take(limit).read_to_end(&mut bytes)?;
        Ok((bytes.len() <= bytes_max).then_some(bytes))
    }
}

/// Returns whether a file was written after a process had started.
fn is_newer(path: &Path, pid: i32) -> io::Result<bool> {
    let file = path.metadata()?;
    if !file.is_file() {
        return Err(io::Error::other("it is no file"));
    }
    let process = ProcessId::of(pid)?.ok_or_else(|| io::Error::other("the guest has ended"))?;
    let started = SystemTime::now() - process.age();
    Ok(file.modified()? > started + SLACK)
}
