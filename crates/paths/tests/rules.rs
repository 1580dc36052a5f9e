//! Single rules of the core, one peer at a time, and any input at all.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use longhaul_paths::tuning::{PAIRS_MAX, PROBES_MAX};
use longhaul_paths::{
    Action, Candidate, Config, Event, Kind, Local, LocalAction, LocalEvent, Mapping, Message,
    Offer, Origin, Paths, Plan, Route, ServerConfig, SocketId, Tuning, Udp,
};
use longhaul_protocol::HostId;
use proptest::prelude::*;
use std::net::SocketAddr;
use std::time::Duration;

const SERVER: HostId = HostId([100; 32]);
const RELAY: Route = Route::Relayed { server: SERVER };

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn direct(text: &str) -> Route {
    Route::Direct {
        socket: SocketId::MAIN,
        address: address(text),
    }
}

/// A host with one server, which sees it at these addresses.
fn local_seen_at(seen: [&str; 2]) -> Local {
    let server = ServerConfig {
        id: SERVER,
        name: "lyon-rendezvous".to_owned(),
        addresses: vec![address("198.51.100.1:3478"), address("198.51.100.1:3479")],
        relays: true,
        tcp: true,
    };
    let mut local = Local::new(vec![server], 1, Tuning::default(), ms(0));
    let own = LocalEvent::Addresses(vec![address("192.168.1.2:7000")]);
    local.handle(own, ms(0));
    let mut seen = seen.into_iter();
    while let Some(action) = local.poll_action() {
        if let LocalAction::Ask { id, address: from } = action {
            let mapped = address(seen.next().unwrap());
            local.handle(LocalEvent::Observed { id, from, mapped }, ms(10));
        }
    }
    let attached = LocalEvent::Attached {
        server: SERVER,
        attached: true,
    };
    local.handle(attached, ms(10));
    local
}

fn cone() -> Local {
    local_seen_at(["203.0.113.1:7000", "203.0.113.1:7000"])
}

fn paths(peer: u8) -> Paths {
    Paths::new(Config {
        own: HostId([1; 32]),
        peer: HostId([peer; 32]),
        seed: u64::from(peer),
        may_search: true,
    })
}

fn present() -> Event {
    Event::Present {
        server: SERVER,
        present: true,
    }
}

fn actions(paths: &mut Paths) -> Vec<Action> {
    std::iter::from_fn(|| paths.poll_action()).collect()
}

fn offer(addresses: &[&str], mapping: Mapping) -> Offer {
    let candidate = |text: &&str| Candidate {
        origin: Origin::Reflexive,
        address: address(text),
    };
    Offer {
        candidates: addresses.iter().map(candidate).collect(),
        mapping,
        udp_blocked: false,
    }
}

fn call(round: u32, plan: Plan, offer: Offer) -> Event {
    Event::Message(Message {
        kind: Kind::Call,
        instance: 9,
        round,
        plan,
        round_trip: ms(10),
        offer,
    })
}

/// Runs until a time, and acknowledges probes on these routes after their round trip.
fn run(paths: &mut Paths, local: &mut Local, from: u64, to: u64, alive: &[(Route, u64)]) -> u32 {
    let mut probes = 0;
    let mut acks: Vec<(u64, u64, Route)> = Vec::new();
    for now in from..to {
        acks.retain(|(at, id, on)| {
            if *at == now {
                let event = Event::Ack {
                    id: *id,
                    on: *on,
                    observed: None,
                };
                paths.handle(event, local, ms(now));
            }
            *at > now
        });
        if paths.poll_timeout(local).is_some_and(|at| at <= ms(now)) {
            paths.handle_timeout(local, ms(now));
        }
        for action in actions(paths) {
            if let Action::Probe { id, on } = action {
                probes += u32::from(on.is_direct());
                if let Some((_, round_trip)) = alive.iter().find(|(route, _)| *route == on) {
                    acks.push((now + round_trip, id, on));
                }
            }
        }
    }
    probes
}

