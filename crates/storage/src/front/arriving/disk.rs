//! The arriving disk: the guest's requests, the arriving blocks, and the order in which both become
//! durable.

use super::line::ToPump;
use super::masks::{MaskFile, Masks, is_marked_failed, mark_failed, this_boot};
use super::pump::Pump;
use super::unwritten::Noting;
use crate::disk::{Disk, ExportSize, Extent, RawDisk, Zeros};
use crate::front::folder::{FolderError, FrontFolder, FrontSpec, failed};
use crate::front::server::ServeError;
use crate::nbd::{Notice, client_is_gone, others_go_on};
use crate::pulse::elsewhere;
use longhaul_engine::presence::{Begin, ChunkMask, Operation, Output, Presence, RequestId};
use longhaul_protocol::{BLOCK_SIZE, BlockRange, Epoch};
use nix::errno::Errno;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// How often durability and disconnected clients are checked.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The time between two attempts to record what must precede an answer.
const NOTE_AGAIN: Duration = Duration::from_millis(200);
/// Frames of the source's last connection have some number: all arriving blocks count as missing
/// ones.
const SEQ: u64 = 1;
const BLOCK: u64 = BLOCK_SIZE as u64;

/// The outcome of a request that waited.
#[derive(Debug)]
enum Verdict {
    Go(Range<u64>),
    Unreadable,
    Flushed,
    FlushFailed,
}

#[derive(Debug, Default)]
struct State {
    /// Unset until the source has listed the missing blocks.
    known: Option<Known>,
    next: u64,
    verdicts: BTreeMap<RequestId, Verdict>,
    sync: bool,
    store: Option<Vec<ChunkMask>>,
    pump: Option<Arc<Pump>>,
    epoch: u32,
    told_whole: bool,
    /// Whether something could not be made durable since the host was started.
    broken: Option<i32>,
}

#[derive(Debug)]
struct Known {
    presence: Presence,
    noted: MaskFile,
    stored: Arc<MaskFile>,
    /// Set where the parts that the guest has not written are to be compared with the source.
    unwritten: Option<Noting>,
}

/// A disk of which some blocks may still be missing.
#[derive(Debug)]
pub(super) struct ArrivingDisk {
    disk: RawDisk,
    /// Whether its image grows: then there is space behind the source's content.
    grows: bool,
    folder: FrontFolder,
    state: Mutex<State>,
    changed: Condvar,
    notify: Notify,
}

/// Receives notices that no client is sent.
struct Notify(Box<dyn Fn(Notice) + Send + Sync>);

impl fmt::Debug for Notify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Notify")
    }
}

impl ArrivingDisk {
    pub(super) fn open(
        folder: &FrontFolder,
        spec: &FrontSpec,
        notify: impl Fn(Notice) + Send + Sync + 'static,
    ) -> Result<Self, ServeError> {
        let arriving = Self {
            disk: RawDisk::open(&spec.image, spec.size)?,
            grows: spec.size != ExportSize::OfFile,
            folder: folder.clone(),
            state: Mutex::default(),
            changed: Condvar::new(),
            notify: Notify(Box::new(notify)),
        };
        arriving.listed()?;
        Ok(arriving)
    }

