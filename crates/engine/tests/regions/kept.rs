//! Tests known content: blocks that are sent as digests.

use super::{DISK, MEMORY, MS, source, spec, take_with, try_take_with, write};
use longhaul_codec::{BlockId, Decision, RUN_BLOCKS};
use longhaul_engine::source::{Advice, Source};
use longhaul_engine::stop::Wish;
use longhaul_engine::strategy::Strategy;
use longhaul_protocol::message::Acknowledgement;
use longhaul_protocol::{BlockRange, RegionId};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Sends everything, with a number of frames in flight; for the blocks that `keeps` names a digest
/// is enough. Returns the blocks sent as digests, and how many were not found.
fn send_kept_behind(
    source: &mut Source,
    frames: usize,
    keeps: impl Fn(BlockId) -> bool,
) -> (Vec<BlockId>, usize) {
    let mut under_way = VecDeque::new();
    let (mut named, mut for_nothing) = (Vec::new(), 0);
    loop {
        let sends = under_way.len() < frames && source.advise(MS) == Advice::Send;
        let sent = sends.then(|| try_take_with(source, |id| id.block + 1));
        if let Some((batch, decisions)) = sent.flatten() {
            let kept = batch.blocks.iter().zip(&decisions);
            let kept = kept.filter(|(_, decision)| matches!(decision, Decision::Kept { .. }));
            let kept: Vec<BlockId> = kept.map(|(id, _)| *id).collect();
            let missing = kept.iter().filter(|id| !keeps(**id));
            let rejected: Vec<_> = missing
                .map(|id| (id.region, BlockRange::new(id.block, 1)))
                .collect();
            for_nothing += rejected.len();
            named.extend(kept);
            under_way.push_back(Acknowledgement {
                applied: vec![(batch.seq, 1)],
                rejected,
                ..Acknowledgement::default()
            });
        } else if let Some(message) = under_way.pop_front() {
            source.acknowledged(&message).unwrap();
        } else {
            return (named, for_nothing);
        }
    }
}

/// Sends everything with one frame in flight. Returns how many blocks were sent as digests.
fn send_kept(source: &mut Source, keeps: impl Fn(BlockId) -> bool) -> (usize, usize) {
    let (named, for_nothing) = send_kept_behind(source, 1, keeps);
    (named.len(), for_nothing)
}

#[test]
fn what_the_destination_kept_is_named_and_what_it_did_not_comes_whole() {
    for strategy in [Strategy::PRECOPY, Strategy::MIRROR] {
        let mut source = source(strategy, 1000);
        source.kept(DISK).unwrap();
        // Recently written blocks are not sent as digests.
        write(&mut source, 0, 10);
        let sent = send_kept(&mut source, |id| id.block % 10 > 0);
        // A pre-copy learns of that with the next pass.
        let expected = match strategy.name {
            "precopy" => (1000, 100),
            _ => (1000 - 64, 93),
        };
        assert_eq!(sent, expected, "{}", strategy.name);
        let (named, for_nothing) = (sent.0 as u64, sent.1 as u64);
        assert_eq!(source.sent().kept_blocks, named - for_nothing);
        let literal = source.sent().literal_blocks;
        assert!(literal >= 1000 - named + for_nothing, "{literal}");
        assert!(source.kept(RegionId(2)).is_err());
    }
}

/// Sends everything; the destination has the blocks that `keeps` names. Returns how many digests
/// travelled, and how many blocks of the disk travelled whole.
fn send_runs(source: &mut Source, keeps: impl Fn(BlockId) -> bool) -> (usize, usize) {
    let (mut digests, mut whole) = (0, 0);
    while source.advise(MS) == Advice::Send {
        let Some((batch, decisions)) = try_take_with(source, |id| id.block + 1) else {
            continue;
        };
        let mut runs: BTreeMap<(RegionId, u64), Vec<BlockId>> = BTreeMap::new();
        let mut rejected = Vec::new();
        for (id, decision) in batch.blocks.iter().zip(&decisions) {
            let in_chunk = (id.region, id.block / RUN_BLOCKS);
            match decision {
                Decision::KeptRun { .. } => runs.entry(in_chunk).or_default().push(*id),
                Decision::Kept { .. } => {
                    digests += 1;
                    rejected.extend((!keeps(*id)).then_some(*id));
                }
                Decision::Literal { .. } if id.region == DISK => whole += 1,
                _ => {}
            }
        }
        for run in runs.into_values() {
            digests += 1;
            if !run.iter().all(|id| keeps(*id)) {
                rejected.extend(run);
            }
        }
        let rejected = rejected.into_iter();
        let message = Acknowledgement {
            applied: vec![(batch.seq, 1)],
            rejected: rejected
                .map(|id| (id.region, BlockRange::new(id.block, 1)))
                .collect(),
            ..Acknowledgement::default()
        };
        source.acknowledged(&message).unwrap();
    }
    (digests, whole)
}

