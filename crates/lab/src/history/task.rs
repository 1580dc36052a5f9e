//! A history that a guest does, wherever it is: told to begin, listened to, stopped.

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

/// A guest under TCG is up in 2 s, on a machine that does nothing else.
pub(super) const LIMIT: Duration = Duration::from_secs(120);

/// What a guest is to do with its disks.
#[derive(Debug)]
pub struct Task<'a> {
    /// Its disks, whose files hold zeros.
    pub disks: &'a [LocalDisk],
    /// Everything that it does follows from it.
    pub seed: u64,
    /// How many operations are under way at a time.
    pub depth: u32,
    /// What it does.
    pub work: Work,
}

/// A history that a guest does.
#[derive(Debug)]
pub struct History {
    arena: Arena,
    teller: Teller,
    record: Record,
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
        kernel.command_line += &format!(" --workloads {WORKLOADS}");
    }
    guest
}

impl Task<'_> {
    /// What is known of the history before it begins.
    fn record(&self) -> Record {
        let disk = |disk: &LocalDisk| RecordedDisk {
            image: PathBuf::from(disk.path.file_name().unwrap_or_default()),
            format: disk.kind.format,
            bytes: disk.bytes,
            keeps_acknowledged: true,
            // Of a qcow2 image whole clusters are discarded, and nothing smaller; so of an overlay.
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

    /// The line that lets the program in the guest begin.
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
    /// A history of which nothing is heard yet.
    pub fn new(task: &Task<'_>) -> Self {
        Self {
            arena: Arena::new(),
            teller: Teller::default(),
            record: task.record(),
        }
    }

    /// Listens on the sockets that a host has for the channels of the guest, by their names, also
    /// before the guest is there.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn listen(&self, socket: impl Fn(&str) -> PathBuf) -> Result<(), LabError> {
        self.listen_beside(&socket)?;
        self.arena
            .attach(&socket(crate::guest::CHANNEL_NAME))
            .map_err(|error| silent(ArenaError::Write(error)))
    }

    /// As [`Self::listen`], where somebody else listens to the guest's arena.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn listen_beside(&self, socket: impl Fn(&str) -> PathBuf) -> Result<(), LabError> {
        self.teller.attach(&socket(HISTORY_NAME))
    }

    /// Lets the guest begin as soon as it is up.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn begin(&mut self, task: &Task<'_>) -> Result<(), LabError> {
        begin(&mut self.arena, &self.teller, task)
    }

    /// As [`Self::begin`], in a guest whose arena is heard by somebody else.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn begin_beside(&self, arena: &mut Arena, task: &Task<'_>) -> Result<(), LabError> {
        begin(arena, &self.teller, task)
    }

    /// The guest's arena.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// The guest's arena, to give it commands.
    pub fn arena_mut(&mut self) -> &mut Arena {
        &mut self.arena
    }

    /// What the guest told so far.
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

    /// Stops the history, and lets the guest read all of its disks.
    ///
    /// # Errors
    /// When the guest does not answer.
    pub fn stop(&mut self) -> Result<(), LabError> {
        let checked = self.arena.check_program(LIMIT);
        checked.map_err(silent)?;
        self.ended()
    }

    /// As [`Self::stop`], in a guest whose arena is heard by somebody else.
    ///
    /// # Errors
    /// When the guest does not answer.
    pub fn stop_beside(&self, arena: &mut Arena) -> Result<(), LabError> {
        arena.check_program(LIMIT).map_err(silent)?;
        self.ended()
    }

    fn ended(&self) -> Result<(), LabError> {
        // Its last word comes on another channel than the answer.
        match wait_until(LIMIT, || self.heard().ended) {
            true => Ok(()),
            false => Err(late("it did not say that its history has ended")),
        }
    }

    /// The record with all that the guest told before its QEMU ended.
    ///
    /// # Errors
    /// When its QEMU has not ended.
    pub fn finish(self) -> Result<Record, LabError> {
        if !wait_until(LIMIT, || !self.teller.is_connected()) {
            return Err(late("its channel did not end with its QEMU"));
        }
        Ok(self.so_far())
    }

    /// The record with what the guest told so far. What it is doing may be on its disks or not.
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

    /// Whether its guest is heard, or there may be more to hear.
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
