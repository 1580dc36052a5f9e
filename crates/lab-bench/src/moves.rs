//! Runs one measured move of a guest between two hosts, by any system, and produces its row.

mod longhaul;

use crate::bench::document::AskedLink;
use crate::clients::{Clients, Responses, Seen};
use crate::measure::{self, Observed, ProcessMeter, Stalls, Switched, Used};
use crate::peer::{PeerMove, PeerSystem};
use crate::warm::{self, Warm};
use longhaul_api::{FaultReport, PredictedRange};
use longhaul_lab::arena::{Arena, ArenaError, Workload};
use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::KernelFiles;
use longhaul_lab::interrupt;
use longhaul_lab::lab::{Lab, say};
use longhaul_lab::link::spec::LinkSpec;
use longhaul_lab::link::stats::LinkStats;
use longhaul_lab::peer::{Begin, PeerHost, PeerQemu};
use longhaul_lab::process::wait_until;
use longhaul_lab::product::Finished;
use longhaul_protocol::guest::GuestDescription;
use serde::Serialize;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

pub use longhaul::{LonghaulMover, Show};

/// The time limit of a boot, which takes 2 s under TCG on an idle machine.
const BOOT_LIMIT: Duration = Duration::from_secs(120);
const COMMAND_LIMIT: Duration = Duration::from_secs(120);
/// The time limit for a workload to stop and verify all its work.
const CHECK_LIMIT: Duration = Duration::from_secs(1200);
/// How long a guest that was restored from a saved state runs before it is measured.
const AWAKE: Duration = Duration::from_secs(3);
/// The allowance of a command beyond the move itself.
const FINISH_LIMIT: Duration = Duration::from_secs(60);
const PAGE_BYTES: u64 = 4096;
/// The outcome of a move whose switchover was forced.
const FORCED: &str = "forced";

/// The guest of a move, and the request.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// The guest.
    pub guest: GuestDescription,
    /// Its load.
    pub load: Load,
    /// The link.
    pub link: LinkSpec,
    /// The requested downtime.
    pub downtime_ms: u64,
    /// The time limit of a move that does not converge.
    pub limit: Duration,
    /// When a baseline's move that has not switched over is forced to; `None`: never.
    pub force_after: Option<Duration>,
    /// How long the guest is observed from the switchover on, if that is longer than to the end of
    /// the move.
    pub observe: Duration,
    /// The repeat, from 1.
    pub repeat: u32,
}

/// The load of a guest, and how it starts.
#[derive(Debug, Clone, PartialEq)]
pub enum Load {
    /// The guest boots, and only the arena runs.
    Arena {
        /// The workload of the arena.
        arena: Workload,
        /// Its name in rows.
        name: String,
        /// Its dirty rate as a share of the link's rate, where it is chosen so.
        dirty_share: Option<f64>,
    },
    /// The guest starts from a saved state, in which a workload runs beside the arena.
    Warm(Rc<Warm>),
}

impl Load {
    /// Returns the workload of the arena.
    pub fn arena(&self) -> &Workload {
        match self {
            Self::Arena { arena, .. } => arena,
            Self::Warm(warm) => &warm.arena,
        }
    }

    /// Returns its name in rows.
    pub fn name(&self) -> &str {
        match self {
            Self::Arena { name, .. } => name,
            Self::Warm(warm) => &warm.workload,
        }
    }

    /// Returns the arena's dirty rate as a share of the link's rate, where that is relevant.
    pub fn dirty_share(&self) -> Option<f64> {
        match self {
            Self::Arena { dirty_share, .. } => *dirty_share,
            Self::Warm(_) => None,
        }
    }
}

impl Case {
    /// Returns the pages per second for a share of a link's rate.
    pub fn pages_per_s(link: LinkSpec, share: f64) -> u64 {
        (link.rate_bps as f64 / 8.0 * share / PAGE_BYTES as f64).round() as u64
    }
}

