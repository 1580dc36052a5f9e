//! Measures the work of a guest that writes its disk as fast as it can, while replicas of the disk
//! are made: figure 5.4 of the paper on parcels.

use super::course::Course;
use super::ground::{Ground, remove_file, remove_folder, write_zeros};
use super::row::{ConsolidationParameters, ConsolidationRow, Replica};
use super::snapshot::Snapshots;
use crate::bench::Options;
use crate::bench::document::Document;
use longhaul_history::plan::SECTOR_BYTES;
use longhaul_history::sector::RANDOM_BODIES;
use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::disks::LocalDisk;
use longhaul_lab::history::task::{History, Task, description};
use longhaul_lab::history::workload::{RecordedFile, Work};
use longhaul_lab::interrupt;
use longhaul_lab::lab::say;
use longhaul_lab::peer::{PeerQemu, channel_socket as peer_socket};
use longhaul_lab::product::channel_socket;
use longhaul_protocol::guest::GuestDescription;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The workloads, and the sectors of their writes.
pub(super) const WORKLOADS: [(&str, u64); 2] = [("write_4k", 8), ("write_64k", 128)];
pub(super) const LONGHAUL: &str = "longhaul";
pub(super) const SNAPSHOT: &str = "qemu-snapshot";
const FILE_BYTES: u64 = 256 << 20;
const QUICK_FILE_BYTES: u64 = 64 << 20;
/// The queue depth: that of a guest's page cache.
const DEPTH: u32 = 8;
const REPLICAS: usize = 3;
const EVERY: Duration = Duration::from_secs(15);
const QUICK_EVERY: Duration = Duration::from_secs(4);
/// How long a guest writes before it is observed, and how long it is observed before anything is
/// done with its disk.
const WARM: Duration = Duration::from_secs(2);
const BEFORE: Duration = Duration::from_secs(4);
/// How long a replica may be late until it is given up.
const LATE: Duration = Duration::from_secs(30);
/// The time limit of the first operations.
const BEGIN_LIMIT: Duration = Duration::from_secs(60);
const PARCEL: &str = "replicas";

/// What is done with the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum System {
    /// Nothing.
    None,
    /// Its writes are tracked.
    Tracked,
    /// An export is topped up.
    Longhaul,
    /// QEMU's external snapshots.
    Snapshot,
}

impl System {
    /// All of them. The guest that is left alone comes first: all others are compared with it.
    const ALL: [Self; 4] = [Self::None, Self::Longhaul, Self::Snapshot, Self::Tracked];

    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Tracked => "tracked",
            Self::Longhaul => LONGHAUL,
            Self::Snapshot => SNAPSHOT,
        }
    }
}

/// A guest at work.
struct Subject {
    system: System,
    guest: GuestDescription,
    disk: LocalDisk,
    history: History,
    every: Duration,
    /// The folder of its parcel's device, or of its replica.
    folder: PathBuf,
}

/// Measures all workloads with all systems.
pub(super) fn measure(
    options: &Options,
    ground: &mut Ground,
    document: &mut Document,
) -> Result<Vec<ConsolidationRow>, LabError> {
    let mut rows = Vec::new();
    for repeat in 1..=options.repeats_or(2) {
        for workload in WORKLOADS {
            if !options.wants_workload(workload.0) {
                continue;
            }
            let mut none = None;
            for system in System::ALL {
                let is_left_out = options.quick && system == System::Tracked;
                let is_wanted = match options.system.is_empty() {
                    true => !is_left_out,
                    false => options.wants_system(system.name()),
                };
                if !is_wanted {
                    continue;
                }
                let mut row = one(options, ground, workload, (system, repeat))?;
                if system == System::None {
                    none = row.work_during_per_s;
                }
                row.compare(none);
                document.add_row(&row, &row.show());
                rows.push(row);
            }
        }
    }
    Ok(rows)
}

