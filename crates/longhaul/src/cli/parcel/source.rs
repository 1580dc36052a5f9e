//! Parcels at their source.

use super::steps::{StepDocument, steps};
use super::terminal::absolute;
use super::tracking;
use super::{ExportDocument, ExportedGuest, no_image, now_s};
use crate::cli::args::{CreateArgs, ExportArgs, ParcelGuest, ShipArgs};
use crate::cli::error::CliError;
use crate::cli::output::Output;
use crate::cli::picture::Picture;
use crate::cli::show::parcel as shown;
use longhaul_api::Client;
use longhaul_migration::TrackedExports;
use longhaul_migration::host::config::Config;
use longhaul_migration::host::descriptions;
use longhaul_migration::host::set_aside::set_aside_as;
use longhaul_parcel::{
    Checked, Date, Job, JobDisk, JobGuest, Media, REPORT_BYTES_MAX, Settings, Shipment,
    SignedReport, Status, Step,
};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The folder of parcels, in the state folder.
const JOBS: &str = "parcels";

/// A parcel with its steps.
#[derive(Debug, Serialize)]
pub(crate) struct StatusDocument {
    #[serde(flatten)]
    pub(crate) status: Status,
    /// Guests whose disks are no longer where they run.
    pub(crate) left: Vec<String>,
    /// Former disks of guests that have left.
    pub(crate) copies: Vec<PathBuf>,
    pub(crate) steps: Vec<StepDocument>,
}

impl StatusDocument {
    /// Adds the steps to what a parcel says.
    pub(crate) fn of(status: Status, left: Vec<String>, copies: Vec<PathBuf>) -> Self {
        let steps = steps(&status, &left, &copies);
        Self {
            status,
            left,
            copies,
            steps,
        }
    }
}

/// A parcel in a list.
#[derive(Debug, Serialize)]
pub(crate) struct Listed {
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) parcel: Option<StatusDocument>,
    /// Why it cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
}

/// The parcels of a host.
#[derive(Debug, Serialize)]
pub(crate) struct ListDocument {
    pub(crate) parcels: Vec<Listed>,
}

/// The result of checking a report.
#[derive(Debug, Serialize)]
pub(crate) struct CheckDocument {
    #[serde(flatten)]
    pub(crate) checked: Checked,
}

/// Returns the folder of an export.
fn job_folder(config: &Config, name: &str) -> Result<PathBuf, CliError> {
    // The name becomes that of a folder.
    match name.contains('/') || name.starts_with('.') || name.is_empty() {
        true => Err(CliError::usage(
            format!("{name:?} is not a parcel's name"),
            "use letters, digits, `-`, `_` and `.`, and begin with a letter or digit",
        )),
        false => Ok(config.state.join(JOBS).join(name)),
    }
}

/// Returns a guest's disks, by their names in the configuration.
fn guest_of(config: &Config, guest: &ParcelGuest) -> Result<JobGuest, CliError> {
    let disk = |name: &String| {
        let image = config
            .hypervisor
            .images
            .get(name)
            .ok_or_else(|| no_image(name))?;
        Ok(JobDisk {
            name: name.clone(),
            path: image.path.clone(),
        })
    };
    Ok(JobGuest {
        name: guest.name.clone(),
        disks: guest
            .images
            .iter()
            .map(disk)
            .collect::<Result<_, CliError>>()?,
    })
}

/// The configuration, and where devices are.
type Host<'a> = (&'a Config, Arc<dyn Media>);

fn open(config: &Config, name: &str) -> Result<Job, CliError> {
    let job = Job::open(&job_folder(config, name)?)?;
    Ok(job.with_tracking(exports(config)))
}

/// Opens a job with its devices.
fn open_on((config, media): &Host<'_>, name: &str) -> Result<Job, CliError> {
    Ok(open(config, name)?.with_media(media.clone()))
}

fn exports(config: &Config) -> TrackedExports {
    TrackedExports {
        state: config.state.clone(),
    }
}

fn guests_of(config: &Config, guests: &[ParcelGuest]) -> Result<Vec<JobGuest>, CliError> {
    let guests = guests.iter().map(|guest| guest_of(config, guest));
    guests.collect()
}

/// Makes a parcel.
pub(super) fn create(output: &Output, config: &Config, args: CreateArgs) -> Result<u8, CliError> {
    let folder = job_folder(config, &args.name)?;
    let settings = Settings {
        name: args.name,
        to: args.to,
        parity: args.lose,
        now: now_s(),
    };
    show_status(output, &Job::make(&folder, &settings)?)
}

/// Adds guests.
pub(super) fn add(
    output: &Output,
    host: Host<'_>,
    name: &str,
    (guests, group): (&[ParcelGuest], Option<&str>),
) -> Result<u8, CliError> {
    let mut job = open_on(&host, name)?;
    job.add(guests_of(host.0, guests)?)?;
    if let Some(group) = group {
        let names: Vec<String> = guests.iter().map(|guest| guest.name.clone()).collect();
        job.group(group, &names)?;
    }
    show_status(output, &job)
}

