//! Runs a workload beside the arena: a program that prints a line for each unit of its work.

use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// The prefix of a line that reports an error.
const ERROR: &str = "error: ";
const NAME_LENGTH_MAX: usize = 64;

/// A workload that runs, or has ended.
pub(crate) struct Load {
    shared: Arc<Shared>,
    stop_file: PathBuf,
}

#[derive(Default)]
struct Shared {
    /// Lines without errors.
    work: AtomicU64,
    errors: AtomicU64,
    ended: AtomicBool,
    first_error: Mutex<Option<String>>,
}

impl Load {
    /// Starts the program of that name. Its argument is the path of a stop file: when that exists,
    /// the program must stop working, verify its state, and end.
    pub(crate) fn start(folder: &Path, name: &str, stop_file: PathBuf) -> Result<Self, String> {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        if name.is_empty() || name.len() > NAME_LENGTH_MAX || !name.bytes().all(known) {
            return Err(format!("`{name}` is no name of a workload"));
        }
        let failed = |what: &str, error: io::Error| format!("{what} workload {name}: {error}");
        if let Err(error) = fs::remove_file(&stop_file)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(failed("preparing", error));
        }
        let mut child = Command::new(folder.join(name))
            .arg(&stop_file)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| failed("starting", error))?;
        let shared = Arc::new(Shared::default());
        let counting = shared.clone();
        thread::Builder::new()
            .spawn(move || counting.follow(&mut child))
            .map_err(|error| failed("watching", error))?;
        Ok(Self { shared, stop_file })
    }

    /// Returns the units of work so far.
    pub(crate) fn work(&self) -> u64 {
        self.shared.work.load(Ordering::Relaxed)
    }

    /// Returns the number of errors so far.
    pub(crate) fn errors(&self) -> u64 {
        self.shared.errors.load(Ordering::Relaxed)
    }

    /// Asks it to stop and to verify its state.
    pub(crate) fn stop(&self) -> Result<(), String> {
        fs::write(&self.stop_file, "").map_err(|error| format!("stopping the workload: {error}"))
    }

    /// Returns the first error once it has ended; empty where there was none.
    pub(crate) fn ended(&self) -> Option<String> {
        let first = || lock(&self.shared.first_error).clone().unwrap_or_default();
        self.shared.ended.load(Ordering::Acquire).then(first)
    }
}

impl Shared {
    fn follow(&self, child: &mut Child) {
        if let Some(output) = child.stdout.take() {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                match line.strip_prefix(ERROR) {
                    Some(error) => self.count_error(error),
                    None => drop(self.work.fetch_add(1, Ordering::Relaxed)),
                }
            }
        }
        match child.wait() {
            Ok(status) if status.success() => {}
            Ok(status) => self.count_error(&format!("the workload ended: {status}")),
            Err(error) => self.count_error(&format!("the workload cannot be waited for: {error}")),
        }
        self.ended.store(true, Ordering::Release);
    }

    fn count_error(&self, error: &str) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        lock(&self.first_error).get_or_insert_with(|| error.to_owned());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    #[test]
    fn work_is_counted_until_the_program_has_checked_itself() {
        let folder = std::env::temp_dir().join(format!("arena-load-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let program = folder.join("count");
        let text = "#!/bin/sh\nwhile [ ! -e \"$1\" ]; do echo unit; sleep 0.01; done\n\
                    echo 'error: 3 is not 4'\nexit 1\n";
        fs::write(&program, text).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let load = Load::start(&folder, "count", folder.join("stop")).unwrap();
        while load.work() < 3 {
            thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(load.ended(), None);
        load.stop().unwrap();
        let found = loop {
            match load.ended() {
                Some(found) => break found,
                None => thread::sleep(Duration::from_millis(5)),
            }
        };
        assert_eq!((found.as_str(), load.errors()), ("3 is not 4", 2));
        for wrong in ["", "../count", "none"] {
            assert!(Load::start(&folder, wrong, folder.join("stop")).is_err());
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
