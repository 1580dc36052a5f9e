//! Super-frames: cuts them for a path, merges their segments again, and does in software what a
//! device cannot.
//!
//! A guest's network card hands over up to 64 KiB of one flow at once, with a virtio header that
//! says how to cut it. [`Cut`] cuts it at what the path carries, not at the guest's segment size;
//! [`Merger`] merges the segments of a batch for one write; [`finish`] makes plain frames. Segments
//! of TCP travel without the bytes of their headers that a receiver can compute.
//! `docs/frame-plane.md`, section 3, is the normative description.

mod cut;
mod headers;
mod merge;
mod short;
mod software;
mod virtio;

pub use cut::{Cut, CutError, SLICE_BYTES_MIN};
pub use headers::HEADERS_BYTES_MAX;
pub use merge::{MergeCounters, Merger, RUNS};
pub use software::{Checksums, SCRATCH_BYTES, finish};
pub use virtio::{Gso, Offloads, VIRTIO_BYTES, VIRTIO_LONG_BYTES, VirtioError, VirtioHeader};

#[cfg(test)]
mod tests;
