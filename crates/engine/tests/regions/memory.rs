//! Tests memory that is left for after the switchover.

use super::{DISK, MEMORY, MS, acknowledge, begin, settle, spec, take};
use longhaul_codec::{Decision, Staged};
use longhaul_engine::remaining::Remaining;
use longhaul_engine::source::{Advice, Downtime, Source, Unseen};
use longhaul_engine::stop::{StopReason, Wish};
use longhaul_engine::strategy::Strategy;
use longhaul_protocol::{BlockRange, RegionSpec};
use std::time::Duration;

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
    counted(source, 0, MS * 1000 * second);
}

/// Tells how many blocks were written since the pass, and what is advised then.
fn counted(source: &mut Source, written_blocks: u64, at: Duration) -> Advice {
    source.unseen(Some(Unseen {
        written_blocks,
        unread_blocks: 0,
        at,
    }));
    source.advise(at)
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
fn code_of_memory_that_follows_travels_before_the_stop() {
    let stop = Advice::Stop(StopReason::WithinLimit);
    let mut source = memory(Strategy::POSTCOPY);
    source.seek_ahead();
    assert_eq!(source.advise(MS), Advice::Send, "it is not known yet");
    source.ahead(MEMORY, vec![500, 3, 501]).unwrap();
    assert_eq!(source.advise(MS * 2), Advice::Send);
    let batch = source.take(2).unwrap().unwrap();
    let blocks: Vec<u64> = batch.blocks.iter().map(|id| id.block).collect();
    assert_eq!(blocks, [3, 500]);
    assert_eq!(source.advise(MS * 3), Advice::Send, "a block is left");
    let batch = source.take(2).unwrap().unwrap();
    assert_eq!(batch.blocks[1].block, 501);
    assert_eq!(source.advise(MS * 4), stop, "nothing waits for the rest");
    source.ahead(MEMORY, vec![7]).unwrap();
    assert_eq!(source.advise(MS * 5), stop, "it comes too late");
    source.ahead(DISK, vec![7]).unwrap_err();

    // Whether nothing is found, found too late, or takes too long: the guest is stopped.
    let mut source = memory(Strategy::POSTCOPY);
    source.seek_ahead();
    assert_eq!(source.advise(MS), Advice::Send);
    source.nothing_ahead();
    assert_eq!(source.advise(MS), stop);
    for named in [false, true] {
        let mut source = memory(Strategy::POSTCOPY);
        source.seek_ahead();
        if named {
            source.ahead(MEMORY, (0..640).collect()).unwrap();
        }
        let stops_at = (0..100).find(|tenth| source.advise(MS * 100 * *tenth) == stop);
        assert_eq!(stops_at, Some(if named { 30 } else { 20 }));
    }
}

#[test]
fn memory_that_is_written_in_pass_after_pass_follows() {
    let mut source = memory(Strategy::HYBRID);
    assert_eq!(
        source.advise(MS),
        Advice::Send,
        "all of it goes once before"
    );
    assert_eq!(settle(&mut source), (640, 0));
    pass(&mut source, 1, &[(0, 64), (300, 8)]);
    assert_eq!(settle(&mut source), (72, 0), "they may be written once");
    pass(&mut source, 2, &[(0, 64), (500, 4)]);
    assert_eq!(settle(&mut source), (4, 0), "the first ones are hot now");
    assert_eq!(counted(&mut source, 64, MS * 2500), Advice::ReadPass);
    pass(&mut source, 3, &[(0, 64)]);
    assert_eq!(settle(&mut source), (64, 0), "they may cool down");
    let fewer = "64, and 64 that were hot, are now 64";
    assert_eq!(
        counted(&mut source, 64, MS * 3500),
        Advice::ReadPass,
        "{fewer}"
    );
    pass(&mut source, 4, &[(0, 64)]);
    assert_eq!(settle(&mut source), (64, 0));
    let stops = Advice::Stop(StopReason::WithinLimit);
    assert_eq!(counted(&mut source, 64, MS * 4500), stops, "still as many");
    source.frozen();
    for (start, count) in [(0, 64), (128, 1)] {
        let range = BlockRange::new(start, count);
        source.written(MEMORY, range).unwrap();
    }
    source.closed();
    assert_eq!(source.advise(MS * 2500), Advice::Complete);
    assert_eq!(left(&source), [(0, 1, u64::MAX), (2, 1, 1)]);
    source.handed_over();
    assert_eq!(settle(&mut source), (65, 0));
    assert!(source.is_drained());
}

/// Sends memory of 64 Ki blocks once, in 30 s, and then what a guest writes to them at random at
/// this rate. Returns how many further passes there were, and how many blocks are missing at the
/// stop.
fn further_passes(written_per_s: f64) -> (u32, u64) {
    let all = 64 << 10;
    let wish = Wish::downtime(MS * 300);
    let mut source = Source::new(Strategy::HYBRID, &[spec(MEMORY, all)], wish, MS).unwrap();
    begin(&mut source);
    settle(&mut source);
    let (mut now, mut began, mut passes) = (MS * 30_000, Duration::ZERO, 0);
    loop {
        let part = (now - began).as_secs_f64() * written_per_s / all as f64;
        let written_blocks = (all as f64 * (1.0 - (-part).exp())) as u64;
        match counted(&mut source, written_blocks, now) {
            Advice::Send => {
                let batch = take(&mut source).unwrap();
                now += MS.mul_f64(batch.blocks.len() as f64 * 0.4096);
                acknowledge(&mut source, &batch);
            }
            Advice::ReadPass => {
                (began, passes) = (now, passes + 1);
                source.pass_started(now, false);
                let first = u64::from(passes) * 7919 % (all - written_blocks);
                let range = BlockRange::new(first, written_blocks);
                source.written(MEMORY, range).unwrap();
                source.unseen(Some(Unseen::default()));
                source.pass_read();
            }
            Advice::Stop(_) => return (passes, written_blocks + source.pending_blocks()),
            Advice::Wait => now += MS,
            Advice::Complete => panic!("it was not stopped"),
        }
    }
}

#[test]
fn what_is_written_of_memory_that_follows_is_sent_again_while_that_helps() {
    let (passes, missing) = further_passes(10.0);
    assert!(
        (1..=3).contains(&passes) && missing < 20,
        "{passes} {missing}"
    );
    let (passes, missing) = further_passes(800.0);
    assert!(
        (3..=12).contains(&passes) && missing < 1000,
        "{passes} {missing}"
    );
    // The link carries little more than this is: more passes would send more than the first did.
    let (passes, missing) = further_passes(2200.0);
    assert!(
        (1..=2).contains(&passes) && missing < 30_000,
        "{passes} {missing}"
    );
    let (passes, missing) = further_passes(20_000.0);
    // One pass only names the blocks, since the stopped guest would wait for that.
    assert!(passes <= 1 && missing > 60_000, "{passes} {missing}");
}

/// A guest that writes faster than a further pass is sent is stopped at once.
#[test]
fn a_further_pass_that_does_not_help_ends() {
    let wish = Wish::downtime(MS * 300);
    let specs = [spec(MEMORY, 64 << 10)];
    let mut source = Source::new(Strategy::HYBRID, &specs, wish, MS).unwrap();
    begin(&mut source);
    settle(&mut source);
    assert_eq!(counted(&mut source, 10_000, MS * 30_000), Advice::ReadPass);
    pass(&mut source, 30, &[(0, 10_000)]);
    assert_eq!(counted(&mut source, 100, MS * 30_010), Advice::Send);
    let batch = take(&mut source).unwrap();
    acknowledge(&mut source, &batch);
    // The number is an estimate.
    assert_eq!(counted(&mut source, 1500, MS * 30_020), Advice::Send);
    let stops = Advice::Stop(StopReason::WithinLimit);
    assert_eq!(counted(&mut source, 1600, MS * 30_030), stops);
}

#[test]
fn what_a_destination_asks_for_while_it_loads_the_guest_comes_before_the_switchover() {
    let mut source = memory(Strategy::POSTCOPY);
    source.frozen();
    source.closed();
    assert_eq!(source.advise(MS), Advice::Complete);
    source.asked(MEMORY, BlockRange::new(77, 1)).unwrap();
    assert_eq!(source.advise(MS), Advice::Send);
    let batch = take(&mut source).unwrap();
    let blocks: Vec<u64> = batch.blocks.iter().map(|id| id.block).collect();
    assert_eq!(
        blocks,
        (64..80).collect::<Vec<u64>>(),
        "those beside it too"
    );
    // The connection is lost: it travels again.
    source.connection_lost();
    source.connected();
    let batch = take(&mut source).unwrap();
    assert!(batch.blocks.iter().any(|id| id.block == 77));
    acknowledge(&mut source, &batch);
    assert_eq!(source.advise(MS), Advice::Complete);
    source.asked(MEMORY, BlockRange::new(640, 1)).unwrap_err();
}

#[test]
fn what_the_destination_lacks_travels_even_if_it_was_believed_to_be_there() {
    let mut source = memory(Strategy::HYBRID);
    settle(&mut source);
    source.written(MEMORY, BlockRange::new(64, 1)).unwrap();
    source.frozen();
    let blocks = vec![BlockRange::new(64, 1)];
    source.promise(MEMORY, blocks).unwrap();
    // It is on its way when the lists are sent, and the destination drops it with them.
    let early = take(&mut source).unwrap();
    source.closed();
    source.asked(MEMORY, BlockRange::new(64, 1)).unwrap();
    let again = take(&mut source).unwrap();
    assert_eq!(again.blocks[0].block, 64);
    // The next request finds it on its way.
    source.asked(MEMORY, BlockRange::new(64, 1)).unwrap();
    assert!(take(&mut source).is_none());
    acknowledge(&mut source, &early);
    acknowledge(&mut source, &again);
    source.handed_over();
    source.wanted(MEMORY, BlockRange::new(64, 1)).unwrap();
    assert_eq!(take(&mut source).unwrap().blocks[0].block, 64);
}

#[test]
fn zeros_that_are_asked_for_travel() {
    let spec = RegionSpec {
        starts_zero: true,
        ..spec(MEMORY, 64)
    };
    let wish = Wish::downtime(MS * 300);
    let mut source = Source::new(Strategy::POSTCOPY, &[spec], wish, MS).unwrap();
    begin(&mut source);
    source.frozen();
    source.closed();
    source.asked(MEMORY, BlockRange::new(5, 1)).unwrap();
    let batch = source.take(16).unwrap().unwrap();
    // The destination began with zeros, and has dropped what is listed.
    let zeros = vec![Staged::Zero; batch.blocks.len()];
    let decisions = source.decide(&batch, &zeros);
    assert!(decisions.iter().all(|decision| *decision == Decision::Zero));
}

#[test]
fn what_follows_costs_a_stop_only_the_time_to_name_it() {
    let wish = Wish::downtime(MS * 300);
    let specs = [spec(MEMORY, 1 << 20)];
    let stops = |strategy, written_blocks| {
        let mut source = Source::new(strategy, &specs, wish, MS).unwrap();
        begin(&mut source);
        source.unseen(Some(Unseen {
            written_blocks,
            unread_blocks: 0,
            at: MS,
        }));
        let Downtime { at_most, .. } = source.predicted_downtime(MS);
        at_most <= MS * 300
    };
    // 200 MiB are named in 0.4 s, 80 MiB in less than 0.2 s.
    assert!(!stops(Strategy::POSTCOPY, 50 << 10));
    assert!(stops(Strategy::POSTCOPY, 20 << 10));
    assert!(!stops(Strategy::PRECOPY, 20 << 10), "all memory is pending");
}

/// Sends all memory once, and then lets the guest write these blocks in pass after pass. Returns
/// the reason of the stop, and whether memory follows.
fn stops_in_time(written: u64) -> (StopReason, bool) {
    let wish = Wish::downtime(MS * 300);
    let mut source = Source::new(Strategy::PRECOPY, &[spec(MEMORY, 64 << 10)], wish, MS).unwrap();
    source.memory_may_follow();
    begin(&mut source);
    settle(&mut source);
    for second in 1..100 {
        pass(&mut source, second, &[(0, written)]);
        for step in 0..20 {
            match source.advise(MS * (1000 * second + 50 * step)) {
                Advice::Send => drop(settle(&mut source)),
                Advice::Stop(reason) => return (reason, source.memory_follows()),
                _ => {}
            }
        }
    }
    panic!("it is never stopped: {:?}", source.left(MS * 100_000));
}

#[test]
fn memory_follows_only_a_guest_that_writes_too_fast() {
    // 2 MB/s of 10 MB/s.
    assert_eq!(stops_in_time(500), (StopReason::WithinLimit, false));
    // 80 MB/s: nothing of it has to be there at the stop, which is as short as requested.
    assert_eq!(stops_in_time(20_000), (StopReason::WithinLimit, true));
}

/// A QEMU that completes by itself begins its migration again, and reports all blocks once more.
#[test]
fn after_a_stop_that_did_not_come_memory_is_sent_again() {
    let wish = Wish::downtime(MS * 300);
    let mut source = Source::new(Strategy::HYBRID, &[spec(MEMORY, 640)], wish, MS).unwrap();
    begin(&mut source);
    settle(&mut source);
    pass(&mut source, 1, &[(0, 2)]);
    settle(&mut source);
    let stops = Advice::Stop(StopReason::WithinLimit);
    assert_eq!(source.advise(MS * 1100), stops);
    source.pass_started(MS * 1200, true);
    source.written(MEMORY, BlockRange::new(0, 640)).unwrap();
    source.pass_read();
    assert_eq!(source.advise(MS * 1300), Advice::Send);
    assert!(settle(&mut source).0 > 600);
}

#[test]
fn memory_that_follows_travels_while_the_destination_loads_the_guest() {
    let wish = Wish::downtime(MS * 300);
    let mut source = Source::new(Strategy::HYBRID, &[spec(MEMORY, 640)], wish, MS).unwrap();
    source.add(&spec(DISK, 64), Strategy::POSTCOPY).unwrap();
    begin(&mut source);
    settle(&mut source);
    pass(&mut source, 1, &[(0, 64), (300, 2)]);
    source.frozen();
    source.closed();
    assert_eq!(source.advise(MS), Advice::Complete);
    assert!(take(&mut source).is_none());
    source.behind_the_rest();
    let first = take(&mut source).unwrap();
    assert!(first.held, "the destination does not load the guest yet");
    source.loading();
    let blocks: Vec<u64> = first.blocks.iter().map(|id| id.block).collect();
    let expected = [0, 1, 2, 3, 4, 5, 300, 301];
    assert_eq!(blocks, expected, "few written blocks go first");
    // What the destination waits for goes before the others, and is on its way only once.
    source.asked(MEMORY, BlockRange::new(300, 1)).unwrap();
    source.asked(MEMORY, BlockRange::new(40, 1)).unwrap();
    let wanted = take(&mut source).unwrap();
    assert!(!wanted.held, "it does");
    assert!(wanted.urgent && wanted.blocks.iter().all(|id| (32..48).contains(&id.block)));
    acknowledge(&mut source, &first);
    // A lost connection ends it, and loses what was not acknowledged.
    source.connection_lost();
    source.connected();
    let again = take(&mut source).unwrap();
    assert!(again.blocks.iter().all(|id| (32..48).contains(&id.block)));
    acknowledge(&mut source, &again);
    assert!(take(&mut source).is_none());
    assert_eq!(left(&source), [(0, 1, !(0x3f | 0xffff << 32))]);
    source.handed_over();
    assert_eq!(settle(&mut source), (42, 64), "now the disk follows too");
    assert!(source.is_drained());
}
