//! Implements `lab bench codec`: the costs and savings of each encoding of guest memory, on one
//! core.
//!
//! The first pass sends pages to a destination that knows nothing. The dirty pass sends pages of
//! which the destination has an earlier version. Several copies of an input are in memory, more
//! than the processor's caches hold, and each is sent to a destination of its own; the received
//! content is compared.

mod inputs;
mod longhaul;
mod measure;
mod peer;

use std::hint::black_box;
use std::time::Duration;

use longhaul_codec::Compression;
use longhaul_protocol::BLOCK_SIZE;
use serde::Serialize;

pub(super) use self::inputs::Input;
pub use self::inputs::{OwnInput, write_sample};
pub(super) use self::longhaul::delta_bytes;
use self::longhaul::{Longhaul, Raw};
use self::measure::{Clock, Cost, Share};
use self::peer::CloudNet;
use super::document::{Document, Sense, median};
use super::{Bench, Options};
use longhaul_lab::error::LabError;
use longhaul_lab::interrupt;

/// The arena's own generator of content.
#[path = "../../../../lab/arena/src/content.rs"]
mod content;

pub(super) const BENCH: Bench = Bench {
    name: "codec",
    about: "encoding guest memory: rates and ratios of Longhaul's pipelines and CloudNet's, \
         beside memcpy",
    minutes: (2, 1),
    run,
};

type Block = [u8; BLOCK_SIZE];

/// Bytes of all copies of an input: more than caches hold.
const COPIES_BYTES: usize = 96 << 20;
/// Bytes of other memory: more than caches hold, too.
const OTHER_BYTES: usize = 48 << 20;
const MEMCPY_ROUNDS: usize = 3;
const REPEATS: u32 = 5;

/// The pipeline of `auto` on a link as fast as the encoding of one core.
const FAST: &str = "longhaul-lz4-fast";
const NO_ENTROPY: &str = "longhaul-raw";
/// CloudNet's two variants. The first is that of its paper's experiments: four blocks a page, and
/// deltas.
const REFERENCES: [(&str, &str); 2] = [("blocks", "cloudnet-1k"), ("rabin", "cloudnet-rabin-4")];

const FIRST_LIMIT: f64 = 0.07;
const FIRST_NO_ENTROPY_LIMIT: f64 = 0.3;
const DIRTY_LIMIT: f64 = 0.1;
const CLOUDNET_LIMIT: f64 = 5.0;

/// The pipelines, in the order of their runs.
const PIPELINES: [(&str, Kind); 11] = [
    ("raw", Kind::Raw),
    (NO_ENTROPY, Kind::Longhaul(Compression::Raw)),
    (FAST, Kind::Longhaul(Compression::Lz4Fast)),
    ("longhaul-lz4", Kind::Longhaul(Compression::Lz4)),
    (
        "longhaul-zstd-fast-1",
        Kind::Longhaul(Compression::Zstd(-1)),
    ),
    ("longhaul-zstd-1", Kind::Longhaul(Compression::Zstd(1))),
    ("longhaul-zstd-3", Kind::Longhaul(Compression::Zstd(3))),
    ("cloudnet-1k", Kind::Blocks(1024)),
    ("cloudnet-2k", Kind::Blocks(2048)),
    ("cloudnet-4k", Kind::Blocks(4096)),
    ("cloudnet-rabin-4", Kind::Strings(4)),
];

#[derive(Clone, Copy)]
enum Kind {
    /// Copying the blocks into frames, and nothing else.
    Raw,
    Longhaul(Compression),
    /// CloudNet's blocks, of this many bytes.
    Blocks(usize),
    /// CloudNet's strings, by this many fingerprints a page.
    Strings(usize),
}

impl Kind {
    fn make(self, pages: usize) -> Result<Box<dyn Pipeline>, LabError> {
        Ok(match self {
            Self::Raw => Box::new(Raw::new()),
            Self::Longhaul(compression) => Box::new(Longhaul::new(compression, pages)),
            Self::Blocks(bytes) => Box::new(CloudNet::blocks(bytes, pages)?),
            Self::Strings(fingerprints) => Box::new(CloudNet::strings(fingerprints, pages)?),
        })
    }
}

/// A source and its destination.
trait Pipeline {
    /// Begins a new migration.
    fn clear(&mut self);

    /// Transfers blocks, the first of which is number `first`, to the destination's memory.
    fn send(
        &mut self,
        first: usize,
        blocks: &[Block],
        destination: &mut [Block],
    ) -> Result<Cost, LabError>;
}

