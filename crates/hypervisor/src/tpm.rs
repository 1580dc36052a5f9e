//! The emulated TPM of a guest: a `swtpm` beside its QEMU, which talks to it over a socket. QEMU
//! carries the TPM's state in its stream, from the source's `swtpm` to the destination's.
//!
//! ```text
//! STATE/tpms/NAME/state     the state of the guest's TPM, which outlives its QEMU
//!                 before    the one that was here before the guest arrived last
//! ```
//!
//! The state of a guest that arrives is marked with its generation. An agent may end at any point:
//! only a state with that mark is removed when the guest does not come.

use crate::folder::{GuestFolder, log_tail, make_passable};
use crate::guest::{process_with_argument, unique};
use crate::hardware::tables::{Model, Serves};
use crate::helper::Helper;
use crate::launch::Role;
use crate::process::{Account, Process, let_through};
use longhaul_protocol::guest::GuestDescription;
use nix::unistd::chown;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// The emulator of TPMs.
pub const PROGRAM: &str = "swtpm";
/// The setting with the version of the TPM.
pub(crate) const VERSION: &str = "tpm.version";
/// The versions.
pub(crate) const VERSIONS: [&str; 2] = ["1.2", "2.0"];

/// The time limit for the emulator's socket to appear.
const START_TIMEOUT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(10);

/// The record of the TPM of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tpm {
    /// Whether the guest arrives, so that the state is another host's until it runs here.
    pub arrives: bool,
    /// The emulator; `None` while it is being started.
    #[serde(default)]
    pub helper: Option<Helper>,
}

/// Returns whether a guest has a TPM.
pub(crate) fn has_one(description: &GuestDescription) -> bool {
    let mut devices = description.hardware.iter().flat_map(|it| &it.devices);
    devices.any(|device| Model::of(&device.model).is_some_and(|it| it.serves == Serves::Tpm))
}

/// Returns the emulator of this host, if it is installed.
pub(crate) fn program() -> Option<PathBuf> {
    let folders = ["/usr/local/bin", "/usr/bin", "/bin"].iter();
    let mut files = folders.map(|folder| Path::new(folder).join(PROGRAM));
    files.find(|file| file.is_file())
}

/// Returns the socket between QEMU and the emulator.
pub(crate) fn socket(folder: &GuestFolder) -> PathBuf {
    folder.run().join("tpm")
}

fn log(folder: &GuestFolder) -> PathBuf {
    folder.path().join("tpm.log")
}

/// The folders of the state of a guest's TPM.
struct States {
    /// That of all of them.
    all: PathBuf,
    /// That in use.
    now: PathBuf,
    /// That from before the guest arrived.
    before: PathBuf,
    /// One that is being made for a guest that arrives.
    new: PathBuf,
}

impl States {
    fn of(folder: &GuestFolder) -> Self {
        let all = folder.state().join("tpms").join(folder.name());
        Self {
            now: all.join("state"),
            before: all.join("before"),
            new: all.join("new"),
            all,
        }
    }
}

/// The file in a state that shows for which arrival it was made.
fn mark(generation: u64) -> String {
    format!("arrival-{generation}")
}

fn control(folder: &GuestFolder) -> String {
    format!("type=unixio,path={},mode=0600", socket(folder).display())
}

/// Makes the place of the state. That of a guest that arrives is empty.
pub(crate) fn prepare(
    folder: &GuestFolder,
    (role, generation): (Role, u64),
    account: Option<&Account>,
) -> io::Result<()> {
    let States {
        all,
        now,
        before,
        new,
    } = States::of(folder);
    make_passable(&folder.state().join("tpms"), true)?;
    make_passable(&all, true)?;
    if role == Role::Destination || !now.exists() {
        remove(&new)?;
        DirBuilder::new().mode(0o700).create(&new)?;
        if role == Role::Destination {
            File::create(new.join(mark(generation)))?;
        }
        if let Some(account) = account {
            chown(&new, Some(account.uid), Some(account.gid))?;
        }
        if now.exists() {
            remove(&before)?;
            fs::rename(&now, &before)?;
        }
        fs::rename(&new, &now)?;
    }
    match account {
        Some(_) => let_through(&folder.state()),
        None => Ok(()),
    }
}

