//! Manages a guest's folder on this host: its description, the record that identifies its QEMU, and
//! its sockets.
//!
//! ```text
//! STATE/guests/NAME/description.toml   the description that was launched
//!                   record.toml        the QEMU that runs it
//!                   settings.json      QEMU's migration settings before a move
//!                   stopped            exists while a move has stopped the guest
//!                   sent-by            the host that sent the guest, if it came by a migration
//!                   qemu.log           QEMU's output
//!                   tpm.log            the output of the emulator of its TPM, if it has one
//!                   run/               sockets; belongs to QEMU's user
//! ```

use crate::process::{Account, ProcessId, let_through};
use crate::scope::Scope;
use crate::tpm::Tpm;
use longhaul_protocol::HostId;
use longhaul_protocol::guest::GuestDescription;
use nix::unistd::chown;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The maximum length of a unix socket's path, in bytes.
const SOCKET_PATH_BYTES_MAX: usize = 107;
/// The maximum size of a description or record that is read, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// The number of bytes at the end of QEMU's log that are read for display.
const LOG_TAIL_BYTES: u64 = 2048;

/// The file that identifies the guest's QEMU.
const RECORD: &str = "record.toml";
/// The file that names the host that sent the guest.
const SENT_BY: &str = "sent-by";

/// Paths of a guest's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestFolder {
    path: PathBuf,
}

/// The record of the QEMU that runs a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Generation of the right to run at the time of writing.
    pub generation: u64,
    /// Label of the emulator.
    pub emulator: String,
    /// TAP devices created for the guest.
    #[serde(default)]
    pub taps: Vec<String>,
    /// The process; `None` while it is being started.
    #[serde(default)]
    pub process: Option<ProcessId>,
    /// The scope of the process.
    #[serde(default)]
    pub scope: Scope,
    /// The control socket of a QEMU that another program started.
    #[serde(default)]
    pub attached: Option<PathBuf>,
    /// The emulated TPM, if it has one that was started for it.
    #[serde(default)]
    pub tpm: Option<Tpm>,
}

/// Why a socket cannot exist: its path is longer than Linux allows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the socket {} would have a path of {} bytes and Linux allows {SOCKET_PATH_BYTES_MAX}: choose \
     a shorter `state` folder in the agent's configuration, or shorter names in the guest's \
     description",
    .0.display(), .0.as_os_str().len()
)]
pub struct PathTooLong(pub PathBuf);

impl GuestFolder {
    /// Returns the folder of the guest with that (checked) name.
    pub fn new(state: &Path, name: &str) -> Result<Self, PathTooLong> {
        let folder = Self {
            path: guests(state).join(name),
        };
        // The longest path of those that every guest has.
        folder.socket("incoming")?;
        Ok(folder)
    }

