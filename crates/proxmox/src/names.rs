//! The names under which two agents speak of a guest's volumes and bridges:
//! `proxmox.STORAGE.VMID.DRIVE.FORMAT` and `proxmox.BRIDGE`, with the storage, number and bridge at
//! the source. Each host has its own volumes and bridges for them.

use crate::device::is_drive;
use crate::storage::is_storage_id;
use longhaul_hypervisor::config::ImageFormat;
use std::fmt;

const PREFIX: &str = "proxmox.";

/// The number of a guest in its cluster.
pub type VmId = u32;

/// The smallest number of a guest.
pub const VMID_MIN: VmId = 100;
/// The largest number of a guest.
pub const VMID_MAX: VmId = 999_999_999;

/// The name of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeName {
    /// The storage at the source.
    pub storage: String,
    /// The guest's number there.
    pub id: VmId,
    /// The key of the drive, such as `scsi0`.
    pub drive: String,
    /// The format of the volume.
    pub format: ImageFormat,
}

/// Returns the number of a guest that a text is.
pub fn vmid(text: &str) -> Option<VmId> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    let id = digits.then(|| text.parse().ok()).flatten()?;
    (VMID_MIN..=VMID_MAX).contains(&id).then_some(id)
}

/// The end of the names of files of a format.
pub(crate) fn ending(format: ImageFormat) -> &'static str {
    match format {
        ImageFormat::Raw => "raw",
        ImageFormat::Qcow2 => "qcow2",
    }
}

impl VolumeName {
    /// Reads a name; `None` where it is none of Proxmox VE.
    pub fn read(text: &str) -> Option<Self> {
        let mut parts = text.strip_prefix(PREFIX)?.rsplitn(4, '.');
        let format = match parts.next()? {
            "raw" => ImageFormat::Raw,
            "qcow2" => ImageFormat::Qcow2,
            _ => return None,
        };
        let (drive, id, storage) = (parts.next()?, parts.next()?, parts.next()?);
        (is_drive(drive) && is_storage_id(storage)).then_some(())?;
        Some(Self {
            storage: storage.to_owned(),
            id: vmid(id)?,
            drive: drive.to_owned(),
            format,
        })
    }
}

impl fmt::Display for VolumeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            storage,
            id,
            drive,
            format,
        } = self;
        write!(f, "{PREFIX}{storage}.{id}.{drive}.{}", ending(*format))
    }
}

/// Returns the name of a network that is a bridge at the source.
pub fn network_of(bridge: &str) -> String {
    format!("{PREFIX}{bridge}")
}

/// Returns the bridge at the source that the name of a network is of.
pub fn bridge_of(network: &str) -> Option<&str> {
    network.strip_prefix(PREFIX).filter(|it| is_bridge(it))
}

/// Returns whether a text can be the name of a bridge.
pub fn is_bridge(text: &str) -> bool {
    (1..=15).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_were_written() {
        for (storage, format) in [("local", ImageFormat::Qcow2), ("a.b-c_d", ImageFormat::Raw)] {
            let name = VolumeName {
                storage: storage.to_owned(),
                id: 100,
                drive: "scsi1".to_owned(),
                format,
            };
            assert_eq!(VolumeName::read(&name.to_string()), Some(name));
        }
        for wrong in [
            "web",
            "proxmox.local.99.scsi0.raw",
            "proxmox.local.0100.scsi0.raw",
            "proxmox.local.100.efidisk0.raw",
            "proxmox.local.100.scsi0.vmdk",
            "proxmox.../etc.100.scsi0.raw",
            "proxmox.100.scsi0.raw",
        ] {
            assert_eq!(VolumeName::read(wrong), None, "{wrong}");
        }
        assert_eq!(bridge_of(&network_of("vmbr0")), Some("vmbr0"));
        assert_eq!(bridge_of("proxmox.../x"), None);
        assert_eq!(bridge_of("vmbr0"), None);
    }
}
