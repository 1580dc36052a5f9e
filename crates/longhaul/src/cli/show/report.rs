//! Formats a report: the predictions beside the results.

use super::figure::{self, bare_ms, byte_rate};
use super::image;
use super::properties;
use crate::cli::paint::{Line, Tone, columns, wrap};
use longhaul_api::{
    BaseChoice, BytesByKind, ClockTeller, DiskChoice, DiskReport, DowntimeParts, FaultReport,
    GuestClock, HookRun, Judgement, MemoryFileReport, Outcome, Phase, Report, StopChoice,
    StopReason, StopRule,
};
use longhaul_protocol::units::show_bytes;

/// The column of figures.
const FIGURE: usize = properties::COLUMN;
/// The column of predictions.
const PREDICTED: usize = 28;

/// Formats the whole report.
pub(crate) fn report(report: &Report, width: usize) -> Vec<Line> {
    let mut lines = vec![headline(report)];
    if let Some(why) = &report.strategy_why {
        let text = format!("{}: {why}", figure::strategy(report.strategy));
        let pieces = wrap(&text, width.saturating_sub(4).max(20)).into_iter();
        lines.extend(pieces.map(|text| Line::text(format!("  {text}"))));
    }
    if let Some(reason) = &report.reason {
        let texts = [Some(&reason.message), reason.hint.as_ref()];
        for text in texts.into_iter().flatten().chain(&reason.state_of_guest) {
            let pieces = wrap(text, width.saturating_sub(4).max(20));
            lines.extend(
                pieces
                    .into_iter()
                    .map(|text| Line::text(format!("  {text}"))),
            );
        }
    }
    let names = Line::default().column(FIGURE).tone(Tone::Faint, "was");
    let likelihood = report.predicted.as_ref().map(|it| it.likelihood_percent);
    let likelihood = likelihood.filter(|percent| *percent > 0);
    let predicted = likelihood.map_or_else(
        || "predicted".to_owned(),
        |percent| format!("predicted ({percent} of 100 inside)"),
    );
    lines.push(names.column(PREDICTED).tone(Tone::Faint, predicted));
    let judged = report.judged;
    let ranges = report.predicted.as_ref();
    let time = |range| figure::range(range, |time_ms| figure::ms(Some(time_ms)));
    let rows = [
        (
            "data",
            figure::bytes(report.link_bytes),
            figure::range(ranges.and_then(|it| it.link_bytes), show_bytes),
            judged.and_then(|it| it.link_bytes),
            [data(&report.bytes), figure::paths(&report.paths)].concat(),
        ),
        (
            "time",
            figure::ms(report.total_ms),
            time(ranges.and_then(|it| it.total_ms)),
            judged.and_then(|it| it.total_ms),
            times(report),
        ),
        (
            "downtime",
            figure::precise_ms(report.downtime_ms),
            time(ranges.and_then(|it| it.downtime_ms)),
            judged.and_then(|it| it.downtime_ms),
            downtime(&report.downtime),
        ),
    ];
    for (name, was, predicted, judged, detail) in rows {
        lines.push(row(name, &was, &predicted, judged));
        lines.extend(details(&detail, width));
    }
    if let Some(stalls) = ranges.and_then(|it| it.stalls.as_ref()) {
        let pieces = wrap(stalls, width.saturating_sub(FIGURE).max(20)).into_iter();
        lines.extend(pieces.map(|text| Line::default().column(FIGURE).plain(text)));
    }
    lines.extend(below(report, width));
    lines.extend(properties::of_report(report, width));
    lines
}

