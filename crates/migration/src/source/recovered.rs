//! The source's side of an attempt whose task is gone: after a restart of the agent, or once the
//! guest's place is decided and the destination has yet to hear of it.
//!
//! It asks and tells the destination until both journals are at their ends. It sends no blocks to a
//! destination that has yet to say READY, which is told to give up; what is left of the disks of a
//! guest that runs there already it sends, from their images.

use crate::context::{Context, Holder};
use crate::disks::exports;
use crate::handover::attempt_record::{Left, is_stale, of_attempt, stale};
use crate::handover::ledger::{
    SourceHandover, SourceOwner, begin_source, feed_source, retry_source,
};
use crate::host::hooks::Step;
use crate::source::acks::Acknowledging;
use crate::source::connect::{self, Conversation, Session, SessionError};
use crate::source::drain::{self, Draining};
use crate::source::sender::SendError;
use crate::status::migration::Entry;
use crate::status::registry::{Reservation, Taken};
use crate::status::{failure, in_doubt};
use longhaul_api::{ApiError, ErrorCode, HandoverRecord, Outcome, Phase, Resolve, Side};
use longhaul_engine::handover::{SourceAction, SourceEvent, SourceState};
use longhaul_hypervisor::guest::Guest;
use longhaul_hypervisor::memory;
use longhaul_protocol::message::{AttemptState, ToDestination, ToSource};
use longhaul_protocol::{Epoch, MigrationId};
use longhaul_storage::Journal;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::task::{JoinHandle, block_in_place};
use tokio::time::{Instant, sleep, timeout};

/// Between two tries to reach the other host, at first.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// ... and when it has been gone for long and nobody waits for the answer.
const ASK_EVERY_MAX: Duration = Duration::from_secs(30);
/// Between two tries to resume a guest.
const RESUME_EVERY: Duration = Duration::from_secs(1);
/// A destination that says nothing for so long is asked again.
const ANSWER_WITHIN: Duration = Duration::from_secs(20);
/// A destination that cannot be asked for so long is shown as lost.
const LOST_AFTER: Duration = Duration::from_secs(3);
/// How often it is looked whether something of the disks could not be read.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// The source's side without its task.
pub(crate) struct Settling {
    handover: SourceHandover,
    paused: bool,
    entry: Option<Arc<Entry>>,
    reservation: Option<Reservation>,
    conversation: Option<Conversation>,
    /// The destination has closed its journal too.
    closed: bool,
    reason: Option<ApiError>,
    resolutions: Option<watch::Receiver<Option<Resolve>>>,
    /// It has ended, and the hook for that has yet to run.
    ended: Option<Arc<Entry>>,
    /// What is left here of the guest's disks, once it runs at the destination.
    left: Option<LeftHere>,
    /// Whether something of them may be left then.
    leaves: bool,
    /// Since when the destination cannot be asked.
    lost_at: Option<Instant>,
    /// Why what is left cannot be sent from here.
    trouble: Option<String>,
}

/// What sends the rest of a guest's disks.
struct LeftHere {
    draining: Draining,
    worker: JoinHandle<SendError>,
    epoch: Epoch,
}

impl Drop for LeftHere {
    fn drop(&mut self) {
        self.worker.abort();
    }
}

impl SourceOwner for Settling {
    fn handover(&mut self) -> &mut SourceHandover {
        &mut self.handover
    }

