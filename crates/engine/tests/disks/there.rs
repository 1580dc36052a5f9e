//! The destination: its agent, as every owner of the engine has to implement it, and storage that
//! is subject to power cuts.

use crate::model::{Block, Random, SECTOR_BYTES, SECTORS};
use crate::variant::Variant;
use crate::world::{
    DISK, Frame, Item, Kept, MEMORY, Op, Stage, ToHere, ToThere, World, digest, put,
};
use longhaul_codec::BlockId;
use longhaul_engine::destination::Destination;
use longhaul_engine::presence::{Begin, ChunkMask, Operation, Output, Presence, RequestId};
use longhaul_engine::remaining::Remaining;
use longhaul_protocol::{BlockRange, Epoch, RegionSpec};
use std::collections::{BTreeMap, BTreeSet};

/// The content of a fresh file where nothing was written.
const FRESH: u16 = 0;

pub(crate) struct There {
    pub(crate) destination: Destination,
    pub(crate) presence: Presence,
    pub(crate) memory: Vec<Block>,
    /// The disk as its file reads now.
    pub(crate) live: Vec<Block>,
    /// The least that it holds after a power cut.
    pub(crate) durable: Vec<Block>,
    /// The data that the running sync makes durable.
    pub(crate) syncing: Option<Vec<Block>>,
    pub(crate) storing: Option<Vec<ChunkMask>>,
    /// Masks that survive a power cut, and those that survive the agent.
    pub(crate) stored: BTreeMap<u32, u64>,
    pub(crate) noted: BTreeMap<u32, u64>,
    /// The stored masks as a process reads them, including those that could not be made durable.
    stored_seen: BTreeMap<u32, u64>,
    /// Blocks that the system takes for durable, and that are not.
    lost: BTreeSet<u64>,
    /// Whether something could not be made durable since the host was started: recorded, and known
    /// to this agent.
    broken: bool,
    pub(crate) gave_up: bool,
    pub(crate) acknowledges: bool,
    pub(crate) complete: bool,
    pub(crate) ready: bool,
    pub(crate) committed: bool,
    /// Byte ranges that waiting requests may now perform.
    go: BTreeMap<u64, std::ops::Range<u64>>,
}

impl There {
    pub(crate) fn new(specs: &[RegionSpec; 2]) -> Self {
        let zeros = |n: usize| vec![[FRESH; 8]; specs[n].blocks as usize];
        Self {
            destination: Destination::new(specs).unwrap(),
            presence: Presence::new(DISK, specs[1].blocks),
            memory: zeros(0),
            live: zeros(1),
            durable: zeros(1),
            syncing: None,
            storing: None,
            stored: BTreeMap::new(),
            noted: BTreeMap::new(),
            stored_seen: BTreeMap::new(),
            lost: BTreeSet::new(),
            broken: false,
            gave_up: false,
            acknowledges: false,
            complete: false,
            ready: false,
            committed: false,
            go: BTreeMap::new(),
        }
    }

    /// Returns whether the owner waits for everything to be durable.
    pub(crate) fn should_settle(&self) -> bool {
        let idle = self.syncing.is_none() && self.storing.is_none() && !self.gave_up;
        let waited_for = self.complete || self.committed && self.presence.missing_blocks() == 0;
        idle && waited_for && self.presence.is_listed() && !self.presence.is_settled()
    }

    fn note(&mut self, masks: &[ChunkMask]) {
        for mask in masks {
            self.noted.insert(mask.chunk, mask.missing);
        }
    }
}

fn keeps(random: &mut Random, kept: Kept) -> bool {
    match kept {
        Kept::Nothing => false,
        Kept::Everything => true,
        Kept::Some => random.below(2) == 0,
    }
}

/// Models a power cut: data that was not synced may or may not be there.
pub(crate) fn keep_some(random: &mut Random, kept: Kept, durable: &mut [Block], live: &[Block]) {
    for (durable, live) in durable.iter_mut().zip(live) {
        for (durable, live) in durable.iter_mut().zip(live) {
            if keeps(random, kept) {
                *durable = *live;
            }
        }
    }
}

