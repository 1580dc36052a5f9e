//! Runs one guest of the bench: created, put to work, moved or left alone, and judged.

use super::longhaul::{image, image_path};
use super::progress::Progress;
use super::row::{Parameters, Row};
use super::{Case, LIMIT, System};
use crate::measure::{self, ProcessMeter};
use crate::moves::{self, meter, ms, note_verified};
use crate::peer::mirror::{CopyMode, MirrorMove};
use longhaul_api::DiskChoice;
use longhaul_history::plan::SECTOR_BYTES;
use longhaul_history::sector::RANDOM_BODIES;
use longhaul_lab::arena;
use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::disks::{Cache, DiskKind, Format, LocalDisk, local_disks};
use longhaul_lab::guest::{CHANNEL_NAME, Chipset, KernelFiles, Tiny};
use longhaul_lab::history::task::{History, Task, description};
use longhaul_lab::history::workload::{Work, Workload};
use longhaul_lab::interrupt;
use longhaul_lab::lab::{Lab, say};
use longhaul_lab::peer::{Begin, PeerHost, PeerQemu, channel_socket};
use longhaul_lab::process::wait_until;
use longhaul_lab::product::Product;
use longhaul_protocol::guest::GuestDescription;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const GUEST_MEMORY_MIB: u64 = 256;
const ARENA_BYTES: u64 = 32 << 20;
const PAGES_PER_S: u64 = 50;
/// The cache mode of the disk: that of images of guests that move.
const KIND: DiskKind = DiskKind {
    format: Format::Raw,
    cache: Cache::None,
    iothread: false,
};
/// The size of the disk relative to the file on it: the rest stays a hole.
const DISK_OF_FILE: u64 = 2;
/// The queue depth: that of a guest's page cache.
const DEPTH: u32 = 8;
pub(super) const ASKED_DOWNTIME_MS: u64 = 300;
const COMMAND_LIMIT: Duration = Duration::from_secs(120);
/// How long a guest that is not moved is observed, where its work has no end.
const UNDISTURBED: Duration = Duration::from_secs(45);

/// The environment of the bench's guests.
pub(super) struct Ground<'a> {
    /// Two hosts.
    pub(super) lab: &'a Lab,
    pub(super) files: KernelFiles,
    pub(super) qemu: PathBuf,
    pub(super) chipset: Chipset,
    pub(super) machine_version: String,
    /// `kvm` or `tcg`.
    pub(super) accelerator: &'static str,
    /// Longhaul on both hosts.
    pub(super) product: Option<Product>,
    /// The number of images used by Longhaul's guests.
    pub(super) images: usize,
}

/// A guest at work.
pub(super) struct Subject {
    pub(super) history: History,
    pub(super) guest: GuestDescription,
    pub(super) row: Row,
    work: Work,
}

/// The result of a move.
pub(super) struct Moved {
    /// When it began and ended.
    pub(super) times: [Instant; 2],
    /// The arena's channel, where the guest is now.
    pub(super) channel: PathBuf,
    /// The folder of its disk now.
    pub(super) folder: PathBuf,
}

impl Case {
    /// Returns the guest's work.
    fn work(&self) -> Result<Work, LabError> {
        let none = || LabError::Which(format!("{} has no file", self.workload.name()));
        self.workload
            .beside(self.link.rate_bps / 8)
            .ok_or_else(none)
    }

    /// Returns the operation at which the move begins: another part of IOR's first pass in each
    /// repeat.
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
    /// Lets a guest work, and moves it.
    pub(super) fn run(&mut self, case: &Case, system: System) -> Result<(Row, Progress), LabError> {
        let work = case.work()?;
        let disks = match system {
            System::Longhaul(strategy) => self.disk_of_longhaul(strategy, &work)?,
            _ => self.disk(0, &work)?,
        };
        let mut tiny = Tiny::new(&format!("bench-{}", self.images));
        tiny.memory_mib = GUEST_MEMORY_MIB;
        tiny.chipset = self.chipset;
        tiny.machine_version.clone_from(&self.machine_version);
        let mut guest = description(&tiny, &disks);
        let shared = system == System::Longhaul(DiskChoice::Shared);
        guest.disks.iter_mut().for_each(|disk| disk.shared = shared);
        let parameters = Parameters {
            disk_size_bytes: disks[0].bytes,
            depth: DEPTH,
            arena_bytes: ARENA_BYTES,
            pages_per_s: PAGES_PER_S,
            began_at_operation: case.begins_at(&work),
            machine: guest.machine.clone(),
            guest_memory_bytes: GUEST_MEMORY_MIB << 20,
            ..Parameters::of(&work)
        };
        let task = Task {
            disks: &disks,
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
            System::Mirror(mode) => self.mirror(subject, &task, &self.disk(1, &work)?, mode),
            System::Longhaul(strategy) => self.longhaul(subject, &task, strategy),
        }
    }

    /// Returns an empty disk of a host's own for a baseline.
    fn disk(&self, host: usize, work: &Work) -> Result<Vec<LocalDisk>, LabError> {
        let folder = self.lab.host(host)?.folder();
        Self::made(local_disks(folder, disk_bytes(work), &[KIND]))
    }

