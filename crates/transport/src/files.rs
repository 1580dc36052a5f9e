//! Writes files atomically, so that they survive a loss of power.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Replaces `path` by `content` with mode 0600: after a crash either the old or the new content
/// exists.
pub fn write_atomic(path: &Path, content: &[u8]) -> io::Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::other("not a file name"))?;
    let mut temporary = name.to_owned();
    temporary.push(format!(".{}.new", std::process::id()));
    let temporary = folder.join(temporary);
    let written = write_new(&temporary, content).and_then(|()| std::fs::rename(&temporary, path));
    if written.is_err() {
        // The first error is the one to report; the next write replaces the remains.
        let _ = std::fs::remove_file(&temporary);
        return written;
    }
    File::open(folder)?.sync_all()
}

fn write_new(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(content)?;
    file.sync_all()
}
