//! What two hosts say to each other about their paths, through a rendezvous server.
//!
//! The protocol of the rendezvous encodes these types. A message has at most [`CANDIDATES_MAX`]
//! candidates, so about 400 bytes. Its decoder drops unknown origins of later versions, and takes
//! an unknown plan as [`Plan::Punch`].
//!
//! [`CANDIDATES_MAX`]: crate::tuning::CANDIDATES_MAX

use crate::candidate::Candidate;
use crate::nat::Mapping;
use std::time::Duration;

/// What a host knows about its own addresses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Offer {
    /// The addresses, the best first.
    pub candidates: Vec<Candidate>,
    /// How its NATs map IPv4. IPv6 is taken as not translated.
    pub mapping: Mapping,
    /// No server answers over UDP.
    pub udp_blocked: bool,
}

/// What both hosts do in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Plan {
    /// Each probes the other's candidates.
    Punch,
    /// The birthday search: the host with the symmetric NAT opens many sockets, the other one
    /// probes random ports.
    Search,
}

/// The two messages of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Asks for a round.
    Call,
    /// Agrees to a round.
    Answer {
        /// From the sending of this message until the sender begins. The receiver begins when
        /// this message arrives, so both begin at once.
        start_in: Duration,
    },
}

/// A message to the other host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Call or answer.
    pub kind: Kind,
    /// Identifies the sender's [`Paths`](crate::Paths); another one after a restart.
    pub instance: u64,
    /// The caller's number of the round.
    pub round: u32,
    /// What is to be done. That of the answer is valid.
    pub plan: Plan,
    /// The sender's round trip to the server that carries the message; zero if unknown.
    pub round_trip: Duration,
    /// The sender's addresses now.
    pub offer: Offer,
}
