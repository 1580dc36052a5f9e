//! Defines a migration whose agents cannot connect: what is known of it, and how an operator
//! resolves it.

use crate::migration::Side;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The last decisive record of one side of a migration, in its journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HandoverRecord {
    /// The attempt has begun. This host may abort it on its own.
    Began,
    /// Destination: the guest is loaded, and waits for the source's release.
    Ready,
    /// Source: the guest is released. It continues here only if the destination has aborted.
    Released,
    /// Destination: the guest belongs to this host.
    Committed,
    /// Source: the destination has committed, and has not confirmed yet that no block is missing.
    Done,
    /// The attempt has ended, and the guest stays at the source.
    Aborted,
}

impl HandoverRecord {
    /// Returns the name in the journal and for display.
    pub fn name(self) -> &'static str {
        match self {
            Self::Began => "BEGAN",
            Self::Ready => "READY",
            Self::Released => "RELEASED",
            Self::Committed => "COMMITTED",
            Self::Done => "DONE",
            Self::Aborted => "ABORTED",
        }
    }
}

/// The state of a migration that needs the other host, which does not answer, and the possible
/// decisions. Before `done` at the source and `committed` at the destination, it is in doubt where
/// the guest runs. After that, the guest runs at the destination, which may need blocks from the
/// source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Doubt {
    /// Time since when this host needs the other one, in milliseconds since 1970.
    pub since_unix_ms: u64,
    /// Last record of this host.
    pub record: HandoverRecord,
    /// Generation of the right to run the guest, if the destination gets it.
    pub generation: u64,
    /// Name of the other host, as it is trusted here.
    pub other_host: String,
    /// Last known record of the other host; null if none is known.
    pub other_record: Option<HandoverRecord>,
    /// Time of the other host's last sign, in milliseconds since 1970; null without one.
    pub heard_unix_ms: Option<u64>,
    /// Whether the other host answered the last question; null before the first.
    pub reachable: Option<bool>,
    /// Reason why the other host did not answer; null if it did.
    pub unreachable_because: Option<String>,
    /// Time of the last question to the other host, in milliseconds since 1970; null before the
    /// first.
    pub asked_unix_ms: Option<u64>,
    /// State of the guest on this host, as text.
    pub here: String,
    /// Next step without an operator's decision, and its condition, as text.
    pub then: String,
    /// Decisions that an operator can make if the other host never returns.
    pub ways_out: Vec<WayOut>,
}

/// A decision that an operator can make about a migration if the other host does not answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WayOut {
    /// Side that would run the guest.
    pub run_on: Side,
    /// Host whose agent must get the decision.
    pub tell: String,
    /// Whether the request must have `other_side`.
    pub needs_other_side: bool,
    /// Whether the request must have `give_up_missing`: missing blocks of disks are lost.
    #[serde(default)]
    pub gives_up_missing: bool,
    /// Condition that must hold before the decision, as text.
    pub only_if: String,
    /// What the decision loses, and the damage if the condition does not hold, as text.
    pub at_stake: String,
}

/// The reason why the other side cannot run the guest. The operator vouches for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OtherSide {
    /// The other host is off. Its agent and its QEMU never return with their state.
    Dead,
    /// The other host may be on. It is cut off from the guest's disks and networks until its copy
    /// of the guest has ended.
    Fenced,
}

impl OtherSide {
    /// Returns the name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dead => "dead",
            Self::Fenced => "fenced",
        }
    }
}

/// An operator's decision about a migration whose `doubt` is not null.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Resolve {
    /// Side that runs the guest from now on.
    pub run_on: Side,
    /// Reason why the other side cannot run the guest. Required if `run_on` is this host's side: it
    /// ensures that no two copies run.
    #[serde(default)]
    pub other_side: Option<OtherSide>,
    /// Whether missing blocks of the guest's disks are given up: they read as zeros from then on
    /// (default `false`). Required at a destination that already runs the guest, and an error
    /// everywhere else.
    #[serde(default)]
    pub give_up_missing: bool,
    /// Reason, for the journal: at most 500 characters.
    #[serde(default)]
    pub because: Option<String>,
}

/// Maximum length of the reason of a [`Resolve`], in characters.
pub const BECAUSE_CHARS_MAX: usize = 500;
