//! Pieces of device state, which travel on a bulk connection besides frames, in any order; and the
//! mark of frames that are taken only while the destination loads the guest.
//!
//! `docs/wire.md`, sections 4.9 and 4.10, is the normative text.

use crate::limits::DEVICE_STATE_BYTES_MAX;

/// Length of every piece but the last, in bytes.
pub const PIECE_BYTES: usize = 64 << 10;
const HEADER_BYTES: usize = 9;
/// The byte before a frame that is taken while the destination loads the guest, and not before.
const FOR_THE_LOAD: u8 = 130;

/// Marks a frame of memory that follows as one for the load.
pub fn for_the_load(frame: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(1 + frame.len());
    out.push(FOR_THE_LOAD);
    out.extend_from_slice(frame);
    out
}

/// Returns whether a message on a stream of frames is a frame for the load, behind its first byte.
pub fn is_for_the_load(message: &[u8]) -> bool {
    message.first() == Some(&FOR_THE_LOAD)
}

/// The packed byte string that a piece belongs to. The number is the piece's first byte; a frame of
/// blocks begins with its version, which is below 128.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Part {
    /// The part that is sent while the guest runs.
    Early = 128,
    /// The part that is sent after the guest has been stopped.
    DeviceState = 129,
}

/// A piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece<'a> {
    /// The part that it belongs to.
    pub part: Part,
    /// Its index, from 0: its place is `index` times [`PIECE_BYTES`].
    pub index: u32,
    /// Length of the whole part, in bytes.
    pub total: u32,
    /// Its bytes.
    pub bytes: &'a [u8],
}

/// A reason why bytes are not a piece, or one that contradicts the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PieceError {
    /// It ends inside its header, or begins with another number.
    #[error("not a piece of device state")]
    Malformed,
    /// The whole part would be empty or over the limit.
    #[error("a device state of {total} bytes (1 to {DEVICE_STATE_BYTES_MAX} are allowed)")]
    Total {
        /// Its length, in bytes.
        total: u32,
    },
    /// Its length does not fit its place.
    #[error("piece {index} of a device state of {total} bytes has {bytes} bytes")]
    Length {
        /// Its index.
        index: u32,
        /// Length of the whole, in bytes.
        total: u32,
        /// Its own length, in bytes.
        bytes: usize,
    },
    /// An earlier piece declared another length of the whole part.
    #[error("a device state of {now} bytes, which had {before} before")]
    Changed {
        /// The length declared before, in bytes.
        before: usize,
        /// The length declared now.
        now: u32,
    },
}

impl Part {
    /// Returns the part that a message on a stream of frames belongs to; `None` for a frame.
    pub fn of(message: &[u8]) -> Option<Self> {
        match message.first() {
            Some(128) => Some(Self::Early),
            Some(129) => Some(Self::DeviceState),
            _ => None,
        }
    }
}

impl<'a> Piece<'a> {
    /// Cuts a packed byte string into pieces.
    pub fn cut(part: Part, packed: &'a [u8]) -> impl Iterator<Item = Self> {
        let total = packed.len() as u32;
        let pieces = packed.chunks(PIECE_BYTES).enumerate();
        pieces.map(move |(index, bytes)| Self {
            part,
            index: index as u32,
            total,
            bytes,
        })
    }

    /// Returns the bytes on the wire.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER_BYTES + self.bytes.len());
        out.push(self.part as u8);
        out.extend_from_slice(&self.index.to_le_bytes());
        out.extend_from_slice(&self.total.to_le_bytes());
        out.extend_from_slice(self.bytes);
        out
    }

    /// Parses the bytes.
    pub fn decode(message: &'a [u8]) -> Result<Self, PieceError> {
        let part = Part::of(message).ok_or(PieceError::Malformed)?;
        let header = message.split_first_chunk::<HEADER_BYTES>();
        let ([_, i0, i1, i2, i3, t0, t1, t2, t3], bytes) = header.ok_or(PieceError::Malformed)?;
        let index = u32::from_le_bytes([*i0, *i1, *i2, *i3]);
        let total = u32::from_le_bytes([*t0, *t1, *t2, *t3]);
        if total == 0 || total as usize > DEVICE_STATE_BYTES_MAX {
            return Err(PieceError::Total { total });
        }
        let start = u64::from(index) * PIECE_BYTES as u64;
        let expected = u64::from(total).saturating_sub(start);
        if bytes.is_empty() || bytes.len() as u64 != expected.min(PIECE_BYTES as u64) {
            return Err(PieceError::Length {
                index,
                total,
                bytes: bytes.len(),
            });
        }
        Ok(Self {
            part,
            index,
            total,
            bytes,
        })
    }
}

