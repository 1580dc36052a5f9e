//! Prepares for an offered guest before anything moves: checks the rules and this host, makes the
//! images, and launches the QEMU that waits for the guest. A failure leaves nothing behind.

use crate::context::Context;
use crate::destination::Destination;
use crate::destination::attempt::{Arriving, DestinationAttempt, FIRST_EPOCH};
use crate::destination::call::{Call, may_send};
use crate::destination::companion::{About, Companions, Offered};
use crate::destination::disks::Disks;
use crate::destination::guest_rate::RateAfter;
use crate::destination::handle::{AttemptHandle, Present};
use crate::destination::local_content::Kept;
use crate::destination::qemu::{DestinationQemu, DestinationQemuError};
use crate::handover::ledger::{DestinationHandover, Ledger};
use crate::host::fail_point;
use crate::limits::peer_quota::{self, Admission};
use crate::status::migration::{Entry, Facts};
use crate::status::registry::{Reservation, Taken};
use longhaul_api::{Asked, Side, Strategy};
use longhaul_attempt::Destination as Core;
use longhaul_attempt::destination::Config;
use longhaul_engine::handover::{DestinationState, Record, Terms};
use longhaul_protocol::Generation;
use longhaul_protocol::disk::{OfferedDisk, Pulled};
use longhaul_protocol::files::FileClaim;
use longhaul_protocol::message::{Offer, Refusal, RefusalCode, ToSource, Verdict};
use longhaul_storage::Journal;
use longhaul_transport::{BulkOffer, TrustedHost};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::block_in_place;
use tokio::time::Instant;

/// Upper limit on the source's patience that is honored.
const PATIENCE_MAX: Duration = Duration::from_secs(3600);
/// Interval between attempts to write a record.
const NOTE_EVERY: Duration = Duration::from_secs(1);
/// Time that the destination waits beyond the source's patience.
const PATIENCE_MARGIN: Duration = Duration::from_secs(5);

fn refuse(code: RefusalCode, text: impl Into<String>) -> Refusal {
    Refusal {
        code,
        text: text.into(),
        hint: None,
    }
}

fn cannot(context: &Context, error: &dyn std::fmt::Display) -> Refusal {
    let host = &context.parts.config.name;
    refuse(
        RefusalCode::Invalid,
        format!("{host} cannot take part: {error}"),
    )
}

/// Why an offer is refused.
pub(super) struct Refused {
    pub(super) refusal: Refusal,
    /// Open until the refusal is sent: the source takes the end of this connection for a lost link.
    pub(super) bulk: Option<BulkOffer>,
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        Self {
            refusal,
            bulk: None,
        }
    }
}

/// Checks an offer and launches the guest's QEMU. Returns the task of the attempt, and the offer of
/// the bulk connection that brings the guest.
pub(crate) async fn prepare(
    context: &Arc<Destination>,
    call: &mut Call,
    arriving: Arriving,
    files: Option<&[FileClaim]>,
) -> Result<(DestinationAttempt, BulkOffer), Refused> {
    let Arriving {
        offer,
        disks,
        follows,
        managed,
    } = arriving;
    let disks = disks.as_slice();
    let peer = call.control.peer().host.clone();
    let (admission, reservation) = admit(context, call, &offer).await?;
    check(context, &offer, disks).await?;
    let names = (&*peer.name, &*context.parts.config.name);
    let entry = entry_of(&offer, names, follows);
    let about = About {
        context: context.context.clone(),
        guest: offer.guest.name.clone(),
        shown: Some((entry.clone(), Generation(offer.generation.0 + 1))),
    };
    let mut companions = context.companions(&about);
    let mut offered = Offered {
        peer: &peer,
        offer,
        disks,
        follows,
        managed,
        claims: files,
        places: Vec::new(),
        images: Vec::new(),
        bases: BTreeMap::new(),
        kept: Kept::default(),
    };
    companions.check(&mut offered).await?;
    let id = offered.offer.attempt_id();
    let (arrival, called) = AttemptHandle::new(id, peer.id, &DestinationState::Beginning);
    // From here on the attempt's task answers questions about it, not the journal.
    let present = Present::new(&context.handles, arrival.clone());
    let mut journal = begin(context, &peer, &offered.offer)?;
    let incomplete = disks.iter().map(|disk| disk.pulled).chain([follows]);
    let incomplete = incomplete
        .filter(|pulled| *pulled != Pulled::Nothing)
        .count();
    let launched = match note_incomplete(context, &mut journal, &offered.offer, incomplete) {
        Ok(()) => launch(context, call, &mut companions, &mut offered, &admission).await,
        Err(refusal) => Err((refusal, None)),
    };
    let offer = offered.offer;
    let (inbound, bulk) = match launched {
        Ok(launched) => launched,
        Err((refusal, bulk)) => {
            // Before the record that nothing remains.
            companions.ended().await;
            abort(&mut companions, journal, &offer, &refusal, reservation).await;
            context.parts.guests.free(&offer.guest.name).await;
            return Err(Refused { refusal, bulk });
        }
    };
    context.registry.add(entry.clone());
    let fetches = incomplete > 0;
    let waits = !companions.have_arrived();
    let handover = handover(context, &peer, &offer, (fetches, waits), journal);
    arrival.set_state(handover.state());
    let task = DestinationAttempt {
        resolutions: entry.resolutions(),
        context: context.clone(),
        entry,
        arrival,
        present,
        pace: inbound.receiving().pace().clone(),
        offer,
        handover,
        inbound,
        companions,
        called,
        stepped_at: Instant::now(),
        call: None,
        caller: None,
        bulk: None,
        _broken: None,
        tail_bytes: None,
        loading: None,
        memory: None,
        sealed: false,
        settled: false,
        fetches: false,
        finished: false,
        complete_at: None,
        load_time: Duration::ZERO,
        commit_at: None,
        commit_time: Duration::ZERO,
        running: None,
        clock: None,
        rate: RateAfter::default(),
        admission,
        reservation,
    };
    Ok((task, bulk))
}

