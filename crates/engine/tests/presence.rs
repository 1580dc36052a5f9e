//! Tests the presence of a disk at its destination: what waits, what is requested, and the order of
//! durability.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use longhaul_engine::presence::{
    Begin, ChunkMask, ListError, Operation, Output, Presence, RequestError, RequestId,
};
use longhaul_engine::remaining::{List, Remaining};
use longhaul_protocol::{BlockRange, Epoch, RegionId};
use std::time::Duration;

const DISK: RegionId = RegionId(3);
const KB4: u64 = 4096;
const MS: Duration = Duration::from_millis(1);

fn part(chunk: u32, mask: u64) -> Remaining {
    Remaining {
        chunk,
        chunks: 1,
        mask,
        written_blocks: 7,
    }
}

fn list(remaining: Vec<Remaining>) -> List {
    List {
        region: DISK,
        from_chunk: 0,
        from_seq: 100,
        remaining,
        next_chunk: None,
    }
}

/// 100 blocks, of which the first 8 are missing; handed over, all others durable.
fn handed_over() -> Presence {
    let mut presence = Presence::new(DISK, 100);
    presence.listed(&list(vec![part(0, 0xff)])).unwrap();
    presence.settle();
    settle(&mut presence);
    assert!(presence.is_settled());
    presence.seal();
    presence
}

fn outputs(presence: &mut Presence) -> Vec<Output> {
    std::iter::from_fn(|| presence.poll()).collect()
}

/// Carries out the steps of durability. Returns all other outputs.
fn settle(presence: &mut Presence) -> Vec<Output> {
    let mut others = Vec::new();
    while let Some(output) = presence.poll() {
        match output {
            Output::SyncData => presence.data_synced(true),
            Output::StoreMasks(_) => presence.masks_stored(true),
            other => others.push(other),
        }
    }
    others
}

fn begin(presence: &mut Presence, id: u64, operation: Operation, bytes: (u64, u64)) -> Begin {
    let bytes = bytes.0..bytes.1;
    presence.begin(RequestId(id), operation, bytes).unwrap()
}

#[test]
fn a_read_waits_for_exactly_what_is_missing() {
    let mut presence = handed_over();
    let bytes = (6 * KB4 + 100, 10 * KB4);
    assert_eq!(begin(&mut presence, 1, Operation::Read, bytes), Begin::Wait);
    assert_eq!(
        outputs(&mut presence),
        [Output::Want(BlockRange::new(6, 2))]
    );
    // Another request does not ask again.
    assert_eq!(
        begin(&mut presence, 2, Operation::Read, (7 * KB4, 8 * KB4)),
        Begin::Wait
    );
    assert_eq!(outputs(&mut presence), []);
    assert_eq!(
        begin(&mut presence, 3, Operation::Read, (8 * KB4, 9 * KB4)),
        Begin::Go(8 * KB4..9 * KB4)
    );
    assert!(presence.accepts(Epoch(1), 7, 101));
    let noted = presence.arrived(BlockRange::new(7, 1), 101);
    let mask = ChunkMask {
        chunk: 0,
        missing: 0x7f,
    };
    assert_eq!(noted, [mask]);
    assert_eq!(
        outputs(&mut presence),
        [Output::Go(RequestId(2), 7 * KB4..8 * KB4)]
    );
    presence.arrived(BlockRange::new(6, 1), 102);
    assert_eq!(
        outputs(&mut presence),
        [Output::Go(RequestId(1), 6 * KB4 + 100..10 * KB4)]
    );
    assert_eq!(presence.missing_blocks(), 6);
}

#[test]
fn what_the_guest_writes_as_a_whole_comes_no_more() {
    let mut presence = handed_over();
    let bytes = (KB4, 3 * KB4);
    let go = begin(&mut presence, 1, Operation::Write, bytes);
    assert_eq!(go, Begin::Go(KB4..3 * KB4));
    assert!(!presence.accepts(Epoch(1), 1, 200), "while it is written");
    assert!(presence.accepts(Epoch(1), 3, 200));
    let noted = presence.done(RequestId(1), true);
    assert_eq!(noted[0].missing, 0xf9);
    let range = BlockRange::new(1, 2);
    assert_eq!(outputs(&mut presence), [Output::Superseded(range)]);
    assert!(!presence.accepts(Epoch(1), 1, 201));
}

