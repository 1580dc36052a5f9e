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
    let may_go = copies.filter(|_| status.is_confirmed);
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
    let begin = Line::text(match (status.sealed, status.is_begun) {
        (true, _) => format!(
            "  before the devices leave, longhaul parcel top-up {name} brings them up to date: it \
             reads {reads}"
        ),
        (false, false) => format!("  the export reads {reads}"),
        (false, true) => format!("  it goes on, and reads {reads} more"),
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
        Reading::Changed { bytes, with } => format!(
            "{} may have changed since version {with}, and are read: its writes are tracked",
            show_bytes(bytes)
        ),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::paint::golden;
    use longhaul_parcel::{
        Checked, Confirmation, DeviceStatus, ImportReport, ReportedDevice, Seal, Shipment,
    };
    use std::path::PathBuf;

    const NOW: u64 = 1_800_000_000;
    const MIB: u64 = 1 << 20;

    fn digits<T: serde::de::DeserializeOwned>(digit: &str) -> T {
        serde_json::from_value(digit.repeat(32).into()).unwrap()
    }

    fn disk(name: &str, mib: u64, next: Reading) -> DiskStatus {
        DiskStatus {
            name: name.into(),
            path: format!("/var/lib/guests/{name}.raw").into(),
            bytes: mib * MIB,
            now_bytes: Some(mib * MIB),
            allocated_bytes: Some(mib * MIB),
            error: None,
            next,
        }
    }

    /// A parcel of which only the name, the key and the site are known.
    fn empty() -> Status {
        Status {
            name: "box-7".into(),
            parcel: None,
            to: "paris".into(),
            created: Some(NOW),
            begun: None,
            is_begun: false,
            parity: 1,
            key: digits("1"),
            version: 1,
            sealed: false,
            guests: Vec::new(),
            devices: Vec::new(),
            seals: Vec::new(),
            shipped: None,
            confirmed: None,
            is_confirmed: false,
        }
    }

    /// Two guests, of which one is exported and the other one in part.
    fn interrupted() -> Status {
        let guest = |name: &str, disks| GuestStatus {
            name: name.into(),
            disks,
        };
        let under_way = Reading::Full {
            from: 12 * MIB,
            bytes: 52 * MIB,
        };
        let device = |device: usize, attachment| DeviceStatus {
            device,
            path: format!("/mnt/usb{device}/box-7-{device}.parcel").into(),
            attachment,
        };
        let attached = || Attachment::Attached {
            parcel: digits("2"),
            key: digits("1"),
            used_bytes: 200 * MIB,
        };
        Status {
            begun: Some(NOW),
            is_begun: true,
            guests: vec![
                guest("web-7", vec![disk("web-7-root", 400, Reading::Done)]),
                guest("db-1", vec![disk("db-1-root", 64, under_way)]),
            ],
            devices: vec![
                device(0, attached()),
                device(
                    1,
                    Attachment::Absent {
                        why: "/mnt/usb1/box-7-1.parcel: No such file or directory".into(),
                    },
                ),
                device(
                    2,
                    Attachment::Other {
                        what: "it is device 1 of this parcel".into(),
                    },
                ),
            ],
            ..empty()
        }
    }

    /// Sealed, then the disks have changed, and one was added.
    fn sealed() -> Status {
        let mut status = interrupted();
        status.sealed = true;
        status.parcel = Some(digits("2"));
        status.seals = vec![Seal {
            version: 1,
            time: NOW + 86_400,
            device_bytes: 260 * MIB,
            disks: Vec::new(),
        }];
        let compare = |mib: u64| Reading::Compare {
            from: 0,
            bytes: mib * MIB,
            with: 1,
        };
        let grown = &mut status.guests[0].disks;
        grown[0].next = compare(500);
        grown[0].now_bytes = Some(500 * MIB);
        status.guests[1].disks[0].next = compare(64);
        status.devices.truncate(1);
        status
    }

    fn added() -> Status {
        let mut status = sealed();
        let full = Reading::Full {
            from: 0,
            bytes: 20 * MIB,
        };
        let mut gone = disk("db-1-data", 20, full);
        gone.now_bytes = None;
        gone.error = Some("/var/lib/guests/db-1-data.raw: No such file or directory".into());
        status.guests[1].disks.push(gone);
        status
    }

    fn shipped() -> Status {
        let mut status = sealed();
        status.shipped = Some(Shipment {
            courier: "DHL".into(),
            number: "JD 0146 0000".into(),
            date: Date::of(NOW + 2 * 86_400),
            arrives: Some(Date::of(NOW + 3 * 86_400)),
        });
        status.devices[0].attachment = Attachment::Absent {
            why: "No such file or directory".into(),
        };
        status
    }

    fn confirmed() -> Status {
        Status {
            confirmed: Some(Confirmation {
                version: 1,
                imported: NOW + 3 * 86_400,
                checked: NOW + 3 * 86_400,
            }),
            is_confirmed: true,
            ..shipped()
        }
    }

    fn shown(status_: Status, left: &[&str]) -> Vec<Line> {
        let copies = left
            .iter()
            .map(|guest| PathBuf::from(format!("/var/lib/guests/{guest}-root.raw.moved")));
        let copies = copies.collect();
        let left = left.iter().map(|guest| (*guest).to_owned()).collect();
        let mut lines = status(&StatusDocument::of(status_, left, copies));
        lines.push(Line::default());
        lines.push(Line::text("-".repeat(100)));
        lines
    }

    #[test]
    fn each_step_says_what_it_needs() {
        let lines = [
            shown(empty(), &[]),
            shown(interrupted(), &[]),
            shown(sealed(), &[]),
            shown(added(), &[]),
            shown(shipped(), &[]),
            shown(confirmed(), &["web-7"]),
            shown(confirmed(), &["web-7", "db-1"]),
        ];
        golden::check_lines("parcel_status", &lines.concat(), 120);
    }

    #[test]
    fn parcels_are_listed_with_their_next_steps() {
        let parcel = |name: &str, status: Status, left: Vec<String>| Listed {
            name: name.into(),
            parcel: Some(StatusDocument::of(status, left, Vec::new())),
            error: None,
        };
        let all = vec!["web-7".to_owned(), "db-1".to_owned()];
        let parcels = vec![
            parcel("box-5", confirmed(), all),
            parcel("box-6", shipped(), Vec::new()),
            parcel("box-7", interrupted(), Vec::new()),
            parcel("box-8", empty(), Vec::new()),
            Listed {
                name: "box-9".into(),
                parcel: None,
                error: Some("/var/lib/longhaul/parcels/box-9/job.json cannot be read".into()),
            },
        ];
        golden::check_lines("parcel_list", &list(&ListDocument { parcels }), 100);
    }

    #[test]
    fn a_report_has_its_verdicts() {
        let disk = |disk: &str, verdict| CheckedDisk {
            guest: "web-7".into(),
            disk: disk.into(),
            bytes: 400 * MIB,
            verdict,
        };
        let device = |device, state, damaged_cells| ReportedDevice {
            device,
            state,
            damaged_cells,
        };
        let report = |recovered_cells, devices| ImportReport {
            format: 1,
            parcel: digits("2"),
            name: "box-7".into(),
            to: "paris".into(),
            key: digits("1"),
            imported: NOW,
            disks: Vec::new(),
            recovered_cells,
            devices,
        };
        let good = Checked {
            version: 2,
            report: report(0, vec![device(0, DeviceState::Good, 0)]),
            disks: vec![disk("root", Verdict::Equal)],
            confirmed: true,
        };
        let damaged = vec![
            device(0, DeviceState::Good, 0),
            device(1, DeviceState::Missing, 0),
            device(2, DeviceState::Damaged, 1),
        ];
        let bad = Checked {
            version: 2,
            report: report(180, damaged),
            disks: vec![
                disk("root", Verdict::Equal),
                disk("data", Verdict::Older { version: 1 }),
                disk("more", Verdict::Unknown),
                disk("swap", Verdict::Missing),
            ],
            confirmed: false,
        };
        let lines = [good, bad].map(|checked| {
            let mut lines = super::checked(&CheckDocument { checked });
            lines.push(Line::default());
            lines
        });
        golden::check_lines("parcel_check", &lines.concat(), 110);
    }
}
