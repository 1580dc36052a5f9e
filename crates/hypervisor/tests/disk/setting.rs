//! Images, the nodes of a QEMU that uses them, and front ends for them.

use crate::load::boot_disk;
use crate::payload::{Payload, Qemu, Spec};
use longhaul_hypervisor::Qmp;
use longhaul_hypervisor::disk::{DiskNodes, Front};
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use longhaul_storage::disk::{ExportSize, RawDisk};
use longhaul_storage::nbd::{Export, ExportName, Limits, Server};
use serde_json::{Map, Value, json};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub(crate) const NAME: &str = "5d41402abc4b2a76b9719d911017c592";
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// An image, its nodes, and a front end for it.
pub(crate) struct Setting {
    pub(crate) folder: TempDir,
    pub(crate) image: PathBuf,
    pub(crate) nodes: DiskNodes,
    options: [Value; 2],
    pub(crate) listener: UnixListener,
    pub(crate) front: Front,
}

impl Setting {
    pub(crate) fn new() -> Self {
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
    pub(crate) async fn guest(&self, emulator: &Path, iothread: bool) -> Qemu {
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

    pub(crate) fn disk(&self) -> RawDisk {
        RawDisk::open(&self.image, ExportSize::OfFile).unwrap()
    }

    pub(crate) fn serve(&self) -> Server {
        let name = ExportName::new(NAME.to_owned()).unwrap();
        let disk = Arc::new(self.disk());
        let listener = self.listener.try_clone().unwrap();
        let exports = vec![Export { name, disk }];
        Server::start(listener, exports, Limits::default(), |_| ()).unwrap()
    }
}

/// The block graph and its nodes' options, without ids and what grows by itself.
pub(crate) async fn picture(qmp: &Qmp) -> Vec<String> {
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

pub(crate) async fn nobody_is_connected(server: &Server) {
    let until = Instant::now() + PATIENCE;
    while server.connections() > 0 {
        assert!(Instant::now() < until, "QEMU keeps its connection");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
