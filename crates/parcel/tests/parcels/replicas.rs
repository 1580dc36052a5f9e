//! Replicas: each version is a moment of the guest's disks and lacks nothing, whatever is
//! interrupted at either end or in between, and each one that is kept can be restored.

use crate::machine::{Machine, is_a_moment};
use crate::stage::{Dice, Stage};
use longhaul_parcel::{
    Asked, JobError, Newest, Replica, ReplicaDisk, ReplicaId, ReplicaLink, ReplicaSpec, Replicated,
    Replication, Retention, Schedule, Step,
};
use longhaul_storage::disk::ExportSize;
use std::collections::VecDeque;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

const KEEP: usize = 3;

/// The destination, and a link to it within the process.
struct Destination {
    folder: PathBuf,
    id: ReplicaId,
    replica: Option<Replica>,
    /// Calls until the link is lost, and whether the host ends with it.
    fails_in: Option<(u64, bool)>,
    /// Bytes of records that were sent.
    sent: u64,
    /// What is kept of questions.
    asked: Asked,
    answers: VecDeque<u64>,
}

impl Destination {
    fn new(stage: &Stage, id: ReplicaId) -> Self {
        Self {
            folder: stage.path().join("there"),
            id,
            replica: None,
            fails_in: None,
            sent: 0,
            asked: Asked::default(),
            answers: VecDeque::new(),
        }
    }

    fn images(&self) -> Vec<PathBuf> {
        let images = (0..2).map(|number| self.folder.join(format!("{number}.img")));
        images.collect()
    }

    fn replica(&mut self) -> &mut Replica {
        let folder = self.folder.join("replica");
        if self.replica.is_none() {
            self.replica = Replica::open(&folder).unwrap();
        }
        let (id, images) = (self.id, self.images());
        self.replica.get_or_insert_with(|| {
            fs::create_dir_all(folder.parent().unwrap()).unwrap();
            let disks = images.into_iter().enumerate();
            let disks = disks.map(|(number, path)| ReplicaDisk {
                name: format!("vd{number}"),
                path,
            });
            let spec = ReplicaSpec {
                id,
                guest: "web".into(),
                from: "lyon".into(),
                keep: Retention::last(KEEP as u32),
                every_s: 0,
                disks: disks.collect(),
            };
            Replica::make(&folder, spec).unwrap()
        })
    }

    /// One call over the link, which may be lost before or after it.
    fn call<T>(&mut self, call: impl FnOnce(&mut Replica) -> T) -> io::Result<T> {
        match &mut self.fails_in {
            Some((0, ends)) => {
                let (ends, happens) = (*ends, self.sent.is_multiple_of(2));
                if happens {
                    call(self.replica());
                }
                if ends {
                    self.replica = None;
                }
                self.fails_in = None;
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            Some((left, _)) => *left -= 1,
            None => {}
        }
        Ok(call(self.replica()))
    }

    /// Returns all its files.
    fn files(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let folders = [self.folder.clone(), self.folder.join("replica")];
        let entries = folders
            .iter()
            .flat_map(|folder| fs::read_dir(folder).unwrap());
        let files = entries
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.is_file());
        files
            .map(|path| (path.clone(), fs::read(path).unwrap()))
            .collect()
    }

    fn restore_files(&mut self, files: &[(PathBuf, Vec<u8>)]) {
        self.replica = None;
        fs::remove_dir_all(&self.folder).unwrap();
        fs::create_dir_all(self.folder.join("replica")).unwrap();
        for (path, content) in files {
            fs::write(path, content).unwrap();
        }
    }

    fn restored(&mut self, version: u64) -> Vec<Vec<u8>> {
        let to: Vec<PathBuf> = (0..2)
            .map(|number| self.folder.join(format!("restored.{number}")))
            .collect();
        self.replica().restore(version, &to, &mut |_| ()).unwrap();
        let contents = to.iter().map(|path| fs::read(path).unwrap()).collect();
        for path in to {
            fs::remove_file(path).unwrap();
        }
        contents
    }
}

impl ReplicaLink for Destination {
    fn begin(&mut self, sizes: &[u64]) -> io::Result<Option<Newest>> {
        self.answers.clear();
        self.call(|replica| {
            replica.begin(sizes).unwrap();
            let newest = replica.newest()?;
            Some(Newest {
                version: newest.version,
                is_ours: true,
            })
        })
    }

    fn digests(&mut self, disk: usize, first: u64) -> io::Result<Vec<u8>> {
        self.call(|replica| {
            let left = replica.known_chunks(disk).unwrap().saturating_sub(first);
            replica.digests(disk, first, left.min(7) as usize).unwrap()
        })
    }

    fn put(&mut self, kind: u8, rest: &[u8]) -> io::Result<()> {
        self.sent += rest.len() as u64;
        self.call(|replica| replica.put(kind, rest).unwrap())
    }

    fn ask(&mut self, disk: u32, chunk: u64, digests: &[u8]) -> io::Result<()> {
        self.sent += digests.len() as u64;
        let answer = self.call(|replica| replica.differing(disk as usize, chunk, digests))?;
        self.answers.push_back(answer.unwrap());
        Ok(())
    }

