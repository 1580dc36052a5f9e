//! Owns the state machine with its connections: passes inputs in, and carries its actions out.

use crate::store::Order;
use longhaul_protocol::wire::Message;
use longhaul_realm::Now;
use longhaul_realm::server::{Action, ConnId, Input, Server};
use longhaul_realm::wire::encode;
use longhaul_transport::Relay;
use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc as threads};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{Notify, mpsc};

/// Messages that wait for one connection. One that is further behind is ended.
const MESSAGES_WAITING: usize = 256;
/// The network of the addresses that stand for connections over TCP: no packet comes from it
/// (RFC 6666).
const STAND_INS: u128 = 0x0100 << 112;

/// What a connection is to do.
#[derive(Debug)]
pub(crate) enum Out {
    /// Send a message.
    Message(Vec<u8>),
    /// End, after what was sent.
    Close(String),
}

/// A connection of the state machine.
pub(crate) struct Seat {
    pub(crate) conn: ConnId,
    /// What is to be sent there.
    pub(crate) out: mpsc::Receiver<Out>,
    /// What stands for its address, if its relayed datagrams come over TCP.
    pub(crate) stand_in: Option<SocketAddr>,
}

struct Core {
    server: Server,
    conns: HashMap<ConnId, mpsc::Sender<Out>>,
    /// Connections over TCP, by the addresses that stand for them.
    legs: HashMap<SocketAddr, mpsc::Sender<Vec<u8>>>,
    writes: Option<threads::Sender<Order>>,
    next: u64,
}

/// The state machine, for all tasks.
pub(crate) struct Shared {
    core: Mutex<Core>,
    start: Instant,
    /// Told when the next time-out, or the list of servers, may have changed.
    pub(crate) changed: Notify,
}

impl Shared {
    pub(crate) fn new(server: Server, start: Instant) -> Arc<Self> {
        Arc::new(Self {
            core: Mutex::new(Core {
                server,
                conns: HashMap::new(),
                legs: HashMap::new(),
                writes: None,
                next: 1,
            }),
            start,
            changed: Notify::new(),
        })
    }

    /// Takes what writes records; `None` at the end.
    pub(crate) fn set_writes(&self, writes: Option<threads::Sender<Order>>) {
        self.lock().writes = writes;
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the time.
    pub(crate) fn now(&self) -> Now {
        now(self.start)
    }

    /// Makes a connection known, before its first input. `datagrams` take what is relayed to it,
    /// if that travels in the connection.
    pub(crate) fn enter(&self, datagrams: Option<mpsc::Sender<Vec<u8>>>) -> Seat {
        let (sender, out) = mpsc::channel(MESSAGES_WAITING);
        let mut core = self.lock();
        let conn = ConnId(core.next);
        core.next += 1;
        core.conns.insert(conn, sender);
        let stand_in = datagrams.map(|datagrams| {
            let address = stand_in(conn);
            core.legs.insert(address, datagrams);
            address
        });
        Seat {
            conn,
            out,
            stand_in,
        }
    }

    /// Forgets a connection.
    pub(crate) fn leave(&self, conn: ConnId) {
        let mut core = self.lock();
        core.conns.remove(&conn);
        core.legs.remove(&stand_in(conn));
        core.server.handle(self.now(), Input::Closed(conn));
        self.act(&mut core);
    }

    /// Ends all connections.
    pub(crate) fn end_all(&self, reason: &str) {
        let mut core = self.lock();
        let conns: Vec<ConnId> = core.conns.keys().copied().collect();
        for conn in conns {
            core.put(conn, Out::Close(reason.to_owned()));
        }
    }

    /// Passes an input in, and carries out what follows.
    pub(crate) fn input(&self, input: Input) {
        let mut core = self.lock();
        core.server.handle(self.now(), input);
        self.act(&mut core);
    }

    /// Reads from the state machine.
    pub(crate) fn read<T>(&self, read: impl FnOnce(&Server) -> T) -> T {
        read(&self.lock().server)
    }

    fn act(&self, core: &mut Core) {
        while let Some(action) = core.server.next_action() {
            match action {
                Action::Send(conn, message) => core.send(conn, &message),
                Action::SendBroker(conn, message) => core.send(conn, &message),
                Action::Close(conn, reason) => core.put(conn, Out::Close(reason)),
                Action::Persist(write, record) => {
                    let writes = core.writes.as_ref();
                    if writes.is_none_or(|writes| writes.send((write, record)).is_err()) {
                        core.server.handle(self.now(), Input::PersistFailed(write));
                    }
                }
            }
        }
        self.changed.notify_waiters();
    }

    /// Judges a datagram that came over TCP. Returns where the UDP socket sends it.
    pub(crate) fn relayed(&self, from: SocketAddr, datagram: &[u8]) -> Option<SocketAddr> {
        self.lock().judge(self.now(), from, datagram)
    }
}

impl Core {
    fn send<M: Message>(&mut self, conn: ConnId, message: &M) {
        match encode(message) {
            Ok(bytes) => self.put(conn, Out::Message(bytes)),
            Err(error) => tracing::error!(%error, "a message was not sent"),
        }
    }

    fn put(&mut self, conn: ConnId, out: Out) {
        let Some(sender) = self.conns.get(&conn) else {
            return;
        };
        if sender.try_send(out).is_err() {
            // The task of the connection sees the end of its queue, and closes it.
            tracing::info!(conn = conn.0, "a connection takes no messages: ended");
            self.conns.remove(&conn);
        }
    }

    fn judge(&mut self, now: Now, from: SocketAddr, datagram: &[u8]) -> Option<SocketAddr> {
        let to = self.server.forward(now, from, datagram)?;
        let Some(leg) = self.legs.get(&to) else {
            return Some(to).filter(|to| !stands_in(to));
        };
        // With a full queue it is lost, as in a router.
        let _ = leg.try_send(datagram.to_vec());
        None
    }
}

impl Relay for Shared {
    fn judge(
        &self,
        from: SocketAddr,
        datagrams: &mut dyn Iterator<Item = &[u8]>,
        towards: &mut Vec<Option<SocketAddr>>,
    ) {
        let now = self.now();
        let mut core = self.lock();
        let foreign = stands_in(&from);
        towards.extend(datagrams.map(|datagram| match foreign {
            true => None,
            false => core.judge(now, from, datagram),
        }));
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shared")
    }
}

fn stand_in(conn: ConnId) -> SocketAddr {
    let ip = Ipv6Addr::from(STAND_INS | u128::from(conn.0));
    SocketAddr::new(IpAddr::V6(ip), 1)
}

fn stands_in(address: &SocketAddr) -> bool {
    match address.ip() {
        IpAddr::V6(ip) => u128::from(ip) >> 64 == STAND_INS >> 64,
        IpAddr::V4(_) => false,
    }
}

/// Returns the time of an event.
pub(crate) fn now(start: Instant) -> Now {
    let unix = SystemTime::now().duration_since(UNIX_EPOCH);
    Now {
        steady: start.elapsed(),
        unix_s: unix.unwrap_or(Duration::ZERO).as_secs(),
    }
}
