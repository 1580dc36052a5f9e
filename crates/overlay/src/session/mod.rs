//! A pair of hosts: its keys of the current and the last connection, its path's MTU, keepalives,
//! and the peer's address.

mod mtu;

pub use mtu::{Discovery, MTU_STEP_BYTES, MtuChange, MtuConfig, Probe};

use crate::address::NetworkId;
use crate::control::{self, MESSAGE_BYTES_MAX, Message};
use crate::offload::Cut;
use crate::seal::{
    self, EXPORTED_BYTES, HEADER_BYTES, KeyLimits, Kind, OVERHEAD_BYTES, OpenCounters, OpenError,
    Opened, Opener, SealError, Sealer, Side, Suite, TAG_BYTES,
};
use std::collections::VecDeque;
use std::time::Duration;

/// Most datagrams of a batch: the least that kernels allow in one send with segmentation.
pub const BATCH_DATAGRAMS_MAX: usize = 64;
/// Longest batch, in bytes: the longest payload of a UDP datagram over IPv4.
pub const BATCH_BYTES_MAX: usize = 65_507;
/// Most answers to MTU probes that wait to be sent. Further probes are not answered.
const ANSWERS_MAX: usize = 8;
/// Most events that wait to be taken. Further ones are dropped.
const EVENTS_MAX: usize = 64;
/// Bytes in front of the zeros of an MTU probe.
const PROBE_ID_BYTES: usize = 4;

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

#[derive(Debug)]
struct Connection {
    sealer: Sealer,
    opener: Opener,
}

fn add(sum: &mut OpenCounters, more: &OpenCounters) {
    sum.opened += more.opened;
    sum.malformed += more.malformed;
    sum.epoch += more.epoch;
    sum.old += more.old;
    sum.replayed += more.replayed;
    sum.forged += more.forged;
}

/// A pair of hosts. `A` is an address of the peer.
#[derive(Debug)]
pub struct Session<A> {
    config: SessionConfig,
    address: Option<A>,
    current: Option<Connection>,
    previous: Option<(Connection, Duration)>,
    /// Until then datagrams are sealed under the keys of the previous connection.
    wait_until: Duration,
    mtu: Discovery,
    answers: VecDeque<Probe>,
    /// Whether a short probe is to be sent, whose answer says that the path works.
    echo: bool,
    events: VecDeque<SessionEvent<A>>,
    last_sent: Duration,
    last_received: Duration,
    silent: bool,
    pulse_now: bool,
    counters: SessionCounters,
}

impl<A: Copy + Eq> Session<A> {
    /// Returns a session without keys.
    pub fn new(now: Duration, config: SessionConfig, address: Option<A>) -> Self {
        Self {
            config,
            address,
            current: None,
            previous: None,
            wait_until: Duration::ZERO,
            mtu: Discovery::new(now, config.mtu),
            answers: VecDeque::new(),
            echo: false,
            events: VecDeque::new(),
            last_sent: now,
            last_received: now,
            silent: false,
            pulse_now: false,
            counters: SessionCounters::default(),
        }
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
        let (sealer, opener) = seal::halves(now, exported, side, suite, self.config.keys)?;
        let id = opener.key_id();
        if let Some((before, _)) = self.previous.take() {
            add(&mut self.counters.opened, before.opener.counters());
        }
        let before = self.current.replace(Connection { sealer, opener });
        self.previous = before.map(|before| (before, now + self.config.previous_grace));
        self.wait_until = match side {
            Side::Dialler => now + self.config.confirm_grace,
            Side::Listener => now,
        };
        self.counters.connections += 1;
        self.pulse_now = true;
        Ok(id)
    }

