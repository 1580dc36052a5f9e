//! Checks before a migration whether this agent may write to the folders of guests' disks. The
//! sandbox of its systemd unit may forbid it.

use crate::host::config::Config;
use longhaul_api::NotWritable;
use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Folders that a unit can hide, with the setting that hides them.
const HIDDEN: [(&str, &str); 5] = [
    ("/home", "ProtectHome="),
    ("/root", "ProtectHome="),
    ("/run/user", "ProtectHome="),
    ("/tmp", "PrivateTmp="),
    ("/var/tmp", "PrivateTmp="),
];

/// Returns every folder and volume of the configured images that the agent may not write to.
pub fn refused(config: &Config) -> Vec<NotWritable> {
    let images = config.hypervisor.images.values();
    // A file that other hosts have too does not move.
    let may_move = images.filter(|image| image.same_file_as.is_none());
    let found = may_move.filter_map(|image| check(&image.path).err());
    let found = found.map(|refused| (refused.path.clone(), refused));
    found.collect::<BTreeMap<_, _>>().into_values().collect()
}

/// Checks that the agent may write and rename a disk's image, or create it if it does not exist.
pub(crate) fn check(image: &Path) -> Result<(), NotWritable> {
    let folder = image.parent().unwrap_or(Path::new("/"));
    match fs::metadata(image) {
        Ok(found) if found.file_type().is_block_device() => return check_volume(image),
        Ok(found) if found.is_file() => check_access(image, folder)?,
        Ok(_) | Err(_) => {}
    }
    check_access(folder, folder)
}

fn check_access(path: &Path, folder: &Path) -> Result<(), NotWritable> {
    match access(path, AccessFlags::W_OK) {
        Ok(()) => Ok(()),
        Err(error) => Err(not_writable(path, folder, error)),
    }
}

/// Checks that the agent may open a volume: a cgroup's device list only applies on open. Opening
/// for reading is enough. Unlike closing after writing, it does not make udev probe the volume
/// again.
fn check_volume(path: &Path) -> Result<(), NotWritable> {
    let mut options = OpenOptions::new();
    let options = options.read(true).custom_flags(nix::libc::O_NONBLOCK);
    match options.open(path) {
        Ok(_) => Ok(()),
        Err(error) => {
            let error = Errno::from_raw(error.raw_os_error().unwrap_or_default());
            Err(not_writable(path, path, error))
        }
    }
}

fn not_writable(path: &Path, folder: &Path, error: Errno) -> NotWritable {
    let (shown, where_it_is) = (path.display(), folder.display());
    let hidden = HIDDEN.iter().find(|(place, _)| folder.starts_with(place));
    let edit = "systemctl edit longhaul-agent";
    let hint = match (error, hidden) {
        (Errno::EROFS, _) => format!(
            "add ReadWritePaths={where_it_is} to the [Service] section of the agent's unit \
             ({edit}), and restart the agent; or the file system is mounted read-only"
        ),
        (Errno::EPERM, _) => format!(
            "add DeviceAllow={shown} rw to the [Service] section of the agent's unit ({edit}), \
             and restart the agent"
        ),
        (Errno::ENOENT, Some((_, setting))) => format!(
            "create the folder, or add BindPaths={where_it_is} to the [Service] section of the \
             agent's unit ({edit}): {setting} hides it"
        ),
        (Errno::ENOENT, None) => "create the folder, or correct the image's path".to_owned(),
        _ => "the agent's user needs write permission there".to_owned(),
    };
    NotWritable {
        path: folder.display().to_string(),
        text: format!("the agent may not write in {shown}: {}", error.desc()),
        hint,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::mount::{MsFlags, mount};
    use nix::sched::{CloneFlags, unshare};

    /// Makes a folder read-only for this thread alone.
    fn make_read_only(folder: &Path) -> nix::Result<()> {
        let none = None::<&Path>;
        unshare(CloneFlags::CLONE_NEWNS)?;
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(none, Path::new("/"), none, private, none)?;
        mount(Some(folder), folder, none, MsFlags::MS_BIND, none)?;
        let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(none, folder, none, read_only, none)
    }

    #[test]
    fn a_folder_that_the_unit_makes_read_only_is_named_with_the_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("web-7.raw");
        let absent = folder.path().join("db-1.raw");
        fs::write(&image, b"content").unwrap();
        check(&image).unwrap();
        check(&absent).unwrap();
        let refused = std::thread::scope(|scope| {
            let seen = scope.spawn(|| {
                make_read_only(folder.path())?;
                Ok::<_, Errno>((check(&image), check(&absent)))
            });
            seen.join().unwrap()
        });
        let (of_image, of_absent) = match refused {
            Ok(refused) => refused,
            Err(error) => return eprintln!("skipped: no mount namespace here: {error}"),
        };
        let expected = format!("ReadWritePaths={}", folder.path().display());
        for refused in [of_image.unwrap_err(), of_absent.unwrap_err()] {
            assert!(refused.hint.contains(&expected), "{refused:?}");
            assert!(refused.text.contains("Read-only"), "{refused:?}");
            assert_eq!(refused.path, folder.path().display().to_string());
        }
        check(&image).unwrap();
    }

    #[test]
    fn each_error_has_its_remedy() {
        let hint = |path: &str, error| {
            let path = Path::new(path);
            not_writable(path, path, error).hint
        };
        assert!(hint("/dev/vg/web", Errno::EPERM).contains("DeviceAllow=/dev/vg/web rw"));
        assert!(hint("/root/guests", Errno::ENOENT).contains("BindPaths=/root/guests"));
        assert!(hint("/srv/guests", Errno::ENOENT).contains("create the folder"));
        assert!(hint("/srv/guests", Errno::EACCES).contains("permission"));
    }
}
