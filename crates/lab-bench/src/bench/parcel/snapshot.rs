//! Makes replicas of a guest's disk by QEMU's external snapshots: an overlay takes the writes, what
//! has changed of the disk below is copied, and the overlay is committed back.

use super::consolidation::Made;
use super::ground::{remove_file, write_zeros};
use longhaul_lab::error::LabError;
use longhaul_lab::interrupt;
use longhaul_lab::peer::{POLL_EVERY, PeerQemu, SETTLE_LIMIT, status_of, unexpected};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const BITMAP: &str = "changed";
const TARGET: &str = "replica";
const COPY: &str = "copy";
const COMMIT: &str = "commit";
/// The time limit of the first copy.
const FIRST_LIMIT: Duration = Duration::from_secs(120);

/// The replica of a disk.
#[derive(Debug)]
pub(super) struct Snapshots {
    /// The node of the disk.
    node: String,
    folder: PathBuf,
    number: u32,
    /// Whether the latest overlay is still there.
    is_open: bool,
}

impl Snapshots {
    /// Makes a first, full copy of a disk, and records what changes from its moment on.
    pub(super) fn begin(qemu: &mut PeerQemu, disk: &str, folder: &Path) -> Result<Self, LabError> {
        let node = format!("disk-{disk}");
        let nodes = qemu.execute("query-named-block-nodes", &json!({"flat": true}))?;
        let nodes = nodes.as_array().cloned().unwrap_or_default();
        let own = nodes.iter().find(|it| it["node-name"] == node.as_str());
        let bytes = own.and_then(|it| it["image"]["virtual-size"].as_u64());
        let bytes = bytes.ok_or_else(|| unexpected("it does not know the size of its disk"))?;
        let path = folder.join("replica.raw");
        write_zeros(&path, bytes)?;
        let target = json!({
            "driver": "raw", "node-name": TARGET, "cache": {"direct": true},
            "file": {"driver": "file", "filename": path, "cache": {"direct": true}},
        });
        qemu.execute("blockdev-add", &target)?;
        let bitmap = json!({"node": node, "name": BITMAP});
        let copy = json!({
            "job-id": COPY, "device": node, "target": TARGET, "sync": "full",
            "auto-dismiss": false,
        });
        let together = json!({"actions": [
            {"type": "block-dirty-bitmap-add", "data": bitmap},
            {"type": "blockdev-backup", "data": copy},
        ]});
        qemu.execute("transaction", &together)?;
        let deadline = Instant::now() + FIRST_LIMIT;
        if !wait(qemu, COPY, "concluded", deadline)? {
            return Err(unexpected("the first copy of a disk had no end"));
        }
        dismiss(qemu, COPY)?;
        Ok(Self {
            node,
            folder: folder.to_owned(),
            number: 0,
            is_open: false,
        })
    }

    fn overlay(&self) -> String {
        format!("overlay-{}", self.number)
    }

    fn overlay_file(&self) -> PathBuf {
        self.folder.join(format!("{}.qcow2", self.overlay()))
    }

    /// Brings the replica to this moment; `None` if that has no end until the deadline.
    pub(super) fn replica(
        &mut self,
        qemu: &mut PeerQemu,
        deadline: Instant,
    ) -> Result<Option<Made>, LabError> {
        self.number += 1;
        let snapshot = json!({
            "node-name": self.node, "snapshot-node-name": self.overlay(),
            "snapshot-file": self.overlay_file(), "format": "qcow2",
        });
        qemu.execute("blockdev-snapshot-sync", &snapshot)?;
        self.is_open = true;
        let copied = changed_bytes(qemu, &self.node)?;
        let copy = json!({
            "job-id": COPY, "device": self.node, "target": TARGET, "sync": "incremental",
            "bitmap": BITMAP, "auto-dismiss": false,
        });
        qemu.execute("blockdev-backup", &copy)?;
        if !wait(qemu, COPY, "concluded", deadline)? {
            return Ok(None);
        }
        dismiss(qemu, COPY)?;
        let commit = json!({
            "job-id": COMMIT, "device": self.overlay(), "auto-dismiss": false,
        });
        qemu.execute("block-commit", &commit)?;
        if !wait(qemu, COMMIT, "ready", deadline)? {
            return Ok(None);
        }
        self.pivot(qemu)?;
        Ok(Some(Made {
            copied_bytes: copied,
            is_consistent: Some(true),
        }))
    }

    /// Lets the guest write to its disk itself again.
    fn pivot(&mut self, qemu: &mut PeerQemu) -> Result<(), LabError> {
        qemu.execute("job-complete", &json!({"id": COMMIT}))?;
        if !wait(qemu, COMMIT, "concluded", Instant::now() + SETTLE_LIMIT)? {
            return Err(unexpected("a commit that was ready did not end"));
        }
        dismiss(qemu, COMMIT)?;
        self.is_open = false;
        remove_file(&self.overlay_file())
    }

    /// Ends what was given up, once the guest writes no more, and the guest.
    pub(super) fn end(mut self, qemu: &mut PeerQemu) -> Result<(), LabError> {
        if self.is_open {
            let deadline = Instant::now() + SETTLE_LIMIT;
            if status(qemu, COPY)?.is_some() {
                wait(qemu, COPY, "concluded", deadline)?;
                dismiss(qemu, COPY)?;
            }
            if status(qemu, COMMIT)?.is_none() {
                let commit = json!({
                    "job-id": COMMIT, "device": self.overlay(), "auto-dismiss": false,
                });
                qemu.execute("block-commit", &commit)?;
            }
            if !wait(qemu, COMMIT, "ready", deadline)? {
                return Err(unexpected("a commit of a disk at rest had no end"));
            }
            self.pivot(qemu)?;
        }
        qemu.execute("quit", &json!({})).map(drop)
    }
}

/// Returns how many bytes of a disk have changed since the latest replica.
fn changed_bytes(qemu: &mut PeerQemu, node: &str) -> Result<Option<u64>, LabError> {
    let nodes = qemu.execute("query-named-block-nodes", &json!({"flat": true}))?;
    let nodes = nodes.as_array().cloned().unwrap_or_default();
    let own = nodes.iter().find(|it| it["node-name"] == node);
    let bitmaps = own.and_then(|it| it["dirty-bitmaps"].as_array());
    let bitmap = bitmaps.and_then(|all| all.iter().find(|it| it["name"] == BITMAP));
    Ok(bitmap.and_then(|it| it["count"].as_u64()))
}

/// Returns the state of a job, if it is there.
fn status(qemu: &mut PeerQemu, id: &str) -> Result<Option<String>, LabError> {
    let jobs = qemu.execute("query-jobs", &json!({}))?;
    let jobs = jobs.as_array().cloned().unwrap_or_default();
    let Some(job) = jobs.iter().find(|it| it["id"] == id) else {
        return Ok(None);
    };
    if let Some(error) = job.get("error").and_then(Value::as_str) {
        return Err(unexpected(&format!("the job {id} failed: {error}")));
    }
    Ok(Some(status_of(job).to_owned()))
}

/// Waits for a state of a job. Returns whether it was there before the deadline.
fn wait(qemu: &mut PeerQemu, id: &str, wanted: &str, deadline: Instant) -> Result<bool, LabError> {
    while status(qemu, id)?.as_deref() != Some(wanted) {
        if Instant::now() >= deadline {
            return Ok(false);
        }
        interrupt::sleep(POLL_EVERY)?;
    }
    Ok(true)
}

fn dismiss(qemu: &mut PeerQemu, id: &str) -> Result<(), LabError> {
    qemu.execute("job-dismiss", &json!({ "id": id })).map(drop)
}
