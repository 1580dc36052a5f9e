//! Holds the limits of realms and of the rendezvous protocol. `docs/rendezvous.md` states each.

/// Largest signed ruleset, in bytes.
pub const RULESET_BYTES_MAX: usize = 1 << 20;
/// Most hosts in a ruleset.
pub const HOSTS_MAX: usize = 1024;
/// Most networks in a ruleset.
pub const NETWORKS_MAX: usize = 256;
/// Most members of all networks of a ruleset together.
pub const NETWORK_MEMBERS_MAX: usize = 8192;
/// Most removed hosts in a ruleset, and most revoked tokens.
pub const TOMBSTONES_MAX: usize = 4096;
/// Most rendezvous servers of a realm.
pub const SERVERS_MAX: usize = 8;
/// Most addresses of one server.
pub const SERVER_ADDRESSES_MAX: usize = 8;
/// Longest address of a server (`name:port`), in bytes.
pub const ADDRESS_BYTES_MAX: usize = 261;
/// Longest name of a host, a site or a network, in bytes.
pub const NAME_BYTES_MAX: usize = 63;
/// Longest name of a guest in a lease, in bytes.
pub const GUEST_BYTES_MAX: usize = 255;
/// Most ranges of VLANs of one network.
pub const VLAN_RANGES_MAX: usize = 64;
/// Most addresses of a gateway, and most sites that have it.
pub const GATEWAY_ADDRESSES_MAX: usize = 4;
/// Most sites that have a gateway.
pub const GATEWAY_SITES_MAX: usize = 64;
/// Smallest MTU of a network: IPv4's minimum (RFC 791).
pub const MTU_MIN: u16 = 68;
/// Longest time between issue and expiry of a ruleset, in seconds: 400 days.
pub const RULESET_LIFETIME_S_MAX: u64 = 400 * DAY_S;
/// How long connected hosts stay connected under an expired ruleset, in seconds.
pub const EXPIRED_GRACE_S: u64 = DAY_S;
/// Difference of clocks that is not reported, in seconds.
pub const CLOCK_TOLERANCE_S: u64 = 300;
/// Longest time in which a token can be used, in seconds.
pub const TOKEN_LIFETIME_S_MAX: u64 = 30 * DAY_S;
/// Longest time between the issue of a token and the end of the membership that it gives without a
/// ruleset, in seconds.
pub const CONFIRM_S_MAX: u64 = 90 * DAY_S;
/// Largest signed authorisation, in bytes.
pub const AUTHORISATION_BYTES_MAX: usize = 1024;
/// Most networks that a token names.
pub const TOKEN_NETWORKS_MAX: usize = 16;
/// Longest text of a token, in characters.
pub const TOKEN_CHARS_MAX: usize = 4096;
/// Most tokens with enrolments that a host or server remembers for one realm.
pub const ENROLLED_TOKENS_MAX: usize = 256;
/// Most enrolments in one message.
pub const ENROLMENTS_MAX: usize = 2 * ENROLLED_TOKENS_MAX;
/// Most candidates of a host in one message.
pub const CANDIDATES_MAX: usize = 16;
/// Most networks that a host reports as present.
pub const PRESENT_NETWORKS_MAX: usize = NETWORKS_MAX;
/// Largest message of the rendezvous protocol, in bytes.
pub const MESSAGE_BYTES_MAX: usize = RULESET_BYTES_MAX + 1024;
/// Longest text or hint in a message, in bytes.
pub const TEXT_BYTES_MAX: usize = 512;
/// Largest signal that a server passes from one host to another, in bytes.
pub const SIGNAL_BYTES_MAX: usize = 1200;
/// Shortest and longest life of a registration, in seconds.
pub const TTL_S: std::ops::RangeInclusive<u16> = 10..=600;
/// Latest start of probes after an introduction, in milliseconds.
pub const START_MS_MAX: u16 = 2000;
/// Largest datagram to a relay, in bytes, header included.
pub const RELAY_DATAGRAM_BYTES_MAX: usize = 1500;

const DAY_S: u64 = 86_400;
