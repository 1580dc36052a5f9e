//! Exports below the disks of a guest that does not move, which record its writes
//! ([`longhaul_storage::front::tracking`]) until an operator ends that, or its QEMU ends.
//!
//! An export tracks from the moment that its note says so ([`Tracks`]), which is after it was
//! inserted below the disk, and until the note says otherwise, which is before it is removed. An
//! export whose note does not say so is removed like one of a move.

use crate::context::Context;
use crate::disks::export_notes::FrontError;
use crate::disks::export_process::own_program;
use crate::disks::exports::{self, Noted, Tracks};
use crate::status::registry::Taken;
use longhaul_hypervisor::guest_agent::freeze::Frozen;
use longhaul_hypervisor::process::{Process, ProcessId};
use longhaul_parcel::Tracking;
use longhaul_storage::front::FrontFolder;
use longhaul_storage::front::tracking::Changed;
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// The recorded writes to one disk.
#[derive(Debug)]
pub(crate) struct TrackedDisk {
    pub(crate) disk: String,
    pub(crate) since_unix_ms: u64,
    /// The QEMU whose writes are recorded.
    pub(crate) qemu: ProcessId,
    pub(crate) changed: Changed,
}

/// Returns the exports that track a guest's writes, or have done so until its QEMU ended.
pub(crate) fn exports_of(state: &Path, guest: &str) -> io::Result<Vec<Noted>> {
    let notes = exports::notes(state, guest)?.into_iter();
    Ok(notes.filter(Noted::tracks).collect())
}

/// Returns the recorded writes of a guest, by disk. Empty if they are not tracked.
pub(crate) fn read(state: &Path, guest: &str) -> io::Result<Vec<TrackedDisk>> {
    let mut found = Vec::new();
    for noted in exports_of(state, guest)? {
        let changed = Changed::of(&noted.folder()).map_err(io::Error::other)?;
        let Some(tracks) = noted.note.tracks else {
            continue;
        };
        found.push(TrackedDisk {
            disk: noted.note.disk,
            since_unix_ms: tracks.since_unix_ms,
            qemu: tracks.qemu,
            changed,
        });
    }
    Ok(found)
}

/// The exports of this host that track writes.
#[derive(Debug, Clone)]
pub struct TrackedExports {
    /// The agent's state folder.
    pub state: PathBuf,
}

impl Tracking for TrackedExports {
    fn export_of(&self, guest: &str, image: &Path) -> io::Result<Option<FrontFolder>> {
        let image = image.canonicalize()?;
        for noted in exports_of(&self.state, guest)? {
            let Some(tracks) = noted.note.tracks.as_ref().filter(|tracks| !tracks.ended) else {
                continue;
            };
            let is_it = noted.note.image.canonicalize().is_ok_and(|it| it == image);
            let runs = || Process::open(&tracks.qemu).map_err(io::Error::other);
            if is_it && !noted.folder().fell_back() && runs()?.is_some() {
                return Ok(Some(noted.folder()));
            }
        }
        Ok(None)
    }

