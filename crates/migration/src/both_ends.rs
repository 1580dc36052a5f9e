//! Tests of the sender against the receiver, over a carrier within the process: whatever the guest
//! writes, and whenever the carrier is lost, the destination has the guest's content at the end.

use crate::carrier::memory::{self, IN_HAND, MemorySource, Random, Settings, WAITING};
use crate::destination::disks::Disks;
use crate::destination::local_content::Kept;
use crate::destination::receiver::{ReceiveError, Receiving};
use crate::destination::store::Store;
use crate::limits::peer_quota::{Means, Pace};
use crate::limits::shared_dedup::Gangs;
use crate::source::acks::{AcknowledgeError, Acknowledging};
use crate::source::reply::Reply;
use crate::source::sender::{Content, Encoding, Line, Sending};
use crate::source::verified_ranges::Checked;
use longhaul_codec::{BlockId, BlockWrite, DigestKey};
use longhaul_engine::source::{Advice, Link, Source};
use longhaul_engine::stop::Wish;
use longhaul_engine::strategy::Strategy;
use longhaul_protocol::piece::Part;
use longhaul_protocol::{BLOCK_SIZE, BlockRange, Epoch, HostId, MigrationId, RegionId, RegionSpec};
use longhaul_storage::disk::{Disk as _, ExportSize, RawDisk};
use longhaul_storage::front::telling::ToServer;
use std::collections::BTreeSet;
use std::fs::File;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

type Block = [u8; BLOCK_SIZE];
type Regions = Arc<Mutex<Vec<Vec<Block>>>>;

const KEY: DigestKey = DigestKey([3; 32]);
const MIGRATION: MigrationId = MigrationId([7; 8]);
/// RAM, RAM that is not zero at the destination, and a disk whose last chunk is a part of one.
const BLOCKS: [u64; 3] = [300, 40, 200];
const DISK: u16 = 2;
const GARBAGE: u8 = 0xee;
/// Far more than any move takes.
const PATIENCE: Duration = Duration::from_secs(60);

fn regions() -> Vec<RegionSpec> {
    let spec = |(n, blocks): (usize, &u64)| RegionSpec {
        id: RegionId(n as u16),
        name: format!("region {n}"),
        blocks: *blocks,
        durable: n == usize::from(DISK),
        starts_zero: n != 1,
    };
    BLOCKS.iter().enumerate().map(spec).collect()
}

/// Makes content of the kinds that travel differently: zeros, few contents, noise.
fn content(random: &mut Random) -> Block {
    match random.below(4) {
        0 => [0; BLOCK_SIZE],
        1 => [random.below(5) as u8; BLOCK_SIZE],
        _ => {
            let mut block = [0; BLOCK_SIZE];
            for word in block.chunks_exact_mut(8) {
                word.copy_from_slice(&random.next().to_le_bytes());
            }
            block
        }
    }
}

struct GuestContent(Regions);

impl Content for GuestContent {
    fn read(&self, blocks: &[BlockId], into: &mut [Block]) -> Result<(), String> {
        let regions = self.0.lock().unwrap();
        for (id, into) in blocks.iter().zip(into) {
            *into = regions[usize::from(id.region.0)][id.block as usize];
        }
        Ok(())
    }
}

/// The RAM at the destination.
struct Ram(Regions);

impl Store for Ram {
    fn read(&mut self, id: BlockId, into: &mut Block) -> Result<(), String> {
        *into = self.0.lock().unwrap()[usize::from(id.region.0)][id.block as usize];
        Ok(())
    }

