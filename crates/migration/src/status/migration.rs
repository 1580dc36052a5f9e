//! One migration as operators see it: phase, progress, report, and requests to it.

use crate::status::changes::{Notable, NotableDoubt};
use crate::status::in_doubt::Standing;
use crate::status::time::unix_ms;
use longhaul_api::{
    ApiError, Asked, BytesByKind, Cost, DowntimeParts, GuestRates, HandoverRecord, LinkProgress,
    Migration, Outcome, Phase, PhaseTime, Progress, Properties, Report, Resolve, Side, Strategy,
};
use longhaul_protocol::{Generation, MigrationId};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Facts that are fixed when a migration begins.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub(crate) id: MigrationId,
    pub(crate) guest: String,
    pub(crate) side: Side,
    pub(crate) source: String,
    pub(crate) destination: String,
    pub(crate) asked: Asked,
    /// The strategy of the memory.
    pub(crate) strategy: Strategy,
}

/// A migration of this host, in progress or ended.
#[derive(Debug)]
pub(crate) struct Entry {
    id: MigrationId,
    started: Instant,
    state: Mutex<State>,
    progress: watch::Sender<Progress>,
    cancel: watch::Sender<Option<String>>,
    limit: watch::Sender<Option<u64>>,
    resolve: watch::Sender<Option<Resolve>>,
    /// The registry that tells of its changes, once it is in one.
    observer: OnceLock<Box<dyn Observer>>,
}

#[derive(Debug)]
struct State {
    migration: Migration,
    report: Report,
    phase_began: Duration,
    standing: Option<Standing>,
}

/// Hears of the changes of a migration.
pub(crate) trait Observer: std::fmt::Debug + Send + Sync {
    /// Something of the migration may have changed.
    fn changed(&self, entry: &Entry);
}

impl Entry {
    /// Creates a migration that begins now.
    pub(crate) fn new(facts: Facts) -> Self {
        let id = facts.id.to_string();
        let progress = Progress {
            id: id.clone(),
            elapsed_ms: 0,
            phase: Phase::Preparing,
            pass: None,
            regions: Vec::new(),
            link: LinkProgress {
                rate_bps: None,
                rtt_ms: None,
                sent_bytes: 0,
                guest_bytes: None,
                limit_bps: facts.asked.bandwidth_bps,
                interrupted_ms: None,
                paths: Vec::new(),
            },
            dirty_rate_bytes_per_s: None,
            predicted_downtime_ms: None,
            outpaced: None,
            awaits_bases: false,
            trouble: None,
            remaining_ms: None,
            outcome: None,
            reason: None,
        };
        let migration = Migration {
            id: id.clone(),
            guest: facts.guest.clone(),
            side: facts.side,
            source: facts.source.clone(),
            destination: facts.destination.clone(),
            strategy: facts.strategy,
            asked: facts.asked.clone(),
            started_unix_ms: unix_ms(),
            ended_unix_ms: None,
            phase: Phase::Preparing,
            outcome: None,
            reason: None,
            doubt: None,
            progress: None,
        };
        let report = Report {
            id,
            guest: facts.guest,
            side: facts.side,
            source: facts.source,
            destination: facts.destination,
            strategy: facts.strategy,
            strategy_why: None,
            asked: facts.asked.clone(),
            started_unix_ms: migration.started_unix_ms,
            phase: Phase::Preparing,
            outcome: None,
            reason: None,
            predicted: None,
            judged: None,
            link_bytes: None,
            link_bytes_back: None,
            paths: Vec::new(),
            memory_bytes: None,
            disk_bytes: None,
            repository_bytes: None,
            arbiter: None,
            arbitrated: false,
            disks: Vec::new(),
            bytes: BytesByKind::default(),
            total_ms: None,
            phases: Vec::new(),
            passes: None,
            stop: None,
            downtime_ms: None,
            downtime: DowntimeParts::default(),
            dirty_rate_bytes_per_s: None,
            interruptions: None,
            cost: Cost::default(),
            guest_rates: GuestRates::default(),
            faults: None,
            verify: None,
            clock: None,
            hooks: Vec::new(),
            kept_memory: None,
            memory_file: None,
            properties: Properties::default(),
        };
        Self {
            id: facts.id,
            started: Instant::now(),
            state: Mutex::new(State {
                migration,
                report,
                phase_began: Duration::ZERO,
                standing: None,
            }),
            progress: watch::Sender::new(progress),
            cancel: watch::Sender::new(None),
            limit: watch::Sender::new(facts.asked.bandwidth_bps),
            resolve: watch::Sender::new(None),
            observer: OnceLock::new(),
        }
    }

