//! Provides the inputs of the codec bench: samples of real guests' memory in the repository, memory
//! of a guest of the user's own, or memory filled like the arena's.
//!
//! A sample holds pages of a first pass, and dirty pages in an old and a new version. Runs of 64
//! neighbours are drawn at random, from all pages and from the dirty ones, so that a frame of them
//! resembles one of the whole guest.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use longhaul_protocol::BLOCK_SIZE;
use serde::Deserialize;

use super::content::{Content as Filling, Kind, Random};
use super::{Block, wrong};
use longhaul_lab::error::{During, LabError};

/// The number of pages drawn together.
const RUN: usize = 64;
/// The number of runs of a sample: of all pages, and of the dirty ones.
const RUNS: usize = 16;
const DIRTY_RUNS: usize = 8;
/// The maximum size of a sample in bytes, unpacked.
const SAMPLE_BYTES_MAX: usize = 64 << 20;
/// Pages of memory filled like the arena's.
const FILLED_PAGES: usize = 2048;
/// Bytes of a page that a rewrite changes: the arena's default.
const WRITE_BYTES: usize = 512;

/// The folder of the laboratory's own samples in the checkout.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/inputs");

/// The samples in `inputs.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    #[serde(default)]
    input: Vec<Committed>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Committed {
    name: String,
    file: String,
    /// BLAKE3 of the pages.
    digest: String,
    /// The number of pages of a first pass; the others are dirty ones in two versions.
    pages: usize,
}

/// Names of inputs filled like the arena's memory.
pub(super) const FILLED: [&str; 3] = ["mix", "text", "random"];

/// Memory to encode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::bench) struct Input {
    /// Its name in rows.
    pub(in crate::bench) name: String,
    /// BLAKE3 of all its pages, in hexadecimal digits.
    pub(in crate::bench) digest: String,
    /// Pages of a first pass.
    pub(in crate::bench) first: Vec<Block>,
    /// The old content of the dirty pages.
    pub(in crate::bench) before: Vec<Block>,
    /// Their new content.
    pub(in crate::bench) after: Vec<Block>,
}

impl Input {
    fn new(name: &str, first: Vec<Block>, before: Vec<Block>, after: Vec<Block>) -> Self {
        let mut hasher = blake3::Hasher::new();
        for pages in [&first, &before, &after] {
            hasher.update(pages.as_flattened());
        }
        Self {
            name: name.to_owned(),
            digest: hasher.finalize().to_hex().to_string(),
            first,
            before,
            after,
        }
    }
}

/// Memory of a user's own guest: `NAME=FIRST,LATER`, two snapshots of all of it; or
/// `NAME=PAGES,BEFORE,AFTER`, some pages, and some dirty ones in two versions. Files of raw pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnInput {
    name: String,
    files: Files,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Files {
    Snapshots(PathBuf, PathBuf),
    Pages(PathBuf, PathBuf, PathBuf),
}

impl FromStr for OwnInput {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, files) = text.split_once('=').unwrap_or_default();
        let files: Vec<&str> = files.split(',').collect();
        let files = match files[..] {
            [first, later] => Files::Snapshots(first.into(), later.into()),
            [pages, before, after] => Files::Pages(pages.into(), before.into(), after.into()),
            _ => return Err("give NAME=FIRST,LATER or NAME=PAGES,BEFORE,AFTER".to_owned()),
        };
        let name = name.to_owned();
        Ok(Self { name, files })
    }
}

impl OwnInput {
    /// Reads all of it.
    pub(in crate::bench) fn whole(&self) -> Result<Input, LabError> {
        let (first, before, after) = match &self.files {
            Files::Pages(pages, before, after) => (read(pages)?, read(before)?, read(after)?),
            Files::Snapshots(first, later) => {
                let (first, later) = (read(first)?, read(later)?);
                let dirty = match first.len() == later.len() {
                    true => dirty(&first, &later),
                    false => Vec::new(),
                };
                let of = |pages: &[Block]| dirty.iter().map(|index| pages[*index]).collect();
                let (before, after) = (of(&first), of(&later));
                (first, before, after)
            }
        };
        if first.is_empty() || after.is_empty() || before.len() != after.len() {
            return Err(wrong(&format!(
                "the files of {} have no pages, no dirty ones, or not as many before as after",
                self.name
            )));
        }
        Ok(Input::new(&self.name, first, before, after))
    }

