//! The source from the stop to the end of the drain: the list of missing blocks, and how they are
//! sent.

use super::{Class, Link, Region, Source, SourceError};
use crate::chunk;
use crate::remaining::{self, List, Remaining};
use longhaul_codec::BlockId;
use longhaul_protocol::limits::FRAMES_HELD_BYTES_MAX;
use longhaul_protocol::{BLOCK_SIZE, BlockRange, RegionId};
use std::ops::Range;
use std::time::Duration;

/// Limit on the queue beyond the link's own window. Writes that the guest waits for stand behind
/// this queue, as does what travels while it is stopped.
const QUEUE: Duration = Duration::from_millis(20);
/// The time for which the link carries a frame of blocks that the guest does not wait for.
const FRAME: Duration = Duration::from_millis(3);
/// The blocks of such a frame on any link.
const FRAME_BLOCKS_MIN: usize = 8;
/// Blocks that travel together when the destination asks for one of them while it loads the guest.
const ASKED_BLOCKS: u64 = 16;
/// Data that may be in flight in any case.
const QUEUE_BYTES_MIN: f64 = 256.0 * 1024.0;
/// The same of disk blocks of the drain that nothing waits for, in links filled and in bytes.
const DRAIN_WINDOWS: f64 = 4.0;
const DRAIN_BYTES_MIN: f64 = 1024.0 * 1024.0;
/// The same of memory: what the link carries in a round trip and this part of another one, or this
/// time, whichever is less; and in any case these bytes.
const MEMORY_QUEUE_RTT: f64 = 0.6;
const MEMORY_QUEUE: Duration = Duration::from_millis(15);
const MEMORY_BYTES_MIN: f64 = 256.0 * 1024.0;
/// The same of memory that the destination holds: with one more frame it is less than what that
/// accepts.
const HELD_BYTES_MAX: f64 = FRAMES_HELD_BYTES_MAX as f64 / 2.0;

impl Source {
    /// Records that QEMU has closed every region that it may write to while the guest is stopped:
    /// no more writes follow here.
    pub fn closed(&mut self) {
        self.closed = true;
    }

    /// Promises these blocks of a region, in ascending order: they must arrive before the
    /// switchover although the region may be listed, so the pending ones travel before the list. To
    /// be called after the last write.
    pub fn promise(&mut self, id: RegionId, blocks: Vec<BlockRange>) -> Result<(), SourceError> {
        for range in &blocks {
            self.region(id, *range)?;
        }
        let region = self.region(id, BlockRange::new(0, 0))?;
        region.promised = blocks;
        region.want_promised();
        Ok(())
    }

    /// Promises listed blocks that the destination asks for while it loads the guest, and those
    /// beside them, which it often asks for next: they travel now.
    pub fn asked(&mut self, id: RegionId, range: BlockRange) -> Result<(), SourceError> {
        let from_seq = *self.missing_from.get_or_insert(self.next_seq);
        let region = self.region(id, range)?;
        if region.is_listed() {
            for block in range.blocks() {
                region.map.want_missing(block as usize, from_seq);
            }
            let start = range.start / ASKED_BLOCKS * ASKED_BLOCKS;
            let end = range.end().next_multiple_of(ASKED_BLOCKS);
            let end = end.min(region.spec.blocks);
            let range = BlockRange::new(start, end - start);
            region.promised.push(range);
            range
                .blocks()
                .for_each(|block| region.map.want(block as usize));
        }
        Ok(())
    }

    /// Returns a part of the list of a region's missing blocks from this chunk on; `None` before
    /// the region is closed. The list is valid for the connection that it is sent on.
    pub fn list(
        &self,
        region: RegionId,
        from_chunk: u32,
        entries_max: usize,
    ) -> Result<Option<List>, SourceError> {
        let found = self.regions.get(region);
        let range = BlockRange::new(u64::from(from_chunk) * chunk::CHUNK_BLOCKS, 0);
        let found = found.ok_or(SourceError::Unknown { region, range })?;
        if !self.closed {
            return Ok(None);
        }
        if !found.is_listed() {
            return Ok(Some(List::nothing(region)));
        }
        let chunks = chunk::count(found.spec.blocks) as u32;
        let (remaining, next_chunk) =
            remaining::collect(from_chunk..chunks, entries_max, |chunk| {
                (
                    found.map.pending_mask(chunk),
                    found.map.written_blocks(chunk),
                )
            });
        Ok(Some(List {
            region,
            from_chunk,
            from_seq: u64::from(self.next_seq),
            remaining,
            next_chunk,
        }))
    }

