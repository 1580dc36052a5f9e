//! Connections to servers: dialled, registered, refreshed, retried.

use super::{Action, Member, Notice};
use crate::Now;
use crate::enrolment::VerifiedEnrolment;
use crate::protocol::{Refused, RefusedCode, Register, ToServer};
use crate::ruleset::ServerEntry;
use longhaul_protocol::HostId;
use std::time::Duration;

/// The first wait after a failure, on average. It doubles with each one.
const BACKOFF: Duration = Duration::from_millis(500);
/// The longest wait, on average.
const BACKOFF_MAX: Duration = Duration::from_secs(60);
/// A connection without an answer to the registration ends after this time.
const ANSWER: Duration = Duration::from_secs(10);
/// A host that is refused as a stranger gives its ruleset, and asks again after this time.
const AGAIN: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// To be dialled at this time.
    Down(Duration),
    /// The owner dials.
    Dialling,
    /// Connected, and no answer yet: given up at this time.
    Up(Duration),
    /// Connected, to register again at this time.
    Refused(Duration),
    /// Registered, to be refreshed at this time.
    Registered(Duration),
}

/// A server.
#[derive(Debug)]
pub(super) struct Link {
    entry: ServerEntry,
    state: State,
    pub(super) failures: u32,
    pub(super) version: u64,
    /// Whether this host has given its ruleset on this connection.
    gave: bool,
    /// The refusal that was reported last, since the link was registered.
    reported: Option<Refused>,
}

impl Link {
    pub(super) fn due(&self) -> Option<Duration> {
        match self.state {
            State::Dialling => None,
            State::Down(at) | State::Up(at) | State::Refused(at) | State::Registered(at) => {
                Some(at)
            }
        }
    }

    pub(super) fn is_up(&self) -> bool {
        !matches!(self.state, State::Down(_) | State::Dialling)
    }

    pub(super) fn is_registered(&self) -> bool {
        matches!(self.state, State::Registered(_))
    }
}

impl Member {
    /// Keeps a link to each server of the ruleset, or of the token.
    pub(super) fn follow_servers(&mut self, now: Now) {
        let named = self.membership.ruleset().map(|ruleset| &ruleset.servers);
        let servers = match named {
            Some(servers) if !servers.is_empty() => servers.clone(),
            _ => self.config.servers.clone(),
        };
        let old: Vec<HostId> = self.links.keys().copied().collect();
        for id in old {
            if servers.iter().all(|server| server.id != id) {
                self.links.remove(&id);
                self.act(Action::Disconnect(id));
            }
        }
        for entry in servers {
            let new = || Link {
                entry: entry.clone(),
                state: State::Down(now.steady),
                failures: 0,
                version: 0,
                gave: false,
                reported: None,
            };
            let link = self.links.entry(entry.id).or_insert_with(new);
            link.entry = entry;
        }
    }

    pub(super) fn links_due(&mut self, now: Now) {
        let due = |link: &Link| link.due().is_some_and(|at| at <= now.steady);
        let due = self.links.iter().filter(|(_, link)| due(link));
        let due: Vec<(HostId, State)> = due.map(|(id, link)| (*id, link.state)).collect();
        for (server, state) in due {
            match state {
                State::Down(_) => {
                    if let Some(link) = self.links.get_mut(&server) {
                        link.state = State::Dialling;
                        let entry = link.entry.clone();
                        self.act(Action::Connect(entry));
                    }
                }
                State::Up(_) => {
                    self.act(Action::Disconnect(server));
                    self.disconnected(now, server);
                }
                State::Refused(_) | State::Registered(_) => self.register(now, server),
                State::Dialling => {}
            }
        }
    }

    pub(super) fn connected(&mut self, now: Now, server: HostId) {
        let Some(link) = self.links.get_mut(&server) else {
            return self.act(Action::Disconnect(server));
        };
        link.state = State::Up(now.steady + ANSWER);
        link.gave = false;
        let own = self.config.host;
        let ruleset = self.membership.ruleset();
        let listed = ruleset.is_some_and(|ruleset| ruleset.host(own).is_some());
        let of_own = |enrolment: &&VerifiedEnrolment| enrolment.host() == own;
        let enrolment = self.membership.enrolments().find(of_own);
        match enrolment.map(|enrolment| enrolment.enrolment().clone()) {
            Some(enrolment) if !listed => self.send(server, ToServer::Join(Box::new(enrolment))),
            _ => self.register(now, server),
        }
    }

