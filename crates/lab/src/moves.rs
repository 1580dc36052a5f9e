//! One measured move of a guest between two hosts, by whichever system, and the row it gives.

use crate::arena::{Arena, ArenaError, Workload};
use crate::bench::document::AskedLink;
use crate::error::LabError;
use crate::guest::{CHANNEL_NAME, KernelFiles, Tiny};
use crate::interrupt;
use crate::lab::Lab;
use crate::link::spec::LinkSpec;
use crate::link::stats::LinkStats;
use crate::measure::{self, Observed, ProcessMeter, Stalls, Used};
use crate::peer::{PeerHost, PeerMove, PeerQemu, PeerSystem};
use crate::product::{Finished, Product, channel_socket};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A guest under TCG is up in 2 s, on a machine that does nothing else.
const BOOT_LIMIT: Duration = Duration::from_secs(120);
const COMMAND_LIMIT: Duration = Duration::from_secs(120);
/// What a command may take beyond the move itself.
const FINISH_LIMIT: Duration = Duration::from_secs(60);
const PAGE_BYTES: f64 = 4096.0;

/// What is moved, and how it is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// The guest.
    pub guest: Tiny,
    /// What it does meanwhile.
    pub workload: Workload,
    /// The workload's dirty rate as a share of the link's rate.
    pub dirty_share: f64,
    /// The link.
    pub link: LinkSpec,
    /// The downtime asked for.
    pub downtime_ms: u64,
    /// When a move that does not converge is given up.
    pub limit: Duration,
    /// Which repeat this is, from 1.
    pub repeat: u32,
}

impl Case {
    /// Pages per second that make up a share of a link's rate.
    pub fn pages_per_s(link: LinkSpec, share: f64) -> u64 {
        (link.rate_bps as f64 / 8.0 * share / PAGE_BYTES).round() as u64
    }
}

/// A row of the benches that move guests. What was not measured is null.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MoveRow {
    /// Who moved the guest.
    pub system: String,
    /// The link as asked for.
    pub link: AskedLink,
    /// The strategy.
    pub strategy: String,
    /// What the arena holds.
    pub workload: String,
    /// More of what it does.
    pub parameters: Parameters,
    /// Which repeat, from 1.
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
    /// From the command to the guest running at the destination.
    pub total_ms: Option<f64>,
    /// The downtime asked for.
    pub asked_downtime_ms: u64,
    /// The downtime, from outside.
    pub downtime_ms: Option<f64>,
    /// Gaps in the guest's heartbeats.
    pub stalls: Option<Stalls>,
    /// The guest's work before the move.
    pub work_before_per_s: Option<f64>,
    /// During it.
    pub work_during_per_s: Option<f64>,
    /// After it.
    pub work_after_per_s: Option<f64>,
    /// What the system said beforehand.
    pub predicted: Predicted,
    /// CPU time.
    pub cpu_s: CpuRow,
    /// Most memory that the agents made.
    pub agent_peak_bytes: PeakRow,
    /// Bytes read from storage that is not the destination's own.
    pub storage_bytes: Option<u64>,
    /// Pages that the guest itself found wrong.
    pub verify_errors: Option<u64>,
    /// Passes over memory.
    pub passes: Option<u64>,
}

/// What the guest is and does.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Parameters {
    /// Dirty rate as a share of the link's rate.
    pub dirty_rate_of_link: f64,
    /// The same in pages per second.
    pub pages_per_s: u64,
    /// Bytes of pages in the arena.
    pub arena_bytes: u64,
    /// The part that is rewritten.
    pub working_set_bytes: u64,
    /// Bytes changed in a page.
    pub write_bytes: u64,
    /// The guest's machine type.
    pub machine: String,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// The guest's memory.
    pub guest_memory_bytes: u64,
}

