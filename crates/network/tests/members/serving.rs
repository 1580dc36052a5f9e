//! What servers do for hosts, and what goes on without them.

use crate::common::{Host, LIMIT, Server, publish, rules, signed, token, two_members};
use longhaul_network::member::{Event, Leg, suite_of};
use longhaul_overlay::seal::Suite;
use longhaul_protocol::HostId;
use longhaul_realm::member::{Failure, Input};
use longhaul_realm::protocol::{Candidate, Candidates, SessionId, Target, ToServer};
use longhaul_realm::relay;
use longhaul_realm::ruleset::ServerEntry;
use longhaul_transport::{Received, RendezvousProtocol, Scope, TrustedHost};
use nix::sys::socket::{SockaddrIn, getsockname};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::BorrowedFd;
use tokio::time::timeout;

/// The same socket as that of a host's endpoint, to send datagrams of other kinds from.
fn main_socket(host: &Host) -> UdpSocket {
    let wanted: SocketAddr = host.address().parse().unwrap();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let name = entry.unwrap().file_name();
        let Some(fd) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let bound = getsockname::<SockaddrIn>(fd);
        let is_it = bound.is_ok_and(|bound| SocketAddr::V4(bound.into()) == wanted);
        if is_it {
            // SAFETY: the descriptor is that of the endpoint, which lives as long as the host.
            #[expect(unsafe_code, reason = "the endpoint does not give its socket away")]
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            return UdpSocket::from(fd.try_clone_to_owned().unwrap());
        }
    }
    panic!("no socket is bound to {wanted}");
}

