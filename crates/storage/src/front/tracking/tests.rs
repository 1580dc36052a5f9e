//! Tests of the record and of checkpoints.

use super::*;
use crate::disk::{ExportSize, Zeros};
use crate::front::folder::FrontSpec;
use crate::nbd::ExportName;
use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Bytes that are copied in one step.
const STEP_BYTES: usize = 100_000;
const IMAGE_BYTES: u64 = 10 * CHUNK_BYTES + 5;

struct Fixture {
    _above: tempfile::TempDir,
    front: FrontFolder,
    image: PathBuf,
}

impl Fixture {
    fn new() -> Self {
        Self::of(ExportSize::OfFile)
    }

    fn of(size: ExportSize) -> Self {
        let above = tempfile::tempdir().unwrap();
        let image = above.path().join("image");
        File::create(&image).unwrap().set_len(IMAGE_BYTES).unwrap();
        let spec = FrontSpec {
            image: image.clone(),
            size,
            locks: None,
            name: ExportName::new("0123456789abcdef".repeat(2)).unwrap(),
            qemu_uid: None,
            arriving: false,
            tracked: true,
            fetched: None,
            socket: None,
        };
        let front = FrontFolder::create(&above.path().join("f"), &spec).unwrap();
        begin(&front, IMAGE_BYTES).unwrap();
        Self {
            _above: above,
            front,
            image,
        }
    }

    /// Returns the disk as a server has it.
    fn disk(&self) -> Arc<dyn Disk> {
        tracked_disk(&self.front).unwrap()
    }

    fn changed(&self) -> Changed {
        Changed::of(&self.front).unwrap()
    }

    fn prepare(&self, from: Option<u64>) -> Result<Held, CheckpointError> {
        Held::prepare(&self.front, &request(from))
    }

    fn checkpoint(&self, from: Option<u64>) -> Checkpoint {
        self.prepare(from).unwrap().commit().unwrap()
    }
}

fn request(from: Option<u64>) -> Request {
    Request {
        from,
        hold: Duration::from_secs(2),
        log_bytes_max: u64::MAX,
    }
}

fn chunks(range: Range<u64>) -> Range<u64> {
    range.start * CHUNK_BYTES..range.end * CHUNK_BYTES
}

/// Copies what may have changed to a replica, as who copies does.
fn copy(checkpoint: &mut Checkpoint, replica: &mut Vec<u8>) -> Result<(), CheckpointError> {
    let all = checkpoint.image_bytes();
    replica.resize(all as usize, 0);
    for start in (0..all).step_by(STEP_BYTES) {
        let bytes = start..(start + STEP_BYTES as u64).min(all);
        if checkpoint.has_changed(&bytes) {
            let place = &mut replica[bytes.start as usize..bytes.end as usize];
            checkpoint.read(start, place)?;
        }
        checkpoint.copied(bytes.end)?;
    }
    Ok(())
}

#[test]
fn every_kind_of_change_is_recorded_and_nothing_else() {
    let fixture = Fixture::new();
    let disk = fixture.disk();
    let blocks = IMAGE_BYTES.div_ceil(BLOCK_SIZE as u64) * BLOCK_SIZE as u64;
    assert_eq!(fixture.changed().bytes(), 0);
    disk.read(0, &mut [0; 512]).unwrap();
    disk.flush().unwrap();
    assert_eq!(fixture.changed().bytes(), 0);
    disk.write(CHUNK_BYTES - 1, &[1; 2]).unwrap();
    disk.zero(4 * CHUNK_BYTES..5 * CHUNK_BYTES, Zeros::MayBeHole)
        .unwrap();
    disk.discard(5 * CHUNK_BYTES + 512..6 * CHUNK_BYTES)
        .unwrap();
    disk.write(IMAGE_BYTES - 1, &[1]).unwrap();
    let expected = vec![chunks(0..2), chunks(4..6), 10 * CHUNK_BYTES..blocks];
    assert_eq!(fixture.changed().ranges, expected);
    assert_eq!(fixture.changed().image_bytes, blocks);
    // The next server knows the same.
    drop(disk);
    let record = fixture.front.tracked_writes();
    let (round, map) = rounds::open_current(&RealFiles, &record).unwrap();
    assert_eq!(round, 0);
    assert!(map.unrecorded(&(0..1)).is_empty());
    assert_eq!(map.unrecorded(&chunks(1..4)), [2, 3]);
}

