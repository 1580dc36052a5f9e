//! An attempt as recorded in its journal by an earlier agent or task.

use crate::context::Context;
use crate::handover::ledger::Ledger;
use crate::status::migration::{Entry, Facts};
use longhaul_api::{Asked, Phase, Side, Strategy};
use longhaul_engine::handover::{self, Record, Terms};
use longhaul_protocol::guest::{Disk, GuestDescription};
use longhaul_protocol::{HostId, MigrationId};
use longhaul_storage::Journal;
use std::sync::Arc;

/// One attempt, with its journal.
pub(crate) struct AttemptRecord {
    pub(crate) migration: MigrationId,
    pub(crate) side: handover::Side,
    pub(crate) guest: String,
    pub(crate) peer: HostId,
    pub(crate) peer_name: String,
    pub(crate) paused: bool,
    pub(crate) terms: Terms,
    pub(crate) journal: Journal,
}

impl AttemptRecord {
    /// Returns the last attempt in a journal. Returns the journal itself if it only answers for an
    /// attempt that never began here.
    pub(crate) fn of(migration: MigrationId, journal: Journal) -> Result<Self, Box<Journal>> {
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
                // This only matters before a journal is read again.
                early: false,
                // The record of the release has it.
                arbiter: None,
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

    /// Returns the records of this attempt.
    pub(crate) fn records(&self) -> Vec<Record> {
        of_attempt(&self.journal, self.terms)
    }

    /// Creates the entry that operators see.
    pub(crate) fn entry(&self, context: &Context, phase: Phase) -> Arc<Entry> {
        let here = context.parts.config.name.clone();
        let (side, source, destination) = match self.side {
            handover::Side::Source => (Side::Source, here, self.peer_name.clone()),
            handover::Side::Destination => (Side::Destination, self.peer_name.clone(), here),
        };
        let facts = Facts {
            strategy: Strategy::Precopy,
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

    /// Converts the attempt into its ledger.
    pub(crate) fn into_ledger(self, context: &Arc<Context>) -> Ledger {
        let Self {
            migration,
            guest,
            peer,
            peer_name,
            terms,
            journal,
            ..
        } = self;
        Ledger::new(
            context.clone(),
            migration,
            &guest,
            (&peer_name, Some(peer)),
            terms,
            journal,
        )
    }
}

/// Returns the records of one attempt.
pub(crate) fn of_attempt(journal: &Journal, terms: Terms) -> Vec<Record> {
    let records = journal.records().iter();
    records
        .filter(|record| record.attempt() == terms.attempt)
        .cloned()
        .collect()
}

/// Returns the number of disks that must be complete before the source is no longer needed. None in
/// the journal of an older agent, and if each disk came as a whole.
pub(crate) fn incomplete_disks(journal: &Journal, terms: Terms) -> Option<usize> {
    let records = of_attempt(journal, terms);
    records.iter().find_map(|record| match record {
        Record::Incomplete { disks, .. } => Some(usize::from(*disks)),
        _ => None,
    })
}

/// Returns whether the source's copy of a guest no longer matches the guest's disks. This is so if
/// an operator took the guest back after it ran at the destination, which has written shared disks.
pub(crate) fn is_stale(records: &[Record], guest: &GuestDescription) -> bool {
    let done = |record: &Record| matches!(record, Record::Done { .. });
    let shared = |disk: &Disk| disk.shared && !disk.read_only;
    records.iter().any(done) && guest.disks.iter().any(shared)
}

/// Returns the message for a guest whose copy here is stale.
pub(crate) fn stale(guest: &str, here: &str) -> String {
    format!(
        "{guest} is stopped on {here}: its shared disks were written elsewhere, and continuing \
         would damage its file systems; end it and start it again: longhaul guests stop --force \
         {guest}, longhaul guests start {guest}"
    )
}

/// Returns the reason of an abort from the records of an attempt.
pub(crate) fn abort_reason(records: &[Record]) -> String {
    let reason = records.iter().rev().find_map(|record| match record {
        Record::Aborted { reason, .. } | Record::Returned { reason, .. } => Some(reason.clone()),
        _ => None,
    });
    reason.unwrap_or_else(|| "it was given up".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_protocol::{Attempt, Generation};

    #[test]
    fn a_copy_is_stale_once_its_shared_disks_were_written_elsewhere() {
        let attempt = Attempt(1);
        let released = Record::Released {
            attempt,
            generation: Generation(2),
        };
        let done = vec![released.clone(), Record::Done { attempt }];
        let guest = |shared, read_only| {
            let text = format!(
                "name = \"web-7\"\nmachine = \"pc-q35-7.2\"\ncpu = \"qemu64\"\nvcpus = 1\n\
                 memory_mib = 64\n[[disks]]\nname = \"vda\"\nimage = \"data\"\n\
                 shared = {shared}\nread_only = {read_only}\n"
            );
            longhaul_hypervisor::description::parse(&text).unwrap()
        };
        assert!(is_stale(&done, &guest(true, false)));
        // The guest never ran at the destination.
        assert!(!is_stale(&[released], &guest(true, false)));
        assert!(!is_stale(&done, &guest(true, true)));
        assert!(!is_stale(&done, &guest(false, false)));
    }
}
