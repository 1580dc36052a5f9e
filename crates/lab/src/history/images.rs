//! Stores the record of a history, and judges the images of its disks.

use super::workload::{self, RecordedFile};
use crate::error::{During, LabError};
use crate::guest::disks::Format;
use crate::process;
use longhaul_history::check::{Check, Judgement, Keeps, Promise};
use longhaul_history::order::Told;
use longhaul_history::plan::SECTOR_BYTES;
use longhaul_history::table::Discards;
use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The file of a record, beside the images.
pub const RECORD: &str = "history.json";
const RECORD_BYTES_MAX: u64 = 1 << 20;
const PIECE_BYTES: usize = 1 << 20;

/// The record of a history: with the images, everything that the judgement needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The seed.
    pub seed: u64,
    /// All operations below this number were acknowledged.
    pub done: u64,
    /// And of those after it the ones with set bits, bit 0 being the operation `done`.
    pub mask: u32,
    /// Whether no operation was under way any more.
    pub quiet: bool,
    /// The number of errors that the guest itself found.
    pub errors: u64,
    /// The first of them.
    pub first_error: Option<String>,
    /// The file of the passes, for a history over a file.
    #[serde(default)]
    pub file: Option<RecordedFile>,
    /// The disks, in the guest's order.
    pub disks: Vec<RecordedDisk>,
}

/// A disk of a history.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedDisk {
    /// The image's file, in the record's folder unless it is a whole path.
    pub image: PathBuf,
    /// The format of the file.
    pub format: Format,
    /// The size that the guest sees.
    pub bytes: u64,
    /// Whether all acknowledged operations are required, or only the flushed ones.
    pub keeps_acknowledged: bool,
    /// Whether discarded sectors must be zeros, or may have their old content.
    pub discards_zero: bool,
}

impl RecordedDisk {
    fn promise(&self) -> Promise {
        Promise {
            keeps: match self.keeps_acknowledged {
                true => Keeps::Acknowledged,
                false => Keeps::Flushed,
            },
            discards: match self.discards_zero {
                true => Discards::Zeros,
                false => Discards::ZerosOrKept,
            },
        }
    }
}

impl Record {
    /// Returns the record beside the images of a folder.
    ///
    /// # Errors
    /// When there is none, or it is not a valid record.
    pub fn load(folder: &Path) -> Result<Self, LabError> {
        let path = folder.join(RECORD);
        let doing = || format!("read {}", path.display());
        if fs::metadata(&path).during(doing)?.len() > RECORD_BYTES_MAX {
            return Err(wrong(&path, "it is too long for a record"));
        }
        let text = fs::read_to_string(&path).during(doing)?;
        serde_json::from_str(&text).map_err(|error| wrong(&path, &error.to_string()))
    }

    /// Writes it beside the images.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn save(&self, folder: &Path) -> Result<(), LabError> {
        let path = folder.join(RECORD);
        let text =
            serde_json::to_string_pretty(self).map_err(|error| wrong(&path, &error.to_string()))?;
        fs::write(&path, text + "\n").during(|| format!("write {}", path.display()))
    }

    /// Judges the images, which must not be written meanwhile.
    ///
    /// # Errors
    /// When an image cannot be read, or is longer than its disk.
    pub fn judge(&self, folder: &Path) -> Result<Judgement, LabError> {
        let sectors = |disk: &RecordedDisk| disk.bytes / SECTOR_BYTES as u64;
        let plan = workload::plan(
            self.seed,
            self.disks.iter().map(sectors).collect(),
            self.file,
        )
        .map_err(|error| wrong(&folder.join(RECORD), &error.to_string()))?;
        let told = Told {
            done: self.done,
            mask: self.mask,
            quiet: self.quiet,
        };
        let promises = self.disks.iter().map(RecordedDisk::promise).collect();
        let mut check = Check::new(plan, told, promises);
        for (number, disk) in self.disks.iter().enumerate() {
            look(&mut check, number, disk, &folder.join(&disk.image))?;
        }
        Ok(check.judge())
    }
}

/// Passes an image to the judge.
fn look(
    check: &mut Check,
    number: usize,
    disk: &RecordedDisk,
    image: &Path,
) -> Result<(), LabError> {
    match disk.format {
        Format::Raw => look_at_raw(check, number, disk.bytes, image),
        Format::Qcow2 => {
            let mut raw = image.as_os_str().to_owned();
            raw.push(".as-raw");
            let raw = PathBuf::from(raw);
            let mut command = Command::new("qemu-img");
            // A stopped QEMU may hold its locks.
            command.args(["convert", "-q", "-U", "-f", "qcow2", "-O", "raw"]);
            command.arg(image).arg(&raw);
            let looked = process::run(&mut command)
                .and_then(|_| look_at_raw(check, number, disk.bytes, &raw));
            match fs::remove_file(&raw) {
                // If qemu-img failed to start, it created none.
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    looked.and(Err(error).during(|| format!("remove {}", raw.display())))
                }
                _ => looked,
            }
        }
    }
}

