//! Rulesets and enrolments at a server: judged, made durable, passed on.

use super::{Action, ConnId, LeaseEntry, RETRY, Record, Server, WriteId};
use crate::Now;
use crate::enrolment::{Enrolment, TokenId};
use crate::key::RealmId;
use crate::membership::{EnrolError, Membership, RulesetError, Standing, Why};
use crate::protocol::{Broker, Have, RefusedCode, ToHost};
use crate::ruleset::{NotNewer, SignedRuleset, VerifiedRuleset};
use longhaul_protocol::HostId;
use std::collections::{BTreeMap, BTreeSet};

/// A realm that a server serves.
#[derive(Debug)]
pub(super) struct RealmState {
    pub(super) membership: Membership,
    pub(super) registered: BTreeMap<HostId, ConnId>,
    pub(super) leases: BTreeMap<String, LeaseEntry>,
    /// Guests whose leases are being written.
    pub(super) writing: BTreeSet<String>,
    /// Guests whose last write failed: the answer must wait for another one.
    pub(super) unsure: BTreeSet<String>,
    /// Who is using a token, from before the write on.
    joining: BTreeMap<TokenId, HostId>,
    /// The highest version that is being written.
    version_writing: u64,
    /// Who gave a version that is being written already, and waits for the answer.
    givers: Vec<ConnId>,
}

/// What waits for a write.
#[derive(Debug)]
pub(super) enum Write {
    /// A ruleset, and the connection that gave it.
    Ruleset(Box<VerifiedRuleset>, Option<ConnId>),
    /// A use of a token, and the connection that waits for the answer.
    Enrolment(Box<Enrolment>, Option<ConnId>),
    Lease {
        realm: RealmId,
        guest: String,
        conn: ConnId,
        request: u32,
        answer: crate::protocol::LeaseAnswer,
    },
    /// Nothing: the content is in force already.
    Again(RealmId),
}

impl RealmState {
    pub(super) fn new(membership: Membership, leases: BTreeMap<String, LeaseEntry>) -> Self {
        Self {
            membership,
            registered: BTreeMap::new(),
            leases,
            writing: BTreeSet::new(),
            unsure: BTreeSet::new(),
            joining: BTreeMap::new(),
            version_writing: 0,
            givers: Vec::new(),
        }
    }

    pub(super) fn have(&self) -> Have {
        Have {
            realm: self.membership.realm(),
            version: self.membership.version(),
            enrolments: self.membership.enrolments_digest(),
        }
    }

    pub(super) fn enrolments(&self) -> Vec<Enrolment> {
        let enrolments = self.membership.enrolments();
        enrolments.map(|one| one.enrolment().clone()).collect()
    }
}

impl Server {
    pub(super) fn persist(&mut self, record: Record, then: Write) {
        let id = WriteId(self.next_write);
        self.next_write += 1;
        self.writes.insert(id, then);
        self.actions.push_back(Action::Persist(id, record));
    }

    /// A ruleset from anyone: what counts is the realm's signature.
    pub(super) fn ruleset(&mut self, conn: Option<ConnId>, ruleset: &SignedRuleset) {
        let id = ruleset.key.realm();
        let Some(state) = self.realms.get_mut(&id) else {
            if let Some(conn) = conn {
                let text = "this server does not serve the realm of the ruleset";
                self.refuse(conn, 0, RefusedCode::UnknownRealm, text, None);
            }
            return;
        };
        match state.membership.judge(ruleset) {
            Ok(verified) if verified.content().version > state.version_writing => {
                state.version_writing = verified.content().version;
                let record = Record::Ruleset(verified.signed().clone());
                self.persist(record, Write::Ruleset(Box::new(verified), conn));
            }
            // A host that has an older one gets the newer one when it registers.
            Err(RulesetError::NotNewer(NotNewer::Same { .. } | NotNewer::Older { .. })) => {
                if let Some(conn) = conn {
                    self.answer_giver(id, conn, true);
                }
            }
            Ok(_) => state.givers.extend(conn),
            Err(error) => {
                self.counters.documents += 1;
                if let Some(conn) = conn {
                    let text = error.to_string();
                    self.refuse(conn, 0, RefusedCode::Document, &text, None);
                }
            }
        }
    }

