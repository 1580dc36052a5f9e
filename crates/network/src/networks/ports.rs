//! Opens the networks that the ruleset gives this host, and closes the others.

use super::gateways::GatewayStatus;
use crate::plane::{LocalPort, NetworkConfig, Plane};
use crate::tap::{VlanFilter, leftovers, names};
use longhaul_overlay::NetworkId;
use longhaul_overlay::switch::Vlans;
use longhaul_protocol::HostId;
use longhaul_realm::ruleset::{NetworkEntry, VlanPolicy};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::spawn_blocking;

/// How long after a failure a network is opened again.
const RETRY: Duration = Duration::from_secs(10);

/// A network on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenNetwork {
    /// Its id on the frame plane.
    pub id: NetworkId,
    /// Its bridge.
    pub bridge: String,
    /// Largest payload of a frame, in bytes.
    pub mtu: u16,
}

/// A network that this host is a member of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkStatus {
    /// Its name.
    pub name: String,
    /// What is here of it, or why nothing is.
    pub open: Result<OpenNetwork, String>,
    /// Its gateway, if it has one.
    pub gateway: Option<GatewayStatus>,
}

/// The networks that are open, by their ids in the realm.
#[derive(Debug)]
pub(super) struct Ports {
    plane: Arc<Plane>,
    own: HostId,
    wanted: BTreeMap<[u8; 8], NetworkEntry>,
    open: BTreeMap<[u8; 8], NetworkEntry>,
    failed: BTreeMap<[u8; 8], (String, Instant)>,
    /// What was closed since it was last asked for.
    closed: Vec<NetworkId>,
    /// Whether what an earlier agent left was removed.
    swept: bool,
}

/// Returns the id on the frame plane.
fn plane_id(id: [u8; 8]) -> NetworkId {
    NetworkId(u64::from_le_bytes(id))
}

/// Returns whether both need the same devices.
fn same_devices(one: &NetworkEntry, other: &NetworkEntry) -> bool {
    (one.mtu, &one.vlans) == (other.mtu, &other.vlans)
}

fn vlans(policy: &VlanPolicy) -> Vlans {
    match policy {
        VlanPolicy::Untagged => Vlans::untagged(),
        VlanPolicy::Any => Vlans::all(),
        VlanPolicy::Only(ranges) => {
            let mut vlans = Vlans::untagged();
            for range in ranges {
                vlans.insert(range.first, range.last);
            }
            vlans
        }
    }
}

impl Ports {
    pub(super) fn new(plane: Arc<Plane>, own: HostId) -> Self {
        Self {
            plane,
            own,
            wanted: BTreeMap::new(),
            open: BTreeMap::new(),
            failed: BTreeMap::new(),
            closed: Vec::new(),
            swept: false,
        }
    }

    /// Follows the networks of the ruleset in force. Returns whether anything has changed here.
    pub(super) async fn follow(&mut self, networks: &[NetworkEntry]) -> bool {
        let own = networks
            .iter()
            .filter(|entry| entry.members.contains(&self.own));
        self.wanted = own.map(|entry| (entry.id.0, entry.clone())).collect();
        self.failed.retain(|id, _| self.wanted.contains_key(id));
        if !self.swept {
            self.swept = true;
            self.sweep().await;
        }
        self.settle().await
    }

