//! A guest with disks of its own that does a history on them, until it is killed or stopped.

use super::images::{Record, RecordedDisk};
use super::teller::{Heard, Teller};
use super::workload::Work;
use crate::arena::{Arena, ArenaError};
use crate::error::LabError;
use crate::guest::disks::{Cache, Format, LocalDisk};
use crate::guest::initramfs::{HISTORY_NAME, WORKLOADS};
use crate::guest::{CHANNEL_NAME, KernelFiles, Tiny};
use crate::lab::Host;
use crate::peer::{Begin, PeerHost, PeerQemu, channel_socket};
use crate::process::wait_until;
use longhaul_protocol::guest::{Channel, Disk, GuestDescription};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A guest under TCG is up in 2 s, on a machine that does nothing else.
const LIMIT: Duration = Duration::from_secs(120);

/// What a guest is to do.
#[derive(Debug)]
pub struct Setup<'a> {
    /// Where it runs.
    pub host: &'a Host,
    /// What it boots from.
    pub files: &'a KernelFiles,
    /// The QEMU to run.
    pub qemu: &'a Path,
    /// `kvm` or `tcg`.
    pub accelerator: &'a str,
    /// The QEMU version whose machine it has, such as `7.2`.
    pub machine_version: &'a str,
    /// Its disks, whose files are there and hold zeros.
    pub disks: &'a [LocalDisk],
    /// Everything that it does follows from it.
    pub seed: u64,
    /// How many operations are under way at a time.
    pub depth: u32,
    /// What it does.
    pub work: Work,
}

/// A guest that does a history.
#[derive(Debug)]
pub struct HistoryGuest {
    arena: Arena,
    teller: Teller,
    qemu: PeerQemu,
    record: Record,
    caches: Vec<Cache>,
}

/// The description of a `tiny` guest that can do a history on such disks.
pub fn description(tiny: &Tiny, disks: &[LocalDisk]) -> GuestDescription {
    let mut guest = tiny.description();
    let disk = |(letter, disk): (char, &LocalDisk)| Disk {
        name: format!("vd{letter}"),
        image: disk.image.clone(),
        shared: false,
        read_only: false,
    };
    guest.disks = ('a'..='z').zip(disks).map(disk).collect();
    guest.channels.push(Channel {
        name: HISTORY_NAME.to_owned(),
    });
    if let Some(kernel) = &mut guest.kernel {
        kernel.command_line += &format!(" -- --workloads {WORKLOADS}");
    }
    guest
}

