//! Short segments: TCP over IPv4 or IPv6 without the bytes of its headers that the receiver can
//! compute.
//!
//! A segment carries all that is needed to restore it, so none depends on another one.
//! `docs/frame-plane.md`, section 3.6, is the normative description.

use super::headers::{Headers, IPV4_BYTES, IPV6_BYTES, TCP, TCP_BYTES, flags_of_segment};
use super::virtio::{Gso, VirtioHeader};
use crate::checksum;
use crate::ethernet::{HEADER_BYTES, TYPE_IPV4, TYPE_IPV6};

/// Bits of the first byte, which says the form of the rest.
const FORM_IPV6: u8 = 1;
/// IPv4's "don't fragment".
const FORM_ATOMIC: u8 = 2;
/// TCP's time stamps (RFC 7323), behind two bytes of padding.
const FORM_STAMPS: u8 = 4;
/// A segment of a super-frame.
const FORM_SEGMENT: u8 = 8;
/// The first of the guest's frames carries CWR.
const FORM_ECN: u8 = 16;
/// The guest's segment size is what an MTU of [`USUAL_MTU_BYTES`] leaves.
const FORM_USUAL_SIZE: u8 = 32;
const FORMS: u8 = FORM_IPV6 | FORM_ATOMIC | FORM_STAMPS | FORM_SEGMENT | FORM_ECN | FORM_USUAL_SIZE;

/// The MTU of Ethernet.
const USUAL_MTU_BYTES: usize = 1500;
/// Bytes of the two MAC addresses.
const MACS_BYTES: usize = 12;
const SIZE_BYTES: usize = 2;
/// Bytes of an IPv4 header that a short segment carries.
const SHORT_IPV4_BYTES: usize = 12;
/// Bytes of an IPv6 header that a short segment carries.
const SHORT_IPV6_BYTES: usize = 37;
/// Bytes of a TCP header without options that a short segment carries.
const SHORT_TCP_BYTES: usize = 15;
/// Bytes of the time stamps that a short segment carries.
const SHORT_STAMPS_BYTES: usize = 8;
/// What stands in front of time stamps: padding, their kind and length.
const STAMPS_HEAD: [u8; 4] = [1, 1, 8, 10];
/// Bytes of the option and what stands in front of it.
const STAMPS_BYTES: usize = STAMPS_HEAD.len() + SHORT_STAMPS_BYTES;
/// Bytes of a TCP header with time stamps.
const STAMPED_BYTES: usize = TCP_BYTES + STAMPS_BYTES;
const CHECKSUM_OFFSET: u16 = 16;

/// Longest headers of a short segment, in bytes.
const SHORT_BYTES_MAX: usize =
    1 + MACS_BYTES + SIZE_BYTES + SHORT_IPV6_BYTES + SHORT_TCP_BYTES + SHORT_STAMPS_BYTES;
/// Longest headers of the frame that it stands for.
pub(super) const RESTORED_BYTES_MAX: usize = HEADER_BYTES + IPV6_BYTES + STAMPED_BYTES;

/// The headers of the short segments of one frame.
#[derive(Debug, Clone, Copy)]
pub(super) struct Short {
    head: [u8; SHORT_BYTES_MAX],
    bytes: usize,
    /// Where IPv4's identification is.
    identification: Option<usize>,
    /// Where TCP's header is.
    transport: usize,
}

impl Short {
    /// Returns the short headers of a frame; `None` if a receiver would restore anything else than
    /// this frame and this virtio header.
    pub(super) fn of(virtio: &VirtioHeader, frame: &[u8], headers: &Headers) -> Option<Self> {
        let network_bytes = if headers.ipv6 { IPV6_BYTES } else { IPV4_BYTES };
        let plain = headers.tcp
            && headers.network == HEADER_BYTES
            && headers.transport == HEADER_BYTES + network_bytes
            && matches!(
                headers.payload - headers.transport,
                TCP_BYTES | STAMPED_BYTES
            );
        if !plain {
            return None;
        }
        let head = frame.get(..headers.payload)?;
        let short = Self::pick(virtio, head, headers)?;
        let mut restored = [0; RESTORED_BYTES_MAX];
        let payload_bytes = headers.end - headers.payload;
        let (virtio_restored, _) = restore_head(short.head(), payload_bytes, &mut restored)?;
        let same = virtio_restored == *virtio && restored.get(..head.len())? == head;
        same.then_some(short)
    }

