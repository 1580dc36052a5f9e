//! Tests of the server: each rule of `docs/rendezvous.md` that the simulation does not show.

use super::*;
use crate::enrolment::Enrolment;
use crate::protocol::{Lease, LeaseAnswer, LeaseRequest, SessionId, Target};
use crate::relay;
use crate::ruleset::{Arbiter, ServerEntry, StoreId};
use crate::tests_common::{NOW_S, enrolment, id, key, ruleset, signed};
use longhaul_protocol::Generation;

const STORE: StoreId = StoreId([7; 16]);

fn at(ms: u64) -> Now {
    Now {
        steady: Duration::from_millis(ms),
        unix_s: NOW_S + ms / 1000,
    }
}

fn rules() -> crate::ruleset::Ruleset {
    let mut rules = ruleset(1, &[1, 2, 3]);
    rules.servers.push(ServerEntry {
        id: id(201),
        addresses: vec!["other.example:7400".to_owned()],
    });
    rules.arbiter = Some(Arbiter {
        server: id(200),
        store: STORE,
    });
    rules
}

fn server(number: u8) -> Server {
    server_with(number, Limits::default())
}

fn server_with(number: u8, limits: Limits) -> Server {
    let mut durable = Durable::new(STORE);
    durable.apply(Record::Ruleset(signed(&rules()).signed().clone()));
    let config = Config {
        id: id(number),
        realms: vec![key(1).public().realm()],
        limits,
    };
    Server::new(config, &durable, 1, at(0)).unwrap()
}

fn address(host: u8) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, host], 7400))
}

fn connect(server: &mut Server, host: u8, rtt_ms: u16) -> ConnId {
    let conn = ConnId(host.into());
    let input = Input::Connected {
        conn,
        host: id(host),
        observed: address(host),
        by_udp: true,
        rtt_ms,
    };
    server.handle(at(0), input);
    conn
}

/// Connects and registers a host.
fn register(server: &mut Server, host: u8, rtt_ms: u16) -> ConnId {
    let conn = connect(server, host, rtt_ms);
    let register = Register {
        realm: key(1).public().realm(),
        ttl_s: 60,
        candidates: Candidates::default(),
        networks: Vec::new(),
        version: 1,
        enrolments: Membership::new(key(1).public().realm()).enrolments_digest(),
    };
    say(server, conn, ToServer::Register(register));
    let sent = sent(server);
    assert!(
        matches!(&sent[..], [(to, ToHost::Registered { .. })] if *to == conn),
        "{sent:?}"
    );
    conn
}

fn say(server: &mut Server, conn: ConnId, message: ToServer) {
    server.handle(at(0), Input::Message(conn, message));
}

fn actions(server: &mut Server) -> Vec<Action> {
    std::iter::from_fn(|| server.next_action()).collect()
}

fn sent(server: &mut Server) -> Vec<(ConnId, ToHost)> {
    let actions = actions(server).into_iter();
    let sent = actions.map(|action| match action {
        Action::Send(conn, message) => (conn, message),
        other => panic!("{other:?}"),
    });
    sent.collect()
}

fn code(actions: &[Action]) -> RefusedCode {
    match actions {
        [Action::Send(_, ToHost::Refused(refused)), ..] => refused.code,
        other => panic!("{other:?}"),
    }
}

fn persisted(server: &mut Server, durable: bool) -> Vec<Action> {
    let write = match &actions(server)[..] {
        [Action::Persist(write, _)] => *write,
        other => panic!("{other:?}"),
    };
    let input = match durable {
        true => Input::Persisted(write),
        false => Input::PersistFailed(write),
    };
    server.handle(at(0), input);
    actions(server)
}

#[test]
fn two_hosts_are_introduced_and_begin_at_once() {
    let mut server = server(200);
    let (near, far) = (register(&mut server, 1, 10), register(&mut server, 2, 90));
    let target = Target::Name("host-2".to_owned());
    say(
        &mut server,
        near,
        ToServer::Introduce { request: 5, target },
    );
    let sent = sent(&mut server);
    let told = |conn| {
        sent.iter()
            .find(|(to, _)| *to == conn)
            .map(|(_, message)| message)
    };
    let Some(ToHost::Introduced {
        request: 5,
        peer,
        start_ms: 40,
    }) = told(near)
    else {
        panic!("{sent:?}");
    };
    assert_eq!(peer.id, id(2));
    assert_eq!(peer.candidates.candidates[0].address, address(2));
    let Some(ToHost::Introduced {
        request: 0,
        peer,
        start_ms: 0,
    }) = told(far)
    else {
        panic!("{sent:?}");
    };
    assert_eq!(peer.id, id(1));
}

