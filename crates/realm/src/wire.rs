//! The encoding of messages: postcard (its published wire format 1.0), one message per frame of a
//! channel (`docs/wire.md`, 2.2).
//!
//! A Hello negotiates the version, as on the control connections of agents.

use crate::limits::{
    ADMISSIONS_MAX, CANDIDATES_MAX, GUEST_BYTES_MAX, MESSAGE_BYTES_MAX, PRESENT_NETWORKS_MAX,
    SIGNAL_BYTES_MAX, START_MS_MAX, TEXT_BYTES_MAX,
};
use crate::protocol::{
    Broker, Candidates, Gossip, LeaseRequest, Peer, Refused, Target, ToHost, ToServer,
};
use crate::text::is_name;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Newest version of the messages.
pub const VERSION: u16 = 1;
/// Oldest supported version.
pub const VERSION_OLDEST: u16 = 1;

/// A reason why bytes are not a message, or one that breaks a limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Longer than any message may be.
    #[error("a message of {bytes} bytes is over the limit of {MESSAGE_BYTES_MAX}")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// Not a message of this version.
    #[error("not a message of rendezvous version {VERSION}: {0}")]
    Malformed(String),
    /// Well formed, but over a limit.
    #[error("{what} is over its limit of {limit}")]
    Limit {
        /// The limited quantity.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
}

/// A type of message.
pub trait Message: Serialize + DeserializeOwned {
    /// Checks the limits of the format. Signatures are checked by who uses them.
    fn check(&self) -> Result<(), WireError>;
}

/// Returns the bytes of a message.
pub fn encode<M: Message>(message: &M) -> Result<Vec<u8>, WireError> {
    message.check()?;
    let bytes =
        postcard::to_stdvec(message).map_err(|error| WireError::Malformed(error.to_string()))?;
    match bytes.len() <= MESSAGE_BYTES_MAX {
        true => Ok(bytes),
        false => Err(WireError::TooLong { bytes: bytes.len() }),
    }
}

/// Parses a message.
pub fn decode<M: Message>(bytes: &[u8]) -> Result<M, WireError> {
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(WireError::TooLong { bytes: bytes.len() });
    }
    let (message, rest) = postcard::take_from_bytes::<M>(bytes)
        .map_err(|error| WireError::Malformed(error.to_string()))?;
    if !rest.is_empty() {
        let text = format!("{} bytes follow its end", rest.len());
        return Err(WireError::Malformed(text));
    }
    message.check()?;
    Ok(message)
}

fn limit(what: &'static str, value: usize, limit: usize) -> Result<(), WireError> {
    match value <= limit {
        true => Ok(()),
        false => Err(WireError::Limit { what, limit }),
    }
}

fn check_candidates(candidates: &Candidates) -> Result<(), WireError> {
    let count = candidates.candidates.len();
    limit("the number of candidates", count, CANDIDATES_MAX)
}

fn check_networks(count: usize) -> Result<(), WireError> {
    limit("the number of networks", count, PRESENT_NETWORKS_MAX)
}

fn check_peer(peer: &Peer) -> Result<(), WireError> {
    check_candidates(&peer.candidates)?;
    check_networks(peer.networks.len())
}

fn check_signal(bytes: &[u8]) -> Result<(), WireError> {
    limit("a signal", bytes.len(), SIGNAL_BYTES_MAX)
}

fn check_target(target: &Target) -> Result<(), WireError> {
    match target {
        Target::Name(name) if !is_name(name) => {
            Err(WireError::Malformed("a name of no host".to_owned()))
        }
        _ => Ok(()),
    }
}

fn check_lease(lease: &LeaseRequest) -> Result<(), WireError> {
    limit("a guest's name", lease.guest.len(), GUEST_BYTES_MAX)
}

fn check_admissions(count: usize) -> Result<(), WireError> {
    limit("the number of admissions", count, ADMISSIONS_MAX)
}

fn check_refused(refused: &Refused) -> Result<(), WireError> {
    limit("a text", refused.text.len(), TEXT_BYTES_MAX)?;
    let hint = refused.hint.as_ref().map_or(0, String::len);
    limit("a hint", hint, TEXT_BYTES_MAX)
}

impl Message for ToServer {
    fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Register(register) => {
                check_candidates(&register.candidates)?;
                check_networks(register.networks.len())
            }
            Self::Candidates(candidates) => check_candidates(candidates),
            Self::Networks(networks) => check_networks(networks.len()),
            Self::Introduce { target, .. } => check_target(target),
            Self::Signal { bytes, .. } => check_signal(bytes),
            Self::AcquireLease(lease) | Self::ReleaseLease(lease) => check_lease(lease),
            Self::Ruleset(_)
            | Self::Join(_)
            | Self::OpenRelay { .. }
            | Self::CloseRelay { .. }
            | Self::Bye => Ok(()),
        }
    }
}

impl Message for ToHost {
    fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Admissions(admissions) => check_admissions(admissions.len()),
            Self::Introduced { peer, start_ms, .. } => {
                limit("a start", (*start_ms).into(), START_MS_MAX.into())?;
                check_peer(peer)
            }
            Self::Signal { bytes, .. } => check_signal(bytes),
            Self::Refused(refused) => check_refused(refused),
            Self::Registered { .. }
            | Self::Ruleset(_)
            | Self::Joined
            | Self::RelayOpened { .. }
            | Self::RelayClosed { .. }
            | Self::Lease { .. }
            | Self::Bye => Ok(()),
        }
    }
}

impl Message for Broker {
    fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Admissions { admissions, .. } => check_admissions(admissions.len()),
            Self::Find { target, from, .. } => {
                check_target(target)?;
                check_peer(from)
            }
            Self::Found { peer, .. } => check_peer(peer),
            Self::Signal { bytes, .. } => check_signal(bytes),
            Self::Have(_) | Self::Ruleset(_) | Self::NotHere { .. } => Ok(()),
        }
    }
}

impl Message for Gossip {
    fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Admissions(admissions) => check_admissions(admissions.len()),
            Self::Have(_) | Self::Ruleset(_) => Ok(()),
        }
    }
}
