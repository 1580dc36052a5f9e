//! The networks of a host: its side of the realm, the ways to other hosts, and the frame plane,
//! connected with each other.
//!
//! ```text
//! member ── servers, introductions, relay sessions, signals ──▶ reach
//! member ── networks and their members ──▶ plane
//! reach  ── the way to a host ──▶ plane, and a control connection whose keys the plane uses
//! plane  ── probes of ways ──▶ reach
//! ```
//!
//! Hosts that share a network keep a control connection. The host with the lower id dials it; the
//! other one does if it has none after two seconds, since the first may not know that it was lost.

mod connections;
mod driver;
mod gateways;
mod port_mapping;
mod ports;
mod servers;
mod wires;

pub use driver::{NetworksError, Opened, Options, start};
pub use gateways::GatewayStatus;
pub use ports::{NetworkStatus, OpenNetwork};

use crate::member::{Handle, Status, cut};
use crate::plane::{Plane, PlaneError};
use crate::reach;
use crate::tap::Nat;
use connections::Connections;
use longhaul_overlay::Mac;
use longhaul_overlay::seal::Suite;
use longhaul_overlay::switch::Redirect;
use longhaul_protocol::HostId;
use longhaul_protocol::flows::Flows;
use longhaul_transport::{Channel, CloseCode, Control, Endpoint};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The networks of a host that is in a realm. They end with [`Networks::stop`].
#[derive(Debug)]
pub struct Networks {
    endpoint: Endpoint,
    member: Handle,
    reach: reach::Reach,
    plane: Arc<Plane>,
    connections: Connections,
    ports: watch::Receiver<Arc<Vec<NetworkStatus>>>,
    tasks: Mutex<Option<Tasks>>,
}

#[derive(Debug)]
struct Tasks {
    /// Ends by itself when the member is stopped.
    member: JoinHandle<()>,
    others: Vec<JoinHandle<()>>,
}

impl Networks {
    /// Returns the host's side of the realm.
    pub fn member(&self) -> &Handle {
        &self.member
    }

    /// Returns the host's view of its realm.
    pub fn realm(&self) -> Arc<Status> {
        self.member.status().borrow().clone()
    }

    /// Returns how other hosts are reached.
    pub fn ways(&self) -> Arc<reach::Status> {
        self.reach.status().borrow().clone()
    }

    /// Returns the networks that this host is a member of.
    pub fn ports(&self) -> Arc<Vec<NetworkStatus>> {
        self.ports.borrow().clone()
    }

    /// Returns the frame plane.
    pub fn plane(&self) -> &Plane {
        &self.plane
    }

    /// Ends everything. The bridges of guests stay.
    pub async fn stop(&self) {
        self.member.stop().await;
        let tasks = {
            let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
            tasks.take()
        };
        let Some(tasks) = tasks else {
            return;
        };
        if tasks.member.await.is_err() {
            tracing::error!("the realm's part of the agent broke");
        }
        for task in tasks.others {
            task.abort();
            // It was aborted, or has ended before.
            let _ = task.await;
        }
        self.endpoint.set_datagrams(None);
        let plane = self.plane.clone();
        let closed = tokio::task::spawn_blocking(move || {
            for network in plane.networks() {
                if let Err(error) = plane.close_network(network) {
                    tracing::warn!(?network, %error, "cannot close a network");
                }
            }
            if let Err(error) = Nat::default().apply(&[]) {
                tracing::warn!(%error, "rules for gateways stay");
            }
        });
        if closed.await.is_err() {
            tracing::error!("networks were not closed");
        }
    }

    /// Ends everything, and the connections with members that are not trusted by hand.
    pub async fn leave(&self) {
        let realm = self.realm();
        self.stop().await;
        for member in &realm.members {
            cut(&self.endpoint, member.id, "this host has left the realm");
        }
    }
}

/// The networks of a host, or none while it is in no realm. Cheap to clone; all clones are one.
#[derive(Debug, Clone, Default)]
pub struct Slot(Arc<RwLock<Option<Arc<Networks>>>>);

/// A guest's card in a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Card {
    /// The card's number in the guest's description.
    pub number: u16,
    /// The network's name.
    pub network: String,
    /// The card's address.
    pub mac: Mac,
}

