//! What the guest is expected to use first of memory that follows.

use super::SourceAttempt;
use std::time::Instant;

impl SourceAttempt {
    /// Looks for the code that the guest uses, beside the first pass. It travels before the guest
    /// is stopped.
    pub(super) fn seek_code(&mut self) {
        let Some(search) = self.task.outbound.code() else {
            return;
        };
        let (sending, migration) = (self.task.sending.clone(), self.task.offer.migration);
        sending.engine().seek_ahead();
        tokio::spawn(async move {
            let began = Instant::now();
            let found = search.find().await;
            let blocks = found.as_ref().map_or(0, |(_, blocks)| blocks.len());
            let took = began.elapsed();
            tracing::info!(%migration, blocks, ?took, "the code that the guest uses goes ahead");
            let named = match found {
                Some((region, blocks)) => sending.engine().ahead(region, blocks),
                None => {
                    sending.engine().nothing_ahead();
                    Ok(())
                }
            };
            if let Err(error) = named {
                tracing::warn!(%migration, %error, "its code cannot go ahead");
            }
            sending.wake();
        });
    }

    /// Looks for what the guest will use first of memory that follows, while the destination begins
    /// to load it. Without it the drain has another order.
    pub(super) fn expect_next(&mut self) {
        let sending = self.task.sending.clone();
        if std::mem::replace(&mut self.expects, true) || !sending.engine().memory_follows() {
            return;
        }
        let tail = self.stopped.as_ref().map(|stopped| &*stopped.what.tail);
        let Some(search) = tail.and_then(|tail| self.task.outbound.next_use(tail)) else {
            return;
        };
        let migration = self.task.offer.migration;
        tokio::task::spawn_blocking(move || {
            let began = Instant::now();
            let engine = sending.engine();
            let missing = engine.missing_masks(search.region);
            let often = engine.written_often(search.region);
            drop(engine);
            let blocks = search.find(&missing, &often);
            let (found, took) = (blocks.len(), began.elapsed());
            let often = often.len();
            tracing::debug!(%migration, found, often, ?took, "what its CPUs use next goes first");
            if let Err(error) = sending.engine().expect(search.region, &blocks) {
                tracing::warn!(%migration, %error, "what its CPUs use next cannot go first");
            }
            sending.wake();
        });
    }
}
