//! Gives up missing blocks, if their source never returns: they become zeros.

use crate::destination::fetch::memory::FetchedMemory;
use crate::destination::fetch::{Fetch, Fetched};
use crate::status::in_doubt;
use longhaul_api::{ApiError, ErrorCode, HandoverRecord, Resolve};
use longhaul_attempt::destination::Event;
use longhaul_engine::handover::{DestinationState, Record};
use longhaul_engine::remaining;
use longhaul_protocol::BLOCK_SIZE;
use longhaul_storage::front::arriving::masks::Masks;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::block_in_place;

/// Time after which a source that sends nothing is shown as lost.
const LOST_AFTER: Duration = Duration::from_secs(3);

/// An operator's decision about the missing blocks.
#[derive(Default)]
pub(crate) struct GivingUp {
    /// The operator's requests.
    asked: Option<watch::Receiver<Option<Resolve>>>,
    /// Whether the missing blocks are given up, durably.
    decided: bool,
    /// The number of lost bytes of each disk, as text.
    lost: Vec<String>,
}

impl GivingUp {
    /// Restores the decision from the journal.
    pub(crate) fn of(records: &[Record], asked: Option<watch::Receiver<Option<Resolve>>>) -> Self {
        let gave_up = |record: &Record| matches!(record, Record::GaveUp { .. });
        Self {
            asked,
            decided: records.iter().any(gave_up),
            lost: Vec::new(),
        }
    }

    pub(crate) fn decide(&mut self) {
        self.decided = true;
    }

    /// Waits for an operator's request.
    pub(crate) async fn asked(&mut self) -> Resolve {
        loop {
            let Some(asked) = &mut self.asked else {
                std::future::pending::<()>().await;
                continue;
            };
            if asked.changed().await.is_err() {
                self.asked = None;
            } else if let Some(resolve) = asked.borrow_and_update().clone() {
                return resolve;
            }
        }
    }

    /// Returns the error that the migration's outcome names, if blocks were lost.
    pub(crate) fn outcome(&self) -> Option<ApiError> {
        let lost = self.lost.join(", ");
        (!self.lost.is_empty()).then(|| {
            let text = format!("an operator has given up the missing blocks: {lost} read as zeros");
            ApiError::new(ErrorCode::PeerUnreachable, text)
                .hint("check the guest's file systems, or restore them")
        })
    }
}

impl Fetch {
    /// Returns whether nothing but memory is missing, which the connected source has lost. Disks
    /// that it still sends would be given up as well.
    fn waits_in_vain(&self) -> bool {
        let lost = self.memory.as_ref().is_some_and(FetchedMemory::is_lost);
        let disks = self.lost.is_none() && self.disks.values().all(|disk| disk.whole);
        self.bulk.is_some() && lost && disks
    }

    /// Gives up the missing blocks, unless the source can send them again.
    pub(crate) async fn resolved(&mut self, resolve: Resolve) {
        let can_come = self.bulk.is_some() && !self.waits_in_vain();
        if can_come || !resolve.give_up_missing {
            tracing::warn!(?resolve, "the source is here again: nothing is given up");
            return;
        }
        let because = in_doubt::because(&self.begun.handover.ledger.host, &resolve);
        self.tell_core(Event::GiveUpMissing(because)).await;
        // Begins now instead of with the next retry.
        self.fill().await;
    }

    /// Fills the missing blocks with zeros, once they are given up.
    pub(crate) async fn fill(&mut self) {
        let ready = self.disks.values().all(|disk| disk.puller.is_some());
        let runs = *self.state() == (DestinationState::Running { all_present: false });
        if !self.giving_up.decided || !runs || !ready || self.is_whole() {
            return;
        }
        match self.end_without_memory() {
            Ok(lost) => self.giving_up.lost.extend(lost),
            Err(why) => return self.pause(&why),
        }
        // The source that the disks would be compared with is gone.
        self.compared();
        let guest = self.guest().to_owned();
        let mut failed = None;
        for fetched in self.disks.values().filter(|fetched| !fetched.whole) {
            match block_in_place(|| fetched.fill()) {
                Ok(0) => {}
                Ok(blocks) => {
                    let bytes = blocks.saturating_mul(BLOCK_SIZE as u64);
                    let lost = format!("{bytes} bytes of disk {}", fetched.disk.name);
                    tracing::error!(guest, "given up by an operator, now zeros: {lost}");
                    self.giving_up.lost.push(lost);
                }
                Err(why) => failed = Some(format!("disk {}: {why}", fetched.disk.name)),
            }
        }
        if let Some(why) = failed {
            self.pause(&why);
        }
    }

    /// Shows that the source is lost and still needed, or has lost what is needed, or neither.
    pub(crate) fn show_lost(&self) {
        let Some(entry) = &self.begun.entry else {
            return;
        };
        let lost = self.lost_at.is_some_and(|at| at.elapsed() > LOST_AFTER);
        let in_vain = self.waits_in_vain();
        let needed = *self.state() == (DestinationState::Running { all_present: false });
        if (lost || in_vain) && needed && !self.giving_up.decided {
            let next = self.begun.handover.ledger.terms.next();
            entry.in_doubt(HandoverRecord::Committed, next);
            if in_vain {
                entry.heard(None);
            }
        } else {
            entry.certain();
        }
    }
}

impl Fetched {
    /// Fills the missing blocks with zeros. Returns their number.
    fn fill(&self) -> Result<u64, String> {
        let puller = self.puller.as_ref().ok_or("its export does not answer")?;
        let noted = Masks::read(&self.disk.folder.noted_masks());
        let noted = noted.map_err(|error| error.to_string())?;
        let masks = noted.as_ref().unwrap_or(&self.disk.masks);
        for range in remaining::ranges(&masks.missing, masks.blocks) {
            let brought = puller.bring(range, None);
            brought.map_err(|error| error.to_string())?;
        }
        puller.settle().map_err(|error| error.to_string())?;
        Ok(masks.missing_blocks())
    }
}
