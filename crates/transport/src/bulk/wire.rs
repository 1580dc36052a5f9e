//! Encodes and decodes the bytes that open a bulk connection and each of its streams.

use super::{BULK_STREAMS_MAX, BulkBinding, BulkToken};
use longhaul_protocol::{Attempt, AttemptId, Epoch, MigrationId};

const OPENING_MAGIC: [u8; 4] = *b"LHBK";
const FORMAT: u8 = 1;
const BINDING_BYTES: usize = 16;
/// Length of a [`BulkOpening`] on the wire.
pub(crate) const OPENING_BYTES: usize = 7 + 32 + BINDING_BYTES;
/// Length of a [`StreamHeader`] on the wire.
pub(crate) const STREAM_HEADER_BYTES: usize = 2 + BINDING_BYTES;
/// The answer to an accepted opening.
pub(crate) const OPENING_ANSWER: [u8; 4] = *b"LHOK";

/// Why bytes are not a valid opening.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not the opening of a bulk connection or stream: {0}")]
pub struct BulkWireError(&'static str);

/// The purpose of a bulk connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BulkPurpose {
    /// Frames of a migration; needs a token.
    Migration,
    /// A measurement: the receiver counts and discards; the token and binding are zero.
    Probe,
}

/// The first bytes on a bulk connection, from the dialler, on a bidirectional stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BulkOpening {
    /// The purpose of the connection.
    pub purpose: BulkPurpose,
    /// The number of frame streams that follow.
    pub streams: u8,
    /// The token given on the control connection.
    pub token: BulkToken,
    /// The binding of the connection.
    pub binding: BulkBinding,
}

/// The content of a unidirectional stream of a bulk connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamKind {
    /// Frames, from the dialler.
    Frames,
    /// Acknowledgements, to the dialler.
    Acknowledgements,
}

/// The first bytes on a unidirectional stream of a bulk connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamHeader {
    /// The content of the stream.
    pub kind: StreamKind,
    /// The binding of the connection.
    pub binding: BulkBinding,
}

impl BulkOpening {
    /// Returns the bytes on the wire.
    pub fn encode(&self) -> [u8; OPENING_BYTES] {
        let mut bytes = [0; OPENING_BYTES];
        bytes[..4].copy_from_slice(&OPENING_MAGIC);
        bytes[4] = FORMAT;
        bytes[5] = match self.purpose {
            BulkPurpose::Migration => 1,
            BulkPurpose::Probe => 2,
        };
        bytes[6] = self.streams;
        bytes[7..39].copy_from_slice(&self.token.to_bytes());
        bytes[39..].copy_from_slice(&encode_binding(&self.binding));
        bytes
    }

    /// Decodes the bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, BulkWireError> {
        let bytes: &[u8; OPENING_BYTES] = bytes
            .try_into()
            .map_err(|_| BulkWireError("it has another length"))?;
        if bytes[..4] != OPENING_MAGIC {
            return Err(BulkWireError("it starts with other bytes"));
        }
        if bytes[4] != FORMAT {
            return Err(BulkWireError("its format is unknown here"));
        }
        let purpose = match bytes[5] {
            1 => BulkPurpose::Migration,
            2 => BulkPurpose::Probe,
            _ => return Err(BulkWireError("its purpose is unknown here")),
        };
        let streams = bytes[6];
        if streams == 0 || streams > BULK_STREAMS_MAX {
            return Err(BulkWireError("its number of streams is out of range"));
        }
        let mut token = [0; 32];
        token.copy_from_slice(&bytes[7..39]);
        let mut binding = [0; BINDING_BYTES];
        binding.copy_from_slice(&bytes[39..]);
        Ok(Self {
            purpose,
            streams,
            token: BulkToken::from_bytes(token),
            binding: decode_binding(&binding),
        })
    }
}

impl StreamHeader {
    /// Returns the bytes on the wire.
    pub fn encode(&self) -> [u8; STREAM_HEADER_BYTES] {
        let mut bytes = [0; STREAM_HEADER_BYTES];
        bytes[0] = FORMAT;
        bytes[1] = match self.kind {
            StreamKind::Frames => 1,
            StreamKind::Acknowledgements => 2,
        };
        bytes[2..].copy_from_slice(&encode_binding(&self.binding));
        bytes
    }