/// A row of the benches that move guests. Unmeasured values are null.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MoveRow<P = Parameters> {
    /// The system that moved the guest.
    pub system: String,
    /// The requested link.
    pub link: AskedLink,
    /// The strategy.
    pub strategy: String,
    /// The workload beside the arena, or else the name of the arena's.
    pub workload: String,
    /// Further parameters of the load.
    pub parameters: P,
    /// The repeat, from 1.
    pub repeat: u32,
    /// `completed`, `forced` or `failed: why`.
    pub outcome: String,
    /// Bytes of frames to the destination, by the link's own counters.
    pub link_bytes: Option<u64>,
    /// Bytes of frames back to the source.
    pub link_bytes_back: Option<u64>,
    /// Bytes of memory, as the system counts them.
    pub memory_bytes: Option<u64>,
    /// Bytes of disks.
    pub disk_bytes: Option<u64>,
    /// From the command until the guest runs at the destination, and none of its content is missing
    /// there.
    pub total_ms: Option<f64>,
    /// The requested downtime.
    pub asked_downtime_ms: u64,
    /// The downtime, measured from outside.
    pub downtime_ms: Option<f64>,
    /// The part of it at the switchover: the gap before the first heartbeat from the destination.
    /// The longest gap may come later, where content is missing.
    pub switchover_ms: Option<f64>,
    /// Gaps in the guest's heartbeats.
    pub stalls: Option<Stalls>,
    /// The guest's work before the move.
    pub work_before_per_s: Option<f64>,
    /// During it.
    pub work_during_per_s: Option<f64>,
    /// After it.
    pub work_after_per_s: Option<f64>,
    /// From the last heartbeat at the source on, for as long as the case asks for.
    pub work_after_switchover_per_s: Option<f64>,
    /// The predictions of the system.
    pub predicted: Predicted,
    /// CPU time.
    pub cpu_s: CpuRow,
    /// The peak memory of the agents.
    pub agent_peak_bytes: PeakRow,
    /// Bytes read from storage other than the destination's own.
    pub storage_bytes: Option<u64>,
    /// Errors found by the guest itself: in pages, and by its workload's checks.
    pub verify_errors: Option<u64>,
    /// Passes over memory.
    pub passes: Option<u64>,
    /// The pages that the guest waited for while its memory followed, by the product's report.
    pub faults: Option<FaultReport>,
    /// The service of the guest's clients, where it has any.
    pub responses: Option<Responses>,
}

/// The parameters of a guest and its load.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Parameters {
    /// The arena's dirty rate as a share of the link's rate, where no other workload runs.
    pub dirty_rate_of_link: Option<f64>,
    /// Pages that the arena is to rewrite per second.
    pub pages_per_s: u64,
    /// The same in bytes of whole pages; null: as fast as the machine allows.
    pub dirty_bytes_per_s: Option<u64>,
    /// Bytes of pages in the arena.
    pub arena_bytes: u64,
    /// The part that is rewritten.
    pub working_set_bytes: u64,
    /// Bytes changed in a page.
    pub write_bytes: u64,
    /// The guest's machine type.
    pub machine: String,
    /// The version of QEMU, where it is not that of the other systems.
    pub qemu: Option<String>,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// The guest's memory.
    pub guest_memory_bytes: u64,
}

/// The predictions, by the middles of their ranges.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Predicted {
    /// Time of the whole move.
    pub total_ms: Option<f64>,
    /// Downtime.
    pub downtime_ms: Option<f64>,
    /// The upper end of the downtime's range.
    pub downtime_at_most_ms: Option<f64>,
    /// Bytes over the link.
    pub link_bytes: Option<u64>,
}

/// CPU time by process, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct CpuRow {
    /// The source's QEMU.
    pub source_qemu: Option<f64>,
    /// The destination's QEMU.
    pub destination_qemu: Option<f64>,
    /// The source's agent.
    pub source_agent: Option<f64>,
    /// The destination's agent.
    pub destination_agent: Option<f64>,
}

