//! The descriptions of guests that were started here, which stay when their QEMUs have ended.

use std::path::{Path, PathBuf};

/// The folder that they are in, by the agent's state folder.
pub fn folder(state: &Path) -> PathBuf {
    state.join("descriptions")
}

/// The description of a guest, by its name.
pub fn file(state: &Path, guest: &str) -> PathBuf {
    folder(state).join(format!("{guest}.toml"))
}
