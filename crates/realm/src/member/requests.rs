//! Requests to servers: introductions, relay sessions, leases.

use super::{Action, Failure, Member};
use crate::Now;
use crate::protocol::{
    Gossip, LeaseAnswer, LeaseRequest, Peer, Refused, SessionId, Target, ToServer,
};
use crate::ruleset::StoreId;
use longhaul_protocol::{Generation, HostId};
use std::time::Duration;

/// How long a request may take, all servers together.
const PATIENCE: Duration = Duration::from_secs(30);
/// Most requests that wait.
const PENDING_MAX: usize = 256;

#[derive(Debug, Clone)]
enum Asked {
    Introduction(HostId),
    /// At this server, with this host.
    Relay(HostId, HostId),
    Lease(LeaseRequest, bool),
}

/// A request that waits.
#[derive(Debug)]
pub(super) struct Pending {
    /// The owner's number.
    request: u32,
    asked: Asked,
    pub(super) until: Duration,
    /// The server that is asked now.
    server: Option<HostId>,
    tried: Vec<HostId>,
}

impl Member {
    fn failed(&mut self, request: u32, failure: Failure) {
        self.act(Action::Failed(request, failure));
    }

    /// Returns the id of another member.
    fn target(&self, now: Now, target: &Target) -> Option<HostId> {
        let id = match target {
            Target::Id(id) => *id,
            Target::Name(name) => self.membership.by_name(name, now.unix_s)?,
        };
        let member = self.membership.standing(id, now.unix_s).is_member();
        (member && id != self.config.host).then_some(id)
    }

    pub(super) fn introduce(&mut self, now: Now, request: u32, target: Target) {
        match self.target(now, &target) {
            Some(id) => self.ask(now, request, Asked::Introduction(id)),
            None => self.failed(request, Failure::NoMember),
        }
    }

    pub(super) fn open_relay(&mut self, now: Now, request: u32, server: HostId, peer: HostId) {
        match self.target(now, &Target::Id(peer)) {
            Some(id) => self.ask(now, request, Asked::Relay(server, id)),
            None => self.failed(request, Failure::NoMember),
        }
    }

    /// Sends bytes through the first server that is there: `paths` repeats them.
    pub(super) fn signal(&mut self, to: HostId, bytes: Vec<u8>) {
        match self.registered_servers().first() {
            Some(server) => self.send(*server, ToServer::Signal { to, bytes }),
            None => self.act(Action::Gossip(to, Gossip::Signal(bytes))),
        }
    }

