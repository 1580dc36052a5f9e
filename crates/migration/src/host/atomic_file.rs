//! Small files that are replaced atomically, by way of a temporary file beside each.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The suffix of a file that is being written.
const UNFINISHED: &str = "new";

/// Writes a file that only its owner may access. After a crash either the old or the new content
/// exists.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".");
    new.push(UNFINISHED);
    let mut options = OpenOptions::new();
    let options = options.create(true).write(true).truncate(true).mode(0o600);
    let mut file = options.open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}

/// Removes files that an agent was writing when it died. Call this before anything is written to
/// the folder.
pub(crate) fn remove_unfinished(folder: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    let paths = entries.map(|entry| Ok(entry?.path()));
    for path in paths.collect::<io::Result<Vec<PathBuf>>>()? {
        if path.extension().is_some_and(|end| end == UNFINISHED) {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_written_to_its_end_goes_and_all_else_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        write(&path("web-7.0.note"), b"old").unwrap();
        write(&path("web-7.0.note"), b"note").unwrap();
        fs::write(path("web-7.1.note.new"), b"{").unwrap();
        fs::create_dir(path("web-7.0")).unwrap();
        remove_unfinished(folder.path()).unwrap();
        assert_eq!(fs::read(path("web-7.0.note")).unwrap(), b"note");
        assert!(path("web-7.0").exists() && !path("web-7.1.note.new").exists());
        remove_unfinished(&path("none")).unwrap();
    }
}
