//! Formats parcels.

mod plan;
mod status;

pub(crate) use plan::planned;
pub(crate) use status::{checked, list, status};

use super::figure::part_of;
use super::image::under_way;
use crate::cli::paint::{Line, Tone, table};
use crate::cli::parcel::{
    DeviceDocument, ExportDocument, ExportedGuest, ImportDocument, ImportedGuestDocument,
    VerifyDocument, count,
};
use longhaul_parcel::{CELL_BYTES, Step};
use longhaul_protocol::units::show_bytes;

/// Formats the progress of a verification.
pub(crate) fn verifying(name: &str, read: u64, all: u64, width: usize) -> Line {
    let bytes = |rows: u64| rows * CELL_BYTES as u64;
    let figures = format!("{} of each device", part_of(bytes(read), bytes(all)));
    under_way(format!("verifying {name}"), read, all, figures, width)
}

/// Formats the progress of an export.
pub(crate) fn exporting(step: &Step<'_>, width: usize) -> Line {
    match *step {
        // It is said at the end.
        Step::MomentLost { guest, .. } => Line::text(format!("{guest}: another moment")),
        Step::NotFrozen { guest, .. } => Line::text(format!("{guest}: not frozen")),
        Step::Exports { disk, done, all } => under_way(
            format!("exporting {disk}"),
            done,
            all,
            part_of(done, all),
            width,
        ),
        Step::Seals { rows, all } => verifying("what was written", rows, all, width),
    }
}

/// Formats an export.
pub(crate) fn exported(document: &ExportDocument) -> Vec<Line> {
    let devices = document
        .devices
        .iter()
        .map(|path| format!("  {}", path.display()));
    let sealed = format!(
        "parcel {} is sealed: everything was read back · {} of the fullest device",
        document.name,
        show_bytes(document.device_bytes)
    );
    let mut lines = super::super::done(sealed);
    lines.extend(devices.map(Line::text));
    lines.extend(document.guests.iter().map(exported_guest));
    lines.push(Line::text(format!(
        "  send its key another way: longhaul parcel key {}",
        document.name
    )));
    lines.push(Line::text(format!(
        "  when the devices leave: longhaul parcel ship {} --courier TEXT --number TEXT",
        document.name
    )));
    lines
}

fn exported_guest(guest: &ExportedGuest) -> Line {
    let line = Line::text(format!("  {}", guest.name));
    match (guest.consistent, &guest.why) {
        (true, why) => {
            let mut text = ": its disks are as they were at one moment".to_owned();
            if let Some(group) = &guest.group {
                text.push_str(&format!(", that of group {group}"));
            }
            if guest.frozen {
                text.push_str("; its file systems were frozen");
            }
            let line = line.plain(text);
            match why {
                Some(why) => line.tone(Tone::Warn, format!(" ({why})")),
                None => line,
            }
        }
        (false, None) => line.plain(": each part of its disks is as it was when it was read"),
        (false, Some(why)) => line.tone(
            Tone::Warn,
            format!(": each part of its disks is as it was when it was read ({why})"),
        ),
    }
}

/// Formats the progress of an import.
pub(crate) fn importing(guest: &str, disk: &str) -> Line {
    Line::text(format!("importing {disk} of {guest}"))
}

fn imported_guest(guest: &ImportedGuestDocument) -> Line {
    let line = Line::text(format!("  {}", guest.guest));
    let line = match guest.consistent {
        false => return line.tone(Tone::Warn, ": its disks are of different moments"),
        true if guest.frozen => line.plain(": of one moment, with frozen file systems"),
        true => line.plain(": of one moment"),
    };
    match (&guest.description, &guest.trouble) {
        (Some(path), _) => line.plain(format!("; described in {}", path.display())),
        (None, Some(why)) => line.tone(Tone::Warn, format!("; {why}")),
        (None, None) => line,
    }
}

