//! Images whose guest has moved away: they get another name, so that the guest is not started from them.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// What is added to the name of such an image.
const MOVED: &str = "moved";

/// What the image of a disk is called when its guest has moved away.
pub(crate) fn set_aside_as(image: &Path) -> PathBuf {
    let mut name = image.file_name().unwrap_or_default().to_owned();
    name.push(".");
    name.push(MOVED);
    image.with_file_name(name)
}

/// Gives the image of a disk that is elsewhere now another name, so that nobody starts from it.
pub(crate) fn set_aside(image: &Path) -> io::Result<()> {
    match fs::symlink_metadata(image) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(file) if file.is_file() => {
            fs::rename(image, set_aside_as(image))?;
            File::open(image.parent().unwrap_or(Path::new("/")))?.sync_all()
        }
        // A volume has the name that it has.
        Ok(_) => Ok(()),
    }
}
