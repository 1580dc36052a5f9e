//! What goes into the destination's end of an attempt, and what comes out of it.

use crate::source::Claimed;
use longhaul_engine::handover::{Commit, Record, Terms};
use longhaul_protocol::message::{ToDestination, ToSource};
use longhaul_protocol::{Attempt, Epoch, Generation, StoreId};
use std::time::Duration;

/// A message about the attempt itself. All other messages are about its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FromSource {
    /// The source has released the guest.
    Commit(Attempt, Commit),
    /// The source gives up.
    Cancel(String),
    /// The source's journal is complete.
    Done,
    /// An operator has given the guest to the source.
    Overruled(Generation),
    /// Both copies are equal.
    Verified,
    /// Does this host reach the arbiter with this store?
    Arbiter(StoreId),
}

impl FromSource {
    /// Returns the message about the attempt, unless this one is about content.
    pub fn of(message: &ToDestination) -> Option<Self> {
        Some(match message {
            ToDestination::Commit {
                attempt,
                generation,
            } => {
                let commit = Commit {
                    generation: *generation,
                    arbiter: None,
                };
                Self::Commit(*attempt, commit)
            }
            ToDestination::CommitWithLease {
                attempt,
                generation,
                store,
            } => {
                let commit = Commit {
                    generation: *generation,
                    arbiter: Some(*store),
                };
                Self::Commit(*attempt, commit)
            }
            ToDestination::Arbiter { store } => Self::Arbiter(*store),
            ToDestination::Cancel { reason } => Self::Cancel(reason.clone()),
            ToDestination::Done => Self::Done,
            ToDestination::Overruled { generation } => Self::Overruled(*generation),
            ToDestination::Verified => Self::Verified,
            _ => return None,
        })
    }
}

/// An input of the destination's end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A message of the source.
    Message(FromSource),
    /// The source is back over a new connection, with blocks of this epoch if it has some.
    Called(Option<Epoch>),
    /// The result of [`Action::Accept`].
    Accepted(bool),
    /// The connection is gone.
    Lost {
        /// What the source said, if it ended the connection on purpose.
        meant: Option<String>,
    },
    /// All frames of the last pass are applied.
    Everything,
    /// The result of [`Action::Load`].
    Loaded(Result<(), String>),
    /// What was received of the disks is durable, or cannot be made so.
    Settled(Result<(), String>),
    /// The base images of the disks are here, or cannot be had.
    BasesHere(Result<(), String>),
    /// The answer to [`Action::AskReady`].
    MayBeReady(Result<(), String>),
    /// The record is on disk.
    Written(Record),
    /// The record could not be written; it may be on disk nevertheless.
    WriteFailed(Record),
    /// The note is made, or has become wrong.
    Noted(Note),
    /// The note could not be made.
    NoteFailed(Note),
    /// QEMU was told to resume, and did or may have.
    Resumed,
    /// QEMU refused to resume, and the guest has not run.
    ResumeFailed(String),
    /// QEMU has ended and was reaped.
    QemuGone,
    /// All blocks are here, durably.
    AllPresent,
    /// Something here keeps blocks from being taken.
    FetchTrouble,
    /// An operator gives up the missing blocks: the source never comes back.
    GiveUpMissing(String),
    /// Something failed here, an operator cancels, or a limit is reached.
    GiveUp(String),
    /// An operator declares the source dead or fenced, and wants the guest to run here.
    Overrule(String),
    /// The answer to [`Action::CheckArbiter`].
    Arbiter(bool),
    /// The result of [`Action::Claim`].
    Claimed(Claimed),
}

/// A durable note of who may run the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// This host.
    Here(Generation),
    /// The source, as before the attempt.
    BackThere,
    /// The source, by an operator's decision.
    Conceded(Generation),
}

/// An action of the destination's end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Use the caller's connection for messages, instead of the one before.
    Take,
    /// Use the caller's connection for messages, and offer it one for blocks of this epoch, instead
    /// of those before; then report [`Event::Accepted`].
    Accept(Epoch),
    /// Tell the caller how far the attempt is, and end its connection.
    Decline,
    /// End the connection.
    Hangup,
    /// Send this.
    Send(ToSource),
    /// Tell the source that QEMU waits for the guest.
    SendAccepted,
    /// Tell the source which blocks are missing.
    SendMissing,
    /// Let QEMU load the rest of its state, then report [`Event::Loaded`].
    Load,
    /// Run the hook that may forbid READY, then report [`Event::MayBeReady`].
    AskReady,
    /// Report as [`Event::Arbiter`] whether the arbiter with this store is reached now.
    CheckArbiter(StoreId),
    /// Ask the arbiter with this store for the lease of the next generation, for a limited time;
    /// then report [`Event::Claimed`].
    Claim(StoreId),
    /// Make this record durable, then report [`Event::Written`] or [`Event::WriteFailed`].
    Write(Record),
    /// Note this durably, then report [`Event::Noted`] or [`Event::NoteFailed`].
    Note(Note),
    /// Resume the guest, then report [`Event::Resumed`] or [`Event::ResumeFailed`].
    Resume,
    /// Quit QEMU if it runs, remove what belongs to it, then report [`Event::QemuGone`].
    Quit,
    /// The guest runs here, and blocks of its disks are missing: fetch them, then report
    /// [`Event::AllPresent`].
    Fetch,
    /// Missing blocks become zeros, durably; then report [`Event::AllPresent`].
    FillMissing,
    /// Show that only the source knows where the guest runs.
    ShowDoubt,
    /// Both journals are complete: remove this one and tell the source so. It is the last action.
    Finish,
}

/// What the destination's end is told when it begins.
#[derive(Debug, Clone)]
pub struct Config {
    /// The terms of the attempt.
    pub terms: Terms,
    /// How long the source may be gone.
    pub patience: Duration,
    /// Whether READY must come after [`FromSource::Verified`].
    pub verify: bool,
    /// Whether blocks of the disks may be missing when the guest runs here.
    pub fetches: bool,
    /// Whether base images have to arrive before the guest can be accepted.
    pub awaits_bases: bool,
}
