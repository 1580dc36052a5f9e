//! What the rules of the hand-over say of a case: where the guest may be when all is over, and who
//! is in doubt meanwhile.
//!
//! Until RELEASED is in the source's journal the guest belongs to the source; from COMMITTED in the
//! destination's on to the destination; in between only the two together can tell. Where the guest
//! stands still, chance may decide whether a move is given up or goes through: then both are right.

use super::case::{Back, Case, Victim};
use super::point::{Side, Step};
use std::fmt;

/// Where the guest is when all is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// At the source.
    Source,
    /// At the destination.
    Destination,
    /// It died with its QEMU.
    Nowhere,
}

/// The places that are right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Places(&'static [Place]);

impl Places {
    /// Whether this one is.
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

/// Where the guest may be when all is over.
pub fn places(case: &Case) -> Places {
    match case.kind.victim {
        Victim::SourceAgent => source_agent(case),
        Victim::DestinationAgent => destination_agent(case),
        Victim::BothAgents => match case.kind.step {
            Step::Committed | Step::Done => DESTINATION,
            Step::Returning => returning_agent(case),
            _ => SOURCE,
        },
        Victim::SourceQemu => match case.kind.step {
            // It is not missed once the destination has everything.
            Step::Stopped | Step::Ready | Step::Recovering => DESTINATION_OR_NOWHERE,
            Step::Released | Step::Committed | Step::Done => DESTINATION,
            _ => NOWHERE,
        },
        Victim::DestinationQemu => match case.kind.step {
            // Its end may be noticed before or after the commit.
            Step::Ready | Step::Released | Step::Recovering => SOURCE_OR_NOWHERE,
            Step::Stopped if case.point.name == "destination:before-record:ready" => {
                SOURCE_OR_NOWHERE
            }
            Step::Committed | Step::Done => NOWHERE,
            _ => SOURCE,
        },
        Victim::Connection | Victim::Link => match case.kind.step {
            Step::Asking | Step::Cancelling | Step::Refusing | Step::Returning => SOURCE,
            Step::Released | Step::Committed | Step::Done => DESTINATION,
            Step::Offering
            | Step::Sending
            | Step::Stopped
            | Step::Ready
            | Step::Resuming
            | Step::Recovering => EITHER,
        },
        Victim::Record => match case.kind.step {
            Step::Committed | Step::Done => DESTINATION,
            Step::Released if case.point.side == Side::Destination => DESTINATION,
            _ => SOURCE,
        },
    }
}

fn source_agent(case: &Case) -> Places {
    match case.kind.step {
        // COMMIT may never have been sent: a destination that is ready may give up, or be told.
        Step::Released if case.point.side == Side::Source => EITHER,
        Step::Released | Step::Committed | Step::Done => DESTINATION,
        Step::Recovering => EITHER,
        _ => SOURCE,
    }
}

fn destination_agent(case: &Case) -> Places {
    match case.kind.step {
        // Back before it was needed, it was not missed.
        Step::Offering if case.point.side == Side::Source => EITHER,
        Step::Committed | Step::Done => DESTINATION,
        Step::Recovering => SOURCE,
        Step::Returning => returning_agent(case),
        _ => SOURCE,
    }
}

/// Without RETURNED in its journal a destination that has quit its QEMU has lost the guest.
fn returning_agent(case: &Case) -> Places {
    if case.point.name.contains(":before-record:") {
        NOWHERE
    } else {
        SOURCE
    }
}

/// What the source says of the guest while the destination is away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meanwhile {
    /// It has given up: the guest runs on.
    Runs,
    /// It cannot tell.
    InDoubt,
}

/// What the source must say while the destination cannot be reached; nothing where it need not be
/// either, or is not there itself.
pub fn meanwhile(case: &Case) -> Option<Meanwhile> {
    let away = match case.kind.victim {
        Victim::DestinationAgent | Victim::Link => case.kind.back == Back::Later,
        _ => false,
    };
    if !away {
        return None;
    }
    match case.kind.step {
        Step::Stopped | Step::Ready => Some(Meanwhile::Runs),
        Step::Released => Some(Meanwhile::InDoubt),
        // Its word is on the way, or was heard.
        Step::Committed if case.point.side == Side::Destination => Some(Meanwhile::InDoubt),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::case::{Kind, Pair};
    use super::super::point::Point;
    use super::*;

    fn case(victim: Victim, point: &str, back: Back) -> Case {
        let point = Point::named(point).unwrap();
        Case {
            kind: Kind {
                victim,
                step: point.step,
                pair: Pair::New,
                locks: false,
                back,
            },
            point,
        }
    }

    #[test]
    fn the_two_records_are_the_borders() {
        let both = |point| places(&case(Victim::BothAgents, point, Back::AtOnce));
        assert_eq!(both("source:before-record:released"), SOURCE);
        assert_eq!(both("destination:before-record:committed"), SOURCE);
        assert_eq!(both("destination:after-record:committed"), DESTINATION);
        let meanwhile = |point| meanwhile(&case(Victim::DestinationAgent, point, Back::Later));
        assert_eq!(
            meanwhile("source:before-record:released"),
            Some(Meanwhile::Runs)
        );
        assert_eq!(
            meanwhile("source:after-record:released"),
            Some(Meanwhile::InDoubt)
        );
        assert_eq!(meanwhile("source:after-receipt:committed"), None);
    }
}
