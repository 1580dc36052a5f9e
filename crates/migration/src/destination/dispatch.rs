//! Answers the other hosts: accepts their connections, and passes each channel to its handler.

use crate::channel::{self, TalkError};
use crate::destination::attempt::Arriving;
use crate::destination::call::{Call, allows, may_send};
use crate::destination::files::Bringing;
use crate::destination::local_content::Kept;
use crate::destination::recovered::{AnswerError, Attempts};
use crate::destination::{Destination, admission, attempt, files};
use crate::disks::{base_images, images};
use crate::host::arbiter;
use crate::limits::peer_quota;
use crate::replicas;
use crate::terminal;
use longhaul_network::member::{GossipError, suite_of};
use longhaul_overlay::seal::Suite;
use longhaul_protocol::disk::{OfferedDisk, Pulled};
use longhaul_protocol::files::FileClaim;
use longhaul_protocol::guest::Managed;
use longhaul_protocol::message::{
    ArbiterQuery, Check, DisksOffer, FilesOffer, FilesQuery, KnownQuery, PortsOffer, PortsQuery,
    Query, Refusal, ToDestination, ToSource, Verdict,
};
use longhaul_protocol::port;
use longhaul_protocol::replica::{FromReplica, ReplicaOffer, ToReplica};
use longhaul_protocol::terminal::{FromTerminal, ToTerminal};
use longhaul_protocol::{AttemptId, Epoch, Generation};
use longhaul_storage::JournalError;
use longhaul_transport::{Channel, CloseCode, Control, Permission};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::block_in_place;

/// Time limit for the first message of a channel.
const FIRST_MESSAGE: Duration = Duration::from_secs(20);
/// Time limit for the next message about an attempt without a task.
const NEXT_MESSAGE: Duration = Duration::from_secs(30);

/// Takes connections until the endpoint is closed.
pub(crate) async fn accept(context: Arc<Destination>, recovered: Arc<Attempts>) {
    while let Some(control) = context.endpoint.accept().await {
        tracing::debug!(peer = %control.peer().host.name, "connected");
        tokio::spawn(serve(context.clone(), recovered.clone(), control));
    }
}

async fn serve(context: Arc<Destination>, recovered: Arc<Attempts>, control: Control) {
    loop {
        match control.accept().await {
            Ok(channel) => {
                let Some(turn) = admission::turn(&context, &control) else {
                    return;
                };
                let ends = (context.clone(), recovered.clone());
                let control = control.clone();
                tokio::spawn(async move {
                    let mut channel = channel;
                    let first = channel::first(&mut channel, FIRST_MESSAGE).await;
                    match first.as_ref().ok().and_then(|first| suite_of(first)) {
                        None => answer(ends, control, channel, first).await,
                        Some(suite) => gossip(&ends.0, &control, channel, suite),
                    }
                    drop(turn);
                });
            }
            Err(error) => {
                tracing::debug!(peer = %control.peer().host.name, %error, "disconnected");
                return;
            }
        }
    }
}

/// Takes a channel that carries no migration: another member of this host's realm.
fn gossip(
    context: &Destination,
    control: &Control,
    channel: Channel,
    suite: Result<Suite, GossipError>,
) {
    match suite {
        Ok(suite) => context.parts.networks.accepted(control, channel, suite),
        Err(error) => control.close(CloseCode::Violation, &error.to_string()),
    }
}

