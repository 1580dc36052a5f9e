//! What is taken from the file of a guest that comes from another host. Proxmox VE carries out what
//! it says as root: `args` are words for QEMU, `hookscript` is a program, and several keys name
//! files. So only keys that are known to be harmless are taken, with the values that they may have;
//! volumes and bridges are those of this host. The source checks the same before it begins.

use crate::config::{BYTES_MAX, ConfigError, GuestConfig};
use crate::device::{Card, Content, Drive, TPM_STATE, is_card, is_drive, is_state};
use crate::storage::{format_of, is_storage_id};
use longhaul_hypervisor::config::ImageFormat;
use longhaul_hypervisor::description::check_name;

/// Keys that are taken with any value that names no path.
const PLAIN: [&str; 45] = [
    "acpi",
    "affinity",
    "agent",
    "allow-ksm",
    "autostart",
    "balloon",
    "bios",
    "boot",
    "bootdisk",
    "cipassword",
    "citype",
    "ciupgrade",
    "ciuser",
    "cores",
    "cpu",
    "cpulimit",
    "cpuunits",
    "freeze",
    "hotplug",
    "keyboard",
    "kvm",
    "localtime",
    "lock",
    "machine",
    "memory",
    "meta",
    "migrate_downtime",
    "migrate_speed",
    "name",
    "nameserver",
    "numa",
    "onboot",
    "ostype",
    "protection",
    "reboot",
    "scsihw",
    "searchdomain",
    "shares",
    "smbios1",
    "sockets",
    "sshkeys",
    "startdate",
    "startup",
    "tablet",
    "tags",
];
/// The same, of later versions or with several words.
const MORE: [&str; 6] = [
    "spice_enhancements",
    "tdf",
    "vcpus",
    "vga",
    "vmgenid",
    "watchdog",
];
/// Keys with a number after them.
const NUMBERED: [&str; 2] = ["ipconfig", "numa"];
/// Sources of random bytes.
const RANDOM: [&str; 3] = ["/dev/hwrng", "/dev/random", "/dev/urandom"];
/// Firmware that moves.
const FIRMWARE: [&str; 2] = ["seabios", "ovmf"];
/// Options of the volumes of [`is_state`] that are taken.
const STATE_OPTIONS: [&str; 6] = [
    "efitype",
    "format",
    "ms-cert",
    "pre-enrolled-keys",
    "size",
    "version",
];
/// Options of drives that are taken.
const OPTIONS: [&str; 36] = [
    "aio",
    "backup",
    "bps",
    "bps_max_length",
    "bps_rd",
    "bps_rd_max_length",
    "bps_wr",
    "bps_wr_max_length",
    "cache",
    "detect_zeroes",
    "discard",
    "format",
    "iops",
    "iops_max",
    "iops_max_length",
    "iops_rd",
    "iops_rd_max",
    "iops_rd_max_length",
    "iops_wr",
    "iops_wr_max",
    "iops_wr_max_length",
    "iothread",
    "mbps",
    "mbps_max",
    "mbps_rd",
    "mbps_rd_max",
    "mbps_wr",
    "mbps_wr_max",
    "media",
    "model",
    "queues",
    "replicate",
    "serial",
    "size",
    "ssd",
    "wwn",
];

/// Why a guest does not move, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text} (hint: {hint})")]
pub struct Refused {
    /// The reason.
    pub text: String,
    /// What to do.
    pub hint: String,
}

pub(crate) fn refuse<T>(text: impl Into<String>, hint: impl Into<String>) -> Result<T, Refused> {
    Err(Refused {
        text: text.into(),
        hint: hint.into(),
    })
}

impl From<ConfigError> for Refused {
    fn from(error: ConfigError) -> Self {
        Self {
            text: format!("its file is not understood: {error}"),
            hint: "qm config VMID shows it; report this with its output".to_owned(),
        }
    }
}

fn base(key: &str) -> &str {
    key.trim_end_matches(|c: char| c.is_ascii_digit())
}

/// Returns whether a key stays behind without any effect on the guest: volumes that it does not
/// use, the lock, and what only the source knows.
pub fn stays_behind(key: &str) -> bool {
    matches!(
        key,
        "lock" | "parent" | "vmstate" | "vmstatestorage" | "digest"
    ) || base(key) == "unused" && key != "unused"
}

