//! Lives of replicas by seed: killed, without power, and on disks that fail. Whatever happens, the
//! images have a whole version afterwards, and all versions that are kept can be restored.
//!
//! `LONGHAUL_REPLICA_SEED=N` lives one life.

use super::{Replica, ReplicaDisk, ReplicaError, ReplicaId, ReplicaSpec, Retention};
use crate::lives::dice::{Dice, Killed};
use crate::lives::places::Memory;
use crate::record::{CHUNK_BYTES, Chunk, Disk, Guest, Record, Version, VersionDisk};
use crate::tree::{Tree, text};
use longhaul_storage::files::{Access, Files as _};
use nix::errno::Errno;
use ring::digest::{SHA256, digest};
use serde_json::Value;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const SEEDS: u64 = 1000;
const KEEP: usize = 2;
/// The seconds between two versions.
const VERSION_S: u64 = 1200;

type Disks = Vec<Vec<u8>>;

/// How often something happened: what never happens tests nothing.
#[derive(Debug, Default)]
struct Counts {
    killed: u64,
    without_power: u64,
    failed: u64,
    committed: u64,
    committed_when_killed: u64,
    killed_again: u64,
    restored: u64,
    replaced: u64,
    touched: u64,
    kept_for_hours: u64,
}

enum Ended {
    Done,
    Failed(ReplicaError),
    Killed,
}

fn ended(run: impl FnOnce() -> Result<(), ReplicaError>) -> Ended {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => Ended::Done,
        Ok(Err(error)) => Ended::Failed(error),
        Err(panic) if panic.is::<Killed>() => Ended::Killed,
        Err(panic) => resume_unwind(panic),
    }
}

fn image(number: usize) -> PathBuf {
    PathBuf::from(format!("/images/{number}"))
}

fn spec(disks: usize) -> ReplicaSpec {
    let disks = (0..disks).map(|number| ReplicaDisk {
        name: format!("vd{number}"),
        path: image(number),
    });
    ReplicaSpec {
        id: ReplicaId([3; 16]),
        guest: "web".into(),
        from: "lyon".into(),
        keep: Retention::last(KEEP as u32),
        every_s: 600,
        disks: disks.collect(),
    }
}

fn records(number: u64, from: Option<&Disks>, to: &Disks, dice: &mut Dice) -> Vec<Record> {
    let disks = (0..).zip(to);
    let mut records = vec![Record::Guest(Guest {
        guest: 0,
        name: "web".into(),
        disks: disks
            .map(|(disk, content)| Disk {
                disk,
                name: format!("vd{disk}"),
                bytes: content.len() as u64,
                used: None,
            })
            .collect(),
        description: Value::Null,
    })];
    for (at, content) in to.iter().enumerate() {
        for (chunk, content) in content.chunks(CHUNK_BYTES).enumerate() {
            let had = from.and_then(|from| from[at].chunks(CHUNK_BYTES).nth(chunk));
            let record = |content: &[u8]| {
                Record::Chunk(Chunk {
                    guest: 0,
                    disk: at as u32,
                    chunk: chunk as u64,
                    content: Some(content.to_vec()),
                })
            };
            if had != Some(content) {
                if dice.once_in(4) {
                    // It is written again before the version is complete.
                    records.push(record(&dice.bytes(content.len())));
                }
                records.push(record(content));
            }
        }
    }
    let digest = |content: &Vec<u8>| {
        let chunks = content.chunks(CHUNK_BYTES).flat_map(Tree::of_chunk);
        text(digest(&SHA256, &chunks.collect::<Vec<u8>>()).as_ref())
    };
    let disks = (0..).zip(to).map(|(disk, content)| VersionDisk {
        disk,
        digest: digest(content),
    });
    records.push(Record::Version(Version {
        guest: 0,
        version: number,
        time: number * VERSION_S,
        consistent: !number.is_multiple_of(4),
        frozen: false,
        moment: None,
        disks: disks.collect(),
    }));
    records
}

