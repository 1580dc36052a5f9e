//! The right to run each guest, as this host knows it: one small file per guest, replaced durably.
//!
//! Generations only grow. The one exception is [`Rights::give_back`], for a generation that never
//! ran the guest, which names the right that it expects to find.

use crate::files::{Access, Files, RealFiles, create_folder, read_whole};
use longhaul_protocol::Generation;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
        /// Its name in this host's configuration.
        host: String,
    },
    /// This host has released the guest and does not know whether the other one runs it.
    InDoubt {
        /// The other host's name in this host's configuration.
        host: String,
    },
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Here => f.write_str("this host"),
            Self::Elsewhere { host } => f.write_str(host),
            Self::InDoubt { host } => write!(f, "in doubt, with {host}"),
        }
    }
}

/// The right to run one guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Right {
    /// The guest's name.
    pub guest: String,
    /// How often the right has changed hosts.
    pub generation: Generation,
    /// The host that has it.
    pub holder: Holder,
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "generation {} ({})", self.generation.0, self.holder)
    }
}

/// A right that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RightsError {
    /// The file system refused.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The file does not hold a right.
    #[error("{} does not say who may run the guest: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The fault.
        reason: String,
    },
    /// A later generation is recorded on this host.
    #[error(
        "{} is known here in {stored}: {refused} is out of date, and was not noted", refused.guest
    )]
    Older {
        /// The recorded right.
        stored: Box<Right>,
        /// The right that was to be recorded.
        refused: Box<Right>,
    },
    /// Another right is recorded than the one to be undone.
    #[error(
        "{} is known here in {stored}, not in {expected}: it was not given back", stored.guest
    )]
    NotGivenBack {
        /// The recorded right.
        stored: Box<Right>,
        /// The expected right.
        expected: Box<Right>,
    },
}

/// The folder of all rights.
#[derive(Debug, Clone)]
pub struct Rights {
    files: Arc<dyn Files>,
    folder: PathBuf,
    /// Whether the names in the folder are durable; locked while the folder is used.
    settled: Arc<Mutex<bool>>,
}

impl Rights {
    /// Opens a folder, and creates it where it is missing.
    pub fn open(folder: &Path) -> Result<Self, RightsError> {
        Self::open_in(Arc::new(RealFiles), folder)
    }

    /// Opens a folder in a given file system.
    pub fn open_in(files: Arc<dyn Files>, folder: &Path) -> Result<Self, RightsError> {
        create_folder(&*files, folder).map_err(error("make", folder))?;
        Ok(Self {
            files,
            folder: folder.to_owned(),
            settled: Arc::default(),
        })
    }

    /// Returns the recorded right of a guest; `None` for a guest that never moved. It is durable
    /// when this returns.
    pub fn get(&self, guest: &str) -> Result<Option<Right>, RightsError> {
        self.load(guest, &mut self.lock())
    }

    /// Replaces the recorded right, durably. A generation older than the recorded one is refused.
    pub fn set(&self, right: &Right) -> Result<(), RightsError> {
        let mut settled = self.lock();
        match self.load(&right.guest, &mut settled)? {
            Some(stored) if stored.generation > right.generation => Err(RightsError::Older {
                stored: Box::new(stored),
                refused: Box::new(right.clone()),
            }),
            Some(_) | None => self.replace(right, &mut settled),
        }
    }

