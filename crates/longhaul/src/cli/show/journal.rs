//! Formats journals: the meaning of each record, and the host that may run the guest.

use super::figure;
use crate::cli::journal::{Beginning, End, Journal, Journals, MayRun};
use crate::cli::paint::{Line, Tone, head, table};
use longhaul_engine::handover::{BY_ARBITER, Record, Side};
use longhaul_protocol::Generation;

/// A record in words.
pub(crate) struct Words {
    pub(crate) name: &'static str,
    pub(crate) generation: Option<Generation>,
    pub(crate) text: String,
}

/// Returns the meaning of a record, in the journal of an attempt with this beginning.
pub(crate) fn words(record: &Record, attempt: Option<&Beginning>) -> Words {
    let other = attempt.map_or("the other host", |attempt| &attempt.other_host);
    let plain = |name, text: String| Words {
        name,
        generation: None,
        text,
    };
    let of = |name, generation: &Generation, text: String| Words {
        name,
        generation: Some(*generation),
        text,
    };
    match record {
        Record::Began {
            side,
            guest,
            generation,
            peer_name,
            paused,
            ..
        } => {
            let way = match side {
                Side::Source => format!("{guest} is here and is to move to {peer_name}"),
                Side::Destination => format!("{guest} is to come here from {peer_name}"),
            };
            let paused = if *paused { "; it stays paused" } else { "" };
            of("BEGAN", generation, format!("{way}{paused}"))
        }
        Record::Ready { .. } => plain(
            "READY",
            format!("everything is here; nothing runs here without a COMMIT of {other}"),
        ),
        Record::Released { generation, .. } => of(
            "RELEASED",
            generation,
            format!("the guest is not resumed here any more unless {other} has ABORTED"),
        ),
        Record::ReleasedToArbiter { generation, .. } => of(
            "RELEASED-TO-ARBITER",
            generation,
            format!(
                "the guest is not resumed here any more unless {other} has ABORTED, or the arbiter \
                 gives this host the lease that {other} needs"
            ),
        ),
        Record::Committed { generation, .. } => of(
            "COMMITTED",
            generation,
            "the guest belongs here from now on".to_owned(),
        ),
        Record::Done { .. } => plain("DONE", format!("{other} has COMMITTED, and has the guest")),
        Record::Aborted { reason, .. } => plain(
            "ABORTED",
            format!("the attempt is over and the guest belongs to the source ({reason})"),
        ),
        Record::Returned { reason, .. } => plain(
            "RETURNED",
            format!("the guest did not begin to run here ({reason}); ABORTED follows"),
        ),
        Record::AllPresent { .. } => plain(
            "ALL-PRESENT",
            format!("nothing of the guest is needed from {other} any more"),
        ),
        Record::Overruled {
            run_on,
            generation,
            because,
            ..
        } => {
            let here = attempt.is_some_and(|attempt| attempt.side == *run_on);
            let host = if here { "this host" } else { other };
            let who = match because == BY_ARBITER {
                true => "the arbiter",
                false => "an operator",
            };
            let text = format!("{who} has decided that {host} runs the guest ({because})");
            of("OVERRULED", generation, text)
        }
        Record::Closed { .. } => plain("CLOSED", "nothing more is to be done here".to_owned()),
        Record::Peer { incarnation, .. } => plain(
            "PEER",
            format!("{other} keeps the attempt in its journals {incarnation}"),
        ),
        Record::Incomplete { disks, .. } => {
            let disks = match disks {
                1 => "1 disk".to_owned(),
                disks => format!("{disks} disks"),
            };
            plain(
                "INCOMPLETE",
                format!("{disks} may lack blocks when the guest runs here; {other} has them"),
            )
        }
        Record::GaveUp { because, .. } => plain(
            "GAVE-UP",
            format!("an operator has given up what only {other} has of the guest ({because})"),
        ),
    }
}

