//! Rounds: both hosts agree through a server to begin at once, and probe each other's candidates.

use super::search::Search;
use super::{Action, Paths};
use crate::candidate::{self, Origin, is_private};
use crate::local::Local;
use crate::message::{Kind, Message, Offer, Plan};
use crate::reason::Obstacle;
use crate::route::{Route, SocketId};
use crate::tuning::Tuning;
use std::net::SocketAddr;
use std::time::Duration;

/// Pairs that a probe has revealed are forgotten after this silence, at the next round.
const REVEALED_FOR: Duration = Duration::from_secs(30);
/// Least time between two rounds that the other host begins.
const CALLS_APART: Duration = Duration::from_secs(1);
/// The longest time until the start that an answer may name.
const START_MAX: Duration = Duration::from_secs(2);

/// What this host does to find a direct path.
#[derive(Debug, Clone)]
pub(super) enum Phase {
    /// Nothing.
    Idle,
    /// It has called, and waits for the answer.
    Calling {
        plan: Plan,
        calls: u32,
        again_at: Duration,
    },
    /// Both agree, and it begins soon.
    Waiting { plan: Plan, start_at: Duration },
    /// It probes the other host's candidates.
    Punching(Punch),
    /// The birthday search.
    Searching(Search),
}

/// The probes of a round.
#[derive(Debug, Clone)]
pub(super) struct Punch {
    started: Duration,
    /// The pairs in the order of their probes.
    list: Vec<Route>,
    sweep: u32,
    cursor: usize,
    next_at: Duration,
    /// When the first pair was proved.
    proved_at: Option<Duration>,
}

impl Punch {
    /// Returns when a sweep begins. The gaps grow.
    fn sweep_at(&self, sweep: u32, tuning: &Tuning) -> Duration {
        self.started + tuning.sweep_gap * (sweep * (sweep + 1) / 2)
    }

    fn due(&self, tuning: &Tuning) -> Duration {
        let settled = self.proved_at.map(|at| at + tuning.settle);
        settled.unwrap_or(self.next_at).min(self.next_at)
    }
}

impl Paths {
    pub(super) fn phase_due(&self, tuning: &Tuning) -> Option<Duration> {
        match &self.phase {
            Phase::Idle => None,
            Phase::Calling { again_at, .. } => Some(*again_at),
            Phase::Waiting { start_at, .. } => Some(*start_at),
            Phase::Punching(punch) => Some(punch.due(tuning)),
            Phase::Searching(search) => Some(search.due(tuning)),
        }
    }