    async fn act(&mut self, action: SourceAction) {
        let attempt = self.handover.ledger.terms.attempt;
        match action {
            SourceAction::SendCommit(generation) => {
                self.send(ToDestination::Commit {
                    attempt,
                    generation,
                })
                .await;
            }
            SourceAction::SendCancel(reason) => self.send(ToDestination::Cancel { reason }).await,
            SourceAction::SendOverruled(generation) => {
                self.send(ToDestination::Overruled { generation }).await;
            }
            SourceAction::SendDone => self.send(ToDestination::Done).await,
            SourceAction::Resume => self.resume().await,
            SourceAction::Quit => {
                let ledger = &self.handover.ledger;
                if let Err(error) =
                    crate::host::qemu::remove(&ledger.context.parts.config.state, &ledger.guest)
                        .await
                {
                    tracing::error!(guest = ledger.guest, %error, "something is left over");
                }
                let state = &ledger.context.parts.config.state;
                exports::ended(state, &ledger.guest, true).await;
            }
            // Every conversation begins with the question; the rest is the ledger's.
            SourceAction::Ask
            | SourceAction::Write(_)
            | SourceAction::Fence(_)
            | SourceAction::Cede(_)
            | SourceAction::Concede(_)
            | SourceAction::Unfence(_) => {}
        }
    }
}

impl Settling {
    /// Takes up what an earlier agent left: what has to be done here is done when this returns.
    pub(crate) async fn take_up(context: &Arc<Context>, left: Left) -> Self {
        let records = left.records();
        let (state, actions) = SourceState::restore(&records, &left.terms);
        let entry = (!state.is_over()).then(|| left.entry(context, phase(&state)));
        let reservation = entry.as_ref().and_then(|entry| {
            let taken = Taken::Moving(left.migration, Side::Source);
            let reservation = context.registry.take(&left.guest, taken);
            reservation
                .inspect_err(|error| tracing::error!(migration = %entry.id(), %error, "not kept"))
                .ok()
        });
        let leaves = leaves(context, &left.guest, left.migration);
        let mut settling = Self {
            paused: left.paused,
            handover: SourceHandover {
                state,
                ledger: left.into_ledger(context),
            },
            resolutions: entry.as_ref().map(|entry| entry.resolutions()),
            entry,
            reservation,
            conversation: None,
            closed: false,
            reason: None,
            ended: None,
            left: None,
            leaves,
            lost_at: None,
            trouble: None,
        };
        begin_source(&mut settling, actions).await;
        settling.show();
        settling
    }

    /// Takes up an attempt whose guest has gone on since by a person's word: the destination has
    /// yet to hear of that, and the guest is left alone.
    pub(crate) async fn pass_on(context: &Arc<Context>, left: Left) -> Self {
        let (state, mut actions) = SourceState::restore(&left.records(), &left.terms);
        actions.retain(|action| !action.lets_go_on());
        let paused = left.paused;
        let ledger = left.into_ledger(context);
        let mut settling = Self::hand_on(SourceHandover { state, ledger }, paused, None);
        begin_source(&mut settling, actions).await;
        settling
    }

    /// Goes on with what a task has brought to its end, for the destination to hear of it.
    pub(crate) fn hand_on(
        handover: SourceHandover,
        paused: bool,
        reservation: Option<Reservation>,
    ) -> Self {
        let ledger = &handover.ledger;
        let leaves = leaves(&ledger.context, &ledger.guest, ledger.migration);
        Self {
            handover,
            paused,
            leaves,
            lost_at: None,
            trouble: None,
            entry: None,
            reservation,
            conversation: None,
            closed: false,
            reason: None,
            resolutions: None,
            ended: None,
            left: None,
        }
    }

    /// The same for an attempt that never got a task. The guest cannot begin another one before the
    /// journal of this one is closed: read by a later agent, it would have the guest resumed.
    pub(crate) async fn given_up(
        context: &Arc<Context>,
        journal: Journal,
        entry: &Entry,
        reservation: Reservation,
    ) {
        let Ok(left) = Left::of(entry.id(), journal) else {
            return;
        };
        let (state, actions) = SourceState::restore(&left.records(), &left.terms);
        let paused = left.paused;
        let ledger = left.into_ledger(context);
        let handover = SourceHandover { state, ledger };
        let mut settling = Self::hand_on(handover, paused, Some(reservation));
        begin_source(&mut settling, actions).await;
        settling.free_if_over();
        settling.go_on();
    }

    /// Goes on in a task of its own.
    pub(crate) fn go_on(self) {
        crate::host::task::spawn(self.run());
    }

