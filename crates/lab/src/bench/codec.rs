//! `lab bench codec`: what each way of encoding guest memory costs and saves, on one core.
//!
//! The memory is filled like the arena's. The first pass sends all of it, the dirty pass all of it
//! again after 512 bytes of each page with content of its own were rewritten. Times are those of
//! the processor, so that other work on the machine disturbs less.

use std::collections::HashMap;
use std::convert::Infallible;
use std::time::Duration;

use longhaul_codec::{
    BlockId, BlockSink, BlockWrite, Compression, Content, Decision, Decoder, Digest, DigestKey,
    EncodedFrame, Encoder, Hasher, Limits, Staged,
};
use longhaul_protocol::{BLOCK_SIZE, RegionId};
use nix::time::{ClockId, clock_gettime};
use serde::Serialize;

use super::document::Document;
use super::{Bench, Options};
use crate::error::{During, LabError};
use crate::interrupt;

/// The arena's own generator of content.
#[path = "../../arena/src/content.rs"]
mod content;

use content::{Content as Filling, Kind, Random};

pub(super) const BENCH: Bench = Bench {
    name: "codec",
    about: "encoding guest memory: rates and ratios of each pipeline, beside memcpy",
    minutes: (2, 1),
    run,
};

type Block = [u8; BLOCK_SIZE];

/// Blocks of the memory: 64 MiB, more than caches hold.
const BLOCKS: usize = 16 << 10;
const FRAME_BLOCKS: usize = 64;
/// Bytes of a page that a rewrite changes, as the arena does by default.
const WRITE_BYTES: usize = 512;
const INPUTS: [&str; 3] = ["mix", "text", "random"];
/// The pipelines; without a compression: copying the blocks into frames, and nothing else.
const PIPELINES: [(&str, Option<Compression>); 6] = [
    ("raw", None),
    ("longhaul-raw", Some(Compression::Raw)),
    ("longhaul-lz4", Some(Compression::Lz4)),
    ("longhaul-zstd-fast-1", Some(Compression::Zstd(-1))),
    ("longhaul-zstd-1", Some(Compression::Zstd(1))),
    ("longhaul-zstd-3", Some(Compression::Zstd(3))),
];

/// One pass of one pipeline.
#[derive(Debug, Serialize)]
struct Row {
    input: &'static str,
    pass: &'static str,
    pipeline: &'static str,
    repeat: u32,
    encode_bytes_per_s: f64,
    decode_bytes_per_s: f64,
    /// Out / in.
    ratio: f64,
    memcpy_bytes_per_s: f64,
    /// Of the time that encoding took.
    share: Share,
}

/// How the time of encoding divides.
#[derive(Debug, Default, Clone, Copy, Serialize)]
struct Share {
    /// Copying into the staging buffer.
    copy: f64,
    /// Zero test and digests.
    stage: f64,
    /// Looking up what the destination holds.
    decide: f64,
    /// Gathering, compressing, and making frames.
    frame: f64,
}

fn run(options: &Options, document: &mut Document) -> Result<(), LabError> {
    let inputs = INPUTS.iter().filter(|name| options.wants_workload(name));
    let inputs: Vec<_> = inputs
        .filter_map(|name| Some((*name, Filling::named(name)?)))
        .collect();
    for repeat in 1..=options.repeats() {
        for &(input, filling) in &inputs {
            let memory = filled(filling, options.seed, BLOCKS);
            let memcpy_bytes_per_s = memcpy(&memory)?;
            for (pipeline, compression) in PIPELINES {
                if !options.wants_system(pipeline) {
                    continue;
                }
                if interrupt::requested() {
                    return Err(LabError::Interrupted);
                }
                let mut migration = Migration::new(memory.clone(), compression);
                for pass in ["first", "dirty"] {
                    if pass == "dirty" {
                        rewrite(&mut migration.memory, filling, options.seed);
                    }
                    let cost = migration.pass()?;
                    let row = Row {
                        input,
                        pass,
                        pipeline,
                        repeat,
                        encode_bytes_per_s: cost.rate(cost.encode()),
                        decode_bytes_per_s: cost.rate(cost.decode),
                        ratio: cost.sent as f64 / cost.bytes as f64,
                        memcpy_bytes_per_s,
                        share: cost.share(),
                    };
                    document.add_row(&row, &show(&row));
                }
            }
        }
    }
    Ok(())
}

