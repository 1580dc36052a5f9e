//! Tests which peers are admitted and refused, and the reasons sent to them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::*;
use longhaul_transport::*;
use std::time::Duration;

async fn refused(alpha: &Host) -> (CloseCode, String) {
    match alpha.endpoint.connect("beta").await.unwrap_err() {
        ConnectError::Refused { name, code, reason } => {
            assert_eq!(name, "beta");
            (code, reason)
        }
        error => panic!("{error}"),
    }
}

#[tokio::test]
async fn each_side_knows_the_other_by_its_own_name_for_it() {
    let (alpha, beta) = pair(config());
    let (here, there) = connected(&alpha, &beta).await;
    assert_eq!(here.peer().host.name, "beta");
    assert_eq!(here.peer().host.id, beta.identity.host_id());
    assert_eq!(there.peer().host.name, "alpha");
    assert_eq!(there.peer().host.id, alpha.identity.host_id());
    assert_eq!(there.peer().address, alpha.address());
    assert_eq!(here.peer().software, "longhaul test 1");
    assert_eq!((here.peer().version, there.peer().version), (1, 1));
    assert!(here.dialled() && !there.dialled());
}

#[tokio::test]
async fn an_unknown_host_is_refused_and_told_its_fingerprint() {
    let (alpha, beta) = (Host::new(config()), Host::new(config()));
    alpha.trust("beta", &beta, ALL);
    let (code, reason) = refused(&alpha).await;
    assert_eq!(code, CloseCode::IdentityUnknown);
    assert!(reason.contains("identity unknown"), "{reason}");
    assert!(reason.contains(&alpha.identity.host_id().to_string()));
}

#[tokio::test]
async fn a_host_under_another_key_is_not_talked_to() {
    let (alpha, beta) = pair(config());
    let impostor = Host::new(config());
    impostor.trust("alpha", &alpha, ALL);
    alpha.trust_at("beta", &beta, ALL, impostor.address());
    let error = alpha.endpoint.connect("beta").await.unwrap_err();
    let text = error.to_string();
    match error {
        ConnectError::IdentityChanged {
            expected, found, ..
        } => {
            assert_eq!(expected, beta.identity.host_id());
            assert_eq!(found, impostor.identity.host_id());
        }
        error => panic!("{error}"),
    }
    assert!(text.contains(&beta.identity.host_id().to_string()));
    assert!(text.contains(&impostor.identity.host_id().to_string()));
    assert!(text.contains("longhaul host trust beta"), "{text}");
}

#[tokio::test]
async fn a_host_without_any_scope_is_refused() {
    let (alpha, beta) = pair(config());
    beta.trust("alpha", &alpha, Scope::default());
    let (code, reason) = refused(&alpha).await;
    assert_eq!(code, CloseCode::NotAllowed);
    assert!(reason.contains("`alpha`"), "{reason}");
}

#[tokio::test]
async fn what_a_host_may_do_follows_the_store_while_it_is_connected() {
    let (alpha, beta) = pair(config());
    let (_here, there) = connected(&alpha, &beta).await;
    assert!(there.allows(Permission::SendGuests).unwrap());
    let query = Scope {
        may_query: true,
        may_send_guests: false,
    };
    beta.trust("alpha", &alpha, query);
    assert!(!there.allows(Permission::SendGuests).unwrap());
    assert!(there.allows(Permission::Query).unwrap());
    beta.endpoint.trust().forget("alpha").unwrap();
    assert!(!there.allows(Permission::Query).unwrap());
}

#[tokio::test]
async fn a_host_can_be_disconnected() {
    let (alpha, beta) = pair(config());
    let (here, _there) = connected(&alpha, &beta).await;
    let id = alpha.identity.host_id();
    beta.endpoint
        .disconnect(id, CloseCode::NotAllowed, "forgotten");
    let error = here.closed().await;
    let code = CloseCode::NotAllowed;
    let reason = "forgotten".to_owned();
    assert_eq!(error, LinkError::ClosedByPeer { code, reason });
}

#[tokio::test]
async fn names_without_entry_address_or_answer_are_errors() {
    let mut quick = config();
    quick.handshake_timeout = Duration::from_millis(300);
    let alpha = Host::new(quick);
    let error = alpha.endpoint.connect("beta").await.unwrap_err();
    assert!(matches!(error, ConnectError::NotTrusted(_)), "{error}");

    let beta = Host::new(config());
    alpha.trust("beta", &beta, ALL);
    beta.endpoint.close("gone").await;
    drop(beta.endpoint);
    let error = alpha.endpoint.connect("beta").await.unwrap_err();
    assert!(matches!(error, ConnectError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("127.0.0.1:"), "{error}");
}

#[tokio::test]
async fn the_first_address_that_answers_is_taken() {
    let mut quick = config();
    quick.handshake_timeout = Duration::from_secs(2);
    let (alpha, beta) = pair(quick);
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut entry = alpha.endpoint.trust().by_name("beta").unwrap().unwrap();
    entry.addresses = vec![
        silent.local_addr().unwrap().to_string(),
        beta.address().to_string(),
    ];
    alpha.endpoint.trust().add(entry).unwrap();
    let control = alpha.endpoint.connect("beta").await.unwrap();
    assert_eq!(control.peer().address, beta.address());
}

#[tokio::test]
async fn incompatible_agents_name_both_versions_and_whom_to_update() {
    let mut old = config();
    old.hello = hello(1, 2);
    let mut new = config();
    new.hello = hello(3, 4);
    let (alpha, beta) = (Host::new(old), Host::new(new));
    alpha.trust("beta", &beta, ALL);
    beta.trust("alpha", &alpha, ALL);
    let error = alpha.endpoint.connect("beta").await.unwrap_err();
    let text = error.to_string();
    match error {
        ConnectError::Incompatible(Incompatible { here, there }) => {
            assert_eq!((here, there), (hello(1, 2), hello(3, 4)));
        }
        error => panic!("{error}"),
    }
    assert!(text.ends_with("update Longhaul on this host"), "{text}");
    let text = beta
        .endpoint
        .connect("alpha")
        .await
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("protocols 1 to 2 (longhaul test 2)"),
        "{text}"
    );
    assert!(
        text.contains("protocols 3 to 4 (longhaul test 4)"),
        "{text}"
    );
    assert!(
        text.ends_with("update Longhaul on the other host"),
        "{text}"
    );
}

#[tokio::test]
async fn somebodys_identity_can_be_asked_for_before_it_is_trusted() {
    let (alpha, beta) = (Host::new(config()), Host::new(config()));
    let id = alpha.endpoint.identify(&beta.address().to_string()).await;
    assert_eq!(id.unwrap(), beta.identity.host_id());
}

#[tokio::test]
async fn connections_of_one_peer_are_limited() {
    let (alpha, beta) = pair(config());
    let mut held = Vec::new();
    for _ in 0..CONNECTIONS_PER_PEER_MAX {
        held.push(connected(&alpha, &beta).await);
    }
    let (code, _) = refused(&alpha).await;
    assert_eq!(code, CloseCode::Busy);
    drop(held);
    // Connections become available once the ends of the old ones are known.
    let again = async {
        loop {
            if alpha.endpoint.connect("beta").await.is_ok() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(LONG, again).await.unwrap();
}