    /// Who gave a ruleset without being registered is an operator: it gets the one in force, as the
    /// answer, and the enrolments, which the next version may settle.
    fn answer_giver(&mut self, realm: RealmId, conn: ConnId, durable: bool) {
        let registered = self
            .conns
            .get(&conn)
            .is_none_or(|conn| conn.realm.is_some());
        let Some(state) = self.realms.get(&realm).filter(|_| !registered) else {
            return;
        };
        if !durable {
            return self.storage_fails(conn, 0);
        }
        let enrolments = ToHost::Enrolments(state.enrolments());
        if let Some(ruleset) = state.membership.verified() {
            let ruleset = ToHost::Ruleset(ruleset.signed().clone());
            self.actions.push_back(Action::Send(conn, enrolments));
            self.actions.push_back(Action::Send(conn, ruleset));
        }
    }

    /// A host uses a token.
    pub(super) fn join(&mut self, now: Now, conn: ConnId, enrolment: &Enrolment) {
        let Some(host) = self.conns.get(&conn).map(|entry| entry.host) else {
            return;
        };
        let realm = enrolment.authorisation.key.realm();
        let Some(state) = self.realms.get_mut(&realm) else {
            let text = "this server does not serve the realm of the token";
            return self.refuse(conn, 0, RefusedCode::UnknownRealm, text, None);
        };
        let verified = match enrolment.verify(realm) {
            Ok(verified) if verified.host() == host => verified,
            Ok(_) => {
                let text = "the enrolment names another host than the one that is connected";
                return self.refuse(conn, 0, RefusedCode::Document, text, None);
            }
            Err(error) => {
                self.counters.documents += 1;
                let text = error.to_string();
                return self.refuse(conn, 0, RefusedCode::Document, &text, None);
            }
        };
        let token = verified.token();
        let used_by = state.membership.user_of(token);
        if used_by == Some(host) || state.membership.standing(host, now.unix_s).is_member() {
            return self.actions.push_back(Action::Send(conn, ToHost::Joined));
        }
        let joining = state.joining.get(&token).copied();
        if joining.or(used_by).is_some_and(|other| other != host) {
            self.counters.tokens_reused += 1;
            let text = "another host used this token";
            let hint = "ask the operator for a new one; if it was not you, let it be revoked";
            return self.refuse(conn, 0, RefusedCode::TokenUsed, text, Some(hint));
        }
        let expires_s = verified.authorisation().expires_s;
        let refusal = if now.unix_s > expires_s {
            Some(crate::enrolment::EnrolmentError::Late { expires_s }.to_string())
        } else {
            // What it would be is tried out on a copy.
            let mut copy = state.membership.clone();
            let enrolled = copy.enrol(enrolment, now.unix_s);
            enrolled.err().map(|error| error.to_string()).or_else(|| {
                match copy.standing(host, now.unix_s) {
                    Standing::Stranger(Why::NoRuleset) | Standing::Member(_) => None,
                    Standing::Expired(_) => Some(Why::Ended.to_string()),
                    Standing::Stranger(why) => Some(why.to_string()),
                }
            })
        };
        if let Some(text) = refusal {
            let hint = "ask the operator for another token";
            return self.refuse(conn, 0, RefusedCode::Document, &text, Some(hint));
        }
        state.joining.insert(token, host);
        let enrolment = Box::new(enrolment.clone());
        let record = Record::Enrolment(enrolment.clone());
        self.persist(record, Write::Enrolment(enrolment, Some(conn)));
    }