    async fn run(mut self) {
        let mut pause = ASK_EVERY;
        while !self.closed {
            self.settle_here().await;
            self.last_hook().await;
            match self.meet().await {
                Ok(()) => pause = ASK_EVERY,
                Err(error) => {
                    let guest = &self.handover.ledger.guest;
                    let trouble = match &error {
                        SessionError::Left(_) => Some(error.to_string()),
                        _ => None,
                    };
                    match &trouble {
                        Some(why) if self.trouble != trouble => tracing::error!(guest, "{why}"),
                        _ => tracing::debug!(guest, %error, "the other host cannot be asked"),
                    }
                    if trouble.is_none() {
                        self.lost_at.get_or_insert_with(Instant::now);
                    }
                    self.trouble = trouble;
                    if let Some(entry) = &self.entry {
                        entry.silent(&error.to_string());
                    }
                    if self.handover.state.is_over() && error.is_final() {
                        return;
                    }
                }
            }
            retry_source(&mut self).await;
            self.free_if_over();
            self.show();
            if self.closed {
                break;
            }
            let asked = self.resolution(pause).await;
            if let Some(because) = asked {
                self.reason.get_or_insert(failure::overruled(&because));
                feed_source(&mut self, SourceEvent::Overrule(because)).await;
                self.show();
            }
            // A guest in doubt has somebody waiting for it, and one of whose disks something is
            // left may wait itself.
            if !self.handover.state.in_doubt() && !self.is_needed() {
                pause = (pause * 2).min(ASK_EVERY_MAX);
            }
        }
        self.last_hook().await;
        self.handover.ledger.remove_journal();
    }

    /// Resumes the guest that stays here, and closes the journal, before anything else: neither
    /// needs the destination.
    async fn settle_here(&mut self) {
        while self.handover.ledger.unresumed {
            retry_source(self).await;
            self.show();
            if self.handover.ledger.unresumed {
                sleep(RESUME_EVERY).await;
            }
        }
        self.free_if_over();
    }

    /// Frees the guest's name once the journal says that nothing more is done for it here.
    fn free_if_over(&mut self) {
        if self.entry.is_none() && self.ended.is_none() && self.handover.state.is_over() {
            self.reservation = None;
        }
    }

    /// Runs the hook of how it has ended, once.
    async fn last_hook(&mut self) {
        let Some(entry) = self.ended.take() else {
            return;
        };
        let ledger = &self.handover.ledger;
        let step = match self.handover.state {
            SourceState::Closed { here: false } => Step::Gone,
            _ => Step::Stays,
        };
        let next = ledger.terms.next();
        ledger.context.last_hook(&entry, step, next).await;
        ledger.context.archive.keep(&entry);
        self.reservation = None;
    }

    /// Waits, unless a person decides meanwhile.
    async fn resolution(&mut self, pause: Duration) -> Option<String> {
        let host = &self.handover.ledger.host;
        let Some(resolutions) = &mut self.resolutions else {
            sleep(pause).await;
            return None;
        };
        match timeout(pause, resolutions.changed()).await {
            Ok(Ok(())) => {
                let resolve = resolutions.borrow_and_update();
                resolve
                    .as_ref()
                    .map(|resolve| in_doubt::because(host, resolve))
            }
            Ok(Err(_)) => {
                sleep(pause).await;
                None
            }
            Err(_) => None,
        }
    }

    /// Talks with the destination until there is nothing to say.
    async fn meet(&mut self) -> Result<(), SessionError> {
        let ledger = &self.handover.ledger;
        let attempted = connect::Attempted::of(ledger, &self.handover.state);
        let conversation = connect::ask(&ledger.context, &attempted).await?;
        self.conversation = Some(conversation);
        self.lost_at = None;
        if self.handover.state == SourceState::Done
            && let Some(resolutions) = &mut self.resolutions
        {
            // Said of a destination that did not answer.
            resolutions.mark_unchanged();
        }
        feed_source(self, SourceEvent::Connected).await;
        while let Some(conversation) = &mut self.conversation {
            let message = conversation.receiver.recv_within(ANSWER_WITHIN).await;
            let message = match message {
                Ok(message) => message,
                Err(error) => {
                    self.conversation = None;
                    return Err(error.into());
                }
            };
            self.heard(message).await;
            if self.closed {
                self.conversation = None;
            }
            self.show();
            self.last_hook().await;
            if self.look_for_left().await? {
                self.conversation = None;
                return self.drain(attempted).await;
            }
        }
        Ok(())
    }

