//! The source's side of replication: which blocks are still here, which travel next, and when to
//! stop the guest.
//!
//! ```text
//! written(region, blocks) --> pending --take--> in flight --acknowledged--> at the destination
//!                               ^                   |                              |
//!                               +--- lost, rejected-+----------- written ----------+
//! ```
//!
//! A block is taken out of the index *before* its content is read: a write that comes later is
//! reported later and makes it pending again. So what is sent is never older than what the index
//! says, and content need not be kept: it is read at the moment of sending.

mod after;
mod kept;
mod mirror;
mod region;
mod sending;
mod stopping;

use crate::content_index::{ContentIndex, TaggedIndex};
use crate::gang::Gang;
use crate::overwriting::Overwriting;
use crate::predict::{Blocks, Costs, Written};
use crate::share::{Share, Turn};
use crate::stop::{StopRule, Wish};
use crate::strategy::Strategy;
use longhaul_codec::BlockId;
use longhaul_protocol::limits::REGIONS_MAX;
use longhaul_protocol::message::Acknowledgement;
use longhaul_protocol::{BLOCK_SIZE, BlockRange, RegionId, RegionSpec};
use region::Region;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

pub use crate::block_map::Class;
pub use crate::predict::{Downtime, Left, Link, Outpaced, Rhythm, Unseen};
pub use mirror::{Answer, WriteId};
pub use sending::{Batch, Sent};
pub use stopping::Advice;

/// What cannot be replicated, or what a peer said that makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// More regions, or more blocks in them, than this engine counts.
    #[error("{blocks} blocks in {regions} regions are more than one migration can carry")]
    TooLarge {
        /// Number of regions.
        regions: usize,
        /// Blocks in all of them.
        blocks: u64,
    },
    /// A region or block that is not part of this migration.
    #[error("blocks {range:?} of region {region:?} are not part of this migration")]
    Unknown {
        /// The region that was named.
        region: RegionId,
        /// The blocks that were named.
        range: BlockRange,
    },
    /// An acknowledgement for a frame that is not on its way.
    #[error("frame {seq} was acknowledged and is not on its way")]
    NotInFlight {
        /// Its sequence number.
        seq: u64,
    },
    /// A write to a region that QEMU has let go of.
    #[error("blocks {range:?} of region {region:?} were written after QEMU had let go of it")]
    Closed {
        /// The region.
        region: RegionId,
        /// The blocks.
        range: BlockRange,
    },
    /// More frames than sequence numbers.
    #[error("this migration has sent more frames than can be numbered")]
    Exhausted,
}

#[derive(Debug)]
struct Flight {
    blocks: Vec<BlockId>,
    /// How many of them are not zero, and neither known at the destination nor named as something of its disks.
    content_blocks: usize,
    bytes: u64,
    /// Blocks that its references mean.
    pinned: Vec<BlockId>,
    /// Those that are named by their digests alone.
    named: Vec<BlockId>,
    /// Whose turn it was, where both kinds had something to send.
    turn: Option<Turn>,
}

/// One guest's state on its way out.
pub struct Source {
    stop: StopRule,
    regions: Vec<Region>,
    /// In which order regions are looked at for blocks of a class: those that are written less often
    /// first.
    order: Vec<usize>,
    share: Share,
    /// Of what must be there: what the guest's writes wait for, and the rest beside it.
    writes: Share,
    /// What need not be there for the stop waits, so that the link is free for it.
    background_held: bool,
    /// The same as long as there is anything else to send, or the guest's next burst is about to come.
    leaves_disks: bool,
    /// Writes that may be answered.
    answers: VecDeque<WriteId>,
    index: ContentIndex,
    /// The same of regions of which no digests are kept, such as disks.
    tagged: TaggedIndex,
    references: bool,
    disk_references: bool,
    /// Blocks that could not be used as they were sent, and wait to travel whole.
    whole_blocks: u64,
    gang: Option<Box<dyn Gang>>,
    flights: BTreeMap<u32, Flight>,
    /// Batches that were taken and are not encoded yet.
    encoding: usize,
    next_seq: u32,
    pass: Pass,
    connected: bool,
    frozen: bool,
    closed: bool,
    draining: bool,
    sent: Sent,
    costs: Costs,
    written: Written,
    link: Option<Link>,
    switch_overhead: Duration,
    /// How long the destination takes to make durable what came of disks.
    sync: Duration,
    /// Since when that alone is what the stop waits for.
    sync_waited_since: Option<Duration>,
    /// How the guest writes what may be left behind, and overwrites what was.
    rhythm: Rhythm,
    overwriting: Overwriting,
    /// What is left is left to the guest, which overwrites it.
    left_to_guest: bool,
    hot_allowed: bool,
}

