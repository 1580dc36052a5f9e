//! Implements `lab bench redundancy`: reproduces the redundancy figures of CloudNet's paper with
//! our inputs, beside the results of Longhaul's codec for the same pages.
//!
//! Rows name their figure of the paper. Figures 5 and 10 are about a first pass, 7 about dirty
//! pages, 14 about everything sent; figure 8 is a replay of a first and a dirty pass: the bytes
//! sent with each optimisation, relative to those without any. Longhaul's performance in moves is
//! measured by `lab bench memory`.

use longhaul_cloudnet::{CACHE_BYTES, PAGE_BYTES, Sent, blocks, delta, strings};
use longhaul_codec::is_zero;
use serde::Serialize;

use super::codec::{self, Input};
use super::document::Document;
use super::{Bench, Options};
use longhaul_lab::error::LabError;
use longhaul_lab::interrupt;

pub(super) const BENCH: Bench = Bench {
    name: "redundancy",
    about: "figures 5, 7, 8, 10 and 14 of CloudNet's paper on our inputs, beside Longhaul's codec",
    minutes: (1, 1),
    run,
};

/// Blocks a page in figures 5 and 14; for strings, fingerprints a page.
const PARTS: [usize; 6] = [1, 2, 4, 8, 16, 32];
/// Blocks a page in all other figures, as in the paper's experiments.
const PAPER_PARTS: usize = 4;
/// Width of a bar in figure 7, in bytes.
const BAR_BYTES: usize = 512;

/// One value of a figure.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Row {
    figure: u32,
    input: String,
    /// BLAKE3 of the input's pages.
    input_digest: String,
    pages: usize,
    dirty_pages: usize,
    system: &'static str,
    /// The category of the value: a number of blocks, an upper bound of bytes, a kind of page.
    x: String,
    /// The share of bytes, or of pages in figure 7.
    share: f64,
}

fn run(options: &Options, document: &mut Document) -> Result<(), LabError> {
    let own = options.input.iter().map(codec::OwnInput::whole);
    for input in codec::known(options)?.into_iter().map(Ok).chain(own) {
        let input = input?;
        let mut figures = Figures {
            input: &input,
            document: &mut *document,
        };
        for figure in [Figures::five, Figures::seven, Figures::eight, Figures::ten] {
            figure(&mut figures)?;
        }
        figures.fourteen()?;
    }
    Ok(())
}

struct Figures<'a> {
    input: &'a Input,
    document: &'a mut Document,
}