    /// Draws a sample from it.
    pub(super) fn sample(&self, seed: u64) -> Result<Input, LabError> {
        let whole = self.whole()?;
        let mut random = Random::new(seed);
        let chosen = drawn(whole.first.len(), RUNS, &mut random);
        let dirty = drawn(whole.after.len(), DIRTY_RUNS, &mut random);
        let of = |pages: &[Block], indexes: &[usize]| {
            indexes.iter().map(|index| pages[*index]).collect()
        };
        Ok(Input::new(
            &self.name,
            of(&whole.first, &chosen),
            of(&whole.before, &dirty),
            of(&whole.after, &dirty),
        ))
    }
}

fn read(path: &Path) -> Result<Vec<Block>, LabError> {
    let doing = || format!("read {}", path.display());
    let mut file = File::open(path).during(doing)?;
    let pages = file.metadata().during(doing)?.len() as usize / BLOCK_SIZE;
    let mut memory = vec![[0; BLOCK_SIZE]; pages];
    file.read_exact(memory.as_flattened_mut()).during(doing)?;
    Ok(memory)
}

fn dirty(first: &[Block], later: &[Block]) -> Vec<usize> {
    let pairs = first.iter().zip(later).enumerate();
    pairs
        .filter_map(|(index, (first, later))| (first != later).then_some(index))
        .collect()
}

/// Draws runs of `RUN` neighbours at random from this many pages, in their order; all if there are
/// no more.
fn drawn(pages: usize, runs: usize, random: &mut Random) -> Vec<usize> {
    let mut order: Vec<usize> = (0..pages.div_ceil(RUN)).collect();
    let runs = runs.min(order.len());
    for index in 0..runs {
        let other = index + random.below(order.len() - index);
        order.swap(index, other);
    }
    order.truncate(runs);
    order.sort_unstable();
    let run = |run: usize| run * RUN..((run + 1) * RUN).min(pages);
    order.into_iter().flat_map(run).collect()
}

/// Returns the names of the laboratory's own samples.
pub(super) fn names() -> Result<Vec<String>, LabError> {
    let named = manifest()?.input.into_iter().map(|sample| sample.name);
    Ok(named.collect())
}

/// Returns one of the laboratory's own samples, checked.
pub(super) fn committed(name: &str) -> Result<Option<Input>, LabError> {
    let samples = manifest()?.input;
    let Some(sample) = samples.iter().find(|sample| sample.name == name) else {
        return Ok(None);
    };
    let path = Path::new(FOLDER).join(&sample.file);
    let packed = std::fs::read(&path).during(|| format!("read {}", path.display()))?;
    unpacked(name, &sample.digest, sample.pages, &packed).map(Some)
}

fn manifest() -> Result<Manifest, LabError> {
    let path = Path::new(FOLDER).join("inputs.toml");
    let text = std::fs::read_to_string(&path).map_err(|_| LabError::Missing {
        what: path.display().to_string(),
        hint: "the laboratory's samples lie in the checkout that it was built from; \
               --input takes memory of a guest of your own"
            .to_owned(),
    })?;
    toml::from_str(&text).map_err(|error| LabError::Answer {
        what: path.display().to_string(),
        message: error.to_string(),
    })
}

/// Splits a sample: pages of a first pass, then the old and the new content of the dirty ones.
fn unpacked(name: &str, digest: &str, pages: usize, packed: &[u8]) -> Result<Input, LabError> {
    let bytes = zstd::bulk::decompress(packed, SAMPLE_BYTES_MAX)
        .during(|| format!("unpack the input {name}"))?;
    let (blocks, rest) = bytes.as_chunks();
    let dirty = blocks.len().saturating_sub(pages) / 2;
    let damaged = || wrong(&format!("the input {name} is damaged: its digest differs"));
    if !rest.is_empty() || pages + 2 * dirty != blocks.len() {
        return Err(damaged());
    }
    let (first, blocks) = blocks.split_at(pages);
    let (before, after) = blocks.split_at(dirty);
    let input = Input::new(name, first.to_vec(), before.to_vec(), after.to_vec());
    match input.digest == digest {
        true => Ok(input),
        false => Err(damaged()),
    }
}

