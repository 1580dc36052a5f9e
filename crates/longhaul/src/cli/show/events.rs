//! Formats the events of a host, one line each.

use super::{doubt, figure, list};
use crate::cli::paint::{Line, Tone};
use longhaul_api::{Doubt, Event, Migration, Progress, ReservedBy, Side, What};

/// The length at which ids are cut.
const ID_DIGITS: usize = 8;

/// Formats an event. Returns `None` for one that says nothing to people.
pub(crate) fn line(event: &Event) -> Option<Line> {
    let at = Line::default()
        .tone(Tone::Faint, figure::utc(event.unix_ms))
        .plain("  ");
    Some(match &event.what {
        What::Snapshot { lagged: true } => {
            let text = "changes were missed; the present state follows";
            at.tone(Tone::Warn, text)
        }
        What::Snapshot { lagged: false } | What::Current {} | What::Unknown => return None,
        What::Migration { migration } => self::migration(at, migration),
        What::MigrationRemoved { id } => {
            at.plain(format!("migration {} is listed no longer", short(id)))
        }
        What::GuestReserved {
            guest,
            by,
            migration,
        } => {
            let by = match (by, migration) {
                (ReservedBy::Migration, Some(id)) => {
                    format!("is reserved by migration {}", short(id))
                }
                (ReservedBy::Migration, None) => "is reserved by a migration".to_owned(),
                (ReservedBy::Agent, _) => "is reserved by the agent".to_owned(),
                (ReservedBy::MemoryCache, _) => "is reserved while its memory is cached".to_owned(),
            };
            at.tone(Tone::Strong, guest.clone()).plain(format!(" {by}"))
        }
        What::GuestReleased { guest } => at
            .tone(Tone::Strong, guest.clone())
            .plain(" is reserved no longer"),
    })
}

fn short(id: &str) -> &str {
    id.get(..ID_DIGITS).unwrap_or(id)
}

fn migration(at: Line, migration: &Migration) -> Line {
    let Migration {
        id,
        guest,
        source,
        destination,
        ..
    } = migration;
    let (tone, state) = list::state(migration);
    let mut line = at
        .tone(Tone::Strong, guest.clone())
        .plain(format!(" {source} → {destination} ({}): ", short(id)))
        .tone(tone, state);
    if let Some(doubt) = &migration.doubt {
        return line.plain(format!(": {}; {}", answers(doubt), doubt.here));
    }
    if let Some(reason) = &migration.reason {
        line = line.plain(format!(": {}", reason.message));
        for more in [&reason.state_of_guest, &reason.hint].into_iter().flatten() {
            line = line.plain(format!("; {more}"));
        }
    }
    let now = migration.progress.as_ref();
    let now = now.filter(|_| migration.outcome.is_none());
    now.map_or_else(Vec::new, |now| conditions(migration, now))
        .into_iter()
        .fold(line, |line, text| line.plain(" · ").tone(Tone::Warn, text))
}

fn answers(doubt: &Doubt) -> String {
    let other = &doubt.other_host;
    match (doubt.reachable, &doubt.unreachable_because) {
        (Some(true), _) => format!("{other} answers"),
        (_, Some(why)) => format!("{other} does not answer: {why}"),
        (_, None) => format!("{other} does not answer"),
    }
}

/// Returns what delays a migration under way.
fn conditions(migration: &Migration, now: &Progress) -> Vec<String> {
    let other = match migration.side {
        Side::Source => Side::Destination,
        Side::Destination => Side::Source,
    };
    let other = doubt::host(migration, other);
    let guest = &migration.guest;
    let mut texts = Vec::new();
    if now.link.interrupted_ms.is_some() {
        texts.push(format!("nothing heard from {other}"));
    }
    if now.outpaced.is_some() {
        texts.push(format!("{guest} writes faster than the link carries"));
    }
    if now.awaits_bases {
        let destination = &migration.destination;
        texts.push(format!("{destination} may lack base images"));
    }
    texts.extend(now.trouble.clone());
    texts
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;
    use crate::cli::paint::golden;
    use longhaul_api::{ApiError, ErrorCode, Outcome};

    #[test]
    fn each_event_is_a_line() {
        let of = |migration| What::Migration {
            migration: Box::new(migration),
        };
        let mut delayed = sample::migration();
        let mut progress = sample::progress();
        progress.link.interrupted_ms = Some(3_000);
        progress.awaits_bases = true;
        progress.trouble = Some("data.raw cannot be read".into());
        delayed.progress = Some(progress);
        let mut failed = sample::migration();
        failed.outcome = Some(Outcome::Failed);
        failed.reason = Some(
            ApiError::new(ErrorCode::PeerUnreachable, "paris-2 does not answer")
                .hint("is its agent running?")
                .state_of_guest("web-7 runs on lyon-1"),
        );
        let reserved = |by, migration: Option<&str>| What::GuestReserved {
            guest: "web-7".into(),
            by,
            migration: migration.map(str::to_owned),
        };
        let mut events = vec![
            What::Snapshot { lagged: false },
            What::Current {},
            reserved(ReservedBy::Migration, Some("7f3a0c11d2e3f405")),
            reserved(ReservedBy::Agent, None),
            reserved(ReservedBy::MemoryCache, None),
        ];
        events.extend(sample::migrations().into_iter().map(of));
        events.extend([delayed, failed, sample::in_doubt(), sample::disconnected()].map(of));
        events.extend([
            What::GuestReleased {
                guest: "web-7".into(),
            },
            What::MigrationRemoved {
                id: "7f3a0c11d2e3f405".into(),
            },
            What::Snapshot { lagged: true },
        ]);
        let lines: Vec<_> = events
            .into_iter()
            .filter_map(|what| {
                line(&Event {
                    sequence: 1,
                    unix_ms: 1_800_000_000_123,
                    what,
                })
            })
            .collect();
        golden::check_lines("events", &lines, 240);
    }
}
