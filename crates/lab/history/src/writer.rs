//! Executes the operations of a history, several at a time, and compares the content of reads.

use crate::pace::Pace;
use longhaul_history::order::{Order, Told};
use longhaul_history::plan::{Kind, LONGEST_SECTORS, Operation, Plan, SECTOR_BYTES};
use longhaul_history::sector::fill;
use longhaul_history::table::{Discards, Table, Wrong, compare};
use std::fmt;
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// The maximum memory alignment that direct access to a disk requires.
const ALIGNMENT: usize = 4096;
const LONGEST_BYTES: usize = LONGEST_SECTORS as usize * SECTOR_BYTES;
const ERRORS_KEPT: usize = 64;
const LONGEST_WAIT: Duration = Duration::from_millis(100);

/// The target of a history. Calls are from several threads.
pub(crate) trait Medium: Sync {
    fn read(&self, first: u64, bytes: &mut [u8]) -> io::Result<()>;
    fn write(&self, first: u64, bytes: &[u8]) -> io::Result<()>;
    fn zero(&self, first: u64, sectors: u64) -> io::Result<()>;
    fn discard(&self, first: u64, sectors: u64) -> io::Result<()>;
    fn flush(&self) -> io::Result<()>;
}

/// The settings of a run.
pub(crate) struct Settings {
    pub(crate) plan: Plan,
    /// By disk.
    pub(crate) discards: Vec<Discards>,
    /// The number of operations under way at a time.
    pub(crate) depth: usize,
    /// When the next may begin.
    pub(crate) pace: Pace,
    /// The number of operations.
    pub(crate) operations: u64,
}

/// The progress of a history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) told: Told,
    /// Sectors that were written with content.
    pub(crate) written: u64,
    /// Sectors that were read and compared.
    pub(crate) verified: u64,
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
    /// Whether this is the last report.
    pub(crate) ended: bool,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Told { done, mask, quiet } = self.told;
        let (verified, errors, ended) = (self.verified, self.errors, self.ended);
        write!(f, "{{\"done\":{done},\"mask\":{mask},\"quiet\":{quiet}")?;
        write!(f, ",\"written\":{},\"verified\":{verified}", self.written)?;
        write!(f, ",\"errors\":{errors}")?;
        if let Some(first) = &self.first_error {
            // Errors consist of plain words and numbers here.
            let plain = first.replace(['"', '\\'], "'");
            write!(f, ",\"first_error\":\"{plain}\"")?;
        }
        write!(f, ",\"ended\":{ended}}}")
    }
}

/// A history that runs on disks.
pub(crate) struct Writer<M> {
    disks: Vec<M>,
    settings: Settings,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    order: Order,
    tables: Vec<Table>,
    pace: Pace,
    stopping: bool,
    written: u64,
    verified: u64,
    errors: u64,
    first_errors: Vec<String>,
    /// Whether an operation failed: its effect is unknown, and nothing follows.
    failed: bool,
    ended: bool,
}

/// An operation, and the required content of the sectors that it reads.
struct Job {
    operation: Operation,
    entries: Vec<u32>,
}

