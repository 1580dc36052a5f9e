//! The errors of parcels, and the commands that help.

use crate::cli::error::CliError;
use longhaul_parcel::{DeviceError, ImportError, JobError, OpenError, WriteError};
use std::io;
use std::path::Path;

fn hint(path: &Path) -> String {
    format!("see that {} is attached and may be read", path.display())
}

impl From<DeviceError> for CliError {
    fn from(error: DeviceError) -> Self {
        let hint = match &error {
            DeviceError::Io { path, .. } => Some(hint(path)),
            DeviceError::Refused { hint, .. } => hint.clone(),
            _ => None,
        };
        Self::parcel(error.to_string(), hint)
    }
}

/// Returns the command that helps.
fn hint_of(error: &JobError) -> Option<String> {
    Some(match error {
        JobError::NotSealed(name) | JobError::Past { parcel: name, .. } => {
            format!("longhaul parcel export {name}")
        }
        JobError::Exists(name) => {
            format!("longhaul parcel status {name} says what it has done, and what comes next")
        }
        JobError::Unknown(_) => "longhaul parcel status lists the parcels of this host".to_owned(),
        JobError::NoDevices(name) => format!("longhaul parcel export {name} --device PATH"),
        JobError::NoGuests(name) => format!("longhaul parcel add {name} GUEST=IMAGE,IMAGE"),
        JobError::Added { parcel, .. } => format!("longhaul parcel top-up {parcel}"),
        JobError::Shipped { parcel, .. } => {
            format!("if they are here, take the note back: longhaul parcel ship {parcel} --cancel")
        }
        JobError::NotShipped(name) => {
            format!("longhaul parcel ship {name} --courier TEXT --number TEXT")
        }
        JobError::OtherDevice { parcel, .. } => {
            format!("longhaul parcel status {parcel} lists its devices")
        }
        JobError::Write(WriteError::Io { path, error, .. })
            if error.kind() == io::ErrorKind::ConnectionAborted =>
        {
            let terminal = path.display();
            format!("give the command again when {terminal} is reached: it goes on where it was")
        }
        JobError::OtherReport { .. } => {
            "have the report sent again, and name the parcel that it is about".to_owned()
        }
        _ => return None,
    })
}

impl From<JobError> for CliError {
    fn from(error: JobError) -> Self {
        match error {
            JobError::Device(error) => error.into(),
            JobError::Open(error) => error.into(),
            other => {
                let hint = hint_of(&other);
                Self::parcel(other.to_string(), hint)
            }
        }
    }
}

impl From<ImportError> for CliError {
    fn from(error: ImportError) -> Self {
        let hint = match &error {
            ImportError::Unread { path, .. } => Some(hint(path) + ", and give the command again"),
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
