//! Finds the backing files of a disk, as its running QEMU has them.

use super::graph::{Graph, Known};
use crate::open_files::open_files;
use crate::process_path::seen_from_here;
use crate::qmp::{Qmp, QmpError};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The maximum number of backing files that are looked for.
const BACKING_MAX: usize = 17;

/// A backing file of a disk in a QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backing {
    /// Its format, or other driver, in QEMU's words.
    pub driver: String,
    /// Its file, by the process's path; `None` where it is not a file.
    pub file: Option<String>,
}

/// Returns the backing files of a device's disk, from the top down, by the device's path in QEMU's
/// object tree.
pub async fn backing(qmp: &Qmp, device: &str) -> Result<Vec<Backing>, QmpError> {
    let (graph, known) = tokio::try_join!(Graph::ask(qmp), Known::ask(qmp))?;
    let Some(top) = graph.root(device) else {
        return Ok(Vec::new());
    };
    let below = |node: &str| {
        let format = known.below_filters(&graph, node);
        graph.child(format, "backing").cloned()
    };
    let nodes = std::iter::successors(below(top), |node| below(node)).take(BACKING_MAX);
    let backing = nodes.map(|node| {
        let node = known.below_filters(&graph, &node);
        let driver = known.driver(node).unwrap_or_default();
        let below = graph.child(node, "file").map_or(node, String::as_str);
        let is_file = known.driver(below).is_some_and(|driver| driver == "file");
        // Where only a part of the file is used, QEMU gives the node above another name.
        let all_of_it = known.file(node) == known.file(below) || driver == "qcow2";
        let file = known.file(below).filter(|_| is_file && all_of_it);
        Backing { driver, file }
    });
    Ok(backing.collect())
}

impl Backing {
    /// Returns whether it is this file of ours, byte for byte, which the process has open.
    pub fn is(&self, ours: &Path, pid: i32) -> io::Result<bool> {
        let is_raw = self.driver == "raw" || self.driver == "file";
        Ok(is_raw && self.is_in(ours, pid)?)
    }

    /// Returns whether it is in this file of ours, which the process has open.
    pub fn is_in(&self, ours: &Path, pid: i32) -> io::Result<bool> {
        let Some(path) = self.file.as_deref() else {
            return Ok(false);
        };
        let ours = fs::metadata(ours)?;
        let ours = (ours.dev(), ours.ino());
        let theirs = seen_from_here(pid, Path::new(path));
        // Its path may name another file by now.
        let theirs = fs::metadata(theirs).map(|file| (file.dev(), file.ino()));
        if !theirs.is_ok_and(|theirs| theirs == ours) {
            return Ok(false);
        }
        for file in open_files(pid)? {
            let about = file?;
            let about = about.metadata();
            if (about.dev(), about.ino()) == ours {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_file_that_the_process_has_open_is_the_one() {
        let folder = tempfile::tempdir().unwrap();
        let (ours, other) = (folder.path().join("ours"), folder.path().join("other"));
        fs::write(&ours, "a").unwrap();
        fs::write(&other, "b").unwrap();
        let pid = std::process::id() as i32;
        let is = |driver: &str, file: Option<&Path>| {
            let backing = Backing {
                driver: driver.to_owned(),
                file: file.map(|file| file.to_str().unwrap().to_owned()),
            };
            backing.is(&ours, pid).unwrap()
        };
        assert!(!is("raw", Some(&ours)), "nobody has it open");
        let open = fs::File::open(&ours).unwrap();
        assert!(is("raw", Some(&ours)));
        assert!(is("file", Some(&ours)));
        for (driver, file) in [
            ("qcow2", Some(&*ours)),
            ("raw", Some(&*other)),
            ("raw", Some(&*folder.path().join("none"))),
            ("raw", None),
        ] {
            assert!(!is(driver, file), "{driver} {file:?}");
        }
        drop(open);
    }
}
