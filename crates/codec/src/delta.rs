//! The delta of a block: which of its 8-byte words have new values, and those values.
//!
//! A delta holds new values, not differences: content written to memory resembles other memory, and
//! compresses together with it. The base of a delta is known only by short prints of its parts
//! ([`crate::versions`]), so a delta may include unchanged words; and the digest of the result
//! shows whether all new ones are included.

use longhaul_protocol::BLOCK_SIZE;

/// Bytes in a word.
const WORD: usize = 8;
/// Words in a line; a delta has a byte for each line with a new word.
const LINE_WORDS: usize = 8;
/// Bytes that mark those lines.
const LINES_BYTES: usize = BLOCK_SIZE / WORD / LINE_WORDS / 8;
/// The shortest delta: no word is new.
pub(crate) const BYTES_MIN: usize = LINES_BYTES;
/// The longest delta that a destination accepts: the length of a block.
pub(crate) const BYTES_MAX: usize = BLOCK_SIZE;
/// The longest delta worth sending. Beyond it the compressed block is as small, and does not depend
/// on the destination's content.
const BYTES_WORTH: usize = 3584;

/// A bit for each word of a block, a byte for each line.
pub(crate) type Words = [u8; BLOCK_SIZE / WORD / LINE_WORDS];

fn lines(block: &[u8; BLOCK_SIZE]) -> &[[[u8; WORD]; LINE_WORDS]] {
    block.as_chunks::<WORD>().0.as_chunks::<LINE_WORDS>().0
}

/// Appends the delta with these words of `content`; `false`, with nothing appended, when the
/// content itself should travel.
pub(crate) fn encode(words: &Words, content: &[u8; BLOCK_SIZE], out: &mut Vec<u8>) -> bool {
    let count: usize = words.iter().map(|bits| bits.count_ones() as usize).sum();
    let lines_new = words.iter().filter(|bits| **bits != 0).count();
    let length = LINES_BYTES + lines_new + WORD * count;
    if count == 0 || length > BYTES_WORTH {
        return false;
    }
    out.reserve(length);
    for eight in words.as_chunks::<8>().0 {
        let bit = |line: usize| u8::from(eight[line] != 0) << line;
        out.push((0..8).map(bit).sum());
    }
    out.extend(words.iter().filter(|bits| **bits != 0));
    for (bits, line) in words.iter().zip(lines(content)) {
        match *bits {
            0 => {}
            u8::MAX => out.extend_from_slice(line.as_flattened()),
            bits => {
                for (index, word) in line.iter().enumerate() {
                    if bits >> index & 1 == 1 {
                        out.extend_from_slice(word);
                    }
                }
            }
        }
    }
    true
}

/// Returns the length of the delta at the beginning of `bytes`; `None` when there is no valid one.
pub(crate) fn length(bytes: &[u8]) -> Option<usize> {
    let (lines, rest) = bytes.split_first_chunk::<LINES_BYTES>()?;
    let count = lines.iter().map(|bits| bits.count_ones() as usize).sum();
    let words = rest.get(..count)?;
    let count: usize = words.iter().map(|bits| bits.count_ones() as usize).sum();
    let length = LINES_BYTES + words.len() + WORD * count;
    let sound = !words.contains(&0) && length <= BYTES_MAX.min(bytes.len());
    sound.then_some(length)
}

