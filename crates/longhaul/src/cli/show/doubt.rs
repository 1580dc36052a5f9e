//! Formats a migration whose agents have lost each other: the records of each side, the events that
//! may resolve it, the operator's options and their risks.

use super::figure;
use crate::cli::paint::{Line, Tone, wrap};
use longhaul_api::{Doubt, HandoverRecord, Migration, OtherSide, Side, WayOut};

/// The indent of texts with a title before them.
const INDENT: usize = 10;

/// Returns the known facts, for display below the list of migrations.
pub(crate) fn block(
    migration: &Migration,
    doubt: &Doubt,
    short_id: &str,
    now_unix_ms: u64,
    width: usize,
) -> Vec<Line> {
    let Migration { guest, source, .. } = migration;
    let destination = &migration.destination;
    let since = figure::age(doubt.since_unix_ms, now_unix_ms);
    let named = Line::default().tone(Tone::Strong, guest.clone());
    let named = match belongs_to_destination(doubt) {
        false => named.plain(" is ").tone(Tone::Bad, "in doubt"),
        true => named
            .plain(format!(", which belongs to {destination}, is "))
            .tone(Tone::Bad, "disconnected"),
    };
    let has_lost_it = migration.side == Side::Destination
        && belongs_to_destination(doubt)
        && doubt.reachable == Some(true);
    let what = match has_lost_it {
        true => format!(": {source} has lost memory of it {since}"),
        false => format!(": {source} and {destination} lost each other {since}"),
    };
    let mut lines = vec![named.plain(what)];
    lines.extend(known(migration, doubt, now_unix_ms, width));
    lines.extend(titled("then", &doubt.then, width));
    let mut title = "ways out";
    for way in &doubt.ways_out {
        let text = format!("if {}:", way.only_if);
        lines.extend(titled(title, &text, width));
        title = "";
        lines.push(
            Line::text(" ".repeat(INDENT + 4))
                .plain(on_host(migration, way))
                .tone(Tone::Strong, command(short_id, way)),
        );
    }
    lines
}

/// Returns whether the guest belongs to the destination, which only needs the source's data.
pub(crate) fn belongs_to_destination(doubt: &Doubt) -> bool {
    matches!(
        doubt.record,
        HandoverRecord::Done | HandoverRecord::Committed
    )
}

/// Returns the host on which a command must be typed, if that is not this one.
fn on_host(migration: &Migration, way: &WayOut) -> String {
    match way.tell == host(migration, migration.side) {
        true => String::new(),
        false => format!("on {}: ", way.tell),
    }
}

fn command(id: &str, way: &WayOut) -> String {
    let other = match way.needs_other_side {
        true => " --other-side dead|fenced",
        false => "",
    };
    let missing = match way.gives_up_missing {
        true => " --give-up-missing",
        false => "",
    };
    let run_on = name(way.run_on);
    format!("longhaul resolve {id} --run-on {run_on}{other}{missing}")
}

fn name(side: Side) -> &'static str {
    match side {
        Side::Source => "source",
        Side::Destination => "destination",
    }
}

/// Returns the records of each side.
fn known(migration: &Migration, doubt: &Doubt, now_unix_ms: u64, width: usize) -> Vec<Line> {
    let this = host(migration, migration.side);
    let here = format!(
        "{this} wrote {} (generation {}); {}",
        doubt.record.name(),
        doubt.generation,
        doubt.here
    );
    let mut lines = titled("here", &here, width);
    let there = there(doubt, migration.side, now_unix_ms);
    lines.extend(titled("there", &there, width));
    lines
}

fn there(doubt: &Doubt, side: Side, now_unix_ms: u64) -> String {
    let other = &doubt.other_host;
    let age = |at: Option<u64>| {
        at.map(|at| figure::age(at, now_unix_ms))
            .unwrap_or_default()
    };
    let said = match (doubt.other_record, doubt.heard_unix_ms) {
        (None | Some(HandoverRecord::Began), Some(at)) => {
            format!("{other} was heard of {}, before it decided", age(Some(at)))
        }
        (Some(record), at) => format!("{other} said {} {}", record.name(), age(at)),
        (None, None) => format!("{other} has not been heard of since"),
    };
    let asked = age(doubt.asked_unix_ms);
    let reached = match (doubt.reachable, &doubt.unreachable_because) {
        (Some(true), _) => format!("it answers ({asked})"),
        (Some(false), Some(why)) => format!("it does not answer: {why} ({asked})"),
        (Some(false), None) => format!("it does not answer ({asked})"),
        (None, _) => match side {
            Side::Source => "it has not been asked yet".to_owned(),
            Side::Destination => "it is the one to call, and has not".to_owned(),
        },
    };
    format!("{}; {reached}", said.trim_end())
}

