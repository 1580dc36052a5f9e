//! Devices that are lost, damaged, full, mixed up or altered.

use crate::stage::{Content, Dice, Stage, disk, put_guest, read};
use longhaul_parcel::{
    CELL_BYTES, Damage, DataKey, Device, OpenError, Parcel, ReadError, WriteError, Writer,
};
use std::fs;

const CELL: u64 = CELL_BYTES as u64;

/// Writes a sealed parcel with two guests, and returns their content.
fn sealed(stage: &Stage, cells: &[u64], parity: u8) -> Vec<Vec<Content>> {
    let mut dice = Dice(1);
    let guests = vec![
        vec![disk(&mut dice, 9), disk(&mut dice, 17)],
        vec![disk(&mut dice, 5)],
    ];
    let mut writer = stage.create(cells, parity).unwrap();
    for (disks, number) in guests.iter().zip(0..) {
        put_guest(&mut writer, number, disks).unwrap();
    }
    let mut rows = 0;
    writer.seal(&mut |read| rows = read).unwrap();
    assert!(rows > 0, "nothing was read back");
    guests
}

fn holds(stage: &Stage, lost: &[usize], guests: &[Vec<Content>]) {
    let parcel = stage.open_without(lost);
    let (found, report) = read(&parcel, &stage.key).unwrap();
    let found: Vec<Vec<Content>> = found.into_values().collect();
    assert!(found == guests, "without {lost:?}");
    assert_eq!(report.lost, 0);
    let absent: Vec<usize> = report.damage.iter().map(|(device, _)| *device).collect();
    assert!(
        lost.iter().all(|device| absent.contains(device)),
        "{report:?}"
    );
    assert_eq!(parcel.verify(&mut |_| ()).lost, 0);
}

#[test]
fn as_many_devices_may_be_lost_as_was_asked_for() {
    for (cells, parity) in [
        (&[40, 40][..], 0),
        (&[40, 40], 1),
        (&[30, 9, 40, 17], 1),
        (&[40, 40, 12], 2),
        (&[40, 7, 40, 12, 40], 2),
    ] {
        let stage = Stage::new(cells.len());
        let guests = sealed(&stage, cells, parity);
        holds(&stage, &[], &guests);
        for x in 0..cells.len() {
            if parity >= 1 {
                holds(&stage, &[x], &guests);
            }
            for y in 0..x {
                if parity >= 2 && cells.len() > 2 {
                    holds(&stage, &[y, x], &guests);
                }
            }
        }
    }
}

#[test]
fn a_device_too_many_is_a_loss_that_is_said() {
    let stage = Stage::new(3);
    let guests = sealed(&stage, &[40; 3], 1);
    let parcel = stage.open_without(&[0, 1]);
    let report = parcel.verify(&mut |_| ());
    assert!(report.lost > 0 && !report.is_clean());
    assert!(report.damage.contains(&(0, Damage::Absent)), "{report:?}");
    let (found, report) = read(&parcel, &stage.key).unwrap();
    assert!(report.lost > 0);
    assert!(found.into_values().collect::<Vec<_>>() != guests);
}

#[test]
fn a_flipped_bit_in_any_part_of_any_cell_is_found_and_recovered() {
    let stage = Stage::new(3);
    let guests = sealed(&stage, &[40; 3], 1);
    let rows = fs::metadata(stage.file(0)).unwrap().len() / CELL;
    let mut dice = Dice(2);
    for row in 1..rows - 1 {
        let device = dice.below(3) as usize;
        let at = match row % 3 {
            0 => dice.below(CELL),
            1 => CELL - 1 - dice.below(32),
            _ => CELL - 33 - dice.below(32),
        };
        stage.flip(device, row * CELL + at);
    }
    let (found, report) = read(&stage.open_without(&[]), &stage.key).unwrap();
    assert!(found.into_values().collect::<Vec<_>>() == guests);
    let damaged: u64 = report
        .damage
        .iter()
        .map(|(_, damage)| match damage {
            Damage::Cells { cells, .. } => *cells,
            Damage::Absent => 0,
        })
        .sum();
    assert_eq!((damaged, report.lost), (rows - 2, 0), "{report:?}");
    // Headers are on each device: one is enough.
    for device in 0..2 {
        stage.flip(device, 10);
        stage.flip(device, (rows - 1) * CELL + 10);
    }
    let error = Parcel::open(vec![Device::open(&stage.folder(0), false).unwrap()]);
    assert!(matches!(error, Err(OpenError::NoHeader)), "{error:?}");
    // Any valid cell says which device it is on.
    assert_eq!(stage.open_without(&[]).verify(&mut |_| ()).lost, 0);
}

