//! Implements the receiving side of a bulk connection: frames from all streams, acknowledgements
//! back.

use super::wire::{OPENING_BYTES, STREAM_HEADER_BYTES};
use super::{
    ACKNOWLEDGEMENT_BYTES_MAX, BULK_WINDOW_BYTES, BulkBinding, BulkOpening, StreamHeader,
    StreamKind,
};
use crate::error::{BulkError, ChannelError, CloseCode, LinkError};
use crate::framing::{MessageReader, MessageWriter};
use crate::paths::PathTraffic;
use crate::quic::{Link, RecvStream, SendStream, VarInt};
use bytes::Bytes;
use longhaul_protocol::limits::FRAME_BYTES_MAX;
use std::fmt;
use std::time::Duration;
use tokio::sync::{Mutex, mpsc};

/// The number of frames that wait between the streams and the caller.
const FRAMES_WAITING: usize = 2;

/// Receives the frames of a bulk connection. All methods may be called from several tasks.
pub struct BulkReceiver {
    link: Link,
    binding: BulkBinding,
    frames: Mutex<Frames>,
    acknowledgements: Mutex<MessageWriter>,
}

type FrameSender = mpsc::Sender<Result<Bytes, BulkError>>;

/// Frames of the streams.
struct Frames {
    /// Those of the last stream.
    ahead: mpsc::Receiver<Result<Bytes, BulkError>>,
    others: mpsc::Receiver<Result<Bytes, BulkError>>,
}

impl Frames {
    /// Returns the next frame; `None` when all streams have ended.
    async fn next(&mut self) -> Option<Result<Bytes, BulkError>> {
        tokio::select! {
            biased;
            Some(frame) = self.ahead.recv() => Some(frame),
            Some(frame) = self.others.recv() => Some(frame),
            else => None,
        }
    }
}

impl BulkReceiver {
    /// Takes over a connection whose opening was accepted.
    pub(crate) async fn start(link: Link, opening: &BulkOpening) -> Result<Self, BulkError> {
        let connection = &link.connection;
        connection.set_receive_window(VarInt::from_u32(BULK_WINDOW_BYTES));
        connection.set_max_concurrent_uni_streams(VarInt::from_u32(opening.streams.into()));
        let lost = |error| BulkError::Lost(link.error(error));
        let mut back = connection.open_uni().await.map_err(lost)?;
        let header = StreamHeader {
            kind: StreamKind::Acknowledgements,
            binding: opening.binding,
        };
        back.write_all(&header.encode())
            .await
            .map_err(|_| link.lost_or_cut())?;
        let (sender, others) = mpsc::channel(FRAMES_WAITING);
        let (ahead_sender, ahead) = mpsc::channel(FRAMES_WAITING);
        let frames = Frames { ahead, others };
        let senders = (sender, ahead_sender);
        tokio::spawn(accept_streams(
            link.clone(),
            opening.binding,
            opening.streams,
            senders,
        ));
        let writer = MessageWriter::new(link.clone(), back, ACKNOWLEDGEMENT_BYTES_MAX);
        Ok(Self {
            binding: opening.binding,
            frames: Mutex::new(frames),
            acknowledgements: Mutex::new(writer),
            link,
        })
    }

    /// Returns the binding of the connection.
    pub fn binding(&self) -> BulkBinding {
        self.binding
    }

    /// Returns the next frame, or `None` when the sender has finished and all frames were returned.
    /// Frames of one stream arrive in order, frames of different streams in any order; those of the
    /// last stream overtake all that were not returned yet. Safe to cancel.
    pub async fn recv(&self) -> Result<Option<Bytes>, BulkError> {
        match self.frames.lock().await.next().await {
            Some(Ok(frame)) => Ok(Some(frame)),
            Some(Err(error)) => Err(error),
            None => match self.link.lost() {
                // The sender closes after everything was delivered.
                Some(LinkError::ClosedByPeer {
                    code: CloseCode::Done,
                    ..
                }) => Ok(None),
                Some(error) => Err(BulkError::Lost(error)),
                None => Ok(None),
            },
        }
    }

    /// Sends an acknowledgement message of at most [`ACKNOWLEDGEMENT_BYTES_MAX`] bytes back. If the
    /// future is dropped, the message is sent whole (with the next call) or not at all.
    pub async fn acknowledge(&self, message: &[u8]) -> Result<(), BulkError> {
        let message = Bytes::copy_from_slice(message);
        let sent = self.acknowledgements.lock().await.send(message).await;
        sent.map_err(|error| bulk_error(&self.link, error))
    }

    /// Ends the acknowledgements.
    pub async fn finish(&self) -> Result<(), BulkError> {
        let finished = self.acknowledgements.lock().await.finish().await;
        finished.map_err(|error| bulk_error(&self.link, error))
    }