    /// Whether the guest may need what is left here, where it runs.
    fn is_needed(&self) -> bool {
        self.leaves && self.handover.state == SourceState::Done
    }

    /// Whether something of the disks of a guest that runs at the destination may be left here.
    async fn look_for_left(&mut self) -> Result<bool, SessionError> {
        if self.handover.state != SourceState::Done {
            return Ok(false);
        }
        if !self.leaves {
            return Ok(false);
        }
        if self.left.is_none() {
            let ledger = &self.handover.ledger;
            let (state, guest) = (&ledger.context.parts.config.state, &ledger.guest);
            let left = block_in_place(|| drain::left(state, guest, ledger.migration))?;
            let Some(draining) = left else {
                return Ok(false);
            };
            let answering = exports::keep_answering(state, guest).await;
            answering.map_err(|error| SessionError::Left(io::Error::other(error)))?;
            self.left = Some(LeftHere {
                worker: tokio::spawn(draining.sending().clone().work()),
                draining,
                epoch: first_epoch(),
            });
        }
        Ok(true)
    }

    /// Sends what is left as the destination asks for it, until the connection ends.
    async fn drain(&mut self, attempted: connect::Attempted) -> Result<(), SessionError> {
        let context = self.handover.ledger.context.clone();
        let Some(left) = &mut self.left else {
            return Ok(());
        };
        if left.worker.is_finished() {
            left.worker = tokio::spawn(left.draining.sending().clone().work());
        }
        left.epoch = Epoch(left.epoch.0.saturating_add(1));
        let resumed = connect::try_resume(&context, &attempted, left.epoch, None).await;
        let Session {
            control: _control,
            sender,
            receiver,
            line,
        } = resumed?.0;
        let line = line.ok_or(SessionError::Protocol("blocks need a connection"))?;
        let sending = left.draining.sending().clone();
        left.draining.connected(line.clone());
        let mut acknowledging = Acknowledging::begin(sending.clone(), line);
        self.conversation = Some(Conversation { sender, receiver });
        self.trouble = None;
        let done = self.send_left(&mut acknowledging).await;
        sending.disconnect();
        self.conversation = None;
        done
    }

    async fn send_left(&mut self, acknowledging: &mut Acknowledging) -> Result<(), SessionError> {
        while let Some(conversation) = &mut self.conversation {
            let message = tokio::select! {
                message = conversation.receiver.recv() => Some(message?),
                error = acknowledging.ended() => {
                    tracing::info!(%error, "what is left cannot be sent now");
                    return Ok(());
                }
                message = next_of_rest(&mut self.left) => {
                    self.report_rest();
                    self.send(message).await;
                    None
                }
                () = sleep(LOOK_EVERY) => None,
            };
            if let Some(message) = message {
                let about_left = match &mut self.left {
                    Some(left) => left.draining.hear(&message),
                    None => Ok(false),
                };
                match about_left {
                    Ok(true) => {}
                    Ok(false) => self.heard(message).await,
                    Err(error) => {
                        tracing::error!(%error, "what the destination lacks makes no sense");
                        return Err(SessionError::Protocol("it lacks what is not left"));
                    }
                }
            }
            let unreadable = self.left.as_mut().map(|left| left.draining.unreadable());
            for message in unreadable.unwrap_or_default() {
                self.send(message).await;
            }
            if self.closed {
                self.conversation = None;
            }
            self.show();
            self.last_hook().await;
        }
        Ok(())
    }

