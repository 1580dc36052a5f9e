//! The topology and the faults of a run, by seed.

use crate::nat::{Filters, Maps, Spec};
use crate::random::{Rng, ms};
use std::time::Duration;

/// A site: its NAT, and what its hosts have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Site {
    /// No NAT: hosts have public addresses, with a firewall or not.
    pub(crate) nat: Option<Spec>,
    pub(crate) firewall: bool,
    /// Behind the carrier's NAT.
    pub(crate) carrier: bool,
    pub(crate) ipv4: bool,
    pub(crate) ipv6: bool,
    pub(crate) delay_ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    ServerDies(usize),
    ServerReturns(usize),
    /// A relay refuses datagrams for so long, in seconds.
    Overload(usize, u64),
    NatReboot(usize),
    /// A host moves to another site.
    Move(usize, usize),
    /// A host's agent restarts.
    Restart(usize),
    /// Datagrams between the hosts are lost for so long, in seconds; those of relays are not.
    DirectCut(u64),
    /// Data flows for so long, in seconds: from the first host, the second, or both.
    Traffic(u8, u64),
    /// A captured acknowledgement arrives from another address.
    Replay(usize),
    /// All servers die, and do not return.
    AllServersDie,
}

#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) sites: [Site; 4],
    /// The sites of both hosts at first.
    pub(crate) at: [usize; 2],
    pub(crate) carrier: Spec,
    /// A second network that both hosts are attached to.
    pub(crate) shared_lan: bool,
    pub(crate) servers: usize,
    pub(crate) server_delay_ms: [u64; 3],
    pub(crate) loss_permille: u64,
    pub(crate) jitter_ms: u64,
    pub(crate) faults: Vec<(Duration, Fault)>,
    pub(crate) last_fault: Duration,
    /// In the end all servers die.
    pub(crate) servers_die: bool,
}

pub(crate) const FULL_CONE: Spec = Spec {
    maps: Maps::Independent,
    filters: Filters::Nothing,
    hairpin: false,
    trap: false,
    blocks_udp: false,
    timeout: Duration::from_secs(120),
};
pub(crate) const RESTRICTED: Spec = Spec {
    filters: Filters::ByAddress,
    ..FULL_CONE
};
pub(crate) const PORT_RESTRICTED: Spec = Spec {
    filters: Filters::ByPort,
    ..FULL_CONE
};
pub(crate) const TRAP: Spec = Spec {
    trap: true,
    ..PORT_RESTRICTED
};
pub(crate) const SYMMETRIC: Spec = Spec {
    maps: Maps::DependentRandom,
    ..PORT_RESTRICTED
};
pub(crate) const SEQUENTIAL: Spec = Spec {
    maps: Maps::DependentSequential,
    ..PORT_RESTRICTED
};
pub(crate) const BLOCKED: Spec = Spec {
    blocks_udp: true,
    ..PORT_RESTRICTED
};

fn nat(rng: &mut Rng) -> Spec {
    let kind = match rng.below(16) {
        0 | 1 => FULL_CONE,
        2 | 3 => RESTRICTED,
        4..=6 => PORT_RESTRICTED,
        7 | 8 => TRAP,
        9..=11 => SYMMETRIC,
        12 | 13 => SEQUENTIAL,
        _ => BLOCKED,
    };
    Spec {
        hairpin: rng.one_in(3),
        timeout: Duration::from_secs([30, 60, 120, 350][rng.below(4) as usize]),
        ..kind
    }
}

fn site(rng: &mut Rng) -> Site {
    let ipv4 = !rng.one_in(12);
    Site {
        nat: (!rng.one_in(6)).then(|| nat(rng)),
        firewall: rng.one_in(2),
        carrier: rng.one_in(4),
        ipv4,
        ipv6: !ipv4 || rng.one_in(5),
        delay_ms: 2 + rng.below(60),
    }
}

impl Plan {
    /// Two sites with these NATs, three servers, and nothing that goes wrong.
    pub(crate) fn quiet(a: Option<Spec>, b: Option<Spec>) -> Self {
        let site = |nat, delay_ms| Site {
            nat,
            firewall: true,
            carrier: false,
            ipv4: true,
            ipv6: false,
            delay_ms,
        };
        Self {
            sites: [site(a, 15), site(b, 25), site(a, 9), site(b, 9)],
            at: [0, 1],
            carrier: PORT_RESTRICTED,
            shared_lan: false,
            servers: 3,
            server_delay_ms: [10, 20, 30],
            loss_permille: 0,
            jitter_ms: 1,
            faults: Vec::new(),
            last_fault: Duration::ZERO,
            servers_die: false,
        }
    }

    pub(crate) fn of(rng: &mut Rng) -> Self {
        let sites: [Site; 4] = std::array::from_fn(|_| site(rng));
        let same_site = rng.one_in(8);
        let servers = 2 + rng.below(2) as usize;
        let mut faults = Vec::new();
        let span = 120_000;
        for _ in 0..rng.below(5) {
            let at = ms(rng.below(span));
            match rng.below(12) {
                0..=2 => {
                    let server = rng.below(servers as u64) as usize;
                    faults.push((at, Fault::ServerDies(server)));
                    let returns = at + ms(1000 + rng.below(60_000));
                    faults.push((returns, Fault::ServerReturns(server)));
                }
                3 => faults.push((at, Fault::Overload(rng.below(servers as u64) as usize, 20))),
                4 | 5 => faults.push((at, Fault::NatReboot(rng.below(5) as usize))),
                6 => {
                    let host = rng.below(2) as usize;
                    faults.push((at, Fault::Move(host, 2 + host)));
                }
                7 => faults.push((at, Fault::Restart(rng.below(2) as usize))),
                8 => faults.push((at, Fault::DirectCut(1 + rng.below(30)))),
                9 | 10 => {
                    let who = 1 + rng.below(3) as u8;
                    faults.push((at, Fault::Traffic(who, 5 + rng.below(20))));
                }
                _ => faults.push((at, Fault::Replay(rng.below(2) as usize))),
            }
        }
        // Some time later, when all is quiet: rebinding, traffic, forged datagrams.
        if rng.one_in(3) {
            let at = ms(300_000 + rng.below(60_000));
            let fault = match rng.below(4) {
                0 => Fault::NatReboot(rng.below(5) as usize),
                1 => Fault::Traffic(1 + rng.below(3) as u8, 10),
                2 => Fault::Replay(rng.below(2) as usize),
                _ => Fault::DirectCut(20),
            };
            faults.push((at, fault));
        }
        let last = faults.iter().map(|(at, _)| *at).max().unwrap_or_default();
        Self {
            at: if same_site { [0, 0] } else { [0, 1] },
            sites,
            carrier: Spec {
                blocks_udp: false,
                ..nat(rng)
            },
            shared_lan: rng.one_in(20),
            servers,
            server_delay_ms: std::array::from_fn(|_| 1 + rng.below(40)),
            loss_permille: [0, 0, 10, 50][rng.below(4) as usize],
            jitter_ms: 1 + rng.below(4),
            faults,
            last_fault: last + Duration::from_secs(30),
            servers_die: rng.one_in(4),
        }
    }
}
