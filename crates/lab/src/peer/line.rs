//! Builds the command line of a baseline's QEMU.

use super::{PeerHost, channel_socket};
use crate::error::LabError;
use crate::guest::network::{BRIDGE, TAP};
use crate::netns::command;
use longhaul_protocol::guest::GuestDescription;
use serde_json::json;
use std::path::Path;
use std::process::Command;

/// The PCI slot of a guest's first disk.
const FIRST_DISK: usize = 4;

/// Returns the arguments for the guest of a description, without the parts that only an agent
/// needs.
pub(super) fn command_line(
    host: &PeerHost<'_>,
    guest: &GuestDescription,
    qmp: &Path,
) -> Result<Command, LabError> {
    let mut line = command(host.qemu);
    line.args([
        "-name",
        &guest.name,
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
    ])
    .args([
        "-machine",
        &guest.machine,
        "-accel",
        host.accelerator,
        "-cpu",
        &guest.cpu,
    ])
    .args([
        "-smp",
        &format!("cpus={0},sockets=1,cores={0},threads=1", guest.vcpus),
    ])
    .args(["-m", &format!("size={}M", guest.memory_mib)])
    .arg("-qmp")
    .arg(format!("unix:{},server=on,wait=off", qmp.display()))
    .arg("-kernel")
    .arg(&host.files.kernel)
    .arg("-initrd")
    .arg(&host.files.initramfs)
    .args(["-device", "virtio-serial-pci,id=serial,addr=0x3"]);
    if let Some(kernel) = &guest.kernel {
        line.args(["-append", &kernel.command_line]);
    }
    for (number, disk) in guest.disks.iter().enumerate() {
        if let Some(local) = host.local.iter().find(|it| it.image == disk.image) {
            line.args(local.arguments(&disk.name, FIRST_DISK + number));
            continue;
        }
        let known = host.disks.iter().find(|(image, _)| *image == disk.image);
        let (_, path) = known.ok_or_else(|| {
            LabError::Which(format!("no file is known for the image `{}`", disk.image))
        })?;
        // As the product opens a shared disk.
        let file = json!({
            "driver": "file", "node-name": format!("file-{}", disk.name), "filename": path,
            "cache": {"direct": true}, "discard": "unmap",
        });
        let format = json!({
            "driver": "raw", "node-name": format!("disk-{}", disk.name),
            "file": format!("file-{}", disk.name),
            "cache": {"direct": true}, "discard": "unmap",
        });
        line.args(["-blockdev", &file.to_string()])
            .args(["-blockdev", &format.to_string()])
            .arg("-device")
            .arg(format!(
                "virtio-blk-pci,id=blk-{0},drive=disk-{0},addr={1:#x}",
                disk.name,
                FIRST_DISK + number
            ));
    }
    for (number, nic) in guest.nics.iter().enumerate() {
        // QEMU ignores the bridge here; a reader of the command line learns the TAP's bridge.
        line.arg("-netdev")
            .arg(format!(
                "tap,id=net{number},ifname={TAP},br={BRIDGE},script=no,downscript=no"
            ))
            .arg("-device")
            .arg(format!(
                "virtio-net-pci,netdev=net{number},mac={},addr={:#x},romfile=",
                nic.mac,
                16 + number
            ));
    }
    for (number, port) in guest.channels.iter().enumerate() {
        line.arg("-chardev")
            .arg(format!(
                "socket,id=channel{number},path={},server=on,wait=off",
                channel_socket(host.host, &port.name).display()
            ))
            .arg("-device")
            .arg(format!(
                "virtserialport,bus=serial.0,nr={},chardev=channel{number},name={}",
                number + 1,
                port.name
            ));
    }
    Ok(line)
}
