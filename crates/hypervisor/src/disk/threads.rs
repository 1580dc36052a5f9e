//! Finds out whether an I/O thread of QEMU uses a disk.

use super::DiskNodes;
use super::nodes::Above;
use crate::observe::property;
use crate::qmp::{Qmp, QmpError};
use serde_json::Value;

/// Returns whether an I/O thread of QEMU may use a disk. The disk belongs to the thread only while
/// the guest runs with its driver started: given a node of another thread then, QEMU 7.2 refuses
/// and 10.0 aborts. With a format node that `blockdev-reopen` takes, QEMU handles this itself.
pub(super) async fn has_thread(qmp: &Qmp, nodes: &DiskNodes) -> Result<bool, QmpError> {
    let device = match (&nodes.above, &nodes.held) {
        (_, Some(held)) => &held.device,
        (Above::Device(path), None) => path,
        (Above::Format(..) | Above::Node(_), None) => return Ok(false),
    };
    let threads = qmp.query("query-iothreads").await?;
    if threads.as_array().is_some_and(Vec::is_empty) {
        return Ok(false);
    }
    if let Some(has) = of(qmp, device).await? {
        return Ok(has);
    }
    // Devices without such a property use the thread of their controller, if it has one.
    let bus = property(qmp, device, "parent_bus").await?;
    let bus = bus.as_ref().and_then(Value::as_str);
    let Some((controller, _)) = bus.and_then(|bus| bus.rsplit_once('/')) else {
        return Ok(true);
    };
    Ok(of(qmp, controller).await?.unwrap_or(false))
}

/// Returns whether a device names an I/O thread; `None` if it has no such property.
async fn of(qmp: &Qmp, device: &str) -> Result<Option<bool>, QmpError> {
    let Some(one) = property(qmp, device, "iothread").await? else {
        return Ok(None);
    };
    let several = property(qmp, device, "iothread-vq-mapping").await?;
    // Without threads it is empty, or null.
    let several = several.as_ref().and_then(Value::as_array);
    let several = several.is_some_and(|several| !several.is_empty());
    Ok(Some(one != "" || several))
}
