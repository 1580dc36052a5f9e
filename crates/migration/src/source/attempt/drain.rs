//! The drain of a guest's disks from the point of view of its attempt.

use crate::disks::left_images;
use crate::source::attempt::SourceAttempt;
use crate::source::drain::Drain;
use crate::source::local_disks::may_be_left;
use crate::source::verify::Image;
use longhaul_api::Phase;
use longhaul_protocol::message::{ToDestination, ToSource};

impl SourceAttempt {
    /// Begins the drain, because the guest runs at the destination. It uses a connection that
    /// begins with the lists of missing blocks.
    pub(crate) fn drain_over_session(&mut self) {
        let left = self.task.outbound.disks().iter();
        let left: Vec<_> = left
            .filter(|disk| may_be_left(disk))
            .map(Image::of)
            .collect();
        if self.draining.is_none() && !left.is_empty() {
            let verify = self.task.offer.verify;
            self.draining = Some(Drain::begin(&self.task.sending, left, verify));
            let state = self.task.source.parts.config.state.clone();
            let (guest, migration) = (
                self.task.offer.guest.name.clone(),
                self.task.offer.migration,
            );
            // An agent that is started later recognizes the images by this note.
            tokio::task::spawn_blocking(move || {
                left_images::note_content(&state, &guest, migration);
            });
            self.entry().enter(Phase::Finishing);
        }
        let line = self.line().filter(|_| self.begins_with_missing);
        if let (Some(draining), Some(line)) = (&mut self.draining, line) {
            draining.connected(line);
        }
    }

    pub(crate) async fn hear_of_left(&mut self, message: &ToSource) {
        let Some(draining) = &mut self.draining else {
            return;
        };
        if let Err(error) = draining.hear(message) {
            self.lost(&format!("what it lacks makes no sense: {error}"))
                .await;
        }
    }

    pub(crate) async fn drain(&mut self) {
        let said = self.draining.as_mut().map(Drain::unreadable);
        for message in said.unwrap_or_default() {
            self.send(message).await;
        }
        self.task.sending.wake();
    }

    /// Sends a message of the drain's comparison, and updates the report.
    pub(crate) async fn tell_of_rest(&mut self, message: ToDestination) {
        if let Some(draining) = &self.draining {
            self.entry().report_with(|report| draining.report(report));
        }
        self.send(message).await;
    }
}

/// Waits for the next message of the drain's comparison.
pub(crate) async fn next_of_rest(draining: &mut Option<Drain>) -> ToDestination {
    match draining {
        Some(draining) => draining.next().await,
        None => std::future::pending().await,
    }
}
