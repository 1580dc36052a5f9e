//! Provides a QEMU whose guest dirties memory without a BIOS or a kernel, started in milliseconds.

#![allow(dead_code, reason = "each test file uses what it needs")]

pub(crate) mod source;

use longhaul_hypervisor::Qmp;
use longhaul_hypervisor::memory::GuestMemory;
use longhaul_protocol::BlockRange;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// `crates/qemu-stream/tests/golden/firmware.S`, assembled: at offset 0xf000 of a 64 KiB image.
const CODE: &[u8] = &[
    0xfa, 0x2e, 0x66, 0x0f, 0x01, 0x16, 0xb8, 0xf0, 0x0f, 0x20, 0xc0, 0x0c, 0x01, 0x0f, 0x22, 0xc0,
    0x66, 0xea, 0x18, 0xf0, 0xff, 0xff, 0x08, 0x00, 0x66, 0xb8, 0x10, 0x00, 0x8e, 0xd8, 0x8e, 0xc0,
    0x8b, 0x3d, 0x00, 0xff, 0xff, 0xff, 0x8b, 0x0d, 0x04, 0xff, 0xff, 0xff, 0xc1, 0xe7, 0x0c, 0x89,
    0xf8, 0x85, 0xc9, 0x74, 0x1c, 0x69, 0xc0, 0x0d, 0x66, 0x19, 0x00, 0x05, 0x5f, 0xf3, 0x6e, 0x3c,
    0x89, 0x07, 0x89, 0x87, 0xfc, 0x07, 0x00, 0x00, 0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, 0x49, 0xeb,
    0xe0, 0x8b, 0x0d, 0x0c, 0xff, 0xff, 0xff, 0x85, 0xc9, 0x74, 0x41, 0x8b, 0x35, 0x08, 0xff, 0xff,
    0xff, 0xc1, 0xe6, 0x0c, 0x69, 0xc0, 0x0d, 0x66, 0x19, 0x00, 0x05, 0x5f, 0xf3, 0x6e, 0x3c, 0x89,
    0xc3, 0xf7, 0xe1, 0x89, 0xd8, 0xc1, 0xe2, 0x0c, 0xff, 0x44, 0x16, 0x08, 0x89, 0x84, 0x16, 0xb8,
    0x0b, 0x00, 0x00, 0x8b, 0x15, 0x10, 0xff, 0xff, 0xff, 0x83, 0xea, 0x01, 0x73, 0xfb, 0x0f, 0x20,
    0xc2, 0x81, 0xf2, 0x00, 0x00, 0x01, 0x00, 0x0f, 0x22, 0xc2, 0xeb, 0xc8, 0xf4, 0xeb, 0xfd, 0x90,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0xff, 0xff, 0x00, 0x00, 0x00, 0x9a, 0xcf, 0x00,
    0xff, 0xff, 0x00, 0x00, 0x00, 0x92, 0xcf, 0x00, 0x17, 0x00, 0xa0, 0xf0, 0xff, 0xff, 0x00, 0x00,
    0x00,
];

/// The guest's memory use, in pages of 4 KiB.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Payload {
    /// Pages that are filled once: the first, and their number.
    pub(crate) filled: (u32, u32),
    /// Pages that are written forever, in random order; with none the guest sleeps.
    pub(crate) hot: (u32, u32),
    /// Loops between two writes.
    pub(crate) delay: u32,
}

impl Payload {
    pub(crate) const BUSY: Self = Self {
        filled: (256, 12_000),
        hot: (2000, 3000),
        delay: 500,
    };
    pub(crate) const IDLE: Self = Self {
        filled: (256, 12_000),
        hot: (0, 0),
        delay: 0,
    };

    /// No payload: the machine's own firmware.
    pub(crate) const NONE: Self = Self {
        filled: (0, 0),
        hot: (0, 0),
        delay: 0,
    };

    fn image(self) -> Vec<u8> {
        let mut image = vec![0; 0x10000];
        image[0xf000..0xf000 + CODE.len()].copy_from_slice(CODE);
        let numbers = [
            self.filled.0,
            self.filled.1,
            self.hot.0,
            self.hot.1,
            self.delay,
        ];
        for (place, number) in image[0xff00..].chunks_mut(4).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        image[0xfff0..0xfff3].copy_from_slice(&[0xe9, 0x0d, 0xf0]);
        image
    }
}

