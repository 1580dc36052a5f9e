//! Records the laboratories of this machine: a folder for each, locked by its owner for as long as
//! the owner lives, so that remains of a crashed owner are distinguished from laboratories in use.
//!
//! ```text
//! /run/longhaul-lab/lock           held while a laboratory is entered or leftovers are claimed
//! /run/longhaul-lab/ID/lock        held by the owner; free means that the owner is dead
//! /run/longhaul-lab/ID/lab.json    the things to remove: namespaces, folders (a `Record`)
//! /run/longhaul-lab/ID/*.sock      the links' and agents' sockets
//! /run/longhaul-lab/accelerator    `kvm` or `tcg`, as an agent has found it
//! ```

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::error::{During, LabError};
use crate::mounts;
use crate::netns::Namespace;
use crate::process::{self, ProcessId};

/// The environment variable that identifies every process of a laboratory.
pub const LAB_VARIABLE: &str = "LONGHAUL_LAB";

/// The data of a laboratory on disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// Its name: six characters.
    pub id: String,
    /// Its purpose.
    pub purpose: String,
    /// The process that owns it.
    pub owner: Option<ProcessId>,
    /// Its time of creation, in seconds since 1970.
    pub created_unix_s: u64,
    /// The folder of its hosts' state; removed with it.
    pub data: PathBuf,
    /// Its hosts.
    pub hosts: Vec<HostRecord>,
    /// Its links.
    pub links: Vec<LinkRecord>,
    /// The network namespace of guests' clients, where there are any.
    #[serde(default)]
    pub clients: Option<String>,
    /// The network namespaces of routers and of the Internet, where there are any.
    #[serde(default)]
    pub routers: Vec<String>,
    /// What the hosts reach, as measured: a line each.
    #[serde(default)]
    pub reach: Vec<String>,
}

impl Record {
    /// Returns all network namespaces to be removed.
    fn namespaces(&self) -> Vec<String> {
        let hosts = self.hosts.iter().map(|host| host.namespace.clone());
        let others = self.clients.iter().chain(&self.routers).cloned();
        hosts.chain(others).collect()
    }
}

/// A host in a [`Record`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HostRecord {
    /// Its name.
    pub name: String,
    /// Its network namespace.
    pub namespace: String,
    /// Its address.
    pub address: String,
    /// How it is attached to the Internet, if there is one.
    #[serde(default)]
    pub place: Option<String>,
    /// Its agent's socket, if there is an agent.
    pub api: Option<PathBuf>,
    /// The guest that was started on it, if there is one.
    #[serde(default)]
    pub guest: Option<String>,
}

/// A link in a [`Record`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LinkRecord {
    /// The two hosts that it joins.
    pub between: [String; 2],
    /// The requested specification.
    pub asked: String,
    /// The socket of its emulator.
    pub control: PathBuf,
}

/// The registry of this machine, or another folder in tests.
#[derive(Debug, Clone)]
pub struct Registry {
    folder: PathBuf,
    data: PathBuf,
}

/// A laboratory's entry in the registry, held by its owner.
#[derive(Debug)]
pub struct Claim {
    folder: PathBuf,
    /// The owner's lock; the system releases it when the owner dies.
    _lock: Flock<File>,
    /// The data on disk.
    pub record: Record,
}

/// A laboratory found in the registry.
#[derive(Debug)]
pub struct Found {
    /// The data on disk; `None` when its owner died before writing it.
    pub record: Option<Record>,
    /// Its name.
    pub id: String,
    /// Whether its owner lives.
    pub in_use: bool,
}

impl Registry {
    /// Returns the registry of this machine.
    pub fn of_this_machine() -> Self {
        Self {
            folder: PathBuf::from("/run/longhaul-lab"),
            data: PathBuf::from("/var/tmp/longhaul-lab"),
        }
    }