fn next_of(disks: &Disks, dice: &mut Dice) -> Disks {
    let mut next = disks.clone();
    for disk in &mut next {
        if dice.once_in(4) {
            let more = dice.below(3 * CHUNK_BYTES as u64) as usize;
            disk.extend(dice.bytes(more));
        }
        for _ in 0..dice.below(6) {
            let at = dice.below(disk.len() as u64) as usize;
            let length = (dice.below(2 * CHUNK_BYTES as u64) as usize).min(disk.len() - at);
            match dice.below(3) {
                0 => disk[at..at + length].fill(0),
                _ => disk[at..at + length].copy_from_slice(&dice.bytes(length)),
            }
        }
    }
    next
}

fn read(memory: &Memory, path: &Path) -> Vec<u8> {
    let file = memory.open(path, Access::Read).unwrap();
    let mut content = vec![0; file.length().unwrap() as usize];
    file.read_at(0, &mut content).unwrap();
    content
}

/// A destination, and the versions that were committed.
struct Life {
    dice: Dice,
    memory: Memory,
    folder: PathBuf,
    replica: Option<Replica>,
    versions: Vec<(u64, Disks)>,
    /// For how many hours a version is kept.
    hourly: u32,
}

impl Life {
    fn new(seed: u64) -> Self {
        Self {
            dice: Dice(seed.wrapping_mul(0x2545_f491_4f6c_dd1d)),
            memory: Memory::new(),
            folder: PathBuf::from("/state/web"),
            replica: None,
            versions: Vec::new(),
            hourly: 0,
        }
    }

    fn open(&mut self, disks: usize) -> Result<(), ReplicaError> {
        if self.replica.is_none() {
            let memory = Arc::new(self.memory.clone());
            self.replica = match Replica::open_in(memory.clone(), &self.folder)? {
                Some(replica) => Some(replica),
                None => Some(Replica::make_in(memory, &self.folder, self.spec(disks))?),
            };
        }
        Ok(())
    }

    fn spec(&self, disks: usize) -> ReplicaSpec {
        let mut spec = spec(disks);
        spec.keep.hourly = self.hourly;
        spec
    }

    fn send(&mut self, records: &[Record], sizes: &[u64]) -> Result<(), ReplicaError> {
        self.open(sizes.len())?;
        let replica = self.replica.as_mut().expect("it is open");
        replica.begin(sizes)?;
        for record in records {
            if let (Record::Chunk(chunk), None) = (record, replica.newest()) {
                // What the image has is not sent.
                let known = replica.digests(chunk.disk as usize, chunk.chunk, 1)?;
                if known == chunk.content.as_deref().map_or([0; 32], Tree::of_chunk) {
                    continue;
                }
            }
            let (kind, rest) = record.encode()?;
            replica.put(kind, &rest)?;
        }
        replica.sync()
    }

    /// Sends a version, which may be interrupted. Returns whether it is committed.
    fn version(&mut self, next: &Disks, counts: &mut Counts) -> bool {
        let number = self.versions.last().map_or(1, |(number, _)| number + 1);
        let from = self.versions.last().map(|(_, disks)| disks.clone());
        let records = records(number, from.as_ref(), next, &mut self.dice);
        // An image may grow after the version has begun.
        let sizes: Vec<u64> = match (&from, self.dice.once_in(2)) {
            (Some(from), true) => from.iter().map(|disk| disk.len() as u64).collect(),
            _ => next.iter().map(|disk| disk.len() as u64).collect(),
        };
        let operations = 2 * records.len() as u64 + 30;
        let event = match self.dice.below(3) {
            0 => None,
            1 => Some((self.dice.below(operations), None)),
            _ => Some((self.dice.below(operations), Some(Errno::ENOSPC))),
        };
        self.memory.plan(event);
        let sent = ended(|| self.send(&records, &sizes));
        let was_killed = matches!(sent, Ended::Killed);
        match sent {
            Ended::Done => {}
            Ended::Failed(error) => {
                assert!(self.memory.has_failed(), "{error}");
                counts.failed += 1;
                if self.dice.once_in(2) {
                    self.replica = None;
                }
            }
            Ended::Killed => {
                counts.killed += 1;
                self.replica = None;
                if self.dice.once_in(2) {
                    self.memory.power_cut(&mut self.dice);
                    counts.without_power += 1;
                }
            }
        }
        self.recover(next, counts);
        let replica = self.replica.as_mut().expect("it is open");
        let is_committed = replica
            .newest()
            .is_some_and(|newest| newest.version == number);
        counts.committed_when_killed += u64::from(was_killed && is_committed);
        if is_committed {
            self.versions.push((number, next.clone()));
            counts.committed += 1;
        }
        is_committed
    }

