//! Defines the Hello: the first message on a control connection, in a form that never changes.

use longhaul_protocol::Incarnation;
use std::fmt;

/// The first bytes of every Hello.
pub const HELLO_MAGIC: [u8; 8] = *b"LONGHAUL";
/// The maximum size of a Hello's body, in bytes.
pub const HELLO_BODY_BYTES_MAX: usize = 1024;
/// The maximum length of the software string, in bytes.
pub const SOFTWARE_BYTES_MAX: usize = 255;
pub(crate) const HELLO_HEAD_BYTES: usize = 10;

/// The protocol versions of a side, and its software's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// Oldest version spoken.
    pub version_min: u16,
    /// Newest version spoken.
    pub version_max: u16,
    /// Name and version of the program, such as `longhaul 0.1.0`.
    pub software: String,
    /// The incarnation of the host's journals: a host that lost them has another one. Older
    /// agents send none.
    pub incarnation: Option<Incarnation>,
}

/// Why bytes are not a valid Hello.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a Longhaul agent's Hello: {0}")]
pub struct HelloError(&'static str);

/// No protocol version is common to both sides.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Incompatible {
    /// This host's Hello.
    pub here: Hello,
    /// The other host's Hello.
    pub there: Hello,
}

impl fmt::Display for Incompatible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let update = if self.here.version_max < self.there.version_min {
            "this host"
        } else {
            "the other host"
        };
        let (here, there) = (&self.here, &self.there);
        write!(
            f,
            "incompatible agents: this host speaks {here}, the other host {there}; \
             update Longhaul on {update}"
        )
    }
}

impl fmt::Display for Hello {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let software = &self.software;
        let (min, max) = (self.version_min, self.version_max);
        if min == max {
            write!(f, "protocol {max} ({software})")
        } else {
            write!(f, "protocols {min} to {max} ({software})")
        }
    }
}

impl Hello {
    /// Returns the bytes on the wire.
    pub fn encode(&self) -> Vec<u8> {
        let mut cut = self.software.len().min(SOFTWARE_BYTES_MAX);
        while !self.software.is_char_boundary(cut) {
            cut -= 1;
        }
        let software = &self.software.as_bytes()[..cut];
        let incarnation = self.incarnation.as_ref().map_or(&[][..], |it| &it.0);
        let body = (5 + software.len() + incarnation.len()) as u16;
        let mut bytes = HELLO_MAGIC.to_vec();
        bytes.extend(body.to_le_bytes());
        bytes.extend(self.version_min.to_le_bytes());
        bytes.extend(self.version_max.to_le_bytes());
        bytes.push(software.len() as u8);
        bytes.extend(software);
        bytes.extend(incarnation);
        bytes
    }

    /// Decodes the head (magic and length) and returns the length of the body.
    pub fn decode_head(head: &[u8; HELLO_HEAD_BYTES]) -> Result<usize, HelloError> {
        if head[..8] != HELLO_MAGIC {
            return Err(HelloError("it starts with other bytes"));
        }
        let body = usize::from(u16::from_le_bytes([head[8], head[9]]));
        if body > HELLO_BODY_BYTES_MAX {
            return Err(HelloError("it is too long"));
        }
        Ok(body)
    }

    /// Decodes the body. Bytes after the incarnation belong to later versions, and are ignored.
    pub fn decode_body(body: &[u8]) -> Result<Self, HelloError> {
        let [a, b, c, d, length, rest @ ..] = body else {
            return Err(HelloError("it is too short"));
        };
        let (software, rest) = rest
            .split_at_checked(usize::from(*length))
            .ok_or(HelloError("its software string is cut"))?;
        let hello = Self {
            version_min: u16::from_le_bytes([*a, *b]),
            version_max: u16::from_le_bytes([*c, *d]),
            software: crate::error::printable(software),
            incarnation: rest.first_chunk().copied().map(Incarnation),
        };
        if hello.version_min > hello.version_max {
            return Err(HelloError("its oldest version is newer than its newest"));
        }
        Ok(hello)
    }