/// Starts the emulator, and waits until QEMU can connect. It ends when QEMU does.
pub(crate) async fn start(
    folder: &GuestFolder,
    description: &GuestDescription,
    account: Option<&Account>,
) -> io::Result<Helper> {
    let program = program().ok_or_else(|| io::Error::other(missing()))?;
    let state = States::of(folder).now.display().to_string();
    if state.contains(',') {
        let text = format!("{state} has a comma in it, which {PROGRAM} cannot take");
        return Err(io::Error::other(text));
    }
    let mut arguments = vec!["socket".to_owned()];
    let settings = description.hardware.as_ref().map(|it| &it.settings);
    let version = settings.and_then(|settings| settings.get(VERSION));
    if version.is_none_or(|version| version != VERSIONS[0]) {
        arguments.push("--tpm2".to_owned());
    }
    let state = format!("dir={state},mode=0600");
    let control = control(folder);
    for word in ["--tpmstate", &state, "--ctrl", &control, "--terminate"] {
        arguments.push(word.to_owned());
    }
    let log = log(folder);
    let name = format!("{}-tpm-{:08x}", folder.name(), unique(folder));
    let helper = Helper::start(&program, &arguments, account, &log, &name).await?;
    let deadline = Instant::now() + START_TIMEOUT;
    while !socket(folder).exists() {
        if !helper.is_alive()? || Instant::now() > deadline {
            helper.ended().await?;
            let text = format!("{PROGRAM} does not start; its log: {}", log_tail(&log));
            return Err(io::Error::other(text));
        }
        sleep(POLL).await;
    }
    Ok(helper)
}

/// Returns why a guest with a TPM cannot be here.
pub(crate) fn missing() -> String {
    format!("this host has no {PROGRAM}, which emulates TPMs")
}

/// Ends what is there of the TPM of a guest whose QEMU has ended. Where the guest has not run here
/// since its arrival in this generation, its state is removed, and the one from before is back.
pub(crate) async fn end(folder: &GuestFolder, tpm: &Tpm, generation: u64) -> io::Result<()> {
    match &tpm.helper {
        Some(helper) => helper.ended().await?,
        // An agent has ended while it started it.
        None => {
            if let Some(id) = process_with_argument(&control(folder))?
                && let Some(process) = Process::open(&id)?
            {
                process.kill()?;
                process.ended().await?;
            }
        }
    }
    if !tpm.arrives {
        return Ok(());
    }
    let States {
        all,
        now,
        before,
        new,
    } = States::of(folder);
    if now.join(mark(generation)).exists() {
        remove(&now)?;
    }
    if !now.exists() && before.exists() {
        fs::rename(&before, &now)?;
    }
    match now.exists() {
        true => remove(&new),
        false => remove(&all),
    }
}

/// Removes what is here of the TPM of a guest that has left for another host: its secrets are not
/// to stay behind.
pub(crate) fn forget(folder: &GuestFolder) -> io::Result<()> {
    remove(&States::of(folder).all)
}

fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_was_here_is_back_if_the_guest_does_not_come() {
        let root = tempfile::tempdir().unwrap();
        let folder = GuestFolder::new(root.path(), "web").unwrap();
        let States {
            all,
            now,
            before,
            new,
        } = States::of(&folder);
        let file = now.join("tpm2-00.permall");
        let write = |text: &str| fs::write(&file, text).unwrap();
        let read = || fs::read_to_string(&file).unwrap();
        let record = |arrives| Tpm {
            arrives,
            helper: None,
        };
        prepare(&folder, (Role::Fresh, 1), None).unwrap();
        write("first");
        prepare(&folder, (Role::Fresh, 1), None).unwrap();
        assert_eq!(read(), "first");
        // An agent that ends before anything was put aside.
        end(&folder, &record(true), 2).await.unwrap();
        assert_eq!(read(), "first");
        prepare(&folder, (Role::Destination, 2), None).unwrap();
        assert!(!file.exists());
        write("second");
        for _ in 0..2 {
            end(&folder, &record(true), 2).await.unwrap();
            assert_eq!(read(), "first");
            assert!(!before.exists() && !new.exists());
        }
        // It ends between the two renames.
        fs::rename(&now, &before).unwrap();
        fs::create_dir(&new).unwrap();
        end(&folder, &record(true), 2).await.unwrap();
        assert_eq!(read(), "first");
        assert!(!new.exists());
        // The guest runs here, and another attempt of a later move fails.
        prepare(&folder, (Role::Destination, 2), None).unwrap();
        write("third");
        end(&folder, &record(false), 3).await.unwrap();
        assert!(before.exists());
        end(&folder, &record(true), 4).await.unwrap();
        assert_eq!(read(), "third");
        forget(&folder).unwrap();
        assert!(!all.exists());
        // Where nothing was before, nothing is left.
        prepare(&folder, (Role::Destination, 5), None).unwrap();
        end(&folder, &record(true), 5).await.unwrap();
        assert!(!all.exists());
    }
}
