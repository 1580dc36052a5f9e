//! Of a disk of which something was left when its guest went on elsewhere: what came then, and what
//! was not compared before, is compared when all of it is there, and before its image here is let
//! go.
//!
//! What the guest has written there meanwhile is not: the destination says of what. What differs is
//! tried again until the guest has written over it.

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

/// After something was found to differ, or could not be read, it is compared again after so long.
const AGAIN_AFTER: Duration = Duration::from_secs(10);

/// What is compared then, and how far that is.
pub(crate) struct Rest {
    sending: Arc<Sending>,
    disks: Vec<Image>,
    state: State,
    /// The worst that was found.
    wrong: Compared,
    /// Why the destination is not told that both are equal.
    trouble: Option<String>,
}

enum State {
    /// Until there is a connection.
    Waits,
    Compares(Box<Comparison>),
    Again(Instant),
    /// Whether the destination was told, over this connection.
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

    /// There is a new connection.
    pub(crate) fn connected(&mut self) {
        match &mut self.state {
            State::Equal(told, _) => *told = false,
            _ => self.begin(),
        }
    }

    /// The destination's digests.
    pub(crate) fn answered(&mut self, region: RegionId, range: BlockRange, digests: Vec<[u8; 16]>) {
        if let State::Compares(comparison) = &mut self.state {
            comparison.answered(region, range, digests);
        }
    }

    /// Waits for what is to be said next. Safe to cancel.
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

    /// Why the images here are kept, where something is wrong.
    pub(crate) fn trouble(&self) -> Option<String> {
        let trouble = self.trouble.as_ref()?;
        Some(format!(
            "{trouble}; the images here stay, and it is compared again every 10 s: what the \
             guest writes over counts no more"
        ))
    }

    /// Adds what was found to a report.
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
        // An earlier agent has compared the memory, and this is the first that is known of disks.
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
            // The destination answers when all is there: only then it is known what was sent since
            // it was compared.
            let nothing = BlockRange::new(0, 0);
            self.digests(&disk.spec, &disk.content(), nothing, 1)
                .await?;
        }
        for disk in self.disks.clone() {
            compared.disks += 1;
            let blocks = disk.blocks();
            compared.disk_bytes += blocks * BLOCK;
            let checked = self.sending.checked();
            // Behind its end an image that grows has nothing to be compared.
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

    /// Compares a range block by block, but for what the guest has written.
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
