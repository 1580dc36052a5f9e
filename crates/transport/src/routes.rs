//! Maps the peers of this host to the ways that their datagrams take now.
//!
//! QUIC knows a peer by its *peer address*, from a range that never leaves the process: 100::/64
//! (RFC 6666) on IPv6 sockets, 240.0.0.0/8 (RFC 1112, section 4) on IPv4 sockets.

#[cfg(test)]
mod tests;

use crate::endpoint::canonical;
use longhaul_paths::{Route, SocketId};
use longhaul_protocol::HostId;
use longhaul_realm::protocol::SessionId;
use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};

/// The way on which datagrams travel to a peer, or came from it.
pub type Way = Route;

/// The maximum number of addresses from which a peer's datagrams are known to come.
pub const ARRIVALS_PER_PEER_MAX: usize = 64;
/// Hosts that wait for a way.
const WISHES_WAITING: usize = 64;
/// The port of all peer addresses.
const PEER_PORT: u16 = 1;
/// The network of peer addresses in IPv6: packets to it are discarded (RFC 6666).
const IPV6_RANGE: u128 = 0x0100 << 112;
/// The network of peer addresses in IPv4: reserved (RFC 1112, section 4).
const IPV4_RANGE: u8 = 240;

/// How datagrams reach a relay.
#[derive(Debug, Clone)]
pub enum RelayLeg {
    /// Over UDP, from the main socket.
    Udp(SocketAddr),
    /// Over TCP: whole relayed datagrams, with their headers, for the task that owns the
    /// connection. What it receives goes to [`Endpoint::relayed`](crate::Endpoint::relayed).
    Tcp(mpsc::Sender<Vec<u8>>),
}

/// The ways to all peers. Cheap to clone; all clones are one.
#[derive(Debug, Clone)]
pub struct Routes(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    ipv6: bool,
    /// Without any peer, nothing is looked up.
    any: AtomicBool,
    tables: RwLock<Tables>,
    /// Where hosts go that are dialled and have no way.
    wishes: Mutex<Option<mpsc::Sender<HostId>>>,
    /// Is notified when a peer's way changes.
    ways_changed: Notify,
}

#[derive(Debug, Default)]
struct Tables {
    last_number: u64,
    peers: HashMap<HostId, PeerRoutes>,
    numbers: HashMap<u64, HostId>,
    arrivals: HashMap<(SocketId, SocketAddr), HostId>,
    servers: HashMap<HostId, RelayLeg>,
    servers_at: HashMap<SocketAddr, HostId>,
    sessions: HashMap<(HostId, SessionId), HostId>,
}

#[derive(Debug)]
struct PeerRoutes {
    address: SocketAddr,
    way: Option<Way>,
    arrivals: HashSet<(SocketId, SocketAddr)>,
    sessions: HashMap<HostId, SessionId>,
    /// Batches of QUIC's datagrams that were to be sent.
    batches: AtomicU64,
}

/// Where datagrams to an address go.
#[derive(Debug, Clone)]
pub(crate) enum Departure {
    /// To this address.
    Plain,
    /// To a peer itself.
    Direct(SocketId, SocketAddr),
    /// To a relay, with this session.
    Relayed(RelayLeg, SessionId),
    /// To a peer without a way.
    Nowhere,
}

/// What is known of the source of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Arrival {
    /// The source as QUIC gets it.
    pub(crate) address: SocketAddr,
    /// Whether it is a peer address.
    pub(crate) is_peer: bool,
    /// The relay at that address.
    pub(crate) server: Option<HostId>,
}

impl Routes {
    /// Begins without peers. `ipv6`: the family of the main socket.
    pub(crate) fn new(ipv6: bool) -> Self {
        Self(Arc::new(Shared {
            ipv6,
            any: AtomicBool::new(false),
            tables: RwLock::default(),
            wishes: Mutex::default(),
            ways_changed: Notify::new(),
        }))
    }

    /// Returns the address by which QUIC knows a peer. The first call makes the host a peer.
    pub fn peer_address(&self, peer: HostId) -> SocketAddr {
        self.0.any.store(true, Ordering::Release);
        let mut tables = self.write();
        if let Some(known) = tables.peers.get(&peer) {
            return known.address;
        }
        let number = loop {
            tables.last_number = match self.0.ipv6 {
                true => tables.last_number + 1,
                false => tables.last_number % 0xff_ffff + 1,
            };
            if !tables.numbers.contains_key(&tables.last_number) {
                break tables.last_number;
            }
        };
        let address = self.0.address(number);
        tables.numbers.insert(number, peer);
        let routes = PeerRoutes {
            address,
            way: None,
            arrivals: HashSet::new(),
            sessions: HashMap::new(),
            batches: AtomicU64::new(0),
        };
        tables.peers.insert(peer, routes);
        address
    }

    /// Returns the peer of a peer address.
    pub fn peer_of(&self, address: SocketAddr) -> Option<HostId> {
        let number = peer_number(address)?;
        self.read().numbers.get(&number).copied()
    }

