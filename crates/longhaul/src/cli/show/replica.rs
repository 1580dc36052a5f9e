//! Formats replications and replicas.

use crate::cli::paint::{Line, Tone, head, table};
use crate::cli::parcel::count;
use crate::cli::replica::{RestoredDocument, tone};
use crate::cli::show::figure;
use longhaul_api::{
    FailedOver, OtherSide, Replica, ReplicaVersion, Replication, ReplicationState, Retention,
};
use longhaul_protocol::units::show_bytes;

/// What is not known.
const UNKNOWN: &str = "–";

/// Formats a time in seconds, in the largest unit of which it is a multiple.
fn time(seconds: u64) -> String {
    let units = [(86_400, "days"), (3600, "h"), (60, "min")];
    let whole = units
        .into_iter()
        .find(|(unit, _)| seconds >= *unit && seconds.is_multiple_of(*unit));
    match whole {
        Some((unit, name)) => format!("{} {name}", seconds / unit),
        None => format!("{seconds} s"),
    }
}

/// Formats how old something is.
fn behind(seconds: u64) -> String {
    figure::age(0, seconds * 1000).replace(" ago", "")
}

/// Formats the replications of this host's guests.
pub(crate) fn replications(all: &[Replication], now_unix_ms: u64) -> Vec<Line> {
    if all.is_empty() {
        return vec![
            Line::text("No guest is replicated from here. To begin:  ").tone(
                Tone::Strong,
                "longhaul replicate GUEST --to HOST --every 10min",
            ),
        ];
    }
    let mut rows = vec![head(&[
        "guest",
        "to",
        "every",
        "state",
        "version",
        "of",
        "changed since",
        "sent last",
        "took",
    ])];
    for one in all {
        let late = one.behind_s.is_some_and(|behind| behind > 2 * one.every_s);
        let (state, name) = match one.state {
            ReplicationState::Waiting => (Tone::Good, "waiting".to_owned()),
            ReplicationState::Running => {
                let reading = one.reading.as_ref();
                let part = reading.map_or(String::new(), |(_, part)| format!(" {part} %"));
                (Tone::Good, format!("running{part}"))
            }
            ReplicationState::Failing => (Tone::Bad, "failing".to_owned()),
            ReplicationState::Ended => (Tone::Bad, "ended".to_owned()),
        };
        let text = |value: Option<String>| Line::text(value.unwrap_or_else(|| UNKNOWN.to_owned()));
        let age = one.last.map(|last| figure::age(last.unix_ms, now_unix_ms));
        rows.push(vec![
            Line::text(one.guest.clone()),
            Line::text(one.to.clone()),
            Line::text(time(one.every_s)),
            Line::default().tone(state, name),
            text(one.last.map(|last| last.version.to_string())),
            Line::default().tone(tone(late), age.unwrap_or_else(|| UNKNOWN.to_owned())),
            text(one.changed_bytes.map(show_bytes)),
            Line::text(show_bytes(one.sent_bytes)),
            text(one.took_ms.map(|took| figure::ms(Some(took)))),
        ]);
    }
    let mut lines = table(rows);
    for one in all {
        if let Some(trouble) = &one.trouble {
            let line = Line::default().tone(Tone::Strong, one.guest.clone());
            lines.push(line.plain(format!(": {trouble}")));
        }
    }
    lines
}

/// Formats which versions are kept.
fn kept(keep: Retention) -> String {
    let mut text = count(keep.last.into(), "version");
    let periods = [
        (keep.hourly, "hour"),
        (keep.daily, "day"),
        (keep.weekly, "week"),
    ];
    let periods = periods.iter().filter(|(number, _)| *number > 0);
    let each: Vec<String> = periods
        .map(|(number, period)| count((*number).into(), period))
        .collect();
    if let Some((last, others)) = each.split_last() {
        let others = match others {
            [] => String::new(),
            others => format!("{} and ", others.join(", ")),
        };
        text.push_str(&format!(", and one for each of {others}{last}"));
    }
    text
}

