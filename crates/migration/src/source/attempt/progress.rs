//! What the API shows of a departure: its progress, its prediction and its report.

use crate::source::attempt::{SourceAttempt, StoppedAt, Task};
use crate::source::connect::Session;
use crate::source::convergence;
use crate::source::drain::Drain;
use crate::source::late_rate;
use crate::source::local_disks::LocalDisk;
use crate::source::recovered::RecoveredSource;
use crate::status::failure;
use crate::status::guest_rate::shown;
use crate::status::paths::path_use;
use crate::status::usage::used_there;
use longhaul_api::ApiError;
use longhaul_api::{Outcome, PathUse, RegionProgress};
use longhaul_engine::handover::SourceState;
use longhaul_engine::source::Downtime;
use longhaul_engine::stop::StopReason;
use longhaul_protocol::message::{GuestClock, Rate, Summary};
use longhaul_protocol::{BLOCK_SIZE, RegionKind};
use longhaul_transport::PathTo;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

impl SourceAttempt {
    /// Adds the bytes of a session that has ended to the total.
    pub(crate) fn keep_wire_bytes(&mut self, session: &Session) {
        if let Some(line) = &session.line {
            let stats = line.carrier.stats();
            self.wire_bytes.0 += stats.sent_bytes;
            self.wire_bytes.1 += stats.received_bytes;
            for of in line.carrier.traffic() {
                *self.path_bytes.entry(of.path).or_default() += of.sent_bytes;
            }
        }
    }

    /// Returns what each network path has carried; nothing if there was only one.
    fn paths_now(&self) -> Vec<PathUse> {
        let session = self.session.as_ref();
        let line = session.and_then(|session| session.line.as_ref());
        let mut paths: BTreeMap<PathTo, (u64, bool)> = self
            .path_bytes
            .iter()
            .map(|(path, bytes)| (*path, (*bytes, false)))
            .collect();
        for of in line.map_or(Vec::new(), |line| line.carrier.traffic()) {
            let (bytes, up) = paths.entry(of.path).or_default();
            *bytes += of.sent_bytes;
            *up |= of.is_up;
        }
        if paths.len() < 2 {
            return Vec::new();
        }
        let paths = paths.into_iter();
        paths
            .map(|(path, (bytes, up))| path_use(path, bytes, up))
            .collect()
    }

    pub(super) fn wire_bytes_now(&self) -> (u64, u64) {
        let line = self
            .session
            .as_ref()
            .and_then(|session| session.line.as_ref())
            .map(|line| line.carrier.stats());
        let (sent, received) =
            line.map_or((0, 0), |stats| (stats.sent_bytes, stats.received_bytes));
        (self.wire_bytes.0 + sent, self.wire_bytes.1 + received)
    }

    pub(crate) fn show(&mut self) {
        self.shown_at = Instant::now();
        self.predict(false);
        let now = self.now();
        let unreadable = self.draining.as_ref().map(Drain::unreadable_bytes);
        let unreadable = unreadable.unwrap_or_default();
        let trouble = self.draining.as_ref().and_then(Drain::trouble);
        let engine = self.task.sending.engine();
        let regions: Vec<RegionProgress> = engine
            .pending_by_region()
            .into_iter()
            .map(|(spec, pending)| {
                let disks = self.task.outbound.disks().iter();
                let disk = disks.clone().find(|disk| disk.spec.id == spec.id);
                let image = disk.map(LocalDisk::image_blocks);
                let blocks = image.unwrap_or(spec.blocks).max(pending);
                let (id, kind) = (spec.id, spec.kind());
                RegionProgress {
                    name: spec.name,
                    blocks_total: blocks,
                    blocks_settled: blocks - pending,
                    blocks_pending: pending,
                    disk: kind == RegionKind::Disk,
                    strategy: disk.map(LocalDisk::choice),
                    why: disk.and_then(LocalDisk::why),
                    waiting: None,
                    unreadable_byte: unreadable.get(&id).copied(),
                }
            })
            .collect();
        let pass = engine.pass_number();
        let (dirty, _) = engine.reported_blocks_per_s();
        let predicted = engine.predicted_downtime(now).likely;
        let asked = self.entry().migration().asked.convergence;
        let guest = &self.task.offer.guest.name;
        let outpaced = convergence::outpaced(guest, &asked, &engine, now, self.slowed());
        let sent = engine.sent();
        drop(engine);
        let remaining_ms = self.remaining(&regions);
        let stats = self
            .session
            .as_ref()
            .and_then(|session| session.line.as_ref())
            .map(|line| line.carrier.stats());
        let (sent_bytes, _) = self.wire_bytes_now();
        let blocks = sent.blocks();
        let paths = self.paths_now();
        let awaits_bases = self.is_launching() && self.awaits_bases();
        let lost_for = self.task.handover.lost_for();
        let lost_ms = lost_for.map(|time| time.as_millis() as u64);
        self.entry().progress(|progress| {
            progress.pass = Some(pass);
            progress.regions = regions;
            progress.link.rate_bps = stats.map(|stats| stats.delivery_rate_bps);
            progress.link.rtt_ms = stats.map(|stats| stats.rtt.as_secs_f64() * 1e3);
            progress.link.sent_bytes = sent_bytes;
            progress.link.guest_bytes = Some(blocks * BLOCK_SIZE as u64);
            progress.link.interrupted_ms = lost_ms;
            progress.link.paths = paths;
            progress.dirty_rate_bytes_per_s =
                dirty.map(|blocks| (blocks * BLOCK_SIZE as f64) as u64);
            progress.predicted_downtime_ms = convergence::known_ms(predicted);
            progress.outpaced = outpaced;
            progress.awaits_bases = awaits_bases;
            progress.trouble = trouble;
            progress.remaining_ms = remaining_ms;
        });
    }