    /// Returns the missing blocks of a listed region, as a mask for each chunk.
    pub fn missing_masks(&self, id: RegionId) -> Vec<u64> {
        let region = self.regions.get(id).filter(|region| region.is_listed());
        region.map_or_else(Vec::new, |region| region.map.pending_masks().to_vec())
    }

    /// Returns the missing blocks of a listed region that were written in pass after pass, the
    /// longest first; none if they are very many, or writes are not found by passes.
    pub fn written_often(&self, id: RegionId) -> Vec<u64> {
        let region = self.regions.get(id).filter(|region| region.is_listed());
        let blocks = region.map_or_else(Vec::new, |region| region.map.written_often());
        blocks.into_iter().map(|block| block as u64).collect()
    }

    /// Lets these listed blocks travel first in the drain, in this order: the guest is expected to
    /// use them next.
    pub fn expect(&mut self, id: RegionId, blocks: &[u64]) -> Result<(), SourceError> {
        let region = self.region(id, BlockRange::new(0, 0))?;
        let blocks = blocks.iter().map(|block| *block as usize);
        if region.is_listed() {
            region.map.expect(blocks);
        }
        Ok(())
    }

    /// Lets memory that follows travel behind the promised blocks, the lists and the device state.
    /// The destination holds it until it has all of these, so this is a limited number of bytes
    /// before [`Source::loading`]. Valid for the connection.
    pub fn behind_the_rest(&mut self) {
        self.loading();
        self.held = true;
    }

    /// Lets memory that follows travel, because the destination takes it: it has all promised
    /// blocks and the lists, and loads the guest. Valid for the connection.
    pub fn loading(&mut self) {
        if std::mem::take(&mut self.held) {
            return;
        }
        self.loading = true;
        self.missing_from.get_or_insert(self.next_seq);
        let memory = self.regions.iter_mut();
        let memory = memory.filter(|region| region.is_listed() && !region.is_written_late());
        memory.for_each(|region| region.map.drain());
    }

    /// Begins the drain: the destination has all promised blocks and the lists. Missing blocks
    /// follow, wanted ones first.
    pub fn handed_over(&mut self) {
        self.draining = true;
        self.held = false;
        self.missing_from.get_or_insert(self.next_seq);
        let expected = self.rhythm.is_in_next_burst();
        let written = self.rhythm.written_in_burst();
        self.overwriting.begin(expected, written);
        for region in self.regions.iter_mut().filter(|region| region.is_listed()) {
            region.promised.clear();
            region.map.drain();
        }
    }

    /// Takes the destination's list of missing blocks of these chunks, after a lost connection or a
    /// restart of this side: exactly those are pending.
    pub fn missing(
        &mut self,
        region: RegionId,
        chunks: Range<u32>,
        lacks: &[Remaining],
    ) -> Result<(), SourceError> {
        let blocks = u64::from(chunks.start) * chunk::CHUNK_BLOCKS;
        let unknown = |chunk: u32| SourceError::Unknown {
            region,
            range: BlockRange::new(u64::from(chunk) * chunk::CHUNK_BLOCKS, 1),
        };
        let region = self.region(region, BlockRange::new(blocks, 0))?;
        let last = chunk::count(region.spec.blocks) as u32;
        if chunks.end > last || !region.is_listed() {
            return Err(unknown(chunks.end));
        }
        if !remaining::are_within(lacks, &chunks) {
            return Err(unknown(chunks.start));
        }
        for chunk in chunks {
            let written_blocks = region.map.written_blocks(chunk as usize);
            region.map.set_missing(chunk as usize, 0, written_blocks);
        }
        for part in lacks {
            for chunk in part.chunk..part.chunk + part.chunks {
                let chunk = chunk as usize;
                region
                    .map
                    .set_missing(chunk, part.mask, part.written_blocks);
            }
        }
        if self.draining {
            self.handed_over();
        }
        Ok(())
    }

    /// Drops blocks that the guest has written or discarded at the destination.
    pub fn superseded(&mut self, region: RegionId, range: BlockRange) -> Result<(), SourceError> {
        let map = &mut self.region(region, range)?.map;
        let before = map.pending_total();
        map.superseded(range, false);
        let blocks = before - map.pending_total();
        if self.draining {
            self.overwriting.overwritten(blocks);
        }
        Ok(())
    }

