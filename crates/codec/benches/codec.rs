//! Measures the speed of each step of the codec on this machine: `cargo bench -p longhaul-codec`.
//! Times are processor times, so that other load on the machine matters little.
//!
//! `lab bench codec` measures whole pipelines; this benchmark is for work on a single step.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use longhaul_codec::{
    BlockId, BlockSink, BlockWrite, Compression, Content, Decision, Decoder, Digest, DigestKey,
    Encoder, Hasher, Limits, Staged, is_zero,
};
use longhaul_protocol::{BLOCK_SIZE, MigrationId, RegionId};
use std::hint::black_box;

type Block = [u8; BLOCK_SIZE];

const KEY: DigestKey = DigestKey([7; 32]);
/// Blocks in the input: 64 MiB, more than a cache holds.
const BLOCKS: usize = 16 << 10;
const FRAME_BLOCKS: usize = 64;
const REPEATS: usize = 5;

fn main() {
    // Test runs build and start benches too, without this argument.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let random = input(|index, block| noise(index as u64, block));
    let text = input(|index, block| prose(index as u64, block));
    let mut copy = vec![[0; BLOCK_SIZE]; BLOCKS];
    report("memcpy", || black_box(&mut copy).copy_from_slice(&random));
    let zeros = input(|_, block| *block = black_box([0; BLOCK_SIZE]));
    report("zero test", || {
        assert!(black_box(&zeros).iter().all(is_zero))
    });
    report("BLAKE3, public function", || {
        for block in &random {
            black_box(blake3::keyed_hash(&KEY.0, block));
        }
    });
    let hasher = Hasher::new(KEY);
    let mut staged = Vec::new();
    report("stage (zero test and batched BLAKE3)", || {
        staged.clear();
        hasher.stage(&random, &mut staged);
    });
    for (name, content) in [("random", &random), ("text", &text)] {
        let levels = [-3, -1, 1, 3].map(Compression::Zstd);
        for compression in [Compression::Raw, Compression::Lz4Fast, Compression::Lz4]
            .into_iter()
            .chain(levels)
        {
            pipeline(name, content, compression);
        }
    }
    for lines in [1, 8, 24] {
        for compression in [Compression::Raw, Compression::Lz4Fast, Compression::Zstd(1)] {
            dirty(&text, lines, compression);
        }
    }
}

/// Encodes and decodes blocks that are sent again after a word of `lines` lines has changed, with
/// all steps.
fn dirty(before: &[Block], lines: usize, compression: Compression) {
    let hasher = Hasher::new(KEY);
    let mut digests = Vec::new();
    hasher.digest_blocks(before, &mut digests);
    let mut after = before.to_vec();
    for (index, block) in after.iter_mut().enumerate() {
        for line in 0..lines {
            let at = (index + line * 29) % 64 * 64 + index % 8 * 8;
            block[at..at + 8].copy_from_slice(&((index * 64 + line) as u64).to_le_bytes());
        }
    }
    let mut encoder = Encoder::for_guest(BLOCKS, 16 << 20);
    let mut staging = vec![[0; BLOCK_SIZE]; FRAME_BLOCKS];
    let mut frames = vec![Vec::new(); BLOCKS / FRAME_BLOCKS];
    let (mut staged, mut decisions) = (Vec::new(), Vec::new());
    let mut deltas = 0;
    let mut send = |encoder: &mut Encoder, content: &[Block], bases: &[Digest], keep: bool| {
        let batches = content.chunks(FRAME_BLOCKS).zip(bases.chunks(FRAME_BLOCKS));
        for (seq, (blocks, bases)) in batches.enumerate() {
            staging.copy_from_slice(blocks);
            staged.clear();
            decisions.clear();
            hasher.stage(&staging, &mut staged);
            decisions.extend(
                staged
                    .iter()
                    .zip(bases)
                    .map(|(staged, base)| match *staged {
                        Staged::Zero => Decision::Zero,
                        Staged::Content(digest) => Decision::Changed {
                            digest,
                            base: *base,
                        },
                    }),
            );
            let ids = ids(seq);
            let frame = encoder
                .encode_frame(seq as u64, &ids, &staging, &decisions, compression)
                .unwrap();
            if keep {
                deltas += frame.deltas;
                frames[seq] = frame.bytes;
            }
        }
    };
    let mut fastest = f64::INFINITY;
    let mut digests_after = Vec::new();
    hasher.digest_blocks(&after, &mut digests_after);
    send(&mut encoder, before, &digests_after, false);
    for _ in 0..REPEATS {
        let start = processor_seconds();
        send(&mut encoder, &after, &digests, true);
        fastest = fastest.min(processor_seconds() - start);
        send(&mut encoder, before, &digests_after, false);
    }
    let name = format!("{lines} words changed: encode {compression:?}");
    println!("{name:>44} {:6.2} GB/s", rate(fastest));
    let mut fastest = f64::INFINITY;
    let mut sink = Memory(Vec::new());
    let mut decoder = Decoder::new(KEY);
    for _ in 0..REPEATS {
        sink.0.clear();
        sink.0.extend_from_slice(before);
        let start = processor_seconds();
        for frame in &frames {
            let outcome = decoder.decode(frame, &Limits::default(), &mut sink);
            assert!(outcome.unwrap().rejected.is_empty());
        }
        fastest = fastest.min(processor_seconds() - start);
    }
    assert!(sink.0 == after);
    let name = format!("{lines} words changed: decode {compression:?}");
    println!("{name:>44} {:6.2} GB/s", rate(fastest));
    let sent: usize = frames.iter().map(Vec::len).sum();
    println!(
        "{:>44} {:.3}, {} of {} as deltas",
        "out / in",
        sent as f64 / size_of_val(before) as f64,
        deltas / REPEATS,
        BLOCKS
    );
}