/// Formats a replication that was begun.
pub(crate) fn begun(one: &Replication) -> Vec<Line> {
    let first = Line::default().tone(Tone::Good, "✓ ").plain(format!(
        "{} is replicated to {} every {}; {} keeps {}",
        one.guest,
        one.to,
        time(one.every_s),
        one.to,
        kept(one.keep)
    ));
    let next = Line::text("  how it goes:  ").tone(Tone::Strong, "longhaul replicate");
    vec![first, next]
}

/// Formats the replicas that this host keeps.
pub(crate) fn replicas(all: &[Replica], now_unix_ms: u64) -> Vec<Line> {
    if all.is_empty() {
        return vec![Line::text("This host keeps no replicas.")];
    }
    let mut lines = Vec::new();
    for replica in all {
        let age = match replica.behind_s {
            Some(seconds) => format!("{} behind", behind(seconds)),
            None => "no version of one moment yet".to_owned(),
        };
        let line = Line::default()
            .tone(Tone::Strong, replica.guest.clone())
            .plain(format!(
                " from {}, every {}: ",
                replica.from,
                time(replica.every_s)
            ))
            .tone(tone(replica.late || replica.behind_s.is_none()), age);
        lines.push(line);
        if let Some(trouble) = &replica.trouble {
            lines.push(Line::text("  ").tone(Tone::Bad, trouble.clone()));
        }
        if let Some(version) = replica.failing_over_to {
            let text = format!("  a failover to version {version} was begun: repeat it");
            lines.push(Line::default().tone(Tone::Bad, text));
        }
        let versions = replica.versions.iter().rev();
        lines.extend(versions.map(|version| {
            let line = Line::text(format!("  version {}", moment(version, now_unix_ms)));
            match version.consistent {
                true if version.frozen => line.plain("   file systems frozen"),
                true => line,
                false => line.tone(Tone::Warn, "; its disks are of different moments"),
            }
        }));
    }
    lines
}

fn moment(version: &ReplicaVersion, now_unix_ms: u64) -> String {
    format!(
        "{}   {}   {}",
        version.version,
        figure::utc(version.unix_ms),
        figure::age(version.unix_ms, now_unix_ms)
    )
}

/// Formats what a failover means.
pub(crate) fn stakes(
    replica: &Replica,
    asked: Option<u64>,
    other_side: OtherSide,
    now_unix_ms: u64,
) -> Vec<Line> {
    let (guest, from) = (&replica.guest, &replica.from);
    let mut lines = vec![Line::text("You say: ").tone(
        Tone::Strong,
        format!(
            "{from} is {}, and never runs {guest} again.",
            other_side.name()
        ),
    )];
    let mut versions = replica.versions.iter();
    let version = match asked {
        Some(asked) => versions.find(|version| version.version == asked),
        None => versions.rfind(|version| version.consistent),
    };
    if let Some(version) = version {
        let newest = replica.versions.last() == Some(version);
        let rest = match newest {
            true => "The earlier versions are given up; to keep one: longhaul replicas restore.",
            false => "Its disks are copied first. The replica stays, with all its versions.",
        };
        lines.push(Line::text(format!(
            "{guest} belongs to this host from now on, and starts as it was {} (version {}). What \
             it did since is lost, and its memory.",
            figure::age(version.unix_ms, now_unix_ms),
            version.version
        )));
        lines.push(Line::text(rest));
    }
    lines.push(Line::text(format!(
        "If {from} comes back and runs {guest}, there are two copies. Its agent asks this host \
         before it starts {guest}; other programs there do not."
    )));
    lines
}

/// Formats a failover that is done.
pub(crate) fn failed_over(done: &FailedOver) -> Vec<Line> {
    let guest = &done.guest;
    let state = match (done.started, &done.trouble) {
        (true, _) => format!("{guest} runs here, from version {}", done.version.version),
        (false, None) => format!(
            "{guest} belongs to this host, with version {}; to start it: longhaul guests start \
             {guest}",
            done.version.version
        ),
        (false, Some(_)) => format!(
            "{guest} belongs to this host, with version {}, and is not started",
            done.version.version
        ),
    };
    let mut lines = vec![Line::default().tone(Tone::Good, "✓ ").plain(state)];
    if let Some(trouble) = &done.trouble {
        lines.push(Line::text("  ").tone(Tone::Bad, trouble.clone()));
    }
    let images = done.images.iter();
    lines.extend(images.map(|image| Line::text(format!("  {image}"))));
    if done.started {
        let back = format!("longhaul replicate {guest} --to HOST, then longhaul migrate {guest}");
        lines.push(Line::text("  to bring it back later:  ").tone(Tone::Strong, back));
    }
    lines
}

