//! Discovers the path's MTU with probes (RFC 8899, DPLPMTUD), and notices when the path no longer
//! carries it.
//!
//! All sizes are those of UDP payloads, in bytes.

use std::time::Duration;

/// Sizes and times of the discovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MtuConfig {
    /// The size that every path must carry (`BASE_PLPMTU`, which is `MIN_PLPMTU` here too).
    pub base: u16,
    /// The largest size to try (`MAX_PLPMTU`): the interface's MTU without the headers of IP and
    /// UDP.
    pub max: u16,
    /// How long a probe waits for its answer (`PROBE_TIMER`).
    pub probe_time: Duration,
    /// Probes of one size without an answer after which it counts as too large (`MAX_PROBES`).
    pub probes_max: u32,
    /// The time after which a size larger than the base is confirmed again, if it is used.
    pub confirm_time: Duration,
    /// The time after which a larger size is tried again (`PMTU_RAISE_TIMER`).
    pub raise_time: Duration,
}

impl Default for MtuConfig {
    fn default() -> Self {
        Self {
            base: 1200,
            max: 1472,
            probe_time: Duration::from_secs(1),
            probes_max: 3,
            confirm_time: Duration::from_secs(5),
            raise_time: Duration::from_secs(600),
        }
    }
}

/// The search ends when the smallest size that failed is this close to the largest that passed.
pub const MTU_STEP_BYTES: u16 = 8;

/// A probe to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probe {
    /// Its id, which the answer names. Probes of one size that are sent again have the same.
    pub id: u32,
    /// Its length as a UDP payload.
    pub bytes: u16,
}

/// What became of the discovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MtuChange {
    /// A larger size passes.
    Raised,
    /// The path no longer carries the size that passed before: the base is used, and a new search
    /// begins.
    BlackHole,
}

#[derive(Debug, Clone, Copy)]
struct Outstanding {
    probe: Probe,
    tries: u32,
    /// When the last one was sent; `None` if it is to be sent now.
    sent: Option<Duration>,
}

/// The state of one path.
#[derive(Debug)]
pub struct Discovery {
    config: MtuConfig,
    current: u16,
    /// The smallest size that failed in this search, or one more than the largest to try.
    failed: u16,
    searching: bool,
    outstanding: Option<Outstanding>,
    next_id: u32,
    confirmed: Duration,
    completed: Duration,
    /// Whether datagrams larger than the base were sent since the last confirmation.
    used: bool,
    heard: Duration,
}

impl Discovery {
    /// Starts with the base.
    pub fn new(now: Duration, config: MtuConfig) -> Self {
        let mut discovery = Self {
            config,
            current: config.base,
            failed: 0,
            searching: false,
            outstanding: None,
            next_id: 0,
            confirmed: now,
            completed: now,
            used: false,
            heard: now,
        };
        discovery.reset(now);
        discovery
    }

    /// Returns the largest size that is known to pass.
    pub fn bytes(&self) -> u16 {
        self.current
    }

    /// Whether a search is going on.
    pub fn is_searching(&self) -> bool {
        self.searching
    }

    /// Starts over, since the path is another one.
    pub fn reset(&mut self, now: Duration) {
        self.current = self.config.base;
        self.confirmed = now;
        self.used = false;
        self.search();
    }

    fn search(&mut self) {
        self.outstanding = None;
        self.failed = self.config.max.saturating_add(1);
        self.searching = self.failed > self.current.saturating_add(1);
    }

    /// Notes that datagrams of this size were sent.
    #[inline]
    pub fn sent(&mut self, bytes: usize) {
        self.used |= bytes > usize::from(self.config.base);
    }

    /// Notes that the peer was heard, so that the path works.
    #[inline]
    pub fn heard(&mut self, now: Duration) {
        self.heard = now;
    }

    /// Notes that this host's own network refused a datagram of this size.
    pub fn refused(&mut self, now: Duration, bytes: u16) -> Option<MtuChange> {
        let failed = bytes.max(self.config.base.saturating_add(1));
        if failed <= self.current {
            self.reset(now);
            self.failed = self.failed.min(failed);
            return Some(MtuChange::BlackHole);
        }
        self.failed = self.failed.min(failed);
        let larger = |outstanding: &Outstanding| outstanding.probe.bytes >= failed;
        if self.outstanding.as_ref().is_some_and(larger) {
            self.outstanding = None;
        }
        None
    }

