//! The disk exports of a departing guest: placed below its disks, with a receiver of their write
//! reports.

use crate::disks::exports::{
    Below, FrontError, LeftDisk, device_and_nodes, insert_all, make, shown, supervise,
};
use crate::source::local_disks::may_be_left;
use crate::source::qemu::SourceQemu;
use crate::source::sender::Sending;
use crate::source::write_tracker::Watch;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_hypervisor::disk::{DiskNodes, Front};
use longhaul_storage::disk::ImageIdentity;
use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;
use tokio::task::block_in_place;

/// The disk exports of a departing guest. Writes are reported until this is dropped.
pub(crate) struct Fronts {
    watches: Vec<Watch>,
    below: Vec<(DiskNodes, Front)>,
}

impl Fronts {
    /// Creates it for a guest whose disks do not move.
    pub(crate) fn none() -> Self {
        Self {
            watches: Vec::new(),
            below: Vec::new(),
        }
    }

    /// Returns the exports and the nodes that they were inserted between.
    pub(crate) fn below(&self) -> &[(DiskNodes, Front)] {
        &self.below
    }

    /// Inserts exports below the disks that a guest writes, and begins write reporting. After an
    /// error, [`take_out`](crate::disks::exports::take_out) has to be called.
    pub(crate) async fn put_in(
        state: &Path,
        qemu: &SourceQemu,
        (sending, verify): (&Arc<Sending>, bool),
    ) -> Result<Self, FrontError> {
        let (guest, qmp, disks) = (qemu.guest(), qemu.qmp(), qemu.disks());
        let mut fronts = Self::none();
        let mut all_noted = Vec::new();
        let mut all_nodes = Vec::new();
        let written = disks.iter().filter(|disk| !disk.read_only);
        for (n, disk) in written.enumerate() {
            let of_disk = |why: &dyn Display| FrontError::new(&disk.spec.name, why);
            let of = (&*disk.spec.name, &*disk.image);
            let (device, nodes) = device_and_nodes(guest, qmp, of).await?;
            let identity = ImageIdentity::of(&disk.disk).map_err(|error| of_disk(&error))?;
            let left = may_be_left(disk).then(|| LeftDisk {
                migration: sending.migration(),
                region: disk.spec.id,
                blocks: disk.spec.blocks,
                grows: disk.grows(),
                digest_key: sending.digest_key().0,
                verify,
                identity: Some(identity),
            });
            let (size, image_use) = shown(disk.grows(), &disk.image);
            let of = Below {
                disk: &disk.spec.name,
                image: &disk.image,
                device,
                nodes: &nodes,
                size,
                image_use,
                arriving: None,
                left,
                tracked: false,
            };
            let mut noted = make(state, guest, n, of).map_err(|error| of_disk(&error))?;
            let watch = Watch::begin(disk, &noted.folder(), sending);
            fronts.watches.push(watch.map_err(|error| of_disk(&error))?);
            supervise(qmp, &nodes, &mut noted).await?;
            all_noted.push(noted);
            all_nodes.push(nodes);
        }
        if !all_noted.is_empty() {
            let (all_fronts, still) = insert_all(qmp, &mut all_noted, &all_nodes).await?;
            fronts.below = all_nodes.into_iter().zip(all_fronts).collect();
            tracing::info!(
                guest = guest.name(),
                ?still,
                "reached through the disk export"
            );
        }
        for disk in disks {
            let told = block_in_place(|| disk.tell_holes(sending));
            told.map_err(|error| FrontError::new(&disk.spec.name, &error))?;
        }
        Ok(fronts)
    }

    /// Returns an error if the copy of a disk may lack a write.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        let checks = self.watches.iter().map(Watch::check);
        let missed = checks.collect::<Result<(), _>>();
        missed.map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))
    }

    /// Waits until every write of a stopped guest is reported.
    pub(crate) async fn caught_up(&self) -> Result<(), ApiError> {
        for watch in &self.watches {
            let caught_up = watch.caught_up().await;
            caught_up.map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
        }
        Ok(())
    }
}
