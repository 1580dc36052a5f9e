//! Names of images and stripes: digests, and the names that users give to images.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Digits of an id as displayed.
const SHORT_DIGITS: usize = 12;
/// Fewest digits by which an image can be selected.
pub(crate) const PREFIX_DIGITS_MIN: usize = 4;
/// Longest name.
const NAME_BYTES_MAX: usize = 63;

/// The BLAKE3 hash of some bytes, which identifies them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Returns the digest of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A text that is not a digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a digest is 64 hexadecimal digits, in small letters")]
pub struct NotADigest;

impl FromStr for Digest {
    type Err = NotADigest;

    fn from_str(text: &str) -> Result<Self, NotADigest> {
        let bytes = text.as_bytes();
        if bytes.len() != 64 {
            return Err(NotADigest);
        }
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err(NotADigest),
        };
        let mut digest = [0; 32];
        for (into, pair) in digest.iter_mut().zip(bytes.chunks_exact(2)) {
            *into = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Ok(Self(digest))
    }
}

/// Identifies an image: the digest of its manifest. In files it is stored as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageId(pub Digest);

impl ImageId {
    /// Returns its first digits, for display.
    pub fn short(&self) -> String {
        let mut text = self.to_string();
        text.truncate(SHORT_DIGITS);
        text
    }
}

impl fmt::Display for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for ImageId {
    type Err = NotADigest;

    fn from_str(text: &str) -> Result<Self, NotADigest> {
        text.parse().map(Self)
    }
}

impl TryFrom<String> for ImageId {
    type Error = NotADigest;

    fn try_from(text: String) -> Result<Self, NotADigest> {
        text.parse()
    }
}

impl From<ImageId> for String {
    fn from(id: ImageId) -> Self {
        id.to_string()
    }
}

/// A name that users give to an image.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageName(String);

impl ImageName {
    /// Returns the text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A text that is not a valid name of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "an image's name has 1 to 63 letters, digits, `-`, `_` and `.`, begins with a letter or digit, \
     and does not look like the beginning of an id"
)]
pub struct NotAName;

impl FromStr for ImageName {
    type Err = NotAName;

    fn from_str(text: &str) -> Result<Self, NotAName> {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let is_name = (1..=NAME_BYTES_MAX).contains(&text.len())
            && text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.bytes().all(fits);
        if !is_name || is_prefix(text) {
            return Err(NotAName);
        }
        Ok(Self(text.to_owned()))
    }
}

/// Returns whether a text can be the beginning of an id.
pub(crate) fn is_prefix(text: &str) -> bool {
    let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    (PREFIX_DIGITS_MIN..=64).contains(&text.len()) && text.bytes().all(digit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_written_and_read() {
        let digest = Digest::of(b"abc");
        let text = digest.to_string();
        assert_eq!(text.len(), 64);
        assert_eq!(text.parse(), Ok(digest));
        for wrong in [
            &text[1..],
            &text.to_uppercase(),
            &text.replace('6', "g"),
            "",
        ] {
            assert_eq!(wrong.parse::<Digest>(), Err(NotADigest), "{wrong}");
        }
        assert!(text.starts_with(&ImageId(digest).short()));
    }

    #[test]
    fn names_are_no_paths_and_no_ids() {
        for good in ["debian-12.3", "a", "abc", "cafe_1", "Beef"] {
            assert_eq!(good.parse::<ImageName>().unwrap().as_str(), good);
        }
        let long = "x".repeat(64);
        for bad in [
            "",
            ".x",
            "-x",
            "a/b",
            "a b",
            "ä",
            "cafe",
            "0123456789ab",
            &long,
        ] {
            assert_eq!(bad.parse::<ImageName>(), Err(NotAName), "{bad}");
        }
    }
}