    /// Takes an answer of the peer. Old and unknown ones have no effect.
    pub fn answered(&mut self, now: Duration, id: u32, bytes: u16) -> Option<MtuChange> {
        let probe = Probe { id, bytes };
        self.outstanding.filter(|waits| waits.probe == probe)?;
        self.outstanding = None;
        (self.confirmed, self.used) = (now, false);
        if bytes <= self.current {
            return None;
        }
        self.current = bytes;
        Some(MtuChange::Raised)
    }

    /// Returns a probe to be sent now, and what has changed. To be called at [`Self::deadline`] and
    /// after each answer.
    pub fn poll(&mut self, now: Duration) -> (Option<Probe>, Option<MtuChange>) {
        let mut change = None;
        if let Some(waits) = &mut self.outstanding {
            let late = |sent| now.saturating_sub(sent) >= self.config.probe_time;
            if waits.sent.is_some_and(|sent| !late(sent)) {
                return (None, None);
            }
            // If nothing arrives at all, that says nothing about sizes.
            if waits.sent.is_some_and(|sent| self.heard < sent) {
                waits.tries = waits.tries.saturating_sub(1);
            }
            if waits.tries >= self.config.probes_max {
                let bytes = waits.probe.bytes;
                self.outstanding = None;
                if bytes > self.current {
                    self.failed = self.failed.min(bytes);
                } else {
                    change = Some(MtuChange::BlackHole);
                    self.reset(now);
                }
            }
        }
        if self.outstanding.is_none() {
            self.outstanding = self.next(now).map(|bytes| {
                self.next_id = self.next_id.wrapping_add(1);
                Outstanding {
                    probe: Probe {
                        id: self.next_id,
                        bytes,
                    },
                    tries: 0,
                    sent: None,
                }
            });
        }
        let probe = self.outstanding.as_mut().map(|waits| {
            waits.tries += 1;
            waits.sent = Some(now);
            waits.probe
        });
        (probe, change)
    }

    /// Returns the size to probe next, if any.
    fn next(&mut self, now: Duration) -> Option<u16> {
        if self.must_confirm(now) {
            return Some(self.current);
        }
        if !self.searching && now.saturating_sub(self.completed) >= self.config.raise_time {
            self.search();
        }
        if !self.searching {
            return None;
        }
        let gap = self.failed.saturating_sub(self.current);
        if gap <= MTU_STEP_BYTES {
            self.searching = false;
            self.completed = now;
            return None;
        }
        if self.failed > self.config.max {
            // Most paths carry what the interface carries.
            return Some(self.config.max);
        }
        Some(self.current + gap / 2)
    }

    fn must_confirm(&self, now: Duration) -> bool {
        self.used
            && self.current > self.config.base
            && now.saturating_sub(self.confirmed) >= self.config.confirm_time
    }

