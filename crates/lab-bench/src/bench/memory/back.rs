//! Implements `lab bench return`: a guest moves with its disk, works, and returns to the host that
//! it left.

use super::super::document::{Document, Sense, median};
use super::super::{Bench, Options};
use super::{ASKED_DOWNTIME_MS, Asked, LINK, Movers, System, on_ground, systems};
use crate::moves::{Case, Load, MoveRow};
use crate::warm::SystemGuest;
use longhaul_lab::error::LabError;
use std::rc::Rc;
use std::time::Duration;

/// The bench's entry of `lab bench --list`.
pub(in crate::bench) const BENCH: Bench = Bench {
    name: "return",
    about: "the guest debian moves with its disk, works for a minute, and moves back to the host \
         that it left",
    minutes: (15, 5),
    run,
};

/// The names of the way back: with the memory cache, and with the disk alone.
const BACK: [&str; 2] = ["longhaul-back", "longhaul-back-disk-alone"];
const WORKLOADS: [&str; 1] = ["compile"];
/// How long the guest works at its destination.
const WORKS_FOR: Duration = Duration::from_secs(60);
/// The time limit of a move that does not converge.
const LIMIT: Duration = Duration::from_secs(240);
/// The bytes of the way back relative to the way there.
const BYTES_OF_THERE: f64 = 0.3;

fn run(options: &Options, document: &mut Document) -> Result<(), LabError> {
    // A guest without a disk leaves nothing behind to return to.
    let guest = match systems::guest(options)? {
        Some(guest) => guest,
        None => SystemGuest::debian()?,
    };
    let ours = [System::WithDisk { index: true }];
    let mut more = toml::Table::new();
    if way_back(options)? == BACK[0] {
        more.insert("kept_memory".to_owned(), toml::Table::new().into());
    }
    on_ground(options, LINK, Some(&guest), &ours, more, document, measure)
}

/// Returns the selected way back.
fn way_back(options: &Options) -> Result<&'static str, LabError> {
    let one = || {
        let ways = BACK.join(" or ");
        LabError::Which(format!(
            "this bench goes back one way at a time: --system {ways}"
        ))
    };
    match options.system.as_slice() {
        [] => Ok(BACK[0]),
        [asked] => BACK.into_iter().find(|way| way == asked).ok_or_else(one),
        _ => Err(one()),
    }
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
                force_after: None,
                observe: Duration::ZERO,
                repeat,
            };
            let how = (WORKS_FOR, way_back(asked.options)?);
            rows.extend(movers.there_and_back(&case, how, document)?);
        }
    }
    judge(&rows, way_back(asked.options)?, document);
    Ok(())
}

/// Returns the guest's workloads.
pub(super) fn workloads(options: &Options) -> Vec<String> {
    match options.workload.is_empty() {
        true => WORKLOADS.map(str::to_owned).to_vec(),
        false => options.workload.clone(),
    }
}

fn judge(rows: &[MoveRow], back: &str, document: &mut Document) {
    let mut workloads: Vec<&str> = rows.iter().map(|row| row.workload.as_str()).collect();
    workloads.sort_unstable();
    workloads.dedup();
    for workload in workloads {
        let bytes = |system: &str| {
            let of_workload = rows.iter().filter(|row| row.workload == workload);
            let done = of_workload.filter(|row| row.system == system && row.is_completed());
            median(done.filter_map(|row| row.link_bytes.map(|bytes| bytes as f64)))
        };
        let value = bytes(back).zip(bytes("longhaul-there"));
        let value = value.map(|(again, there)| again / there);
        let name = format!("bytes_back_vs_there.{workload}");
        document.add_check(&name, value, Sense::AtMost, BYTES_OF_THERE);
    }
    // The guest verifies all its data after its return.
    let errors = rows.iter().filter(|row| row.system == back);
    let errors = errors
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