    pub(super) fn written(&mut self, now: Now, write: WriteId, durable: bool) {
        match self.writes.remove(&write) {
            Some(Write::Ruleset(ruleset, conn)) => {
                let realm = ruleset.content().realm;
                self.install(now, *ruleset, durable);
                let state = self.realms.get_mut(&realm);
                let waiting = state.map(|state| std::mem::take(&mut state.givers));
                for giver in waiting.into_iter().flatten().chain(conn) {
                    self.answer_giver(realm, giver, durable);
                }
            }
            Some(Write::Enrolment(enrolment, conn)) if durable => {
                self.enrolled(now, &enrolment, conn);
            }
            // The host that was written stays the only one that may use the token: a failed write
            // may have reached the disk.
            Some(Write::Enrolment(_, Some(conn))) => self.storage_fails(conn, 0),
            Some(Write::Lease {
                realm,
                guest,
                conn,
                request,
                answer,
            }) => self.lease_written(realm, &guest, conn, request, answer, durable),
            Some(Write::Again(realm)) if !durable => {
                self.retries.push((now.steady + RETRY, realm));
            }
            Some(Write::Enrolment(_, None) | Write::Again(_)) | None => {}
        }
    }

    pub(super) fn storage_fails(&mut self, conn: ConnId, request: u32) {
        let text = "the server cannot write to its store";
        let hint = "try again; if it stays, look at the server's disk";
        self.refuse(conn, request, RefusedCode::Storage, text, Some(hint));
    }

    /// Puts a ruleset in force and passes it on. If it is not durable, removals count nevertheless.
    fn install(&mut self, now: Now, ruleset: VerifiedRuleset, durable: bool) {
        let realm = ruleset.content().realm;
        let signed = ruleset.signed().clone();
        let Some(state) = self.realms.get_mut(&realm) else {
            return;
        };
        if !durable {
            state.version_writing = 0;
            self.retries.push((now.steady + RETRY, realm));
        }
        if ruleset.replaces(state.membership.verified()).is_err() {
            return;
        }
        state.membership.install(ruleset, now.unix_s);
        let mut gone = Vec::new();
        for (host, conn) in &state.registered {
            match state.membership.standing(*host, now.unix_s) {
                Standing::Stranger(why) => gone.push((*host, *conn, why)),
                Standing::Member(_) | Standing::Expired(_) => {
                    let push = ToHost::Ruleset(signed.clone());
                    self.actions.push_back(Action::Send(*conn, push));
                }
            }
        }
        for (host, conn, why) in gone {
            let text = why.to_string();
            self.refuse(conn, 0, RefusedCode::NotAMember, &text, None);
            for (session, other) in self.relay.close_all(host) {
                self.tell_relay_closed(session, [host, other]);
            }
            self.end(conn, &text);
        }
        self.tell_servers(realm, |_| Broker::Ruleset(signed.clone()));
    }

    pub(super) fn write_ruleset_again(&mut self, realm: RealmId) {
        let state = self.realms.get_mut(&realm);
        let ruleset = state.and_then(|state| state.membership.verified());
        if let Some(signed) = ruleset.map(|ruleset| ruleset.signed().clone()) {
            self.persist(Record::Ruleset(signed), Write::Again(realm));
        }
    }

    fn enrolled(&mut self, now: Now, enrolment: &Enrolment, conn: Option<ConnId>) {
        let realm = enrolment.authorisation.key.realm();
        let Some(state) = self.realms.get_mut(&realm) else {
            return;
        };
        if let Ok(true) = state.membership.enrol(enrolment, now.unix_s) {
            let one = vec![enrolment.clone()];
            for other in state.registered.values() {
                let push = ToHost::Enrolments(one.clone());
                self.actions.push_back(Action::Send(*other, push));
            }
            self.tell_servers(realm, |_| Broker::Enrolments {
                realm,
                enrolments: one.clone(),
            });
        }
        if let Some(conn) = conn.filter(|conn| self.conns.contains_key(conn)) {
            self.actions.push_back(Action::Send(conn, ToHost::Joined));
        }
    }

