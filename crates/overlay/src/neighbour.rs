//! Reads and writes the packets by which stations find each other's MAC addresses: ARP (RFC 826,
//! RFC 5227), RARP (RFC 903) and IPv6 neighbour discovery (RFC 4861).

use crate::address::{Address, Mac};
use crate::checksum;
use crate::ethernet::{
    Ethernet, FRAME_BYTES_MIN, HEADER_BYTES, TAG_BYTES, TYPE_ARP, TYPE_IPV6, TYPE_RARP, TYPE_VLAN,
};

/// What a packet tells or asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Neighbour {
    /// The sender has `address`, and asks for nothing that another station may answer.
    Tells {
        /// The sender's address.
        address: Address,
        /// Whether it is an IPv6 router, where the packet says so.
        router: Option<bool>,
    },
    /// The sender has `address`, and asks for the MAC address of `target`.
    Asks {
        /// The sender's address.
        address: Address,
        /// The address that it looks for.
        target: Address,
    },
    /// The sender asks whether anyone has an address that it does not use yet (RFC 5227, section
    /// 2.1.1; RFC 4862, section 5.4). Only the address's owner may answer.
    Probes {
        /// The address.
        target: Address,
    },
}

const ARP_BYTES: usize = 28;
/// Ethernet, IPv4, and the lengths of their addresses.
const ARP_TYPES: [u8; 6] = [0, 1, 0x08, 0, 6, 4];
const ARP_REQUEST: u16 = 1;
const ARP_REPLY: u16 = 2;
const RARP_REQUEST: u16 = 3;

const IPV6_BYTES: usize = 40;
const ICMPV6: u8 = 58;
/// Neighbour discovery packets have this hop limit: they were not forwarded (RFC 4861, section
/// 7.1).
const HOP_LIMIT: u8 = 255;
const ROUTER_ADVERTISEMENT: u8 = 134;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
const OPTION_SOURCE_MAC: u8 = 1;
const OPTION_TARGET_MAC: u8 = 2;
/// Most options that are read of one packet.
const OPTIONS_MAX: usize = 16;
const FLAG_ROUTER: u8 = 0x80;
const FLAG_SOLICITED: u8 = 0x40;
const FLAG_OVERRIDE: u8 = 0x20;
/// An advertisement with one option.
const ADVERTISEMENT_BYTES: usize = 32;
/// All stations of a link (RFC 4291, section 2.7.1), and the MAC address of that group.
const ALL_NODES: [u8; 16] = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
const ALL_NODES_MAC: Mac = Mac([0x33, 0x33, 0, 0, 0, 1]);

/// Reads a frame. Returns `None` if it is no such packet, or one that a station must not believe:
/// malformed, with another MAC address than the frame's, from another link, or with a wrong
/// checksum.
pub fn parse(frame: &Ethernet<'_>) -> Option<Neighbour> {
    match frame.kind {
        TYPE_ARP => parse_arp(frame),
        TYPE_IPV6 => parse_discovery(frame),
        _ => None,
    }
}

fn parse_arp(frame: &Ethernet<'_>) -> Option<Neighbour> {
    let packet: &[u8; ARP_BYTES] = frame.payload.first_chunk()?;
    let operation = u16::from_be_bytes([packet[6], packet[7]]);
    let known = matches!(operation, ARP_REQUEST | ARP_REPLY);
    if packet[..6] != ARP_TYPES || !known || packet[8..14] != frame.from.0 {
        return None;
    }
    let sender: [u8; 4] = *packet[14..].first_chunk()?;
    let target: [u8; 4] = *packet[24..].first_chunk()?;
    if sender == [0; 4] {
        let target = Address::V4(target);
        return (operation == ARP_REQUEST).then_some(Neighbour::Probes { target });
    }
    let address = Address::V4(sender);
    if !address.is_of_a_station() {
        return None;
    }
    if operation == ARP_REPLY || sender == target {
        return Some(Neighbour::Tells {
            address,
            router: None,
        });
    }
    Some(Neighbour::Asks {
        address,
        target: Address::V4(target),
    })
}

