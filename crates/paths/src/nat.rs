//! What a host finds out about the NATs before it (RFC 4787, RFC 5780).
//!
//! Several servers are asked from one socket. If all see the same address, the mapping does not
//! depend on the destination. Whether a NAT filters by address or by port cannot be found out
//! without a server that answers from another address (RFC 5780, 4.4); both sides punch as if it
//! filtered by port. Hairpinning is not tested either: the probes of a round find it.

use crate::tuning::PREDICTED_MAX;
use std::fmt;
use std::net::SocketAddr;

/// The largest step between the ports of two mappings that counts as a sequence.
const STEP_MAX: i32 = 16;

/// How the NATs before a socket map it, as far as it is known (RFC 4787, section 4.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Mapping {
    /// Fewer than two servers have answered.
    #[default]
    Unknown,
    /// A server sees an address of the host itself. A firewall may filter.
    NotTranslated,
    /// All destinations see the same address.
    EndpointIndependent,
    /// Each destination sees another address or port: a symmetric NAT.
    Dependent {
        /// The step from one mapping's port to the next, if it is constant.
        step: Option<i16>,
    },
}

impl Mapping {
    /// Returns whether each destination sees another address or port.
    pub fn is_dependent(self) -> bool {
        matches!(self, Self::Dependent { .. })
    }
}

impl fmt::Display for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("unknown"),
            Self::NotTranslated => f.write_str("no NAT"),
            Self::EndpointIndependent => f.write_str("one port for all destinations"),
            Self::Dependent { step: None } => f.write_str("another port for each destination"),
            Self::Dependent { step: Some(step) } => {
                write!(f, "another port for each destination, in steps of {step}")
            }
        }
    }
}

/// Classifies the mapping of a socket. `seen` has one address for each server that answered, in
/// the order in which they were first asked; `own` are the addresses of the host.
pub fn classify(own: &[SocketAddr], seen: &[SocketAddr]) -> Mapping {
    let Some((first, others)) = seen.split_first() else {
        return Mapping::Unknown;
    };
    if own.contains(first) && others.iter().all(|other| other == first) {
        return Mapping::NotTranslated;
    }
    if others.is_empty() {
        return Mapping::Unknown;
    }
    if others.iter().all(|other| other == first) {
        return Mapping::EndpointIndependent;
    }
    let one_ip = others.iter().all(|other| other.ip() == first.ip());
    let steps = seen.windows(2).map(|two| step(two[0], two[1]));
    let mut steps = steps.collect::<Vec<_>>();
    steps.dedup();
    let step = match steps[..] {
        [step] if one_ip && step != 0 && step.abs() <= STEP_MAX => i16::try_from(step).ok(),
        _ => None,
    };
    Mapping::Dependent { step }
}

fn step(from: SocketAddr, to: SocketAddr) -> i32 {
    i32::from(to.port()) - i32::from(from.port())
}

/// Returns the addresses that the next mappings after `last` probably get.
pub fn predict(last: SocketAddr, step: i16) -> Vec<SocketAddr> {
    let ports = (1..=PREDICTED_MAX as i32).map(|n| i32::from(last.port()) + n * i32::from(step));
    let valid = ports.filter_map(|port| u16::try_from(port).ok().filter(|port| *port != 0));
    valid.map(|port| SocketAddr::new(last.ip(), port)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        let parsed = texts.iter().map(|text| text.parse());
        parsed.collect::<Result<_, _>>().unwrap()
    }

    #[test]
    fn mappings_are_told_apart() {
        let own = addresses(&["192.168.1.2:4000", "198.51.100.9:4000"]);
        let cases: [(&[&str], Mapping); 8] = [
            (&[], Mapping::Unknown),
            (&["203.0.113.1:4000"], Mapping::Unknown),
            (&["198.51.100.9:4000"], Mapping::NotTranslated),
            (
                &["203.0.113.1:4000", "203.0.113.1:4000"],
                Mapping::EndpointIndependent,
            ),
            (
                &["203.0.113.1:4000", "203.0.113.1:4001", "203.0.113.1:4002"],
                Mapping::Dependent { step: Some(1) },
            ),
            (
                &["203.0.113.1:4000", "203.0.113.1:4001", "203.0.113.1:4004"],
                Mapping::Dependent { step: None },
            ),
            (
                &["203.0.113.1:4000", "203.0.113.1:9999"],
                Mapping::Dependent { step: None },
            ),
            (
                &["203.0.113.1:4000", "203.0.113.2:4001"],
                Mapping::Dependent { step: None },
            ),
        ];
        for (seen, mapping) in cases {
            assert_eq!(classify(&own, &addresses(seen)), mapping, "{seen:?}");
        }
    }

    #[test]
    fn predicted_ports_stay_in_range() {
        let last = "203.0.113.1:65534".parse().unwrap();
        assert_eq!(predict(last, 1), addresses(&["203.0.113.1:65535"]));
        assert_eq!(predict(last, -1).len(), PREDICTED_MAX);
    }
}
