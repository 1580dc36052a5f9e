//! Tests different regions on one link: what the stop waits for, what is sent first, and what the
//! drain does.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod kept;
mod left;
mod memory;

use longhaul_codec::{BlockId, Decision, Digest, Staged};
use longhaul_engine::gang::Gang;
use longhaul_engine::remaining::Remaining;
use longhaul_engine::source::{Advice, Answer, Batch, Link, Source, SourceError, Unseen, WriteId};
use longhaul_engine::stop::{StopReason, Wish};
use longhaul_engine::strategy::Strategy;
use longhaul_protocol::message::Acknowledgement;
use longhaul_protocol::{BlockRange, MigrationId, RegionId, RegionSpec};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const MEMORY: RegionId = RegionId(0);
const DISK: RegionId = RegionId(1);
const MS: Duration = Duration::from_millis(1);

fn spec(id: RegionId, blocks: u64) -> RegionSpec {
    RegionSpec {
        id,
        name: "region".to_owned(),
        blocks,
        durable: id == DISK,
        starts_zero: false,
    }
}

/// Memory of 256 blocks and a disk of `blocks` blocks, in the first pass.
fn source(strategy: Strategy, blocks: u64) -> Source {
    let wish = Wish::downtime(MS * 300);
    let mut source = Source::new(Strategy::PRECOPY, &[spec(MEMORY, 256)], wish, MS).unwrap();
    source.add(&spec(DISK, blocks), strategy).unwrap();
    begin(&mut source);
    source
}

/// Reads the first pass, on a link that is known.
fn begin(source: &mut Source) {
    source.link(Link {
        rate_bytes_per_s: 1e7,
        rtt: MS,
        queued_bytes: 0,
    });
    source.pass_started(Duration::ZERO, true);
    source.unseen(Some(Unseen::default()));
    source.pass_read();
}

/// Takes a frame whose content is new each time.
fn take(source: &mut Source) -> Option<Batch> {
    take_compressed(source, 1)
}

/// Takes a frame with memory compressed to this share.
fn take_compressed(source: &mut Source, memory: usize) -> Option<Batch> {
    let batch = source.take(16).unwrap()?;
    let content = |n: usize| {
        let mut digest = [9; 16];
        digest[..8].copy_from_slice(&(batch.seq * 1000 + n as u64).to_le_bytes());
        Staged::Content(Digest(digest))
    };
    let staged: Vec<Staged> = (0..batch.blocks.len()).map(content).collect();
    source.decide(&batch, &staged);
    let part = match batch.blocks[0].region {
        DISK => 1,
        _ => memory,
    };
    source.encoded(&batch, Some(batch.blocks.len() * 4096 / part));
    Some(batch)
}

fn acknowledge(source: &mut Source, batch: &Batch) {
    let message = Acknowledgement {
        applied: vec![(batch.seq, 1)],
        rejected: Vec::new(),
        ..Acknowledgement::default()
    };
    source.acknowledged(&message).unwrap();
}

/// Sends until nothing is pending. Returns how many blocks of memory and of the disk were sent.
fn settle(source: &mut Source) -> (usize, usize) {
    let (mut memory, mut disk) = (0, 0);
    while let Some(batch) = take(source) {
        let of_disk = batch.blocks.iter().filter(|id| id.region == DISK).count();
        disk += of_disk;
        memory += batch.blocks.len() - of_disk;
        acknowledge(source, &batch);
    }
    (memory, disk)
}

fn write(source: &mut Source, start: u64, count: u64) -> Answer {
    let range = BlockRange::new(start, count);
    source.written_by(DISK, range, WriteId(start)).unwrap()
}

fn stop(source: &mut Source) {
    source.frozen();
    settle(source);
    source.closed();
}