    /// Goes back to an older generation, durably, from one that never ran the guest. If another
    /// right is recorded than the expected one, it must not be newer than the restored one.
    pub fn give_back(&self, expected: &Right, right: &Right) -> Result<(), RightsError> {
        let mut settled = self.lock();
        match self.load(&right.guest, &mut settled)? {
            Some(stored) if stored != *expected && stored.generation > right.generation => {
                Err(RightsError::NotGivenBack {
                    stored: Box::new(stored),
                    expected: Box::new(expected.clone()),
                })
            }
            Some(_) | None => self.replace(right, &mut settled),
        }
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.settled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn load(&self, guest: &str, settled: &mut bool) -> Result<Option<Right>, RightsError> {
        if !*settled {
            // An agent may have been killed, or failed, between a rename and its sync: a readable
            // file need not survive a power cut.
            self.files
                .sync_folder(&self.folder, "the rights that were found")
                .map_err(error("sync", &self.folder))?;
            *settled = true;
        }
        let path = self.path(guest);
        let file = match self.files.open(&path, Access::Read) {
            Ok(file) => file,
            Err(missing) if missing.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(other) => return Err(error("open", &path)(other)),
        };
        let malformed = |reason: String| RightsError::Malformed {
            path: path.clone(),
            reason,
        };
        let bytes = read_whole(&*file, FILE_BYTES_MAX).map_err(error("read", &path))?;
        let bytes = bytes.ok_or_else(|| malformed("it is too long".to_owned()))?;
        let right: Right =
            serde_json::from_slice(&bytes).map_err(|reason| malformed(reason.to_string()))?;
        if right.guest != guest {
            return Err(malformed(format!("it is about {}", right.guest)));
        }
        Ok(Some(right))
    }

    fn replace(&self, right: &Right, settled: &mut bool) -> Result<(), RightsError> {
        let path = self.path(&right.guest);
        let text = serde_json::to_vec_pretty(right).map_err(|reason| RightsError::Malformed {
            path: path.clone(),
            reason: reason.to_string(),
        })?;
        let new = path.with_extension("new");
        let file = self.files.open(&new, Access::Create);
        let file = file.map_err(error("make", &new))?;
        file.set_length(0).map_err(error("write", &new))?;
        file.write_at(0, &text).map_err(error("write", &new))?;
        file.sync("the right").map_err(error("sync", &new))?;
        *settled = false;
        let renamed = self.files.rename(&new, &path);
        renamed.map_err(error("replace", &path))?;
        self.files
            .sync_folder(&self.folder, "the right's name")
            .map_err(error("sync", &self.folder))?;
        *settled = true;
        Ok(())
    }

    /// Returns the path of a guest's file. A guest's name may hold any character: other than plain
    /// ones become hexadecimal.
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
    use std::fs;

    fn right(generation: u64, holder: Holder) -> Right {
        Right {
            guest: "web".into(),
            generation: Generation(generation),
            holder,
        }
    }

    fn in_doubt() -> Holder {
        Holder::InDoubt {
            host: "paris-2".into(),
        }
    }

    #[test]
    fn generations_only_grow() {
        let folder = tempfile::tempdir().unwrap();
        let rights = Rights::open(folder.path()).unwrap();
        let stored = right(4, Holder::Here);
        rights.set(&stored).unwrap();
        let error = rights.set(&right(3, in_doubt())).unwrap_err();
        assert!(matches!(error, RightsError::Older { .. }));
        assert_eq!(
            error.to_string(),
            "web is known here in generation 4 (this host): generation 3 (in doubt, with paris-2) \
             is out of date, and was not noted"
        );
        assert_eq!(rights.get("web").unwrap(), Some(stored));
        rights.set(&right(4, in_doubt())).unwrap();
        assert_eq!(rights.get("web").unwrap(), Some(right(4, in_doubt())));
    }

    #[test]
    fn a_generation_is_given_back_only_as_it_is_expected() {
        let folder = tempfile::tempdir().unwrap();
        let rights = Rights::open(folder.path()).unwrap();
        let (before, after) = (right(3, Holder::Here), right(4, in_doubt()));
        let give_back = || rights.give_back(&after, &before);
        // Possibly nothing was recorded, or the right was already given back.
        give_back().unwrap();
        give_back().unwrap();
        rights.set(&after).unwrap();
        give_back().unwrap();
        assert_eq!(rights.get("web").unwrap(), Some(before.clone()));
        let since = right(4, Holder::Here);
        rights.set(&since).unwrap();
        let error = give_back().unwrap_err();
        assert!(matches!(error, RightsError::NotGivenBack { .. }), "{error}");
        assert_eq!(rights.get("web").unwrap(), Some(since));
    }

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