/// Peak memory of the agents, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct PeakRow {
    /// The source's.
    pub source: Option<u64>,
    /// The destination's.
    pub destination: Option<u64>,
}

impl MoveRow {
    /// Creates a row with the parameters, before the results.
    pub fn of(case: &Case, system: &str, strategy: &str) -> Self {
        let arena = case.load.arena();
        let parameters = Parameters {
            dirty_rate_of_link: case.load.dirty_share(),
            pages_per_s: arena.pages_per_s,
            dirty_bytes_per_s: (arena.pages_per_s < Workload::AS_FAST_AS_IT_CAN)
                .then_some(arena.pages_per_s * PAGE_BYTES),
            arena_bytes: arena.arena_bytes,
            working_set_bytes: arena.working_set_bytes,
            write_bytes: arena.write_bytes,
            machine: case.guest.machine.clone(),
            qemu: None,
            vcpus: case.guest.vcpus,
            guest_memory_bytes: case.guest.memory_mib << 20,
        };
        Self::new(
            [system, strategy, case.load.name()],
            parameters,
            case.link,
            case.repeat,
            case.downtime_ms,
        )
    }
}

impl<P> MoveRow<P> {
    /// Creates a row of a system, a strategy and a workload, before the results.
    pub fn new(
        [system, strategy, workload]: [&str; 3],
        parameters: P,
        link: LinkSpec,
        repeat: u32,
        asked_downtime_ms: u64,
    ) -> Self {
        Self {
            system: system.to_owned(),
            link: link.into(),
            strategy: strategy.to_owned(),
            workload: workload.to_owned(),
            parameters,
            repeat,
            outcome: String::new(),
            link_bytes: None,
            link_bytes_back: None,
            memory_bytes: None,
            disk_bytes: None,
            total_ms: None,
            asked_downtime_ms,
            downtime_ms: None,
            switchover_ms: None,
            stalls: None,
            work_before_per_s: None,
            work_during_per_s: None,
            work_after_per_s: None,
            work_after_switchover_per_s: None,
            predicted: Predicted::default(),
            cpu_s: CpuRow::default(),
            agent_peak_bytes: PeakRow::default(),
            storage_bytes: None,
            verify_errors: None,
            passes: None,
            faults: None,
            responses: None,
        }
    }

    /// Records the traffic of the link between two readings of its counters.
    pub fn note_link(&mut self, before: &LinkStats, after: &LinkStats) {
        let carried = |after: u64, before: u64| Some(after.saturating_sub(before));
        self.link_bytes = carried(after.forth.carried_bytes, before.forth.carried_bytes);
        self.link_bytes_back = carried(after.back.carried_bytes, before.back.carried_bytes);
    }

    /// Records the product's report of its move.
    pub fn note_finished(&mut self, finished: &Finished) {
        self.outcome = if finished.completed() {
            "completed".to_owned()
        } else {
            format!("failed: {}", finished.why())
        };
        self.total_ms = Some(ms(finished.began, finished.ended));
        let Some(report) = &finished.report else {
            return;
        };
        self.memory_bytes = report.memory_bytes;
        self.disk_bytes = report.disk_bytes;
        self.passes = report.passes.map(u64::from);
        self.faults = report.faults;
        if let Some(predicted) = &report.predicted {
            let likely = |range: Option<PredictedRange>| range.map(|range| range.likely as f64);
            let downtime = predicted.downtime_ms;
            self.predicted = Predicted {
                total_ms: likely(predicted.total_ms),
                downtime_ms: likely(downtime),
                downtime_at_most_ms: downtime.map(|range| range.high as f64),
                link_bytes: predicted.link_bytes.map(|range| range.likely),
            };
        }
    }

    /// Records the observations of the guest; its outcome is set before.
    pub fn note_observed(&mut self, observed: Option<Observed>) {
        let Some(observed) = observed else { return };
        // The longest gap of a guest that was not moved is not a downtime.
        self.downtime_ms = self.is_moved().then_some(observed.downtime_ms);
        self.stalls = Some(observed.stalls);
        self.work_before_per_s = Some(observed.work_before_per_s);
        self.work_during_per_s = Some(observed.work_during_per_s);
        self.work_after_per_s = observed.work_after_per_s;
    }

