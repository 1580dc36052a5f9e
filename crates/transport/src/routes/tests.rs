//! Tests the tables of ways.

use super::*;
use proptest::prelude::*;

const ONE: HostId = HostId([1; 32]);
const TWO: HostId = HostId([2; 32]);
const SERVER: HostId = HostId([9; 32]);

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

#[test]
fn peer_addresses_are_from_ranges_that_are_never_routed() {
    for (ipv6, expected) in [(true, "[100::1]:1"), (false, "240.0.0.1:1")] {
        let routes = Routes::new(ipv6);
        let of_one = routes.peer_address(ONE);
        assert_eq!(of_one, address(expected));
        assert_eq!(routes.peer_address(ONE), of_one);
        assert_ne!(routes.peer_address(TWO), of_one);
        assert_eq!(routes.peer_of(of_one), Some(ONE));
        routes.forget(ONE);
        assert_eq!(routes.peer_of(of_one), None);
        assert!(!routes.is_peer(ONE) && routes.is_peer(TWO));
        // Datagrams to a forgotten peer do not leave the host.
        assert!(matches!(routes.departure(of_one), Departure::Nowhere));
        // Nobody can pretend to be there.
        assert_eq!(routes.arrival(SocketId::MAIN, of_one), None);
    }
}

#[test]
fn addresses_of_nobody_stay_as_they_are() {
    let routes = Routes::new(true);
    let other = address("[::ffff:192.0.2.1]:7");
    assert!(matches!(routes.departure(other), Departure::Plain));
    let arrival = routes.arrival(SocketId::MAIN, other).unwrap();
    assert_eq!((arrival.address, arrival.is_peer), (other, false));
    routes.peer_address(ONE);
    let arrival = routes.arrival(SocketId::MAIN, other).unwrap();
    assert_eq!((arrival.address, arrival.is_peer), (other, false));
}

#[test]
fn an_arrival_belongs_to_the_peer_that_had_it_last_and_to_one_socket() {
    let routes = Routes::new(true);
    let (plain, mapped) = (address("192.0.2.1:7"), address("[::ffff:192.0.2.1]:7"));
    let source = |socket| routes.arrival(socket, mapped).unwrap().address;
    assert!(routes.add_arrival(ONE, SocketId::MAIN, plain));
    assert_eq!(source(SocketId::MAIN), routes.peer_address(ONE));
    assert_eq!(source(SocketId(5)), mapped);
    assert!(routes.add_arrival(TWO, SocketId::MAIN, plain));
    assert_eq!(source(SocketId::MAIN), routes.peer_address(TWO));
    // What the other one had is not taken from the new owner.
    routes.forget(ONE);
    assert_eq!(source(SocketId::MAIN), routes.peer_address(TWO));
    routes.remove_arrival(SocketId::MAIN, mapped);
    assert_eq!(source(SocketId::MAIN), mapped);
}

#[test]
fn the_arrivals_of_a_peer_are_bounded() {
    let routes = Routes::new(true);
    let at = |port| SocketAddr::new([192, 0, 2, 1].into(), port);
    for port in 1..=64 {
        assert!(routes.add_arrival(ONE, SocketId::MAIN, at(port)));
    }
    assert!(!routes.add_arrival(ONE, SocketId::MAIN, at(65)));
    assert!(routes.add_arrival(ONE, SocketId::MAIN, at(64)));
    assert!(routes.add_arrival(TWO, SocketId::MAIN, at(1)));
    assert!(routes.add_arrival(ONE, SocketId::MAIN, at(65)));
    routes.socket_closed(SocketId::MAIN);
    assert!(routes.add_arrival(ONE, SocketId(1), at(66)));
}

#[test]
fn a_relayed_way_needs_a_relay_and_a_session() {
    let routes = Routes::new(true);
    let relay = address("198.51.100.1:7");
    let to = routes.peer_address(ONE);
    routes.set_way(ONE, Some(Way::Relayed { server: SERVER }));
    assert!(matches!(routes.departure(to), Departure::Nowhere));
    routes.set_server(SERVER, Some(RelayLeg::Udp(relay)));
    assert!(matches!(routes.departure(to), Departure::Nowhere));
    routes.open_session(SERVER, SessionId(3), ONE);
    match routes.departure(to) {
        Departure::Relayed(RelayLeg::Udp(at), SessionId(3)) => assert_eq!(at, relay),
        other => panic!("{other:?}"),
    }
    assert_eq!(routes.relayed_from(SERVER, SessionId(3)), Some(to));
    assert_eq!(routes.session(SERVER, ONE), Some(SessionId(3)));
    let arrival = routes.arrival(SocketId::MAIN, relay).unwrap();
    assert_eq!((arrival.server, arrival.is_peer), (Some(SERVER), false));
    assert_eq!(routes.arrival(SocketId(1), relay).unwrap().server, None);
    // A newer session takes the place of the old one.
    routes.open_session(SERVER, SessionId(4), ONE);
    assert_eq!(routes.relayed_from(SERVER, SessionId(3)), None);
    assert_eq!(routes.close_session(SERVER, SessionId(4)), Some(ONE));
    assert!(matches!(routes.departure(to), Departure::Nowhere));
    routes.set_server(SERVER, None);
    assert_eq!(routes.arrival(SocketId::MAIN, relay).unwrap().server, None);
}

proptest! {
    /// In any order of changes, the tables agree with each other.
    #[test]
    fn no_entry_outlives_its_peer(
        steps in prop::collection::vec((0..6_u8, 0..3_u8, 0..4_u32), 0..60),
    ) {
        let routes = Routes::new(true);
        for (step, peer, number) in steps {
            let peer = HostId([peer; 32]);
            let at = SocketAddr::new([192, 0, 2, 1].into(), number as u16 + 1);
            match step {
                0 => { routes.add_arrival(peer, SocketId(number), at); }
                1 => routes.remove_arrival(SocketId(number), at),
                2 => routes.open_session(SERVER, SessionId(number), peer),
                3 => { routes.close_session(SERVER, SessionId(number)); }
                4 => routes.forget(peer),
                _ => routes.socket_closed(SocketId(number)),
            }
            let tables = routes.read();
            for (arrival, peer) in &tables.arrivals {
                prop_assert!(tables.peers[peer].arrivals.contains(arrival));
            }
            for ((server, session), peer) in &tables.sessions {
                prop_assert_eq!(tables.peers[peer].sessions.get(server), Some(session));
            }
            let arrivals: usize = tables.peers.values().map(|peer| peer.arrivals.len()).sum();
            let sessions: usize = tables.peers.values().map(|peer| peer.sessions.len()).sum();
            prop_assert_eq!(arrivals, tables.arrivals.len());
            prop_assert_eq!(sessions, tables.sessions.len());
            prop_assert_eq!(tables.numbers.len(), tables.peers.len());
        }
    }
}
