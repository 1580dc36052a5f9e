//! Tests which guests are refused, and the messages.

use super::*;
use crate::description::tests::sample;
use longhaul_protocol::hardware::{Hardware, PlacedDevice, Topology};

fn emulator(version: &str, machine_types: &[&str]) -> Emulator {
    let models = [
        ("qemu64", vec![]),
        ("EPYC-v3", vec!["rdseed".to_owned(), "topoext".to_owned()]),
    ];
    Emulator {
        version: version.to_owned(),
        machine_types: machine_types
            .iter()
            .map(|name| ((*name).to_owned(), MachineType { cpus_max: 255 }))
            .collect(),
        cpu_models: models
            .into_iter()
            .map(|(name, missing)| (name.to_owned(), missing))
            .collect(),
        absent_models: BTreeSet::from(["qxl-vga".to_owned()]),
    }
}

fn host() -> Capabilities {
    let names = |name: &str| BTreeSet::from([name.to_owned()]);
    Capabilities {
        default: "7.2".to_owned(),
        emulators: BTreeMap::from([(
            "7.2".to_owned(),
            emulator(
                "7.2.22",
                &["pc-q35-7.1", "pc-q35-7.2", "pc-i440fx-7.2", "pc-q35-6.9"],
            ),
        )]),
        broken: BTreeMap::new(),
        accelerator: Accelerator::Tcg,
        no_kvm: None,
        memory: Memory {
            available_bytes: 1 << 30,
            limit_bytes: None,
            guests_bytes: 0,
        },
        huge_pages: BTreeMap::from([(2, 64 << 20)]),
        images: names("debian"),
        networks: names("office"),
        user_networks: BTreeMap::new(),
        firmware: names("ovmf"),
        kernels: names("tiny"),
        folders: BTreeMap::from([("public".to_owned(), true), ("gone".to_owned(), false)]),
    }
}

fn machine() -> Machine {
    Machine {
        qemu: "7.2.22".to_owned(),
        machine_type: "pc-q35-7.2".to_owned(),
        accelerator: "tcg".to_owned(),
        vcpus: 2,
        ram_blocks: BTreeMap::new(),
        devices: BTreeMap::new(),
        cpu_properties: BTreeMap::from([
            ("rdseed".to_owned(), "on".to_owned()),
            ("topoext".to_owned(), "off".to_owned()),
        ]),
    }
}

fn refusals(
    change: impl FnOnce(&mut GuestDescription, &mut Machine, &mut Capabilities),
) -> Vec<(String, String)> {
    let (mut guest, mut machine, mut capabilities) = (sample(), machine(), host());
    change(&mut guest, &mut machine, &mut capabilities);
    can_run("paris-2", &guest, Some(&machine), &capabilities)
        .into_iter()
        .filter(|check| check.verdict == Verdict::Refused)
        .map(|check| (check.text, check.hint.unwrap()))
        .collect()
}

#[track_caller]
fn refused(
    change: impl FnOnce(&mut GuestDescription, &mut Machine, &mut Capabilities),
    text: &str,
    hint: &str,
) {
    let found = refusals(change);
    assert_eq!(found, [(text.to_owned(), hint.to_owned())]);
}

#[test]
fn a_guest_that_fits_is_not_refused() {
    assert_eq!(refusals(|_, _, _| ()), []);
    let checks = can_run("paris-2", &sample(), Some(&machine()), &host());
    let texts: Vec<&str> = checks.iter().map(|check| check.text.as_str()).collect();
    assert_eq!(
        texts,
        [
            "QEMU 7.2.22 on paris-2 loads pc-q35-7.2",
            "CPU model qemu64 available on paris-2",
            "128 MiB memory on paris-2 (1.0 GiB available)",
            "network office on paris-2",
        ]
    );
}

#[test]
fn a_description_that_no_host_would_launch_is_refused_alone() {
    refused(
        |guest, _, _| guest.name = "\u{1b}[2J/../x".to_owned(),
        "paris-2 cannot run this guest: guest description: `name` is `\\u{1b}[2J/../x`: a name has \
         1 to 48 letters, digits, `-`, `_` and `.`, and begins with a letter or digit",
        "correct the guest's description",
    );
}

#[test]
fn a_machine_type_that_is_too_new_is_refused() {
    refused(
        |guest, _, _| guest.machine = "pc-q35-10.0".to_owned(),
        "paris-2 cannot run web-7: it has QEMU 7.2.22, and the guest's machine type pc-q35-10.0 \
         needs 10.0 or newer",
        "install QEMU 10.0 or newer on paris-2, or restart the guest with machine = \"pc-q35-7.2\"",
    );
}