/// Starts a guest, makes replicas of its disk, and judges the disk.
fn one(
    options: &Options,
    ground: &mut Ground,
    (workload, block): (&str, u64),
    (system, repeat): (System, u32),
) -> Result<ConsolidationRow, LabError> {
    let (bytes, every) = match options.quick {
        true => (QUICK_FILE_BYTES, QUICK_EVERY),
        false => (FILE_BYTES, EVERY),
    };
    let work = Work {
        file: Some(RecordedFile {
            sectors: bytes / SECTOR_BYTES as u64,
            block,
            reads: false,
        }),
        ..Work::default()
    };
    let disk = ground.disk(bytes)?;
    write_zeros(&disk.path, bytes)?;
    let disks = [disk.clone()];
    let task = Task {
        disks: &disks,
        seed: options.seed.wrapping_add(u64::from(repeat)) | RANDOM_BODIES,
        depth: DEPTH,
        work,
    };
    let guest = description(&ground.tiny(), &disks);
    let mut row = ConsolidationRow {
        workload: workload.to_owned(),
        system: system.name().to_owned(),
        parameters: ConsolidationParameters {
            file_bytes: bytes,
            block_bytes: block * SECTOR_BYTES as u64,
            depth: DEPTH,
            replicas: REPLICAS,
            every_ms: every.as_millis() as u64,
            machine: guest.machine.clone(),
            guest_memory_bytes: guest.memory_mib << 20,
        },
        repeat,
        outcome: "completed".to_owned(),
        work_before_per_s: None,
        work_during_per_s: None,
        work_in_replicas_per_s: None,
        throughput_vs_none: None,
        in_replicas_vs_none: None,
        longest_silence_ms: None,
        first_copy_ms: None,
        replicas: Vec::new(),
        operations_per_second: Vec::new(),
        verify_errors: None,
    };
    let mut subject = Subject {
        system,
        guest,
        disk,
        history: History::new(&task),
        every,
        folder: ground.folder(0)?.join("replicas"),
    };
    let folder = subject.folder.clone();
    fs::create_dir(&folder).during(|| format!("make {}", folder.display()))?;
    let qemu = subject.start(ground, &task)?;
    if subject.observe(ground, qemu, &mut row)? {
        let record = subject.history.finish()?;
        let judgement = record.judge(&ground.folder(0)?)?;
        if let Some(first) = judgement.findings.first() {
            let wrong = judgement.wrong_sectors;
            say(&format!("{wrong} sectors are wrong: {first}"));
        }
        row.verify_errors = Some(record.errors + judgement.wrong_sectors);
    }
    remove_folder(&folder)?;
    remove_folder(&ground.folder(0)?.join("state/parcels").join(PARCEL))?;
    remove_file(&subject.disk.path)?;
    Ok(row)
}

impl Subject {
    /// Starts the guest and its work.
    fn start(&mut self, ground: &Ground, task: &Task<'_>) -> Result<Option<PeerQemu>, LabError> {
        let name = self.guest.name.clone();
        let host = ground.lab.host(0)?;
        let qemu = match self.system {
            System::Snapshot => {
                let qemu = ground.start_peer(&self.guest, std::slice::from_ref(&self.disk))?;
                self.history.listen(|channel| peer_socket(host, channel))?;
                Some(qemu)
            }
            _ => {
                let socket = |channel: &str| channel_socket(host, &name, channel);
                self.history.listen(socket)?;
                ground.product.start_guest(&ground.lab, 0, &self.guest)?;
                None
            }
        };
        self.history.begin(task)?;
        self.history.wait_for(1, BEGIN_LIMIT)?;
        interrupt::sleep(WARM)?;
        Ok(qemu)
    }

