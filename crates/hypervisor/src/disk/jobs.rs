//! Queries the jobs on a guest's disks, and the files of the disks.

use super::graph::{Graph, Known};
use crate::qmp::{Qmp, QmpError};
use std::collections::BTreeMap;
use std::path::PathBuf;

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

/// Returns the current file of each disk device: the one below its topmost format node, without
/// backing files. Devices are named by their id, or by their path in QEMU's object tree where they
/// have none. A device whose image is not a file of this host is absent.
pub async fn files(qmp: &Qmp) -> Result<BTreeMap<String, PathBuf>, QmpError> {
    let (devices, graph, known) =
        tokio::try_join!(qmp.query("query-block"), Graph::ask(qmp), Known::ask(qmp))?;
    let devices = devices.as_array().into_iter().flatten();
    let file_of = |device: &serde_json::Value| {
        let name = device["qdev"].as_str()?;
        let mut node = device["inserted"]["node-name"].as_str()?;
        while let Some(below) = graph.child(node, "file") {
            node = below;
        }
        let is_file = matches!(known.driver(node).as_deref(), Some("file" | "host_device"));
        let file = known.file(node).filter(|_| is_file)?;
        Some((name.to_owned(), PathBuf::from(file)))
    };
    Ok(devices.filter_map(file_of).collect())
}
