//! Describes an attempt in doubt: what each side knows, what happens without an operator, and which
//! ways out an operator has. This also covers a guest that runs at the destination and needs its
//! source while the agents are disconnected.

use crate::host::arbiter::Answer;
use longhaul_api::{
    ApiError, BECAUSE_CHARS_MAX, Doubt, ErrorCode, HandoverRecord, Migration, OtherSide, Phase,
    Resolve, Side, WayOut,
};
use longhaul_protocol::BLOCK_SIZE;
use longhaul_protocol::message::AttemptState;

/// What a side knows while it waits for the other side's answer.
#[derive(Debug, Clone)]
pub(crate) struct Standing {
    pub(crate) record: HandoverRecord,
    pub(crate) generation: u64,
    pub(crate) since_unix_ms: u64,
    pub(crate) other_record: Option<HandoverRecord>,
    pub(crate) heard_unix_ms: Option<u64>,
    /// When it was last asked, and why it did not answer.
    pub(crate) asked: Option<(u64, Option<String>)>,
    /// What the arbiter has to do with it.
    pub(crate) arbiter: Option<String>,
}

impl Standing {
    /// Returns the doubt as the API shows it.
    pub(crate) fn doubt(&self, migration: &Migration) -> Doubt {
        let words = Words::of(migration);
        let (here, mut then, ways_out) = match (migration.side, self.record) {
            (Side::Source, HandoverRecord::Done) => words.at_source_of_one_that_left(),
            (Side::Source, _) => words.at_source(),
            // A source that answers has lost memory of it.
            (Side::Destination, HandoverRecord::Committed)
                if matches!(self.asked, Some((_, None))) =>
            {
                words.at_destination_without_memory()
            }
            (Side::Destination, HandoverRecord::Committed) => {
                words.at_destination_that_runs_it(&missing(migration))
            }
            (Side::Destination, _) => words.at_destination(),
        };
        if let Some(arbiter) = &self.arbiter {
            then = format!("{then}; {arbiter}");
        }
        Doubt {
            since_unix_ms: self.since_unix_ms,
            record: self.record,
            generation: self.generation,
            other_host: words.other.to_owned(),
            other_record: self.other_record,
            heard_unix_ms: self.heard_unix_ms,
            reachable: self.asked.as_ref().map(|(_, why)| why.is_none()),
            unreachable_because: self.asked.as_ref().and_then(|(_, why)| why.clone()),
            asked_unix_ms: self.asked.as_ref().map(|(at, _)| *at),
            here,
            then,
            ways_out,
        }
    }
}

/// Returns that the arbiter may end a doubt at the source.
pub(crate) fn arbiter_is_asked() -> String {
    "meanwhile the realm's arbiter is asked".to_owned()
}

/// Returns what the arbiter's answer means at the source.
pub(crate) fn arbiter(other: &str, answer: &Answer) -> String {
    match answer {
        Answer::Granted => "the realm's arbiter has given the guest back".to_owned(),
        Answer::Denied(..) => format!(
            "the realm's arbiter has given the lease away, so {other} may have taken the guest"
        ),
        Answer::None(why) => format!("the realm's arbiter is asked again: {why}"),
    }
}

/// Returns the record that matches a state which the destination reports.
pub(crate) fn record_of(state: AttemptState) -> HandoverRecord {
    match state {
        AttemptState::Receiving | AttemptState::Loading => HandoverRecord::Began,
        AttemptState::Ready => HandoverRecord::Ready,
        AttemptState::Committed => HandoverRecord::Committed,
        AttemptState::Aborted => HandoverRecord::Aborted,
    }
}

/// Returns the missing amount of each disk, as text.
fn missing(migration: &Migration) -> String {
    let regions = migration.progress.iter().flat_map(|now| &now.regions);
    let disks = regions.filter(|region| region.disk && region.blocks_pending > 0);
    let parts: Vec<_> = disks
        .map(|disk| {
            let bytes = disk.blocks_pending.saturating_mul(BLOCK_SIZE as u64);
            format!("{bytes} bytes of disk {}", disk.name)
        })
        .collect();
    match parts.is_empty() {
        true => "blocks of its disks".to_owned(),
        false => parts.join(", "),
    }
}

struct Words<'a> {
    guest: &'a str,
    this: &'a str,
    other: &'a str,
}

