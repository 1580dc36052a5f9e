//! Tests two sessions against each other over a path that is made of rules.

use super::*;
use crate::offload::{Gso, VirtioHeader};

const SECRET: [u8; EXPORTED_BYTES] = [3; EXPORTED_BYTES];
const NETWORK: NetworkId = NetworkId(5);
const SUITE: Suite = Suite::Aes256Gcm;

/// Two hosts, and the path between them.
struct Pair {
    now: Duration,
    /// The dialler and the listener.
    hosts: [Session<u8>; 2],
    /// The addresses under which each is seen.
    addresses: [u8; 2],
    carries: usize,
    cut_off: bool,
    delivered: usize,
}

impl Pair {
    fn new() -> Self {
        let now = Duration::from_secs(500);
        let mut pair = Self {
            now,
            hosts: [1, 0].map(|peer| Session::new(now, SessionConfig::default(), Some(peer))),
            addresses: [0, 1],
            carries: 1472,
            cut_off: false,
            delivered: 0,
        };
        pair.connect(&SECRET);
        pair
    }

    fn connect(&mut self, secret: &[u8; EXPORTED_BYTES]) {
        for (host, side) in self.hosts.iter_mut().zip([Side::Dialler, Side::Listener]) {
            host.connected(self.now, secret, side, SUITE).unwrap();
        }
    }

    /// Sends what the sessions want to send, until time `until`.
    fn run(&mut self, until: Duration) {
        loop {
            let deadlines = self.hosts.iter().filter_map(Session::deadline);
            let Some(next) = deadlines.min().filter(|next| *next <= until) else {
                break;
            };
            self.now = self.now.max(next);
            for from in 0..2 {
                let mut out = [0; 2000];
                while let Some((to, bytes)) = self.hosts[from].poll_transmit(self.now, &mut out) {
                    assert_eq!(to, self.addresses[1 - from]);
                    self.deliver(from, &mut out[..bytes]);
                }
            }
        }
        self.now = self.now.max(until);
    }

    fn pass(&mut self, seconds: u64) {
        self.run(self.now + Duration::from_secs(seconds));
    }

    fn deliver(&mut self, from: usize, datagram: &mut [u8]) {
        if !self.cut_off && datagram.len() <= self.carries {
            let address = self.addresses[from];
            self.hosts[1 - from]
                .open(self.now, address, datagram)
                .unwrap();
            self.delivered += 1;
        }
    }

    fn seal(&mut self, from: usize, bytes: usize) -> Vec<u8> {
        let mut datagram = vec![0; bytes];
        let session = &mut self.hosts[from];
        session
            .seal_batch(self.now, Kind::Frame, NETWORK, &mut datagram, bytes)
            .unwrap();
        datagram
    }

    fn events(&mut self, host: usize) -> Vec<SessionEvent<u8>> {
        std::iter::from_fn(|| self.hosts[host].poll_event()).collect()
    }
}

#[test]
fn the_mtu_is_found_by_both() {
    let mut pair = Pair::new();
    pair.carries = 1400;
    assert_eq!(pair.hosts[0].payload_max(), 1160);
    pair.pass(30);
    for host in 0..2 {
        let found = pair.hosts[host].mtu_bytes();
        assert!((1393..=1400).contains(&found), "{found}");
        let events = pair.events(host);
        assert!(matches!(
            events[..],
            [
                ..,
                SessionEvent::Mtu {
                    black_hole: false,
                    ..
                }
            ]
        ));
    }
    // The path gets smaller while it is used.
    pair.carries = 1300;
    for _ in 0..40 {
        let bytes = pair.hosts[0].mtu_bytes().min(1390);
        let mut datagram = pair.seal(0, bytes);
        pair.deliver(0, &mut datagram);
        pair.pass(1);
    }
    assert!((1293..=1300).contains(&pair.hosts[0].mtu_bytes()));
    let black_hole = SessionEvent::Mtu {
        bytes: 1200,
        black_hole: true,
    };
    assert!(pair.events(0).contains(&black_hole));
    pair.hosts[1].refused(pair.now, 1250);
    assert_eq!(pair.events(1), [black_hole]);
}