    /// Records the observations of the guest's clients; a wrong answer is an error like those that
    /// the guest finds itself.
    fn note_clients(&mut self, seen: Option<&Seen>, began: Instant, ended: Instant) {
        let Some(seen) = seen else { return };
        self.responses = Some(seen.around(began, ended));
        self.verify_errors = self.verify_errors.map(|errors| errors + seen.wrong);
        if let Some(first) = &seen.first_wrong {
            say(&format!("clients saw {} errors: {first}", seen.wrong));
        }
    }

    /// Records the observations around the switchover; its outcome is set before.
    fn note_switched(&mut self, switched: Option<Switched>, usual_gap_ms: f64) {
        let Some(switched) = switched.filter(|_| self.is_moved()) else {
            return;
        };
        self.switchover_ms = Some((switched.gap_ms - usual_gap_ms).max(0.0));
        self.work_after_switchover_per_s = switched.work_per_s;
    }

    /// Returns whether the guest was moved and its checks are known.
    pub fn is_completed(&self) -> bool {
        self.outcome == "completed"
    }

    /// Returns whether the guest was moved, if need be by force.
    pub fn is_moved(&self) -> bool {
        self.is_completed() || self.outcome == FORCED
    }
}

/// Starts the arena and waits until the guest's usual rhythm is known.
///
/// # Errors
/// When the guest does not come up.
pub fn settle(arena: &mut Arena, workload: &Workload) -> Result<(), LabError> {
    arena.wait_for_beat(BOOT_LIMIT).map_err(silent)?;
    arena.start(workload, COMMAND_LIMIT).map_err(silent)?;
    interrupt::sleep(measure::BEFORE)
}

/// A guest under its load, and its observers outside.
#[derive(Debug)]
pub struct Watched {
    /// Its arena.
    pub arena: Arena,
    clients: Option<Clients>,
}

impl Watched {
    /// As [`settle`], for a guest that was saved with its load running.
    fn settle(&mut self, load: &Load) -> Result<(), LabError> {
        let workload = match load {
            Load::Arena { arena, .. } => arena,
            Load::Warm(_) => {
                self.arena.wait_for_beat(BOOT_LIMIT).map_err(silent)?;
                // Its code must be translated again.
                return interrupt::sleep(AWAKE + measure::BEFORE);
            }
        };
        settle(&mut self.arena, workload)
    }

    /// Returns when the guest of a move that began then was first heard from the destination.
    fn switched_at(&self, began: Instant) -> Option<Instant> {
        let switched_at = self.arena.origins().switched_at;
        switched_at.filter(|at| *at >= began)
    }

    /// Waits until the guest was observed so long after the switchover. Where content was missing
    /// it may be heard only after the end of the move.
    fn observe_on(&self, began: Instant, observe: Duration) -> Result<(), LabError> {
        wait_until(COMMAND_LIMIT, || {
            interrupt::requested() || self.switched_at(began).is_some()
        });
        let until = self.switched_at(began).map(|at| at + observe);
        let until = until.unwrap_or_else(Instant::now);
        interrupt::sleep(until.saturating_duration_since(Instant::now()))
    }

    /// As [`verify`], with checks by the workload beside the arena and the clients; records the
    /// results, and the observations of the move, in the row.
    fn verify(
        &mut self,
        case: &Case,
        [began, ended]: [Instant; 2],
        row: &mut MoveRow,
    ) -> Result<(), LabError> {
        if row.is_moved() && !case.observe.is_zero() {
            self.observe_on(began, case.observe)?;
        }
        let pages = verify(&mut self.arena)?;
        let seen = self.clients.take().map(Clients::finish);
        let verified = match &case.load {
            Load::Warm(warm) if warm.has_program => pages.and_then(|pages| {
                let (errors, first) = self.arena.check_program(CHECK_LIMIT)?;
                if errors > 0 {
                    say(&format!(
                        "the guest's workload found {errors} errors: {first}"
                    ));
                }
                Ok(pages + errors)
            }),
            _ => pages,
        };
        note_verified(row, verified);
        row.note_clients(seen.as_ref(), began, ended);
        let beats = self.arena.beats();
        let observed = measure::observe(&beats, began, ended);
        if let Some((at, observed)) = self.switched_at(began).zip(observed.as_ref()) {
            let switched = measure::switched(&beats, at, case.observe);
            row.note_switched(switched, observed.usual_gap_ms);
        }
        row.note_observed(observed);
        Ok(())
    }
}

