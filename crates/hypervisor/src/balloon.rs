//! Detects a balloon that reports unused pages to QEMU (`free-page-hint`).

use crate::observe::{children, property};
use crate::qmp::{Qmp, QmpError};
use serde_json::Value;

/// The property that makes a balloon report free pages; QEMU requires an I/O thread for it.
pub(crate) const FREE_PAGE_HINT: &str = "free-page-hint";

/// Returns whether the guest has such a balloon. A machine has at most one balloon.
pub(crate) async fn tells_free_pages(qmp: &Qmp) -> Result<bool, QmpError> {
    for folder in ["/machine/peripheral", "/machine/peripheral-anon"] {
        for (name, kind) in children(qmp, folder).await? {
            if kind.starts_with("virtio-balloon") {
                let path = format!("{folder}/{name}");
                let hints = property(qmp, &path, FREE_PAGE_HINT).await?;
                return Ok(hints == Some(Value::Bool(true)));
            }
        }
    }
    Ok(false)
}
