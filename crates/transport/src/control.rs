//! Control connections: request and answer, in channels of messages.

use crate::bulk::{BulkBinding, BulkConfig, BulkOffer, BulkSender, BulkToken};
use crate::endpoint::EndpointInner;
use crate::error::{BulkError, ChannelError, CloseCode, ConnectError, LinkError};
use crate::framing::{Budget, MessageReader, MessageWriter};
use crate::quic::{Link, RecvStream, SendStream};
use crate::trust::{Permission, TrustError, TrustedHost};
use bytes::Bytes;
use longhaul_protocol::Incarnation;
use longhaul_protocol::limits::CONTROL_MESSAGE_BYTES_MAX;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Most channels that a peer may have open at once on one control connection.
pub const CHANNELS_MAX: u32 = 64;

/// Who is at the other end of a control connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The entry of the trust store, as it was when the connection was made.
    pub host: TrustedHost,
    /// Where it is.
    pub address: SocketAddr,
    /// What it calls its software.
    pub software: String,
    /// The incarnation of its journals, if it sends one.
    pub incarnation: Option<Incarnation>,
    /// The protocol version that both speak.
    pub version: u16,
}

/// An authenticated control connection on which Hellos were exchanged. Cheap to clone; it closes
/// when the last clone and the last channel are gone.
#[derive(Clone)]
pub struct Control {
    pub(crate) link: Link,
    pub(crate) peer: Arc<Peer>,
    pub(crate) endpoint: Arc<EndpointInner>,
    pub(crate) dialled: bool,
    pub(crate) budget: Budget,
}

impl Control {
    /// Who is at the other end.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Whether this side dialled.
    pub fn dialled(&self) -> bool {
        self.dialled
    }

    /// Whether the trust store allows the peer to do this, now.
    pub fn allows(&self, permission: Permission) -> Result<bool, TrustError> {
        let host = self.endpoint.trust.by_id(self.peer.host.id)?;
        Ok(host.is_some_and(|host| host.scope.allows(permission)))
    }

    /// Opens a channel. The peer sees it with its first message.
    pub async fn open(&self) -> Result<Channel, LinkError> {
        let streams = self.link.connection.open_bi().await;
        let (send, receive) = streams.map_err(|error| self.link.error(error))?;
        Ok(self.channel(send, receive))
    }

    /// The next channel that the peer opens. Safe to cancel.
    pub async fn accept(&self) -> Result<Channel, LinkError> {
        let streams = self.link.connection.accept_bi().await;
        let (send, receive) = streams.map_err(|error| self.link.error(error))?;
        Ok(self.channel(send, receive))
    }

    fn channel(&self, send: SendStream, receive: RecvStream) -> Channel {
        let (link, limit) = (&self.link, CONTROL_MESSAGE_BYTES_MAX);
        let reader = MessageReader::new(link.clone(), receive, limit);
        Channel {
            sender: ChannelSender(MessageWriter::new(link.clone(), send, limit)),
            receiver: ChannelReceiver(reader.within(self.budget.clone())),
        }
    }

    /// Expects one bulk connection from this peer; its token goes to the peer in a message.
    pub fn offer_bulk(
        &self,
        binding: BulkBinding,
        expires_in: Duration,
    ) -> Result<BulkOffer, BulkError> {
        self.endpoint
            .bulk_offers
            .offer(self.peer.host.id, binding, expires_in)
    }

    /// Makes the bulk connection for which the peer gave this token.
    pub async fn connect_bulk(
        &self,
        token: &BulkToken,
        binding: BulkBinding,
        config: BulkConfig,
    ) -> Result<BulkSender, ConnectError> {
        let address = self.link.address();
        let (host, endpoint) = (&self.peer.host, &self.endpoint);
        crate::bulk::connect(endpoint, host, address, token, binding, config).await
    }

    /// The smoothed round-trip time.
    pub fn rtt(&self) -> Duration {
        self.link.rtt()
    }

    /// Closes the connection and all its channels.
    pub fn close(&self, code: CloseCode, reason: &str) {
        self.link.close(code, reason);
    }

    /// Waits until the connection is no more, and says why.
    pub async fn closed(&self) -> LinkError {
        self.link.closed().await
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Control({})", self.peer.host.name)
    }
}

/// Messages both ways, in order, of at most
/// [`CONTROL_MESSAGE_BYTES_MAX`](longhaul_protocol::limits::CONTROL_MESSAGE_BYTES_MAX) bytes.
pub struct Channel {
    sender: ChannelSender,
    receiver: ChannelReceiver,
}

/// The sending half of a [`Channel`].
pub struct ChannelSender(MessageWriter);

/// The receiving half of a [`Channel`].
pub struct ChannelReceiver(MessageReader);

impl Channel {
    /// As [`ChannelSender::send`].
    pub async fn send(&mut self, message: &[u8]) -> Result<(), ChannelError> {
        self.sender.send(message).await
    }

    /// As [`ChannelReceiver::recv`].
    pub async fn recv(&mut self) -> Result<Option<Vec<u8>>, ChannelError> {
        self.receiver.recv().await
    }

    /// As [`ChannelSender::finish`].
    pub async fn finish(&mut self) -> Result<(), ChannelError> {
        self.sender.finish().await
    }

    /// The two halves, for two tasks.
    pub fn split(self) -> (ChannelSender, ChannelReceiver) {
        (self.sender, self.receiver)
    }
}

impl ChannelSender {
    /// Sends a message; waits while the peer takes no more. When the future is dropped, the
    /// message goes out whole (with the next call) or not at all.
    pub async fn send(&mut self, message: &[u8]) -> Result<(), ChannelError> {
        self.0.send(Bytes::copy_from_slice(message)).await
    }

    /// Says that no more messages follow.
    pub async fn finish(&mut self) -> Result<(), ChannelError> {
        self.0.finish().await
    }

    /// Closes the connection below the channel as an agent that stops does: the peer takes it for
    /// lost, and not for the end of the work.
    pub fn disconnect(&self) {
        self.0.disconnect();
    }
}

impl ChannelReceiver {
    /// As [`ChannelSender::disconnect`].
    pub fn disconnect(&self) {
        self.0.disconnect();
    }

    /// The next message, or none when the peer finished. Safe to cancel.
    pub async fn recv(&mut self) -> Result<Option<Vec<u8>>, ChannelError> {
        Ok(self.0.next().await?.map(Vec::from))
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Channel")
    }
}

impl fmt::Debug for ChannelSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ChannelSender")
    }
}

impl fmt::Debug for ChannelReceiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ChannelReceiver")
    }
}
