//! Ownership of attempts: a peer may only refer to attempts whose source it is.

use longhaul_engine::handover::{Record, Side};
use longhaul_protocol::HostId;
use longhaul_protocol::message::Offer;
use longhaul_storage::{JournalError, read_journal};
use std::path::Path;

/// Returns whether every attempt in a journal has this host as its source.
pub(crate) fn belongs_to(records: &[Record], host: HostId) -> bool {
    records.iter().all(|record| match record {
        Record::Began { side, peer, .. } => *side == Side::Destination && *peer == host,
        _ => true,
    })
}

/// Returns whether a journal contains only arrivals that were aborted.
pub(crate) fn only_aborted_arrivals(records: &[Record]) -> bool {
    let ended = |record: &Record| matches!(record, Record::Aborted { .. } | Record::Closed { .. });
    records.last().is_none_or(ended)
        && records.iter().all(|record| match record {
            Record::Began { side, .. } => *side == Side::Destination,
            Record::Incomplete { .. }
            | Record::Ready { .. }
            | Record::Aborted { .. }
            | Record::Closed { .. } => true,
            _ => false,
        })
}

/// Checks that an offer can be the next attempt of its migration.
pub(crate) fn fits(journal: &Path, offer: &Offer, peer: HostId) -> Result<(), String> {
    let known = records(journal).map_err(|error| error.to_string())?;
    if !belongs_to(&known, peer) {
        return Err("this migration is another host's".to_owned());
    }
    let same_guest = known.iter().all(|record| match record {
        Record::Began { guest, .. } => *guest == offer.guest.name,
        _ => true,
    });
    if !same_guest {
        return Err("this migration is another guest's".to_owned());
    }
    Ok(())
}

/// Reads the records of a journal, which may be in use. Returns none if it does not exist.
pub(crate) fn records(path: &Path) -> Result<Vec<Record>, JournalError> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let entries = read_journal(path)?.entries;
    Ok(entries.into_iter().map(|entry| entry.record).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_protocol::{Attempt, Generation, MigrationId};

    const PEER: HostId = HostId([1; 32]);

    fn began(side: Side, peer: HostId) -> Record {
        Record::Began {
            migration: MigrationId([1; 8]),
            attempt: Attempt(1),
            side,
            guest: "web".to_owned(),
            generation: Generation(1),
            peer,
            peer_name: "a".to_owned(),
            paused: false,
        }
    }

    fn aborted() -> Record {
        Record::Aborted {
            attempt: Attempt(1),
            reason: String::new(),
        }
    }

    #[test]
    fn only_the_source_of_every_attempt_may_speak_of_it() {
        assert!(belongs_to(&[], PEER));
        assert!(belongs_to(&[aborted()], PEER));
        assert!(belongs_to(&[began(Side::Destination, PEER)], PEER));
        let other = HostId([2; 32]);
        assert!(!belongs_to(&[began(Side::Destination, other)], PEER));
        assert!(!belongs_to(&[began(Side::Source, PEER)], PEER));
    }

    #[test]
    fn only_aborted_arrivals_can_be_forgotten() {
        let arrival = began(Side::Destination, PEER);
        let generation = Generation(2);
        let attempt = Attempt(1);
        let committed = Record::Committed {
            attempt,
            generation,
        };
        assert!(only_aborted_arrivals(&[aborted()]));
        assert!(only_aborted_arrivals(&[arrival.clone(), aborted()]));
        assert!(!only_aborted_arrivals(std::slice::from_ref(&arrival)));
        assert!(!only_aborted_arrivals(&[
            began(Side::Source, PEER),
            aborted()
        ]));
        assert!(!only_aborted_arrivals(&[
            arrival.clone(),
            committed,
            arrival,
            aborted()
        ]));
    }
}