#[test]
fn the_stop_does_not_wait_for_what_may_come_later() {
    for strategy in [Strategy::HYBRID, Strategy::POSTCOPY, Strategy::SHARED] {
        let mut source = source(strategy, 100_000);
        let mut sent = 0;
        while source.advise(MS * 1000) == Advice::Send && sent < 60 {
            let Some(batch) = take(&mut source) else {
                break;
            };
            acknowledge(&mut source, &batch);
            sent += 1;
        }
        let advice = source.advise(MS * 1000);
        assert_eq!(
            advice,
            Advice::Stop(StopReason::WithinLimit),
            "{}",
            strategy.name
        );
    }
}

#[test]
fn the_stop_waits_for_what_was_promised() {
    let mut source = source(Strategy::PRECOPY, 10_000);
    assert_eq!(settle(&mut source), (256, 10_000));
    // 4 MB on a link of 10 MB per second: more than 300 ms. The blocks are not sent before the next
    // pass.
    write(&mut source, 0, 1000);
    assert!(take(&mut source).is_none());
    assert!(source.predicted_downtime(MS * 1000).at_most > MS * 300);
    assert_eq!(source.advise(MS * 1000), Advice::ReadPass);
    source.pass_started(MS * 1000, false);
    source.pass_read();
    assert_eq!(source.dirty_blocks_per_s(), Some(1000.0));
    assert_eq!(settle(&mut source), (0, 1000));
    assert_eq!(
        source.advise(MS * 1100),
        Advice::Stop(StopReason::WithinLimit)
    );
}

#[test]
fn both_kinds_have_their_share_in_the_first_pass_and_then_the_promised_goes_first() {
    let mut source = source(Strategy::HYBRID, 100_000);
    let mut of_disk = 0;
    for _ in 0..16 {
        let batch = take(&mut source).unwrap();
        of_disk += usize::from(batch.blocks[0].region == DISK);
        acknowledge(&mut source, &batch);
    }
    assert_eq!(of_disk, 4);
    settle(&mut source);
    write(&mut source, 0, 640);
    source.pass_started(MS * 1000, false);
    source.written(MEMORY, BlockRange::new(0, 64)).unwrap();
    source.pass_read();
    for n in 0..6 {
        let batch = take(&mut source).unwrap();
        let expected = if n < 4 { MEMORY } else { DISK };
        assert_eq!(batch.blocks[0].region, expected, "frame {n}");
        acknowledge(&mut source, &batch);
    }
}

#[test]
fn the_share_is_one_of_the_link_and_not_of_the_blocks() {
    let mut source = source(Strategy::HYBRID, 100_000);
    source.share_background(0.5, 0.0);
    let mut of_disk = 0;
    for _ in 0..20 {
        let batch = take_compressed(&mut source, 4).unwrap();
        of_disk += usize::from(batch.blocks[0].region == DISK);
        acknowledge(&mut source, &batch);
    }
    assert_eq!(of_disk, 4);
}

#[test]
fn what_is_written_after_the_stop_counts_until_qemu_lets_go() {
    let mut source = source(Strategy::PRECOPY, 64);
    settle(&mut source);
    source.frozen();
    assert_eq!(source.advise(MS), Advice::Wait, "its disk is open");
    write(&mut source, 3, 1);
    assert_eq!(source.advise(MS), Advice::Send);
    assert_eq!(settle(&mut source), (0, 1));
    source.closed();
    assert_eq!(source.advise(MS), Advice::Complete);
    let late = source.written(DISK, BlockRange::new(3, 1));
    assert!(matches!(late, Err(SourceError::Closed { .. })));
}