    fn write(&mut self, writes: &[BlockWrite<'_>], _fresh: &[bool]) -> Result<(), String> {
        let mut regions = self.0.lock().unwrap();
        for write in writes {
            for (n, block) in write.range.blocks().enumerate() {
                let into = &mut regions[usize::from(write.region.0)][block as usize];
                match write.content {
                    longhaul_codec::Content::Zero => into.fill(0),
                    longhaul_codec::Content::Bytes(bytes) => {
                        into.copy_from_slice(&bytes[n * BLOCK_SIZE..][..BLOCK_SIZE]);
                    }
                }
            }
        }
        Ok(())
    }
}

/// What one connection consists of, besides its line.
struct Connection {
    acknowledging: Acknowledging,
    receiver: JoinHandle<ReceiveError>,
}

struct Move {
    random: Random,
    guest: Regions,
    /// Blocks of RAM that were written since the last pass.
    dirty: BTreeSet<(u16, u64)>,
    waits: bool,
    replies: (
        mpsc::UnboundedSender<ToServer>,
        mpsc::UnboundedReceiver<ToServer>,
    ),
    writes: u64,
    sending: Arc<Sending>,
    worker: JoinHandle<crate::source::sender::SendError>,
    receiving: Arc<Receiving>,
    there: Regions,
    image: Arc<RawDisk>,
    began: Instant,
    epoch: Epoch,
    interruptions: u64,
    connection: Option<Connection>,
    _folder: tempfile::TempDir,
}

impl Move {
    fn new(seed: u64, strategy: Strategy) -> Self {
        let mut random = Random(seed);
        let all = regions();
        let (ram, disk) = all.split_at(usize::from(DISK));
        let fill = |spec: &RegionSpec| (0..spec.blocks).map(|_| content(&mut random)).collect();
        let guest: Regions = Arc::new(Mutex::new(all.iter().map(fill).collect()));
        let wish = Wish::downtime(Duration::from_millis(300));
        let mut engine = Source::new(Strategy::PRECOPY, ram, wish, Duration::ZERO).unwrap();
        engine.add(&disk[0], strategy).unwrap();
        let encoding = longhaul_api::Encoding {
            delta_cache: Some(longhaul_api::DeltaCache::Bytes(64 << 10)),
            ..longhaul_api::Encoding::default()
        };
        let sending = Sending::new(
            engine,
            (MIGRATION, KEY),
            Box::new(GuestContent(guest.clone())),
            Encoding::new(&encoding, BLOCKS[0] * BLOCK_SIZE as u64),
            Checked::of(disk.iter()),
        );
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let file = File::create(&path).unwrap();
        file.set_len(disk[0].blocks * BLOCK_SIZE as u64).unwrap();
        let image = Arc::new(RawDisk::open(&path, ExportSize::OfFile).unwrap());
        let zeros = |spec: &RegionSpec| vec![[0; BLOCK_SIZE]; spec.blocks as usize];
        let there: Regions = Arc::new(Mutex::new(ram.iter().map(zeros).collect()));
        for block in &mut there.lock().unwrap()[1] {
            block.fill(GARBAGE);
        }
        let means = Means {
            others: Gangs::default().others(HostId([1; 32])),
            workers: Arc::new(Semaphore::new(1)),
            pace: Pace::new(PATIENCE, PATIENCE, Instant::now()),
        };
        let disks = Disks::new(&all, &[], std::slice::from_ref(&image));
        let store = Box::new(Ram(there.clone()));
        let arriving = (disks, Kept::default());
        let receiving = Receiving::new(&all, store, arriving, KEY, means).unwrap();
        Self {
            random,
            guest,
            dirty: BTreeSet::new(),
            waits: strategy == Strategy::MIRROR,
            replies: mpsc::unbounded_channel(),
            writes: 0,
            worker: tokio::spawn(sending.clone().work()),
            sending,
            receiving,
            there,
            image,
            began: Instant::now(),
            epoch: Epoch(0),
            interruptions: 0,
            connection: None,
            _folder: folder,
        }
    }

