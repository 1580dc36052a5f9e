//! Carries out the actions that the core of the source's end decides.

use crate::handover::attempt_record::{is_stale, of_attempt, stale};
use crate::handover::ledger::{SourceHandover, SourceOwner, claimed, tell_source};
use crate::host::arbiter::Answer;
use crate::source::attempt::{SUMMARY_WITHIN, SourceAttempt, Task};
use crate::source::connect::{Attempted, Dial, next_message};
use crate::source::verify::Comparison;
use crate::status::{failure, in_doubt};
use longhaul_api::{ApiError, Phase, Resolve};
use longhaul_attempt::source::{Action, Cause, Claimed, Event};
use longhaul_engine::handover::SourceState;
use longhaul_protocol::StoreId;
use longhaul_protocol::message::{ToDestination, ToSource};
use longhaul_protocol::wire::{VERSION_OF_FLOWS, VERSION_OF_HELD_FRAMES};
use tokio::time::Instant;

impl SourceAttempt {
    /// Gives up the attempt, unless it has failed before or the core has already given it up.
    pub(crate) async fn fail(&mut self, error: ApiError) {
        if self.failure.is_some() || self.task.handover.core.has_given_up() {
            return;
        }
        tracing::warn!(migration = %self.task.offer.migration, %error, "giving up");
        let reason = crate::channel::short(&error.message);
        self.failing = Some(error);
        self.tell(Event::GiveUp(reason)).await;
        self.failing = None;
    }

    /// Records why the attempt fails, unless a reason was recorded before.
    fn because(&mut self, cause: Cause) {
        let host = &self.task.host;
        let failing = self.failing.take();
        let failure = match cause {
            Cause::Peer(reason) => failure::peer_gave_up(host, &reason),
            Cause::LinkCut { silent, stopped } => failure::link_cut(host, silent, stopped),
            Cause::Protocol(what) => failure::protocol(host, &what),
            Cause::NotLaunched => self.not_launched(),
            Cause::NoArbiter => failure::no_arbiter("it is not reached from both hosts any more"),
            Cause::Dial(_) | Cause::Told(_) | Cause::Refused(_) | Cause::Restarted => {
                let internal = || failure::internal("the attempt was given up");
                failing.unwrap_or_else(internal)
            }
        };
        self.failure.get_or_insert(failure);
    }

    pub(crate) async fn qemu_ended(&mut self) {
        self.task.outbound.forget_process();
        // A guest that was released belongs to the destination, if the destination has all of it.
        if self.state().is_settled() || self.announced.is_some() && !self.state().may_abort() {
            return;
        }
        let guest = &self.task.offer.guest.name;
        self.fail(failure::qemu_ended(guest, &self.task.outbound.last_words()))
            .await;
    }

    /// Reports an event to the core, and carries out what it decides.
    pub(crate) async fn tell(&mut self, event: Event) {
        tell_source(self, event).await;
        if !self.state().in_doubt() && !self.is_disconnected() {
            self.entry().certain();
        }
    }

    /// Continues after the stop of the guest, while its pending blocks travel.
    pub(crate) async fn standing_still(&mut self) {
        let mut allowed = self.task.companions.stopped().await;
        if allowed.is_ok() && self.terms().early {
            allowed = self.task.companions.released().await;
        }
        if let Err(error) = allowed {
            return self.fail(error).await;
        }
        self.task.handover.look_for_arbiter();
        self.tell(Event::Stopped).await;
        self.announce().await;
    }

    /// Handles the decision of an operator.
    pub(crate) async fn resolved(&mut self, resolve: Option<Resolve>) {
        if *self.state() == SourceState::Done && self.task.handover.lost_for().is_none() {
            tracing::warn!(
                ?resolve,
                "the destination answers again: nothing is overruled"
            );
            return;
        }
        if let Some(resolve) = resolve {
            let because = in_doubt::because(&self.task.host, &resolve);
            self.failure.get_or_insert(failure::overruled(&because));
            self.tell(Event::Overrule(because)).await;
        }
    }

    /// Returns whether the copy here no longer fits the guest's disks.
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

impl SourceOwner for SourceAttempt {
    fn handover(&mut self) -> &mut SourceHandover {
        &mut self.task.handover
    }

