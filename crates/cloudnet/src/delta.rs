//! Computes deltas of pages: the XOR of two versions, run-length encoded.
//!
//! A delta is a list of runs: the number of equal bytes (16 bits), the number of different bytes
//! (16 bits), and the XOR of the latter. Bytes after the last run are equal.

use crate::DecodeError;
use crate::read::Reader;

/// Size in bytes of the two lengths of a run. That many equal bytes, or fewer, do not end a run of
/// different ones.
const RUN_BYTES: usize = 4;

/// Appends the delta from `old` to `new`, blocks of one length of at most 64 KiB - 1. Returns false
/// when it would be `limit` bytes or longer; the appended bytes are then of no use.
pub fn encode(old: &[u8], new: &[u8], limit: usize, out: &mut Vec<u8>) -> bool {
    let (new, first) = (&new[..old.len()], out.len());
    let (mut at, mut coded) = (0, 0);
    loop {
        at += equal(&old[at..], &new[at..]);
        if at == old.len() {
            return true;
        }
        let start = at;
        let mut end = at;
        while at < old.len() && at - end <= RUN_BYTES {
            let differs = old[at] != new[at];
            at += 1;
            if differs {
                end = at;
            }
        }
        if out.len() - first + RUN_BYTES + (end - start) >= limit {
            return false;
        }
        out.extend_from_slice(&((start - coded) as u16).to_le_bytes());
        out.extend_from_slice(&((end - start) as u16).to_le_bytes());
        let pairs = old[start..end].iter().zip(&new[start..end]);
        out.extend(pairs.map(|(old, new)| old ^ new));
        (at, coded) = (end, end);
    }
}

/// Returns the length of the common prefix.
fn equal(old: &[u8], new: &[u8]) -> usize {
    let words = old.as_chunks::<8>().0.iter().zip(new.as_chunks::<8>().0);
    let same = 8 * words.take_while(|(old, new)| old == new).count();
    let rest = old[same..].iter().zip(&new[same..]);
    same + rest.take_while(|(old, new)| old == new).count()
}

/// Turns the old version in `block` into the new one.
///
/// # Errors
/// When the delta is truncated or leaves the block; the block is then neither version.
pub fn apply(delta: &[u8], block: &mut [u8]) -> Result<(), DecodeError> {
    let mut reader = Reader(delta);
    let mut rest = block;
    while !reader.is_empty() {
        let (skip, length) = (reader.u16()?, reader.u16()?);
        let changed = rest.get_mut(skip..).ok_or(DecodeError::Bounds)?;
        let (changed, after) = changed
            .split_at_mut_checked(length)
            .ok_or(DecodeError::Bounds)?;
        for (byte, xor) in changed.iter_mut().zip(reader.take(length)?) {
            *byte ^= xor;
        }
        rest = after;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delta(old: &[u8], new: &[u8]) -> Vec<u8> {
        let mut out = vec![9];
        assert!(encode(old, new, usize::MAX, &mut out));
        out.remove(0);
        out
    }

    #[test]
    fn runs_are_what_differs() {
        let old = [7; 64];
        let mut new = old;
        new[10] = 6;
        new[63] = 7 ^ 0xf0;
        assert_eq!(delta(&old, &new), [10, 0, 1, 0, 1, 52, 0, 1, 0, 0xf0]);
        // Equal bytes no longer than the next run's lengths do not end a run.
        new[15] = 4;
        assert_eq!(delta(&old, &new)[..4], [10, 0, 6, 0]);
        new[15] = 7;
        new[16] = 4;
        assert_eq!(delta(&old, &new)[..4], [10, 0, 1, 0]);
        assert_eq!(delta(&old, &old), []);
    }

    #[test]
    fn every_pattern_of_changes_comes_back() {
        let old: Vec<u8> = (0..200_u8).collect();
        for seed in 0..500_u32 {
            let mut new = old.clone();
            let mut state = seed.wrapping_mul(2_654_435_769);
            for byte in &mut new {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                if state >> 24 < seed % 257 {
                    *byte = (state >> 16) as u8;
                }
            }
            let delta = delta(&old, &new);
            let mut block = old.clone();
            apply(&delta, &mut block).unwrap();
            assert_eq!(block, new);
            let mut out = Vec::new();
            assert!(encode(&old, &new, delta.len() + 1, &mut out));
            assert!(delta.is_empty() || !encode(&old, &new, delta.len(), &mut out));
            for length in 0..delta.len() {
                let mut block = old.clone();
                // A truncated delta is refused, or is a shorter list of runs.
                if apply(&delta[..length], &mut block).is_ok() {
                    assert_ne!(block, new);
                }
            }
        }
    }

    #[test]
    fn a_delta_that_leaves_the_block_is_refused() {
        let outside = [60, 0, 5, 0, 1, 1, 1, 1, 1];
        assert_eq!(apply(&outside, &mut [0; 64]), Err(DecodeError::Bounds));
        assert_eq!(
            apply(&[65, 0, 0, 0], &mut [0; 64]),
            Err(DecodeError::Bounds)
        );
        assert_eq!(apply(&[0, 0, 9], &mut [0; 64]), Err(DecodeError::Short));
    }
}
