//! The birthday search, for a symmetric NAT on one side and one that filters by port on the other.
//!
//! The symmetric side sends from many sockets to the other host's reflexive address: each gets a
//! port of its own. The other side probes random ports of the symmetric NAT. When it hits one, both
//! NATs have seen a datagram from inside, and pass those from outside.

use super::round::Phase;
use super::{Action, Paths};
use crate::candidate::{Origin, is_private};
use crate::local::Local;
use crate::message::Offer;
use crate::reason::Obstacle;
use crate::route::{Route, SocketId};
use crate::tuning::{FIRST_MAPPED_PORT, Tuning};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// The number of ports that a NAT maps to.
const PORTS: u32 = 65_536 - FIRST_MAPPED_PORT as u32;
/// The side that probes begins so much later: the other one's mappings must exist, and its
/// datagrams must not find those of this side.
const HEAD_START: Duration = Duration::from_millis(1000);

/// A search, at one of its sides.
#[derive(Debug, Clone)]
pub(super) struct Search {
    ends_at: Duration,
    next_at: Duration,
    proved_at: Option<Duration>,
    side: Side,
}

#[derive(Debug, Clone)]
enum Side {
    /// This host's NAT is symmetric.
    Sockets {
        target: SocketAddr,
        /// The next socket to send from.
        cursor: usize,
        /// When the present pass over the sockets began.
        pass_at: Duration,
    },
    /// The other one's is.
    Ports {
        ip: IpAddr,
        /// Walks over all ports in an order of its own.
        port: u32,
        step: u32,
        left: u32,
    },
}

impl Search {
    pub(super) fn due(&self, tuning: &Tuning) -> Duration {
        let settled = self.proved_at.map(|at| at + tuning.settle);
        let end = settled.unwrap_or(self.ends_at).min(self.ends_at);
        self.next_at.min(end)
    }
}

fn public_address(offer: &Offer) -> Option<SocketAddr> {
    let ipv4 = offer
        .candidates
        .iter()
        .filter(|candidate| candidate.address.is_ipv4() && !is_private(candidate.address.ip()));
    let offered = ipv4.filter(|candidate| candidate.origin != Origin::Predicted);
    offered.map(|candidate| candidate.address).next()
}

impl Paths {
    /// Returns whether a search can help, and this host is not searching for another one.
    pub(super) fn search_is_due(&self, local: &Local) -> bool {
        self.search_would_help(local) && local.can_search(self.config.peer)
    }

    /// Returns whether a search can help: exactly one side maps each destination to another port.
    pub(super) fn search_would_help(&self, local: &Local) -> bool {
        let Some((_, remote)) = &self.remote else {
            return false;
        };
        let own = local.offer();
        self.config.may_search
            && own.mapping.is_dependent() != remote.mapping.is_dependent()
            && !self.is_same_site(local)
            && public_address(own).is_some()
            && public_address(remote).is_some()
            && !own.udp_blocked
            && !remote.udp_blocked
    }

    /// Begins a search, if this host may.
    pub(super) fn start_search(&mut self, local: &mut Local, now: Duration) -> bool {
        let target = self
            .remote
            .as_ref()
            .and_then(|(_, offer)| public_address(offer));
        let (Some(target), true) = (target, self.search_is_due(local)) else {
            return false;
        };
        if !local.begin_search(self.config.peer) {
            return false;
        }
        let tuning = local.tuning();
        self.obstacle = Some(Obstacle::Searching);
        let side = if local.mapping().is_dependent() {
            let count = tuning.search_sockets;
            self.actions.push_back(Action::OpenSockets { count });
            Side::Sockets {
                target,
                cursor: 0,
                pass_at: now,
            }
        } else {
            Side::Ports {
                ip: target.ip(),
                port: self.random.below(PORTS),
                step: self.coprime_step(),
                left: tuning.search_probes,
            }
        };
        let ports = matches!(side, Side::Ports { .. });
        self.phase = Phase::Searching(Search {
            ends_at: now + tuning.search_time,
            next_at: now
                + if ports {
                    HEAD_START
                } else {
                    tuning.search_time
                },
            proved_at: None,
            side,
        });
        true
    }