    /// Waiting for the lock is not the server's own time: it may be held during disk operations.
    fn lock(&self) -> MutexGuard<'_, State> {
        // No operation under the lock leaves the state half changed.
        elsewhere(|| self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Begins to use the masks, if they exist.
    pub(super) fn listed(&self) -> Result<bool, FolderError> {
        let mut state = self.lock();
        if state.known.is_some() {
            return Ok(true);
        }
        let (stored_at, noted_at) = (self.folder.stored_masks(), self.folder.noted_masks());
        let Some(stored) = Masks::read(&stored_at)? else {
            return Ok(false);
        };
        let boot = this_boot().map_err(|error| failed(&noted_at, error))?;
        // A file of another boot, or an incomplete one, is meaningless: the guest has not run by
        // it.
        let noted = Masks::read(&noted_at).ok().flatten();
        let noted = noted.filter(|noted| {
            (noted.boot, noted.region, noted.blocks) == (boot, stored.region, stored.blocks)
        });
        let noted = match noted {
            Some(noted) => noted,
            None => {
                let noted = Masks {
                    boot,
                    ..stored.clone()
                };
                noted.write(&noted_at)?;
                noted
            }
        };
        let wrong = |why: String| failed(&stored_at, io::Error::other(why));
        let blocks = self.disk.size_bytes().div_ceil(BLOCK);
        let fits = match self.grows {
            true => stored.blocks <= blocks,
            false => stored.blocks == blocks,
        };
        if !fits {
            return Err(wrong("it is of a disk of another size".to_owned()));
        }
        let presence = Presence::restored(
            stored.region,
            stored.blocks,
            &noted.missing,
            &stored.missing,
        );
        let mut presence = presence.map_err(|error| wrong(error.to_string()))?;
        let failed_at = self.folder.failed_mark();
        let marked = is_marked_failed(&failed_at).map_err(|error| failed(&failed_at, error))?;
        if marked {
            presence.give_up_durability();
            state.broken = Some(Errno::EIO as i32);
        }
        // If there is a pump, it introduces itself.
        presence.connected(Epoch(state.epoch));
        state.known = Some(Known {
            presence,
            noted: MaskFile::open(&noted_at)?,
            stored: Arc::new(MaskFile::open(&stored_at)?),
            unwritten: Noting::open(&self.folder, stored.blocks)?,
        });
        self.changed.notify_all();
        Ok(true)
    }

    // The pump.

    /// Makes this pump the one that brings missing blocks from now on.
    pub(super) fn connected(&self, pump: &Arc<Pump>) {
        let mut state = self.lock();
        if let Some(before) = state.pump.replace(pump.clone()) {
            before.end();
        }
        state.epoch += 1;
        state.told_whole = false;
        let epoch = Epoch(state.epoch);
        if let Some(known) = &mut state.known {
            known.presence.connected(epoch);
        }
        state.tell_state();
        state.tell_broken();
        self.outputs(&mut state);
        self.changed.notify_all();
    }

    /// Handles the end of a pump's connection.
    pub(super) fn disconnected(&self, pump: &Arc<Pump>) {
        let mut state = self.lock();
        if state
            .pump
            .as_ref()
            .is_some_and(|now| Arc::ptr_eq(now, pump))
        {
            state.pump = None;
        }
    }

    /// Takes blocks that have arrived, or that are zero (`None`).
    pub(super) fn came(&self, range: BlockRange, content: Option<&[u8]>) -> io::Result<()> {
        let mut held = self.lock();
        let state = &mut *held;
        let epoch = Epoch(state.epoch);
        let Some(known) = &mut state.known else {
            return Err(io::Error::other("blocks came before the list"));
        };
        let accepted: Vec<u64> = range
            .blocks()
            .filter(|block| known.presence.accepts(epoch, *block, SEQ))
            .collect();
        for run in accepted.chunk_by(|one, next| one + 1 == *next) {
            let (Some(first), count) = (run.first(), run.len()) else {
                continue;
            };
            let run = BlockRange::new(*first, count as u64);
            let done = elsewhere(|| self.put(range.start, run, content));
            done?;
            let masks = known.presence.arrived(run, SEQ);
            self.note(&known.noted, &masks);
        }
        self.outputs(state);
        Ok(())
    }

    /// Writes a run of arrived blocks, as far as the disk reaches.
    fn put(&self, came_at: u64, run: BlockRange, content: Option<&[u8]>) -> io::Result<()> {
        let size = self.disk.size_bytes();
        let bytes = run.start * BLOCK..(run.end() * BLOCK).min(size);
        let Some(content) = content else {
            return self.disk.zero(bytes, Zeros::MayBeHole);
        };
        let from = ((run.start - came_at) * BLOCK) as usize;
        let length = (bytes.end - bytes.start) as usize;
        let content = content.get(from..from + length);
        let content = content.ok_or_else(|| io::Error::other("too little content"))?;
        self.disk.write(bytes.start, content)
    }

    /// Records that the source cannot read these blocks.
    pub(super) fn unreadable(&self, range: BlockRange) {
        let mut state = self.lock();
        if let Some(known) = &mut state.known {
            known.presence.unreadable(range);
        }
        self.outputs(&mut state);
    }

    // The guest.

    /// Carries out a request once all blocks that it needs are here: those that the source may
    /// have, and the range behind them.
    fn request(
        &self,
        operation: Operation,
        range: Range<u64>,
        mut work: impl FnMut(Range<u64>) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut state = self.lock();
        if state.known.is_none() {
            if operation == Operation::Read {
                drop(state);
                return work(range);
            }
            state = others_go_on(|| self.until_known(state))?;
            if client_is_gone() {
                return Err(Errno::ECANCELED.into());
            }
        }
        let ends = match &state.known {
            Some(known) if self.grows => known.presence.blocks() * BLOCK,
            _ => u64::MAX,
        };
        drop(state);
        if range.start < ends {
            self.request_within(operation, range.start..range.end.min(ends), &mut work)?;
        }
        match range.end > ends {
            true => work(range.start.max(ends)..range.end),
            false => Ok(()),
        }
    }

    fn request_within(
        &self,
        operation: Operation,
        range: Range<u64>,
        work: impl FnOnce(Range<u64>) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut state = self.lock();
        let id = RequestId(state.next);
        state.next += 1;
        let Some(known) = &mut state.known else {
            return Err(Errno::EIO.into());
        };
        let begun = known.presence.begin(id, operation, range);
        let begun = begun.map_err(|_| io::Error::from(Errno::EINVAL))?;
        self.outputs(&mut state);
        let bytes = match begun {
            Begin::Go(bytes) => bytes,
            Begin::Wait => {
                state.tell_state();
                let verdict;
                (state, verdict) = others_go_on(|| self.verdict(state, id))?;
                if client_is_gone() {
                    return Err(self.forget(state, id, Some(verdict)));
                }
                match verdict {
                    Verdict::Go(bytes) => bytes,
                    _ => return Err(Errno::EIO.into()),
                }
            }
        };
        if operation != Operation::Read {
            self.note_write(&mut state, &bytes);
        }
        drop(state);
        let done = work(bytes);
        let mut state = self.lock();
        if let Some(known) = &mut state.known {
            let masks = known.presence.done(id, done.is_ok());
            self.note(&known.noted, &masks);
        }
        self.outputs(&mut state);
        done
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let waited = elsewhere(|| self.changed.wait_timeout(state, LOOK_EVERY));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits until the source has listed the missing blocks.
    fn until_known<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
    ) -> io::Result<MutexGuard<'a, State>> {
        while state.known.is_none() {
            if client_is_gone() {
                return Err(Errno::ECANCELED.into());
            }
            state = self.wait(state);
        }
        Ok(state)
    }

