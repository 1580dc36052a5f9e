//! Defines the kinds of histories: random operations everywhere, or the disk benchmarks of papers.

use longhaul_history::plan::{FilePasses, Plan, PlanError, SECTOR_BYTES};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The block size of the workloads that pass over a file.
const BLOCK_BYTES: u64 = 256 << 10;
const BLOCK_SECTORS: u64 = BLOCK_BYTES / SECTOR_BYTES as u64;
/// The number of IOR's passes over its file.
const IOR_PASSES: u64 = 10;
/// In the paper IOR passes over 1 GB, and reaches 266 MB/s for writes and 1 GB/s for reads without
/// a migration...
const IOR_FILE_BYTES: u64 = 1_000_000_000;
const IOR_WRITE_BYTES_PER_S: u64 = 266_000_000;
const IOR_READ_BYTES_PER_S: u64 = 1_000_000_000;
/// ...with a link of this rate.
const PAPER_LINK_BYTES_PER_S: u64 = 117_500_000;
/// AsyncWR writes 6 MB/s.
const ASYNCWR_BYTES_PER_S: u64 = 6_000_000;
/// CM1 writes 200 MB every 40 s.
const CM1_DUMP_BYTES: u64 = 200_000_000;
const CM1_EVERY: Duration = Duration::from_secs(40);

/// A kind of history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Workload {
    /// Random writes, zeros, discards, reads and flushes everywhere
    Mixed,
    /// As IOR: a file is written and then read in blocks of 256 KiB, ten times, new content each
    /// time
    Ior,
    /// As AsyncWR: 6 MB/s are written continuously
    Asyncwr,
    /// As CM1: 200 MB are written at once, every 40 s
    Cm1,
}

/// The work of a guest, apart from its seed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// The file of the passes, for a history over a file.
    pub file: Option<RecordedFile>,
    /// The number of operations; 0: no end.
    pub operations: u64,
    /// The maximum number per second; 0: no limit.
    pub operations_per_s: u64,
    /// The same for reads; 0: as for all others.
    pub reads_per_s: u64,
    /// Operations before this number follow each other without delay.
    pub paced_from: u64,
    /// The size of a burst, after which the next ones wait; 0: no bursts.
    pub burst: u64,
    /// The interval between the beginnings of bursts.
    pub burst_every: Duration,
    /// Whether discarded parts of a raw image may keep their content: snapshots are made of it.
    pub overlaid: bool,
}

/// The file of the passes, as stored in records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedFile {
    /// Its sectors.
    pub sectors: u64,
    /// The sectors of one operation.
    pub block: u64,
    /// Whether each pass reads it after writing it.
    pub reads: bool,
}

impl RecordedFile {
    /// Returns the operations of a pass.
    pub fn operations(self) -> u64 {
        self.passes().operations()
    }

    fn passes(self) -> FilePasses {
        FilePasses {
            sectors: self.sectors,
            block: self.block,
            reads: self.reads,
        }
    }
}

/// Returns the history of a seed on disks of these sizes.
///
/// # Errors
/// When there is none on such disks, or the file does not fit.
pub fn plan(seed: u64, disks: Vec<u64>, file: Option<RecordedFile>) -> Result<Plan, PlanError> {
    let plan = Plan::new(seed, disks)?;
    match file {
        None => Ok(plan),
        Some(file) => plan.over_file(file.passes()),
    }
}

impl Workload {
    /// The workloads of the paper.
    pub const OF_THE_PAPER: [Self; 3] = [Self::Ior, Self::Asyncwr, Self::Cm1];

    /// Returns its name, on the command line and in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mixed => "mixed",
            Self::Ior => "ior",
            Self::Asyncwr => "asyncwr",
            Self::Cm1 => "cm1",
        }
    }

    /// Returns a guest's work with a link of this rate in bytes per second, in the paper's
    /// proportions: every size and rate is scaled by the ratio of the links. The first pass over
    /// the file is done without delay, so that the disk has content when the measurement begins.
    /// `None` for workloads outside the paper.
    pub fn beside(self, link_bytes_per_s: u64) -> Option<Work> {
        let scaled = |paper: u64| {
            let product = u128::from(paper) * u128::from(link_bytes_per_s);
            (product / u128::from(PAPER_LINK_BYTES_PER_S)) as u64
        };
        let blocks = |paper: u64| (scaled(paper) / BLOCK_BYTES).max(1);
        let work = self.work(blocks(IOR_FILE_BYTES) * BLOCK_BYTES);
        let pass = work.file?.operations();
        let work = Work {
            paced_from: pass,
            ..work
        };
        Some(match self {
            Self::Mixed => return None,
            Self::Ior => Work {
                operations: pass + work.operations,
                operations_per_s: blocks(IOR_WRITE_BYTES_PER_S),
                reads_per_s: blocks(IOR_READ_BYTES_PER_S),
                ..work
            },
            Self::Asyncwr => Work {
                operations_per_s: blocks(ASYNCWR_BYTES_PER_S),
                ..work
            },
            Self::Cm1 => Work {
                burst: blocks(CM1_DUMP_BYTES),
                ..work
            },
        })
    }

    /// Returns a guest's work; if it passes over a file, the file has this size.
    pub fn work(self, file_bytes: u64) -> Work {
        let file = |reads| RecordedFile {
            sectors: file_bytes / BLOCK_BYTES * BLOCK_SECTORS,
            block: BLOCK_SECTORS,
            reads,
        };
        match self {
            Self::Mixed => Work::default(),
            Self::Ior => Work {
                operations: IOR_PASSES * file(true).passes().operations(),
                file: Some(file(true)),
                ..Work::default()
            },
            Self::Asyncwr => Work {
                operations_per_s: ASYNCWR_BYTES_PER_S / BLOCK_BYTES,
                file: Some(file(false)),
                ..Work::default()
            },
            Self::Cm1 => Work {
                burst: CM1_DUMP_BYTES / BLOCK_BYTES,
                burst_every: CM1_EVERY,
                file: Some(file(false)),
                ..Work::default()
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workloads_are_in_the_papers_proportions() {
        let ior = Workload::Ior.work((64 << 20) + 5);
        // 256 blocks are written, made durable and read, ten times.
        assert_eq!(ior.operations, 10 * (256 + 1 + 256));
        assert_eq!(Workload::Asyncwr.work(1 << 30).operations_per_s, 22);
        assert_eq!(Workload::Cm1.work(1 << 30).burst, 762);
        let disks = vec![(64 << 20) / 512];
        assert!(plan(1, disks.clone(), ior.file).is_ok());
        let larger = Workload::Ior.work(65 << 20);
        assert!(plan(1, disks.clone(), larger.file).is_err());
        assert_eq!(Workload::Mixed.work(0).file, None);
        assert_eq!(Workload::Mixed.beside(25_000_000), None);
        // 25 MB/s are 0.213 of the paper's link, and a block is 256 KiB.
        let ior = Workload::Ior.beside(25_000_000).unwrap();
        let pass = 811 + 1 + 811;
        assert_eq!((ior.paced_from, ior.operations), (pass, 11 * pass));
        assert_eq!((ior.operations_per_s, ior.reads_per_s), (215, 811));
        let cm1 = Workload::Cm1.beside(25_000_000).unwrap();
        assert_eq!((cm1.burst, cm1.paced_from), (162, 812));
        assert_eq!(
            Workload::Asyncwr
                .beside(25_000_000)
                .unwrap()
                .operations_per_s,
            4
        );
        assert!(plan(1, disks, None).is_ok());
    }
}