#[test]
fn a_part_of_a_block_waits_for_the_rest_and_the_whole_ones_beside_it_do_not() {
    let mut presence = handed_over();
    let bytes = (KB4 / 2, 3 * KB4);
    assert_eq!(
        begin(&mut presence, 1, Operation::Write, bytes),
        Begin::Wait
    );
    assert_eq!(
        outputs(&mut presence),
        [Output::Want(BlockRange::new(0, 1))]
    );
    assert!(presence.accepts(Epoch(1), 1, 200), "nothing is written yet");
    presence.arrived(BlockRange::new(0, 1), 200);
    assert_eq!(
        outputs(&mut presence),
        [Output::Go(RequestId(1), KB4 / 2..3 * KB4)]
    );
    assert!(!presence.accepts(Epoch(1), 1, 201));
    presence.done(RequestId(1), true);
    assert_eq!(presence.missing_blocks(), 5);
}

#[test]
fn a_discard_leaves_parts_of_blocks_alone() {
    let mut presence = handed_over();
    let go = begin(&mut presence, 1, Operation::Discard, (KB4 / 2, 2 * KB4 + 5));
    assert_eq!(go, Begin::Go(KB4..2 * KB4));
    presence.done(RequestId(1), true);
    assert_eq!(presence.missing_blocks(), 7);
    let go = begin(&mut presence, 2, Operation::Discard, (10, 20));
    assert!(matches!(go, Begin::Go(bytes) if bytes.is_empty()));
}

#[test]
fn a_write_that_fails_asks_for_what_was_turned_away() {
    let mut presence = handed_over();
    begin(&mut presence, 1, Operation::Write, (0, KB4));
    assert!(!presence.accepts(Epoch(1), 0, 200));
    assert!(presence.done(RequestId(1), false).is_empty());
    assert_eq!(
        outputs(&mut presence),
        [Output::Want(BlockRange::new(0, 1))]
    );
    assert!(presence.accepts(Epoch(1), 0, 201));
}

#[test]
fn a_source_that_can_read_nothing_costs_no_more_than_what_the_guest_waits_for() {
    let mut presence = handed_over();
    let read = (2 * KB4, 4 * KB4);
    assert_eq!(begin(&mut presence, 1, Operation::Read, read), Begin::Wait);
    outputs(&mut presence);
    // Block by block this would not end.
    presence.unreadable(BlockRange::new(0, u64::MAX));
    let refused = [Output::Unreadable(RequestId(1))];
    assert_eq!(outputs(&mut presence), refused);
}

#[test]
fn who_waits_for_what_the_source_cannot_read_is_refused_and_may_ask_again() {
    let mut presence = handed_over();
    let read = (2 * KB4, 4 * KB4);
    assert_eq!(begin(&mut presence, 1, Operation::Read, read), Begin::Wait);
    let beside = (3 * KB4, 4 * KB4);
    let waits = begin(&mut presence, 2, Operation::Read, beside);
    assert_eq!(waits, Begin::Wait);
    outputs(&mut presence);
    presence.unreadable(BlockRange::new(2, 1));
    let refused = [Output::Unreadable(RequestId(1))];
    assert_eq!(outputs(&mut presence), refused, "and nobody else");
    assert_eq!(presence.missing_blocks(), 8);
    let again = begin(&mut presence, 3, Operation::Read, (2 * KB4, 3 * KB4));
    assert_eq!(again, Begin::Wait);
    let want = [Output::Want(BlockRange::new(2, 1))];
    assert_eq!(outputs(&mut presence), want, "it may be read this time");
    // Overwritten blocks are not needed.
    let go = begin(&mut presence, 4, Operation::Write, (2 * KB4, 3 * KB4));
    assert_eq!(go, Begin::Go(2 * KB4..3 * KB4));
    presence.done(RequestId(4), true);
    let go = Output::Go(RequestId(3), 2 * KB4..3 * KB4);
    assert!(outputs(&mut presence).contains(&go));
}

