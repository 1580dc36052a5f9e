//! Tests moves of guests of Proxmox VE with a stand-in for its files and commands, which starts
//! Debian's QEMU. Proxmox VE itself is not installed anywhere here. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

mod devices;
mod ends;
mod following;
mod volumes;

use longhaul_api::Phase;
use longhaul_lab::arena::{Arena, Workload};
use longhaul_lab::guest::disks::LocalDisk;
use longhaul_lab::guest::{CHANNEL_NAME, KernelFiles, Tiny};
use longhaul_lab::history::task::{History, Task, description};
use longhaul_lab::history::workload::Work;
use longhaul_lab::installed;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::process::wait_until;
use longhaul_lab::product::{Product, Settings};
use longhaul_lab::proxmox::{Proxmox, Setup, Version, create_volume};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(300);
const GUEST: &str = "web";
const ID: u32 = 100;
/// The number that it gets at the other host, where 100 is another guest.
const OTHER_ID: u32 = 101;
const VERSION: &str = "7.2";
/// The bridges of the two hosts.
const BRIDGES: [&str; 2] = ["vmbr0", "vmbr7"];
/// The storages of the two hosts.
const STORAGES: [[&str; 2]; 2] = [["local", "fast"], ["local", "tank"]];
/// The dirty bitmap of backups to Proxmox Backup Server.
const BITMAP: &str = "pbs-incremental-dirty-bitmap";
const DISK_BYTES: u64 = 24 << 20;

/// Two nodes, each of a cluster of its own, and a guest at work on the first.
struct Stage {
    nodes: [Proxmox; 2],
    arena: Arena,
    heard: BTreeSet<PathBuf>,
    lab: Lab,
}

impl Stage {
    fn build(purpose: &str, version: Version) -> Option<Self> {
        if let Err(error) = installed::qemu(VERSION) {
            assert!(!installed::all_required(), "{error}");
            eprintln!("SKIPPED proxmox: {error}");
            return None;
        }
        let lab = Lab::create(&Plan {
            purpose: format!("test: Proxmox VE, {purpose}"),
            hosts: 2,
            link: "1gbit,1ms".parse().unwrap(),
            seed: 1,
        })
        .unwrap();
        let files = [0, 1]
            .map(|host: usize| KernelFiles::make_with_history(lab.hosts()[host].folder()).unwrap());
        let tiny = description(&Tiny::calm(GUEST), &[]);
        let line = tiny.kernel.unwrap();
        let nodes = [0, 1].map(|host: usize| {
            let setup = Setup {
                version,
                qemu: installed::qemu(VERSION).unwrap(),
                machine_version: VERSION.to_owned(),
                kernel: Proxmox::kernel(&files[host]),
                command_line: line.command_line.clone(),
                channels: tiny.channels.iter().map(|it| it.name.clone()).collect(),
            };
            let node = Proxmox::make(&lab.hosts()[host], &setup, &STORAGES[host]).unwrap();
            let bridge = BRIDGES[host];
            let batch = format!("link add {bridge} type bridge\nlink set {bridge} up\n");
            lab.hosts()[host].namespace().configure(&batch).unwrap();
            node
        });
        Some(Self {
            nodes,
            arena: Arena::new(),
            heard: BTreeSet::new(),
            lab,
        })
    }

    /// Starts an agent on each node. `more` is added to the configuration of the second.
    fn start_agents(&mut self, maps: bool) -> Product {
        let settings = Settings {
            qemus: vec![VERSION.to_owned()],
            accelerator: "tcg".to_owned(),
        };
        let files = KernelFiles::make_with_history(self.lab.hosts()[0].folder()).unwrap();
        let each = |host: usize| {
            let [own, other] = [host, 1 - host];
            let text = match maps {
                true => format!(
                    "[proxmox]\nstorages = {{ {} = {:?} }}\nbridges = {{ {} = {:?} }}\n",
                    STORAGES[other][1], STORAGES[own][1], BRIDGES[other], BRIDGES[own]
                ),
                false => "[proxmox]\nenabled = true\n".to_owned(),
            };
            text.parse().unwrap()
        };
        let mut product = Product::start_each_with(&mut self.lab, &files, &settings, each).unwrap();
        for (number, host) in self.lab.hosts().iter().enumerate() {
            let agent = product.agent_mut(number).unwrap();
            agent.see_interfaces();
            agent.enter(&self.nodes[number]);
            agent.restart(host).unwrap();
        }
        product
    }