/// One pass of one pipeline.
#[derive(Debug, Clone, Serialize)]
struct Row {
    input: String,
    /// BLAKE3 of the input's pages.
    input_digest: String,
    pass: &'static str,
    pipeline: &'static str,
    repeat: u32,
    encode_bytes_per_s: f64,
    decode_bytes_per_s: f64,
    /// The ratio of output to input.
    ratio: f64,
    /// Measured just before.
    memcpy_bytes_per_s: f64,
    /// Shares of the time of encoding.
    share: Share,
}

fn run(options: &Options, document: &mut Document) -> Result<(), LabError> {
    let inputs = inputs(options)?;
    let mut rows = Vec::new();
    for repeat in 1..=options.repeats_or(REPEATS) {
        for input in &inputs {
            let mut bed = TestBed::new(input);
            for (pipeline, kind) in PIPELINES {
                if !options.wants_system(pipeline) {
                    continue;
                }
                if interrupt::requested() {
                    return Err(LabError::Interrupted);
                }
                let memcpy_bytes_per_s = bed.memcpy()?;
                let mut made = kind.make(bed.pages())?;
                for (pass, cost) in ["first", "dirty"].into_iter().zip(bed.run(&mut *made)?) {
                    let row = Row {
                        input: input.name.clone(),
                        input_digest: input.digest.clone(),
                        pass,
                        pipeline,
                        repeat,
                        encode_bytes_per_s: cost.rate(cost.encode()),
                        decode_bytes_per_s: cost.rate(cost.decode),
                        ratio: cost.ratio(),
                        memcpy_bytes_per_s,
                        share: cost.share(),
                    };
                    document.add_row(&row, &show(&row));
                    rows.push(row);
                }
            }
        }
    }
    for input in &inputs {
        judge(&input.name, &rows, document);
    }
    Ok(())
}

/// Returns the inputs: the user's own, the named ones, or the laboratory's samples.
fn inputs(options: &Options) -> Result<Vec<Input>, LabError> {
    let own = options.input.iter().map(|own| own.sample(options.seed));
    let mut inputs = own.collect::<Result<Vec<_>, _>>()?;
    inputs.extend(known(options)?);
    Ok(inputs)
}

/// Returns the named inputs; if there are none, nor files of the user's own, the laboratory's
/// samples.
pub(super) fn known(options: &Options) -> Result<Vec<Input>, LabError> {
    let names = match options.workload.is_empty() {
        true if options.input.is_empty() => inputs::names()?,
        _ => options.workload.clone(),
    };
    let known = names.iter().map(|name| {
        let input = match inputs::committed(name)? {
            None => inputs::filled(name, options.seed),
            sample => sample,
        };
        input.ok_or_else(|| {
            LabError::Which(format!(
                "there is no input `{name}` (hint: {}, or --input for a guest of your own)",
                inputs::FILLED.join(", ")
            ))
        })
    });
    known.collect()
}

fn show(row: &Row) -> String {
    format!(
        "{:<9} {:<5} {:<20} encode {:5.2} GB/s  decode {:5.2} GB/s  ratio {:.3}  memcpy {:.1} GB/s",
        row.input,
        row.pass,
        row.pipeline,
        row.encode_bytes_per_s / 1e9,
        row.decode_bytes_per_s / 1e9,
        row.ratio,
        row.memcpy_bytes_per_s / 1e9,
    )
}

/// Copies of an input, and as many destinations.
struct TestBed {
    first: usize,
    /// Memory that displaces the content of all caches: in a move the last pass is long ago.
    other: Vec<u8>,
    sources: Vec<Vec<Block>>,
    destinations: Vec<Vec<Block>>,
}

impl TestBed {
    /// Creates enough copies to exceed the caches.
    fn new(input: &Input) -> Self {
        let pages = input.first.len() + input.before.len() + input.after.len();
        Self::of(input, COPIES_BYTES.div_ceil((pages * BLOCK_SIZE).max(1)))
    }

    fn of(input: &Input, copies: usize) -> Self {
        let source = [&input.first[..], &input.before, &input.after].concat();
        let pages = input.first.len() + input.before.len();
        Self {
            first: input.first.len(),
            other: vec![1; OTHER_BYTES],
            sources: vec![source; copies],
            // Not zero, so that their memory is allocated before anything is measured.
            destinations: vec![vec![[1; BLOCK_SIZE]; pages]; copies],
        }
    }

    /// Returns the number of pages of the moved memory.
    fn pages(&self) -> usize {
        self.destinations.first().map_or(0, Vec::len)
    }

