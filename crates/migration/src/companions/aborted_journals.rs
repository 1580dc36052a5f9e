//! The journals of arrivals that were aborted. The answer to a query about such an arrival is the
//! same without its journal.

use crate::context::Context;
use crate::limits::peer_claims::only_aborted_arrivals;
use crate::limits::peer_quota::path_of;
use crate::residue::{Again, Residue};
use longhaul_storage::{Journal, JournalError};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::task::block_in_place;

/// How long the journal of an aborted arrival is kept.
const KEPT_FOR: Duration = Duration::from_secs(24 * 3600);
/// Interval at which old journals are removed.
const SWEEP_EVERY: Duration = Duration::from_secs(3600);

/// Journals of arrivals that were aborted long ago.
pub(super) struct AbortedJournals;

impl Residue for AbortedJournals {
    fn sweep<'a>(
        &'a self,
        context: &'a Arc<Context>,
    ) -> Pin<Box<dyn Future<Output = Again> + Send + 'a>> {
        if let Err(error) = block_in_place(|| sweep(context)) {
            tracing::warn!(%error, "cannot clear away old journals");
        }
        Box::pin(async { Some(SWEEP_EVERY) })
    }
}

fn sweep(context: &Context) -> Result<(), JournalError> {
    for migration in Journal::list(&context.journals)? {
        let path = path_of(context, migration);
        let old = std::fs::metadata(&path)
            .and_then(|file| file.modified())
            .is_ok_and(|at| age(at) > KEPT_FOR);
        if !old || context.allowances.preparing(migration).is_some() {
            continue;
        }
        match Journal::open(&context.journals, migration) {
            Ok(journal) if only_aborted_arrivals(journal.records()) => journal.remove()?,
            // A journal that is in use, or that contains other records, is kept.
            Ok(_) | Err(JournalError::Busy(_)) => {}
            // So is the journal of a guest that is held.
            Err(error) if error.is_of_the_file() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn age(at: SystemTime) -> Duration {
    SystemTime::now().duration_since(at).unwrap_or_default()
}
