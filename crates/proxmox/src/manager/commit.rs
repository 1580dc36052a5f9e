//! How an arrived guest becomes this host's: `qm resume` lets it run, and its lock ends.

use super::arrival::text;
use super::departure::LOCK;
use super::{CHANGE_TIMEOUT, Proxmox, RUN_TIMEOUT};
use crate::config::GuestConfig;
use crate::names::VmId;
use crate::node;
use crate::notes::Role;
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::manager::{Commit, CommitError, Lease};
use longhaul_hypervisor::qmp::{COMMAND_TIMEOUT, Qmp};
use std::fmt::Display;

impl Proxmox {
    /// Gives an arrived guest to this host, and lets it run.
    pub(super) async fn commit_guest(
        &self,
        guest: &Guest,
        lease: Option<&Lease>,
        commit: Commit,
    ) -> Result<(), CommitError> {
        let unknown = |error: &dyn Display| CommitError::Unknown(error.to_string());
        let name = guest.name();
        let note = self.notes.read(name).map_err(|error| unknown(&error))?;
        let Some(note) = note else {
            return Err(unknown(&"there is no note about it"));
        };
        let noted = self.notes.change(name, |note| note.role = Role::Commits);
        if let Err(error) = noted {
            return Err(match lease {
                Some(_) => CommitError::Refused(error.to_string()),
                None => unknown(&error),
            });
        }
        let number = note.id.to_string();
        if commit.runs {
            let runs = match lease {
                Some(lease) => self.resume(name, &number, lease).await,
                None => self
                    .resume_found(name, note.id)
                    .await
                    .map_err(|e| unknown(&e)),
            };
            // A later agent repeats what has no answer.
            if runs.is_err() && lease.is_some() {
                return runs;
            }
            if let Err(error) = runs {
                tracing::error!(guest = name, %error, "it may not run");
            }
        }
        // The guest is this host's, so what fails from here on is not a part of the move.
        if !commit.follows
            && let Err(error) = unlock(note.id).await
        {
            tracing::error!(guest = name, %error, "it stays locked: qm unlock {number}");
        }
        let noted = self.notes.change(name, |note| {
            note.role = Role::Here;
            note.generation = commit.generation;
            note.locked = commit.follows;
            note.before = None;
            // They are the guest's.
            note.allocated.clear();
        });
        if let Err(error) = noted {
            tracing::error!(guest = name, %error, "cannot note the generation");
        }
        Ok(())
    }

    /// Unlocks a guest whose memory has followed it.
    pub(super) async fn unlock_arrived(&self, name: &str) {
        let note = match self.notes.read(name) {
            Ok(note) => note.filter(|note| note.role == Role::Here && note.locked),
            Err(error) => {
                return tracing::error!(guest = name, %error, "the note about it cannot be read");
            }
        };
        let Some(note) = note else {
            return;
        };
        if let Err(error) = unlock(note.id).await {
            // A later agent tries again.
            let id = note.id;
            return tracing::error!(guest = name, %error, "it stays locked: qm unlock {id}");
        }
        if let Err(error) = self.notes.change(name, |note| note.locked = false) {
            tracing::error!(guest = name, %error, "cannot note that it is unlocked");
        }
    }

    /// Lets a guest run that its QEMU has just loaded.
    async fn resume(&self, name: &str, number: &str, lease: &Lease) -> Result<(), CommitError> {
        let arguments = ["resume", number, "--skiplock", "--nocheck"];
        let resumed = self.run_beside(name, &arguments, RUN_TIMEOUT).await;
        let Err(error) = resumed else {
            return Ok(());
        };
        // Only QEMU knows whether it has run.
        let waits = waits(lease.qmp()).await;
        match waits {
            Ok(true) => {
                if let Err(error) = self.notes.change(name, |note| note.role = Role::Arrives) {
                    tracing::error!(guest = name, %error, "cannot note that it waits");
                }
                Err(CommitError::Refused(error.to_string()))
            }
            Ok(false) => {
                tracing::warn!(guest = name, %error, "it runs");
                Ok(())
            }
            Err(why) => Err(CommitError::Unknown(format!("{error}; {why}"))),
        }
    }

    /// Lets a guest run that an earlier agent may have committed.
    async fn resume_found(&self, name: &str, id: VmId) -> Result<(), String> {
        if node::running(id).map_err(text)?.is_none() {
            return Ok(());
        }
        let lease = self.open(name, id, COMMAND_TIMEOUT).await.map_err(text)?;
        if !waits(lease.qmp()).await? {
            return Ok(());
        }
        let number = id.to_string();
        let arguments = ["resume", &number, "--skiplock", "--nocheck"];
        let resumed = self.run_beside(name, &arguments, RUN_TIMEOUT).await;
        resumed.map(drop).map_err(text)
    }
}

/// Removes the lock of a move, if a guest has it.
async fn unlock(id: VmId) -> Result<(), String> {
    let file = node::read(&node::config_path(id)).map_err(text)?;
    let config = GuestConfig::read(&file.unwrap_or_default()).map_err(text)?;
    if config.lock() == Some(LOCK) {
        let number = id.to_string();
        let unlocked = node::run("qm", &["unlock", &number], CHANGE_TIMEOUT).await;
        unlocked.map_err(text)?;
    }
    Ok(())
}

/// Returns whether QEMU waits for the order to run its guest.
async fn waits(qmp: &Qmp) -> Result<bool, String> {
    let status = qmp.query("query-status").await.map_err(text)?;
    match status["status"].as_str() {
        Some("paused" | "inmigrate" | "prelaunch" | "postmigrate" | "finish-migrate") => Ok(true),
        Some(_) => Ok(false),
        None => Err("QEMU does not say what its guest does".to_owned()),
    }
}
