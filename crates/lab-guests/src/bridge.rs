//! Lets QEMU's bridge helper use the bridge of the hosts, for lines with `bridge,br={BRIDGE}`.

use crate::line::Line;
use crate::stage::BRIDGE;
use longhaul_lab::error::{During, LabError};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// The file that lists the bridges of which the helper may make ports.
const FOLDER: &str = "/etc/qemu";
const FILE: &str = "/etc/qemu/bridge.conf";

/// The permission, where there was none. It is taken back when this is dropped.
#[derive(Debug)]
pub(crate) struct Permission;

impl Permission {
    /// Gives it, if a line needs it and this machine has no such file.
    pub(crate) fn give(lines: &[Line]) -> Result<Option<Self>, LabError> {
        let needs = |word: &String| word.contains("bridge,") && word.contains("br={BRIDGE}");
        if !lines.iter().any(|line| line.argv.iter().any(needs)) || Path::new(FILE).exists() {
            return Ok(None);
        }
        fs::create_dir_all(FOLDER).during(|| format!("make {FOLDER}"))?;
        let mut file = match File::create_new(FILE) {
            // Another run was faster.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
            made => made.during(|| format!("write {FILE}"))?,
        };
        let given = Self;
        file.write_all(format!("allow {BRIDGE}\n").as_bytes())
            .during(|| format!("write {FILE}"))?;
        Ok(Some(given))
    }
}

impl Drop for Permission {
    fn drop(&mut self) {
        // The folder is not empty if something else uses it.
        let _ = fs::remove_file(FILE).and_then(|()| fs::remove_dir(FOLDER));
    }
}
