//! Tests reading the machines of real QEMUs from outside, and comparing them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Host, MACHINES, does_not_load, emulators, guest};
use longhaul_hypervisor::capabilities::{Accelerator, Prober, can_run};
use longhaul_hypervisor::launch::Role;
use longhaul_hypervisor::observe;
use longhaul_hypervisor::qmp::{COMMAND_TIMEOUT, Qmp};
use longhaul_hypervisor::tested;
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::machine::Machine;
use longhaul_protocol::message::Verdict;
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};

async fn machine(description: &GuestDescription, emulator: &str, role: Role) -> Machine {
    let host = Host::new();
    let (guest, qmp) = host.launch(description, emulator, role).await.unwrap();
    let (machine, blockers) = observe::examine(&qmp, None).await.unwrap();
    assert_eq!(blockers, []);
    // Queried once of a known process, and cached.
    let process = guest.record().process.as_ref();
    for _ in 0..2 {
        let again = observe::examine(&qmp, process).await.unwrap();
        assert_eq!(again, (machine.clone(), vec![]));
    }
    guest.stop(Some(&qmp)).await.unwrap();
    machine
}

fn texts(destination: &Machine, source: &Machine) -> Vec<String> {
    let differences = destination.differences(source);
    differences.iter().map(ToString::to_string).collect()
}

#[tokio::test]
async fn a_machine_is_seen_as_it_was_described() {
    for (emulator, _) in emulators() {
        for name in MACHINES {
            let machine = machine(&guest(name), &emulator, Role::Fresh).await;
            assert!(machine.qemu.starts_with(&emulator) || emulator == "system");
            assert_eq!(machine.machine_type, name);
            assert_eq!(machine.accelerator, "tcg");
            assert_eq!(machine.vcpus, 2);
            assert_eq!(machine.ram_blocks["pc.ram"].used_bytes, 64 << 20);
            let bus = if name.contains("q35") {
                "pcie.0"
            } else {
                "pci.0"
            };
            for (id, place) in [
                ("serial", format!("virtio-serial-pci at {bus}/03.0")),
                ("blk-vda", format!("virtio-blk-pci at {bus}/04.0")),
                (
                    "nic0",
                    format!("virtio-net-pci without offloads at {bus}/10.0"),
                ),
                ("port1", "virtserialport at serial.0/2".to_owned()),
            ] {
                assert_eq!(machine.devices[id].to_string(), place);
            }
            assert!(
                machine
                    .devices
                    .keys()
                    .any(|id| id.starts_with("PCI 1f.0") || id == "PCI 01.0")
            );
            assert!(machine.cpu_properties.len() > 250);
            assert_eq!(machine.cpu_properties["sse2"], "on");
            assert_eq!(machine.cpu_properties["vendor"], "AuthenticAMD");
            assert_eq!(machine.cpu_properties["family"], "15");
        }
    }
}

/// Between every two versions present, in both directions.
#[tokio::test]
async fn the_same_description_makes_the_same_machine() {
    for name in MACHINES {
        for cpu in ["qemu64", "Nehalem"] {
            let mut description = guest(name);
            description.cpu = cpu.to_owned();
            let mut sources = Vec::new();
            for (emulator, _) in emulators() {
                sources.push(machine(&description, &emulator, Role::Fresh).await);
            }
            for (emulator, _) in emulators() {
                let destination = machine(&description, &emulator, Role::Destination).await;
                for source in &sources {
                    assert_eq!(texts(&destination, source), [""; 0], "{name} {cpu}");
                }
            }
        }
    }
}

#[tokio::test]
async fn what_differs_is_named() {
    for (emulator, _) in emulators() {
        let there = machine(&guest(MACHINES[0]), &emulator, Role::Fresh).await;
        let mut other = guest(MACHINES[0]);
        other.memory_mib = 128;
        other.vcpus = 1;
        other.cpu = "qemu64,+avx,-svm".to_owned();
        other.disks.clear();
        other.channels.reverse();
        other.channels.pop();
        let here = machine(&other, &emulator, Role::Destination).await;
        let texts = texts(&here, &there);
        for expected in [
            "number of vCPUs: 2 at the source, 1 at the destination",
            "memory block pc.ram: at most 64 MiB at the source, 128 MiB at the destination",
            "device blk-vda: virtio-blk-pci at pcie.0/04.0 at the source, missing at the \
             destination",
            "device port1: virtserialport at serial.0/2 at the source, missing at the destination",
            "CPU features that the guest sees at the source and the destination lacks: svm",
            "CPU features that the destination has and the guest does not see now: avx",
        ] {
            assert!(
                texts.iter().any(|text| text == expected),
                "{expected}: {texts:#?}"
            );
        }
        assert_eq!(texts.len(), 6, "{texts:#?}");
    }
}

#[tokio::test]
async fn a_cpu_that_two_versions_emulate_differently_is_named() {
    let emulators = emulators();
    let [(old, _), (new, _)] = emulators.as_slice() else {
        eprintln!("only one QEMU here");
        return;
    };
    let mut description = guest(MACHINES[0]);
    description.cpu = "EPYC-v3".to_owned();
    let source = machine(&description, old, Role::Fresh).await;
    let destination = machine(&description, new, Role::Destination).await;
    let found = destination.differences(&source);
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(found[0].text.contains("rdseed"), "{}", found[0]);
    // The hint's advice repairs the guest.
    let start = found[0].hint.find("MODEL").unwrap();
    let end = found[0].hint[start..].find('"').unwrap() + start;
    description.cpu = found[0].hint[start..end].replace("MODEL", "EPYC-v3");
    let source = machine(&description, old, Role::Fresh).await;
    let destination = machine(&description, new, Role::Destination).await;
    assert_eq!(texts(&destination, &source), [""; 0]);
}

