//! More models and settings of machines: screens, sound, plugged memory and vCPUs.

use super::tables::{BLOCK, BOARD, Bus, Kind, Model, PCI, SCREEN, Serves, VIRTIO, model};
use longhaul_protocol::guest::BACKING;

use Kind::{Bytes, Choice, Number, OneOf, Switch, Text, Word};

/// The end of the names of the x86 CPUs.
const CPU: &str = "-x86_64-cpu";

const QXL: &[(&str, Kind)] = &[
    ("cmdlog", Number),
    ("debug", Number),
    ("guestdebug", Number),
    ("ram_size", Number),
    ("ram_size_mb", Number),
    ("revision", Number),
    ("surfaces", Number),
    ("vram64_size_mb", Number),
    ("vram_size", Number),
    ("vram_size_mb", Number),
];
const CODEC: &[(&str, Kind)] = &[
    ("cad", Number),
    ("debug", Number),
    ("mixer", Switch),
    ("use-timer", Switch),
];

/// Controllers of SCSI disks, as guests that come from another hypervisor have them.
const SAS: &[(&str, Kind)] = &[
    ("hba_serial", Word),
    ("max_cmds", Number),
    ("max_sge", Number),
    ("msi", Choice),
    ("msix", Choice),
    ("sas_address", Number),
    ("use_jbod", Switch),
    ("use_msg", Switch),
];
const NVME: &[(&str, Kind)] = &[
    ("aerl", Number),
    ("aer_max_queued", Number),
    ("cmb_size_mb", Number),
    ("ioeventfd", Switch),
    ("max_ioqpairs", Number),
    ("mdts", Number),
    ("msix_qsize", Number),
    ("num_queues", Number),
    ("use-intel-id", Switch),
    ("vsl", Number),
];
const IOMMU: &[(&str, Kind)] = &[
    ("aw-bits", Number),
    ("boot-bypass", Switch),
    ("caching-mode", Switch),
    ("device-iotlb", Switch),
    ("dma-drain", Switch),
    ("dma-translation", Switch),
    ("eim", Choice),
    ("granule", Word),
    ("intremap", Choice),
    ("pt", Switch),
    ("snoop-control", Switch),
    ("x-scalable-mode", Word),
];