    pub(super) fn step_phase(&mut self, local: &mut Local, now: Duration) {
        if self.phase_due(local.tuning()).is_none_or(|due| due > now) {
            return;
        }
        match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Idle => {}
            Phase::Calling { plan, calls, .. } => {
                if calls >= local.tuning().calls {
                    self.ended(Some(Obstacle::NoAnswer), local, now);
                } else {
                    self.send_call(plan, calls + 1, local, now);
                }
            }
            Phase::Waiting { plan, .. } => self.start(plan, local, now),
            Phase::Punching(punch) => self.step_punch(punch, local, now),
            Phase::Searching(search) => self.step_search(search, local, now),
        }
    }

    /// Calls the other host to a round.
    pub(super) fn call(&mut self, local: &mut Local, now: Duration) {
        if !matches!(self.phase, Phase::Idle) {
            return;
        }
        if self.told != local.generation() {
            self.failures = 0;
        }
        let search = self.failures > 0 && self.search_at <= now && self.search_is_due(local);
        let plan = if search { Plan::Search } else { Plan::Punch };
        self.round = self.round.wrapping_add(1);
        self.send_call(plan, 1, local, now);
    }

    fn send_call(&mut self, plan: Plan, calls: u32, local: &mut Local, now: Duration) {
        let Some(via) = self.signal_route(local) else {
            self.waits_for_server = true;
            return;
        };
        self.signal(Kind::Call, self.round, plan, via, local);
        let round_trip = match via {
            Route::Relayed { server } => local.round_trip(server),
            Route::Direct { .. } => self.round_trip(via),
        };
        let patience = round_trip.unwrap_or_default() * 4;
        self.phase = Phase::Calling {
            plan,
            calls,
            again_at: now + patience.max(local.tuning().call_timeout),
        };
    }

    fn signal(&mut self, kind: Kind, round: u32, plan: Plan, via: Route, local: &Local) {
        let round_trip = match via {
            Route::Relayed { server } => local.round_trip(server),
            Route::Direct { .. } => self.round_trip(via).map(|round_trip| round_trip / 2),
        };
        self.told = local.generation();
        let message = Message {
            kind,
            instance: self.instance,
            round,
            plan,
            round_trip: round_trip.unwrap_or_default(),
            offer: local.offer().clone(),
        };
        self.actions.push_back(Action::Signal { message, via });
    }

    /// Takes a message of the other host.
    pub(super) fn message(&mut self, message: Message, local: &mut Local, now: Duration) {
        let restarted = self
            .remote
            .as_ref()
            .is_some_and(|(instance, _)| *instance != message.instance);
        if restarted {
            self.forget_peer(local, now);
        }
        let mut candidates = message.offer.candidates.clone();
        candidates.retain(|candidate| candidate.origin != Origin::PeerReflexive);
        let offer = Offer {
            candidates: candidate::ordered(candidates),
            ..message.offer
        };
        let news = self
            .remote
            .as_ref()
            .is_none_or(|(_, known)| *known != offer);
        if news {
            self.failures = 0;
            self.searches = 0;
            self.search_at = Duration::ZERO;
        }
        self.remote = Some((message.instance, offer));
        match message.kind {
            Kind::Call => self.called(message.round, message.plan, message.round_trip, local, now),
            Kind::Answer { start_in: _ } => {
                if matches!(self.phase, Phase::Calling { .. }) && message.round == self.round {
                    self.phase = Phase::Waiting {
                        plan: message.plan,
                        start_at: now,
                    };
                }
            }
        }
    }

    /// The other host has restarted: nothing of its paths is valid.
    fn forget_peer(&mut self, local: &mut Local, now: Duration) {
        self.end_search(local, now);
        self.close_sockets(|_| true);
        self.pairs.clear();
        self.probes.clear();
        self.peer_round = None;
        self.failures = 0;
        if !matches!(self.phase, Phase::Calling { .. }) {
            self.phase = Phase::Idle;
        }
    }

    fn called(
        &mut self,
        round: u32,
        plan: Plan,
        round_trip: Duration,
        local: &mut Local,
        now: Duration,
    ) {
        // Of two calls at once, that of the lower host counts; it answers to neither.
        let calls = matches!(self.phase, Phase::Calling { .. });
        if calls && self.config.own < self.config.peer {
            return;
        }
        let Some(via) = self.signal_route(local) else {
            return;
        };
        let (plan, start_in) = match &self.phase {
            // Its call was repeated, since the answer was lost or late.
            Phase::Waiting { plan, start_at } if self.peer_round == Some(round) => {
                (*plan, start_at.saturating_sub(now))
            }
            Phase::Punching(_) if self.peer_round == Some(round) => (Plan::Punch, Duration::ZERO),
            Phase::Searching(_) if self.peer_round == Some(round) => (Plan::Search, Duration::ZERO),
            // A host that calls all the time is not followed; an honest one calls again.
            _ if self.answered_at.is_some_and(|at| now < at + CALLS_APART) => return,
            _ => {
                self.answered_at = Some(now);
                self.end_search(local, now);
                let agreed = match plan {
                    Plan::Search if self.search_is_due(local) => Plan::Search,
                    _ => Plan::Punch,
                };
                let own = match via {
                    Route::Relayed { server } => local.round_trip(server),
                    Route::Direct { .. } => self.round_trip(via).map(|time| time / 2),
                };
                let start_in = (own.unwrap_or_default() + round_trip) / 2;
                let start_in = start_in.min(START_MAX);
                self.phase = Phase::Waiting {
                    plan: agreed,
                    start_at: now + start_in,
                };
                self.peer_round = Some(round);
                self.next_round = None;
                (agreed, start_in)
            }
        };
        self.signal(Kind::Answer { start_in }, round, plan, via, local);
    }

    fn start(&mut self, plan: Plan, local: &mut Local, now: Duration) {
        self.next_round = None;
        let Some((_, offer)) = &self.remote else {
            return self.ended(Some(Obstacle::NotTried), local, now);
        };
        let addresses = offer.candidates.clone();
        let tuning = local.tuning().clone();
        self.pairs.retain(|pair| {
            let offered = addresses.iter().any(|known| known.address == pair.address);
            let lately = pair.health.last_received + REVEALED_FOR > now;
            pair.health.is_proved(&tuning) || offered || pair.health.acks > 0 || lately
        });
        // One that had only begun to work is probed from the start.
        let unproved = self.pairs.iter_mut();
        for pair in unproved.filter(|pair| !pair.health.is_proved(&tuning)) {
            pair.health.acks = 0;
        }
        for candidate in addresses {
            if local.has_family_of(candidate.address) {
                let (address, origin) = (candidate.address, candidate.origin);
                self.pairs.add(SocketId::MAIN, address, origin, &tuning);
            }
        }
        if plan == Plan::Search && self.start_search(local, now) {
            return;
        }
        let same_site = self.is_same_site(local);
        let mut list = self
            .pairs
            .iter()
            .map(|pair| {
                let last = !same_site && is_private(pair.address.ip());
                let predicted = pair.origin == Origin::Predicted;
                let preference = std::cmp::Reverse(pair.origin.preference());
                (
                    (last, predicted, pair.address.is_ipv4(), preference),
                    pair.route(),
                )
            })
            .collect::<Vec<_>>();
        list.sort();
        self.phase = Phase::Punching(Punch {
            started: now,
            list: list.into_iter().map(|(_, route)| route).collect(),
            sweep: 0,
            cursor: 0,
            next_at: now,
            proved_at: None,
        });
        self.step_phase(local, now);
    }

    /// Both hosts are seen under one public address: their private addresses come first.
    pub(super) fn is_same_site(&self, local: &Local) -> bool {
        let public = |offer: &Offer| {
            let reflexive = offer.candidates.iter().filter(|candidate| {
                candidate.origin == Origin::Reflexive && candidate.address.is_ipv4()
            });
            reflexive
                .map(|candidate| candidate.address.ip())
                .collect::<Vec<_>>()
        };
        let Some((_, offer)) = &self.remote else {
            return false;
        };
        let theirs = public(offer);
        public(local.offer()).iter().any(|own| theirs.contains(own))
    }

    fn step_punch(&mut self, mut punch: Punch, local: &mut Local, now: Duration) {
        let tuning = local.tuning().clone();
        let proved = |pair: &super::pair::Pair| pair.health.is_proved(&tuning);
        if punch.proved_at.is_none() && self.pairs.iter().any(proved) {
            punch.proved_at = Some(now);
        }
        let settled = punch.proved_at.is_some_and(|at| at + tuning.settle <= now);
        if settled || punch.sweep >= tuning.sweeps || punch.list.is_empty() {
            let success = self.pairs.iter().any(proved);
            let obstacle = (!success).then_some(Obstacle::NotPunched);
            return self.ended(obstacle, local, now);
        }
        // Pairs that were probed before, or work, are not probed again in this sweep.
        let mut next = None;
        while next.is_none() && punch.cursor < punch.list.len() {
            let route = punch.list[punch.cursor];
            match self.pairs.get(route) {
                Some(pair) if pair.health.acks == 0 => next = Some(route),
                _ => punch.cursor += 1,
            }
        }
        if let Some(route) = next {
            match local.take_turn(now) {
                Ok(()) => {
                    self.send_probe(route, local, now);
                    punch.cursor += 1;
                    punch.next_at = now + tuning.pace;
                }
                Err(at) => punch.next_at = at,
            }
        }
        if punch.cursor >= punch.list.len() {
            punch.sweep += 1;
            punch.cursor = 0;
            punch.next_at = punch.sweep_at(punch.sweep, &tuning).max(now + tuning.pace);
        }
        self.phase = Phase::Punching(punch);
    }

    /// A round is over; without a direct path, because of this.
    pub(super) fn ended(&mut self, obstacle: Option<Obstacle>, local: &Local, now: Duration) {
        let tuning = local.tuning();
        self.phase = Phase::Idle;
        self.choose(local, now);
        self.trim(tuning);
        // A socket whose path died is kept for one round: perhaps the path lives for the peer.
        self.close_idle_sockets(local);
        self.obstacle = obstacle.map(|obstacle| self.obstacle_of(local).unwrap_or(obstacle));
        if obstacle.is_none() {
            self.failures = 0;
            self.searches = 0;
            self.next_round = None;
        } else {
            let mut wait = self.backoff(tuning, local);
            // A search was due, and one of both hosts is searching for another one.
            if self.failures > 0 && self.search_at <= now && self.search_would_help(local) {
                wait = wait.min(self.random.about(tuning.search_turn));
            }
            self.next_round = Some(now + wait);
            self.failures = self.failures.saturating_add(1);
        }
        if self.told != local.generation() {
            self.next_round = Some(now + tuning.gather);
        }
    }

    fn backoff(&mut self, tuning: &Tuning, local: &Local) -> Duration {
        let hopeless = self
            .obstacle_of(local)
            .is_some_and(|obstacle| obstacle.is_lasting());
        let max = match hopeless {
            true => tuning.hopeless_retry_max,
            false => tuning.retry_max,
        };
        let doubled = tuning.retry * 2_u32.pow(self.failures.min(16));
        let mut time = doubled.min(max);
        if self.config.own > self.config.peer {
            // One of both calls first, mostly.
            time = time * 3 / 2;
        }
        self.random.about(time)
    }

    /// Returns what prevents a direct path now.
    pub(crate) fn obstacle(&self, local: &Local) -> Obstacle {
        match &self.phase {
            _ if self.obstacle.is_some_and(Obstacle::is_lasting) => {}
            Phase::Searching(_) => return Obstacle::Searching,
            Phase::Waiting { .. } | Phase::Punching(_) => return Obstacle::Trying,
            Phase::Idle | Phase::Calling { .. } => {}
        }
        let tried = self.obstacle_of(local).or(self.obstacle);
        tried.unwrap_or(Obstacle::NotTried)
    }

    /// Returns what prevents a direct path, as both offers show it.
    pub(super) fn obstacle_of(&self, local: &Local) -> Option<Obstacle> {
        let (_, remote) = self.remote.as_ref()?;
        let own = local.offer();
        if own.udp_blocked {
            return Some(Obstacle::UdpBlockedHere);
        }
        if remote.udp_blocked {
            return Some(Obstacle::UdpBlockedThere);
        }
        let has = |offer: &Offer, ipv4: bool| {
            let mut addresses = offer.candidates.iter().map(|candidate| candidate.address);
            addresses.any(|address: SocketAddr| address.is_ipv4() == ipv4)
        };
        let both = |ipv4| has(own, ipv4) && has(remote, ipv4);
        if !both(true) && !both(false) {
            return Some(Obstacle::NoCommonFamily);
        }
        if !both(false) && self.is_same_site(local) {
            return Some(Obstacle::NoHairpin);
        }
        if both(false) || !own.mapping.is_dependent() || !remote.mapping.is_dependent() {
            return None;
        }
        Some(Obstacle::BothDependent)
    }
}
