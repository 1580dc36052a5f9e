//! What a history can be like: everything everywhere, or what paper benchmarks of disks do.

use longhaul_history::plan::{FilePasses, Plan, PlanError, SECTOR_BYTES};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The block of the workloads that pass over a file.
const BLOCK_BYTES: u64 = 256 << 10;
const BLOCK_SECTORS: u64 = BLOCK_BYTES / SECTOR_BYTES as u64;
/// How often IOR writes its file and reads it.
const IOR_PASSES: u64 = 10;
/// In the paper IOR passes over 1 GB, and gets 266 MB/s written and 1 GB/s read without a migration...
const IOR_FILE_BYTES: u64 = 1_000_000_000;
const IOR_WRITE_BYTES_PER_S: u64 = 266_000_000;
const IOR_READ_BYTES_PER_S: u64 = 1_000_000_000;
/// ...beside a link that carries so much.
const PAPER_LINK_BYTES_PER_S: u64 = 117_500_000;
/// AsyncWR writes 6 MB/s.
const ASYNCWR_BYTES_PER_S: u64 = 6_000_000;
/// CM1 writes 200 MB every 40 s.
const CM1_DUMP_BYTES: u64 = 200_000_000;
const CM1_EVERY: Duration = Duration::from_secs(40);

/// A kind of history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Workload {
    /// Writes, zeros, discards, reads and flushes everywhere
    Mixed,
    /// As IOR: a file is written and then read in blocks of 256 KiB, ten times, new content each time
    Ior,
    /// As AsyncWR: 6 MB/s are written all the time
    Asyncwr,
    /// As CM1: 200 MB are written at once, every 40 s
    Cm1,
}

/// What a guest does, besides its seed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// The file that is passed over, where it is not everything everywhere.
    pub file: Option<RecordedFile>,
    /// How many operations there are; 0: no end.
    pub operations: u64,
    /// At most so many per second; 0: as many as there can be.
    pub operations_per_s: u64,
    /// The same, of reads; 0: as of all others.
    pub reads_per_s: u64,
    /// Operations before this number follow each other as fast as they can.
    pub paced_from: u64,
    /// After so many the next ones wait; 0: never.
    pub burst: u64,
    /// From the beginning of a burst to that of the next.
    pub burst_every: Duration,
    /// What is discarded of a raw image may keep its content: snapshots are made of it.
    pub overlaid: bool,
}

/// A file that is passed over, as it is kept in records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedFile {
    /// Its sectors.
    pub sectors: u64,
    /// The sectors of one operation.
    pub block: u64,
    /// Whether each pass reads it after it was written.
    pub reads: bool,
}

impl RecordedFile {
    /// The operations of a pass.
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

/// The history of a seed on disks of so many sectors.
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
    /// Those of the paper.
    pub const OF_THE_PAPER: [Self; 3] = [Self::Ior, Self::Asyncwr, Self::Cm1];

    /// Its name, on the command line and in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mixed => "mixed",
            Self::Ior => "ior",
            Self::Asyncwr => "asyncwr",
            Self::Cm1 => "cm1",
        }
    }

    /// What a guest does beside a link of so many bytes per second, in the paper's proportions: every size and
    /// every rate is as much of the paper's as the link is. The first pass over the file is made as fast as it
    /// can be, so that the disk holds something when what is measured begins. `None` for what is not in the paper.
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

    /// What a guest does; where it passes over a file, over one of so many bytes.
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
