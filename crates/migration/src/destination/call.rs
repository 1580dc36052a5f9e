//! A channel that another host has opened, and its answer.

use crate::channel::{Receiver, Sender, TalkError};
use longhaul_protocol::message::{Refusal, RefusalCode, ToDestination, ToSource};
use longhaul_protocol::{AttemptId, Epoch};
use longhaul_transport::{BulkBinding, BulkError, BulkOffer, Control, Permission};
use std::time::Duration;

/// Lifetime of a token for a bulk connection.
const BULK_WITHIN: Duration = Duration::from_secs(60);

/// A channel whose first message was read.
pub(crate) struct Call {
    pub(crate) control: Control,
    pub(crate) sender: Sender<ToSource>,
    pub(crate) receiver: Receiver<ToDestination>,
}

/// Why a source could not be offered a bulk connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExpectError {
    /// The offer could not be made.
    #[error("cannot expect a bulk connection: {0}")]
    Bulk(#[from] BulkError),
    /// The source disconnected.
    #[error("the source went before it was answered: {0}")]
    Talk(#[from] TalkError),
}

impl Call {
    /// Answers with a token for a bulk connection of this epoch.
    pub(crate) async fn expect_bulk(
        &mut self,
        attempt: AttemptId,
        epoch: Epoch,
        answer: impl FnOnce(Vec<u8>) -> ToSource,
    ) -> Result<BulkOffer, ExpectError> {
        let binding = BulkBinding { attempt, epoch };
        let bulk = self.control.offer_bulk(binding, BULK_WITHIN)?;
        let token = bulk.token().to_bytes().to_vec();
        self.sender.send(&answer(token))?;
        Ok(bulk)
    }
}

/// Returns whether a peer has a permission now. If the trust store cannot be read, it has none.
pub(crate) fn allows(control: &Control, permission: Permission) -> bool {
    control.allows(permission).unwrap_or_else(|error| {
        tracing::error!(%error, "cannot read whom this host trusts");
        false
    })
}

/// Returns a refusal unless the peer may send guests.
pub(crate) fn may_send(control: &Control, here: &str) -> Result<(), Refusal> {
    if allows(control, Permission::SendGuests) {
        return Ok(());
    }
    let hint = "on the destination: longhaul host trust ... --may query,send".to_owned();
    Err(Refusal {
        code: RefusalCode::NotAllowed,
        text: format!("{here} does not let this host send guests"),
        hint: Some(hint),
    })
}
