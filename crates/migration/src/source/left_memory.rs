//! What the missing blocks of a departed guest are read from, as an earlier agent has noted it: its
//! stopped QEMU, its memory file and its images.

use crate::context::Context;
use crate::host::memory_notes::{LeftNote, MemoryNote};
use crate::host::qemu::is_alive;
use crate::source::memory_copy::{self, Copying, Job};
use crate::source::memory_file::{Kept, MemoryFile};
use crate::source::sender::Content;
use longhaul_api::MemoryFileReport;
use longhaul_codec::BlockId;
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::memory::GuestMemory;
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use longhaul_protocol::{BLOCK_SIZE, BlockRange, MigrationId, RegionId};
use longhaul_storage::disk::RawDisk;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use tokio::task::block_in_place;

/// The memory of a departed guest.
pub(crate) struct LeftMemory {
    pub(crate) note: LeftNote,
    /// Its stopped QEMU, unless that has ended.
    qemu: Option<(Guest, Arc<GuestMemory>)>,
    file: Kept,
}

/// The content that a departed guest's destination lacks.
pub(crate) struct LeftContent {
    pub(crate) memory: Option<LeftMemory>,
    pub(crate) disks: BTreeMap<RegionId, Arc<RawDisk>>,
}

impl LeftMemory {
    /// Finds the memory of a guest that is missing at the destination, if any is.
    pub(crate) async fn find(
        context: &Context,
        guest: &str,
        migration: MigrationId,
    ) -> io::Result<Option<Self>> {
        let parts = &context.parts;
        let note = block_in_place(|| LeftNote::read(&parts.config.state, guest, migration))?;
        let Some(note) = note else { return Ok(None) };
        let found = block_in_place(|| parts.guests.find(guest))?;
        let qemu = match found {
            Some(found) => {
                let lease = parts.guests.lease(&found, COMMAND_TIMEOUT).await;
                let lease = lease.map_err(io::Error::other)?;
                let pid = found
                    .pid()
                    .ok_or_else(|| io::Error::other("it has no process"))?;
                let memory = GuestMemory::attach(lease.qmp(), pid).await;
                Some((found, Arc::new(memory.map_err(io::Error::other)?)))
            }
            None => None,
        };
        let file = Kept::default();
        if note.file.as_ref().is_some_and(|it| it.complete.is_some()) {
            match block_in_place(|| MemoryFile::open(&parts.config.state, guest, &note)) {
                Ok(opened) => file.set(opened),
                Err(error) => tracing::error!(guest, %error, "its memory file is not used"),
            }
        }
        Ok(Some(Self { note, qemu, file }))
    }

    /// Begins the copy to the memory file again, if an earlier agent was to make one and has not.
    pub(crate) fn copy(&self, state: &Path, guest: &str) -> Option<Copying> {
        let (found, memory) = self.qemu.as_ref().filter(|_| !self.file.is_complete())?;
        let mut note = self.note.clone();
        note.file.as_mut()?.complete = None;
        let places = note.regions.iter();
        let places = places.filter_map(|spec| Some((spec.id, memory.find(&spec.name)?)));
        let read = memory_copy::of_qemu(found.clone(), memory.clone(), places.collect());
        let job = Job {
            state: state.to_owned(),
            guest: guest.to_owned(),
            note,
            read,
            since: None,
        };
        Some(Copying::begin(job, self.file.clone()))
    }

    /// Returns the report of the memory file, if an earlier agent completed it.
    pub(crate) fn report(&self) -> Option<MemoryFileReport> {
        let noted = self.note.file.as_ref().filter(|_| self.file.is_complete());
        Some(memory_copy::report(noted?.complete?))
    }

    fn read(&self, blocks: &[BlockId], into: &mut [u8]) -> Result<(), String> {
        let of_qemu = self.read_qemu(blocks, into);
        self.file.read_after(of_qemu, blocks, into)
    }

    fn read_qemu(&self, blocks: &[BlockId], into: &mut [u8]) -> Result<(), String> {
        let (guest, memory) = self.qemu.as_ref().ok_or("its QEMU has ended")?;
        let region = blocks.first().map(|block| block.region);
        let mut regions = self.note.regions.iter();
        let spec = regions.find(|spec| Some(spec.id) == region);
        let place = spec.and_then(|spec| memory.find(&spec.name));
        let place = place.ok_or("there is no such region")?;
        let ranges: Vec<BlockRange> = blocks
            .iter()
            .map(|block| BlockRange::new(block.block, 1))
            .collect();
        let read = memory.read(place, &ranges, into);
        read.map_err(|error| error.to_string())?;
        is_alive(guest)
    }
}

impl Content for LeftContent {
    fn read(&self, blocks: &[BlockId], into: &mut [[u8; BLOCK_SIZE]]) -> Result<(), String> {
        let mut done = 0;
        for same in blocks.chunk_by(|one, next| one.region == next.region) {
            let Some(block) = same.first() else { continue };
            let into = &mut into[done..done + same.len()];
            match (self.disks.get(&block.region), &self.memory) {
                (Some(disk), _) => crate::disks::read_each(disk, same, into)?,
                (None, Some(memory)) => memory.read(same, into.as_flattened_mut())?,
                (None, None) => return Err("there is no such region".to_owned()),
            }
            done += same.len();
        }
        Ok(())
    }
}