    fn differing(&mut self) -> io::Result<u64> {
        self.call(|_| ())?;
        Ok(self.answers.pop_front().unwrap())
    }

    fn asked(&mut self) -> &mut Asked {
        &mut self.asked
    }

    fn sync(&mut self) -> io::Result<()> {
        self.call(|replica| replica.sync().unwrap())
    }
}

/// Brings a version while the guest writes, and the link or one of the ends fails now and then.
fn replicate(
    folder: &std::path::Path,
    there: &mut Destination,
    machine: &mut Machine,
    dice: &mut Dice,
) -> Replicated {
    let mut failures = dice.below(5);
    loop {
        there.fails_in = None;
        let mut steps = u64::MAX;
        if failures > 0 {
            failures -= 1;
            match dice.below(2) {
                0 => there.fails_in = Some((dice.below(60), dice.below(2) == 0)),
                _ => steps = 1 + dice.below(12),
            }
        }
        // A link is lent for the time of a run, as an agent's is.
        let mut lent = std::mem::replace(
            there,
            Destination {
                folder: there.folder.clone(),
                id: there.id,
                replica: None,
                fails_in: None,
                sent: 0,
                asked: Asked::default(),
                answers: VecDeque::new(),
            },
        );
        let run = catch_unwind(AssertUnwindSafe(|| {
            let source = Replication::open(folder).unwrap();
            let mut source = source.with_tracking(machine.fronts.clone());
            source.run(8, &mut lent, &mut |step| {
                assert!(!matches!(step, Step::MomentLost { .. }), "{step:?}");
                for _ in 0..dice.below(3) {
                    machine.write(dice);
                }
                steps -= 1;
                assert!(steps > 0, "interrupted");
            })
        }));
        *there = lent;
        match run {
            Ok(Ok(replicated)) => return replicated,
            Ok(Err(JobError::Link(_))) | Err(_) => {}
            Ok(Err(error)) => panic!("{error}"),
        }
        for _ in 0..dice.below(3) {
            machine.write(dice);
        }
    }
}

fn schedule() -> Schedule {
    Schedule {
        to: "paris".into(),
        every_s: 600,
        keep: Retention::last(KEEP as u32),
        no_freeze: false,
    }
}

fn source(stage: &Stage, machine: &Machine) -> (PathBuf, Destination) {
    let folder = stage.path().join("here");
    let id = Replication::make(&folder, machine.guest(), schedule())
        .unwrap()
        .id();
    (folder, Destination::new(stage, id))
}

#[test]
fn versions_of_a_replica_are_moments_and_lack_nothing() {
    for seed in 0..6 {
        let mut dice = Dice(seed);
        let stage = Stage::new(0);
        let mut machine = Machine::new(&stage, &mut dice);
        let (folder, mut there) = source(&stage, &machine);
        machine.is_tracked();
        let (mut last, mut versions) = (0, Vec::new());
        let mut backup = None;
        for _ in 0..6 {
            let begun = machine.operations.len();
            let Replicated {
                version,
                consistent,
                ..
            } = replicate(&folder, &mut there, &mut machine, &mut dice);
            assert!(consistent, "{seed}");
            let disks = there.restored(version);
            let moment = is_a_moment(&machine, &disks);
            assert!(
                moment >= begun && moment >= last,
                "{seed}: {last} {begun} {moment}"
            );
            last = moment;
            versions.push((version, disks));
            if backup.is_none() {
                backup = Some((versions.clone(), there.files()));
            }
            for _ in 0..dice.below(5) {
                machine.write(&mut dice);
            }
            match dice.below(7) {
                // It is started again, and tracked later: nobody knows what it wrote meanwhile.
                0 => {
                    machine.is_not_tracked();
                    machine.write(&mut dice);
                    machine.is_tracked();
                }
                1 => machine.is_tracked(),
                // What the destination knows is lost, and its images are damaged.
                2 => {
                    there.replica = None;
                    fs::remove_dir_all(there.folder.join("replica")).unwrap();
                    let image = OpenOptions::new().write(true).open(&there.images()[0]);
                    image.unwrap().write_all_at(b"damaged", 4096).unwrap();
                    versions.clear();
                }
                3 => there.replica = None,
                // It is restored from a backup.
                4 => {
                    let (then, files) = backup.take().unwrap();
                    there.restore_files(&files);
                    versions = then;
                }
                _ => {}
            }
        }
        let kept = there.replica().versions().to_vec();
        assert!(kept.len() <= KEEP, "{seed}");
        let restorable = |version: u64| kept.iter().any(|it| it.version == version);
        for (version, disks) in versions.iter().rev().take(2) {
            // Versions of no moment are kept too, and count.
            if restorable(*version) {
                assert!(there.restored(*version) == *disks, "{seed}: {version}");
            }
        }
        assert!(
            restorable(versions.last().map_or(0, |(version, _)| *version)) || versions.is_empty()
        );
        // It may have been lost at last.
        if !kept.is_empty() {
            there.replica().verify(&mut |_| ()).unwrap();
        }
    }
}

