//! Guests that write their disks in bursts, such as checkpoints: when is a good moment to go on at the destination?
//!
//! What is left at the source has to be fetched, unless the guest overwrites it first, and what a guest
//! writes in bursts it mostly writes anew in the next one. So what the last burst has written is fetched by a guest that
//! goes after it, and overwritten by one that goes when the next one begins.
//!
//! ```text
//! written  ____####_____####_____####_____
//!              ^        ^        ^          good moments
//! ```
//!
//! What waiting brings is not known, so nobody waits for longer than fetching would take by now: at worst it takes twice
//! as long as without.

use std::time::Duration;

/// So long nothing is written between two bursts.
const GAP: Duration = Duration::from_millis(200);
/// A burst has begun when so much of the one before was written; less belongs to that one.
const BEGUN: u64 = 16;
/// What takes less to fetch is not worth waiting.
const FETCH_MIN: Duration = Duration::from_millis(500);
/// Nobody waits for longer.
const WAIT_MAX: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Burst {
    began: Duration,
    blocks: u64,
}

/// What is known of a guest's bursts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rhythm {
    /// Blocks written so far, and when the last ones were.
    written_blocks: u64,
    written_at: Duration,
    last: Option<Burst>,
    /// Perhaps the beginning of a burst.
    next: Option<Burst>,
    /// From the beginning of a burst to that of the next one.
    period: Option<Duration>,
    waits_since: Option<Duration>,
}

impl Rhythm {
    /// So many blocks were written until now. It is told many times within a gap.
    pub(crate) fn look(&mut self, now: Duration, written_blocks: u64) {
        let blocks = written_blocks.saturating_sub(self.written_blocks);
        if blocks == 0 {
            return;
        }
        let after_gap = self.is_quiet(now);
        self.written_blocks = written_blocks;
        self.written_at = now;
        let Some(last) = &mut self.last else {
            self.last = Some(Burst { began: now, blocks });
            return;
        };
        match &mut self.next {
            Some(next) if !after_gap => next.blocks += blocks,
            None if !after_gap => last.blocks += blocks,
            small => {
                last.blocks += small.map_or(0, |burst| burst.blocks);
                *small = Some(Burst { began: now, blocks });
            }
        }
        if let Some(next) = self.next
            && next.blocks * BEGUN >= last.blocks
        {
            self.period = Some(next.began.saturating_sub(last.began));
            self.last = self.next.take();
        }
    }

    fn is_quiet(&self, now: Duration) -> bool {
        self.last.is_some() && now.saturating_sub(self.written_at) >= GAP
    }

    /// Whether the burst that was waited for has come.
    pub(crate) fn is_in_next_burst(&self) -> bool {
        let began = self.last.map(|burst| burst.began);
        self.waits_since.is_some() && began >= self.waits_since
    }

