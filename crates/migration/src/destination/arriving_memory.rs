//! The memory of a guest that runs here before all of it has arrived.
//!
//! ```text
//! the source's lists -> Lists -> missing() -> Serving::load: QEMU has loaded the guest
//! an earlier agent's page server and note -> Serving::go_on
//! frames -> ArrivingMemory -> the task with the Arriving -> MemoryNews -> attempt, or fetch
//! ```
//!
//! The task ends when all pages are here, or the page server is gone, or nobody holds the
//! [`ArrivingMemory`] any more. The guest waits only for pages that are missing.

use crate::destination::page_server::{self, Started};
use crate::destination::store::{GONE, Store, Taken};
use crate::destination::waits::Waits;
use crate::host::lock::lock;
use crate::host::memory_notes::{ArrivingNote, ArrivingRegion, MemoryNote};
use crate::status::usage;
use longhaul_codec::{BlockId, BlockWrite, Content};
use longhaul_engine::destination::Destination;
use longhaul_engine::presence::Presence;
use longhaul_engine::remaining::{self, Remaining};
use longhaul_hypervisor::helper::Helper;
use longhaul_hypervisor::manager::{GuestManager, Lease};
use longhaul_hypervisor::memory::{
    Arriving, ArrivingEvent, Incoming, IncomingError, Missing, PageServer, Prelude, Request,
    read_prelude,
};
use longhaul_hypervisor::qmp::{COMMAND_TIMEOUT, Qmp};
use longhaul_protocol::disk::List;
use longhaul_protocol::message::Faults;
use longhaul_protocol::{BLOCK_SIZE, BlockRange, Epoch, RegionId, RegionKind, RegionSpec};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::block_in_place;

/// The source's lists of blocks of memory that follow.
#[derive(Default)]
pub(crate) struct Lists {
    regions: BTreeMap<RegionId, (RegionSpec, Presence)>,
    /// Blocks that could not be used and have not come again. They are missing, listed or not.
    rejected: BTreeSet<(RegionId, u64)>,
}

impl Lists {
    /// Creates the lists of the memory among these regions.
    pub(crate) fn of(regions: &[RegionSpec]) -> Self {
        let memory = regions.iter();
        let memory = memory.filter(|spec| spec.kind() == RegionKind::Memory);
        let list = |spec: &RegionSpec| {
            let presence = Presence::new(spec.id, spec.blocks);
            (spec.id, (spec.clone(), presence))
        };
        Self {
            regions: memory.map(list).collect(),
            rejected: BTreeSet::new(),
        }
    }

    /// Returns whether memory may follow.
    pub(crate) fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    pub(crate) fn regions(&self) -> impl Iterator<Item = RegionId> {
        self.regions.keys().copied()
    }

