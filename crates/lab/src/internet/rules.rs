//! Writes the nftables rulesets of routers.

use std::fmt::Write;

use super::access::Nat;

/// How long a full-cone or restricted NAT remembers a far end: the kernel's own limit for UDP that
/// went both ways.
const MAPPING_S: u32 = 120;
/// The first port of a NAT that was rebound, the number of its ports, and after how many rebindings
/// the ports repeat.
const REBOUND_FIRST: u32 = 10_000;
const REBOUND_PORTS: u32 = 1_000;
const REBOUND_REPEAT: u32 = 40;

/// The parts of a router's ruleset.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules<'a> {
    /// What it does to IPv4.
    pub(super) nat: Nat,
    /// The interface towards the Internet.
    pub(super) outside: &'a str,
    /// The interface towards the hosts.
    pub(super) inside: &'a str,
    /// The address from which the laboratory measures the router's uplink.
    pub(super) measured_from: &'a str,
    /// How often it was rebound: from the first time on it does not keep hosts' ports.
    pub(super) rebound: u32,
}

/// A ruleset under which nothing passes, and no connection is remembered.
pub(super) const DOWN: &str = "flush ruleset
table inet firewall {
  chain everything {
    type filter hook prerouting priority -350; policy drop;
  }
}
";

impl Rules<'_> {
    /// Returns the ruleset, which replaces any other.
    pub(super) fn text(&self) -> String {
        let mut text = String::from("flush ruleset\n");
        self.firewall(&mut text);
        if self.nat != Nat::None {
            self.translation(&mut text);
        }
        text
    }

    /// A datagram from outside that belongs to nothing must be dropped on input. Otherwise the
    /// kernel remembers it as a connection to the router. If the host sends to its sender later,
    /// the NAT must then choose another port: a port-restricted NAT would act as a symmetric one.
    fn firewall(&self, text: &mut String) {
        let Self {
            inside,
            measured_from,
            ..
        } = self;
        // Writing to a string does not fail.
        let _ = write!(
            text,
            "table inet firewall {{
  chain input {{
    type filter hook input priority filter; policy drop;
    iifname {{ \"lo\", \"{inside}\" }} accept
    ct state established,related accept
    icmp type echo-request accept
    icmpv6 type {{ echo-request, nd-neighbor-solicit, nd-neighbor-advert }} accept
    ip saddr {measured_from} accept
  }}
"
        );
        let forward = match self.nat {
            Nat::None => String::new(),
            nat => format!(
                "    {}iifname \"{inside}\" accept
    ct state established,related accept
    ct status dnat accept
    drop
",
                match nat {
                    Nat::NoUdp => "meta l4proto udp drop\n    ",
                    _ => "",
                }
            ),
        };
        let _ = write!(
            text,
            "  chain forward {{
    type filter hook forward priority filter; policy accept;
{forward}  }}
}}
"
        );
    }

    /// The kernel's own translation keeps a host's port if it is free, maps it to the same port for
    /// all far ends unless it is told to choose at random, and admits only the far end's address
    /// and port. Full-cone and restricted NATs admit more: they remember which host has which port
    /// (`senders`), for the far ends that it has sent to or for all.
    fn translation(&self, text: &mut String) {
        let Self {
            outside, rebound, ..
        } = self;
        let known = match self.nat {
            Nat::FullCone => Some(("inet_service", "udp sport", "udp dport")),
            Nat::Restricted => Some((
                "ipv4_addr . inet_service",
                "ip daddr . udp sport",
                "ip saddr . udp dport",
            )),
            _ => None,
        };
        let _ = writeln!(text, "table ip nat {{");
        if let Some((key, sent, received)) = known {
            let _ = write!(
                text,
                "  map senders {{
    type {key} : ipv4_addr . inet_service
    flags dynamic,timeout
    timeout {MAPPING_S}s
  }}
  chain sent {{
    type filter hook postrouting priority 101; policy accept;
    oifname \"{outside}\" ct direction original update @senders \
     {{ {sent} : ct original ip saddr . ct original proto-src }}
    oifname \"{outside}\" ct direction reply update @senders \
     {{ {sent} : ct reply ip saddr . ct reply proto-src }}
  }}
  chain received {{
    type nat hook prerouting priority dstnat; policy accept;
    iifname \"{outside}\" dnat ip to {received} map @senders
  }}
"
            );
        }
        let first = REBOUND_FIRST + rebound % REBOUND_REPEAT * REBOUND_PORTS;
        let udp = match (self.nat, rebound) {
            (Nat::Symmetric, _) => " to :1024-65535 fully-random".to_owned(),
            (_, 0) => String::new(),
            _ => format!(" to :{first}-{}", first + REBOUND_PORTS - 1),
        };
        let _ = write!(
            text,
            "  chain translated {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname \"{outside}\" meta l4proto udp masquerade{udp}
    oifname \"{outside}\" masquerade
  }}
}}
"
        );
    }
}
