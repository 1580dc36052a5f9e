//! The messages of a migration between the two agents on a channel.
//!
//! ```text
//! source                                   destination
//!   Offer ------------------------------->   checks
//!   <--------------------- Launching | Refused
//!   Start(prelude) ---------------------->   starts QEMU with -incoming; later messages wait
//!   <---------------------- Accepted | Refused
//!   ==== frames of blocks (bulk) ========>   decoded into the guest's RAM
//!   <=== Acknowledgement (bulk) ==========
//!   === pieces of Early (bulk) ==========>   device state that seldom changes until the end
//!   (guest stopped)
//!   === pieces of DeviceState (bulk) ====>
//!   Complete(epoch, frames) ------------->   all frames applied: QEMU loads
//!   <----------------------------- Loading   only where memory follows
//!   <------------------------------ Loaded
//!   [VerifyRegion -> Digests]*, Verified     only where it was asked for
//!   <------------------------------- Ready   journal: READY
//!   (journal: RELEASED)
//!   [Flows] ----------------------------->   through gateways of its networks
//!   Commit ------------------------------>   journal: COMMITTED, the guest runs
//!   HeldFrames* -------------------------->   for the guest's cards
//!   <--------------------------- Committed
//!   (journal: DONE)                          no block is missing: journal: ALL-PRESENT
//!   <------------------------------ Faults   only where memory followed
//!   <-------------------------------- Used   only where something followed
//!   <-------------------------- AllPresent
//!   (QEMU quit; journal: CLOSED)
//!   Done -------------------------------->   journal: CLOSED
//!   <------------------------------ Closed
//!   <-------------------------------- Rate   earlier, where something followed for longer
//! ```
//!
//! With an early release, RELEASED is written and `Commit` sent when the guest is stopped; Ready is
//! omitted, and the guest runs as soon as all data has arrived.
//!
//! A guest whose disks move with it is offered by `OfferDisks`; `Length` of growing images, and
//! parts of `List`, precede each `Complete`. From `Committed` on frames bring the listed blocks,
//! and the destination sends `Missing`, `Want` and `Superseded`, until `AllPresent`; the source
//! sends `Unreadable`. This uses connections of its own, which begin with `Resume`. If verification
//! was requested, arrived content is compared before `AllPresent`: `VerifyRegion`, which is
//! answered when all of it is there, and another `Verified`.
//!
//! A guest with files that do not move with it (shared disks, firmware, kernels) is queried by
//! `QueryFiles` and offered by `OfferFiles`: each file is proved to be the same at both hosts.
//!
//! A guest with cards on special ports of bridges (VLANs, MTU, flags) is offered by `OfferPorts`,
//! with or without such files. `QueryPorts` asks for all of that: ports, files, room for disks,
//! whether the destination knows a newer copy of the guest, and whether it reaches the arbiter.
//!
//! A guest that another program manages, such as libvirt, is offered by `OfferPorts` with what that
//! program has for itself at the destination. `Prepared` follows `Launching`, and `Departed`
//! precedes its `Complete`.
//!
//! A plan of a move asks by `QueryKnown` how much of a sample of the guest's content the
//! destination has already.
//!
//! If the realm has an arbiter, the source sends `Arbiter` after `Start`, and the destination
//! answers with `Arbiter`. A `CommitWithLease` takes effect when the destination has the lease.
//!
//! `Cancel` and `Aborted` may be sent at any time that the handover permits. After a lost
//! connection the source opens a new channel with `Resume`, or with `Ask` to learn only the outcome
//! of an attempt.

use crate::disk::{List, Missing, OfferedDisk, Pulled};
use crate::files::FileClaim;
use crate::flows::Flows;
use crate::guest::{GuestDescription, Managed};
use crate::held_frames::HeldFrames;
use crate::machine::Machine;
use crate::port::CardPort;
use crate::replica::ReplicaOffer;
use crate::{
    Attempt, AttemptId, BlockRange, Epoch, Generation, MigrationId, RegionId, RegionSpec, StoreId,
};
use serde::{Deserialize, Serialize};