    /// Returns a step with which a walk visits every port once.
    fn coprime_step(&mut self) -> u32 {
        let divides = |step: u32| [2, 3, 7].iter().any(|prime| step.is_multiple_of(*prime));
        loop {
            let step = 1 + self.random.below(PORTS - 1);
            // 64512 is a product of these.
            if !divides(step) {
                return step;
            }
        }
    }

    /// The sockets are open, or could not be opened.
    pub(super) fn opened(&mut self, sockets: Vec<SocketId>, now: Duration) {
        let sockets = sockets
            .into_iter()
            .filter(|socket| *socket != SocketId::MAIN);
        let sockets = sockets.collect::<Vec<_>>();
        match &mut self.phase {
            Phase::Searching(search) if matches!(search.side, Side::Sockets { .. }) => {
                if sockets.is_empty() {
                    self.obstacle = Some(Obstacle::NoSockets);
                    search.ends_at = now;
                } else {
                    search.next_at = now;
                    self.sockets.extend(sockets);
                }
            }
            _ if sockets.is_empty() => {}
            _ => self.actions.push_back(Action::CloseSockets(sockets)),
        }
    }

    pub(super) fn step_search(&mut self, mut search: Search, local: &mut Local, now: Duration) {
        let tuning = local.tuning().clone();
        let proved = self.pairs.iter().any(|pair| pair.health.is_proved(&tuning));
        if proved && search.proved_at.is_none() {
            search.proved_at = Some(now);
        }
        let settled = search.proved_at.is_some_and(|at| at + tuning.settle <= now);
        if settled || search.ends_at <= now {
            self.phase = Phase::Searching(search);
            self.end_search(local, now);
            if !proved {
                self.searches = self.searches.saturating_add(1);
                let doubled = tuning.search_retry * 2_u32.pow((self.searches - 1).min(16));
                self.search_at = now + doubled.min(tuning.search_retry_max);
            }
            let obstacle = match self.obstacle {
                Some(Obstacle::NoSockets) => Obstacle::NoSockets,
                _ => Obstacle::NotPunched,
            };
            self.ended((!proved).then_some(obstacle), local, now);
            return;
        }
        if search.next_at <= now && proved {
            search.next_at = search.ends_at;
        }
        if search.next_at <= now {
            match local.take_turn(now) {
                Ok(()) => self.probe_next(&mut search, &tuning, local, now),
                Err(at) => search.next_at = at,
            }
        }
        self.phase = Phase::Searching(search);
    }

    fn probe_next(&mut self, search: &mut Search, tuning: &Tuning, local: &Local, now: Duration) {
        match &mut search.side {
            Side::Sockets {
                target,
                cursor,
                pass_at,
            } => {
                let Some(socket) = self.sockets.get(*cursor).copied() else {
                    return;
                };
                *cursor += 1;
                search.next_at = now + tuning.host_pace;
                if *cursor == self.sockets.len() {
                    *cursor = 0;
                    *pass_at = (*pass_at + tuning.search_renew).max(now);
                    search.next_at = *pass_at;
                }
                let address = *target;
                self.send_probe(Route::Direct { socket, address }, local, now);
            }
            Side::Ports {
                ip,
                port,
                step,
                left,
            } => {
                if *left == 0 {
                    // The last acknowledgements may still come.
                    search.ends_at = search.ends_at.min(now + tuning.probe_lifetime);
                    search.next_at = search.ends_at;
                    return;
                }
                *left -= 1;
                *port = (*port + *step) % PORTS;
                search.next_at = now + tuning.search_pace;
                let number = u16::try_from(u32::from(FIRST_MAPPED_PORT) + *port);
                let address = SocketAddr::new(*ip, number.unwrap_or(u16::MAX));
                let socket = SocketId::MAIN;
                self.send_probe(Route::Direct { socket, address }, local, now);
            }
        }
    }

    /// Ends a search: only sockets with a proved pair stay open.
    pub(super) fn end_search(&mut self, local: &mut Local, now: Duration) {
        if !matches!(self.phase, Phase::Searching(_)) {
            return;
        }
        local.end_search(self.config.peer);
        self.choose(local, now);
        self.trim(local.tuning());
        self.phase = Phase::Idle;
        self.close_idle_sockets(local);
    }
}
