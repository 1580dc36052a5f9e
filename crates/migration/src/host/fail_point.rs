//! Fail points: points at which tests make an agent fail. There is one before and after each
//! record, before each message is sent and after it is received, when QEMU has converged by itself,
//! and while a guest's memory is cached.
//!
//! They are armed only by the environment, which is read once when the agent starts:
//! `LONGHAUL_FAIL_POINT=POINT=ACTION[,POINT=ACTION...]`. `longhaul agent --list-fail-points` prints
//! the points. Each fires once. The names come from exhaustive matches, so a new record or message
//! must get its points.

use crate::host::start_error::StartError;
use longhaul_engine::handover::{Record, Side};
use longhaul_protocol::message::{ToDestination, ToSource};
use longhaul_protocol::replica::{FromReplica, ToReplica};
use longhaul_protocol::terminal::{FromTerminal, ToTerminal};
use longhaul_storage::{Journal, JournalError};
use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use tokio::task::block_in_place;

/// The variable that arms fail points.
const VARIABLE: &str = "LONGHAUL_FAIL_POINT";
/// QEMU has completed its migration before it was told to stop the guest. An agent that is armed at
/// this point makes QEMU do so.
const CONVERGED: &str = "converged";
/// A part of the memory of a guest that has left is in its file.
const MEMORY: &str = "memory";
/// Interval at which a held agent checks whether it may continue.
const LOOK_EVERY: Duration = Duration::from_millis(2);

static ARMED: OnceLock<Vec<Armed>> = OnceLock::new();

/// A kind of message with named fail points.
pub(crate) trait Named {
    /// Returns the name in the fail points.
    fn name(&self) -> &'static str;
    /// The side that sends it.
    const SENDER: Side;
}

macro_rules! named {
    (
        $kind:ident in $list:ident by $function:ident:
        $($variant:ident $name:literal [$($side:ident)*],)+
    ) => {
        const $list: &[(&str, &[Side])] = &[$(($name, &[$(Side::$side),*])),+];

        fn $function(of: &$kind) -> &'static str {
            match of {
                $($kind::$variant { .. } => $name),+
            }
        }
    };
}

named! { Record in RECORDS by record_name:
    Began "began" [Source Destination],
    Ready "ready" [Destination],
    Released "released" [Source],
    Committed "committed" [Destination],
    Done "done" [Source],
    Aborted "aborted" [Source Destination],
    Returned "returned" [Destination],
    AllPresent "all-present" [Destination],
    Overruled "overruled" [Source Destination],
    Closed "closed" [Source Destination],
    // Written with BEGAN. These have no points of their own.
    Peer "peer" [],
    Incomplete "incomplete" [],
    // Written only by an operator's decision.
    GaveUp "gave-up" [Destination],
    // It uses the points of the record that it extends.
    ReleasedToArbiter "released" [],
}

named! { ToDestination in TO_DESTINATION by to_destination_name:
    Query "query" [Source],
    Offer "offer" [Source],
    Resume "resume" [Source],
    Ask "ask" [Source],
    Start "start" [Source],
    Complete "complete" [Source],
    VerifyRegion "verify-region" [Source],
    Verified "verified" [Source],
    Commit "commit" [Source],
    Cancel "cancel" [Source],
    Done "done" [Source],
    Overruled "overruled" [Source],
    OfferDisks "offer-disks" [Source],
    List "list" [Source],
    Unreadable "unreadable" [Source],
    Length "length" [Source],
    // These use the points of the messages that they extend: see `name`.
    QueryFiles "query" [],
    OfferFiles "offer" [],
    QueryPorts "query" [],
    OfferPorts "offer" [],
    // No guest of the crash matrix has a card.
    HeldFrames "held-frames" [],
    Flows "flows" [],
    // The crash matrix has no arbiter.
    Arbiter "arbiter" [],
    CommitWithLease "commit" [],
    // Only a plan asks this, and no guest depends on the answer.
    QueryKnown "query-known" [],
    // Replicas have tests of their own.
    Replicate "replicate" [],
    // Terminals have tests of their own.
    ParcelDevice "parcel-device" [],
    // No guest of the crash matrix is another program's.
    Departed "departed" [],
}