fn titled(title: &str, text: &str, width: usize) -> Vec<Line> {
    let room = width.saturating_sub(INDENT + 2).max(20);
    let mut pieces = wrap(text, room).into_iter();
    let first = pieces.next().unwrap_or_default();
    let mut lines = vec![
        Line::default()
            .plain("  ")
            .tone(Tone::Faint, title)
            .column(INDENT + 2)
            .plain(first),
    ];
    lines.extend(pieces.map(|piece| Line::text(" ".repeat(INDENT + 2)).plain(piece)));
    lines
}

/// Returns the warning for an operator who is about to end a doubt.
pub(crate) fn stakes(
    migration: &Migration,
    doubt: &Doubt,
    way: &WayOut,
    other_side: Option<OtherSide>,
    now_unix_ms: u64,
    width: usize,
) -> Vec<Line> {
    let host = host(migration, way.run_on);
    let guest = &migration.guest;
    let other = match other_side.filter(|_| way.needs_other_side) {
        Some(OtherSide::Dead) => format!(", and {} is dead", doubt.other_host),
        Some(OtherSide::Fenced) => format!(", and {} is fenced", doubt.other_host),
        None => String::new(),
    };
    let mut lines = vec![Line::text("You say: ").tone(
        Tone::Strong,
        format!("{guest} belongs to {host} from now on{other}."),
    )];
    lines.extend(known(migration, doubt, now_unix_ms, width));
    lines.extend(titled("only if", &way.only_if, width));
    lines.extend(titled("at stake", &way.at_stake, width));
    lines
}

/// Returns the host of a side.
pub(crate) fn host(migration: &Migration, side: Side) -> &str {
    match side {
        Side::Source => &migration.source,
        Side::Destination => &migration.destination,
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;
    use crate::cli::paint::golden;

    #[test]
    fn a_doubt_is_told() {
        let migration = sample::in_doubt();
        let doubt = migration.doubt.clone().unwrap();
        let now = 1_800_000_300_000;
        golden::check_lines("doubt", &block(&migration, &doubt, "7f3a", now, 120), 120);
        // Commands are not wrapped.
        golden::check_lines(
            "doubt_narrow",
            &block(&migration, &doubt, "7f3a", now, 72),
            120,
        );
        let mut lines = Vec::new();
        for (way, other) in doubt.ways_out.iter().zip([Some(OtherSide::Dead), None]) {
            lines.extend(stakes(&migration, &doubt, way, other, now, 100));
            lines.push(Line::default());
        }
        golden::check_lines("stakes", &lines, 100);
    }

    #[test]
    fn a_guest_whose_source_does_not_answer_is_told() {
        let migration = sample::disconnected();
        let doubt = migration.doubt.clone().unwrap();
        let now = 1_800_000_300_000;
        let mut lines = block(&migration, &doubt, "7f3a", now, 100);
        lines.push(Line::default());
        let dead = Some(OtherSide::Dead);
        let way = &doubt.ways_out[0];
        lines.extend(stakes(&migration, &doubt, way, dead, now, 100));
        golden::check_lines("disconnected", &lines, 120);
    }

    #[test]
    fn what_the_other_side_said_is_told_as_far_as_it_is_known() {
        let mut doubt = sample::in_doubt().doubt.unwrap();
        let mut told = |record, heard, reachable| {
            doubt.other_record = record;
            doubt.heard_unix_ms = heard;
            doubt.reachable = reachable;
            doubt.unreachable_because = None;
            doubt.asked_unix_ms = Some(99_000);
            there(&doubt, Side::Source, 100_000)
        };
        assert_eq!(
            told(None, None, None),
            "paris-2 has not been heard of since; it has not been asked yet"
        );
        assert_eq!(
            told(Some(HandoverRecord::Ready), Some(90_000), Some(true)),
            "paris-2 said READY 10 s ago; it answers (1 s ago)"
        );
    }
}