impl Slot {
    /// Puts networks into the slot. Returns those that were there.
    pub fn set(&self, networks: Option<Arc<Networks>>) -> Option<Arc<Networks>> {
        let mut slot = self.0.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *slot, networks)
    }

    /// Returns the networks.
    pub fn get(&self) -> Option<Arc<Networks>> {
        let slot = self.0.read().unwrap_or_else(PoisonError::into_inner);
        slot.clone()
    }

    /// Takes a channel for gossip, which another host opened: the keys of its control connection
    /// seal frames from now on. `suite` is what its first message names.
    pub fn accepted(&self, control: &Control, channel: Channel, suite: Suite) {
        let Some(networks) = self.get() else {
            let reason = "this host is in no realm";
            return control.close(CloseCode::NotAllowed, reason);
        };
        let host = control.peer().host.id;
        let realm = networks.realm();
        if realm.members.iter().all(|member| member.id != host) {
            let reason = "this host is no member of the realm here";
            return control.close(CloseCode::NotAllowed, reason);
        }
        match networks.connections.take_keys(control, suite) {
            Ok(()) => networks.member.accepted(host, channel),
            Err(error) => control.close(CloseCode::Done, &error.to_string()),
        }
    }

    /// A guest belongs to this host: pins its cards to it. `generation` is that of the right to run
    /// it.
    pub fn arrived(&self, cards: &[Card], generation: u64) -> Result<(), PlaneError> {
        self.each(cards, |plane, network, card| {
            plane.pin(network, card.mac, generation)
        })
    }

    /// A guest that has arrived runs: tells other hosts and the stations of its networks.
    pub fn announce(&self, cards: &[Card]) -> Result<(), PlaneError> {
        self.each(cards, |plane, network, card| {
            plane.announce(network, card.mac).map(|_| ())
        })
    }

    /// A guest has left for another host, where it runs with this generation of the right.
    pub fn departed(
        &self,
        cards: &[Card],
        now_at: HostId,
        generation: u64,
    ) -> Result<(), PlaneError> {
        self.each(cards, |plane, network, card| {
            let redirect = Redirect {
                mac: card.mac,
                now_at,
                generation,
            };
            plane.withdraw(network, redirect)
        })
    }

    /// Returns the flows of a guest through gateways of its networks. What cannot be read, or does
    /// not fit into a message, is left out.
    pub fn flows_of(&self, cards: &[Card]) -> Flows {
        let mut flows = Flows::default();
        let read = self.each(cards, |plane, network, card| {
            for (flow, gateway, state, idle) in plane.flows_of(network, card.mac)? {
                let idle_s = u32::try_from(idle.as_secs()).unwrap_or(u32::MAX);
                if !flows.add(card.number, gateway, (flow, state, idle_s)) {
                    break;
                }
            }
            Ok(())
        });
        if let Err(error) = read {
            tracing::debug!(%error, "flows through gateways are left out");
        }
        flows
    }

    /// Takes the flows of a guest that has arrived.
    pub fn add_flows(&self, cards: &[Card], flows: &Flows) -> Result<(), PlaneError> {
        self.each(cards, |plane, network, card| {
            let own = flows.of_card(card.number.into());
            let own = own.map(|(gateway, carried)| {
                let idle = Duration::from_secs(carried.idle_s.into());
                (carried.flow, gateway, carried.state, idle)
            });
            plane.add_flows(network, card.mac, &own.collect::<Vec<_>>())
        })
    }

    /// Does something for each card that is in an open network. Tries all, and returns the first
    /// error.
    fn each(
        &self,
        cards: &[Card],
        mut what: impl FnMut(&Plane, longhaul_overlay::NetworkId, &Card) -> Result<(), PlaneError>,
    ) -> Result<(), PlaneError> {
        let Some(networks) = self.get() else {
            return Ok(());
        };
        let ports = networks.ports();
        let open: BTreeMap<&str, &OpenNetwork> = ports
            .iter()
            .filter_map(|port| Some((&*port.name, port.open.as_ref().ok()?)))
            .collect();
        let mut result = Ok(());
        for card in cards {
            if let Some(network) = open.get(&*card.network) {
                result = result.and(what(&networks.plane, network.id, card));
            }
        }
        result
    }
}