/// Formats a version that was restored.
pub(crate) fn restored(document: &RestoredDocument) -> Vec<Line> {
    let text = format!(
        "version {} of {} ({}) is restored, and was read back",
        document.version,
        document.guest,
        figure::utc(document.unix_ms)
    );
    let mut lines = vec![Line::default().tone(Tone::Good, "✓ ").plain(text)];
    lines.extend(document.paths());
    lines
}

/// Formats work on a replica.
pub(crate) fn working(what: &str, guest: &str, (done, all): (u64, u64), width: usize) -> Line {
    let (full, empty) = figure::bar(done, all.max(1), (width / 3).min(30));
    Line::text(format!("{what} {guest} "))
        .tone(Tone::Good, full)
        .plain(format!("{empty} {}", figure::part_of(done, all)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000_000;

    fn text(lines: &[Line]) -> String {
        let lines = lines.iter().map(|line| line.render(usize::MAX, false));
        lines.collect::<Vec<_>>().join("\n")
    }

    fn version(version: u64, seconds_ago: u64, consistent: bool) -> ReplicaVersion {
        ReplicaVersion {
            version,
            unix_ms: NOW - seconds_ago * 1000,
            consistent,
            frozen: version == 7,
        }
    }

    fn replica() -> Replica {
        Replica {
            guest: "web-7".to_owned(),
            from: "lyon".to_owned(),
            every_s: 600,
            keep: Retention {
                last: 24,
                hourly: 0,
                daily: 7,
                weekly: 1,
            },
            versions: vec![
                version(6, 1500, true),
                version(7, 900, true),
                version(8, 300, false),
            ],
            behind_s: Some(900),
            late: false,
            failing_over_to: None,
            trouble: None,
        }
    }

    #[test]
    fn times_are_said_once() {
        let keep = replica().keep;
        assert_eq!(
            kept(keep),
            "24 versions, and one for each of 7 days and 1 week"
        );
        let only = Retention {
            last: 1,
            daily: 0,
            ..keep
        };
        assert_eq!(kept(only), "1 version, and one for each of 1 week");
        assert_eq!(
            [10, 90, 600, 7200, 604_800].map(time),
            ["10 s", "90 s", "10 min", "2 h", "7 days"]
        );
        let said = text(&replicas(&[replica()], NOW));
        assert!(
            said.starts_with("web-7 from lyon, every 10 min: 15 min behind"),
            "{said}"
        );
        assert!(
            said.contains("version 8   2027-01-15 07:55:00.000 UTC   5 min ago; its"),
            "{said}"
        );
        let frozen = said.matches("ago   file systems frozen").count();
        assert_eq!(frozen, 1, "{said}");
        assert!(
            !said.contains("ago ago") && !said.contains("UTC UTC"),
            "{said}"
        );
    }

    #[test]
    fn a_failover_says_from_when_the_guest_goes_on() {
        let newest = text(&stakes(&replica(), None, OtherSide::Dead, NOW));
        assert!(
            newest.contains("as it was 15 min ago (version 7)"),
            "{newest}"
        );
        assert!(newest.contains("copied first"), "{newest}");
        let mut replica = replica();
        replica.versions.pop();
        let newest = text(&stakes(&replica, None, OtherSide::Fenced, NOW));
        assert!(
            newest.contains("lyon is fenced") && newest.contains("given up"),
            "{newest}"
        );
        let earlier = text(&stakes(&replica, Some(6), OtherSide::Dead, NOW));
        assert!(earlier.contains("25 min ago (version 6)"), "{earlier}");
    }
}