    pub(crate) fn has(&self, region: RegionId) -> bool {
        self.regions.contains_key(&region)
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Presence> {
        self.regions.values_mut().map(|(_, presence)| presence)
    }

    pub(crate) fn connected(&mut self, epoch: Epoch) {
        self.rejected.clear();
        self.all().for_each(|presence| presence.connected(epoch));
    }

    pub(crate) fn seal(&mut self) {
        self.all().for_each(Presence::seal);
    }

    /// Takes a part of the list of a region.
    pub(crate) fn listed(
        &mut self,
        list: &List,
        destination: &mut Destination,
    ) -> Result<(), String> {
        let Some((_, presence)) = self.regions.get_mut(&list.region) else {
            return Err(format!("region {} is no memory", list.region.0));
        };
        let taken = presence.listed(list);
        taken.map_err(|error| error.to_string())?;
        if list.next_chunk.is_none() && list.from_seq != u64::MAX {
            let rejected = destination.listed(list.region).into_iter();
            self.rejected
                .extend(rejected.map(|block| (list.region, block)));
        }
        Ok(())
    }

    /// Records blocks that could not be used although their region is listed.
    pub(crate) fn rejected(&mut self, rejected: &[(RegionId, BlockRange)]) {
        for (region, range) in rejected {
            let region = self.regions.get_key_value(region);
            if let Some((region, (_, presence))) = region
                && presence.is_listed()
            {
                self.rejected
                    .extend(range.blocks().map(|block| (*region, block)));
            }
        }
    }

    /// Records blocks that are written to QEMU's RAM.
    pub(crate) fn arrived(&mut self, region: RegionId, range: BlockRange) {
        if !self.rejected.is_empty() {
            range.blocks().for_each(|block| {
                self.rejected.remove(&(region, block));
            });
        }
    }

    pub(crate) fn is_listed(&self) -> bool {
        let mut lists = self.regions.values();
        lists.all(|(_, presence)| presence.is_listed())
    }

    /// Returns the missing blocks of each region.
    pub(crate) fn missing(&self) -> Vec<ArrivingRegion> {
        let of = |(spec, presence): &(RegionSpec, Presence)| {
            let listed = presence.lacks(0, usize::MAX).0;
            let mut missing = remaining::ranges(&listed, spec.blocks);
            let rejected = (spec.id, 0)..=(spec.id, u64::MAX);
            let rejected = self.rejected.range(rejected);
            missing.extend(rejected.map(|(_, block)| BlockRange::new(*block, 1)));
            ArrivingRegion {
                spec: spec.clone(),
                missing: remaining::of_ranges(&missing, spec.blocks),
            }
        };
        self.regions.values().map(of).collect()
    }
}

/// What the owner of a guest hears of its memory.
#[derive(Debug)]
pub(crate) enum MemoryNews {
    /// The guest waits for these blocks.
    Want(RegionId, BlockRange),
    /// All of it is here, and QEMU has ended its post-copy.
    Whole,
    /// QEMU cannot be served any more.
    Gone(String),
}

/// The hold on the memory of a guest that runs here before all of it has arrived.
pub(crate) struct ArrivingMemory {
    orders: mpsc::UnboundedSender<Order>,
    shared: Arc<Mutex<Shared>>,
}

struct Shared {
    missing_blocks: u64,
    waits: Waits,
    /// The process of the page server, if it is known.
    server: Option<i32>,
    /// The processor time of the page server, once it has all pages.
    server_cpu: Option<Duration>,
    whole: bool,
}

impl Shared {
    fn new() -> Self {
        Self {
            missing_blocks: 0,
            waits: Waits::new(),
            server: None,
            server_cpu: None,
            whole: false,
        }
    }
}

enum Order {
    /// Give QEMU these blocks, and say when the page server has them.
    Give(Vec<Piece>, oneshot::Sender<()>),
    /// Say what is missing.
    Missing(oneshot::Sender<Vec<(RegionId, Vec<Remaining>)>>),
}

struct Piece {
    region: RegionId,
    range: BlockRange,
    /// No content means zeros.
    content: Option<Vec<u8>>,
}

/// Why a guest was not loaded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    /// QEMU could not load it.
    #[error(transparent)]
    Incoming(#[from] IncomingError),
    /// What is missing could not be noted.
    #[error(transparent)]
    Note(#[from] io::Error),
}

/// The part that serves QEMU, until it has one.
pub(crate) struct Serving {
    orders: mpsc::UnboundedReceiver<Order>,
    news: mpsc::UnboundedSender<MemoryNews>,
    shared: Arc<Mutex<Shared>>,
}

/// Creates the hold on a guest's memory, what serves QEMU, and the news of it.
pub(crate) fn hold() -> (
    Arc<ArrivingMemory>,
    Serving,
    mpsc::UnboundedReceiver<MemoryNews>,
) {
    let (orders, taken) = mpsc::unbounded_channel();
    let (news, heard) = mpsc::unbounded_channel();
    let shared = Arc::new(Mutex::new(Shared::new()));
    let serving = Serving {
        orders: taken,
        news,
        shared: shared.clone(),
    };
    (Arc::new(ArrivingMemory { orders, shared }), serving, heard)
}

impl ArrivingMemory {
    /// Gives QEMU blocks. Those that are not missing are left out. Returns what says when the page
    /// server has these, and all that were given before.
    fn give(&self, pieces: Vec<Piece>) -> Result<Taken, String> {
        let (done, taken) = oneshot::channel();
        let ordered = self.orders.send(Order::Give(pieces, done));
        ordered.map_err(|_| GONE.to_owned())?;
        Ok(Taken::when(taken))
    }

    /// Returns the missing blocks of each region that lacks some; `None` if QEMU is gone.
    pub(crate) async fn missing(&self) -> Option<Vec<(RegionId, Vec<Remaining>)>> {
        let (said, heard) = oneshot::channel();
        self.orders.send(Order::Missing(said)).ok()?;
        heard.await.ok()
    }

    /// Returns the blocks that the guest waits for.
    pub(crate) fn asked(&self) -> Vec<(RegionId, BlockRange)> {
        let shared = lock(&self.shared);
        let one = |(region, block)| (region, BlockRange::new(block, 1));
        shared.waits.pending().map(one).collect()
    }

    /// Returns how many blocks are missing, and how many of them the guest waits for.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let shared = lock(&self.shared);
        (shared.missing_blocks, shared.waits.pending().len() as u64)
    }

    pub(crate) fn is_whole(&self) -> bool {
        lock(&self.shared).whole
    }

    /// Returns what the guest has waited for since this agent serves QEMU.
    pub(crate) fn faults(&self) -> Option<Faults> {
        lock(&self.shared).waits.faults()
    }

    /// Returns the processor time of the page server, once QEMU has all memory.
    pub(crate) fn server_cpu(&self) -> Option<Duration> {
        lock(&self.shared).server_cpu
    }
}

/// Gives received blocks to QEMU.
pub(crate) struct ArrivingStore {
    memory: Arc<ArrivingMemory>,
    /// What was given last.
    last: Option<Taken>,
}

impl ArrivingStore {
    pub(crate) fn new(memory: Arc<ArrivingMemory>) -> Self {
        Self { memory, last: None }
    }
}

impl Store for ArrivingStore {
    fn read(&mut self, _id: BlockId, _into: &mut [u8; BLOCK_SIZE]) -> Result<(), String> {
        Err("memory that follows is not referred to".to_owned())
    }