    /// Returns when [`Self::poll`] is to be called again; `None`: not before something happens.
    pub fn deadline(&self) -> Option<Duration> {
        match self.outstanding {
            Some(Outstanding {
                sent: Some(sent), ..
            }) => Some(sent + self.config.probe_time),
            Some(_) => Some(Duration::ZERO),
            None if self.searching => Some(Duration::ZERO),
            None => {
                let confirm = self.used && self.current > self.config.base;
                let confirm = confirm.then_some(self.confirmed + self.config.confirm_time);
                let more = self.current.saturating_add(MTU_STEP_BYTES) <= self.config.max;
                let raise = more.then_some(self.completed + self.config.raise_time);
                confirm.into_iter().chain(raise).min()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A path that carries datagrams up to a size, with the time that passes on it.
    struct Path {
        now: Duration,
        carries: u16,
        discovery: Discovery,
        probes: usize,
        dead: bool,
        changes: Vec<MtuChange>,
    }

    impl Path {
        fn new(carries: u16, max: u16) -> Self {
            let config = MtuConfig {
                max,
                ..MtuConfig::default()
            };
            let now = Duration::from_secs(77);
            Self {
                now,
                carries,
                discovery: Discovery::new(now, config),
                probes: 0,
                dead: false,
                changes: Vec::new(),
            }
        }

        /// Lets time pass until there is nothing to do before `until`.
        fn run(&mut self, until: Duration) {
            while let Some(deadline) = self.discovery.deadline()
                && deadline.max(self.now) < until
            {
                self.now = self.now.max(deadline);
                if !self.dead {
                    // The peer's traffic.
                    self.discovery.heard(self.now);
                }
                let (probe, change) = self.discovery.poll(self.now);
                self.changes.extend(change);
                let Some(probe) = probe else { continue };
                self.probes += 1;
                if probe.bytes <= self.carries && !self.dead {
                    self.now += Duration::from_millis(20);
                    let change = self.discovery.answered(self.now, probe.id, probe.bytes);
                    self.changes.extend(change);
                }
            }
            self.now = self.now.max(until);
        }

        fn pass(&mut self, seconds: u64) {
            self.run(self.now + Duration::from_secs(seconds));
        }
    }

    proptest! {
        #[test]
        fn the_size_is_found(carries in 1200..9000u16, max in 1200..9000u16) {
            let mut path = Path::new(carries, max);
            path.pass(60);
            let found = path.discovery.bytes();
            let best = carries.min(max);
            prop_assert!(found <= best);
            prop_assert!(best - found < MTU_STEP_BYTES, "{found} of {best}");
            prop_assert!(!path.discovery.is_searching());
            prop_assert!(path.probes <= 3 * 12);
        }
    }

    #[test]
    fn the_usual_path_takes_one_probe() {
        let mut path = Path::new(1472, 1472);
        path.pass(1);
        assert_eq!((path.discovery.bytes(), path.probes), (1472, 1));
        path.pass(10_000);
        assert_eq!(path.probes, 1, "nothing is sent, so nothing is confirmed");
        assert_eq!(path.discovery.deadline(), None);
    }

    #[test]
    fn a_black_hole_is_noticed_and_left() {
        let mut path = Path::new(1472, 1472);
        path.pass(30);
        path.carries = 1300;
        path.discovery.sent(1200);
        path.pass(100);
        assert_eq!(path.changes, [MtuChange::Raised]);
        path.discovery.sent(1400);
        path.pass(9);
        assert_eq!(path.changes[1], MtuChange::BlackHole);
        assert!(path.discovery.bytes() < 1300);
        path.pass(60);
        assert!((1293..=1300).contains(&path.discovery.bytes()));
        // The path carries more again.
        path.carries = 1472;
        path.pass(601);
        assert_eq!(path.discovery.bytes(), 1472);
    }

    #[test]
    fn silence_is_no_black_hole() {
        let mut path = Path::new(1472, 1472);
        path.dead = true;
        path.pass(100);
        assert!(path.discovery.is_searching() && path.probes >= 99);
        path.dead = false;
        path.pass(2);
        path.dead = true;
        path.discovery.sent(1400);
        path.pass(100);
        assert_eq!(path.discovery.bytes(), 1472);
        path.dead = false;
        path.pass(10);
        assert_eq!(path.changes, [MtuChange::Raised]);
    }

    #[test]
    fn a_size_in_use_is_confirmed() {
        let mut path = Path::new(1472, 1472);
        path.pass(30);
        for _ in 0..10 {
            path.discovery.sent(1400);
            path.pass(5);
        }
        assert!((10..=11).contains(&path.probes), "{}", path.probes);
        assert_eq!(path.changes, [MtuChange::Raised]);
    }

    #[test]
    fn lost_probes_are_sent_again() {
        let mut path = Path::new(1472, 1472);
        let (probe, _) = path.discovery.poll(path.now);
        let probe = probe.unwrap();
        assert_eq!(path.discovery.poll(path.now), (None, None));
        let later = path.now + Duration::from_secs(1);
        assert_eq!(path.discovery.poll(later), (Some(probe), None));
        assert_eq!(path.discovery.answered(later, probe.id + 1, 1472), None);
        assert_eq!(path.discovery.answered(later, probe.id, 1471), None);
        let answered = path.discovery.answered(later, probe.id, 1472);
        assert_eq!(answered, Some(MtuChange::Raised));
        assert_eq!(path.discovery.answered(later, probe.id, 1472), None);
    }

    #[test]
    fn what_the_host_refuses_is_not_tried() {
        let mut path = Path::new(1472, 1472);
        let (probe, _) = path.discovery.poll(path.now);
        assert_eq!(probe.unwrap().bytes, 1472);
        assert_eq!(path.discovery.refused(path.now, 1473), None);
        assert_eq!(path.discovery.refused(path.now, 1453), None);
        path.carries = 1452;
        path.pass(60);
        let found = path.discovery.bytes();
        assert!((1445..=1452).contains(&found), "{found}");
        let refused = path.discovery.refused(path.now, found);
        assert_eq!(refused, Some(MtuChange::BlackHole));
        assert_eq!(path.discovery.bytes(), 1200);
    }
}
