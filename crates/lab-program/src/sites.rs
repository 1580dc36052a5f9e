//! Implements `lab up --nat`: an interactive laboratory of sites behind NATs, what its hosts reach,
//! and the realm that their agents join.

use std::time::Duration;

use longhaul_lab::error::LabError;
use longhaul_lab::guest::network;
use longhaul_lab::internet::access::{Access, Nat};
use longhaul_lab::internet::probe::{Behaviour, Dependence, examine};
use longhaul_lab::internet::{Internet, SitePlan, SitesPlan};
use longhaul_lab::lab::{Host, Lab, say};
use longhaul_lab::link::spec::LinkSpec;
use longhaul_lab::product::Product;
use longhaul_lab::realm::Realm;

use crate::up::{self, Inhabitants};

/// The uplink of the server and of the client.
const BACKBONE_RATE_BPS: u64 = 1_000_000_000;
const BACKBONE_RTT: Duration = Duration::from_millis(2);

/// Creates the laboratory and holds it until a signal requests the end. Its record is printed as
/// one line of JSON when it is ready.
///
/// # Errors
/// When it cannot be created, or an uplink differs from the requested one.
pub(crate) fn hold(
    sites: Vec<Access>,
    uplink: LinkSpec,
    seed: u64,
    inhabitants: &Inhabitants,
) -> Result<(), LabError> {
    let sites = sites
        .into_iter()
        .map(|access| SitePlan { access, uplink })
        .collect();
    let mut lab = Lab::create_sites(&SitesPlan {
        purpose: up::TO_PLAY_WITH.to_owned(),
        sites,
        servers: 1,
        backbone: LinkSpec::new(BACKBONE_RATE_BPS, BACKBONE_RTT),
        seed,
    })?;
    let mut lines = reach(&lab, uplink)?;
    // Named so that both live until the end.
    let mut _realm = None;
    let product = up::start_agents(&mut lab, inhabitants)?;
    if let Some(product) = &product {
        let realm = join(&mut lab, product)?;
        lines.extend(of_realm(&lab, &realm)?);
        _realm = Some(realm);
        if inhabitants.guest {
            up::start_guest(&mut lab, product, inhabitants, true)?;
        }
    }
    lab.note_reach(lines)?;
    up::stay(&lab)
}

/// Joins all hosts to a realm with a network, which clients of guests reach at the last host.
fn join(lab: &mut Lab, product: &Product) -> Result<Realm, LabError> {
    let realm = Realm::create(lab)?;
    let hosts = 0..lab.hosts().len();
    let agents = hosts
        .map(|host| product.agent(host))
        .collect::<Result<Vec<_>, _>>()?;
    realm.join(lab, &agents)?;
    realm.create_network(lab, network::NETWORK, &agents)?;
    if let Some(last) = agents.last() {
        let bridge = realm.bridge(last, network::NETWORK)?;
        lab.add_clients_at(agents.len() - 1, &bridge)?;
    }
    Ok(realm)
}

/// Returns how the realm and its network are used.
fn of_realm(lab: &Lab, realm: &Realm) -> Result<Vec<String>, LabError> {
    let operator = lab.internet()?.client().namespace().name().to_owned();
    let (network, folder) = (network::NETWORK, realm.folder().display());
    let guest = network::GUEST_ADDRESS;
    Ok(vec![
        format!("realm lab: all hosts are members of network {network}; its operator:"),
        format!("  ip netns exec {operator} longhaul network list --folder {folder}"),
        format!("clients in network {network}; the laboratory's guest has {guest}:"),
        format!("  ip netns exec {} COMMAND", lab.clients()?.name()),
    ])
}

/// Returns what the hosts reach: each to the server, as probed, and each pair of sites, by what
/// their NATs are.
fn reach(lab: &Lab, uplink: LinkSpec) -> Result<Vec<String>, LabError> {
    let internet = lab.internet()?;
    let server = internet.server(0)?;
    let mut lines = vec![format!("as {} sees them:", server.name())];
    let mut hosts = lab.hosts().iter();
    for site in internet.sites() {
        let measured = internet.measure_uplink(site)?;
        say(&format!(
            "uplink of {} asked for {uplink}: measured {:.1} Mbit/s, {:.1} ms round trip, {:.2} % \
             lost",
            site.name(),
            measured.rate_bps / 1e6,
            measured.rtt_ms,
            measured.loss * 100.0
        ));
        for host in hosts.by_ref().take(site.access().hosts) {
            let found = examine(host, server, uplink.rtt + BACKBONE_RTT)?;
            lines.push(format!("  {}", seen(host, found.as_ref())));
        }
    }
    lines.extend(pairs(internet));
    Ok(lines)
}