/// Refuses a guest whose settings do not move.
///
/// # Errors
/// The first reason.
pub fn check(config: &GuestConfig) -> Result<(), Refused> {
    let Some(name) = config.get("name") else {
        return refuse(
            "it has no name, by which both hosts know it",
            "qm set VMID --name NAME",
        );
    };
    if let Err(error) = check_name(name) {
        return refuse(format!("its name: {error}"), "qm set VMID --name NAME");
    }
    for (key, value) in config.settings().filter(|(key, _)| !stays_behind(key)) {
        setting(key, value)?;
    }
    Ok(())
}

/// Refuses what a file says beside the guest as it is now.
///
/// # Errors
/// The first reason.
pub fn check_sections(config: &GuestConfig) -> Result<(), Refused> {
    if let Some(name) = config.snapshots().next() {
        return refuse(
            format!("it has the snapshot {name}, and its disks' snapshots would stay behind"),
            format!("qm delsnapshot VMID {name}"),
        );
    }
    if let Some(key) = config.pending().next() {
        return refuse(
            format!("it has a change of `{key}` for its next start (qm pending VMID)"),
            "start it again (qm reboot VMID), or take the change back (qm set VMID --revert KEY)",
        );
    }
    Ok(())
}

fn setting(key: &str, value: &str) -> Result<(), Refused> {
    let stays = |what: &str, hint: &str| refuse(format!("it has {what} (`{key}`)"), hint);
    if is_drive(key) {
        return drive(key, value);
    }
    if is_card(key) {
        return card(key, value);
    }
    match base(key) {
        "hostpci" | "parallel" | "usb" if value != "spice" && !value.starts_with("spice,") => {
            let hint = "take it out while the guest is shut down (qm set VMID --delete KEY)";
            return stays("a device of the host", hint);
        }
        "usb" => return no_path(key, value),
        "serial" if value == "socket" => return Ok(()),
        "serial" => {
            let hint = "qm set VMID --KEY socket";
            return stays("a serial port that is a device of the host", hint);
        }
        "virtiofs" | "ivshmem" => {
            return stays("a folder or memory of the host", "take it out first");
        }
        "efidisk" | "tpmstate" if is_state(key) => return state(key, value),
        "audio" => return no_path(key, value),
        "rng" => return rng(key, value),
        _ => {}
    }
    match key {
        "args" => {
            let hint = "qm set VMID --delete args, and start it again";
            stays(
                "words for QEMU, which are not taken from another host",
                hint,
            )
        }
        "hookscript" => {
            let hint = "qm set VMID --delete hookscript; set the one of the other host afterwards";
            stays("a hook script, which stays on this host", hint)
        }
        "cicustom" => {
            let hint = "qm set VMID --delete cicustom";
            stays("cloud-init snippets, which stay on this host", hint)
        }
        "amd-sev" | "intel-tdx" => stays("encrypted memory, which nobody can copy", "shut it down"),
        "template" if value == "1" => stays("no run of its own: it is a template", "clone it"),
        "template" => Ok(()),
        "bios" if !FIRMWARE.contains(&value) => {
            let hint = "move it with qm remote-migrate";
            stays("firmware that is not known", hint)
        }
        "cpu" if value.contains("custom-") => {
            let hint = "qm set VMID --cpu x86-64-v2-AES, and start it again";
            stays("a CPU model of this cluster's own", hint)
        }
        _ if PLAIN.contains(&key) || MORE.contains(&key) || NUMBERED.contains(&base(key)) => {
            no_path(key, value)
        }
        _ => {
            let hint = "qm set VMID --delete KEY, or move it with qm remote-migrate";
            refuse(format!("`{key}` is not taken from another host"), hint)
        }
    }
}

/// No value names a path of the host.
fn no_path(key: &str, value: &str) -> Result<(), Refused> {
    let mut parts = value.split([',', ';']);
    let is_path = parts.any(|part| {
        let value = part.split_once('=').map_or(part, |(_, value)| value);
        value.trim_start().starts_with('/') || value.contains("..")
    });
    match is_path {
        true => refuse(
            format!("`{key}` names a path, which is not taken from another host"),
            "qm set VMID --delete KEY",
        ),
        false => Ok(()),
    }
}