    /// Removes the bridges that an earlier agent left, of networks that are none of this host's any
    /// more, and that no guest uses.
    async fn sweep(&self) {
        let wanted: Vec<NetworkId> = self.wanted.keys().map(|id| plane_id(*id)).collect();
        let swept = spawn_blocking(move || {
            for left in leftovers()? {
                if !wanted.contains(&left.network) && left.remove()? {
                    tracing::info!(bridge = left.bridge, "removed what an earlier agent left");
                }
            }
            Ok::<_, std::io::Error>(())
        });
        match swept.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "bridges of an earlier agent stay"),
            Err(error) => tracing::error!(%error, "bridges of an earlier agent stay"),
        }
    }

    /// Tries again what has failed.
    pub(super) async fn retry(&mut self) -> bool {
        let due = self.failed.values().any(|(_, at)| at.elapsed() >= RETRY);
        due && self.settle().await
    }

    async fn settle(&mut self) -> bool {
        let mut changed = false;
        let open: Vec<[u8; 8]> = self.open.keys().copied().collect();
        for id in open {
            let stays = match (self.open.get(&id), self.wanted.get(&id)) {
                (Some(open), Some(wanted)) => same_devices(open, wanted),
                _ => false,
            };
            if !stays {
                changed = true;
                self.close(id).await;
            }
        }
        for (id, wanted) in self.wanted.clone() {
            match self.open.get(&id) {
                Some(open) if *open == wanted => {}
                Some(_) => {
                    changed = true;
                    if let Err(error) = self.plane.set_members(plane_id(id), &wanted.members) {
                        tracing::warn!(network = wanted.name, %error, "members are left out");
                    }
                    self.open.insert(id, wanted);
                }
                None => {
                    let waits = self.failed.get(&id);
                    if waits.is_none_or(|(_, at)| at.elapsed() >= RETRY) {
                        changed = true;
                        self.open(id, wanted).await;
                    }
                }
            }
        }
        changed
    }

    async fn close(&mut self, id: [u8; 8]) {
        self.closed.push(plane_id(id));
        let name = self.open.remove(&id).map(|entry| entry.name);
        let name = name.unwrap_or_default();
        let plane = self.plane.clone();
        match spawn_blocking(move || plane.close_network(plane_id(id))).await {
            Ok(Ok(true)) => tracing::info!(network = name, "the network is closed here"),
            Ok(Ok(false)) => {
                tracing::warn!(network = name, "closed, and guests are still on its bridge");
            }
            Ok(Err(error)) => tracing::warn!(network = name, %error, "cannot close the network"),
            Err(error) => tracing::error!(network = name, %error, "cannot close the network"),
        }
    }

    async fn open(&mut self, id: [u8; 8], entry: NetworkEntry) {
        let config = NetworkConfig {
            id: plane_id(id),
            members: entry.members.clone(),
            mtu: entry.mtu,
            vlans: vlans(&entry.vlans),
            port: LocalPort::Bridge(VlanFilter::Transparent),
        };
        let plane = self.plane.clone();
        let opened = spawn_blocking(move || plane.open_network(&config)).await;
        let error = match opened {
            Ok(Ok(())) => {
                let bridge = names(plane_id(id)).0;
                tracing::info!(network = entry.name, bridge, "the network is open here");
                self.failed.remove(&id);
                self.open.insert(id, entry);
                return;
            }
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        if self
            .failed
            .get(&id)
            .is_none_or(|(known, _)| *known != error)
        {
            tracing::warn!(network = entry.name, error, "the network cannot be opened");
        }
        self.failed.insert(id, (error, Instant::now()));
    }

    /// Returns the hosts that share an open network with this one.
    pub(super) fn peers(&self) -> impl Iterator<Item = HostId> {
        let members = self.open.values().flat_map(|entry| &entry.members);
        members.copied().filter(|host| *host != self.own)
    }

    /// Returns the ids of the networks that are open.
    pub(super) fn ids(&self) -> Vec<longhaul_realm::ruleset::NetworkId> {
        let ids = self.open.keys();
        ids.map(|id| longhaul_realm::ruleset::NetworkId(*id))
            .collect()
    }

    /// Returns the networks that are open, and those that were closed since the last call.
    pub(super) fn open_and_closed(&mut self) -> (Vec<(NetworkId, NetworkEntry)>, Vec<NetworkId>) {
        let open = self
            .open
            .iter()
            .map(|(id, entry)| (plane_id(*id), entry.clone()));
        (open.collect(), std::mem::take(&mut self.closed))
    }

    /// Returns the networks that this host is a member of, with what `gateway` says of theirs.
    pub(super) fn status(
        &self,
        gateway: impl Fn(NetworkId, &NetworkEntry) -> Option<GatewayStatus>,
    ) -> Vec<NetworkStatus> {
        let status = self.wanted.iter().map(|(id, entry)| {
            let open = match self.failed.get(id) {
                Some((error, _)) => Err(error.clone()),
                None => Ok(OpenNetwork {
                    id: plane_id(*id),
                    bridge: names(plane_id(*id)).0,
                    mtu: entry.mtu,
                }),
            };
            NetworkStatus {
                name: entry.name.clone(),
                open,
                gateway: gateway(plane_id(*id), entry),
            }
        });
        status.collect()
    }
}
