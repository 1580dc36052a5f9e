//! The ways to one other host.

mod choice;
mod health;
mod pair;
mod probes;
mod round;
mod search;

use crate::candidate::Origin;
use crate::local::Local;
use crate::message::{Message, Offer};
use crate::random::Random;
use crate::reason::Obstacle;
use crate::route::{Route, SocketId};
use crate::tuning::{ACKS_BURST_MAX, ACKS_PER_SECOND_MAX};
use choice::Relay;
use longhaul_protocol::HostId;
use pair::Pairs;
use probes::Probes;
use round::Phase;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

/// Both hosts of a [`Paths`], and what this one may do.
#[derive(Debug, Clone)]
pub struct Config {
    /// This host.
    pub own: HostId,
    /// The other host.
    pub peer: HostId,
    /// Any number that is another one after each restart. It is no secret.
    pub seed: u64,
    /// Whether sockets may be opened, and ports probed, for a search.
    pub may_search: bool,
}

/// What happens to the paths of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The other host is registered at a server, or not any more.
    Present {
        /// The server.
        server: HostId,
        /// Whether it is registered there.
        present: bool,
    },
    /// The other host sent a message, through a server or over a direct path.
    Message(Message),
    /// An authentic probe of the other host arrived.
    Probe {
        /// Its id, which the acknowledgement repeats.
        id: u64,
        /// The way on which it came.
        on: Route,
    },
    /// An authentic acknowledgement arrived.
    Ack {
        /// The probe.
        id: u64,
        /// The way on which it came.
        on: Route,
        /// Where the other host sees this one.
        observed: Option<SocketAddr>,
    },
    /// These sockets are open, as asked for; none if they could not be opened.
    Sockets(Vec<SocketId>),
    /// The owner knows that a way is dead, for instance by an error of its socket.
    Dead(Route),
}

/// What has to be done for a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Send a message to the other host, through this server or over this path.
    Signal {
        /// The message.
        message: Message,
        /// The way.
        via: Route,
    },
    /// Send a probe.
    Probe {
        /// Its id.
        id: u64,
        /// The way.
        on: Route,
    },
    /// Acknowledge a probe, on the way on which it came.
    Ack {
        /// The probe.
        id: u64,
        /// The way.
        on: Route,
        /// Where it came from, if it was direct.
        observed: Option<SocketAddr>,
    },
    /// Send data on this way from now on; on none, wait.
    Use(Option<Route>),
    /// Open this number of UDP sockets; [`Event::Sockets`] has the result.
    OpenSockets {
        /// The number.
        count: u16,
    },
    /// Close these sockets.
    CloseSockets(Vec<SocketId>),
}

/// The ways to one other host.
#[derive(Debug, Clone)]
pub struct Paths {
    config: Config,
    random: Random,
    /// Identifies this value to the other host.
    instance: u64,
    /// The other host's instance, and its last offer.
    remote: Option<(u64, Offer)>,
    pairs: Pairs,
    relays: Vec<Relay>,
    probes: Probes,
    used: Option<Route>,
    switched_at: Duration,
    phase: Phase,
    /// The number of the last call of this host, and of the other one.
    round: u32,
    peer_round: Option<u32>,
    /// When a call of the other host last began a round.
    answered_at: Option<Duration>,
    next_round: Option<Duration>,
    /// A round is wanted, but no message can be sent.
    waits_for_server: bool,
    /// The generation of the offer that the other host has.
    told: u64,
    failures: u32,
    searches: u32,
    search_at: Duration,
    obstacle: Option<Obstacle>,
    /// Sockets of a search that are open.
    sockets: Vec<SocketId>,
    /// No probe may be sent before, since other peers were first.
    paced_until: Duration,
    /// When the next acknowledgement would be sent if they were spread evenly.
    next_ack_at: Duration,
    /// When a relay that refused may be tried again.
    recheck_at: Option<Duration>,
    actions: VecDeque<Action>,
}

impl Paths {
    /// Begins without any way. [`Event::Present`] follows for each server that knows the peer.
    pub fn new(config: Config) -> Self {
        let mut random = Random::new(config.seed);
        let instance = random.next();
        let probes = Probes::new(random.next());
        Self {
            config,
            random,
            instance,
            remote: None,
            pairs: Pairs::default(),
            relays: Vec::new(),
            probes,
            used: None,
            switched_at: Duration::ZERO,
            phase: Phase::Idle,
            round: 0,
            peer_round: None,
            answered_at: None,
            next_round: None,
            waits_for_server: true,
            told: 0,
            failures: 0,
            searches: 0,
            search_at: Duration::ZERO,
            obstacle: None,
            sockets: Vec::new(),
            paced_until: Duration::ZERO,
            next_ack_at: Duration::ZERO,
            recheck_at: None,
            actions: VecDeque::new(),
        }
    }

