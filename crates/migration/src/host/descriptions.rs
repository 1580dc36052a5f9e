//! The descriptions of guests that were started here. They stay when their QEMUs have ended.

use longhaul_hypervisor::description;
use longhaul_protocol::guest::GuestDescription;
use std::io;
use std::path::{Path, PathBuf};

/// Returns the folder of the descriptions, in the agent's state folder.
pub fn folder(state: &Path) -> PathBuf {
    state.join("descriptions")
}

/// Returns the file of a guest's description.
pub fn file(state: &Path, guest: &str) -> PathBuf {
    folder(state).join(format!("{guest}.toml"))
}

/// Reads the description of a guest that runs or was started here; `None` if there is none.
///
/// # Errors
/// When it cannot be read, or is not valid.
pub fn read(state: &Path, guest: &str) -> io::Result<Option<GuestDescription>> {
    let running = state.join("guests").join(guest).join("description.toml");
    for path in [running, file(state, guest)] {
        match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            text => {
                return description::parse(&text?)
                    .map(Some)
                    .map_err(io::Error::other);
            }
        }
    }
    Ok(None)
}
