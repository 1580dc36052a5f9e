//! The descriptions of guests that were started here. They stay when their QEMUs have ended.

use std::path::{Path, PathBuf};

/// Returns the folder of the descriptions, in the agent's state folder.
pub fn folder(state: &Path) -> PathBuf {
    state.join("descriptions")
}

/// Returns the file of a guest's description.
pub fn file(state: &Path, guest: &str) -> PathBuf {
    folder(state).join(format!("{guest}.toml"))
}
