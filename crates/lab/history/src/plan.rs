//! Defines each operation of a history: a function of the seed and the operation's number alone.

use crate::random::{Random, mixed, scaled};
use std::fmt;
use std::ops::Range;

/// The sector size here and in the guests' disks.
pub const SECTOR_BYTES: usize = 512;
/// The maximum length of an operation: 1 MiB.
pub const LONGEST_SECTORS: u64 = 2048;
/// The maximum number of disks of a history.
pub const DISKS_MAX: usize = 16;
/// The minimum number of sectors of a disk.
pub const SECTORS_MIN: u64 = 64;
/// The maximum number of sectors of a disk: 64 GiB. The judge needs 16 bytes of memory for each,
/// the guest 4.
pub const SECTORS_MAX: u64 = 1 << 27;
/// The limit of operations' numbers.
pub const OPERATIONS_MAX: u64 = (1 << 31) - 1;

/// Sectors in a page of a guest's file system.
const BLOCK_SECTORS: u64 = 8;
/// How far back an operation looks for a place to return to.
const RETURN_TO: u64 = 64;

/// The kind of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Writes sectors that say which operation wrote them.
    Write,
    /// Reads and compares.
    Read,
    /// Writes zeros, as a command of its own.
    Zero,
    /// Discards.
    Discard,
    /// Makes durable the disk's writes of earlier operations, for which it waits.
    Flush {
        /// Whether later operations, on all disks, wait for it, as a database waits for a commit.
        barrier: bool,
    },
}

impl Kind {
    /// Returns whether it changes the content of a disk.
    pub fn modifies(self) -> bool {
        matches!(self, Self::Write | Self::Zero | Self::Discard)
    }
}

/// One operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    /// Its number in the history, from 0.
    pub number: u64,
    /// Its kind.
    pub kind: Kind,
    /// The disk, from 0.
    pub disk: usize,
    /// Its first sector.
    pub first: u64,
    /// The number of sectors; 0 for a flush.
    pub sectors: u64,
}

impl Operation {
    /// Returns its sectors.
    pub fn range(&self) -> Range<u64> {
        self.first..self.first + self.sectors
    }

    /// Returns whether it writes content of its own to this sector of its disk.
    pub fn writes(&self, disk: usize, sector: u64) -> bool {
        self.kind == Kind::Write && self.disk == disk && self.range().contains(&sector)
    }

    /// Returns whether it must wait for an earlier operation that is still under way.
    pub fn waits_for(&self, earlier: &Self) -> bool {
        if earlier.kind == (Kind::Flush { barrier: true }) {
            return true;
        }
        if self.disk != earlier.disk {
            return false;
        }
        if let Kind::Flush { .. } = self.kind {
            return earlier.kind.modifies();
        }
        let apart =
            self.range().end <= earlier.range().start || earlier.range().end <= self.range().start;
        !apart && (self.kind.modifies() || earlier.kind.modifies())
    }
}

/// A file-sized part of the first disk that is written from its beginning to its end, repeatedly,
/// with new content each time, and made durable after each pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FilePasses {
    /// The file's sectors: a multiple of the block's.
    pub sectors: u64,
    /// The sectors of one operation.
    pub block: u64,
    /// Whether each pass reads the file after writing it.
    pub reads: bool,
}

impl FilePasses {
    fn blocks(&self) -> u64 {
        self.sectors / self.block
    }

    /// Returns the number of operations of a pass.
    pub fn operations(&self) -> u64 {
        let blocks = self.blocks();
        blocks + 1 + if self.reads { blocks } else { 0 }
    }

    fn operation(&self, number: u64) -> Operation {
        let (step, blocks) = (number % self.operations(), self.blocks());
        let (kind, place) = match step.checked_sub(blocks) {
            None => (Kind::Write, step),
            Some(0) => (Kind::Flush { barrier: true }, 0),
            Some(read) => (Kind::Read, read - 1),
        };
        let is_flush = step == blocks;
        Operation {
            number,
            kind,
            disk: 0,
            first: place * self.block,
            sectors: if is_flush { 0 } else { self.block },
        }
    }
}

