//! Channels to devices at terminals.

use crate::context::Context;
use crate::host::lock::lock;
use crate::status::failure;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_protocol::message::ToDestination;
use longhaul_protocol::wire::{self, VERSION_OF_TERMINALS};
use longhaul_transport::{Channel, Control};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use tokio::time::timeout;

/// The time limit for a channel of a connection that may have as many as it can have.
const OPEN_WITHIN: Duration = Duration::from_secs(20);

/// The connections to terminals that have channels.
#[derive(Default)]
pub(crate) struct Terminals(Mutex<HashMap<String, Weak<Control>>>);

/// A channel to a device.
pub struct DeviceChannel {
    /// The channel, on which no message of a device has been sent.
    pub channel: Channel,
    /// The connection, which ends with its last channel.
    pub connection: Arc<Control>,
}

impl Terminals {
    /// Returns the connection with a terminal.
    async fn connection(&self, context: &Context, host: &str) -> Result<Arc<Control>, ApiError> {
        let known = lock(&self.0).get(host).and_then(Weak::upgrade);
        if let Some(control) = known.filter(|control| !control.has_ended()) {
            return Ok(control);
        }
        let control = context.endpoint.connect(host).await;
        let control = Arc::new(control.map_err(|error| failure::connect(host, &error))?);
        let mut all = lock(&self.0);
        all.retain(|_, known| known.strong_count() > 0);
        all.insert(host.to_owned(), Arc::downgrade(&control));
        Ok(control)
    }
}

/// Opens a channel to a device of a terminal.
pub(crate) async fn take(
    context: &Context,
    terminals: &Terminals,
    host: &str,
) -> Result<DeviceChannel, ApiError> {
    let connection = terminals.connection(context, host).await?;
    if connection.peer().version < VERSION_OF_TERMINALS {
        let text = format!("the agent of {host} is too old to be a terminal");
        return Err(ApiError::new(ErrorCode::PeerVersion, text).hint("update longhaul there"));
    }
    let lost = |error: &dyn std::fmt::Display| {
        let text = format!("the connection with {host} is lost: {error}");
        ApiError::new(ErrorCode::PeerUnreachable, text)
    };
    let Ok(opened) = timeout(OPEN_WITHIN, connection.open()).await else {
        let text = format!("too many devices of {host} are open");
        return Err(ApiError::new(ErrorCode::Busy, text));
    };
    let mut channel = opened.map_err(|error| lost(&error))?;
    let first = wire::encode(&ToDestination::ParcelDevice);
    let first = first.map_err(|error| failure::internal(&error.to_string()))?;
    channel.send(&first).await.map_err(|error| lost(&error))?;
    Ok(DeviceChannel {
        channel,
        connection,
    })
}
