//! Prepares for an offered guest before anything moves: checks the rules and this host, makes the
//! images, and launches the QEMU that waits for the guest. A failure leaves nothing behind.

use crate::context::Context;
use crate::destination::Destination;
use crate::destination::attempt::{AttemptHandle, DestinationAttempt, FIRST_EPOCH, Present};
use crate::destination::disks::Disks;
use crate::destination::dispatch::{Call, allows};
use crate::destination::files::{self, Proof};
use crate::destination::local_content::Kept;
use crate::destination::qemu::{DestinationQemu, DestinationQemuError};
use crate::disks::base_images::ComingBases;
use crate::disks::exports::{self, Comes};
use crate::disks::images::{self, Place};
use crate::handover::ledger::{DestinationHandover, Ledger};
use crate::host::fail_point;
use crate::host::hooks::Step;
use crate::limits::peer_quota::{self, Admission};
use crate::status::migration::{Entry, Facts};
use crate::status::registry::{Reservation, Taken};
use longhaul_api::{Asked, Side};
use longhaul_attempt::Destination as Core;
use longhaul_attempt::destination::Config;
use longhaul_engine::handover::{DestinationState, Record, Terms};
use longhaul_hypervisor::disk::base::Base;
use longhaul_protocol::Generation;
use longhaul_protocol::disk::{OfferedDisk, Pulled};
use longhaul_protocol::files::FileClaim;
use longhaul_protocol::message::{Offer, Refusal, RefusalCode, ToSource};
use longhaul_storage::Journal;
use longhaul_storage::disk::RawDisk;
use longhaul_transport::{BulkOffer, Permission};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::mpsc;
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
    (mut offer, disks): (Offer, &[OfferedDisk]),
    files: Option<&[FileClaim]>,
) -> Result<(DestinationAttempt, BulkOffer), Refused> {
    let host = &context.parts.config.name;
    if !allows(&call.control, Permission::SendGuests) {
        let text = format!("{host} does not let this host send guests");
        let hint = "on the destination: longhaul host trust ... --may query,send".to_owned();
        let refusal = Refusal {
            code: RefusalCode::NotAllowed,
            text,
            hint: Some(hint),
        };
        return Err(refusal.into());
    }
    // If the guest left this host and its QEMU is still retained, that QEMU ends first.
    context.retained_qemus.give_way(&offer.guest.name).await;
    let peer = call.control.peer().host.clone();
    let admission = peer_quota::admit(&context.context, &peer, &offer).await?;
    let guest = offer.guest.name.clone();
    let taken = Taken::Moving(offer.migration, Side::Destination);
    let reservation = context
        .registry
        .take(&guest, taken)
        .map_err(|error| Refusal {
            code: RefusalCode::Busy,
            text: format!("{host}: {}", error.message),
            hint: error.hint,
        })?;
    let right = context.rights.get(&guest).map_err(|error| {
        refuse(
            RefusalCode::Busy,
            format!("{host} cannot tell who may run {guest}: {error}"),
        )
    })?;
    if let Some(right) = right.filter(|right| right.generation > offer.generation) {
        let text = format!(
            "{host} knows {guest} in generation {}, and this is generation {}: an older copy",
            right.generation.0, offer.generation.0
        );
        return Err(refuse(RefusalCode::Invalid, text).into());
    }
    let checks = context
        .local_checks(&offer.guest, &offer.machine, disks.is_empty())
        .await
        .checks;
    let mut proof = files::prove(context, &peer, &offer.guest, files).await;
    let refused = checks
        .into_iter()
        .chain(std::mem::take(&mut proof.checks))
        .find(|check| check.verdict == longhaul_protocol::message::Verdict::Refused);
    if let Some(check) = refused {
        let (text, hint) = (check.text, check.hint);
        let refusal = Refusal {
            code: RefusalCode::Unsuitable,
            text,
            hint,
        };
        return Err(refusal.into());
    }
    if !proof.wanted.is_empty() {
        let text = format!("{host} has other files for {guest} than when it was asked before");
        let refusal = Refusal {
            code: RefusalCode::Unsuitable,
            text,
            hint: Some("try again: they are then compared once more".to_owned()),
        };
        return Err(refusal.into());
    }
    let invalid = |error: &dyn std::fmt::Display| {
        refuse(
            RefusalCode::Invalid,
            format!("{host} cannot take part: {error}"),
        )
    };
    let places = block_in_place(|| images::places(context, &offer, disks))?;
    let mut bases = block_in_place(|| ComingBases::begin(context, &places))?;
    let (calls, called) = mpsc::channel(4);
    let arrival = Arc::new(AttemptHandle {
        migration: offer.migration,
        attempt: offer.attempt,
        source: peer.id,
        state: Mutex::new(DestinationState::Beginning),
        calls,
    });
    // From here on the attempt's task answers questions about it, not the journal.
    let present = Present::new(context, arrival.clone());
    let entry = Arc::new(Entry::new(Facts {
        id: offer.migration,
        guest: guest.clone(),
        side: Side::Destination,
        source: peer.name.clone(),
        destination: host.clone(),
        asked: Asked {
            verify: offer.verify,
            patience_ms: u64::from(offer.patience_ms),
            early_release: offer.early_release,
            ..Asked::default()
        },
    }));
    let next = Generation(offer.generation.0 + 1);
    context.arriving(&entry, next).await?;
    let mut journal =
        Journal::open(&context.journals, offer.migration).map_err(|error| invalid(&error))?;
    // While this offer waited, the source may have given the attempt up over another connection,
    // and its records may have been removed.
    let of = (offer.migration, offer.attempt);
    let closed = context.attempts.is_closed(peer.id, of);
    let later = |record: &Record| record.attempt() >= offer.attempt;
    if closed || journal.records().iter().any(later) {
        return Err(invalid(&"this attempt is over").into());
    }
    let began = Record::Began {
        migration: offer.migration,
        attempt: offer.attempt,
        side: longhaul_engine::handover::Side::Destination,
        guest: guest.clone(),
        generation: offer.generation,
        peer: peer.id,
        peer_name: peer.name.clone(),
        paused: offer.paused,
    };
    block_in_place(|| fail_point::append(&mut journal, &began)).map_err(|error| invalid(&error))?;
    let made = block_in_place(|| {
        note_incomplete(&mut journal, &offer, disks)?;
        images::make(context, &offer, &places)
    });
    let launched = match made {
        Ok(made) => {
            let held = context.parts.held.clone();
            let memory = context.parts.kept_memory.as_ref();
            let memory = memory.map(|memory| (memory.as_ref(), guest.as_str()));
            let kept = block_in_place(|| Kept::look(&offer.regions, &places, memory, held));
            if let Some(key) = kept.key() {
                offer.digest_key = key.0;
            }
            match bases.below(&context.context, &guest, &places).await {
                Ok(below) => {
                    let there = There {
                        disks: &made,
                        kept,
                        below,
                        proof,
                    };
                    launch(context, call, &offer, &places, there, &admission).await
                }
                Err(error) => Err((error.into(), None)),
            }
        }
        Err(error) => Err((DestinationQemuError::Images(error), None)),
    };
    let (inbound, bulk) = match launched {
        Ok(launched) => launched,
        Err((error, bulk)) => {
            context.last_hook(&entry, Step::NotComing, next).await;
            let reason = error.to_string();
            let aborted = Record::Aborted {
                attempt: offer.attempt,
                reason: crate::channel::short(&reason),
            };
            if let Err(error) = block_in_place(|| fail_point::append(&mut journal, &aborted)) {
                tracing::error!(%error, "cannot note that an attempt is over");
                // The guest's name stays reserved until the record is written. A later agent that
                // reads the journal without it would end a QEMU of that name.
                tokio::spawn(note_aborted(journal, aborted, reservation));
            }
            block_in_place(|| images::sweep(context));
            let refusal = error.into_refusal(host);
            return Err(Refused { refusal, bulk });
        }
    };
    context.registry.add(entry.clone());
    bases.go_on();
    let terms = Terms {
        attempt: offer.attempt,
        generation: offer.generation,
        early: offer.early_release,
    };
    let ledger = Ledger::new(
        context.context.clone(),
        offer.migration,
        &guest,
        (&peer.name, Some(peer.id)),
        terms,
        journal,
    );
    let patience = Duration::from_millis(u64::from(offer.patience_ms)).min(PATIENCE_MAX);
    let pace = inbound.receiving().pace().clone();
    let core = Core::new(Config {
        terms,
        patience: patience + PATIENCE_MARGIN,
        verify: offer.verify,
        fetches: disks.iter().any(|disk| disk.pulled != Pulled::Nothing),
        awaits_bases: !bases.are_here(),
    });
    let handover = DestinationHandover::new(core, ledger);
    arrival.set_state(handover.state());
    let task = DestinationAttempt {
        resolutions: entry.resolutions(),
        context: context.clone(),
        entry,
        arrival,
        present,
        offer,
        handover,
        inbound,
        bases,
        called,
        stepped_at: Instant::now(),
        call: None,
        caller: None,
        bulk: None,
        _broken: None,
        tail_bytes: None,
        loading: None,
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
        pace,
        admission,
        reservation,
    };
    Ok((task, bulk))
}

