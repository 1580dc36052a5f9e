//! Parcels whose writer was killed, or whose host lost power.

use crate::stage::{Content, Dice, Stage, chunks, disk, guest, read, version};
use longhaul_parcel::{CELL_BYTES, CHUNK_BYTES, Record, Writer};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;

/// What a power cut leaves of what was not synced.
fn cut(stage: &Stage, devices: usize, from: u64, dice: &mut Dice) {
    for device in 0..devices {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(stage.file(device))
            .unwrap();
        let length = file.metadata().unwrap().len();
        let end = from * CELL_BYTES as u64;
        if length <= end {
            continue;
        }
        let kept = end + dice.below(length - end + 1);
        file.set_len(kept).unwrap();
        // Pages that were never written back.
        for _ in 0..dice.below(8) {
            let page = (kept - end) / 4096;
            if page > 0 {
                let at = end + dice.below(page) * 4096;
                file.write_all_at(&[0; 4096], at).unwrap();
            }
        }
    }
}

/// Puts records, and syncs now and then. Returns how many are durable.
fn put_some(writer: &mut Writer, records: &[Record], dice: &mut Dice) -> usize {
    let stops_at = dice.below(records.len() as u64 + 1) as usize;
    let mut durable = 0;
    for (n, record) in records.iter().enumerate().take(stops_at) {
        writer.put(record).unwrap();
        if dice.below(12) == 0 {
            writer.sync().unwrap();
            durable = n + 1;
        }
    }
    durable
}

fn is_interrupted(seed: u64) {
    let mut dice = Dice(seed);
    let devices = 1 + dice.below(4) as usize;
    let parity = dice.below(devices.min(3) as u64) as u8;
    let stage = Stage::new(devices);
    let cells: Vec<u64> = (0..devices).map(|_| 150 + dice.below(50)).collect();
    let mut disks: Vec<Content> = (0..2).map(|_| disk(&mut dice, 12)).collect();
    let mut writer = stage.create(&cells, parity).unwrap();
    // Two versions: of the second only what has changed.
    let mut records = vec![guest(0, &disks)];
    for (content, number) in disks.iter().zip(0..) {
        records.extend(chunks(0, number, content));
    }
    records.push(version(0, 1, &disks));
    for (content, number) in disks.iter_mut().zip(0..) {
        let changed = dice.below(12);
        let at = changed as usize * CHUNK_BYTES;
        let new = dice.bytes(CHUNK_BYTES);
        content[at..at + CHUNK_BYTES].copy_from_slice(&new);
        records.extend(chunks(0, number, content).nth(changed as usize));
    }
    records.push(version(0, 2, &disks));

    let mut left = &records[..];
    for _ in 0..1 + dice.below(4) {
        let durable = put_some(&mut writer, left, &mut dice);
        left = &left[durable..];
        let position = writer.position();
        drop(writer);
        cut(&stage, devices, position.end, &mut dice);
        writer = Writer::reopen(stage.devices(), position, &stage.key).unwrap();
        if left.is_empty() {
            break;
        }
    }
    for record in left {
        writer.put(record).unwrap();
    }
    let (_, position) = writer.seal(&mut |_| ()).unwrap();
    let lost: Vec<usize> = (0..usize::from(parity)).collect();
    let (found, report) = read(&stage.open_without(&lost), &stage.key).unwrap();
    assert_eq!(report.lost, 0, "{report:?}");
    assert!(found[&0] == disks, "seed {seed}");

    // A sealed parcel is topped up, and sealed again.
    let before = fs::read(stage.file(0)).unwrap();
    let mut writer = Writer::reopen(stage.devices(), position, &stage.key).unwrap();
    let new = dice.bytes(CHUNK_BYTES);
    disks[0][..CHUNK_BYTES].copy_from_slice(&new);
    writer
        .put(&chunks(0, 0, &disks[0]).next().unwrap())
        .unwrap();
    writer.put(&version(0, 3, &disks)).unwrap();
    writer.seal(&mut |_| ()).unwrap();
    let (found, _) = read(&stage.open_without(&lost), &stage.key).unwrap();
    assert!(found[&0] == disks, "seed {seed}");
    let after = fs::read(stage.file(0)).unwrap();
    assert!(after.starts_with(&before), "something was overwritten");
}

#[test]
fn whatever_was_synced_is_there_after_power_cuts() {
    for seed in 0..12 {
        is_interrupted(seed);
    }
}