    /// Measures a plain copy of all inputs to the destinations, one after another.
    fn memcpy(&mut self) -> Result<f64, LabError> {
        let pages = self.pages();
        let mut rates = Vec::new();
        for _ in 0..MEMCPY_ROUNDS {
            let (mut clock, mut time) = (Clock::start()?, Duration::ZERO);
            for (source, destination) in self.sources.iter().zip(&mut self.destinations) {
                black_box(destination).copy_from_slice(black_box(&source[..pages]));
            }
            clock.lap(&mut time)?;
            let bytes = self.sources.len() * pages * BLOCK_SIZE;
            rates.push(bytes as f64 / time.as_secs_f64());
        }
        // Never empty.
        Ok(median(rates).unwrap_or(f64::NAN))
    }

    /// Sends every copy, and compares the received content; returns the cost of the first and the
    /// dirty pass.
    fn run(&mut self, pipeline: &mut dyn Pipeline) -> Result<[Cost; 2], LabError> {
        let mut costs = [Cost::default(); 2];
        let pages = self.pages();
        for (source, destination) in self.sources.iter().zip(&mut self.destinations) {
            let (held, after) = source.split_at(pages);
            let (first, before) = held.split_at(self.first);
            pipeline.clear();
            costs[0] += pipeline.send(0, first, destination)?;
            // The old content of the dirty pages is there before their pass.
            pipeline.send(self.first, before, destination)?;
            same(held, destination)?;
            black_box(&mut self.other).fill(0);
            costs[1] += pipeline.send(self.first, after, destination)?;
            same(first, &destination[..self.first])?;
            same(after, &destination[self.first..])?;
        }
        Ok(costs)
    }
}

fn same(source: &[Block], destination: &[Block]) -> Result<(), LabError> {
    match source == destination {
        true => Ok(()),
        false => Err(wrong(&"the decoded memory differs from the source's")),
    }
}

pub(super) fn wrong(message: &impl ToString) -> LabError {
    LabError::Answer {
        what: "the codec".to_owned(),
        message: message.to_string(),
    }
}

/// The ratio of output to input of both passes.
pub(super) struct Ratios {
    pub(super) first: f64,
    pub(super) dirty: f64,
}

/// Returns a pipeline's ratios for an input; the received content is compared.
pub(super) fn ratios(input: &Input, pipeline: &str) -> Result<Ratios, LabError> {
    let kind = PIPELINES.iter().find(|(name, _)| *name == pipeline);
    let (_, kind) = kind.ok_or_else(|| wrong(&format!("there is no pipeline {pipeline}")))?;
    let mut bed = TestBed::of(input, 1);
    let [first, dirty] = bed.run(&mut *kind.make(bed.pages())?)?;
    Ok(Ratios {
        first: first.ratio(),
        dirty: dirty.ratio(),
    })
}