#[test]
fn chunks_that_are_as_they_were_cost_a_digest_each() {
    for strategy in [Strategy::PRECOPY, Strategy::MIRROR] {
        let mut source = source(strategy, 64_000);
        source.kept(DISK).unwrap();
        source.use_runs();
        // A block of every tenth chunk has changed.
        let keeps = |id: BlockId| !(id.block + 5).is_multiple_of(640);
        let (digests, whole) = send_runs(&mut source, keeps);
        // Each changed chunk is compared as a run, and then block by block.
        assert!((1000..1000 + 100 * 65).contains(&digests), "{digests}");
        assert_eq!(whole, 100);
        assert_eq!(source.known_content(), (64_000 - 100, 100));
        assert_eq!(source.sent().kept_blocks, 64_000 - 100);
    }
}

#[test]
fn runs_end_where_every_chunk_has_changed() {
    let mut source = source(Strategy::PRECOPY, 64_000);
    source.kept(DISK).unwrap();
    source.use_runs();
    let (digests, _) = send_runs(&mut source, |id| !id.block.is_multiple_of(64));
    // A part of each of some hundred chunks was tried as a run.
    assert!((64_000 + 64..64_000 + 300).contains(&digests), "{digests}");
    assert_eq!(source.known_content(), (63_000, 1000));
}

/// On a fast machine a whole region is in flight before the first answer arrives.
#[test]
fn what_is_not_kept_leaves_room_to_name_what_is() {
    let wish = Wish::downtime(MS * 300);
    let memory = spec(MEMORY, 60_000);
    let mut source = Source::new(Strategy::PRECOPY, &[memory], wish, MS).unwrap();
    source.add(&spec(DISK, 40_000), Strategy::PRECOPY).unwrap();
    source.pass_started(Duration::ZERO, true);
    source.pass_read();
    source.kept(MEMORY).unwrap();
    source.kept(DISK).unwrap();
    let of_disk = |id: BlockId| id.region == DISK && !id.block.is_multiple_of(100);
    let (named, for_nothing) = send_kept_behind(&mut source, 200, of_disk);
    let disk = named.iter().filter(|id| id.region == DISK).count();
    let memory = named.len() - disk;
    // One in 32 of the following blocks confirms that the hit rate stays low.
    assert!((4096..4200 + 60_000 / 32).contains(&memory), "{memory}");
    assert!(disk > 40_000 * 9 / 10, "{disk}");
    assert_eq!(for_nothing, memory + 400);
}

/// No block travels as a literal just because answers are late.
#[test]
fn what_is_mostly_kept_waits_for_answers() {
    let mut source = source(Strategy::PRECOPY, 60_000);
    source.kept(DISK).unwrap();
    let keeps = |id: BlockId| !id.block.is_multiple_of(3);
    let (named, for_nothing) = send_kept_behind(&mut source, 4000, keeps);
    assert_eq!(named.len(), 60_000);
    assert_eq!(for_nothing, 20_000);
}

#[test]
fn what_is_kept_is_found_again_behind_what_is_not() {
    let mut source = source(Strategy::PRECOPY, 200_000);
    source.kept(DISK).unwrap();
    let (named, for_nothing) = send_kept(&mut source, |id| id.block >= 50_000);
    assert!(for_nothing < 4200 + 50_000 / 32, "{for_nothing}");
    assert!(named - for_nothing > 140_000, "{named}");
}

#[test]
fn what_was_found_is_counted_whatever_else_does_not_hold() {
    let mut source = source(Strategy::PRECOPY, 256);
    source.kept(DISK).unwrap();
    let mut named = 0;
    while source.advise(MS) == Advice::Send && source.sent().frames < 100 {
        let (batch, decisions) = take_with(&mut source, |id| id.block + 1);
        let is_kept = |decision: &&Decision| matches!(decision, Decision::Kept { .. });
        named += decisions.iter().filter(is_kept).count() as u64;
        let memory = batch.blocks.iter().filter(|id| id.region == MEMORY);
        let message = Acknowledgement {
            applied: vec![(batch.seq, 1)],
            rejected: memory
                .map(|id| (id.region, BlockRange::new(id.block, 1)))
                .collect(),
            ..Acknowledgement::default()
        };
        source.acknowledged(&message).unwrap();
    }
    assert!(source.sent().rejected_blocks > 256);
    assert!(named > 0 && source.sent().kept_blocks == named, "{named}");
}

#[test]
fn what_is_not_kept_is_soon_not_asked_for_any_more() {
    let mut source = source(Strategy::PRECOPY, 200_000);
    source.kept(DISK).unwrap();
    let (named, for_nothing) = send_kept(&mut source, |_| false);
    assert_eq!(named, for_nothing);
    // The following blocks are probed occasionally.
    let probes = (200_000 - 4096) / 32;
    assert!((4096 + probes..4200 + probes).contains(&named), "{named}");
    assert_eq!(source.pending_blocks(), 0);
    source.frozen();
    source.closed();
    assert_eq!(source.advise(MS), Advice::Complete);
}
