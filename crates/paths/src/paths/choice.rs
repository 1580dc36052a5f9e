//! Which way is used: the best proved pair, or else the best relay.

use super::health::Health;
use super::pair::Pair;
use super::round::Phase;
use super::{Action, Paths};
use crate::local::{Leg, Local};
use crate::route::Route;
use crate::tuning::{SERVERS_MAX, Tuning};
use longhaul_protocol::HostId;
use std::time::Duration;

/// A server at which the other host is, or was, registered.
#[derive(Debug, Clone)]
pub(super) struct Relay {
    pub(super) server: HostId,
    pub(super) present: bool,
    pub(super) health: Health,
    /// When its datagrams were last found not to arrive, unless they did since.
    pub(super) failed_at: Option<Duration>,
}

impl Relay {
    fn due(&self, tuning: &Tuning) -> Duration {
        match self.failed_at {
            // It is used for want of another one: no haste.
            Some(at) => self.health.last_probe.unwrap_or(at) + tuning.pulse * 2,
            None => self.health.due(true, tuning),
        }
    }

    fn is_avoided(&self, tuning: &Tuning, now: Duration) -> bool {
        self.failed_at.is_some_and(|at| now < at + tuning.avoid)
    }
}

impl Paths {
    pub(super) fn relay_mut(&mut self, on: Route) -> Option<&mut Relay> {
        let Route::Relayed { server } = on else {
            return None;
        };
        self.relays.iter_mut().find(|relay| relay.server == server)
    }

    pub(super) fn present(&mut self, server: HostId, present: bool) {
        let room = self.relays.len() < SERVERS_MAX;
        let known = self.relays.iter_mut().find(|relay| relay.server == server);
        match known {
            Some(relay) if relay.present == present => {}
            Some(relay) => {
                relay.present = present;
                relay.failed_at = None;
                relay.health = Health::default();
            }
            None if present && room => self.relays.push(Relay {
                server,
                present,
                health: Health::default(),
                failed_at: None,
            }),
            None => {}
        }
    }

    pub(super) fn relay_due(&self, tuning: &Tuning) -> Option<Duration> {
        let used = self.used.filter(|used| !used.is_direct())?;
        let mut relays = self.relays.iter();
        let relay = relays.find(|relay| {
            Route::Relayed {
                server: relay.server,
            } == used
        })?;
        Some(relay.due(tuning))
    }

    pub(super) fn step_relays(&mut self, local: &mut Local, now: Duration) {
        let tuning = local.tuning();
        let Some(used) = self.used.filter(|used| !used.is_direct()) else {
            return;
        };
        if self.relay_due(tuning).is_none_or(|due| due > now) {
            return;
        }
        let dead = self
            .relay_mut(used)
            .is_some_and(|relay| relay.health.is_dead(local.tuning()) && relay.failed_at.is_none());
        if dead {
            self.relay_died(used, local, now);
        } else {
            self.send_probe(used, local, now);
        }
    }

    pub(super) fn relay_died(&mut self, route: Route, local: &mut Local, now: Duration) {
        if let Some(relay) = self.relay_mut(route) {
            relay.health.died();
            relay.health.last_probe = Some(now);
            relay.failed_at = Some(now);
            local.check(now);
        }
    }

    /// Returns whether a server that answers knows the other host.
    pub(crate) fn is_present(&self, local: &Local) -> bool {
        let mut present = self.relays.iter().filter(|relay| relay.present);
        present.any(|relay| local.can_introduce(relay.server))
    }

    /// Returns how a message to the other host can be sent.
    pub(super) fn signal_route(&self, local: &Local) -> Option<Route> {
        let servers = self.relays.iter().filter(|relay| relay.present);
        let servers = servers.map(|relay| relay.server);
        let best = servers
            .filter(|server| local.can_introduce(*server))
            .min_by_key(|server| rank(*server, local));
        let best = best.map(|server| Route::Relayed { server });
        best.or(self.used.filter(Route::is_direct))
    }

