//! The comparison of drained disks. When all blocks are at the destination, those that were sent in
//! the drain or not compared before are compared. The source's image is retained until they are
//! equal.
//!
//! Blocks that the guest has written at the destination are not compared: the destination reports
//! which they are. Blocks that differ are compared again until they are equal or the guest has
//! overwritten them.

use crate::source::sender::Sending;
use crate::source::verify::{
    Compared, Comparison, DISK_BLOCKS_MAX, Image, Next, PIECE_BLOCKS, Worker,
};
use crate::verify::{BLOCK, WRITTEN};
use longhaul_api::{Report, VerifyResult};
use longhaul_protocol::message::ToDestination;
use longhaul_protocol::{BlockRange, RegionId};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// Delay before the next comparison after blocks differed or could not be read.
const AGAIN_AFTER: Duration = Duration::from_secs(10);

/// The comparison of drained disks, and its state.
pub(crate) struct Rest {
    sending: Arc<Sending>,
    disks: Vec<Image>,
    state: State,
    /// The result with the most different blocks.
    wrong: Compared,
    /// The reason why the destination has not received `Verified`.
    trouble: Option<String>,
}

enum State {
    /// Waits for a connection.
    Waits,
    Compares(Box<Comparison>),
    Again(Instant),
    /// Both ends are equal. The flag is set once `Verified` is sent over this connection.
    Equal(bool, Compared),
}

impl Rest {
    pub(crate) fn of(sending: &Arc<Sending>, disks: Vec<Image>) -> Self {
        Self {
            sending: sending.clone(),
            disks,
            state: State::Waits,
            wrong: Compared::default(),
            trouble: None,
        }
    }

    fn begin(&mut self) {
        let comparison = Comparison::start(self.disks.clone(), &self.sending, Worker::run_rest);
        self.state = State::Compares(Box::new(comparison));
    }

    /// Takes a new connection: compares, or sends `Verified` again.
    pub(crate) fn connected(&mut self) {
        match &mut self.state {
            State::Equal(told, _) => *told = false,
            _ => self.begin(),
        }
    }

    /// Handles the destination's digests.
    pub(crate) fn answered(&mut self, region: RegionId, range: BlockRange, digests: Vec<[u8; 16]>) {
        if let State::Compares(comparison) = &mut self.state {
            comparison.answered(region, range, digests);
        }
    }

    /// Waits for the next message. Safe to cancel.
    pub(crate) async fn next(&mut self) -> ToDestination {
        loop {
            let done = match &mut self.state {
                State::Compares(comparison) => match comparison.next().await {
                    Next::Ask(question) => return question,
                    Next::Done(done) => done,
                },
                State::Again(at) => {
                    sleep_until(*at).await;
                    self.begin();
                    continue;
                }
                State::Equal(told @ false, _) => {
                    *told = true;
                    return ToDestination::Verified;
                }
                State::Waits | State::Equal(true, _) => std::future::pending().await,
            };
            self.state = self.found(done);
        }
    }

    fn found(&mut self, done: Result<Compared, String>) -> State {
        let trouble = match done {
            Ok(compared) if compared.different_blocks == 0 => {
                self.trouble = None;
                return State::Equal(false, compared);
            }
            Ok(compared) => {
                let (blocks, first) = (compared.different_blocks, compared.first.clone());
                let first = first.unwrap_or_default();
                if blocks > self.wrong.different_blocks {
                    self.wrong = compared;
                }
                let blocks = match blocks {
                    1 => "1 block is".to_owned(),
                    count => format!("{count} blocks are"),
                };
                format!("{blocks} not there as here, the first of {first}")
            }
            Err(error) => format!("what has come cannot be compared: {error}"),
        };
        if self.trouble.as_ref() != Some(&trouble) {
            tracing::error!(migration = %self.sending.migration(), "{trouble}");
        }
        self.trouble = Some(trouble);
        State::Again(Instant::now() + AGAIN_AFTER)
    }

    /// Returns the reason why the images here are retained, if something is wrong.
    pub(crate) fn trouble(&self) -> Option<String> {
        let trouble = self.trouble.as_ref()?;
        Some(format!(
            "{trouble}; the images here stay, and it is compared again every 10 s: what the \
             guest writes over counts no more"
        ))
    }

    /// Adds the result to a report.
    pub(crate) fn report(&self, report: &mut Report) {
        let found = match &self.state {
            State::Equal(_, compared) => Some(compared),
            _ => None,
        };
        if found.is_none() && self.wrong.different_blocks == 0 {
            return;
        }
        let before = || Compared::default().result();
        let verify: &mut VerifyResult = report.verify.get_or_insert_with(before);
        verify.different_blocks = self.wrong.different_blocks;
        verify.first_difference.clone_from(&self.wrong.first);
        // An earlier agent may have compared the memory. This is the first result for the drained
        // disks.
        let is_new = verify.disks_not_compared > 0 || verify.disks == 0;
        if let Some(found) = found.filter(|_| is_new) {
            verify.disks += found.disks;
            verify.disk_bytes += found.disk_bytes;
            verify.disks_not_compared = 0;
        }
    }
}

impl Worker {
    async fn run_rest(mut self) -> Result<Compared, String> {
        let mut compared = Compared::default();
        if let Some(disk) = self.disks.first().cloned() {
            // The destination answers this when it has all blocks. Only then is it known which
            // blocks were sent since they were compared.
            let nothing = BlockRange::new(0, 0);
            self.digests(&disk.spec, &disk.content(), nothing, 1)
                .await?;
        }
        for disk in self.disks.clone() {
            compared.disks += 1;
            let blocks = disk.blocks();
            compared.disk_bytes += blocks * BLOCK;
            let checked = self.sending.checked();
            // A growing image has no content after its end.
            let unequal = checked.unequal(disk.spec.id, DISK_BLOCKS_MAX);
            let unequal = unequal.into_iter().map(|range| {
                let end = range.end().min(blocks);
                BlockRange::new(range.start, end.saturating_sub(range.start))
            });
            for range in unequal.filter(|range| range.count > 0) {
                let (spec, content, piece) = (&disk.spec, disk.content(), PIECE_BLOCKS as u32);
                let different = self.differences(spec, &content, range, piece).await?;
                for run in different.chunk_by(|one, next| one + 1 == *next) {
                    let Some(first) = run.first() else { continue };
                    let start = range.start + first * PIECE_BLOCKS;
                    let end = (start + run.len() as u64 * PIECE_BLOCKS).min(range.end());
                    let part = BlockRange::new(start, end - start);
                    self.compare_rest(&disk, part, &mut compared).await?;
                }
            }
        }
        Ok(compared)
    }

    /// Compares a range block by block, except the blocks that the guest has written.
    async fn compare_rest(
        &mut self,
        disk: &Image,
        range: BlockRange,
        compared: &mut Compared,
    ) -> Result<(), String> {
        let name = format!("disk {}", disk.spec.name);
        let content = disk.content();
        let (ours, theirs) = self.digests(&disk.spec, &content, range, 1).await?;
        for (block, (ours, theirs)) in range.blocks().zip(ours.iter().zip(&theirs)) {
            if *theirs == WRITTEN {
                compared.disk_bytes = compared.disk_bytes.saturating_sub(BLOCK);
            } else if ours != theirs {
                compared.differs(&name, block);
            }
        }
        Ok(())
    }
}
