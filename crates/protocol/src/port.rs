//! What a host's network does to the port of a guest's card on a bridge: VLANs, the MTU and flags.
//!
//! It is read at the source when the guest moves. In JSON and TOML it is a part of the card.
//! Between agents it travels beside the description, so that older agents can read that.

use crate::guest::GuestDescription;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;

/// The highest VLAN.
pub const VLAN_MAX: u16 = 4094;
/// The lowest MTU of a network device.
pub const MTU_MIN: u32 = 68;
/// The highest MTU of a TAP device.
pub const MTU_MAX: u32 = 65535;

/// A port of a bridge, as far as it differs from one that was just created.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Port {
    /// Its VLANs, in ascending order. Empty if they are those of each new port of its bridge.
    #[serde(default)]
    pub vlans: Vec<Vlans>,
    /// Its MTU, unless it is 1500.
    #[serde(default)]
    pub mtu: Option<u32>,
    /// Its flags that differ from those of a new port.
    #[serde(default)]
    pub flags: BTreeMap<PortFlag, bool>,
}

/// Consecutive VLANs of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vlans {
    /// The first.
    pub first: u16,
    /// The last.
    pub last: u16,
    /// Whether it is the VLAN of frames that arrive without a tag. Then it is a single one.
    pub pvid: bool,
    /// Whether frames leave without a tag.
    pub untagged: bool,
}

/// A flag of a port, by its name in `ip link set ... type bridge_slave`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PortFlag {
    /// Frames may leave through the port by which they came.
    Hairpin,
    /// Spanning tree messages are refused.
    Guard,
    /// The port does not lead to the root of a spanning tree.
    RootBlock,
    /// A host that leaves a multicast group is forgotten at once.
    Fastleave,
    /// Addresses are learned.
    Learning,
    /// Frames to unknown addresses are sent to it.
    Flood,
    /// The bridge answers ARP for others.
    ProxyArp,
    /// The same, as wireless access points do.
    ProxyArpWifi,
    /// Multicast is sent as unicast.
    McastToUnicast,
    /// Multicast to unknown groups is sent to it.
    McastFlood,
    /// Broadcasts are sent to it.
    BcastFlood,
    /// The bridge answers ARP and neighbour discovery itself.
    NeighSuppress,
    /// No frames pass between isolated ports.
    Isolated,
}

impl PortFlag {
    /// All flags.
    pub const ALL: [Self; 13] = [
        Self::Hairpin,
        Self::Guard,
        Self::RootBlock,
        Self::Fastleave,
        Self::Learning,
        Self::Flood,
        Self::ProxyArp,
        Self::ProxyArpWifi,
        Self::McastToUnicast,
        Self::McastFlood,
        Self::BcastFlood,
        Self::NeighSuppress,
        Self::Isolated,
    ];

    /// Returns its name in iproute2.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hairpin => "hairpin",
            Self::Guard => "guard",
            Self::RootBlock => "root_block",
            Self::Fastleave => "fastleave",
            Self::Learning => "learning",
            Self::Flood => "flood",
            Self::ProxyArp => "proxy_arp",
            Self::ProxyArpWifi => "proxy_arp_wifi",
            Self::McastToUnicast => "mcast_to_unicast",
            Self::McastFlood => "mcast_flood",
            Self::BcastFlood => "bcast_flood",
            Self::NeighSuppress => "neigh_suppress",
            Self::Isolated => "isolated",
        }
    }

    /// Returns its value on a new port.
    pub fn default_value(self) -> bool {
        matches!(
            self,
            Self::Learning | Self::Flood | Self::McastFlood | Self::BcastFlood
        )
    }
}

impl Port {
    /// Returns whether it is like each new port.
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the port with a single VLAN whose frames have no tag.
    pub fn untagged(vlan: u16) -> Vec<Vlans> {
        vec![Vlans {
            first: vlan,
            last: vlan,
            pvid: true,
            untagged: true,
        }]
    }

    /// Returns whether a port can be like this.
    pub fn is_sound(&self) -> bool {
        let mut next = 1;
        let mut pvids = 0;
        let ascending = self.vlans.iter().all(|vlans| {
            let sound = vlans.first >= next && vlans.last >= vlans.first && vlans.last <= VLAN_MAX;
            let single = !vlans.pvid || vlans.first == vlans.last;
            pvids += u32::from(vlans.pvid);
            next = vlans.last.saturating_add(1);
            sound && single
        });
        let mtu = self
            .mtu
            .is_none_or(|mtu| (MTU_MIN..=MTU_MAX).contains(&mtu));
        ascending && pvids <= 1 && mtu
    }
}

