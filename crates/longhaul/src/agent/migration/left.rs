//! An attempt as its journal tells it: what an earlier agent, or an earlier task, has left.

use super::Context;
use super::entry::{Entry, Facts};
use super::ledger::Ledger;
use longhaul_api::{Asked, Phase, Side};
use longhaul_engine::handover::{self, Record, Terms};
use longhaul_hypervisor::guest::{self, Found, Guest};
use longhaul_protocol::{HostId, MigrationId};
use longhaul_storage::Journal;
use std::io;
use std::sync::Arc;

/// One attempt, with its journal.
pub(super) struct Left {
    pub(super) migration: MigrationId,
    pub(super) side: handover::Side,
    pub(super) guest: String,
    pub(super) peer: HostId,
    pub(super) peer_name: String,
    pub(super) paused: bool,
    pub(super) terms: Terms,
    pub(super) journal: Journal,
}

impl Left {
    /// The last attempt that a journal tells of; none where it begins with an answer about an
    /// attempt that never began here.
    pub(super) fn of(migration: MigrationId, journal: Journal) -> Result<Self, Box<Journal>> {
        let began = journal.records().iter().rev().find_map(|record| {
            let Record::Began {
                attempt,
                side,
                guest,
                generation,
                peer,
                peer_name,
                paused,
                ..
            } = record
            else {
                return None;
            };
            let terms = Terms {
                attempt: *attempt,
                generation: *generation,
                // By the time that a journal is read this has had its effect.
                early: false,
            };
            Some((
                *side,
                guest.clone(),
                *peer,
                peer_name.clone(),
                *paused,
                terms,
            ))
        });
        let Some((side, guest, peer, peer_name, paused, terms)) = began else {
            return Err(Box::new(journal));
        };
        Ok(Self {
            migration,
            side,
            guest,
            peer,
            peer_name,
            paused,
            terms,
            journal,
        })
    }

    /// The records of this attempt.
    pub(super) fn records(&self) -> Vec<Record> {
        of_attempt(&self.journal, self.terms)
    }

    /// What people see of it.
    pub(super) fn entry(&self, context: &Context, phase: Phase) -> Arc<Entry> {
        let here = context.parts.config.name.clone();
        let (side, source, destination) = match self.side {
            handover::Side::Source => (Side::Source, here, self.peer_name.clone()),
            handover::Side::Destination => (Side::Destination, self.peer_name.clone(), here),
        };
        let facts = Facts {
            id: self.migration,
            guest: self.guest.clone(),
            side,
            source,
            destination,
            asked: Asked::default(),
        };
        let entry = Arc::new(Entry::new(facts));
        entry.enter(phase);
        context.registry.add(entry.clone());
        entry
    }

    /// Its ledger.
    pub(super) fn into_ledger(self, context: &Arc<Context>) -> Ledger {
        let Self {
            migration,
            guest,
            peer_name,
            terms,
            journal,
            ..
        } = self;
        Ledger::new(
            context.clone(),
            migration,
            &guest,
            &peer_name,
            terms,
            journal,
        )
    }
}

/// The records of one attempt.
pub(super) fn of_attempt(journal: &Journal, terms: Terms) -> Vec<Record> {
    let records = journal.records().iter();
    records
        .filter(|record| record.attempt() == terms.attempt)
        .cloned()
        .collect()
}

/// Why an attempt was given up, as its records tell.
pub(super) fn abort_reason(records: &[Record]) -> String {
    let reason = records.iter().rev().find_map(|record| match record {
        Record::Aborted { reason, .. } | Record::Returned { reason, .. } => Some(reason.clone()),
        _ => None,
    });
    reason.unwrap_or_else(|| "it was given up".to_owned())
}

/// A guest of this name whose QEMU runs here.
pub(super) fn find(context: &Context, name: &str) -> io::Result<Option<Guest>> {
    let found = guest::find_all(&context.parts.config.state)?;
    Ok(found.into_iter().find_map(|found| match found {
        Found::Running(guest) if guest.name() == name => Some(guest),
        Found::Running(_) | Found::Ended(_) | Found::Damaged { .. } => None,
    }))
}

/// Ends a guest's QEMU and removes everything that was made for it.
pub(super) async fn remove(context: &Context, name: &str) -> io::Result<()> {
    for found in guest::find_all(&context.parts.config.state)? {
        match found {
            Found::Running(guest) | Found::Ended(guest) if guest.name() == name => {
                if let Err(error) = guest.stop(None).await {
                    tracing::error!(guest = name, %error, "something of it is left over");
                }
            }
            // The agent was ended while it removed the folder, which it does last of all.
            Found::Damaged { folder, why } if folder.name() == name => {
                tracing::info!(guest = name, why, "removing what is left of its folder");
                std::fs::remove_dir_all(folder.path())?;
            }
            Found::Running(_) | Found::Ended(_) | Found::Damaged { .. } => {}
        }
    }
    Ok(())
}
