//! Hears what the destination acknowledges, beside everything else that the owner of a migration
//! does: a guest may wait for it, and its QEMU for the guest.

use crate::source::sender::{Line, Sending};
use longhaul_engine::source::SourceError;
use longhaul_protocol::wire::{self, WireError};
use longhaul_transport::BulkError;
use std::sync::Arc;
use tokio::task::JoinHandle;

/// Why nothing more is acknowledged over a connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AcknowledgeError {
    /// It is gone.
    #[error(transparent)]
    Lost(#[from] BulkError),
    /// What came is no acknowledgement.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// What came makes no sense.
    #[error(transparent)]
    Engine(#[from] SourceError),
    /// A part of the agent broke.
    #[error("a part of the agent broke: {0}")]
    Broken(String),
}

/// Hears them over one connection, until it is dropped.
pub(crate) struct Acknowledging(JoinHandle<AcknowledgeError>);

impl Acknowledging {
    /// Begins to.
    pub(crate) fn begin(sending: Arc<Sending>, line: Arc<Line>) -> Self {
        Self(tokio::spawn(async move {
            match hear(&sending, &line).await {
                Ok(never) => match never {},
                Err(error) => {
                    // At once: nobody may wait for what it would have brought.
                    sending.disconnect_from(&line);
                    error
                }
            }
        }))
    }

    /// Waits until nothing more comes.
    pub(crate) async fn ended(&mut self) -> AcknowledgeError {
        let ended = (&mut self.0).await;
        ended.unwrap_or_else(|error| AcknowledgeError::Broken(error.to_string()))
    }
}

impl Drop for Acknowledging {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn hear(
    sending: &Sending,
    line: &Line,
) -> Result<std::convert::Infallible, AcknowledgeError> {
    loop {
        let Some(bytes) = line.bulk.acknowledgement().await? else {
            return Err(BulkError::Lost(line.bulk.closed().await).into());
        };
        sending.acknowledged(line, &wire::decode(&bytes)?)?;
    }
}
