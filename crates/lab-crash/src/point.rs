//! Lists the points at which an agent can be made to fail, in the order of a move, and how each is
//! reached.

use longhaul_lab::error::LabError;

/// The step of a move in which a point is. The first nine follow each other, the eighth only where
/// blocks of a disk or of memory are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Step {
    /// `longhaul plan` asks; nothing moves.
    Asking,
    /// The destination is offered the guest, and has no QEMU for it.
    Offering,
    /// Memory is sent; the guest runs at the source.
    Sending,
    /// The guest is stopped; its remaining state is sent, loaded and compared.
    Stopped,
    /// The destination has READY in its journal.
    Ready,
    /// The source has RELEASED in its journal.
    Released,
    /// The destination has COMMITTED in its journal.
    Committed,
    /// The guest runs at the destination, which fetches the missing blocks of its disks and its
    /// memory.
    Pulling,
    /// The source has DONE in its journal.
    Done,
    /// The move is cancelled while memory is sent.
    Cancelling,
    /// The destination refuses the offer, since it cannot write its first record.
    Refusing,
    /// The connection was lost while memory was sent, and is made again.
    Resuming,
    /// The source's agent was killed after RELEASED, and asks after its restart.
    Recovering,
    /// The destination's QEMU refuses to run the guest after COMMITTED.
    Returning,
    /// An operator's statement, a disk that cannot be read, a question at the wrong moment, or
    /// state kept after a move: no move of the matrix passes here.
    Elsewhere,
}

impl Step {
    /// All of them.
    pub const ALL: [Self; 15] = [
        Self::Asking,
        Self::Offering,
        Self::Sending,
        Self::Stopped,
        Self::Ready,
        Self::Released,
        Self::Committed,
        Self::Pulling,
        Self::Done,
        Self::Cancelling,
        Self::Refusing,
        Self::Resuming,
        Self::Recovering,
        Self::Returning,
        Self::Elsewhere,
    ];
}

/// One of the two hosts of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// The host that the guest leaves.
    Source,
    /// The host that it moves to.
    Destination,
}

impl Side {
    /// Returns the other one.
    pub fn other(self) -> Self {
        match self {
            Self::Source => Self::Destination,
            Self::Destination => Self::Source,
        }
    }
}

/// A point, as `longhaul agent --list-fail-points` names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Point {
    /// Its name.
    pub name: String,
    /// Its step.
    pub step: Step,
    /// The side whose agent passes it.
    pub side: Side,
}

/// All points in the order of a move: `s` and `d` are their sides.
const PLACES: &[(Step, &[&str])] = &[
    (
        Step::Asking,
        &[
            "s:before-send:query",
            "d:after-receipt:query",
            "d:before-send:answer",
            "s:after-receipt:answer",
        ],
    ),
    (
        Step::Offering,
        &[
            "s:before-record:began",
            "s:after-record:began",
            "s:before-send:offer-disks",
            "s:before-send:offer",
            "d:after-receipt:offer-disks",
            "d:after-receipt:offer",
            "d:before-record:began",
            "d:after-record:began",
            "d:before-send:launching",
            "s:after-receipt:launching",
        ],
    ),
    (
        Step::Sending,
        &[
            "s:before-send:start",
            "d:before-send:accepted",
            "s:after-receipt:accepted",
            "d:after-receipt:start",
            "s:stopping:converged",
        ],
    ),
    (
        Step::Stopped,
        &[
            "s:before-send:list",
            "d:after-receipt:list",
            "s:before-send:complete",
            "d:after-receipt:complete",
            "d:before-send:loading",
            "s:after-receipt:loading",
            "d:before-send:loaded",
            "s:after-receipt:loaded",
            "s:before-send:verify-region",
            "d:after-receipt:verify-region",
            "d:before-send:digests",
            "s:after-receipt:digests",
            "s:before-send:verified",
            "d:after-receipt:verified",
            "d:before-record:ready",
        ],
    ),
    (
        Step::Ready,
        &[
            "d:after-record:ready",
            "d:before-send:ready",
            "s:after-receipt:ready",
            "s:before-record:released",
        ],
    ),
    (
        Step::Released,
        &[
            "s:after-record:released",
            "s:before-send:commit",
            "d:after-receipt:commit",
            "d:before-record:committed",
        ],
    ),
    (
        Step::Committed,
        &[
            "d:after-record:committed",
            "d:before-send:committed",
            "s:after-receipt:committed",
            "s:before-record:done",
        ],
    ),
    (
        Step::Pulling,
        &[
            "d:before-send:missing",
            "s:after-receipt:missing",
            "d:before-send:want",
            "s:after-receipt:want",
            "d:before-send:superseded",
            "s:after-receipt:superseded",
        ],
    ),
    (
        Step::Done,
        &[
            "d:before-send:summary",
            "d:before-send:faults",
            "s:after-receipt:faults",
            "d:before-send:used",
            "s:after-receipt:used",
            "d:before-record:all-present",
            "d:after-record:all-present",
            "d:before-send:all-present",
            "s:after-record:done",
            "s:after-receipt:summary",
            "s:after-receipt:all-present",
            "s:before-record:closed",
            "s:after-record:closed",
            "s:before-send:done",
            "d:after-receipt:done",
            "d:before-record:closed",
            "d:after-record:closed",
            "d:before-send:clock",
            "s:after-receipt:clock",
            "d:before-send:closed",
            "s:after-receipt:closed",
            "d:before-send:rate",
            "s:after-receipt:rate",
        ],
    ),
    (
        Step::Cancelling,
        &[
            "s:before-send:cancel",
            "d:after-receipt:cancel",
            "s:before-record:aborted",
            "s:after-record:aborted",
            "d:before-record:aborted",
            "d:after-record:aborted",
            "d:before-send:aborted",
            "s:after-receipt:aborted",
        ],
    ),
    (
        Step::Refusing,
        &["d:before-send:refused", "s:after-receipt:refused"],
    ),
    (
        Step::Resuming,
        &[
            "s:before-send:resume",
            "d:after-receipt:resume",
            "d:before-send:resumed",
            "s:after-receipt:resumed",
        ],
    ),
    (
        Step::Recovering,
        &["s:before-send:ask", "d:after-receipt:ask"],
    ),
    (
        Step::Returning,
        &["d:before-record:returned", "d:after-record:returned"],
    ),
    (
        Step::Elsewhere,
        &[
            "s:before-record:overruled",
            "s:after-record:overruled",
            "d:before-record:overruled",
            "d:after-record:overruled",
            "d:before-record:gave-up",
            "d:after-record:gave-up",
            "s:before-send:overruled",
            "d:after-receipt:overruled",
            "d:before-send:status",
            "s:after-receipt:status",
            "s:before-send:unreadable",
            "d:after-receipt:unreadable",
            "s:before-send:length",
            "d:after-receipt:length",
            "d:before-send:want-content",
            "s:after-receipt:want-content",
            "s:keeping:memory",
        ],
    ),
];

