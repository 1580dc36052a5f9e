//! The stop of a departing guest, and the sending of what only a stopped guest can give.

use crate::source::attempt::{SourceAttempt, StoppedAt, Task};
use crate::source::verify::Comparison;
use crate::status::failure;
use longhaul_api::{ApiError, Phase, Strategy};
use longhaul_codec::pack;
use longhaul_engine::source::{Advice, SourceError};
use longhaul_engine::stop::StopReason;
use longhaul_hypervisor::disk_cache;
use longhaul_protocol::RegionId;
use longhaul_protocol::disk::Pulled;
use longhaul_protocol::limits::REMAINING_MAX;
use longhaul_protocol::message::ToDestination;
use longhaul_protocol::piece::Part;
use longhaul_protocol::units::show_bytes;
use longhaul_storage::disk::Disk as _;
use std::fmt::Display;
use std::time::Duration;
use tokio::task::{JoinHandle, block_in_place};
use tokio::time::Instant;

/// The guest's disks are flushed early once the predicted downtime is at most this.
const FLUSH_WITHIN: Duration = Duration::from_secs(3);
/// Interval between two flushes of the guest's disks. It is `FLUSH_REST` times the duration of the
/// last flush if that is longer.
const FLUSH_EVERY: Duration = Duration::from_millis(250);
const FLUSH_REST: u32 = 3;

/// State of the early flushes of the guest's disks.
#[derive(Default)]
pub(crate) struct Disks {
    flushing: Option<(Instant, JoinHandle<()>)>,
    next_at: Option<Instant>,
}

impl SourceAttempt {
    /// Flushes the guest's disks repeatedly when the stop is near, so that the flush that QEMU
    /// makes while the guest is stopped is short. Earlier flushes would only delay the guest's own.
    pub(crate) fn flush_disks(&mut self) {
        let now = self.now();
        let Disks { flushing, next_at } = &mut self.disks;
        if let Some((began, handle)) = flushing {
            if handle.is_finished() {
                let rest = FLUSH_EVERY.max(began.elapsed() * FLUSH_REST);
                *next_at = Some(Instant::now() + rest);
                *flushing = None;
            }
            return;
        }
        let due = next_at.is_none_or(|at| at <= Instant::now());
        let Some(pid) = self.task.outbound.pid().filter(|_| due) else {
            return;
        };
        let ends_in = self.task.sending.engine().predicted_downtime(now);
        if ends_in.likely > FLUSH_WITHIN {
            return;
        }
        let guest = self.task.offer.guest.name.clone();
        let disks = self.task.outbound.disks().iter();
        let disks: Vec<_> = disks.map(|disk| disk.disk.clone()).collect();
        let flush = move || {
            // QEMU itself does not have the disks open that move: their exports do.
            for disk in disks {
                if let Err(error) = disk.flush() {
                    tracing::debug!(guest, %error, "a disk could not be flushed beforehand");
                }
            }
            if let Err(error) = disk_cache::flush(pid) {
                tracing::debug!(guest, %error, "its disks could not be flushed beforehand");
            }
        };
        *flushing = Some((Instant::now(), tokio::task::spawn_blocking(flush)));
    }

    /// Sends the expected beginning of the device state after the first pass. It seldom changes.
    pub(crate) async fn send_early(&mut self) {
        if self.early.is_some() || self.task.sending.engine().pass_number() < 2 {
            return;
        }
        let early = self.task.outbound.early();
        match pack(&early) {
            Ok(packed) => self.task.sending.add_pieces(Part::Early, &packed),
            Err(error) => return self.fail(failure::internal(&error.to_string())).await,
        }
        self.early = Some(early);
    }

    /// Stops the guest, if the destination's QEMU waits for it and no comparison has to end first.
    pub(crate) async fn stop_if_it_may(&mut self, reason: StopReason) {
        if self.task.handover.core.may_stop() && !self.compares_disks() {
            self.stop(reason).await;
        }
    }

    /// Returns whether disks have yet to be compared before the guest is stopped. Begins the
    /// comparison when it is asked first: then the disks are at the destination except for recent
    /// writes.
    fn compares_disks(&mut self) -> bool {
        if self.compares_ahead && self.comparing.is_none() {
            let Task {
                outbound, sending, ..
            } = &self.task;
            self.comparing = Some(Comparison::ahead(outbound, sending));
        }
        self.compares_ahead
    }

