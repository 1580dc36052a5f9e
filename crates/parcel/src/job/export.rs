//! Exports a guest's disks: as they are when they are read, or at a moment.

use super::Step;
use super::chunks::{self, Content, Read, ReadOrRecord, Reading};
use super::copier::{Copier, Document, Sink as _};
use super::document::{KnownDisk, KnownGuest, Next};
use super::error::{JobError, io_at};
use super::moment::{self, Member, Moment};
use super::setup::record_of;
use crate::header::Bytes16;
use crate::record::{CHUNK_BYTES, MomentId, Record, Version, VersionDisk};
use crate::tree::{Before, Tree};
use longhaul_storage::disk::RawDisk;
use longhaul_storage::front::tracking::{Checkpoint, CheckpointError};
use std::cmp::Ordering;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

/// Moments that may be lost in one run. After that the guest is exported as it is.
const MOMENTS: usize = 3;

/// Why a guest was not exported.
enum Failure {
    /// The moment is lost, for this reason.
    Moment(CheckpointError),
    Job(JobError),
}

impl<E: Into<JobError>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Job(error.into())
    }
}

impl<D: Document> Copier<D> {
    /// Exports all guests. Those that are tracked, and whose version is of no moment, get another
    /// one that is.
    pub(super) fn export_all(
        &mut self,
        sink: &mut D::Sink,
        now: u64,
        progress: &mut dyn FnMut(&Step<'_>),
    ) -> Result<(), JobError> {
        // Those of an earlier run are too old.
        self.moments.clear();
        // One version is added. A run that goes on in the middle of it may add another.
        let most = 1 + usize::from(self.state.consolidates);
        let mut consolidations = 0;
        loop {
            while self.state.next.guest < self.state.guests.len() {
                match self.keeps_version()? {
                    true => self.keep_version()?,
                    false => self.export(sink, now, progress)?,
                }
            }
            if consolidations == most || !self.consolidate()? {
                self.state.consolidates = false;
                return Ok(());
            }
            consolidations += 1;
        }
    }

    /// Exports the rest of the next guest: of one moment if its writes are tracked and a version
    /// of it exists.
    fn export(
        &mut self,
        sink: &mut D::Sink,
        now: u64,
        progress: &mut dyn FnMut(&Step<'_>),
    ) -> Result<(), JobError> {
        let number = self.state.next.guest;
        for _ in 0..MOMENTS {
            let Some(mut moment) = self.moment(number, progress)? else {
                break;
            };
            match self.export_guest(sink, now, Some(&mut moment), progress) {
                Ok(()) => {
                    moment.forget();
                    return Ok(());
                }
                Err(Failure::Job(error)) => return Err(error),
                Err(Failure::Moment(error)) => progress(&Step::MomentLost {
                    guest: &self.name_of(number),
                    why: &error.to_string(),
                }),
            }
        }
        match self.export_guest(sink, now, None, progress) {
            Ok(()) => Ok(()),
            Err(Failure::Job(error)) => Err(error),
            Err(Failure::Moment(error)) => Err(JobError::Moment(error)),
        }
    }

    fn name_of(&self, guest: usize) -> String {
        let guest = self.state.guests.get(guest);
        guest.map_or_else(String::new, |guest| guest.name.clone())
    }

    /// Takes a moment of a guest, and begins its version at that moment again.
    fn moment(
        &mut self,
        number: usize,
        progress: &mut dyn FnMut(&Step<'_>),
    ) -> Result<Option<Moment>, JobError> {
        let Some(guest) = self.state.guests.get(number).cloned() else {
            return Ok(None);
        };
        let has_version = |at| self.digests((number, at), self.state.version - 1).exists();
        if self.state.is_first || !(0..guest.disks.len()).all(has_version) {
            return Ok(None);
        }
        if let Some(moment) = self.moments.remove(&number) {
            self.begin_again(number, &guest)?;
            return Ok(Some(moment));
        }
        let mut numbers = Vec::new();
        let mut members = Vec::new();
        for number in self.waiting_members(number) {
            let Some(member) = self.state.guests.get(number).cloned() else {
                continue;
            };
            let has_version = |at| self.digests((number, at), self.state.version - 1).exists();
            let exports = moment::exports(&*self.tracking, &member)?;
            if let Some(exports) = exports
                && (0..member.disks.len()).all(has_version)
            {
                numbers.push(number);
                members.push((member, exports));
            }
        }
        if numbers.first() != Some(&number) {
            return Ok(None);
        }
        let id = match members.len() {
            1 => None,
            _ => Some(MomentId(Bytes16::draw()?)),
        };
        let members = members.into_iter();
        let members = members.map(|(guest, exports)| Member::of(guest, exports));
        let tracking = self.freezes.then_some(&*self.tracking);
        let moments = members
            .collect::<Result<_, _>>()
            .and_then(|members| Moment::of((id, members), tracking, progress));
        match moments {
            Ok(moments) => {
                self.moments = numbers.into_iter().zip(moments).collect();
                self.begin_again(number, &guest)?;
                Ok(self.moments.remove(&number))
            }
            Err(error) => {
                let (guest, why) = (&*guest.name, &*error.to_string());
                progress(&Step::MomentLost { guest, why });
                Ok(None)
            }
        }
    }

    /// Returns the guests that are to have the same moment as this one: it alone, or all of its
    /// group if it is the first of them.
    fn waiting_members(&self, number: usize) -> Vec<usize> {
        let members = self.members(number);
        match members.first() {
            Some(first) if *first == number => members,
            _ => vec![number],
        }
    }

    /// Returns the guests of a guest's group.
    fn members(&self, number: usize) -> Vec<usize> {
        let group_of = |number: usize| self.state.guests.get(number)?.group.as_ref();
        match group_of(number) {
            None => vec![number],
            group => {
                let all = 0..self.state.guests.len();
                all.filter(|other| group_of(*other) == group).collect()
            }
        }
    }

    /// Begins the version of a guest again: what was put into the parcel since the version before
    /// counts as that version's content.
    fn begin_again(&mut self, number: usize, guest: &KnownGuest) -> Result<(), JobError> {
        let next = self.state.next;
        if next == Next::begin(number) {
            return Ok(());
        }
        let version = self.state.version;
        for (at, known) in guest.disks.iter().enumerate() {
            let chunks = match at.cmp(&next.disk) {
                Ordering::Less => known.bytes.div_ceil(CHUNK_BYTES as u64),
                Ordering::Equal => next.chunk,
                Ordering::Greater => 0,
            };
            let newer = self.digests((number, at), version);
            let before = self.digests((number, at), version - 1);
            Tree::replace_first(&before, &newer, chunks).map_err(io_at(&before))?;
        }
        self.state.next = Next::begin(number);
        self.save()
    }

    /// Exports the rest of a guest.
    fn export_guest(
        &mut self,
        sink: &mut D::Sink,
        now: u64,
        mut moment: Option<&mut Moment>,
        progress: &mut dyn FnMut(&Step<'_>),
    ) -> Result<(), Failure> {
        let number = self.state.next.guest;
        let Some(guest) = self.state.guests.get_mut(number) else {
            return Ok(());
        };
        match &moment {
            Some(moment) => {
                for (known, checkpoint) in guest.disks.iter_mut().zip(&moment.checkpoints) {
                    known.bytes = checkpoint.image_bytes();
                }
            }
            None if self.state.next == Next::begin(number) => {
                let exports = moment::exports(&*self.tracking, guest)?;
                moment::begins(guest, exports.as_deref());
            }
            None => {}
        }
        let guest = guest.clone();
        self.save()?;
        sink.put(&record_of(number, &guest))?;
        let mut trees = Vec::new();
        for (at, known) in guest.disks.iter().enumerate() {
            let checkpoint = moment.as_mut().and_then(|it| it.checkpoints.get_mut(at));
            let digest = self.export_disk(sink, (number, at), (known, checkpoint), progress)?;
            trees.push(VersionDisk {
                disk: at as u32,
                digest,
            });
        }
        sink.put(&Record::Version(Version {
            guest: number as u32,
            version: self.state.version,
            time: now,
            consistent: moment.is_some(),
            frozen: moment.as_ref().is_some_and(|moment| moment.frozen),
            moment: moment.as_ref().and_then(|moment| moment.id),
            disks: trees,
        }))?;
        self.state.next = Next::begin(number + 1);
        if let Some(guest) = self.state.guests.get_mut(number) {
            guest.consistent = moment.is_some();
            guest.frozen = moment.as_ref().is_some_and(|moment| moment.frozen);
            guest.moment = moment.as_ref().and_then(|moment| moment.id);
            for known in &mut guest.disks {
                known.version_bytes = known.bytes;
            }
            match moment {
                // The version must be durable before a record forgets what it has.
                Some(moment) => moment.is_durable(guest)?,
                None => {
                    for known in &mut guest.disks {
                        known.since = known.begun.take();
                    }
                }
            }
        }
        self.durable(sink)?;
        for at in 0..guest.disks.len() {
            let old = self.digests((number, at), self.state.version - 1);
            remove(&old)?;
        }
        Ok(())
    }

    /// Exports the rest of a disk, and returns its digest.
    fn export_disk(
        &mut self,
        sink: &mut D::Sink,
        (number, at): (usize, usize),
        (known, checkpoint): (&KnownDisk, Option<&mut Checkpoint>),
        progress: &mut dyn FnMut(&Step<'_>),
    ) -> Result<String, Failure> {
        let path = self.digests((number, at), self.state.version);
        let mut tree = Tree::open(&path).map_err(io_at(&path))?;
        let before = self.digests((number, at), self.state.version - 1);
        let (fails, fails_tree) = (io_at(&known.disk.path), io_at(&path));
        let all = known.bytes;
        let count = all.div_ceil(CHUNK_BYTES as u64);
        // A disk that is complete is not read again.
        let mut chunk = match at.cmp(&self.state.next.disk) {
            Ordering::Less => count,
            Ordering::Equal => self.state.next.chunk,
            Ordering::Greater => 0,
        };
        tree.cut(chunk).map_err(&fails_tree)?;
        let mut contents = Vec::new();
        match checkpoint {
            Some(checkpoint) => contents.push(Content::Moment(checkpoint, known.version_bytes)),
            None => {
                for _ in 0..chunks::threads() {
                    let disk = RawDisk::open_to_read(&known.disk.path)?;
                    contents.push(Content::of_disk(disk));
                }
            }
        }
        // Before the first version all of it is sent.
        let patches = D::PATCHES && !self.state.is_first;
        let mut readings = Vec::new();
        for content in contents {
            let before = Before::open(&before).map_err(io_at(&before))?;
            let disk = ((number as u32, at as u32), all);
            readings.push(Reading::new(content, disk, (before, patches)));
        }
        let mut saved = Instant::now();
        thread::scope(|scope| {
            // If this function returns early, the batches are dropped.
            let batches = chunks::read_all(scope, readings, &(chunk..count));
            for batch in batches {
                let batch = batch.map_err(&fails_tree)?;
                if let Err(error) = batch.copied {
                    // What the parcel has of it is noted before it is exported again.
                    self.note((number, at, chunk), &tree, &path, sink)?;
                    return Err(Failure::Moment(error));
                }
                for (read, old) in batch.chunks {
                    let digest = match read {
                        Ok(Read::Unchanged(digest)) => digest,
                        Ok(Read::Encoded(chunk)) => {
                            let digest = chunk.digest;
                            if old != Some(digest) {
                                sink.put_chunk(chunk)?;
                            }
                            digest
                        }
                        Err(ReadOrRecord::Read(error)) => return Err(fails(error).into()),
                        Err(ReadOrRecord::Record(error)) => return Err(error.into()),
                    };
                    tree.push(digest).map_err(&fails_tree)?;
                }
                chunk = batch.end;
                progress(&Step::Exports {
                    disk: &known.disk.name,
                    done: (chunk * CHUNK_BYTES as u64).min(all),
                    all,
                });
                if saved.elapsed() >= self.durable_every || chunk == count {
                    self.note((number, at, chunk), &tree, &path, sink)?;
                    saved = Instant::now();
                }
            }
            Ok(())
        })?;
        Ok(tree.digest().map_err(&fails_tree)?)
    }

    /// Notes durably how far an export has come.
    fn note(
        &mut self,
        (guest, disk, chunk): (usize, usize, u64),
        tree: &Tree,
        path: &Path,
        sink: &mut D::Sink,
    ) -> Result<(), JobError> {
        tree.sync().map_err(io_at(path))?;
        self.state.next = Next { guest, disk, chunk };
        self.durable(sink)
    }

    /// Returns whether the version of a guest is of no moment, or not of that of its group,
    /// although all writes are tracked.
    fn lacks_moment(&self, number: usize) -> Result<bool, JobError> {
        let is_tracked = |guest: &KnownGuest| {
            let exports = moment::exports(&*self.tracking, guest)?;
            Ok::<_, JobError>(exports.is_some())
        };
        let Some(guest) = self.state.guests.get(number) else {
            return Ok(false);
        };
        if !guest.consistent {
            return is_tracked(guest);
        }
        let members = self.members(number);
        let members: Vec<&KnownGuest> = members
            .into_iter()
            .filter_map(|it| self.state.guests.get(it))
            .collect();
        let has_its = |it: &&KnownGuest| it.moment.is_some() && it.moment == guest.moment;
        if members.len() == 1 || members.iter().all(has_its) {
            return Ok(false);
        }
        for member in members {
            if !is_tracked(member)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Lets guests whose writes are tracked have another version, of one moment, if their last one
    /// has none. Returns whether there are any. The others keep their version.
    fn consolidate(&mut self) -> Result<bool, JobError> {
        let mut any = false;
        for number in 0..self.state.guests.len() {
            any |= self.lacks_moment(number)?;
        }
        if any {
            self.state.version += 1;
            self.state.next = Next::default();
            self.state.consolidates = true;
            self.state.is_first = false;
            self.save()?;
        }
        Ok(any)
    }

    /// Returns whether the next guest keeps its version.
    fn keeps_version(&self) -> Result<bool, JobError> {
        let next = self.state.next;
        // A version that was begun is completed: the parcel has a part of it.
        let is_begun = next != Next::begin(next.guest);
        let is_possible = self.state.consolidates && !is_begun;
        Ok(is_possible
            && !self.moments.contains_key(&next.guest)
            && !self.lacks_moment(next.guest)?)
    }

    /// Keeps the version of a guest that lacks nothing, under the number of this one.
    fn keep_version(&mut self) -> Result<(), JobError> {
        let number = self.state.next.guest;
        let disks = self
            .state
            .guests
            .get(number)
            .map_or(0, |guest| guest.disks.len());
        for at in 0..disks {
            let old = self.digests((number, at), self.state.version - 1);
            let new = self.digests((number, at), self.state.version);
            match fs::rename(&old, &new) {
                // An interrupted command has done it.
                Err(error) if error.kind() == io::ErrorKind::NotFound && new.exists() => {}
                renamed => renamed.map_err(io_at(&old))?,
            }
        }
        self.state.next = Next::begin(number + 1);
        self.save()
    }
}

fn remove(path: &PathBuf) -> Result<(), JobError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_at(path)(error)),
        _ => Ok(()),
    }
}