fn ids(seq: usize) -> [BlockId; FRAME_BLOCKS] {
    std::array::from_fn(|index| BlockId {
        region: RegionId(0),
        block: (seq * FRAME_BLOCKS + index) as u64,
    })
}

/// Returns the processor time of this thread.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    stat.split(' ').next().unwrap().parse::<f64>().unwrap() / 1e9
}

fn rate(seconds: f64) -> f64 {
    (BLOCKS * BLOCK_SIZE) as f64 / seconds / 1e9
}

/// Runs all steps frame by frame: copy to the staging buffer, stage, encode, decode into memory.
fn pipeline(name: &str, content: &[Block], compression: Compression) {
    let hasher = Hasher::new(KEY);
    // As in a first pass: the encoder remembers what later deltas need.
    let mut encoder = Encoder::for_guest(BLOCKS, 16 << 20);
    let mut staging = vec![[0; BLOCK_SIZE]; FRAME_BLOCKS];
    let mut frames = vec![Vec::new(); BLOCKS / FRAME_BLOCKS];
    let (mut staged, mut decisions) = (Vec::new(), Vec::new());
    report(&format!("{name}: encode {compression:?}"), || {
        for (seq, blocks) in content.chunks(FRAME_BLOCKS).enumerate() {
            staging.copy_from_slice(blocks);
            staged.clear();
            decisions.clear();
            hasher.stage(&staging, &mut staged);
            decisions.extend(staged.iter().map(|staged| match *staged {
                Staged::Zero => Decision::Zero,
                Staged::Content(digest) => Decision::Literal { digest },
            }));
            let ids = ids(seq);
            let frame = encoder.encode_frame(seq as u64, &ids, &staging, &decisions, compression);
            frames[seq] = frame.unwrap().bytes;
        }
    });
    let sent: usize = frames.iter().map(Vec::len).sum();
    let mut sink = Memory(vec![[0; BLOCK_SIZE]; BLOCKS]);
    let mut decoder = Decoder::new(KEY);
    report(&format!("{name}: decode {compression:?}"), || {
        for frame in &frames {
            decoder
                .decode(frame, &Limits::default(), &mut sink)
                .unwrap();
        }
    });
    assert!(sink.0 == content);
    println!(
        "{:>44} {:.3}",
        "out / in",
        sent as f64 / (BLOCKS * BLOCK_SIZE) as f64
    );
}

/// Prints the best rate of several runs over the input.
fn report(name: &str, mut run: impl FnMut()) {
    let seconds = (0..REPEATS)
        .map(|_| {
            let start = processor_seconds();
            run();
            processor_seconds() - start
        })
        .fold(f64::INFINITY, f64::min);
    println!("{name:>44} {:6.2} GB/s", rate(seconds));
}

/// A destination in memory.
struct Memory(Vec<Block>);

impl BlockSink for Memory {
    type Error = std::convert::Infallible;

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

    fn read_shared(&mut self, _: MigrationId, _: BlockId, _: &mut Block) -> bool {
        false
    }

    fn apply(&mut self, _: u64, writes: &[BlockWrite<'_>]) -> Result<(), Self::Error> {
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

fn input(fill: impl Fn(usize, &mut Block)) -> Vec<Block> {
    let mut blocks = vec![[0; BLOCK_SIZE]; BLOCKS];
    blocks
        .iter_mut()
        .enumerate()
        .for_each(|(index, block)| fill(index, block));
    blocks
}

fn noise(seed: u64, block: &mut Block) {
    blake3::Hasher::new()
        .update(&seed.to_le_bytes())
        .finalize_xof()
        .fill(block);
}

/// Words from a small dictionary in random order: compresses slightly better than 3:1.
fn prose(seed: u64, block: &mut Block) {
    let mut random = [0; BLOCK_SIZE];
    noise(seed, &mut random);
    let mut words = Vec::with_capacity(BLOCK_SIZE + 16);
    for pair in random.as_chunks::<2>().0 {
        if words.len() >= BLOCK_SIZE {
            break;
        }
        let word = u16::from_le_bytes(*pair) % 2048;
        words.extend_from_slice(format!("w{word:x}ord ").as_bytes());
    }
    block.copy_from_slice(&words[..BLOCK_SIZE]);
}
