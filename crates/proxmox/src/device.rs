//! Drives and cards in the file of a guest: `scsi0: local:100/vm-100-disk-0.qcow2,size=32G`,
//! `net0: virtio=BC:24:11:00:00:01,bridge=vmbr0`.

/// Keys of drives, and how many of each a guest can have.
const DRIVES: [(&str, u32); 4] = [("ide", 4), ("sata", 6), ("scsi", 31), ("virtio", 16)];
/// Models of cards, as they are written before a card's address.
const MODELS: [&str; 13] = [
    "e1000",
    "e1000-82540em",
    "e1000-82544gc",
    "e1000-82545em",
    "e1000e",
    "i82551",
    "i82557b",
    "i82559er",
    "ne2k_isa",
    "ne2k_pci",
    "pcnet",
    "rtl8139",
    "virtio",
];
/// The key of the variables of UEFI firmware.
pub(crate) const EFI_DISK: &str = "efidisk0";
/// The key of the state of a TPM.
pub(crate) const TPM_STATE: &str = "tpmstate0";
/// The size of a TPM's state.
const TPM_BYTES: u64 = 4 << 20;
/// The sizes of the flash for variables, of firmware of 2 MiB and of 4 MiB.
const EFI_2M_BYTES: u64 = 128 << 10;
const EFI_4M_BYTES: u64 = 528 << 10;
const VMXNET3: &str = "vmxnet3";

/// Returns whether a key is that of a drive with a disk or a medium.
pub fn is_drive(key: &str) -> bool {
    DRIVES.iter().any(|(bus, count)| {
        let number = key.strip_prefix(bus).and_then(number);
        number.is_some_and(|number| number < *count)
    })
}

/// Returns whether a key is that of a volume whose content QEMU has in its stream: the variables
/// of UEFI firmware, and the state of a TPM.
pub fn is_state(key: &str) -> bool {
    [EFI_DISK, TPM_STATE].contains(&key)
}

/// Returns the size of such a volume, in bytes. That of variables must be the flash's.
pub fn state_bytes(key: &str, drive: &Drive<'_>) -> u64 {
    match (key, drive.option("efitype")) {
        (TPM_STATE, _) => TPM_BYTES,
        (_, Some("4m")) => EFI_4M_BYTES,
        _ => EFI_2M_BYTES,
    }
}

/// Returns whether a key is that of a card.
pub fn is_card(key: &str) -> bool {
    let number = key.strip_prefix("net").and_then(number);
    number.is_some_and(|number| number < 32)
}

/// Returns the number that a text is, without zeros before it.
fn number(text: &str) -> Option<u32> {
    let plain = text == "0" || !text.starts_with('0');
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (plain && digits).then(|| text.parse().ok()).flatten()
}

/// The content of a drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content<'a> {
    /// No medium.
    Empty,
    /// The host's own CD drive.
    HostDrive,
    /// A path of the host.
    Path(&'a str),
    /// A volume.
    Volume {
        /// The storage.
        storage: &'a str,
        /// The volume's name in it, such as `100/vm-100-disk-0.qcow2`.
        name: &'a str,
    },
}

/// A drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drive<'a> {
    text: &'a str,
    /// What is in it.
    pub content: Content<'a>,
}

impl<'a> Drive<'a> {
    /// Reads the value of a drive's setting.
    pub fn read(text: &'a str) -> Option<Self> {
        let first = text.split(',').next()?;
        let file = first.strip_prefix("file=").unwrap_or(first);
        let content = match file {
            "" => return None,
            "none" => Content::Empty,
            "cdrom" => Content::HostDrive,
            path if path.starts_with('/') => Content::Path(path),
            volume => {
                let (storage, name) = volume.split_once(':')?;
                if storage.is_empty() || name.is_empty() {
                    return None;
                }
                Content::Volume { storage, name }
            }
        };
        Some(Self { text, content })
    }

    /// Returns its options, after the volume.
    pub fn options(&self) -> impl Iterator<Item = (&'a str, &'a str)> + use<'a> {
        let parts = self.text.split(',').skip(1);
        parts.map(|part| part.split_once('=').unwrap_or((part, "")))
    }

    /// Returns an option.
    pub fn option(&self, key: &str) -> Option<&'a str> {
        self.options()
            .find_map(|(it, value)| (it == key).then_some(value))
    }

    /// Returns whether it is a CD drive.
    pub fn is_cdrom(&self) -> bool {
        self.option("media") == Some("cdrom")
    }

    /// Returns whether it has the volume that Proxmox VE makes for cloud-init.
    pub fn is_cloud_init(&self) -> bool {
        let volume = match self.content {
            Content::Volume { name, .. } => name,
            Content::Empty | Content::HostDrive | Content::Path(_) => return false,
        };
        let file = volume.rsplit('/').next().unwrap_or(volume);
        let stem = file.split('.').next().unwrap_or(file);
        self.is_cdrom()
            && stem
                .strip_prefix("vm-")
                .and_then(|rest| rest.split_once('-'))
                .is_some_and(|(id, what)| number(id).is_some() && what == "cloudinit")
    }

    /// Returns the setting's value with another volume.
    pub fn with_volume(&self, storage: &str, name: &str) -> String {
        let rest = self.text.split_once(',').map(|(_, rest)| rest);
        let rest = rest.map(|rest| format!(",{rest}")).unwrap_or_default();
        format!("{storage}:{name}{rest}")
    }
}

