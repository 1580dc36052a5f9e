//! An encoder for LZ4's block format that is twice as fast as LZ4's own, with slightly larger
//! output: repetitions in memory mostly begin at a whole word, so matches are searched only there.
//!
//! The format is that of LZ4's `doc/lz4_Block_format.md`: sequences of literals and a match, each
//! begun by a byte with both lengths, the last one without a match.

/// Bytes in a word: the alignment of matches, and their least length.
const WORD: usize = 8;
/// Logarithm of the number of words whose last place is recorded, by their hash: as many as fit
/// into a first-level cache.
const SLOTS_LOG: u32 = 12;
/// After this many failed searches the step grows by one word, up to a limit of words.
const PATIENCE: usize = 8;
const STEP_MAX: usize = 16;

/// The shortest match of the format.
const MATCH_MIN: usize = 4;
/// The longest distance of a match.
const DISTANCE_MAX: usize = u16::MAX as usize;
/// Bytes at the end of the input that no match may cover. A match also has to begin 12 bytes before
/// the end, which a match of a word does.
const LITERALS_AT_END: usize = 5;
/// A length of this value in the first byte of a sequence continues in further bytes.
const LENGTH_ON: usize = 15;
/// Up to this number literals are copied with a fixed length.
const COPY: usize = 32;

/// The last place of each word.
pub(crate) struct Places([u32; 1 << SLOTS_LOG]);

impl Places {
    pub(crate) fn new() -> Box<Self> {
        Box::new(Self([0; 1 << SLOTS_LOG]))
    }

    /// Compresses `input` into `output`. Returns the length of the result, or `None` when it
    /// exceeds `output`.
    pub(crate) fn compress(&mut self, input: &[u8], output: &mut [u8]) -> Option<usize> {
        self.0.fill(0);
        let mut sequences = Sequences {
            input,
            output,
            length: 0,
            done: 0,
        };
        let (mut at, mut misses) = (WORD, 0);
        while at + WORD + LITERALS_AT_END <= input.len() {
            let word = word(input, at);
            let slot = (word.wrapping_mul(0x9e37_79b1_85eb_ca87) >> (64 - SLOTS_LOG)) as usize;
            // An unused slot refers to the first word: the comparison rejects it if it differs.
            let earlier = std::mem::replace(&mut self.0[slot], at as u32) as usize;
            let distance = at.wrapping_sub(earlier);
            if self::word(input, earlier) != word || distance > DISTANCE_MAX {
                at += WORD * (1 + misses / PATIENCE).min(STEP_MAX);
                misses += 1;
                continue;
            }
            misses = 0;
            let end = at + WORD + same(input, at + WORD, distance);
            let start = at - same_before(input, at, distance).min(at - sequences.done);
            sequences.push(start, end, distance)?;
            at = end.next_multiple_of(WORD);
        }
        sequences.finish()
    }
}

/// Returns the bytes of the input from `at` on; `None` where there are fewer.
#[inline(always)]
fn bytes<const N: usize>(input: &[u8], at: usize) -> Option<&[u8; N]> {
    input.get(at..)?.first_chunk()
}

#[inline(always)]
fn word(input: &[u8], at: usize) -> u64 {
    bytes(input, at).map_or(0, |word| u64::from_le_bytes(*word))
}

/// Returns how many bytes from `at` on equal those `distance` before them, without the last ones of
/// the input.
#[inline(always)]
fn same(input: &[u8], at: usize, distance: usize) -> usize {
    let end = input.len().saturating_sub(LITERALS_AT_END);
    let mut now = at;
    while now + 16 <= end {
        let two = |at| bytes(input, at).map_or(0, |two| u128::from_le_bytes(*two));
        let differ = two(now) ^ two(now - distance);
        if differ != 0 {
            return now - at + differ.trailing_zeros() as usize / 8;
        }
        now += 16;
    }
    while now < end && input[now] == input[now - distance] {
        now += 1;
    }
    now.saturating_sub(at)
}

