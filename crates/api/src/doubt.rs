//! Defines a migration whose agents have lost each other: what is known until they connect again,
//! and how an operator ends it.

use crate::migration::Side;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What one side of a migration has written down last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HandoverRecord {
    /// It takes part, and may end the attempt by itself.
    Began,
    /// Destination: everything is here and loaded; only the source's word is missing.
    Ready,
    /// Source: the guest is given away; only the destination's word gives it back.
    Released,
    /// Destination: the guest belongs here.
    Committed,
    /// Source: the destination has committed, and has yet to say that it has everything.
    Done,
    /// The attempt is over, and the guest stays at the source.
    Aborted,
}

impl HandoverRecord {
    /// Returns its name in the journal and for display.
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

/// What is known of a migration that needs the other host, which does not answer, and the ways out.
/// Before DONE at the source and COMMITTED at the destination it is in doubt where the guest runs.
/// From then on it runs at the destination, which needs blocks of the source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Doubt {
    /// Since when it needs the other host, in milliseconds since 1970.
    pub since_unix_ms: u64,
    /// What this host has written down last.
    pub record: HandoverRecord,
    /// The generation that the right to run has with the destination.
    pub generation: u64,
    /// The other host's name here.
    pub other_host: String,
    /// What the other host was last known to have written down; null where nothing was heard.
    pub other_record: Option<HandoverRecord>,
    /// When it was heard of last, in milliseconds since 1970.
    pub heard_unix_ms: Option<u64>,
    /// Whether it answered when it was asked last; null before it was.
    pub reachable: Option<bool>,
    /// Why it did not answer.
    pub unreachable_because: Option<String>,
    /// When it was asked last, in milliseconds since 1970.
    pub asked_unix_ms: Option<u64>,
    /// How the guest is here.
    pub here: String,
    /// What happens by itself, and when.
    pub then: String,
    /// What a person can do where that cannot come to pass.
    pub ways_out: Vec<WayOut>,
}

/// Something that an operator can do about a migration whose other host does not answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WayOut {
    /// The side that would run the guest.
    pub run_on: Side,
    /// The host whose agent is to be told so.
    pub tell: String,
    /// Whether the other side must be named dead or fenced.
    pub needs_other_side: bool,
    /// Whether it must be said that missing blocks of disks are given up.
    #[serde(default)]
    pub gives_up_missing: bool,
    /// What must be true before.
    pub only_if: String,
    /// What is lost by it, and what breaks where it was not true.
    pub at_stake: String,
}

/// Why the other side cannot run the guest, in the word of a person who knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OtherSide {
    /// Its host is off, and its agent and QEMU do not come back with what they knew.
    Dead,
    /// Its host may run, and is cut off from the guest's disks and networks until its copy of the
    /// guest was ended.
    Fenced,
}

impl OtherSide {
    /// Returns its name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dead => "dead",
            Self::Fenced => "fenced",
        }
    }
}

/// How a person ends a doubt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Resolve {
    /// The side that runs the guest from now on.
    pub run_on: Side,
    /// Why the other side cannot run it. Needed where this host is to run it, as only that makes
    /// sure that no two copies do.
    #[serde(default)]
    pub other_side: Option<OtherSide>,
    /// Whether the blocks of the guest's disks that are still at the source are given up: they read
    /// as zeros from now on. Needed at a destination that runs the guest already, and wrong
    /// everywhere else.
    #[serde(default)]
    pub give_up_missing: bool,
    /// The reason, for the journal: 500 characters at most.
    #[serde(default)]
    pub because: Option<String>,
}

/// The maximum length of the reason of a [`Resolve`], in characters.
pub const BECAUSE_CHARS_MAX: usize = 500;