fn parse_discovery(frame: &Ethernet<'_>) -> Option<Neighbour> {
    let (header, rest) = frame.payload.split_first_chunk::<IPV6_BYTES>()?;
    if header[0] >> 4 != 6 || header[6] != ICMPV6 || header[7] != HOP_LIMIT {
        return None;
    }
    let length = usize::from(u16::from_be_bytes([header[4], header[5]]));
    let packet = rest.get(..length)?;
    let (kind, code) = (*packet.first()?, *packet.get(1)?);
    let fixed = match kind {
        ROUTER_ADVERTISEMENT => 16,
        NEIGHBOUR_SOLICITATION | NEIGHBOUR_ADVERTISEMENT => 24,
        _ => return None,
    };
    let options = packet.get(fixed..)?;
    let sum = checksum::pseudo(&header[8..40], ICMPV6, length) + checksum::sum(packet);
    if code != 0 || checksum::fold(sum) != 0xffff {
        return None;
    }
    let source: [u8; 16] = *header[8..].first_chunk()?;
    let target = packet[8..].first_chunk().copied();
    let from = |option| mac_option(options, option) == Some(frame.from);
    let tells = |address: [u8; 16], router| {
        let address = Address::V6(address);
        let believed = address.is_of_a_station();
        believed.then_some(Neighbour::Tells { address, router })
    };
    match kind {
        ROUTER_ADVERTISEMENT if from(OPTION_SOURCE_MAC) => {
            let lifetime = u16::from_be_bytes([packet[6], packet[7]]);
            tells(source, (lifetime > 0).then_some(true))
        }
        NEIGHBOUR_ADVERTISEMENT if from(OPTION_TARGET_MAC) => {
            tells(target?, Some(packet[4] & FLAG_ROUTER != 0))
        }
        NEIGHBOUR_SOLICITATION if source == [0; 16] => {
            let target = Address::V6(target?);
            Some(Neighbour::Probes { target })
        }
        NEIGHBOUR_SOLICITATION if from(OPTION_SOURCE_MAC) => {
            let (address, target) = (Address::V6(source), Address::V6(target?));
            let valid = address.is_of_a_station() && target.is_of_a_station();
            valid.then_some(Neighbour::Asks { address, target })
        }
        _ => None,
    }
}

/// Returns the MAC address in an option (RFC 4861, section 4.6.1), if all options are well formed.
fn mac_option(mut options: &[u8], wanted: u8) -> Option<Mac> {
    let mut found = None;
    for _ in 0..OPTIONS_MAX {
        let Some((head, _)) = options.split_first_chunk::<8>() else {
            return if options.is_empty() { found } else { None };
        };
        let [kind, units, mac @ ..] = *head;
        if kind == wanted && units == 1 && found.is_none() {
            found = Some(Mac(mac));
        }
        let length = usize::from(units) * 8;
        options = options.get(length..).filter(|_| length > 0)?;
    }
    None
}

/// Longest frame that is made here, in bytes.
pub const MADE_BYTES_MAX: usize = HEADER_BYTES + TAG_BYTES + IPV6_BYTES + ADVERTISEMENT_BYTES;

/// A short frame that the switch made itself.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct MadeFrame {
    bytes: [u8; MADE_BYTES_MAX],
    length: usize,
}

impl std::fmt::Debug for MadeFrame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MadeFrame({:02x?})", self.bytes())
    }
}

/// The header of a frame that is made here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Envelope {
    /// The destination.
    pub to: Mac,
    /// The source.
    pub from: Mac,
    /// The tag's control information, if the frame has a tag.
    pub tag: Option<u16>,
}