    /// Returns the bytes of UDP payload received on this connection so far, duplicates included.
    pub fn bytes_received(&self) -> u64 {
        self.link.connection.stats().udp_rx.bytes
    }

    /// Returns what each network path of the connection has carried. A path is named by the
    /// sender's address.
    pub fn traffic(&self) -> Vec<PathTraffic> {
        self.link.traffic()
    }

    /// Returns the smoothed round-trip time.
    pub fn rtt(&self) -> Duration {
        self.link.rtt()
    }

    /// Closes the connection with a reason for the sender.
    pub fn close(&self, code: CloseCode, reason: &str) {
        self.link.close(code, reason);
    }

    /// Waits until the connection has ended, and returns the reason.
    pub async fn closed(&self) -> LinkError {
        self.link.closed().await
    }
}

impl fmt::Debug for BulkReceiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BulkReceiver({:?})", self.binding)
    }
}

impl Drop for BulkReceiver {
    fn drop(&mut self) {
        self.link
            .close(CloseCode::Done, "the receiver has finished");
    }
}

pub(super) fn bulk_error(link: &Link, error: ChannelError) -> BulkError {
    match error {
        ChannelError::Lost(error) => BulkError::Lost(error),
        ChannelError::TooLarge { bytes, limit } => BulkError::TooLarge { bytes, limit },
        ChannelError::Cut => {
            link.close(CloseCode::Violation, "a stream was cut");
            BulkError::Lost(link.lost_or_cut())
        }
    }
}

/// Reads the opening of a bulk connection.
pub(crate) async fn read_opening(
    link: &Link,
) -> Result<(BulkOpening, SendStream), (CloseCode, String)> {
    let bad = |reason: String| (CloseCode::BadOpening, reason);
    let streams = link.connection.accept_bi().await;
    let (answer, mut stream) = streams.map_err(|error| bad(link.error(error).to_string()))?;
    let mut bytes = [0; OPENING_BYTES];
    let read = stream.read_exact(&mut bytes).await;
    read.map_err(|error| bad(format!("the opening was cut: {error}")))?;
    let opening = BulkOpening::decode(&bytes).map_err(|error| bad(error.to_string()))?;
    Ok((opening, answer))
}

/// Accepts exactly the announced streams, and spawns a reader for each.
async fn accept_streams(
    link: Link,
    binding: BulkBinding,
    streams: u8,
    (sender, ahead): (FrameSender, FrameSender),
) {
    for number in 1..=streams {
        // The library returns streams in the order in which they were opened.
        match link.connection.accept_uni().await {
            Ok(stream) => {
                let sender = match number == streams {
                    true => ahead.clone(),
                    false => sender.clone(),
                };
                tokio::spawn(read_stream(link.clone(), binding, stream, sender));
            }
            Err(error) => {
                // After the receiver was dropped there is no one to report to.
                let _ = sender.send(Err(BulkError::Lost(link.error(error)))).await;
                return;
            }
        }
    }
}

async fn read_stream(
    link: Link,
    binding: BulkBinding,
    mut stream: RecvStream,
    sender: FrameSender,
) {
    let result = async {
        read_header(&link, &mut stream, StreamKind::Frames, &binding).await?;
        let mut reader = MessageReader::new(link.clone(), stream, FRAME_BYTES_MAX);
        loop {
            let frame = reader.next().await;
            let Some(frame) = frame.map_err(|error| bulk_error(&link, error))? else {
                return Ok(());
            };
            if sender.send(Ok(frame)).await.is_err() {
                return Ok(());
            }
        }
    };
    if let Err(error) = result.await {
        // After the receiver was dropped there is no one to report to.
        let _ = sender.send(Err(error)).await;
    }
}

/// Reads a stream's header, and closes the connection if it is not the expected one.
pub(super) async fn read_header(
    link: &Link,
    stream: &mut RecvStream,
    kind: StreamKind,
    binding: &BulkBinding,
) -> Result<(), BulkError> {
    let mut bytes = [0; STREAM_HEADER_BYTES];
    let reason = match stream.read_exact(&mut bytes).await {
        Ok(()) => match StreamHeader::decode(&bytes) {
            Ok(header) if header.kind == kind && header.binding == *binding => return Ok(()),
            Ok(_) => "a stream belongs to something else".to_owned(),
            Err(error) => error.to_string(),
        },
        Err(_) => "a stream was cut".to_owned(),
    };
    if link.lost().is_none() {
        link.close(CloseCode::Violation, &reason);
    }
    Err(BulkError::Lost(link.lost_or_cut()))
}
