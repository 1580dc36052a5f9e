//! Who becomes a member, and who is one no longer.

use crate::common::{
    Host, LIMIT, Server, key, now_s, publish, rules, signed, signed_by, tell, token, two_members,
};
use longhaul_network::member::{FILE_BYTES_MAX, MEMBER_FILE, Stored};
use longhaul_realm::enrolment::{Authorisation, Enrolment};
use longhaul_realm::membership::{Standing, Why};
use longhaul_realm::protocol::{RefusedCode, ToHost, ToServer};
use longhaul_realm::signed::sign;
use longhaul_transport::{Scope, TrustedHost};
use tokio::time::timeout;

#[tokio::test(flavor = "multi_thread")]
async fn a_token_makes_one_host_a_member_and_refuses_the_second() {
    let server = Server::start().await;
    let mut first = Host::new();
    publish(
        &server.entry,
        &signed(&rules(1, &[(&first, "paris")], &[&server.entry])),
    )
    .await;
    let token = token("oslo", vec![server.entry.clone()]);
    let mut oslo = Host::new();
    oslo.join(&token);
    let status = oslo.until_registered().await;
    let Standing::Member(member) = &status.standing else {
        panic!("{status:?}");
    };
    assert!(member.pending && member.name == "oslo");
    assert_eq!((status.version, status.members.len()), (1, 2));
    let paris = oslo.endpoint.trust().by_name("paris").unwrap().unwrap();
    assert_eq!(paris.id, first.id());

    let mut second = Host::new();
    second.join(&token);
    let status = second.until("refused", |status| status.refused.0 > 0).await;
    let (_, refused) = status.refused.1.clone().unwrap();
    assert_eq!(refused.code, RefusedCode::TokenUsed);
    assert!(!status.is_registered());

    // The others learn of the new member, and a restart forgets neither.
    let ruleset = signed(&rules(1, &[(&first, "paris")], &[&server.entry]));
    first.run_with(&ruleset, Vec::new());
    first
        .until("two members", |status| status.members.len() == 2)
        .await;
    first.stop().await;
    assert_eq!(first.endpoint.trust().by_id(oslo.id()).unwrap(), None);
    let stored = Stored::read(first.folder.path()).unwrap().unwrap();
    assert_eq!(stored.kept.enrolments.len(), 1);
    first.run(stored);
    first
        .until("two members", |status| status.members.len() == 2)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_used_token_stays_used_when_the_server_restarts() {
    let mut server = Server::start().await;
    let paris = Host::new();
    publish(
        &server.entry,
        &signed(&rules(1, &[(&paris, "paris")], &[&server.entry])),
    )
    .await;
    let token = token("oslo", vec![server.entry.clone()]);
    let mut oslo = Host::new();
    oslo.join(&token);
    oslo.until_registered().await;
    server.stop().await;
    server.restart().await;
    assert_eq!(server.version(), 1);
    let second = Host::new();
    let enrolment = token.enrol(second.id(), now_s()).unwrap();
    let answer = tell(&second, &server.entry, ToServer::Join(Box::new(enrolment))).await;
    assert!(matches!(answer, ToHost::Refused(no) if no.code == RefusedCode::TokenUsed));
    // The one that has it comes back by itself.
    oslo.until_registered().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_forged_and_foreign_hosts_are_refused() {
    let server = Server::start().await;
    let paris = Host::new();
    publish(
        &server.entry,
        &signed(&rules(1, &[(&paris, "paris")], &[&server.entry])),
    )
    .await;
    let late = Host::new();
    let authorisation = Authorisation {
        key: key(9).public(),
        issued_s: now_s() - 1000,
        expires_s: now_s() - 500,
        ..token("late", vec![server.entry.clone()])
            .authorisation()
            .clone()
    };
    let authorisation = sign(&authorisation, &key(1)).unwrap();
    // A host whose clock is behind, or says so.
    let enrolment = Enrolment::new(&authorisation, &key(9), late.id(), now_s() - 600);
    let answer = tell(&late, &server.entry, ToServer::Join(Box::new(enrolment))).await;
    let ToHost::Refused(refused) = answer else {
        panic!("{answer:?}");
    };
    assert!(refused.text.contains("could be used until"), "{refused:?}");

    let mut foreign = Host::new();
    let rules_of_two = rules(1, &[(&foreign, "rome")], &[&server.entry]);
    foreign.run_with(&signed_by(rules_of_two, 2), Vec::new());
    let status = foreign
        .until("refused", |status| status.refused.0 > 0)
        .await;
    let (_, refused) = status.refused.1.clone().unwrap();
    assert_eq!(refused.code, RefusedCode::UnknownRealm);

    // Of the realm by its own ruleset, which the realm never signed for the server.
    let mut stranger = Host::new();
    let other = rules(1, &[(&stranger, "rome")], &[&server.entry]);
    stranger.run_with(&signed(&other), Vec::new());
    let status = stranger
        .until("refused", |status| status.refused.0 > 0)
        .await;
    assert!(!status.servers[0].registered);
    let forged = signed_by(rules(7, &[(&stranger, "rome")], &[&server.entry]), 2);
    let answer = tell(&stranger, &server.entry, ToServer::Ruleset(forged)).await;
    assert!(matches!(answer, ToHost::Refused(no) if no.code == RefusedCode::UnknownRealm));
    assert_eq!(server.version(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_host_is_cut_at_servers_and_hosts() {
    let server = Server::start().await;
    let (paris, oslo) = two_members(&server).await;
    // Paris knows Oslo as a member only; Oslo knows where Paris is.
    let by_hand = TrustedHost {
        name: "paris".to_owned(),
        id: paris.id(),
        addresses: vec![paris.address()],
        scope: Scope::default(),
    };
    oslo.endpoint.trust().add(by_hand).unwrap();
    let (there, here) = tokio::join!(oslo.endpoint.connect("paris"), paris.endpoint.accept());
    let (there, here) = (there.unwrap(), here.unwrap());
    assert_eq!(here.peer().host.name, "oslo");
    assert!(here.peer().host.scope.may_send_guests);

    let next = signed(&rules(2, &[(&paris, "paris")], &[&server.entry]));
    publish(&server.entry, &next).await;
    timeout(LIMIT, here.closed()).await.unwrap();
    let reason = timeout(LIMIT, there.closed()).await.unwrap().to_string();
    assert!(reason.contains("does not list"), "{reason}");
    paris.until("version 2", |status| status.version == 2).await;
    let status = oslo.until("refused", |status| status.refused.0 > 0).await;
    let (_, refused) = status.refused.1.clone().unwrap();
    assert_eq!(refused.code, RefusedCode::NotAMember);
    oslo.until("unregistered", |status| !status.servers[0].registered)
        .await;
    assert_eq!(paris.endpoint.trust().by_id(oslo.id()).unwrap(), None);
    assert!(oslo.endpoint.connect("paris").await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collision_of_names_is_said_and_who_is_trusted_by_hand_keeps_the_name() {
    let server = Server::start().await;
    let (mut paris, oslo) = (Host::new(), Host::new());
    let own = Host::new();
    paris
        .endpoint
        .trust()
        .add(TrustedHost {
            name: "oslo".to_owned(),
            id: own.id(),
            addresses: vec![own.address()],
            scope: Scope::default(),
        })
        .unwrap();
    let both = signed(&rules(
        1,
        &[(&paris, "paris"), (&oslo, "oslo")],
        &[&server.entry],
    ));
    publish(&server.entry, &both).await;
    paris.run_with(&both, Vec::new());
    let said = |text: &String| text.contains("trusted by hand") && text.contains("oslo");
    paris
        .until("said", |status| status.notices.iter().any(said))
        .await;
    assert_eq!(
        paris.endpoint.trust().by_name("oslo").unwrap().unwrap().id,
        own.id()
    );
    assert!(paris.endpoint.trust().by_id(oslo.id()).unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_that_is_behind_misses_no_removal_and_is_said() {
    let server = Server::start().await;
    let (mut paris, oslo) = (Host::new(), Host::new());
    let both = signed(&rules(
        1,
        &[(&paris, "paris"), (&oslo, "oslo")],
        &[&server.entry],
    ));
    publish(&server.entry, &both).await;
    paris.run_with(&both, Vec::new());
    paris.until_registered().await;
    let mut next = rules(2, &[(&paris, "paris")], &[&server.entry]);
    next.issued_s += 3600;
    publish(&server.entry, &signed(&next)).await;
    let said = |text: &String| text.contains("in the future");
    let status = paris
        .until("said", |status| {
            status.notices.iter().any(said) && status.version == 2
        })
        .await;
    assert_eq!(status.members.len(), 1);
    // Under a ruleset that ended, nobody is introduced; but it is no reason to be unregistered.
    let mut ended = rules(3, &[(&paris, "paris")], &[&server.entry]);
    (ended.issued_s, ended.expires_s) = (now_s() - 2000, now_s() - 1000);
    publish(&server.entry, &signed(&ended)).await;
    let status = paris.until("version 3", |status| status.version == 3).await;
    assert!(
        matches!(status.standing, Standing::Expired(_)),
        "{:?}",
        status.standing
    );
    ended.version = 4;
    (ended.issued_s, ended.expires_s) = (now_s() - 300_000, now_s() - 200_000);
    publish(&server.entry, &signed(&ended)).await;
    let is_over = |status: &longhaul_network::member::Status| {
        status.standing == Standing::Stranger(Why::Ended)
    };
    paris.until("over", is_over).await;
}

#[test]
fn a_member_file_is_read_whole_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(Stored::read(folder.path()).unwrap(), None);
    let entry = longhaul_realm::ruleset::ServerEntry {
        id: longhaul_protocol::HostId([7; 32]),
        addresses: vec!["a:1".to_owned()],
    };
    let token = token("oslo", vec![entry]);
    let stored = Stored::of_token(&token, longhaul_protocol::HostId([8; 32]), now_s()).unwrap();
    stored.write(folder.path()).unwrap();
    assert_eq!(Stored::read(folder.path()).unwrap(), Some(stored.clone()));
    let path = folder.path().join(MEMBER_FILE);
    let bytes = std::fs::read(&path).unwrap();
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        assert!(Stored::decode(&damaged).is_err(), "{at}");
        assert!(Stored::decode(&bytes[..at]).is_err(), "{at}");
    }
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(FILE_BYTES_MAX + 1).unwrap();
    let error = Stored::read(folder.path()).unwrap_err().to_string();
    assert!(error.contains("join the realm again"), "{error}");
}
