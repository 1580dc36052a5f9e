//! Runs one case: a move, a failure in the middle of it, and all checks afterwards.
//!
//! ```text
//! arm -> move -> the point is reached -> fail -> [meanwhile] -> repair -> settled -> judged
//! ```

use super::case::{Back, Case, Release, Victim};
use super::ground::{Ground, LIMIT};
use super::left;
use super::point::{Side, Step};
use super::predict::{Meanwhile, Place, meanwhile, places};
use longhaul_api::{GuestState, Outcome, Phase, Progress};
use longhaul_lab::error::{During, LabError};
use longhaul_lab::interrupt;
use longhaul_lab::process::{kill_all, wait_until};
use longhaul_lab::product::Move;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// A limit with which the guest is stopped after its first pass on a busy machine, too.
const DOWNTIME: &str = "1500ms";
/// Longer than the requested patience.
const AWAY: Duration = Duration::from_millis(2500);
/// Longer than a heartbeat takes on a busy machine.
const UNDER_WAY: Duration = Duration::from_millis(500);
/// A cut that need not be noticed.
const SHORT_CUT: Duration = Duration::from_millis(800);
/// A cut that lasts until it is repaired.
const LONG_CUT: Duration = Duration::from_secs(3600);
/// How long the guest must be heard from one host only.
const WINDOW: Duration = Duration::from_millis(150);
/// What the destination says when missing memory is lost.
const LOST: &str = "the source has lost";
/// The polling interval of the agents.
const ASK_EVERY: Duration = Duration::from_millis(40);

/// The reason of a failure, in words.
pub(super) type Fault = String;

/// A case that failed.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) why: Fault,
    /// The move completed without reaching the point, so nothing was tested: for example, the
    /// report of the guest's clock is lost with a connection that ends just then.
    pub(super) missed: bool,
}

/// Runs a case. A failure is described in words; the ground is of no use afterwards. QEMU may be
/// made to converge by itself on the way.
pub(super) fn run(ground: &mut Ground, case: &Case, converged: bool) -> Result<Place, Failed> {
    let source = ground.at;
    let host = match case.point.side {
        Side::Source => source,
        Side::Destination => 1 - source,
    };
    let mut trial = Trial {
        case,
        converged,
        said: 0,
        source,
        lock: None,
        missed: false,
        ground,
    };
    let tried = trial.run(host);
    tried.map_err(|why| Failed {
        why,
        missed: trial.missed,
    })
}

struct Trial<'a> {
    case: &'a Case,
    converged: bool,
    ground: &'a mut Ground,
    source: usize,
    /// The length of the log of the agent that passes the point, before the case.
    said: u64,
    /// A lock on the disk, so that a QEMU cannot take it.
    lock: Option<File>,
    missed: bool,
}

/// The requested operation.
enum Asked {
    Move(Box<Move>),
    Plan(Child),
}

fn words(error: LabError) -> Fault {
    error.to_string()
}