    /// Creates a migration that ended under an earlier agent, from its report.
    pub(crate) fn ended(id: MigrationId, migration: Migration, report: Report) -> Self {
        let facts = Facts {
            strategy: Strategy::Precopy,
            id,
            guest: migration.guest.clone(),
            side: migration.side,
            source: migration.source.clone(),
            destination: migration.destination.clone(),
            asked: migration.asked.clone(),
        };
        let entry = Self::new(facts);
        entry.progress.send_modify(|progress| {
            progress.phase = migration.phase;
            progress.outcome = migration.outcome;
            progress.reason = migration.reason.clone();
            progress.elapsed_ms = report.total_ms.unwrap_or(0);
        });
        *entry.lock() = State {
            migration,
            report,
            phase_began: Duration::ZERO,
            standing: None,
        };
        entry
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn id(&self) -> MigrationId {
        self.id
    }

    /// Returns whether a stopping agent waits for its end. A drain may take hours, and the next
    /// agent continues it.
    pub(crate) fn holds_up_a_stop(&self) -> bool {
        self.outcome().is_none() && self.phase() != Phase::Finishing
    }

    /// Sets who hears of its changes. The first one counts.
    pub(crate) fn observe(&self, observer: Box<dyn Observer>) {
        self.observer.get_or_init(|| observer);
    }

    /// Tells the observer of a change. Callers hold no lock.
    fn changed(&self) {
        if let Some(observer) = self.observer.get() {
            observer.changed(self);
        }
    }

    /// Returns the part of it whose changes are told.
    pub(crate) fn notable(&self) -> Notable {
        let state = self.lock();
        let doubt = state.standing.as_ref().map(|standing| NotableDoubt {
            record: standing.record,
            generation: standing.generation,
            other_record: standing.other_record,
            silent: standing.asked.as_ref().map(|(_, why)| why.clone()),
        });
        Notable::of(&state.migration, doubt, &self.progress.borrow())
    }

    /// Returns the time since it began.
    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Enters a phase.
    pub(crate) fn enter(&self, phase: Phase) {
        let now = self.elapsed();
        let mut state = self.lock();
        state.close_phase(now);
        state.migration.phase = phase;
        state.report.phase = phase;
        drop(state);
        tracing::info!(migration = %self.id, %phase, "phase");
        self.progress(|progress| progress.phase = phase);
    }

    /// Returns the phase that it is in, or ended in.
    pub(crate) fn phase(&self) -> Phase {
        self.lock().migration.phase
    }

    /// Changes its progress. Has no effect once it has an outcome.
    pub(crate) fn progress(&self, change: impl FnOnce(&mut Progress)) {
        let elapsed = self.elapsed().as_millis() as u64;
        self.progress.send_modify(|progress| {
            if progress.outcome.is_none() {
                progress.elapsed_ms = elapsed;
                change(progress);
            }
        });
        self.changed();
    }

    /// Changes its report.
    pub(crate) fn report_with(&self, change: impl FnOnce(&mut Report)) {
        change(&mut self.lock().report);
    }

    /// Ends it with an outcome.
    pub(crate) fn end(&self, outcome: Outcome, reason: Option<ApiError>) {
        let now = self.elapsed();
        let mut state = self.lock();
        state.close_phase(now);
        state.migration.outcome = Some(outcome);
        state.migration.reason.clone_from(&reason);
        state.report.outcome = Some(outcome);
        state.report.reason.clone_from(&reason);
        state.report.total_ms = Some(now.as_millis() as u64);
        state.migration.ended_unix_ms = match outcome {
            Outcome::InDoubt => None,
            _ => Some(unix_ms()),
        };
        if outcome != Outcome::InDoubt {
            state.standing = None;
        }
        let guest = state.migration.guest.clone();
        drop(state);
        match &reason {
            Some(reason) => {
                tracing::warn!(migration = %self.id, guest, ?outcome, "ended: {reason}");
            }
            None => tracing::info!(migration = %self.id, guest, ?outcome, "ended"),
        }
        self.progress.send_modify(|progress| {
            progress.elapsed_ms = now.as_millis() as u64;
            progress.outcome = Some(outcome);
            progress.reason = reason;
        });
        self.changed();
    }

    /// Clears the outcome "in doubt": the migration continues.
    pub(crate) fn goes_on(&self) {
        let mut state = self.lock();
        if state.migration.outcome != Some(Outcome::InDoubt) {
            return;
        }
        (state.migration.outcome, state.migration.reason) = (None, None);
        (state.report.outcome, state.report.reason) = (None, None);
        drop(state);
        self.progress.send_modify(|progress| {
            (progress.outcome, progress.reason) = (None, None);
        });
        self.changed();
    }

    /// Returns its outcome, if it has one.
    pub(crate) fn outcome(&self) -> Option<Outcome> {
        self.lock().migration.outcome
    }

    /// Returns it as the list of migrations shows it.
    pub(crate) fn migration(&self) -> Migration {
        let state = self.lock();
        let mut migration = state.migration.clone();
        migration.progress = Some(self.progress.borrow().clone());
        migration.doubt = state
            .standing
            .as_ref()
            .map(|standing| standing.doubt(&migration));
        migration
    }

    /// Returns the report so far.
    pub(crate) fn report(&self) -> Report {
        let mut report = self.lock().report.clone();
        report.properties = Properties::of(&report);
        report
    }

    /// Returns its progress as a stream of updates.
    pub(crate) fn watch(&self) -> watch::Receiver<Progress> {
        self.progress.subscribe()
    }

    /// Requests that it stop. Only the first reason counts.
    pub(crate) fn cancel(&self, why: &str) {
        self.cancel.send_if_modified(|asked| {
            let first = asked.is_none();
            asked.get_or_insert_with(|| why.to_owned());
            first
        });
    }

    /// Returns a receiver of requests to stop.
    pub(crate) fn cancelled(&self) -> watch::Receiver<Option<String>> {
        self.cancel.subscribe()
    }

    /// Changes its bandwidth limit.
    pub(crate) fn limit(&self, bandwidth_bps: Option<u64>) {
        self.limit.send_replace(bandwidth_bps);
        self.progress(|progress| progress.link.limit_bps = bandwidth_bps);
    }

    /// Returns a receiver of its bandwidth limit.
    pub(crate) fn limits(&self) -> watch::Receiver<Option<u64>> {
        self.limit.subscribe()
    }

    /// Marks it as waiting for the other side, which does not answer. Takes this side's last
    /// record, and the generation that the right has at the destination.
    pub(crate) fn in_doubt(&self, record: HandoverRecord, next: Generation) {
        let mut state = self.lock();
        let standing = state.standing.get_or_insert_with(|| Standing {
            record,
            generation: next.0,
            since_unix_ms: unix_ms(),
            other_record: None,
            heard_unix_ms: None,
            asked: None,
            arbiter: None,
        });
        standing.record = record;
        drop(state);
        self.changed();
    }

    /// Notes an answer of the other side while in doubt, with the record that it reported, if any.
    pub(crate) fn heard(&self, record: Option<HandoverRecord>) {
        if let Some(standing) = &mut self.lock().standing {
            let now = unix_ms();
            standing.other_record = record.or(standing.other_record);
            standing.heard_unix_ms = Some(now);
            standing.asked = Some((now, None));
        }
        self.changed();
    }

    /// Notes that the other side was asked while in doubt and did not answer.
    pub(crate) fn silent(&self, why: &str) {
        if let Some(standing) = &mut self.lock().standing {
            standing.asked = Some((unix_ms(), Some(why.to_owned())));
        }
        self.changed();
    }

    /// Shows what the arbiter has to do with the doubt.
    pub(crate) fn arbiter(&self, text: &str) {
        if let Some(standing) = &mut self.lock().standing {
            standing.arbiter = Some(text.to_owned());
        }
        self.changed();
    }

    /// Shows the same, unless something is shown already.
    pub(crate) fn arbiter_unless_known(&self, text: &str) {
        if let Some(standing) = &mut self.lock().standing {
            standing.arbiter.get_or_insert_with(|| text.to_owned());
        }
    }

    /// Ends the doubt.
    pub(crate) fn certain(&self) {
        self.lock().standing = None;
        self.changed();
    }

    /// Passes on an operator's decision about which side runs the guest.
    pub(crate) fn resolve(&self, resolve: Resolve) {
        self.resolve.send_replace(Some(resolve));
    }

    /// Returns a receiver of operators' decisions.
    pub(crate) fn resolutions(&self) -> watch::Receiver<Option<Resolve>> {
        self.resolve.subscribe()
    }
}

impl State {
    fn close_phase(&mut self, now: Duration) {
        let phase = self.migration.phase;
        let time_ms = now.saturating_sub(self.phase_began).as_secs_f64() * 1e3;
        match self
            .report
            .phases
            .iter_mut()
            .find(|time| time.phase == phase)
        {
            Some(time) => time.time_ms += time_ms,
            None => self.report.phases.push(PhaseTime { phase, time_ms }),
        }
        self.phase_began = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drain_does_not_hold_up_an_agent_that_stops() {
        let entry = Entry::new(Facts {
            strategy: Strategy::Precopy,
            id: MigrationId([7; 8]),
            guest: "web-7".to_owned(),
            side: Side::Source,
            source: "lyon".to_owned(),
            destination: "paris".to_owned(),
            asked: Asked::default(),
        });
        entry.enter(Phase::Precopy);
        assert!(entry.holds_up_a_stop());
        entry.enter(Phase::Finishing);
        assert!(!entry.holds_up_a_stop());
        entry.enter(Phase::HandingOver);
        entry.end(Outcome::Completed, None);
        assert!(!entry.holds_up_a_stop());
    }
}
