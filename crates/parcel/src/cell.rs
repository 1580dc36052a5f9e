//! Cells: the units in which devices are written and read.

use crate::aligned::Aligned;
use ring::digest::{SHA256, digest};

/// By what cells, chunks and records are smaller than those of the format. The unit tests of this
/// crate and the fuzzer live through many parcels, and what they do with sizes is the same.
pub(crate) const SCALE: usize = if cfg!(any(test, fuzzing)) { 64 } else { 1 };
/// Bytes of a cell.
pub const CELL_BYTES: usize = (1 << 20) / SCALE;
/// Bytes of a cell's body.
pub const BODY_BYTES: usize = CELL_BYTES - TRAILER_BYTES;
/// Bytes of a cell's name.
pub(crate) const NAME_BYTES: usize = 32;
const TRAILER_BYTES: usize = 64;
const DIGEST_AT: usize = BODY_BYTES + NAME_BYTES;
const MAGIC: [u8; 4] = *b"LHPC";
const VERSION: u8 = 1;

/// What a cell holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// What the parcel is.
    Header = 1,
    /// A part of the log.
    Data = 2,
    /// What recovers other cells of its row.
    Parity = 3,
}

/// Where a cell belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name {
    /// What it holds.
    pub kind: Kind,
    /// The number of its device.
    pub device: u16,
    /// Its row.
    pub row: u64,
    /// The first bytes of the parcel's id.
    pub parcel: [u8; 8],
    /// The generation of its row.
    pub generation: u32,
}

impl Name {
    /// Returns the name as it is on a device, which is also the associated data of its encryption.
    pub(crate) fn encode(&self) -> [u8; NAME_BYTES] {
        let mut name = [0; NAME_BYTES];
        let parts: [(usize, &[u8]); 7] = [
            (0, &MAGIC),
            (4, &[VERSION]),
            (5, &[self.kind as u8]),
            (6, &self.device.to_le_bytes()),
            (8, &self.row.to_le_bytes()),
            (16, &self.parcel),
            (24, &self.generation.to_le_bytes()),
        ];
        for (at, part) in parts {
            for (to, from) in name.iter_mut().skip(at).zip(part) {
                *to = *from;
            }
        }
        name
    }

    pub(crate) fn decode(name: &[u8]) -> Option<Self> {
        let (magic, rest) = name.split_first_chunk()?;
        let ([version, kind], rest) = rest.split_first_chunk()?;
        let (device, rest) = rest.split_first_chunk()?;
        let (row, rest) = rest.split_first_chunk()?;
        let (parcel, rest) = rest.split_first_chunk()?;
        let (generation, rest) = rest.split_first_chunk()?;
        let kind = match kind {
            1 => Kind::Header,
            2 => Kind::Data,
            3 => Kind::Parity,
            _ => return None,
        };
        let is_known = *magic == MAGIC && *version == VERSION && rest == [0; 4];
        is_known.then_some(Self {
            kind,
            device: u16::from_le_bytes(*device),
            row: u64::from_le_bytes(*row),
            parcel: *parcel,
            generation: u32::from_le_bytes(*generation),
        })
    }
}

/// The content of a cell.
#[derive(Clone, PartialEq, Eq)]
pub struct Cell(Aligned);

impl Cell {
    /// Creates a cell whose body is zeros.
    pub fn new() -> Self {
        Self(Aligned::zeros(CELL_BYTES))
    }

    /// Returns all of it, to be written.
    pub fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    /// Returns all of it, to be read into.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }

    /// Returns its body.
    pub fn body(&self) -> &[u8] {
        self.bytes().get(..BODY_BYTES).unwrap_or_default()
    }

    /// Returns its body.
    pub fn body_mut(&mut self) -> &mut [u8] {
        self.bytes_mut().get_mut(..BODY_BYTES).unwrap_or_default()
    }

    /// Gives it a name and a digest.
    pub fn finish(&mut self, name: &Name) {
        let bytes = self.bytes_mut();
        let (body, trailer) = bytes.split_at_mut(BODY_BYTES);
        debug_assert_eq!((body.len(), trailer.len()), (BODY_BYTES, TRAILER_BYTES));
        if let Some(place) = trailer.first_chunk_mut() {
            *place = name.encode();
        }
        let sum = digest(&SHA256, bytes.get(..DIGEST_AT).unwrap_or_default());
        if let Some(place) = bytes.get_mut(DIGEST_AT..) {
            place.copy_from_slice(sum.as_ref());
        }
    }

    /// Returns its name, if its digest is correct.
    pub fn name(&self) -> Option<Name> {
        let (named, sum) = self.bytes().split_at_checked(DIGEST_AT)?;
        let is_correct = digest(&SHA256, named).as_ref() == sum;
        let name = named.get(BODY_BYTES..)?;
        is_correct.then(|| Name::decode(name)).flatten()
    }
}

impl Default for Cell {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Cell").field(&self.name()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_has_its_name_until_a_bit_changes() {
        let name = Name {
            kind: Kind::Data,
            device: 3,
            row: 1 << 33,
            parcel: *b"12345678",
            generation: 7,
        };
        let mut cell = Cell::new();
        cell.body_mut().fill(5);
        cell.finish(&name);
        assert_eq!(cell.name(), Some(name));
        for at in [
            0,
            BODY_BYTES - 1,
            BODY_BYTES,
            DIGEST_AT - 1,
            DIGEST_AT,
            CELL_BYTES - 1,
        ] {
            let mut damaged = cell.clone();
            damaged.bytes_mut()[at] ^= 0x10;
            assert_eq!(damaged.name(), None, "{at}");
        }
        assert_eq!(Cell::new().name(), None);
    }
}
