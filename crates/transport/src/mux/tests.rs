//! Tests the sorting of datagrams, alone and on sockets.

use super::*;
use crate::endpoint::tests::{LONG, pair, still_works};
use crate::quic::{AsyncUdpSocket, RecvMeta, Transmit};
use crate::routes::{RelayLeg, Routes};
use crate::stun::{self, BindingAnswer, BindingRequest, Pending};
use longhaul_paths::SocketId;
use longhaul_protocol::HostId;
use longhaul_realm::protocol::SessionId;
use longhaul_realm::relay::{self, HEADER_BYTES};
use proptest::prelude::*;
use std::collections::HashMap;
use std::future::poll_fn;
use std::io::IoSliceMut;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::UdpSocket;

#[test]
fn the_ranges_of_rfc_9443() {
    let kind = |range: std::ops::RangeInclusive<u8>| {
        let kind = DatagramKind::of(*range.start());
        for first in range {
            assert_eq!(DatagramKind::of(first), kind, "{first}");
        }
        kind
    };
    assert_eq!(kind(0..=3), DatagramKind::Stun);
    assert_eq!(kind(4..=59), DatagramKind::Frame);
    assert_eq!(kind(60..=60), DatagramKind::Relayed);
    assert_eq!(kind(61..=63), DatagramKind::Other);
    assert_eq!(kind(64..=127), DatagramKind::Quic);
    assert_eq!(kind(128..=191), DatagramKind::Other);
    assert_eq!(kind(192..=255), DatagramKind::Quic);
}

const SERVER: HostId = HostId([9; 32]);

/// Records what is not kept. Sessions below 4 are known.
#[derive(Default)]
struct Record {
    frames: Vec<(Way, Vec<u8>)>,
    runs: usize,
    left: Vec<(SocketAddr, Vec<u8>)>,
    others: Vec<Vec<u8>>,
}

fn peer_address(session: u32) -> SocketAddr {
    format!("[100::{session}]:1").parse().unwrap()
}

impl Outlet for Record {
    fn relayed_from(&mut self, server: HostId, session: SessionId) -> Option<SocketAddr> {
        assert_eq!(server, SERVER);
        (session.0 < 4).then(|| peer_address(session.0))
    }

    fn frames(&mut self, way: Way, datagrams: &mut [u8], stride: usize) {
        self.runs += 1;
        for datagram in datagrams.chunks(stride) {
            self.frames.push((way, datagram.to_vec()));
        }
        // What is kept for QUIC does not overlap.
        datagrams.fill(0xee);
    }

    fn stun(&mut self, datagram: &[u8]) {
        self.others.push(datagram.to_vec());
    }

    fn dropped(&mut self, _: DatagramKind, datagram: &[u8]) {
        self.others.push(datagram.to_vec());
    }

    fn left(&mut self, from: SocketAddr, datagram: &[u8], _: usize) {
        self.left.push((from, datagram.to_vec()));
    }
}