    /// Sends to all connected servers of a realm.
    pub(super) fn tell_servers(&mut self, realm: RealmId, message: impl Fn(ConnId) -> Broker) {
        for conn in self.servers_of(realm) {
            let message = Action::SendBroker(conn, message(conn));
            self.actions.push_back(message);
        }
    }

    pub(super) fn servers_of(&self, realm: RealmId) -> Vec<ConnId> {
        let state = self.realms.get(&realm);
        let Some(ruleset) = state.and_then(|state| state.membership.ruleset()) else {
            return Vec::new();
        };
        let others = self.others.iter();
        let of_realm = others.filter(|(_, other)| ruleset.server(other.id).is_some());
        of_realm.map(|(conn, _)| *conn).collect()
    }

    pub(super) fn broker(&mut self, now: Now, conn: ConnId, message: Broker) {
        let Some(other) = self.others.get_mut(&conn) else {
            return;
        };
        let cost = match &message {
            Broker::Ruleset(ruleset) => super::cost(ruleset),
            _ => 1,
        };
        if !other.messages.take(cost, now.steady) {
            self.counters.limited += 1;
            return self.end(conn, "too many messages");
        }
        match message {
            Broker::Have(have) => self.other_has(conn, have),
            Broker::Ruleset(ruleset) => self.ruleset(None, &ruleset),
            Broker::Enrolments { realm, enrolments } => {
                for enrolment in &enrolments {
                    self.foreign_enrolment(now, realm, enrolment);
                }
            }
            Broker::Find {
                request,
                realm,
                target,
                from,
                delay_ms,
            } => self.find_here(now, conn, realm, request, &target, from, delay_ms),
            Broker::Found {
                request,
                peer,
                delay_ms,
            } => self.found(conn, request, peer, delay_ms),
            Broker::NotHere { request } => self.not_there(conn, request),
            Broker::Signal {
                realm,
                from,
                to,
                bytes,
            } => self.signal_here(now, conn, realm, from, to, bytes),
        }
    }

    /// Sends what the other server lacks, and asks for nothing: it does the same.
    fn other_has(&mut self, conn: ConnId, theirs: Have) {
        if !self.servers_of(theirs.realm).contains(&conn) {
            self.counters.foreign_servers += 1;
            return;
        }
        let Some(state) = self.realms.get(&theirs.realm) else {
            return;
        };
        let ours = state.have();
        if let Some(ruleset) = state.membership.verified()
            && theirs.version < ours.version
        {
            let ruleset = Broker::Ruleset(ruleset.signed().clone());
            self.actions.push_back(Action::SendBroker(conn, ruleset));
        }
        if theirs.enrolments != ours.enrolments {
            let enrolments = Broker::Enrolments {
                realm: theirs.realm,
                enrolments: state.enrolments(),
            };
            self.actions.push_back(Action::SendBroker(conn, enrolments));
        }
    }

    /// An enrolment that another server took. A second use of a token is kept as proof.
    fn foreign_enrolment(&mut self, now: Now, realm: RealmId, enrolment: &Enrolment) {
        let Some(state) = self.realms.get_mut(&realm) else {
            return;
        };
        match state.membership.enrol(enrolment, now.unix_s) {
            Ok(true) => {
                let push = vec![enrolment.clone()];
                for conn in state.registered.values() {
                    let push = ToHost::Enrolments(push.clone());
                    self.actions.push_back(Action::Send(*conn, push));
                }
                let enrolment = Box::new(enrolment.clone());
                let record = Record::Enrolment(enrolment.clone());
                self.persist(record, Write::Enrolment(enrolment, None));
            }
            Ok(false) | Err(EnrolError::Void(_)) => {}
            Err(_) => self.counters.documents += 1,
        }
    }
}