    /// Takes the next action.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns when [`Self::handle_timeout`] is due.
    pub fn poll_timeout(&self, local: &Local) -> Option<Duration> {
        let tuning = local.tuning();
        let pairs = self.pairs.iter().filter_map(|pair| {
            let due = pair.due(self.used, tuning)?;
            let proved = pair.health.is_proved(tuning);
            Some(if proved {
                due
            } else {
                due.max(self.paced_until)
            })
        });
        let times = [
            pairs.min(),
            self.relay_due(tuning),
            self.phase_due(tuning),
            self.next_round,
            self.recheck_at,
        ];
        times.into_iter().flatten().min()
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, local: &mut Local, now: Duration) {
        self.step_phase(local, now);
        self.step_pairs(local, now);
        self.step_relays(local, now);
        self.choose(local, now);
        if self.next_round.is_some_and(|at| at <= now) {
            self.next_round = None;
            self.call(local, now);
        }
    }

    /// Takes an input.
    pub fn handle(&mut self, event: Event, local: &mut Local, now: Duration) {
        match event {
            Event::Present { server, present } => self.present(server, present),
            Event::Message(message) => self.message(message, local, now),
            Event::Probe { id, on } => self.probe(id, on, local, now),
            Event::Ack { id, on, observed } => self.ack(id, on, observed, local, now),
            Event::Sockets(sockets) => self.opened(sockets, now),
            Event::Dead(route) => self.dead(route, local, now),
        }
        self.refresh(local, now);
    }

    /// Ends the paths to a peer that is not wanted any more: sockets are to be closed.
    pub fn close(&mut self, local: &mut Local, now: Duration) {
        self.end_search(local, now);
        self.close_sockets(|_| true);
    }

    /// Takes notice of what has changed in `local`.
    pub fn refresh(&mut self, local: &mut Local, now: Duration) {
        let soon = now + local.tuning().gather;
        let news = self.told != local.generation() && self.remote.is_some();
        if news && matches!(self.phase, Phase::Idle) && self.next_round.is_none_or(|at| at > soon) {
            self.next_round = Some(soon);
            self.failures = 0;
        }
        if self.waits_for_server && self.signal_route(local).is_some() {
            self.waits_for_server = false;
            self.next_round = Some(soon);
        }
        self.handle_timeout(local, now);
    }

    /// Notes that data was sent on a way. Cheap; once for a batch is sufficient.
    pub fn sent(&mut self, on: Route, now: Duration) {
        if let Some(pair) = self.pairs.get_mut(on) {
            pair.health.sent(now);
        } else if let Some(relay) = self.relay_mut(on) {
            relay.health.sent(now);
        }
    }

    /// Notes that authentic data was received on a way. Cheap; once for a batch is sufficient.
    pub fn received(&mut self, on: Route, local: &Local, now: Duration) {
        self.heard(on, local, now);
        if on.is_direct() {
            return;
        }
        // The other host does not use the direct path that this one uses.
        let doubt = local.tuning().suspect_after;
        if let Some(used) = self.used.filter(Route::is_direct)
            && let Some(pair) = self.pairs.get_mut(used)
            && pair.health.unanswered == 0
            && pair.health.last_received + doubt <= now
        {
            pair.health.asked_for = Some(now);
        }
    }

    /// Returns the way that is used.
    pub fn used(&self) -> Option<Route> {
        self.used
    }

    /// Returns the smoothed round trip on a way.
    pub fn round_trip(&self, on: Route) -> Option<Duration> {
        match on {
            Route::Direct { .. } => self.pairs.get(on).and_then(|pair| pair.health.round_trip),
            Route::Relayed { server } => {
                let relay = self.relays.iter().find(|relay| relay.server == server);
                relay.and_then(|relay| relay.health.round_trip)
            }
        }
    }

    /// Returns the number of known address pairs.
    pub fn pairs(&self) -> usize {
        self.pairs.len()
    }

    /// Returns the number of probes that wait for an acknowledgement.
    pub fn outstanding(&self) -> usize {
        self.probes.len()
    }

    /// Returns the sockets that are open for this peer.
    pub fn sockets(&self) -> &[SocketId] {
        &self.sockets
    }

    // Probes and acknowledgements.

    /// Notes an authentic datagram. A new address becomes a pair, which is probed.
    fn heard(&mut self, on: Route, local: &Local, now: Duration) {
        let tuning = local.tuning();
        match on {
            Route::Direct { socket, address } => {
                if socket != SocketId::MAIN && !self.sockets.contains(&socket) {
                    return;
                }
                if self.pairs.get(on).is_none() {
                    self.pairs
                        .add(socket, address, Origin::PeerReflexive, tuning);
                }
                let proved = self
                    .pairs
                    .iter()
                    .filter(|pair| pair.health.is_proved(tuning));
                let full = proved.count() > tuning.standbys;
                let used = self.used.and_then(|used| self.pairs.get(used));
                let content = used.is_some_and(|pair| pair.health.unanswered == 0);
                let Some(pair) = self.pairs.get_mut(on) else {
                    return;
                };
                pair.health.received(now);
                if pair.health.is_proved(tuning) || full && content {
                    return;
                }
                let last = pair.health.last_probe;
                if last.is_none_or(|at| at + tuning.triggered_gap <= now) {
                    pair.health.asked_for.get_or_insert(now);
                }
                pair.triggered = tuning.triggered_tries;
            }
            Route::Relayed { .. } => {
                if let Some(relay) = self.relay_mut(on) {
                    relay.health.received(now);
                }
            }
        }
    }

