//! One script: the tracked writes of a disk, as its export records them, over several lives of
//! the machine. The image is a file whose sectors reach the disk in any order, like those of
//! the record: each sector stands for a chunk. Now and then what has changed is copied to a
//! replica that no power cut touches, as to the devices of a parcel: where image and replica
//! differ, the rounds that were not copied must say so.

use crate::random::Random;
use crate::script::Outcome;
use crate::simulated::{Faults, Simulated};
use longhaul_storage::files::{Access, Files, OpenFile};
use longhaul_storage::front::tracking::rounds::{self, Changed, begin_in};
use longhaul_storage::front::tracking::{CHUNK_BYTES, WriteMap};
use std::collections::BTreeSet;
use std::path::Path;

const RECORD: &str = "/tracked";
const IMAGE: &str = "/image";
const SECTOR: u64 = 512;
/// A few chunks, or more than one sector of masks.
const CHUNKS: [u64; 2] = [3, 150];
const LIFE_MAX: u64 = 40;
const LIVES_MAX: u64 = 6;

struct Script {
    random: Random,
    files: Simulated,
    faults: Faults,
    chunks: u64,
    /// Whether the record was begun, and what may be there before.
    begun: bool,
    perhaps: bool,
    /// Chunks that a write was announced for: only these may have changed.
    announced: BTreeSet<u64>,
    /// The number of the last write, which is its content.
    written: u8,
    /// The copy of each chunk, and the first round that is not in it.
    replica: Vec<u8>,
    from: u64,
    log: Vec<String>,
}

type Step = Result<(), String>;

/// Runs the script of a seed.
pub fn run(seed: u64, suppressed: Option<&'static str>) -> Outcome {
    let mut random = Random::new(seed);
    let files = Simulated::new(random.next(), suppressed);
    let chunks = CHUNKS[random.below(2) as usize];
    let mut script = Script {
        random,
        files: files.clone(),
        faults: Faults::default(),
        chunks,
        begun: false,
        perhaps: false,
        announced: BTreeSet::new(),
        written: 0,
        replica: vec![0; chunks as usize],
        from: 0,
        log: Vec::new(),
    };
    let mut cuts = 0;
    let done = script.lives(&mut cuts);
    let wrong = done
        .err()
        .map(|wrong| format!("{wrong}\n    {}", script.log.join("\n    ")));
    Outcome {
        cuts,
        syncs: files.syncs(),
        wrong,
    }
}

impl Script {
    fn lives(&mut self, cuts: &mut u64) -> Step {
        for _ in 0..1 + self.random.below(LIVES_MAX) {
            self.faults = match self.random.below(4) {
                0 => Faults {
                    write_fails: self.random.below(20),
                    sync_fails: self.random.below(30),
                    full: false,
                },
                _ => Faults::default(),
            };
            let operations = 1 + self.random.below(LIFE_MAX);
            self.files.power_on(operations, self.faults);
            self.live()?;
            if self.random.percent(70) {
                self.files.cut();
                *cuts += 1;
                self.log.push("-- the power is cut".to_owned());
            } else {
                self.log.push("-- the disk export ends".to_owned());
            }
            self.files.power_on(u64::MAX, Faults::default());
            self.judge()?;
        }
        Ok(())
    }

    fn live(&mut self) -> Step {
        if !self.begun {
            self.perhaps = true;
            let bytes = self.chunks * CHUNK_BYTES;
            match begin_in(&self.files, Path::new(RECORD), bytes) {
                Ok(()) => self.begun = true,
                Err(_) => return self.excuse("beginning"),
            }
            self.log.push("begun".to_owned());
        }
        let Ok((mut round, mut map)) = rounds::open_current(&self.files, Path::new(RECORD)) else {
            return self.excuse("opening the record");
        };
        let Ok(image) = self.files.open(Path::new(IMAGE), Access::Create) else {
            return self.excuse("opening the image");
        };
        while self.files.is_on() {
            match self.random.percent(15) {
                true => match self.copy((&mut round, &mut map), &*image) {
                    Ok(()) => {}
                    Err(error) => self.excuse(&format!("copying ({error})"))?,
                },
                false => self.write(&map, &*image)?,
            }
        }
        Ok(())
    }

