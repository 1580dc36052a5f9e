//! Manages the guest's disk: its place on each host, the guest's history on it, and the judgement.

use super::case::Site;
use longhaul_history::plan::{Kind, Plan, SECTOR_BYTES};
use longhaul_lab::arena::Arena;
use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::Tiny;
use longhaul_lab::guest::disks::{Cache, DiskKind, Format, LocalDisk};
use longhaul_lab::history::task::{History, Task, description};
use longhaul_lab::history::workload::Work;
use longhaul_lab::peer::qmp::Qmp;
use longhaul_lab::process::wait_until;
use longhaul_protocol::guest::GuestDescription;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Size of the disk: room for a history's scattered writes, and small enough that a move takes a
/// second.
const BYTES: u64 = 8 << 20;
const OPERATIONS_PER_S: u64 = 40;
/// The number of operations under way at a time.
const DEPTH: u32 = 4;
/// The unit in which disks move.
const CHUNK_BYTES: u64 = 256 << 10;
/// The number of bytes written to a chunk from which `hybrid` leaves it to the end.
const HOT_BYTES: u64 = 2 * CHUNK_BYTES;
/// The maximum delay of reports from before the guest was stopped.
const TOLD_WITHIN: Duration = Duration::from_secs(20);

/// One guest's disk.
#[derive(Debug)]
pub(super) struct GuestDisk {
    /// By host; the same twice where both share it.
    folders: [PathBuf; 2],
    disk: LocalDisk,
    history: History,
    seed: u64,
}

impl GuestDisk {
    /// Creates the disk of the guest that is booted as number `boot`: all zeros, at the first host.
    pub(super) fn make(
        folders: &[PathBuf; 2],
        site: Site,
        boot: u32,
        seed: u64,
    ) -> Result<Self, LabError> {
        let disk = disk(&folders[0], site, boot);
        disk.create()?;
        let seed = seed ^ u64::from(boot) << 32;
        Ok(Self {
            folders: folders.clone(),
            history: History::new(&task(std::slice::from_ref(&disk), seed)),
            disk,
            seed,
        })
    }

    fn is_local(&self) -> bool {
        self.folders[0] != self.folders[1]
    }

    fn grows(&self) -> bool {
        self.disk.kind.format == Format::Qcow2
    }

    /// Returns a guest with this disk.
    pub(super) fn description(&self, tiny: &Tiny) -> GuestDescription {
        let mut guest = description(tiny, std::slice::from_ref(&self.disk));
        for disk in &mut guest.disks {
            disk.shared = !self.is_local();
        }
        guest
    }

    /// Returns the path of a host's image.
    pub(super) fn image(&self, host: usize) -> PathBuf {
        let name = self.disk.path.file_name().unwrap_or_default();
        self.folders[host].join(name)
    }

    /// Listens to the guest on every future host.
    pub(super) fn listen(&self, socket: impl Fn(&str) -> PathBuf) -> Result<(), LabError> {
        self.history.listen_beside(socket)
    }

    /// Starts the guest's writes once it is up.
    pub(super) fn begin(&self, arena: &mut Arena) -> Result<(), LabError> {
        let task = task(std::slice::from_ref(&self.disk), self.seed);
        self.history.begin_beside(arena, &task)
    }

    /// Waits until the guest has written enough to some chunk, from now on, that `hybrid` leaves
    /// it.
    pub(super) fn wait_for_a_hot_place(&self, limit: Duration) -> Result<(), LabError> {
        let sectors = BYTES / SECTOR_BYTES as u64;
        let plan = Plan::new(self.seed, vec![sectors]);
        let plan = plan.map_err(|error| LabError::Which(error.to_string()))?;
        let mut written = vec![0; BYTES.div_ceil(CHUNK_BYTES) as usize];
        // Those under way may have been written already.
        let mut number = self.history.heard().told.done + 2 * u64::from(DEPTH);
        while written.iter().all(|bytes| *bytes < HOT_BYTES) {
            let operation = plan.operation(number);
            if matches!(operation.kind, Kind::Write | Kind::Zero) {
                for sector in operation.range() {
                    written[(sector * SECTOR_BYTES as u64 / CHUNK_BYTES) as usize] +=
                        SECTOR_BYTES as u64;
                }
            }
            number += 1;
        }
        self.history.wait_for(number, limit)
    }

    /// Judges it at a host, with the guest's QEMUs there and this monitor: `None` where the guest
    /// has died. The QEMUs are stopped meanwhile.
    pub(super) fn judge(
        &self,
        host: usize,
        (qemus, monitor): (&[i32], &Path),
    ) -> Result<(), String> {
        // QEMU has tables for an image that grows, which it writes when its guest is stopped.
        let asked = self.grows() && !qemus.is_empty();
        let paused = asked.then(|| Paused::new(monitor)).transpose();
        let paused = paused.map_err(|error| format!("cannot stop the guest: {error}"))?;
        let verdict = self.judge_still(host, qemus);
        match paused.map(Paused::go_on) {
            Some(Err(error)) => verdict.and(Err(format!("cannot let the guest go on: {error}"))),
            _ => verdict,
        }
    }