/// Begins an export, or goes on with one.
pub(super) async fn export(
    output: &Output,
    client: &Client,
    (config, media): Host<'_>,
    args: &ExportArgs,
) -> Result<u8, CliError> {
    let folder = job_folder(config, &args.name)?;
    let absolute = args.devices.iter().map(|device| absolute(device));
    let devices: Vec<PathBuf> = absolute.collect::<Result<_, _>>()?;
    let job = match &args.to {
        None => {
            let mut job = Job::open(&folder)?.with_media(media);
            job.begin(&devices, args.limit, now_s())?;
            job
        }
        Some(to) => {
            let settings = Settings {
                name: args.name.clone(),
                to: to.clone(),
                parity: args.lose,
                now: now_s(),
            };
            let guests = guests_of(config, &args.guests)?;
            let devices = (&devices[..], args.limit);
            Job::create_on(media, &folder, &settings, devices, guests)?
        }
    };
    finish(output, client, config, (job, args.no_freeze)).await
}

/// Tops a parcel up, or goes on with a top-up.
pub(super) async fn top_up(
    output: &Output,
    client: &Client,
    host: Host<'_>,
    (name, no_freeze): (&str, bool),
) -> Result<u8, CliError> {
    let mut job = open_on(&host, name)?;
    if !job.tops_up() {
        job.top_up()?;
    }
    finish(output, client, host.0, (job, no_freeze)).await
}

/// Notes a journey, or takes the note back.
pub(super) fn ship(output: &Output, host: Host<'_>, args: ShipArgs) -> Result<u8, CliError> {
    let mut job = open_on(&host, &args.name)?;
    match (args.courier, args.number) {
        (Some(courier), Some(number)) => job.ship(Shipment {
            courier,
            number,
            date: args.date.unwrap_or_else(|| Date::of(now_s())),
            arrives: args.arrives,
        })?,
        // The arguments are both there, or it is cancelled.
        _ => {
            job.cancel_shipment()?;
        }
    }
    show_status(output, &open_on(&host, &args.name)?)
}

/// Prints a parcel's key.
pub(super) fn key(output: &Output, config: &Config, name: &str) -> Result<u8, CliError> {
    let job = open(config, name)?;
    output.text(format!("{}\n", job.key().text().as_str()).as_bytes())?;
    Ok(0)
}

fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

fn document(job: &Job) -> Result<StatusDocument, CliError> {
    let status = job.status()?;
    // A disk is renamed when its guest has left; an import needs nothing of the kind.
    let has_left = |path: &PathBuf| {
        let copy = set_aside_as(path);
        !is_there(path) && (is_there(&copy) || status.is_confirmed)
    };
    let left = status.guests.iter().filter(|guest| {
        let mut paths = guest.disks.iter().map(|disk| &disk.path);
        !guest.disks.is_empty() && paths.all(has_left)
    });
    let left: Vec<_> = left.collect();
    // Beside the disk of a guest that is here, such a file is from somewhere else.
    let copies = left.iter().flat_map(|guest| &guest.disks);
    let copies = copies.map(|disk| set_aside_as(&disk.path));
    let copies: Vec<PathBuf> = copies.filter(|path| is_there(path)).collect();
    let left = left.into_iter().map(|guest| guest.name.clone()).collect();
    Ok(StatusDocument::of(status, left, copies))
}

fn show_status(output: &Output, job: &Job) -> Result<u8, CliError> {
    let document = document(job)?;
    super::super::show(output, &document, || shown::status(&document))?;
    Ok(0)
}

/// Shows a parcel.
pub(super) fn status(output: &Output, host: Host<'_>, name: &str) -> Result<u8, CliError> {
    show_status(output, &open_on(&host, name)?)
}

/// Lists all parcels.
pub(super) fn list(output: &Output, (config, media): Host<'_>) -> Result<u8, CliError> {
    let folder = config.state.join(JOBS);
    let cannot = |error: io::Error| {
        CliError::parcel(
            format!("{} cannot be read: {error}", folder.display()),
            None,
        )
    };
    let entries = match fs::read_dir(&folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        entries => entries
            .and_then(Iterator::collect::<io::Result<Vec<_>>>)
            .map_err(cannot)?,
    };
    let mut names: Vec<String> = entries
        .into_iter()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    let parcels = names.into_iter().map(|name| {
        let parcel = Job::open(&folder.join(&name)).map_err(CliError::from);
        let parcel = parcel.map(|job| job.with_media(media.clone()));
        match parcel.and_then(|job| document(&job)) {
            Ok(parcel) => Listed {
                name,
                parcel: Some(parcel),
                error: None,
            },
            Err(error) => Listed {
                name,
                parcel: None,
                error: Some(error.message().to_owned()),
            },
        }
    });
    let document = ListDocument {
        parcels: parcels.collect(),
    };
    super::super::show(output, &document, || shown::list(&document))?;
    Ok(0)
}