    /// Opens the replica again, which may be interrupted too. What an error has interrupted goes on
    /// when the next version begins.
    fn recover(&mut self, next: &Disks, counts: &mut Counts) {
        let sizes: Vec<u64> = next.iter().map(|disk| disk.len() as u64).collect();
        loop {
            let event = self.dice.once_in(3).then(|| {
                let errno = self.dice.once_in(2).then_some(Errno::EIO);
                (self.dice.below(20), errno)
            });
            self.memory.plan(event);
            let recovered = ended(|| self.send(&[], &sizes));
            match recovered {
                Ended::Done => break,
                Ended::Failed(error) => {
                    assert!(self.memory.has_failed(), "{error}");
                    if self.dice.once_in(2) {
                        self.replica = None;
                    }
                }
                Ended::Killed => {
                    self.replica = None;
                    counts.killed_again += 1;
                    if self.dice.once_in(2) {
                        self.memory.power_cut(&mut self.dice);
                    }
                }
            }
        }
        self.memory.plan(None);
    }

    /// Somebody writes to an image, or replaces it, as a move of its guest does.
    fn meddle(&mut self, counts: &mut Counts) {
        if self.versions.is_empty() || !self.dice.once_in(6) {
            return;
        }
        let path = image(0);
        if self.dice.once_in(2) {
            self.replica = None;
        }
        let content = read(&self.memory, &path);
        let file = match self.dice.below(3) {
            0 => {
                // With what it has.
                let file = self.memory.open(&path, Access::Write).unwrap();
                file.write_at(0, &content[..1]).unwrap();
                counts.touched += 1;
                file
            }
            1 => {
                let file = self.memory.open(&path, Access::Write).unwrap();
                file.write_at(0, &[!content[0]]).unwrap();
                self.versions.clear();
                counts.replaced += 1;
                file
            }
            _ => {
                let new = PathBuf::from("/images/new");
                let file = self.memory.open(&new, Access::Create).unwrap();
                file.write_at(0, &self.dice.bytes(content.len())).unwrap();
                self.memory.rename(&new, &path).unwrap();
                self.versions.clear();
                counts.replaced += 1;
                file
            }
        };
        file.sync("an image").unwrap();
        self.memory
            .sync_folder(Path::new("/images"), "names")
            .unwrap();
    }

