//! Probes that wait for an acknowledgement.

use crate::route::Route;
use crate::tuning::PROBES_MAX;
use std::collections::VecDeque;
use std::time::Duration;

/// Outstanding probes, the oldest first.
#[derive(Debug, Clone)]
pub(super) struct Probes {
    sent: VecDeque<(u64, Route, Duration)>,
    next_id: u64,
}

impl Probes {
    /// `first_id` differs after a restart, so that old acknowledgements match nothing.
    pub(super) fn new(first_id: u64) -> Self {
        Self {
            sent: VecDeque::new(),
            next_id: first_id,
        }
    }

    /// Notes a probe and returns its id. The oldest is forgotten when there are too many.
    pub(super) fn sent(&mut self, on: Route, now: Duration, lifetime: Duration) -> u64 {
        self.expire(now, lifetime);
        if self.sent.len() >= PROBES_MAX {
            self.sent.pop_front();
        }
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        self.sent.push_back((id, on, now));
        id
    }

    /// Takes the probe that an acknowledgement answers, and returns when it was sent: only if it
    /// came on the way on which the probe went.
    pub(super) fn acked(
        &mut self,
        id: u64,
        on: Route,
        now: Duration,
        lifetime: Duration,
    ) -> Option<Duration> {
        self.expire(now, lifetime);
        let index = self.sent.iter().position(|(sent, ..)| *sent == id)?;
        let (_, route, sent_at) = self.sent[index];
        if route != on {
            return None;
        }
        self.sent.remove(index);
        Some(sent_at)
    }

    fn expire(&mut self, now: Duration, lifetime: Duration) {
        while let Some((.., at)) = self.sent.front()
            && *at + lifetime < now
        {
            self.sent.pop_front();
        }
    }

    pub(super) fn len(&self) -> usize {
        self.sent.len()
    }

    pub(super) fn clear(&mut self) {
        self.sent.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::SocketId;

    const LIFETIME: Duration = Duration::from_secs(3);

    fn route(port: u16) -> Route {
        Route::Direct {
            socket: SocketId::MAIN,
            address: ([192, 0, 2, 1], port).into(),
        }
    }

    #[test]
    fn an_ack_counts_once_on_its_route_and_in_time() {
        let mut probes = Probes::new(u64::MAX);
        let now = Duration::from_secs(10);
        let id = probes.sent(route(1), now, LIFETIME);
        let later = now + Duration::from_millis(20);
        assert_eq!(probes.acked(id, route(2), later, LIFETIME), None);
        assert_eq!(probes.acked(id ^ 1, route(1), later, LIFETIME), None);
        assert_eq!(probes.acked(id, route(1), later, LIFETIME), Some(now));
        assert_eq!(probes.acked(id, route(1), later, LIFETIME), None);
        let id = probes.sent(route(1), now, LIFETIME);
        let late = now + LIFETIME + Duration::from_millis(1);
        assert_eq!(probes.acked(id, route(1), late, LIFETIME), None);
    }

    #[test]
    fn outstanding_probes_are_bounded() {
        let mut probes = Probes::new(0);
        for _ in 0..3 * PROBES_MAX {
            probes.sent(route(1), Duration::ZERO, LIFETIME);
        }
        assert_eq!(probes.len(), PROBES_MAX);
        probes.sent(route(1), Duration::from_secs(4), LIFETIME);
        assert_eq!(probes.len(), 1);
    }
}