fn show(row: &Row) -> String {
    format!(
        "{:<6} {:<5} {:<20} encode {:5.2} GB/s  decode {:5.2} GB/s  ratio {:.3}  memcpy {:.1} GB/s",
        row.input,
        row.pass,
        row.pipeline,
        row.encode_bytes_per_s / 1e9,
        row.decode_bytes_per_s / 1e9,
        row.ratio,
        row.memcpy_bytes_per_s / 1e9,
    )
}

/// Processor time of this thread.
fn now() -> Result<Duration, LabError> {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .map_err(std::io::Error::from)
        .during(|| "read the processor time of this thread".to_owned())?;
    Ok(time.into())
}

/// Fills memory as the arena fills its pages.
fn filled(filling: Filling, seed: u64, blocks: usize) -> Vec<Block> {
    let mut random = Random::new(seed);
    let mut memory = vec![[0; BLOCK_SIZE]; blocks];
    let mut originals = Vec::new();
    for index in 0..blocks {
        match filling.kind(seed, index) {
            Kind::Copy if !originals.is_empty() => {
                let original: usize = originals[random.below(originals.len())];
                memory[index] = memory[original];
            }
            kind => {
                kind.fill(&mut memory[index], &mut random);
                if kind.is_original() {
                    originals.push(index);
                }
            }
        }
    }
    memory
}

/// Changes a part of every page that has content of its own.
fn rewrite(memory: &mut [Block], filling: Filling, seed: u64) {
    let mut random = Random::new(seed + 1);
    for (index, block) in memory.iter_mut().enumerate() {
        let kind = filling.kind(seed, index);
        if kind.is_original() {
            let start = random.below(BLOCK_SIZE - WRITE_BYTES + 1);
            kind.fill(&mut block[start..start + WRITE_BYTES], &mut random);
        }
    }
}

/// Bytes a second that a plain copy of the memory takes; the best of three.
fn memcpy(memory: &[Block]) -> Result<f64, LabError> {
    let mut copy = memory.to_vec();
    let mut best: f64 = 0.0;
    for _ in 0..3 {
        let start = now()?;
        std::hint::black_box(&mut copy).copy_from_slice(std::hint::black_box(memory));
        best = best.max(size_of_val(memory) as f64 / (now()? - start).as_secs_f64());
    }
    Ok(best)
}

/// What a pass took.
#[derive(Debug, Default)]
struct Cost {
    bytes: usize,
    sent: usize,
    copy: Duration,
    stage: Duration,
    decide: Duration,
    frame: Duration,
    decode: Duration,
}

impl Cost {
    fn encode(&self) -> Duration {
        self.copy + self.stage + self.decide + self.frame
    }

    fn rate(&self, time: Duration) -> f64 {
        self.bytes as f64 / time.as_secs_f64()
    }

    fn share(&self) -> Share {
        let of = |time: Duration| time.as_secs_f64() / self.encode().as_secs_f64();
        Share {
            copy: of(self.copy),
            stage: of(self.stage),
            decide: of(self.decide),
            frame: of(self.frame),
        }
    }
}

/// A source and its destination.
struct Migration {
    memory: Vec<Block>,
    compression: Option<Compression>,
    hasher: Hasher,
    encoder: Encoder,
    decoder: Decoder,
    index: Index,
    destination: Destination,
    seq: u64,
    staging: Vec<Block>,
    staged: Vec<Staged>,
    decisions: Vec<Decision>,
}