    fn check(&mut self, counts: &mut Counts) {
        let Some((newest, disks)) = self.versions.last() else {
            return;
        };
        let replica = self.replica.as_mut().expect("it is open");
        assert_eq!(replica.newest().unwrap().version, *newest);
        for (number, content) in disks.iter().enumerate() {
            let image = read(&self.memory, &image(number));
            assert!(image[..content.len()] == content[..], "disk {number}");
        }
        replica.verify(&mut |_| ()).unwrap();
        let kept: Vec<u64> = replica.versions().iter().map(|it| it.version).collect();
        // Every fourth is of no moment, and does not count.
        let moments = self.versions.iter().map(|(version, _)| *version);
        let moments: Vec<u64> = moments.filter(|it| !it.is_multiple_of(4)).rev().collect();
        let last = moments.iter().copied().take(KEEP);
        let mut expected: BTreeSet<u64> = last.chain([*newest]).collect();
        let without_hours = expected.len();
        let hour_of = |version: &u64| version * VERSION_S / 3600;
        let mut hours: Vec<u64> = moments.iter().map(hour_of).collect();
        hours.dedup();
        for hour in hours.iter().take(self.hourly as usize) {
            expected.extend(moments.iter().find(|it| hour_of(it) == *hour));
        }
        assert!(expected.iter().eq(&kept), "{expected:?} {kept:?}");
        counts.kept_for_hours += u64::from(kept.len() > without_hours);
        for (version, disks) in self.versions.iter().filter(|(it, _)| kept.contains(it)) {
            let to: Vec<PathBuf> = (0..disks.len())
                .map(|number| PathBuf::from(format!("/out/{number}")))
                .collect();
            replica.restore(*version, &to, &mut |_| ()).unwrap();
            for (path, content) in to.iter().zip(disks) {
                assert!(read(&self.memory, path) == *content, "{version}");
                self.memory.remove(path).unwrap();
            }
            self.memory.sync_folder(Path::new("/out"), "names").unwrap();
            counts.restored += 1;
        }
        // Nothing else is left in the folder.
        let names = self.memory.names(&self.folder).unwrap();
        let undo = names
            .iter()
            .filter(|name| name.to_string_lossy().starts_with("undo."));
        assert_eq!(undo.count(), kept.len() - 1);
    }
}

fn live(seed: u64, counts: &mut Counts) {
    let mut life = Life::new(seed);
    life.hourly = life.dice.below(4) as u32;
    let mut disks: Disks = (0..1 + life.dice.below(3))
        .map(|_| {
            let bytes = 1 + life.dice.below(6 * CHUNK_BYTES as u64) as usize;
            life.dice.bytes(bytes)
        })
        .collect();
    if life.dice.once_in(3) {
        // An image is there, of an earlier stay or a parcel.
        for number in 0..disks.len() {
            let bytes = life.dice.below(8 * CHUNK_BYTES as u64) as usize;
            let content = life.dice.bytes(bytes);
            let file = life.memory.open(&image(number), Access::Create).unwrap();
            file.write_at(0, &content).unwrap();
            file.sync("an image").unwrap();
        }
    }
    for _ in 0..2 + life.dice.below(9) {
        let next = match life.versions.is_empty() {
            true => disks.clone(),
            false => next_of(&disks, &mut life.dice),
        };
        if life.version(&next, counts) {
            disks = next;
        }
        life.check(counts);
        life.meddle(counts);
    }
}

#[test]
fn replicas_live_through_anything() {
    let mut counts = Counts::default();
    let one = std::env::var("LONGHAUL_REPLICA_SEED").ok();
    let seeds = match one.and_then(|seed| seed.parse().ok()) {
        Some(seed) => seed..seed + 1,
        None => 0..SEEDS,
    };
    let is_one = seeds.end - seeds.start == 1;
    for seed in seeds {
        let lived = catch_unwind(AssertUnwindSafe(|| live(seed, &mut counts)));
        if let Err(panic) = lived {
            eprintln!("seed {seed}: to repeat it alone: LONGHAUL_REPLICA_SEED={seed}");
            resume_unwind(panic);
        }
    }
    println!("{counts:?}");
    let Counts {
        killed,
        without_power,
        failed,
        committed,
        committed_when_killed,
        killed_again,
        restored,
        replaced,
        touched,
        kept_for_hours,
    } = counts;
    let all = [
        killed,
        without_power,
        failed,
        committed,
        committed_when_killed,
        killed_again,
        restored,
        replaced,
        touched,
        kept_for_hours,
    ];
    assert!(is_one || all.iter().all(|count| *count > 50), "{all:?}");
}
