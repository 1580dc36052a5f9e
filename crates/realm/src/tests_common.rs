//! Realms, hosts and tokens for tests.

use crate::enrolment::{Authorisation, Enrolment, TokenId, VerifiedAuthorisation};
use crate::key::SigningKey;
use crate::ruleset::{
    HostEntry, NetworkEntry, NetworkId, Ruleset, Scope, ServerEntry, VerifiedRuleset, VlanPolicy,
};
use crate::signed::sign;
use longhaul_protocol::HostId;

pub(crate) const NOW_S: u64 = 1_800_000_000;

pub(crate) fn key(seed: u8) -> SigningKey {
    SigningKey::from_seed(&[seed; 32]).unwrap()
}

pub(crate) fn id(byte: u8) -> HostId {
    HostId([byte; 32])
}

pub(crate) fn host(byte: u8) -> HostEntry {
    HostEntry {
        id: id(byte),
        name: format!("host-{byte}"),
        site: "paris".to_owned(),
        scope: Scope {
            may_query: true,
            may_send_guests: true,
        },
        token: None,
    }
}

pub(crate) fn network(byte: u8, members: &[u8]) -> NetworkEntry {
    NetworkEntry {
        id: NetworkId([byte; 8]),
        name: format!("net-{byte}"),
        members: members.iter().map(|byte| id(*byte)).collect(),
        vlans: VlanPolicy::Untagged,
        mtu: 1500,
        gateway: None,
    }
}

/// The ruleset of the realm of `key(1)`, with these hosts.
pub(crate) fn ruleset(version: u64, hosts: &[u8]) -> Ruleset {
    Ruleset {
        realm: key(1).public().realm(),
        version,
        issued_s: NOW_S,
        expires_s: NOW_S + 30 * 86_400,
        hosts: hosts.iter().map(|byte| host(*byte)).collect(),
        networks: vec![network(1, hosts)],
        removed: Vec::new(),
        revoked: Vec::new(),
        servers: vec![ServerEntry {
            id: id(200),
            addresses: vec!["rendezvous.example:7400".to_owned()],
        }],
        arbiter: None,
    }
}

pub(crate) fn signed(ruleset: &Ruleset) -> VerifiedRuleset {
    sign(ruleset, &key(1)).unwrap()
}

/// A token of that realm, whose one-time key is `key(byte)`.
pub(crate) fn token(byte: u8) -> VerifiedAuthorisation {
    let authorisation = Authorisation {
        realm: key(1).public().realm(),
        token: TokenId([byte; 16]),
        key: key(byte).public(),
        name: format!("host-{byte}"),
        site: "oslo".to_owned(),
        scope: Scope::default(),
        networks: vec![NetworkId([1; 8])],
        issued_s: NOW_S,
        expires_s: NOW_S + 86_400,
        confirm_s: NOW_S + 30 * 86_400,
    };
    sign(&authorisation, &key(1)).unwrap()
}

/// `host` joins with that token.
pub(crate) fn enrolment(byte: u8, host: u8) -> Enrolment {
    Enrolment::new(&token(byte), &key(byte), id(host), NOW_S + 10)
}
