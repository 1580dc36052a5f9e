//! State of devices beside memory and disks: what QEMU has in its stream, and Proxmox VE keeps in
//! volumes.

use super::{GUEST, ID, LIMIT, OTHER_ID, STORAGES, Stage, host_of};
use longhaul_lab::installed;
use longhaul_lab::process::wait_until;
use longhaul_lab::proxmox::{Version, create_volume};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The variables that firmware of 4 MiB begins with.
const EMPTY_VARIABLES: &str = "/usr/share/OVMF/OVMF_VARS_4M.ms.fd";
const KEYS: [&str; 2] = ["efidisk0", "tpmstate0"];

/// Returns the content of an image that QEMU may have open.
fn content(path: &Path, folder: &Path) -> Vec<u8> {
    let raw = folder.join("content");
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-U", "-O", "raw"]);
    let done = command.arg(path).arg(&raw).status().unwrap();
    assert!(done.success(), "{}", path.display());
    fs::read(raw).unwrap()
}

fn aside(path: &Path) -> PathBuf {
    let mut aside = path.to_owned().into_os_string();
    aside.push(".moved");
    aside.into()
}

impl Stage {
    /// Returns the content of the volumes of devices' states, when QEMU has written all of it.
    fn states(&self, host: usize, id: u32) -> Vec<Vec<u8>> {
        let number = id.to_string();
        self.qm(host, &["suspend", &number]).unwrap();
        let folder = self.lab.hosts()[host].folder();
        let states = KEYS.iter().map(|key| {
            let path = self.volume(host, id, key);
            content(&path, folder)
        });
        let states = states.collect();
        self.qm(host, &["resume", &number]).unwrap();
        states
    }

    /// Returns the files of a guest's volumes.
    fn files(&self, host: usize, id: u32) -> Vec<PathBuf> {
        let folders = STORAGES[host].iter();
        let folders = folders.map(|it| self.nodes[host].volume(it, &id.to_string()));
        let entries = folders.flat_map(|folder| fs::read_dir(folder).into_iter().flatten());
        let files = entries.map(|entry| entry.unwrap().path());
        let group = fs::read_dir(self.nodes[host].logical_volume(""));
        let head = format!("vm-{id}-");
        let devices = group.into_iter().flatten().map(|it| it.unwrap());
        let devices = devices.filter(|it| it.file_name().to_string_lossy().starts_with(&head));
        files.chain(devices.map(|entry| entry.path())).collect()
    }
}

