//! Holds guests whose journals cannot be used. The agent does nothing with a held guest until an
//! operator has decided where it runs. Other guests are not affected.

use crate::host::lock::lock;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_engine::handover::Record;
use longhaul_protocol::MigrationId;
use longhaul_storage::{Journal, JournalError, read_journal};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;

/// The guests that are held.
#[derive(Debug, Default)]
pub(crate) struct HeldGuests(Mutex<Held>);

#[derive(Debug, Default)]
struct Held {
    guests: HashMap<String, Cause>,
    /// A journal that does not name its guest. It may be of any guest.
    any: Option<Cause>,
    /// Sound journals of held guests. They stay locked here, so that no other task acts on them.
    journals: Vec<Journal>,
}

/// A journal that cannot be used.
#[derive(Debug, Clone)]
struct Cause {
    migration: MigrationId,
    error: String,
    is_newer: bool,
}

impl HeldGuests {
    /// Holds the guest of a journal that could not be opened. Returns the error if the journal does
    /// not name a guest: then nothing is held.
    pub(crate) fn hold(
        &self,
        migration: MigrationId,
        path: &Path,
        error: JournalError,
    ) -> Option<JournalError> {
        let Some(guest) = guest_of(path) else {
            return Some(error);
        };
        let cause = Cause::new(migration, &error);
        tracing::error!(%migration, guest, hint = cause.hint(), "a guest is held: {error}");
        lock(&self.0).guests.insert(guest, cause);
        None
    }

    /// Holds every guest, because of a journal that could not be opened and may be of any guest.
    pub(crate) fn hold_every_guest(&self, migration: MigrationId, error: &JournalError) {
        let cause = Cause::new(migration, error);
        tracing::error!(%migration, hint = cause.hint(), "every guest is held: {error}");
        lock(&self.0).any = Some(cause);
    }

    /// Keeps a sound journal of a held guest locked.
    pub(crate) fn keep(&self, journal: Journal) {
        lock(&self.0).journals.push(journal);
    }

    /// Returns whether an unusable journal names this guest.
    pub(crate) fn is_named(&self, guest: &str) -> bool {
        lock(&self.0).guests.contains_key(guest)
    }

    /// Returns why a guest is held, with a hint for the operator.
    pub(crate) fn why(&self, guest: &str) -> Option<ApiError> {
        let held = lock(&self.0);
        let (cause, text) = match (held.guests.get(guest), &held.any) {
            (Some(cause), _) => (cause, format!("{guest} is held: {}", cause.error)),
            (None, Some(cause)) => {
                let error = &cause.error;
                let text = format!(
                    "every guest is held, because a journal does not say whose it is: {error}"
                );
                (cause, text)
            }
            (None, None) => return None,
        };
        Some(ApiError::new(ErrorCode::InDoubt, text).hint(cause.hint()))
    }
}

impl Cause {
    fn new(migration: MigrationId, error: &JournalError) -> Self {
        Self {
            migration,
            error: error.to_string(),
            is_newer: error.is_newer(),
        }
    }

    fn hint(&self) -> String {
        let migration = self.migration;
        match self.is_newer {
            true => "start the version of Longhaul that wrote it".to_owned(),
            false => format!(
                "compare `longhaul journal show {migration}` with the same on the other host, stop \
                 this agent (guests go on running), then: longhaul journal set-aside {migration}"
            ),
        }
    }
}

/// Returns the guest that the readable part of a journal names.
fn guest_of(path: &Path) -> Option<String> {
    let reading = read_journal(path).ok()?;
    reading.entries.into_iter().rev().find_map(|entry| {
        let Record::Began { guest, .. } = entry.record else {
            return None;
        };
        Some(guest)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_engine::handover::Side;
    use longhaul_protocol::{Attempt, Generation, HostId};
    use longhaul_storage::Journals;

    const ID: MigrationId = MigrationId([7; 8]);

    /// Returns the error of a journal of web-7 in which one byte changed.
    fn damaged(folder: &Path, place: usize) -> (std::path::PathBuf, JournalError) {
        let journals = Journals::open(folder).unwrap();
        let mut file = Journal::open(&journals, ID).unwrap();
        let attempt = Attempt(1);
        let began = Record::Began {
            migration: ID,
            attempt,
            side: Side::Source,
            guest: "web-7".to_owned(),
            generation: Generation(1),
            peer: HostId([1; 32]),
            peer_name: "paris-2".to_owned(),
            paused: false,
        };
        file.append(&began).unwrap();
        for _ in 0..2 {
            file.append(&Record::Done { attempt }).unwrap();
        }
        let path = file.path().to_owned();
        drop(file);
        let mut bytes = std::fs::read(&path).unwrap();
        let place = place.min(bytes.len() - 30);
        bytes[place] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let error = Journal::open(&journals, ID).unwrap_err();
        (path, error)
    }

    #[test]
    fn one_guest_is_held_if_the_journal_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let (path, error) = damaged(folder.path(), usize::MAX);
        assert!(error.is_of_the_file(), "{error}");
        let held = HeldGuests::default();
        assert!(held.hold(ID, &path, error).is_none());
        let why = held.why("web-7").unwrap();
        assert!(why.message.contains("web-7 is held"), "{}", why.message);
        assert!(why.hint.unwrap().contains("journal set-aside"));
        assert!(held.is_named("web-7") && held.why("db-1").is_none());
    }

    #[test]
    fn every_guest_is_held_if_it_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let (path, error) = damaged(folder.path(), 40);
        let held = HeldGuests::default();
        let error = held.hold(ID, &path, error).unwrap();
        assert!(held.why("db-1").is_none());
        held.hold_every_guest(ID, &error);
        assert!(held.why("db-1").unwrap().message.contains("does not say"));
        assert!(!held.is_named("db-1"));
    }
}
