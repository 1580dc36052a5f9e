//! Tests guests whose own agent freezes their file systems at the moment of a version. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

use longhaul_api::{Replicas, Replications};
use longhaul_lab::arena::Arena;
use longhaul_lab::guest::disks::{LocalDisk, local_disks};
use longhaul_lab::guest::initramfs::FILES_NAME;
use longhaul_lab::guest::{CHANNEL_NAME, KernelFiles, Tiny};
use longhaul_lab::history::task::description;
use longhaul_lab::installed;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::process::{run, wait_until};
use longhaul_lab::product::{Product, Settings, channel_socket};
use longhaul_protocol::guest::Channel;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(300);
const DISK_BYTES: u64 = 32 << 20;
const GUEST: &str = "files";
const AGENT_PORT: &str = "org.qemu.guest_agent.0";
const VERSION: &str = "10.0";
/// Longer than a guest that writes files takes for one.
const SILENCE: Duration = Duration::from_secs(2);

/// A guest that writes files beside its agent, on the first of two hosts.
struct Stage {
    product: Product,
    lab: Lab,
    arena: Arena,
}

impl Stage {
    fn build() -> Option<Self> {
        let there = installed::qemu(VERSION).and_then(|_| installed::guest_agent());
        if let Err(error) = there {
            assert!(!installed::all_required(), "{error}");
            eprintln!("SKIPPED frozen: {error}");
            return None;
        }
        let mut lab = Lab::create(&Plan {
            purpose: "test: frozen file systems".to_owned(),
            hosts: 2,
            link: "100mbit,4ms".parse().unwrap(),
            seed: 1,
        })
        .unwrap();
        let folders: Vec<PathBuf> = lab.hosts().iter().map(|h| h.folder().to_owned()).collect();
        let disks = local_disks(&folders[0], DISK_BYTES, &["raw,writeback".parse().unwrap()]);
        disks[0].create().unwrap();
        run(Command::new("mke2fs")
            .args(["-q", "-t", "ext4"])
            .arg(&disks[0].path))
        .unwrap();
        let files = KernelFiles::make_with_guest_agent(&folders[0]).unwrap();
        let settings = Settings {
            qemus: vec![VERSION.to_owned()],
            accelerator: "tcg".to_owned(),
        };
        let tables = |index: usize| images(&folders[index], &disks[0]);
        let product = Product::start_each_with(&mut lab, &files, &settings, tables).unwrap();
        let mut arena = Arena::new();
        let socket = channel_socket(&lab.hosts()[0], GUEST, CHANNEL_NAME);
        arena.attach(&socket).unwrap();
        let mut tiny = Tiny::calm(GUEST);
        tiny.machine_version = VERSION.to_owned();
        let mut guest = description(&tiny, &disks);
        guest.channels.push(Channel {
            name: AGENT_PORT.to_owned(),
        });
        product.start_guest(&lab, 0, &guest).unwrap();
        arena.wait_for_beat(LIMIT).unwrap();
        arena.start_program(FILES_NAME, LIMIT).unwrap();
        let mut stage = Self {
            product,
            lab,
            arena,
        };
        stage.goes_on();
        Some(stage)
    }

    fn written(&self) -> u64 {
        let beat = self.arena.wait_for_beat(LIMIT).unwrap();
        assert_eq!(beat.errors, 0, "{}", self.product.ends_of_logs());
        beat.work.unwrap_or(0)
    }

    /// Waits until the guest has written some files more.
    fn goes_on(&mut self) {
        let before = self.written();
        let went_on = wait_until(LIMIT, || self.written() > before + 20);
        assert!(went_on, "{}", self.product.ends_of_logs());
    }

    fn folder(&self, host: usize) -> &Path {
        self.lab.hosts()[host].folder()
    }

    /// Runs `longhaul parcel` on the first host, and returns its document.
    fn parcel(&self, words: &[&str]) -> Value {
        let config = self.folder(0).join("agent.toml");
        let mut command = self.product.agent(0).unwrap().command().unwrap();
        command.args(["--json", "parcel", "--config"]).arg(config);
        let said = run(command.args(words)).unwrap();
        serde_json::from_str(&said).unwrap()
    }

    /// Returns whether the file system of an imported or restored image would be repaired when it
    /// is mounted. Whatever the answer, it can be.
    fn needs_recovery(image: &Path) -> bool {
        /// The features of which a driver must know, in the superblock.
        const FEATURES: usize = 1024 + 0x60;
        const RECOVER: u8 = 4;
        let needs = fs::read(image).unwrap()[FEATURES] & RECOVER != 0;
        let check = ["-f", if needs { "-p" } else { "-n" }];
        let mut check_it = Command::new("e2fsck");
        let checked = check_it.args(check).arg(image).output().unwrap();
        // 1: it was repaired.
        let expected: &[i32] = if needs { &[0, 1] } else { &[0] };
        let code = checked.status.code().unwrap();
        assert!(expected.contains(&code), "{checked:?}");
        needs
    }

