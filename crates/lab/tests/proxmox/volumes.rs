//! Volumes that are block devices: allocated before a guest comes, freed where it does not come.

use super::{DISK_BYTES, GUEST, ID, LIMIT, Stage, host_of};
use longhaul_lab::installed;
use longhaul_lab::process::wait_until;
use longhaul_lab::proxmox::{Version, create_volume};
use std::fs;
use std::io::Write;

const STORAGE: &str = "local-lvm";
const OTHER: &str = "other";

impl Stage {
    /// Returns the names of the guest's volumes on a node's LVM.
    fn logical_volumes(&self, host: usize) -> Vec<String> {
        let words = ["pvesm", "list", STORAGE, "--vmid", "100"];
        let said = self.nodes[host].run(&self.lab.hosts()[host], &words);
        let said = said.unwrap();
        let volumes = said.lines().filter_map(|line| line.split_once(':'));
        let names = volumes.filter_map(|(_, rest)| rest.split_whitespace().next());
        let mut names: Vec<String> = names.map(str::to_owned).collect();
        names.sort();
        names
    }
}

#[test]
fn a_disk_on_lvm_moves_there_and_back() {
    if !installed::is_its_day(3, 4) {
        return;
    }
    let Some(mut stage) = Stage::build("LVM", Version::Nine) else {
        return;
    };
    for node in &stage.nodes {
        node.add_lvm(STORAGE).unwrap();
    }
    // A storage of files at the one host, and of block devices at the other.
    let files = stage.nodes[0].storage(OTHER);
    fs::create_dir_all(files.join("images/100")).unwrap();
    let text = stage.nodes[0].read("storage.cfg").unwrap();
    let text = format!("{text}dir: {OTHER}\n\tpath {}\n\n", files.display());
    stage.nodes[0].write("storage.cfg", &text).unwrap();
    stage.nodes[1].add_lvm(OTHER).unwrap();
    let mut product = stage.start_agents(true);
    stage.make_guest(
        "virtio0: local-lvm:vm-100-disk-0,discard=on,size=24M\n\
         virtio1: other:100/vm-100-disk-7.raw,size=26M\n",
    );
    let second = stage.volume(0, ID, "virtio1");
    create_volume(&second, "raw", 26 << 20).unwrap();
    let kib = (DISK_BYTES >> 10).to_string();
    let words = [
        "pvesm",
        "alloc",
        STORAGE,
        "100",
        "vm-100-disk-0",
        &kib,
        "--format",
        "raw",
    ];
    stage.nodes[0].run(&stage.lab.hosts()[0], &words).unwrap();
    // A part of it is zeros.
    let content: Vec<u8> = (0..DISK_BYTES)
        .map(|at| {
            if at % (2 << 20) < 1 << 20 {
                (at >> 9) as u8
            } else {
                0
            }
        })
        .collect();
    let mut device = fs::File::options();
    let device = device
        .write(true)
        .open(stage.nodes[0].logical_volume("vm-100-disk-0"));
    device.unwrap().write_all(&content).unwrap();
    stage.start_guest();
    let config = stage.config(0, ID);
    // No volume has the size of its second disk.
    let words = "virtio1 has 27262976 bytes, and volumes of storage other have multiples of 4 MiB";
    let plan = stage.said(&product, 0, &["plan", GUEST, "--to", "paris"]);
    let shown = plan.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(shown.contains(words), "{plan}");
    assert!(!plan.contains("To go:"), "{plan}");
    let moving = product.migrate(0, GUEST, host_of(&stage, 1), &[]).unwrap();
    let finished = moving.finish(LIMIT).unwrap();
    let why = finished.why();
    assert!(why.contains(words), "{why}");
    assert!(stage.logical_volumes(1).is_empty());
    assert_eq!(stage.config(0, ID), config);
    stage.qm(0, &["stop", "100"]).unwrap();
    let grown = fs::File::options().write(true).open(&second).unwrap();
    grown.set_len(28 << 20).unwrap();
    stage.start_guest();
    let plan = stage.said(&product, 0, &["plan", GUEST, "--to", "paris"]);
    assert!(
        plan.contains("allocates a volume for disk virtio0"),
        "{plan}"
    );
    assert!(stage.logical_volumes(1).is_empty());
    for fails in ["pvesm-alloc", "qm-start", "the agent"] {
        eprintln!("{fails}");
        let to = host_of(&stage, 1);
        let file = format!("fail-{fails}");
        if fails == "the agent" {
            let armed = "destination:before-send:accepted=kill";
            product
                .agent_mut(1)
                .unwrap()
                .restart_to_fail(to, armed)
                .unwrap();
        } else {
            stage.nodes[1].write(&file, "it is a test").unwrap();
        }
        let moving = product.migrate(0, GUEST, to, &[]).unwrap();
        if fails == "the agent" {
            let died = wait_until(LIMIT, || product.agent_mut(1).unwrap().has_ended());
            assert!(died, "{}", product.ends_of_logs());
            assert_eq!(stage.logical_volumes(1).len(), 2);
            product.agent_mut(1).unwrap().restart(to).unwrap();
        }
        let finished = moving.finish(LIMIT).unwrap();
        let logs = product.ends_of_logs();
        assert!(!finished.completed(), "{fails}\n{logs}");
        if fails != "the agent" {
            assert!(
                finished.why().contains("it is a test"),
                "{}\n{logs}",
                finished.why()
            );
            stage.nodes[1].remove(&file).unwrap();
        }
        let as_before = wait_until(LIMIT, || stage.config(0, ID) == config);
        assert!(as_before, "{fails}: {}\n{logs}", stage.config(0, ID));
        let freed = wait_until(LIMIT, || {
            stage.nodes[1].config(ID).is_none() && stage.logical_volumes(1).is_empty()
        });
        let logs = product.ends_of_logs();
        assert!(freed, "{fails}: {:?}\n{logs}", stage.logical_volumes(1));
        stage.verify();
    }
    // While those of an earlier attempt cannot be freed, none begins.
    for fails in ["qm-start", "pvesm-free"] {
        let file = format!("fail-{fails}");
        stage.nodes[1].write(&file, "it is a test").unwrap();
    }
    for expected in ["it is a test", "are not freed here yet"] {
        let moving = product.migrate(0, GUEST, host_of(&stage, 1), &[]).unwrap();
        let why = moving.finish(LIMIT).unwrap().why();
        assert!(why.contains(expected), "{why}\n{}", product.ends_of_logs());
        let as_before = wait_until(LIMIT, || stage.config(0, ID) == config);
        assert!(as_before, "{}", product.ends_of_logs());
        stage.nodes[1].remove("fail-qm-start").unwrap_or_default();
    }
    assert_eq!(stage.logical_volumes(1), ["vm-100-disk-0", "vm-100-disk-1"]);
    stage.nodes[1].remove("fail-pvesm-free").unwrap();
    let freed = wait_until(LIMIT, || {
        let plan = stage.said(&product, 0, &["plan", GUEST, "--to", "paris"]);
        stage.logical_volumes(1).is_empty() && plan.contains("To go:")
    });
    assert!(freed, "{}", product.ends_of_logs());
    // What is at the source is not freed, so it gets another volume when it comes back.
    let volumes = ["vm-100-disk-0", "vm-100-disk-0", "vm-100-disk-1"];
    for (at, [from, to]) in [[0, 1], [1, 0]].into_iter().enumerate() {
        let moving = product.migrate(from, GUEST, host_of(&stage, to), &["--verify"]);
        let finished = moving.unwrap().finish(LIMIT).unwrap();
        let logs = product.ends_of_logs();
        assert!(finished.completed(), "{}\n{logs}", finished.why());
        stage.hear(to, ID);
        stage.verify();
        let expected = format!("local-lvm:{},discard=on,size=24M", volumes[at + 1]);
        assert_eq!(stage.setting(to, ID, "virtio0"), Some(expected));
        for (host, name) in [(from, volumes[at]), (to, volumes[at + 1])] {
            let there = fs::read(stage.nodes[host].logical_volume(name)).unwrap();
            assert!(there == content, "{name} at host {host}");
        }
        let place = ["other:100/vm-100-disk-0.raw", "other:vm-100-disk-1"][to];
        let value = stage.setting(to, ID, "virtio1").unwrap();
        assert_eq!(value, format!("{place},size=26M"));
        let unlocked = wait_until(LIMIT, || stage.lock(to, ID).is_none());
        assert!(unlocked, "{}", product.ends_of_logs());
    }
    assert_eq!(stage.logical_volumes(0), ["vm-100-disk-0", "vm-100-disk-1"]);
    assert_eq!(stage.logical_volumes(1), ["vm-100-disk-0", "vm-100-disk-1"]);
}
