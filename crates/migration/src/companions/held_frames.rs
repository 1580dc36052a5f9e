//! The frames that come for a guest while it is stopped, as a companion. They are kept at the
//! source until the destination has the guest, and given to its cards there. The guest's new place
//! is announced when it runs, or runs again at the source.
//!
//! Nothing depends on these frames: a network may lose any. So errors are logged, and the move goes
//! on.

use crate::destination::companion as destination;
use crate::destination::companion::{Offered, Step};
use crate::destination::qemu::DestinationQemu;
use crate::source::companion as source;
use crate::source::qemu::SourceQemu;
use crate::source::sender::Sending;
use longhaul_api::ApiError;
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::bridge_port::taps_of_guest;
use longhaul_hypervisor::held_frames::{Capture, deliver};
use longhaul_hypervisor::qmp::{COMMAND_TIMEOUT, Qmp};
use longhaul_protocol::held_frames::HeldFrames;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The TAP devices of a guest's cards, by the cards' numbers.
type Taps = BTreeMap<usize, String>;

async fn taps(guest: &Guest, qmp: &Qmp) -> Taps {
    match taps_of_guest(qmp, guest.pid(), guest.description()).await {
        Ok(taps) => taps,
        Err(error) => {
            let guest = guest.name();
            tracing::warn!(guest, %error, "frames for the stopped guest will be lost");
            Taps::new()
        }
    }
}

/// Lets QEMU send a few frames of the guest's cards (RARP), from which bridges and switches learn
/// its place. Guests with virtio cards announce their IP addresses themselves then.
async fn announce(guest: &str, qmp: &Qmp) {
    let rounds = json!({"initial": 50, "max": 550, "rounds": 5, "step": 100});
    if let Err(error) = qmp.execute("announce-self", rounds, COMMAND_TIMEOUT).await {
        tracing::warn!(guest, %error, "the guest's place is not announced");
    }
}

/// The frames at the destination.
pub(super) struct Arrival {
    about: destination::About,
    qemu: Option<(Guest, Qmp)>,
    taps: Taps,
    /// Frames that came before the guest ran here. None when it runs.
    early: Option<HeldFrames>,
}

impl Arrival {
    pub(super) fn new(about: destination::About) -> Self {
        Self {
            about,
            qemu: None,
            taps: Taps::new(),
            early: Some(HeldFrames::default()),
        }
    }

    fn deliver(&self, held: &HeldFrames) {
        if held.frames.is_empty() {
            return;
        }
        let guest = &self.about.guest;
        match deliver(&self.taps, held) {
            Ok(count) => {
                let came = held.frames.len();
                tracing::info!(guest, count, came, "frames that came while it was stopped");
            }
            Err(error) => {
                tracing::warn!(guest, %error, "frames that came while it was stopped are lost");
            }
        }
    }
}

impl destination::Companion for Arrival {
    fn started<'a>(
        &'a mut self,
        _offered: &'a Offered<'_>,
        qemu: &'a DestinationQemu,
    ) -> Step<'a, Result<(), longhaul_protocol::message::Refusal>> {
        Box::pin(async move {
            let (guest, qmp) = qemu.guest_and_qmp();
            self.taps = taps(&guest, &qmp).await;
            self.qemu = Some((guest, qmp));
            Ok(())
        })
    }

    fn running(&mut self) -> Option<Step<'static, ()>> {
        if let Some(early) = self.early.take() {
            self.deliver(&early);
        }
        let (guest, qmp) = self.qemu.take()?;
        if guest.description().nics.is_empty() {
            return None;
        }
        Some(Box::pin(async move { announce(guest.name(), &qmp).await }))
    }

    fn held(&mut self, frames: &HeldFrames) {
        match &mut self.early {
            None => self.deliver(frames),
            Some(early) => early.append(frames),
        }
    }
}

/// The frames at the source.
pub(super) struct Departure {
    about: source::About,
    taps: Taps,
    capture: Option<Capture>,
}

impl Departure {
    pub(super) fn new(about: source::About) -> Self {
        Self {
            about,
            taps: Taps::new(),
            capture: None,
        }
    }

    /// Does something with the capture, which ends with an error.
    fn with<T>(&mut self, what: impl FnOnce(&mut Capture) -> std::io::Result<T>) -> Option<T> {
        match what(self.capture.as_mut()?) {
            Ok(done) => Some(done),
            Err(error) => {
                let guest = &self.about.guest;
                tracing::warn!(guest, %error, "frames for the stopped guest are lost");
                self.capture = None;
                None
            }
        }
    }
}

impl source::Companion for Departure {
    fn started<'a>(
        &'a mut self,
        qemu: &'a SourceQemu,
        _sending: &'a Arc<Sending>,
        _verify: bool,
    ) -> Step<'a, Result<(), ApiError>> {
        Box::pin(async move {
            self.taps = taps(qemu.guest(), qemu.qmp()).await;
            Ok(())
        })
    }

    fn stopping(&mut self) -> Step<'_, Result<(), ApiError>> {
        if !self.taps.is_empty() {
            match Capture::begin(&self.taps) {
                Ok(capture) => self.capture = Some(capture),
                Err(error) => {
                    let guest = &self.about.guest;
                    tracing::warn!(guest, %error, "frames for the stopped guest will be lost");
                }
            }
        }
        Box::pin(async { Ok(()) })
    }

    fn closed(&mut self) -> Step<'_, Result<(), ApiError>> {
        self.with(Capture::stopped);
        Box::pin(async { Ok(()) })
    }

    fn held(&mut self) -> Option<HeldFrames> {
        self.with(Capture::take)
            .filter(|held| !held.frames.is_empty())
    }

    fn committed(&mut self) -> Step<'_, ()> {
        let dropped = self.capture.take().map_or(0, |capture| capture.dropped());
        if dropped > 0 {
            let guest = &self.about.guest;
            tracing::info!(guest, dropped, "too many frames came while it was stopped");
        }
        Box::pin(async {})
    }

    fn resumed<'a>(&'a mut self, guest: &'a Guest, qmp: &'a Qmp) -> Step<'a, ()> {
        self.capture = None;
        Box::pin(async move {
            // Its frames may have been learned at the destination, which had loaded it.
            if !guest.description().nics.is_empty() {
                announce(guest.name(), qmp).await;
            }
        })
    }
}
