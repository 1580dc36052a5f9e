//! `lab bench return`: a guest moves with its disk, works, and comes back to the host that it left.

use super::super::document::{Document, Sense, median};
use super::super::{Bench, Options};
use super::{ASKED_DOWNTIME_MS, Asked, LINK, Movers, System, on_ground, systems};
use crate::error::LabError;
use crate::guest::warm::SystemGuest;
use crate::moves::{Case, Load, MoveRow};
use std::rc::Rc;
use std::time::Duration;

/// The bench as `lab bench --list` shows it.
pub(in crate::bench) const BENCH: Bench = Bench {
    name: "return",
    about: "the guest debian moves with its disk, works for a minute, and moves back to the host that it left",
    minutes: (15, 5),
    run,
};

const WORKLOADS: [&str; 1] = ["compile"];
/// How long the guest works where it has come.
const WORKS_FOR: Duration = Duration::from_secs(60);
/// When a move that does not converge is given up.
const LIMIT: Duration = Duration::from_secs(240);
/// What the way back takes of the link, of the way there.
const BYTES_OF_THERE: f64 = 0.3;

fn run(options: &Options, document: &mut Document) -> Result<(), LabError> {
    // A guest without a disk has left nothing to come back to.
    let guest = match systems::guest(options)? {
        Some(guest) => guest,
        None => SystemGuest::debian()?,
    };
    let ours = [System::WithDisk { index: true }];
    on_ground(options, LINK, Some(&guest), &ours, document, measure)
}

fn measure(
    asked: &Asked<'_>,
    movers: &Movers<'_>,
    document: &mut Document,
) -> Result<(), LabError> {
    let Some(guest) = asked.guest else {
        return Err(LabError::Which(
            "this bench needs a guest with a disk".to_owned(),
        ));
    };
    let mut images = movers.of_host.disks.iter();
    let mut rows = Vec::new();
    for repeat in 1..=asked.options.repeats() {
        for workload in workloads(asked.options) {
            let warm = guest.warm(&workload, &asked.machine, movers.launcher)?;
            let name = format!("bench-{}", rows.len() + 1);
            let mut description = guest.description(&name, &asked.machine, &workload);
            if let Some((image, _)) = images.next() {
                for disk in &mut description.disks {
                    disk.image.clone_from(image);
                }
            }
            let case = Case {
                guest: description,
                load: Load::Warm(Rc::new(warm)),
                link: asked.link,
                downtime_ms: ASKED_DOWNTIME_MS,
                limit: LIMIT,
                repeat,
            };
            rows.extend(movers.there_and_back(&case, WORKS_FOR, document)?);
        }
    }
    judge(&rows, document);
    Ok(())
}

/// What the guest does.
pub(super) fn workloads(options: &Options) -> Vec<String> {
    match options.workload.is_empty() {
        true => WORKLOADS.map(str::to_owned).to_vec(),
        false => options.workload.clone(),
    }
}

fn judge(rows: &[MoveRow], document: &mut Document) {
    let mut workloads: Vec<&str> = rows.iter().map(|row| row.workload.as_str()).collect();
    workloads.sort_unstable();
    workloads.dedup();
    for workload in workloads {
        let bytes = |system: &str| {
            let of_workload = rows.iter().filter(|row| row.workload == workload);
            let done = of_workload.filter(|row| row.system == system && row.is_completed());
            median(done.filter_map(|row| row.link_bytes.map(|bytes| bytes as f64)))
        };
        let value = bytes("longhaul-back").zip(bytes("longhaul-there"));
        let value = value.map(|(back, there)| back / there);
        let name = format!("bytes_back_vs_there.{workload}");
        document.add_check(&name, value, Sense::AtMost, BYTES_OF_THERE);
    }
    // The guest looks at all it has when it is back.
    let back = || rows.iter().filter(|row| row.system == "longhaul-back");
    let errors = back()
        .map(|row| row.verify_errors.map_or(f64::NAN, |errors| errors as f64))
        .sum();
    document.add_check("verify_errors.longhaul", Some(errors), Sense::AtMost, 0.0);
    let failed = rows.iter().filter(|row| !row.is_completed()).count();
    document.add_check(
        "not_completed.longhaul",
        Some(failed as f64),
        Sense::AtMost,
        0.0,
    );
}