/// Applies a delta to a block; `delta` has the length that [`length`] returned.
pub(crate) fn apply(block: &mut [u8; BLOCK_SIZE], delta: &[u8]) {
    let Some((mask, rest)) = delta.split_first_chunk::<LINES_BYTES>() else {
        return;
    };
    let count: usize = mask.iter().map(|bits| bits.count_ones() as usize).sum();
    let (words, values) = rest.split_at(count.min(rest.len()));
    let mut words = words.iter();
    let mut values = values.as_chunks::<WORD>().0;
    let (lines, _) = block.as_chunks_mut::<WORD>().0.as_chunks_mut();
    for (index, bits) in mask.iter().enumerate() {
        let mut lines_left = *bits;
        while lines_left != 0 {
            let line: &mut [[u8; WORD]; LINE_WORDS] =
                &mut lines[8 * index + lines_left.trailing_zeros() as usize];
            lines_left &= lines_left - 1;
            let bits = words.next().copied().unwrap_or(0);
            if bits == u8::MAX
                && let Some((all, rest)) = values.split_first_chunk()
            {
                *line = *all;
                values = rest;
                continue;
            }
            let mut left = bits;
            while left != 0 {
                if let Some((value, rest)) = values.split_first() {
                    line[left.trailing_zeros() as usize] = *value;
                    values = rest;
                }
                left &= left - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn delta(words: &Words, content: &[u8; BLOCK_SIZE]) -> Option<Vec<u8>> {
        let mut out = vec![9];
        let worth = encode(words, content, &mut out);
        assert_eq!(out[0], 9, "it appends");
        assert_eq!(worth, out.len() > 1);
        worth.then(|| out.split_off(1))
    }

    fn noise(seed: u64) -> [u8; BLOCK_SIZE] {
        let mut block = [0; BLOCK_SIZE];
        let mut reader = blake3::Hasher::new();
        reader
            .update(&seed.to_le_bytes())
            .finalize_xof()
            .fill(&mut block);
        block
    }

    #[test]
    fn a_delta_names_lines_then_words_then_values() {
        let content = noise(1);
        let mut words = [0; 64];
        words[0] = 0x81;
        words[63] = 0xff;
        let delta = delta(&words, &content).unwrap();
        assert_eq!(delta[..8], [1, 0, 0, 0, 0, 0, 0, 0x80]);
        assert_eq!(delta[8..10], [0x81, 0xff]);
        assert_eq!(delta[10..18], content[..8]);
        assert_eq!(delta[18..26], content[56..64]);
        assert_eq!(delta[26..], content[4032..]);
    }

    #[test]
    fn a_block_that_changed_too_much_or_not_at_all_has_no_delta() {
        let content = noise(1);
        for (lines, worth) in [(0, false), (1, true), (54, true), (55, true), (56, false)] {
            let mut words = [0; 64];
            words[..lines].fill(0xff);
            let delta = delta(&words, &content);
            assert_eq!(delta.is_some(), worth, "{lines}");
            assert!(delta.is_none_or(|delta| delta.len() == 8 + 65 * lines));
        }
    }

    #[test]
    fn what_is_no_delta_has_no_length() {
        assert_eq!(length(&[]), None);
        assert_eq!(length(&[0; 7]), None);
        assert_eq!(length(&[0; 8]), Some(8));
        assert_eq!(length(&[1, 0, 0, 0, 0, 0, 0, 0]), None, "no words");
        assert_eq!(
            length(&[1, 0, 0, 0, 0, 0, 0, 0, 0]),
            None,
            "a line without words"
        );
        let one = [1, 0, 0, 0, 0, 0, 0, 0, 4, 1, 2, 3, 4, 5, 6, 7, 8, 9];
        assert_eq!(length(&one), Some(17));
        assert_eq!(length(&one[..16]), None);
        let mut full = [0xff; BLOCK_SIZE + 100];
        assert_eq!(length(&full), None, "longer than the block");
        full[7] = 0;
        full[64..].fill(0);
        assert_eq!(length(&full), Some(8 + 56 * 65));
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_applied(
            seed in any::<u64>(),
            bits in prop::collection::vec((0..64usize, any::<u8>()), 0..40),
        ) {
            let (base, content) = (noise(seed), noise(seed ^ 1));
            let mut words = [0; 64];
            bits.into_iter().for_each(|(line, bits)| words[line] = bits);
            let mut expected = base;
            for word in (0..512).filter(|word| words[word / 8] >> (word % 8) & 1 == 1) {
                expected[word * 8..][..8].copy_from_slice(&content[word * 8..][..8]);
            }
            if let Some(delta) = delta(&words, &content) {
                prop_assert_eq!(length(&delta), Some(delta.len()));
                let mut block = base;
                apply(&mut block, &delta);
                prop_assert!(block == expected);
            }
        }
    }
}
