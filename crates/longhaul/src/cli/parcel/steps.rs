//! The six steps of a parcel: which are done, and what the next one needs.

use longhaul_parcel::{Date, Reading, Status};
use longhaul_protocol::units::show_bytes;
use serde::Serialize;
use std::path::PathBuf;

/// Where a step is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StepState {
    Done,
    Next,
    Later,
}

/// One of the six steps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct StepDocument {
    pub(crate) step: u8,
    pub(crate) name: &'static str,
    pub(crate) state: StepState,
    /// The day on which it was done.
    pub(crate) when: Option<Date>,
    /// What was done, or what it needs.
    pub(crate) says: String,
}

/// A step before the first one that is not done is known.
struct Known {
    name: &'static str,
    is_done: bool,
    when: Option<Date>,
    says: String,
}

/// Returns a number of things in words.
pub(crate) fn count(number: u64, one: &str) -> String {
    match number {
        1 => format!("1 {one}"),
        number => format!("{number} {one}s"),
    }
}

fn set_up(status: &Status) -> Known {
    let disks = || status.guests.iter().flat_map(|guest| &guest.disks);
    let bytes = disks().map(|disk| disk.now_bytes.unwrap_or(disk.bytes));
    let is_done = !status.guests.is_empty();
    Known {
        name: "set up",
        is_done,
        when: status.created.map(Date::of),
        says: match is_done {
            false => format!("longhaul parcel add {} GUEST=IMAGE,IMAGE", status.name),
            true => format!(
                "{}, {}, {}",
                count(status.guests.len() as u64, "guest"),
                count(disks().count() as u64, "disk"),
                show_bytes(bytes.sum())
            ),
        },
    }
}

/// Returns where an export goes on.
fn goes_on(status: &Status) -> Option<String> {
    let disks = status.guests.iter().flat_map(|guest| &guest.disks);
    let mut under_way = disks.filter(|disk| disk.next != Reading::Done);
    let disk = under_way.next()?;
    let from = match disk.next {
        Reading::Full { from, .. } | Reading::Compare { from, .. } => from,
        Reading::Changed { .. } | Reading::Done => 0,
    };
    Some(format!(
        "at {} of {} of {}",
        show_bytes(from),
        show_bytes(disk.bytes),
        disk.name
    ))
}

fn export(status: &Status) -> Known {
    let name = &status.name;
    let disks = status.guests.iter().flat_map(|guest| &guest.disks);
    let mut added = disks.filter(|disk| matches!(disk.next, Reading::Full { .. }));
    let added = added.next().filter(|_| status.sealed);
    let seal = status.seals.last().filter(|_| status.sealed);
    let version = status.version;
    let (is_done, says) = match (status.is_begun, status.sealed, added) {
        (_, true, None) => {
            let used = seal.map(|it| format!(", {} used", show_bytes(it.device_bytes)));
            let used = used.map_or_else(String::new, |used| used + " of the fullest device");
            (
                true,
                format!("version {version} was read back and sealed{used}"),
            )
        }
        (_, true, Some(disk)) => {
            let why = format!("{} was added since the seal", disk.name);
            (false, format!("longhaul parcel top-up {name}: {why}"))
        }
        (false, false, _) => (
            false,
            format!("longhaul parcel export {name} --device PATH --device PATH"),
        ),
        (true, false, _) => {
            let at = goes_on(status);
            let at = at.unwrap_or_else(|| "with reading everything back".to_owned());
            (
                false,
                format!("longhaul parcel export {name}: version {version} goes on {at}"),
            )
        }
    };
    Known {
        name: "export",
        is_done,
        when: seal.map(|seal| Date::of(seal.time)),
        says,
    }
}

fn ship(status: &Status) -> Known {
    let name = &status.name;
    Known {
        name: "ship",
        // Who has confirmed it has got it, whether that was noted or not.
        is_done: status.shipped.is_some() || status.is_confirmed,
        when: status.shipped.as_ref().map(|it| it.date),
        says: match &status.shipped {
            Some(it) => {
                let arrives = it.arrives.map(|date| format!(", expected on {date}"));
                let arrives = arrives.unwrap_or_default();
                format!("{} {}{arrives}", it.courier, it.number)
            }
            None if status.is_confirmed => "not noted".to_owned(),
            None => format!("longhaul parcel ship {name} --courier TEXT --number TEXT"),
        },
    }
}

fn import(status: &Status) -> Known {
    let confirmed = status.confirmed.as_ref();
    let confirmed = confirmed.filter(|_| status.is_confirmed);
    let (name, to) = (&status.name, &status.to);
    Known {
        name: "import",
        is_done: confirmed.is_some(),
        when: confirmed.map(|it| Date::of(it.imported)),
        says: match confirmed {
            Some(it) => format!("{to} has all disks of version {}", it.version),
            None => format!(
                "at {to}: longhaul parcel import; here: longhaul parcel check {name} REPORT"
            ),
        },
    }
}

/// Returns the steps. `left` are the guests whose disks have left, `copies` their former disks that
/// are still here.
pub(super) fn steps(status: &Status, left: &[String], copies: &[PathBuf]) -> Vec<StepDocument> {
    let to = &status.to;
    let guests = status.guests.iter().map(|guest| guest.name.as_str());
    let stays: Vec<&str> = guests
        .filter(|guest| !left.iter().any(|it| it == guest))
        .collect();
    let has_moved = !status.guests.is_empty() && stays.is_empty();
    let known = [
        set_up(status),
        export(status),
        ship(status),
        import(status),
        Known {
            name: "move",
            is_done: has_moved,
            when: None,
            says: match has_moved {
                true => "all guests have left: no disk is at its path".to_owned(),
                false => format!(
                    "changes and memory, over the link: longhaul migrate {} --to HOST",
                    stays.first().unwrap_or(&"GUEST")
                ),
            },
        },
        Known {
            name: "delete",
            is_done: has_moved && status.is_confirmed && copies.is_empty(),
            when: None,
            says: match (status.is_confirmed, has_moved, copies) {
                (false, _, _) => {
                    format!("the source's copies must stay: {to} has not confirmed what it has")
                }
                (true, true, []) => "the source's copies are gone".to_owned(),
                (true, true, [first, ..]) => {
                    format!("the source's copies may go: {}", first.display())
                        + if copies.len() > 1 { " and others" } else { "" }
                }
                (true, false, _) => {
                    "the source's copies may go, each when its guest has moved".to_owned()
                }
            },
        },
    ];
    let mut state = StepState::Done;
    let steps = known.into_iter().zip(1..).map(|(known, step)| {
        state = match (state, known.is_done) {
            (StepState::Done, true) => StepState::Done,
            (StepState::Done, false) => StepState::Next,
            (StepState::Next | StepState::Later, _) => StepState::Later,
        };
        StepDocument {
            step,
            name: known.name,
            state: match known.is_done {
                true => StepState::Done,
                false => state,
            },
            when: known.when,
            says: known.says,
        }
    });
    steps.collect()
}
