//! Judges disks after a history, sector by sector: whether their content is allowed.
//!
//! The required content follows from three sources: the guest's reports, the operations found in
//! the images (an issued operation had waited for others), and the promises of a disk. A sector may
//! hold the last required operation, or a later one; nothing older, and nothing else.

use crate::order::{Told, WINDOW};
use crate::plan::{Kind, OPERATIONS_MAX, Operation, Plan, SECTOR_BYTES};
use crate::sector::{Content, identify};
use crate::table::Discards;
use std::fmt;

/// The maximum number of findings kept; all are counted.
pub const FINDINGS_KEPT: usize = 64;
/// The distance beyond the reports from which an operation is considered foreign.
const AHEAD_MAX: u64 = 1_000_000;

/// Which acknowledged operations a disk must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keeps {
    /// All: after a move, the end of an agent, or a clean stop.
    Acknowledged,
    /// The flushed ones: after a power cut, or the end of a QEMU that caches writes itself.
    Flushed,
}

/// The promises of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promise {
    /// The operations that it must hold.
    pub keeps: Keeps,
    /// The content that it may hold in discarded sectors.
    pub discards: Discards,
}

impl Promise {
    /// Returns whether space freed by a discard may be reused before the discard is durable, as in
    /// qcow2 images: until then, content of other places may be found there.
    fn reuses_early(self) -> bool {
        (self.keeps, self.discards) == (Keeps::Flushed, Discards::ZerosOrKept)
    }
}

/// The latest required operation, where other content was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// The operation.
    pub number: u64,
    /// The flush that made it durable; `None`: it was acknowledged, which is sufficient here.
    pub flushed: Option<u64>,
}

/// The error of a sector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrong {
    /// A newer operation is required.
    Lost {
        /// The content found; `None`: zeros.
        found: Option<u64>,
        /// The required operation.
        expected: Expected,
    },
    /// Zeroed or discarded content is there again.
    Stale {
        /// The content found.
        found: u64,
        /// The operation that removed it.
        expected: Expected,
    },
    /// The sector begins as an operation's, and differs later.
    Torn {
        /// The operation.
        number: u64,
        /// The first byte that differs.
        byte: usize,
    },
    /// Content of another place.
    Misplaced {
        /// The operation.
        number: u64,
        /// The disk.
        disk: u32,
        /// The distance to its own place, in sectors.
        shift: i64,
    },
    /// An operation that writes nothing here, or was not issued.
    Never {
        /// The operation.
        number: u64,
    },
    /// A sector of another history.
    OtherHistory {
        /// That history's seed.
        seed: u64,
    },
    /// Content of unknown origin.
    Foreign,
    /// The image ends before this sector.
    Missing,
}

/// Consecutive sectors with the same error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finding {
    /// The disk.
    pub disk: usize,
    /// The first sector.
    pub first: u64,
    /// The number of sectors.
    pub sectors: u64,
    /// The error.
    pub wrong: Wrong,
    /// The number of operations that the guest had completed, as far as is known.
    pub done: u64,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = SECTOR_BYTES as u64;
        let (offset, length) = (self.first * bytes, self.sectors * bytes);
        write!(f, "disk {}, offset {offset}, {length} bytes: ", self.disk)?;
        let done = self.done;
        match self.wrong {
            Wrong::Lost {
                found: Some(found),
                expected,
            } => write!(f, "operation {found} of {done}, expected {expected}"),
            Wrong::Lost {
                found: None,
                expected,
            } => write!(f, "zeros, expected operation {expected} of {done}"),
            Wrong::Stale { found, expected } => write!(
                f,
                "operation {found} of {done}, which {expected} zeroed or discarded"
            ),
            Wrong::Torn { number, byte } => write!(
                f,
                "operation {number} of {done}, torn or damaged from byte {byte} of the sector on"
            ),
            Wrong::Misplaced {
                number,
                disk,
                shift,
            } => write!(
                f,
                "operation {number} of {done}, which belongs to disk {disk}, {} bytes {}",
                shift.unsigned_abs() * bytes,
                if shift < 0 { "before" } else { "farther" },
            ),
            Wrong::Never { number } => write!(
                f,
                "operation {number} of {done}, which never wrote anything here"
            ),
            Wrong::OtherHistory { seed } => write!(f, "a sector of the history of seed {seed}"),
            Wrong::Foreign => write!(f, "bytes that are of no history"),
            Wrong::Missing => write!(f, "the image ends before it"),
        }
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.flushed {
            Some(flush) => write!(f, "{} (flushed at {flush})", self.number),
            None => write!(f, "{} (acknowledged)", self.number),
        }
    }
}

