//! Tests peers that are reached over changing ways: relays, other sockets, the frame plane.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use bytes::Bytes;
use common::*;
use longhaul_protocol::HostId;
use longhaul_realm::protocol::SessionId;
use longhaul_realm::relay;
use longhaul_transport::*;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::UdpSocket;
use tokio::sync::mpsc;

const SERVER: HostId = HostId([9; 32]);
const SESSION: SessionId = SessionId(0x0403_0201);

/// A relay that forwards by session, as a rendezvous server does.
struct Relay {
    address: SocketAddr,
    forwarded: Arc<AtomicU64>,
    task: tokio::task::JoinHandle<()>,
}

impl Relay {
    async fn new(ends: [SocketAddr; 2]) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let forwarded = Arc::<AtomicU64>::default();
        let count = forwarded.clone();
        let sessions = HashMap::from([(SESSION, ends)]);
        let task = tokio::spawn(async move {
            let mut bytes = vec![0; 2048];
            loop {
                let Ok((length, from)) = socket.recv_from(&mut bytes).await else {
                    continue;
                };
                let (session, _) = relay::parse(&bytes[..length]).unwrap();
                let [one, two] = sessions[&session];
                let to = if from == one { two } else { one };
                assert!(from == one || from == two, "{from}");
                count.fetch_add(1, Ordering::Relaxed);
                let _ = socket.send_to(&bytes[..length], to).await;
            }
        });
        Self {
            address,
            forwarded,
            task,
        }
    }

    fn forwarded(&self) -> u64 {
        self.forwarded.load(Ordering::Relaxed)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn id(host: &Host) -> HostId {
    host.endpoint.host_id()
}

/// Returns the address of a host's main socket on loopback.
fn real(host: &Host) -> SocketAddr {
    SocketAddr::new([127, 0, 0, 1].into(), host.address().port())
}

/// Lets each of two hosts reach the other one by a relay.
async fn relayed(alpha: &Host, beta: &Host) -> Relay {
    let relay = Relay::new([real(alpha), real(beta)]).await;
    for (host, other) in [(alpha, beta), (beta, alpha)] {
        let routes = host.endpoint.routes();
        routes.set_server(SERVER, Some(RelayLeg::Udp(relay.address)));
        routes.open_session(SERVER, SESSION, id(other));
        routes.set_way(id(other), Some(Way::Relayed { server: SERVER }));
    }
    relay
}

/// Lets a host take the other one's datagrams from its main socket, and returns the way to it.
fn direct(host: &Host, other: &Host) -> Way {
    let routes = host.endpoint.routes();
    let (socket, address) = (SocketId::MAIN, real(other));
    assert!(routes.add_arrival(id(other), socket, address));
    Way::Direct { socket, address }
}

/// Returns both ends of a control connection between the peer addresses.
async fn peers(alpha: &Host, beta: &Host) -> (Control, Control) {
    let dial = alpha.endpoint.connect_peer(id(beta));
    let (here, there) = tokio::join!(dial, beta.endpoint.accept());
    (here.unwrap(), there.unwrap())
}

async fn ping(here: &Control, there: &Control) {
    let mut channel = here.open().await.unwrap();
    channel.send(b"ping").await.unwrap();
    let mut accepted = there.accept().await.unwrap();
    assert_eq!(accepted.recv().await, Ok(Some(b"ping".to_vec())));
    accepted.send(b"pong").await.unwrap();
    assert_eq!(channel.recv().await, Ok(Some(b"pong".to_vec())));
}

fn both_families() -> [EndpointConfig; 2] {
    let ipv6 = EndpointConfig::new("[::]:0".parse().unwrap(), hello(1, 1));
    [config(), ipv6]
}

#[tokio::test]
async fn connections_work_over_a_relay() {
    for config in both_families() {
        let (alpha, beta) = pair(config);
        let relay = relayed(&alpha, &beta).await;
        let (here, there) = peers(&alpha, &beta).await;
        ping(&here, &there).await;
        let address = here.peer().address;
        assert_eq!(alpha.endpoint.routes().peer_of(address), Some(id(&beta)));
        let (sender, receiver) = bulk(&here, &there, BulkConfig::default()).await;
        sender.send(Bytes::from(vec![7; 300_000])).await.unwrap();
        sender.finish().await.unwrap();
        let frame = receiver.recv().await.unwrap().unwrap();
        assert_eq!(frame.len(), 300_000);
        // Segments are relayed one by one.
        assert!(relay.forwarded() > 300_000 / 1500);
        assert_eq!(alpha.endpoint.dropped_datagrams().unroutable, 0);
        assert_eq!(beta.endpoint.dropped_datagrams().relayed, 0);
    }
}

#[tokio::test]
async fn both_ends_export_the_same_keys_and_no_others_do() {
    let (alpha, beta) = pair(config());
    let _relay = relayed(&alpha, &beta).await;
    let (here, there) = peers(&alpha, &beta).await;
    let exported = here.export(b"EXPORTER-test-1").unwrap();
    assert_eq!(there.export(b"EXPORTER-test-1").unwrap(), exported);
    assert_ne!(here.export(b"EXPORTER-test-2").unwrap(), exported);
    let (other, _there) = peers(&alpha, &beta).await;
    assert_ne!(other.export(b"EXPORTER-test-1").unwrap(), exported);
}

/// Waits until a number grows, or stays for a while.
async fn grows(what: impl Fn() -> u64) -> bool {
    let start = what();
    let grown = async {
        while what() <= start + 20 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(2), grown)
        .await
        .is_ok()
}

#[tokio::test]
async fn a_transfer_goes_on_while_ways_change() {
    for config in both_families() {
        let (alpha, beta) = pair(config);
        let relay = relayed(&alpha, &beta).await;
        let (here, there) = peers(&alpha, &beta).await;
        let (sender, receiver) = bulk(&here, &there, BulkConfig::default()).await;
        let received = Arc::<AtomicU64>::default();
        let count = received.clone();
        let reader = tokio::spawn(async move {
            while let Some(frame) = receiver.recv().await.unwrap() {
                count.fetch_add(frame.len() as u64, Ordering::Relaxed);
            }
        });
        let (stop, mut stopped) = tokio::sync::oneshot::channel::<()>();
        let writer = tokio::spawn(async move {
            let mut sent = 0;
            while stopped.try_recv().is_err() {
                sender.send(Bytes::from(vec![1; 20_000])).await.unwrap();
                sent += 20_000;
            }
            sender.finish().await.unwrap();
            sent
        });
        let progress = || received.load(Ordering::Relaxed) / 20_000;
        assert!(grows(progress).await);
        assert!(grows(|| relay.forwarded()).await);
        // Only one direction, then the other one.
        let (to_beta, to_alpha) = (direct(&alpha, &beta), direct(&beta, &alpha));
        alpha.endpoint.routes().set_way(id(&beta), Some(to_beta));
        assert!(grows(progress).await);
        beta.endpoint.routes().set_way(id(&alpha), Some(to_alpha));
        assert!(grows(progress).await);
        // What was under way arrives, then nothing more.
        let quiet = async {
            while grows(|| relay.forwarded()).await {
                assert!(grows(progress).await);
            }
        };
        tokio::time::timeout(LONG, quiet).await.unwrap();
        assert!(grows(progress).await);
        // From another socket of alpha's.
        let socket = alpha.endpoint.open_socket().unwrap();
        let port = alpha.endpoint.socket_address(socket).unwrap().port();
        let from = SocketAddr::new([127, 0, 0, 1].into(), port);
        let beta_routes = beta.endpoint.routes();
        assert!(beta_routes.add_arrival(id(&alpha), SocketId::MAIN, from));
        let address = real(&beta);
        assert!(
            alpha
                .endpoint
                .routes()
                .add_arrival(id(&beta), socket, address)
        );
        let other = Way::Direct { socket, address };
        alpha.endpoint.routes().set_way(id(&beta), Some(other));
        beta_routes.set_way(
            id(&alpha),
            Some(Way::Direct {
                socket: SocketId::MAIN,
                address: from,
            }),
        );
        assert!(grows(progress).await);
        // Back to the relay.
        let back = Some(Way::Relayed { server: SERVER });
        alpha.endpoint.routes().set_way(id(&beta), back);
        beta_routes.set_way(id(&alpha), back);
        assert!(alpha.endpoint.close_socket(socket));
        assert!(grows(|| relay.forwarded()).await);
        assert!(grows(progress).await);
        stop.send(()).unwrap();
        let sent = tokio::time::timeout(LONG, writer).await.unwrap().unwrap();
        tokio::time::timeout(LONG, reader).await.unwrap().unwrap();
        assert_eq!(received.load(Ordering::Relaxed), sent);
        ping(&here, &there).await;
    }
}

#[tokio::test]
async fn without_a_way_nothing_is_sent_and_with_one_again_all_goes_on() {
    let (alpha, beta) = pair(config());
    let relay = relayed(&alpha, &beta).await;
    let (here, there) = peers(&alpha, &beta).await;
    alpha.endpoint.routes().set_way(id(&beta), None);
    let mut channel = here.open().await.unwrap();
    channel.send(b"waits").await.unwrap();
    let unroutable = || alpha.endpoint.dropped_datagrams().unroutable;
    while unroutable() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let way = Some(Way::Relayed { server: SERVER });
    alpha.endpoint.routes().set_way(id(&beta), way);
    let accepted = tokio::time::timeout(LONG, there.accept()).await;
    let mut accepted = accepted.unwrap().unwrap();
    assert_eq!(accepted.recv().await, Ok(Some(b"waits".to_vec())));
    assert!(relay.forwarded() > 0);
    // To a host of which nothing is known the handshake ends in time.
    let mut short = config();
    short.handshake_timeout = Duration::from_millis(200);
    let (gamma, delta) = pair(short);
    let error = gamma.endpoint.connect_peer(id(&delta)).await.unwrap_err();
    assert!(matches!(error, ConnectError::Lost { .. }), "{error}");
}

#[tokio::test]
async fn a_relay_over_tcp_carries_connections_too() {
    let (alpha, beta) = pair(config());
    let ends = [(&alpha, &beta), (&beta, &alpha)];
    for (host, other) in ends {
        let (sender, mut queue) = mpsc::channel::<Vec<u8>>(256);
        let routes = host.endpoint.routes();
        routes.set_server(SERVER, Some(RelayLeg::Tcp(sender)));
        routes.open_session(SERVER, SESSION, id(other));
        routes.set_way(id(other), Some(Way::Relayed { server: SERVER }));
        let to = other.endpoint.clone();
        tokio::spawn(async move {
            while let Some(datagram) = queue.recv().await {
                to.relayed(SERVER, datagram);
            }
        });
    }
    let (here, there) = peers(&alpha, &beta).await;
    ping(&here, &there).await;
}

/// Frames with the way on which they came.
type Taken = Vec<(Way, Vec<u8>)>;

/// Keeps frames.
#[derive(Clone, Default)]
struct Frames(Arc<Mutex<Taken>>);

impl Datagrams for Frames {
    fn take(&mut self, way: &Way, datagrams: &mut [u8], stride: usize) {
        let mut taken = self.0.lock().unwrap();
        for datagram in datagrams.chunks(stride) {
            taken.push((*way, datagram.to_vec()));
        }
    }

    fn flush(&mut self) {}
}

#[tokio::test]
async fn frames_travel_beside_connections_on_every_way() {
    for config in both_families() {
        let (alpha, beta) = pair(config);
        let _relay = relayed(&alpha, &beta).await;
        let (here, there) = peers(&alpha, &beta).await;
        let frames = Frames::default();
        beta.endpoint.set_datagrams(Some(Box::new(frames.clone())));
        let plane = alpha.endpoint.plane_socket();
        let socket = alpha.endpoint.open_socket().unwrap();
        let port = alpha.endpoint.socket_address(socket).unwrap().port();
        let address = real(&beta);
        let expected = |at: SocketAddr| Way::Direct {
            socket: SocketId::MAIN,
            address: at,
        };
        let loopback = |port| SocketAddr::new([127, 0, 0, 1].into(), port);
        let relayed = Way::Relayed { server: SERVER };
        let direct = |socket| Way::Direct { socket, address };
        let ways = [
            (relayed, relayed),
            (direct(SocketId::MAIN), expected(real(&alpha))),
            (direct(socket), expected(loopback(port))),
        ];
        for (mark, (way, _)) in ways.iter().enumerate() {
            let batch = vec![4 + mark as u8; 2500];
            let (plane, to, way) = (plane.clone(), id(&beta), *way);
            let sent = tokio::task::spawn_blocking(move || plane.send(to, way, &batch, 1000));
            sent.await.unwrap().unwrap();
            ping(&here, &there).await;
        }
        let taken = || frames.0.lock().unwrap().clone();
        while taken().len() < 9 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        for (mark, (_, way)) in ways.iter().enumerate() {
            let mark = 4 + mark as u8;
            let lengths: Vec<usize> = taken()
                .into_iter()
                .filter(|(_, datagram)| datagram[0] == mark)
                .map(|(on, datagram)| {
                    assert_eq!(on, *way);
                    assert!(datagram.iter().all(|byte| *byte == mark));
                    datagram.len()
                })
                .collect();
            assert_eq!(lengths, [1000, 1000, 500]);
        }
        beta.endpoint.set_datagrams(None);
        plane.send(id(&beta), ways[0].0, &[4; 10], 10).unwrap();
        while beta.endpoint.dropped_datagrams().frames == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
