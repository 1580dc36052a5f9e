//! Implements process 1 of the `tiny` guest: mounts file systems, then loads kernel modules in
//! their order.

use crate::sys;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::chroot;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

const MODULES: &str = "/modules";
/// The mount point of a guest's root disk, and the program run on it.
const ROOT: &str = "/root";
const INIT: &str = "/lab/init";
/// The path of this program on that disk.
const OWN_PLACE: &str = "/root/lab/arena";
const DISK_LIMIT: Duration = Duration::from_secs(60);
const POLL_EVERY: Duration = Duration::from_millis(10);

/// Mounts the necessary file systems and loads every module of [`MODULES`] in the order of the
/// files' names.
pub(crate) fn set_up() {
    for (kind, target) in [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys")] {
        if let Err(error) = sys::mount(kind, target, kind) {
            say(&format!("mount {target}: {error}"));
        }
    }
    let mut modules: Vec<PathBuf> = fs::read_dir(MODULES)
        .map(|entries| {
            entries
                .filter_map(Result::ok)
                .map(|entry| entry.path())
                .collect()
        })
        .unwrap_or_default();
    modules.sort();
    for path in modules {
        let compressed = path.extension().is_none_or(|extension| extension != "ko");
        let loaded = File::open(&path).and_then(|file| sys::load_module(&file, compressed));
        if let Err(error) = loaded {
            say(&format!("{}: {error}", path.display()));
        }
    }
}

/// Executes the init program of the system on a disk; returns the reason if that fails.
pub(crate) fn enter(device: &str) -> String {
    let waited = Instant::now();
    while !Path::new(device).exists() && waited.elapsed() < DISK_LIMIT {
        thread::sleep(POLL_EVERY);
    }
    let entered = fs::create_dir_all(ROOT)
        .and_then(|()| sys::mount(device, ROOT, "ext4"))
        .and_then(|()| fs::copy("/init", OWN_PLACE).map(drop))
        .and_then(|()| chroot(ROOT))
        .and_then(|()| std::env::set_current_dir("/"));
    let error: io::Error = match entered {
        Ok(()) => Command::new(INIT).exec(),
        Err(error) => error,
    };
    format!("starting {INIT} on {device}: {error}")
}

/// Writes to the console; a failure cannot be reported.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "arena: {text}");
}