/// The result of the judgement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judgement {
    /// The first findings.
    pub findings: Vec<Finding>,
    /// The number of wrong sectors.
    pub wrong_sectors: u64,
    /// The number of sectors checked.
    pub sectors: u64,
    /// The number of operations that the guest had completed, as far as is known.
    pub done: u64,
    /// The latest operation found on a disk.
    pub newest: Option<u64>,
    /// By disk, the latest flush that is known to have completed.
    pub flushed: Vec<Option<u64>>,
    /// The number of sectors with content of another place on their disk, after a discard that was
    /// not durable.
    pub reused_sectors: u64,
}

/// The content seen in a sector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen(u32);

impl Seen {
    const ZEROS: Self = Self(0);
    /// Not checked.
    const NOT: Self = Self(u32::MAX);
    /// Wrong whatever the history, and recorded as such.
    const WRONG: Self = Self(u32::MAX - 1);

    fn operation(number: u64) -> Self {
        Self(number as u32 + 1)
    }
}

/// A judgement under way: pass it every disk completely, then query the result.
#[derive(Debug)]
pub struct Check {
    plan: Plan,
    told: Told,
    promises: Vec<Promise>,
    seen: Vec<Vec<Seen>>,
    newest: Option<u64>,
    /// The operation of the last look-up: sectors of one operation are adjacent.
    looked_up: Operation,
    notes: Notes,
    /// Disk, sector, and the error unless the sector was discarded.
    misplaced: Vec<(usize, u64, Wrong)>,
    reused_sectors: u64,
}

/// The allowed content of a disk, by sector: numbers of operations plus one, 0 being the zeros at
/// the beginning.
struct Bounds {
    /// The last required operation.
    floors: Vec<u32>,
    /// The last operation that may have left zeros.
    zeros: Vec<u32>,
    /// The last discard that need not be durable; empty where that excuses nothing.
    discards: Vec<u32>,
}

#[derive(Debug, Default)]
struct Notes {
    findings: Vec<Finding>,
    wrong_sectors: u64,
}

impl Notes {
    fn add(&mut self, disk: usize, sector: u64, wrong: Wrong) {
        self.wrong_sectors += 1;
        if let Some(last) = self.findings.last_mut()
            && (last.disk, last.first + last.sectors, last.wrong) == (disk, sector, wrong)
        {
            last.sectors += 1;
        } else if self.findings.len() < FINDINGS_KEPT {
            self.findings.push(Finding {
                disk,
                first: sector,
                sectors: 1,
                wrong,
                done: 0,
            });
        }
    }
}

/// The operations that are known to have completed.
struct Known {
    told: Told,
    /// By disk, the latest flush that has completed.
    flushed: Vec<Option<u64>>,
    /// Operations from this number on were never issued.
    end: u64,
}

impl Known {
    /// Returns the flush by which an operation is durable.
    fn durable(&self, operation: &Operation) -> Option<u64> {
        self.flushed[operation.disk].filter(|flush| operation.number < *flush)
    }

    /// Returns whether an operation is required.
    fn requires(&self, operation: &Operation, keeps: Keeps) -> bool {
        // A flush had waited for it.
        let durable = self.durable(operation).is_some();
        durable || keeps == Keeps::Acknowledged && self.told.has(operation.number)
    }
}