#[test]
fn servers_broker_for_each_other() {
    let (mut a, mut b) = (server(200), server(201));
    let (asks, found) = (register(&mut a, 1, 20), register(&mut b, 2, 80));
    let link = ConnId(900);
    let other = |server| Input::ServerConnected {
        conn: link,
        server,
        rtt_ms: 100,
    };
    a.handle(at(0), other(id(201)));
    b.handle(at(0), other(id(200)));
    actions(&mut a);
    actions(&mut b);
    let target = Target::Id(id(2));
    say(&mut a, asks, ToServer::Introduce { request: 5, target });
    let pass = |from: &mut Server, to: &mut Server| {
        let message = match actions(from).pop() {
            Some(Action::SendBroker(_, message)) => message,
            other => panic!("{other:?}"),
        };
        to.handle(at(0), Input::Broker(link, message));
    };
    pass(&mut a, &mut b);
    let told = b.next_action();
    let Some(Action::Send(
        conn,
        ToHost::Introduced {
            request: 0,
            peer,
            start_ms,
        },
    )) = told
    else {
        panic!("{told:?}");
    };
    // The one that asks hears of it after 50 + 10 ms, this one after 40 ms.
    assert_eq!((conn, peer.id, start_ms), (found, id(1), 20));
    pass(&mut b, &mut a);
    let told = sent(&mut a);
    let [
        (
            conn,
            ToHost::Introduced {
                request: 5,
                peer,
                start_ms: 0,
            },
        ),
    ] = &told[..]
    else {
        panic!("{told:?}");
    };
    assert_eq!((*conn, peer.id), (asks, id(2)));

    // Nobody has the third host; and a server that does not answer does not hang it.
    let target = Target::Id(id(3));
    say(
        &mut a,
        asks,
        ToServer::Introduce {
            request: 6,
            target: target.clone(),
        },
    );
    pass(&mut a, &mut b);
    pass(&mut b, &mut a);
    assert_eq!(code(&actions(&mut a)), RefusedCode::NotHere);
    say(&mut a, asks, ToServer::Introduce { request: 7, target });
    actions(&mut a);
    assert!(a.next_timeout().unwrap() <= Duration::from_secs(3));
    a.handle(at(3000), Input::Timeout);
    assert_eq!(code(&actions(&mut a)), RefusedCode::NotHere);
}

#[test]
fn strangers_and_foreign_servers_get_nothing() {
    let mut server = server(200);
    let conn = connect(&mut server, 9, 10);
    let register = Register {
        realm: key(1).public().realm(),
        ttl_s: 60,
        candidates: Candidates::default(),
        networks: Vec::new(),
        version: 0,
        enrolments: 0,
    };
    say(&mut server, conn, ToServer::Register(register.clone()));
    let refused = actions(&mut server);
    assert_eq!(
        (code(&refused), refused.len()),
        (RefusedCode::NotAMember, 1)
    );
    let target = Target::Id(id(1));
    say(
        &mut server,
        conn,
        ToServer::Introduce { request: 1, target },
    );
    assert_eq!(code(&actions(&mut server)), RefusedCode::NotAMember);
    let mut other = register;
    other.realm = key(2).public().realm();
    say(&mut server, conn, ToServer::Register(other));
    assert_eq!(code(&actions(&mut server)), RefusedCode::UnknownRealm);
    server.handle(at(10_000), Input::Timeout);
    assert!(matches!(actions(&mut server)[..], [Action::Close(..)]));
    let input = Input::ServerConnected {
        conn: ConnId(77),
        server: id(99),
        rtt_ms: 1,
    };
    server.handle(at(0), input);
    assert!(matches!(actions(&mut server)[..], [Action::Close(..)]));
    assert_eq!(server.counters().foreign_servers, 1);
}