/// Observes the guest a little longer, stops its workload and lets it verify all its pages; returns
/// the number of errors of all its checks. A guest that does not answer is an error.
///
/// # Errors
/// When the user interrupts.
pub fn verify(arena: &mut Arena) -> Result<Result<u64, ArenaError>, LabError> {
    interrupt::sleep(measure::AFTER)?;
    let verified = arena
        .set_rate(0, COMMAND_LIMIT)
        .and_then(|()| arena.verify(COMMAND_LIMIT))
        .and_then(|_| arena.wait_for_beat(COMMAND_LIMIT))
        .map(|beat| beat.errors);
    Ok(verified)
}

/// Records the guest's errors; a guest that does not answer counts as not moved.
pub fn note_verified<P>(row: &mut MoveRow<P>, verified: Result<u64, ArenaError>) {
    match verified {
        Ok(errors) => row.verify_errors = Some(errors),
        Err(error) => row.outcome = format!("failed: after the move {error}"),
    }
}

fn silent(error: ArenaError) -> LabError {
    LabError::Answer {
        what: "the guest".to_owned(),
        message: error.to_string(),
    }
}

/// Starts the QEMUs of the laboratory's own guests.
#[derive(Debug)]
pub struct Launcher<'a> {
    /// The laboratory, whose first two hosts it uses.
    pub lab: &'a Lab,
    /// The boot files of guests.
    pub files: &'a KernelFiles,
    /// QEMU at the source and at the destination.
    pub qemus: [PathBuf; 2],
    /// `kvm` or `tcg`.
    pub accelerator: &'a str,
    /// The files of all disks of the guest, by the images' names.
    pub disks: Vec<(String, PathBuf)>,
}

impl Launcher<'_> {
    /// Starts a QEMU on one of the two hosts.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(
        &self,
        host: usize,
        guest: &GuestDescription,
        begin: Begin<'_>,
    ) -> Result<PeerQemu, LabError> {
        let host = PeerHost {
            host: self.lab.host(host)?,
            qemu: &self.qemus[host],
            accelerator: self.accelerator,
            files: self.files,
            disks: &self.disks,
            local: &[],
        };
        PeerQemu::start(&host, guest, begin)
    }

    /// Returns the files of a guest's disks.
    pub fn disks_of(&self, guest: &GuestDescription) -> impl Iterator<Item = &PathBuf> {
        let of_guest =
            |(image, _): &&(String, PathBuf)| guest.disks.iter().any(|disk| disk.image == *image);
        self.disks.iter().filter(of_guest).map(|(_, path)| path)
    }

    /// Copies a disk in place of a guest's; writes of earlier cases' guests are gone.
    ///
    /// # Errors
    /// When it cannot be copied.
    pub fn lay_out(&self, disk: &Path, guest: &GuestDescription) -> Result<(), LabError> {
        for (_, old) in &self.disks {
            match fs::remove_file(old) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(error).during(|| format!("remove {}", old.display()));
                }
                _ => {}
            }
        }
        let mut places = self.disks_of(guest);
        places.try_for_each(|place| warm::copy(disk, place))
    }

    /// Starts the guest of a case on the first host.
    fn source(&self, case: &Case) -> Result<PeerQemu, LabError> {
        let Load::Warm(warm) = &case.load else {
            return self.start(0, &case.guest, Begin::Boot);
        };
        self.lay_out(&warm.disk, &case.guest)?;
        let mut source = self.start(0, &case.guest, Begin::Saved(&warm.state))?;
        source.wake()?;
        Ok(source)
    }

    /// Starts the guest's clients, where it has any.
    ///
    /// # Errors
    /// When they cannot be started.
    pub fn clients(&self, has_clients: bool) -> Result<Option<Clients>, LabError> {
        let clients = has_clients.then(|| self.lab.clients().and_then(Clients::start));
        clients.transpose()
    }

    /// Returns a guest with the arena of a channel, and its clients.
    fn watch(&self, case: &Case, arena: Arena) -> Result<Watched, LabError> {
        let has_clients = matches!(&case.load, Load::Warm(warm) if warm.has_clients);
        let clients = self.clients(has_clients)?;
        Ok(Watched { arena, clients })
    }
}

