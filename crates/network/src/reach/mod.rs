//! Owns the paths to other hosts: candidates, hole punching, relays, and which way is used
//! (`docs/paths.md`).
//!
//! One task drives the core [`longhaul_paths`] with the endpoint's socket, timers and interfaces,
//! and tells [`Routes`](longhaul_transport::Routes) which way each peer's datagrams take. What it
//! needs of others is [`Outside`]; what others tell it is an [`Input`].
//!
//! ```text
//! rendezvous:  Present, Attached, Signal, RelayOpened ..  ->  Reach  ->  signal, open_relay
//! frame plane: Probe (opened)                             ->         ->  seal_probe, used
//! ```

mod addresses;
mod driver;
pub mod probe;
pub mod signal;
mod status;

pub use driver::start;
pub use probe::{Probe, ProbeError};
pub use signal::{SIGNAL_BYTES_MAX, SignalError};
pub use status::{PeerStatus, Status};

use longhaul_paths::{ServerConfig, Tuning};
use longhaul_protocol::HostId;
use longhaul_realm::protocol::SessionId;
use longhaul_transport::Way;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// The maximum number of peers. Hosts beyond it are not reached.
pub const PEERS_MAX: usize = 4096;
/// Inputs that wait.
const INPUTS_WAITING: usize = 1024;

/// What the paths need of the rest of the agent. Nothing here may wait.
pub trait Outside: Send + 'static {
    /// Passes bytes to another host: through this server, or over the direct path, that is, on the
    /// control connection. Where that is not possible, any other way will do. At most
    /// [`SIGNAL_BYTES_MAX`] bytes.
    fn signal(&mut self, to: HostId, via: Way, bytes: Vec<u8>);

    /// Asks a server for a relay session with another host. [`Input::RelayOpened`] or
    /// [`Input::RelayRefused`] has the answer; without one it is asked again.
    fn open_relay(&mut self, server: HostId, peer: HostId);

    /// Connects to a relay over TCP. [`Input::Tcp`] has the result, also if it fails or ends.
    fn open_tcp(&mut self, server: HostId);

    /// Closes the connection to a relay over TCP.
    fn close_tcp(&mut self, server: HostId);

    /// Seals a probe (kind 7) and sends it on a way. Returns false without keys for the peer: the
    /// probe is lost then.
    fn seal_probe(&mut self, peer: HostId, way: Way, payload: &[u8]) -> bool;

    /// Returns a number that grows while frames are sent to a peer.
    fn batches(&self, peer: HostId) -> u64;

    /// A peer's datagrams take this way from now on. With the first one the peer can be connected
    /// to, which gives the keys for probes.
    fn used(&mut self, peer: HostId, way: Option<Way>);
}

/// What happens to the paths of a host.
#[derive(Debug)]
pub enum Input {
    /// The servers of this host, as they are now.
    Servers(Vec<ServerConfig>),
    /// Addresses that an operator configured for this host.
    Configured(Vec<SocketAddr>),
    /// The address that the router of this host's site maps to this host, or none any more.
    PortMapped(Option<SocketAddr>),
    /// A server has accepted this host, and is reached at this address, which is also that of its
    /// relay; or, without an address, does not know this host any more.
    Attached {
        /// The server.
        server: HostId,
        /// Its address.
        address: Option<SocketAddr>,
    },
    /// Another host is registered at a server, or not any more. The first time, it becomes a peer.
    Present {
        /// The host.
        peer: HostId,
        /// The server.
        server: HostId,
        /// Whether it is registered there.
        present: bool,
    },
    /// A host is no peer any more.
    Forget(HostId),
    /// Bytes of another host, a member of the realm.
    Signal {
        /// The host.
        from: HostId,
        /// What its `signal` was given.
        bytes: Vec<u8>,
    },
    /// A relay session is open.
    RelayOpened {
        /// The relay.
        server: HostId,
        /// The session.
        session: SessionId,
        /// The other host.
        peer: HostId,
    },
    /// A relay session is over.
    RelayClosed {
        /// The relay.
        server: HostId,
        /// The session.
        session: SessionId,
    },
    /// A relay takes no sessions or datagrams for a while.
    RelayRefused {
        /// The relay.
        server: HostId,
        /// How long.
        wait: Duration,
    },
    /// The connection to a relay over TCP is open: it takes relayed datagrams from this queue. Or
    /// it could not be opened, or has ended.
    Tcp {
        /// The relay.
        server: HostId,
        /// The queue.
        queue: Option<mpsc::Sender<Vec<u8>>>,
    },
    /// An authentic probe of a peer (kind 7) arrived.
    Probe {
        /// The peer whose keys opened it.
        peer: HostId,
        /// The way on which it came.
        way: Way,
        /// The payload.
        payload: Vec<u8>,
    },
    /// Data was sent or received. Once a peer in 200 ms is sufficient.
    Traffic {
        /// The peer.
        peer: HostId,
        /// The way on which something was sent.
        sent: Option<Way>,
        /// The way on which something authentic was received.
        received: Option<Way>,
    },
}

/// What a host begins with.
#[derive(Debug, Clone, Default)]
pub struct Config {
    /// Its servers.
    pub servers: Vec<ServerConfig>,
    /// Addresses that an operator configured for this host.
    pub configured: Vec<SocketAddr>,
    /// Whether sockets may be opened, and ports probed, for a search.
    pub may_search: bool,
    /// Timers and limits.
    pub tuning: Tuning,
}

/// The paths of a host. Cheap to clone; they end with the last clone.
#[derive(Debug, Clone)]
pub struct Reach {
    inputs: mpsc::Sender<Input>,
    status: watch::Receiver<Arc<Status>>,
}

impl Reach {
    /// Passes an input. Waits while too many others wait.
    pub async fn input(&self, input: Input) {
        // Fails only when the runtime stops: nothing is decided then.
        let _ = self.inputs.send(input).await;
    }

    /// Passes an input, from any thread. Returns false if too many wait: probes may be lost, other
    /// inputs should use [`Self::input`].
    pub fn try_input(&self, input: Input) -> bool {
        self.inputs.try_send(input).is_ok()
    }

    /// Returns how peers are reached, and its changes.
    pub fn status(&self) -> watch::Receiver<Arc<Status>> {
        self.status.clone()
    }
}