#[test]
fn a_guest_that_writes_all_the_time_does_not_keep_a_disk_from_being_whole() {
    let mut presence = handed_over();
    presence.arrived(BlockRange::new(0, 8), 200);
    presence.settle();
    assert_eq!(outputs(&mut presence), [Output::SyncData]);
    assert!(!presence.is_whole());
    begin(&mut presence, 1, Operation::Write, (0, KB4));
    presence.done(RequestId(1), true);
    presence.data_synced(true);
    assert!(!presence.is_whole(), "the masks are not stored");
    assert!(matches!(
        outputs(&mut presence)[..],
        [Output::StoreMasks(_)]
    ));
    presence.masks_stored(true);
    assert!(presence.is_whole() && !presence.is_settled());
}

#[test]
fn a_flush_is_answered_after_data_and_masks() {
    let mut presence = handed_over();
    begin(&mut presence, 1, Operation::Write, (0, KB4));
    presence.done(RequestId(1), true);
    outputs(&mut presence);
    presence.flush(RequestId(2));
    assert_eq!(outputs(&mut presence), [Output::SyncData]);
    // This flush is too late for the round.
    presence.flush(RequestId(3));
    presence.data_synced(true);
    let masks = vec![ChunkMask {
        chunk: 0,
        missing: 0xfe,
    }];
    assert_eq!(outputs(&mut presence), [Output::StoreMasks(masks)]);
    presence.masks_stored(true);
    let answered = outputs(&mut presence);
    assert_eq!(answered, [Output::Flushed(RequestId(2)), Output::SyncData]);
    presence.data_synced(true);
    assert_eq!(outputs(&mut presence), [Output::Flushed(RequestId(3))]);
}

#[test]
fn what_could_not_be_made_durable_is_never_called_so() {
    let mut presence = handed_over();
    presence.arrived(BlockRange::new(0, 8), 200);
    presence.flush(RequestId(1));
    presence.flush(RequestId(2));
    assert_eq!(outputs(&mut presence), [Output::SyncData]);
    presence.data_synced(false);
    let failed = [
        Output::FlushFailed(RequestId(1)),
        Output::FlushFailed(RequestId(2)),
    ];
    assert_eq!(outputs(&mut presence), failed);
    presence.flush(RequestId(3));
    assert_eq!(outputs(&mut presence), [Output::FlushFailed(RequestId(3))]);
    presence.settle();
    assert_eq!(outputs(&mut presence), []);
    assert!(!presence.is_settled() && !presence.is_whole());
}

#[test]
fn what_arrives_is_made_durable_without_being_asked_for() {
    let mut presence = Presence::new(DISK, 100_000);
    presence.tick(MS);
    assert_eq!(outputs(&mut presence), []);
    presence.arrived(BlockRange::new(0, 1), 1);
    presence.tick(MS * 10);
    assert_eq!(outputs(&mut presence), [], "a little, and not for long");
    presence.tick(MS * 1010);
    assert_eq!(outputs(&mut presence), [Output::SyncData]);
    presence.data_synced(true);
    presence.arrived(BlockRange::new(0, 9000), 2);
    presence.tick(MS * 1020);
    assert_eq!(outputs(&mut presence), [Output::SyncData], "much");
    presence.data_synced(true);
    assert!(!presence.is_settled(), "the list has not come");
    presence.listed(&List::nothing(DISK)).unwrap();
    assert!(presence.is_settled() && presence.is_whole());
}