#[test]
fn a_peer_is_relayed_at_once_and_the_reason_is_a_sentence() {
    let mut local = cone();
    let mut paths = paths(2);
    let why = |paths: &Paths, local: &Local| paths.why(local).to_string();
    assert_eq!(
        why(&paths, &local),
        "waits: the host is not registered at a rendezvous that answers"
    );
    paths.handle(present(), &mut local, ms(10));
    assert_eq!(paths.used(), Some(RELAY));
    assert_eq!(
        why(&paths, &local),
        "relayed by lyon-rendezvous: a direct path was not tried yet"
    );
    let mut symmetric = local_seen_at(["203.0.113.1:7000", "203.0.113.1:17000"]);
    assert_eq!(symmetric.mapping(), Mapping::Dependent { step: None });
    let theirs = offer(&["203.0.113.2:7000"], Mapping::Dependent { step: None });
    paths.handle(call(1, Plan::Punch, theirs), &mut symmetric, ms(20));
    run(&mut paths, &mut symmetric, 20, 8000, &[]);
    assert_eq!(
        why(&paths, &symmetric),
        "relayed by lyon-rendezvous: both NATs map each destination to another port"
    );
    let refused = LocalEvent::Refused {
        server: SERVER,
        wait: ms(1000),
    };
    symmetric.handle(refused, ms(8000));
    paths.refresh(&mut symmetric, ms(8000));
    assert_eq!(why(&paths, &symmetric), "waits: the relay is overloaded");
    paths.handle_timeout(&mut symmetric, ms(9000));
    assert_eq!(paths.used(), Some(RELAY));
}

#[test]
fn the_pulse_is_left_out_while_there_is_traffic() {
    let mut local = cone();
    let mut paths = paths(2);
    let route = direct("203.0.113.2:7000");
    let theirs = offer(&["203.0.113.2:7000"], Mapping::EndpointIndependent);
    paths.handle(present(), &mut local, ms(10));
    paths.handle(call(1, Plan::Punch, theirs), &mut local, ms(10));
    let alive = [(route, 20)];
    run(&mut paths, &mut local, 10, 3000, &alive);
    assert_eq!(paths.used(), Some(route));
    // Idle: a pulse every 5 s.
    let probes = run(&mut paths, &mut local, 3000, 33_000, &alive);
    assert!((5..=7).contains(&probes), "{probes}");
    // Busy: only the check.
    let mut probes = 0;
    for second in 33..63 {
        paths.sent(route, ms(second * 1000));
        paths.received(route, &local, ms(second * 1000 + 10));
        let from = second * 1000 + 10;
        probes += run(&mut paths, &mut local, from, from + 990, &alive);
    }
    assert!(probes <= 2, "{probes}");
    // It dies: the relay is used within 8 s.
    run(&mut paths, &mut local, 63_000, 71_000, &[(RELAY, 30)]);
    assert_eq!(paths.used(), Some(RELAY));
}

#[test]
fn a_little_better_is_no_reason_to_change() {
    let mut local = cone();
    let mut paths = paths(2);
    let [first, second] = ["203.0.113.2:7000", "203.0.113.3:7000"];
    let theirs = offer(&[first, second], Mapping::EndpointIndependent);
    paths.handle(present(), &mut local, ms(10));
    paths.handle(call(1, Plan::Punch, theirs), &mut local, ms(10));
    let [first, second] = [first, second].map(direct);
    run(
        &mut paths,
        &mut local,
        10,
        5000,
        &[(first, 40), (second, 43)],
    );
    assert_eq!(paths.used(), Some(first));
    run(
        &mut paths,
        &mut local,
        5000,
        200_000,
        &[(first, 40), (second, 36)],
    );
    assert_eq!(paths.used(), Some(first), "4 ms are too little");
    run(
        &mut paths,
        &mut local,
        200_000,
        800_000,
        &[(first, 40), (second, 10)],
    );
    assert_eq!(paths.used(), Some(second), "30 ms are not");
}

#[test]
fn one_peer_is_searched_at_a_time() {
    let mut local = cone();
    let mut both = [paths(2), paths(3)];
    let opened = both.each_mut().map(|paths| {
        let theirs = offer(&["203.0.113.9:7000"], Mapping::Dependent { step: None });
        paths.handle(present(), &mut local, ms(10));
        paths.handle(call(1, Plan::Search, theirs), &mut local, ms(10));
        run(paths, &mut local, 10, 2000, &[])
    });
    // 1 s after the start, 100 probes a second; and one round of the single candidate.
    assert!(opened[0] > 50 && opened[1] < 10, "{opened:?}");
    both[0].close(&mut local, ms(2000));
    let theirs = offer(&["203.0.113.9:7000"], Mapping::Dependent { step: None });
    both[1].handle(call(2, Plan::Search, theirs), &mut local, ms(7000));
    assert!(run(&mut both[1], &mut local, 7000, 9000, &[]) > 50);
}