impl Check {
    /// Creates a judgement of a history's disks, from the guest's reports and the promises of each
    /// disk; disks without a promise are not judged.
    pub fn new(plan: Plan, told: Told, promises: Vec<Promise>) -> Self {
        // Larger numbers are foreign.
        let told = Told {
            done: told.done.min(OPERATIONS_MAX),
            ..told
        };
        let disks = plan.disks().iter().take(promises.len());
        let seen = disks.map(|sectors| vec![Seen::NOT; *sectors as usize]);
        Self {
            seen: seen.collect(),
            looked_up: plan.operation(0),
            plan,
            told,
            promises,
            newest: None,
            notes: Notes::default(),
            misplaced: Vec::new(),
            reused_sectors: 0,
        }
    }

    /// Takes the content of a disk from a sector on; content beyond the disk is ignored.
    pub fn look(&mut self, disk: usize, first: u64, bytes: &[u8]) {
        let (sectors, _) = bytes.as_chunks::<SECTOR_BYTES>();
        let end = self.seen[disk].len() as u64;
        for (sector, bytes) in (first..end).zip(sectors) {
            let content = identify(bytes, self.plan.seed(), disk as u32, sector);
            let seen = match self.judge_alone(disk, sector, content) {
                Ok(seen) => seen,
                Err(wrong @ Wrong::Misplaced { disk: its, .. })
                    if its as usize == disk && self.promises[disk].reuses_early() =>
                {
                    self.misplaced.push((disk, sector, wrong));
                    Seen::WRONG
                }
                Err(wrong) => {
                    self.notes.add(disk, sector, wrong);
                    Seen::WRONG
                }
            };
            self.seen[disk][sector as usize] = seen;
        }
    }

    /// As [`Self::look`], where a disk holds zeros.
    pub fn look_at_zeros(&mut self, disk: usize, first: u64, sectors: u64) {
        let seen = &mut self.seen[disk];
        let end = seen.len().min((first + sectors) as usize);
        if let Some(range) = seen.get_mut(first as usize..end) {
            range.fill(Seen::ZEROS);
        }
    }

    /// Judges what can be judged of one sector without the others.
    fn judge_alone(&mut self, disk: usize, sector: u64, content: Content) -> Result<Seen, Wrong> {
        match content {
            Content::Zeros => Ok(Seen::ZEROS),
            Content::Written(number) => {
                if self.looked_up.number != number {
                    self.looked_up = self.plan.operation(number);
                }
                if !self.looked_up.writes(disk, sector) || number > self.told.done + AHEAD_MAX {
                    return Err(Wrong::Never { number });
                }
                self.newest = self.newest.max(Some(number));
                Ok(Seen::operation(number))
            }
            Content::Torn { number, byte } => Err(Wrong::Torn { number, byte }),
            Content::Misplaced {
                number,
                disk,
                sector: its_sector,
            } => Err(Wrong::Misplaced {
                number,
                disk,
                shift: its_sector.wrapping_sub(sector) as i64,
            }),
            Content::OtherHistory { seed } => Err(Wrong::OtherHistory { seed }),
            Content::Foreign => Err(Wrong::Foreign),
        }
    }

    /// Returns the result for everything seen.
    pub fn judge(mut self) -> Judgement {
        let known = self.known();
        for disk in 0..self.promises.len() {
            self.judge_disk(disk, &known);
        }
        let mut findings = self.notes.findings;
        findings.iter_mut().for_each(|it| it.done = known.told.done);
        findings.sort_by_key(|it| (it.disk, it.first));
        Judgement {
            findings,
            wrong_sectors: self.notes.wrong_sectors,
            sectors: self.seen.iter().map(|disk| disk.len() as u64).sum(),
            done: known.told.done,
            newest: self.newest,
            flushed: known.flushed,
            reused_sectors: self.reused_sectors,
        }
    }

