//! Formats figures with their units; an unmeasured one is a dash.

use longhaul_api::{Judgement, Outcome, PathUse, Phase, PredictedRange, Strategy};
use longhaul_protocol::units::{show_bit_rate, show_bytes, show_duration};
use std::time::Duration;

/// The text for an unmeasured figure.
pub(crate) const UNKNOWN: &str = "-";

/// Formats a number of bytes.
pub(crate) fn bytes(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| UNKNOWN.to_owned(), show_bytes)
}

/// Formats what each network path has carried; nothing where there is only one.
pub(crate) fn paths(paths: &[PathUse]) -> Vec<String> {
    let one = |path: &PathUse| {
        let from = path.from.as_ref();
        let from = from.map_or(String::new(), |from| format!("from {from} "));
        let state = if path.up { "" } else { ", lost" };
        let bytes = show_bytes(path.sent_bytes);
        format!("{bytes} {from}to {}{state}", path.to)
    };
    paths.iter().map(one).collect()
}

/// Formats a predicted range: its middle, and its ends.
pub(crate) fn range(range: Option<PredictedRange>, show: impl Fn(u64) -> String) -> String {
    range.map_or_else(
        || UNKNOWN.to_owned(),
        |PredictedRange { low, likely, high }| {
            let [low, likely, high] = [low, likely, high].map(show);
            // One unit is enough for both ends.
            let ends = low.split_once(' ').zip(high.split_once(' '));
            let low = match ends {
                Some(((low, unit), (_, same))) if unit == same => low,
                _ => &low,
            };
            format!("{likely} ({low} to {high})")
        },
    )
}

/// Formats the time that remains, rounded to what can be told.
pub(crate) fn remaining(range: PredictedRange) -> String {
    let rounded = |time_ms: u64| {
        let step_ms = match time_ms {
            0..10_000 => 1000,
            10_000..60_000 => 5000,
            60_000..600_000 => 30_000,
            _ => 300_000,
        };
        ms(Some(time_ms.div_ceil(step_ms) * step_ms))
    };
    let [low, high] = [range.low, range.high].map(rounded);
    match low == high {
        true => format!("about {high} left"),
        false => format!("{low} to {high} left"),
    }
}

/// Returns how a figure compares with its predicted range.
pub(crate) fn judgement(judgement: Judgement) -> &'static str {
    match judgement {
        Judgement::Inside => "inside",
        Judgement::Below => "outside: less",
        Judgement::Above => "outside: more",
    }
}

/// Formats a rate in bits per second.
pub(crate) fn bit_rate(rate_bps: Option<u64>) -> String {
    rate_bps.map_or_else(|| UNKNOWN.to_owned(), show_bit_rate)
}

/// Formats a rate in bytes per second.
pub(crate) fn byte_rate(bytes_per_s: u64) -> String {
    format!("{}/s", show_bytes(bytes_per_s))
}

/// Formats a time in milliseconds.
pub(crate) fn ms(time_ms: Option<u64>) -> String {
    time_ms.map_or_else(
        || UNKNOWN.to_owned(),
        |time_ms| show_duration(Duration::from_millis(time_ms)),
    )
}

/// Formats a time in fractional milliseconds.
pub(crate) fn precise_ms(time_ms: Option<f64>) -> String {
    time_ms.map_or_else(
        || UNKNOWN.to_owned(),
        |time_ms| show_duration(time(time_ms)),
    )
}

/// Formats a number of milliseconds without a unit, for lists of which only the last has its unit.
pub(crate) fn bare_ms(time_ms: f64) -> String {
    if time_ms < 9.95 {
        format!("{time_ms:.1}")
    } else {
        format!("{time_ms:.0}")
    }
}

fn time(time_ms: f64) -> Duration {
    Duration::try_from_secs_f64(time_ms / 1e3).unwrap_or_default()
}

/// Formats a part of a number of bytes, in the unit of the whole: `2.9 of 4.0 GiB`.
pub(crate) fn part_of(part: u64, whole: u64) -> String {
    let (factor, unit) = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")]
        .into_iter()
        .find(|(factor, _)| whole >= *factor)
        .unwrap_or((1 << 10, "KiB"));
    let show = |value: u64| {
        let value = value as f64 / factor as f64;
        if value < 99.95 {
            format!("{value:.1}")
        } else {
            format!("{value:.0}")
        }
    };
    format!("{} of {} {unit}", show(part), show(whole))
}

/// Returns the share in whole percents; 100 only for all.
pub(crate) fn percent(part: u64, whole: u64) -> u64 {
    match whole {
        0 => 100,
        whole => u64::try_from(u128::from(part.min(whole)) * 100 / u128::from(whole)).unwrap_or(0),
    }
}