/// Reads the content of a file; its holes are not read.
fn look_at_raw(check: &mut Check, number: usize, bytes: u64, path: &Path) -> Result<(), LabError> {
    let doing = || format!("read the disk {}", path.display());
    let file = File::open(path).during(doing)?;
    let length = file.metadata().during(doing)?.len();
    if length > bytes {
        let problem = format!("it has {length} bytes, the guest's disk {bytes}");
        return Err(wrong(path, &problem));
    }
    check.look_at_zeros(number, 0, length / SECTOR_BYTES as u64);
    let mut buffer = vec![0; PIECE_BYTES];
    let mut from = 0;
    while let Some((first, end)) = next_data(&file, from).during(doing)? {
        // Sectors are read whole, wherever data begins.
        let mut at = first - first % SECTOR_BYTES as u64;
        while at < end.min(length) {
            let piece = (length - at).min(PIECE_BYTES as u64) as usize;
            let piece = &mut buffer[..piece];
            file.read_exact_at(piece, at).during(doing)?;
            check.look(number, at / SECTOR_BYTES as u64, piece);
            at += PIECE_BYTES as u64;
        }
        from = at.max(end);
    }
    Ok(())
}

/// Returns the place of the next data of a file; `None` where only a hole follows.
fn next_data(file: &File, from: u64) -> Result<Option<(u64, u64)>, Errno> {
    let seek = |from: u64, whence| lseek(file, from as i64, whence).map(|place| place as u64);
    match seek(from, Whence::SeekData) {
        Ok(first) => Ok(Some((first, seek(first, Whence::SeekHole)?))),
        Err(Errno::ENXIO) => Ok(None),
        Err(error) => Err(error),
    }
}

fn wrong(path: &Path, message: &str) -> LabError {
    LabError::Answer {
        what: path.display().to_string(),
        message: message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_history::plan::{Kind, Plan};
    use longhaul_history::sector::{Sector, fill};

    const BYTES: u64 = 4 << 20;
    const DONE: u64 = 60;

    /// Returns a record, and a correct image for it.
    fn made(folder: &Path) -> Record {
        let record = Record {
            seed: 4,
            done: DONE,
            mask: 0,
            quiet: true,
            errors: 0,
            first_error: None,
            file: None,
            disks: vec![RecordedDisk {
                image: PathBuf::from("disk0.raw"),
                format: Format::Raw,
                bytes: BYTES,
                keeps_acknowledged: true,
                discards_zero: true,
            }],
        };
        let plan = Plan::new(4, vec![BYTES / SECTOR_BYTES as u64]).unwrap();
        let file = File::create(folder.join("disk0.raw")).unwrap();
        file.set_len(BYTES).unwrap();
        for operation in (0..DONE).map(|number| plan.operation(number)) {
            for sector in operation.range() {
                let mut bytes: Sector = [0; SECTOR_BYTES];
                match operation.kind {
                    Kind::Write => fill(&mut bytes, 4, 0, sector, operation.number),
                    Kind::Read => continue,
                    _ => {}
                }
                let place = sector * SECTOR_BYTES as u64;
                file.write_all_at(&bytes, place).unwrap();
            }
        }
        record
    }

    #[test]
    fn an_image_is_judged_by_its_record() {
        let folder = tempfile::tempdir().unwrap();
        let record = made(folder.path());
        record.save(folder.path()).unwrap();
        let loaded = Record::load(folder.path()).unwrap();
        assert_eq!(loaded, record);
        let judgement = loaded.judge(folder.path()).unwrap();
        assert_eq!(judgement.findings, []);
        assert_eq!(judgement.sectors, BYTES / SECTOR_BYTES as u64);

        let path = folder.path().join("disk0.raw");
        let file = File::options().write(true).open(path).unwrap();
        let last = BYTES - SECTOR_BYTES as u64;
        file.write_all_at(b"somebody's", last + 100).unwrap();
        let judgement = loaded.judge(folder.path()).unwrap();
        assert_eq!(judgement.wrong_sectors, 1);
        assert_eq!(judgement.findings[0].first, last / SECTOR_BYTES as u64);
        file.set_len(BYTES - 8192).unwrap();
        assert_eq!(loaded.judge(folder.path()).unwrap().wrong_sectors, 16);
        file.set_len(BYTES + 512).unwrap();
        let error = loaded.judge(folder.path()).unwrap_err().to_string();
        assert!(error.contains("the guest's disk 4194304"), "{error}");
    }
}