fn rng(key: &str, value: &str) -> Result<(), Refused> {
    let source = value.split(',').find_map(|part| {
        let plain = (!part.contains('=')).then_some(part);
        part.strip_prefix("source=").or(plain)
    });
    match source.is_some_and(|source| RANDOM.contains(&source)) {
        true => Ok(()),
        false => refuse(
            format!("`{key}` has random bytes of an unknown source"),
            "qm set VMID --rng0 source=/dev/urandom",
        ),
    }
}

/// A volume whose content QEMU has in its stream.
fn state(key: &str, value: &str) -> Result<(), Refused> {
    let wrong = |what: &str, hint: &str| refuse(format!("`{key}` {what}"), hint);
    let hint = "qm config VMID shows it; report this with its output";
    let Some(drive) = Drive::read(value) else {
        return wrong("is not understood", hint);
    };
    let is_plain = |text: &str| {
        let mut bytes = text.bytes();
        bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'.') && !text.contains("..")
    };
    let mut options = drive.options();
    let odd = options.find(|(it, value)| !STATE_OPTIONS.contains(it) || !is_plain(value));
    if let Some((option, _)) = odd {
        return wrong(
            &format!("has the option {option}, which is not taken from another host"),
            "move it with qm remote-migrate",
        );
    }
    let Content::Volume { storage, name } = drive.content else {
        let hint = "move it to a storage (qm disk import)";
        return wrong("is no volume of a storage", hint);
    };
    if name.split('/').count() > 2 {
        let hint = format!("make it whole: qm disk move VMID {key} STORAGE");
        return wrong("is a linked clone, and stands on another volume", &hint);
    }
    if format_of(name).is_none() || !is_storage_id(storage) {
        return wrong("is no raw or qcow2 volume", hint);
    }
    if key == TPM_STATE && format_of(name) != Some(ImageFormat::Raw) {
        return wrong("is no raw volume", hint);
    }
    Ok(())
}

fn drive(key: &str, value: &str) -> Result<(), Refused> {
    let wrong = |what: &str, hint: &str| refuse(format!("drive {key} {what}"), hint);
    let hint = "qm config VMID shows it; report this with its output";
    let Some(drive) = Drive::read(value) else {
        return wrong("is not understood", hint);
    };
    if let Some((option, _)) = drive.options().find(|(it, _)| !OPTIONS.contains(it)) {
        return wrong(
            &format!("has the option {option}, which is not taken from another host"),
            "qm set VMID --KEY with the volume and its other options",
        );
    }
    match drive.content {
        Content::Empty => return Ok(()),
        Content::HostDrive => {
            let hint = "qm set VMID --KEY none,media=cdrom";
            return wrong("is this host's own CD drive", hint);
        }
        Content::Path(path) => {
            let hint = "move it to a storage (qm disk import, or qm disk move)";
            return wrong(&format!("is {path}, and no volume of a storage"), hint);
        }
        Content::Volume { storage, name } => {
            if drive.is_cdrom() && !drive.is_cloud_init() {
                let hint = format!("qm set VMID --{key} none,media=cdrom");
                return wrong("has an ISO image, which stays on this host", &hint);
            }
            let file = name.split_once('/').map_or(name, |(_, file)| file);
            if file.contains('/') {
                let hint = "make it whole: qm disk move VMID DISK STORAGE";
                return wrong("is a linked clone, and stands on another volume", hint);
            }
            if !is_storage_id(storage) {
                return wrong("has a storage that is not understood", hint);
            }
        }
    }
    Ok(())
}

fn card(key: &str, value: &str) -> Result<(), Refused> {
    let Some(card) = Card::read(value) else {
        let hint = "qm config VMID shows it; report this with its output";
        return refuse(format!("card {key} is not understood"), hint);
    };
    match card.bridge {
        Some(bridge) if crate::names::is_bridge(bridge) => Ok(()),
        _ => refuse(
            format!("card {key} is on no bridge"),
            "qm set VMID --KEY with bridge=vmbr0",
        ),
    }
}

