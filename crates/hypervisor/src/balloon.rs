//! Whether a guest has a balloon that tells QEMU which pages it does not use (`free-page-hint`).

use crate::observe::{children, property};
use crate::qmp::{Qmp, QmpError};
use serde_json::Value;

/// The property that makes a balloon do so; QEMU wants a thread for it.
pub(crate) const FREE_PAGE_HINT: &str = "free-page-hint";

/// Whether the guest has such a balloon. A machine has one balloon at most.
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
