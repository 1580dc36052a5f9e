//! Counts what a switch did, and why it dropped frames.

/// Why a frame was not forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Its port is gone.
    UnknownPort,
    /// It ends within its header, or names the reserved VLAN.
    Malformed,
    /// It is too long.
    Oversized,
    /// Its source is a group or zero.
    BadSource,
    /// It is for the link only: 01:80:C2:00:00:0X.
    LinkLocal,
    /// Its VLAN is none of the network.
    Vlan,
    /// Its source is pinned to another port.
    Spoofed,
    /// Its source is not pinned to its port, which may send from its own addresses only.
    NotOwnMac,
    /// Its destination is behind the port that it came from.
    SamePort,
    /// It came from another host, and its destination is at another host.
    SplitHorizon,
    /// It came from another host, and its destination has moved away from here.
    Moved,
    /// The port's limit of frames to all stations and unknown addresses.
    FloodLimit,
    /// The port's limit of frames to groups.
    MulticastLimit,
    /// The switch answered it.
    Answered,
    /// It uses the gateway's MAC address or address, and does not come from a gateway.
    GatewaySpoofed,
    /// It goes to the gateway, and there is none here that is meant, or none at all.
    NoGateway,
}

/// The number of reasons.
const REASONS: usize = Reason::NoGateway as usize + 1;

/// What a switch counted since it was made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counters {
    not_forwarded: [u64; REASONS],
    /// Frames that arrived.
    pub frames: u64,
    /// Frames that went to more than one port.
    pub replicated: u64,
    /// Addresses that moved between ports.
    pub moves: u64,
    /// Moves that were refused because the address is held, or has just left this host.
    pub moves_held: u64,
    /// Addresses that were not learned because a table is full.
    pub not_learned: u64,
    /// IP addresses that were not remembered because the table is full.
    pub addresses_full: u64,
    /// IP addresses that two stations claim.
    pub addresses_contested: u64,
    /// Announcements and redirects that took effect.
    pub told: u64,
    /// Announcements and redirects that are older than what is known.
    pub told_stale: u64,
    /// Announcements and redirects that did not come from a host that may send them, name a
    /// station of this host, or are too many.
    pub told_refused: u64,
    /// Outputs that were dropped because nobody took them.
    pub outputs_lost: u64,
}

impl Counters {
    pub(super) fn add(&mut self, reason: Reason) {
        self.not_forwarded[reason as usize] += 1;
    }

    /// Returns the number of frames that were not forwarded for a reason.
    pub fn not_forwarded(&self, reason: Reason) -> u64 {
        self.not_forwarded[reason as usize]
    }

    /// Returns the number of frames that were not forwarded.
    pub fn not_forwarded_total(&self) -> u64 {
        self.not_forwarded.iter().sum()
    }
}
