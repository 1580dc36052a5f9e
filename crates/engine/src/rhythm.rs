//! Detects guests that write their disks in bursts, such as checkpoints, and finds a good moment
//! for their switchover.
//!
//! Blocks that are pending at the switchover have to be fetched, unless the guest overwrites them
//! first, and a burst mostly overwrites the blocks of the burst before it. So a guest that moves
//! after a burst fetches that burst's blocks, while one that moves when the next burst begins
//! overwrites them.
//!
//! ```text
//! written  ____####_____####_____####_____
//!              ^        ^        ^          good moments
//! ```
//!
//! A guest that has written nothing since its migration began is assumed to be between two bursts
//! if it usually writes a lot. A guest late in the first burst that is observed waits for the next
//! one as well.
//!
//! The benefit of waiting is unknown in advance, so the wait is no longer than fetching would take
//! at that moment: at worst the move takes twice as long as without waiting.

use std::time::Duration;

/// The time without writes that separates two bursts.
const GAP: Duration = Duration::from_millis(200);
/// A burst has begun once it has written this fraction (one in `BEGUN`) of the one before; fewer
/// writes belong to that one.
const BEGUN: u64 = 16;
/// A guest usually writes a lot if it writes this fraction (one in `USUAL`) of the pending blocks
/// in the time in which they would be fetched.
const USUAL: u32 = 4;
/// A guest that has been writing for this long, and never paused for as long, is judged by that and
/// no longer by its usual rate: it writes a lot when it writes this fraction of the blocks that are
/// fetched meanwhile.
const STEADY: Duration = Duration::from_secs(1);
const STEADILY: u32 = 2;
/// Blocks whose fetch takes at most this multiple of the rest of a burst are not worth waiting for
/// the next one.
const LONG_BEFORE: f64 = 1.5;
/// A shorter fetch is not worth waiting.
const FETCH_MIN: Duration = Duration::from_millis(500);
/// Limit on the wait.
const WAIT_MAX: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Burst {
    began: Duration,
    blocks: u64,
}

/// Observations of a guest's bursts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rhythm {
    /// Blocks written so far, and the time of the last write.
    written_blocks: u64,
    written_at: Duration,
    /// When it began to write, gaps included, and how much it had written by then.
    writes_since: Option<(Duration, u64)>,
    last: Option<Burst>,
    /// A possible beginning of a burst.
    next: Option<Burst>,
    /// The time from the beginning of a burst of `previous_blocks` to the beginning of the next
    /// one.
    period: Option<Duration>,
    previous_blocks: u64,
    waits_since: Option<Duration>,
    /// When the rule was last evaluated.
    asked_at: Duration,
    /// The guest's average write rate before the migration, in blocks per second.
    usual_blocks_per_s: u64,
}

impl Rhythm {
    /// Sets the guest's average write rate before its migration began.
    pub(crate) fn usually(&mut self, blocks_per_s: u64) {
        self.usual_blocks_per_s = blocks_per_s;
    }

