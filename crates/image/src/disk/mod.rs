//! A disk that is an image whose content comes from its repository when it is needed, or before.
//!
//! What has come is kept in a file beside, which is the whole disk when all of it has come. Nothing
//! says which stripes the file has: each is compared with its digest before it is first used, so
//! that a file that was torn, cut off or changed costs a fetch, and never gives wrong bytes.

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

/// Time between the first two tries of a store that is away; it doubles up to the second.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_LAST: Duration = Duration::from_secs(5);

/// How long another process is waited for that is fetching the same.
const CLAIM_PATIENCE: Duration = Duration::from_secs(60);

/// What whoever owns such a disk should know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageNotice {
    /// The store does not answer: reads of what has not come wait from now on.
    Away {
        /// What it, or the way to it, says.
        reason: String,
    },
    /// The store answers again.
    Back,
    /// A stripe cannot be had: reads of it fail.
    Failed {
        /// Where the stripe stands.
        offset: u64,
        /// Why not.
        reason: String,
    },
    /// What has come cannot be kept: it is fetched again when it is needed again.
    NotKept {
        /// Why not.
        reason: String,
    },
}

/// Whether the file has a stripe.
const UNKNOWN: u8 = 0;
const HERE: u8 = 1;

/// What one fetch of a stripe came to, for all who wait for it.
type Outcome = Result<Arc<Vec<u8>>, i32>;

/// A fetch that is under way.
#[derive(Default)]
struct Flight {
    outcome: Mutex<Option<Outcome>>,
    landed: Condvar,
}

/// A disk that is an image.
///
/// **While its store is away**, reads of what is not here wait for as long as the disk was opened
/// with, and then fail with `EIO`; those of all else go on. A stripe that the store does not have,
/// or that is damaged there, fails at once. What is read is always what the image holds.
pub struct ImageDisk {
    id: ImageId,
    manifest: Manifest,
    repository: Repository,
    file: File,
    /// Of each stripe: whether the file has it.
    states: Vec<AtomicU8>,
    /// Stripes that are stored and are not known to be here.
    missing: AtomicU32,
    flights: Mutex<HashMap<u32, Arc<Flight>>>,
    /// Reads that wait: the background lets them go first.
    waiting: AtomicUsize,
    /// Signalled when one of them is done, and at the end.
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
    /// The image.
    pub fn id(&self) -> ImageId {
        self.id
    }

    /// What it is made of.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// How many stripes have not come, or were not looked at since the disk was opened.
    pub fn missing(&self) -> u32 {
        self.missing.load(Ordering::Acquire)
    }

    /// How many bytes of content have come from the store since the disk was opened.
    pub fn fetched_bytes(&self) -> u64 {
        self.fetched_bytes.load(Ordering::Relaxed)
    }

    /// How many bytes were read from the store for that, and for the manifest.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// Whether all of a range is known to be here.
    pub fn has(&self, range: Range<u64>) -> bool {
        // An image is at most 4 Mi stripes long.
        let stripes = (range.start / STRIPE_BYTES) as u32..range.end.div_ceil(STRIPE_BYTES) as u32;
        let mut stripes = stripes.take_while(|index| *index < self.manifest.stripe_count());
        stripes.all(|index| self.manifest.stripe(index) == Stripe::Hole || self.is_here(index))
    }

    /// What waits for stripes that have not come, but for the background.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Acquire)
    }

    /// Ends what waits for the store: such reads fail with `EIO`, and [`Self::fetch`] returns.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.signal();
    }

    fn signal(&self) {
        // With the lock held, so that whoever is about to wait does not miss it.
        let _lock = self
            .changed
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.changed.1.notify_all();
    }

    /// Waits until something has changed, and no longer than that.
    fn wait(&self, time: Duration, while_this: impl Fn() -> bool) {
        let lock = self
            .changed
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if while_this() && !self.has_ended() {
            // A spurious end costs one more look.
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

    /// The content of a stripe that was not known to be here. Of several who want it at once, one
    /// gets it for all.
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

    /// A stripe from the file, where that has it, or else from the store.
    fn load(&self, index: u32, digest: Digest) -> Outcome {
        let range = self.manifest.range(index);
        let mut content = vec![0; length(&range) as usize];
        if self.kept(&range, digest, &mut content) {
            self.note_here(index);
            return Ok(Arc::new(content));
        }
        // Another process may be fetching it into the same file, or have done so just now.
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

    /// Whether the file has the stripe; if so, the buffer has it too.
    fn kept(&self, range: &Range<u64>, digest: Digest, content: &mut [u8]) -> bool {
        let read = elsewhere(|| self.file.read_exact_at(content, range.start));
        // A file that is read with errors is as good as one that has nothing. Zeros are mostly
        // holes, and no stored stripe is all zeros.
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

/// Tells what a fetch came to, also where it ends by a panic: nobody waits for what does not come.
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
        // Nothing was written that anybody could miss.
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
