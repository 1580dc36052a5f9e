//! What moves along with a guest. The lists of this module are the only place that names all
//! companions: a new one is a file of this folder, and a line in a list.

mod aborted_journals;
mod base_images;
mod bridge_ports;
mod disk_exports;
mod disk_images;
mod fencing;
mod flash_variables;
mod held_frames;
mod hooks;
mod local_content;
mod network_ports;
mod shared_files;

use crate::destination::companion as destination;
use crate::residue::Residue;
use crate::source::companion as source;

/// Creates the companions of a guest at its destination, in the order of their steps.
pub(crate) fn at_destination(about: &destination::About) -> Vec<Box<dyn destination::Companion>> {
    let about = || about.clone();
    vec![
        Box::new(hooks::Arrival::new(about())),
        Box::new(shared_files::Arrival::new(about())),
        Box::new(bridge_ports::Arrival::new(about())),
        Box::new(network_ports::Arrival::new(about())),
        Box::new(held_frames::Arrival::new(about())),
        Box::new(disk_images::Arrival::new(about())),
        Box::new(flash_variables::Arrival::new(about())),
        Box::new(base_images::Arrival::new(about())),
        Box::new(local_content::Arrival::new(about())),
        Box::new(disk_exports::Arrival::new(about())),
    ]
}

/// Creates the companions of a guest at its source, in the order of their steps.
pub(crate) fn at_source(about: &source::About) -> Vec<Box<dyn source::Companion>> {
    let about = || about.clone();
    vec![
        Box::new(fencing::Departure::new(about())),
        Box::new(hooks::Departure::new(about())),
        Box::new(flash_variables::Departure::new(about())),
        Box::new(disk_exports::Departure::new(about())),
        Box::new(held_frames::Departure::new(about())),
        Box::new(network_ports::Departure::new(about())),
    ]
}

/// Returns what companions leave on a host.
pub(crate) fn residues() -> Vec<Box<dyn Residue>> {
    vec![
        Box::new(fencing::Marks),
        Box::new(disk_images::Images),
        Box::new(flash_variables::Images),
        Box::<disk_exports::Exports>::default(),
        Box::<base_images::Exports>::default(),
        Box::new(local_content::CachedMemory),
        Box::new(aborted_journals::AbortedJournals),
    ]
}
