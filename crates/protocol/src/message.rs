//! The messages of a migration, as the two agents exchange them on a channel.
//!
//! ```text
//! source                                   destination
//!   Offer ------------------------------->   checks
//!   <--------------------- Launching | Refused
//!   Start(prelude) ---------------------->   starts QEMU with -incoming; what comes meanwhile waits
//!   <---------------------- Accepted | Refused
//!   ==== frames of blocks (bulk) ========>   decoded into the guest's RAM
//!   <=== Acknowledgement (bulk) ==========
//!   === pieces of Early (bulk) ==========>   what will seldom change until the end
//!   (guest stopped)
//!   === pieces of DeviceState (bulk) ====>
//!   Complete(epoch, frames) ------------->   all frames applied: QEMU loads
//!   <------------------------------ Loaded
//!   [VerifyRegion -> Digests]*, Verified     only where it was asked for
//!   <------------------------------- Ready   journal: READY
//!   (journal: RELEASED)
//!   Commit ------------------------------>   journal: COMMITTED, the guest runs
//!   <--------------------------- Committed
//!   (journal: DONE)                          nothing is needed of the source: journal: ALL-PRESENT
//!   <-------------------------- AllPresent
//!   (QEMU quit; journal: CLOSED)
//!   Done -------------------------------->   journal: CLOSED
//!   <------------------------------ Closed
//! ```
//!
//! With an early release, RELEASED is written and `Commit` sent when the guest is stopped; Ready is
//! left out, and the guest runs as soon as everything is there.
//!
//! A guest whose disks move with it is offered by `OfferDisks`; `Length` of images that grow, and parts of
//! `List`, come before each `Complete`. From `Committed` on frames bring what the lists name, and the
//! destination says `Missing`, `Want` and `Superseded`, until `AllPresent`; the source says `Unreadable`. That
//! is over connections of their own, which begin with `Resume`. Where it was asked for, what came is compared before
//! `AllPresent`: `VerifyRegion`, which is answered when all is there, and `Verified` once more.
//!
//! A guest of which files do not move with it (shared disks, firmware, kernels) is asked about by
//! `QueryFiles` and offered by `OfferFiles`: each file is proved to be the same at both hosts.
//!
//! `Cancel` and `Aborted` may come at any moment that the hand-over allows. After a lost
//! connection the source opens a new channel with `Resume`, or with `Ask` when all it wants to
//! know is what became of an attempt.

use crate::disk::{List, Missing, OfferedDisk};
use crate::files::FileClaim;
use crate::guest::GuestDescription;
use crate::machine::Machine;
use crate::{Attempt, BlockRange, Epoch, Generation, MigrationId, RegionId, RegionSpec};
use serde::{Deserialize, Serialize};

/// What the source's agent says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToDestination {
    /// Could this guest run here? Needs the scope *query*.
    Query(Box<Query>),
    /// Take this guest. Needs the scope *send guests*.
    Offer(Box<Offer>),
    /// Go on with an attempt over a new connection.
    Resume {
        /// The migration.
        migration: MigrationId,
        /// Its attempt.
        attempt: Attempt,
        /// The number of the new connection.
        epoch: Epoch,
    },
    /// What became of this attempt? An attempt that is not known is aborted by being asked for.
    Ask {
        /// The migration.
        migration: MigrationId,
        /// Its attempt.
        attempt: Attempt,
    },
    /// QEMU's stream up to and including its list of RAM blocks, byte for byte.
    Start {
        /// The bytes.
        prelude: Vec<u8>,
    },
    /// Everything has been sent: load when so many frames of this connection are applied, and all
    /// pieces are here.
    Complete {
        /// The connection.
        epoch: Epoch,
        /// Frames sent on it.
        frames: u64,
        /// How many of the early bytes the rest of QEMU's stream begins with.
        early_bytes: u32,
        /// Length of the rest of QEMU's stream, in bytes, the early ones included.
        device_state_bytes: u32,
    },
    /// Hash these chunks of a region as QEMU's RAM holds it, or the image of a disk.
    VerifyRegion {
        /// The region.
        region: RegionId,
        /// First block.
        range: BlockRange,
        /// Blocks per digest.
        blocks_per_digest: u32,
    },
    /// Both copies are equal: Ready may follow, or AllPresent.
    Verified,
    /// The source has released the guest for good: run it.
    Commit {
        /// The attempt that was READY.
        attempt: Attempt,
        /// The generation that the right to run has from now on.
        generation: Generation,
    },
    /// Give this attempt up.
    Cancel {
        /// Why, for people.
        reason: String,
    },
    /// The source's journal of the attempt is at its end: nothing more will be asked.
    Done,
    /// A person, who took this host for dead or fenced, has given the guest to the source.
    Overruled {
        /// The generation that it has there.
        generation: Generation,
    },
    /// An offer of a guest whose disks move with it.
    OfferDisks(Box<DisksOffer>),
    /// A part of the list of what is left of a disk; all parts of all disks come before Complete.
    List(List),
    /// These blocks of a disk cannot be read at the source: whoever waits for them is refused.
    Unreadable {
        /// The disk's region.
        region: RegionId,
        /// The blocks.
        ranges: Vec<BlockRange>,
    },
    /// How long the image of a disk is that grows; before each Complete.
    Length {
        /// The disk's region.
        region: RegionId,
        /// In bytes: what lies behind is no part of the image.
        bytes: u64,
    },
    /// Could this guest run here, and are the files that do not move with it the same here? Needs
    /// the scope *query* or *send guests*. From version 2 on.
    QueryFiles(Box<FilesQuery>),
    /// An offer of a guest of which files do not move with it. From version 2 on.
    OfferFiles(Box<FilesOffer>),
}

