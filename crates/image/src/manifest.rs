//! The manifest of an image: its size, and the digest of each stripe that is not all zeros.

use crate::name::{Digest, ImageId};
use std::ops::Range;
use std::sync::OnceLock;

/// Bytes of a stripe; the last one of an image may be shorter.
pub const STRIPE_BYTES: u64 = 256 << 10;
/// Largest image.
pub const SIZE_BYTES_MAX: u64 = 1 << 40;
/// The first bytes of a manifest; the last of them is the version.
const MAGIC: [u8; 8] = *b"LHIMAGE\x01";
const HEADER_BYTES: usize = 16;
const DIGEST_BYTES: usize = 32;
/// Stripes per word of the presence bitmap.
const WORD_BITS: usize = 64;
/// Longest manifest: every stripe of the largest image is stored.
pub(crate) const MANIFEST_BYTES_MAX: u64 =
    HEADER_BYTES as u64 + SIZE_BYTES_MAX / STRIPE_BYTES / 8 * (1 + 8 * DIGEST_BYTES as u64);

/// A piece of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stripe {
    /// All zeros.
    Hole,
    /// Content with this digest.
    Stored(Digest),
}

/// A reason why bytes are not a manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// They begin differently.
    #[error("it does not begin as a manifest does")]
    Magic,
    /// They are of another version.
    #[error("it has version {0}, which this Longhaul does not know: use a newer one")]
    Version(u8),
    /// No image has this size.
    #[error("it is for an image of {0} bytes; an image has 1 byte to 1 TiB")]
    Size(u64),
    /// Their length contradicts their content.
    #[error("it has {actual} bytes where {expected} follow from what it says")]
    Length {
        /// The length by the content.
        expected: usize,
        /// The actual length.
        actual: usize,
    },
    /// They name stripes behind the end of the image.
    #[error("it names stripes behind the end of the image")]
    Behind,
    /// They name a stripe of zeros, which has to be omitted.
    #[error("it names stripe {0}, which is all zeros")]
    Zeros(u32),
}

/// A manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    size_bytes: u64,
    /// The stored stripes, one bit each.
    stored: Vec<u64>,
    /// The number of stored stripes before each word.
    before: Vec<u32>,
    digests: Vec<Digest>,
}

impl Manifest {
    /// Returns the manifest of an image of that size with these stripes, in order; all others are
    /// zeros.
    pub fn new(size_bytes: u64, stripes: &[(u32, Digest)]) -> Result<Self, ManifestError> {
        let count = count(size_bytes)?;
        let mut stored = vec![0_u64; count.div_ceil(WORD_BITS)];
        for (index, _) in stripes {
            let index = *index as usize;
            if index >= count {
                return Err(ManifestError::Behind);
            }
            stored[index / WORD_BITS] |= 1 << (index % WORD_BITS);
        }
        let digests = stripes.iter().map(|(_, digest)| *digest).collect();
        Self::of_parts(size_bytes, stored, digests)
    }

    fn of_parts(
        size_bytes: u64,
        stored: Vec<u64>,
        digests: Vec<Digest>,
    ) -> Result<Self, ManifestError> {
        let mut before = Vec::with_capacity(stored.len());
        let mut total = 0;
        for word in &stored {
            before.push(total);
            total += word.count_ones();
        }
        let manifest = Self {
            size_bytes,
            stored,
            before,
            digests,
        };
        for (index, digest) in manifest.stripes() {
            if digest == zeros_digest(manifest.range(index)) {
                return Err(ManifestError::Zeros(index));
            }
        }
        Ok(manifest)
    }