    /// Updates whether the guest overwrites missing blocks faster than they would arrive. To be
    /// called before each [`Source::take`] of the drain.
    pub fn look_at_drain(&mut self, now: Duration) {
        let Some(link) = self.link.filter(|_| self.draining) else {
            self.left_to_guest = false;
            return;
        };
        let left = self.regions.iter().map(|it| it.map.pending_total()).sum();
        let costs = &self.costs;
        let fetch = |blocks| costs.fetch_time(blocks, link);
        self.left_to_guest = self.overwriting.holds(now, left, fetch);
    }

    /// Marks blocks as holes: they are zero here, and need not travel where the region starts as
    /// zeros.
    pub fn hole(&mut self, region: RegionId, range: BlockRange) -> Result<(), SourceError> {
        let region = self.region(region, range)?;
        if region.spec.starts_zero {
            region.map.superseded(range, true);
        }
        Ok(())
    }

    /// Returns whether only what follows is sent: the destination loads the guest, or runs it.
    pub fn is_following(&self) -> bool {
        self.draining || self.loading
    }

    /// Returns whether no block is pending or in flight.
    pub fn is_drained(&self) -> bool {
        let left = self.regions.iter().any(|r| r.map.pending_total() > 0);
        self.draining && !left && self.flights.is_empty()
    }

    /// Returns whether blocks that are not wanted may be sent. The carrier limits how many of them
    /// wait to leave, and lets wanted ones overtake these. Here those are limited that the
    /// destination has not taken.
    ///
    /// A page that the guest waits for may be among them, so few of memory are on the way: what the
    /// link carries, and a little more, by which the estimate of its rate can grow. Of disks it is
    /// several times that: a limit near the link's window would hold back a destination that is
    /// late with its acknowledgements, since it writes to a disk.
    pub(super) fn may_send_left(&self) -> bool {
        let is_left = |region: &Region| {
            let follows = region.is_listed() && !region.is_written_late();
            follows && region.map.pending_total() > 0
        };
        let limit = match self.regions.iter().any(is_left) {
            true => {
                let bytes = self.link.map_or(0.0, |link| {
                    let time = match self.draining {
                        true => link.rtt + link.rtt.mul_f64(MEMORY_QUEUE_RTT).min(MEMORY_QUEUE),
                        // The commit does not wait behind it.
                        false => link.rtt,
                    };
                    link.rate_bytes_per_s * time.as_secs_f64()
                });
                let most = if self.held { HELD_BYTES_MAX } else { f64::MAX };
                bytes.clamp(MEMORY_BYTES_MIN, most)
            }
            false => {
                let windows = self.link.map_or(0.0, |link| self.fills(link));
                (DRAIN_WINDOWS * windows).max(DRAIN_BYTES_MIN)
            }
        };
        !self.left_to_guest && (self.in_flight_bytes() as f64) < limit
    }

    /// Returns the bytes that fill a link and its queue.
    fn fills(&self, link: Link) -> f64 {
        link.rate_bytes_per_s * (link.rtt + QUEUE).as_secs_f64()
    }

    /// Returns whether the queue has room for blocks that nothing waits for.
    pub(super) fn has_room(&self) -> bool {
        let Some(link) = self.link else { return true };
        (self.in_flight_bytes() as f64) < self.fills(link).max(QUEUE_BYTES_MIN)
    }

    /// Returns the number of blocks that travel together while the guest waits for none of them: it
    /// may wait for another one meanwhile.
    fn frame_blocks(&self) -> usize {
        let Some(link) = self.link else {
            return FRAME_BLOCKS_MIN;
        };
        let bytes = link.rate_bytes_per_s * FRAME.as_secs_f64();
        FRAME_BLOCKS_MIN.max((bytes / BLOCK_SIZE as f64) as usize)
    }

    /// Takes missing blocks: the wanted ones, or as many of the others as there is room for. While
    /// the destination loads the guest, these are of memory, and wanted ones travel before.
    pub(super) fn take_left(&mut self, max_blocks: usize, seq: u32, blocks: &mut Vec<BlockId>) {
        let draining = self.draining;
        let wanted = draining && self.pending(Class::Wanted) > 0;
        if !wanted && !self.may_send_left() {
            return;
        }
        let max_blocks = match wanted {
            true => max_blocks,
            false => max_blocks.min(self.frame_blocks()),
        };
        let may_travel = |region: &&mut Region| draining || !region.is_written_late();
        for region in self.regions.iter_mut().filter(may_travel) {
            let id = region.spec.id;
            let room = max_blocks - blocks.len();
            let push = |block| blocks.push(BlockId { region: id, block });
            if wanted {
                region.map.take(Class::Wanted, room, seq, false, push);
            } else {
                region.map.take_drained(room, seq, push);
            }
        }
    }
}
