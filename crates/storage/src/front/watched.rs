//! A disk whose guest's writes something hears of: the owner of a move ([`super::telling`]), or a
//! durable map ([`super::tracking`]).

use crate::disk::{Disk, Extent, RawDisk, Zeros};
use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

/// What hears of a guest's writes. The methods are called by the thread of the request, which waits
/// until they return.
pub(super) trait WriteSink: Debug + Send + Sync {
    /// These bytes of the image are about to change. After an error the request must not be carried
    /// out.
    fn begins(&self, bytes: &Range<u64>) -> io::Result<()>;

    /// These bytes of the image have changed, or may have, and the request is about to complete.
    fn done(&self, bytes: Range<u64>);

    /// A read or a write took this time.
    fn took(&self, time: Duration);
}

/// A raw disk, and what hears of its writes.
#[derive(Debug)]
pub(super) struct WatchedDisk<S> {
    pub(super) disk: RawDisk,
    pub(super) sink: S,
}

/// A change that has begun. Dropped, it is done, also by a panic.
struct Change<'a, S: WriteSink> {
    sink: &'a S,
    bytes: Range<u64>,
}

impl<S: WriteSink> Drop for Change<'_, S> {
    fn drop(&mut self) {
        self.sink.done(self.bytes.clone());
    }
}

impl<S: WriteSink> WatchedDisk<S> {
    /// Carries out a request, and measures its latency.
    fn timed<T>(&self, request: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let done = request();
        self.sink.took(began.elapsed());
        done
    }

    /// Carries out a request that changes these bytes. It may fail halfway.
    fn changing(
        &self,
        bytes: Range<u64>,
        request: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        self.sink.begins(&bytes)?;
        let _change = Change {
            sink: &self.sink,
            bytes,
        };
        request()
    }
}

impl<S: WriteSink> Disk for WatchedDisk<S> {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.timed(|| self.disk.read(offset, buffer))
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let range = offset..offset.saturating_add(bytes.len() as u64);
        self.changing(range, || self.timed(|| self.disk.write(offset, bytes)))
    }

    fn flush(&self) -> io::Result<()> {
        self.disk.flush()
    }

    fn zero(&self, range: Range<u64>, zeros: Zeros) -> io::Result<()> {
        self.changing(range.clone(), || self.disk.zero(range, zeros))
    }

    fn discard(&self, range: Range<u64>) -> io::Result<()> {
        self.changing(range.clone(), || self.disk.discard(range))
    }

    fn extents(&self, range: Range<u64>, count_max: usize) -> io::Result<Vec<Extent>> {
        self.disk.extents(range, count_max)
    }
}
