//! Provides images, the nodes of a QEMU that uses them, and disk exports for them.

use crate::load::boot_disk;
use crate::payload::{Payload, Qemu, Spec};
use longhaul_hypervisor::disk::{DiskNodes, Front, device_of, find};
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use longhaul_storage::disk::{ExportSize, RawDisk};
use longhaul_storage::nbd::{Export, ExportName, Limits, Server};
use serde_json::{Map, Value, json};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub(crate) const NAME: &str = "5d41402abc4b2a76b9719d911017c592";
/// The guest's disk in QEMU's object tree.
pub(crate) const DEVICE: &str = "/machine/peripheral/vda/virtio-backend";
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// An image, its nodes, and a disk export for it.
pub(crate) struct Setting {
    pub(crate) folder: TempDir,
    pub(crate) image: PathBuf,
    pub(crate) nodes: DiskNodes,
    pub(crate) size: ExportSize,
    options: Vec<Value>,
    /// The node that the guest's device uses.
    drive: &'static str,
    pub(crate) listener: UnixListener,
    pub(crate) front: Front,
}

fn raw_image(image: &Path, _: &Path) {
    std::fs::write(image, boot_disk()).unwrap();
}

fn qcow2_image(image: &Path, base: &Path) {
    let raw = base.with_extension("raw");
    std::fs::write(&raw, boot_disk()).unwrap();
    let [raw, base, image] = [&raw, base, image].map(|path| path.to_str().unwrap());
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", raw, base]);
    let small = "cluster_size=4k";
    qemu_img(&[
        "create", "-f", "qcow2", "-o", small, "-b", base, "-F", "qcow2", image,
    ]);
}

