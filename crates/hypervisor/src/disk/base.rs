//! Manages the base image of a disk while it arrives: the node of a disk export replaces that of
//! its file until the file is complete.
//!
//! ```text
//! disk-NAME (qcow2) ─backing▶ base-NAME (raw) ─file▶ base-coming-NAME (nbd),
//!                                                  then base-file-NAME (file)
//! ```

use super::graph::Graph;
use super::{Change, RECONNECT_SECONDS, REOPEN_TIMEOUT, add, delete};
use crate::qmp::{Qmp, QmpError};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The base image of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Base {
    /// A complete file.
    File(PathBuf),
    /// A file that is still arriving, as a disk export shows it.
    Coming {
        /// The disk export's socket.
        socket: PathBuf,
        /// The name of the export.
        export: String,
    },
}

/// Why a base image is still read through its disk export, or may be.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SettleError {
    /// An unexpected node is in its place.
    #[error(
        "the base image of disk {disk} stands on {} in QEMU: somebody else changes this guest's \
         disks; nothing was changed", found.as_deref().unwrap_or("nothing")
    )]
    Other {
        /// The disk.
        disk: String,
        /// The node found there.
        found: Option<String>,
    },
    /// The change failed; the disk export must go on.
    #[error("{0}; the base image is still read through the agent")]
    Refused(QmpError),
    /// The result of the change is unknown; the disk export must go on until it is known.
    #[error("{0}; it is not known which way the base image is read now: try again")]
    InDoubt(QmpError),
}

impl From<Change> for SettleError {
    fn from(change: Change) -> Self {
        match change {
            Change::No(error) => Self::Refused(error),
            Change::Perhaps(error) => Self::InDoubt(error),
        }
    }
}

/// The nodes of a base image, by the disk's name.
struct Names {
    format: String,
    file: String,
    coming: String,
}

impl Names {
    fn of(disk: &str) -> Self {
        Self {
            format: format!("base-{disk}"),
            file: format!("base-file-{disk}"),
            coming: format!("base-coming-{disk}"),
        }
    }

    fn format_node(&self, below: &str) -> Value {
        json!({"driver": "raw", "node-name": self.format, "file": below, "read-only": true})
    }

    /// Returns the node of the file. Guests with the same base image share this host's page cache.
    fn file_node(&self, path: &Path) -> Value {
        json!({
            "driver": "file", "node-name": self.file, "filename": path.to_string_lossy(),
            "read-only": true,
        })
    }
}

/// Returns the nodes of a base image from the bottom up, and the last one's name.
pub(crate) fn nodes(disk: &str, base: &Base) -> ([Value; 2], String) {
    let names = Names::of(disk);
    let (below, name) = match base {
        Base::File(path) => (names.file_node(path), &names.file),
        Base::Coming { socket, export } => {
            let server = json!({"type": "unix", "path": socket.to_string_lossy()});
            let node = json!({
                "driver": "nbd", "node-name": names.coming, "export": export, "server": server,
                "reconnect-delay": RECONNECT_SECONDS, "read-only": true,
            });
            (node, &names.coming)
        }
    };
    ([below, names.format_node(name)], names.format)
}

/// Replaces the disk export below a disk's base image with the file, which is complete now. The
/// disk export must answer until this has returned. The call may be repeated.
pub async fn settle(qmp: &Qmp, disk: &str, file: &Path) -> Result<(), SettleError> {
    let names = Names::of(disk);
    let graph = Graph::ask(qmp).await.map_err(SettleError::InDoubt)?;
    match graph.child(&names.format, "file") {
        Some(found) if *found == names.coming => {
            if !graph.has(&names.file) {
                let added = add(qmp, names.file_node(file)).await;
                added.map_err(SettleError::Refused)?;
            }
            let options = json!({"options": [names.format_node(&names.file)]});
            let reopened = qmp.execute("blockdev-reopen", options, REOPEN_TIMEOUT);
            reopened.await.map_err(Change::from)?;
        }
        Some(found) if *found == names.file => {}
        found => {
            let (disk, found) = (disk.to_owned(), found.cloned());
            return Err(SettleError::Other { disk, found });
        }
    }
    if graph.has(&names.coming) {
        let deleted = delete(qmp, &names.coming).await;
        deleted.map_err(SettleError::InDoubt)?;
    }
    Ok(())
}
