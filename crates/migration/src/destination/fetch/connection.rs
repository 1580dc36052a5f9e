//! The source's connections while blocks are fetched, and the actions of the core.

use crate::destination::attempt::{BulkEnd, receive_from};
use crate::destination::call::Call;
use crate::destination::fetch::{Fetch, send};
use crate::handover::ledger::{DestinationHandover, DestinationOwner};
use longhaul_attempt::destination::{Action, Event};
use longhaul_engine::chunk::CHUNK_BLOCKS;
use longhaul_engine::remaining::Remaining;
use longhaul_protocol::disk::Missing;
use longhaul_protocol::limits::REMAINING_MAX;
use longhaul_protocol::message::ToSource;
use longhaul_protocol::{Epoch, RegionId};
use longhaul_storage::front::arriving::masks::Masks;

impl Fetch {
    pub(super) async fn called(&mut self, call: Call, epoch: Option<Epoch>) {
        self.caller = Some(call);
        self.tell_core(Event::Called(epoch)).await;
    }

    /// Sends a caller the attempt's state; the source connects again.
    fn decline(&mut self) {
        let Some(mut call) = self.caller.take() else {
            return;
        };
        let handover = &self.begun.handover;
        let attempt = handover.ledger.terms.attempt;
        let state = handover.core.attempt_state();
        let message = ToSource::Status { attempt, state };
        if let Err(error) = call.sender.send(&message) {
            tracing::debug!(%error, "a source that is let in later went again");
        }
    }

    /// Uses a caller's connection. Returns whether that succeeded.
    async fn accept(&mut self, epoch: Epoch) -> bool {
        self.disconnect();
        self.listen().await;
        if !self.listens() || self.lost.is_some() {
            self.decline();
            return false;
        }
        let accepted = self.take_in(epoch).await;
        if let Err(error) = &accepted {
            tracing::info!(guest = self.guest(), error, "the source cannot come back");
            self.disconnect();
        }
        accepted.is_ok()
    }

    async fn take_in(&mut self, epoch: Epoch) -> Result<(), String> {
        let receiving = self.receiving()?;
        receiving.connected(epoch);
        let mut call = self.caller.take().ok_or("it is gone")?;
        let handover = &self.begun.handover;
        let id = handover.ledger.attempt_id();
        let state = handover.core.attempt_state();
        let resumed = |bulk_token| ToSource::Resumed { bulk_token, state };
        let bulk = call.expect_bulk(id, epoch, resumed).await;
        let bulk = bulk.map_err(|error| error.to_string())?;
        self.begun.call = Some(call);
        self.offered = Some((receiving, bulk, epoch));
        Ok(())
    }

    /// Sends which blocks are missing, and starts to receive them.
    async fn send_missing(&mut self) -> Result<(), String> {
        let Some((receiving, bulk, epoch)) = self.offered.take() else {
            return Ok(());
        };
        self.send_missing_memory().await?;
        for fetched in self.disks.values_mut() {
            let noted = Masks::read(&fetched.disk.folder.noted_masks());
            let noted = noted.map_err(|error| error.to_string())?;
            fetched.unreadable.clear();
            let masks = noted.as_ref().unwrap_or(&fetched.disk.masks);
            for missing in missing(masks.region, masks.blocks, &masks.missing) {
                send(&mut self.begun.call, &ToSource::Missing(missing));
            }
        }
        self.bulk = Some(tokio::spawn(async move {
            match bulk.accept().await {
                Ok(bulk) => receive_from(&receiving, epoch, bulk).await,
                Err(error) => BulkEnd::Lost(error.into()),
            }
        }));
        self.want_memory().await;
        Ok(())
    }
}

/// Returns the messages that name the missing blocks of a region of that many blocks.
pub(super) fn missing(region: RegionId, blocks: u64, lacks: &[Remaining]) -> Vec<Missing> {
    let chunks = blocks.div_ceil(CHUNK_BLOCKS) as u32;
    let mut messages = Vec::new();
    let mut from_chunk = 0;
    let mut left = lacks;
    loop {
        let (now, later) = left.split_at(left.len().min(REMAINING_MAX));
        let to_chunk = later.first().map_or(chunks, |part: &Remaining| part.chunk);
        messages.push(Missing {
            region,
            from_chunk,
            to_chunk,
            lacks: now.to_vec(),
        });
        if later.is_empty() {
            return messages;
        }
        (from_chunk, left) = (to_chunk, later);
    }
}

impl DestinationOwner for Fetch {
    fn handover(&mut self) -> &mut DestinationHandover {
        &mut self.begun.handover
    }

    async fn act(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Take => {
                self.disconnect();
                self.begun.call = self.caller.take();
            }
            Action::Accept(epoch) => return Some(Event::Accepted(self.accept(epoch).await)),
            Action::Decline => self.decline(),
            Action::Hangup => self.disconnect(),
            Action::Send(message) => {
                send(&mut self.begun.call, &message);
                if self.begun.call.is_none() {
                    return Some(Event::Lost { meant: None });
                }
            }
            Action::SendMissing => {
                if let Err(error) = self.send_missing().await {
                    tracing::info!(guest = self.guest(), error, "the source cannot come back");
                    self.disconnect();
                    return Some(Event::Lost { meant: None });
                }
            }
            // The guest runs, or has run.
            Action::Resume => return Some(Event::Resumed),
            Action::FillMissing => self.giving_up.decide(),
            Action::Finish => self.finished = true,
            // A guest that runs here is not ended by its source, and QEMU has loaded it. The ledger
            // carries out the last two.
            Action::Quit
            | Action::Fetch
            | Action::SendAccepted
            | Action::CheckArbiter(_)
            | Action::Claim(_)
            | Action::Load
            | Action::AskReady
            | Action::ShowDoubt
            | Action::Write(_)
            | Action::Note(_) => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_said_of_every_chunk_once() {
        let part = |chunk: u32| Remaining {
            chunk,
            chunks: 1,
            mask: 1,
            written_blocks: 0,
        };
        let count = REMAINING_MAX as u32 + 2;
        let blocks = u64::from(2 * count) * CHUNK_BLOCKS + 1;
        let lacks: Vec<_> = (0..count).map(|n| part(2 * n)).collect();
        let said = missing(RegionId(1), blocks, &lacks);
        let ranges: Vec<_> = said
            .iter()
            .map(|one| (one.from_chunk, one.to_chunk))
            .collect();
        let cut = 2 * REMAINING_MAX as u32;
        assert_eq!(ranges, [(0, cut), (cut, 2 * count + 1)]);
        assert_eq!(missing(RegionId(1), blocks, &[]).len(), 1);
    }
}