/// Records how many disks may lack blocks when the guest runs here.
fn note_incomplete(journal: &mut Journal, offer: &Offer, disks: &[OfferedDisk]) -> io::Result<()> {
    let incomplete = disks
        .iter()
        .filter(|disk| disk.pulled != Pulled::Nothing)
        .count();
    if incomplete == 0 {
        return Ok(());
    }
    let record = Record::Incomplete {
        attempt: offer.attempt,
        disks: u16::try_from(incomplete).map_err(io::Error::other)?,
    };
    fail_point::append(journal, &record).map_err(io::Error::other)
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

/// What exists of a guest before it arrives.
struct There<'a> {
    /// The images that were made for it.
    disks: &'a [Arc<RawDisk>],
    /// The content of its memory and disks that this host has already.
    kept: Kept,
    /// The base images below its disks.
    below: BTreeMap<String, Base>,
    /// The files that it uses and that do not move with it, as they were compared.
    proof: Proof,
}

/// Launches the guest's QEMU. The source may send meanwhile: its data waits in the connection.
async fn launch(
    context: &Context,
    call: &mut Call,
    offer: &Offer,
    places: &[Place],
    there: There<'_>,
    admission: &Admission,
) -> Result<(DestinationQemu, BulkOffer), (DestinationQemuError, Option<BulkOffer>)> {
    let launching = |bulk_token| ToSource::Launching {
        bulk_token,
        keeps: there.kept.told(),
    };
    let attempt = (offer.migration, offer.attempt);
    let bulk = call.expect_bulk(attempt, FIRST_EPOCH, launching).await;
    let bulk = bulk.map_err(|error| (error.into(), None))?;
    match launch_qemu(context, offer, places, there, admission).await {
        Ok(inbound) => Ok((inbound, bulk)),
        Err(error) => Err((error, Some(bulk))),
    }
}

