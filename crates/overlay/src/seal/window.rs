//! Finds datagrams that arrive twice, with a window of bits in a ring of words (RFC 6479).

const WORD_BITS: u64 = 64;
const WORDS: usize = 128;

/// How far behind the newest counter a datagram may arrive: one word less than the ring has.
pub const WINDOW_COUNTERS: u64 = (WORDS as u64 - 1) * WORD_BITS;

/// Why a counter is not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    /// It is too far behind the newest.
    Old,
    /// It was accepted before.
    Twice,
}

/// The counters that were accepted.
#[derive(Debug, Clone)]
pub(super) struct Window {
    /// One more than the newest; 0 if there was none.
    next: u64,
    words: [u64; WORDS],
}

impl Window {
    pub(super) fn new() -> Self {
        Self {
            next: 0,
            words: [0; WORDS],
        }
    }

    /// Returns one more than the newest counter.
    #[inline]
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    #[inline]
    fn place(counter: u64) -> (usize, u64) {
        let word = (counter / WORD_BITS) as usize % WORDS;
        (word, 1 << (counter % WORD_BITS))
    }

    /// Returns whether a counter would be accepted. It must be below `u64::MAX`.
    #[inline]
    pub(super) fn check(&self, counter: u64) -> Result<(), Seen> {
        if counter >= self.next {
            return Ok(());
        }
        if self.next - counter > WINDOW_COUNTERS {
            return Err(Seen::Old);
        }
        let (word, bit) = Self::place(counter);
        if self.words[word] & bit != 0 {
            return Err(Seen::Twice);
        }
        Ok(())
    }

    /// Accepts a counter that [`Self::check`] passed.
    #[inline]
    pub(super) fn accept(&mut self, counter: u64) {
        if counter >= self.next {
            // The words after the newest one, up to that of the counter, belong to the past.
            let before = self.next.div_ceil(WORD_BITS);
            let last = counter / WORD_BITS;
            for word in before..=last.min(before + WORDS as u64) {
                self.words[word as usize % WORDS] = 0;
            }
            self.next = counter + 1;
        }
        let (word, bit) = Self::place(counter);
        self.words[word] |= bit;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        #[test]
        fn like_a_set(steps in prop::collection::vec((0..5u8, 0..20_000u64), 1..400)) {
            let mut window = Window::new();
            let (mut accepted, mut next) = (HashSet::new(), 0u64);
            for (kind, number) in steps {
                let counter = match kind {
                    0 => next + number,
                    1 => next + number % 70,
                    2 => next.saturating_sub(number),
                    _ => next.saturating_sub(number % 200),
                };
                let expected = if next > counter && next - counter > WINDOW_COUNTERS {
                    Err(Seen::Old)
                } else if accepted.contains(&counter) {
                    Err(Seen::Twice)
                } else {
                    Ok(())
                };
                prop_assert_eq!(window.check(counter), expected);
                if expected.is_ok() {
                    window.accept(counter);
                    accepted.insert(counter);
                    next = next.max(counter + 1);
                }
                prop_assert_eq!(window.next(), next);
            }
        }
    }

    #[test]
    fn far_jumps() {
        let mut window = Window::new();
        for counter in 0..WINDOW_COUNTERS {
            window.accept(counter);
        }
        assert_eq!(window.check(0), Err(Seen::Twice));
        window.accept(u64::MAX - 1);
        assert_eq!(window.check(u64::MAX - 2), Ok(()));
        assert_eq!(window.check(u64::MAX - WINDOW_COUNTERS), Ok(()));
        assert_eq!(window.check(u64::MAX - 1 - WINDOW_COUNTERS), Err(Seen::Old));
    }
}
