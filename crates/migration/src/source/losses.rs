//! Warns of what a move loses of a guest: dirty bitmaps of backups, limits on disks that were set
//! at run time, copies of what is read from backing files, and remote displays.

use longhaul_api::Check;
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::disk::{self, Limits, LostBitmap};
use longhaul_hypervisor::displays::displays;
use longhaul_hypervisor::qmp::{Qmp, QmpError};

/// Returns a warning for each loss.
pub(crate) async fn checks(
    guest: &Guest,
    qmp: &Qmp,
    destination: &str,
) -> Result<Vec<Check>, QmpError> {
    let (losses, displays) = tokio::try_join!(disk::losses(qmp, guest), displays(qmp))?;
    let bitmaps = losses.bitmaps.iter().map(bitmap);
    let limits = losses.limits.iter().map(|one| limits(one, destination));
    let copies = losses.copy_on_read.iter().map(|disk| copy_on_read(disk));
    let displays = displays.iter().map(|shown| display(shown, destination));
    let all = bitmaps.chain(limits).chain(copies).chain(displays);
    Ok(all.collect())
}

fn display(shown: &str, destination: &str) -> Check {
    Check::warn(
        "display",
        format!("the guest's display ({shown}) stays behind: {destination} shows no screen of it"),
        "reach the guest by its network, or by a serial channel",
    )
}

fn copy_on_read(disk: &str) -> Check {
    Check::warn(
        "disks",
        format!(
            "disk {disk} keeps what it reads from its backing files (copy-on-read), and will not \
             after the move"
        ),
        "the disk works as before; to fill the overlay, commit or stream its backing files after \
         the move",
    )
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