/// Formats an import.
pub(crate) fn imported(document: &ImportDocument) -> Vec<Line> {
    let mut lines = super::super::done(format!("imported: {}", document.name));
    let rows = document.disks.iter().map(|disk| {
        vec![
            Line::text(format!("  {}", disk.guest)),
            Line::text(disk.image.clone()),
            Line::text(show_bytes(disk.bytes)),
            Line::text(format!("version {}", disk.version)),
            Line::text(disk.path.display().to_string()),
        ]
    });
    lines.extend(table(rows.collect()));
    lines.extend(document.guests.iter().map(imported_guest));
    if document.recovered_cells > 0 {
        let recovered = count(document.recovered_cells, "cell");
        lines.push(Line::text(format!("  {recovered} recovered from parity")));
    }
    let Some(report) = &document.report else {
        return lines;
    };
    lines.push(Line::text(format!(
        "  send this report to the source, which compares it: {}",
        report.display()
    )));
    lines.push(Line::text(
        "  what has changed since travels when the guest moves: longhaul migrate GUEST --to THIS \
         HOST, at the source",
    ));
    lines
}

fn state(device: &DeviceDocument) -> Line {
    let rows: Vec<String> = device
        .damaged_rows
        .iter()
        .take(5)
        .map(u64::to_string)
        .collect();
    match (&device.path, device.damaged_cells) {
        (None, _) => Line::default().tone(Tone::Bad, "missing"),
        (Some(_), 0) => Line::default().tone(Tone::Good, "good"),
        (Some(_), cells) => {
            let more = match cells > rows.len() as u64 {
                true => ", …",
                false => "",
            };
            let which = format!(
                "{} damaged: rows {}{more}",
                count(cells, "cell"),
                rows.join(", ")
            );
            let said = device.error.as_ref().map(|error| format!(" ({error})"));
            Line::default()
                .tone(Tone::Bad, which)
                .plain(said.unwrap_or_default())
        }
    }
}

/// Formats the results of a verification.
pub(crate) fn verified(document: &VerifyDocument) -> Vec<Line> {
    let survives = match document.parity {
        0 => "survives no loss".to_owned(),
        parity => format!("survives the loss of {}", count(parity.into(), "device")),
    };
    let mut lines = vec![
        Line::default()
            .tone(Tone::Strong, document.name.clone())
            .plain(format!(" to {} · sealed · {survives}", document.to)),
    ];
    let rows = document.devices.iter().map(|device| {
        let path = device.path.as_ref();
        vec![
            Line::text(format!("  device {}", device.device)),
            Line::text(path.map_or_else(String::new, |path| path.display().to_string())),
            state(device),
        ]
    });
    lines.extend(table(rows.collect()));
    let is_good = |device: &DeviceDocument| device.path.is_some() && device.damaged_cells == 0;
    lines.extend(
        match (document.lost_cells, document.devices.iter().all(is_good)) {
            (0, true) => super::super::done("everything is as it was written".to_owned()),
            (0, false) => super::super::done(
                "all content can be read: what is missing is recovered from parity".to_owned(),
            ),
            (lost, _) => vec![
                Line::default()
                    .tone(Tone::Bad, "✗ ")
                    .plain(format!("{lost} MiB of content cannot be read")),
                Line::text(
                    "  to fix it: give the missing devices too, or have the parcel sent again",
                ),
            ],
        },
    );
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::paint::golden;
    use std::path::PathBuf;

    fn document(lost_cells: u64, damaged: u64) -> VerifyDocument {
        let device = |device: usize, cells: u64| DeviceDocument {
            device,
            path: (device != 1)
                .then(|| PathBuf::from(format!("/mnt/{device}/box-{device}.parcel"))),
            damaged_cells: cells,
            damaged_rows: (0..cells).map(|row| row * 3 + 4).collect(),
            error: None,
        };
        VerifyDocument {
            parcel: "00".repeat(16),
            name: "box".into(),
            to: "paris".into(),
            created: 0,
            key: "11".repeat(16),
            parity: 1,
            rows: 100,
            devices: vec![device(0, 0), device(1, 0), device(2, damaged)],
            lost_cells,
        }
    }

    #[test]
    fn each_device_has_its_state() {
        let mut lines = verified(&document(0, 0));
        lines.push(Line::default());
        lines.extend(verified(&document(7, 7)));
        golden::check_lines("parcel", &lines, 100);
    }
}