    fn judge_still(&self, host: usize, qemus: &[i32]) -> Result<(), String> {
        let stopped = Frozen::new(qemus).map_err(|error| error.to_string())?;
        let died = qemus.is_empty();
        if died && !wait_until(TOLD_WITHIN, || !self.history.is_connected()) {
            return Err("the guest is dead, and still heard".to_owned());
        }
        let mut verdict = Ok(());
        // Its last report may be on its way; nothing else changes any more.
        wait_until(TOLD_WITHIN, || {
            verdict = self.verdict(host, died);
            verdict.is_ok()
        });
        drop(stopped);
        verdict
    }

    fn verdict(&self, host: usize, died: bool) -> Result<(), String> {
        let mut record = self.history.so_far();
        for disk in &mut record.disks {
            // The tables were lost with it, as far as the guest had not flushed.
            disk.keeps_acknowledged &= !(died && self.grows());
        }
        if record.errors > 0 {
            let first = record.first_error.unwrap_or_default();
            return Err(format!(
                "the guest found {} errors on its disk, the first: {first}",
                record.errors
            ));
        }
        let judged = record.judge(&self.folders[host]);
        let judgement = judged.map_err(|error| error.to_string())?;
        match judgement.findings.first() {
            None => Ok(()),
            Some(first) => Err(format!(
                "WRITES LOST: {} of {} sectors are wrong at host {host} after {} operations of \
                 seed {}, first {first:?}",
                judgement.wrong_sectors, judgement.sectors, record.done, self.seed
            )),
        }
    }

    /// Returns the host that has the disk, where that is one.
    pub(super) fn owner(&self) -> Result<usize, String> {
        if !self.is_local() {
            return Ok(0);
        }
        match [0, 1].map(|host| self.image(host).exists()) {
            [true, false] => Ok(0),
            [false, true] => Ok(1),
            [false, false] => Err("no host has the guest's disk".to_owned()),
            [true, true] => Err("both hosts have the guest's disk".to_owned()),
        }
    }
}

/// Returns a host's configuration for the disks of guests that are booted one after the other.
pub(super) fn images(folder: &Path, boots: u32, site: Site) -> toml::Table {
    let mut images = toml::Table::new();
    for boot in 1..=boots {
        let disk = disk(folder, site, boot);
        let path = disk.path.display().to_string();
        let image = toml::Table::from_iter([
            ("path".to_owned(), path.into()),
            ("format".to_owned(), disk.kind.format.name().into()),
            ("locks".to_owned(), site.locks.into()),
        ]);
        images.insert(disk.image, image.into());
    }
    toml::Table::from_iter([("images".to_owned(), images.into())])
}

fn disk(folder: &Path, site: Site, boot: u32) -> LocalDisk {
    let format = site.own.unwrap_or(Format::Raw);
    LocalDisk {
        image: format!("disk-{boot}"),
        path: folder.join(format!("disk-{boot}.{}", format.name())),
        bytes: BYTES,
        kind: DiskKind {
            format,
            cache: Cache::Writeback,
            iothread: false,
        },
    }
}

fn task(disks: &[LocalDisk], seed: u64) -> Task<'_> {
    let work = Work {
        operations_per_s: OPERATIONS_PER_S,
        ..Work::default()
    };
    Task {
        disks,
        seed,
        depth: DEPTH,
        work,
    }
}

/// A guest stopped by its QEMU, which has then written its tables of the disk.
struct Paused(Qmp);

impl Paused {
    fn new(monitor: &Path) -> Result<Self, LabError> {
        let mut qmp = Qmp::connect(monitor)?;
        qmp.execute("stop", &json!({}))?;
        Ok(Self(qmp))
    }

    fn go_on(mut self) -> Result<(), LabError> {
        self.0.execute("cont", &json!({})).map(drop)
    }
}

/// Processes that are stopped while this value exists.
struct Frozen(Vec<Pid>);

impl Frozen {
    fn new(pids: &[i32]) -> Result<Self, LabError> {
        let frozen = Self(pids.iter().map(|pid| Pid::from_raw(*pid)).collect());
        for pid in &frozen.0 {
            kill(*pid, Signal::SIGSTOP)
                .map_err(std::io::Error::from)
                .during(|| format!("stop process {pid}"))?;
        }
        // A thread finishes its current write first.
        let stand_still = || pids.iter().all(|pid| stands_still(*pid));
        match wait_until(TOLD_WITHIN, stand_still) {
            true => Ok(frozen),
            false => Err(LabError::Which(format!("{pids:?} do not stand still"))),
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        for pid in &self.0 {
            // A process that is gone needs nothing.
            let _ = kill(*pid, Signal::SIGCONT);
        }
    }
}

/// Returns whether every thread of a process is stopped.
fn stands_still(pid: i32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return true;
    };
    threads.flatten().all(|thread| {
        let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // The name before it may contain anything.
        let state = stat.rsplit_once(") ").map(|(_, rest)| rest.chars().next());
        matches!(state, None | Some(Some('T' | 't' | 'Z' | 'X')))
    })
}
