//! Carries out the decisions of the core at the destination.

use crate::destination::arriving_memory::MemoryNews;
use crate::destination::attempt::{DestinationAttempt, next_news};
use crate::destination::call::Call;
use crate::destination::fetch::{Begun, Fetch};
use crate::destination::page_server;
use crate::handover::attempt_record::abort_reason;
use crate::handover::ledger::{
    DestinationHandover, DestinationOwner, drive_destination, tell_destination,
};
use crate::status::in_doubt;
use longhaul_api::{ApiError, ErrorCode, Outcome, Phase, Resolve, Side};
use longhaul_attempt::destination::{Action, Event};
use longhaul_engine::handover::DestinationState;
use longhaul_hypervisor::manager::CommitError;
use longhaul_protocol::disk::Pulled;
use longhaul_protocol::message::{Summary, ToSource};
use longhaul_protocol::{BlockRange, Generation, RegionId};
use std::time::Duration;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::task::block_in_place;
use tokio::time::Instant;

/// How long QEMU may take to answer `cont` when the source is gone, whose memory it may wait for.
const ANSWER_WITHOUT_SOURCE: Duration = Duration::from_millis(200);

impl DestinationAttempt {
    /// Passes an event to the core, and carries out what the core decides.
    pub(crate) async fn tell(&mut self, event: Event) {
        let before = self.state().clone();
        tell_destination(self, event).await;
        self.stepped(&before);
    }

    /// Carries out what the core has decided.
    pub(crate) async fn drive(&mut self) {
        let before = self.state().clone();
        drive_destination(self).await;
        self.stepped(&before);
    }

    pub(crate) fn stepped(&mut self, before: &DestinationState) {
        if self.state() != before {
            self.pace.stepped(Instant::now());
        }
        self.arrival.set_state(self.handover.state());
        if self.state().is_settled() {
            self.entry.certain();
        }
    }

    pub(crate) fn state(&self) -> &DestinationState {
        self.handover.state()
    }