/// Reads the file of a guest that comes from another host, and checks all of it.
///
/// # Errors
/// When something in it is not taken.
pub fn read_foreign(text: &str) -> Result<GuestConfig, Refused> {
    if text.len() > BYTES_MAX {
        return Err(ConfigError::TooLarge.into());
    }
    let config = GuestConfig::read(text)?;
    check(&config)?;
    check_sections(&config)?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
#notes
agent: 1
balloon: 0
bios: ovmf
boot: order=scsi0;ide2
cores: 2
cpu: x86-64-v2-AES
efidisk0: local:100/vm-100-disk-1.qcow2,efitype=4m,pre-enrolled-keys=1,size=528K
ide2: local:100/vm-100-cloudinit.qcow2,media=cdrom
ipconfig0: ip=10.0.0.2/24,gw=10.0.0.1
memory: 2048
meta: creation-qemu=9.2.0,ctime=1700000000
name: web
net0: virtio=BC:24:11:00:00:01,bridge=vmbr0,firewall=1,tag=7
numa: 0
ostype: l26
rng0: source=/dev/urandom
scsi0: local:100/vm-100-disk-0.qcow2,discard=on,iothread=1,size=32G
scsi1: none,media=cdrom
scsihw: virtio-scsi-single
serial0: socket
smbios1: uuid=7b10d7af-b932-4c66-b2c3-3996152ec465
sockets: 1
sshkeys: ssh-ed25519%20AAAA%2Fbb
tpmstate0: local:100/vm-100-disk-2.raw,size=4M,version=v2.0
unused0: local:100/vm-100-disk-9.qcow2
usb0: spice
vga: serial0
vmgenid: c773c261-d800-4348-9f5d-167fadd53cf8
";

    #[test]
    fn a_guest_as_proxmox_makes_them_is_taken() {
        let config = read_foreign(TEXT).unwrap();
        assert_eq!(config.to_string(), TEXT);
    }

    #[test]
    fn another_host_chooses_no_file_no_program_and_no_word_for_qemu() {
        for evil in [
            "args: -device x",
            "hookscript: local:snippets/x.pl",
            "cicustom: user=local:snippets/x",
            "hostpci0: 0000:01:00.0",
            "usb1: host=1234:5678",
            "serial1: /dev/ttyS0",
            "parallel0: /dev/parport0",
            "virtiofs0: dirid=etc",
            "ivshmem: size=1",
            "rng1: source=/etc/shadow",
            "efidisk1: local:100/vm-100-disk-1.qcow2,size=528K",
            "efidisk0: local:100/vm-100-disk-1.vmdk,size=528K",
            "efidisk0: local:100/vm-100-disk-1.raw,import-from=x",
            "efidisk0: local:100/vm-100-disk-1.raw,size=../1",
            "efidisk0: /dev/sda,size=528K",
            "tpmstate0: local:100/vm-100-disk-2.qcow2,size=4M,version=v2.0",
            "tpmstate0: local:100/vm-100-disk-2.raw,size=4M,version=../2",
            "tpmstate0: /dev/sda,version=v2.0",
            "tpmstate1: local:100/vm-100-disk-2.raw,size=4M",
            "scsi2: /dev/sda",
            "scsi2: file=/dev/sda,size=1G",
            "scsi2: local:iso/x.iso,media=cdrom",
            "scsi2: cdrom,media=cdrom",
            "scsi2: local:100/base-100-disk-0.qcow2/101/vm-101-disk-0.qcow2",
            "scsi2: local:100/vm-100-disk-1.qcow2,import-from=/etc/shadow",
            "scsi2: x y:vm-100-disk-1",
            "net1: virtio=BC:24:11:00:00:02",
            "net1: virtio=BC:24:11:00:00:02,bridge=../../x",
            "machine: q35,x=/etc/x",
            "template: 1",
            "amd-sev: type=std",
            "unknown: 1",
            "[PENDING]\nmemory: 1",
            "[before]\ncores: 1",
        ] {
            let key = evil.split(':').next().unwrap();
            let others = TEXT
                .lines()
                .filter(|line| line.split(':').next() != Some(key));
            let text = format!("{}\n{evil}\n", others.collect::<Vec<_>>().join("\n"));
            assert!(read_foreign(&text).is_err(), "{evil}");
        }
        for (from, to) in [
            ("name: web\n", ""),
            ("name: web\n", "name: ../web\n"),
            ("cpu: x86-64-v2-AES", "cpu: custom-mine"),
            ("numa: 0", "bios: other"),
            ("source=/dev/urandom", "source=/dev/urandom2"),
        ] {
            let text = TEXT.replace(from, to);
            assert!(read_foreign(&text).is_err(), "{to}");
        }
    }
}