#[test]
fn an_older_qemu_is_warned_of() {
    let newer = Machine {
        qemu: "10.0.2".to_owned(),
        ..machine()
    };
    let checks = can_run("paris-2", &sample(), Some(&newer), &host());
    let warning = checks
        .iter()
        .find(|check| check.verdict == Verdict::Warning)
        .unwrap();
    assert_eq!(
        warning.text,
        "paris-2 has QEMU 7.2.22, older than the 10.0.2 that runs web-7: QEMU promises to load \
         the state of older versions only"
    );
}

#[test]
fn a_qemu_that_is_newer_than_those_that_are_tested_is_warned_of() {
    let mut newer = host();
    for emulator in newer.emulators.values_mut() {
        emulator.version = "12.0.1".to_owned();
    }
    let warnings = |machine: Option<&Machine>| {
        let checks = can_run("paris-2", &sample(), machine, &newer);
        let warned = checks
            .into_iter()
            .filter(|check| check.verdict == Verdict::Warning);
        warned
            .map(|check| (check.text, check.hint.unwrap()))
            .collect::<Vec<_>>()
    };
    let text =
        "QEMU 12.0.1 on paris-2 is newer than those that Longhaul is tested with (up to 11.1)";
    let hint = "on paris-2: longhaul doctor --self-test";
    assert_eq!(
        warnings(Some(&machine())),
        [(text.to_owned(), hint.to_owned())]
    );
    assert_eq!(warnings(None), []);
}

#[test]
fn a_machine_type_that_is_no_more_is_refused() {
    refused(
        |guest, _, _| guest.machine = "pc-q35-2.4".to_owned(),
        "paris-2 cannot run web-7: it has QEMU 7.2.22, which does not have the guest's machine \
         type pc-q35-2.4",
        "add an emulator to paris-2 that has it, or restart the guest with machine = \
         \"pc-q35-7.2\"",
    );
}

#[test]
fn a_cpu_that_cannot_be_given_is_refused_by_feature() {
    refused(
        |guest, _, _| guest.cpu = "EPYC-v4".to_owned(),
        "paris-2 cannot run web-7: its QEMU 7.2.22 does not have the guest's CPU model EPYC-v4",
        "restart the guest with a model that both hosts have",
    );
    refused(
        |guest, _, _| guest.cpu = "EPYC-v3,+avx".to_owned(),
        "paris-2 cannot run web-7: its CPU cannot give EPYC-v3 what the guest sees: rdseed",
        "restart the guest with cpu = \"EPYC-v3,+avx,-rdseed\"",
    );
    assert_eq!(
        refusals(|guest, _, _| guest.cpu = "EPYC-v3,-rdseed".to_owned()),
        []
    );
    assert_eq!(
        refusals(|guest, machine, _| {
            guest.cpu = "EPYC-v3".to_owned();
            machine.cpu_properties.clear();
        }),
        []
    );
}

#[test]
fn another_accelerator_is_refused() {
    refused(
        |_, machine, capabilities| {
            machine.accelerator = "kvm".to_owned();
            capabilities.no_kvm = Some("it opens, but a guest does not run in it".to_owned());
        },
        "paris-2 cannot run web-7: it runs guests with tcg (KVM does not work: it opens, but a \
         guest does not run in it), and the guest runs with kvm",
        "move it to a host that runs guests with kvm",
    );
}

#[test]
fn memory_is_held_against_the_host_and_its_limit() {
    refused(
        |guest, _, _| guest.memory_mib = 2048,
        "paris-2 cannot run web-7: it has 1.0 GiB of memory available, and the guest has 2.0 GiB",
        "free memory on paris-2, or choose another host",
    );
    refused(
        |_, _, capabilities| {
            capabilities.memory.limit_bytes = Some(256 << 20);
            capabilities.memory.guests_bytes = 192 << 20;
        },
        "paris-2 cannot run web-7: its limit for guests is 256 MiB, of which 64 MiB are left, and \
         the guest has 128 MiB",
        "raise qemu.memory_limit in paris-2's configuration",
    );
}

