//! Stands in for Proxmox VE on emulated hosts: its files, and programs under the names of its
//! commands, which start Debian's QEMU with a command line like its own.
//!
//! It was made from the public behaviour of Proxmox VE 8 and 9. It is not Proxmox VE: no cluster
//! file system, no API, no storage plug-ins, and only the commands that a move uses.
//!
//! The files are known by fixed paths, so each host has them in folders of its own, which its
//! agent and its commands see at these paths in mount namespaces.

pub mod commands;
mod machine;
mod storage;

use crate::error::{During, LabError};
use crate::guest::KernelFiles;
use crate::lab::Host;
use crate::process::{own_binary, run};
use serde::{Deserialize, Serialize};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The paths of Proxmox VE, and the folders of a host that are there.
const FOLDERS: [(&str, &str); 2] = [("/etc/pve", "etc"), ("/run/qemu-server", "run")];
/// The volume group of a host's storages of LVM.
const GROUP: &str = "pve-stand-in";
/// The names of the commands.
const COMMANDS: [&str; 4] = ["qm", "pvesm", "pvesh", "pve-bridge"];
/// The file with what the stand-in's QEMUs have beside their configuration.
const SETUP: &str = "stand-in.json";

/// How a version of Proxmox VE writes disks on QEMU's command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Version {
    /// `-drive`, as Proxmox VE 8 does.
    Eight,
    /// `-blockdev` with a throttle filter on top, as Proxmox VE 9 does.
    Nine,
}

/// What the stand-in's QEMUs have beside their configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// How disks are written.
    pub version: Version,
    /// QEMU's program.
    pub qemu: PathBuf,
    /// The version of the machines of guests whose file names none, such as `7.2`.
    pub machine_version: String,
    /// The kernel that the laboratory's guests boot, and its initial RAM file system.
    pub kernel: Option<(PathBuf, PathBuf)>,
    /// The kernel's command line.
    pub command_line: String,
    /// The names of the guests' channels, whose sockets are `/run/qemu-server/VMID.NAME`.
    pub channels: Vec<String>,
}

/// The stand-in of an emulated host.
#[derive(Debug)]
pub struct Proxmox {
    folder: PathBuf,
    node: String,
}

impl Proxmox {
    /// Makes the files of a node that is called as its host is, with these storages of directories.
    ///
    /// # Errors
    /// When the folders cannot be made, or the programs have not been built.
    pub fn make(host: &Host, setup: &Setup, storages: &[&str]) -> Result<Self, LabError> {
        let proxmox = Self {
            folder: host.folder().join("proxmox"),
            node: host.name().to_owned(),
        };
        let etc = proxmox.folder.join("etc");
        let node = etc.join("nodes").join(&proxmox.node);
        for folder in [
            proxmox.folder.join("run"),
            proxmox.folder.join("bin"),
            node.join("qemu-server"),
            node.join("lxc"),
            etc.join("firewall"),
            etc.join("ha"),
        ] {
            fs::create_dir_all(&folder).during(|| format!("make {}", folder.display()))?;
        }
        let link = |to: &Path, from: &Path| {
            symlink(to, from).during(|| format!("make the link {}", from.display()))
        };
        link(&Path::new("nodes").join(&proxmox.node), &etc.join("local"))?;
        link(Path::new("local/qemu-server"), &etc.join("qemu-server"))?;
        let program = own_binary("pve-stand-in")?;
        for command in COMMANDS {
            link(&program, &proxmox.folder.join("bin").join(command))?;
        }
        let mut text = String::new();
        for storage in storages {
            let path = proxmox.storage(storage);
            fs::create_dir_all(path.join("images"))
                .during(|| format!("make {}", path.display()))?;
            text += &format!(
                "dir: {storage}\n\tpath {}\n\tcontent images,iso\n\n",
                path.display()
            );
        }
        proxmox.write("storage.cfg", &text)?;
        let setup = serde_json::to_string(setup).map_err(|error| LabError::Answer {
            what: "the stand-in's setup".to_owned(),
            message: error.to_string(),
        })?;
        proxmox.write(SETUP, &setup)?;
        Ok(proxmox)
    }