/// What was predicted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Predicted {
    /// Time of the whole move.
    pub total_ms: Option<f64>,
    /// Downtime.
    pub downtime_ms: Option<f64>,
    /// Downtime at most.
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
    /// A row that says what is moved, and nothing yet of how it went.
    pub fn of(case: &Case, system: &str, strategy: &str) -> Self {
        Self {
            system: system.to_owned(),
            link: case.link.into(),
            strategy: strategy.to_owned(),
            workload: case.workload.content.clone(),
            parameters: Parameters {
                dirty_rate_of_link: case.dirty_share,
                pages_per_s: case.workload.pages_per_s,
                arena_bytes: case.workload.arena_bytes,
                working_set_bytes: case.workload.working_set_bytes,
                write_bytes: case.workload.write_bytes,
                machine: case.guest.description().machine,
                vcpus: case.guest.vcpus,
                guest_memory_bytes: case.guest.memory_mib << 20,
            },
            repeat: case.repeat,
            outcome: String::new(),
            link_bytes: None,
            link_bytes_back: None,
            memory_bytes: None,
            disk_bytes: None,
            total_ms: None,
            asked_downtime_ms: case.downtime_ms,
            downtime_ms: None,
            stalls: None,
            work_before_per_s: None,
            work_during_per_s: None,
            work_after_per_s: None,
            predicted: Predicted::default(),
            cpu_s: CpuRow::default(),
            agent_peak_bytes: PeakRow::default(),
            storage_bytes: None,
            verify_errors: None,
            passes: None,
        }
    }

    /// Notes what the link carried between two readings of its counters.
    pub fn note_link(&mut self, before: &LinkStats, after: &LinkStats) {
        let carried = |after: u64, before: u64| Some(after.saturating_sub(before));
        self.link_bytes = carried(after.forth.carried_bytes, before.forth.carried_bytes);
        self.link_bytes_back = carried(after.back.carried_bytes, before.back.carried_bytes);
    }

    /// Notes what the product said of its move.
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
        self.passes = report.passes.map(u64::from);
        if let Some(predicted) = &report.predicted {
            let number = |number: Option<u64>| number.map(|number| number as f64);
            self.predicted = Predicted {
                total_ms: number(predicted.total_ms),
                downtime_ms: number(predicted.downtime_ms),
                downtime_at_most_ms: number(predicted.downtime_at_most_ms),
                link_bytes: predicted.link_bytes,
            };
        }
    }

    /// Notes what was seen of the guest; its outcome is known before.
    pub fn note_observed(&mut self, observed: Option<Observed>) {
        let Some(observed) = observed else { return };
        // The longest gap of a guest that stayed where it was is no downtime.
        self.downtime_ms = self.is_completed().then_some(observed.downtime_ms);
        self.stalls = Some(observed.stalls);
        self.work_before_per_s = Some(observed.work_before_per_s);
        self.work_during_per_s = Some(observed.work_during_per_s);
        self.work_after_per_s = observed.work_after_per_s;
    }

    /// Whether the guest was moved and its checks could be asked.
    pub fn is_completed(&self) -> bool {
        self.outcome == "completed"
    }
}

/// Starts the workload and lets the guest settle until its usual rhythm is known.
///
/// # Errors
/// When the guest does not come up.
pub fn settle(arena: &mut Arena, workload: &Workload) -> Result<(), LabError> {
    arena.wait_for_beat(BOOT_LIMIT).map_err(silent)?;
    arena.start(workload, COMMAND_LIMIT).map_err(silent)?;
    interrupt::sleep(measure::BEFORE)
}

/// Watches the guest a little longer, stops its workload and lets it verify all its pages: how
/// many were wrong, in all its checks. An error is a guest that does not answer.
///
/// # Errors
/// When somebody asked to end.
pub fn verify(arena: &mut Arena) -> Result<Result<u64, ArenaError>, LabError> {
    interrupt::sleep(measure::AFTER)?;
    let verified = arena
        .set_rate(0, COMMAND_LIMIT)
        .and_then(|()| arena.verify(COMMAND_LIMIT))
        .and_then(|_| arena.wait_for_beat(COMMAND_LIMIT))
        .map(|beat| beat.errors);
    Ok(verified)
}

