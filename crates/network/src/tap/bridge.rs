//! Makes the Linux bridge of a network, and removes it when nobody uses it.

use super::{Link, batch, links, set_all};
use longhaul_overlay::NetworkId;
use longhaul_overlay::switch::Vlans;
use std::fmt::Write as _;
use std::io;

/// Digits of the base 32 of names: those of tokens (`docs/rendezvous.md`).
const DIGITS: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
const BRIDGE: &str = "lb";
const TAP: &str = "lt";
/// The beginning of the alias by which a bridge is known as one of ours.
const ALIAS: &str = "longhaul network ";

/// Returns the names of a network's bridge and TAP device: two letters, and the id in base 32.
pub fn names(network: NetworkId) -> (String, String) {
    (name_of(BRIDGE, network), name_of(TAP, network))
}

/// Returns the name of a network's device of one kind.
pub(super) fn name_of(kind: &str, network: NetworkId) -> String {
    // 13 digits of 5 bits; the first one has 4 bits.
    let digit = |at: u32| DIGITS[(network.0 >> (60 - 5 * at) & 31) as usize];
    let digits: String = (0..13).map(|at| char::from(digit(at))).collect();
    format!("{kind}{digits}")
}

fn network_of(bridge: &str) -> Option<NetworkId> {
    let digits = bridge.strip_prefix(BRIDGE).filter(|d| d.len() == 13)?;
    let mut number = 0u128;
    for digit in digits.bytes() {
        let value = DIGITS.iter().position(|other| *other == digit)?;
        number = number << 5 | value as u128;
    }
    u64::try_from(number).ok().map(NetworkId)
}

/// What a bridge does with VLANs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum VlanFilter {
    /// It does not look at them: guests send and receive tags themselves.
    #[default]
    Transparent,
    /// Its ports have VLANs; these pass to other hosts. New ports are in none but that of untagged
    /// frames.
    Ports(Vlans),
}

/// A bridge to be made.
#[derive(Debug, Clone)]
pub struct BridgeConfig {
    /// Its network.
    pub network: NetworkId,
    /// Largest payload of a frame, in bytes.
    pub mtu: u16,
    /// Its VLANs.
    pub vlans: VlanFilter,
}

/// The bridge of a network, with the TAP device as one of its ports.
#[derive(Debug)]
pub struct Bridge {
    name: String,
    tap: String,
}

