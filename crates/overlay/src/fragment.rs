//! Splits frames that are longer than a datagram and cannot be cut, and puts them together again.
//!
//! ```text
//! byte  0..4   4      5      6..8           8..
//!       id     index  count  whole length   part
//! ```
//! Numbers are little-endian. Each part but the last has the whole length divided by the count,
//! rounded up. What is split is a virtio header and its frame.

use std::time::Duration;

/// Bytes before the part of a frame.
pub const FRAGMENT_HEADER_BYTES: usize = 8;
/// Most fragments of a frame. Two are common: an Ethernet frame of 1514 bytes.
pub const FRAGMENTS_MAX: usize = 16;
/// Most frames of one peer that wait for fragments. A further one takes the place of the oldest.
pub const PARTIAL_FRAMES_MAX: usize = 16;
/// How long a frame waits for its fragments.
pub const REASSEMBLY_TIME: Duration = Duration::from_secs(1);

/// Why a frame cannot be split, or a fragment not be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FragmentError {
    /// The frame needs more than [`FRAGMENTS_MAX`] fragments.
    #[error("the frame is too long for this path")]
    TooLong,
    /// The fragment's numbers do not fit together.
    #[error("a malformed fragment")]
    Malformed,
    /// It arrived before, or differs from the others of its frame.
    #[error("a fragment that does not fit to the others")]
    Conflict,
}

/// How a frame is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split {
    id: u32,
    bytes: usize,
    count: usize,
    part: usize,
}

impl Split {
    /// Plans to split `bytes` bytes into payloads of at most `payload_max` bytes. `id` is another
    /// one for each frame to a peer: a number that counts up.
    pub fn new(id: u32, bytes: usize, payload_max: usize) -> Result<Self, FragmentError> {
        let room = payload_max.saturating_sub(FRAGMENT_HEADER_BYTES);
        if room == 0 || bytes == 0 || bytes > usize::from(u16::MAX) {
            return Err(FragmentError::TooLong);
        }
        let count = bytes.div_ceil(room);
        if count > FRAGMENTS_MAX {
            return Err(FragmentError::TooLong);
        }
        Ok(Self {
            id,
            bytes,
            count,
            part: bytes.div_ceil(count),
        })
    }

    /// Returns the number of fragments.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the length of each fragment but the last, in bytes, header included.
    pub fn fragment_bytes(&self) -> usize {
        FRAGMENT_HEADER_BYTES + self.part
    }

    /// Writes a fragment of `virtio` and `frame` to the beginning of `out`, and returns its length;
    /// `None` if there is no such fragment or no room for it.
    pub fn write(
        &self,
        index: usize,
        virtio: &[u8],
        frame: &[u8],
        out: &mut [u8],
    ) -> Option<usize> {
        if index >= self.count || virtio.len() + frame.len() != self.bytes {
            return None;
        }
        let range = part(index, self.part, self.bytes);
        let out = out.get_mut(..FRAGMENT_HEADER_BYTES + range.len())?;
        let (head, body) = out.split_first_chunk_mut::<FRAGMENT_HEADER_BYTES>()?;
        head[..4].copy_from_slice(&self.id.to_le_bytes());
        head[4..6].copy_from_slice(&[index as u8, self.count as u8]);
        head[6..].copy_from_slice(&(self.bytes as u16).to_le_bytes());
        // The part of each of the two that is in the range.
        let at = |from: usize| from.min(virtio.len());
        let first = &virtio[at(range.start)..at(range.end)];
        let (head, tail) = body.split_at_mut(first.len());
        head.copy_from_slice(first);
        let at = |from: usize| from.saturating_sub(virtio.len());
        tail.copy_from_slice(&frame[at(range.start)..at(range.end)]);
        Some(out.len())
    }
}

fn part(index: usize, part: usize, bytes: usize) -> std::ops::Range<usize> {
    let start = (index * part).min(bytes);
    start..(start + part).min(bytes)
}

/// What a [`Reassembler`] counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReassemblyCounters {
    /// Fragments that arrived.
    pub fragments: u64,
    /// Frames that are whole.
    pub frames: u64,
    /// Fragments that were dropped.
    pub dropped: u64,
    /// Frames that were given up.
    pub incomplete: u64,
}

#[derive(Debug, Default)]
struct Partial {
    /// `None`: free.
    since: Option<Duration>,
    /// The number of the frame among all that arrived.
    order: u64,
    network: u64,
    id: u32,
    count: usize,
    arrived: u32,
    bytes: Vec<u8>,
}