    fn write(&mut self, writes: &[BlockWrite<'_>], _fresh: &[bool]) -> Result<(), String> {
        let piece = |write: &BlockWrite<'_>| {
            let length = write.range.count as usize * BLOCK_SIZE;
            let content = match write.content {
                Content::Zero => None,
                Content::Bytes(bytes) if bytes.len() == length => Some(bytes.to_vec()),
                Content::Bytes(_) => return Err("the content has another length"),
            };
            Ok(Piece {
                region: write.region,
                range: write.range,
                content,
            })
        };
        let pieces: Result<_, _> = writes.iter().map(piece).collect();
        self.last = Some(self.memory.give(pieces?)?);
        Ok(())
    }

    fn unfinished(&mut self) -> Option<Taken> {
        self.last.take()
    }
}

/// A region, and the place of its RAM block in QEMU's list.
struct Place {
    region: RegionId,
    blocks: u64,
    block: usize,
}

/// Returns the places of regions, and their missing pages.
fn places(
    prelude: &Prelude,
    regions: &[ArrivingRegion],
) -> Result<(Vec<Place>, Vec<Missing>), IncomingError> {
    let (mut places, mut missing) = (Vec::new(), Vec::new());
    for ArrivingRegion { spec, missing: of } in regions {
        let mut blocks = prelude.blocks.iter();
        let block = blocks.position(|block| block.name == spec.name);
        let block = block.ok_or(IncomingError::Content("it has no such block of RAM"))?;
        places.push(Place {
            region: spec.id,
            blocks: spec.blocks,
            block,
        });
        let pages = remaining::ranges(of, spec.blocks);
        if !pages.is_empty() {
            missing.push(Missing { block, pages });
        }
    }
    Ok((places, missing))
}

/// A QEMU that is about to load a guest.
pub(crate) struct Loading<'a> {
    pub(crate) incoming: Incoming,
    pub(crate) monitor: Monitor,
    pub(crate) server: PageServer,
    /// The state folder.
    pub(crate) state: &'a Path,
    pub(crate) guest: &'a str,
}

