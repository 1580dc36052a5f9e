//! Defines one state of everything: two hosts, the messages between them, and the model's own
//! memory.

use crate::small::{Folding, Small};
use std::hash::Hasher;

/// The maximum number of attempts in a run.
pub(crate) const ATTEMPTS: usize = 2;
/// The sides of an attempt.
pub(crate) const SOURCE: usize = 0;
pub(crate) const DESTINATION: usize = 1;

/// A guest's QEMU on one host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum Qemu {
    /// There is none, and none is expected.
    #[default]
    None,
    /// The guest runs.
    Running,
    /// The guest is paused by its owner, who may let it go on.
    Paused,
    /// Stopped by `stop` before QEMU was done: nothing but `cont` wakes it.
    Frozen,
    /// QEMU has converged by itself: the guest wakes when the migration's socket is lost.
    Finishing,
    /// Stopped for good: only `cont` wakes the guest.
    Postmigrate,
    /// It waits for the incoming state.
    Incoming,
    /// It has loaded everything, and has never run.
    Loaded,
    /// The guest has stopped by itself (panicked, powered off), or QEMU refuses to resume it.
    Halted,
    /// It has ended by itself, or with its host.
    Dead,
}

impl Qemu {
    /// Returns whether the guest runs, or its owner may let it run.
    pub(crate) fn is_live(self) -> bool {
        matches!(self, Qemu::Running | Qemu::Paused)
    }

    /// Returns whether the process exists.
    pub(crate) fn is_there(self) -> bool {
        !matches!(self, Qemu::None | Qemu::Dead)
    }

    /// Returns whether the guest is stopped because of its migration.
    pub(crate) fn is_stopped(self) -> bool {
        matches!(self, Qemu::Frozen | Qemu::Finishing | Qemu::Postmigrate)
    }
}

/// The holder of the right to run the guest, as a host has noted it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum Holder {
    /// Nothing is noted.
    #[default]
    Unknown,
    Here,
    Elsewhere,
    InDoubt,
}

/// A host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Host {
    /// The agent runs.
    pub(crate) up: bool,
    /// The host is lost with everything that ran there, permanently or not.
    pub(crate) destroyed: bool,
    pub(crate) qemu: Qemu,
    /// The number of the copy that is or was here: n at the destination of attempt n.
    pub(crate) copy: u8,
    pub(crate) holder: Holder,
    pub(crate) generation: u8,
    /// A lost host that never returns.
    pub(crate) buried: bool,
    /// How often its journals were lost: those that it has now are another incarnation.
    pub(crate) lives: u8,
    /// How often another machine took its place, with an identity of its own.
    pub(crate) identity: u8,
    /// The generations whose lease the arbiter gave it, a bit for each.
    pub(crate) leases: u8,
}

/// One side of an attempt at its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Side {
    /// The state, by number; 0 where the agent does not know the attempt.
    pub(crate) state: u8,
    /// Pending actions.
    pub(crate) todo: Small<6>,
    /// Events from completed actions.
    pub(crate) events: Small<3>,
    /// The current action follows a failed write: the next failure waits for a retry.
    pub(crate) again: bool,
    /// A record whose write failed twice.
    pub(crate) unwritten: u8,
    /// The event that is fed when all actions of the journal are done.
    pub(crate) heard: u8,
    /// Records on disk.
    pub(crate) journal: Small<8>,
    /// A record whose write failed, on disk nevertheless, until the next write replaces it.
    pub(crate) tail: u8,
    /// Whether the agent that began the attempt has not been restarted since.
    pub(crate) session: bool,
    /// The guest stays at the source and could not be resumed yet: the journal is not closed.
    pub(crate) unresumed: bool,
    /// Of the model: the journal was closed and removed; whether the guest was reported here.
    pub(crate) ended: Option<bool>,
}

/// The state of the destination's copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum Snapshot {
    /// The source has not yet sent everything.
    #[default]
    None,
    /// The source has sent everything, and its guest has been stopped since.
    Good,
    /// The source's guest has gone on: the sent content is stale.
    Void,
}

/// Where a page of memory is that was missing when the destination's QEMU loaded the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum Page {
    /// Only the source has it.
    #[default]
    Left,
    /// The page server has it, and the source was told so.
    Given,
    /// QEMU has it.
    Placed,
    /// Nobody asks for it again, although QEMU lacks it. Only variants come here.
    Forgotten,
}

/// The memory that follows a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Following {
    pub(crate) page: Page,
    /// A page server holds QEMU's socket; otherwise QEMU's post-copy is paused.
    pub(crate) served: bool,
    /// The memory file is complete, durably.
    pub(crate) kept: bool,
    /// ... and lacks the page. Only variants come here.
    pub(crate) hollow: bool,
    /// The destination's agent was told that the page is lost.
    pub(crate) lost: bool,
}

impl Following {
    fn bits(self) -> u8 {
        let Self {
            page,
            served,
            kept,
            hollow,
            lost,
        } = self;
        let flags = [served, kept, hollow, lost].into_iter().enumerate();
        let flags = flags.map(|(bit, flag)| u8::from(flag) << (2 + bit));
        flags.fold(page as u8, |all, flag| all | flag)
    }
}

