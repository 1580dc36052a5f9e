//! Controls a history in a guest on any host: starts it, receives its reports, stops it.

use super::images::{Record, RecordedDisk};
use super::teller::{Heard, Teller};
use super::workload::Work;
use crate::arena::{Arena, ArenaError};
use crate::error::LabError;
use crate::guest::Tiny;
use crate::guest::disks::{Format, LocalDisk};
use crate::guest::initramfs::{HISTORY_NAME, WORKLOADS};
use crate::process::wait_until;
use longhaul_protocol::guest::{Channel, Disk, GuestDescription};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Duration;

/// The time limit of a guest's start, which takes 2 s under TCG on an idle machine.
pub(super) const LIMIT: Duration = Duration::from_secs(120);

/// The task of a guest with its disks.
#[derive(Debug)]
pub struct Task<'a> {
    /// Its disks, whose files hold zeros.
    pub disks: &'a [LocalDisk],
    /// The seed.
    pub seed: u64,
    /// The number of operations under way at a time.
    pub depth: u32,
    /// The work.
    pub work: Work,
}

/// A history that runs in a guest.
#[derive(Debug)]
pub struct History {
    arena: Arena,
    teller: Teller,
    record: Record,
}

/// Returns the description of a `tiny` guest that can run a history on such disks.
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
        kernel.command_line += &format!(" --workloads {WORKLOADS}");
    }
    guest
}

impl Task<'_> {
    /// Returns the record of the history before it begins.
    fn record(&self) -> Record {
        let disk = |disk: &LocalDisk| RecordedDisk {
            image: PathBuf::from(disk.path.file_name().unwrap_or_default()),
            format: disk.kind.format,
            bytes: disk.bytes,
            keeps_acknowledged: true,
            // Whole clusters of a qcow2 image are discarded, and nothing smaller; the same holds
            // for an overlay.
            discards_zero: disk.kind.format == Format::Raw && !self.work.overlaid,
        };
        Record {
            seed: self.seed,
            done: 0,
            mask: 0,
            quiet: false,
            errors: 0,
            first_error: None,
            file: self.work.file,
            disks: self.disks.iter().map(disk).collect(),
        }
    }

    /// Returns the start command for the program in the guest.
    fn line(&self) -> Value {
        let strict = |disks: u64, (number, disk): (usize, &RecordedDisk)| {
            disks | u64::from(disk.discards_zero) << number
        };
        let disks = self.record().disks;
        let work = &self.work;
        let mut line = json!({
            "command": "start",
            "seed": self.seed,
            "first_disk": 0,
            "disks": self.disks.len(),
            "depth": self.depth,
            "discards_zero": disks.iter().enumerate().fold(0, strict),
            "operations": work.operations,
            "operations_per_s": work.operations_per_s,
            "reads_per_s": work.reads_per_s,
            "paced_from": work.paced_from,
            "burst": work.burst,
            "burst_every_ms": work.burst_every.as_millis() as u64,
        });
        if let Some(file) = work.file {
            line["file_sectors"] = json!(file.sectors);
            line["block_sectors"] = json!(file.block);
            line["file_reads"] = json!(u8::from(file.reads));
        }
        line
    }
}

impl History {
    /// Creates a history without reports.
    pub fn new(task: &Task<'_>) -> Self {
        Self {
            arena: Arena::new(),
            teller: Teller::default(),
            record: task.record(),
        }
    }

    /// Listens on a host's sockets for the guest's channels, by their names, even before the guest
    /// exists.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn listen(&self, socket: impl Fn(&str) -> PathBuf) -> Result<(), LabError> {
        self.listen_beside(&socket)?;
        self.arena
            .attach(&socket(crate::guest::CHANNEL_NAME))
            .map_err(|error| silent(ArenaError::Write(error)))
    }

    /// As [`Self::listen`], for a guest whose arena another listener reads.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn listen_beside(&self, socket: impl Fn(&str) -> PathBuf) -> Result<(), LabError> {
        self.teller.attach(&socket(HISTORY_NAME))
    }

    /// Starts the history as soon as the guest is up.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn begin(&mut self, task: &Task<'_>) -> Result<(), LabError> {
        begin(&mut self.arena, &self.teller, task)
    }

    /// As [`Self::begin`], for a guest whose arena another listener reads.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn begin_beside(&self, arena: &mut Arena, task: &Task<'_>) -> Result<(), LabError> {
        begin(arena, &self.teller, task)
    }

    /// Returns the guest's arena.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Returns the guest's arena, for commands.
    pub fn arena_mut(&mut self) -> &mut Arena {
        &mut self.arena
    }

    /// Returns the guest's reports so far.
    pub fn heard(&self) -> Heard {
        self.teller.heard()
    }

    /// Waits until it has completed this many operations.
    ///
    /// # Errors
    /// When it does not within the limit, or reports an error before.
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

    /// Stops the history, and lets the guest read all of its disks.
    ///
    /// # Errors
    /// When the guest does not answer.
    pub fn stop(&mut self) -> Result<(), LabError> {
        let checked = self.arena.check_program(LIMIT);
        checked.map_err(silent)?;
        self.ended()
    }

    /// As [`Self::stop`], for a guest whose arena another listener reads.
    ///
    /// # Errors
    /// When the guest does not answer.
    pub fn stop_beside(&self, arena: &mut Arena) -> Result<(), LabError> {
        arena.check_program(LIMIT).map_err(silent)?;
        self.ended()
    }

    fn ended(&self) -> Result<(), LabError> {
        // Its last report arrives on another channel than the answer.
        match wait_until(LIMIT, || self.heard().ended) {
            true => Ok(()),
            false => Err(late("it did not say that its history has ended")),
        }
    }

    /// Returns the record with all reports of the guest before its QEMU ended.
    ///
    /// # Errors
    /// When its QEMU has not ended.
    pub fn finish(self) -> Result<Record, LabError> {
        if !wait_until(LIMIT, || !self.teller.is_connected()) {
            return Err(late("its channel did not end with its QEMU"));
        }
        Ok(self.so_far())
    }

    /// Returns the record with the reports so far. Operations under way may be on its disks or not.
    pub fn so_far(&self) -> Record {
        let heard = self.teller.heard();
        Record {
            done: heard.told.done,
            mask: heard.told.mask,
            quiet: heard.told.quiet,
            errors: heard.errors,
            first_error: heard.first_error,
            ..self.record.clone()
        }
    }

    /// Returns whether its guest is connected, so that more reports may arrive.
    pub fn is_connected(&self) -> bool {
        self.teller.is_connected()
    }
}

fn begin(arena: &mut Arena, teller: &Teller, task: &Task<'_>) -> Result<(), LabError> {
    arena.wait_for_beat(LIMIT).map_err(silent)?;
    arena.start_program(HISTORY_NAME, LIMIT).map_err(silent)?;
    let line = task.line().to_string();
    let mut sent = Ok(false);
    wait_until(LIMIT, || {
        sent = teller.send(&line);
        !matches!(sent, Ok(false))
    });
    match sent? {
        true => Ok(()),
        false => Err(late("its channel for histories was not there")),
    }
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
