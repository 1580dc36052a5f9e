//! One script: the missing blocks of an arriving disk, as its export records them, over several
//! lives of the machine.

use crate::random::Random;
use crate::script::Outcome;
use crate::simulated::{Faults, Simulated};
use longhaul_engine::presence::ChunkMask;
use longhaul_engine::remaining::Remaining;
use longhaul_protocol::RegionId;
use longhaul_storage::front::arriving::masks::{MaskFile, Masks};
use std::path::Path;

const PATH: &str = "/masks";
/// Three chunks with a short last one, or more than one sector of masks.
const BLOCKS: [u64; 2] = [64 * 2 + 5, 64 * 150];
const LIFE_MAX: u64 = 30;
const LIVES_MAX: u64 = 6;

/// The knowledge of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    /// It is missing: marking it as present would lose it.
    Missing,
    /// It is present, and that is not acknowledged: recording it has failed.
    Unsure,
    /// It is present, and not durably: after a power cut it may be marked as missing.
    Noted,
    /// It is present, durably: content that the guest has flushed there must not be fetched again.
    Here,
}

fn is_yet_to_store(block: Block) -> bool {
    matches!(block, Block::Unsure | Block::Noted)
}

struct Script {
    random: Random,
    files: Simulated,
    faults: Faults,
    blocks: u64,
    /// The content of the file once it is durable, and what may be there before.
    known: Option<Vec<Block>>,
    perhaps: bool,
    /// Whether something could not be made durable since the machine was started.
    broken: bool,
    log: Vec<String>,
}

type Step = Result<(), String>;

/// Runs the script of a seed.
pub fn run(seed: u64, suppressed: Option<&'static str>) -> Outcome {
    let mut random = Random::new(seed);
    let files = Simulated::new(random.next(), suppressed);
    let blocks = BLOCKS[random.below(2) as usize];
    let mut script = Script {
        random,
        files: files.clone(),
        faults: Faults::default(),
        blocks,
        known: None,
        perhaps: false,
        broken: false,
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
                self.broken = false;
                self.log.push("-- the power is cut".to_owned());
                self.look_after_a_cut()?;
            } else {
                self.log.push("-- the disk export ends".to_owned());
            }
        }
        Ok(())
    }

    fn live(&mut self) -> Step {
        if self.known.is_none() {
            return self.list();
        }
        let Ok(file) = MaskFile::open_in(&self.files, Path::new(PATH)) else {
            return self.excuse("opening the masks");
        };
        while self.files.is_on() {
            match self.random.below(5) {
                0..3 => self.note(&file)?,
                3 if !self.broken => self.store(&file)?,
                _ => self.read()?,
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

    /// Writes the source's list: READY waits until it is durable.
    fn list(&mut self) -> Step {
        let chunks = self.blocks.div_ceil(64) as u32;
        let part = |chunk| Remaining {
            chunk,
            chunks: 1,
            mask: u64::MAX,
            written_blocks: 3,
        };
        let masks = Masks {
            region: RegionId(1),
            blocks: self.blocks,
            boot: [0; 16],
            missing: (0..chunks).map(part).collect(),
        };
        self.perhaps = true;
        match masks.write_in(&self.files, Path::new(PATH)) {
            Ok(()) => {
                self.log.push("listed".to_owned());
                self.known = Some(vec![Block::Missing; self.blocks as usize]);
                Ok(())
            }
            Err(_) => self.excuse("listing"),
        }
    }

    /// Records blocks of a chunk that have arrived, or were written by the guest, and are on the
    /// disk.
    fn note(&mut self, file: &MaskFile) -> Step {
        let Some(known) = &mut self.known else {
            return Ok(());
        };
        let chunk = self.random.below(self.blocks.div_ceil(64));
        let first = chunk * 64;
        let end = (first + 64).min(self.blocks);
        let mut missing = 0;
        for block in first..end {
            let state = &mut known[block as usize];
            if *state == Block::Missing && self.random.percent(30) {
                *state = Block::Unsure;
            }
            if *state == Block::Missing {
                missing |= 1 << (block - first);
            }
        }
        let mask = ChunkMask {
            chunk: chunk as u32,
            missing,
        };
        self.log.push(format!("{mask:?}"));
        // A failed record is repeated before it is acknowledged: a part of it may be there.
        match file.set(&[mask]) {
            Ok(()) => {
                let here = known[first as usize..end as usize].iter_mut();
                let unsure = here.filter(|block| **block == Block::Unsure);
                unsure.for_each(|block| *block = Block::Noted);
                Ok(())
            }
            Err(_) => self.excuse("noting"),
        }
    }

    fn store(&mut self, file: &MaskFile) -> Step {
        // Masks recorded before the power cut are set again, as a restarted agent does.
        let Some(known) = &mut self.known else {
            return Ok(());
        };
        let mut masks = Vec::new();
        for (chunk, blocks) in known.chunks(64).enumerate() {
            let missing = (0..).zip(blocks).fold(0, |mask, (bit, block)| {
                mask | u64::from(*block == Block::Missing) << bit
            });
            if blocks.iter().any(|block| is_yet_to_store(*block)) {
                masks.push(ChunkMask {
                    chunk: chunk as u32,
                    missing,
                });
            }
        }
        let stored = file.set(&masks).and_then(|()| file.sync());
        self.log.push(format!("stored: {}", stored.is_ok()));
        match stored {
            Ok(()) => {
                let noted = known.iter_mut().filter(|block| is_yet_to_store(**block));
                noted.for_each(|block| *block = Block::Here);
                Ok(())
            }
            Err(_) => {
                self.broken = true;
                self.excuse("storing")
            }
        }
    }

    fn read(&mut self) -> Step {
        match Masks::read_in(&self.files, Path::new(PATH)) {
            Ok(Some(masks)) => self.judge(&masks, false),
            Ok(None) => Err("the masks are not there".to_owned()),
            Err(error) if self.files.is_on() => Err(error.to_string()),
            Err(_) => Ok(()),
        }
    }

    /// Checks the masks after a cut, when only the disk's content counts.
    fn look_after_a_cut(&mut self) -> Step {
        self.files.power_on(u64::MAX, Faults::default());
        let masks = match Masks::read_in(&self.files, Path::new(PATH)) {
            Ok(Some(masks)) if self.known.is_some() || self.perhaps => masks,
            Ok(None) if self.known.is_none() => return Ok(()),
            Ok(_) => return Err("the masks are not there".to_owned()),
            // The list was never acknowledged: the guest never ran here.
            Err(_) if self.known.is_none() => return Ok(()),
            Err(error) => return Err(error.to_string()),
        };
        if self.known.is_some() {
            self.judge(&masks, true)?;
        }
        let Some(known) = &mut self.known else {
            return Ok(());
        };
        for (number, block) in (0..).zip(known) {
            *block = match masks.is_missing(number) {
                true => Block::Missing,
                false => Block::Here,
            };
        }
        Ok(())
    }

    fn judge(&self, masks: &Masks, after_a_cut: bool) -> Step {
        let known = self.known.iter().flatten();
        for (number, block) in (0..).zip(known) {
            let missing = masks.is_missing(number);
            let fits = match block {
                Block::Missing => missing,
                Block::Here => !missing,
                Block::Noted => after_a_cut || !missing,
                Block::Unsure => true,
            };
            if !fits {
                return Err(format!(
                    "block {number} is {block:?}; called missing: {missing}"
                ));
            }
        }
        Ok(())
    }
}
