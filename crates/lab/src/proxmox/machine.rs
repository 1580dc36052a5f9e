//! The command line of a guest's QEMU, as Proxmox VE would write it, for Debian's QEMU: without
//! what only its own QEMU knows (`-id`, `+pve0`), without KVM where the file says `kvm: 0`, and
//! with the kernel and the channels of the laboratory's guests.

use super::commands::Settings;
use super::{Setup, Version};
use serde_json::{Value, json};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// The PCI addresses of SCSI's host adapter, and of the first drives and cards on virtio.
const SCSI_ADDRESS: u32 = 5;
const VIRTIO_ADDRESS: u32 = 0xa;
const CARD_ADDRESS: u32 = 0x12;
const LAB_ADDRESS: u32 = 0x1a;

/// The folder of UEFI firmware. That of Proxmox VE is `/usr/share/pve-edk2-firmware`.
pub(super) const FIRMWARE: &str = "/usr/share/OVMF";

/// A drive of a guest with its volume.
pub(super) struct Drive {
    pub(super) key: String,
    pub(super) path: Option<PathBuf>,
    pub(super) format: String,
    pub(super) is_cdrom: bool,
    /// Whether what the guest discards is freed.
    pub(super) discards: bool,
}

/// The volume of a guest's UEFI variables.
pub(super) struct EfiDisk {
    pub(super) path: PathBuf,
    pub(super) format: String,
    /// Whether its firmware is one of 4 MiB.
    pub(super) is_4m: bool,
}

fn number(key: &str, prefix: &str) -> Option<u32> {
    key.strip_prefix(prefix)?.parse().ok()
}