fn headline(report: &Report) -> Line {
    let (tone, how) = match report.outcome {
        Some(Outcome::Completed) => (Tone::Good, figure::outcome(Outcome::Completed)),
        Some(Outcome::Failed) => (Tone::Bad, figure::outcome(Outcome::Failed)),
        Some(outcome) => (Tone::Warn, figure::outcome(outcome)),
        None => (Tone::Plain, "under way"),
    };
    let mut line = Line::default()
        .tone(Tone::Strong, report.guest.clone())
        .plain(format!(
            "  {} → {}  {} · ",
            report.source,
            report.destination,
            figure::strategy(report.strategy)
        ))
        .tone(tone, how);
    if report.outcome != Some(Outcome::Completed) {
        line = line.plain(format!(" while {}", figure::phase(report.phase)));
    }
    line.tone(Tone::Faint, format!("  {}", report.id))
}

/// Formats a figure beside its prediction.
fn row(name: &str, was: &str, predicted: &str, judged: Option<Judgement>) -> Line {
    let line = Line::text(name).column(FIGURE).tone(Tone::Strong, was);
    let line = line.column(PREDICTED).plain(predicted);
    match judged {
        None => line,
        Some(judged) => {
            let tone = match judged {
                Judgement::Inside => Tone::Good,
                Judgement::Below | Judgement::Above => Tone::Warn,
            };
            line.plain(" ").tone(tone, figure::judgement(judged))
        }
    }
}

/// Formats the parts of a figure, wrapped where the terminal is too narrow.
fn details(parts: &[String], width: usize) -> Vec<Line> {
    let start = || Line::default().column(FIGURE);
    let (mut lines, mut line) = (Vec::new(), start());
    for (index, part) in parts.iter().enumerate() {
        let separator = if index == 0 { "" } else { " · " };
        if index > 0 && line.columns() + columns(separator) + columns(part) > width {
            lines.push(std::mem::replace(&mut line, start()));
            line = line.plain(part.clone());
            continue;
        }
        line = line.plain(format!("{separator}{part}"));
    }
    if !parts.is_empty() {
        lines.push(line);
    }
    lines
}

fn data(bytes: &BytesByKind) -> Vec<String> {
    let mut parts = Vec::new();
    let mut part = |name: &str, figure: Option<u64>| {
        if let Some(figure) = figure.filter(|figure| *figure > 0) {
            parts.push(format!("{name} {}", show_bytes(figure)));
        }
    };
    part("zero", bytes.zero_bytes);
    part("same", bytes.same_bytes);
    part("found there", bytes.reference_bytes);
    part("in other guests", bytes.shared_bytes);
    part("kept there before", bytes.kept_bytes);
    part("copies", bytes.duplicate_bytes);
    let into = |name: &str, from: u64, to: u64| {
        let (from, to) = (show_bytes(from), show_bytes(to));
        format!("{name} {from} → {to}")
    };
    let deltas = bytes.delta_encoded_bytes.unwrap_or(0);
    if let Some(from) = bytes.delta_bytes.filter(|from| *from > 0) {
        parts.push(into("delta", from, deltas));
    }
    match (bytes.literal_bytes, bytes.compressed_bytes) {
        (Some(literal), Some(compressed)) => {
            parts.push(into("compressed", literal + deltas, compressed));
        }
        (Some(literal), None) => parts.push(format!("sent {}", show_bytes(literal))),
        (None, _) => {}
    }
    if let Some(rejected) = bytes.rejected_bytes.filter(|rejected| *rejected > 0) {
        parts.push(format!("sent again {}", show_bytes(rejected)));
    }
    parts
}

fn times(report: &Report) -> Vec<String> {
    let stopped = [
        Phase::Stopping,
        Phase::Loading,
        Phase::Verifying,
        Phase::HandingOver,
    ];
    let mut parts = Vec::new();
    let mut still_ms = None;
    for time in &report.phases {
        if stopped.contains(&time.phase) {
            still_ms = Some(still_ms.unwrap_or(0.0) + time.time_ms);
            continue;
        }
        if let Some(time_ms) = still_ms.take() {
            parts.push(format!("stopped {}", figure::precise_ms(Some(time_ms))));
        }
        let shown = figure::precise_ms(Some(time.time_ms));
        parts.push(format!("{} {shown}", figure::phase(time.phase)));
    }
    if let Some(time_ms) = still_ms {
        parts.push(format!("stopped {}", figure::precise_ms(Some(time_ms))));
    }
    parts
}

