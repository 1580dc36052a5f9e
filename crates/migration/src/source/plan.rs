//! A migration's plan: its checks and its prediction, made without changing anything.

use crate::context::Context;
use crate::source::Source;
use crate::source::arbiter;
use crate::source::candidate::{Candidate, candidate};
use crate::source::checks::{self, Examined, Reason};
use crate::source::companion::About;
use crate::source::convergence;
use crate::source::described;
use crate::source::files::{self, AskError, Held, Question};
use crate::source::local_disks::{self, Known, LocalDisk};
use crate::source::losses;
use crate::source::memory_strategy::{follows_by, too_old_to_follow};
use crate::source::qemu::{SourceQemu, SourceQemuError};
use crate::status::failure;
use crate::status::registry::Taken;
use longhaul_api::{
    ApiError, Asked, Check, Convergence, DiskChoice, ErrorCode, Plan, PlanRequest, Prediction,
    ProbeResult, Strategy,
};
use longhaul_hypervisor::dirty_rate;
use longhaul_hypervisor::memory::GuestMemory;
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use longhaul_hypervisor::tested;
use longhaul_protocol::disk::{OfferedDisk, Pulled};
use longhaul_protocol::message::{self, Query, Verdict};
use longhaul_protocol::units::{show_bit_rate, show_bytes, show_duration};
use longhaul_protocol::wire::VERSION_OF_POSTCOPY;
use longhaul_protocol::{BLOCK_SIZE, BlockRange, RegionId, RegionSpec};
use longhaul_transport::{CloseCode, Control, ProbeConfig, ProbeReport};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::block_in_place;

/// Duration of the measurement of a link whose rate is not known.
const PROBE_TIME: Duration = Duration::from_secs(1);
/// Number of blocks that are sampled to estimate the bytes of the memory as sent.
const SAMPLES: u64 = 512;
/// Number of passes in a prediction. Later ones change little.
const PASSES_MAX: usize = 10;
/// Estimated duration of a switchover without the last pages and round trips.
const SWITCH_OVERHEAD: Duration = Duration::from_millis(60);

/// Checks everything that a move needs, and predicts its cost.
pub(crate) async fn plan(source: &Arc<Source>, request: PlanRequest) -> Result<Plan, ApiError> {
    let context = &source.context;
    convergence::check(&request.convergence)?;
    let candidate = candidate(context, &request.guest, &request.to)?;
    let mut plan = Plan {
        guest: request.guest.clone(),
        source: context.parts.config.name.clone(),
        destination: request.to.clone(),
        asked: Asked {
            downtime_ms: request.downtime_ms,
            bandwidth_bps: context.throttle.alone(request.bandwidth_bps),
            early_release: request.early_release,
            convergence: request.convergence,
            ..Asked::default()
        },
        possible: false,
        qemu: None,
        machine_type: Some(candidate.guest.description().machine.clone()),
        accelerator: None,
        vcpus: Some(candidate.guest.description().vcpus),
        memory_bytes: Some(candidate.guest.description().memory_bytes()),
        memory_used_bytes: None,
        dirty_rate_bytes_per_s: None,
        hot_bytes: None,
        rtt_ms: None,
        rate_bps: None,
        checks: Vec::new(),
        predictions: Vec::new(),
    };
    if let Some(moving @ Taken::Moving(..)) = context.registry.taken(&request.guest) {
        let busy = context.registry.busy(&request.guest, moving);
        let hint = busy.hint.unwrap_or_default();
        plan.checks.push(Check::refuse("guest", busy.message, hint));
        return Ok(plan);
    }
    // Reserved, so that nothing else controls this QEMU meanwhile.
    let _reservation = context.registry.take(&request.guest, Taken::Locally)?;
    let (query, disks, look, mut known) = look_here(context, &candidate, &mut plan).await?;
    let about = About {
        context: source.context.clone(),
        guest: request.guest.clone(),
        host: request.to.clone(),
        shown: None,
    };
    let companions = source.companions(&about);
    plan.checks.extend(companions.look(&candidate.guest));
    let required = request.require_arbiter;
    let question = Question {
        query,
        generation: candidate.generation,
        follows: follows_by(request.strategy),
        arbiter: arbiter::question(context, required),
    };
    let asking = (question, &*disks, &known, request.strategy);
    let (control, lacking) = ask_there(context, &candidate, asking, &mut plan).await;
    if control.is_some() {
        measure_link(context, &mut plan).await;
    }
    plan.checks.extend(early_release(&plan));
    plan.checks.extend(needs_both(&plan, request.strategy));
    plan.checks
        .extend(arbiter::check(context, &request.guest, required));
    let rtt = plan.rtt_ms.map(|ms| Duration::from_secs_f64(ms / 1e3));
    let rate = plan.rate_bps.map(|rate| rate as f64 / 8.0);
    known.limit(rate, plan.asked.bandwidth_bps, rtt.unwrap_or_default());
    let disk_bytes = look_at_disks(context, &candidate, (&known, &lacking), &mut plan);
    let asking = Asking::of(&plan, request.strategy, disk_bytes);
    plan.predictions.push(predict(&look, &asking));
    plan.possible = plan
        .checks
        .iter()
        .all(|check| check.verdict != longhaul_api::Verdict::Refuse);
    Ok(plan)
}