    /// Waits for the outcome of a request.
    fn verdict<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        id: RequestId,
    ) -> io::Result<(MutexGuard<'a, State>, Verdict)> {
        loop {
            let verdict = state.verdicts.remove(&id);
            if client_is_gone() {
                return Err(self.forget(state, id, verdict));
            }
            match verdict {
                Some(verdict) => return Ok((state, verdict)),
                None => state = self.wait(state),
            }
        }
    }

    /// Drops a request: its client repeats it at another server, or at this one.
    fn forget(
        &self,
        mut state: MutexGuard<'_, State>,
        id: RequestId,
        verdict: Option<Verdict>,
    ) -> io::Error {
        if let Some(known) = &mut state.known {
            match verdict {
                Some(Verdict::Go(_)) => drop(known.presence.done(id, false)),
                _ => known.presence.forget(id),
            }
        }
        self.outputs(&mut state);
        Errno::ECANCELED.into()
    }

    /// Carries out the outputs of the presence, or has them carried out.
    fn outputs(&self, state: &mut State) {
        let mut changed = false;
        while let Some(output) = state.known.as_mut().and_then(|known| known.presence.poll()) {
            changed = true;
            match output {
                Output::Go(id, bytes) => drop(state.verdicts.insert(id, Verdict::Go(bytes))),
                Output::Unreadable(id) => drop(state.verdicts.insert(id, Verdict::Unreadable)),
                Output::Flushed(id) => drop(state.verdicts.insert(id, Verdict::Flushed)),
                Output::FlushFailed(id) => drop(state.verdicts.insert(id, Verdict::FlushFailed)),
                Output::Want(range) => state.tell(ToPump::Want(range)),
                Output::Superseded(range) => state.tell(ToPump::Superseded(range)),
                Output::SyncData => state.sync = true,
                Output::StoreMasks(masks) => state.store = Some(masks),
            }
        }
        if changed {
            self.changed.notify_all();
        }
    }

    /// Carries out one step of durability, if there is one.
    fn durable_step(&self, state: &mut Option<MutexGuard<'_, State>>) -> bool {
        let Some(held) = state else { return false };
        if std::mem::take(&mut held.sync) {
            *state = None;
            let done = self.disk.flush();
            self.note_broken(&done);
            let mut held = self.lock();
            if let Some(known) = &mut held.known {
                known.presence.data_synced(done.is_ok());
            }
            self.outputs(&mut held);
            return true;
        }
        let stored = held.known.as_ref().map(|known| known.stored.clone());
        let Some((masks, stored)) = held.store.take().zip(stored) else {
            return false;
        };
        *state = None;
        let done = stored.set(&masks).and_then(|()| stored.sync());
        self.note_broken(&done);
        let mut held = self.lock();
        if let Some(known) = &mut held.known {
            known.presence.masks_stored(done.is_ok());
        }
        self.outputs(&mut held);
        true
    }

    /// The pump is told of the failure even if the mark cannot be made; clients are told only after
    /// that.
    fn note_broken(&self, done: &io::Result<()>) {
        if let Err(error) = done {
            let mut state = self.lock();
            state.broken = Some(error.raw_os_error().unwrap_or(Errno::EIO as i32));
            state.tell_broken();
            drop(state);
            self.mark_failed();
        }
    }

    /// The system reports lost data once, so the next server must know of it: the error is not
    /// reported to it again.
    pub(super) fn mark_failed(&self) {
        let path = self.folder.failed_mark();
        self.until_noted(&path, || mark_failed(&path));
    }

    /// Records present blocks before any request completes: until then no other request completes
    /// either.
    fn note(&self, noted: &MaskFile, masks: &[ChunkMask]) {
        self.until_noted(&self.folder.noted_masks(), || noted.set(masks));
    }

    /// Records a write that is about to begin: its range is no longer compared.
    fn note_write(&self, state: &mut State, bytes: &Range<u64>) {
        let known = state.known.as_mut();
        if let Some(unwritten) = known.and_then(|known| known.unwritten.as_mut()) {
            let masks = unwritten.writes(bytes);
            let path = self.folder.unwritten_masks();
            self.until_noted(&path, || unwritten.file().set(&masks));
        }
    }

    /// Repeats an operation until it succeeds. A failure is reported once.
    fn until_noted(&self, path: &Path, write: impl Fn() -> io::Result<()>) {
        let mut told = false;
        while let Err(error) = write() {
            if !std::mem::replace(&mut told, true) {
                let path = path.to_owned();
                self.notify.0(Notice::NotNoted { path, error });
            }
            elsewhere(|| thread::sleep(NOTE_AGAIN));
        }
    }

    /// Checks whether something is to be made durable, or whether all of it is here.
    fn look(&self, state: &mut State, now: Duration) {
        let Some(known) = &mut state.known else {
            return;
        };
        known.presence.tick(now);
        let whole = known.presence.is_whole();
        if known.presence.missing_blocks() == 0 && !whole {
            known.presence.settle();
        }
        self.outputs(state);
        state.tell_state();
        if whole && !std::mem::replace(&mut state.told_whole, true) {
            state.tell(ToPump::Whole);
        }
    }
}

