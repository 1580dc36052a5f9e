//! Encodes and decodes STUN Binding requests and their answers (RFC 8489).

mod client;
mod limits;
mod server;

pub(crate) use client::{Client, Pending};
pub use client::{Observation, Reflexive, ReflexiveError};
pub(crate) use server::Server;
pub use server::{binding_answer, serve_stun};

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The maximum length of a message that is decoded, in bytes: what fits into every path (RFC 8489,
/// section 6.1).
pub const STUN_BYTES_MAX: usize = 548;
/// The maximum length of an answer, in bytes.
pub const STUN_ANSWER_BYTES_MAX: usize = 52;
/// The maximum number of attributes of a message that is decoded.
const ATTRIBUTES_MAX: usize = 16;
/// The maximum number of attributes that an error answer names.
const UNKNOWN_MAX: usize = 4;
const HEADER_BYTES: usize = 20;
const MAGIC_COOKIE: [u8; 4] = [0x21, 0x12, 0xa4, 0x42];
const BINDING_REQUEST: u16 = 0x0001;
const BINDING_SUCCESS: u16 = 0x0101;
const BINDING_ERROR: u16 = 0x0111;
const ERROR_CODE: u16 = 0x0009;
const UNKNOWN_ATTRIBUTES: u16 = 0x000a;
const XOR_MAPPED_ADDRESS: u16 = 0x0020;
const FINGERPRINT: u16 = 0x8028;
const FINGERPRINT_XOR: u32 = 0x5354_554e;
/// Attributes from this one on may be ignored (RFC 8489, section 14).
const OPTIONAL_FROM: u16 = 0x8000;
/// The attributes of RFC 8489 that must be understood. In a request without credentials they mean
/// nothing.
const UNDERSTOOD: [u16; 11] = [
    0x0001, 0x0006, 0x0008, 0x0009, 0x000a, 0x0014, 0x0015, 0x001c, 0x001d, 0x001e, 0x0020,
];
const UNKNOWN_ATTRIBUTE: u16 = 420;

/// What a request and its answer have in common, chosen at random.
pub type TransactionId = [u8; 12];

/// A request for the address that a datagram comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BindingRequest {
    /// Returned in the answer.
    pub transaction: TransactionId,
    /// Whether it has a FINGERPRINT, and so wants one in the answer.
    pub fingerprint: bool,
    /// Attributes that must be understood and are not: at most four.
    pub unknown: Vec<u16>,
}

/// The answer to a [`BindingRequest`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BindingAnswer {
    /// That of the request.
    pub transaction: TransactionId,
    /// Whether it has a FINGERPRINT.
    pub fingerprint: bool,
    /// The address that the request came from, or an error.
    pub result: Result<SocketAddr, BindingError>,
}

/// An error answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BindingError {
    /// The code: 300 to 699.
    pub code: u16,
    /// With code 420, the attributes that were not understood: at most four.
    pub unknown: Vec<u16>,
}

