//! Implements control connections: requests and answers, in channels of messages.

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

/// The maximum number of channels that a peer may have open at once on one control connection.
pub const CHANNELS_MAX: u32 = 64;

/// The peer of a control connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Its entry of the trust store, at the time of the connection.
    pub host: TrustedHost,
    /// Its address.
    pub address: SocketAddr,
    /// The name and version of its software.
    pub software: String,
    /// The incarnation of its journals, if it sends one.
    pub incarnation: Option<Incarnation>,
    /// The agreed protocol version.
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
    /// Returns the peer.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Returns whether this side dialled.
    pub fn dialled(&self) -> bool {
        self.dialled
    }

    /// Returns whether the trust store allows the peer to do this, now.
    pub fn allows(&self, permission: Permission) -> Result<bool, TrustError> {
        let host = self.endpoint.trust.by_id(self.peer.host.id)?;
        Ok(host.is_some_and(|host| host.scope.allows(permission)))
    }

    /// Returns 32 bytes that only both ends of this connection know, different for each label (RFC
    /// 8446, section 7.5, with an empty context).
    pub fn export(&self, label: &[u8]) -> Result<[u8; 32], LinkError> {
        let mut exported = [0; 32];
        let connection = &self.link.connection;
        let result = connection.export_keying_material(&mut exported, label, b"");
        result.map_err(|_| LinkError::Failed("no keys can be exported".to_owned()))?;
        Ok(exported)
    }

    /// Opens a channel. The peer sees it with its first message.
    pub async fn open(&self) -> Result<Channel, LinkError> {
        let streams = self.link.connection.open_bi().await;
        let (send, receive) = streams.map_err(|error| self.link.error(error))?;
        Ok(self.channel(send, receive))
    }

    /// Returns the next channel that the peer opens. Safe to cancel.
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

    /// Offers one bulk connection to this peer; its token is sent to the peer in a message.
    pub fn offer_bulk(
        &self,
        binding: BulkBinding,
        expires_in: Duration,
    ) -> Result<BulkOffer, BulkError> {
        self.endpoint
            .bulk_offers
            .offer(self.peer.host.id, binding, expires_in)
    }

    /// Opens the bulk connection for which the peer gave this token.
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

    /// Returns the smoothed round-trip time.
    pub fn rtt(&self) -> Duration {
        self.link.rtt()
    }

    /// Tells that this connection waits for long times, and that nobody needs to know within a
    /// second that the peer's agent was restarted. Its keep-alives are rarer from now on.
    pub fn rest(&self) {
        self.link.rest();
    }

    /// Sends a packet that ends the connection soon if the peer's agent was restarted.
    pub fn ping(&self) {
        self.link.ping();
    }

    /// Returns whether the connection has ended, as far as this host knows.
    pub fn has_ended(&self) -> bool {
        self.link.lost().is_some()
    }

    /// Closes the connection and all its channels.
    pub fn close(&self, code: CloseCode, reason: &str) {
        self.link.close(code, reason);
    }

    /// Waits until the connection has ended, and returns the reason.
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

    /// Returns the two halves, for two tasks.
    pub fn split(self) -> (ChannelSender, ChannelReceiver) {
        (self.sender, self.receiver)
    }
}

impl ChannelSender {
    /// Sends a message; waits for flow control of the peer. If the future is dropped, the message
    /// is sent whole (with the next call) or not at all.
    pub async fn send(&mut self, message: &[u8]) -> Result<(), ChannelError> {
        self.0.send(Bytes::copy_from_slice(message)).await
    }

    /// Ends the messages of this direction.
    pub async fn finish(&mut self) -> Result<(), ChannelError> {
        self.0.finish().await
    }

    /// Closes the connection below the channel in the way of an agent that stops: the peer sees a
    /// lost connection, and not the end of the work.
    pub fn disconnect(&self) {
        self.0.disconnect();
    }
}

impl ChannelReceiver {
    /// As [`ChannelSender::disconnect`].
    pub fn disconnect(&self) {
        self.0.disconnect();
    }

    /// Returns the next message, or `None` when the peer has finished. Safe to cancel.
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
