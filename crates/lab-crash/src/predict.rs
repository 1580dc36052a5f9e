//! Derives the expected result of a case from the rules of the handover: where the guest may be in
//! the end, and which side is in doubt meanwhile.
//!
//! Until RELEASED is in the source's journal the guest belongs to the source; with it, and READY in
//! the destination's, the move completes as soon as the agents meet, unless the destination's QEMU
//! is gone. Where the guest is stopped before that, timing may decide whether a move is given up or
//! completes: then both are right.

use super::case::{Back, Case, Disks, Release, Victim};
use super::point::{Side, Step};
use std::fmt;

/// The final place of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// At the source.
    Source,
    /// At the destination.
    Destination,
    /// It died with its QEMU.
    Nowhere,
}

/// The allowed places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Places(&'static [Place]);

impl Places {
    /// Returns whether a place is allowed.
    pub fn allow(self, place: Place) -> bool {
        self.0.contains(&place)
    }
}

impl fmt::Display for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

const SOURCE: Places = Places(&[Place::Source]);
const DESTINATION: Places = Places(&[Place::Destination]);
const NOWHERE: Places = Places(&[Place::Nowhere]);
const EITHER: Places = Places(&[Place::Source, Place::Destination]);
const SOURCE_OR_NOWHERE: Places = Places(&[Place::Source, Place::Nowhere]);
const DESTINATION_OR_NOWHERE: Places = Places(&[Place::Destination, Place::Nowhere]);

/// Returns the allowed final places of the guest.
pub fn places(case: &Case) -> Places {
    if may_be_loading(case) {
        return match case.kind.victim {
            Victim::SourceQemu => DESTINATION_OR_NOWHERE,
            Victim::DestinationQemu => SOURCE_OR_NOWHERE,
            _ => EITHER,
        };
    }
    match case.kind.release {
        Release::Late => late(case),
        Release::Early => early(case),
    }
}

/// Returns whether RELEASED is in the source's journal, and COMMITTED not yet in the destination's.
fn is_between(case: &Case) -> bool {
    match (case.kind.release, case.kind.step) {
        (_, Step::Released) => true,
        (Release::Late, _) => false,
        (Release::Early, Step::Stopped) => true,
        (Release::Early, _) => false,
    }
}

/// Returns the same after an early release, when only the destination decides: with everything it
/// commits, otherwise it gives up at its time-out.
fn early(case: &Case) -> Places {
    let side = case.point.side;
    if !is_between(case) {
        // Before it, the guest is stopped; after the commit nothing is different.
        return match (case.kind.step, case.kind.victim) {
            (Step::Ready, Victim::DestinationAgent) => EITHER,
            (Step::Ready, Victim::DestinationQemu) => SOURCE,
            (Step::Ready, Victim::SourceQemu) => DESTINATION_OR_NOWHERE,
            _ => late(case),
        };
    }
    match case.kind.victim {
        Victim::SourceAgent | Victim::Connection | Victim::Link => EITHER,
        // Its content is lost with its agent, if it had not committed.
        Victim::DestinationAgent | Victim::BothAgents => match side {
            Side::Source => EITHER,
            Side::Destination => SOURCE,
        },
        Victim::SourceQemu => DESTINATION_OR_NOWHERE,
        Victim::DestinationQemu => SOURCE_OR_NOWHERE,
        Victim::SourceFront
        | Victim::DestinationFront
        | Victim::SourceSupervisor
        | Victim::DestinationSupervisor
        | Victim::PageServer => EITHER,
        Victim::Record => late(case),
    }
}

/// Returns whether the destination may still be loading the guest: it asks for missing memory then,
/// too.
fn may_be_loading(case: &Case) -> bool {
    case.kind.memory.follows() && case.point.needs_the_guest()
}

/// Returns whether READY may have been written and sent by the destination while the source is
/// held.
fn may_be_ready(case: &Case) -> bool {
    [
        "source:after-receipt:loaded",
        "source:after-receipt:loading",
    ]
    .contains(&case.point.name.as_str())
}

fn late(case: &Case) -> Places {
    let (step, side) = (case.kind.step, case.point.side);
    match case.kind.victim {
        Victim::SourceAgent => match step {
            // After its restart it asks, receives READY or more, and sends COMMIT.
            Step::Released | Step::Committed | Step::Pulling | Step::Done | Step::Recovering => {
                DESTINATION
            }
            _ => SOURCE,
        },
        Victim::DestinationAgent => match step {
            // It is back before it is needed.
            Step::Offering if side == Side::Source => EITHER,
            // Its loaded QEMU outlives it; a source that has not released the guest may give up.
            Step::Ready if side == Side::Destination => EITHER,
            Step::Stopped if may_be_ready(case) => EITHER,
            Step::Ready
            | Step::Released
            | Step::Committed
            | Step::Pulling
            | Step::Done
            | Step::Recovering => DESTINATION,
            Step::Returning => returning(case),
            _ => SOURCE,
        },
        Victim::BothAgents => match step {
            Step::Released | Step::Committed | Step::Pulling | Step::Done | Step::Recovering => {
                DESTINATION
            }
            Step::Returning => returning(case),
            _ => SOURCE,
        },
        Victim::SourceQemu => match step {
            // What is missing is lost. All of it may have come.
            Step::Released | Step::Committed | Step::Pulling if case.kind.memory.follows() => {
                DESTINATION_OR_NOWHERE
            }
            // It is not needed once the destination has everything.
            Step::Stopped | Step::Ready | Step::Recovering => DESTINATION_OR_NOWHERE,
            Step::Released | Step::Committed | Step::Pulling | Step::Done => DESTINATION,
            _ => NOWHERE,
        },
        Victim::DestinationQemu => match step {
            // Its end may be noticed before or after the commit.
            Step::Ready | Step::Released | Step::Recovering => SOURCE_OR_NOWHERE,
            Step::Stopped
                if may_be_ready(case) || case.point.name == "destination:before-record:ready" =>
            {
                SOURCE_OR_NOWHERE
            }
            Step::Committed | Step::Pulling | Step::Done => NOWHERE,
            _ => SOURCE,
        },
        Victim::Connection | Victim::Link => match step {
            Step::Asking | Step::Cancelling | Step::Refusing | Step::Returning => SOURCE,
            Step::Released | Step::Committed | Step::Pulling | Step::Done => DESTINATION,
            _ => EITHER,
        },
        // Another one takes over; a move that may have missed a write of the guest is given up, if
        // that is still possible.
        Victim::SourceFront
        | Victim::DestinationFront
        | Victim::SourceSupervisor
        | Victim::DestinationSupervisor => match step {
            Step::Released | Step::Committed | Step::Pulling => DESTINATION,
            _ => EITHER,
        },
        // Until COMMITTED, the destination may give up.
        Victim::PageServer => EITHER,
        Victim::Record => match step {
            Step::Committed | Step::Done => DESTINATION,
            Step::Released if side == Side::Destination => DESTINATION,
            _ => SOURCE,
        },
    }
}

