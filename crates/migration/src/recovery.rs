//! Takes up what an earlier agent left: every journal that is not at its end is brought there, by
//! the transition functions of the hand-over.
//!
//! | the journal's last word | here the source | here the destination |
//! |---|---|---|
//! | Began | the guest goes on here; ABORTED | QEMU is ended; ABORTED |
//! | Ready | | QEMU, which has everything, waits for the source's decision |
//! | Released | the destination is asked until it answers | |
//! | Committed | | the guest is told to run, again |
//! | Done | the destination is asked whether it needs anything yet | |
//! | Returned | | QEMU is ended; ABORTED |
//! | Overruled | the guest goes on where the person said | the same |
//! | Aborted, All-present, Closed | the other side is told until both journals are closed | |
//!
//! If a journal cannot be used, its guest is held, with all its other journals: any of them may be
//! older than the one that is damaged.

use crate::context::Context;
use crate::destination::Destination;
use crate::handover::attempt_record::AttemptRecord;
use crate::source::recovered::RecoveredSource;
use longhaul_engine::handover::{Record, Side};
use longhaul_storage::{Holder, Journal, JournalError, file_name};
use std::sync::Arc;

/// Brings every attempt to its end, or to somebody who waits for one.
pub(crate) async fn take_up(destination: &Arc<Destination>) -> Result<(), JournalError> {
    let context = &destination.context;
    let mut all = Vec::new();
    let held = &context.registry.held;
    let mut unusable = Vec::new();
    for migration in Journal::list(&context.journals)? {
        match Journal::open(&context.journals, migration) {
            // A journal that only answers for an attempt that never began needs nothing.
            Ok(journal) => all.extend(AttemptRecord::of(migration, journal).ok()),
            Err(error) if error.is_of_the_file() => unusable.push((migration, error)),
            Err(error) => return Err(error),
        }
    }
    let mut unnamed = Vec::new();
    for (migration, error) in unusable {
        let folder = context.parts.config.state.join("journal");
        let path = folder.join(file_name(migration));
        let error = held.hold(migration, &path, error);
        unnamed.extend(error.map(|error| (migration, error)));
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
        // An attempt that never released its guest, and could not be closed: the guest went on to
        // another one, which decides.
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
            // By a person's word the guest went on here, and then to a later attempt, which may
            // have released it: that one decides, also when its journal is gone.
            Side::Source if by_another || overruled && (went_on || is_older(context, &left)) => {
                RecoveredSource::pass_on(context, left).await.go_on();
            }
            Side::Source => RecoveredSource::take_up(context, left).await.go_on(),
            Side::Destination => destination.attempts.take_up(destination, left).await,
        }
    }
    // From here on, nothing new begins with any guest. What has begun is told apart by the rights.
    for (migration, error) in unnamed {
        held.hold_every_guest(migration, &error);
    }
    Ok(())
}

/// Whether the guest came back to the source that had released it.
fn is_back(left: &AttemptRecord) -> bool {
    left.records().iter().any(|record| match record {
        Record::Aborted { .. } => true,
        Record::Overruled { run_on, .. } => *run_on == Side::Source,
        _ => false,
    })
}

fn has_released(left: &AttemptRecord) -> bool {
    let mut records = left.records().into_iter();
    records.any(|record| matches!(record, Record::Released { .. }))
}

/// Whether the right to run the guest has left this host since an attempt that never released it
/// began.
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

/// Whether the guest has changed hands since a person gave it back in this attempt.
fn is_older(context: &Context, left: &AttemptRecord) -> bool {
    match context.rights.get(&left.guest) {
        Ok(right) => right.is_some_and(|right| right.generation > left.terms.after_next()),
        Err(error) => {
            tracing::error!(guest = left.guest, %error, "cannot read who may run it");
            true
        }
    }
}
