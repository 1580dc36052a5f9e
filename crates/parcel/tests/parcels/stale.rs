//! Packages that come late: the scenario of paper 002, section 4.1. Host A exports a guest and
//! fails, host C goes on with the export, and then a package of A arrives.

use crate::stage::{Content, Dice, Stage, chunks, disk, guest, read, version};
use longhaul_parcel::{
    CHUNK_BYTES, Device, DeviceError, Found, LocalMedia, Media, Medium, Record, Writer,
};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const DEVICES: usize = 3;

/// Files that several hosts write at once. One host has locks against that.
#[derive(Debug)]
struct Unlocked;

#[derive(Debug)]
struct UnlockedFile(File);

impl Media for Unlocked {
    fn make(&self, at: &Path, name: &str) -> Result<Found, DeviceError> {
        LocalMedia.make(at, name)
    }

    fn find(&self, at: &Path, writable: bool) -> Result<Found, DeviceError> {
        let found = LocalMedia.find(at, false)?;
        let file = File::options().read(true).write(writable).open(&found.path);
        let medium = Box::new(UnlockedFile(file.unwrap()));
        Ok(Found { medium, ..found })
    }

    fn place(&self, at: &Path) -> io::Result<PathBuf> {
        LocalMedia.place(at)
    }
}

impl Medium for UnlockedFile {
    fn length(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read_at(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(bytes, at)
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, at)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn forget(&self) -> io::Result<()> {
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }
}

/// Records of a disk, from a chunk on.
fn rest(content: &Content, from: usize) -> Vec<Record> {
    chunks(0, 0, content).skip(from).collect()
}

/// Returns the parcel of host C, and the writer of host A with what it has not written yet.
fn two_hosts(stage: &Stage, dice: &mut Dice) -> (Content, Writer, Vec<Record>) {
    let mut content = disk(dice, 30);
    let mut a = stage.create(&[200; DEVICES], 1).unwrap();
    a.put(&guest(0, std::slice::from_ref(&content))).unwrap();
    for record in chunks(0, 0, &content).take(10) {
        a.put(&record).unwrap();
    }
    let position = a.sync().unwrap();
    let late = rest(&content, 10);
    // The guest goes on at host C, and so does the export.
    let at = 15 * CHUNK_BYTES;
    content[at..at + 100].copy_from_slice(&dice.bytes(100));
    let devices = (0..DEVICES).map(|device| {
        let at = stage.folder(device);
        Device::open_on(&Unlocked, &at, true).unwrap()
    });
    let mut c = Writer::reopen(devices.collect(), position, &stage.key).unwrap();
    for record in rest(&content, 10) {
        c.put(&record).unwrap();
    }
    c.put(&version(0, 1, std::slice::from_ref(&content)))
        .unwrap();
    c.seal(&mut |_| ()).unwrap();
    (content, a, late)
}

fn arrives(mut a: Writer, late: &[Record]) {
    for record in late {
        a.put(record).unwrap();
    }
    a.sync().unwrap();
}

#[test]
fn a_late_package_of_an_earlier_host_is_never_content() {
    for seed in 0..8 {
        let stage = Stage::new(DEVICES);
        let (content, a, late) = two_hosts(&stage, &mut Dice(seed));
        let (before, _) = read(&stage.open_without(&[]), &stage.key).unwrap();
        assert_eq!(before[&0].as_slice(), std::slice::from_ref(&content));
        arrives(a, &late);
        // It has overwritten more than parity can recover: that is said, whatever is read.
        let (_, report) = read(&stage.open_without(&[]), &stage.key).unwrap();
        assert!(report.lost > 0, "{report:?}");
    }
}

#[test]
fn a_late_package_on_one_device_is_recovered_from_the_others() {
    for seed in 0..8 {
        let mut dice = Dice(seed);
        let stage = Stage::new(DEVICES);
        let (content, a, late) = two_hosts(&stage, &mut dice);
        let of_c = (0..DEVICES).map(|device| fs::read(stage.file(device)).unwrap());
        let of_c: Vec<Vec<u8>> = of_c.collect();
        arrives(a, &late);
        let reached = dice.below(DEVICES as u64) as usize;
        for (device, bytes) in of_c.iter().enumerate() {
            if device != reached {
                fs::write(stage.file(device), bytes).unwrap();
            }
        }
        let (now, report) = read(&stage.open_without(&[]), &stage.key).unwrap();
        assert_eq!((report.lost, &now[&0]), (0, &vec![content]));
        assert!(!report.damage.is_empty(), "{report:?}");
    }
}