/// Why bytes are not a Binding request or answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a STUN message: {0}")]
pub struct StunError(&'static str);

impl BindingRequest {
    /// Returns the bytes on the wire. What is unknown is left out.
    pub fn encode(&self) -> Vec<u8> {
        Writer::new(BINDING_REQUEST, &self.transaction).finish(self.fingerprint)
    }

    /// Decodes a whole datagram.
    pub fn decode(bytes: &[u8]) -> Result<Self, StunError> {
        let message = Message::decode(bytes, &[BINDING_REQUEST])?;
        let kinds = message.attributes.iter().map(|(kind, _)| *kind);
        let unknown = kinds.filter(|kind| *kind < OPTIONAL_FROM && !UNDERSTOOD.contains(kind));
        Ok(Self {
            transaction: message.transaction,
            fingerprint: message.fingerprint,
            unknown: unknown.take(UNKNOWN_MAX).collect(),
        })
    }
}

impl BindingAnswer {
    /// Returns the bytes on the wire: at most [`STUN_ANSWER_BYTES_MAX`].
    pub fn encode(&self) -> Vec<u8> {
        let kind = match self.result {
            Ok(_) => BINDING_SUCCESS,
            Err(_) => BINDING_ERROR,
        };
        let mut writer = Writer::new(kind, &self.transaction);
        match &self.result {
            Ok(address) => {
                writer.attribute(
                    XOR_MAPPED_ADDRESS,
                    &write_address(*address, &self.transaction),
                );
            }
            Err(error) => {
                let code = [0, 0, (error.code / 100) as u8, (error.code % 100) as u8];
                writer.attribute(ERROR_CODE, &code);
                let unknown = error.unknown.iter().take(UNKNOWN_MAX);
                let unknown: Vec<u8> = unknown.flat_map(|kind| kind.to_be_bytes()).collect();
                if !unknown.is_empty() {
                    writer.attribute(UNKNOWN_ATTRIBUTES, &unknown);
                }
            }
        }
        writer.finish(self.fingerprint)
    }

    /// Decodes a whole datagram.
    pub fn decode(bytes: &[u8]) -> Result<Self, StunError> {
        let message = Message::decode(bytes, &[BINDING_SUCCESS, BINDING_ERROR])?;
        let result = match message.kind {
            BINDING_ERROR => Err(read_error(&message)?),
            _ => {
                let value = message.value(XOR_MAPPED_ADDRESS);
                let value = value.ok_or(StunError("it has no XOR-MAPPED-ADDRESS"))?;
                let address = read_address(value, &message.transaction);
                Ok(address.ok_or(StunError("its XOR-MAPPED-ADDRESS is malformed"))?)
            }
        };
        Ok(Self {
            transaction: message.transaction,
            fingerprint: message.fingerprint,
            result,
        })
    }
}

/// A message whose form is right (RFC 8489, section 5), with its attributes but the FINGERPRINT.
struct Message<'a> {
    kind: u16,
    transaction: TransactionId,
    attributes: Vec<(u16, &'a [u8])>,
    fingerprint: bool,
}

impl<'a> Message<'a> {
    fn decode(bytes: &'a [u8], kinds: &[u16]) -> Result<Self, StunError> {
        if bytes.len() > STUN_BYTES_MAX {
            return Err(StunError("it is too long"));
        }
        let (header, mut rest) = bytes
            .split_first_chunk::<HEADER_BYTES>()
            .ok_or(StunError("it is too short"))?;
        let [a, b, c, d, cookie @ .., _, _, _, _, _, _, _, _, _, _, _, _] = *header;
        let mut transaction = TransactionId::default();
        transaction.copy_from_slice(&header[8..]);
        if cookie != MAGIC_COOKIE {
            return Err(StunError("it has another magic cookie"));
        }
        let kind = u16::from_be_bytes([a, b]);
        if !kinds.contains(&kind) {
            return Err(StunError("it is of another kind"));
        }
        let length = usize::from(u16::from_be_bytes([c, d]));
        if length != rest.len() || !length.is_multiple_of(4) {
            return Err(StunError("its length is wrong"));
        }
        let mut message = Self {
            kind,
            transaction,
            attributes: Vec::new(),
            fingerprint: false,
        };
        while let Some((&[a, b, c, d], after)) = rest.split_first_chunk() {
            if message.fingerprint {
                return Err(StunError("something follows its FINGERPRINT"));
            }
            let kind = u16::from_be_bytes([a, b]);
            let length = usize::from(u16::from_be_bytes([c, d]));
            let padded = after.split_at_checked(length.next_multiple_of(4));
            let (padded, after) = padded.ok_or(StunError("an attribute is cut"))?;
            let value = &padded[..length];
            if kind == FINGERPRINT {
                let before = &bytes[..bytes.len() - rest.len()];
                if value != fingerprint(before).as_slice() {
                    return Err(StunError("its FINGERPRINT is wrong"));
                }
                message.fingerprint = true;
            } else if message.attributes.len() == ATTRIBUTES_MAX {
                return Err(StunError("it has too many attributes"));
            } else {
                message.attributes.push((kind, value));
            }
            rest = after;
        }
        Ok(message)
    }

    /// Returns the value of the first attribute of a kind; later ones do not count.
    fn value(&self, kind: u16) -> Option<&'a [u8]> {
        let found = self.attributes.iter().find(|(other, _)| *other == kind);
        found.map(|(_, value)| *value)
    }
}

