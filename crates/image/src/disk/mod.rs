//! A lazy disk: an image whose stripes are fetched from its repository when they are read, or
//! earlier.
//!
//! Fetched stripes are stored in a local file, which is the whole disk once all of them are there.
//! No record says which stripes the file has: each is compared with its digest before its first
//! use, so that a torn, truncated or changed file costs a fetch, and never returns wrong bytes.

mod claim;
mod fetch;
mod open;
mod order;

pub use fetch::Fetched;
pub use open::OpenImageError;
pub use order::Order;

use crate::manifest::{Manifest, STRIPE_BYTES, Stripe, length};
use crate::name::{Digest, ImageId};
use crate::repository::{Repository, StripeError};
use crate::store::StoreError;
use claim::Claim;
use longhaul_storage::disk::{Disk, Extent, Zeros};
use longhaul_storage::pulse::elsewhere;
use nix::errno::Errno;
use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The time between the first two attempts to reach a store; it doubles up to the second constant.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_LAST: Duration = Duration::from_secs(5);

/// Limit on the wait for another process that fetches the same stripe.
const CLAIM_PATIENCE: Duration = Duration::from_secs(60);

/// An event that the disk's owner should know of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageNotice {
    /// The store does not answer: reads of missing stripes wait from now on.
    Away {
        /// The error of the store or of the connection.
        reason: String,
    },
    /// The store answers again.
    Back,
    /// A stripe cannot be fetched: reads of it fail.
    Failed {
        /// The offset of the stripe.
        offset: u64,
        /// The reason.
        reason: String,
    },
    /// Fetched stripes cannot be stored: they are fetched again when they are read again.
    NotKept {
        /// The reason.
        reason: String,
    },
}

/// States of a stripe in the file.
const UNKNOWN: u8 = 0;
const HERE: u8 = 1;

/// The result of one fetch of a stripe, for all readers that wait for it.
type Outcome = Result<Arc<Vec<u8>>, i32>;

/// A running fetch.
#[derive(Default)]
struct Flight {
    outcome: Mutex<Option<Outcome>>,
    landed: Condvar,
}

/// A disk backed by an image.
///
/// **While its store is unreachable**, reads of missing stripes wait for the time given on opening,
/// and then fail with `EIO`; other reads proceed. A stripe that the store does not have, or that is
/// damaged there, fails at once. Reads always return the image's content.
pub struct ImageDisk {
    id: ImageId,
    manifest: Manifest,
    repository: Repository,
    file: File,
    /// The state of each stripe in the file.
    states: Vec<AtomicU8>,
    /// Number of stored stripes that are not known to be here.
    missing: AtomicU32,
    flights: Mutex<HashMap<u32, Arc<Flight>>>,
    /// Number of waiting reads, which have priority over the background.
    waiting: AtomicUsize,
    /// Signalled when a read is done, and at the end.
    changed: (Mutex<()>, Condvar),
    patience: Duration,
    away: AtomicBool,
    ended: AtomicBool,
    fetched_bytes: AtomicU64,
    read_bytes: AtomicU64,
    notify: Box<dyn Fn(ImageNotice) + Send + Sync>,
}

impl fmt::Debug for ImageDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImageDisk")
            .field("id", &self.id)
            .field("missing", &self.missing())
            .finish_non_exhaustive()
    }
}

impl ImageDisk {
    /// Returns the image.
    pub fn id(&self) -> ImageId {
        self.id
    }

    /// Returns its manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns how many stripes are missing, or were not checked since the disk was opened.
    pub fn missing(&self) -> u32 {
        self.missing.load(Ordering::Acquire)
    }

    /// Returns how many bytes of content were fetched since the disk was opened.
    pub fn fetched_bytes(&self) -> u64 {
        self.fetched_bytes.load(Ordering::Relaxed)
    }

    /// Returns how many bytes were read from the store for that, and for the manifest.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// Returns whether a whole range is known to be here.
    pub fn has(&self, range: Range<u64>) -> bool {
        // An image is at most 4 Mi stripes long.
        let stripes = (range.start / STRIPE_BYTES) as u32..range.end.div_ceil(STRIPE_BYTES) as u32;
        let mut stripes = stripes.take_while(|index| *index < self.manifest.stripe_count());
        stripes.all(|index| self.manifest.stripe(index) == Stripe::Hole || self.is_here(index))
    }