impl<'a> Words<'a> {
    fn of(migration: &'a Migration) -> Self {
        let (source, destination) = (&migration.source, &migration.destination);
        let (this, other) = match migration.side {
            Side::Source => (source, destination),
            Side::Destination => (destination, source),
        };
        Self {
            guest: &migration.guest,
            this,
            other,
        }
    }

    fn at_source(&self) -> (String, String, Vec<WayOut>) {
        let Self { guest, this, other } = *self;
        let here = format!("{guest} is stopped on {this}, with all its memory");
        let then = format!(
            "when the two agents meet, the word of {other} decides: {guest} runs there if {other} \
             took it, and continues here if it did not"
        );
        let stay = self.stay(this, other, this);
        (here, then, vec![stay, self.go(this, other)])
    }

    fn at_destination(&self) -> (String, String, Vec<WayOut>) {
        let Self { guest, this, other } = *self;
        let here = format!("{guest} is loaded on {this}, and has never run here");
        let then = format!(
            "when the two agents meet, the word of {other} decides: {guest} runs here if {other} \
             gave it away, and stays there if it did not"
        );
        let leave = WayOut {
            run_on: Side::Source,
            tell: this.to_owned(),
            needs_other_side: false,
            gives_up_missing: false,
            only_if: format!(
                "{guest} is to stay on {other}: {this} may always give up before it has committed"
            ),
            at_stake: format!(
                "the copy that waits here is ended. If {other} does not come back, what was in \
                 the memory of {guest} is lost, as if its power had failed"
            ),
        };
        (here, then, vec![self.go(other, this), leave])
    }

    /// The guest has run at the destination, which may or may not need the source.
    fn at_source_of_one_that_left(&self) -> (String, String, Vec<WayOut>) {
        let Self { guest, this, other } = *self;
        let here = format!(
            "the copy of {guest} on {this} is stopped, complete as of the moment it was stopped"
        );
        let then = format!(
            "when the two agents connect, {other} is sent what it lacks, and the copy here is ended"
        );
        let back = WayOut {
            run_on: Side::Source,
            tell: this.to_owned(),
            needs_other_side: true,
            gives_up_missing: false,
            only_if: format!(
                "{other} never comes back, or is cut off from the disks and networks of {guest} \
                 until its copy has ended"
            ),
            at_stake: format!(
                "everything that {guest} did on {other} is lost: it continues on {this} from the \
                 moment it was stopped. If it writes disks that both hosts share, they no longer \
                 fit its memory: it stays stopped, and has to be started again"
            ),
        };
        (here, then, vec![back])
    }

    /// The guest runs here, and a part of its disks is at the source.
    fn at_destination_that_runs_it(&self, missing: &str) -> (String, String, Vec<WayOut>) {
        let Self { guest, this, other } = *self;
        let here = format!("{guest} runs on {this}, and waits when it reads what is missing");
        let then = format!("when the two agents connect, {other} sends what is missing: {missing}");
        let alone = WayOut {
            run_on: Side::Destination,
            tell: this.to_owned(),
            needs_other_side: true,
            gives_up_missing: true,
            only_if: format!("{other} and its disks never come back, and it does not run {guest}"),
            at_stake: format!(
                "{missing}: they read as zeros from now on, and are lost. File systems of {guest} \
                 may be damaged: check or restore them"
            ),
        };
        (here, then, vec![alone])
    }

    /// The guest runs here, and waits for memory that its source has lost.
    fn at_destination_without_memory(&self) -> (String, String, Vec<WayOut>) {
        let Self { guest, this, other } = *self;
        let here = format!("{guest} runs on {this}, and waits for memory that {other} has lost");
        let then = format!("nothing: {guest} cannot go on without it");
        let alone = WayOut {
            run_on: Side::Destination,
            tell: this.to_owned(),
            needs_other_side: true,
            gives_up_missing: true,
            only_if: format!("{guest} is to be started again on {this}"),
            at_stake: format!(
                "what was in the memory of {guest} is lost, as if its power had failed: its QEMU \
                 is ended, and it can be started again"
            ),
        };
        (here, then, vec![alone])
    }

    /// The way out in which the guest continues at the source.
    fn stay(&self, source: &str, destination: &str, tell: &str) -> WayOut {
        let guest = self.guest;
        WayOut {
            run_on: Side::Source,
            tell: tell.to_owned(),
            needs_other_side: true,
            gives_up_missing: false,
            only_if: format!(
                "{destination} is off for good, or cut off from the disks and networks of {guest}, \
                 and {guest} never ran there"
            ),
            at_stake: format!(
                "{guest} continues on {source} from the moment at which it was stopped. If it ran \
                 on {destination} after all, what it did there is lost, and disks that it wrote to \
                 there no longer fit its memory: going on would damage its file systems"
            ),
        }
    }

