//! Implements `longhaul parcel`: works on the devices themselves, so it needs no agent.

mod destination;
mod error;
mod plan;
mod source;
mod steps;

#[cfg(test)]
pub(crate) use plan::compare;
pub(crate) use plan::{PlanDocument, WayDocument};
pub(crate) use source::{CheckDocument, ListDocument, Listed, StatusDocument};
pub(crate) use steps::{StepDocument, StepState, count};

use crate::cli::args::{ParcelArgs, ParcelCommand};
use crate::cli::error::CliError;
use crate::cli::now_unix_ms;
use crate::cli::output::Output;
use longhaul_migration::host::config::Config;
use serde::Serialize;
use std::path::PathBuf;

/// A device of a verified parcel.
#[derive(Debug, Serialize)]
pub(crate) struct DeviceDocument {
    pub(crate) device: usize,
    /// `None` if it was not given.
    pub(crate) path: Option<PathBuf>,
    pub(crate) damaged_cells: u64,
    /// The rows of the first damaged cells.
    pub(crate) damaged_rows: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
}

/// The result of verifying a parcel.
#[derive(Debug, Serialize)]
pub(crate) struct VerifyDocument {
    pub(crate) parcel: String,
    pub(crate) name: String,
    pub(crate) to: String,
    pub(crate) created: u64,
    /// The fingerprint of its data key.
    pub(crate) key: String,
    pub(crate) parity: u8,
    pub(crate) rows: u64,
    pub(crate) devices: Vec<DeviceDocument>,
    /// Data cells that cannot be recovered.
    pub(crate) lost_cells: u64,
}

/// The result of an export.
#[derive(Debug, Serialize)]
pub(crate) struct ExportDocument {
    pub(crate) parcel: String,
    pub(crate) name: String,
    pub(crate) devices: Vec<PathBuf>,
    /// The fingerprint of its data key.
    pub(crate) key: String,
    /// Bytes that are used of the fullest device.
    pub(crate) device_bytes: u64,
}

/// A disk that was imported.
#[derive(Debug, Serialize)]
pub(crate) struct ImportedDocument {
    pub(crate) guest: String,
    pub(crate) image: String,
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    /// The digest of its content, for comparison with the source.
    pub(crate) digest: String,
    /// When it was exported, in seconds since 1970.
    pub(crate) exported: u64,
}

/// The result of an import.
#[derive(Debug, Serialize)]
pub(crate) struct ImportDocument {
    pub(crate) parcel: String,
    pub(crate) name: String,
    pub(crate) disks: Vec<ImportedDocument>,
    /// Cells that were recovered from parity.
    pub(crate) recovered_cells: u64,
    /// The report for the source.
    pub(crate) report: PathBuf,
}

/// Runs the command.
pub(crate) fn run(output: &Output, args: ParcelArgs) -> Result<u8, CliError> {
    let config = || Config::read(args.config.as_deref());
    match args.command {
        ParcelCommand::Create(args) => source::create(output, &config()?, args),
        ParcelCommand::Add { name, guests } => source::add(output, &config()?, &name, &guests),
        ParcelCommand::Export(args) => source::export(output, &config()?, &args),
        ParcelCommand::TopUp { name } => source::top_up(output, &config()?, &name),
        ParcelCommand::Ship(args) => source::ship(output, &config()?, args),
        ParcelCommand::Status { name: Some(name) } => source::status(output, &config()?, &name),
        ParcelCommand::Status { name: None } => source::list(output, &config()?),
        ParcelCommand::Check { name, report } => source::check(output, &config()?, &name, &report),
        ParcelCommand::Plan(plan_args) => plan::plan(output, config, &plan_args),
        ParcelCommand::Key { name } => source::key(output, &config()?, &name),
        ParcelCommand::Verify { devices } => destination::verify(output, &devices),
        ParcelCommand::Import { key_file, devices } => {
            destination::bring(output, &config()?, &key_file, &devices)
        }
    }
}

fn no_image(name: &str) -> CliError {
    CliError::usage(
        format!("this host's configuration has no image {name:?}"),
        format!("name it there: [images.{name}] with its path and format"),
    )
}

/// Returns the time, in seconds since 1970.
fn now_s() -> u64 {
    now_unix_ms() / 1000
}
