//! The header in front of frames on a TAP with `IFF_VNET_HDR`: `struct virtio_net_hdr` (Virtual
//! I/O Device specification 1.2, section 5.1.6), little-endian.

/// Bytes of a header on the path, and of the short form on a TAP.
pub const VIRTIO_BYTES: usize = 10;
/// Bytes of the form with the number of buffers, which a TAP may use.
pub const VIRTIO_LONG_BYTES: usize = 12;

const FLAG_NEEDS_CHECKSUM: u8 = 1;
const FLAG_CHECKSUM_VALID: u8 = 2;
const GSO_NONE: u8 = 0;
const GSO_TCP4: u8 = 1;
const GSO_TCP6: u8 = 4;
const GSO_UDP: u8 = 5;
const GSO_ECN: u8 = 0x80;

/// How a super-frame is to be cut into frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Gso {
    /// It is no super-frame.
    #[default]
    None,
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
    /// UDP datagrams of equal length, over IPv4 or IPv6.
    Udp,
}

/// Why a header cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VirtioError {
    /// There are fewer bytes than a header has.
    #[error("shorter than a virtio header")]
    Short,
    /// It asks for a kind of segmentation that is not offered.
    #[error("unknown segmentation {0:#04x}")]
    Segmentation(u8),
    /// It says that a super-frame's segments are empty.
    #[error("segments of no bytes")]
    NoSize,
    /// Its checksum is outside the frame.
    #[error("a checksum outside the frame")]
    Checksum,
}

/// What a header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VirtioHeader {
    /// Whether the checksum at `checksum_start + checksum_offset` is partial: it covers the
    /// pseudo-header, and the rest from `checksum_start` on must be added.
    pub needs_checksum: bool,
    /// Whether the checksum was verified.
    pub checksum_valid: bool,
    /// How the frame is to be cut.
    pub gso: Gso,
    /// Whether the first of the segments carries TCP's CWR flag.
    pub ecn: bool,
    /// Bytes before the payload. A hint.
    pub headers_bytes: u16,
    /// Payload bytes of each segment but the last.
    pub segment_bytes: u16,
    /// Where the checksum starts, in bytes from the frame's beginning.
    pub checksum_start: u16,
    /// Where it is stored, in bytes from there.
    pub checksum_offset: u16,
}

impl VirtioHeader {
    /// Splits a header of [`VIRTIO_BYTES`] off, and checks it against the frame behind it.
    #[inline]
    pub fn split(bytes: &[u8]) -> Result<(Self, &[u8]), VirtioError> {
        let Some((header, frame)) = bytes.split_first_chunk::<VIRTIO_BYTES>() else {
            return Err(VirtioError::Short);
        };
        Ok((Self::parse(header, frame.len())?, frame))
    }

    /// Reads a header in front of a frame of `frame_bytes`. Of the long form, these are the first
    /// [`VIRTIO_BYTES`].
    #[inline]
    pub fn parse(bytes: &[u8; VIRTIO_BYTES], frame_bytes: usize) -> Result<Self, VirtioError> {
        let [flags, gso, h0, h1, s0, s1, c0, c1, o0, o1] = *bytes;
        let header = Self {
            needs_checksum: flags & FLAG_NEEDS_CHECKSUM != 0,
            checksum_valid: flags & FLAG_CHECKSUM_VALID != 0,
            gso: match gso & !GSO_ECN {
                GSO_NONE if gso == GSO_NONE => Gso::None,
                GSO_TCP4 => Gso::Tcp4,
                GSO_TCP6 => Gso::Tcp6,
                GSO_UDP if gso == GSO_UDP => Gso::Udp,
                _ => return Err(VirtioError::Segmentation(gso)),
            },
            ecn: gso & GSO_ECN != 0,
            headers_bytes: u16::from_le_bytes([h0, h1]),
            segment_bytes: u16::from_le_bytes([s0, s1]),
            checksum_start: u16::from_le_bytes([c0, c1]),
            checksum_offset: u16::from_le_bytes([o0, o1]),
        };
        if header.gso != Gso::None && header.segment_bytes == 0 {
            return Err(VirtioError::NoSize);
        }
        if header.needs_checksum && header.checksum_at() + 2 > frame_bytes {
            return Err(VirtioError::Checksum);
        }
        Ok(header)
    }