#[test]
fn a_later_version_costs_only_what_has_changed() {
    let mut dice = Dice(1);
    let stage = Stage::new(0);
    let mut machine = Machine::new(&stage, &mut dice);
    machine.size = ExportSize::OfFile;
    let (folder, mut there) = source(&stage, &machine);
    machine.is_tracked();
    replicate(&folder, &mut there, &mut machine, &mut Dice(0));
    // Behind the back of the exports: a version that reads all of the disk would find it.
    let behind = 20 << 20;
    let image = OpenOptions::new().write(true).open(&machine.paths[0]);
    image.unwrap().write_all_at(&[7; 8], behind).unwrap();
    let run = |there: Destination, machine: &Machine| {
        let source = Replication::open(&folder).unwrap();
        let mut source = source.with_tracking(machine.fronts.clone());
        let mut there = Destination { sent: 0, ..there };
        source.run(9, &mut there, &mut |_| ()).unwrap();
        there
    };
    let there = run(there, &machine);
    assert!(
        there.sent < 2 << 20,
        "{} bytes for what was written meanwhile",
        there.sent
    );
    let mut there = run(there, &machine);
    assert!(there.sent < 1000, "{} bytes for nothing", there.sent);
    let newest = there.replica().newest().unwrap().version;
    assert_ne!(there.restored(newest)[0][behind as usize..][..8], [7; 8]);
    // In doubt, all of it is compared, and only what differs is sent.
    machine.is_tracked();
    let mut there = run(there, &machine);
    assert!(there.sent < 8 << 10, "{} bytes for one block", there.sent);
    let newest = there.replica().newest().unwrap().version;
    assert_eq!(there.restored(newest)[0][behind as usize..][..8], [7; 8]);
}

#[test]
fn a_replica_refuses_what_does_not_fit() {
    let stage = Stage::new(0);
    let mut there = Destination::new(&stage, ReplicaId([1; 16]));
    let replica = there.replica();
    replica.begin(&[1 << 20, 4096]).unwrap();
    assert!(replica.begin(&[1 << 20]).is_err());
    replica.begin(&[1 << 20, 4096]).unwrap();
    // A chunk beyond the end, one that is too long, and one of another disk.
    let chunk = |disk, chunk, content: &[u8]| {
        let record = longhaul_parcel::Record::Chunk(longhaul_parcel::Chunk {
            guest: 0,
            disk,
            chunk,
            content: Some(content.to_vec()),
        });
        record.encode().unwrap()
    };
    for (disk, number, length) in [(0, 4, 100), (1, 0, 5000), (2, 0, 100), (1, 1, 1)] {
        let (kind, rest) = chunk(disk, number, &vec![7; length]);
        assert!(
            replica.put(kind, &rest).is_err(),
            "{disk} {number} {length}"
        );
    }
    // A version with a digest that the images would not have.
    let version = longhaul_parcel::Record::Version(longhaul_parcel::Version {
        guest: 0,
        version: 1,
        time: 2,
        consistent: true,
        frozen: false,
        moment: None,
        disks: [0, 1]
            .map(|disk| longhaul_parcel::VersionDisk {
                disk,
                digest: "0".repeat(64),
            })
            .to_vec(),
    });
    let (kind, rest) = version.encode().unwrap();
    let error = replica.put(kind, &rest).unwrap_err();
    assert!(error.to_string().contains("digest"), "{error}");
    assert!(replica.newest().is_none());
    assert!(replica.restore(1, &[], &mut |_| ()).is_err());
}

#[test]
fn a_disk_that_grows_without_its_last_chunk_is_refused() {
    let stage = Stage::new(0);
    let mut there = Destination::new(&stage, ReplicaId([1; 16]));
    let replica = there.replica();
    let digest = |content: &[u8]| {
        use ring::digest::{SHA256, digest};
        let chunk = digest(&SHA256, content);
        let whole = digest(&SHA256, chunk.as_ref());
        let digits = whole.as_ref().iter().map(|byte| format!("{byte:02x}"));
        digits.collect::<String>()
    };
    let version = |version, digests: [String; 2]| {
        let disks = (0..).zip(digests);
        let record = longhaul_parcel::Record::Version(longhaul_parcel::Version {
            guest: 0,
            version,
            time: 2,
            consistent: true,
            frozen: false,
            moment: None,
            disks: disks
                .map(|(disk, digest)| longhaul_parcel::VersionDisk { disk, digest })
                .collect(),
        });
        record.encode().unwrap()
    };
    replica.begin(&[100, 100]).unwrap();
    let (kind, rest) = version(1, [digest(&[0; 100]), digest(&[0; 100])]);
    replica.put(kind, &rest).unwrap();
    // The last chunk has the digest of 100 bytes, and 300 now.
    replica.begin(&[100, 300]).unwrap();
    let (kind, rest) = version(2, [digest(&[0; 100]), digest(&[0; 100])]);
    let error = replica.put(kind, &rest).unwrap_err();
    assert!(error.to_string().contains("digest"), "{error}");
    replica.begin(&[100, 100]).unwrap();
    replica.verify(&mut |_| ()).unwrap();
}