impl Figures<'_> {
    fn add(&mut self, figure: u32, system: &'static str, x: impl ToString, share: f64) {
        let row = Row {
            figure,
            input: self.input.name.clone(),
            input_digest: self.input.digest.clone(),
            pages: self.input.first.len(),
            dirty_pages: self.input.after.len(),
            system,
            x: x.to_string(),
            share,
        };
        let line = format!(
            "figure {figure:<2} {:<9} {:<16} {:>9}: {:5.1} %",
            row.input,
            system,
            row.x,
            share * 100.0
        );
        self.document.add_row(&row, &line);
    }

    /// Measures redundancy by blocks a page.
    fn five(&mut self) -> Result<(), LabError> {
        for parts in PARTS {
            let found = self.blocks(parts, Optimisations::REDUNDANCY)?.first.found();
            self.add(5, "cloudnet-blocks", parts, found);
        }
        let own = self.own("longhaul-raw")?;
        self.add(5, "longhaul", "whole pages", 1.0 - own.first);
        let packed = self.own("longhaul-zstd-1")?;
        self.add(5, "longhaul", "compressed too", 1.0 - packed.first);
        Ok(())
    }

    /// Measures the sizes of deltas: the share of dirty pages whose delta is at most this long, and
    /// longer than the bar before.
    fn seven(&mut self) -> Result<(), LabError> {
        if self.input.after.is_empty() {
            return Ok(());
        }
        let pairs = || self.input.before.iter().zip(&self.input.after);
        let xor = pairs().map(|(before, after)| {
            let mut bytes = Vec::new();
            delta::encode(before, after, usize::MAX, &mut bytes);
            Ok(bytes.len())
        });
        let xor = bars(xor)?;
        let own = pairs().map(|(before, after)| {
            let bytes = codec::delta_bytes(before, after)?;
            Ok(bytes.unwrap_or(usize::MAX))
        });
        let own = bars(own)?;
        for (system, bars) in [("cloudnet-xor-rle", xor), ("longhaul", own)] {
            for (index, share) in bars.into_iter().enumerate() {
                let bound = (index + 1) * BAR_BYTES;
                let x = match bound > PAGE_BYTES {
                    true => "whole page".to_owned(),
                    false => bound.to_string(),
                };
                self.add(7, system, x, share);
            }
        }
        Ok(())
    }

    /// Measures the bytes sent with each optimisation, relative to those with none: in all, and in
    /// the dirty pass.
    fn eight(&mut self) -> Result<(), LabError> {
        let pages = self.input.first.len() as f64;
        let dirty = self.input.after.len() as f64;
        let all = |first: f64, last: f64| (first * pages + last * dirty) / (pages + dirty);
        for (name, optimisations) in [
            ("cloudnet-redundancy", Optimisations::REDUNDANCY),
            ("cloudnet-deltas", Optimisations::DELTAS),
            ("cloudnet-both", Optimisations::BOTH),
        ] {
            let passes = self.blocks(PAPER_PARTS, optimisations)?;
            let (first, last) = (passes.first.ratio(), passes.dirty.ratio());
            self.add(8, name, "data", all(first, last));
            self.add(8, name, "last pass", last);
        }
        for (name, pipeline) in [
            ("longhaul-raw", "longhaul-raw"),
            ("longhaul-lz4", "longhaul-lz4"),
            ("longhaul-zstd-3", "longhaul-zstd-3"),
        ] {
            let own = self.own(pipeline)?;
            self.add(8, name, "data", all(own.first, own.dirty));
            self.add(8, name, "last pass", own.dirty);
        }
        Ok(())
    }

    /// Measures the kinds of redundancy in a first pass.
    fn ten(&mut self) -> Result<(), LabError> {
        let size = PAGE_BYTES / PAPER_PARTS;
        let blocks = self.input.first.iter().flat_map(|page| page.chunks(size));
        let zero = blocks.filter(|block| block.iter().all(|byte| *byte == 0));
        let zero = zero.count() as f64 / (self.input.first.len() * PAPER_PARTS) as f64;
        let found = self
            .blocks(PAPER_PARTS, Optimisations::REDUNDANCY)?
            .first
            .found();
        self.kinds("cloudnet-1k", zero, found, found);
        let zeros = self.input.first.iter().filter(|page| is_zero(page));
        let zero = zeros.count() as f64 / self.input.first.len() as f64;
        let (own, packed) = (self.own("longhaul-raw")?, self.own("longhaul-zstd-1")?);
        self.kinds("longhaul", zero, 1.0 - own.first, 1.0 - packed.first);
        Ok(())
    }

    fn kinds(&mut self, system: &'static str, zero: f64, found: f64, saved: f64) {
        self.add(10, system, "zero", zero);
        // Each new zero block that was evicted from the cache is sent again.
        self.add(10, system, "other redundancy", (found - zero).max(0.0));
        self.add(10, system, "compressed away", saved - found);
        self.add(10, system, "sent", 1.0 - saved);
    }

    /// Measures blocks and strings, over everything sent.
    fn fourteen(&mut self) -> Result<(), LabError> {
        for parts in PARTS {
            let blocks = self.blocks(parts, Optimisations::REDUNDANCY)?.all();
            self.add(14, "cloudnet-blocks", parts, blocks.found());
            let strings = self.strings(parts)?;
            self.add(14, "cloudnet-rabin", parts, strings.found());
        }
        let own = self.own("longhaul-raw")?;
        let (pages, dirty) = (self.input.first.len() as f64, self.input.after.len() as f64);
        let sent = (own.first * pages + own.dirty * dirty) / (pages + dirty);
        self.add(14, "longhaul", "pages and deltas", 1.0 - sent);
        Ok(())
    }

    /// Returns the results of CloudNet's blocks for both passes.
    fn blocks(&self, parts: usize, with: Optimisations) -> Result<Passes, LabError> {
        if interrupt::requested() {
            return Err(LabError::Interrupted);
        }
        let config = blocks::Config {
            block_bytes: PAGE_BYTES / parts,
            cache_bytes: CACHE_BYTES,
            redundancy: with.redundancy,
            deltas: with.deltas,
            pages: self.pages(),
        };
        let mut encoder = blocks::Encoder::new(config).map_err(|error| codec::wrong(&error))?;
        self.passes(|number, page, out| encoder.page(number, page, out))
    }

    /// Returns the results of CloudNet's strings for everything sent.
    fn strings(&self, fingerprints: usize) -> Result<Pass, LabError> {
        if interrupt::requested() {
            return Err(LabError::Interrupted);
        }
        let config = strings::Config {
            fingerprints,
            cache_bytes: CACHE_BYTES,
            pages: self.pages(),
        };
        let mut encoder = strings::Encoder::new(config).map_err(|error| codec::wrong(&error))?;
        let passes = self.passes(|number, page, out| encoder.page(number, page, out))?;
        Ok(passes.all())
    }

    fn pages(&self) -> u64 {
        (self.input.first.len() + self.input.before.len()) as u64
    }

    fn passes(
        &self,
        mut encode: impl FnMut(
            u64,
            &longhaul_cloudnet::Page,
            &mut Vec<u8>,
        ) -> Result<Sent, longhaul_cloudnet::NoSuchPage>,
    ) -> Result<Passes, LabError> {
        let mut out = Vec::new();
        let mut pass = |first: usize, pages: &[longhaul_cloudnet::Page]| {
            let mut pass = Pass::default();
            for (page, number) in pages.iter().zip(first as u64..) {
                out.clear();
                let sent = encode(number, page, &mut out).map_err(|error| codec::wrong(&error))?;
                pass.sent += sent;
                pass.bytes += out.len() as u64;
            }
            Ok::<_, LabError>(pass)
        };
        let dirty = self.input.first.len();
        let first = pass(0, &self.input.first)?;
        // The old content of the dirty pages was sent in the first pass.
        pass(dirty, &self.input.before)?;
        Ok(Passes {
            first,
            dirty: pass(dirty, &self.input.after)?,
        })
    }

    /// Returns the ratio of output to input of one of Longhaul's pipelines.
    fn own(&self, pipeline: &str) -> Result<codec::Ratios, LabError> {
        if interrupt::requested() {
            return Err(LabError::Interrupted);
        }
        codec::ratios(self.input, pipeline)
    }
}