    pub(super) fn disconnected(&mut self, now: Now, server: HostId) {
        let jitter = self.random.next_u64() % 1024;
        let live = |link: &&mut Link| !matches!(link.state, State::Down(_));
        let Some(link) = self.links.get_mut(&server).filter(live) else {
            return;
        };
        let wait = BACKOFF
            .saturating_mul(1 << link.failures.min(8))
            .min(BACKOFF_MAX);
        // From half to one and a half of it, so that hosts do not come back all at once.
        let wait = wait / 2 + wait * u32::try_from(jitter).unwrap_or(0) / 1024;
        link.failures = link.failures.saturating_add(1);
        link.state = State::Down(now.steady + wait);
        self.try_others(server);
    }

    /// Registers at a server, or again.
    pub(super) fn register(&mut self, now: Now, server: HostId) {
        let have = self.have();
        let register = Register {
            realm: have.realm,
            ttl_s: self.config.ttl_s,
            candidates: self.candidates.clone(),
            networks: self.networks.clone(),
            version: have.version,
            enrolments: have.enrolments,
        };
        if let Some(link) = self.links.get_mut(&server) {
            // A registered link stays in use while it is refreshed.
            link.state = match link.state {
                State::Registered(_) => State::Registered(now.steady + ANSWER),
                _ => State::Up(now.steady + ANSWER),
            };
            self.send(server, ToServer::Register(register));
        }
    }

    pub(super) fn is_registered(&mut self, now: Now, server: HostId, ttl_s: u16, version: u64) {
        let jitter = Duration::from_millis(self.random.next_u64() % 1000);
        let Some(link) = self.links.get_mut(&server) else {
            return;
        };
        let refresh = (Duration::from_secs(ttl_s.into()) / 3).max(Duration::from_secs(2));
        link.failures = 0;
        link.reported = None;
        link.version = version;
        link.state = State::Registered(now.steady + refresh + jitter);
        self.give_ruleset(server);
        self.ask_waiting();
    }

    /// Gives a server the ruleset if it has an older one.
    pub(super) fn give_ruleset(&mut self, server: HostId) {
        let ours = self.membership.verified().map(|r| r.signed().clone());
        let version = self.membership.version();
        let Some(link) = self.links.get_mut(&server) else {
            return;
        };
        if let Some(ruleset) = ours
            && link.is_up()
            && link.version < version
        {
            link.version = version;
            self.send(server, ToServer::Ruleset(ruleset));
        }
    }

    /// A refusal that is no answer to a request.
    pub(super) fn refused_here(&mut self, now: Now, server: HostId, refused: Refused) {
        let Some(link) = self.links.get_mut(&server) else {
            return;
        };
        let stranger = refused.code == RefusedCode::NotAMember;
        if stranger {
            link.state = State::Refused(now.steady + AGAIN);
        }
        if stranger && !link.gave {
            // The server may have an older ruleset.
            link.gave = true;
            link.version = 0;
            self.give_ruleset(server);
        } else if link.reported.as_ref() != Some(&refused) {
            link.reported = Some(refused.clone());
            self.notice(Notice::Refused(server, refused));
        }
    }

    pub(super) fn send(&mut self, server: HostId, message: ToServer) {
        if self.links.get(&server).is_some_and(Link::is_up) {
            self.act(Action::Send(server, message));
        }
    }

    pub(super) fn registered_servers(&self) -> Vec<HostId> {
        let registered = self.links.iter().filter(|(_, link)| link.is_registered());
        registered.map(|(server, _)| *server).collect()
    }

    pub(super) fn tell_servers(&mut self, message: &ToServer) {
        for server in self.registered_servers() {
            self.send(server, message.clone());
        }
    }
}
