//! A peer: both halves of its session, and how frames and messages are sent to it.

use super::event::PlaneEvent;
use super::shared::{Shared, count, lock};
use super::socket::{SendError, Way};
use super::status::PeerStatus;
use longhaul_overlay::control::{MESSAGE_BYTES_MAX, Message};
use longhaul_overlay::fragment::{Reassembler, Split};
use longhaul_overlay::offload::{
    Checksums, Cut, CutError, SCRATCH_BYTES, VIRTIO_BYTES, VirtioHeader, finish,
};
use longhaul_overlay::seal::{HEADER_BYTES, Kind, OVERHEAD_BYTES, SealError};
use longhaul_overlay::session::{
    BATCH_BYTES_MAX, BATCH_DATAGRAMS_MAX, Batch, Keys, Receiving, Sending, SessionCounters,
    SessionError, SessionEvent,
};
use longhaul_overlay::{NetworkId, Session};
use longhaul_protocol::HostId;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// Datagrams that a session itself sends at most at a time.
const OWN_DATAGRAMS_MAX: usize = 32;
/// Room for the largest message that a session itself sends. Probes of the MTU may be longer.
const OWN_BYTES_MIN: usize = OVERHEAD_BYTES + MESSAGE_BYTES_MAX;
/// The time of a peer that is not to be served.
const NEVER: u64 = u64::MAX;

/// Buffers of a thread.
#[derive(Debug)]
pub(super) struct Scratch {
    /// A batch of datagrams.
    out: Vec<u8>,
    /// A frame that is finished in software.
    finished: Vec<u8>,
    /// The same, for the TAP device.
    pub(super) device: Vec<u8>,
}

impl Scratch {
    pub(super) fn new() -> Self {
        Self {
            out: vec![0; BATCH_BYTES_MAX],
            finished: Vec::new(),
            device: Vec::new(),
        }
    }
}

/// What opens a peer's datagrams.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) session: Receiving<Way>,
    pub(super) reassembler: Reassembler,
}

#[derive(Debug)]
pub(super) struct Peer {
    pub(super) host: HostId,
    incoming: Mutex<Incoming>,
    sending: Mutex<Sending<Way>>,
    /// The longest payload of a datagram, for those who do not hold the lock.
    payload_max: AtomicUsize,
    next_fragments: AtomicU32,
    /// When the session is to be served, in microseconds since the plane began.
    due_us: AtomicU64,
    /// Batches of frames and messages that were sent, without keepalives and probes.
    batches: AtomicU64,
    pub(super) reported_foreign: AtomicBool,
    reported_unsent: AtomicBool,
    reported_exhausted: AtomicBool,
}

impl Peer {
    pub(super) fn new(shared: &Shared, host: HostId) -> Self {
        let session = Session::new(shared.now(), shared.config.session, None);
        let payload_max = AtomicUsize::new(session.payload_max());
        let (sending, receiving) = session.split();
        Self {
            host,
            incoming: Mutex::new(Incoming {
                session: receiving,
                reassembler: Reassembler::new(),
            }),
            sending: Mutex::new(sending),
            payload_max,
            next_fragments: AtomicU32::new(0),
            due_us: AtomicU64::new(NEVER),
            batches: AtomicU64::new(0),
            reported_foreign: AtomicBool::new(false),
            reported_unsent: AtomicBool::new(false),
            reported_exhausted: AtomicBool::new(false),
        }
    }

    /// Returns when the session is to be served, in time since the plane began; `None`: not before
    /// something happens.
    pub(super) fn due(&self) -> Option<Duration> {
        let due_us = self.due_us.load(Ordering::Relaxed);
        (due_us != NEVER).then(|| Duration::from_micros(due_us))
    }

    /// Returns a number that grows while frames are sent.
    pub(super) fn batches(&self) -> u64 {
        self.batches.load(Ordering::Relaxed)
    }