    /// Connects over another carrier, which is lost sooner or later while there are interruptions
    /// to come.
    fn connect(&mut self, interruptions: u64, limit_bps: Option<u64>) {
        self.epoch.0 += 1;
        let lost = self.interruptions < interruptions;
        let (sink, source) = memory::carrier(Settings {
            seed: self.random.next(),
            delay_max: Duration::from_micros(self.random.below(1500)),
            lost_after: lost.then(|| self.random.below(12)),
        });
        let line = Line::new(sink, self.epoch);
        line.carrier.set_bandwidth(limit_bps);
        let stats = line.carrier.stats();
        if let Some(rate) = stats.path_rate_bps {
            self.sending.engine().link(Link {
                rate_bytes_per_s: rate / 8.0,
                rtt: stats.rtt,
                queued_bytes: 0,
            });
        }
        self.receiving.connected(self.epoch);
        self.connection = Some(Connection {
            acknowledging: Acknowledging::begin(self.sending.clone(), line.clone()),
            receiver: tokio::spawn(receive(self.receiving.clone(), self.epoch, source)),
        });
        self.sending.connect(line);
    }

    /// Waits for a time, or until the carrier is lost and replaced.
    async fn wait(&mut self, time: Duration, interruptions: u64) {
        let connection = self.connection.as_mut().unwrap();
        let Ok(ended) = timeout(time, connection.acknowledging.ended()).await else {
            return;
        };
        assert!(matches!(ended, AcknowledgeError::Lost(_)), "{ended}");
        self.interruptions += 1;
        self.sending.disconnect();
        let connection = self.connection.take().unwrap();
        let ended = connection.receiver.await.unwrap();
        assert!(matches!(ended, ReceiveError::Lost(_)), "{ended}");
        self.connect(interruptions, None);
    }

    /// Writes a few blocks, as the guest does.
    fn write(&mut self) {
        for _ in 0..self.random.below(12) {
            let region = self.random.below(BLOCKS.len() as u64) as u16;
            let block = self.random.below(BLOCKS[usize::from(region)]);
            let new = content(&mut self.random);
            let mut guest = self.guest.lock().unwrap();
            let old = &mut guest[usize::from(region)][block as usize];
            match self.random.below(2) {
                0 => *old = new,
                // A small change: the block travels as a delta.
                _ => old[..40].copy_from_slice(&new[..40]),
            }
            drop(guest);
            if region == DISK {
                self.writes += 1;
                let reply = Reply::new(self.replies.0.clone(), self.writes);
                let written = self.sending.written(
                    RegionId(region),
                    BlockRange::new(block, 1),
                    self.waits.then_some(reply),
                );
                written.unwrap();
            } else {
                self.dirty.insert((region, block));
            }
        }
    }

    /// Reports what was written to the RAM, as QEMU's pass does.
    fn pass(&mut self, whole: bool) {
        let mut engine = self.sending.engine();
        engine.pass_started(self.began.elapsed(), whole);
        report(&mut engine, &mut self.dirty);
        engine.pass_read();
        drop(engine);
        self.sending.wake();
    }

    /// Stops the guest: every write is reported.
    fn stop(&mut self) {
        let mut engine = self.sending.engine();
        report(&mut engine, &mut self.dirty);
        engine.frozen();
        engine.closed();
        drop(engine);
        self.sending.wake();
    }

    /// Tells the receiver what it has to wait for, as the control connection does.
    fn announce(&self, line: &Line) {
        let list = self.sending.engine().list(RegionId(DISK), 0, usize::MAX);
        self.receiving.listed(&list.unwrap().unwrap()).unwrap();
        self.receiving.announced(line.epoch, line.frames(), false);
    }

    async fn run(&mut self, interruptions: u64, limit_bps: Option<u64>) {
        self.connect(interruptions, limit_bps);
        self.pass(true);
        for _ in 0..12 {
            self.write();
            if self.random.below(3) == 0 {
                self.pass(false);
            }
            // Mirrors get in step when the engine is asked.
            let _ = self.sending.engine().advise(self.began.elapsed());
            let time = Duration::from_micros(self.random.below(2000));
            self.wait(time, interruptions).await;
        }
        let state: Vec<u8> = (0..70_000).map(|n| (n % 251) as u8).collect();
        self.sending.add_pieces(Part::DeviceState, &state);
        self.stop();
        loop {
            let advice = self.sending.engine().advise(self.began.elapsed());
            match self.sending.line() {
                Some(line) if advice == Advice::Complete => self.announce(&line),
                _ => self.sending.wake(),
            }
            let completed = self.receiving.completed();
            if timeout(Duration::from_millis(1), completed).await.is_ok() {
                break;
            }
            self.wait(Duration::ZERO, interruptions).await;
        }
        assert_eq!(self.receiving.device_state(), (None, Some(state)));
        self.compare().await;
        self.end().await;
    }

