//! Uses several network paths for one connection: opens them, watches them, gives up those on which
//! nothing comes any more, and opens them again.
//!
//! The QUIC library sends each packet of a connection on the first path that is available and has
//! room in its congestion window, and sends again on any path what was lost on another. It does not
//! notice by itself that a path is dead, and it sends all acknowledgements on one path. So both
//! ends send a pulse on each path. A path that is silent while another one is heard gets no more
//! new data after [`SUSPECT_PULSES`], and is given up after [`DEAD`] or, by its pulse and round
//! trip, later.
//!
//! The dialler opens paths. A path that is given up is opened again at once: the library repeats
//! the first packet of a path until it is answered, whenever that is.

use crate::paths::PathTo;
use crate::quic::{
    Connection, FourTuple, Link, PathEvent, PathEvents, PathId, PathStats, PathStatus, View,
    WeakConnectionHandle,
};
use futures_util::{FutureExt, StreamExt};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tracing::{debug, info};

/// The number of paths that a connection may have at once: those that are configured, and the one
/// on which it was made.
pub(crate) const CONCURRENT_PATHS_MAX: u32 = crate::paths::PATHS_MAX as u32 + 1;
/// The interval of the pulse on each path of a connection for bulk data, and of others.
const PULSE_BULK: Duration = Duration::from_millis(50);
const PULSE: Duration = Duration::from_millis(200);
/// The silence after which what is not spread takes another path, in pulses; half a round trip is
/// added. That is soon: the acknowledgements of all paths are not spread.
const DOUBTFUL_PULSES: f64 = 1.5;
/// The silence after which a path gets no new data, in pulses; half a round trip is added. That is
/// soon too: the library tries a silent path with new data, and each try is a hole in a stream.
const SUSPECT_PULSES: u32 = 4;
/// The silence after which a path is given up, and how often another one was heard at least in this
/// time.
const DEAD: Duration = Duration::from_secs(1);
const DEAD_ROUND_TRIPS: u32 = 4;
const DEAD_PULSES: u32 = 8;
const DEAD_HEARD: u32 = 3;
/// The interval at which the dialler tries again what the library refuses.
const OPEN_EVERY: Duration = Duration::from_secs(1);
/// Another path replaces the best one if its round trip is shorter by this share and time.
const BETTER_SHARE: f64 = 0.7;
const BETTER_BY: Duration = Duration::from_millis(2);

/// How the packets of this end use the paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spread {
    /// Over all paths, each as far as it has room.
    All,
    /// On the best path alone.
    Best,
}

/// Watches the paths of a connection, as the end that accepted it. `bulk`: whether it is for bulk
/// data.
pub(crate) fn watch(link: &Link, bulk: bool) {
    if link.connection.is_multipath_enabled() {
        start(link, Vec::new(), (Spread::Best, pulse_of(bulk)));
    }
}

/// Opens the paths to the host at the other end of a connection that this end has dialled, and
/// watches them.
pub(crate) fn open(link: &Link, paths: &[PathTo], spread: Spread) {
    if paths.is_empty() {
        return;
    }
    if !link.connection.is_multipath_enabled() {
        debug!(address = %link.address(), "the other host's agent uses one path at a time");
        return;
    }
    let pulse = pulse_of(spread == Spread::All);
    start(link, paths.to_vec(), (spread, pulse));
}

fn pulse_of(bulk: bool) -> Duration {
    match bulk {
        true => PULSE_BULK,
        false => PULSE,
    }
}

fn start(link: &Link, wanted: Vec<PathTo>, (spread, pulse): (Spread, Duration)) {
    let first = Known::new(
        PathId::ZERO,
        PathTo {
            to: link.address(),
            from: None,
        },
        true,
    );
    let keeper = Keeper {
        connection: link.connection.weak_handle(),
        view: link.view(),
        dialled: !wanted.is_empty(),
        wanted,
        spread,
        pulse,
        known: vec![first],
        began: Instant::now(),
        open_at: Instant::now(),
        at: Instant::now(),
    };
    tokio::spawn(keeper.run(link.connection.path_events()));
}

