//! Generates pseudo-random numbers that are the same everywhere.

/// A small, fast generator (SplitMix64).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Returns the generator of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }

    /// Returns a number below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        scaled(self.draw(), limit)
    }
}

/// Returns a number of the whole range, scaled below `limit`.
pub fn scaled(number: u64, limit: u64) -> u64 {
    ((u128::from(number) * u128::from(limit)) >> 64) as u64
}

/// Spreads the bits of a number over the whole word.
pub fn mixed(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
