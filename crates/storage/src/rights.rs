//! Who may run each guest, as this host knows it: one small file a guest, replaced durably.

use longhaul_protocol::Generation;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Longest file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Where the right to run a guest is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Holder {
    /// This host.
    Here,
    /// Another host.
    Elsewhere {
        /// Its name here.
        host: String,
    },
    /// This host has released the guest and has not heard whether the other one runs it.
    InDoubt {
        /// The other host's name here.
        host: String,
    },
}

/// The right to run one guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Right {
    /// The guest's name.
    pub guest: String,
    /// How often the right has changed hands.
    pub generation: Generation,
    /// Who has it.
    pub holder: Holder,
}

/// A right that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RightsError {
    /// The file system refused.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The file does not hold a right.
    #[error("{} does not say who may run the guest: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// The folder of all rights.
#[derive(Debug, Clone)]
pub struct Rights {
    folder: PathBuf,
}

impl Rights {
    /// Uses a folder, and makes it where it is missing.
    pub fn open(folder: &Path) -> Result<Self, RightsError> {
        fs::create_dir_all(folder).map_err(error("make", folder))?;
        Ok(Self {
            folder: folder.to_owned(),
        })
    }

    /// What is known of a guest's right; none for a guest that never moved.
    pub fn get(&self, guest: &str) -> Result<Option<Right>, RightsError> {
        let path = self.path(guest);
        let text = match fs::metadata(&path) {
            Ok(metadata) if metadata.len() > FILE_BYTES_MAX => {
                let reason = "it is too long".to_owned();
                return Err(RightsError::Malformed { path, reason });
            }
            Ok(_) => fs::read_to_string(&path).map_err(error("read", &path))?,
            Err(missing) if missing.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(other) => return Err(error("read", &path)(other)),
        };
        let right: Right =
            serde_json::from_str(&text).map_err(|reason| RightsError::Malformed {
                path: path.clone(),
                reason: reason.to_string(),
            })?;
        Ok(Some(right))
    }

    /// Replaces what is known, durably.
    pub fn set(&self, right: &Right) -> Result<(), RightsError> {
        let path = self.path(&right.guest);
        let text = serde_json::to_vec_pretty(right).map_err(|reason| RightsError::Malformed {
            path: path.clone(),
            reason: reason.to_string(),
        })?;
        let new = path.with_extension("new");
        let mut file = File::create(&new).map_err(error("write", &new))?;
        file.write_all(&text).map_err(error("write", &new))?;
        file.sync_all().map_err(error("sync", &new))?;
        fs::rename(&new, &path).map_err(error("replace", &path))?;
        let folder = File::open(&self.folder).map_err(error("open", &self.folder))?;
        folder.sync_all().map_err(error("sync", &self.folder))
    }

    /// A guest's name may hold any character: it becomes hexadecimal where it is not plain.
    fn path(&self, guest: &str) -> PathBuf {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        let mut name = String::new();
        for byte in guest.bytes() {
            match plain(byte) {
                true => name.push(char::from(byte)),
                false => name.push_str(&format!("%{byte:02x}")),
            }
        }
        self.folder.join(format!("{name}.json"))
    }
}

fn error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RightsError + use<> {
    let path = path.to_owned();
    move |source| RightsError::Io { what, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_right_is_kept_and_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let rights = Rights::open(folder.path()).unwrap();
        assert_eq!(rights.get("web/7").unwrap(), None);
        let mut right = Right {
            guest: "web/7".into(),
            generation: Generation(1),
            holder: Holder::Here,
        };
        rights.set(&right).unwrap();
        right.holder = Holder::Elsewhere {
            host: "paris-2".into(),
        };
        rights.set(&right).unwrap();
        assert_eq!(rights.get("web/7").unwrap(), Some(right));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_damaged_right_is_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let rights = Rights::open(folder.path()).unwrap();
        fs::write(folder.path().join("web.json"), "{").unwrap();
        assert!(
            rights
                .get("web")
                .unwrap_err()
                .to_string()
                .contains("web.json")
        );
    }
}