    /// Picks what a receiver cannot compute.
    fn pick(virtio: &VirtioHeader, head: &[u8], headers: &Headers) -> Option<Self> {
        let network = head.get(headers.network..headers.transport)?;
        let transport = head.get(headers.transport..)?;
        let mut form = 0;
        let mut add = |bit: u8, is: bool| form |= if is { bit } else { 0 };
        add(FORM_IPV6, headers.ipv6);
        add(FORM_ATOMIC, !headers.ipv6 && headers.is_atomic(head));
        add(FORM_STAMPS, transport.len() > TCP_BYTES);
        add(FORM_SEGMENT, virtio.gso != Gso::None);
        add(FORM_ECN, virtio.ecn);
        let usual = virtio.segment_bytes == usual_size(headers.payload);
        add(FORM_USUAL_SIZE, usual && virtio.gso != Gso::None);
        let mut short = Self {
            head: [0; SHORT_BYTES_MAX],
            bytes: 0,
            identification: None,
            transport: 0,
        };
        short.push(&[form])?;
        short.push(head.get(..MACS_BYTES)?)?;
        if has_size(form) {
            short.push(&virtio.segment_bytes.to_le_bytes())?;
        }
        if headers.ipv6 {
            // Traffic class and flow label; hop limit and addresses.
            short.push(network.get(..4)?)?;
            short.push(network.get(7..)?)?;
        } else {
            // Type of service; identification; time to live; addresses.
            short.push(network.get(1..2)?)?;
            short.identification = Some(short.bytes);
            short.push(network.get(4..6)?)?;
            short.push(network.get(8..9)?)?;
            short.push(network.get(12..)?)?;
        }
        short.transport = short.bytes;
        // Ports, sequence number, acknowledgement; flags and window; time stamps.
        short.push(transport.get(..12)?)?;
        short.push(transport.get(13..16)?)?;
        if form & FORM_STAMPS != 0 {
            short.push(transport.get(TCP_BYTES + STAMPS_HEAD.len()..)?)?;
        }
        Some(short)
    }

    fn push(&mut self, part: &[u8]) -> Option<()> {
        let end = self.bytes + part.len();
        let room = self.head.get_mut(self.bytes..end)?;
        room.copy_from_slice(part);
        self.bytes = end;
        Some(())
    }

    /// Returns the headers of the first segment.
    fn head(&self) -> &[u8] {
        self.head.get(..self.bytes).unwrap_or_default()
    }

    /// Returns the length of the headers, in bytes: the same for all segments.
    #[inline]
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Writes the headers of the segment number `index`, `offset` payload bytes behind the first,
    /// to `out`, which has their length.
    #[inline]
    pub(super) fn write(&self, index: u16, offset: u32, last: bool, out: &mut [u8]) {
        out.copy_from_slice(self.head());
        if let Some(at) = self.identification
            && let Some(field) = out.get_mut(at..).and_then(<[u8]>::first_chunk_mut)
        {
            *field = u16::from_be_bytes(*field).wrapping_add(index).to_be_bytes();
        }
        let tcp = out.get_mut(self.transport..);
        if let Some([_, _, _, _, s0, s1, s2, s3, _, _, _, _, flags, ..]) = tcp {
            let sequence = u32::from_be_bytes([*s0, *s1, *s2, *s3]).wrapping_add(offset);
            [*s0, *s1, *s2, *s3] = sequence.to_be_bytes();
            *flags = flags_of_segment(*flags, index, last);
        }
    }
}