    /// Returns whether a host is a peer.
    pub fn is_peer(&self, host: HostId) -> bool {
        self.read().peers.contains_key(&host)
    }

    /// Forgets a peer with all that is known of it.
    pub fn forget(&self, peer: HostId) {
        let mut tables = self.write();
        let Some(known) = tables.peers.remove(&peer) else {
            return;
        };
        if let Some(number) = peer_number(known.address) {
            tables.numbers.remove(&number);
        }
        for arrival in &known.arrivals {
            tables.arrivals.remove(arrival);
        }
        for session in known.sessions {
            tables.sessions.remove(&session);
        }
    }

    /// Sets the way on which datagrams go to a peer from now on; on none, they are dropped.
    pub fn set_way(&self, peer: HostId, way: Option<Way>) {
        self.peer_address(peer);
        let mut tables = self.write();
        if let Some(known) = tables.peers.get_mut(&peer) {
            known.way = way;
        }
        drop(tables);
        self.0.ways_changed.notify_waiters();
    }

    /// Returns where the hosts arrive from now on that are dialled, and have neither a way nor an
    /// address. Who takes them finds ways to them.
    pub fn wishes(&self) -> mpsc::Receiver<HostId> {
        let (sender, receiver) = mpsc::channel(WISHES_WAITING);
        let mut wishes = self.0.wishes.lock().unwrap_or_else(PoisonError::into_inner);
        *wishes = Some(sender);
        receiver
    }

    /// Asks for a way to a host, and waits for it. Returns false if nobody finds one in this time.
    pub(crate) async fn find_way(&self, host: HostId, within: Duration) -> bool {
        let sender = {
            let wishes = self.0.wishes.lock();
            wishes.unwrap_or_else(PoisonError::into_inner).clone()
        };
        let Some(sender) = sender else {
            return false;
        };
        // With a full queue others wait too: the host may be among them.
        let _ = sender.try_send(host);
        let found = async {
            loop {
                let changed = self.0.ways_changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                if self.way(host).is_some() {
                    return;
                }
                changed.await;
            }
        };
        tokio::time::timeout(within, found).await.is_ok()
    }

    /// Returns the way on which datagrams go to a peer.
    pub fn way(&self, peer: HostId) -> Option<Way> {
        self.read().peers.get(&peer).and_then(|known| known.way)
    }

    /// Notes that datagrams from this address come from a peer. Call it only for an authentic
    /// datagram. Returns false if the peer has too many addresses.
    pub fn add_arrival(&self, peer: HostId, socket: SocketId, address: SocketAddr) -> bool {
        self.peer_address(peer);
        let arrival = (socket, canonical(address));
        let mut guard = self.write();
        let tables = &mut *guard;
        let Some(known) = tables.peers.get_mut(&peer) else {
            return false;
        };
        if known.arrivals.len() >= ARRIVALS_PER_PEER_MAX && !known.arrivals.contains(&arrival) {
            return false;
        }
        known.arrivals.insert(arrival);
        if let Some(other) = tables.arrivals.insert(arrival, peer)
            && other != peer
            && let Some(other) = tables.peers.get_mut(&other)
        {
            other.arrivals.remove(&arrival);
        }
        true
    }

    /// Forgets that datagrams from this address come from a peer.
    pub fn remove_arrival(&self, socket: SocketId, address: SocketAddr) {
        let arrival = (socket, canonical(address));
        let mut tables = self.write();
        if let Some(peer) = tables.arrivals.remove(&arrival)
            && let Some(known) = tables.peers.get_mut(&peer)
        {
            known.arrivals.remove(&arrival);
        }
    }

    /// Forgets all arrivals at a socket.
    pub(crate) fn socket_closed(&self, socket: SocketId) {
        let mut tables = self.write();
        tables.arrivals.retain(|(at, _), _| *at != socket);
        for known in tables.peers.values_mut() {
            known.arrivals.retain(|(at, _)| *at != socket);
        }
    }

    /// Sets how a relay is reached; `None`: not at all now.
    pub fn set_server(&self, server: HostId, leg: Option<RelayLeg>) {
        let mut tables = self.write();
        tables.servers_at.retain(|_, at| *at != server);
        match leg {
            Some(RelayLeg::Udp(address)) => {
                let address = canonical(address);
                tables.servers_at.insert(address, server);
                tables.servers.insert(server, RelayLeg::Udp(address));
            }
            Some(leg) => {
                tables.servers.insert(server, leg);
            }
            None => {
                tables.servers.remove(&server);
            }
        }
    }

    /// Notes the session of a peer at a relay.
    pub fn open_session(&self, server: HostId, session: SessionId, peer: HostId) {
        self.peer_address(peer);
        let mut guard = self.write();
        let tables = &mut *guard;
        if let Some(known) = tables.peers.get_mut(&peer)
            && let Some(old) = known.sessions.insert(server, session)
        {
            tables.sessions.remove(&(server, old));
        }
        if let Some(other) = tables.sessions.insert((server, session), peer)
            && other != peer
            && let Some(other) = tables.peers.get_mut(&other)
        {
            other.sessions.remove(&server);
        }
    }