impl Trial<'_> {
    fn run(&mut self, host: usize) -> Result<Place, Fault> {
        self.said = self.ground.log_bytes(host).map_err(words)?;
        let before = self.ground.arena.origins();
        self.ground.arena.forget_beats();
        self.arm().map_err(words)?;
        let mut asked = self.ask().map_err(words)?;
        self.lead_up(&mut asked)?;
        self.wait_for_point(&mut asked)?;
        self.fail().map_err(words)?;
        if let Some(expected) = meanwhile(self.case) {
            self.judge_meanwhile(expected)?;
        }
        self.mend().map_err(words)?;
        self.end_without_memory()?;
        finish(asked).map_err(words)?;
        let place = self.settle()?;
        self.judge(place, &before)?;
        Ok(place)
    }

    fn host(&self, side: Side) -> usize {
        match side {
            Side::Source => self.source,
            Side::Destination => 1 - self.source,
        }
    }

    /// Returns whether the victim is the agent that passes the point. Where the source must be
    /// slowed first, the agent is held instead, and killed then: its earlier messages may still be
    /// on their way.
    fn kills_itself(&self) -> bool {
        let victims = self.case.kind.victim.agents();
        victims.contains(&self.case.point.side) && !left::comes_slowly(self.case)
    }

    /// Returns the fail points of a side's agent on the way to the point, and at it.
    fn arms(&self, side: Side, restarted: bool) -> Result<String, LabError> {
        let point = &self.case.point;
        let hold = format!("hold:{}", self.ground.marker()?.display());
        let mut arms = Vec::new();
        if self.converged && side == Side::Source {
            arms.push("source:stopping:converged=pass".to_owned());
        }
        match (self.case.kind.step, side) {
            (Step::Refusing, Side::Destination) => {
                arms.push("destination:before-record:began=fail".to_owned());
            }
            (Step::Resuming, Side::Source) => {
                arms.push("source:before-send:start=disconnect".to_owned());
            }
            (Step::Recovering, Side::Source) if !restarted => {
                return Ok("source:after-record:released=kill".to_owned());
            }
            (Step::Returning, Side::Destination) => {
                arms.push(format!("destination:after-record:committed={hold}"));
            }
            (Step::Pulling, Side::Source)
                if point.needs_another_connection() && !self.case.kind.disks.leaves() =>
            {
                arms.push("source:after-receipt:committed=disconnect".to_owned());
            }
            _ => {}
        }
        arms.extend(left::arm(self.case, side, self.ground)?);
        if side == point.side {
            let action = match self.case.kind.victim {
                Victim::Record => "fail",
                Victim::Connection => "disconnect",
                _ if self.kills_itself() => "kill",
                _ => &hold,
            };
            arms.push(format!("{}={action}", point.name));
        }
        Ok(arms.join(","))
    }

    fn arm(&mut self) -> Result<(), LabError> {
        remove(&self.ground.marker()?)?;
        remove(&left::marker(self.ground)?)?;
        for side in [Side::Source, Side::Destination] {
            let arms = self.arms(side, false)?;
            if !arms.is_empty() {
                self.ground.restart(self.host(side), &arms)?;
            }
        }
        Ok(())
    }

    fn ask(&self) -> Result<Asked, LabError> {
        let ground = &self.ground;
        let to = ground.lab.host(1 - self.source)?;
        if self.case.kind.step == Step::Asking {
            let mut command = ground.product.agent(self.source)?.command()?;
            command.args(["plan", &ground.guest, "--to", to.name()]);
            command.stdout(Stdio::null()).stderr(Stdio::null());
            let child = command.spawn().during(|| "ask for a plan".to_owned())?;
            return Ok(Asked::Plan(child));
        }
        let patience = match self.case.kind.step {
            Step::Resuming => "20s",
            _ => "2s",
        };
        let disks = self.case.kind.disks.name();
        let mut more = vec!["--patience", patience, "--downtime", DOWNTIME];
        more.extend(["--disks", disks]);
        let memory = self.case.kind.memory;
        if memory.follows() {
            more.extend(["--strategy", memory.name()]);
        }
        if self.case.compares() {
            more.push("--verify");
        }
        if self.case.kind.release == Release::Early {
            more.push("--early-release");
        }
        if self.case.kind.step == Step::Cancelling {
            more.extend(["--bandwidth", "20mbit"]);
        }
        let moving = ground
            .product
            .migrate(self.source, &ground.guest, to, &more)?;
        Ok(Asked::Move(Box::new(moving)))
    }

    /// Establishes the conditions for reaching the point.
    fn lead_up(&mut self, asked: &mut Asked) -> Result<(), Fault> {
        let Asked::Move(moving) = asked else {
            return Ok(());
        };
        match self.case.kind.step {
            Step::Cancelling => {
                if !moving.wait_for_phase(Phase::Precopy, LIMIT) {
                    return Err(format!("nothing to cancel: {}", moving.so_far().why()));
                }
                let mut cancel = self
                    .ground
                    .product
                    .agent(self.source)
                    .map_err(words)?
                    .command();
                let cancel = cancel.as_mut().map_err(|error| error.to_string())?;
                cancel.args(["cancel", &self.ground.guest]);
                cancel.stdout(Stdio::null()).stderr(Stdio::null());
                // It may wait for an agent that is held; it ends with it.
                cancel.spawn().map(drop).map_err(|error| error.to_string())
            }
            Step::Recovering => {
                let source = self.source;
                let agent = self.ground.product.agent_mut(source).map_err(words)?;
                if !wait_until(LIMIT, || agent.has_ended()) {
                    return Err("the source's agent was not killed at RELEASED".to_owned());
                }
                let arms = self.arms(Side::Source, true).map_err(words)?;
                self.ground.restart(source, &arms).map_err(words)
            }
            Step::Returning => {
                let marker = self.ground.marker().map_err(words)?;
                if !wait_until(LIMIT, || marker.exists()) {
                    return Err("the destination did not commit".to_owned());
                }
                self.lock = Some(self.take_disk().map_err(words)?);
                remove(&marker).map_err(words)
            }
            _ => left::lead_up(self.case, self.ground, self.source).map_err(words),
        }
    }

    /// Locks the disk as another process would, so that the destination's QEMU cannot open it.
    fn take_disk(&self) -> Result<File, LabError> {
        let path = self.ground.disk.image(1 - self.source);
        let taking = || format!("lock {}", path.display());
        let file = File::options()
            .read(true)
            .write(true)
            .open(&path)
            .during(taking)?;
        let whole = libc::flock {
            l_type: libc::F_WRLCK as i16,
            l_whence: libc::SEEK_SET as i16,
            l_start: 0,
            l_len: 0,
            l_pid: 0,
        };
        let taken = wait_until(LIMIT, || {
            fcntl(&file, FcntlArg::F_OFD_SETLK(&whole)).is_ok()
        });
        if taken {
            return Ok(file);
        }
        Err(LabError::Which(format!(
            "{} is locked by others",
            path.display()
        )))
    }

    fn wait_for_point(&mut self, asked: &mut Asked) -> Result<(), Fault> {
        let host = self.host(self.case.point.side);
        let kills_itself = self.kills_itself();
        let says_so = matches!(self.case.kind.victim, Victim::Record | Victim::Connection);
        let marker = self.ground.marker().map_err(words)?;
        let deadline = Instant::now() + LIMIT;
        let mut ended_at = None;
        loop {
            interrupt::check().map_err(words)?;
            let reached = match (kills_itself, says_so) {
                (true, _) => {
                    let agent = self.ground.product.agent_mut(host).map_err(words)?;
                    agent.has_ended()
                }
                (_, true) => {
                    let fired = format!("fail point fires point=\"{}\"", self.case.point.name);
                    let said = self.ground.log_since(host, self.said).map_err(words)?;
                    said.contains(&fired)
                }
                _ => marker.exists(),
            };
            if reached {
                break;
            }
            // The requested operation may end just before the last point.
            if ended_at.is_none() && asked.has_ended() {
                ended_at = Some(Instant::now());
            }
            let over = ended_at.is_some_and(|at: Instant| at.elapsed() > Duration::from_secs(5));
            if over || Instant::now() > deadline {
                let said = asked.said();
                self.missed = over && asked.is_completed();
                return Err(format!("{} was not reached: {said}", self.case.point.name));
            }
            std::thread::sleep(Duration::from_millis(3));
        }
        // The disk is free again for its final owner.
        self.lock = None;
        Ok(())
    }

    /// Applies the failure to a victim other than the agent itself, and lets the others go on.
    fn fail(&mut self) -> Result<(), LabError> {
        let victim = self.case.kind.victim;
        for side in victim.agents() {
            let host = self.host(*side);
            self.ground.product.agent_mut(host)?.kill()?;
        }
        if let Some(side) = victim.qemu() {
            let pids = self.ground.qemus(self.host(side))?;
            if pids.is_empty() {
                let side = format!("{side:?}").to_lowercase();
                return Err(LabError::Which(format!("no QEMU at the {side} to kill")));
            }
            kill_all(&pids)?;
        }
        if let Some((side, part)) = victim.front() {
            let host = self.host(side);
            kill_found(
                || self.ground.fronts(host, part),
                &format!("no disk export at host {host} has the part `{part}`"),
            )?;
        }
        if victim == Victim::PageServer {
            let host = self.host(Side::Destination);
            let pids = self.ground.page_servers(host)?;
            // It ends with the last missing page. The link did not slow that enough.
            self.missed = pids.is_empty();
            if self.missed {
                return Err(LabError::Which(format!("no page server at host {host}")));
            }
            kill_all(&pids)?;
        }
        if victim == Victim::Link {
            let time = match self.case.kind.back {
                Back::AtOnce => SHORT_CUT,
                Back::Later => LONG_CUT,
            };
            self.ground.lab.link(0, 1)?.cut(time)?;
        }
        remove(&self.ground.marker()?)
    }

    /// Checks that the source reports the expected state while the destination is away.
    fn judge_meanwhile(&mut self, expected: Meanwhile) -> Result<(), Fault> {
        let expected = match expected {
            Meanwhile::Runs => GuestState::Running,
            Meanwhile::InDoubt => GuestState::InDoubt,
            Meanwhile::Silent => return self.judge_silence(),
            Meanwhile::Fetches => return self.judge_fetching(),
        };
        let mut said = None;
        let as_expected = wait_until(LIMIT, || {
            let guest = self.ground.product.guest(self.source, &self.ground.guest);
            said = guest.ok().flatten().map(|guest| guest.state);
            said == Some(expected)
        });
        if as_expected {
            return Ok(());
        }
        Err(format!(
            "while the destination is away the source says {said:?}, not {expected:?}"
        ))
    }

    /// Checks that a guest that was released and not committed runs nowhere, however long its agent
    /// is away.
    fn judge_silence(&self) -> Result<(), Fault> {
        // Earlier messages may still be on their way.
        interrupt::sleep(UNDER_WAY).map_err(words)?;
        let before = self.ground.arena.last_beat();
        interrupt::sleep(AWAY).map_err(words)?;
        let after = self.ground.arena.last_beat();
        if before == after {
            return Ok(());
        }
        Err(format!(
            "a released guest was resumed while its agent was away: {before:?}, {after:?}"
        ))
    }

    /// Checks that the destination reports missing blocks while the source is away.
    fn judge_fetching(&self) -> Result<(), Fault> {
        interrupt::sleep(AWAY).map_err(words)?;
        let (product, guest) = (&self.ground.product, &self.ground.guest);
        let latest = product.latest_migration(1 - self.source, guest);
        let latest = latest.map_err(words)?;
        let memory = self.case.kind.memory.follows();
        let left = |progress: &Progress| -> u64 {
            let regions = progress.regions.iter();
            let follow = regions.filter(|region| region.disk || memory);
            follow.map(|region| region.blocks_pending).sum()
        };
        match &latest {
            Some(moving)
                if moving.outcome.is_none() && moving.progress.as_ref().map_or(0, left) > 0 =>
            {
                Ok(())
            }
            other => Err(format!(
                "while the source is away the destination does not say that something is left: \
                 {other:?}"
            )),
        }
    }

    fn mend(&mut self) -> Result<(), LabError> {
        left::mend(self.case, self.ground, self.source)?;
        if self.case.kind.victim == Victim::Link && self.case.kind.back == Back::Later {
            self.ground.lab.link(0, 1)?.heal()?;
        }
        let agents = self.case.kind.victim.agents();
        if self.case.kind.back == Back::Later
            && meanwhile(self.case).is_none()
            && !agents.is_empty()
        {
            // Longer than the patience of the waiting side.
            interrupt::sleep(AWAY)?;
        }
        for side in agents {
            self.ground.restart(self.host(*side), "")?;
        }
        Ok(())
    }

    /// Ends a guest as an operator would whose missing memory is lost with the source's QEMU.
    fn end_without_memory(&self) -> Result<(), Fault> {
        let kind = self.case.kind;
        if kind.victim != Victim::SourceQemu || !kind.memory.follows() {
            return Ok(());
        }
        let (product, guest) = (&self.ground.product, &self.ground.guest);
        let there = 1 - self.source;
        let mut lost = false;
        let known = wait_until(LIMIT, || {
            let latest = product.latest_migration(there, guest);
            let progress = latest.ok().flatten().and_then(|latest| latest.progress);
            let trouble = progress.and_then(|progress| progress.trouble);
            lost = trouble.is_some_and(|trouble| trouble.contains(LOST));
            lost || matches!(self.settled(), Ok(Some(_))) || interrupt::check().is_err()
        });
        match (known, lost) {
            (false, _) => Err("the destination does not say that memory is lost".to_owned()),
            (true, true) => {
                let pids = self.ground.qemus(there).map_err(words)?;
                kill_all(&pids).map_err(words)
            }
            (true, false) => Ok(()),
        }
    }

    /// Waits until neither agent has a move under way or in doubt; returns the guest's place.
    fn settle(&self) -> Result<Place, Fault> {
        let mut last = String::new();
        let deadline = Instant::now() + LIMIT;
        loop {
            interrupt::check().map_err(words)?;
            match self.settled() {
                Ok(Some(place)) => return Ok(place),
                Ok(None) => {}
                Err(said) => last = said,
            }
            if Instant::now() > deadline {
                return Err(format!("it does not settle: {last}"));
            }
            std::thread::sleep(ASK_EVERY);
        }
    }

    fn settled(&self) -> Result<Option<Place>, String> {
        let mut running = Vec::new();
        for host in 0..2 {
            let (product, name) = (&self.ground.product, &self.ground.guest);
            let latest = product.latest_migration(host, name).map_err(words)?;
            if let Some(migration) = latest
                && matches!(migration.outcome, None | Some(Outcome::InDoubt))
            {
                return Err(format!(
                    "host {host} has a migration in {:?}, {:?}",
                    migration.phase, migration.outcome
                ));
            }
            let guest = product.guest(host, name).map_err(words)?;
            if let Some(moving) = guest.as_ref().and_then(|guest| guest.migration.clone()) {
                return Err(format!("host {host} is still busy with migration {moving}"));
            }
            match guest.map(|guest| guest.state) {
                None | Some(GuestState::Stopped | GuestState::Elsewhere) => {}
                Some(GuestState::Running) => running.push(host),
                Some(other) => return Err(format!("host {host} says {other:?}")),
            }
        }
        match running.as_slice() {
            [host] if *host == self.source => Ok(Some(Place::Source)),
            [_] => Ok(Some(Place::Destination)),
            [] => {
                let qemus = |host| self.ground.qemus(host).map_err(words);
                if qemus(0)?.is_empty() && qemus(1)?.is_empty() {
                    return Ok(Some(Place::Nowhere));
                }
                Err("a QEMU is there, and no agent says that the guest runs".to_owned())
            }
            _ => Err("TWO COPIES: both agents say that it runs".to_owned()),
        }
    }

    fn judge(&mut self, place: Place, before: &longhaul_lab::arena::Origins) -> Result<(), Fault> {
        let owner = match place {
            Place::Source => Some(self.source),
            Place::Destination => Some(1 - self.source),
            Place::Nowhere => None,
        };
        match owner {
            Some(owner) => {
                self.ground.at = owner;
                self.heard_only_from(owner)?;
                self.ground.verify(before)?;
            }
            None => self.ground.heard_once(before)?,
        }
        let allowed = places(self.case);
        if !allowed.allow(place) {
            return Err(format!(
                "the guest is at {place:?}, and should be at {allowed}"
            ));
        }
        let mut left = None;
        let clean = wait_until(LIMIT, || {
            left = self
                .ground
                .left_over(owner)
                .unwrap_or_else(|error| Some(words(error)));
            left.is_none()
        });
        if !clean {
            return Err(format!("left over: {}", left.unwrap_or_default()));
        }
        self.ground.judge_disk(owner)
    }

    fn heard_only_from(&self, owner: usize) -> Result<(), Fault> {
        let arena = &self.ground.arena;
        // Heartbeats under way during the handover are not counted.
        arena
            .wait_for_beat(LIMIT)
            .map_err(|error| error.to_string())?;
        let since = Instant::now();
        arena
            .wait_for_beat(LIMIT)
            .map_err(|error| error.to_string())?;
        std::thread::sleep(WINDOW);
        let heard = arena.heard_since(since);
        let owner = self.ground.channel(owner).map_err(words)?;
        if heard == [owner] {
            return Ok(());
        }
        Err(format!("the guest is heard from {heard:?}"))
    }
}

