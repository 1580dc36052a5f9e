//! The content of frames: which blocks a frame carries and how each travels, in three steps (take,
//! decide, encoded).

use super::kept::Named;
use super::{Flight, Region, Source, SourceError};
use crate::block_map::{Class, ZERO};
use crate::chunk;
use crate::share::Turn;
use longhaul_codec::{BlockId, Decision, Digest, Staged};
use longhaul_protocol::MigrationId;
use std::time::Duration;

/// Blocks to be read, encoded and sent as one frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// The frame's sequence number.
    pub seq: u64,
    /// The blocks, ascending within each region.
    pub blocks: Vec<BlockId>,
    /// Whether the destination waits for them.
    pub urgent: bool,
    /// Whether the destination holds the frame until it loads the guest.
    pub held: bool,
}

/// Counters of what has been sent, by kind. They count blocks unless they say bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sent {
    /// Blocks that are all zero.
    pub zero_blocks: u64,
    /// Blocks unchanged since they were last sent, and not sent again.
    pub same_blocks: u64,
    /// Blocks sent as references to another block.
    pub reference_blocks: u64,
    /// Blocks sent as references to another guest's block.
    pub shared_blocks: u64,
    /// Blocks sent as digests alone, of content that the destination may have.
    pub kept_blocks: u64,
    /// Blocks sent as literals or as deltas.
    pub literal_blocks: u64,
    /// Frames as sent, in bytes.
    pub frame_bytes: u64,
    /// Number of frames.
    pub frames: u64,
    /// Blocks that had to be sent again because a reference did not hold.
    pub rejected_blocks: u64,
}

impl Sent {
    /// Returns the number of blocks of every kind.
    pub fn blocks(&self) -> u64 {
        self.zero_blocks
            + self.same_blocks
            + self.reference_blocks
            + self.shared_blocks
            + self.kept_blocks
            + self.literal_blocks
    }
}

impl Source {
    /// Takes the next blocks out of the index. Their content must be read after this call.
    pub fn take(&mut self, max_blocks: usize) -> Result<Option<Batch>, SourceError> {
        let seq = self.next_seq;
        let mut blocks = Vec::with_capacity(max_blocks.min(256));
        let (mut turn, mut held) = (None, false);
        let urgent = self.frozen && self.pending(Class::Wanted) > 0;
        if self.draining {
            self.take_left(max_blocks, seq, &mut blocks);
        } else {
            turn = self.take_before(max_blocks, seq, &mut blocks);
            if self.loading && blocks.is_empty() {
                self.take_left(max_blocks, seq, &mut blocks);
                held = self.held;
            }
        }
        if blocks.is_empty() {
            return Ok(None);
        }
        self.next_seq = seq.checked_add(1).ok_or(SourceError::Exhausted)?;
        blocks.sort_unstable();
        self.encoding += 1;
        self.flights.insert(
            seq,
            Flight {
                blocks: blocks.clone(),
                content_blocks: 0,
                bytes: 0,
                pinned: Vec::new(),
                named: Vec::new(),
                turn,
            },
        );
        Ok(Some(Batch {
            seq: u64::from(seq),
            blocks,
            urgent,
            held,
        }))
    }

    /// Takes blocks before the handover: those that must be there, or optional ones; also returns
    /// the kind that sent where there were both.
    fn take_before(
        &mut self,
        max_blocks: usize,
        seq: u32,
        blocks: &mut Vec<BlockId>,
    ) -> Option<Turn> {
        let must = self.sendable();
        let background = self.background_is_sendable() && !(must && self.leaves_disks);
        let turn = self.share.turn(must, background)?;
        self.take_turn(turn, max_blocks, seq, blocks);
        let both = must && background;
        if both && blocks.is_empty() {
            // All of them wait for an acknowledgement.
            let other = match turn {
                Turn::Must => Turn::Background,
                Turn::Background => Turn::Must,
            };
            self.take_turn(other, max_blocks, seq, blocks);
            return None;
        }
        both.then_some(turn)
    }

    fn take_turn(&mut self, turn: Turn, max_blocks: usize, seq: u32, blocks: &mut Vec<BlockId>) {
        if turn == Turn::Must && self.mirrors_hold() {
            return self.take_beside_writes(max_blocks, seq, blocks);
        }
        self.take_classes(turn, &Class::ALL, max_blocks, seq, blocks);
    }

