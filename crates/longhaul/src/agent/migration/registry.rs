//! Which migrations there are, and which guests they keep to themselves.

use super::entry::Entry;
use longhaul_api::{ApiError, ErrorCode, Outcome, Side};
use longhaul_protocol::MigrationId;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most ended migrations that are listed.
const ENDED_MAX: usize = 500;

/// Every migration of this host that is known, and every guest that is taken.
#[derive(Debug, Default)]
pub(super) struct Registry {
    entries: Mutex<BTreeMap<MigrationId, Arc<Entry>>>,
    taken: Arc<Mutex<HashMap<String, Taken>>>,
}

/// What keeps a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taken {
    /// It is being started or stopped.
    Locally,
    /// It is moving.
    Moving(MigrationId, Side),
    /// It has left, and what its memory held is written down.
    Departed,
}

/// Keeps others off a guest until it is dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    taken: Arc<Mutex<HashMap<String, Taken>>>,
    guest: String,
}

impl Reservation {
    /// Keeps others off for another reason from now on.
    pub(super) fn now(&self, what: Taken) {
        lock(&self.taken).insert(self.guest.clone(), what);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        lock(&self.taken).remove(&self.guest);
    }
}

impl Registry {
    /// Adds a migration.
    pub(super) fn add(&self, entry: Arc<Entry>) {
        let mut entries = lock(&self.entries);
        entries.insert(entry.id(), entry);
        let ended = |entry: &Entry| {
            entry
                .outcome()
                .is_some_and(|outcome| outcome != Outcome::InDoubt)
        };
        if entries.values().filter(|entry| ended(entry)).count() > ENDED_MAX {
            let oldest = entries.values().filter(|entry| ended(entry));
            let oldest = oldest.min_by_key(|entry| entry.report().started_unix_ms);
            if let Some(id) = oldest.map(|entry| entry.id()) {
                entries.remove(&id);
            }
        }
    }

    /// A migration by its id.
    pub(super) fn get(&self, id: MigrationId) -> Result<Arc<Entry>, ApiError> {
        let found = lock(&self.entries).get(&id).cloned();
        found.ok_or_else(|| {
            ApiError::new(
                ErrorCode::MigrationUnknown,
                format!("there is no migration {id} here"),
            )
            .hint("`longhaul migrations` lists those that this host knows")
        })
    }

    /// All of them, the newest first.
    pub(super) fn list(&self) -> Vec<Arc<Entry>> {
        let mut list: Vec<_> = lock(&self.entries).values().cloned().collect();
        list.sort_by_key(|entry| std::cmp::Reverse(entry.report().started_unix_ms));
        list
    }

    /// Keeps others off a guest.
    pub(super) fn take(&self, guest: &str, what: Taken) -> Result<Reservation, ApiError> {
        let mut taken = lock(&self.taken);
        if let Some(holder) = taken.get(guest) {
            let error = match holder {
                Taken::Locally => format!("{guest} is being started or stopped"),
                Taken::Moving(id, _) => format!("{guest} is moving already (migration {id})"),
                Taken::Departed => format!("what the memory of {guest} held is being kept"),
            };
            let hint = match holder {
                Taken::Locally | Taken::Departed => "try again when that is done".to_owned(),
                Taken::Moving(id, _) => format!("wait for it, or stop it: longhaul cancel {id}"),
            };
            return Err(ApiError::new(ErrorCode::GuestBusy, error).hint(hint));
        }
        taken.insert(guest.to_owned(), what);
        Ok(Reservation {
            taken: self.taken.clone(),
            guest: guest.to_owned(),
        })
    }

    /// What keeps a guest.
    pub(super) fn taken(&self, guest: &str) -> Option<Taken> {
        lock(&self.taken).get(guest).copied()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_taken_once_and_given_back() {
        let registry = Registry::default();
        let id = MigrationId([1; 8]);
        let first = registry
            .take("web", Taken::Moving(id, Side::Source))
            .unwrap();
        let refused = registry.take("web", Taken::Locally).unwrap_err();
        assert_eq!(refused.code, ErrorCode::GuestBusy);
        assert!(
            refused
                .hint
                .is_some_and(|hint| hint.contains(&id.to_string()))
        );
        drop(first);
        assert!(registry.take("web", Taken::Locally).is_ok());
    }
}
