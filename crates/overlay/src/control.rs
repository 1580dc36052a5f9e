//! Messages in control datagrams: what hosts tell each other of guests that move, and of the path.
//!
//! A payload has up to [`MESSAGES_MAX`] messages: a type, the length of the body (one byte each),
//! and the body. Numbers are little-endian. Unknown types are skipped. No message is a keepalive.

use crate::address::Mac;
use crate::switch::{Announcement, Redirect};
use longhaul_protocol::HostId;

/// Most messages in a datagram.
pub const MESSAGES_MAX: usize = 64;
/// Longest message, in bytes, with its type and length.
pub const MESSAGE_BYTES_MAX: usize = 2 + REDIRECT_BYTES;

const ANNOUNCEMENT: u8 = 1;
const REDIRECT: u8 = 2;
const MTU_ANSWER: u8 = 3;
const ANNOUNCEMENT_BYTES: usize = 14;
const REDIRECT_BYTES: usize = 46;
const MTU_ANSWER_BYTES: usize = 6;

/// A message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    /// A guest runs at the sender.
    Announcement(Announcement),
    /// A guest has left the sender.
    Redirect(Redirect),
    /// A probe of the path's MTU arrived.
    MtuAnswer {
        /// The probe's id.
        id: u32,
        /// Its length as a UDP payload, in bytes.
        bytes: u16,
    },
}

/// A payload that is not well formed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a malformed control datagram")]
pub struct ControlError;

impl Message {
    /// Writes the message to the beginning of `out`, and returns its length; `None` if there is no
    /// room for it.
    pub fn write(&self, out: &mut [u8]) -> Option<usize> {
        let mut bytes = [0; MESSAGE_BYTES_MAX];
        let (kind, body) = match self {
            Self::Announcement(Announcement { mac, generation }) => {
                bytes[2..8].copy_from_slice(&mac.0);
                bytes[8..16].copy_from_slice(&generation.to_le_bytes());
                (ANNOUNCEMENT, ANNOUNCEMENT_BYTES)
            }
            Self::Redirect(redirect) => {
                bytes[2..8].copy_from_slice(&redirect.mac.0);
                bytes[8..40].copy_from_slice(&redirect.now_at.0);
                bytes[40..48].copy_from_slice(&redirect.generation.to_le_bytes());
                (REDIRECT, REDIRECT_BYTES)
            }
            Self::MtuAnswer { id, bytes: length } => {
                bytes[2..6].copy_from_slice(&id.to_le_bytes());
                bytes[6..8].copy_from_slice(&length.to_le_bytes());
                (MTU_ANSWER, MTU_ANSWER_BYTES)
            }
        };
        bytes[..2].copy_from_slice(&[kind, body as u8]);
        let message = bytes.get(..2 + body)?;
        out.get_mut(..message.len())?.copy_from_slice(message);
        Some(message.len())
    }

    fn read(kind: u8, body: &[u8]) -> Result<Option<Self>, ControlError> {
        let bytes = match kind {
            ANNOUNCEMENT => ANNOUNCEMENT_BYTES,
            REDIRECT => REDIRECT_BYTES,
            MTU_ANSWER => MTU_ANSWER_BYTES,
            _ => return Ok(None),
        };
        if body.len() != bytes {
            return Err(ControlError);
        }
        Self::fields(kind, body).map(Some).ok_or(ControlError)
    }

    fn fields(kind: u8, body: &[u8]) -> Option<Self> {
        let number = |at| Some(u64::from_le_bytes(*body.get(at..)?.first_chunk()?));
        Some(match kind {
            ANNOUNCEMENT => Self::Announcement(Announcement {
                mac: Mac(*body.first_chunk()?),
                generation: number(6)?,
            }),
            REDIRECT => Self::Redirect(Redirect {
                mac: Mac(*body.first_chunk()?),
                now_at: HostId(*body.get(6..)?.first_chunk()?),
                generation: number(38)?,
            }),
            _ => Self::MtuAnswer {
                id: u32::from_le_bytes(*body.first_chunk()?),
                bytes: u16::from_le_bytes(*body.get(4..)?.first_chunk()?),
            },
        })
    }
}

/// Reads the messages of a payload. Calls `each` for each before the first that is malformed.
pub fn read(mut payload: &[u8], mut each: impl FnMut(Message)) -> Result<(), ControlError> {
    for _ in 0..MESSAGES_MAX {
        let Some((&[kind, length], rest)) = payload.split_first_chunk::<2>() else {
            break;
        };
        let length = usize::from(length);
        let body = rest.get(..length).ok_or(ControlError)?;
        Message::read(kind, body)?.into_iter().for_each(&mut each);
        payload = &rest[length..];
    }
    if payload.is_empty() {
        Ok(())
    } else {
        Err(ControlError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn messages() -> [Message; 3] {
        let mac = Mac([2, 0, 0, 0, 0, 9]);
        [
            Message::Announcement(Announcement {
                mac,
                generation: 0x0102,
            }),
            Message::Redirect(Redirect {
                mac,
                now_at: HostId([0xaa; 32]),
                generation: 3,
            }),
            Message::MtuAnswer {
                id: 0x0a0b_0c0d,
                bytes: 1400,
            },
        ]
    }

    fn written() -> Vec<u8> {
        let mut payload = Vec::new();
        for message in messages() {
            let mut out = [0; MESSAGE_BYTES_MAX];
            let length = message.write(&mut out).unwrap();
            assert_eq!(message.write(&mut out[..length - 1]), None);
            payload.extend(&out[..length]);
        }
        payload
    }

    fn read_all(payload: &[u8]) -> (Vec<Message>, Result<(), ControlError>) {
        let mut messages = Vec::new();
        let result = read(payload, |message| messages.push(message));
        (messages, result)
    }

    #[test]
    fn messages_by_hand() {
        let mut expected = vec![1, 14, 2, 0, 0, 0, 0, 9, 2, 1, 0, 0, 0, 0, 0, 0];
        expected.extend([2, 46, 2, 0, 0, 0, 0, 9]);
        expected.extend([0xaa; 32]);
        expected.extend([3, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend([3, 6, 0x0d, 0x0c, 0x0b, 0x0a, 0x78, 5]);
        assert_eq!(written(), expected);
        assert_eq!(read_all(&expected), (messages().to_vec(), Ok(())));
        // Unknown types are skipped.
        expected.splice(16..16, [9, 1, 0]);
        assert_eq!(read_all(&expected), (messages().to_vec(), Ok(())));
        assert_eq!(read_all(&[]), (Vec::new(), Ok(())));
    }

    #[test]
    fn what_is_malformed_is_refused() {
        let whole = written();
        for length in (1..whole.len()).filter(|length| ![16, 64].contains(length)) {
            assert_eq!(read_all(&whole[..length]).1, Err(ControlError), "{length}");
        }
        assert_eq!(read_all(&[1, 13]).1, Err(ControlError));
        assert_eq!(read_all(&[3, 5, 0, 0, 0, 0, 0]).1, Err(ControlError));
        assert_eq!(read_all(&[9, 0].repeat(64)).1, Ok(()));
        assert_eq!(read_all(&[9, 0].repeat(65)).1, Err(ControlError));
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(payload in prop::collection::vec(0..50u8, 0..200)) {
            assert!(read_all(&payload).0.len() <= MESSAGES_MAX);
        }
    }
}
