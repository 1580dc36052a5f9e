//! Comparing a guest's RAM at both ends, as the two QEMUs hold it.

use super::outbound::Outbound;
use longhaul_api::VerifyResult;
use longhaul_codec::{CHUNK_BLOCKS, DigestKey, Hasher};
use longhaul_hypervisor::memory::GuestMemory;
use longhaul_protocol::message::ToDestination;
use longhaul_protocol::{BLOCK_SIZE, BlockRange, RegionId, RegionSpec};
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Most bytes that one digest may cover.
const DIGEST_BLOCKS_MAX: u32 = 4096;
/// Most digests in one answer: they have to fit a message.
const DIGESTS_MAX: u64 = 1 << 17;

/// Digests of consecutive pieces of a block of RAM, each of so many blocks.
pub(super) fn digests(
    memory: &GuestMemory,
    place: usize,
    range: BlockRange,
    blocks_per_digest: u32,
    key: DigestKey,
) -> Result<Vec<[u8; 16]>, String> {
    let piece = u64::from(blocks_per_digest);
    if !(1..=DIGEST_BLOCKS_MAX).contains(&blocks_per_digest)
        || range.count.div_ceil(piece) > DIGESTS_MAX
    {
        return Err(format!(
            "{} blocks in digests of {piece} are too many",
            range.count
        ));
    }
    let hasher = Hasher::new(key);
    let mut digests = Vec::new();
    let mut content = vec![0; blocks_per_digest as usize * BLOCK_SIZE];
    for start in (range.start..range.end()).step_by(blocks_per_digest as usize) {
        let count = (range.end() - start).min(piece);
        let content = &mut content[..count as usize * BLOCK_SIZE];
        let read = memory.read(place, &[BlockRange::new(start, count)], content);
        read.map_err(|error| error.to_string())?;
        digests.push(hasher.digest(content).0);
    }
    Ok(digests)
}

/// What was found.
#[derive(Debug, Clone, Default)]
pub(super) struct Compared {
    regions: u32,
    bytes: u64,
    different_blocks: u64,
    first: Option<String>,
}

impl Compared {
    /// For the report.
    pub(super) fn result(&self) -> VerifyResult {
        VerifyResult {
            regions: self.regions,
            bytes: self.bytes,
            different_blocks: self.different_blocks,
            first_difference: self.first.clone(),
        }
    }
}

/// A comparison under way at the source: it digests its own RAM while the destination loads, then
/// asks for the destination's digests, coarse ones first.
pub(super) struct Comparison {
    questions: mpsc::Receiver<ToDestination>,
    answers: mpsc::Sender<Answer>,
    task: JoinHandle<Result<Compared, String>>,
    last: Option<ToDestination>,
}

struct Answer {
    region: RegionId,
    range: BlockRange,
    digests: Vec<[u8; 16]>,
}

/// What a comparison wants of its owner.
pub(super) enum Next {
    /// Send this, now and again after each reconnection until it is answered.
    Ask(ToDestination),
    /// It is over.
    Done(Result<Compared, String>),
}

impl Comparison {
    /// Begins; the guest must be stopped at the source.
    pub(super) fn begin(outbound: &Outbound, key: DigestKey) -> Self {
        let (ask, questions) = mpsc::channel(1);
        let (answers, answered) = mpsc::channel(1);
        let (memory, places) = outbound.memory();
        let worker = Worker {
            memory,
            places,
            regions: outbound.regions().to_vec(),
            key,
            ask,
            answered,
        };
        Self {
            questions,
            answers,
            task: tokio::spawn(worker.run()),
            last: None,
        }
    }

    /// Waits for what it wants next. Safe to cancel.
    pub(super) async fn next(&mut self) -> Next {
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

    /// The destination's digests.
    pub(super) fn answered(&mut self, region: RegionId, range: BlockRange, digests: Vec<[u8; 16]>) {
        self.last = None;
        // An answer that nobody waits for is one too many.
        if self
            .answers
            .try_send(Answer {
                region,
                range,
                digests,
            })
            .is_err()
        {
            tracing::warn!("digests that nobody asked for");
        }
    }

    /// The question that is not answered yet, for a new connection.
    pub(super) fn unanswered(&self) -> Option<ToDestination> {
        self.last.clone()
    }
}

struct Worker {
    memory: Arc<GuestMemory>,
    places: Vec<usize>,
    regions: Vec<RegionSpec>,
    key: DigestKey,
    ask: mpsc::Sender<ToDestination>,
    answered: mpsc::Receiver<Answer>,
}

impl Worker {
    async fn run(mut self) -> Result<Compared, String> {
        let mut compared = Compared::default();
        for spec in self.regions.clone() {
            compared.regions += 1;
            compared.bytes += spec.blocks * BLOCK_SIZE as u64;
            let most = DIGESTS_MAX * CHUNK_BLOCKS;
            for start in (0..spec.blocks).step_by(most as usize) {
                let range = BlockRange::new(start, (spec.blocks - start).min(most));
                let chunks = self.differences(&spec, range, CHUNK_BLOCKS as u32).await?;
                for chunk in chunks {
                    let start = start + chunk * CHUNK_BLOCKS;
                    let range = BlockRange::new(start, (spec.blocks - start).min(CHUNK_BLOCKS));
                    for block in self.differences(&spec, range, 1).await? {
                        compared.different_blocks += 1;
                        let offset = (start + block) * BLOCK_SIZE as u64;
                        compared.first.get_or_insert_with(|| {
                            format!("RAM block {} at offset {offset:#x}", spec.name)
                        });
                    }
                }
            }
        }
        Ok(compared)
    }

    /// The pieces of a range that are not the same at both ends, counted from its start.
    async fn differences(
        &mut self,
        spec: &RegionSpec,
        range: BlockRange,
        blocks_per_digest: u32,
    ) -> Result<Vec<u64>, String> {
        let place = self.places.get(usize::from(spec.id.0)).copied();
        let place = place.ok_or_else(|| format!("there is no region {}", spec.name))?;
        let (memory, key) = (self.memory.clone(), self.key);
        let ours = tokio::task::spawn_blocking(move || {
            digests(&memory, place, range, blocks_per_digest, key)
        });
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
        let both = ours.iter().zip(&answer.digests).zip(0u64..);
        Ok(both
            .filter(|((ours, theirs), _)| ours != theirs)
            .map(|(_, index)| index)
            .collect())
    }
}
