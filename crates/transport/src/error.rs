//! Defines the reasons for the end of connections.

use crate::hello::Incompatible;
use crate::quic;
use crate::trust::TrustError;
use longhaul_protocol::HostId;
use std::fmt;

/// The code with which an agent closes a connection. The numbers are part of the wire format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseCode {
    /// The work is done.
    Done,
    /// The peer's key is not in the trust store.
    IdentityUnknown,
    /// The peer is known, but its scope does not allow the request.
    NotAllowed,
    /// No protocol version is common to both sides.
    Incompatible,
    /// The opening exchange was malformed or late.
    BadOpening,
    /// The token of a bulk connection is unknown, used, expired or another peer's.
    BadToken,
    /// The peer broke the wire format or one of its limits.
    Violation,
    /// The agent has its maximum number of connections.
    Busy,
    /// The agent stops.
    ShuttingDown,
    /// A number that this version does not know.
    Other(u64),
}

impl CloseCode {
    pub(crate) fn number(self) -> u64 {
        match self {
            Self::Done => 0,
            Self::IdentityUnknown => 1,
            Self::NotAllowed => 2,
            Self::Incompatible => 3,
            Self::BadOpening => 4,
            Self::BadToken => 5,
            Self::Violation => 6,
            Self::Busy => 7,
            Self::ShuttingDown => 8,
            Self::Other(number) => number,
        }
    }

    pub(crate) fn from_number(number: u64) -> Self {
        match number {
            0 => Self::Done,
            1 => Self::IdentityUnknown,
            2 => Self::NotAllowed,
            3 => Self::Incompatible,
            4 => Self::BadOpening,
            5 => Self::BadToken,
            6 => Self::Violation,
            7 => Self::Busy,
            8 => Self::ShuttingDown,
            other => Self::Other(other),
        }
    }

    pub(crate) fn varint(self) -> quic::VarInt {
        quic::VarInt::from_u64(self.number()).unwrap_or(quic::VarInt::MAX)
    }
}

/// Why a connection has ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// The other agent closed it, with a reason.
    #[error("the other host closed the connection: {reason}")]
    ClosedByPeer {
        /// The code of the reason.
        code: CloseCode,
        /// The reason in words.
        reason: String,
    },
    /// This agent closed it.
    #[error("this host closed the connection: {reason}")]
    ClosedHere {
        /// The reason in words.
        reason: String,
    },
    /// The peer sent nothing for the idle time-out.
    #[error("the connection timed out: nothing was heard from the other host")]
    TimedOut,
    /// The peer does not know the connection: its agent was restarted.
    #[error("the connection was reset: the other host's agent was restarted")]
    Reset,
    /// The layer below (TLS, QUIC) failed.
    #[error("the connection failed: {0}")]
    Failed(String),
}

impl LinkError {
    /// Returns whether redialling may help: the link or the peer's process failed, and neither side
    /// refused.
    pub fn may_redial(&self) -> bool {
        match self {
            Self::TimedOut | Self::Reset | Self::Failed(_) => true,
            Self::ClosedByPeer { code, .. } => *code == CloseCode::ShuttingDown,
            Self::ClosedHere { .. } => false,
        }
    }
}

/// The maximum length of a reason that is sent or shown, in bytes.
pub(crate) const REASON_BYTES_MAX: usize = 512;

impl From<quic::ConnectionError> for LinkError {
    fn from(error: quic::ConnectionError) -> Self {
        match error {
            quic::ConnectionError::ApplicationClosed(close) => {
                let cut = close.reason.len().min(REASON_BYTES_MAX);
                let reason = match &close.reason[..cut] {
                    [] => "no reason given".to_owned(),
                    reason => printable(reason),
                };
                Self::ClosedByPeer {
                    code: CloseCode::from_number(close.error_code.into_inner()),
                    reason,
                }
            }
            quic::ConnectionError::TimedOut => Self::TimedOut,
            quic::ConnectionError::Reset => Self::Reset,
            quic::ConnectionError::LocallyClosed => Self::ClosedHere {
                reason: "no longer needed".to_owned(),
            },
            other => Self::Failed(printable(other.to_string().as_bytes())),
        }
    }
}

/// Returns a peer's text without characters that could upset a terminal.
pub(crate) fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

/// Why a message could not be sent or received.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChannelError {
    /// The connection has ended.
    #[error(transparent)]
    Lost(#[from] LinkError),
    /// The message is larger than the wire format allows.
    #[error("a message of {bytes} bytes is over the limit of {limit} bytes")]
    TooLarge {
        /// The announced length.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// The channel ended in the middle of a message, or the peer reset it.
    #[error("the channel ended in the middle of a message")]
    Cut,
}

/// Why no connection to a host could be made.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ConnectError {
    /// The trust store has no such name.
    #[error(
        "host `{0}` is not trusted here; compare its fingerprint and run `longhaul host trust`"
    )]
    NotTrusted(String),
    /// The trust store could not be read.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// No address of the host answered.
    #[error("no answer from host `{name}`: {}", Tried(.tried))]
    Unreachable {
        /// The host.
        name: String,
        /// Each address tried, with its result.
        tried: Vec<(String, String)>,
    },
    /// The host has no address, and no rendezvous server has introduced it.
    #[error("no way to host `{0}` was found")]
    NoWay(String),
    /// A host with another key answers at this address.
    #[error(
        "the identity of host `{name}` changed: was {expected}, now {found} (at {address}); \
         compare the fingerprint with the one that `longhaul host` shows there, and if the change \
         is right run `longhaul host trust {name} {found} {address} --replace`"
    )]
    IdentityChanged {
        /// The host.
        name: String,
        /// The identity in the trust store.
        expected: HostId,
        /// The identity that answered.
        found: HostId,
        /// The address that answered.
        address: String,
    },
    /// The peer refused this host.
    #[error("host `{name}` refused: {reason}")]
    Refused {
        /// The host.
        name: String,
        /// The code of the reason.
        code: CloseCode,
        /// The reason in words.
        reason: String,
    },
    /// No protocol version is common to both.
    #[error(transparent)]
    Incompatible(#[from] Incompatible),
    /// The connection broke while it was being made.
    #[error("while connecting to host `{name}`: {error}")]
    Lost {
        /// The host.
        name: String,
        /// The error.
        error: LinkError,
    },
}

struct Tried<'a>(&'a [(String, String)]);

impl fmt::Display for Tried<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("it has no address; add one with `longhaul host trust`");
        }
        for (index, (address, what)) in self.0.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            write!(f, "{comma}{address}: {what}")?;
        }
        Ok(())
    }
}

/// Why a frame could not be sent or received on a bulk connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BulkError {
    /// The connection has ended. Frames without an acknowledgement are pending again.
    #[error(transparent)]
    Lost(#[from] LinkError),
    /// The frame or message is larger than the wire format allows.
    #[error("{bytes} bytes are over the limit of {limit} bytes")]
    TooLarge {
        /// Its length.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// No peer presented the token in time.
    #[error("the bulk connection was not made within {0} s")]
    NotMade(u64),
    /// Too many bulk connections are expected at once.
    #[error("too many bulk connections are expected at once (limit {0})")]
    TooMany(usize),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_keep_their_numbers() {
        for number in 0..12 {
            assert_eq!(CloseCode::from_number(number).number(), number);
        }
        assert_eq!(CloseCode::from_number(5), CloseCode::BadToken);
    }

    #[test]
    fn a_peers_reason_cannot_upset_a_terminal() {
        assert_eq!(printable(b"a\x1b[2Jb\n\xff"), "a?[2Jb?\u{fffd}");
    }
}
