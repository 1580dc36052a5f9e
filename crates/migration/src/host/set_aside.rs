//! Images whose guest has moved away. They are renamed, so that the guest is not started from them.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// The suffix of such an image's name.
const MOVED: &str = "moved";

/// Returns the path of a disk's image after its guest has moved away.
pub fn set_aside_as(image: &Path) -> PathBuf {
    let mut name = image.file_name().unwrap_or_default().to_owned();
    name.push(".");
    name.push(MOVED);
    image.with_file_name(name)
}

/// Renames the image of a disk that has moved away, so that no guest starts from it.
pub(crate) fn set_aside(image: &Path) -> io::Result<()> {
    // If the path is a link, the link is renamed.
    match fs::metadata(image) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(file) if file.is_file() => {
            fs::rename(image, set_aside_as(image))?;
            File::open(image.parent().unwrap_or(Path::new("/")))?.sync_all()
        }
        // A volume is not renamed.
        Ok(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn an_image_loses_its_name_also_if_that_is_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (image, link) = (
            folder.path().join("of.db-1"),
            folder.path().join("disk.raw"),
        );
        fs::write(&image, b"content").unwrap();
        symlink(&image, &link).unwrap();
        set_aside(&link).unwrap();
        assert!(fs::symlink_metadata(&link).is_err());
        assert_eq!(fs::read(set_aside_as(&link)).unwrap(), b"content");
        set_aside(&image).unwrap();
        assert!(!image.exists());
        // A missing file and a folder are ignored.
        set_aside(&image).unwrap();
        set_aside(folder.path()).unwrap();
        assert!(folder.path().exists());
    }
}
