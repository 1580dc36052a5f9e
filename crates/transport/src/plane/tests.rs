//! Tests the sending of frames on sockets.

use super::*;
use crate::mux::Dropped;
use longhaul_paths::SocketId;
use longhaul_realm::protocol::SessionId;
use longhaul_realm::relay;
use std::time::Duration;
use tokio::sync::mpsc;

const PEER: HostId = HostId([1; 32]);
const SERVER: HostId = HostId([9; 32]);

fn plane(offload: bool) -> PlaneSocket {
    let socket = std::net::UdpSocket::bind("[::]:0").unwrap();
    let socket = Socket::new(socket, offload).unwrap();
    let sockets = Sockets::new(socket, Arc::<Dropped>::default());
    PlaneSocket::new(Arc::new(sockets), Routes::new(true))
}

fn receiver() -> (std::net::UdpSocket, SocketAddr) {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

fn receive(socket: &std::net::UdpSocket, count: usize) -> Vec<Vec<u8>> {
    let mut bytes = [0; 2048];
    let mut datagrams = Vec::new();
    for _ in 0..count {
        let length = socket.recv(&mut bytes).unwrap();
        datagrams.push(bytes[..length].to_vec());
    }
    datagrams
}

/// 70 datagrams, which are more than the kernel takes at once, and a shorter one. A socket has room
/// for them while its reader is slow.
fn batch() -> Vec<u8> {
    (0..70_u32 * 1000 + 7).map(|at| (at / 1000) as u8).collect()
}

#[tokio::test]
async fn a_batch_arrives_whole_with_and_without_segmentation() {
    for offload in [true, false] {
        let plane = plane(offload);
        let (socket, address) = receiver();
        let way = Way::Direct {
            socket: SocketId::MAIN,
            address,
        };
        let batch = batch();
        let sent = std::thread::spawn(move || {
            plane.send(PEER, way, &batch, 1000).unwrap();
            (plane, batch)
        });
        let got = receive(&socket, 71);
        let (plane, batch) = sent.join().unwrap();
        assert_eq!(
            got,
            batch.chunks(1000).map(<[u8]>::to_vec).collect::<Vec<_>>()
        );
        assert_eq!(plane.sockets.dropped.get(), Default::default());
    }
}

#[tokio::test]
async fn relayed_datagrams_have_the_sessions_header() {
    let plane = plane(true);
    let (socket, address) = receiver();
    let way = Way::Relayed { server: SERVER };
    let unknown = plane.send(PEER, way, b"frame", 5);
    assert!(matches!(unknown, Err(PlaneError::NoSession)));
    plane
        .routes
        .set_server(SERVER, Some(RelayLeg::Udp(address)));
    plane.routes.open_session(SERVER, SessionId(7), PEER);
    plane.send(PEER, way, b"frame1frame2frm", 6).unwrap();
    let header = relay::header(SessionId(7));
    let expected = [&b"frame1"[..], b"frame2", b"frm"];
    let expected = expected.map(|frame| [&header[..], frame].concat());
    assert_eq!(receive(&socket, 3), expected);
    assert_eq!(plane.sockets.dropped.get().unroutable, 1);
}

#[tokio::test]
async fn the_queue_of_a_tcp_connection_is_bounded() {
    let plane = plane(true);
    let (sender, mut queue) = mpsc::channel(3);
    plane.routes.set_server(SERVER, Some(RelayLeg::Tcp(sender)));
    plane.routes.open_session(SERVER, SessionId(7), PEER);
    let way = Way::Relayed { server: SERVER };
    plane.send(PEER, way, b"1122", 2).unwrap();
    let full = plane.send(PEER, way, b"334455", 2);
    assert!(matches!(full, Err(PlaneError::Full)));
    assert_eq!(plane.sockets.dropped.get().unsent, 2);
    let header = relay::header(SessionId(7));
    for frame in [b"11", b"22", b"33"] {
        assert_eq!(queue.recv().await.unwrap(), [&header[..], frame].concat());
    }
}

#[tokio::test]
async fn what_cannot_be_sent_says_why() {
    let plane = plane(true);
    let (_socket, address) = receiver();
    let closed = Way::Direct {
        socket: SocketId(3),
        address,
    };
    let result = plane.send(PEER, closed, b"frame", 5);
    assert!(matches!(result, Err(PlaneError::NoSocket(3))));
    let open = Way::Direct {
        socket: SocketId::MAIN,
        address,
    };
    // Longer than any datagram.
    let long = vec![4; 70_000];
    let result = plane.send(PEER, open, &long, long.len());
    assert!(
        matches!(result, Err(PlaneError::TooLong(70_000))),
        "{result:?}"
    );
    assert!(plane.send(PEER, open, &[], 0).is_ok());
}
