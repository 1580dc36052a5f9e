//! XDR (RFC 4506), as far as libvirt's protocol uses it. Everything takes a multiple of 4 bytes, in
//! network order.

/// The maximum length of a string, in bytes: `REMOTE_STRING_MAX`.
pub const STRING_BYTES_MAX: usize = 4 << 20;
/// The maximum number of elements of an array that is read: more than any list of libvirt has.
pub const ELEMENTS_MAX: usize = 16 << 10;
/// Everything is padded to a multiple of this.
const UNIT: usize = 4;

/// Why bytes are no value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum XdrError {
    /// The bytes end within a value.
    #[error("it ends early")]
    Short,
    /// There are bytes behind the last value.
    #[error("{0} bytes follow it")]
    Rest(usize),
    /// A string or array is too long.
    #[error("it has {0} bytes or elements where fewer are allowed")]
    Long(usize),
    /// What fills the last unit is not zero.
    #[error("its padding is not zero")]
    Padding,
    /// A string is no UTF-8.
    #[error("a string is no UTF-8")]
    Text,
    /// A number has no meaning there.
    #[error("{0} has no meaning there")]
    Number(u32),
}

/// Encodes values.
#[derive(Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// Writes an unsigned integer.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    /// Writes an integer.
    pub fn i32(&mut self, value: i32) -> &mut Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    /// Writes an unsigned hyper integer.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    /// Writes opaque data of a fixed length.
    pub fn fixed(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend(bytes);
        self.0.resize(self.0.len().next_multiple_of(UNIT), 0);
        self
    }

    /// Writes opaque data of a variable length. Readers refuse more than `u32::MAX`
    /// bytes.
    pub fn opaque(&mut self, bytes: &[u8]) -> &mut Self {
        self.u32(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        self.fixed(bytes)
    }

    /// Writes a string.
    pub fn text(&mut self, text: &str) -> &mut Self {
        self.opaque(text.as_bytes())
    }

    /// Writes a string that may be absent.
    pub fn optional_text(&mut self, text: Option<&str>) -> &mut Self {
        self.u32(u32::from(text.is_some()));
        if let Some(text) = text {
            self.text(text);
        }
        self
    }

    /// Returns the bytes.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// Decodes values. After an error its place is undefined.
#[derive(Debug, Clone)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Reads these bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Reads an unsigned integer.
    pub fn u32(&mut self) -> Result<u32, XdrError> {
        let (value, rest) = self.0.split_first_chunk().ok_or(XdrError::Short)?;
        self.0 = rest;
        Ok(u32::from_be_bytes(*value))
    }

    /// Reads an integer.
    pub fn i32(&mut self) -> Result<i32, XdrError> {
        let (value, rest) = self.0.split_first_chunk().ok_or(XdrError::Short)?;
        self.0 = rest;
        Ok(i32::from_be_bytes(*value))
    }

    /// Reads an unsigned hyper integer.
    pub fn u64(&mut self) -> Result<u64, XdrError> {
        let (value, rest) = self.0.split_first_chunk().ok_or(XdrError::Short)?;
        self.0 = rest;
        Ok(u64::from_be_bytes(*value))
    }

    /// Reads a truth value.
    pub fn bool(&mut self) -> Result<bool, XdrError> {
        match self.u32()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(XdrError::Number(other)),
        }
    }

    /// Reads opaque data of a fixed length.
    pub fn fixed<const N: usize>(&mut self) -> Result<[u8; N], XdrError> {
        let bytes = self.take(N)?;
        bytes.try_into().map_err(|_| XdrError::Short)
    }

    /// Reads opaque data of at most `most` bytes.
    pub fn opaque(&mut self, most: usize) -> Result<&'a [u8], XdrError> {
        let length = self.u32()? as usize;
        if length > most {
            return Err(XdrError::Long(length));
        }
        self.take(length)
    }

    /// Reads a string.
    pub fn text(&mut self) -> Result<&'a str, XdrError> {
        let bytes = self.opaque(STRING_BYTES_MAX)?;
        str::from_utf8(bytes).map_err(|_| XdrError::Text)
    }

    /// Reads a value that may be absent.
    pub fn optional<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, XdrError>,
    ) -> Result<Option<T>, XdrError> {
        self.bool()?.then(|| read(self)).transpose()
    }

    /// Reads an array of at most [`ELEMENTS_MAX`] elements.
    pub fn array<T>(
        &mut self,
        mut read: impl FnMut(&mut Self) -> Result<T, XdrError>,
    ) -> Result<Vec<T>, XdrError> {
        let length = self.u32()? as usize;
        if length > ELEMENTS_MAX {
            return Err(XdrError::Long(length));
        }
        (0..length).map(|_| read(self)).collect()
    }

    /// Ends. An error if there are more bytes.
    pub fn end(self) -> Result<(), XdrError> {
        match self.0.len() {
            0 => Ok(()),
            rest => Err(XdrError::Rest(rest)),
        }
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], XdrError> {
        let padded = length.next_multiple_of(UNIT);
        let (bytes, rest) = self.0.split_at_checked(padded).ok_or(XdrError::Short)?;
        let (bytes, padding) = bytes.split_at(length);
        if padding.iter().any(|byte| *byte != 0) {
            return Err(XdrError::Padding);
        }
        self.0 = rest;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_as_they_were_written() {
        let mut writer = Writer::default();
        writer.u32(7).i32(-1).u64(1 << 40).fixed(b"abcde");
        writer
            .text("größe")
            .optional_text(None)
            .optional_text(Some(""));
        let bytes = writer.into_bytes();
        assert_eq!(bytes.len() % UNIT, 0);
        let mut reader = Reader::new(&bytes);
        assert_eq!(reader.u32(), Ok(7));
        assert_eq!(reader.i32(), Ok(-1));
        assert_eq!(reader.u64(), Ok(1 << 40));
        assert_eq!(reader.fixed::<5>(), Ok(*b"abcde"));
        assert_eq!(reader.text(), Ok("größe"));
        assert_eq!(reader.optional(Reader::text), Ok(None));
        assert_eq!(reader.optional(Reader::text), Ok(Some("")));
        assert_eq!(reader.end(), Ok(()));
    }

    #[test]
    fn what_is_no_value_is_refused() {
        let read = |bytes: &[u8]| Reader::new(bytes).text().map(str::to_owned);
        assert_eq!(read(&[0, 0, 0]), Err(XdrError::Short));
        assert_eq!(read(&[0, 0, 0, 5, b'a', b'b']), Err(XdrError::Short));
        // The padding belongs to it.
        assert_eq!(read(&[0, 0, 0, 1, b'a']), Err(XdrError::Short));
        assert_eq!(read(&[0, 0, 0, 1, 0xff, 0, 0, 0]), Err(XdrError::Text));
        assert_eq!(read(&[0, 0, 0, 1, b'a', 0, 1, 0]), Err(XdrError::Padding));
        let huge = u32::MAX.to_be_bytes();
        assert_eq!(read(&huge), Err(XdrError::Long(u32::MAX as usize)));
        let list = Reader::new(&huge).array(Reader::u32);
        assert_eq!(list, Err(XdrError::Long(u32::MAX as usize)));
        let mut reader = Reader::new(&[0, 0, 0, 2, 0, 0, 0, 0]);
        assert_eq!(reader.bool(), Err(XdrError::Number(2)));
        assert_eq!(reader.end(), Err(XdrError::Rest(4)));
    }
}
