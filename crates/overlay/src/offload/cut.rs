//! Cuts super-frames into segments that fit a path. Each segment is self-contained: a virtio
//! header, all headers of the frame, or what a receiver cannot compute of them, and a slice of its
//! payload.

use super::headers::Headers;
use super::short::Short;
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
    /// The headers of its segments, if they are short.
    short: Option<Short>,
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
                short: None,
                slice: 0,
                count: 1,
            });
        }
        if virtio.gso == Gso::None {
            return Self::whole_short(virtio, frame, segment_max).ok_or(CutError::NeedsFragments);
        }
        let headers = Headers::of_gso(&virtio, frame).ok_or(CutError::Malformed)?;
        let virtio = VirtioHeader {
            headers_bytes: headers.payload as u16,
            ..virtio
        };
        let short = Short::of(&virtio, frame, &headers);
        let room = segment_max.saturating_sub(headers_bytes(&headers, short.as_ref()));
        let segment_bytes = usize::from(virtio.segment_bytes);
        // Whole frames of the guest, if they fit. A UDP datagram must not be cut.
        let whole = room / segment_bytes * segment_bytes;
        let slice = match (whole, virtio.gso) {
            (0, Gso::Udp) => return Err(CutError::NeedsSegmentation),
            (0, _) if room < SLICE_BYTES_MIN => return Err(CutError::SmallPath),
            (0, _) => room,
            _ => whole,
        };
        Ok(Self {
            short,
            ..Self::slices(virtio, frame, headers, slice)
        })
    }

    /// Plans to send a frame that is no super-frame as one short segment.
    fn whole_short(virtio: VirtioHeader, frame: &'a [u8], segment_max: usize) -> Option<Self> {
        let headers = Headers::parse(frame).filter(|headers| headers.end == frame.len())?;
        let short = Short::of(&virtio, frame, &headers)?;
        let slice = headers.end - headers.payload;
        (short.bytes() + slice <= segment_max).then_some(Self {
            virtio,
            frame,
            headers: Some(headers),
            short: Some(short),
            slice,
            count: 1,
        })
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
            short: None,
            slice,
            count: (headers.end - headers.payload).div_ceil(slice),
        }
    }

    /// Returns the number of segments.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Whether the segments are short ones, which [`super::Merger::push_short`] takes.
    pub fn is_short(&self) -> bool {
        self.short.is_some()
    }

    /// Returns the length of each segment but the last, in bytes, all headers included.
    pub fn segment_bytes(&self) -> usize {
        match &self.headers {
            Some(headers) if self.count > 1 => {
                headers_bytes(headers, self.short.as_ref()) + self.slice
            }
            _ => self.last_bytes(),
        }
    }

    /// Returns the length of the last segment.
    pub fn last_bytes(&self) -> usize {
        match &self.headers {
            Some(headers) => {
                let slice = headers.end - headers.payload - (self.count - 1) * self.slice;
                headers_bytes(headers, self.short.as_ref()) + slice
            }
            None => VIRTIO_BYTES + self.frame.len(),
        }
    }

    /// Writes a segment to the beginning of `out`, and returns its length; `None` if there is no
    /// such segment or no room for it.
    #[inline]
    pub fn write(&self, index: usize, out: &mut [u8]) -> Option<usize> {
        if let (Some(short), Some(headers)) = (&self.short, &self.headers) {
            return self.write_short(short, headers, index, out);
        }
        let (head, out) = out.split_first_chunk_mut::<VIRTIO_BYTES>()?;
        *head = self.virtio.to_bytes();
        Some(VIRTIO_BYTES + self.write_frame(index, out)?)
    }

    #[inline]
    fn write_short(
        &self,
        short: &Short,
        headers: &Headers,
        index: usize,
        out: &mut [u8],
    ) -> Option<usize> {
        if index >= self.count {
            return None;
        }
        let slice = self.slice(headers, index)?;
        let out = out.get_mut(..short.bytes() + slice.len())?;
        let (head, payload) = out.split_at_mut(short.bytes());
        let offset = (index * self.slice) as u32;
        short.write(index as u16, offset, index + 1 == self.count, head);
        payload.copy_from_slice(slice);
        Some(out.len())
    }

    /// Writes a segment without its virtio header, and with all headers of its frame.
    #[inline]
    pub(super) fn write_frame(&self, index: usize, out: &mut [u8]) -> Option<usize> {
        if index >= self.count {
            return None;
        }
        let Some(mut headers) = self.headers else {
            out.get_mut(..self.frame.len())?.copy_from_slice(self.frame);
            return Some(self.frame.len());
        };
        let slice = self.slice(&headers, index)?;
        let out = out.get_mut(..headers.payload + slice.len())?;
        let (head, payload) = out.split_at_mut(headers.payload);
        head.copy_from_slice(self.frame.get(..headers.payload)?);
        payload.copy_from_slice(slice);
        let offset = (index * self.slice) as u32;
        headers.set_position(head, index as u16, offset, index + 1 == self.count);
        headers.set_length(head, slice.len());
        Some(out.len())
    }

    /// Returns the payload of a segment.
    #[inline]
    fn slice(&self, headers: &Headers, index: usize) -> Option<&'a [u8]> {
        let start = headers.payload + index * self.slice;
        let end = headers.end.min(start + self.slice);
        self.frame.get(start..end)
    }

    pub(super) fn virtio(&self) -> VirtioHeader {
        self.virtio
    }
}

/// Returns the bytes in front of the payload of a segment.
fn headers_bytes(headers: &Headers, short: Option<&Short>) -> usize {
    short.map_or(VIRTIO_BYTES + headers.payload, Short::bytes)
}
