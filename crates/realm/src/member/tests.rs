//! Tests of the member: each rule of `docs/rendezvous.md` that the simulation does not show.

use super::*;
use crate::protocol::RefusedCode;
use crate::tests_common::{NOW_S, enrolment, id, key, ruleset, signed};

fn at(ms: u64) -> Now {
    Now {
        steady: Duration::from_millis(ms),
        unix_s: NOW_S + ms / 1000,
    }
}

fn config(host: u8) -> Config {
    Config {
        host: id(host),
        realm: key(1).public().realm(),
        servers: ruleset(1, &[1]).servers,
        ttl_s: 60,
    }
}

fn rules(version: u64, hosts: &[u8]) -> crate::ruleset::Ruleset {
    let mut rules = ruleset(version, hosts);
    rules.servers.push(ServerEntry {
        id: id(201),
        addresses: vec!["other.example:7400".to_owned()],
    });
    rules
}

fn member() -> Member {
    let kept = Kept {
        ruleset: Some(signed(&rules(1, &[1, 2, 3])).signed().clone()),
        enrolments: Vec::new(),
    };
    Member::new(config(1), &kept, 1, at(0)).unwrap()
}

fn actions(member: &mut Member) -> Vec<Action> {
    std::iter::from_fn(|| member.next_action()).collect()
}

fn registered(server: u8, member: &mut Member) {
    member.handle(at(0), Input::Timeout);
    member.handle(at(0), Input::Connected(id(server)));
    let message = ToHost::Registered {
        ttl_s: 60,
        observed: "192.0.2.1:1".parse().unwrap(),
        version: 1,
    };
    member.handle(at(0), Input::Message(id(server), message));
}

fn refused(request: u32, code: RefusedCode) -> ToHost {
    ToHost::Refused(Refused {
        request,
        code,
        text: "no".to_owned(),
        hint: None,
    })
}

#[test]
fn it_dials_all_servers_and_waits_longer_after_each_failure() {
    let mut member = member();
    member.handle(at(0), Input::Timeout);
    let dialled = actions(&mut member);
    assert_eq!(dialled.len(), 2, "{dialled:?}");
    let mut before = 0;
    let mut now = 0;
    for failures in 1..12 {
        member.handle(at(now), Input::Disconnected(id(200)));
        let link = member.links().remove(0);
        assert_eq!(link.failures, failures);
        let due = member.links[&id(200)].due().unwrap().as_millis() as u64 + 1;
        let wait = due - now;
        assert!(wait < 91_000 && (wait * 4 > before || wait > 30_000));
        before = wait;
        now = due;
        member.handle(at(now), Input::Timeout);
    }
}

#[test]
fn requests_wait_for_a_server_and_say_so_in_the_end() {
    let mut member = member();
    member.handle(at(0), Input::Introduce(7, Target::Id(id(2))));
    assert!(actions(&mut member).is_empty());
    member.handle(at(30_000), Input::Timeout);
    let failed = Action::Failed(7, Failure::NoServer);
    assert!(actions(&mut member).contains(&failed));

    member.handle(
        at(0),
        Input::Introduce(8, Target::Name("host-2".to_owned())),
    );
    registered(200, &mut member);
    let sent = actions(&mut member);
    let asked = |action: &Action| match action {
        Action::Send(server, ToServer::Introduce { request, .. }) => Some((*server, *request)),
        _ => None,
    };
    let (server, request) = sent.iter().find_map(asked).unwrap();
    assert_eq!(server, id(200));
    // The second server is asked when the first refuses.
    registered(201, &mut member);
    actions(&mut member);
    let no = refused(request, RefusedCode::NotHere);
    member.handle(at(1), Input::Message(id(200), no.clone()));
    let sent = actions(&mut member);
    assert_eq!(sent.iter().find_map(asked), Some((id(201), request)));
    // An answer of the first one is late, and one for another host is none.
    let introduced = |host| ToHost::Introduced {
        request,
        peer: Peer {
            id: id(host),
            candidates: Candidates::default(),
            networks: Vec::new(),
        },
        start_ms: 1,
    };
    member.handle(at(2), Input::Message(id(200), introduced(2)));
    member.handle(at(2), Input::Message(id(201), introduced(3)));
    assert!(actions(&mut member).is_empty());
    member.handle(at(3), Input::Message(id(201), introduced(2)));
    let done = actions(&mut member);
    assert!(matches!(
        done[..],
        [Action::Introduced {
            request: Some(8),
            ..
        }]
    ));
    member.handle(at(3), Input::Introduce(9, Target::Id(id(99))));
    assert_eq!(actions(&mut member), [Action::Failed(9, Failure::NoMember)]);
}

#[test]
fn a_relay_session_is_asked_for_at_the_server_that_was_named() {
    let mut member = member();
    registered(200, &mut member);
    actions(&mut member);
    let ask = Input::OpenRelay {
        request: 4,
        server: id(201),
        peer: id(2),
    };
    member.handle(at(1), ask);
    assert!(
        actions(&mut member).is_empty(),
        "the other server is no help"
    );
    registered(201, &mut member);
    let asked = |action: &Action| match action {
        Action::Send(server, ToServer::OpenRelay { peer, .. }) => Some((*server, *peer)),
        _ => None,
    };
    let sent = actions(&mut member);
    assert_eq!(sent.iter().find_map(asked), Some((id(201), id(2))));
}

