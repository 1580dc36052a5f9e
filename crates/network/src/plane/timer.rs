//! The thread that does what is to be done at a time: keepalives, probes of the MTU, ageing, and
//! announcements that are repeated.

use super::peer::Scratch;
use super::shared::{Shared, lock};
use longhaul_overlay::{Mac, NetworkId};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How often switches forget what is too old.
const SWEEP: Duration = Duration::from_secs(10);
/// The shortest time between two rounds.
const PAUSE: Duration = Duration::from_millis(1);

/// When the thread wakes up.
#[derive(Debug, Default)]
pub(super) struct Alarm {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    next: Duration,
    stop: bool,
    repeats: Vec<Repeat>,
}

/// An announcement that is repeated.
#[derive(Debug, Clone, Copy)]
struct Repeat {
    due: Duration,
    network: NetworkId,
    mac: Mac,
}

impl Alarm {
    /// Wakes the thread at this time, if not before.
    pub(super) fn at_latest(&self, due: Duration) {
        let mut state = lock(&self.state);
        if due < state.next {
            state.next = due;
            self.changed.notify_one();
        }
    }

    pub(super) fn stop(&self) {
        lock(&self.state).stop = true;
        self.changed.notify_one();
    }

    /// Lets an announcement be repeated at these times, and no earlier plan for it.
    pub(super) fn repeat(
        &self,
        network: NetworkId,
        mac: Mac,
        times: impl Iterator<Item = Duration>,
    ) {
        let mut state = lock(&self.state);
        state
            .repeats
            .retain(|repeat| (repeat.network, repeat.mac) != (network, mac));
        let repeats = times.map(|due| Repeat { due, network, mac });
        state.repeats.extend(repeats);
        let first = state.repeats.iter().map(|repeat| repeat.due).min();
        if let Some(first) = first
            && first < state.next
        {
            state.next = first;
            self.changed.notify_one();
        }
    }

    /// Waits; returns what is to be repeated now, or `None` to stop.
    fn wait(&self, shared: &Shared) -> Option<Vec<Repeat>> {
        let mut state = lock(&self.state);
        loop {
            if state.stop {
                return None;
            }
            let wait = state.next.saturating_sub(shared.now());
            if wait.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(state, wait);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let now = shared.now();
        state.next = now + SWEEP;
        let (due, later) = state
            .repeats
            .drain(..)
            .partition(|repeat| repeat.due <= now);
        state.repeats = later;
        let next = state.repeats.iter().map(|repeat| repeat.due).min();
        state.next = next.map_or(state.next, |next| next.min(state.next));
        Some(due)
    }
}

/// Runs until [`Alarm::stop`].
pub(super) fn run(shared: &Shared) {
    let mut scratch = Scratch::new();
    let mut swept = Duration::ZERO;
    while let Some(repeats) = shared.alarm.wait(shared) {
        let tables = shared.tables();
        for repeat in repeats {
            if let Some(view) = tables.networks.get(&repeat.network) {
                // Unless it was withdrawn.
                lock(&view.network.switch).announce(repeat.mac);
                view.run_outputs(shared, &mut scratch);
            }
        }
        let now = shared.now();
        let mut next = now + SWEEP;
        for peer in tables.peers.values() {
            if peer.due().is_some_and(|due| due <= now) {
                peer.serve_once(shared, now, &mut peer.incoming());
            }
            next = peer.due().map_or(next, |due| due.min(next));
        }
        if now.saturating_sub(swept) >= SWEEP {
            swept = now;
            for view in tables.networks.values() {
                lock(&view.network.switch).tick(now);
            }
        }
        // A peer whose datagrams cannot be sent must not keep the thread busy.
        shared.alarm.at_latest(next.max(now + PAUSE));
    }
}