impl MadeFrame {
    /// Returns the whole frame, without a check sequence.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    fn new(envelope: Envelope, kind: u16) -> Self {
        let mut made = Self {
            bytes: [0; MADE_BYTES_MAX],
            length: 0,
        };
        made.add(&envelope.to.0);
        made.add(&envelope.from.0);
        if let Some(tag) = envelope.tag {
            made.add(&TYPE_VLAN.to_be_bytes());
            made.add(&tag.to_be_bytes());
        }
        made.add(&kind.to_be_bytes());
        made
    }

    fn add(&mut self, bytes: &[u8]) {
        self.bytes[self.length..self.length + bytes.len()].copy_from_slice(bytes);
        self.length += bytes.len();
    }

    fn arp(
        envelope: Envelope,
        operation: u16,
        sender: (Mac, [u8; 4]),
        target: (Mac, [u8; 4]),
    ) -> Self {
        let reverse = operation == RARP_REQUEST;
        let kind = if reverse { TYPE_RARP } else { TYPE_ARP };
        let mut made = Self::new(envelope, kind);
        made.add(&ARP_TYPES);
        made.add(&operation.to_be_bytes());
        for (mac, address) in [sender, target] {
            made.add(&mac.0);
            made.add(&address);
        }
        made.length = made.length.max(FRAME_BYTES_MIN);
        made
    }

    /// Makes an ARP reply: `address` is at `mac`, told to `asker`.
    pub fn arp_reply(
        tag: Option<u16>,
        (mac, address): (Mac, [u8; 4]),
        asker: (Mac, [u8; 4]),
    ) -> Self {
        let envelope = Envelope {
            to: asker.0,
            from: mac,
            tag,
        };
        Self::arp(envelope, ARP_REPLY, (mac, address), asker)
    }

    /// Makes the two gratuitous ARP packets that announce an address (RFC 5944, section 4.6): a
    /// request and a reply, since some stations believe only one of them.
    pub fn gratuitous_arp(tag: Option<u16>, mac: Mac, address: [u8; 4]) -> [Self; 2] {
        let envelope = Envelope {
            to: Mac::BROADCAST,
            from: mac,
            tag,
        };
        let sender = (mac, address);
        [
            Self::arp(envelope, ARP_REQUEST, sender, (Mac::ZERO, address)),
            Self::arp(envelope, ARP_REPLY, sender, sender),
        ]
    }

    /// Makes a RARP request, as QEMU sends it to announce a MAC address without addresses.
    pub fn rarp(tag: Option<u16>, mac: Mac) -> Self {
        let envelope = Envelope {
            to: Mac::BROADCAST,
            from: mac,
            tag,
        };
        let nobody = (mac, [0; 4]);
        Self::arp(envelope, RARP_REQUEST, nobody, nobody)
    }

    /// Makes the answer to a neighbour solicitation of `asker`, without the override flag, since it
    /// is not from the address's owner (RFC 4861, section 7.2.8).
    pub fn neighbour_reply(
        tag: Option<u16>,
        (mac, address): (Mac, [u8; 16]),
        asker: (Mac, [u8; 16]),
        router: bool,
    ) -> Self {
        let envelope = Envelope {
            to: asker.0,
            from: mac,
            tag,
        };
        let router = if router { FLAG_ROUTER } else { 0 };
        Self::advertisement(envelope, (mac, address), asker.1, router | FLAG_SOLICITED)
    }

    /// Makes an unsolicited neighbour advertisement to all stations, with the override flag (RFC
    /// 4861, section 7.2.6).
    pub fn unsolicited(tag: Option<u16>, mac: Mac, address: [u8; 16], router: bool) -> Self {
        let envelope = Envelope {
            to: ALL_NODES_MAC,
            from: mac,
            tag,
        };
        let router = if router { FLAG_ROUTER } else { 0 };
        Self::advertisement(envelope, (mac, address), ALL_NODES, router | FLAG_OVERRIDE)
    }

    fn advertisement(
        envelope: Envelope,
        (mac, address): (Mac, [u8; 16]),
        to: [u8; 16],
        flags: u8,
    ) -> Self {
        let mut addresses = [0; 32];
        addresses[..16].copy_from_slice(&address);
        addresses[16..].copy_from_slice(&to);
        let mut packet = [0; ADVERTISEMENT_BYTES];
        packet[0] = NEIGHBOUR_ADVERTISEMENT;
        packet[4] = flags;
        packet[8..24].copy_from_slice(&address);
        packet[24..26].copy_from_slice(&[OPTION_TARGET_MAC, 1]);
        packet[26..].copy_from_slice(&mac.0);
        let sum = checksum::pseudo(&addresses, ICMPV6, packet.len()) + checksum::sum(&packet);
        packet[2..4].copy_from_slice(&(!checksum::fold(sum)).to_be_bytes());
        let mut made = Self::new(envelope, TYPE_IPV6);
        let [high, low] = (packet.len() as u16).to_be_bytes();
        made.add(&[0x60, 0, 0, 0, high, low, ICMPV6, HOP_LIMIT]);
        made.add(&addresses);
        made.add(&packet);
        made
    }
}

#[cfg(test)]
mod tests;