async fn answer(
    (context, recovered): (Arc<Destination>, Arc<Attempts>),
    control: Control,
    channel: Channel,
    first: Result<Vec<u8>, TalkError>,
) {
    let peer = control.peer().host.name.clone();
    let (sender, mut receiver) = channel::as_destination(channel);
    let first = match first {
        Ok(first) => {
            receiver.put_back(first);
            receiver.recv().await
        }
        Err(error) => Err(error),
    };
    let call = Call {
        control,
        sender,
        receiver,
    };
    let done = match first {
        Ok(first) => dispatch((context, recovered), call, first).await,
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
    (context, recovered): (Arc<Destination>, Arc<Attempts>),
    mut call: Call,
    first: ToDestination,
) -> Result<(), TalkError> {
    if !admission::pass(&context, &mut call, &first).await? {
        return Ok(());
    }
    match first {
        ToDestination::Query(query) => {
            if !allows(&call.control, Permission::Query) {
                let reason = "this host may not ask: its scope lacks `query`";
                call.control.close(CloseCode::NotAllowed, reason);
                return Ok(());
            }
            let asked = Inquiry::of(&query);
            answer_query(&context, call, asked, None).await
        }
        ToDestination::QueryFiles(asked) => {
            let FilesQuery { query, files } = *asked;
            answer_files(&context, call, Inquiry::of(&query), &files).await
        }
        ToDestination::QueryPorts(asked) => {
            let PortsQuery {
                asked,
                ports,
                disks,
                generation,
                memory,
                arbiter,
                managed,
            } = *asked;
            let FilesQuery { mut query, files } = asked;
            port::put(&mut query.guest, ports);
            let asked = Inquiry {
                query: &query,
                disks: &disks,
                generation: Some(generation),
                memory,
                arbiter,
                managed: managed.as_ref(),
            };
            answer_files(&context, call, asked, &files).await
        }
        ToDestination::QueryKnown(asked) => answer_known(&context, call, &asked),
        ToDestination::Replicate(offer) => keep_replica(&context, call, *offer).await,
        ToDestination::ParcelDevice => give_device(&context, call).await,
        ToDestination::Offer(offer) => {
            attempt::receive(context, call, Arriving::of(*offer, Vec::new()), None).await;
            Ok(())
        }
        ToDestination::OfferDisks(offered) => {
            let DisksOffer { offer, disks } = *offered;
            attempt::receive(context, call, Arriving::of(offer, disks), None).await;
            Ok(())
        }
        ToDestination::OfferFiles(offered) => {
            let FilesOffer { offer, files } = *offered;
            let DisksOffer { offer, disks } = offer;
            attempt::receive(context, call, Arriving::of(offer, disks), Some(files)).await;
            Ok(())
        }
        ToDestination::OfferPorts(offered) => {
            let PortsOffer {
                offered,
                ports,
                memory,
                managed,
            } = *offered;
            let FilesOffer { offer, files } = offered;
            let DisksOffer { mut offer, disks } = offer;
            port::put(&mut offer.guest, ports);
            let arriving = Arriving {
                offer,
                disks,
                follows: memory,
                managed,
            };
            attempt::receive(context, call, arriving, Some(files)).await;
            Ok(())
        }
        ToDestination::Resume {
            migration,
            attempt,
            epoch,
        } => {
            let id = AttemptId { migration, attempt };
            come_back((&context, &recovered), call, id, Some(epoch), first).await
        }
        ToDestination::Ask { migration, attempt } => {
            let id = AttemptId { migration, attempt };
            come_back((&context, &recovered), call, id, None, first).await
        }
        other => {
            let reason = format!("a channel cannot begin with {}", name(&other));
            call.control.close(CloseCode::Violation, &reason);
            Ok(())
        }
    }
}

/// A question about a guest.
struct Inquiry<'a> {
    query: &'a Query,
    /// The disks that move with it, as far as the source tells.
    disks: &'a [OfferedDisk],
    /// The generation of the right to run it, if the source tells it.
    generation: Option<Generation>,
    /// The part of its memory that may follow.
    memory: Pulled,
    /// The arbiter that the handover would have.
    arbiter: Option<ArbiterQuery>,
    /// The program that manages it, and its outlook.
    managed: Option<&'a Managed>,
}

impl<'a> Inquiry<'a> {
    /// Returns the question of a source that tells neither disks nor generation.
    fn of(query: &'a Query) -> Self {
        Self {
            query,
            disks: &[],
            generation: None,
            memory: Pulled::Nothing,
            arbiter: None,
            managed: None,
        }
    }
}

/// Answers about a guest with claims about files, if the peer may ask.
async fn answer_files(
    context: &Arc<Destination>,
    call: Call,
    asked: Inquiry<'_>,
    files: &[FileClaim],
) -> Result<(), TalkError> {
    // A source that may only send guests asks this before a move.
    let may = |permission| allows(&call.control, permission);
    if !may(Permission::Query) && !may(Permission::SendGuests) {
        let reason = "this host may not ask: its scope lacks `query`";
        call.control.close(CloseCode::NotAllowed, reason);
        return Ok(());
    }
    answer_query(context, call, asked, Some(files)).await
}