    /// Returns the guest's reports, extended by the operations on its disks: an issued operation
    /// comes after all that are a window before it, and after every barrier.
    fn known(&self) -> Known {
        let (mut told, issued) = (self.told, self.newest.map_or(0, |newest| newest + 1));
        let end = match told.quiet {
            true => told.done,
            false => (told.done.max(issued) + WINDOW).min(OPERATIONS_MAX),
        };
        if !told.quiet {
            let done = issued.saturating_sub(WINDOW);
            told = told.and(Told {
                done,
                ..Told::default()
            });
        }
        let mut flushed = vec![None; self.plan.disks().len()];
        for number in (0..end).rev() {
            if flushed.iter().all(Option::is_some) {
                break;
            }
            let operation = self.plan.operation(number);
            let ended = match operation.kind {
                Kind::Flush { barrier } => told.has(number) || barrier && number < issued,
                _ => false,
            };
            if ended {
                flushed[operation.disk].get_or_insert(number);
            }
        }
        Known { told, flushed, end }
    }

    fn judge_disk(&mut self, disk: usize, known: &Known) {
        let bounds = self.replay(disk, known);
        let entries = bounds.floors.iter().zip(&bounds.zeros);
        for (sector, (seen, (floor, zeroed))) in (0..).zip(self.seen[disk].iter().zip(entries)) {
            if *seen == Seen::WRONG {
                continue;
            }
            if let Err(wrong) = judge_sector(&self.plan, known, *seen, *floor, *zeroed) {
                self.notes.add(disk, sector, wrong);
            }
        }
        for (_, sector, wrong) in self.misplaced.iter().filter(|it| it.0 == disk) {
            match bounds.discards[*sector as usize] {
                0 => self.notes.add(disk, *sector, *wrong),
                _ => self.reused_sectors += 1,
            }
        }
    }

    /// Returns the allowed content of a disk after all its operations.
    fn replay(&self, disk: usize, known: &Known) -> Bounds {
        let (sectors, promise) = (self.seen[disk].len(), self.promises[disk]);
        let mut bounds = Bounds {
            floors: vec![0; sectors],
            zeros: vec![0; sectors],
            discards: vec![0; if promise.reuses_early() { sectors } else { 0 }],
        };
        for number in 0..known.end {
            let operation = self.plan.operation(number);
            if operation.disk != disk || !operation.kind.modifies() {
                continue;
            }
            let range = operation.first as usize..operation.range().end as usize;
            let entry = number as u32 + 1;
            let is_discard = operation.kind == Kind::Discard;
            // After a discard that may have kept the old content nothing can be required.
            let may_keep = is_discard && promise.discards == Discards::ZerosOrKept;
            if !may_keep && known.requires(&operation, promise.keeps) {
                bounds.floors[range.clone()].fill(entry);
            }
            if operation.kind != Kind::Write {
                bounds.zeros[range.clone()].fill(entry);
            }
            if is_discard && promise.reuses_early() && known.durable(&operation).is_none() {
                bounds.discards[range].fill(entry);
            }
        }
        bounds
    }
}

/// Judges the content of a sector by the last required operation and the last that may have left
/// zeros.
fn judge_sector(
    plan: &Plan,
    known: &Known,
    seen: Seen,
    floor: u32,
    zeroed: u32,
) -> Result<(), Wrong> {
    let found = match seen {
        Seen::NOT => return Err(Wrong::Missing),
        Seen::ZEROS if zeroed >= floor => return Ok(()),
        Seen::ZEROS => None,
        Seen(entry) => Some(u64::from(entry) - 1),
    };
    match found {
        Some(number) if number >= known.end => return Err(Wrong::Never { number }),
        Some(number) if number + 1 >= u64::from(floor) => return Ok(()),
        _ => {}
    }
    let last = plan.operation(u64::from(floor).saturating_sub(1));
    let expected = Expected {
        number: last.number,
        flushed: known.durable(&last),
    };
    Err(match found {
        Some(found) if last.kind != Kind::Write => Wrong::Stale { found, expected },
        found => Wrong::Lost { found, expected },
    })
}
