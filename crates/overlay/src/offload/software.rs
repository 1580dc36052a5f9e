//! Does in software what a device cannot: cuts super-frames into the guest's frames, and completes
//! checksums.

use super::cut::{Cut, CutError};
use super::virtio::{Gso, VirtioHeader};
use crate::checksum;
use crate::ethernet::FRAME_BYTES_MAX;

/// Bytes of the buffer that [`finish`] needs.
pub const SCRATCH_BYTES: usize = FRAME_BYTES_MAX;

/// What becomes of partial checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checksums {
    /// They are completed: plain Ethernet frames.
    Complete,
    /// They stay partial.
    Partial,
}

/// Makes plain frames of a frame: cuts a super-frame into the guest's own frames, and completes
/// checksums. Calls `out` for each frame, with its virtio header. `scratch` has
/// [`SCRATCH_BYTES`].
pub fn finish(
    virtio: VirtioHeader,
    frame: &[u8],
    checksums: Checksums,
    scratch: &mut [u8],
    mut out: impl FnMut(&VirtioHeader, &[u8]),
) -> Result<(), CutError> {
    let mut emit = |virtio: VirtioHeader, frame: &mut [u8]| {
        let mut virtio = virtio.without_gso();
        if checksums == Checksums::Complete && virtio.needs_checksum {
            complete(&virtio, frame);
            virtio = VirtioHeader::default();
        }
        out(&virtio, frame);
    };
    if virtio.gso == Gso::None {
        let copy = scratch.get_mut(..frame.len());
        let copy = copy.ok_or(CutError::Malformed)?;
        copy.copy_from_slice(frame);
        emit(virtio, copy);
        return Ok(());
    }
    let cut = Cut::into_frames(virtio, frame)?;
    for index in 0..cut.count() {
        let length = cut.write_frame(index, scratch).ok_or(CutError::Malformed)?;
        let frame = scratch.get_mut(..length).ok_or(CutError::Malformed)?;
        emit(cut.virtio(), frame);
    }
    Ok(())
}

/// Completes the partial checksum of a frame.
fn complete(virtio: &VirtioHeader, frame: &mut [u8]) {
    let covered = frame.get(usize::from(virtio.checksum_start)..);
    let sum = !checksum::fold(checksum::sum(covered.unwrap_or_default()));
    // Zero is "no checksum" in UDP, and the same as its complement elsewhere.
    let sum = if sum == 0 { 0xffff } else { sum };
    let field = frame.get_mut(virtio.checksum_at()..);
    if let Some(field) = field.and_then(<[u8]>::first_chunk_mut) {
        *field = sum.to_be_bytes();
    }
}