    /// Returns the ids of the keys that datagrams are opened with.
    pub fn key_ids(&self) -> impl Iterator<Item = u32> + '_ {
        let previous = self.previous.as_ref().map(|(connection, _)| connection);
        let connections = self.current.iter().chain(previous);
        connections.map(|connection| connection.opener.key_id())
    }

    /// Returns the peer's address.
    pub fn address(&self) -> Option<A> {
        self.address
    }

    /// Sets the peer's address, as another path was chosen.
    pub fn set_address(&mut self, now: Duration, address: A) {
        if self.address != Some(address) {
            self.address = Some(address);
            self.mtu.reset(now);
        }
    }

    /// Returns the largest datagram that passes, as a UDP payload in bytes.
    pub fn mtu_bytes(&self) -> usize {
        usize::from(self.mtu.bytes())
    }

    /// Returns the longest payload of a datagram, in bytes: what [`Cut`] and
    /// [`crate::fragment::Split`] may use.
    pub fn payload_max(&self) -> usize {
        self.mtu_bytes().saturating_sub(OVERHEAD_BYTES)
    }

    /// Returns what was counted.
    pub fn counters(&self) -> SessionCounters {
        let mut counters = self.counters;
        let previous = self.previous.as_ref().map(|(connection, _)| connection);
        for connection in self.current.iter().chain(previous) {
            add(&mut counters.opened, connection.opener.counters());
        }
        counters
    }

    /// Takes the next event.
    pub fn poll_event(&mut self) -> Option<SessionEvent<A>> {
        self.events.pop_front()
    }

    fn event(&mut self, event: SessionEvent<A>) {
        if self.events.len() < EVENTS_MAX {
            self.events.push_back(event);
        }
    }

    /// Seals datagrams for one send, as [`Sealer::seal_batch`]. Returns where they go.
    pub fn seal_batch(
        &mut self,
        now: Duration,
        kind: Kind,
        network: NetworkId,
        datagrams: &mut [u8],
        stride: usize,
    ) -> Result<A, SessionError> {
        let to = self.address.ok_or(SessionError::NoAddress)?;
        let connection = match &mut self.previous {
            Some((previous, until)) if now < self.wait_until && now < *until => previous,
            _ => self.current.as_mut().ok_or(SessionError::NotConnected)?,
        };
        let seen = connection.opener.seen();
        let sealer = &mut connection.sealer;
        sealer.seal_batch(now, seen, kind, network, datagrams, stride)?;
        self.counters.sent += datagrams.len().div_ceil(stride) as u64;
        self.counters.sent_bytes += datagrams.len() as u64;
        // A probe may be too large to arrive.
        if kind != Kind::MtuProbe {
            self.last_sent = now;
            self.mtu.sent(stride.min(datagrams.len()));
        }
        Ok(to)
    }

    /// Seals the segments of a frame from number `first` on, as many as fit into one send and into
    /// `out`.
    pub fn seal_cut(
        &mut self,
        now: Duration,
        network: NetworkId,
        cut: &Cut<'_>,
        first: usize,
        out: &mut [u8],
    ) -> Result<Batch<A>, SessionError> {
        let room = out.len().min(BATCH_BYTES_MAX);
        let out = out.get_mut(..room).unwrap_or_default();
        let stride = OVERHEAD_BYTES + cut.segment_bytes();
        let (mut count, mut bytes) = (0, 0);
        while count < BATCH_DATAGRAMS_MAX && first + count < cut.count() {
            let payload = out.get_mut(count * stride + HEADER_BYTES..);
            let payload = payload.unwrap_or_default();
            let room = payload.len().saturating_sub(TAG_BYTES);
            let Some(length) = cut.write(first + count, &mut payload[..room]) else {
                break;
            };
            bytes = count * stride + length + OVERHEAD_BYTES;
            count += 1;
        }
        let datagrams = out.get_mut(..bytes).unwrap_or_default();
        let to = self.seal_batch(now, Kind::Frame, network, datagrams, stride)?;
        Ok(Batch {
            to,
            count,
            bytes,
            stride,
        })
    }

    /// Opens a datagram that came from an address, in place. Keepalives and what concerns the MTU
    /// need nothing else to be done. The other messages of a control datagram are the caller's.
    pub fn open<'a>(
        &mut self,
        now: Duration,
        from: A,
        datagram: &'a mut [u8],
    ) -> Result<Opened<'a>, OpenError> {
        self.expire(now);
        let bytes = datagram.len();
        let Some(id) = seal::key_id(datagram) else {
            self.counters.opened.malformed += 1;
            return Err(OpenError::Malformed);
        };
        let is = |connection: &Connection| connection.opener.key_id() == id;
        let is_current = self.current.as_ref().is_some_and(is);
        let connection = match (&mut self.current, &mut self.previous) {
            (Some(current), _) if is_current => current,
            (_, Some((previous, _))) if previous.opener.key_id() == id => previous,
            _ => {
                self.counters.opened.malformed += 1;
                return Err(OpenError::KeyId);
            }
        };
        let opened = connection.opener.open(now, datagram)?;
        connection.sealer.confirmed(opened.seen);
        self.counters.received += 1;
        self.counters.received_bytes += bytes as u64;
        self.last_received = now;
        self.mtu.heard(now);
        if std::mem::take(&mut self.silent) {
            self.event(SessionEvent::Heard);
        }
        if is_current {
            self.wait_until = self.wait_until.min(now);
            if opened.newest {
                self.follow(now, from);
            }
        }
        match opened.kind {
            Kind::Control => self.take_control(now, opened.payload),
            Kind::MtuProbe => self.take_probe(opened.payload, bytes),
            Kind::Frame | Kind::Fragment | Kind::PathProbe => {}
        }
        Ok(opened)
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

    /// Lets the peer's address follow its newest datagram.
    fn follow(&mut self, now: Duration, from: A) {
        match self.address {
            Some(address) if address == from => {}
            Some(address) if self.config.roaming => {
                self.counters.roamed += 1;
                self.event(SessionEvent::Roamed {
                    from: address,
                    to: from,
                });
                self.set_address(now, from);
            }
            Some(_) => {}
            None => self.set_address(now, from),
        }
    }

    fn take_control(&mut self, now: Duration, payload: &[u8]) {
        let mut changes = Vec::new();
        let read = control::read(payload, |message| {
            if let Message::MtuAnswer { id, bytes } = message {
                changes.extend(self.mtu.answered(now, id, bytes));
            }
        });
        self.counters.malformed += u64::from(read.is_err());
        for change in changes {
            self.mtu_changed(change);
        }
    }

    fn take_probe(&mut self, payload: &[u8], bytes: usize) {
        let (Some(id), Ok(bytes)) = (payload.first_chunk(), u16::try_from(bytes)) else {
            self.counters.malformed += 1;
            return;
        };
        if self.answers.len() < ANSWERS_MAX {
            self.answers.push_back(Probe {
                id: u32::from_le_bytes(*id),
                bytes,
            });
        }
    }

    fn mtu_changed(&mut self, change: MtuChange) {
        self.event(SessionEvent::Mtu {
            bytes: self.mtu.bytes(),
            black_hole: change == MtuChange::BlackHole,
        });
    }

    /// Notes that this host's own network refused a datagram as too long (`EMSGSIZE`).
    pub fn refused(&mut self, now: Duration, bytes: u16) {
        let change = self.mtu.refused(now, bytes);
        change
            .into_iter()
            .for_each(|change| self.mtu_changed(change));
    }

    /// Ends what has its time.
    fn expire(&mut self, now: Duration) {
        if let Some((previous, _)) = self.previous.take_if(|(_, until)| *until <= now) {
            add(&mut self.counters.opened, previous.opener.counters());
        }
    }

    /// Writes the next datagram that the session itself wants to send into `out`: an answer to a
    /// probe, a probe, a keepalive. Returns where it goes, and its length. To be called at
    /// [`Self::deadline`] and after datagrams were opened, until there is none.
    ///
    /// `out` must be as long as the largest size of [`MtuConfig`]; probes that do not fit are lost.
    pub fn poll_transmit(&mut self, now: Duration, out: &mut [u8]) -> Option<(A, usize)> {
        self.expire(now);
        if self.current.is_none() || self.address.is_none() {
            return None;
        }
        let quiet = now.saturating_sub(self.last_received) >= self.config.silent_after;
        if quiet && !self.silent {
            self.silent = true;
            self.event(SessionEvent::Silent);
        }
        if let Some(Probe { id, bytes }) = self.answers.pop_front() {
            let mut message = [0; MESSAGE_BYTES_MAX];
            let length = Message::MtuAnswer { id, bytes }.write(&mut message)?;
            return self.transmit(now, Kind::Control, &message[..length], out);
        }
        let (probe, change) = self.mtu.poll(now);
        change
            .into_iter()
            .for_each(|change| self.mtu_changed(change));
        if let Some(probe) = probe {
            self.echo = true;
            return self.transmit_probe(now, probe, out);
        }
        if std::mem::take(&mut self.echo) {
            let echo = Probe { id: 0, bytes: 0 };
            return self.transmit_probe(now, echo, out);
        }
        let due = now.saturating_sub(self.last_sent) >= self.config.pulse;
        if due || std::mem::take(&mut self.pulse_now) {
            self.pulse_now = false;
            self.counters.pulses += 1;
            // A pulse that cannot be sealed is not tried again at once.
            self.last_sent = now;
            return self.transmit(now, Kind::Control, &[], out);
        }
        None
    }

    /// Sends a probe, with at least its id.
    fn transmit_probe(
        &mut self,
        now: Duration,
        probe: Probe,
        out: &mut [u8],
    ) -> Option<(A, usize)> {
        let bytes = usize::from(probe.bytes).max(OVERHEAD_BYTES + PROBE_ID_BYTES);
        let datagram = out.get_mut(..bytes)?;
        datagram.fill(0);
        datagram[HEADER_BYTES..HEADER_BYTES + PROBE_ID_BYTES]
            .copy_from_slice(&probe.id.to_le_bytes());
        self.transmit_sealed(now, Kind::MtuProbe, datagram)
    }

    fn transmit(
        &mut self,
        now: Duration,
        kind: Kind,
        payload: &[u8],
        out: &mut [u8],
    ) -> Option<(A, usize)> {
        let datagram = out.get_mut(..OVERHEAD_BYTES + payload.len())?;
        datagram[HEADER_BYTES..HEADER_BYTES + payload.len()].copy_from_slice(payload);
        self.transmit_sealed(now, kind, datagram)
    }

    fn transmit_sealed(
        &mut self,
        now: Duration,
        kind: Kind,
        datagram: &mut [u8],
    ) -> Option<(A, usize)> {
        let stride = datagram.len();
        let sealed = self.seal_batch(now, kind, NetworkId::NONE, datagram, stride);
        sealed.ok().map(|to| (to, stride))
    }

    /// Returns when [`Self::poll_transmit`] is to be called again at the latest; `None` without
    /// keys or address.
    pub fn deadline(&self) -> Option<Duration> {
        self.current.as_ref()?;
        self.address?;
        if self.pulse_now || self.echo || !self.answers.is_empty() {
            return Some(Duration::ZERO);
        }
        let pulse = self.last_sent + self.config.pulse;
        let silent = self.last_received + self.config.silent_after;
        let silent = (!self.silent).then_some(silent);
        let previous = self.previous.as_ref().map(|(_, until)| *until);
        let others = [self.mtu.deadline(), silent, previous];
        others.into_iter().flatten().chain([pulse]).min()
    }
}

#[cfg(test)]
mod tests;
