//! The guest's disk workloads: those of paper 001, section 5, at a 32nd of their size and rate, and
//! a database's random writes.

use std::ops::Range;

const MB: f64 = 1e6 / 32.0;
const CHUNK: u64 = 64;
/// The file that is written: 1 GB in the paper.
pub(crate) const FILE_BLOCKS: u64 = 128 * CHUNK;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Workload {
    /// Repeatedly writes and reads a whole file, as fast as the disk allows.
    Ior,
    /// A moderate, constant stream of writes to new places.
    AsyncWr,
    /// A burst of writes every 40 seconds.
    Cm1,
    /// Small random writes, most of them to a tenth of a file, with as many reads.
    Database,
}

/// A request: its duration with a local disk, and its earliest beginning.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) write: bool,
    pub(crate) blocks: Range<u64>,
    pub(crate) seconds: f64,
    pub(crate) not_before: f64,
}

#[derive(Debug)]
pub(crate) struct Stream {
    workload: Workload,
    count: u64,
    random: u64,
}

impl Workload {
    pub(crate) const ALL: [Workload; 4] = [Self::Ior, Self::AsyncWr, Self::Cm1, Self::Database];

    pub(crate) fn stream(self) -> Stream {
        Stream {
            workload: self,
            count: 0,
            random: 1,
        }
    }
}

impl Stream {
    fn below(&mut self, limit: u64) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.random >> 33) % limit
    }

    pub(crate) fn next(&mut self) -> Request {
        let n = self.count;
        self.count += 1;
        let chunk = |n: u64| n % (FILE_BLOCKS / CHUNK) * CHUNK;
        let request = |write, start: u64, count: u64, rate: f64, not_before| Request {
            write,
            blocks: start..start + count,
            seconds: count as f64 * 4096.0 / (rate * MB),
            not_before,
        };
        match self.workload {
            Workload::Ior => {
                let write = (n / (FILE_BLOCKS / CHUNK)).is_multiple_of(2);
                let rate = if write { 266.0 } else { 1000.0 };
                request(write, chunk(n), CHUNK, rate, 0.0)
            }
            Workload::AsyncWr => {
                let at = n as f64 * (CHUNK as f64 * 4096.0) / (6.0 * MB);
                request(true, chunk(n), CHUNK, 266.0, at)
            }
            Workload::Cm1 => {
                let burst = 200 * 4 / 32;
                let at = (n / burst) as f64 * 40.0;
                request(true, chunk(n), CHUNK, 266.0, at)
            }
            Workload::Database => {
                let write = self.below(2) == 0;
                let hot = self.below(10) > 0;
                let among = if hot { FILE_BLOCKS / 10 } else { FILE_BLOCKS };
                let start = self.below(among - 4);
                request(write, start, 4, 100.0, n as f64 * 0.004)
            }
        }
    }
}
