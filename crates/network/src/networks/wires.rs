//! What the paths need of the rest of the agent, and what gives datagrams to the frame plane.

use crate::plane::{Inbox, Plane};
use crate::reach::Outside;
use longhaul_protocol::HostId;
use longhaul_transport::{Datagrams, Way};
use std::sync::Arc;
use tokio::sync::mpsc;

/// Something for the driver.
#[derive(Debug)]
pub(super) enum Order {
    /// A host's datagrams take this way.
    Used(HostId, Option<Way>),
    /// Bytes for another host.
    Signal {
        to: HostId,
        via: Way,
        bytes: Vec<u8>,
    },
    /// Asks a server for a relay session with a host.
    OpenRelay { server: HostId, peer: HostId },
    /// A relay is to be reached over TCP.
    OpenTcp(HostId),
}

/// Passes orders of the paths to the driver.
pub(super) struct Wires {
    pub(super) plane: Arc<Plane>,
    pub(super) orders: mpsc::UnboundedSender<Order>,
}

impl Wires {
    fn order(&self, order: Order) {
        // Fails only when the driver has stopped.
        let _ = self.orders.send(order);
    }
}

impl Outside for Wires {
    fn signal(&mut self, to: HostId, via: Way, bytes: Vec<u8>) {
        self.order(Order::Signal { to, via, bytes });
    }

    fn open_relay(&mut self, server: HostId, peer: HostId) {
        self.order(Order::OpenRelay { server, peer });
    }

    fn open_tcp(&mut self, server: HostId) {
        self.order(Order::OpenTcp(server));
    }

    fn close_tcp(&mut self, _: HostId) {
        // The connection to the server carries its messages too.
    }

    fn seal_probe(&mut self, peer: HostId, way: Way, payload: &[u8]) -> bool {
        self.plane.seal_probe(peer, way, payload).is_ok()
    }

    fn batches(&self, peer: HostId) -> u64 {
        self.plane.batches(peer)
    }

    fn used(&mut self, peer: HostId, way: Option<Way>) {
        self.order(Order::Used(peer, way));
    }
}

/// Gives datagrams to the frame plane.
pub(super) struct Frames(pub(super) Inbox);

impl Datagrams for Frames {
    fn take(&mut self, way: &Way, datagrams: &mut [u8], stride: usize) {
        self.0.take(*way, datagrams, stride);
    }

    fn flush(&mut self) {
        self.0.flush();
    }
}
