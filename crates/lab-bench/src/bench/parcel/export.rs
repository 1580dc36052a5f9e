//! Measures exports of a disk that nobody writes, beside the rates of what they read and write.

use super::ground::{Ground, remove_file, remove_folder};
use super::row::{ExportParameters, ExportRow};
use crate::bench::Options;
use crate::bench::document::Document;
use crate::measure::cpu_s;
use longhaul_lab::error::{During, LabError};
use longhaul_lab::interrupt;
use longhaul_parcel::{Job, JobDisk, JobError, JobGuest, Settings, Step};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

pub(super) const WORKLOAD: &str = "export";
const IMAGE_BYTES: u64 = 1 << 30;
const QUICK_IMAGE_BYTES: u64 = 256 << 20;
/// Bytes of a plain read or write.
const BLOCK_BYTES: usize = 1 << 20;
/// Bytes of a part of the image, which is random, or text, or zeros.
const PART_BYTES: usize = 256 << 10;
/// The devices, and how many may be lost.
const DEVICES: [(usize, u8); 2] = [(1, 0), (4, 1)];
/// Words of the image's text.
const WORDS: [&str; 16] = [
    "carriage",
    "of",
    "the",
    "north",
    "harbour",
    "received",
    "from",
    "seventeen",
    "bales",
    "and",
    "weighed",
    "at",
    "noon",
    "in",
    "presence",
    "keeper",
];

/// Measures all exports.
pub(super) fn measure(
    options: &Options,
    ground: &Ground,
    document: &mut Document,
) -> Result<Vec<ExportRow>, LabError> {
    let bytes = match options.quick {
        true => QUICK_IMAGE_BYTES,
        false => IMAGE_BYTES,
    };
    let folder = ground.folder(0)?.join("exports");
    fs::create_dir(&folder).during(|| format!("make {}", folder.display()))?;
    let image = folder.join("image.raw");
    let mut rows = Vec::new();
    for repeat in 1..=options.repeats() {
        let seed = options.seed.wrapping_add(u64::from(repeat));
        let made = write_image(&image, bytes, seed);
        made.during(|| format!("write {}", image.display()))?;
        for (devices, parity) in DEVICES {
            let mut row = ExportRow::new(bytes, (devices, parity), repeat);
            one(&folder, &image, &mut row)?;
            row.compute();
            document.add_row(&row, &row.show());
            rows.push(row);
        }
        remove_file(&image)?;
    }
    remove_folder(&folder)?;
    Ok(rows)
}

impl ExportRow {
    fn new(image_bytes: u64, (devices, parity): (usize, u8), repeat: u32) -> Self {
        Self {
            workload: WORKLOAD.to_owned(),
            system: "longhaul".to_owned(),
            parameters: ExportParameters {
                image_bytes,
                content: "a third each of random bytes, text and zeros, in parts of 256 KiB",
                devices,
                parity,
                block_bytes: BLOCK_BYTES as u64,
            },
            repeat,
            outcome: "failed: it was not begun".to_owned(),
            device_bytes: None,
            read_ms: None,
            write_ms: None,
            both_ms: None,
            export_ms: None,
            seal_ms: None,
            export_cpu_s: None,
            read_bytes_per_s: None,
            device_write_bytes_per_s: None,
            write_image_bytes_per_s: None,
            export_bytes_per_s: None,
            sealed_bytes_per_s: None,
            export_vs_slower: None,
            export_vs_both: None,
        }
    }
}

/// Reads the image, exports it, writes as much as the export has written, and does both.
fn one(folder: &Path, image: &Path, row: &mut ExportRow) -> Result<(), LabError> {
    let doing = || format!("read {}", image.display());
    row.read_ms = Some(faster(|| timed(|| read_cold(image))).during(doing)?);
    interrupt::check()?;
    forget(image).during(doing)?;
    let devices = (0..row.parameters.devices).map(|number| folder.join(format!("device-{number}")));
    let devices: Vec<PathBuf> = devices.collect();
    for device in &devices {
        fs::create_dir(device).during(|| format!("make {}", device.display()))?;
    }
    let job = folder.join("job");
    export(&job, image, &devices, row).map_err(|error| LabError::Answer {
        what: "the export".to_owned(),
        message: error.to_string(),
    })?;
    row.outcome = "completed".to_owned();
    let mut sizes = Vec::new();
    for device in &devices {
        let doing = || format!("read {}", device.display());
        for entry in fs::read_dir(device).during(doing)? {
            sizes.push(entry.and_then(|it| it.metadata()).during(doing)?.len());
        }
        remove_folder(device)?;
    }
    remove_folder(&job)?;
    row.device_bytes = Some(sizes.iter().sum());
    interrupt::check()?;
    let files: Vec<PathBuf> = (0..sizes.len())
        .map(|number| folder.join(format!("plain-{number}")))
        .collect();
    let doing = || format!("write in {}", folder.display());
    let remove = || files.iter().try_for_each(fs::remove_file);
    let write = || timed(|| write_all(image, &files, &sizes)).and_then(|ms| remove().map(|()| ms));
    row.write_ms = Some(faster(write).during(doing)?);
    interrupt::check()?;
    let both = || timed(|| both(image, &files, &sizes)).and_then(|ms| remove().map(|()| ms));
    row.both_ms = Some(faster(both).during(doing)?);
    Ok(())
}

