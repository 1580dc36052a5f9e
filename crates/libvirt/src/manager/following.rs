//! Finds out whether the memory of a domain can follow it to this host (post-copy).

use super::arrival::refused;
use crate::connection::Connection;
use longhaul_protocol::message::Check;
use std::fs::{self, File};
use std::io::Read;
use std::process::Command;

/// The first version whose QEMUs may open `/dev/userfaultfd`.
const LETS_OPEN: [u64; 3] = [10, 1, 0];
/// The first version of QEMU that opens it.
const OPENS: [u64; 2] = [8, 1];
/// What it opens.
const DEVICE: &str = "/dev/userfaultfd";
/// libvirt's configuration for QEMU.
const CONFIGURATION: &str = "/etc/libvirt/qemu.conf";
/// The longest one that is read; the one that libvirt comes with has 40 KB.
const CONFIGURATION_BYTES_MAX: u64 = 1 << 20;
/// The kernel's setting for programs without privileges.
const UNPRIVILEGED: &str = "/proc/sys/vm/unprivileged_userfaultfd";

/// Returns what keeps the memory of a guest from following it. Newer daemons let their QEMUs open
/// `/dev/userfaultfd`, others leave it to the kernel's setting.
pub(super) fn keeps_memory_from_following(
    guest: &str,
    connection: &Connection,
    emulator: &str,
) -> Option<Check> {
    let cannot = |why: &str, hint: Option<&str>| {
        let text = format!("the memory of {guest} cannot follow it: {why}");
        Some(refused(text, hint))
    };
    // Without the file the kernel knows no such limit.
    let setting = fs::read_to_string(UNPRIVILEGED);
    if setting.is_err() || setting.is_ok_and(|setting| setting.trim() != "0") {
        return None;
    }
    let older = |what: &str, than: &str| {
        let why =
            format!("{what} is older than {than}, so the guest's QEMU cannot use userfaultfd");
        let hint = format!(
            "set vm.unprivileged_userfaultfd = 1 there, or update {what} to {than} or later; or \
             leave out --strategy"
        );
        cannot(&why, Some(&hint))
    };
    match connection.version() {
        Ok(version) if version < LETS_OPEN => return older("libvirt", "10.1"),
        Ok(_) => {}
        Err(error) => return cannot(&error.to_string(), None),
    }
    // One that does not say is asked when it has been launched.
    if version_of(emulator).is_some_and(|version| version < OPENS) {
        return older("QEMU", "8.1");
    }
    let devices = configuration(connection).and_then(|text| devices(&text));
    if devices.is_some_and(|list| !list.iter().any(|device| device == DEVICE)) {
        let why = format!("cgroup_device_acl in libvirt's qemu.conf does not list {DEVICE}");
        let hint = format!(
            "add {DEVICE} to cgroup_device_acl there, and restart libvirt's daemon; or leave out \
             --strategy"
        );
        return cannot(&why, Some(&hint));
    }
    None
}

/// Returns the daemon's configuration for QEMU, where this process may read it: a daemon in a
/// container has its own.
fn configuration(connection: &Connection) -> Option<String> {
    let root = match connection.peer() {
        Some(daemon) => format!("/proc/{daemon}/root"),
        None => String::new(),
    };
    let file = File::open(root + CONFIGURATION).ok()?;
    let mut text = String::new();
    file.take(CONFIGURATION_BYTES_MAX)
        .read_to_string(&mut text)
        .ok()?;
    Some(text)
}

/// Returns the list of devices that QEMUs may use, if a configuration has one.
fn devices(configuration: &str) -> Option<Vec<String>> {
    let uncommented = |line: &str| line.split('#').next().unwrap_or_default().trim().to_owned();
    let lines: Vec<String> = configuration.lines().map(uncommented).collect();
    let text = format!("\n{}", lines.join("\n"));
    // The first one counts.
    let (_, value) = text.split_once("\ncgroup_device_acl")?;
    let list = value.trim_start().strip_prefix('=')?.split(']').next()?;
    let words = list.split(['"', '\'']).skip(1).step_by(2);
    Some(words.map(str::to_owned).collect())
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

    #[test]
    fn lists_of_devices_are_read() {
        let list = "cgroup_device_acl = [\n  \"/dev/null\", \"/dev/kvm\", # , \"/dev/a\"\n]\n";
        let short = " cgroup_device_acl=[ '/dev/null', \"/dev/userfaultfd\" ]\n";
        let commented = "#cgroup_device_acl = [\n#    \"/dev/null\"\n#]\n";
        let another = "cgroup_device_acl = [ ]\nnvram = [ \"/dev/null\" ]\n";
        let open = "cgroup_device_acl = [ \"/dev/null\",\n";
        for (text, expected) in [
            (list, Some(&["/dev/null", "/dev/kvm"][..])),
            (short, Some(&["/dev/null", "/dev/userfaultfd"])),
            (
                &format!("user = \"root\"\n{short}{list}"),
                Some(&["/dev/null", "/dev/userfaultfd"]),
            ),
            (commented, None),
            (another, Some(&[])),
            (open, Some(&["/dev/null"])),
            ("", None),
            ("cgroup_device_acl", None),
            ("cgroup_device_acl_of_mine = [ ]", None),
        ] {
            let read = devices(text);
            let read: Option<Vec<&str>> = read
                .as_ref()
                .map(|list| list.iter().map(String::as_str).collect());
            assert_eq!(read.as_deref(), expected, "{text}");
        }
    }
}