    /// Waits for what companions do beside the guest.
    async fn running(&mut self) {
        if let Some(running) = self.running.take()
            && let Err(error) = running.await
        {
            tracing::error!(%error, "a companion broke");
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

    /// Continues by fetching the missing blocks.
    pub(crate) async fn fetch(mut self) {
        if self.memory.is_none() {
            self.disconnect_bulk();
        }
        let Self {
            context,
            entry,
            handover,
            call,
            called,
            arrival,
            present,
            reservation,
            clock,
            rate,
            running,
            inbound,
            companions,
            admission,
            memory,
            bulk,
            ..
        } = self;
        // The guest's memory has arrived, or what serves QEMU holds its monitor until it has. It
        // must be free for the removal of the disk exports.
        drop(admission);
        let meter = Some(inbound.into_meter());
        let begun = Begun {
            entry: Some(entry),
            handover,
            reservation: Some(reservation),
            arrival,
            called,
            present,
            call,
            bulk,
            memory,
            clock,
            rate,
            meter,
            running,
            companions,
        };
        Fetch::new(context, begun).run().await;
    }

    fn disconnect_bulk(&mut self) {
        if let Some(bulk) = self.bulk.take() {
            bulk.abort();
        }
    }

    /// Ends the task: reports the outcome, removes unused images, and tells the source when both
    /// journals are complete.
    pub(crate) async fn end(mut self) {
        if !self.state().owns_guest() {
            // What has arrived may still be written, and what is on a volume is noted next.
            let receiving = self.inbound.receiving();
            block_in_place(|| receiving.seal());
            self.companions.aborted().await;
        }
        let (state, guest) = (&self.context.parts.config.state, &self.offer.guest.name);
        if self.inbound.follows() != Pulled::Nothing {
            page_server::forget(state, guest, self.offer.migration).await;
            self.inbound.end_page_server().await;
        }
        self.running().await;
        self.tell_clock().await;
        self.rate.report_at_end(&self.entry, &mut self.call);
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
            mut companions,
            inbound,
            admission,
            rate,
            finished: closed,
            ..
        } = self;
        // The guest's monitor is free from here on.
        drop((inbound, admission));
        if handover.state().owns_guest() {
            entry.end(Outcome::Completed, None);
        } else {
            let state = format!("{} stays at {}", offer.guest.name, entry.report().source);
            let error = ApiError::new(ErrorCode::Internal, reason).state_of_guest(state);
            entry.end(Outcome::Aborted, Some(error));
        }
        context.archive.keep(&entry);
        if handover.state().owns_guest() {
            companions.finished();
        }
        if closed {
            context.closed.add(arrival.source, handover.ledger);
        }
        // From here on the guest's name is free for the next request.
        drop(present);
        drop(reservation);
        if let Some(call) = &mut call
            && closed
            && let Err(error) = call.sender.send(&ToSource::Closed)
        {
            tracing::debug!(%error, "the source did not wait");
        }
        rate.part(context, Some(entry), call);
    }

    /// Carries out an operator's decision.
    pub(crate) async fn resolved(&mut self, resolve: Option<Resolve>) {
        let Some(resolve) = resolve else { return };
        let because = in_doubt::because(&self.handover.ledger.host, &resolve);
        match resolve.run_on {
            Side::Destination => self.tell(Event::Overrule(because)).await,
            Side::Source => self.abort(because).await,
        }
    }

    /// Makes the guest this host's, and resumes it. QEMU may need memory for that which has yet to
    /// come: what it asks for is passed on meanwhile.
    async fn commit(&mut self, generation: Generation) -> Result<(), CommitError> {
        let Self {
            inbound,
            memory,
            call,
            offer,
            ..
        } = self;
        let commit = inbound.commit(generation, offer.paused);
        tokio::pin!(commit);
        let control = call.as_ref().map(|call| call.control.clone());
        let control = control.filter(|_| memory.is_some());
        let gone = async {
            match control {
                Some(control) => control.closed().await,
                None => std::future::pending().await,
            };
            tokio::time::sleep(ANSWER_WITHOUT_SOURCE).await;
        };
        tokio::pin!(gone);
        loop {
            let news = tokio::select! {
                done = &mut commit => return done,
                () = &mut gone => {
                    let why = "the source is gone, and QEMU may wait for its memory".to_owned();
                    return Err(CommitError::Unknown(why));
                }
                news = next_news(memory) => news,
            };
            if let MemoryNews::Want(region, range) = news {
                pass_on(call, region, range);
            }
        }
    }

    /// Returns why nothing serves the memory that follows, if so. Passes on what QEMU asks for.
    fn is_stuck(&mut self) -> Option<String> {
        let Self { memory, call, .. } = self;
        let following = memory.as_mut()?;
        loop {
            match following.news.try_recv() {
                Ok(MemoryNews::Want(region, range)) => pass_on(call, region, range),
                Ok(MemoryNews::Whole) => {}
                Ok(MemoryNews::Gone(why)) => return Some(why),
                Err(TryRecvError::Empty) => return None,
                Err(TryRecvError::Disconnected) => {
                    let stuck = !following.memory.is_whole();
                    return stuck.then(|| "its page server has ended".to_owned());
                }
            }
        }
    }

    async fn resume_guest(&mut self) -> Event {
        // QEMU would wait for a page that does not come, and answer no command any more.
        if let Some(why) = self.is_stuck() {
            return Event::ResumeFailed(crate::channel::short(&why));
        }
        let generation = self.handover.ledger.terms.next();
        self.companions.committed().await;
        match self.commit(generation).await {
            Ok(()) => {
                self.commit_time = self.commit_at.map_or(Duration::ZERO, |at| at.elapsed());
                self.runs();
                Event::Resumed
            }
            // QEMU refused `cont`, so the guest has never run here.
            Err(CommitError::Refused(why)) => Event::ResumeFailed(crate::channel::short(&why)),
            // The guest may have run before QEMU stopped answering, so it counts as running here.
            Err(error @ CommitError::Unknown(_)) => {
                tracing::error!(guest = self.offer.guest.name, %error, "told to run, no answer");
                self.runs();
                Event::Resumed
            }
        }
    }

    /// Begins what a running guest needs, and lets go of its monitor.
    fn runs(&mut self) {
        if !self.offer.paused {
            self.clock = Some(self.inbound.set_clock());
            self.rate = self.inbound.measure_rate();
        }
        self.running = Some(self.companions.running());
    }

    fn summary(&self) -> Summary {
        let usage = self.inbound.usage();
        let mut summary = Summary {
            load_us: self.load_time.as_micros() as u64,
            commit_us: self.commit_time.as_micros() as u64,
            agent_cpu_us: usage.agent_cpu.as_micros() as u64,
            qemu_cpu_us: usage.qemu_cpu.as_micros() as u64,
            agent_peak_bytes: usage.agent_peak_bytes,
            repository_bytes: 0,
        };
        self.companions.report(&mut summary);
        summary
    }

    pub(crate) fn abort_reason(&self) -> String {
        abort_reason(self.handover.ledger.journal.records())
    }
}

impl DestinationOwner for DestinationAttempt {
    fn handover(&mut self) -> &mut DestinationHandover {
        &mut self.handover
    }

