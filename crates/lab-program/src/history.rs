//! Implements `lab history`: runs a history in a guest on disks of its own, ends the guest, and
//! judges the disks.

use longhaul_history::check::Judgement;
use longhaul_history::plan::SECTOR_BYTES;
use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::KernelFiles;
use longhaul_lab::guest::disks::{DiskKind, local_disks};
use longhaul_lab::history::guest::{HistoryGuest, Setup};
use longhaul_lab::history::images::Record;
use longhaul_lab::history::task::{History, Task};
use longhaul_lab::history::workload::{Work, Workload};
use longhaul_lab::installed;
use longhaul_lab::interrupt;
use longhaul_lab::lab::{Lab, Plan, print, say};
use longhaul_lab::link::spec::ParseLinkError;
use longhaul_protocol::units::{parse_bytes, parse_duration};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The time limit for a guest's first operations.
const BEGIN_LIMIT: Duration = Duration::from_secs(120);

/// The subcommands of `lab history`.
#[derive(Debug, Clone, clap::Subcommand)]
pub(crate) enum Action {
    /// Let a guest write to new disks, kill or stop it, and check the disks
    Run(RunOptions),
    /// Check the disks of a folder from `run`, or one with such a record
    Check {
        /// The folder with the images and `history.json`
        folder: PathBuf,
    },
}

/// The options of `lab history run`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct RunOptions {
    /// The folder of the images and the record; created if it does not exist
    pub(crate) folder: PathBuf,
    /// A disk: raw or qcow2, then none, writeback or writethrough, then iothread; may be repeated
    #[arg(long, value_name = "KIND", default_values = ["raw,none,iothread", "qcow2,writeback"])]
    pub(crate) disk: Vec<DiskKind>,
    /// The size of each disk
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = parse_bytes)]
    pub(crate) size: u64,
    /// The QEMU: 7.2, 10.0, 11.1, or the path of a binary
    #[arg(long, value_name = "QEMU", default_value = "10.0")]
    pub(crate) qemu: String,
    /// The accelerator of guests
    #[arg(long, value_parser = ["tcg", "kvm"], default_value = "tcg")]
    pub(crate) accelerator: String,
    /// The seed of the guest's writes
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// The number of operations under way at a time
    #[arg(
        long,
        value_name = "N",
        default_value_t = 8,
        value_parser = clap::value_parser!(u32).range(1..=32)
    )]
    pub(crate) depth: u32,
    /// The workload
    #[arg(long, value_enum, default_value = "mixed")]
    pub(crate) workload: Workload,
    /// The size of the file of ior, asyncwr and cm1, on the first disk [default: the whole disk]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) file: Option<u64>,
    /// The maximum number of operations per second; 0: no limit [default: the workload's]
    #[arg(long, value_name = "N")]
    pub(crate) operations_per_s: Option<u64>,
    /// How long it writes
    #[arg(long = "for", value_name = "TIME", default_value = "5s", value_parser = parse_duration)]
    pub(crate) time: Duration,
    /// How it ends: kill (QEMU, at once) or stop (the guest, which checks itself, then QEMU)
    #[arg(long, value_parser = ["kill", "stop"], default_value = "kill")]
    pub(crate) end: String,
}

/// Runs the command: exit status 0 when nothing is wrong, 1 otherwise.
///
/// # Errors
/// When it cannot be run, or is interrupted.
pub(crate) fn command(action: &Action) -> Result<ExitCode, LabError> {
    let (folder, record) = match action {
        Action::Run(options) => (&options.folder, run(options)?),
        Action::Check { folder } => (folder, Record::load(folder)?),
    };
    let judgement = record.judge(folder)?;
    print(&shown(&record, &judgement))?;
    let sound = judgement.wrong_sectors == 0 && record.errors == 0;
    Ok(ExitCode::from(u8::from(!sound)))
}