    /// Takes the count of blocks written so far. It is called many times within a gap.
    pub(crate) fn look(&mut self, now: Duration, written_blocks: u64) {
        let blocks = written_blocks.saturating_sub(self.written_blocks);
        if blocks == 0 {
            return;
        }
        let after_gap = self.is_quiet(now);
        if self.writes_since.is_none() || now.saturating_sub(self.written_at) >= STEADY {
            self.writes_since = Some((now, self.written_blocks));
        }
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
            self.previous_blocks = last.blocks;
            self.last = self.next.take();
        }
    }

    fn is_quiet(&self, now: Duration) -> bool {
        self.last.is_some() && now.saturating_sub(self.written_at) >= GAP
    }

    /// Returns whether the burst that was waited for has begun.
    pub(crate) fn is_in_next_burst(&self) -> bool {
        let began = self.last.map(|burst| burst.began);
        self.waits_since.is_some() && began >= self.waits_since
    }

    /// Returns how much the current burst has written so far: the guest does not overwrite that
    /// before the next one.
    pub(crate) fn written_in_burst(&self) -> u64 {
        let last = self.last.filter(|_| !self.is_quiet(self.asked_at));
        last.map_or(0, |burst| burst.blocks)
    }

    /// Returns whether sending optional blocks ahead is not worthwhile, since the guest usually
    /// writes a lot and would overwrite most of them. It holds for half of the time for which the
    /// next burst is waited for.
    pub(crate) fn spoils(&self, now: Duration, fetch: impl Fn(u64) -> Duration) -> bool {
        let waited = self
            .waits_since
            .map_or(Duration::ZERO, |since| now.saturating_sub(since));
        let usual = self.writes_a_lot(now, fetch);
        usual.is_some_and(|all| waited < all / 2)
    }

    /// Returns the upper bound of the time to fetch all pending blocks, of a guest that usually
    /// writes a lot of them meanwhile.
    fn writes_a_lot(&self, now: Duration, fetch: impl Fn(u64) -> Duration) -> Option<Duration> {
        if self
            .writes_steadily(now)
            .is_some_and(|(blocks, time)| fetch(blocks).saturating_mul(STEADILY) < time)
        {
            return None;
        }
        let all = fetch(u64::MAX).min(WAIT_MAX);
        let meanwhile = self.usual_blocks_per_s as f64 * all.as_secs_f64();
        let a_lot = all >= FETCH_MIN && fetch(meanwhile as u64).saturating_mul(USUAL) >= all;
        a_lot.then_some(all)
    }

    /// Returns how much a steadily writing guest has written, and in which time.
    fn writes_steadily(&self, now: Duration) -> Option<(u64, Duration)> {
        let (since, before) = self.writes_since?;
        let time = now.saturating_sub(since);
        let pauses = now.saturating_sub(self.written_at) >= STEADY;
        (time >= STEADY && !pauses).then_some((self.written_blocks - before, time))
    }

    /// Returns whether the switchover should wait for the guest's next burst. `fetch` returns how
    /// long fetching a number of the pending blocks takes.
    pub(crate) fn waits(&mut self, now: Duration, fetch: impl Fn(u64) -> Duration) -> bool {
        self.asked_at = now;
        let usual = self.writes_a_lot(now, &fetch);
        let all = fetch(u64::MAX);
        let last = self
            .last
            .map(|last| (last, fetch(last.blocks).min(WAIT_MAX)));
        let (at_most, worth_it) = match (last.filter(|(_, fetch)| *fetch >= FETCH_MIN), usual) {
            (Some((last, fetch)), _) => match self.period.filter(|_| self.is_like_previous(last)) {
                Some(period) => (fetch, (last.began + period).saturating_sub(now) < fetch),
                // The guest has written once; only its usual rate suggests whether it does so
                // again.
                None => {
                    let between = self.next.is_some() || self.is_quiet(now);
                    let late = is_late(now.saturating_sub(last.began), fetch, all);
                    let waits = between || late && !self.is_in_next_burst();
                    (usual.unwrap_or(fetch).max(fetch), waits)
                }
            },
            (None, Some(all)) => (all, self.writes_steadily(now).is_none()),
            (None, None) => return false,
        };
        worth_it && now.saturating_sub(*self.waits_since.get_or_insert(now)) < at_most
    }

    /// Writes that were few beside a burst say nothing about when the next burst begins.
    fn is_like_previous(&self, burst: Burst) -> bool {
        self.previous_blocks * BEGUN >= burst.blocks
    }
}