impl HistoryGuest {
    /// Boots it and lets it begin.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start(setup: &Setup<'_>) -> Result<Self, LabError> {
        let mut tiny = Tiny::new(HISTORY_NAME);
        tiny.machine_version = setup.machine_version.to_owned();
        let host = PeerHost {
            host: setup.host,
            qemu: setup.qemu,
            accelerator: setup.accelerator,
            files: setup.files,
            disks: &[],
            local: setup.disks,
        };
        let qemu = PeerQemu::start(&host, &description(&tiny, setup.disks), Begin::Boot)?;
        let (mut arena, teller) = (Arena::new(), Teller::default());
        teller.attach(&channel_socket(setup.host, HISTORY_NAME))?;
        let socket = channel_socket(setup.host, CHANNEL_NAME);
        arena
            .attach(&socket)
            .map_err(ArenaError::Write)
            .and_then(|()| arena.wait_for_beat(LIMIT))
            .and_then(|_| arena.start_program(HISTORY_NAME, LIMIT))
            .map_err(silent)?;
        let guest = Self {
            arena,
            teller,
            qemu,
            record: record(setup),
            caches: setup.disks.iter().map(|disk| disk.kind.cache).collect(),
        };
        guest.begin(setup)?;
        Ok(guest)
    }

    fn begin(&self, setup: &Setup<'_>) -> Result<(), LabError> {
        let strict = self.record.disks.iter().all(|disk| disk.discards_zero);
        let work = &setup.work;
        let mut line = json!({
            "command": "start",
            "seed": setup.seed,
            "first_disk": 0,
            "disks": setup.disks.len(),
            "depth": setup.depth,
            "discards_zero": u8::from(strict),
            "operations": work.operations,
            "operations_per_s": work.operations_per_s,
            "burst": work.burst,
            "burst_every_ms": work.burst_every.as_millis() as u64,
        });
        if let Some(file) = work.file {
            line["file_sectors"] = json!(file.sectors);
            line["block_sectors"] = json!(file.block);
            line["file_reads"] = json!(u8::from(file.reads));
        }
        let line = line.to_string();
        let mut sent = Ok(false);
        wait_until(LIMIT, || {
            sent = self.teller.send(&line);
            !matches!(sent, Ok(false))
        });
        match sent? {
            true => Ok(()),
            false => Err(late("its channel for histories was not there")),
        }
    }

    /// What it told so far.
    pub fn heard(&self) -> Heard {
        self.teller.heard()
    }

    /// Waits until it has done so many operations.
    ///
    /// # Errors
    /// When it does not within the limit, or found something wrong before.
    pub fn wait_for(&self, operations: u64, limit: Duration) -> Result<(), LabError> {
        let mut heard = self.heard();
        wait_until(limit, || {
            heard = self.heard();
            heard.told.done >= operations || heard.errors > 0 || heard.ended
        });
        if heard.told.done >= operations {
            return Ok(());
        }
        let done = heard.told.done;
        let why = heard.first_error.unwrap_or_else(|| "it is slow".to_owned());
        Err(late(&format!(
            "it did {done} of {operations} operations in {} s: {why}",
            limit.as_secs()
        )))
    }

    /// Kills its QEMU, as a crash would. What QEMU itself still had of a disk may be lost then:
    /// tables of qcow2 images, unless they are written through.
    ///
    /// # Errors
    /// When its sockets stay open.
    pub fn kill(self) -> Result<Record, LabError> {
        let Self {
            arena: _arena,
            teller,
            qemu,
            mut record,
            caches,
        } = self;
        drop(qemu);
        for (disk, cache) in record.disks.iter_mut().zip(caches) {
            disk.keeps_acknowledged = disk.format == Format::Raw || cache == Cache::Writethrough;
        }
        heard_all(&teller, record)
    }

    /// Stops the history, lets the guest read all of its disks, and lets QEMU end by itself.
    ///
    /// # Errors
    /// When the guest or QEMU does not do so.
    pub fn stop(mut self) -> Result<Record, LabError> {
        self.arena.check_program(LIMIT).map_err(silent)?;
        self.qemu.quit()?;
        heard_all(&self.teller, self.record)
    }
}

/// What is known of a history before it begins.
fn record(setup: &Setup<'_>) -> Record {
    let disk = |disk: &LocalDisk| RecordedDisk {
        image: PathBuf::from(disk.path.file_name().unwrap_or_default()),
        format: disk.kind.format,
        bytes: disk.bytes,
        keeps_acknowledged: true,
        // Of a qcow2 image whole clusters are discarded, and nothing smaller.
        discards_zero: disk.kind.format == Format::Raw,
    };
    Record {
        seed: setup.seed,
        done: 0,
        mask: 0,
        quiet: false,
        errors: 0,
        first_error: None,
        file: setup.work.file,
        disks: setup.disks.iter().map(disk).collect(),
    }
}

/// The record with all that the guest told before its QEMU ended.
fn heard_all(teller: &Teller, record: Record) -> Result<Record, LabError> {
    if !wait_until(LIMIT, || !teller.is_connected()) {
        return Err(late("its channel did not end with its QEMU"));
    }
    let heard = teller.heard();
    Ok(Record {
        done: heard.told.done,
        mask: heard.told.mask,
        quiet: heard.told.quiet,
        errors: heard.errors,
        first_error: heard.first_error,
        ..record
    })
}

fn silent(error: ArenaError) -> LabError {
    late(&error.to_string())
}

fn late(message: &str) -> LabError {
    LabError::Answer {
        what: "the guest with a history".to_owned(),
        message: message.to_owned(),
    }
}
