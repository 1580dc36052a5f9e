//! The formats: the examples of `docs/rendezvous.md`, the fuzzer's seeds, and bytes at random.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../../fuzz/src/rendezvous.rs"]
mod rendezvous;

use longhaul_protocol::{Generation, HostId};
use longhaul_realm::enrolment::{Authorisation, TokenId};
use longhaul_realm::key::SigningKey;
use longhaul_realm::protocol::{
    Broker, Candidate, Candidates, Gossip, Have, Lease, LeaseAnswer, LeaseRequest, Peer, Refused,
    RefusedCode, Register, SessionId, Target, ToHost, ToServer,
};
use longhaul_realm::relay;
use longhaul_realm::ruleset::{
    Gateway, HostEntry, NetworkEntry, NetworkId, Ruleset, Scope, ServerEntry, StoreId, VlanPolicy,
};
use longhaul_realm::signed::{Signed, sign};
use longhaul_realm::token::Token;
use longhaul_realm::wire::encode;
use proptest::prelude::*;

const NOW_S: u64 = 1_800_000_000;

fn key() -> SigningKey {
    SigningKey::from_seed(&[1; 32]).unwrap()
}

fn id(byte: u8) -> HostId {
    HostId([byte; 32])
}

fn server() -> ServerEntry {
    ServerEntry {
        id: id(200),
        addresses: vec!["rendezvous.example:7400".to_owned()],
    }
}

fn ruleset() -> Signed<Ruleset> {
    let ruleset = Ruleset {
        realm: key().public().realm(),
        version: 1,
        issued_s: NOW_S,
        expires_s: NOW_S + 86_400,
        hosts: vec![HostEntry {
            id: id(2),
            name: "paris".to_owned(),
            site: "fr".to_owned(),
            scope: Scope {
                may_query: true,
                may_send_guests: false,
            },
            token: None,
        }],
        networks: vec![NetworkEntry {
            id: NetworkId([3; 8]),
            name: "blue".to_owned(),
            members: vec![id(2)],
            vlans: VlanPolicy::Untagged,
            mtu: 1500,
            gateway: None,
        }],
        removed: Vec::new(),
        revoked: Vec::new(),
        servers: vec![server()],
        arbiter: None,
    };
    sign(&ruleset, &key()).unwrap().signed().clone()
}

fn gateway() -> Gateway {
    Gateway {
        addresses: vec!["10.0.0.1/24".parse().unwrap()],
        mac: [2, 0x6c, 0x68, 0, 0, 1],
        sites: vec!["lyon".to_owned()],
    }
}

fn token() -> Token {
    let authorisation = Authorisation {
        realm: key().public().realm(),
        token: TokenId([4; 16]),
        key: key().public(),
        name: "oslo".to_owned(),
        site: "no".to_owned(),
        scope: Scope::default(),
        networks: vec![NetworkId([3; 8])],
        issued_s: NOW_S,
        expires_s: NOW_S + 86_400,
        confirm_s: NOW_S + 864_000,
    };
    Token::make(authorisation, [5; 32], vec![server()], &key()).unwrap()
}

fn candidates() -> Candidates {
    Candidates {
        candidates: vec![
            Candidate {
                kind: 0,
                address: "10.0.0.2:7400".parse().unwrap(),
                priority: 300,
            },
            Candidate {
                kind: 4,
                address: "[2001:db8::1]:7400".parse().unwrap(),
                priority: 5,
            },
        ],
        nat: 2,
    }
}

fn lease() -> LeaseRequest {
    LeaseRequest {
        request: 9,
        store: StoreId([6; 16]),
        guest: "web".to_owned(),
        generation: Generation(300),
    }
}