    /// Parses a manifest.
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        let length = |expected| ManifestError::Length {
            expected,
            actual: bytes.len(),
        };
        let (header, rest) = bytes
            .split_first_chunk::<HEADER_BYTES>()
            .ok_or(ManifestError::Magic)?;
        if header[..7] != MAGIC[..7] {
            return Err(ManifestError::Magic);
        }
        if header[7] != MAGIC[7] {
            return Err(ManifestError::Version(header[7]));
        }
        let mut size = [0; 8];
        size.copy_from_slice(&header[8..]);
        let size_bytes = u64::from_le_bytes(size);
        let count = count(size_bytes)?;
        let bits_bytes = count.div_ceil(8);
        let (bits, digests) = rest
            .split_at_checked(bits_bytes)
            .ok_or(length(HEADER_BYTES + bits_bytes))?;
        if count % 8 > 0 && bits[bits_bytes - 1] >> (count % 8) > 0 {
            return Err(ManifestError::Behind);
        }
        let ones: usize = bits.iter().map(|byte| byte.count_ones() as usize).sum();
        if digests.len() != ones * DIGEST_BYTES {
            return Err(length(HEADER_BYTES + bits_bytes + ones * DIGEST_BYTES));
        }
        let mut stored = vec![0; count.div_ceil(WORD_BITS)];
        for (index, byte) in bits.iter().enumerate() {
            stored[index / 8] |= u64::from(*byte) << (index % 8 * 8);
        }
        let (digests, _) = digests.as_chunks::<DIGEST_BYTES>();
        Self::of_parts(
            size_bytes,
            stored,
            digests.iter().copied().map(Digest).collect(),
        )
    }

    /// Returns its stored form. Equal images have equal bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let bits_bytes = self.stripe_count() as usize;
        let bits_bytes = bits_bytes.div_ceil(8);
        let mut bytes =
            Vec::with_capacity(HEADER_BYTES + bits_bytes + self.digests.len() * DIGEST_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(self.size_bytes.to_le_bytes());
        let words = self.stored.iter().flat_map(|word| word.to_le_bytes());
        bytes.extend(words.take(bits_bytes));
        bytes.extend(self.digests.iter().flat_map(|digest| digest.0));
        bytes
    }

    /// Returns its id.
    pub fn id(&self) -> ImageId {
        ImageId(Digest::of(&self.bytes()))
    }

    /// Returns the size of the disk.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Returns the number of stripes, holes included.
    pub fn stripe_count(&self) -> u32 {
        // An image is at most 4 Mi stripes long.
        self.size_bytes.div_ceil(STRIPE_BYTES) as u32
    }

    /// Returns the number of stored stripes.
    pub fn stored_count(&self) -> u32 {
        self.digests.len() as u32
    }

    /// Returns the number of bytes in stored stripes.
    pub fn stored_bytes(&self) -> u64 {
        let all = u64::from(self.stored_count()) * STRIPE_BYTES;
        let last = self.stripe_count() - 1;
        match self.stripe(last) {
            Stripe::Stored(_) => all - STRIPE_BYTES + length(&self.range(last)),
            Stripe::Hole => all,
        }
    }

    /// Returns a stripe; behind the end there are only holes.
    pub fn stripe(&self, index: u32) -> Stripe {
        let index = index as usize;
        let (place, bit) = (index / WORD_BITS, index % WORD_BITS);
        match self.stored.get(place) {
            Some(word) if word >> bit & 1 == 1 => {
                let below = (word & ((1 << bit) - 1)).count_ones();
                Stripe::Stored(self.digests[(self.before[place] + below) as usize])
            }
            Some(_) | None => Stripe::Hole,
        }
    }

    /// Returns the bytes of the disk that a stripe covers.
    pub fn range(&self, index: u32) -> Range<u64> {
        let start = u64::from(index) * STRIPE_BYTES;
        start..(start + STRIPE_BYTES).min(self.size_bytes)
    }

    /// Returns the stored stripes, in order.
    pub fn stripes(&self) -> impl Iterator<Item = (u32, Digest)> {
        let indices = self.stored.iter().enumerate().flat_map(|(place, word)| {
            let bits = (0..WORD_BITS).filter(move |bit| word >> bit & 1 == 1);
            bits.map(move |bit| (place * WORD_BITS + bit) as u32)
        });
        indices.zip(self.digests.iter().copied())
    }
}

fn count(size_bytes: u64) -> Result<usize, ManifestError> {
    if !(1..=SIZE_BYTES_MAX).contains(&size_bytes) {
        return Err(ManifestError::Size(size_bytes));
    }
    Ok(size_bytes.div_ceil(STRIPE_BYTES) as usize)
}

/// Returns the length of a stripe's range.
pub(crate) fn length(range: &Range<u64>) -> u64 {
    range.end - range.start
}

