//! What moves along with a guest, at its source: disk exports, fencing marks, hooks and the like.
//!
//! ```text
//! look        a plan asks: nothing is changed
//! check       before anything is changed            ─┐
//! prepare     the destination accepts the move       │
//! started     the destination launches its QEMU      │ an error ends the attempt
//! watch       again and again, while the guest runs  │
//! stopping    the guest is about to be stopped       │
//! closed      it is stopped, and QEMU closed its disks
//! stopped     the last blocks travel                 │
//! released    before RELEASED                       ─┘
//! flows       right before COMMIT is sent, which may be repeated
//! held        again and again, from COMMIT until QEMU ends
//! committed   the guest runs at the destination, and QEMU here has ended
//! resumed     the guest continues here
//! finished    the end of the attempt, either way
//! ```
//!
//! A restarted agent creates the companions again, from [`About`] alone: `committed` to `finished`
//! must not depend on what an earlier step has left in memory.

use crate::context::Context;
use crate::source::qemu::SourceQemu;
use crate::source::sender::Sending;
use crate::status::migration::Entry;
use longhaul_api::{ApiError, Check};
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::qmp::Qmp;
use longhaul_protocol::Generation;
use longhaul_protocol::flows::Flows;
use longhaul_protocol::held_frames::HeldFrames;
use std::pin::Pin;
use std::sync::Arc;

/// The future of a companion's step.
pub(crate) type Step<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Creates the companions of a guest.
pub(crate) type List = fn(&About) -> Vec<Box<dyn Companion>>;

/// The guest that a companion belongs to.
#[derive(Clone)]
pub(crate) struct About {
    pub(crate) context: Arc<Context>,
    pub(crate) guest: String,
    /// The destination, by its name on this host.
    pub(crate) host: String,
    /// The entry of the attempt, and the generation of the right after it. None for a plan, and for
    /// an attempt of which nothing is shown any more.
    pub(crate) shown: Option<(Arc<Entry>, Generation)>,
}

/// Something that moves along with a guest, at its source.
pub(crate) trait Companion: Send + Sync {
    /// Checks for a plan whether the guest can leave with it.
    fn look(&self, _guest: &Guest) -> Vec<Check> {
        Vec::new()
    }

    /// Checks a guest that is to leave.
    fn check<'a>(&'a mut self, _guest: &'a Guest, _qmp: &'a Qmp) -> Step<'a, Result<(), ApiError>> {
        Box::pin(async { Ok(()) })
    }

    /// Prepares this host for the guest's leaving. What is created is noted before.
    fn prepare<'a>(&'a mut self, _guest: &'a Guest) -> Step<'a, Result<(), ApiError>> {
        Box::pin(async { Ok(()) })
    }

    /// Begins to follow what the guest does, before the first block is sent. With `verify`, content
    /// is compared after the drain.
    fn started<'a>(
        &'a mut self,
        _qemu: &'a SourceQemu,
        _sending: &'a Arc<Sending>,
        _verify: bool,
    ) -> Step<'a, Result<(), ApiError>> {
        Box::pin(async { Ok(()) })
    }

    /// Returns an error if the move cannot succeed any more.
    fn watch(&self) -> Result<(), ApiError> {
        Ok(())
    }

    /// Decides whether the guest may be stopped.
    fn stopping(&mut self) -> Step<'_, Result<(), ApiError>> {
        Box::pin(async { Ok(()) })
    }

    /// Reports the last that the guest did. It is stopped: what is done here is downtime.
    fn closed(&mut self) -> Step<'_, Result<(), ApiError>> {
        Box::pin(async { Ok(()) })
    }

    /// The guest is stopped, and its last blocks travel.
    fn stopped(&mut self) -> Step<'_, Result<(), ApiError>> {
        Box::pin(async { Ok(()) })
    }

    /// Decides whether the guest may be released to the destination.
    fn released(&mut self) -> Step<'_, Result<(), ApiError>> {
        Box::pin(async { Ok(()) })
    }

    /// Returns the guest's flows through gateways of its networks. It is stopped, for ever.
    fn flows(&mut self) -> Option<Flows> {
        None
    }

    /// Returns what came for the guest since it was stopped. It may run at the destination already.
    fn held(&mut self) -> Option<HeldFrames> {
        None
    }

    /// Removes what the guest needed here. It runs at the destination, and its QEMU here has ended.
    fn committed(&mut self) -> Step<'_, ()> {
        Box::pin(async {})
    }

    /// Restores the guest's state from before the move: it continues here.
    fn resumed<'a>(&'a mut self, _guest: &'a Guest, _qmp: &'a Qmp) -> Step<'a, ()> {
        Box::pin(async {})
    }

    /// The attempt has ended, and the guest is here or gone.
    fn finished(&mut self, _here: bool) -> Step<'_, ()> {
        Box::pin(async {})
    }
}

/// The companions of a guest.
pub(crate) struct Companions(Vec<Box<dyn Companion>>);

impl Companions {
    /// Creates the list.
    pub(crate) fn new(companions: Vec<Box<dyn Companion>>) -> Self {
        Self(companions)
    }

    pub(crate) fn look(&self, guest: &Guest) -> Vec<Check> {
        self.0.iter().flat_map(|one| one.look(guest)).collect()
    }

    pub(crate) async fn check(&mut self, guest: &Guest, qmp: &Qmp) -> Result<(), ApiError> {
        for one in &mut self.0 {
            one.check(guest, qmp).await?;
        }
        Ok(())
    }

    pub(crate) async fn prepare(&mut self, guest: &Guest) -> Result<(), ApiError> {
        for one in &mut self.0 {
            one.prepare(guest).await?;
        }
        Ok(())
    }

    pub(crate) async fn started(
        &mut self,
        qemu: &SourceQemu,
        sending: &Arc<Sending>,
        verify: bool,
    ) -> Result<(), ApiError> {
        for one in &mut self.0 {
            one.started(qemu, sending, verify).await?;
        }
        Ok(())
    }

    pub(crate) fn watch(&self) -> Result<(), ApiError> {
        self.0.iter().try_for_each(|one| one.watch())
    }

    pub(crate) async fn stopping(&mut self) -> Result<(), ApiError> {
        for one in &mut self.0 {
            one.stopping().await?;
        }
        Ok(())
    }

    pub(crate) async fn closed(&mut self) -> Result<(), ApiError> {
        for one in &mut self.0 {
            one.closed().await?;
        }
        Ok(())
    }

    pub(crate) async fn stopped(&mut self) -> Result<(), ApiError> {
        for one in &mut self.0 {
            one.stopped().await?;
        }
        Ok(())
    }

    pub(crate) async fn released(&mut self) -> Result<(), ApiError> {
        for one in &mut self.0 {
            one.released().await?;
        }
        Ok(())
    }

    pub(crate) fn flows(&mut self) -> Vec<Flows> {
        self.0.iter_mut().filter_map(|one| one.flows()).collect()
    }

    pub(crate) fn held(&mut self) -> Vec<HeldFrames> {
        self.0.iter_mut().filter_map(|one| one.held()).collect()
    }

    pub(crate) async fn committed(&mut self) {
        // In the opposite order: what was created last goes first.
        for one in self.0.iter_mut().rev() {
            one.committed().await;
        }
    }

    pub(crate) async fn resumed(&mut self, guest: &Guest, qmp: &Qmp) {
        for one in self.0.iter_mut().rev() {
            one.resumed(guest, qmp).await;
        }
    }

    pub(crate) async fn finished(&mut self, here: bool) {
        for one in self.0.iter_mut().rev() {
            one.finished(here).await;
        }
    }
}