    /// Makes the file of the guest on the first node.
    fn make_guest(&self, more: &str) {
        // UEFI firmware needs more than the test guests have.
        let memory = if more.contains("ovmf") { 256 } else { 128 };
        let text = format!(
            "#made for a test\nboot: order=virtio0\ncores: 1\nkvm: 0\nmemory: {memory}\n\
             name: {GUEST}\nostype: l26\nscsihw: virtio-scsi-pci\n\
             smbios1: uuid=7b10d7af-b932-4c66-b2c3-3996152ec465\n{more}\
             vmgenid: c773c261-d800-4348-9f5d-167fadd53cf8\n"
        );
        // As Proxmox VE writes them: in the order of their keys, after the notes.
        let mut lines: Vec<&str> = text.lines().collect();
        lines.sort_unstable();
        let text = format!("{}\n", lines.join("\n"));
        let name = format!("qemu-server/{ID}.conf");
        self.nodes[0].write(&name, &text).unwrap();
    }

    fn qm(&self, host: usize, words: &[&str]) -> Result<String, String> {
        let words = [&["qm"], words].concat();
        let said = self.nodes[host].run(&self.lab.hosts()[host], &words);
        said.map_err(|error| error.to_string())
    }

    /// Starts the guest on the first node, and lets it write its memory.
    fn start_guest(&mut self) {
        // An agent may still close the disks of a QEMU that has ended.
        let mut said = Ok(String::new());
        let started = wait_until(LIMIT, || {
            said = self.qm(0, &["start", "100"]);
            said.is_ok()
        });
        assert!(started, "{said:?}");
        self.hear(0, ID);
        self.arena.wait_for_beat(LIMIT).unwrap();
        let workload = Workload {
            content: "mix".to_owned(),
            arena_bytes: 32 << 20,
            working_set_bytes: 8 << 20,
            pages_per_s: 500,
            write_bytes: 256,
            writers: 1,
            verify_pages_per_s: 0,
            seed: 7,
        };
        self.arena.start(&workload, LIMIT).unwrap();
    }

    /// Listens to the guest on a host.
    fn hear(&mut self, host: usize, id: u32) {
        let socket = self.nodes[host].channel(id, CHANNEL_NAME);
        // Who listens to a socket goes on when another QEMU has made it again.
        if self.heard.insert(socket.clone()) {
            self.arena.attach(&socket).unwrap();
        }
    }

    /// The guest works, and its memory is as it wrote it.
    fn verify(&mut self) {
        self.arena.forget_beats();
        self.arena.wait_for_beat(LIMIT).unwrap();
        let verified = self.arena.verify(LIMIT).unwrap();
        assert_eq!(verified.errors, 0, "{verified:?}");
    }

    fn config(&self, host: usize, id: u32) -> String {
        self.nodes[host].config(id).unwrap_or_default()
    }

    /// Returns a setting in the file of a guest.
    fn setting(&self, host: usize, id: u32, key: &str) -> Option<String> {
        let text = self.config(host, id);
        let mut lines = text.lines();
        let head = format!("{key}: ");
        lines.find_map(|line| line.strip_prefix(&head).map(str::to_owned))
    }

    fn lock(&self, host: usize, id: u32) -> Option<String> {
        self.setting(host, id, "lock")
    }

    fn runs(&self, host: usize, id: u32) -> bool {
        let said = self.qm(host, &["status", &id.to_string()]);
        said.is_ok_and(|said| said == "status: running")
    }

    /// Asks the QEMU of a guest, as Proxmox VE's programs do: on a connection of its own.
    fn ask(&self, (host, id): (usize, u32), command: &Value) -> Value {
        let socket = UnixStream::connect(self.nodes[host].channel(id, "qmp")).unwrap();
        let mut writer = socket.try_clone().unwrap();
        let mut answers = BufReader::new(socket).lines().map(|line| {
            let line: Value = serde_json::from_str(&line.unwrap()).unwrap();
            line
        });
        for line in [&json!({"execute": "qmp_capabilities"}), command] {
            writeln!(writer, "{line}").unwrap();
        }
        let mut answers = answers.by_ref().filter(|it| it.get("event").is_none());
        // The greeting, and the answer to the first.
        let answer = answers.nth(2).unwrap();
        assert!(answer.get("return").is_some(), "{answer}");
        answer["return"].clone()
    }