/// Checks the disks that move with the guest, among them those of read-only images that the
/// destination lacks. Returns an estimate of the bytes that travel.
fn look_at_disks(
    context: &Context,
    candidate: &Candidate,
    (known, lacking): (&Known, &[String]),
    plan: &mut Plan,
) -> u64 {
    let guest = candidate.guest.description();
    // The checks of the guest report why a disk cannot move.
    let regions = (&[][..], lacking);
    let disks =
        block_in_place(|| local_disks::each(context, guest, DiskChoice::Auto, known, regions));
    let disks: Vec<LocalDisk> = disks.into_iter().filter_map(Result::ok).collect();
    plan.checks.extend(disks.iter().map(|disk| {
        let offered = &disk.offered;
        if disk.read_only {
            let (name, bytes) = (&offered.name, show_bytes(disk.shown_bytes()));
            let what = match guest.is_backing(name) {
                true => "a backing file",
                false => "read-only",
            };
            let text = format!("disk {name} moves along: {bytes}, {what}");
            return Check::ok("disks", text);
        }
        let why = disk.why.map(|why| format!(", since {why}"));
        let base = disk.base();
        let base = base.map(|id| format!(", without its base image {}", id.short()));
        let base = base.or_else(|| {
            let backing = guest.backing(&offered.name)?;
            Some(format!(" as an overlay of image {}", backing.image))
        });
        let used = match disk.is_on_volume() {
            true => "not zero, by a sample",
            false => "allocated",
        };
        let text = format!(
            "disk {} moves along{}: {}, {} of it {used}; by {}{}",
            offered.name,
            base.unwrap_or_default(),
            show_bytes(disk.shown_bytes()),
            show_bytes(offered.allocated_bytes),
            disk.choice(),
            why.unwrap_or_default()
        );
        Check::ok("disks", text)
    }));
    block_in_place(|| disks.iter().map(LocalDisk::probable_bytes).sum())
}

/// Returns the check that explains what a guest needs whose memory follows.
fn needs_both(plan: &Plan, strategy: Strategy) -> Option<Check> {
    let Plan {
        guest,
        source,
        destination,
        ..
    } = plan;
    let when = match strategy {
        Strategy::Precopy => return None,
        Strategy::Auto => "if its memory follows, then until all of it is there",
        Strategy::Hybrid | Strategy::Postcopy => "until all of its memory has followed",
    };
    let text = format!(
        "{when}, {guest} needs both hosts: it waits while the link is cut or the agent on {source} \
         or {destination} is gone, and is lost with {source}"
    );
    let hint = "without --strategy it needs only one host at any time";
    Some(Check::warn("strategy", text, hint))
}

