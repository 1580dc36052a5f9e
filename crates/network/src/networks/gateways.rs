//! Opens the gateways that the ruleset gives this host's networks, and finds the near ones
//! elsewhere.

use crate::plane::{GatewayPlan, Plane};
use crate::reach;
use crate::tap::{Nat, NatGateway, Subnet, gateway_name, names};
use longhaul_overlay::{Mac, NetworkId};
use longhaul_protocol::HostId;
use longhaul_realm::membership::Member;
use longhaul_realm::ruleset::{Gateway, NetworkEntry};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::spawn_blocking;

/// How long after a failure it is tried again.
const RETRY: Duration = Duration::from_secs(10);
/// How often the host's default routes are looked at.
const LOOK: Duration = Duration::from_secs(5);

/// The gateway of a network, as this host uses it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayStatus {
    /// Its device here, if this host has it.
    pub device: Option<String>,
    /// The host whose gateway new flows leave by: this one, another one, or none.
    pub near: Option<HostId>,
    /// The hosts that have it.
    pub hosts: Vec<HostId>,
    /// Why it does not work here as the ruleset says.
    pub error: Option<String>,
}

/// What is known of the other members.
#[derive(Debug, Clone, Copy)]
pub(super) struct World<'a> {
    pub(super) members: &'a [Member],
    pub(super) ways: &'a reach::Status,
}

/// The gateways of this host's open networks.
#[derive(Debug)]
pub(super) struct Gateways {
    plane: Arc<Plane>,
    own: HostId,
    /// What the ruleset says.
    wanted: BTreeMap<NetworkId, GatewayPlan>,
    /// What the frame plane was told.
    told: BTreeMap<NetworkId, GatewayPlan>,
    failed: BTreeMap<NetworkId, String>,
    nat: Nat,
    nat_failed: Option<String>,
    /// When failures are tried again, and default routes looked at.
    due: Instant,
}

impl Gateways {
    pub(super) fn new(plane: Arc<Plane>, own: HostId) -> Self {
        Self {
            plane,
            own,
            wanted: BTreeMap::new(),
            told: BTreeMap::new(),
            failed: BTreeMap::new(),
            nat: Nat::default(),
            nat_failed: None,
            due: Instant::now(),
        }
    }

    /// Follows the networks that are open, those that were closed since the last call, and the ways
    /// to their members. Returns whether anything has changed here.
    pub(super) async fn follow(
        &mut self,
        (networks, closed): (&[(NetworkId, NetworkEntry)], &[NetworkId]),
        world: World<'_>,
    ) -> bool {
        for network in closed {
            // They may be open again, without a gateway.
            self.told.remove(network);
            self.failed.remove(network);
            self.due = Instant::now();
        }
        let due = Instant::now() >= self.due;
        let wanted = self.wanted(networks, world);
        if wanted == self.wanted && !due {
            return false;
        }
        let before = (self.failed.clone(), self.nat_failed.clone());
        // The rules come before a device, and go after it: without them a guest would reach more.
        let mut both = self.wanted.clone();
        both.retain(|network, plan| plan.here && !wanted.contains_key(network));
        both.extend(wanted.clone());
        self.translate(&both).await;
        self.failed
            .retain(|network, _| wanted.contains_key(network));
        let may_open = self.nat_failed.is_none();
        let changed = networks.iter().filter_map(|(network, _)| {
            let after = wanted.get(network).map(|plan| GatewayPlan {
                here: plan.here && may_open,
                ..plan.clone()
            });
            let again = due && self.failed.contains_key(network);
            (again || self.told.get(network) != after.as_ref()).then_some((*network, after))
        });
        let changed: Vec<_> = changed.collect();
        if !changed.is_empty() {
            self.set(changed).await;
        }
        if may_open && both != wanted {
            self.translate(&wanted).await;
        }
        let differs = wanted != self.wanted;
        self.wanted = wanted;
        let fails = !self.failed.is_empty() || self.nat_failed.is_some();
        self.due = Instant::now() + if fails { RETRY } else { LOOK };
        differs || !closed.is_empty() || before != (self.failed.clone(), self.nat_failed.clone())
    }

    fn wanted(
        &self,
        networks: &[(NetworkId, NetworkEntry)],
        world: World<'_>,
    ) -> BTreeMap<NetworkId, GatewayPlan> {
        let wanted = networks.iter().filter_map(|(id, entry)| {
            let gateway = entry.gateway.as_ref()?;
            let addresses = ipv4(gateway);
            if addresses.is_empty() {
                return None;
            }
            let has = having(gateway, entry, world.members);
            let before = self.wanted.get(id).and_then(|plan| plan.hosts.first());
            let others: Vec<&Member> = has.iter().copied().filter(|it| it.id != self.own).collect();
            Some((
                *id,
                GatewayPlan {
                    mac: Mac(gateway.mac),
                    addresses,
                    here: others.len() < has.len(),
                    hosts: in_order(&others, before.copied(), self.own, world),
                },
            ))
        });
        wanted.collect()
    }