#[test]
fn signals_take_whatever_connection_there_is() {
    let gossip = Action::Gossip(id(2), Gossip::Signal(vec![7]));
    let sent = |member: &mut Member| -> Vec<Action> {
        let signals = |action: &Action| {
            matches!(action, Action::Send(_, ToServer::Signal { .. }))
                || matches!(action, Action::Gossip(_, Gossip::Signal(_)))
        };
        actions(member).into_iter().filter(signals).collect()
    };
    let mut member = member();
    // Nothing is connected: the driver drops it, and the paths repeat it.
    member.handle(at(0), Input::Signal(id(2), vec![7]));
    assert_eq!(sent(&mut member), std::slice::from_ref(&gossip));
    registered(200, &mut member);
    let by_server = Action::Send(
        id(200),
        ToServer::Signal {
            to: id(2),
            bytes: vec![7],
        },
    );
    for input in [Input::Signal, Input::SignalDirect] {
        member.handle(at(0), input(id(2), vec![7]));
        assert_eq!(sent(&mut member), std::slice::from_ref(&by_server));
    }
    member.handle(at(0), Input::PeerConnected(id(2)));
    member.handle(at(0), Input::SignalDirect(id(2), vec![7]));
    assert_eq!(sent(&mut member), [gossip]);
    member.handle(at(1), Input::Gossip(id(2), Gossip::Signal(vec![9])));
    assert!(actions(&mut member).contains(&Action::Signal(id(2), vec![9])));
}

#[test]
fn a_server_names_no_member() {
    let mut member = member();
    registered(200, &mut member);
    actions(&mut member);
    let stranger = ToHost::Signal {
        from: id(66),
        bytes: Vec::new(),
    };
    member.handle(at(0), Input::Message(id(200), stranger));
    let notice = Notice::Stranger(id(200), id(66));
    assert_eq!(actions(&mut member), [Action::Notice(notice)]);
    let unknown = ToHost::Joined;
    member.handle(at(0), Input::Message(id(66), unknown));
    assert!(actions(&mut member).is_empty());
}

#[test]
fn it_joins_before_it_registers() {
    let kept = Kept {
        ruleset: None,
        enrolments: vec![enrolment(9, 50)],
    };
    let mut member = Member::new(config(50), &kept, 1, at(0)).unwrap();
    member.handle(at(0), Input::Timeout);
    actions(&mut member);
    member.handle(at(0), Input::Connected(id(200)));
    let joins = actions(&mut member);
    assert!(
        matches!(joins[..], [Action::Send(_, ToServer::Join(_))]),
        "{joins:?}"
    );
    member.handle(at(0), Input::Message(id(200), ToHost::Joined));
    let sent = actions(&mut member);
    assert!(
        matches!(sent[..], [Action::Send(_, ToServer::Register(_))]),
        "{sent:?}"
    );
}

#[test]
fn a_removal_cuts_when_it_is_durable_or_cannot_be() {
    for durable in [true, false] {
        let mut member = member();
        member.handle(at(0), Input::PeerConnected(id(2)));
        member.handle(at(0), Input::PeerConnected(id(3)));
        member.handle(at(0), Input::PeerConnected(id(66)));
        assert!(actions(&mut member).contains(&Action::Cut(id(66), Why::Unknown)));
        let next = signed(&rules(2, &[1, 3])).signed().clone();
        member.handle(at(0), Input::Gossip(id(3), Gossip::Ruleset(next)));
        let write = match &actions(&mut member)[..] {
            [Action::Persist(write, _)] => *write,
            other => panic!("{other:?}"),
        };
        let input = match durable {
            true => Input::Persisted(write),
            false => Input::PersistFailed(write),
        };
        member.handle(at(0), input);
        let done = actions(&mut member);
        assert!(done.contains(&Action::Cut(id(2), Why::Unknown)), "{done:?}");
        assert!(done.contains(&Action::Changed));
        assert!(member.kept().ruleset.is_some());
        member.handle(at(1000), Input::Timeout);
        let again = actions(&mut member);
        let again = again
            .iter()
            .any(|action| matches!(action, Action::Persist(..)));
        assert_eq!(again, !durable);
    }
}

#[test]
fn a_server_with_an_older_ruleset_gets_the_newer_one() {
    let mut member = member();
    registered(200, &mut member);
    actions(&mut member);
    let no = refused(0, RefusedCode::NotAMember);
    member.handle(at(0), Input::Message(id(200), no.clone()));
    let sent = actions(&mut member);
    assert!(
        matches!(sent[..], [Action::Send(_, ToServer::Ruleset(_))]),
        "{sent:?}"
    );
    member.handle(at(0), Input::Message(id(200), no.clone()));
    assert!(matches!(actions(&mut member)[..], [Action::Notice(_)]));
    // Said once.
    member.handle(at(0), Input::Message(id(200), no));
    assert!(actions(&mut member).is_empty());
}

#[test]
fn gossip_is_answered_by_who_is_ahead() {
    let mut member = member();
    member.handle(at(0), Input::PeerConnected(id(2)));
    actions(&mut member);
    let have = |version| {
        Gossip::Have(Have {
            version,
            ..member_have()
        })
    };
    member.handle(at(0), Input::Gossip(id(2), have(0)));
    assert!(matches!(
        actions(&mut member)[..],
        [Action::Gossip(_, Gossip::Ruleset(_))]
    ));
    member.handle(at(0), Input::Gossip(id(2), have(5)));
    assert!(matches!(
        actions(&mut member)[..],
        [Action::Gossip(_, Gossip::Have(_))]
    ));
    member.handle(at(0), Input::Gossip(id(3), have(0)));
    assert!(actions(&mut member).is_empty(), "not connected");
    for _ in 0..200 {
        member.handle(at(0), Input::Gossip(id(2), have(0)));
    }
    assert!(actions(&mut member).len() < 101);
}

fn member_have() -> Have {
    member().have()
}
