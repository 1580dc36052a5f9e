//! Address pairs of one peer: one of its addresses, and a socket of this host.

use super::health::Health;
use crate::candidate::{Origin, is_private};
use crate::route::{Route, SocketId};
use crate::tuning::{PAIRS_MAX, Tuning};
use std::net::SocketAddr;
use std::time::Duration;

/// A socket, and an address of the other host.
#[derive(Debug, Clone)]
pub(super) struct Pair {
    pub(super) socket: SocketId,
    pub(super) address: SocketAddr,
    pub(super) origin: Origin,
    pub(super) health: Health,
    /// Probes that are still sent because the other host's probe has revealed this pair.
    pub(super) triggered: u8,
    /// Where its acknowledgements see this host.
    pub(super) observed: Option<SocketAddr>,
}

impl Pair {
    pub(super) fn route(&self) -> Route {
        Route::Direct {
            socket: self.socket,
            address: self.address,
        }
    }

    pub(super) fn is_local(&self) -> bool {
        self.origin == Origin::Host && is_private(self.address.ip())
    }

    /// The latency by which pairs are compared, in microseconds; what is preferred counts less.
    pub(super) fn cost(&self, tuning: &Tuning) -> i64 {
        let micros = |time: Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX / 4);
        let mut cost = micros(self.health.round_trip.unwrap_or(tuning.probe_lifetime));
        if self.is_local() {
            cost -= micros(tuning.bonus_local);
        }
        if self.address.is_ipv6() {
            cost -= micros(tuning.bonus_ipv6);
        }
        cost
    }

    /// Returns when it has to be probed next outside of rounds.
    pub(super) fn due(&self, used: Option<Route>, tuning: &Tuning) -> Option<Duration> {
        if self.health.is_proved(tuning) {
            return Some(self.health.due(used == Some(self.route()), tuning));
        }
        if let Some(at) = self.health.asked_for {
            return Some(at);
        }
        let last = self.health.last_probe.unwrap_or_default();
        (self.triggered > 0).then(|| last + tuning.triggered_gap)
    }
}

/// The pairs of one peer, the best candidates first.
#[derive(Debug, Clone, Default)]
pub(super) struct Pairs(Vec<Pair>);

impl Pairs {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Pair> {
        self.0.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Pair> {
        self.0.iter_mut()
    }

    pub(super) fn get(&self, route: Route) -> Option<&Pair> {
        self.0.iter().find(|pair| pair.route() == route)
    }

    pub(super) fn get_mut(&mut self, route: Route) -> Option<&mut Pair> {
        self.0.iter_mut().find(|pair| pair.route() == route)
    }

    pub(super) fn retain(&mut self, keep: impl FnMut(&Pair) -> bool) {
        self.0.retain(keep);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Adds a pair, if it is new. When there is no room, the revealed pair that was silent for
    /// longest goes, or an offered one; never one that works.
    pub(super) fn add(
        &mut self,
        socket: SocketId,
        address: SocketAddr,
        origin: Origin,
        tuning: &Tuning,
    ) {
        let route = Route::Direct { socket, address };
        if let Some(known) = self.get_mut(route) {
            if origin != Origin::PeerReflexive {
                known.origin = origin;
            }
            return;
        }
        if self.0.len() >= PAIRS_MAX {
            let idle = self.0.iter().enumerate();
            let idle = idle.filter(|(_, pair)| !pair.health.is_proved(tuning));
            let oldest = idle.min_by_key(|(_, pair)| {
                let offered = pair.origin != Origin::PeerReflexive;
                (offered, pair.health.last_received)
            });
            let Some(index) = oldest.map(|(index, _)| index) else {
                return;
            };
            self.0.remove(index);
        }
        self.0.push(Pair {
            socket,
            address,
            origin,
            health: Health::default(),
            triggered: 0,
            observed: None,
        });
    }
}
