//! What all threads of the frame plane share: tables that are replaced as a whole, and counters.

use super::config::PlaneConfig;
use super::event::{OpenedProbe, PlaneEvent};
use super::network::{GatewayDevice, Network};
use super::peer::Peer;
use super::socket::Outlet;
use super::status::PlaneCounters;
use super::timer::Alarm;
use longhaul_overlay::NetworkId;
use longhaul_overlay::switch::PortId;
use longhaul_protocol::HostId;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Locks; a panic of another thread leaves nothing behind that is worse than a lost frame.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A network, and its members by their ports.
#[derive(Debug)]
pub(super) struct View {
    pub(super) network: Arc<Network>,
    /// The device of its gateway, if this host has it.
    pub(super) gateway: Option<Arc<GatewayDevice>>,
    /// Members other than this host; `None` if they are no peers.
    pub(super) members: Vec<(PortId, HostId, Option<Arc<Peer>>)>,
}

impl View {
    /// Returns the port of a member.
    pub(super) fn port_of(&self, host: HostId) -> Option<PortId> {
        let member = self.members.iter().find(|(_, other, _)| *other == host);
        member.map(|(port, _, _)| *port)
    }

    /// Returns the peer behind a port, if there is one.
    pub(super) fn peer_behind(&self, port: PortId) -> Option<&Arc<Peer>> {
        let member = self.members.iter().find(|(other, _, _)| *other == port);
        member.and_then(|(_, _, peer)| peer.as_ref())
    }

    /// Returns the peer of a member.
    pub(super) fn peer_of(&self, host: HostId) -> Option<&Arc<Peer>> {
        let member = self.members.iter().find(|(_, other, _)| *other == host);
        member.and_then(|(_, _, peer)| peer.as_ref())
    }
}

/// All peers and networks at one time.
#[derive(Debug, Default)]
pub(super) struct Tables {
    /// Peers by the ids of the keys that they seal with.
    pub(super) keys: HashMap<u32, Arc<Peer>>,
    pub(super) peers: HashMap<HostId, Arc<Peer>>,
    pub(super) networks: HashMap<NetworkId, Arc<View>>,
}

/// What a thread knows of the tables.
#[derive(Debug)]
pub(super) struct Snapshot {
    generation: u64,
    pub(super) tables: Arc<Tables>,
}

impl Snapshot {
    pub(super) fn new(shared: &Shared) -> Self {
        Self {
            generation: shared.generation.load(Ordering::Acquire),
            tables: shared.tables(),
        }
    }

    /// Takes over what has changed. Returns whether anything has.
    #[inline]
    pub(super) fn refresh(&mut self, shared: &Shared) -> bool {
        if shared.generation.load(Ordering::Acquire) == self.generation {
            return false;
        }
        *self = Self::new(shared);
        true
    }
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) unknown_keys: AtomicU64,
    pub(super) foreign: AtomicU64,
    pub(super) not_connected: AtomicU64,
    pub(super) full: AtomicU64,
    pub(super) unsent: AtomicU64,
    pub(super) uncuttable: AtomicU64,
    pub(super) batches: AtomicU64,
    pub(super) merged: AtomicU64,
    pub(super) segments: AtomicU64,
    pub(super) reports_lost: AtomicU64,
}

pub(super) fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

pub(super) fn count(counter: &AtomicU64) {
    add(counter, 1);
}

pub(super) struct Shared {
    pub(super) config: PlaneConfig,
    pub(super) host: HostId,
    pub(super) outlet: Box<dyn Outlet>,
    start: Instant,
    generation: AtomicU64,
    tables: Mutex<Arc<Tables>>,
    events: mpsc::Sender<PlaneEvent>,
    probes: mpsc::Sender<OpenedProbe>,
    pub(super) alarm: Alarm,
    pub(super) counters: Counters,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("host", &self.host).finish()
    }
}

impl Shared {
    pub(super) fn new(
        config: PlaneConfig,
        host: HostId,
        outlet: Box<dyn Outlet>,
        events: mpsc::Sender<PlaneEvent>,
        probes: mpsc::Sender<OpenedProbe>,
    ) -> Self {
        Self {
            config,
            host,
            outlet,
            start: Instant::now(),
            generation: AtomicU64::new(0),
            tables: Mutex::default(),
            events,
            probes,
            alarm: Alarm::default(),
            counters: Counters::default(),
        }
    }

    /// Returns the time since the plane began.
    #[inline]
    pub(super) fn now(&self) -> Duration {
        self.start.elapsed()
    }

    pub(super) fn tables(&self) -> Arc<Tables> {
        lock(&self.tables).clone()
    }

    pub(super) fn set_tables(&self, tables: Tables) {
        *lock(&self.tables) = Arc::new(tables);
        self.generation.fetch_add(1, Ordering::Release);
    }

    pub(super) fn event(&self, event: PlaneEvent) {
        event.log();
        if self.events.try_send(event).is_err() {
            count(&self.counters.reports_lost);
        }
    }

    pub(super) fn probe(&self, probe: OpenedProbe) {
        if self.probes.try_send(probe).is_err() {
            count(&self.counters.reports_lost);
        }
    }

    pub(super) fn counters(&self) -> PlaneCounters {
        let counters = &self.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PlaneCounters {
            unknown_keys: get(&counters.unknown_keys),
            foreign: get(&counters.foreign),
            not_connected: get(&counters.not_connected),
            full: get(&counters.full),
            unsent: get(&counters.unsent),
            uncuttable: get(&counters.uncuttable),
            batches: get(&counters.batches),
            segments: get(&counters.segments),
            merged: get(&counters.merged),
            reports_lost: get(&counters.reports_lost),
        }
    }
}