fn downtime(parts: &DowntimeParts) -> Vec<String> {
    let mut shown: Vec<String> = [
        ("stop", parts.stop_ms),
        ("last pages", parts.last_pages_ms),
        ("device state", parts.device_state_ms),
        ("load", parts.load_ms),
        ("verify", parts.verify_ms),
        ("commit", parts.commit_ms),
    ]
    .into_iter()
    .filter_map(|(name, time_ms)| Some(format!("{name} {}", bare_ms(time_ms?))))
    .collect();
    if let Some(last) = shown.last_mut() {
        last.push_str(" ms");
    }
    shown
}

fn below(report: &Report, width: usize) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut line = |name: &str, text: String| {
        let pieces = wrap(&text, width.saturating_sub(FIGURE).max(20));
        for (index, piece) in pieces.into_iter().enumerate() {
            let name = if index == 0 { name } else { "" };
            lines.push(Line::text(name).column(FIGURE).plain(piece));
        }
    };
    let mut memory: Vec<String> = Vec::new();
    if let Some(rate) = report.dirty_rate_bytes_per_s {
        memory.push(format!("{} changed", byte_rate(rate)));
    }
    match report.passes {
        Some(1) => memory.push("1 pass".to_owned()),
        Some(passes) => memory.push(format!("{passes} passes")),
        None => {}
    }
    if !memory.is_empty() {
        line("memory", memory.join(" · "));
    }
    if let Some(faults) = &report.faults {
        line("waits", self::faults(faults));
    }
    for disk in &report.disks {
        line(&disk.name, self::disk(disk));
    }
    if let Some(sent) = report.disk_bytes {
        line("disks", format!("{} sent", show_bytes(sent)));
    }
    if let Some(read) = report.repository_bytes {
        let from = &report.destination;
        let text = format!("{} read by {from} from its repository", show_bytes(read));
        line("base images", text);
    }
    if let Some(arbiter) = &report.arbiter {
        line("arbiter", arbiter.clone());
    }
    if let Some(stop) = &report.stop {
        line("stop", self::stop(stop, report.asked.downtime_ms));
    }
    if let Some(verify) = &report.verify {
        let mut what = match verify.regions {
            // The agent was restarted since.
            0 => "memory as it went".to_owned(),
            1 => format!("{} in 1 RAM block", show_bytes(verify.bytes)),
            count => format!("{} in {count} RAM blocks", show_bytes(verify.bytes)),
        };
        if verify.disks > 0 {
            let disks = match verify.disks {
                1 => "1 disk".to_owned(),
                count => format!("{count} disks"),
            };
            let [all, stopped] = [verify.disk_bytes, verify.disk_bytes_stopped].map(show_bytes);
            what.push_str(&format!(
                ", {all} in {disks} ({stopped} of it while the guest stood still)"
            ));
        }
        match verify.disks_not_compared {
            0 => {}
            1 => what.push_str(", 1 disk not compared yet (a part of it comes afterwards)"),
            count => what.push_str(&format!(
                ", {count} disks not compared yet (a part of them comes afterwards)"
            )),
        }
        line(
            "verified",
            match (&verify.first_difference, verify.different_blocks) {
                (None, 0) => format!("{what}: both sides equal"),
                (first, count) => format!(
                    "{what}: {count} blocks differ, the first at {}",
                    first.as_deref().unwrap_or("an unknown place")
                ),
            },
        );
    }
    if let Some(clock) = &report.clock {
        line("clock", self::clock(clock));
    }
    if !report.hooks.is_empty() {
        line("hooks", hooks(&report.hooks));
    }
    if let Some(file) = &report.memory_file {
        line("memory file", memory_file(file));
    }
    if let Some(kept) = &report.kept_memory {
        let part = match kept.whole {
            true => "",
            false => ", a part of it",
        };
        let (bytes, host) = (show_bytes(kept.bytes), &report.source);
        line(
            "kept",
            format!("{bytes} of its memory{part} at {host}, for when it comes back"),
        );
    }
    lines
}