#[test]
fn a_mirror_goes_first_and_then_holds_writes() {
    let mut source = source(Strategy::MIRROR, 640);
    let batch = take(&mut source).unwrap();
    assert!(batch.blocks.iter().all(|id| id.region == DISK));
    acknowledge(&mut source, &batch);
    assert_eq!(
        write(&mut source, 600, 8),
        Answer::Now,
        "it is being copied"
    );
    while source.pending_by_region()[1].1 > 0 {
        let batch = take(&mut source).unwrap();
        assert!(batch.blocks.iter().all(|id| id.region == DISK));
        acknowledge(&mut source, &batch);
    }
    source.advise(MS);
    assert_eq!(write(&mut source, 5, 3), Answer::Later);
    assert_eq!(source.poll_answer(), None);
    let batch = take(&mut source).unwrap();
    let blocks: Vec<u64> = batch.blocks.iter().map(|id| id.block).collect();
    assert_eq!((batch.blocks[0].region, blocks), (DISK, vec![5, 6, 7]));
    acknowledge(&mut source, &batch);
    assert_eq!(source.poll_answer(), Some(WriteId(5)));
    // A lost connection lets the guest continue, and the mirror falls behind.
    assert_eq!(write(&mut source, 9, 1), Answer::Later);
    source.connection_lost();
    assert_eq!(source.poll_answer(), Some(WriteId(9)));
    assert_eq!(write(&mut source, 9, 1), Answer::Now);
    source.connected();
    assert_eq!(write(&mut source, 9, 1), Answer::Later);
}

/// A mirror in step, and memory of which nothing was sent.
fn in_step() -> Source {
    let mut source = source(Strategy::MIRROR, 640);
    while source.pending_by_region()[1].1 > 0 {
        let batch = take(&mut source).unwrap();
        acknowledge(&mut source, &batch);
    }
    source.advise(MS);
    source
}

#[test]
fn memory_moves_beside_a_guest_that_always_waits_for_a_write() {
    let mut source = in_step();
    let (mut memory, mut disk, mut at) = (0, 0, 0);
    write(&mut source, at, 16);
    while memory < 256 {
        let batch = take(&mut source).unwrap();
        match batch.blocks[0].region {
            DISK => disk += batch.blocks.len(),
            _ => memory += batch.blocks.len(),
        }
        acknowledge(&mut source, &batch);
        while source.poll_answer().is_some() {
            at = (at + 16) % 640;
            assert_eq!(write(&mut source, at, 16), Answer::Later);
        }
        assert_ne!(source.advise(MS), Advice::Wait, "something is left");
    }
    assert!(
        (200..=300).contains(&disk),
        "{disk} of the disk beside {memory}"
    );
}

#[test]
fn a_write_that_comes_while_memory_moves_does_not_wait_long() {
    let mut source = in_step();
    let mut waiting = 0;
    while let Some(batch) = take(&mut source) {
        waiting += batch.blocks.len() * 4096;
    }
    assert!(waiting <= 320 * 1024, "{waiting}");
    write(&mut source, 9, 1);
    let next = take(&mut source).unwrap();
    assert_eq!((next.blocks.len(), next.blocks[0].block), (1, 9));
}

#[test]
fn a_mirror_in_step_does_not_wait_for_one_that_is_not() {
    let mut source = source(Strategy::MIRROR, 64);
    let other = RegionId(2);
    source.add(&spec(other, 64_000), Strategy::MIRROR).unwrap();
    let batch = source.take(64).unwrap().unwrap();
    assert_eq!(batch.blocks[0].region, DISK);
    source.decide(&batch, &[Staged::Zero; 64]);
    source.encoded(&batch, Some(100));
    acknowledge(&mut source, &batch);
    source.advise(MS);
    assert_eq!(write(&mut source, 3, 1), Answer::Later);
    let next = take(&mut source).unwrap();
    assert_eq!((next.blocks[0].region, next.blocks[0].block), (DISK, 3));
}

#[test]
fn a_mirror_that_gets_no_nearer_holds_writes_all_the_same() {
    let mut source = source(Strategy::MIRROR, 6400);
    let mut at = 0;
    for _ in 0..10_000 {
        // The guest writes as much as the link carries.
        at = (at + 16) % 6400;
        if write(&mut source, at, 16) == Answer::Later {
            return;
        }
        let batch = take(&mut source).unwrap();
        acknowledge(&mut source, &batch);
        source.advise(MS);
    }
    panic!("the guest never waits");
}