    /// Takes blocks that writes wait for, or others that must be there: alternately, as long as
    /// there are both.
    fn take_beside_writes(&mut self, max_blocks: usize, seq: u32, blocks: &mut Vec<BlockId>) {
        let (wanted, others) = Class::ALL.split_at(1);
        let some = |classes: &[Class]| classes.iter().any(|class| self.is_sendable(*class));
        let (waited_for, beside) = (some(wanted), some(others) && self.has_room());
        let Some(turn) = self.writes.turn(waited_for, beside) else {
            return;
        };
        let beside_blocks = self.beside_writes(max_blocks);
        let (classes, room) = match turn {
            Turn::Must => (wanted, max_blocks),
            Turn::Background => (others, beside_blocks),
        };
        self.take_classes(Turn::Must, classes, room, seq, blocks);
        if !(waited_for && beside) {
            return;
        }
        if blocks.is_empty() {
            // All of them wait for an acknowledgement.
            let (classes, room) = match turn {
                Turn::Must => (others, beside_blocks),
                Turn::Background => (wanted, max_blocks),
            };
            self.take_classes(Turn::Must, classes, room, seq, blocks);
        } else {
            self.writes.taken(turn, blocks.len() as u64);
        }
    }

    fn take_classes(
        &mut self,
        turn: Turn,
        classes: &[Class],
        max_blocks: usize,
        seq: u32,
        blocks: &mut Vec<BlockId>,
    ) {
        if turn == Turn::Background {
            self.take_ahead(max_blocks, seq, blocks);
        }
        let hot = self.may_send_hot();
        let behind = self.mirrors_go_first();
        let mut kind = (!blocks.is_empty()).then_some(false);
        for class in classes.iter().copied() {
            for id in &self.order {
                let region = &mut self.regions[*id];
                let too_hot = match turn {
                    Turn::Must => !hot,
                    Turn::Background => !region.in_further_pass,
                };
                if class == Class::Hot && too_hot {
                    continue;
                }
                // Late writes have other content, and are counted by frame.
                let late = region.is_written_late();
                let waits = region.waits() && class != Class::Wanted && !self.frozen;
                if waits || kind.is_some_and(|kind| kind != late) {
                    continue;
                }
                let is_its = match turn {
                    Turn::Must => region.goes_before_the_switchover(class, behind),
                    Turn::Background => region.pushes(),
                };
                if !is_its {
                    continue;
                }
                let id = region.spec.id;
                let room = max_blocks - blocks.len();
                let taken = region.map.take(class, room, seq, self.frozen, |block| {
                    blocks.push(BlockId { region: id, block });
                });
                region.taken_blocks += taken as u64;
                kind = kind.or((taken > 0).then_some(late));
            }
        }
    }

    /// Takes blocks of memory that nothing waits for, but that the guest uses at once.
    fn take_ahead(&mut self, max_blocks: usize, seq: u32, blocks: &mut Vec<BlockId>) {
        for region in self.regions.iter_mut().filter(|region| region.fills()) {
            let id = region.spec.id;
            let room = max_blocks - blocks.len();
            let mut push = |block| blocks.push(BlockId { region: id, block });
            let taken = region.map.take_expected(room, seq, &mut push);
            region.taken_blocks += taken as u64;
        }
    }