struct Keeper {
    /// The keeper does not keep the connection.
    connection: WeakConnectionHandle,
    view: Arc<Mutex<View>>,
    dialled: bool,
    /// The paths that this end opens.
    wanted: Vec<PathTo>,
    spread: Spread,
    pulse: Duration,
    known: Vec<Known>,
    began: Instant,
    /// When paths may be opened again.
    open_at: Instant,
    /// The time of the last pulse.
    at: Instant,
}

/// A path of the connection.
#[derive(Debug)]
struct Known {
    id: PathId,
    path: PathTo,
    /// Whether it was validated.
    up: bool,
    given_up: bool,
    /// Datagrams received.
    heard: u64,
    /// Whether nothing was sent on it since the last pulse.
    is_idle: bool,
    /// The time for which others were heard and this was not, and the number of pulses at which
    /// they were. What was silent together counts for [`SUSPECT_PULSES`] at most.
    silence: Duration,
    pulses: u32,
    /// The time since this or another one was heard.
    quiet: Duration,
    rtt: Duration,
    status: Option<PathStatus>,
    last: PathStats,
}

impl Known {
    fn new(id: PathId, path: PathTo, up: bool) -> Self {
        Self {
            id,
            path,
            up,
            given_up: false,
            heard: 0,
            is_idle: true,
            silence: Duration::ZERO,
            pulses: 0,
            quiet: Duration::ZERO,
            rtt: Duration::ZERO,
            status: None,
            last: PathStats::default(),
        }
    }

    fn carries(&self) -> bool {
        self.up && !self.given_up
    }

    fn is_doubtful(&self, pulse: Duration) -> bool {
        self.silence >= pulse.mul_f64(DOUBTFUL_PULSES) + self.rtt / 2
    }

    fn is_suspect(&self, pulse: Duration) -> bool {
        self.silence >= pulse * SUSPECT_PULSES + self.rtt / 2
    }

    fn is_dead(&self, pulse: Duration) -> bool {
        let limit = DEAD
            .max(pulse * DEAD_PULSES)
            .max(self.rtt * DEAD_ROUND_TRIPS);
        self.pulses >= DEAD_HEARD && self.silence >= limit
    }
}