/// Notes what the guest found; one that does not answer any more was not moved.
pub fn note_verified(row: &mut MoveRow, verified: Result<u64, ArenaError>) {
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

/// Moves guests by QEMU's own means.
#[derive(Debug)]
pub struct PeerMover<'a> {
    /// The laboratory, whose first two hosts it uses.
    pub lab: &'a Lab,
    /// What guests boot from.
    pub files: &'a KernelFiles,
    /// QEMU at the source and at the destination.
    pub qemus: [PathBuf; 2],
    /// `kvm` or `tcg`.
    pub accelerator: &'a str,
}

impl PeerMover<'_> {
    /// Boots the guest, moves it, and measures.
    ///
    /// # Errors
    /// When there is nothing to move, or a QEMU dies; a move that fails is a row.
    pub fn run(&self, case: &Case, system: PeerSystem) -> Result<MoveRow, LabError> {
        let mut row = MoveRow::of(case, system.name(), "precopy");
        let guest = case.guest.description();
        let hosts = [
            self.peer_host(0, &self.qemus[0])?,
            self.peer_host(1, &self.qemus[1])?,
        ];
        let mut source = PeerQemu::start(&hosts[0], &guest, self.files, false)?;
        let mut arena = attached(source.channel())?;
        let mut destination = PeerQemu::start(&hosts[1], &guest, self.files, true)?;
        attach(&arena, destination.channel())?;
        settle(&mut arena, &case.workload)?;

        let link = self.lab.link(0, 1)?;
        let before = link.stats()?;
        let meters = [meter(source.pid())?, meter(destination.pid())?];
        let asked = PeerMove {
            system,
            destination: self.lab.host(1)?.address(),
            downtime_ms: case.downtime_ms,
            limit: case.limit,
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
            None => "completed".to_owned(),
            Some(why) => format!("failed: {why}"),
        };
        note_verified(&mut row, verify(&mut arena)?);
        let observed = measure::observe(&arena.beats(), result.began, result.ended);
        row.note_observed(observed);
        Ok(row)
    }

    fn peer_host<'a>(&'a self, index: usize, qemu: &'a Path) -> Result<PeerHost<'a>, LabError> {
        let host = self.lab.host(index)?;
        Ok(PeerHost {
            host,
            qemu,
            accelerator: self.accelerator,
        })
    }
}

/// Moves guests by Longhaul.
#[derive(Debug)]
pub struct LonghaulMover<'a> {
    /// The laboratory, whose first two hosts it uses.
    pub lab: &'a Lab,
    /// Longhaul on its hosts.
    pub product: &'a Product,
}