/// Sends all checks of a guest. If there are files that locks do not identify, asks for their
/// content instead.
async fn answer_query(
    context: &Arc<Destination>,
    mut call: Call,
    asked: Inquiry<'_>,
    claims: Option<&[FileClaim]>,
) -> Result<(), TalkError> {
    let Inquiry {
        query: Query { guest, machine },
        disks,
        generation,
        memory,
        arbiter,
        managed,
    } = asked;
    let peer = call.control.peer().host.clone();
    let brings = Bringing::by(call.control.peer().version);
    let proof = files::prove(context, &peer, (guest, brings), claims).await;
    if !proof.wanted.is_empty() {
        let files = proof.wanted;
        return call.sender.send(&ToSource::WantContent { files });
    }
    let mut answer = context.local_checks(guest, machine, false).await;
    let misfits = block_in_place(|| images::misfits(context, guest, disks));
    answer.checks.extend(misfits);
    if memory != Pulled::Nothing {
        answer
            .checks
            .extend(context.may_follow(guest, managed.is_some()).await);
    }
    let named = arbiter.map(|asked| arbiter_check(context, &answer.host, asked));
    answer.checks.extend(named);
    let is_refused = answer
        .checks
        .iter()
        .any(|check| check.verdict == Verdict::Refused);
    // Its manager would only repeat what is missing here.
    if let Some(managed) = managed.filter(|_| !is_refused) {
        let follows = memory != Pulled::Nothing;
        let found = block_in_place(|| context.parts.guests.obstacles(guest, managed, follows));
        answer.checks.extend(found.into_iter().map(|check| Check {
            text: format!("{}: {}", answer.host, check.text),
            ..check
        }));
    }
    let sends = may_send(&call.control, &answer.host).err();
    let refusals = block_in_place(|| {
        let mut refusals = peer_quota::outlook(context, &peer, guest, generation);
        refusals.extend(base_images::lacking(context, disks));
        refusals
    });
    let refusals = sends.into_iter().chain(refusals);
    answer.checks.extend(refusals.map(|refusal| Check {
        verdict: Verdict::Refused,
        text: refusal.text,
        hint: refusal.hint,
    }));
    answer.checks.extend(proof.checks);
    let files = proof.lacking;
    call.sender.send(&match files.is_empty() {
        true => ToSource::Answer(answer),
        false => ToSource::AnswerLacking { answer, files },
    })
}

/// Returns whether this host reaches the arbiter that the handover would have.
fn arbiter_check(context: &Destination, own: &str, asked: ArbiterQuery) -> Check {
    let ArbiterQuery { store, required } = asked;
    if arbiter::is_reached(&context.parts.networks, store) {
        return Check {
            verdict: Verdict::Fine,
            text: format!("{own} reaches the realm's arbiter"),
            hint: None,
        };
    }
    let text = format!("{own} does not reach the realm's arbiter: the handover would have none");
    let (verdict, hint) = match required {
        true => (Verdict::Refused, "or leave out --require-arbiter"),
        false => (Verdict::Warning, "or let an operator end doubt"),
    };
    Check {
        verdict,
        text,
        hint: Some(format!("longhaul realm show on {own} says why; {hint}")),
    }
}

/// Says how many blocks of a sample are here from an earlier stay of the guest.
fn answer_known(
    context: &Arc<Destination>,
    mut call: Call,
    asked: &KnownQuery,
) -> Result<(), TalkError> {
    if !allows(&call.control, Permission::SendGuests) {
        let reason = "this host may not ask for content: its scope lacks `send`";
        call.control.close(CloseCode::NotAllowed, reason);
        return Ok(());
    }
    let DisksOffer { offer, disks } = &asked.offered;
    let peer = call.control.peer().host.clone();
    let found = block_in_place(|| {
        // What an offer of this guest would be refused for, says nothing of its content either.
        let refusals = peer_quota::outlook(context, &peer, &offer.guest, Some(offer.generation));
        if !refusals.is_empty() {
            return 0;
        }
        // Without places for its disks a move is refused, and a plan says so elsewhere.
        let places = images::places(context, offer, disks).unwrap_or_default();
        let memory = context.parts.kept_memory.as_ref();
        let memory = memory.map(|memory| (memory.as_ref(), offer.guest.name.as_str()));
        Kept::look(&offer.regions, &places, memory, None).count(asked)
    });
    call.sender.send(&ToSource::Known { found })
}