/// A message of the source's agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToDestination {
    /// Asks whether this guest could run here. Needs the scope *query*.
    Query(Box<Query>),
    /// Offers a guest. Needs the scope *send guests*.
    Offer(Box<Offer>),
    /// Continues an attempt over a new connection.
    Resume {
        /// The migration.
        migration: MigrationId,
        /// Its attempt.
        attempt: Attempt,
        /// The number of the new connection.
        epoch: Epoch,
    },
    /// Asks for the outcome of this attempt. The question aborts an unknown attempt.
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
    /// Everything has been sent: the destination loads once this number of frames of the connection
    /// is applied, and all pieces have arrived.
    Complete {
        /// The connection.
        epoch: Epoch,
        /// Number of frames sent on it.
        frames: u64,
        /// Length of the early bytes that begin the rest of QEMU's stream.
        early_bytes: u32,
        /// Length of the rest of QEMU's stream, in bytes, including the early ones.
        device_state_bytes: u32,
    },
    /// Requests digests of these chunks of a region, from QEMU's RAM or the image of a disk.
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
    /// The source has released the guest permanently: the destination runs it.
    Commit {
        /// The attempt that was READY.
        attempt: Attempt,
        /// The generation of the right from now on.
        generation: Generation,
    },
    /// Gives up this attempt.
    Cancel {
        /// The reason, for people.
        reason: String,
    },
    /// The source's journal of the attempt is complete: it sends no more questions.
    Done,
    /// An operator has given the guest to the source, having declared this host dead or fenced.
    Overruled {
        /// The generation of the right there.
        generation: Generation,
    },
    /// Offers a guest whose disks move with it.
    OfferDisks(Box<DisksOffer>),
    /// A part of the list of a disk's missing blocks; all parts of all disks precede Complete.
    List(List),
    /// These blocks of a disk cannot be read at the source: requests that wait for them fail.
    Unreadable {
        /// The disk's region.
        region: RegionId,
        /// The blocks.
        ranges: Vec<BlockRange>,
    },
    /// The length of a disk's growing image; precedes each Complete.
    Length {
        /// The disk's region.
        region: RegionId,
        /// In bytes: content behind it is not part of the image.
        bytes: u64,
    },
    /// Asks whether this guest could run here, with the same files that do not move with it. Needs
    /// the scope *query* or *send guests*. From version 2 on.
    QueryFiles(Box<FilesQuery>),
    /// Offers a guest with files that do not move with it. From version 2 on.
    OfferFiles(Box<FilesOffer>),
    /// A [`QueryFiles`](Self::QueryFiles), which may have no files, about a guest with cards on
    /// special ports of bridges. From version 3 on.
    QueryPorts(Box<PortsQuery>),
    /// An [`OfferFiles`](Self::OfferFiles), which may have no files, of a guest with cards on
    /// special ports of bridges. From version 3 on.
    OfferPorts(Box<PortsOffer>),
    /// Frames that came for the guest since it was stopped. They follow Commit; none of them has to
    /// arrive. From version 3 on.
    HeldFrames(HeldFrames),
    /// The guest's flows through gateways of its networks. They precede Commit, and need not
    /// arrive. From version 3 on.
    Flows(Flows),
    /// Asks whether this host reaches the realm's arbiter, which has this lease store. From version
    /// 3 on.
    Arbiter {
        /// The store.
        store: StoreId,
    },
    /// A [`Commit`](Self::Commit) that takes effect only with the arbiter's lease. From version 3
    /// on.
    CommitWithLease {
        /// The attempt.
        attempt: Attempt,
        /// The generation of the right from now on, and of the lease.
        generation: Generation,
        /// The store that gives the lease.
        store: StoreId,
    },
    /// Asks how many of these blocks this host has from an earlier stay of the guest. Needs the
    /// scope *send guests*: frames of a guest ask the same. From version 3 on.
    QueryKnown(Box<KnownQuery>),
    /// Begins to bring a version of a guest's disks to a replica. The other messages of the channel
    /// are those of [`replica`](crate::replica). Needs the scope *send guests*. From version 3 on.
    Replicate(Box<ReplicaOffer>),
    /// Begins to use a device of a parcel that is attached to this host. The other messages of the
    /// channel are those of [`terminal`](crate::terminal). Needs the scope *send guests*. From
    /// version 3 on.
    ParcelDevice,
    /// What the program that manages the guest says when its stream was read to its end. Precedes
    /// each Complete of a guest that was offered as managed. From version 3 on.
    Departed {
        /// Bytes that only that program understands.
        cookie: Vec<u8>,
    },
}

/// Known content at the destination in which blocks of an arriving guest may be found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keeps {
    /// Regions whose blocks may be sent as digests alone.
    pub regions: Vec<RegionId>,
    /// The key of all digests from now on, replacing the offer's: the key of the destination's
    /// index.
    pub digest_key: Option<[u8; 32]>,
}