    async fn act(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Take => {
                self.disconnect();
                self.call = self.caller.take();
                None
            }
            Action::Accept(epoch) => Some(Event::Accepted(self.reconnect(epoch).await)),
            Action::Decline => {
                let attempt = self.offer.attempt;
                let state = self.handover.core.attempt_state();
                if let Some(mut call) = self.caller.take()
                    && let Err(error) = call.sender.send(&ToSource::Status { attempt, state })
                {
                    tracing::debug!(%error, "a source that came too late went again");
                }
                None
            }
            Action::Hangup => {
                self.disconnect();
                None
            }
            Action::Send(message) => {
                let committed = matches!(message, ToSource::Committed { .. });
                let lost = self.post(message);
                if !committed {
                    return lost;
                }
                let summary = self.summary();
                self.entry.enter(Phase::Finishing);
                let also_lost = self.post(ToSource::Summary(summary));
                lost.or(also_lost)
            }
            Action::SendAccepted => {
                let machine = Box::new(self.inbound.machine().clone());
                self.post(ToSource::Accepted { machine })
            }
            Action::Load => match self.load() {
                Ok(()) => self.say_loading(),
                Err(why) => Some(Event::GiveUp(why)),
            },
            Action::AskReady => {
                self.entry.enter(Phase::HandingOver);
                let answer = self.companions.released().await;
                Some(Event::MayBeReady(
                    answer.map_err(|why| crate::channel::short(&why)),
                ))
            }
            Action::Resume => Some(self.resume_guest().await),
            Action::Quit => {
                self.inbound.quit().await;
                // Before the record that nothing remains: a later agent that reads the record does
                // not look for it.
                self.companions.ended().await;
                Some(Event::QemuGone)
            }
            Action::Fetch => {
                self.fetches = true;
                None
            }
            Action::ShowDoubt => {
                self.show_doubt();
                None
            }
            Action::Finish => {
                self.finished = true;
                None
            }
            // The first two concern an owner that fetches. The ledger carries out the others.
            Action::SendMissing
            | Action::FillMissing
            | Action::CheckArbiter(_)
            | Action::Claim(_)
            | Action::Write(_)
            | Action::Note(_) => None,
        }
    }
}

/// Asks the source for what QEMU waits for. The task that fetches memory asks again.
fn pass_on(call: &mut Option<Call>, region: RegionId, range: BlockRange) {
    let Some(call) = call else { return };
    let ranges = vec![range];
    if let Err(error) = call.sender.send(&ToSource::Want { region, ranges }) {
        tracing::info!(%error, "the source is gone");
    }
}