/// Kills processes, which may be just being started.
fn kill_found(
    mut find: impl FnMut() -> Result<Vec<i32>, LabError>,
    none: &str,
) -> Result<(), LabError> {
    let mut found = Ok(Vec::new());
    wait_until(LIMIT, || {
        found = find();
        !matches!(&found, Ok(pids) if pids.is_empty())
    });
    let pids = found?;
    if pids.is_empty() {
        return Err(LabError::Which(none.to_owned()));
    }
    kill_all(&pids)
}

impl Asked {
    /// Returns its result, once it has ended.
    fn said(&mut self) -> String {
        match self {
            Self::Move(moving) => {
                moving.wait_until(Duration::from_millis(200), |_| false);
                moving.so_far().why()
            }
            Self::Plan(child) => format!("{:?}", child.try_wait()),
        }
    }

    fn is_completed(&self) -> bool {
        match self {
            Self::Move(moving) => moving.so_far().outcome == Some(Outcome::Completed),
            Self::Plan(_) => false,
        }
    }

    fn has_ended(&mut self) -> bool {
        match self {
            Self::Move(moving) => moving.has_ended(),
            Self::Plan(child) => !matches!(child.try_wait(), Ok(None)),
        }
    }
}

fn finish(asked: Asked) -> Result<(), LabError> {
    match asked {
        // Only the guest's place counts, not the output.
        Asked::Move(moving) => moving.finish(LIMIT).map(drop),
        Asked::Plan(mut child) => child
            .wait()
            .map(drop)
            .during(|| "wait for a plan".to_owned()),
    }
}

/// Removes the file by which an agent is held.
pub(super) fn remove(marker: &Path) -> Result<(), LabError> {
    match fs::remove_file(marker) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).during(|| format!("remove {}", marker.display()))
        }
        _ => Ok(()),
    }
}
