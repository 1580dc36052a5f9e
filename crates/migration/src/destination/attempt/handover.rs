//! Runs the destination's side of the hand-over: feeds it what happens, does what it says.

use crate::destination::attempt::Task;
use crate::destination::dispatch::attempt_state;
use crate::destination::fetch::{Begun, Pulling};
use crate::destination::qemu::InboundError;
use crate::disks::{exports, images};
use crate::handover::attempt_record::abort_reason;
use crate::handover::ledger::{DestinationHandover, DestinationOwner, feed_destination};
use crate::host::hooks::Step;
use crate::status::in_doubt;
use longhaul_api::{ApiError, ErrorCode, Outcome, Phase, Resolve, Side};
use longhaul_engine::handover::{DestinationAction, DestinationEvent, DestinationState};
use longhaul_hypervisor::qmp::QmpError;
use longhaul_protocol::message::{Summary, ToSource};
use std::time::Duration;
use tokio::task::block_in_place;
use tokio::time::Instant;

impl Task {
    /// Feeds the hand-over, and does what it says until it asks for nothing more.
    pub(crate) async fn step(&mut self, event: DestinationEvent) {
        let before = self.state().clone();
        feed_destination(self, event).await;
        // Nothing of a guest that is all here is left at the source.
        let runs = *self.state() == (DestinationState::Running { all_present: false });
        if runs && !self.pulls {
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

    pub(crate) fn state(&self) -> &DestinationState {
        &self.handover.state
    }

    /// Runs a step's hook.
    pub(crate) async fn hook(&self, step: Step) -> Result<(), ApiError> {
        let next = self.handover.ledger.terms.next();
        self.context.hook(&self.entry, step, next).await
    }

    /// Runs the hook of how it has ended, or waits for that which runs beside the guest.
    pub(crate) async fn last_hook(&mut self) {
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

    /// Reports the guest's clock, here and to the source.
    pub(crate) async fn tell_clock(&mut self) {
        let Some(clock) = self.clock.take() else {
            return;
        };
        match clock.await {
            Ok(Some(clock)) => {
                self.entry
                    .report_with(|report| crate::status::guest_clock::report(clock, report));
                self.send(ToSource::Clock(clock)).await;
            }
            Ok(None) => {}
            Err(error) => tracing::error!(%error, "looking at a guest's clock broke"),
        }
    }

    /// Goes on with fetching what is left at the source.
    pub(crate) async fn pull(mut self) {
        self.disconnect_bulk();
        let Self {
            context,
            entry,
            handover,
            call,
            called,
            arrival,
            present,
            epoch,
            reservation,
            clock,
            running,
            inbound,
            admission,
            ..
        } = self;
        context.context.forget_kept_memory();
        // Its memory is there, and its monitor is for whoever takes the front ends out.
        drop((inbound, admission));
        let begun = Begun {
            entry: Some(entry),
            handover,
            reservation: Some(reservation),
            arrival,
            called,
            present,
            call,
            epoch,
            clock,
            running,
        };
        Pulling::new(context, begun).run().await;
    }

    fn disconnect_bulk(&mut self) {
        if let Some(bulk) = self.bulk.take() {
            bulk.abort();
        }
    }

    /// Leaves nothing behind but the report, and tells the source so.
    pub(crate) async fn end(mut self) {
        self.last_hook().await;
        self.tell_clock().await;
        let reason = self.abort_reason();
        let Self {
            context,
            entry,
            offer,
            handover,
            mut call,
            arrival,
            present,
            reservation,
            ..
        } = self;
        if handover.state.owns_guest() {
            entry.end(Outcome::Completed, None);
        } else {
            let state = format!("{} stays at {}", offer.guest.name, entry.report().source);
            let error = ApiError::new(ErrorCode::Internal, reason).state_of_guest(state);
            entry.end(Outcome::Aborted, Some(error));
        }
        context.archive.keep(&entry);
        block_in_place(|| images::sweep(&context));
        context.context.forget_kept_memory();
        let closed = matches!(handover.state, DestinationState::Closed { .. });
        if closed {
            context.attempts.close(arrival.source, handover.ledger);
        }
        // From here the guest is free for what comes next.
        drop(present);
        drop(reservation);
        if let Some(call) = &mut call {
            if closed && let Err(error) = call.sender.send(&ToSource::Closed).await {
                tracing::debug!(%error, "the source did not wait");
            }
            // The source must have read the last message before the channel goes.
            let last = tokio::time::timeout(Duration::from_secs(2), call.receiver.recv()).await;
            tracing::debug!(?last, "the source's last word");
        }
    }

    /// A person has decided.
    pub(crate) async fn resolved(&mut self, resolve: Option<Resolve>) {
        let Some(resolve) = resolve else { return };
        let because = in_doubt::because(&self.handover.ledger.host, &resolve);
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
                if !self.offer.paused {
                    self.clock = Some(self.inbound.set_clock());
                }
                self.commit_time = self.commit_at.map_or(Duration::ZERO, |at| at.elapsed());
                self.running = Some(self.context.context.running(&self.entry, generation));
                DestinationEvent::Resumed
            }
            // QEMU says that it did not: so the guest has never run here.
            Err(InboundError::Qmp(error @ QmpError::Refused { .. })) => {
                DestinationEvent::ResumeFailed(crate::channel::short(&error.to_string()))
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
            repository_bytes: self.bases.read_bytes(&self.context),
        }
    }

    pub(crate) fn abort_reason(&self) -> String {
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
                // Before it is noted that nothing is left: whoever comes after this agent looks no
                // further then.
                let state = &self.context.parts.config.state;
                exports::ended(state, &self.offer.guest.name, false).await;
                return Some(DestinationEvent::QemuGone);
            }
            // Whoever fetches does: see `Pulling`.
            DestinationAction::FillMissing => {}
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