#[test]
fn a_token_is_used_once_and_durably() {
    let mut server = server(200);
    let (first, second) = (connect(&mut server, 50, 1), connect(&mut server, 51, 1));
    let join = |host| ToServer::Join(Box::new(enrolment(9, host)));
    say(&mut server, first, join(50));
    // The answer waits for the disk, and a second host is refused meanwhile.
    let write = match &actions(&mut server)[..] {
        [Action::Persist(write, Record::Enrolment(_))] => *write,
        other => panic!("{other:?}"),
    };
    say(&mut server, second, join(51));
    assert_eq!(code(&actions(&mut server)), RefusedCode::TokenUsed);
    server.handle(at(0), Input::Persisted(write));
    assert_eq!(sent(&mut server), [(first, ToHost::Joined)]);
    say(&mut server, second, join(51));
    assert_eq!(code(&actions(&mut server)), RefusedCode::TokenUsed);
    say(&mut server, first, join(50));
    assert_eq!(sent(&mut server), [(first, ToHost::Joined)]);
    // Nobody joins for another host.
    say(&mut server, second, join(50));
    assert_eq!(code(&actions(&mut server)), RefusedCode::Document);
    assert_eq!(server.counters().tokens_reused, 2);
}

#[test]
fn a_failed_write_of_a_token_keeps_it_for_its_host() {
    let mut server = server(200);
    let (first, second) = (connect(&mut server, 50, 1), connect(&mut server, 51, 1));
    let join = |host| ToServer::Join(Box::new(enrolment(9, host)));
    say(&mut server, first, join(50));
    assert_eq!(code(&persisted(&mut server, false)), RefusedCode::Storage);
    say(&mut server, second, join(51));
    assert_eq!(code(&actions(&mut server)), RefusedCode::TokenUsed);
    say(&mut server, first, join(50));
    let answer = persisted(&mut server, true);
    assert_eq!(answer, [Action::Send(first, ToHost::Joined)]);
}

#[test]
fn a_late_or_foreign_enrolment_is_refused() {
    let mut server = server(200);
    let conn = connect(&mut server, 50, 1);
    let late = Input::Message(conn, ToServer::Join(Box::new(enrolment(9, 50))));
    server.handle(at(86_500_000), late);
    assert_eq!(code(&actions(&mut server)), RefusedCode::Document);
    let own = crate::tests_common::token(9);
    let forged = Enrolment::new(&own, &key(66), id(50), NOW_S);
    say(&mut server, conn, ToServer::Join(Box::new(forged)));
    assert_eq!(code(&actions(&mut server)), RefusedCode::Document);
}

fn lease(generation: u64) -> LeaseRequest {
    LeaseRequest {
        request: 3,
        store: STORE,
        guest: "web".to_owned(),
        generation: Generation(generation),
    }
}