fn run(options: &RunOptions) -> Result<Record, LabError> {
    let folder = &options.folder;
    fs::create_dir_all(folder).during(|| format!("make {}", folder.display()))?;
    let folder = &absolute(folder)?;
    let disks = local_disks(folder, options.size, &options.disk);
    for disk in &disks {
        disk.create()?;
    }
    // A single host has no link.
    let link = "1gbit,0ms"
        .parse()
        .map_err(|error: ParseLinkError| LabError::Link(error.to_string()))?;
    let lab = Lab::create(&Plan {
        purpose: "history".to_owned(),
        hosts: 1,
        link,
        seed: 1,
    })?;
    let host = lab.host(0)?;
    let qemu = installed::qemu(&options.qemu)?;
    let version = installed::qemu_version(&qemu)?;
    let machine = version.split('.').take(2).collect::<Vec<_>>().join(".");
    let setup = Setup {
        host,
        files: &KernelFiles::make_with_history(host.folder())?,
        qemu: &qemu,
        accelerator: &options.accelerator,
        machine_version: &machine,
    };
    let task = Task {
        disks: &disks,
        seed: options.seed,
        depth: options.depth,
        work: options.work(),
    };
    let guest = HistoryGuest::start(&setup, &task)?;
    guest.history().wait_for(1, BEGIN_LIMIT)?;
    say(&format!("the guest writes; it ends by {}", options.end));
    watch(guest.history(), options.time)?;
    let record = match options.end.as_str() {
        "kill" => guest.kill()?,
        _ => guest.stop()?,
    };
    record.save(folder)?;
    Ok(record)
}

impl RunOptions {
    fn work(&self) -> Work {
        let work = self.workload.work(self.file.unwrap_or(self.size));
        Work {
            operations_per_s: self.operations_per_s.unwrap_or(work.operations_per_s),
            ..work
        }
    }
}

/// Lets the guest work for this time, and prints its progress each second.
fn watch(history: &History, time: Duration) -> Result<(), LabError> {
    let megabytes = |sectors: u64| sectors as f64 * SECTOR_BYTES as f64 / 1e6;
    let mut last = history.heard();
    let mut left = time;
    while !left.is_zero() {
        let (began, slice) = (Instant::now(), left.min(Duration::from_secs(1)));
        interrupt::sleep(slice)?;
        left -= slice;
        let (now, seconds) = (history.heard(), began.elapsed().as_secs_f64());
        say(&format!(
            "{} operations; wrote {:.1} MB/s, read {:.1} MB/s",
            now.told.done,
            megabytes(now.written - last.written) / seconds,
            megabytes(now.verified - last.verified) / seconds,
        ));
        last = now;
    }
    Ok(())
}

fn absolute(folder: &Path) -> Result<PathBuf, LabError> {
    folder
        .canonicalize()
        .during(|| format!("find {}", folder.display()))
}

/// Returns the result of the judgement as text.
fn shown(record: &Record, judgement: &Judgement) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "{} operations done (the guest told of {}), {} disks, {} sectors looked at",
        judgement.done,
        record.done,
        record.disks.len(),
        judgement.sectors
    );
    for (disk, flushed) in record.disks.iter().zip(&judgement.flushed) {
        let flushed = flushed.map_or("nothing".to_owned(), |flush| {
            format!("everything before operation {flush}")
        });
        let keeps = match disk.keeps_acknowledged {
            true => "must hold all that was acknowledged",
            false => "must hold what was flushed",
        };
        let _ = writeln!(text, "{} {keeps}; flushed: {flushed}", disk.image.display());
    }
    if judgement.reused_sectors > 0 {
        let _ = writeln!(
            text,
            "{} sectors hold what belongs elsewhere, after a discard that was not flushed",
            judgement.reused_sectors
        );
    }
    for finding in &judgement.findings {
        let _ = writeln!(text, "{finding}");
    }
    if record.errors > 0 {
        let first = record.first_error.as_deref().unwrap_or_default();
        let _ = writeln!(text, "the guest found {} errors: {first}", record.errors);
    }
    let _ = match judgement.wrong_sectors {
        0 => writeln!(text, "nothing is wrong"),
        wrong => writeln!(text, "{wrong} sectors are wrong"),
    };
    text
}
