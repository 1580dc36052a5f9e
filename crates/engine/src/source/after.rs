//! From the stop to the end of the drain: the list of what is left, and what becomes of it.

use super::{Class, Source, SourceError};
use crate::chunk;
use crate::remaining::{self, List, Remaining};
use longhaul_codec::BlockId;
use longhaul_protocol::{BlockRange, RegionId};
use std::ops::Range;
use std::time::Duration;

/// What may wait on the link besides what fills it where somebody waits for what comes: that waits
/// behind it.
const QUEUE: Duration = Duration::from_millis(20);
/// So much may be on its way in any case.
const QUEUE_BYTES_MIN: f64 = 256.0 * 1024.0;

impl Source {
    /// QEMU has let go of every region that it may write to while the guest stands still: nothing is
    /// written here any more.
    pub fn closed(&mut self) {
        self.closed = true;
    }

    /// These blocks of a region, in ascending order, must be there before the switchover although the region may be listed:
    /// what is pending of them goes before the list. To be said when nothing is written here any more.
    pub fn promise(&mut self, id: RegionId, blocks: Vec<BlockRange>) -> Result<(), SourceError> {
        for range in &blocks {
            self.region(id, *range)?;
        }
        let region = self.region(id, BlockRange::new(0, 0))?;
        region.promised = blocks;
        region.want_promised();
        Ok(())
    }

    /// A part of the list of what is left of a region, from this chunk on; `None` before the region
    /// is closed. It holds for the connection that it is sent on.
    pub fn list(
        &self,
        region: RegionId,
        from_chunk: u32,
        entries_max: usize,
    ) -> Result<Option<List>, SourceError> {
        let found = self.regions.get(usize::from(region.0));
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

    /// The destination has all that was promised, and the lists: what is left follows, what is
    /// wanted first.
    pub fn handed_over(&mut self) {
        self.draining = true;
        let expected = self.rhythm.is_in_next_burst();
        let written = self.rhythm.written_in_burst();
        self.overwriting.begin(expected, written);
        for region in self.regions.iter_mut().filter(|region| region.is_listed()) {
            region.promised.clear();
            region.map.drain();
        }
    }

    /// The destination says what it lacks of these chunks: exactly that is pending. After a cut, or
    /// when this side was restarted.
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

    /// These blocks need not come any more: the destination's guest has written or discarded them.
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

    /// Looks whether the guest overwrites what is left faster than it would come. To be told the time before
    /// each [`Source::take`] of the drain.
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

    /// These blocks are holes: they are zero here, and need not travel where the region starts so.
    pub fn hole(&mut self, region: RegionId, range: BlockRange) -> Result<(), SourceError> {
        let region = self.region(region, range)?;
        if region.spec.starts_zero {
            region.map.superseded(range, true);
        }
        Ok(())
    }

    /// Whether the guest runs at the destination, which fetches what is left.
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// Whether nothing is left here, and nothing on its way.
    pub fn is_drained(&self) -> bool {
        let left = self.regions.iter().any(|r| r.map.pending_total() > 0);
        self.draining && !left && self.flights.is_empty()
    }

    /// Whether what nobody waits for may go on.
    pub(super) fn may_send_left(&self) -> bool {
        !self.left_to_guest && self.has_room()
    }

    /// Whether there is room for what nobody waits for: what somebody waits for should not wait long.
    pub(super) fn has_room(&self) -> bool {
        let Some(link) = self.link else { return true };
        let fills = link.rate_bytes_per_s * (link.rtt + QUEUE).as_secs_f64();
        (self.in_flight_bytes() as f64) < fills.max(QUEUE_BYTES_MIN)
    }

    /// Takes what is left: what is wanted, or as much as there is room for of the rest.
    pub(super) fn take_left(&mut self, max_blocks: usize, seq: u32, blocks: &mut Vec<BlockId>) {
        let wanted = self.pending(Class::Wanted) > 0;
        if !wanted && !self.may_send_left() {
            return;
        }
        for region in &mut self.regions {
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
