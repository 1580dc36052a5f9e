//! Finds the headers of TCP and UDP packets in frames, and changes what differs between the
//! segments of one super-frame.

use super::virtio::{Gso, VirtioHeader};
use crate::checksum;
use crate::ethernet::{
    HEADER_BYTES, TAG_BYTES, TYPE_IPV4, TYPE_IPV6, TYPE_SERVICE_VLAN, TYPE_VLAN,
};

/// Most VLAN tags of a frame that is cut or merged.
const TAGS_MAX: usize = 2;
/// Most IPv6 extension headers of one.
const EXTENSIONS_MAX: usize = 8;
/// Longest headers of a frame that is cut or merged, in bytes.
pub const HEADERS_BYTES_MAX: usize = 256;

pub(super) const IPV4_BYTES: usize = 20;
pub(super) const IPV6_BYTES: usize = 40;
pub(super) const TCP_BYTES: usize = 20;
const UDP_BYTES: usize = 8;
const HOP_BY_HOP: u8 = 0;
pub(super) const TCP: u8 = 6;
const UDP: u8 = 17;
const ROUTING: u8 = 43;
const DESTINATION: u8 = 60;

pub(super) const FLAG_FIN: u8 = 0x01;
pub(super) const FLAG_SYN: u8 = 0x02;
pub(super) const FLAG_RST: u8 = 0x04;
pub(super) const FLAG_PSH: u8 = 0x08;
pub(super) const FLAG_URG: u8 = 0x20;
pub(super) const FLAG_CWR: u8 = 0x80;

/// Where the headers of a packet are: offsets from the beginning of the frame, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Headers {
    pub(super) ipv6: bool,
    pub(super) tcp: bool,
    pub(super) network: usize,
    pub(super) transport: usize,
    pub(super) payload: usize,
    /// The end of the packet; padding may follow.
    pub(super) end: usize,
}

fn number(bytes: &[u8], at: usize) -> Option<u16> {
    let field = bytes.get(at..)?.first_chunk()?;
    Some(u16::from_be_bytes(*field))
}

fn write(bytes: &mut [u8], at: usize, value: u16) {
    if let Some(field) = bytes.get_mut(at..).and_then(<[u8]>::first_chunk_mut) {
        *field = value.to_be_bytes();
    }
}

/// Returns TCP's flags in the segment number `index` of a super-frame that has these.
#[inline]
pub(super) fn flags_of_segment(flags: u8, index: u16, last: bool) -> u8 {
    let first_only = if index > 0 { FLAG_CWR } else { 0 };
    let last_only = if last { 0 } else { FLAG_FIN | FLAG_PSH };
    flags & !(first_only | last_only)
}

impl Headers {
    /// Finds the headers of a whole TCP or UDP packet. Returns `None` for anything else, for
    /// fragments, and for packets that are longer than their frame.
    #[inline]
    pub(super) fn parse(frame: &[u8]) -> Option<Self> {
        let mut network = HEADER_BYTES;
        let mut kind = number(frame, network - 2)?;
        for _ in 0..TAGS_MAX {
            if !matches!(kind, TYPE_VLAN | TYPE_SERVICE_VLAN) {
                break;
            }
            network += TAG_BYTES;
            kind = number(frame, network - 2)?;
        }
        let ipv6 = match kind {
            TYPE_IPV4 => false,
            TYPE_IPV6 => true,
            _ => return None,
        };
        let packet = frame.get(network..)?;
        let (protocol, transport, end) = if ipv6 {
            Self::parse_ipv6(packet)?
        } else {
            Self::parse_ipv4(packet)?
        };
        let (transport, end) = (network + transport, network + end);
        let segment = frame.get(transport..end)?;
        let tcp = protocol == TCP;
        let bytes = match protocol {
            TCP => usize::from(segment.get(12)? >> 4) * 4,
            UDP => UDP_BYTES,
            _ => return None,
        };
        let fits = segment.len() >= bytes && bytes >= if tcp { TCP_BYTES } else { UDP_BYTES };
        let payload = transport + bytes;
        if !fits || payload > HEADERS_BYTES_MAX {
            return None;
        }
        Some(Self {
            ipv6,
            tcp,
            network,
            transport,
            payload,
            end,
        })
    }

    fn parse_ipv4(packet: &[u8]) -> Option<(u8, usize, usize)> {
        let header: &[u8; IPV4_BYTES] = packet.first_chunk()?;
        let bytes = usize::from(header[0] & 0xf) * 4;
        let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0;
        if header[0] >> 4 != 4 || bytes < IPV4_BYTES || fragment {
            return None;
        }
        let end = usize::from(u16::from_be_bytes([header[2], header[3]]));
        Some((header[9], bytes, end))
    }

