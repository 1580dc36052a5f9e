//! Decodes frames into the guest's regions at the destination, and acknowledges them.

use crate::carrier::{CarrierError, FrameSource};
use crate::destination::arriving_memory::{ArrivingMemory, ArrivingStore, Lists};
use crate::destination::disks::Disks;
use crate::destination::local_content::Kept;
use crate::destination::store::{Store, Taken};
use crate::host::memory_notes::ArrivingRegion;
use crate::limits::peer_quota::{Means, Pace};
use crate::limits::shared_dedup::Others;
use bytes::Bytes;
use longhaul_codec::{
    BlockId, BlockSink, BlockWrite, DecodeError, Decoder, Digest, DigestKey, FrameError, InOrder,
    Limits,
};
use longhaul_engine::destination::{Destination, DestinationError};
use longhaul_protocol::disk::List;
use longhaul_protocol::limits::FRAMES_HELD_BYTES_MAX;
use longhaul_protocol::message::Acknowledgement;
use longhaul_protocol::piece::{self, Assembly, Part, Piece, PieceError};
use longhaul_protocol::wire::{self, WireError};
use longhaul_protocol::{BLOCK_SIZE, Epoch, MigrationId, RegionId, RegionKind, RegionSpec};
use longhaul_storage::disk::{Disk as _, RawDisk};
use longhaul_storage::front::FrontFolder;
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::block_in_place;
use tokio::time::{Instant, timeout, timeout_at};

/// Minimum interval between acknowledgements. The first one is sent at once, since a write may wait
/// for it.
const ACKNOWLEDGE_EVERY: Duration = Duration::from_millis(2);
/// Longest delay of the report to the source that the disks' sync time has changed.
const TELL_EVERY: Duration = Duration::from_millis(100);
/// Bytes of frames that have arrived already and are written together. Acknowledgements wait for
/// them.
const TOGETHER_BYTES: usize = 128 << 10;
/// Interval between checks for disk content that must be made durable.
const SYNC_EVERY: Duration = Duration::from_millis(200);

