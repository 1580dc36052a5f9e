//! Defines the default exploration, the additions of `--deep`, and where each broken variant must
//! be caught.

use crate::machine::Setting;
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

fn configuration(
    (guest, attempts, messages, order, budget): Row,
    (early, arbiter): (bool, bool),
    variant: Variant,
) -> Configuration {
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
            drains: buried > 0,
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
        },
    }
}

fn both_releases(rows: &[Row], arbiter: bool) -> Vec<Configuration> {
    let of = |row: &Row, early| configuration(*row, (early, arbiter), Variant::Genuine);
    let both = |row: &Row| [false, true].map(|early| of(row, early));
    rows.iter().flat_map(both).collect()
}

/// Returns the configurations of `make test`.
pub fn usual() -> Vec<Configuration> {
    let mut all = both_releases(&USUAL, false);
    all.extend(both_releases(&ARBITER, true));
    all
}

/// Returns the additional configurations of `--deep`.
pub fn deep() -> Vec<Configuration> {
    let mut all = both_releases(&DEEP, false);
    all.extend(both_releases(&DEEP_ARBITER, true));
    all
}

/// Returns a small exploration for unit tests.
pub fn small() -> Vec<Configuration> {
    let row = (Runs, 1, 2, Kept, [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]);
    let mut all = both_releases(&[row], false);
    all.extend(both_releases(&[row], true));
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
    let mut configuration = configuration(row, (early, arbiter), variant);
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
    );
    configuration
}
