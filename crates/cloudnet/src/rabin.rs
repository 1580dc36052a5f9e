//! Computes Rabin fingerprints of a window that slides over a page.

use crate::{PAGE_BYTES, Page};

/// Size of the window in bytes.
pub(crate) const WINDOW: usize = 32;
/// An irreducible polynomial over GF(2), its highest power included.
const POLYNOMIAL: u64 = 0x3d_12c3_09c6_f6eb;
const DEGREE: u32 = 53;

/// Tables by which a step of the window takes two look-ups.
pub(crate) struct Rabin {
    /// The contribution that a byte leaving the window takes away.
    leave: [u64; 256],
    /// The reduction of the eight powers above the polynomial's degree, by those eight bits.
    reduce: [u64; 256],
}

impl Rabin {
    pub(crate) fn new() -> Self {
        let mut rabin = Self {
            leave: [0; 256],
            reduce: [0; 256],
        };
        for byte in 0..256_u64 {
            let high = byte << DEGREE;
            rabin.reduce[byte as usize] = high | remainder(high);
        }
        for byte in 0..=255_u8 {
            let rest = (1..WINDOW).fold(u64::from(byte), |print, _| rabin.enter(print, 0));
            rabin.leave[usize::from(byte)] = rest;
        }
        rabin
    }

    fn enter(&self, print: u64, byte: u8) -> u64 {
        let high = (print >> (DEGREE - 8)) as usize;
        (print << 8 | u64::from(byte)) ^ self.reduce[high & 0xff]
    }

    /// Calls `each` with the start and the fingerprint of every chosen window of a page: those
    /// whose lowest bits, as many as `mask` has, are zero.
    pub(crate) fn choose(&self, page: &Page, mask: u64, mut each: impl FnMut(usize, u64)) {
        let mut print = page[..WINDOW]
            .iter()
            .fold(0, |print, byte| self.enter(print, *byte));
        let mut start = 0;
        loop {
            if print & mask == 0 {
                each(start, print);
            }
            let end = start + WINDOW;
            if end == PAGE_BYTES {
                return;
            }
            print ^= self.leave[usize::from(page[start])];
            print = self.enter(print, page[end]);
            start += 1;
        }
    }
}

/// Returns the remainder of `value` after division by the polynomial.
fn remainder(mut value: u64) -> u64 {
    for power in (DEGREE..64).rev() {
        if value >> power & 1 == 1 {
            value ^= POLYNOMIAL << (power - DEGREE);
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(mut a: u64, mut b: u64) -> u64 {
        let mut sum = 0;
        while b != 0 {
            if b & 1 == 1 {
                sum ^= a;
            }
            b >>= 1;
            a = remainder(a << 1);
        }
        sum
    }

    fn divisor(mut a: u64, mut b: u64) -> u64 {
        while b != 0 {
            let mut rest = a;
            while rest != 0 && rest.ilog2() >= b.ilog2() {
                rest ^= b << (rest.ilog2() - b.ilog2());
            }
            (a, b) = (b, rest);
        }
        a
    }

    #[test]
    fn the_polynomial_has_no_divisors() {
        assert_eq!(POLYNOMIAL.ilog2(), DEGREE);
        // Ben-Or's test: no common divisor with x^(2^i) - x, for i up to half the degree.
        let mut power = 2;
        for _ in 0..DEGREE / 2 {
            power = product(power, power);
            assert_eq!(divisor(POLYNOMIAL, power ^ 2), 1);
        }
    }

    #[test]
    fn a_window_s_fingerprint_is_its_bytes_remainder_wherever_it_stands() {
        let rabin = Rabin::new();
        let page: Page = std::array::from_fn(|n| (n * n / 7 + n) as u8);
        let mut windows = 0;
        rabin.choose(&page, 0, |start, print| {
            assert_eq!(start, windows);
            windows += 1;
            let bits = page[start..start + WINDOW]
                .iter()
                .flat_map(|byte| (0..8).rev().map(move |bit| u64::from(byte >> bit & 1)));
            assert_eq!(print, bits.fold(0, |rest, bit| remainder(rest << 1 | bit)));
        });
        assert_eq!(windows, PAGE_BYTES - WINDOW + 1);
        let mut chosen = 0;
        rabin.choose(&page, 0xff, |_, print| {
            assert_eq!(print & 0xff, 0);
            chosen += 1;
        });
        assert!((4..64).contains(&chosen), "{chosen}, about 16 are expected");
    }
}
