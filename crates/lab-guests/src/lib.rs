//! Implements `lab guests`: the matrix of QEMU command lines that people use. Each line is started
//! on one of two hosts, attached to, planned, moved with its local disks, moved back, and once
//! given up on the way.
//!
//! [`line`] defines the lines, `material` what they need, `trial` the steps, [`report`] the
//! results.

mod bridge;
pub mod exec;
pub mod line;
mod machine;
mod material;
mod qemu;
pub mod report;
mod stage;
mod trial;
mod words;

use line::Line;
use longhaul_lab::error::LabError;
use longhaul_lab::interrupt;
use longhaul_lab::lab::{print, say};
use report::{Document, Row, Summary};
use stage::Stage;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// The time limit of every step, on any slow machine.
const LIMIT: Duration = Duration::from_secs(300);

/// The options of `lab guests`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Options {
    /// Files of lines, or folders with files *.json (docs/laboratory.md has their format)
    #[arg(required = true, value_name = "LINES")]
    pub lines: Vec<PathBuf>,
    /// Only the lines with these ids
    #[arg(long, value_name = "ID", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Replace the words by which guests of libvirt and Proxmox VE are known
    #[arg(long)]
    pub hide_managers: bool,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
    /// The number of lines at a time, each with hosts of its own
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u8).range(1..=16)
    )]
    pub jobs: u8,
}

/// Runs the command: exit status 0 when every line has an allowed result, 1 otherwise.
///
/// # Errors
/// When it cannot be run, or is interrupted.
pub fn command(options: &Options) -> Result<ExitCode, LabError> {
    let lines = choose(options)?;
    let jobs = usize::from(options.jobs);
    let json = options.json;
    if !json {
        print(&format!("{}\n", report::heading()))?;
    }
    let rows = run(&lines, options.hide_managers, jobs, |row| match json {
        true => {
            say(&row.text());
            Ok(())
        }
        false => print(&format!("{}\n", row.text())),
    })?;
    let summary = Summary::of(&rows);
    match json {
        true => {
            let document = serde_json::to_string_pretty(&Document { summary, rows });
            let document = document.map_err(|error| LabError::Answer {
                what: "the document".to_owned(),
                message: error.to_string(),
            })?;
            print(&format!("{document}\n"))?;
        }
        false => print(&format!("{}\n", summary.text()))?,
    }
    Ok(ExitCode::from(u8::from(summary.not_as_expected > 0)))
}

/// Returns the lines of the options.
fn choose(options: &Options) -> Result<Vec<Line>, LabError> {
    let mut lines = line::load(&options.lines)?;
    let unknown = options
        .only
        .iter()
        .find(|id| !lines.iter().any(|line| line.id == **id));
    if let Some(id) = unknown {
        return Err(LabError::Which(format!("no line is called {id}")));
    }
    lines.retain(|line| options.only.is_empty() || options.only.contains(&line.id));
    Ok(lines)
}

/// Tries lines, several at a time, and passes each result on; returns all in the lines' order.
///
/// # Errors
/// When the laboratory fails, or is interrupted.
pub fn run(
    lines: &[Line],
    hide_managers: bool,
    jobs: usize,
    each: impl Fn(&Row) -> Result<(), LabError> + Sync,
) -> Result<Vec<Row>, LabError> {
    let _permission = bridge::Permission::give(lines)?;
    let queue: Mutex<VecDeque<usize>> = Mutex::new((0..lines.len()).collect());
    let next = || {
        queue
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop_front()
    };
    let rows = Mutex::new(Vec::new());
    let work = || -> Result<(), LabError> {
        let mut stage = None;
        while let Some(number) = next() {
            interrupt::check()?;
            let Some(line) = lines.get(number) else {
                continue;
            };
            let stage = match &mut stage {
                Some(stage) => stage,
                none => none.insert(Stage::make()?),
            };
            let mut line = line.clone();
            let hidden = hide_managers && line.names_a_manager();
            if hidden {
                line.hide_managers();
            }
            let row = trial::run(stage, &line, hidden)?;
            each(&row)?;
            rows.lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push((number, row));
        }
        Ok(())
    };
    let workers = jobs.clamp(1, lines.len().max(1));
    thread::scope(|scope| {
        let started: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        let ended = started.into_iter().map(|worker| {
            worker
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        ended.collect::<Result<Vec<()>, LabError>>()
    })?;
    let mut rows = rows.into_inner().unwrap_or_else(PoisonError::into_inner);
    rows.sort_by_key(|(number, _)| *number);
    Ok(rows.into_iter().map(|(_, row)| row).collect())
}