/// What a source that has yet to offer its guest does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum Preparing {
    /// Nothing: the guest is offered, or the attempt has ended.
    #[default]
    Done,
    /// It writes BEGAN.
    Begins,
    /// It writes PEER.
    Names,
}

/// An attempt, from the point of view of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Attempt {
    pub(crate) begun: bool,
    pub(crate) preparing: Preparing,
    /// The incarnation and the identity of the destination that the source connected to first.
    pub(crate) offered_to: [u8; 2],
    /// Blocks that only the source had have arrived, or were given up by an operator.
    pub(crate) arrived: bool,
    pub(crate) following: Following,
    /// The source releases the guest to the arbiter.
    pub(crate) arbitrated: bool,
    /// The source's host.
    pub(crate) from: u8,
    pub(crate) generation: u8,
    pub(crate) sides: [Side; 2],
    pub(crate) snapshot: Snapshot,
    /// ALL-PRESENT was durable at the destination.
    pub(crate) all_present: bool,
    /// An operator gave the guest to the source, or to the destination.
    pub(crate) overruled: [bool; 2],
}

impl Attempt {
    pub(crate) fn host(&self, side: usize) -> usize {
        usize::from(self.from) ^ side
    }
}

/// The faults that may still happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Budget {
    /// Crashes of each host's agent.
    pub crashes: [u8; 2],
    /// Writes that fail.
    pub failed_writes: u8,
    /// Messages that arrive twice.
    pub duplicates: u8,
    /// QEMUs that end or stop by themselves, or refuse.
    pub surprises: u8,
    /// Hosts that are lost with all that runs there, and operators who decide because of it.
    pub lost_hosts: u8,
    /// Times that an operator starts a guest that is down.
    pub boots: u8,
    /// Times that a destination loses its journals.
    pub lost_journals: u8,
    /// Lost hosts that never return. Blocks are missing at the destination then.
    pub buried: u8,
    /// Times that another machine takes the place of a destination.
    pub replaced: u8,
    /// Page servers that are killed.
    pub servers: u8,
}

/// A property of the handover that may be violated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Property {
    /// Two copies run, or may be resumed.
    TwoCopies,
    /// A copy runs after its successor ran.
    OldCopy,
    /// A copy runs that is incomplete, or older than the source's last run.
    LostWrites,
    /// A guest that its owner had paused is started.
    PausedStarted,
    /// The source's copy is retired without ALL-PRESENT being durable.
    RetiredEarly,
    /// An agent ends a copy that runs.
    RunningQuit,
    /// Both journals of an attempt claim the right to run.
    TwoClaims,
    /// Memory is said to be lost, or given up, although it can be read.
    FalseLoss,
    /// Doubt does not end.
    Doubt,
    /// The model's own limits were reached.
    Capacity,
}

impl Property {
    /// All properties, as they are printed.
    pub const ALL: [Property; 10] = [
        Property::TwoCopies,
        Property::OldCopy,
        Property::LostWrites,
        Property::PausedStarted,
        Property::RetiredEarly,
        Property::RunningQuit,
        Property::TwoClaims,
        Property::FalseLoss,
        Property::Doubt,
        Property::Capacity,
    ];

    /// Returns the property in words.
    pub fn name(self) -> &'static str {
        match self {
            Property::TwoCopies => "never two copies run",
            Property::OldCopy => "no copy runs after its successor ran",
            Property::LostWrites => "the copy that goes on has everything",
            Property::PausedStarted => "a guest that was paused is not started",
            Property::RetiredEarly => "a copy is retired after a durable ALL-PRESENT only",
            Property::RunningQuit => "no agent ends a copy that runs",
            Property::TwoClaims => "one journal claims the right to run, at most",
            Property::FalseLoss => "memory is said to be lost only if it is",
            Property::Doubt => "doubt ends when losses and crashes do",
            Property::Capacity => "(everything fitted into the model)",
        }
    }
}

/// One state of everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct World {
    pub(crate) hosts: [Host; 2],
    pub(crate) attempts: [Attempt; ATTEMPTS],
    /// Messages on their way, a bit for each.
    pub(crate) net: u32,
    /// The newest copy that has run.
    pub(crate) newest: u8,
    pub(crate) budget: Budget,
    /// The violation found on the way here.
    pub(crate) broken: Option<Property>,
}

impl World {
    /// Returns the owner's guest on host A, alone in the world.
    pub(crate) fn new(paused: bool, budget: Budget) -> Self {
        let mut world = World {
            budget,
            ..World::default()
        };
        for host in &mut world.hosts {
            host.up = true;
        }
        world.hosts[0].qemu = if paused { Qemu::Paused } else { Qemu::Running };
        world.hosts[0].holder = Holder::Here;
        world.hosts[0].generation = 1;
        world
    }

    pub(crate) fn begun(&self) -> usize {
        self.attempts.iter().filter(|attempt| attempt.begun).count()
    }

