//! What each peer uses of its limits on this host.

use crate::host::limited_hosts::LimitedHosts;
use crate::host::lock::lock;
use crate::host::peer_limits::PeerLimits;
use longhaul_protocol::{HostId, MigrationId};
use longhaul_transport::TrustedHost;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

const HOUR: Duration = Duration::from_secs(3600);
const MINUTE: Duration = Duration::from_secs(60);
/// Limit on the first messages of channels per minute, of any kind. A peer that exceeds it loses
/// its connection.
const REQUESTS_PER_MINUTE: u32 = 1200;

/// What every peer uses on this host.
pub(crate) struct Allowances {
    limits: LimitedHosts,
    state: Mutex<State>,
}

#[derive(Default)]
pub(crate) struct State {
    peers: HashMap<HostId, Use>,
    /// The arriving guests, by migration.
    pub(crate) arriving: HashMap<MigrationId, Arriving>,
}

pub(crate) struct Use {
    pub(crate) channels: u32,
    pub(crate) requests: Bucket,
    pub(crate) queries: Bucket,
    pub(crate) attempts: Bucket,
    pub(crate) workers: Arc<Semaphore>,
}

pub(crate) struct Arriving {
    pub(crate) peer: HostId,
    pub(crate) guest: String,
    pub(crate) memory_bytes: u64,
    pub(crate) vcpus: u32,
}

/// A token bucket: at most `most` uses per time `per`, refilled evenly.
#[derive(Debug)]
pub(crate) struct Bucket {
    most: f64,
    per: Duration,
    left: f64,
    at: Instant,
}

impl Bucket {
    fn new(most: u32, per: Duration, now: Instant) -> Self {
        let most = f64::from(most);
        Self {
            most,
            per,
            left: most,
            at: now,
        }
    }

    /// Returns whether there is one to take.
    pub(crate) fn has_one(&mut self, now: Instant) -> bool {
        self.fill(now);
        self.left >= 1.0
    }

    pub(crate) fn take(&mut self, now: Instant) -> bool {
        if !self.has_one(now) {
            return false;
        }
        self.left -= 1.0;
        true
    }

    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at);
        self.at = now;
        let filled = self.most * passed.as_secs_f64() / self.per.as_secs_f64();
        self.left = (self.left + filled).min(self.most);
    }
}

impl Use {
    fn new(limits: &PeerLimits, now: Instant) -> Self {
        Self {
            channels: 0,
            requests: Bucket::new(REQUESTS_PER_MINUTE, MINUTE, now),
            queries: Bucket::new(limits.queries_per_minute, MINUTE, now),
            attempts: Bucket::new(limits.attempts_per_hour, HOUR, now),
            workers: Arc::new(Semaphore::new(limits.workers as usize)),
        }
    }
}

impl Allowances {
    /// Creates the quotas. Only guests that arrived under an earlier agent count as used.
    pub(crate) fn new(limits: LimitedHosts) -> Self {
        Self {
            limits,
            state: Mutex::default(),
        }
    }

    /// Waits for one of a peer's worker threads.
    pub(crate) async fn worker(&self, peer: &TrustedHost) -> Option<OwnedSemaphorePermit> {
        let workers = self.with_use(peer, |used, _| used.workers.clone());
        workers.acquire_owned().await.ok()
    }

    /// Locks what is used now.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Returns the limits of a host with this key and name.
    pub(crate) fn limits_of(&self, peer: HostId, name: &str) -> &PeerLimits {
        self.limits.of(peer, name)
    }

    pub(crate) fn limits(&self, peer: &TrustedHost) -> &PeerLimits {
        self.limits.of(peer.id, &peer.name)
    }

    /// Records which limits the trusted hosts have. A host keeps its limits when it gets another
    /// name.
    pub(crate) fn remember(&self, trusted: &[TrustedHost]) -> std::io::Result<()> {
        self.limits.remember(trusted)
    }

    /// Returns the host that offered the guest of this migration, while the guest arrives.
    pub(crate) fn preparing(&self, migration: MigrationId) -> Option<HostId> {
        self.lock().arriving.get(&migration).map(|one| one.peer)
    }

    pub(crate) fn with_use<T>(
        &self,
        peer: &TrustedHost,
        what: impl FnOnce(&mut Use, Instant) -> T,
    ) -> T {
        let now = Instant::now();
        let mut state = self.lock();
        let limits = self.limits(peer);
        let used = state.peers.entry(peer.id);
        what(used.or_insert_with(|| Use::new(limits, now)), now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_gives_so_many_and_fills_up_again() {
        let begin = Instant::now();
        let mut bucket = Bucket::new(3, MINUTE, begin);
        let taken = |bucket: &mut Bucket, at| (0..10).filter(|_| bucket.take(begin + at)).count();
        assert_eq!(taken(&mut bucket, Duration::ZERO), 3);
        assert_eq!(taken(&mut bucket, Duration::from_secs(19)), 0);
        assert_eq!(taken(&mut bucket, Duration::from_secs(41)), 2);
        assert_eq!(taken(&mut bucket, HOUR), 3, "no more than it holds");
    }
}