#[test]
fn without_udp_the_relay_is_reached_over_tcp() {
    let server = ServerConfig {
        id: SERVER,
        name: "lyon-rendezvous".to_owned(),
        addresses: vec![address("198.51.100.1:3478")],
        relays: true,
        tcp: true,
    };
    let mut local = Local::new(vec![server], 1, Tuning::default(), ms(0));
    local.handle(LocalEvent::Addresses(vec![address("10.0.0.2:7000")]), ms(0));
    let (mut opened, mut blocked, mut last) = (None, None, None);
    for now in 0..30_000 {
        local.handle_timeout(ms(now));
        while let Some(action) = local.poll_action() {
            match action {
                LocalAction::OpenTcp(_) => {
                    opened = opened.or(Some(now));
                    let tcp = LocalEvent::Tcp {
                        server: SERVER,
                        open: true,
                    };
                    local.handle(tcp, ms(now));
                }
                LocalAction::Ask { id, address } => last = Some((id, address)),
                LocalAction::CloseTcp(_) => panic!("UDP does not work"),
                LocalAction::Refresh => {}
            }
        }
        if local.udp() == Udp::Blocked {
            blocked = blocked.or(Some(now));
        }
    }
    assert_eq!((opened, blocked), (Some(1000), Some(4500)));
    assert_eq!(local.leg(SERVER), Some(longhaul_paths::Leg::Tcp));
    // UDP works again: TCP is closed later.
    let (id, from) = last.unwrap();
    let mapped = address("203.0.113.1:7000");
    local.handle(LocalEvent::Observed { id, from, mapped }, ms(30_000));
    assert_eq!(local.leg(SERVER), Some(longhaul_paths::Leg::Udp));
    local.handle_timeout(ms(40_000));
    let closed = std::iter::from_fn(|| local.poll_action());
    assert!(
        closed
            .collect::<Vec<_>>()
            .contains(&LocalAction::CloseTcp(SERVER))
    );
}

fn any_route() -> impl Strategy<Value = Route> {
    prop_oneof![
        Just(RELAY),
        (0..3_u32, any::<u8>(), 1..40_u16).prop_map(|(socket, ip, port)| Route::Direct {
            socket: SocketId(socket),
            address: ([203, 0, 113, ip], port).into(),
        }),
    ]
}