    /// Returns the number of reads that wait for missing stripes, without the background.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Acquire)
    }

    /// Ends all waiting for the store: such reads fail with `EIO`, and [`Self::fetch`] returns.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.signal();
    }

    fn signal(&self) {
        // With the lock held, so that a thread that is about to wait does not miss it.
        let _lock = self
            .changed
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.changed.1.notify_all();
    }

    /// Waits for a change, up to this time.
    fn wait(&self, time: Duration, while_this: impl Fn() -> bool) {
        let lock = self
            .changed
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if while_this() && !self.has_ended() {
            // A spurious wake-up costs one more check.
            let _ = self.changed.1.wait_timeout(lock, time);
        }
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    fn is_here(&self, index: u32) -> bool {
        self.states[index as usize].load(Ordering::Acquire) == HERE
    }

    fn note_here(&self, index: u32) {
        if self.states[index as usize].swap(HERE, Ordering::AcqRel) == UNKNOWN {
            self.missing.fetch_sub(1, Ordering::AcqRel);
        }
    }

    fn flights(&self) -> MutexGuard<'_, HashMap<u32, Arc<Flight>>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the content of a stripe that was not known to be here. Of several concurrent
    /// readers, one gets it for all.
    fn obtain(&self, index: u32, digest: Digest) -> io::Result<Arc<Vec<u8>>> {
        let (flight, leads) = {
            let mut flights = self.flights();
            match flights.get(&index) {
                Some(flight) => (flight.clone(), false),
                None => {
                    let flight = Arc::new(Flight::default());
                    flights.insert(index, flight.clone());
                    (flight, true)
                }
            }
        };
        if leads {
            let mut landing = Landing {
                disk: self,
                index,
                flight: &flight,
                outcome: Err(Errno::EIO as i32),
            };
            landing.outcome = self.load(index, digest);
        }
        let mut outcome = flight
            .outcome
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = &*outcome {
                return outcome.clone().map_err(io::Error::from_raw_os_error);
            }
            let waited = elsewhere(|| flight.landed.wait(outcome));
            outcome = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Loads a stripe from the file if that has it, or else from the store.
    fn load(&self, index: u32, digest: Digest) -> Outcome {
        let range = self.manifest.range(index);
        let mut content = vec![0; length(&range) as usize];
        if self.kept(&range, digest, &mut content) {
            self.note_here(index);
            return Ok(Arc::new(content));
        }
        // Another process may be fetching it into the same file, or have just done so.
        let patience = self.patience.min(CLAIM_PATIENCE);
        let _claim = elsewhere(|| Claim::wait(&self.file, index, patience, || self.has_ended()));
        if self.kept(&range, digest, &mut content) {
            self.note_here(index);
            return Ok(Arc::new(content));
        }
        self.fetch_content(&range, digest, &mut content)
            .map_err(|errno| errno as i32)?;
        let bytes = content.len() as u64;
        self.fetched_bytes.fetch_add(bytes, Ordering::Relaxed);
        match elsewhere(|| self.file.write_all_at(&content, range.start)) {
            Ok(()) => self.note_here(index),
            Err(error) => (self.notify)(ImageNotice::NotKept {
                reason: error.to_string(),
            }),
        }
        Ok(Arc::new(content))
    }

    /// Returns whether the file has the stripe; if so, the buffer has it too.
    fn kept(&self, range: &Range<u64>, digest: Digest, content: &mut [u8]) -> bool {
        let read = elsewhere(|| self.file.read_exact_at(content, range.start));
        // A read error counts as a missing stripe. Zeros are mostly holes, and no stored stripe is
        // all zeros.
        read.is_ok() && content.iter().any(|byte| *byte != 0) && Digest::of(content) == digest
    }

    fn fetch_content(
        &self,
        range: &Range<u64>,
        digest: Digest,
        content: &mut [u8],
    ) -> Result<(), Errno> {
        let begin = Instant::now();
        let mut pause = RETRY_FIRST;
        let mut damaged = false;
        loop {
            match elsewhere(|| self.repository.stripe(digest, content)) {
                Ok(bytes) => {
                    self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
                    if self.away.swap(false, Ordering::AcqRel) {
                        (self.notify)(ImageNotice::Back);
                    }
                    return Ok(());
                }
                // It may have been damaged on the way.
                Err(StripeError::Damaged { .. }) if !damaged => damaged = true,
                Err(
                    error @ (StripeError::Damaged { .. }
                    | StripeError::Store(StoreError::Missing { .. })),
                ) => {
                    self.fail(range, &error);
                    return Err(Errno::EIO);
                }
                Err(StripeError::Store(error)) => {
                    if !self.away.swap(true, Ordering::AcqRel) {
                        (self.notify)(ImageNotice::Away {
                            reason: error.to_string(),
                        });
                    }
                    let left = self.patience.saturating_sub(begin.elapsed());
                    if left.is_zero() || self.has_ended() {
                        self.fail(range, &error.into());
                        return Err(Errno::EIO);
                    }
                    let until = Instant::now() + pause.min(left);
                    elsewhere(|| self.sleep(until));
                    pause = (pause * 2).min(RETRY_LAST);
                }
            }
        }
    }

    fn sleep(&self, until: Instant) {
        while !self.has_ended() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.wait(left, || true);
        }
    }

    fn fail(&self, range: &Range<u64>, error: &StripeError) {
        (self.notify)(ImageNotice::Failed {
            offset: range.start,
            reason: error.to_string(),
        });
    }

    fn check(&self, range: &Range<u64>) -> io::Result<()> {
        if range.start <= range.end && range.end <= self.manifest.size_bytes() {
            return Ok(());
        }
        Err(Errno::EINVAL.into())
    }

    /// Reads within one stripe.
    fn read_piece(&self, index: u32, offset: u64, piece: &mut [u8]) -> io::Result<()> {
        let Stripe::Stored(digest) = self.manifest.stripe(index) else {
            piece.fill(0);
            return Ok(());
        };
        if self.is_here(index) {
            return elsewhere(|| self.file.read_exact_at(piece, offset));
        }
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let content = self.obtain(index, digest);
        if self.waiting.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.signal();
        }
        let place = (offset - self.manifest.range(index).start) as usize;
        piece.copy_from_slice(&content?[place..place + piece.len()]);
        Ok(())
    }
}

