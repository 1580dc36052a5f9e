//! Typed messages on a channel, with a time limit for each answer.
//!
//! Messages are queued. A peer that does not read blocks no task here and loses its connection.

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
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

/// Time limit for sending a message: 60 s, plus one second per `SEND_BYTES_PER_S_MIN` bytes.
const SEND_WITHIN: Duration = Duration::from_secs(60);
const SEND_BYTES_PER_S_MIN: usize = 4096;
/// Limit on the bytes queued for one peer. It exceeds the size of the block lists of all disks.
const QUEUE_BYTES_MAX: usize = 64 << 20;

/// Why a message was not sent or received.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum TalkError {
    /// The connection or channel is lost.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// The received bytes are not a message.
    #[error("the other agent breaks the protocol: {0}")]
    Wire(#[from] WireError),
    /// The received message does not answer the one that was sent.
    #[error("the other agent breaks the protocol: {0}")]
    Unfit(&'static str),
    /// The other agent closed the channel.
    #[error("the other agent closed the channel")]
    Closed,
    /// The other agent does not read, and the queue is full.
    #[error("the other agent does not take what it is sent")]
    Full,
    /// No answer came within the time limit.
    #[error("the other agent did not answer within {} s", .0.as_secs())]
    Silent(Duration),
}

impl TalkError {
    /// Returns whether the peer closed the channel on purpose or broke the protocol. Such a peer
    /// does not reconnect. A peer that shuts down does.
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

/// The sending half of a channel, for messages of one kind. Messages that are queued when it is
/// dropped are still sent.
pub(crate) struct Sender<M> {
    queue: mpsc::UnboundedSender<Queued>,
    queued_bytes: Arc<AtomicUsize>,
    kind: PhantomData<fn(M)>,
}

enum Queued {
    Message(Vec<u8>, Option<oneshot::Sender<()>>),
    /// A fail point closes the connection here.
    Cut,
}

/// The receiving half of a channel, for messages of one kind.
pub(crate) struct Receiver<M> {
    channel: ChannelReceiver,
    /// A message that was looked at, and is to be received again.
    put_back: Option<Vec<u8>>,
    kind: PhantomData<fn() -> M>,
}

/// Splits a channel into the halves of the side that opened it.
pub(crate) fn as_source(channel: Channel) -> (Sender<ToDestination>, Receiver<ToSource>) {
    halves(channel)
}

/// Splits a channel into the halves of the side that accepted it.
pub(crate) fn as_destination(channel: Channel) -> (Sender<ToSource>, Receiver<ToDestination>) {
    halves(channel)
}

/// Receives the first message of a channel, whatever it is.
pub(crate) async fn first(channel: &mut Channel, limit: Duration) -> Result<Vec<u8>, TalkError> {
    let received = timeout(limit, channel.recv()).await;
    let received = received.map_err(|_| TalkError::Silent(limit))?;
    received?.ok_or(TalkError::Closed)
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
            put_back: None,
            kind: PhantomData,
        },
    )
}

impl<M> Sender<M> {
    /// Returns the same half for messages of another kind, which follow those of this kind.
    pub(crate) fn of<N>(self) -> Sender<N> {
        Sender {
            queue: self.queue,
            queued_bytes: self.queued_bytes,
            kind: PhantomData,
        }
    }
}

impl<M> Receiver<M> {
    /// Returns the same half for messages of another kind, which follow those of this kind.
    pub(crate) fn of<N>(self) -> Receiver<N> {
        Receiver {
            channel: self.channel,
            put_back: self.put_back,
            kind: PhantomData,
        }
    }
}

impl<M: Message + Named> Sender<M> {
    /// Queues a message. Fails if the queue is full or the channel is closed.
    pub(crate) fn send(&mut self, message: &M) -> Result<(), TalkError> {
        if fail_point::before_send(message) && self.queue.send(Queued::Cut).is_err() {
            return Err(TalkError::Closed);
        }
        self.queue(message, None)
    }

    /// Sends a message, and returns when the connection has taken it.
    pub(crate) async fn send_through(&mut self, message: &M) -> Result<(), TalkError> {
        let (taken, is_taken) = oneshot::channel();
        self.queue(message, Some(taken))?;
        is_taken.await.map_err(|_| TalkError::Closed)
    }

    fn queue(&self, message: &M, taken: Option<oneshot::Sender<()>>) -> Result<(), TalkError> {
        let bytes = wire::encode(message)?;
        let waiting = self.queued_bytes.fetch_add(bytes.len(), Ordering::Relaxed);
        if waiting > QUEUE_BYTES_MAX {
            return Err(TalkError::Full);
        }
        let queued = self.queue.send(Queued::Message(bytes, taken));
        // The receiver reports why the connection was lost.
        queued.map_err(|_| TalkError::Closed)
    }
}

/// Writes queued messages until the queue is dropped or the peer exceeds the time limit.
async fn write(
    mut channel: ChannelSender,
    mut queue: mpsc::UnboundedReceiver<Queued>,
    queued_bytes: Arc<AtomicUsize>,
) {
    while let Some(queued) = queue.recv().await {
        let Queued::Message(bytes, taken) = queued else {
            channel.disconnect();
            return;
        };
        let more = Duration::from_secs((bytes.len() / SEND_BYTES_PER_S_MIN) as u64);
        let sent = timeout(SEND_WITHIN + more, channel.send(&bytes)).await;
        queued_bytes.fetch_sub(bytes.len(), Ordering::Relaxed);
        match sent {
            // Nobody may wait for it.
            Ok(Ok(())) => drop(taken.map(|taken| taken.send(()))),
            // The receiver gets this error too.
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
    /// Receives the next message. Safe to cancel.
    pub(crate) async fn recv(&mut self) -> Result<M, TalkError> {
        let bytes = match self.put_back.take() {
            Some(bytes) => bytes,
            None => self.channel.recv().await?.ok_or(TalkError::Closed)?,
        };
        let message = wire::decode(&bytes)?;
        if fail_point::after_receipt(&message) {
            self.channel.disconnect();
        }
        Ok(message)
    }

    /// Lets a message be received next, which was received before this half existed.
    pub(crate) fn put_back(&mut self, message: Vec<u8>) {
        self.put_back = Some(message);
    }

    /// Receives the next message, with a time limit.
    pub(crate) async fn recv_within(&mut self, limit: Duration) -> Result<M, TalkError> {
        timeout(limit, self.recv())
            .await
            .map_err(|_| TalkError::Silent(limit))?
    }
}

/// Shortens a text of a peer or program to 400 characters, so that it can be stored.
pub(crate) fn short(text: &str) -> String {
    text.chars().take(400).collect()
}