    /// Returns a disk for a guest of Longhaul's, in the next of the agents' configured images.
    fn disk_of_longhaul(
        &mut self,
        strategy: DiskChoice,
        work: &Work,
    ) -> Result<Vec<LocalDisk>, LabError> {
        let number = self.images;
        self.images += 1;
        Self::made(vec![LocalDisk {
            image: image(number),
            path: image_path(self.lab, 0, number, strategy == DiskChoice::Shared)?,
            bytes: disk_bytes(work),
            kind: KIND,
        }])
    }

    fn made(disks: Vec<LocalDisk>) -> Result<Vec<LocalDisk>, LabError> {
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
            accelerator: self.accelerator,
            files: &self.files,
            disks: &[],
            local: disks,
        };
        PeerQemu::start(&host, guest, begin)
    }

    /// Leaves the guest where it is.
    fn leave(&self, mut subject: Subject, task: &Task<'_>) -> Result<(Row, Progress), LabError> {
        let source = self.start(0, &subject.guest, task.disks, Begin::Boot)?;
        self.listen(&subject, 0)?;
        subject.begin(task)?;
        subject.work()?;
        let began = Instant::now();
        let operations = subject.work.operations;
        let done = || operations > 0 && subject.history.heard().told.done >= operations;
        let limit = if operations > 0 { LIMIT } else { UNDISTURBED };
        while began.elapsed() < limit && !done() {
            interrupt::sleep(Duration::from_millis(20))?;
        }
        let times = [began, Instant::now()];
        subject.row.moved.outcome = "not moved".to_owned();
        let moved = self.moved(times, 0)?;
        subject.judge(&moved, || {
            drop(source);
            Ok(())
        })
    }

    /// Moves the guest by QEMU's mirror.
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
        subject.begin(task)?;
        subject.work()?;
        // Commands go to the guest that answers: the running one comes first.
        self.listen(&subject, 1)?;
        let disks = subject.guest.disks.iter();
        let names: Vec<String> = disks.map(|disk| disk.name.clone()).collect();
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
        let moved = self.moved([result.began, result.ended], host)?;
        subject.judge(&moved, || {
            drop((source, destination));
            Ok(())
        })
    }

    fn moved(&self, times: [Instant; 2], host: usize) -> Result<Moved, LabError> {
        let host = self.lab.host(host)?;
        Ok(Moved {
            times,
            channel: channel_socket(host, CHANNEL_NAME),
            folder: host.folder().to_owned(),
        })
    }

    fn listen(&self, subject: &Subject, host: usize) -> Result<(), LabError> {
        let host = self.lab.host(host)?;
        let socket = |channel: &str| channel_socket(host, channel);
        subject.history.listen(socket)
    }
}

impl Subject {
    /// Starts the guest's work as soon as it is up.
    pub(super) fn begin(&mut self, task: &Task<'_>) -> Result<(), LabError> {
        self.history.begin(task)?;
        let pages = arena::Workload {
            content: "mix".to_owned(),
            arena_bytes: ARENA_BYTES,
            working_set_bytes: ARENA_BYTES / 2,
            pages_per_s: PAGES_PER_S,
            write_bytes: 512,
            writers: 1,
            verify_pages_per_s: 1000,
            seed: task.seed,
        };
        let started = self.history.arena_mut().start(&pages, COMMAND_LIMIT);
        started.map(drop).map_err(|error| LabError::Answer {
            what: "the guest".to_owned(),
            message: error.to_string(),
        })
    }

    /// Lets it work until the move is to begin.
    pub(super) fn work(&self) -> Result<(), LabError> {
        let begins_at = self.row.moved.parameters.began_at_operation;
        self.history.wait_for(begins_at, COMMAND_LIMIT)
    }

    /// Lets the guest verify all its work, ends it, and checks its disk from outside.
    pub(super) fn judge(
        mut self,
        moved: &Moved,
        end: impl FnOnce() -> Result<(), LabError>,
    ) -> Result<(Row, Progress), LabError> {
        let row = &mut self.row.moved;
        // Commands go to the socket of its last heartbeat.
        let arena = self.history.arena();
        wait_until(COMMAND_LIMIT, || {
            arena.heard_on().as_ref() == Some(&moved.channel)
        });
        let verified = moves::verify(self.history.arena_mut())?;
        let beats = self.history.arena().beats();
        let [began, ended] = moved.times;
        note_verified(row, verified);
        row.note_observed(measure::observe(&beats, began, ended));
        if let Err(error) = self.history.stop() {
            row.outcome = format!("failed: after the move {error}");
            row.verify_errors = None;
        }
        end()?;
        let record = self.history.finish()?;
        let judgement = record.judge(&moved.folder)?;
        let found = record.errors + judgement.wrong_sectors;
        row.verify_errors = row.verify_errors.map(|errors| errors + found);
        if let Some(first) = record.first_error {
            say(&format!(
                "the guest found {} errors: {first}",
                record.errors
            ));
        }
        if let Some(first) = judgement.findings.first() {
            let wrong = judgement.wrong_sectors;
            say(&format!("{wrong} sectors are wrong: {first}"));
        }
        Ok((self.row, Progress::of(&beats, moved.times)))
    }
}

fn disk_bytes(work: &Work) -> u64 {
    let file_sectors = work.file.map_or(0, |file| file.sectors);
    DISK_OF_FILE * file_sectors * SECTOR_BYTES as u64
}