    pub(super) fn incoming(&self) -> MutexGuard<'_, Incoming> {
        lock(&self.incoming)
    }

    pub(super) fn connected(&self, shared: &Shared, keys: Keys) {
        let now = shared.now();
        let mut incoming = self.incoming();
        lock(&self.sending).connected(now, keys, &mut incoming.session);
        self.reported_exhausted.store(false, Ordering::Relaxed);
        self.serve(shared, now, &mut incoming);
    }

    pub(super) fn set_way(&self, shared: &Shared, way: Option<Way>) {
        let now = shared.now();
        let mut incoming = self.incoming();
        lock(&self.sending).set_address(now, way, &mut incoming.session);
        self.serve(shared, now, &mut incoming);
    }

    pub(super) fn status(&self) -> PeerStatus {
        let incoming = self.incoming();
        let sending = lock(&self.sending);
        PeerStatus {
            host: self.host,
            connected: sending.is_connected(),
            way: sending.address(),
            mtu_bytes: sending.mtu_bytes(),
            silent: sending.is_silent(),
            session: SessionCounters::of(&sending, &incoming.session),
            fragments: *incoming.reassembler.counters(),
        }
    }

    /// Sends what the session itself wants to send, and reports what it found. Wakes the timer for
    /// the next time.
    pub(super) fn serve(&self, shared: &Shared, now: Duration, incoming: &mut Incoming) {
        self.serve_once(shared, now, incoming);
        if let Some(due) = self.due() {
            shared.alarm.at_latest(due);
        }
    }

    /// The same, for the timer itself.
    pub(super) fn serve_once(&self, shared: &Shared, now: Duration, incoming: &mut Incoming) {
        incoming.session.expire(now);
        incoming.reassembler.tick(now);
        let mut own = Vec::new();
        let mtu = shared.config.session.mtu;
        let mut buffer = vec![0; usize::from(mtu.max.max(mtu.base)).max(OWN_BYTES_MIN)];
        let mut sending = lock(&self.sending);
        sending.learn(now, &mut incoming.session);
        while own.len() < OWN_DATAGRAMS_MAX
            && let Some((way, bytes)) = sending.poll_transmit(now, &mut buffer)
        {
            own.push((way, buffer[..bytes].to_vec()));
        }
        // Whether it is silent is a question to both halves.
        sending.learn(now, &mut incoming.session);
        let events = self.events(&mut sending);
        drop(sending);
        events.into_iter().for_each(|event| shared.event(event));
        for (way, datagram) in own {
            self.send(shared, way, &datagram, datagram.len());
        }
        let sending = lock(&self.sending);
        let due = sending.deadline().map(|due| due.as_micros() + 1);
        let due_us = due.map_or(NEVER, |due| u64::try_from(due).unwrap_or(NEVER));
        // While `sending` is locked: what it finds meanwhile must not be forgotten.
        self.due_us.store(due_us, Ordering::Relaxed);
    }

    /// Returns the events of the session, after whatever may have changed its MTU.
    fn events(&self, sending: &mut Sending<Way>) -> Vec<PlaneEvent> {
        let payload_max = sending.payload_max();
        self.payload_max.store(payload_max, Ordering::Relaxed);
        let peer = self.host;
        let events = std::iter::from_fn(|| sending.poll_event());
        let events = events.map(|event| match event {
            SessionEvent::Silent => PlaneEvent::Silent(peer),
            SessionEvent::Heard => PlaneEvent::Heard(peer),
            SessionEvent::Roamed { to, .. } => PlaneEvent::Roamed { peer, to },
            SessionEvent::Mtu { bytes, black_hole } => PlaneEvent::Mtu {
                peer,
                bytes,
                black_hole,
            },
        });
        events.collect()
    }

    /// Sends sealed datagrams.
    fn send(&self, shared: &Shared, way: Way, datagrams: &[u8], stride: usize) {
        match shared.outlet.send(self.host, way, datagrams, stride) {
            Ok(()) => {
                count(&shared.counters.batches);
                if self.reported_unsent.load(Ordering::Relaxed) {
                    self.reported_unsent.store(false, Ordering::Relaxed);
                }
            }
            Err(SendError::TooLong(bytes)) => {
                let bytes = u16::try_from(bytes).unwrap_or(u16::MAX);
                let events = {
                    let mut sending = lock(&self.sending);
                    sending.refused(shared.now(), bytes);
                    self.due_us.store(0, Ordering::Relaxed);
                    self.events(&mut sending)
                };
                events.into_iter().for_each(|event| shared.event(event));
                shared.alarm.at_latest(Duration::ZERO);
            }
            Err(SendError::Full) => count(&shared.counters.full),
            Err(SendError::Other(error)) => {
                count(&shared.counters.unsent);
                if !self.reported_unsent.swap(true, Ordering::Relaxed) {
                    let peer = self.host;
                    shared.event(PlaneEvent::Unsent { peer, error });
                }
            }
        }
    }

    /// Sends frames or messages.
    fn send_data(&self, shared: &Shared, way: Way, datagrams: &[u8], stride: usize) {
        count(&self.batches);
        self.send(shared, way, datagrams, stride);
    }

    fn not_sealed(&self, shared: &Shared, error: SessionError) {
        count(&shared.counters.not_connected);
        let exhausted = SessionError::Seal(SealError::Exhausted);
        if error == exhausted && !self.reported_exhausted.swap(true, Ordering::Relaxed) {
            shared.event(PlaneEvent::Exhausted(self.host));
        }
    }

    /// Returns the longest payload that a datagram to this peer carries now.
    #[inline]
    pub(super) fn payload_max(&self) -> usize {
        self.payload_max.load(Ordering::Relaxed)
    }

    /// Sends frames that were gathered: `stride` bytes each, with room for headers and tags.
    pub(super) fn send_gathered(
        &self,
        shared: &Shared,
        network: NetworkId,
        datagrams: &mut [u8],
        stride: usize,
    ) {
        let now = shared.now();
        let sealed = lock(&self.sending).seal_batch(now, Kind::Frame, network, datagrams, stride);
        match sealed {
            Ok(way) => self.send_data(shared, way, datagrams, stride),
            Err(error) => self.not_sealed(shared, error),
        }
    }

    /// Sends a frame of a network: as it is, cut, or in fragments.
    pub(super) fn send_frame(
        &self,
        shared: &Shared,
        network: NetworkId,
        virtio: VirtioHeader,
        frame: &[u8],
        scratch: &mut Scratch,
    ) {
        let now = shared.now();
        let Scratch { out, finished, .. } = scratch;
        match self.send_cut(shared, now, network, virtio, frame, out) {
            Ok(()) => {}
            Err(CutError::NeedsFragments) => {
                self.send_fragments(shared, now, network, virtio, frame, out);
            }
            Err(CutError::NeedsSegmentation | CutError::SmallPath) => {
                finished.resize(SCRATCH_BYTES, 0);
                let each = |virtio: &VirtioHeader, frame: &[u8]| {
                    if self
                        .send_cut(shared, now, network, *virtio, frame, out)
                        .is_err()
                    {
                        self.send_fragments(shared, now, network, *virtio, frame, out);
                    }
                };
                if finish(virtio, frame, Checksums::Partial, finished, each).is_err() {
                    count(&shared.counters.uncuttable);
                }
            }
            Err(CutError::Malformed) => count(&shared.counters.uncuttable),
        }
    }

    /// Cuts a frame, if it must be, and sends it in as few batches as possible.
    fn send_cut(
        &self,
        shared: &Shared,
        now: Duration,
        network: NetworkId,
        virtio: VirtioHeader,
        frame: &[u8],
        out: &mut [u8],
    ) -> Result<(), CutError> {
        let mut sending = lock(&self.sending);
        let cut = Cut::new(virtio, frame, sending.payload_max())?;
        let stride = OVERHEAD_BYTES + cut.segment_bytes();
        // Batches of one length: a short one at the end costs as much as a long one.
        let most = (BATCH_BYTES_MAX / stride).clamp(1, BATCH_DATAGRAMS_MAX);
        let each = cut.count().div_ceil(cut.count().div_ceil(most));
        let room = out.len().min(each * stride);
        let mut first = 0;
        loop {
            let sealed = sending.seal_cut(now, network, &cut, first, &mut out[..room]);
            drop(sending);
            let Batch {
                to,
                count,
                bytes,
                stride,
            } = match sealed {
                Ok(batch) => batch,
                Err(error) => {
                    self.not_sealed(shared, error);
                    return Ok(());
                }
            };
            self.send_data(shared, to, &out[..bytes], stride);
            first += count;
            if first >= cut.count() || count == 0 {
                return Ok(());
            }
            sending = lock(&self.sending);
        }
    }

    fn send_fragments(
        &self,
        shared: &Shared,
        now: Duration,
        network: NetworkId,
        virtio: VirtioHeader,
        frame: &[u8],
        out: &mut [u8],
    ) {
        let id = self.next_fragments.fetch_add(1, Ordering::Relaxed);
        let mut sending = lock(&self.sending);
        let split = Split::new(id, VIRTIO_BYTES + frame.len(), sending.payload_max());
        let Ok(split) = split else {
            count(&shared.counters.uncuttable);
            return;
        };
        let head = virtio.to_bytes();
        let stride = OVERHEAD_BYTES + split.fragment_bytes();
        let mut bytes = 0;
        for index in 0..split.count() {
            let start = index * stride;
            let room = out.get_mut(start + HEADER_BYTES..).unwrap_or_default();
            let Some(length) = split.write(index, &head, frame, room) else {
                count(&shared.counters.uncuttable);
                return;
            };
            bytes = start + OVERHEAD_BYTES + length;
        }
        let Some(out) = out.get_mut(..bytes) else {
            count(&shared.counters.uncuttable);
            return;
        };
        let sealed = sending.seal_batch(now, Kind::Fragment, network, out, stride);
        drop(sending);
        match sealed {
            Ok(way) => self.send_data(shared, way, out, stride),
            Err(error) => self.not_sealed(shared, error),
        }
    }

    /// Sends a message that concerns a network.
    pub(super) fn send_message(&self, shared: &Shared, network: NetworkId, message: Message) {
        let mut datagram = [0; OVERHEAD_BYTES + MESSAGE_BYTES_MAX];
        let Some(length) = message.write(&mut datagram[HEADER_BYTES..]) else {
            return;
        };
        let datagram = &mut datagram[..OVERHEAD_BYTES + length];
        let stride = datagram.len();
        let now = shared.now();
        let sealed = lock(&self.sending).seal_batch(now, Kind::Control, network, datagram, stride);
        match sealed {
            Ok(way) => self.send_data(shared, way, datagram, stride),
            Err(error) => self.not_sealed(shared, error),
        }
    }

    /// Seals a path probe and sends it on a way, whatever way is in use.
    pub(super) fn send_probe(
        &self,
        shared: &Shared,
        way: Way,
        payload: &[u8],
    ) -> Result<(), SessionError> {
        let mut datagram = vec![0; OVERHEAD_BYTES + payload.len()];
        datagram[HEADER_BYTES..HEADER_BYTES + payload.len()].copy_from_slice(payload);
        let stride = datagram.len();
        lock(&self.sending).seal_for_any(
            shared.now(),
            Kind::PathProbe,
            NetworkId::NONE,
            &mut datagram,
            stride,
        )?;
        match shared.outlet.send(self.host, way, &datagram, stride) {
            Ok(()) => {}
            // What is lost is probed again.
            Err(SendError::Full) => count(&shared.counters.full),
            Err(error) => {
                count(&shared.counters.unsent);
                tracing::debug!(peer = ?self.host, %way, %error, "cannot send a probe");
            }
        }
        Ok(())
    }
}