/// The received pieces of a part.
#[derive(Debug, Default)]
pub struct Assembly {
    bytes: Vec<u8>,
    here: Vec<bool>,
}

impl Assembly {
    /// Adds a piece. One that was added before changes nothing.
    pub fn add(&mut self, piece: &Piece<'_>) -> Result<(), PieceError> {
        if self.here.is_empty() {
            self.bytes = vec![0; piece.total as usize];
            self.here = vec![false; self.bytes.len().div_ceil(PIECE_BYTES)];
        }
        if self.bytes.len() != piece.total as usize {
            return Err(PieceError::Changed {
                before: self.bytes.len(),
                now: piece.total,
            });
        }
        let start = piece.index as usize * PIECE_BYTES;
        let place = self.bytes.get_mut(start..start + piece.bytes.len());
        let place = place.zip(self.here.get_mut(piece.index as usize));
        let (place, here) = place.ok_or(PieceError::Malformed)?;
        place.copy_from_slice(piece.bytes);
        *here = true;
        Ok(())
    }

    /// Returns the whole part, once every piece has arrived.
    pub fn whole(&self) -> Option<&[u8]> {
        let complete = !self.here.is_empty() && self.here.iter().all(|here| *here);
        complete.then_some(&self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_example_of_the_documentation_is_true() {
        let page = include_str!("../../../docs/wire.md");
        let packed = vec![7; PIECE_BYTES + 3];
        let last = Piece::cut(Part::DeviceState, &packed).last().unwrap();
        let bytes = last.encode();
        let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let line = format!("\n{}\n", hex.join(" "));
        assert!(page.contains(&line), "docs/wire.md lacks {line}");
    }

    #[test]
    fn pieces_make_the_whole_in_any_order_and_twice() {
        let packed: Vec<u8> = (0..PIECE_BYTES * 2 + 5).map(|n| (n % 251) as u8).collect();
        let pieces: Vec<Vec<u8>> = Piece::cut(Part::Early, &packed)
            .map(|piece| piece.encode())
            .collect();
        let mut assembly = Assembly::default();
        assert_eq!(assembly.whole(), None);
        for index in [2, 0, 2, 1] {
            assert_eq!(assembly.whole(), None);
            assembly
                .add(&Piece::decode(&pieces[index]).unwrap())
                .unwrap();
        }
        assert_eq!(assembly.whole(), Some(&packed[..]));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let piece = |index: u32, total: u32, bytes: usize| {
            let mut message = vec![129];
            message.extend(index.to_le_bytes());
            message.extend(total.to_le_bytes());
            message.extend(vec![1; bytes]);
            message
        };
        assert_eq!(Piece::decode(&[129, 0, 0]), Err(PieceError::Malformed));
        assert_eq!(Piece::decode(&[1; 20]), Err(PieceError::Malformed));
        let over = DEVICE_STATE_BYTES_MAX as u32 + 1;
        for (index, total, bytes) in [(0, 0, 0), (0, over, PIECE_BYTES)] {
            let message = piece(index, total, bytes);
            assert_eq!(Piece::decode(&message), Err(PieceError::Total { total }));
        }
        for (index, total, bytes) in [(0, 5, 4), (0, 5, 6), (1, 5, 5), (u32::MAX, 5, 0)] {
            let message = piece(index, total, bytes);
            assert!(matches!(
                Piece::decode(&message),
                Err(PieceError::Length { .. })
            ));
        }
        let mut assembly = Assembly::default();
        assembly
            .add(&Piece::decode(&piece(0, 5, 5)).unwrap())
            .unwrap();
        let other = piece(0, 6, 6);
        let changed = PieceError::Changed { before: 5, now: 6 };
        assert_eq!(assembly.add(&Piece::decode(&other).unwrap()), Err(changed));
    }

    proptest! {
        #[test]
        fn any_bytes_give_an_answer(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            if let Ok(piece) = Piece::decode(&bytes) {
                prop_assert_eq!(piece.encode(), bytes);
            }
        }
    }
}
