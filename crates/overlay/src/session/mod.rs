//! A pair of hosts: its keys of the current and the last connection, its path's MTU, keepalives,
//! and the peer's address.
//!
//! A session has two halves, so that one thread can seal while another one opens: [`Sending`] and
//! [`Receiving`]. What arrives rarely concerns what is sent; then [`Receiving::has_news`] says so,
//! and [`Sending::learn`] takes it over. [`Session`] is both halves in one place.

mod mtu;
mod receiving;
mod sending;

pub use mtu::{Discovery, MTU_STEP_BYTES, MtuChange, MtuConfig, Probe};
pub use receiving::Receiving;
pub use sending::Sending;

use crate::address::NetworkId;
use crate::offload::Cut;
use crate::seal::{
    self, EXPORTED_BYTES, KeyLimits, Kind, OpenCounters, OpenError, Opened, Opener, SealError,
    Sealer, Side, Suite,
};
use std::time::Duration;

/// Most datagrams of a batch: the least that kernels allow in one send with segmentation.
pub const BATCH_DATAGRAMS_MAX: usize = 64;
/// Longest batch, in bytes: the longest payload of a UDP datagram over IPv4.
pub const BATCH_BYTES_MAX: usize = 65_507;

/// The times of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionConfig {
    /// When nothing was sent for this long, a keepalive is (paper 004's pulse).
    pub pulse: Duration,
    /// When nothing was received for this long, that is reported.
    pub silent_after: Duration,
    /// How long datagrams of the last connection are accepted.
    pub previous_grace: Duration,
    /// How long the dialler of a new connection waits for the listener to use it.
    pub confirm_grace: Duration,
    /// Whether the peer's address follows its datagrams.
    pub roaming: bool,
    /// Limits of keys.
    pub keys: KeyLimits,
    /// Limits of the MTU.
    pub mtu: MtuConfig,
}

impl Default for SessionConfig {
    fn default() -> Self {
        Self {
            pulse: Duration::from_secs(5),
            silent_after: Duration::from_secs(15),
            previous_grace: Duration::from_secs(10),
            confirm_grace: Duration::from_secs(1),
            roaming: true,
            keys: KeyLimits::default(),
            mtu: MtuConfig::default(),
        }
    }
}

/// Something to be reported of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionEvent<A> {
    /// The peer sends from another address now.
    Roamed {
        /// The address before.
        from: A,
        /// The address now.
        to: A,
    },
    /// The path carries datagrams of this size now.
    Mtu {
        /// The UDP payload, in bytes.
        bytes: u16,
        /// Whether a larger size was used before, and no longer passes.
        black_hole: bool,
    },
    /// Nothing was received for a while.
    Silent,
    /// Something was received again.
    Heard,
}

/// Why nothing can be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// There are no keys yet.
    #[error("there is no connection with the peer yet")]
    NotConnected,
    /// The peer has no address yet.
    #[error("the peer's address is not known yet")]
    NoAddress,
    /// See there.
    #[error(transparent)]
    Seal(#[from] SealError),
}

/// What a session counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SessionCounters {
    /// Datagrams that were sealed.
    pub sent: u64,
    /// Their bytes, as UDP payloads.
    pub sent_bytes: u64,
    /// Datagrams that were opened.
    pub received: u64,
    /// Their bytes, as UDP payloads.
    pub received_bytes: u64,
    /// Keepalives that were sent.
    pub pulses: u64,
    /// How often the peer's address changed.
    pub roamed: u64,
    /// Connections that gave keys.
    pub connections: u64,
    /// Control datagrams and MTU probes that are malformed.
    pub malformed: u64,
    /// What became of datagrams, under all keys.
    pub opened: OpenCounters,
}

impl SessionCounters {
    /// Returns what both halves of a session counted.
    pub fn of<A: Copy + Eq>(sending: &Sending<A>, receiving: &Receiving<A>) -> Self {
        let sent = *sending.counters();
        let received = receiving.counters();
        Self {
            received: received.received,
            received_bytes: received.received_bytes,
            malformed: received.malformed,
            opened: received.opened,
            ..sent
        }
    }
}

/// Datagrams that were sealed for one send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch<A> {
    /// Where they go.
    pub to: A,
    /// The number of segments that they carry, starting with the first one asked for.
    pub count: usize,
    /// Their bytes from the beginning of the buffer.
    pub bytes: usize,
    /// The length of each but the last.
    pub stride: usize,
}

/// The keys of a connection, before they are used.
#[derive(Debug)]
pub struct Keys {
    sealer: Sealer,
    opener: Opener,
    side: Side,
}