impl Keeper {
    async fn run(mut self, mut events: PathEvents) {
        let mut pulse = interval(self.pulse);
        pulse.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let alone = !self.dialled && self.known.len() < 2;
            tokio::select! {
                event = events.next() => match event {
                    Some(Ok(event)) => self.hear(&event),
                    // Paths that are gone are found at the next pulse.
                    Some(Err(lagged)) => debug!(?lagged, "events of paths were missed"),
                    None => return,
                },
                _ = pulse.tick(), if !alone => {
                    let Some(connection) = self.connection.upgrade() else {
                        return;
                    };
                    if connection.close_reason().is_some() || !self.pulse(&connection) {
                        return;
                    }
                }
            }
            self.show();
        }
    }

    fn hear(&mut self, event: &PathEvent) {
        match event {
            PathEvent::Established { id, .. } => self.established(*id),
            PathEvent::Abandoned { id, reason, .. } => {
                if let Some(known) = self.known.iter_mut().find(|known| known.id == *id) {
                    known.given_up = true;
                    debug!(path = %known.path.to, ?reason, "a path was given up");
                }
            }
            PathEvent::Discarded { id, path_stats, .. } => self.gone(*id, path_stats),
            _ => {}
        }
    }

    fn established(&mut self, id: PathId) {
        if let Some(known) = self.known.iter_mut().find(|known| known.id == id) {
            known.up = true;
            info!(path = %known.path.to, "a path works");
            return;
        }
        let Some(connection) = self.connection.upgrade() else {
            return;
        };
        let found = connection
            .path(id)
            .and_then(|path| path.network_path().ok());
        if let Some(found) = found {
            let path = PathTo {
                to: found.remote(),
                from: None,
            };
            debug!(path = %path.to, "the other host has opened a path");
            self.known.push(Known::new(id, path, true));
        }
    }

    fn gone(&mut self, id: PathId, stats: &PathStats) {
        let Some(at) = self.known.iter().position(|known| known.id == id) else {
            return;
        };
        let known = self.known.remove(at);
        let mut view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        view.note_gone(known.path, stats);
    }

    /// Does what is due at every pulse. Returns false if the connection needs this no more.
    fn pulse(&mut self, connection: &Connection) -> bool {
        let at_rest = {
            let view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
            view.at_rest
        };
        self.listen(connection);
        if at_rest {
            return self.leave_one(connection);
        }
        if self.dialled && Instant::now() >= self.open_at {
            self.open_wanted(connection);
        }
        self.give_up_dead(connection);
        self.set_statuses(connection);
        if self.known.len() > 1 {
            let silent = |known: &&Known| known.carries() && known.is_idle;
            for known in self.known.iter().filter(silent) {
                if let Some(path) = connection.path(known.id) {
                    // Fails only when the path is closed.
                    let _ = path.ping();
                }
            }
        }
        true
    }

    /// Finds out which paths were heard since the last pulse, and which are gone.
    fn listen(&mut self, connection: &Connection) {
        let now = Instant::now();
        // A pulse that is late says nothing about the paths.
        let passed = (now - self.at).min(self.pulse * 2);
        self.at = now;
        let mut gone = Vec::new();
        let mut heard = Vec::new();
        for known in &mut self.known {
            match connection.path_stats(known.id) {
                Some(stats) => {
                    let received = stats.udp_rx.datagrams;
                    if known.carries() && received > known.heard {
                        heard.push(known.id);
                    }
                    known.heard = received;
                    known.is_idle = stats.udp_tx.datagrams == known.last.udp_tx.datagrams;
                    known.rtt = stats.rtt;
                    known.last = stats;
                }
                None => gone.push((known.id, known.last)),
            }
        }
        for (id, last) in gone {
            self.gone(id, &last);
        }
        account(&mut self.known, &heard, passed, self.pulse);
    }

    /// Opens the wanted paths that there are not.
    fn open_wanted(&mut self, connection: &Connection) {
        let first = self.known.iter().find(|known| known.id == PathId::ZERO);
        let first = first.map(|known| known.path);
        let local = connection
            .path(PathId::ZERO)
            .and_then(|path| path.local_ip().ok()?);
        // The path on which the connection was made is one of them, or one more.
        if let Some(first) = first {
            let from_here = |path: &&PathTo| same(path.to, first.to) && path.from.is_some();
            let waited = self.began.elapsed() >= OPEN_EVERY;
            if local.is_none() && self.wanted.iter().any(|path| from_here(&path)) && !waited {
                // The first packets of the other host say which it is.
                return;
            }
            let is_it = |path: &&PathTo| {
                same(path.to, first.to) && path.from.is_none_or(|from| same_ip(Some(from), local))
            };
            match self.wanted.iter().find(is_it).copied() {
                Some(path) => self.rename_first(path),
                None if !self.wanted.contains(&first) => self.wanted.push(first),
                None => {}
            }
        }
        for path in self.wanted.clone() {
            let is_it = |known: &&Known| known.path == path && !known.given_up;
            if self.known.iter().any(|known| is_it(&known)) {
                continue;
            }
            let status = match self.spread {
                Spread::All => PathStatus::Available,
                Spread::Best => PathStatus::Backup,
            };
            let tuple = FourTuple::new(path.to, path.from.map(|from| mapped(from, connection)));
            let opening = connection.open_path(tuple, status);
            match opening.path_id() {
                Some(id) => self.known.push(Known::new(id, path, false)),
                None => {
                    let why = opening.now_or_never().and_then(Result::err);
                    debug!(path = %path.to, ?why, "a path cannot be opened yet");
                    self.open_at = Instant::now() + OPEN_EVERY;
                }
            }
        }
    }

    /// Gives the path on which the connection was made the name that it has in the configuration.
    fn rename_first(&mut self, path: PathTo) {
        let first = self.known.iter_mut().find(|known| known.id == PathId::ZERO);
        if let Some(known) = first {
            known.path = path;
        }
    }

    fn give_up_dead(&mut self, connection: &Connection) {
        let carry = self.known.iter().filter(|known| known.carries());
        let mut alive = carry.filter(|known| !known.is_suspect(self.pulse)).count();
        let pulse = self.pulse;
        for known in &mut self.known {
            if !known.carries() || !known.is_dead(pulse) || alive == 0 {
                continue;
            }
            let Some(path) = connection.path(known.id) else {
                continue;
            };
            match path.close() {
                Ok(()) => {
                    known.given_up = true;
                    info!(path = %known.path.to, "a path is silent: others carry on");
                }
                Err(error) => {
                    debug!(path = %known.path.to, %error, "a silent path is kept");
                    alive = 0;
                }
            }
        }
    }

    /// Sets which paths get new data.
    fn set_statuses(&mut self, connection: &Connection) {
        let best = self.best();
        let (spread, pulse) = (self.spread, self.pulse);
        for known in self.known.iter_mut().filter(|known| known.carries()) {
            let available = match spread {
                Spread::All => !known.is_suspect(pulse),
                Spread::Best => Some(known.id) == best,
            };
            let status = match available {
                true => PathStatus::Available,
                false => PathStatus::Backup,
            };
            if known.status == Some(status) {
                continue;
            }
            let path = connection.path(known.id);
            if path.is_some_and(|path| path.set_status(status).is_ok()) {
                debug!(path = %known.path.to, ?status, "a path changes");
                known.status = Some(status);
            }
        }
        let mut view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        view.best = best.unwrap_or(view.best);
    }

    /// Returns the path for what is not spread over all: the one used so far, unless it is silent,
    /// or another one is clearly faster.
    fn best(&self) -> Option<PathId> {
        let used = {
            let view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
            view.best
        };
        let carry = || self.known.iter().filter(|known| known.carries());
        let heard = carry().filter(|known| !known.is_doubtful(self.pulse));
        let fastest = heard.min_by_key(|known| known.rtt);
        let used = carry().find(|known| known.id == used);
        match (used, fastest) {
            (Some(used), Some(fastest)) => {
                let limit = used.rtt.mul_f64(BETTER_SHARE).saturating_sub(BETTER_BY);
                let change = used.is_doubtful(self.pulse) || fastest.rtt < limit;
                Some(if change { fastest.id } else { used.id })
            }
            (one, other) => other.or(one).map(|known| known.id),
        }
    }

    /// Closes all paths but the best one. Returns false when that is done.
    fn leave_one(&mut self, connection: &Connection) -> bool {
        let best = self.best();
        for known in &mut self.known {
            if Some(known.id) == best || known.given_up {
                continue;
            }
            let closed = connection.path(known.id).map(|path| path.close());
            match closed {
                None | Some(Ok(())) => known.given_up = true,
                Some(Err(error)) => debug!(path = %known.path.to, %error, "a path stays"),
            }
        }
        self.known.len() > 1
    }

    /// Shows the paths to the users of the connection.
    fn show(&self) {
        let mut view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        let carry = self.known.iter().filter(|known| known.carries());
        view.up = carry.map(|known| (known.id, known.path)).collect();
        let draining = self.known.iter().filter(|known| known.up && known.given_up);
        view.draining = draining.map(|known| known.id).collect();
    }
}

