//! Owns the framing over TLS and TCP: messages and relayed datagrams, each behind its length.

use super::link::{Received, TcpState};
use crate::error::{ChannelError, LinkError, printable};
use crate::hello::{HELLO_HEAD_BYTES, Hello};
use bytes::{Buf, BytesMut};
use nix::sys::socket::{setsockopt, sockopt};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_rustls::TlsStream;

/// Bytes of the length before a message or datagram.
const PREFIX_BYTES: usize = 4;
/// The bit of the length that marks a relayed datagram.
const DATAGRAM: u32 = 1 << 31;
const READ_BYTES: usize = 64 << 10;
/// Datagrams that wait to be sent; more are dropped, as by a full queue of a router.
pub(super) const DATAGRAMS_WAITING: usize = 1024;
/// Messages that wait to be sent.
const MESSAGES_WAITING: usize = 16;
/// Datagrams that are written together.
const BATCH: usize = 64;
/// The time after which a silent or stuck connection is lost.
const SILENCE: Duration = Duration::from_secs(15);

/// Why bytes are no frames of a rendezvous connection over TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TcpFramesError {
    /// A message over the limit.
    #[error("a message of {bytes} bytes is over the limit of {limit}")]
    Message {
        /// Its length.
        bytes: u32,
        /// The limit.
        limit: usize,
    },
    /// A datagram that is empty or over the limit.
    #[error("a relayed datagram of {bytes} bytes: the limit is {limit}")]
    Datagram {
        /// Its length.
        bytes: u32,
        /// The limit.
        limit: usize,
    },
}

/// Splits the bytes of a TLS stream into messages and relayed datagrams.
#[derive(Debug)]
pub struct TcpFrames {
    message_bytes_max: usize,
    datagram_bytes_max: usize,
    buffer: BytesMut,
}

impl TcpFrames {
    /// With these limits.
    pub fn new(message_bytes_max: usize, datagram_bytes_max: usize) -> Self {
        Self {
            message_bytes_max,
            datagram_bytes_max,
            buffer: BytesMut::new(),
        }
    }

    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the next message or datagram, if it is complete.
    pub fn take(&mut self) -> Result<Option<Received>, TcpFramesError> {
        let Some(prefix) = self.buffer.first_chunk::<PREFIX_BYTES>() else {
            return Ok(None);
        };
        let prefix = u32::from_le_bytes(*prefix);
        let is_datagram = prefix & DATAGRAM != 0;
        let bytes = prefix & !DATAGRAM;
        let length = bytes as usize;
        if is_datagram && (length == 0 || length > self.datagram_bytes_max) {
            let limit = self.datagram_bytes_max;
            return Err(TcpFramesError::Datagram { bytes, limit });
        }
        if !is_datagram && length > self.message_bytes_max {
            let limit = self.message_bytes_max;
            return Err(TcpFramesError::Message { bytes, limit });
        }
        if self.buffer.len() < PREFIX_BYTES + length {
            return Ok(None);
        }
        self.buffer.advance(PREFIX_BYTES);
        let content = self.buffer.split_to(length).freeze();
        Ok(Some(match is_datagram {
            true => Received::Datagram(content),
            false => Received::Message(content),
        }))
    }

    /// Returns whether nothing of an unfinished frame is here.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }
}

/// Returns what precedes a message or a relayed datagram of this length.
pub fn frame_header(length: usize, is_datagram: bool) -> [u8; PREFIX_BYTES] {
    // Both have limits far below 2^31.
    let length = u32::try_from(length).unwrap_or(u32::MAX) & !DATAGRAM;
    let mark = if is_datagram { DATAGRAM } else { 0 };
    (length | mark).to_le_bytes()
}

/// Makes a TCP connection end when the other side is gone, and not wait to fill packets.
pub(super) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let silence_ms = u32::try_from(SILENCE.as_millis()).unwrap_or(u32::MAX);
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &5)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &5)?;
    setsockopt(stream, sockopt::TcpKeepCount, &2)?;
    setsockopt(stream, sockopt::TcpUserTimeout, &silence_ms)?;
    Ok(())
}

/// Exchanges Hellos: the dialler's comes first.
pub(super) async fn greet<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    hello: &Hello,
    dialled: bool,
) -> Result<Hello, LinkError> {
    let failed = |error: io::Error| LinkError::Failed(printable(error.to_string().as_bytes()));
    if dialled {
        stream.write_all(&hello.encode()).await.map_err(failed)?;
        stream.flush().await.map_err(failed)?;
    }
    let mut head = [0; HELLO_HEAD_BYTES];
    stream.read_exact(&mut head).await.map_err(failed)?;
    let malformed = |error: crate::HelloError| LinkError::Failed(error.to_string());
    let length = Hello::decode_head(&head).map_err(malformed)?;
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.map_err(failed)?;
    let theirs = Hello::decode_body(&body).map_err(malformed)?;
    if !dialled {
        stream.write_all(&hello.encode()).await.map_err(failed)?;
        stream.flush().await.map_err(failed)?;
    }
    Ok(theirs)
}

enum Order {
    Message(Vec<u8>),
    Close(LinkError, oneshot::Sender<()>),
}

