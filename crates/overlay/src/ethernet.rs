//! Reads the beginning of Ethernet frames: addresses, VLAN tag and type.

use crate::address::Mac;

/// Bytes of a header without a tag.
pub const HEADER_BYTES: usize = 14;
/// Bytes of a VLAN tag.
pub const TAG_BYTES: usize = 4;
/// Longest frame, in bytes: an IP packet of 65,535 bytes behind a header with two tags. Frames of
/// this length are super-frames (see `docs/frame-plane.md`).
pub const FRAME_BYTES_MAX: usize = 65_535 + HEADER_BYTES + 2 * TAG_BYTES;
/// Shortest frame on a medium, without its check sequence. Shorter ones are taken nevertheless.
pub const FRAME_BYTES_MIN: usize = 60;

/// Type of IPv4 packets.
pub const TYPE_IPV4: u16 = 0x0800;
/// Type of ARP packets (RFC 826).
pub const TYPE_ARP: u16 = 0x0806;
/// Type of RARP packets (RFC 903).
pub const TYPE_RARP: u16 = 0x8035;
/// Type of frames with a VLAN tag (IEEE 802.1Q).
pub const TYPE_VLAN: u16 = 0x8100;
/// Type of IPv6 packets.
pub const TYPE_IPV6: u16 = 0x86dd;
/// Type of frames with a service tag (IEEE 802.1ad).
pub const TYPE_SERVICE_VLAN: u16 = 0x88a8;

/// The reserved VLAN number: no frame has it.
const VLAN_RESERVED: u16 = 0xfff;

/// Why a frame has no usable header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadFrame {
    /// It ends within its header, or names the reserved VLAN.
    Malformed,
    /// It is longer than [`FRAME_BYTES_MAX`].
    Oversized,
}

/// The header of a frame, and what follows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ethernet<'a> {
    /// The destination.
    pub to: Mac,
    /// The source.
    pub from: Mac,
    /// The tag's control information (priority, VLAN), if the frame has an 802.1Q tag.
    pub tag: Option<u16>,
    /// The type of the payload, behind the tag. Values below 1536 are lengths (IEEE 802.3).
    pub kind: u16,
    /// The payload, with padding.
    pub payload: &'a [u8],
}

impl<'a> Ethernet<'a> {
    /// Reads a frame.
    #[inline]
    pub fn parse(frame: &'a [u8]) -> Result<Self, BadFrame> {
        if frame.len() > FRAME_BYTES_MAX {
            return Err(BadFrame::Oversized);
        }
        let Some((header, payload)) = frame.split_first_chunk::<HEADER_BYTES>() else {
            return Err(BadFrame::Malformed);
        };
        let [a, b, c, d, e, f, g, h, i, j, k, l, kind @ ..] = *header;
        let mut parsed = Self {
            to: Mac([a, b, c, d, e, f]),
            from: Mac([g, h, i, j, k, l]),
            tag: None,
            kind: u16::from_be_bytes(kind),
            payload,
        };
        if parsed.kind == TYPE_VLAN {
            let Some(([t0, t1, k0, k1], payload)) = payload.split_first_chunk() else {
                return Err(BadFrame::Malformed);
            };
            let tag = u16::from_be_bytes([*t0, *t1]);
            if tag & 0xfff == VLAN_RESERVED {
                return Err(BadFrame::Malformed);
            }
            parsed.tag = Some(tag);
            parsed.kind = u16::from_be_bytes([*k0, *k1]);
            parsed.payload = payload;
        }
        Ok(parsed)
    }

    /// Returns the VLAN: 0 for frames without a tag, and for those with a priority only.
    #[inline]
    pub fn vlan(&self) -> u16 {
        self.tag.map_or(0, |tag| tag & 0xfff)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_read() {
        let mut frame = [0u8; 60];
        frame[..6].copy_from_slice(&[0xff; 6]);
        frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
        frame[12..14].copy_from_slice(&[0x08, 0x06]);
        let plain = Ethernet::parse(&frame).unwrap();
        assert_eq!((plain.to, plain.vlan()), (Mac::BROADCAST, 0));
        assert_eq!((plain.kind, plain.payload.len()), (TYPE_ARP, 46));
        frame[12..18].copy_from_slice(&[0x81, 0x00, 0xa0, 0x64, 0x86, 0xdd]);
        let tagged = Ethernet::parse(&frame).unwrap();
        assert_eq!((tagged.vlan(), tagged.tag), (100, Some(0xa064)));
        assert_eq!((tagged.kind, tagged.payload.len()), (TYPE_IPV6, 42));
        frame[14..16].copy_from_slice(&[0x0f, 0xff]);
        assert_eq!(Ethernet::parse(&frame), Err(BadFrame::Malformed));
    }

    #[test]
    fn lengths_are_limited() {
        assert_eq!(Ethernet::parse(&[0; 13]), Err(BadFrame::Malformed));
        let mut tagged = [0; 17];
        tagged[12] = 0x81;
        assert_eq!(Ethernet::parse(&tagged), Err(BadFrame::Malformed));
        let long = vec![0; FRAME_BYTES_MAX + 1];
        assert_eq!(Ethernet::parse(&long), Err(BadFrame::Oversized));
        assert!(Ethernet::parse(&long[1..]).is_ok());
    }
}
