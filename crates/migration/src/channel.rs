//! Typed messages on a channel, with a time for each answer.

use crate::host::fail_point::{self, Named};
use longhaul_protocol::message::{ToDestination, ToSource};
use longhaul_protocol::wire::{self, Message, WireError};
use longhaul_transport::{
    Channel, ChannelError, ChannelReceiver, ChannelSender, CloseCode, LinkError,
};
use std::marker::PhantomData;
use std::time::Duration;
use tokio::time::timeout;

/// A message must be taken within this time, and a second more for so many bytes: whoever does not
/// read keeps nobody waiting for ever.
const SEND_WITHIN: Duration = Duration::from_secs(60);
const SEND_BYTES_PER_S_MIN: usize = 4096;

/// Why a message did not go out or come in.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum TalkError {
    /// The connection or channel is gone.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// What came is not a message.
    #[error("the other agent breaks the protocol: {0}")]
    Wire(#[from] WireError),
    /// What came is no answer to what was said.
    #[error("the other agent breaks the protocol: {0}")]
    Unfit(&'static str),
    /// The other agent closed the channel.
    #[error("the other agent closed the channel")]
    Closed,
    /// There was no answer.
    #[error("the other agent did not answer, or take what it was sent, within {} s", .0.as_secs())]
    Silent(Duration),
}

impl TalkError {
    /// Whether the other side meant to end it, so that it will not come back.
    pub(crate) fn is_meant(&self) -> bool {
        match self {
            Self::Channel(ChannelError::Lost(LinkError::ClosedByPeer { code, .. })) => {
                *code != CloseCode::ShuttingDown
            }
            Self::Wire(_) | Self::Unfit(_) | Self::Closed => true,
            Self::Channel(_) | Self::Silent(_) => false,
        }
    }
}

/// Sends messages of one kind.
pub(crate) struct Sender<M> {
    channel: ChannelSender,
    kind: PhantomData<fn(M)>,
}

/// Receives messages of one kind.
pub(crate) struct Receiver<M> {
    channel: ChannelReceiver,
    kind: PhantomData<fn() -> M>,
}

/// A channel as the side that opened it sees it.
pub(crate) fn as_source(channel: Channel) -> (Sender<ToDestination>, Receiver<ToSource>) {
    halves(channel)
}

/// A channel as the side that was called sees it.
pub(crate) fn as_destination(channel: Channel) -> (Sender<ToSource>, Receiver<ToDestination>) {
    halves(channel)
}

fn halves<S, R>(channel: Channel) -> (Sender<S>, Receiver<R>) {
    let (sender, receiver) = channel.split();
    (
        Sender {
            channel: sender,
            kind: PhantomData,
        },
        Receiver {
            channel: receiver,
            kind: PhantomData,
        },
    )
}

impl<M: Message + Named> Sender<M> {
    /// Sends one message.
    pub(crate) async fn send(&mut self, message: &M) -> Result<(), TalkError> {
        if fail_point::before_send(message) {
            self.channel.disconnect();
        }
        let bytes = wire::encode(message)?;
        let more = Duration::from_secs((bytes.len() / SEND_BYTES_PER_S_MIN) as u64);
        let limit = SEND_WITHIN + more;
        match timeout(limit, self.channel.send(&bytes)).await {
            Ok(sent) => Ok(sent?),
            Err(_) => Err(TalkError::Silent(limit)),
        }
    }
}

impl<M: Message + Named> Receiver<M> {
    /// The next message. Safe to cancel.
    pub(crate) async fn recv(&mut self) -> Result<M, TalkError> {
        let bytes = self.channel.recv().await?.ok_or(TalkError::Closed)?;
        let message = wire::decode(&bytes)?;
        if fail_point::after_receipt(&message) {
            self.channel.disconnect();
        }
        Ok(message)
    }

    /// The next message, if it comes within this time.
    pub(crate) async fn recv_within(&mut self, limit: Duration) -> Result<M, TalkError> {
        timeout(limit, self.recv())
            .await
            .map_err(|_| TalkError::Silent(limit))?
    }
}

/// Texts of peers and programs are cut before they are kept.
pub(crate) fn short(text: &str) -> String {
    text.chars().take(400).collect()
}
