//! Implements `longhaul parcel`: works on the devices themselves, so it needs no agent.

use crate::cli::args::ParcelCommand;
use crate::cli::error::CliError;
use crate::cli::output::Output;
use crate::cli::picture::Picture;
use crate::cli::show::parcel as shown;
use longhaul_parcel::{Damage, Device, DeviceError, Header, OpenError, Parcel};
use serde::Serialize;
use std::path::{Path, PathBuf};

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

/// Runs the command.
pub(crate) fn run(output: &Output, command: ParcelCommand) -> Result<u8, CliError> {
    match command {
        ParcelCommand::Verify { devices } => verify(output, &devices),
    }
}

fn verify(output: &Output, paths: &[PathBuf]) -> Result<u8, CliError> {
    let open = |path: &PathBuf| Device::open(path, false);
    let devices = paths.iter().map(open).collect::<Result<_, _>>()?;
    let parcel = Parcel::open(devices)?;
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
