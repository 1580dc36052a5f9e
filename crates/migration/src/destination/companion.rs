//! What moves along with a guest, at its destination: images, base images, hooks and the like.
//!
//! ```text
//! look        a plan asks: nothing is changed
//! check       an offer has come: nothing is changed
//! prepare     before QEMU is launched           ─┐ an error ends the attempt:
//! started     QEMU waits for the guest           │ ended, aborted
//! released    before READY                      ─┘
//! flows       the guest's flows through gateways have come
//! committed   the guest belongs to this host, and is still stopped
//! running     beside the guest
//! held        frames that came for the guest at the source while it was stopped
//! ended       QEMU has ended, and the guest does not come
//! aborted     that is recorded
//! finished    everything of the guest is here
//! ```
//!
//! A companion keeps its durable notes in a store of its own, and its
//! [residue](crate::destination::companion) is swept after a restart. A restarted agent creates the
//! companions again, from [`About`] alone: `committed` to `finished` must not depend on what an
//! earlier step has left in memory.

use crate::context::Context;
use crate::destination::local_content::Kept;
use crate::destination::qemu::DestinationQemu;
use crate::disks::images::Place;
use crate::status::migration::Entry;
use longhaul_hypervisor::disk::base::Base;
use longhaul_protocol::Generation;
use longhaul_protocol::disk::{OfferedDisk, Pulled};
use longhaul_protocol::files::FileClaim;
use longhaul_protocol::flows::Flows;
use longhaul_protocol::guest::{GuestDescription, Managed};
use longhaul_protocol::held_frames::HeldFrames;
use longhaul_protocol::message::{Check, Offer, Refusal, Summary};
use longhaul_storage::disk::RawDisk;
use longhaul_transport::TrustedHost;
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use tokio::task::JoinHandle;

/// The future of a companion's step.
pub(crate) type Step<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Creates the companions of a guest.
pub(crate) type List = fn(&About) -> Vec<Box<dyn Companion>>;

/// The guest that a companion belongs to.
#[derive(Clone)]
pub(crate) struct About {
    pub(crate) context: Arc<Context>,
    pub(crate) guest: String,
    /// The entry of the attempt, and the generation of the right after it. None for the question of
    /// a plan, and for an attempt of which nothing is shown any more.
    pub(crate) shown: Option<(Arc<Entry>, Generation)>,
}

/// An offered guest, and what its companions find and create for its QEMU.
pub(crate) struct Offered<'a> {
    pub(crate) peer: &'a TrustedHost,
    pub(crate) offer: Offer,
    pub(crate) disks: &'a [OfferedDisk],
    /// The part of its memory that may follow when it runs here.
    pub(crate) follows: Pulled,
    /// The program that manages it, if Longhaul does not.
    pub(crate) managed: Option<Managed>,
    /// The source's claims about files that do not move.
    pub(crate) claims: Option<&'a [FileClaim]>,
    /// The paths of the disks' images.
    pub(crate) places: Vec<Place>,
    /// The images, in the order of the places.
    pub(crate) images: Vec<Arc<RawDisk>>,
    /// The base images below the disks, by the disks' names.
    pub(crate) bases: BTreeMap<String, Base>,
    /// The content of the guest that this host has already.
    pub(crate) kept: Kept,
}

/// Something that moves along with a guest, at its destination.
pub(crate) trait Companion: Send + Sync {
    /// Checks for a plan whether this host could take it.
    fn look(&self, _guest: &GuestDescription) -> Vec<Check> {
        Vec::new()
    }

