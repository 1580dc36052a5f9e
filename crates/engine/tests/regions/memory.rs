//! Tests memory that is left for after the switchover.

use super::{MEMORY, MS, acknowledge, begin, settle, spec, take};
use longhaul_engine::remaining::Remaining;
use longhaul_engine::source::{Advice, Source};
use longhaul_engine::stop::{StopReason, Wish};
use longhaul_engine::strategy::Strategy;
use longhaul_protocol::BlockRange;

/// Memory of 640 blocks, in the first pass.
fn memory(strategy: Strategy) -> Source {
    let wish = Wish::downtime(MS * 300);
    let mut source = Source::new(strategy, &[spec(MEMORY, 640)], wish, MS).unwrap();
    begin(&mut source);
    source
}

fn pass(source: &mut Source, second: u32, written: &[(u64, u64)]) {
    source.pass_started(MS * 1000 * second, false);
    for (start, count) in written {
        let range = BlockRange::new(*start, *count);
        source.written(MEMORY, range).unwrap();
    }
    source.pass_read();
}

fn left(source: &Source) -> Vec<(u32, u32, u64)> {
    let list = source.list(MEMORY, 0, 100).unwrap().unwrap();
    assert_eq!(list.next_chunk, None);
    let of = |part: &Remaining| (part.chunk, part.chunks, part.mask);
    list.remaining.iter().map(of).collect()
}

#[test]
fn memory_that_follows_is_listed_and_comes_as_the_guest_wants_it() {
    let mut source = memory(Strategy::POSTCOPY);
    assert_eq!(source.advise(MS), Advice::Stop(StopReason::WithinLimit));
    assert!(take(&mut source).is_none(), "nothing of it goes before");
    source.frozen();
    source.closed();
    assert_eq!(source.advise(MS), Advice::Complete);
    assert_eq!(left(&source), [(0, 10, u64::MAX)]);
    source.handed_over();
    source.wanted(MEMORY, BlockRange::new(200, 1)).unwrap();
    let batch = take(&mut source).unwrap();
    assert_eq!(batch.blocks[0].block, 200);
    acknowledge(&mut source, &batch);
    // Those beside it are next.
    let batch = take(&mut source).unwrap();
    assert!(batch.blocks.iter().all(|id| id.block / 64 == 3));
    acknowledge(&mut source, &batch);
    let sent = 1 + batch.blocks.len();
    assert_eq!(settle(&mut source), (640 - sent, 0));
    assert!(source.is_drained());
}

#[test]
fn memory_that_is_written_in_pass_after_pass_follows() {
    let mut source = memory(Strategy::HYBRID);
    assert_eq!(settle(&mut source), (640, 0));
    pass(&mut source, 1, &[(0, 64), (300, 8)]);
    assert_eq!(settle(&mut source), (72, 0), "they may be written once");
    pass(&mut source, 2, &[(0, 64), (500, 4)]);
    assert_eq!(settle(&mut source), (4, 0), "the first ones are hot now");
    assert_eq!(
        source.advise(MS * 2500),
        Advice::Stop(StopReason::WithinLimit)
    );
    source.frozen();
    source.written(MEMORY, BlockRange::new(128, 1)).unwrap();
    source.closed();
    assert_eq!(source.advise(MS * 2500), Advice::Complete);
    assert_eq!(left(&source), [(0, 1, u64::MAX), (2, 1, 1)]);
    source.handed_over();
    assert_eq!(settle(&mut source), (65, 0));
    assert!(source.is_drained());
}
