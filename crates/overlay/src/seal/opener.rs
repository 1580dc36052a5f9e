//! Opens datagrams in place, follows the sender's epochs, and drops what arrives twice.

use super::OVERHEAD_BYTES;
use super::keys::{Chain, EpochKey};
use super::window::{Seen, Window};
use super::{EXPORTED_BYTES, HEADER_BYTES, Header, KeyLimits, Kind, SealError, Side, Suite};
use crate::address::NetworkId;
use std::time::Duration;

/// Why a datagram is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// It is too short, of an unknown kind, or has a reserved bit.
    #[error("no datagram of the frame plane")]
    Malformed,
    /// It has the id of other keys.
    #[error("sealed under other keys")]
    KeyId,
    /// It is of an epoch whose keys are erased or do not exist yet, or its counter is beyond the
    /// limit.
    #[error("sealed in another epoch")]
    Epoch,
    /// It is too far behind the newest.
    #[error("it arrives too late")]
    Old,
    /// It arrived before.
    #[error("it was received before")]
    Replayed,
    /// It is not authentic.
    #[error("not authentic")]
    Forged,
    /// Too many datagrams were not authentic: a new connection is needed.
    #[error("too many datagrams were not authentic")]
    Exhausted,
}

/// What an [`Opener`] counted: datagrams, by what became of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OpenCounters {
    /// Opened.
    pub opened: u64,
    /// [`OpenError::Malformed`] or [`OpenError::KeyId`].
    pub malformed: u64,
    /// [`OpenError::Epoch`].
    pub epoch: u64,
    /// [`OpenError::Old`].
    pub old: u64,
    /// [`OpenError::Replayed`].
    pub replayed: u64,
    /// [`OpenError::Forged`] or [`OpenError::Exhausted`].
    pub forged: u64,
}

/// An authentic datagram.
#[derive(Debug, PartialEq, Eq)]
pub struct Opened<'a> {
    /// What it carries.
    pub kind: Kind,
    /// The network that it belongs to.
    pub network: NetworkId,
    /// Its epoch, from 0.
    pub epoch: u64,
    /// Its number within the epoch.
    pub counter: u64,
    /// Whether it was sent after all others that were opened before.
    pub newest: bool,
    /// The lowest bits of the newest epoch that the peer has opened a datagram of.
    pub seen: u8,
    /// The payload.
    pub payload: &'a mut [u8],
}

#[derive(Debug)]
struct Epoch {
    key: EpochKey,
    window: Window,
}

impl Epoch {
    fn new(key: EpochKey) -> Self {
        Self {
            key,
            window: Window::new(),
        }
    }
}

/// What this host opens a peer's datagrams with.
///
/// A sender goes on by one epoch when its peer has opened a datagram of the last one. So there are
/// three keys at most: the previous one for a grace time, the current one, and the next one.
#[derive(Debug)]
pub struct Opener {
    limits: KeyLimits,
    key_id: u32,
    chain: Chain,
    previous: Option<(Epoch, Duration)>,
    current: Epoch,
    next: EpochKey,
    epoch: u64,
    forged_here: u64,
    counters: OpenCounters,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    Previous,
    Current,
    Next,
}

impl Opener {
    pub(super) fn new(
        exported: &[u8; EXPORTED_BYTES],
        sender: Side,
        suite: Suite,
        limits: KeyLimits,
    ) -> Result<Self, SealError> {
        let (key_id, mut chain) = Chain::new(exported, sender, suite)?;
        let current = Epoch::new(chain.advance()?);
        let next = chain.advance()?;
        Ok(Self {
            limits,
            key_id,
            chain,
            previous: None,
            current,
            next,
            epoch: 0,
            forged_here: 0,
            counters: OpenCounters::default(),
        })
    }

    /// Returns the id of these keys: datagrams with this id are for this opener.
    pub fn key_id(&self) -> u32 {
        self.key_id
    }

    /// Returns the newest epoch that a datagram was opened of.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns what this host's datagrams tell the peer: the lowest bits of [`Self::epoch`].
    #[inline]
    pub fn seen(&self) -> u8 {
        self.epoch as u8
    }

    /// Returns what was counted.
    pub fn counters(&self) -> &OpenCounters {
        &self.counters
    }