    /// Adds a new, empty laboratory.
    ///
    /// # Errors
    /// When the folders cannot be made (it needs root).
    pub fn enter(&self, purpose: &str) -> Result<Claim, LabError> {
        let _held = self.hold()?;
        let id = self.unused_id()?;
        let folder = self.folder.join(&id);
        let data = self.data.join(&id);
        for path in [&folder, &data] {
            fs::create_dir_all(path).during(|| format!("make {}", path.display()))?;
        }
        let lock = try_lock(&folder)?.ok_or_else(|| LabError::Answer {
            what: folder.display().to_string(),
            message: "a new laboratory's lock is held by another".to_owned(),
        })?;
        let claim = Claim {
            folder,
            _lock: lock,
            record: Record {
                id,
                purpose: purpose.to_owned(),
                owner: ProcessId::own(),
                created_unix_s: SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .map_or(0, |time| time.as_secs()),
                data,
                hosts: Vec::new(),
                links: Vec::new(),
                clients: None,
                routers: Vec::new(),
                reach: Vec::new(),
            },
        };
        claim.save()?;
        Ok(claim)
    }

    /// Returns all laboratories, in use or left over.
    ///
    /// # Errors
    /// When the registry cannot be read.
    pub fn list(&self) -> Result<Vec<Found>, LabError> {
        let _held = self.hold()?;
        let mut found = Vec::new();
        for id in self.ids()? {
            let folder = self.folder.join(&id);
            found.push(Found {
                record: read_record(&folder),
                in_use: try_lock(&folder)?.is_none(),
                id,
            });
        }
        Ok(found)
    }

    /// Removes all remains of laboratories whose owners died, and returns their names.
    ///
    /// # Errors
    /// When some of the remains cannot be removed.
    pub fn sweep(&self) -> Result<Vec<String>, LabError> {
        let _held = self.hold()?;
        let mut removed = Vec::new();
        for id in self.ids()? {
            let folder = self.folder.join(&id);
            // The lock is held during the removal.
            let Some(_lock) = try_lock(&folder)? else {
                continue;
            };
            let record = read_record(&folder);
            let namespaces = record.map_or_else(Vec::new, |record| record.namespaces());
            remove_everything(&id, &namespaces, &self.data.join(&id), &folder)?;
            removed.push(id);
        }
        Ok(removed)
    }

    /// Locks the list of laboratories for changes.
    fn hold(&self) -> Result<Flock<File>, LabError> {
        let folder = &self.folder;
        fs::create_dir_all(folder)
            .during(|| format!("make {} (hint: run as root)", folder.display()))?;
        let path = folder.join("lock");
        let file = open_lock(&path)?;
        Flock::lock(file, FlockArg::LockExclusive)
            .map_err(|(_, error)| error)
            .during(|| format!("lock {}", path.display()))
    }

    fn ids(&self) -> Result<Vec<String>, LabError> {
        let entries =
            fs::read_dir(&self.folder).during(|| format!("read {}", self.folder.display()))?;
        let mut ids: Vec<String> = entries
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| is_id(name))
            .collect();
        ids.sort();
        Ok(ids)
    }

    fn unused_id(&self) -> Result<String, LabError> {
        let taken = self.ids()?;
        let mut number = std::process::id() as u64;
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |time| time.as_nanos() as u64);
        number = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ now;
        loop {
            number = number.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            let id = format!("{:06x}", number >> 40);
            if !taken.contains(&id) {
                return Ok(id);
            }
        }
    }
}

impl Claim {
    /// Returns the folder for the laboratory's sockets.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Records the things to be removed; called before a thing is created, not after.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn save(&self) -> Result<(), LabError> {
        let path = self.folder.join("lab.json");
        let new = self.folder.join("lab.json.new");
        serde_json::to_vec_pretty(&self.record)
            .map_err(io::Error::from)
            .and_then(|bytes| fs::write(&new, bytes))
            .and_then(|()| fs::rename(&new, &path))
            .during(|| format!("write {}", path.display()))
    }

    /// Ends and removes everything of this laboratory.
    ///
    /// # Errors
    /// When some of it cannot be removed; a later sweep tries again.
    pub fn remove(&self) -> Result<(), LabError> {
        remove_everything(
            &self.record.id,
            &self.record.namespaces(),
            &self.record.data,
            &self.folder,
        )
    }
}

/// Returns the owner of a laboratory that is in use.
pub fn owner_of(found: &Found) -> Option<ProcessId> {
    found
        .record
        .as_ref()?
        .owner
        .filter(|owner| owner.is_alive())
}

