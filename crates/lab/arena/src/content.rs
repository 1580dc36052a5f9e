//! Generates the content of pages: the kind of each, and the bytes of random and text pages.

/// A small, fast generator (SplitMix64): the same seed gives the same bytes everywhere.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }

    /// Returns a number below `limit`, which is not 0.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        let wide = u128::from(self.next()) * limit as u128;
        (wide >> 64) as usize
    }
}

/// The content of the arena as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    /// Incompressible bytes.
    Random,
    /// Log lines, which compress about 3 : 1.
    Text,
    /// A quarter random, a half text, an eighth copies of other pages, an eighth zero.
    Mix,
}

impl Content {
    pub(crate) fn named(name: &str) -> Option<Self> {
        match name {
            "random" => Some(Self::Random),
            "text" => Some(Self::Text),
            "mix" => Some(Self::Mix),
            _ => None,
        }
    }

    /// Returns the kind of the page at `index`.
    pub(crate) fn kind(self, seed: u64, index: usize) -> Kind {
        match (self, mixed(seed ^ mixed(index as u64)) % 8) {
            (Self::Random, _) | (Self::Mix, 0 | 1) => Kind::Random,
            (Self::Text, _) | (Self::Mix, 2..=5) => Kind::Text,
            (Self::Mix, 6) => Kind::Copy,
            (Self::Mix, _) => Kind::Zero,
        }
    }
}

/// The content of one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Random,
    Text,
    /// The same bytes as another page, which is random or text.
    Copy,
    Zero,
}

impl Kind {
    /// Returns whether the page has content of its own.
    pub(crate) fn is_original(self) -> bool {
        matches!(self, Self::Random | Self::Text)
    }

    /// Fills `bytes` with this kind of content.
    pub(crate) fn fill(self, bytes: &mut [u8], random: &mut Random) {
        match self {
            Self::Random => fill_random(bytes, random),
            Self::Text => fill_text(bytes, random),
            Self::Copy | Self::Zero => bytes.fill(0),
        }
    }
}

fn fill_random(bytes: &mut [u8], random: &mut Random) {
    for chunk in bytes.chunks_mut(8) {
        let word = random.next().to_le_bytes();
        let length = chunk.len();
        chunk.copy_from_slice(&word[..length]);
    }
}

/// Fills with lines like a server's log: repeating words and changing numbers.
fn fill_text(bytes: &mut [u8], random: &mut Random) {
    let mut rest = bytes;
    while !rest.is_empty() {
        let choice = random.next();
        let digits: [u8; 8] = hexadecimal(choice as u32);
        rest = put(rest, &digits[..6 + (choice >> 60) as usize % 3]);
        for shift in [32, 37, 42] {
            rest = put(rest, WORDS[(choice >> shift) as usize % WORDS.len()]);
        }
    }
}

fn put<'a>(target: &'a mut [u8], bytes: &[u8]) -> &'a mut [u8] {
    let length = bytes.len().min(target.len());
    let (now, later) = target.split_at_mut(length);
    now.copy_from_slice(&bytes[..length]);
    later
}

fn hexadecimal(number: u32) -> [u8; 8] {
    let mut digits = [0; 8];
    for (position, digit) in digits.iter_mut().enumerate() {
        *digit = b"0123456789abcdef"[(number >> (position * 4)) as usize % 16];
    }
    digits
}

const WORDS: [&[u8]; 32] = [
    b" connection accepted from 10.0.",
    b" GET /index.html HTTP/1.1",
    b" 200",
    b" 404",
    b" user=",
    b" session opened for ",
    b" session closed",
    b" INFO ",
    b" WARN retry after ",
    b" ERROR ",
    b" took ",
    b" ms\n",
    b" bytes\n",
    b" key ",
    b" value ",
    b" cache hit",
    b" cache miss",
    b" worker-",
    b" thread ",
    b" commit ",
    b" abort ",
    b" at ",
    b" page ",
    b" queue length ",
    b" timeout\n",
    b" reconnect to ",
    b" SELECT id FROM items WHERE ",
    b" INSERT INTO log ",
    b" = ",
    b"\n",
    b" POST /api/v1/orders",
    b" 10.1.",
];

/// Spreads the bits of a number over the whole word.
pub(crate) fn mixed(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mix_has_its_shares() {
        let mut counts = [0_u32; 4];
        for index in 0..80_000 {
            match Content::Mix.kind(5, index) {
                Kind::Random => counts[0] += 1,
                Kind::Text => counts[1] += 1,
                Kind::Copy => counts[2] += 1,
                Kind::Zero => counts[3] += 1,
            }
        }
        for (count, expected) in counts.into_iter().zip([20_000_u32, 40_000, 10_000, 10_000]) {
            assert!(count.abs_diff(expected) < 1_000, "{counts:?}");
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_bytes() {
        for kind in [Kind::Random, Kind::Text] {
            let (mut one, mut other) = ([0; 1001], [0; 1001]);
            kind.fill(&mut one, &mut Random::new(9));
            kind.fill(&mut other, &mut Random::new(9));
            assert_eq!(one, other);
            kind.fill(&mut other, &mut Random::new(10));
            assert_ne!(one, other);
        }
    }

    #[test]
    fn text_is_text() {
        let mut bytes = [0; 4096];
        Kind::Text.fill(&mut bytes, &mut Random::new(1));
        assert!(
            bytes
                .iter()
                .all(|byte| byte.is_ascii_graphic() || b" \n".contains(byte))
        );
    }
}