#[test]
fn names_that_mean_nothing_there_are_refused() {
    let found = refusals(|_, _, capabilities| {
        capabilities.images.clear();
        capabilities.networks.clear();
        capabilities.firmware.clear();
        capabilities.kernels.clear();
    });
    assert_eq!(found.len(), 4);
    assert_eq!(
        found[1],
        (
            "paris-2 cannot run web-7: it has no network called office".to_owned(),
            "add office under [networks] in the configuration of paris-2".to_owned()
        )
    );
}

/// Returns a guest whose card is on QEMU's user network, with a port of the host.
fn on_user_network(guest: &mut GuestDescription, port: u16) {
    let forward = format!("tcp:127.0.0.1:{port}-10.0.2.15:22");
    let property = |name: &str, value: &str| (format!("netdev.{name}"), value.to_owned());
    let device = |model: &str, serves: &str| PlacedDevice {
        model: model.to_owned(),
        serves: Some(serves.to_owned()),
        ..PlacedDevice::default()
    };
    let card = PlacedDevice {
        properties: [
            property("restrict", "off"),
            property("hostfwd.00", &forward),
        ]
        .into(),
        ..device("e1000", "0")
    };
    guest.hardware = Some(Hardware {
        topology: Topology {
            sockets: 1,
            dies: 1,
            cores: 2,
            threads: 1,
        },
        devices: vec![
            device("virtio-blk-pci", "vda"),
            card,
            device("virtserialport", "org.qemu.guest_agent.0"),
        ],
        ..Hardware::default()
    });
}

#[test]
fn user_networks_move_to_user_networks_with_free_ports() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let found = refusals(|guest, _, _| on_user_network(guest, port));
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!(
        found[0],
        (
            "paris-2 cannot run web-7: its card 0 is on QEMU's user network, and network office \
             there is not one"
                .to_owned(),
            "write office = \"nat\" under [networks] in the configuration of paris-2".to_owned()
        )
    );
    assert!(found[1].0.contains(&format!("port {port} of its card 0")));
    let found = refusals(|guest, _, capabilities| {
        on_user_network(guest, port);
        capabilities
            .user_networks
            .insert("office".to_owned(), false);
    });
    assert!(
        found[0].0.contains("not one that reaches anything"),
        "{found:?}"
    );
    drop(listener);
    let (mut guest, mut host) = (sample(), host());
    on_user_network(&mut guest, port);
    host.user_networks.insert("office".to_owned(), true);
    let checks = can_run("paris-2", &guest, Some(&machine()), &host);
    let mut said = checks.iter().filter(|check| check.verdict != Verdict::Fine);
    let said = said.next().unwrap();
    assert_eq!(said.verdict, Verdict::Warning);
    assert!(said.text.contains("end with the move"), "{}", said.text);
}

#[test]
fn the_preferred_emulator_is_taken_where_it_can() {
    let mut host = host();
    for version in ["9.2.1", "10.0.2"] {
        let types = ["pc-q35-7.2", "pc-q35-9.2"];
        host.emulators
            .insert(version.to_owned(), emulator(version, &types));
    }
    assert_eq!(host.emulator_for("pc-q35-7.2"), Some("7.2"));
    assert_eq!(host.emulator_for("pc-q35-9.2"), Some("10.0.2"));
    assert_eq!(host.emulator_for("pc-q35-11.0"), None);
}

#[test]
fn video_memory_that_an_old_emulator_hides_is_refused() {
    use longhaul_protocol::hardware::{Hardware, Topology};
    use longhaul_protocol::machine::RamBlock;
    for (name, mib, version, expected) in [
        ("0000:00:1e.0:01.0/qxl.vram", 64, "7.2.22", 1),
        ("0000:00:1e.0:01.0/qxl.vram", 64, "8.0.0", 0),
        ("0000:00:02.0/qxl.vram", 64, "7.2.22", 0),
        ("0000:00:02.0/vga.vram", 16, "7.2.22", 0),
        ("pc.ram", 64, "7.2.22", 0),
    ] {
        let found = refusals(|guest, machine, host| {
            (guest.disks, guest.nics, guest.channels) = Default::default();
            let topology = Topology {
                sockets: 2,
                dies: 1,
                cores: 1,
                threads: 1,
            };
            guest.hardware = Some(Hardware {
                topology,
                ..Hardware::default()
            });
            let block = RamBlock {
                used_bytes: mib << 20,
                max_bytes: mib << 20,
                page_bytes: 4096,
            };
            machine.ram_blocks.insert(name.to_owned(), block);
            let emulator = host.emulators.get_mut("7.2").unwrap();
            emulator.version = version.to_owned();
        });
        let found: Vec<_> = found
            .iter()
            .filter(|(text, _)| text.contains(name))
            .collect();
        assert_eq!(found.len(), expected, "{name} {version}: {found:?}");
    }
}

