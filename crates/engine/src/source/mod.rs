//! The source's side of replication: which blocks are pending, which travel next, and when to stop
//! the guest.
//!
//! ```text
//! written(region, blocks) --> pending --take--> in flight --acknowledged--> at the destination
//!                               ^                   |                              |
//!                               +--- lost, rejected-+----------- written ----------+
//! ```
//!
//! A block is taken out of the index *before* its content is read: a later write is reported later
//! and makes the block pending again. So the sent content is never older than the index says, and
//! content need not be buffered: it is read at the moment of sending.

mod after;
mod ahead;
mod further;
mod kept;
mod mirror;
mod region;
mod sending;
mod stopping;

use self::kept::Named;
use crate::content_index::{ContentIndex, TaggedIndex};
use crate::gang::Gang;
use crate::overwriting::Overwriting;
use crate::predict::{Blocks, Costs, Written};
use crate::regions::Regions;
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
use ahead::Ahead;
use further::Further;
pub use mirror::{Answer, WriteId};
pub use sending::{Batch, Sent};
pub use stopping::Advice;
use stopping::Waited;

/// A guest that cannot be replicated, or an invalid statement of the peer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// More regions or blocks than this engine counts.
    #[error("{blocks} blocks in {regions} regions are more than one migration can carry")]
    TooLarge {
        /// Number of regions.
        regions: usize,
        /// Blocks in all of them.
        blocks: u64,
    },
    /// The id of a region is not above that of the region before it.
    #[error("region {region:?} does not follow the one before it")]
    Order {
        /// The region.
        region: RegionId,
    },
    /// A region or block that is not part of this migration.
    #[error("blocks {range:?} of region {region:?} are not part of this migration")]
    Unknown {
        /// The region that was named.
        region: RegionId,
        /// The blocks that were named.
        range: BlockRange,
    },
    /// An acknowledgement for a frame that is not in flight.
    #[error("frame {seq} was acknowledged and is not on its way")]
    NotInFlight {
        /// Its sequence number.
        seq: u64,
    },
    /// An acknowledgement that rejects more than there is.
    #[error("{blocks} blocks were rejected at once, more than the guest has")]
    Rejected {
        /// How many.
        blocks: u64,
    },
    /// A write to a region that QEMU has closed.
    #[error("blocks {range:?} of region {region:?} were written after QEMU had let go of it")]
    Closed {
        /// The region.
        region: RegionId,
        /// The blocks.
        range: BlockRange,
    },
    /// The sequence numbers are exhausted.
    #[error("this migration has sent more frames than can be numbered")]
    Exhausted,
}

#[derive(Debug)]
struct Flight {
    blocks: Vec<BlockId>,
    /// How many blocks are not zero, and neither known at the destination nor equal to a block of
    /// its disks.
    content_blocks: usize,
    bytes: u64,
    /// Blocks that its references point to.
    pinned: Vec<BlockId>,
    /// Blocks that are sent as digests alone.
    named: Vec<Named>,
    /// The kind that sent, where both had something to send.
    turn: Option<Turn>,
}

/// The outgoing state of one guest.
pub struct Source {
    stop: StopRule,
    regions: Regions<Region>,
    /// The order in which regions are searched for blocks of a class: seldom written ones first.
    order: Vec<RegionId>,
    share: Share,
    /// The balance among blocks that must be there: those of waiting writes, and the others.
    writes: Share,
    /// Whether optional blocks wait, so that the link is free for the stop.
    background_held: bool,
    /// Since when the stop waits for the queue of memory that follows.
    queue_since: Option<Duration>,
    /// Whether optional blocks wait as long as there are others to send, or until the guest's next
    /// burst.
    leaves_disks: bool,
    /// Writes that may complete.
    answers: VecDeque<WriteId>,
    index: ContentIndex,
    /// The content index of regions without stored digests, such as disks.
    tagged: TaggedIndex,
    references: bool,
    disk_references: bool,
    /// Whether the destination understands runs of known content.
    runs: bool,
    /// Blocks whose encoding was rejected, and that wait to travel as literals.
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
    /// Whether the destination takes memory that follows: it loads the guest, or is about to.
    loading: bool,
    /// Whether it holds that memory until it does.
    held: bool,
    draining: bool,
    sent: Sent,
    costs: Costs,
    written: Written,
    link: Option<Link>,
    switch_overhead: Duration,
    /// How long the memory of the stopped guest is compared.
    comparison: Duration,
    /// How long the destination takes to make received disk content durable.
    sync: Duration,
    /// For how long the stop waited only for that.
    sync_waited: Waited,
    /// How the guest writes optional blocks, and overwrites missing ones.
    rhythm: Rhythm,
    overwriting: Overwriting,
    /// What of memory by `postcopy` travels before the guest is stopped.
    ahead: Ahead,
    /// Further passes over memory by `hybrid`.
    further: Further,
    /// Whether the drain is held back because the guest overwrites missing blocks.
    left_to_guest: bool,
    hot_allowed: bool,
    /// Whether memory that has to be there may follow instead, if the guest writes too fast.
    memory_may_follow: bool,
    /// The frame from which on frames bring blocks that the destination knows to be missing.
    missing_from: Option<u32>,
}

