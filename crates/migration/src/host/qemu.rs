//! Operations on a guest's QEMU that both ends of a migration use.

use longhaul_hypervisor::guest::{self, Found, Guest};
use longhaul_hypervisor::qmp::Qmp;
use std::io;
use std::path::Path;

/// Returns the last 400 bytes of a QEMU's log.
pub(crate) fn end_of_log(guest: &Guest) -> String {
    let log = std::fs::read(guest.folder().log()).unwrap_or_default();
    let end = String::from_utf8_lossy(&log[log.len().saturating_sub(400)..]).into_owned();
    end.trim().to_owned()
}

/// Ends a QEMU that its guest no longer needs.
pub(crate) async fn stop(guest: &Guest, qmp: &Qmp) {
    if let Err(error) = guest.stop(Some(qmp)).await {
        tracing::error!(guest = guest.name(), %error, "something of this guest is left over");
    }
}

/// Returns the guest with this name, if its QEMU runs here.
pub(crate) fn find(state: &Path, name: &str) -> io::Result<Option<Guest>> {
    let found = guest::find_all(state)?;
    Ok(found.into_iter().find_map(|found| match found {
        Found::Running(guest) if guest.name() == name => Some(guest),
        Found::Running(_) | Found::Ended(_) | Found::Damaged { .. } => None,
    }))
}

/// Ends a guest's QEMU and removes everything that was created for it.
pub(crate) async fn remove(state: &Path, name: &str) -> io::Result<()> {
    for found in guest::find_all(state)? {
        match found {
            Found::Running(guest) | Found::Ended(guest) if guest.name() == name => {
                if let Err(error) = guest.stop(None).await {
                    tracing::error!(guest = name, %error, "something of it is left over");
                }
            }
            // An agent ended while it removed the folder, which is its last step.
            Found::Damaged { folder, why } if folder.name() == name => {
                tracing::info!(guest = name, why, "removing the rest of its folder");
                std::fs::remove_dir_all(folder.path())?;
            }
            Found::Running(_) | Found::Ended(_) | Found::Damaged { .. } => {}
        }
    }
    Ok(())
}
