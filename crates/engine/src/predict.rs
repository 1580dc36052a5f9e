//! Predicts what a switchover would cost: the pending data, its cost per block on the link, and the
//! uncertainty of both.

pub use crate::rhythm::Rhythm;
use longhaul_protocol::BLOCK_SIZE;
use std::time::Duration;

/// Blocks per frame, before a frame has been measured.
const FRAME_BLOCKS_UNSEEN: f64 = 64.0;
/// Average deviations that an estimate allows for: about 97 of 100 values lie within.
const DEVIATIONS: f64 = 2.35;
/// Assumed relative deviation of a block's cost before it has been measured.
const DEVIATION_UNSEEN: f64 = 0.5;
/// The shortest time over which written blocks yield a write rate.
const RATE_TIME_MIN: Duration = Duration::from_millis(100);

/// The link, as far as it has been measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Its throughput for this migration, in bytes per second.
    pub rate_bytes_per_s: f64,
    /// Round-trip time.
    pub rtt: Duration,
    /// Bytes handed to the link and not yet acknowledged by it.
    pub queued_bytes: u64,
}

/// Written blocks that no pass has reported yet, where they can be counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unseen {
    /// Blocks written since the pass was made.
    pub written_blocks: u64,
    /// Blocks in the part of the pass that is not read yet.
    pub unread_blocks: u64,
    /// The time at which the written blocks were counted.
    pub at: Duration,
}

/// The data that is still to be sent, as far as is known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Left {
    /// Blocks that are pending.
    pub pending_blocks: u64,
    /// Blocks that no pass has reported yet.
    pub unseen: Option<Unseen>,
    /// The guest's write rate, in blocks per second, over the last passes.
    pub dirty_blocks_per_s: Option<f64>,
    /// The cost of all of it on the link, in bytes.
    pub bytes: f64,
    /// The time that encoding it takes.
    pub work: Duration,
    /// The link.
    pub link: Option<Link>,
    /// The guest's bursts of writes, where they are tracked.
    pub rhythm: Rhythm,
}

/// The predicted downtime if the guest were stopped now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Downtime {
    /// The likely value.
    pub likely: Duration,
    /// The upper bound in about 97 of 100 cases.
    pub at_most: Duration,
}

/// A guest that writes faster than the link carries.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outpaced {
    /// The guest's writes after encoding, in bytes per second.
    pub written_bytes_per_s: f64,
    /// The throughput of the link, in bytes per second.
    pub link_bytes_per_s: f64,
}

/// Numbers of blocks by how their writes are reported, by passes or one by one: the two kinds
/// differ in content.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Blocks {
    pub(crate) by_passes: f64,
    pub(crate) by_writes: f64,
}

impl Blocks {
    pub(crate) fn all(self) -> f64 {
        self.by_passes + self.by_writes
    }
}

/// The cost of blocks on the link and in the encoder.
#[derive(Debug, Default)]
pub(crate) struct Costs {
    by_passes: Cost,
    by_writes: Cost,
    /// Seconds of encoding per block.
    work: Option<f64>,
}

impl Costs {
    /// Returns the cost of blocks whose writes are reported one by one, or by passes.
    pub(crate) fn of(&mut self, by_writes: bool) -> &mut Cost {
        match by_writes {
            true => &mut self.by_writes,
            false => &mut self.by_passes,
        }
    }

    /// Returns the cost of a block that passes report, in bytes.
    pub(crate) fn block(&self) -> f64 {
        self.by_passes.likely()
    }

    /// Returns the likely cost of blocks, in bytes.
    pub(crate) fn likely(&self, blocks: Blocks) -> f64 {
        blocks.by_passes * self.by_passes.likely() + blocks.by_writes * self.by_writes.likely()
    }

    /// Returns the likely travel time of blocks whose writes are reported one by one.
    pub(crate) fn fetch_time(&self, blocks: u64, link: Link) -> Duration {
        travel_time(blocks as f64 * self.by_writes.likely(), link)
    }

    /// Returns the upper bound of the cost of blocks, in bytes.
    pub(crate) fn at_most(&self, blocks: Blocks) -> f64 {
        let Blocks {
            by_passes,
            by_writes,
        } = blocks;
        by_passes * self.by_passes.at_most(by_passes)
            + by_writes * self.by_writes.at_most(by_writes)
    }