fn remaining(masks: &BTreeMap<u32, u64>) -> Vec<Remaining> {
    let missing = masks.iter().filter(|(_, mask)| **mask != 0);
    let part = |(chunk, mask): (&u32, &u64)| Remaining {
        chunk: *chunk,
        chunks: 1,
        mask: *mask,
        written_blocks: 0,
    };
    missing.map(part).collect()
}

impl World {
    pub(crate) fn heard_there(&mut self) {
        let Some(message) = self.to_there.pop_front() else {
            return;
        };
        match message {
            ToThere::List(list) => {
                let last = list.next_chunk.is_none();
                let is_listed = list.from_seq != u64::MAX;
                self.there.presence.listed(&list).unwrap();
                if last && is_listed {
                    for block in self.there.destination.listed(DISK) {
                        self.there.presence.rejected(BlockRange::new(block, 1), 0);
                    }
                }
            }
            ToThere::Complete(frames) => {
                self.there.complete = true;
                self.there.destination.announced(Epoch(self.epoch), frames);
            }
            ToThere::Commit => {
                let there = &mut self.there;
                assert!(there.ready, "COMMIT before READY");
                if !there.committed {
                    // READY is durable together with the list: the agent's records begin with it.
                    let (lacks, _) = there.presence.lacks(0, usize::MAX);
                    there.noted.clear();
                    for part in lacks {
                        for chunk in part.chunk..part.chunk + part.chunks {
                            there.noted.insert(chunk, part.mask);
                        }
                    }
                }
                self.committed();
            }
        }
    }

    /// Delivers a frame: accepted blocks are written, under one lock.
    pub(crate) fn arrive(&mut self, epoch: u32, frame: &Frame) {
        let counts = self.setting.variant;
        let of = match counts {
            Variant::OldConnectionCounts => Epoch(self.epoch),
            _ => Epoch(epoch),
        };
        let seq = match counts {
            Variant::OldContentCounts => u64::MAX - 1,
            _ => frame.seq,
        };
        let there = &mut self.there;
        let mut rejected = Vec::new();
        let mut writes = Vec::new();
        for (id, item) in &frame.items {
            let accepted = there
                .destination
                .accepts(there.destination.epoch(), *id, frame.seq);
            let overwrites = counts == Variant::PullOverwrites && there.committed;
            let is_its = id.region == MEMORY || there.presence.accepts(of, id.block, seq);
            if !accepted || !(is_its || overwrites) {
                continue;
            }
            match item {
                Item::Zero => writes.push((*id, [0; 8])),
                Item::Content(block) => writes.push((*id, *block)),
                Item::Reference(source, expected) => {
                    let found = match source.region {
                        MEMORY => there.memory[source.block as usize],
                        _ => there.live[source.block as usize],
                    };
                    let misread = self.adverse.misreads > 0;
                    self.adverse.misreads -= u32::from(misread);
                    if digest(&found) == *expected && !misread {
                        writes.push((*id, found));
                    } else {
                        rejected.push((id.region, BlockRange::new(id.block, 1)));
                    }
                }
            }
        }
        for (BlockId { region, block }, content) in writes {
            let range = BlockRange::new(block, 1);
            there.destination.written(region, range, frame.seq);
            if region == MEMORY {
                there.memory[block as usize] = content;
                continue;
            }
            there.live[block as usize] = content;
            there.lost.remove(&block);
            let masks = there.presence.arrived(range, seq);
            if counts != Variant::ArrivalsNotNoted {
                there.note(&masks);
            }
        }
        for (region, range) in &rejected {
            if *region == DISK {
                there.presence.rejected(*range, frame.seq);
            }
        }
        there
            .destination
            .applied(Epoch(epoch), frame.seq, &rejected)
            .unwrap();
        there.acknowledges = true;
    }

    // The guest's requests.