#[test]
fn pulses_are_suspended_while_there_is_traffic() {
    let mut pair = Pair::new();
    pair.pass(2);
    let before = pair.hosts[0].counters().pulses;
    pair.pass(100);
    assert_eq!(pair.hosts[0].counters().pulses, before + 20);
    for _ in 0..50 {
        let mut datagram = pair.seal(0, 100);
        pair.deliver(0, &mut datagram);
        pair.pass(2);
    }
    let after = pair.hosts[0].counters();
    assert_eq!(after.pulses, before + 20);
    assert!(pair.hosts[1].counters().pulses > before + 30);
    assert!(!pair.events(0).contains(&SessionEvent::Silent));
    pair.cut_off = true;
    pair.pass(100);
    pair.cut_off = false;
    pair.pass(10);
    for host in 0..2 {
        let events = pair.events(host);
        let silence: Vec<_> = events
            .iter()
            .filter(|event| matches!(event, SessionEvent::Silent | SessionEvent::Heard))
            .collect();
        assert_eq!(silence, [&SessionEvent::Silent, &SessionEvent::Heard]);
    }
}

#[test]
fn the_address_follows_the_newest_datagram() {
    let mut pair = Pair::new();
    pair.pass(10);
    pair.events(1);
    let mut late = pair.seal(0, 100);
    let mut forged = pair.seal(0, 100);
    let mut newest = pair.seal(0, 100);
    let mut again = newest.clone();
    forged[50] ^= 1;
    let now = pair.now;
    let peer = &mut pair.hosts[1];
    assert_eq!(peer.open(now, 7, &mut forged), Err(OpenError::Forged));
    assert_eq!(peer.address(), Some(0));
    assert!(peer.open(now, 9, &mut newest).is_ok());
    assert_eq!(peer.address(), Some(9));
    assert_eq!(peer.open(now, 8, &mut again), Err(OpenError::Replayed));
    assert!(peer.open(now, 8, &mut late).is_ok(), "an older counter");
    assert_eq!(peer.address(), Some(9));
    assert_eq!(peer.mtu_bytes(), 1200, "another path");
    assert_eq!(pair.events(1), [SessionEvent::Roamed { from: 0, to: 9 }]);
    pair.addresses[0] = 9;
    pair.pass(10);
    assert_eq!(pair.hosts[1].mtu_bytes(), 1472);
    let counters = pair.hosts[1].counters();
    assert_eq!((counters.roamed, counters.opened.forged), (1, 1));
    assert_eq!(counters.opened.replayed, 1);
    assert_eq!(counters.opened.opened, counters.received);
}

#[test]
fn a_new_connection_loses_no_datagram() {
    let mut pair = Pair::new();
    pair.pass(10);
    let mut under_way = pair.seal(1, 100);
    // The dialler has the new keys first.
    let (secret, now) = ([4; EXPORTED_BYTES], pair.now);
    let id = pair.hosts[0]
        .connected(now, &secret, Side::Dialler, SUITE)
        .unwrap();
    assert_eq!(pair.hosts[0].key_ids().next(), Some(id));
    assert_eq!(pair.hosts[0].key_ids().count(), 2);
    for _ in 0..3 {
        let mut datagram = pair.seal(0, 100);
        assert!(
            pair.hosts[1]
                .key_ids()
                .any(|id| seal::key_id(&datagram) == Some(id))
        );
        pair.deliver(0, &mut datagram);
    }
    pair.hosts[1]
        .connected(now, &secret, Side::Listener, SUITE)
        .unwrap();
    let mut old = pair.seal(0, 100);
    pair.deliver(0, &mut old);
    pair.deliver(1, &mut under_way);
    pair.pass(1);
    // The listener's keepalive came, so both use the new keys.
    for host in 0..2 {
        let datagram = pair.seal(host, 100);
        let id = pair.hosts[1 - host].key_ids().next();
        assert_eq!(seal::key_id(&datagram), id);
    }
    pair.pass(15);
    assert_eq!(pair.hosts[0].key_ids().count(), 1);
    let mut old = vec![4; 100];
    let result = pair.hosts[0].open(pair.now, 1, &mut old);
    assert_eq!(result.err(), Some(OpenError::Malformed));
    let counters = pair.hosts[0].counters();
    assert_eq!(counters.connections, 2);
    assert_eq!(counters.opened.opened, counters.received);
}