/// Returns the places for a guest that the destination's QEMU refused to run: a destination
/// restarted with COMMITTED tries again, and may succeed.
fn returning(case: &Case) -> Places {
    if case.point.name.contains(":before-record:") {
        EITHER
    } else {
        SOURCE
    }
}

/// The observable state of the guest during the absence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meanwhile {
    /// The source has given up: the guest runs on.
    Runs,
    /// The source cannot tell.
    InDoubt,
    /// It is released, and not committed: no copy runs.
    Silent,
    /// It runs at the destination, which reports missing blocks of its disks or its memory.
    Fetches,
}

/// Returns what must be observable during an absence; `None` where the rules leave it open.
pub fn meanwhile(case: &Case) -> Option<Meanwhile> {
    if case.kind.back == Back::AtOnce {
        return None;
    }
    let side = case.point.side;
    // With hybrid, the guest may have overwritten all missing blocks of a disk.
    if case.kind.step == Step::Pulling {
        let alone = matches!(case.kind.victim, Victim::SourceAgent | Victim::Link);
        let fetches = case.kind.disks == Disks::Postcopy || case.kind.memory.follows();
        return (alone && fetches && !may_be_loading(case)).then_some(Meanwhile::Fetches);
    }
    if case.kind.release == Release::Early {
        return meanwhile_early(case);
    }
    match (case.kind.victim, case.kind.step) {
        (Victim::DestinationAgent | Victim::Link, Step::Stopped) if may_be_ready(case) => None,
        (Victim::DestinationAgent | Victim::Link, Step::Stopped) => Some(Meanwhile::Runs),
        (Victim::DestinationAgent | Victim::Link, Step::Ready) => match side {
            // It has received READY, and goes on.
            Side::Source => Some(Meanwhile::InDoubt),
            Side::Destination => Some(Meanwhile::Runs),
        },
        (Victim::DestinationAgent | Victim::Link, Step::Released) => Some(Meanwhile::InDoubt),
        // Its message is on the way, or was received.
        (Victim::DestinationAgent | Victim::Link, Step::Committed) if side == Side::Destination => {
            Some(Meanwhile::InDoubt)
        }
        (Victim::SourceAgent, Step::Released) if side == Side::Source => Some(Meanwhile::Silent),
        (Victim::BothAgents, Step::Released) => Some(Meanwhile::Silent),
        _ => None,
    }
}

/// Returns whether the point is a question of the source about what arrived: local disks are
/// compared before the stop, while the guest still runs.
fn asks(case: &Case) -> bool {
    ["verify-region", "digests"].contains(&case.point.what())
}

fn meanwhile_early(case: &Case) -> Option<Meanwhile> {
    let between = is_between(case);
    match case.kind.victim {
        Victim::DestinationAgent if case.kind.disks != Disks::Shared && asks(case) => None,
        // At the source's points after the stop the destination may have committed by itself.
        Victim::DestinationAgent if between && case.point.side == Side::Destination => {
            Some(Meanwhile::InDoubt)
        }
        Victim::SourceAgent if case.point.name == "source:after-record:released" => {
            Some(Meanwhile::Silent)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::case::{Kind, Memory, Pair};
    use super::super::point::Point;
    use super::*;
    use longhaul_lab::guest::disks::Format;

    fn case(victim: Victim, point: &str, back: Back) -> Case {
        let point = Point::named(point).unwrap();
        Case {
            kind: Kind {
                victim,
                step: point.step,
                release: Release::Late,
                pair: Pair::New,
                locks: false,
                back,
                disks: Disks::Shared,
                format: Format::Raw,
                memory: Memory::Precopy,
            },
            point,
        }
    }

    #[test]
    fn the_two_records_are_the_borders() {
        let both = |point| places(&case(Victim::BothAgents, point, Back::AtOnce));
        assert_eq!(both("source:before-record:released"), SOURCE);
        assert_eq!(both("source:after-record:released"), DESTINATION);
        assert_eq!(both("destination:after-record:committed"), DESTINATION);
        let meanwhile = |point| meanwhile(&case(Victim::DestinationAgent, point, Back::Later));
        assert_eq!(
            meanwhile("destination:after-record:ready"),
            Some(Meanwhile::Runs)
        );
        assert_eq!(
            meanwhile("source:after-record:released"),
            Some(Meanwhile::InDoubt)
        );
        assert_eq!(meanwhile("source:after-receipt:committed"), None);
    }
}
