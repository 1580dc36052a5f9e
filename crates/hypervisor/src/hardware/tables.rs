//! Lists the known models, properties and settings of a machine, and the values that each takes.
//!
//! Descriptions from peers and command lines of this host are checked against these tables:
//! anything absent from all of them is refused by name.

use super::{content, families, more};
use crate::balloon::FREE_PAGE_HINT;

/// The maximum length of a text, in bytes.
const TEXT_BYTES_MAX: usize = 1024;

/// The values that a property or setting takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `on` or `off`.
    Switch,
    /// `on`, `off` or `auto`.
    Choice,
    /// A number, with or without a unit of QEMU's (`K`, `M`, `G`, `T`).
    Number,
    /// A name.
    Word,
    /// An empty value: `romfile=`.
    Nothing,
    /// A text without control characters.
    Text,
    /// The content of a small file.
    Bytes,
    /// One of these.
    OneOf(&'static [&'static str]),
}

/// The parent bus of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bus {
    /// A PCI bus; its place is `slot.function`.
    Pci,
    /// A USB bus; its place is a port.
    Usb,
    /// The bus of a virtio-serial controller; its place is the port's number.
    Ports,
    /// The bus of an IDE or AHCI controller; its place is a unit.
    Ide,
    /// The bus of a SCSI controller; its place is in properties.
    Scsi,
    /// Another bus; its place is in properties.
    Other,
    /// The machine itself.
    Board,
}

/// The host resource of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Serves {
    /// Nothing.
    Nothing,
    /// A disk.
    Disk,
    /// A disk, or nothing where the drive is empty.
    Medium,
    /// A network.
    Nic,
    /// A channel.
    Channel,
    /// A terminal that needs no user.
    Terminal,
    /// A sound backend, whose sound nobody hears.
    Sound,
    /// An emulated TPM, of which a machine has one.
    Tpm,
}

