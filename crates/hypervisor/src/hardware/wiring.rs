//! Describes what a network card is plugged into beyond its network's name, in properties of the
//! card that begin with `netdev.`.

use super::tables::is_word;
use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

/// The beginning of the properties' names.
pub(crate) const PREFIX: &str = "netdev.";
/// The maximum number of queues of a TAP device.
const QUEUES_MAX: u16 = 256;
/// The maximum number of ports of the host that lead to a guest, and of domains that it searches.
const FORWARDS_MAX: usize = 64;

/// The backend of a card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wiring {
    /// The queues of its TAP device.
    pub(crate) queues: u16,
    /// Whether the host's kernel may serve the card.
    pub(crate) vhost: bool,
    /// Whether a hub is between card and backend, which hides the backend's offloads.
    pub(crate) hub: bool,
    /// QEMU's user network, if it is on one; by default one without any way out.
    pub(crate) user: Option<UserNetwork>,
}

/// A user network of QEMU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct UserNetwork {
    /// Whether the guest reaches nothing outside.
    pub(crate) restrict: bool,
    /// Addresses and names in it, by option.
    pub(crate) values: BTreeMap<String, String>,
    /// The domains that the guest searches.
    pub(crate) searches: Vec<String>,
    /// Ports of the host that lead to the guest.
    pub(crate) forwards: Vec<Forward>,
}

/// A port of the host that leads to a port of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Forward {
    pub(crate) udp: bool,
    /// The host's address; absent: all of them.
    pub(crate) from: Option<Ipv4Addr>,
    pub(crate) from_port: u16,
    pub(crate) to: Ipv4Addr,
    pub(crate) to_port: u16,
}

impl Default for Wiring {
    fn default() -> Self {
        Self {
            queues: 1,
            vhost: false,
            hub: false,
            user: None,
        }
    }
}

impl Wiring {
    /// Reads it from a card's properties; `None` where they contradict themselves.
    pub(crate) fn read(properties: &BTreeMap<String, String>) -> Option<Self> {
        let mut wiring = Self::default();
        let named = |(name, value): (&'_ String, &'_ String)| {
            let name = name.strip_prefix(PREFIX)?;
            Some((name.to_owned(), value.clone()))
        };
        let all: Vec<(String, String)> = properties.iter().filter_map(named).collect();
        for (name, value) in &all {
            match name.as_str() {
                "queues" => {
                    wiring.queues = value.parse().ok().filter(|queues| {
                        (2..=QUEUES_MAX).contains(queues) && !value.starts_with('+')
                    })?;
                }
                "vhost" | "hub" if value != "on" => return None,
                "vhost" => wiring.vhost = true,
                "hub" => wiring.hub = true,
                name => wiring.user.get_or_insert_default().take(name, value)?,
            }
        }
        let has_user = wiring.user.is_some();
        let is_complete = !has_user || all.iter().any(|(name, _)| name == "restrict");
        let has_tap = wiring.queues > 1 || wiring.vhost || wiring.hub;
        (is_complete && !(has_user && has_tap)).then_some(wiring)
    }

    /// Writes it to a card's properties.
    pub(crate) fn write(&self, properties: &mut BTreeMap<String, String>) {
        let mut put = |name: &str, value: &str| {
            properties.insert(format!("{PREFIX}{name}"), value.to_owned());
        };
        if self.queues > 1 {
            put("queues", &self.queues.to_string());
        }
        for (name, is_on) in [("vhost", self.vhost), ("hub", self.hub)] {
            if is_on {
                put(name, "on");
            }
        }
        // What no property describes is a network without any way out.
        let isolated = UserNetwork {
            restrict: true,
            ..UserNetwork::default()
        };
        let Some(user) = self.user.as_ref().filter(|user| **user != isolated) else {
            return;
        };
        put("restrict", if user.restrict { "on" } else { "off" });
        for (name, value) in &user.values {
            put(name, value);
        }
        for (number, value) in user.searches.iter().enumerate() {
            put(&format!("dnssearch.{number:02}"), value);
        }
        for (number, value) in user.forwards.iter().enumerate() {
            put(&format!("hostfwd.{number:02}"), &value.to_string());
        }
    }
}

impl UserNetwork {
    /// Takes a setting over; `None` where it is not known, or has no such value.
    pub(crate) fn take(&mut self, name: &str, value: &str) -> Option<()> {
        let numbered = |list: &str| {
            let number = name.strip_prefix(list)?.strip_prefix('.')?;
            (number.len() == 2 && number.bytes().all(|byte| byte.is_ascii_digit())).then_some(())
        };
        if numbered("dnssearch").is_some() {
            return self.search(value);
        }
        if numbered("hostfwd").is_some() {
            let forward = Forward::read(value).filter(|_| self.forwards.len() < FORWARDS_MAX)?;
            self.forwards.push(forward);
            return Some(());
        }
        match name {
            "restrict" => {
                self.restrict = match value {
                    "on" => true,
                    "off" => false,
                    _ => return None,
                };
                return Some(());
            }
            "dhcpstart" | "dns" | "host" => value.parse::<Ipv4Addr>().map(drop).ok(),
            "net" => is_net(value).then_some(()),
            "ipv6-dns" | "ipv6-host" | "ipv6-prefix" => value.parse::<Ipv6Addr>().map(drop).ok(),
            "ipv6-prefixlen" => value
                .parse::<u8>()
                .ok()
                .filter(|bits| *bits <= 128)
                .map(drop),
            "ipv4" | "ipv6" => matches!(value, "on" | "off").then_some(()),
            "domainname" | "hostname" | "tftp-server-name" => is_word(value).then_some(()),
            _ => None,
        }?;
        self.values.insert(name.to_owned(), value.to_owned());
        Some(())
    }