/// Returns the check that explains what an early release saves and risks.
fn early_release(plan: &Plan) -> Option<Check> {
    let Plan {
        guest, destination, ..
    } = plan;
    let saved = match plan.rtt_ms {
        Some(rtt_ms) => format!(
            "about {} (one round trip)",
            show_duration(Duration::from_secs_f64(rtt_ms / 1e3))
        ),
        None => "about one round trip".to_owned(),
    };
    plan.asked.early_release.then(|| {
        let text = format!(
            "early release saves {saved} of downtime; if the connection breaks after the stop, \
             {guest} stays stopped until {destination} and this host meet again"
        );
        Check::warn(
            "early_release",
            text,
            "without --early-release it continues here if that happens before the handover",
        )
    })
}

fn qemu(error: &dyn Display) -> ApiError {
    ApiError::new(ErrorCode::Qemu, error.to_string())
}

async fn look_here(
    context: &Context,
    candidate: &Candidate,
    plan: &mut Plan,
) -> Result<(Query, Vec<OfferedDisk>, Look, Known), ApiError> {
    let guests = &context.parts.guests;
    let lease = guests.lease(&candidate.guest, COMMAND_TIMEOUT).await;
    let lease = lease.map_err(|error| qemu(&error))?;
    let qmp = lease.qmp();
    let examined = checks::examine(context, &candidate.guest, qmp, DiskChoice::Auto).await?;
    let Examined {
        machine,
        described: guest,
        known,
        disks,
        reasons,
        ..
    } = examined;
    plan.qemu = Some(machine.qemu.clone());
    plan.machine_type = Some(machine.machine_type.clone());
    plan.accelerator = Some(machine.accelerator.clone());
    plan.vcpus = Some(machine.vcpus);
    let newer = tested::warning(&machine.qemu, &plan.source);
    plan.checks
        .extend(newer.map(|text| Check::warn("qemu", text, tested::hint(&plan.source))));
    let refused = |subject: &str| reasons.iter().any(|reason| reason.subject == subject);
    let has_memory = !refused("memory");
    if !refused("devices") {
        plan.checks
            .push(Check::ok("devices", "all devices can be moved"));
    }
    plan.checks
        .extend(reasons.into_iter().map(Reason::into_check));
    plan.checks.extend(described::ports(&guest));
    let losses = losses::checks(&candidate.guest, qmp, &candidate.host.name).await;
    plan.checks.extend(losses.map_err(|error| qemu(&error))?);
    let query = Query { guest, machine };
    let mut seen = Look::default();
    if !has_memory {
        return Ok((query, disks, seen, known));
    }
    let outbound = SourceQemu::attach(guests.clone(), candidate.guest.clone(), lease).await;
    let outbound = outbound.map_err(SourceQemuError::into_api)?;
    let mut looking = look(&outbound);
    while looking.changed().await.is_ok() {}
    seen = *looking.borrow();
    plan.memory_used_bytes = seen.used_bytes;
    plan.dirty_rate_bytes_per_s = seen.dirty_bytes_per_s;
    Ok((query, disks, seen, known))
}

/// Findings about a guest's memory.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Look {
    /// Estimated bytes of blocks that are not zero.
    used_bytes: Option<u64>,
    /// Their size after compression, as a share.
    share: Option<f64>,
    dirty_bytes_per_s: Option<u64>,
}

impl Look {
    /// Returns how fast the guest writes, in bytes per second as they are sent, if that is known.
    pub(crate) fn written_bytes_per_s(&self) -> Option<f64> {
        Some(self.dirty_bytes_per_s? as f64 * self.share.unwrap_or(1.0))
    }
}

/// Samples a guest's blocks, and then measures for a second how fast it writes, in a task of its
/// own. The findings are complete when the sender is dropped.
pub(crate) fn look(outbound: &SourceQemu) -> watch::Receiver<Look> {
    let (memory, places) = outbound.memory();
    let regions = outbound.regions().to_vec();
    let (sender, receiver) = watch::channel(Look::default());
    tokio::spawn(async move {
        let (used_bytes, share) = block_in_place(|| sample(&memory, &regions, &places));
        let mut look = Look {
            used_bytes,
            share,
            dirty_bytes_per_s: None,
        };
        sender.send_replace(look);
        match dirty_rate::measure(&memory).await {
            Ok(rate) => look.dirty_bytes_per_s = Some(rate),
            Err(error) => tracing::warn!(%error, "cannot tell how fast a guest writes"),
        }
        sender.send_replace(look);
    });
    receiver
}

