//! Moves guests over the link alone, after their disks went ahead by courier, or from one image of
//! a host to another: figure 5.1 of the paper on parcels.

use super::changed::{self, Changed};
use super::export::write_image;
use super::ground::{Ground, remove_file, remove_folder, write_zeros};
use super::local;
use crate::bench::Options;
use crate::bench::document::Document;
use crate::measure;
use crate::moves::{self, LonghaulMover, MoveRow, Show, note_verified};
use longhaul_lab::arena::{self, Beat};
use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::CHANNEL_NAME;
use longhaul_lab::guest::disks::LocalDisk;
use longhaul_lab::history::task::{History, Task, description};
use longhaul_lab::history::workload::Work;
use longhaul_lab::interrupt;
use longhaul_lab::lab::say;
use longhaul_lab::peer::channel_socket as peer_socket;
use longhaul_lab::process::wait_until;
use longhaul_lab::product::channel_socket;
use longhaul_protocol::guest::GuestDescription;
use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub(super) const WORKLOADS: [&str; 3] = ["idle", "oltp", "database"];
const QUICK_WORKLOAD: &str = "oltp";
/// The ways of a guest.
pub(super) const LINK: &str = "link";
pub(super) const PARCEL: &str = "parcel";
pub(super) const LOCAL: &str = "local";
const WAYS: [&str; 3] = [LINK, PARCEL, LOCAL];
const MIB: u64 = 1 << 20;
/// The disk that nobody writes.
const CONTENT_BYTES: u64 = 96 * MIB;
const QUICK_CONTENT_BYTES: u64 = 24 * MIB;
const ASKED_DOWNTIME_MS: u64 = 300;
/// Operations before the first copy, and of an idle guest in all.
const OPERATIONS: u64 = 300;
/// How long a guest goes on between the steps.
const GOES_ON: Duration = Duration::from_secs(5);
const ARENA_BYTES: u64 = 16 * MIB;
const PAGES_PER_S: u64 = 50;
const LIMIT: Duration = Duration::from_secs(150);
const COMMAND_LIMIT: Duration = Duration::from_secs(120);
const BOX: &str = "moves";

/// A move.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Row {
    #[serde(flatten)]
    pub(super) moved: MoveRow<Parameters>,
    /// The steps before the move.
    pub(super) ahead: Option<Ahead>,
    /// What the disks at the switch differ by from the copies that were imported.
    pub(super) changed: Option<Changed>,
    /// Blocks that had changed when the move began and did so again during it: they may have been
    /// sent before the last time.
    pub(super) rewritten: Option<Changed>,
    /// Bytes of disks over the link relative to what had to be sent.
    pub(super) disk_bytes_vs_changed: Option<f64>,
    /// The same, where blocks that were rewritten during the move count twice.
    pub(super) disk_bytes_vs_changes: Option<f64>,
}

/// The steps before a move.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Ahead {
    pub(super) export_ms: f64,
    pub(super) top_up_ms: f64,
    pub(super) import_ms: f64,
    pub(super) device_bytes: u64,
}

/// The parameters of the guest.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct Parameters {
    /// Sizes of the disks that are written.
    pub(super) written_disks_bytes: Vec<u64>,
    /// Size of the disk that is not.
    pub(super) content_disk_bytes: u64,
    pub(super) operations_per_s: u64,
    /// The number of requests under way at a time.
    pub(super) depth: u32,
    pub(super) arena_bytes: u64,
    pub(super) pages_per_s: u64,
    pub(super) machine: String,
    pub(super) guest_memory_bytes: u64,
}

/// A guest at work.
struct Subject {
    guest: GuestDescription,
    /// Its disks; the last one is not written.
    disks: Vec<LocalDisk>,
    history: History,
    row: Row,
}

/// The end of a move.
pub(super) struct Ended {
    pub(super) times: [Instant; 2],
    /// The arena's channel, where the guest is now.
    pub(super) channel: PathBuf,
    /// The folder of its disks now.
    pub(super) folder: PathBuf,
}

/// Moves all guests.
pub(super) fn measure(
    options: &Options,
    ground: &mut Ground,
    document: &mut Document,
) -> Result<Vec<Row>, LabError> {
    let by_itself = |name: &str| !options.quick || name == QUICK_WORKLOAD;
    let wanted = WORKLOADS
        .iter()
        .filter(|name| match options.workload.is_empty() {
            true => by_itself(name),
            false => options.wants_workload(name),
        });
    let wanted: Vec<&str> = wanted.copied().collect();
    if !wanted.is_empty() {
        let measured = ground.lab.measure_link(ground.link)?;
        document.add_link(ground.link, measured);
    }
    let mut rows = Vec::new();
    for repeat in 1..=options.repeats_or(1) {
        for workload in &wanted {
            for way in WAYS {
                let row = one(options, ground, (workload, way), repeat)?;
                document.add_row(&row, &row.show());
                rows.push(row);
            }
        }
    }
    Ok(rows)
}