#[derive(Debug, Default)]
struct Pass {
    number: u32,
    /// Whether it reports every block, written or not.
    whole: bool,
    /// Blocks that the pass has reported so far, and those that were kept for it.
    reported_blocks: u64,
    kept_blocks: u64,
    /// The time in which they were written; unknown for the first pass, which reports everything.
    interval: Option<Duration>,
    /// Blocks that it has not reported.
    unseen: Option<Unseen>,
    /// Whether it has been read as far as it will be before the next one.
    read: bool,
    /// Whether the stop rule has judged it.
    judged: bool,
    /// Whether the stop that it asked for was put off.
    put_off: bool,
    started_at: Duration,
}

impl Source {
    /// Everything in these regions is to be moved by this strategy, and the guest to be stopped as
    /// is wished. `switch_overhead` is what a switchover takes besides the last blocks and the round
    /// trips: device state, loading, journals.
    pub fn new(
        strategy: Strategy,
        regions: &[RegionSpec],
        wish: Wish,
        switch_overhead: Duration,
    ) -> Result<Self, SourceError> {
        let blocks: u64 = regions.iter().map(|spec| spec.blocks).sum();
        let total = checked(regions.len(), blocks)?;
        let mut source = Self {
            stop: StopRule::new(wish),
            regions: Vec::with_capacity(regions.len()),
            order: Vec::new(),
            share: Share::default(),
            writes: Share::of(mirror::BESIDE_WRITES_SHARE, mirror::AHEAD_BLOCKS_MAX),
            background_held: false,
            leaves_disks: false,
            answers: VecDeque::new(),
            index: ContentIndex::new(total),
            tagged: TaggedIndex::default(),
            references: true,
            disk_references: true,
            whole_blocks: 0,
            gang: None,
            flights: BTreeMap::new(),
            encoding: 0,
            next_seq: 1,
            pass: Pass {
                judged: true,
                // What is sent before the first pass is known to have begun is part of it.
                whole: true,
                ..Pass::default()
            },
            connected: true,
            frozen: false,
            closed: false,
            draining: false,
            sent: Sent::default(),
            costs: Costs::default(),
            written: Written::default(),
            link: None,
            switch_overhead,
            sync: Duration::ZERO,
            sync_waited_since: None,
            rhythm: Rhythm::default(),
            overwriting: Overwriting::default(),
            left_to_guest: false,
            hot_allowed: false,
        };
        let mut first = 0;
        for spec in regions {
            source.push(Region::by_passes(spec.clone(), first, strategy));
            first += spec.blocks as u32;
        }
        Ok(source)
    }

    /// One more region, by a strategy of its own, whose writes are reported one by one and may come
    /// until it is [closed](Source::closed): a disk. All of it is pending; see [`Source::hole`].
    pub fn add(&mut self, spec: &RegionSpec, strategy: Strategy) -> Result<(), SourceError> {
        let first = self.all_blocks();
        checked(self.regions.len() + 1, first + spec.blocks)?;
        self.push(Region::by_writes(spec.clone(), first as u32, strategy));
        Ok(())
    }

    fn push(&mut self, region: Region) {
        let at = match region.is_written_late() {
            true => self
                .order
                .iter()
                .take_while(|n| self.regions[**n].is_written_late())
                .count(),
            false => self.order.len(),
        };
        self.order.insert(at, self.regions.len());
        self.regions.push(region);
    }

    /// The shares of the link, from 0 to 1, that regions get of which the list is enough, while others
    /// have something to send: in the first pass, and later.
    pub fn share_background(&mut self, first_pass: f64, later: f64) {
        self.share.set(first_pass, later);
    }

    /// So many bytes did the guest write in a second, on average, before its migration began, to regions of which the list
    /// is enough.
    pub fn is_usually_written(&mut self, bytes_per_s: f64) {
        self.rhythm
            .usually((bytes_per_s / BLOCK_SIZE as f64) as u64);
    }

    /// Whether blocks may travel as references to others; they may where nothing is said.
    pub fn use_references(&mut self, references: bool) {
        self.references = references;
    }

    /// Whether disks count in that: as what is meant, and as what travels as a reference; they do where nothing is said.
    pub fn use_disk_references(&mut self, references: bool) {
        self.disk_references = references;
    }

    /// Others move to the same destination. This guest begins at this share of its memory.
    pub fn join(&mut self, gang: Box<dyn Gang>, start: f64) {
        self.gang = Some(gang);
        for region in &mut self.regions {
            let index = (region.map.len() as f64 * start) as usize;
            region.map.start_at(index);
        }
    }

