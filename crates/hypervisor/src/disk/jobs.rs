//! Queries the jobs on a guest's disks.

use crate::qmp::{Qmp, QmpError};

/// A job of QEMU on its block nodes, such as a backup or a mirror.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Its name.
    pub id: String,
    /// Its type, in QEMU's word: `backup`, `mirror`, `commit`, `stream`, ...
    pub kind: String,
    /// Its state, in QEMU's word: `running`, `ready`, ...
    pub status: String,
}

/// Returns the jobs that have not ended.
pub async fn jobs(qmp: &Qmp) -> Result<Vec<Job>, QmpError> {
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
