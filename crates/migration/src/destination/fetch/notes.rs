//! Finds the disks and the memory that lack blocks by their notes, and compares their number with
//! the journal's.

use crate::destination::fetch::memory::FetchedMemory;
use crate::destination::fetch::{Fetch, Fetched};
use crate::disks::exports;
use crate::handover::attempt_record;
use crate::host::memory_notes::{self, ArrivingNote, MemoryNote};
use std::collections::BTreeSet;

impl Fetch {
    /// Finds the disks, or records why some of them are not known.
    pub(crate) fn find(&mut self) {
        let lost = self.find_all().err();
        if let Some(why) = &lost
            && lost != self.lost
        {
            tracing::error!(guest = self.guest(), "{why}");
        }
        self.lost = lost;
    }

    fn find_all(&mut self) -> Result<(), String> {
        let state = self.context.parts.config.state.clone();
        let ledger = &self.begun.handover.ledger;
        let found = exports::incomplete(&state, &ledger.guest, ledger.migration);
        let folder = exports::folder(&state);
        let found = found.map_err(|error| {
            format!(
                "what is missing of its disks is not known: {error}; {} keeps its images until \
                 the notes in {} can be read",
                ledger.host,
                folder.display()
            )
        })?;
        let memory = ArrivingNote::read(&state, &ledger.guest, ledger.migration);
        let memory = memory.map_err(|error| {
            let host = &ledger.host;
            format!("what is missing of its memory is not known: {error}; {host} keeps it")
        })?;
        let expected = attempt_record::incomplete_disks(&ledger.journal, ledger.terms);
        let expected = expected.unwrap_or(found.len());
        let noted = found.len() + usize::from(memory.is_some());
        let text = match noted < expected {
            true => Some(format!(
                "{} of the {expected} disks that may lack blocks have no note in {} and {} (memory \
                 counts as a disk): {} keeps its images. If a folder was moved, move it back; an \
                 older copy of it is wrong",
                expected - noted,
                folder.display(),
                memory_notes::folder(&state).display(),
                ledger.host
            )),
            false => None,
        };
        if let (None, Some(note)) = (&self.memory, memory) {
            self.memory = Some(FetchedMemory::new(note, self.begun.memory.take()));
        }
        // If the number of disks is unchanged, the known ones keep their state.
        if found.len() != self.disks.len() {
            let fetched = found.into_iter().map(|disk| {
                let fetched = Fetched {
                    puller: None,
                    missing_blocks: disk.masks.missing_blocks(),
                    waiting: 0,
                    broken: None,
                    unreadable: BTreeSet::new(),
                    whole: false,
                    unwritten: None,
                    disk,
                };
                (fetched.disk.masks.region, fetched)
            });
            self.disks = fetched.collect();
            let mut disks = self.disks.values_mut();
            let unwritten = disks.try_for_each(Fetched::look_for_unwritten);
            unwritten.map_err(|error| format!("what is to be compared is not known: {error}"))?;
        }
        text.map_or(Ok(()), Err)
    }

    /// Returns whether every disk that the journal counts is known and complete, and the memory is.
    pub(crate) fn is_whole(&self) -> bool {
        let memory = self.memory.as_ref().is_none_or(|memory| memory.note.whole);
        self.lost.is_none() && memory && self.disks.values().all(|fetched| fetched.whole)
    }
}
