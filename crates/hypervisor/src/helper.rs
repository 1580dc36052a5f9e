//! Starts helper programs that a guest needs while the agent is gone: they run where a QEMU would,
//! never in the agent's own unit, session or cgroup.

use crate::process::{Account, Process, ProcessId};
use crate::scope::{Program, Scope, ScopeLimits, start};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;
use std::time::Duration;
use tokio::time::timeout;

/// The memory limit of a helper: a disk export with the maximum number of clients takes half of it.
const MEMORY_BYTES: u64 = 1 << 30;
/// The thread limit of a helper.
const TASKS: u32 = 64;
/// The time limit for a helper to end when asked.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit for a killed helper.
const KILL_TIMEOUT: Duration = Duration::from_secs(60);

/// A started helper program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Helper {
    process: ProcessId,
    scope: Scope,
}

impl Helper {
    /// Starts a program, as this account if one is given. The name must differ from those of all
    /// guests' and helpers' scopes.
    pub async fn start(
        file: &Path,
        arguments: &[String],
        account: Option<&Account>,
        log: &Path,
        name: &str,
    ) -> io::Result<Self> {
        let started = start(&Program {
            file,
            arguments,
            account,
            log,
            scope_name: name,
            limits: ScopeLimits {
                memory_bytes: MEMORY_BYTES,
                tasks: TASKS,
            },
        })
        .await?;
        if let Some(mut child) = started.child {
            // Reaps the process when it ends.
            tokio::spawn(async move { child.wait().await });
        }
        let process = ProcessId::of(started.pid)?;
        let process = process.ok_or_else(|| io::Error::other("it ended at once"))?;
        Ok(Self {
            process,
            scope: started.scope,
        })
    }

    /// Returns the id of its process.
    pub fn pid(&self) -> i32 {
        self.process.pid
    }

    /// Returns whether the program runs.
    pub fn is_alive(&self) -> io::Result<bool> {
        self.process.is_alive()
    }

    /// Waits until the program has ended as requested, and removes its scope. A program that does
    /// not end is killed.
    pub async fn ended(&self) -> io::Result<()> {
        if let Some(process) = Process::open(&self.process)?
            && timeout(END_TIMEOUT, process.ended()).await.is_err()
        {
            process.kill()?;
            let killed = timeout(KILL_TIMEOUT, process.ended()).await;
            killed.map_err(|_| io::Error::other("it does not end though it was killed"))??;
        }
        self.scope.remove().await
    }
}