/// A history, from which everything else follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    seed: u64,
    /// The number of sectors of each disk.
    disks: Vec<u64>,
    /// The file passes, in place of random operations.
    file: Option<FilePasses>,
}

/// Why a history cannot use these disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanError {
    /// There are too few or too many.
    Disks(usize),
    /// One is too small or too large.
    Sectors(u64),
    /// A file that is larger than the disk, or is not a multiple of blocks of at most 1 MiB.
    File(FilePasses),
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disks(disks) => {
                write!(f, "a history is of 1 to {DISKS_MAX} disks, not of {disks}")
            }
            Self::Sectors(sectors) => write!(
                f,
                "a disk of a history has {SECTORS_MIN} to {SECTORS_MAX} sectors, not {sectors}"
            ),
            Self::File(FilePasses { sectors, block, .. }) => write!(
                f,
                "a file of a history consists of whole blocks of 1 to {LONGEST_SECTORS} sectors \
                 and fits on its disk; {sectors} sectors in blocks of {block} do not"
            ),
        }
    }
}

impl std::error::Error for PlanError {}

impl Plan {
    /// Returns the history of a seed on disks of these sizes, which hold zeros at the beginning.
    ///
    /// # Errors
    /// When the disks are too few, too many, too small or too large.
    pub fn new(seed: u64, disks: Vec<u64>) -> Result<Self, PlanError> {
        if disks.is_empty() || disks.len() > DISKS_MAX {
            return Err(PlanError::Disks(disks.len()));
        }
        match disks
            .iter()
            .find(|sectors| !(SECTORS_MIN..=SECTORS_MAX).contains(*sectors))
        {
            Some(sectors) => Err(PlanError::Sectors(*sectors)),
            None => Ok(Self {
                seed,
                disks,
                file: None,
            }),
        }
    }

    /// Returns the same history with passes over a file instead.
    ///
    /// # Errors
    /// When the file does not fit.
    pub fn over_file(self, file: FilePasses) -> Result<Self, PlanError> {
        let fits = (1..=LONGEST_SECTORS).contains(&file.block)
            && file.sectors >= file.block
            && file.sectors.is_multiple_of(file.block)
            && file.sectors <= self.disks[0];
        if !fits {
            return Err(PlanError::File(file));
        }
        Ok(Self {
            file: Some(file),
            ..self
        })
    }

    /// Returns its seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the number of sectors of each disk.
    pub fn disks(&self) -> &[u64] {
        &self.disks
    }

    /// Returns the operation of a number. Half of them are aligned to blocks of 4 KiB, as those of
    /// file systems. A quarter goes to the first sixteenth of a disk, a quarter to the place of a
    /// recent operation, which produces overwrites, and concurrent neighbours in one block.
    pub fn operation(&self, number: u64) -> Operation {
        if let Some(file) = self.file {
            return file.operation(number);
        }
        let (mut random, anywhere) = self.generator(number);
        let disk = random.below(self.disks.len() as u64) as usize;
        let sectors_of_disk = self.disks[disk];
        let kind = match random.below(100) {
            0..58 => Kind::Write,
            58..78 => Kind::Read,
            78..85 => Kind::Zero,
            85..92 => Kind::Discard,
            choice => Kind::Flush {
                barrier: choice >= 97,
            },
        };
        if let Kind::Flush { .. } = kind {
            return Operation {
                number,
                kind,
                disk,
                first: 0,
                sectors: 0,
            };
        }
        let mut sectors = length(&mut random).min(sectors_of_disk / 4);
        let mut first = match random.below(4) {
            0 => scaled(anywhere, sectors_of_disk / 16),
            1 if number > 0 => {
                let earlier = number - 1 - random.below(number.min(RETURN_TO));
                let place = scaled(self.generator(earlier).1, sectors_of_disk);
                place.saturating_sub(BLOCK_SECTORS) + random.below(2 * BLOCK_SECTORS)
            }
            _ => scaled(anywhere, sectors_of_disk),
        };
        first = first.min(sectors_of_disk - sectors);
        if random.below(2) == 0 {
            first -= first % BLOCK_SECTORS;
            sectors = sectors.next_multiple_of(BLOCK_SECTORS);
            sectors = sectors.min(sectors_of_disk - first);
        }
        Operation {
            number,
            kind,
            disk,
            first,
            sectors: sectors.min(LONGEST_SECTORS),
        }
    }

