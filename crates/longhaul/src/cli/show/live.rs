//! Formats a migration under way, and the lines at its end.

use super::fetching;
use super::figure::{self, byte_rate, part_of, percent};
use super::properties;
use crate::cli::paint::{Line, Tone, wrap};
use longhaul_api::{Migration, Outcome, Outpaced, Phase, Progress, RegionProgress, Report};
use longhaul_protocol::BLOCK_SIZE;
use longhaul_protocol::units::{show_bit_rate, show_bytes, show_duration};
use std::time::Duration;

/// The indent of the values of a row.
const INDENT: usize = 11;

/// The user's action at the terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mood {
    /// The user watches.
    Watching,
    /// The user is asked whether to stop.
    Asked,
    /// The user asked for a stop.
    Stopping,
}

/// Returns the display, one line below the other.
pub(crate) fn frame(
    migration: &Migration,
    progress: &Progress,
    mood: Mood,
    width: usize,
) -> Vec<Line> {
    let mut lines = vec![headline(migration)];
    let (total, settled) = blocks(progress);
    if total > 0 {
        lines.push(memory(progress, total, settled, width));
        let disks = progress.regions.iter().filter(|region| region.disk);
        lines.extend(disks.flat_map(|disk| self::disk(disk, width)));
        lines.push(link(migration, progress));
    }
    if let (Some(outpaced), Phase::Precopy) = (&progress.outpaced, progress.phase) {
        lines.extend(too_fast(migration, outpaced, width));
    }
    for text in fetching::unreadable(migration, progress) {
        let room = width.saturating_sub(INDENT).max(20);
        let pieces = wrap(&text, room).into_iter();
        lines.extend(pieces.map(|piece| row("disk").tone(Tone::Bad, piece)));
    }
    lines.push(now(migration, progress, mood, width));
    if mood == Mood::Asked {
        let source = &migration.source;
        lines
            .push(Line::default().tone(Tone::Strong, format!("  stop and stay on {source}? y/N ")));
    }
    lines
}

fn headline(migration: &Migration) -> Line {
    let asked = &migration.asked;
    let downtime = show_duration(Duration::from_millis(asked.downtime_ms));
    let mut text = format!(
        "  {} → {}  {} · asked for downtime ≤ {downtime}",
        migration.source,
        migration.destination,
        figure::strategy(migration.strategy)
    );
    if asked.verify {
        text.push_str(" · to be verified");
    }
    Line::default()
        .tone(Tone::Strong, migration.guest.clone())
        .plain(text)
}

fn blocks(progress: &Progress) -> (u64, u64) {
    let regions = progress.regions.iter().filter(|region| !region.disk);
    let sum = |of: fn(&RegionProgress) -> u64| regions.clone().map(of).fold(0, u64::saturating_add);
    (sum(|r| r.blocks_total), sum(|r| r.blocks_settled))
}

fn row(name: &str) -> Line {
    Line::text("  ").tone(Tone::Faint, name).column(INDENT)
}

fn memory(progress: &Progress, total: u64, settled: u64, width: usize) -> Line {
    let mut more = String::new();
    if let Some(rate) = progress.dirty_rate_bytes_per_s {
        more = format!(" · {} dirtied", byte_rate(rate));
    }
    bar("memory", total, settled, &more, width)
}

/// Formats a disk, by its name in the guest's description.
fn disk(disk: &RegionProgress, width: usize) -> Vec<Line> {
    let (name, strategy) = (&disk.name, disk.strategy);
    let how = strategy.map_or_else(String::new, |strategy| format!(" · {strategy}"));
    let mut lines = vec![bar(
        name,
        disk.blocks_total,
        disk.blocks_settled,
        &how,
        width,
    )];
    if let (Some(strategy), Some(why)) = (strategy, &disk.why) {
        let room = width.saturating_sub(INDENT).max(20);
        let pieces = wrap(&format!("{strategy}, since {why}"), room);
        lines.extend(
            pieces
                .into_iter()
                .map(|piece| row("").tone(Tone::Faint, piece)),
        );
    }
    lines
}

fn bar(name: &str, total: u64, settled: u64, more: &str, width: usize) -> Line {
    let size = BLOCK_SIZE as u64;
    let share = percent(settled, total);
    let amounts = part_of(settled.saturating_mul(size), total.saturating_mul(size));
    let figures = format!("  {share:>3} %   {amounts} settled{more}");
    let bar = width.saturating_sub(INDENT + 62).clamp(10, 40);
    let (full, rest) = figure::bar(settled, total.max(1), bar);
    row(name)
        .tone(Tone::Good, full)
        .tone(Tone::Faint, rest)
        .plain(figures)
}