#[derive(Debug, Default)]
struct Pass {
    number: u32,
    /// Whether the pass reports every block, written or not.
    whole: bool,
    /// Blocks that the pass has reported so far, and those that were held for it.
    reported_blocks: u64,
    kept_blocks: u64,
    /// The time in which they were written; unknown for the first pass, which reports everything.
    interval: Option<Duration>,
    /// Written blocks that the pass has not reported.
    unseen: Option<Unseen>,
    /// Whether it has been read as far as it will be before the next one.
    read: bool,
    /// Whether the stop rule has judged it.
    judged: bool,
    /// Whether the stop that it requested was postponed.
    put_off: bool,
    started_at: Duration,
}

impl Source {
    /// Creates the state of a guest whose regions all move by one strategy and which is to be
    /// stopped as requested. `switch_overhead` is the time of a switchover besides the last blocks
    /// and the round trips: device state, loading, journals.
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
            regions: Regions::default(),
            order: Vec::new(),
            share: Share::default(),
            writes: Share::of(mirror::BESIDE_WRITES_SHARE, mirror::AHEAD_BLOCKS_MAX),
            background_held: false,
            queue_since: None,
            leaves_disks: false,
            answers: VecDeque::new(),
            index: ContentIndex::new(total),
            tagged: TaggedIndex::default(),
            references: true,
            disk_references: true,
            runs: false,
            whole_blocks: 0,
            gang: None,
            flights: BTreeMap::new(),
            encoding: 0,
            next_seq: 1,
            pass: Pass {
                judged: true,
                // Blocks that are sent before the first pass is known to have begun belong to it.
                whole: true,
                ..Pass::default()
            },
            connected: true,
            frozen: false,
            closed: false,
            loading: false,
            held: false,
            draining: false,
            sent: Sent::default(),
            costs: Costs::default(),
            written: Written::default(),
            link: None,
            switch_overhead,
            comparison: Duration::ZERO,
            sync: Duration::ZERO,
            sync_waited: Waited::default(),
            rhythm: Rhythm::default(),
            overwriting: Overwriting::default(),
            ahead: Ahead::default(),
            further: Further::default(),
            left_to_guest: false,
            hot_allowed: false,
            memory_may_follow: false,
            missing_from: None,
        };
        let mut first = 0;
        for spec in regions {
            source.push(Region::by_passes(spec.clone(), first, strategy))?;
            first += spec.blocks as u32;
        }
        Ok(source)
    }

    /// Adds a disk: a region with a strategy of its own whose writes are reported one by one, until
    /// it is [closed](Source::closed). All of it is pending; see [`Source::hole`].
    pub fn add(&mut self, spec: &RegionSpec, strategy: Strategy) -> Result<(), SourceError> {
        let first = self.all_blocks();
        checked(self.regions.len() + 1, first + spec.blocks)?;
        self.push(Region::by_writes(spec.clone(), first as u32, strategy))
    }

    fn push(&mut self, region: Region) -> Result<(), SourceError> {
        let id = region.spec.id;
        let at = match region.is_written_late() {
            true => self
                .order
                .iter()
                .take_while(|id| self.regions[**id].is_written_late())
                .count(),
            false => self.order.len(),
        };
        if !self.regions.push(id, region) {
            return Err(SourceError::Order { region: id });
        }
        self.order.insert(at, id);
        Ok(())
    }

    /// Sets the shares of the link, from 0 to 1, for regions for which the list is enough while
    /// others have something to send: in the first pass, and later.
    pub fn share_background(&mut self, first_pass: f64, later: f64) {
        self.share.set(first_pass, later);
    }

    /// Sets the guest's average write rate before its migration, in bytes per second, to regions
    /// for which the list is enough.
    pub fn is_usually_written(&mut self, bytes_per_s: f64) {
        self.rhythm
            .usually((bytes_per_s / BLOCK_SIZE as f64) as u64);
    }

    /// Sets whether blocks may travel as references to others; the default is yes.
    pub fn use_references(&mut self, references: bool) {
        self.references = references;
    }

    /// Sets whether disks take part in references, as targets and as blocks sent; the default is
    /// yes.
    pub fn use_disk_references(&mut self, references: bool) {
        self.disk_references = references;
    }

    /// Lets memory follow when the guest runs at the destination, instead of a stop that takes
    /// longer than requested.
    pub fn memory_may_follow(&mut self) {
        self.memory_may_follow = true;
    }

    /// Lets memory follow, if it may: the guest writes it too fast for the requested downtime. It
    /// is sent once before the stop, without which the guest would wait for far more pages, and the
    /// move would take as long. Further passes would not help.
    pub fn let_memory_follow(&mut self) {
        if std::mem::take(&mut self.memory_may_follow) {
            let memory = self.regions.iter_mut().filter(|it| !it.is_written_late());
            memory.for_each(|region| region.strategy = Strategy::HYBRID);
            self.end_further_passes();
        }
    }

    /// Returns whether memory is listed instead of promised.
    pub fn memory_follows(&self) -> bool {
        let mut memory = self.regions.iter().filter(|it| !it.is_written_late());
        memory.any(Region::is_listed)
    }

    /// Sets how long the memory of the stopped guest is compared with what was sent.
    pub fn compares_for(&mut self, time: Duration) {
        self.comparison = time;
    }

    /// Joins the guests that move to the same destination. This guest begins at this share of its
    /// memory.
    pub fn join(&mut self, gang: Box<dyn Gang>, start: f64) {
        self.gang = Some(gang);
        for region in self.regions.iter_mut() {
            let index = (region.map.len() as f64 * start) as usize;
            region.map.start_at(index);
        }
    }

    // Inputs.

    /// Sets whether only wanted blocks of a region may be read now. Once the guest is stopped, all
    /// may be.
    pub fn hold_back(&mut self, region: RegionId, held_back: bool) {
        if let Some(region) = self.regions.get_mut(region) {
            region.held_back = held_back;
        }
    }

    /// Begins a pass over the blocks written since the last one or, as for the first pass, over all
    /// blocks (`whole`).
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

    /// Writes reported between passes belong to the pass that begins.
    fn begin_pass(&mut self) {
        let kept = self.regions.iter_mut().map(Region::pass_started);
        self.pass.kept_blocks += kept.sum::<u64>();
    }

    /// Sets the estimated number of written blocks that the pass has not reported, where it is
    /// known.
    pub fn unseen(&mut self, unseen: Option<Unseen>) {
        self.pass.unseen = unseen;
    }

    /// Marks blocks as written: as the pass reports, or, in a region whose writes are reported one
    /// by one, immediately. In the latter case the content must be in place before this call, and
    /// the guest's write completes after it.
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

    /// Records that the pass has been read as far as possible while the guest runs.
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

    /// Records that the guest is stopped and all its writes have been reported.
    pub fn frozen(&mut self) {
        self.frozen = true;
        self.begin_pass();
        // The guest will run at the destination, so other guests must not refer to its blocks; nor
        // does it refer to theirs, since a mismatch would now cost a round trip.
        self.gang = None;
    }

    /// Marks blocks as wanted. In the drain they are known to be missing at the destination, and
    /// travel even if they were believed to have arrived.
    pub fn wanted(&mut self, region: RegionId, range: BlockRange) -> Result<(), SourceError> {
        let draining = self.draining;
        let from_seq = self.missing_from.unwrap_or(0);
        let region = self.region(region, range)?;
        for block in range.blocks() {
            if draining && region.is_listed() {
                region.map.want_missing(block as usize, from_seq);
            } else {
                region.map.want(block as usize);
            }
        }
        Ok(())
    }

    /// Sets the current measurement of the link.
    pub fn link(&mut self, link: Link) {
        self.link = Some(link);
    }

    /// Returns the last measurement of the link.
    pub fn link_now(&self) -> Option<Link> {
        self.link
    }

    /// Takes an acknowledgement: frames that the destination has applied, and blocks that it could
    /// not use.
    pub fn acknowledged(&mut self, message: &Acknowledgement) -> Result<(), SourceError> {
        let mut rejected = 0;
        for (region, range) in &message.rejected {
            self.region(*region, *range)?;
            rejected += range.count;
        }
        if rejected > self.all_blocks() {
            return Err(SourceError::Rejected { blocks: rejected });
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
        let again = self.named_answered(named, &message.rejected);
        for (id, range) in &message.rejected {
            self.sent.rejected_blocks += range.count;
            let region = self.region(*id, *range)?;
            let mut whole = 0;
            for block in range.blocks() {
                let in_run = again.binary_search(&BlockId { region: *id, block }).is_ok();
                match in_run {
                    true => region.map.rejected_in_run(block as usize),
                    false => region.map.rejected(block as usize),
                }
                whole += u64::from(!in_run);
            }
            region.want_promised();
            self.whole_blocks += whole;
        }
        self.sync = Duration::from_micros(message.sync_us.into());
        Ok(())
    }

    /// Begins a new connection.
    pub fn connected(&mut self) {
        self.connected = true;
    }

    /// Handles the loss of the connection: frames that were not acknowledged are pending again.
    pub fn connection_lost(&mut self) {
        self.connected = false;
        self.loading = false;
        self.held = false;
        self.missing_from = None;
        for (seq, flight) in std::mem::take(&mut self.flights) {
            self.unpin(&flight.pinned);
            self.named_lost(&flight.named);
            for id in &flight.blocks {
                self.regions[id.region].map.lost(id.block as usize, seq);
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

    /// Returns the number of blocks of the guest.
    pub fn all_blocks(&self) -> u64 {
        let lengths = self.regions.iter().map(|region| region.map.len() as u64);
        lengths.sum()
    }

    /// Returns the data that a prediction is made of.
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

    /// Returns the number of pending blocks.
    pub fn pending_blocks(&self) -> u64 {
        self.regions
            .iter()
            .map(|region| region.map.pending_total())
            .sum()
    }

    /// Returns how many bytes are probably still to be sent.
    pub fn remaining_bytes(&self, now: Duration) -> u64 {
        let listed = self.regions.iter().filter(|region| region.is_listed());
        let later: u64 = listed.map(|region| region.map.pending_total()).sum();
        let mut left = self.left_blocks(now);
        left.by_writes += later as f64;
        self.costs.likely(left) as u64 + self.in_flight_bytes()
    }

    /// Returns whether the destination is known to have these blocks in their current state: none
    /// is pending, held for a pass, or in flight.
    pub fn is_settled(&self, region: RegionId, range: BlockRange) -> bool {
        let region = self.regions.get(region);
        region.is_some_and(|it| range.end() <= it.map.len() as u64 && it.is_settled(range))
    }

    /// Returns the number of pending blocks of each region.
    pub fn pending_by_region(&self) -> Vec<(RegionSpec, u64)> {
        self.regions
            .iter()
            .map(|r| (r.spec.clone(), r.map.pending_total()))
            .collect()
    }

    /// Returns the guest's write rate between the last passes, in blocks per second.
    pub fn dirty_blocks_per_s(&self) -> Option<f64> {
        self.written.lately().map(Blocks::all)
    }

    /// Returns the rates at which passes have reported blocks, per second: between the last passes,
    /// and on average.
    pub fn reported_blocks_per_s(&self) -> (Option<f64>, Option<f64>) {
        let reported = |blocks: Option<Blocks>| blocks.map(|blocks| blocks.by_passes);
        (
            reported(self.written.lately()),
            reported(self.written.on_average()),
        )
    }

    /// Returns whether the pass has been read as far as possible while the guest runs.
    pub fn pass_is_read(&self) -> bool {
        self.pass.read
    }

    /// Returns the number of the pass that is being read, from 1.
    pub fn pass_number(&self) -> u32 {
        self.pass.number
    }

    /// Returns the counts of what has been sent so far.
    pub fn sent(&self) -> Sent {
        self.sent
    }

    /// Returns the bytes of frames that are not acknowledged.
    pub fn in_flight_bytes(&self) -> u64 {
        self.flights.values().map(|flight| flight.bytes).sum()
    }

    // Inside.

    fn region(&mut self, id: RegionId, range: BlockRange) -> Result<&mut Region, SourceError> {
        let region = self.regions.get_mut(id);
        let region = region.filter(|region| range.end() <= region.map.len() as u64);
        region.ok_or(SourceError::Unknown { region: id, range })
    }

    /// Returns the number of pending blocks of a class in all regions.
    fn pending(&self, class: Class) -> u64 {
        self.regions
            .iter()
            .map(|region| region.map.pending(class))
            .sum()
    }
}

/// Returns the number of blocks, if that many can be counted.
fn checked(regions: usize, blocks: u64) -> Result<usize, SourceError> {
    let fits = regions <= REGIONS_MAX && blocks < u64::from(u32::MAX);
    let total = usize::try_from(blocks).ok().filter(|_| fits);
    total.ok_or(SourceError::TooLarge { regions, blocks })
}