impl LonghaulMover<'_> {
    /// Boots the guest on the first host, moves it to the second, measures, and ends it.
    ///
    /// # Errors
    /// When there is nothing to move, or an agent dies; a move that fails is a row.
    pub fn run(&self, case: &Case) -> Result<MoveRow, LabError> {
        let result = self
            .boot(case)
            .and_then(|mut arena| self.move_once(case, &mut arena, [0, 1], Show::Nothing));
        let ended = self.end(case);
        let row = result?;
        ended.map(|()| row)
    }

    /// Boots the guest on the first host and lets it settle.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn boot(&self, case: &Case) -> Result<Arena, LabError> {
        let name = &case.guest.name;
        let mut arena = attached(&channel_socket(self.lab.host(0)?, name, CHANNEL_NAME))?;
        attach(
            &arena,
            &channel_socket(self.lab.host(1)?, name, CHANNEL_NAME),
        )?;
        self.product
            .start_guest(self.lab, 0, &case.guest.description())?;
        settle(&mut arena, &case.workload)?;
        Ok(arena)
    }

    /// Ends the guest, wherever it is.
    ///
    /// # Errors
    /// When neither host could.
    pub fn end(&self, case: &Case) -> Result<(), LabError> {
        // On which of them it is depends on how the move went; the other refuses.
        let [here, there] = [0, 1].map(|host| self.product.stop_guest(host, &case.guest.name));
        here.or(there)
    }

    /// Moves the guest between two hosts, lets it verify its memory, and measures. Its workload
    /// is stopped afterwards.
    ///
    /// # Errors
    /// When an agent dies; a move that fails is a row.
    pub fn move_once(
        &self,
        case: &Case,
        arena: &mut Arena,
        [from, to]: [usize; 2],
        show: Show,
    ) -> Result<MoveRow, LabError> {
        let mut row = MoveRow::of(case, "longhaul", "precopy");
        let name = &case.guest.name;
        let link = self.lab.link(from, to)?;
        let before = link.stats()?;
        let agents = [
            self.product.agent(from)?.pid(),
            self.product.agent(to)?.pid(),
        ];
        let meters = [meter(agents[0])?, meter(agents[1])?];
        let source = self.product.guest(from, name)?.and_then(|guest| guest.pid);
        let source_meter = source.map(meter).transpose()?;
        let downtime = format!("{}ms", case.downtime_ms);
        let (target, words) = (self.lab.host(to)?, ["--downtime", downtime.as_str()]);
        let finished = match show {
            Show::Nothing => {
                let running = self.product.migrate(from, name, target, &words)?;
                running.finish(case.limit + FINISH_LIMIT)?
            }
            Show::Display => self.product.migrate_shown(from, name, target, &words)?,
        };
        row.note_link(&before, &link.stats()?);
        if from > to {
            std::mem::swap(&mut row.link_bytes, &mut row.link_bytes_back);
        }
        let [source_used, destination_used] = meters.map(ProcessMeter::finish);
        row.cpu_s.source_agent = source_used.map(|used| used.cpu_s);
        row.cpu_s.destination_agent = destination_used.map(|used| used.cpu_s);
        row.agent_peak_bytes.source = source_used.map(|used| used.peak_bytes);
        row.agent_peak_bytes.destination = destination_used.map(|used| used.peak_bytes);
        row.cpu_s.source_qemu = source_meter
            .and_then(ProcessMeter::finish)
            .map(|used| used.cpu_s);
        let moved = self.product.guest(to, name)?.and_then(|guest| guest.pid);
        row.cpu_s.destination_qemu = moved.and_then(measure::cpu_s);
        row.note_finished(&finished);
        note_verified(&mut row, verify(arena)?);
        row.note_observed(measure::observe(
            &arena.beats(),
            finished.began,
            finished.ended,
        ));
        Ok(row)
    }
}

/// What people see of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Show {
    /// Nothing.
    Nothing,
    /// The product's own display.
    Display,
}

/// Milliseconds between two moments.
pub fn ms(began: Instant, ended: Instant) -> f64 {
    (ended - began).as_secs_f64() * 1000.0
}

/// An arena that listens on a channel's socket.
///
/// # Errors
/// When no thread can be started.
pub fn attached(channel: &Path) -> Result<Arena, LabError> {
    let arena = Arena::new();
    attach(&arena, channel)?;
    Ok(arena)
}

/// Listens on one more socket, also one that is not there yet.
///
/// # Errors
/// When no thread can be started.
pub fn attach(arena: &Arena, channel: &Path) -> Result<(), LabError> {
    arena.attach(channel).map_err(|source| LabError::Io {
        doing: format!("listen on {}", channel.display()),
        source,
    })
}

/// Watches a process from now on.
///
/// # Errors
/// When no thread can be started.
pub fn meter(pid: u32) -> Result<ProcessMeter, LabError> {
    ProcessMeter::start(pid).map_err(|source| LabError::Io {
        doing: format!("watch process {pid}"),
        source,
    })
}