fn link(migration: &Migration, progress: &Progress) -> Line {
    let link = &progress.link;
    if let Some(silent_ms) = link.interrupted_ms {
        let silent = match silent_ms {
            0..1000 => "a moment".to_owned(),
            _ => figure::ms(Some(silent_ms / 1000 * 1000)),
        };
        let text = format!(
            "nothing heard from {} for {silent}; waits {}",
            migration.destination,
            match progress.phase {
                // The guest is at the destination: the move cannot be aborted any more.
                Phase::Finishing => "as long as it takes".to_owned(),
                _ => format!("up to {}", figure::ms(Some(migration.asked.patience_ms))),
            }
        );
        return row("link").tone(Tone::Warn, text);
    }
    let mut text = figure::bit_rate(link.rate_bps);
    if let Some(limit) = link.limit_bps {
        text.push_str(&format!(" of at most {}", show_bit_rate(limit)));
    }
    text.push_str(&format!(" · {} sent", show_bytes(link.sent_bytes)));
    if let Some(guest_bytes) = link.guest_bytes.filter(|bytes| *bytes > 0) {
        text.push_str(&format!(" for {}", show_bytes(guest_bytes)));
        let ratio = guest_bytes as f64 / link.sent_bytes.max(1) as f64;
        if (1.05..1000.0).contains(&ratio) {
            let digits = usize::from(ratio < 9.95);
            text.push_str(&format!(" ({ratio:.digits$} : 1)"));
        }
    }
    if let Some(rtt_ms) = link.rtt_ms {
        text.push_str(&format!(" · RTT {}", figure::precise_ms(Some(rtt_ms))));
    }
    if !link.paths.is_empty() {
        let up = link.paths.iter().filter(|path| path.up).count();
        text.push_str(&format!(" · {up} of {} paths", link.paths.len()));
    }
    row("link").plain(text)
}

/// Returns the warning about a guest that writes faster than the link carries.
fn too_fast(migration: &Migration, outpaced: &Outpaced, width: usize) -> Vec<Line> {
    let slowed = outpaced.slowed_percent;
    let slowed = slowed.map_or(String::new(), |percent| format!(", slowed by {percent} %"));
    let what = format!(
        "{} writes {} as sent{slowed}; the link carries {}. What comes: {}",
        migration.guest,
        byte_rate(outpaced.written_bytes_per_s),
        byte_rate(outpaced.link_bytes_per_s),
        outpaced.then
    );
    let else_ = format!("else: stop, and {}", outpaced.choices);
    let room = width.saturating_sub(INDENT).max(20);
    let mut lines = Vec::new();
    for (text, tone) in [(what, Tone::Warn), (else_, Tone::Faint)] {
        for piece in wrap(&text, room) {
            let name = if lines.is_empty() { "too fast" } else { "" };
            lines.push(row(name).tone(tone, piece));
        }
    }
    lines
}

fn now(migration: &Migration, progress: &Progress, mood: Mood, width: usize) -> Line {
    let line = match mood {
        Mood::Stopping => row("now").tone(
            Tone::Warn,
            format!(
                "stopping; {} stays on {}",
                migration.guest, migration.source
            ),
        ),
        Mood::Watching | Mood::Asked => row("now").plain(doing(migration, progress)),
    };
    let tip = format!("Ctrl-C: stop and stay on {}", migration.source);
    let start = width.saturating_sub(tip.chars().count() + 1);
    let may_stop = progress.phase < Phase::HandingOver && mood == Mood::Watching;
    if may_stop && line.columns() + 3 <= start {
        return line.column(start).tone(Tone::Faint, tip);
    }
    line
}

fn doing(migration: &Migration, progress: &Progress) -> String {
    let Migration {
        guest,
        source,
        destination,
        ..
    } = migration;
    match progress.phase {
        Phase::Preparing => format!("preparing {destination}"),
        Phase::Precopy if progress.awaits_bases => {
            format!("{guest} runs on until {destination} has what its disks stand on")
        }
        Phase::Precopy => precopy(progress),
        Phase::Stopping => format!("{guest} is stopped: last pages and device state"),
        Phase::Loading => format!("{guest} is stopped: {destination} loads it"),
        Phase::Verifying => format!("{guest} is stopped: both sides compare what they have"),
        Phase::HandingOver => format!("handing {guest} over to {destination}"),
        Phase::Finishing => match left_bytes(progress) {
            0 => format!("{guest} runs on {destination}; {source} cleans up"),
            left => {
                let left = show_bytes(left);
                let waits = match progress.link.interrupted_ms {
                    Some(_) => "; that waits for the link, and the guest for nothing else",
                    None => "",
                };
                format!(
                    "{guest} runs on {destination}, which fetches {left} of its disks yet{waits}"
                )
            }
        },
    }
}