    /// Returns the bytes of the header. The long form has two bytes more, zero in front of a TAP.
    #[inline]
    pub fn to_bytes(self) -> [u8; VIRTIO_BYTES] {
        let mut flags = 0;
        if self.needs_checksum {
            flags |= FLAG_NEEDS_CHECKSUM;
        }
        if self.checksum_valid {
            flags |= FLAG_CHECKSUM_VALID;
        }
        let gso = match self.gso {
            Gso::None => GSO_NONE,
            Gso::Tcp4 => GSO_TCP4,
            Gso::Tcp6 => GSO_TCP6,
            Gso::Udp => GSO_UDP,
        };
        let gso = if self.ecn { gso | GSO_ECN } else { gso };
        let [h0, h1] = self.headers_bytes.to_le_bytes();
        let [s0, s1] = self.segment_bytes.to_le_bytes();
        let [c0, c1] = self.checksum_start.to_le_bytes();
        let [o0, o1] = self.checksum_offset.to_le_bytes();
        [flags, gso, h0, h1, s0, s1, c0, c1, o0, o1]
    }

    /// Returns where the checksum is stored, in bytes from the frame's beginning.
    #[inline]
    pub(crate) fn checksum_at(&self) -> usize {
        usize::from(self.checksum_start) + usize::from(self.checksum_offset)
    }

    /// Returns the header of one frame of this super-frame.
    pub(crate) fn without_gso(self) -> Self {
        Self {
            gso: Gso::None,
            ecn: false,
            headers_bytes: 0,
            segment_bytes: 0,
            ..self
        }
    }
}

/// What a device can do with the frames that are written to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Offloads {
    /// It completes checksums.
    pub checksum: bool,
    /// It takes super-frames of TCP over IPv4.
    pub tcp4: bool,
    /// It takes super-frames of TCP over IPv6.
    pub tcp6: bool,
    /// It takes super-frames of TCP with CWR.
    pub ecn: bool,
    /// It takes super-frames of UDP (Linux 6.2 and later).
    pub udp: bool,
}

impl Offloads {
    /// Returns whether a frame with this header can be written as it is.
    pub fn take(&self, header: &VirtioHeader) -> bool {
        let gso = match header.gso {
            Gso::None => true,
            Gso::Tcp4 => self.tcp4,
            Gso::Tcp6 => self.tcp6,
            Gso::Udp => self.udp,
        };
        gso && (self.checksum || !header.needs_checksum) && (self.ecn || !header.ecn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_by_hand() {
        let bytes = [1, 0x81, 54, 0, 0xb4, 5, 34, 0, 16, 0];
        let header = VirtioHeader::parse(&bytes, 1514).unwrap();
        let expected = VirtioHeader {
            needs_checksum: true,
            checksum_valid: false,
            gso: Gso::Tcp4,
            ecn: true,
            headers_bytes: 54,
            segment_bytes: 1460,
            checksum_start: 34,
            checksum_offset: 16,
        };
        assert_eq!(header, expected);
        assert_eq!(header.to_bytes(), bytes);
        assert_eq!(VirtioHeader::parse(&bytes, 51), Err(VirtioError::Checksum));
        for (gso, size, error) in [
            (3, 1, VirtioError::Segmentation(3)),
            (0x80, 1, VirtioError::Segmentation(0x80)),
            (0x85, 1, VirtioError::Segmentation(0x85)),
            (5, 0, VirtioError::NoSize),
        ] {
            let bytes = [0, gso, 0, 0, size, 0, 0, 0, 0, 0];
            assert_eq!(VirtioHeader::parse(&bytes, 99), Err(error));
        }
        assert_eq!(VirtioHeader::split(&bytes[..9]), Err(VirtioError::Short));
    }

    #[test]
    fn devices_take_what_they_can() {
        let mut header = VirtioHeader::default();
        assert!(Offloads::default().take(&header));
        header.needs_checksum = true;
        let mut offloads = Offloads::default();
        assert!(!offloads.take(&header));
        offloads.checksum = true;
        assert!(offloads.take(&header));
        header.gso = Gso::Udp;
        assert!(!offloads.take(&header));
        offloads.udp = true;
        assert!(offloads.take(&header));
    }
}