    fn probe(&mut self, id: u64, on: Route, local: &Local, now: Duration) {
        // The generic cell rate algorithm, with a burst.
        let gap = Duration::from_secs(1) / ACKS_PER_SECOND_MAX;
        if self.next_ack_at > now + gap * ACKS_BURST_MAX {
            return;
        }
        self.next_ack_at = self.next_ack_at.max(now) + gap;
        let observed = match on {
            Route::Direct { address, .. } => Some(address),
            Route::Relayed { .. } => None,
        };
        self.actions.push_back(Action::Ack { id, on, observed });
        self.heard(on, local, now);
        if let Some(pair) = self.pairs.get_mut(on) {
            pair.health.acknowledged(now);
        } else if let Some(relay) = self.relay_mut(on) {
            relay.health.acknowledged(now);
        }
    }

    fn ack(
        &mut self,
        id: u64,
        on: Route,
        observed: Option<SocketAddr>,
        local: &mut Local,
        now: Duration,
    ) {
        let lifetime = local.tuning().probe_lifetime;
        let Some(sent_at) = self.probes.acked(id, on, now, lifetime) else {
            return;
        };
        match on {
            Route::Relayed { .. } => {
                if let Some(relay) = self.relay_mut(on) {
                    relay.health.acked(sent_at, now);
                    relay.failed_at = None;
                }
            }
            Route::Direct { socket, address } => {
                // A probe of a search has no pair until it is acknowledged.
                self.pairs
                    .add(socket, address, Origin::PeerReflexive, local.tuning());
                let Some(pair) = self.pairs.get_mut(on) else {
                    return;
                };
                pair.health.acked(sent_at, now);
                if !pair.health.is_proved(local.tuning()) {
                    pair.health.asked_for = Some(now);
                    pair.triggered = local.tuning().triggered_tries;
                }
                let moved = pair.observed.is_some() && pair.observed != observed;
                pair.observed = observed;
                if moved && socket == SocketId::MAIN {
                    local.check(now);
                }
            }
        }
    }

    fn send_probe(&mut self, on: Route, local: &Local, now: Duration) {
        let id = self.probes.sent(on, now, local.tuning().probe_lifetime);
        self.actions.push_back(Action::Probe { id, on });
        if let Some(pair) = self.pairs.get_mut(on) {
            pair.health.probed(now);
            pair.triggered = pair.triggered.saturating_sub(1);
        } else if let Some(relay) = self.relay_mut(on) {
            relay.health.probed(now);
        }
    }

    /// Probes the pairs whose time has come, and buries those that do not answer.
    fn step_pairs(&mut self, local: &mut Local, now: Duration) {
        let used = self.used;
        let tuning = local.tuning();
        let due = self.pairs.iter().filter_map(|pair| {
            let due = pair.due(used, tuning).is_some_and(|at| at <= now);
            due.then(|| (pair.route(), pair.health.is_proved(tuning)))
        });
        for (route, proved) in due.collect::<Vec<_>>() {
            let dead = |pair: &pair::Pair| pair.health.is_dead(local.tuning());
            if proved && self.pairs.get(route).is_some_and(dead) {
                self.dead(route, local, now);
                continue;
            }
            // What carries data is not delayed by rounds of other peers.
            if !proved && let Err(at) = local.take_turn(now) {
                self.paced_until = at;
                continue;
            }
            self.send_probe(route, local, now);
        }
    }

    /// A way does not work any more.
    fn dead(&mut self, route: Route, local: &mut Local, now: Duration) {
        if !route.is_direct() {
            return self.relay_died(route, local, now);
        }
        let Some(pair) = self.pairs.get_mut(route) else {
            return;
        };
        pair.health.died();
        pair.triggered = 0;
        if self.used == Some(route) {
            // Perhaps the NAT has new mappings: the servers are asked before the next call.
            local.check(now);
            self.obstacle = Some(Obstacle::Died);
            self.failures = 0;
            if matches!(self.phase, Phase::Idle) {
                self.next_round = Some(now + local.tuning().gather * 3);
            }
        }
    }

    /// Closes sockets of a search on which nothing works.
    fn close_idle_sockets(&mut self, local: &Local) {
        let proved = self
            .pairs
            .iter()
            .filter(|pair| pair.health.is_proved(local.tuning()));
        let kept = proved.map(|pair| pair.socket).collect::<Vec<_>>();
        self.close_sockets(|socket| !kept.contains(&socket));
    }

    /// Closes sockets of a search, with their pairs.
    fn close_sockets(&mut self, mut which: impl FnMut(SocketId) -> bool) {
        let closing = |socket: &SocketId| which(*socket);
        let (closed, open): (Vec<_>, Vec<_>) = self.sockets.drain(..).partition(closing);
        self.sockets = open;
        if !closed.is_empty() {
            self.pairs.retain(|pair| !closed.contains(&pair.socket));
            self.actions.push_back(Action::CloseSockets(closed));
        }
    }
}
