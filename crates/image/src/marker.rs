//! Markers of the processes that work in a repository, so that no removal deletes stripes that an
//! import is about to need.
//!
//! An import may find an existing stripe and not store it again; a removal may find that no image
//! needs that stripe. So each of them first leaves a marker, and then checks for markers of the
//! other kind. A store shows every earlier put to all its users, so of two concurrent ones at least
//! one sees the other: removals give way to imports, imports wait for removals.

use crate::repository::Repository;
use crate::store::{Key, Listing, StoreError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Longest marker.
const MARKER_BYTES_MAX: u64 = 4096;

/// The kind of work in a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    Import,
    Removal,
}

impl Work {
    fn prefix(self) -> &'static str {
        match self {
            Self::Import => "import-",
            Self::Removal => "removal-",
        }
    }
}

/// A process that works, or worked, in a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// Its host's name.
    pub host: String,
    /// Its process number there.
    pub pid: u32,
    /// When it began its work, by its host's clock.
    pub since_unix_s: u64,
    /// When its process began, in the kernel's ticks: process numbers are reused.
    started: String,
    /// The boot of its host.
    boot: String,
    /// The process namespace of its number.
    pid_namespace: String,
}

impl Owner {
    fn this_process() -> Self {
        let pid = std::process::id();
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            host: host_name(),
            pid,
            since_unix_s: since.map_or(0, |since| since.as_secs()),
            started: started(pid).unwrap_or_default(),
            boot: boot(),
            pid_namespace: pid_namespace(),
        }
    }

    /// Returns whether this process is it.
    fn is_this_process(&self) -> bool {
        let this = Self {
            since_unix_s: self.since_unix_s,
            ..Self::this_process()
        };
        !self.boot.is_empty() && *self == this
    }

    /// Returns whether it has ended for certain, as far as this host can know.
    fn has_ended(&self) -> bool {
        if self.host != host_name() || self.boot.is_empty() {
            return false;
        }
        // The host was rebooted, or no visible process is the same.
        self.boot != boot()
            || (self.pid_namespace == pid_namespace()
                && started(self.pid).is_none_or(|started| started != self.started))
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} of {}", self.pid, self.host)
    }
}

fn host_name() -> String {
    let text = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    text.trim_end().to_owned()
}

fn boot() -> String {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    text.trim_end().to_owned()
}

fn pid_namespace() -> String {
    let link = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    link.display().to_string()
}

/// Returns when a process began; `None` where there is no such process.
fn started(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before it, in parentheses, may hold anything.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(19).map(str::to_owned)
}

/// The names of the markers whose work goes on in this process.
static AT_WORK: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

fn at_work() -> MutexGuard<'static, BTreeSet<String>> {
    // A set of names is whole after every change.
    AT_WORK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A marker of this process, removed when it is dropped.
#[derive(Debug)]
pub(crate) struct Marker<'a> {
    repository: &'a Repository,
    name: String,
}

impl<'a> Marker<'a> {
    /// Leaves a marker.
    pub(crate) fn leave(repository: &'a Repository, work: Work) -> Result<Self, StoreError> {
        let refused = |reason: String| StoreError::Refused {
            what: "leave a marker".to_owned(),
            store: repository.place(),
            reason,
        };
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|error| refused(error.to_string()))?;
        let name = format!("{}{:016x}", work.prefix(), u64::from_le_bytes(random));
        let text = serde_json::to_vec(&Owner::this_process());
        let text = text.map_err(|error| refused(error.to_string()))?;
        at_work().insert(name.clone());
        let marker = Self { repository, name };
        repository.store().put(&marker.key(), &text)?;
        Ok(marker)
    }

    fn key(&self) -> Key {
        Key::Marker(self.name.clone())
    }

    /// Returns whether the marker still exists.
    pub(crate) fn is_there(&self) -> Result<bool, StoreError> {
        self.repository.store().has(&self.key())
    }
}