    /// The way out in which the destination takes the guest.
    fn go(&self, source: &str, destination: &str) -> WayOut {
        let guest = self.guest;
        WayOut {
            run_on: Side::Destination,
            tell: destination.to_owned(),
            needs_other_side: true,
            gives_up_missing: false,
            only_if: format!(
                "{source} is off for good, or cut off from the disks and networks of {guest}, and \
                 does not run it"
            ),
            at_stake: format!(
                "{guest} continues on {destination} from the moment at which it was stopped. If it \
                 runs on {source} after all, two copies write to the same disks: its file systems \
                 would be damaged"
            ),
        }
    }
}

/// Returns the operator's decision as text for the journal.
pub(crate) fn because(other: &str, resolve: &Resolve) -> String {
    let state = resolve.other_side.map_or("given up", OtherSide::name);
    match &resolve.because {
        Some(because) => format!("{other} is {state}: {because}"),
        None => format!("{other} is {state}"),
    }
}

/// Refuses a resolution that does not apply, or that could make two copies run.
pub(crate) fn judge(migration: &Migration, resolve: &Resolve) -> Result<(), ApiError> {
    let words = Words::of(migration);
    let Words { guest, this, other } = words;
    let refuse =
        |text: String, hint: String| Err(ApiError::new(ErrorCode::Refused, text).hint(hint));
    if resolve
        .because
        .as_ref()
        .is_some_and(|text| text.chars().count() > BECAUSE_CHARS_MAX)
    {
        let text = format!("`because` is longer than {BECAUSE_CHARS_MAX} characters");
        return Err(ApiError::new(ErrorCode::InvalidRequest, text));
    }
    let Some(doubt) = &migration.doubt else {
        return Err(not_in_doubt(migration));
    };
    if doubt.record == HandoverRecord::Committed {
        return judge_giving_up(migration, resolve);
    }
    if resolve.give_up_missing {
        let text = format!("no blocks of {guest} are missing on {this}");
        return Err(ApiError::new(ErrorCode::InvalidRequest, text)
            .hint("leave out --give-up-missing (`give_up_missing`)"));
    }
    let left = doubt.record == HandoverRecord::Done;
    if left && resolve.run_on == Side::Destination {
        return refuse(
            format!("{guest} belongs to {other} already"),
            format!("on {other}: longhaul guests"),
        );
    }
    let took = doubt.other_record == Some(HandoverRecord::Committed);
    if took && !left && resolve.run_on == Side::Source {
        return refuse(
            format!("{other} has said that {guest} runs there: it cannot go on here"),
            format!("on {other}: longhaul guests"),
        );
    }
    if migration.side == Side::Source && resolve.run_on == Side::Destination {
        return refuse(
            format!("only {other} can begin to run {guest}, and has to be told so itself"),
            format!(
                "on {other}: longhaul resolve {} --run-on destination --other-side dead|fenced",
                migration.id
            ),
        );
    }
    if resolve.run_on == migration.side && resolve.other_side.is_none() {
        let text = format!("{guest} can run on {this} only when it cannot run on {other}");
        return Err(ApiError::new(ErrorCode::InvalidRequest, text).hint(format!(
            "make sure of it, and say so: --other-side dead ({other} is off for good) or \
             --other-side fenced (it is cut off from the disks and networks of {guest})"
        )));
    }
    Ok(())
}

/// Judges a resolution for a guest that runs here while blocks of its disks are at the source.
fn judge_giving_up(migration: &Migration, resolve: &Resolve) -> Result<(), ApiError> {
    let Words { guest, this, other } = Words::of(migration);
    let id = &migration.id;
    if resolve.run_on == Side::Source {
        let text = format!("{guest} runs on {this}: {other} cannot take it back from here");
        return Err(ApiError::new(ErrorCode::Refused, text).hint(format!(
            "on {other}: longhaul resolve {id} --run-on source --other-side dead|fenced"
        )));
    }
    if resolve.other_side.is_none() || !resolve.give_up_missing {
        let missing = missing(migration);
        let text = format!("{guest} on {this} still needs {other}, which has {missing}");
        return Err(ApiError::new(ErrorCode::InvalidRequest, text).hint(format!(
            "if {other} never comes back, say so, and that they are lost: longhaul resolve {id} \
             --run-on destination --other-side dead|fenced --give-up-missing"
        )));
    }
    Ok(())
}