/// Why receiving ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiveError {
    /// The carrier is lost: the source may return with another one.
    #[error(transparent)]
    Lost(#[from] CarrierError),
    /// The data is not a frame.
    #[error("the source breaks the protocol: {0}")]
    Frame(#[from] FrameError),
    /// The data is not a piece of device state, or does not fit the other pieces.
    #[error("the source breaks the protocol: {0}")]
    Piece(#[from] PieceError),
    /// The frame does not fit what was received before.
    #[error("the source breaks the protocol: {0}")]
    Engine(#[from] DestinationError),
    /// The guest's memory or a disk cannot be written.
    #[error("cannot write what comes of the guest: {0}")]
    Store(String),
    /// An acknowledgement cannot be encoded.
    #[error(transparent)]
    Wire(#[from] WireError),
}

/// The state that is shared by the owner of an arriving guest and its receiving worker.
pub(crate) struct Receiving {
    inner: Mutex<Inner>,
    complete: Notify,
    /// Notified when a disk was made durable, or that failed.
    synced: Notify,
    /// The worker threads of the source's quota.
    workers: Arc<Semaphore>,
    pace: Arc<Pace>,
    key: DigestKey,
    /// Whether the guest's memory may be written.
    open: watch::Sender<bool>,
    /// Whether frames for the load are taken.
    loads: watch::Sender<bool>,
}

/// Frames that are for the load, until it begins.
#[derive(Default)]
struct Held {
    frames: VecDeque<Bytes>,
    bytes: usize,
}

impl Held {
    fn add(&mut self, frame: Bytes) -> Result<(), FrameError> {
        self.bytes += frame.len();
        if self.bytes > FRAMES_HELD_BYTES_MAX {
            let (bytes, limit) = (self.bytes, FRAMES_HELD_BYTES_MAX);
            return Err(FrameError::TooEarly { bytes, limit });
        }
        self.frames.push_back(frame);
        Ok(())
    }
}

struct Inner {
    destination: Destination,
    /// The guest's memory. None while only disks arrive.
    store: Option<Box<dyn Store>>,
    others: Others,
    disks: Disks,
    /// The lists of memory that follows, if it may.
    lists: Lists,
    kept: Kept,
    early: Assembly,
    device_state: Assembly,
    /// The disks' sync time that was last reported to the source.
    told_sync: Duration,
    /// Whether the device state includes early pieces.
    needs_early: bool,
    error: Option<String>,
    fresh: Vec<bool>,
}

impl Receiving {
    pub(crate) fn new(
        regions: &[RegionSpec],
        store: Box<dyn Store>,
        content: (Disks, Kept),
        key: DigestKey,
        means: Means,
    ) -> Result<Arc<Self>, DestinationError> {
        let destination = Destination::new(regions)?;
        Ok(Self::with(destination, Some(store), content, key, means))
    }

    /// Creates the receiver of the rest of a guest that runs here: of its disks, and of its memory.
    pub(crate) fn of_rest(
        regions: &[RegionSpec],
        disks: Disks,
        memory: Option<Arc<ArrivingMemory>>,
        key: DigestKey,
        means: Means,
    ) -> Result<Arc<Self>, DestinationError> {
        let mut destination = Destination::of_some(regions)?;
        let mut of_memory = regions
            .iter()
            .filter(|spec| spec.kind() == RegionKind::Memory);
        of_memory
            .by_ref()
            .for_each(|spec| destination.follows(spec.id));
        let store = memory.map(|memory| Box::new(ArrivingStore::new(memory)) as Box<dyn Store>);
        let content = (disks, Kept::default());
        let receiving = Self::with(destination, store, content, key, means);
        receiving.loads.send_replace(true);
        Ok(receiving)
    }

    fn with(
        destination: Destination,
        store: Option<Box<dyn Store>>,
        (disks, kept): (Disks, Kept),
        key: DigestKey,
        means: Means,
    ) -> Arc<Self> {
        let has_disks = !disks.is_empty();
        let inner = Inner {
            destination,
            store,
            others: means.others,
            disks,
            lists: Lists::default(),
            kept,
            early: Assembly::default(),
            device_state: Assembly::default(),
            told_sync: Duration::ZERO,
            needs_early: false,
            error: None,
            fresh: Vec::new(),
        };
        let receiving = Arc::new(Self {
            inner: Mutex::new(inner),
            complete: Notify::new(),
            synced: Notify::new(),
            workers: means.workers,
            pace: Arc::new(means.pace),
            key,
            open: watch::Sender::new(true),
            loads: watch::Sender::new(false),
        });
        if has_disks {
            tokio::spawn(keep_durable(Arc::downgrade(&receiving)));
        }
        receiving
    }

    /// Returns the watchdog of the source's progress.
    pub(crate) fn pace(&self) -> &Arc<Pace> {
        &self.pace
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the image of a region that is a disk.
    pub(crate) fn disk(&self, region: RegionId) -> Option<Arc<RawDisk>> {
        self.lock().disks.image(region)
    }

    /// Begins the epoch of a new connection.
    pub(crate) fn connected(&self, epoch: Epoch) {
        let mut inner = self.lock();
        inner.destination.connected(epoch);
        inner.disks.connected(epoch);
        inner.lists.connected(epoch);
    }

    /// Expects lists of the memory among these regions, which may follow. Nothing is written before
    /// [`Self::open`]: QEMU empties its RAM once.
    pub(crate) fn expect_lists(&self, regions: &[RegionSpec]) {
        self.lock().lists = Lists::of(regions);
        self.open.send_replace(false);
    }

    /// Lets the guest's memory be written: QEMU has taken the head of its stream.
    pub(crate) fn open(&self) {
        self.open.send_replace(true);
    }

    /// Returns the memory that is missing, if it may follow. Everything has arrived otherwise.
    pub(crate) fn missing_memory(&self) -> Option<Vec<ArrivingRegion>> {
        let inner = self.lock();
        (!inner.lists.is_empty()).then(|| inner.lists.missing())
    }

    /// Gives the memory that follows to QEMU from now on. To be called after [`Self::seal`].
    pub(crate) fn memory_follows(&self, memory: Arc<ArrivingMemory>) {
        let mut inner = self.lock();
        let Inner {
            lists,
            destination,
            store,
            ..
        } = &mut *inner;
        lists
            .regions()
            .for_each(|region| destination.follows(region));
        *store = Some(Box::new(ArrivingStore::new(memory)));
        drop(inner);
        self.loads.send_replace(true);
    }

    /// Takes a part of the source's list of a region's blocks that it has not sent.
    pub(crate) fn listed(&self, list: &List) -> Result<(), String> {
        let Inner {
            disks,
            lists,
            destination,
            ..
        } = &mut *self.lock();
        match lists.has(list.region) {
            true => lists.listed(list, destination),
            false => disks.listed(list, destination),
        }
    }

    /// Takes the length of a disk's image from the source.
    pub(crate) fn has_length(&self, region: RegionId, bytes: u64) -> Result<(), String> {
        self.lock().disks.has_length(region, bytes)
    }

    /// Takes the number of frames that the source has sent over this connection, and whether the
    /// device state includes early pieces.
    pub(crate) fn announced(&self, epoch: Epoch, frames: u64, needs_early: bool) {
        let mut inner = self.lock();
        inner.destination.announced(epoch, frames);
        inner.needs_early = needs_early;
        drop(inner);
        self.complete.notify_waiters();
    }

    /// Sets the folders of the disk exports below disks of which a part may arrive later.
    pub(crate) fn below(&self, folders: Vec<FrontFolder>) {
        self.lock().disks.below(folders);
    }

    /// Hands the lists of missing blocks to the disk exports, and whether blocks that the guest
    /// does not write are to be compared.
    pub(crate) fn hand_on(&self, verify: bool) -> Result<(), String> {
        self.lock().disks.hand_on(verify)
    }

    /// Stops writing to the guest's memory and disks, and makes the disks durable.
    pub(crate) fn seal(self: &Arc<Self>) {
        let mut inner = self.lock();
        inner.destination.seal();
        inner.disks.seal();
        inner.lists.seal();
        drop(inner);
        self.sync();
    }

    /// Waits until everything that was received of disks is durable.
    pub(crate) async fn settled(&self) -> Result<(), String> {
        loop {
            let synced = self.synced.notified();
            tokio::pin!(synced);
            synced.as_mut().enable();
            if self.is_settled()? {
                return Ok(());
            }
            synced.await;
        }
    }

    /// Returns whether everything that was received of disks is durable.
    pub(crate) fn is_settled(&self) -> Result<bool, String> {
        self.lock().disks.is_settled()
    }

    /// Starts the syncs that are due.
    fn sync(self: &Arc<Self>) {
        let mut inner = self.lock();
        while let Some((region, disk)) = inner.disks.poll_sync() {
            let receiving = self.clone();
            tokio::task::spawn_blocking(move || receiving.synced(region, disk.flush()));
        }
    }

    /// Takes the result of a sync, and starts what is due after it. Waiters are notified last: the
    /// steps after a sync can make a disk durable.
    fn synced(self: &Arc<Self>, region: RegionId, done: io::Result<()>) {
        self.lock().disks.synced(region, done);
        self.sync();
        self.synced.notify_waiters();
    }

    /// Returns the early and the other part of the device state, packed; `None` for a part that is
    /// not complete.
    pub(crate) fn device_state(&self) -> (Option<Vec<u8>>, Option<Vec<u8>>) {
        let inner = self.lock();
        let whole = |assembly: &Assembly| assembly.whole().map(<[u8]>::to_vec);
        (whole(&inner.early), whole(&inner.device_state))
    }

    /// Waits until everything that was announced has arrived.
    pub(crate) async fn completed(&self) {
        loop {
            let notified = self.complete.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if self.lock().is_complete() {
                return;
            }
            notified.await;
        }
    }

    /// Receives the frames of a carrier until it is lost or an error occurs.
    pub(crate) async fn work(&self, epoch: Epoch, carrier: &impl FrameSource) -> ReceiveError {
        match self.receive(epoch, carrier).await {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    async fn receive(
        &self,
        epoch: Epoch,
        carrier: &impl FrameSource,
    ) -> Result<std::convert::Infallible, ReceiveError> {
        // The sender lives as long as this.
        let _ = self.open.subscribe().wait_for(|open| *open).await;
        let mut acknowledge_at: Option<Instant> = None;
        let mut next_at = Instant::now();
        let mut decoder = Decoder::new(self.key);
        let mut in_order = InOrder::default();
        let mut ended = false;
        let (mut held, mut loads) = (Held::default(), self.loads.subscribe());
        loop {
            let wake_at = acknowledge_at.unwrap_or_else(|| Instant::now() + TELL_EVERY);
            let released = *loads.borrow() && !held.frames.is_empty();
            let frame = match (ended, wake_at <= Instant::now()) {
                _ if released => held.frames.pop_front().map(Some),
                (true, _) => Some(None),
                (false, true) => None,
                (false, false) => tokio::select! {
                    frame = timeout_at(wake_at, carrier.recv()) => frame.ok().transpose()?,
                    _ = loads.wait_for(|loads| *loads), if !held.frames.is_empty() => continue,
                },
            };
            match frame {
                Some(Some(frame)) => {
                    let mut bytes = frame.len();
                    self.take(frame, &mut in_order, &mut held)?;
                    while released && let Some(frame) = held.frames.pop_front() {
                        self.take(frame, &mut in_order, &mut held)?;
                    }
                    // What has arrived meanwhile is written with it.
                    while bytes < TOGETHER_BYTES && !ended {
                        let Ok(more) = timeout(Duration::ZERO, carrier.recv()).await else {
                            break;
                        };
                        match more? {
                            Some(frame) => {
                                bytes += frame.len();
                                self.take(frame, &mut in_order, &mut held)?;
                            }
                            None => ended = true,
                        }
                    }
                    let mut complete = false;
                    while let Some(frame) = in_order.next_ready() {
                        let worker = self.workers.acquire().await;
                        let applied =
                            block_in_place(|| self.lock().apply(epoch, &frame, &mut decoder));
                        drop(worker);
                        let (everything, blocks) = applied?;
                        complete |= everything;
                        self.pace.came(blocks, Instant::now());
                    }
                    let unfinished = self.lock().unfinished();
                    if let Some(taken) = unfinished {
                        taken.wait().await.map_err(ReceiveError::Store)?;
                    }
                    acknowledge_at = Some(next_at);
                    if complete {
                        acknowledge_at = Some(Instant::now());
                        self.complete.notify_waiters();
                    }
                }
                Some(None) => {
                    // The source sends no more frames; the last acknowledgement is still due.
                    self.acknowledge(carrier).await?;
                    return Err(carrier.lost().await.into());
                }
                None => {
                    acknowledge_at = None;
                    self.acknowledge(carrier).await?;
                    next_at = Instant::now() + ACKNOWLEDGE_EVERY;
                }
            }
        }
    }

    /// Takes a frame, or holds it if it is for the load and that has yet to begin.
    fn take(
        &self,
        frame: Bytes,
        in_order: &mut InOrder<Bytes>,
        held: &mut Held,
    ) -> Result<(), FrameError> {
        match (piece::is_for_the_load(&frame), *self.loads.borrow()) {
            (false, _) => in_order.arrived(frame),
            (true, false) => held.add(frame),
            (true, true) => in_order.arrived(frame.slice(1..)),
        }
    }

    async fn acknowledge(&self, carrier: &impl FrameSource) -> Result<(), ReceiveError> {
        while let Some(message) = self.poll_acknowledgement() {
            carrier.acknowledge(&wire::encode(&message)?).await?;
        }
        Ok(())
    }

    fn poll_acknowledgement(&self) -> Option<Acknowledgement> {
        let mut inner = self.lock();
        let sync = inner.disks.sync_time();
        let news = has_changed(inner.told_sync, sync).then(Acknowledgement::default);
        let message = inner.destination.poll_acknowledgement().or(news)?;
        inner.told_sync = sync;
        Some(Acknowledgement {
            sync_us: u32::try_from(sync.as_micros()).unwrap_or(u32::MAX),
            ..message
        })
    }
}

impl Inner {
    /// Returns what says when the memory that has arrived is where it belongs.
    fn unfinished(&mut self) -> Option<Taken> {
        self.store.as_mut()?.unfinished()
    }

    fn is_complete(&self) -> bool {
        let early = !self.needs_early || self.early.whole().is_some();
        let listed = self.disks.is_listed() && self.lists.is_listed();
        early && listed && self.device_state.whole().is_some() && self.destination.is_complete()
    }

    /// Takes a message of the bulk stream. Returns whether everything has arrived, and the number
    /// of blocks that arrived with the message.
    fn apply(
        &mut self,
        epoch: Epoch,
        message: &[u8],
        decoder: &mut Decoder,
    ) -> Result<(bool, u64), ReceiveError> {
        let pieces = (message.len() / BLOCK_SIZE) as u64;
        let blocks = match Part::of(message) {
            None => self.apply_frame(epoch, message, decoder)?,
            Some(Part::Early) => {
                self.early.add(&Piece::decode(message)?)?;
                pieces
            }
            Some(Part::DeviceState) => {
                self.device_state.add(&Piece::decode(message)?)?;
                pieces
            }
        };
        Ok((self.is_complete(), blocks))
    }

    fn apply_frame(
        &mut self,
        epoch: Epoch,
        frame: &[u8],
        decoder: &mut Decoder,
    ) -> Result<u64, ReceiveError> {
        let Self {
            destination,
            store,
            others,
            disks,
            lists,
            kept,
            error,
            fresh,
            ..
        } = self;
        let mut sink = Sink {
            destination,
            store: store.as_deref_mut(),
            others,
            disks,
            lists,
            kept,
            epoch,
            error,
            fresh,
            blocks: 0,
        };
        let outcome = match decoder.decode(frame, &Limits::default(), &mut sink) {
            Ok(outcome) => outcome,
            Err(DecodeError::Frame(error)) => return Err(error.into()),
            Err(DecodeError::Sink(error)) => return Err(ReceiveError::Store(error)),
            Err(DecodeError::Decompressor(error)) => {
                return Err(ReceiveError::Store(error.to_string()));
            }
        };
        let blocks = sink.blocks;
        if let Some(error) = self.error.take() {
            return Err(ReceiveError::Store(error));
        }
        self.disks.settle().map_err(ReceiveError::Store)?;
        self.disks.rejected(&outcome.rejected, outcome.seq);
        self.lists.rejected(&outcome.rejected);
        self.destination
            .applied(epoch, outcome.seq, &outcome.rejected)?;
        Ok(blocks)
    }
}

/// Returns whether a time has changed enough to be reported: by more than 1 ms and an eighth.
fn has_changed(told: Duration, now: Duration) -> bool {
    told.abs_diff(now) > Duration::from_millis(1).max(told / 8)
}

/// Makes received disk content durable for as long as the receiver exists.
async fn keep_durable(receiving: Weak<Receiving>) {
    let began = Instant::now();
    loop {
        tokio::time::sleep(SYNC_EVERY).await;
        let Some(receiving) = receiving.upgrade() else {
            return;
        };
        receiving.lock().disks.tick(began.elapsed());
        receiving.sync();
    }
}

struct Sink<'a> {
    destination: &'a mut Destination,
    store: Option<&'a mut (dyn Store + 'static)>,
    others: &'a Others,
    disks: &'a mut Disks,
    lists: &'a mut Lists,
    kept: &'a Kept,
    epoch: Epoch,
    error: &'a mut Option<String>,
    fresh: &'a mut Vec<bool>,
    blocks: u64,
}

impl BlockSink for Sink<'_> {
    type Error = String;

    fn region_blocks(&self, region: RegionId) -> Option<u64> {
        self.destination.region_blocks(region)
    }

    fn accepts(&self, id: BlockId, seq: u64) -> bool {
        self.destination.accepts(self.epoch, id, seq) && self.disks.accepts(self.epoch, id, seq)
    }

    fn read(&mut self, id: BlockId, content: &mut [u8; BLOCK_SIZE]) -> bool {
        let read = match &mut self.store {
            _ if self.disks.has(id.region) => self.disks.read(id, content),
            Some(store) => store.read(id, content),
            None => Err(no_disk(id.region)),
        };
        match read {
            Ok(()) => true,
            Err(error) => {
                self.error.get_or_insert(error);
                false
            }
        }
    }

    fn read_shared(
        &mut self,
        migration: MigrationId,
        id: BlockId,
        content: &mut [u8; BLOCK_SIZE],
    ) -> bool {
        self.others.look(migration, id, content)
    }

    fn read_kept(
        &mut self,
        id: BlockId,
        digest: Option<&Digest>,
        content: &mut [u8; BLOCK_SIZE],
    ) -> bool {
        self.kept.read(id, digest, content)
    }

    fn apply(&mut self, seq: u64, writes: &[BlockWrite<'_>]) -> Result<(), String> {
        for writes in writes.chunk_by(|one, next| one.region == next.region) {
            self.fresh.clear();
            for write in writes {
                self.blocks += write.range.count;
                self.fresh
                    .push(self.destination.written(write.region, write.range, seq));
                self.lists.arrived(write.region, write.range);
            }
            let Some(first) = writes.first() else {
                continue;
            };
            match &mut self.store {
                _ if self.disks.has(first.region) => {
                    let mut writes = writes.iter();
                    writes.try_for_each(|write| self.disks.write(write, seq))?;
                }
                Some(store) => store.write(writes, self.fresh)?,
                None => return Err(no_disk(first.region)),
            }
        }
        Ok(())
    }
}

fn no_disk(region: RegionId) -> String {
    format!("region {} is no disk", region.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::shared_dedup::Gangs;
    use longhaul_codec::Content;
    use longhaul_protocol::disk::{DiskFormat, OfferedDisk, Pulled, Remaining};
    use longhaul_protocol::{BlockRange, HostId};
    use longhaul_storage::disk::ExportSize;
    use std::task::{Context, Wake, Waker};

    const KEY: DigestKey = DigestKey([3; 32]);
    const PATIENCE: Duration = Duration::from_secs(60);

    /// Records, at each wake-up, whether the disks were durable then.
    struct AtWakeUp {
        receiving: Arc<Receiving>,
        durable: Mutex<Vec<bool>>,
    }

    impl Wake for AtWakeUp {
        fn wake(self: Arc<Self>) {
            let durable = self.receiving.is_settled().unwrap();
            self.durable.lock().unwrap().push(durable);
        }
    }

    /// A waiter that looks before the last step sees nothing, and nobody wakes it again: its guest
    /// stays stopped.
    #[tokio::test]
    async fn the_last_wake_up_comes_when_the_disks_are_durable() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let image = RawDisk::open(file.path(), ExportSize::OfFile).unwrap();
        let region = RegionSpec {
            id: RegionId(0),
            name: "vda".to_owned(),
            blocks: 256,
            durable: true,
            starts_zero: true,
        };
        let regions = std::slice::from_ref(&region);
        let offered = OfferedDisk {
            region: region.id,
            name: region.name.clone(),
            image_bytes: 1 << 20,
            allocated_bytes: 0,
            format: DiskFormat::Raw,
            pulled: Pulled::All,
            base: None,
        };
        let disks = Disks::new(regions, &[offered], &[Arc::new(image)]);
        let means = Means {
            others: Gangs::default().others(HostId([1; 32])),
            workers: Arc::new(Semaphore::new(1)),
            pace: Pace::new(PATIENCE, PATIENCE, Instant::now()),
        };
        let receiving = Receiving::of_rest(regions, disks, None, KEY, means).unwrap();
        let write = BlockWrite {
            region: region.id,
            range: BlockRange::new(7, 1),
            content: Content::Bytes(&[1; BLOCK_SIZE]),
        };
        receiving.lock().disks.write(&write, 1).unwrap();
        let missing = Remaining {
            chunk: 1,
            chunks: 1,
            mask: 1,
            written_blocks: 0,
        };
        let list = List {
            remaining: vec![missing],
            ..List::nothing(region.id)
        };
        receiving.listed(&list).unwrap();
        // The sync is carried out by hand, so that the waiter comes first.
        let (due, disk) = {
            let mut inner = receiving.lock();
            inner.disks.seal();
            inner.disks.poll_sync().unwrap()
        };
        let wakes = Arc::new(AtWakeUp {
            receiving: receiving.clone(),
            durable: Mutex::default(),
        });
        let waker = Waker::from(wakes.clone());
        let mut settled = std::pin::pin!(receiving.settled());
        assert!(
            settled
                .as_mut()
                .poll(&mut Context::from_waker(&waker))
                .is_pending()
        );
        receiving.synced(due, disk.flush());
        assert_eq!(wakes.durable.lock().unwrap().last(), Some(&true));
    }

    #[test]
    fn frames_for_the_load_are_held_within_a_limit() {
        let mut held = Held::default();
        let frame = vec![130; FRAMES_HELD_BYTES_MAX];
        assert!(piece::is_for_the_load(&frame));
        held.add(frame.into()).unwrap();
        let more = held.add(Bytes::from_static(&[130])).unwrap_err();
        assert!(matches!(more, FrameError::TooEarly { .. }), "{more}");
    }

    #[test]
    fn a_frame_is_not_taken_for_a_piece() {
        assert_eq!(Part::of(&[longhaul_codec::FRAME_VERSION]), None);
    }
}