/// Returns the host that may run the guest after a record, in the journal of that side; `None`
/// where the record changes nothing.
pub(crate) fn may_run(record: &Record, side: Side) -> Option<MayRun> {
    let of = |holder| match holder == side {
        true => MayRun::Here,
        false => MayRun::There,
    };
    match record {
        Record::Began { .. } => Some(match side {
            Side::Source => MayRun::Here,
            Side::Destination => MayRun::NotHere,
        }),
        Record::Ready { .. }
        | Record::AllPresent { .. }
        | Record::GaveUp { .. }
        | Record::Closed { .. }
        | Record::Peer { .. }
        | Record::Incomplete { .. } => None,
        Record::Released { .. } | Record::ReleasedToArbiter { .. } => Some(MayRun::InDoubt),
        Record::Committed { .. } => Some(MayRun::Here),
        Record::Done { .. } => Some(MayRun::There),
        Record::Aborted { .. } => Some(of(Side::Source)),
        Record::Returned { .. } => Some(MayRun::NotHere),
        Record::Overruled { run_on, .. } => Some(of(*run_on)),
    }
}

fn other(journal: &Journal) -> &str {
    let attempt = journal.attempt.as_ref();
    attempt.map_or("the other host", |attempt| &attempt.other_host)
}

/// Returns the same in a few words.
fn short(journal: &Journal) -> Line {
    match journal.may_run {
        MayRun::Here => Line::default().tone(Tone::Good, "this host"),
        MayRun::There => Line::text(other(journal)),
        MayRun::NotHere => Line::text("not this host"),
        MayRun::InDoubt => Line::default().tone(Tone::Bad, "in doubt"),
        MayRun::Unknown => Line::default().tone(Tone::Bad, "not known"),
    }
}

fn may_run_lines(journal: &Journal) -> Vec<Line> {
    if let Some(later) = &journal.later {
        let guest = journal.attempt.as_ref().map_or("the guest", |a| &a.guest);
        return vec![
            Line::default()
                .tone(Tone::Strong, "may run  ")
                .plain(format!(
                    "{guest} was to move again since: longhaul journal show {later}"
                )),
        ];
    }
    let other = other(journal);
    let label = || Line::default().tone(Tone::Strong, "may run  ");
    let more = |text: String| Line::text(format!("         {text}"));
    let attempt = journal.records.last().map_or(0, |last| last.attempt);
    match journal.may_run {
        MayRun::Here => vec![label().tone(Tone::Good, "this host")],
        MayRun::There => vec![label().plain(format!("{other}, not this host"))],
        MayRun::NotHere => vec![label().plain(format!(
            "not this host; {other} only if its own journal says so"
        ))],
        MayRun::InDoubt => vec![
            label()
                .tone(Tone::Bad, "in doubt")
                .plain(format!(": only the journal of {other} can tell")),
            more(format!("COMMITTED attempt {attempt} there: {other}")),
            more(format!("ABORTED attempt {attempt} there: this host")),
            more("neither, until the agents connect".to_owned()),
        ],
        MayRun::Unknown => vec![
            label()
                .tone(Tone::Bad, "not known from this journal")
                .plain(format!(
                    ": compare with that of {other} before the guest is started anywhere"
                )),
        ],
    }
}

fn ending(journal: &Journal) -> Option<Line> {
    let end = journal.end;
    match journal.ending {
        End::Whole => None,
        End::CutOff(bytes) => Some(Line::default().tone(Tone::Warn, "! ").plain(format!(
            "a record is cut off at byte {end} ({bytes} bytes): it was being written when the \
             agent or the host went down, and was never acted upon"
        ))),
        End::Damaged => Some(Line::default().tone(Tone::Bad, "✗ ").plain(format!(
            "damaged at byte {end}: what follows has changed since it was written; keep the file"
        ))),
        End::Unknown(number) => Some(Line::default().tone(Tone::Bad, "✗ ").plain(format!(
            "at byte {end} is a record that this version does not know (number {number}): use \
             the newer Longhaul that wrote it"
        ))),
    }
}