    /// Decides how each block of a batch travels, given what was found in its content.
    pub fn decide(&mut self, batch: &Batch, staged: &[Staged]) -> Vec<Decision> {
        let seq = batch.seq as u32;
        let mut decisions = Vec::with_capacity(staged.len());
        let mut content_blocks = 0;
        let mut pinned = Vec::new();
        let mut named = Vec::new();
        for (id, staged) in batch.blocks.iter().zip(staged) {
            let digest = match staged {
                Staged::Zero => ZERO,
                Staged::Content(digest) => *digest,
            };
            let index = id.block as usize;
            let region = &mut self.regions[id.region];
            // Listed memory is missing there, whatever it held before.
            let is_missing = self.frozen && region.is_listed() && !region.is_written_late();
            // Wanted blocks, and blocks for a destination where the guest runs, do not rely on its
            // content; nor do promised blocks, since the list does not wait for mismatches.
            let guest_is_there = self.draining || is_missing;
            let plain = guest_is_there || region.mirror.is_some() || !region.promised.is_empty();
            let map = &mut region.map;
            if !guest_is_there && map.holds(index, &digest) {
                map.skip(index, seq);
                self.sent.same_blocks += 1;
                decisions.push(Decision::Skip);
                continue;
            }
            let base = map.known(index).filter(|_| !plain);
            let whole = plain || map.is_whole(index);
            let looked_up = !whole && (self.disk_references || map.keeps_digests());
            if let (Some(gang), Some(base)) = (&mut self.gang, &base) {
                gang.changed(base, *id);
            }
            let is_whole = map.is_whole(index);
            map.sent(index, seq, digest);
            content_blocks += usize::from(digest != ZERO);
            self.whole_blocks = self.whole_blocks.saturating_sub(u64::from(is_whole));
            let is_first = base.is_none_or(|base| base == ZERO) && !is_whole;
            decisions.push(if digest == ZERO {
                self.sent.zero_blocks += 1;
                Decision::Zero
            } else if let Some(source) = self.find(&digest).filter(|_| looked_up) {
                self.sent.reference_blocks += 1;
                let map = &mut self.regions[source.region].map;
                map.pin(source.block as usize);
                // A block that is written again will not match a disk.
                content_blocks -= usize::from(!map.keeps_digests());
                pinned.push(source);
                Decision::Reference { source, digest }
            } else if let Some((migration, source)) =
                self.find_shared(&digest).filter(|_| looked_up)
            {
                self.sent.shared_blocks += 1;
                Decision::Shared {
                    migration,
                    source,
                    digest,
                }
            } else if is_first && self.tries(id.region, index) {
                self.sent.kept_blocks += 1;
                content_blocks -= 1;
                let in_run = self.tries_run(id.region, index);
                named.push(Named { id: *id, in_run });
                match in_run {
                    true => Decision::KeptRun { digest },
                    false => Decision::Kept { digest },
                }
            } else {
                self.sent.literal_blocks += 1;
                match base.filter(|base| *base != ZERO) {
                    Some(base) => Decision::Changed { digest, base },
                    None => Decision::Literal { digest },
                }
            });
        }
        match self.flights.get_mut(&seq) {
            Some(flight) => {
                flight.content_blocks = content_blocks;
                flight.pinned = pinned;
                flight.named = named;
            }
            None => {
                self.unpin(&pinned);
                self.named_lost(&named);
            }
        }
        decisions
    }

    /// Records that the batch has become a frame of this size, or no frame if every block was
    /// skipped.
    pub fn encoded(&mut self, batch: &Batch, frame_bytes: Option<usize>) {
        let seq = batch.seq as u32;
        let bytes = frame_bytes.unwrap_or(0) as u64;
        self.encoding -= 1;
        if let Some(turn) = self.flights.get(&seq).and_then(|flight| flight.turn) {
            self.share.taken(turn, bytes);
        }
        let first = batch.blocks.first();
        let region = first.map(|id| &self.regions[id.region]);
        let before = |region: &Region| region.sends_again() && !region.is_written_late();
        let before = !self.frozen && region.is_some_and(before);
        let counts = before || region.is_some_and(Region::is_promised);
        let cost = self.costs.of(region.is_some_and(Region::is_written_late));
        // In a whole pass only blocks with content indicate the cost of a written block.
        match (self.pass.whole, self.flights.get(&seq)) {
            _ if !counts => {}
            (true, Some(flight)) if flight.content_blocks > 0 => {
                cost.add_first(flight.content_blocks as u64, bytes);
            }
            (true, _) => {}
            (false, _) => cost.add(batch.blocks.len(), bytes),
        }
        match frame_bytes {
            Some(_) => {
                self.sent.frames += 1;
                self.sent.frame_bytes += bytes;
                if let Some(flight) = self.flights.get_mut(&seq) {
                    flight.bytes = bytes;
                }
            }
            None => {
                if let Some(flight) = self.flights.remove(&seq) {
                    self.unpin(&flight.pinned);
                    self.answer_writes(seq, &flight.blocks);
                    self.settle(&flight.blocks);
                }
            }
        }
    }

    /// Records how long encoding the batch took.
    pub fn made(&mut self, batch: &Batch, took: Duration) {
        if !self.pass.whole {
            self.costs.made(batch.blocks.len(), took);
        }
    }

    fn may_send_hot(&self) -> bool {
        self.frozen || self.hot_allowed
    }

    /// Returns whether mirrors are behind: until they are in step, or the guest is stopped anyway,
    /// no other blocks that must be there are sent.
    fn mirrors_go_first(&self) -> bool {
        !self.frozen && self.regions.iter().any(Region::is_behind)
    }

    /// Returns whether blocks that must be there may be sent now.
    pub(super) fn sendable(&self) -> bool {
        Class::ALL.iter().any(|class| self.is_sendable(*class))
    }

    /// Returns whether blocks of a class may be sent, among those that must be there.
    fn is_sendable(&self, class: Class) -> bool {
        if class == Class::Hot && !self.may_send_hot() {
            return false;
        }
        let behind = self.mirrors_go_first();
        let goes = |region: &Region| region.goes_before_the_switchover(class, behind);
        let mut regions = self.regions.iter();
        regions.any(|region| goes(region) && region.map.pending(class) > 0)
    }

