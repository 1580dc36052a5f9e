//! The simulated world: both hosts, the link between them and the guest, with the events that may
//! happen and their effects.

use crate::model::{Block, Model, Random, SECTORS};
use crate::there::There;
use crate::variant::Variant;
use longhaul_codec::{BlockId, Digest};
use longhaul_engine::remaining::{List, Remaining};
use longhaul_engine::source::{Answer, Batch, Source, SourceError, WriteId};
use longhaul_engine::stop::Wish;
use longhaul_engine::strategy::{Promise, Strategy};
use longhaul_protocol::message::Acknowledgement;
use longhaul_protocol::{BlockRange, RegionId, RegionSpec};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

pub(crate) const MEMORY: RegionId = RegionId(0);
pub(crate) const DISK: RegionId = RegionId(1);

/// A request of the guest, or of its QEMU.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    Read(Range<u64>),
    /// A write of zeros, or of other content.
    Write(Range<u64>, bool),
    Discard(Range<u64>),
    Flush,
    Memory(u64),
}

/// How often each fault may happen.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Adverse {
    pub(crate) cuts: u32,
    pub(crate) stragglers: u32,
    pub(crate) deaths: u32,
    pub(crate) power_cuts: u32,
    pub(crate) source_restarts: u32,
    pub(crate) failed_writes: u32,
    /// Data or masks cannot be made durable at the destination.
    pub(crate) failed_syncs: u32,
    /// The source's host loses power after the handover.
    pub(crate) source_power_cuts: u32,
    /// References that fail at the destination although their content is there.
    pub(crate) misreads: u32,
}

#[derive(Debug, Clone)]
pub(crate) struct Setting {
    pub(crate) strategy: Strategy,
    pub(crate) variant: Variant,
    pub(crate) blocks: u64,
    pub(crate) memory_blocks: u64,
    pub(crate) here: Vec<Op>,
    pub(crate) late: Vec<Op>,
    pub(crate) there: Vec<Op>,
    pub(crate) depth: usize,
    pub(crate) batch: usize,
    pub(crate) passes: u32,
    /// Whether the guest usually issues its requests before anything else happens.
    pub(crate) eager: bool,
    pub(crate) adverse: Adverse,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Item {
    Zero,
    Content(Block),
    Reference(BlockId, Digest),
}

#[derive(Debug, Clone)]
pub(crate) struct Frame {
    pub(crate) seq: u64,
    pub(crate) items: Vec<(BlockId, Item)>,
}

#[derive(Debug, Clone)]
pub(crate) enum ToThere {
    List(List),
    Complete(u64),
    Commit,
}

#[derive(Debug, Clone)]
pub(crate) enum ToHere {
    Want(BlockRange),
    Superseded(BlockRange),
    Missing(Range<u32>, Vec<Remaining>),
    Ready,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Fresh,
    /// The source's disk has the data, or the write was reported, whichever happens first.
    Half,
    Waiting,
    Going,
    Data,
}

#[derive(Debug, Clone)]
pub(crate) struct Running {
    pub(crate) op: Op,
    pub(crate) value: Option<u16>,
    pub(crate) stage: Stage,
    pub(crate) asked_at: u64,
}

/// What a power cut leaves of unsynced data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kept {
    Nothing,
    Everything,
    Some,
}

/// A possible event. Events that are named first happen first by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Here(u64),
    Begin(u64),
    Data(u64),
    Done(u64),
    Encode,
    ToThere,
    ToHere,
    Frame(usize),
    Acknowledge,
    Acknowledged,
    Take,
    Synced,
    Stored,
    Settle,
    Issue,
    Pass,
    Stop,
    Close,
    Announce,
    Ready,
    Reconnect,
    Fail(u64),
    Straggler(usize),
    Cut,
    Die,
    /// The agent dies when a frame's content is written and not yet recorded.
    DieInFrame(usize),
    PowerCut(Kept),
    /// The data or masks being synced may not become durable.
    FailSync,
    FailStore,
    /// The destination's host is restarted, since a disk there has failed.
    Reboot,
    Restart,
    SourcePowerCut(Kept),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
pub(crate) enum Phase {
    Running,
    Stopped,
    Closed,
    HandedOver,
}

