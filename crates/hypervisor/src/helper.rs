//! Programs of ours that a guest needs when the agent is gone: they run where a QEMU would, never in
//! the agent's own unit, session or cgroup.

use crate::process::{Process, ProcessId};
use crate::scope::{Program, Scope, ScopeLimits, start};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;
use std::time::Duration;
use tokio::time::timeout;

/// Memory that one may take: a front end with as many clients as it serves takes half of it.
const MEMORY_BYTES: u64 = 1 << 30;
/// Threads that one may have.
const TASKS: u32 = 64;
/// Time for one that was told to end.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for one that was killed.
const KILL_TIMEOUT: Duration = Duration::from_secs(60);

/// A program that was started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Helper {
    process: ProcessId,
    scope: Scope,
}

impl Helper {
    /// Starts a program. The name must be one that no guest's and no other helper's scope has.
    pub async fn start(
        file: &Path,
        arguments: &[String],
        log: &Path,
        name: &str,
    ) -> io::Result<Self> {
        let started = start(&Program {
            file,
            arguments,
            account: None,
            log,
            scope_name: name,
            limits: ScopeLimits {
                memory_bytes: MEMORY_BYTES,
                tasks: TASKS,
            },
        })
        .await?;
        if let Some(mut child) = started.child {
            // So that it does not stay in the table of processes when it ends.
            tokio::spawn(async move { child.wait().await });
        }
        let process = ProcessId::of(started.pid)?;
        let process = process.ok_or_else(|| io::Error::other("it ended at once"))?;
        Ok(Self {
            process,
            scope: started.scope,
        })
    }

    /// Whether it runs.
    pub fn is_alive(&self) -> io::Result<bool> {
        self.process.is_alive()
    }

    /// Waits until it has ended, as it was told to, and removes what it ran in. One that does not end is
    /// killed.
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