impl Keys {
    /// Derives the keys from what both ends exported.
    pub fn derive(
        now: Duration,
        exported: &[u8; EXPORTED_BYTES],
        side: Side,
        suite: Suite,
        limits: KeyLimits,
    ) -> Result<Self, SealError> {
        let (sealer, opener) = seal::halves(now, exported, side, suite, limits)?;
        Ok(Self {
            sealer,
            opener,
            side,
        })
    }

    /// Returns the id by which datagrams under them are known.
    pub fn id(&self) -> u32 {
        self.opener.key_id()
    }
}

/// A pair of hosts. `A` is an address of the peer.
#[derive(Debug)]
pub struct Session<A> {
    config: SessionConfig,
    sending: Sending<A>,
    receiving: Receiving<A>,
}

impl<A: Copy + Eq> Session<A> {
    /// Returns a session without keys.
    pub fn new(now: Duration, config: SessionConfig, address: Option<A>) -> Self {
        Self {
            config,
            sending: Sending::new(now, config, address),
            receiving: Receiving::new(now, config, address),
        }
    }

    /// Returns the two halves.
    pub fn split(self) -> (Sending<A>, Receiving<A>) {
        (self.sending, self.receiving)
    }

    /// Takes the keys of a new connection. Returns the id by which datagrams under them are known.
    ///
    /// The listener uses them at once, since the dialler has them already. The dialler goes on with
    /// the last ones until it receives a datagram under the new ones, or for a moment.
    pub fn connected(
        &mut self,
        now: Duration,
        exported: &[u8; EXPORTED_BYTES],
        side: Side,
        suite: Suite,
    ) -> Result<u32, SealError> {
        let keys = Keys::derive(now, exported, side, suite, self.config.keys)?;
        let id = keys.id();
        self.sending.connected(now, keys, &mut self.receiving);
        Ok(id)
    }

    /// Returns the ids of the keys that datagrams are opened with.
    pub fn key_ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.receiving.key_ids()
    }

    /// Returns the peer's address.
    pub fn address(&self) -> Option<A> {
        self.sending.address()
    }

    /// Sets the peer's address, as another path was chosen.
    pub fn set_address(&mut self, now: Duration, address: A) {
        self.sending
            .set_address(now, Some(address), &mut self.receiving);
    }

    /// See [`Sending::mtu_bytes`].
    pub fn mtu_bytes(&self) -> usize {
        self.sending.mtu_bytes()
    }

    /// See [`Sending::payload_max`].
    pub fn payload_max(&self) -> usize {
        self.sending.payload_max()
    }

    /// Returns what was counted.
    pub fn counters(&self) -> SessionCounters {
        SessionCounters::of(&self.sending, &self.receiving)
    }

    /// Takes the next event.
    pub fn poll_event(&mut self) -> Option<SessionEvent<A>> {
        self.sending.poll_event()
    }

    /// See [`Sending::seal_batch`].
    pub fn seal_batch(
        &mut self,
        now: Duration,
        kind: Kind,
        network: NetworkId,
        datagrams: &mut [u8],
        stride: usize,
    ) -> Result<A, SessionError> {
        self.sending
            .seal_batch(now, kind, network, datagrams, stride)
    }

    /// See [`Sending::seal_cut`].
    pub fn seal_cut(
        &mut self,
        now: Duration,
        network: NetworkId,
        cut: &Cut<'_>,
        first: usize,
        out: &mut [u8],
    ) -> Result<Batch<A>, SessionError> {
        self.sending.seal_cut(now, network, cut, first, out)
    }

    /// See [`Receiving::open`].
    pub fn open<'a>(
        &mut self,
        now: Duration,
        from: A,
        datagram: &'a mut [u8],
    ) -> Result<Opened<'a>, OpenError> {
        let opened = self.receiving.open(now, from, datagram);
        self.sending.learn(now, &mut self.receiving);
        opened
    }

    /// Opens datagrams that arrived together, `stride` bytes apart, as [`Opener::open_batch`].
    pub fn open_batch<'a>(
        &mut self,
        now: Duration,
        from: A,
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
            each(self.open(now, from, datagram));
        }
    }

    /// See [`Sending::refused`].
    pub fn refused(&mut self, now: Duration, bytes: u16) {
        self.sending.refused(now, bytes);
    }

    /// See [`Sending::poll_transmit`].
    pub fn poll_transmit(&mut self, now: Duration, out: &mut [u8]) -> Option<(A, usize)> {
        self.receiving.expire(now);
        self.sending.learn(now, &mut self.receiving);
        self.sending.poll_transmit(now, out)
    }

    /// See [`Sending::deadline`].
    pub fn deadline(&self) -> Option<Duration> {
        self.sending.deadline()
    }
}

#[cfg(test)]
mod tests;
