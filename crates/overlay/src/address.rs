//! Names networks, and the addresses of frames and packets.

use std::fmt;

/// Identifies a network on all of its hosts: 64 random bits. Zero is no network.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct NetworkId(pub u64);

impl NetworkId {
    /// No network: the id in datagrams that concern two hosts and none of their networks.
    pub const NONE: Self = Self(0);
}

impl fmt::Debug for NetworkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NetworkId({:016x})", self.0)
    }
}

/// An Ethernet MAC address, in the order of its bytes in a frame.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// The address of all stations.
    pub const BROADCAST: Self = Self([0xff; 6]);
    /// No station.
    pub const ZERO: Self = Self([0; 6]);

    /// Whether this is the address of a group of stations, broadcast included.
    #[inline]
    pub fn is_group(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Whether bridges must not forward frames to it: 01:80:C2:00:00:00 to 0F (IEEE 802.1Q, table
    /// 8-1).
    #[inline]
    pub fn is_link_local(self) -> bool {
        self.0[..5] == [0x01, 0x80, 0xc2, 0, 0] && self.0[5] < 0x10
    }

    /// Returns the address as a number of 48 bits.
    #[inline]
    pub(crate) fn number(self) -> u64 {
        let [a, b, c, d, e, f] = self.0;
        u64::from_be_bytes([0, 0, a, b, c, d, e, f])
    }
}

/// A text that is no MAC address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoMac;

impl fmt::Display for NoMac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a MAC address is written as six bytes, such as 52:54:00:12:34:56")
    }
}

impl std::error::Error for NoMac {}

impl std::str::FromStr for Mac {
    type Err = NoMac;

    fn from_str(text: &str) -> Result<Self, NoMac> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2).ok_or(NoMac)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| NoMac)?;
        }
        match parts.next() {
            None => Ok(Self(bytes)),
            Some(_) => Err(NoMac),
        }
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// An address of a guest within its network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Address {
    /// IPv4.
    V4([u8; 4]),
    /// IPv6.
    V6([u8; 16]),
}

impl Address {
    /// Whether a station can have this address: it is neither unspecified, loopback, multicast nor
    /// broadcast.
    pub fn is_of_a_station(self) -> bool {
        match self {
            Self::V4([first, ..]) => first != 0 && first != 127 && first < 224,
            Self::V6(bytes) => bytes[0] != 0xff && bytes[..15].iter().any(|byte| *byte != 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mac_address_is_read_as_it_is_written() {
        let mac = Mac([0x52, 0x54, 0, 0xab, 0xcd, 0xef]);
        assert_eq!(mac.to_string().parse(), Ok(mac));
        assert_eq!("52:54:00:AB:CD:EF".parse(), Ok(mac));
        for wrong in [
            "",
            "52:54:00:ab:cd",
            "52:54:00:ab:cd:ef:0",
            "5:54:00:ab:cd:ef",
        ] {
            assert_eq!(wrong.parse::<Mac>(), Err(NoMac), "{wrong}");
        }
    }
}
