//! Cuts super-frames into segments that fit a path. Each segment is self-contained: a virtio
//! header, all headers of the frame, and a slice of its payload.

use super::headers::Headers;
use super::virtio::{Gso, VIRTIO_BYTES, VirtioHeader};

/// Smallest payload of a segment, in bytes: a path that leaves less than this is of no use.
pub const SLICE_BYTES_MIN: usize = 64;

/// Most frames that a super-frame is cut into: 64 KiB in segments of 48 bytes, the least that
/// Linux uses.
const FRAMES_MAX: usize = 1366;

/// Why a frame is not cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CutError {
    /// It is no super-frame, and longer than a segment: it travels in fragments.
    #[error("the frame is longer than the path allows")]
    NeedsFragments,
    /// Its UDP datagrams are longer than a segment: each travels in fragments, after
    /// [`super::finish`] with [`super::Checksums::Partial`].
    #[error("the datagrams of the super-frame are longer than the path allows")]
    NeedsSegmentation,
    /// Its headers do not say what its virtio header says.
    #[error("the super-frame's headers are malformed")]
    Malformed,
    /// Hardly any payload would fit behind its headers.
    #[error("the path is too small for the super-frame's headers")]
    SmallPath,
}

/// A frame and how it is cut.
#[derive(Debug, Clone, Copy)]
pub struct Cut<'a> {
    virtio: VirtioHeader,
    frame: &'a [u8],
    /// `None` if the frame is one segment as it is.
    headers: Option<Headers>,
    slice: usize,
    count: usize,
}

impl<'a> Cut<'a> {
    /// Plans to cut a frame into segments of at most `segment_max` bytes, virtio header included.
    pub fn new(
        virtio: VirtioHeader,
        frame: &'a [u8],
        segment_max: usize,
    ) -> Result<Self, CutError> {
        if VIRTIO_BYTES + frame.len() <= segment_max {
            return Ok(Self {
                virtio,
                frame,
                headers: None,
                slice: 0,
                count: 1,
            });
        }
        if virtio.gso == Gso::None {
            return Err(CutError::NeedsFragments);
        }
        let headers = Headers::of_gso(&virtio, frame).ok_or(CutError::Malformed)?;
        let room = segment_max.saturating_sub(VIRTIO_BYTES + headers.payload);
        let segment_bytes = usize::from(virtio.segment_bytes);
        // Whole frames of the guest, if they fit. A UDP datagram must not be cut.
        let whole = room / segment_bytes * segment_bytes;
        let slice = match (whole, virtio.gso) {
            (0, Gso::Udp) => return Err(CutError::NeedsSegmentation),
            (0, _) if room < SLICE_BYTES_MIN => return Err(CutError::SmallPath),
            (0, _) => room,
            _ => whole,
        };
        Ok(Self::slices(virtio, frame, headers, slice))
    }

    /// Plans to cut a super-frame into the guest's own frames.
    pub(super) fn into_frames(virtio: VirtioHeader, frame: &'a [u8]) -> Result<Self, CutError> {
        let headers = Headers::of_gso(&virtio, frame).ok_or(CutError::Malformed)?;
        let slice = usize::from(virtio.segment_bytes);
        let cut = Self::slices(virtio, frame, headers, slice);
        if cut.count > FRAMES_MAX {
            return Err(CutError::Malformed);
        }
        Ok(cut)
    }

    fn slices(virtio: VirtioHeader, frame: &'a [u8], headers: Headers, slice: usize) -> Self {
        Self {
            virtio: VirtioHeader {
                headers_bytes: headers.payload as u16,
                ..virtio
            },
            frame,
            headers: Some(headers),
            slice,
            count: (headers.end - headers.payload).div_ceil(slice),
        }
    }

    /// Returns the number of segments.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the length of each segment but the last, in bytes, virtio header included.
    pub fn segment_bytes(&self) -> usize {
        match self.headers {
            Some(headers) if self.count > 1 => VIRTIO_BYTES + headers.payload + self.slice,
            _ => self.last_bytes(),
        }
    }

    /// Returns the length of the last segment.
    pub fn last_bytes(&self) -> usize {
        match self.headers {
            Some(headers) => VIRTIO_BYTES + headers.end - (self.count - 1) * self.slice,
            None => VIRTIO_BYTES + self.frame.len(),
        }
    }

    /// Writes a segment to the beginning of `out`, and returns its length; `None` if there is no
    /// such segment or no room for it.
    #[inline]
    pub fn write(&self, index: usize, out: &mut [u8]) -> Option<usize> {
        let (head, out) = out.split_first_chunk_mut::<VIRTIO_BYTES>()?;
        *head = self.virtio.to_bytes();
        Some(VIRTIO_BYTES + self.write_frame(index, out)?)
    }

    /// Writes a segment without its virtio header.
    #[inline]
    pub(super) fn write_frame(&self, index: usize, out: &mut [u8]) -> Option<usize> {
        if index >= self.count {
            return None;
        }
        let Some(mut headers) = self.headers else {
            out.get_mut(..self.frame.len())?.copy_from_slice(self.frame);
            return Some(self.frame.len());
        };
        let start = headers.payload + index * self.slice;
        let end = headers.end.min(start + self.slice);
        let slice = self.frame.get(start..end)?;
        let out = out.get_mut(..headers.payload + slice.len())?;
        let (head, payload) = out.split_at_mut(headers.payload);
        head.copy_from_slice(self.frame.get(..headers.payload)?);
        payload.copy_from_slice(slice);
        let offset = (index * self.slice) as u32;
        headers.set_position(head, index as u16, offset, index + 1 == self.count);
        headers.set_length(head, slice.len());
        Some(out.len())
    }

    pub(super) fn virtio(&self) -> VirtioHeader {
        self.virtio
    }
}