    /// Returns by how much QEMU slows the guest, in percent of its time.
    fn slowed(&self) -> Option<u8> {
        self.task.outbound.progress()?.slowed_percent
    }

    /// Reports how the moment of the stop was chosen.
    pub(crate) fn note_stop(&self, reason: StopReason, predicted: Downtime) {
        let asked = self.entry().migration().asked.convergence;
        let choice = convergence::choice(&asked, reason, predicted, self.slowed());
        self.entry()
            .report_with(|report| report.stop = Some(choice));
    }

    /// Reports the guest's rate since QEMU's migration began.
    pub(super) fn note_rate(&self) {
        let during = self.task.outbound.rate();
        self.entry()
            .report_with(|report| report.guest_rates.during = during);
    }

    /// Reports the guest's rate as the destination measured it.
    pub(super) fn tell_rate(&self, rate: Rate) {
        self.entry()
            .report_with(|report| report.guest_rates.after = shown(rate));
    }

    /// Reports the guest's clock as the destination measured it.
    pub(crate) fn tell_clock(&self, clock: GuestClock) {
        self.entry()
            .report_with(|report| crate::status::guest_clock::report(clock, report));
    }

    /// Writes the report and ends the attempt. If a journal is not complete yet, a
    /// [`RecoveredSource`] continues.
    pub(crate) async fn close(mut self) {
        self.show();
        if self.stopped.is_none() {
            self.note_rate();
        }
        let (sent_bytes, received_bytes) = self.wire_bytes_now();
        let paths = self.paths_now();
        self.hear_last_messages().await;
        let usage = self.task.outbound.usage();
        let engine = self.task.sending.engine();
        let (sent, pass, dirty) = (
            engine.sent(),
            engine.pass_number(),
            engine.reported_blocks_per_s().1,
        );
        drop(engine);
        let encoded = self.task.sending.encoded();
        let disks = self.task.outbound.disks();
        let disks: Vec<_> = disks.iter().map(LocalDisk::report).collect();
        let rtt = self.session.as_ref().map(|session| session.control.rtt());
        let blocks = |count: u64| Some(count * BLOCK_SIZE as u64);
        let (summary, stopped, committed_at) = (self.summary, &self.stopped, self.committed_at);
        let verify = self.task.offer.verify;
        let (migration, interruptions) = (self.task.offer.migration, self.interruptions);
        self.entry().report_with(|report| {
            report.link_bytes = Some(sent_bytes);
            report.link_bytes_back = Some(received_bytes);
            report.paths = paths;
            report.memory_bytes = Some(sent.frame_bytes.saturating_sub(encoded.disk_bytes));
            report.disk_bytes = (!disks.is_empty()).then_some(encoded.disk_bytes);
            let on_bases = disks.iter().any(|disk| disk.base.is_some());
            report.disks = disks;
            report.bytes.zero_bytes = blocks(sent.zero_blocks);
            report.bytes.same_bytes = blocks(sent.same_blocks);
            report.bytes.reference_bytes = blocks(sent.reference_blocks);
            report.bytes.shared_bytes = blocks(sent.shared_blocks);
            report.bytes.kept_bytes = blocks(sent.kept_blocks);
            let others = encoded.duplicate_blocks + encoded.delta_blocks;
            report.bytes.duplicate_bytes = blocks(encoded.duplicate_blocks);
            report.bytes.delta_bytes = blocks(encoded.delta_blocks);
            report.bytes.delta_encoded_bytes = Some(encoded.delta_bytes);
            report.bytes.literal_bytes = blocks(sent.literal_blocks.saturating_sub(others));
            report.bytes.compressed_bytes = Some(encoded.stored_bytes);
            report.bytes.rejected_bytes = blocks(sent.rejected_blocks);
            report.passes = Some(pass);
            report.dirty_rate_bytes_per_s = dirty.map(|rate| (rate * BLOCK_SIZE as f64) as u64);
            report.interruptions = Some(interruptions);
            report.cost.source.agent_cpu_s = Some(usage.agent_cpu.as_secs_f64());
            report.cost.source.agent_peak_bytes = Some(usage.agent_peak_bytes);
            report.cost.source.qemu_cpu_s = Some(usage.qemu_cpu.as_secs_f64());
            if let Some(summary) = summary {
                let seconds = |us: u64| Some(us as f64 / 1e6);
                report.cost.destination.agent_cpu_s = seconds(summary.agent_cpu_us);
                report.cost.destination.agent_peak_bytes = Some(summary.agent_peak_bytes);
                report.cost.destination.qemu_cpu_s = seconds(summary.qemu_cpu_us);
                report.repository_bytes = on_bases.then_some(summary.repository_bytes);
            }
            if let Some(used) = &self.used {
                used_there(used, &mut report.cost.destination);
            }
            if let Some(draining) = &self.draining {
                draining.report(report);
            }
            if let Some(stopped) = stopped {
                stopped.report(report, committed_at, rtt, summary, verify);
                let (downtime_ms, parts) = (report.downtime_ms, &report.downtime);
                tracing::info!(%migration, ?downtime_ms, ?parts, "the guest stood still");
            }
        });
        let moved = *self.state() == SourceState::Closed { here: false };
        match self.state() {
            SourceState::Closed { here: false } => {
                self.entry().end(Outcome::Completed, None);
                self.judge_prediction();
            }
            _ => {
                let failure = self.failure.take();
                let failure =
                    failure.unwrap_or_else(|| failure::internal("the attempt was given up"));
                let outcome = failure::outcome(&failure);
                let failure = with_guest(failure, &self.task);
                self.entry().end(outcome, Some(failure));
            }
        }
        self.task.source.archive.keep(&self.task.entry);
        let Task {
            source,
            entry,
            outbound,
            companions,
            reservation,
            handover,
            offer,
            ..
        } = self.task;
        let late_entry = (moved && !offer.paused).then(|| entry.clone());
        // QEMU has one control connection, and this holds it.
        drop((outbound, companions));
        let reservation = match self.departed {
            Some(departed) => {
                source.keep(departed, entry, reservation);
                None
            }
            None => Some(reservation),
        };
        if self.closed {
            handover.ledger.remove_journal();
            if let Some((session, entry)) = self.parting.zip(late_entry) {
                late_rate::hear(source.context.clone(), entry, session);
            }
        } else {
            let reservation = reservation.filter(|_| handover.core.is_unresumed());
            RecoveredSource::hand_on(&source, handover, (offer.paused, reservation), self.session)
                .go_on();
        }
    }
}

