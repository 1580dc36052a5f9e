//! `pvesm`: the storages of the stand-in, and their volumes.

use super::commands::{Done, ETC, io};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The end of the names of files behind block devices.
const BEHIND: &str = ".behind";
/// The size of an extent of LVM.
const EXTENT_BYTES: u64 = 4 << 20;

/// A storage of `storage.cfg`.
struct Storage {
    /// The folder of its volumes.
    folder: PathBuf,
    /// Whether they are block devices: loop devices over files beside their links.
    has_devices: bool,
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
        if let Some(group) = option("vgname ") {
            return Ok(Self {
                folder: Path::new("/dev").join(group),
                has_devices: true,
            });
        }
        let path = option("path ").ok_or_else(|| format!("storage '{id}' has no path"))?;
        Ok(Self {
            folder: Path::new(path).join("images"),
            has_devices: false,
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
            if Storage::find(split(volume)?.0)?.has_devices {
                free_device(volume, &path)?;
            }
            fs::remove_file(&path).map_err(io("remove the volume"))?;
            Ok(format!("Removed volume '{volume}'"))
        }
        _ => Err(format!("ERROR: unknown command 'pvesm {verb}'")),
    }
}

fn list(storage: &str, id: &str) -> Done<String> {
    let found = Storage::find(storage)?;
    let mut text = format!(
        "{:<30} {:<7} {:<7} {:>12} VMID",
        "Volid", "Format", "Type", "Size"
    );
    if found.has_devices {
        let head = format!("vm-{id}-");
        for entry in fs::read_dir(found.folder).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(&head) && !name.ends_with(BEHIND) {
                text += &format!("\n{storage}:{name:<20} raw     images  {:>12} {id}", 0);
            }
        }
        return Ok(text);
    }
    for entry in fs::read_dir(found.folder.join(id))
        .into_iter()
        .flatten()
        .flatten()
    {
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
    let found = Storage::find(storage)?;
    if found.has_devices {
        allocate_device(&found.folder.join(name), kib, format)?;
        return Ok(format!("successfully created '{storage}:{name}'"));
    }
    let folder = found.folder.join(id);
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

fn behind(path: &Path) -> PathBuf {
    let mut behind = path.to_owned().into_os_string();
    behind.push(BEHIND);
    behind.into()
}

/// Makes a block device with whole extents.
fn allocate_device(path: &Path, kib: &str, format: &str) -> Done {
    if format != "raw" {
        return Err(format!("unsupported format '{format}'"));
    }
    if fs::symlink_metadata(path).is_ok() {
        let name = path.file_name().unwrap_or_default().display();
        return Err(format!(
            "Logical Volume \"{name}\" already exists in volume group"
        ));
    }
    let kib: u64 = kib.parse().map_err(|_| "400 no size".to_owned())?;
    let bytes = (kib << 10).next_multiple_of(EXTENT_BYTES);
    let file = fs::File::create(behind(path)).map_err(io("make the volume"))?;
    file.set_len(bytes).map_err(io("make the volume"))?;
    let mut attach = Command::new("losetup");
    let attached = attach.args(["--find", "--show"]).arg(behind(path)).output();
    let attached = attached.map_err(io("start losetup"))?;
    if !attached.status.success() {
        return Err(String::from_utf8_lossy(&attached.stderr).into_owned());
    }
    let device = String::from_utf8_lossy(&attached.stdout).trim().to_owned();
    symlink(device, path).map_err(io("link the volume"))
}

/// Ends a block device that nothing uses.
fn free_device(volume: &str, path: &Path) -> Done {
    let device = fs::read_link(path).map_err(io("find the volume"))?;
    let processes = fs::read_dir("/proc").map_err(io("read /proc"))?;
    let mut files = processes.flatten().flat_map(|process| {
        let files = fs::read_dir(process.path().join("fd"));
        files.into_iter().flatten().flatten()
    });
    // As lvremove says.
    if files.any(|file| fs::read_link(file.path()).is_ok_and(|it| it == device)) {
        return Err(format!("lvremove '{volume}' error: Logical volume in use."));
    }
    let detached = Command::new("losetup")
        .arg("--detach")
        .arg(&device)
        .status();
    if !detached.map_err(io("start losetup"))?.success() {
        return Err(format!("cannot detach {}", device.display()));
    }
    fs::remove_file(behind(path)).map_err(io("remove the volume"))
}
