//! Tests of rendezvous connections: framing, both carriers, relayed datagrams, hostile peers.

use super::*;
use crate::endpoint::tests::{Host, pair};
use crate::{BindingAnswer, BindingRequest, ConnectError, DatagramKind, Identity};
use longhaul_protocol::HostId;
use proptest::prelude::*;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

const LONG: Duration = Duration::from_secs(60);

/// Relays between two addresses, and drops what has a 7 behind its header.
#[derive(Debug, Default)]
struct Between(std::sync::Mutex<Vec<SocketAddr>>);

impl Relay for Between {
    fn judge(
        &self,
        from: SocketAddr,
        datagrams: &mut dyn Iterator<Item = &[u8]>,
        towards: &mut Vec<Option<SocketAddr>>,
    ) {
        let known = self.0.lock().unwrap();
        let to = known.iter().find(|_| known.contains(&from));
        let to = to.and_then(|_| known.iter().find(|other| **other != from));
        towards.extend(datagrams.map(|one| to.copied().filter(|_| one.get(5) != Some(&7))));
    }
}

struct Server {
    _folder: tempfile::TempDir,
    id: HostId,
    server: RendezvousServer,
    relay: Arc<Between>,
}

fn server(listen: &str) -> Server {
    let folder = tempfile::tempdir().unwrap();
    let identity = Identity::load_or_create(folder.path()).unwrap();
    let id = identity.host_id();
    let relay = Arc::new(Between::default());
    let config = RendezvousConfig {
        listen: listen.parse().unwrap(),
        listen_tcp: Some("127.0.0.1:0".parse().unwrap()),
        protocol: protocol(),
        handshake_timeout: LONG,
    };
    let server = RendezvousServer::bind(config, identity, relay.clone()).unwrap();
    Server {
        _folder: folder,
        id,
        server,
        relay,
    }
}

fn protocol() -> RendezvousProtocol {
    RendezvousProtocol {
        message_bytes_max: 100_000,
        ..RendezvousProtocol::new("test".to_owned())
    }
}

/// Where a host on this machine finds the server.
fn at(server: &Server) -> SocketAddr {
    let port = server.server.local_address().unwrap().port();
    SocketAddr::from(([127, 0, 0, 1], port))
}

async fn connect(host: &Host, server: &Server, tcp: bool) -> (RendezvousLink, RendezvousLink) {
    let endpoint = &host.endpoint;
    let there = async {
        timeout(LONG, server.server.accept())
            .await
            .unwrap()
            .unwrap()
    };
    let protocol = protocol();
    let here = async {
        let link = match tcp {
            true => {
                let address = server.server.tcp_address().unwrap().to_string();
                endpoint
                    .connect_rendezvous_tcp(server.id, &[address], &protocol)
                    .await
            }
            false => {
                let address = at(server).to_string();
                endpoint
                    .connect_rendezvous(server.id, &[address], &protocol)
                    .await
            }
        };
        let mut link = link.unwrap();
        // The server sees the stream with its first message.
        link.sender.send(b"first".to_vec()).await.unwrap();
        link
    };
    let (here, mut there) = tokio::join!(here, there);
    assert_eq!(message(&mut there).await, b"first");
    (here, there)
}