async fn launch_qemu(
    context: &Context,
    offer: &Offer,
    places: &[Place],
    there: There<'_>,
    admission: &Admission,
) -> Result<DestinationQemu, DestinationQemuError> {
    let offered: Vec<OfferedDisk> = places.iter().map(|place| place.offered.clone()).collect();
    let arriving = (
        Disks::new(&offer.regions, &offered, there.disks),
        there.kept,
    );
    let mut inbound =
        DestinationQemu::launch(context, offer, arriving, there.below, admission).await?;
    if let Err(why) = block_in_place(|| inbound.has(&there.proof)) {
        inbound.quit().await;
        return Err(DestinationQemuError::Exchanged(why));
    }
    let comes = places.iter().map(|place| (place, place.offered.pulled));
    let pulled = comes.filter(|(_, pulled)| *pulled != Pulled::Nothing);
    let pulled = pulled.map(|(place, pulled)| Comes {
        pulled,
        name: place.offered.name.clone(),
        image: place.path.clone(),
        grows: images::grows(&place.offered),
    });
    let pulled: Vec<Comes> = pulled.collect();
    if !pulled.is_empty()
        && let Err(error) = inbound.put_below(context, offer.migration, &pulled).await
    {
        inbound.quit().await;
        exports::ended(&context.parts.config.state, &offer.guest.name, false).await;
        return Err(error);
    }
    Ok(inbound)
}
