//! `pvesm`: the storages of the stand-in, and their volumes.

use super::commands::{Done, ETC, io};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A storage of `storage.cfg`.
struct Storage {
    /// The folder of its volumes.
    folder: PathBuf,
}

impl Storage {
    fn find(id: &str) -> Done<Self> {
        let text = fs::read_to_string(Path::new(ETC).join("storage.cfg"));
        let text = text.map_err(io("read storage.cfg"))?;
        let mut lines = text.lines();
        lines
            .find(|line| line.split_once(": ").is_some_and(|(_, it)| it == id))
            .ok_or_else(|| format!("storage '{id}' does not exist"))?;
        let options: Vec<&str> = lines.map_while(|line| line.strip_prefix('\t')).collect();
        let option = |key: &str| options.iter().find_map(|option| option.strip_prefix(key));
        let path = option("path ").ok_or_else(|| format!("storage '{id}' has no path"))?;
        Ok(Self {
            folder: Path::new(path).join("images"),
        })
    }
}

fn split(volume: &str) -> Done<(&str, &str)> {
    let parts = volume.split_once(':');
    parts.ok_or_else(|| format!("unable to parse volume ID '{volume}'"))
}

/// Returns the path of a volume.
pub(super) fn path(volume: &str) -> Done<PathBuf> {
    let (storage, name) = split(volume)?;
    Ok(Storage::find(storage)?.folder.join(name))
}

/// Returns the format of a volume.
pub(super) fn format(volume: &str) -> &str {
    volume.rsplit_once('.').map_or("raw", |(_, ending)| ending)
}

/// Carries out `pvesm`, and returns what it prints.
pub(super) fn command(verb: &str, words: &[&str]) -> Done<String> {
    match (verb, words) {
        ("path", [volume]) => Ok(path(volume)?.display().to_string()),
        ("list", [storage, "--vmid", id]) => list(storage, id),
        ("alloc", [storage, id, name, kib, "--format", format]) => {
            allocate(storage, id, name, (kib, format))
        }
        ("free", [volume]) => {
            let path = path(volume)?;
            fs::remove_file(&path).map_err(io("remove the volume"))?;
            Ok(format!("Removed volume '{volume}'"))
        }
        _ => Err(format!("ERROR: unknown command 'pvesm {verb}'")),
    }
}

fn list(storage: &str, id: &str) -> Done<String> {
    let folder = Storage::find(storage)?.folder.join(id);
    let mut text = format!(
        "{:<30} {:<7} {:<7} {:>12} VMID",
        "Volid", "Format", "Type", "Size"
    );
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let volume = format!("{storage}:{id}/{name}");
        let format = format(&volume);
        if ["raw", "qcow2"].contains(&format) {
            let bytes = entry.metadata().map_err(io("look at a volume"))?.len();
            text += &format!("\n{volume:<30} {format:<7} images  {bytes:>12} {id}");
        }
    }
    Ok(text)
}

fn allocate(storage: &str, id: &str, name: &str, (kib, format): (&str, &str)) -> Done<String> {
    let folder = Storage::find(storage)?.folder.join(id);
    fs::create_dir_all(&folder).map_err(io("make the folder"))?;
    let path = folder.join(name);
    if path.exists() {
        return Err(format!("disk image '{}' already exists", path.display()));
    }
    let mut made = Command::new("qemu-img");
    made.args(["create", "-q", "-f", format]).arg(&path);
    let made = made.arg(format!("{kib}K")).status();
    match made.map_err(io("start qemu-img"))?.success() {
        true => Ok(format!("successfully created '{storage}:{id}/{name}'")),
        false => Err("unable to create image".to_owned()),
    }
}
