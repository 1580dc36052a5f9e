//! Formats replications and replicas.

use crate::cli::paint::{Line, Tone, head, table};
use crate::cli::replica::{RestoredDocument, tone};
use crate::cli::show::figure;
use longhaul_api::{FailedOver, OtherSide, Replica, ReplicaVersion, Replication, ReplicationState};
use longhaul_protocol::units::show_bytes;

/// What is not known.
const UNKNOWN: &str = "–";

/// Formats a time in seconds.
fn time(seconds: u64) -> String {
    figure::age(0, seconds * 1000)
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
            Line::default().tone(
                tone(late),
                age.map_or_else(|| UNKNOWN.to_owned(), |age| format!("{age} ago")),
            ),
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

/// Formats a replication that was begun.
pub(crate) fn begun(one: &Replication) -> Vec<Line> {
    let first = Line::default().tone(Tone::Good, "✓ ").plain(format!(
        "{} is replicated to {} every {}; {} keeps {} versions",
        one.guest,
        one.to,
        time(one.every_s),
        one.to,
        one.keep
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
        let behind = match replica.behind_s {
            Some(behind) => format!("{} behind", time(behind)),
            None => "no version of one moment yet".to_owned(),
        };
        let line = Line::default()
            .tone(Tone::Strong, replica.guest.clone())
            .plain(format!(
                " from {}, every {}: ",
                replica.from,
                time(replica.every_s)
            ))
            .tone(tone(replica.late || replica.behind_s.is_none()), behind);
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
                true => line,
                false => line.tone(Tone::Warn, "; its disks are of different moments"),
            }
        }));
    }
    lines
}

fn moment(version: &ReplicaVersion, now_unix_ms: u64) -> String {
    format!(
        "{}   {} UTC   {} ago",
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
            "{guest} belongs to this host from now on, and starts as of {} ago (version {}). What \
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
        "version {} of {} ({} UTC) is restored, and was read back",
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
