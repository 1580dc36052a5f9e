//! Runs the source's side of the hand-over: feeds it what happens, does what it says.

use crate::handover::attempt_record::{is_stale, of_attempt, stale};
use crate::handover::ledger::{SourceHandover, SourceOwner, feed_source};
use crate::host::hooks::Step;
use crate::source::attempt::{Departure, SUMMARY_WITHIN, Task, next_message};
use crate::status::{failure, in_doubt};
use longhaul_api::{ApiError, Phase, Resolve};
use longhaul_engine::handover::{SourceAction, SourceEvent, SourceState};
use longhaul_protocol::Attempt;
use longhaul_protocol::message::{ToDestination, ToSource};
use tokio::time::Instant;

impl Departure {
    /// Ends the attempt, where that is still this side's to decide, or worth asking for.
    pub(crate) async fn fail(&mut self, error: ApiError) {
        if self.failure.is_some() {
            return;
        }
        tracing::warn!(migration = %self.task.offer.migration, %error, "giving up");
        let reason = crate::channel::short(&error.message);
        // What was released late is all at the destination: only it can go on.
        if self.state().may_abort() || (self.state().in_doubt() && self.terms().early) {
            self.failure = Some(error);
            self.step(SourceEvent::Abort(reason)).await;
        }
    }

    pub(crate) async fn qemu_ended(&mut self) {
        self.task.outbound.forget_process();
        // A guest that was released is the destination's, if all of it is there.
        if self.state().is_settled() || self.announced.is_some() && !self.state().may_abort() {
            return;
        }
        let guest = &self.task.offer.guest.name;
        self.fail(failure::qemu_ended(guest, &self.task.outbound.last_words()))
            .await;
    }

    pub(crate) async fn step(&mut self, event: SourceEvent) {
        feed_source(self, event).await;
        if !self.state().in_doubt() {
            self.entry().certain();
        }
        if self.state().is_over() {
            self.finished = true;
        }
    }

    /// Runs a step's hook.
    pub(crate) async fn hook(&self, step: Step) -> Result<(), ApiError> {
        let Task { context, entry, .. } = &self.task;
        context.hook(entry, step, self.terms().next()).await
    }

    /// Runs the hook of how it has ended.
    pub(crate) async fn last_hook(&self) {
        let step = match self.state() {
            SourceState::Closed { here: false } => Step::Gone,
            _ => Step::Stays,
        };
        let Task { context, entry, .. } = &self.task;
        context.last_hook(entry, step, self.terms().next()).await;
    }

    /// The guest stands still, and what is left of it is on its way.
    pub(crate) async fn standing_still(&mut self) {
        let mut hooks = self.hook(Step::Stopped).await;
        if hooks.is_ok() && self.terms().early {
            hooks = self.hook(Step::Released).await;
        }
        if let Err(error) = hooks {
            return self.fail(error).await;
        }
        self.step(SourceEvent::Postmigrate).await;
        self.announce().await;
    }

    /// The destination has everything: the guest is released, unless a hook forbids it.
    pub(crate) async fn ready(&mut self, of: Attempt) {
        let releases = self.state().may_abort() && of == self.terms().attempt;
        if releases && let Err(error) = self.hook(Step::Released).await {
            return self.fail(error).await;
        }
        self.step(SourceEvent::Ready(of)).await;
    }

    /// A person has decided.
    pub(crate) async fn resolved(&mut self, resolve: Option<Resolve>) {
        if *self.state() == SourceState::Done && self.lost_at.is_none() {
            tracing::warn!(
                ?resolve,
                "the destination answers again: nothing is overruled"
            );
            return;
        }
        if let Some(resolve) = resolve {
            let because = in_doubt::because(&self.task.host, &resolve);
            self.failure.get_or_insert(failure::overruled(&because));
            self.step(SourceEvent::Overrule(because)).await;
            // The destination, should it come back, hears of it from whoever goes on.
            self.finished |= *self.state() == SourceState::Overruled;
        }
    }

    /// Whether the copy here no longer fits the guest's disks.
    fn is_stale(&self) -> bool {
        let ledger = &self.task.handover.ledger;
        let records = of_attempt(&ledger.journal, ledger.terms);
        is_stale(&records, &self.task.offer.guest)
    }

    async fn collect_summary(&mut self) {
        let until = Instant::now() + SUMMARY_WITHIN;
        while self.summary.is_none() {
            let message = tokio::time::timeout_at(until, next_message(&mut self.session)).await;
            match message {
                Ok(Ok(ToSource::Summary(summary))) => self.summary = Some(summary),
                Ok(Ok(_)) => {}
                Ok(Err(_)) | Err(_) => return,
            }
        }
    }
}

impl SourceOwner for Departure {
    fn handover(&mut self) -> &mut SourceHandover {
        &mut self.task.handover
    }

    async fn act(&mut self, action: SourceAction) {
        let attempt = self.task.offer.attempt;
        match action {
            SourceAction::SendCommit(generation) => {
                self.send(ToDestination::Commit {
                    attempt,
                    generation,
                })
                .await;
            }
            SourceAction::SendCancel(reason) => {
                self.send(ToDestination::Cancel { reason }).await;
            }
            SourceAction::SendOverruled(generation) => {
                self.send(ToDestination::Overruled { generation }).await;
            }
            SourceAction::SendDone => self.send(ToDestination::Done).await,
            SourceAction::Resume => {
                // No write waits for the destination while QEMU is set back.
                self.task.sending.disconnect();
                if self.is_stale() {
                    let Task { context, offer, .. } = &self.task;
                    let (guest, here) = (&offer.guest.name, &context.parts.config.name);
                    let error = self.failure.take();
                    let error = error.unwrap_or_else(|| failure::overruled("taken back"));
                    self.failure = Some(error.state_of_guest(stale(guest, here)));
                } else if let Err(error) = self.task.outbound.abort().await {
                    let error = error.into_api();
                    tracing::error!(%error, "the guest could not be resumed here");
                    let Task { context, offer, .. } = &self.task;
                    let (guest, here) = (&offer.guest.name, &context.parts.config.name);
                    let state = format!(
                        "{guest} may be stopped on {here}: resuming it is tried again every second"
                    );
                    self.failure = Some(error.state_of_guest(state));
                    // Whoever goes on has a connection of its own to QEMU.
                    self.task.handover.ledger.unresumed = true;
                    self.finished = true;
                }
                self.task.context.keep_sweeping_fronts();
            }
            SourceAction::Quit => {
                self.entry().enter(Phase::Finishing);
                self.collect_summary().await;
                self.departed = self.task.outbound.quit(&self.task.context).await;
            }
            // A new session begins with the question; the rest is the ledger's.
            SourceAction::Ask
            | SourceAction::Write(_)
            | SourceAction::Fence(_)
            | SourceAction::Cede(_)
            | SourceAction::Concede(_)
            | SourceAction::Unfence(_) => {}
        }
    }
}
