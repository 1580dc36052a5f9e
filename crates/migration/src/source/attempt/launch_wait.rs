//! The time in which the destination launches its QEMU: blocks travel already, and its answers are
//! handled here.

use crate::channel::TalkError;
use crate::source::attempt::SourceAttempt;
use crate::source::connect::{OFFER_WITHIN, SessionError};
use crate::source::local_disks::LocalDisk;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_protocol::machine::Machine;
use longhaul_protocol::message::Refusal;

impl SourceAttempt {
    /// Handles the acceptance: the destination's QEMU waits for the guest.
    pub(crate) async fn accepted(&mut self, machine: &Machine) {
        let differences = machine.differences(&self.task.offer.machine);
        if let Some(difference) = differences.into_iter().next() {
            let host = &self.task.host;
            let text = format!("{host} would run another machine: {}", difference.text);
            let error = ApiError::new(ErrorCode::Refused, text).hint(difference.hint);
            self.fail(error).await;
        }
    }

    /// Returns whether a disk is an overlay of a base image that the destination may have to get
    /// before the guest is stopped.
    pub(crate) fn awaits_bases(&self) -> bool {
        let mut disks = self.task.outbound.disks().iter();
        disks.any(LocalDisk::awaits_base)
    }

    /// Handles a refusal: the destination could not launch its QEMU, and has ended the attempt.
    pub(crate) fn refused(&mut self, refusal: Refusal) {
        let refused = SessionError::Refused(refusal);
        let host = &self.task.host;
        self.failing = Some(crate::source::connect::failure(host, &refused));
    }

    /// Returns the error for a destination whose QEMU was not launched in time.
    pub(crate) fn not_launched(&self) -> ApiError {
        let silent = SessionError::Talk(TalkError::Silent(OFFER_WITHIN));
        crate::source::connect::failure(&self.task.host, &silent)
    }
}