/// Admits an offer by the rules for its sender and by the right to run its guest, and reserves the
/// guest's name.
async fn admit(
    context: &Arc<Destination>,
    call: &Call,
    offer: &Offer,
) -> Result<(Admission, Reservation), Refusal> {
    let host = &context.parts.config.name;
    may_send(&call.control, host)?;
    let guest = &offer.guest.name;
    // If the guest left this host and its QEMU is still retained, that QEMU ends first.
    context.retained_qemus.give_way(guest).await;
    let peer = &call.control.peer().host;
    let admission = peer_quota::admit(&context.context, peer, offer).await?;
    let taken = Taken::Moving(offer.migration, Side::Destination);
    let reservation = context.registry.take(guest, taken);
    let reservation = reservation.map_err(|error| Refusal {
        code: RefusalCode::Busy,
        text: format!("{host}: {}", error.message),
        hint: error.hint,
    })?;
    peer_quota::refuse_older(&context.context, guest, offer.generation)?;
    Ok((admission, reservation))
}

/// Returns a refusal if this host could not run the guest.
async fn check(context: &Destination, offer: &Offer, disks: &[OfferedDisk]) -> Result<(), Refusal> {
    let checks = context.local_checks(&offer.guest, &offer.machine, disks.is_empty());
    let mut checks = checks.await.checks.into_iter();
    match checks.find(|check| check.verdict == Verdict::Refused) {
        None => Ok(()),
        Some(check) => Err(Refusal {
            code: RefusalCode::Unsuitable,
            text: check.text,
            hint: check.hint,
        }),
    }
}

fn entry_of(offer: &Offer, (source, destination): (&str, &str), follows: Pulled) -> Arc<Entry> {
    Arc::new(Entry::new(Facts {
        strategy: match follows {
            Pulled::Nothing => Strategy::Precopy,
            Pulled::Often => Strategy::Hybrid,
            Pulled::All => Strategy::Postcopy,
        },
        id: offer.migration,
        guest: offer.guest.name.clone(),
        side: Side::Destination,
        source: source.to_owned(),
        destination: destination.to_owned(),
        asked: Asked {
            verify: offer.verify,
            patience_ms: u64::from(offer.patience_ms),
            early_release: offer.early_release,
            ..Asked::default()
        },
    }))
}

/// Begins the attempt's journal.
fn begin(context: &Destination, peer: &TrustedHost, offer: &Offer) -> Result<Journal, Refusal> {
    let invalid = |error: &dyn std::fmt::Display| cannot(context, error);
    let journal = Journal::open(&context.journals, offer.migration);
    let mut journal = journal.map_err(|error| invalid(&error))?;
    // While this offer waited, the source may have given the attempt up over another connection,
    // and its records may have been removed.
    let later = |record: &Record| record.attempt() >= offer.attempt;
    if context.closed.has(peer.id, offer.attempt_id()) || journal.records().iter().any(later) {
        return Err(invalid(&"this attempt is over"));
    }
    let began = Record::Began {
        migration: offer.migration,
        attempt: offer.attempt,
        side: longhaul_engine::handover::Side::Destination,
        guest: offer.guest.name.clone(),
        generation: offer.generation,
        peer: peer.id,
        peer_name: peer.name.clone(),
        paused: offer.paused,
    };
    let written = block_in_place(|| fail_point::append(&mut journal, &began));
    written.map_err(|error| invalid(&error))?;
    Ok(journal)
}