/// Moves guests with QEMU's own migration.
#[derive(Debug)]
pub struct PeerMover<'a> {
    /// Starts both QEMUs.
    pub launcher: &'a Launcher<'a>,
}

impl PeerMover<'_> {
    /// Starts the guest, moves it, and measures.
    ///
    /// # Errors
    /// When there is nothing to move, or a QEMU dies; a failed move is a row.
    pub fn run(&self, case: &Case, system: PeerSystem) -> Result<MoveRow, LabError> {
        let mut row = MoveRow::of(case, system.name(), system.strategy());
        let lab = self.launcher.lab;
        let mut source = self.launcher.source(case)?;
        let arena = attached(source.channel())?;
        let mut destination = self.launcher.start(1, &case.guest, Begin::Incoming)?;
        attach(&arena, destination.channel())?;
        let mut guest = self.launcher.watch(case, arena)?;
        guest.settle(&case.load)?;

        let link = lab.link(0, 1)?;
        let before = link.stats()?;
        let meters = [meter(source.pid())?, meter(destination.pid())?];
        let asked = PeerMove {
            system,
            destination: lab.host(1)?.address(),
            downtime_ms: case.downtime_ms,
            limit: case.limit,
            force_after: case.force_after,
        };
        let result = asked.run(&mut source, &mut destination)?;
        row.note_link(&before, &link.stats()?);
        let [source_used, destination_used] = meters.map(ProcessMeter::finish);
        row.cpu_s.source_qemu = source_used.map(|used: Used| used.cpu_s);
        row.cpu_s.destination_qemu = destination_used.map(|used| used.cpu_s);
        row.total_ms = Some(ms(result.began, result.ended));
        row.memory_bytes = result.memory_bytes;
        row.passes = result.passes;
        row.outcome = match result.failure {
            None if result.is_forced => FORCED.to_owned(),
            None => "completed".to_owned(),
            Some(why) => format!("failed: {why}"),
        };
        guest.verify(case, [result.began, result.ended], &mut row)?;
        Ok(row)
    }
}

/// Returns milliseconds between two moments.
pub fn ms(began: Instant, ended: Instant) -> f64 {
    (ended - began).as_secs_f64() * 1000.0
}

/// Returns an arena that listens on a channel's socket.
///
/// # Errors
/// When no thread can be started.
pub fn attached(channel: &Path) -> Result<Arena, LabError> {
    let arena = Arena::new();
    attach(&arena, channel)?;
    Ok(arena)
}

/// Listens on another socket, which need not exist yet.
///
/// # Errors
/// When no thread can be started.
pub fn attach(arena: &Arena, channel: &Path) -> Result<(), LabError> {
    arena.attach(channel).map_err(|source| LabError::Io {
        doing: format!("listen on {}", channel.display()),
        source,
    })
}

/// Starts to observe a process.
///
/// # Errors
/// When no thread can be started.
pub fn meter(pid: u32) -> Result<ProcessMeter, LabError> {
    ProcessMeter::start(pid).map_err(|source| LabError::Io {
        doing: format!("watch process {pid}"),
        source,
    })
}
