//! The correction of a guest's clock after a migration, in the report.

use longhaul_api::{ClockTeller, GuestClock, Report};
use longhaul_protocol::message;

/// Adds the clock's correction to a report.
pub(crate) fn report(clock: message::GuestClock, report: &mut Report) {
    report.clock = Some(GuestClock {
        told_by: match clock.by_agent {
            true => ClockTeller::GuestAgent,
            false => ClockTeller::RealTimeClock,
        },
        before_ms: clock.before_ms,
        after_ms: clock.after_ms,
        set: clock.set,
    });
}
