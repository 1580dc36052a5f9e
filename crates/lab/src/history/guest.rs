//! Runs a guest on one host with disks of its own that executes a history, until it is killed or
//! stopped.

use super::images::Record;
use super::task::{History, Task, description};
use crate::error::LabError;
use crate::guest::disks::{Cache, Format};
use crate::guest::initramfs::HISTORY_NAME;
use crate::guest::{KernelFiles, Tiny};
use crate::lab::Host;
use crate::peer::{Begin, PeerHost, PeerQemu, channel_socket};
use std::path::Path;

/// The environment of a guest.
#[derive(Debug)]
pub struct Setup<'a> {
    /// The host.
    pub host: &'a Host,
    /// Its boot files, with the program for histories.
    pub files: &'a KernelFiles,
    /// The QEMU to run.
    pub qemu: &'a Path,
    /// `kvm` or `tcg`.
    pub accelerator: &'a str,
    /// The QEMU version of its machine, such as `7.2`.
    pub machine_version: &'a str,
}

/// A guest that executes a history.
#[derive(Debug)]
pub struct HistoryGuest {
    history: History,
    qemu: PeerQemu,
    /// By disk.
    caches: Vec<Cache>,
}

impl HistoryGuest {
    /// Boots it and starts the history.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start(setup: &Setup<'_>, task: &Task<'_>) -> Result<Self, LabError> {
        let mut tiny = Tiny::calm(HISTORY_NAME);
        tiny.machine_version = setup.machine_version.to_owned();
        let host = PeerHost {
            host: setup.host,
            qemu: setup.qemu,
            accelerator: setup.accelerator,
            files: setup.files,
            disks: &[],
            local: task.disks,
        };
        let qemu = PeerQemu::start(&host, &description(&tiny, task.disks), Begin::Boot)?;
        let mut history = History::new(task);
        history.listen(|channel| channel_socket(setup.host, channel))?;
        history.begin(task)?;
        Ok(Self {
            history,
            qemu,
            caches: task.disks.iter().map(|disk| disk.kind.cache).collect(),
        })
    }

    /// Returns its history.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Kills its QEMU, as a crash would. QEMU's own cached state of a disk may be lost then: tables
    /// of qcow2 images, unless they are written through.
    ///
    /// # Errors
    /// When its sockets stay open.
    pub fn kill(self) -> Result<Record, LabError> {
        drop(self.qemu);
        let mut record = self.history.finish()?;
        for (disk, cache) in record.disks.iter_mut().zip(self.caches) {
            disk.keeps_acknowledged = disk.format == Format::Raw || cache == Cache::Writethrough;
        }
        Ok(record)
    }

    /// Stops the history, lets the guest read all of its disks, and lets QEMU end by itself.
    ///
    /// # Errors
    /// When the guest or QEMU does not do so.
    pub fn stop(mut self) -> Result<Record, LabError> {
        self.history.stop()?;
        self.qemu.quit()?;
        self.history.finish()
    }
}
