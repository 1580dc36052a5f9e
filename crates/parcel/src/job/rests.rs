//! Leaves processors to guests.

use nix::time::{ClockId, clock_gettime};
use std::thread;
use std::time::Duration;

/// The rest after some work, relative to its processor time.
const SHARE: u32 = 5;
/// Less work is followed by no rest yet.
const LEAST: Duration = Duration::from_millis(2);
/// One rest takes no longer, whatever the work was.
const LONGEST: Duration = Duration::from_millis(500);

/// Rests of a process that works beside guests: on average it takes a sixth of a processor. To
/// wait for disks and devices is no work.
#[derive(Debug)]
pub(super) struct Rests {
    since: Duration,
}

/// Returns the processor time of this process. Where it is unknown there are no rests.
fn used() -> Duration {
    let used = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID);
    used.map_or(Duration::ZERO, Duration::from)
}

impl Rests {
    /// Begins to work.
    pub(super) fn begin() -> Self {
        Self { since: used() }
    }

    /// Rests, if the process has worked for some time.
    pub(super) fn take(&mut self) {
        if let Some(rest) = rest(used().saturating_sub(self.since)) {
            thread::sleep(rest);
            self.since = used();
        }
    }
}

fn rest(worked: Duration) -> Option<Duration> {
    (worked >= LEAST).then(|| (worked * SHARE).min(LONGEST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rest_is_in_proportion_to_the_work_and_not_endless() {
        let ms = Duration::from_millis;
        assert_eq!(rest(ms(1)), None);
        assert_eq!(rest(ms(30)), Some(ms(150)));
        assert_eq!(rest(Duration::from_secs(9)), Some(LONGEST));
    }
}