/// How QEMU's monitor is reached when it has all pages.
pub(crate) enum Monitor {
    /// It is held until then.
    Held(Qmp),
    /// It does not answer while QEMU waits for a page.
    Of(Arc<dyn GuestManager>, String),
}

impl Monitor {
    async fn lease(&self) -> Result<Lease, String> {
        match self {
            Self::Held(qmp) => Ok(Lease::from(qmp.clone())),
            Self::Of(guests, guest) => lease(&**guests, guest).await,
        }
    }
}

/// Connects to the monitor of a guest's QEMU.
async fn lease(guests: &dyn GuestManager, guest: &str) -> Result<Lease, String> {
    let guest = block_in_place(|| guests.find(guest));
    let guest = guest.map_err(|error| error.to_string())?;
    let guest = guest.ok_or("its QEMU has ended")?;
    let lease = guests.lease(&guest, COMMAND_TIMEOUT).await;
    lease.map_err(|error| error.to_string())
}

impl Serving {
    /// Lets QEMU load the guest without what is missing, and serves it from then on. Returns when
    /// the devices are loaded. What is missing is noted meanwhile.
    pub(crate) async fn load(
        self,
        loading: Loading<'_>,
        tail: &[u8],
        mut note: ArrivingNote,
    ) -> Result<(), LoadError> {
        let Loading {
            incoming,
            monitor,
            server,
            state,
            guest,
        } = loading;
        let (places, missing) = places(incoming.prelude(), &note.regions)?;
        lock(&self.shared).server = note.server.as_ref().map(Helper::pid);
        note.whole = missing.is_empty();
        let whole = note.whole;
        let (state, guest) = (state.to_owned(), guest.to_owned());
        let noting = tokio::task::spawn_blocking(move || note.write(&state, &guest));
        let loaded = match whole {
            true => {
                // It has nothing to do.
                drop(server);
                let loaded = incoming.finish(tail).await.map(drop);
                self.whole();
                loaded
            }
            false => match incoming.load_without(server, tail, &missing).await {
                Ok(arriving) => self.serve(arriving, places, monitor).await,
                Err(error) => Err(error),
            },
        };
        let noted = noting
            .await
            .unwrap_or_else(|error| Err(io::Error::other(error)));
        loaded?;
        Ok(noted?)
    }

    /// Goes on with the page server of an earlier agent, or over a new connection. If it has ended
    /// QEMU's post-copy is paused, and goes on with a new page server, which the note names then.
    /// Returns false if QEMU has ended as well.
    pub(crate) async fn go_on(
        self,
        guests: &Arc<dyn GuestManager>,
        (state, guest): (&Path, &str),
        note: &mut ArrivingNote,
    ) -> Result<bool, String> {
        let to_text = |error: IncomingError| error.to_string();
        let prelude = read_prelude(&note.prelude).map_err(to_text)?;
        let (places, missing) = places(&prelude, &note.regions).map_err(to_text)?;
        let monitor = Monitor::Of(guests.clone(), guest.to_owned());
        let socket = page_server::socket(state, guest);
        match Arriving::reconnect(&socket, &prelude).await {
            Ok(arriving) => {
                tracing::info!(
                    guest,
                    missing = arriving.missing(),
                    "its page server goes on"
                );
                self.spawn(arriving, places, monitor, None);
                return Ok(true);
            }
            Err(error) => tracing::info!(guest, %error, "its page server has ended"),
        }
        let found = block_in_place(|| guests.find(guest));
        let Some(found) = found.map_err(|error| error.to_string())? else {
            return Ok(false);
        };
        let lease = lease(&**guests, guest).await?;
        let incoming = guests.incoming_socket(&found);
        let incoming = incoming.map_err(|error| error.to_string())?;
        if let Some(ended) = note.server.take() {
            let ended = ended.ended().await;
            ended.map_err(|error| format!("its page server does not end: {error}"))?;
        }
        let started = Started::new(state, guest).await;
        let started = started.map_err(|error| format!("no page server: {error}"))?;
        note.server = Some(started.helper);
        block_in_place(|| note.write(state, guest)).map_err(|error| error.to_string())?;
        let (server, qmp) = (started.connection, lease.qmp());
        let sockets = (&*incoming.ours, &*incoming.theirs);
        match Arriving::recover(server, qmp, sockets, &prelude, &missing).await {
            Ok(None) => self.whole(),
            Ok(Some(arriving)) => {
                tracing::warn!(guest, missing = arriving.missing(), "its post-copy goes on");
                self.spawn(arriving, places, monitor, None);
            }
            Err(error) => return Err(error.to_string()),
        }
        Ok(true)
    }

