//! Answers the other hosts: takes their connections and gives each channel to whoever it is for.

use super::Context;
use super::arrival;
use super::talk::{self, Receiver, Sender, TalkError};
use crate::agent::fail_point;
use longhaul_engine::handover::{DestinationState, Record};
use longhaul_protocol::message::{AttemptState, ToDestination, ToSource};
use longhaul_protocol::{Attempt, MigrationId};
use longhaul_storage::{Journal, JournalError};
use longhaul_transport::{Channel, CloseCode, Control, Permission};
use std::sync::Arc;
use std::time::Duration;

/// A channel must say what it is for within this time.
const FIRST_MESSAGE: Duration = Duration::from_secs(20);

/// A channel whose first message was read.
pub(super) struct Call {
    pub(super) control: Control,
    pub(super) sender: Sender<ToSource>,
    pub(super) receiver: Receiver<ToDestination>,
}

/// Takes connections until the endpoint is closed.
pub(super) async fn accept(context: Arc<Context>) {
    while let Some(control) = context.endpoint.accept().await {
        tracing::debug!(peer = %control.peer().host.name, "connected");
        tokio::spawn(serve(context.clone(), control));
    }
}

async fn serve(context: Arc<Context>, control: Control) {
    loop {
        match control.accept().await {
            Ok(channel) => {
                tokio::spawn(answer(context.clone(), control.clone(), channel));
            }
            Err(error) => {
                tracing::debug!(peer = %control.peer().host.name, %error, "disconnected");
                return;
            }
        }
    }
}

async fn answer(context: Arc<Context>, control: Control, channel: Channel) {
    let peer = control.peer().host.name.clone();
    let (sender, mut receiver) = talk::as_destination(channel);
    let first = receiver.recv_within(FIRST_MESSAGE).await;
    let call = Call {
        control,
        sender,
        receiver,
    };
    let done = match first {
        Ok(first) => dispatch(context, call, first).await,
        Err(TalkError::Wire(error)) => {
            call.control.close(CloseCode::Violation, &error.to_string());
            Err(error.into())
        }
        Err(error) => Err(error),
    };
    if let Err(error) = done {
        tracing::info!(peer, %error, "a channel ended early");
    }
}

async fn dispatch(
    context: Arc<Context>,
    mut call: Call,
    first: ToDestination,
) -> Result<(), TalkError> {
    match first {
        ToDestination::Query(query) => {
            if !allows(&call.control, Permission::Query) {
                let reason = "this host may not ask: its scope lacks `query`";
                call.control.close(CloseCode::NotAllowed, reason);
                return Ok(());
            }
            let answer = context.local_checks(&query.guest, &query.machine).await;
            call.sender.send(&ToSource::Answer(answer)).await
        }
        ToDestination::Offer(offer) => {
            arrival::receive(context, call, *offer).await;
            Ok(())
        }
        ToDestination::Resume {
            migration,
            attempt,
            epoch,
        } => {
            let arrival = context.arrival(migration, attempt, call.control.peer().host.id);
            match arrival {
                Some(arrival) => {
                    arrival.resume(call, epoch).await;
                    Ok(())
                }
                None => tell(&context, &mut call, migration, attempt).await,
            }
        }
        ToDestination::Ask { migration, attempt } => {
            tell(&context, &mut call, migration, attempt).await
        }
        other => {
            let reason = format!("a channel cannot begin with {}", name(&other));
            call.control.close(CloseCode::Violation, &reason);
            Ok(())
        }
    }
}

/// Says what became of an attempt that nobody here is busy with. One that is not known is aborted
/// by being asked for, so that a late COMMIT is refused.
async fn tell(
    context: &Arc<Context>,
    call: &mut Call,
    migration: MigrationId,
    attempt: Attempt,
) -> Result<(), TalkError> {
    let peer = call.control.peer().host.id;
    let said = context
        .arrival(migration, attempt, peer)
        .map(|arrival| arrival.state());
    let message = match said {
        Some(DestinationState::Running) => ToSource::Committed { attempt },
        Some(DestinationState::Aborted) => ToSource::Aborted {
            attempt,
            reason: "it was given up".to_owned(),
        },
        Some(state) => ToSource::Status {
            attempt,
            state: attempt_state(&state),
        },
        None => match abort_unknown(context, migration, attempt) {
            Ok(message) => message,
            // Somebody here is just beginning with it, or ending.
            Err(JournalError::Busy(_)) => ToSource::Status {
                attempt,
                state: AttemptState::Receiving,
            },
            Err(error) => {
                tracing::error!(%migration, %error, "cannot say what became of an attempt");
                call.control
                    .close(CloseCode::Busy, "the journal here cannot be used");
                return Ok(());
            }
        },
    };
    call.sender.send(&message).await
}

fn abort_unknown(
    context: &Context,
    migration: MigrationId,
    attempt: Attempt,
) -> Result<ToSource, JournalError> {
    let mut journal = Journal::open(&context.journals, migration)?;
    let of_attempt = |record: &&Record| record.attempt() == attempt;
    if let Some(record) = journal.records().iter().rev().find(of_attempt) {
        match record {
            Record::Committed { .. } | Record::Done { .. } => {
                return Ok(ToSource::Committed { attempt });
            }
            Record::Aborted { reason, .. } | Record::Returned { reason, .. } => {
                return Ok(ToSource::Aborted {
                    attempt,
                    reason: reason.clone(),
                });
            }
            // An arrival that the recovery has not come to yet.
            Record::Ready { .. } => {
                return Ok(ToSource::Status {
                    attempt,
                    state: AttemptState::Ready,
                });
            }
            Record::Began { .. } | Record::Released { .. } => {}
        }
    }
    let reason = "the destination does not know this attempt".to_owned();
    let aborted = Record::Aborted {
        attempt,
        reason: reason.clone(),
    };
    fail_point::append(&mut journal, &aborted)?;
    Ok(ToSource::Aborted { attempt, reason })
}

/// How far an arrival is, for its source.
pub(super) fn attempt_state(state: &DestinationState) -> AttemptState {
    match state {
        DestinationState::Receiving => AttemptState::Receiving,
        DestinationState::Readying => AttemptState::Loading,
        DestinationState::Ready | DestinationState::Committing => AttemptState::Ready,
        DestinationState::Committed | DestinationState::Running => AttemptState::Committed,
        DestinationState::Aborting { .. }
        | DestinationState::Recording
        | DestinationState::GivingBack { .. } => AttemptState::Receiving,
        DestinationState::Aborted => AttemptState::Aborted,
    }
}

/// Whether a peer may do this now; a trust store that cannot be read allows nothing.
pub(super) fn allows(control: &Control, permission: Permission) -> bool {
    control.allows(permission).unwrap_or_else(|error| {
        tracing::error!(%error, "cannot read whom this host trusts");
        false
    })
}

fn name(message: &ToDestination) -> &'static str {
    match message {
        ToDestination::Query(_) => "Query",
        ToDestination::Offer(_) => "Offer",
        ToDestination::Resume { .. } => "Resume",
        ToDestination::Ask { .. } => "Ask",
        ToDestination::Start { .. } => "Start",
        ToDestination::Complete { .. } => "Complete",
        ToDestination::VerifyRegion { .. } => "VerifyRegion",
        ToDestination::Verified => "Verified",
        ToDestination::Commit { .. } => "Commit",
        ToDestination::Cancel { .. } => "Cancel",
        ToDestination::Done => "Done",
    }
}
