//! Typed messages on a channel, with a time for each answer.
//!
//! What is sent is queued: a peer that does not read holds nobody here, and loses its connection.

use crate::host::fail_point::{self, Named};
use longhaul_protocol::message::{ToDestination, ToSource};
use longhaul_protocol::wire::{self, Message, WireError};
use longhaul_transport::{
    Channel, ChannelError, ChannelReceiver, ChannelSender, CloseCode, LinkError,
};
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// A message must be taken within this time, and a second more for so many bytes.
const SEND_WITHIN: Duration = Duration::from_secs(60);
const SEND_BYTES_PER_S_MIN: usize = 4096;
/// Limit on the bytes that wait for a peer to read them: more than the lists of all disks have.
const QUEUE_BYTES_MAX: usize = 64 << 20;

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
    /// The other agent does not read.
    #[error("the other agent does not take what it is sent")]
    Full,
    /// There was no answer.
    #[error("the other agent did not answer within {} s", .0.as_secs())]
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
            Self::Channel(_) | Self::Full | Self::Silent(_) => false,
        }
    }
}

/// Sends messages of one kind. What is queued when it is dropped is sent yet.
pub(crate) struct Sender<M> {
    queue: mpsc::UnboundedSender<Queued>,
    queued_bytes: Arc<AtomicUsize>,
    kind: PhantomData<fn(M)>,
}

enum Queued {
    Message(Vec<u8>),
    /// A fail point cuts the connection here.
    Cut,
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
    let (queue, queued) = mpsc::unbounded_channel();
    let queued_bytes = Arc::new(AtomicUsize::new(0));
    tokio::spawn(write(sender, queued, queued_bytes.clone()));
    (
        Sender {
            queue,
            queued_bytes,
            kind: PhantomData,
        },
        Receiver {
            channel: receiver,
            kind: PhantomData,
        },
    )
}

impl<M: Message + Named> Sender<M> {
    /// Queues one message.
    pub(crate) fn send(&mut self, message: &M) -> Result<(), TalkError> {
        if fail_point::before_send(message) && self.queue.send(Queued::Cut).is_err() {
            return Err(TalkError::Closed);
        }
        let bytes = wire::encode(message)?;
        let waiting = self.queued_bytes.fetch_add(bytes.len(), Ordering::Relaxed);
        if waiting > QUEUE_BYTES_MAX {
            return Err(TalkError::Full);
        }
        let queued = self.queue.send(Queued::Message(bytes));
        // Why the connection went is what the receiver says.
        queued.map_err(|_| TalkError::Closed)
    }
}

/// Writes what is queued, until the queue is dropped or the peer does not take it in time.
async fn write(
    mut channel: ChannelSender,
    mut queue: mpsc::UnboundedReceiver<Queued>,
    queued_bytes: Arc<AtomicUsize>,
) {
    while let Some(queued) = queue.recv().await {
        let Queued::Message(bytes) = queued else {
            channel.disconnect();
            return;
        };
        let more = Duration::from_secs((bytes.len() / SEND_BYTES_PER_S_MIN) as u64);
        let sent = timeout(SEND_WITHIN + more, channel.send(&bytes)).await;
        queued_bytes.fetch_sub(bytes.len(), Ordering::Relaxed);
        match sent {
            Ok(Ok(())) => {}
            // The receiver hears of it too.
            Ok(Err(error)) => {
                tracing::debug!(%error, "a channel cannot be written to");
                return;
            }
            Err(_) => {
                tracing::info!("the other agent does not take what it is sent: disconnected");
                channel.disconnect();
                return;
            }
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