    pub(crate) fn begin_there(&mut self, id: u64) {
        let Some(running) = self.running.get(&id).cloned() else {
            return;
        };
        let (operation, sectors) = match &running.op {
            Op::Read(sectors) => (Operation::Read, sectors.clone()),
            Op::Write(sectors, _) => (Operation::Write, sectors.clone()),
            Op::Discard(sectors) => (Operation::Discard, sectors.clone()),
            Op::Flush | Op::Memory(_) => {
                self.there.presence.flush(RequestId(id));
                return self.stage(id, Stage::Waiting);
            }
        };
        let bytes = sectors.start * SECTOR_BYTES..sectors.end * SECTOR_BYTES;
        let whole = sectors.start % 8 == 0 && sectors.end % 8 == 0;
        if self.is(Variant::IntentAfterData) && operation == Operation::Write && whole {
            // Data first; the presence is told of the request after that.
            self.there.go.insert(id, bytes);
            return self.stage(id, Stage::Going);
        }
        let begun = self
            .there
            .presence
            .begin(RequestId(id), operation, bytes.clone());
        let at_once = match operation {
            Operation::Read => self.is(Variant::ReadAtOnce),
            Operation::Write => self.is(Variant::PartAtOnce),
            Operation::Discard => false,
        };
        match begun.unwrap() {
            Begin::Go(bytes) => {
                self.there.go.insert(id, bytes);
                self.stage(id, Stage::Going);
            }
            Begin::Wait if at_once => {
                self.there.go.insert(id, bytes);
                self.stage(id, Stage::Going);
            }
            Begin::Wait => self.stage(id, Stage::Waiting),
        }
    }

    fn stage(&mut self, id: u64, stage: Stage) {
        if let Some(running) = self.running.get_mut(&id) {
            running.stage = stage;
        }
    }

    pub(crate) fn data_there(&mut self, id: u64) {
        let Some(running) = self.running.get(&id).cloned() else {
            return;
        };
        let bytes = self.there.go.get(&id).cloned().unwrap_or(0..0);
        let sectors = bytes.start / SECTOR_BYTES..bytes.end / SECTOR_BYTES;
        match running.op {
            Op::Read(_) => self.check(&self.there.live, sectors, "read at the destination"),
            _ => self.put_there(sectors, running.value.unwrap_or(0)),
        }
        self.stage(id, Stage::Data);
    }

    pub(crate) fn done_there(&mut self, id: u64, ok: bool) {
        let Some(running) = self.running.get(&id).cloned() else {
            return;
        };
        if let Some(bytes) = self.there.go.remove(&id) {
            let whole = bytes.start % 4096 == 0 && bytes.end % 4096 == 0;
            let write = matches!(running.op, Op::Write(..));
            if self.is(Variant::IntentAfterData) && write && whole {
                let presence = &mut self.there.presence;
                let begun = presence.begin(RequestId(id), Operation::Write, bytes.clone());
                begun.unwrap();
            }
            if !ok {
                // A part of it may have been written.
                let half = bytes.start / SECTOR_BYTES..(bytes.start + bytes.end) / 2 / SECTOR_BYTES;
                self.put_there(half, running.value.unwrap_or(0));
            }
        }
        let masks = self.there.presence.done(RequestId(id), ok);
        if !self.is(Variant::WritesNotNoted) {
            self.there.note(&masks);
        }
        if ok {
            self.answered(id);
        } else {
            // The guest gets an error, and tries again.
            self.stage(id, Stage::Fresh);
        }
    }

    // Durability.

    pub(crate) fn outputs(&mut self) {
        while let Some(output) = self.there.presence.poll() {
            match output {
                Output::Go(RequestId(id), bytes) => {
                    // A request that did not wait has begun already.
                    if self
                        .running
                        .get(&id)
                        .is_some_and(|r| r.stage == Stage::Waiting)
                    {
                        self.there.go.insert(id, bytes);
                        self.stage(id, Stage::Going);
                    }
                }
                Output::Want(range) => self.say(ToHere::Want(range)),
                Output::Superseded(range) => self.say(ToHere::Superseded(range)),
                Output::SyncData => {
                    self.there.syncing = Some(self.there.live.clone());
                    if self.is(Variant::MasksFirst) {
                        self.there.presence.data_synced(true);
                    }
                }
                Output::StoreMasks(masks) => self.there.storing = Some(masks),
                Output::Flushed(RequestId(id)) => self.flushed(id),
                // The guest learns that durability is lost.
                Output::FlushFailed(RequestId(id)) => self.answered(id),
                Output::Unreadable(_) => panic!("the source can read everything"),
            }
        }
    }

    fn flushed(&mut self, id: u64) {
        if let Some(running) = self.running.get(&id).cloned() {
            self.model.flushed(running.asked_at);
            self.answered(id);
        }
    }

    fn say(&mut self, message: ToHere) {
        if self.connected {
            self.to_here.push_back(message);
        }
    }