/// Puts the frames of one peer together.
#[derive(Debug, Default)]
pub struct Reassembler {
    partial: Vec<Partial>,
    /// Frames that began.
    begun: u64,
    counters: ReassemblyCounters,
}

impl Reassembler {
    /// Returns a reassembler that holds nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns what was counted.
    pub fn counters(&self) -> &ReassemblyCounters {
        &self.counters
    }

    /// Takes the payload of a fragment. Returns the frame with its virtio header, if it is whole.
    pub fn push(
        &mut self,
        now: Duration,
        network: crate::NetworkId,
        payload: &[u8],
    ) -> Result<Option<&[u8]>, FragmentError> {
        self.counters.fragments += 1;
        let slot = self.add(now, network.0, payload);
        match slot {
            Ok(None) => Ok(None),
            Ok(Some(slot)) => {
                self.counters.frames += 1;
                Ok(self.partial.get(slot).map(|partial| &partial.bytes[..]))
            }
            Err(error) => {
                self.counters.dropped += 1;
                Err(error)
            }
        }
    }

    fn add(
        &mut self,
        now: Duration,
        network: u64,
        payload: &[u8],
    ) -> Result<Option<usize>, FragmentError> {
        let Some((head, body)) = payload.split_first_chunk::<FRAGMENT_HEADER_BYTES>() else {
            return Err(FragmentError::Malformed);
        };
        let [i0, i1, i2, i3, index, count, b0, b1] = *head;
        let id = u32::from_le_bytes([i0, i1, i2, i3]);
        let (index, count) = (usize::from(index), usize::from(count));
        let bytes = usize::from(u16::from_le_bytes([b0, b1]));
        if count == 0 || count > FRAGMENTS_MAX || index >= count || bytes < count {
            return Err(FragmentError::Malformed);
        }
        let range = part(index, bytes.div_ceil(count), bytes);
        if range.is_empty() || body.len() != range.len() {
            return Err(FragmentError::Malformed);
        }
        self.tick(now);
        let slot = self.slot(network, id);
        let slot = slot.unwrap_or_else(|| self.begin(now, network, id, count, bytes));
        let Some(partial) = self.partial.get_mut(slot) else {
            return Err(FragmentError::Conflict);
        };
        let bit = 1 << index;
        let fits = partial.count == count && partial.bytes.len() == bytes;
        if !fits || partial.arrived & bit != 0 {
            return Err(FragmentError::Conflict);
        }
        partial.bytes[range].copy_from_slice(body);
        partial.arrived |= bit;
        if partial.arrived.count_ones() as usize == count {
            partial.since = None;
            return Ok(Some(slot));
        }
        Ok(None)
    }

    fn slot(&self, network: u64, id: u32) -> Option<usize> {
        self.partial.iter().position(|partial| {
            partial.since.is_some() && (partial.network, partial.id) == (network, id)
        })
    }

    /// Returns a slot for a new frame.
    fn begin(&mut self, now: Duration, network: u64, id: u32, count: usize, bytes: usize) -> usize {
        // A free one, or the oldest.
        let oldest = self.partial.iter().enumerate();
        let oldest = oldest
            .min_by_key(|(_, partial)| (partial.since.is_some(), partial.order))
            .map(|(slot, _)| slot);
        let free = oldest.filter(|slot| {
            self.partial[*slot].since.is_none() || self.partial.len() >= PARTIAL_FRAMES_MAX
        });
        let slot = free.unwrap_or_else(|| {
            self.partial.push(Partial::default());
            self.partial.len() - 1
        });
        let partial = &mut self.partial[slot];
        self.counters.incomplete += u64::from(partial.since.is_some());
        let mut buffer = std::mem::take(&mut partial.bytes);
        buffer.clear();
        buffer.resize(bytes, 0);
        self.begun += 1;
        *partial = Partial {
            since: Some(now),
            order: self.begun,
            network,
            id,
            count,
            arrived: 0,
            bytes: buffer,
        };
        slot
    }