/// Returns the sizes of the disks that a workload writes, in MiB, and the depth of its requests.
fn shape(workload: &str) -> (&'static [u64], u32) {
    match workload {
        "database" => (&[24, 8], 4),
        _ => (&[32], 8),
    }
}

fn work(workload: &str) -> Work {
    Work {
        operations: if workload == "idle" { OPERATIONS } else { 0 },
        operations_per_s: if workload == "database" { 8 } else { 15 },
        paced_from: OPERATIONS,
        ..Work::default()
    }
}

fn one(
    options: &Options,
    ground: &mut Ground,
    (workload, way): (&str, &str),
    repeat: u32,
) -> Result<Row, LabError> {
    let seed = options.seed.wrapping_add(u64::from(repeat));
    let (sizes, depth) = shape(workload);
    let content = match options.quick {
        true => QUICK_CONTENT_BYTES,
        false => CONTENT_BYTES,
    };
    let mut disks = Vec::new();
    for size in sizes {
        let disk = ground.disk(size * MIB)?;
        write_zeros(&disk.path, disk.bytes)?;
        disks.push(disk);
    }
    let last = ground.disk(content)?;
    write_image(&last.path, content, seed)
        .during(|| format!("make the disk {}", last.path.display()))?;
    disks.push(last);
    let tiny = ground.tiny();
    let guest = description(&tiny, &disks);
    let work = work(workload);
    let written = &disks[..sizes.len()];
    let task = Task {
        disks: written,
        seed,
        depth,
        work,
    };
    let parameters = Parameters {
        written_disks_bytes: written.iter().map(|disk| disk.bytes).collect(),
        content_disk_bytes: content,
        operations_per_s: work.operations_per_s,
        depth,
        arena_bytes: ARENA_BYTES,
        pages_per_s: PAGES_PER_S,
        machine: guest.machine.clone(),
        guest_memory_bytes: guest.memory_mib << 20,
    };
    let system = match way {
        LOCAL => "qemu-mirror-local",
        _ => "longhaul",
    };
    let mut subject = Subject {
        row: Row {
            moved: MoveRow::new(
                [system, way, workload],
                parameters,
                ground.link,
                repeat,
                ASKED_DOWNTIME_MS,
            ),
            ahead: None,
            changed: None,
            rewritten: None,
            disk_bytes_vs_changed: None,
            disk_bytes_vs_changes: None,
        },
        history: History::new(&task),
        guest,
        disks: disks.clone(),
    };
    let row = match way {
        LOCAL => subject.local(ground, &task)?,
        _ => {
            subject.start(ground, &task)?;
            let copies = match way {
                PARCEL => Some(subject.ship(ground)?),
                _ => None,
            };
            subject.carry(ground, copies.as_deref())?
        }
    };
    clean(ground, &disks)?;
    Ok(row)
}