    /// Adds a storage of LVM-thin. Its volumes are loop devices.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn add_lvm(&self, storage: &str) -> Result<(), LabError> {
        let folder = self.folder.join(GROUP);
        fs::create_dir_all(&folder).during(|| format!("make {}", folder.display()))?;
        let text = self.read("storage.cfg").unwrap_or_default();
        let own = format!("lvmthin: {storage}\n\tthinpool data\n\tvgname {GROUP}\n");
        self.write(
            "storage.cfg",
            &format!("{text}{own}\tcontent images,rootdir\n\n"),
        )
    }

    /// Returns the path of a volume of LVM, such as `vm-100-disk-0`.
    pub fn logical_volume(&self, name: &str) -> PathBuf {
        self.folder.join(GROUP).join(name)
    }

    /// Returns the kernel of the laboratory's guests, for a setup.
    pub fn kernel(files: &KernelFiles) -> Option<(PathBuf, PathBuf)> {
        Some((files.kernel.clone(), files.initramfs.clone()))
    }

    /// Returns the folder of a storage.
    pub fn storage(&self, name: &str) -> PathBuf {
        self.folder.join("storages").join(name)
    }

    /// Returns the path of a volume, such as `100/vm-100-disk-0.raw`.
    pub fn volume(&self, storage: &str, name: &str) -> PathBuf {
        self.storage(storage).join("images").join(name)
    }

    /// Returns the mounts that a process needs to be on this node.
    pub fn mounts(&self) -> Vec<(PathBuf, PathBuf)> {
        let mut mounts = FOLDERS.to_vec();
        let group = format!("/dev/{GROUP}");
        if self.folder.join(GROUP).is_dir() {
            mounts.push((&group, GROUP));
        }
        let mounts = mounts.into_iter();
        mounts
            .map(|(at, own)| (self.folder.join(own), PathBuf::from(at)))
            .collect()
    }

    /// Returns the folder of its commands.
    pub fn commands(&self) -> PathBuf {
        self.folder.join("bin")
    }

    /// Makes a folder below `/etc/pve`.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn make_folder(&self, name: &str) -> Result<(), LabError> {
        let path = self.folder.join("etc").join(name);
        fs::create_dir_all(&path).during(|| format!("make {}", path.display()))
    }

    /// Writes a file below `/etc/pve`.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, name: &str, text: &str) -> Result<(), LabError> {
        let path = self.folder.join("etc").join(name);
        fs::write(&path, text).during(|| format!("write {}", path.display()))
    }

    /// Removes a file below `/etc/pve`.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove(&self, name: &str) -> Result<(), LabError> {
        let path = self.folder.join("etc").join(name);
        fs::remove_file(&path).during(|| format!("remove {}", path.display()))
    }

    /// Returns a file below `/etc/pve`, if it is there.
    pub fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.folder.join("etc").join(name)).ok()
    }

    /// Returns the file of a guest, if there is one.
    pub fn config(&self, id: u32) -> Option<String> {
        self.read(&format!("qemu-server/{id}.conf"))
    }

    /// Returns the host's end of a channel of a guest.
    pub fn channel(&self, id: u32, name: &str) -> PathBuf {
        self.folder.join("run").join(format!("{id}.{name}"))
    }

    /// Returns a command of the node, such as `qm`.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = entered(&self.mounts(), &self.commands());
        command.args(words);
        command
    }

    /// Runs a command of the node, and returns its output.
    ///
    /// # Errors
    /// When it fails.
    pub fn run(&self, host: &Host, words: &[&str]) -> Result<String, LabError> {
        let mut command = self.command(words);
        command.stdin(std::process::Stdio::null());
        Ok(host.output(&mut command)?.trim().to_owned())
    }
}

impl Drop for Proxmox {
    fn drop(&mut self) {
        // Loop devices outlive their files.
        for entry in fs::read_dir(self.folder.join(GROUP)).into_iter().flatten() {
            let link = entry
                .ok()
                .and_then(|entry| fs::read_link(entry.path()).ok());
            if let Some(device) = link {
                // It is only tidied up.
                let _ = Command::new("losetup").arg("--detach").arg(device).status();
            }
        }
    }
}

/// Returns a command that runs the words after it with mounts and commands of its own.
pub(crate) fn entered(mounts: &[(PathBuf, PathBuf)], commands: &Path) -> Command {
    let mut script = String::from("set -e\n");
    for (from, at) in mounts {
        script += &format!(
            "mkdir -p {at}\nmount --bind '{}' {at}\n",
            from.display(),
            at = at.display()
        );
    }
    script += &format!(
        "PATH='{}':$PATH\nexport PATH\nexec \"$@\"\n",
        commands.display()
    );
    let mut command = Command::new("unshare");
    command.args([
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        &script,
        "sh",
    ]);
    command
}

/// Creates the image of a volume.
///
/// # Errors
/// When its folder cannot be made, or qemu-img fails.
pub fn create_volume(path: &Path, format: &str, bytes: u64) -> Result<(), LabError> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder).during(|| format!("make {}", folder.display()))?;
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", format]).arg(path);
    run(command.arg(bytes.to_string())).map(drop)
}