    /// Gives up frames that waited too long.
    pub fn tick(&mut self, now: Duration) {
        for partial in &mut self.partial {
            if partial
                .since
                .is_some_and(|since| now.saturating_sub(since) >= REASSEMBLY_TIME)
            {
                partial.since = None;
                self.counters.incomplete += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NetworkId;
    use proptest::prelude::*;

    const T: Duration = Duration::from_secs(9);
    const NET: NetworkId = NetworkId(1);

    fn split(id: u32, virtio: &[u8], frame: &[u8], max: usize) -> Vec<Vec<u8>> {
        let split = Split::new(id, virtio.len() + frame.len(), max).unwrap();
        let fragment = |index| {
            let mut out = vec![0; split.fragment_bytes()];
            let length = split.write(index, virtio, frame, &mut out).unwrap();
            assert!(length <= max);
            out.truncate(length);
            out
        };
        (0..split.count()).map(fragment).collect()
    }

    proptest! {
        #[test]
        fn split_and_joined_is_the_same(
            bytes in 11..18_000usize, max in 1180..1500usize, order in any::<u64>()
        ) {
            let whole: Vec<u8> = (0..bytes).map(|at| (at * 31 + at / 256) as u8).collect();
            let mut fragments = split(7, &whole[..10], &whole[10..], max);
            prop_assert_eq!(fragments.len(), bytes.div_ceil(max - FRAGMENT_HEADER_BYTES));
            for at in 0..fragments.len() {
                let with = (order >> at) as usize % fragments.len();
                fragments.swap(at, with);
            }
            let mut reassembler = Reassembler::new();
            let last = fragments.pop().unwrap();
            for fragment in &fragments {
                prop_assert_eq!(reassembler.push(T, NET, fragment), Ok(None));
                prop_assert_eq!(
                    reassembler.push(T, NET, fragment),
                    Err(FragmentError::Conflict)
                );
            }
            prop_assert_eq!(reassembler.push(T, NET, &last), Ok(Some(&whole[..])));
        }

        #[test]
        fn any_bytes_are_survived(
            payloads in prop::collection::vec(prop::collection::vec(0..20u8, 0..30), 0..40)
        ) {
            let mut reassembler = Reassembler::new();
            for payload in payloads {
                let _ = reassembler.push(T, NET, &payload);
            }
        }
    }

    #[test]
    fn two_fragments_by_hand() {
        let fragments = split(0x0102_0304, b"virtioheAD", b"frame", 16);
        assert_eq!(fragments[0], b"\x04\x03\x02\x01\x00\x02\x0f\x00virtiohe");
        assert_eq!(fragments[1], b"\x04\x03\x02\x01\x01\x02\x0f\x00ADframe");
    }

    #[test]
    fn the_table_is_bounded() {
        let mut reassembler = Reassembler::new();
        let frames: Vec<Vec<Vec<u8>>> = (0..20)
            .map(|id| split(id, &[1; 10], &[2; 1514], 1400))
            .collect();
        for frame in &frames {
            assert_eq!(reassembler.push(T, NET, &frame[0]), Ok(None));
        }
        assert_eq!(reassembler.counters().incomplete, 4);
        assert_eq!(reassembler.partial.len(), PARTIAL_FRAMES_MAX);
        let other = NetworkId(2);
        assert_eq!(reassembler.push(T, other, &frames[19][1]), Ok(None));
        assert!(reassembler.push(T, NET, &frames[19][1]).unwrap().is_some());
        let late = T + REASSEMBLY_TIME;
        assert_eq!(reassembler.push(late, NET, &frames[18][1]), Ok(None));
        assert_eq!(reassembler.counters().frames, 1);
        assert!(Split::new(0, 16 * 1392 + 1, 1400).is_err());
        assert!(Split::new(0, 100, 8).is_err() && Split::new(0, 0, 1400).is_err());
    }

    #[test]
    fn fragments_that_do_not_fit() {
        let mut reassembler = Reassembler::new();
        let fragments = split(1, &[1; 10], &[2; 1514], 1400);
        for (at, value) in [(4, 2), (5, 0), (5, 17), (5, 3), (6, 9), (7, 0)] {
            let mut bad = fragments[0].clone();
            bad[at] = value;
            let result = reassembler.push(T, NET, &bad);
            assert_eq!(result, Err(FragmentError::Malformed), "byte {at}");
        }
        assert_eq!(reassembler.push(T, NET, &fragments[0]), Ok(None));
        let other = split(1, &[1; 10], &[2; 1515], 1400);
        let result = reassembler.push(T, NET, &other[1]);
        assert_eq!(result, Err(FragmentError::Conflict));
        assert_eq!(reassembler.counters().dropped, 7);
    }
}