#[test]
fn content_from_before_the_list_does_not_count_for_it() {
    let mut presence = Presence::new(DISK, 100);
    presence.listed(&list(vec![part(1, 1)])).unwrap();
    assert!(presence.accepts(Epoch(1), 64, 99));
    presence.arrived(BlockRange::new(64, 1), 99);
    assert_eq!(presence.missing_blocks(), 1);
    presence.rejected(BlockRange::new(3, 1), 98);
    assert_eq!(presence.missing_blocks(), 2, "it could not be used");
    presence.seal();
    assert!(
        !presence.accepts(Epoch(1), 5, 99),
        "the guest may have written it"
    );
    assert!(
        !presence.accepts(Epoch(2), 64, 101),
        "of another connection"
    );
    presence.rejected(BlockRange::new(4, 1), 98);
    let (lacks, next) = presence.lacks(0, 10);
    assert_eq!((lacks[0].mask, lacks[1].mask, next), (0b1000, 1, None));
}

#[test]
fn a_new_connection_begins_anew_before_the_hand_over_and_goes_on_after_it() {
    let mut presence = Presence::new(DISK, 100);
    presence.listed(&list(vec![part(0, 1)])).unwrap();
    presence.connected(Epoch(2));
    assert!(!presence.is_listed());
    presence.listed(&list(vec![part(1, 1)])).unwrap();
    assert_eq!(presence.missing_blocks(), 1);
    presence.settle();
    let stored = vec![
        ChunkMask {
            chunk: 0,
            missing: 0,
        },
        ChunkMask {
            chunk: 1,
            missing: 1,
        },
    ];
    assert_eq!(outputs(&mut presence), [Output::SyncData]);
    presence.data_synced(true);
    assert_eq!(outputs(&mut presence), [Output::StoreMasks(stored)]);
    presence.masks_stored(true);
    presence.seal();
    begin(&mut presence, 1, Operation::Read, (64 * KB4, 65 * KB4));
    presence.connected(Epoch(3));
    let wants = [Output::Want(BlockRange::new(64, 1))];
    assert_eq!(outputs(&mut presence), wants, "it is asked for again");
    assert!(
        presence.accepts(Epoch(3), 64, 1),
        "by a source that counts anew"
    );
    // A source that has not seen READY repeats its list: the destination knows better.
    presence.listed(&list(vec![])).unwrap();
    assert_eq!(presence.missing_blocks(), 1);
}

#[test]
fn after_a_restart_it_takes_nothing_before_it_is_connected() {
    let stored = [part(0, 0xff)];
    let mut presence = Presence::restored(DISK, 100, &[part(0, 1)], &stored).unwrap();
    assert_eq!(presence.missing_blocks(), 1);
    assert!(
        !presence.is_settled(),
        "what was noted has yet to be stored"
    );
    assert!(!presence.accepts(Epoch(1), 0, 200));
    presence.connected(Epoch(4));
    assert!(presence.accepts(Epoch(4), 0, 200) && !presence.accepts(Epoch(4), 1, 200));
}

#[test]
fn what_makes_no_sense_is_refused() {
    let mut presence = Presence::new(DISK, 100);
    let refused = presence.listed(&list(vec![part(2, 1)]));
    assert_eq!(refused, Err(ListError::Unknown));
    let foreign = List::nothing(RegionId(1));
    assert_eq!(presence.listed(&foreign), Err(ListError::Unknown));
    let gap = List {
        from_chunk: 1,
        ..list(vec![])
    };
    assert_eq!(presence.listed(&gap), Err(ListError::Order { chunk: 1 }));
    let begun = presence.begin(RequestId(1), Operation::Read, 0..100 * KB4 + 1);
    assert_eq!(begun, Err(RequestError::Beyond));
    presence.begin(RequestId(1), Operation::Read, 0..1).unwrap();
    let begun = presence.begin(RequestId(1), Operation::Read, 0..1);
    assert_eq!(begun, Err(RequestError::Twice));
    for id in 2..=4096 {
        presence
            .begin(RequestId(id), Operation::Read, 0..1)
            .unwrap();
    }
    let begun = presence.begin(RequestId(5000), Operation::Read, 0..1);
    assert_eq!(begun, Err(RequestError::TooMany));
}
