//! What must hold after each event, some time after a removal, and in the end.

use crate::world::{HOSTS, Node, SERVERS, World, host_id, server_id};
use longhaul_protocol::HostId;
use longhaul_realm::membership::Standing;
use std::collections::BTreeSet;

impl World {
    /// No host accepts a member that the realm's key did not authorise, and versions only grow.
    pub(crate) fn check_host(&mut self, host: usize) {
        let Some(core) = &self.hosts[host].core else {
            return;
        };
        let membership = core.membership();
        let version = membership.version();
        let now = self.now(Node::Host(host));
        let members = membership.members(now.unix_s);
        if version < self.hosts[host].version {
            return self.fail("a version went back");
        }
        let truth = self.signed.get(&version).map(|(ruleset, _)| ruleset);
        let mut names = BTreeSet::new();
        let mut wrong = None;
        for member in &members {
            let listed = truth.is_some_and(|ruleset| ruleset.host(member.id).is_some());
            let enrolled = self.enrolled.iter().any(|(_, id)| *id == member.id);
            if member.pending == listed || !(listed || enrolled) {
                wrong = Some("a host accepts a member that the realm did not authorise");
            }
            let removed = self.removed.get(&member.id);
            if removed.is_some_and(|removed| version >= *removed) {
                wrong = Some("a host accepts a removed member");
            }
            if !names.insert(member.name.clone()) {
                wrong = Some("two members have one name");
            }
        }
        // Who knows both users of a token accepts neither, unless the ruleset lists one.
        let users = membership.enrolments();
        let pairs = users.filter(|a| {
            let twice = |b: &&longhaul_realm::enrolment::VerifiedEnrolment| {
                a.token() == b.token() && a.host() != b.host()
            };
            membership.enrolments().any(|b| twice(&b))
        });
        let both: BTreeSet<HostId> = pairs.map(|enrolment| enrolment.host()).collect();
        if members.iter().any(|m| m.pending && both.contains(&m.id)) {
            wrong = Some("a host accepts one of two users of a token");
        }
        self.hosts[host].version = version;
        if let Some(wrong) = wrong {
            self.fail(wrong);
        }
    }

    /// A server's word alone makes nobody a peer.
    pub(crate) fn check_introduced(&mut self, host: usize, peer: HostId) {
        let now = self.now(Node::Host(host));
        let core = self.hosts[host].core.as_ref().unwrap();
        if !core.may_connect(peer, now).is_member() {
            self.fail("a stranger was introduced");
        }
    }

    /// Five seconds after a removal, if nothing fails: every host with an honest path has it.
    pub(crate) fn check_removal(&mut self, gone: usize, version: u64) {
        if !self.plan.calm {
            return;
        }
        for host in (0..HOSTS).filter(|host| *host != gone) {
            let node = Node::Host(host);
            let Some(core) = &self.hosts[host].core else {
                continue;
            };
            let now = self.now(node);
            if self.latest().host(host_id(host)).is_none() {
                // It was removed itself, or is pending: servers may not talk to it.
                continue;
            }
            // Paths that were there before the removal, to honest servers and to members.
            let old = |ends: [Node; 2]| {
                let conn = self.conn_of(ends).map(|conn| &self.conns[conn as usize]);
                conn.is_some_and(|conn| conn.since_ms + 6000 < self.now_ms)
            };
            let server = (0..SERVERS)
                .filter(|server| self.plan.evil != Some(*server))
                .any(|server| old([node, Node::Server(server)]));
            let through = |other: &usize| {
                let listed = self.latest().host(host_id(*other)).is_some();
                *other != host && listed && old([node, Node::Host(*other)])
            };
            let peer = (0..HOSTS).any(|other| through(&other) && Some(other) != self.plan.cut_off);
            let stays = matches!(
                core.may_connect(host_id(gone), now),
                Standing::Member(_) | Standing::Expired(_)
            );
            let connected = self.conn_of([node, Node::Host(gone)]).is_some();
            if (server || peer) && core.membership().version() < version {
                return self.fail("a version did not arrive in time");
            }
            if (server || peer) && (stays || connected) {
                return self.fail("a removed host is still connected or accepted");
            }
        }
    }

    /// Long after the last fault.
    pub(crate) fn check_end(&mut self) {
        let latest = self.latest().clone();
        let mut digests = BTreeSet::new();
        for host in (0..HOSTS).filter(|host| latest.host(host_id(*host)).is_some()) {
            if !self.hosts[host].started {
                continue;
            }
            let Some(core) = &self.hosts[host].core else {
                return self.fail("a host did not start again");
            };
            let cut_off = self.plan.cut_off == Some(host);
            let peers = (0..HOSTS).any(|other| {
                let path = self.conn_of([Node::Host(host), Node::Host(other)]);
                latest.host(host_id(other)).is_some()
                    && path.is_some_and(|c| self.conns[c as usize].since_ms + 5000 < self.now_ms)
            });
            if cut_off && !peers {
                continue;
            }
            // One version may be on its way.
            if core.membership().version() + 1 < latest.version {
                let version = core.membership().version();
                return self.fail(&format!("host {host} stays at version {version}"));
            }
            digests.insert(core.membership().enrolments_digest());
            let registered = core.links().into_iter().filter(|link| link.registered);
            let registered: Vec<HostId> = registered.map(|link| link.server).collect();
            for server in (0..SERVERS).filter(|server| self.plan.evil != Some(*server)) {
                if !cut_off && !registered.contains(&server_id(server)) {
                    return self.fail("a member is not registered in the end");
                }
            }
            if self.hosts[host].asked.len() > 8 {
                return self.fail("requests are not answered");
            }
        }
        if digests.len() > 1 {
            self.fail("hosts disagree about enrolments in the end");
        }
    }
}