/// Formats one journal, oldest record first.
pub(crate) fn journal(journal: &Journal) -> Vec<Line> {
    let id = journal.migration.as_deref().unwrap_or("unknown");
    let title = match &journal.attempt {
        Some(attempt) => Line::default()
            .tone(Tone::Strong, attempt.guest.clone())
            .plain(match attempt.side {
                Side::Source => format!("  this host → {}", attempt.other_host),
                Side::Destination => format!("  {} → this host", attempt.other_host),
            })
            .plain(format!("  migration {id}")),
        None => Line::text(format!("migration {id}: no attempt began here")),
    };
    let mut lines = vec![title];
    for record in &journal.records {
        let generation = record.generation;
        let generation = generation.map_or(String::new(), |g| format!(", generation {g}"));
        let (attempt, text) = (record.attempt, &record.text);
        lines.push(
            Line::text("  ")
                .tone(Tone::Faint, figure::utc(record.unix_ms))
                .plain("  ")
                .tone(Tone::Strong, record.record)
                .plain(format!(" attempt {attempt}{generation}: {text}")),
        );
    }
    if journal.records.is_empty() {
        lines.push(Line::text("  no record"));
    }
    lines.extend(ending(journal));
    lines.extend(may_run_lines(journal));
    lines
}

/// Formats the journals of a host.
pub(crate) fn list(journals: &Journals) -> Vec<Line> {
    let folder = journals.folder.display();
    let nothing = journals.journals.is_empty() && journals.unread.is_empty();
    if nothing && journals.set_aside.is_empty() {
        return vec![Line::text(format!("No journal in {folder}."))];
    }
    let mut rows = vec![head(&[
        "migration",
        "guest",
        "from",
        "to",
        "last record",
        "",
        "may run",
    ])];
    for journal in &journals.journals {
        let text = |text: &str| Line::text(text.to_owned());
        let here = || Line::default().tone(Tone::Faint, "here");
        let (guest, from, to) = match &journal.attempt {
            Some(Beginning {
                guest,
                side,
                other_host,
            }) => match side {
                Side::Source => (text(guest), here(), text(other_host)),
                Side::Destination => (text(guest), text(other_host), here()),
            },
            None => (text(figure::UNKNOWN), text(figure::UNKNOWN), here()),
        };
        let last = journal.records.last();
        let may_run = match (journal.ending, &journal.later) {
            (End::Damaged, _) => {
                short(journal).plain(format!(" (damaged at byte {})", journal.end))
            }
            (End::Unknown(_), _) => short(journal).plain(" (written by a newer Longhaul)"),
            (End::Whole | End::CutOff(_), Some(_)) => {
                Line::default().tone(Tone::Faint, "see its later journal")
            }
            (End::Whole | End::CutOff(_), None) => short(journal),
        };
        rows.push(vec![
            text(journal.migration.as_deref().unwrap_or(figure::UNKNOWN)),
            guest,
            from,
            to,
            Line::text(last.map_or(figure::UNKNOWN.to_owned(), |last| figure::utc(last.unix_ms))),
            text(last.map_or(figure::UNKNOWN, |last| last.record)),
            may_run,
        ]);
    }
    let mut lines = table(rows);
    lines.extend(journals.unread.iter().map(|unread| {
        let line = Line::default().tone(Tone::Bad, "✗ ");
        line.plain(unread.error.clone())
    }));
    lines.extend(journals.set_aside.iter().map(|tombstone| {
        let line = Line::default().tone(Tone::Warn, "! ");
        line.plain(format!("set aside: {}", tombstone.display()))
    }));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::paint::golden;
    use longhaul_protocol::{Attempt, HostId, MigrationId};
    use longhaul_storage::{Ending, Entry, Reading};
    use std::path::PathBuf;

    const ATTEMPT: Attempt = Attempt(1);

    fn began(side: Side, paused: bool) -> Record {
        Record::Began {
            migration: MigrationId([0x7f, 0x3a, 0, 0, 0, 0, 0, 1]),
            attempt: ATTEMPT,
            side,
            guest: "web-7".into(),
            generation: Generation(6),
            peer: HostId([1; 32]),
            peer_name: "paris-2".into(),
            paused,
        }
    }

    fn of(records: Vec<Record>, ending: Ending) -> Journal {
        let entries = records.into_iter().enumerate();
        let entries = entries.map(|(index, record)| Entry {
            offset: 8 + 100 * index as u64,
            unix_ms: 1_800_000_000_123 + 777 * index as u64,
            record,
        });
        let reading = Reading {
            entries: entries.collect(),
            end: 412,
            ending,
        };
        let file = PathBuf::from("/var/lib/longhaul/journal/7f3a000000000001.journal");
        Journal::of(file, &reading)
    }

    fn samples() -> Vec<Journal> {
        let reason = || "it was cancelled\x1b[2J".to_owned();
        let released = Record::Released {
            attempt: ATTEMPT,
            generation: Generation(7),
        };
        let committed = Record::Committed {
            attempt: ATTEMPT,
            generation: Generation(7),
        };
        let aborted = Record::Aborted {
            attempt: ATTEMPT,
            reason: reason(),
        };
        let returned = Record::Returned {
            attempt: ATTEMPT,
            reason: reason(),
        };
        let (ready, done) = (
            Record::Ready { attempt: ATTEMPT },
            Record::Done { attempt: ATTEMPT },
        );
        let (present, closed) = (
            Record::AllPresent { attempt: ATTEMPT },
            Record::Closed { attempt: ATTEMPT },
        );
        let overruled = Record::Overruled {
            attempt: ATTEMPT,
            run_on: Side::Source,
            generation: Generation(8),
            because: "paris-2 has burnt down".into(),
        };
        let incomplete = |disks| Record::Incomplete {
            attempt: ATTEMPT,
            disks,
        };
        let source = || began(Side::Source, false);
        let destination = || began(Side::Destination, true);
        vec![
            of(vec![source()], Ending::Whole),
            of(vec![source(), released.clone()], Ending::CutOff(33)),
            of(vec![source(), released, done], Ending::Whole),
            of(vec![source(), aborted.clone(), closed], Ending::Whole),
            of(vec![source(), overruled], Ending::Whole),
            of(vec![destination(), ready.clone()], Ending::Whole),
            of(
                vec![
                    destination(),
                    incomplete(2),
                    ready,
                    committed.clone(),
                    present,
                ],
                Ending::Whole,
            ),
            of(vec![destination(), incomplete(1)], Ending::Whole),
            of(vec![destination(), committed, returned], Ending::Whole),
            of(vec![destination(), aborted.clone()], Ending::Damaged),
            of(vec![destination()], Ending::Unknown(12)),
            of(vec![aborted], Ending::Whole),
            of(vec![], Ending::CutOff(40)),
        ]
    }

    #[test]
    fn journals_in_words() {
        let mut lines = Vec::new();
        for sample in samples() {
            lines.extend(journal(&sample));
            lines.push(Line::default());
        }
        golden::check_lines("journal", &lines, usize::MAX);
    }

    #[test]
    fn journals_as_a_list() {
        let mut journals = Journals {
            folder: PathBuf::from("/var/lib/longhaul/journal"),
            journals: samples(),
            unread: vec![],
            set_aside: vec![PathBuf::from(
                "/var/lib/longhaul/journal/7f3a000000000002.tombstone",
            )],
        };
        golden::check_lines("journals", &list(&journals), usize::MAX);
        journals.journals.clear();
        journals.set_aside.clear();
        golden::check_lines("journals_none", &list(&journals), usize::MAX);
    }
}