named! { ToSource in TO_SOURCE by to_source_name:
    Answer "answer" [Destination],
    Accepted "accepted" [Destination],
    Refused "refused" [Destination],
    Resumed "resumed" [Destination],
    Loaded "loaded" [Destination],
    Digests "digests" [Destination],
    Ready "ready" [Destination],
    Committed "committed" [Destination],
    Aborted "aborted" [Destination],
    Status "status" [Destination],
    Summary "summary" [Destination],
    AllPresent "all-present" [Destination],
    Closed "closed" [Destination],
    Clock "clock" [Destination],
    Launching "launching" [Destination],
    Missing "missing" [Destination],
    Want "want" [Destination],
    Superseded "superseded" [Destination],
    WantContent "want-content" [Destination],
    // It uses the point of the message that it extends.
    AnswerLacking "answer" [],
    Arbiter "arbiter" [],
    Known "known" [],
    Loading "loading" [Destination],
    Faults "faults" [Destination],
    Used "used" [Destination],
    Rate "rate" [Destination],
    // No guest of the crash matrix is another program's.
    Prepared "prepared" [],
}

impl Named for ToDestination {
    const SENDER: Side = Side::Source;

    fn name(&self) -> &'static str {
        match self {
            Self::OfferFiles(offered) if !offered.offer.disks.is_empty() => "offer-disks",
            Self::OfferPorts(offered) if !offered.offered.offer.disks.is_empty() => "offer-disks",
            other => to_destination_name(other),
        }
    }
}

impl Named for ToSource {
    const SENDER: Side = Side::Destination;

    fn name(&self) -> &'static str {
        to_source_name(self)
    }
}

/// Messages about replicas have no fail points: replicas have tests of their own.
impl Named for ToReplica {
    const SENDER: Side = Side::Source;

    fn name(&self) -> &'static str {
        "to-replica"
    }
}

impl Named for FromReplica {
    const SENDER: Side = Side::Destination;

    fn name(&self) -> &'static str {
        "from-replica"
    }
}

/// Messages about devices have no fail points: terminals have tests of their own.
impl Named for ToTerminal {
    const SENDER: Side = Side::Source;

    fn name(&self) -> &'static str {
        "to-terminal"
    }
}

impl Named for FromTerminal {
    const SENDER: Side = Side::Destination;

    fn name(&self) -> &'static str {
        "from-terminal"
    }
}

/// The moment of a fail point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    BeforeRecord,
    AfterRecord,
    BeforeSend,
    AfterReceipt,
    Stopping,
    Keeping,
}

impl When {
    fn name(self) -> &'static str {
        match self {
            Self::BeforeRecord => "before-record",
            Self::AfterRecord => "after-record",
            Self::BeforeSend => "before-send",
            Self::AfterReceipt => "after-receipt",
            Self::Stopping => "stopping",
            Self::Keeping => "keeping",
        }
    }
}

fn side_name(side: Side) -> &'static str {
    match side {
        Side::Source => "source",
        Side::Destination => "destination",
    }
}

fn other(side: Side) -> Side {
    match side {
        Side::Source => Side::Destination,
        Side::Destination => Side::Source,
    }
}

fn point(side: Side, when: When, what: &str) -> String {
    format!("{}:{}:{what}", side_name(side), when.name())
}