/// Takes a version of a guest's disks, if the peer may send guests.
async fn keep_replica(
    context: &Destination,
    call: Call,
    offer: ReplicaOffer,
) -> Result<(), TalkError> {
    let allowed = may_send(&call.control, &context.parts.config.name);
    let halves = (
        call.sender.of::<FromReplica>(),
        call.receiver.of::<ToReplica>(),
    );
    match allowed {
        Ok(()) => {
            let peer = call.control.peer().host.clone();
            replicas::receive((context, &context.first_replicas), &peer, halves, offer).await
        }
        Err(refusal) => {
            let (mut sender, _) = halves;
            sender.send(&FromReplica::Refused(refusal))
        }
    }
}

/// Gives a peer a device of a parcel, if it may send guests.
async fn give_device(context: &Destination, call: Call) -> Result<(), TalkError> {
    let here = &context.parts.config.name;
    let allowed = may_send(&call.control, here).map_err(|refusal| Refusal {
        text: format!("{here} does not let this host use its parcel devices"),
        hint: Some(format!(
            "on {here}: longhaul host trust ... --may query,send"
        )),
        ..refusal
    });
    let peer = call.control.peer().host.clone();
    let halves = (
        call.sender.of::<FromTerminal>(),
        call.receiver.of::<ToTerminal>(),
    );
    terminal::give(context, (&peer, allowed), halves).await
}

/// Passes on a source that has returned, with or without an epoch for blocks.
async fn come_back(
    (context, recovered): (&Arc<Destination>, &Attempts),
    call: Call,
    id: AttemptId,
    epoch: Option<Epoch>,
    first: ToDestination,
) -> Result<(), TalkError> {
    let peer = call.control.peer().host.id;
    match context.attempt(id, peer) {
        Some(arrival) => {
            arrival.resume(call, epoch).await;
            Ok(())
        }
        None => converse((context, recovered), call, id, first).await,
    }
}

/// Answers for an attempt without a task, until the source ends the conversation.
async fn converse(
    (context, recovered): (&Arc<Destination>, &Attempts),
    mut call: Call,
    id: AttemptId,
    first: ToDestination,
) -> Result<(), TalkError> {
    let peer = call.control.peer().host.id;
    let mut message = first;
    loop {
        let answers = recovered.answer(context, peer, id, message);
        let answers = match answers.await {
            Ok(answers) => answers,
            // Another task of this agent begins or ends with the journal: the source asks again.
            Err(AnswerError::Journal(JournalError::Busy(_))) => return Ok(()),
            Err(error @ AnswerError::Journal(_)) => {
                tracing::error!(migration = %id.migration, %error, "cannot answer for an attempt");
                let reason = match &error {
                    AnswerError::Journal(JournalError::SetAside(_)) => {
                        "the journal here was set aside: an operator decides"
                    }
                    _ => "the journal here cannot be used",
                };
                call.control.close(CloseCode::Busy, reason);
                return Ok(());
            }
            Err(error) => {
                call.control.close(CloseCode::Violation, &error.to_string());
                return Ok(());
            }
        };
        for answer in &answers {
            call.sender.send(answer)?;
        }
        message = match call.receiver.recv_within(NEXT_MESSAGE).await {
            Ok(message) => message,
            Err(TalkError::Closed | TalkError::Silent(_)) => return Ok(()),
            Err(error) => return Err(error),
        };
    }
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
        ToDestination::Overruled { .. } => "Overruled",
        ToDestination::OfferDisks(_) => "OfferDisks",
        ToDestination::List(_) => "List",
        ToDestination::Unreadable { .. } => "Unreadable",
        ToDestination::Length { .. } => "Length",
        ToDestination::QueryFiles(_) => "QueryFiles",
        ToDestination::OfferFiles(_) => "OfferFiles",
        ToDestination::QueryPorts(_) => "QueryPorts",
        ToDestination::OfferPorts(_) => "OfferPorts",
        ToDestination::HeldFrames(_) => "HeldFrames",
        ToDestination::Flows(_) => "Flows",
        ToDestination::Arbiter { .. } => "Arbiter",
        ToDestination::CommitWithLease { .. } => "CommitWithLease",
        ToDestination::QueryKnown(_) => "QueryKnown",
        ToDestination::Replicate(_) => "Replicate",
        ToDestination::ParcelDevice => "ParcelDevice",
        ToDestination::Departed { .. } => "Departed",
    }
}