impl Bridge {
    /// Makes the bridge in the network namespace of the calling thread, or takes the one that an
    /// earlier agent left. Blocks for some milliseconds.
    pub fn open(config: &BridgeConfig) -> io::Result<Self> {
        let (name, tap) = names(config.network);
        let mut commands = String::new();
        if !exists(&name)? {
            // Without snooping: nobody asks for memberships here, so they would be forgotten.
            let kind = "type bridge stp_state 0 forward_delay 0 mcast_snooping 0";
            let _ = writeln!(commands, "link add name {name} {kind}");
        } else if !bridges()?.iter().any(|link| link.ifname == name) {
            return Err(io::Error::other(format!(
                "the interface {name} exists and is no bridge; remove it"
            )));
        }
        // The host has no part in the network: no addresses of its own, no answers to ARP.
        let _ = write!(
            commands,
            "link set dev {name} alias \"{ALIAS}{:016x}\"\n\
             link set dev {name} addrgenmode none arp off mtu {}\n",
            config.network.0, config.mtu
        );
        batch("ip", &commands)?;
        filter_vlans(&name, config.vlans != VlanFilter::Transparent)?;
        silence(&name)?;
        batch("ip", &format!("link set dev {name} up\n"))?;
        Ok(Self { name, tap })
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes the TAP device a port, in the VLANs that pass to other hosts, and starts it.
    pub fn attach(&self, config: &BridgeConfig) -> io::Result<()> {
        let Self { name, tap } = self;
        set_up_tap(tap, config.mtu, Some(name))?;
        if let VlanFilter::Ports(vlans) = &config.vlans {
            let mut commands = String::new();
            for (first, last) in vlans.ranges() {
                let _ = writeln!(commands, "vlan add dev {tap} vid {first}-{last}");
            }
            // That of untagged frames is not one of them.
            let _ = writeln!(commands, "vlan add dev {tap} vid 1 pvid untagged");
            batch("bridge", &commands)?;
        }
        batch("ip", &format!("link set dev {tap} up\n"))
    }

    /// Removes the bridge if it has no port. Returns whether it is gone.
    pub fn remove(&self) -> io::Result<bool> {
        remove_unused(&self.name)
    }
}

/// Configures a TAP device that is no port of a bridge, and starts it. The host's own IP may use
/// it.
pub(crate) fn set_up_alone(tap: &str, mtu: u16) -> io::Result<()> {
    batch("ip", &format!("link set dev {tap} mtu {mtu} up\n"))
}

/// Removes an interface, if it exists.
pub(crate) fn remove(interface: &str) -> io::Result<()> {
    if !exists(interface)? {
        return Ok(());
    }
    batch("ip", &format!("link del dev {interface}\n"))
}

/// Configures a TAP device that is not up yet: its MTU, and that the host has no part in it.
fn set_up_tap(tap: &str, mtu: u16, bridge: Option<&str>) -> io::Result<()> {
    let mut command = format!("link set dev {tap} addrgenmode none mtu {mtu}");
    if let Some(bridge) = bridge {
        let _ = write!(command, " master {bridge}");
    }
    command.push('\n');
    batch("ip", &command)?;
    silence(tap)
}

fn filter_vlans(bridge: &str, filter: bool) -> io::Result<()> {
    let value = u8::from(filter);
    let set = format!("link set dev {bridge} type bridge vlan_filtering {value}\n");
    match batch("ip", &set) {
        // A kernel without it does not filter.
        Err(error) if !filter && error.to_string().contains("not supported") => Ok(()),
        Err(error) if error.to_string().contains("not supported") => Err(io::Error::other(
            "the kernel's bridges do not filter VLANs (CONFIG_BRIDGE_VLAN_FILTERING); \
             let guests send tags themselves",
        )),
        set => set,
    }
}

/// Keeps the host's own IP out of an interface.
fn silence(interface: &str) -> io::Result<()> {
    // RFC 6890 has no rule for it: strict filtering drops whatever comes from a network without a
    // route, and addresses of other interfaces are not answered for.
    set_all(
        interface,
        &[
            ("ipv6/conf/{}/disable_ipv6", "1"),
            ("ipv4/conf/{}/rp_filter", "1"),
            ("ipv4/conf/{}/arp_ignore", "8"),
        ],
    )
}

/// Whether there is an interface of this name in the network namespace of the calling thread.
fn exists(name: &str) -> io::Result<bool> {
    match nix::net::if_::if_nametoindex(name) {
        Ok(_) => Ok(true),
        Err(nix::errno::Errno::ENODEV) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn bridges() -> io::Result<Vec<Link>> {
    links(&["type", "bridge"])
}

fn ports(bridge: &str) -> io::Result<usize> {
    let ports = links(&["master", bridge])?;
    Ok(ports.iter().filter(|port| !port.ifname.is_empty()).count())
}

fn remove_unused(bridge: &str) -> io::Result<bool> {
    if !exists(bridge)? {
        return Ok(true);
    }
    if ports(bridge)? > 0 {
        return Ok(false);
    }
    batch("ip", &format!("link del dev {bridge}\n"))?;
    Ok(true)
}

/// A bridge of a network that an earlier agent left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leftover {
    /// The network.
    pub network: NetworkId,
    /// The bridge.
    pub bridge: String,
    /// The number of its ports: guests that still run, if there is no agent.
    pub ports: usize,
}

impl Leftover {
    /// Removes the bridge if it has no port. Returns whether it is gone.
    pub fn remove(&self) -> io::Result<bool> {
        remove_unused(&self.bridge)
    }
}

/// Returns the bridges of networks in the network namespace of the calling thread.
///
/// Only interfaces whose name, kind and alias are those of a network's bridge are taken for one.
pub fn leftovers() -> io::Result<Vec<Leftover>> {
    let mut found = Vec::new();
    for Link { ifname, ifalias } in bridges()? {
        let Some(network) = network_of(&ifname) else {
            continue;
        };
        if ifalias == format!("{ALIAS}{:016x}", network.0) {
            found.push(Leftover {
                network,
                ports: ports(&ifname)?,
                bridge: ifname,
            });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_room_and_lead_back() {
        for id in [1, 0x1122_3344_5566_7788, u64::MAX, 1 << 63] {
            let network = NetworkId(id);
            let (bridge, tap) = names(network);
            assert_eq!((bridge.len(), tap.len()), (15, 15));
            assert_eq!(network_of(&bridge), Some(network));
            assert_eq!(network_of(&tap), None);
        }
        assert_eq!(names(NetworkId(1)).0, "lb0000000000001");
        assert_eq!(names(NetworkId(u64::MAX)).1, "ltfzzzzzzzzzzzz");
        // The first digit has 4 bits only.
        assert_eq!(network_of("lbzzzzzzzzzzzzz"), None);
        assert_eq!(network_of("lb000000000000i"), None);
        assert_eq!(network_of("lb0"), None);
    }
}
