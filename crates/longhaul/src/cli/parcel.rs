//! Implements `longhaul parcel`: works on the devices themselves. An agent is only needed for
//! guests that run, whose writes it tracks, and for devices that are attached to other hosts.

mod destination;
mod error;
mod plan;
mod source;
mod steps;
mod terminal;
mod tracking;

#[cfg(test)]
pub(crate) use plan::compare;
pub(crate) use plan::{PlanDocument, WayDocument};
pub(crate) use source::{CheckDocument, ListDocument, Listed, StatusDocument};
pub(crate) use steps::{StepDocument, StepState, count};

use crate::cli::args::{ParcelArgs, ParcelCommand};
use crate::cli::error::CliError;
use crate::cli::now_unix_ms;
use crate::cli::output::Output;
use longhaul_api::Client;
use longhaul_migration::host::config::Config;
use serde::Serialize;
use std::path::PathBuf;
use terminal::Terminals;

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
    pub(crate) guests: Vec<ExportedGuest>,
}

/// A guest that was exported.
#[derive(Debug, Serialize)]
pub(crate) struct ExportedGuest {
    pub(crate) name: String,
    /// Whether its disks are as they were at one moment.
    pub(crate) consistent: bool,
    /// Whether its agent had frozen its file systems at that moment.
    pub(crate) frozen: bool,
    /// The group whose guests have the same moment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) group: Option<String>,
    /// Why they are not, or what the moment lacks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) why: Option<String>,
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
    /// The number of the version.
    pub(crate) version: u64,
    /// When the version was exported, in seconds since 1970.
    pub(crate) exported: u64,
}

/// A guest that was imported.
#[derive(Debug, Serialize)]
pub(crate) struct ImportedGuestDocument {
    pub(crate) guest: String,
    /// The number of the version.
    pub(crate) version: u64,
    /// Whether all disks are as they were at one moment.
    pub(crate) consistent: bool,
    /// Whether the guest's agent had frozen its file systems at that moment.
    pub(crate) frozen: bool,
    /// The moment, which is the same for guests of a group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) moment: Option<String>,
    /// Its description, as `guests start` takes it.
    pub(crate) description: Option<PathBuf>,
    /// Why its description could not be written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) trouble: Option<String>,
}

/// The result of an import.
#[derive(Debug, Serialize)]
pub(crate) struct ImportDocument {
    pub(crate) parcel: String,
    pub(crate) name: String,
    pub(crate) disks: Vec<ImportedDocument>,
    pub(crate) guests: Vec<ImportedGuestDocument>,
    /// Cells that were recovered from parity.
    pub(crate) recovered_cells: u64,
    /// The report for the source; none of disks that were written to a folder of the caller's.
    pub(crate) report: Option<PathBuf>,
}

/// Runs the command.
pub(crate) async fn run(
    output: &Output,
    client: &Client,
    args: ParcelArgs,
) -> Result<u8, CliError> {
    let config = || Config::read(args.config.as_deref());
    let media = || Terminals::by(client);
    match args.command {
        ParcelCommand::Create(args) => source::create(output, &config()?, args),
        ParcelCommand::Add {
            name,
            guests,
            group,
        } => {
            let guests = (&guests[..], group.as_deref());
            source::add(output, (&config()?, media()), &name, guests)
        }
        ParcelCommand::Export(args) => {
            source::export(output, client, (&config()?, media()), &args).await
        }
        ParcelCommand::TopUp { name, no_freeze } => {
            source::top_up(output, client, (&config()?, media()), (&name, no_freeze)).await
        }
        ParcelCommand::Ship(args) => source::ship(output, (&config()?, media()), args),
        ParcelCommand::Status { name: Some(name) } => {
            source::status(output, (&config()?, media()), &name)
        }
        ParcelCommand::Status { name: None } => source::list(output, (&config()?, media())),
        ParcelCommand::Check { name, report } => source::check(output, &config()?, &name, &report),
        ParcelCommand::Plan(plan_args) => plan::plan(output, config, &plan_args),
        ParcelCommand::Key { name } => source::key(output, &config()?, &name),
        ParcelCommand::Verify { devices } => destination::verify(output, &*media(), &devices),
        ParcelCommand::Import(args) => destination::bring(output, (&config()?, &*media()), &args),
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