/// Returns the shares of lengths up to each bar's bound; those of the last bar exceed a page.
fn bars(lengths: impl Iterator<Item = Result<usize, LabError>>) -> Result<Vec<f64>, LabError> {
    let last = PAGE_BYTES / BAR_BYTES;
    let (mut bars, mut all) = (vec![0.0; last + 1], 0.0);
    for length in lengths {
        let bar = length?.div_ceil(BAR_BYTES).max(1) - 1;
        bars[bar.min(last)] += 1.0;
        all += 1.0;
    }
    Ok(bars.into_iter().map(|count| count / all).collect())
}

#[derive(Clone, Copy)]
struct Optimisations {
    redundancy: bool,
    deltas: bool,
}

impl Optimisations {
    const REDUNDANCY: Self = Self {
        redundancy: true,
        deltas: false,
    };
    const DELTAS: Self = Self {
        redundancy: false,
        deltas: true,
    };
    const BOTH: Self = Self {
        redundancy: true,
        deltas: true,
    };
}

/// How the pages of a pass were sent, and the number of bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Pass {
    sent: Sent,
    bytes: u64,
}

impl Pass {
    fn guest_bytes(&self) -> f64 {
        (self.sent.found + self.sent.delta + self.sent.whole) as f64
    }

    /// Returns the share found in the caches.
    fn found(&self) -> f64 {
        self.sent.found as f64 / self.guest_bytes()
    }