    /// Reports what was found in what has come.
    fn report_rest(&self) {
        if let (Some(entry), Some(left)) = (&self.entry, &self.left) {
            entry.report_with(|report| left.draining.report(report));
        }
    }

    async fn heard(&mut self, message: ToSource) {
        if let Some(entry) = &self.entry {
            let record = match &message {
                ToSource::Status { state, .. } => Some(in_doubt::record_of(*state)),
                ToSource::Ready { .. } => Some(HandoverRecord::Ready),
                _ => None,
            };
            entry.heard(record);
        }
        match message {
            ToSource::Ready { attempt } => {
                feed_source(self, SourceEvent::Ready(attempt)).await;
            }
            ToSource::Committed { attempt } => {
                feed_source(self, SourceEvent::Committed(attempt)).await;
            }
            ToSource::AllPresent { attempt } => {
                feed_source(self, SourceEvent::Committed(attempt)).await;
                feed_source(self, SourceEvent::AllPresent(attempt)).await;
            }
            ToSource::Aborted { attempt, reason } => {
                let host = &self.handover.ledger.host;
                let error = failure::peer_gave_up(host, &reason);
                self.reason.get_or_insert(error);
                feed_source(self, SourceEvent::PeerAborted(attempt)).await;
            }
            ToSource::Status {
                state: AttemptState::Receiving | AttemptState::Loading,
                ..
            } if self.handover.state.in_doubt() => {
                // It waits for blocks, which nobody can send any more.
                let reason = "the source's agent was restarted".to_owned();
                feed_source(self, SourceEvent::Abort(reason)).await;
            }
            ToSource::Closed => self.closed = self.handover.state.is_over(),
            ToSource::Status { .. }
            | ToSource::Summary(_)
            | ToSource::Missing(_)
            | ToSource::Want { .. }
            | ToSource::Superseded { .. }
            | ToSource::Clock(_)
            | ToSource::Loaded
            | ToSource::Digests { .. }
            | ToSource::Resumed { .. }
            | ToSource::Answer(_)
            | ToSource::WantContent { .. }
            | ToSource::Launching { .. }
            | ToSource::Accepted { .. }
            | ToSource::Refused(_) => {}
        }
    }

    async fn send(&mut self, message: ToDestination) {
        if let Some(conversation) = &mut self.conversation
            && let Err(error) = conversation.sender.send(&message).await
        {
            tracing::debug!(%error, "the destination went");
            self.conversation = None;
        }
    }

    /// Lets the guest go on here, if it still is.
    async fn resume(&mut self) {
        // Nothing of its disks is sent any more.
        self.left = None;
        let ledger = &self.handover.ledger;
        let here = &ledger.context.parts.config.name;
        let guest = &ledger.guest;
        let records = of_attempt(&ledger.journal, ledger.terms);
        let (resumed, state) =
            match crate::host::qemu::find(&ledger.context.parts.config.state, guest) {
                Ok(Some(found)) if is_stale(&records, found.description()) => {
                    ledger.context.keep_sweeping_fronts();
                    (true, stale(guest, here))
                }
                Ok(Some(found)) => match resume(&found, !self.paused, &ledger.context).await {
                    Ok(()) if self.paused => (true, format!("{guest} is paused on {here}")),
                    Ok(()) => (true, format!("{guest} runs on {here}")),
                    Err(error) => (
                        false,
                        format!(
                            "{guest} could not be resumed on {here}, which is tried again: {error}"
                        ),
                    ),
                },
                Ok(None) => (true, format!("{guest} does not run on {here}")),
                Err(error) => (
                    false,
                    format!("cannot determine whether {guest} runs on {here}: {error}"),
                ),
            };
        tracing::info!(guest, "{state}");
        let reason = "the source's agent was restarted";
        let error = self
            .reason
            .take()
            .unwrap_or_else(|| ApiError::new(ErrorCode::Internal, reason));
        self.reason = Some(error.state_of_guest(state));
        self.handover.ledger.unresumed = !resumed;
    }