    fn parse_ipv6(packet: &[u8]) -> Option<(u8, usize, usize)> {
        let header: &[u8; IPV6_BYTES] = packet.first_chunk()?;
        if header[0] >> 4 != 6 {
            return None;
        }
        let end = IPV6_BYTES + usize::from(u16::from_be_bytes([header[4], header[5]]));
        let (mut next, mut at) = (header[6], IPV6_BYTES);
        for _ in 0..EXTENSIONS_MAX {
            if !matches!(next, HOP_BY_HOP | ROUTING | DESTINATION) {
                return Some((next, at, end));
            }
            let extension = packet.get(at..)?;
            next = *extension.first()?;
            at += (usize::from(*extension.get(1)?) + 1) * 8;
        }
        None
    }

    /// Finds the headers of a super-frame, and of a segment of one: what its virtio header says
    /// must be so.
    #[inline]
    pub(super) fn of_gso(virtio: &VirtioHeader, frame: &[u8]) -> Option<Self> {
        let headers = Self::parse(frame)?;
        let is = match virtio.gso {
            Gso::None => false,
            Gso::Tcp4 => headers.tcp && !headers.ipv6,
            Gso::Tcp6 => headers.tcp && headers.ipv6,
            Gso::Udp => !headers.tcp,
        };
        let checksum = virtio.needs_checksum
            && usize::from(virtio.checksum_start) == headers.transport
            && virtio.checksum_at() == headers.checksum();
        (is && checksum && headers.payload < headers.end).then_some(headers)
    }

    /// Returns where the transport's checksum is.
    #[inline]
    pub(super) fn checksum(&self) -> usize {
        self.transport + if self.tcp { 16 } else { 6 }
    }

    /// Returns where the addresses are, source and destination together.
    #[inline]
    pub(super) fn addresses(&self) -> std::ops::Range<usize> {
        if self.ipv6 {
            self.network + 8..self.network + 40
        } else {
            self.network + 12..self.network + 20
        }
    }

    /// Returns the length of the transport's header and payload, in bytes.
    #[inline]
    pub(super) fn transport_bytes(&self) -> usize {
        self.end - self.transport
    }

    /// Returns TCP's sequence number.
    #[inline]
    pub(super) fn sequence(&self, frame: &[u8]) -> u32 {
        let field = frame
            .get(self.transport + 4..)
            .and_then(<[u8]>::first_chunk);
        field.map_or(0, |field| u32::from_be_bytes(*field))
    }

    /// Returns the identification of an IPv4 packet.
    #[inline]
    pub(super) fn identification(&self, frame: &[u8]) -> u16 {
        number(frame, self.network + 4).unwrap_or(0)
    }

    /// Whether the packet must not be fragmented on its way: then its identification says nothing
    /// (RFC 6864, section 4.1).
    #[inline]
    pub(super) fn is_atomic(&self, frame: &[u8]) -> bool {
        self.ipv6
            || frame
                .get(self.network + 6)
                .is_some_and(|byte| byte & 0x40 != 0)
    }

    /// Changes the lengths, and all checksums that depend on them, so that `payload_bytes` follow
    /// the headers. The transport's checksum is partial.
    #[inline]
    pub(super) fn set_length(&mut self, frame: &mut [u8], payload_bytes: usize) {
        let before = self.transport_bytes();
        self.end = self.payload + payload_bytes;
        let after = self.transport_bytes();
        let at = self.checksum();
        let partial = u64::from(number(frame, at).unwrap_or(0));
        // The sum without the old length and with the new one (RFC 1624).
        let partial = partial + u64::from(!(before as u16)) + u64::from(after as u16);
        write(frame, at, checksum::fold(partial));
        if !self.tcp {
            write(frame, self.transport + 4, after as u16);
        }
        if self.ipv6 {
            let bytes = self.end - self.network - IPV6_BYTES;
            write(frame, self.network + 4, bytes as u16);
        } else {
            write(frame, self.network + 2, (self.end - self.network) as u16);
            self.sum_ipv4(frame);
        }
    }

    /// Computes the checksum of an IPv4 header.
    #[inline]
    fn sum_ipv4(&self, frame: &mut [u8]) {
        let network = self.network;
        write(frame, network + 10, 0);
        let bytes = frame
            .get(network)
            .map_or(0, |byte| usize::from(byte & 0xf) * 4);
        let header = frame.get(network..network + bytes).unwrap_or_default();
        let sum = checksum::fold(checksum::sum(header));
        write(frame, network + 10, !sum);
    }

    /// Changes what differs in the segment number `index`, `offset` payload bytes behind the first.
    /// To be called before [`Self::set_length`], which computes the checksums.
    #[inline]
    pub(super) fn set_position(&self, frame: &mut [u8], index: u16, offset: u32, last: bool) {
        if !self.ipv6 {
            let first = self.identification(frame);
            write(frame, self.network + 4, first.wrapping_add(index));
        }
        if !self.tcp {
            return;
        }
        let sequence = self.sequence(frame).wrapping_add(offset);
        let field = frame.get_mut(self.transport + 4..);
        if let Some(field) = field.and_then(<[u8]>::first_chunk_mut) {
            *field = sequence.to_be_bytes();
        }
        if let Some(flags) = frame.get_mut(self.transport + 13) {
            *flags = flags_of_segment(*flags, index, last);
        }
    }
}
