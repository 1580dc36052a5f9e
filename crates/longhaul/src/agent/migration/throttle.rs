//! How fast this host may send: moves that are under way share one limit equally, beside the limits of
//! their own.

use std::sync::Arc;
use tokio::sync::watch;

/// The limit of all moves from this host together.
#[derive(Debug, Clone)]
pub(super) struct Throttle {
    total_bps: Option<u64>,
    moves: Arc<watch::Sender<u64>>,
}

impl Throttle {
    /// All moves together send at most so many bits per second.
    pub(super) fn new(total_bps: Option<u64>) -> Self {
        Self {
            total_bps,
            moves: Arc::new(watch::Sender::new(0)),
        }
    }

    /// What a single move may send that has a limit of its own.
    pub(super) fn alone(&self, own_bps: Option<u64>) -> Option<u64> {
        at_most(own_bps, self.total_bps)
    }

    /// One more move.
    pub(super) fn join(&self) -> Share {
        self.moves.send_modify(|moves| *moves += 1);
        Share {
            throttle: self.clone(),
            moves: self.moves.subscribe(),
        }
    }
}

/// The part of one move, until it is dropped.
#[derive(Debug)]
pub(super) struct Share {
    throttle: Throttle,
    moves: watch::Receiver<u64>,
}

impl Share {
    /// What the move may send that has a limit of its own.
    pub(super) fn of(&self, own_bps: Option<u64>) -> Option<u64> {
        let moves = (*self.moves.borrow()).max(1);
        at_most(own_bps, self.throttle.total_bps.map(|total| total / moves))
    }

    /// Waits until it is another. Safe to cancel.
    pub(super) async fn changed(&mut self) {
        if self.throttle.total_bps.is_none() || self.moves.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.throttle.moves.send_modify(|moves| *moves -= 1);
    }
}

fn at_most(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn moves_share_what_there_is() {
        let throttle = Throttle::new(Some(90));
        let mut first = throttle.join();
        assert_eq!((first.of(None), first.of(Some(50))), (Some(90), Some(50)));
        let second = throttle.join();
        first.changed().await;
        assert_eq!((first.of(None), second.of(Some(50))), (Some(45), Some(45)));
        drop(second);
        first.changed().await;
        assert_eq!(first.of(None), Some(90));
        assert_eq!(throttle.alone(Some(100)), Some(90));
    }

    #[tokio::test]
    async fn without_a_limit_there_is_nothing_to_share() {
        let throttle = Throttle::new(None);
        let (first, _second) = (throttle.join(), throttle.join());
        assert_eq!((first.of(None), first.of(Some(7))), (None, Some(7)));
    }
}