/// Adds the time since the last pulse to the silence of the paths on which nothing was heard.
fn account(paths: &mut [Known], heard: &[PathId], passed: Duration, pulse: Duration) {
    for known in paths.iter_mut().filter(|known| known.carries()) {
        known.quiet += passed;
        if heard.contains(&known.id) {
            (known.silence, known.pulses) = (Duration::ZERO, 0);
        } else if !heard.is_empty() {
            known.silence += known.quiet.min(pulse * SUSPECT_PULSES);
            known.pulses += 1;
        } else {
            continue;
        }
        known.quiet = Duration::ZERO;
    }
}

fn same(one: SocketAddr, other: SocketAddr) -> bool {
    one.ip().to_canonical() == other.ip().to_canonical() && one.port() == other.port()
}

fn same_ip(one: Option<IpAddr>, other: Option<IpAddr>) -> bool {
    one.map(|ip| ip.to_canonical()) == other.map(|ip| ip.to_canonical())
}

/// Returns an IPv4 address in the form for a dual-stack socket, if the connection uses one.
fn mapped(ip: IpAddr, connection: &Connection) -> IpAddr {
    let remote = connection
        .path(PathId::ZERO)
        .and_then(|path| path.remote_address().ok());
    match (ip, remote) {
        (IpAddr::V4(ip), Some(SocketAddr::V6(_))) => ip.to_ipv6_mapped().into(),
        _ => ip,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> [Known; 2] {
        [0u32, 1].map(|id| {
            let path = PathTo {
                to: ([192, 0, 2, 7], 7400 + id as u16).into(),
                from: None,
            };
            Known::new(id.into(), path, true)
        })
    }

    /// Passes pulses in which these paths are heard.
    fn pass(paths: &mut [Known], pulses: u32, heard: &[u32]) {
        let heard: Vec<PathId> = heard.iter().map(|id| (*id).into()).collect();
        for _ in 0..pulses {
            account(paths, &heard, PULSE_BULK, PULSE_BULK);
        }
    }

    #[test]
    fn a_silent_path_is_left_step_by_step_and_taken_back_when_it_is_heard() {
        let mut paths = two();
        let states = |paths: &[Known; 2]| {
            let path = &paths[1];
            [
                path.is_doubtful(PULSE_BULK),
                path.is_suspect(PULSE_BULK),
                path.is_dead(PULSE_BULK),
            ]
        };
        pass(&mut paths, 1, &[0]);
        assert_eq!(states(&paths), [false, false, false]);
        pass(&mut paths, 1, &[0]);
        assert_eq!(states(&paths), [true, false, false]);
        pass(&mut paths, 2, &[0]);
        assert_eq!(states(&paths), [true, true, false]);
        pass(&mut paths, 15, &[0]);
        assert_eq!(states(&paths), [true, true, false]);
        pass(&mut paths, 1, &[0]);
        assert_eq!(states(&paths), [true, true, true]);
        pass(&mut paths, 1, &[0, 1]);
        assert_eq!(states(&paths), [false, false, false]);
        assert!(!paths[0].is_doubtful(PULSE_BULK));
    }

    #[test]
    fn what_is_silent_together_is_not_given_up() {
        let mut paths = two();
        // The link of both is cut for 10 s. Then one is heard a little before the other one.
        pass(&mut paths, 200, &[]);
        pass(&mut paths, 4, &[0]);
        assert!(paths[1].is_suspect(PULSE_BULK) && !paths[1].is_dead(PULSE_BULK));
        pass(&mut paths, 1, &[1]);
        assert!(!paths[1].is_doubtful(PULSE_BULK));
    }

    #[test]
    fn a_slow_path_has_more_time() {
        let mut paths = two();
        paths[1].rtt = Duration::from_millis(600);
        pass(&mut paths, 6, &[0]);
        assert!(
            !paths[1].is_doubtful(PULSE_BULK),
            "half a round trip is added"
        );
        pass(&mut paths, 40, &[0]);
        assert!(paths[1].is_suspect(PULSE_BULK) && !paths[1].is_dead(PULSE_BULK));
        pass(&mut paths, 2, &[0]);
        assert!(paths[1].is_dead(PULSE_BULK), "four round trips");
    }
}
