//! Formats the comparison of a parcel with the link.

use crate::cli::paint::{Line, Tone, head, table};
use crate::cli::parcel::{PlanDocument, WayDocument, count};
use crate::cli::show::figure::{UNKNOWN, byte_rate, bytes};
use longhaul_protocol::units::{show_bit_rate, show_bytes};

/// Formats a time in days, or hours if it is short.
fn days(s: u64) -> String {
    let (hours, days) = (s as f64 / 3600.0, s as f64 / 86_400.0);
    match s {
        0..7200 => format!("{} min", s / 60),
        7200..172_800 => format!("{hours:.1} h"),
        172_800..8_640_000 => format!("{days:.1} days"),
        8_640_000.. => format!("{days:.0} days"),
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
    lines.push(Line::text(match document.guests_from {
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
    if document.ways.iter().any(|way| way.done_s.is_none()) {
        lines.push(Line::text(
            "  the disks change faster than the link carries: no move of them would end",
        ));
    }
    lines
}