/// What a destination has that blocks of an arriving guest may be found in.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keeps {
    /// Regions of which blocks may be named by their digests.
    pub regions: Vec<RegionId>,
    /// The key of all digests from now on, in place of the offer's: the one that its index was made with.
    pub digest_key: Option<[u8; 32]>,
}

/// What the destination's agent says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToSource {
    /// The answer to [`ToDestination::Query`].
    Answer(Answer),
    /// QEMU waits for the guest. Said again after each [`ToSource::Resumed`] that finds the attempt
    /// receiving.
    Accepted {
        /// The machine as the destination's QEMU shows it.
        machine: Box<Machine>,
    },
    /// The offer is not taken, or QEMU could not be launched.
    Refused(Refusal),
    /// The attempt goes on over this connection.
    Resumed {
        /// One-time token of the new bulk connection.
        bulk_token: Vec<u8>,
        /// How far the attempt is here.
        state: AttemptState,
    },
    /// QEMU has loaded everything, and waits.
    Loaded,
    /// The digests that were asked for; zeros for what the guest has written since it runs here.
    Digests {
        /// The region.
        region: RegionId,
        /// First block.
        range: BlockRange,
        /// One digest for each piece of the range.
        digests: Vec<[u8; 16]>,
    },
    /// READY is in the journal: everything is here.
    Ready {
        /// The attempt.
        attempt: Attempt,
    },
    /// COMMITTED is in the journal and the guest was told to run.
    Committed {
        /// The attempt.
        attempt: Attempt,
    },
    /// ABORTED is in the journal: the guest will never run here from this attempt.
    Aborted {
        /// The attempt.
        attempt: Attempt,
        /// Why, for people.
        reason: String,
    },
    /// The answer to [`ToDestination::Ask`] when the attempt is neither committed nor aborted.
    Status {
        /// The attempt.
        attempt: Attempt,
        /// How far it is.
        state: AttemptState,
    },
    /// What the move cost here.
    Summary(Summary),
    /// ALL-PRESENT is in the journal: the guest is here, and needs nothing of the source any more.
    AllPresent {
        /// The attempt.
        attempt: Attempt,
    },
    /// The answer to [`ToDestination::Done`]: the journal here is at its end too.
    Closed,
    /// What the guest's clock was found to be, where that can be known.
    Clock(GuestClock),
    /// QEMU is being launched; open the bulk connection with this token, and send.
    Launching {
        /// One-time token of the bulk connection.
        bulk_token: Vec<u8>,
        /// What the destination has of the guest already.
        keeps: Keeps,
    },
    /// What is missing of a disk whose guest runs here.
    Missing(Missing),
    /// The guest waits for these blocks of a disk.
    Want {
        /// The disk's region.
        region: RegionId,
        /// The blocks.
        ranges: Vec<BlockRange>,
    },
    /// These blocks of a disk need not come any more: the guest has written or discarded them here.
    Superseded {
        /// The disk's region.
        region: RegionId,
        /// The blocks.
        ranges: Vec<BlockRange>,
    },
    /// The answer to [`ToDestination::QueryFiles`] where locks prove nothing of some files: ask
    /// again, and say what they hold.
    WantContent {
        /// Which of the files that were named, by their places there.
        files: Vec<u16>,
    },
}

