//! The drain of a guest's memory and disks from the point of view of its attempt.

use crate::disks::left_images;
use crate::host::memory_notes::{FileNote, LeftNote, MemoryNote};
use crate::source::attempt::{SourceAttempt, Task};
use crate::source::drain::Drain;
use crate::source::local_disks::may_be_left;
use crate::source::memory_copy::{self, Copying, Job};
use crate::source::memory_file;
use crate::source::verify::Image;
use crate::status::failure;
use longhaul_api::Phase;
use longhaul_attempt::source::Event;
use longhaul_protocol::disk::Pulled;
use longhaul_protocol::message::{ToDestination, ToSource};
use longhaul_protocol::{BlockRange, RegionId};
use std::io;
use std::time::Instant;
use tokio::task::block_in_place;

impl SourceAttempt {
    /// Begins the drain, because the guest runs at the destination. It uses a connection that
    /// begins with the lists of missing blocks; memory alone goes on over the current one.
    pub(crate) fn drain_over_session(&mut self) {
        let outbound = &self.task.outbound;
        let left = outbound.disks().iter();
        let left: Vec<_> = left
            .filter(|disk| may_be_left(disk))
            .map(Image::of)
            .collect();
        let memory = match outbound.follows() {
            Pulled::Nothing => Vec::new(),
            Pulled::Often | Pulled::All => outbound.regions().to_vec(),
        };
        if self.draining.is_none() && !(left.is_empty() && memory.is_empty()) {
            let verify = self.task.offer.verify;
            let goes_on = left.is_empty() && self.line().is_some();
            let sending = &self.task.sending;
            self.draining = Some(match goes_on {
                true => Drain::go_on(sending, &memory),
                false => Drain::begin(sending, &memory, left, verify),
            });
            self.task.sending.wake();
            if !memory.is_empty() {
                self.copy_memory();
            }
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

    /// Begins the copy of memory that follows to its file, if one is wanted.
    fn copy_memory(&mut self) {
        let Some(kept) = self.task.outbound.kept().cloned() else {
            return;
        };
        let note = self.left_note();
        if note.file.is_none() {
            return;
        }
        let (memory, places) = self.task.outbound.memory();
        let guest = self.task.outbound.guest();
        let job = Job {
            state: self.task.source.parts.config.state.clone(),
            guest: guest.name().to_owned(),
            note,
            read: memory_copy::of_qemu(guest.clone(), memory, places),
            since: Some(Instant::now()),
        };
        self.copying = Some(Copying::begin(job, kept));
    }

    /// Returns the note of memory that is held here for the destination.
    pub(crate) fn left_note(&self) -> LeftNote {
        let Task {
            offer, outbound, ..
        } = &self.task;
        let lists_any = self.listed.iter().any(|listed| !listed.is_empty());
        let listed = outbound.kept().filter(|_| lists_any);
        LeftNote {
            migration: offer.migration,
            digest_key: offer.digest_key,
            regions: outbound.regions().to_vec(),
            file: listed.map(|_| FileNote {
                blocks: self.listed.clone(),
                complete: None,
            }),
        }
    }

    /// Notes for a later agent that memory may be missing at the destination.
    pub(crate) fn note_left_memory(&self) -> io::Result<()> {
        let Task {
            source,
            offer,
            outbound,
            ..
        } = &self.task;
        if outbound.follows() == Pulled::Nothing {
            return Ok(());
        }
        let state = &source.parts.config.state;
        block_in_place(|| self.left_note().write(state, &offer.guest.name))
    }

    /// Removes what is noted of memory that is held here for the destination, and its file.
    pub(crate) fn forget_left_memory(&mut self) {
        block_in_place(|| drop(self.copying.take()));
        let Task { source, offer, .. } = &self.task;
        let (state, guest) = (&source.parts.config.state, &offer.guest.name);
        let forgotten = block_in_place(|| memory_file::forget(state, guest, offer.migration));
        if let Err(error) = forgotten {
            tracing::warn!(guest, %error, "a note of its memory, or its memory file, stays");
        }
    }

    /// Sends memory that follows from now on: the destination takes it while it loads the guest.
    pub(crate) fn loading(&mut self) {
        if self.draining.is_none() {
            self.loading = true;
            self.task.sending.engine().loading();
            self.task.sending.wake();
        }
    }

    /// Sends memory that follows behind all that the destination needs to load the guest.
    pub(crate) fn sends_more(&mut self) {
        let mut engine = self.task.sending.engine();
        if engine.memory_follows() && !self.loading && self.draining.is_none() {
            engine.behind_the_rest();
            drop(engine);
            self.task.sending.wake();
        }
    }

    /// Takes what the destination asks for while it loads the guest.
    pub(crate) async fn asked_for(&mut self, region: RegionId, ranges: &[BlockRange]) {
        tracing::debug!(
            region = region.0,
            ?ranges,
            "the destination asks for memory"
        );
        self.loading = true;
        let asked = {
            let mut engine = self.task.sending.engine();
            let mut ranges = ranges.iter();
            ranges.try_for_each(|range| engine.asked(region, *range))
        };
        self.task.sending.wake();
        if let Err(error) = asked {
            let host = &self.task.host;
            let error = failure::protocol(host, &error);
            self.fail(error).await;
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
        if let Some(complete) = self.copying.as_mut().and_then(Copying::news) {
            self.entry()
                .report_with(|report| report.memory_file = Some(complete));
        }
        if self.draining.as_mut().is_some_and(Drain::is_stuck) {
            self.tell(Event::Reconnect).await;
        }
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
