//! Timers and limits, with their reasons. `docs/paths.md` has them in one table.

use std::time::Duration;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// The maximum number of candidates that a host offers or accepts.
pub const CANDIDATES_MAX: usize = 16;
/// The maximum number of predicted ports among them.
pub const PREDICTED_MAX: usize = 6;
/// The maximum number of address pairs of one peer, including those that its probes reveal.
pub const PAIRS_MAX: usize = 32;
/// The maximum number of probes of one peer that wait for an acknowledgement.
pub const PROBES_MAX: usize = 512;
/// The maximum number of servers of a host.
pub const SERVERS_MAX: usize = 8;
/// The maximum number of addresses of one server.
pub const ADDRESSES_PER_SERVER_MAX: usize = 4;
/// The maximum number of probes of one peer that are acknowledged in a second, on average.
pub const ACKS_PER_SECOND_MAX: u32 = 100;
/// The maximum number of probes that are acknowledged at once.
pub const ACKS_BURST_MAX: u32 = 20;
/// Ports below are not mapped by NATs (RFC 4787, REQ-3) and not probed by a search.
pub const FIRST_MAPPED_PORT: u16 = 1024;

/// Timers and limits that tests change. [`Tuning::default`] has the values of the product.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tuning {
    /// Time between two probes to one peer in a round. RFC 8445 (14.2) has 50 ms for flows of a
    /// media session; probes have about 100 bytes, and 40 kbit/s disturb no migration.
    pub pace: Duration,
    /// Time between any two probes of this host: the least that RFC 8445 (14.2) allows.
    pub host_pace: Duration,
    /// How often a round of hole punching probes each pair.
    pub sweeps: u32,
    /// Time from the start of one sweep to the next; it is multiplied by the number of the sweep.
    pub sweep_gap: Duration,
    /// How long a round goes on after the first pair has worked, since others may be better.
    pub settle: Duration,
    /// Time between probes of a pair that the other host's probe has revealed.
    pub triggered_gap: Duration,
    /// The number of probes of such a pair.
    pub triggered_tries: u8,
    /// The number of acknowledgements after which a pair may carry data.
    pub promote_acks: u32,
    /// Idle time of the used path after which it is probed: the pulse of paper 004. It is left out
    /// while there is traffic in both directions.
    pub pulse: Duration,
    /// Time between probes of the used path while there is traffic.
    pub check: Duration,
    /// Data was sent for so long and nothing came back: the path is probed.
    pub suspect_after: Duration,
    /// Time between probes of a proved path that is not used. NATs forget after 30 s or later.
    pub standby_pulse: Duration,
    /// The number of proved paths that are kept beside the used one.
    pub standbys: usize,
    /// The least time that a proved path has to acknowledge a probe; twice the round trip if that
    /// is more.
    pub probe_timeout: Duration,
    /// A path is dead after this number of probes in sequence without an acknowledgement.
    pub dead_after: u32,
    /// How long an acknowledgement counts.
    pub probe_lifetime: Duration,
    /// A direct path replaces another one if its latency is lower by this and by a fifth.
    pub margin: Duration,
    /// Least time between two such changes.
    pub hold: Duration,
    /// Latency that a path in one local network may have more than others.
    pub bonus_local: Duration,
    /// Latency that IPv6 may have more than IPv4: it has no translation that can be lost.
    pub bonus_ipv6: Duration,
    /// From a change of addresses to the next round: several changes come together.
    pub gather: Duration,
    /// From the end of the first failed round to the next one; doubles each time.
    pub retry: Duration,
    /// The longest time between rounds of a relayed peer.
    pub retry_max: Duration,
    /// The longest time where the NATs leave no hope, which only new facts can change.
    pub hopeless_retry_max: Duration,
    /// How long an answer to a call is awaited; twice the round trips to the server if more.
    pub call_timeout: Duration,
    /// How often a call is sent.
    pub calls: u32,
    /// The number of sockets that the symmetric side of a search opens. With 256 of 64512 ports
    /// mapped, 253 probes hit one on average.
    pub search_sockets: u16,
    /// The number of ports that the other side probes: all miss with a probability of 0.03 %.
    pub search_probes: u32,
    /// Time between two of these probes.
    pub search_pace: Duration,
    /// The symmetric side waits so long with its sockets: all probes, and their acknowledgements.
    pub search_time: Duration,
    /// The symmetric side renews its mappings: Linux forgets unanswered ones after 30 s.
    pub search_renew: Duration,
    /// Time until a host that is searching for another peer is asked again for a search.
    pub search_turn: Duration,
    /// Time between two searches for one peer; doubles each time.
    pub search_retry: Duration,
    /// The longest time between two searches for one peer.
    pub search_retry_max: Duration,
    /// Time between two questions to one address of a server (RFC 8445, section 11).
    pub stun_interval: Duration,
    /// Time until the first repetition of a question (RFC 8489, 6.2.1); doubles once.
    pub stun_timeout: Duration,
    /// A server is down after this number of questions in sequence without an answer.
    pub stun_tries: u32,
    /// Time between questions to a server that is down; doubles up to `down_retry_max`.
    pub down_retry: Duration,
    /// The longest time between questions to a server that is down.
    pub down_retry_max: Duration,
    /// Without an answer over UDP for so long, the relay is also reached over TCP.
    pub tcp_after: Duration,
    /// TCP is closed when UDP has worked for so long.
    pub tcp_linger: Duration,
    /// A relay that does not deliver is avoided for so long, if there is another one.
    pub avoid: Duration,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            pace: ms(20),
            host_pace: ms(5),
            sweeps: 6,
            sweep_gap: ms(200),
            settle: ms(1000),
            triggered_gap: ms(250),
            triggered_tries: 6,
            promote_acks: 2,
            pulse: ms(5000),
            check: ms(30_000),
            suspect_after: ms(1000),
            standby_pulse: ms(20_000),
            standbys: 2,
            probe_timeout: ms(500),
            dead_after: 5,
            probe_lifetime: ms(3000),
            margin: ms(5),
            hold: ms(10_000),
            bonus_local: ms(20),
            bonus_ipv6: ms(10),
            gather: ms(300),
            retry: ms(2000),
            retry_max: ms(60_000),
            hopeless_retry_max: ms(300_000),
            call_timeout: ms(1000),
            calls: 3,
            search_sockets: 256,
            search_probes: 2048,
            search_pace: ms(10),
            search_time: ms(30_000),
            search_renew: ms(12_000),
            search_turn: ms(6_000),
            search_retry: ms(60_000),
            search_retry_max: ms(600_000),
            stun_interval: ms(15_000),
            stun_timeout: ms(500),
            stun_tries: 5,
            down_retry: ms(2000),
            down_retry_max: ms(60_000),
            tcp_after: ms(1000),
            tcp_linger: ms(10_000),
            avoid: ms(30_000),
        }
    }
}