fn memory_file(file: &MemoryFileReport) -> String {
    let bytes = show_bytes(file.bytes);
    match file.complete_ms {
        Some(time_ms) => format!(
            "{bytes}, complete {} after the handover",
            figure::ms(Some(time_ms))
        ),
        None => format!("{bytes}, complete after the agent was restarted"),
    }
}

fn faults(faults: &FaultReport) -> String {
    let FaultReport {
        pages,
        pages_per_gib,
        median_ms,
        p99_ms,
        longest_ms,
        ..
    } = *faults;
    if pages == 0 {
        return "for no page of its memory".to_owned();
    }
    format!(
        "for {pages} pages ({pages_per_gib:.0} per GiB) · half within {} ms, 99 % within {} ms, \
         longest {} ms",
        bare_ms(median_ms),
        bare_ms(p99_ms),
        bare_ms(longest_ms),
    )
}

fn disk(disk: &DiskReport) -> String {
    let how = match disk.strategy {
        DiskChoice::Mirror => "mirrored",
        DiskChoice::Auto | DiskChoice::Precopy => "pre-copied",
        DiskChoice::Hybrid => "sent in part, then fetched",
        DiskChoice::Postcopy => "fetched afterwards",
        DiskChoice::Shared => "both hosts see it",
    };
    let (image_bytes, allocated) = (
        show_bytes(disk.image_bytes),
        show_bytes(disk.allocated_bytes),
    );
    let why = disk.why.as_ref();
    let why = why.map_or_else(String::new, |why| format!(", since {why}"));
    let base = disk.base.as_ref();
    let base = base.map_or_else(String::new, |base| {
        let lazily = match disk.base_choice {
            Some(BaseChoice::Lazy) => " and may still be coming",
            Some(BaseChoice::Whole) | None => "",
        };
        let base = image::short(base);
        format!(" · stands on base image {base}, which stayed{lazily}")
    });
    format!("{image_bytes}, {allocated} of it allocated · {how}{why}{base}")
}

fn stop(stop: &StopChoice, asked_ms: u64) -> String {
    let asked = figure::ms(Some(asked_ms));
    let why = match stop.reason {
        StopReason::WithinLimit => format!("it fitted {asked}"),
        StopReason::LocalMinimum => {
            format!("{asked} could not be kept: it would not have got better")
        }
        StopReason::RisingTrend => format!("{asked} could not be kept: more and more was left"),
        StopReason::WaitedEnough => format!("{asked} could not be kept: waited long enough"),
        StopReason::Passes => "as many passes as the rule allows".to_owned(),
        StopReason::Bytes => "as many bytes as the rule allows".to_owned(),
    };
    let rule = match stop.rule {
        StopRule::Predicted => "",
        StopRule::Cloudnet => "by CloudNet's rule, ",
        StopRule::Xen => "by Xen's rule, ",
        StopRule::Qemu => "by QEMU's rule, ",
    };
    let mut text = format!("{rule}{why}");
    if let (Some(likely), Some(at_most)) = (stop.predicted_ms, stop.predicted_at_most_ms) {
        let (likely, at_most) = (figure::ms(Some(likely)), figure::ms(Some(at_most)));
        text.push_str(&format!(" · predicted then: {likely}, at most {at_most}"));
    }
    if let Some(percent) = stop.slowed_percent {
        text.push_str(&format!(" · slowed by {percent} %"));
    }
    text
}

