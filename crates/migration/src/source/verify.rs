//! Compares a guest's RAM and disks at both ends. RAM is compared while the guest is stopped.
//! Blocks of disks that no longer change are compared while the guest runs, and the others after
//! the stop. A disk that is drained is compared when the drain is complete.

mod after_switchover;

use crate::disks::blocks_of;
use crate::source::local_disks::LocalDisk;
use crate::source::qemu::SourceQemu;
use crate::source::sender::Sending;
use crate::source::verified_ranges::PIECE_BLOCKS;
use crate::verify::{BLOCK, Content, DIGESTS_MAX};
use longhaul_api::VerifyResult;
use longhaul_codec::{DigestKey, VERIFY_CHUNK_BLOCKS};
use longhaul_engine::strategy::Promise;
use longhaul_protocol::message::ToDestination;
use longhaul_protocol::{BlockRange, RegionId, RegionSpec};
use longhaul_storage::disk::RawDisk;
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

pub(crate) use after_switchover::Rest;

/// Largest part of a disk in one question. While the destination answers, it handles no other
/// message.
const DISK_BLOCKS_MAX: u64 = 64 * PIECE_BLOCKS;

/// The source's image of a disk that is compared.
#[derive(Clone)]
pub(crate) struct Image {
    pub(crate) spec: RegionSpec,
    pub(crate) disk: Arc<RawDisk>,
}

impl Image {
    pub(crate) fn of(disk: &LocalDisk) -> Self {
        let (spec, disk) = (disk.spec.clone(), disk.disk.clone());
        Self { spec, disk }
    }

    /// Returns the image's current number of blocks. The destination has no content after them.
    fn blocks(&self) -> u64 {
        let blocks = self.disk.file_bytes().map(blocks_of);
        blocks.unwrap_or(self.spec.blocks).min(self.spec.blocks)
    }

    fn content(&self) -> Content {
        Content::Disk(self.disk.clone())
    }
}

/// The result of a comparison.
#[derive(Debug, Clone, Default)]
pub(crate) struct Compared {
    regions: u32,
    bytes: u64,
    disks: u32,
    disk_bytes: u64,
    disk_bytes_stopped: u64,
    disks_not_compared: u32,
    different_blocks: u64,
    first: Option<String>,
}

impl Compared {
    fn differs(&mut self, name: &str, block: u64) {
        self.different_blocks += 1;
        let offset = block * BLOCK;
        let first = || format!("{name} at offset {offset:#x}");
        self.first.get_or_insert_with(first);
    }

    /// Returns the result for the report.
    pub(crate) fn result(&self) -> VerifyResult {
        VerifyResult {
            regions: self.regions,
            bytes: self.bytes,
            disks: self.disks,
            disk_bytes: self.disk_bytes,
            disk_bytes_stopped: self.disk_bytes_stopped,
            disks_not_compared: self.disks_not_compared,
            different_blocks: self.different_blocks,
            first_difference: self.first.clone(),
        }
    }
}

/// A running comparison. The source computes its digests at the same time as the destination. Large
/// pieces are compared first.
pub(crate) struct Comparison {
    questions: mpsc::Receiver<ToDestination>,
    answers: mpsc::Sender<Answer>,
    task: JoinHandle<Result<Compared, String>>,
    last: Option<ToDestination>,
}

type Digests = Vec<[u8; 16]>;

struct Answer {
    region: RegionId,
    range: BlockRange,
    digests: Digests,
}

/// What a comparison needs from its owner.
pub(crate) enum Next {
    /// Send this question, and send it again after each reconnection until it is answered.
    Ask(ToDestination),
    /// The comparison has ended.
    Done(Result<Compared, String>),
}

impl Comparison {
    /// Compares everything that is not known to be equal, except disks that are drained, and memory
    /// that may follow. The guest must be stopped at the source.
    pub(crate) fn begin(outbound: &SourceQemu, sending: &Arc<Sending>) -> Self {
        let follows = sending.engine().memory_follows();
        let (memory, places) = outbound.memory();
        let regions = outbound.regions().iter();
        let memory = regions
            .filter(|_| !follows)
            .filter_map(|spec| {
                let place = *places.get(&spec.id)?;
                Some((spec.clone(), Content::Memory(memory.clone(), place)))
            })
            .collect();
        let is_all_there = |disk: &&LocalDisk| disk.strategy.promise == Promise::Everything;
        let disks = outbound.disks().iter().filter(is_all_there);
        let disks: Vec<Image> = disks.map(Image::of).collect();
        let later = (outbound.disks().len() - disks.len()) as u32;
        let run = |worker: Worker| worker.run(memory, later);
        Self::start(disks, sending, run)
    }

    /// Compares the settled parts of disks once, while the guest runs.
    pub(crate) fn ahead(outbound: &SourceQemu, sending: &Arc<Sending>) -> Self {
        let disks = outbound.disks().iter().map(Image::of).collect();
        Self::start(disks, sending, Worker::run_ahead)
    }

    fn start<F>(disks: Vec<Image>, sending: &Arc<Sending>, run: impl FnOnce(Worker) -> F) -> Self
    where
        F: Future<Output = Result<Compared, String>> + Send + 'static,
    {
        let (ask, questions) = mpsc::channel(1);
        let (answers, answered) = mpsc::channel(1);
        let worker = Worker {
            disks,
            sending: sending.clone(),
            key: sending.digest_key(),
            ask,
            answered,
        };
        Self {
            questions,
            answers,
            task: tokio::spawn(run(worker)),
            last: None,
        }
    }

