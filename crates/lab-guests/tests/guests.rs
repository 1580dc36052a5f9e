//! Moves guests with command lines of many forms: there, given up, and back. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

use longhaul_lab::installed;
use longhaul_lab_guests::line::{Line, load};
use longhaul_lab_guests::report::{Row, Summary};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// The lines whose result is not yet the expected one.
const NOT_YET: [&str; 0] = [];

/// The lines that are tried with LONGHAUL_EVERY_CASE=1 only. What is special of them has other
/// tests (`forms` and `words` of the hypervisor, `disk`).
const AT_TIMES: [&str; 81] = [
    "acpi-table",
    "arch",
    "audio-option",
    "auto-read-only",
    "bare-path",
    "below-a-manager",
    "bitmap-persistent",
    "bridges",
    "cdrom-empty",
    "cdrom-medium",
    "clone",
    "clone-old",
    "copy-on-read",
    "crypto",
    "debian",
    "default-card",
    "drive-none-virtio",
    "drive-throttled",
    "drive-virtio",
    "far-node",
    "floppy-q35",
    "freebsd",
    "fw-cfg",
    "generation-id",
    "gentoo",
    "gnome-boxes",
    "ide-slots",
    "incus-hotplug",
    "intel-iommu",
    "ipmi",
    "isa-cirrus",
    "kernel-one-liner",
    "kubevirt",
    "many-luns",
    "megasas",
    "memory-slots-pc",
    "minikube",
    "nested-keys",
    "net-legacy",
    "nova-chain",
    "numa",
    "nvme-namespaces",
    "openbsd",
    "opnsense",
    "osx-kvm",
    "own-kernel",
    "podman-machine",
    "pve8-windows",
    "pvscsi",
    "quickemu-windows",
    "readconfig",
    "relative-path-qcow2",
    "runqemu",
    "sata",
    "scsi-without-id",
    "seed-cd",
    "shared-memory",
    "smbios",
    "smbios-file",
    "snapshot-on",
    "snapshots-libvirt",
    "socket-net",
    "sockets",
    "spare-cpus",
    "spice",
    "stays-after-shutdown",
    "tap-script",
    "throttle-shared",
    "throttled-later",
    "two-cards",
    "two-clones",
    "two-queues",
    "uefi-bios",
    "uefi-variables",
    "utm",
    "vagrant-libvirt",
    "vdagent",
    "virt-install-debian",
    "virt-install-windows10",
    "virtme",
    "windows-xp",
];

/// The number of lines at a time: guests wait for most of their time.
const JOBS: usize = 4;

fn lines() -> Vec<Line> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("lines");
    load(&[folder]).unwrap()
}

/// Returns what a line needs and this machine does not have.
fn missing(line: &Line) -> Option<String> {
    if let Err(error) = installed::qemu(&line.qemu) {
        return Some(error.to_string());
    }
    let firmware = line.argv.iter().any(|word| word.contains("{OVMF"));
    if firmware && !Path::new("/usr/share/OVMF/OVMF_VARS_4M.fd").exists() {
        return Some("the package ovmf".to_owned());
    }
    let has = |program: &str| Command::new(program).arg("--version").output().is_ok();
    (line.helper.is_some() && !has("swtpm")).then(|| "the package swtpm".to_owned())
}

#[test]
fn every_line_has_the_expected_result() {
    let mut lines = lines();
    let ids: BTreeSet<String> = lines.iter().map(|line| line.id.clone()).collect();
    assert!(NOT_YET.iter().all(|id| ids.contains(*id)), "{NOT_YET:?}");
    assert!(AT_TIMES.iter().all(|id| ids.contains(*id)), "{AT_TIMES:?}");
    let every = std::env::var_os("LONGHAUL_EVERY_CASE").is_some();
    lines.retain(|line| every || !AT_TIMES.contains(&line.id.as_str()));
    // Every second line each day.
    let turns = [0, 1].map(|turn| installed::is_its_day(turn, 2));
    let mut turns = turns.into_iter().cycle();
    lines.retain(|_| turns.next().is_some_and(|is_due| is_due));
    lines.retain(|line| match missing(line) {
        Some(what) => {
            assert!(!installed::all_required(), "{}: {what} is missing", line.id);
            eprintln!("SKIPPED {}: {what} is missing", line.id);
            false
        }
        None => true,
    });
    let show = |row: &Row| {
        eprintln!("{}", row.text());
        Ok(())
    };
    let rows = longhaul_lab_guests::run(&lines, false, JOBS, show).unwrap();
    eprintln!("{}", Summary::of(&rows).text());
    assert_eq!(rows.len(), lines.len());
    let (not_yet, rest): (Vec<&Row>, Vec<&Row>) = rows
        .iter()
        .partition(|row| NOT_YET.contains(&row.id.as_str()));
    let wrong: Vec<&&Row> = rest.iter().filter(|row| !row.as_expected).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    let fulfilled: Vec<&str> = not_yet
        .iter()
        .filter(|row| row.as_expected)
        .map(|row| row.id.as_str())
        .collect();
    assert!(
        fulfilled.is_empty(),
        "these have the expected result now: take them off NOT_YET: {fulfilled:?}"
    );
}

#[test]
fn the_lines_are_of_all_versions() {
    let of: BTreeSet<String> = lines().into_iter().map(|line| line.qemu).collect();
    let versions = installed::QEMU_VERSIONS.map(str::to_owned);
    assert_eq!(of, BTreeSet::from(versions));
}
