//! What is encoded: samples of real guests' memory that are part of the laboratory, memory of a
//! guest of the user's own, or memory filled as the arena's.
//!
//! A sample holds pages as they were first, and pages that were dirty later with what they held
//! before. Runs of 64 neighbours are drawn at random, of all pages and of the dirty ones, so that a
//! frame made of them is like one of the whole guest.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use longhaul_protocol::BLOCK_SIZE;

use super::content::{Content as Filling, Kind, Random};
use super::{Block, wrong};
use crate::error::{During, LabError};

/// Pages that are drawn together.
const RUN: usize = 64;
/// Runs of a sample: of all pages, and of the dirty ones.
const RUNS: usize = 16;
const DIRTY_RUNS: usize = 8;
/// Most bytes of a sample, unpacked.
const SAMPLE_BYTES_MAX: usize = 64 << 20;
/// Pages of memory that is filled as the arena's.
const FILLED_PAGES: usize = 2048;
/// Bytes of a page that a rewrite changes, as the arena does by default.
const WRITE_BYTES: usize = 512;

/// The samples of the laboratory's own: `crates/lab/inputs/README.md` says where they are from.
const COMMITTED: &[Committed] = &[];

struct Committed {
    name: &'static str,
    /// BLAKE3 of the pages.
    digest: &'static str,
    pages: usize,
    packed: &'static [u8],
}

/// Names of what is filled as the arena's memory.
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
    /// What the dirty pages held.
    pub(in crate::bench) before: Vec<Block>,
    /// What they hold now.
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

/// Memory of a user's own guest: `NAME=FIRST,LATER`, files of raw guest memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnInput {
    name: String,
    first: PathBuf,
    later: PathBuf,
}

impl FromStr for OwnInput {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text
            .split_once('=')
            .and_then(|(name, files)| Some((name, files.split_once(',')?)));
        match parts {
            Some((name, (first, later))) if !name.is_empty() => Ok(Self {
                name: name.to_owned(),
                first: first.into(),
                later: later.into(),
            }),
            _ => Err("give NAME=FIRST,LATER: a name and two files of raw memory".to_owned()),
        }
    }
}

impl OwnInput {
    /// All of the guest's memory, and all of its pages that were dirty later.
    pub(in crate::bench) fn whole(&self) -> Result<Input, LabError> {
        let (first, later) = self.read()?;
        let dirty = dirty(&first, &later);
        let of = |pages: &[Block]| dirty.iter().map(|index| pages[*index]).collect();
        let (before, after) = (of(&first), of(&later));
        Ok(Input::new(&self.name, first, before, after))
    }

    /// A sample of it.
    pub(super) fn sample(&self, seed: u64) -> Result<Input, LabError> {
        let (first, later) = self.read()?;
        let mut random = Random::new(seed);
        let all: Vec<usize> = (0..first.len()).collect();
        let chosen = drawn(&all, RUNS, &mut random);
        let dirty = drawn(&dirty(&first, &later), DIRTY_RUNS, &mut random);
        let of = |pages: &[Block], indexes: &[usize]| {
            indexes.iter().map(|index| pages[*index]).collect()
        };
        Ok(Input::new(
            &self.name,
            of(&first, &chosen),
            of(&first, &dirty),
            of(&later, &dirty),
        ))
    }

    fn read(&self) -> Result<(Vec<Block>, Vec<Block>), LabError> {
        let (first, later) = (read(&self.first)?, read(&self.later)?);
        if first.len() != later.len() || first.len() < RUN {
            return Err(wrong(&format!(
                "{} has {} pages and {} has {}: give two snapshots of one guest",
                self.first.display(),
                first.len(),
                self.later.display(),
                later.len(),
            )));
        }
        Ok((first, later))
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

/// Runs of neighbours, drawn at random, in their order; all of them if there are no more.
fn drawn(pages: &[usize], runs: usize, random: &mut Random) -> Vec<usize> {
    let mut order: Vec<&[usize]> = pages.chunks(RUN).collect();
    let runs = runs.min(order.len());
    for index in 0..runs {
        let other = index + random.below(order.len() - index);
        order.swap(index, other);
    }
    order.truncate(runs);
    order.sort();
    order.concat()
}

/// One of the laboratory's own samples, checked.
pub(super) fn committed(name: &str) -> Result<Option<Input>, LabError> {
    let sample = COMMITTED.iter().find(|sample| sample.name == name);
    let input = sample.map(|sample| unpacked(name, sample.digest, sample.pages, sample.packed));
    input.transpose()
}

/// The names of all inputs but the user's own.
pub(super) fn names() -> Vec<&'static str> {
    let committed = COMMITTED.iter().map(|sample| sample.name);
    committed.chain(FILLED).collect()
}

/// Pages of a first pass are followed by what the dirty ones held, and then hold.
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

/// Memory as the arena fills it, and its pages of their own content after a part was rewritten.
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
/// digest; what to say of it in this file.
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
        "{file}: {} pages, {} of a first pass and {} dirty ones in two versions, {} bytes packed\n\
         BLAKE3 {}\n",
        pages.len(),
        input.first.len(),
        input.after.len(),
        packed.len(),
        input.digest,
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
        let path = folder.path().join(said.split_once(':').unwrap().0);
        let packed = std::fs::read(path).unwrap();
        let unpack = |digest: &str| unpacked("x", digest, sample.first.len(), &packed);
        assert_eq!(unpack(&sample.digest).unwrap(), sample);
        let error = unpack(&input.digest).unwrap_err().to_string();
        assert!(error.contains("damaged"), "{error}");
        assert!(unpacked("x", &sample.digest, 7, &packed).is_err());

        let short: OwnInput = format!("x={},{}", files[0], write("c", &later[1..]))
            .parse()
            .unwrap();
        assert!(short.sample(1).is_err());
        assert!("x=a".parse::<OwnInput>().is_err());
    }

    #[test]
    fn the_laboratory_s_own_samples_are_whole() {
        for sample in COMMITTED {
            let input = committed(sample.name).unwrap().unwrap();
            assert!(!input.first.is_empty() && !input.after.is_empty());
            assert_eq!(input.before.len(), input.after.len());
        }
        assert_eq!(committed("nobody's").unwrap(), None);
    }
}