/// Publishes the result of a fetch, even when it panics: no reader waits for ever.
struct Landing<'a> {
    disk: &'a ImageDisk,
    index: u32,
    flight: &'a Flight,
    outcome: Outcome,
}

impl Drop for Landing<'_> {
    fn drop(&mut self) {
        let mut told = self
            .flight
            .outcome
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *told = Some(self.outcome.clone());
        drop(told);
        self.flight.landed.notify_all();
        self.disk.flights().remove(&self.index);
    }
}

impl Disk for ImageDisk {
    fn size_bytes(&self) -> u64 {
        self.manifest.size_bytes()
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let end = offset
            .checked_add(buffer.len() as u64)
            .ok_or(Errno::EINVAL)?;
        self.check(&(offset..end))?;
        let mut offset = offset;
        let mut left = buffer;
        while !left.is_empty() {
            // An image is at most 4 Mi stripes long.
            let index = (offset / STRIPE_BYTES) as u32;
            let here = self.manifest.range(index).end - offset;
            let (piece, rest) = left.split_at_mut((left.len() as u64).min(here) as usize);
            self.read_piece(index, offset, piece)?;
            offset += piece.len() as u64;
            left = rest;
        }
        Ok(())
    }

    fn write(&self, _offset: u64, _bytes: &[u8]) -> io::Result<()> {
        Err(Errno::EROFS.into())
    }

    fn flush(&self) -> io::Result<()> {
        // No write was lost.
        Ok(())
    }

    fn zero(&self, _range: Range<u64>, _zeros: Zeros) -> io::Result<()> {
        Err(Errno::EROFS.into())
    }

    fn discard(&self, _range: Range<u64>) -> io::Result<()> {
        Err(Errno::EROFS.into())
    }

    fn extents(&self, range: Range<u64>, count_max: usize) -> io::Result<Vec<Extent>> {
        self.check(&range)?;
        let mut extents: Vec<Extent> = Vec::new();
        let mut offset = range.start;
        while offset < range.end {
            let index = (offset / STRIPE_BYTES) as u32;
            let end = self.manifest.range(index).end.min(range.end);
            let hole = self.manifest.stripe(index) == Stripe::Hole;
            let count = extents.len();
            match extents.last_mut() {
                Some(last) if last.hole == hole => last.length_bytes += end - offset,
                Some(_) if count >= count_max => break,
                Some(_) | None => extents.push(Extent {
                    length_bytes: end - offset,
                    hole,
                }),
            }
            offset = end;
        }
        Ok(extents)
    }
}
