//! Warns of what a move loses of a guest: dirty bitmaps of backups, and limits on disks that were
//! set at run time.

use longhaul_api::Check;
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::disk::{self, Limits, LostBitmap};
use longhaul_hypervisor::qmp::{Qmp, QmpError};

/// Returns a warning for each loss.
pub(crate) async fn checks(
    guest: &Guest,
    qmp: &Qmp,
    destination: &str,
) -> Result<Vec<Check>, QmpError> {
    let losses = disk::losses(qmp, guest).await?;
    let bitmaps = losses.bitmaps.iter().map(bitmap);
    let limits = losses.limits.iter().map(|one| limits(one, destination));
    Ok(bitmaps.chain(limits).collect())
}

fn bitmap(lost: &LostBitmap) -> Check {
    let LostBitmap { of, name } = lost;
    Check::warn(
        "backups",
        format!(
            "dirty bitmap {name} of disk {of} is not in an image and does not move along: the next \
             backup by it has to be a full one"
        ),
        "make a full backup after the move; a bitmap of a qcow2 image that is made with \
         `persistent` moves along",
    )
}

fn limits(limits: &Limits, destination: &str) -> Check {
    let set = limits.limits.iter();
    let set: Vec<String> = set.map(|(name, limit)| format!("{name} {limit}")).collect();
    Check::warn(
        "limits",
        format!(
            "limits on disk {} ({}) do not move along",
            limits.of,
            set.join(", ")
        ),
        format!("set them again on {destination} after the move (QMP `block_set_io_throttle`)"),
    )
}