/// A model of a device.
#[derive(Debug)]
pub(crate) struct Model {
    pub(super) names: &'static [&'static str],
    pub(crate) bus: Bus,
    pub(crate) serves: Serves,
    pub(super) properties: &'static [&'static [(&'static str, Kind)]],
}

use Kind::{Choice, Nothing, Number, OneOf, Switch, Text, Word};

const ON_ERROR: Kind = OneOf(&["auto", "report", "ignore", "stop", "enospc"]);

pub(super) const PCI: &[(&str, Kind)] = &[
    ("acpi-index", Number),
    ("bootindex", Number),
    ("multifunction", Switch),
    ("rombar", Number),
    ("romfile", Nothing),
];
pub(super) const VIRTIO: &[(&str, Kind)] = &[
    ("aer", Switch),
    ("any_layout", Switch),
    ("ats", Switch),
    ("disable-legacy", Choice),
    ("disable-modern", Switch),
    ("event_idx", Switch),
    ("indirect_desc", Switch),
    ("iommu_platform", Switch),
    ("modern-pio-notify", Switch),
    ("notify_on_empty", Switch),
    ("packed", Switch),
    ("page-per-vq", Switch),
    ("queue_reset", Switch),
    ("use-disabled-flag", Switch),
    ("use-started", Switch),
    ("vectors", Number),
];
pub(super) const BLOCK: &[(&str, Kind)] = &[
    ("bootindex", Number),
    ("cyls", Number),
    ("discard_granularity", Number),
    ("heads", Number),
    ("logical_block_size", Number),
    ("min_io_size", Number),
    ("opt_io_size", Number),
    ("physical_block_size", Number),
    ("rerror", ON_ERROR),
    ("secs", Number),
    ("serial", Word),
    ("share-rw", Switch),
    ("werror", ON_ERROR),
    ("write-cache", Choice),
];
const VIRTIO_BLK: &[(&str, Kind)] = &[
    ("config-wce", Switch),
    ("discard", Switch),
    ("max-discard-sectors", Number),
    ("max-write-zeroes-sectors", Number),
    ("num-queues", Number),
    ("queue-size", Number),
    ("report-discard-granularity", Switch),
    ("request-merging", Switch),
    ("seg-max-adjust", Switch),
    ("write-zeroes", Switch),
];
const VIRTIO_SCSI: &[(&str, Kind)] = &[
    ("cmd_per_lun", Number),
    ("hotplug", Switch),
    ("max_sectors", Number),
    ("num_queues", Number),
    ("param_change", Switch),
    ("seg_max_adjust", Switch),
    ("virtqueue_size", Number),
];
const SCSI: &[(&str, Kind)] = &[
    ("channel", Number),
    ("device_id", Word),
    ("dpofua", Switch),
    ("lun", Number),
    ("product", Word),
    ("removable", Switch),
    ("rotation_rate", Number),
    ("scsi-id", Number),
    ("vendor", Word),
    ("ver", Word),
    ("wwn", Number),
];
const IDE: &[(&str, Kind)] = &[
    ("model", Word),
    ("rotation_rate", Number),
    ("ver", Word),
    ("wwn", Number),
];
const VIRTIO_NET: &[(&str, Kind)] = &[
    ("csum", Switch),
    ("ctrl_guest_offloads", Switch),
    ("ctrl_mac_addr", Switch),
    ("ctrl_rx", Switch),
    ("ctrl_rx_extra", Switch),
    ("ctrl_vlan", Switch),
    ("ctrl_vq", Switch),
    ("duplex", OneOf(&["full", "half"])),
    ("gso", Switch),
    ("guest_announce", Switch),
    ("guest_csum", Switch),
    ("guest_ecn", Switch),
    ("guest_rsc_ext", Switch),
    ("guest_tso4", Switch),
    ("guest_tso6", Switch),
    ("guest_ufo", Switch),
    ("hash", Switch),
    ("host_ecn", Switch),
    ("host_mtu", Number),
    ("host_tso4", Switch),
    ("host_tso6", Switch),
    ("host_ufo", Switch),
    ("mq", Switch),
    ("mrg_rxbuf", Switch),
    ("rss", Switch),
    ("rx_queue_size", Number),
    ("speed", Number),
    ("status", Switch),
    ("tx", OneOf(&["bh", "timer"])),
    ("tx_queue_size", Number),
];
pub(super) const SCREEN: &[(&str, Kind)] = &[
    ("edid", Choice),
    ("max_hostmem", Number),
    ("max_outputs", Number),
    ("mmio", Switch),
    ("vgamem_mb", Number),
    ("xres", Number),
    ("yres", Number),
];
const USB_HOST: &[(&str, Kind)] = &[
    ("firstport", Number),
    ("intrs", Number),
    ("masterbus", Word),
    ("msi", Choice),
    ("msix", Choice),
    ("p2", Number),
    ("p3", Number),
    ("slots", Number),
];
const BRIDGE: &[(&str, Kind)] = &[
    ("bus-reserve", Number),
    ("chassis", Number),
    ("chassis_nr", Number),
    ("hotplug", Switch),
    ("io-reserve", Number),
    ("mem-reserve", Number),
    ("msi", Choice),
    ("port", Number),
    ("pref32-reserve", Number),
    ("pref64-reserve", Number),
    ("shpc", Switch),
    ("slot", Number),
    ("x-speed", Word),
    ("x-width", Word),
];
pub(super) const BOARD: &[(&str, Kind)] = &[
    ("guid", Word),
    ("index", Number),
    ("iobase", Number),
    ("ioport", Number),
    ("irq", Number),
];

/// Every model that can be created again on another host.
const MODELS: &[Model] = &[
    model(
        &[
            "virtio-blk-pci",
            "virtio-blk-pci-transitional",
            "virtio-blk-pci-non-transitional",
        ],
        Bus::Pci,
        Serves::Disk,
        &[PCI, VIRTIO, BLOCK, VIRTIO_BLK],
    ),
    model(
        &[
            "virtio-scsi-pci",
            "virtio-scsi-pci-transitional",
            "virtio-scsi-pci-non-transitional",
        ],
        Bus::Pci,
        Serves::Nothing,
        &[PCI, VIRTIO, VIRTIO_SCSI],
    ),
    model(
        &["ahci", "ich9-ahci", "lsi53c895a"],
        Bus::Pci,
        Serves::Nothing,
        &[PCI],
    ),
    model(
        &["usb-storage"],
        Bus::Usb,
        Serves::Disk,
        &[BLOCK, &[("removable", Switch), ("usb_version", Number)]],
    ),
    model(&["scsi-hd"], Bus::Scsi, Serves::Disk, &[BLOCK, SCSI]),
    model(&["scsi-cd"], Bus::Scsi, Serves::Medium, &[BLOCK, SCSI]),
    model(&["ide-hd"], Bus::Ide, Serves::Disk, &[BLOCK, IDE]),
    model(&["ide-cd"], Bus::Ide, Serves::Medium, &[BLOCK, IDE]),
    model(
        &[
            "virtio-net-pci",
            "virtio-net-pci-transitional",
            "virtio-net-pci-non-transitional",
        ],
        Bus::Pci,
        Serves::Nic,
        &[PCI, VIRTIO, VIRTIO_NET],
    ),
    model(
        &[
            "e1000", "e1000e", "igb", "ne2k_pci", "pcnet", "rtl8139", "vmxnet3",
        ],
        Bus::Pci,
        Serves::Nic,
        &[PCI],
    ),
    model(
        &[
            "virtio-serial-pci",
            "virtio-serial-pci-transitional",
            "virtio-serial-pci-non-transitional",
        ],
        Bus::Pci,
        Serves::Nothing,
        &[PCI, VIRTIO, &[("max_ports", Number)]],
    ),
    model(
        &["virtserialport", "virtconsole"],
        Bus::Ports,
        Serves::Channel,
        &[&[("name", Word)]],
    ),
    model(
        &[
            "virtio-rng-pci",
            "virtio-rng-pci-transitional",
            "virtio-rng-pci-non-transitional",
        ],
        Bus::Pci,
        Serves::Nothing,
        &[PCI, VIRTIO, &[("max-bytes", Number), ("period", Number)]],
    ),
    model(
        &[
            "virtio-balloon-pci",
            "virtio-balloon-pci-transitional",
            "virtio-balloon-pci-non-transitional",
        ],
        Bus::Pci,
        Serves::Nothing,
        &[
            PCI,
            VIRTIO,
            &[
                ("deflate-on-oom", Switch),
                (FREE_PAGE_HINT, Switch),
                ("free-page-reporting", Switch),
            ],
        ],
    ),
    model(
        &[
            "virtio-keyboard-pci",
            "virtio-mouse-pci",
            "virtio-tablet-pci",
        ],
        Bus::Pci,
        Serves::Nothing,
        &[PCI, VIRTIO],
    ),
    model(
        &["VGA", "bochs-display", "cirrus-vga", "secondary-vga"],
        Bus::Pci,
        Serves::Nothing,
        &[PCI, SCREEN],
    ),
    model(
        &["virtio-gpu-pci", "virtio-vga"],
        Bus::Pci,
        Serves::Nothing,
        &[PCI, VIRTIO, SCREEN],
    ),
    model(
        &[
            "qemu-xhci",
            "nec-usb-xhci",
            "usb-ehci",
            "ich9-usb-ehci1",
            "ich9-usb-ehci2",
            "ich9-usb-uhci1",
            "ich9-usb-uhci2",
            "ich9-usb-uhci3",
            "ich9-usb-uhci4",
            "ich9-usb-uhci5",
            "ich9-usb-uhci6",
            "pci-ohci",
            "piix3-usb-uhci",
            "piix4-usb-uhci",
        ],
        Bus::Pci,
        Serves::Nothing,
        &[PCI, USB_HOST],
    ),
    model(
        &["usb-hub", "usb-kbd", "usb-mouse", "usb-tablet"],
        Bus::Usb,
        Serves::Nothing,
        &[&[("usb_version", Number)]],
    ),
    model(
        &[
            "i82801b11-bridge",
            "ioh3420",
            "pci-bridge",
            "pcie-pci-bridge",
            "pcie-root-port",
            "x3130-upstream",
            "xio3130-downstream",
        ],
        Bus::Pci,
        Serves::Nothing,
        &[PCI, BRIDGE],
    ),
    model(
        &[
            "virtio-9p-pci",
            "virtio-9p-pci-transitional",
            "virtio-9p-pci-non-transitional",
        ],
        Bus::Pci,
        Serves::Nothing,
        &[PCI, VIRTIO, &[("fsdev", Word), ("mount_tag", Text)]],
    ),
    model(
        &["i6300esb", "pvpanic-pci"],
        Bus::Pci,
        Serves::Nothing,
        &[PCI],
    ),
    model(
        &["ib700", "pvpanic", "vmgenid"],
        Bus::Board,
        Serves::Nothing,
        &[BOARD],
    ),
    model(
        &["isa-parallel", "isa-serial"],
        Bus::Board,
        Serves::Terminal,
        &[BOARD],
    ),
];

pub(super) const fn model(
    names: &'static [&'static str],
    bus: Bus,
    serves: Serves,
    properties: &'static [&'static [(&'static str, Kind)]],
) -> Model {
    Model {
        names,
        bus,
        serves,
        properties,
    }
}

/// The supported settings of a machine: option and key, as `-machine usb=` is `machine.usb`.
const SETTINGS: &[(&str, Kind)] = &[
    (
        "action.panic",
        OneOf(&["none", "pause", "shutdown", "exit-failure"]),
    ),
    ("action.reboot", OneOf(&["reset", "shutdown"])),
    ("action.shutdown", OneOf(&["poweroff", "pause"])),
    (
        "action.watchdog",
        OneOf(&[
            "reset",
            "shutdown",
            "poweroff",
            "inject-nmi",
            "pause",
            "debug",
            "none",
        ]),
    ),
    ("boot.menu", Switch),
    ("boot.order", Word),
    ("boot.reboot-timeout", Number),
    ("boot.splash-time", Number),
    ("boot.strict", Switch),
    (
        "global.ICH9-LPC.acpi-pci-hotplug-with-bridge-support",
        Switch,
    ),
    ("global.ICH9-LPC.disable_s3", Number),
    ("global.ICH9-LPC.disable_s4", Number),
    (
        "global.PIIX4_PM.acpi-pci-hotplug-with-bridge-support",
        Switch,
    ),
    ("global.PIIX4_PM.disable_s3", Number),
    ("global.PIIX4_PM.disable_s4", Number),
    (
        "global.kvm-pit.lost_tick_policy",
        OneOf(&["delay", "discard"]),
    ),
    (
        "global.mc146818rtc.lost_tick_policy",
        OneOf(&["discard", "slew"]),
    ),
    ("machine.acpi", Choice),
    ("machine.fd-bootchk", Switch),
    ("machine.graphics", Switch),
    ("machine.hpet", Switch),
    ("machine.i8042", Switch),
    ("machine.kernel-irqchip", OneOf(&["on", "off", "split"])),
    ("machine.max-ram-below-4g", Number),
    ("machine.pit", Switch),
    ("machine.sata", Switch),
    (
        "machine.smbios-entry-point-type",
        OneOf(&["32", "64", "auto"]),
    ),
    ("machine.smbus", Switch),
    ("machine.smm", Choice),
    ("machine.usb", Switch),
    ("machine.vmport", Choice),
    // A date has no effect on a clock whose state moves.
    ("rtc.base", Word),
    ("rtc.clock", OneOf(&["host", "rt", "vm"])),
    ("rtc.driftfix", OneOf(&["none", "slew"])),
];

/// Display adapters that a machine adds on request.
pub(crate) const VGAS: [(&str, &str); 5] = [
    ("VGA", "std"),
    ("cirrus-vga", "cirrus"),
    ("qxl-vga", "qxl"),
    ("virtio-vga", "virtio"),
    ("vmware-svga", "vmware"),
];

impl Model {
    /// Returns a model by its name.
    pub(crate) fn of(name: &str) -> Option<&'static Self> {
        let mut models = MODELS.iter().chain(more::MODELS);
        let known = models.find(|model| model.names.contains(&name));
        known.or_else(|| more::cpu(name))
    }

    /// Returns the names of its properties.
    pub(crate) fn properties(&self) -> impl Iterator<Item = &'static str> {
        let all = self.properties.iter().copied().flatten();
        all.map(|(name, _)| *name)
    }

    /// Returns its names.
    #[cfg(test)]
    pub(crate) fn names(&self) -> &'static [&'static str] {
        self.names
    }

    /// Returns the values that one of its properties takes.
    pub(crate) fn property(&self, name: &str) -> Option<Kind> {
        look_up(self.properties.iter().copied().flatten(), name)
    }
}