#[test]
fn a_sequential_write_is_recorded_ahead_by_as_much_as_is_behind_it() {
    let fixture = Fixture::new();
    let disk = fixture.disk();
    let record = |chunk: u64| {
        disk.write(chunk * CHUNK_BYTES + 7, &[1]).unwrap();
        fixture.changed().ranges
    };
    // One chunk before it is no run.
    assert_eq!(record(1), [chunks(1..2)]);
    assert_eq!(record(2), [chunks(1..3)]);
    assert_eq!(record(3), [chunks(1..6)]);
    assert_eq!(record(5), [chunks(1..6)]);
    assert_eq!(record(0), [chunks(0..6)]);
    // The run before it has six, and the image ends first.
    let blocks = fixture.changed().image_bytes;
    assert_eq!(record(6), vec![0..blocks]);
}

#[test]
fn what_grows_counts_for_the_last_chunk() {
    let fixture = Fixture::of(ExportSize::Bytes(1 << 40));
    let disk = fixture.disk();
    disk.write(1 << 30, &[1; 4096]).unwrap();
    let blocks = fixture.changed().image_bytes;
    let changed = fixture.changed().ranges;
    assert_eq!(
        changed.as_slice(),
        std::slice::from_ref(&(10 * CHUNK_BYTES..blocks))
    );
}

#[test]
fn writes_at_once_are_all_recorded_before_they_begin() {
    let fixture = Fixture::new();
    let disk = fixture.disk();
    thread::scope(|scope| {
        for start in 0..4 {
            let (disk, fixture) = (&disk, &fixture);
            scope.spawn(move || {
                for chunk in (start..10).step_by(2) {
                    let bytes = chunk * CHUNK_BYTES..chunk * CHUNK_BYTES + 1;
                    disk.write(bytes.start, &[1]).unwrap();
                    let changed = fixture.changed().ranges;
                    assert!(changed.iter().any(|range| range.contains(&bytes.start)));
                }
            });
        }
    });
    // And perhaps the last one, ahead of them.
    let changed = fixture.changed();
    let [all] = &changed.ranges[..] else {
        panic!("{:?}", changed.ranges);
    };
    assert!(all.start == 0 && all.end >= 10 * CHUNK_BYTES, "{all:?}");
}