    /// Checks an offer.
    fn check<'a>(&'a mut self, _arriving: &'a mut Offered<'_>) -> Step<'a, Result<(), Refusal>> {
        Box::pin(async { Ok(()) })
    }

    /// Creates what QEMU needs before it is launched. What is created is noted before.
    fn prepare<'a>(&'a mut self, _arriving: &'a mut Offered<'_>) -> Step<'a, Result<(), Refusal>> {
        Box::pin(async { Ok(()) })
    }

    /// Creates what needs the QEMU that waits for the guest.
    fn started<'a>(
        &'a mut self,
        _arriving: &'a Offered<'_>,
        _qemu: &'a DestinationQemu,
    ) -> Step<'a, Result<(), Refusal>> {
        Box::pin(async { Ok(()) })
    }

    /// Returns whether everything is here that the guest waits for before it is stopped at the
    /// source.
    fn has_arrived(&self) -> bool {
        true
    }

    /// Waits until [`has_arrived`](Self::has_arrived). Safe to cancel.
    fn arrive(&mut self) -> Step<'_, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    /// Decides whether the source may release the guest.
    fn released(&mut self) -> Step<'_, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    /// Takes the guest's flows through gateways of its networks.
    fn flows(&mut self, _flows: &Flows) {}

    /// The guest belongs to this host, and is still stopped: what is done here is downtime.
    fn committed(&mut self) -> Step<'_, ()> {
        Box::pin(async {})
    }

    /// Returns what is to be done beside the guest, which runs here.
    fn running(&mut self) -> Option<Step<'static, ()>> {
        None
    }

    /// Takes frames that came for the guest at the source. It may be stopped still.
    fn held(&mut self, _frames: &HeldFrames) {}

    /// Removes what needed QEMU, which has ended. The guest does not come, and that is not recorded
    /// yet.
    fn ended(&mut self) -> Step<'_, ()> {
        Box::pin(async {})
    }

    /// Removes what was prepared for a guest that does not come.
    fn aborted(&mut self) -> Step<'_, ()> {
        Box::pin(async {})
    }

    /// Forgets what was noted of a guest, all of which is here.
    fn finished(&mut self) {}

    /// Adds its part to the summary for the source.
    fn report(&self, _summary: &mut Summary) {}
}

/// The companions of a guest.
pub(crate) struct Companions(Vec<Box<dyn Companion>>);

impl Companions {
    /// Creates the list.
    pub(crate) fn new(companions: Vec<Box<dyn Companion>>) -> Self {
        Self(companions)
    }

    pub(crate) fn look(&self, guest: &GuestDescription) -> Vec<Check> {
        self.0.iter().flat_map(|one| one.look(guest)).collect()
    }

    pub(crate) async fn check(&mut self, offered: &mut Offered<'_>) -> Result<(), Refusal> {
        for one in &mut self.0 {
            one.check(offered).await?;
        }
        Ok(())
    }

    pub(crate) async fn prepare(&mut self, offered: &mut Offered<'_>) -> Result<(), Refusal> {
        for one in &mut self.0 {
            one.prepare(offered).await?;
        }
        Ok(())
    }

    pub(crate) async fn started(
        &mut self,
        offered: &Offered<'_>,
        qemu: &DestinationQemu,
    ) -> Result<(), Refusal> {
        for one in &mut self.0 {
            one.started(offered, qemu).await?;
        }
        Ok(())
    }

    pub(crate) fn have_arrived(&self) -> bool {
        self.0.iter().all(|one| one.has_arrived())
    }

    /// Waits until all have arrived, or one cannot. Never returns if all have arrived before.
    pub(crate) async fn arrive(&mut self) -> Result<(), String> {
        if self.have_arrived() {
            return std::future::pending().await;
        }
        for one in &mut self.0 {
            if !one.has_arrived() {
                one.arrive().await?;
            }
        }
        Ok(())
    }

    pub(crate) async fn released(&mut self) -> Result<(), String> {
        for one in &mut self.0 {
            one.released().await?;
        }
        Ok(())
    }

    pub(crate) fn flows(&mut self, flows: &Flows) {
        self.0.iter_mut().for_each(|one| one.flows(flows));
    }

    pub(crate) async fn committed(&mut self) {
        for one in &mut self.0 {
            one.committed().await;
        }
    }

    /// Starts what is to be done beside the guest.
    pub(crate) fn running(&mut self) -> JoinHandle<()> {
        let steps: Vec<_> = self.0.iter_mut().filter_map(|one| one.running()).collect();
        tokio::spawn(async move {
            for step in steps {
                step.await;
            }
        })
    }

    pub(crate) fn held(&mut self, frames: &HeldFrames) {
        self.0.iter_mut().for_each(|one| one.held(frames));
    }

    pub(crate) async fn ended(&mut self) {
        // In the opposite order: what was created last goes first.
        for one in self.0.iter_mut().rev() {
            one.ended().await;
        }
    }

    pub(crate) async fn aborted(&mut self) {
        for one in self.0.iter_mut().rev() {
            one.aborted().await;
        }
    }

    pub(crate) fn finished(&mut self) {
        self.0.iter_mut().for_each(|one| one.finished());
    }

    pub(crate) fn report(&self, summary: &mut Summary) {
        self.0.iter().for_each(|one| one.report(summary));
    }
}
