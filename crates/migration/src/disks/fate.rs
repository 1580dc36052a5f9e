//! Decides by the journals what becomes of what was made for an arriving guest. It also has the
//! refusals of offers.

use crate::context::Context;
use longhaul_engine::handover::Record;
use longhaul_protocol::MigrationId;
use longhaul_protocol::message::{Refusal, RefusalCode};
use longhaul_storage::{Holder, SetAside, file_name, read_sound_journal};
use std::io;

pub(crate) fn refused(text: String, hint: impl Into<String>) -> Refusal {
    Refusal {
        code: RefusalCode::Unsuitable,
        text,
        hint: Some(hint.into()),
    }
}

pub(crate) fn invalid(text: impl Into<String>) -> Refusal {
    Refusal {
        code: RefusalCode::Invalid,
        text: text.into(),
        hint: None,
    }
}

/// The decision about images that were created.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Stay,
    Go,
    /// Not decided yet.
    Open,
}

/// Returns the decision about an arriving guest. `generation` is that of the right after the
/// migration.
pub(crate) fn fate(
    context: &Context,
    migration: MigrationId,
    (guest, generation): (&str, u64),
) -> io::Result<Fate> {
    let folder = context.parts.config.state.join("journal");
    let journal = folder.join(file_name(migration));
    if SetAside::of(&folder, migration).exists() {
        return Ok(Fate::Open);
    }
    let records = match read_sound_journal(&journal) {
        Ok(reading) => reading
            .entries
            .into_iter()
            .map(|entry| entry.record)
            .collect(),
        Err(_) if !journal.exists() => Vec::new(),
        Err(error) => return Err(io::Error::other(error)),
    };
    if let Some(fate) = fate_by(&records) {
        return Ok(fate);
    }
    // No journal exists. The rights decide.
    let right = context.rights.get(guest).map_err(io::Error::other)?;
    let ours =
        right.is_some_and(|right| right.holder == Holder::Here && right.generation.0 >= generation);
    let runs = context.parts.guests.find(guest)?.is_some();
    Ok(match ours || runs {
        true => Fate::Stay,
        false => Fate::Go,
    })
}

/// Returns the decision of an attempt's records, if there is one.
fn fate_by(records: &[Record]) -> Option<Fate> {
    let mut fate = None;
    for record in records {
        fate = Some(match record {
            Record::Began { .. } | Record::Ready { .. } => Fate::Open,
            Record::Committed { .. }
            | Record::AllPresent { .. }
            | Record::GaveUp { .. }
            | Record::Done { .. } => Fate::Stay,
            Record::Aborted { .. } => Fate::Go,
            // Returned: the attempt will be aborted.
            Record::Returned { .. }
            | Record::Released { .. }
            | Record::ReleasedToArbiter { .. } => Fate::Open,
            Record::Overruled { run_on, .. } => match run_on {
                longhaul_engine::handover::Side::Destination => Fate::Stay,
                longhaul_engine::handover::Side::Source => Fate::Open,
            },
            Record::Peer { .. } | Record::Incomplete { .. } | Record::Closed { .. } => continue,
        });
    }
    fate
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_protocol::{Attempt, Generation};

    #[test]
    fn images_stay_or_go_as_the_journal_says() {
        let attempt = Attempt(1);
        let ready = Record::Ready { attempt };
        let committed = Record::Committed {
            attempt,
            generation: Generation(2),
        };
        let reason = "because".to_owned();
        let aborted = Record::Aborted {
            attempt,
            reason: reason.clone(),
        };
        let returned = Record::Returned { attempt, reason };
        let closed = Record::Closed { attempt };
        assert_eq!(fate_by(&[]), None);
        assert_eq!(fate_by(std::slice::from_ref(&ready)), Some(Fate::Open));
        let came = [ready.clone(), committed.clone()];
        assert_eq!(fate_by(&came), Some(Fate::Stay));
        let ended = [committed.clone(), closed.clone()];
        assert_eq!(fate_by(&ended), Some(Fate::Stay));
        assert_eq!(fate_by(&[ready, aborted.clone()]), Some(Fate::Go));
        let given_back = [committed, returned];
        assert_eq!(fate_by(&given_back), Some(Fate::Open));
        let [committed, returned] = given_back;
        let gone = [committed, returned, aborted, closed];
        assert_eq!(fate_by(&gone), Some(Fate::Go));
    }
}
