//! Continues the attempts of an earlier agent. Every journal that is not at its end is brought
//! there by the transition functions of the handover.
//!
//! | last record of the journal | this host is the source | this host is the destination |
//! |---|---|---|
//! | Began | the guest continues here; ABORTED | QEMU is ended; ABORTED |
//! | Ready | | the complete QEMU waits for the source's decision |
//! | Released | the destination is asked until it answers | |
//! | Committed | | QEMU is told to run the guest, again |
//! | Done | the destination is asked whether it needs anything more | |
//! | Returned | | QEMU is ended; ABORTED |
//! | Overruled | the guest continues where the operator decided | the same |
//! | Aborted, All-present, Closed | the peer is informed until both journals are closed | |
//!
//! If a journal cannot be used, its guest is held, with all its other journals: any of them may be
//! older than the damaged one.

use crate::context::Context;
use crate::destination::Destination;
use crate::destination::recovered::Attempts;
use crate::handover::attempt_record::AttemptRecord;
use crate::source::Source;
use crate::source::recovered::RecoveredSource;
use longhaul_engine::handover::{Record, Side};
use longhaul_storage::{Holder, Journal, JournalError, file_name};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Continues every attempt that has a journal, or holds its guest if the journal cannot be used.
pub(crate) async fn take_up(
    source: &Arc<Source>,
    destination: &Arc<Destination>,
    recovered: &Attempts,
) -> Result<(), JournalError> {
    let context = &destination.context;
    let mut all = Vec::new();
    let held = &context.registry.held;
    let mut unusable = Vec::new();
    for migration in Journal::list(&context.journals)? {
        match Journal::open(&context.journals, migration) {
            // A journal that only answers for an attempt that never began here needs no task.
            Ok(journal) => all.extend(AttemptRecord::of(migration, journal).ok()),
            Err(error) if error.is_of_the_file() => unusable.push((migration, error)),
            Err(error) => return Err(error),
        }
    }
    // An unusable journal may be of any guest.
    let mut settles = unusable.is_empty();
    let mut unnamed = Vec::new();
    for (migration, error) in unusable {
        let folder = context.parts.config.state.join("journal");
        let path = folder.join(file_name(migration));
        let error = held.hold(migration, &path, error);
        unnamed.extend(error.map(|error| (migration, error)));
    }
    settles &= unnamed.is_empty();
    let moving: BTreeSet<String> = all.iter().map(|left| left.guest.clone()).collect();
    if settles {
        context.parts.guests.settle(&moving).await;
    }
    let is_held = |left: &mut AttemptRecord| held.is_named(&left.guest);
    for left in all.extract_if(.., is_held).collect::<Vec<_>>() {
        tracing::warn!(migration = %left.migration, guest = left.guest, "held with its guest");
        held.keep(left.journal);
    }
    let begun: Vec<_> = all
        .iter()
        .map(|left| (left.guest.clone(), left.terms.generation))
        .collect();
    let released: Vec<_> = all
        .iter()
        .filter(|left| left.side == Side::Source && has_released(left) && !is_back(left))
        .map(|left| (left.migration, left.guest.clone()))
        .collect();
    for left in all {
        // An attempt that never released its guest and was not closed. A later attempt has the
        // guest since, and decides where it runs.
        let by_another = !has_released(&left)
            && (released
                .iter()
                .any(|(migration, guest)| *migration != left.migration && *guest == left.guest)
                || has_left(context, &left));
        let went_on = begun
            .iter()
            .any(|(guest, generation)| *guest == left.guest && *generation > left.terms.generation);
        let overruled = matches!(left.records().last(), Some(Record::Overruled { .. }));
        match left.side {
            // An operator decided that the guest continues here. A later attempt may have released
            // it since. That attempt decides, even if its journal is gone.
            Side::Source if by_another || overruled && (went_on || is_older(context, &left)) => {
                RecoveredSource::pass_on(source, left).await.go_on();
            }
            Side::Source => RecoveredSource::take_up(source, left).await.go_on(),
            Side::Destination => recovered.take_up(destination, left).await,
        }
    }
    // From here on no new attempt begins with any guest. For attempts that began before, the rights
    // decide.
    for (migration, error) in unnamed {
        held.hold_every_guest(migration, &error);
    }
    Ok(())
}

/// Returns whether the guest came back to the source that had released it.
fn is_back(left: &AttemptRecord) -> bool {
    left.records().iter().any(|record| match record {
        Record::Aborted { .. } => true,
        Record::Overruled { run_on, .. } => *run_on == Side::Source,
        _ => false,
    })
}

fn has_released(left: &AttemptRecord) -> bool {
    let mut records = left.records().into_iter();
    records.any(|record| record.is_release())
}

/// Returns whether the right to run the guest has left this host since this attempt began. The
/// attempt itself never released it.
fn has_left(context: &Context, left: &AttemptRecord) -> bool {
    match context.rights.get(&left.guest) {
        Ok(right) => right.is_some_and(|right| {
            right.generation > left.terms.generation && right.holder != Holder::Here
        }),
        Err(error) => {
            tracing::error!(guest = left.guest, %error, "cannot read who may run it");
            true
        }
    }
}

/// Returns whether the right has changed hosts since an operator gave the guest back in this
/// attempt.
fn is_older(context: &Context, left: &AttemptRecord) -> bool {
    match context.rights.get(&left.guest) {
        Ok(right) => right.is_some_and(|right| right.generation > left.terms.after_next()),
        Err(error) => {
            tracing::error!(guest = left.guest, %error, "cannot read who may run it");
            true
        }
    }
}