/// Returns whether a burst, if it writes all pending blocks, ends long before the blocks that it
/// has written so far would be fetched: a guest that moves now would then read blocks that are
/// still missing. A guest that writes for longer than the limit on the wait does not write in
/// bursts.
fn is_late(wrote_for: Duration, fetch: Duration, all: Duration) -> bool {
    let [writes, fetch, all] = [wrote_for, fetch, all].map(|time| time.as_secs_f64());
    wrote_for < WAIT_MAX && LONG_BEFORE * writes * (all - fetch) < fetch * fetch
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(5);
    /// Blocks written per 10 ms, each of which takes 0.1 ms to fetch.
    const BLOCKS: u64 = 100;

    fn fetch(blocks: u64) -> Duration {
        Duration::from_millis(20) * (blocks / BLOCKS) as u32
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Returns the times at which a guest waits that alternates between writing and quiet.
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
        // Between two bursts; the last one takes eight seconds to fetch.
        let quiet = waits(ms(4000), ms(1000), ms(9500), ms(11_000));
        assert_eq!(quiet.first(), Some(&ms(9500)));
        let last = *quiet.last().unwrap();
        assert!(last >= ms(9995) && last < ms(10_300), "{last:?}");
        // Late in a burst: fetching what it has written takes longer than the time to the next one.
        let late = waits(ms(4000), ms(1000), ms(8000), ms(11_000));
        assert_eq!(late.first(), Some(&ms(8000)));
        assert!(*late.last().unwrap() < ms(10_300));
        // Early in a burst, and at its beginning, it moves at once.
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
        // It never stops writing, writes rarely, or not at all.
        assert_eq!(waits(ms(60_000), ms(0), ms(0), ms(30_000)), []);
        assert_eq!(waits(ms(10), ms(3000), ms(0), ms(30_000)), []);
        assert_eq!(waits(ms(0), ms(3000), ms(0), ms(30_000)), []);
    }

    #[test]
    fn who_has_not_written_yet_is_waited_for_where_it_usually_writes_a_lot() {
        // The number of pending blocks.
        let left = |blocks: u64| fetch(blocks.min(100 * BLOCKS));
        let waits_until = |usually: u64| {
            let mut rhythm = Rhythm::default();
            rhythm.usually(usually);
            let waits = (0..10_000)
                .step_by(5)
                .filter(|at| rhythm.waits(ms(*at), left));
            waits.last()
        };
        assert_eq!(waits_until(0), None);
        assert_eq!(waits_until(12 * BLOCKS), None);
        // A quarter of the pending blocks in the time of their fetch; no longer than that.
        assert_eq!(waits_until(13 * BLOCKS), Some(1995));

        let mut rhythm = Rhythm::default();
        rhythm.usually(13 * BLOCKS);
        // A few writes do not begin a burst.
        rhythm.look(ms(100), BLOCKS);
        assert!(rhythm.waits(ms(150), left));
        assert!(rhythm.waits(ms(500), left));
        for n in 0..50 {
            rhythm.look(ms(900 + 10 * n), (2 + n) * BLOCKS);
        }
        assert!(!rhythm.waits(ms(1400), left));
        assert!(rhythm.is_in_next_burst());
        // Only the end of the first burst was observed, which says little about the next one.
        let mut rhythm = Rhythm::default();
        rhythm.usually(13 * BLOCKS);
        for n in 0..30 {
            rhythm.look(ms(10 * n), (1 + n) * BLOCKS);
        }
        assert!(!rhythm.waits(ms(300), left));
        assert!(rhythm.waits(ms(600), left));
        assert!(rhythm.waits(ms(2500), left));
        assert!(!rhythm.waits(ms(2600), left));
    }

    #[test]
    fn who_is_seen_to_write_all_the_time_is_known_by_that() {
        let left = |blocks: u64| fetch(blocks.min(400 * BLOCKS));
        let spoils = |per_tick: u64| {
            let mut rhythm = Rhythm::default();
            // As a guest does that has just created its files.
            rhythm.usually(100 * BLOCKS);
            let at = |tick: u64| ms(tick * 10);
            let spoils = (0..300u64).filter(|tick| {
                // With gaps that do not separate bursts.
                rhythm.look(at(*tick), tick / 40 * 40 * per_tick);
                assert!(*tick < 150 || !rhythm.waits(at(*tick), left));
                rhythm.spoils(at(*tick), left)
            });
            spoils.last()
        };
        // A fifth of what the link carries meanwhile; as much as that.
        assert_eq!(spoils(BLOCKS / 10), Some(139));
        assert_eq!(spoils(BLOCKS / 2), Some(299));
    }

    #[test]
    fn late_in_the_first_burst_it_waits_for_the_next_one() {
        // Four seconds write all blocks, which take eight to fetch.
        let left = |blocks: u64| fetch(blocks.min(400 * BLOCKS));
        let mut rhythm = Rhythm::default();
        let mut writes = (0..400).map(|tick| {
            rhythm.look(ms(tick * 10), (1 + tick) * BLOCKS);
            (tick * 10, rhythm)
        });
        let first = writes.find_map(|(at, mut rhythm)| rhythm.waits(ms(at), left).then_some(at));
        // Fetching what it has written by then takes half as long again as writing the rest.
        assert_eq!(first, Some(1700));
        // It writes the same blocks repeatedly.
        let waits = |at: u64| {
            let mut rhythm = Rhythm::default();
            (0..=at / 10).for_each(|tick| rhythm.look(ms(tick * 10), (1 + tick) * BLOCKS));
            rhythm.waits(ms(at), left)
        };
        assert!(waits(29_990) && !waits(30_000));
    }

    #[test]
    fn half_of_the_time_nothing_is_sent_beforehand() {
        let left = |blocks: u64| fetch(blocks.min(400 * BLOCKS));
        let mut rhythm = Rhythm::default();
        rhythm.usually(100 * BLOCKS);
        assert!(rhythm.spoils(ms(900), left), "beside memory");
        assert!(rhythm.waits(ms(1000), left));
        assert!(rhythm.spoils(ms(4990), left));
        assert!(!rhythm.spoils(ms(5010), left));
        assert!(rhythm.waits(ms(8990), left));
        assert!(!rhythm.waits(ms(9000), left));
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
        // An apparent pause makes the next burst look near.
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
