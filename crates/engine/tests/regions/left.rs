//! Tests of missing blocks: which blocks of a region are listed and which are not.

use super::{DISK, MS, acknowledge, settle, source, stop, take, write};
use longhaul_engine::remaining::Remaining;
use longhaul_engine::source::Advice;
use longhaul_engine::strategy::Strategy;
use longhaul_protocol::BlockRange;
use longhaul_protocol::message::Acknowledgement;
use std::time::Duration;

#[test]
fn a_chunk_that_is_written_again_and_again_stays_for_the_drain() {
    let mut source = source(Strategy::hybrid(2), 640);
    settle(&mut source);
    write(&mut source, 64, 64);
    assert_eq!(settle(&mut source), (0, 64));
    write(&mut source, 64, 64);
    write(&mut source, 0, 10);
    assert_eq!(settle(&mut source), (0, 10));
    assert!(
        source.list(DISK, 0, 10).unwrap().is_none(),
        "not closed yet"
    );
    stop(&mut source);
    let list = source.list(DISK, 0, 10).unwrap().unwrap();
    let left = Remaining {
        chunk: 1,
        chunks: 1,
        mask: u64::MAX,
        written_blocks: 128,
    };
    assert_eq!((list.remaining, list.next_chunk), (vec![left], None));
    assert!(take(&mut source).is_none(), "not before the handover");
    source.handed_over();
    assert_eq!(settle(&mut source), (0, 64));
    assert!(source.is_drained());
}

/// The link of these tests carries 2441 blocks per second.
#[test]
fn what_the_guest_overwrites_faster_than_it_would_come_is_left_to_it_but_for_what_it_waits_for() {
    let mut source = source(Strategy::POSTCOPY, 64_000);
    stop(&mut source);
    source.handed_over();
    source.look_at_drain(Duration::ZERO);
    let batch = take(&mut source).unwrap();
    acknowledge(&mut source, &batch);
    source
        .superseded(DISK, BlockRange::new(1_000, 5_000))
        .unwrap();
    source.look_at_drain(MS * 600);
    assert!(take(&mut source).is_none(), "it is left to the guest");
    source.wanted(DISK, BlockRange::new(300, 2)).unwrap();
    let wanted = take(&mut source).unwrap();
    assert_eq!(wanted.blocks.len(), 2, "somebody waits for these");
    acknowledge(&mut source, &wanted);
    assert!(take(&mut source).is_none());
    // The guest has stopped writing.
    source.look_at_drain(MS * 1200);
    assert!(take(&mut source).is_some());
}

#[test]
fn what_is_promised_of_a_region_goes_before_its_list_and_the_rest_stays() {
    for strategy in [Strategy::HYBRID, Strategy::POSTCOPY] {
        let mut source = source(strategy, 1000);
        source.connected();
        // Memory has arrived; no more blocks of the disk are sent.
        while let Some(batch) = take(&mut source) {
            acknowledge(&mut source, &batch);
            if batch.blocks.iter().any(|id| id.region == DISK) {
                break;
            }
        }
        source.frozen();
        settle(&mut source);
        let promised = vec![BlockRange::new(500, 2), BlockRange::new(700, 20)];
        source.promise(DISK, promised.clone()).unwrap();
        source.closed();
        assert_eq!(source.advise(MS * 1000), Advice::Send);
        let batch = take(&mut source).unwrap();
        assert!(batch.blocks.iter().all(|id| id.region == DISK));
        // Lost and rejected blocks are promised as well.
        source.connection_lost();
        source.connected();
        let batch = take(&mut source).unwrap();
        let message = Acknowledgement {
            applied: vec![(batch.seq, 1)],
            rejected: vec![(DISK, BlockRange::new(batch.blocks[0].block, 1))],
            ..Acknowledgement::default()
        };
        source.acknowledged(&message).unwrap();
        assert_eq!(source.advise(MS * 1000), Advice::Send);
        let (memory, disk) = settle(&mut source);
        assert_eq!((memory, disk), (0, 22 - batch.blocks.len() + 1));
        assert_eq!(source.advise(MS * 1000), Advice::Complete);
        let list = source.list(DISK, 0, 1000).unwrap().unwrap();
        let is_left = |block: u64| {
            let chunk = (block / 64) as u32;
            let mut parts = list.remaining.iter();
            parts.any(|part| {
                (part.chunk..part.chunk + part.chunks).contains(&chunk)
                    && part.mask & 1 << (block % 64) != 0
            })
        };
        assert!(
            !promised
                .iter()
                .flat_map(|range| range.blocks())
                .any(is_left)
        );
        assert!(is_left(499) && is_left(502) && is_left(720) && !list.remaining.is_empty());
        let beyond = vec![BlockRange::new(999, 2)];
        source.promise(DISK, beyond).unwrap_err();
    }
}