#[test]
fn what_does_not_belong_together_is_refused() {
    let (stage, other) = (Stage::new(2), Stage::new(2));
    sealed(&stage, &[60; 2], 0);
    sealed(&other, &[60; 2], 0);
    let open = |stage: &Stage, device| Device::open(&stage.folder(device), false).unwrap();
    let mixed = Parcel::open(vec![open(&stage, 0), open(&other, 1)]);
    assert!(matches!(mixed, Err(OpenError::Mixed { .. })), "{mixed:?}");
    let twice = Parcel::open(vec![open(&stage, 0), open(&stage, 0)]);
    assert!(matches!(twice, Err(OpenError::Twice { .. })), "{twice:?}");
    let wrong = read(&stage.open_without(&[]), &DataKey::from_bytes([8; 32]));
    assert!(matches!(wrong, Err(ReadError::Key { .. })));
    // A new device never overwrites another one.
    let refused = stage.create(&[60; 2], 0);
    assert!(matches!(refused, Err(WriteError::Device(_))));
}

/// An attacker without the key copies the body of one cell to another, and corrects its digest.
#[test]
fn an_altered_cell_is_not_accepted() {
    let stage = Stage::new(1);
    sealed(&stage, &[60], 0);
    let path = stage.file(0);
    let mut bytes = fs::read(&path).unwrap();
    let cell = CELL_BYTES;
    let (first, second) = (cell..2 * cell - 64, 2 * cell..3 * cell - 64);
    let body = bytes[second].to_vec();
    bytes[first].copy_from_slice(&body);
    let sum = ring::digest::digest(&ring::digest::SHA256, &bytes[cell..2 * cell - 32]);
    bytes[2 * cell - 32..2 * cell].copy_from_slice(sum.as_ref());
    fs::write(&path, bytes).unwrap();
    let parcel = stage.open_without(&[]);
    assert!(
        parcel.verify(&mut |_| ()).is_clean(),
        "the digests are correct"
    );
    let refused = read(&parcel, &stage.key);
    assert!(matches!(
        refused,
        Err(ReadError::Altered { row: 1, device: 0 })
    ));
}

#[test]
fn full_devices_say_so_and_can_still_be_sealed() {
    full_and_sealed(&[6, 8, 12]);
    full_and_sealed(&[9, 9, 9]);
}

fn full_and_sealed(cells: &[u64]) {
    let stage = Stage::new(cells.len());
    let mut writer = stage.create(cells, 1).unwrap();
    let mut dice = Dice(3);
    let small = vec![disk(&mut dice, 3)];
    put_guest(&mut writer, 0, &small).unwrap();
    let position = writer.sync().unwrap();
    let full = put_guest(&mut writer, 1, &[disk(&mut dice, 200)]);
    assert!(matches!(full, Err(WriteError::Full)), "{full:?}");
    drop(writer);
    let reopened = Writer::reopen(stage.devices(), position, &stage.key);
    reopened.unwrap().seal(&mut |_| ()).unwrap();
    let (found, report) = read(&stage.open_without(&[1]), &stage.key).unwrap();
    assert_eq!(
        (found.get(&0), found.len(), report.lost),
        (Some(&small), 1, 0)
    );
}

#[test]
fn damage_before_the_seal_is_found_by_it() {
    let stage = Stage::new(2);
    let mut writer = stage.create(&[60; 2], 1).unwrap();
    put_guest(&mut writer, 0, &[disk(&mut Dice(4), 9)]).unwrap();
    writer.sync().unwrap();
    stage.flip(1, 2 * CELL + 99);
    let refused = writer.seal(&mut |_| ());
    let Err(WriteError::Damaged(report)) = refused else {
        panic!("it is sealed");
    };
    assert_eq!(report.damage.len(), 1, "{report:?}");
    let devices = stage.devices();
    let unsealed = Parcel::open(devices);
    assert!(
        matches!(unsealed, Err(OpenError::Unsealed(_))),
        "{unsealed:?}"
    );
}

/// An attacker without the key changes the last header, and corrects its digest.
#[test]
fn an_altered_header_is_not_accepted() {
    let stage = Stage::new(1);
    sealed(&stage, &[60], 0);
    let path = stage.file(0);
    let mut bytes = fs::read(&path).unwrap();
    let cell = bytes.len() - CELL_BYTES;
    let is_there = |part: &[u8]| part == b"\"to\":\"paris\"";
    let at = cell + bytes[cell..].windows(12).position(is_there).unwrap();
    bytes[at + 6] = b'P';
    let sum = ring::digest::digest(&ring::digest::SHA256, &bytes[cell..cell + CELL_BYTES - 32]);
    let end = bytes.len();
    bytes[end - 32..].copy_from_slice(sum.as_ref());
    fs::write(&path, bytes).unwrap();
    let parcel = stage.open_without(&[]);
    assert_eq!(parcel.header().to, "Paris");
    let refused = read(&parcel, &stage.key);
    assert!(matches!(refused, Err(ReadError::AlteredHeader)));
}