    /// Returns the newest version common to both sides.
    pub fn agree(&self, there: &Self) -> Result<u16, Incompatible> {
        let newest = self.version_max.min(there.version_max);
        if newest < self.version_min.max(there.version_min) {
            return Err(Incompatible {
                here: self.clone(),
                there: there.clone(),
            });
        }
        Ok(newest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hello(min: u16, max: u16) -> Hello {
        Hello {
            version_min: min,
            version_max: max,
            software: "longhaul 0.1.0".to_owned(),
            incarnation: None,
        }
    }

    fn decode(bytes: &[u8]) -> Result<Hello, HelloError> {
        let head = bytes.first_chunk().ok_or(HelloError("it is too short"))?;
        let length = Hello::decode_head(head)?;
        let body = bytes[HELLO_HEAD_BYTES..]
            .get(..length)
            .ok_or(HelloError("it is too short"))?;
        Hello::decode_body(body)
    }

    #[test]
    fn the_bytes_are_those_of_the_wire_formats_page() {
        let bytes = b"LONGHAUL\x13\0\x01\0\x02\0\x0elonghaul 0.1.0";
        assert_eq!(hello(1, 2).encode(), bytes);
        assert_eq!(decode(bytes), Ok(hello(1, 2)));
    }

    #[test]
    fn the_incarnation_follows_the_software() {
        let bytes = b"LONGHAUL\x16\0\x01\0\x03\0\x01x0123456789abcdef";
        let hello = Hello {
            software: "x".to_owned(),
            incarnation: Some(Incarnation(*b"0123456789abcdef")),
            ..hello(1, 3)
        };
        assert_eq!(hello.encode(), bytes);
        assert_eq!(decode(bytes), Ok(hello));
    }

    #[test]
    fn later_versions_may_append() {
        let bytes = b"LONGHAUL\x18\0\x01\0\x02\0\x01x0123456789abcdef\xff\xff";
        let hello = decode(bytes).unwrap();
        assert_eq!(hello.software, "x");
        assert_eq!(hello.incarnation, Some(Incarnation(*b"0123456789abcdef")));
        // An older agent's, or one that is cut, is none.
        let bytes = b"LONGHAUL\x08\0\x01\0\x02\0\x01x\xff\xff";
        assert_eq!(decode(bytes).unwrap().incarnation, None);
    }

    #[test]
    fn versions_are_agreed_upon_or_both_named() {
        assert_eq!(hello(1, 3).agree(&hello(2, 5)), Ok(3));
        assert_eq!(hello(2, 5).agree(&hello(1, 3)), Ok(3));
        let old_here = hello(1, 1).agree(&hello(2, 3)).unwrap_err().to_string();
        assert!(old_here.contains("protocol 1 ") && old_here.contains("protocols 2 to 3"));
        assert!(old_here.ends_with("update Longhaul on this host"));
        let old_there = hello(2, 3).agree(&hello(1, 1)).unwrap_err().to_string();
        assert!(old_there.ends_with("update Longhaul on the other host"));
    }

    proptest! {
        #[test]
        fn every_hello_survives(
            min in 0u16..=9,
            more in 0u16..=9,
            software in "\\PC{0,300}",
            incarnation: Option<[u8; 16]>,
        ) {
            let incarnation = incarnation.map(Incarnation);
            let hello = Hello { version_min: min, version_max: min + more, software, incarnation };
            let read = decode(&hello.encode()).unwrap();
            prop_assert_eq!((read.version_min, read.version_max), (min, min + more));
            prop_assert_eq!(read.incarnation, hello.incarnation);
            prop_assert!(hello.software.starts_with(&read.software));
        }

        #[test]
        fn any_bytes_give_an_answer(
            bytes in proptest::collection::vec(any::<u8>(), 0..64),
            with_magic: bool,
        ) {
            let mut input = if with_magic { HELLO_MAGIC.to_vec() } else { Vec::new() };
            input.extend(bytes);
            if let Ok(read) = decode(&input) {
                prop_assert!(read.version_min <= read.version_max);
            }
        }
    }
}