    /// Tells the frame plane.
    async fn set(&mut self, changed: Vec<(NetworkId, Option<GatewayPlan>)>) {
        for (network, plan) in &changed {
            match plan {
                Some(plan) => _ = self.told.insert(*network, plan.clone()),
                None => _ = self.told.remove(network),
            }
        }
        let plane = self.plane.clone();
        let set = spawn_blocking(move || {
            let set = changed.into_iter().map(|(network, plan)| {
                let set = plane.set_gateway(network, plan.as_ref());
                (network, set.map_err(|error| error.to_string()))
            });
            set.collect::<Vec<_>>()
        });
        let results = match set.await {
            Ok(results) => results,
            Err(error) => {
                return tracing::error!(%error, "gateways are not as the ruleset says");
            }
        };
        for (network, result) in results {
            match result {
                Ok(()) => _ = self.failed.remove(&network),
                Err(error) => {
                    if self.failed.get(&network) != Some(&error) {
                        tracing::warn!(?network, error, "the gateway cannot be opened");
                    }
                    self.failed.insert(network, error);
                }
            }
        }
    }

    /// Sets the kernel's rules for the gateways of this host.
    async fn translate(&mut self, plans: &BTreeMap<NetworkId, GatewayPlan>) {
        let here = plans.iter().filter(|(_, plan)| plan.here);
        let gateways: Vec<NatGateway> = here
            .map(|(network, plan)| NatGateway {
                device: gateway_name(*network),
                bridge: names(*network).0,
                addresses: plan.addresses.clone(),
            })
            .collect();
        let mut nat = std::mem::take(&mut self.nat);
        let applied = spawn_blocking(move || {
            let applied = nat.apply(&gateways).map_err(|error| error.to_string());
            (nat, applied)
        });
        let error = match applied.await {
            Ok((nat, applied)) => {
                self.nat = nat;
                applied.err()
            }
            Err(error) => Some(error.to_string()),
        };
        if let Some(error) = &error
            && self.nat_failed.as_ref() != Some(error)
        {
            tracing::warn!(error, "this host's gateways stay closed");
        }
        self.nat_failed = error;
    }

    /// Returns how a network's gateway is used here, if it has one.
    pub(super) fn status(
        &self,
        id: NetworkId,
        entry: &NetworkEntry,
        members: &[Member],
    ) -> Option<GatewayStatus> {
        let gateway = entry.gateway.as_ref()?;
        let hosts = having(gateway, entry, members);
        let hosts: Vec<HostId> = hosts.iter().map(|member| member.id).collect();
        let (wanted, plan) = (self.wanted.get(&id), self.told.get(&id));
        let error = match self.failed.get(&id) {
            Some(error) => Some(error.clone()),
            None if wanted.is_some_and(|plan| plan.here) => self.nat_failed.clone(),
            None if ipv4(gateway).is_empty() => {
                Some("it has no IPv4 address, and this version knows no others".to_owned())
            }
            None => None,
        };
        let here = plan.is_some_and(|plan| plan.here) && !self.failed.contains_key(&id);
        Some(GatewayStatus {
            device: here.then(|| gateway_name(id)),
            near: match here {
                true => Some(self.own),
                false => plan.and_then(|plan| plan.hosts.first().copied()),
            },
            hosts,
            error,
        })
    }
}

/// Returns the addresses that this version uses.
fn ipv4(gateway: &Gateway) -> Vec<Subnet> {
    let addresses = gateway
        .addresses
        .iter()
        .filter_map(|address| match address.ip {
            IpAddr::V4(ip) => Some(Subnet {
                address: ip,
                prefix_bits: address.prefix_bits,
            }),
            IpAddr::V6(_) => None,
        });
    addresses.collect()
}

/// Returns the members of a network that have its gateway.
fn having<'a>(gateway: &Gateway, entry: &NetworkEntry, members: &'a [Member]) -> Vec<&'a Member> {
    let has = |member: &&Member| entry.members.contains(&member.id) && gateway.is_at(&member.site);
    members.iter().filter(has).collect()
}

/// Returns hosts in the order in which their gateways are used: those that are reached, of them the
/// one that was used before, then those of this site, then the shortest round trips.
fn in_order(
    hosts: &[&Member],
    before: Option<HostId>,
    own: HostId,
    world: World<'_>,
) -> Vec<HostId> {
    let site = world.members.iter().find(|member| member.id == own);
    let site = site.map(|member| member.site.as_str());
    let rank = |host: &&Member| {
        let way = world.ways.peers.iter().find(|peer| peer.peer == host.id);
        let way = way.filter(|peer| peer.way.is_some());
        let round_trip = way.and_then(|peer| peer.round_trip);
        (
            way.is_none(),
            Some(host.id) != before,
            Some(host.site.as_str()) != site,
            round_trip.unwrap_or(Duration::MAX),
            host.id,
        )
    };
    let mut ranked: Vec<_> = hosts.iter().map(rank).collect();
    ranked.sort();
    // Only the first one is used for new flows; the order of the others must not change with each
    // round trip.
    let ids = ranked.into_iter().map(|(.., id)| id);
    let mut ids: Vec<HostId> = ids.collect();
    if let Some(others) = ids.get_mut(1..) {
        others.sort();
    }
    ids
}
