//! Measures how much a guest writes to its disks, by QEMU's counters, and how large they are.

use crate::disk::device_path;
use crate::qmp::{Qmp, QmpError};
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// How long the guest is observed.
const WATCHED: Duration = Duration::from_millis(500);

/// Returns the guest's write rate for each of its disks in bytes per second, by the path of the
/// disk's device in QEMU.
pub async fn measure(qmp: &Qmp) -> Result<BTreeMap<String, f64>, QmpError> {
    let began = Instant::now();
    let before = written(&qmp.query("query-blockstats").await?);
    tokio::time::sleep(WATCHED).await;
    let after = written(&qmp.query("query-blockstats").await?);
    let seconds = began.elapsed().as_secs_f64();
    let rate = |(device, bytes): (String, u64)| {
        let since = bytes.saturating_sub(*before.get(&device)?);
        Some((device, since as f64 / seconds))
    };
    Ok(after.into_iter().filter_map(rate).collect())
}

/// Returns the average of the same since its QEMU started, `age` ago.
pub async fn average(qmp: &Qmp, age: Duration) -> Result<BTreeMap<String, f64>, QmpError> {
    let seconds = age.max(WATCHED).as_secs_f64();
    let written = written(&qmp.query("query-blockstats").await?).into_iter();
    Ok(written
        .map(|(device, bytes)| (device, bytes as f64 / seconds))
        .collect())
}

/// Returns the size of each disk as its guest sees it, in bytes, by the path of the disk's device
/// in QEMU.
pub async fn sizes(qmp: &Qmp) -> Result<BTreeMap<String, u64>, QmpError> {
    Ok(shown_sizes(&qmp.query("query-block").await?))
}

fn shown_sizes(blocks: &Value) -> BTreeMap<String, u64> {
    let blocks = blocks.as_array().map(Vec::as_slice).unwrap_or_default();
    let of_one = |one: &Value| {
        let device = one["qdev"].as_str()?;
        let bytes = one["inserted"]["image"]["virtual-size"].as_u64()?;
        Some((device.to_owned(), bytes))
    };
    blocks.iter().filter_map(of_one).collect()
}

/// Returns the bytes written to each device so far.
fn written(stats: &Value) -> BTreeMap<String, u64> {
    let stats = stats.as_array().map(Vec::as_slice).unwrap_or_default();
    let of_one = |one: &Value| {
        let device = one["qdev"].as_str()?;
        Some((device_path(device), one["stats"]["wr_bytes"].as_u64()?))
    };
    stats.iter().filter_map(of_one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn devices_are_told_apart_and_nodes_alone_are_no_devices() {
        let stats = json!([
            {"qdev": "/machine/peripheral/blk-data/virtio-backend", "device": "",
             "node-name": "format-data", "stats": {"wr_bytes": 4096, "rd_bytes": 1}},
            {"device": "floppy0", "stats": {"wr_bytes": 7}},
            {"qdev": "/machine/peripheral/blk-log/virtio-backend", "stats": {"wr_bytes": 0}},
            {"qdev": "sda", "device": "drive0", "stats": {"wr_bytes": 5}},
        ]);
        let written = written(&stats);
        let device = |name: &str| format!("/machine/peripheral/blk-{name}/virtio-backend");
        assert_eq!(written.len(), 3);
        assert_eq!(written["/machine/peripheral/sda"], 5);
        assert_eq!(
            (written[&device("data")], written[&device("log")]),
            (4096, 0)
        );
        assert!(super::written(&json!({})).is_empty());
    }

    #[test]
    fn a_disk_is_as_large_as_its_guest_sees_it() {
        let blocks = json!([
            {"qdev": "blk-data", "inserted": {"image": {"virtual-size": 12_288}}},
            {"qdev": "empty-cd"},
            {"device": "floppy0", "inserted": {"image": {"virtual-size": 1}}},
        ]);
        let sizes = shown_sizes(&blocks);
        assert_eq!(sizes, [("blk-data".to_owned(), 12_288)].into());
    }
}