/// Returns memory filled like the arena's, and its pages with content of their own after a part was
/// rewritten.
pub(super) fn filled(name: &str, seed: u64) -> Option<Input> {
    let filling = Filling::named(name)?;
    let mut random = Random::new(seed);
    let mut first: Vec<Block> = vec![[0; BLOCK_SIZE]; FILLED_PAGES];
    let mut originals = Vec::new();
    for index in 0..first.len() {
        match filling.kind(seed, index) {
            Kind::Copy if !originals.is_empty() => {
                let original: usize = originals[random.below(originals.len())];
                first[index] = first[original];
            }
            kind => {
                kind.fill(&mut first[index], &mut random);
                if kind.is_original() {
                    originals.push(index);
                }
            }
        }
    }
    let before: Vec<Block> = originals.iter().map(|index| first[*index]).collect();
    let mut after = before.clone();
    for (index, block) in originals.into_iter().zip(&mut after) {
        let start = random.below(BLOCK_SIZE - WRITE_BYTES + 1);
        let kind = filling.kind(seed, index);
        kind.fill(&mut block[start..start + WRITE_BYTES], &mut random);
    }
    Some(Input::new(name, first, before, after))
}

/// Writes a sample of two snapshots of a guest's memory into a folder, packed and named by its
/// digest; returns its entry for `inputs.toml`.
///
/// # Errors
/// When a file cannot be read or written.
pub fn write_sample(own: &OwnInput, seed: u64, folder: &Path) -> Result<String, LabError> {
    let input = own.sample(seed)?;
    let pages = [&input.first[..], &input.before, &input.after].concat();
    let packed = zstd::bulk::compress(pages.as_flattened(), 19)
        .during(|| format!("pack the input {}", input.name))?;
    let file = format!("{}-{}.zst", input.name, &input.digest[..16]);
    let path = folder.join(&file);
    std::fs::write(&path, &packed).during(|| format!("write {}", path.display()))?;
    Ok(format!(
        "[[input]]\nname = \"{}\"\nfile = \"{file}\"\ndigest = \"{}\"\npages = {}\n",
        input.name,
        input.digest,
        input.first.len(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_the_same_for_a_seed_and_checked_when_it_is_unpacked() {
        let folder = tempfile::tempdir().unwrap();
        let input = filled("mix", 3).unwrap();
        let mut later = input.first.clone();
        for index in (0..later.len()).step_by(2) {
            later[index][100] ^= 1;
        }
        let write = |name: &str, pages: &[Block]| {
            let path = folder.path().join(name);
            std::fs::write(&path, pages.as_flattened()).unwrap();
            path.display().to_string()
        };
        let files = [write("a", &input.first), write("b", &later)];
        let own: OwnInput = format!("x={},{}", files[0], files[1]).parse().unwrap();
        let whole = own.whole().unwrap();
        assert_eq!(whole.first, input.first);
        assert_eq!(whole.after.len(), later.len() / 2);
        let sample = own.sample(5).unwrap();
        assert_eq!(sample, own.sample(5).unwrap());
        assert_ne!(sample, own.sample(6).unwrap());
        assert_eq!(sample.first.len(), RUNS * RUN);
        assert_eq!(sample.after.len(), DIRTY_RUNS * RUN);
        let differ = |(a, b): (&Block, &Block)| a != b;
        assert!(sample.before.iter().zip(&sample.after).all(differ));

        let said = write_sample(&own, 5, folder.path()).unwrap();
        let said: Manifest = toml::from_str(&said).unwrap();
        let entry = &said.input[0];
        assert_eq!((&entry.digest, entry.pages), (&sample.digest, RUNS * RUN));
        let packed = std::fs::read(folder.path().join(&entry.file)).unwrap();
        let unpack = |digest: &str| unpacked("x", digest, sample.first.len(), &packed);
        assert_eq!(unpack(&sample.digest).unwrap(), sample);
        let error = unpack(&input.digest).unwrap_err().to_string();
        assert!(error.contains("damaged"), "{error}");
        assert!(unpacked("x", &sample.digest, 7, &packed).is_err());

        let short = write("c", &later[1..]);
        let own = |text: String| text.parse::<OwnInput>().unwrap();
        assert!(own(format!("x={},{short}", files[0])).sample(1).is_err());
        let [a, b] = &files;
        let pages = own(format!("x={short},{a},{b}")).whole().unwrap();
        assert_eq!((pages.first.len(), pages.after), (later.len() - 1, later));
        assert!(own(format!("x={a},{b},{short}")).whole().is_err());
        assert!("x=a".parse::<OwnInput>().is_err());
    }

    #[test]
    fn the_laboratory_s_own_samples_are_whole() {
        for name in names().unwrap() {
            let input = committed(&name).unwrap().unwrap();
            assert!(!input.first.is_empty() && !input.after.is_empty());
            assert_eq!(input.before.len(), input.after.len());
        }
        assert_eq!(committed("nobody's").unwrap(), None);
    }
}
