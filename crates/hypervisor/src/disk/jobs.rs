//! Queries the jobs on a guest's disks.

use crate::observe::Blocker;
use crate::qmp::{Qmp, QmpError};

/// A job of QEMU on its block nodes, such as a backup or a mirror.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Job {
    /// Its name.
    pub(super) id: String,
    /// Its type, in QEMU's word: `backup`, `mirror`, `commit`, `stream`, ...
    pub(super) kind: String,
    /// Its state, in QEMU's word: `running`, `ready`, ...
    status: String,
}

/// Returns the jobs that have not ended.
pub(super) async fn jobs(qmp: &Qmp) -> Result<Vec<Job>, QmpError> {
    let jobs = qmp.query("query-jobs").await?;
    let jobs = jobs.as_array().into_iter().flatten();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let jobs = jobs.map(|job| Job {
        id: text(&job["id"]),
        kind: text(&job["type"]),
        status: text(&job["status"]),
    });
    Ok(jobs
        .filter(|job| !matches!(job.status.as_str(), "concluded" | "null"))
        .collect())
}

/// Returns the jobs that have not ended, each as a reason that prevents a move.
pub async fn busy(qmp: &Qmp) -> Result<Vec<Blocker>, QmpError> {
    let jobs = jobs(qmp).await?.into_iter();
    let jobs = jobs.map(|job| Blocker {
        text: format!(
            "QEMU is busy with the guest's disks: job {} ({}, {})",
            job.id, job.kind, job.status
        ),
        hint: "let it end, or end it (QMP `job-cancel`), before the guest moves".to_owned(),
    });
    Ok(jobs.collect())
}
