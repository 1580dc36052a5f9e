//! Determines which operations may be under way at the same time, and how completed ones are
//! reported.

use crate::plan::{OPERATIONS_MAX, Operation, Plan};

/// No operation starts while one that is this far back is still under way.
pub const WINDOW: u64 = 32;

/// The acknowledged operations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Told {
    /// All below this number.
    pub done: u64,
    /// And of those after it: bit 0 is the operation with the number `done`.
    pub mask: u32,
    /// Whether no operation is under way, and none will follow.
    pub quiet: bool,
}

impl Told {
    /// Returns whether an operation has been acknowledged.
    pub fn has(&self, number: u64) -> bool {
        match number.checked_sub(self.done) {
            None => true,
            Some(ahead) => ahead < WINDOW && self.mask >> ahead & 1 == 1,
        }
    }

    /// Returns the union of both reports.
    pub fn and(self, other: Self) -> Self {
        let (more, less) = if self.done >= other.done {
            (self, other)
        } else {
            (other, self)
        };
        let ahead = more.done - less.done;
        let mask = if ahead < WINDOW {
            less.mask >> ahead
        } else {
            0
        };
        Self {
            done: more.done,
            mask: more.mask | mask,
            quiet: self.quiet || other.quiet,
        }
    }
}

/// The operations under way: they start in the order of their numbers, each when it has nothing to
/// wait for.
#[derive(Debug)]
pub struct Order {
    plan: Plan,
    next: u64,
    told: Told,
    under_way: Vec<Operation>,
}

impl Order {
    /// Creates an order with nothing done.
    pub fn new(plan: Plan) -> Self {
        Self {
            plan,
            next: 0,
            told: Told::default(),
            under_way: Vec::new(),
        }
    }

    /// Returns the next operation, if it may start and its number is below `end`; it is then under
    /// way.
    pub fn start(&mut self, end: u64) -> Option<Operation> {
        let end = end.min(OPERATIONS_MAX);
        if self.next >= (self.told.done + WINDOW).min(end) {
            return None;
        }
        let operation = self.plan.operation(self.next);
        if self.under_way.iter().any(|it| operation.waits_for(it)) {
            return None;
        }
        self.next += 1;
        self.under_way.push(operation);
        Some(operation)
    }

    /// Records the acknowledgement of an operation.
    pub fn finish(&mut self, number: u64) {
        self.under_way.retain(|it| it.number != number);
        self.told.mask |= 1 << (number - self.told.done);
        while self.told.mask & 1 == 1 {
            self.told.mask >>= 1;
            self.told.done += 1;
        }
    }

    /// Returns the report.
    pub fn told(&self) -> Told {
        self.told
    }

    /// Returns the operations under way.
    pub fn under_way(&self) -> &[Operation] {
        &self.under_way
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Kind;
    use crate::random::Random;

    #[test]
    fn what_is_under_way_never_overlaps_and_flushes_wait() {
        let plan = Plan::new(9, vec![4096, 4096]).unwrap();
        let mut order = Order::new(plan);
        let mut random = Random::new(1);
        let mut most = 0;
        while order.told().done < 3000 {
            while let Some(started) = order.start(u64::MAX) {
                let others = || {
                    order
                        .under_way()
                        .iter()
                        .filter(|it| it.number < started.number)
                };
                let barriers = others().filter(|it| it.kind == Kind::Flush { barrier: true });
                assert_eq!(barriers.count(), 0);
                for other in others().filter(|it| it.disk == started.disk) {
                    let overlap = started.range().any(|it| other.range().contains(&it));
                    let modifies = other.kind.modifies() || started.kind.modifies();
                    assert!(!(overlap && modifies), "{started:?} beside {other:?}");
                    let is_flush = matches!(started.kind, Kind::Flush { .. });
                    assert!(!(is_flush && other.kind.modifies()));
                }
            }
            most = most.max(order.under_way().len());
            let chosen = random.below(order.under_way().len() as u64) as usize;
            let number = order.under_way()[chosen].number;
            assert!(!order.told().has(number));
            order.finish(number);
            assert!(order.told().has(number));
        }
        assert!(most > 6, "{most}");
    }

    #[test]
    fn what_was_told_adds_up() {
        let told = |done, mask| Told {
            done,
            mask,
            quiet: false,
        };
        assert_eq!(told(10, 0b1000).and(told(12, 0b100)), told(12, 0b110));
        assert_eq!(told(90, 1).and(told(12, u32::MAX)), told(90, 1));
        let known = told(10, 0b100);
        assert!(known.has(9) && !known.has(10) && known.has(12) && !known.has(99));
    }
}
