//! Implements `lab bench parcel`: the rate of an export, a guest's work while its disk is copied
//! again and again, and moves whose disks went ahead by courier.

mod changed;
mod consolidation;
mod courier;
mod course;
mod export;
mod ground;
mod judge;
mod local;
mod row;
mod snapshot;

use super::document::Document;
use super::{Bench, Options};
use ground::Ground;
use longhaul_lab::error::LabError;

/// The bench's entry of `lab bench --list`.
pub(super) const BENCH: Bench = Bench {
    name: "parcel",
    about: "an export's rate, a guest's writes while replicas of its disk are made, and moves \
            whose disks went ahead by courier",
    minutes: (30, 5),
    run,
};

/// The link of the moves.
const LINK: &str = "20mbit,20ms";

/// Runs the bench, adding rows and then checks to the document.
fn run(options: &Options, document: &mut Document) -> Result<(), LabError> {
    let mut names = vec![export::WORKLOAD];
    names.extend(consolidation::WORKLOADS.map(|(name, _)| name));
    names.extend(courier::WORKLOADS);
    let is_known = |asked: &&String| names.contains(&asked.as_str());
    if let Some(unknown) = options.workload.iter().find(|asked| !is_known(asked)) {
        return Err(LabError::Which(format!(
            "this bench has no workload `{unknown}`: it has {}",
            names.join(", ")
        )));
    }
    let mut ground = Ground::make(options, options.link_or(LINK)?, document)?;
    // What was measured is judged even if a later part cannot run.
    if options.wants_workload(export::WORKLOAD) {
        let exports = export::measure(options, &ground, document)?;
        judge::judge_exports(&exports, document);
    }
    let consolidations = consolidation::measure(options, &mut ground, document)?;
    judge::judge_consolidations(&consolidations, document);
    let moves = courier::measure(options, &mut ground, document)?;
    judge::judge_moves(&moves, document);
    Ok(())
}
