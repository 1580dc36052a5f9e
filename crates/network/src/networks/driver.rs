//! Connects realm, paths and frame plane: one task that takes what each of them says, and tells the
//! others.

use super::connections::Connections;
use super::gateways::{Gateways, World};
use super::port_mapping;
use super::ports::{NetworkStatus, OpenNetwork, Ports};
use super::servers::{Resolved, Servers};
use super::wires::{Frames, Order, Wires};
use super::{Networks, Tasks};
use crate::member::{self, Event, Handle, MemberError, Status, Stored};
use crate::plane::{Plane, PlaneConfig, PlaneError, PlaneEvent, PlaneOutputs};
use crate::reach::{self, Input, Reach};
use longhaul_paths::Tuning;
use longhaul_protocol::HostId;
use longhaul_realm::member::{Failure, Input as Ask};
use longhaul_realm::membership::Standing;
use longhaul_realm::protocol::{RefusedCode, Target};
use longhaul_transport::{Endpoint, Way};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// Events of the member that wait.
const EVENTS_WAITING: usize = 4096;
/// Answers of the name service that wait.
const RESOLVED_WAITING: usize = 64;
/// How often what has failed is tried again.
const TICK: Duration = Duration::from_millis(500);
/// The first and the longest wait for another introduction.
const RETRY: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));
/// The wait after which a host that shares no network is not tried again.
const GIVE_UP: Duration = Duration::from_secs(16);
/// When a host that shares a network and to which there is no way is asked for again, whatever has
/// become of the last introduction.
const REMIND: Duration = Duration::from_secs(30);
/// Most introductions that are asked for at once.
const INTRODUCTIONS_MAX: usize = 64;
/// How long a relay that refuses is left alone.
const RELAY_PAUSE: Duration = Duration::from_secs(5);

/// Takes the networks that are open here, by their names.
pub type Opened = Box<dyn Fn(BTreeMap<String, OpenNetwork>) + Send + Sync>;

/// What the networks of a host need.
pub struct Options {
    /// This host's connections.
    pub endpoint: Endpoint,
    /// The state folder, where the member file is.
    pub folder: PathBuf,
    /// What the file has.
    pub stored: Stored,
    /// Name and version of the program, for Hellos.
    pub software: String,
    /// Addresses at which this host can be reached, besides those of its interfaces.
    pub configured: Vec<SocketAddr>,
    /// Whether the router of this host's site is asked for an open port.
    pub port_mapping: bool,
    /// Times and limits of the frame plane.
    pub plane: PlaneConfig,
    /// Is called when networks are opened or closed.
    pub opened: Opened,
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("endpoint", &self.endpoint)
            .field("folder", &self.folder)
            .finish_non_exhaustive()
    }
}

