//! Tracks the writes of guests whose disks are exported.

use longhaul_api::{Client, ClientError, Tracking as State};
use longhaul_migration::tracking_export;
use longhaul_parcel::{JobGuest, Tracking};
use longhaul_storage::front::FrontFolder;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// The exports of this host's agent.
#[derive(Debug)]
pub(super) struct OfAgent {
    /// The agent's state folder.
    pub(super) state: PathBuf,
}

impl Tracking for OfAgent {
    fn export_of(&self, guest: &str, image: &Path) -> io::Result<Option<FrontFolder>> {
        tracking_export(&self.state, guest, image)
    }
}

impl OfAgent {
    fn tracks(&self, guest: &JobGuest) -> io::Result<bool> {
        for disk in &guest.disks {
            if self.export_of(&guest.name, &disk.path)?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Lets the agent track the writes of guests that run here. Returns why it does not, for each
    /// guest that is not tracked.
    pub(super) async fn begin(
        &self,
        client: &Client,
        guests: &[JobGuest],
    ) -> io::Result<BTreeMap<String, String>> {
        let mut reasons = BTreeMap::new();
        for guest in guests {
            if self.tracks(guest)? {
                continue;
            }
            if let Err(error) = track(client, &guest.name).await {
                reasons.insert(guest.name.clone(), error.to_string());
            } else if !self.tracks(guest)? {
                let why = "not all of these disks are those of the guest that runs here";
                reasons.insert(guest.name.clone(), why.to_owned());
            }
        }
        Ok(reasons)
    }
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