impl Drop for Marker<'_> {
    fn drop(&mut self) {
        // One that remains is removed by the next who looks: its process has ended, or knows that
        // the work has.
        let _ = self.repository.store().remove(&self.key());
        at_work().remove(&self.name);
    }
}

/// Another process's marker.
#[derive(Debug)]
pub(crate) struct Other {
    key: Key,
    /// Its owner, if the marker names it.
    pub(crate) owner: Option<Owner>,
}

impl Other {
    /// Returns whether both are the same marker.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.key == other.key
    }

    /// Removes the marker, which its owner notices.
    pub(crate) fn remove(&self, repository: &Repository) -> Result<(), StoreError> {
        repository.store().remove(&self.key)
    }
}

/// Returns the current markers of that work. Markers of ended processes, and of this process's
/// ended work, are removed.
pub(crate) fn others(repository: &Repository, work: Work) -> Result<Vec<Other>, StoreError> {
    let mut others = Vec::new();
    for name in repository.store().list(Listing::Markers)? {
        if !name.starts_with(work.prefix()) {
            continue;
        }
        let key = Key::Marker(name.clone());
        let text = match repository.store().get(&key, MARKER_BYTES_MAX) {
            // That work has ended meanwhile.
            Err(StoreError::Missing { .. }) => continue,
            text => text?,
        };
        let owner: Option<Owner> = serde_json::from_slice(&text).ok();
        let other = Other { key, owner };
        match &other.owner {
            Some(owner) if owner.has_ended() => other.remove(repository)?,
            Some(owner) if owner.is_this_process() && !at_work().contains(&name) => {
                other.remove(repository)?;
            }
            Some(_) | None => others.push(other),
        }
    }
    Ok(others)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::FolderStore;
    use std::process::Command;
    use std::sync::Arc;

    #[test]
    fn markers_of_the_living_stay_and_those_of_the_dead_go() {
        let folder = tempfile::tempdir().unwrap();
        let store = Arc::new(FolderStore::new(folder.path()));
        let repository = Repository::open_or_make(store).unwrap();
        let marker = Marker::leave(&repository, Work::Import).unwrap();
        assert!(others(&repository, Work::Removal).unwrap().is_empty());
        let seen = others(&repository, Work::Import).unwrap();
        let owner = seen[0].owner.clone().unwrap();
        assert_eq!(owner.pid, std::process::id());
        assert!(marker.is_there().unwrap());
        drop(marker);
        assert!(others(&repository, Work::Import).unwrap().is_empty());

        let mut child = Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        let dead = Owner {
            pid,
            ..owner.clone()
        };
        let reused = Owner {
            started: "1".to_owned(),
            ..owner.clone()
        };
        let rebooted = Owner {
            boot: "before".to_owned(),
            ..owner.clone()
        };
        let elsewhere = Owner {
            host: "paris-2".to_owned(),
            ..dead.clone()
        };
        let contained = Owner {
            pid_namespace: "pid:[1]".to_owned(),
            ..dead.clone()
        };
        for ended in [&dead, &reused, &rebooted] {
            assert!(ended.has_ended(), "{ended:?}");
        }
        for (index, unknown) in [&owner, &elsewhere, &contained].into_iter().enumerate() {
            assert!(!unknown.has_ended(), "{unknown:?}");
            let key = Key::Marker(format!("import-{index}"));
            let text = serde_json::to_vec(unknown).unwrap();
            repository.store().put(&key, &text).unwrap();
        }
        let text = serde_json::to_vec(&dead).unwrap();
        let key = Key::Marker("import-dead".to_owned());
        repository.store().put(&key, &text).unwrap();
        let active = Marker::leave(&repository, Work::Import).unwrap();
        // Of this process's, the one whose work goes on stays.
        assert_eq!(others(&repository, Work::Import).unwrap().len(), 3);
        assert!(active.is_there().unwrap());
        let finished = Key::Marker("import-0".to_owned());
        for ended in [&key, &finished] {
            assert!(!repository.store().has(ended).unwrap());
        }
    }
}
