//! Admission of each channel that another host opens: whether the host may ask this now.

use crate::channel::TalkError;
use crate::destination::Destination;
use crate::destination::call::{Call, allows};
use crate::limits::peer_claims::{self, records};
use crate::limits::peer_quota::path_of;
use longhaul_protocol::AttemptId;
use longhaul_protocol::message::{Answer, AttemptState, Check, ToDestination, ToSource, Verdict};
use longhaul_transport::{CloseCode, Control, Permission, TrustedHost};
use std::sync::Arc;

/// One channel of a peer's quota; returned when dropped.
pub(crate) struct Turn {
    context: Arc<Destination>,
    peer: TrustedHost,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let allowances = &self.context.allowances;
        allowances.with_use(&self.peer, |used, _| {
            used.channels = used.channels.saturating_sub(1);
        });
    }
}

/// Counts a channel. A peer that opens too many is disconnected.
pub(crate) fn turn(context: &Arc<Destination>, control: &Control) -> Option<Turn> {
    let peer = &control.peer().host;
    let most = context.allowances.limits(peer).channels;
    let reason = context.allowances.with_use(peer, |used, now| {
        if !used.requests.take(now) {
            return Some("too many requests in a minute".to_owned());
        }
        if used.channels >= most {
            return Some(format!("more than {most} channels at once"));
        }
        used.channels += 1;
        None
    });
    match reason {
        None => Some(Turn {
            context: context.clone(),
            peer: peer.clone(),
        }),
        Some(reason) => {
            tracing::warn!(peer = %peer.name, reason, "cut off");
            control.close(CloseCode::Busy, &reason);
            None
        }
    }
}

/// Returns whether the first message of a channel may be answered. If not, the peer has been
/// informed.
pub(crate) async fn pass(
    context: &Arc<Destination>,
    call: &mut Call,
    first: &ToDestination,
) -> Result<bool, TalkError> {
    match first {
        ToDestination::Query(_)
        | ToDestination::QueryFiles(_)
        | ToDestination::QueryPorts(_)
        | ToDestination::QueryKnown(_) => query(context, call).await,
        &ToDestination::Resume {
            migration, attempt, ..
        }
        | &ToDestination::Ask { migration, attempt } => {
            inquiry(context, call, AttemptId { migration, attempt }).await
        }
        _ => Ok(true),
    }
}

async fn query(context: &Arc<Destination>, call: &mut Call) -> Result<bool, TalkError> {
    let peer = &call.control.peer().host;
    if context
        .allowances
        .with_use(peer, |used, now| used.queries.take(now))
    {
        return Ok(true);
    }
    let host = context.parts.config.name.clone();
    let (name, most) = (
        &peer.name,
        context.allowances.limits(peer).queries_per_minute,
    );
    let check = Check {
        verdict: Verdict::Refused,
        text: format!("{host} answers {name} {most} times a minute, and that is reached"),
        hint: Some(format!(
            "wait, or raise `queries_per_minute` in {host}'s agent.toml, under [limits] or \
             [hosts.{name}.limits]"
        )),
    };
    let checks = vec![check];
    call.sender
        .send(&ToSource::Answer(Answer { host, checks }))?;
    Ok(false)
}

/// Checks a question about an attempt. Only the attempt's source gets an answer: other hosts
/// neither change the attempt nor learn about it. A question about an unknown attempt creates a
/// journal, so it counts as an attempt.
async fn inquiry(
    context: &Arc<Destination>,
    call: &mut Call,
    id: AttemptId,
) -> Result<bool, TalkError> {
    let AttemptId { migration, attempt } = id;
    let peer = &call.control.peer().host;
    let refuse = |code, reason: &str| {
        tracing::warn!(peer = %peer.name, %migration, reason, "an inquiry is not answered");
        call.control.close(code, reason);
        Ok(false)
    };
    if context.attempt(id, peer.id).is_some() {
        return Ok(true);
    }
    let preparing = context.allowances.preparing(migration);
    let known = match tokio::task::block_in_place(|| records(&path_of(context, migration))) {
        Ok(known) => known,
        Err(error) => {
            tracing::error!(%migration, %error, "cannot read a journal");
            return refuse(CloseCode::Busy, "the journal here cannot be used");
        }
    };
    let other = preparing.is_some_and(|source| source != peer.id);
    // Even `aborted` would be an answer, which only the source may get.
    if other || !peer_claims::belongs_to(&known, peer.id) {
        return refuse(CloseCode::NotAllowed, "this is no attempt of yours");
    }
    if preparing.is_some() {
        // Its QEMU is being launched: the source cannot connect to the attempt yet, and nothing is
        // decided.
        let state = AttemptState::Receiving;
        let status = ToSource::Status { attempt, state };
        call.sender.send(&status)?;
        return Ok(false);
    }
    if known.iter().any(|record| record.attempt() == attempt) {
        return Ok(true);
    }
    if !allows(&call.control, Permission::SendGuests) {
        return refuse(
            CloseCode::NotAllowed,
            "this host may not send guests: its scope lacks `send`",
        );
    }
    if !context
        .allowances
        .with_use(peer, |used, now| used.attempts.take(now))
    {
        let most = context.allowances.limits(peer).attempts_per_hour;
        let reason = format!("more than {most} attempts an hour (`attempts_per_hour`)");
        return refuse(CloseCode::Busy, &reason);
    }
    Ok(true)
}