impl Migration {
    fn new(memory: Vec<Block>, compression: Option<Compression>) -> Self {
        let key = DigestKey([7; 32]);
        let destination = Destination(vec![[0; BLOCK_SIZE]; memory.len()]);
        Self {
            compression,
            hasher: Hasher::new(key),
            encoder: Encoder::new(),
            decoder: Decoder::new(key),
            index: Index::new(memory.len()),
            destination,
            memory,
            seq: 0,
            staging: vec![[0; BLOCK_SIZE]; FRAME_BLOCKS],
            staged: Vec::new(),
            decisions: Vec::new(),
        }
    }

    /// Sends all memory once, and compares what arrived.
    fn pass(&mut self) -> Result<Cost, LabError> {
        let mut cost = Cost::default();
        for start in (0..self.memory.len()).step_by(FRAME_BLOCKS) {
            let length = FRAME_BLOCKS.min(self.memory.len() - start);
            cost.bytes += length * BLOCK_SIZE;
            match self.compression {
                Some(compression) => self.frame(start, length, compression, &mut cost)?,
                None => self.copy(start, length, &mut cost)?,
            }
        }
        if self.destination.0 != self.memory {
            return Err(wrong("the decoded memory differs from the source's"));
        }
        Ok(cost)
    }

    /// Stages, decides, encodes and decodes one frame.
    fn frame(
        &mut self,
        start: usize,
        length: usize,
        compression: Compression,
        cost: &mut Cost,
    ) -> Result<(), LabError> {
        self.seq += 1;
        let mut ids = [block(0); FRAME_BLOCKS];
        let mut clock = now()?;
        let mut lap = |step: &mut Duration| {
            let time = now()?;
            *step += time - std::mem::replace(&mut clock, time);
            Ok::<_, LabError>(())
        };
        let staging = &mut self.staging[..length];
        staging.copy_from_slice(&self.memory[start..start + length]);
        lap(&mut cost.copy)?;
        self.staged.clear();
        self.hasher.stage(staging, &mut self.staged);
        lap(&mut cost.stage)?;
        for (id, index) in ids.iter_mut().zip(start..) {
            *id = block(index);
        }
        self.decisions.clear();
        let decided = self.staged.iter().zip(start..);
        self.decisions
            .extend(decided.map(|(staged, index)| self.index.decide(*staged, index)));
        self.index.sent();
        lap(&mut cost.decide)?;
        let EncodedFrame { bytes, .. } = self
            .encoder
            .encode_frame(
                self.seq,
                &ids[..length],
                staging,
                &self.decisions,
                compression,
            )
            .map_err(|error| wrong(&error.to_string()))?;
        lap(&mut cost.frame)?;
        cost.sent += bytes.len();
        let outcome = self
            .decoder
            .decode(&bytes, &Limits::default(), &mut self.destination)
            .map_err(|error| wrong(&error.to_string()))?;
        lap(&mut cost.decode)?;
        if !outcome.rejected.is_empty() {
            return Err(wrong("a reference did not hold"));
        }
        Ok(())
    }

    /// Copies one frame's blocks over, as they are.
    fn copy(&mut self, start: usize, length: usize, cost: &mut Cost) -> Result<(), LabError> {
        let clock = now()?;
        self.staging[..length].copy_from_slice(&self.memory[start..start + length]);
        let copied = now()?;
        let frame = self.staging[..length].to_vec();
        let framed = now()?;
        self.destination.0[start..start + length].copy_from_slice(&frame);
        cost.copy += copied - clock;
        cost.frame += framed - copied;
        cost.decode += now()? - framed;
        cost.sent += size_of_val(&frame[..]);
        Ok(())
    }
}

fn wrong(message: &str) -> LabError {
    LabError::Answer {
        what: "the codec".to_owned(),
        message: message.to_owned(),
    }
}

fn block(index: usize) -> BlockId {
    BlockId {
        region: RegionId(0),
        block: index as u64,
    }
}