/// Whether the headers have the guest's segment size.
#[inline]
fn has_size(form: u8) -> bool {
    form & (FORM_SEGMENT | FORM_USUAL_SIZE) == FORM_SEGMENT
}

/// Returns the segment size that the usual MTU leaves, if the frame's headers have this length.
#[inline]
fn usual_size(headers_bytes: usize) -> u16 {
    (USUAL_MTU_BYTES + HEADER_BYTES - headers_bytes) as u16
}

/// Returns the length of a short segment's headers; `None` if there is no such form.
#[inline]
fn short_bytes(form: u8) -> Option<usize> {
    let bits = |mask: u8| form & mask;
    let wrong = bits(!FORMS) != 0
        || bits(FORM_IPV6 | FORM_ATOMIC) == FORM_IPV6 | FORM_ATOMIC
        || bits(FORM_SEGMENT) == 0 && bits(FORM_ECN | FORM_USUAL_SIZE) != 0;
    let mut bytes = 1 + MACS_BYTES + SHORT_TCP_BYTES;
    bytes += if has_size(form) { SIZE_BYTES } else { 0 };
    bytes += if bits(FORM_IPV6) != 0 {
        SHORT_IPV6_BYTES
    } else {
        SHORT_IPV4_BYTES
    };
    if bits(FORM_STAMPS) != 0 {
        bytes += SHORT_STAMPS_BYTES;
    }
    (!wrong).then_some(bytes)
}

/// A segment as it was before its headers were shortened. Its headers are in a buffer of the
/// caller.
#[derive(Debug, Clone, Copy)]
pub(super) struct Restored<'a> {
    pub(super) virtio: VirtioHeader,
    pub(super) headers: Headers,
    pub(super) payload: &'a [u8],
}

/// Restores a short segment: writes the headers of its frame to the beginning of `out`. Returns
/// `None` if it is malformed.
#[inline]
pub(super) fn restore<'a>(
    bytes: &'a [u8],
    out: &mut [u8; RESTORED_BYTES_MAX],
) -> Option<Restored<'a>> {
    let (head, payload) = bytes.split_at_checked(short_bytes(*bytes.first()?)?)?;
    let (virtio, headers) = restore_head(head, payload.len(), out)?;
    Some(Restored {
        virtio,
        headers,
        payload,
    })
}

