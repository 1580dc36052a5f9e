//! Introductions, signals and relay sessions, here and through other servers.

use super::{Action, Conn, ConnId, Server};
use crate::Now;
use crate::key::RealmId;
use crate::limits::START_MS_MAX;
use crate::membership::Standing;
use crate::protocol::{Broker, Peer, RefusedCode, SessionId, Target, ToHost};
use longhaul_protocol::HostId;
use std::time::Duration;

/// How long other servers have to answer.
const FIND: Duration = Duration::from_secs(3);

/// A host that other servers were asked for.
#[derive(Debug)]
pub(super) struct Find {
    pub(super) conn: ConnId,
    pub(super) until: Duration,
    request: u32,
    target: HostId,
    /// Servers that have not answered.
    asked: Vec<ConnId>,
}

/// Returns when a host begins, in milliseconds after the introduction reaches it, so that both
/// hosts begin at once. The introduction reaches it after `own_ms`, and the other one after
/// `other_ms`.
fn start_ms(own_ms: u32, other_ms: u32) -> u16 {
    let wait = other_ms.saturating_sub(own_ms);
    u16::try_from(wait).unwrap_or(u16::MAX).min(START_MS_MAX)
}

fn half(rtt_ms: u16) -> u16 {
    rtt_ms / 2
}

impl Server {
    /// Returns the id of a member that may be connected now.
    fn member(&self, now: Now, realm: RealmId, target: &Target) -> Option<HostId> {
        let membership = &self.realms.get(&realm)?.membership;
        let id = match target {
            Target::Id(id) => *id,
            Target::Name(name) => membership.by_name(name, now.unix_s)?,
        };
        let standing = membership.standing(id, now.unix_s);
        matches!(standing, Standing::Member(_)).then_some(id)
    }

    /// Returns the connection of a member, and what is known of it.
    fn here(&self, realm: RealmId, host: HostId) -> Option<(ConnId, &Conn)> {
        let conn = *self.realms.get(&realm)?.registered.get(&host)?;
        self.conns.get(&conn).map(|entry| (conn, entry))
    }

    fn not_here(&mut self, conn: ConnId, request: u32) {
        self.counters.not_found += 1;
        let text = "the other host is not registered at a rendezvous server that answers";
        let hint = "check that its agent runs and reaches a rendezvous server of the realm";
        self.refuse(conn, request, RefusedCode::NotHere, text, Some(hint));
    }

    /// Returns the host of a connection if it may be connected to others now.
    fn asker(&mut self, now: Now, conn: ConnId, realm: RealmId, request: u32) -> Option<HostId> {
        let host = self.conns.get(&conn)?.host;
        let member = self.member(now, realm, &Target::Id(host));
        if member.is_none() {
            let text = "this host is not a member now, or the realm's ruleset has ended";
            self.refuse(conn, request, RefusedCode::NotAMember, text, None);
        }
        member
    }

    pub(super) fn introduce(
        &mut self,
        now: Now,
        conn: ConnId,
        realm: RealmId,
        request: u32,
        target: &Target,
    ) {
        let Some(host) = self.asker(now, conn, realm, request) else {
            return;
        };
        let Some(target) = self.member(now, realm, target).filter(|id| *id != host) else {
            let text = "no other member of the realm has that name or id";
            return self.refuse(conn, request, RefusedCode::NotHere, text, None);
        };
        let Some(asks) = self.conns.get(&conn) else {
            return;
        };
        let (from, own_ms) = (Self::peer(asks), half(asks.rtt_ms));
        if let Some((other, entry)) = self.here(realm, target) {
            let (peer, other_ms) = (Self::peer(entry), half(entry.rtt_ms));
            self.counters.introduced += 1;
            let start = start_ms(own_ms.into(), other_ms.into());
            self.tell_introduced(conn, request, peer, start);
            let start = start_ms(other_ms.into(), own_ms.into());
            return self.tell_introduced(other, 0, from, start);
        }
        let asked = self.servers_of(realm);
        if asked.is_empty() {
            return self.not_here(conn, request);
        }
        let limits = self.config.limits;
        let own = self.finds.values().filter(|find| find.conn == conn);
        if self.finds.len() >= limits.finds || own.count() >= limits.finds_per_host {
            self.counters.limited += 1;
            let text = "too many introductions wait for other servers: try again";
            return self.refuse(conn, request, RefusedCode::Limit, text, None);
        }
        let id = self.next_find;
        self.next_find = self.next_find.wrapping_add(1);
        let find = Find {
            conn,
            until: now.steady + FIND,
            request,
            target,
            asked,
        };
        self.finds.insert(id, find);
        self.tell_servers(realm, |_| Broker::Find {
            request: id,
            realm,
            target: Target::Id(target),
            from: from.clone(),
            delay_ms: own_ms,
        });
    }

    fn tell_introduced(&mut self, conn: ConnId, request: u32, peer: Peer, start_ms: u16) {
        let introduced = ToHost::Introduced {
            request,
            peer,
            start_ms,
        };
        self.actions.push_back(Action::Send(conn, introduced));
    }

