//! Finds the disks that lack blocks by their notes, and compares their number with the journal's.

use crate::destination::fetch::{Fetch, Fetched};
use crate::disks::exports;
use crate::handover::attempt_record;
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
        let expected = attempt_record::incomplete_disks(&ledger.journal, ledger.terms);
        let expected = expected.unwrap_or(found.len());
        let text = match found.len() < expected {
            true => Some(format!(
                "{} of the {expected} disks that may lack blocks have no note in {}: {} keeps its \
                 images. If the folder was moved, move it back; an older copy of it is wrong",
                expected - found.len(),
                folder.display(),
                ledger.host
            )),
            false => None,
        };
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

    /// Returns whether every disk that the journal counts is known, and complete.
    pub(crate) fn is_whole(&self) -> bool {
        self.lost.is_none() && self.disks.values().all(|fetched| fetched.whole)
    }
}