    /// Notes the processor time of the page server so far.
    fn note_server_cpu(&self) {
        let mut shared = lock(&self.shared);
        shared.server_cpu = shared.server.and_then(usage::process_cpu);
    }

    fn whole(self) {
        lock(&self.shared).whole = true;
        // The owner looks at `is_whole` as well.
        let _ = self.news.send(MemoryNews::Whole);
    }

    /// Serves QEMU in a task. Returns when QEMU has loaded the devices.
    async fn serve(
        self,
        arriving: Arriving,
        places: Vec<Place>,
        monitor: Monitor,
    ) -> Result<(), IncomingError> {
        let (loaded, heard) = oneshot::channel();
        self.spawn(arriving, places, monitor, Some(loaded));
        heard.await.unwrap_or(Err(IncomingError::Ended))
    }

    fn spawn(
        self,
        arriving: Arriving,
        places: Vec<Place>,
        monitor: Monitor,
        loading: Option<oneshot::Sender<Result<(), IncomingError>>>,
    ) {
        lock(&self.shared).missing_blocks = arriving.missing();
        let served = Served {
            serving: self,
            arriving,
            places,
            monitor,
            loading,
            given: Vec::new(),
        };
        tokio::spawn(served.run());
    }
}

/// A QEMU that is served.
struct Served {
    serving: Serving,
    arriving: Arriving,
    places: Vec<Place>,
    monitor: Monitor,
    /// Whom to tell that the devices are loaded.
    loading: Option<oneshot::Sender<Result<(), IncomingError>>>,
    /// Whom to tell that the page server has what they gave.
    given: Vec<oneshot::Sender<()>>,
}

impl Served {
    async fn run(mut self) {
        while self.loading.is_some() || self.arriving.missing() > 0 || !self.arriving.is_taken() {
            tokio::select! {
                event = self.arriving.next_event() => match event {
                    Ok(event) => self.heard(event),
                    Err(error) => return self.fail(error),
                },
                order = self.serving.orders.recv() => match order {
                    Some(order) => self.carry_out(order),
                    None => return,
                },
            }
            if self.arriving.is_taken() {
                for given in self.given.drain(..) {
                    // Nobody waits for it any more otherwise.
                    let _ = given.send(());
                }
            }
        }
        let Self {
            serving,
            arriving,
            monitor,
            ..
        } = self;
        // It ends with QEMU's post-copy.
        serving.note_server_cpu();
        let finished = async {
            let lease = monitor.lease().await?;
            let finished = arriving.finish(lease.qmp()).await;
            finished.map_err(|error| error.to_string())
        };
        match finished.await {
            Ok(()) => serving.whole(),
            Err(why) => drop(serving.news.send(MemoryNews::Gone(why))),
        }
    }

    /// Tells those that wait, and the owner, that QEMU cannot be served.
    fn fail(self, error: IncomingError) {
        let text = error.to_string();
        match self.loading {
            Some(loading) => drop(loading.send(Err(error))),
            None => drop(self.serving.news.send(MemoryNews::Gone(text))),
        }
    }

    fn heard(&mut self, event: ArrivingEvent) {
        match event {
            ArrivingEvent::Request(request) => self.wanted(request),
            ArrivingEvent::Loaded(_) => {
                if let Some(loading) = self.loading.take() {
                    // Its attempt is over otherwise.
                    let _ = loading.send(Ok(()));
                }
            }
            ArrivingEvent::Taken => {}
        }
    }

