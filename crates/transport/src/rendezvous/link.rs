//! Owns the halves of a rendezvous connection, whatever carries it.

use super::tcp::{TcpReader, TcpWriter};
use crate::endpoint::canonical;
use crate::error::{ChannelError, CloseCode, LinkError};
use crate::framing::{MessageReader, MessageWriter};
use crate::quic::Link;
use bytes::Bytes;
use longhaul_protocol::HostId;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;

/// How long the other side may take to acknowledge what was sent before a connection is closed.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A connection between a host and a rendezvous server, or between two servers.
#[derive(Debug)]
pub struct RendezvousLink {
    /// Who is there, and how to end it.
    pub handle: RendezvousHandle,
    /// What sends messages.
    pub sender: RendezvousSender,
    /// What receives messages and, over TCP, relayed datagrams.
    pub receiver: RendezvousReceiver,
}

/// The other side of a rendezvous connection. Cheap to clone.
#[derive(Clone)]
pub struct RendezvousHandle {
    pub(super) peer: HostId,
    pub(super) carrier: Carrier,
}

/// What carries a connection.
#[derive(Clone)]
pub(super) enum Carrier {
    Quic(Link),
    Tcp(Arc<TcpState>),
}

/// What both halves and the handle of a TCP connection share.
#[derive(Debug)]
pub(super) struct TcpState {
    pub(super) address: SocketAddr,
    pub(super) rtt: Duration,
    /// Relayed datagrams to send.
    pub(super) datagrams: mpsc::Sender<Vec<u8>>,
    ended: OnceLock<LinkError>,
    end: Notify,
}

impl TcpState {
    pub(super) fn new(
        address: SocketAddr,
        rtt: Duration,
        datagrams: mpsc::Sender<Vec<u8>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            address,
            rtt,
            datagrams,
            ended: OnceLock::new(),
            end: Notify::new(),
        })
    }

    /// Ends the connection; only the first reason counts.
    pub(super) fn end(&self, error: LinkError) {
        let _ = self.ended.set(error);
        self.end.notify_waiters();
    }

    pub(super) fn ended(&self) -> Option<LinkError> {
        self.ended.get().cloned()
    }

    pub(super) async fn closed(&self) -> LinkError {
        loop {
            let notified = self.end.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if let Some(error) = self.ended() {
                return error;
            }
            notified.await;
        }
    }
}

impl RendezvousHandle {
    /// Returns the identity that the other side proved.
    pub fn peer(&self) -> HostId {
        self.peer
    }

    /// Returns the other side's address, which may change while the connection lives.
    pub fn address(&self) -> SocketAddr {
        match &self.carrier {
            Carrier::Quic(link) => canonical(link.address()),
            Carrier::Tcp(state) => canonical(state.address),
        }
    }

    /// Returns what takes relayed datagrams to the other side, if they travel in this connection:
    /// over TCP. Over QUIC they travel beside it, as datagrams of their own.
    pub fn datagrams(&self) -> Option<mpsc::Sender<Vec<u8>>> {
        match &self.carrier {
            Carrier::Quic(_) => None,
            Carrier::Tcp(state) => Some(state.datagrams.clone()),
        }
    }

    /// Returns the round-trip time: over TCP that of the handshake.
    pub fn rtt(&self) -> Duration {
        match &self.carrier {
            Carrier::Quic(link) => link.rtt(),
            Carrier::Tcp(state) => state.rtt,
        }
    }

    /// Ends the connection at once. Over TCP the other side learns no reason.
    pub fn close(&self, code: CloseCode, reason: &str) {
        match &self.carrier {
            Carrier::Quic(link) => link.close(code, reason),
            Carrier::Tcp(state) => state.end(LinkError::ClosedHere {
                reason: reason.to_owned(),
            }),
        }
    }

    /// Waits until the connection has ended, and returns the reason.
    pub async fn closed(&self) -> LinkError {
        match &self.carrier {
            Carrier::Quic(link) => link.closed().await,
            Carrier::Tcp(state) => state.closed().await,
        }
    }
}

/// Sends messages.
pub struct RendezvousSender(pub(super) SenderKind);

pub(super) enum SenderKind {
    Quic(MessageWriter, Link),
    Tcp(TcpWriter),
}

impl RendezvousSender {
    /// Sends a message; waits for flow control.
    pub async fn send(&mut self, message: Vec<u8>) -> Result<(), ChannelError> {
        match &mut self.0 {
            SenderKind::Quic(writer, _) => writer.send(Bytes::from(message)).await,
            SenderKind::Tcp(writer) => writer.send(message).await,
        }
    }

    /// Ends the connection after what was sent has arrived, or after 2 s.
    pub async fn close(self, code: CloseCode, reason: &str) {
        match self.0 {
            SenderKind::Quic(mut writer, link) => {
                let last = async {
                    writer.finish().await?;
                    writer.acknowledged().await
                };
                // What is not acknowledged in time is lost with the connection.
                let _ = timeout(LAST_WORDS, last).await;
                link.close(code, reason);
            }
            SenderKind::Tcp(writer) => {
                let reason = reason.to_owned();
                writer
                    .close(LAST_WORDS, LinkError::ClosedHere { reason })
                    .await;
            }
        }
    }
}

/// What arrives on a rendezvous connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Received {
    /// A message.
    Message(Bytes),
    /// A relayed datagram, with its header.
    Datagram(Bytes),
}

/// Receives messages.
pub struct RendezvousReceiver(pub(super) ReceiverKind);

pub(super) enum ReceiverKind {
    Quic(MessageReader),
    Tcp(TcpReader),
}

impl RendezvousReceiver {
    /// Returns what arrives next, or `None` when the other side has finished. Safe to cancel.
    pub async fn recv(&mut self) -> Result<Option<Received>, ChannelError> {
        match &mut self.0 {
            ReceiverKind::Quic(reader) => Ok(reader.next().await?.map(Received::Message)),
            ReceiverKind::Tcp(reader) => reader.next().await,
        }
    }
}

impl fmt::Debug for RendezvousHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = match &self.carrier {
            Carrier::Quic(_) => "QUIC",
            Carrier::Tcp(_) => "TCP",
        };
        write!(f, "RendezvousHandle({:?} over {way})", self.peer)
    }
}

impl fmt::Debug for RendezvousSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RendezvousSender")
    }
}

impl fmt::Debug for RendezvousReceiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RendezvousReceiver")
    }
}