/// What the destination holds: the digest of each block, and where a content can be found.
struct Index {
    held: Vec<Option<Digest>>,
    found: HashMap<Digest, usize>,
    /// What the frame in the making brings; it can be referred to from the next one on.
    coming: Vec<(usize, Option<Digest>)>,
}

impl Index {
    fn new(blocks: usize) -> Self {
        Self {
            held: vec![None; blocks],
            found: HashMap::new(),
            coming: Vec::new(),
        }
    }

    fn decide(&mut self, staged: Staged, index: usize) -> Decision {
        let Staged::Content(digest) = staged else {
            self.coming.push((index, None));
            return Decision::Zero;
        };
        if self.held[index] == Some(digest) {
            return Decision::Skip;
        }
        self.coming.push((index, Some(digest)));
        match self.found.get(&digest) {
            Some(source) if self.held[*source] == Some(digest) => Decision::Reference {
                source: block(*source),
                digest,
            },
            _ => Decision::Literal { digest },
        }
    }

    fn sent(&mut self) {
        for (index, digest) in self.coming.drain(..) {
            self.held[index] = digest;
            if let Some(digest) = digest {
                self.found.insert(digest, index);
            }
        }
    }
}

/// Memory at the other end.
struct Destination(Vec<Block>);

impl BlockSink for Destination {
    type Error = Infallible;

    fn region_blocks(&self, _: RegionId) -> Option<u64> {
        Some(self.0.len() as u64)
    }

    fn accepts(&self, _: BlockId, _: u64) -> bool {
        true
    }

    fn read(&mut self, id: BlockId, content: &mut Block) -> bool {
        *content = self.0[id.block as usize];
        true
    }

    fn apply(&mut self, _: u64, writes: &[BlockWrite<'_>]) -> Result<(), Infallible> {
        for write in writes {
            let blocks = write.range.start as usize..write.range.end() as usize;
            let blocks = self.0[blocks].as_flattened_mut();
            match write.content {
                Content::Zero => blocks.fill(0),
                Content::Bytes(bytes) => blocks.copy_from_slice(bytes),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ratios of the first and the dirty pass.
    fn ratios(input: &str, compression: Option<Compression>) -> (f64, f64) {
        let filling = Filling::named(input).expect("a known input");
        let mut migration = Migration::new(filled(filling, 5, 500), compression);
        let mut pass = || {
            let cost = migration.pass().expect("what arrives is what was sent");
            rewrite(&mut migration.memory, filling, 5);
            cost.sent as f64 / cost.bytes as f64
        };
        (pass(), pass())
    }

    #[test]
    fn every_pipeline_brings_the_memory_over_in_both_passes() {
        for input in INPUTS {
            for (_, compression) in PIPELINES {
                let (first, dirty) = ratios(input, compression);
                assert!(first < 1.01 && dirty < 1.01, "{input} {compression:?}");
            }
        }
    }

    #[test]
    fn inputs_are_what_their_names_say() {
        let (zstd, raw) = (Some(Compression::Zstd(1)), Some(Compression::Raw));
        assert!(ratios("random", zstd).0 > 0.99);
        assert!(
            (0.25..0.45).contains(&ratios("text", zstd).0),
            "about 3 : 1"
        );
        let mix = ratios("mix", raw).0;
        assert!(
            (0.70..0.80).contains(&mix),
            "zeros and copies are left out: {mix}"
        );
        assert_eq!(ratios("mix", None), (1.0, 1.0));
    }

    #[test]
    fn what_did_not_change_is_not_sent_again() {
        let mut migration = Migration::new(filled(Filling::Mix, 5, 300), Some(Compression::Raw));
        let first = migration
            .pass()
            .expect("what arrives is what was sent")
            .sent;
        let again = migration
            .pass()
            .expect("what arrives is what was sent")
            .sent;
        assert!(again * 100 < first, "{again} of {first}");
    }
}