/// The examples, by the name of their block in the page.
fn examples() -> Vec<(&'static str, Vec<u8>)> {
    let register = Register {
        realm: key().public().realm(),
        ttl_s: 60,
        candidates: candidates(),
        networks: vec![NetworkId([3; 8])],
        version: 1,
        enrolments: 0,
    };
    let peer = Peer {
        id: id(2),
        candidates: Candidates::default(),
        networks: Vec::new(),
    };
    let have = Have {
        realm: key().public().realm(),
        version: 300,
        enrolments: 1,
    };
    let enrolment = token().enrol(id(7), NOW_S).unwrap();
    let refused = Refused {
        request: 9,
        code: RefusedCode::NotHere,
        text: "no".to_owned(),
        hint: Some("wait".to_owned()),
    };
    let before = Some(Lease {
        generation: Generation(299),
        holder: id(2),
        released: true,
    });
    vec![
        ("ruleset", postcard::to_stdvec(&ruleset()).unwrap()),
        ("gateway", postcard::to_stdvec(&gateway()).unwrap()),
        (
            "join",
            encode(&ToServer::Join(Box::new(enrolment.clone()))).unwrap(),
        ),
        ("register", encode(&ToServer::Register(register)).unwrap()),
        (
            "introduce",
            encode(&ToServer::Introduce {
                request: 9,
                target: Target::Name("paris".to_owned()),
            })
            .unwrap(),
        ),
        (
            "introduced",
            encode(&ToHost::Introduced {
                request: 9,
                peer: peer.clone(),
                start_ms: 30,
            })
            .unwrap(),
        ),
        ("acquire", encode(&ToServer::AcquireLease(lease())).unwrap()),
        (
            "granted",
            encode(&ToHost::Lease {
                request: 9,
                answer: LeaseAnswer::Granted { before },
            })
            .unwrap(),
        ),
        ("refused", encode(&ToHost::Refused(refused)).unwrap()),
        (
            "find",
            encode(&Broker::Find {
                request: 1,
                realm: key().public().realm(),
                target: Target::Id(id(7)),
                from: peer,
                delay_ms: 20,
            })
            .unwrap(),
        ),
        ("have", encode(&Gossip::Have(have)).unwrap()),
        (
            "relay",
            [&relay::header(SessionId(0x0102_0304))[..], b"payload"].concat(),
        ),
        ("token", token().to_text().into_bytes()),
    ]
}

fn hex(bytes: &[u8]) -> String {
    let line = |bytes: &[u8]| {
        let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        hex.join(" ")
    };
    let lines: Vec<String> = bytes.chunks(32).map(line).collect();
    lines.join("\n")
}

/// How an example stands in the page.
fn block(name: &str, bytes: &[u8]) -> String {
    let text = match name {
        "token" => {
            let lines: Vec<&str> = bytes
                .chunks(96)
                .map(|line| std::str::from_utf8(line).unwrap())
                .collect();
            lines.join("\n")
        }
        _ => hex(bytes),
    };
    format!("```{name}\n{text}\n```")
}

#[test]
fn the_examples_of_the_documentation_are_true() {
    let page = include_str!("../../../../docs/rendezvous.md");
    let lacks: Vec<String> = examples()
        .iter()
        .map(|(name, bytes)| block(name, bytes))
        .filter(|block| !page.contains(block))
        .collect();
    assert!(
        lacks.is_empty(),
        "docs/rendezvous.md lacks\n{}",
        lacks.join("\n\n")
    );
}

#[test]
fn every_seed_and_every_example_passes_damaged_or_not() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/rendezvous");
    let files = std::fs::read_dir(folder).unwrap();
    let mut seeds: Vec<Vec<u8>> = files
        .map(|file| std::fs::read(file.unwrap().path()).unwrap())
        .collect();
    assert!(seeds.len() > 10, "{}", seeds.len());
    seeds.extend(examples().into_iter().map(|(_, bytes)| bytes));
    for data in seeds {
        rendezvous::run(&data);
        for cut in 0..data.len() {
            rendezvous::run(&data[..cut]);
            let mut flipped = data.clone();
            flipped[cut] ^= 0x41;
            rendezvous::run(&flipped);
        }
    }
}

#[test]
fn a_damaged_token_is_refused() {
    let text = token().to_text();
    assert_eq!(Token::parse(&text).unwrap().realm(), key().public().realm());
    assert!(Token::parse(&text[..text.len() - 4]).is_err());
}

proptest! {
    #[test]
    fn no_bytes_panic(data: Vec<u8>) {
        rendezvous::run(&data);
    }

    #[test]
    fn what_was_written_is_read(
        request: u32,
        guest in "[a-z]{0,255}",
        generation: u64,
        store: [u8; 16],
        port in 1_u16..,
        ip: [u8; 16],
        priority: u32,
        kind: u8,
    ) {
        let lease = ToServer::ReleaseLease(LeaseRequest {
            request,
            store: StoreId(store),
            guest,
            generation: Generation(generation),
        });
        rendezvous::run(&encode(&lease).unwrap());
        let candidate = Candidate {
            kind,
            address: (std::net::Ipv6Addr::from(ip), port).into(),
            priority,
        };
        let candidates = Candidates { candidates: vec![candidate; 16], nat: kind };
        let message = ToServer::Candidates(candidates);
        let bytes = encode(&message).unwrap();
        prop_assert_eq!(longhaul_realm::wire::decode::<ToServer>(&bytes), Ok(message));
    }
}