/// Returns how many bytes before `at` equal those `distance` before them, up to a word.
#[inline(always)]
fn same_before(input: &[u8], at: usize, distance: usize) -> usize {
    if at < distance + WORD {
        return 0;
    }
    let differ = word(input, at - WORD) ^ word(input, at - WORD - distance);
    differ.leading_zeros() as usize / 8
}

/// Writes a sequence whose lengths take at most one further byte each, with copies of fixed length:
/// the next sequence overwrites the excess. Returns the length of the sequence.
#[inline(always)]
fn short(
    to: &mut [u8; 2 * COPY],
    from: &[u8; COPY],
    literals: usize,
    more: usize,
    distance: usize,
) -> usize {
    to[0] = (literals.min(LENGTH_ON) << 4 | more.min(LENGTH_ON)) as u8;
    to[1] = literals.wrapping_sub(LENGTH_ON) as u8;
    let mut length = 1 + usize::from(literals >= LENGTH_ON);
    to[length..length + COPY].copy_from_slice(from);
    length += literals;
    to[length..length + 2].copy_from_slice(&(distance as u16).to_le_bytes());
    to[length + 2] = more.wrapping_sub(LENGTH_ON) as u8;
    length + 2 + usize::from(more >= LENGTH_ON)
}

/// An unfinished block.
struct Sequences<'a> {
    input: &'a [u8],
    output: &'a mut [u8],
    /// Bytes written.
    length: usize,
    /// Bytes of the input that they encode.
    done: usize,
}

