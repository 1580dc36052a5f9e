//! Operations on a guest's QEMU that both ends of a migration use.

use longhaul_hypervisor::Guest;

/// Returns the last 400 bytes of a QEMU's log.
pub(crate) fn end_of_log(guest: &Guest) -> String {
    let log = std::fs::read(guest.log()).unwrap_or_default();
    let end = String::from_utf8_lossy(&log[log.len().saturating_sub(400)..]).into_owned();
    end.trim().to_owned()
}