    /// Returns the ratio of output to input.
    fn ratio(&self) -> f64 {
        self.bytes as f64 / self.guest_bytes()
    }
}

struct Passes {
    first: Pass,
    dirty: Pass,
}

impl Passes {
    fn all(&self) -> Pass {
        let mut sent = self.first.sent;
        sent += self.dirty.sent;
        Pass {
            sent,
            bytes: self.first.bytes + self.dirty.bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    /// Returns pages of which a quarter is zero and a quarter a copy; one half of the dirty ones
    /// changed slightly, the other wholly.
    fn input() -> Input {
        let page = |seed: usize| -> [u8; PAGE_BYTES] {
            let mut state = seed as u64 + 1;
            std::array::from_fn(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (state >> 56) as u8
            })
        };
        let first: Vec<_> = (0..200)
            .map(|index| match index % 4 {
                0 => [0; PAGE_BYTES],
                1 => page(7),
                _ => page(100 + index),
            })
            .collect();
        let before: Vec<_> = (0..40).map(|index| page(1000 + index)).collect();
        let changed = before.iter().enumerate().map(|(index, before)| {
            let mut after = *before;
            after[9] ^= 1;
            if index % 2 == 0 {
                after
            } else {
                page(2000 + index)
            }
        });
        Input {
            name: "x".to_owned(),
            digest: String::new(),
            after: changed.collect(),
            first,
            before,
        }
    }

    #[test]
    fn the_figures_show_what_is_in_the_pages() {
        let mut document = Document::new("redundancy");
        let input = input();
        let mut figures = Figures {
            input: &input,
            document: &mut document,
        };
        for figure in [Figures::five, Figures::seven, Figures::eight, Figures::ten] {
            figure(&mut figures).unwrap();
        }
        figures.fourteen().unwrap();
        let share = |figure: u32, system: &str, x: &str| {
            let is =
                |row: &&Value| row["figure"] == figure && row["system"] == system && row["x"] == x;
            document.rows().iter().find(is).unwrap()["share"]
                .as_f64()
                .unwrap()
        };
        let close = |value: f64, expected: f64| {
            assert!((value - expected).abs() < 0.02, "{value}, not {expected}");
        };
        for parts in ["1", "4", "16"] {
            close(share(5, "cloudnet-blocks", parts), 0.5);
        }
        close(share(5, "longhaul", "whole pages"), 0.5);
        close(share(7, "cloudnet-xor-rle", "512"), 0.5);
        close(share(7, "cloudnet-xor-rle", "whole page"), 0.5);
        close(share(7, "longhaul", "512"), 0.5);
        close(share(7, "longhaul", "whole page"), 0.5);
        close(share(8, "longhaul-raw", "last pass"), 0.5);
        close(share(8, "cloudnet-deltas", "last pass"), 0.5);
        close(share(8, "cloudnet-deltas", "data"), 220.0 / 240.0);
        close(share(8, "cloudnet-both", "data"), 120.0 / 240.0);
        close(share(10, "cloudnet-1k", "zero"), 0.25);
        close(share(10, "longhaul", "other redundancy"), 0.25);
        close(share(10, "longhaul", "sent"), 0.5);
        close(share(14, "cloudnet-rabin", "4"), 0.5);
    }
}
