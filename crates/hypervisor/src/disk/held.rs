//! Keeps the nodes of disks that are not on QEMU's command line in full: nodes without a name of
//! their own, or created since QEMU started.
//!
//! Such a node cannot be created again as it was. So it stays in QEMU, and is used again
//! afterwards. A node without a name ends when nothing uses it: a filter node above it, which
//! nothing uses, holds it. `blockdev-reopen` needs a name and all options, so the node above is
//! reopened by HMP's `qemu-io`, which keeps all other options (decision 0038).

use super::graph::{Graph, Known};
use super::jobs::jobs;
use super::{Change, DiskNodes, Front, InsertError, REOPEN_TIMEOUT, RemoveError, add};
use crate::open_files::open_files;
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io;
use std::os::unix::fs::MetadataExt;

/// The unit of a node's length.
const SECTOR_BYTES: u64 = 512;

/// What is needed to use a disk's own node again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Held {
    /// The device's path in QEMU's object tree.
    pub(super) device: String,
    /// QEMU's process.
    pub(super) pid: i32,
    /// The image's device and inode, for an image that grows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) image: Option<(u64, u64)>,
    /// Whether QEMU must not open the image again: it cannot find it by its relative name.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) stays_open: bool,
}

impl Held {
    /// Returns the image's length in bytes, by the file that QEMU has open.
    fn length(&self) -> io::Result<u64> {
        for file in open_files(self.pid)? {
            let file = file?;
            let found = file.metadata();
            if Some((found.dev(), found.ino())) == self.image {
                return Ok(found.len());
            }
        }
        Err(io::Error::other("QEMU does not have it open"))
    }

    /// Returns the options of the node that holds the file's node.
    ///
    /// QEMU opens a file again for reading only when nothing may write to it any more. So that it
    /// keeps the file as it is, the node may change the file's length, and never does. With the
    /// other two permissions by which a file stays open for writing, QEMU could not end its use of
    /// the file in a migration.
    fn holding(&self, holder: &str, file: &str) -> Value {
        match self.stays_open {
            false => json!({"driver": "raw", "node-name": holder, "file": file}),
            true => json!({
                "driver": "blkdebug", "node-name": holder, "image": file,
                "take-child-perms": ["resize"],
            }),
        }
    }
}

impl DiskNodes {
    /// Returns the node that holds the file's node while a disk export is in use.
    pub(super) fn holder(&self, front: &Front) -> Option<String> {
        self.held.is_some().then(|| format!("{}-hold", front.node))
    }
}

/// Creates the node that holds the file's node.
pub(super) async fn hold(
    qmp: &Qmp,
    nodes: &DiskNodes,
    front: &Front,
    graph: &Graph,
) -> Result<(), QmpError> {
    match (nodes.holder(front), &nodes.held) {
        (Some(holder), Some(held)) if !graph.has(&holder) => {
            add(qmp, held.holding(&holder, &nodes.file_name)).await
        }
        _ => Ok(()),
    }
}

/// Creates the node that keeps a file open which QEMU cannot open again, if there is such a file.
/// QEMU takes one more permission for it. It cannot do so once others have locked the image on its
/// behalf.
pub async fn keep_open(qmp: &Qmp, nodes: &DiskNodes, front: &Front) -> Result<(), InsertError> {
    if !nodes.held.as_ref().is_some_and(|held| held.stays_open) {
        return Ok(());
    }
    let graph = Graph::ask(qmp).await.map_err(InsertError::Refused)?;
    let held = hold(qmp, nodes, front, &graph).await;
    held.map_err(InsertError::Refused)
}

/// Exchanges the child of a node that need not have a name. QEMU drains the disk's requests
/// meanwhile.
pub(super) async fn put_below(qmp: &Qmp, node: &str, below: &str) -> Result<(), Change> {
    let known = Known::ask(qmp).await.map_err(Change::No)?;
    // Of a `-drive`, this is no option that QEMU keeps.
    let zeros = known.detects_zeros(node).filter(|zeros| zeros != "off");
    let zeros = zeros.map_or(String::new(), |zeros| format!(",detect-zeroes={zeros}"));
    let said = reopen(qmp, node, &format!("reopen -o file={below}{zeros}")).await?;
    let graph = Graph::ask(qmp).await.map_err(Change::Perhaps)?;
    match graph.child(node, "file") {
        Some(found) if found == below => Ok(()),
        _ => Err(Change::No(refusal(said))),
    }
}

async fn reopen(qmp: &Qmp, node: &str, command: &str) -> Result<String, Change> {
    let line = format!("qemu-io {node} \"{command}\"");
    let said = qmp.hmp(&line, REOPEN_TIMEOUT).await;
    said.map_err(Change::from)
}

fn refusal(said: String) -> QmpError {
    QmpError::Refused {
        command: "qemu-io reopen".to_owned(),
        class: "GenericError".to_owned(),
        description: said.split_whitespace().collect::<Vec<_>>().join(" "),
    }
}

/// Tells QEMU the length of a file that has grown since its node was used: QEMU remembers the
/// length, and would read zeros beyond it. The guest is stopped.
pub(super) async fn remember_length(qmp: &Qmp, nodes: &DiskNodes) -> Result<(), RemoveError> {
    let Some(held) = nodes.held.as_ref().filter(|_| nodes.grows) else {
        return Ok(());
    };
    let length = held.length();
    let length = length.map_err(|error| RemoveError::Length(error.to_string()))?;
    let knows = async || {
        let known = Known::ask(qmp).await.map_err(RemoveError::Refused)?;
        let bytes = known.size_bytes(&nodes.file_name);
        let bytes = bytes.map_err(RemoveError::Refused)?;
        Ok::<_, RemoveError>(bytes == length.next_multiple_of(SECTOR_BYTES))
    };
    if knows().await? {
        return Ok(());
    }
    // QEMU 10.0 looks at the file's length then.
    reopen(qmp, &nodes.file_name, "reopen").await?;
    if knows().await? {
        return Ok(());
    }
    // For QEMU 7.2 the length is set to what it is. What a job appends meanwhile would be cut off.
    let mut jobs = jobs(qmp).await.map_err(RemoveError::Refused)?;
    if let Some(job) = jobs.pop() {
        let text = format!("job {} ({}) may write to it", job.id, job.kind);
        return Err(RemoveError::Length(text));
    }
    let resize = json!({"node-name": nodes.file_name, "size": length});
    let resized = qmp.execute("block_resize", resize, COMMAND_TIMEOUT).await;
    resized.map_err(RemoveError::Refused)?;
    match knows().await? {
        true => Ok(()),
        false => Err(RemoveError::Length("QEMU does not see it".to_owned())),
    }
}
