//! Implements `longhaul parcel`: works on the devices themselves, so it needs no agent.

use crate::cli::args::{ExportArgs, ParcelArgs, ParcelCommand, ParcelGuest};
use crate::cli::error::CliError;
use crate::cli::now_unix_ms;
use crate::cli::output::Output;
use crate::cli::picture::Picture;
use crate::cli::show::parcel as shown;
use longhaul_migration::host::config::Config;
use longhaul_migration::host::set_aside::set_aside_as;
use longhaul_parcel::{
    Damage, DataKey, Device, DeviceError, Header, ImportError, ImportedDisk, Job, JobDisk,
    JobError, JobGuest, OpenError, Parcel, Settings, import,
};
use serde::Serialize;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// The folder of exports, in the state folder.
const JOBS: &str = "parcels";
/// The most bytes of a key file.
const KEY_FILE_BYTES_MAX: u64 = 1024;

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
}

/// Runs the command.
pub(crate) fn run(output: &Output, args: ParcelArgs) -> Result<u8, CliError> {
    let config = || Config::read(args.config.as_deref());
    match args.command {
        ParcelCommand::Export(export_args) => export(output, &config()?, &export_args),
        ParcelCommand::TopUp { name } => {
            let mut job = Job::open(&job_folder(&config()?, &name)?)?;
            job.top_up()?;
            finish(output, job)
        }
        ParcelCommand::Key { name } => {
            let job = Job::open(&job_folder(&config()?, &name)?)?;
            output.text(format!("{}\n", job.key().text().as_str()).as_bytes())?;
            Ok(0)
        }
        ParcelCommand::Verify { devices } => verify(output, &devices),
        ParcelCommand::Import { key_file, devices } => {
            bring(output, &config()?, &key_file, &devices)
        }
    }
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

fn no_image(name: &str) -> CliError {
    CliError::usage(
        format!("this host's configuration has no image {name:?}"),
        format!("name it there: [images.{name}] with its path and format"),
    )
}

fn export(output: &Output, config: &Config, args: &ExportArgs) -> Result<u8, CliError> {
    let folder = job_folder(config, &args.name)?;
    let job = match &args.to {
        None => Job::open(&folder)?,
        Some(to) => {
            let settings = Settings {
                name: args.name.clone(),
                to: to.clone(),
                parity: args.lose,
                now: now_s(),
            };
            let guests = args.guests.iter().map(|guest| guest_of(config, guest));
            let guests = guests.collect::<Result<_, _>>()?;
            let absolute = args.devices.iter().map(std::path::absolute);
            let devices: Vec<PathBuf> = absolute.collect::<Result<_, _>>()?;
            Job::create(&folder, &settings, (&devices, args.limit), guests)?
        }
    };
    finish(output, job)
}

/// Returns the time, in seconds since 1970.
fn now_s() -> u64 {
    now_unix_ms() / 1000
}

/// Runs the job to its end, and shows the parcel.
fn finish(output: &Output, mut job: Job) -> Result<u8, CliError> {
    let picture = Picture::new(output);
    let parcel = job.run(now_s(), &mut |step| {
        picture.draw(|width| shown::exporting(step, width));
    })?;
    picture.clear();
    let header = parcel.header();
    let document = ExportDocument {
        parcel: header.parcel.to_string(),
        name: header.name.clone(),
        devices: job.devices().to_vec(),
        key: header.key.to_string(),
        device_bytes: (header.row + 1) * longhaul_parcel::CELL_BYTES as u64,
    };
    super::show(output, &document, || shown::exported(&document))?;
    Ok(0)
}

/// Reads a parcel's key.
fn read_key(file: &Path) -> Result<DataKey, CliError> {
    let mut text = Zeroizing::new(String::new());
    let read = match file == Path::new("-") {
        true => std::io::stdin()
            .take(KEY_FILE_BYTES_MAX)
            .read_to_string(&mut text),
        false => {
            File::open(file).and_then(|it| it.take(KEY_FILE_BYTES_MAX).read_to_string(&mut text))
        }
    };
    let cannot = |why: String| {
        let hint = "the source prints it: longhaul parcel key NAME";
        CliError::parcel(
            format!("the key in {} cannot be read: {why}", file.display()),
            Some(hint.to_owned()),
        )
    };
    read.map_err(|error| cannot(error.to_string()))?;
    text.trim()
        .parse()
        .map_err(|error: longhaul_parcel::KeyError| cannot(error.to_string()))
}

/// Returns where a disk goes: beside the path at which its guest will have it.
fn place(config: &Config, name: &str) -> Result<PathBuf, CliError> {
    let image = config
        .hypervisor
        .images
        .get(name)
        .ok_or_else(|| no_image(name))?;
    let path = set_aside_as(&image.path);
    let is_there = |path: &Path| fs::symlink_metadata(path).is_ok();
    match (is_there(&image.path), is_there(&path)) {
        (true, _) => Err(CliError::usage(
            format!("{} exists: it may be a guest's disk", image.path.display()),
            "a disk is imported where its guest will arrive, and that must be free; a volume \
             cannot take one yet",
        )),
        (false, true) => Err(CliError::usage(
            format!("{} exists, from an earlier import or move", path.display()),
            "it serves the same purpose; remove it if the parcel is newer",
        )),
        (false, false) => Ok(path),
    }
}

fn bring(
    output: &Output,
    config: &Config,
    key_file: &Path,
    paths: &[PathBuf],
) -> Result<u8, CliError> {
    let key = read_key(key_file)?;
    let parcel = open(paths)?;
    let mut refused = None;
    let picture = Picture::new(output);
    let imported = import(&parcel, &key, &mut |guest, disk| {
        picture.draw(|_| shown::importing(&guest.name, &disk.name));
        place(config, &disk.name).map_err(|error| {
            refused = Some(error);
            ImportError::Nothing
        })
    });
    picture.clear();
    let (disks, report) = match (refused, imported) {
        (Some(error), _) => return Err(error),
        (None, imported) => imported?,
    };
    let each = disks.into_iter().map(|disk| {
        let ImportedDisk {
            guest,
            disk,
            path,
            bytes,
            digest,
            time,
            ..
        } = disk;
        ImportedDocument {
            guest,
            image: disk,
            path,
            bytes,
            digest,
            exported: time,
        }
    });
    let document = ImportDocument {
        parcel: parcel.id().to_string(),
        name: parcel.header().name.clone(),
        disks: each.collect(),
        recovered_cells: report.recovered,
    };
    super::show(output, &document, || shown::imported(&document))?;
    Ok(0)
}

fn open(paths: &[PathBuf]) -> Result<Parcel, CliError> {
    let open = |path: &PathBuf| Device::open(path, false);
    let devices = paths.iter().map(open).collect::<Result<_, _>>()?;
    Ok(Parcel::open(devices)?)
}

fn verify(output: &Output, paths: &[PathBuf]) -> Result<u8, CliError> {
    let parcel = open(paths)?;
    let (picture, rows) = (Picture::new(output), parcel.rows());
    let name = &parcel.header().name;
    let report = parcel.verify(&mut |read| {
        picture.draw(|width| shown::verifying(name, read, rows, width));
    });
    picture.clear();
    let damage_of = |device| {
        let mut damage = report.damage.iter();
        damage.find(|(number, _)| *number == device)
    };
    let devices = (0..parcel.header().devices.len()).map(|device| {
        let (cells, rows, error) = match damage_of(device) {
            Some((_, Damage::Cells { cells, rows, error })) => (*cells, &rows[..], error.clone()),
            None | Some((_, Damage::Absent)) => (0, &[][..], None),
        };
        DeviceDocument {
            device,
            path: parcel.device(device).map(|it| it.path().to_path_buf()),
            damaged_cells: cells,
            damaged_rows: rows.to_vec(),
            error,
        }
    });
    let Header {
        parcel: id,
        name,
        to,
        created,
        parity,
        key,
        ..
    } = parcel.header();
    let document = VerifyDocument {
        parcel: id.to_string(),
        name: name.clone(),
        to: to.clone(),
        created: *created,
        key: key.to_string(),
        parity: *parity,
        rows: report.rows,
        devices: devices.collect(),
        lost_cells: report.lost,
    };
    super::show(output, &document, || shown::verified(&document))?;
    Ok(u8::from(document.lost_cells > 0))
}

fn hint(path: &Path) -> String {
    format!("see that {} is attached and may be read", path.display())
}

impl From<DeviceError> for CliError {
    fn from(error: DeviceError) -> Self {
        let hint = match &error {
            DeviceError::Io { path, .. } => Some(hint(path)),
            _ => None,
        };
        Self::parcel(error.to_string(), hint)
    }
}

impl From<JobError> for CliError {
    fn from(error: JobError) -> Self {
        match error {
            JobError::Device(error) => error.into(),
            JobError::Open(error) => error.into(),
            JobError::NotSealed(name) => {
                let hint = format!("longhaul parcel export {name}");
                Self::parcel(JobError::NotSealed(name).to_string(), Some(hint))
            }
            JobError::Exists(name) => {
                let hint = format!("longhaul parcel export {name}");
                Self::parcel(JobError::Exists(name).to_string(), Some(hint))
            }
            other => Self::parcel(other.to_string(), None),
        }
    }
}

impl From<ImportError> for CliError {
    fn from(error: ImportError) -> Self {
        Self::parcel(error.to_string(), None)
    }
}

impl From<OpenError> for CliError {
    fn from(error: OpenError) -> Self {
        let hint = match &error {
            OpenError::Io { path, .. } => Some(hint(path)),
            OpenError::NoHeader => {
                let hint = "give the folders, the files that end in .parcel, or the block devices";
                Some(hint.to_owned())
            }
            _ => None,
        };
        Self::parcel(error.to_string(), hint)
    }
}