pub(super) const MODELS: &[Model] = &[
    model(
        &[
            "am53c974",
            "dc390",
            "lsi53c810",
            "megasas",
            "megasas-gen2",
            "mptsas1068",
            "pvscsi",
        ],
        Bus::Pci,
        Serves::Nothing,
        &[PCI, SAS],
    ),
    model(&["usb-bot"], Bus::Usb, Serves::Nothing, &[]),
    model(&["nvme"], Bus::Pci, Serves::Disk, &[PCI, BLOCK, NVME]),
    model(
        &[
            "e1000-82544gc",
            "e1000-82545em",
            "i82550",
            "i82551",
            "i82557a",
            "i82557b",
            "i82557c",
            "i82558a",
            "i82558b",
            "i82559a",
            "i82559b",
            "i82559c",
            "i82559er",
            "i82562",
            "i82801",
            "tulip",
        ],
        Bus::Pci,
        Serves::Nic,
        &[PCI],
    ),
    model(
        &["virtio-iommu-pci"],
        Bus::Pci,
        Serves::Nothing,
        &[PCI, VIRTIO, IOMMU],
    ),
    model(&["intel-iommu"], Bus::Board, Serves::Nothing, &[IOMMU]),
    model(
        &["pxb", "pxb-pcie"],
        Bus::Pci,
        Serves::Nothing,
        &[
            PCI,
            &[
                ("bus_nr", Number),
                ("bypass_iommu", Switch),
                ("numa_node", Number),
            ],
        ],
    ),
    model(&["pci-serial"], Bus::Pci, Serves::Terminal, &[PCI]),
    model(
        &["virtio-multitouch-pci"],
        Bus::Pci,
        Serves::Nothing,
        &[PCI, VIRTIO],
    ),
    model(
        &["ati-vga"],
        Bus::Pci,
        Serves::Nothing,
        &[
            PCI,
            SCREEN,
            &[
                ("guest_hwcursor", Switch),
                ("model", Word),
                ("x-device-id", Number),
            ],
        ],
    ),
    model(
        &["edu"],
        Bus::Pci,
        Serves::Nothing,
        &[PCI, &[("dma_mask", Number)]],
    ),
    model(
        &["isa-debug-exit", "ramfb", "sga"],
        Bus::Board,
        Serves::Nothing,
        &[BOARD, &[("iosize", Number)]],
    ),
    model(
        &["qxl", "qxl-vga"],
        Bus::Pci,
        Serves::Nothing,
        &[PCI, SCREEN, QXL],
    ),
    model(
        &["vmware-svga"],
        Bus::Pci,
        Serves::Nothing,
        &[PCI, SCREEN, &[("global-vmstate", Switch)]],
    ),
    model(
        &["AC97", "ES1370"],
        Bus::Pci,
        Serves::Sound,
        &[PCI, &[("use_broken_id", Number)]],
    ),
    model(
        &["ich9-intel-hda", "intel-hda"],
        Bus::Pci,
        Serves::Nothing,
        &[
            PCI,
            &[("debug", Number), ("msi", Choice), ("old_msi_addr", Switch)],
        ],
    ),
    model(
        &["hda-duplex", "hda-micro", "hda-output"],
        Bus::Other,
        Serves::Sound,
        &[CODEC],
    ),
    model(
        &["virtio-sound-pci"],
        Bus::Pci,
        Serves::Sound,
        &[
            PCI,
            VIRTIO,
            &[("jacks", Number), ("streams", Number), ("chmaps", Number)],
        ],
    ),
    model(
        &["adlib", "cs4231a", "gus", "sb16"],
        Bus::Board,
        Serves::Sound,
        &[
            BOARD,
            &[
                ("dma", Number),
                ("dma16", Number),
                ("freq", Number),
                ("version", Number),
            ],
        ],
    ),
    model(
        &["usb-ccid", "usb-wacom-tablet"],
        Bus::Usb,
        Serves::Nothing,
        &[&[("debug", Number), ("serial", Word)]],
    ),
    model(
        &["usb-redir"],
        Bus::Usb,
        Serves::Terminal,
        &[&[
            ("bootindex", Number),
            ("debug", Number),
            ("filter", Text),
            ("serial", Word),
            ("streams", Switch),
        ]],
    ),
    model(
        &["pc-dimm"],
        Bus::Board,
        Serves::Nothing,
        &[&[
            ("addr", Number),
            ("memdev", Word),
            ("node", Number),
            ("slot", Number),
        ]],
    ),
    model(
        &["isa-debugcon"],
        Bus::Board,
        Serves::Terminal,
        &[BOARD, &[("readback", Number)]],
    ),
    model(
        &["isa-applesmc"],
        Bus::Board,
        Serves::Nothing,
        &[BOARD, &[("osk", Text)]],
    ),
    model(
        &["tpm-crb", "tpm-tis"],
        Bus::Board,
        Serves::Tpm,
        &[&[("irq", Number), ("ppi", Switch)]],
    ),
    model(&["vmcoreinfo"], Bus::Board, Serves::Nothing, &[]),
    model(
        &["isa-fdc"],
        Bus::Board,
        Serves::Nothing,
        &[
            BOARD,
            &[
                ("dma", Number),
                ("fallback", Word),
                ("fdtypeA", Word),
                ("fdtypeB", Word),
            ],
        ],
    ),
    model(
        &["floppy"],
        Bus::Other,
        Serves::Medium,
        &[BLOCK, &[("drive-type", Word), ("unit", Number)]],
    ),
    model(
        &["ccid-card-passthru"],
        Bus::Other,
        Serves::Terminal,
        &[&[("debug", Number), ("slot", Number)]],
    ),
    model(
        &["ipmi-bmc-sim"],
        Bus::Board,
        Serves::Nothing,
        &[&[("guid", Word), ("slave_addr", Number)]],
    ),
    model(
        &["isa-ipmi-bt", "isa-ipmi-kcs"],
        Bus::Board,
        Serves::Nothing,
        &[BOARD, &[("bmc", Word)]],
    ),
];

/// vCPUs that were plugged in, of any model.
const CPUS: Model = model(
    &[],
    Bus::Board,
    Serves::Nothing,
    &[&[
        ("cluster-id", Number),
        ("core-id", Number),
        ("die-id", Number),
        ("module-id", Number),
        ("node-id", Number),
        ("socket-id", Number),
        ("thread-id", Number),
    ]],
);

/// Returns the model of a vCPU.
pub(super) fn cpu(name: &str) -> Option<&'static Model> {
    let model = name.strip_suffix(CPU)?;
    crate::description::is_name(model, 64).then_some(&CPUS)
}