/// A message of the destination's agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToSource {
    /// The answer to [`ToDestination::Query`].
    Answer(Answer),
    /// QEMU waits for the guest. Repeated after each [`ToSource::Resumed`] in which the attempt is
    /// receiving.
    Accepted {
        /// The machine as the destination's QEMU reports it.
        machine: Box<Machine>,
    },
    /// The offer is refused, or QEMU could not be launched.
    Refused(Refusal),
    /// The attempt continues over this connection.
    Resumed {
        /// One-time token of the new bulk connection.
        bulk_token: Vec<u8>,
        /// The state of the attempt here.
        state: AttemptState,
    },
    /// QEMU has loaded everything, and waits.
    Loaded,
    /// The requested digests; zeros for content that the guest has written since it runs here.
    Digests {
        /// The region.
        region: RegionId,
        /// First block.
        range: BlockRange,
        /// One digest for each piece of the range.
        digests: Vec<[u8; 16]>,
    },
    /// READY is in the journal: all data is here.
    Ready {
        /// The attempt.
        attempt: Attempt,
    },
    /// COMMITTED is in the journal and QEMU was told to resume the guest.
    Committed {
        /// The attempt.
        attempt: Attempt,
    },
    /// ABORTED is in the journal: the guest will never run here from this attempt.
    Aborted {
        /// The attempt.
        attempt: Attempt,
        /// The reason, for people.
        reason: String,
    },
    /// The answer to [`ToDestination::Ask`] when the attempt is neither committed nor aborted.
    Status {
        /// The attempt.
        attempt: Attempt,
        /// Its state.
        state: AttemptState,
    },
    /// The cost of the move here.
    Summary(Summary),
    /// ALL-PRESENT is in the journal: the guest is here, and no block is missing.
    AllPresent {
        /// The attempt.
        attempt: Attempt,
    },
    /// The answer to [`ToDestination::Done`]: the journal here is complete too.
    Closed,
    /// The measurement of the guest's clock, where that is possible.
    Clock(GuestClock),
    /// QEMU is being launched; the source opens the bulk connection with this token, and sends.
    Launching {
        /// One-time token of the bulk connection.
        bulk_token: Vec<u8>,
        /// Known content of the guest at the destination.
        keeps: Keeps,
    },
    /// The missing blocks of a disk whose guest runs here.
    Missing(Missing),
    /// The guest waits for these blocks of a disk.
    Want {
        /// The disk's region.
        region: RegionId,
        /// The blocks.
        ranges: Vec<BlockRange>,
    },
    /// These blocks of a disk need not travel any more: the guest has written or discarded them
    /// here.
    Superseded {
        /// The disk's region.
        region: RegionId,
        /// The blocks.
        ranges: Vec<BlockRange>,
    },
    /// The answer to [`ToDestination::QueryFiles`] when locks prove nothing for some files: the
    /// source repeats the question with their content.
    WantContent {
        /// The indexes of these files in the question.
        files: Vec<u16>,
    },
    /// The answer to [`ToDestination::QueryFiles`] of a host that lacks read-only images, which can
    /// move along. From version 3 on.
    AnswerLacking {
        /// All checks that were made.
        answer: Answer,
        /// The indexes of these images in the question.
        files: Vec<u16>,
    },
    /// Whether this host reaches the arbiter that [`ToDestination::Arbiter`] names now. Repeated
    /// before Ready. From version 3 on.
    Arbiter {
        /// Whether it does.
        reached: bool,
    },
    /// The answer to [`ToDestination::QueryKnown`]. From version 3 on.
    Known {
        /// Number of the sampled blocks that are here.
        found: u32,
    },
    /// Everything is here that has to be, and QEMU loads the guest: blocks of memory that follows
    /// are taken from now on. From version 3 on.
    Loading,
    /// The pages that the guest has waited for, once all of its memory is here. From version 3 on.
    Faults(Faults),
    /// What the move has cost here, once no block is missing any more. It replaces the same figures
    /// of the Summary. From version 3 on.
    Used(Used),
    /// The guest's rate since it runs here. It may come after Closed. From version 3 on.
    Rate(Rate),
    /// The program that manages the guest waits for its stream. Follows Launching where a guest was
    /// offered as managed; the source's QEMU migrates only then. From version 3 on.
    Prepared {
        /// Bytes that only that program understands.
        cookie: Vec<u8>,
    },
}

