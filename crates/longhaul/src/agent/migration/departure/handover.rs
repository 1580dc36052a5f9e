//! Runs the source's side of the hand-over: feeds it what happens, does what it says.

use super::{Departure, SUMMARY_WITHIN, next_message};
use crate::agent::fail_point;
use crate::agent::migration::{arrival, failure};
use longhaul_api::{ApiError, Phase};
use longhaul_engine::handover::{SourceAction, SourceEvent, SourceState, step_source};
use longhaul_protocol::Generation;
use longhaul_protocol::message::{ToDestination, ToSource};
use longhaul_storage::{Holder, Right};
use tokio::task::block_in_place;
use tokio::time::Instant;

impl Departure {
    /// Ends the attempt, where that is still this side's to decide.
    pub(super) async fn fail(&mut self, error: ApiError) {
        if self.failure.is_none() {
            tracing::warn!(migration = %self.task.offer.migration, %error, "giving up");
            let reason = error.message.clone();
            if matches!(
                self.handover,
                SourceState::Here { .. } | SourceState::Releasing
            ) {
                self.failure = Some(error);
            }
            self.step(SourceEvent::Abort(arrival::short(&reason))).await;
        }
    }

    pub(super) async fn qemu_ended(&mut self) {
        self.task.outbound.forget_process();
        if self.handover.is_over() {
            return;
        }
        let guest = &self.task.offer.guest.name;
        self.fail(failure::qemu_ended(guest, &self.task.outbound.last_words()))
            .await;
    }

    pub(super) async fn step(&mut self, event: SourceEvent) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let attempt = self.task.offer.attempt;
            let next = Generation(self.task.offer.generation.0 + 1);
            let (state, actions) = step_source(&self.handover, &event, attempt, next);
            if state != self.handover {
                tracing::info!(migration = %self.task.offer.migration, ?state, "hand-over");
            }
            self.handover = state;
            for action in actions {
                events.extend(self.act(action).await);
            }
        }
        if self.handover.is_over() {
            self.finished = true;
        }
    }

    async fn act(&mut self, action: SourceAction) -> Option<SourceEvent> {
        let attempt = self.task.offer.attempt;
        match action {
            SourceAction::Write(record) => {
                return Some(
                    match block_in_place(|| fail_point::append(&mut self.task.journal, &record)) {
                        Ok(()) => SourceEvent::Written(record),
                        Err(error) => SourceEvent::WriteFailed(error.to_string()),
                    },
                );
            }
            SourceAction::Fence(generation) => {
                self.set_right(
                    generation,
                    Holder::InDoubt {
                        host: self.task.host.clone(),
                    },
                );
            }
            SourceAction::Unfence => self.give_back(),
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
            SourceAction::SendDone => self.send(ToDestination::Done).await,
            // A new session begins with the question.
            SourceAction::Ask => {}
            SourceAction::Resume => {
                if let Err(error) = self.task.outbound.abort().await {
                    let error = error.into_api();
                    tracing::error!(%error, "the guest could not be resumed here");
                    self.failure = Some(error);
                }
            }
            SourceAction::Quit => {
                self.entry().enter(Phase::Finishing);
                let next = Generation(self.task.offer.generation.0 + 1);
                self.set_right(
                    next,
                    Holder::Elsewhere {
                        host: self.task.host.clone(),
                    },
                );
                self.collect_summary().await;
                self.task.outbound.quit().await;
            }
        }
        None
    }

    fn set_right(&self, generation: Generation, holder: Holder) {
        let guest = self.task.offer.guest.name.clone();
        let right = Right {
            guest,
            generation,
            holder,
        };
        if let Err(error) = block_in_place(|| self.task.context.rights.set(&right)) {
            // The journal says it too, and is read first.
            tracing::error!(%error, "cannot note who may run the guest");
        }
    }

    /// The guest is this host's again, in the generation that it had.
    fn give_back(&self) {
        let right = |generation, holder| Right {
            guest: self.task.offer.guest.name.clone(),
            generation,
            holder,
        };
        let host = self.task.host.clone();
        let held = self.task.offer.generation;
        let fenced = right(Generation(held.0 + 1), Holder::InDoubt { host });
        let given = || {
            let rights = &self.task.context.rights;
            rights.give_back(&fenced, &right(held, Holder::Here))
        };
        if let Err(error) = block_in_place(given) {
            // The journal says it too, and is read first.
            tracing::error!(%error, "cannot note who may run the guest");
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