    /// Another server asks for a host of this one.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn find_here(
        &mut self,
        now: Now,
        conn: ConnId,
        realm: RealmId,
        request: u32,
        target: &Target,
        from: Peer,
        delay_ms: u16,
    ) {
        let asks = self.servers_of(realm).contains(&conn);
        let asker = self.member(now, realm, &Target::Id(from.id));
        let found = self.member(now, realm, target).filter(|id| *id != from.id);
        let found = found.and_then(|id| self.here(realm, id));
        let answer = match found {
            Some((other, entry)) if asks && asker.is_some() => {
                let (peer, other_ms) = (Self::peer(entry), half(entry.rtt_ms));
                let link_ms = self.others.get(&conn).map_or(0, |o| half(o.rtt_ms));
                let theirs_ms = u32::from(link_ms) + u32::from(delay_ms);
                let start = start_ms(other_ms.into(), theirs_ms);
                self.tell_introduced(other, 0, from, start);
                Broker::Found {
                    request,
                    peer,
                    delay_ms: other_ms,
                }
            }
            _ => Broker::NotHere { request },
        };
        self.actions.push_back(Action::SendBroker(conn, answer));
    }

    /// Another server has the host.
    pub(super) fn found(&mut self, conn: ConnId, request: u32, peer: Peer, delay_ms: u16) {
        let answers = |find: &Find| find.asked.contains(&conn) && find.target == peer.id;
        if !self.finds.get(&request).is_some_and(answers) {
            return;
        }
        let Some(find) = self.finds.remove(&request) else {
            return;
        };
        let link_ms = self.others.get(&conn).map_or(0, |o| half(o.rtt_ms));
        let asks_ms = self.conns.get(&find.conn).map_or(0, |c| half(c.rtt_ms));
        let own_ms = u32::from(link_ms) + u32::from(asks_ms);
        self.counters.introduced += 1;
        let start = start_ms(own_ms, delay_ms.into());
        self.tell_introduced(find.conn, find.request, peer, start);
    }

    pub(super) fn not_there(&mut self, conn: ConnId, request: u32) {
        if let Some(find) = self.finds.get_mut(&request) {
            find.asked.retain(|asked| *asked != conn);
            if find.asked.is_empty() {
                self.find_fails(request);
            }
        }
    }

    fn find_fails(&mut self, id: u32) {
        if let Some(find) = self.finds.remove(&id) {
            self.not_here(find.conn, find.request);
        }
    }

    pub(super) fn finds_end(&mut self, now: Now) {
        let late = self.finds.iter().filter(|(_, f)| f.until <= now.steady);
        let late: Vec<u32> = late.map(|(id, _)| *id).collect();
        late.into_iter().for_each(|id| self.find_fails(id));
    }

    /// A server is gone: it answers nothing any more.
    pub(super) fn lost_server(&mut self, conn: ConnId) {
        let asked: Vec<u32> = self.finds.keys().copied().collect();
        asked.into_iter().for_each(|id| self.not_there(conn, id));
    }

    pub(super) fn signal(
        &mut self,
        now: Now,
        conn: ConnId,
        realm: RealmId,
        to: HostId,
        bytes: Vec<u8>,
    ) {
        let Some(from) = self.asker(now, conn, realm, 0) else {
            return;
        };
        if let Some((other, _)) = self.here(realm, to) {
            let signal = ToHost::Signal { from, bytes };
            return self.actions.push_back(Action::Send(other, signal));
        }
        if self.servers_of(realm).is_empty() {
            self.counters.signals_lost += 1;
        }
        self.tell_servers(realm, |_| Broker::Signal {
            realm,
            from,
            to,
            bytes: bytes.clone(),
        });
    }

    pub(super) fn signal_here(
        &mut self,
        now: Now,
        conn: ConnId,
        realm: RealmId,
        from: HostId,
        to: HostId,
        bytes: Vec<u8>,
    ) {
        let passes = self.servers_of(realm).contains(&conn);
        let member = self.member(now, realm, &Target::Id(from));
        match self.here(realm, to) {
            Some((other, _)) if passes && member.is_some() => {
                let signal = ToHost::Signal { from, bytes };
                self.actions.push_back(Action::Send(other, signal));
            }
            _ => self.counters.signals_lost += 1,
        }
    }

    pub(super) fn open_relay(
        &mut self,
        now: Now,
        conn: ConnId,
        realm: RealmId,
        request: u32,
        peer: HostId,
    ) {
        let Some(host) = self.asker(now, conn, realm, request) else {
            return;
        };
        let member = self.member(now, realm, &Target::Id(peer));
        let other = member.and_then(|id| self.here(realm, id));
        let other = other.map(|(conn, entry)| (conn, entry.observed));
        let own = self.conns.get(&conn).map(|entry| entry.observed);
        let (Some((other, theirs)), Some(own)) = (other, own) else {
            return self.not_here(conn, request);
        };
        let random = self.random.next_u64() as u32;
        let ends = [(host, own), (peer, theirs)];
        let Some(session) = self.relay.open(ends, random, now.steady) else {
            self.counters.limited += 1;
            let text = "the relay has no room for another session of these hosts";
            let hint = "end others, or use another rendezvous server";
            return self.refuse(conn, request, RefusedCode::Limit, text, Some(hint));
        };
        let bytes_per_s = self.config.limits.relay.session.per_s;
        for (conn, request, peer) in [(conn, request, peer), (other, 0, host)] {
            let opened = ToHost::RelayOpened {
                request,
                session,
                peer,
                bytes_per_s,
            };
            self.actions.push_back(Action::Send(conn, opened));
        }
    }

    pub(super) fn close_relay(&mut self, conn: ConnId, session: SessionId) {
        let Some(host) = self.conns.get(&conn).map(|entry| entry.host) else {
            return;
        };
        if let Some(other) = self.relay.close(session, host) {
            self.tell_relay_closed(session, [host, other]);
        }
    }

    /// Tells both hosts of a session, wherever they are connected.
    pub(super) fn tell_relay_closed(&mut self, session: SessionId, ends: [HostId; 2]) {
        let registered = self.realms.values().flat_map(|realm| &realm.registered);
        let conns = registered.filter(|(host, _)| ends.contains(host));
        let closed = |conn: &ConnId| Action::Send(*conn, ToHost::RelayClosed { session });
        self.actions.extend(conns.map(|(_, conn)| closed(conn)));
    }
}