/// Returns the two parts of a bar of `columns` columns: the completed and the remaining one.
pub(crate) fn bar(part: u64, whole: u64, columns: usize) -> (String, String) {
    let halves = u128::from(part.min(whole)) * columns as u128 * 2 / u128::from(whole.max(1));
    let halves = usize::try_from(halves).unwrap_or(0);
    let mut done = "━".repeat(halves / 2);
    if halves % 2 == 1 {
        done.push('╸');
    }
    (done, "─".repeat(columns - halves.div_ceil(2)))
}

/// Returns the age of a moment.
pub(crate) fn age(then_unix_ms: u64, now_unix_ms: u64) -> String {
    let s = now_unix_ms.saturating_sub(then_unix_ms) / 1000;
    match s {
        0..120 => format!("{s} s ago"),
        120..7200 => format!("{} min ago", s / 60),
        7200..172_800 => format!("{} h ago", s / 3600),
        _ => format!("{} days ago", s / 86_400),
    }
}

/// Formats a moment, in UTC.
pub(crate) fn utc(unix_ms: u64) -> String {
    let (days, ms) = (unix_ms / 86_400_000, unix_ms % 86_400_000);
    let (year, month, day) = date(days);
    let (hours, minutes) = (ms / 3_600_000, ms / 60_000 % 60);
    let (s, ms) = (ms / 1000 % 60, ms % 1000);
    format!("{year:04}-{month:02}-{day:02} {hours:02}:{minutes:02}:{s:02}.{ms:03} UTC")
}

/// Returns the date of a day since 1970. Years are counted from March on: a leap day is then the
/// last of its year, and every 400 years have the same number of days.
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = match month {
        0..10 => (year, month + 3),
        _ => (year + 1, month - 9),
    };
    (era * 400 + year, month, day)
}

/// Returns the display name of a strategy.
pub(crate) fn strategy(strategy: Strategy) -> &'static str {
    match strategy {
        Strategy::Precopy => "pre-copy",
        Strategy::Hybrid => "hybrid",
        Strategy::Postcopy => "post-copy",
        Strategy::Auto => "auto",
    }
}

/// Returns the display name of a phase.
pub(crate) fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Preparing => "preparing",
        Phase::Precopy => "pre-copy",
        Phase::Stopping => "stopping",
        Phase::Loading => "loading",
        Phase::Verifying => "verifying",
        Phase::HandingOver => "handing over",
        Phase::Finishing => "finishing",
    }
}

/// Returns the display name of an outcome.
pub(crate) fn outcome(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Completed => "completed",
        Outcome::Aborted => "stopped",
        Outcome::Failed => "failed",
        Outcome::InDoubt => "in doubt",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_shown_with_its_bytes_and_whether_it_is_lost() {
        let path = |from: Option<&str>, up| PathUse {
            to: "192.0.2.7:7400".to_owned(),
            from: from.map(str::to_owned),
            sent_bytes: 3 << 20,
            up,
        };
        let shown = paths(&[path(None, true), path(Some("10.0.0.2"), false)]);
        assert_eq!(shown[0], "3 MiB to 192.0.2.7:7400");
        assert_eq!(shown[1], "3 MiB from 10.0.0.2 to 192.0.2.7:7400, lost");
    }

    #[test]
    fn figures_have_units_and_gaps_are_dashes() {
        assert_eq!(bytes(None), "-");
        assert_eq!(part_of(3_113_851_289, 4 << 30), "2.9 of 4.0 GiB");
        assert_eq!(part_of(5 << 20, 256 << 20), "5.0 of 256 MiB");
        assert_eq!(precise_ms(Some(0.4)), "0.4 ms");
        assert_eq!(precise_ms(Some(f64::NAN)), "0 ms");
        assert_eq!(percent(999, 1000), 99);
        assert_eq!(percent(0, 0), 100);
        assert_eq!(age(1_000, 60_000), "59 s ago");
        assert_eq!(utc(0), "1970-01-01 00:00:00.000 UTC");
        assert_eq!(utc(951_825_599_999), "2000-02-29 11:59:59.999 UTC");
        assert_eq!(utc(1_800_000_000_123), "2027-01-15 08:00:00.123 UTC");
        assert_eq!(utc(4_107_542_400_000), "2100-03-01 00:00:00.000 UTC");
        // A damaged time is shown, too.
        assert!(utc(u64::MAX).ends_with("UTC"));
        assert_eq!(age(0, 7_300_000), "2 h ago");
    }
}