/// Writes the headers of a frame with `payload_bytes`.
#[inline]
fn restore_head(
    head: &[u8],
    payload_bytes: usize,
    out: &mut [u8; RESTORED_BYTES_MAX],
) -> Option<(VirtioHeader, Headers)> {
    let (&[form], rest) = head.split_first_chunk()?;
    let is = |bit: u8| form & bit != 0;
    let (macs, mut rest) = rest.split_first_chunk::<MACS_BYTES>()?;
    let (link, packet) = out.split_first_chunk_mut::<HEADER_BYTES>()?;
    link[..MACS_BYTES].copy_from_slice(macs);
    let network_bytes = if is(FORM_IPV6) {
        IPV6_BYTES
    } else {
        IPV4_BYTES
    };
    let transport_bytes = if is(FORM_STAMPS) {
        STAMPED_BYTES
    } else {
        TCP_BYTES
    };
    let transport = HEADER_BYTES + network_bytes;
    let headers = Headers {
        ipv6: is(FORM_IPV6),
        tcp: true,
        network: HEADER_BYTES,
        transport,
        payload: transport + transport_bytes,
        end: transport + transport_bytes + payload_bytes,
    };
    let virtio = if is(FORM_SEGMENT) {
        let mut size = usual_size(headers.payload);
        if has_size(form) {
            let (field, after) = rest.split_first_chunk()?;
            (size, rest) = (u16::from_le_bytes(*field), after);
        }
        if size == 0 || payload_bytes == 0 {
            return None;
        }
        VirtioHeader {
            gso: if is(FORM_IPV6) { Gso::Tcp6 } else { Gso::Tcp4 },
            ecn: is(FORM_ECN),
            headers_bytes: headers.payload as u16,
            segment_bytes: size,
            ..VirtioHeader::default()
        }
    } else {
        VirtioHeader::default()
    };
    let segment_bytes = transport_bytes + payload_bytes;
    let (pseudo, rest) = if is(FORM_IPV6) {
        let (short, rest) = rest.split_first_chunk::<SHORT_IPV6_BYTES>()?;
        link[MACS_BYTES..].copy_from_slice(&TYPE_IPV6.to_be_bytes());
        (restore_ipv6(short, segment_bytes, packet)?, rest)
    } else {
        let (short, rest) = rest.split_first_chunk::<SHORT_IPV4_BYTES>()?;
        link[MACS_BYTES..].copy_from_slice(&TYPE_IPV4.to_be_bytes());
        let atomic = is(FORM_ATOMIC);
        (restore_ipv4(short, atomic, segment_bytes, packet)?, rest)
    };
    let (short, stamps) = rest.split_first_chunk::<SHORT_TCP_BYTES>()?;
    let (tcp, rest) = packet
        .get_mut(network_bytes..)?
        .split_first_chunk_mut::<TCP_BYTES>()?;
    tcp[..12].copy_from_slice(&short[..12]);
    tcp[12] = (transport_bytes as u8 / 4) << 4;
    tcp[13..16].copy_from_slice(&short[12..]);
    tcp[16..18].copy_from_slice(&checksum::fold(pseudo).to_be_bytes());
    tcp[18..].fill(0);
    if is(FORM_STAMPS) {
        let (stamps, _) = stamps.split_first_chunk::<SHORT_STAMPS_BYTES>()?;
        let (out, _) = rest.split_first_chunk_mut::<STAMPS_BYTES>()?;
        out[..STAMPS_HEAD.len()].copy_from_slice(&STAMPS_HEAD);
        out[STAMPS_HEAD.len()..].copy_from_slice(stamps);
    }
    let virtio = VirtioHeader {
        needs_checksum: true,
        checksum_start: transport as u16,
        checksum_offset: CHECKSUM_OFFSET,
        ..virtio
    };
    Some((virtio, headers))
}

/// Writes an IPv4 header in front of `segment_bytes` of TCP. Returns the sum of the pseudo-header.
#[inline]
fn restore_ipv4(
    short: &[u8; SHORT_IPV4_BYTES],
    atomic: bool,
    segment_bytes: usize,
    out: &mut [u8],
) -> Option<u64> {
    let [service, i0, i1, hops, addresses @ ..] = short;
    let length = u16::try_from(IPV4_BYTES + segment_bytes).ok()?;
    let [l0, l1] = length.to_be_bytes();
    let fragment = if atomic { 0x40 } else { 0 };
    let out = out.first_chunk_mut::<IPV4_BYTES>()?;
    out[..12].copy_from_slice(&[
        0x45, *service, l0, l1, *i0, *i1, fragment, 0, *hops, TCP, 0, 0,
    ]);
    out[12..].copy_from_slice(addresses);
    let sum = !checksum::fold(checksum::sum(out));
    out[10..12].copy_from_slice(&sum.to_be_bytes());
    Some(checksum::pseudo(addresses, TCP, segment_bytes))
}

/// Writes an IPv6 header in front of `segment_bytes` of TCP. Returns the sum of the pseudo-header.
#[inline]
fn restore_ipv6(
    short: &[u8; SHORT_IPV6_BYTES],
    segment_bytes: usize,
    out: &mut [u8],
) -> Option<u64> {
    let [v0, v1, v2, v3, hops, addresses @ ..] = short;
    let [l0, l1] = u16::try_from(segment_bytes).ok()?.to_be_bytes();
    if v0 >> 4 != 6 {
        return None;
    }
    let out = out.first_chunk_mut::<IPV6_BYTES>()?;
    out[..8].copy_from_slice(&[*v0, *v1, *v2, *v3, l0, l1, TCP, *hops]);
    out[8..].copy_from_slice(addresses);
    Some(checksum::pseudo(addresses, TCP, segment_bytes))
}
