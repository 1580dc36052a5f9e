//! The sending worker: takes blocks from the engine, reads and encodes them, and gives the frames
//! to a carrier.
//!
//! The worker first reserves room on the carrier, then takes blocks, and then reads their content,
//! so that the content is as fresh as possible. A [`Line`] is one carrier in use. A lost line is
//! marked dead *before* the engine hears of the loss, so that no block can be taken for it
//! afterwards.

use crate::carrier::{CarrierError, FrameSink};
use crate::source::reply::Reply;
use crate::source::verified_ranges::Checked;
use bytes::Bytes;
use longhaul_api::{CompressionChoice, DeltaCache};
use longhaul_codec::{
    BlockId, Compression, CompressionPolicy, Decision, DigestKey, EncodeError, EncodedFrame,
    Encoder, Hasher,
};
use longhaul_engine::pace::Pace;
use longhaul_engine::source::{Answer, Link, Source, SourceError, WriteId};
use longhaul_protocol::limits::FRAMES_EARLY_BYTES_MAX;
use longhaul_protocol::message::Acknowledgement;
use longhaul_protocol::piece::{self, Part, Piece};
use longhaul_protocol::{BLOCK_SIZE, BlockRange, Epoch, MigrationId, RegionId, RegionKind};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};
use tokio::task::block_in_place;
use tokio::time::timeout;

/// Size of the delta cache by default: this number of bytes, plus the guest's memory divided by
/// `DELTA_CACHE_SHARE`.
const DELTA_CACHE_BYTES: u64 = 16 << 20;
const DELTA_CACHE_SHARE: u64 = 512;
/// Bytes in flight up to which a frame may build on an earlier one: half of the early frames that a
/// destination buffers.
const IN_ORDER_BYTES_MAX: u64 = FRAMES_EARLY_BYTES_MAX as u64 / 2;
/// Longest wait of a worker that found nothing to send before it checks again.
const IDLE_WAIT: Duration = Duration::from_millis(50);

/// The encoding of memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Encoding {
    /// The compression of all frames. With `None`, the policy chooses the one with the highest
    /// throughput.
    pub(crate) compression: Option<Compression>,
    /// Size of the cache of earlier contents, against which deltas are made.
    delta_cache_bytes: usize,
    guest_blocks: usize,
}

impl Encoding {
    /// Creates the encoding that was chosen, for a guest with this much memory.
    pub(crate) fn new(chosen: &longhaul_api::Encoding, memory_bytes: u64) -> Self {
        let compression = match chosen.compression.unwrap_or_default() {
            CompressionChoice::Auto => None,
            CompressionChoice::Raw => Some(Compression::Raw),
            CompressionChoice::Lz4Fast => Some(Compression::Lz4Fast),
            CompressionChoice::Lz4 => Some(Compression::Lz4),
            CompressionChoice::Zstd(level) => Some(Compression::Zstd(level)),
            CompressionChoice::ZstdLong(level) => Some(Compression::ZstdLong(level)),
        };
        let bytes = match chosen.delta_cache.unwrap_or_default() {
            DeltaCache::Auto => DELTA_CACHE_BYTES + memory_bytes / DELTA_CACHE_SHARE,
            DeltaCache::Off => 0,
            DeltaCache::Bytes(bytes) => bytes,
        };
        Self {
            compression,
            delta_cache_bytes: usize::try_from(bytes).unwrap_or(usize::MAX),
            guest_blocks: usize::try_from(memory_bytes / BLOCK_SIZE as u64).unwrap_or(usize::MAX),
        }
    }
}

/// The composition of the frames, in blocks and bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Encoded {
    pub(crate) duplicate_blocks: u64,
    pub(crate) delta_blocks: u64,
    /// Bytes of deltas before compression.
    pub(crate) delta_bytes: u64,
    /// Bytes of literals and deltas after compression.
    pub(crate) stored_bytes: u64,
    /// Bytes of frames that carried disks.
    pub(crate) disk_bytes: u64,
}

impl Encoded {
    fn add(&mut self, frame: &EncodedFrame) {
        self.duplicate_blocks += frame.duplicates as u64;
        self.delta_blocks += frame.deltas as u64;
        self.delta_bytes += frame.delta_bytes as u64;
        self.stored_bytes += frame.stored_bytes as u64;
    }
}