/// A guest's machine.
#[derive(Debug, Clone)]
pub(crate) struct Spec {
    pub(crate) emulator: PathBuf,
    pub(crate) machine: String,
    pub(crate) memory: String,
    pub(crate) vcpus: u32,
    pub(crate) payload: Payload,
    pub(crate) more: Vec<String>,
}

impl Spec {
    pub(crate) fn new(emulator: &Path, machine: &str, payload: Payload) -> Self {
        Self {
            emulator: emulator.to_owned(),
            machine: machine.to_owned(),
            memory: "64M".to_owned(),
            vcpus: 1,
            payload,
            more: Vec::new(),
        }
    }
}

/// A running QEMU; dropping the value ends it.
#[derive(Debug)]
pub(crate) struct Qemu {
    pub(crate) qmp: Qmp,
    pub(crate) folder: TempDir,
    child: Child,
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the guest's main memory; a memory backend's block has the path of its object.
pub(crate) fn main_block(memory: &GuestMemory) -> usize {
    let mut blocks = memory.blocks().iter();
    let main = blocks.position(|block| block.name.ends_with("pc.ram"));
    main.unwrap()
}

impl Qemu {
    /// Returns a guest that runs.
    pub(crate) async fn running(spec: &Spec) -> Self {
        let qemu = Self::start(spec, &[]).await;
        if spec.payload.filled.1 > 0 {
            let (first, count) = spec.payload.filled;
            let memory = qemu.memory().await;
            let main = main_block(&memory);
            let last = BlockRange::new(u64::from(first + count - 1), 1);
            qemu.wait("the guest to fill its memory", || {
                let mut page = vec![0; 4096];
                memory.read(main, &[last], &mut page).unwrap();
                page.iter().any(|byte| *byte != 0)
            })
            .await;
        }
        qemu
    }

    /// Returns a QEMU that waits for a guest.
    pub(crate) async fn waiting(spec: &Spec) -> Self {
        Self::start(spec, &["-S", "-incoming", "defer"]).await
    }

    async fn start(spec: &Spec, more: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let bios = folder.path().join("firmware");
        std::fs::write(&bios, spec.payload.image()).unwrap();
        let socket = folder.path().join("qmp");
        let child = Command::new(&spec.emulator)
            .args([
                "-machine",
                &spec.machine,
                "-accel",
                "tcg",
                "-m",
                &spec.memory,
            ])
            .args(["-smp", &spec.vcpus.to_string()])
            .args([
                "-nodefaults",
                "-display",
                "none",
                "-device",
                "virtio-rng-pci",
            ])
            .args(match spec.payload.filled.1 + spec.payload.hot.1 {
                0 => Vec::new(),
                _ => vec!["-bios".into(), bios.into_os_string()],
            })
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", socket.display()))
            .args(&spec.more)
            .args(more)
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let qmp = loop {
            match Qmp::connect(&socket, Duration::from_secs(60)).await {
                Ok(qmp) => break qmp,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        Self { qmp, folder, child }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) async fn memory(&self) -> GuestMemory {
        GuestMemory::attach(&self.qmp, self.pid()).await.unwrap()
    }

    pub(crate) async fn state(&self) -> String {
        let status = self.qmp.query("query-status").await.unwrap();
        status["status"].as_str().unwrap().to_owned()
    }

    /// Returns whether the guest's writes go on.
    pub(crate) async fn is_writing(&self, payload: Payload) -> bool {
        let memory = self.memory().await;
        let main = main_block(&memory);
        let range = [BlockRange::new(
            u64::from(payload.hot.0),
            u64::from(payload.hot.1),
        )];
        let look = || {
            let mut content = vec![0; payload.hot.1 as usize * 4096];
            memory.read(main, &range, &mut content).unwrap();
            content
        };
        let before = look();
        for _ in 0..50 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            if look() != before {
                return true;
            }
        }
        false
    }

    pub(crate) async fn wait(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_so() {
            assert!(Instant::now() < deadline, "waited 60 s for {what}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
