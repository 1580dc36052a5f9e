//! The operator: signs rulesets and tokens.

use crate::variant::Variant;
use crate::world::{HOSTS, Item, Node, SERVERS, World, host_id, server_id};
use longhaul_protocol::HostId;
use longhaul_realm::enrolment::{Authorisation, TokenId};
use longhaul_realm::key::SigningKey;
use longhaul_realm::ruleset::{
    Arbiter, HostEntry, NetworkEntry, NetworkId, Ruleset, Scope, ServerEntry, StoreId, Tombstone,
    VlanPolicy,
};
use longhaul_realm::signed::sign;
use longhaul_realm::token::Token;

/// How long a ruleset lives, in seconds.
const LIFETIME_S: u64 = 200;

pub(crate) fn entry(host: usize, token: Option<TokenId>) -> HostEntry {
    HostEntry {
        id: host_id(host),
        name: format!("host-{host}"),
        site: "site".to_owned(),
        scope: Scope::default(),
        token,
    }
}

pub(crate) fn servers() -> Vec<ServerEntry> {
    let entry = |server| ServerEntry {
        id: server_id(server),
        addresses: vec![format!("server-{server}:7400")],
    };
    (0..SERVERS).map(entry).collect()
}

impl World {
    pub(crate) fn first_ruleset(&self, hosts: &[usize]) -> Ruleset {
        Ruleset {
            realm: self.realm,
            version: 1,
            issued_s: self.true_s(),
            expires_s: self.true_s() + LIFETIME_S,
            hosts: hosts.iter().map(|host| entry(*host, None)).collect(),
            networks: vec![NetworkEntry {
                id: NetworkId([1; 8]),
                name: "net".to_owned(),
                members: hosts.iter().map(|host| host_id(*host)).collect(),
                vlans: VlanPolicy::Any,
                mtu: 1500,
                gateway: None,
            }],
            removed: Vec::new(),
            revoked: Vec::new(),
            servers: servers(),
            arbiter: Some(Arbiter {
                server: server_id(0),
                store: StoreId([0; 16]),
            }),
        }
    }

    /// Signs a ruleset and gives it to a server, or to a host if no server is there.
    pub(crate) fn publish(&mut self, mut ruleset: Ruleset) {
        ruleset.version = self.signed.len() as u64 + 1;
        ruleset.issued_s = self.true_s();
        ruleset.expires_s = self.true_s() + LIFETIME_S;
        let verified = sign(&ruleset, &self.key).unwrap();
        self.say(|| format!("ruleset {}: {ruleset:?}", ruleset.version));
        let signed = verified.signed().clone();
        self.signed
            .insert(ruleset.version, (ruleset, signed.clone()));
        let first = (0..SERVERS)
            .find(|server| self.plan.evil != Some(*server) && self.is_up(Node::Server(*server)));
        if let Some(server) = first {
            self.upload(server, signed);
        }
    }

    pub(crate) fn latest(&self) -> &Ruleset {
        &self.signed.last_key_value().unwrap().1.0
    }

    /// A token for a host, whose owner joins with it; a thief may use a copy.
    pub(crate) fn issue_token(&mut self, host: usize) {
        let number = 10 + host as u8;
        let authorisation = Authorisation {
            realm: self.realm,
            token: TokenId([number; 16]),
            key: self.key.public(),
            name: format!("host-{host}"),
            site: "site".to_owned(),
            scope: Scope::default(),
            networks: vec![NetworkId([1; 8])],
            issued_s: self.true_s(),
            expires_s: self.true_s() + 1000,
            confirm_s: self.true_s() + 100_000,
        };
        let token = Token::make(authorisation, [number; 32], servers(), &self.key).unwrap();
        let token = Token::parse(&token.to_text()).unwrap();
        let thief = (self.plan.thief && host == 4).then_some(HOSTS - 1);
        for user in [Some(host), thief].into_iter().flatten() {
            let unix_s = self.true_s();
            let enrolment = token.enrol(host_id(user), unix_s).unwrap();
            self.enrolled.insert((TokenId([number; 16]), host_id(user)));
            self.seen_enrolments.push(enrolment.clone());
            self.hosts[user].disk.enrolments.push(enrolment);
            self.hosts[user].started = true;
            self.done.joined += 1;
            self.at(self.now_ms + 1, Item::Restart(Node::Host(user)));
        }
        if self.variant == Variant::SecretAtServer {
            self.secret = Some([number; 32]);
        }
    }

    pub(crate) fn operator(&mut self) {
        let latest = self.latest().clone();
        let mut next = latest.clone();
        let listed: Vec<HostId> = latest.hosts.iter().map(|host| host.id).collect();
        let quiet = self.now_ms >= crate::world::QUIET_MS;
        match self.rng.below(6) {
            // The last version is published again, so that nothing ends.
            _ if quiet => self.publish(next),
            // Remove a host that was a member from the start, or one that joined.
            0 | 1 if listed.len() > 3 => {
                let at = self.rng.below(listed.len() as u64) as usize;
                let gone = next.hosts.remove(at);
                next.networks[0].members.retain(|id| *id != gone.id);
                if gone.token.is_none() || self.variant != Variant::NoTombstone {
                    next.removed.push(Tombstone {
                        id: gone.id,
                        removed_s: self.true_s(),
                    });
                } else if let Some(token) = gone.token {
                    // Its token is listed for nobody: the enrolment brings it back.
                    self.say(|| format!("no tombstone for {gone:?} of {token:?}"));
                }
                self.done.removed += 1;
                self.publish(next);
                let version = self.signed.len() as u64;
                self.removed.insert(gone.id, version);
                let host = usize::from(gone.id.0[0] - 1);
                self.at(self.now_ms + 5000, Item::CheckRemoval(host, version));
            }
            // List a host that joined by a token.
            2 => {
                let free =
                    |(_, id): &&(TokenId, HostId)| !listed.contains(id) && !latest.is_removed(*id);
                let taken =
                    |token: &TokenId| latest.hosts.iter().any(|host| host.token == Some(*token));
                let joined = self.enrolled.iter().find(free).copied();
                if let Some((token, id)) = joined.filter(|(token, _)| !taken(token)) {
                    next.hosts
                        .push(entry(usize::from(id.0[0] - 1), Some(token)));
                    self.publish(next);
                }
            }
            // An arbiter whose store was restored.
            3 if latest.arbiter.is_some_and(|arbiter| {
                arbiter.server == server_id(0) && arbiter.store != self.servers[0].disk.store
            }) =>
            {
                next.arbiter = Some(Arbiter {
                    server: server_id(0),
                    store: self.servers[0].disk.store,
                });
                self.publish(next);
            }
            3 if self.plan.arbiter_moves && self.now_ms > 100_000 => {
                self.plan.arbiter_moves = false;
                next.arbiter = Some(Arbiter {
                    server: server_id(1),
                    store: self.servers[1].disk.store,
                });
                self.publish(next);
            }
            _ => {
                let issued = |host: &usize| !self.hosts[*host].started;
                if let Some(host) = (4..HOSTS - 1).find(issued) {
                    self.issue_token(host);
                } else {
                    self.publish(next);
                }
            }
        }
        let wait_ms = if quiet { 60_000 } else { 5_000 };
        self.after(wait_ms, 61_000, Item::Operator);
    }
}

/// The one-time key of a token.
pub(crate) fn one_time_key(seed: &[u8; 32]) -> SigningKey {
    SigningKey::from_seed(seed).unwrap()
}
