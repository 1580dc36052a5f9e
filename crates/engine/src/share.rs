//! Divides the link between two kinds of blocks: those that must be at the destination before the
//! switchover and those that need not, or those that a write waits for and the others.

/// The share of the link that the second kind gets while the first kind has something to send: in
/// its first pass, and later, when it has to outrun the guest's writes. docs/decisions/0015 has the
/// measurement.
const FIRST_PASS_SHARE: f64 = 0.25;
const LATER_SHARE: f64 = 0.0;
/// How far one kind may be ahead of its share, in bytes.
const AHEAD_BYTES_MAX: f64 = 1024.0 * 1024.0;

/// The kind that sends next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Regions whose blocks must all arrive before the switchover.
    Must,
    /// Regions for which the list is enough.
    Background,
}

/// The balance between the two kinds, in any unit: bytes on the link, or blocks.
#[derive(Debug)]
pub(crate) struct Share {
    first_pass: f64,
    later: f64,
    /// The share in force.
    background: f64,
    /// How far the background is behind its share, and how far it may be.
    behind: f64,
    ahead_max: f64,
}

impl Default for Share {
    fn default() -> Self {
        Self {
            first_pass: FIRST_PASS_SHARE,
            later: LATER_SHARE,
            background: FIRST_PASS_SHARE,
            behind: 0.0,
            ahead_max: AHEAD_BYTES_MAX,
        }
    }
}

impl Share {
    /// Creates a balance in which the second kind always has this share, and either may be this far
    /// ahead.
    pub(crate) fn of(background: f64, ahead_max: f64) -> Self {
        let mut share = Self {
            ahead_max,
            ..Self::default()
        };
        share.set(background, background);
        share
    }

    /// Sets the shares, from 0 to 1.
    pub(crate) fn set(&mut self, first_pass: f64, later: f64) {
        self.first_pass = first_pass.clamp(0.0, 1.0);
        self.later = later.clamp(0.0, 1.0);
        self.background = self.first_pass;
    }

    /// Records that a pass begins.
    pub(crate) fn pass_started(&mut self, number: u32) {
        self.background = match number {
            0 | 1 => self.first_pass,
            _ => self.later,
        };
        self.behind = self.behind.min(0.0);
    }

    /// Returns which kind sends next, given which of them have something to send.
    pub(crate) fn turn(&self, must: bool, background: bool) -> Option<Turn> {
        match (must, background) {
            (false, false) => None,
            (true, false) => Some(Turn::Must),
            (false, true) => Some(Turn::Background),
            (true, true) if self.behind > 0.0 => Some(Turn::Background),
            (true, true) => Some(Turn::Must),
        }
    }

    /// Records how much one kind has taken while both had something to send.
    pub(crate) fn taken(&mut self, turn: Turn, amount: u64) {
        let amount = amount as f64;
        let change = match turn {
            Turn::Must => amount * self.background,
            Turn::Background => amount * (self.background - 1.0),
        };
        let behind = self.behind + change;
        self.behind = behind.clamp(-self.ahead_max, self.ahead_max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(background: f64) -> (usize, usize) {
        let mut share = Share::of(background, 256.0);
        let (mut must, mut rest) = (0, 0);
        for _ in 0..1000 {
            let turn = share.turn(true, true).unwrap();
            share.taken(turn, 64);
            match turn {
                Turn::Must => must += 1,
                Turn::Background => rest += 1,
            }
        }
        (must, rest)
    }

    #[test]
    fn both_get_their_share() {
        assert_eq!(taken(0.0), (1000, 0));
        assert_eq!(taken(0.5), (500, 500));
        let (must, rest) = taken(0.25);
        assert!(
            must.abs_diff(750) < 3 && rest.abs_diff(250) < 3,
            "{must} {rest}"
        );
    }

    #[test]
    fn later_passes_have_a_share_of_their_own() {
        let mut share = Share::default();
        share.set(1.0, 0.0);
        share.taken(Turn::Must, 1);
        assert_eq!(share.turn(true, true), Some(Turn::Background));
        share.pass_started(2);
        assert_eq!(share.turn(true, true), Some(Turn::Must));
    }

    #[test]
    fn what_one_has_no_use_for_the_other_has() {
        let share = Share::default();
        assert_eq!(share.turn(false, true), Some(Turn::Background));
        assert_eq!(share.turn(true, false), Some(Turn::Must));
        assert_eq!(share.turn(false, false), None);
    }
}
