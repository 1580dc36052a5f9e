//! Runs the benches: their options, their list, and the common steps around each of them.

mod agents;
pub mod codec;
mod disk;
pub mod document;
mod handover;
mod iperf3;
mod link;
mod memory;
mod network;
mod parcel;
mod predict;
mod redundancy;
mod streams;

use std::process::ExitCode;

use clap::builder::PossibleValuesParser;

use self::document::Document;
use longhaul_lab::error::LabError;
use longhaul_lab::interrupt;
use longhaul_lab::lab::{print, say};
use longhaul_lab::link::spec::LinkSpec;

/// The options of every bench; each uses those that mean something to it.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Print one JSON document on stdout, all else on stderr
    #[arg(long)]
    pub json: bool,
    /// Fewer cases by the same code, in less than 5 minutes
    #[arg(long)]
    pub quick: bool,
    /// How often each case is run; checks use medians [default: 3, with --quick 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    repeat: Option<u32>,
    /// The link, instead of the bench's own: RATE,RTT, then loss=1%, jitter=2ms, queue=50ms
    #[arg(long, value_name = "SPEC")]
    pub link: Option<LinkSpec>,
    /// Only these systems, by their names in the rows
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub system: Vec<String>,
    /// Only these workloads, by their names in the rows
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub workload: Vec<String>,
    /// The guest: tiny, debian, or a file that describes one
    #[arg(long, value_name = "GUEST", default_value = "tiny")]
    pub guest: String,
    /// QEMU: 7.2, 10.0, 11.1, or the path of a binary
    #[arg(long, value_name = "QEMU", default_value = "10.0")]
    pub qemu: String,
    /// The guest's machine type
    #[arg(long, default_value = "q35", value_parser = PossibleValuesParser::new(["q35", "pc"]))]
    pub machine: String,
    /// Memory of a guest of your own, for codec benches: two raw snapshots, or pages and dirty ones
    /// in two versions (NAME=PAGES,BEFORE,AFTER)
    #[arg(long, value_name = "NAME=FIRST,LATER")]
    pub input: Vec<codec::OwnInput>,
    /// The seed of all random choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

impl Options {
    /// Returns how often each case is run.
    pub fn repeats(&self) -> u32 {
        self.repeats_or(3)
    }

    /// As [`Self::repeats`], for a bench with another default.
    pub fn repeats_or(&self, default: u32) -> u32 {
        self.repeat.unwrap_or(if self.quick { 1 } else { default })
    }

    /// Returns the link of the options, or the bench's own.
    fn link_or(&self, own: &str) -> Result<LinkSpec, LabError> {
        match self.link {
            Some(link) => Ok(link),
            None => own
                .parse()
                .map_err(|error| LabError::Which(format!("{error}"))),
        }
    }

    /// Returns whether a system is to be measured.
    pub fn wants_system(&self, name: &str) -> bool {
        self.system.is_empty() || self.system.iter().any(|system| system == name)
    }

    /// Returns whether a workload is to be run.
    pub fn wants_workload(&self, name: &str) -> bool {
        self.workload.is_empty() || self.workload.iter().any(|workload| workload == name)
    }
}

/// A bench for `lab bench NAME`.
#[derive(Debug)]
pub struct Bench {
    /// Its name.
    pub name: &'static str,
    /// Its subject, in one line.
    pub about: &'static str,
    /// Its approximate duration in minutes, at its defaults and with `--quick`.
    pub minutes: (u32, u32),
    /// Runs the bench, adding rows and then checks to the document.
    pub run: fn(&Options, &mut Document) -> Result<(), LabError>,
}

/// All benches.
pub const BENCHES: &[Bench] = &[
    agents::BENCH,
    codec::BENCH,
    disk::BENCH,
    memory::group::BENCH,
    handover::BENCH,
    link::BENCH,
    memory::BENCH,
    network::BENCH,
    parcel::BENCH,
    predict::BENCH,
    redundancy::BENCH,
    memory::back::BENCH,
    memory::strategies::BENCH,
    streams::BENCH,
];

/// Prints the benches, or only their names.
///
/// # Errors
/// When they cannot be printed.
pub fn list(names: bool) -> Result<(), LabError> {
    let lines: String = BENCHES
        .iter()
        .map(|bench| {
            let (whole, quick) = bench.minutes;
            if names {
                format!("{}\n", bench.name)
            } else {
                format!(
                    "{:<10} {} (about {whole} min, --quick {quick} min)\n",
                    bench.name, bench.about
                )
            }
        })
        .collect();
    print(&lines)
}

/// Runs a bench and prints its document: exit status 1 when a check does not hold, 2 when it could
/// not be run, 130 when it was interrupted - then with the results so far.
///
/// # Errors
/// When there is no such bench, or its document cannot be printed.
pub fn run(name: &str, options: &Options) -> Result<ExitCode, LabError> {
    let bench = BENCHES
        .iter()
        .find(|bench| bench.name == name)
        .ok_or_else(|| {
            LabError::Which(format!(
                "there is no bench `{name}` (hint: lab bench --list)"
            ))
        })?;
    let mut document = Document::new(bench.name);
    let outcome = (bench.run)(options, &mut document).map_err(|error| {
        // The interrupt caused the failure of the work under way.
        if interrupt::requested() {
            LabError::Interrupted
        } else {
            error
        }
    });
    if outcome.is_ok() || !document.rows().is_empty() {
        show(&document, options)?;
    }
    match outcome {
        Ok(()) if document.holds() => Ok(ExitCode::SUCCESS),
        Ok(()) => {
            say("some checks do not hold");
            Ok(ExitCode::from(1))
        }
        Err(LabError::Interrupted) => {
            say("interrupted: this is what was measured so far");
            Err(LabError::Interrupted)
        }
        Err(error) => Err(error),
    }
}

fn show(document: &Document, options: &Options) -> Result<(), LabError> {
    if !options.json {
        return print(&document.show_checks());
    }
    let mut text = serde_json::to_string_pretty(document).map_err(|error| LabError::Answer {
        what: "the bench's document".to_owned(),
        message: error.to_string(),
    })?;
    text.push('\n');
    print(&text)
}
