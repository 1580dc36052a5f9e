//! The device of a network's gateway on this host: the kernel routes what comes from it.

use super::{batch, set_all};
use longhaul_overlay::{Mac, NetworkId};
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::net::Ipv4Addr;

/// The kernel's table of routes. Numbers are hexadecimal, as they are in memory.
const ROUTES: &str = "/proc/thread-self/net/route";

/// An address, and the bits that all addresses of its subnet begin with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Subnet {
    /// The address of a station in it.
    pub address: Ipv4Addr,
    /// The bits of the prefix.
    pub prefix_bits: u8,
}

impl Subnet {
    fn mask(self) -> u32 {
        let shift = 32 - u32::from(self.prefix_bits.min(32));
        u32::MAX.checked_shl(shift).unwrap_or(0)
    }

    /// Returns the subnet's own address.
    pub(crate) fn network(self) -> Self {
        let address = Ipv4Addr::from_bits(self.address.to_bits() & self.mask());
        Self { address, ..self }
    }

    fn overlaps(self, other: Self) -> bool {
        let mask = self.mask() & other.mask();
        self.address.to_bits() & mask == other.address.to_bits() & mask
    }
}

impl std::fmt::Display for Subnet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix_bits)
    }
}

/// A route of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Route {
    device: String,
    to: Subnet,
}

fn routes(text: &str) -> Vec<Route> {
    let routes = text.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let [device, destination, _, _, _, _, _, mask, ..] = fields[..] else {
            return None;
        };
        let number = |text| u32::from_str_radix(text, 16).ok();
        let mask = u32::from_be_bytes(number(mask)?.to_ne_bytes());
        Some(Route {
            device: device.to_owned(),
            to: Subnet {
                address: Ipv4Addr::from(number(destination)?.to_ne_bytes()),
                prefix_bits: mask.leading_ones() as u8,
            },
        })
    });
    routes.collect()
}

/// Returns the devices of default routes, in order.
pub(crate) fn uplinks() -> io::Result<Vec<String>> {
    let text = fs::read_to_string(ROUTES)?;
    let default = routes(&text)
        .into_iter()
        .filter(|route| route.to.prefix_bits == 0);
    let mut devices: Vec<String> = default.map(|route| route.device).collect();
    devices.sort();
    devices.dedup();
    Ok(devices)
}

/// Returns the route that leads elsewhere for addresses of a subnet.
fn conflict(text: &str, device: &str, subnet: Subnet) -> Option<Route> {
    routes(text).into_iter().find(|route| {
        route.to.prefix_bits > 0 && route.device != device && route.to.overlaps(subnet)
    })
}

/// Configures the device of a gateway that is not up yet, and starts it. The host routes what comes
/// from it.
pub(crate) fn set_up(tap: &str, mac: Mac, addresses: &[Subnet], mtu: u16) -> io::Result<()> {
    let text = fs::read_to_string(ROUTES)?;
    for subnet in addresses {
        if let Some(route) = conflict(&text, tap, *subnet) {
            return Err(io::Error::other(format!(
                "this host has a route to {} on {}: give the gateway another address than \
                 {subnet}, or leave this host's site out",
                route.to, route.device
            )));
        }
    }
    batch(
        "ip",
        &format!("link set dev {tap} addrgenmode none address {mac} mtu {mtu}\n"),
    )?;
    set_all(
        tap,
        &[
            ("ipv6/conf/{}/disable_ipv6", "1"),
            ("ipv4/conf/{}/rp_filter", "1"),
            // Not for addresses of other interfaces.
            ("ipv4/conf/{}/arp_ignore", "1"),
            ("ipv4/conf/{}/arp_announce", "2"),
            ("ipv4/conf/{}/accept_redirects", "0"),
            ("ipv4/conf/{}/send_redirects", "0"),
            ("ipv4/conf/{}/accept_source_route", "0"),
            ("ipv4/conf/{}/forwarding", "1"),
        ],
    )?;
    let mut commands = String::new();
    for subnet in addresses {
        // Writing to a text does not fail.
        let _ = writeln!(commands, "addr add {subnet} brd + dev {tap}");
    }
    let _ = writeln!(commands, "link set dev {tap} up");
    batch("ip", &commands)
}

/// Returns the name of the gateway's device.
pub fn gateway_name(network: NetworkId) -> String {
    super::bridge::name_of("lg", network)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subnet(text: &str) -> Subnet {
        let (address, bits) = text.split_once('/').unwrap();
        Subnet {
            address: address.parse().unwrap(),
            prefix_bits: bits.parse().unwrap(),
        }
    }

    /// As the kernel of this machine would print it.
    fn line(device: &str, to: &str) -> String {
        let to = subnet(to);
        let text = |bits: u32| format!("{:08X}", u32::from_ne_bytes(bits.to_be_bytes()));
        let (destination, mask) = (text(to.network().address.to_bits()), text(to.mask()));
        format!("{device}\t{destination}\t00000000\t0001\t0\t0\t0\t{mask}\t0\t0\t0\n")
    }

    #[test]
    fn a_subnet_that_the_host_routes_elsewhere_is_a_conflict() {
        let head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\n";
        let text = [
            head.to_owned(),
            line("eth0", "0.0.0.0/0"),
            line("eth0", "192.168.1.0/24"),
            line("lg1", "10.9.0.0/24"),
            line("tun0", "10.8.0.0/14"),
        ]
        .concat();
        let found = |own: &str, wanted: &str| {
            let found = conflict(&text, own, subnet(wanted));
            found.map(|route| (route.device, route.to.to_string()))
        };
        let route = |device: &str, to: &str| Some((device.to_owned(), to.to_owned()));
        assert_eq!(found("lg1", "10.0.0.1/24"), None);
        assert_eq!(found("lg1", "192.168.2.1/24"), None);
        assert_eq!(
            found("lg1", "192.168.0.1/16"),
            route("eth0", "192.168.1.0/24")
        );
        assert_eq!(
            found("lg1", "192.168.1.9/28"),
            route("eth0", "192.168.1.0/24")
        );
        assert_eq!(found("lg2", "10.9.0.1/24"), route("lg1", "10.9.0.0/24"));
        assert_eq!(found("lg1", "10.9.0.1/24"), route("tun0", "10.8.0.0/14"));
    }

    #[test]
    fn subnets_have_networks() {
        assert_eq!(subnet("10.0.3.1/22").network(), subnet("10.0.0.0/22"));
        assert_eq!(subnet("10.0.3.1/0").network(), subnet("0.0.0.0/0"));
        assert_eq!(gateway_name(NetworkId(1)), "lg0000000000001");
    }
}