fn sample(
    memory: &GuestMemory,
    regions: &[RegionSpec],
    places: &BTreeMap<RegionId, usize>,
) -> (Option<u64>, Option<f64>) {
    let total: u64 = regions.iter().map(|spec| spec.blocks).sum();
    let step = (total / SAMPLES).max(1);
    let (mut looked_at, mut content) = (0_u64, Vec::new());
    for spec in regions {
        let Some(place) = places.get(&spec.id) else {
            continue;
        };
        for block in (0..spec.blocks).step_by(step as usize) {
            let mut one = [0; BLOCK_SIZE];
            if memory
                .read(*place, &[BlockRange::new(block, 1)], &mut one)
                .is_ok()
            {
                looked_at += 1;
                if !longhaul_codec::is_zero(&one) {
                    content.extend_from_slice(&one);
                }
            }
        }
    }
    let used = content.len() as u64 / BLOCK_SIZE as u64;
    let used_bytes = (total * BLOCK_SIZE as u64 * used).checked_div(looked_at);
    let packed: Option<usize> = content
        .chunks(64 * BLOCK_SIZE)
        .map(|frame| longhaul_codec::pack(frame).ok().map(|packed| packed.len()))
        .sum();
    let share = packed
        .filter(|_| !content.is_empty())
        .map(|packed| packed as f64 / content.len() as f64);
    (used_bytes, share)
}

/// Asks the destination for its checks. Returns the connection, and the read-only images that the
/// destination lacks, by name.
async fn ask_there(
    context: &Arc<Context>,
    candidate: &Candidate,
    (mut question, disks, known, strategy): (Question, &[OfferedDisk], &Known, Strategy),
    plan: &mut Plan,
) -> (Option<Control>, Vec<String>) {
    let host = &candidate.host.name;
    let control = match context.endpoint.connect(host).await {
        Ok(control) => control,
        Err(error) => {
            let error = failure::connect(host, &error);
            let hint = error.hint.unwrap_or_else(|| "see the message".to_owned());
            plan.checks
                .push(Check::refuse("destination", error.message, hint));
            return (None, Vec::new());
        }
    };
    let rtt = control.rtt();
    plan.rtt_ms = Some(rtt.as_secs_f64() * 1e3);
    let reachable = format!("{host} reachable, direct, {}", show_duration(rtt));
    plan.checks.push(Check::ok("destination", reachable));
    let held = block_in_place(|| files::hold(context, &candidate.guest));
    let mut held = held.unwrap_or_else(|error| {
        plan.checks.push(refused_here(error));
        Held::default()
    });
    let guest = candidate.guest.description();
    let brought = |lacking: &[String]| local_disks::brought(context, guest, known, lacking);
    if question.follows != Pulled::Nothing && control.peer().version < VERSION_OF_POSTCOPY {
        let software = &control.peer().software;
        plan.checks
            .push(refused("strategy", too_old_to_follow(host, software)));
    }
    let mut asked = files::ask(context, &control, &question, disks, &mut held, brought).await;
    if let (Strategy::Auto, Ok(with)) = (strategy, &asked)
        && with.checks.iter().any(is_refused)
    {
        question.follows = Pulled::Nothing;
        let without = files::ask(context, &control, &question, disks, &mut held, brought).await;
        if let Ok(without) = without {
            let known = |check: &&message::Check| !without.checks.contains(check);
            let mut more = with.checks.iter().filter(|check| is_refused(check));
            plan.checks.extend(more.find(known).map(precopy_only));
            asked = Ok(without);
        }
    }
    control.close(CloseCode::Done, "asked and answered");
    let mut lacking = Vec::new();
    match asked {
        Ok(asked) => {
            lacking = asked.lacking;
            plan.checks.extend(asked.checks.into_iter().map(shown));
        }
        Err(AskError::Here(error)) => plan.checks.push(refused_here(error)),
        Err(AskError::Talk(error)) => {
            let hint = format!("on {host}: longhaul host trust ... --may query,send");
            plan.checks.push(Check::refuse(
                "destination",
                format!("{host}: {error}"),
                hint,
            ));
        }
    }
    (Some(control), lacking)
}