/// The state of an attempt at the destination.
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

/// A question without side effects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Query {
    /// The guest.
    pub guest: GuestDescription,
    /// Its machine as the source's QEMU reports it.
    pub machine: Machine,
}

/// A question about a guest with files that do not move with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesQuery {
    /// The question.
    pub query: Query,
    /// The files.
    pub files: Vec<FileClaim>,
}

/// A question about content of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownQuery {
    /// The guest as it would be offered. Its key is that of the digests.
    pub offered: DisksOffer,
    /// The blocks.
    pub samples: Vec<SampledBlock>,
}

/// A block of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampledBlock {
    /// Its region.
    pub region: RegionId,
    /// Its number.
    pub block: u64,
    /// The digest of its content.
    pub digest: [u8; 16],
}

/// The answer to a [`Query`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The host's own name.
    pub host: String,
    /// All checks that were made.
    pub checks: Vec<Check>,
}

/// One check before a move.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// Whether a move can proceed.
    pub verdict: Verdict,
    /// The finding, in one sentence.
    pub text: String,
    /// The remedy, if there is one.
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

/// A guest that is offered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The migration.
    pub migration: MigrationId,
    /// Its attempt.
    pub attempt: Attempt,
    /// The current generation of the right.
    pub generation: Generation,
    /// The guest.
    pub guest: GuestDescription,
    /// Its machine as the source's QEMU reports it.
    pub machine: Machine,
    /// The regions that will travel.
    pub regions: Vec<RegionSpec>,
    /// Key of the digests in frames, chosen at random for this migration.
    pub digest_key: [u8; 32],
    /// Whether the guest is paused and is to stay so.
    pub paused: bool,
    /// Whether both copies are compared before Ready.
    pub verify: bool,
    /// How long the destination waits for a lost source before it gives up, in milliseconds.
    pub patience_ms: u32,
    /// Whether the source releases the guest when it stops it.
    pub early_release: bool,
}

impl Offer {
    /// Returns the id of the offered attempt.
    pub fn attempt_id(&self) -> AttemptId {
        AttemptId {
            migration: self.migration,
            attempt: self.attempt,
        }
    }
}

/// A guest that is offered with its disks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DisksOffer {
    /// The guest. Its durable regions are its disks.
    pub offer: Offer,
    /// Its disks that move: one for each durable region.
    pub disks: Vec<OfferedDisk>,
}

/// A guest that is offered, with files that do not move with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesOffer {
    /// The guest, and its disks that move.
    pub offer: DisksOffer,
    /// The files.
    pub files: Vec<FileClaim>,
}

/// A question about a guest, with everything that an offer tells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortsQuery {
    /// The question.
    pub asked: FilesQuery,
    /// The ports.
    pub ports: Vec<CardPort>,
    /// The disks that move with the guest. The numbers of their regions have no meaning.
    pub disks: Vec<OfferedDisk>,
    /// The generation of the right to run the guest.
    pub generation: Generation,
    /// The part of its memory that follows when it runs at the destination.
    pub memory: Pulled,
    /// The arbiter that the handover would have, if the source's realm names one.
    pub arbiter: Option<ArbiterQuery>,
    /// The program that manages the guest, and its outlook for the destination's.
    pub managed: Option<Managed>,
}

/// A question about the arbiter of a handover.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArbiterQuery {
    /// Its lease store.
    pub store: StoreId,
    /// Whether the move is refused without it.
    pub required: bool,
}

/// A guest that is offered, with cards on special ports of bridges, with memory that follows, or
/// with another program that manages it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortsOffer {
    /// The guest, its disks that move and its files that do not.
    pub offered: FilesOffer,
    /// The ports.
    pub ports: Vec<CardPort>,
    /// The part of its memory that follows when it runs at the destination.
    pub memory: Pulled,
    /// The program that manages it, if Longhaul does not.
    pub managed: Option<Managed>,
}

/// The refusal of an offer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The reason, for programs.
    pub code: RefusalCode,
    /// The reason, for people.
    pub text: String,
    /// The remedy.
    pub hint: Option<String>,
}

/// The reason of a refusal, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RefusalCode {
    /// The peer's scope does not permit it.
    NotAllowed,
    /// A guest of that name is here already, or is arriving.
    Busy,
    /// A resource of the guest is not available here.
    Unsuitable,
    /// QEMU could not be started.
    QemuFailed,
    /// The offer breaks a limit or a rule of the format.
    Invalid,
}