    /// Returns the drives of a guest with the dirty bitmap of a backup.
    fn with_bitmap(&self, at: (usize, u32)) -> Vec<String> {
        let query = json!({"execute": "query-named-block-nodes", "arguments": {"flat": true}});
        let nodes = self.ask(at, &query);
        let has = |node: &&Value| {
            let bitmaps = node["dirty-bitmaps"].as_array();
            bitmaps.is_some_and(|all| all.iter().any(|it| it["name"] == BITMAP))
        };
        let nodes = nodes.as_array().unwrap().iter().filter(has);
        let names = nodes.map(|node| node["node-name"].as_str().unwrap().to_owned());
        names.collect()
    }

    /// The path of a volume of a guest.
    fn volume(&self, host: usize, id: u32, key: &str) -> PathBuf {
        let value = self.setting(host, id, key).unwrap();
        let volume = value.split(',').next().unwrap();
        match volume.split_once(':').unwrap() {
            ("local-lvm", name) => self.nodes[host].logical_volume(name),
            (storage, name) => self.nodes[host].volume(storage, name),
        }
    }

    /// Returns what the program says on a host, whether it fails or not.
    fn said(&self, product: &Product, host: usize, words: &[&str]) -> String {
        let mut command = product.agent(host).unwrap().command().unwrap();
        let said = command.args(words).output().unwrap();
        String::from_utf8([said.stdout, said.stderr].concat()).unwrap()
    }
}

const DRIVES: &str = "ide2: local:100/vm-100-cloudinit.qcow2,media=cdrom\n\
    net0: virtio=BC:24:11:00:00:01,bridge=vmbr0,firewall=0\n\
    virtio0: local:100/vm-100-disk-0.raw,discard=on,size=24M\n\
    virtio1: fast:100/vm-100-disk-0.qcow2,discard=on,size=24M\n";

