//! Runs the source's side of the hand-over: feeds it what happens, does what it says.

use super::{Departure, SUMMARY_WITHIN, next_message};
use crate::agent::migration::ledger::{SourceHandover, SourceOwner, feed_source};
use crate::agent::migration::{arrival, failure};
use longhaul_api::{ApiError, Phase};
use longhaul_engine::handover::{SourceAction, SourceEvent};
use longhaul_protocol::message::{ToDestination, ToSource};
use tokio::time::Instant;

impl Departure {
    /// Ends the attempt, where that is still this side's to decide, or worth asking for.
    pub(super) async fn fail(&mut self, error: ApiError) {
        if self.failure.is_some() {
            return;
        }
        tracing::warn!(migration = %self.task.offer.migration, %error, "giving up");
        let reason = arrival::short(&error.message);
        // What was released late is all at the destination: only it can go on.
        if self.state().may_abort() || (self.state().in_doubt() && self.terms().early) {
            self.failure = Some(error);
            self.step(SourceEvent::Abort(reason)).await;
        }
    }

    pub(super) async fn qemu_ended(&mut self) {
        self.task.outbound.forget_process();
        // A guest that was released is the destination's, if all of it is there.
        if self.state().is_settled() || self.announced.is_some() && !self.state().may_abort() {
            return;
        }
        let guest = &self.task.offer.guest.name;
        self.fail(failure::qemu_ended(guest, &self.task.outbound.last_words()))
            .await;
    }

    pub(super) async fn step(&mut self, event: SourceEvent) {
        feed_source(self, event).await;
        if self.state().is_over() {
            self.finished = true;
        }
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
                if let Err(error) = self.task.outbound.abort().await {
                    let error = error.into_api();
                    tracing::error!(%error, "the guest could not be resumed here");
                    self.failure = Some(error);
                }
            }
            SourceAction::Quit => {
                self.entry().enter(Phase::Finishing);
                self.collect_summary().await;
                self.task.outbound.quit().await;
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
