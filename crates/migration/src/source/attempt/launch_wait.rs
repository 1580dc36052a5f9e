//! While the destination launches its QEMU: blocks travel already, and what comes of it is heard.

use crate::channel::TalkError;
use crate::source::attempt::Departure;
use crate::source::connect::{OFFER_WITHIN, SessionError};
use crate::source::local_disks::LocalDisk;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_engine::handover::SourceEvent;
use longhaul_protocol::machine::Machine;
use longhaul_protocol::message::Refusal;

impl Departure {
    /// The destination's QEMU waits for the guest. Heard again after each new connection.
    pub(crate) async fn accepted(&mut self, machine: &Machine) {
        if self.launching.take().is_none() {
            return;
        }
        let differences = machine.differences(&self.task.offer.machine);
        if let Some(difference) = differences.into_iter().next() {
            let host = &self.task.host;
            let text = format!("{host} would run another machine: {}", difference.text);
            let error = ApiError::new(ErrorCode::Refused, text).hint(difference.hint);
            self.fail(error).await;
        }
    }

    /// Whether the guest's disks stand on base images that the destination may have to get before
    /// it is stopped.
    pub(crate) fn awaits_bases(&self) -> bool {
        let mut disks = self.task.outbound.disks().iter();
        disks.any(LocalDisk::awaits_base)
    }

    /// The destination could not launch its QEMU, and has ended the attempt.
    pub(crate) async fn refused(&mut self, refusal: Refusal) {
        let refused = SessionError::Refused(refusal);
        self.failure
            .get_or_insert_with(|| crate::source::connect::failure(&self.task.host, &refused));
        let attempt = self.task.offer.attempt;
        self.step(SourceEvent::PeerAborted(attempt)).await;
    }

    /// A destination that does not get its QEMU launched is not waited for without end. Base images
    /// take the time that they take: it says when one does not come.
    pub(crate) async fn watch_launch(&mut self) {
        if self.awaits_bases() {
            return;
        }
        let late = |since: &tokio::time::Instant| since.elapsed() > OFFER_WITHIN;
        if self.session.is_some() && self.launching.as_ref().is_some_and(late) {
            let silent = SessionError::Talk(TalkError::Silent(OFFER_WITHIN));
            self.fail(crate::source::connect::failure(&self.task.host, &silent))
                .await;
        }
    }
}