impl StoppedAt {
    fn report(
        &self,
        report: &mut longhaul_api::Report,
        committed_at: Option<Instant>,
        rtt: Option<Duration>,
        summary: Option<Summary>,
        verify: bool,
    ) {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let half_rtt = rtt.unwrap_or_default() / 2;
        report.bytes.device_state_bytes = Some(self.what.tail.len() as u64);
        let parts = &mut report.downtime;
        parts.device_state_ms = Some(ms(self.what.device_state_time));
        let load = summary.map(|summary| Duration::from_micros(summary.load_us));
        parts.load_ms = load.map(ms);
        // The destination begins to load when the last blocks arrive, and then sends `Loaded`.
        parts.last_pages_ms = self.loaded_at.zip(load).map(|(loaded, load)| {
            let before = self.what.stop_time + self.what.device_state_time + load + half_rtt;
            ms((loaded - self.at).saturating_sub(before))
        });
        parts.verify_ms = match (verify, self.loaded_at, self.ready_at) {
            (true, Some(loaded), Some(ready)) => Some(ms(ready - loaded)),
            _ => None,
        };
        if let (Some(ready), Some(committed)) = (self.ready_at, committed_at) {
            parts.commit_ms = Some(ms((committed - ready).saturating_sub(half_rtt)));
        }
        // The destination sends `Committed` right after it has started the guest.
        report.downtime_ms =
            committed_at.map(|committed| ms((committed - self.at).saturating_sub(half_rtt)));
    }
}

/// Adds the state of the guest to a failure.
fn with_guest(failure: ApiError, task: &Task) -> ApiError {
    if failure.state_of_guest.is_some() {
        return failure;
    }
    let guest = &task.offer.guest.name;
    let here = &task.source.parts.config.name;
    let state = match (failure.code, task.outbound.is_gone()) {
        (_, true) => format!("the QEMU of {guest} has ended on {here}"),
        _ if task.offer.paused => format!("nothing was moved; {guest} is paused on {here}"),
        _ => format!("nothing was moved; {guest} runs on {here}"),
    };
    failure.state_of_guest(state)
}
