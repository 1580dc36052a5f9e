//! Defines how a site is attached to the Internet, and its text form: `2*port-restricted`,
//! `full-cone/symmetric`, `ipv6`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The maximum number of hosts of a site.
pub const HOSTS_MAX: usize = 4;
/// The maximum number of NATs between a host and the Internet: the site's and its carrier's.
const NATS_MAX: usize = 2;

/// What a router does to IPv4 between its inside and its outside, with the names of RFC 3489.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Nat {
    /// It only forwards: the hosts have public addresses, and nothing is filtered.
    None,
    /// Mapping and filtering are independent of the far end.
    FullCone,
    /// The mapping is independent of the far end. A far end gets through if the host has sent to
    /// its address.
    Restricted,
    /// The same, if the host has sent to its address and port.
    PortRestricted,
    /// Each far end has a mapping of its own, and only it gets through.
    Symmetric,
    /// A NAT for TCP. UDP is dropped in both directions, of IPv6 too.
    NoUdp,
}

/// All kinds, in the order of their names in the help.
pub const NATS: [Nat; 6] = [
    Nat::None,
    Nat::FullCone,
    Nat::Restricted,
    Nat::PortRestricted,
    Nat::Symmetric,
    Nat::NoUdp,
];

impl Nat {
    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::FullCone => "full-cone",
            Self::Restricted => "restricted",
            Self::PortRestricted => "port-restricted",
            Self::Symmetric => "symmetric",
            Self::NoUdp => "no-udp",
        }
    }
}

impl fmt::Display for Nat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A site: its hosts, and what is between them and the Internet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// The number of hosts.
    pub hosts: usize,
    /// IPv4: the site's router, then its carrier's. Empty: the site has no IPv4.
    pub v4: Vec<Nat>,
    /// IPv6 without NAT. A firewall at the site lets in only what belongs to connections from
    /// inside, unless the site has public IPv4 addresses: then there is no firewall.
    pub v6: bool,
}

/// Why a text does not describe a site.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "site `{text}`: {reason} (a site is none, full-cone, restricted, port-restricted, symmetric, \
     no-udp or ipv6; KIND/KIND has a carrier's NAT behind the site's, KIND+ipv6 has both \
     protocols, 2*KIND has two hosts)"
)]
pub struct ParseAccessError {
    text: String,
    reason: String,
}

impl Access {
    /// Returns a site of one host behind this.
    pub fn behind(nat: Nat) -> Self {
        Self {
            hosts: 1,
            v4: vec![nat],
            v6: false,
        }
    }

    /// Returns a public site of one host with both protocols, without a firewall.
    pub fn public() -> Self {
        Self {
            v6: true,
            ..Self::behind(Nat::None)
        }
    }

    /// Returns whether its hosts have public IPv4 addresses.
    pub fn is_public(&self) -> bool {
        self.v4 == [Nat::None]
    }
}

impl FromStr for Access {
    type Err = ParseAccessError;

    fn from_str(text: &str) -> Result<Self, ParseAccessError> {
        parse(text.trim()).map_err(|reason| ParseAccessError {
            text: text.chars().take(80).collect(),
            reason,
        })
    }
}

fn parse(text: &str) -> Result<Access, String> {
    let (hosts, rest) = match text.split_once('*') {
        Some((number, rest)) => match number.parse::<usize>() {
            Ok(number) if (1..=HOSTS_MAX).contains(&number) => (number, rest),
            _ => return Err(format!("a site has between 1 and {HOSTS_MAX} hosts")),
        },
        None => (1, text),
    };
    let (kinds, v6) = match rest.strip_suffix("ipv6") {
        Some("") => (None, true),
        Some(kinds) => match kinds.strip_suffix('+') {
            Some(kinds) => (Some(kinds), true),
            None => return Err(format!("`{rest}` is no kind")),
        },
        None => (Some(rest), false),
    };
    let v4 = kinds.map_or_else(|| Ok(Vec::new()), parse_nats)?;
    Ok(Access { hosts, v4, v6 })
}

fn parse_nats(text: &str) -> Result<Vec<Nat>, String> {
    let nats = text
        .split('/')
        .map(|name| {
            let found = NATS.into_iter().find(|nat| nat.name() == name);
            found.ok_or_else(|| format!("`{name}` is no kind"))
        })
        .collect::<Result<Vec<Nat>, String>>()?;
    if nats.len() > NATS_MAX {
        return Err("at most two NATs are stacked: the site's and its carrier's".to_owned());
    }
    if nats.len() > 1 && nats.contains(&Nat::None) {
        return Err("`none` has no NAT and is not stacked".to_owned());
    }
    Ok(nats)
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.hosts != 1 {
            write!(f, "{}*", self.hosts)?;
        }
        let nats: Vec<&str> = self.v4.iter().map(|nat| nat.name()).collect();
        match (nats.is_empty(), self.v6) {
            (true, _) => f.write_str("ipv6"),
            (false, false) => f.write_str(&nats.join("/")),
            (false, true) => write!(f, "{}+ipv6", nats.join("/")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_is_a_kind_with_what_stands_around_it() {
        let access = |text: &str| text.parse::<Access>().unwrap();
        assert_eq!(access("symmetric"), Access::behind(Nat::Symmetric));
        assert_eq!(access("none+ipv6"), Access::public());
        let stacked = access("2*port-restricted/full-cone+ipv6");
        assert_eq!(stacked.hosts, 2);
        assert_eq!(stacked.v4, [Nat::PortRestricted, Nat::FullCone]);
        assert!(stacked.v6 && !stacked.is_public());
        let alone = access("ipv6");
        assert!(alone.v6 && alone.v4.is_empty());
    }

    #[test]
    fn what_it_prints_reads_back_as_the_same_site() {
        for nat in NATS {
            let text = nat.to_string();
            assert_eq!(text.parse::<Access>().unwrap(), Access::behind(nat));
        }
        for text in [
            "none",
            "3*none",
            "ipv6",
            "2*ipv6",
            "no-udp+ipv6",
            "symmetric/symmetric",
        ] {
            assert_eq!(text.parse::<Access>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_no_site_is_refused_with_the_reason() {
        for (text, reason) in [
            ("", "no kind"),
            ("cone", "no kind"),
            ("0*symmetric", "between 1 and 4"),
            ("99*symmetric", "between 1 and 4"),
            ("x*symmetric", "between 1 and 4"),
            ("symmetricipv6", "no kind"),
            ("+ipv6", "no kind"),
            ("none/symmetric", "not stacked"),
            ("symmetric/symmetric/symmetric", "at most two"),
        ] {
            let error = text.parse::<Access>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
