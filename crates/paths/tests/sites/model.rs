//! The reference: what each pair of hosts must come to, by its sites alone.

use crate::nat::{Filters, Maps, Spec};
use crate::plan::{Plan, Site};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expected {
    Direct,
    Relayed,
    /// Luck decides.
    Either,
}

/// What stands between a host and the network that both share.
#[derive(Debug, Clone, Copy)]
struct Border {
    /// Not translated, or one port for all destinations.
    dependent: bool,
    filters: Filters,
    trap: bool,
    blocked: bool,
}

const OPEN: Border = Border {
    dependent: false,
    filters: Filters::Nothing,
    trap: false,
    blocked: false,
};

impl Border {
    fn behind(self, spec: Spec) -> Self {
        Self {
            dependent: self.dependent || spec.maps != Maps::Independent,
            filters: self.filters.max(spec.filters),
            trap: self.trap || spec.trap,
            blocked: self.blocked || spec.blocks_udp,
        }
    }
}

fn border(site: &Site, carrier: Option<Spec>) -> Border {
    let mut border = OPEN;
    match site.nat {
        Some(spec) => border = border.behind(spec),
        None if site.firewall => border.filters = Filters::ByPort,
        None => {}
    }
    match carrier.filter(|_| site.is_behind_carrier()) {
        Some(carrier) => border.behind(carrier),
        None => border,
    }
}

/// Returns what must become of hosts at these sites.
pub(crate) fn expected(plan: &Plan, at: [usize; 2]) -> Expected {
    use Expected::{Direct, Either, Relayed};
    if at[0] == at[1] || plan.shared_lan {
        return Direct;
    }
    let [a, b] = at.map(|site| &plan.sites[site]);
    let blocked = |site: &Site| site.nat.is_some_and(|nat| nat.blocks_udp);
    if blocked(a) || blocked(b) {
        return Relayed;
    }
    if a.ipv6 && b.ipv6 {
        return Direct;
    }
    if !a.ipv4 || !b.ipv4 {
        return Relayed;
    }
    if a.is_behind_carrier() && b.is_behind_carrier() {
        // They know each other's address outside of the carrier's NAT alone.
        return if plan.carrier.hairpin {
            Either
        } else {
            Relayed
        };
    }
    let [a, b] = [a, b].map(|site| border(site, Some(plan.carrier)));
    match (a.dependent, b.dependent) {
        (true, true) => Either.if_sequential(plan, at),
        (false, false) => Direct,
        (symmetric, _) => {
            let cone = if symmetric { b } else { a };
            match cone.filters {
                Filters::Nothing | Filters::ByAddress => Direct,
                // Early datagrams of the many sockets make it use other ports.
                Filters::ByPort if cone.trap => Either,
                Filters::ByPort => Direct,
            }
        }
    }
}

/// Returns whether hosts at these sites become direct in their first round.
pub(crate) fn is_prompt(plan: &Plan, at: [usize; 2]) -> bool {
    if expected(plan, at) != Expected::Direct {
        return false;
    }
    let [a, b] = at.map(|site| &plan.sites[site]);
    if at[0] == at[1] || plan.shared_lan || a.ipv6 && b.ipv6 {
        return true;
    }
    let borders = [a, b].map(|site| border(site, Some(plan.carrier)));
    let [a, b] = borders;
    let searches =
        |symmetric: Border, cone: Border| symmetric.dependent && cone.filters == Filters::ByPort;
    !(searches(a, b) || searches(b, a) || a.trap || b.trap)
}

impl Expected {
    /// Two symmetric NATs: only ports that can be predicted leave any chance.
    fn if_sequential(self, plan: &Plan, at: [usize; 2]) -> Self {
        let sequential = |site: usize| {
            let site = &plan.sites[site];
            let nats = [site.nat, site.is_behind_carrier().then_some(plan.carrier)];
            let mut nats = nats.into_iter().flatten();
            nats.any(|nat| nat.maps == Maps::DependentSequential)
        };
        match at.into_iter().any(sequential) {
            true => self,
            false => Self::Relayed,
        }
    }
}

impl Site {
    pub(crate) fn is_behind_carrier(&self) -> bool {
        self.carrier && self.nat.is_some()
    }
}