/// Returns the words for a guest's QEMU.
pub(super) fn command_line(
    id: &str,
    settings: &Settings,
    (setup, forced): (&Setup, Option<&str>),
    (drives, efi_disk): (&[Drive], Option<&EfiDisk>),
    bridge_script: &str,
) -> Vec<String> {
    let run = format!("/var/run/qemu-server/{id}");
    let get = |key: &str, otherwise: &str| {
        let value = settings.get(key);
        value.map_or_else(|| otherwise.to_owned(), str::to_owned)
    };
    let cores = get("cores", "1");
    let mut words: Vec<String> = vec![setup.qemu.display().to_string()];
    let mut add = |option: &str, value: String| {
        words.push(option.to_owned());
        if !value.is_empty() {
            words.push(value);
        }
    };
    add("-name", format!("{},debug-threads=on", get("name", "vm")));
    add("-no-shutdown", String::new());
    let socket = "server=on,wait=off";
    add("-chardev", format!("socket,id=qmp,path={run}.qmp,{socket}"));
    add("-mon", "chardev=qmp,mode=control".to_owned());
    add("-pidfile", format!("{run}.pid"));
    add("-daemonize", String::new());
    if let Some(smbios) = settings.get("smbios1") {
        add("-smbios", format!("type=1,{smbios}"));
    }
    add(
        "-smp",
        format!("{cores},sockets=1,cores={cores},maxcpus={cores}"),
    );
    add("-nodefaults", String::new());
    add("-boot", "menu=on,strict=on,reboot-timeout=1000".to_owned());
    if settings.get("tpmstate0").is_some() {
        add("-chardev", format!("socket,id=tpmchar,path={run}.swtpm"));
        add("-tpmdev", "emulator,id=tpmdev,chardev=tpmchar".to_owned());
        add("-device", "tpm-tis,tpmdev=tpmdev".to_owned());
    }
    let mut flash = String::new();
    if let Some(disk) = efi_disk {
        for (option, value) in efi_words(disk, setup.version) {
            add(option, value);
        }
        if setup.version == Version::Nine {
            flash = "pflash0=pflash0,pflash1=drive-efidisk0,".to_owned();
        }
    }
    add("-vnc", format!("unix:{run}.vnc"));
    add("-cpu", get("cpu", "qemu64"));
    add("-m", get("memory", "512"));
    if let Some(guid) = settings.get("vmgenid") {
        add("-device", format!("vmgenid,guid={guid}"));
    }
    add(
        "-device",
        "piix3-usb-uhci,id=uhci,bus=pci.0,addr=0x1.0x2".to_owned(),
    );
    add(
        "-device",
        "usb-tablet,id=tablet,bus=uhci.0,port=1".to_owned(),
    );
    add("-device", "VGA,id=vga,bus=pci.0,addr=0x2".to_owned());
    let balloon = "virtio-balloon-pci,id=balloon0,bus=pci.0,addr=0x3";
    add("-device", format!("{balloon},free-page-reporting=on"));
    if drives.iter().any(|drive| drive.key.starts_with("scsi")) {
        let adapter = "virtio-scsi-pci,id=scsihw0,bus=pci.0";
        add("-device", format!("{adapter},addr={SCSI_ADDRESS:#x}"));
    }
    for drive in drives {
        for (option, value) in drive_words(drive, setup.version) {
            add(option, value);
        }
    }
    for (key, value) in settings.all() {
        let Some(index) = number(key, "net") else {
            continue;
        };
        let mac = value.split(',').next().and_then(|it| it.split_once('='));
        let mac = mac.map(|(_, mac)| mac).unwrap_or_default();
        let scripts = format!("script={bridge_script},downscript=no");
        add(
            "-netdev",
            format!("type=tap,id={key},ifname=tap{id}i{index},{scripts}"),
        );
        let address = CARD_ADDRESS + index;
        let card = format!("virtio-net-pci,mac={mac},netdev={key},bus=pci.0");
        add("-device", format!("{card},addr={address:#x},id={key}"));
    }
    if let Some((kernel, initramfs)) = &setup.kernel {
        add("-kernel", kernel.display().to_string());
        add("-initrd", initramfs.display().to_string());
        add("-append", setup.command_line.clone());
    }
    let serial = "virtio-serial-pci,id=lab,bus=pci.0";
    add("-device", format!("{serial},addr={LAB_ADDRESS:#x}"));
    for name in &setup.channels {
        add(
            "-chardev",
            format!("socket,id=lab-{name},path={run}.{name},{socket}"),
        );
        add(
            "-device",
            format!("virtserialport,bus=lab.0,chardev=lab-{name},name={name}"),
        );
    }
    let machine = match (forced, settings.get("machine")) {
        (Some(machine), _) | (None, Some(machine)) => machine.to_owned(),
        (None, None) => format!("pc-i440fx-{}", setup.machine_version),
    };
    let accelerator = match settings.get("kvm") {
        Some("0") => "accel=tcg,",
        _ => "",
    };
    let machine = format!("{accelerator}hpet=off,{flash}type={machine}");
    add("-machine", machine);
    words
}

/// Returns the options of UEFI firmware and its variables.
fn efi_words(disk: &EfiDisk, version: Version) -> Vec<(&'static str, String)> {
    let (code, bytes) = match disk.is_4m {
        true => ("OVMF_CODE_4M.fd", 540_672),
        false => ("OVMF_CODE.fd", 131_072),
    };
    let code = format!("{FIRMWARE}/{code}");
    let (path, is_raw) = (disk.path.display().to_string(), disk.format == "raw");
    match version {
        Version::Eight => {
            let size = match is_raw {
                true => format!(",size={bytes}"),
                false => String::new(),
            };
            let variables = format!("format={},file={path}{size}", disk.format);
            let code = format!("if=pflash,unit=0,format=raw,readonly=on,file={code}");
            let variables = format!("if=pflash,unit=1,id=drive-efidisk0,{variables}");
            vec![("-drive", code), ("-drive", variables)]
        }
        Version::Nine => {
            let code = json!({
                "driver": "raw", "file": {"driver": "file", "filename": code},
                "node-name": "pflash0", "read-only": true,
            });
            let group = "throttle-drive-efidisk0";
            let throttle = json!({"id": group, "limits": {}, "qom-type": "throttle-group"});
            let mut format = json!({
                "driver": disk.format, "node-name": digest('f', &disk.path), "read-only": false,
                "file": {"driver": driver_of(&disk.path), "filename": path,
                         "node-name": digest('e', &disk.path), "read-only": false},
            });
            if is_raw {
                format["size"] = bytes.into();
            }
            let variables = json!({
                "driver": "throttle", "node-name": "drive-efidisk0", "read-only": false,
                "throttle-group": group, "file": format,
            });
            vec![
                ("-object", throttle.to_string()),
                ("-blockdev", code.to_string()),
                ("-blockdev", variables.to_string()),
            ]
        }
    }
}