    pub(crate) fn synced(&mut self) {
        if let Some(snapshot) = self.there.syncing.take() {
            for (block, content) in snapshot.into_iter().enumerate() {
                if !self.there.lost.contains(&(block as u64)) {
                    self.there.durable[block] = content;
                }
            }
        }
        if self.is(Variant::MasksFirst) {
            return;
        }
        self.there.presence.data_synced(true);
        if self.is(Variant::FlushBeforeMasks) {
            let flushes = self.running.iter().filter(|(_, running)| {
                matches!(running.op, Op::Flush) && running.stage == Stage::Waiting
            });
            let flushes: Vec<u64> = flushes.map(|(id, _)| *id).collect();
            if self.there.syncing.is_none() {
                flushes.into_iter().for_each(|id| self.flushed(id));
            }
        }
    }

    pub(crate) fn stored(&mut self) {
        for mask in self.there.storing.take().unwrap_or_default() {
            self.there.stored.insert(mask.chunk, mask.missing);
            self.there.stored_seen.insert(mask.chunk, mask.missing);
        }
        self.there.presence.masks_stored(true);
    }

    fn put_there(&mut self, sectors: std::ops::Range<u64>, value: u16) {
        for sector in sectors.clone() {
            self.there.lost.remove(&(sector / SECTORS));
        }
        put(&mut self.there.live, sectors, value);
    }

    /// Fails a sync: the system forgets that the data still has to be written.
    pub(crate) fn fail_sync(&mut self) {
        let there = &mut self.there;
        there.syncing = None;
        let both = there.live.iter().zip(&there.durable).enumerate();
        let lost = both.filter(|(_, (live, durable))| live != durable);
        there.lost.extend(lost.map(|(block, _)| block as u64));
        (there.broken, there.gave_up) = (true, true);
        there.presence.data_synced(false);
    }

    /// Writes masks that do not become durable.
    pub(crate) fn fail_store(&mut self) {
        let there = &mut self.there;
        for mask in there.storing.take().unwrap_or_default() {
            there.stored_seen.insert(mask.chunk, mask.missing);
        }
        (there.broken, there.gave_up) = (true, true);
        there.presence.masks_stored(false);
    }

    // Trouble.

    /// Kills and restarts the agent. The guest's QEMU repeats unanswered requests.
    pub(crate) fn die(&mut self) {
        let masks = self.there.noted.clone();
        let seen = self.there.stored_seen.clone();
        self.begin_anew(&masks, &seen);
        if self.there.broken && !self.is(Variant::FailureForgotten) {
            self.there.gave_up = true;
            self.there.presence.give_up_durability();
        }
        for running in self.running.values_mut() {
            running.stage = Stage::Fresh;
        }
    }

    /// Cuts the host's power: the guest is gone, and only the disk remains.
    pub(crate) fn lose_power(&mut self, kept: Kept) {
        self.power_cut = true;
        self.running.clear();
        let there = &mut self.there;
        for lost in std::mem::take(&mut there.lost) {
            there.live[lost as usize] = there.durable[lost as usize];
        }
        keep_some(&mut self.random, kept, &mut there.durable, &there.live);
        there.live = there.durable.clone();
        // The same for masks that were being stored: their data is durable.
        for mask in there.storing.take().unwrap_or_default() {
            if keeps(&mut self.random, kept) {
                there.stored.insert(mask.chunk, mask.missing);
            }
        }
        there.broken = false;
        let masks = there.stored.clone();
        there.noted = masks.clone();
        there.stored_seen = masks.clone();
        self.begin_anew(&masks, &masks);
    }

    fn begin_anew(&mut self, masks: &BTreeMap<u32, u64>, stored: &BTreeMap<u32, u64>) {
        if self.connected {
            self.cut();
        }
        let there = &mut self.there;
        there.gave_up = false;
        there.syncing = None;
        there.storing = None;
        there.go.clear();
        there.acknowledges = false;
        there.presence = Presence::restored(
            DISK,
            self.setting.blocks,
            &remaining(masks),
            &remaining(stored),
        )
        .unwrap();
        let specs = crate::world::specs(&self.setting);
        there.destination = Destination::new(&specs).unwrap();
        there.destination.seal();
    }
}
