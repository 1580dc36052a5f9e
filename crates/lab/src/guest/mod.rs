//! Builds the laboratory's own guests, and the files that they boot from.

pub mod cpio;
pub mod disks;
pub mod initramfs;
pub mod network;

use crate::error::{During, LabError};
use crate::installed;
use crate::process::run;
use longhaul_protocol::guest::{Channel, Disk, GuestDescription, Kernel, Nic};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// The name of the kernel that `tiny` guests boot, in each host's configuration.
pub const KERNEL_NAME: &str = "tiny";
/// The name of the arena's channel.
pub const CHANNEL_NAME: &str = "arena";

/// The chipset of a guest's machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Chipset {
    /// PCI Express.
    Q35,
    /// The older PC.
    Pc,
}

impl Chipset {
    /// Returns the chipset that `--machine` names.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "q35" => Some(Self::Q35),
            "pc" => Some(Self::Pc),
            _ => None,
        }
    }

    /// Returns the machine type of this chipset in a QEMU version such as `7.2`.
    pub fn machine_type(self, version: &str) -> String {
        match self {
            Self::Q35 => format!("pc-q35-{version}"),
            Self::Pc => format!("pc-i440fx-{version}"),
        }
    }
}

/// A guest whose user space is only the arena: up in seconds without KVM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tiny {
    /// The guest's name.
    pub name: String,
    /// Its machine's chipset.
    pub chipset: Chipset,
    /// The QEMU version of its machine, such as `7.2`.
    pub machine_version: String,
    /// Number of virtual CPUs.
    pub vcpus: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// The image of its disk, if it has one, in each host's configuration; on shared storage.
    pub disk: Option<String>,
    /// The interval of heartbeats in milliseconds. Each costs a guest under TCG so much that an
    /// idle one takes a fifth of a processor at 5 ms.
    pub beat_ms: u64,
    /// Whether it has a card on the network of guests and clients, and serves clients there.
    pub serves_clients: bool,
    /// A server that it calls through a gateway of that network: `GATEWAY,ADDRESS:PORT`.
    pub calls: Option<String>,
}

impl Tiny {
    /// Creates a guest of the smallest size that can be moved.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            chipset: Chipset::Q35,
            machine_version: "7.2".to_owned(),
            vcpus: 1,
            memory_mib: 128,
            disk: None,
            beat_ms: 5,
            serves_clients: false,
            calls: None,
        }
    }

    /// Returns the same guest with fewer heartbeats, which show where it runs, and not its exact
    /// downtime.
    pub fn calm(name: &str) -> Self {
        Self {
            beat_ms: 50,
            ..Self::new(name)
        }
    }

    /// Returns the guest's description, valid on every host.
    pub fn description(&self) -> GuestDescription {
        let disk = |image: &String| Disk {
            name: "vda".to_owned(),
            image: image.clone(),
            shared: true,
            read_only: false,
        };
        let disks = self.disk.iter().map(disk).collect();
        // With them a boot under TCG takes a tenth longer.
        let spared = "cryptomgr.notests";
        let mut command_line = format!(
            "console=ttyS0 quiet panic=-1 {spared} -- --beat-ms {}",
            self.beat_ms
        );
        let mut nics = Vec::new();
        if self.serves_clients {
            command_line.push_str(&format!(" --address {}", network::GUEST_ADDRESS));
            if let Some(calls) = &self.calls {
                command_line.push_str(&format!(" --calls {calls}"));
            }
            nics.push(Nic {
                network: network::NETWORK.to_owned(),
                mac: network::GUEST_MAC.to_owned(),
                port: None,
            });
        }
        GuestDescription {
            name: self.name.clone(),
            machine: self.chipset.machine_type(&self.machine_version),
            cpu: "qemu64".to_owned(),
            vcpus: self.vcpus,
            memory_mib: self.memory_mib,
            firmware: None,
            kernel: Some(Kernel {
                name: KERNEL_NAME.to_owned(),
                command_line,
            }),
            disks,
            nics,
            channels: vec![Channel {
                name: CHANNEL_NAME.to_owned(),
            }],
            hardware: None,
        }
    }
}

/// The files that `tiny` guests boot from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelFiles {
    /// The kernel.
    pub kernel: PathBuf,
    /// The initial RAM file system, with the arena in it.
    pub initramfs: PathBuf,
}

impl KernelFiles {
    /// As [`Self::make`], for guests that can run histories on their disks. Other guests are spared
    /// the program's memory.
    ///
    /// # Errors
    /// As there.
    pub fn make_with_history(folder: &Path) -> Result<Self, LabError> {
        let workloads = [(initramfs::HISTORY_NAME, initramfs::HISTORY)];
        Self::write(folder, "tiny-history.initramfs", &workloads, &[])
    }

    /// As [`Self::make`], for guests that write files beside QEMU's guest agent.
    ///
    /// # Errors
    /// As there, and when the agent is not there.
    pub fn make_with_guest_agent(folder: &Path) -> Result<Self, LabError> {
        let agent = installed::guest_agent()?;
        let mut files = vec![(PathBuf::from("/usr/sbin/qemu-ga"), agent.clone())];
        let libraries = run(Command::new("ldd").arg(&agent))?;
        let libraries = libraries
            .split_whitespace()
            .filter(|it| it.starts_with('/'));
        files.extend(libraries.map(|library| (library.into(), library.into())));
        let workloads = [(initramfs::FILES_NAME, initramfs::FILES)];
        Self::write(folder, "tiny-files.initramfs", &workloads, &files)
    }

    /// Builds the initial RAM file system for the kernel that `scripts/install lab` unpacked, in
    /// `folder`.
    ///
    /// # Errors
    /// When the kernel is not there, or the folder cannot be written.
    pub fn make(folder: &Path) -> Result<Self, LabError> {
        Self::write(folder, "tiny.initramfs", &[], &[])
    }

    fn write(
        folder: &Path,
        name: &str,
        workloads: &[(&str, &[u8])],
        files: &[(PathBuf, PathBuf)],
    ) -> Result<Self, LabError> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let kernel_folder = installed::kernel()?;
        let archive = initramfs::build(&kernel_folder.join("modules"), workloads, files).map_err(
            |error| LabError::Missing {
                what: format!("a kernel for the guests ({error})"),
                hint: "sudo scripts/install lab".to_owned(),
            },
        )?;
        let initramfs = folder.join(name);
        // Two laboratories may write at the same time: each sees a complete file.
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let new = folder.join(format!("{name}.{}.{number}", std::process::id()));
        fs::write(&new, archive).during(|| format!("write {}", new.display()))?;
        fs::rename(&new, &initramfs).during(|| format!("write {}", initramfs.display()))?;
        Ok(Self {
            kernel: kernel_folder.join("vmlinuz"),
            initramfs,
        })
    }
}