    pub(crate) fn blame(&mut self, property: Property) {
        self.broken.get_or_insert(property);
    }
}

// Fingerprints: every field once, packed into words. A field that is missing does not compile.

fn bytes(items: [u8; 8]) -> u64 {
    u64::from_le_bytes(items)
}

impl Side {
    fn fold(&self, hash: &mut Folding) {
        let Side {
            state,
            todo,
            events,
            again,
            unwritten,
            heard,
            journal,
            tail,
            session,
            unresumed,
            ended,
        } = self;
        let flags = u8::from(*again) | u8::from(*session) << 1 | u8::from(*unresumed) << 2;
        let ended = ended.map_or(0, |here| 1 + u8::from(here));
        hash.fold(bytes([*state, *unwritten, *tail, flags, ended, 0, 0, 0]) ^ events.word() << 40);
        hash.fold(todo.word() | u64::from(*heard) << 56);
        hash.fold(journal.word());
    }
}

impl World {
    /// Returns a fingerprint of this state: any two of n states share one with a chance of n^2 /
    /// 2^65.
    pub(crate) fn fingerprint(&self) -> u64 {
        let World {
            hosts,
            attempts,
            net,
            newest,
            budget,
            broken,
        } = self;
        let mut hash = Folding::default();
        for host in hosts {
            let Host {
                up,
                destroyed,
                qemu,
                copy,
                holder,
                generation,
                buried,
                lives,
                identity,
                leases,
            } = *host;
            let flags = u8::from(up) | u8::from(destroyed) << 1 | u8::from(buried) << 2;
            let (qemu, holder) = (qemu as u8, holder as u8);
            let numbers = [
                flags, qemu, copy, holder, generation, lives, identity, leases,
            ];
            hash.fold(bytes(numbers));
        }
        for attempt in attempts {
            let Attempt {
                begun,
                preparing,
                offered_to: [lives, identity],
                arrived,
                following,
                arbitrated,
                from,
                generation,
                sides,
                snapshot,
                all_present,
                overruled: [here, there],
            } = attempt;
            let flags = u8::from(*begun)
                | u8::from(*all_present) << 1
                | u8::from(*here) << 2
                | u8::from(*there) << 3
                | u8::from(*arrived) << 4
                | u8::from(*arbitrated) << 5;
            let (snapshot, preparing) = (*snapshot as u8, *preparing as u8);
            let peer = [*lives, *identity];
            let numbers = [
                flags,
                *from,
                *generation,
                snapshot,
                preparing,
                peer[0],
                peer[1],
                following.bits(),
            ];
            hash.fold(bytes(numbers));
            sides.iter().for_each(|side| side.fold(&mut hash));
        }
        let Budget {
            crashes: [a, b],
            failed_writes,
            duplicates,
            surprises,
            lost_hosts,
            boots,
            lost_journals,
            buried,
            replaced,
            servers,
        } = *budget;
        let broken = broken.map_or(0, |property| 1 + property as u8);
        let rare = u64::from(buried) << 56 | u64::from(replaced) << 48;
        hash.fold(
            rare | u64::from(*net) << 16
                | u64::from(*newest | servers << 4) << 8
                | u64::from(broken),
        );
        let rest = [failed_writes, duplicates, surprises, lost_hosts];
        let [c, d, e, f] = rest;
        hash.fold(bytes([a, b, c, d, e, f, boots, lost_journals]));
        hash.finish()
    }
}

/// A message between the agents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Message {
    Offer,
    /// Everything has been sent.
    Complete,
    Commit,
    CommitWithLease,
    Cancel,
    Ask,
    Done,
    Overruled,
    Refused,
    Ready,
    Committed,
    AllPresent,
    Aborted,
    /// Neither committed nor aborted: it waits for blocks.
    Waiting,
    Closed,
}

impl Message {
    pub(crate) const ALL: [Message; 15] = [
        Message::Offer,
        Message::Complete,
        Message::Commit,
        Message::CommitWithLease,
        Message::Cancel,
        Message::Ask,
        Message::Done,
        Message::Overruled,
        Message::Refused,
        Message::Ready,
        Message::Committed,
        Message::AllPresent,
        Message::Aborted,
        Message::Waiting,
        Message::Closed,
    ];

    pub(crate) fn bit(self, attempt: usize) -> u8 {
        self as u8 + (attempt * Message::ALL.len()) as u8
    }

    pub(crate) fn of(bit: u8) -> (Message, usize) {
        let bit = usize::from(bit);
        (
            Message::ALL[bit % Message::ALL.len()],
            bit / Message::ALL.len(),
        )
    }

    /// Returns the side that it is addressed to.
    pub(crate) fn to(self) -> usize {
        let to_source = matches!(
            self,
            Message::Refused
                | Message::Ready
                | Message::Committed
                | Message::AllPresent
                | Message::Aborted
                | Message::Waiting
                | Message::Closed
        );
        if to_source { SOURCE } else { DESTINATION }
    }
}
