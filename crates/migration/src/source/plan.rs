//! A migration's plan: its checks and its prediction, made without changing anything.

use crate::context::Context;
use crate::host::memory_cache::room_bytes;
use crate::source::Source;
use crate::source::arbiter;
use crate::source::candidate::{Candidate, candidate};
use crate::source::checks::{self, Examined, Reason};
use crate::source::companion::About;
use crate::source::convergence;
use crate::source::described;
use crate::source::files::{self, AskError, Held, Question};
use crate::source::known_content::{self, Sample};
use crate::source::local_disks::{self, Known, LocalDisk, may_be_left};
use crate::source::losses;
use crate::source::memory_strategy::{check_keeping, follows_by, too_old_to_follow};
use crate::source::prediction::{Asking, Holds, Look, predict};
use crate::source::qemu::{SourceQemu, SourceQemuError};
use crate::source::sample;
use crate::source::sender::Encoding;
use crate::source::tracking;
use crate::status::failure;
use crate::status::guest_rate::{RateMeter, shown as shown_rate};
use crate::status::paths::path_use;
use crate::status::registry::Taken;
use longhaul_api::{
    ApiError, Asked, Check, DiskChoice, ErrorCode, Follows, GuestRate, Plan, PlanRequest,
    ProbeResult, Properties, Strategy,
};
use longhaul_hypervisor::dirty_rate;
use longhaul_hypervisor::memory::misses_writes;
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use longhaul_hypervisor::tested;
use longhaul_protocol::RegionSpec;
use longhaul_protocol::disk::{OfferedDisk, Pulled};
use longhaul_protocol::message::{self, Query, Verdict};
use longhaul_protocol::units::{show_bit_rate, show_bytes, show_duration};
use longhaul_protocol::wire::VERSION_OF_POSTCOPY;
use longhaul_transport::{CloseCode, Control, LinkRate, ProbeConfig, ProbeReport};
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::block_in_place;

/// Limit on the duration of the measurement of a link, which ends when its rate is known.
const PROBE_TIME_MAX: Duration = Duration::from_secs(8);
/// Assumed factor by which a link's rate is above one that still grew.
const GROWS: f64 = 1.5;

/// Checks everything that a move needs, and predicts its cost.
pub(crate) async fn plan(source: &Arc<Source>, request: PlanRequest) -> Result<Plan, ApiError> {
    let context = &source.context;
    convergence::check(&request.convergence)?;
    check_keeping(request.strategy, request.keep_memory)?;
    let candidate = candidate(context, &request.guest, &request.to)?;
    let mut plan = Plan {
        guest: request.guest.clone(),
        source: context.parts.config.name.clone(),
        destination: request.to.clone(),
        asked: Asked {
            downtime_ms: request.downtime_ms,
            bandwidth_bps: context.throttle.alone(request.bandwidth_bps),
            early_release: request.early_release,
            keep_memory: request.keep_memory,
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
        properties: Properties::default(),
    };
    context.registry.settled(&request.guest).await;
    if let Some(moving @ Taken::Moving(..)) = context.registry.taken(&request.guest) {
        let busy = context.registry.busy(&request.guest, moving);
        let hint = busy.hint.unwrap_or_default();
        plan.checks.push(Check::refuse("guest", busy.message, hint));
        return Ok(plan);
    }
    // Reserved, so that nothing else controls this QEMU meanwhile.
    let _reservation = context.registry.take(&request.guest, Taken::Locally)?;
    let Here {
        query,
        disks,
        look,
        mut known,
        sample,
        rate: guest_rate,
    } = look_here(context, &candidate, &mut plan).await?;
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
        query: query.clone(),
        generation: candidate.generation,
        follows: follows_by(request.strategy),
        arbiter: arbiter::question(context, required),
        managed: files::outlook(context, &candidate.guest)?,
    };
    let asking = (question, &*disks, &known, request.strategy);
    let (control, lacking, may_follow) = ask_there(context, &candidate, asking, &mut plan).await;
    let rate = match control.is_some() {
        true => measure_link(context, &mut plan).await,
        false => None,
    };
    plan.checks.extend(early_release(&plan));
    plan.checks.extend(needs_both(&plan, request.strategy));
    plan.checks.extend(memory_file(context, &plan));
    plan.checks
        .extend(arbiter::check(context, &request.guest, required));
    let rtt = plan.rtt_ms.map(|ms| Duration::from_secs_f64(ms / 1e3));
    let likely = rate.map(|rate| rate.likely);
    known.limit(likely, plan.asked.bandwidth_bps, rtt.unwrap_or_default());
    let encoding = encoding(context, &plan);
    let regions = sample.as_ref().map_or(&[][..], |sample| sample.regions());
    let of = (&known, regions, &*lacking);
    let local = look_at_disks(context, &candidate, of, &mut plan);
    let disks = block_in_place(|| sample::disks(&local, encoding, likely));
    let refused = plan.checks.iter().any(is_refusal);
    let holds = match (&control, sample) {
        (Some(control), Some(sample)) if !refused => {
            let about = (query, candidate.generation);
            known_content::ask(control, about, sample, &local).await
        }
        _ => Holds::Unknown,
    };
    if let Some(control) = control {
        control.close(CloseCode::Done, "asked and answered");
    }
    let returns = context.came_from(&request.guest, &request.to);
    let asking = Asking {
        guest: plan.guest.clone(),
        source: plan.source.clone(),
        host: plan.destination.clone(),
        strategy: request.strategy,
        may_follow,
        downtime: Duration::from_millis(plan.asked.downtime_ms),
        rate,
        rtt,
        early_release: plan.asked.early_release,
        keep_memory: plan.asked.keep_memory,
        convergence: plan.asked.convergence,
        look,
        disks,
        holds,
        returns,
        sent: None,
    };
    plan.predictions
        .push(predict(&asking, &context.predictions).shown);
    let left = local.iter().any(may_be_left);
    plan.properties = properties(&plan, guest_rate, (request.strategy, may_follow, left));
    plan.possible = !plan.checks.iter().any(is_refusal);
    Ok(plan)
}

