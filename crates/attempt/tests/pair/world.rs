//! The world in which both ends of an attempt meet: two hosts, a network, a guest and its content,
//! on a virtual clock. Everything that happens follows from the seed.

use crate::faults::{Fault, Plan};
use crate::variant::Variant;
use longhaul_attempt::source::Claimed;
use longhaul_attempt::{Destination, Source};
use longhaul_engine::handover::Record;
use longhaul_protocol::Epoch;
use longhaul_protocol::message::{ToDestination, ToSource};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

/// Blocks of the guest: the first half is memory, the second half is disk.
pub(crate) const BLOCKS: usize = 8;
pub(crate) const DISK: u8 = 0xf0;
pub(crate) const MEMORY: u8 = 0x0f;

pub(crate) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// SplitMix64.
#[derive(Debug, Clone)]
pub(crate) struct Rng(pub u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn between(&mut self, from: u64, to: u64) -> Duration {
        ms(from + self.below(to - from))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Side {
    A,
    B,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holder {
    Here,
    InDoubt,
    There,
}

/// A QEMU process. It outlives the agent.
#[derive(Debug, Clone)]
pub(crate) struct Qemu {
    pub(crate) attempt: u32,
    pub(crate) running: bool,
    pub(crate) generation: u64,
    /// What belongs to it and is ended by the agent.
    pub(crate) exports: bool,
}

/// The process that holds QEMU's socket while memory follows. It outlives the agent.
#[derive(Debug, Clone)]
pub(crate) struct PageServer {
    pub(crate) number: u32,
    /// Blocks that it has taken, and QEMU has not got from it.
    pub(crate) taken: u8,
}

#[derive(Debug, Clone)]
pub(crate) struct MemoryFile {
    /// The agent that copies it.
    pub(crate) agent: u32,
    pub(crate) blocks: u8,
    pub(crate) content: [u32; BLOCKS],
    pub(crate) complete: bool,
}

/// The durable part of a host, and its agent.
pub(crate) struct Host {
    pub(crate) journals: BTreeMap<u32, Vec<Record>>,
    pub(crate) right: (u64, Holder),
    pub(crate) qemu: Option<Qemu>,
    pub(crate) content: [u32; BLOCKS],
    /// Blocks that are missing in the image, durably.
    pub(crate) missing: u8,
    /// Blocks that have arrived and are not durable yet.
    pub(crate) unsynced: u8,
    /// The page server of a guest whose memory follows.
    pub(crate) server: Option<PageServer>,
    /// The memory file of a guest that has left.
    pub(crate) file: Option<MemoryFile>,
    /// The image is complete, or the source of what the other host misses.
    pub(crate) image: bool,
    /// Exports that were not ended with their QEMU.
    pub(crate) exports_left: bool,
    pub(crate) incarnation: u32,
    pub(crate) up: bool,
    pub(crate) dead: bool,
    /// Counts the agents: what an earlier one has begun does not concern a later one.
    pub(crate) agent: u32,
    /// The attempt that has reserved the guest's name.
    pub(crate) reserved: Option<u32>,
    /// Attempts that were closed lately, as the agent remembers.
    pub(crate) closed: Vec<u32>,
    /// The journals that each attempt was offered to.
    pub(crate) peers: BTreeMap<u32, u32>,
    pub(crate) writes: u32,
    pub(crate) write_fails_until: Duration,
    pub(crate) write_fails_of: u32,
    pub(crate) note_fails_until: Duration,
    /// The generations whose lease the arbiter gave it.
    pub(crate) leases: BTreeSet<u64>,
}

impl Host {
    fn new(side: Side) -> Self {
        Self {
            journals: BTreeMap::new(),
            right: match side {
                Side::A => (1, Holder::Here),
                Side::B => (0, Holder::There),
            },
            qemu: None,
            content: [0; BLOCKS],
            missing: 0,
            unsynced: 0,
            server: None,
            file: None,
            image: side == Side::A,
            exports_left: false,
            incarnation: 1,
            up: true,
            dead: false,
            agent: 1,
            reserved: None,
            closed: Vec::new(),
            peers: BTreeMap::new(),
            writes: 0,
            write_fails_until: Duration::ZERO,
            write_fails_of: 0,
            note_fails_until: Duration::ZERO,
            leases: BTreeSet::new(),
        }
    }
}

/// The source's owner: what of an attempt is not in the core.
pub(crate) struct Out {
    pub(crate) core: Source,
    pub(crate) attempt: u32,
    pub(crate) conn: Option<u32>,
    /// The number of the try to connect, and its connection once the host was reached.
    pub(crate) dialling: Option<u32>,
    pub(crate) asking: Option<u32>,
    pub(crate) verified: bool,
    /// Blocks go over the connection.
    pub(crate) sending: bool,
    pub(crate) draining: bool,
    pub(crate) tracks: u8,
    pub(crate) dirty: u8,
    pub(crate) in_flight: Vec<(u64, u8)>,
    pub(crate) frames: u64,
    pub(crate) stopped: bool,
    pub(crate) stopping: bool,
    pub(crate) announced: bool,
    pub(crate) wake: Option<Duration>,
    /// The destination loads the guest: memory that follows may travel.
    pub(crate) loading: bool,
    /// The connection began with the lists of missing blocks.
    pub(crate) begins_with_missing: bool,
    /// The drain began over the connection that the destination had READY on.
    pub(crate) goes_on: bool,
}

/// The destination's owner.
pub(crate) struct In {
    pub(crate) core: Destination,
    pub(crate) attempt: u32,
    pub(crate) conn: Option<u32>,
    pub(crate) caller: Option<u32>,
    pub(crate) epoch: Epoch,
    pub(crate) applied: u64,
    pub(crate) complete: Option<(Epoch, u64, u8)>,
    pub(crate) everything: bool,
    pub(crate) fetching: bool,
    pub(crate) wake: Option<Duration>,
    /// The number of the page server that it is connected to.
    pub(crate) server: Option<u32>,
    /// It takes all memory for present.
    pub(crate) whole: bool,
    /// The source has said that it cannot read memory.
    pub(crate) lost: bool,
}

/// A connection: what is under way on it is lost when it is cut.
pub(crate) struct Conn {
    pub(crate) attempt: u32,
    pub(crate) epoch: Option<Epoch>,
    pub(crate) alive: bool,
    /// The agents that it connects.
    pub(crate) agents: [u32; 2],
    pub(crate) last: [Duration; 2],
    pub(crate) last_frame: Duration,
}

#[derive(Debug, Clone)]
pub(crate) enum Packet {
    Offer,
    Launching,
    ToA(ToSource),
    ToB(ToDestination),
    Complete(Epoch, u64, u8),
    Frame(Epoch, u64, u8, u32),
    Ack(Epoch, u64),
    Missing(u8),
    Resumed(longhaul_protocol::message::AttemptState),
    Accepted,
    Refused,
    Noise,
    Summary,
    /// QEMU is about to load the guest.
    Loading,
    Unreadable(u8),
}

#[derive(Debug, Clone)]
pub(crate) enum Item {
    Packet(u32, Side, Packet),
    /// A frame that was in a buffer when its connection was cut.
    Late(u32, Packet),
    /// The connection ends for this side.
    Ended(u32, Side),
    Dial(u32, u32, Option<Epoch>, bool),
    Wake(Side, u32, u32),
    Guest,
    Stop(u32, u32),
    Loaded(u32, u32),
    Settled(u32, u32),
    Synced(u8),
    Fault(Fault),
    Restart(Side),
    Begin,
    /// A question reaches the arbiter: who asks, the attempt, the agent.
    Claim(Side, u32, u32),
    /// The arbiter's answer.
    Claimed(Side, u32, u32, Claimed),
    OfferTimeout(u32, u32),
    ExportsEnd(u32),
    Operator,
    Chatter,
    /// A page reaches the page server: its number, the agent, the frame's connection.
    Take(u32, u32, u32, Frame),
    /// The page server gives QEMU a page.
    Place(u32, Frame),
    /// The destination's agent sees that the page server has ended.
    ServerGone(u32, u32, u32),
    /// The destination's agent starts a page server.
    Serve(u32, u32),
    /// The memory file is complete.
    Kept(u32, u32),
    /// The source looks whether its drain is stuck.
    LookAtDrain(u32, u32),
    /// An operator looks after a guest whose memory is lost.
    LookAtMemory,
}

/// A frame: its epoch, number, block and version.
pub(crate) type Frame = (Epoch, u64, u8, u32);

pub(crate) struct World {
    pub(crate) rng: Rng,
    pub(crate) now: Duration,
    pub(crate) plan: Plan,
    pub(crate) variant: Variant,
    pub(crate) hosts: [Host; 2],
    pub(crate) out: Vec<Out>,
    pub(crate) inn: Vec<In>,
    pub(crate) conns: Vec<Conn>,
    pub(crate) network_up: bool,
    /// The last acknowledged write of each block.
    pub(crate) truth: [u32; BLOCKS],
    pub(crate) clock: u32,
    pub(crate) steps: u32,
    /// The guest's QEMU was lost with its host.
    pub(crate) guest_dead: bool,
    pub(crate) trace: Option<Vec<String>>,
    pub(crate) failure: Option<String>,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    items: BTreeMap<u64, Item>,
    serial: u64,
    pub(crate) held_since: Option<Duration>,
    /// When a guest that could not be resumed must have been tried again.
    pub(crate) resume_due: Option<Duration>,
    pub(crate) heard_at: Duration,
    pub(crate) resume_fails: u32,
    /// An attempt whose offer is on its way, and its connection.
    pub(crate) preparing: Option<(u32, u32)>,
    pub(crate) attempts: u32,
    /// The generation of each attempt.
    pub(crate) generations: Vec<u64>,
    pub(crate) arbiter_down_until: Duration,
    /// What the arbiter did: leases that made a guest move, and gave it back.
    pub(crate) arbitrated: [u32; 2],
    /// How many page servers were started.
    pub(crate) servers: u32,
    /// How many pages have reached a page server.
    pub(crate) pages: u32,
    /// Blocks that any page server has acknowledged.
    pub(crate) acknowledged: u8,
    /// What became of memory that follows.
    pub(crate) seen: Seen,
}

/// What became of memory that follows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) followed: bool,
    pub(crate) replaced: bool,
    pub(crate) from_file: bool,
    pub(crate) given_up: bool,
}

impl World {
    pub(crate) fn new(seed: u64, variant: Variant, traced: bool) -> Self {
        let mut rng = Rng(seed);
        let plan = Plan::of(&mut rng, variant);
        let mut world = Self {
            rng,
            now: Duration::ZERO,
            variant,
            hosts: [Host::new(Side::A), Host::new(Side::B)],
            out: Vec::new(),
            inn: Vec::new(),
            conns: Vec::new(),
            network_up: true,
            truth: [0; BLOCKS],
            clock: 0,
            steps: 0,
            guest_dead: false,
            trace: traced.then(Vec::new),
            failure: None,
            queue: BinaryHeap::new(),
            items: BTreeMap::new(),
            serial: 0,
            held_since: None,
            resume_due: None,
            heard_at: Duration::ZERO,
            resume_fails: plan.resume_fails,
            preparing: None,
            attempts: 0,
            generations: Vec::new(),
            arbiter_down_until: Duration::ZERO,
            arbitrated: [0; 2],
            servers: 0,
            pages: 0,
            acknowledged: 0,
            seen: Seen::default(),
            plan,
        };
        world.hosts[0].qemu = Some(Qemu {
            attempt: 0,
            running: true,
            generation: 1,
            exports: false,
        });
        for (at, fault) in world.plan.faults.clone() {
            world.at(at, Item::Fault(fault));
        }
        world.at(ms(1), Item::Begin);
        world.at(ms(2), Item::Guest);
        if world.plan.chatter {
            world.at(ms(10), Item::Chatter);
        }
        world
    }

    pub(crate) fn a(&mut self) -> &mut Host {
        &mut self.hosts[0]
    }

    pub(crate) fn b(&mut self) -> &mut Host {
        &mut self.hosts[1]
    }

    pub(crate) fn host(&mut self, side: Side) -> &mut Host {
        &mut self.hosts[side as usize]
    }

    pub(crate) fn at(&mut self, time: Duration, item: Item) {
        self.serial += 1;
        self.queue.push(Reverse((time.max(self.now), self.serial)));
        self.items.insert(self.serial, item);
    }

    pub(crate) fn after(&mut self, from: u64, to: u64, item: Item) {
        let time = self.now + self.rng.between(from, to);
        self.at(time, item);
    }

    pub(crate) fn next(&mut self) -> Option<Item> {
        let Reverse((time, serial)) = self.queue.pop()?;
        self.now = time;
        self.items.remove(&serial)
    }

    pub(crate) fn say(&mut self, text: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            let now = self.now.as_micros() as f64 / 1e3;
            trace.push(format!("{now:>12.3} {}", text()));
        }
    }

    pub(crate) fn fail(&mut self, what: &str) {
        if self.failure.is_none() {
            self.failure = Some(what.to_owned());
            self.say(|| format!("FAILED: {what}"));
        }
    }

    // The network.

    pub(crate) fn connect(&mut self, attempt: u32, epoch: Option<Epoch>) -> u32 {
        let agents = [self.hosts[0].agent, self.hosts[1].agent];
        self.conns.push(Conn {
            attempt,
            epoch,
            alive: true,
            agents,
            last: [self.now; 2],
            last_frame: self.now,
        });
        self.conns.len() as u32 - 1
    }

    pub(crate) fn is_reachable(&self) -> bool {
        self.network_up && self.hosts.iter().all(|host| host.up)
    }

    pub(crate) fn transmit(&mut self, conn: u32, to: Side, packet: Packet) {
        let delay = self.rng.between(1, self.plan.delay_ms);
        let now = self.now;
        let line = &mut self.conns[conn as usize];
        if !line.alive {
            return;
        }
        let frame = matches!(packet, Packet::Frame(..));
        let last = match frame {
            true => &mut line.last_frame,
            false => &mut line.last[to as usize],
        };
        let time = (now + delay).max(*last);
        *last = time;
        self.at(time, Item::Packet(conn, to, packet));
    }

    /// Cuts a connection: each side notices in its own time.
    pub(crate) fn cut(&mut self, conn: u32) {
        if !std::mem::replace(&mut self.conns[conn as usize].alive, false) {
            return;
        }
        self.say(|| format!("connection {conn} is cut"));
        self.after(0, 3000, Item::Ended(conn, Side::A));
        self.after(0, 3000, Item::Ended(conn, Side::B));
    }

    pub(crate) fn cut_all(&mut self) {
        for conn in 0..self.conns.len() as u32 {
            self.cut(conn);
        }
    }

    // The guest.

    pub(crate) fn running(&self, side: Side) -> bool {
        let qemu = &self.hosts[side as usize].qemu;
        qemu.as_ref().is_some_and(|qemu| qemu.running)
    }

    pub(crate) fn check(&mut self) {
        if self.running(Side::A) && self.running(Side::B) {
            self.fail("two copies of the guest run");
        }
    }

    /// The guest reads and writes, where it runs.
    pub(crate) fn guest(&mut self) {
        self.steps += 1;
        if self.steps < self.plan.guest_steps {
            self.after(5, 60, Item::Guest);
        }
        for side in [Side::A, Side::B] {
            if !self.running(side) {
                continue;
            }
            let block = self.rng.below(BLOCKS as u64) as usize;
            if self.waits_for(side, block) {
                continue;
            }
            let missing = self.hosts[side as usize].missing & (1 << block) != 0;
            if !missing && self.hosts[side as usize].content[block] != self.truth[block] {
                let text = format!("block {block} has lost a write at {side:?}");
                self.fail(&text);
            }
            if self.rng.one_in(2) {
                self.clock += 1;
                self.truth[block] = self.clock;
                let host = &mut self.hosts[side as usize];
                host.content[block] = self.clock;
                if host.missing & (1 << block) != 0 {
                    host.missing &= !(1 << block);
                    host.unsynced |= 1 << block;
                }
                match side {
                    Side::A => self.written(block),
                    Side::B => self.may_be_present(),
                }
            }
        }
    }

    pub(crate) fn written(&mut self, block: usize) {
        for n in 0..self.out.len() {
            if self.out[n].tracks & (1 << block) != 0 && !self.out[n].stopped {
                self.out[n].dirty |= 1 << block;
                self.pump(n);
            }
        }
    }
}