proptest! {
    /// Against a reference that judges each datagram alone.
    #[test]
    fn no_datagram_is_lost_or_changed(
        firsts in prop::collection::vec((any::<u8>(), 0..5_u32, any::<u8>(), any::<bool>()), 0..20),
        stride in 1usize..40,
        last in 1usize..40,
        at_server in any::<bool>(),
    ) {
        let datagram = |(index, parts): (usize, &(u8, u32, u8, bool))| {
            let (first, session, inner, is_relayed) = parts;
            let is_last = index + 1 == firsts.len();
            let length = if is_last { last.min(stride) } else { stride };
            let mut datagram = vec![index as u8; length];
            datagram[0] = *first;
            if *is_relayed && length > HEADER_BYTES {
                datagram[..HEADER_BYTES].copy_from_slice(&relay::header(SessionId(*session)));
                datagram[HEADER_BYTES] = *inner;
            }
            datagram
        };
        let datagrams: Vec<Vec<u8>> = firsts.iter().enumerate().map(datagram).collect();
        let mut received = datagrams.concat();
        let mut source = Source::plain("192.0.2.1:7".parse().unwrap());
        source.server = at_server.then_some(SERVER);
        let mut record = Record::default();
        let kept = sort(&mut received, stride, &source, &mut record);

        let (mut quic, mut frames, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for datagram in datagrams {
            let relayed = relay::parse(&datagram).ok();
            let relayed = relayed.filter(|(session, _)| at_server && session.0 < 4);
            let (way, from, payload) = match relayed {
                Some((session, payload)) => {
                    let way = Way::Relayed { server: SERVER };
                    (way, peer_address(session.0), payload.to_vec())
                }
                None => (source.way, source.address, datagram.clone()),
            };
            match DatagramKind::of(payload[0]) {
                DatagramKind::Quic => quic.push((from, payload)),
                DatagramKind::Frame => frames.push((way, payload)),
                _ => others.push(datagram),
            }
        }
        prop_assert_eq!(record.frames, frames);
        prop_assert_eq!(record.others, others);
        let kept_of = received[..kept.length].chunks(kept.stride.max(1));
        let mut got: HashMap<_, Vec<Vec<u8>>> = HashMap::new();
        for (from, datagram) in kept_of.map(|d| (kept.from, d.to_vec())).chain(record.left) {
            got.entry(from).or_default().push(datagram);
        }
        let mut expected: HashMap<_, Vec<Vec<u8>>> = HashMap::new();
        for (from, datagram) in quic {
            expected.entry(from).or_default().push(datagram);
        }
        prop_assert_eq!(got, expected);
    }
}

#[test]
fn frames_in_a_row_are_passed_on_at_once_and_in_place() {
    let frame = |kind: u8| vec![kind; 100];
    let mut received = [
        frame(4),
        frame(5),
        frame(0x40),
        frame(4),
        frame(4)[..7].to_vec(),
    ]
    .concat();
    let source = Source::plain("192.0.2.1:7".parse().unwrap());
    let mut record = Record::default();
    let kept = sort(&mut received, 100, &source, &mut record);
    assert_eq!((record.runs, record.frames.len()), (2, 4));
    assert_eq!((kept.length, kept.stride), (100, 100));
    assert_eq!(received[..100], frame(0x40));
}

/// A mux on loopback, with what it shares.
struct Shared {
    mux: Mux,
    routes: Routes,
    arrived: Arc<Arrived>,
    client: stun::Client,
    dropped: Arc<Dropped>,
}

fn shared() -> Shared {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let dropped = Arc::<Dropped>::default();
    let socket = Socket::new(socket, true).unwrap();
    let sockets = Arc::new(Sockets::new(socket, dropped.clone()));
    let (routes, arrived) = (Routes::new(false), Arc::<Arrived>::default());
    let pending = Arc::<Pending>::default();
    let sender = Sender::new(sockets.clone(), routes.clone());
    Shared {
        client: stun::Client::new(Box::pin(sender), pending.clone()),
        mux: Mux::new(sockets, routes.clone(), arrived.clone(), pending),
        routes,
        arrived,
        dropped,
    }
}

fn expected(stun: u64, other: u64, frames: u64) -> DroppedDatagrams {
    DroppedDatagrams {
        stun,
        other,
        frames,
        ..DroppedDatagrams::default()
    }
}

/// Receives until `enough`, and returns the datagrams that QUIC gets.
async fn received(mux: &mut Mux, enough: impl Fn(&[Vec<u8>], &Dropped) -> bool) -> Vec<Vec<u8>> {
    let mut datagrams = Vec::new();
    let mut bytes = vec![0; 1 << 16];
    let dropped = mux.sockets.dropped.clone();
    while !enough(&datagrams, &dropped) {
        let mut metas = [RecvMeta::default()];
        let received = poll_fn(|context| {
            mux.poll_recv(context, &mut [IoSliceMut::new(&mut bytes)], &mut metas)
        });
        let received = tokio::time::timeout(LONG, received).await.unwrap();
        assert_eq!(received.unwrap(), 1);
        let [meta] = metas;
        let quic = bytes[..meta.len].chunks(meta.stride.max(1));
        datagrams.extend(quic.map(<[u8]>::to_vec));
    }
    datagrams
}

/// Datagrams that the kernel segments and joins again may be of several kinds.
#[tokio::test]
async fn one_receive_with_several_kinds_is_taken_apart() {
    let Shared {
        mut mux, dropped, ..
    } = shared();
    let client = shared().mux;
    let mut request = BindingRequest {
        transaction: [7; 12],
        fingerprint: false,
        unknown: Vec::new(),
    }
    .encode();
    // All segments have one length: an attribute that may be ignored, of 12 bytes.
    request[3] = 16;
    request.extend([0x80, 0x22, 0, 12]);
    request.extend([b'x'; 12]);
    let segment = request.len();
    let quic = |mark: u8| [vec![0x40 | mark], vec![mark; segment - 1]].concat();
    let rtp = vec![0x80; segment];
    let (one, two, mut three) = (quic(1), quic(2), quic(3));
    three.truncate(5);
    let contents = [one.clone(), request, two.clone(), rtp, three.clone()].concat();
    let transmit = Transmit {
        destination: mux.local_addr().unwrap(),
        ecn: None,
        contents: &contents,
        segment_size: Some(segment),
        src_ip: None,
    };
    let mut sender = client.create_sender();
    if sender.max_transmit_segments().get() < 5 {
        return;
    }
    poll_fn(|context| sender.as_mut().poll_send(&transmit, context))
        .await
        .unwrap();
    let got = received(&mut mux, |datagrams, _| datagrams.len() >= 3).await;
    assert_eq!(got, [one, two, three]);
    assert_eq!(dropped.get(), expected(0, 1, 0));
    // The request was answered.
    let mut bytes = vec![0; 2048];
    let mut metas = [RecvMeta::default()];
    let socket = client.sockets.main.clone();
    let answer = poll_fn(|context| {
        socket.poll_recv(context, &mut [IoSliceMut::new(&mut bytes)], &mut metas)
    });
    tokio::time::timeout(LONG, answer).await.unwrap().unwrap();
    let answer = BindingAnswer::decode(&bytes[..metas[0].len]).unwrap();
    assert_eq!(answer.result, Ok(client.local_addr().unwrap()));
    assert!(!answer.fingerprint);
}

#[tokio::test]
async fn what_nobody_takes_is_dropped_and_counted() {
    let Shared {
        mut mux, dropped, ..
    } = shared();
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let to = mux.local_addr().unwrap();
    let answer = BindingAnswer {
        transaction: [7; 12],
        fingerprint: true,
        result: Ok(to),
    };
    let not_asked = answer.encode();
    for datagram in [
        &b""[..],
        b"\x10zrtp",
        b"\x16dtls",
        b"\x00\x01stun",
        &not_asked,
        b"\x41quic",
    ] {
        client.send_to(datagram, to).await.unwrap();
    }
    let got = received(&mut mux, |datagrams, _| !datagrams.is_empty()).await;
    assert_eq!(got, [b"\x41quic"]);
    assert_eq!(dropped.get(), expected(2, 1, 2));
}

#[tokio::test]
async fn requests_beyond_the_limit_are_dropped() {
    let Shared {
        mut mux, dropped, ..
    } = shared();
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let to = mux.local_addr().unwrap();
    let request = BindingRequest {
        transaction: [7; 12],
        fingerprint: true,
        unknown: Vec::new(),
    };
    // More than the burst, and more than the rate can make up for.
    while dropped.get().stun == 0 {
        client.send_to(&request.encode(), to).await.unwrap();
        client.send_to(b"\x41quic", to).await.unwrap();
        received(&mut mux, |datagrams, _| !datagrams.is_empty()).await;
    }
    let mut bytes = [0; 2048];
    let length = client.recv(&mut bytes).await.unwrap();
    let answer = BindingAnswer::decode(&bytes[..length]).unwrap();
    assert_eq!(answer.result, Ok(client.local_addr().unwrap()));
    assert!(answer.fingerprint);
}

#[tokio::test]
async fn an_endpoint_answers_and_asks_on_its_socket_while_it_is_connected() {
    let (here, there) = pair(LONG);
    still_works(&here, &there).await;
    let address = there.endpoint.local_address().unwrap();
    let seen = here.endpoint.reflexive(address).await.unwrap();
    let local = here.endpoint.local_address().unwrap();
    assert_eq!((seen.address, seen.local), (local, Some(local)));
    still_works(&here, &there).await;
    assert_eq!(
        here.endpoint.dropped_datagrams(),
        DroppedDatagrams::default()
    );
}

/// Forwards datagrams as a NAT does.
async fn nat(server: SocketAddr) -> (SocketAddr, SocketAddr, tokio::task::JoinHandle<()>) {
    let inside = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let outside = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let addresses = (inside.local_addr().unwrap(), outside.local_addr().unwrap());
    let task = tokio::spawn(async move {
        let (mut out, mut back) = ([0; 2048], [0; 2048]);
        let mut client = None;
        loop {
            tokio::select! {
                received = inside.recv_from(&mut out) => {
                    let (length, from) = received.unwrap();
                    client = Some(from);
                    outside.send_to(&out[..length], server).await.unwrap();
                }
                received = outside.recv_from(&mut back) => {
                    let (length, _) = received.unwrap();
                    inside.send_to(&back[..length], client.unwrap()).await.unwrap();
                }
            }
        }
    });
    (addresses.0, addresses.1, task)
}

#[tokio::test]
async fn behind_a_nat_the_other_host_sees_another_address() {
    let (here, there) = pair(LONG);
    let (inside, outside, task) = nat(there.endpoint.local_address().unwrap()).await;
    let seen = here.endpoint.reflexive(inside).await.unwrap();
    assert_eq!(seen.address, outside);
    assert_eq!(seen.local, Some(here.endpoint.local_address().unwrap()));
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn no_answer_is_not_waited_for_long() {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let Shared {
        mux: _mux, client, ..
    } = shared();
    let start = tokio::time::Instant::now();
    let server = socket.local_addr().unwrap();
    let answer = client.ask(server, "127.0.0.1:1".parse().unwrap()).await;
    assert!(matches!(answer, Err(stun::ReflexiveError::NoAnswer)));
    assert_eq!(start.elapsed(), Duration::from_millis(2500));
    // It was asked three times.
    let mut bytes = [0; 2048];
    let mut asked = Vec::new();
    for _ in 0..3 {
        let length = socket.recv(&mut bytes).unwrap();
        asked.push(BindingRequest::decode(&bytes[..length]).unwrap());
    }
    assert_eq!(asked[0], asked[2]);
}

/// Frames with the way on which they came.
type Taken = Vec<(Way, Vec<u8>)>;

/// A receiver of frames that keeps them.
#[derive(Clone, Default)]
struct Frames {
    taken: Arc<Mutex<Taken>>,
    flushes: Arc<AtomicU64>,
}

impl Datagrams for Frames {
    fn take(&mut self, way: &Way, datagrams: &mut [u8], stride: usize) {
        let mut taken = self.taken.lock().unwrap();
        for datagram in datagrams.chunks(stride) {
            taken.push((*way, datagram.to_vec()));
        }
        datagrams.fill(0);
    }

    fn flush(&mut self) {
        self.flushes.fetch_add(1, Ordering::Relaxed);
    }
}

/// Sends segments in one batch, which the kernel may join again.
async fn send_batch(from: &Mux, to: SocketAddr, segments: &[Vec<u8>]) -> bool {
    let mut sender = from.create_sender();
    if sender.max_transmit_segments().get() < segments.len() {
        return false;
    }
    let contents = segments.concat();
    let transmit = Transmit {
        destination: to,
        ecn: None,
        contents: &contents,
        segment_size: Some(segments[0].len()),
        src_ip: None,
    };
    poll_fn(|context| sender.as_mut().poll_send(&transmit, context))
        .await
        .unwrap();
    true
}

/// As [`received`], with the sources.
async fn received_from(mux: &mut Mux, count: usize) -> Vec<(SocketAddr, Vec<u8>)> {
    let mut datagrams = Vec::new();
    let mut bytes = vec![0; 1 << 16];
    while datagrams.len() < count {
        let mut metas = [RecvMeta::default()];
        let received = poll_fn(|context| {
            mux.poll_recv(context, &mut [IoSliceMut::new(&mut bytes)], &mut metas)
        });
        tokio::time::timeout(LONG, received).await.unwrap().unwrap();
        let [meta] = metas;
        let quic = bytes[..meta.len].chunks(meta.stride.max(1));
        datagrams.extend(quic.map(|datagram| (meta.addr, datagram.to_vec())));
    }
    datagrams
}

#[tokio::test]
async fn one_receive_from_a_relay_with_several_peers_is_taken_apart() {
    let Shared {
        mut mux,
        routes,
        arrived,
        dropped,
        ..
    } = shared();
    let relay_mux = shared().mux;
    let at = relay_mux.local_addr().unwrap();
    let (one, two) = (HostId([1; 32]), HostId([2; 32]));
    routes.set_server(SERVER, Some(RelayLeg::Udp(at)));
    routes.open_session(SERVER, SessionId(7), one);
    routes.open_session(SERVER, SessionId(8), two);
    let frames = Frames::default();
    arrived.set(Some(Box::new(frames.clone())));
    let relayed = |session: u32, kind: u8, mark: u8| {
        let mut datagram = vec![mark; 100];
        datagram[..HEADER_BYTES].copy_from_slice(&relay::header(SessionId(session)));
        datagram[HEADER_BYTES] = kind;
        datagram
    };
    let plain = |kind: u8, mark: u8| [vec![kind], vec![mark; 99]].concat();
    let segments = [
        relayed(7, 0x40, 1),
        relayed(8, 0x40, 2),
        relayed(8, 4, 3),
        relayed(7, 5, 4),
        plain(0x41, 5),
        relayed(9, 0x40, 6),
        relayed(7, 0x40, 7),
        plain(4, 8),
    ];
    if !send_batch(&relay_mux, mux.local_addr().unwrap(), &segments).await {
        return;
    }
    let mut got = received_from(&mut mux, 4).await;
    got.sort();
    let mut expected = vec![
        (
            routes.peer_address(one),
            segments[0][HEADER_BYTES..].to_vec(),
        ),
        (
            routes.peer_address(two),
            segments[1][HEADER_BYTES..].to_vec(),
        ),
        (at, segments[4].clone()),
        (
            routes.peer_address(one),
            segments[6][HEADER_BYTES..].to_vec(),
        ),
    ];
    expected.sort();
    assert_eq!(got, expected);
    let way = Way::Relayed { server: SERVER };
    let direct = Way::Direct {
        socket: SocketId::MAIN,
        address: at,
    };
    let taken = frames.taken.lock().unwrap().clone();
    let expected = [
        (way, segments[2][HEADER_BYTES..].to_vec()),
        (way, segments[3][HEADER_BYTES..].to_vec()),
        (direct, segments[7].clone()),
    ];
    assert_eq!(taken, expected);
    assert!(frames.flushes.load(Ordering::Relaxed) >= 1);
    assert_eq!(dropped.get().relayed, 1, "the unknown session");
}

#[tokio::test]
async fn a_peers_address_stands_for_where_its_datagrams_come_from() {
    let Shared {
        mut mux, routes, ..
    } = shared();
    let other = shared();
    let peer = HostId([1; 32]);
    let from = other.mux.local_addr().unwrap();
    let to = mux.local_addr().unwrap();
    assert!(send_batch(&other.mux, to, &[vec![0x40; 50]]).await);
    assert_eq!(received_from(&mut mux, 1).await[0].0, from);
    assert!(routes.add_arrival(peer, SocketId::MAIN, from));
    assert!(send_batch(&other.mux, to, &[vec![0x40; 50]]).await);
    assert_eq!(
        received_from(&mut mux, 1).await[0].0,
        routes.peer_address(peer)
    );
    routes.forget(peer);
    assert!(send_batch(&other.mux, to, &[vec![0x40; 50]]).await);
    assert_eq!(received_from(&mut mux, 1).await[0].0, from);
}

#[tokio::test]
async fn other_sockets_receive_from_when_they_are_opened_and_take_turns() {
    let Shared {
        mut mux, routes, ..
    } = shared();
    let other = shared().mux;
    let peer = HostId([1; 32]);
    let from = other.local_addr().unwrap();
    let sockets = mux.sockets.clone();
    let opening = tokio::spawn(async move {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = socket.local_addr().unwrap();
        let id = sockets.open(socket).unwrap();
        routes.add_arrival(peer, id, from);
        assert!(send_batch(&other, to, &[vec![0x40; 50]]).await);
        (other, routes.peer_address(peer), id)
    });
    // Waits already when the socket is opened.
    let got = received_from(&mut mux, 1).await;
    let (other, address, id) = opening.await.unwrap();
    assert_eq!(got[0].0, address);
    assert!(mux.sockets.close(id) && !mux.sockets.close(id));
    assert!(send_batch(&other, mux.local_addr().unwrap(), &[vec![0x40; 9]]).await);
    assert_eq!(received_from(&mut mux, 1).await[0].0, from);
}

#[tokio::test]
async fn what_a_relay_sends_over_tcp_arrives_and_its_number_is_bounded() {
    let Shared {
        mut mux,
        routes,
        arrived,
        dropped,
        ..
    } = shared();
    let peer = HostId([1; 32]);
    routes.open_session(SERVER, SessionId(7), peer);
    let datagram = |kind: u8| [&relay::header(SessionId(7))[..], &[kind, 1, 2]].concat();
    assert!(arrived.push(SERVER, datagram(0x40)));
    assert!(arrived.push(SERVER, datagram(0)));
    assert!(arrived.push(SERVER, vec![0x40, 1]));
    let got = received_from(&mut mux, 1).await;
    assert_eq!(got, [(routes.peer_address(peer), vec![0x40, 1, 2])]);
    let dropped = dropped.get();
    assert_eq!((dropped.relayed, dropped.waiting), (1, 1));
    let taken = (0..2000)
        .filter(|_| arrived.push(SERVER, datagram(4)))
        .count();
    assert_eq!(taken, 1024);
}

#[tokio::test]
async fn questions_with_numbers_are_answered_many_at_once() {
    let (here, there) = pair(LONG);
    still_works(&here, &there).await;
    let mut answers = here.endpoint.observations();
    let server = there.endpoint.local_address().unwrap();
    for id in 100..110 {
        here.endpoint.ask(id, server).unwrap();
    }
    let mut ids = Vec::new();
    for _ in 0..10 {
        let answer = tokio::time::timeout(LONG, answers.recv()).await;
        let answer = answer.unwrap().unwrap();
        assert_eq!(answer.from, server);
        assert_eq!(answer.mapped, here.endpoint.local_address().unwrap());
        ids.push(answer.id);
    }
    ids.sort_unstable();
    assert_eq!(ids, (100..110).collect::<Vec<_>>());
}