/// Returns the names of all models, without the further names that QEMU has for some.
pub(crate) fn models_of_guests() -> impl Iterator<Item = &'static str> {
    let models = MODELS.iter().chain(more::MODELS);
    let names = models.flat_map(|model| model.names.iter().copied());
    names.filter(|name| *name != "ahci")
}

/// Returns all models.
#[cfg(test)]
pub(crate) fn models() -> impl Iterator<Item = &'static Model> {
    MODELS.iter().chain(more::MODELS)
}

/// Returns the names of the settings of a machine that have fixed names.
#[cfg(test)]
pub(crate) fn settings() -> impl Iterator<Item = &'static str> {
    let settings = SETTINGS.iter().chain(more::SETTINGS);
    settings.map(|(name, _)| *name)
}

/// Returns the values that a setting takes.
pub(crate) fn setting(name: &str) -> Option<Kind> {
    look_up(SETTINGS.iter(), name)
        .or_else(|| families::setting(name))
        .or_else(|| more::setting(name))
}

fn look_up<'a>(
    mut table: impl Iterator<Item = &'a (&'static str, Kind)>,
    name: &str,
) -> Option<Kind> {
    table
        .find(|(known, _)| *known == name)
        .map(|(_, kind)| *kind)
}

impl Kind {
    /// Returns whether a value is one of these.
    pub(crate) fn takes(self, value: &str) -> bool {
        match self {
            Self::Switch => matches!(value, "on" | "off"),
            Self::Choice => matches!(value, "on" | "off" | "auto"),
            Self::Number => is_number(value),
            Self::Word => is_word(value),
            Self::Nothing => value.is_empty(),
            Self::Text => value.len() <= TEXT_BYTES_MAX && !value.chars().any(char::is_control),
            Self::Bytes => content::read(value).is_some(),
            Self::OneOf(words) => words.contains(&value),
        }
    }

    /// Returns a value in its canonical form.
    pub(crate) fn normal(self, value: &str) -> String {
        let switch = matches!(self, Self::Switch | Self::Choice);
        match value {
            "yes" | "true" | "y" if switch => "on".to_owned(),
            "no" | "false" | "n" if switch => "off".to_owned(),
            value => value.to_owned(),
        }
    }
}

fn is_number(text: &str) -> bool {
    let (digits, radix) = match text.strip_prefix("0x") {
        Some(digits) => (digits, 16),
        None => (
            text.trim_end_matches(['k', 'K', 'm', 'M', 'g', 'G', 't', 'T']),
            10,
        ),
    };
    (1..=20).contains(&digits.len())
        && text.len() <= digits.len() + 2
        && digits.chars().all(|c| c.is_digit(radix))
}

/// Returns whether a text can be a value on QEMU's command line, whatever its meaning there.
pub(crate) fn is_word(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.:".contains(c))
}