fn answer(actions: &[Action]) -> LeaseAnswer {
    match actions {
        [Action::Send(_, ToHost::Lease { request: 3, answer })] => *answer,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_generation_has_one_holder_for_ever() {
    let mut server = server(200);
    let (a, b) = (register(&mut server, 1, 1), register(&mut server, 2, 1));
    let held = |generation, holder, released| Lease {
        generation: Generation(generation),
        holder: id(holder),
        released,
    };
    say(&mut server, a, ToServer::AcquireLease(lease(4)));
    let granted = LeaseAnswer::Granted { before: None };
    assert_eq!(answer(&persisted(&mut server, true)), granted);
    say(&mut server, b, ToServer::AcquireLease(lease(4)));
    let latest = held(4, 1, false);
    assert_eq!(
        answer(&actions(&mut server)),
        LeaseAnswer::Refused { latest }
    );
    say(&mut server, b, ToServer::ReleaseLease(lease(4)));
    assert_eq!(
        answer(&actions(&mut server)),
        LeaseAnswer::Refused { latest }
    );
    // The next one, while the first is not released; then its release is seen.
    say(&mut server, b, ToServer::AcquireLease(lease(5)));
    let before = Some(latest);
    assert_eq!(
        answer(&persisted(&mut server, true)),
        LeaseAnswer::Granted { before }
    );
    say(&mut server, a, ToServer::ReleaseLease(lease(4)));
    assert_eq!(answer(&persisted(&mut server, true)), LeaseAnswer::Released);
    say(&mut server, b, ToServer::AcquireLease(lease(5)));
    let before = Some(held(4, 1, true));
    assert_eq!(
        answer(&actions(&mut server)),
        LeaseAnswer::Granted { before }
    );
    // A released one is nobody's any more.
    say(&mut server, b, ToServer::ReleaseLease(lease(5)));
    persisted(&mut server, true);
    for conn in [a, b] {
        say(&mut server, conn, ToServer::AcquireLease(lease(5)));
        let latest = held(5, 2, true);
        assert_eq!(
            answer(&actions(&mut server)),
            LeaseAnswer::Refused { latest }
        );
    }
    let mut other = lease(9);
    other.store = StoreId([8; 16]);
    say(&mut server, a, ToServer::AcquireLease(other));
    assert_eq!(code(&actions(&mut server)), RefusedCode::NotArbiter);
}

#[test]
fn a_lease_whose_write_failed_is_given_to_nobody_else() {
    let mut server = server(200);
    let (a, b) = (register(&mut server, 1, 1), register(&mut server, 2, 1));
    say(&mut server, a, ToServer::AcquireLease(lease(4)));
    assert_eq!(code(&persisted(&mut server, false)), RefusedCode::Storage);
    // Even the refusal waits for a write: after a crash the first may be as if it never was.
    say(&mut server, b, ToServer::AcquireLease(lease(4)));
    let refused = answer(&persisted(&mut server, true));
    assert!(matches!(refused, LeaseAnswer::Refused { .. }));
    say(&mut server, a, ToServer::AcquireLease(lease(4)));
    let granted = answer(&actions(&mut server));
    assert!(matches!(granted, LeaseAnswer::Granted { .. }));
}

#[test]
fn a_server_that_is_no_arbiter_gives_no_lease() {
    let mut server = server(201);
    let conn = register(&mut server, 1, 1);
    say(&mut server, conn, ToServer::AcquireLease(lease(4)));
    assert_eq!(code(&actions(&mut server)), RefusedCode::NotArbiter);
}

#[test]
fn a_relay_carries_between_two_addresses_within_its_limits() {
    let mut limits = Limits::default();
    limits.relay.session = Rate {
        per_s: 1000,
        burst: 2000,
    };
    limits.relay.sessions_per_host = 1;
    let mut server = server_with(200, limits);
    let a = register(&mut server, 1, 1);
    register(&mut server, 2, 1);
    register(&mut server, 3, 1);
    say(
        &mut server,
        a,
        ToServer::OpenRelay {
            request: 8,
            peer: id(2),
        },
    );
    let told = sent(&mut server);
    let session = match &told[..] {
        [
            (
                _,
                ToHost::RelayOpened {
                    request: 8,
                    session,
                    ..
                },
            ),
            (
                _,
                ToHost::RelayOpened {
                    request: 0,
                    session: same,
                    ..
                },
            ),
        ] if session == same => *session,
        other => panic!("{other:?}"),
    };
    say(
        &mut server,
        a,
        ToServer::OpenRelay {
            request: 9,
            peer: id(3),
        },
    );
    assert_eq!(code(&actions(&mut server)), RefusedCode::Limit);
    let datagram = [&relay::header(session)[..], &[0; 995]].concat();
    let forward = |server: &mut Server, from, ms| server.forward(at(ms), from, &datagram);
    assert_eq!(forward(&mut server, address(1), 0), Some(address(2)));
    assert_eq!(forward(&mut server, address(2), 0), Some(address(1)));
    assert_eq!(forward(&mut server, address(1), 0), None);
    assert_eq!(forward(&mut server, address(1), 1000), Some(address(2)));
    // Other addresses, other sessions, other bytes.
    assert_eq!(forward(&mut server, address(3), 9000), None);
    let other = [&relay::header(SessionId(session.0 ^ 1))[..], &[0]].concat();
    assert_eq!(server.forward(at(0), address(1), &other), None);
    assert_eq!(server.forward(at(0), address(1), &[relay::KIND, 1]), None);
    let counters = server.relay().counters();
    assert_eq!((counters.relayed, counters.limited), (3, 1));
    assert_eq!((counters.strangers, counters.malformed), (2, 1));
    // Its NAT gives it another port; then it is idle.
    server.handle(
        at(0),
        Input::Moved {
            conn: a,
            observed: address(77),
        },
    );
    assert_eq!(forward(&mut server, address(2), 9000), Some(address(77)));
    assert_eq!(server.relay().sessions(), 1);
    server.handle(at(129_000), Input::Timeout);
    assert_eq!(server.relay().sessions(), 0);
}

#[test]
fn a_removed_host_loses_everything_at_once() {
    let mut server = server(200);
    let a = register(&mut server, 1, 1);
    let b = register(&mut server, 2, 1);
    say(
        &mut server,
        a,
        ToServer::OpenRelay {
            request: 8,
            peer: id(2),
        },
    );
    actions(&mut server);
    let mut next = rules();
    next.version = 2;
    next.hosts.remove(1);
    next.networks[0].members.remove(1);
    let next = signed(&next).signed().clone();
    say(&mut server, a, ToServer::Ruleset(next.clone()));
    let done = persisted(&mut server, true);
    assert!(done.contains(&Action::Send(a, ToHost::Ruleset(next))));
    assert!(
        done.iter()
            .any(|action| matches!(action, Action::Close(conn, _) if *conn == b))
    );
    assert_eq!(server.relay().sessions(), 0);
    let target = Target::Id(id(2));
    say(&mut server, a, ToServer::Introduce { request: 1, target });
    assert_eq!(code(&actions(&mut server)), RefusedCode::NotHere);
}

#[test]
fn a_ruleset_that_cannot_be_written_is_in_force_and_written_again() {
    let mut server = server(200);
    let a = register(&mut server, 1, 1);
    let mut next = rules();
    next.version = 2;
    say(
        &mut server,
        a,
        ToServer::Ruleset(signed(&next).signed().clone()),
    );
    persisted(&mut server, false);
    let realm = key(1).public().realm();
    assert_eq!(server.membership(realm).unwrap().version(), 2);
    server.handle(at(1000), Input::Timeout);
    assert!(persisted(&mut server, false).is_empty());
    server.handle(at(2000), Input::Timeout);
    assert!(persisted(&mut server, true).is_empty());
    server.handle(at(4000), Input::Timeout);
    assert!(actions(&mut server).is_empty());
}

#[test]
fn floods_and_crowds_end_at_their_limits() {
    let mut server = server(200);
    let a = register(&mut server, 1, 1);
    for _ in 0..400 {
        say(&mut server, a, ToServer::Networks(Vec::new()));
    }
    let closed = actions(&mut server);
    assert!(matches!(&closed[..], [Action::Close(conn, _)] if *conn == a));
    for number in 0..5 {
        let input = Input::Connected {
            conn: ConnId(1000 + number),
            host: id(9),
            observed: address(9),
            by_udp: true,
            rtt_ms: 1,
        };
        server.handle(at(0), input);
    }
    assert!(matches!(
        actions(&mut server)[..],
        [Action::Close(ConnId(1004), _)]
    ));
    assert_eq!(server.counters().limited, 2);
}

#[test]
fn an_operator_gets_the_ruleset_in_force_when_it_is_durable() {
    let mut server = server(200);
    let (one, two) = (connect(&mut server, 90, 1), connect(&mut server, 91, 1));
    let mut next = rules();
    next.version = 2;
    let next = signed(&next).signed().clone();
    say(&mut server, one, ToServer::Ruleset(next.clone()));
    let write = match &actions(&mut server)[..] {
        [Action::Persist(write, Record::Ruleset(_))] => *write,
        other => panic!("{other:?}"),
    };
    // While it is written, nobody is answered; then everybody who gave it is.
    say(&mut server, two, ToServer::Ruleset(next.clone()));
    assert!(actions(&mut server).is_empty());
    server.handle(at(0), Input::Persisted(write));
    let answer = |conn| {
        [
            (conn, ToHost::Enrolments(Vec::new())),
            (conn, ToHost::Ruleset(next.clone())),
        ]
    };
    assert_eq!(sent(&mut server), [answer(two), answer(one)].concat());
    let old = signed(&rules()).signed().clone();
    say(&mut server, one, ToServer::Ruleset(old));
    assert_eq!(sent(&mut server), answer(one));
}