impl fmt::Display for Vlans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.first == self.last {
            true => write!(f, "{}", self.first)?,
            false => write!(f, "{}-{}", self.first, self.last)?,
        }
        match (self.pvid, self.untagged) {
            (true, true) => Ok(()),
            (true, false) => f.write_str(" (tagged, and for frames without a tag)"),
            (false, true) => f.write_str(" (untagged on its way out)"),
            (false, false) => f.write_str(" (tagged)"),
        }
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if !self.vlans.is_empty() {
            let vlans: Vec<String> = self.vlans.iter().map(ToString::to_string).collect();
            parts.push(format!("VLAN {}", vlans.join(", ")));
        }
        parts.extend(self.mtu.map(|mtu| format!("MTU {mtu}")));
        let flag = |(flag, on): (&PortFlag, &bool)| {
            format!("{} {}", flag.name(), if *on { "on" } else { "off" })
        };
        parts.extend(self.flags.iter().map(flag));
        f.write_str(&parts.join(", "))
    }
}

/// The port of one card of a guest, as it travels.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardPort {
    /// The number of the card in the description.
    pub nic: u16,
    /// Its port.
    pub port: Port,
}

/// Takes the ports out of a description, for a message.
pub fn take(guest: &mut GuestDescription) -> Vec<CardPort> {
    let nics = (0..).zip(&mut guest.nics);
    let ports = nics.filter_map(|(nic, card)| {
        let port = card.port.take()?;
        (!port.is_plain()).then_some(CardPort { nic, port })
    });
    ports.collect()
}

/// Puts the ports of a message into its description. Those of cards that it does not have are
/// ignored: [`Port::is_sound`] and the number were checked.
pub fn put(guest: &mut GuestDescription, ports: Vec<CardPort>) {
    for CardPort { nic, port } in ports {
        if let Some(card) = guest.nics.get_mut(usize::from(nic)) {
            card.port = Some(port);
        }
    }
}

/// Writes a port in texts only.
pub(crate) fn serialize<S: Serializer>(
    port: &Option<Port>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match serializer.is_human_readable() {
        true => port.serialize(serializer),
        false => serializer.serialize_unit(),
    }
}

/// Reads a port in texts only.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Port>, D::Error> {
    match deserializer.is_human_readable() {
        true => Option::deserialize(deserializer),
        false => <()>::deserialize(deserializer).map(|()| None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::Nic;

    fn vlans(first: u16, last: u16, pvid: bool) -> Vlans {
        Vlans {
            first,
            last,
            pvid,
            untagged: pvid,
        }
    }

    #[test]
    fn a_port_stays_out_of_messages_and_is_in_texts() {
        let mut nic = Nic {
            network: "office".to_owned(),
            mac: "52:54:00:12:34:56".to_owned(),
            port: None,
        };
        let without = postcard::to_stdvec(&nic).unwrap();
        nic.port = Some(Port {
            vlans: Port::untagged(10),
            mtu: Some(9000),
            flags: [(PortFlag::Learning, false)].into(),
        });
        let bytes = postcard::to_stdvec(&nic).unwrap();
        assert_eq!(bytes, without, "older agents read it");
        let read: Nic = postcard::from_bytes(&bytes).unwrap();
        assert_eq!(read.port, None);
        let text = serde_json::to_string(&nic).unwrap();
        assert!(text.contains("\"learning\":false"), "{text}");
        assert_eq!(serde_json::from_str::<Nic>(&text).unwrap(), nic);
    }

    #[test]
    fn only_ports_that_can_be_are_sound() {
        let with = |vlans: &[Vlans]| Port {
            vlans: vlans.to_vec(),
            ..Port::default()
        };
        for (sound, port) in [
            (true, with(&[])),
            (true, with(&[vlans(10, 10, true), vlans(20, 30, false)])),
            (false, with(&[vlans(20, 30, false), vlans(30, 40, false)])),
            (false, with(&[vlans(10, 11, true)])),
            (false, with(&[vlans(10, 10, true), vlans(11, 11, true)])),
            (false, with(&[vlans(0, 1, false)])),
            (false, with(&[vlans(4094, 4095, false)])),
            (false, with(&[vlans(30, 20, false)])),
        ] {
            assert_eq!(port.is_sound(), sound, "{port:?}");
        }
        for (mtu, sound) in [(67, false), (68, true), (65535, true), (65536, false)] {
            let port = Port {
                mtu: Some(mtu),
                ..Port::default()
            };
            assert_eq!(port.is_sound(), sound, "{mtu}");
        }
    }

    #[test]
    fn a_port_is_shown_in_a_line() {
        let port = Port {
            vlans: vec![vlans(10, 10, true), vlans(20, 30, false)],
            mtu: Some(9000),
            flags: [(PortFlag::Isolated, true), (PortFlag::Learning, false)].into(),
        };
        let shown = "VLAN 10, 20-30 (tagged), MTU 9000, learning off, isolated on";
        assert_eq!(port.to_string(), shown);
    }
}
