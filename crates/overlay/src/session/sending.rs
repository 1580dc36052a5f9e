//! The half of a session that seals what is sent, and decides what the session itself sends.

use super::mtu::{Discovery, MtuChange, Probe};
use super::receiving::Receiving;
use super::{
    BATCH_BYTES_MAX, BATCH_DATAGRAMS_MAX, Batch, Keys, SessionConfig, SessionCounters,
    SessionError, SessionEvent,
};
use crate::address::NetworkId;
use crate::control::{MESSAGE_BYTES_MAX, Message};
use crate::offload::Cut;
use crate::seal::{HEADER_BYTES, Kind, OVERHEAD_BYTES, Sealer, Side, TAG_BYTES};
use std::collections::VecDeque;
use std::time::Duration;

/// Most answers to MTU probes that wait to be sent. Further probes are not answered.
const ANSWERS_MAX: usize = 8;
/// Most events that wait to be taken. Further ones are dropped.
const EVENTS_MAX: usize = 64;
/// Bytes in front of the zeros of an MTU probe.
const PROBE_ID_BYTES: usize = 4;

/// What seals the datagrams of one connection.
#[derive(Debug)]
struct Sealing {
    sealer: Sealer,
    /// The id of the keys of the other direction.
    id: u32,
    /// What is said to the peer: the epoch of which a datagram was opened.
    seen: u8,
}

/// The half of a session that seals.
#[derive(Debug)]
pub struct Sending<A> {
    config: SessionConfig,
    address: Option<A>,
    current: Option<Sealing>,
    previous: Option<(Sealing, Duration)>,
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

impl<A: Copy + Eq> Sending<A> {
    pub(super) fn new(now: Duration, config: SessionConfig, address: Option<A>) -> Self {
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

    /// Takes the keys of a new connection, for both halves. See [`super::Session::connected`].
    pub fn connected(&mut self, now: Duration, keys: Keys, receiving: &mut Receiving<A>) {
        let id = keys.id();
        let (sealer, opener, side) = keys.apart();
        receiving.connected(now, opener);
        let sealing = Sealing {
            sealer,
            id,
            seen: 0,
        };
        let before = self.current.replace(sealing);
        self.previous = before.map(|before| (before, now + self.config.previous_grace));
        self.wait_until = match side {
            Side::Dialler => now + self.config.confirm_grace,
            Side::Listener => now,
        };
        self.counters.connections += 1;
        self.pulse_now = true;
    }

    /// Takes over what the receiving half found.
    pub fn learn(&mut self, now: Duration, receiving: &mut Receiving<A>) {
        self.last_received = self.last_received.max(receiving.last_received);
        self.mtu.heard(self.last_received);
        if !std::mem::take(&mut receiving.news.any) {
            receiving.silent = self.silent;
            return;
        }
        let quiet = now.saturating_sub(self.last_received) >= self.config.silent_after;
        if self.silent && !quiet {
            self.silent = false;
            self.event(SessionEvent::Heard);
        }
        receiving.silent = self.silent;
        for opening in receiving.openings() {
            let previous = self.previous.as_mut().map(|(sealing, _)| sealing);
            let all = self.current.iter_mut().chain(previous);
            let id = opening.opener.key_id();
            for sealing in all.filter(|sealing| sealing.id == id) {
                sealing.seen = opening.opener.seen();
                sealing.sealer.confirmed(opening.peer_seen);
            }
        }
        if receiving
            .current
            .as_ref()
            .is_some_and(|opening| opening.used)
        {
            self.wait_until = self.wait_until.min(now);
        }
        if let Some(address) = receiving.news.moved_to.take() {
            self.follow(now, address);
        }
        for Probe { id, bytes } in receiving.news.answers.drain(..) {
            let change = self.mtu.answered(now, id, bytes);
            self.mtu_changed(change);
        }
        for probe in receiving.news.probes.drain(..) {
            if self.answers.len() < ANSWERS_MAX {
                self.answers.push_back(probe);
            }
        }
    }

    fn follow(&mut self, now: Duration, to: A) {
        if let Some(from) = self.address.filter(|from| *from != to) {
            self.counters.roamed += 1;
            self.event(SessionEvent::Roamed { from, to });
        }
        self.change_address(now, Some(to));
    }

    fn change_address(&mut self, now: Duration, address: Option<A>) {
        if self.address != address {
            self.address = address;
            self.mtu.reset(now);
        }
    }

    /// Returns the peer's address.
    pub fn address(&self) -> Option<A> {
        self.address
    }

    /// Sets the peer's address in both halves, as another path was chosen, or none works.
    pub fn set_address(&mut self, now: Duration, to: Option<A>, receiving: &mut Receiving<A>) {
        receiving.address = to;
        receiving.news.moved_to = None;
        self.change_address(now, to);
    }

    /// Whether there are keys.
    pub fn is_connected(&self) -> bool {
        self.current.is_some()
    }

    /// Whether nothing was received for a while.
    pub fn is_silent(&self) -> bool {
        self.silent
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

    pub(super) fn counters(&self) -> &SessionCounters {
        &self.counters
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
        self.seal_for_any(now, kind, network, datagrams, stride)?;
        Ok(to)
    }

    /// Seals datagrams as [`Self::seal_batch`], for whatever way the caller sends them on.
    pub fn seal_for_any(
        &mut self,
        now: Duration,
        kind: Kind,
        network: NetworkId,
        datagrams: &mut [u8],
        stride: usize,
    ) -> Result<(), SessionError> {
        let sealing = match &mut self.previous {
            Some((previous, until)) if now < self.wait_until && now < *until => previous,
            _ => self.current.as_mut().ok_or(SessionError::NotConnected)?,
        };
        let seen = sealing.seen;
        let sealer = &mut sealing.sealer;
        sealer.seal_batch(now, seen, kind, network, datagrams, stride)?;
        self.counters.sent += datagrams.len().div_ceil(stride) as u64;
        self.counters.sent_bytes += datagrams.len() as u64;
        // A probe may be too large to arrive, or take another path.
        if !matches!(kind, Kind::MtuProbe | Kind::PathProbe) {
            self.last_sent = now;
            self.mtu.sent(stride.min(datagrams.len()));
        }
        Ok(())
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
        let kind = if cut.is_short() {
            Kind::ShortSegment
        } else {
            Kind::Frame
        };
        let to = self.seal_batch(now, kind, network, datagrams, stride)?;
        Ok(Batch {
            to,
            count,
            bytes,
            stride,
        })
    }

    fn mtu_changed(&mut self, change: Option<MtuChange>) {
        if let Some(change) = change {
            self.event(SessionEvent::Mtu {
                bytes: self.mtu.bytes(),
                black_hole: change == MtuChange::BlackHole,
            });
        }
    }

    /// Notes that this host's own network refused a datagram as too long (`EMSGSIZE`).
    pub fn refused(&mut self, now: Duration, bytes: u16) {
        let change = self.mtu.refused(now, bytes);
        self.mtu_changed(change);
    }

    /// Writes the next datagram that the session itself wants to send into `out`: an answer to a
    /// probe, a probe, a keepalive. Returns where it goes, and its length. To be called, after
    /// [`Self::learn`], at [`Self::deadline`] and when there is news, until there is none.
    ///
    /// `out` must be as long as the largest size of [`super::MtuConfig`]; probes that do not fit
    /// are lost.
    pub fn poll_transmit(&mut self, now: Duration, out: &mut [u8]) -> Option<(A, usize)> {
        self.previous.take_if(|(_, until)| *until <= now);
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
        self.mtu_changed(change);
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