#[test]
fn a_checkpoint_is_a_moment_of_both_disks_while_writes_go_on() {
    let fixtures = [Fixture::new(), Fixture::new()];
    let disks = fixtures.each_ref().map(Fixture::disk);
    let (ended, mut replicas) = (AtomicBool::new(false), [Vec::new(), Vec::new()]);
    let places = IMAGE_BYTES / 8192;
    thread::scope(|scope| {
        // Each writes its number to a place of the first disk, and then to one of the second.
        for writer in 0..3_u64 {
            let (disks, ended) = (&disks, &ended);
            scope.spawn(move || {
                for number in 1_u64.. {
                    let place = (number * 7919 + writer) % places * 8192;
                    for disk in disks {
                        disk.write(writer * 8, &number.to_le_bytes()).unwrap();
                        disk.write(place.max(4096), &number.to_le_bytes()).unwrap();
                    }
                    if ended.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
        }
        let mut from = None;
        for _ in 0..12 {
            let held = fixtures.each_ref().map(|fixture| fixture.prepare(from));
            let held = held.map(Result::unwrap);
            let mut checkpoints = held.map(|held| held.commit().unwrap());
            for (checkpoint, replica) in checkpoints.iter_mut().zip(&mut replicas) {
                copy(checkpoint, replica).unwrap();
            }
            for writer in 0..3 {
                let number = |replica: &Vec<u8>| {
                    u64::from_le_bytes(replica[writer * 8..][..8].try_into().unwrap())
                };
                let [first, second] = replicas.each_ref().map(number);
                assert!(second == first || second + 1 == first, "{first} {second}");
            }
            let round = checkpoints[0].round();
            assert_eq!(round, checkpoints[1].round());
            drop(checkpoints);
            for fixture in &fixtures {
                ship(&fixture.front, round).unwrap();
            }
            from = Some(round + 1);
        }
        ended.store(true, Ordering::Relaxed);
    });
    let last = fixtures
        .each_ref()
        .map(|fixture| fixture.prepare(Some(12)).unwrap());
    for ((held, replica), fixture) in last.into_iter().zip(&mut replicas).zip(&fixtures) {
        copy(&mut held.commit().unwrap(), replica).unwrap();
        assert!(
            *replica == std::fs::read(&fixture.image).unwrap(),
            "they differ"
        );
    }
}

#[test]
fn writes_wait_for_a_checkpoint_and_not_longer_than_was_said() {
    let fixture = Fixture::new();
    let disk = fixture.disk();
    disk.write(0, &[1]).unwrap();
    let short = Request {
        hold: Duration::from_millis(100),
        ..request(None)
    };
    let held = Held::prepare(&fixture.front, &short).unwrap();
    // This returns although nothing is committed.
    disk.write(0, &[2]).unwrap();
    let refusal = held.commit().unwrap_err();
    assert!(matches!(refusal, CheckpointError::Lost(_)), "{refusal}");
    // One that is dropped lets them go on at once.
    drop(fixture.prepare(None).unwrap());
    disk.write(CHUNK_BYTES, &[3]).unwrap();
    // Neither has lost a change.
    let mut checkpoint = fixture.checkpoint(Some(0));
    let mut replica = Vec::new();
    copy(&mut checkpoint, &mut replica).unwrap();
    assert_eq!((replica[0], replica[CHUNK_BYTES as usize]), (2, 3));
    assert_eq!(checkpoint.changed_bytes(), 2 * CHUNK_BYTES);
}

#[test]
fn one_checkpoint_of_a_disk_is_copied_at_a_time() {
    let fixture = Fixture::new();
    let _disk = fixture.disk();
    let checkpoint = fixture.checkpoint(None);
    let refusal = fixture.prepare(None).unwrap_err();
    assert!(
        refusal.to_string().contains("another checkpoint"),
        "{refusal}"
    );
    drop(checkpoint);
    while fixture.prepare(None).is_err() {
        thread::yield_now();
    }
}

#[test]
fn a_log_that_is_full_loses_the_checkpoint_and_no_change() {
    let fixture = Fixture::new();
    let disk = fixture.disk();
    disk.write(0, &[1; 3 * CHUNK_BYTES as usize]).unwrap();
    let small = Request {
        log_bytes_max: CHUNK_BYTES,
        ..request(Some(0))
    };
    let held = Held::prepare(&fixture.front, &small).unwrap();
    let mut checkpoint = held.commit().unwrap();
    let mut content = [0; 1];
    for chunk in 0..3 {
        disk.write(chunk * CHUNK_BYTES, &[2; CHUNK_BYTES as usize])
            .unwrap();
        if chunk == 0 {
            checkpoint.read(0, &mut content).unwrap();
            checkpoint.copied(0).unwrap();
            assert_eq!(content, [1]);
        }
    }
    let refusal = checkpoint.copied(0).unwrap_err();
    assert!(
        refusal.to_string().contains("copy-before-write log"),
        "{refusal}"
    );
    drop(checkpoint);
    let mut checkpoint = loop {
        match fixture.prepare(Some(0)) {
            Ok(held) => break held.commit().unwrap(),
            Err(_) => thread::yield_now(),
        }
    };
    let mut replica = Vec::new();
    copy(&mut checkpoint, &mut replica).unwrap();
    assert!(replica == std::fs::read(&fixture.image).unwrap());
}

#[test]
fn what_was_copied_or_is_not_wanted_costs_nothing() {
    let fixture = Fixture::new();
    let disk = fixture.disk();
    disk.write(0, &[1; 3 * CHUNK_BYTES as usize]).unwrap();
    let nothing = Request {
        log_bytes_max: 0,
        ..request(Some(0))
    };
    let held = Held::prepare(&fixture.front, &nothing).unwrap();
    let mut checkpoint = held.commit().unwrap();
    checkpoint.copied(2 * CHUNK_BYTES).unwrap();
    disk.write(CHUNK_BYTES, &[2]).unwrap();
    disk.write(5 * CHUNK_BYTES, &[2]).unwrap();
    checkpoint.copied(2 * CHUNK_BYTES).unwrap();
    disk.write(2 * CHUNK_BYTES, &[2]).unwrap();
    checkpoint.copied(2 * CHUNK_BYTES).unwrap_err();
}

#[test]
fn an_image_that_grows_is_copied_as_long_as_it_was() {
    let fixture = Fixture::of(ExportSize::Bytes(1 << 40));
    let disk = fixture.disk();
    let mut replica = Vec::new();
    copy(&mut fixture.checkpoint(None), &mut replica).unwrap();
    disk.write(20 * CHUNK_BYTES, &[1; 10]).unwrap();
    let mut checkpoint = loop {
        match fixture.prepare(Some(1)) {
            Ok(held) => break held.commit().unwrap(),
            Err(_) => thread::yield_now(),
        }
    };
    disk.write(20 * CHUNK_BYTES, &[2; 10]).unwrap();
    disk.write(21 * CHUNK_BYTES, &[2; 10]).unwrap();
    copy(&mut checkpoint, &mut replica).unwrap();
    assert_eq!(replica.len() as u64, 20 * CHUNK_BYTES + 10);
    assert_eq!(replica[20 * CHUNK_BYTES as usize..], [1; 10]);
}

#[test]
fn rounds_that_were_forgotten_are_missed() {
    let fixture = Fixture::new();
    let disk = fixture.disk();
    disk.write(0, &[1]).unwrap();
    let checkpoint = fixture.checkpoint(Some(0));
    assert_eq!(
        (checkpoint.round(), current(&fixture.front).unwrap()),
        (0, 1)
    );
    drop(checkpoint);
    // The current round stays.
    ship(&fixture.front, 7).unwrap();
    assert_eq!(current(&fixture.front).unwrap(), 1);
    assert_eq!(fixture.changed().bytes(), 0);
    let refusal = fixture.prepare(Some(0)).unwrap_err();
    assert!(matches!(refusal, CheckpointError::Forgotten), "{refusal}");
    let id = TrackingId::of(&fixture.front).unwrap().to_string();
    assert!(
        id.len() == 16 && !"0123456789abcdef".repeat(2).contains(&id),
        "{id}"
    );
}

#[test]
fn many_rounds_become_one_and_lack_nothing() {
    let fixture = Fixture::new();
    let disk = fixture.disk();
    for n in 0..40 {
        disk.write(n % 10 * CHUNK_BYTES, &[1]).unwrap();
        while fixture.prepare(Some(0)).and_then(Held::commit).is_err() {
            thread::yield_now();
        }
    }
    let record = fixture.front.tracked_writes();
    let files = std::fs::read_dir(&record).unwrap().count();
    assert!(files < 20, "{files}");
    assert_eq!(fixture.changed().ranges, [chunks(0..10)]);
    let since = |from| Changed::between(&RealFiles, &record, (from, 40)).unwrap();
    assert_eq!(since(0).unwrap().ranges, [chunks(0..10)]);
    assert_eq!(since(39).unwrap().ranges, [chunks(9..10)]);
    assert_eq!(since(41).unwrap().ranges, []);
}