fn any_event() -> impl Strategy<Value = Event> {
    let message = (any::<bool>(), 0..3_u64, 0..4_u32, any::<bool>(), 0..5_usize);
    let message = message.prop_map(|(calls, instance, round, search, many)| {
        let addresses = [
            "203.0.113.7:7000",
            "10.0.0.1:1",
            "127.0.0.1:9",
            "203.0.113.8:2",
        ];
        let mapping = match search {
            true => Mapping::Dependent { step: Some(1) },
            false => Mapping::EndpointIndependent,
        };
        Event::Message(Message {
            kind: match calls {
                true => Kind::Call,
                false => Kind::Answer { start_in: ms(50) },
            },
            instance,
            round,
            plan: if search { Plan::Search } else { Plan::Punch },
            round_trip: Duration::from_secs(u64::from(round) * 1000),
            offer: offer(&addresses[..many.min(4)], mapping),
        })
    });
    prop_oneof![
        any::<bool>().prop_map(|present| Event::Present {
            server: SERVER,
            present
        }),
        message,
        (any::<u64>(), any_route()).prop_map(|(id, on)| Event::Probe { id, on }),
        (any::<u64>(), any_route()).prop_map(|(id, on)| Event::Ack {
            id,
            on,
            observed: None
        }),
        (0..4_u32).prop_map(|many| Event::Sockets((0..many).map(SocketId).collect())),
        any_route().prop_map(Event::Dead),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// Whatever comes, tables are bounded, time goes on, and without acknowledgements nothing
    /// direct is used.
    #[test]
    fn any_input_is_bounded(events in prop::collection::vec((any_event(), 0..3000_u64), 0..120)) {
        let mut local = cone();
        let mut paths = paths(2);
        let mut now = ms(10);
        for (event, wait) in events {
            paths.handle(event, &mut local, now);
            let end = now + ms(wait);
            let mut steps = 0;
            while let Some(due) = paths.poll_timeout(&local).filter(|due| *due <= end) {
                now = now.max(due);
                paths.handle_timeout(&mut local, now);
                steps += 1;
                prop_assert!(steps < 3000, "time does not go on");
            }
            now = end;
            for action in actions(&mut paths) {
                let used = matches!(action, Action::Use(Some(route)) if route.is_direct());
                prop_assert!(!used, "nothing was acknowledged");
            }
            prop_assert!(paths.pairs() <= PAIRS_MAX && paths.outstanding() <= PROBES_MAX);
        }
    }
}

/// A host learns of other servers while it runs: what it knows of those that stay is kept.
#[test]
fn servers_come_and_go() {
    let config = |id: u8, at: &str| ServerConfig {
        id: HostId([id; 32]),
        name: format!("server-{id}"),
        addresses: vec![address(at)],
        relays: true,
        tcp: true,
    };
    let (one, two) = (
        config(101, "198.51.100.1:7400"),
        config(102, "198.51.100.2:7400"),
    );
    let mut local = Local::new(vec![one.clone()], 1, Tuning::default(), ms(0));
    let own = LocalEvent::Addresses(vec![address("192.168.1.2:7000")]);
    local.handle(own, ms(0));
    let asked = |local: &mut Local| {
        let actions = std::iter::from_fn(|| local.poll_action()).collect::<Vec<_>>();
        let asks = actions.iter().filter_map(|action| match action {
            LocalAction::Ask { id, address } => Some((*id, *address)),
            _ => None,
        });
        (asks.collect::<Vec<_>>(), actions)
    };
    let (asks, _) = asked(&mut local);
    let [(id, from)] = asks[..] else {
        panic!("{asks:?}");
    };
    let mapped = address("203.0.113.1:7000");
    local.handle(LocalEvent::Observed { id, from, mapped }, ms(10));
    assert_eq!(local.udp(), Udp::Works);
    asked(&mut local);
    local.handle(LocalEvent::Servers(vec![two.clone(), one.clone()]), ms(20));
    let (asks, _) = asked(&mut local);
    // Only the new one is asked now.
    assert_eq!(asks.len(), 1, "{asks:?}");
    assert_eq!(asks[0].1, address("198.51.100.2:7400"));
    assert!(local.leg(one.id).is_some() && local.leg(two.id).is_none());
    assert_eq!(local.offer().candidates.len(), 2);
    local.handle(LocalEvent::Servers(vec![two.clone()]), ms(30));
    assert!(local.leg(one.id).is_none());
    assert_eq!(local.name(one.id), "an unknown server");
    // What the first one saw is not offered any more.
    assert_eq!(local.offer().candidates.len(), 1);
    // A connection over TCP ends with its server.
    let mut now = ms(30);
    while !asked(&mut local).1.contains(&LocalAction::OpenTcp(two.id)) {
        now = local.poll_timeout().unwrap().max(now + ms(1));
        local.handle_timeout(now);
    }
    local.handle(LocalEvent::Servers(Vec::new()), now);
    assert!(asked(&mut local).1.contains(&LocalAction::CloseTcp(two.id)));
    assert_eq!(local.udp(), Udp::Unknown);
}

/// A host may be registered at a server before a name service has answered which addresses the
/// server has.
#[test]
fn a_server_that_gets_its_addresses_late_knows_this_host_still() {
    let mut server = ServerConfig {
        id: SERVER,
        name: "lyon-rendezvous".to_owned(),
        addresses: Vec::new(),
        relays: true,
        tcp: true,
    };
    let mut local = Local::new(vec![server.clone()], 1, Tuning::default(), ms(0));
    let own = LocalEvent::Addresses(vec![address("192.168.1.2:7000")]);
    local.handle(own, ms(0));
    let attached = LocalEvent::Attached {
        server: SERVER,
        attached: true,
    };
    local.handle(attached, ms(10));
    server.addresses = vec![address("198.51.100.1:3478")];
    local.handle(LocalEvent::Servers(vec![server]), ms(20));
    let question = std::iter::from_fn(|| local.poll_action()).find_map(|action| match action {
        LocalAction::Ask { id, address } => Some((id, address)),
        _ => None,
    });
    let (id, from) = question.unwrap();
    let mapped = address("203.0.113.1:7000");
    local.handle(LocalEvent::Observed { id, from, mapped }, ms(30));
    assert!(local.is_usable(SERVER, ms(40)));
}
