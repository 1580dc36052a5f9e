//! Header cells: what a device says about its parcel.

use crate::cell::{BODY_BYTES, CELL_BYTES, Cell, Kind, Name};
use crate::key::{Fingerprint, KeyError};
use crate::layout::{Layout, LayoutError};
use ring::hmac;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The most generations of a parcel.
pub const GENERATIONS_MAX: usize = 100;
const DOCUMENT_BYTES_MAX: usize = CELL_BYTES / 2;
const NAME_CHARS_MAX: usize = 63;

/// 16 bytes, written as 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Bytes16(pub(crate) [u8; 16]);

impl Bytes16 {
    /// Draws 16 random bytes.
    pub(crate) fn draw() -> Result<Self, KeyError> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(KeyError::Random)?;
        Ok(Self(bytes))
    }
}

impl fmt::Display for Bytes16 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Bytes16 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Text that is not 32 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not 32 lowercase hexadecimal digits")]
pub(crate) struct NotDigits;

impl FromStr for Bytes16 {
    type Err = NotDigits;

    fn from_str(text: &str) -> Result<Self, NotDigits> {
        let mut bytes = [0; 16];
        let is_digit = |c: u8| matches!(c, b'0'..=b'9' | b'a'..=b'f');
        if text.len() != 32 || !text.bytes().all(is_digit) {
            return Err(NotDigits);
        }
        let (pairs, _) = text.as_bytes().as_chunks::<2>();
        for (byte, pair) in bytes.iter_mut().zip(pairs) {
            let digit = |c: u8| (c as char).to_digit(16).unwrap_or(0) as u8;
            let [high, low] = *pair;
            *byte = digit(high) << 4 | digit(low);
        }
        Ok(Self(bytes))
    }
}

impl TryFrom<String> for Bytes16 {
    type Error = NotDigits;

    fn try_from(text: String) -> Result<Self, NotDigits> {
        text.parse()
    }
}

impl From<Bytes16> for String {
    fn from(bytes: Bytes16) -> Self {
        bytes.to_string()
    }
}

/// The id of a parcel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ParcelId(pub(crate) Bytes16);

impl ParcelId {
    /// Returns its first bytes, as cells have them.
    pub(crate) fn short(&self) -> [u8; 8] {
        let ParcelId(Bytes16(bytes)) = self;
        bytes.first_chunk().copied().unwrap_or_default()
    }
}

impl fmt::Display for ParcelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// A generation that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Earlier {
    /// Its number.
    pub generation: u32,
    pub(crate) nonce: Bytes16,
    /// The capacities of the devices, in cells.
    pub devices: Vec<u64>,
    /// The row of its header.
    pub first: u64,
    /// The row before which it ended.
    pub end: u64,
}

/// What a device says about its parcel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The parcel's id.
    pub parcel: ParcelId,
    /// The parcel's name.
    pub name: String,
    /// The site that it goes to.
    pub to: String,
    /// When it was created, in seconds since 1970.
    pub created: u64,
    /// The number of this device.
    pub device: u16,
    /// The capacity of each device, in cells.
    pub devices: Vec<u64>,
    /// The number of parity cells in a row.
    pub parity: u8,
    /// The row of this header.
    pub row: u64,
    /// The number of the generation that begins here.
    pub generation: u32,
    pub(crate) nonce: Bytes16,
    /// The fingerprint of the data key.
    pub key: Fingerprint,
    /// The earlier generations.
    pub earlier: Vec<Earlier>,
    /// Whether the parcel is complete.
    pub sealed: bool,
}

/// What proves that a header was written by someone who has the parcel's key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proof {
    document: Vec<u8>,
    tag: [u8; 32],
}

impl Proof {
    pub(crate) fn is_by(&self, key: &hmac::Key) -> bool {
        hmac::verify(key, &self.document, &self.tag).is_ok()
    }
}

/// Why a header cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// It is not JSON of the format.
    #[error("its header cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    /// It is longer than the format allows.
    #[error("its header has {0} bytes, more than the format allows")]
    Long(usize),
    /// It has a name that cannot be one.
    #[error(
        "{0:?} is not a parcel's name: use 1 to 63 letters, digits, `-`, `_` and `.`, and begin \
         with a letter or digit"
    )]
    Name(String),
    /// Its devices cannot be a parcel.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// It contradicts the place where it is, or itself.
    #[error("its header contradicts itself: {0}")]
    Contradiction(&'static str),
}

