//! The front ends of a guest that leaves: put below its disks, and heard of while it moves.

use crate::disks::exports::{Below, FrontError, LeftDisk, device, insert_all, make, nodes, shown};
use crate::source::local_disks::{LocalDisk, may_be_left};
use crate::source::sender::Sending;
use crate::source::write_tracker::Watch;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_hypervisor::disk::{DiskNodes, Front};
use longhaul_hypervisor::guest::Guest;
use longhaul_hypervisor::qmp::Qmp;
use longhaul_storage::disk::ImageIdentity;
use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;
use tokio::task::block_in_place;

/// The front ends of a departing guest, which tell of its writes as long as this is kept.
pub(crate) struct Fronts {
    watches: Vec<Watch>,
    below: Vec<(DiskNodes, Front)>,
}

impl Fronts {
    /// Of a guest whose disks stay where they are.
    pub(crate) fn none() -> Self {
        Self {
            watches: Vec::new(),
            below: Vec::new(),
        }
    }

    /// What they were put between.
    pub(crate) fn below(&self) -> &[(DiskNodes, Front)] {
        &self.below
    }

    /// Puts front ends below the disks of a guest, and tells of its writes from then on. After an
    /// error [`take_out`] has to be called.
    pub(crate) async fn put_in(
        state: &Path,
        guest: &Guest,
        qmp: &Qmp,
        disks: &[LocalDisk],
        (sending, verify): (&Arc<Sending>, bool),
    ) -> Result<Self, FrontError> {
        let mut fronts = Self::none();
        let mut all_noted = Vec::new();
        let mut all_nodes = Vec::new();
        for (n, disk) in disks.iter().enumerate() {
            let of_disk = |why: &dyn Display| FrontError::new(&disk.spec.name, why);
            let device = device(guest.description(), &disk.spec.name);
            let device = device.map_err(|why| of_disk(&why))?;
            let nodes = nodes(guest, qmp, &device).await;
            let nodes = nodes.map_err(|error| of_disk(&error))?;
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
            let (size, image_use) = shown(disk.grows());
            let of = Below {
                disk: &disk.spec.name,
                image: &disk.image,
                device,
                nodes: &nodes,
                size,
                image_use,
                arriving: None,
                left,
            };
            let mut noted = make(state, guest, n, of).map_err(|error| of_disk(&error))?;
            let watch = Watch::begin(disk, &noted.folder(), sending);
            fronts.watches.push(watch.map_err(|error| of_disk(&error))?);
            noted.supervise().await?;
            all_noted.push(noted);
            all_nodes.push(nodes);
        }
        let (all_fronts, still) = insert_all(qmp, &mut all_noted, &all_nodes).await?;
        fronts.below = all_nodes.into_iter().zip(all_fronts).collect();
        tracing::info!(
            guest = guest.name(),
            ?still,
            "reached through the front end"
        );
        for disk in disks {
            let told = block_in_place(|| disk.tell_holes(sending));
            told.map_err(|error| FrontError::new(&disk.spec.name, &error))?;
        }
        Ok(fronts)
    }

    /// Whether what was copied of the disks can be trusted.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        let checks = self.watches.iter().map(Watch::check);
        let missed = checks.collect::<Result<(), _>>();
        missed.map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))
    }

    /// Waits until every write of a guest that stands still was heard of.
    pub(crate) async fn caught_up(&self) -> Result<(), ApiError> {
        for watch in &self.watches {
            let caught_up = watch.caught_up().await;
            caught_up.map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
        }
        Ok(())
    }
}