fn is_refused(check: &message::Check) -> bool {
    check.verdict == Verdict::Refused
}

/// Returns the warning that memory cannot follow.
fn precopy_only(check: &message::Check) -> Check {
    let text = format!("moves by pre-copy, however fast it writes: {}", check.text);
    let hint = check
        .hint
        .clone()
        .unwrap_or_else(|| "see the message".to_owned());
    Check::warn("strategy", text, hint)
}

/// Returns a check of the destination as the API shows it.
fn shown(check: message::Check) -> Check {
    let hint = check.hint.unwrap_or_else(|| "see the message".to_owned());
    match check.verdict {
        Verdict::Fine => Check::ok("destination", check.text),
        Verdict::Warning => Check::warn("destination", check.text, hint),
        Verdict::Refused => Check::refuse("destination", check.text, hint),
    }
}

/// Returns a check that refuses a move because of the guest's files here.
fn refused_here(error: ApiError) -> Check {
    refused("files", error)
}

/// Returns a check that refuses a move for a reason.
fn refused(name: &str, error: ApiError) -> Check {
    let hint = error.hint.unwrap_or_else(|| "see the message".to_owned());
    Check::refuse(name, error.message, hint)
}

async fn measure_link(context: &Arc<Context>, plan: &mut Plan) {
    let host = plan.destination.clone();
    let config = ProbeConfig {
        duration: PROBE_TIME,
        bandwidth_bps: plan.asked.bandwidth_bps,
        ..ProbeConfig::default()
    };
    match context.endpoint.probe(&host, config, |_| {}).await {
        Ok(report) => {
            let rate = report.throughput_late_bps;
            plan.rate_bps = Some(rate);
            plan.rtt_ms = Some(report.rtt_idle.as_secs_f64() * 1e3);
            if plan.asked.bandwidth_bps.is_none() {
                context.note_link_rate(&host, rate as f64 / 8.0);
            }
            let text = format!("the link carries about {}", show_bit_rate(rate));
            plan.checks.push(Check::ok("link", text));
        }
        Err(error) => {
            let error = failure::probe(&host, &error);
            plan.checks.push(Check::warn(
                "link",
                format!("the link could not be measured: {}", error.message),
                "there is no prediction without it; the move may still work",
            ));
        }
    }
}

/// The input of a prediction besides the guest's memory.
#[derive(Debug, Clone)]
pub(crate) struct Asking {
    pub(crate) guest: String,
    pub(crate) source: String,
    pub(crate) strategy: Strategy,
    pub(crate) downtime: Duration,
    pub(crate) rate_bytes_per_s: Option<f64>,
    pub(crate) rtt: Option<Duration>,
    pub(crate) early_release: bool,
    pub(crate) convergence: Convergence,
    /// Estimate of the bytes of disks that travel.
    pub(crate) disk_bytes: u64,
}

impl Asking {
    fn of(plan: &Plan, strategy: Strategy, disk_bytes: u64) -> Self {
        Self {
            strategy,
            disk_bytes,
            guest: plan.guest.clone(),
            source: plan.source.clone(),
            downtime: Duration::from_millis(plan.asked.downtime_ms),
            rate_bytes_per_s: plan.rate_bps.map(|rate| rate as f64 / 8.0),
            rtt: plan.rtt_ms.map(|ms| Duration::from_secs_f64(ms / 1e3)),
            early_release: plan.asked.early_release,
            convergence: plan.asked.convergence,
        }
    }
}

