//! Formats what parcels have done, and what they will do.

use crate::cli::paint::{Line, Tone, head, table};
use crate::cli::parcel::{
    CheckDocument, ListDocument, Listed, StatusDocument, StepDocument, StepState, count,
};
use longhaul_parcel::{
    Attachment, CheckedDisk, Date, DeviceState, DiskStatus, GuestStatus, Reading, Status, Verdict,
};
use longhaul_protocol::units::show_bytes;

/// Formats a parcel.
pub(crate) fn status(document: &StatusDocument) -> Vec<Line> {
    let status = &document.status;
    let survives = match status.parity {
        0 => "survives no loss".to_owned(),
        parity => format!("survives the loss of {}", count(parity.into(), "device")),
    };
    let mut lines = vec![
        Line::default()
            .tone(Tone::Strong, status.name.clone())
            .plain(format!(
                " to {} · {survives} · key {}",
                status.to, status.key
            )),
    ];
    lines.extend(table(document.steps.iter().map(step).collect()));
    if !status.devices.is_empty() {
        lines.push(Line::default());
        lines.extend(table(devices(status)));
    }
    // After that the devices are not written.
    if status.shipped.is_none() && !status.is_confirmed && !status.guests.is_empty() {
        lines.push(Line::default());
        lines.extend(next(status));
    }
    let copies = document.copies.iter();
    let may_go = copies.filter(|_| status.is_confirmed && !document.left.is_empty());
    lines.extend(may_go.map(|path| Line::text(format!("  may go: {}", path.display()))));
    lines
}

fn step(step: &StepDocument) -> Vec<Line> {
    let (sign, tone) = match step.state {
        StepState::Done => ("✓", Tone::Good),
        StepState::Next => ("→", Tone::Strong),
        StepState::Later => (" ", Tone::Faint),
    };
    let when = step.when.map(|date| date.to_string());
    let name = Line::text("  ")
        .tone(tone, sign)
        .plain(format!(" {} ", step.step));
    let says = match step.state {
        StepState::Later => Tone::Faint,
        StepState::Done | StepState::Next => Tone::Plain,
    };
    vec![
        name.tone(says, step.name),
        Line::text(when.unwrap_or_default()),
        Line::default().tone(says, step.says.clone()),
    ]
}

fn devices(status: &Status) -> Vec<Vec<Line>> {
    let rows = status.devices.iter().map(|device| {
        let state = match &device.attachment {
            Attachment::Attached { used_bytes, .. } => Line::default()
                .tone(Tone::Good, "attached")
                .plain(format!(", {} used", show_bytes(*used_bytes))),
            // Nobody expects it here.
            Attachment::Absent { .. } if status.shipped.is_some() => {
                Line::default().tone(Tone::Faint, "shipped")
            }
            Attachment::Absent { why } => Line::default()
                .tone(Tone::Warn, "not attached")
                .plain(format!(": {why}")),
            Attachment::Other { what } => Line::default()
                .tone(Tone::Bad, "another one")
                .plain(format!(": {what}")),
        };
        vec![
            Line::text(format!("  device {}", device.device)),
            Line::text(device.path.display().to_string()),
            state,
        ]
    });
    rows.collect()
}

/// Says what the next export or top-up does with each disk, and why.
fn next(status: &Status) -> Vec<Line> {
    let disks = || {
        let guests = status.guests.iter();
        guests.flat_map(|guest| guest.disks.iter().map(move |disk| (guest, disk)))
    };
    let reads: u64 = disks().map(|(_, disk)| disk.next.bytes()).sum();
    let (name, reads) = (&status.name, show_bytes(reads));
    let begin = Line::text(match (status.sealed, status.version) {
        (true, _) => format!(
            "  before the devices leave, longhaul parcel top-up {name} brings them up to date: it \
             reads {reads}"
        ),
        (false, 1) => format!("  the export reads {reads}"),
        (false, _) => format!("  the top-up reads {reads} more"),
    });
    let rows = disks().map(|(guest, disk)| reading(guest, disk));
    let mut lines = vec![begin];
    lines.extend(table(rows.collect()));
    lines
}

