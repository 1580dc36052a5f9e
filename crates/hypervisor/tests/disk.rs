//! The disk front end below a disk that is in use, and out again, with real QEMUs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;
mod disk_load;
#[allow(dead_code, reason = "the smaller part of it is used elsewhere")]
mod payload;

use common::emulators;
use disk_load::{Load, boot_disk};
use longhaul_hypervisor::Qmp;
use longhaul_hypervisor::disk::{DiskNodes, Front, InsertError, RemoveError, insert, remove};
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use longhaul_storage::disk::{ExportSize, ImageLock, ImageUse, RawDisk};
use longhaul_storage::nbd::{Export, ExportName, Limits, Server};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use payload::{Payload, Qemu, Spec};
use serde_json::{Map, Value, json};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const NAME: &str = "5d41402abc4b2a76b9719d911017c592";
/// What says which image the front end shows that is a process of its own.
const IMAGE: &str = "LONGHAUL_TEST_FRONT_END_IMAGE";
const PATIENCE: Duration = Duration::from_secs(60);

/// An image, its nodes, and a front end for it.
struct Setting {
    folder: TempDir,
    image: PathBuf,
    nodes: DiskNodes,
    options: [Value; 2],
    listener: UnixListener,
    front: Front,
}

impl Setting {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        std::fs::write(&image, boot_disk()).unwrap();
        let file = json!({"driver": "file", "node-name": "f0", "filename": image,
            "discard": "unmap", "cache": {"direct": false}});
        let above = json!({"driver": "raw", "node-name": "d0", "file": "f0",
            "discard": "unmap", "detect-zeroes": "unmap"});
        let object = |value: &Value| -> Map<String, Value> { value.as_object().unwrap().clone() };
        let socket = folder.path().join("nbd");
        Self {
            image,
            nodes: DiskNodes::new(object(&above), object(&file)).unwrap(),
            options: [file, above],
            listener: UnixListener::bind(&socket).unwrap(),
            front: Front {
                node: "n0".to_owned(),
                socket,
                export: NAME.to_owned(),
            },
            folder,
        }
    }

    /// A guest that has the disk, whose firmware does nothing with it.
    async fn guest(&self, emulator: &Path, iothread: bool) -> Qemu {
        let mut spec = Spec::new(emulator, "q35", Payload::NONE);
        let mut device = json!({"driver": "virtio-blk-pci", "id": "vda", "drive": "d0"});
        if iothread {
            spec.more
                .extend(["-object", "iothread,id=io0"].map(str::to_owned));
            device["iothread"] = "io0".into();
        }
        for options in &self.options {
            spec.more
                .extend(["-blockdev".to_owned(), options.to_string()]);
        }
        spec.more.extend(["-device".to_owned(), device.to_string()]);
        Qemu::running(&spec).await
    }

    fn disk(&self) -> RawDisk {
        RawDisk::open(&self.image, ExportSize::OfFile).unwrap()
    }

    fn serve(&self) -> Server {
        let name = ExportName::new(NAME.to_owned()).unwrap();
        let disk = Arc::new(self.disk());
        let listener = self.listener.try_clone().unwrap();
        let exports = vec![Export { name, disk }];
        Server::start(listener, exports, Limits::default(), |_| ()).unwrap()
    }
}

/// The block graph and its nodes' options, without ids and what grows by itself.
async fn picture(qmp: &Qmp) -> Vec<String> {
    let graph = qmp.query("x-debug-query-block-graph").await.unwrap();
    let nodes = graph["nodes"].as_array().unwrap();
    let name = |id: &Value| {
        let node = nodes.iter().find(|node| node["id"] == *id).unwrap();
        node["name"].clone()
    };
    let mut lines = Vec::new();
    for mut edge in graph["edges"].as_array().unwrap().clone() {
        for end in ["parent", "child"] {
            edge[end] = name(&edge[end]);
        }
        lines.push(edge.to_string());
    }
    let flat = json!({"flat": true});
    let known = qmp.execute("query-named-block-nodes", flat, COMMAND_TIMEOUT);
    for mut node in known.await.unwrap().as_array().unwrap().clone() {
        node["image"].take();
        lines.push(node.to_string());
    }
    lines.sort();
    lines
}