async fn open_relay(paris: &mut Host, oslo: &mut Host) -> SessionId {
    let status = paris.until_registered().await;
    let ask = Input::OpenRelay {
        request: 5,
        server: status.servers[0].server.id,
        peer: oslo.id(),
    };
    paris.handle().input(ask).await;
    let opened = |event| match event {
        Event::RelayOpened { session, peer, .. } => Some((session, peer)),
        _ => None,
    };
    let (session, peer) = paris.event(opened).await;
    assert_eq!(peer, oslo.id());
    assert_eq!(oslo.event(opened).await, (session, paris.id()));
    session
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_are_introduced_and_signal_to_each_other() {
    let server = Server::start().await;
    let (mut paris, mut oslo) = two_members(&server).await;
    let candidates = Candidates {
        candidates: vec![Candidate {
            kind: 0,
            address: "10.9.8.7:7400".parse().unwrap(),
            priority: 9,
        }],
        nat: 2,
    };
    oslo.handle()
        .input(Input::Candidates(candidates.clone()))
        .await;
    // The signal comes behind the candidates on the same connection.
    oslo.handle()
        .input(Input::Signal(paris.id(), b"call".to_vec()))
        .await;
    let signal = |event| match event {
        Event::Signal(from, bytes) => Some((from, bytes)),
        _ => None,
    };
    assert_eq!(paris.event(signal).await, (oslo.id(), b"call".to_vec()));
    paris
        .handle()
        .input(Input::Introduce(3, Target::Name("oslo".to_owned())))
        .await;
    let introduced = |event| match event {
        Event::Introduced { request, peer, .. } => Some((request, peer)),
        _ => None,
    };
    let (request, peer) = paris.event(introduced).await;
    assert_eq!(
        (request, peer.id, peer.candidates.nat),
        (Some(3), oslo.id(), 2)
    );
    let addresses: Vec<SocketAddr> = peer
        .candidates
        .candidates
        .iter()
        .map(|one| one.address)
        .collect();
    let seen: SocketAddr = oslo.address().parse().unwrap();
    assert_eq!(addresses, [candidates.candidates[0].address, seen]);
    let (request, peer) = oslo.event(introduced).await;
    assert_eq!((request, peer.id), (None, paris.id()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_carries_between_udp_and_tcp() {
    let server = Server::start().await;
    let (mut paris, mut oslo) = (Host::new(), Host::new());
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let both = signed(&rules(1, &[(&paris, "paris"), (&oslo, "oslo")], &[]));
    publish(&server.entry, &both).await;
    paris.run_with(&both, vec![server.entry.clone()]);
    oslo.run_with(&both, vec![server.by_tcp(&silent)]);
    paris.until_registered().await;
    let status = oslo.until_registered().await;
    assert_eq!(status.servers[0].way, Some("TCP"));
    let leg = |event| match event {
        Event::ServerUp(_, leg) => Some(leg),
        _ => None,
    };
    let Leg::Udp(to) = paris.event(leg).await else {
        panic!("Paris is not connected over UDP");
    };
    let Leg::Tcp { send, mut receive } = oslo.event(leg).await else {
        panic!("Oslo is not connected over TCP");
    };
    let session = open_relay(&mut paris, &mut oslo).await;
    let socket = main_socket(&paris);
    for number in 0..50_u8 {
        let datagram = [&relay::header(session)[..], &[number; 1000]].concat();
        socket.send_to(&datagram, to).unwrap();
        let relayed = timeout(LIMIT, receive.recv()).await.unwrap().unwrap();
        assert_eq!(&relayed[..], &datagram[..]);
    }
    // And back: Paris' socket belongs to its endpoint, which takes what arrives.
    let running = server.running.as_ref().unwrap();
    let before = running.counters().1.relayed;
    for number in 0..50_u8 {
        let datagram = [&relay::header(session)[..], &[number; 1000]].concat();
        send.send(datagram).await.unwrap();
    }
    let all = async {
        while running.counters().1.relayed < before + 50 {
            tokio::task::yield_now().await;
        }
    };
    timeout(LIMIT, all).await.unwrap();
    // A stranger's datagrams of the session go nowhere.
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    let datagram = [&relay::header(session)[..], &[1; 10]].concat();
    stranger.send_to(&datagram, to).unwrap();
    let dropped = async {
        while running.counters().1.strangers == 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(LIMIT, dropped).await.unwrap();
    // An introduction names no address for a host without UDP.
    paris
        .handle()
        .input(Input::Introduce(8, Target::Id(oslo.id())))
        .await;
    let introduced = |event| match event {
        Event::Introduced { peer, .. } => Some(peer),
        _ => None,
    };
    assert!(
        paris
            .event(introduced)
            .await
            .candidates
            .candidates
            .is_empty()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn two_servers_broker_for_each_other_and_one_may_stop() {
    let mut servers = [Server::start().await, Server::start().await];
    let entries: Vec<ServerEntry> = servers.iter().map(|server| server.entry.clone()).collect();
    let (mut paris, mut oslo) = (Host::new(), Host::new());
    let mut at_one = rules(1, &[(&paris, "paris"), (&oslo, "oslo")], &[]);
    at_one.servers = entries.clone();
    let ruleset = signed(&at_one);
    publish(&entries[0], &ruleset).await;
    // The other server learns it from the first one, as soon as one has dialled the other.
    publish(&entries[1], &ruleset).await;
    paris.run_with(&ruleset, Vec::new());
    oslo.run_with(&ruleset, Vec::new());
    let everywhere = |status: &longhaul_network::member::Status| {
        status.servers.len() == 2 && status.servers.iter().all(|server| server.registered)
    };
    paris.until("registered twice", everywhere).await;
    oslo.until("registered twice", everywhere).await;

    servers[0].stop().await;
    let one = |status: &longhaul_network::member::Status| {
        status
            .servers
            .iter()
            .filter(|server| server.registered)
            .count()
            == 1
    };
    paris.until("one server", one).await;
    oslo.until("one server", one).await;
    paris
        .handle()
        .input(Input::Introduce(4, Target::Id(oslo.id())))
        .await;
    let introduced = |event| match event {
        Event::Introduced { peer, .. } => Some(peer.id),
        _ => None,
    };
    assert_eq!(paris.event(introduced).await, oslo.id());

    // A version that only the second server has reaches the first one when it is back.
    at_one.version = 2;
    publish(&entries[1], &signed(&at_one)).await;
    servers[0].restart().await;
    paris.until("registered twice", everywhere).await;
    let newer = async {
        while servers[0].version() != 2 {
            tokio::task::yield_now().await;
        }
    };
    timeout(LIMIT, newer).await.unwrap();
    oslo.until("version 2", |status| status.version == 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_at_one_server_is_found_from_another() {
    let mut servers = [Server::start().await, Server::start().await];
    // The one with the lower id dials, and is asked first by who is at both.
    servers.sort_by_key(|server| server.entry.id);
    let [first, second] = &servers;
    let (mut paris, mut oslo) = (Host::new(), Host::new());
    let before = signed(&rules(1, &[(&paris, "paris"), (&oslo, "oslo")], &[]));
    publish(&first.entry, &before).await;
    publish(&second.entry, &before).await;
    paris.run_with(&before, vec![first.entry.clone()]);
    oslo.run_with(&before, vec![second.entry.clone()]);
    paris.until_registered().await;
    oslo.until_registered().await;
    // Nobody new finds the first server, so Oslo stays at the second one.
    let nowhere = UdpSocket::bind("127.0.0.1:0").unwrap();
    let hidden = ServerEntry {
        id: first.entry.id,
        addresses: vec![nowhere.local_addr().unwrap().to_string()],
    };
    let hosts = [(&paris, "paris"), (&oslo, "oslo")];
    let both = signed(&rules(2, &hosts, &[&hidden, &second.entry]));
    publish(&first.entry, &both).await;
    publish(&second.entry, &both).await;
    let everywhere = |status: &longhaul_network::member::Status| {
        status.servers.len() == 2 && status.servers.iter().all(|server| server.registered)
    };
    paris.until("registered twice", everywhere).await;
    let introduced = |event| match event {
        Event::Introduced { peer, .. } => Some(peer.id),
        _ => None,
    };
    let running = first.running.as_ref().unwrap();
    let brokered = async {
        // The first server may not have dialled the second one yet: then Paris asks that one.
        while running.counters().0.introduced == 0 {
            paris
                .handle()
                .input(Input::Introduce(4, Target::Id(oslo.id())))
                .await;
            assert_eq!(paris.event(introduced).await, oslo.id());
            assert_eq!(oslo.event(introduced).await, paris.id());
            // A host may send 50 messages a second.
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    };
    timeout(LIMIT, brokered).await.unwrap();
    assert!(
        !oslo
            .handle()
            .status()
            .borrow()
            .servers
            .iter()
            .all(|one| one.registered)
    );
}

/// Answers channels for gossip on a host's endpoint, as an agent does.
fn answer_gossip(host: &Host) {
    let (endpoint, handle) = (host.endpoint.clone(), host.handle().clone());
    tokio::spawn(async move {
        while let Some(control) = endpoint.accept().await {
            let handle = handle.clone();
            tokio::spawn(async move {
                while let Ok(mut channel) = control.accept().await {
                    let first = channel.recv().await.unwrap();
                    assert_eq!(suite_of(&first.unwrap()), Some(Ok(Suite::Aes256Gcm)));
                    handle.accepted(control.peer().host.id, channel);
                }
            });
        }
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn without_servers_what_is_connected_goes_on_and_gossips_and_the_rest_waits() {
    let mut server = Server::start().await;
    let (mut paris, oslo) = two_members(&server).await;
    answer_gossip(&oslo);
    let by_hand = TrustedHost {
        name: "oslo".to_owned(),
        id: oslo.id(),
        addresses: vec![oslo.address()],
        scope: Scope::default(),
    };
    paris.endpoint.trust().add(by_hand).unwrap();
    let control = paris.endpoint.connect("oslo").await.unwrap();
    paris.handle().connected(&control, Suite::Aes256Gcm);
    server.stop().await;
    let none = |status: &longhaul_network::member::Status| !status.servers[0].registered;
    paris.until("unregistered", none).await;
    oslo.until("unregistered", none).await;

    // Paris learns a version from elsewhere; Oslo has it from Paris.
    let next = rules(2, &[(&paris, "paris"), (&oslo, "oslo")], &[&server.entry]);
    paris
        .handle()
        .input(gossip(&oslo.id(), &signed(&next)))
        .await;
    paris.until("version 2", |status| status.version == 2).await;
    oslo.until("version 2", |status| status.version == 2).await;

    paris
        .handle()
        .input(Input::Introduce(6, Target::Id(oslo.id())))
        .await;
    let failed = |event| match event {
        Event::Failed(6, failure) => Some(failure),
        _ => None,
    };
    let failure = paris.event(failed).await;
    assert_eq!(failure, Failure::NoServer);
    assert!(failure.to_string().contains("what is connected goes on"));
    server.restart().await;
    paris.until_registered().await;
    let newer = async {
        while server.version() != 2 {
            tokio::task::yield_now().await;
        }
    };
    timeout(LIMIT, newer).await.unwrap();
}

fn gossip(from: &HostId, ruleset: &longhaul_realm::ruleset::SignedRuleset) -> Input {
    Input::Gossip(
        *from,
        longhaul_realm::protocol::Gossip::Ruleset(ruleset.clone()),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_messages_end_their_connection_and_no_other() {
    let server = Server::start().await;
    let (paris, _oslo) = two_members(&server).await;
    let protocol = RendezvousProtocol::new("test".to_owned());
    for (number, junk) in [&[77, 1, 2][..], &[], &[0xff; 3000]]
        .into_iter()
        .enumerate()
    {
        let bad = Host::new();
        let entry = server.by_tcp(&UdpSocket::bind("127.0.0.1:0").unwrap());
        let link = match number % 2 {
            0 => longhaul_network::member::connect_server(&bad.endpoint, &server.entry, &protocol),
            _ => longhaul_network::member::connect_server(&bad.endpoint, &entry, &protocol),
        };
        let mut link = link.await.unwrap();
        link.sender.send(junk.to_vec()).await.unwrap();
        let end = timeout(LIMIT, link.receiver.recv()).await.unwrap();
        assert!(!matches!(end, Ok(Some(Received::Message(_)))), "{end:?}");
    }
    let status = paris.handle().status().borrow().clone();
    assert!(status.is_registered());
    // A flood ends too.
    let flood = Host::new();
    let mut link =
        longhaul_network::member::connect_server(&flood.endpoint, &server.entry, &protocol)
            .await
            .unwrap();
    let bye = longhaul_realm::wire::encode(&ToServer::Networks(Vec::new())).unwrap();
    for _ in 0..1000 {
        if link.sender.send(bye.clone()).await.is_err() {
            break;
        }
    }
    let ended = async { while let Ok(Some(_)) = link.receiver.recv().await {} };
    timeout(LIMIT, ended).await.unwrap();
    let token = token("late", vec![server.entry.clone()]);
    let mut late = Host::new();
    late.join(&token);
    late.until_registered().await;
}
