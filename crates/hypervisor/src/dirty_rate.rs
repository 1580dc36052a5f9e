//! How fast a guest writes to its memory, as QEMU counts it for a moment, without moving anything.

use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use serde_json::json;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// How long QEMU counts, in seconds: its shortest time.
const COUNT_S: u64 = 1;
/// From this version on the bitmap is known to be counted safely under TCG.
const BITMAP_WITHOUT_KVM: u32 = 10;
const POLL: Duration = Duration::from_millis(50);
const MIB: u64 = 1 << 20;

/// Why the rate is not known.
#[derive(Debug, thiserror::Error)]
pub enum DirtyRateError {
    /// QEMU refused, or did not answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// It did not come to an end.
    #[error("QEMU did not say how fast the guest writes")]
    Silent,
}

/// Bytes per second, in pages that were written at least once in a second; to the MiB.
pub async fn measure(qmp: &Qmp) -> Result<u64, DirtyRateError> {
    // Asked for the bitmap without KVM, 7.2 looks into KVM's state, which is not there, and dies.
    let kvm = qmp.query("query-kvm").await?["enabled"] == true;
    let mode = match kvm || qmp.version().major >= BITMAP_WITHOUT_KVM {
        true => "dirty-bitmap",
        false => "page-sampling",
    };
    let arguments = json!({"calc-time": COUNT_S, "mode": mode});
    qmp.execute("calc-dirty-rate", arguments, COMMAND_TIMEOUT)
        .await?;
    let deadline = Instant::now() + Duration::from_secs(COUNT_S) + COMMAND_TIMEOUT;
    while Instant::now() < deadline {
        sleep(POLL).await;
        let answer = qmp.query("query-dirty-rate").await?;
        if answer["status"] == "measured" {
            return answer["dirty-rate"]
                .as_u64()
                .map(|mib_per_s| mib_per_s * MIB)
                .ok_or(DirtyRateError::Silent);
        }
    }
    Err(DirtyRateError::Silent)
}