    /// Waits for the next question or the result. Safe to cancel.
    pub(crate) async fn next(&mut self) -> Next {
        let question = tokio::select! {
            biased;
            Some(question) = self.questions.recv() => question,
            done = &mut self.task => {
                return Next::Done(done.unwrap_or_else(|error| Err(error.to_string())));
            }
        };
        self.last = Some(question.clone());
        Next::Ask(question)
    }

    /// Handles the destination's digests.
    pub(crate) fn answered(&mut self, region: RegionId, range: BlockRange, digests: Vec<[u8; 16]>) {
        self.last = None;
        // No question waits for this answer if the channel is full.
        if self
            .answers
            .try_send(Answer {
                region,
                range,
                digests,
            })
            .is_err()
        {
            tracing::warn!("unrequested digests");
        }
    }

    /// Returns the unanswered question, for a new connection.
    pub(crate) fn unanswered(&self) -> Option<ToDestination> {
        self.last.clone()
    }
}

struct Worker {
    disks: Vec<Image>,
    sending: Arc<Sending>,
    key: DigestKey,
    ask: mpsc::Sender<ToDestination>,
    answered: mpsc::Receiver<Answer>,
}

impl Worker {
    async fn run_ahead(mut self) -> Result<Compared, String> {
        for disk in self.disks.clone() {
            let content = disk.content();
            let mut next = Some(0);
            while let Some(from) = next.filter(|from| *from < disk.blocks()) {
                let asked = self.sending.ask_ahead(disk.spec.id, from, DISK_BLOCKS_MAX);
                let (range, behind) = asked;
                next = behind;
                let Some(range) = range else { continue };
                let piece = PIECE_BLOCKS as u32;
                let different = self.differences(&disk.spec, &content, range, piece).await?;
                let checked = self.sending.checked();
                checked.answered(disk.spec.id, range, &different);
            }
        }
        Ok(Compared::default())
    }

    async fn run(
        mut self,
        memory: Vec<(RegionSpec, Content)>,
        later: u32,
    ) -> Result<Compared, String> {
        let mut compared = Compared {
            disks_not_compared: later,
            ..Compared::default()
        };
        for (spec, content) in memory {
            compared.regions += 1;
            compared.bytes += spec.blocks * BLOCK;
            let most = DIGESTS_MAX * VERIFY_CHUNK_BLOCKS;
            for start in (0..spec.blocks).step_by(most as usize) {
                let range = BlockRange::new(start, (spec.blocks - start).min(most));
                let name = format!("RAM block {}", spec.name);
                self.compare(&spec, &content, &name, range, &mut compared)
                    .await?;
            }
        }
        for disk in self.disks.clone() {
            compared.disks += 1;
            let blocks = disk.blocks();
            compared.disk_bytes += blocks * BLOCK;
            let content = disk.content();
            let left = self
                .sending
                .checked()
                .unequal(disk.spec.id, DISK_BLOCKS_MAX);
            for mut range in left {
                range.count = range.count.min(blocks.saturating_sub(range.start));
                if range.count == 0 {
                    continue;
                }
                compared.disk_bytes_stopped += range.count * BLOCK;
                let name = format!("disk {}", disk.spec.name);
                self.compare(&disk.spec, &content, &name, range, &mut compared)
                    .await?;
            }
        }
        Ok(compared)
    }

    /// Compares a range, and finds the blocks in each chunk that differs.
    async fn compare(
        &mut self,
        spec: &RegionSpec,
        content: &Content,
        name: &str,
        range: BlockRange,
        compared: &mut Compared,
    ) -> Result<(), String> {
        let chunks = self.differences(spec, content, range, VERIFY_CHUNK_BLOCKS as u32);
        for chunk in chunks.await? {
            let start = range.start + chunk * VERIFY_CHUNK_BLOCKS;
            let part = BlockRange::new(start, (range.end() - start).min(VERIFY_CHUNK_BLOCKS));
            for block in self.differences(spec, content, part, 1).await? {
                compared.differs(name, start + block);
            }
        }
        Ok(())
    }

    /// Returns the indexes of the pieces of a range that differ.
    async fn differences(
        &mut self,
        spec: &RegionSpec,
        content: &Content,
        range: BlockRange,
        blocks_per_digest: u32,
    ) -> Result<Vec<u64>, String> {
        let (ours, theirs) = self
            .digests(spec, content, range, blocks_per_digest)
            .await?;
        let both = ours.iter().zip(&theirs).zip(0u64..);
        Ok(both
            .filter(|((ours, theirs), _)| ours != theirs)
            .map(|(_, index)| index)
            .collect())
    }

    /// Returns the digests of the pieces of a range, of the source and of the destination.
    async fn digests(
        &mut self,
        spec: &RegionSpec,
        content: &Content,
        range: BlockRange,
        blocks_per_digest: u32,
    ) -> Result<(Digests, Digests), String> {
        let (content, key) = (content.clone(), self.key);
        let ours =
            tokio::task::spawn_blocking(move || content.digests(range, blocks_per_digest, key));
        let question = ToDestination::VerifyRegion {
            region: spec.id,
            range,
            blocks_per_digest,
        };
        let gone = || "the comparison was ended".to_owned();
        self.ask.send(question).await.map_err(|_| gone())?;
        let answer = self.answered.recv().await.ok_or_else(gone)?;
        let ours = ours.await.map_err(|error| error.to_string())??;
        if answer.region != spec.id || answer.range != range || answer.digests.len() != ours.len() {
            return Err("the destination's digests are not those that were asked for".to_owned());
        }
        Ok((ours, answer.digests))
    }
}