pub(crate) struct World {
    pub(crate) setting: Setting,
    pub(crate) model: Model,
    pub(crate) random: Random,
    pub(crate) source: Source,
    pub(crate) disk: Vec<Block>,
    /// The least of it that survives a power cut.
    pub(crate) disk_durable: Vec<Block>,
    /// The disk before the guest's last write.
    pub(crate) disk_before: Vec<Block>,
    pub(crate) memory: Vec<Block>,
    pub(crate) dirty: BTreeSet<u64>,
    pub(crate) batches: VecDeque<(u32, Batch)>,
    pub(crate) may_take: bool,
    pub(crate) script: VecDeque<Op>,
    pub(crate) running: BTreeMap<u64, Running>,
    pub(crate) next_op: u64,
    pub(crate) next_value: u16,
    pub(crate) phase: Phase,
    pub(crate) passes: u32,
    pub(crate) connected: bool,
    pub(crate) epoch: u32,
    pub(crate) sent_frames: u64,
    pub(crate) announced: Option<(u32, u64)>,
    pub(crate) frames: Vec<Frame>,
    pub(crate) stragglers: Vec<(u32, Frame)>,
    pub(crate) acks: VecDeque<Acknowledgement>,
    pub(crate) to_there: VecDeque<ToThere>,
    pub(crate) to_here: VecDeque<ToHere>,
    pub(crate) there: There,
    pub(crate) adverse: Adverse,
    pub(crate) power_cut: bool,
    pub(crate) now: Duration,
    /// The events so far.
    pub(crate) told: Vec<Step>,
}

pub(crate) fn specs(setting: &Setting) -> [RegionSpec; 2] {
    let spec = |id, name: &str, blocks, durable| RegionSpec {
        id,
        name: name.to_owned(),
        blocks,
        durable,
        starts_zero: true,
    };
    [
        spec(MEMORY, "ram", setting.memory_blocks, false),
        spec(DISK, "disk", setting.blocks, true),
    ]
}

pub(crate) fn new_source(setting: &Setting, memory: Strategy) -> Source {
    let [ram, disk] = specs(setting);
    let wish = Wish::downtime(Duration::from_millis(300));
    let mut source = Source::new(memory, &[ram], wish, Duration::ZERO).unwrap();
    source.add(&disk, setting.strategy).unwrap();
    source
}

/// Half of the blocks are holes at first.
fn first_value(block: u64) -> u16 {
    if block % 4 < 2 {
        60_000 + block as u16
    } else {
        0
    }
}

impl World {
    pub(crate) fn new(setting: Setting, seed: u64) -> Self {
        let mut source = new_source(&setting, Strategy::PRECOPY);
        for block in (0..setting.blocks).filter(|block| first_value(*block) == 0) {
            source.hole(DISK, BlockRange::new(block, 1)).unwrap();
        }
        source.pass_started(Duration::ZERO, true);
        source.pass_read();
        let disk: Vec<Block> = (0..setting.blocks).map(|b| [first_value(b); 8]).collect();
        Self {
            model: Model::new(setting.blocks, first_value),
            random: Random(seed),
            source,
            disk_before: disk.clone(),
            memory: (0..setting.memory_blocks)
                .map(|block| [first_value(block); 8])
                .collect(),
            disk_durable: disk.clone(),
            disk,
            dirty: BTreeSet::new(),
            batches: VecDeque::new(),
            may_take: true,
            script: setting.here.iter().cloned().collect(),
            running: BTreeMap::new(),
            next_op: 1,
            next_value: 1,
            phase: Phase::Running,
            passes: setting.passes,
            connected: true,
            epoch: 1,
            sent_frames: 0,
            announced: None,
            frames: Vec::new(),
            stragglers: Vec::new(),
            acks: VecDeque::new(),
            to_there: VecDeque::new(),
            to_here: VecDeque::new(),
            there: There::new(&specs(&setting)),
            adverse: setting.adverse,
            power_cut: false,
            now: Duration::ZERO,
            told: Vec::new(),
            setting,
        }
    }

    pub(crate) fn is(&self, variant: Variant) -> bool {
        self.setting.variant == variant
    }

    /// Returns whether everything is at the destination and no event is left.
    pub(crate) fn is_over(&self) -> bool {
        let quiet = self.script.is_empty() && self.running.is_empty();
        quiet && self.there.committed && self.there.presence.is_whole()
    }

    /// Returns the state as text, for the message of a failure.
    pub(crate) fn tell(&self) -> String {
        format!(
            "\n{:?}\n{} {:?}, pending {:?}, running {:?}, announced {:?} of {}, \
             missing {}, settled {}, ready {}, committed {}",
            self.told,
            self.setting.strategy.name,
            self.phase,
            self.source
                .pending_by_region()
                .iter()
                .map(|r| r.1)
                .collect::<Vec<_>>(),
            self.running,
            self.announced,
            self.sent_frames,
            self.there.presence.missing_blocks(),
            self.there.presence.is_settled(),
            self.there.ready,
            self.there.committed
        )
    }