    /// Whether the guest should not go before its next burst. `fetch` says how long it takes to fetch so many blocks.
    pub(crate) fn waits(&mut self, now: Duration, fetch: impl Fn(u64) -> Duration) -> bool {
        let Some(last) = self.last else { return false };
        let fetch = fetch(last.blocks).min(WAIT_MAX);
        if fetch < FETCH_MIN {
            return false;
        }
        let worth_it = match self.period {
            Some(period) => (last.began + period).saturating_sub(now) < fetch,
            // It has written once, and whether it does so again nobody knows.
            None => self.next.is_some() || self.is_quiet(now),
        };
        worth_it && now.saturating_sub(*self.waits_since.get_or_insert(now)) < fetch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(5);
    /// Of 100 blocks each 10 ms take, and what they take to fetch.
    const BLOCKS: u64 = 100;

    fn fetch(blocks: u64) -> Duration {
        Duration::from_millis(20) * (blocks / BLOCKS) as u32
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// A guest that writes for a time, and is quiet for another; where it waits, by the time.
    fn waits(writes: Duration, quiet: Duration, from: Duration, until: Duration) -> Vec<Duration> {
        let mut rhythm = Rhythm::default();
        let (mut now, mut written) = (Duration::ZERO, 0);
        let mut waits = Vec::new();
        while now < until {
            let at = now.as_millis() % (writes + quiet).as_millis();
            if at < writes.as_millis() && now.as_millis().is_multiple_of(10) {
                written += BLOCKS;
            }
            rhythm.look(now, written);
            if now >= from && rhythm.waits(now, fetch) {
                waits.push(now);
            }
            now += TICK;
        }
        waits
    }

    #[test]
    fn a_guest_goes_when_a_burst_begins() {
        // Between two bursts; what it wrote takes eight seconds to fetch.
        let quiet = waits(ms(4000), ms(1000), ms(9500), ms(11_000));
        assert_eq!(quiet.first(), Some(&ms(9500)));
        let last = *quiet.last().unwrap();
        assert!(last >= ms(9995) && last < ms(10_300), "{last:?}");
        // Late in one: what it has written of it takes longer than the time to the next.
        let late = waits(ms(4000), ms(1000), ms(8000), ms(11_000));
        assert_eq!(late.first(), Some(&ms(8000)));
        assert!(*late.last().unwrap() < ms(10_300));
        // Early in one, and at its beginning, it goes at once.
        assert_eq!(waits(ms(4000), ms(1000), ms(6000), ms(6500)), []);
        assert_eq!(waits(ms(4000), ms(1000), ms(5300), ms(5400)), []);
    }

    #[test]
    fn nobody_waits_for_longer_than_fetching_takes() {
        // It never writes again.
        let once = waits(ms(1000), ms(60_000), ms(2000), ms(30_000));
        assert_eq!(
            (once.first(), once.last()),
            (Some(&ms(2000)), Some(&ms(3995)))
        );
        // It never stops writing, writes rarely, or nothing.
        assert_eq!(waits(ms(60_000), ms(0), ms(0), ms(30_000)), []);
        assert_eq!(waits(ms(10), ms(3000), ms(0), ms(30_000)), []);
        assert_eq!(waits(ms(0), ms(3000), ms(0), ms(30_000)), []);
    }

    #[test]
    fn what_a_burst_writes_while_it_is_waited_for_counts() {
        let mut rhythm = Rhythm::default();
        let mut written = 0;
        let mut write = |rhythm: &mut Rhythm, from: u64, until: u64| {
            for at in (from..until).step_by(10) {
                written += BLOCKS;
                rhythm.look(ms(at), written);
            }
        };
        // A pause that was none makes it look as if the next burst were near.
        write(&mut rhythm, 0, 300);
        write(&mut rhythm, 900, 1000);
        assert!(rhythm.waits(ms(1400), |_| ms(600)));
        write(&mut rhythm, 1100, 4000);
        assert!(rhythm.waits(ms(4300), fetch));
        assert!(rhythm.waits(ms(7000), fetch));
        assert!(!rhythm.waits(ms(7500), fetch));
    }

    #[test]
    fn a_little_between_bursts_begins_none() {
        let mut rhythm = Rhythm::default();
        let mut written = 0;
        for at in (0..4000).step_by(10) {
            written += BLOCKS;
            rhythm.look(ms(at), written);
        }
        written += BLOCKS;
        rhythm.look(ms(4500), written);
        assert!(rhythm.waits(ms(4500), fetch));
        rhythm.look(ms(4800), written);
        assert!(rhythm.waits(ms(4800), fetch));
        assert!(!rhythm.is_in_next_burst());
        for at in (5000..5300).step_by(10) {
            written += BLOCKS;
            rhythm.look(ms(at), written);
        }
        assert_eq!(rhythm.period, Some(ms(5000)));
        assert!(rhythm.is_in_next_burst());
        assert!(!rhythm.waits(ms(5300), fetch));
    }
}