/// Removes what a case has left.
fn clean(ground: &Ground, disks: &[LocalDisk]) -> Result<(), LabError> {
    for host in 0..2 {
        let folder = ground.folder(host)?;
        for name in disks.iter().filter_map(|disk| disk.path.file_name()) {
            let moved = format!("{}.moved", name.display());
            remove_file(&folder.join(name))?;
            remove_file(&folder.join(moved))?;
        }
        remove_folder(&folder.join("state/parcels").join(BOX))?;
        remove_folder(&folder.join("courier"))?;
    }
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>, LabError> {
    fs::read(path).during(|| format!("read {}", path.display()))
}

fn timed<T>(what: impl FnOnce() -> Result<T, LabError>) -> Result<(T, f64), LabError> {
    let began = Instant::now();
    let done = what()?;
    Ok((done, began.elapsed().as_secs_f64() * 1e3))
}

impl Subject {
    /// Starts the guest and its work on the first host.
    fn start(&mut self, ground: &Ground, task: &Task<'_>) -> Result<(), LabError> {
        for host in ground.lab.hosts() {
            let name = &self.guest.name;
            let socket = |channel: &str| channel_socket(host, name, channel);
            self.history.listen(socket)?;
        }
        ground.product.start_guest(&ground.lab, 0, &self.guest)?;
        self.begin(task)
    }

    fn begin(&mut self, task: &Task<'_>) -> Result<(), LabError> {
        self.history.begin(task)?;
        let pages = arena::Workload {
            content: "mix".to_owned(),
            arena_bytes: ARENA_BYTES,
            working_set_bytes: ARENA_BYTES / 2,
            pages_per_s: PAGES_PER_S,
            write_bytes: 512,
            writers: 1,
            verify_pages_per_s: 500,
            seed: task.seed,
        };
        let started = self.history.arena_mut().start(&pages, COMMAND_LIMIT);
        started.map_err(|error| LabError::Answer {
            what: "the guest".to_owned(),
            message: error.to_string(),
        })?;
        self.history.wait_for(OPERATIONS, COMMAND_LIMIT)?;
        interrupt::sleep(GOES_ON)
    }

    /// Lets the disks go ahead by courier. Returns their copies at the destination.
    fn ship(&mut self, ground: &Ground) -> Result<Vec<Vec<u8>>, LabError> {
        let home = ground.folder(0)?.join("courier");
        fs::create_dir(&home).during(|| format!("make {}", home.display()))?;
        let device = home.display().to_string();
        let images: Vec<&str> = self.disks.iter().map(|disk| disk.image.as_str()).collect();
        let guest = format!("{}={}", self.guest.name, images.join(","));
        ground.parcel(0, &["create", BOX, "--to", "paris", "--lose", "0"])?;
        ground.parcel(0, &["add", BOX, &guest])?;
        let export = || ground.parcel(0, &["export", BOX, "--device", &device]);
        let (_, export_ms) = timed(export)?;
        interrupt::sleep(GOES_ON)?;
        let (topped_up, top_up_ms) = timed(|| ground.parcel(0, &["top-up", BOX]))?;
        ground.parcel(0, &["ship", BOX, "--courier", "DHL", "--number", "JD 1"])?;
        let config = ground.folder(0)?.join("agent.toml").display().to_string();
        let words = ["parcel", "--config", &config, "key", BOX];
        let key = home.join("key");
        let text = ground.product.agent(0)?.run(&words)?;
        fs::write(&key, text).during(|| format!("write {}", key.display()))?;
        let key = key.display().to_string();
        let words = ["import", "--key-file", &key, &device];
        let (imported, import_ms) = timed(|| ground.parcel(1, &words))?;
        self.row.ahead = Some(Ahead {
            export_ms,
            top_up_ms,
            import_ms,
            device_bytes: topped_up["device_bytes"].as_u64().unwrap_or(0),
        });
        let disks = imported["disks"].as_array().cloned().unwrap_or_default();
        let copies = self.disks.iter().map(|disk| {
            let own = disks.iter().find(|it| it["image"] == disk.image.as_str());
            let path = own.and_then(|it| it["path"].as_str());
            let path = path.ok_or_else(|| LabError::Answer {
                what: "the import".to_owned(),
                message: format!("it does not have {}", disk.image),
            })?;
            read(Path::new(path))
        });
        let copies = copies.collect::<Result<Vec<_>, _>>()?;
        interrupt::sleep(GOES_ON)?;
        Ok(copies)
    }

    /// Moves the guest over the link; what had to be sent is computed with these copies.
    fn carry(mut self, ground: &Ground, copies: Option<&[Vec<u8>]>) -> Result<Row, LabError> {
        let name = self.guest.name.clone();
        let each = || self.disks.iter().map(|disk| read(&disk.path));
        // The guest goes on: a block may be newer in this copy than when it was first sent.
        let at_begin = match copies {
            Some(_) => each().collect::<Result<Vec<_>, _>>()?,
            None => Vec::new(),
        };
        let downtime = format!("{ASKED_DOWNTIME_MS}ms");
        let mover = LonghaulMover {
            lab: &ground.lab,
            product: &ground.product,
        };
        let row = &mut self.row.moved;
        let words = ["--downtime", &downtime];
        let finished = mover.carry(&name, [0, 1], &words, LIMIT, Show::Nothing, row)?;
        let host = usize::from(finished.completed());
        if let (Some(copies), true) = (copies, finished.completed()) {
            self.compare(copies, &at_begin)?;
        }
        let ended = Ended {
            times: [finished.began, finished.ended],
            channel: channel_socket(ground.lab.host(host)?, &name, CHANNEL_NAME),
            folder: ground.folder(host)?,
        };
        self.judge(&ended, || ground.product.stop_guest(host, &name))
    }

    /// Computes what had to be sent: the source's disks are those of the switch.
    fn compare(&mut self, copies: &[Vec<u8>], at_begin: &[Vec<u8>]) -> Result<(), LabError> {
        let at_switch = self.disks.iter().map(|disk| {
            let name = disk.path.file_name().unwrap_or_default();
            let moved = format!("{}.moved", name.display());
            read(&disk.path.with_file_name(moved))
        });
        let at_switch = at_switch.collect::<Result<Vec<_>, _>>()?;
        let pairs = |now: &[Vec<u8>]| {
            let pairs = copies.iter().cloned().zip(now.iter().cloned());
            pairs.collect::<Vec<_>>()
        };
        let doing = || "compare disks".to_owned();
        let changed = changed::between(&pairs(&at_switch), |_, _| true).during(doing)?;
        let again = |disk: usize, block: usize| {
            let both = at_begin.get(disk).zip(at_switch.get(disk));
            both.is_some_and(|(begin, switch)| changed::differs(begin, switch, block))
        };
        let rewritten = changed::between(&pairs(at_begin), again).during(doing)?;
        self.row.rewritten = Some(rewritten);
        self.row.changed = Some(changed);
        let sent = self.row.moved.disk_bytes.map(|bytes| bytes as f64);
        let ratio = |bytes: u64| Some(sent? / Some(bytes).filter(|bytes| *bytes > 0)? as f64);
        self.row.disk_bytes_vs_changed = ratio(changed.compressed_bytes);
        let changes = changed.compressed_bytes + rewritten.compressed_bytes;
        self.row.disk_bytes_vs_changes = ratio(changes);
        Ok(())
    }

    /// Copies the guest's disks to other images of its host, and lets it use those.
    fn local(mut self, ground: &Ground, task: &Task<'_>) -> Result<Row, LabError> {
        let host = ground.lab.host(0)?;
        let mut qemu = ground.start_peer(&self.guest, &self.disks)?;
        self.history.listen(|channel| peer_socket(host, channel))?;
        self.begin(task)?;
        let folder = ground.folder(0)?.join("courier");
        fs::create_dir(&folder).during(|| format!("make {}", folder.display()))?;
        let copied = local::copy(&mut qemu, (&self.guest, &self.disks), &folder, LIMIT)?;
        let row = &mut self.row.moved;
        row.disk_bytes = Some(copied.bytes);
        let [began, ended] = copied.times;
        row.total_ms = Some(moves::ms(began, ended));
        row.outcome = "completed".to_owned();
        let ended = Ended {
            times: copied.times,
            channel: peer_socket(host, CHANNEL_NAME),
            folder,
        };
        self.judge(&ended, || qemu.quit())
    }

    /// Lets the guest verify all its work, ends it, and checks its disks from outside.
    fn judge(
        mut self,
        moved: &Ended,
        end: impl FnOnce() -> Result<(), LabError>,
    ) -> Result<Row, LabError> {
        let row = &mut self.row.moved;
        let arena = self.history.arena();
        // Commands go to the socket of its last heartbeat.
        wait_until(COMMAND_LIMIT, || {
            arena.heard_on().as_ref() == Some(&moved.channel)
        });
        let verified = moves::verify(self.history.arena_mut())?;
        let beats: Vec<Beat> = self.history.arena().beats();
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
        if let Some(first) = judgement.findings.first() {
            let wrong = judgement.wrong_sectors;
            say(&format!("{wrong} sectors are wrong: {first}"));
        }
        Ok(self.row)
    }
}

impl Row {
    /// Returns it as one line.
    fn show(&self) -> String {
        use super::row::number;
        let moved = &self.moved;
        let megabytes = |bytes: Option<u64>| number(bytes.map(|it| it as f64 / 1e6), "MB");
        let changed = self.changed.map(|it| it.compressed_bytes);
        format!(
            "{:<8} {:<6} repeat {}: {} over the link, disk {} ({} had to be sent, {} rewritten), \
             {}, downtime {}, errors {}, {}",
            moved.workload,
            moved.strategy,
            moved.repeat,
            megabytes(moved.link_bytes),
            megabytes(moved.disk_bytes),
            megabytes(changed),
            megabytes(self.rewritten.map(|it| it.compressed_bytes)),
            number(moved.total_ms.map(|ms| ms / 1e3), "s"),
            number(moved.downtime_ms, "ms"),
            moved
                .verify_errors
                .map_or_else(|| "-".to_owned(), |errors| errors.to_string()),
            moved.outcome,
        )
    }
}
