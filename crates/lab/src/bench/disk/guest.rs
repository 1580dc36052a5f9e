//! One guest of the bench: made, set to work, moved or left alone, and judged.

use super::progress::Progress;
use super::row::{Parameters, Row};
use super::{Case, LIMIT, System};
use crate::arena;
use crate::error::{During, LabError};
use crate::guest::disks::{Cache, DiskKind, Format, LocalDisk, local_disks};
use crate::guest::{Chipset, KernelFiles, Tiny};
use crate::history::images::Record;
use crate::history::task::{History, Task, description};
use crate::history::workload::{Work, Workload};
use crate::interrupt;
use crate::lab::{Lab, say};
use crate::measure::{self, ProcessMeter};
use crate::moves::{self, meter, ms, note_verified};
use crate::peer::mirror::{CopyMode, MirrorMove};
use crate::peer::{Begin, PeerHost, PeerQemu, channel_socket};
use longhaul_history::plan::SECTOR_BYTES;
use longhaul_history::sector::RANDOM_BODIES;
use longhaul_protocol::guest::GuestDescription;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const GUEST_MEMORY_MIB: u64 = 256;
const ARENA_BYTES: u64 = 32 << 20;
const PAGES_PER_S: u64 = 50;
/// The disk is larger than the file on it by so much: that stays a hole.
const DISK_OF_FILE: u64 = 2;
/// As many as a guest's page cache has under way.
const DEPTH: u32 = 8;
const ASKED_DOWNTIME_MS: u64 = 300;
const COMMAND_LIMIT: Duration = Duration::from_secs(120);
/// How long a guest is watched that nobody moves, where its work has no end.
const UNDISTURBED: Duration = Duration::from_secs(45);

/// Where guests of the bench run.
pub(super) struct Ground<'a> {
    /// Two hosts.
    pub(super) lab: &'a Lab,
    pub(super) files: KernelFiles,
    pub(super) qemu: PathBuf,
    pub(super) chipset: Chipset,
    pub(super) machine_version: String,
}

/// A guest at work.
struct Subject {
    history: History,
    guest: GuestDescription,
    work: Work,
    row: Row,
}

/// What a move came to: when it began and ended, and on which host the guest is now.
struct Moved {
    times: [Instant; 2],
    host: usize,
}

impl Case {
    /// What the guest does.
    fn work(&self) -> Result<Work, LabError> {
        let none = || LabError::Which(format!("{} has no file", self.workload.name()));
        self.workload
            .beside(self.link.rate_bps / 8)
            .ok_or_else(none)
    }

    /// The operation at which the move begins: another part of IOR's first pass in each repeat.
    fn begins_at(&self, work: &Work) -> u64 {
        work.paced_from
            + match self.workload {
                Workload::Ior => {
                    let part = f64::from(2 * self.repeat - 1) / f64::from(2 * self.repeats);
                    (work.paced_from as f64 * part) as u64
                }
                Workload::Cm1 => work.burst / 4,
                Workload::Asyncwr | Workload::Mixed => work.operations_per_s,
            }
    }
}

