//! A parcel of files with guests whose content is known.

use longhaul_parcel::{
    CELL_BYTES, CHUNK_BYTES, Chunk, DataKey, Device, Disk, Guest, Parcel, ReadError, Record,
    Report, Settings, Version, VersionDisk, WriteError, Writer,
};
use ring::digest::{SHA256, digest};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Numbers that look random and are the same each time (splitmix64).
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub(crate) fn bytes(&mut self, length: usize) -> Vec<u8> {
        let words = (0..length.div_ceil(8)).flat_map(|_| self.next().to_le_bytes());
        words.take(length).collect()
    }
}

/// A disk's content.
pub(crate) type Content = Vec<u8>;

/// The folders of a parcel's devices, and its key.
pub(crate) struct Stage {
    root: TempDir,
    pub(crate) key: DataKey,
    devices: usize,
}

/// Returns a disk of some chunks: noise, text and zeros, and a last chunk that is not whole.
pub(crate) fn disk(dice: &mut Dice, chunks: usize) -> Content {
    let mut content = Vec::new();
    for chunk in 0..chunks {
        content.extend(match chunk % 4 {
            0 | 1 => dice.bytes(CHUNK_BYTES),
            2 => {
                format!("{} ", dice.next()).repeat(CHUNK_BYTES).into_bytes()[..CHUNK_BYTES].to_vec()
            }
            _ => vec![0; CHUNK_BYTES],
        });
    }
    content.extend(dice.bytes(5000));
    content
}

pub(crate) fn guest(guest: u32, disks: &[Content]) -> Record {
    let each = disks.iter().zip(0..);
    Record::Guest(Guest {
        guest,
        name: format!("guest-{guest}"),
        disks: each
            .map(|(content, disk)| Disk {
                disk,
                name: format!("disk-{disk}"),
                bytes: content.len() as u64,
                used: None,
            })
            .collect(),
        description: serde_json::json!({"memory_mib": 512}),
    })
}

pub(crate) fn chunks(guest: u32, disk: u32, content: &[u8]) -> impl Iterator<Item = Record> {
    let parts = content.chunks(CHUNK_BYTES).zip(0..);
    parts.map(move |(part, chunk)| {
        Record::Chunk(Chunk {
            guest,
            disk,
            chunk,
            content: Some(part.to_vec()),
        })
    })
}

fn digest_of(content: &[u8]) -> String {
    let parts = content.chunks(CHUNK_BYTES);
    let digests: Vec<u8> = parts
        .flat_map(|part| digest(&SHA256, part).as_ref().to_vec())
        .collect();
    let whole = digest(&SHA256, &digests);
    whole
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

pub(crate) fn version(guest: u32, version: u64, disks: &[Content]) -> Record {
    let each = disks.iter().zip(0..);
    Record::Version(Version {
        guest,
        version,
        time: 1_800_000_000,
        consistent: true,
        frozen: false,
        moment: None,
        disks: each
            .map(|(content, disk)| VersionDisk {
                disk,
                digest: digest_of(content),
            })
            .collect(),
    })
}

/// Puts a whole guest.
pub(crate) fn put_guest(
    writer: &mut Writer,
    number: u32,
    disks: &[Content],
) -> Result<(), WriteError> {
    writer.put(&guest(number, disks))?;
    for (content, disk) in disks.iter().zip(0..) {
        for record in chunks(number, disk, content) {
            writer.put(&record)?;
        }
    }
    writer.put(&version(number, 1, disks))
}

impl Stage {
    pub(crate) fn new(devices: usize) -> Self {
        let root = tempfile::tempdir().unwrap();
        for device in 0..devices {
            fs::create_dir(root.path().join(device.to_string())).unwrap();
        }
        Self {
            root,
            key: DataKey::from_bytes([7; 32]),
            devices,
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.root.path()
    }

    pub(crate) fn folder(&self, device: usize) -> PathBuf {
        self.root.path().join(device.to_string())
    }

    pub(crate) fn file(&self, device: usize) -> PathBuf {
        self.folder(device).join(format!("box-{device}.parcel"))
    }

    /// Creates the parcel; `cells` are the capacities of its devices.
    pub(crate) fn create(&self, cells: &[u64], parity: u8) -> Result<Writer, WriteError> {
        let devices = cells.iter().enumerate().map(|(device, cells)| {
            let limit = cells * CELL_BYTES as u64;
            Device::create(&self.folder(device), &format!("box-{device}"), Some(limit))
        });
        let settings = Settings {
            name: "box".into(),
            to: "paris".into(),
            parity,
            now: 1_800_000_000,
        };
        Writer::create(devices.collect::<Result<_, _>>()?, &settings, &self.key)
    }

    /// Opens its devices, to write.
    pub(crate) fn devices(&self) -> Vec<Device> {
        let each =
            (0..self.devices).map(|device| Device::open(&self.folder(device), true).unwrap());
        each.collect()
    }

    /// Opens it without some devices.
    pub(crate) fn open_without(&self, lost: &[usize]) -> Parcel {
        let there = (0..self.devices).filter(|device| !lost.contains(device));
        // The order does not matter.
        let devices = there
            .rev()
            .map(|device| Device::open(&self.folder(device), false).unwrap());
        Parcel::open(devices.collect()).unwrap()
    }

    /// Flips a bit of a device.
    pub(crate) fn flip(&self, device: usize, at: u64) {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(self.file(device))
            .unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        byte[0] ^= 4;
        file.write_all_at(&byte, at).unwrap();
    }
}

/// Reads all guests as of their last versions, and checks their digests.
pub(crate) fn read(
    parcel: &Parcel,
    key: &DataKey,
) -> Result<(BTreeMap<u32, Vec<Content>>, Report), ReadError> {
    let mut now: BTreeMap<u32, Vec<Content>> = BTreeMap::new();
    let mut versions = BTreeMap::new();
    let report = parcel.read(key, |record| {
        match record {
            Record::Guest(guest) => {
                let disks = guest.disks.iter().map(|disk| vec![0; disk.bytes as usize]);
                now.entry(guest.guest).or_insert_with(|| disks.collect());
            }
            Record::Chunk(chunk) => {
                let disks = now.get_mut(&chunk.guest).unwrap();
                let from = chunk.chunk as usize * CHUNK_BYTES;
                let disk = &mut disks[chunk.disk as usize][from..];
                let length = disk.len().min(CHUNK_BYTES);
                match chunk.content {
                    Some(content) => disk[..length].copy_from_slice(&content),
                    None => disk[..length].fill(0),
                }
            }
            Record::Version(version) => {
                let disks = now[&version.guest].clone();
                versions.insert(version.guest, (version, disks));
            }
        }
        Ok::<_, Infallible>(())
    })?;
    let mut read = BTreeMap::new();
    for (guest, (version, disks)) in versions {
        if report.lost == 0 {
            for (disk, content) in version.disks.iter().zip(&disks) {
                assert_eq!(disk.digest, digest_of(content), "guest {guest}");
            }
        }
        read.insert(guest, disks);
    }
    Ok((read, report))
}