    /// Forgets a session. Returns its peer.
    pub fn close_session(&self, server: HostId, session: SessionId) -> Option<HostId> {
        let mut tables = self.write();
        let peer = tables.sessions.remove(&(server, session))?;
        if let Some(known) = tables.peers.get_mut(&peer) {
            known.sessions.remove(&server);
        }
        Some(peer)
    }

    /// Returns the session of a peer at a relay.
    pub fn session(&self, server: HostId, peer: HostId) -> Option<SessionId> {
        let tables = self.read();
        tables.peers.get(&peer)?.sessions.get(&server).copied()
    }

    /// Returns where datagrams to an address go.
    pub(crate) fn departure(&self, to: SocketAddr) -> Departure {
        let Some(number) = peer_number(to) else {
            return Departure::Plain;
        };
        let tables = self.read();
        let peer = tables.numbers.get(&number);
        match peer.and_then(|peer| tables.peers.get(peer)) {
            Some(peer) => {
                peer.batches.fetch_add(1, Ordering::Relaxed);
                tables.departure_of(peer, peer.way)
            }
            None => Departure::Nowhere,
        }
    }

    /// Returns a number that grows while QUIC sends to a peer.
    pub fn batches(&self, peer: HostId) -> u64 {
        let tables = self.read();
        let peer = tables.peers.get(&peer);
        peer.map_or(0, |peer| peer.batches.load(Ordering::Relaxed))
    }

    /// Returns where datagrams to a peer go on a way.
    pub(crate) fn departure_on(&self, peer: HostId, way: Way) -> Departure {
        if let Way::Direct { socket, address } = way {
            return Departure::Direct(socket, address);
        }
        let tables = self.read();
        let peer = tables.peers.get(&peer);
        peer.map_or(Departure::Nowhere, |peer| {
            tables.departure_of(peer, Some(way))
        })
    }

    /// Returns what is known of a source; `None` if nothing may come from there.
    pub(crate) fn arrival(&self, socket: SocketId, from: SocketAddr) -> Option<Arrival> {
        if peer_number(from).is_some() {
            return None;
        }
        let plain = Arrival {
            address: from,
            is_peer: false,
            server: None,
        };
        let tables = self.read();
        if !self.0.any.load(Ordering::Acquire) && tables.servers_at.is_empty() {
            return Some(plain);
        }
        let real = canonical(from);
        let server = match socket {
            SocketId::MAIN => tables.servers_at.get(&real).copied(),
            _ => None,
        };
        let peer = tables.arrivals.get(&(socket, real));
        let peer = peer.and_then(|peer| tables.peers.get(peer));
        Some(Arrival {
            address: peer.map_or(from, |peer| peer.address),
            is_peer: peer.is_some(),
            server,
        })
    }

    /// Returns the peer address of the peer of a session.
    pub(crate) fn relayed_from(&self, server: HostId, session: SessionId) -> Option<SocketAddr> {
        let tables = self.read();
        let peer = tables.sessions.get(&(server, session))?;
        tables.peers.get(peer).map(|peer| peer.address)
    }

    fn read(&self) -> RwLockReadGuard<'_, Tables> {
        self.0.tables.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Tables> {
        let tables = self.0.tables.write();
        tables.unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tables {
    fn departure_of(&self, peer: &PeerRoutes, way: Option<Way>) -> Departure {
        match way {
            Some(Way::Direct { socket, address }) => Departure::Direct(socket, address),
            Some(Way::Relayed { server }) => {
                let leg = self.servers.get(&server).cloned();
                match (leg, peer.sessions.get(&server)) {
                    (Some(leg), Some(session)) => Departure::Relayed(leg, *session),
                    _ => Departure::Nowhere,
                }
            }
            None => Departure::Nowhere,
        }
    }
}

impl Shared {
    fn address(&self, number: u64) -> SocketAddr {
        let ip: IpAddr = if self.ipv6 {
            Ipv6Addr::from_bits(IPV6_RANGE | u128::from(number)).into()
        } else {
            let [.., a, b, c] = number.to_be_bytes();
            Ipv4Addr::new(IPV4_RANGE, a, b, c).into()
        };
        SocketAddr::new(ip, PEER_PORT)
    }
}

/// Returns whether an address is from the range of peer addresses, and which one.
pub(crate) fn peer_number(address: SocketAddr) -> Option<u64> {
    match address.ip().to_canonical() {
        IpAddr::V6(ip) => {
            let bits = ip.to_bits();
            (bits >> 64 == IPV6_RANGE >> 64).then_some(bits as u64)
        }
        IpAddr::V4(ip) => {
            let [first, a, b, c] = ip.octets();
            (first == IPV4_RANGE).then(|| u64::from_be_bytes([0, 0, 0, 0, 0, a, b, c]))
        }
    }
}
