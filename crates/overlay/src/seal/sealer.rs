//! Seals datagrams, one or a batch at a time, and goes on to the next epoch.

use super::keys::{Chain, EpochKey};
use super::{
    EXPORTED_BYTES, HEADER_BYTES, Header, KeyLimits, Kind, OVERHEAD_BYTES, Side, Suite, TAG_BYTES,
};
use crate::address::NetworkId;
use std::time::Duration;

/// Why datagrams cannot be sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// The limit of datagrams under one key is reached, and the peer has not confirmed the key.
    #[error("the peer does not confirm the keys; a new connection to it is needed")]
    Exhausted,
    /// A datagram is shorter than its header and tag, or a batch has a stride of zero.
    #[error("a datagram has no room for its header and tag")]
    Length,
    /// The cryptographic library refused to derive keys.
    #[error("keys cannot be derived")]
    Derivation,
}

/// What this host seals datagrams with. Counters are never used twice: a failure in the middle of a
/// batch spends them all.
#[derive(Debug)]
pub struct Sealer {
    limits: KeyLimits,
    key_id: u32,
    chain: Chain,
    key: EpochKey,
    epoch: u64,
    since: Duration,
    counter: u64,
    /// What the peer has confirmed.
    confirmed: u8,
}

impl Sealer {
    pub(super) fn new(
        now: Duration,
        exported: &[u8; EXPORTED_BYTES],
        side: Side,
        suite: Suite,
        limits: KeyLimits,
    ) -> Result<Self, SealError> {
        let (key_id, mut chain) = Chain::new(exported, side, suite)?;
        let key = chain.advance()?;
        Ok(Self {
            limits,
            key_id,
            chain,
            key,
            epoch: 0,
            since: now,
            counter: 0,
            confirmed: 0,
        })
    }

    /// Returns the id of these keys.
    pub fn key_id(&self) -> u32 {
        self.key_id
    }

    /// Returns the epoch, from 0.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Takes the `seen` of an authentic datagram of the peer.
    #[inline]
    pub fn confirmed(&mut self, seen: u8) {
        // One that comes late says an older epoch.
        if seen == self.epoch as u8 {
            self.confirmed = seen;
        }
    }

    /// Returns the first of `count` counters, under the keys of the next epoch if it is time.
    #[inline]
    fn reserve(&mut self, now: Duration, count: u64) -> Result<u64, SealError> {
        let due = self.counter >= self.limits.epoch_packets
            || now.saturating_sub(self.since) >= self.limits.epoch_time;
        if due && self.counter > 0 && self.confirmed == self.epoch as u8 {
            self.key = self.chain.advance()?;
            (self.epoch, self.counter, self.since) = (self.epoch + 1, 0, now);
        }
        let first = self.counter;
        let next = first.checked_add(count);
        self.counter = next
            .filter(|next| *next <= self.limits.packets_max)
            .ok_or(SealError::Exhausted)?;
        Ok(first)
    }

    /// Seals one datagram in place: `datagram` has room for the header, the payload, and room for
    /// the tag.
    pub fn seal(
        &mut self,
        now: Duration,
        seen: u8,
        kind: Kind,
        network: NetworkId,
        datagram: &mut [u8],
    ) -> Result<(), SealError> {
        let stride = datagram.len();
        self.seal_batch(now, seen, kind, network, datagram, stride)
    }

    /// Seals datagrams of equal length in place, for one send with segmentation (UDP GSO). They lie
    /// `stride` bytes apart, each as in [`Self::seal`]; the last one may be shorter. `seen` is
    /// [`super::Opener::seen`] of the peer's datagrams.
    pub fn seal_batch(
        &mut self,
        now: Duration,
        seen: u8,
        kind: Kind,
        network: NetworkId,
        datagrams: &mut [u8],
        stride: usize,
    ) -> Result<(), SealError> {
        if stride < OVERHEAD_BYTES || datagrams.is_empty() {
            return Err(SealError::Length);
        }
        let last = datagrams.len() % stride;
        if last != 0 && last < OVERHEAD_BYTES {
            return Err(SealError::Length);
        }
        let count = datagrams.len().div_ceil(stride) as u64;
        let first = self.reserve(now, count)?;
        let mut header = Header {
            kind,
            epoch: self.epoch as u8,
            seen,
            key_id: self.key_id,
            counter: first,
            network,
        };
        for datagram in datagrams.chunks_mut(stride) {
            let bytes = header.to_bytes();
            let (head, rest) = datagram
                .split_first_chunk_mut::<HEADER_BYTES>()
                .ok_or(SealError::Length)?;
            let (payload, tag) = rest
                .split_last_chunk_mut::<TAG_BYTES>()
                .ok_or(SealError::Length)?;
            *head = bytes;
            *tag = self.key.seal(header.counter, &bytes, payload)?;
            header.counter += 1;
        }
        Ok(())
    }
}
