//! Tracks the writes of guests whose disks are exported.

use longhaul_api::{Client, ClientError, Tracking as State};
use longhaul_migration::TrackedExports;
use longhaul_parcel::JobGuest;
use std::collections::BTreeMap;
use std::io;

fn tracks(exports: &TrackedExports, guest: &JobGuest) -> io::Result<bool> {
    let images = guest.disks.iter().map(|disk| &*disk.path);
    exports.track_all(&guest.name, images)
}

/// Lets the agent track the writes of guests that run here. Returns why it does not, for each
/// guest that is not tracked.
pub(super) async fn begin(
    exports: &TrackedExports,
    client: &Client,
    guests: &[JobGuest],
) -> io::Result<BTreeMap<String, String>> {
    let mut reasons = BTreeMap::new();
    for guest in guests {
        if tracks(exports, guest)? {
            continue;
        }
        if let Err(error) = track(client, &guest.name).await {
            reasons.insert(guest.name.clone(), error.to_string());
        } else if !tracks(exports, guest)? {
            let why = "not all of these disks are those of the guest that runs here";
            reasons.insert(guest.name.clone(), why.to_owned());
        }
    }
    Ok(reasons)
}

/// Begins to track a guest's writes; again if an earlier record has ended.
async fn track(client: &Client, guest: &str) -> Result<(), ClientError> {
    let before = client.tracked_writes(guest).await?;
    if before
        .disks
        .iter()
        .any(|disk| disk.tracking != State::Ongoing)
    {
        client.stop_tracking(guest).await?;
    } else if !before.disks.is_empty() {
        return Ok(());
    }
    client.track_writes(guest).await.map(drop)
}