    pub(crate) fn is_listed(&self) -> bool {
        self.setting.strategy.promise == Promise::List
    }

    fn guest_runs(&self) -> bool {
        (self.phase == Phase::Running || self.there.committed) && !self.power_cut
    }

    /// Returns the possible events.
    pub(crate) fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        for (id, running) in &self.running {
            steps.extend(match (self.there.committed, running.stage) {
                (false, Stage::Fresh | Stage::Half) => Some(Step::Here(*id)),
                (true, Stage::Fresh) => Some(Step::Begin(*id)),
                (true, Stage::Going) => Some(Step::Data(*id)),
                (true, Stage::Data) => Some(Step::Done(*id)),
                _ => None,
            });
        }
        let mut may = |step, enabled| {
            if enabled {
                steps.push(step);
            }
        };
        may(Step::Issue, self.setting.eager && self.can_issue());
        may(Step::Encode, !self.batches.is_empty());
        may(Step::ToThere, !self.to_there.is_empty());
        may(Step::ToHere, !self.to_here.is_empty());
        (0..self.frames.len().min(3)).for_each(|n| may(Step::Frame(n), true));
        may(Step::Acknowledge, self.there.acknowledges && self.connected);
        may(Step::Acknowledged, !self.acks.is_empty());
        may(Step::Take, self.may_take && self.connected);
        may(Step::Synced, self.there.syncing.is_some());
        may(Step::Stored, self.there.storing.is_some());
        may(Step::Settle, self.there.should_settle());
        may(Step::Issue, !self.setting.eager && self.can_issue());
        let ended = self.phase == Phase::Running && self.script.is_empty();
        may(Step::Pass, ended && self.passes > 0);
        let idle = self.running.is_empty();
        may(Step::Stop, self.phase == Phase::Running && idle);
        may(Step::Close, self.phase == Phase::Stopped && idle);
        may(Step::Announce, self.can_announce());
        may(Step::Ready, self.connected && self.can_be_ready());
        may(Step::Reconnect, !self.connected);
        may(
            Step::Reboot,
            self.there.gave_up && self.script.is_empty() && idle,
        );
        // Faults.
        let adverse = &self.adverse;
        for (id, running) in &self.running {
            let write = matches!(running.op, Op::Write(..)) && self.there.committed;
            let fails = write && running.stage == Stage::Going && adverse.failed_writes > 0;
            may(Step::Fail(*id), fails);
        }
        let straggles = adverse.stragglers > 0 && !self.stragglers.is_empty();
        (0..self.stragglers.len().min(2)).for_each(|n| may(Step::Straggler(n), straggles));
        may(Step::Cut, self.connected && adverse.cuts > 0);
        let there = self.there.committed && !self.is_over();
        may(Step::Die, there && adverse.deaths > 0);
        let frames = self.frames.len().min(2);
        (0..frames).for_each(|n| may(Step::DieInFrame(n), there && adverse.deaths > 0));
        let fails = there && adverse.failed_syncs > 0;
        may(Step::FailSync, fails && self.there.syncing.is_some());
        may(Step::FailStore, fails && self.there.storing.is_some());
        for kept in [Kept::Nothing, Kept::Everything, Kept::Some] {
            may(Step::PowerCut(kept), there && adverse.power_cuts > 0);
        }
        let released = self.phase == Phase::HandedOver && self.is_listed();
        may(Step::Restart, released && adverse.source_restarts > 0);
        for kept in [Kept::Nothing, Kept::Everything, Kept::Some] {
            let cut = released && adverse.source_power_cuts > 0;
            may(Step::SourcePowerCut(kept), cut);
        }
        steps
    }

    fn can_announce(&self) -> bool {
        let now = Some((self.epoch, self.sent_frames));
        self.phase == Phase::Closed
            && self.connected
            && self.batches.is_empty()
            && self.announced != now
            && self.frozen_is_sent()
    }

    fn frozen_is_sent(&self) -> bool {
        self.source
            .pending_by_region()
            .iter()
            .all(|(spec, pending)| {
                let listed = spec.id == DISK && self.is_listed();
                listed || *pending == 0
            })
    }

    fn can_be_ready(&self) -> bool {
        let there = &self.there;
        let arrived = there.complete && there.destination.is_complete();
        let settled = there.presence.is_settled() || self.is(Variant::ReadyUnsettled);
        !there.ready && arrived && there.presence.is_listed() && settled
    }

    pub(crate) fn run(&mut self, step: Step) {
        self.told.push(step);
        self.may_take |= step != Step::Take;
        match step {
            Step::Here(id) => self.here(id),
            Step::Begin(id) => self.begin_there(id),
            Step::Data(id) => self.data_there(id),
            Step::Done(id) => self.done_there(id, true),
            Step::Encode => self.encode(),
            Step::ToThere => self.heard_there(),
            Step::ToHere => self.heard_here(),
            Step::Frame(n) => {
                let frame = self.frames.remove(n);
                self.arrive(self.epoch, &frame);
            }
            Step::Acknowledge => {
                self.there.acknowledges = false;
                self.acks
                    .extend(self.there.destination.poll_acknowledgement());
            }
            Step::Acknowledged => {
                if let Some(ack) = self.acks.pop_front() {
                    self.source.acknowledged(&ack).unwrap();
                }
            }
            Step::Take => self.take(),
            Step::Synced => self.synced(),
            Step::Stored => self.stored(),
            Step::Settle => {
                self.there.presence.settle();
            }
            Step::Issue => self.issue(),
            Step::Pass => self.pass(),
            Step::Stop => self.stop(),
            Step::Close => {
                self.source.closed();
                self.phase = Phase::Closed;
                // QEMU flushes what it closes.
                if !self.is(Variant::ClosedUnflushed) {
                    self.disk_durable = self.disk.clone();
                }
            }
            Step::Announce => self.announce(),
            Step::Ready => {
                self.there.ready = true;
                self.there.destination.seal();
                self.there.presence.seal();
                assert_eq!(self.there.memory, self.memory, "memory differs at READY");
                self.to_here.push_back(ToHere::Ready);
            }
            Step::Reconnect => self.reconnect(),
            Step::Fail(id) => {
                self.adverse.failed_writes -= 1;
                self.done_there(id, false);
            }
            Step::Straggler(n) => {
                self.adverse.stragglers -= 1;
                let (epoch, frame) = self.stragglers.remove(n);
                self.arrive(epoch, &frame);
            }
            Step::Cut => {
                self.adverse.cuts -= 1;
                self.cut();
            }
            Step::Die => {
                self.adverse.deaths -= 1;
                self.die();
            }
            Step::DieInFrame(n) => {
                self.adverse.deaths -= 1;
                let frame = self.frames.remove(n);
                let noted = self.there.noted.clone();
                self.arrive(self.epoch, &frame);
                self.there.noted = noted;
                self.die();
            }
            Step::PowerCut(kept) => {
                self.adverse.power_cuts -= 1;
                self.script.clear();
                self.lose_power(kept);
            }
            Step::FailSync => {
                self.adverse.failed_syncs -= 1;
                self.fail_sync();
            }
            Step::FailStore => {
                self.adverse.failed_syncs -= 1;
                self.fail_store();
            }
            Step::Reboot => self.lose_power(Kept::Some),
            Step::Restart => {
                self.adverse.source_restarts -= 1;
                self.restart_source();
            }
            Step::SourcePowerCut(kept) => {
                self.adverse.source_power_cuts -= 1;
                self.lose_power_at_source(kept);
            }
        }
        self.answers();
        self.outputs();
    }

    // The guest.

    /// Returns whether the guest may issue its next request: it has no two pending ones for the
    /// same sectors.
    fn can_issue(&self) -> bool {
        let sectors = |op: &Op| match op {
            Op::Read(range) | Op::Write(range, _) | Op::Discard(range) => range.clone(),
            Op::Flush | Op::Memory(_) => 0..0,
        };
        let Some(range) = self.script.front().map(sectors) else {
            return false;
        };
        let meets = |other: Range<u64>| other.start < range.end && range.start < other.end;
        let free = !self
            .running
            .values()
            .any(|running| meets(sectors(&running.op)));
        free && self.guest_runs() && self.running.len() < self.setting.depth
    }

    fn issue(&mut self) {
        let Some(op) = self.script.pop_front() else {
            return;
        };
        if let Op::Memory(block) = op {
            if self.phase == Phase::Running {
                self.next_value += 1;
                let of_disk = usize::from(self.next_value) % self.disk.len();
                match self.next_value % 3 {
                    // A page of the guest's page cache.
                    0 => self.memory[block as usize] = self.disk[of_disk],
                    _ => self.memory[block as usize][3] = self.next_value,
                }
                self.dirty.insert(block);
            }
            return;
        }
        self.start(op);
    }

    pub(crate) fn start(&mut self, op: Op) {
        let id = self.next_op;
        self.next_op += 1;
        let mut value = None;
        if let Op::Write(sectors, zero) = &op {
            self.next_value += 1;
            value = Some(if *zero { 0 } else { self.next_value });
            self.model.begin(id, sectors.clone(), value);
        }
        if let Op::Discard(sectors) = &op {
            self.model.begin(id, sectors.clone(), None);
        }
        let asked_at = self.model.now();
        let stage = Stage::Fresh;
        let running = Running {
            op,
            value,
            stage,
            asked_at,
        };
        self.running.insert(id, running);
    }

    pub(crate) fn answered(&mut self, id: u64) {
        if self.running.remove(&id).is_some() {
            self.model.done(id);
        }
    }

    pub(crate) fn check(&self, disk: &[Block], sectors: Range<u64>, what: &str) {
        for sector in sectors {
            let value = disk[(sector / SECTORS) as usize][(sector % SECTORS) as usize];
            assert!(
                self.model.allows(sector, value, self.power_cut),
                "{what}: sector {sector} has {value}: {}",
                self.model.tell(sector) + &self.tell()
            );
        }
    }

    /// Does one half of a request at the source.
    fn here(&mut self, id: u64) {
        let Some(running) = self.running.get(&id).cloned() else {
            return;
        };
        let sectors = match running.op {
            Op::Read(sectors) => {
                self.check(&self.disk, sectors, "read at the source");
                return self.answered(id);
            }
            Op::Flush | Op::Memory(_) => {
                self.disk_durable = self.disk.clone();
                self.model.flushed(running.asked_at);
                return self.answered(id);
            }
            Op::Write(sectors, _) | Op::Discard(sectors) => sectors,
        };
        let data_first = !self.is(Variant::ReportBeforeData);
        if (running.stage == Stage::Fresh) == data_first {
            self.disk_before = self.disk.clone();
            put(&mut self.disk, sectors.clone(), running.value.unwrap_or(0));
            if !data_first {
                return self.answered(id);
            }
        } else if let Some(Answer::Now) = self.report(id, sectors)
            && data_first
        {
            return self.answered(id);
        }
        if let Some(running) = self.running.get_mut(&id) {
            running.stage = match running.stage {
                Stage::Fresh => Stage::Half,
                _ => Stage::Waiting,
            };
        }
    }

    fn report(&mut self, id: u64, sectors: Range<u64>) -> Option<Answer> {
        let first = sectors.start / SECTORS;
        let range = BlockRange::new(first, sectors.end.div_ceil(SECTORS) - first);
        match self.source.written_by(DISK, range, WriteId(id)) {
            Ok(_) if self.is(Variant::MirrorAnswersAtOnce) => {
                if self.source.poll_answer().is_none() {
                    self.is_there(id);
                }
                Some(Answer::Now)
            }
            Ok(answer) => Some(answer),
            // An owner that announces too early that no more writes follow ignores the error.
            Err(SourceError::Closed { .. }) => Some(Answer::Now),
            Err(error) => panic!("{error}"),
        }
    }

    /// Checks that a completed mirrored write is at the destination.
    fn is_there(&self, id: u64) {
        let Some(running) = self.running.get(&id) else {
            return;
        };
        if let (Op::Write(sectors, _), Some(value)) = (&running.op, running.value) {
            for sector in sectors.clone() {
                let there = self.there.live[(sector / 8) as usize][(sector % 8) as usize];
                assert_eq!(
                    there, value,
                    "a mirrored write is not there: sector {sector}"
                );
            }
        }
    }

    fn answers(&mut self) {
        while let Some(WriteId(id)) = self.source.poll_answer() {
            if self.connected {
                self.is_there(id);
            }
            self.answered(id);
        }
    }

    /// The commit: the guest continues at the destination.
    pub(crate) fn committed(&mut self) {
        if !self.there.committed {
            self.there.committed = true;
            self.script = self.setting.there.iter().cloned().collect();
        }
    }
}

pub(crate) fn digest(block: &Block) -> Digest {
    let mut bytes = [0; 16];
    for (n, sector) in block.iter().enumerate() {
        bytes[n * 2..n * 2 + 2].copy_from_slice(&sector.to_le_bytes());
    }
    Digest(bytes)
}

pub(crate) fn put(disk: &mut [Block], sectors: Range<u64>, value: u16) {
    for sector in sectors {
        disk[(sector / SECTORS) as usize][(sector % SECTORS) as usize] = value;
    }
}