impl<M: Medium> Writer<M> {
    /// Returns a history on these disks, which are those of its plan.
    pub(crate) fn new(disks: Vec<M>, settings: Settings) -> Self {
        let plan = &settings.plan;
        let numbered = (0..).zip(plan.disks().iter().zip(&settings.discards));
        let table = |(disk, (sectors, discards)): (u32, (&u64, &Discards))| {
            Table::new(plan.seed(), disk, *sectors, *discards)
        };
        let state = State {
            order: Order::new(plan.clone()),
            tables: numbered.map(table).collect(),
            pace: settings.pace.clone(),
            stopping: false,
            written: 0,
            verified: 0,
            errors: 0,
            first_errors: Vec::new(),
            failed: false,
            ended: false,
        };
        Self {
            disks,
            settings,
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// Works until it is asked to stop, then reads everything.
    pub(crate) fn run(&self) {
        thread::scope(|scope| {
            for _ in 0..self.settings.depth {
                scope.spawn(|| self.work());
            }
        });
        if !self.state().failed {
            self.read_everything();
        }
        self.state().ended = true;
        self.changed.notify_all();
    }

    /// Lets no further operation begin.
    pub(crate) fn stop(&self) {
        self.state().stopping = true;
        self.changed.notify_all();
    }

    pub(crate) fn report(&self) -> Report {
        self.state().report()
    }

    /// Waits until there is something new to report.
    pub(crate) fn news(&self, last: &Report) -> Report {
        let is_told = |state: &mut State| state.report() == *last;
        let waited = self.changed.wait_while(self.state(), is_told);
        waited.unwrap_or_else(PoisonError::into_inner).report()
    }

    /// Returns the first errors.
    pub(crate) fn errors(&self) -> Vec<String> {
        self.state().first_errors.clone()
    }

    pub(crate) fn error_count(&self) -> u64 {
        self.state().errors
    }

    fn work(&self) {
        let mut buffer = Buffer::new();
        while let Some(job) = self.next_job() {
            let result = self.perform(&job, buffer.bytes());
            self.finish(&job.operation, result);
        }
    }

    /// Waits for the next operation that may begin; `None` when none will.
    fn next_job(&self) -> Option<Job> {
        let mut state = self.state();
        loop {
            if state.stopping || state.failed {
                return None;
            }
            let mut wait = state.pace.until_next();
            if wait.is_zero() {
                if let Some(operation) = state.order.start(self.settings.operations) {
                    state.pace.took(&operation);
                    let entries = match operation.kind {
                        Kind::Read => {
                            state.tables[operation.disk].entries(operation.first, operation.sectors)
                        }
                        _ => Vec::new(),
                    };
                    return Some(Job { operation, entries });
                }
                wait = LONGEST_WAIT;
            }
            let (next, _) = self
                .changed
                .wait_timeout(state, wait)
                .unwrap_or_else(PoisonError::into_inner);
            state = next;
        }
    }

    fn perform(&self, job: &Job, buffer: &mut [u8]) -> io::Result<Option<Wrong>> {
        let Operation {
            number,
            kind,
            disk,
            first,
            sectors,
        } = job.operation;
        let medium = &self.disks[disk];
        let seed = self.settings.plan.seed();
        let bytes = &mut buffer[..sectors as usize * SECTOR_BYTES];
        match kind {
            Kind::Write => {
                let (into, _) = bytes.as_chunks_mut::<SECTOR_BYTES>();
                for (sector, bytes) in (first..).zip(into) {
                    fill(bytes, seed, disk as u32, sector, number);
                }
                medium.write(first, bytes)?;
            }
            Kind::Read => {
                medium.read(first, bytes)?;
                return Ok(compare((seed, disk as u32), first, &job.entries, bytes));
            }
            Kind::Zero => medium.zero(first, sectors)?,
            Kind::Discard => medium.discard(first, sectors)?,
            Kind::Flush { .. } => medium.flush()?,
        }
        Ok(None)
    }

    fn finish(&self, operation: &Operation, result: io::Result<Option<Wrong>>) {
        let mut state = self.state();
        match result {
            Ok(wrong) => {
                match operation.kind {
                    Kind::Read => state.verified += operation.sectors,
                    Kind::Write => state.written += operation.sectors,
                    _ => {}
                }
                if let Some(wrong) = wrong {
                    state.count_wrong(operation.disk, &wrong);
                }
                state.tables[operation.disk].apply(operation);
                state.order.finish(operation.number);
            }
            Err(error) => {
                state.count(format!("{operation:?}: {error}"));
                state.failed = true;
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Compares the whole content of the disks with the required content.
    fn read_everything(&self) {
        let mut buffer = Buffer::new();
        for (disk, medium) in self.disks.iter().enumerate() {
            let sectors = self.settings.plan.disks()[disk];
            for first in (0..sectors).step_by(LONGEST_SECTORS as usize) {
                let count = LONGEST_SECTORS.min(sectors - first);
                let bytes = &mut buffer.bytes()[..count as usize * SECTOR_BYTES];
                let read = medium.read(first, bytes);
                let mut state = self.state();
                let entries = state.tables[disk].entries(first, count);
                match read {
                    Err(error) => state.count(format!("disk {disk}, sector {first}: {error}")),
                    Ok(()) => {
                        state.verified += count;
                        if let Some(wrong) = state.tables[disk].compare(first, &entries, bytes) {
                            state.count_wrong(disk, &wrong);
                        }
                    }
                }
                drop(state);
                self.changed.notify_all();
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn report(&self) -> Report {
        Report {
            told: Told {
                quiet: self.ended && !self.failed,
                ..self.order.told()
            },
            written: self.written,
            verified: self.verified,
            errors: self.errors,
            first_error: self.first_errors.first().cloned(),
            ended: self.ended,
        }
    }

    fn count_wrong(&mut self, disk: usize, wrong: &Wrong) {
        let offset = wrong.sector * SECTOR_BYTES as u64;
        let expected = match wrong.expected {
            Some(number) => format!("operation {number}"),
            None => "zeros".to_owned(),
        };
        let done = self.order.told().done;
        let found = wrong.found;
        self.count(format!(
            "disk {disk}, offset {offset}: read {found:?} after operation {done}, expected \
             {expected}"
        ));
    }

    fn count(&mut self, error: String) {
        self.errors += 1;
        if self.first_errors.len() < ERRORS_KEPT {
            self.first_errors.push(error);
        }
    }
}

/// Memory aligned for direct access to disks.
struct Buffer {
    memory: Vec<u8>,
    start: usize,
}

impl Buffer {
    fn new() -> Self {
        let memory = vec![0; LONGEST_BYTES + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT);
        Self { memory, start }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + LONGEST_BYTES]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pace::Paced;
    use longhaul_history::check::{Check, Keeps, Promise};

    const SECTORS: usize = 6000;

    /// A disk in memory that loses writes on request.
    struct Memory {
        bytes: Mutex<Vec<u8>>,
        loses: Option<u64>,
        flushes: Mutex<u64>,
    }

    impl Memory {
        fn new(loses: Option<u64>) -> Self {
            Self {
                bytes: Mutex::new(vec![0; SECTORS * SECTOR_BYTES]),
                loses,
                flushes: Mutex::new(0),
            }
        }
    }

    impl Medium for Memory {
        fn read(&self, first: u64, bytes: &mut [u8]) -> io::Result<()> {
            let start = first as usize * SECTOR_BYTES;
            bytes.copy_from_slice(&self.bytes.lock().unwrap()[start..start + bytes.len()]);
            Ok(())
        }

        fn write(&self, first: u64, bytes: &[u8]) -> io::Result<()> {
            let mut all = self.bytes.lock().unwrap();
            for (sector, bytes) in (first..).zip(bytes.chunks(SECTOR_BYTES)) {
                if self.loses != Some(sector) {
                    let start = sector as usize * SECTOR_BYTES;
                    all[start..start + SECTOR_BYTES].copy_from_slice(bytes);
                }
            }
            Ok(())
        }

        fn zero(&self, first: u64, sectors: u64) -> io::Result<()> {
            self.write(first, &vec![0; sectors as usize * SECTOR_BYTES])
        }

        fn discard(&self, first: u64, sectors: u64) -> io::Result<()> {
            self.zero(first, sectors)
        }

        fn flush(&self) -> io::Result<()> {
            *self.flushes.lock().unwrap() += 1;
            match self.loses {
                Some(u64::MAX) => Err(io::Error::other("gone")),
                _ => Ok(()),
            }
        }
    }

    fn ran(loses: Option<u64>) -> (Writer<Memory>, Plan) {
        let plan = Plan::new(3, vec![SECTORS as u64; 2]).unwrap();
        let settings = Settings {
            plan: plan.clone(),
            discards: vec![Discards::Zeros; 2],
            depth: 4,
            pace: Pace::new(&Paced::default()),
            operations: u64::MAX,
        };
        let writer = Writer::new(vec![Memory::new(None), Memory::new(loses)], settings);
        thread::scope(|scope| {
            scope.spawn(|| writer.run());
            while writer.report().told.done < 400 && !writer.report().ended {
                thread::sleep(Duration::from_millis(1));
            }
            writer.stop();
        });
        (writer, plan)
    }

    #[test]
    fn a_whole_history_is_what_the_judge_expects() {
        let (writer, plan) = ran(None);
        let report = writer.report();
        assert!(report.told.quiet && report.ended && report.told.mask == 0);
        assert_eq!(report.errors, 0, "{report}");
        assert!(report.verified > 2 * SECTORS as u64);
        let promise = Promise {
            keeps: Keeps::Acknowledged,
            discards: Discards::Zeros,
        };
        let mut check = Check::new(plan, report.told, vec![promise; 2]);
        for (number, disk) in writer.disks.iter().enumerate() {
            check.look(number, 0, &disk.bytes.lock().unwrap());
            assert!(*disk.flushes.lock().unwrap() > 5);
        }
        let judgement = check.judge();
        assert_eq!(judgement.findings, []);
        assert_eq!(judgement.done, report.told.done);
    }

    #[test]
    fn a_guest_finds_what_its_disk_loses() {
        // In the part of the disk that is written most.
        let (writer, _) = ran(Some(100));
        let report = writer.report();
        assert!(report.errors > 0);
        let first = report.first_error.clone().unwrap();
        assert!(first.starts_with("disk 1, offset 51200: read "), "{first}");
        assert!(report.to_string().contains("\"first_error\":\"disk 1,"));
        assert_eq!(writer.errors()[0], first);
    }

    #[test]
    fn nothing_follows_an_operation_that_failed() {
        let (writer, _) = ran(Some(u64::MAX));
        let report = writer.report();
        assert!(report.ended && !report.told.quiet);
        assert_eq!(writer.error_count(), 1);
        let first = report.first_error.unwrap();
        assert!(first.contains("Flush") && first.contains("gone"), "{first}");
    }
}