/// A card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Card<'a> {
    text: &'a str,
    /// Its address.
    pub mac: &'a str,
    /// The bridge that it is on, if it is on one.
    pub bridge: Option<&'a str>,
}

impl<'a> Card<'a> {
    /// Reads the value of a card's setting.
    pub fn read(text: &'a str) -> Option<Self> {
        let parts = || {
            text.split(',')
                .map(|part| part.split_once('=').unwrap_or((part, "")))
        };
        let is_model = |key: &str| MODELS.contains(&key) || key == VMXNET3;
        let mac = parts().find(|(key, _)| is_model(key) || *key == "macaddr");
        let bridge = parts().find(|(key, _)| *key == "bridge");
        Some(Self {
            text,
            mac: mac.map(|(_, mac)| mac).filter(|mac| !mac.is_empty())?,
            bridge: bridge.map(|(_, bridge)| bridge),
        })
    }

    /// Returns the setting's value with another bridge.
    pub fn with_bridge(&self, bridge: &str) -> String {
        let parts = self.text.split(',').map(|part| match part {
            part if part.starts_with("bridge=") => format!("bridge={bridge}"),
            part => part.to_owned(),
        });
        parts.collect::<Vec<_>>().join(",")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drives_are_known_by_their_keys() {
        for key in ["ide0", "scsi30", "sata5", "virtio15"] {
            assert!(is_drive(key), "{key}");
        }
        for key in [
            "ide4", "scsi31", "scsi", "scsi01", "scsihw", "efidisk0", "unused0",
        ] {
            assert!(!is_drive(key), "{key}");
        }
        assert!(is_card("net31"));
        assert!(!is_card("net32") && !is_card("net") && !is_card("network0"));
    }

    #[test]
    fn volumes_of_states_have_the_sizes_that_qemu_needs() {
        for (key, options, kib) in [
            ("efidisk0", ",efitype=4m,size=4M", 528),
            ("efidisk0", ",efitype=2m", 128),
            ("efidisk0", "", 128),
            ("tpmstate0", ",size=4M,version=v2.0", 4096),
        ] {
            let text = format!("local:100/vm-100-disk-1.raw{options}");
            let drive = Drive::read(&text).unwrap();
            assert!(is_state(key));
            assert_eq!(state_bytes(key, &drive), kib << 10, "{key} {options}");
        }
        assert!(!is_state("efidisk1") && !is_state("scsi0"));
    }

    #[test]
    fn a_drive_has_a_volume_and_options() {
        let drive = Drive::read("local:100/vm-100-disk-0.qcow2,discard=on,size=32G").unwrap();
        assert_eq!(
            drive.content,
            Content::Volume {
                storage: "local",
                name: "100/vm-100-disk-0.qcow2"
            }
        );
        assert_eq!(drive.option("size"), Some("32G"));
        assert!(!drive.is_cdrom());
        assert_eq!(
            drive.with_volume("tank", "vm-7-disk-1"),
            "tank:vm-7-disk-1,discard=on,size=32G"
        );
        let content = |text| Drive::read(text).map(|drive| drive.content);
        assert_eq!(content("none,media=cdrom"), Some(Content::Empty));
        assert_eq!(content("cdrom,media=cdrom"), Some(Content::HostDrive));
        let path = "/dev/disk/by-id/x";
        assert_eq!(content("file=/dev/disk/by-id/x"), Some(Content::Path(path)));
        for wrong in ["", ",size=1G", "local:", ":x", "local"] {
            assert_eq!(content(wrong), None, "{wrong}");
        }
        let cloud = |text| Drive::read(text).unwrap().is_cloud_init();
        assert!(cloud("local:100/vm-100-cloudinit.qcow2,media=cdrom"));
        assert!(cloud("local-lvm:vm-100-cloudinit,media=cdrom,size=4M"));
        assert!(!cloud("local-lvm:vm-100-cloudinit"));
        assert!(!cloud("local:iso/vm-cloudinit.iso,media=cdrom"));
    }

    #[test]
    fn a_card_has_an_address_and_a_bridge() {
        let card = Card::read("virtio=BC:24:11:00:00:01,bridge=vmbr0,firewall=1,tag=7").unwrap();
        assert_eq!(card.mac, "BC:24:11:00:00:01");
        assert_eq!(card.bridge, Some("vmbr0"));
        assert_eq!(
            card.with_bridge("vmbr9"),
            "virtio=BC:24:11:00:00:01,bridge=vmbr9,firewall=1,tag=7"
        );
        let other = Card::read("model=e1000,macaddr=BC:24:11:00:00:02").unwrap();
        assert_eq!((other.mac, other.bridge), ("BC:24:11:00:00:02", None));
        assert_eq!(Card::read("virtio,bridge=vmbr0"), None);
    }
}
