//! Implements length-prefixed messages over a stream: a 32-bit little-endian length, then the
//! bytes.

use crate::error::{ChannelError, CloseCode};
use crate::quic::{Link, ReadError, RecvStream, SendStream, WriteError};
use bytes::{Buf, Bytes, BytesMut};
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of a length prefix.
pub(crate) const PREFIX_BYTES: usize = 4;
const READ_BYTES: usize = 64 << 10;
/// The length up to which messages need no share of a budget.
const FREE_BYTES: usize = 16 << 10;
const BUDGET_UNIT_BYTES: usize = 1 << 10;

/// Splits a stream of bytes into messages; holds at most one message and one more read.
#[derive(Debug)]
pub(crate) struct Messages {
    limit: usize,
    buffer: BytesMut,
}

impl Messages {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            limit,
            buffer: BytesMut::new(),
        }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the next whole message, if it is complete.
    pub(crate) fn take(&mut self) -> Result<Option<Bytes>, ChannelError> {
        let Some(prefix) = self.buffer.first_chunk::<PREFIX_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*prefix) as usize;
        if length > self.limit {
            return Err(ChannelError::TooLarge {
                bytes: length as u64,
                limit: self.limit as u64,
            });
        }
        if self.buffer.len() < PREFIX_BYTES + length {
            return Ok(None);
        }
        self.buffer.advance(PREFIX_BYTES);
        Ok(Some(self.buffer.split_to(length).freeze()))
    }

    /// Returns the length of the unfinished message, where that is known.
    fn announced(&self) -> Option<usize> {
        let prefix = self.buffer.first_chunk::<PREFIX_BYTES>()?;
        Some(u32::from_le_bytes(*prefix) as usize)
    }

    /// Returns whether there is no part of an unfinished message.
    pub(crate) fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }
}

/// The memory limit for a peer's unfinished messages, over all its connections. The rest of a long
/// message is read only with a share of it, which is held until the next message is requested.
#[derive(Debug, Clone)]
pub(crate) struct Budget(Arc<Semaphore>);

impl Budget {
    /// Creates a budget; it must allow at least the longest message.
    pub(crate) fn new(bytes: usize) -> Self {
        Self(Arc::new(Semaphore::new(bytes / BUDGET_UNIT_BYTES)))
    }

    async fn share(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let units = bytes.div_ceil(BUDGET_UNIT_BYTES) as u32;
        // It is never closed.
        self.0.clone().acquire_many_owned(units).await.ok()
    }
}

/// Reads messages from a stream. A message over the limit ends the connection.
pub(crate) struct MessageReader {
    link: Link,
    stream: RecvStream,
    messages: Messages,
    budget: Option<Budget>,
    share: Option<OwnedSemaphorePermit>,
    /// Whether the message of the share was returned.
    given: bool,
}

impl MessageReader {
    /// Closes the connection, so that the peer sees it as lost.
    pub(crate) fn disconnect(&self) {
        let reason = "this connection was given up";
        self.link.close(CloseCode::ShuttingDown, reason);
    }

    pub(crate) fn new(link: Link, stream: RecvStream, limit: usize) -> Self {
        Self {
            link,
            stream,
            messages: Messages::new(limit),
            budget: None,
            share: None,
            given: false,
        }
    }

    /// Returns the reader with a peer's budget.
    pub(crate) fn within(mut self, budget: Budget) -> Self {
        self.budget = Some(budget);
        self
    }

    /// Returns the next message, or `None` when the peer has finished the stream. Safe to cancel.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, ChannelError> {
        if std::mem::take(&mut self.given) {
            self.share = None;
        }
        loop {
            match self.messages.take() {
                Ok(None) => {}
                Ok(message) => {
                    self.given = true;
                    return Ok(message);
                }
                Err(error) => {
                    self.link.close(CloseCode::Violation, &error.to_string());
                    return Err(error);
                }
            }
            if let (Some(budget), None) = (&self.budget, &self.share)
                && let Some(length) = self.messages.announced()
                && length > FREE_BYTES
            {
                self.share = budget.share(length).await;
            }
            match self.stream.read_chunk(READ_BYTES).await {
                Ok(Some(chunk)) => self.messages.push(&chunk),
                Ok(None) if self.messages.is_empty() => return Ok(None),
                Ok(None) => return Err(ChannelError::Cut),
                Err(error) => return Err(read_error(&self.link, error)),
            }
        }
    }
}

