//! The encoding of messages: postcard (its published wire format 1.0), one message per frame of a
//! channel (`docs/wire.md`, 2.2).
//!
//! A Hello negotiates the version, as on the control connections of agents.

use crate::limits::{
    CANDIDATES_MAX, ENROLMENTS_MAX, GUEST_BYTES_MAX, MESSAGE_BYTES_MAX, PRESENT_NETWORKS_MAX,
    SIGNAL_BYTES_MAX, START_MS_MAX, TEXT_BYTES_MAX,
};
use crate::protocol::{
    Broker, Candidates, Gossip, LeaseRequest, Peer, Refused, Target, ToHost, ToServer,
};
use crate::text::is_name;
use longhaul_protocol::wire;

pub use longhaul_protocol::wire::{Message, WireError, decode, encode};

/// Newest version of the messages.
pub const VERSION: u16 = 1;
/// Oldest supported version.
pub const VERSION_OLDEST: u16 = 1;

fn limit(what: &'static str, value: usize, limit: usize) -> Result<(), WireError> {
    wire::limit(what, value as u64, limit as u64)
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

fn check_enrolments(count: usize) -> Result<(), WireError> {
    limit("the number of enrolments", count, ENROLMENTS_MAX)
}

fn check_refused(refused: &Refused) -> Result<(), WireError> {
    limit("a text", refused.text.len(), TEXT_BYTES_MAX)?;
    let hint = refused.hint.as_ref().map_or(0, String::len);
    limit("a hint", hint, TEXT_BYTES_MAX)
}

impl Message for ToServer {
    const BYTES_MAX: usize = MESSAGE_BYTES_MAX;

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
    const BYTES_MAX: usize = MESSAGE_BYTES_MAX;

    fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Enrolments(enrolments) => check_enrolments(enrolments.len()),
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
    const BYTES_MAX: usize = MESSAGE_BYTES_MAX;

    fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Enrolments { enrolments, .. } => check_enrolments(enrolments.len()),
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
    const BYTES_MAX: usize = MESSAGE_BYTES_MAX;

    fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Enrolments(enrolments) => check_enrolments(enrolments.len()),
            Self::Signal(bytes) => check_signal(bytes),
            Self::Have(_) | Self::Ruleset(_) => Ok(()),
        }
    }
}