impl Ground<'_> {
    /// Lets a guest work, and has it moved.
    pub(super) fn run(&self, case: &Case, system: System) -> Result<(Row, Progress), LabError> {
        let work = case.work()?;
        let disks = [self.disk(0, &work)?, self.disk(1, &work)?];
        let mut tiny = Tiny::new("bench");
        tiny.memory_mib = GUEST_MEMORY_MIB;
        tiny.chipset = self.chipset;
        tiny.machine_version.clone_from(&self.machine_version);
        let guest = description(&tiny, &disks[0]);
        let parameters = Parameters {
            disk_size_bytes: disks[0][0].bytes,
            depth: DEPTH,
            arena_bytes: ARENA_BYTES,
            pages_per_s: PAGES_PER_S,
            began_at_operation: case.begins_at(&work),
            machine: guest.machine.clone(),
            guest_memory_bytes: GUEST_MEMORY_MIB << 20,
            ..Parameters::of(&work)
        };
        let task = Task {
            disks: &disks[0],
            seed: case.seed | RANDOM_BODIES,
            depth: DEPTH,
            work,
        };
        let subject = Subject {
            history: History::new(&task),
            row: Row::new(case, system, parameters, ASKED_DOWNTIME_MS),
            guest,
            work,
        };
        match system {
            System::None => self.leave(subject, &task),
            System::Mirror(copy_mode) => self.mirror(subject, &task, &disks[1], copy_mode),
        }
    }

    /// A disk of a host's own, which holds nothing yet.
    fn disk(&self, host: usize, work: &Work) -> Result<Vec<LocalDisk>, LabError> {
        let kind = DiskKind {
            format: Format::Raw,
            cache: Cache::None,
            iothread: false,
        };
        let file_sectors = work.file.map_or(0, |file| file.sectors);
        let bytes = DISK_OF_FILE * file_sectors * SECTOR_BYTES as u64;
        let disks = local_disks(self.lab.host(host)?.folder(), bytes, &[kind]);
        for disk in &disks {
            match fs::remove_file(&disk.path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error).during(|| format!("remove {}", disk.path.display()));
                }
                _ => disk.create()?,
            }
        }
        Ok(disks)
    }

    fn start(
        &self,
        host: usize,
        guest: &GuestDescription,
        disks: &[LocalDisk],
        begin: Begin<'_>,
    ) -> Result<PeerQemu, LabError> {
        let host = PeerHost {
            host: self.lab.host(host)?,
            qemu: &self.qemu,
            accelerator: "tcg",
            files: &self.files,
            disks: &[],
            local: disks,
        };
        PeerQemu::start(&host, guest, begin)
    }

    /// Nobody moves it.
    fn leave(&self, mut subject: Subject, task: &Task<'_>) -> Result<(Row, Progress), LabError> {
        let source = self.start(0, &subject.guest, task.disks, Begin::Boot)?;
        self.listen(&subject, 0)?;
        subject.work(task)?;
        let began = Instant::now();
        while began.elapsed() < UNDISTURBED || subject.work.operations > 0 {
            let ended = subject.work.operations > 0
                && subject.history.heard().told.done >= subject.work.operations;
            if ended || began.elapsed() > LIMIT {
                break;
            }
            interrupt::sleep(Duration::from_millis(20))?;
        }
        let times = [began, Instant::now()];
        subject.row.moved.outcome = "not moved".to_owned();
        self.judge(subject, Moved { times, host: 0 }, || drop(source))
    }

    fn mirror(
        &self,
        mut subject: Subject,
        task: &Task<'_>,
        there: &[LocalDisk],
        copy_mode: CopyMode,
    ) -> Result<(Row, Progress), LabError> {
        let mut source = self.start(0, &subject.guest, task.disks, Begin::Boot)?;
        let mut destination = self.start(1, &subject.guest, there, Begin::IncomingStopped)?;
        self.listen(&subject, 0)?;
        subject.work(task)?;
        // What is told to the guest goes to whoever is there: the one that runs comes first.
        self.listen(&subject, 1)?;
        let names: Vec<String> = subject
            .guest
            .disks
            .iter()
            .map(|it| it.name.clone())
            .collect();
        let asked = MirrorMove {
            disks: &names,
            copy_mode,
            destination: self.lab.host(1)?.address(),
            downtime_ms: ASKED_DOWNTIME_MS,
            limit: LIMIT,
        };
        let link = self.lab.link(0, 1)?;
        let before = link.stats()?;
        let meters = [meter(source.pid())?, meter(destination.pid())?];
        let result = asked.run(&mut source, &mut destination)?;
        let row = &mut subject.row.moved;
        row.note_link(&before, &link.stats()?);
        let [source_used, destination_used] = meters.map(ProcessMeter::finish);
        row.cpu_s.source_qemu = source_used.map(|used| used.cpu_s);
        row.cpu_s.destination_qemu = destination_used.map(|used| used.cpu_s);
        row.total_ms = Some(ms(result.began, result.ended));
        row.memory_bytes = result.memory_bytes;
        row.disk_bytes = result.disk_bytes;
        row.passes = result.passes;
        let host = usize::from(result.failure.is_none());
        row.outcome = match result.failure {
            None => "completed".to_owned(),
            Some(why) => format!("failed: {why}"),
        };
        let times = [result.began, result.ended];
        self.judge(subject, Moved { times, host }, || {
            drop((source, destination))
        })
    }

    fn listen(&self, subject: &Subject, host: usize) -> Result<(), LabError> {
        let host = self.lab.host(host)?;
        subject
            .history
            .listen(|channel| channel_socket(host, channel))
    }

    /// Lets the guest look at all that it did, ends it, and looks at its disk from outside.
    fn judge(
        &self,
        mut subject: Subject,
        moved: Moved,
        end: impl FnOnce(),
    ) -> Result<(Row, Progress), LabError> {
        let row = &mut subject.row.moved;
        let verified = moves::verify(subject.history.arena_mut())?;
        let beats = subject.history.arena().beats();
        let [began, ended] = moved.times;
        note_verified(row, verified);
        row.note_observed(measure::observe(&beats, began, ended));
        if let Err(error) = subject.history.stop() {
            row.outcome = format!("failed: after the move {error}");
            row.verify_errors = None;
        }
        end();
        let record = subject.history.finish()?;
        let found = record.errors + self.wrong(&record, moved.host)?;
        row.verify_errors = row.verify_errors.map(|errors| errors + found);
        if let Some(first) = record.first_error {
            say(&format!(
                "the guest found {} errors: {first}",
                record.errors
            ));
        }
        let progress = Progress::of(&beats, moved.times);
        Ok((subject.row, progress))
    }

    /// Sectors of the disk that are not as they have to be.
    fn wrong(&self, record: &Record, host: usize) -> Result<u64, LabError> {
        let judgement = record.judge(self.lab.host(host)?.folder())?;
        if let Some(first) = judgement.findings.first() {
            say(&format!(
                "{} sectors are wrong: {first}",
                judgement.wrong_sectors
            ));
        }
        Ok(judgement.wrong_sectors)
    }
}

impl Subject {
    /// Lets it work until the move is to begin.
    fn work(&mut self, task: &Task<'_>) -> Result<(), LabError> {
        self.history.begin(task)?;
        let pages = arena::Workload {
            content: "mix".to_owned(),
            arena_bytes: ARENA_BYTES,
            working_set_bytes: ARENA_BYTES / 2,
            pages_per_s: PAGES_PER_S,
            write_bytes: 512,
            writers: 1,
            seed: task.seed,
        };
        let arena = self.history.arena_mut();
        arena
            .start(&pages, COMMAND_LIMIT)
            .map_err(|error| LabError::Answer {
                what: "the guest".to_owned(),
                message: error.to_string(),
            })?;
        let begins_at = self.row.moved.parameters.began_at_operation;
        self.history.wait_for(begins_at, COMMAND_LIMIT)
    }
}