/// Writes messages to a stream.
pub(crate) struct MessageWriter {
    link: Link,
    stream: SendStream,
    limit: usize,
    unsent: VecDeque<Bytes>,
}

impl MessageWriter {
    /// Closes the connection, so that the peer sees it as lost.
    pub(crate) fn disconnect(&self) {
        let reason = "this connection was given up";
        self.link.close(CloseCode::ShuttingDown, reason);
    }

    pub(crate) fn new(link: Link, stream: SendStream, limit: usize) -> Self {
        Self {
            link,
            stream,
            limit,
            unsent: VecDeque::new(),
        }
    }

    /// Sends a message. If cancelled, the message is sent whole or not at all.
    pub(crate) async fn send(&mut self, message: Bytes) -> Result<(), ChannelError> {
        if message.len() > self.limit {
            return Err(ChannelError::TooLarge {
                bytes: message.len() as u64,
                limit: self.limit as u64,
            });
        }
        self.flush().await?;
        let prefix = (message.len() as u32).to_le_bytes();
        self.unsent.push_back(Bytes::copy_from_slice(&prefix));
        self.unsent.push_back(message);
        self.flush().await
    }

    /// Ends the messages after the unsent ones.
    pub(crate) async fn finish(&mut self) -> Result<(), ChannelError> {
        self.flush().await?;
        // Fails only when the stream was finished before.
        let _ = self.stream.finish();
        Ok(())
    }

    /// Waits until everything up to the end is acknowledged.
    pub(crate) async fn acknowledged(&mut self) -> Result<(), ChannelError> {
        match self.stream.stopped().await {
            Ok(_) => Ok(()),
            Err(_) => Err(self
                .link
                .lost()
                .map_or(ChannelError::Cut, ChannelError::Lost)),
        }
    }

    async fn flush(&mut self) -> Result<(), ChannelError> {
        while let Some(front) = self.unsent.front_mut() {
            if !front.is_empty() {
                let written = self.stream.write(front).await;
                front.advance(written.map_err(|error| write_error(&self.link, error))?);
            }
            if front.is_empty() {
                self.unsent.pop_front();
            }
        }
        Ok(())
    }
}

pub(crate) fn read_error(link: &Link, error: ReadError) -> ChannelError {
    match error {
        ReadError::ConnectionLost(error) => ChannelError::Lost(link.error(error)),
        _ => link.lost().map_or(ChannelError::Cut, ChannelError::Lost),
    }
}

pub(crate) fn write_error(link: &Link, error: WriteError) -> ChannelError {
    match error {
        WriteError::ConnectionLost(error) => ChannelError::Lost(link.error(error)),
        _ => link.lost().map_or(ChannelError::Cut, ChannelError::Lost),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_bytes_are_those_of_the_wire_formats_page() {
        let mut messages = Messages::new(16);
        messages.push(b"\x05\0\0\0hello\0\0\0\0\x01");
        assert_eq!(messages.take(), Ok(Some(Bytes::from_static(b"hello"))));
        assert_eq!(messages.take(), Ok(Some(Bytes::new())));
        assert_eq!(messages.take(), Ok(None));
        assert!(!messages.is_empty());
    }

    #[test]
    fn a_length_over_the_limit_is_refused_before_its_bytes_come() {
        let mut messages = Messages::new(16);
        messages.push(&17u32.to_le_bytes());
        assert!(matches!(
            messages.take(),
            Err(ChannelError::TooLarge { bytes: 17, .. })
        ));
    }

    proptest! {
        #[test]
        fn any_cutting_gives_the_same_messages(
            sent in proptest::collection::vec(
                proptest::collection::vec(any::<u8>(), 0..40), 0..8),
            cuts in proptest::collection::vec(1usize..9, 1..20),
        ) {
            let mut wire = Vec::new();
            for message in &sent {
                wire.extend((message.len() as u32).to_le_bytes());
                wire.extend(message);
            }
            let mut messages = Messages::new(40);
            let mut received = Vec::new();
            let mut cuts = cuts.into_iter().cycle();
            let mut rest = &wire[..];
            while !rest.is_empty() {
                let (now, later) = rest.split_at(cuts.next().unwrap().min(rest.len()));
                messages.push(now);
                rest = later;
                while let Some(message) = messages.take().unwrap() {
                    received.push(message.to_vec());
                }
            }
            prop_assert_eq!(received, sent);
            prop_assert!(messages.is_empty());
        }
    }
}