    /// Imports the last version, and returns whether its file system would be repaired.
    fn imported_needs_recovery(&self) -> bool {
        let (key, into) = (self.folder(0).join("key"), self.folder(0).join("into"));
        let config = self.folder(0).join("agent.toml").display().to_string();
        let agent = self.product.agent(0).unwrap();
        let text = agent.run(&["parcel", "--config", &config, "key", "box"]);
        fs::write(&key, text.unwrap()).unwrap();
        fs::create_dir(&into).unwrap();
        let [key, folder, device] =
            [&key, &into, &self.folder(0).join("usb")].map(|it| it.display().to_string());
        let imported = self.parcel(&["import", "--key-file", &key, "--into", &folder, &device]);
        let described = imported["guests"][0]["description"].as_str().unwrap();
        let described: toml::Table = fs::read_to_string(described).unwrap().parse().unwrap();
        assert_eq!(described["disks"][0]["image"].as_str(), Some("disk0"));
        let image = imported["disks"][0]["path"].as_str().unwrap().to_owned();
        let needs = Self::needs_recovery(Path::new(&image));
        fs::remove_dir_all(&into).unwrap();
        needs
    }

    /// Starts the process that freezes the guest's file system, by hand.
    fn freezes(&self) -> (Child, PathBuf) {
        let note = self.folder(0).join("state/frozen").join(GUEST);
        let mut guard = self.product.agent(0).unwrap().command().unwrap();
        guard.arg("freeze-guard");
        guard.arg(channel_socket(&self.lab.hosts()[0], GUEST, AGENT_PORT));
        guard.arg(&note);
        guard.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut guard = guard.spawn().unwrap();
        let mut line = String::new();
        let says = guard.stdout.as_mut().unwrap();
        BufReader::new(says).read_line(&mut line).unwrap();
        assert_eq!(line, "{\"frozen\":1}\n");
        assert!(note.exists());
        (guard, note)
    }

    fn is_still(&self) -> bool {
        // What was in the page cache may still have been written.
        sleep(SILENCE);
        let before = self.written();
        sleep(SILENCE);
        self.written() == before
    }
}

fn images(folder: &Path, disk: &LocalDisk) -> toml::Table {
    let name = disk.path.file_name().unwrap();
    let mut image = toml::Table::new();
    let path = folder.join(name).display().to_string();
    image.insert("path".to_owned(), path.into());
    image.insert("format".to_owned(), disk.kind.format.name().into());
    let images = toml::Table::from_iter([(disk.image.clone(), image.into())]);
    toml::Table::from_iter([("images".to_owned(), images.into())])
}

#[test]
fn a_guests_agent_freezes_its_file_system_at_the_moment_of_a_version() {
    let Some(mut stage) = Stage::build() else {
        return;
    };
    fs::create_dir(stage.folder(0).join("usb")).unwrap();
    let usb = stage.folder(0).join("usb").display().to_string();
    stage.parcel(&["create", "box", "--to", "paris"]);
    stage.parcel(&["add", "box", &format!("{GUEST}=disk0")]);
    let exported = stage.parcel(&["export", "box", "--device", &usb, "--limit", "200MiB"]);
    let guest = &exported["guests"][0];
    assert_eq!(
        (&guest["consistent"], &guest["frozen"]),
        (&true.into(), &true.into()),
        "{exported}"
    );
    assert!(!stage.imported_needs_recovery());
    stage.goes_on();
    // Without freezing it is as after a power cut: the journal is replayed.
    let topped_up = stage.parcel(&["top-up", "box", "--no-freeze"]);
    let guest = &topped_up["guests"][0];
    assert_eq!(
        (&guest["consistent"], &guest["frozen"]),
        (&true.into(), &false.into()),
        "{topped_up}"
    );
    assert!(stage.imported_needs_recovery());
    stage.goes_on();

    // The program that asked ends: it is thawed.
    let (mut guard, note) = stage.freezes();
    assert!(stage.is_still());
    drop(guard.stdin.take());
    assert!(guard.wait().unwrap().success());
    assert!(!note.exists());
    stage.goes_on();
    // Nobody says anything: it is thawed too.
    let (mut guard, _) = stage.freezes();
    let asks = guard.stdin.take();
    assert!(guard.wait().unwrap().success());
    drop(asks);
    stage.goes_on();
    // The process that would thaw it is killed: the next agent does.
    let (mut guard, note) = stage.freezes();
    guard.kill().unwrap();
    guard.wait().unwrap();
    assert!(stage.is_still());
    let host = &stage.lab.hosts()[0];
    stage.product.agent_mut(0).unwrap().restart(host).unwrap();
    stage.goes_on();
    assert!(wait_until(LIMIT, || !note.exists()));

    let paris = stage.lab.hosts()[1].name().to_owned();
    let words = ["replicate", GUEST, "--to", &paris, "--every", "10s"];
    let _: Value = stage.product.ask(0, &words).unwrap();
    let frozen = wait_until(LIMIT, || {
        let all: Replications = stage.product.ask(0, &["replicate"]).unwrap();
        all.replications[0].last.is_some_and(|last| last.frozen)
    });
    assert!(frozen, "{}", stage.product.ends_of_logs());
    let kept: Replicas = stage.product.ask(1, &["replicas"]).unwrap();
    let newest = kept.replicas[0].versions.last().unwrap();
    assert!(newest.frozen, "{kept:?}");
    stage.goes_on();
}
