//! A server that somebody has broken into. It speaks the protocol and lies in everything.

use crate::operator::{entry, one_time_key};
use crate::variant::Variant;
use crate::world::{Node, Packet, World, evil_id};
use longhaul_realm::enrolment::{Authorisation, Enrolment, TokenId};
use longhaul_realm::key::SigningKey;
use longhaul_realm::protocol::{Candidates, LeaseAnswer, Peer, SessionId, ToHost};
use longhaul_realm::ruleset::{HostEntry, NetworkId, Ruleset, Scope};
use longhaul_realm::signed::sign;

impl World {
    /// What the evil server sends in place of this; `None` is nothing.
    pub(crate) fn corrupt(&mut self, message: ToHost) -> Option<ToHost> {
        match message {
            // It withholds all but the first rulesets.
            ToHost::Ruleset(_) | ToHost::Registered { .. } if self.rng.one_in(3) => {
                let old = self.rng.below(self.signed.len() as u64) + 1;
                Some(ToHost::Ruleset(self.signed[&old.min(2)].1.clone()))
            }
            ToHost::Ruleset(_) => None,
            ToHost::Enrolments(_) if self.rng.one_in(2) => None,
            ToHost::Lease { request, .. } => Some(ToHost::Lease {
                request,
                answer: LeaseAnswer::Granted { before: None },
            }),
            other => Some(other),
        }
    }

    /// It invents members, in every way that there is.
    pub(crate) fn evil(&mut self) {
        let Some(evil) = self.plan.evil else {
            return;
        };
        let from = Node::Server(evil);
        let conns: Vec<u64> = (0..self.conns.len() as u64)
            .filter(|conn| {
                let line = &self.conns[*conn as usize];
                let host = line.ends.iter().any(|end| matches!(end, Node::Host(_)));
                line.alive && host && line.ends.contains(&from)
            })
            .collect();
        for conn in conns {
            let message = self.forge();
            self.done.forged += 1;
            self.transmit(conn, from, Packet::ToHost(message));
        }
    }

    fn forge(&mut self) -> ToHost {
        let own = SigningKey::from_seed(&[66; 32]).unwrap();
        let host = HostEntry {
            id: evil_id(),
            name: "evil".to_owned(),
            ..entry(0, None)
        };
        let mut ruleset: Ruleset = self.latest().clone();
        ruleset.version += 1000;
        ruleset.hosts.push(host);
        match self.rng.below(8) {
            // A ruleset of another realm, as it is, and under this realm's key.
            0 => {
                ruleset.realm = own.public().realm();
                ToHost::Ruleset(sign(&ruleset, &own).unwrap().signed().clone())
            }
            1 => {
                ruleset.realm = own.public().realm();
                let mut signed = sign(&ruleset, &own).unwrap().signed().clone();
                signed.key = self.key.public();
                ToHost::Ruleset(signed)
            }
            2 if self.variant == Variant::KeyAtServer => {
                ToHost::Ruleset(sign(&ruleset, &self.key).unwrap().signed().clone())
            }
            // A changed ruleset under the true signature.
            2 => {
                let latest = self.signed.last_key_value().unwrap().1.1.clone();
                let mut signed = latest;
                let at = self.rng.below(signed.bytes.len() as u64) as usize;
                signed.bytes[at] ^= 1 << self.rng.below(8);
                ToHost::Ruleset(signed)
            }
            // A token used for another host: the signature of the true one, or an own key's.
            3 | 4 if !self.seen_enrolments.is_empty() => {
                let at = self.rng.below(self.seen_enrolments.len() as u64) as usize;
                let mut enrolment = self.seen_enrolments[at].clone();
                if self.rng.one_in(3) {
                    // A true one, perhaps of a host that was removed.
                } else if let Some(seed) = self.secret {
                    let authorisation = enrolment.authorisation.verify(self.realm).unwrap();
                    let key = one_time_key(&seed);
                    let joined_s = enrolment.joined_s;
                    enrolment = Enrolment::new(&authorisation, &key, evil_id(), joined_s);
                } else if self.rng.one_in(2) {
                    enrolment.host = evil_id();
                } else {
                    let authorisation = enrolment.authorisation.verify(self.realm).unwrap();
                    enrolment = Enrolment::new(&authorisation, &own, evil_id(), 1);
                }
                ToHost::Enrolments(vec![enrolment])
            }
            // A token of its own realm.
            5 => {
                let authorisation = Authorisation {
                    realm: own.public().realm(),
                    token: TokenId([66; 16]),
                    key: own.public(),
                    name: "evil".to_owned(),
                    site: "evil".to_owned(),
                    scope: Scope::default(),
                    networks: vec![NetworkId([1; 8])],
                    issued_s: self.true_s(),
                    expires_s: self.true_s() + 100,
                    confirm_s: self.true_s() + 1000,
                };
                let authorisation = sign(&authorisation, &own).unwrap();
                let enrolment = Enrolment::new(&authorisation, &own, evil_id(), self.true_s());
                ToHost::Enrolments(vec![enrolment])
            }
            6 => ToHost::RelayOpened {
                request: 0,
                session: SessionId(7),
                peer: evil_id(),
                bytes_per_s: 1,
            },
            // It introduces its own host, or a removed one.
            _ => {
                let removed = self.latest().removed.first().map(|gone| gone.id);
                ToHost::Introduced {
                    request: self.rng.below(20) as u32,
                    peer: Peer {
                        id: removed.filter(|_| self.rng.one_in(2)).unwrap_or(evil_id()),
                        candidates: Candidates::default(),
                        networks: Vec::new(),
                    },
                    start_ms: 0,
                }
            }
        }
    }
}