    /// Returns the generator of an operation, and its first number, which determines its place on a
    /// disk.
    fn generator(&self, number: u64) -> (Random, u64) {
        let mut random = Random::new(mixed(self.seed ^ mixed(number.wrapping_add(1))));
        let anywhere = random.draw();
        (random, anywhere)
    }
}

/// Returns a length of 512 bytes to 1 MiB, shorter ones more often: 59 KiB in the mean.
fn length(random: &mut Random) -> u64 {
    let power = random.below(12).min(random.below(12));
    let shortest = 1 << power;
    (shortest + random.below(shortest)).min(LONGEST_SECTORS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_is_the_same_each_time_and_has_everything() {
        let plan = Plan::new(5, vec![1 << 15, 1000, SECTORS_MIN]).unwrap();
        let operations: Vec<Operation> = (0..20_000).map(|number| plan.operation(number)).collect();
        for operation in &operations {
            assert_eq!(*operation, plan.operation(operation.number));
            assert!(operation.range().end <= plan.disks()[operation.disk]);
            assert!(operation.sectors <= LONGEST_SECTORS);
            let is_flush = matches!(operation.kind, Kind::Flush { .. });
            assert_eq!(is_flush, operation.sectors == 0, "{operation:?}");
        }
        for kind in [
            Kind::Write,
            Kind::Read,
            Kind::Zero,
            Kind::Discard,
            Kind::Flush { barrier: true },
            Kind::Flush { barrier: false },
        ] {
            let count = operations.iter().filter(|it| it.kind == kind).count();
            assert!(count > 400, "{kind:?}: {count}");
        }
        let first = operations.iter().filter(|it| it.disk == 0);
        let lengths: Vec<u64> = first.map(|it| it.sectors).filter(|it| *it > 0).collect();
        assert!(lengths.contains(&1) && lengths.contains(&LONGEST_SECTORS));
        let mean = lengths.iter().sum::<u64>() / lengths.len() as u64;
        assert!((100..140).contains(&mean), "{mean}");
        let other = Plan::new(6, vec![1 << 15, 1000, SECTORS_MIN]).unwrap();
        assert!((0..20).any(|number| other.operation(number) != plan.operation(number)));
    }

    #[test]
    fn a_file_is_passed_over() {
        let file = FilePasses {
            sectors: 96,
            block: 32,
            reads: true,
        };
        let plan = Plan::new(1, vec![100]).unwrap();
        let passes = plan.clone().over_file(file).unwrap();
        assert_eq!(file.operations(), 7);
        let kinds: Vec<(Kind, u64)> = (7..14)
            .map(|number| passes.operation(number))
            .map(|operation| (operation.kind, operation.first))
            .collect();
        let (write, read) = (Kind::Write, Kind::Read);
        let flush = Kind::Flush { barrier: true };
        let expected = [
            (write, 0),
            (write, 32),
            (write, 64),
            (flush, 0),
            (read, 0),
            (read, 32),
            (read, 64),
        ];
        assert_eq!(kinds, expected);
        for (sectors, block) in [(96, 0), (96, 4096), (90, 32), (128, 32), (0, 32)] {
            let file = FilePasses {
                sectors,
                block,
                reads: false,
            };
            let error = plan.clone().over_file(file).unwrap_err();
            assert_eq!(error, PlanError::File(file));
        }
    }

    #[test]
    fn disks_that_no_history_is_about_are_refused() {
        assert_eq!(Plan::new(1, vec![]), Err(PlanError::Disks(0)));
        assert_eq!(Plan::new(1, vec![1000; 17]), Err(PlanError::Disks(17)));
        let error = Plan::new(1, vec![1000, 63]).unwrap_err();
        assert_eq!(error, PlanError::Sectors(63));
        assert!(error.to_string().contains("not 63"));
        assert!(Plan::new(1, vec![SECTORS_MAX + 1]).is_err());
    }
}