    /// Sends bytes on the own connection with a host, if it is connected.
    pub(super) fn signal_direct(&mut self, to: HostId, bytes: Vec<u8>) {
        match self.peers.contains_key(&to) {
            true => self.act(Action::Gossip(to, Gossip::Signal(bytes))),
            false => self.signal(to, bytes),
        }
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn lease(
        &mut self,
        now: Now,
        request: u32,
        store: StoreId,
        guest: String,
        generation: Generation,
        acquire: bool,
    ) {
        let arbiter = self.membership.ruleset().and_then(|r| r.arbiter);
        let Some(arbiter) = arbiter.filter(|arbiter| arbiter.store == store) else {
            return self.failed(request, Failure::NoArbiter);
        };
        if !self.registered_servers().contains(&arbiter.server) {
            return self.failed(request, Failure::ArbiterUnreachable);
        }
        let lease = LeaseRequest {
            request: 0,
            store,
            guest,
            generation,
        };
        self.ask(now, request, Asked::Lease(lease, acquire));
    }

    fn ask(&mut self, now: Now, request: u32, asked: Asked) {
        if self.pending.len() >= PENDING_MAX {
            return self.failed(request, Failure::TooMany);
        }
        let id = self.next_request;
        // 0 is for messages without request.
        self.next_request = self.next_request.wrapping_add(1).max(1);
        let pending = Pending {
            request,
            asked,
            until: now.steady + PATIENCE,
            server: None,
            tried: Vec::new(),
        };
        self.pending.insert(id, pending);
        self.try_next(id);
    }

    /// Asks the next server that is there. Without one the request waits.
    fn try_next(&mut self, id: u32) {
        let registered = self.registered_servers();
        let arbiter = self.membership.ruleset().and_then(|r| r.arbiter);
        let Some(pending) = self.pending.get_mut(&id) else {
            return;
        };
        let can = |server: &&HostId| {
            let right = match pending.asked {
                Asked::Lease(..) => arbiter.is_some_and(|arbiter| arbiter.server == **server),
                Asked::Relay(relay, _) => relay == **server,
                Asked::Introduction(_) => true,
            };
            right && !pending.tried.contains(server)
        };
        pending.server = registered.iter().find(can).copied();
        let Some(server) = pending.server else {
            return;
        };
        pending.tried.push(server);
        let message = match pending.asked.clone() {
            Asked::Introduction(host) => ToServer::Introduce {
                request: id,
                target: Target::Id(host),
            },
            Asked::Relay(_, peer) => ToServer::OpenRelay { request: id, peer },
            Asked::Lease(mut lease, acquire) => {
                lease.request = id;
                match acquire {
                    true => ToServer::AcquireLease(lease),
                    false => ToServer::ReleaseLease(lease),
                }
            }
        };
        self.send(server, message);
    }

    /// A server is registered with: requests that wait for one go there.
    pub(super) fn ask_waiting(&mut self) {
        let waiting = self.pending.iter().filter(|(_, p)| p.server.is_none());
        let waiting: Vec<u32> = waiting.map(|(id, _)| *id).collect();
        waiting.into_iter().for_each(|id| self.try_next(id));
    }

    /// A server is gone: its requests go to others, or wait. A lease fails: its owner asks again.
    pub(super) fn try_others(&mut self, server: HostId) {
        let asked = self
            .pending
            .iter()
            .filter(|(_, p)| p.server == Some(server));
        let asked: Vec<u32> = asked.map(|(id, _)| *id).collect();
        for id in asked {
            let lease = |pending: &mut Pending| {
                pending.tried.retain(|tried| *tried != server);
                matches!(pending.asked, Asked::Lease(..)).then_some(pending.request)
            };
            match self.pending.get_mut(&id).and_then(lease) {
                Some(request) => {
                    self.pending.remove(&id);
                    self.failed(request, Failure::ArbiterUnreachable);
                }
                None => self.try_next(id),
            }
        }
    }

    pub(super) fn pending_due(&mut self, now: Now) {
        let late = self.pending.iter().filter(|(_, p)| p.until <= now.steady);
        let late: Vec<u32> = late.map(|(id, _)| *id).collect();
        for id in late {
            let Some(pending) = self.pending.remove(&id) else {
                continue;
            };
            let failure = match pending.server {
                Some(_) => Failure::TimedOut,
                None => Failure::NoServer,
            };
            self.failed(pending.request, failure);
        }
    }

    /// Takes the request that a server answers, if it was asked and the answer is of its kind.
    fn answered(
        &mut self,
        server: HostId,
        id: u32,
        fits: impl Fn(&Asked) -> bool,
    ) -> Option<Pending> {
        let pending = self.pending.get(&id)?;
        let right = pending.server == Some(server) && fits(&pending.asked);
        right.then(|| self.pending.remove(&id)).flatten()
    }

    pub(super) fn introduced(
        &mut self,
        now: Now,
        server: HostId,
        id: u32,
        peer: Peer,
        start_ms: u16,
    ) {
        if !self.is_member(now, server, peer.id) {
            return;
        }
        let is_it = |asked: &Asked| matches!(asked, Asked::Introduction(host) if *host == peer.id);
        let request = match id {
            0 => None,
            id => match self.answered(server, id, is_it) {
                Some(pending) => Some(pending.request),
                None => return,
            },
        };
        self.act(Action::Introduced {
            request,
            server,
            peer,
            start_ms,
        });
    }

    pub(super) fn relay_opened(
        &mut self,
        now: Now,
        server: HostId,
        id: u32,
        session: SessionId,
        peer: HostId,
        bytes_per_s: u64,
    ) {
        if !self.is_member(now, server, peer) {
            return self.send(server, ToServer::CloseRelay { session });
        }
        let is_it = |asked: &Asked| matches!(asked, Asked::Relay(_, host) if *host == peer);
        let request = match id {
            0 => None,
            id => match self.answered(server, id, is_it) {
                Some(pending) => Some(pending.request),
                None => return,
            },
        };
        self.act(Action::RelayOpened {
            request,
            server,
            session,
            peer,
            bytes_per_s,
        });
    }

    pub(super) fn lease_answered(&mut self, server: HostId, id: u32, answer: LeaseAnswer) {
        let is_it = |asked: &Asked| match (asked, answer) {
            (Asked::Lease(_, acquire), LeaseAnswer::Granted { .. }) => *acquire,
            (Asked::Lease(_, acquire), LeaseAnswer::Released) => !*acquire,
            (Asked::Lease(..), LeaseAnswer::Refused { .. }) => true,
            _ => false,
        };
        if let Some(pending) = self.answered(server, id, is_it) {
            self.act(Action::Lease(pending.request, answer));
        }
    }

    /// A refusal: the next server is asked, if there is one.
    pub(super) fn refused(&mut self, now: Now, server: HostId, refused: Refused) {
        if refused.request == 0 {
            return self.refused_here(now, server, refused);
        }
        let id = refused.request;
        let asked = |pending: &Pending| pending.server == Some(server);
        if !self.pending.get(&id).is_some_and(asked) {
            return;
        }
        self.try_next(id);
        let over = |pending: &Pending| pending.server.is_none();
        if self.pending.get(&id).is_some_and(over)
            && let Some(pending) = self.pending.remove(&id)
        {
            self.failed(pending.request, Failure::Refused(refused));
        }
    }
}