/// Returns every fail point.
pub fn all() -> Vec<String> {
    let mut points = Vec::new();
    for (name, sides) in RECORDS {
        for side in *sides {
            points.push(point(*side, When::BeforeRecord, name));
            points.push(point(*side, When::AfterRecord, name));
        }
    }
    for (name, senders) in TO_DESTINATION.iter().chain(TO_SOURCE) {
        for sender in *senders {
            points.push(point(*sender, When::BeforeSend, name));
            points.push(point(other(*sender), When::AfterReceipt, name));
        }
    }
    points.push(point(Side::Source, When::Stopping, CONVERGED));
    points.push(point(Side::Source, When::Keeping, MEMORY));
    points
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Action {
    /// Do nothing.
    Pass,
    /// Kill this process at once, as a crash would.
    Kill,
    /// Report that the record could not be written: instead of writing it, or after writing it.
    Fail,
    /// Close the connection, as a loss of the link would.
    Disconnect,
    /// Create this file, and continue when it has been removed.
    Hold(PathBuf),
}

#[derive(Debug)]
struct Armed {
    point: String,
    action: Action,
    fired: AtomicBool,
}

/// Arms the points that the environment names. An agent does not start with an unknown point.
pub fn arm() -> Result<(), StartError> {
    let text = std::env::var(VARIABLE).unwrap_or_default();
    let armed = parse(&text).map_err(|error| {
        StartError::new(format!("{VARIABLE}: {error}")).hint(
            "`longhaul agent --list-fail-points` lists them; unset it for an agent that works",
        )
    })?;
    for armed in &armed {
        tracing::warn!(point = armed.point, action = ?armed.action, "this agent is made to fail");
    }
    ARMED.get_or_init(|| armed);
    Ok(())
}

fn parse(text: &str) -> Result<Vec<Armed>, String> {
    let known = all();
    let one = |text: &str| {
        let (point, action) = text
            .split_once('=')
            .ok_or_else(|| format!("`{text}` is not POINT=ACTION"))?;
        let of_record = point.contains("-record:");
        let of_message = point.contains(":before-send:") || point.contains(":after-receipt:");
        let action = match action.split_once(':') {
            None if action == "pass" => Action::Pass,
            None if action == "kill" => Action::Kill,
            None if action == "fail" && of_record => Action::Fail,
            None if action == "disconnect" && of_message => Action::Disconnect,
            Some(("hold", file)) if file.starts_with('/') => Action::Hold(file.into()),
            _ => return Err(format!("there is no action `{action}` at `{point}`")),
        };
        if !known.iter().any(|known| known == point) {
            return Err(format!("there is no point `{point}`"));
        }
        Ok(Armed {
            point: point.to_owned(),
            action,
            fired: AtomicBool::new(false),
        })
    };
    text.split(',')
        .filter(|text| !text.is_empty())
        .map(one)
        .collect()
}

/// What the caller has to do after a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Passed {
    Through,
    Fail,
    Disconnect,
}

fn pass(side: Side, when: When, what: &str) -> Passed {
    let Some(armed) = ARMED.get().filter(|armed| !armed.is_empty()) else {
        return Passed::Through;
    };
    let point = point(side, when, what);
    let fires = |armed: &&Armed| armed.point == point && !armed.fired.swap(true, Ordering::SeqCst);
    let Some(armed) = armed.iter().find(fires) else {
        return Passed::Through;
    };
    tracing::warn!(point, "fail point fires");
    match &armed.action {
        Action::Kill => {
            let killed = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
            tracing::error!(?killed, point, "still here");
            std::process::abort();
        }
        Action::Pass => Passed::Through,
        Action::Fail => Passed::Fail,
        Action::Disconnect => Passed::Disconnect,
        Action::Hold(file) => {
            if let Err(error) = File::create(file) {
                tracing::error!(%error, point, "cannot be held");
            }
            block_in_place(|| {
                while fs::exists(file).unwrap_or(false) {
                    thread::sleep(LOOK_EVERY);
                }
            });
            Passed::Through
        }
    }
}

