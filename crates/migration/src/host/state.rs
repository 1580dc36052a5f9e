//! The agent's state folder and its lock, and the state that the agent's parts share.

use crate::host::config::Config;
use crate::host::content_index::Held;
use crate::host::memory_cache::KeptMemory;
use crate::host::start_error::StartError;
use longhaul_hypervisor::capabilities::Prober;
use longhaul_hypervisor::launcher::Launcher;
use longhaul_hypervisor::manager::GuestManager;
use longhaul_hypervisor::managers::Managers;
use longhaul_libvirt::manager::Libvirt;
use longhaul_protocol::guest::Manager;
use longhaul_proxmox::manager::Proxmox;
use longhaul_storage::files::{RealFiles, create_folder};
use longhaul_transport::{Identity, TRUST_FILE, TrustStore};
use nix::fcntl::{Flock, FlockArg};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

/// The file in the state folder that a running agent keeps locked.
const LOCK_FILE: &str = "agent.lock";

/// The state that an agent's parts share.
#[derive(Clone)]
pub struct Parts {
    /// The agent's configuration.
    pub config: Arc<Config>,
    /// The identity of this host.
    pub identity: Identity,
    /// The hosts that it trusts.
    pub trust: TrustStore,
    /// The prober of its QEMUs' capabilities.
    pub prober: Prober,
    /// The launcher of its guests.
    pub launcher: Launcher,
    /// The managers of the guests that migrate: the launcher, libvirt, and Proxmox VE.
    pub guests: Arc<dyn GuestManager>,
    /// The networks of this host's realm.
    pub networks: longhaul_network::networks::Slot,
    /// The content index, if configured.
    pub held: Option<Arc<Held>>,
    /// The memory cache, if configured.
    pub(crate) kept_memory: Option<Arc<KeptMemory>>,
}

impl Parts {
    /// Opens the parts in the state folder.
    pub fn open(config: Arc<Config>) -> Result<Self, StartError> {
        let identity = Identity::load_or_create(&config.state).map_err(|error| {
            StartError::new(format!("this host's identity cannot be used: {error}"))
        })?;
        let trust = TrustStore::open(&config.state.join(TRUST_FILE)).map_err(|error| {
            StartError::new(format!("the trusted hosts cannot be read: {error}"))
                .hint("correct the file, or move it away and trust the hosts again")
        })?;
        let prober = Prober::new(config.hypervisor.clone());
        let launcher = Launcher::new(config.hypervisor.clone(), prober.clone());
        let hypervisor = config.hypervisor.clone();
        let mut others: Vec<(Manager, Arc<dyn GuestManager>)> = Vec::new();
        if hypervisor.libvirt.enabled {
            let socket = hypervisor.libvirt.socket.clone();
            let libvirt = Libvirt::new(hypervisor, socket);
            others.push((Manager::Libvirt, Arc::new(libvirt)));
        }
        if config.hypervisor.proxmox.enabled {
            let proxmox = Proxmox::new(config.hypervisor.clone());
            others.push((Manager::Proxmox, Arc::new(proxmox)));
        }
        let managers = Managers::new(launcher.clone(), others);
        let held = Held::start(config.content.as_ref(), &config.state, &config.hypervisor)?;
        let kept_memory = KeptMemory::open(config.kept_memory.as_ref(), &config.state)?;
        Ok(Self {
            held,
            kept_memory,
            networks: longhaul_network::networks::Slot::default(),
            config,
            identity,
            trust,
            prober,
            guests: Arc::new(managers),
            launcher,
        })
    }
}

/// Locks the state folder for one agent. The kernel releases the lock when the agent ends.
pub struct StateLock {
    _file: Flock<File>,
}

impl StateLock {
    /// Locks the folder. Creates it if it does not exist.
    pub fn take(folder: &Path) -> Result<Self, StartError> {
        let error = |what: &dyn std::fmt::Display| {
            StartError::new(format!(
                "cannot use the state folder {}: {what}",
                folder.display()
            ))
        };
        create_folder(&RealFiles, folder).map_err(|other| {
            error(&other).hint("run the agent as root, or name another folder: `state = ...`")
        })?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(folder.join(LOCK_FILE))
            .map_err(|other| {
                error(&other).hint("run the agent as root, or name another folder: `state = ...`")
            })?;
        let mut file =
            Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(mut file, other)| {
                match other {
                    nix::errno::Errno::EWOULDBLOCK => {
                        let holder = read_holder(&mut file);
                        error(&format!("another agent uses it{holder}")).hint(
                        "two agents on one host need `state`, `listen` and `api.socket` of their \
                         own",
                    )
                    }
                    other => error(&other),
                }
            })?;
        // The process id is for operators only.
        let note = file
            .set_len(0)
            .and_then(|()| writeln!(file, "{}", std::process::id()));
        note.map_err(|other| error(&other))?;
        Ok(Self { _file: file })
    }
}

fn read_holder(file: &mut File) -> String {
    use std::io::Read;
    let mut text = String::new();
    match file.take(20).read_to_string(&mut text) {
        Ok(_) if !text.trim().is_empty() => format!(" (pid {})", text.trim()),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_agents_cannot_share_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("new/state");
        let first = StateLock::take(&folder).unwrap();
        let Err(error) = StateLock::take(&folder) else {
            panic!("the second agent got the folder as well");
        };
        let pid = std::process::id();
        assert!(error.message.contains(&format!("pid {pid}")), "{error}");
        drop(first);
        assert!(StateLock::take(&folder).is_ok());
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let Err(error) = StateLock::take(Path::new("/proc/nothing/here")) else {
            panic!("a folder was made in /proc");
        };
        assert!(error.message.contains("/proc/nothing/here"));
        assert!(error.hint.is_some());
    }
}
