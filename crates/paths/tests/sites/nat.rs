//! One NAT: how it maps, filters, forgets, and what early datagrams do to it.

use crate::random::Rng;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

/// Linux forgets a UDP flow that was not answered after this time.
const UNANSWERED: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Maps {
    /// One port for all destinations.
    Independent,
    /// Another port for each destination: random, or one after the other.
    DependentRandom,
    DependentSequential,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Filters {
    /// Full cone.
    Nothing,
    /// Restricted cone.
    ByAddress,
    /// Port-restricted cone, and all symmetric NATs here.
    ByPort,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Spec {
    pub(crate) maps: Maps,
    pub(crate) filters: Filters,
    pub(crate) hairpin: bool,
    /// A datagram that it drops makes it use another port for that destination: Linux without a
    /// rule that drops it before it creates a conntrack entry.
    pub(crate) trap: bool,
    /// No UDP from inside passes.
    pub(crate) blocks_udp: bool,
    pub(crate) timeout: Duration,
}

#[derive(Debug, Clone, Copy)]
struct Flow {
    outer: u16,
    sent_at: Duration,
    answered: bool,
}

#[derive(Debug)]
pub(crate) struct Nat {
    pub(crate) spec: Spec,
    pub(crate) ip: Ipv4Addr,
    pub(crate) inside: usize,
    pub(crate) outside: usize,
    flows: BTreeMap<(SocketAddr, SocketAddr), Flow>,
    /// Inner address and time of the last use of each port, for mappings that are independent.
    cones: BTreeMap<SocketAddr, (u16, Duration)>,
    owners: BTreeMap<u16, (SocketAddr, Option<SocketAddr>)>,
    trapped: BTreeMap<(u16, SocketAddr), Duration>,
    next_port: u16,
}

impl Nat {
    pub(crate) fn new(spec: Spec, ip: Ipv4Addr, inside: usize, outside: usize) -> Self {
        Self {
            spec,
            ip,
            inside,
            outside,
            flows: BTreeMap::new(),
            cones: BTreeMap::new(),
            owners: BTreeMap::new(),
            trapped: BTreeMap::new(),
            next_port: 20_000,
        }
    }

    /// All mappings are forgotten.
    pub(crate) fn reboot(&mut self, rng: &mut Rng) {
        let next = 10_000 + rng.below(40_000) as u16;
        *self = Self::new(self.spec, self.ip, self.inside, self.outside);
        self.next_port = next;
    }

    fn is_live(&self, flow: &Flow, now: Duration) -> bool {
        let kept = match flow.answered {
            true => self.spec.timeout,
            false => UNANSWERED,
        };
        now < flow.sent_at + kept
    }

    fn is_dependent(&self) -> bool {
        self.spec.maps != Maps::Independent
    }

    fn cone(&self, inner: SocketAddr, now: Duration) -> Option<u16> {
        let (outer, used_at) = self.cones.get(&inner)?;
        (now < *used_at + self.spec.timeout).then_some(*outer)
    }

    /// Takes a datagram from inside and returns its source outside. If not `real`, nothing is
    /// changed, and only mappings that exist count.
    pub(crate) fn outbound(
        &mut self,
        inner: SocketAddr,
        remote: SocketAddr,
        now: Duration,
        real: Option<&mut Rng>,
    ) -> Option<SocketAddr> {
        if self.spec.blocks_udp {
            return None;
        }
        let outside = |port: u16| SocketAddr::from((self.ip, port));
        let flow = self.flows.get(&(inner, remote)).copied();
        let live = flow.filter(|flow| self.is_live(flow, now));
        let cone = self.cone(inner, now);
        let Some(rng) = real else {
            return live.map(|flow| outside(flow.outer));
        };
        let flow = match live {
            Some(flow) => Flow {
                sent_at: now,
                ..flow
            },
            None => {
                let outer = match cone.filter(|_| !self.is_dependent()) {
                    Some(outer) if self.is_trapped(outer, remote, now) => {
                        self.allocate(inner, Some(remote), rng)
                    }
                    Some(outer) => outer,
                    None if self.is_dependent() => self.allocate(inner, Some(remote), rng),
                    None => self.allocate(inner, None, rng),
                };
                Flow {
                    outer,
                    sent_at: now,
                    answered: false,
                }
            }
        };
        self.flows.insert((inner, remote), flow);
        let own = self.owners.get(&flow.outer);
        if !self.is_dependent() && own.is_some_and(|(_, only)| only.is_none()) {
            self.cones.insert(inner, (flow.outer, now));
        }
        Some(SocketAddr::from((self.ip, flow.outer)))
    }

    fn is_trapped(&self, outer: u16, remote: SocketAddr, now: Duration) -> bool {
        let at = self.trapped.get(&(outer, remote));
        self.spec.trap && at.is_some_and(|at| now < *at + UNANSWERED)
    }

    fn allocate(&mut self, inner: SocketAddr, only: Option<SocketAddr>, rng: &mut Rng) -> u16 {
        let mut port = match (self.spec.maps, only) {
            (Maps::Independent, None) => inner.port(),
            (Maps::DependentSequential, _) => {
                self.next_port = self.next_port.checked_add(1).unwrap_or(1024);
                self.next_port
            }
            _ => 1024 + rng.below(64_512) as u16,
        };
        while self
            .owners
            .get(&port)
            .is_some_and(|(owner, _)| *owner != inner || only.is_some())
        {
            port = 1024 + rng.below(64_512) as u16;
        }
        self.owners.insert(port, (inner, only));
        port
    }

    /// Takes a datagram from outside and returns where it goes inside.
    pub(crate) fn inbound(
        &mut self,
        outer: u16,
        remote: SocketAddr,
        now: Duration,
        real: bool,
    ) -> Option<SocketAddr> {
        let passed = self.passes(outer, remote, now);
        match passed {
            Some(inner) if real => {
                if let Some(flow) = self.flows.get_mut(&(inner, remote)) {
                    flow.answered = true;
                }
            }
            None if real && self.spec.trap => {
                self.trapped.insert((outer, remote), now);
            }
            _ => {}
        }
        passed
    }

    fn passes(&self, outer: u16, remote: SocketAddr, now: Duration) -> Option<SocketAddr> {
        let (inner, only) = *self.owners.get(&outer)?;
        let flow = self.flows.get(&(inner, remote));
        let open = flow.is_some_and(|flow| flow.outer == outer && self.is_live(flow, now));
        if open || only.is_some() {
            return open.then_some(inner);
        }
        if self.cone(inner, now) != Some(outer) {
            return None;
        }
        let passes = match self.spec.filters {
            Filters::Nothing => true,
            Filters::ByPort => false,
            Filters::ByAddress => {
                let from = (inner, SocketAddr::new(remote.ip(), 0));
                let to = (inner, SocketAddr::new(remote.ip(), u16::MAX));
                let mut flows = self.flows.range(from..=to);
                flows.any(|(_, flow)| self.is_live(flow, now))
            }
        };
        passes.then_some(inner)
    }
}