/// Why the networks of a host do not start.
#[derive(Debug, thiserror::Error)]
pub enum NetworksError {
    /// Its side of the realm.
    #[error(transparent)]
    Member(#[from] MemberError),
    /// The frame plane.
    #[error(transparent)]
    Plane(#[from] PlaneError),
    /// The system.
    #[error("{0}")]
    System(#[from] std::io::Error),
}

/// Starts the networks of a host. Requires a tokio runtime.
pub fn start(options: Options) -> Result<Networks, NetworksError> {
    let Options {
        endpoint,
        folder,
        stored,
        software,
        configured,
        port_mapping,
        plane,
        opened,
    } = options;
    let own = endpoint.host_id();
    let (plane, inbox, outputs) = Plane::new(plane, endpoint.plane_socket(), own)?;
    let plane = Arc::new(plane);
    let (orders, ordered) = mpsc::unbounded_channel();
    let wires = Wires {
        plane: plane.clone(),
        orders,
    };
    let config = reach::Config {
        servers: Vec::new(),
        configured,
        may_search: true,
        tuning: Tuning::default(),
    };
    let reach = reach::start(endpoint.clone(), config, wires)?;
    let (events, happened) = mpsc::channel(EVENTS_WAITING);
    let (member, member_task) = member::start(member::Options {
        endpoint: endpoint.clone(),
        folder,
        stored,
        software,
        events: Some(events),
    })?;
    endpoint.set_datagrams(Some(Box::new(Frames(inbox))));
    let connections = Connections::new(endpoint.clone(), plane.clone(), member.clone());
    let (resolved, answers) = mpsc::channel(RESOLVED_WAITING);
    let (shown, ports) = watch::channel(Arc::default());
    let driver = Driver {
        own,
        wishes: endpoint.routes().wishes(),
        status: member.status(),
        member: member.clone(),
        reach: reach.clone(),
        plane: plane.clone(),
        connections: connections.clone(),
        servers: Servers::new(endpoint.clone(), reach.clone(), resolved),
        ports: Ports::new(plane.clone(), own),
        gateways: Gateways::new(plane.clone(), own),
        peers: BTreeMap::new(),
        requests: BTreeMap::new(),
        next_request: 1,
        opened,
        shown,
    };
    let PlaneOutputs { events, probes } = outputs;
    let port = endpoint.local_address().map(|address| address.port());
    let port = port.ok().and_then(NonZeroU16::new).filter(|_| port_mapping);
    let mapping = port.map(|port| tokio::spawn(port_mapping::run(port, reach.clone())));
    let others = vec![
        tokio::spawn(driver.run(happened, ordered, answers)),
        tokio::spawn(pass_probes(probes, reach.clone())),
        tokio::spawn(renew_keys(events, connections.clone())),
    ];
    let others = others.into_iter().chain(mapping).collect();
    Ok(Networks {
        endpoint,
        member,
        reach,
        plane,
        connections,
        ports,
        tasks: Mutex::new(Some(Tasks {
            member: member_task,
            others,
        })),
    })
}

async fn pass_probes(mut probes: mpsc::Receiver<crate::plane::OpenedProbe>, reach: Reach) {
    while let Some(probe) = probes.recv().await {
        let crate::plane::OpenedProbe { peer, way, payload } = probe;
        reach.input(Input::Probe { peer, way, payload }).await;
    }
}

async fn renew_keys(mut events: mpsc::Receiver<PlaneEvent>, connections: Connections) {
    while let Some(event) = events.recv().await {
        if let PlaneEvent::Exhausted(host) = event {
            connections.renew(host);
        }
    }
}

/// Another host that this one is to be connected with.
#[derive(Debug)]
struct Peer {
    /// Whether it shares a network with this host; others come and go.
    shares: bool,
    /// When it is to be introduced; `None` while that is asked for, and afterwards.
    introduce_at: Option<Instant>,
    retry: Duration,
    /// When an introduction was last asked for.
    asked_at: Option<Instant>,
    has_way: watch::Sender<bool>,
    connecting: JoinHandle<()>,
}

impl Peer {
    /// Returns whether the host is to be introduced now.
    fn is_due(&self, now: Instant) -> bool {
        let forgotten = self.asked_at.is_some_and(|at| now > at + REMIND);
        let lacks_way = self.shares && !*self.has_way.borrow();
        self.introduce_at.is_some_and(|at| at <= now) || lacks_way && forgotten
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.connecting.abort();
    }
}

/// What a request to the servers is for.
#[derive(Debug, Clone, Copy)]
enum Asked {
    Introduction(HostId),
    Relay(HostId),
}

struct Driver {
    own: HostId,
    wishes: mpsc::Receiver<HostId>,
    status: watch::Receiver<Arc<Status>>,
    member: Handle,
    reach: Reach,
    plane: Arc<Plane>,
    connections: Connections,
    servers: Servers,
    ports: Ports,
    gateways: Gateways,
    peers: BTreeMap<HostId, Peer>,
    requests: BTreeMap<u32, Asked>,
    next_request: u32,
    opened: Opened,
    shown: watch::Sender<Arc<Vec<NetworkStatus>>>,
}

impl Driver {
    async fn run(
        mut self,
        mut events: mpsc::Receiver<Event>,
        mut orders: mpsc::UnboundedReceiver<Order>,
        mut answers: mpsc::Receiver<Resolved>,
    ) {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        self.follow().await;
        loop {
            tokio::select! {
                Some(event) = events.recv() => self.event(event).await,
                Some(order) = orders.recv() => self.order(order).await,
                Some(resolved) = answers.recv() => self.servers.resolved(resolved).await,
                Some(host) = self.wishes.recv() => self.wish(host),
                changed = self.status.changed() => match changed {
                    Ok(()) => self.follow().await,
                    // The member has stopped.
                    Err(_) => return,
                },
                _ = tick.tick() => {
                    let ports = self.ports.retry().await;
                    if self.follow_gateways().await || ports {
                        self.share().await;
                    }
                }
            }
            self.introduce().await;
        }
    }

    /// Follows the member's view of its realm.
    async fn follow(&mut self) {
        let status = self.status.borrow_and_update().clone();
        if self.servers.follow(&status.servers).await {
            // A server that is new here does not know whom this host is connected with.
            let now = Instant::now();
            for peer in self.peers.values_mut().filter(|peer| peer.shares) {
                peer.introduce_at = Some(now);
            }
        }
        let networks = match status.standing {
            Standing::Member(_) | Standing::Expired(_) => &status.networks[..],
            Standing::Stranger(_) => &[],
        };
        // Before the first ruleset nothing is known.
        if status.version == 0 {
            return;
        }
        let ports = self.ports.follow(networks).await;
        if self.follow_gateways().await || ports {
            self.share().await;
        }
    }

    /// Follows the networks that are open and the ways to other hosts. Returns whether anything has
    /// changed of gateways.
    async fn follow_gateways(&mut self) -> bool {
        let status = self.status.borrow().clone();
        if status.version == 0 {
            return false;
        }
        let ways = self.reach.status().borrow().clone();
        let (open, closed) = self.ports.open_and_closed();
        let world = World {
            members: &status.members,
            ways: &ways,
        };
        self.gateways.follow((&open, &closed), world).await
    }

    /// The networks here have changed: tells who has to know.
    async fn share(&mut self) {
        let members = self.status.borrow().members.clone();
        let gateways = &self.gateways;
        let status = self
            .ports
            .status(|id, entry| gateways.status(id, entry, &members));
        let open = status.iter().filter_map(|port| {
            let open = port.open.as_ref().ok()?;
            Some((port.name.clone(), open.clone()))
        });
        (self.opened)(open.collect());
        self.shown.send_replace(Arc::new(status));
        self.member.input(Ask::Networks(self.ports.ids())).await;
        let shares: BTreeSet<HostId> = self.ports.peers().collect();
        for host in &shares {
            self.peer(*host).shares = true;
        }
        let leaves = |(host, peer): (&HostId, &Peer)| {
            (peer.shares && !shares.contains(host)).then_some(*host)
        };
        let gone: Vec<HostId> = self.peers.iter().filter_map(leaves).collect();
        for host in gone {
            self.forget(host).await;
        }
    }

    /// Returns a peer, a new one if it is none yet.
    fn peer(&mut self, host: HostId) -> &mut Peer {
        let connections = &self.connections;
        self.peers.entry(host).or_insert_with(|| {
            let (has_way, ways) = watch::channel(false);
            Peer {
                shares: false,
                introduce_at: Some(Instant::now()),
                retry: RETRY.0,
                asked_at: None,
                has_way,
                connecting: tokio::spawn(connections.clone().keep(host, ways)),
            }
        })
    }

    async fn forget(&mut self, host: HostId) {
        self.peers.remove(&host);
        self.connections.forget(host);
        self.reach.input(Input::Forget(host)).await;
    }

    fn is_member(&self, host: HostId) -> bool {
        let status = self.status.borrow();
        host != self.own && status.members.iter().any(|member| member.id == host)
    }

    /// Someone dials a host without an address.
    fn wish(&mut self, host: HostId) {
        if self.is_member(host) {
            let now = Instant::now();
            self.peer(host).introduce_at = Some(now);
        }
    }

    fn request(&mut self, asked: Asked) -> u32 {
        let request = self.next_request;
        self.next_request = self.next_request.wrapping_add(1).max(1);
        self.requests.insert(request, asked);
        request
    }

    /// Asks for the introductions that are due.
    async fn introduce(&mut self) {
        if !self.servers.is_registered() {
            return;
        }
        let now = Instant::now();
        let waiting = self.requests.values();
        let waiting = waiting.filter(|asked| matches!(asked, Asked::Introduction(_)));
        let room = INTRODUCTIONS_MAX.saturating_sub(waiting.count());
        let due = self
            .peers
            .iter_mut()
            .filter(|(_, peer)| peer.is_due(now))
            .take(room);
        let due: Vec<HostId> = due
            .map(|(host, peer)| {
                (peer.introduce_at, peer.asked_at) = (None, Some(now));
                *host
            })
            .collect();
        for host in due {
            let request = self.request(Asked::Introduction(host));
            let target = Target::Id(host);
            self.member.input(Ask::Introduce(request, target)).await;
        }
    }

    async fn order(&mut self, order: Order) {
        match order {
            // The host may have been cut meanwhile.
            Order::Used(host, _) if !self.is_member(host) => {}
            Order::Used(host, way) => {
                if let Err(error) = self.plane.set_way(host, way) {
                    tracing::warn!(peer = %host, %error, "frames cannot be sent to the host");
                }
                self.peer(host).has_way.send_replace(way.is_some());
            }
            Order::Signal { to, via, bytes } => {
                let signal = match via {
                    Way::Direct { .. } => Ask::SignalDirect(to, bytes),
                    Way::Relayed { .. } => Ask::Signal(to, bytes),
                };
                self.member.input(signal).await;
            }
            Order::OpenRelay { server, peer } => {
                let request = self.request(Asked::Relay(server));
                let ask = Ask::OpenRelay {
                    request,
                    server,
                    peer,
                };
                self.member.input(ask).await;
            }
            Order::OpenTcp(server) => self.servers.open_tcp(server).await,
        }
    }

    async fn event(&mut self, event: Event) {
        match event {
            // The status has it.
            Event::Changed | Event::Lease(..) => {}
            Event::ServerUp(server, leg) => {
                self.follow().await;
                self.servers.up(server, leg).await;
            }
            Event::ServerDown(server) => self.servers.down(server).await,
            Event::Introduced {
                request,
                server,
                peer,
                ..
            } => {
                if let Some(request) = request {
                    self.requests.remove(&request);
                }
                let host = peer.id;
                let known = self.peer(host);
                (known.introduce_at, known.retry) = (None, RETRY.0);
                self.reach
                    .input(Input::Present {
                        peer: host,
                        server,
                        present: true,
                    })
                    .await;
            }
            Event::Signal(from, bytes) => {
                self.peer(from);
                self.reach.input(Input::Signal { from, bytes }).await;
            }
            Event::RelayOpened {
                request,
                server,
                session,
                peer,
                ..
            } => {
                if let Some(request) = request {
                    self.requests.remove(&request);
                }
                self.peer(peer);
                self.reach
                    .input(Input::RelayOpened {
                        server,
                        session,
                        peer,
                    })
                    .await;
            }
            Event::RelayClosed(server, session) => {
                let closed = Input::RelayClosed { server, session };
                self.reach.input(closed).await;
            }
            Event::Failed(request, failure) => self.failed(request, &failure).await,
            Event::Cut(host, _) => self.forget(host).await,
        }
    }

    async fn failed(&mut self, request: u32, failure: &Failure) {
        match self.requests.remove(&request) {
            Some(Asked::Introduction(host)) => {
                tracing::debug!(peer = %host, %failure, "not introduced");
                if *failure == Failure::NoMember {
                    return;
                }
                let gives_up = |peer: &Peer| !peer.shares && peer.retry >= GIVE_UP;
                if self.peers.get(&host).is_some_and(gives_up) {
                    self.forget(host).await;
                } else if let Some(peer) = self.peers.get_mut(&host) {
                    peer.introduce_at = Some(Instant::now() + peer.retry);
                    peer.retry = (peer.retry * 2).min(RETRY.1);
                }
            }
            Some(Asked::Relay(server)) => {
                tracing::debug!(%server, %failure, "no relay session");
                if let Failure::Refused(refused) = failure
                    && refused.code == RefusedCode::Limit
                {
                    let wait = RELAY_PAUSE;
                    self.reach.input(Input::RelayRefused { server, wait }).await;
                }
            }
            None => {}
        }
    }
}