    /// Tells people how it stands.
    fn show(&mut self) {
        let Some(entry) = &self.entry else { return };
        let state = &self.handover.state;
        let ledger = &self.handover.ledger;
        if state.in_doubt() {
            entry.in_doubt(HandoverRecord::Released, ledger.terms.next());
            if entry.outcome().is_none() {
                let doubt = Holder::InDoubt(ledger.host.clone());
                entry.end(
                    Outcome::InDoubt,
                    Some(failure::not_here(&ledger.guest, &doubt)),
                );
            }
            return;
        }
        let lost = self.lost_at.is_some_and(|at| at.elapsed() > LOST_AFTER);
        match (*state == SourceState::Done, lost) {
            // An operator who knows that it never comes back may take the guest back.
            (true, true) => entry.in_doubt(HandoverRecord::Done, ledger.terms.next()),
            (true, false) | (false, _) => entry.certain(),
        }
        let there = matches!(
            state,
            SourceState::Done | SourceState::Retiring | SourceState::Closed { here: false }
        );
        if *state == SourceState::Overruled {
            // The destination may never hear of it.
            entry.end(Outcome::Failed, self.reason.take());
            ledger.context.archive.keep(entry);
            self.ended = self.entry.take();
            return;
        }
        if self.is_needed() {
            if entry.phase() != Phase::Finishing {
                entry.enter(Phase::Finishing);
            }
            entry.goes_on();
            let left = self.left.as_ref();
            let regions = left.map_or_else(Vec::new, |left| left.draining.progress());
            let found = || left.and_then(|left| left.draining.trouble());
            let trouble = self.trouble.clone().or_else(found);
            let silent = self.lost_at.map(|at| at.elapsed().as_millis() as u64);
            entry.progress(|progress| {
                progress.regions = regions;
                progress.trouble = trouble;
                progress.link.interrupted_ms = silent;
            });
            return;
        }
        if there && entry.outcome() != Some(Outcome::Completed) {
            entry.end(Outcome::Completed, None);
        }
        if state.is_over() {
            if !there {
                entry.end(Outcome::Failed, self.reason.take());
            }
            ledger.context.archive.keep(entry);
            self.ended = self.entry.take();
        }
    }
}

/// Waits for what is to be said of what has come.
async fn next_of_rest(left: &mut Option<LeftHere>) -> ToDestination {
    match left {
        Some(left) => left.draining.next().await,
        None => std::future::pending().await,
    }
}

/// Whether something of a guest's disks may be left here when it has gone: its front ends stay
/// until all is there.
fn leaves(context: &Context, guest: &str, migration: MigrationId) -> bool {
    let left = block_in_place(|| exports::left(&context.parts.config.state, guest, migration));
    // What cannot be read is looked for again, where it is sent from.
    left.map_or(true, |left| !left.is_empty())
}

/// The destination may have seen any number of connections of an earlier agent: later ones count on
/// from the time, and one that does not suffice is followed by others.
fn first_epoch() -> Epoch {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    Epoch(now.map_or(1, |now| now.as_secs() as u32))
}

fn phase(state: &SourceState) -> Phase {
    match state {
        SourceState::Released | SourceState::Overruling { .. } => Phase::HandingOver,
        SourceState::Done | SourceState::Finishing | SourceState::Retiring => Phase::Finishing,
        _ => Phase::Preparing,
    }
}

async fn resume(guest: &Guest, run: bool, context: &Arc<Context>) -> Result<(), String> {
    let qmp = guest.connect().await.map_err(|error| error.to_string())?;
    memory::resume(&qmp, run)
        .await
        .map_err(|error| error.to_string())?;
    // What its QEMU was set to before the move.
    memory::Settings::restore_kept(&qmp, &guest.folder().settings())
        .await
        .map_err(|error| error.to_string())?;
    if let Err(error) = exports::take_out(&context.parts.config.state, guest, &qmp).await {
        tracing::error!(guest = guest.name(), %error, "still below a disk");
        context.keep_sweeping_fronts();
    }
    Ok(())
}