/// Equal machines are also loaded by QEMU, with its own migration.
#[tokio::test]
async fn what_is_equal_loads() {
    for name in MACHINES {
        for (source, from) in emulators() {
            for (destination, to) in emulators() {
                if let Some(why) = does_not_load(&from, &to) {
                    println!("not tried: {why}");
                    continue;
                }
                moves(&guest(name), &source, &destination).await;
            }
        }
    }
}

async fn moves(description: &GuestDescription, source: &str, destination: &str) {
    // Two hosts that share one disk.
    let (there, mut here) = (Host::new(), Host::new());
    here.config.images = there.config.images.clone();
    let (from, from_qmp) = there
        .launch(description, source, Role::Fresh)
        .await
        .unwrap();
    let (to, to_qmp) = here
        .launch(description, destination, Role::Destination)
        .await
        .unwrap();
    let equal = {
        let there = observe::observe(&from_qmp).await.unwrap();
        let here = observe::observe(&to_qmp).await.unwrap();
        texts(&here, &there)
    };
    assert_eq!(equal, [""; 0]);
    let socket = to.folder().socket("incoming").unwrap();
    let target = json!({"uri": format!("unix:{}", socket.display())});
    let listen = to_qmp.execute("migrate-incoming", target.clone(), COMMAND_TIMEOUT);
    listen.await.unwrap();
    from_qmp
        .execute("migrate", target, COMMAND_TIMEOUT)
        .await
        .unwrap();
    let pair = format!("{source} to {destination}");
    wait_for(&from_qmp, "postmigrate", &pair).await;
    wait_for(&to_qmp, "paused", &pair).await;
    to_qmp.query("cont").await.unwrap();
    wait_for(&to_qmp, "running", &pair).await;
    from.stop(Some(&from_qmp)).await.unwrap();
    to.stop(Some(&to_qmp)).await.unwrap();
}

async fn wait_for(qmp: &Qmp, wanted: &str, pair: &str) {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let status = qmp.query("query-status").await.unwrap();
        if status["status"] == wanted {
            return;
        }
        let migration = qmp.query("query-migrate").await.unwrap();
        assert!(migration["status"] != "failed", "{pair}: {migration}");
        assert!(
            Instant::now() < deadline,
            "{pair}: {status} instead of {wanted}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn this_host_knows_what_it_can_run() {
    let host = Host::new();
    let config = Arc::new(host.config.clone());
    let capabilities = Prober::new(Arc::clone(&config))
        .capabilities()
        .await
        .unwrap();
    assert_eq!(capabilities.accelerator, Accelerator::Tcg);
    for (label, _) in emulators() {
        let emulator = &capabilities.emulators[&label];
        assert!(emulator.version.starts_with(&label) || label == "system");
        assert!(emulator.machine_types[MACHINES[0]].cpus_max >= 255);
        assert!(emulator.cpu_models.contains_key("qemu64"));
        if label != "system" {
            assert_eq!(tested::warning(&emulator.version, "here"), None);
            // As if the newest of them were untested.
            let newer = tested::is_newer(&emulator.version, (10, 0));
            assert_eq!(newer, label == "11.1");
        }
    }
    let checks = can_run("here", &guest(MACHINES[0]), None, &capabilities);
    let refused = |check: &&longhaul_protocol::message::Check| check.verdict == Verdict::Refused;
    assert!(checks.iter().find(refused).is_none(), "{checks:#?}");
    let mut impossible = guest("pc-q35-99.0");
    impossible.nics[0].network = "elsewhere".to_owned();
    let checks = can_run("here", &impossible, None, &capabilities);
    assert_eq!(checks.iter().filter(refused).count(), 2, "{checks:#?}");

    // A new agent reads the results of the old one.
    let file = host.state().join("emulators.json");
    let kept = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, kept.replace("pc-q35-7.2", "pc-q35-98.0")).unwrap();
    let again = Prober::new(config).capabilities().await.unwrap();
    assert!(again.emulator_for("pc-q35-98.0").is_some());
}

#[tokio::test]
async fn kvm_is_believed_only_when_a_guest_runs() {
    let mut host = Host::new();
    host.config.qemu.accelerator = longhaul_hypervisor::config::AcceleratorChoice::Auto;
    let prober = Prober::new(Arc::new(host.config.clone()));
    let (accelerator, why) = prober.accelerator().await.unwrap();
    match why {
        Some(why) => {
            assert_eq!(accelerator, Accelerator::Tcg);
            println!("KVM does not work here: {why}");
            host.config.qemu.accelerator = longhaul_hypervisor::config::AcceleratorChoice::Kvm;
            let prober = Prober::new(Arc::new(host.config.clone()));
            let error = prober.accelerator().await.unwrap_err();
            assert!(error.to_string().contains(&why), "{error}");
        }
        None => assert_eq!(accelerator, Accelerator::Kvm),
    }
}