/// Writes a record durably. Every record of the agent is written here.
pub(crate) fn append(journal: &mut Journal, record: &Record) -> Result<(), JournalError> {
    let side = side_of(journal, record);
    let name = record_name(record);
    let failed = |journal: &Journal| JournalError::Io {
        what: "write",
        path: journal.path().to_owned(),
        source: io::Error::other("a fail point"),
    };
    if pass(side, When::BeforeRecord, name) == Passed::Fail {
        return Err(failed(journal));
    }
    journal.append(record)?;
    match pass(side, When::AfterRecord, name) {
        Passed::Fail => Err(failed(journal)),
        Passed::Through | Passed::Disconnect => Ok(()),
    }
}

/// Returns the side that a journal belongs to. Only a destination writes about an attempt that it
/// does not know.
fn side_of(journal: &Journal, record: &Record) -> Side {
    let began = |record: &Record| match record {
        Record::Began { side, .. } => Some(*side),
        _ => None,
    };
    began(record)
        .or_else(|| journal.records().iter().rev().find_map(began))
        .unwrap_or(Side::Destination)
}

/// Returns whether QEMU must be made to complete by itself.
pub(crate) fn is_armed_at_convergence() -> bool {
    let point = || point(Side::Source, When::Stopping, CONVERGED);
    ARMED.get().is_some_and(|armed| {
        let waits = |armed: &Armed| !armed.fired.load(Ordering::SeqCst) && armed.point == point();
        armed.iter().any(waits)
    })
}

/// Passes the point at which QEMU has completed by itself.
pub(crate) fn after_convergence() {
    pass(Side::Source, When::Stopping, CONVERGED);
}

/// Passes the point at which a guest's memory is being cached.
pub(crate) fn keeping() {
    pass(Side::Source, When::Keeping, MEMORY);
}

/// Passes the point before a message is sent. Returns whether to close the connection.
pub(crate) fn before_send<M: Named>(message: &M) -> bool {
    pass(M::SENDER, When::BeforeSend, message.name()) == Passed::Disconnect
}

/// Passes the point after a message was received. Returns whether to close the connection.
pub(crate) fn after_receipt<M: Named>(message: &M) -> bool {
    pass(other(M::SENDER), When::AfterReceipt, message.name()) == Passed::Disconnect
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::path::Path;

    #[test]
    fn every_point_has_a_name_of_its_own() {
        let points = all();
        let different: HashSet<&String> = points.iter().collect();
        assert_eq!(points.len(), different.len());
        assert!(points.contains(&"source:before-record:released".to_owned()));
        assert!(points.contains(&"destination:after-receipt:commit".to_owned()));
        assert!(!points.contains(&"source:before-record:committed".to_owned()));
    }

    #[test]
    fn what_is_not_understood_is_named() {
        let armed =
            parse("source:after-record:released=kill,source:before-send:commit=hold:/x").unwrap();
        assert_eq!(armed.len(), 2);
        assert_eq!(armed[1].action, Action::Hold("/x".into()));
        assert!(parse("").unwrap().is_empty());
        for (text, named) in [
            (
                "source:before-record:rest=kill",
                "source:before-record:rest",
            ),
            ("source:before-record:done=sing", "sing"),
            ("source:before-record:done=disconnect", "disconnect"),
            ("source:before-send:done=fail", "fail"),
            ("source:before-send:done", "POINT=ACTION"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
    }

    /// A record that is written elsewhere would have no fail points.
    #[test]
    fn records_are_written_only_here() {
        fn look(folder: &Path, found: &mut Vec<String>) {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    look(&path, found);
                } else if !path.ends_with("fail_point.rs") {
                    let text: String = fs::read_to_string(&path)
                        .unwrap()
                        .split_whitespace()
                        .collect();
                    if text.contains("journal.append(") {
                        found.push(path.display().to_string());
                    }
                }
            }
        }
        let mut found = Vec::new();
        look(
            &Path::new(env!("CARGO_MANIFEST_DIR")).join("src"),
            &mut found,
        );
        assert_eq!(found, Vec::<String>::new(), "use fail_point::append");
    }
}