    fn freeze(&self, guest: &str) -> Result<Option<Box<dyn longhaul_parcel::Frozen>>, String> {
        let text = |error: io::Error| error.to_string();
        let ports = exports_of(&self.state, guest).map_err(text)?;
        let mut ports = ports
            .into_iter()
            .filter_map(|noted| noted.note.tracks?.agent_port);
        let Some(port) = ports.next() else {
            return Ok(None);
        };
        let mut guard = Command::new(own_program().map_err(text)?);
        guard.arg("freeze-guard").arg(&port);
        guard.arg(frozen_notes(&self.state).join(guest));
        match Frozen::begin(guard, &port) {
            Ok(frozen) => Ok(Some(Box::new(FrozenGuest(frozen)))),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Returns the folder of the notes of guests whose file systems are frozen.
pub(crate) fn frozen_notes(state: &Path) -> PathBuf {
    state.join("frozen")
}

#[derive(Debug)]
struct FrozenGuest(Frozen);

impl longhaul_parcel::Frozen for FrozenGuest {
    fn thaw(self: Box<Self>) -> Result<(), String> {
        self.0.thaw().map(drop).map_err(|error| error.to_string())
    }
}

impl TrackedExports {
    /// Returns whether the writes of a guest to all of these images are tracked.
    ///
    /// # Errors
    /// When the notes of the exports cannot be read.
    pub fn track_all<'a>(
        &self,
        guest: &str,
        images: impl IntoIterator<Item = &'a Path>,
    ) -> io::Result<bool> {
        for image in images {
            if self.export_of(guest, image)?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Noted {
    /// Returns whether the export tracks writes, or has done so until its guest's QEMU ended.
    pub(crate) fn tracks(&self) -> bool {
        self.note.tracks.is_some()
    }

    /// Returns whether the QEMU whose writes were tracked has ended, and the export with it.
    pub(crate) fn has_ended(&self) -> bool {
        let tracks = self.note.tracks.as_ref();
        tracks.is_some_and(|tracks| tracks.ended)
    }

    /// Notes that the export tracks the writes of this QEMU from now on. It is below the disk.
    pub(crate) fn begin_tracking(
        &mut self,
        qemu: &ProcessId,
        since_unix_ms: u64,
        agent_port: Option<&Path>,
    ) -> Result<(), FrontError> {
        self.note.tracks = Some(Tracks {
            qemu: qemu.clone(),
            since_unix_ms,
            ended: false,
            agent_port: agent_port.map(Path::to_owned),
        });
        self.write().map_err(|error| self.error(&error))
    }

    /// Notes that the export tracks nothing more: it is to be removed.
    pub(crate) fn end_tracking(&mut self) -> Result<(), FrontError> {
        self.note.tracks = None;
        self.write().map_err(|error| self.error(&error))
    }

    /// Keeps the export answering while the QEMU runs, and ends its processes afterwards: they hold
    /// the image's locks, and nothing more is written through them. The record stays. Returns the
    /// QEMU if it runs.
    pub(crate) async fn keep_tracking(&mut self) -> Result<Option<Process>, FrontError> {
        let tracks = self.note.tracks.as_ref().filter(|tracks| !tracks.ended);
        let Some(qemu) = tracks.map(|tracks| tracks.qemu.clone()) else {
            return Ok(None);
        };
        let process = Process::open(&qemu).map_err(|error| self.error(&error))?;
        if process.is_some() {
            self.keep_answering().await?;
            return Ok(process);
        }
        self.stop().await?;
        if let Some(tracks) = &mut self.note.tracks {
            tracks.ended = true;
        }
        self.write().map_err(|error| self.error(&error))?;
        Ok(None)
    }
}

impl Context {
    /// Keeps these exports answering, which track writes. When the QEMU of one ends, the sweeping
    /// task is woken; `watched` has the exports for which that is certain, by their nodes. Returns
    /// whether nothing is left to do.
    pub(super) async fn keep_tracking(
        self: &Arc<Self>,
        tracking: Vec<Noted>,
        watched: &mut BTreeSet<String>,
    ) -> bool {
        let mut done = true;
        for mut noted in tracking {
            let reserved = self.registry.take(&noted.note.guest, Taken::Maintained);
            // Tracking may have ended since the note was read.
            let tracks = noted.read_again().is_ok() && noted.tracks();
            let Ok(_reservation) = reserved else {
                done = false;
                continue;
            };
            if !tracks {
                continue;
            }
            match noted.keep_tracking().await {
                Ok(Some(process)) if watched.insert(noted.note.node.clone()) => {
                    self.wake_when_ended(process);
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::error!(%error, "an export that tracks writes is not in order");
                    done = false;
                }
            }
        }
        done
    }

    fn wake_when_ended(self: &Arc<Self>, process: Process) {
        let context = self.clone();
        tokio::spawn(async move {
            if let Err(error) = process.ended().await {
                tracing::error!(%error, "cannot watch a QEMU whose writes are tracked");
            }
            context.sweeper.wake();
        });
    }

    /// Ends the processes of the exports that have tracked the writes of a reserved guest, if its
    /// QEMU has ended. They hold the locks of the images.
    pub(crate) async fn settle_tracking(&self, guest: &str) -> Result<(), FrontError> {
        let tracking = exports_of(&self.parts.config.state, guest);
        let tracking = tracking.map_err(|error| FrontError::new("", &error))?;
        for mut noted in tracking {
            noted.keep_tracking().await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disks::exports::tests::{note, write};
    use longhaul_storage::front::tracking;

    fn tracked(state: &Path, qemu: &ProcessId) -> Noted {
        let image = Path::new("/srv/web-7.raw");
        let mut noted = write(state, 0, note("web-7", image));
        std::fs::create_dir_all(noted.path().join("own")).unwrap();
        tracking::begin(&noted.folder(), 1 << 20).unwrap();
        assert!(exports_of(state, "web-7").unwrap().is_empty());
        noted.begin_tracking(qemu, 7, None).unwrap();
        noted
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_record_outlives_the_qemu_and_its_exports_processes() {
        let state = tempfile::tempdir().unwrap();
        let state = state.path();
        let gone = ProcessId {
            pid: 1,
            start_ticks: 0,
            boot_id: "another".to_owned(),
        };
        let mut noted = tracked(state, &gone);
        assert!(!noted.has_ended());
        assert!(noted.keep_tracking().await.unwrap().is_none());
        assert!(noted.has_ended());
        let found = exports_of(state, "web-7").unwrap();
        assert!(found.len() == 1 && found[0].has_ended());
        let read = read(state, "web-7").unwrap();
        assert_eq!(read.len(), 1);
        assert_eq!((read[0].disk.as_str(), read[0].since_unix_ms), ("vda", 7));
        assert_eq!((read[0].changed.bytes(), &read[0].qemu), (0, &gone));
        // Of the guest of that name alone, and not after it is forgotten.
        assert!(exports_of(state, "web").unwrap().is_empty());
        noted.end_tracking().unwrap();
        assert!(exports_of(state, "web-7").unwrap().is_empty());
    }

    #[test]
    fn without_its_record_nothing_is_said_about_a_disk() {
        let state = tempfile::tempdir().unwrap();
        let state = state.path();
        let us = ProcessId::of(std::process::id() as i32).unwrap().unwrap();
        let noted = tracked(state, &us);
        std::fs::remove_dir_all(noted.folder().tracked_writes()).unwrap();
        assert!(read(state, "web-7").is_err());
    }
}