async fn message(link: &mut RendezvousLink) -> Vec<u8> {
    match timeout(LONG, link.receiver.recv()).await.unwrap() {
        Ok(Some(Received::Message(bytes))) => bytes.to_vec(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn messages_travel_both_ways_over_both_carriers_with_proved_keys() {
    let (host, _) = pair(LONG);
    let server = server("127.0.0.1:0");
    for tcp in [false, true] {
        let (mut here, mut there) = connect(&host, &server, tcp).await;
        assert_eq!(here.handle.peer(), server.id);
        assert_eq!(there.handle.peer(), host.endpoint.host_id());
        assert_eq!(here.handle.datagrams().is_some(), tcp);
        let long = vec![5; 100_000];
        here.sender.send(long.clone()).await.unwrap();
        here.sender.send(vec![]).await.unwrap();
        assert_eq!(message(&mut there).await, long);
        assert_eq!(message(&mut there).await, [0; 0]);
        assert!(here.sender.send(vec![5; 100_001]).await.is_err());
        there.sender.send(b"last".to_vec()).await.unwrap();
        let close = there.sender.close(crate::CloseCode::Done, "enough");
        let (_, last) = tokio::join!(close, message(&mut here));
        assert_eq!(last, b"last");
        let end = timeout(LONG, here.receiver.recv()).await.unwrap();
        assert!(!matches!(end, Ok(Some(_))), "{end:?}");
        timeout(LONG, here.handle.closed()).await.unwrap();
    }
}

#[tokio::test]
async fn a_server_with_another_key_is_refused_over_both_carriers() {
    let (host, other) = pair(LONG);
    let server = server("127.0.0.1:0");
    let wrong = other.endpoint.host_id();
    let udp = [at(&server).to_string()];
    let tcp = [server.server.tcp_address().unwrap().to_string()];
    let by_udp = host
        .endpoint
        .connect_rendezvous(wrong, &udp, &protocol())
        .await;
    assert!(
        matches!(by_udp, Err(ConnectError::IdentityChanged { .. })),
        "{by_udp:?}"
    );
    let by_tcp = host
        .endpoint
        .connect_rendezvous_tcp(wrong, &tcp, &protocol())
        .await;
    let text = by_tcp.unwrap_err().to_string();
    assert!(text.contains("identity"), "{text}");
}

#[tokio::test]
async fn an_agent_is_no_rendezvous_server() {
    let (host, agent) = pair(LONG);
    let address = agent.endpoint.local_address().unwrap().to_string();
    let id = agent.endpoint.host_id();
    let link = host
        .endpoint
        .connect_rendezvous(id, &[address], &protocol())
        .await;
    assert!(link.is_err());
}

#[tokio::test]
async fn datagrams_travel_in_a_connection_over_tcp_between_messages() {
    let (host, _) = pair(LONG);
    let server = server("127.0.0.1:0");
    let (mut here, mut there) = connect(&host, &server, true).await;
    let datagrams = here.handle.datagrams().unwrap();
    for number in 0..200_u8 {
        datagrams.send(vec![60, 1, 2, 3, 4, number]).await.unwrap();
    }
    here.sender.send(b"between".to_vec()).await.unwrap();
    let (mut relayed, mut messages) = (Vec::new(), 0);
    while relayed.len() < 200 || messages < 1 {
        match timeout(LONG, there.receiver.recv())
            .await
            .unwrap()
            .unwrap()
            .unwrap()
        {
            Received::Datagram(datagram) => relayed.push(datagram[5]),
            Received::Message(bytes) => {
                assert_eq!(&bytes[..], b"between");
                messages += 1;
            }
        }
    }
    assert!(relayed.into_iter().eq(0..200));
}

#[tokio::test]
async fn relayed_datagrams_pass_unchanged_and_in_order_beside_stun_and_quic() {
    for listen in ["127.0.0.1:0", "[::]:0"] {
        let server = server(listen);
        let (host, _) = pair(LONG);
        let (mut link, mut there) = connect(&host, &server, false).await;
        let a = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let b = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let ends = [a.local_addr().unwrap(), b.local_addr().unwrap()];
        server.relay.0.lock().unwrap().extend(ends);
        let to = at(&server);
        let mut buffer = [0; 2000];
        // Datagrams of several lengths, some of which the relay drops, in bursts that the kernel
        // may put together.
        for round in 0..20_u8 {
            let burst: Vec<Vec<u8>> = (0..16)
                .map(|number| {
                    let mark = if number == 5 { 7 } else { 9 };
                    let length = if number == 15 { 100 } else { 1300 };
                    [
                        &[60, 0, 0, 0, 0, mark, round, number][..],
                        &vec![number; length],
                    ]
                    .concat()
                })
                .collect();
            for datagram in &burst {
                a.send_to(datagram, to).await.unwrap();
            }
            for datagram in burst.iter().filter(|datagram| datagram[5] != 7) {
                let (count, from) = timeout(LONG, b.recv_from(&mut buffer))
                    .await
                    .unwrap()
                    .unwrap();
                assert_eq!((&buffer[..count], from), (&datagram[..], to));
            }
        }
        // Strangers, short and empty ones, other protocols: nothing comes of them.
        let stranger = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        for junk in [
            &[60, 0, 0, 0, 0, 9][..],
            &[60],
            &[],
            &[5; 40],
            &[200; 9],
            &[1; 30],
        ] {
            stranger.send_to(junk, to).await.unwrap();
        }
        let request = BindingRequest {
            transaction: [7; 12],
            fingerprint: false,
            unknown: Vec::new(),
        };
        let request = request.encode();
        assert_eq!(DatagramKind::of(request[0]), DatagramKind::Stun);
        stranger.send_to(&request, to).await.unwrap();
        let (count, _) = timeout(LONG, stranger.recv_from(&mut buffer))
            .await
            .unwrap()
            .unwrap();
        let answer = BindingAnswer::decode(&buffer[..count]).unwrap();
        assert_eq!(answer.result, Ok(stranger.local_addr().unwrap()));
        link.sender.send(b"still".to_vec()).await.unwrap();
        assert_eq!(message(&mut there).await, b"still");
        // What came over TCP leaves from the same socket.
        server
            .server
            .relay_sender()
            .send(ends[1], &[60, 1, 1, 1, 1, 1]);
        let (count, from) = timeout(LONG, b.recv_from(&mut buffer))
            .await
            .unwrap()
            .unwrap();
        assert_eq!((count, from), (6, to));
        assert_eq!(server.server.relay_sender().lost(), 0);
    }
}

#[tokio::test]
async fn garbage_over_tcp_ends_its_connection_and_nothing_else() {
    let (host, _) = pair(LONG);
    let server = server("127.0.0.1:0");
    let address = server.server.tcp_address().unwrap();
    let mut plain = TcpStream::connect(address).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let (mut here, mut there) = connect(&host, &server, true).await;
    // A datagram over the limit: the receiver ends the connection.
    let datagrams = here.handle.datagrams().unwrap();
    datagrams.send(vec![60; 1501]).await.unwrap();
    let end = timeout(LONG, there.receiver.recv()).await.unwrap();
    assert!(end.unwrap_err().to_string().contains("1501"));
    let end = timeout(LONG, here.receiver.recv()).await.unwrap();
    assert!(!matches!(end, Ok(Some(_))), "{end:?}");
    let (mut here, mut there) = connect(&host, &server, true).await;
    here.sender.send(b"hello".to_vec()).await.unwrap();
    assert_eq!(message(&mut there).await, b"hello");
}

#[test]
fn the_frames_are_those_of_the_page() {
    let datagram = [60, 4, 3, 2, 1, 0x70, 0x61, 0x79, 0x6c, 0x6f, 0x61, 0x64];
    let mut bytes = frame_header(1, false).to_vec();
    bytes.push(3);
    bytes.extend(frame_header(datagram.len(), true));
    bytes.extend(datagram);
    let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let block = format!("```tcp\n{}\n```", hex.join(" "));
    let page = include_str!("../../../../docs/rendezvous.md");
    assert!(page.contains(&block), "docs/rendezvous.md lacks\n{block}");
    let mut frames = TcpFrames::new(10, 1500);
    frames.push(&bytes);
    let joined = bytes::Bytes::from_static(&[3]);
    assert_eq!(frames.take(), Ok(Some(Received::Message(joined))));
    let relayed = bytes::Bytes::copy_from_slice(&datagram);
    assert_eq!(frames.take(), Ok(Some(Received::Datagram(relayed))));
    assert_eq!(frames.take(), Ok(None));
    assert!(frames.is_empty());
}

#[test]
fn lengths_over_a_limit_are_refused_before_their_bytes_come() {
    for (length, is_datagram) in [(11, false), (1501, true), (0, true), (u32::MAX >> 1, false)] {
        let mut frames = TcpFrames::new(10, 1500);
        frames.push(&frame_header(length as usize, is_datagram));
        assert!(frames.take().is_err(), "{length} {is_datagram}");
    }
}

proptest! {
    #[test]
    fn any_cutting_gives_the_same_frames(
        sent in proptest::collection::vec(
            (any::<bool>(), proptest::collection::vec(any::<u8>(), 1..40)), 0..8),
        cuts in proptest::collection::vec(1_usize..9, 1..20),
    ) {
        let mut wire = Vec::new();
        for (is_datagram, content) in &sent {
            wire.extend(frame_header(content.len(), *is_datagram));
            wire.extend(content);
        }
        let mut frames = TcpFrames::new(40, 40);
        let mut received = Vec::new();
        let mut cuts = cuts.into_iter().cycle();
        let mut rest = &wire[..];
        while !rest.is_empty() {
            let (now, later) = rest.split_at(cuts.next().unwrap().min(rest.len()));
            frames.push(now);
            rest = later;
            while let Some(frame) = frames.take().unwrap() {
                received.push(match frame {
                    Received::Message(bytes) => (false, bytes.to_vec()),
                    Received::Datagram(bytes) => (true, bytes.to_vec()),
                });
            }
        }
        prop_assert_eq!(received, sent);
        prop_assert!(frames.is_empty());
    }
}