/// The variables of a guest's firmware and the state of its TPM move with it, there and back.
/// Without a format, the variables are on LVM.
fn firmware_and_tpm_move(version: Version, format: Option<&str>) {
    let Some(mut stage) = Stage::build("firmware", version) else {
        return;
    };
    for node in stage.nodes.iter().filter(|_| format.is_none()) {
        node.add_lvm("local-lvm").unwrap();
    }
    let mut product = stage.start_agents(true);
    let variables = match format {
        Some(format) => format!("fast:100/vm-100-disk-1.{format}"),
        None => "local-lvm:vm-100-disk-1".to_owned(),
    };
    stage.make_guest(&format!(
        "bios: ovmf\n\
         efidisk0: {variables},efitype=4m,pre-enrolled-keys=1,size=528K\n\
         tpmstate0: local:100/vm-100-disk-2.raw,size=4M,version=v2.0\n\
         virtio0: local:100/vm-100-disk-0.raw,size=24M\n"
    ));
    create_volume(&stage.volume(0, ID, "tpmstate0"), "raw", 4 << 20).unwrap();
    if format.is_none() {
        let words = ["pvesm", "alloc", "local-lvm", "100", "vm-100-disk-1", "528"];
        let words = [&words[..], &["--format", "raw"]].concat();
        stage.nodes[0].run(&stage.lab.hosts()[0], &words).unwrap();
    }
    create_volume(&stage.volume(0, ID, "virtio0"), "raw", 24 << 20).unwrap();
    let variables = stage.volume(0, ID, "efidisk0");
    fs::create_dir_all(variables.parent().unwrap()).unwrap();
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-f", "raw", "-O", format.unwrap_or("raw")]);
    // A block device is there already.
    convert
        .args(format.is_none().then_some("-n"))
        .arg(EMPTY_VARIABLES);
    assert!(convert.arg(&variables).status().unwrap().success());
    // Another guest has its number there.
    let other = format!("qemu-server/{ID}.conf");
    stage.nodes[1].write(&other, "name: other\n").unwrap();
    stage.start_guest();
    let at_first = stage.states(0, ID);
    let empty = fs::read(EMPTY_VARIABLES).unwrap();
    let size = if format.is_some() {
        empty.len()
    } else {
        4 << 20
    };
    assert_eq!(at_first[0].len(), size);
    assert!(
        at_first[0][..empty.len()] != empty,
        "its firmware has written nothing"
    );
    assert!(
        at_first[1].iter().any(|byte| *byte != 0),
        "its TPM has no state"
    );
    let config = stage.config(0, ID);
    // A plan says that there is no place for them.
    let storages = stage.nodes[1].read("storage.cfg").unwrap();
    let named = format!(": {}\n", format.map_or("local-lvm", |_| STORAGES[1][1]));
    let (before, after) = storages.split_once(&named).unwrap();
    let after = after.replacen("content images,", "content ", 1);
    let without = format!("{before}{named}{after}");
    stage.nodes[1].write("storage.cfg", &without).unwrap();
    let plan = stage.said(&product, 0, &["plan", GUEST, "--to", "paris"]);
    for words in ["Proxmox VE cannot take web", "not for disk images"] {
        assert!(plan.contains(words), "{plan}");
    }
    stage.nodes[1].write("storage.cfg", &storages).unwrap();
    // What was allocated for a guest that does not come is freed.
    for fails in ["qm start", "pvesm alloc", "the agent"] {
        eprintln!("{fails}");
        let file = format!("fail-{}", fails.replace(' ', "-"));
        let to = &stage.lab.hosts()[1];
        if fails == "the agent" {
            let armed = "destination:before-send:accepted=kill";
            let agent = product.agent_mut(1).unwrap();
            agent.restart_to_fail(to, armed).unwrap();
        } else {
            stage.nodes[1].write(&file, "it is a test").unwrap();
        }
        let moving = product.migrate(0, GUEST, to, &[]).unwrap();
        if fails == "the agent" {
            let died = wait_until(LIMIT, || product.agent_mut(1).unwrap().has_ended());
            assert!(died, "{}", product.ends_of_logs());
            let there = stage.files(1, OTHER_ID);
            assert!(!there.is_empty());
            product.agent_mut(1).unwrap().restart(to).unwrap();
        }
        let finished = moving.finish(LIMIT).unwrap();
        let logs = product.ends_of_logs();
        if fails == "the agent" && finished.completed() {
            panic!("it has moved after all\n{logs}");
        }
        let as_before = wait_until(LIMIT, || stage.config(0, ID) == config);
        assert!(as_before, "{fails}: {}\n{logs}", stage.config(0, ID));
        let gone = wait_until(LIMIT, || {
            stage.nodes[1].config(OTHER_ID).is_none() && stage.files(1, OTHER_ID).is_empty()
        });
        assert!(gone, "{fails}: {:?}\n{logs}", stage.files(1, OTHER_ID));
        if fails != "the agent" {
            stage.nodes[1].remove(&file).unwrap();
        }
        stage.verify();
    }
    let ids = [ID, OTHER_ID];
    let mut expected = stage.states(0, ID);
    for [from, to] in [[0, 1], [1, 0]] {
        let old: Vec<PathBuf> = KEYS
            .iter()
            .map(|key| stage.volume(from, ids[from], key))
            .collect();
        let moving = product.migrate(from, GUEST, host_of(&stage, to), &["--verify"]);
        let finished = moving.unwrap().finish(LIMIT).unwrap();
        let logs = product.ends_of_logs();
        assert!(finished.completed(), "{}\n{logs}", finished.why());
        if to == 1 {
            stage.hear(to, OTHER_ID);
            stage.verify();
        }
        let value = stage.setting(to, ids[to], "efidisk0").unwrap();
        let (id, storages) = (ids[to], STORAGES[to]);
        let volume = match format {
            Some(format) => format!("{}:{id}/vm-{id}-disk-0.{format},", storages[1]),
            None => format!("local-lvm:vm-{id}-disk-0,"),
        };
        let rest = "efitype=4m,pre-enrolled-keys=1,size=528K";
        assert_eq!(value, format!("{volume}{rest}"));
        let value = stage.setting(to, ids[to], "tpmstate0").unwrap();
        let second = format!("{}:{id}/vm-{id}-disk-", storages[0]);
        assert!(value.starts_with(&second), "{value}");
        assert!(value.ends_with(",size=4M,version=v2.0"), "{value}");
        // Both hosts have the same,
        assert!(stage.states(to, ids[to]) == expected, "at host {to}");
        let folder = stage.lab.hosts()[from].folder();
        let left = |old: &[PathBuf]| -> Vec<Vec<u8>> {
            let files = old.iter().map(|path| match path.extension() {
                Some(_) => content(&aside(path), folder),
                // A block device keeps its name.
                None => content(path, folder),
            });
            files.collect()
        };
        assert!(left(&old) == expected, "at host {from}");
        if to == 0 {
            continue;
        }
        // and what is written from now on is written where the guest is.
        stage.arena.forget_beats();
        stage.qm(to, &["reset", &ids[to].to_string()]).unwrap();
        stage.arena.wait_for_beat(LIMIT).unwrap();
        let now = stage.states(to, ids[to]);
        for (at, key) in KEYS.iter().enumerate() {
            assert!(now[at] != expected[at], "{key} is not written at host {to}");
        }
        assert!(left(&old) == expected, "at host {from}");
        expected = now;
    }
}

#[test]
fn firmware_and_tpm_of_a_guest_of_version_9_move_along() {
    if !installed::is_its_day(0, 4) {
        return;
    }
    firmware_and_tpm_move(Version::Nine, None);
}

#[test]
fn firmware_and_tpm_of_a_guest_of_version_8_move_along() {
    if !installed::is_its_day(2, 4) {
        return;
    }
    firmware_and_tpm_move(Version::Eight, Some("qcow2"));
}