/// Returns the missing bytes of a guest's disks, while it runs at the destination.
fn left_bytes(progress: &Progress) -> u64 {
    let disks = progress.regions.iter().filter(|region| region.disk);
    let blocks = disks.map(|disk| disk.blocks_pending);
    blocks.sum::<u64>().saturating_mul(BLOCK_SIZE as u64)
}

fn precopy(progress: &Progress) -> String {
    let mut parts = Vec::new();
    if let Some(pass) = progress.pass {
        parts.push(format!("pass {pass}"));
    }
    if let Some(downtime_ms) = progress.predicted_downtime_ms {
        parts.push(format!(
            "predicted downtime {}",
            figure::ms(Some(downtime_ms))
        ));
    }
    if let Some(remaining) = progress.remaining_ms.filter(|left| left.high > 0) {
        parts.push(figure::remaining(remaining));
    }
    if parts.is_empty() {
        parts.push("memory is sent".to_owned());
    }
    parts.join(" · ")
}

/// Returns the same as one plain line, for outputs that cannot be redrawn in place.
pub(crate) fn plain(migration: &Migration, progress: &Progress) -> Line {
    let mut parts = vec![format!("{:>3} s", progress.elapsed_ms / 1000)];
    let (total, settled) = blocks(progress);
    if total > 0 {
        parts.push(format!("memory {} %", percent(settled, total)));
        parts.push(format!("{} sent", show_bytes(progress.link.sent_bytes)));
    }
    if let Some(silent_ms) = progress.link.interrupted_ms {
        let silent = figure::ms(Some(silent_ms));
        parts.push(format!(
            "nothing heard from {} for {silent}",
            migration.destination
        ));
    } else if let Some(rate) = progress.link.rate_bps {
        parts.push(show_bit_rate(rate));
    }
    parts.push(doing(migration, progress));
    parts.extend(fetching::unreadable(migration, progress));
    if let (Some(outpaced), Phase::Precopy) = (&progress.outpaced, progress.phase) {
        parts.push(format!("writes too fast: {}", outpaced.then));
    }
    Line::text(parts.join(" · "))
}

/// Formats the end of a completed migration.
pub(crate) fn completed(
    migration: &Migration,
    progress: &Progress,
    report: &Report,
    short_id: &str,
) -> Vec<Line> {
    let Migration {
        guest, destination, ..
    } = migration;
    let mut parts = vec![format!("{guest} runs on {destination}")];
    if let Some(downtime_ms) = report.downtime_ms {
        parts.push(format!("down {}", figure::precise_ms(Some(downtime_ms))));
    }
    if let Some(total_ms) = report.total_ms {
        parts.push(figure::ms(Some(total_ms)));
    }
    if let Some(bytes) = report.link_bytes {
        let memory = blocks(progress).0.saturating_mul(BLOCK_SIZE as u64);
        let disks: u64 = report.disks.iter().map(|disk| disk.allocated_bytes).sum();
        let of = match (memory, disks) {
            (0, _) => String::new(),
            (memory, 0) => format!(" (of {} of memory)", show_bytes(memory)),
            (memory, disks) => format!(
                " (of {} of memory and {} of disks)",
                show_bytes(memory),
                show_bytes(disks)
            ),
        };
        parts.push(format!("{} sent{of}", show_bytes(bytes)));
    }
    if let Some(verify) = &report.verify
        && verify.different_blocks == 0
    {
        parts.push("both sides compared equal".to_owned());
    }
    let line = Line::default().tone(Tone::Good, "✓ ");
    let mut lines = vec![line.plain(parts.join(" · "))];
    lines.extend(properties::end(report));
    lines.push(report_line(short_id));
    lines
}

/// Formats the end of a migration that was stopped on request.
pub(crate) fn stopped(migration: &Migration, progress: &Progress, short_id: &str) -> Vec<Line> {
    let time = figure::ms(Some(progress.elapsed_ms));
    let sent = show_bytes(progress.link.sent_bytes);
    let mut text = format!("stopped after {time}, {sent} sent");
    match progress
        .reason
        .as_ref()
        .and_then(|r| r.state_of_guest.as_ref())
    {
        Some(state) => text.push_str(&format!("; {state}")),
        None => text.push_str(&format!(
            "; {} runs on {}",
            migration.guest, migration.source
        )),
    }
    vec![Line::text(text), report_line(short_id)]
}