fn reading(guest: &GuestStatus, disk: &DiskStatus) -> Vec<Line> {
    let from = |from: u64| match from {
        0 => String::new(),
        from => format!(" from {} on", show_bytes(from)),
    };
    let how = match disk.next {
        Reading::Full { from: at, .. } => {
            format!("in full{}: no version has it", from(at))
        }
        Reading::Compare { from: at, with, .. } => {
            format!(
                "compared with version {with}{}: what differs is written",
                from(at)
            )
        }
        Reading::Done => "done".to_owned(),
    };
    let size = match (&disk.error, disk.now_bytes) {
        (Some(error), _) => Line::default().tone(Tone::Bad, format!(" · cannot be read: {error}")),
        (None, Some(now)) if now > disk.bytes => {
            let grown = show_bytes(now - disk.bytes);
            Line::default().tone(Tone::Warn, format!(" · has grown by {grown}"))
        }
        (None, Some(now)) if now < disk.bytes => {
            let less = show_bytes(disk.bytes - now);
            Line::default().tone(Tone::Warn, format!(" · has {less} less"))
        }
        (None, _) => Line::default(),
    };
    vec![
        Line::text(format!("    {}", guest.name)),
        Line::text(disk.name.clone()),
        Line::text(show_bytes(disk.next.bytes())),
        Line::text(how).and(size),
    ]
}

/// Formats the parcels of a host.
pub(crate) fn list(document: &ListDocument) -> Vec<Line> {
    if document.parcels.is_empty() {
        return vec![Line::text(
            "no parcels: longhaul parcel create NAME --to SITE makes one",
        )];
    }
    let mut rows = vec![head(&["PARCEL", "TO", "GUESTS", "VERSION", "NEXT"])];
    rows.extend(document.parcels.iter().map(listed));
    table(rows)
}

fn listed(listed: &Listed) -> Vec<Line> {
    let name = Line::text(listed.name.clone());
    let Some(parcel) = &listed.parcel else {
        let error = listed.error.clone().unwrap_or_default();
        let [none, same, other] = ["", "", ""].map(Line::text);
        return vec![
            name,
            none,
            same,
            other,
            Line::default().tone(Tone::Bad, error),
        ];
    };
    let mut steps = parcel.steps.iter();
    let next = steps.find(|step| step.state == StepState::Next);
    let version = match (parcel.status.sealed, parcel.status.is_begun) {
        (true, _) => format!("{}, sealed", parcel.status.version),
        (false, true) => format!("{}, not complete", parcel.status.version),
        (false, false) => "-".to_owned(),
    };
    vec![
        name,
        Line::text(parcel.status.to.clone()),
        Line::text(parcel.status.guests.len().to_string()),
        Line::text(version),
        match next {
            None => Line::default().tone(Tone::Good, "nothing: all is done"),
            Some(step) => Line::text(format!("{} {}", step.step, step.name)),
        },
    ]
}

/// Formats the verdicts on a report.
pub(crate) fn checked(document: &CheckDocument) -> Vec<Line> {
    let checked = &document.checked;
    let report = &checked.report;
    let (to, version) = (&report.to, checked.version);
    let mut lines = match checked.confirmed {
        true => super::super::super::done(format!(
            "{to} has all disks of version {version} of {}: the source's copies may go, each when \
             its guest has moved",
            report.name
        )),
        false => vec![Line::default().tone(Tone::Bad, "✗ ").plain(format!(
            "{to} does not have all disks of version {version} of {}: the source's copies must \
             stay",
            report.name
        ))],
    };
    lines.extend(table(checked.disks.iter().map(verdict).collect()));
    let damaged = report
        .devices
        .iter()
        .filter(|it| it.state != DeviceState::Good);
    let damaged: Vec<String> = damaged
        .map(|it| match it.state {
            DeviceState::Missing => format!("device {} is missing", it.device),
            DeviceState::Damaged | DeviceState::Good => {
                let cells = count(it.damaged_cells, "cell");
                format!("device {} has {cells} damaged", it.device)
            }
        })
        .collect();
    let damaged = match damaged.is_empty() {
        true => "no device was damaged".to_owned(),
        false => format!(
            "{}; {} recovered from parity",
            damaged.join(", "),
            count(report.recovered_cells, "cell")
        ),
    };
    let imported = Date::of(report.imported);
    lines.push(Line::text(format!("  imported on {imported} · {damaged}")));
    lines
}

fn verdict(disk: &CheckedDisk) -> Vec<Line> {
    vec![
        Line::text(format!("  {}", disk.guest)),
        Line::text(disk.disk.clone()),
        Line::text(show_bytes(disk.bytes)),
        match disk.verdict {
            Verdict::Equal => Line::default().tone(Tone::Good, "equal"),
            Verdict::Older { version } => {
                Line::default().tone(Tone::Bad, format!("as in the older version {version}"))
            }
            Verdict::Unknown => Line::default().tone(Tone::Bad, "unknown: no version has it so"),
            Verdict::Missing => Line::default().tone(Tone::Bad, "missing in the report"),
        },
    ]
}