    /// Returns whether optional blocks may be sent now.
    pub(super) fn background_is_sendable(&self) -> bool {
        let may = |region: &Region| region.pushes() && (!region.fills() || self.has_room());
        !self.frozen && !self.background_held && self.regions.iter().any(may)
    }

    fn find(&self, digest: &Digest) -> Option<BlockId> {
        if !self.references {
            return None;
        }
        let found = self.index.find(digest, |global| {
            locate(&self.regions, global).is_some_and(|(region, block)| {
                let index = block as usize;
                region.map.holds(index, digest) && region.map.can_be_meant(index, self.frozen)
            })
        });
        let found = found.or_else(|| {
            self.tagged.find(digest, |global| {
                let place = locate(&self.regions, global);
                place.is_some_and(|(region, block)| {
                    region.can_be_meant_unseen(block as usize, self.frozen)
                })
            })
        })?;
        block_of(&self.regions, found)
    }

    /// Returns a block of another guest that has brought this content.
    fn find_shared(&self, digest: &Digest) -> Option<(MigrationId, BlockId)> {
        self.gang.as_ref()?.find(digest)
    }

    pub(super) fn unpin(&mut self, pinned: &[BlockId]) {
        for id in pinned {
            let map = &mut self.regions[id.region].map;
            map.unpin(id.block as usize);
            map.settle(chunk::of(id.block));
        }
    }

    pub(super) fn arrived(&mut self, seq: u32, flight: &Flight) {
        for id in &flight.blocks {
            let region = &mut self.regions[id.region];
            let global = region.first + id.block as u32;
            let Some(digest) = region.map.acknowledged(id.block as usize, seq) else {
                continue;
            };
            if digest == ZERO {
                continue;
            }
            if !region.map.keeps_digests() {
                self.arrived_of_disk(&digest, global);
                continue;
            }
            let (regions, index) = (&self.regions, &mut self.index);
            index.insert(&digest, global, |other| holds(regions, other, &digest));
            if let Some(gang) = &mut self.gang {
                gang.arrived(&digest, *id);
            }
        }
        self.answer_writes(seq, &flight.blocks);
        self.settle(&flight.blocks);
    }

    /// Records that the destination has this content in a block of a region without stored digests.
    fn arrived_of_disk(&mut self, digest: &Digest, global: u32) {
        if !self.references || !self.disk_references || self.draining {
            return;
        }
        if let (Some(gang), Some(id)) = (&mut self.gang, block_of(&self.regions, global)) {
            gang.arrived(digest, id);
        }
        if !self.tagged.is_open() {
            let disks = self.regions.iter().filter(|it| !it.map.keeps_digests());
            let left: u64 = disks.map(|it| it.map.pending_total()).sum();
            let under_way: usize = self.flights.values().map(|it| it.blocks.len()).sum();
            self.tagged.open(left + under_way as u64 + 1);
        }
        let regions = &self.regions;
        self.tagged.insert(digest, global, |other| {
            locate(regions, other).is_some_and(|(region, block)| region.stays(block as usize))
        });
    }

    /// Records that the destination has the blocks of frame `seq`: writes that waited for them may
    /// complete.
    fn answer_writes(&mut self, seq: u32, blocks: &[BlockId]) {
        for region in self.regions.iter_mut() {
            if let Some(mirror) = &mut region.mirror {
                mirror.arrived(region.spec.id, blocks, seq, &mut self.answers);
            }
        }
    }

    /// Records that a frame with these blocks, in ascending order, is no longer in flight.
    pub(super) fn settle(&mut self, blocks: &[BlockId]) {
        let chunk_of = |id: &BlockId| (id.region, chunk::of(id.block));
        for of_chunk in blocks.chunk_by(|one, next| chunk_of(one) == chunk_of(next)) {
            if let Some(id) = of_chunk.first() {
                let map = &mut self.regions[id.region].map;
                map.settle(chunk::of(id.block));
            }
        }
    }
}

/// Returns the region and block of a number over all regions.
fn locate(regions: &[Region], global: u32) -> Option<(&Region, u64)> {
    let after = regions.partition_point(|region| region.first <= global);
    let region = regions.get(after.checked_sub(1)?)?;
    Some((region, u64::from(global - region.first)))
}

/// Returns the block of a number over all regions.
fn block_of(regions: &[Region], global: u32) -> Option<BlockId> {
    let (region, block) = locate(regions, global)?;
    Some(BlockId {
        region: region.spec.id,
        block,
    })
}

fn holds(regions: &[Region], global: u32, digest: &Digest) -> bool {
    let block = locate(regions, global);
    block.is_some_and(|(region, block)| region.map.holds(block as usize, digest))
}