/// Returns the encoding of a move, unless it is chosen otherwise when the move begins.
fn encoding(context: &Context, plan: &Plan) -> Encoding {
    let chosen = &context.parts.config.encoding;
    Encoding::new(chosen, plan.memory_bytes.unwrap_or_default())
}

fn is_refusal(check: &Check) -> bool {
    check.verdict == longhaul_api::Verdict::Refuse
}

/// Checks the disks that move with the guest, among them those of read-only images that the
/// destination lacks, and returns them.
fn look_at_disks(
    context: &Context,
    candidate: &Candidate,
    (known, memory, lacking): (&Known, &[RegionSpec], &[String]),
    plan: &mut Plan,
) -> Vec<LocalDisk> {
    let guest = candidate.guest.description();
    // The checks of the guest report why a disk cannot move.
    let regions = (memory, lacking);
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
    disks
}

/// Returns what is known of the move, if memory may follow by this strategy, or blocks of disks are
/// left.
fn properties(
    plan: &Plan,
    guest_rate: Option<GuestRate>,
    (strategy, may_follow, left): (Strategy, bool, bool),
) -> Properties {
    let follows = match strategy {
        _ if left => Follows::Something,
        Strategy::Hybrid | Strategy::Postcopy => Follows::Something,
        Strategy::Auto if may_follow => Follows::Perhaps,
        Strategy::Auto | Strategy::Precopy => Follows::Nothing,
    };
    Properties::planned(plan, guest_rate, follows, arbiter::is_agreed(plan))
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
    let lost = match plan.asked.keep_memory {
        false => format!("is lost with its QEMU on {source}"),
        true => format!("is lost with its QEMU on {source} until the memory file is complete"),
    };
    let text = format!(
        "{when}, {guest} needs both hosts: it waits while the link is cut or the agent on {source} \
         or {destination} is gone, and {lost}; if {destination} dies, take it back on {source} as \
         it was when it was stopped"
    );
    let hint = "without --strategy it needs only one host at any time";
    Some(Check::warn("strategy", text, hint))
}