    /// Erases the keys of the previous epoch when its grace time is over.
    pub fn tick(&mut self, now: Duration) {
        if self
            .previous
            .as_ref()
            .is_some_and(|(_, until)| *until <= now)
        {
            self.previous = None;
        }
    }

    /// Opens one datagram in place.
    pub fn open<'a>(
        &mut self,
        now: Duration,
        datagram: &'a mut [u8],
    ) -> Result<Opened<'a>, OpenError> {
        let opened = self.open_uncounted(now, datagram);
        let counters = &mut self.counters;
        *match &opened {
            Ok(_) => &mut counters.opened,
            Err(OpenError::Malformed | OpenError::KeyId) => &mut counters.malformed,
            Err(OpenError::Epoch) => &mut counters.epoch,
            Err(OpenError::Old) => &mut counters.old,
            Err(OpenError::Replayed) => &mut counters.replayed,
            Err(OpenError::Forged | OpenError::Exhausted) => &mut counters.forged,
        } += 1;
        opened
    }

    /// Opens datagrams that lie `stride` bytes apart, as they arrive with receive offload (UDP
    /// GRO); the last one may be shorter. Calls `each` for each. A stride of 0 is one datagram.
    pub fn open_batch<'a>(
        &mut self,
        now: Duration,
        datagrams: &'a mut [u8],
        stride: usize,
        mut each: impl FnMut(Result<Opened<'a>, OpenError>),
    ) {
        let stride = if stride == 0 {
            datagrams.len().max(1)
        } else {
            stride
        };
        for datagram in datagrams.chunks_mut(stride) {
            each(self.open(now, datagram));
        }
    }

    #[inline]
    fn open_uncounted<'a>(
        &mut self,
        now: Duration,
        datagram: &'a mut [u8],
    ) -> Result<Opened<'a>, OpenError> {
        if datagram.len() < OVERHEAD_BYTES {
            return Err(OpenError::Malformed);
        }
        let Some((head, sealed)) = datagram.split_first_chunk_mut::<HEADER_BYTES>() else {
            return Err(OpenError::Malformed);
        };
        let header = Header::parse(head).ok_or(OpenError::Malformed)?;
        if header.key_id != self.key_id {
            return Err(OpenError::KeyId);
        }
        self.tick(now);
        let ahead = header.epoch.wrapping_sub(self.epoch as u8);
        let (which, key, window, epoch) = match (ahead, &self.previous) {
            (0, _) => (
                Which::Current,
                &self.current.key,
                Some(&self.current.window),
                self.epoch,
            ),
            (1, _) => (Which::Next, &self.next, None, self.epoch + 1),
            (u8::MAX, Some((previous, _))) => (
                Which::Previous,
                &previous.key,
                Some(&previous.window),
                self.epoch - 1,
            ),
            _ => return Err(OpenError::Epoch),
        };
        if header.counter >= self.limits.packets_max {
            return Err(OpenError::Epoch);
        }
        if self.forged_here >= self.limits.forged_max {
            return Err(OpenError::Exhausted);
        }
        match window.map_or(Ok(()), |window| window.check(header.counter)) {
            Ok(()) => {}
            Err(Seen::Old) => return Err(OpenError::Old),
            Err(Seen::Twice) => return Err(OpenError::Replayed),
        }
        let Some(length) = key.open(header.counter, head, sealed) else {
            self.forged_here += 1;
            return Err(OpenError::Forged);
        };
        // Only authentic datagrams change anything.
        if which == Which::Next {
            self.advance(now).map_err(|_| OpenError::Epoch)?;
        }
        let window = match (&mut self.previous, which) {
            (Some((previous, _)), Which::Previous) => &mut previous.window,
            _ => &mut self.current.window,
        };
        let newest = which != Which::Previous && header.counter >= window.next();
        window.accept(header.counter);
        Ok(Opened {
            kind: header.kind,
            network: header.network,
            epoch,
            counter: header.counter,
            newest,
            seen: header.seen,
            payload: &mut sealed[..length],
        })
    }

    fn advance(&mut self, now: Duration) -> Result<(), SealError> {
        let after = self.chain.advance()?;
        let key = std::mem::replace(&mut self.next, after);
        let current = std::mem::replace(&mut self.current, Epoch::new(key));
        self.previous = Some((current, now + self.limits.grace));
        self.epoch += 1;
        self.forged_here = 0;
        Ok(())
    }
}