/// A guest with two disks on two storages, a volume of cloud-init and a card: there and back.
fn there_and_back(version: Version) {
    let Some(mut stage) = Stage::build("there and back", version) else {
        return;
    };
    let product = stage.start_agents(true);
    stage.make_guest(DRIVES);
    // Another guest has its number there.
    let other = format!("qemu-server/{ID}.conf");
    stage.nodes[1].write(&other, "name: other\n").unwrap();
    stage.nodes[0]
        .write("firewall/100.fw", "[OPTIONS]\n")
        .unwrap();
    let kinds = ["raw,none", "qcow2,none"].map(|kind| kind.parse().unwrap());
    let disks: Vec<LocalDisk> = kinds
        .iter()
        .enumerate()
        .map(
            |(at, kind): (usize, &longhaul_lab::guest::disks::DiskKind)| LocalDisk {
                image: format!("disk{at}"),
                path: stage.volume(0, ID, &format!("virtio{at}")),
                kind: *kind,
                bytes: DISK_BYTES,
            },
        )
        .collect();
    for disk in &disks {
        create_volume(&disk.path, disk.kind.format.name(), DISK_BYTES).unwrap();
    }
    let cloud_init = stage.volume(0, ID, "ide2");
    create_volume(&cloud_init, "qcow2", 4 << 20).unwrap();
    let seed = fs::read(&cloud_init).unwrap();
    let task = Task {
        disks: &disks,
        seed: 29,
        depth: 4,
        work: Work {
            operations_per_s: 60,
            ..Work::default()
        },
    };
    let mut history = History::new(&task);
    stage.qm(0, &["start", "100"]).unwrap();
    let listen = |stage: &Stage, history: &History, (host, id): (usize, u32)| {
        let listening = history.listen(|channel| stage.nodes[host].channel(id, channel));
        listening.unwrap();
    };
    listen(&stage, &history, (0, ID));
    history.begin(&task).unwrap();
    history.wait_for(60, LIMIT).unwrap();
    // As a backup to Proxmox Backup Server leaves them.
    for disk in ["virtio0", "virtio1"] {
        let arguments = json!({"node": format!("drive-{disk}"), "name": BITMAP});
        let add = json!({"execute": "block-dirty-bitmap-add", "arguments": arguments});
        stage.ask((0, ID), &add);
    }
    assert_eq!(stage.with_bitmap((0, ID)).len(), 2);
    for [from, to] in [[0, 1], [1, 0]] {
        let ids = [ID, OTHER_ID];
        let before = history.heard().told.done;
        let at_first = stage.config(from, ids[from]);
        let host = &stage.lab.hosts()[to];
        let plan = stage.said(&product, from, &["plan", GUEST, "--to", host.name()]);
        eprintln!("{plan}");
        let number = match to {
            1 => "VM 100 is another guest here: web becomes VM 101",
            _ => "VM 101 is another guest here: web becomes VM 100",
        };
        assert!(plan.contains(number), "{plan}");
        let words: Vec<&str> = plan.split_whitespace().collect();
        let plan = words.join(" ");
        for disk in ["virtio0", "virtio1"] {
            let lost = format!("dirty bitmap {BITMAP} of disk {disk} is not in an image");
            // The next backup reads all of the disk.
            assert_eq!(plan.contains(&lost), to == 1, "{plan}");
        }
        assert_eq!(plan.contains("has to be a full one"), to == 1, "{plan}");
        assert_eq!(stage.config(from, ids[from]), at_first);
        let words = match to {
            1 => &["--verify"][..],
            _ => &["--verify", "--strategy", "postcopy"],
        };
        let moving = product.migrate(from, GUEST, host, words).unwrap();
        // The locks are there while it moves, and Proxmox VE's commands respect them.
        let waits = wait_until(LIMIT, || stage.runs(to, ids[to]));
        assert!(waits, "{}", product.ends_of_logs());
        for (host, id) in [(from, ids[from]), (to, ids[to])] {
            assert_eq!(stage.lock(host, id).as_deref(), Some("migrate"));
            for words in [&["start"][..], &["stop"], &["snapshot", "before"]] {
                let mut all = vec![words[0], if id == ID { "100" } else { "101" }];
                all.extend(&words[1..]);
                let refused = stage.qm(host, &all);
                // It may be over for the one or the other by now.
                if stage.lock(host, id).is_some() && words != ["start"] {
                    let refused = refused.unwrap_err();
                    assert!(refused.contains("VM is locked (migrate)"), "{refused}");
                }
            }
        }
        let finished = moving.finish(LIMIT).unwrap();
        let logs = product.ends_of_logs();
        assert!(finished.completed(), "{}\n{logs}", finished.why());
        if to == 1 {
            listen(&stage, &history, (to, ids[to]));
        }
        history.wait_for(before + 60, LIMIT).unwrap();
        assert!(stage.with_bitmap((to, ids[to])).is_empty());
        // There it is a guest like every other one,
        let unlocked = wait_until(LIMIT, || stage.lock(to, ids[to]).is_none());
        assert!(unlocked && stage.runs(to, ids[to]));
        let [first, second] = STORAGES[to];
        for (key, storage) in [("virtio0", first), ("virtio1", second), ("ide2", first)] {
            let value = stage.setting(to, ids[to], key).unwrap();
            assert!(value.starts_with(&format!("{storage}:")), "{key}: {value}");
            assert!(stage.volume(to, ids[to], key).is_file(), "{key}: {value}");
        }
        let drive = stage.setting(to, ids[to], "virtio1").unwrap();
        assert!(drive.ends_with(",discard=on,size=24M"), "{drive}");
        assert_eq!(fs::read(stage.volume(to, ids[to], "ide2")).unwrap(), seed);
        let card = stage.setting(to, ids[to], "net0").unwrap();
        let bridge = BRIDGES[to];
        let expected = format!("virtio=BC:24:11:00:00:01,bridge={bridge},firewall=0");
        assert_eq!(card, expected);
        let firewall = stage.nodes[to].read(&format!("firewall/{}.fw", ids[to]));
        assert_eq!(firewall.as_deref(), Some("[OPTIONS]\n"));
        // and at its source it is stopped, and cannot be started by accident.
        assert!(!stage.runs(from, ids[from]));
        let left = stage.config(from, ids[from]);
        let settings = |text: &str| {
            let lines = text.lines().filter(|line| !line.is_empty());
            let mut lines: Vec<String> = lines.map(str::to_owned).collect();
            lines.sort();
            lines
        };
        let expected = format!("{at_first}\nlock: migrate\n");
        assert_eq!(settings(&left), settings(&expected));
        let id = ids[from].to_string();
        let refused = stage.qm(from, &["start", &id]).unwrap_err();
        assert!(refused.contains("VM is locked (migrate)"), "{refused}");
    }
    history.stop().unwrap();
    stage.qm(0, &["stop", "100"]).unwrap();
    let record = history.finish().unwrap();
    let folder = stage.lab.hosts()[0].folder().join("judged");
    fs::create_dir(&folder).unwrap();
    for (at, disk) in disks.iter().enumerate() {
        let now = stage.volume(0, ID, &format!("virtio{at}"));
        fs::copy(now, folder.join(disk.path.file_name().unwrap())).unwrap();
    }
    let judgement = record.judge(&folder).unwrap();
    assert_eq!(judgement.wrong_sectors, 0, "{:?}", judgement.findings);
    assert_eq!(record.errors, 0);
}

