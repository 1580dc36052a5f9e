//! Defines the default exploration, the additions of `--deep`, and where each broken variant must
//! be caught.

use crate::machine::{Left, Setting};
use crate::variant::Variant;
use crate::world::Budget;

/// A setting with its budget of faults.
#[derive(Debug, Clone, Copy)]
pub struct Configuration {
    /// The setting.
    pub setting: Setting,
    /// The possible faults.
    pub budget: Budget,
}

/// The state of the owner's guest: running in most cases.
#[derive(Clone, Copy, PartialEq)]
enum Guest {
    Runs,
    Paused,
}
use Guest::{Paused, Runs};

/// Whether steps are kept in order where that makes fewer states: [`Setting::orderly`].
#[derive(Clone, Copy, PartialEq)]
enum Order {
    Any,
    Kept,
}
use Order::{Any, Kept};

/// The guest, attempts, messages at a time, order; then the numbers of: crashes at A and B, failed
/// writes, duplicated messages, surprises of QEMU, lost hosts, starts by an operator, lost
/// journals, hosts that never return, replaced hosts.
type Row = (Guest, usize, u32, Order, [u8; 10]);

/// Every row is explored with a late release and with an early one.
const USUAL: [Row; 20] = [
    (Runs, 1, 3, Any, [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]),
    (Runs, 1, 3, Any, [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]),
    (Runs, 1, 2, Any, [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]),
    (Runs, 1, 2, Any, [0, 1, 2, 0, 0, 0, 0, 0, 0, 0]),
    (Runs, 1, 2, Any, [1, 0, 2, 0, 0, 0, 0, 0, 0, 0]),
    (Runs, 1, 2, Any, [1, 1, 0, 0, 1, 0, 0, 0, 0, 0]),
    (Runs, 1, 2, Any, [1, 1, 0, 0, 0, 1, 0, 0, 0, 0]),
    (Runs, 1, 2, Kept, [1, 1, 1, 0, 0, 1, 0, 0, 0, 0]),
    (Runs, 1, 2, Kept, [1, 1, 1, 0, 2, 0, 1, 0, 0, 0]),
    (Runs, 1, 2, Kept, [2, 2, 1, 1, 0, 0, 0, 0, 0, 0]),
    (Paused, 1, 2, Any, [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]),
    (Runs, 2, 2, Kept, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    (Runs, 2, 1, Kept, [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]),
    (Runs, 2, 1, Kept, [0, 0, 0, 0, 0, 1, 1, 0, 0, 0]),
    (Runs, 1, 2, Any, [1, 1, 0, 0, 0, 0, 0, 1, 0, 0]),
    (Runs, 1, 2, Kept, [1, 1, 0, 0, 0, 1, 0, 1, 0, 0]),
    (Runs, 1, 2, Kept, [1, 1, 0, 0, 0, 0, 0, 0, 0, 1]),
    (Runs, 1, 2, Kept, [1, 1, 1, 0, 0, 1, 0, 0, 1, 0]),
    (Runs, 1, 2, Any, [0, 0, 0, 0, 1, 1, 0, 0, 1, 0]),
    (Runs, 2, 1, Kept, [1, 0, 1, 0, 0, 0, 0, 0, 0, 0]),
];

/// Rows with an arbiter, explored in the same way.
const ARBITER: [Row; 6] = [
    (Runs, 1, 2, Any, [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]),
    (Runs, 1, 2, Kept, [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]),
    (Runs, 1, 2, Kept, [1, 1, 0, 0, 1, 0, 0, 0, 0, 0]),
    (Runs, 1, 2, Kept, [1, 1, 0, 0, 0, 1, 0, 0, 0, 0]),
    (Runs, 1, 2, Kept, [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]),
    (Runs, 2, 1, Kept, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
];

const DEEP_ARBITER: [Row; 4] = [
    (Runs, 1, 3, Any, [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]),
    (Runs, 1, 2, Any, [1, 1, 0, 0, 1, 1, 1, 0, 0, 0]),
    (Runs, 1, 2, Kept, [1, 1, 1, 1, 1, 1, 1, 1, 1, 0]),
    (Runs, 2, 1, Kept, [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]),
];

const DEEP: [Row; 8] = [
    (Runs, 1, 3, Any, [1, 1, 0, 0, 0, 1, 0, 0, 0, 0]),
    (Runs, 1, 3, Any, [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]),
    (Runs, 1, 3, Any, [1, 1, 0, 0, 1, 0, 0, 0, 0, 0]),
    (Paused, 1, 3, Any, [1, 1, 0, 0, 1, 0, 0, 0, 0, 0]),
    (Runs, 1, 3, Kept, [1, 1, 1, 1, 1, 1, 1, 0, 0, 0]),
    (Runs, 2, 2, Kept, [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]),
    (Runs, 2, 1, Kept, [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]),
    (Runs, 2, 1, Kept, [0, 1, 0, 0, 1, 1, 1, 0, 0, 0]),
];

/// Rows of guests whose memory follows: whether it is copied to a file, and how many page servers
/// are killed. Explored in the same way.
type MemoryRow = (bool, u8, Row);

const MEMORY: [MemoryRow; 7] = [
    (false, 1, (Runs, 1, 2, Any, [1, 1, 0, 0, 0, 0, 0, 0, 0, 0])),
    (true, 1, (Runs, 1, 2, Kept, [1, 1, 1, 0, 0, 0, 0, 0, 0, 0])),
    (true, 1, (Runs, 1, 2, Kept, [1, 1, 0, 0, 1, 0, 0, 0, 0, 0])),
    (true, 0, (Runs, 1, 2, Any, [0, 0, 0, 0, 1, 0, 0, 0, 0, 0])),
    (true, 0, (Runs, 1, 2, Kept, [1, 1, 0, 0, 0, 1, 0, 0, 1, 0])),
    (true, 1, (Runs, 1, 2, Kept, [1, 1, 0, 0, 0, 1, 1, 0, 0, 0])),
    (true, 0, (Runs, 2, 1, Kept, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0])),
];

const DEEP_MEMORY: [MemoryRow; 4] = [
    (false, 2, (Runs, 1, 3, Any, [1, 1, 0, 0, 0, 0, 0, 0, 0, 0])),
    (true, 1, (Runs, 1, 2, Any, [1, 1, 0, 0, 1, 0, 0, 0, 0, 0])),
    (true, 1, (Runs, 1, 2, Kept, [1, 1, 0, 0, 1, 1, 0, 0, 1, 0])),
    (true, 1, (Runs, 2, 1, Kept, [1, 1, 0, 0, 0, 0, 0, 0, 0, 0])),
];

/// How a row is explored.
#[derive(Clone, Copy)]
struct How {
    early: bool,
    arbiter: bool,
    /// Whether memory follows: whether it is copied to a file, and how many page servers are
    /// killed.
    memory: Option<(bool, u8)>,
}

fn configuration(
    (guest, attempts, messages, order, budget): Row,
    how: How,
    variant: Variant,
) -> Configuration {
    let How {
        early,
        arbiter,
        memory,
    } = how;
    let [
        a,
        b,
        failed_writes,
        duplicates,
        surprises,
        lost_hosts,
        boots,
        lost_journals,
        buried,
        replaced,
    ] = budget;
    Configuration {
        setting: Setting {
            early,
            paused: guest == Paused,
            attempts,
            messages,
            orderly: order == Kept,
            left: match memory {
                Some((keeps, _)) => Left::Memory { keeps },
                None if buried > 0 => Left::Disks,
                None => Left::Nothing,
            },
            arbiter,
            doubt: true,
            variant,
        },
        budget: Budget {
            crashes: [a, b],
            failed_writes,
            duplicates,
            surprises,
            lost_hosts,
            boots,
            lost_journals,
            buried,
            replaced,
            servers: memory.map_or(0, |(_, servers)| servers),
        },
    }
}

fn both_releases(rows: &[Row], arbiter: bool) -> Vec<Configuration> {
    let rows = rows.iter().map(|row| (*row, arbiter, None));
    of_both_releases(rows)
}

fn with_memory(rows: &[MemoryRow]) -> Vec<Configuration> {
    let rows = rows.iter();
    of_both_releases(rows.map(|(keeps, servers, row)| (*row, false, Some((*keeps, *servers)))))
}

fn of_both_releases(
    rows: impl Iterator<Item = (Row, bool, Option<(bool, u8)>)>,
) -> Vec<Configuration> {
    let both = |(row, arbiter, memory)| {
        [false, true].map(|early| {
            let how = How {
                early,
                arbiter,
                memory,
            };
            configuration(row, how, Variant::Genuine)
        })
    };
    rows.flat_map(both).collect()
}

/// Returns the configurations of `make test`.
pub fn usual() -> Vec<Configuration> {
    let mut all = both_releases(&USUAL, false);
    all.extend(both_releases(&ARBITER, true));
    all.extend(with_memory(&MEMORY));
    all
}

/// Returns the additional configurations of `--deep`.
pub fn deep() -> Vec<Configuration> {
    let mut all = both_releases(&DEEP, false);
    all.extend(both_releases(&DEEP_ARBITER, true));
    all.extend(with_memory(&DEEP_MEMORY));
    all
}

/// Returns a small exploration for unit tests.
pub fn small() -> Vec<Configuration> {
    let row = (Runs, 1, 2, Kept, [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]);
    let mut all = both_releases(&[row], false);
    all.extend(both_releases(&[row], true));
    all.extend(with_memory(&[(true, 1, row)]));
    all
}

/// Returns the configurations for a broken variant.
pub fn for_variant(variant: Variant) -> Configuration {
    use Variant as Is;
    let calm = (Runs, 1, 3, Any, [0; 10]);
    let (early, row) = match variant {
        Is::Genuine | Is::CommitWithoutJournal | Is::AbortedToldFirst | Is::ReadyUnseen => {
            (false, (Runs, 1, 3, Any, [0, 1, 0, 0, 0, 0, 0, 0, 0, 0]))
        }
        Is::ReleaseBeforePostmigrate | Is::RestartResumes | Is::ReadyMeansCommitted => {
            (false, (Runs, 1, 3, Any, [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]))
        }
        Is::ResumeAfterFailedRelease => (false, (Runs, 1, 2, Any, [1, 1, 1, 0, 0, 0, 0, 0, 0, 0])),
        Is::AbortedNotResumed => (false, (Runs, 1, 2, Any, [1, 0, 1, 0, 0, 0, 0, 0, 0, 0])),
        Is::KnownOfferAccepted => (true, (Runs, 1, 3, Any, [0, 0, 0, 2, 0, 0, 0, 0, 0, 0])),
        Is::ClosedOfferAccepted => (false, calm),
        Is::ReturnWithoutRecord | Is::RefusalAfterRestart => {
            (false, (Runs, 1, 2, Any, [0, 1, 0, 0, 1, 0, 0, 0, 0, 0]))
        }
        Is::OverruleUntold | Is::DoneAtOnce => {
            (true, (Runs, 1, 3, Any, [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]))
        }
        Is::ConcedeUnlessHere => (false, (Runs, 2, 1, Kept, [0, 0, 0, 0, 0, 1, 0, 0, 0, 0])),
        Is::OverruledAgain => (false, (Runs, 2, 1, Kept, [1, 0, 0, 0, 0, 1, 0, 0, 0, 0])),
        Is::OtherJournals => (false, (Runs, 1, 2, Any, [0, 1, 0, 0, 0, 0, 0, 1, 0, 0])),
        Is::OtherIdentity => (false, (Runs, 1, 2, Any, [0, 1, 0, 0, 0, 0, 0, 0, 0, 1])),
        Is::PeerUnwritten => (false, (Runs, 1, 2, Any, [0, 1, 0, 0, 0, 0, 0, 1, 0, 0])),
        Is::OfferBeforeBegan => (false, (Runs, 1, 2, Any, [1, 0, 0, 0, 0, 0, 0, 0, 0, 0])),
        Is::BeganResumes => (false, (Runs, 2, 1, Kept, [1, 0, 1, 0, 0, 0, 0, 0, 0, 0])),
        Is::ClosedUnresumed => (false, (Runs, 1, 2, Any, [0, 0, 0, 0, 1, 0, 0, 0, 0, 0])),
        Is::NotTakenBack => (false, (Runs, 1, 2, Kept, [0, 0, 0, 0, 0, 1, 0, 0, 1, 0])),
        Is::OverruledLeft => (false, (Runs, 1, 2, Kept, [1, 0, 1, 0, 0, 1, 1, 0, 0, 0])),
        Is::GivenUpUnasked => (false, (Runs, 1, 2, Kept, [0, 0, 0, 0, 0, 1, 0, 0, 1, 0])),
        Is::GivenUpOnce => (false, (Runs, 1, 2, Kept, [0, 1, 0, 0, 0, 1, 0, 0, 1, 0])),
        Is::ReclaimedUnasked => (false, (Runs, 1, 2, Kept, [0, 0, 0, 0, 0, 0, 1, 0, 0, 0])),
        Is::LeaseSkipped
        | Is::CommitRepeatedPlain
        | Is::PlainReleaseClaimed
        | Is::UnansweredTaken
        | Is::GivenTwice => (false, (Runs, 1, 2, Any, [0; 10])),
        Is::ClaimedWithoutGuest | Is::OverruledArbiter => {
            (false, (Runs, 1, 2, Kept, [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]))
        }
        Is::QemuEndedEarly => (false, (Runs, 1, 2, Kept, [0; 10])),
        Is::DoneResumes | Is::FileSwept => {
            (false, (Runs, 1, 2, Kept, [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]))
        }
        Is::ServerEndIsWhole | Is::AcknowledgedForgotten => {
            (false, (Runs, 1, 2, Kept, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]))
        }
        Is::MemoryZeroed
        | Is::IncompleteFileUsed
        | Is::FileOfMissing
        | Is::FileNotOpened
        | Is::LossUnsaid => (false, (Runs, 1, 2, Kept, [0, 0, 0, 0, 1, 0, 0, 0, 0, 0])),
        Is::PausedStarted => (false, (Paused, 1, 2, Any, [0; 10])),
        Is::CommitBeforeLoaded | Is::UnknownWithoutRecord => (true, calm),
        Is::ResumeOnTimeout
        | Is::AbortAfterCommit
        | Is::CommitAfterAbort
        | Is::RetireOnCommitted => (false, calm),
    };
    let arbiter = matches!(
        variant,
        Is::LeaseSkipped
            | Is::CommitRepeatedPlain
            | Is::PlainReleaseClaimed
            | Is::UnansweredTaken
            | Is::GivenTwice
            | Is::ClaimedWithoutGuest
            | Is::OverruledArbiter
    );
    let memory = match variant {
        Is::QemuEndedEarly | Is::DoneResumes | Is::MemoryZeroed | Is::LossUnsaid => {
            Some((false, 0))
        }
        Is::ServerEndIsWhole | Is::AcknowledgedForgotten => Some((false, 1)),
        Is::IncompleteFileUsed | Is::FileSwept | Is::FileNotOpened => Some((true, 0)),
        Is::FileOfMissing => Some((true, 1)),
        _ => None,
    };
    let how = How {
        early,
        arbiter,
        memory,
    };
    let mut configuration = configuration(row, how, variant);
    // Variants that endanger the guest are shown to do so; those that only leave it in doubt, that.
    configuration.setting.doubt = matches!(
        variant,
        Is::ReadyMeansCommitted
            | Is::ReadyUnseen
            | Is::ClosedOfferAccepted
            | Is::OverruleUntold
            | Is::DoneAtOnce
            | Is::AbortedNotResumed
            | Is::ConcedeUnlessHere
            | Is::OfferBeforeBegan
            | Is::ClosedUnresumed
            | Is::NotTakenBack
            | Is::GivenUpOnce
            | Is::ClaimedWithoutGuest
            | Is::OverruledArbiter
            | Is::AcknowledgedForgotten
            | Is::LossUnsaid
    );
    configuration
}