/// Predicts a move. The first pass sends the blocks that are not zero, and each later one the
/// blocks that were written during the pass before. With `hybrid`, the second one follows when the
/// guest runs at the destination, and with `postcopy` the first one.
pub(crate) fn predict(look: &Look, asking: &Asking) -> Prediction {
    let rate = asking.rate_bytes_per_s.filter(|rate| *rate > 0.0);
    let (Some(rate), Some(used)) = (rate, look.used_bytes) else {
        return prediction(None, None, None, asking, None);
    };
    let share = look.share.unwrap_or(1.0);
    let dirty = look.dirty_bytes_per_s.unwrap_or(0) as f64;
    let round_trips = if asking.early_release { 0.5 } else { 1.5 };
    let overhead = SWITCH_OVERHEAD + asking.rtt.unwrap_or_default().mul_f64(round_trips);
    let limit = asking.downtime;
    let budget = limit.saturating_sub(overhead).as_secs_f64() * rate;
    let mut left = used as f64 * share + asking.disk_bytes as f64;
    let (mut bytes, mut seconds) = (0.0, 0.0);
    if matches!(asking.strategy, Strategy::Hybrid | Strategy::Postcopy) {
        let again = match asking.strategy {
            Strategy::Hybrid => (dirty * left / rate).min(used as f64) * share,
            _ => 0.0,
        };
        bytes = left + again;
        let total = Duration::from_secs_f64(bytes / rate) + overhead;
        return prediction(
            Some(bytes as u64),
            Some(total),
            Some(overhead),
            asking,
            None,
        );
    }
    for _ in 0..PASSES_MAX {
        let pass = left / rate;
        bytes += left;
        seconds += pass;
        // A guest writes at most its used memory in a pass.
        left = (dirty * pass).min(used as f64) * share;
        if left <= budget {
            break;
        }
    }
    let downtime = overhead + Duration::from_secs_f64(left / rate);
    if asking.strategy == Strategy::Auto && downtime > limit {
        let strategy = match dirty * share > rate {
            true => Strategy::Postcopy,
            false => Strategy::Hybrid,
        };
        let asking = Asking {
            strategy,
            ..asking.clone()
        };
        return predict(look, &asking);
    }
    let note = (downtime > limit).then(|| {
        let (guest, asked) = (&asking.guest, &asking.convergence);
        convergence::note(guest, asked, limit, downtime, dirty * share, rate)
    });
    let total = Duration::from_secs_f64(seconds) + downtime;
    prediction(
        Some((bytes + left) as u64),
        Some(total),
        Some(downtime),
        asking,
        note,
    )
}

fn prediction(
    link_bytes: Option<u64>,
    total: Option<Duration>,
    downtime: Option<Duration>,
    asking: &Asking,
    note: Option<String>,
) -> Prediction {
    let ms = |time: Duration| time.as_millis() as u64;
    let downtime_ms = downtime.map(ms);
    Prediction {
        strategy: match asking.strategy {
            Strategy::Auto => Strategy::Precopy,
            strategy => strategy,
        },
        link_bytes,
        total_ms: total.map(ms),
        downtime_ms,
        downtime_at_most_ms: downtime_ms.map(|time| time.max(ms(asking.downtime))),
        if_link_breaks: match asking.early_release {
            _ if matches!(asking.strategy, Strategy::Hybrid | Strategy::Postcopy) => format!(
                "before the switch: stays on {}; after it: waits for pages until the hosts connect",
                asking.source
            ),
            false => format!("stays on {}", asking.source),
            true => format!(
                "before the stop: stays on {}; after it: is stopped until the hosts connect",
                asking.source
            ),
        },
        if_source_dies: match asking.strategy {
            Strategy::Precopy | Strategy::Auto => "before the switch: as without a move".to_owned(),
            Strategy::Hybrid | Strategy::Postcopy => {
                "before the switch: as without a move; after it, until all memory has followed: \
                 lost"
                    .to_owned()
            }
        },
        note,
    }
}

/// Returns a measurement of a link as the API shows it.
pub(crate) fn probe_result(host: &str, report: &ProbeReport) -> ProbeResult {
    let ms = |time: Duration| Some(time.as_secs_f64() * 1e3);
    ProbeResult {
        host: host.to_owned(),
        version: None,
        rtt_ms: ms(report.rtt_idle),
        rtt_loaded_ms: ms(report.rtt_loaded),
        rate_bps: Some(report.throughput_bps),
        rate_late_bps: Some(report.throughput_late_bps),
        wire_rate_bps: Some(report.wire_bps),
        loss: Some(report.loss),
        seen_as: report.reflexive.map(|seen| seen.address.to_string()),
        local_address: report
            .reflexive
            .and_then(|seen| Some(seen.local?.to_string())),
    }
}