/// Returns the digest of zeros, which is cached for a whole stripe.
fn zeros_digest(range: Range<u64>) -> Digest {
    static WHOLE: OnceLock<Digest> = OnceLock::new();
    let of = |length: u64| Digest::of(&vec![0; length as usize]);
    match length(&range) {
        STRIPE_BYTES => *WHOLE.get_or_init(|| of(STRIPE_BYTES)),
        shorter => of(shorter),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(byte: u8) -> Digest {
        Digest([byte; 32])
    }

    /// An image of 67 stripes with a short last one, of which two are stored.
    fn example() -> Manifest {
        let size_bytes = 66 * STRIPE_BYTES + 4096;
        Manifest::new(size_bytes, &[(1, digest(0xaa)), (66, digest(0xbb))]).unwrap()
    }

    #[test]
    fn bytes_are_as_documented() {
        let bytes = example().bytes();
        assert_eq!(bytes[..8], *b"LHIMAGE\x01");
        assert_eq!(bytes[8..16], (66 * 262_144 + 4096_u64).to_le_bytes());
        assert_eq!(bytes[16..25], [2, 0, 0, 0, 0, 0, 0, 0, 4]);
        assert_eq!(bytes[25..57], [0xaa; 32]);
        assert_eq!(bytes[57..], [0xbb; 32]);
        assert_eq!(example().id().0, Digest::of(&bytes));
        assert_eq!(Manifest::parse(&bytes), Ok(example()));
    }

    #[test]
    fn stripes_are_found() {
        let manifest = example();
        assert_eq!(manifest.stripe_count(), 67);
        assert_eq!(manifest.stored_count(), 2);
        assert_eq!(manifest.stored_bytes(), STRIPE_BYTES + 4096);
        for index in 0..80 {
            let expected = match index {
                1 => Stripe::Stored(digest(0xaa)),
                66 => Stripe::Stored(digest(0xbb)),
                _ => Stripe::Hole,
            };
            assert_eq!(manifest.stripe(index), expected, "{index}");
        }
        let stripes: Vec<_> = manifest.stripes().collect();
        assert_eq!(stripes, [(1, digest(0xaa)), (66, digest(0xbb))]);
        assert_eq!(length(&manifest.range(66)), 4096);
    }

    #[test]
    fn what_is_not_a_manifest_is_refused() {
        let good = example().bytes();
        let changed = |place: usize, to: u8| {
            let mut bytes = good.clone();
            bytes[place] = to;
            Manifest::parse(&bytes).unwrap_err()
        };
        assert_eq!(changed(0, b'M'), ManifestError::Magic);
        assert_eq!(changed(7, 2), ManifestError::Version(2));
        // A size far above 1 TiB.
        let huge = ManifestError::Size((1 << 48) + 66 * STRIPE_BYTES + 4096);
        assert_eq!(changed(14, 1), huge);
        assert_eq!(changed(24, 8), ManifestError::Behind);
        assert!(matches!(changed(16, 3), ManifestError::Length { .. }));
        for length in 0..good.len() {
            Manifest::parse(&good[..length]).unwrap_err();
        }
        let longer = [&good[..], &[0]].concat();
        assert!(matches!(
            Manifest::parse(&longer),
            Err(ManifestError::Length { .. })
        ));
        assert_eq!(Manifest::new(0, &[]), Err(ManifestError::Size(0)));
        assert_eq!(
            Manifest::new(1, &[(1, digest(1))]),
            Err(ManifestError::Behind)
        );
    }

    #[test]
    fn stripes_of_zeros_have_to_be_left_out() {
        for (size_bytes, zeros) in [(STRIPE_BYTES, 262_144), (100, 100)] {
            let digest = Digest::of(&vec![0; zeros]);
            assert_eq!(
                Manifest::new(size_bytes, &[(0, digest)]),
                Err(ManifestError::Zeros(0))
            );
        }
    }

    #[test]
    fn the_largest_image_fits() {
        let none = Manifest::new(SIZE_BYTES_MAX, &[]).unwrap();
        assert_eq!(none.stripe_count(), 4 << 20);
        assert_eq!(none.bytes().len(), 16 + (512 << 10));
        assert_eq!(MANIFEST_BYTES_MAX, 16 + (512 << 10) + (128 << 20));
    }
}
