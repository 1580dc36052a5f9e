//! Fuzzes the references that are followed when a qcow2 image is opened.

use longhaul_storage::disk::qcow2::opened_with;
use longhaul_storage::disk::{Disk, Extent, Zeros};
use std::io;
use std::ops::Range;

/// A read-only image in memory.
#[derive(Debug)]
struct Bytes<'a>(&'a [u8]);

impl Disk for Bytes<'_> {
    fn size_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let begin = usize::try_from(offset).expect("it is within");
        buffer.copy_from_slice(&self.0[begin..begin + buffer.len()]);
        Ok(())
    }

    fn write(&self, _offset: u64, _bytes: &[u8]) -> io::Result<()> {
        panic!("it is read alone")
    }

    fn flush(&self) -> io::Result<()> {
        panic!("it is read alone")
    }

    fn zero(&self, _range: Range<u64>, _zeros: Zeros) -> io::Result<()> {
        panic!("it is read alone")
    }

    fn discard(&self, _range: Range<u64>) -> io::Result<()> {
        panic!("it is read alone")
    }

    fn extents(&self, _range: Range<u64>, _count_max: usize) -> io::Result<Vec<Extent>> {
        panic!("it is read alone")
    }
}

/// Follows the references: all are within the image, and the walk ends.
pub(crate) fn run(data: &[u8]) {
    let mut visited = 0_u64;
    let visit = &mut |range: Range<u64>| {
        assert!(range.start <= range.end && range.end <= data.len() as u64);
        visited += 1;
        // Its tables contain offsets, and an image may repeat one many times.
        assert!(visited <= 8 + data.len() as u64 * 70_000);
        Ok(())
    };
    let _ = opened_with(&Bytes(data), visit);
}
