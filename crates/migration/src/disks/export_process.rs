//! Starts the supervisors of disk exports and waits until they answer.

use longhaul_hypervisor::helper::Helper;
use longhaul_storage::front::{Control, FrontFolder};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::task::block_in_place;
use tokio::time::{Instant, sleep};

/// Time limit for a new export to answer.
const START_WITHIN: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Starts the supervisor of an export's folder. The name must be unique among helpers.
pub(crate) async fn start(folder: &Path, log: &Path, name: &str) -> io::Result<Helper> {
    let program = own_program()?;
    let words = ["disk-front", "supervise"].map(str::to_owned);
    let mut words = Vec::from(words);
    words.push(folder.to_string_lossy().into_owned());
    Helper::start(&program, &words, None, log, name).await
}

/// Waits until the export's server runs.
pub(crate) async fn answers(folder: &Path, log: &Path) -> Result<(), String> {
    let deadline = Instant::now() + START_WITHIN;
    let control = Control::new(FrontFolder::open(folder));
    loop {
        let status = block_in_place(|| control.status());
        match status {
            Ok(status) if status.server_pid.is_some() => return Ok(()),
            Ok(_) | Err(_) if Instant::now() < deadline => sleep(LOOK_EVERY).await,
            Ok(_) => return Err("its disk export does not start".to_owned()),
            Err(error) => {
                let said = fs::read_to_string(log).unwrap_or_default();
                return Err(format!("{error}; {}", said.trim()));
            }
        }
    }
}

/// Returns the log file of the supervisor and server of an export's folder.
pub(crate) fn log(folder: &Path) -> PathBuf {
    let mut log = folder.as_os_str().to_owned();
    log.push(".log");
    PathBuf::from(log)
}

/// Returns a path of the running program that works even if its file was replaced or removed.
pub(crate) fn own_program() -> io::Result<PathBuf> {
    let named = std::env::current_exe()?;
    Ok(match named.exists() {
        true => named,
        false => PathBuf::from(format!("/proc/{}/exe", std::process::id())),
    })
}