#[test]
fn a_guest_of_version_9_moves_there_and_back() {
    if !installed::is_its_day(1, 2) {
        return;
    }
    there_and_back(Version::Nine);
}

#[test]
fn a_guest_of_version_8_moves_there_and_back() {
    if !installed::is_its_day(0, 2) {
        return;
    }
    there_and_back(Version::Eight);
}

#[test]
fn what_keeps_a_guest_from_moving_is_said_before() {
    let Some(mut stage) = Stage::build("refusals", Version::Nine) else {
        return;
    };
    let product = stage.start_agents(false);
    stage.make_guest("virtio0: local:100/vm-100-disk-0.raw,size=24M\n");
    let disk = stage.volume(0, ID, "virtio0");
    create_volume(&disk, "raw", DISK_BYTES).unwrap();
    stage.start_guest();
    let config = stage.config(0, ID);
    let name = format!("qemu-server/{ID}.conf");
    let plan = ["plan", GUEST, "--to", "paris"];
    for (more, expected) in [
        ("lock: backup\n", "locked (backup)"),
        ("lock: migrate\n", "locked (migrate)"),
        ("hostpci0: 0000:01:00.0\n", "a device of the host"),
        ("args: -S\n", "words for QEMU"),
        (
            "efidisk0: local:100/vm-100-disk-1.raw,other=1\n",
            "has the option other",
        ),
        (
            "scsi3: nowhere:100/vm-100-disk-3.raw\n",
            "no storage nowhere",
        ),
        ("ide0: local:iso/x.iso,media=cdrom\n", "ISO image"),
        ("\n[PENDING]\nmemory: 512\n", "change of `memory`"),
        ("\n[before]\nsnaptime: 1\n", "snapshot before"),
    ] {
        stage.nodes[0]
            .write(&name, &format!("{config}{more}"))
            .unwrap();
        let listed = stage.said(&product, 0, &["guests"]);
        assert!(listed.contains("Proxmox VE"), "{listed}");
        let said = stage.said(&product, 0, &plan);
        assert!(said.contains(expected), "{more}: {said}");
    }
    stage.nodes[0].write(&name, &config).unwrap();
    stage.nodes[0]
        .write("ha/resources.cfg", "vm: 100\n\tstate started\n")
        .unwrap();
    let said = stage.said(&product, 0, &plan);
    assert!(said.contains("HA manager"), "{said}");
    stage.nodes[0].remove("ha/resources.cfg").unwrap();
    let replication = "local: 100-0\n\ttarget other\n";
    stage.nodes[0]
        .write("replication.cfg", replication)
        .unwrap();
    let said = stage.said(&product, 0, &plan);
    assert!(said.contains("replicated"), "{said}");
    stage.nodes[0].remove("replication.cfg").unwrap();
    // What the destination lacks.
    let moves = format!(
        "{config}virtio1: fast:100/vm-100-disk-0.raw,size=24M\n\
         net0: virtio=BC:24:11:00:00:01,bridge=vmbr0\n"
    );
    stage.nodes[0].write(&name, &moves).unwrap();
    let said = stage.said(&product, 0, &plan);
    assert!(said.contains("no bridge vmbr0"), "{said}");
    assert!(said.contains("[proxmox.bridges]"), "{said}");
    let moves = moves.replace("net0:", "#net0:");
    stage.nodes[0].write(&name, &moves).unwrap();
    let said = stage.said(&product, 0, &plan);
    assert!(said.contains("no storage fast"), "{said}");
    assert!(said.contains("[proxmox.storages]"), "{said}");
    stage.nodes[0].write(&name, &config).unwrap();
    let stop = stage.said(&product, 0, &["guests", "stop", GUEST]);
    assert!(stop.contains("qm shutdown"), "{stop}");
    assert_eq!(stage.config(0, ID), config);
    stage.verify();
}