#[test]
fn blocks_are_settled_when_nothing_of_them_is_left_to_do() {
    let mut source = source(Strategy::PRECOPY, 640);
    let range = BlockRange::new(100, 200);
    let is_settled = |source: &mut Source| source.is_settled(DISK, range);
    assert!(!is_settled(&mut source), "nothing was sent");
    settle(&mut source);
    assert!(is_settled(&mut source));
    write(&mut source, 99, 1);
    write(&mut source, 300, 1);
    assert!(is_settled(&mut source), "those are others");
    write(&mut source, 100, 1);
    assert!(!is_settled(&mut source), "kept for the next pass");
    source.pass_started(MS * 1000, false);
    assert!(!is_settled(&mut source), "pending");
    let batch = take(&mut source).unwrap();
    assert!(!is_settled(&mut source), "on its way");
    acknowledge(&mut source, &batch);
    assert!(is_settled(&mut source));
    assert!(
        !source.is_settled(DISK, BlockRange::new(600, 41)),
        "there is no such block"
    );
}

/// Lets the guest write, and sends the blocks in the next pass at this many bytes per block.
fn pass_of(source: &mut Source, at: Duration, region: RegionId, blocks: u64, block_bytes: usize) {
    let range = BlockRange::new(0, blocks);
    if region == DISK {
        source.written(DISK, range).unwrap();
    }
    source.pass_started(at, false);
    if region == MEMORY {
        source.written(MEMORY, range).unwrap();
    }
    source.pass_read();
    while let Some(batch) = source.take(64).unwrap() {
        assert!(batch.blocks.iter().all(|id| id.region == region));
        let new = |n: usize| Staged::Content(Digest([(at.as_millis() as usize / 7 + n) as u8; 16]));
        let staged: Vec<Staged> = (0..batch.blocks.len()).map(new).collect();
        source.decide(&batch, &staged);
        let bytes = batch.blocks.len() * block_bytes;
        source.encoded(&batch, Some(bytes));
        source.made(&batch, MS * batch.blocks.len() as u32 / 100);
        acknowledge(source, &batch);
    }
}

#[test]
fn a_prediction_knows_what_a_disk_costs_beside_memory() {
    let mut source = source(Strategy::PRECOPY, 1000);
    settle(&mut source);
    for pass in 1..40 {
        pass_of(&mut source, MS * 2000 * pass, MEMORY, 256, 100);
        pass_of(&mut source, MS * (2000 * pass + 1000), DISK, 64, 4096);
    }
    let now = MS * 100_000;
    source.pass_started(now, false);
    source.unseen(Some(Unseen {
        at: now,
        ..Unseen::default()
    }));
    source.pass_read();
    let nothing = source.predicted_downtime(now).likely;
    // 100 bytes per block on 10 MB per second take less time than encoding the frames.
    source.written(MEMORY, BlockRange::new(0, 200)).unwrap();
    let memory = source.predicted_downtime(now).likely - nothing;
    assert!(memory.abs_diff(MS * 2) < MS, "{memory:?}");
    source.written(DISK, BlockRange::new(0, 1000)).unwrap();
    let disk = source.predicted_downtime(now);
    // 4 MB: the average cost of a block over both kinds would be a fifth of it.
    assert!(disk.likely > MS * 400, "{disk:?}");
    assert!(disk.at_most < MS * 480, "{disk:?}");
    source.compares_for(MS * 700);
    let compared = source.predicted_downtime(now);
    assert_eq!(compared.likely - disk.likely, MS * 700);
}