    /// Records how long encoding a frame of written blocks took.
    pub(crate) fn made(&mut self, blocks: usize, took: Duration) {
        if blocks > 0 {
            let now = took.as_secs_f64() / blocks as f64;
            let known = self.work.get_or_insert(now);
            *known += weight(blocks) * (now - *known);
        }
    }

    /// Returns how long encoding the blocks takes: a faster link waits for it.
    pub(crate) fn work(&self, blocks: Blocks) -> Duration {
        let seconds = self.work.unwrap_or(0.0) * blocks.all();
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

/// Returns the weight of a frame of this size in an average.
fn weight(blocks: usize) -> f64 {
    (blocks as f64 / 2048.0).min(0.5)
}

/// A guest's write rate, from the reports of passes.
#[derive(Debug, Default)]
pub(crate) struct Written {
    /// Blocks and time since the last update of the rate.
    lately: (Blocks, Duration),
    all: (Blocks, Duration),
    known: Option<Blocks>,
}

impl Written {
    /// Adds the blocks that a pass reported and the time in which they were written. Passes may
    /// follow one another directly: only several together yield a rate.
    pub(crate) fn add(&mut self, blocks: Blocks, time: Duration) {
        for (sum, over) in [&mut self.lately, &mut self.all] {
            sum.by_passes += blocks.by_passes;
            sum.by_writes += blocks.by_writes;
            *over += time;
        }
        if let Some(rate) = rate(self.lately) {
            self.known = Some(rate);
            self.lately = Default::default();
        }
    }

    /// Returns the recent rate in blocks per second.
    pub(crate) fn lately(&self) -> Option<Blocks> {
        self.known
    }

    /// Returns the average rate from the beginning, in blocks per second.
    pub(crate) fn on_average(&self) -> Option<Blocks> {
        rate(self.all)
    }
}

fn rate((blocks, time): (Blocks, Duration)) -> Option<Blocks> {
    let seconds = time.as_secs_f64();
    (time >= RATE_TIME_MIN).then(|| Blocks {
        by_passes: blocks.by_passes / seconds,
        by_writes: blocks.by_writes / seconds,
    })
}

/// The cost of a block on the link, in bytes.
#[derive(Debug, Default)]
pub(crate) struct Cost {
    average: Option<f64>,
    /// The average deviation of a frame's blocks, and the average number of blocks per frame.
    deviation: f64,
    frame_blocks: f64,
    /// Blocks with content that whole passes have sent, and their bytes on the link.
    first_blocks: u64,
    first_bytes: u64,
}

impl Cost {
    /// Records the bytes of blocks with content in a pass over everything.
    pub(crate) fn add_first(&mut self, blocks: u64, bytes: u64) {
        self.first_blocks += blocks;
        self.first_bytes += bytes;
    }

    /// Records the bytes of written blocks, including those that need not travel.
    pub(crate) fn add(&mut self, blocks: usize, bytes: u64) {
        if blocks == 0 {
            return;
        }
        let now = bytes as f64 / blocks as f64;
        let weight = weight(blocks);
        let Some(average) = &mut self.average else {
            self.average = Some(now);
            self.deviation = DEVIATION_UNSEEN * now;
            self.frame_blocks = blocks as f64;
            return;
        };
        let off = now - *average;
        *average += weight * off;
        self.deviation += weight * (off.abs() - self.deviation);
        self.frame_blocks += weight * (blocks as f64 - self.frame_blocks);
    }

    /// Returns the likely cost of a block.
    pub(crate) fn likely(&self) -> f64 {
        let first = self.first_bytes as f64 / self.first_blocks as f64;
        let first = Some(first).filter(|_| self.first_blocks > 0);
        let cost = self.average.or(first);
        cost.unwrap_or(BLOCK_SIZE as f64)
    }

    /// Returns the upper bound of the cost of each of a number of blocks: the more blocks, the more
    /// their deviations cancel out.
    pub(crate) fn at_most(&self, blocks: f64) -> f64 {
        let likely = self.likely();
        let (deviation, frame_blocks) = match self.average {
            Some(_) => (self.deviation, self.frame_blocks),
            None => (DEVIATION_UNSEEN * likely, FRAME_BLOCKS_UNSEEN),
        };
        let frames = (blocks / frame_blocks).max(1.0);
        (likely + DEVIATIONS * deviation / frames.sqrt()).min(likely.max(BLOCK_SIZE as f64))
    }
}

/// Returns the guest's write rate in blocks per second, from passes and from the count since the
/// last pass began.
pub(crate) fn write_rate(passes: Option<Blocks>, counted: Unseen, began: Duration) -> Blocks {
    let counted_for = counted.at.saturating_sub(began);
    let lately = if counted_for >= RATE_TIME_MIN {
        counted.written_blocks as f64 / counted_for.as_secs_f64()
    } else {
        0.0
    };
    let passes = passes.unwrap_or_default();
    Blocks {
        by_passes: passes.by_passes.max(lately),
        ..passes
    }
}

/// Returns the travel time of a number of bytes.
pub(crate) fn travel_time(bytes: f64, link: Link) -> Duration {
    let seconds = bytes / link.rate_bytes_per_s.max(1.0);
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_more_blocks_the_surer() {
        let mut cost = Cost::default();
        assert_eq!(cost.likely(), 4096.0);
        assert_eq!(cost.at_most(64.0), 4096.0, "nothing costs more than itself");
        cost.add_first(1000, 1_000_000);
        assert_eq!(cost.likely(), 1000.0);
        assert!(cost.at_most(64.0) > 2000.0);
        for frame in 0..1000 {
            cost.add(64, if frame % 2 == 0 { 64 * 100 } else { 64 * 300 });
        }
        assert!((190.0..210.0).contains(&cost.likely()), "{cost:?}");
        let few = cost.at_most(64.0) - cost.likely();
        let many = cost.at_most(6400.0) - cost.likely();
        assert!((200.0..240.0).contains(&few), "{few}");
        assert!((many * 10.0 - few).abs() < 1.0, "{few} {many}");
    }

    #[test]
    fn what_differs_is_counted_apart() {
        let mut costs = Costs::default();
        for _ in 0..100 {
            costs.of(false).add(64, 64 * 100);
            costs.of(true).add(64, 64 * 4096);
        }
        let blocks = |by_passes, by_writes| Blocks {
            by_passes,
            by_writes,
        };
        assert!(costs.likely(blocks(1000.0, 0.0)) < 101.0 * 1000.0);
        // As an average over all blocks the cost would be half of that.
        assert!(costs.likely(blocks(0.0, 100.0)) > 4000.0 * 100.0);
        assert!(costs.at_most(blocks(0.0, 100.0)) <= 4096.0 * 100.0);
        assert_eq!(
            costs.work(blocks(1000.0, 1000.0)),
            Duration::ZERO,
            "not known"
        );
        costs.made(100, Duration::from_millis(10));
        let work = costs.work(blocks(500.0, 500.0)).as_secs_f64();
        assert!((work - 0.1).abs() < 1e-6, "{work}");
    }

    #[test]
    fn passes_that_follow_each_other_at_once_tell_no_rate() {
        let mut written = Written::default();
        let blocks = |by_passes: f64| Blocks {
            by_passes,
            by_writes: 0.0,
        };
        let ms = Duration::from_millis;
        written.add(blocks(1000.0), ms(1000));
        assert_eq!(written.lately(), Some(blocks(1000.0)));
        written.add(blocks(243.0), Duration::ZERO);
        assert_eq!(written.lately(), Some(blocks(1000.0)), "not 243 in no time");
        written.add(blocks(0.0), ms(243));
        assert_eq!(written.lately(), Some(blocks(1000.0)));
        written.add(blocks(50.0), ms(500));
        assert_eq!(written.lately(), Some(blocks(100.0)));
        let average = written.on_average().unwrap().by_passes;
        assert!((average - 1293.0 / 1.743).abs() < 1e-9, "{average}");
    }

    #[test]
    fn what_always_costs_the_same_is_sure() {
        let mut cost = Cost::default();
        (0..1000).for_each(|_| cost.add(64, 64 * 500));
        assert!(cost.at_most(64.0) - 500.0 < 1.0);
    }
}