/// What `qm` does not do there leaves the guest running, unlocked, and nothing of it elsewhere.
#[test]
fn a_failed_move_leaves_the_guest_as_it_was() {
    let Some(mut stage) = Stage::build("failures", Version::Nine) else {
        return;
    };
    let product = stage.start_agents(true);
    stage.make_guest("virtio0: local:100/vm-100-disk-0.raw,size=24M\n");
    create_volume(&stage.volume(0, ID, "virtio0"), "raw", DISK_BYTES).unwrap();
    stage.start_guest();
    let config = stage.config(0, ID);
    for (host, fails) in [
        (0, Some("fail-qm-set")),
        (1, Some("fail-qm-start")),
        (1, Some("fail-qm-resume")),
        (0, None),
    ] {
        eprintln!("{fails:?}");
        if let Some(fails) = fails {
            stage.nodes[host].write(fails, "it is a test").unwrap();
        }
        let to = &stage.lab.hosts()[1];
        let slowly: &[&str] = match fails {
            Some(_) => &[],
            None => &["--bandwidth", "4mbit"],
        };
        let mut moving = product.migrate(0, GUEST, to, slowly).unwrap();
        if fails.is_none() {
            let began = moving.wait_for_phase(Phase::Precopy, LIMIT);
            assert!(began, "{}", product.ends_of_logs());
            product.agent(0).unwrap().run(&["cancel", GUEST]).unwrap();
        }
        let finished = moving.finish(LIMIT).unwrap();
        let logs = product.ends_of_logs();
        assert!(!finished.completed(), "{fails:?}\n{logs}");
        if fails.is_some() {
            let why = finished.why();
            assert!(why.contains("it is a test"), "{fails:?}: {why}\n{logs}");
        }
        let as_before = wait_until(LIMIT, || stage.config(0, ID) == config);
        assert!(as_before, "{fails:?}: {}\n{logs}", stage.config(0, ID));
        let gone = wait_until(LIMIT, || stage.nodes[1].config(ID).is_none());
        assert!(gone && !stage.runs(1, ID), "{fails:?}\n{logs}");
        let images = stage.nodes[1].volume("local", "100");
        let empty = wait_until(LIMIT, || {
            fs::read_dir(&images).map_or(true, |mut files| files.next().is_none())
        });
        assert!(empty, "{fails:?}\n{logs}");
        stage.verify();
        if let Some(fails) = fails {
            stage.nodes[host].remove(fails).unwrap();
        }
    }
    // Within a cluster Proxmox VE moves its guests itself.
    let node = "nodes/other/qemu-server";
    let of_another_node = format!("{node}/{ID}.conf");
    stage.nodes[1].make_folder(node).unwrap();
    let file = format!("name: {GUEST}\nlock: migrate\n");
    stage.nodes[1].write(&of_another_node, &file).unwrap();
    let to = &stage.lab.hosts()[1];
    let finished = product.migrate(0, GUEST, to, &[]).unwrap();
    let finished = finished.finish(LIMIT).unwrap();
    assert!(!finished.completed());
    assert!(finished.why().contains("qm migrate"), "{}", finished.why());
    let as_before = wait_until(LIMIT, || stage.config(0, ID) == config);
    assert!(as_before, "{}", stage.config(0, ID));
    stage.nodes[1].remove(&of_another_node).unwrap();
    // A paused guest arrives paused.
    stage.qm(0, &["suspend", "100"]).unwrap();
    let to = &stage.lab.hosts()[1];
    let finished = product.migrate(0, GUEST, to, &[]).unwrap();
    let finished = finished.finish(LIMIT).unwrap();
    let logs = product.ends_of_logs();
    assert!(finished.completed(), "{}\n{logs}", finished.why());
    stage.qm(1, &["resume", "100"]).unwrap();
    stage.hear(1, ID);
    stage.verify();
    // A move back that fails leaves the file that the guest had left, and the guest.
    let left = stage.config(0, ID);
    assert!(left.contains("lock: migrate"), "{left}");
    let there = stage.config(1, ID);
    stage.nodes[0]
        .write("fail-qm-start", "it is a test")
        .unwrap();
    let to = &stage.lab.hosts()[0];
    let finished = product.migrate(1, GUEST, to, &[]).unwrap();
    let finished = finished.finish(LIMIT).unwrap();
    let logs = product.ends_of_logs();
    assert!(!finished.completed(), "{logs}");
    let as_before = wait_until(LIMIT, || {
        stage.config(0, ID) == left && stage.config(1, ID) == there
    });
    assert!(as_before, "{}\n{logs}", stage.config(0, ID));
    stage.verify();
    stage.nodes[0].remove("fail-qm-start").unwrap();
    let back = product
        .migrate(1, GUEST, host_of(&stage, 0), &["--verify"])
        .unwrap();
    let back = back.finish(LIMIT).unwrap();
    let logs = product.ends_of_logs();
    assert!(back.completed(), "{}\n{logs}", back.why());
    stage.verify();
    assert_eq!(stage.config(0, ID), config);
}

