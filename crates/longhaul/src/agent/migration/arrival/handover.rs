//! Runs the destination's side of the hand-over: feeds it what happens, does what it says.

use super::{Task, short};
use crate::agent::hooks::Step;
use crate::agent::migration::doubt;
use crate::agent::migration::inbound::InboundError;
use crate::agent::migration::ledger::{DestinationHandover, DestinationOwner, feed_destination};
use crate::agent::migration::left::abort_reason;
use crate::agent::migration::peer::attempt_state;
use longhaul_api::{ApiError, Phase, Resolve, Side};
use longhaul_engine::handover::{DestinationAction, DestinationEvent, DestinationState};
use longhaul_hypervisor::qmp::QmpError;
use longhaul_protocol::message::{Summary, ToSource};
use std::time::Duration;
use tokio::time::Instant;

impl Task {
    /// Feeds the hand-over, and does what it says until it asks for nothing more.
    pub(super) async fn step(&mut self, event: DestinationEvent) {
        let before = self.state().clone();
        feed_destination(self, event).await;
        // Nothing of a guest that is all here is left at the source.
        if *self.state() == (DestinationState::Running { all_present: false }) {
            feed_destination(self, DestinationEvent::AllPresent).await;
        }
        if *self.state() != before {
            self.pace.stepped(Instant::now());
        }
        self.arrival.set_state(&self.handover.state);
        if self.state().is_settled() {
            self.entry.certain();
            self.settled_at.get_or_insert_with(Instant::now);
        }
    }

    pub(super) fn state(&self) -> &DestinationState {
        &self.handover.state
    }

    /// Runs a step's hook.
    pub(super) async fn hook(&self, step: Step) -> Result<(), ApiError> {
        let next = self.handover.ledger.terms.next();
        self.context.hook(&self.entry, step, next).await
    }

    /// Runs the hook of how it has ended, or waits for that which runs beside the guest.
    pub(super) async fn last_hook(&mut self) {
        let next = self.handover.ledger.terms.next();
        if !self.state().owns_guest() {
            self.context
                .last_hook(&self.entry, Step::NotComing, next)
                .await;
        }
        if let Some(running) = self.running.take()
            && let Err(error) = running.await
        {
            tracing::error!(%error, "a hook broke");
        }
    }

    /// A person has decided.
    pub(super) async fn resolved(&mut self, resolve: Option<Resolve>) {
        let Some(resolve) = resolve else { return };
        let because = doubt::because(&self.handover.ledger.host, &resolve);
        match resolve.run_on {
            Side::Destination => self.step(DestinationEvent::Overrule(because)).await,
            Side::Source => self.abort(because).await,
        }
    }

    async fn resume_guest(&mut self) -> DestinationEvent {
        let generation = self.handover.ledger.terms.next();
        self.context
            .last_hook(&self.entry, Step::Taken, generation)
            .await;
        match self.inbound.resume(generation, self.offer.paused).await {
            Ok(()) => {
                self.commit_time = self.commit_at.map_or(Duration::ZERO, |at| at.elapsed());
                self.running = Some(self.context.running(&self.entry, generation));
                DestinationEvent::Resumed
            }
            // QEMU says that it did not: so the guest has never run here.
            Err(InboundError::Qmp(error @ QmpError::Refused { .. })) => {
                DestinationEvent::ResumeFailed(short(&error.to_string()))
            }
            // It may have run before QEMU fell silent: it is here, whatever became of it.
            Err(error) => {
                tracing::error!(guest = self.offer.guest.name, %error, "told to run, no answer");
                DestinationEvent::Resumed
            }
        }
    }

    fn summary(&self) -> Summary {
        let usage = self.inbound.usage();
        Summary {
            load_us: self.load_time.as_micros() as u64,
            commit_us: self.commit_time.as_micros() as u64,
            agent_cpu_us: usage.agent_cpu.as_micros() as u64,
            qemu_cpu_us: usage.qemu_cpu.as_micros() as u64,
            agent_peak_bytes: usage.agent_peak_bytes,
        }
    }

    pub(super) fn abort_reason(&self) -> String {
        abort_reason(self.handover.ledger.journal.records())
    }
}

impl DestinationOwner for Task {
    fn handover(&mut self) -> &mut DestinationHandover {
        &mut self.handover
    }

    async fn act(&mut self, action: DestinationAction) -> Option<DestinationEvent> {
        let attempt = self.offer.attempt;
        match action {
            DestinationAction::SendReady => self.send(ToSource::Ready { attempt }).await,
            DestinationAction::Resume => return Some(self.resume_guest().await),
            DestinationAction::SendCommitted => {
                self.send(ToSource::Committed { attempt }).await;
                let summary = self.summary();
                self.send(ToSource::Summary(summary)).await;
                self.entry.enter(Phase::Finishing);
            }
            DestinationAction::SendAllPresent => {
                self.send(ToSource::AllPresent { attempt }).await;
            }
            DestinationAction::Quit => {
                self.inbound.quit().await;
                return Some(DestinationEvent::QemuGone);
            }
            DestinationAction::SendAborted => {
                let reason = self.abort_reason();
                self.send(ToSource::Aborted { attempt, reason }).await;
            }
            DestinationAction::SendStatus => {
                let state = attempt_state(self.state());
                self.send(ToSource::Status { attempt, state }).await;
            }
            // Sent when the guest is nobody's business here any more.
            DestinationAction::SendClosed => {}
            // These are the ledger's.
            DestinationAction::Write(_)
            | DestinationAction::Own(_)
            | DestinationAction::Yield(_)
            | DestinationAction::Concede(_) => {}
        }
        None
    }
}
