//! What process 1 of the `tiny` guest does first: file systems, then kernel modules in their order.

use crate::sys;
use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;

const MODULES: &str = "/modules";

/// Mounts what is needed and loads every module of [`MODULES`] in the order of the files' names.
pub(crate) fn set_up() {
    for (kind, target) in [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys")] {
        if let Err(error) = sys::mount_virtual(kind, target) {
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

/// Says something on the console; there is nobody to tell when that fails.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "arena: {text}");
}