impl State {
    fn tell(&mut self, message: ToPump) {
        if let Some(pump) = &self.pump {
            pump.tell(message);
        }
    }

    fn tell_broken(&mut self) {
        if let Some(errno) = self.broken {
            self.tell(ToPump::Broken(errno));
        }
    }

    fn tell_state(&mut self) {
        let Some(known) = &self.known else { return };
        let message = ToPump::State {
            missing_blocks: known.presence.missing_blocks(),
            waiting: known.presence.waiting() as u64,
        };
        if let Some(pump) = &self.pump {
            pump.tell_state(message);
        }
    }
}

/// Runs the steps of durability for as long as the disk exists.
pub(super) fn keep_durable(disk: &Arc<ArrivingDisk>) -> io::Result<()> {
    let disk = Arc::downgrade(disk);
    let keep = move || {
        let began = Instant::now();
        while let Some(disk) = Weak::upgrade(&disk) {
            let mut state = Some(disk.lock());
            if disk.durable_step(&mut state) {
                continue;
            }
            if let Some(mut held) = state {
                disk.look(&mut held, began.elapsed());
                if !held.sync && held.store.is_none() {
                    drop(disk.wait(held));
                }
            }
        }
    };
    let builder = thread::Builder::new().name("durable".to_owned());
    builder.spawn(keep).map(drop)
}