#[test]
fn a_region_that_is_held_back_leaves_the_link_to_others() {
    let mut source = source(Strategy::PRECOPY, 640);
    source.hold_back(DISK, true);
    assert_eq!(settle(&mut source), (256, 0));
    source.wanted(DISK, BlockRange::new(7, 1)).unwrap();
    assert_eq!(settle(&mut source), (0, 1));
    assert_eq!(source.advise(MS), Advice::Send, "it is not done");
    source.hold_back(DISK, false);
    assert_eq!(settle(&mut source), (0, 639));
    source.hold_back(DISK, true);
    write(&mut source, 3, 1);
    source.frozen();
    assert_eq!(settle(&mut source), (0, 1), "nobody is disturbed any more");
}

/// Reports the duration of a sync at the destination.
fn sync_takes(source: &mut Source, ms: u32) {
    let message = Acknowledgement {
        sync_us: ms * 1000,
        ..Acknowledgement::default()
    };
    source.acknowledged(&message).unwrap();
}

#[test]
fn the_stop_waits_for_the_destinations_disks_but_not_for_ever() {
    let passes = |source: &mut Source, from_s: u64, to_s: u64| {
        for second in from_s..to_s {
            let now = Duration::from_secs(second);
            assert_eq!(source.advise(now), Advice::ReadPass, "{now:?}");
            source.pass_started(now, false);
            source.pass_read();
        }
    };
    for recovers in [true, false] {
        let mut source = source(Strategy::PRECOPY, 16);
        settle(&mut source);
        sync_takes(&mut source, 2000);
        let predicted = source.predicted_downtime(MS * 50);
        assert!(predicted.likely >= MS * 2000, "{predicted:?}");
        assert!(predicted.at_most >= MS * 4000, "{predicted:?}");
        passes(&mut source, 1, 40);
        if recovers {
            sync_takes(&mut source, 20);
            let stop = Advice::Stop(StopReason::WithinLimit);
            assert_eq!(source.advise(Duration::from_secs(41)), stop);
            continue;
        }
        passes(&mut source, 40, 61);
        let stopped = (61..80).any(|second| {
            let now = Duration::from_secs(second);
            let stops = matches!(source.advise(now), Advice::Stop(StopReason::LocalMinimum));
            source.pass_started(now, false);
            source.pass_read();
            stops
        });
        assert!(stopped, "it waits for ever");
    }
}

#[test]
fn a_bound_that_only_the_destinations_disks_exceed_does_not_keep_a_guest_for_long() {
    let mut source = source(Strategy::PRECOPY, 16);
    settle(&mut source);
    sync_takes(&mut source, 180);
    let limit = MS * 300;
    let predicted = source.predicted_downtime(MS * 50);
    assert!(
        predicted.likely < limit && predicted.at_most > limit,
        "{predicted:?}"
    );
    let stops_at = (1..20).find(|second| {
        let now = Duration::from_secs(*second);
        let advice = source.advise(now);
        source.pass_started(now, false);
        source.pass_read();
        advice == Advice::Stop(StopReason::WithinLimit)
    });
    assert_eq!(stops_at, Some(6), "5 s after the first pass that waits");
}

#[test]
fn what_need_not_be_there_waits_while_the_destination_makes_durable_what_it_has() {
    for recovers in [true, false] {
        let mut source = source(Strategy::HYBRID, 6400);
        while source.pending_by_region()[0].1 > 0 {
            let batch = take(&mut source).unwrap();
            acknowledge(&mut source, &batch);
        }
        sync_takes(&mut source, 200);
        for second in 1..5 {
            let now = Duration::from_secs(second);
            assert_eq!(source.advise(now), Advice::ReadPass, "{now:?}");
            assert!(take(&mut source).is_none(), "{now:?}");
            source.pass_started(now, false);
            source.pass_read();
        }
        if recovers {
            sync_takes(&mut source, 20);
            let stop = Advice::Stop(StopReason::WithinLimit);
            assert_eq!(source.advise(Duration::from_secs(5)), stop);
        } else {
            source.advise(Duration::from_secs(7));
            assert!(take(&mut source).is_some(), "it waits for ever");
        }
    }
}