    /// Stops the guest, and sends the pending data.
    async fn stop(&mut self, reason: StopReason) {
        if let Err(error) = self.task.companions.stopping().await {
            return self.fail(error).await;
        }
        self.predict(true);
        self.entry().enter(Phase::Stopping);
        let now = self.now();
        let (predicted, left) = {
            let engine = self.task.sending.engine();
            (engine.predicted_downtime(now), engine.left(now))
        };
        let progress = self.task.outbound.progress();
        self.note_stop(reason, predicted);
        self.note_strategy();
        if let Err(error) = self.note_left_memory() {
            return self.fail(failure::internal(&error.to_string())).await;
        }
        let migration = self.task.offer.migration;
        tracing::info!(%migration, ?reason, ?predicted, ?left, ?progress, "stopping");
        self.note_rate();
        let stopped = self.task.outbound.freeze(&self.task.sending, now).await;
        let what = match stopped {
            Ok(Some(what)) => what,
            Ok(None) => return self.entry().enter(Phase::Precopy),
            Err(error) => return self.fail(error.into_api()).await,
        };
        let stop_ms = what.stop_time.as_secs_f64() * 1e3;
        self.entry()
            .report_with(|report| report.downtime.stop_ms = Some(stop_ms));
        let at = what.stopped_at;
        let left = self.task.sending.engine().left(self.now());
        tracing::info!(migration = %self.task.offer.migration, ?left, "stopped");
        self.stopped = Some(StoppedAt {
            at,
            what,
            loaded_at: None,
            ready_at: None,
        });
        self.task.sending.wake();
        if self.task.offer.verify {
            let Task {
                outbound, sending, ..
            } = &self.task;
            self.comparing = Some(Comparison::begin(outbound, sending));
        }
        // QEMU has closed the disks.
        let closed = self.task.companions.closed().await;
        if let Err(error) = closed.and_then(|()| self.task.outbound.check_disks()) {
            return self.fail(error).await;
        }
        if let Err(error) = self.promise_tables() {
            return self.fail(error).await;
        }
        if let Err(error) = self.leave_out_unused().and_then(|()| self.expect_needed()) {
            return self.fail(failure::internal(&error.to_string())).await;
        }
        self.task.sending.engine().closed();
        self.send_tail().await;
        // An early release is recorded while the last blocks travel.
        self.standing_still().await;
    }

    /// Queues the tables that QEMU needs to open growing images. This precedes the lists of missing
    /// blocks.
    fn promise_tables(&mut self) -> Result<(), ApiError> {
        for disk in self.task.outbound.disks() {
            let failed = |error: &dyn Display| {
                failure::internal(&format!("disk {}: {error}", disk.spec.name))
            };
            let promised = disk.promised().map_err(|error| failed(&error))?;
            let mut engine = self.task.sending.engine();
            let done = engine.promise(disk.spec.id, promised);
            done.map_err(|error| failed(&error))?;
        }
        Ok(())
    }

    /// Lets the blocks of memory that follows which QEMU reads while it loads the guest go first of
    /// it.
    fn expect_needed(&self) -> Result<(), SourceError> {
        let mut engine = self.task.sending.engine();
        let stopped = self.stopped.as_ref().filter(|_| engine.memory_follows());
        let needed = stopped.and_then(|it| self.task.outbound.needed_to_load(&it.what.tail));
        let Some((region, blocks)) = needed else {
            return Ok(());
        };
        tracing::debug!(blocks = blocks.len(), "what the devices name goes ahead");
        let blocks: Vec<u64> = blocks
            .iter()
            .flat_map(longhaul_protocol::BlockRange::blocks)
            .collect();
        engine.expect(region, &blocks)
    }

    /// Leaves memory that follows and was never used out of the lists: it is zero at both ends.
    fn leave_out_unused(&self) -> Result<(), SourceError> {
        let Task {
            outbound, sending, ..
        } = &self.task;
        if !sending.engine().memory_follows() {
            return Ok(());
        }
        let (memory, places) = outbound.memory();
        for (region, place) in places {
            let unused = block_in_place(|| memory.unused(place));
            let mut engine = sending.engine();
            unused
                .into_iter()
                .try_for_each(|range| engine.hole(region, range))?;
        }
        Ok(())
    }

    pub(crate) async fn send_tail(&mut self) {
        let Some(stopped) = &self.stopped else { return };
        match pack(&stopped.what.tail[self.early_bytes()..]) {
            Ok(packed) => self.task.sending.add_pieces(Part::DeviceState, &packed),
            Err(error) => self.fail(failure::internal(&error.to_string())).await,
        }
    }

    /// Lets memory follow, sent once before, if the guest writes it faster than the link carries it
    /// and the strategy is chosen here. Asked until both are known.
    pub(crate) fn judge_strategy(&mut self) {
        let looking = self.task.look.has_changed().is_ok();
        if self.judged || looking {
            return;
        }
        let mut engine = self.task.sending.engine();
        let link = engine.link_now().map(|link| link.rate_bytes_per_s);
        let known = self.task.look.borrow().written_bytes_per_s().zip(link);
        let Some((written, link)) = known else { return };
        self.judged = true;
        if written > link {
            engine.let_memory_follow();
        }
    }

