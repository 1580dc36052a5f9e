//! Provides real QEMUs for the tests, and hosts that offer them.

#![allow(dead_code, reason = "each test file uses what it needs")]

pub(crate) mod script;

use longhaul_hypervisor::Accelerator;
use longhaul_hypervisor::capabilities::Prober;
use longhaul_hypervisor::config::HostConfig;
use longhaul_hypervisor::guest::RecordedGuest;
use longhaul_hypervisor::launch::{Launch, LaunchError, Role};
use longhaul_hypervisor::launcher::Launcher;
use longhaul_hypervisor::{Qmp, tested};
use longhaul_protocol::guest::GuestDescription;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

/// Returns the emulators of this machine, by label: those of the laboratory, else the system's.
pub(crate) fn emulators() -> Vec<(String, PathBuf)> {
    let lab = std::env::var_os("LONGHAUL_LAB_DIR").unwrap_or("/var/lib/longhaul-lab".into());
    let lab = Path::new(&lab).join("qemu");
    let mut found: Vec<(String, PathBuf)> = ["7.2", "10.0", "11.1"]
        .into_iter()
        .map(|label| (label.to_owned(), lab.join(label).join("qemu-system-x86_64")))
        .filter(|(_, path)| path.exists())
        .collect();
    let system = PathBuf::from("/usr/bin/qemu-system-x86_64");
    if found.is_empty() && system.exists() {
        found.push(("system".to_owned(), system));
    }
    assert!(!found.is_empty(), "no QEMU here: scripts/install lab");
    found
}

/// Returns why a guest of one QEMU is known not to be loaded by another.
pub(crate) fn does_not_load(from: &Path, to: &Path) -> Option<String> {
    tested::does_not_load(&version_of(from), &version_of(to))
}

fn version_of(emulator: &Path) -> String {
    let output = Command::new(emulator).arg("--version").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let version = text.strip_prefix("QEMU emulator version ").unwrap();
    version.split_whitespace().next().unwrap().to_owned()
}

/// A host with a state folder of its own.
pub(crate) struct Host {
    pub(crate) config: HostConfig,
    pub(crate) folder: TempDir,
}

impl Host {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        // QEMU may run as another user.
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o711)).unwrap();
        let state = folder.path().join("state");
        let image = folder.path().join("vda.raw");
        std::fs::write(&image, vec![0; 1 << 20]).unwrap();
        let mut text = format!(
            "state = {state:?}\n[networks]\nlab = 'none'\n[images.vda]\npath = {image:?}\n\
             format = 'raw'\ndirect = false\n[qemu]\naccelerator = 'tcg'\ndefault = {:?}\n{}\
             [qemu.emulators]\n",
            emulators()[0].0,
            match nix::unistd::geteuid().is_root() {
                true => "run_as = 'root'\n",
                false => "",
            }
        );
        for (label, path) in emulators() {
            text.push_str(&format!("{label:?} = {path:?}\n"));
        }
        Self {
            config: toml::from_str(&text).unwrap(),
            folder,
        }
    }

    pub(crate) fn state(&self) -> &Path {
        &self.config.state
    }

    pub(crate) fn launcher(&self) -> Launcher {
        let config = Arc::new(self.config.clone());
        Launcher::new(config.clone(), Prober::new(config))
    }

    pub(crate) async fn launch(
        &self,
        description: &GuestDescription,
        emulator: &str,
        role: Role,
    ) -> Result<(RecordedGuest, Qmp), LaunchError> {
        let launch = Launch {
            description,
            role,
            emulator,
            accelerator: Accelerator::Tcg,
            generation: 1,
            bases: &Default::default(),
            sizes: &Default::default(),
        };
        launch.run(&self.config).await
    }
}

/// Returns a guest with one device of each kind, without anything to boot.
pub(crate) fn guest(machine: &str) -> GuestDescription {
    let text = format!(
        r#"
        name = "web-7"
        machine = "{machine}"
        cpu = "qemu64"
        vcpus = 2
        memory_mib = 64
        disks = [{{ name = "vda", image = "vda", shared = true }}]
        nics = [{{ network = "lab", mac = "52:54:00:12:34:56" }}]
        channels = [{{ name = "lab.arena" }}, {{ name = "org.qemu.guest_agent.0" }}]
        "#
    );
    longhaul_hypervisor::description::parse(&text).unwrap()
}

/// The machine types of both families that every emulator here knows.
pub(crate) const MACHINES: [&str; 2] = ["pc-q35-7.2", "pc-i440fx-7.2"];

/// Returns the machine types of both families that a QEMU is tested with. From 11.1 on, one of its
/// own is added, which is held in another way.
pub(crate) fn machines(label: &str) -> [&'static str; 2] {
    match label {
        "11.1" => ["pc-q35-11.1", MACHINES[1]],
        _ => MACHINES,
    }
}

/// Returns whether one of many equal cases is to be tried on an emulator, by the numbers of both.
/// Each case is tried on one emulator; with LONGHAUL_EVERY_CASE=1, on every one.
pub(crate) fn is_tried(case: usize, emulator: usize) -> bool {
    std::env::var_os("LONGHAUL_EVERY_CASE").is_some() || case % emulators().len() == emulator
}
