//! The sending worker: takes blocks from the engine, reads and encodes them, and gives the frames
//! to the bulk connection.
//!
//! Room on the connection comes first, then blocks are chosen, then their content is read: so what
//! is sent is as fresh as it can be. A [`Line`] is one bulk connection; when it is lost it is
//! marked dead *before* the engine is told, so that no block can be taken for it afterwards.

use crate::source::verify::Checked;
use crate::source::write_tracker::Reply;
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
use longhaul_protocol::piece::{Part, Piece};
use longhaul_protocol::{BLOCK_SIZE, BlockRange, Epoch, MigrationId, RegionId};
use longhaul_transport::{BulkError, BulkSender};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};
use tokio::task::block_in_place;
use tokio::time::timeout;

/// The delta cache that is chosen where nobody chooses: so much, and this part of the guest's
/// memory.
const DELTA_CACHE_BYTES: u64 = 16 << 20;
const DELTA_CACHE_SHARE: u64 = 512;
/// Bytes of frames under way up to which frames may go on from each other: half of what a
/// destination keeps of those that come early.
const IN_ORDER_BYTES_MAX: u64 = FRAMES_EARLY_BYTES_MAX as u64 / 2;
/// How long a worker that found nothing to send waits at most before it looks again.
const IDLE_WAIT: Duration = Duration::from_millis(50);

/// How memory is encoded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Encoding {
    /// One compression for all frames; by what moves most where it is none.
    compression: Option<Compression>,
    /// Memory for what deltas are made against.
    delta_cache_bytes: usize,
    guest_blocks: usize,
}

impl Encoding {
    /// As it was chosen, for a guest with so much memory.
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

/// What frames were made of, in blocks and bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Encoded {
    pub(crate) duplicate_blocks: u64,
    pub(crate) delta_blocks: u64,
    /// Deltas before compression.
    pub(crate) delta_bytes: u64,
    /// Literals and deltas after compression.
    pub(crate) stored_bytes: u64,
    /// Frames, as far as they carried disks.
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

/// Reads the content of blocks at the time of sending.
pub(crate) trait Content: Send + Sync + 'static {
    /// Reads these blocks, in their order, into `into`, one after another.
    fn read(&self, blocks: &[BlockId], into: &mut [[u8; BLOCK_SIZE]]) -> Result<(), String>;
}