    /// Reports which strategy was chosen, and why.
    fn note_strategy(&self) {
        let (_, may_follow) = self.task.outbound.strategy();
        if !may_follow {
            return;
        }
        let engine = self.task.sending.engine();
        let follows = engine.memory_follows();
        let written = engine
            .written_bytes_per_s()
            .max(self.task.look.borrow().written_bytes_per_s().unwrap_or(0.0));
        let link = engine.link_now().map_or(0.0, |link| link.rate_bytes_per_s);
        drop(engine);
        let (strategy, why) = match follows {
            false => (Strategy::Precopy, "the downtime is met".to_owned()),
            true => {
                let why = format!(
                    "the guest writes {}/s, too fast for the downtime at {}/s",
                    show_bytes(written as u64),
                    show_bytes(link as u64)
                );
                (Strategy::Hybrid, why)
            }
        };
        self.entry().report_with(|report| {
            report.strategy = strategy;
            report.strategy_why = Some(why.clone());
        });
    }

    /// Returns how many bytes of the device state are equal to those that were sent early.
    fn early_bytes(&self) -> usize {
        let (Some(stopped), Some(early)) = (&self.stopped, &self.early) else {
            return 0;
        };
        stopped
            .what
            .tail
            .iter()
            .zip(early)
            .take_while(|(one, other)| one == other)
            .count()
    }

    /// Sends the lengths of growing images, which are no longer written.
    async fn send_lengths(&mut self) {
        let disks = self.task.outbound.disks().iter();
        let growing = disks.filter(|disk| disk.grows());
        let lengths: Vec<_> = growing
            .map(|disk| (disk.spec.id, disk.final_bytes()))
            .collect();
        for (region, bytes) in lengths {
            match bytes {
                Ok(bytes) => self.send(ToDestination::Length { region, bytes }).await,
                Err(error) => {
                    return self.fail(failure::internal(&error.to_string())).await;
                }
            }
        }
    }

    /// Sends the lists of missing blocks of the disks, and of memory that may follow.
    async fn send_lists(&mut self) {
        let outbound = &self.task.outbound;
        let disks = outbound.disks().iter().map(|disk| disk.spec.id);
        let memory = outbound.regions().iter().map(|spec| spec.id);
        let memory = memory.filter(|_| outbound.follows() != Pulled::Nothing);
        let of_memory = memory.clone().count();
        let regions: Vec<RegionId> = memory.chain(disks).collect();
        self.listed = vec![Vec::new(); of_memory];
        for (number, region) in regions.into_iter().enumerate() {
            let mut next = Some(0);
            while let Some(from) = next {
                let list = self.task.sending.engine().list(region, from, REMAINING_MAX);
                match list {
                    Ok(Some(list)) => {
                        next = list.next_chunk;
                        if let Some(listed) = self.listed.get_mut(number) {
                            listed.extend(&list.remaining);
                        }
                        self.send(ToDestination::List(list)).await;
                    }
                    // Does not happen: the engine is closed, and the region is one of its own.
                    Ok(None) => return,
                    Err(error) => {
                        return self.fail(failure::internal(&error.to_string())).await;
                    }
                }
            }
        }
    }

    /// Announces the number of frames, once all have been given to the connection.
    pub(crate) async fn announce(&mut self) {
        let (Some(line), Some(stopped)) = (self.line(), &self.stopped) else {
            return;
        };
        // What travels while the destination loads the guest is not waited for.
        if self.announced.is_some_and(|(epoch, _)| epoch == line.epoch) && self.loading {
            return;
        }
        if self.task.sending.engine().advise(self.began.elapsed()) != Advice::Complete {
            self.task.sending.wake();
            return;
        }
        // The engine has nothing more to send, so the count does not change any more.
        let announcement = (line.epoch, line.frames());
        if self.announced == Some(announcement) {
            return;
        }
        let before = self.announced.replace(announcement);
        // Blocks of the lists travel behind them, so others would not name these. They are missing
        // at the destination until it loads the guest.
        let listed = before.is_some_and(|(epoch, _)| epoch == line.epoch)
            && self.task.sending.engine().memory_follows();
        let device_state_bytes = stopped.what.tail.len() as u32;
        let early_bytes = self.early_bytes() as u32;
        if self.entry().phase() == Phase::Stopping {
            self.entry().enter(Phase::Loading);
        }
        let managed = self.task.outbound.guest().owner().manager();
        let cookie = stopped.what.cookie.0.clone();
        self.send_lengths().await;
        if !listed {
            self.send_lists().await;
        }
        if managed.is_some() {
            self.send(ToDestination::Departed { cookie }).await;
        }
        let (epoch, frames) = announcement;
        self.send(ToDestination::Complete {
            epoch,
            frames,
            early_bytes,
            device_state_bytes,
        })
        .await;
        self.sends_more();
        self.expect_next();
        // While the destination loads the guest. Without it a later agent has QEMU alone.
        if self.task.outbound.kept().is_some()
            && let Err(error) = self.note_left_memory()
        {
            let guest = &self.task.offer.guest.name;
            tracing::warn!(guest, %error, "what follows of its memory cannot be noted");
        }
    }
}
