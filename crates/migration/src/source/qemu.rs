//! The QEMU of a departing guest: its migration, its RAM, and either its end or its return to
//! normal operation.

use crate::context::Context;
use crate::disks;
use crate::host::fail_point;
use crate::host::qemu::is_alive;
use crate::source::expected_use::{CodeInUse, KnownLayout, NextUse, layout, region_of};
use crate::source::local_disks::LocalDisk;
use crate::source::memory_file::Kept;
use crate::source::retained_qemu::RetainedQemu;
use crate::source::sender::{Content, Sending};
use crate::status::guest_rate::{RateMeter, shown};
use crate::status::usage::{Meter, Usage};
use longhaul_api::{ApiError, ErrorCode, GuestRate};
use longhaul_codec::BlockId;
use longhaul_engine::source::{Source, SourceError, Unseen};
use longhaul_engine::strategy::{Before, Promise, Strategy};
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::manager::{
    AbortError, Cookie, Departure, GuestManager, Lease, ManagerError, Stays,
};
use longhaul_hypervisor::memory::{
    AttachError, Event, Frozen, GuestMemory, Outgoing, OutgoingError, Progress, Written,
};
use longhaul_hypervisor::qmp::Qmp;
use longhaul_protocol::disk::Pulled;
use longhaul_protocol::{BLOCK_SIZE, BlockRange, RegionId, RegionSpec};
use longhaul_storage::disk::RawDisk;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The reason why a departing guest's QEMU failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SourceQemuError {
    /// Its memory cannot be accessed.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// Its migration cannot continue.
    #[error(transparent)]
    Outgoing(#[from] OutgoingError),
    /// The engine rejected a report of QEMU.
    #[error(transparent)]
    Engine(#[from] SourceError),
    /// Its manager cannot prepare its departure.
    #[error(transparent)]
    Manager(#[from] ManagerError),
    /// Its manager cannot restore its QEMU.
    #[error(transparent)]
    Abort(#[from] AbortError),
    /// The operating system returned an error.
    #[error("QEMU cannot be watched: {0}")]
    Host(#[from] io::Error),
    /// The migration has ended before.
    #[error("the migration has ended")]
    Over,
}

impl SourceQemuError {
    pub(crate) fn into_api(self) -> ApiError {
        match self {
            Self::Outgoing(OutgoingError::Paused) => {
                ApiError::new(ErrorCode::GuestState, self.to_string())
                    .hint("move it again: it then arrives paused; or resume it first")
            }
            _ => ApiError::new(ErrorCode::Qemu, self.to_string()),
        }
    }
}

/// The QEMU of a departing guest.
pub(crate) struct SourceQemu {
    guests: Arc<dyn GuestManager>,
    guest: Guest,
    lease: Lease,
    memory: Arc<GuestMemory>,
    regions: Vec<RegionSpec>,
    /// The index of each region's RAM block.
    places: BTreeMap<RegionId, usize>,
    outgoing: Option<Outgoing>,
    prelude: Vec<u8>,
    gone: bool,
    meter: Meter,
    /// The measurement of the guest's rate, if its vCPUs are known.
    rate: Option<RateMeter>,
    disks: Vec<LocalDisk>,
    /// The strategy of its memory.
    strategy: Strategy,
    /// Whether its memory may follow although it has to be there by its strategy.
    may_follow: bool,
    /// Where its RAM lies, once that is known.
    layout: KnownLayout,
    /// The place of the memory file, if one is wanted.
    kept: Option<Kept>,
}

/// The result of stopping a guest.
pub(crate) struct Stopped {
    pub(crate) stopped_at: tokio::time::Instant,
    pub(crate) stop_time: Duration,
    pub(crate) device_state_time: Duration,
    pub(crate) tail: Vec<u8>,
    /// What its manager here has for the one at the destination.
    pub(crate) cookie: Cookie,
}

impl SourceQemu {
    /// Attaches to a guest's memory to read it. Changes nothing.
    pub(crate) async fn attach(
        guests: Arc<dyn GuestManager>,
        guest: Guest,
        lease: Lease,
    ) -> Result<Self, SourceQemuError> {
        let pid = guest
            .pid()
            .ok_or_else(|| io::Error::other("it has no process"))?;
        let memory = Arc::new(GuestMemory::attach(lease.qmp(), pid).await?);
        let mut regions = Vec::new();
        let mut places = BTreeMap::new();
        let direct = memory
            .blocks()
            .iter()
            .enumerate()
            .filter(|(_, block)| !block.is_kept());
        for (place, block) in direct {
            let id = RegionId(places.len() as u16);
            places.insert(id, place);
            regions.push(RegionSpec {
                id,
                name: block.name.clone(),
                blocks: block.blocks(),
                durable: false,
                starts_zero: true,
            });
        }
        Ok(Self {
            guests,
            guest,
            lease,
            memory,
            regions,
            places,
            outgoing: None,
            prelude: Vec::new(),
            gone: false,
            meter: Meter::start(),
            rate: None,
            disks: Vec::new(),
            strategy: Strategy::PRECOPY,
            may_follow: false,
            layout: Arc::default(),
            kept: None,
        })
    }

    /// Goes on with a measurement of the guest's rate.
    pub(crate) fn measures_rate(&mut self, meter: Option<RateMeter>) {
        self.rate = meter;
    }

    /// Returns the guest's rate since the last call of [`Self::next_rate`], if it is known.
    pub(crate) fn rate(&self) -> Option<GuestRate> {
        self.rate.as_ref()?.so_far().and_then(shown)
    }

    /// Returns the same, and measures from now on again.
    pub(crate) fn next_rate(&mut self) -> Option<GuestRate> {
        let rate = self.rate();
        self.rate = self.rate.take().and_then(RateMeter::again);
        rate
    }

    /// Adds the disks that move with the guest.
    pub(crate) fn take_along(&mut self, disks: Vec<LocalDisk>) {
        self.disks = disks;
    }

    /// Sets the strategy of its memory, and whether the memory may follow in any case.
    pub(crate) fn moves_by(&mut self, strategy: Strategy, may_follow: bool) {
        self.strategy = strategy;
        self.may_follow = may_follow;
    }

    /// Copies memory that follows to a file.
    pub(crate) fn keeps_memory(&mut self) {
        self.kept = Some(Kept::default());
    }

    /// Returns the place of the memory file, if one is wanted.
    pub(crate) fn kept(&self) -> Option<&Kept> {
        self.kept.as_ref()
    }

    /// Returns the strategy of its memory, and whether the memory may follow in any case.
    pub(crate) fn strategy(&self) -> (Strategy, bool) {
        (self.strategy, self.may_follow)
    }

    /// Returns the part of its memory that may follow when it runs at the destination.
    pub(crate) fn follows(&self) -> Pulled {
        match self.strategy.before {
            _ if self.may_follow => Pulled::Often,
            _ if self.strategy.promise != Promise::List => Pulled::Nothing,
            Before::Nothing => Pulled::All,
            _ => Pulled::Often,
        }
    }

    /// Returns the disks that move with the guest.
    pub(crate) fn disks(&self) -> &[LocalDisk] {
        &self.disks
    }

    /// Returns an error if an image has outgrown its region.
    pub(crate) fn check_disks(&self) -> Result<(), ApiError> {
        for disk in &self.disks {
            disk.image_bytes().map_err(|error| {
                let text = format!("disk {}: {error}", disk.spec.name);
                ApiError::new(ErrorCode::Internal, text)
            })?;
        }
        Ok(())
    }

    /// Returns the guest.
    pub(crate) fn guest(&self) -> &Guest {
        &self.guest
    }

    /// Returns the control connection to its QEMU.
    pub(crate) fn qmp(&self) -> &Qmp {
        self.lease.qmp()
    }

    /// Returns the regions of its memory that travel in frames.
    pub(crate) fn regions(&self) -> &[RegionSpec] {
        &self.regions
    }

    /// Returns its memory, and the index of each region's RAM block.
    pub(crate) fn memory(&self) -> (Arc<GuestMemory>, BTreeMap<RegionId, usize>) {
        (self.memory.clone(), self.places.clone())
    }

    /// Returns the id of its QEMU's process.
    pub(crate) fn pid(&self) -> Option<i32> {
        self.guest.pid()
    }

    /// Returns the reader of its regions for sending.
    pub(crate) fn content(&self) -> Box<dyn Content> {
        let memory = self.places.iter();
        let memory = memory.map(|(region, place)| (*region, Place::Memory(*place)));
        let disks = self.disks.iter();
        let disks = disks.map(|disk| (disk.spec.id, Place::Disk(disk.disk.clone())));
        Box::new(GuestContent {
            guest: self.guest.clone(),
            memory: self.memory.clone(),
            places: memory.chain(disks).collect(),
            kept: self.kept.clone(),
        })
    }

    /// Begins QEMU's migration, which may slow the guest by up to this percentage of its time.
    /// `prepared` is what the guest's manager at the destination has for the one here.
    pub(crate) async fn start(
        &mut self,
        slow_at_most: Option<u8>,
        prepared: Cookie,
    ) -> Result<(), SourceQemuError> {
        let departing = self.guests.depart(&self.guest, &self.lease, prepared);
        let Departure { socket, by } = departing.await?;
        let (qmp, memory) = (self.lease.qmp(), self.memory.clone());
        let started = Outgoing::start_by(by, qmp, memory, &socket, slow_at_most);
        let (outgoing, prelude) = started.await?;
        self.prelude = prelude.bytes;
        self.outgoing = Some(outgoing);
        if self.follows() != Pulled::Nothing {
            self.look_at_layout();
        }
        Ok(())
    }

    /// Finds out where its RAM lies, beside the move.
    fn look_at_layout(&self) {
        let (qmp, memory) = (self.lease.qmp().clone(), self.memory.clone());
        let (found, guest) = (self.layout.clone(), self.guest.name().to_owned());
        // What QEMU needs is asked for one by one if it is not known.
        tokio::spawn(async move { layout(&found, &guest, &qmp, &memory).await });
    }

    /// Returns a search for the code that the guest uses, if nothing of its memory has to travel
    /// before the switchover.
    pub(crate) fn code(&self) -> Option<CodeInUse> {
        (self.follows() == Pulled::All).then(|| CodeInUse {
            guest: self.guest.name().to_owned(),
            qmp: self.lease.qmp().clone(),
            memory: self.memory.clone(),
            places: self.places.clone(),
            layout: self.layout.clone(),
        })
    }

    /// Returns the blocks that QEMU at the destination probably reads while it loads the guest, in
    /// ascending order, and their region: those that its device state names.
    pub(crate) fn needed_to_load(&self, tail: &[u8]) -> Option<(RegionId, Vec<BlockRange>)> {
        let (place, blocks) = (*self.layout.get()?)?.named(tail);
        Some((region_of(&self.places, place)?, blocks))
    }

    /// Returns a search for what the stopped guest's CPUs use next.
    pub(crate) fn next_use(&self, tail: &[u8]) -> Option<NextUse> {
        let layout = (*self.layout.get()?)?;
        Some(NextUse {
            region: region_of(&self.places, layout.block())?,
            layout,
            memory: self.memory.clone(),
            tail: tail.to_vec(),
        })
    }

    /// Returns QEMU's stream up to and including its list of RAM blocks.
    pub(crate) fn prelude(&self) -> &[u8] {
        &self.prelude
    }

    /// Waits for QEMU's next report. Safe to cancel.
    pub(crate) async fn event(&self) -> Event {
        match &self.outgoing {
            Some(outgoing) => outgoing.next_event().await,
            None => std::future::pending().await,
        }
    }

    /// Returns a report that QEMU has made already, if any.
    pub(crate) fn try_event(&self) -> Option<Event> {
        self.outgoing.as_ref().and_then(Outgoing::try_event)
    }

    /// Passes a report of QEMU to the engine.
    pub(crate) fn note(
        &self,
        event: Event,
        engine: &mut Source,
        now: Duration,
    ) -> Result<(), SourceQemuError> {
        match event {
            Event::PassStarted { pass } => engine.pass_started(now, pass == 1),
            Event::Written(written) => self.written(&written, engine)?,
            Event::Held { .. } => engine.pass_read(),
            Event::Restarted => {
                tracing::info!(guest = self.guest.name(), "QEMU starts its migration again");
            }
            Event::Failed(why) => return Err(OutgoingError::Failed(why).into()),
        }
        Ok(())
    }

    fn written(&self, written: &Written, engine: &mut Source) -> Result<(), SourceQemuError> {
        // A RAM block that does not travel in frames travels with the device state.
        let Some(region) = region_of(&self.places, written.block) else {
            return Ok(());
        };
        for run in &written.runs {
            engine.written(region, *run)?;
        }
        Ok(())
    }

    /// Lets QEMU begin another pass.
    pub(crate) fn next_pass(&self) {
        if let Some(outgoing) = &self.outgoing {
            outgoing.next_pass();
        }
    }

    /// Estimates how many written blocks no pass has reported yet, if QEMU reports it.
    pub(crate) fn unseen(&self, now: Duration) -> Option<Unseen> {
        let progress = self.outgoing.as_ref()?.progress();
        let dirty = progress.dirty?;
        Some(Unseen {
            written_blocks: dirty.pages,
            unread_blocks: progress.unread_pages.unwrap_or(0),
            at: now.saturating_sub(dirty.age),
        })
    }

    /// Returns the progress of QEMU's migration.
    pub(crate) fn progress(&self) -> Option<Progress> {
        self.outgoing.as_ref().map(Outgoing::progress)
    }

    /// Returns the expected beginning of the rest of its stream.
    pub(crate) fn early(&self) -> Vec<u8> {
        self.outgoing
            .as_ref()
            .map(Outgoing::kept_so_far)
            .unwrap_or_default()
    }

    /// Returns whether QEMU has ended by itself, or was quit.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone
    }

    /// Stops the guest, and reads QEMU's stream to its end. Returns `None` if QEMU has to restart
    /// its migration; the guest then runs.
    pub(crate) async fn freeze(
        &mut self,
        sending: &Sending,
        now: Duration,
    ) -> Result<Option<Stopped>, SourceQemuError> {
        let outgoing = self.outgoing.as_mut().ok_or(SourceQemuError::Over)?;
        if fail_point::is_armed_at_convergence() {
            outgoing.complete_early().await?;
            fail_point::after_convergence();
        }
        let noted = self.guests.note_stop(&self.guest, true);
        let frozen = match outgoing.freeze().await {
            Ok(frozen) => frozen,
            Err(OutgoingError::Restarted) => {
                let forgotten = self.guests.note_stop(&self.guest, false);
                self.log("forget a stop", forgotten);
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        let cookie = self.guests.departed(&self.guest).await?;
        self.log("note a stop", noted);
        while let Some(event) = self.try_event() {
            self.note(event, &mut sending.engine(), now)?;
        }
        let Frozen {
            written,
            changed,
            tail,
            stop_time,
            read_time,
            finish_time,
            stopped_at,
            ..
        } = frozen;
        let mut engine = sending.engine();
        for written in &written {
            self.written(written, &mut engine)?;
        }
        let reported = engine.pending_blocks();
        for changed in &changed {
            self.written(changed, &mut engine)?;
        }
        let missed = engine.pending_blocks().saturating_sub(reported);
        if missed > 0 {
            tracing::info!(
                guest = self.guest.name(),
                missed,
                "QEMU did not report all writes"
            );
        }
        engine.frozen();
        Ok(Some(Stopped {
            stopped_at: Instant::into(stopped_at),
            stop_time,
            device_state_time: read_time + finish_time,
            tail,
            cookie,
        }))
    }

    /// Aborts QEMU's migration and restores its settings, so that the guest continues here.
    pub(crate) async fn abort(&mut self) -> Result<(), SourceQemuError> {
        if self.gone {
            return Ok(());
        }
        if let Some(outgoing) = self.outgoing.take() {
            outgoing.abort().await?;
        }
        let Self { guest, lease, .. } = self;
        let restored = self.guests.abort_outgoing(guest, lease, Stays::Continued);
        restored.await?;
        Ok(())
    }

    /// Logs an error that does not end the move.
    fn log(&self, what: &str, done: io::Result<()>) {
        if let Err(error) = done {
            tracing::error!(guest = self.guest.name(), %error, "cannot {what}");
        }
    }

    /// Waits until QEMU has ended by itself.
    pub(crate) async fn qemu_ended(&self) {
        if self.gone {
            std::future::pending::<()>().await;
        }
        if let Err(error) = self.guest.ended().await {
            tracing::error!(guest = self.guest.name(), %error, "cannot watch QEMU");
            std::future::pending::<()>().await;
        }
    }

    /// Records that QEMU has ended by itself.
    pub(crate) fn forget_process(&mut self) {
        self.gone = true;
        self.outgoing = None;
    }

    /// Ends QEMU, or returns it to be retained until its memory is cached. The guest runs
    /// elsewhere.
    pub(crate) async fn quit(&mut self, context: &Context) -> Option<RetainedQemu> {
        let was_gone = std::mem::replace(&mut self.gone, true);
        self.outgoing = None;
        if !was_gone {
            let places = self.places.values().copied().collect();
            let departed = RetainedQemu::stand(context, &self.guest, &self.memory, places);
            if departed.is_some() {
                return departed;
            }
        }
        let name = self.guest.name();
        if let Err(error) = self.guests.confirm(name, Some(&self.lease)).await {
            tracing::error!(guest = name, %error, "something of this guest is left over");
        }
        None
    }

    /// Returns the end of QEMU's log.
    pub(crate) fn last_words(&self) -> String {
        crate::host::qemu::end_of_log(&self.guest)
    }

    /// Returns the resources used so far.
    pub(crate) fn usage(&self) -> Usage {
        self.meter.usage(self.guest.pid())
    }
}

/// Where the content of a region is read.
enum Place {
    /// The index of its RAM block.
    Memory(usize),
    Disk(Arc<RawDisk>),
}

struct GuestContent {
    guest: Guest,
    memory: Arc<GuestMemory>,
    places: BTreeMap<RegionId, Place>,
    /// The place of the memory file, if one is wanted.
    kept: Option<Kept>,
}

impl Content for GuestContent {
    fn read(&self, blocks: &[BlockId], into: &mut [[u8; BLOCK_SIZE]]) -> Result<(), String> {
        let mut done = 0;
        let mut ranges: Vec<BlockRange> = Vec::with_capacity(blocks.len());
        for same in blocks.chunk_by(|one, next| one.region == next.region) {
            let Some(first) = same.first() else { continue };
            let out = &mut into[done..done + same.len()];
            done += same.len();
            let place = match self.places.get(&first.region) {
                Some(Place::Memory(place)) => *place,
                Some(Place::Disk(disk)) => {
                    disks::read_each(disk, same, out)?;
                    continue;
                }
                None => return Err(format!("there is no region {}", first.region.0)),
            };
            ranges.clear();
            for id in same {
                match ranges.last_mut() {
                    Some(range) if range.end() == id.block => range.count += 1,
                    _ => ranges.push(BlockRange::new(id.block, 1)),
                }
            }
            let out = out.as_flattened_mut();
            let read = self.memory.read(place, &ranges, out);
            let read = read.map_err(|error| error.to_string());
            match &self.kept {
                None => read?,
                Some(kept) => {
                    let read = read.and_then(|()| is_alive(&self.guest));
                    kept.read_after(read, same, out)?;
                }
            }
        }
        Ok(())
    }

    fn is_there(&self, blocks: &[BlockId]) -> Result<(), String> {
        let is_memory =
            |block: &BlockId| matches!(self.places.get(&block.region), Some(Place::Memory(_)));
        match self.kept.is_none() && blocks.iter().any(is_memory) {
            true => is_alive(&self.guest),
            false => Ok(()),
        }
    }
}
