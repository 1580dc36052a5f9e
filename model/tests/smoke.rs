//! Explores a small part of the binary's configurations, so that a broken model is noticed early.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use longhaul_model::explore::{Found, explore};
use longhaul_model::plan::{self, Configuration};
use longhaul_model::{Property, Variant};

fn run(configuration: Configuration) -> Found {
    explore(configuration.setting, configuration.budget, 2_000_000)
}

#[test]
fn the_hand_over_holds_within_small_bounds() {
    for configuration in plan::small() {
        let found = run(configuration);
        assert!(!found.cut_short);
        assert!(found.states > 10_000, "{} states", found.states);
        if let Some(failure) = found.failure {
            panic!("{:?}\n{}", failure.property, failure.trace.join("\n"));
        }
    }
}

#[test]
fn a_commit_without_a_journal_is_caught_with_its_trace() {
    let found = run(plan::for_variant(Variant::CommitWithoutJournal));
    let failure = found.failure.expect("a failure");
    assert_ne!(failure.property, Property::Capacity);
    assert!(failure.trace.len() >= failure.length);
}

#[test]
fn endless_doubt_is_caught() {
    let found = run(plan::for_variant(Variant::AbortedNotResumed));
    assert_eq!(found.failure.expect("a failure").property, Property::Doubt);
}

#[test]
fn too_many_states_are_not_called_all() {
    let small = plan::small()[0];
    assert!(explore(small.setting, small.budget, 1000).cut_short);
}
