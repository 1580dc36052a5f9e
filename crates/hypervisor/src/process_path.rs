//! Follows the paths of another process, such as QEMU's, also relative ones.

use std::fs;
use std::path::{Path, PathBuf};

/// The maximum number of open files of a process that are examined.
const FILES_MAX: usize = 4096;

/// Returns where a path of a process leads, for us.
pub(crate) fn seen_from_here(pid: i32, path: &Path) -> PathBuf {
    root(pid).join(below(&absolute(pid, path)))
}

/// Returns a path of a process, made absolute.
pub(crate) fn absolute(pid: i32, path: &Path) -> PathBuf {
    if path.is_absolute() {
        return path.to_owned();
    }
    let folder = fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
    let plain = folder.join(path);
    let is_there = fs::exists(root(pid).join(below(&plain))).unwrap_or(false);
    // QEMU goes to `/` when it becomes a daemon, after it opened its files.
    if is_there && folder != Path::new("/") {
        return plain;
    }
    let files = open_files(pid);
    let found = match named(&files, path) {
        Some(found) => Some(found),
        None if is_there => None,
        None => beside(&files, path, pid),
    };
    found.unwrap_or(plain)
}

/// Returns whether a process finds the file of this path again. It does not find a relative one if
/// it has changed its folder since.
pub(crate) fn opens_again(pid: i32, path: &Path) -> bool {
    let folder = fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
    path.is_absolute() || absolute(pid, path) == folder.join(path)
}

/// Returns the one open file of this relative name.
fn named(files: &[PathBuf], path: &Path) -> Option<PathBuf> {
    let path = path.strip_prefix(".").unwrap_or(path);
    let mut named = files.iter().filter(|file| file.ends_with(path));
    let first = named.next()?;
    named.next().is_none().then(|| first.clone())
}

/// Returns the one file of this relative name in the folders of the open files.
fn beside(files: &[PathBuf], path: &Path, pid: i32) -> Option<PathBuf> {
    let path = path.strip_prefix(".").unwrap_or(path);
    let mut found: Vec<PathBuf> = files
        .iter()
        .filter_map(|file| Some(file.parent()?.join(path)))
        .filter(|file| root(pid).join(below(file)).is_file())
        .collect();
    found.dedup();
    match found.as_slice() {
        [file] => Some(file.clone()),
        _ => None,
    }
}

/// Returns the paths of the files that a process has open.
fn open_files(pid: i32) -> Vec<PathBuf> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"));
    let entries = entries.into_iter().flatten().take(FILES_MAX);
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
        .filter(|file| file.is_absolute())
        .collect();
    files.sort_unstable();
    files.dedup();
    files
}

fn root(pid: i32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/root"))
}

/// Returns a path without its first slash.
fn below(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    #[test]
    fn a_relative_path_of_a_daemon_is_the_file_that_it_has_open() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let image = folder.join("image.raw");
        fs::write(&image, "a").unwrap();
        fs::write(folder.join("firmware"), "b").unwrap();
        let mut command = Command::new("sleep");
        command.arg("60").current_dir("/");
        command.stdin(fs::File::open(&image).unwrap());
        let mut daemon = command
            .stdout(Stdio::null())
            .arg0("daemon")
            .spawn()
            .unwrap();
        let pid = daemon.id().cast_signed();
        let seen = |path: &str| absolute(pid, Path::new(path));
        assert_eq!(seen("image.raw"), image);
        assert_eq!(seen("./image.raw"), image);
        let again = |path: &Path| opens_again(pid, path);
        assert!(!again(Path::new("image.raw")) && again(&image) && again(Path::new("proc")));
        assert_eq!(seen("firmware"), folder.join("firmware"));
        assert_eq!(seen("mage.raw"), Path::new("/mage.raw"));
        assert_eq!(seen("proc"), Path::new("/proc"));
        let here = seen_from_here(pid, Path::new("image.raw"));
        assert_eq!(fs::read(here).unwrap(), b"a");
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }

    #[test]
    fn a_relative_path_of_another_process_begins_in_its_folder() {
        let pid = std::process::id().cast_signed();
        let here = std::env::current_dir().unwrap();
        assert_eq!(
            absolute(pid, Path::new("Cargo.toml")),
            here.join("Cargo.toml")
        );
        assert_eq!(absolute(pid, Path::new("/x")), Path::new("/x"));
        assert!(opens_again(pid, Path::new("Cargo.toml")));
    }
}
