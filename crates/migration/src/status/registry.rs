//! The migrations of this host, and the guests that they reserve.

use crate::status::held::HeldGuests;
use crate::status::migration::Entry;
use longhaul_api::{ApiError, ErrorCode, Outcome, Phase, Side};
use longhaul_protocol::MigrationId;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Limit on the number of ended migrations in the list.
const ENDED_MAX: usize = 500;

/// The known migrations of this host, and the reserved guests.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    entries: Mutex<BTreeMap<MigrationId, Arc<Entry>>>,
    taken: Arc<Mutex<HashMap<String, Taken>>>,
    /// The guests that cannot be reserved.
    pub(crate) held: HeldGuests,
}

/// What has reserved a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    /// The guest is being started or stopped.
    Locally,
    /// The guest is moving.
    Moving(MigrationId, Side),
    /// The guest has left, and its memory is being cached.
    RetainedQemu,
}

/// Reserves a guest until it is dropped.
#[derive(Debug)]
pub struct Reservation {
    taken: Arc<Mutex<HashMap<String, Taken>>>,
    guest: String,
}

impl Reservation {
    /// Changes what has reserved the guest.
    pub(crate) fn now(&self, what: Taken) {
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
    pub(crate) fn add(&self, entry: Arc<Entry>) {
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

    /// Returns a migration by its id.
    pub(crate) fn get(&self, id: MigrationId) -> Result<Arc<Entry>, ApiError> {
        let found = lock(&self.entries).get(&id).cloned();
        found.ok_or_else(|| {
            ApiError::new(
                ErrorCode::MigrationUnknown,
                format!("there is no migration {id} here"),
            )
            .hint("`longhaul migrations` lists those that this host knows")
        })
    }

    /// Returns all migrations, newest first.
    pub(crate) fn list(&self) -> Vec<Arc<Entry>> {
        let mut list: Vec<_> = lock(&self.entries).values().cloned().collect();
        list.sort_by_key(|entry| std::cmp::Reverse(entry.report().started_unix_ms));
        list
    }

    /// Reserves a guest.
    pub(crate) fn take(&self, guest: &str, what: Taken) -> Result<Reservation, ApiError> {
        if let Some(why) = self.held.why(guest) {
            return Err(why);
        }
        let mut taken = lock(&self.taken);
        if let Some(holder) = taken.get(guest).copied() {
            drop(taken);
            return Err(self.busy(guest, holder));
        }
        taken.insert(guest.to_owned(), what);
        Ok(Reservation {
            taken: self.taken.clone(),
            guest: guest.to_owned(),
        })
    }

    /// Returns the error for a guest that is reserved, with a hint.
    pub(crate) fn busy(&self, guest: &str, holder: Taken) -> ApiError {
        let (text, hint) = match holder {
            Taken::Locally => (
                format!("{guest} is being started or stopped"),
                "try again when that is done".to_owned(),
            ),
            Taken::RetainedQemu => (
                format!("what the memory of {guest} held is being kept"),
                "try again when that is done".to_owned(),
            ),
            Taken::Moving(id, Side::Destination) if self.is_finishing(id) => (
                format!("the rest of the disks of {guest} is still being fetched (migration {id})"),
                format!(
                    "it runs here for good, and this cannot be cancelled: wait for it (`longhaul \
                     migrations` says how much is missing, and what to do if the other host never \
                     comes back), or shut {guest} down from inside"
                ),
            ),
            Taken::Moving(id, _) => (
                format!("{guest} is moving already (migration {id})"),
                format!("wait for it, or stop it: longhaul cancel {id}"),
            ),
        };
        ApiError::new(ErrorCode::GuestBusy, text).hint(hint)
    }

    /// Returns whether the guest has been handed over and its migration has not ended yet.
    fn is_finishing(&self, id: MigrationId) -> bool {
        let entry = lock(&self.entries).get(&id).cloned();
        entry.is_some_and(|entry| entry.phase() == Phase::Finishing)
    }

    /// Returns what has reserved a guest.
    pub(crate) fn taken(&self, guest: &str) -> Option<Taken> {
        lock(&self.taken).get(guest).copied()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::migration::Facts;
    use longhaul_api::Asked;

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

    #[test]
    fn what_is_still_fetched_is_not_said_to_be_cancelled() {
        let registry = Registry::default();
        let id = MigrationId([1; 8]);
        let entry = Arc::new(Entry::new(Facts {
            id,
            guest: "web".to_owned(),
            side: Side::Destination,
            source: "lyon".to_owned(),
            destination: "paris".to_owned(),
            asked: Asked::default(),
        }));
        registry.add(entry.clone());
        let _moving = registry
            .take("web", Taken::Moving(id, Side::Destination))
            .unwrap();
        let hint = || {
            let refused = registry.take("web", Taken::Locally).unwrap_err();
            refused.hint.unwrap()
        };
        assert!(hint().contains("longhaul cancel"), "{}", hint());
        entry.enter(Phase::Finishing);
        assert!(hint().contains("cannot be cancelled"), "{}", hint());
        assert!(!hint().contains("longhaul cancel"), "{}", hint());
    }
}
