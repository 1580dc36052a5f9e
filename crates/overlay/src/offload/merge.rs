//! Merges segments of one flow that continue each other into a super-frame, for one write to a TAP.

use super::headers::{FLAG_CWR, FLAG_FIN, FLAG_PSH, FLAG_RST, FLAG_SYN, FLAG_URG, Headers};
use super::short::{RESTORED_BYTES_MAX, restore};
use super::virtio::{Gso, VirtioHeader};

/// Flows that are merged at once.
pub const RUNS: usize = 4;
/// Longest IP packet, in bytes.
const PACKET_BYTES_MAX: usize = 65_535;
/// Bytes that one run can need: the longest packet behind the longest link header.
const RUN_BYTES: usize = PACKET_BYTES_MAX + 32;

/// What a [`Merger`] counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MergeCounters {
    /// Segments that arrived.
    pub segments: u64,
    /// Frames and super-frames that were passed on.
    pub frames: u64,
    /// Segments that were dropped, since their headers are malformed.
    pub malformed: u64,
}

/// Consecutive segments of a flow.
#[derive(Debug)]
struct Run {
    /// The headers of the first segment, and the payloads of all.
    frame: Vec<u8>,
    virtio: VirtioHeader,
    headers: Headers,
    segments: u16,
    /// FIN and PSH of the last segment.
    last_flags: u8,
    used: u64,
}

/// Merges the segments of a batch. Its frames keep the order of their flow.
#[derive(Debug, Default)]
pub struct Merger {
    runs: Vec<Run>,
    free: Vec<Vec<u8>>,
    clock: u64,
    counters: MergeCounters,
}

/// A frame or a segment of one.
struct Segment<'a> {
    virtio: VirtioHeader,
    /// The headers of the frame; the whole frame if they are not known.
    head: &'a [u8],
    payload: &'a [u8],
    headers: Option<Headers>,
}

impl<'a> Segment<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (virtio, frame) = VirtioHeader::split(bytes).ok()?;
        let unknown = Self {
            virtio,
            head: frame,
            payload: &[],
            headers: None,
        };
        if virtio.gso == Gso::None {
            return Some(unknown);
        }
        // What the kernel would refuse must not reach it as a super-frame.
        let headers = Headers::of_gso(&virtio, frame)?;
        if headers.end != frame.len() {
            return Some(unknown);
        }
        let (head, payload) = frame.split_at_checked(headers.payload)?;
        Some(Self {
            virtio,
            head,
            payload,
            headers: Some(headers),
        })
    }

    /// Restores the headers of a short segment, to `head`.
    fn restore(bytes: &'a [u8], head: &'a mut [u8; RESTORED_BYTES_MAX]) -> Option<Self> {
        let restored = restore(bytes, head)?;
        Some(Self {
            virtio: restored.virtio,
            head: head.get(..restored.headers.payload)?,
            payload: restored.payload,
            headers: Some(restored.headers),
        })
    }
}

impl Merger {
    /// Returns a merger that holds nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns what was counted.
    pub fn counters(&self) -> &MergeCounters {
        &self.counters
    }

    /// Takes a segment, virtio header included. Calls `out` for each frame that is complete: those
    /// that this one does not continue, and this one if it cannot be merged.
    pub fn push(&mut self, segment: &[u8], out: &mut impl FnMut(&VirtioHeader, &[u8])) {
        self.take(Segment::parse(segment), out);
    }

    /// Takes a short segment ([`super::Cut::is_short`]), otherwise as [`Self::push`].
    pub fn push_short(&mut self, segment: &[u8], out: &mut impl FnMut(&VirtioHeader, &[u8])) {
        let mut head = [0; RESTORED_BYTES_MAX];
        self.take(Segment::restore(segment, &mut head), out);
    }

    #[inline]
    fn take(&mut self, segment: Option<Segment<'_>>, out: &mut impl FnMut(&VirtioHeader, &[u8])) {
        self.counters.segments += 1;
        let Some(segment) = segment else {
            self.counters.malformed += 1;
            return;
        };
        let headers = match segment.headers {
            Some(headers) if segment.virtio.gso != Gso::None => headers,
            _ => {
                self.pass(&segment, out);
                return;
            }
        };
        let found = self.find(&headers, segment.head);
        if let Some(at) = found {
            let run = &mut self.runs[at];
            if run.append(&segment, &headers) {
                if run.is_complete(&headers) {
                    self.end(at, out);
                }
                return;
            }
            self.end(at, out);
        }
        if self.runs.len() == RUNS {
            let oldest = self.runs.iter().enumerate().min_by_key(|(_, run)| run.used);
            if let Some((at, _)) = oldest {
                self.end(at, out);
            }
        }
        self.begin(&segment, headers, out);
    }

    /// Passes on everything that is held: to be called at the end of a batch.
    pub fn flush(&mut self, out: &mut impl FnMut(&VirtioHeader, &[u8])) {
        while !self.runs.is_empty() {
            self.end(0, out);
        }
    }

    /// Passes on a frame that cannot be merged, after those of its flow.
    fn pass(&mut self, segment: &Segment<'_>, out: &mut impl FnMut(&VirtioHeader, &[u8])) {
        if !self.runs.is_empty()
            && let Some(headers) = segment.headers.or_else(|| Headers::parse(segment.head))
            && let Some(at) = self.find(&headers, segment.head)
        {
            self.end(at, out);
        }
        self.counters.frames += 1;
        if segment.payload.is_empty() {
            out(&segment.virtio, segment.head);
            return;
        }
        let frame = self.join(segment);
        out(&segment.virtio, &frame);
        self.free.push(frame);
    }