#[test]
fn huge_pages_must_be_free() {
    use longhaul_protocol::hardware::{Hardware, MemoryBackend, Topology};
    let topology = Topology {
        sockets: 2,
        dies: 1,
        cores: 1,
        threads: 1,
    };
    for (page, memory_mib, extra_mib, expected) in [
        (2, 64, 0, None),
        (
            2,
            128,
            0,
            Some("64 MiB in free huge pages of 2 MiB, and the guest has 128 MiB"),
        ),
        (
            2,
            32,
            64,
            Some("64 MiB in free huge pages of 2 MiB, and the guest has 96 MiB"),
        ),
        (1024, 64, 0, Some("0 MiB in free huge pages of 1024 MiB")),
    ] {
        let mut hardware = Hardware {
            topology,
            memory: Some(MemoryBackend {
                id: "ram".to_owned(),
                memfd: true,
                share: true,
                huge_page_mib: Some(page),
            }),
            ..Hardware::default()
        };
        if extra_mib > 0 {
            for (key, value) in [
                ("id", "m".to_owned()),
                ("kind", "memfd".to_owned()),
                ("huge-page-mib", page.to_string()),
                ("size", (extra_mib << 20).to_string()),
            ] {
                hardware.settings.insert(format!("ram.000.{key}"), value);
            }
        }
        let found = refusals(|guest, _, _| {
            (guest.disks, guest.nics, guest.channels) = Default::default();
            guest.memory_mib = memory_mib;
            guest.hardware = Some(hardware);
        });
        match expected {
            None => assert_eq!(found, []),
            Some(text) => {
                assert_eq!(found.len(), 1, "{found:?}");
                assert!(found[0].0.contains(text), "{}", found[0].0);
                assert!(found[0].1.contains("nr_hugepages"), "{}", found[0].1);
            }
        }
    }
}

#[test]
fn a_device_whose_module_is_not_installed_is_named() {
    use longhaul_protocol::hardware::{Hardware, PlacedDevice, Topology};
    let topology = Topology {
        sockets: 1,
        dies: 1,
        cores: 2,
        threads: 1,
    };
    let of = |vga: Option<&str>, model: &str| Hardware {
        topology,
        vga: vga.map(str::to_owned),
        devices: vec![PlacedDevice {
            model: model.to_owned(),
            ..PlacedDevice::default()
        }],
        ..Hardware::default()
    };
    for (hardware, expected) in [
        (of(None, "VGA"), 0),
        (of(None, "qxl-vga"), 1),
        (of(Some("qxl"), "VGA"), 1),
    ] {
        let found = refusals(|guest, _, _| {
            (guest.disks, guest.nics, guest.channels) = Default::default();
            guest.hardware = Some(hardware);
        });
        assert_eq!(found.len(), expected, "{found:?}");
        for (text, hint) in found {
            assert!(text.contains("does not have the device qxl-vga"), "{text}");
            assert!(
                hint.contains("on paris-2 (Debian: qemu-system-modules-spice)"),
                "{hint}"
            );
        }
    }
}

#[test]
fn a_folder_is_needed_there_and_its_content_stays() {
    let with = |guest: &mut GuestDescription, name: &str| {
        let mut hardware = Hardware::default();
        let key = |key: &str| format!("fsdev.000.{key}");
        hardware.settings.insert(key("id"), "f".to_owned());
        hardware.settings.insert(key("folder"), name.to_owned());
        guest.hardware = Some(hardware);
    };
    let texts = |name: &str| {
        let mut guest = sample();
        with(&mut guest, name);
        let mut checks = Vec::new();
        let capabilities = host();
        let question = Question {
            host: "paris-2",
            guest: &guest,
            machine: None,
            capabilities: &capabilities,
        };
        question.folders(&mut checks);
        let check = checks.pop().unwrap();
        (check.verdict, check.text)
    };
    let (verdict, text) = texts("public");
    assert_eq!(verdict, Verdict::Warning, "{text}");
    let (verdict, text) = texts("gone");
    assert_eq!(verdict, Verdict::Refused);
    assert!(text.contains("folder gone of its configuration"), "{text}");
    let (verdict, text) = texts("secret");
    assert_eq!(verdict, Verdict::Refused);
    assert!(text.contains("has no folder called secret"), "{text}");
}