    async fn compare(&mut self) {
        self.receiving.seal();
        self.receiving.settled().await.unwrap();
        let guest = self.guest.lock().unwrap();
        let there = self.there.lock().unwrap();
        assert!(guest[..2] == there[..], "the RAM differs");
        for (block, expected) in guest[usize::from(DISK)].iter().enumerate() {
            let mut found = [0; BLOCK_SIZE];
            self.image
                .read((block * BLOCK_SIZE) as u64, &mut found)
                .unwrap();
            assert!(found == *expected, "block {block} of the disk differs");
        }
    }

    /// Ends the carrier in order: every write has its reply, and both halves learn of the end.
    async fn end(&mut self) {
        self.worker.abort();
        self.sending.disconnect();
        let mut answered = BTreeSet::new();
        while let Ok(ToServer::Answered(id)) = self.replies.1.try_recv() {
            assert!(answered.insert(id), "write {id} was answered twice");
        }
        let expected = if self.waits { self.writes } else { 0 };
        assert_eq!(answered.len() as u64, expected);
        let connection = self.connection.take().unwrap();
        drop(connection.acknowledging);
        let ended = connection.receiver.await.unwrap();
        assert!(matches!(ended, ReceiveError::Lost(_)), "{ended}");
    }
}

async fn receive(receiving: Arc<Receiving>, epoch: Epoch, source: MemorySource) -> ReceiveError {
    receiving.work(epoch, &source).await
}

fn report(engine: &mut Source, dirty: &mut BTreeSet<(u16, u64)>) {
    for (region, block) in std::mem::take(dirty) {
        let range = BlockRange::new(block, 1);
        engine.written(RegionId(region), range).unwrap();
    }
}

async fn moved(seed: u64, strategy: Strategy, interruptions: u64, limit_bps: Option<u64>) -> Move {
    let mut one = Move::new(seed, strategy);
    let run = timeout(PATIENCE, one.run(interruptions, limit_bps)).await;
    assert!(run.is_ok(), "seed {seed} does not end");
    one
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_arrives_as_it_is_over_a_carrier_that_reorders() {
    for seed in 0..8 {
        for strategy in [Strategy::PRECOPY, Strategy::MIRROR] {
            let one = moved(seed, strategy, 0, None).await;
            assert_eq!(one.epoch, Epoch(1));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_arrives_as_it_is_whenever_its_carrier_is_lost() {
    let mut interruptions = 0;
    for seed in 0..24 {
        for strategy in [Strategy::PRECOPY, Strategy::MIRROR] {
            let one = moved(seed, strategy, 4, None).await;
            interruptions += one.interruptions;
        }
    }
    assert!(interruptions > 48, "{interruptions}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_arrives_over_a_slow_carrier() {
    moved(1, Strategy::PRECOPY, 0, Some(200_000_000)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_carrier_that_does_not_move_holds_few_frames() {
    let one = Move::new(1, Strategy::PRECOPY);
    let (sink, source) = memory::carrier(Settings::default());
    let line = Line::new(sink, Epoch(1));
    one.sending.connect(line.clone());
    // Frames wait for the receiver, and as many are under way.
    let most = (IN_HAND + WAITING) as u64;
    let all_full = || line.frames() >= most && line.carrier.frames_in_hand() == IN_HAND;
    timeout(PATIENCE, async {
        while !all_full() {
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .unwrap();
    assert_eq!(line.frames(), most);
    assert!(one.sending.engine().pending_blocks() > 0);
    drop(source);
    // A lost carrier takes no frame.
    assert!(line.carrier.reserve().await.is_err());
    one.worker.abort();
}