#[test]
fn what_is_wanted_suspends_the_drain() {
    let mut source = source(Strategy::POSTCOPY, 640);
    stop(&mut source);
    source.handed_over();
    let background = take(&mut source).unwrap();
    assert_eq!(background.blocks[0].block, 0);
    source.wanted(DISK, BlockRange::new(300, 2)).unwrap();
    let wanted = take(&mut source).unwrap();
    let blocks: Vec<u64> = wanted.blocks.iter().map(|id| id.block).collect();
    assert_eq!(blocks, [300, 301], "and nothing beside it");
    let next = take(&mut source).unwrap();
    assert_eq!(next.blocks[0].block, 256, "the rest of its chunk");
    source.superseded(DISK, BlockRange::new(0, 640)).unwrap();
    assert!(take(&mut source).is_none());
    assert!(!source.is_drained(), "some is on its way");
    source.connection_lost();
    source.missing(DISK, 0..10, &[]).unwrap();
    assert!(source.is_drained());
}

#[test]
fn the_drain_leaves_the_link_free_for_reads() {
    let mut source = source(Strategy::POSTCOPY, 64_000);
    stop(&mut source);
    source.handed_over();
    let mut frames = 0;
    while take(&mut source).is_some() {
        frames += 1;
    }
    // 10 MB per second for 21 ms, four times, are less than what may be in flight in any case.
    assert_eq!(frames * 8 * 4096, 1024 * 1024);
    source.wanted(DISK, BlockRange::new(60_000, 1)).unwrap();
    assert!(take(&mut source).is_some());
}

#[test]
fn what_a_peer_says_of_chunks_that_are_not_there_is_refused() {
    let mut source = source(Strategy::POSTCOPY, 640);
    stop(&mut source);
    let part = |chunk, chunks| Remaining {
        chunk,
        chunks,
        mask: 1,
        written_blocks: 0,
    };
    for (chunks, lacks) in [
        (0..11, vec![]),
        (0..10, vec![part(9, 2)]),
        (2..4, vec![part(1, 1)]),
        (0..10, vec![part(1, u32::MAX)]),
    ] {
        assert!(source.missing(DISK, chunks, &lacks).is_err());
    }
    assert!(source.missing(MEMORY, 0..1, &[]).is_err());
    assert!(source.wanted(DISK, BlockRange::new(639, 2)).is_err());
    assert!(
        source
            .superseded(RegionId(7), BlockRange::new(0, 1))
            .is_err()
    );
}

#[test]
fn a_drain_has_only_the_regions_of_its_disks() {
    let wish = Wish::downtime(MS * 300);
    let mut source = Source::new(Strategy::PRECOPY, &[], wish, MS).unwrap();
    let [first, second] = [RegionId(2), RegionId(3)];
    for id in [first, second] {
        source.add(&spec(id, 8), Strategy::POSTCOPY).unwrap();
    }
    for region in [MEMORY, first, second] {
        let again = source.add(&spec(region, 8), Strategy::POSTCOPY);
        assert_eq!(again, Err(SourceError::Order { region }));
    }
    source.closed();
    source.handed_over();
    assert!(source.wanted(MEMORY, BlockRange::new(0, 1)).is_err());
    source.wanted(second, BlockRange::new(3, 1)).unwrap();
    let batch = take(&mut source).unwrap();
    let wanted = BlockId {
        region: second,
        block: 3,
    };
    assert_eq!(batch.blocks, [wanted]);
    acknowledge(&mut source, &batch);
    for (region, blocks) in [(first, 8), (second, 7)] {
        let rest = take(&mut source).unwrap();
        assert!(rest.blocks.iter().all(|id| id.region == region));
        assert_eq!(rest.blocks.len(), blocks);
        acknowledge(&mut source, &rest);
    }
    assert!(source.is_drained());
}

