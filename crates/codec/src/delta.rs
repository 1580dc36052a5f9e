//! The delta of a block against a version of it that the destination holds: a mask of the 8-byte
//! words that differ, and their new values.
//!
//! New values, not differences: what is written into memory resembles other memory, and compresses
//! together with it.

use longhaul_protocol::BLOCK_SIZE;

/// Bytes in a word.
const WORD: usize = 8;
/// Words in a line; the mask has a byte for each line.
const LINE_WORDS: usize = 8;
/// Bytes in a mask.
pub(crate) const MASK_BYTES: usize = BLOCK_SIZE / WORD / 8;
/// Most words that a delta on the wire may bring: with its mask it is no longer than the block.
pub(crate) const WORDS_MAX: usize = (BLOCK_SIZE - MASK_BYTES) / WORD;
/// Most words that are worth sending as a delta: about 3.5 KB. Beyond that the block itself is as
/// small when it is compressed, and needs nothing of the destination.
const WORDS_WORTH: usize = 440;

type Line = [[u8; WORD]; LINE_WORDS];

fn lines(block: &[u8; BLOCK_SIZE]) -> &[Line] {
    block.as_chunks::<WORD>().0.as_chunks::<LINE_WORDS>().0
}

/// Appends how `content` differs from `base`; false, and nothing appended, when that is so much
/// that the content itself should travel.
pub(crate) fn encode(
    base: &[u8; BLOCK_SIZE],
    content: &[u8; BLOCK_SIZE],
    out: &mut Vec<u8>,
) -> bool {
    let mut mask = [0; MASK_BYTES];
    let mut words = [[0; WORD]; WORDS_WORTH + LINE_WORDS];
    let mut count = 0;
    for ((bits, old), new) in mask.iter_mut().zip(lines(base)).zip(lines(content)) {
        if old == new {
            continue;
        }
        let Some(room) = words[count..].first_chunk_mut::<LINE_WORDS>() else {
            return false;
        };
        // Every word is stored where the next one that differs belongs: no branch to guess.
        let mut taken = 0;
        for (index, (old, new)) in old.iter().zip(new).enumerate() {
            let differs = old != new;
            room[taken % LINE_WORDS] = *new;
            *bits |= u8::from(differs) << index;
            taken += usize::from(differs);
        }
        count += taken;
    }
    if count > WORDS_WORTH {
        return false;
    }
    out.extend_from_slice(&mask);
    out.extend_from_slice(words[..count].as_flattened());
    true
}

/// The length of the delta that `bytes` begin with; `None` when they are not one.
pub(crate) fn length(bytes: &[u8]) -> Option<usize> {
    let mask = bytes.first_chunk::<MASK_BYTES>()?;
    let count: usize = mask.iter().map(|bits| bits.count_ones() as usize).sum();
    let length = MASK_BYTES + WORD * count;
    (count <= WORDS_MAX && length <= bytes.len()).then_some(length)
}

/// Makes the new version of a block of the old one; `delta` is as long as [`length`] said.
pub(crate) fn apply(block: &mut [u8; BLOCK_SIZE], delta: &[u8]) {
    let (mask, words) = delta.split_at(MASK_BYTES.min(delta.len()));
    let mut words = words.as_chunks::<WORD>().0;
    let lines = block.as_chunks_mut::<WORD>().0.as_chunks_mut().0;
    for (bits, line) in mask.iter().zip(lines) {
        let line: &mut Line = line;
        if *bits == u8::MAX
            && let Some((all, rest)) = words.split_first_chunk()
        {
            *line = *all;
            words = rest;
            continue;
        }
        let mut left = *bits;
        while left != 0 {
            if let Some((word, rest)) = words.split_first() {
                line[left.trailing_zeros() as usize] = *word;
                words = rest;
            }
            left &= left - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn delta(base: &[u8; BLOCK_SIZE], content: &[u8; BLOCK_SIZE]) -> Option<Vec<u8>> {
        let mut out = vec![9];
        let worth = encode(base, content, &mut out);
        assert_eq!(out[0], 9, "it appends");
        assert_eq!(worth, out.len() > 1);
        worth.then(|| out.split_off(1))
    }

    #[test]
    fn a_change_names_the_words_that_differ() {
        let base = [1; BLOCK_SIZE];
        let mut content = base;
        content[0] = 2;
        content[4095] = 3;
        let delta = delta(&base, &content).unwrap();
        assert_eq!(delta.len(), MASK_BYTES + 2 * WORD);
        assert_eq!((delta[0], delta[63]), (1, 0x80));
        assert_eq!(delta[64..72], content[..8]);
        assert_eq!(delta[72..], content[4088..]);
    }

    #[test]
    fn a_block_that_changed_too_much_is_no_change() {
        let base = [0; BLOCK_SIZE];
        for (words, worth) in [
            (0, true),
            (439, true),
            (440, true),
            (441, false),
            (512, false),
        ] {
            let mut content = base;
            content[..words * WORD].fill(7);
            assert_eq!(delta(&base, &content).is_some(), worth, "{words} at once");
            let mut scattered = base;
            for word in 0..words {
                scattered[(word * 311 % 512) * WORD] = 1;
            }
            assert_eq!(delta(&base, &scattered).is_some(), worth, "{words} apart");
        }
    }

    #[test]
    fn what_is_no_change_has_no_length() {
        assert_eq!(length(&[]), None);
        assert_eq!(length(&[0; 63]), None);
        assert_eq!(length(&[0; 64]), Some(64));
        let mut full = [0xff; BLOCK_SIZE + WORD];
        assert_eq!(length(&full), None, "longer than the block");
        full[0] = 0;
        assert_eq!(length(&full), Some(BLOCK_SIZE));
        assert_eq!(length(&full[..BLOCK_SIZE - 1]), None);
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_applied(
            seed in any::<u64>(),
            writes in prop::collection::vec((0..BLOCK_SIZE, 1..300usize, any::<u8>()), 0..20),
        ) {
            let mut base = [0; BLOCK_SIZE];
            blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut base);
            let mut content = base;
            for (at, length, value) in writes {
                let end = BLOCK_SIZE.min(at + length);
                content[at..end].fill(value);
            }
            if let Some(delta) = delta(&base, &content) {
                prop_assert_eq!(length(&delta), Some(delta.len()));
                let mut block = base;
                apply(&mut block, &delta);
                prop_assert!(block == content);
            }
        }
    }
}