fn clock(clock: &GuestClock) -> String {
    let off = |off_ms: i64| {
        let size = figure::precise_ms(Some(off_ms.unsigned_abs() as f64));
        match off_ms {
            0 => "right".to_owned(),
            1.. => format!("{size} ahead"),
            _ => format!("{size} behind"),
        }
    };
    let found = off(clock.before_ms);
    match (clock.told_by, clock.set) {
        (ClockTeller::RealTimeClock, _) => format!("{found}, by the machine's real-time clock"),
        (ClockTeller::GuestAgent, true) => {
            format!("{found}, set by the guest agent: {}", off(clock.after_ms))
        }
        (ClockTeller::GuestAgent, false) => format!("{found}, by the guest agent"),
    }
}

fn hooks(hooks: &[HookRun]) -> String {
    let shown = hooks.iter().map(|hook| {
        let time = figure::precise_ms(Some(hook.time_ms));
        let still = match hook.guest_stood_still {
            true => " of the downtime",
            false => "",
        };
        let error = hook.error.as_ref();
        let error = error.map_or_else(String::new, |error| format!(" (failed: {error})"));
        format!("{} {time}{still}{error}", hook.step)
    });
    shown.collect::<Vec<_>>().join(" · ")
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;
    use crate::cli::paint::golden;
    use longhaul_api::{ApiError, ErrorCode, HostCost, Properties, VerifyResult};

    #[test]
    fn a_report_of_a_completed_migration() {
        golden::check_lines("report", &report(&sample::report(), 140), 140);
        golden::check_lines("report_narrow", &report(&sample::report(), 72), 72);
    }

    #[test]
    fn when_a_memory_file_was_complete() {
        let file = |complete_ms| {
            let bytes = 412 << 20;
            memory_file(&MemoryFileReport { bytes, complete_ms })
        };
        assert_eq!(
            file(Some(3200)),
            "412 MiB, complete 3.2 s after the handover"
        );
        assert_eq!(
            file(None),
            "412 MiB, complete after the agent was restarted"
        );
    }

    #[test]
    fn the_waits_of_a_guest_whose_memory_followed() {
        let waited = FaultReport {
            pages: 312,
            pages_per_gib: 2496.0,
            median_ms: 21.4,
            p99_ms: 44.0,
            longest_ms: 95.2,
            above_10_ms: Some(290),
            above_100_ms: Some(0),
            above_1000_ms: Some(0),
        };
        let said =
            "for 312 pages (2496 per GiB) · half within 21 ms, 99 % within 44 ms, longest 95 ms";
        assert_eq!(faults(&waited), said);
        assert_eq!(
            faults(&FaultReport { pages: 0, ..waited }),
            "for no page of its memory"
        );
    }

    #[test]
    fn a_report_of_one_that_failed() {
        let mut failed = sample::report();
        failed.outcome = Some(Outcome::Failed);
        failed.phase = Phase::Verifying;
        failed.reason = Some(
            ApiError::new(
                ErrorCode::Internal,
                "3 pages of web-7 differ between the two sides",
            )
            .state_of_guest("web-7 runs on lyon-1"),
        );
        failed.downtime_ms = None;
        failed.downtime = DowntimeParts::default();
        failed.predicted = None;
        failed.hooks[0].time_ms = 10_002.0;
        failed.hooks[0].error = Some("/etc/longhaul/fence did not end within 10 s".into());
        failed.clock = None;
        failed.stop = None;
        failed.cost.destination = HostCost::default();
        failed.verify = Some(VerifyResult {
            regions: 6,
            bytes: 4 << 30,
            disks: 0,
            disk_bytes: 0,
            disk_bytes_stopped: 0,
            disks_not_compared: 1,
            different_blocks: 3,
            first_difference: Some("pc.ram, offset 0x1f3000".to_owned()),
        });
        failed.properties = Properties::of(&failed);
        golden::check_lines("report_failed", &report(&failed, 120), 120);
    }
}
