//! What goes into the source's end of an attempt, and what comes out of it.

use longhaul_engine::handover::{Record, Terms};
use longhaul_protocol::message::{AttemptState, ToDestination, ToSource};
use longhaul_protocol::{Attempt, Epoch, Generation, StoreId};
use std::time::Duration;

/// A message about the attempt itself. All other messages are about its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FromDestination {
    /// Its QEMU waits for the guest.
    Accepted,
    /// It could not launch its QEMU, and has ended the attempt.
    Refused(String),
    /// It has all data.
    Ready(Attempt),
    /// It has committed.
    Committed(Attempt),
    /// It has committed, and needs no more data.
    AllPresent(Attempt),
    /// It has aborted, durably.
    Aborted(Attempt, String),
    /// It has done neither.
    Status(AttemptState),
    /// Its journal is complete.
    Closed,
    /// Whether it reaches the arbiter.
    Arbiter(bool),
}

impl FromDestination {
    /// Returns the message about the attempt, unless this one is about content.
    pub fn of(message: &ToSource) -> Option<Self> {
        Some(match message {
            ToSource::Accepted { .. } => Self::Accepted,
            ToSource::Refused(refusal) => Self::Refused(refusal.text.clone()),
            ToSource::Ready { attempt } => Self::Ready(*attempt),
            ToSource::Committed { attempt } => Self::Committed(*attempt),
            ToSource::AllPresent { attempt } => Self::AllPresent(*attempt),
            ToSource::Aborted { attempt, reason } => Self::Aborted(*attempt, reason.clone()),
            ToSource::Status { state, .. } => Self::Status(*state),
            ToSource::Closed => Self::Closed,
            ToSource::Arbiter { reached } => Self::Arbiter(*reached),
            _ => return None,
        })
    }
}

/// Why no connection was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DialError {
    /// The host cannot be reached, or did not answer.
    Unreachable,
    /// Another try ends in the same way until an operator changes something.
    Refused(String),
    /// The host has other journals than those that the attempt was offered to.
    OtherJournals,
    /// It answered that the attempt is aborted there, durably.
    Aborted(String),
    /// It answered that the guest is committed there.
    Committed {
        /// Whether it needs no more data.
        all_present: bool,
    },
    /// Something here keeps the data from being sent.
    Local,
}

/// An input of the source's end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A message of the destination.
    Message(FromDestination),
    /// The connection of [`Action::Dial`] exists, and this is the destination's answer to Resume.
    /// A destination that has all data takes no connection for blocks.
    Connected {
        /// The connection for blocks, if there is one.
        epoch: Option<Epoch>,
        /// How far the destination is, if it has said so.
        state: Option<AttemptState>,
    },
    /// The connection of [`Action::Dial`] could not be made.
    DialFailed(DialError),
    /// The connection is gone.
    Lost,
    /// The connection is not usable for the data that follows.
    Reconnect,
    /// QEMU has stopped the guest; the rest of its state has been given to the sender.
    Stopped,
    /// The answer to [`Action::AskRelease`].
    MayRelease(Result<(), String>),
    /// Both copies have been compared and are equal.
    Verified,
    /// The record is on disk.
    Written(Record),
    /// The record could not be written; it may be on disk nevertheless.
    WriteFailed(Record),
    /// The note is made, or has become wrong.
    Noted(Note),
    /// The note could not be made.
    NoteFailed(Note),
    /// The guest runs here again, is paused on purpose, or is no longer here.
    Resumed,
    /// The guest could not be resumed.
    ResumeFailed,
    /// Something failed here, an operator cancels, or a limit is reached.
    GiveUp(String),
    /// An operator declares the destination dead or fenced, and wants the guest to run here.
    Overrule(String),
    /// Whether this host reaches the arbiter now. Reported before the guest is released.
    Arbiter(bool),
    /// The result of [`Action::Claim`].
    Claimed(Claimed),
}

/// The arbiter's answer to the question for the lease of the next generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claimed {
    /// This host has it.
    Granted,
    /// Another host has it, for ever.
    Denied,
    /// There was no answer. This host may have the lease nevertheless.
    Unanswered,
}

/// A durable note of who may run the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// Nobody here: the guest may run at the destination.
    InDoubt(Generation),
    /// The destination.
    There(Generation),
    /// The destination, by an operator's decision.
    Conceded(Generation),
    /// This host, as before the attempt.
    BackHere,
    /// This host, in a new generation.
    Here(Generation),
}

/// An action of the source's end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Connect, then report [`Event::Connected`] or [`Event::DialFailed`].
    Dial {
        /// Come back with a connection for blocks of this epoch; otherwise only ask.
        epoch: Option<Epoch>,
        /// Whether other journals than those of the offer may answer.
        any_journals: bool,
    },
    /// End the connection, or the try to make one.
    Hangup,
    /// Send this.
    Send(ToDestination),
    /// Send blocks over the connection, after all that a destination must know before them.
    SendBlocks,
    /// The guest runs at the destination: send the rest of its disks as the destination asks for
    /// it, over a connection for blocks, if it is one.
    Drain,
    /// Send no more blocks: no write of the guest waits for the destination.
    StopBlocks,
    /// Run the hook that may forbid the release, then report [`Event::MayRelease`].
    AskRelease,
    /// Make this record durable, then report [`Event::Written`] or [`Event::WriteFailed`].
    Write(Record),
    /// Note this durably, then report [`Event::Noted`] or [`Event::NoteFailed`].
    Note(Note),
    /// Resume the guest, then report [`Event::Resumed`] or [`Event::ResumeFailed`].
    Resume,
    /// Quit QEMU: the guest runs at the destination, which has all data.
    Quit,
    /// Remember why the attempt fails, unless an earlier reason is known.
    Because(Cause),
    /// Show that only the destination knows where the guest runs.
    ShowDoubt,
    /// Ask the arbiter with this store for the lease of the next generation, if the stopped guest
    /// is still here in its QEMU; then report [`Event::Claimed`].
    Claim(StoreId),
    /// Both journals are complete: remove this one. It is the last action.
    Finish,
}

/// Why an attempt fails, as far as this type knows it first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// The destination gave up.
    Peer(String),
    /// The destination could not launch its QEMU.
    Refused(String),
    /// The destination broke the protocol.
    Protocol(&'static str),
    /// The connection did not come back in time.
    LinkCut {
        /// How long it was gone.
        silent: Duration,
        /// Whether the guest was stopped.
        stopped: bool,
    },
    /// There is no coming back.
    Dial(DialError),
    /// The destination did not launch its QEMU in time.
    NotLaunched,
    /// A hook or an operator.
    Told(String),
    /// The agent was restarted when the destination still waited for blocks.
    Restarted,
    /// The arbiter is required, and is not reached from both hosts.
    NoArbiter,
}

/// What the source's end is told when it begins.
#[derive(Debug, Clone)]
pub struct Config {
    /// The terms of the attempt.
    pub terms: Terms,
    /// How long a connection may be gone while the guest runs.
    pub patience: Duration,
    /// How long the guest may be stopped without a connection.
    pub downtime: Duration,
    /// How long the destination gets to launch its QEMU; none where it may wait for base images.
    pub launch_within: Option<Duration>,
    /// Whether READY must come after [`Event::Verified`].
    pub verify: bool,
    /// Whether some of the disks' content may be needed from here after the commit.
    pub drains: bool,
    /// The arbiter's store, if this host reached it when the attempt began.
    pub arbiter: Option<StoreId>,
    /// Whether the guest may only be released to an arbiter.
    pub requires_arbiter: bool,
}