/// Ends an attempt whose guest was not launched.
async fn abort(
    companions: &mut Companions,
    mut journal: Journal,
    offer: &Offer,
    refusal: &Refusal,
    reservation: Reservation,
) {
    let aborted = Record::Aborted {
        attempt: offer.attempt,
        reason: crate::channel::short(&refusal.text),
    };
    if let Err(error) = block_in_place(|| fail_point::append(&mut journal, &aborted)) {
        tracing::error!(%error, "cannot note that an attempt is over");
        // The guest's name stays reserved until the record is written. A later agent that reads the
        // journal without it would end a QEMU of that name.
        tokio::spawn(note_aborted(journal, aborted, reservation));
    }
    companions.aborted().await;
}

/// Creates the core of the attempt, which `fetches` blocks after the commit, or waits for a
/// companion before the guest is stopped.
fn handover(
    context: &Destination,
    peer: &TrustedHost,
    offer: &Offer,
    (fetches, awaits_bases): (bool, bool),
    journal: Journal,
) -> DestinationHandover {
    let terms = Terms {
        attempt: offer.attempt,
        generation: offer.generation,
        early: offer.early_release,
        arbiter: None,
    };
    let ledger = Ledger::new(
        context.context.clone(),
        offer.migration,
        &offer.guest.name,
        (&peer.name, Some(peer.id)),
        terms,
        journal,
    );
    let patience = Duration::from_millis(u64::from(offer.patience_ms)).min(PATIENCE_MAX);
    let core = Core::new(Config {
        terms,
        patience: patience + PATIENCE_MARGIN,
        verify: offer.verify,
        fetches,
        awaits_bases,
    });
    DestinationHandover::new(core, ledger)
}

/// Records how many disks may lack blocks when the guest runs here; its memory counts as one.
fn note_incomplete(
    context: &Context,
    journal: &mut Journal,
    offer: &Offer,
    incomplete: usize,
) -> Result<(), Refusal> {
    let incomplete = u16::try_from(incomplete).map_err(|error| cannot(context, &error))?;
    if incomplete == 0 {
        return Ok(());
    }
    let record = Record::Incomplete {
        attempt: offer.attempt,
        disks: incomplete,
    };
    let written = block_in_place(|| fail_point::append(journal, &record));
    written.map_err(|error| cannot(context, &error))
}

/// Records that an attempt is aborted, as soon as that can be written.
async fn note_aborted(mut journal: Journal, aborted: Record, _reservation: Reservation) {
    loop {
        tokio::time::sleep(NOTE_EVERY).await;
        match block_in_place(|| fail_point::append(&mut journal, &aborted)) {
            Ok(()) => return,
            Err(error) => tracing::debug!(%error, "cannot note that an attempt is over"),
        }
    }
}

/// Prepares the companions, and launches the guest's QEMU. The source may send meanwhile: its data
/// waits in the connection.
async fn launch(
    context: &Context,
    call: &mut Call,
    companions: &mut Companions,
    offered: &mut Offered<'_>,
    admission: &Admission,
) -> Result<(DestinationQemu, BulkOffer), (Refusal, Option<BulkOffer>)> {
    let prepared = companions.prepare(offered).await;
    prepared.map_err(|refusal| (refusal, None))?;
    if let Some(key) = offered.kept.key() {
        offered.offer.digest_key = key.0;
    }
    let keeps = offered.kept.told();
    let id = offered.offer.attempt_id();
    let launching = |bulk_token| ToSource::Launching { bulk_token, keeps };
    let bulk = call.expect_bulk(id, FIRST_EPOCH, launching).await;
    let host = &context.parts.config.name;
    let refusal = |error: DestinationQemuError| error.into_refusal(host);
    let bulk = bulk.map_err(|error| (refusal(error.into()), None))?;
    let disks = Disks::new(&offered.offer.regions, offered.disks, &offered.images);
    let disks = disks.of_guest(&offered.offer.guest);
    let content = (disks, std::mem::take(&mut offered.kept));
    let bases = std::mem::take(&mut offered.bases);
    let managed = offered.managed.take();
    let offer = (&offered.offer, offered.follows, managed);
    let launched = DestinationQemu::launch(context, offer, content, bases, admission);
    let mut inbound = match launched.await {
        Ok(inbound) => inbound,
        Err(error) => return Err((refusal(error), Some(bulk))),
    };
    match companions.started(offered, &inbound).await {
        Ok(()) => {
            let prepared = inbound.prepared();
            if let Some(message) = prepared
                && let Err(error) = call.sender.send(&message)
            {
                // The task of the attempt finds out as well.
                tracing::debug!(%error, "the source is gone");
            }
            Ok((inbound, bulk))
        }
        Err(refusal) => {
            inbound.quit().await;
            Err((refusal, Some(bulk)))
        }
    }
}