/// Why sending ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SendError {
    /// The guest's RAM, or a disk of its, cannot be read.
    #[error("cannot read what is to be sent: {0}")]
    Content(String),
    /// A frame cannot be made.
    #[error("cannot encode memory: {0}")]
    Encode(#[from] EncodeError),
    /// The engine refused.
    #[error(transparent)]
    Engine(#[from] SourceError),
}

/// One bulk connection.
pub(crate) struct Line {
    pub(crate) bulk: BulkSender,
    pub(crate) epoch: Epoch,
    frames: AtomicU64,
    dead: AtomicBool,
}

impl Line {
    pub(crate) fn new(bulk: BulkSender, epoch: Epoch) -> Arc<Self> {
        Arc::new(Self {
            bulk,
            epoch,
            frames: AtomicU64::new(0),
            dead: AtomicBool::new(false),
        })
    }

    /// Frames that were given to it.
    pub(crate) fn frames(&self) -> u64 {
        self.frames.load(Ordering::SeqCst)
    }
}

/// What the owner of a migration and its sending workers share.
pub(crate) struct Sending {
    engine: Mutex<Source>,
    policy: Mutex<CompressionPolicy>,
    line: watch::Sender<Option<Arc<Line>>>,
    wake: Notify,
    migration: MigrationId,
    key: DigestKey,
    content: Box<dyn Content>,
    /// Pieces of device state, as they travel: all of them over each connection.
    pieces: Mutex<Vec<Bytes>>,
    encoding: Encoding,
    /// Regions from this number on are disks.
    memory_regions: usize,
    encoded: Mutex<Encoded>,
    replies: Mutex<Replies>,
    /// Blocks of disks that could not be read in the drain, with what was wrong.
    unreadable: Mutex<Vec<(BlockId, String)>>,
    checked: Checked,
    paces: Paces,
}

/// How fast each disk may be read.
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

    /// Tells the engine what may be read now.
    fn tell(&self, engine: &mut Source) {
        let now = self.began.elapsed();
        for (region, pace) in lock(&self.of).iter_mut() {
            engine.hold_back(*region, !pace.may_read(now));
        }
    }

    /// These blocks are read.
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

/// Writes to disks that the guest waits for, by the engine's names.
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
        memory_regions: usize,
        checked: Checked,
    ) -> Arc<Self> {
        // Until there is one: nobody waits for a destination that hears nothing.
        engine.connection_lost();
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
            memory_regions,
            encoded: Mutex::new(Encoded::default()),
            replies: Mutex::default(),
            unreadable: Mutex::default(),
            paces: Paces::of(checked.regions().into_iter()),
            checked,
        })
    }

    /// The migration that it sends for.
    pub(crate) fn migration(&self) -> MigrationId {
        self.migration
    }

    /// The key of its digests.
    pub(crate) fn digest_key(&self) -> DigestKey {
        self.key
    }

    /// The engine. Never held across an await.
    pub(crate) fn engine(&self) -> MutexGuard<'_, Source> {
        lock(&self.engine)
    }

    /// Lets workers look again: something may be sent now.
    pub(crate) fn wake(&self) {
        self.wake.notify_waiters();
    }

    /// Sends over this connection from now on.
    pub(crate) fn connect(&self, line: Arc<Line>) {
        self.engine().connected();
        self.line.send_replace(Some(line));
    }

    /// The connection in use.
    pub(crate) fn line(&self) -> Option<Arc<Line>> {
        self.line.borrow().clone()
    }

    /// The connection is gone: what it carried and was not acknowledged is pending again.
    pub(crate) fn disconnect(&self) {
        if let Some(line) = self.line.send_replace(None) {
            line.dead.store(true, Ordering::SeqCst);
            let mut engine = self.engine();
            engine.connection_lost();
            self.answer(&mut engine);
        }
    }

    /// The same, if this is the connection in use.
    pub(crate) fn disconnect_from(&self, line: &Arc<Line>) {
        if self.line().is_some_and(|used| Arc::ptr_eq(&used, line)) {
            self.disconnect();
        }
    }

    /// The guest has written these blocks of a disk. It is answered as soon as the engine says so,
    /// if somebody waits for that.
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

    /// Answers the writes that the engine lets go.
    fn answer(&self, engine: &mut Source) {
        while let Some(WriteId(id)) = engine.poll_answer() {
            if let Some(reply) = lock(&self.replies).waiting.remove(&id) {
                reply.answer();
            }
        }
    }

    /// Sends this too, ahead of blocks that wait.
    pub(crate) fn add_pieces(&self, part: Part, packed: &[u8]) {
        let pieces = Piece::cut(part, packed).map(|piece| piece.encode().into());
        lock(&self.pieces).extend(pieces);
        self.wake();
    }

    /// Takes in what the destination acknowledges over a connection.
    pub(crate) fn acknowledged(
        &self,
        line: &Line,
        message: &Acknowledgement,
    ) -> Result<(), SourceError> {
        let mut engine = self.engine();
        // What was on a connection that is given up counts as lost.
        if line.dead.load(Ordering::SeqCst) {
            return Ok(());
        }
        engine.acknowledged(message)?;
        self.answer(&mut engine);
        drop(engine);
        self.wake();
        Ok(())
    }

    /// Reads blocks. Those of disks that cannot be read are left out when the guest has gone, by
    /// their places.
    fn read(
        &self,
        blocks: &[BlockId],
        content: &mut [[u8; BLOCK_SIZE]],
    ) -> Result<Vec<usize>, SendError> {
        let Err(error) = self.content.read(blocks, content) else {
            return Ok(Vec::new());
        };
        if self.engine().is_draining() {
            return Ok(self.read_each(blocks, content));
        }
        let alone = |block: &BlockId| self.content.read(&[*block], &mut [[0; BLOCK_SIZE]]).err();
        let first = blocks.iter().find_map(alone);
        Err(SendError::Content(first.unwrap_or(error)))
    }

    /// Reads blocks one by one, and keeps those that cannot be read. Returns their places.
    fn read_each(&self, blocks: &[BlockId], content: &mut [[u8; BLOCK_SIZE]]) -> Vec<usize> {
        let mut places = Vec::new();
        for (place, block) in blocks.iter().enumerate() {
            let read = self.content.read(&[*block], &mut content[place..=place]);
            if let Err(why) = read {
                content[place].fill(0);
                places.push(place);
                lock(&self.unreadable).push((*block, why));
            }
        }
        places
    }

    /// Blocks that could not be read since this was asked last.
    pub(crate) fn take_unreadable(&self) -> Vec<(BlockId, String)> {
        std::mem::take(&mut lock(&self.unreadable))
    }

    /// Whether one block can be read.
    pub(crate) fn can_be_read(&self, block: BlockId) -> bool {
        let read = || self.content.read(&[block], &mut [[0; BLOCK_SIZE]]);
        block_in_place(read).is_ok()
    }

    /// The guest's own requests to a disk took so long together.
    pub(crate) fn guest_waited(&self, region: RegionId, requests: u64, together: Duration) {
        let now = self.paces.began.elapsed();
        if let Some(pace) = lock(&self.paces.of).get_mut(&region) {
            pace.guest_waited(now, requests, together);
        }
    }

    /// What of disks was found equal at both ends.
    pub(crate) fn checked(&self) -> &Checked {
        &self.checked
    }

    /// What of a disk is to be compared next, from this block on, while the guest runs; and where
    /// that goes on.
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

    /// Bytes of frames that were sent and not acknowledged.
    pub(crate) fn queued_bytes(&self) -> u64 {
        self.engine().in_flight_bytes()
    }

    /// What frames were made of so far.
    pub(crate) fn encoded(&self) -> Encoded {
        *lock(&self.encoded)
    }

    /// Sends until something breaks. Run it as a task, and abort that.
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
            // A lost connection is the owner's business: it replaces the line.
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
            let Ok(permit) = line.bulk.reserve().await else {
                return Ok(Ended::Lost);
            };
            let notified = self.wake.notified();
            let piece = lock(&self.pieces).get(pieces_sent).cloned();
            if let Some(piece) = piece {
                pieces_sent += 1;
                if permit.send(piece).is_err() {
                    return Ok(Ended::Lost);
                }
                continue;
            }
            match block_in_place(|| self.next_frame(line, worker))? {
                Next::Nothing => {
                    drop(permit);
                    // Nothing is lost by looking once too often.
                    let _ = timeout(IDLE_WAIT, notified).await;
                }
                Next::Skipped => {}
                Next::Frame(frame) => match permit.send(frame) {
                    Ok(()) => {}
                    Err(BulkError::TooLarge { bytes, .. }) => {
                        let bytes = bytes as usize;
                        return Err(EncodeError::TooLong { bytes }.into());
                    }
                    Err(_) => return Ok(Ended::Lost),
                },
            }
        }
    }

    /// The compression for the next frame, while so many bytes of earlier ones are under way, and
    /// so many of those have yet to begin their way.
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
            // More would have to be kept at the destination than it accepts, should one be late.
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
        // One of those in hand is for the frame that is made now.
        let ready_frames = line.bulk.frames_in_hand().saturating_sub(1);
        let link = engine.link_now();
        let compression = self.compression(link, engine.in_flight_bytes(), ready_frames);
        self.paces.tell(&mut engine);
        engine.look_at_drain(self.paces.began.elapsed());
        let Some(batch) = engine.take(compression.frame_blocks())? else {
            return Ok(Next::Nothing);
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
            // The destination knows that it has not come, and asks again.
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
        // What was not made as asked, and not stored raw either, went on at another level.
        let made = match frame.compression {
            Compression::Raw => compression,
            made => made,
        };
        lock(&self.policy).observe(made, payload, stored, preparing, encoding);
        let mut encoded = lock(&self.encoded);
        encoded.add(&frame);
        // A frame is of one kind.
        let first = batch.blocks.first();
        if first.is_some_and(|id| usize::from(id.region.0) >= self.memory_regions) {
            encoded.disk_bytes += frame.bytes.len() as u64;
        }
        drop(encoded);
        if frame.blocks == 0 {
            let mut engine = self.engine();
            engine.encoded(&batch, None);
            self.answer(&mut engine);
            return Ok(Next::Skipped);
        }
        // Counted first: once the engine knows of the frame, the count may be announced.
        line.frames.fetch_add(1, Ordering::SeqCst);
        self.engine().encoded(&batch, Some(frame.bytes.len()));
        Ok(Next::Frame(frame.bytes.into()))
    }
}

enum Ended {
    Lost,
}

enum Next {
    Nothing,
    Skipped,
    Frame(Bytes),
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