fn read_error(message: &Message<'_>) -> Result<BindingError, StunError> {
    let Some([_, _, class, number, ..]) = message.value(ERROR_CODE) else {
        return Err(StunError("it has no ERROR-CODE"));
    };
    let class = class & 7;
    if !(3..=6).contains(&class) || *number > 99 {
        return Err(StunError("its ERROR-CODE is malformed"));
    }
    let unknown = message.value(UNKNOWN_ATTRIBUTES).unwrap_or_default();
    let unknown = unknown.chunks_exact(2).take(UNKNOWN_MAX);
    Ok(BindingError {
        code: u16::from(class) * 100 + u16::from(*number),
        unknown: unknown
            .map(|kind| u16::from_be_bytes([kind[0], kind[1]]))
            .collect(),
    })
}

/// Returns the value of XOR-MAPPED-ADDRESS (RFC 8489, section 14.2).
fn write_address(address: SocketAddr, transaction: &TransactionId) -> Vec<u8> {
    let port = address.port() ^ u16::from_be_bytes([MAGIC_COOKIE[0], MAGIC_COOKIE[1]]);
    let (family, ip) = match address.ip() {
        IpAddr::V4(ip) => (1, ip.octets().to_vec()),
        IpAddr::V6(ip) => (2, ip.octets().to_vec()),
    };
    let mut value = vec![0, family];
    value.extend(port.to_be_bytes());
    value.extend(
        ip.iter()
            .zip(mask(transaction))
            .map(|(byte, mask)| byte ^ mask),
    );
    value
}

fn read_address(value: &[u8], transaction: &TransactionId) -> Option<SocketAddr> {
    let (&[_, family, a, b], ip) = value.split_first_chunk()?;
    let port = u16::from_be_bytes([a ^ MAGIC_COOKIE[0], b ^ MAGIC_COOKIE[1]]);
    let ip: Vec<u8> = ip
        .iter()
        .zip(mask(transaction))
        .map(|(byte, mask)| byte ^ mask)
        .collect();
    let ip = match family {
        1 => Ipv4Addr::from(<[u8; 4]>::try_from(ip).ok()?).into(),
        2 => Ipv6Addr::from(<[u8; 16]>::try_from(ip).ok()?).into(),
        _ => return None,
    };
    // Longer values were cut by the mask.
    let whole = value.len() == 4 + if family == 1 { 4 } else { 16 };
    whole.then_some(SocketAddr::new(ip, port))
}

/// Returns the bytes that an address is combined with.
fn mask(transaction: &TransactionId) -> impl Iterator<Item = u8> {
    MAGIC_COOKIE.into_iter().chain(*transaction)
}

struct Writer(Vec<u8>);

impl Writer {
    fn new(kind: u16, transaction: &TransactionId) -> Self {
        let mut bytes = kind.to_be_bytes().to_vec();
        bytes.extend([0, 0]);
        bytes.extend(MAGIC_COOKIE);
        bytes.extend(transaction);
        Self(bytes)
    }

    /// Appends an attribute whose length is a multiple of two.
    fn attribute(&mut self, kind: u16, value: &[u8]) {
        self.0.extend(kind.to_be_bytes());
        self.0.extend((value.len() as u16).to_be_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn finish(mut self, with_fingerprint: bool) -> Vec<u8> {
        let more = if with_fingerprint { 8 } else { 0 };
        let length = (self.0.len() + more - HEADER_BYTES) as u16;
        self.0[2..4].copy_from_slice(&length.to_be_bytes());
        if with_fingerprint {
            let value = fingerprint(&self.0);
            self.attribute(FINGERPRINT, &value);
        }
        self.0
    }
}

/// Returns the FINGERPRINT of a message from its bytes before that attribute (RFC 8489, section
/// 14.7).
fn fingerprint(before: &[u8]) -> [u8; 4] {
    let step = |crc: u32, byte: &u8| {
        let index = (crc as u8) ^ byte;
        (crc >> 8) ^ CRC_TABLE[usize::from(index)]
    };
    let crc = !before.iter().fold(!0, step);
    (crc ^ FINGERPRINT_XOR).to_be_bytes()
}

/// The remainders of CRC-32 (ITU V.42) for each byte.
const CRC_TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 {
                (crc >> 1) ^ 0xedb8_8320
            } else {
                crc >> 1
            };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

#[cfg(test)]
mod tests;