/// Computes the checks of one input from the rows.
fn judge(input: &str, rows: &[Row], document: &mut Document) {
    let of = |pipeline: &str, pass: &str, value: fn(&Row) -> f64| {
        let rows = rows.iter().filter(|row| row.input == input);
        let rows = rows.filter(|row| row.pipeline == pipeline && row.pass == pass);
        median(rows.map(value))
    };
    let of_memcpy = |row: &Row| row.encode_bytes_per_s / row.memcpy_bytes_per_s;
    for (name, pipeline, pass, limit) in [
        ("first_of_memcpy", FAST, "first", FIRST_LIMIT),
        (
            "first_no_entropy_of_memcpy",
            NO_ENTROPY,
            "first",
            FIRST_NO_ENTROPY_LIMIT,
        ),
        ("dirty_of_memcpy", FAST, "dirty", DIRTY_LIMIT),
    ] {
        let value = of(pipeline, pass, of_memcpy);
        document.add_check(&format!("{name}.{input}"), value, Sense::AtLeast, limit);
    }
    let passes = ["first", "dirty"];
    let of_encode = |row: &Row| row.decode_bytes_per_s / row.encode_bytes_per_s;
    let own = PIPELINES
        .iter()
        .filter(|(_, kind)| matches!(kind, Kind::Longhaul(_)));
    let slowest = own
        .flat_map(|(pipeline, _)| passes.map(|pass| of(pipeline, pass, of_encode)))
        .flatten()
        .min_by(f64::total_cmp);
    let name = format!("decode_of_encode.{input}");
    document.add_check(&name, slowest, Sense::AtLeast, 1.0);
    for pass in passes {
        let rate = |pipeline| of(pipeline, pass, |row| row.encode_bytes_per_s);
        for (way, reference) in REFERENCES {
            // Neither of the two has entropy coding.
            let value = rate(NO_ENTROPY).zip(rate(reference));
            let value = value.map(|(own, reference)| own / reference);
            let name = format!("{pass}_of_cloudnet_{way}.{input}");
            document.add_check(&name, value, Sense::AtLeast, CLOUDNET_LIMIT);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns one copy of a part of an input.
    fn bed(name: &str) -> TestBed {
        let mut input = inputs::filled(name, 5).expect("a known input");
        input.first.truncate(500);
        input.before.truncate(200);
        input.after.truncate(200);
        TestBed::of(&input, 1)
    }

    /// Returns the ratios of the first and the dirty pass.
    fn ratios(input: &str, kind: Kind) -> [f64; 2] {
        let mut bed = bed(input);
        let mut pipeline = kind.make(bed.pages()).unwrap();
        bed.run(&mut *pipeline).unwrap().map(|cost| cost.ratio())
    }

    #[test]
    fn every_pipeline_brings_the_memory_over_in_both_passes() {
        for input in inputs::FILLED {
            for (name, kind) in PIPELINES {
                let [first, dirty] = ratios(input, kind);
                assert!(first < 1.01 && dirty < 1.01, "{input} {name}");
            }
        }
    }

    #[test]
    fn inputs_are_what_their_names_say() {
        let [raw, zstd] = [Compression::Raw, Compression::Zstd(1)].map(Kind::Longhaul);
        assert!(ratios("random", zstd)[0] > 0.99);
        let text = ratios("text", zstd)[0];
        assert!((0.25..0.45).contains(&text), "about 3 : 1, {text}");
        let mix = ratios("mix", raw)[0];
        assert!((0.70..0.80).contains(&mix), "less zeros and copies: {mix}");
        assert_eq!(ratios("mix", Kind::Raw), [1.0, 1.0]);
        let [first, dirty] = ratios("random", Kind::Blocks(1024));
        assert!(first > 1.0 && dirty < 0.3, "a delta is a part: {dirty}");
    }

    #[test]
    fn a_second_migration_knows_nothing_of_the_first() {
        for (name, kind) in PIPELINES {
            let mut bed = bed("mix");
            let mut pipeline = kind.make(bed.pages()).unwrap();
            let mut ratios = || bed.run(&mut *pipeline).unwrap().map(|cost| cost.ratio());
            assert_eq!(ratios(), ratios(), "{name}");
        }
    }

    #[test]
    fn a_destination_that_differs_is_found() {
        struct Nothing;
        impl Pipeline for Nothing {
            fn clear(&mut self) {}
            fn send(&mut self, _: usize, _: &[Block], _: &mut [Block]) -> Result<Cost, LabError> {
                Ok(Cost::default())
            }
        }
        let error = bed("mix").run(&mut Nothing).unwrap_err().to_string();
        assert!(error.contains("differs"), "{error}");
    }

    #[test]
    fn the_bars_are_computed_from_medians() {
        let row = |pipeline, pass, encode: f64, decode: f64| Row {
            input: "x".to_owned(),
            input_digest: String::new(),
            pass,
            pipeline,
            repeat: 1,
            encode_bytes_per_s: encode,
            decode_bytes_per_s: decode,
            ratio: 0.5,
            memcpy_bytes_per_s: 100.0,
            share: Share::default(),
        };
        let mut rows = Vec::new();
        for pass in ["first", "dirty"] {
            for encode in [1.0, 8.0, 9.0] {
                rows.push(row(FAST, pass, encode, 16.0));
            }
            rows.push(row(NO_ENTROPY, pass, 31.0, 30.0));
            rows.push(row("cloudnet-1k", pass, 5.0, 1.0));
        }
        let mut document = Document::new("codec");
        judge("x", &rows, &mut document);
        let value = serde_json::to_value(&document).unwrap();
        let of = |name: &str| {
            let mut checks = value["checks"].as_array().unwrap().iter();
            let check = checks.find(|check| check["name"] == name).unwrap();
            (check["value"].as_f64().unwrap(), check["holds"] == true)
        };
        assert_eq!(of("first_of_memcpy.x"), (0.08, true));
        assert_eq!(of("first_no_entropy_of_memcpy.x"), (0.31, true));
        assert_eq!(of("dirty_of_memcpy.x"), (0.08, false));
        assert_eq!(of("first_of_cloudnet_blocks.x"), (6.2, true));
        assert!(!of("decode_of_encode.x").1);
        let mut document = Document::new("codec");
        judge("y", &rows, &mut document);
        assert!(!document.holds(), "without rows nothing holds");
    }
}