/// Removes processes first, then namespaces, then mounts and folders: the record is last, so that
/// an interrupted removal is resumed.
fn remove_everything(
    id: &str,
    namespaces: &[String],
    data: &Path,
    folder: &Path,
) -> Result<(), LabError> {
    let mut pids = process::all_with_variable(LAB_VARIABLE, id)?;
    for name in namespaces {
        if let Ok(namespace) = Namespace::open(name) {
            pids.extend(namespace.processes()?);
        }
    }
    process::kill_all(&pids)?;
    for name in namespaces {
        Namespace::remove(name)?;
    }
    for path in [data, folder] {
        mounts::unmount_below(path)?;
        match fs::remove_dir_all(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).during(|| format!("remove {}", path.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

fn is_id(name: &str) -> bool {
    name.len() == 6 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn read_record(folder: &Path) -> Option<Record> {
    serde_json::from_slice(&fs::read(folder.join("lab.json")).ok()?).ok()
}

fn open_lock(path: &Path) -> Result<File, LabError> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .during(|| format!("open {}", path.display()))
}

/// Takes a laboratory's lock if it is free.
fn try_lock(folder: &Path) -> Result<Option<Flock<File>>, LabError> {
    let path = folder.join("lock");
    match Flock::lock(open_lock(&path)?, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, error)) => Err(error).during(|| format!("lock {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registry(folder: &tempfile::TempDir) -> Registry {
        Registry {
            folder: folder.path().join("run"),
            data: folder.path().join("data"),
        }
    }

    #[test]
    fn what_is_held_is_in_use_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let registry = registry(&folder);
        let claim = registry.enter("test").unwrap();
        let all = registry.list().unwrap();
        assert_eq!(all.len(), 1);
        assert!(all[0].in_use);
        assert_eq!(owner_of(&all[0]), ProcessId::own());
        assert_eq!(registry.sweep().unwrap(), Vec::<String>::new());
        assert!(claim.record.data.is_dir());
        claim.remove().unwrap();
        assert!(!claim.record.data.exists());
        assert!(registry.list().unwrap().is_empty());
    }

    #[test]
    fn what_its_owner_let_go_of_is_swept_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let registry = registry(&folder);
        let kept = registry.enter("kept").unwrap();
        let dropped = registry.enter("dropped").unwrap();
        assert_ne!(kept.record.id, dropped.record.id);
        let (id, data) = (dropped.record.id.clone(), dropped.record.data.clone());
        fs::write(data.join("state"), "x").unwrap();
        drop(dropped); // as when its owner dies: the lock is free, all else remains
        let left: Vec<bool> = registry
            .list()
            .unwrap()
            .iter()
            .map(|it| it.in_use)
            .collect();
        assert_eq!(left.iter().filter(|in_use| !**in_use).count(), 1);
        assert_eq!(registry.sweep().unwrap(), vec![id]);
        assert!(!data.exists());
        assert!(kept.record.data.exists());
        kept.remove().unwrap();
    }

    #[test]
    fn an_owner_that_died_before_it_wrote_anything_is_swept() {
        let folder = tempfile::tempdir().unwrap();
        let registry = registry(&folder);
        registry.enter("first").unwrap().remove().unwrap();
        let half = registry.folder.join("0123ab");
        fs::create_dir_all(&half).unwrap();
        fs::create_dir_all(registry.folder.join("not-a-laboratory")).unwrap();
        assert_eq!(registry.sweep().unwrap(), vec!["0123ab".to_owned()]);
        assert!(!half.exists());
        assert!(registry.folder.join("not-a-laboratory").exists());
    }

    #[test]
    fn processes_are_known_by_their_laboratory() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .env(LAB_VARIABLE, "f0f0f0-test")
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let found = || process::all_with_variable(LAB_VARIABLE, "f0f0f0-test").unwrap();
        // Its environment is visible once the program has been started.
        assert!(process::wait_until(
            std::time::Duration::from_secs(30),
            || found() == vec![pid]
        ));
        process::kill_all(&found()).unwrap();
        assert!(!child.wait().unwrap().success());
    }
}