    /// Decodes the bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, BulkWireError> {
        let bytes: &[u8; STREAM_HEADER_BYTES] = bytes
            .try_into()
            .map_err(|_| BulkWireError("it has another length"))?;
        if bytes[0] != FORMAT {
            return Err(BulkWireError("its format is unknown here"));
        }
        let kind = match bytes[1] {
            1 => StreamKind::Frames,
            2 => StreamKind::Acknowledgements,
            _ => return Err(BulkWireError("its kind is unknown here")),
        };
        let mut binding = [0; BINDING_BYTES];
        binding.copy_from_slice(&bytes[2..]);
        Ok(Self {
            kind,
            binding: decode_binding(&binding),
        })
    }
}

fn encode_binding(binding: &BulkBinding) -> [u8; BINDING_BYTES] {
    let mut bytes = [0; BINDING_BYTES];
    bytes[..8].copy_from_slice(&binding.attempt.migration.0);
    bytes[8..12].copy_from_slice(&binding.attempt.attempt.0.to_le_bytes());
    bytes[12..].copy_from_slice(&binding.epoch.0.to_le_bytes());
    bytes
}

fn decode_binding(bytes: &[u8; BINDING_BYTES]) -> BulkBinding {
    let [
        m0,
        m1,
        m2,
        m3,
        m4,
        m5,
        m6,
        m7,
        a0,
        a1,
        a2,
        a3,
        e0,
        e1,
        e2,
        e3,
    ] = *bytes;
    BulkBinding {
        attempt: AttemptId {
            migration: MigrationId([m0, m1, m2, m3, m4, m5, m6, m7]),
            attempt: Attempt(u32::from_le_bytes([a0, a1, a2, a3])),
        },
        epoch: Epoch(u32::from_le_bytes([e0, e1, e2, e3])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn binding() -> BulkBinding {
        BulkBinding {
            attempt: AttemptId {
                migration: MigrationId([0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7]),
                attempt: Attempt(1),
            },
            epoch: Epoch(0x0203),
        }
    }

    #[test]
    fn the_bytes_are_those_of_the_wire_formats_page() {
        let opening = BulkOpening {
            purpose: BulkPurpose::Migration,
            streams: 16,
            token: BulkToken::from_bytes([0x55; 32]),
            binding: binding(),
        };
        let mut bytes = b"LHBK\x01\x01\x10".to_vec();
        bytes.extend([0x55; 32]);
        bytes.extend(b"\xa0\xa1\xa2\xa3\xa4\xa5\xa6\xa7\x01\0\0\0\x03\x02\0\0");
        assert_eq!(opening.encode()[..], bytes[..]);
        assert_eq!(BulkOpening::decode(&bytes), Ok(opening));

        let header = StreamHeader {
            kind: StreamKind::Frames,
            binding: binding(),
        };
        let bytes = b"\x01\x01\xa0\xa1\xa2\xa3\xa4\xa5\xa6\xa7\x01\0\0\0\x03\x02\0\0";
        assert_eq!(&header.encode(), bytes);
        assert_eq!(StreamHeader::decode(bytes), Ok(header));
    }

    proptest! {
        #[test]
        fn what_is_read_is_what_was_written(
            bytes in proptest::collection::vec(any::<u8>(), 0..60)
        ) {
            if let Ok(opening) = BulkOpening::decode(&bytes) {
                prop_assert_eq!(&opening.encode()[..], &bytes[..]);
            }
            if let Ok(header) = StreamHeader::decode(&bytes) {
                prop_assert_eq!(&header.encode()[..], &bytes[..]);
            }
        }

        #[test]
        fn one_flipped_byte_is_seen_or_changes_the_value(at in 0usize..7, flip in 1u8..) {
            let opening = BulkOpening {
                purpose: BulkPurpose::Probe,
                streams: 4,
                token: BulkToken::from_bytes([0; 32]),
                binding: binding(),
            };
            let mut bytes = opening.encode();
            bytes[at] ^= flip;
            prop_assert_ne!(BulkOpening::decode(&bytes), Ok(opening));
        }
    }
}