/// The cost of a move at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Time from the last block until QEMU has loaded, in microseconds.
    pub load_us: u64,
    /// Time from the arrival of COMMIT until QEMU is told to resume the guest, in microseconds.
    pub commit_us: u64,
    /// CPU time of the agent, in microseconds.
    pub agent_cpu_us: u64,
    /// CPU time of QEMU, in microseconds.
    pub qemu_cpu_us: u64,
    /// Peak of the agent's memory for this migration, in bytes.
    pub agent_peak_bytes: u64,
    /// Bytes read from the repository of base images.
    pub repository_bytes: u64,
}

/// The pages of memory that a guest has waited for since it runs at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Faults {
    /// Number of pages.
    pub pages: u64,
    /// Median of the times from the request for a page to its arrival, in microseconds.
    pub median_us: u64,
    /// Their 99th percentile.
    pub p99_us: u64,
    /// The longest of them.
    pub longest_us: u64,
    /// How many were longer than 10, 100 and 1000 ms.
    pub longer: [u64; 3],
}

/// The cost at the destination of a move of which something followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Used {
    /// CPU time of the agent, in microseconds.
    pub agent_cpu_us: u64,
    /// Peak of the agent's memory for this migration, in bytes.
    pub agent_peak_bytes: u64,
    /// CPU time of the page server, in microseconds, if there was one.
    pub page_server_cpu_us: Option<u64>,
}

/// How much processor time a guest has used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rate {
    /// CPU time of its vCPUs, in microseconds.
    pub cpu_us: u64,
    /// The time in which they used it, in microseconds.
    pub time_us: u64,
    /// Whether all of QEMU's threads are counted.
    pub whole_process: bool,
}

/// The clock of a running guest against the destination's; negative: behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestClock {
    /// Its first measured offset, in milliseconds.
    pub before_ms: i64,
    /// Its final offset, in milliseconds.
    pub after_ms: i64,
    /// Whether the guest agent reported it; otherwise it is the machine's real-time clock.
    pub by_agent: bool,
    /// Whether it was corrected.
    pub set: bool,
}

/// A message of the destination on the bulk connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Acknowledgement {
    /// Applied frames: first sequence number and count.
    pub applied: Vec<(u64, u32)>,
    /// Blocks of those frames whose reference did not match: they must be sent again.
    pub rejected: Vec<(RegionId, BlockRange)>,
    /// Duration of the destination's sync of received disk content, in microseconds: of the last
    /// one, or of the running one where that is longer; 0 without disks.
    pub sync_us: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Message, decode, encode};

    /// Checks that a message and its line in the page agree.
    fn is_in_page<M: Message + PartialEq + std::fmt::Debug>(message: &M) {
        let bytes = encode(message).unwrap();
        assert_eq!(decode::<M>(&bytes).as_ref(), Ok(message));
        let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let line = format!("\n{}\n", hex.join(" "));
        let page = include_str!("../../../docs/wire.md");
        assert!(page.contains(&line), "docs/wire.md lacks {line}");
    }

    #[test]
    fn the_examples_about_arbiters_are_true() {
        let store = StoreId([6; 16]);
        is_in_page(&ToDestination::CommitWithLease {
            attempt: Attempt(1),
            generation: Generation(300),
            store,
        });
        is_in_page(&ToDestination::Arbiter { store });
        is_in_page(&ToSource::Arbiter { reached: true });
        is_in_page(&ToSource::Known { found: 300 });
        let cookie = vec![7; 3];
        is_in_page(&ToSource::Prepared {
            cookie: cookie.clone(),
        });
        is_in_page(&ToDestination::Departed { cookie });
    }

    #[test]
    fn the_examples_about_the_figures_of_a_move_are_true() {
        is_in_page(&ToSource::Faults(Faults {
            pages: 300,
            median_us: 21_000,
            p99_us: 44_000,
            longest_us: 120_000,
            longer: [290, 1, 0],
        }));
        is_in_page(&ToSource::Used(Used {
            agent_cpu_us: 3_900_000,
            agent_peak_bytes: 40_000_000,
            page_server_cpu_us: Some(70_000),
        }));
        is_in_page(&ToSource::Rate(Rate {
            cpu_us: 2_800_000,
            time_us: 2_000_000,
            whole_process: false,
        }));
    }
}