    // Inputs.

    /// Whether nothing of a region may be read now but what somebody waits for. Once the guest is stopped,
    /// everything may.
    pub fn hold_back(&mut self, region: RegionId, held_back: bool) {
        if let Some(region) = self.regions.get_mut(usize::from(region.0)) {
            region.held_back = held_back;
        }
    }

    /// A pass begins: over what was written since the last one, or over everything (`whole`), as
    /// the first one is.
    pub fn pass_started(&mut self, now: Duration, whole: bool) {
        let interval = now.saturating_sub(self.pass.started_at);
        self.pass = Pass {
            number: self.pass.number + 1,
            whole,
            started_at: now,
            interval: (!whole).then_some(interval),
            ..Pass::default()
        };
        self.share.pass_started(self.pass.number);
        self.begin_pass();
    }

    /// What was reported between passes is part of the one that begins.
    fn begin_pass(&mut self) {
        let kept = self.regions.iter_mut().map(Region::pass_started);
        self.pass.kept_blocks += kept.sum::<u64>();
    }

    /// About how many blocks the pass has not reported, where somebody can tell.
    pub fn unseen(&mut self, unseen: Option<Unseen>) {
        self.pass.unseen = unseen;
    }

    /// These blocks were written: as the pass reports, or, in a region whose writes are reported one
    /// by one, just now. There the content must be in place before this is called, and the guest's
    /// write answered after it.
    pub fn written(&mut self, id: RegionId, range: BlockRange) -> Result<(), SourceError> {
        let pass = (!self.pass.whole).then_some(self.pass.number);
        let (frozen, closed) = (self.frozen, self.closed);
        let region = self.region(id, range)?;
        if closed && region.is_written_late() {
            return Err(SourceError::Closed { region: id, range });
        }
        self.pass.reported_blocks += region.written(range, pass, frozen);
        Ok(())
    }

    /// The pass has been read as far as it can be while the guest runs.
    pub fn pass_read(&mut self) {
        if !self.pass.read {
            self.pass.read = true;
            if let Some(interval) = self.pass.interval {
                let blocks = Blocks {
                    by_passes: self.pass.reported_blocks as f64,
                    by_writes: self.pass.kept_blocks as f64,
                };
                self.written.add(blocks, interval);
            }
            let number = self.pass.number;
            self.regions
                .iter_mut()
                .for_each(|region| region.map.pass_ended(number));
        }
    }

    /// The guest is stopped and everything it wrote has been reported.
    pub fn frozen(&mut self) {
        self.frozen = true;
        self.begin_pass();
        // It will run at the destination, and others must not build on it; nor it on others, since what
        // does not hold any more would cost a round trip now.
        self.gang = None;
    }

    /// Somebody waits for these blocks. In the drain they are known to be missing there, and travel even
    /// if they were believed to have arrived.
    pub fn wanted(&mut self, region: RegionId, range: BlockRange) -> Result<(), SourceError> {
        let draining = self.draining;
        let region = self.region(region, range)?;
        for block in range.blocks() {
            if draining && region.is_listed() {
                region.map.want_missing(block as usize);
            } else {
                region.map.want(block as usize);
            }
        }
        Ok(())
    }

    /// What the link does at present.
    pub fn link(&mut self, link: Link) {
        self.link = Some(link);
    }

    /// What the link did when it was last looked at.
    pub fn link_now(&self) -> Option<Link> {
        self.link
    }

    /// The destination has applied frames, and could not use some of their blocks.
    pub fn acknowledged(&mut self, message: &Acknowledgement) -> Result<(), SourceError> {
        for (region, range) in &message.rejected {
            self.region(*region, *range)?;
        }
        let mut named = Vec::new();
        for (first, count) in &message.applied {
            for seq in *first..first.saturating_add(u64::from(*count)) {
                let unknown = SourceError::NotInFlight { seq };
                let seq = u32::try_from(seq).map_err(|_| unknown.clone())?;
                let flight = self.flights.remove(&seq).ok_or(unknown)?;
                self.unpin(&flight.pinned);
                self.arrived(seq, &flight);
                named.extend(flight.named);
            }
        }
        self.named_answered(named, &message.rejected);
        for (region, range) in &message.rejected {
            self.sent.rejected_blocks += range.count;
            self.whole_blocks += range.count;
            let region = self.region(*region, *range)?;
            range
                .blocks()
                .for_each(|block| region.map.rejected(block as usize));
            region.want_promised();
        }
        self.sync = Duration::from_micros(message.sync_us.into());
        Ok(())
    }

    /// There is a connection again.
    pub fn connected(&mut self) {
        self.connected = true;
    }