    /// Closes the round, copies what has changed, and forgets it.
    fn copy(
        &mut self,
        (round, map): (&mut u64, &mut WriteMap),
        image: &dyn OpenFile,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let (files, record) = (self.files.clone(), Path::new(RECORD));
        rounds::forget_unused(&files, record, *round)?;
        rounds::merge(&files, record)?;
        let next = rounds::create(&files, record, *round + 1, self.chunks * CHUNK_BYTES)?;
        self.log.push(format!("round {round} is closed"));
        let closed = *round;
        (*round, *map) = (closed + 1, next);
        let changed = Changed::between(&files, record, (self.from, closed))?;
        let changed = changed.ok_or("a round is missing")?;
        for chunk in 0..self.chunks {
            if changed.meets(&(chunk * CHUNK_BYTES..(chunk + 1) * CHUNK_BYTES)) {
                self.replica[chunk as usize] = content(image, chunk)?;
            }
        }
        image.sync("the copied image")?;
        // This image may have been created in this life.
        files.sync_folder(Path::new("/"), "the copied image")?;
        self.from = closed + 1;
        self.log.push(format!("round {closed} is copied"));
        if self.random.percent(80) {
            rounds::forget(&files, record, closed)?;
        }
        Ok(())
    }

    /// Carries out a write of the guest, to one chunk or two.
    fn write(&mut self, map: &WriteMap, image: &dyn OpenFile) -> Step {
        let first = self.random.below(self.chunks);
        let end = (first + 1 + self.random.below(2)).min(self.chunks);
        self.announced.extend(first..end);
        let noted = map.note(&(first * CHUNK_BYTES..end * CHUNK_BYTES - 1));
        let said = format!("chunks {first}..{end} noted: {}", noted.is_ok());
        self.log.push(said);
        if noted.is_err() {
            return self.excuse("noting");
        }
        self.written = self.written % u8::MAX + 1;
        for chunk in first..end {
            if image
                .write_at(chunk * SECTOR, &[self.written; SECTOR as usize])
                .is_err()
            {
                return self.excuse("writing");
            }
        }
        Ok(())
    }

    fn excuse(&self, what: &str) -> Step {
        let Faults {
            write_fails,
            sync_fails,
            ..
        } = self.faults;
        match !self.files.is_on() || write_fails > 0 || sync_fails > 0 {
            true => Ok(()),
            false => Err(format!("{what} failed")),
        }
    }

    /// Returns whether a chunk was written, or recorded ahead of a write: a run of chunks has at
    /// most as many behind it.
    fn is_expected(&self, chunk: u64, recorded: impl Fn(u64) -> bool) -> bool {
        let written = (0..=chunk).rev().find(|it| self.announced.contains(it));
        let Some(written) = written else {
            return false;
        };
        let run = (0..written).rev().take_while(|it| recorded(*it)).count() as u64;
        let ahead = chunk - written;
        ahead <= run && (written..chunk).all(recorded)
    }

    /// Compares the record with the image.
    fn judge(&mut self) -> Step {
        let changed = match Changed::since(&self.files, Path::new(RECORD), self.from) {
            Ok(Some(changed)) if self.begun || self.perhaps => changed,
            // Tracking has never begun.
            Err(_) if !self.begun => return Ok(()),
            other => return Err(format!("the record: {other:?}")),
        };
        let recorded = |chunk: u64| {
            let mut ranges = changed.ranges.iter();
            ranges.any(|range| range.contains(&(chunk * CHUNK_BYTES)))
        };
        let image = self.files.open(Path::new(IMAGE), Access::Read);
        for chunk in 0..self.chunks {
            let found = image
                .as_ref()
                .map_or(Ok(0), |image| content(&**image, chunk));
            let differs = found.is_ok_and(|found| found != self.replica[chunk as usize]);
            if differs && !recorded(chunk) {
                return Err(format!("chunk {chunk} has changed, which is not recorded"));
            }
            if recorded(chunk) && !self.is_expected(chunk, recorded) {
                return Err(format!("chunk {chunk} is recorded, and was never written"));
            }
        }
        Ok(())
    }
}

/// Returns the number of the write that a chunk of the image has.
fn content(image: &dyn OpenFile, chunk: u64) -> std::io::Result<u8> {
    let mut first = [0];
    // An image that was never written there is shorter.
    if image.length()? > chunk * SECTOR {
        image.read_at(chunk * SECTOR, &mut first)?;
    }
    Ok(first[0])
}