fn seen(host: &Host, found: Option<&Behaviour>) -> String {
    let name = host.name();
    let Some(found) = found else {
        return format!("{name}: no UDP gets through");
    };
    let depends = |dependence: Dependence| match dependence {
        Dependence::Independent => "for all far ends",
        Dependence::Address => "by the far end's address",
        Dependence::AddressAndPort => "by the far end's address and port",
    };
    let what = match found.filtering {
        Dependence::Independent => "lets everything in".to_owned(),
        filtering => format!("filters {}", depends(filtering)),
    };
    match (found.is_translated(), found.mapping) {
        (false, _) => format!("{name}: {}, its own address; {what}", found.seen),
        (true, Dependence::Independent) => {
            format!("{name}: {}, one port for all far ends; {what}", found.seen)
        }
        (true, mapping) => {
            let by = depends(mapping);
            format!("{name}: {}, another port {by}; {what}", found.seen)
        }
    }
}

/// Returns how hosts of each two sites can connect.
fn pairs(internet: &Internet) -> Vec<String> {
    let sites = internet.sites();
    let mut lines = Vec::new();
    for (index, first) in sites.iter().enumerate() {
        for second in &sites[index + 1..] {
            let way = way(first.access(), second.access());
            lines.push(format!("  {} - {}: {way}", first.name(), second.name()));
        }
    }
    if !lines.is_empty() {
        lines.insert(0, "between sites:".to_owned());
    }
    lines
}

/// The hardest of a site's NATs for a peer, easiest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Hardness {
    Open,
    Address,
    Port,
    Symmetric,
    NoUdp,
}

fn hardness(access: &Access) -> Option<Hardness> {
    let of = |nat: &Nat| match nat {
        Nat::None | Nat::FullCone => Hardness::Open,
        Nat::Restricted => Hardness::Address,
        Nat::PortRestricted => Hardness::Port,
        Nat::Symmetric => Hardness::Symmetric,
        Nat::NoUdp => Hardness::NoUdp,
    };
    access.v4.iter().map(of).max()
}

fn way(first: &Access, second: &Access) -> &'static str {
    let udp = |access: &Access| hardness(access) != Some(Hardness::NoUdp);
    if !udp(first) || !udp(second) {
        return "relayed by a server over TCP: UDP is blocked";
    }
    if first.v6 && second.v6 {
        return "direct by IPv6, when both send";
    }
    let (Some(first), Some(second)) = (hardness(first), hardness(second)) else {
        return "no protocol in common: relayed by a server that has both";
    };
    let (easier, harder) = (first.min(second), first.max(second));
    match (easier, harder) {
        (Hardness::Open, Hardness::Open) => "direct, when each knows the other's address and port",
        (Hardness::Symmetric, _) => "relayed by a server: both NATs choose a port for each far end",
        (Hardness::Port, Hardness::Symmetric) => {
            "direct after a birthday search, or relayed by a server"
        }
        _ => "direct by hole punching: both send",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_between_two_sites_follows_from_their_nats() {
        for (first, second, words) in [
            ("none", "full-cone", "each knows"),
            ("port-restricted", "port-restricted", "hole punching"),
            ("full-cone", "symmetric", "hole punching"),
            ("symmetric", "restricted", "hole punching"),
            ("port-restricted", "symmetric", "birthday"),
            ("symmetric", "symmetric", "relayed"),
            ("full-cone/symmetric", "port-restricted", "birthday"),
            ("no-udp", "none", "UDP is blocked"),
            ("ipv6", "symmetric+ipv6", "IPv6"),
            ("ipv6", "full-cone", "no protocol"),
        ] {
            let [one, other] = [first, second].map(|text| text.parse::<Access>().unwrap());
            assert!(way(&one, &other).contains(words), "{first}, {second}");
            assert_eq!(way(&one, &other), way(&other, &one));
        }
    }
}