    /// Chooses the way that is used, and says so if it is another one.
    pub(super) fn choose(&mut self, local: &Local, now: Duration) {
        let tuning = local.tuning();
        self.recheck_at = None;
        let chosen = match self.best_pair(tuning, now) {
            Some(pair) => Some(pair.route()),
            None => self.best_relay(local, now),
        };
        if chosen == self.used {
            return;
        }
        self.used = chosen;
        self.switched_at = now;
        if let Some(route) = chosen
            && let Some(relay) = self.relay_mut(route)
        {
            // It was idle for long, perhaps: it is probed at once, and its silence is forgotten.
            relay.health.asked_for = Some(now);
            relay.health.unanswered = 0;
        }
        self.actions.push_back(Action::Use(chosen));
        if matches!(self.phase, Phase::Idle) {
            self.trim(tuning);
            if chosen.is_some_and(|route| !route.is_direct()) && self.next_round.is_none() {
                self.next_round = Some(now + tuning.gather * 3);
            }
        }
    }

    fn best_pair(&self, tuning: &Tuning, now: Duration) -> Option<&Pair> {
        let proved = || {
            self.pairs
                .iter()
                .filter(|pair| pair.health.is_proved(tuning))
        };
        let best = proved().min_by_key(|pair| (pair.health.is_silent(), pair.cost(tuning)))?;
        let used = self.used.and_then(|used| self.pairs.get(used));
        let Some(used) = used.filter(|used| used.health.is_proved(tuning)) else {
            return Some(best);
        };
        // The used one is silent, and another one is not: its NAT has another mapping, probably.
        let silent = used.health.is_silent();
        let fresher = best.health.last_ack > used.health.last_ack;
        if silent && best.health.unanswered == 0 && fresher {
            return Some(best);
        }
        let margin = i64::try_from(tuning.margin.as_micros()).unwrap_or(i64::MAX);
        let cost = used.cost(tuning);
        let better = best.cost(tuning) + margin.max(cost / 5) < cost;
        // In a round all pairs are found at once.
        let held = now < self.switched_at + tuning.hold && matches!(self.phase, Phase::Idle);
        Some(if better && !held && best.health.unanswered == 0 {
            best
        } else {
            used
        })
    }

    fn best_relay(&mut self, local: &Local, now: Duration) -> Option<Route> {
        let tuning = local.tuning();
        let present = self.relays.iter().filter(|relay| relay.present);
        let refused = present
            .clone()
            .filter_map(|relay| local.refused_until(relay.server));
        let recheck_at = refused.filter(|at| *at > now).min();
        let usable = present.filter(|relay| local.is_usable(relay.server, now));
        let key = |relay: &Relay| {
            let tcp = local.leg(relay.server) == Some(Leg::Tcp);
            (relay.is_avoided(tuning, now), tcp)
        };
        let best = usable
            .clone()
            .min_by_key(|relay| (key(relay), rank(relay.server, local)));
        let used = usable.clone().find(|relay| {
            self.used
                == Some(Route::Relayed {
                    server: relay.server,
                })
        });
        let chosen = match (best, used) {
            (Some(best), Some(used)) if key(used) <= key(best) => Some(used),
            (best, _) => best,
        };
        let chosen = chosen.map(|relay| Route::Relayed {
            server: relay.server,
        });
        self.recheck_at = recheck_at;
        chosen
    }

    /// Keeps the best standby pairs, and lets the others rest.
    pub(super) fn trim(&mut self, tuning: &Tuning) {
        let used = self.used;
        let standbys = self
            .pairs
            .iter_mut()
            .filter(|pair| pair.health.is_proved(tuning) && used != Some(pair.route()));
        let mut standbys = standbys.collect::<Vec<_>>();
        standbys.sort_by_key(|pair| pair.cost(tuning));
        for pair in standbys.into_iter().skip(tuning.standbys) {
            pair.health.died();
            pair.triggered = 0;
        }
    }
}

/// Servers are compared by their leg and round trip.
fn rank(server: HostId, local: &Local) -> (bool, Duration, HostId) {
    let tcp = local.leg(server) == Some(Leg::Tcp);
    let round_trip = local.round_trip(server).unwrap_or(Duration::MAX);
    (tcp, round_trip, server)
}
