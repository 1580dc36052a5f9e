//! Runs the destination's side of the hand-over: feeds it what happens, does what it says.

use super::{Task, short};
use crate::agent::fail_point;
use crate::agent::migration::inbound::InboundError;
use crate::agent::migration::peer::attempt_state;
use longhaul_api::Phase;
use longhaul_engine::handover::{DestinationAction, DestinationEvent, Record, step_destination};
use longhaul_hypervisor::qmp::QmpError;
use longhaul_protocol::Generation;
use longhaul_protocol::message::{Summary, ToSource};
use longhaul_storage::{Holder, Right};
use std::time::Duration;
use tokio::task::block_in_place;

impl Task {
    /// Feeds the hand-over, and does what it says until it asks for nothing more.
    pub(super) async fn step(&mut self, event: DestinationEvent) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let attempt = self.offer.attempt;
            let (next, actions) = step_destination(&self.handover, &event, attempt);
            if next != self.handover {
                tracing::info!(migration = %self.offer.migration, state = ?next, "hand-over");
            }
            self.handover = next;
            self.arrival.set_state(&self.handover);
            for action in actions {
                events.extend(self.act(action).await);
            }
        }
    }

    async fn act(&mut self, action: DestinationAction) -> Option<DestinationEvent> {
        let attempt = self.offer.attempt;
        match action {
            DestinationAction::Write(record) => {
                return Some(
                    match block_in_place(|| fail_point::append(&mut self.journal, &record)) {
                        Ok(()) => {
                            if matches!(record, Record::Returned { .. }) {
                                self.give_back();
                            }
                            DestinationEvent::Written(record)
                        }
                        Err(error) => DestinationEvent::WriteFailed(error.to_string()),
                    },
                );
            }
            DestinationAction::SendReady => self.send(ToSource::Ready { attempt }).await,
            DestinationAction::Resume => return Some(self.resume_guest().await),
            DestinationAction::SendCommitted => {
                self.send(ToSource::Committed { attempt }).await;
                let summary = self.summary();
                self.send(ToSource::Summary(summary)).await;
                self.entry.enter(Phase::Finishing);
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
                let state = attempt_state(&self.handover);
                self.send(ToSource::Status { attempt, state }).await;
            }
        }
        None
    }

    async fn resume_guest(&mut self) -> DestinationEvent {
        let generation = Generation(self.offer.generation.0 + 1);
        let guest = self.offer.guest.name.clone();
        let right = Right {
            guest,
            generation,
            holder: Holder::Here,
        };
        // The journal has the commit; the file of rights is made again from it when this fails.
        if let Err(error) = block_in_place(|| self.context.rights.set(&right)) {
            tracing::error!(%error, "cannot note who may run the guest");
        }
        match self.inbound.resume(generation, self.offer.paused).await {
            Ok(()) => {
                self.commit_time = self.commit_at.map_or(Duration::ZERO, |at| at.elapsed());
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

    /// The guest is the source's again.
    fn give_back(&self) {
        let right = |generation, holder| Right {
            guest: self.offer.guest.name.clone(),
            generation,
            holder,
        };
        let host = self.entry.report().source;
        let held = self.offer.generation;
        let taken = right(Generation(held.0 + 1), Holder::Here);
        let back = right(held, Holder::Elsewhere { host });
        if let Err(error) = block_in_place(|| self.context.rights.give_back(&taken, &back)) {
            // It is made again from the journal.
            tracing::error!(%error, "cannot note who may run the guest");
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
        let reasons = self
            .journal
            .records()
            .iter()
            .rev()
            .find_map(|record| match record {
                Record::Aborted { reason, .. } | Record::Returned { reason, .. } => {
                    Some(reason.clone())
                }
                _ => None,
            });
        reasons.unwrap_or_else(|| "it was given up".to_owned())
    }
}