#[test]
fn a_super_frame_is_sealed_in_batches() {
    let mut pair = Pair::new();
    pair.pass(10);
    let mut frame = vec![0; 14 + 65_535];
    frame[12..17].copy_from_slice(&[8, 0, 0x45, 0, 0xff]);
    frame[17] = 0xff;
    frame[23] = 6;
    frame[46] = 0x50;
    let virtio = VirtioHeader {
        needs_checksum: true,
        gso: Gso::Tcp4,
        segment_bytes: 1460,
        checksum_start: 34,
        checksum_offset: 16,
        ..VirtioHeader::default()
    };
    let now = pair.now;
    let [from, to] = &mut pair.hosts;
    let cut = Cut::new(virtio, &frame, from.payload_max()).unwrap();
    assert_eq!(cut.segment_bytes(), 1432);
    let (mut first, mut payload) = (0, 0);
    let mut batches = Vec::new();
    while first < cut.count() {
        let mut out = vec![0; 70_000];
        let batch = from.seal_cut(now, NETWORK, &cut, first, &mut out).unwrap();
        assert!(batch.bytes <= BATCH_BYTES_MAX && batch.stride == 1472 && batch.to == 1);
        to.open_batch(now, 0, &mut out[..batch.bytes], batch.stride, |opened| {
            payload += opened.unwrap().payload.len() - 64;
        });
        first += batch.count;
        batches.push(batch.count);
    }
    assert_eq!((payload, batches), (65_495, vec![44, 4]));
    let mut short = [0; 1471];
    let result = from.seal_cut(now, NETWORK, &cut, 0, &mut short);
    assert_eq!(result, Err(SessionError::Seal(SealError::Length)));
}

#[test]
fn short_segments_are_sealed_as_such() {
    let mut pair = Pair::new();
    pair.pass(10);
    let mut frame = vec![0; 54 + 6000];
    frame[12..17].copy_from_slice(&[8, 0, 0x45, 0, 6040u16.to_be_bytes()[0]]);
    frame[17] = 6040u16.to_be_bytes()[1];
    frame[20..24].copy_from_slice(&[0x40, 0, 64, 6]);
    // Without addresses, little else is summed up.
    let sum = !(0x4500 + 6040 + 0x4000 + 0x4006u16);
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    frame[46] = 0x50;
    frame[50..52].copy_from_slice(&6026u16.to_be_bytes());
    let virtio = VirtioHeader {
        needs_checksum: true,
        gso: Gso::Tcp4,
        segment_bytes: 1460,
        checksum_start: 34,
        checksum_offset: 16,
        ..VirtioHeader::default()
    };
    let now = pair.now;
    let [from, to] = &mut pair.hosts;
    let cut = Cut::new(virtio, &frame, from.payload_max()).unwrap();
    assert!(cut.is_short());
    let mut out = vec![0; 70_000];
    let batch = from.seal_cut(now, NETWORK, &cut, 0, &mut out).unwrap();
    assert_eq!((batch.count, batch.stride), (5, 1472));
    let mut payload = 0;
    to.open_batch(now, 0, &mut out[..batch.bytes], batch.stride, |opened| {
        let opened = opened.unwrap();
        assert_eq!(opened.kind, Kind::ShortSegment);
        payload += opened.payload.len() - 40;
    });
    assert_eq!(payload, 6000);
}

#[test]
fn nothing_is_sent_without_keys_or_address() {
    let now = Duration::from_secs(1);
    let mut session = Session::<u8>::new(now, SessionConfig::default(), None);
    let mut datagram = [0; 100];
    let mut seal = |session: &mut Session<u8>| {
        session.seal_batch(now, Kind::Frame, NETWORK, &mut datagram, 100)
    };
    assert_eq!(seal(&mut session), Err(SessionError::NoAddress));
    session.set_address(now, 3);
    assert_eq!(seal(&mut session), Err(SessionError::NotConnected));
    assert_eq!(session.deadline(), None);
    assert_eq!(session.poll_transmit(now, &mut [0; 2000]), None);
    session
        .connected(now, &SECRET, Side::Dialler, SUITE)
        .unwrap();
    assert_eq!(seal(&mut session), Ok(3));
    assert_eq!(session.deadline(), Some(Duration::ZERO));
}
