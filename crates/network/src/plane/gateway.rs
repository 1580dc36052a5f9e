//! The gateway of a network on this host: its TAP device and thread, and what the switch knows of
//! gateways elsewhere.

use super::manage::{Open, Plane, PlaneError};
use super::network::GatewayDevice;
use super::outbound::Outbound;
use super::shared::lock;
use crate::tap::{self, Subnet, Tap, gateway_name};
use longhaul_overlay::switch::{Carried, FlowCounts, GatewayConfig, Reason};
use longhaul_overlay::{Mac, NetworkId};
use longhaul_protocol::HostId;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

/// The gateway of a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayPlan {
    /// Its MAC address.
    pub mac: Mac,
    /// Its addresses.
    pub addresses: Vec<Subnet>,
    /// Whether this host has it.
    pub here: bool,
    /// The other hosts that have it. If this host has none, new flows go to the first one.
    pub hosts: Vec<HostId>,
}

/// A gateway on this host, and what ends it.
#[derive(Debug)]
pub(super) struct OpenGateway {
    pub(super) device: Arc<GatewayDevice>,
    mac: Mac,
    addresses: Vec<Subnet>,
    /// The thread ends when this is dropped.
    stop: UnixStream,
    thread: JoinHandle<()>,
}

impl OpenGateway {
    pub(super) fn close(self, network: NetworkId) -> Result<(), PlaneError> {
        drop(self.stop);
        if self.thread.join().is_err() {
            tracing::error!(?network, "the thread of the gateway panicked");
        }
        let device = |error| PlaneError::Device { network, error };
        tap::remove(self.device.tap.name()).map_err(device)
    }
}

impl Plane {
    /// Sets the gateway of an open network, or that it has none. Makes its device if this host has
    /// it, and removes one that is not needed any more. If the device cannot be made, guests use
    /// the gateways of other hosts. Blocks for some milliseconds if a device changes.
    pub fn set_gateway(
        &self,
        network: NetworkId,
        plan: Option<&GatewayPlan>,
    ) -> Result<(), PlaneError> {
        let mut state = lock(&self.state);
        let open = state.networks.get_mut(&network);
        let open = open.ok_or(PlaneError::UnknownNetwork(network))?;
        let wanted = plan.filter(|plan| plan.here);
        let stays = |gateway: &OpenGateway| {
            wanted.is_some_and(|plan| {
                (plan.mac, &plan.addresses) == (gateway.mac, &gateway.addresses)
            })
        };
        let goes = open.gateway.take_if(|gateway| !stays(gateway));
        let mut result = Ok(());
        if let Some(goes) = goes {
            lock(&open.network.switch).remove(self.shared.now(), goes.device.port);
            self.publish(&state);
            result = goes.close(network);
        }
        let open = state.networks.get_mut(&network);
        let open = open.ok_or(PlaneError::UnknownNetwork(network))?;
        if let Some(plan) = wanted.filter(|_| open.gateway.is_none() && result.is_ok()) {
            match self.open_gateway(open, plan) {
                Ok(gateway) => open.gateway = Some(gateway),
                Err(error) => result = Err(error),
            }
        }
        let here = open.gateway.as_ref().map(|gateway| gateway.device.port);
        let config = plan.map(|plan| GatewayConfig {
            mac: plan.mac,
            addresses: plan
                .addresses
                .iter()
                .map(|subnet| subnet.address.octets())
                .collect(),
            own: self.shared.host,
            here,
            hosts: plan.hosts.clone(),
        });
        lock(&open.network.switch).set_gateway(config);
        self.publish(&state);
        result
    }

    fn open_gateway(&self, open: &Open, plan: &GatewayPlan) -> Result<OpenGateway, PlaneError> {
        let network = &open.network;
        let tap = Tap::open(&gateway_name(network.id), self.shared.config.offloads)?;
        tap::set_up_gateway(tap.name(), plan.mac, &plan.addresses, network.mtu).map_err(
            |error| PlaneError::Device {
                network: network.id,
                error,
            },
        )?;
        let (stop, stopped) = UnixStream::pair().map_err(PlaneError::System)?;
        let config = self.shared.config.local_port;
        let port = lock(&network.switch).add_gateway(config)?;
        let device = Arc::new(GatewayDevice { tap, port });
        let outbound = Outbound::new(self.shared.clone(), network.clone(), Some(device.clone()));
        let thread = std::thread::Builder::new()
            .name("plane-gateway".to_owned())
            .spawn(move || outbound.run(&stopped));
        let thread = thread.map_err(|error: io::Error| {
            lock(&network.switch).remove(self.shared.now(), port);
            PlaneError::System(error)
        })?;
        Ok(OpenGateway {
            device,
            mac: plan.mac,
            addresses: plan.addresses.clone(),
            stop,
            thread,
        })
    }

    /// Returns the flows of a guest through gateways, which move along with it.
    pub fn flows_of(&self, network: NetworkId, mac: Mac) -> Result<Vec<Carried>, PlaneError> {
        let view = self.view(network)?;
        Ok(lock(&view.network.switch).flows_of(self.shared.now(), mac))
    }

    /// Returns how many flows a network's switch remembers, and how many frames it dropped that
    /// pretended to come from the gateway.
    pub fn gateway_counts(&self, network: NetworkId) -> Result<(FlowCounts, u64), PlaneError> {
        let view = self.view(network)?;
        let switch = lock(&view.network.switch);
        let spoofed = switch.counters().not_forwarded(Reason::GatewaySpoofed);
        Ok((switch.flow_counts(), spoofed))
    }

    /// Adds the flows of a guest that has come from another host.
    pub fn add_flows(
        &self,
        network: NetworkId,
        mac: Mac,
        flows: &[Carried],
    ) -> Result<(), PlaneError> {
        let view = self.view(network)?;
        lock(&view.network.switch).add_flows(self.shared.now(), mac, flows);
        Ok(())
    }
}
