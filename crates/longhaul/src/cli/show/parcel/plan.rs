//! Formats the comparison of a parcel with the link.

use crate::cli::paint::{Line, Tone, head, table};
use crate::cli::parcel::{PlanDocument, WayDocument, count};
use crate::cli::show::figure::{UNKNOWN, byte_rate, bytes};
use longhaul_protocol::units::{show_bit_rate, show_bytes};

/// Formats a time in days, or hours or minutes if it is short.
fn days(s: u64) -> String {
    let value = |per: f64, one: &str| {
        let value = s as f64 / per;
        match format!("{value:.1}").trim_end_matches(".0") {
            "1" => format!("1 {one}"),
            value => format!("{value} {one}s"),
        }
    };
    match s {
        0..7200 => format!("{} min", s / 60),
        7200..86_400 => value(3600.0, "hour"),
        86_400..8_640_000 => value(86_400.0, "day"),
        8_640_000.. => format!("{} days", s / 86_400),
    }
}

fn name(way: &WayDocument) -> &'static str {
    match way.way {
        "link" => "  all by link",
        "parcel" => "  parcel, as exported now",
        _ => "  parcel, topped up at the end",
    }
}

fn row(way: &WayDocument, is_first: bool) -> Vec<Line> {
    let tone = if is_first { Tone::Good } else { Tone::Plain };
    let date = |date: Option<longhaul_parcel::Date>| {
        Line::text(date.map_or_else(|| UNKNOWN.to_owned(), |date| date.to_string()))
    };
    let rate = way.loses_above_bps.map(show_bit_rate);
    vec![
        Line::default().tone(tone, name(way)),
        date(way.leaves),
        date(way.imported),
        match way.done_s {
            None => Line::default().tone(Tone::Bad, "never"),
            Some(_) => date(way.done),
        },
        Line::text(way.done_s.map_or_else(|| UNKNOWN.to_owned(), days)),
        Line::text(bytes(way.link_bytes)),
        Line::text(
            way.cost
                .map_or_else(|| UNKNOWN.to_owned(), |cost| format!("{cost:.2}")),
        ),
        Line::text(rate.unwrap_or_else(|| UNKNOWN.to_owned())),
    ]
}

/// Formats the comparison.
pub(crate) fn planned(document: &PlanDocument) -> Vec<Line> {
    let mut lines = vec![
        Line::default()
            .tone(Tone::Strong, show_bytes(document.bytes))
            .plain(format!(
                " of {} · link {} · {} change in a day · the courier takes {}",
                count(document.guests, "guest"),
                show_bit_rate(document.rate_bps),
                show_bytes(document.changed_bytes_per_day),
                days((document.courier_days * 86_400.0) as u64)
            )),
    ];
    let mut rows = vec![head(&[
        "  WAY",
        "LEAVES",
        "IMPORTED",
        "DONE",
        "TAKES",
        "OVER THE LINK",
        "COST",
        "LOSES ABOVE",
    ])];
    let ended = document.ways.iter().filter(|way| way.done_s.is_some());
    let first = ended.min_by_key(|way| way.done_s);
    let is_first = |way: &WayDocument| first.is_some_and(|first| first.way == way.way);
    rows.extend(document.ways.iter().map(|way| row(way, is_first(way))));
    lines.extend(table(rows));
    lines.extend(first.map(|way| Line::text(format!("  done first: {}", name(way).trim()))));
    let ends = document.ways.iter().all(|way| way.done_s.is_some());
    lines.push(Line::text(match document.guests_from {
        _ if !ends => {
            "  the disks change faster than the link carries: no move of them would end".to_owned()
        }
        Some(guests) => format!(
            "  with this courier the parcel is done earlier from {} of this size on",
            count(guests, "guest")
        ),
        None => {
            "  with this link the parcel is done later for any number of such guests".to_owned()
        }
    }));
    lines.push(Line::text(format!(
        "  assumed: devices take {}, all together, and are read back once; disks are read at {}; \
         nothing is compressed",
        byte_rate(document.device_bytes_per_s),
        byte_rate(document.disk_bytes_per_s)
    )));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::{Changes, ComparedArgs};
    use crate::cli::paint::golden;
    use crate::cli::parcel::compare;

    const NOW: u64 = 1_800_000_000;

    fn figures() -> ComparedArgs {
        ComparedArgs {
            name: None,
            bytes: None,
            guests: 1,
            rate: 100_000_000,
            changed_per_day: Changes::Part(0.005),
            courier_days: 1.0,
            leaves_in: 10.0,
            courier_cost: 300.0,
            link_cost_per_gb: 0.05,
            device_rate: 150 << 20,
            disk_rate: 500 << 20,
        }
    }

    #[test]
    fn the_ways_are_below_each_other() {
        let tib = |tib: u64| tib << 40;
        let mut lines = planned(&compare((tib(20), 40), &figures(), NOW));
        lines.push(Line::default());
        // The link is earlier.
        let fast = ComparedArgs {
            rate: 2_000_000_000,
            leaves_in: 0.0,
            courier_days: 0.5,
            ..figures()
        };
        lines.extend(planned(&compare((tib(1), 1), &fast, NOW)));
        lines.push(Line::default());
        // The disks change faster than the link carries.
        let busy = ComparedArgs {
            changed_per_day: Changes::Bytes(tib(2)),
            ..figures()
        };
        lines.extend(planned(&compare((tib(20), 40), &busy, NOW)));
        golden::check_lines("parcel_plan", &lines, 140);
    }
}
