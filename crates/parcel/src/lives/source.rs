//! Disks that are written while they are exported, and what they once were.

use crate::job::{JobDisk, JobGuest};
use crate::lives::dice::Dice;
use crate::record::CHUNK_BYTES;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A disk, with the history of each of its chunks.
#[derive(Debug)]
struct Disk {
    path: PathBuf,
    file: File,
    content: Vec<u8>,
    /// What each chunk was, and from which time on.
    history: Vec<Vec<(u64, Arc<[u8]>)>>,
}

/// All disks.
#[derive(Debug)]
pub(super) struct Source {
    disks: Vec<Disk>,
    pub(super) time: u64,
}

impl Source {
    pub(super) fn new(folder: &Path, dice: &mut Dice) -> Self {
        let count = 1 + dice.below(4);
        let disks = (0..count).map(|number| {
            let path = folder.join(format!("disk-{number}"));
            let bytes = match dice.below(4) {
                0 => 1 + dice.below(CHUNK_BYTES as u64),
                1 => dice.below(4) * CHUNK_BYTES as u64 + 1,
                _ => dice.below(40 * CHUNK_BYTES as u64) + 1,
            };
            let mut content = vec![0; bytes as usize];
            for chunk in content.chunks_mut(CHUNK_BYTES) {
                match dice.below(4) {
                    0 => {}
                    1 => {
                        let noise = dice.bytes(chunk.len());
                        chunk.copy_from_slice(&noise);
                    }
                    _ => chunk.fill(1 + dice.below(255) as u8),
                }
            }
            fs::write(&path, &content).expect("there is room");
            let chunks = content.chunks(CHUNK_BYTES);
            Disk {
                file: OpenOptions::new().write(true).open(&path).expect("a disk"),
                path,
                history: chunks.map(|chunk| vec![(0, chunk.into())]).collect(),
                content,
            }
        });
        Self {
            disks: disks.collect(),
            time: 1,
        }
    }

    /// Returns the guests that have the disks.
    pub(super) fn guests(&self) -> Vec<JobGuest> {
        let mut guests: Vec<JobGuest> = Vec::new();
        for (number, disk) in self.disks.iter().enumerate() {
            if number % 3 == 0 {
                guests.push(JobGuest {
                    name: format!("guest-{}", guests.len()),
                    disks: Vec::new(),
                });
            }
            let disk = JobDisk {
                name: format!("disk-{number}"),
                path: disk.path.clone(),
            };
            guests.last_mut().expect("one").disks.push(disk);
        }
        guests
    }

    pub(super) fn count(&self) -> usize {
        self.disks.len()
    }

    pub(super) fn sizes(&self) -> Vec<u64> {
        let sizes = self.disks.iter().map(|disk| disk.content.len() as u64);
        sizes.collect()
    }

    /// Returns the time, and the sizes of the disks.
    pub(super) fn now(&self) -> (u64, Vec<u64>) {
        (self.time, self.sizes())
    }

    /// Writes something somewhere.
    pub(super) fn write(&mut self, dice: &mut Dice) {
        let which = dice.below(self.disks.len() as u64) as usize;
        let disk = &mut self.disks[which];
        let at = dice.below(disk.content.len() as u64) as usize;
        let most = (disk.content.len() - at).min(2 * CHUNK_BYTES);
        let length = 1 + dice.below(most as u64) as usize;
        let new = match dice.below(3) {
            0 => vec![0; length],
            _ => dice.bytes(length),
        };
        disk.content[at..at + length].copy_from_slice(&new);
        disk.file
            .write_all_at(&new, at as u64)
            .expect("there is room");
        self.time += 1;
        disk.remember(at, length, self.time);
    }

    /// Changes the size of a disk.
    pub(super) fn resize(&mut self, dice: &mut Dice) {
        let which = dice.below(self.disks.len() as u64) as usize;
        let disk = &mut self.disks[which];
        let size = disk.content.len();
        let new = match dice.once_in(4) {
            true => 1 + dice.below(size as u64) as usize,
            false => size + dice.below(3 * CHUNK_BYTES as u64) as usize,
        };
        disk.content.resize(new, 0);
        disk.file.set_len(new as u64).expect("there is room");
        self.time += 1;
        let chunks = new.div_ceil(CHUNK_BYTES);
        if disk.history.len() < chunks {
            disk.history.resize_with(chunks, Vec::new);
        }
        for gone in &mut disk.history[chunks..] {
            gone.push((self.time, Vec::new().into()));
        }
        let from = (size.min(new) - 1) / CHUNK_BYTES * CHUNK_BYTES;
        disk.remember(from, new - from, self.time);
    }

    /// Returns what of a disk it never was between two times, both of them included: a chunk.
    pub(super) fn never_was(
        &self,
        disk: usize,
        content: &[u8],
        (from, to): (u64, u64),
    ) -> Option<usize> {
        let history = &self.disks[disk].history;
        let chunks = content.chunks(CHUNK_BYTES).enumerate();
        let never = |(number, chunk): &(usize, &[u8])| {
            let Some(history) = history.get(*number) else {
                return true;
            };
            let first = history.iter().rposition(|(time, _)| *time <= from);
            let states = history[first.unwrap_or(0)..].iter();
            let mut states = states.filter(|(time, _)| *time <= to);
            !states.any(|(_, was)| was.starts_with(chunk))
        };
        chunks.into_iter().find(never).map(|(number, _)| number)
    }
}

impl Disk {
    fn remember(&mut self, at: usize, length: usize, time: u64) {
        if length == 0 {
            return;
        }
        for chunk in at / CHUNK_BYTES..=(at + length - 1) / CHUNK_BYTES {
            let from = chunk * CHUNK_BYTES;
            let to = (from + CHUNK_BYTES).min(self.content.len());
            self.history[chunk].push((time, self.content[from..to].into()));
        }
    }
}
