//! Addresses under which a host may answer (RFC 8445, section 5.1).

use crate::tuning::CANDIDATES_MAX;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// Where an address comes from. Each has the type preference of RFC 8445 (5.1.2.2) that it is
/// nearest to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Origin {
    /// An interface of the host.
    Host,
    /// An operator.
    Configured,
    /// A port-mapping protocol (UPnP, NAT-PMP, PCP).
    PortMapped,
    /// The source of a probe of the other host. Never offered.
    PeerReflexive,
    /// A STUN server's answer.
    Reflexive,
    /// A port that a NAT probably maps next.
    Predicted,
}

impl Origin {
    /// Returns the type preference.
    pub fn preference(self) -> u8 {
        match self {
            Self::Host => 126,
            Self::Configured => 124,
            Self::PortMapped => 120,
            Self::PeerReflexive => 110,
            Self::Reflexive => 100,
            Self::Predicted => 50,
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::Configured => "configured",
            Self::PortMapped => "port-mapped",
            Self::PeerReflexive => "peer-reflexive",
            Self::Reflexive => "reflexive",
            Self::Predicted => "predicted",
        })
    }
}

/// An address under which a host may answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Candidate {
    /// Where it comes from.
    pub origin: Origin,
    /// The address. IPv4 addresses are not mapped to IPv6.
    pub address: SocketAddr,
}

impl Candidate {
    /// Returns the priority (RFC 8445, 5.1.2.1, with one component): higher is better. IPv6 comes
    /// before IPv4 of the same origin.
    pub fn priority(&self) -> u32 {
        let family = if self.address.is_ipv6() {
            0xffff
        } else {
            0x7fff
        };
        (u32::from(self.origin.preference()) << 24) + (family << 8) + 255
    }
}

/// Returns whether a datagram may be sent to this address at all. Addresses with a scope are left
/// out: their zone is only known to the host that offers them.
pub fn is_usable(address: SocketAddr) -> bool {
    let usable = match address.ip() {
        IpAddr::V4(ip) => {
            let other = ip.is_unspecified() || ip.is_loopback() || ip.is_link_local();
            !(other || ip.is_multicast() || ip.is_broadcast())
        }
        IpAddr::V6(ip) => {
            let other = ip.is_unspecified() || ip.is_loopback() || ip.is_unicast_link_local();
            !(other || ip.is_multicast() || ip.to_ipv4_mapped().is_some())
        }
    };
    usable && address.port() != 0
}

/// Returns whether an address is unique in the Internet only behind a NAT: private (RFC 1918),
/// shared (RFC 6598) or unique local (RFC 4193).
pub fn is_private(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => {
            let [a, b, ..] = ip.octets();
            ip.is_private() || a == 100 && b & 0xc0 == 64
        }
        IpAddr::V6(ip) => ip.is_unique_local(),
    }
}

/// Orders candidates by priority, the best first, keeps the best origin of each address, and drops
/// what cannot be used or is too much.
pub fn ordered(mut candidates: Vec<Candidate>) -> Vec<Candidate> {
    candidates.retain(|candidate| is_usable(candidate.address));
    candidates.sort_by_key(|candidate| std::cmp::Reverse(candidate.priority()));
    let mut kept: Vec<Candidate> = Vec::new();
    for candidate in candidates {
        let known = kept.iter().any(|other| other.address == candidate.address);
        if !known && kept.len() < CANDIDATES_MAX {
            kept.push(candidate);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn candidate(origin: Origin, address: &str) -> Candidate {
        let address = address.parse().unwrap();
        Candidate { origin, address }
    }

    #[test]
    fn an_address_is_offered_once_with_its_best_origin() {
        let ordered = ordered(vec![
            candidate(Origin::Reflexive, "198.51.100.1:4000"),
            candidate(Origin::Predicted, "198.51.100.1:4001"),
            candidate(Origin::Host, "198.51.100.1:4000"),
            candidate(Origin::Host, "[2001:db8::1]:4000"),
            candidate(Origin::Host, "[fe80::1]:4000"),
            candidate(Origin::Host, "127.0.0.1:4000"),
            candidate(Origin::Host, "192.0.2.1:0"),
        ]);
        let expected = vec![
            candidate(Origin::Host, "[2001:db8::1]:4000"),
            candidate(Origin::Host, "198.51.100.1:4000"),
            candidate(Origin::Predicted, "198.51.100.1:4001"),
        ];
        assert_eq!(ordered, expected);
    }

    #[test]
    fn shared_addresses_are_private() {
        for (ip, private) in [
            ("100.64.0.1", true),
            ("100.128.0.1", false),
            ("10.0.0.1", true),
        ] {
            assert_eq!(is_private(ip.parse().unwrap()), private, "{ip}");
        }
    }

    proptest! {
        #[test]
        fn candidates_are_few_different_and_ordered(
            addresses in prop::collection::vec((any::<u32>(), any::<u16>(), 0..6_usize), 0..60),
        ) {
            let origins = [
                Origin::Host,
                Origin::Configured,
                Origin::PortMapped,
                Origin::PeerReflexive,
                Origin::Reflexive,
                Origin::Predicted,
            ];
            let candidates = addresses.iter().map(|(ip, port, origin)| Candidate {
                origin: origins[*origin],
                address: SocketAddr::from((std::net::Ipv4Addr::from(*ip), *port)),
            });
            let ordered = ordered(candidates.collect());
            prop_assert!(ordered.len() <= CANDIDATES_MAX);
            for (index, one) in ordered.iter().enumerate() {
                prop_assert!(is_usable(one.address));
                for other in &ordered[index + 1..] {
                    prop_assert!(one.address != other.address);
                    prop_assert!(one.priority() >= other.priority());
                }
            }
        }
    }
}
