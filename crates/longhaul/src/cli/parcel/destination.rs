//! Parcels at their destination.

use super::{
    DeviceDocument, ImportDocument, ImportedDocument, ImportedGuestDocument, VerifyDocument,
    no_image, now_s,
};
use crate::cli::args::ParcelImportArgs;
use crate::cli::error::CliError;
use crate::cli::output::Output;
use crate::cli::picture::Picture;
use crate::cli::show::parcel as shown;
use longhaul_hypervisor::description;
use longhaul_migration::host::config::Config;
use longhaul_migration::host::set_aside::set_aside_as;
use longhaul_parcel::{
    Damage, DataKey, Device, Header, ImportError, ImportReport, Imported, ImportedDisk,
    ImportedGuest, Media, Parcel, import,
};
use longhaul_protocol::guest::GuestDescription;
use longhaul_storage::files::{RealFiles, replace};
use serde_json::Value;
use std::fmt::Display;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// The folder of reports, in the state folder.
const REPORTS: &str = "parcel-reports";
/// The most bytes of a key file.
const KEY_FILE_BYTES_MAX: u64 = 1024;

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

/// Returns where a disk goes in a folder of the caller's.
fn place_in(folder: &Path, name: &str) -> Result<PathBuf, CliError> {
    let is_one = Path::new(name).file_name().is_some_and(|it| it == name);
    let path = folder.join(format!("{name}.img"));
    match (is_one, fs::symlink_metadata(&path).is_ok()) {
        (true, false) => Ok(path),
        (true, true) => Err(CliError::usage(
            format!("{} exists", path.display()),
            "nothing is overwritten: name an empty folder",
        )),
        (false, _) => Err(CliError::parcel(
            format!("{name:?} is no name for a file"),
            Some("name the image otherwise at the source, and export it again".to_owned()),
        )),
    }
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

/// Imports a parcel. Of disks that a move will find, it writes the report for its source.
pub(super) fn bring(
    output: &Output,
    (config, media): (&Config, &dyn Media),
    args: &ParcelImportArgs,
) -> Result<u8, CliError> {
    let key = read_key(&args.key_file)?;
    let parcel = open(media, &args.devices)?;
    let place = |name: &str| match &args.into {
        Some(folder) => place_in(folder, name),
        None => place(config, name),
    };
    let mut refused = None;
    let picture = Picture::new(output);
    let imported = import(&parcel, &key, args.version, &mut |guest, disk| {
        picture.draw(|_| shown::importing(&guest.name, &disk.name));
        place(&disk.name).map_err(|error| {
            refused = Some(error);
            ImportError::Nothing
        })
    });
    picture.clear();
    let Imported {
        disks,
        guests,
        report,
    } = match (refused, imported) {
        (Some(error), _) => return Err(error),
        (None, imported) => imported?,
    };
    let guests = guests.into_iter();
    let guests = guests.map(|guest| describe(config, args.into.as_deref(), guest));
    let guests = guests.collect();
    let report_file = match args.into {
        Some(_) => None,
        None => {
            let report = ImportReport::of(&parcel, (&disks, &report), now_s());
            Some(file_report(config, &parcel, &report, &key)?)
        }
    };
    let each = disks.into_iter().map(|disk| {
        let ImportedDisk {
            guest,
            disk,
            path,
            bytes,
            digest,
            version,
            time,
        } = disk;
        ImportedDocument {
            guest,
            image: disk,
            path,
            bytes,
            digest,
            version,
            exported: time,
        }
    });
    let document = ImportDocument {
        parcel: parcel.id().to_string(),
        name: parcel.header().name.clone(),
        disks: each.collect(),
        guests,
        recovered_cells: report.recovered,
        report: report_file,
    };
    super::super::show(output, &document, || shown::imported(&document))?;
    Ok(0)
}

/// Writes the description of an imported guest beside its disks in a folder of the caller's, or
/// beside the report. The disks are there in any case.
fn describe(config: &Config, into: Option<&Path>, guest: ImportedGuest) -> ImportedGuestDocument {
    let (folder, replaces) = match into {
        Some(folder) => (folder.to_path_buf(), false),
        None => (config.state.join(REPORTS), true),
    };
    let about = (&*guest.guest, guest.description);
    let (description, trouble) = match write_description((&folder, replaces), about) {
        Ok(path) => (path, None),
        Err(why) => (None, Some(why)),
    };
    ImportedGuestDocument {
        guest: guest.guest,
        version: guest.version,
        consistent: guest.consistent,
        frozen: guest.frozen,
        moment: guest.moment.map(|moment| moment.to_string()),
        description,
        trouble,
    }
}

fn write_description(
    (folder, replaces): (&Path, bool),
    (guest, description): (&str, Value),
) -> Result<Option<PathBuf>, String> {
    let text = |error: &dyn Display| format!("its description cannot be used: {error}");
    let description: Option<GuestDescription> =
        serde_json::from_value(description).map_err(|error| text(&error))?;
    let Some(described) = description else {
        return Ok(None);
    };
    // Another program may have written it.
    description::check(&described).map_err(|error| text(&error))?;
    let toml = toml::to_string(&described).map_err(|error| text(&error))?;
    if described.name != guest {
        return Err(format!("its description is that of {}", described.name));
    }
    let path = folder.join(format!("{guest}.toml"));
    if !replaces && path.exists() {
        return Err(format!("{} exists, and is not replaced", path.display()));
    }
    let names = ["the description", "its name"];
    fs::create_dir_all(folder)
        .and_then(|()| replace(&RealFiles, &path, toml.as_bytes(), names))
        .map_err(|error| format!("{} cannot be written: {error}", path.display()))?;
    Ok(Some(path))
}

fn file_report(
    config: &Config,
    parcel: &Parcel,
    report: &ImportReport,
    key: &DataKey,
) -> Result<PathBuf, CliError> {
    let signed = report.sign(key).map_err(|error| error.to_string());
    let written = signed.and_then(|it| write_report(config, &parcel.header().name, &it));
    written.map_err(|error| {
        CliError::parcel(
            format!("the disks are imported, but their report cannot be written: {error}"),
            Some("for a report, remove them and import the parcel again".to_owned()),
        )
    })
}

/// Writes a report durably beside the host's other state, and returns its path.
fn write_report(config: &Config, name: &str, signed: &[u8]) -> Result<PathBuf, String> {
    let folder = config.state.join(REPORTS);
    let fails = |path: &Path| {
        let path = path.display().to_string();
        move |error: std::io::Error| format!("{path}: {error}")
    };
    fs::create_dir_all(&folder).map_err(fails(&folder))?;
    let path = folder.join(format!("{name}-{}.json", now_s()));
    let new = folder.join(format!(".{name}.new"));
    let mut options = OpenOptions::new();
    let options = options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(&new).map_err(fails(&new))?;
    file.write_all(signed).map_err(fails(&new))?;
    file.sync_all().map_err(fails(&new))?;
    fs::rename(&new, &path).map_err(fails(&path))?;
    let synced = File::open(&folder).and_then(|folder| folder.sync_all());
    synced.map_err(fails(&folder))?;
    Ok(path)
}

fn open(media: &dyn Media, paths: &[PathBuf]) -> Result<Parcel, CliError> {
    let open = |path: &PathBuf| Device::open_on(media, path, false);
    let devices = paths.iter().map(open).collect::<Result<_, _>>()?;
    Ok(Parcel::open(devices)?)
}

/// Verifies a parcel.
pub(super) fn verify(
    output: &Output,
    media: &dyn Media,
    paths: &[PathBuf],
) -> Result<u8, CliError> {
    let parcel = open(media, paths)?;
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
    super::super::show(output, &document, || shown::verified(&document))?;
    Ok(u8::from(document.lost_cells > 0))
}
