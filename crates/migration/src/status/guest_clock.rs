//! A guest's clock after a move, in the report.

use longhaul_api::{ClockTeller, GuestClock, Report};
use longhaul_protocol::message;

/// Puts it into a report.
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