    /// Observes the guest before and while replicas are made, and ends it. Returns whether it has
    /// verified its work.
    fn observe(
        &mut self,
        ground: &Ground,
        mut qemu: Option<PeerQemu>,
        row: &mut ConsolidationRow,
    ) -> Result<bool, LabError> {
        let before = Instant::now();
        interrupt::sleep(BEFORE)?;
        let before = [before, Instant::now()];
        let mut snapshots = None;
        let first = Instant::now();
        match (self.system, &mut qemu) {
            (System::Tracked, _) => {
                let words = ["guests", "track-writes", &self.guest.name];
                ground.product.agent(0)?.run(&words)?;
            }
            (System::Longhaul, _) => self.export(ground)?,
            (_, Some(qemu)) => {
                let disk = self.guest.disks.first().map(|disk| disk.name.clone());
                let made = Snapshots::begin(qemu, &disk.unwrap_or_default(), &self.folder)?;
                snapshots = Some(made);
            }
            _ => {}
        }
        if matches!(self.system, System::Longhaul | System::Snapshot) {
            row.first_copy_ms = Some(first.elapsed().as_secs_f64() * 1e3);
        }
        let began = Instant::now();
        let mut windows = Vec::new();
        for number in 0..REPLICAS as u32 {
            let due = began + number * self.every;
            interrupt::sleep(due.saturating_duration_since(Instant::now()))?;
            let replica = Instant::now();
            let deadline = due + self.every + LATE;
            let made = match (self.system, &mut qemu, &mut snapshots) {
                (System::Longhaul, ..) => self.top_up(ground)?,
                (_, Some(qemu), Some(snapshots)) => snapshots.replica(qemu, deadline)?,
                _ => break,
            };
            let window = [replica, Instant::now()];
            let is_late = made.is_none();
            windows.push((window, made));
            if is_late {
                row.outcome = format!("failed: replica {} had no end", number + 1);
                break;
            }
        }
        let end = began + REPLICAS as u32 * self.every;
        interrupt::sleep(end.saturating_duration_since(Instant::now()))?;
        let period = [began, Instant::now()];
        let course = Course::of(&self.history.arena().beats());
        let of = |periods: &[[Instant; 2]]| course.per_s(periods);
        row.work_before_per_s = of(&[before]);
        row.work_during_per_s = of(&[period]);
        let all: Vec<_> = windows.iter().map(|(window, _)| *window).collect();
        row.work_in_replicas_per_s = of(&all);
        row.longest_silence_ms = Some(course.longest_silence_ms(period));
        row.operations_per_second = course.per_second(period);
        let replicas = windows.into_iter().map(|(window, made)| {
            let [from, to] = window.map(|at| (at - began).as_secs_f64() * 1e3);
            Replica {
                began_ms: from,
                took_ms: made.as_ref().map(|_| to - from),
                copied_bytes: made.as_ref().and_then(|made| made.copied_bytes),
                is_consistent: made.as_ref().and_then(|made| made.is_consistent),
                work_per_s: of(&[window]),
                longest_silence_ms: course.longest_silence_ms(window),
            }
        });
        row.replicas = replicas.collect();
        let stopped = self.history.stop();
        if let Err(error) = &stopped {
            row.outcome = format!("failed: after the replicas {error}");
        }
        match (qemu, snapshots) {
            (Some(mut qemu), Some(snapshots)) if stopped.is_ok() => snapshots.end(&mut qemu)?,
            // It is ended at once.
            (Some(qemu), _) => drop(qemu),
            _ => ground.product.stop_guest(0, &self.guest.name)?,
        }
        Ok(stopped.is_ok())
    }

    /// Exports the disk, whose writes are tracked from then on.
    fn export(&self, ground: &Ground) -> Result<(), LabError> {
        let guest = format!("{}={}", self.guest.name, self.disk.image);
        let device = self.folder.display().to_string();
        ground.parcel(0, &["create", PARCEL, "--to", "paris", "--lose", "0"])?;
        ground.parcel(0, &["add", PARCEL, &guest])?;
        ground.parcel(0, &["export", PARCEL, "--device", &device])?;
        Ok(())
    }

    fn device_bytes(&self) -> Result<u64, LabError> {
        let doing = || format!("read {}", self.folder.display());
        let mut bytes = 0;
        for entry in fs::read_dir(&self.folder).during(doing)? {
            bytes += entry.and_then(|it| it.metadata()).during(doing)?.len();
        }
        Ok(bytes)
    }

    fn top_up(&self, ground: &Ground) -> Result<Option<Made>, LabError> {
        let before = self.device_bytes()?;
        let document = ground.parcel(0, &["top-up", PARCEL])?;
        let guest = document["guests"].get(0).unwrap_or(&Value::Null);
        if let Some(why) = guest["why"].as_str() {
            say(&format!("the replica is of no moment: {why}"));
        }
        Ok(Some(Made {
            copied_bytes: Some(self.device_bytes()? - before),
            is_consistent: guest["consistent"].as_bool(),
        }))
    }
}

/// A replica that was made.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) copied_bytes: Option<u64>,
    pub(super) is_consistent: Option<bool>,
}