    /// Returns the frame of a segment in one piece.
    fn join(&mut self, segment: &Segment<'_>) -> Vec<u8> {
        let mut frame = self.free.pop().unwrap_or_default();
        frame.clear();
        frame.reserve(RUN_BYTES);
        frame.extend_from_slice(segment.head);
        frame.extend_from_slice(segment.payload);
        frame
    }

    fn find(&self, headers: &Headers, frame: &[u8]) -> Option<usize> {
        self.runs.iter().position(|run| run.is_flow(headers, frame))
    }

    fn begin(
        &mut self,
        segment: &Segment<'_>,
        headers: Headers,
        out: &mut impl FnMut(&VirtioHeader, &[u8]),
    ) {
        let frame = self.join(segment);
        self.clock += 1;
        self.runs.push(Run {
            last_flags: flags(&headers, segment.head) & (FLAG_FIN | FLAG_PSH),
            frame,
            virtio: segment.virtio,
            headers,
            segments: 1,
            used: self.clock,
        });
        let at = self.runs.len() - 1;
        if self.runs[at].is_complete(&headers) {
            self.end(at, out);
        }
    }

    fn end(&mut self, at: usize, out: &mut impl FnMut(&VirtioHeader, &[u8])) {
        let mut run = self.runs.remove(at);
        run.finish();
        self.counters.frames += 1;
        out(&run.virtio, &run.frame);
        self.free.push(run.frame);
    }
}

/// Returns TCP's flags; none for UDP.
fn flags(headers: &Headers, frame: &[u8]) -> u8 {
    let flags = frame.get(headers.transport + 13).filter(|_| headers.tcp);
    flags.copied().unwrap_or(0)
}

fn same(left: &[u8], right: &[u8], range: std::ops::Range<usize>) -> bool {
    left.get(range.clone())
        .is_some_and(|part| Some(part) == right.get(range))
}

impl Run {
    /// Whether a packet belongs to the same flow: addresses and ports.
    #[inline]
    fn is_flow(&self, headers: &Headers, frame: &[u8]) -> bool {
        let ours = &self.headers;
        let ports = ours.transport..ours.transport + 4;
        (ours.ipv6, ours.tcp) == (headers.ipv6, headers.tcp)
            && (ours.network, ours.transport) == (headers.network, headers.transport)
            && same(&self.frame, frame, ports)
            && same(&self.frame, frame, ours.addresses())
    }

    /// Adds a segment, if it continues the run and differs only where segments do.
    #[inline]
    fn append(&mut self, segment: &Segment<'_>, headers: &Headers) -> bool {
        let ours = &self.headers;
        let held = &self.frame;
        let (virtio, head) = (&segment.virtio, segment.head);
        let total = held.len() + segment.payload.len();
        let (network, transport) = (ours.network, ours.transport);
        let fits = ours.payload == headers.payload
            && total - network <= PACKET_BYTES_MAX
            && (virtio.gso, virtio.ecn) == (self.virtio.gso, self.virtio.ecn)
            && virtio.segment_bytes == self.virtio.segment_bytes;
        // Link header; then all of the network header but length, identification and checksum.
        let alike = fits
            && same(held, head, 0..network)
            && if ours.ipv6 {
                same(held, head, network..network + 4) && same(held, head, network + 6..transport)
            } else {
                same(held, head, network..network + 2)
                    && same(held, head, network + 6..network + 10)
                    && same(held, head, network + 12..transport)
            };
        let next = ours.identification(held).wrapping_add(self.segments);
        let counts = ours.is_atomic(held) || headers.identification(head) == next;
        if !alike || !counts || !self.continues(headers, head) {
            return false;
        }
        self.last_flags = flags(headers, head) & (FLAG_FIN | FLAG_PSH);
        self.segments += 1;
        self.frame.extend_from_slice(segment.payload);
        true
    }

    /// Whether the transport's header continues the run.
    #[inline]
    fn continues(&self, headers: &Headers, frame: &[u8]) -> bool {
        let (ours, held) = (&self.headers, &self.frame);
        let held_bytes = held.len() - ours.payload;
        if !ours.tcp {
            return held_bytes.is_multiple_of(usize::from(self.virtio.segment_bytes));
        }
        let at = ours.transport;
        let (before, after) = (flags(ours, held), flags(headers, frame));
        let ends = FLAG_FIN | FLAG_PSH;
        let next = ours.sequence(held).wrapping_add(held_bytes as u32);
        headers.sequence(frame) == next
            && self.last_flags == 0
            && (before | after) & (FLAG_SYN | FLAG_RST | FLAG_URG) == 0
            && before & !(FLAG_CWR | ends) == after & !ends
            // Acknowledgement and length of the header; window; options.
            && same(held, frame, at + 8..at + 13)
            && same(held, frame, at + 14..at + 16)
            && same(held, frame, at + 18..ours.payload)
    }

    /// Whether nothing can follow.
    #[inline]
    fn is_complete(&self, last: &Headers) -> bool {
        let last_bytes = last.end - last.payload;
        let whole = last_bytes.is_multiple_of(usize::from(self.virtio.segment_bytes));
        self.last_flags != 0 || !last.tcp && !whole
    }

    /// Writes lengths, flags and checksums of the whole run, and its virtio header.
    fn finish(&mut self) {
        let bytes = self.frame.len() - self.headers.payload;
        if self.segments > 1 {
            if let Some(flags) = self.frame.get_mut(self.headers.transport + 13)
                && self.headers.tcp
            {
                *flags |= self.last_flags;
            }
            self.headers.set_length(&mut self.frame, bytes);
        }
        self.virtio.headers_bytes = self.headers.payload as u16;
        if bytes <= usize::from(self.virtio.segment_bytes) {
            self.virtio = self.virtio.without_gso();
        }
    }
}