/// Returns whether a model is a vCPU's.
pub(crate) fn is_cpu(name: &str) -> bool {
    cpu(name).is_some()
}

/// The limits on a disk's requests, as QEMU names them.
pub(crate) const LIMITS: [&str; 19] = [
    "bps",
    "bps_max",
    "bps_max_length",
    "bps_rd",
    "bps_rd_max",
    "bps_rd_max_length",
    "bps_wr",
    "bps_wr_max",
    "bps_wr_max_length",
    "iops",
    "iops_max",
    "iops_max_length",
    "iops_rd",
    "iops_rd_max",
    "iops_rd_max_length",
    "iops_size",
    "iops_wr",
    "iops_wr_max",
    "iops_wr_max_length",
];

/// The beginnings of the settings of a `-drive` that USB storage has: its id, which the guest sees
/// (`drive.sda`), and whether it is a CD drive (`cdrom.sda`).
pub(crate) const DRIVE: &str = "drive.";
pub(crate) const CDROM: &str = "cdrom.";

/// The settings of the board's floppy drives.
pub(crate) const FLOPPIES: [&str; 2] = ["floppy.0", "floppy.1"];

/// The value of one for a drive without a medium.
pub(crate) const NO_FLOPPY: &str = "-";

pub(super) const SETTINGS: &[(&str, Kind)] = &[
    (
        "audio.model",
        OneOf(&[
            "ac97", "adlib", "cs4231a", "es1370", "gus", "hda", "sb16", "virtio",
        ]),
    ),
    ("boot.once", Word),
    // The disks in floppy drives of the board; `-` is an empty drive.
    (FLOPPIES[0], Word),
    (FLOPPIES[1], Word),
    ("boot.splash", Bytes),
    ("global.ICH9-LPC.noreboot", Switch),
    ("global.ICH9-LPC.x-smi-broadcast", Switch),
    ("global.ICH9-LPC.x-smi-cpu-hotplug", Switch),
    ("global.ICH9-LPC.x-smi-cpu-hotunplug", Switch),
    ("global.PIIX4_PM.acpi-root-pci-hotplug", Switch),
    ("global.PIIX4_PM.memory-hotplug-support", Switch),
    ("global.PIIX4_PM.s4_val", Number),
    ("global.ICH9-LPC.s4_val", Number),
    ("global.cfi.pflash01.secure", Switch),
    ("global.hpet.msi", Switch),
    ("global.hpet.timers", Number),
    ("global.i440FX-pcihost.pci-hole64-size", Number),
    ("global.i8042.kbd-throttle", Switch),
    ("global.mch.extended-tseg-mbytes", Number),
    ("global.q35-pcihost.pci-hole64-size", Number),
    ("machine.default-bus-bypass-iommu", Switch),
    ("machine.hmat", Switch),
    ("machine.nvdimm", Switch),
    ("machine.x-oem-id", Text),
    ("machine.x-oem-table-id", Text),
    ("memory.maxmem", Number),
    ("memory.named-by", OneOf(&["id", "path"])),
    ("memory.slots", Number),
    ("smp.maxcpus", Number),
    (crate::tpm::VERSION, OneOf(&crate::tpm::VERSIONS)),
];

/// Returns the values that a setting takes: one of this list, a property of a known model, the
/// backing file of a disk, or a limit of one.
pub(super) fn setting(name: &str) -> Option<Kind> {
    let known = SETTINGS.iter().find(|(known, _)| *known == name);
    if let Some((_, kind)) = known {
        return Some(*kind);
    }
    if let Some(disk) = name.strip_prefix(BACKING) {
        return crate::description::is_name(disk, 16).then_some(Word);
    }
    for (prefix, kind) in [(CDROM, Switch), (DRIVE, Word)] {
        if let Some(disk) = name.strip_prefix(prefix) {
            return crate::description::is_name(disk, 16).then_some(kind);
        }
    }
    let (start, last) = name.rsplit_once('.')?;
    if let Some(model) = start.strip_prefix("global.") {
        return Model::of(model)?.property(last);
    }
    let disk = start.strip_prefix("limit.")?;
    let sound = crate::description::is_name(disk, 16);
    match last {
        "group" => sound.then_some(Word),
        last => (sound && LIMITS.contains(&last)).then_some(Number),
    }
}