async fn nobody_is_connected(server: &Server) {
    let until = Instant::now() + PATIENCE;
    while server.connections() > 0 {
        assert!(Instant::now() < until, "QEMU keeps its connection");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn switches_under_load(emulator: &Path, iothread: bool) {
    let setting = Setting::new();
    let qemu = setting.guest(emulator, iothread).await;
    let before = picture(&qemu.qmp).await;
    let load = Load::find(&qemu).await;
    let mut server = setting.serve();
    for round in 0..4 {
        load.goes_on(6).await;
        insert(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        load.goes_on(6).await;
        assert!(
            server.connections() >= 1,
            "the disk is used around the front end"
        );
        if round % 2 == 0 {
            // Cut off in the middle of requests; its socket goes on.
            assert_eq!(server.stop(Duration::ZERO), 0);
            server = setting.serve();
            load.goes_on(6).await;
        }
        remove(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        nobody_is_connected(&server).await;
    }
    load.goes_on(6).await;
    assert_eq!(server.stop(PATIENCE), 0);
    assert_eq!(picture(&qemu.qmp).await, before);
    assert_eq!(qemu.state().await, "running");
    let stopped = qemu.qmp.execute("stop", json!({}), COMMAND_TIMEOUT);
    stopped.await.unwrap();
    load.check(&std::fs::read(&setting.image).unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_under_load_goes_through_the_front_end_and_back() {
    for (_, emulator) in emulators() {
        for iothread in [false, true] {
            switches_under_load(&emulator, iothread).await;
        }
    }
}

/// The front end as a process of its own, on a socket that the test holds.
struct Process(Child);

impl Process {
    fn start(setting: &Setting) -> Self {
        let listener = OwnedFd::from(setting.listener.try_clone().unwrap());
        let mut program = Command::new(std::env::current_exe().unwrap());
        program.args(["--exact", "a_front_end_of_its_own"]);
        let child = program
            .env(IMAGE, &setting.image)
            .stdin(listener)
            .stdout(Stdio::null());
        Self(child.spawn().unwrap())
    }

    /// Stops it, and waits until all of its threads are.
    fn halt(&self) {
        let pid = Pid::from_raw(self.0.id().try_into().unwrap());
        kill(pid, Signal::SIGSTOP).unwrap();
        let halted = waitpid(pid, Some(WaitPidFlag::WUNTRACED)).unwrap();
        assert_eq!(halted, WaitStatus::Stopped(pid, Signal::SIGSTOP));
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// No test, but what [`Process`] runs: it shows an image until it is killed.
#[test]
fn a_front_end_of_its_own() {
    let Some(image) = std::env::var_os(IMAGE) else {
        return;
    };
    let listener = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let disk = RawDisk::open(Path::new(&image), ExportSize::OfFile).unwrap();
    let exports = vec![Export {
        name: ExportName::new(NAME.to_owned()).unwrap(),
        disk: Arc::new(disk),
    }];
    let _server = Server::start(listener.into(), exports, Limits::default(), |_| ()).unwrap();
    loop {
        std::thread::park();
    }
}

#[tokio::test]
async fn a_front_end_that_is_killed_or_hangs_takes_nothing_with_it() {
    for (_, emulator) in emulators() {
        let setting = Setting::new();
        let qemu = setting.guest(&emulator, false).await;
        let load = Load::find(&qemu).await;
        let mut process = Process::start(&setting);
        insert(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        for round in 0..4 {
            load.goes_on(6).await;
            if round % 2 == 1 {
                process.halt();
                let waits = load.rounds();
                tokio::time::sleep(Duration::from_millis(200)).await;
                // The round under way may have had all of its answers.
                assert!(load.rounds() <= waits + 1, "the disk is used elsewhere");
            }
            // It is dead before the next one answers.
            drop(process);
            process = Process::start(&setting);
        }
        load.goes_on(6).await;
        remove(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        drop(process);
        load.goes_on(6).await;
        let stopped = qemu.qmp.execute("stop", json!({}), COMMAND_TIMEOUT);
        stopped.await.unwrap();
        load.check(&std::fs::read(&setting.image).unwrap());
    }
}

#[tokio::test]
async fn what_cannot_be_inserted_leaves_the_guest_as_it_was() {
    for (_, emulator) in emulators() {
        let setting = Setting::new();
        let qemu = setting.guest(&emulator, false).await;
        let before = picture(&qemu.qmp).await;
        let server = setting.serve();
        let mut wrong = setting.front.clone();
        wrong.export = "another name".to_owned();
        let refusal = insert(&qemu.qmp, &setting.nodes, &wrong).await.unwrap_err();
        assert!(matches!(refusal, InsertError::Refused(_)), "{refusal}");
        wrong.socket = setting.folder.path().join("nobody");
        let refusal = insert(&qemu.qmp, &setting.nodes, &wrong).await.unwrap_err();
        assert!(matches!(refusal, InsertError::Refused(_)), "{refusal}");
        // A disk that is smaller than the guest's is not put below it.
        std::fs::write(setting.folder.path().join("small"), [0; 512]).unwrap();
        let small = setting.folder.path().join("small");
        let small = RawDisk::open(&small, ExportSize::OfFile).unwrap();
        let listener = UnixListener::bind(setting.folder.path().join("nbd2")).unwrap();
        let exports = vec![Export {
            name: ExportName::new(NAME.to_owned()).unwrap(),
            disk: Arc::new(small),
        }];
        let small = Server::start(listener, exports, Limits::default(), |_| ()).unwrap();
        let mut front = setting.front.clone();
        front.socket = setting.folder.path().join("nbd2");
        let refusal = insert(&qemu.qmp, &setting.nodes, &front).await.unwrap_err();
        assert!(matches!(refusal, InsertError::Smaller { .. }), "{refusal}");
        assert_eq!(small.stop(PATIENCE), 0);
        assert_eq!(picture(&qemu.qmp).await, before);
        // What is not there is removed already; done twice is done once.
        remove(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        insert(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        insert(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        let mut other = setting.front.clone();
        other.node = "n1".to_owned();
        let refusal = insert(&qemu.qmp, &setting.nodes, &other).await.unwrap_err();
        assert!(matches!(refusal, InsertError::Other(_)), "{refusal}");
        let refusal = remove(&qemu.qmp, &setting.nodes, &other).await.unwrap_err();
        assert!(matches!(refusal, RemoveError::Other(_)), "{refusal}");
        remove(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        remove(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        assert_eq!(picture(&qemu.qmp).await, before);
        drop(server);
    }
}

#[tokio::test]
async fn locks_pass_to_the_front_end_and_back() {
    for (_, emulator) in emulators() {
        let setting = Setting::new();
        let qemu = setting.guest(&emulator, false).await;
        let disk = setting.disk();
        let server = setting.serve();
        let lock = ImageLock::beside(disk.file(), ImageUse::Raw).unwrap();
        lock.check().expect_err("the guest's QEMU holds its own");
        insert(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        lock.check().unwrap();
        let refusal = remove(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap_err();
        assert!(matches!(refusal, RemoveError::Refused(_)), "{refusal}");
        assert!(refusal.to_string().contains("lock"), "{refusal}");
        drop(lock);
        remove(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        ImageLock::alone(disk.file(), ImageUse::Raw).expect_err("the guest's QEMU has them again");
        drop(server);
    }
}