/// Exports an image.
fn export(
    job: &Path,
    image: &Path,
    devices: &[PathBuf],
    row: &mut ExportRow,
) -> Result<(), JobError> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |time| time.as_secs());
    let settings = Settings {
        name: "bench".to_owned(),
        to: "paris".to_owned(),
        parity: row.parameters.parity,
        now,
    };
    let guest = JobGuest {
        name: "guest".to_owned(),
        disks: vec![JobDisk {
            name: "disk".to_owned(),
            path: image.to_path_buf(),
        }],
    };
    let own = || cpu_s(std::process::id());
    let (began, cpu) = (Instant::now(), own());
    let mut job = Job::create(job, &settings, (devices, None), vec![guest])?;
    // The last step of the disk comes before everything is durable, the first one of the seal after
    // the first row was read back.
    let mut durable = None;
    job.run(now, &mut |step| {
        if let (Step::Seals { .. }, None) = (step, durable) {
            durable = Some((Instant::now(), own()));
        }
    })?;
    let ended = Instant::now();
    if let Some((at, used)) = durable {
        row.export_ms = Some((at - began).as_secs_f64() * 1e3);
        row.seal_ms = Some((ended - at).as_secs_f64() * 1e3);
        row.export_cpu_s = used.zip(cpu).map(|(after, before)| after - before);
    }
    Ok(())
}

fn timed(what: impl FnOnce() -> io::Result<()>) -> io::Result<f64> {
    let began = Instant::now();
    what()?;
    Ok(began.elapsed().as_secs_f64() * 1e3)
}

/// Returns the less time of two: memory that the system has to get back from a hypervisor first
/// makes the page cache slow, up to a quarter of its rate, and says nothing of the disk.
fn faster(mut what: impl FnMut() -> io::Result<f64>) -> io::Result<f64> {
    Ok(what()?.min(what()?))
}

/// Drops what the system keeps of a file in memory.
fn forget(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    file.sync_all()?;
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
    Ok(())
}

fn read_cold(path: &Path) -> io::Result<()> {
    forget(path)?;
    let mut file = File::open(path)?;
    let mut buffer = vec![0; BLOCK_BYTES];
    while file.read(&mut buffer)? > 0 {}
    Ok(())
}

/// Writes files of these sizes, a block of each in turn, and makes them durable. Their content is
/// random, from the beginning of the image: disks may be fast with zeros.
fn write_all(image: &Path, paths: &[PathBuf], sizes: &[u64]) -> io::Result<()> {
    let mut block = vec![0; BLOCK_BYTES];
    File::open(image)?.read_exact(&mut block[..PART_BYTES])?;
    block.copy_within(..PART_BYTES, PART_BYTES);
    block.copy_within(..2 * PART_BYTES, 2 * PART_BYTES);
    let files = paths.iter().map(File::create_new);
    let files = files.collect::<io::Result<Vec<_>>>()?;
    let longest = sizes.iter().copied().max().unwrap_or(0);
    for at in (0..longest).step_by(BLOCK_BYTES) {
        for (mut file, size) in files.iter().zip(sizes) {
            let left = size.saturating_sub(at).min(BLOCK_BYTES as u64);
            file.write_all(&block[..left as usize])?;
        }
    }
    files.iter().try_for_each(File::sync_data)
}

/// Reads the image and writes files of these sizes at the same time.
fn both(image: &Path, paths: &[PathBuf], sizes: &[u64]) -> io::Result<()> {
    thread::scope(|scope| {
        let reads = scope.spawn(|| read_cold(image));
        let written = write_all(image, paths, sizes);
        let read = reads.join();
        read.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        written
    })
}

/// Writes an image that is random, text and zeros in turn, durably, and not in memory afterwards.
pub(super) fn write_image(path: &Path, bytes: u64, seed: u64) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    let mut random = blake3::Hasher::new()
        .update(&seed.to_le_bytes())
        .finalize_xof();
    let mut part = vec![0; PART_BYTES];
    for number in 0..bytes / PART_BYTES as u64 {
        match number % 3 {
            0 => random.fill(&mut part),
            1 => write_text(&mut part, &mut random),
            _ => part.fill(0),
        }
        file.write_all(&part)?;
    }
    file.sync_all()?;
    forget(path)
}

/// Fills a part with words.
fn write_text(part: &mut [u8], random: &mut blake3::OutputReader) {
    let mut choices = vec![0; part.len() / 4];
    random.fill(&mut choices);
    let mut at = 0;
    for choice in choices.iter().cycle() {
        let word = WORDS[usize::from(*choice) % WORDS.len()].as_bytes();
        for byte in word.iter().chain(b" ") {
            let Some(place) = part.get_mut(at) else {
                return;
            };
            *place = *byte;
            at += 1;
        }
    }
}
