//! Receives the destination's acknowledgements in a task of its own: writes of the guest may wait
//! for them, and then QEMU may wait for the guest.

use crate::carrier::CarrierError;
use crate::source::sender::{Line, Sending};
use longhaul_engine::source::SourceError;
use longhaul_protocol::wire::{self, WireError};
use std::sync::Arc;
use tokio::task::JoinHandle;

/// The reason why no more acknowledgements come over a connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AcknowledgeError {
    /// The carrier is lost.
    #[error(transparent)]
    Lost(#[from] CarrierError),
    /// A message is not an acknowledgement.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The engine rejected an acknowledgement.
    #[error(transparent)]
    Engine(#[from] SourceError),
    /// The task failed.
    #[error("a part of the agent broke: {0}")]
    Broken(String),
}

/// The task that receives the acknowledgements of one connection. Dropping it ends the task.
pub(crate) struct Acknowledging(JoinHandle<AcknowledgeError>);

impl Acknowledging {
    /// Begins to receive acknowledgements.
    pub(crate) fn begin(sending: Arc<Sending>, line: Arc<Line>) -> Self {
        Self(tokio::spawn(async move {
            match hear(&sending, &line).await {
                Ok(never) => match never {},
                Err(error) => {
                    // At once, because writes may wait for acknowledgements that no longer come.
                    sending.disconnect_from(&line);
                    error
                }
            }
        }))
    }

    /// Waits until no more acknowledgements come.
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
        let bytes = line.carrier.acknowledgement().await?;
        sending.acknowledged(line, &wire::decode(&bytes)?)?;
    }
}