    fn wanted(&self, Request { block, pages }: Request) {
        let mut places = self.places.iter();
        let Some(place) = places.find(|place| place.block == block) else {
            return;
        };
        tracing::debug!(
            region = place.region.0,
            ?pages,
            "the guest waits for memory"
        );
        let mut shared = lock(&self.serving.shared);
        shared.waits.asked(place.region, pages);
        drop(shared);
        let _ = self
            .serving
            .news
            .send(MemoryNews::Want(place.region, pages));
    }

    fn carry_out(&mut self, order: Order) {
        match order {
            // Its owner is gone otherwise.
            Order::Missing(said) => drop(said.send(self.missing())),
            Order::Give(pieces, given) => {
                pieces.into_iter().for_each(|piece| self.give(piece));
                self.given.push(given);
            }
        }
    }

    fn give(&mut self, piece: Piece) {
        let Piece {
            region,
            range,
            content,
        } = piece;
        let mut places = self.places.iter();
        let Some(place) = places.find(|place| place.region == region) else {
            return;
        };
        tracing::debug!(region = region.0, ?range, "gives memory");
        let mut contents = content.iter().flat_map(|bytes| bytes.as_chunks().0);
        let pages: Vec<_> = range.blocks().map(|page| (page, contents.next())).collect();
        self.arriving.give(place.block, &pages);
        let mut shared = lock(&self.serving.shared);
        shared.missing_blocks = self.arriving.missing();
        shared.waits.came(region, range);
    }

    fn missing(&self) -> Vec<(RegionId, Vec<Remaining>)> {
        let missing = self.arriving.missing_pages();
        let of = |place: &Place| {
            let of_block = missing.iter().find(|of| of.block == place.block);
            let pages = of_block.map_or(&[][..], |of| &of.pages);
            (place.region, remaining::of_ranges(pages, place.blocks))
        };
        self.places.iter().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: RegionId = RegionId(0);

    fn spec(id: u16, durable: bool) -> RegionSpec {
        RegionSpec {
            id: RegionId(id),
            name: format!("region {id}"),
            blocks: 128,
            durable,
            starts_zero: true,
        }
    }

    #[test]
    fn what_is_listed_or_was_rejected_before_is_missing() {
        let specs = [spec(0, false), spec(1, true)];
        let mut lists = Lists::of(&specs);
        assert!(lists.has(MEMORY) && !lists.has(RegionId(1)) && !lists.is_listed());
        let mut destination = Destination::new(&specs).unwrap();
        let rejected = [(MEMORY, BlockRange::new(64, 1))];
        destination.applied(Epoch(1), 1, &rejected).unwrap();
        lists.rejected(&rejected);
        let list = |region| List {
            from_seq: 2,
            remaining: vec![Remaining {
                chunk: 0,
                chunks: 1,
                mask: 0b11,
                written_blocks: 0,
            }],
            ..List::nothing(region)
        };
        lists
            .listed(&list(RegionId(1)), &mut destination)
            .unwrap_err();
        lists.listed(&list(MEMORY), &mut destination).unwrap();
        assert!(lists.is_listed());
        lists.seal();
        let missing = lists.missing();
        let ranges = remaining::ranges(&missing[0].missing, 128);
        assert_eq!(ranges, [BlockRange::new(0, 2), BlockRange::new(64, 1)]);
        // It comes again behind the list; what is listed stays missing.
        lists.arrived(MEMORY, BlockRange::new(0, 65));
        let ranges = remaining::ranges(&lists.missing()[0].missing, 128);
        assert_eq!(ranges, [BlockRange::new(0, 2)]);
        lists.rejected(&[(MEMORY, BlockRange::new(70, 1))]);
        let ranges = remaining::ranges(&lists.missing()[0].missing, 128);
        assert_eq!(ranges, [BlockRange::new(0, 2), BlockRange::new(70, 1)]);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn nobody_waits_for_a_qemu_that_is_not_served() {
        let (memory, serving, mut news) = hold();
        drop(serving);
        let why = memory.give(Vec::new()).err().unwrap();
        assert!(why.contains("not served"), "{why}");
        assert!(memory.missing().await.is_none());
        assert!(news.recv().await.is_none());
    }
}