/// Returns the driver of a volume's lowest node.
fn driver_of(path: &Path) -> &'static str {
    let is_device = path
        .metadata()
        .is_ok_and(|it| it.file_type().is_block_device());
    if is_device { "host_device" } else { "file" }
}

/// Returns a node's name. Proxmox VE's are digests of the volume's name, of the same length.
fn digest(first: char, path: &Path) -> String {
    let sum = path.display().to_string().bytes().fold(7_u64, |sum, byte| {
        sum.wrapping_mul(0x100_0000_01b3).wrapping_add(byte.into())
    });
    format!("{first}{sum:016x}{:014x}", sum >> 8)
}

/// Returns the options of a drive.
fn drive_words(drive: &Drive, version: Version) -> Vec<(&'static str, String)> {
    let Drive { key, is_cdrom, .. } = drive;
    let mut words = Vec::new();
    if let Some(path) = &drive.path {
        let format = &drive.format;
        let name = format!("drive-{key}");
        match version {
            Version::Eight => {
                let media = if *is_cdrom {
                    ",media=cdrom,readonly=on"
                } else {
                    ""
                };
                let path = path.display();
                let discards = match drive.discards {
                    true => ",discard=on,detect-zeroes=unmap",
                    false => "",
                };
                let rest = format!("id={name},format={format},cache=none,aio=threads{discards}");
                words.push(("-drive", format!("file={path},if=none,{rest}{media}")));
            }
            Version::Nine => {
                let group = format!("throttle-{name}");
                let throttle = json!({"id": group, "limits": {}, "qom-type": "throttle-group"});
                words.push(("-object", throttle.to_string()));
                let node = blockdev(drive, path, &name, &group);
                words.push(("-blockdev", node.to_string()));
            }
        }
    }
    let of = match &drive.path {
        Some(_) => format!(",drive=drive-{key}"),
        None => String::new(),
    };
    let device = if let Some(index) = number(key, "virtio") {
        let address = VIRTIO_ADDRESS + index;
        format!("virtio-blk-pci,bus=pci.0,addr={address:#x},id={key}{of}")
    } else if let Some(index) = number(key, "scsi") {
        let kind = if *is_cdrom { "scsi-cd" } else { "scsi-hd" };
        format!("{kind},bus=scsihw0.0,channel=0,scsi-id={index},lun=0,id={key}{of}")
    } else {
        let index = number(key, "ide").unwrap_or_default();
        let kind = if *is_cdrom { "ide-cd" } else { "ide-hd" };
        format!(
            "{kind},bus=ide.{},unit={},id={key}{of}",
            index / 2,
            index % 2
        )
    };
    words.push(("-device", device));
    words
}

/// Returns the nodes of a drive: the throttle filter, the format, and the file.
fn blockdev(drive: &Drive, path: &Path, name: &str, group: &str) -> Value {
    let read_only = drive.is_cdrom;
    let cache = json!({"direct": true, "no-flush": false});
    let mut file = json!({
        "driver": driver_of(path), "node-name": digest('e', path),
        "read-only": read_only,
        "cache": cache, "aio": "threads", "filename": path.display().to_string(),
    });
    let mut format = json!({
        "driver": drive.format, "node-name": digest('f', path), "read-only": read_only,
        "cache": cache,
    });
    let mut throttle = json!({
        "driver": "throttle", "node-name": name, "throttle-group": group, "read-only": read_only,
    });
    if drive.discards {
        for node in [&mut file, &mut format, &mut throttle] {
            node["discard"] = "unmap".into();
            node["detect-zeroes"] = "unmap".into();
        }
    }
    format["file"] = file;
    throttle["file"] = format;
    throttle
}
