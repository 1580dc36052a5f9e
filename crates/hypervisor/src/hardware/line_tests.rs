use super::*;
use crate::hardware::check;
use longhaul_protocol::hardware::Topology;

fn hardware(settings: &[(&str, &str)], models: &[&str]) -> Hardware {
    let settings = settings.iter();
    let device = |model: &&str| PlacedDevice {
        model: (*model).to_owned(),
        ..PlacedDevice::default()
    };
    Hardware {
        topology: Topology {
            sockets: 1,
            dies: 1,
            cores: 4,
            threads: 1,
        },
        settings: settings
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect(),
        devices: models.iter().map(device).collect(),
        ..Hardware::default()
    }
}

#[test]
fn texts_stay_one_value() {
    let text = machine_options(&hardware(&[("machine.x-oem-id", "a,firmware=/x")], &[]));
    assert_eq!(text, ",x-oem-id=a,,firmware=/x");
}

#[test]
fn spare_and_plugged_vcpus_have_their_slots() {
    let cpu = "EPYC-v4-x86_64-cpu";
    for (vcpus, settings, models, expected) in [
        (4, &[][..], &[][..], "cpus=4,sockets"),
        (1, &[("smp.maxcpus", "4")], &[], "cpus=1,maxcpus=4,sockets"),
        (
            3,
            &[("smp.maxcpus", "4")],
            &[cpu],
            "cpus=2,maxcpus=4,sockets",
        ),
        (4, &[], &[cpu], "cpus=3,maxcpus=4,sockets"),
    ] {
        let hardware = hardware(settings, models);
        let text = topology(vcpus, &hardware);
        assert!(text.starts_with(expected), "{text}");
        let mut guest = crate::description::tests::sample();
        guest.vcpus = vcpus;
        (guest.disks, guest.nics, guest.channels) = Default::default();
        assert_eq!(check(&guest, &hardware), Ok(()), "{text}");
    }
}

#[test]
fn slots_that_cannot_be_are_refused() {
    let cpu = "EPYC-v4-x86_64-cpu";
    for (vcpus, settings, models) in [
        (1, &[][..], &[][..]),
        (4, &[("smp.maxcpus", "5")], &[]),
        (4, &[("smp.maxcpus", "4K")], &[]),
        (5, &[("smp.maxcpus", "4")], &[]),
        (1, &[("smp.maxcpus", "4")], &[cpu]),
    ] {
        let mut guest = crate::description::tests::sample();
        guest.vcpus = vcpus;
        (guest.disks, guest.nics, guest.channels) = Default::default();
        let refused = check(&guest, &hardware(settings, models)).unwrap_err();
        assert_eq!(refused.field, "hardware.topology", "{vcpus} {settings:?}");
    }
}

#[test]
fn limits_name_all_that_qemu_asks_for() {
    let hardware = hardware(
        &[
            ("limit.vda.iops", "100"),
            ("limit.vda.group", "7"),
            ("limit.a.b.bps_rd", "5"),
        ],
        &[],
    );
    let limits = limits(&hardware);
    let text = |disk: &str| serde_json::to_string(&limits[disk]).unwrap();
    assert_eq!(
        text("vda"),
        r#"{"bps":0,"bps_rd":0,"bps_wr":0,"group":"7","iops":100,"iops_rd":0,"iops_wr":0}"#
    );
    assert_eq!(
        text("a.b"),
        r#"{"bps":0,"bps_rd":5,"bps_wr":0,"iops":0,"iops_rd":0,"iops_wr":0}"#
    );
}

fn overlays(settings: &[(&str, &str)], disks: &[(&str, bool)]) -> Result<(), String> {
    let mut guest = crate::description::tests::sample();
    (guest.vcpus, guest.nics, guest.channels) = (4, Vec::new(), Vec::new());
    let disk = |(name, read_only): &(&str, bool)| Disk {
        name: (*name).to_owned(),
        image: format!("image-{name}"),
        shared: false,
        read_only: *read_only,
    };
    guest.disks = disks.iter().map(disk).collect();
    let mut hardware = hardware(settings, &["virtio-blk-pci"]);
    hardware.devices[0].serves = Some("vda".to_owned());
    guest.hardware = Some(hardware);
    crate::description::check(&guest).map_err(|error| error.to_string())
}

#[test]
fn a_backing_file_is_a_read_only_disk_that_no_device_has() {
    let (vda, below) = (("vda", false), ("backing0", true));
    let on = ("backing.vda", "backing0");
    assert_eq!(overlays(&[on], &[vda, below]), Ok(()));
    let chain = [on, ("backing.backing0", "backing1")];
    assert_eq!(overlays(&chain, &[vda, below, ("backing1", true)]), Ok(()));
    let floppy = [("floppy.0", "fd0"), ("backing.fd0", "backing0")];
    assert_eq!(overlays(&floppy, &[vda, ("fd0", false), below]), Ok(()));
    let ring = [on, ("backing.backing0", "backing0")];
    for (settings, disks, expected) in [
        (&[][..], &[vda, below][..], "leaves a disk"),
        (&[on], &[vda], "that is no disk"),
        (&[on], &[vda, ("backing0", false)], "that is written"),
        (
            &[("backing.vda", "vda")],
            &[("vda", true)],
            "or is a disk too",
        ),
        (
            &[("backing.vdb", "backing0")],
            &[vda, below],
            "that is no disk",
        ),
        (&ring, &[vda, below], "more than 16"),
        (&[("floppy.1", "vda")], &[vda], "is there twice"),
        (&[("floppy.0", "fd0")], &[vda], "floppy that is no disk"),
    ] {
        let refused = overlays(settings, disks).unwrap_err();
        assert!(refused.contains(expected), "{refused}");
    }
}

#[test]
fn a_machine_has_one_tpm_of_a_known_version() {
    let checked = |settings, models| {
        let mut guest = crate::description::tests::sample();
        guest.vcpus = 4;
        (guest.disks, guest.nics, guest.channels) = Default::default();
        let checked = check(&guest, &hardware(settings, models));
        checked.map_err(|refused| refused.field)
    };
    assert_eq!(checked(&[("tpm.version", "1.2")], &["tpm-tis"]), Ok(()));
    assert_eq!(checked(&[], &["tpm-crb"]), Ok(()));
    let settings = Err("hardware.settings".to_owned());
    assert_eq!(checked(&[("tpm.version", "3")], &["tpm-tis"]), settings);
    let models = Err("hardware.devices.model".to_owned());
    assert_eq!(checked(&[], &["tpm-tis", "tpm-crb"]), models);
}