    /// The connection is gone: what was not acknowledged is pending again.
    pub fn connection_lost(&mut self) {
        self.connected = false;
        for (seq, flight) in std::mem::take(&mut self.flights) {
            self.unpin(&flight.pinned);
            self.named_lost(&flight.named);
            for id in &flight.blocks {
                self.regions[usize::from(id.region.0)]
                    .map
                    .lost(id.block as usize, seq);
            }
            self.settle(&flight.blocks);
        }
        self.regions.iter_mut().for_each(Region::want_promised);
        let mirrors = self.regions.iter_mut().filter_map(|r| r.mirror.as_mut());
        mirrors.for_each(|mirror| mirror.lost(&mut self.answers));
        if self.draining {
            self.handed_over();
        }
    }

    // Outputs.

    /// How many blocks the guest has.
    pub fn all_blocks(&self) -> u64 {
        let lengths = self.regions.iter().map(|region| region.map.len() as u64);
        lengths.sum()
    }

    /// What a prediction is made of.
    pub fn left(&self, now: Duration) -> Left {
        let left = self.left_blocks(now);
        Left {
            pending_blocks: self.pending_blocks(),
            unseen: self.pass.unseen,
            dirty_blocks_per_s: self.dirty_blocks_per_s(),
            bytes: self.costs.likely(left),
            work: self.costs.work(left),
            link: self.link,
            rhythm: self.rhythm,
        }
    }

    /// How many blocks are pending.
    pub fn pending_blocks(&self) -> u64 {
        self.regions
            .iter()
            .map(|region| region.map.pending_total())
            .sum()
    }

    /// How many bytes are probably still to be sent.
    pub fn remaining_bytes(&self, now: Duration) -> u64 {
        let listed = self.regions.iter().filter(|region| region.is_listed());
        let later: u64 = listed.map(|region| region.map.pending_total()).sum();
        let mut left = self.left_blocks(now);
        left.by_writes += later as f64;
        self.costs.likely(left) as u64 + self.in_flight_bytes()
    }

    /// Whether the destination has these blocks as they are here, as far as is known: none is pending, kept
    /// for a pass, or on its way.
    pub fn is_settled(&self, region: RegionId, range: BlockRange) -> bool {
        let region = self.regions.get(usize::from(region.0));
        region.is_some_and(|it| range.end() <= it.map.len() as u64 && it.is_settled(range))
    }

    /// How many blocks of each region are pending.
    pub fn pending_by_region(&self) -> Vec<(RegionSpec, u64)> {
        self.regions
            .iter()
            .map(|r| (r.spec.clone(), r.map.pending_total()))
            .collect()
    }

    /// Blocks that the guest wrote per second between the last passes.
    pub fn dirty_blocks_per_s(&self) -> Option<f64> {
        self.written.lately().map(Blocks::all)
    }

    /// Blocks that passes have reported per second: between the last ones, and on average.
    pub fn reported_blocks_per_s(&self) -> (Option<f64>, Option<f64>) {
        let reported = |blocks: Option<Blocks>| blocks.map(|blocks| blocks.by_passes);
        (
            reported(self.written.lately()),
            reported(self.written.on_average()),
        )
    }

    /// Whether the pass has been read as far as it can be while the guest runs.
    pub fn pass_is_read(&self) -> bool {
        self.pass.read
    }

    /// The number of the pass that is being read, from 1.
    pub fn pass_number(&self) -> u32 {
        self.pass.number
    }

    /// What has been sent so far.
    pub fn sent(&self) -> Sent {
        self.sent
    }

    /// Bytes of frames that are not acknowledged.
    pub fn in_flight_bytes(&self) -> u64 {
        self.flights.values().map(|flight| flight.bytes).sum()
    }

    // Inside.

    fn region(&mut self, id: RegionId, range: BlockRange) -> Result<&mut Region, SourceError> {
        let region = self.regions.get_mut(usize::from(id.0));
        let region = region.filter(|region| range.end() <= region.map.len() as u64);
        region.ok_or(SourceError::Unknown { region: id, range })
    }

    /// Blocks of a class, in all regions.
    fn pending(&self, class: Class) -> u64 {
        self.regions
            .iter()
            .map(|region| region.map.pending(class))
            .sum()
    }
}

/// The number of blocks, if so many can be counted.
fn checked(regions: usize, blocks: u64) -> Result<usize, SourceError> {
    let fits = regions <= REGIONS_MAX && blocks < u64::from(u32::MAX);
    let total = usize::try_from(blocks).ok().filter(|_| fits);
    total.ok_or(SourceError::TooLarge { regions, blocks })
}
