//! Operations on a guest's QEMU that both ends of a migration use.

use longhaul_hypervisor::Guest;

/// Returns the last 400 bytes of a QEMU's log.
pub(crate) fn end_of_log(guest: &Guest) -> String {
    let log = std::fs::read(guest.log()).unwrap_or_default();
    let end = String::from_utf8_lossy(&log[log.len().saturating_sub(400)..]).into_owned();
    end.trim().to_owned()
}

/// Returns an error if a guest's QEMU has ended: its process id may be another's.
pub(crate) fn is_alive(guest: &Guest) -> Result<(), String> {
    match guest.process().map(|id| id.is_alive()) {
        Some(Ok(true)) => Ok(()),
        _ => Err("its QEMU has ended".to_owned()),
    }
}