    /// Adds a domain that the guest searches.
    pub(crate) fn search(&mut self, domain: &str) -> Option<()> {
        let fits = is_word(domain) && self.searches.len() < FORWARDS_MAX;
        fits.then(|| self.searches.push(domain.to_owned()))
    }

    /// Returns it as a backend's options.
    pub(crate) fn options(&self) -> String {
        let mut text = format!("restrict={}", if self.restrict { "on" } else { "off" });
        for (name, value) in &self.values {
            text.push_str(&format!(",{name}={value}"));
        }
        for value in &self.searches {
            text.push_str(&format!(",dnssearch={value}"));
        }
        for forward in &self.forwards {
            text.push_str(&format!(",hostfwd={forward}"));
        }
        text
    }
}

impl Forward {
    /// Parses `tcp:127.0.0.1:2222-10.0.2.15:22`.
    fn read(text: &str) -> Option<Self> {
        let (protocol, rest) = text.split_once(':')?;
        let (from, to) = rest.split_once('-')?;
        let ((from, from_port), (to, to_port)) = (from.split_once(':')?, to.split_once(':')?);
        let from = match from {
            "" => None,
            address => Some(address.parse::<Ipv4Addr>().ok()?),
        };
        Some(Self {
            udp: match protocol {
                "tcp" => false,
                "udp" => true,
                _ => return None,
            },
            from: from.filter(|address| !address.is_unspecified()),
            from_port: port(from_port)?,
            to: to.parse().ok()?,
            to_port: port(to_port)?,
        })
    }

    /// Returns whether every host has the address.
    pub(crate) fn is_everywhere(&self) -> bool {
        self.from.is_none_or(|address| address.is_loopback())
    }
}

impl fmt::Display for Forward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = if self.udp { "udp" } else { "tcp" };
        let from = self.from.map_or(String::new(), |from| from.to_string());
        write!(
            f,
            "{protocol}:{from}:{}-{}:{}",
            self.from_port, self.to, self.to_port
        )
    }
}

pub(crate) fn port(text: &str) -> Option<u16> {
    let number: u16 = text.parse().ok()?;
    (number != 0 && !text.starts_with('+')).then_some(number)
}

/// Returns whether a text is an address with or without the bits of a mask, or a mask.
fn is_net(text: &str) -> bool {
    let (address, mask) = match text.split_once('/') {
        Some((address, mask)) => (address, Some(mask)),
        None => (text, None),
    };
    let is_mask = |mask: &str| {
        mask.parse::<u8>().is_ok_and(|bits| bits <= 32) || mask.parse::<Ipv4Addr>().is_ok()
    };
    address.parse::<Ipv4Addr>().is_ok() && mask.is_none_or(is_mask)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        let pair = |(name, value): &(&str, &str)| (format!("netdev.{name}"), (*value).to_owned());
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn what_is_written_is_read_again() {
        let mut user = UserNetwork::default();
        for (name, value) in [
            ("net", "10.0.10.0/24"),
            ("hostname", "web-7"),
            ("ipv6", "off"),
            ("dnssearch.00", "example.org"),
            ("hostfwd.00", "tcp::2222-10.0.10.15:22"),
            ("hostfwd.01", "udp:127.0.0.1:53-10.0.10.15:53"),
        ] {
            user.take(name, value).unwrap();
        }
        assert_eq!(
            user.options(),
            "restrict=off,hostname=web-7,ipv6=off,net=10.0.10.0/24,dnssearch=example.org,\
             hostfwd=tcp::2222-10.0.10.15:22,hostfwd=udp:127.0.0.1:53-10.0.10.15:53"
        );
        let tap = Wiring {
            queues: 4,
            vhost: true,
            hub: true,
            user: None,
        };
        let on_user = Wiring {
            user: Some(user),
            ..Wiring::default()
        };
        for wiring in [tap, on_user, Wiring::default()] {
            let mut properties = map(&[]);
            properties.insert("mq".to_owned(), "on".to_owned());
            wiring.write(&mut properties);
            assert_eq!(Wiring::read(&properties), Some(wiring));
        }
        let isolated = Wiring {
            user: Some(UserNetwork {
                restrict: true,
                ..UserNetwork::default()
            }),
            ..Wiring::default()
        };
        let mut properties = map(&[]);
        isolated.write(&mut properties);
        assert!(properties.is_empty());
    }

    #[test]
    fn what_is_no_wiring_is_refused() {
        for pairs in [
            &[("queues", "1")][..],
            &[("queues", "+4")],
            &[("queues", "1000")],
            &[("vhost", "off")],
            &[("net", "10.0.2.0/24")],
            &[("restrict", "yes")],
            &[("restrict", "off"), ("vhost", "on")],
            &[("restrict", "off"), ("net", "10.0.2.0/33")],
            &[("restrict", "off"), ("net", "10.0.2.0/24,smb=/")],
            &[("restrict", "off"), ("smb", "/srv")],
            &[("restrict", "off"), ("tftp", "/srv")],
            &[("restrict", "off"), ("hostname", "a,b")],
            &[("restrict", "off"), ("hostfwd.00", "tcp::0-10.0.2.15:22")],
            &[("restrict", "off"), ("hostfwd.00", "tcp::1-10.0.2.15:22,x")],
            &[("restrict", "off"), ("hostfwd.00", "unix:/a-10.0.2.15:22")],
            &[("restrict", "off"), ("hostfwd.0", "tcp::1-10.0.2.15:22")],
        ] {
            assert_eq!(Wiring::read(&map(pairs)), None, "{pairs:?}");
        }
        let other = Forward::read("tcp:192.0.2.7:80-10.0.2.15:80").unwrap();
        assert!(!other.is_everywhere());
    }
}
