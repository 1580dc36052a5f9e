//! Detects a QEMU that stops the guest by itself, and reads its stream on at once.
//!
//! A QEMU that converges stops the guest and writes its devices with its big lock held. It blocks
//! until a reader reads, answers nothing in the meantime, and the guest does not run. Whatever the
//! pacing task is doing, a STOP that was not ordered here is investigated at once, and while an
//! answer is overdue the stream is read on.

use super::Migration;
use crate::memory::source::run_state;
use crate::qmp;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

/// How long QEMU may take to report why the guest has stopped, before its stream is read on.
const STOP_PATIENCE: Duration = Duration::from_millis(30);
/// How long QEMU may take for another answer while its stream is not read, before it is read on.
pub(super) const ANSWER_PATIENCE: Duration = Duration::from_millis(150);

impl Migration {
    /// Watches until the connection to QEMU ends.
    pub(super) async fn guard(self: Arc<Self>, mut events: broadcast::Receiver<qmp::Event>) {
        loop {
            match events.recv().await {
                Ok(event) if !is_stop(&event) => {}
                // Where events were lost, a STOP may be among them.
                Ok(_) | Err(RecvError::Lagged(_)) => self.look_into_stop().await,
                Err(RecvError::Closed) => return,
            }
        }
    }

    /// Reads to the end if QEMU has stopped the guest in order to complete.
    async fn look_into_stop(&self) {
        if self.inner().stop_ordered {
            return;
        }
        let asked = self.answered(run_state(&self.qmp), STOP_PATIENCE).await;
        // Without a connection the move fails, and the pacing task reports that.
        if asked.is_ok_and(|state| is_completing(&state)) {
            self.shared().flush();
        }
    }

    /// Waits for QEMU's answer, and reads its stream on if that takes longer than `patience`: a
    /// QEMU that blocks with its big lock held answers only when its stream is read.
    pub(super) async fn answered<T>(
        &self,
        answer: impl Future<Output = T>,
        patience: Duration,
    ) -> T {
        tokio::pin!(answer);
        if let Ok(answer) = tokio::time::timeout(patience, &mut answer).await {
            return answer;
        }
        let shared = self.shared();
        let _reading = shared.read_on();
        answer.await
    }
}

pub(super) fn is_stop(event: &qmp::Event) -> bool {
    event.name == "STOP"
}

/// Returns whether a QEMU in this state has stopped the guest by itself.
pub(super) fn is_completing(state: &str) -> bool {
    matches!(state, "finish-migrate" | "postmigrate")
}
