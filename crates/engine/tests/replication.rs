//! Tests source and destination against each other and against a plain copy: whatever the guest
//! writes and the link loses, both ends hold the same content when the destination is complete.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use longhaul_codec::{
    BlockId, BlockSink, BlockWrite, Compression, Content, Decoder, Digest, DigestKey, Encoder,
    Hasher, Limits,
};
use longhaul_engine::destination::Destination;
use longhaul_engine::gang::{Gang, GangIndex, Member};
use longhaul_engine::source::{Advice, Link, Source, SourceError, Unseen};
use longhaul_engine::stop::{StopReason, Wish};
use longhaul_engine::strategy::Strategy as Row;
use longhaul_protocol::{BLOCK_SIZE, BlockRange, Epoch, MigrationId, RegionId, RegionSpec};
use proptest::prelude::*;
use std::collections::{BTreeSet, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const KEY: DigestKey = DigestKey([3; 32]);
const SIZES: [u64; 2] = [70, 9];

type Memory = Vec<Vec<[u8; BLOCK_SIZE]>>;

fn regions() -> Vec<RegionSpec> {
    let spec = |(n, blocks): (usize, &u64)| RegionSpec {
        id: RegionId(n as u16),
        name: format!("region {n}"),
        blocks: *blocks,
        durable: false,
        starts_zero: n == 0,
    };
    SIZES.iter().enumerate().map(spec).collect()
}

fn memory(fill: u8) -> Memory {
    SIZES
        .iter()
        .map(|blocks| vec![[fill; BLOCK_SIZE]; *blocks as usize])
        .collect()
}

/// A destination whose RAM is a vector; the second region starts as garbage.
struct Receiver {
    memory: Memory,
    state: Destination,
    /// The number of blocks that will be misread.
    misreads: u8,
    /// What another guest holds there.
    other: Option<(MigrationId, Memory)>,
}

impl BlockSink for Receiver {
    type Error = Infallible;

    fn region_blocks(&self, region: RegionId) -> Option<u64> {
        self.state.region_blocks(region)
    }

    fn accepts(&self, id: BlockId, seq: u64) -> bool {
        self.state.accepts(self.state.epoch(), id, seq)
    }

    fn read(&mut self, id: BlockId, content: &mut [u8; BLOCK_SIZE]) -> bool {
        *content = self.memory[usize::from(id.region.0)][id.block as usize];
        if let Some(left) = self.misreads.checked_sub(1) {
            self.misreads = left;
            content[100] ^= 1;
        }
        true
    }

    fn read_shared(
        &mut self,
        migration: MigrationId,
        id: BlockId,
        content: &mut [u8; BLOCK_SIZE],
    ) -> bool {
        let Some((other, memory)) = &self.other else {
            return false;
        };
        *content = memory[usize::from(id.region.0)][id.block as usize];
        migration == *other
    }

    fn apply(&mut self, seq: u64, writes: &[BlockWrite<'_>]) -> Result<(), Infallible> {
        for write in writes {
            let fresh = self.state.written(write.region, write.range, seq);
            for (n, block) in write.range.blocks().enumerate() {
                let target = &mut self.memory[usize::from(write.region.0)][block as usize];
                match write.content {
                    Content::Zero if fresh => assert_eq!(*target, [0; BLOCK_SIZE]),
                    Content::Zero => *target = [0; BLOCK_SIZE],
                    Content::Bytes(bytes) => {
                        target.copy_from_slice(&bytes[n * BLOCK_SIZE..(n + 1) * BLOCK_SIZE]);
                    }
                }
            }
        }
        Ok(())
    }
}

struct Bench {
    guest: Memory,
    dirty: BTreeSet<(u16, u64)>,
    source: Source,
    receiver: Receiver,
    wire: VecDeque<Vec<u8>>,
    acks: VecDeque<longhaul_protocol::message::Acknowledgement>,
    encoder: Encoder,
    deltas: usize,
    misread: bool,
    /// Frames of lost connections, some of which may yet arrive.
    forgotten: VecDeque<(Epoch, Vec<u8>)>,
    decoder: Decoder,
    epoch: Epoch,
    frames_in_epoch: u64,
    now: Duration,
}

impl Bench {
    fn new() -> Self {
        let regions = regions();
        let mut destination = memory(0);
        destination[1].iter_mut().for_each(|block| block.fill(0xee));
        let wish = Wish::downtime(Duration::from_millis(300));
        let mut source = Source::new(Row::PRECOPY, &regions, wish, Duration::ZERO).unwrap();
        source.pass_started(Duration::ZERO, true);
        Self {
            guest: memory(0),
            dirty: BTreeSet::new(),
            source,
            receiver: Receiver {
                memory: destination,
                state: Destination::new(&regions).unwrap(),
                misreads: 0,
                other: None,
            },
            wire: VecDeque::new(),
            acks: VecDeque::new(),
            // Room for half of the guest's blocks: versions are evicted.
            encoder: Encoder::for_guest(79, 32_000),
            deltas: 0,
            misread: false,
            forgotten: VecDeque::new(),
            decoder: Decoder::new(KEY),
            epoch: Epoch(1),
            frames_in_epoch: 0,
            now: Duration::ZERO,
        }
    }

    fn write(&mut self, at: u16, content: u8) {
        let at = u64::from(at) % (SIZES[0] + SIZES[1]);
        let (region, block) = if at < SIZES[0] {
            (0, at)
        } else {
            (1, at - SIZES[0])
        };
        self.guest[usize::from(region)][block as usize] = [content; BLOCK_SIZE];
        self.dirty.insert((region, block));
    }

    /// Changes a few words of a block.
    fn touch(&mut self, at: u16, word: u16, value: u8) {
        let at = u64::from(at) % (SIZES[0] + SIZES[1]);
        let (region, block) = if at < SIZES[0] {
            (0, at)
        } else {
            (1, at - SIZES[0])
        };
        let word = usize::from(word) % (BLOCK_SIZE / 8 - 3) * 8;
        let content = &mut self.guest[usize::from(region)][block as usize];
        content[word..word + 20].fill(value);
        self.dirty.insert((region, block));
    }

    fn report(&mut self) {
        for (region, block) in std::mem::take(&mut self.dirty) {
            self.source
                .written(RegionId(region), BlockRange::new(block, 1))
                .unwrap();
        }
    }

    fn pass(&mut self) {
        self.now += Duration::from_millis(100);
        self.source.pass_started(self.now, false);
        self.report();
        self.source.pass_read();
    }

    fn send(&mut self, max: usize) -> bool {
        let Some(batch) = self.source.take(max).unwrap() else {
            return false;
        };
        let content: Vec<_> = batch
            .blocks
            .iter()
            .map(|id| self.guest[usize::from(id.region.0)][id.block as usize])
            .collect();
        let mut staged = Vec::new();
        Hasher::new(KEY).stage(&content, &mut staged);
        let decisions = self.source.decide(&batch, &staged);
        let frame = self
            .encoder
            .encode_frame(
                batch.seq,
                &batch.blocks,
                &content,
                &decisions,
                Compression::Lz4,
            )
            .unwrap();
        self.deltas += frame.deltas;
        if frame.blocks == 0 {
            self.source.encoded(&batch, None);
        } else {
            self.source.encoded(&batch, Some(frame.bytes.len()));
            self.frames_in_epoch += 1;
            self.wire.push_back(frame.bytes);
        }
        true
    }

    /// Delivers a frame. Frames may overtake each other: `which` picks one in flight.
    fn deliver(&mut self, which: u16) -> bool {
        if self.wire.is_empty() {
            return false;
        }
        let which = usize::from(which) % self.wire.len();
        let frame = self.wire.remove(which).unwrap();
        self.arrive(self.epoch, &frame);
        true
    }

    fn arrive(&mut self, epoch: Epoch, frame: &[u8]) {
        let outcome = self
            .decoder
            .decode(frame, &Limits::default(), &mut self.receiver)
            .unwrap();
        self.receiver
            .state
            .applied(epoch, outcome.seq, &outcome.rejected)
            .unwrap();
    }

    /// Delivers a frame of an earlier connection, or one for the second time.
    fn straggle(&mut self, which: u16) {
        let which = usize::from(which) % self.forgotten.len().max(1);
        if let Some((epoch, frame)) = self.forgotten.get(which).cloned() {
            self.arrive(epoch, &frame);
        }
    }

    fn acknowledge(&mut self) {
        self.acks.extend(self.receiver.state.poll_acknowledgement());
        if let Some(ack) = self.acks.pop_front() {
            self.source.acknowledged(&ack).unwrap();
        }
    }

    fn cut(&mut self) {
        let epoch = self.epoch;
        self.forgotten
            .extend(self.wire.drain(..).map(|frame| (epoch, frame)));
        self.acks.clear();
        self.source.connection_lost();
        self.epoch = Epoch(self.epoch.0 + 1);
        self.frames_in_epoch = 0;
        self.receiver.state.connected(self.epoch);
    }

    fn finish(&mut self) {
        self.now += Duration::from_millis(100);
        self.source.pass_started(self.now, false);
        self.report();
        self.source.frozen();
        for _ in 0..10_000 {
            match self.source.advise(self.now) {
                Advice::Complete if self.wire.is_empty() && self.acks.is_empty() => {
                    self.receiver
                        .state
                        .announced(self.epoch, self.frames_in_epoch);
                    if self.receiver.state.is_complete() {
                        return;
                    }
                }
                Advice::Send => {
                    self.send(5);
                }
                Advice::Wait | Advice::Complete => {}
                other => panic!("{other:?} after the guest was stopped"),
            }
            self.deliver(0);
            self.acknowledge();
        }
        panic!("it never ends");
    }
}

#[derive(Debug, Clone)]
enum Step {
    Write { at: u16, content: u8 },
    Touch { at: u16, word: u16, value: u8 },
    Misread(u8),
    Straggle(u16),
    Pass,
    Send(usize),
    Deliver(u16),
    Acknowledge,
    Cut,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (any::<u16>(), 0u8..6).prop_map(|(at, content)| Step::Write { at, content }),
        8 => (any::<u16>(), any::<u16>(), any::<u8>())
            .prop_map(|(at, word, value)| Step::Touch { at, word, value }),
        1 => (0u8..3).prop_map(Step::Misread),
        1 => any::<u16>().prop_map(Step::Straggle),
        2 => Just(Step::Pass),
        6 => (1usize..20).prop_map(Step::Send),
        6 => any::<u16>().prop_map(Step::Deliver),
        3 => Just(Step::Acknowledge),
        1 => Just(Step::Cut),
    ]
}

proptest! {
    #[test]
    fn both_ends_hold_the_same_in_the_end(
        steps in proptest::collection::vec(step(), 0..300),
    ) {
        let mut bench = Bench::new();
        for step in steps {
            match step {
                Step::Write { at, content } => bench.write(at, content),
                Step::Touch { at, word, value } => bench.touch(at, word, value),
                Step::Misread(blocks) => {
                    bench.receiver.misreads = blocks;
                    bench.misread |= blocks > 0;
                }
                Step::Straggle(which) => bench.straggle(which),
                Step::Pass => bench.pass(),
                Step::Send(max) => { bench.send(max); }
                Step::Deliver(which) => { bench.deliver(which); }
                Step::Acknowledge => bench.acknowledge(),
                Step::Cut => bench.cut(),
            }
        }
        if !bench.misread && bench.forgotten.is_empty() {
            // In whatever order frames arrive, a target of a reference waits for that reference.
            prop_assert_eq!(bench.source.sent().rejected_blocks, 0);
        }
        bench.finish();
        for (ours, theirs) in bench.guest.iter().zip(&bench.receiver.memory) {
            for (block, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
                prop_assert_eq!(ours[0], theirs[0], "block {}", block);
                prop_assert!(ours == theirs);
            }
        }
    }
}

#[test]
fn content_that_is_there_does_not_travel_again() {
    let mut bench = Bench::new();
    (0..SIZES[0] as u16).for_each(|at| bench.write(at, 1 + at as u8));
    bench.report();
    while bench.send(16) {}
    while bench.deliver(0) {}
    bench.acknowledge();
    let literal = bench.source.sent().literal_blocks;
    assert_eq!(literal, SIZES[0]);
    bench.write(3, 4);
    bench.write(72, 9);
    bench.pass();
    while bench.send(16) {}
    let sent = bench.source.sent();
    assert_eq!(sent.literal_blocks, literal, "found elsewhere or unchanged");
    assert_eq!((sent.same_blocks, sent.reference_blocks), (1, 1));
}

#[test]
fn what_has_changed_travels_as_a_delta() {
    let mut bench = Bench::new();
    let settle = |bench: &mut Bench| {
        bench.pass();
        while bench.send(16) {}
        while bench.deliver(0) {}
        bench.acknowledge();
        std::mem::take(&mut bench.deltas)
    };
    (0..10).for_each(|at| bench.write(at, 1 + at as u8));
    assert_eq!(settle(&mut bench), 0, "nothing is there yet");
    // Hot blocks would wait for the stop; these cool in a pass without writes.
    settle(&mut bench);
    (0..10).for_each(|at| bench.touch(at, at, 0xaa));
    assert_eq!(settle(&mut bench), 10);
    settle(&mut bench);
    (0..10).for_each(|at| bench.touch(at, 19, 0xcc));
    bench.receiver.misreads = 3;
    assert_eq!(settle(&mut bench), 10);
    let sent = bench.source.sent();
    assert_eq!(sent.rejected_blocks, 3);
    bench.finish();
    assert_eq!(bench.source.sent().literal_blocks, sent.literal_blocks + 3);
    assert_eq!(bench.deltas, 0, "what was rejected travels whole");
    assert!(bench.guest == bench.receiver.memory);
}

/// A member of a gang in which no guest waits for another.
struct Joined(Arc<Mutex<GangIndex>>, Member);

impl Gang for Joined {
    fn find(&self, digest: &Digest) -> Option<(MigrationId, BlockId)> {
        self.0.lock().unwrap().find(self.1, digest)
    }

    fn arrived(&mut self, digest: &Digest, block: BlockId) {
        self.0.lock().unwrap().arrived(self.1, digest, block);
    }

    fn changed(&mut self, digest: &Digest, block: BlockId) {
        self.0.lock().unwrap().changed(self.1, digest, block);
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        self.0.lock().unwrap().leave(self.1);
    }
}

#[test]
fn what_another_guest_has_brought_is_not_sent_again() {
    let gang = Arc::new(Mutex::new(GangIndex::default()));
    let join = |bench: &mut Bench, n: u8| {
        // With room for all of it.
        let member = gang.lock().unwrap().join(MigrationId([n; 8]), 4096);
        let member = member.unwrap();
        bench
            .source
            .join(Box::new(Joined(gang.clone(), member)), member.start());
    };
    let (mut first, mut second) = (Bench::new(), Bench::new());
    join(&mut first, 1);
    join(&mut second, 2);
    (0..60).for_each(|at| first.write(at, 1 + at as u8));
    // The same content elsewhere, and some of its own.
    (0..60).for_each(|at| second.write(at + 5, 1 + at as u8));
    second.write(0, 200);
    let settle = |bench: &mut Bench| {
        bench.report();
        while bench.send(16) {}
        while bench.deliver(0) {}
        bench.acknowledge();
        bench.source.sent()
    };
    let sent = settle(&mut first);
    assert_eq!((sent.literal_blocks, sent.shared_blocks), (60, 0));
    // A block that has changed there does not match; one that is known to have changed is not
    // referred to.
    first.write(7, 99);
    let known = settle(&mut first);
    assert_eq!(known.literal_blocks, 61);
    let mut there = first.receiver.memory.clone();
    there[0][8] = [0x77; BLOCK_SIZE];
    second.receiver.other = Some((MigrationId([1; 8]), there));
    let sent = settle(&mut second);
    assert_eq!((sent.literal_blocks, sent.shared_blocks), (2, 59));
    assert_eq!(sent.rejected_blocks, 1);
    second.finish();
    assert!(second.guest == second.receiver.memory);
    assert_eq!(second.source.sent().literal_blocks, 3);
    // No guest refers to blocks of a guest that runs at the destination.
    let mut third = Bench::new();
    join(&mut third, 3);
    first.finish();
    third.write(0, 3);
    assert_eq!(settle(&mut third).shared_blocks, 0);
}

/// A guest whose block 5 is being sent as a reference to block 3, which has changed since.
fn referring() -> Bench {
    let mut bench = Bench::new();
    bench.write(3, 33);
    bench.pass();
    while bench.send(16) {}
    while bench.deliver(0) {}
    bench.acknowledge();
    bench.write(5, 33);
    bench.pass();
    assert!(bench.send(16));
    assert_eq!(bench.source.sent().reference_blocks, 1);
    bench.write(3, 44);
    bench
}

#[test]
fn what_a_reference_means_is_not_overwritten_before_it_has_arrived() {
    let mut bench = referring();
    bench.pass();
    assert!(!bench.send(16), "block 3 waits");
    bench.write(6, 33);
    bench.pass();
    assert!(bench.send(16), "another reference to what is there");
    assert_eq!(bench.source.sent().reference_blocks, 2);
    assert!(bench.deliver(0));
    bench.acknowledge();
    assert!(!bench.send(16), "block 3 waits for both");
    assert!(bench.deliver(0));
    bench.acknowledge();
    assert!(bench.send(16));
    bench.finish();
    assert_eq!(bench.source.sent().rejected_blocks, 0);
    assert!(bench.guest == bench.receiver.memory);
}

#[test]
fn no_more_is_rejected_at_once_than_there_is() {
    let mut bench = referring();
    let first = BlockRange::new(0, 1);
    let more = bench.source.all_blocks() as usize + 1;
    let hostile = longhaul_protocol::message::Acknowledgement {
        applied: Vec::new(),
        rejected: vec![(RegionId(0), first); more],
        sync_us: 0,
    };
    let refused = bench.source.acknowledged(&hostile);
    assert!(matches!(refused, Err(SourceError::Rejected { .. })));
}

#[test]
fn a_lost_reference_keeps_nothing_waiting() {
    let mut bench = referring();
    bench.cut();
    bench.pass();
    assert!(bench.send(16));
    bench.straggle(0);
    bench.finish();
    assert!(bench.guest == bench.receiver.memory);
}

#[test]
fn at_a_standstill_a_reference_may_fail_and_is_repaired() {
    let mut bench = referring();
    bench.pass();
    bench.source.frozen();
    assert!(bench.send(16), "nothing waits for a guest that is stopped");
    bench.deliver(1);
    bench.deliver(0);
    bench.acknowledge();
    assert_eq!(bench.source.sent().rejected_blocks, 1);
    bench.finish();
    assert_eq!(bench.source.sent().reference_blocks, 1, "sent whole then");
    assert!(bench.guest == bench.receiver.memory);
}

#[test]
fn an_idle_guest_is_stopped_after_one_pass() {
    let mut bench = Bench::new();
    bench.source.unseen(Some(Unseen::default()));
    let link = Link {
        rate_bytes_per_s: 1e7,
        rtt: Duration::from_millis(20),
        queued_bytes: 0,
    };
    bench.source.link(link);
    bench.source.pass_read();
    assert_eq!(bench.source.advise(bench.now), Advice::Send);
    while bench.send(64) {}
    bench.now += Duration::from_secs(1);
    assert_eq!(
        bench.source.advise(bench.now),
        Advice::Stop(StopReason::WithinLimit)
    );
}

#[test]
fn a_guest_of_unknown_rate_is_looked_at_again() {
    let mut bench = Bench::new();
    bench.source.link(Link {
        rate_bytes_per_s: 1e7,
        rtt: Duration::from_millis(20),
        queued_bytes: 0,
    });
    bench.source.pass_read();
    while bench.send(64) {}
    bench.now += Duration::from_secs(1);
    assert_eq!(bench.source.advise(bench.now), Advice::ReadPass);
}

#[test]
fn a_guest_that_writes_faster_than_the_link_carries_is_known() {
    let mut bench = Bench::new();
    let link = |rate_bytes_per_s| Link {
        rate_bytes_per_s,
        rtt: Duration::from_millis(20),
        queued_bytes: 0,
    };
    bench.source.link(link(1000.0));
    bench.source.pass_read();
    (0..60).for_each(|at| bench.write(at, 1 + at as u8));
    bench.pass();
    assert!(bench.send(64));
    assert_eq!(bench.source.outpaced(), None, "most has yet to be sent");
    while bench.send(64) {}
    bench.pass();
    assert_eq!(bench.source.outpaced(), None, "nothing is written any more");
    (0..60).for_each(|at| bench.write(at, 1 + at as u8));
    bench.pass();
    while bench.send(64) {}
    let outpaced = bench.source.outpaced().unwrap();
    assert!(outpaced.written_bytes_per_s > 1000.0, "{outpaced:?}");
    let predicted = bench.source.predicted_downtime(bench.now);
    assert!(predicted.likely <= predicted.at_most, "{predicted:?}");
    bench.source.link(link(1e9));
    assert_eq!(bench.source.outpaced(), None);
}

#[test]
fn hot_blocks_wait_for_the_stop() {
    let mut bench = Bench::new();
    let link = Link {
        rate_bytes_per_s: 1e7,
        rtt: Duration::from_millis(20),
        queued_bytes: 0,
    };
    bench.source.link(link);
    bench.source.pass_read();
    while bench.send(64) {}
    while bench.deliver(0) {}
    bench.acknowledge();
    for content in 0..3 {
        bench.write(7, 100 + content);
        bench.pass();
        if content < 1 {
            while bench.send(64) {}
            while bench.deliver(0) {}
            bench.acknowledge();
        }
    }
    assert!(!bench.send(64), "block 7 is hot and stays");
    assert_eq!(bench.source.pending_blocks(), 1);
}
