//! Cuts the power below a repository in a folder during imports and removals: every listed image
//! must be complete, and every acknowledged one must be there. Then suppresses one sync after the
//! other, which each time must be detected.
//!
//! `LONGHAUL_SEED=N` begins with the script of that seed. The threads of an import are not
//! scheduled deterministically, so a seed reproduces the script, and nearly the same cuts.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    missing_docs,
    unreachable_pub
)]

#[path = "../../storage/tests/power_cuts/random.rs"]
mod random;
#[allow(dead_code)]
#[path = "../../storage/tests/power_cuts/simulated.rs"]
mod simulated;

use longhaul_image::store::{FolderStore, Store};
use longhaul_image::{
    ImageId, ImportError, ImportOptions, Repository, RepositoryError, import, remove, verify,
};
use longhaul_storage::disk::{Disk, Extent, Zeros};
use longhaul_storage::files::Files;
use random::Random;
use simulated::{Faults, Simulated};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

const SCRIPTS: u64 = 300;
const SEED: u64 = 20_261_122;
const LIVES: u64 = 4;
/// Limit on operations of the file layer in one life.
const LIFE_MAX: u64 = 120;
const STRIPE: usize = 256 << 10;
/// Every sync that the code requests.
const SYNCS: [&str; 5] = [
    "the folder's name",
    "the image's absence",
    "the object",
    "the object's name",
    "the stripes' names",
];

/// A disk whose stripes each hold one word; the last one is short, so that little is hashed.
#[derive(Debug)]
struct Words(Vec<u8>);

impl Words {
    fn size(&self) -> usize {
        (self.0.len() - 1) * STRIPE + 4096
    }
}

impl Disk for Words {
    fn size_bytes(&self) -> u64 {
        self.size() as u64
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        buffer.fill(0);
        buffer[7] = self.0[offset as usize / STRIPE];
        Ok(())
    }

    fn write(&self, _offset: u64, _bytes: &[u8]) -> io::Result<()> {
        unreachable!("an import does not write")
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn zero(&self, _range: Range<u64>, _zeros: Zeros) -> io::Result<()> {
        unreachable!("an import does not write")
    }

    fn discard(&self, _range: Range<u64>) -> io::Result<()> {
        unreachable!("an import does not write")
    }

    fn extents(&self, range: Range<u64>, _count_max: usize) -> io::Result<Vec<Extent>> {
        Ok(vec![Extent {
            length_bytes: range.end - range.start,
            hole: false,
        }])
    }
}

struct Script {
    random: Random,
    files: Simulated,
    /// Images that were acknowledged, and not removed since.
    surely: BTreeMap<ImageId, Vec<u8>>,
}

impl Script {
    fn repository(&self) -> Result<Repository, RepositoryError> {
        let files = Arc::new(self.files.clone());
        let store: Arc<dyn Store> =
            Arc::new(FolderStore::new_in(files, Path::new("/state/images")));
        Repository::open_or_make(store)
    }

    /// Removes all markers: after a power cut no process is working any more. On a real host the
    /// markers show that themselves; here it is the same process and the same boot.
    fn forget_markers(&self) {
        let folder = Path::new("/state/images/markers");
        for name in self.files.names(folder).unwrap_or_default() {
            self.files.remove(&folder.join(name)).unwrap();
        }
    }

    /// Imports and removes until the power is cut.
    fn live(&mut self) -> Result<(), String> {
        let Ok(repository) = self.repository() else {
            return Ok(());
        };
        while self.files.is_on() {
            if self.random.percent(70) {
                let length = self.random.below(3) + 1;
                let words = (0..length).map(|_| self.random.below(4) as u8 + 1);
                let disk = Words(words.collect());
                let imported = import(&repository, &disk, &ImportOptions::default(), &|_| {});
                match imported {
                    Ok(imported) => {
                        self.surely.insert(imported.id, disk.0);
                    }
                    Err(ImportError::Store(_)) => {}
                    Err(error) => return Err(error.to_string()),
                }
            } else if let Some(id) = self.surely.keys().next().copied() {
                // Completed or not, it need not exist any more.
                self.surely.remove(&id);
                let removed = remove(&repository, &[id], true);
                if removed.is_err() && self.files.is_on() {
                    return Err(format!("{removed:?}"));
                }
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        let repository = match self.repository() {
            Ok(repository) => repository,
            Err(error) => return Err(error.to_string()),
        };
        let images = repository.images().map_err(|error| error.to_string())?;
        for id in &images {
            let verified = verify(&repository, *id, &|_, _| {});
            let verified = verified.map_err(|error| error.to_string())?;
            if !verified.is_good() {
                return Err(format!(
                    "an image that is listed is not whole: {verified:?}"
                ));
            }
        }
        match self.surely.keys().find(|id| !images.contains(id)) {
            Some(id) => Err(format!("image {id} is lost")),
            None => Ok(()),
        }
    }
}

/// Runs a script. Returns its outcome, and the requested syncs.
fn run(
    seed: u64,
    suppressed: Option<&'static str>,
) -> (Result<(), String>, BTreeSet<&'static str>) {
    let mut random = Random::new(seed);
    let files = Simulated::new(random.next(), suppressed);
    let mut script = Script {
        random,
        files: files.clone(),
        surely: BTreeMap::new(),
    };
    let mut done = Ok(());
    for _ in 0..LIVES {
        let operations = script.random.below(LIFE_MAX) + 1;
        files.power_on(operations, Faults::default());
        done = script.live();
        files.cut();
        files.power_on(u64::MAX, Faults::default());
        done = done.and_then(|()| script.check());
        script.forget_markers();
        if done.is_err() {
            break;
        }
    }
    (done, files.syncs())
}

fn main() {
    let seed = std::env::var("LONGHAUL_SEED").map_or(SEED, |seed| seed.parse().unwrap());
    let began = Instant::now();
    let mut syncs = BTreeSet::new();
    for seed in (0..SCRIPTS).map(|number| seed.wrapping_add(number)) {
        let (done, asked) = run(seed, None);
        syncs.extend(asked);
        assert!(done.is_ok(), "wrong with seed {seed}: {done:?}");
    }
    println!(
        "power cuts beneath image repositories: {} from seed {seed}, {:.1} s",
        SCRIPTS * LIVES,
        began.elapsed().as_secs_f64()
    );
    assert_eq!(syncs, BTreeSet::from(SYNCS), "the syncs asked for");
    for sync in SYNCS {
        let mut seeds = (0..SCRIPTS).map(|number| seed.wrapping_add(number));
        let missed = seeds.find_map(|seed| run(seed, Some(sync)).0.err().map(|why| (seed, why)));
        let (seed, why) = missed.unwrap_or_else(|| panic!("nothing shows what {sync} is for"));
        println!("  without the sync of {sync}: seed {seed}: {why}");
    }
}