#[test]
fn holes_do_not_travel_where_the_disk_starts_as_zero() {
    let mut source = source(Strategy::SHARED, 64);
    let sparse = RegionSpec {
        starts_zero: true,
        ..spec(RegionId(2), 6400)
    };
    source.add(&sparse, Strategy::HYBRID).unwrap();
    source.hole(RegionId(2), BlockRange::new(10, 6000)).unwrap();
    source.hole(DISK, BlockRange::new(0, 64)).unwrap();
    settle(&mut source);
    assert_eq!(source.sent().blocks(), 256 + 400);
}

/// Takes a frame in which each block has the content of that number. Returns how they travel.
fn take_with(source: &mut Source, content: impl Fn(BlockId) -> u64) -> (Batch, Vec<Decision>) {
    try_take_with(source, content).unwrap()
}

fn try_take_with(
    source: &mut Source,
    content: impl Fn(BlockId) -> u64,
) -> Option<(Batch, Vec<Decision>)> {
    let batch = source.take(16).unwrap()?;
    let staged = |id: &BlockId| {
        let mut digest = [0; 16];
        let number = content(*id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        digest[..8].copy_from_slice(&number.to_le_bytes());
        Staged::Content(Digest(digest))
    };
    let staged: Vec<Staged> = batch.blocks.iter().map(staged).collect();
    let decisions = source.decide(&batch, &staged);
    source.encoded(&batch, Some(100));
    Some((batch, decisions))
}

fn means(decision: &Decision) -> Option<BlockId> {
    match decision {
        Decision::Reference { source, .. } => Some(*source),
        _ => None,
    }
}

fn of_disk(block: u64) -> BlockId {
    BlockId {
        region: DISK,
        block,
    }
}

/// A guest whose disk has content 1, 2, ... and has been sent; its memory has not.
fn disk_sent(strategy: Strategy) -> Source {
    let mut source = source(strategy, 128);
    for _ in 0..8 {
        let (batch, decisions) = take_with(&mut source, |id| id.block + 1);
        assert!(batch.blocks.iter().all(|id| id.region == DISK));
        assert!(decisions.iter().all(|decision| means(decision).is_none()));
        acknowledge(&mut source, &batch);
    }
    assert_eq!(source.advise(MS), Advice::Send, "memory");
    source
}

#[test]
fn a_page_that_is_on_the_disk_travels_as_a_reference_to_it() {
    for strategy in [Strategy::PRECOPY, Strategy::MIRROR] {
        let mut source = disk_sent(strategy);
        let (batch, decisions) = take_with(&mut source, |id| id.block + 5);
        assert!(batch.blocks.iter().all(|id| id.region == MEMORY));
        for (id, decision) in batch.blocks.iter().zip(&decisions) {
            assert_eq!(means(decision), Some(of_disk(id.block + 4)));
        }
        // The target is not overwritten there before the reference has arrived.
        write(&mut source, 4, 1);
        source.pass_started(MS * 100, false);
        for _ in 0..15 {
            let (next, _) = take_with(&mut source, |_| 1000);
            assert!(!next.blocks.contains(&of_disk(4)));
            acknowledge(&mut source, &next);
        }
        assert!(source.take(16).unwrap().is_none());
        acknowledge(&mut source, &batch);
        let (next, _) = take_with(&mut source, |_| 1001);
        assert_eq!(next.blocks, [of_disk(4)]);
    }
}

#[test]
fn a_block_that_is_in_memory_or_on_the_disk_travels_as_a_reference() {
    let mut source = disk_sent(Strategy::PRECOPY);
    while source.advise(MS) == Advice::Send {
        let (batch, _) = take_with(&mut source, |id| id.block + 1_000_000);
        acknowledge(&mut source, &batch);
    }
    write(&mut source, 0, 3);
    source.pass_started(MS * 100, false);
    let content = |id: BlockId| [1_000_007, 100, 7777][id.block as usize];
    let (batch, decisions) = take_with(&mut source, content);
    assert_eq!(batch.blocks, [0, 1, 2].map(of_disk));
    let in_memory = BlockId {
        region: MEMORY,
        block: 7,
    };
    let meant: Vec<_> = decisions.iter().map(means).collect();
    assert_eq!(meant, [Some(in_memory), Some(of_disk(99)), None]);
}

#[test]
fn at_a_standstill_only_what_was_never_written_is_meant() {
    let mut source = disk_sent(Strategy::PRECOPY);
    write(&mut source, 70, 1);
    source.frozen();
    let mut seen = 0;
    while let Advice::Send = source.advise(MS) {
        let (batch, decisions) = take_with(&mut source, |id| id.block % 128 + 1);
        for (id, decision) in batch.blocks.iter().zip(&decisions) {
            let expected = (id.block % 128 < 64).then(|| of_disk(id.block % 128));
            if id.region == MEMORY && id.block < 128 {
                assert_eq!(means(decision), expected, "{id:?}");
                seen += 1;
            }
        }
        acknowledge(&mut source, &batch);
    }
    assert_eq!(seen, 128);
}

#[test]
fn disks_are_left_out_where_nobody_wants_them_read_back() {
    let mut source = source(Strategy::PRECOPY, 128);
    source.use_disk_references(false);
    for _ in 0..8 {
        let (batch, _) = take_with(&mut source, |id| id.block + 1);
        acknowledge(&mut source, &batch);
    }
    let (batch, decisions) = take_with(&mut source, |id| id.block + 5);
    assert!(decisions.iter().all(|decision| means(decision).is_none()));
    acknowledge(&mut source, &batch);
    // Nor are their blocks searched for in memory.
    write(&mut source, 0, 3);
    source.pass_started(MS * 100, false);
    let in_memory = batch.blocks[0].block + 5;
    while source.advise(MS) == Advice::Send {
        let (batch, decisions) = take_with(&mut source, |id| match id.region {
            MEMORY => id.block + 1_000_000,
            _ => in_memory,
        });
        assert!(decisions.iter().all(|decision| means(decision).is_none()));
        acknowledge(&mut source, &batch);
    }
}

/// The content that concurrently moving guests have brought.
#[derive(Clone, Default)]
struct Brought(Arc<Mutex<Vec<(Digest, BlockId)>>>);

impl Gang for Brought {
    fn find(&self, digest: &Digest) -> Option<(MigrationId, BlockId)> {
        let brought = self.0.lock().unwrap();
        let found = brought.iter().find(|(one, _)| one == digest);
        found.map(|(_, id)| (MigrationId([1; 8]), *id))
    }

    fn arrived(&mut self, digest: &Digest, block: BlockId) {
        self.0.lock().unwrap().push((*digest, block));
    }

    fn changed(&mut self, _: &Digest, _: BlockId) {}
}

#[test]
fn what_another_guest_has_brought_of_its_disk_is_not_sent_again() {
    let brought = Brought::default();
    let mut first = source(Strategy::PRECOPY, 128);
    first.join(Box::new(brought.clone()), 0.0);
    for _ in 0..8 {
        let (batch, _) = take_with(&mut first, |id| id.block + 1);
        acknowledge(&mut first, &batch);
    }
    let mut second = source(Strategy::PRECOPY, 128);
    second.join(Box::new(brought), 0.0);
    // In another place of its own disk.
    let (batch, decisions) = take_with(&mut second, |id| (id.block + 3) % 128 + 1);
    for (id, decision) in batch.blocks.iter().zip(&decisions) {
        let Decision::Shared { source, .. } = decision else {
            panic!("{id:?} is brought again");
        };
        assert_eq!(*source, of_disk((id.block + 3) % 128));
    }
}