/// A reader of the content of blocks at the time of sending.
pub(crate) trait Content: Send + Sync + 'static {
    /// Reads these blocks into `into`, in their order.
    fn read(&self, blocks: &[BlockId], into: &mut [[u8; BLOCK_SIZE]]) -> Result<(), String>;

    /// Returns an error if what was read last for these blocks may be another guest's: the process
    /// whose memory is read has ended. Asked in the drain, which has no other eye on it.
    fn is_there(&self, _blocks: &[BlockId]) -> Result<(), String> {
        Ok(())
    }
}

/// The reason why sending ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SendError {
    /// The guest's RAM or one of its disks cannot be read.
    #[error("cannot read what is to be sent: {0}")]
    Content(String),
    /// A frame cannot be encoded.
    #[error("cannot encode memory: {0}")]
    Encode(#[from] EncodeError),
    /// The engine returned an error.
    #[error(transparent)]
    Engine(#[from] SourceError),
}

/// One carrier, and what was given to it.
pub(crate) struct Line {
    pub(crate) carrier: Box<dyn FrameSink>,
    pub(crate) epoch: Epoch,
    frames: AtomicU64,
    dead: AtomicBool,
}

impl Line {
    pub(crate) fn new(carrier: impl FrameSink, epoch: Epoch) -> Arc<Self> {
        Arc::new(Self {
            carrier: Box::new(carrier),
            epoch,
            frames: AtomicU64::new(0),
            dead: AtomicBool::new(false),
        })
    }

    /// Returns the number of frames given to the carrier that the destination needs to load the
    /// guest.
    pub(crate) fn frames(&self) -> u64 {
        self.frames.load(Ordering::SeqCst)
    }
}

/// The state that the owner of a migration shares with its sending workers.
pub(crate) struct Sending {
    engine: Mutex<Source>,
    policy: Mutex<CompressionPolicy>,
    line: watch::Sender<Option<Arc<Line>>>,
    wake: Notify,
    migration: MigrationId,
    key: DigestKey,
    content: Box<dyn Content>,
    /// Encoded pieces of device state. All of them are sent over each connection.
    pieces: Mutex<Vec<Bytes>>,
    encoding: Encoding,
    /// The regions that are disks.
    disks: BTreeSet<RegionId>,
    encoded: Mutex<Encoded>,
    replies: Mutex<Replies>,
    /// Disk blocks that could not be read in the drain, with the errors.
    unreadable: Mutex<Vec<(BlockId, String)>>,
    checked: Checked,
    paces: Paces,
}

/// The paces at which the disks may be read.
struct Paces {
    began: Instant,
    of: Mutex<BTreeMap<RegionId, Pace>>,
}

impl Paces {
    fn of(regions: impl Iterator<Item = RegionId>) -> Self {
        let pace = |region| (region, Pace::new(Duration::ZERO));
        Self {
            began: Instant::now(),
            of: Mutex::new(regions.map(pace).collect()),
        }
    }

    /// Tells the engine which disks may be read now.
    fn tell(&self, engine: &mut Source) {
        let now = self.began.elapsed();
        for (region, pace) in lock(&self.of).iter_mut() {
            engine.hold_back(*region, !pace.may_read(now));
        }
    }

    /// Counts these blocks as read.
    fn read(&self, blocks: &[BlockId]) {
        let mut paces = lock(&self.of);
        for of_one in blocks.chunk_by(|one, next| one.region == next.region) {
            let pace = of_one.first().and_then(|id| paces.get_mut(&id.region));
            if let Some(pace) = pace {
                pace.read(of_one.len() as u64 * BLOCK_SIZE as u64);
            }
        }
    }
}

/// The guest's pending writes to disks, by the ids that the engine knows them by.
#[derive(Default)]
struct Replies {
    last: u64,
    waiting: BTreeMap<u64, Reply>,
}

impl Sending {
    pub(crate) fn new(
        mut engine: Source,
        (migration, key): (MigrationId, DigestKey),
        content: Box<dyn Content>,
        encoding: Encoding,
        checked: Checked,
    ) -> Arc<Self> {
        // Without a connection, no write waits for the destination.
        engine.connection_lost();
        let regions = engine.pending_by_region().into_iter();
        let disks = regions.filter(|(spec, _)| spec.kind() == RegionKind::Disk);
        let disks = disks.map(|(spec, _)| spec.id).collect();
        Arc::new(Self {
            engine: Mutex::new(engine),
            policy: Mutex::new(CompressionPolicy::new(1)),
            line: watch::Sender::new(None),
            wake: Notify::new(),
            migration,
            key,
            content,
            pieces: Mutex::new(Vec::new()),
            encoding,
            disks,
            encoded: Mutex::new(Encoded::default()),
            replies: Mutex::default(),
            unreadable: Mutex::default(),
            paces: Paces::of(checked.regions().into_iter()),
            checked,
        })
    }

    /// Returns the id of the migration.
    pub(crate) fn migration(&self) -> MigrationId {
        self.migration
    }

    /// Returns the key of the digests.
    pub(crate) fn digest_key(&self) -> DigestKey {
        self.key
    }

    /// Locks the engine. The guard must not be held across an await.
    pub(crate) fn engine(&self) -> MutexGuard<'_, Source> {
        lock(&self.engine)
    }

    /// Wakes the workers, because there may be something to send.
    pub(crate) fn wake(&self) {
        self.wake.notify_waiters();
    }

    /// Sends over this connection from now on.
    pub(crate) fn connect(&self, line: Arc<Line>) {
        self.engine().connected();
        self.line.send_replace(Some(line));
    }

    /// Returns the connection in use.
    pub(crate) fn line(&self) -> Option<Arc<Line>> {
        self.line.borrow().clone()
    }

    /// Stops using the connection, which is lost: blocks that it carried and that were not
    /// acknowledged are pending again.
    pub(crate) fn disconnect(&self) {
        if let Some(line) = self.line.send_replace(None) {
            line.dead.store(true, Ordering::SeqCst);
            let mut engine = self.engine();
            engine.connection_lost();
            self.answer(&mut engine);
        }
    }

    /// Stops using this connection, if it is in use.
    pub(crate) fn disconnect_from(&self, line: &Arc<Line>) {
        if self.line().is_some_and(|used| Arc::ptr_eq(&used, line)) {
            self.disconnect();
        }
    }

    /// Handles a write of the guest to a disk. If the guest waits for a reply, it gets the reply as
    /// soon as the engine permits.
    pub(crate) fn written(
        &self,
        region: RegionId,
        range: BlockRange,
        reply: Option<Reply>,
    ) -> Result<(), SourceError> {
        let mut engine = self.engine();
        let mut replies = lock(&self.replies);
        replies.last += 1;
        let id = replies.last;
        match (engine.written_by(region, range, WriteId(id))?, reply) {
            (Answer::Later, Some(reply)) => {
                replies.waiting.insert(id, reply);
                self.wake();
            }
            (Answer::Now, Some(reply)) => reply.answer(),
            (_, None) => {}
        }
        Ok(())
    }

    /// Answers the writes that the engine permits to complete.
    fn answer(&self, engine: &mut Source) {
        while let Some(WriteId(id)) = engine.poll_answer() {
            if let Some(reply) = lock(&self.replies).waiting.remove(&id) {
                reply.answer();
            }
        }
    }

    /// Sends a part of the device state, ahead of pending blocks.
    pub(crate) fn add_pieces(&self, part: Part, packed: &[u8]) {
        let pieces = Piece::cut(part, packed).map(|piece| piece.encode().into());
        lock(&self.pieces).extend(pieces);
        self.wake();
    }

    /// Handles an acknowledgement of the destination.
    pub(crate) fn acknowledged(
        &self,
        line: &Line,
        message: &Acknowledgement,
    ) -> Result<(), SourceError> {
        let mut engine = self.engine();
        // Frames of a connection that was given up count as lost.
        if line.dead.load(Ordering::SeqCst) {
            return Ok(());
        }
        engine.acknowledged(message)?;
        self.answer(&mut engine);
        drop(engine);
        self.wake();
        Ok(())
    }

    /// Reads blocks. Unreadable blocks of what follows are skipped, and their places in the list
    /// are returned: the destination may run the guest already, and is told in the drain. Before
    /// that, they are an error.
    fn read(
        &self,
        blocks: &[BlockId],
        content: &mut [[u8; BLOCK_SIZE]],
    ) -> Result<Vec<usize>, SendError> {
        let drains = self.engine().is_following();
        let read = self.content.read(blocks, content);
        let there = || match drains {
            true => self.content.is_there(blocks),
            false => Ok(()),
        };
        let Err(error) = read.and_then(|()| there()) else {
            return Ok(Vec::new());
        };
        if drains {
            return Ok(self.read_each(blocks, content));
        }
        let alone = |block: &BlockId| self.content.read(&[*block], &mut [[0; BLOCK_SIZE]]).err();
        let first = blocks.iter().find_map(alone);
        Err(SendError::Content(first.unwrap_or(error)))
    }

    /// Reads blocks one by one, and records the unreadable ones. Returns their places in the list.
    fn read_each(&self, blocks: &[BlockId], content: &mut [[u8; BLOCK_SIZE]]) -> Vec<usize> {
        let mut places = Vec::new();
        for (place, block) in blocks.iter().enumerate() {
            let read = self.content.read(&[*block], &mut content[place..=place]);
            if let Err(why) = read.and_then(|()| self.content.is_there(&[*block])) {
                content[place].fill(0);
                places.push(place);
                lock(&self.unreadable).push((*block, why));
            }
        }
        places
    }

    /// Returns the blocks that could not be read since the last call.
    pub(crate) fn take_unreadable(&self) -> Vec<(BlockId, String)> {
        std::mem::take(&mut lock(&self.unreadable))
    }

    /// Returns whether a block can be read.
    pub(crate) fn can_be_read(&self, block: BlockId) -> bool {
        let read = || {
            let read = self.content.read(&[block], &mut [[0; BLOCK_SIZE]]);
            read.and_then(|()| self.content.is_there(&[block]))
        };
        block_in_place(read).is_ok()
    }

    /// Handles the latency of the guest's own requests to a disk: their number, and the sum of
    /// their latencies.
    pub(crate) fn guest_waited(&self, region: RegionId, requests: u64, together: Duration) {
        let now = self.paces.began.elapsed();
        if let Some(pace) = lock(&self.paces.of).get_mut(&region) {
            pace.guest_waited(now, requests, together);
        }
    }

    /// Returns the parts of disks that were found equal at both ends.
    pub(crate) fn checked(&self) -> &Checked {
        &self.checked
    }

    /// Returns the next range of a disk, from this block on, to be compared while the guest runs,
    /// and the block at which the next search begins.
    pub(crate) fn ask_ahead(
        &self,
        region: RegionId,
        from: u64,
        most: u64,
    ) -> (Option<BlockRange>, Option<u64>) {
        let engine = self.engine();
        let is_settled = |range| engine.is_settled(region, range);
        self.checked.ask(region, from, most, is_settled)
    }

    /// Returns the bytes of the frames that are sent and not acknowledged.
    pub(crate) fn queued_bytes(&self) -> u64 {
        self.engine().in_flight_bytes()
    }

    /// Returns the composition of the frames so far.
    pub(crate) fn encoded(&self) -> Encoded {
        *lock(&self.encoded)
    }

    /// Sends until an error occurs. Run it as a task, and abort the task to end it.
    pub(crate) async fn work(self: Arc<Self>) -> SendError {
        let mut line = self.line.subscribe();
        let mut worker = Worker::new(self.key, self.encoding);
        loop {
            let current = line.borrow_and_update().clone();
            let Some(current) = current else {
                if line.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
                continue;
            };
            // The owner handles a lost connection, and replaces the line.
            match self.send_over(&current, &mut worker).await {
                Err(error) => return error,
                Ok(Ended::Lost) => {
                    let replaced = line
                        .wait_for(|now| now.as_ref().is_none_or(|now| !Arc::ptr_eq(now, &current)));
                    if replaced.await.is_err() {
                        std::future::pending::<()>().await;
                    }
                }
            }
        }
    }

    async fn send_over(&self, line: &Line, worker: &mut Worker) -> Result<Ended, SendError> {
        worker.encoder.forget_frames();
        let mut pieces_sent = 0;
        loop {
            let Ok(permit) = line.carrier.reserve().await else {
                return Ok(Ended::Lost);
            };
            let notified = self.wake.notified();
            let piece = lock(&self.pieces).get(pieces_sent).cloned();
            if let Some(piece) = piece {
                pieces_sent += 1;
                // The guest is stopped, or is about to be.
                if permit.send(piece, true).is_err() {
                    return Ok(Ended::Lost);
                }
                continue;
            }
            match block_in_place(|| self.next_frame(line, worker))? {
                Next::Nothing => {
                    drop(permit);
                    // An unneeded check costs nothing.
                    let _ = timeout(IDLE_WAIT, notified).await;
                }
                Next::Skipped => {}
                Next::Frame { frame, urgent } => match permit.send(frame, urgent) {
                    Ok(()) => {}
                    Err(CarrierError::TooLarge { bytes, .. }) => {
                        let bytes = bytes as usize;
                        return Err(EncodeError::TooLong { bytes }.into());
                    }
                    Err(CarrierError::Lost(_)) => return Ok(Ended::Lost),
                },
            }
        }
    }

    /// Returns the compression for the next frame, given the bytes in flight and the number of
    /// frames that wait to be sent.
    fn compression(
        &self,
        link: Option<Link>,
        in_flight_bytes: u64,
        ready_frames: usize,
    ) -> Compression {
        let rate = link.map(|link| link.rate_bytes_per_s);
        let queued = link.map_or(0, |link| link.queued_bytes as usize);
        let chosen = self.encoding.compression;
        let chosen =
            chosen.unwrap_or_else(|| lock(&self.policy).choose(rate, queued, ready_frames));
        match chosen {
            // If a frame were late, the destination would have to buffer more than it accepts.
            Compression::ZstdLong(level) if in_flight_bytes > IN_ORDER_BYTES_MAX => {
                Compression::Zstd(level)
            }
            chosen => chosen,
        }
    }

    fn next_frame(&self, line: &Line, worker: &mut Worker) -> Result<Next, SendError> {
        let mut engine = self.engine();
        if line.dead.load(Ordering::SeqCst) {
            return Ok(Next::Nothing);
        }
        // One of the reserved places is for the frame that is made now.
        let ready_frames = line.carrier.frames_in_hand().saturating_sub(1);
        let link = engine.link_now();
        let compression = self.compression(link, engine.in_flight_bytes(), ready_frames);
        self.paces.tell(&mut engine);
        engine.look_at_drain(self.paces.began.elapsed());
        let Some(batch) = engine.take(compression.frame_blocks())? else {
            return Ok(Next::Nothing);
        };
        let compression = match compression {
            // It would have to wait for the frames before it.
            Compression::ZstdLong(level) if batch.urgent => Compression::Zstd(level),
            chosen => chosen,
        };
        self.paces.read(&batch.blocks);
        self.checked.sent(&batch.blocks);
        drop(engine);
        let began = Instant::now();
        let count = batch.blocks.len();
        if worker.content.len() < count {
            worker.content.resize(count, [0; BLOCK_SIZE]);
        }
        let content = &mut worker.content[..count];
        let unreadable = self.read(&batch.blocks, content)?;
        worker.staged.clear();
        worker.hasher.stage(content, &mut worker.staged);
        let mut decisions = self.engine().decide(&batch, &worker.staged);
        for place in unreadable {
            // The destination knows that the block is missing, and asks for it again.
            decisions[place] = Decision::Skip;
        }
        let prepared = Instant::now();
        let frame = worker.encoder.encode_frame(
            batch.seq,
            &batch.blocks,
            content,
            &decisions,
            compression,
        )?;
        let (payload, stored) = (frame.payload_bytes, frame.stored_bytes);
        let (preparing, encoding) = (prepared - began, prepared.elapsed());
        self.engine().made(&batch, preparing + encoding);
        // A raw frame counts for the chosen compression. Any other difference means that the frame
        // was made at another level.
        let made = match frame.compression {
            Compression::Raw => compression,
            made => made,
        };
        lock(&self.policy).observe(made, payload, stored, preparing, encoding);
        let mut encoded = lock(&self.encoded);
        encoded.add(&frame);
        // A frame carries either memory or disks.
        let first = batch.blocks.first();
        if first.is_some_and(|id| self.disks.contains(&id.region)) {
            encoded.disk_bytes += frame.bytes.len() as u64;
        }
        drop(encoded);
        if frame.blocks == 0 {
            let mut engine = self.engine();
            engine.encoded(&batch, None);
            self.answer(&mut engine);
            return Ok(Next::Skipped);
        }
        // Counted before the engine knows of the frame, because the count may be announced from
        // then on.
        if !batch.held {
            line.frames.fetch_add(1, Ordering::SeqCst);
        }
        self.engine().encoded(&batch, Some(frame.bytes.len()));
        Ok(Next::Frame {
            frame: match batch.held {
                true => piece::for_the_load(&frame.bytes).into(),
                false => frame.bytes.into(),
            },
            urgent: batch.urgent,
        })
    }
}

enum Ended {
    Lost,
}

enum Next {
    Nothing,
    Skipped,
    Frame { frame: Bytes, urgent: bool },
}

struct Worker {
    hasher: Hasher,
    encoder: Encoder,
    content: Vec<[u8; BLOCK_SIZE]>,
    staged: Vec<longhaul_codec::Staged>,
}

impl Worker {
    fn new(key: DigestKey, encoding: Encoding) -> Self {
        Self {
            hasher: Hasher::new(key),
            encoder: Encoder::for_guest(encoding.guest_blocks, encoding.delta_cache_bytes),
            content: Vec::new(),
            staged: Vec::new(),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