/// Checks a parcel's name.
pub(crate) fn check_name(name: &str) -> Result<(), HeaderError> {
    let is_known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let begins = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    match begins && name.len() <= NAME_CHARS_MAX && name.chars().all(is_known) {
        true => Ok(()),
        false => Err(HeaderError::Name(name.to_owned())),
    }
}

impl Header {
    /// Returns the layout of its generation.
    ///
    /// # Errors
    /// When its devices cannot be a parcel.
    pub fn layout(&self) -> Result<Layout, LayoutError> {
        Layout::new(&self.devices, self.parity)
    }

    /// Returns the name of the header cell on a device.
    pub(crate) fn cell_name(&self) -> Name {
        Name {
            kind: Kind::Header,
            device: self.device,
            row: self.row,
            parcel: self.parcel.short(),
            generation: self.generation,
        }
    }

    /// Returns the header as the cell of a device.
    pub(crate) fn encode(&self, key: &hmac::Key) -> Result<Cell, HeaderError> {
        let document = serde_json::to_vec(self)?;
        if document.len() > DOCUMENT_BYTES_MAX {
            return Err(HeaderError::Long(document.len()));
        }
        let mut cell = Cell::new();
        let length = (document.len() as u32).to_le_bytes();
        let tag = hmac::sign(key, &document);
        let bytes = length.iter().chain(&document).chain(tag.as_ref());
        for (to, from) in cell.body_mut().iter_mut().zip(bytes) {
            *to = *from;
        }
        cell.finish(&self.cell_name());
        Ok(cell)
    }

    /// Reads the body of a header cell with this name. What it says is [proved](Proof) with the key
    /// alone.
    ///
    /// # Errors
    /// When it is not one of the format.
    pub fn decode(name: &Name, body: &[u8]) -> Result<(Self, Proof), HeaderError> {
        let (length, rest) = body
            .split_first_chunk()
            .ok_or(HeaderError::Contradiction("it has no length"))?;
        let length = u32::from_le_bytes(*length) as usize;
        if length > DOCUMENT_BYTES_MAX.min(BODY_BYTES) {
            return Err(HeaderError::Long(length));
        }
        let (document, rest) = rest
            .split_at_checked(length)
            .ok_or(HeaderError::Long(length))?;
        let tag = rest.first_chunk().ok_or(HeaderError::Long(length))?;
        let header: Self = serde_json::from_slice(document)?;
        header.check()?;
        let proof = Proof {
            document: document.to_vec(),
            tag: *tag,
        };
        match header.cell_name() == *name {
            true => Ok((header, proof)),
            false => Err(HeaderError::Contradiction("it belongs to another place")),
        }
    }

    fn check(&self) -> Result<(), HeaderError> {
        check_name(&self.name)?;
        self.layout()?;
        if self.earlier.len() >= GENERATIONS_MAX {
            return Err(HeaderError::Contradiction("it has too many generations"));
        }
        let (mut generation, mut row) = (0, 0);
        if self.earlier.first().map_or(self.row, |first| first.first) != 0 {
            return Err(HeaderError::Contradiction(
                "its first generation is not in row 0",
            ));
        }
        for earlier in &self.earlier {
            Layout::new(&earlier.devices, self.parity)?;
            if earlier.devices.len() != self.devices.len() {
                return Err(HeaderError::Contradiction("the number of devices changes"));
            }
            if earlier.first < row || earlier.end <= earlier.first {
                return Err(HeaderError::Contradiction("its generations overlap"));
            }
            if earlier.generation <= generation {
                return Err(HeaderError::Contradiction("its generations have no order"));
            }
            (generation, row) = (earlier.generation, earlier.end);
        }
        if self.row < row || self.generation <= generation {
            return Err(HeaderError::Contradiction("its generations have no order"));
        }
        match usize::from(self.device) < self.devices.len() {
            true => Ok(()),
            false => Err(HeaderError::Contradiction("it has no such device")),
        }
    }
}