/// Hands messages to the task that writes.
pub(super) struct TcpWriter {
    orders: mpsc::Sender<Order>,
    state: Arc<TcpState>,
    limit: usize,
}

/// Reads what arrives.
pub(super) struct TcpReader {
    stream: ReadHalf<TlsStream<TcpStream>>,
    frames: TcpFrames,
    state: Arc<TcpState>,
    read: Vec<u8>,
}

/// Starts the task that writes, and returns both halves.
pub(super) fn start(
    stream: TlsStream<TcpStream>,
    state: Arc<TcpState>,
    datagrams: mpsc::Receiver<Vec<u8>>,
    (message_bytes_max, datagram_bytes_max): (usize, usize),
) -> (TcpWriter, TcpReader) {
    let (read, write) = tokio::io::split(stream);
    let (orders, ordered) = mpsc::channel(MESSAGES_WAITING);
    tokio::spawn(write_all(write, state.clone(), ordered, datagrams));
    let writer = TcpWriter {
        orders,
        state: state.clone(),
        limit: message_bytes_max,
    };
    let reader = TcpReader {
        stream: read,
        frames: TcpFrames::new(message_bytes_max, datagram_bytes_max),
        state,
        read: vec![0; READ_BYTES],
    };
    (writer, reader)
}

/// Writes messages and datagrams until the connection ends.
async fn write_all(
    mut stream: WriteHalf<TlsStream<TcpStream>>,
    state: Arc<TcpState>,
    mut orders: mpsc::Receiver<Order>,
    mut datagrams: mpsc::Receiver<Vec<u8>>,
) {
    let mut batch = Vec::new();
    let mut out = Vec::new();
    let ended = loop {
        out.clear();
        tokio::select! {
            biased;
            error = state.closed() => break error,
            order = orders.recv() => match order {
                Some(Order::Message(message)) => {
                    out.extend(frame_header(message.len(), false));
                    out.extend(message);
                }
                Some(Order::Close(error, done)) => {
                    // The connection ends anyway; its end is what counts.
                    let _ = stream.shutdown().await;
                    let _ = done.send(());
                    break error;
                }
                None => break LinkError::ClosedHere { reason: "no longer needed".to_owned() },
            },
            _ = datagrams.recv_many(&mut batch, BATCH), if !datagrams.is_closed() => {
                for datagram in batch.drain(..) {
                    out.extend(frame_header(datagram.len(), true));
                    out.extend(datagram);
                }
            }
        }
        let written = async {
            stream.write_all(&out).await?;
            stream.flush().await
        };
        let written = tokio::select! {
            written = written => written,
            error = state.closed() => break error,
        };
        if let Err(error) = written {
            break LinkError::Failed(printable(error.to_string().as_bytes()));
        }
    };
    state.end(ended);
    // As above: nothing depends on it.
    let _ = timeout(Duration::from_secs(1), stream.shutdown()).await;
}

impl TcpWriter {
    pub(super) async fn send(&mut self, message: Vec<u8>) -> Result<(), ChannelError> {
        if message.len() > self.limit {
            return Err(ChannelError::TooLarge {
                bytes: message.len() as u64,
                limit: self.limit as u64,
            });
        }
        let sent = self.orders.send(Order::Message(message)).await;
        sent.map_err(|_| lost(&self.state))
    }

    pub(super) async fn close(self, within: Duration, error: LinkError) {
        let (done, is_done) = oneshot::channel();
        let close = async {
            // Fails only when the connection has ended before.
            if self
                .orders
                .send(Order::Close(error.clone(), done))
                .await
                .is_ok()
            {
                let _ = is_done.await;
            }
        };
        let _ = timeout(within, close).await;
        self.state.end(error);
    }
}

impl TcpReader {
    pub(super) async fn next(&mut self) -> Result<Option<Received>, ChannelError> {
        loop {
            match self.frames.take() {
                Ok(None) => {}
                Ok(frame) => return Ok(frame),
                Err(error) => {
                    let error = LinkError::Failed(error.to_string());
                    self.state.end(error.clone());
                    return Err(ChannelError::Lost(error));
                }
            }
            let read = tokio::select! {
                read = self.stream.read(&mut self.read) => read,
                error = self.state.closed() => return Err(ChannelError::Lost(error)),
            };
            match read {
                Ok(0) if self.frames.is_empty() => {
                    let reason = "without a reason".to_owned();
                    let code = crate::CloseCode::Done;
                    self.state.end(LinkError::ClosedByPeer { code, reason });
                    return Ok(None);
                }
                Ok(0) => {
                    self.state.end(LinkError::Reset);
                    return Err(ChannelError::Cut);
                }
                Ok(count) => self.frames.push(&self.read[..count]),
                Err(error) => {
                    let text = printable(error.to_string().as_bytes());
                    self.state.end(LinkError::Failed(text));
                    return Err(lost(&self.state));
                }
            }
        }
    }
}

impl Drop for TcpReader {
    fn drop(&mut self) {
        let reason = "no longer needed".to_owned();
        self.state.end(LinkError::ClosedHere { reason });
    }
}

fn lost(state: &TcpState) -> ChannelError {
    state.ended().map_or(ChannelError::Cut, ChannelError::Lost)
}
