//! The order in which missing stripes of an image are fetched: those likely to be read soon come
//! first.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The hot stripes of an image, as its users report them. Several users may report, also during the
/// download: stripes that most of them use come first, and among those the most used ones.
#[derive(Debug, Default)]
pub struct Order {
    hot: Mutex<BTreeMap<u32, Heat>>,
    /// Number of reports so far.
    revision: AtomicU64,
}

/// How hot a stripe is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Heat {
    users: u32,
    pages: u32,
}

impl Order {
    /// Adds another user's report: stripes, and how many of their pages it uses. If a stripe is
    /// named twice, the last entry counts.
    pub fn add(&self, hot: impl IntoIterator<Item = (u32, u32)>) {
        let said: BTreeMap<u32, u32> = hot.into_iter().collect();
        let mut known = self.lock();
        for (stripe, pages) in said {
            let heat = known.entry(stripe).or_default();
            heat.users = heat.users.saturating_add(1);
            heat.pages = heat.pages.saturating_add(pages);
        }
        self.revision.fetch_add(1, Ordering::Release);
    }

    /// Replaces all reports by these stripes, hottest first.
    pub fn set(&self, hottest: &[u32]) {
        let heat = |(place, stripe): (usize, &u32)| {
            let pages = u32::try_from(hottest.len() - place).unwrap_or(u32::MAX);
            (*stripe, Heat { users: 1, pages })
        };
        *self.lock() = hottest.iter().enumerate().map(heat).collect();
        self.revision.fetch_add(1, Ordering::Release);
    }

    /// Returns all reported stripes, hottest first.
    pub fn hottest(&self) -> Vec<u32> {
        let hot = self.lock();
        let mut stripes: Vec<(Heat, u32)> = hot.iter().map(|(at, heat)| (*heat, *at)).collect();
        // Equally hot ones in the order of the disk.
        stripes.sort_by(|one, other| other.0.cmp(&one.0).then(one.1.cmp(&other.1)));
        stripes.into_iter().map(|(_, stripe)| stripe).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Heat>> {
        // Each entry of a partly added report is correct by itself.
        self.hot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One pass through an image, in an order that may change meanwhile.
pub(super) struct Round<'a> {
    order: &'a Order,
    state: Mutex<State>,
}

struct State {
    revision: Option<u64>,
    /// The next hot stripes, coldest first.
    hot: Vec<u32>,
    /// Whether each stripe was returned.
    given: Vec<bool>,
    /// Where the search for the other stripes continues.
    next: usize,
}

impl<'a> Round<'a> {
    pub(super) fn new(order: &'a Order, stripes: u32) -> Self {
        let state = State {
            revision: None,
            hot: Vec::new(),
            given: vec![false; stripes as usize],
            next: 0,
        };
        Self {
            order,
            state: Mutex::new(state),
        }
    }

    /// Returns the next stripe; each is returned once.
    pub(super) fn next(&self) -> Option<u32> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let revision = self.order.revision.load(Ordering::Acquire);
        if state.revision != Some(revision) {
            state.revision = Some(revision);
            state.hot = self.order.hottest();
            state.hot.reverse();
        }
        let State {
            hot, given, next, ..
        } = &mut *state;
        while let Some(stripe) = hot.pop() {
            // Stripes beyond the image's end are ignored.
            if let Some(given) = given.get_mut(stripe as usize)
                && !std::mem::replace(given, true)
            {
                return Some(stripe);
            }
        }
        let found = given.iter_mut().enumerate().skip(*next);
        let (stripe, given) = found.into_iter().find(|(_, given)| !**given)?;
        *given = true;
        *next = stripe + 1;
        // An image is at most 4 Mi stripes long.
        Some(stripe as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_most_use_comes_first_and_of_that_what_they_use_most() {
        let order = Order::default();
        order.add([(7, 64), (3, 1), (5, 2)]);
        assert_eq!(order.hottest(), [7, 5, 3]);
        order.add([(3, 1), (9, 64), (5, 1), (5, 9)]);
        assert_eq!(order.hottest(), [5, 3, 7, 9]);
        let other = Order::default();
        other.set(&order.hottest());
        assert_eq!(other.hottest(), order.hottest());
    }

    #[test]
    fn each_stripe_is_given_out_once_whatever_is_said_meanwhile() {
        let order = Order::default();
        order.add([(4, 9), (1 << 30, 9), (2, 5)]);
        let round = Round::new(&order, 6);
        assert_eq!((round.next(), round.next()), (Some(4), Some(2)));
        assert_eq!(round.next(), Some(0));
        order.add([(5, 1), (4, 1), (0, 9)]);
        let rest: Vec<u32> = std::iter::from_fn(|| round.next()).collect();
        assert_eq!(rest, [5, 1, 3]);
        assert_eq!(Round::new(&order, 6).next(), Some(4));
    }
}