/// How far an attempt is at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum AttemptState {
    /// Blocks are arriving.
    Receiving,
    /// QEMU loads, or has loaded.
    Loading,
    /// READY is in the journal.
    Ready,
    /// COMMITTED is in the journal.
    Committed,
    /// ABORTED is in the journal.
    Aborted,
}

/// A question without consequences.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Query {
    /// The guest.
    pub guest: GuestDescription,
    /// Its machine as the source's QEMU shows it.
    pub machine: Machine,
}

/// A question about a guest of which files do not move with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesQuery {
    /// The question.
    pub query: Query,
    /// The files.
    pub files: Vec<FileClaim>,
}

/// The answer to a [`Query`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The host's own name.
    pub host: String,
    /// Every check that was made.
    pub checks: Vec<Check>,
}

/// One thing that was looked at before a move.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// Whether a move can go on.
    pub verdict: Verdict,
    /// What was found, in one sentence.
    pub text: String,
    /// What to do about it, where there is something to do.
    pub hint: Option<String>,
}

/// The outcome of a [`Check`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// As it should be.
    Fine,
    /// Worth knowing before moving.
    Warning,
    /// A move is refused.
    Refused,
}

/// A guest that is to move.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The migration.
    pub migration: MigrationId,
    /// Its attempt.
    pub attempt: Attempt,
    /// The generation that the right to run has now.
    pub generation: Generation,
    /// The guest.
    pub guest: GuestDescription,
    /// Its machine as the source's QEMU shows it.
    pub machine: Machine,
    /// The regions that will travel.
    pub regions: Vec<RegionSpec>,
    /// Key of the digests in frames, chosen at random for this migration.
    pub digest_key: [u8; 32],
    /// Whether the guest is paused and shall stay so.
    pub paused: bool,
    /// Whether both copies are compared before Ready.
    pub verify: bool,
    /// How long the destination waits for a lost source before it gives up, in milliseconds.
    pub patience_ms: u32,
    /// Whether the source releases the guest when it stops it.
    pub early_release: bool,
}

/// A guest that is to move with its disks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DisksOffer {
    /// The guest. Of its regions those are durable that are disks.
    pub offer: Offer,
    /// Its disks that move: one for each durable region.
    pub disks: Vec<OfferedDisk>,
}

/// A guest that is to move, of which files do not move with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesOffer {
    /// The guest, and its disks that move.
    pub offer: DisksOffer,
    /// The files.
    pub files: Vec<FileClaim>,
}

/// Why an offer was not taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// What stands in the way, for programs.
    pub code: RefusalCode,
    /// What stands in the way, for people.
    pub text: String,
    /// What to do about it.
    pub hint: Option<String>,
}

/// Why an offer was not taken, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RefusalCode {
    /// The peer's scope does not allow it.
    NotAllowed,
    /// A guest of that name is here already, or on its way.
    Busy,
    /// Something that the guest needs is not here.
    Unsuitable,
    /// QEMU could not be started.
    QemuFailed,
    /// The offer breaks a limit or a rule of the format.
    Invalid,
}

/// What a move cost at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// From the last block to QEMU's having loaded, in microseconds.
    pub load_us: u64,
    /// From COMMIT's arrival to the guest's being told to run, in microseconds.
    pub commit_us: u64,
    /// CPU time of the agent, in microseconds.
    pub agent_cpu_us: u64,
    /// CPU time of QEMU, in microseconds.
    pub qemu_cpu_us: u64,
    /// Peak of what the agent held for this migration, in bytes.
    pub agent_peak_bytes: u64,
    /// What was read from the repository of base images, in bytes.
    pub repository_bytes: u64,
}

/// The clock of a guest that runs again, against the destination's; negative: behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestClock {
    /// How far it was off when it was first looked at, in milliseconds.
    pub before_ms: i64,
    /// How far it was off in the end, in milliseconds.
    pub after_ms: i64,
    /// Whether the guest agent told it; otherwise it is the machine's real-time clock.
    pub by_agent: bool,
    /// Whether it was set right.
    pub set: bool,
}

/// What the destination says on the bulk connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Acknowledgement {
    /// Frames that were applied: first sequence number and count.
    pub applied: Vec<(u64, u32)>,
    /// Blocks of those frames whose reference did not hold: they must be sent again.
    pub rejected: Vec<(RegionId, BlockRange)>,
    /// How long the destination takes to make durable what has come of disks, in microseconds: the
    /// last time, or the time that is under way where that is longer; 0 without disks.
    pub sync_us: u32,
}
