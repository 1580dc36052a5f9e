//! Finds out whether the memory of a domain can follow it to this host (post-copy).

use super::arrival::refused;
use crate::connection::Connection;
use longhaul_protocol::message::Check;
use std::fs;
use std::process::Command;

/// The first version whose QEMUs may open `/dev/userfaultfd`.
const LETS_OPEN: [u64; 3] = [10, 1, 0];
/// The first version of QEMU that opens it.
const OPENS: [u64; 2] = [8, 1];
/// The kernel's setting for programs without privileges.
const UNPRIVILEGED: &str = "/proc/sys/vm/unprivileged_userfaultfd";

/// Returns what keeps the memory of a guest from following it. Newer daemons let their QEMUs open
/// `/dev/userfaultfd`, others leave it to the kernel's setting.
pub(super) fn keeps_memory_from_following(
    guest: &str,
    connection: &Connection,
    emulator: &str,
) -> Option<Check> {
    let cannot = |why: &str| format!("the memory of {guest} cannot follow it: {why}");
    // Without the file the kernel knows no such limit.
    let setting = fs::read_to_string(UNPRIVILEGED);
    if setting.is_err() || setting.is_ok_and(|setting| setting.trim() != "0") {
        return None;
    }
    let version = match connection.version() {
        Ok(version) => version,
        Err(error) => return Some(refused(cannot(&error.to_string()), None)),
    };
    let (what, newer) = match version >= LETS_OPEN {
        true => match version_of(emulator) {
            Some(version) if version < OPENS => ("QEMU", "8.1"),
            // One that does not say is asked when it has been launched.
            _ => return None,
        },
        false => ("libvirt", "10.1"),
    };
    let why = format!("{what} is older than {newer}, so the guest's QEMU cannot use userfaultfd");
    let hint = format!(
        "set vm.unprivileged_userfaultfd = 1 there, or update {what} to {newer} or later; or leave \
         out --strategy"
    );
    Some(refused(cannot(&why), Some(&hint)))
}

/// Returns the version of an emulator, major and minor.
fn version_of(emulator: &str) -> Option<[u64; 2]> {
    let said = Command::new(emulator).arg("--version").output().ok()?;
    read_version(&String::from_utf8(said.stdout).ok()?)
}

fn read_version(said: &str) -> Option<[u64; 2]> {
    let (_, version) = said.lines().next()?.split_once(" version ")?;
    let mut numbers = version.split(|it: char| !it.is_ascii_digit());
    let mut number = || numbers.next()?.parse().ok();
    Some([number()?, number()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_emulator_s_version_is_read() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright …\n";
        assert_eq!(read_version(debian), Some([7, 2]));
        assert_eq!(
            read_version("QEMU emulator version 11.1.0\n"),
            Some([11, 1])
        );
        for nothing in [
            "",
            "QEMU\n",
            "QEMU emulator version \n",
            "a version of QEMU",
        ] {
            assert_eq!(read_version(nothing), None, "{nothing:?}");
        }
    }
}