/// Points at which one of the agents dies.
const DEATHS: [(usize, &str); 10] = [
    (0, "source:before-record:began"),
    (1, "destination:before-record:began"),
    (0, "source:after-record:began"),
    (0, "source:before-send:complete"),
    (0, "source:after-record:released"),
    (0, "source:after-record:done"),
    (1, "destination:before-send:accepted"),
    (1, "destination:after-record:ready"),
    (1, "destination:after-record:committed"),
    (1, "destination:before-send:committed"),
];

#[test]
fn a_guest_survives_the_death_of_either_agent() {
    let Some(mut stage) = Stage::build("deaths", Version::Nine) else {
        return;
    };
    let mut product = stage.start_agents(true);
    stage.make_guest("virtio0: local:100/vm-100-disk-0.raw,size=24M\n");
    create_volume(&stage.volume(0, ID, "virtio0"), "raw", DISK_BYTES).unwrap();
    stage.start_guest();
    for (side, point) in DEATHS {
        eprintln!("{point}");
        let host = &stage.lab.hosts()[side];
        let armed = format!("{point}=kill");
        let agent = product.agent_mut(side).unwrap();
        agent.restart_to_fail(host, &armed).unwrap();
        let to = &stage.lab.hosts()[1];
        let moving = product.migrate(0, GUEST, to, &[]).unwrap();
        let died = wait_until(LIMIT, || product.agent_mut(side).unwrap().has_ended());
        assert!(died, "{point}: {}", product.ends_of_logs());
        product.agent_mut(side).unwrap().restart(host).unwrap();
        // Where its source has died, nobody reports the end.
        let _ = moving.finish(LIMIT);
        // It runs at one host, unlocked, and does not run at the other.
        let state = |stage: &Stage| {
            let at = |host: usize| (stage.runs(host, ID), stage.lock(host, ID));
            [at(0), at(1)]
        };
        let here = (true, None);
        let left = |it: &(bool, Option<String>)| !it.0 && it.1.as_deref() != Some("backup");
        let settled = wait_until(LIMIT, || {
            let [first, second] = state(&stage);
            first == here && left(&second) || second == here && left(&first)
        });
        let logs = product.ends_of_logs();
        assert!(settled, "{point}: {:?}\n{logs}", state(&stage));
        let at = usize::from(stage.runs(1, ID));
        if at == 1 {
            assert_eq!(stage.lock(0, ID).as_deref(), Some("migrate"), "{point}");
            stage.hear(1, ID);
        } else {
            let gone = wait_until(LIMIT, || {
                let there = stage.nodes[1].config(ID);
                there.is_none() || stage.lock(1, ID).is_some()
            });
            assert!(gone, "{point}\n{logs}");
        }
        stage.verify();
        if at == 1 {
            let back = product.migrate(1, GUEST, host_of(&stage, 0), &[]).unwrap();
            let back = back.finish(LIMIT).unwrap();
            let logs = product.ends_of_logs();
            assert!(back.completed(), "{point}: {}\n{logs}", back.why());
            stage.hear(0, ID);
            stage.verify();
        }
    }
}

fn host_of(stage: &Stage, number: usize) -> &longhaul_lab::lab::Host {
    &stage.lab.hosts()[number]
}