/// Returns the check whether all memory of the guest fits a memory file.
fn memory_file(context: &Context, plan: &Plan) -> Option<Check> {
    if !plan.asked.keep_memory {
        return None;
    }
    let (name, state) = ("keep_memory", &context.parts.config.state);
    let (guest, source, folder) = (&plan.guest, &plan.source, state.display());
    let needed = plan.memory_bytes?;
    let most = show_bytes(needed);
    let hint = "without room the move works, but the memory file is given up: make room there";
    Some(match block_in_place(|| room_bytes(state)) {
        Ok(room) if room >= needed => {
            let text = format!("up to {most} of memory may be kept for it in {folder}");
            Check::ok(name, text)
        }
        Ok(room) => {
            let text = format!(
                "{folder} has room for {} of memory, and up to {most} may follow {guest}: it may \
                 be lost with its QEMU on {source} until all of its memory has followed",
                show_bytes(room)
            );
            Check::warn(name, text, hint)
        }
        Err(error) => Check::warn(name, format!("{folder} cannot be looked at: {error}"), hint),
    })
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

/// What a plan finds on this host.
struct Here {
    query: Query,
    disks: Vec<OfferedDisk>,
    look: Look,
    known: Known,
    /// A sample of the memory, if that can be read.
    sample: Option<Sample>,
    /// The guest's rate while it was looked at.
    rate: Option<GuestRate>,
}

async fn look_here(
    context: &Context,
    candidate: &Candidate,
    plan: &mut Plan,
) -> Result<Here, ApiError> {
    let guests = &context.parts.guests;
    let lease = guests.lease(&candidate.guest, COMMAND_TIMEOUT).await;
    let lease = lease.map_err(|error| qemu(&error))?;
    let qmp = lease.qmp();
    let vcpus = RateMeter::vcpus(qmp, candidate.guest.pid()).await;
    let rate_meter = vcpus.and_then(RateMeter::begin);
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
    plan.checks
        .extend(tracking::plan_check(context, candidate.guest.name())?);
    let losses = losses::checks(&candidate.guest, qmp, &candidate.host.name).await;
    plan.checks.extend(losses.map_err(|error| qemu(&error))?);
    let query = Query { guest, machine };
    let mut here = Here {
        query,
        disks,
        look: Look::default(),
        known,
        sample: None,
        rate: None,
    };
    if !has_memory {
        return Ok(here);
    }
    let outbound = SourceQemu::attach(guests.clone(), candidate.guest.clone(), lease).await;
    let outbound = outbound.map_err(SourceQemuError::into_api)?;
    let rate = context.link_rate(&plan.destination);
    let mut looking = look(&outbound, encoding(context, plan), rate);
    while looking.changed().await.is_ok() {}
    here.look = *looking.borrow();
    here.sample = Sample::take(&outbound);
    here.rate = rate_meter
        .and_then(|meter| meter.so_far())
        .and_then(shown_rate);
    plan.memory_used_bytes = here.look.memory.map(|memory| memory.used_bytes);
    plan.dirty_rate_bytes_per_s = here.look.dirty_bytes_per_s;
    Ok(here)
}

/// Samples a guest's memory, and then measures for a second how fast it writes, in a task of its
/// own. The findings are complete when the sender is dropped.
pub(crate) fn look(
    outbound: &SourceQemu,
    encoding: Encoding,
    rate: Option<f64>,
) -> watch::Receiver<Look> {
    let (memory, places) = outbound.memory();
    let regions = outbound.regions().to_vec();
    let (sender, receiver) = watch::channel(Look::default());
    let qmp = outbound.qmp().clone();
    tokio::spawn(async move {
        let compared = misses_writes(&qmp).await.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot tell whether a guest's memory will be compared");
            false
        });
        let sampled = block_in_place(|| sample::memory(&memory, &regions, &places, encoding, rate));
        tracing::debug!(?sampled, "a sample of a guest's memory");
        let mut look = Look {
            memory: sampled,
            dirty_bytes_per_s: None,
            compared,
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

/// Asks the destination for its checks. Returns the connection, the read-only images that the
/// destination lacks, by name, and whether memory may follow the guest.
async fn ask_there(
    context: &Arc<Context>,
    candidate: &Candidate,
    (mut question, disks, known, strategy): (Question, &[OfferedDisk], &Known, Strategy),
    plan: &mut Plan,
) -> (Option<Control>, Vec<String>, bool) {
    let host = &candidate.host.name;
    let control = match context.endpoint.connect(host).await {
        Ok(control) => control,
        Err(error) => {
            let error = failure::connect(host, &error);
            let hint = error.hint.unwrap_or_else(|| "see the message".to_owned());
            plan.checks
                .push(Check::refuse("destination", error.message, hint));
            return (None, Vec::new(), false);
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
    let mut may_follow = question.follows != Pulled::Nothing;
    let mut asked = files::ask(context, &control, &question, disks, &mut held, brought).await;
    if let (Strategy::Auto, Ok(with)) = (strategy, &asked)
        && with.checks.iter().any(is_refused)
    {
        question.follows = Pulled::Nothing;
        let without = files::ask(context, &control, &question, disks, &mut held, brought).await;
        if let Ok(without) = without {
            may_follow = false;
            let known = |check: &&message::Check| !without.checks.contains(check);
            let mut more = with.checks.iter().filter(|check| is_refused(check));
            plan.checks.extend(more.find(known).map(precopy_only));
            asked = Ok(without);
        }
    }
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
    (Some(control), lacking, may_follow)
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

/// Measures the link until its rate is known. Returns the rate in bytes per second.
async fn measure_link(context: &Arc<Context>, plan: &mut Plan) -> Option<LinkRate> {
    let host = plan.destination.clone();
    let config = ProbeConfig {
        duration: PROBE_TIME_MAX,
        bandwidth_bps: plan.asked.bandwidth_bps,
        until_known: true,
        ..ProbeConfig::default()
    };
    match context.endpoint.probe(&host, config, |_| {}).await {
        Ok(report) => {
            let late = report.throughput_late_bps as f64;
            // It still grew.
            let unknown = LinkRate {
                low: late,
                likely: late * GROWS,
                high: late * GROWS * GROWS,
            };
            let rate = report.rate_bps.unwrap_or(unknown);
            let shown = rate.likely as u64;
            plan.rate_bps = Some(shown);
            plan.rtt_ms = Some(report.rtt_idle.as_secs_f64() * 1e3);
            let bytes = |bits: f64| bits / 8.0;
            let rate_bytes = LinkRate {
                low: bytes(rate.low),
                likely: bytes(rate.likely),
                high: bytes(rate.high),
            };
            if report.rate_bps.is_none() {
                let text = format!(
                    "the link carries {} or more: its rate still grew after {}",
                    show_bit_rate(report.throughput_late_bps),
                    show_duration(PROBE_TIME_MAX)
                );
                let hint = "the predicted times are uncertain; `longhaul host probe` measures for \
                            longer";
                plan.checks.push(Check::warn("link", text, hint));
                return Some(rate_bytes);
            }
            if plan.asked.bandwidth_bps.is_none() {
                context.note_link_rate(&host, rate_bytes.likely);
                context.note_link(&host, rate_bytes);
            }
            let text = format!("the link carries about {}", show_bit_rate(shown));
            plan.checks.push(Check::ok("link", text));
            Some(rate_bytes)
        }
        Err(error) => {
            let error = failure::probe(&host, &error);
            plan.checks.push(Check::warn(
                "link",
                format!("the link could not be measured: {}", error.message),
                "there is no prediction without it; the move may still work",
            ));
            None
        }
    }
}

/// Returns a measurement of a link as the API shows it.
pub(crate) fn probe_result(host: &str, report: &ProbeReport) -> ProbeResult {
    let ms = |time: Duration| Some(time.as_secs_f64() * 1e3);
    let several = report.paths.iter().filter(|_| report.paths.len() > 1);
    let paths = several.map(|of| path_use(of.path, of.sent_bytes, of.is_up));
    ProbeResult {
        host: host.to_owned(),
        version: None,
        rtt_ms: ms(report.rtt_idle),
        rtt_loaded_ms: ms(report.rtt_loaded),
        rate_bps: Some(report.throughput_bps),
        rate_late_bps: Some(report.throughput_late_bps),
        wire_rate_bps: Some(report.wire_bps),
        per_second_bps: report.per_second_bps.clone(),
        paths: paths.collect(),
        loss: Some(report.loss),
        seen_as: report.reflexive.map(|seen| seen.address.to_string()),
        local_address: report
            .reflexive
            .and_then(|seen| Some(seen.local?.to_string())),
    }
}
