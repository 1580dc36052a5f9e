//! The incarnation of this host's journals, by which other agents recognise them.
//!
//! A source that has released a guest accepts the answer "unknown attempt" only from the journals
//! that it offered the attempt to. So an incarnation must be lost together with its journals. It is
//! stored in their folder with the folder's inode: a copy of the folder, or one restored from a
//! backup, may lack records and gets a new incarnation.

use crate::host::atomic_file;
use crate::host::start_error::StartError;
use longhaul_protocol::{INCARNATION_BYTES, Incarnation};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The file's name, in the folder of journals.
const FILE: &str = "incarnation";

/// Returns the incarnation of the journals in a folder, and creates one if there is none.
pub(crate) fn of(folder: &Path) -> Result<Incarnation, StartError> {
    read_or_create(folder).map_err(|error| {
        let path = folder.join(FILE);
        StartError::new(format!("cannot use {}: {error}", path.display()))
    })
}

fn read_or_create(folder: &Path) -> io::Result<Incarnation> {
    let path = folder.join(FILE);
    let inode = fs::metadata(folder)?.ino();
    match fs::read(&path) {
        Ok(bytes) => match parse(&bytes, inode) {
            Some(incarnation) => return Ok(incarnation),
            None => tracing::warn!(
                path = %path.display(),
                "these journals are a copy, or damaged: migrations in doubt at other hosts stay \
                 so, \
                 until an operator decides"
            ),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let mut bytes = [0; INCARNATION_BYTES];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    let incarnation = Incarnation(bytes);
    atomic_file::write(&path, format!("{incarnation} {inode}\n").as_bytes())?;
    Ok(incarnation)
}

/// Returns the incarnation in a file, if the file belongs to the folder with this inode.
fn parse(bytes: &[u8], inode: u64) -> Option<Incarnation> {
    let text = std::str::from_utf8(bytes).ok()?;
    let (incarnation, of) = text.trim_end().split_once(' ')?;
    let of: u64 = of.parse().ok()?;
    (of == inode).then(|| incarnation.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incarnation_stays_until_its_folder_is_lost() {
        let state = tempfile::tempdir().unwrap();
        let folder = state.path().join("journal");
        fs::create_dir(&folder).unwrap();
        let first = of(&folder).unwrap();
        assert_eq!(of(&folder).unwrap(), first);

        // The folder is moved away and a new one takes its place. Then it is moved back.
        let aside = state.path().join("aside");
        fs::rename(&folder, &aside).unwrap();
        fs::create_dir(&folder).unwrap();
        let second = of(&folder).unwrap();
        assert_ne!(second, first);
        assert_eq!(of(&aside).unwrap(), first);

        // The file is restored from a backup.
        let text = fs::read(aside.join(FILE)).unwrap();
        fs::write(folder.join(FILE), text).unwrap();
        assert_ne!(of(&folder).unwrap(), first);
    }

    #[test]
    fn what_is_no_incarnation_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        for text in [
            "",
            "x",
            "0011 7",
            "00112233445566778899aabbccddeeff",
            "\u{fe}",
        ] {
            fs::write(folder.path().join(FILE), text).unwrap();
            let made = of(folder.path()).unwrap();
            assert_eq!(of(folder.path()).unwrap(), made, "{text:?}");
        }
    }
}
