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

use super::Context;
use super::left::Left;
use super::settling::Settling;
use longhaul_engine::handover::Side;
use longhaul_storage::{Journal, JournalError};
use std::sync::Arc;

/// Brings every attempt to its end, or to somebody who waits for one.
pub(super) async fn take_up(context: &Arc<Context>) -> Result<(), JournalError> {
    for migration in Journal::list(&context.journals)? {
        let journal = Journal::open(&context.journals, migration)?;
        // A journal that only answers for an attempt that never began needs nothing.
        let Ok(left) = Left::of(migration, journal) else {
            continue;
        };
        match left.side {
            Side::Source => Settling::take_up(context, left).await.go_on(),
            Side::Destination => context.attempts.take_up(context, left).await,
        }
    }
    Ok(())
}
