//! What is left here of a guest's disks when it runs at the destination.

use crate::disks::left_images;
use crate::source::attempt::Departure;
use crate::source::drain::Draining;
use crate::source::local_disks::may_be_left;
use crate::source::verify::Image;
use longhaul_api::Phase;
use longhaul_protocol::message::{ToDestination, ToSource};
use std::time::Duration;

impl Departure {
    /// The guest runs at the destination: what is left of its disks here is the destination's to
    /// ask for.
    pub(crate) fn begin_draining(&mut self) {
        let left = self.task.outbound.disks().iter();
        let left: Vec<_> = left
            .filter(|disk| may_be_left(disk))
            .map(Image::of)
            .collect();
        if self.draining.is_none() && !left.is_empty() {
            let verify = self.task.offer.verify;
            self.draining = Some(Draining::begin(&self.task.sending, left, verify));
            let state = self.task.context.parts.config.state.clone();
            let (guest, migration) = (
                self.task.offer.guest.name.clone(),
                self.task.offer.migration,
            );
            // An agent that is started later recognises the images by it.
            tokio::task::spawn_blocking(move || {
                left_images::note_content(&state, &guest, migration);
            });
            self.entry().enter(Phase::Finishing);
        }
    }

    /// Connects anew: what is left travels over a connection that begins with what is missing.
    pub(crate) fn come_again(&mut self) {
        if let Some(session) = self.session.take() {
            self.keep_wire_bytes(&session);
        }
        self.acknowledging = None;
        self.task.sending.disconnect();
        self.redial(Duration::ZERO, self.limit_bps());
    }

    pub(crate) fn hear_of_left(&mut self, message: &ToSource) {
        let Some(draining) = &mut self.draining else {
            return;
        };
        if let Err(error) = draining.hear(message) {
            self.lost(&format!("what it lacks makes no sense: {error}"));
        }
    }

    pub(crate) async fn drain(&mut self) {
        let said = self.draining.as_mut().map(Draining::unreadable);
        for message in said.unwrap_or_default() {
            self.send(message).await;
        }
        self.task.sending.wake();
    }

    /// Says what is to be said of what has come.
    pub(crate) async fn tell_of_rest(&mut self, message: ToDestination) {
        if let Some(draining) = &self.draining {
            self.entry().report_with(|report| draining.report(report));
        }
        self.send(message).await;
    }
}

/// Waits for what is to be said of what has come.
pub(crate) async fn next_of_rest(draining: &mut Option<Draining>) -> ToDestination {
    match draining {
        Some(draining) => draining.next().await,
        None => std::future::pending().await,
    }
}