fn object(value: &Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

pub(crate) fn qemu_img(arguments: &[&str]) -> String {
    let output = Command::new("qemu-img").args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

impl Setting {
    /// Returns a raw disk with a format node.
    pub(crate) fn new() -> Self {
        let above = json!({"driver": "raw", "node-name": "d0", "file": "f0",
            "discard": "unmap", "detect-zeroes": "unmap"});
        Self::of(&raw_image, vec![above])
    }

    /// Returns a raw disk without a format node.
    pub(crate) fn direct() -> Self {
        Self::of(&raw_image, Vec::new())
    }

    /// Returns a qcow2 overlay on another one: its clusters are small, so that it grows with most
    /// writes. `named`: whether the nodes of the backing image are named, or opened by QEMU.
    pub(crate) fn qcow2(named: bool) -> Self {
        let mut above = json!({"driver": "qcow2", "node-name": "d0", "file": "f0",
            "discard": "unmap", "l2-cache-size": 65536, "cache-clean-interval": 0});
        let mut options = Vec::new();
        if named {
            above["backing"] = "b0".into();
            options.push(
                json!({"driver": "qcow2", "node-name": "b0", "read-only": true,
                "file": {"driver": "file", "filename": "BASE"}}),
            );
        }
        options.push(above);
        Self::of(&qcow2_image, options)
    }

    /// Returns a raw disk with a format node, on a block device.
    pub(crate) fn on_device(device: &Path) -> Self {
        std::fs::write(device, boot_disk()).unwrap();
        let above = json!({"driver": "raw", "node-name": "d0", "file": "f0"});
        let image = device.to_owned();
        Self::made(
            tempfile::tempdir().unwrap(),
            image,
            "host_device",
            vec![above],
        )
    }

    fn of(make: &dyn Fn(&Path, &Path), above: Vec<Value>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        make(&image, &folder.path().join("base"));
        Self::made(folder, image, "file", above)
    }

    fn made(folder: TempDir, image: PathBuf, driver: &str, mut above: Vec<Value>) -> Self {
        let base = folder.path().join("base");
        let file = json!({"driver": driver, "node-name": "f0", "filename": image,
            "discard": "unmap", "cache": {"direct": false}});
        let (nodes, drive) = match above.last() {
            Some(format) => (DiskNodes::new(object(format), object(&file)), "d0"),
            None => (DiskNodes::direct(DEVICE.to_owned(), object(&file)), "f0"),
        };
        for node in &mut above {
            if node["file"].is_object() {
                node["file"]["filename"] = json!(base);
            }
        }
        let grows = base.exists();
        let socket = folder.path().join("nbd");
        above.insert(0, file);
        Self {
            image,
            nodes: nodes.unwrap(),
            size: if grows {
                ExportSize::Bytes(1 << 60)
            } else {
                ExportSize::OfFile
            },
            options: above,
            drive,
            listener: UnixListener::bind(&socket).unwrap(),
            front: Front {
                node: "n0".to_owned(),
                socket,
                export: NAME.to_owned(),
            },
            folder,
        }
    }

    /// Returns the disk's content as the guest sees it. The guest must be idle.
    pub(crate) fn content(&self) -> Vec<u8> {
        let raw = self.folder.path().join("content");
        let (image, to) = (self.image.to_str().unwrap(), raw.to_str().unwrap());
        qemu_img(&["convert", "-U", "-f", self.format(), "-O", "raw", image, to]);
        std::fs::read(raw).unwrap()
    }

    /// Returns the format of the image.
    pub(crate) fn format(&self) -> &'static str {
        match self.size {
            ExportSize::OfFile => "raw",
            ExportSize::Bytes(_) => "qcow2",
        }
    }

    /// Returns the node that the guest's device uses while the disk export is in place.
    pub(crate) fn top(&self) -> &str {
        match self.drive {
            "f0" => "n0-raw",
            format => format,
        }
    }

    /// Returns a guest with the disk, whose firmware does not use it.
    pub(crate) async fn guest(&self, emulator: &Path, iothread: bool) -> Qemu {
        let qemu = Qemu::running(&self.spec(emulator, iothread)).await;
        let found = find(&qemu.qmp, qemu.pid(), DEVICE).await.unwrap();
        assert_eq!(found, self.nodes);
        qemu
    }

    /// Returns a disk that is to be given in some other form: raw, or qcow2 that grows.
    pub(crate) fn plain(qcow2: bool) -> Self {
        let mut setting = Self::of(&raw_image, Vec::new());
        if qcow2 {
            let raw = setting.folder.path().join("raw");
            std::fs::rename(&setting.image, &raw).unwrap();
            let [raw, image] = [&raw, &setting.image].map(|path| path.to_str().unwrap());
            let small = "cluster_size=4k";
            qemu_img(&[
                "convert", "-f", "raw", "-O", "qcow2", "-o", small, raw, image,
            ]);
            setting.size = ExportSize::Bytes(1 << 60);
        }
        setting
    }

    /// Starts a guest whose command line gives the disk in that form.
    pub(crate) async fn given(&self, emulator: &Path, machine: &str, words: &[String]) -> Qemu {
        let mut spec = Spec::new(emulator, machine, Payload::NONE);
        spec.more = words.to_vec();
        Qemu::running(&spec).await
    }

    /// Finds the nodes of the disk as its QEMU has it now.
    pub(crate) async fn find(&mut self, qemu: &Qemu) {
        let device = device_of(&qemu.qmp, qemu.pid(), &self.image).await.unwrap();
        self.nodes = find(&qemu.qmp, qemu.pid(), &device).await.unwrap();
    }

    /// Returns the same guest, to arrive by migration or to be started.
    pub(crate) fn spec(&self, emulator: &Path, iothread: bool) -> Spec {
        let mut spec = Spec::new(emulator, "q35", Payload::NONE);
        let mut device = json!({"driver": "virtio-blk-pci", "id": "vda", "drive": self.drive});
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
        spec
    }

    /// Returns the same guest, whose disk is created on the disk export.
    pub(crate) fn spec_through_the_front_end(&self, emulator: &Path, iothread: bool) -> Spec {
        let mut spec = self.spec(emulator, iothread);
        let file = self.options[0].to_string();
        let front = json!({"driver": "nbd", "node-name": "n0", "export": NAME, "discard": "unmap",
            "server": {"type": "unix", "path": self.front.socket}, "reconnect-delay": 3600});
        for option in &mut spec.more {
            if *option == file {
                *option = front.to_string();
            }
            *option = option.replace("\"file\":\"f0\"", "\"file\":\"n0\"");
        }
        spec
    }

    /// Copies another image's content.
    pub(crate) fn take_content(&self, other: &Self) {
        let content = std::fs::read(&other.image).unwrap();
        let image = std::fs::OpenOptions::new().write(true).open(&self.image);
        let image = image.unwrap();
        image.write_all_at(&content, 0).unwrap();
    }

    pub(crate) fn disk(&self) -> RawDisk {
        RawDisk::open(&self.image, self.size).unwrap()
    }

    pub(crate) fn serve(&self) -> Server {
        let name = ExportName::new(NAME.to_owned()).unwrap();
        let disk = Arc::new(self.disk());
        let listener = self.listener.try_clone().unwrap();
        let exports = vec![Export { name, disk }];
        Server::start(listener, exports, Limits::default(), |_| ()).unwrap()
    }
}

/// Asserts equality and prints the differences.
pub(crate) fn assert_same(before: &[String], after: &[String]) {
    let only = |these: &[String], those: &[String]| -> Vec<String> {
        let these = these.iter().filter(|line| !those.contains(line));
        these.cloned().collect()
    };
    let (gone, new) = (only(before, after), only(after, before));
    assert!(before == after, "gone: {gone:#?}\nnew: {new:#?}");
}

/// Returns the same as [`exact_picture`], without the random names of nodes.
pub(crate) async fn picture(qemu: &Qemu) -> Vec<String> {
    let mut lines = exact_picture(qemu).await;
    for line in &mut lines {
        while let Some(at) = line.find("#block") {
            let digits = line[at + 6..].find(|c: char| !c.is_ascii_digit()).unwrap();
            line.replace_range(at..at + 6 + digits, "unnamed");
        }
    }
    lines.sort();
    lines
}

/// Returns a QEMU's whole disk state: the block graph, the options of its nodes, and the open files
/// with their modes and locks; without numbers, and without values that grow by themselves.
pub(crate) async fn exact_picture(qemu: &Qemu) -> Vec<String> {
    let graph = qemu.qmp.query("x-debug-query-block-graph").await.unwrap();
    let nodes = graph["nodes"].as_array().unwrap();
    let name = |id: &Value| {
        let node = nodes.iter().find(|node| node["id"] == *id).unwrap();
        node["name"].clone()
    };
    let mut lines = open_files(qemu.pid());
    for mut edge in graph["edges"].as_array().unwrap().clone() {
        for end in ["parent", "child"] {
            edge[end] = name(&edge[end]);
        }
        lines.push(edge.to_string());
    }
    let flat = json!({"flat": true});
    let command = "query-named-block-nodes";
    let known = qemu.qmp.execute(command, flat, COMMAND_TIMEOUT);
    for mut node in known.await.unwrap().as_array().unwrap().clone() {
        node["image"].take();
        // QEMU lists them in the order of their creation.
        if let Some(children) = node["children"].as_array_mut() {
            children.sort_by_key(ToString::to_string);
        }
        for bitmap in node["dirty-bitmaps"].as_array_mut().into_iter().flatten() {
            bitmap["count"].take();
        }
        lines.push(node.to_string());
    }
    lines.sort();
    lines
}

fn open_files(pid: i32) -> Vec<String> {
    let mut lines = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let entry = entry.unwrap();
        // The file was closed meanwhile.
        let Ok(file) = std::fs::read_link(entry.path()) else {
            continue;
        };
        let file = file.display().to_string();
        if file.starts_with("socket:") {
            lines.push("a socket".to_owned());
        } else if file.starts_with('/') && !file.starts_with("/sys/") {
            // QEMU's C library looks there for the processors, at any time.
            let fd = entry.file_name().into_string().unwrap();
            let info = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).unwrap();
            let flags = info.lines().filter(|line| line.starts_with("flags:"));
            // lock: NUMBER: OFDLCK ADVISORY READ -1 DEVICE FROM TO
            let locks = info.lines().filter(|line| line.starts_with("lock:"));
            let locks = locks.map(|line| line.split_whitespace().skip(2).collect::<Vec<_>>());
            let mut locks: Vec<String> = locks.map(|words| words.join(" ")).collect();
            locks.sort();
            let flags: Vec<&str> = flags.collect();
            lines.push(format!("{file} {flags:?} {locks:?}"));
        }
    }
    lines
}

pub(crate) async fn nobody_is_connected(server: &Server) {
    let until = Instant::now() + PATIENCE;
    while server.connections() > 0 {
        assert!(Instant::now() < until, "QEMU keeps its connection");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
