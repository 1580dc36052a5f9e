//! The page servers of guests whose memory follows: processes that hold the sockets of their QEMUs,
//! and outlive the agent.
//!
//! ```text
//! STATE/following/GUEST.pages       the socket of the guest's page server
//! STATE/following/GUEST.pages.log   its log
//! ```

use crate::disks::export_notes::remove_if_there;
use crate::disks::export_process::own_program;
use crate::disks::exports::random_name;
use crate::host::memory_notes::{self, ArrivingNote, MemoryNote};
use longhaul_hypervisor::helper::Helper;
use longhaul_hypervisor::memory::PageServer;
use longhaul_protocol::MigrationId;
use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::task::block_in_place;
use tokio::time::{Instant, sleep};

/// Time limit for a new page server to answer.
const START_WITHIN: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// The ends of the files' names.
const SOCKET: &str = "pages";
const LOG: &str = "pages.log";

/// A page server that has no QEMU yet. It ends with the connection.
pub(crate) struct Started {
    pub(crate) connection: PageServer,
    pub(crate) helper: Helper,
}

/// Returns the socket of a guest's page server.
pub(crate) fn socket(state: &Path, guest: &str) -> PathBuf {
    file(state, guest, SOCKET)
}

fn file(state: &Path, guest: &str, ending: &str) -> PathBuf {
    memory_notes::folder(state).join(format!("{guest}.{ending}"))
}

impl Started {
    /// Starts a guest's page server, and waits until it answers.
    pub(crate) async fn new(state: &Path, guest: &str) -> io::Result<Self> {
        memory_notes::create_folder(state)?;
        let (socket, log) = (socket(state, guest), file(state, guest, LOG));
        // An earlier one may listen there, and serve another QEMU of the guest.
        remove_if_there(&socket)?;
        remove_if_there(&log)?;
        let program = own_program()?;
        let words = [
            "page-server".to_owned(),
            socket.to_string_lossy().into_owned(),
        ];
        // Another agent on this machine may have a guest of the same name.
        let name = format!("pages-{}", &random_name()?[..16]);
        let helper = Helper::start(&program, &words, None, &log, &name).await?;
        let deadline = Instant::now() + START_WITHIN;
        loop {
            match PageServer::connect(&socket).await {
                Ok(connection) => return Ok(Self { connection, helper }),
                Err(_) if helper.is_alive()? && Instant::now() < deadline => {
                    sleep(LOOK_EVERY).await;
                }
                Err(error) => {
                    let said = fs::read_to_string(&log).unwrap_or_default();
                    let text = format!("it does not start: {error}; {}", said.trim());
                    return Err(io::Error::other(text));
                }
            }
        }
    }

    /// Ends it.
    pub(crate) async fn end(self) -> io::Result<()> {
        drop(self.connection);
        self.helper.ended().await
    }
}

/// Removes what is known of a guest's memory that followed, and the rest of its page server. QEMU
/// has all of it, or has ended.
pub(crate) async fn forget(state: &Path, guest: &str, migration: MigrationId) {
    let note = block_in_place(|| ArrivingNote::read(state, guest, migration));
    let helper = match note {
        Ok(note) => note.and_then(|note| note.server),
        Err(error) => {
            tracing::warn!(guest, %error, "its page server is not known");
            None
        }
    };
    if let Some(helper) = helper
        && let Err(error) = helper.ended().await
    {
        tracing::warn!(guest, %error, "something of its page server is left over");
    }
    let removed = block_in_place(|| {
        ArrivingNote::forget(state, guest)?;
        remove_if_there(&socket(state, guest))?;
        remove_if_there(&file(state, guest, LOG))
    });
    if let Err(error) = removed {
        tracing::warn!(guest, %error, "a note of its memory stays");
    }
}

/// Removes the sockets of page servers that have ended, and the logs of those without a note.
pub(crate) fn sweep(state: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(memory_notes::folder(state)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for entry in entries {
        let path = entry?.path();
        let has_log = path.extension().is_some_and(|of| of == "log");
        let socket = match has_log {
            true => path.with_extension(""),
            false => path.clone(),
        };
        if socket.extension().is_none_or(|of| of != SOCKET) {
            continue;
        }
        let noted = socket.with_extension(ArrivingNote::ENDING).exists();
        let is_dead = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
        let dead = match UnixStream::connect(&socket) {
            Ok(_) => false,
            Err(error) if error.kind() == io::ErrorKind::NotFound => has_log,
            Err(error) => is_dead(error),
        };
        if dead && !(has_log && noted) {
            remove_if_there(&path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn what_ended_page_servers_leave_is_removed() {
        let state = tempfile::tempdir().unwrap();
        let state = state.path();
        sweep(state).unwrap();
        memory_notes::create_folder(state).unwrap();
        let lives = UnixListener::bind(socket(state, "db.1")).unwrap();
        drop(UnixListener::bind(socket(state, "web-7")).unwrap());
        drop(UnixListener::bind(socket(state, "web-8")).unwrap());
        for guest in ["db.1", "web-7", "web-8", "web-9"] {
            fs::write(file(state, guest, LOG), "").unwrap();
        }
        fs::write(file(state, "web-8", ArrivingNote::ENDING), "{}").unwrap();
        fs::write(file(state, "web-9", "left"), "{}").unwrap();
        sweep(state).unwrap();
        let mut left: Vec<_> = fs::read_dir(memory_notes::folder(state))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        let expected = [
            "db.1.pages",
            "db.1.pages.log",
            "web-8.arriving",
            "web-8.pages.log",
            "web-9.left",
        ];
        assert_eq!(left, expected);
        drop(lives);
    }
}