    async fn act(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Dial {
                epoch,
                any_journals,
            } => {
                let attempted = Attempted::of(&self.task.handover.ledger, any_journals);
                let source = &self.task.source;
                let limit = self.limit_bps();
                self.dial = Some(Dial::begin(&source.context, attempted, epoch, limit));
            }
            Action::Hangup => self.hang_up(),
            Action::Send(message) => {
                let commits = matches!(
                    message,
                    ToDestination::Commit { .. } | ToDestination::CommitWithLease { .. }
                );
                if commits && let Some(lost) = self.send_flows() {
                    return Some(lost);
                }
                self.passes_on |= commits;
                self.note_arbiter(&message);
                return self.post(message).or_else(|| self.send_held());
            }
            Action::SendBlocks => return self.send_blocks(),
            Action::StopBlocks => {
                // Otherwise writes would wait for the destination while QEMU's migration is
                // aborted.
                self.acknowledging = None;
                self.task.sending.disconnect();
            }
            Action::Drain => self.drain_over_session(),
            Action::AskRelease => {
                self.entry().enter(Phase::HandingOver);
                let answer = self.task.companions.released().await;
                let answer = answer.map_err(|error| {
                    let reason = crate::channel::short(&error.message);
                    self.failing = Some(error);
                    reason
                });
                return Some(Event::MayRelease(answer));
            }
            Action::Resume => return Some(self.resume().await),
            Action::Quit => {
                self.entry().enter(Phase::Finishing);
                let lost = self.send_held();
                self.passes_on = false;
                self.collect_summary().await;
                self.forget_left_memory();
                self.departed = self.task.outbound.quit(&self.task.source).await;
                // What the guest needed stays as long as its QEMU does.
                if self.departed.is_none() {
                    self.task.companions.committed().await;
                }
                return lost;
            }
            Action::Because(cause) => self.because(cause),
            Action::ShowDoubt => self.show_doubt(),
            Action::Claim(store) => return Some(self.claim(store).await),
            Action::Finish => self.closed = true,
            // The ledger carries these out.
            Action::Write(_) | Action::Note(_) => {}
        }
        None
    }
}

impl SourceAttempt {
    /// Asks the arbiter for the guest, whose destination is gone.
    async fn claim(&mut self, store: StoreId) -> Event {
        if self.task.outbound.is_gone() {
            // Without its memory the guest cannot go on here.
            return Event::Claimed(Claimed::Unanswered);
        }
        let answer = self.task.handover.ledger.claim(store).await;
        let host = &self.task.host;
        self.entry().arbiter(&in_doubt::arbiter(host, &answer));
        if answer == Answer::Granted {
            let guest = &self.task.offer.guest.name;
            self.failure.get_or_insert(failure::by_arbiter(guest, host));
        }
        Event::Claimed(claimed(&answer))
    }

    /// Reports whether the guest is released to the arbiter.
    fn note_arbiter(&self, message: &ToDestination) {
        let (arbitrated, released) = match message {
            ToDestination::Commit { .. } => {
                (false, "not used: not reached when the guest was stopped")
            }
            ToDestination::CommitWithLease { .. } => (true, "the destination needed its lease"),
            _ => return,
        };
        if self.task.handover.core.arbiter().is_some() {
            self.entry().report_with(|report| {
                report.arbiter = Some(released.to_owned());
                report.arbitrated = arbitrated;
            });
        }
    }

    /// Begins to send blocks over a new bulk connection, after the messages that the destination
    /// needs before them.
    fn send_blocks(&mut self) -> Option<Event> {
        self.announced = None;
        let prelude = self.task.outbound.prelude().to_vec();
        let unanswered = self.comparing.as_ref().and_then(Comparison::unanswered);
        let verified = self.verified.then_some(ToDestination::Verified);
        let start = [ToDestination::Start { prelude }];
        for message in start.into_iter().chain(unanswered).chain(verified) {
            if let Some(lost) = self.post(message) {
                return Some(lost);
            }
        }
        if let Some(line) = self.line() {
            self.task.sending.connect(line);
            self.task.sending.wake();
        }
        None
    }

    /// Sends the guest's flows through gateways, which go on where they began.
    fn send_flows(&mut self) -> Option<Event> {
        let session = self.session.as_ref()?;
        if session.control.peer().version < VERSION_OF_FLOWS {
            return None;
        }
        let flows = self.task.companions.flows();
        flows
            .into_iter()
            .find_map(|flows| self.post(ToDestination::Flows(flows)))
    }

    /// Passes on what has come for the guest since it was stopped.
    pub(crate) fn send_held(&mut self) -> Option<Event> {
        let session = self.session.as_ref().filter(|_| self.passes_on)?;
        if session.control.peer().version < VERSION_OF_HELD_FRAMES {
            return None;
        }
        let held = self.task.companions.held();
        held.into_iter()
            .find_map(|frames| self.post(ToDestination::HeldFrames(frames)))
    }

    async fn resume(&mut self) -> Event {
        if self.is_stale() {
            let Task { source, offer, .. } = &self.task;
            let (guest, here) = (&offer.guest.name, &source.parts.config.name);
            let error = self.failure.take();
            let error = error.unwrap_or_else(|| failure::overruled("taken back"));
            self.failure = Some(error.state_of_guest(stale(guest, here)));
            source.sweeper.wake();
            self.forget_left_memory();
            return Event::Resumed;
        }
        let resumed = self.task.outbound.abort().await;
        self.forget_left_memory();
        let Task {
            companions,
            outbound,
            ..
        } = &mut self.task;
        if resumed.is_ok() && !outbound.is_gone() {
            companions.resumed(outbound.guest(), outbound.qmp()).await;
        }
        self.task.source.sweeper.wake();
        let Err(error) = resumed else {
            return Event::Resumed;
        };
        let error = error.into_api();
        tracing::error!(%error, "the guest could not be resumed here");
        let Task { source, offer, .. } = &self.task;
        let (guest, here) = (&offer.guest.name, &source.parts.config.name);
        let state =
            format!("{guest} may be stopped on {here}: resuming it is tried again every second");
        self.failure = Some(error.state_of_guest(state));
        // The next attempts to resume it open their own connection to QEMU.
        self.unresumed = true;
        Event::ResumeFailed
    }
}
