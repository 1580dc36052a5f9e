//! Copies a guest's disks from one image of its host to another with QEMU's mirror, and lets the
//! guest use the other: the paper's local storage migration.

use longhaul_lab::error::LabError;
use longhaul_lab::guest::disks::LocalDisk;
use longhaul_lab::interrupt;
use longhaul_lab::peer::{POLL_EVERY, PeerQemu, status_of, unexpected};
use longhaul_protocol::guest::GuestDescription;
use serde_json::{Value, json};
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

/// A copy that the guest uses.
pub(super) struct Copied {
    /// When it was begun, and when the guest used it.
    pub(super) times: [Instant; 2],
    /// Bytes copied, those of repeated blocks included.
    pub(super) bytes: u64,
}

/// Copies disks to files of the same names in a folder.
pub(super) fn copy(
    qemu: &mut PeerQemu,
    (guest, disks): (&GuestDescription, &[LocalDisk]),
    folder: &Path,
    limit: Duration,
) -> Result<Copied, LabError> {
    let mut names = Vec::new();
    for (disk, local) in guest.disks.iter().zip(disks) {
        let path = folder.join(local.path.file_name().unwrap_or_default());
        let made = File::create_new(&path).and_then(|file| file.set_len(local.bytes));
        made.map_err(|source| LabError::Io {
            doing: format!("make {}", path.display()),
            source,
        })?;
        let target = json!({
            "driver": "raw", "node-name": format!("local-{}", disk.name),
            "cache": {"direct": true}, "discard": "unmap",
            "file": {
                "driver": "file", "filename": path, "cache": {"direct": true}, "discard": "unmap",
            },
        });
        qemu.execute("blockdev-add", &target)?;
        names.push(disk.name.clone());
    }
    let began = Instant::now();
    for name in &names {
        let mirror = json!({
            "job-id": job(name), "device": format!("disk-{name}"),
            "target": format!("local-{name}"), "sync": "full", "copy-mode": "background",
            "auto-dismiss": false,
        });
        qemu.execute("blockdev-mirror", &mirror)?;
    }
    let mut bytes = vec![0; names.len()];
    wait(qemu, &names, "ready", began + limit, &mut bytes)?;
    for name in &names {
        qemu.execute("job-complete", &json!({"id": job(name)}))?;
    }
    wait(qemu, &names, "concluded", began + limit, &mut bytes)?;
    let times = [began, Instant::now()];
    for name in &names {
        qemu.execute("job-dismiss", &json!({"id": job(name)}))?;
    }
    Ok(Copied {
        times,
        bytes: bytes.iter().sum(),
    })
}

fn job(disk: &str) -> String {
    format!("local-copy-{disk}")
}

/// Waits until all jobs are in a state, and notes what they have copied.
fn wait(
    qemu: &mut PeerQemu,
    names: &[String],
    wanted: &str,
    deadline: Instant,
    bytes: &mut [u64],
) -> Result<(), LabError> {
    loop {
        let jobs = qemu.execute("query-jobs", &json!({}))?;
        let jobs = jobs.as_array().cloned().unwrap_or_default();
        let mut are_there = true;
        for (name, bytes) in names.iter().zip(bytes.iter_mut()) {
            let own = jobs.iter().find(|it| it["id"] == job(name).as_str());
            let own = own.ok_or_else(|| unexpected(&format!("the copy of {name} is gone")))?;
            if let Some(error) = own.get("error").and_then(Value::as_str) {
                return Err(unexpected(&format!("the copy of {name} failed: {error}")));
            }
            let copied = own["current-progress"].as_u64();
            *bytes = copied.map_or(*bytes, |copied| copied.max(*bytes));
            are_there &= status_of(own) == wanted;
        }
        if are_there {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(unexpected("copies of disks had no end"));
        }
        interrupt::sleep(POLL_EVERY)?;
    }
}