    /// Returns the folders of all guests under a state folder.
    pub fn all(state: &Path) -> io::Result<Vec<Self>> {
        let entries = match fs::read_dir(guests(state)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        let mut folders = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(Self { path });
            }
        }
        folders.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(folders)
    }

    /// Returns the folder itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the guest's name, which is the folder's.
    pub fn name(&self) -> String {
        let name = self.path.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    /// Returns the agent's state folder, which it is in.
    pub(crate) fn state(&self) -> PathBuf {
        let state = self.path.parent().and_then(Path::parent);
        state.unwrap_or(Path::new("/")).to_owned()
    }

    /// Returns the folder of the sockets.
    pub fn run(&self) -> PathBuf {
        self.path.join("run")
    }

    /// QEMU's control socket.
    pub fn qmp(&self) -> PathBuf {
        self.run().join("qmp")
    }

    /// Returns whether a control socket is one of a guest's folder, of whatever agent.
    pub(crate) fn is_of_an_agent(socket: &Path) -> bool {
        let run = socket.parent().filter(|_| socket.ends_with("run/qmp"));
        let folder = run.and_then(Path::parent);
        folder.is_some_and(|folder| folder.join(RECORD).exists())
    }

    /// Returns the host's end of one of the guest's channels.
    pub fn channel(&self, name: &str) -> PathBuf {
        self.run().join(format!("channel-{name}"))
    }

    /// Records the host that sent the guest.
    pub(crate) fn note_sender(&self, sender: HostId) -> io::Result<()> {
        fs::write(self.path.join(SENT_BY), format!("{sender}\n"))
    }

    /// Returns the host that sent the guest, if that is known.
    pub(crate) fn sender(&self) -> Option<HostId> {
        let text = fs::read_to_string(self.path.join(SENT_BY)).ok()?;
        text.trim().parse().ok()
    }

    /// Returns the path of QEMU's migration settings from before a move changed them.
    pub(crate) fn settings(&self) -> PathBuf {
        self.path.join("settings.json")
    }

    /// Records that a move is about to stop the guest. It need not survive the host: neither does
    /// the guest.
    pub(crate) fn note_stop(&self) -> io::Result<()> {
        File::create(self.stop_mark()).map(drop)
    }

    /// Records that no move has stopped the guest.
    pub(crate) fn forget_stop(&self) -> io::Result<()> {
        match fs::remove_file(self.stop_mark()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Returns whether a move may have stopped the guest.
    pub(crate) fn is_stop_noted(&self) -> bool {
        self.stop_mark().exists()
    }

    fn stop_mark(&self) -> PathBuf {
        self.path.join("stopped")
    }

    /// Returns the log of QEMU's standard output and error.
    pub fn log(&self) -> PathBuf {
        self.path.join("qemu.log")
    }

    /// Returns a path in the run folder that is short enough for a socket.
    pub fn socket(&self, name: &str) -> Result<PathBuf, PathTooLong> {
        let path = self.run().join(name);
        if path.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
            return Err(PathTooLong(path));
        }
        Ok(path)
    }

    /// Creates the folder, with an empty run folder that belongs to QEMU's user.
    ///
    /// Where that user is not this process's, the state folder is made passable as well.
    ///
    /// Fails with [`io::ErrorKind::AlreadyExists`] where the guest has a folder already.
    pub(crate) fn create(&self, account: Option<&Account>) -> io::Result<()> {
        let parent = self.path.parent().unwrap_or(Path::new("/"));
        make_passable(parent, true)?;
        make_passable(&self.path, false)?;
        let run = self.run();
        DirBuilder::new().mode(0o700).create(&run)?;
        if let Some(account) = account {
            chown(&run, Some(account.uid), Some(account.gid))?;
            let_through(&self.state())?;
        }
        sync(parent)
    }

    /// Removes the folder with everything in it.
    pub(crate) fn remove(&self) -> io::Result<()> {
        match fs::remove_dir_all(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other?,
        }
        sync(self.path.parent().unwrap_or(Path::new("/")))
    }

    /// Returns the guest's description.
    pub fn description(&self) -> io::Result<GuestDescription> {
        read_toml(&self.path.join("description.toml"))
    }

    /// Returns the record of the QEMU that runs the guest.
    pub fn record(&self) -> io::Result<Record> {
        read_toml(&self.path.join(RECORD))
    }

    pub(crate) fn write_description(&self, description: &GuestDescription) -> io::Result<()> {
        write_toml(&self.path.join("description.toml"), description)
    }

    pub(crate) fn write_record(&self, record: &Record) -> io::Result<()> {
        write_toml(&self.path.join(RECORD), record)
    }

    /// Returns the log, opened for appending.
    pub(crate) fn open_log(&self) -> io::Result<File> {
        OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(self.log())
    }

    /// Returns the end of the log, for display.
    pub fn log_tail(&self) -> String {
        log_tail(&self.log())
    }
}

/// Returns the end of a QEMU's log, for display.
pub(crate) fn log_tail(log: &Path) -> String {
    let read = || -> io::Result<String> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(LOG_TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    };
    match read() {
        Ok(text) if text.is_empty() => "(its log is empty)".to_owned(),
        Ok(text) => text,
        Err(error) => format!("(its log cannot be read: {error})"),
    }
}

fn guests(state: &Path) -> PathBuf {
    state.join("guests")
}

/// Creates a folder that other users may pass through, to paths that they know.
pub(crate) fn make_passable(path: &Path, with_parents: bool) -> io::Result<()> {
    DirBuilder::new().recursive(with_parents).create(path)?;
    // Independent of this process's umask.
    fs::set_permissions(path, Permissions::from_mode(0o711))
}

fn read_toml<T: DeserializeOwned>(path: &Path) -> io::Result<T> {
    let mut text = String::new();
    File::open(path)?
        .take(FILE_BYTES_MAX)
        .read_to_string(&mut text)?;
    toml::from_str(&text).map_err(|error| {
        let text = format!("{}: {error}", path.display());
        io::Error::new(io::ErrorKind::InvalidData, text)
    })
}

/// Writes a file atomically: after a crash either the old file or the new one exists.
fn write_toml<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    let text = toml::to_string(value).map_err(io::Error::other)?;
    let new = path.with_extension("new");
    let mut file = OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    sync(path.parent().unwrap_or(Path::new("/")))
}

fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::description::tests::sample;

    #[test]
    fn what_is_written_is_read_again() {
        let state = tempfile::tempdir().unwrap();
        let folder = GuestFolder::new(state.path(), "web-7").unwrap();
        folder.create(None).unwrap();
        let again = folder.create(None).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
        let record = Record {
            generation: 3,
            emulator: "10.0".to_owned(),
            taps: vec!["lh0".to_owned()],
            process: ProcessId::of(std::process::id() as i32).unwrap(),
            scope: Scope::Unit("longhaul-web-7.service".to_owned()),
            attached: None,
            tpm: None,
        };
        folder.write_record(&record).unwrap();
        folder.write_description(&sample()).unwrap();
        assert_eq!(
            GuestFolder::all(state.path()).unwrap().as_slice(),
            std::slice::from_ref(&folder)
        );
        assert_eq!(folder.record().unwrap(), record);
        assert_eq!(folder.description().unwrap(), sample());
        folder.remove().unwrap();
        folder.remove().unwrap();
        assert!(GuestFolder::all(state.path()).unwrap().is_empty());
    }

    #[test]
    fn a_path_too_long_for_a_socket_is_refused() {
        let state = PathBuf::from(format!("/{}", "s".repeat(80)));
        assert!(GuestFolder::new(&state, "a").is_ok());
        let error = GuestFolder::new(&state, "a-guest-of-a-long-name").unwrap_err();
        assert!(
            error.to_string().contains("shorter `state` folder"),
            "{error}"
        );
    }

    #[test]
    fn a_damaged_record_is_named() {
        let state = tempfile::tempdir().unwrap();
        let folder = GuestFolder::new(state.path(), "a").unwrap();
        folder.create(None).unwrap();
        fs::write(folder.path().join("record.toml"), "generation = 'x'").unwrap();
        let error = folder.record().unwrap_err();
        assert!(error.to_string().contains("record.toml"), "{error}");
    }
}