impl Sequences<'_> {
    /// Writes literals up to `start`, and a match up to `end`.
    #[inline(always)]
    fn push(&mut self, start: usize, end: usize, distance: usize) -> Option<()> {
        let literals = start - self.done;
        let more = end - start - MATCH_MIN;
        if literals <= COPY
            && more < LENGTH_ON + 255
            && let Some(from) = bytes::<COPY>(self.input, self.done)
            && let Some(to) = self.output.get_mut(self.length..)?.first_chunk_mut()
        {
            self.length += short(to, from, literals, more, distance);
            self.done = end;
            return Some(());
        }
        self.begin(literals, more.min(LENGTH_ON))?;
        self.write((distance as u16).to_le_bytes())?;
        if more >= LENGTH_ON {
            self.length(more - LENGTH_ON)?;
        }
        self.done = end;
        Some(())
    }

    /// Writes the rest as literals. Returns the length of the block.
    fn finish(mut self) -> Option<usize> {
        self.begin(self.input.len() - self.done, 0)?;
        Some(self.length)
    }

    /// Writes the first byte of a sequence, and its literals.
    #[inline(always)]
    fn begin(&mut self, literals: usize, matched: usize) -> Option<()> {
        self.write([(literals.min(LENGTH_ON) << 4 | matched) as u8])?;
        if literals >= LENGTH_ON {
            self.length(literals - LENGTH_ON)?;
        }
        let from = self.input.get(self.done..self.done + literals)?;
        let to = self.output.get_mut(self.length..)?.get_mut(..literals)?;
        to.copy_from_slice(from);
        self.length += literals;
        Some(())
    }

    /// Writes the rest of a length.
    #[inline(always)]
    fn length(&mut self, mut length: usize) -> Option<()> {
        while length >= 255 {
            self.write([255])?;
            length -= 255;
        }
        self.write([length as u8])
    }

    #[inline(always)]
    fn write<const N: usize>(&mut self, bytes: [u8; N]) -> Option<()> {
        *self.output.get_mut(self.length..)?.first_chunk_mut()? = bytes;
        self.length += N;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Compresses into a buffer of exactly the needed length, and decompresses.
    fn round_trip(input: &[u8]) -> usize {
        let mut places = Places::new();
        let bound = lz4_flex::block::get_maximum_output_size(input.len());
        let mut output = vec![7; bound];
        let length = places.compress(input, &mut output).unwrap();
        let mut back = vec![9; input.len()];
        let made = lz4_flex::block::decompress_into(&output[..length], &mut back);
        assert_eq!(made.unwrap(), input.len());
        assert!(back == input);
        ends_as_the_format_says(&output[..length], input.len());

        let mut exact = vec![7; length];
        assert_eq!(places.compress(input, &mut exact), Some(length));
        assert!(exact == output[..length], "the same for the same input");
        if let Some(less) = exact.get_mut(1..) {
            assert_eq!(places.compress(input, less), None, "no room");
        }
        length
    }

    /// Checks a rule that other decoders rely on: the last match begins at least 12 bytes before
    /// the end, and 5 literals follow it.
    fn ends_as_the_format_says(block: &[u8], length: usize) {
        let mut block = block.iter().map(|byte| usize::from(*byte));
        let (mut done, mut last_match) = (0, None);
        while let Some(token) = block.next() {
            let literals = whole(token >> 4, &mut block);
            done += literals;
            if done == length {
                let sound = |begins| literals >= 5 && begins + 12 <= length;
                assert!(last_match.is_none_or(sound), "{last_match:?} of {length}");
                return;
            }
            let distance = block.nth(literals).unwrap() + 256 * block.next().unwrap();
            assert!((1..=done).contains(&distance));
            last_match = Some(done);
            done += MATCH_MIN + whole(token & 15, &mut block);
        }
        panic!("{done} of {length}");
    }

    /// Returns a length that begins with `part`.
    fn whole(part: usize, block: &mut impl Iterator<Item = usize>) -> usize {
        let mut length = part;
        let mut on = part == LENGTH_ON;
        while on {
            let more = block.next().unwrap();
            length += more;
            on = more == 255;
        }
        length
    }

    fn noise(seed: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let mut reader = blake3::Hasher::new();
        reader
            .update(&seed.to_le_bytes())
            .finalize_xof()
            .fill(&mut bytes);
        bytes
    }

    #[test]
    fn what_repeats_becomes_small_and_noise_hardly_grows() {
        for length in (0..50).chain([255, 256, 270, 271, 300]) {
            round_trip(&vec![3; length]);
            assert!(round_trip(&noise(1, length)) <= length + 3);
        }
        assert!(round_trip(&[0; 1 << 18]) < 1100);
        assert!(round_trip(&noise(1, 1 << 18)) < (1 << 18) + 1100);
        let part = noise(2, 400);
        assert!(round_trip(&part.repeat(160)) < 1200, "at any distance");
        let far = [&part[..], &[0; 65128], &part].concat();
        let too_far = [&part[..], &[0; 65136], &part].concat();
        let saved = round_trip(&too_far) - round_trip(&far);
        assert!((200..400).contains(&saved), "up to a limit: {saved}");
    }

    #[test]
    fn a_match_reaches_to_the_bytes_beside_its_words() {
        let repeated = noise(1, 100);
        let apart = |distance: usize| {
            let between = noise(3, distance - repeated.len());
            let input = [
                &noise(2, 5)[..],
                &repeated,
                &between,
                &repeated,
                &noise(4, 40),
            ]
            .concat();
            input.len() as isize - round_trip(&input) as isize
        };
        assert!(apart(123) < 0, "not at words");
        let saved = apart(120);
        assert!((80..100).contains(&saved), "{saved}");
    }

    proptest! {
        #[test]
        fn everything_survives(
            parts in prop::collection::vec(
                (any::<u8>(), 0..400usize, 0..3u8, 0..2000usize), 0..60,
            ),
        ) {
            let mut input = Vec::new();
            for (value, length, kind, back) in parts {
                match kind {
                    0 => input.extend(noise(u64::from(value), length)),
                    1 => input.resize(input.len() + length, value),
                    _ => {
                        let start = input.len().saturating_sub(8 * back);
                        let end = input.len().min(start + length);
                        input.extend_from_within(start..end);
                    }
                }
            }
            round_trip(&input);
        }
    }
}