fn not_in_doubt(migration: &Migration) -> ApiError {
    let Migration { id, guest, .. } = migration;
    let error = match (migration.outcome, migration.side) {
        (None, _) if migration.phase == Phase::Finishing => ApiError::new(
            ErrorCode::Refused,
            format!(
                "{guest} runs on {}, and the agents are connected: nothing is in doubt",
                migration.destination
            ),
        )
        .hint("wait for its end: `longhaul migrations` shows how much is missing"),
        (None, _) => ApiError::new(
            ErrorCode::Refused,
            format!("the move of {guest} is under way, and nothing is in doubt"),
        )
        .hint(format!("to stop it: longhaul cancel {id}")),
        (Some(longhaul_api::Outcome::Completed), _) => ApiError::new(
            ErrorCode::TooLate,
            format!(
                "{guest} has moved to {}: nothing is in doubt",
                migration.destination
            ),
        ),
        (Some(_), _) => ApiError::new(
            ErrorCode::TooLate,
            format!("the move of {guest} has ended: nothing is in doubt"),
        ),
    };
    match &migration.reason {
        Some(reason) if migration.outcome.is_some() => match &reason.state_of_guest {
            Some(state) => error.state_of_guest(state.clone()),
            None => error,
        },
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_api::{Asked, Outcome, Phase, Strategy};

    fn migration(side: Side, other_record: Option<HandoverRecord>) -> Migration {
        let record = match side {
            Side::Source => HandoverRecord::Released,
            Side::Destination => HandoverRecord::Ready,
        };
        in_record(side, record, other_record)
    }

    fn in_record(
        side: Side,
        record: HandoverRecord,
        other_record: Option<HandoverRecord>,
    ) -> Migration {
        let mut migration = Migration {
            id: "7f3a0c11d2e3f405".into(),
            guest: "web-7".into(),
            side,
            source: "lyon-1".into(),
            destination: "paris-2".into(),
            strategy: Strategy::Precopy,
            asked: Asked {
                downtime_ms: 300,
                bandwidth_bps: None,
                verify: false,
                patience_ms: 60_000,
                early_release: false,
                keep_memory: false,
                encoding: Default::default(),
                convergence: Default::default(),
                group: None,
            },
            started_unix_ms: 1,
            ended_unix_ms: None,
            phase: Phase::HandingOver,
            outcome: Some(Outcome::InDoubt),
            reason: None,
            doubt: None,
            progress: None,
        };
        let standing = Standing {
            record,
            generation: 5,
            since_unix_ms: 2,
            other_record,
            heard_unix_ms: None,
            asked: None,
            arbiter: None,
        };
        migration.doubt = Some(standing.doubt(&migration));
        migration
    }

    fn resolve(run_on: Side, other_side: Option<OtherSide>) -> Resolve {
        Resolve {
            run_on,
            other_side,
            give_up_missing: false,
            because: None,
        }
    }

    #[test]
    fn a_guest_that_left_is_taken_back_only_from_a_host_that_cannot_run_it() {
        let committed = Some(HandoverRecord::Committed);
        let left = in_record(Side::Source, HandoverRecord::Done, committed);
        let error = judge(&left, &resolve(Side::Source, None)).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidRequest);
        let dead = resolve(Side::Source, Some(OtherSide::Dead));
        assert_eq!(judge(&left, &dead), Ok(()));
        let there = resolve(Side::Destination, Some(OtherSide::Dead));
        assert_eq!(judge(&left, &there).unwrap_err().code, ErrorCode::Refused);
        let giving_up = Resolve {
            give_up_missing: true,
            ..dead
        };
        let error = judge(&left, &giving_up).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidRequest);
        let way = &left.doubt.unwrap().ways_out[0];
        assert!(way.at_stake.contains("did on paris-2 is lost"), "{way:?}");
    }

    #[test]
    fn missing_blocks_are_given_up_only_by_an_explicit_statement() {
        let runs = in_record(Side::Destination, HandoverRecord::Committed, None);
        let dead = resolve(Side::Destination, Some(OtherSide::Dead));
        let error = judge(&runs, &dead).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidRequest);
        assert!(error.hint.unwrap().contains("--give-up-missing"));
        let giving_up = |run_on, other_side| Resolve {
            give_up_missing: true,
            ..resolve(run_on, other_side)
        };
        let source = giving_up(Side::Source, Some(OtherSide::Dead));
        assert_eq!(judge(&runs, &source).unwrap_err().code, ErrorCode::Refused);
        let unasked = giving_up(Side::Destination, None);
        assert!(judge(&runs, &unasked).is_err());
        let said = giving_up(Side::Destination, Some(OtherSide::Fenced));
        assert_eq!(judge(&runs, &said), Ok(()));
    }

    #[test]
    fn whoever_is_to_run_the_guest_needs_the_other_side_dead_or_fenced() {
        for side in [Side::Source, Side::Destination] {
            let migration = migration(side, None);
            let error = judge(&migration, &resolve(side, None)).unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidRequest);
            assert!(error.hint.unwrap().contains("--other-side dead"));
            for other in [OtherSide::Dead, OtherSide::Fenced] {
                assert_eq!(judge(&migration, &resolve(side, Some(other))), Ok(()));
            }
        }
    }

    #[test]
    fn giving_up_is_safe_and_beginning_to_run_is_for_whoever_runs() {
        let waiting = migration(Side::Destination, None);
        assert_eq!(judge(&waiting, &resolve(Side::Source, None)), Ok(()));
        let released = migration(Side::Source, None);
        let there = resolve(Side::Destination, Some(OtherSide::Dead));
        let error = judge(&released, &there).unwrap_err();
        assert_eq!(error.code, ErrorCode::Refused);
        assert!(
            error
                .hint
                .unwrap()
                .starts_with("on paris-2: longhaul resolve")
        );
    }

    #[test]
    fn what_is_offered_is_accepted() {
        for side in [Side::Source, Side::Destination] {
            let migration = migration(side, None);
            let this = Words::of(&migration).this;
            let ways = &migration.doubt.as_ref().unwrap().ways_out;
            assert_eq!(ways.len(), 2);
            for way in ways.iter().filter(|way| way.tell == this) {
                let other = way.needs_other_side.then_some(OtherSide::Fenced);
                assert_eq!(
                    judge(&migration, &resolve(way.run_on, other)),
                    Ok(()),
                    "{way:?}"
                );
            }
        }
    }

    #[test]
    fn a_doubt_says_what_the_arbiter_has_answered() {
        let migration = migration(Side::Source, None);
        let holder = longhaul_protocol::HostId([7; 32]);
        let next = longhaul_protocol::Generation(5);
        for (answer, text) in [
            (Answer::Granted, "has given the guest back"),
            (
                Answer::Denied(next, holder),
                "paris-2 may have taken the guest",
            ),
            (
                Answer::None("it is not reached".to_owned()),
                "asked again: it is not reached",
            ),
        ] {
            let standing = Standing {
                record: HandoverRecord::Released,
                generation: 5,
                since_unix_ms: 2,
                other_record: None,
                heard_unix_ms: None,
                asked: None,
                arbiter: Some(arbiter("paris-2", &answer)),
            };
            let then = standing.doubt(&migration).then;
            assert!(then.contains(text), "{then}");
        }
    }

    #[test]
    fn what_the_other_side_has_said_stands() {
        let dead = Some(OtherSide::Dead);
        let took = migration(Side::Source, Some(HandoverRecord::Committed));
        let error = judge(&took, &resolve(Side::Source, dead)).unwrap_err();
        assert_eq!(error.code, ErrorCode::Refused);
        assert!(error.message.contains("runs there"), "{error}");
        let unheard = migration(Side::Source, Some(HandoverRecord::Ready));
        assert_eq!(judge(&unheard, &resolve(Side::Source, dead)), Ok(()));
    }

    #[test]
    fn what_is_not_in_doubt_is_not_resolved() {
        let mut done = migration(Side::Source, None);
        done.doubt = None;
        let stay = resolve(Side::Source, Some(OtherSide::Dead));
        for (outcome, code, text) in [
            (None, ErrorCode::Refused, "is under way"),
            (
                Some(Outcome::Completed),
                ErrorCode::TooLate,
                "has moved to paris-2",
            ),
            (Some(Outcome::Failed), ErrorCode::TooLate, "has ended"),
        ] {
            done.outcome = outcome;
            let error = judge(&done, &stay).unwrap_err();
            assert_eq!(error.code, code, "{error}");
            assert!(error.message.contains(text), "{error}");
        }
        let long = Resolve {
            because: Some("x".repeat(BECAUSE_CHARS_MAX + 1)),
            ..stay
        };
        let error = judge(&migration(Side::Source, None), &long).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidRequest);
    }
}