impl Disk for ArrivingDisk {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let range = within(self.size_bytes(), offset, buffer.len() as u64)?;
        let read = |range: Range<u64>| {
            let part = (range.start - offset) as usize..(range.end - offset) as usize;
            self.disk.read(range.start, &mut buffer[part])
        };
        self.request(Operation::Read, range, read)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let range = within(self.size_bytes(), offset, bytes.len() as u64)?;
        let write = |range: Range<u64>| {
            let part = (range.start - offset) as usize..(range.end - offset) as usize;
            self.disk.write(range.start, &bytes[part])
        };
        self.request(Operation::Write, range, write)
    }

    fn flush(&self) -> io::Result<()> {
        let mut state = self.lock();
        let id = RequestId(state.next);
        state.next += 1;
        let Some(known) = &mut state.known else {
            drop(state);
            return self.disk.flush();
        };
        known.presence.flush(id);
        self.outputs(&mut state);
        loop {
            match state.verdicts.remove(&id) {
                Some(Verdict::Flushed) => return Ok(()),
                Some(_) => return Err(Errno::EIO.into()),
                None => state = self.wait(state),
            }
        }
    }

    fn zero(&self, range: Range<u64>, zeros: Zeros) -> io::Result<()> {
        let length = range.end.saturating_sub(range.start);
        let range = within(self.size_bytes(), range.start, length)?;
        self.request(Operation::Write, range, |range| {
            self.disk.zero(range, zeros)
        })
    }

    fn discard(&self, range: Range<u64>) -> io::Result<()> {
        let length = range.end.saturating_sub(range.start);
        let range = within(self.size_bytes(), range.start, length)?;
        // Files read as zeros afterwards, to the byte: so parts of blocks are not left unchanged.
        self.request(Operation::Write, range, |range| self.disk.discard(range))
    }

    fn extents(&self, range: Range<u64>, count_max: usize) -> io::Result<Vec<Extent>> {
        let state = self.lock();
        let known = state.known.as_ref();
        let all_here = known.is_some_and(|known| known.presence.missing_blocks() == 0);
        drop(state);
        if all_here || range.is_empty() {
            return self.disk.extents(range, count_max);
        }
        // Missing blocks are not holes.
        let length = range.end.saturating_sub(range.start);
        let range = within(self.size_bytes(), range.start, length)?;
        Ok(vec![Extent {
            length_bytes: range.end - range.start,
            hole: false,
        }])
    }
}

fn within(size: u64, offset: u64, length: u64) -> io::Result<Range<u64>> {
    let end = offset.checked_add(length).filter(|end| *end <= size);
    end.map(|end| offset..end)
        .ok_or_else(|| Errno::EINVAL.into())
}