impl Point {
    /// Returns all points that the matrix reaches.
    pub fn all() -> impl Iterator<Item = Self> {
        let places = PLACES
            .iter()
            .flat_map(|(step, places)| places.iter().map(|place| (*step, *place)));
        places.filter_map(|(step, place)| {
            let (side, name) = match place.split_once(':')? {
                ("s", rest) => (Side::Source, format!("source:{rest}")),
                (_, rest) => (Side::Destination, format!("destination:{rest}")),
            };
            Some(Self { name, step, side })
        })
    }

    /// Returns the point of that name.
    ///
    /// # Errors
    /// When the matrix does not know how to reach it: a new record or message must be added here.
    pub fn named(name: &str) -> Result<Self, LabError> {
        Self::all().find(|point| point.name == name).ok_or_else(|| {
            LabError::Which(format!(
                "the crash matrix has no place for the fail point `{name}` (hint: crash/point.rs)"
            ))
        })
    }

    /// Returns whether it is at a message.
    pub fn is_message(&self) -> bool {
        [":before-send:", ":after-receipt:"]
            .iter()
            .any(|when| self.name.contains(when))
    }

    /// Returns whether it is at a record.
    pub fn is_record(&self) -> bool {
        self.name.contains("-record:")
    }

    /// Returns whether it is passed only when disks move too.
    pub fn needs_local_disks(&self) -> bool {
        self.what() == "offer-disks"
    }

    /// Returns whether it is passed only when disks move too, or memory follows.
    pub fn needs_lists(&self) -> bool {
        self.what() == "list"
    }

    /// Returns whether it is passed only when blocks of disks or memory follow.
    pub fn needs_what_follows(&self) -> bool {
        self.what() == "used"
    }

    /// Returns whether it is passed only when memory follows.
    pub fn needs_memory(&self) -> bool {
        ["loading", "faults"].contains(&self.what())
    }

    /// Returns whether it is passed only when no disks move: another message offers a guest with
    /// its disks.
    pub fn needs_shared_disks(&self) -> bool {
        self.what() == "offer"
    }

    /// Returns its message, or record.
    pub fn what(&self) -> &str {
        self.name.rsplit(':').next().unwrap_or_default()
    }

    /// Returns whether it is passed only when the guest writes to missing blocks of a disk.
    pub fn needs_writes(&self) -> bool {
        self.what() == "superseded"
    }

    /// Returns whether it is passed only over a connection that is made again, unless disks follow.
    pub fn needs_another_connection(&self) -> bool {
        ["missing", "resume", "resumed"].contains(&self.what())
    }

    /// Returns whether it is passed only when the guest accesses missing blocks.
    pub fn needs_the_guest(&self) -> bool {
        ["want", "superseded"].contains(&self.what())
    }

    /// Returns whether it is passed only when both copies are compared.
    pub fn needs_verify(&self) -> bool {
        ["verify-region", "digests", "verified"].contains(&self.what())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_has_its_place() {
        let point = Point::named("destination:after-receipt:commit").unwrap();
        assert_eq!(
            (point.step, point.side),
            (Step::Released, Side::Destination)
        );
        assert!(!point.is_record());
        assert!(
            Point::named("source:before-record:released")
                .unwrap()
                .is_record()
        );
        assert!(
            Point::named("source:after-receipt:digests")
                .unwrap()
                .needs_verify()
        );
        let error = Point::named("source:before-record:dreamt").unwrap_err();
        assert!(error.to_string().contains("dreamt"), "{error}");
    }
}