/// Returns what a parcel's disks have allocated, and the number of its guests.
pub(super) fn allocated(config: &Config, name: &str) -> Result<(u64, u64), CliError> {
    let status = open(config, name)?.status()?;
    let mut bytes = 0u64;
    for disk in status.guests.iter().flat_map(|guest| &guest.disks) {
        let allocated = disk.allocated_bytes.ok_or_else(|| {
            let why = disk.error.clone().unwrap_or_default();
            CliError::parcel(format!("the size of {} is unknown: {why}", disk.name), None)
        })?;
        bytes = bytes.saturating_add(allocated);
    }
    Ok((bytes, status.guests.len() as u64))
}

/// Compares a report with what was exported.
pub(super) fn check(
    output: &Output,
    config: &Config,
    name: &str,
    file: &Path,
) -> Result<u8, CliError> {
    let mut job = open(config, name)?;
    let cannot = |why: String| {
        let hint = "`longhaul parcel import` has written it at the destination, and printed where";
        CliError::parcel(
            format!("the report {} cannot be read: {why}", file.display()),
            Some(hint.to_owned()),
        )
    };
    let mut bytes = Vec::new();
    let read = File::open(file).and_then(|file| {
        let file = file.take(REPORT_BYTES_MAX + 1);
        io::BufReader::new(file).read_to_end(&mut bytes)
    });
    read.map_err(|error| cannot(error.to_string()))?;
    let report = SignedReport::read(&bytes).map_err(|error| cannot(error.to_string()))?;
    let checked = job.check(&report, now_s())?;
    let document = CheckDocument { checked };
    super::super::show(output, &document, || shown::checked(&document))?;
    Ok(u8::from(!document.checked.confirmed))
}

/// Puts into the parcel what a destination needs to start its guests.
fn describe(config: &Config, job: &mut Job) -> Result<(), CliError> {
    for guest in job.guests() {
        let described = descriptions::read(&config.state, &guest.name).and_then(|description| {
            let value = description.map(serde_json::to_value).transpose();
            value.map_err(io::Error::other)
        });
        let described = described.map_err(|error| {
            let hint = "repair it: without it the destination could not start the guest";
            CliError::parcel(
                format!("the description of {}: {error}", guest.name),
                Some(hint.to_owned()),
            )
        })?;
        // What another manager starts is not described here.
        if let Some(description) = described {
            job.describe(&guest.name, description)?;
        }
    }
    Ok(())
}

/// Runs the job to its end, and shows the parcel.
async fn finish(
    output: &Output,
    client: &Client,
    config: &Config,
    (job, no_freeze): (Job, bool),
) -> Result<u8, CliError> {
    let exports = exports(config);
    let mut reasons = match job.is_sealed() {
        // Nothing is read.
        true => BTreeMap::new(),
        false => tracking::begin(&exports, client, &job.guests()).await?,
    };
    let mut job = job;
    if !job.is_sealed() {
        describe(config, &mut job)?;
    }
    let mut job = match no_freeze {
        true => job.without_freezing().with_tracking(exports),
        false => job.with_tracking(exports),
    };
    let picture = Picture::new(output);
    let parcel = job.run(now_s(), &mut |step| {
        match step {
            Step::MomentLost { guest, why } => {
                reasons.insert((*guest).to_owned(), (*why).to_owned());
            }
            Step::NotFrozen { guest, why } => {
                let why = format!("its file systems were not frozen: {why}");
                reasons.insert((*guest).to_owned(), why);
            }
            Step::Exports { .. } | Step::Seals { .. } => {}
        }
        picture.draw(|width| shown::exporting(step, width));
    })?;
    picture.clear();
    let header = parcel.header();
    let guests = job.guests().into_iter().map(|guest| {
        let moment = job.moment_of(&guest.name);
        let frozen = moment.as_ref().is_some_and(|moment| moment.frozen);
        ExportedGuest {
            why: reasons.remove(&guest.name).filter(|_| !frozen),
            name: guest.name,
            consistent: moment.is_some(),
            frozen,
            group: moment.and_then(|moment| moment.group),
        }
    });
    let document = ExportDocument {
        parcel: header.parcel.to_string(),
        name: header.name.clone(),
        devices: job.devices().to_vec(),
        key: header.key.to_string(),
        device_bytes: (header.row + 1) * longhaul_parcel::CELL_BYTES as u64,
        guests: guests.collect(),
    };
    super::super::show(output, &document, || shown::exported(&document))?;
    Ok(0)
}