/// Formats the end of a migration in doubt.
pub(crate) fn in_doubt(migration: &Migration, progress: &Progress) -> Vec<Line> {
    let Migration {
        guest,
        source,
        destination,
        ..
    } = migration;
    let what = progress.reason.as_ref().map_or_else(
        || format!("{source} and {destination} lost each other while {guest} was handed over"),
        |reason| reason.message.clone(),
    );
    let hint = progress.reason.as_ref().and_then(|r| r.hint.clone());
    let hint = hint.unwrap_or_else(|| {
        format!("repair the link between {source} and {destination}; it resolves by itself")
    });
    let state = progress
        .reason
        .as_ref()
        .and_then(|r| r.state_of_guest.clone());
    let state = state.unwrap_or_else(|| {
        format!("{guest} does not run on {source}; it runs on {destination}, or nowhere yet")
    });
    vec![
        Line::default()
            .tone(Tone::Bad, "in doubt")
            .plain(format!(": {what}")),
        Line::text(format!("  hint: {hint}")),
        Line::text(format!("  {state}")),
    ]
}

fn report_line(short_id: &str) -> Line {
    Line::text("  report: ").tone(Tone::Strong, format!("longhaul report {short_id}"))
}

/// Returns the exit code of a migration: 0 the guest runs at the destination, 130 it was stopped, 3
/// it was refused before anything moved, 4 in doubt, 1 everything else.
pub(crate) fn exit_code(progress: &Progress) -> u8 {
    match progress.outcome {
        Some(Outcome::Completed) => 0,
        Some(Outcome::Aborted) => 130,
        Some(Outcome::Failed) if progress.phase == Phase::Preparing => 3,
        Some(Outcome::InDoubt) => 4,
        Some(Outcome::Failed) | None => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;
    use crate::cli::paint::golden;

    #[test]
    fn the_display_in_each_phase() {
        let migration = sample::migration();
        let mut lines = Vec::new();
        for phase in Phase::ALL {
            let mut progress = sample::progress();
            progress.phase = phase;
            if phase == Phase::Preparing {
                progress.regions.clear();
            }
            lines.extend(frame(&migration, &progress, Mood::Watching, 120));
            lines.push(Line::default());
        }
        golden::check_lines("live", &lines, 120);
    }

    #[test]
    fn the_display_in_trouble_and_in_a_narrow_terminal() {
        let migration = sample::migration();
        let mut progress = sample::progress();
        progress.link.limit_bps = Some(80_000_000);
        progress.dirty_rate_bytes_per_s = None;
        let mut lines = frame(&migration, &progress, Mood::Asked, 72);
        lines.push(Line::default());
        progress.link.interrupted_ms = Some(12_300);
        lines.extend(frame(&migration, &progress, Mood::Stopping, 72));
        lines.push(Line::default());
        progress.awaits_bases = true;
        lines.extend(frame(&migration, &progress, Mood::Asked, 72));
        golden::check_lines("live_narrow", &lines, 72);
    }

    #[test]
    fn colours_are_where_they_mean_something() {
        let lines = frame(
            &sample::migration(),
            &sample::progress(),
            Mood::Watching,
            110,
        );
        let text: String = lines
            .iter()
            .map(|line| line.render(110, true).replace('\x1b', "\\e") + "\n")
            .collect();
        golden::check("live_coloured", &text);
    }

    #[test]
    fn the_end() {
        let migration = sample::migration();
        let mut progress = sample::progress();
        let mut lines = vec![plain(&migration, &progress)];
        lines.extend(completed(&migration, &progress, &sample::report(), "7f3a"));
        progress.outcome = Some(Outcome::Aborted);
        lines.extend(stopped(&migration, &progress, "7f3a"));
        progress.outcome = Some(Outcome::InDoubt);
        lines.extend(in_doubt(&migration, &progress));
        golden::check_lines("ends", &lines, 120);
    }

    #[test]
    fn exit_codes_tell_the_outcome() {
        let mut progress = sample::progress();
        let mut code = |phase, outcome| {
            progress.phase = phase;
            progress.outcome = Some(outcome);
            exit_code(&progress)
        };
        assert_eq!(code(Phase::Finishing, Outcome::Completed), 0);
        assert_eq!(code(Phase::Precopy, Outcome::Aborted), 130);
        assert_eq!(code(Phase::Preparing, Outcome::Failed), 3);
        assert_eq!(code(Phase::Loading, Outcome::Failed), 1);
        assert_eq!(code(Phase::HandingOver, Outcome::InDoubt), 4);
    }
}
