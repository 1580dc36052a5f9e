//! Limits on the sending rate of this host. All migrations from here share one limit equally, and
//! those of a group share another. Each migration can also have its own limit.

use crate::host::lock::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

/// The limit of all migrations from this host, and the numbers of migrations in each group.
#[derive(Debug, Clone)]
pub(crate) struct Throttle {
    total_bps: Option<u64>,
    all: Count,
    groups: Arc<Mutex<HashMap<String, Count>>>,
}

/// The number of migrations that share a limit.
type Count = Arc<watch::Sender<u64>>;

impl Throttle {
    /// Creates the throttle, with the limit of all migrations together in bits per second.
    pub(crate) fn new(total_bps: Option<u64>) -> Self {
        Self {
            total_bps,
            all: Count::default(),
            groups: Arc::default(),
        }
    }

    /// Returns the limit of a sender that shares with no other, in bits per second.
    pub(crate) fn alone(&self, own_bps: Option<u64>) -> Option<u64> {
        at_most(own_bps, self.total_bps)
    }

    /// Adds a migration. In a group, the migration's own limit is the limit of the whole group.
    pub(crate) fn join(&self, group: Option<&str>) -> Share {
        let group = group.map(|name| {
            let mut groups = lock(&self.groups);
            groups.retain(|_, count| *count.borrow() > 0);
            Place::new(groups.entry(name.to_owned()).or_default())
        });
        Share {
            total_bps: self.total_bps,
            all: Place::new(&self.all),
            group,
        }
    }
}

/// One member of those that share a limit, until it is dropped.
#[derive(Debug)]
struct Place {
    count: Count,
    seen: watch::Receiver<u64>,
}

impl Place {
    fn new(count: &Count) -> Self {
        count.send_modify(|moves| *moves += 1);
        Self {
            count: count.clone(),
            seen: count.subscribe(),
        }
    }

    /// Returns this member's share of a limit.
    fn part(&self, all_bps: Option<u64>) -> Option<u64> {
        let moves = (*self.seen.borrow()).max(1);
        all_bps.map(|all| all / moves)
    }

    async fn changed(&mut self) {
        // Never closed: this place has the sender too.
        if self.seen.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.count.send_modify(|moves| *moves -= 1);
    }
}

/// The share of one migration, until it is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    total_bps: Option<u64>,
    all: Place,
    group: Option<Place>,
}

impl Share {
    /// Returns the migration's limit in bits per second, given its own or its group's limit.
    pub(crate) fn of(&self, own_bps: Option<u64>) -> Option<u64> {
        let own_bps = match &self.group {
            Some(group) => group.part(own_bps),
            None => own_bps,
        };
        at_most(own_bps, self.all.part(self.total_bps))
    }

    /// Waits until the share may have changed. Safe to cancel.
    pub(crate) async fn changed(&mut self) {
        let Self {
            total_bps,
            all,
            group,
        } = self;
        let of_group = async {
            match group {
                Some(group) => group.changed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = all.changed(), if total_bps.is_some() => {}
            () = of_group => {}
        }
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
        let mut first = throttle.join(None);
        assert_eq!((first.of(None), first.of(Some(50))), (Some(90), Some(50)));
        let second = throttle.join(None);
        first.changed().await;
        assert_eq!((first.of(None), second.of(Some(50))), (Some(45), Some(45)));
        drop(second);
        first.changed().await;
        assert_eq!(first.of(None), Some(90));
        assert_eq!(throttle.alone(Some(100)), Some(90));
    }

    #[test]
    fn without_a_limit_there_is_nothing_to_share() {
        let throttle = Throttle::new(None);
        let (first, _second) = (throttle.join(None), throttle.join(None));
        assert_eq!((first.of(None), first.of(Some(7))), (None, Some(7)));
    }

    #[tokio::test]
    async fn a_group_shares_its_limit_beside_others() {
        let throttle = Throttle::new(Some(1000));
        let mut first = throttle.join(Some("night"));
        let other = throttle.join(Some("day"));
        assert_eq!(
            (first.of(Some(60)), other.of(Some(60))),
            (Some(60), Some(60))
        );
        let second = throttle.join(Some("night"));
        first.changed().await;
        assert_eq!(
            (first.of(Some(60)), second.of(Some(60))),
            (Some(30), Some(30))
        );
        assert_eq!(first.of(None), Some(333), "of all three");
        drop((first, second));
        let again = throttle.join(Some("night"));
        assert_eq!(again.of(Some(60)), Some(60));
        assert_eq!(lock(&throttle.groups).len(), 2);
    }
}
