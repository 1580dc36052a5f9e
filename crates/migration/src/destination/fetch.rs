//! A guest that runs here while a part of its disks or of its memory is still at its source: from
//! the commit, or the start of an agent, until all blocks are here.
//!
//! ```text
//! source connects (Resume) -> Resumed -> Committed, Missing for each disk -> frames to the exports
//!    exports, QEMU: Want; exports: Superseded ->     <- Unreadable
//! [all blocks are here: compared with the source, except those that the guest has written]
//! all blocks are here, durably: journal ALL-PRESENT -> AllPresent -> the disk exports are removed
//! ```
//!
//! After a lost connection, the end of an export's server, or an error of a disk here (such as no
//! space), the source is disconnected. It connects again, and the destination sends again which
//! blocks are missing. Meanwhile the guest waits only for missing blocks.

mod connection;
mod give_up;
mod memory;
mod notes;
mod progress;
mod verify;

use crate::channel::TalkError;
use crate::destination::Destination;
use crate::destination::arriving_memory::MemoryNews;
use crate::destination::attempt::{BulkEnd, Following, join, next_message};
use crate::destination::call::Call;
use crate::destination::companion::Companions;
use crate::destination::disks::{self, Disks, NEWS_MAX};
use crate::destination::fetch::give_up::GivingUp;
use crate::destination::fetch::memory::{FetchedMemory, next_of_memory};
use crate::destination::fetch::verify::Question;
use crate::destination::fetch_client::{FetchClient, News};
use crate::destination::guest_rate::RateAfter;
use crate::destination::handle::{AttemptHandle, Called, Present};
use crate::destination::receiver::Receiving;
use crate::disks::exports::{self, FrontError, Incomplete};
use crate::handover::ledger::{
    DestinationHandover, drive_destination, tell_destination, time_destination, until,
};
use crate::limits::peer_quota::Means;
use crate::status::migration::Entry;
use crate::status::registry::Reservation;
use crate::status::usage::Meter;
use longhaul_api::{ApiError, ErrorCode, Outcome, Phase, Resolve};
use longhaul_attempt::destination::{Event, FromSource};
use longhaul_codec::DigestKey;
use longhaul_engine::handover::DestinationState;
use longhaul_protocol::message::{GuestClock, ToDestination, ToSource};
use longhaul_protocol::{BLOCK_SIZE, Epoch, RegionId, RegionSpec};
use longhaul_storage::disk::RawDisk;
use longhaul_storage::front::arriving::line::ToPump;
use longhaul_storage::front::arriving::unwritten::Unwritten;
use longhaul_transport::{BulkOffer, BulkReceiver};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, block_in_place};
use tokio::time::Instant;

/// Interval between attempts to find the disks, connect to their exports, and remove the exports.
const RETRY_EVERY: Duration = Duration::from_secs(1);
/// Time limit for a connected source to report that its journal is complete, once all blocks are
/// here.
const GOODBYE: Duration = Duration::from_secs(60);

/// The initial state of the task.
pub(crate) struct Begun {
    pub(crate) entry: Option<Arc<Entry>>,
    pub(crate) handover: DestinationHandover,
    pub(crate) reservation: Option<Reservation>,
    pub(crate) arrival: Arc<AttemptHandle>,
    pub(crate) called: mpsc::Receiver<Called>,
    pub(crate) present: Present,
    /// The source's current connection.
    pub(crate) call: Option<Call>,
    /// The source's current connection for blocks, where it goes on to send memory over it.
    pub(crate) bulk: Option<JoinHandle<BulkEnd>>,
    /// The memory that follows, where it is known from the attempt.
    pub(crate) memory: Option<Following>,
    pub(crate) clock: Option<JoinHandle<Option<GuestClock>>>,
    /// The measurement of the guest's rate, where it is known from the attempt.
    pub(crate) rate: RateAfter,
    /// What measures the agent's usage since the offer, if this agent had it.
    pub(crate) meter: Option<Meter>,
    pub(crate) running: Option<JoinHandle<()>>,
    pub(crate) companions: Companions,
}

/// The fetch of a guest's missing blocks.
pub(crate) struct Fetch {
    context: Arc<Destination>,
    begun: Begun,
    disks: BTreeMap<RegionId, Fetched>,
    /// The memory that follows, if any does.
    memory: Option<FetchedMemory>,
    news: (mpsc::Sender<News>, mpsc::Receiver<News>),
    /// How often the exports were connected to. News of earlier connections are ignored.
    connections: u64,
    bulk: Option<JoinHandle<BulkEnd>>,
    /// A bulk connection that brought blocks when none was missing any more. It stays open until
    /// the source has heard that.
    last_bulk: Option<Box<BulkReceiver>>,
    /// The source's new connection, until the core decides about it.
    caller: Option<Call>,
    /// The bulk connection of an accepted source, used once the missing blocks have been sent to
    /// it.
    offered: Option<(Arc<Receiving>, BulkOffer, Epoch)>,
    /// Whether an error here prevents blocks from being taken. The core is not informed of it yet.
    troubled: bool,
    /// Both journals are complete.
    finished: bool,
    retry_at: Instant,
    taken_out: bool,
    /// Why some of the guest's disks are not known.
    lost: Option<String>,
    whole_at: Option<Instant>,
    /// Since when no source sends blocks.
    lost_at: Option<Instant>,
    /// An operator's decision about the missing blocks.
    giving_up: GivingUp,
    /// The source's current request for digests.
    question: Option<Question>,
    /// Why blocks cannot be taken here; `None` once a block was taken.
    trouble: Option<String>,
}

struct Fetched {
    disk: Incomplete,
    puller: Option<Arc<FetchClient>>,
    missing_blocks: u64,
    waiting: u64,
    /// Why the disk cannot become complete.
    broken: Option<String>,
    /// Blocks that the source has reported as unreadable.
    unreadable: BTreeSet<u64>,
    whole: bool,
    /// The record of blocks that the guest has not written, until the disk has been compared.
    unwritten: Option<Unwritten>,
}

enum Happened {
    Call(Option<Box<(Call, Option<Epoch>)>>),
    Message(Result<ToDestination, TalkError>),
    Bulk(BulkEnd),
    News(Option<News>),
    Memory(MemoryNews),
    Timeout,
    Resolved(Resolve),
    Retry,
}

impl Fetch {
    pub(crate) fn new(context: Arc<Destination>, mut begun: Begun) -> Self {
        let now = Instant::now();
        let bulk = begun.bulk.take();
        let asked = begun.entry.as_ref().map(|entry| entry.resolutions());
        Self {
            context,
            giving_up: GivingUp::of(begun.handover.ledger.journal.records(), asked),
            begun,
            disks: BTreeMap::new(),
            memory: None,
            news: mpsc::channel(NEWS_MAX),
            connections: 0,
            bulk,
            last_bulk: None,
            caller: None,
            offered: None,
            troubled: false,
            finished: false,
            retry_at: now,
            taken_out: false,
            lost: None,
            whole_at: None,
            lost_at: None,
            question: None,
            trouble: None,
        }
    }

    fn guest(&self) -> &str {
        &self.begun.handover.ledger.guest
    }

    fn state(&self) -> &DestinationState {
        self.begun.handover.state()
    }

    /// Fetches all missing blocks, and ends the attempt.
    pub(crate) async fn run(mut self) {
        if let Some(entry) = &self.begun.entry {
            entry.enter(Phase::Finishing);
        }
        self.find();
        self.listen().await;
        drive_destination(&mut self).await;
        self.whole().await;
        while !self.over() {
            match self.wait().await {
                Happened::Call(Some(call)) => self.called(call.0, call.1).await,
                Happened::Call(None) => {}
                Happened::Message(Ok(message)) => self.message(message).await,
                Happened::Message(Err(error)) => {
                    tracing::info!(guest = self.guest(), %error, "the source is gone");
                    self.lose().await;
                }
                Happened::Bulk(BulkEnd::Lost(error)) => {
                    tracing::info!(guest = self.guest(), %error, "bulk is gone");
                    self.lose().await;
                }
                Happened::Bulk(BulkEnd::Broken(why, bulk)) => match self.state() {
                    // What still comes changes nothing.
                    DestinationState::Running { all_present: true } => self.last_bulk = bulk,
                    _ => self.pause(&why),
                },
                Happened::News(Some(news)) => self.told(news).await,
                Happened::News(None) => {}
                Happened::Memory(news) => self.of_memory(news).await,
                Happened::Timeout => time_destination(&mut self).await,
                Happened::Resolved(resolve) => self.resolved(resolve).await,
                Happened::Retry => self.retry().await,
            }
            if std::mem::take(&mut self.troubled) {
                self.tell_core(Event::FetchTrouble).await;
            }
            self.begun.arrival.set_state(self.begun.handover.state());
        }
        self.end().await;
    }

    fn over(&self) -> bool {
        match self.state() {
            DestinationState::Closed { .. } => self.taken_out && self.finished,
            DestinationState::Running { all_present: true } => {
                let waits = self.whole_at.is_none_or(|at| at.elapsed() < GOODBYE);
                self.taken_out && !(self.begun.call.is_some() && waits)
            }
            // An operator has given the guest to the source, and decides about this host's copy.
            DestinationState::Aborted => true,
            _ => false,
        }
    }

    async fn wait(&mut self) -> Happened {
        let again = self.retry_at + RETRY_EVERY;
        let timeout = self.begun.handover.timeout();
        tokio::select! {
            call = self.begun.called.recv() => Happened::Call(call.map(Box::new)),
            message = next_message(&mut self.begun.call) => Happened::Message(message),
            end = join(&mut self.bulk) => {
                self.bulk = None;
                Happened::Bulk(end.unwrap_or_else(|error| BulkEnd::Broken(error.to_string(), None)))
            }
            news = self.news.1.recv() => Happened::News(news),
            news = next_of_memory(&mut self.memory) => Happened::Memory(news),
            resolve = self.giving_up.asked() => Happened::Resolved(resolve),
            () = until(timeout) => Happened::Timeout,
            () = until(Some(again)) => Happened::Retry,
        }
    }

    /// Connects to the disk exports, and to QEMU where memory follows. They report their state and
    /// what they want over the new connections.
    async fn listen(&mut self) {
        self.serve_memory().await;
        let state = self.context.parts.config.state.clone();
        if let Err(error) = exports::keep_answering(&state, self.guest()).await {
            return self.pause(&error.to_string());
        }
        self.connections += 1;
        let number = self.connections;
        let mut failed = None;
        for (region, fetched) in &mut self.disks {
            fetched.puller = None;
            fetched.whole = false;
            fetched.broken = None;
            let (folder, news) = (&fetched.disk.folder, self.news.0.clone());
            match block_in_place(|| FetchClient::connect(folder, (*region, number), news)) {
                Ok(puller) => fetched.puller = Some(puller),
                Err(error) => failed = Some(format!("disk {}: {error}", fetched.disk.name)),
            }
        }
        if let Some(why) = failed {
            self.pause(&why);
        }
    }

    /// Returns whether the disk exports and QEMU take what arrives.
    fn listens(&self) -> bool {
        let mut disks = self.disks.values();
        let memory = self.memory.as_ref();
        disks.all(|disk| disk.puller.is_some()) && memory.is_none_or(FetchedMemory::listens)
    }

    fn disconnect(&mut self) {
        if let Some(bulk) = self.bulk.take() {
            bulk.abort();
        }
        self.question = None;
        self.offered = None;
        self.begun.call = None;
    }

    /// Ends the connection; the source connects again.
    async fn lose(&mut self) {
        self.disconnect();
        self.tell_core(Event::Lost { meant: None }).await;
    }

    async fn tell_core(&mut self, event: Event) {
        tell_destination(self, event).await;
    }

    /// Ends the connection because of an error here that prevents blocks from being taken; the
    /// source connects again.
    fn pause(&mut self, why: &str) {
        tracing::warn!(
            guest = self.guest(),
            why,
            "missing blocks cannot be fetched now"
        );
        self.disconnect();
        self.disks
            .values_mut()
            .for_each(|fetched| fetched.puller = None);
        // That these connections end is no news: what has ended them counts.
        self.connections += 1;
        self.troubled = true;
        self.trouble = Some(format!(
            "what comes cannot be taken, and is tried again every 2 s: {why}"
        ));
        self.show();
    }

    // Messages of the source.

    /// Creates the receiver of the source's frames.
    fn receiving(&self) -> Result<Arc<Receiving>, String> {
        let memory = self.memory.as_ref();
        let mut regions = memory.map_or_else(Vec::new, FetchedMemory::specs);
        let mut key = memory.map_or([0; 32], |memory| memory.note.digest_key);
        let mut disks = BTreeMap::new();
        for (region, fetched) in &self.disks {
            let Some(puller) = &fetched.puller else {
                return Err(format!(
                    "the export of disk {} does not answer",
                    fetched.disk.name
                ));
            };
            let Incomplete { name, image, .. } = &fetched.disk;
            let disk = RawDisk::open_to_read(image).map_err(|error| error.to_string())?;
            let blocks = fetched.disk.masks.blocks;
            regions.push(RegionSpec {
                id: *region,
                name: name.clone(),
                blocks,
                durable: true,
                starts_zero: true,
            });
            key = fetched.disk.digest_key;
            let fetched = disks::Fetched {
                name: name.clone(),
                blocks,
                disk: Arc::new(disk),
                puller: puller.clone(),
            };
            disks.insert(*region, fetched);
        }
        let ledger = &self.begun.handover.ledger;
        let means =
            Means::of_one_that_is_here(&self.context, self.begun.arrival.source, &ledger.host);
        let disks = Disks::pulled(disks);
        let memory = memory.and_then(FetchedMemory::taker);
        let receiving = Receiving::of_rest(&regions, disks, memory, DigestKey(key), means);
        receiving.map_err(|error| format!("its regions are not those of its move: {error}"))
    }

    async fn message(&mut self, message: ToDestination) {
        match FromSource::of(&message) {
            // While blocks are fetched, `Verified` concerns them, and is handled below.
            None | Some(FromSource::Verified) => {}
            Some(FromSource::Cancel(reason)) => {
                let reason = crate::channel::short(&reason);
                return self
                    .tell_core(Event::Message(FromSource::Cancel(reason)))
                    .await;
            }
            Some(message) => return self.tell_core(Event::Message(message)).await,
        }
        match message {
            ToDestination::Unreadable { region, ranges } => {
                let Some(fetched) = self.disks.get_mut(&region) else {
                    return self.memory_is_unreadable(region, &ranges);
                };
                let Some(puller) = fetched.puller.clone() else {
                    return;
                };
                ranges.iter().for_each(|it| fetched.note_unreadable(*it));
                for range in ranges {
                    let byte = range.start * BLOCK_SIZE as u64;
                    tracing::error!(
                        guest = self.guest(),
                        byte,
                        "the source cannot read its disk"
                    );
                    if let Err(error) = block_in_place(|| puller.unreadable(range)) {
                        return self.pause(&error.to_string());
                    }
                }
            }
            ToDestination::VerifyRegion {
                region,
                range,
                blocks_per_digest,
            } => {
                self.question = Some(Question {
                    region,
                    range,
                    blocks_per_digest,
                });
                self.answer().await;
            }
            ToDestination::Verified if self.is_whole() => {
                self.compared();
                self.whole().await;
            }
            ToDestination::Verified => {}
            ToDestination::HeldFrames(frames) => self.begun.companions.held(&frames),
            // A source sends these before it knows that the guest runs here.
            ToDestination::Start { .. }
            | ToDestination::Flows(_)
            | ToDestination::Commit { .. }
            | ToDestination::CommitWithLease { .. }
            | ToDestination::Arbiter { .. }
            | ToDestination::Cancel { .. }
            | ToDestination::Done
            | ToDestination::Overruled { .. }
            | ToDestination::Complete { .. }
            | ToDestination::Departed { .. }
            | ToDestination::List(_)
            | ToDestination::Length { .. } => {}
            ToDestination::Query(_)
            | ToDestination::Offer(_)
            | ToDestination::OfferDisks(_)
            | ToDestination::QueryFiles(_)
            | ToDestination::OfferFiles(_)
            | ToDestination::QueryPorts(_)
            | ToDestination::QueryKnown(_)
            | ToDestination::Replicate(_)
            | ToDestination::ParcelDevice
            | ToDestination::OfferPorts(_)
            | ToDestination::Resume { .. }
            | ToDestination::Ask { .. } => self.lose().await,
        }
    }

    // Messages of the disk exports.

    async fn told(&mut self, news: News) {
        if news.number != self.connections {
            return;
        }
        let Some(fetched) = self.disks.get_mut(&news.region) else {
            return;
        };
        let region = news.region;
        match news.said {
            Some(ToPump::State {
                missing_blocks,
                waiting,
            }) => {
                if missing_blocks < fetched.missing_blocks {
                    self.trouble = None;
                }
                (fetched.missing_blocks, fetched.waiting) = (missing_blocks, waiting);
                self.show();
            }
            Some(ToPump::Want(range)) => {
                let ranges = vec![range];
                self.tell(&ToSource::Want { region, ranges }).await;
            }
            Some(ToPump::Superseded(range)) => {
                let ranges = vec![range];
                self.tell(&ToSource::Superseded { region, ranges }).await;
            }
            Some(ToPump::Failed(errno)) => {
                let error = io::Error::from_raw_os_error(errno);
                let why = format!("disk {}: {error}", fetched.disk.name);
                self.pause(&why);
            }
            Some(ToPump::Broken(errno)) => {
                let error = io::Error::from_raw_os_error(errno);
                let why = format!(
                    "disk {} cannot be made durable: {error}; what is here of it counts only \
                     once its host was \
                     restarted, and the source's image is needed until then",
                    fetched.disk.name
                );
                tracing::error!(guest = self.begun.handover.ledger.guest, "{why}");
                fetched.broken = Some(why);
                self.show();
            }
            Some(ToPump::Whole) => {
                fetched.whole = true;
                fetched.missing_blocks = 0;
                self.show();
                self.whole().await;
            }
            Some(ToPump::Reached(_)) => {}
            None => {
                let why = format!("the export of disk {} is gone", fetched.disk.name);
                self.pause(&why);
            }
        }
    }

    /// Sends a message to a source that knows which blocks are missing. A source without a bulk
    /// connection only asks; it gets the message after it has connected with one.
    async fn tell(&mut self, message: &ToSource) {
        if self.bulk.is_some() {
            send(&mut self.begun.call, message);
        }
    }

    /// Informs the core if all blocks are here.
    async fn whole(&mut self) {
        self.answer().await;
        let whole = self.is_whole() && !self.is_to_be_compared();
        if whole && *self.state() == (DestinationState::Running { all_present: false }) {
            tracing::info!(guest = self.guest(), "nothing of it is left at the source");
            self.tell_faults().await;
            self.tell_used().await;
            self.tell_core(Event::AllPresent).await;
            // The exports can be removed now.
            self.retry_at -= RETRY_EVERY;
        }
    }

    async fn retry(&mut self) {
        self.retry_at = Instant::now();
        if self.lost.is_some() {
            self.find();
        }
        self.look_and_show();
        self.fill().await;
        self.whole().await;
        if self.disks.is_empty() && self.memory.is_none() && self.lost.is_none() {
            // An earlier agent removed the exports, and ended before it recorded ALL-PRESENT.
            self.tell_core(Event::AllPresent).await;
        }
        let whole = matches!(
            self.state(),
            DestinationState::Running { all_present: true } | DestinationState::Closed { .. }
        );
        if whole {
            self.whole_at.get_or_insert_with(Instant::now);
            if !self.taken_out {
                match self.take_out().await {
                    Ok(()) => self.taken_out = true,
                    Err(error) => {
                        tracing::error!(guest = self.guest(), %error, "still below a disk");
                    }
                }
            }
            return;
        }
        if !self.listens() && !self.begun.handover.is_paused() {
            // The exports report to this task even without the source.
            self.listen().await;
        }
    }

    /// Removes the exports below the disks of the guest's QEMU.
    async fn take_out(&mut self) -> Result<(), FrontError> {
        // From here on nobody has to ask for its memory again.
        self.forget_memory().await;
        // The exports' ends are no trouble: news of these connections are ignored from here on.
        self.connections += 1;
        self.disks
            .values_mut()
            .for_each(|fetched| fetched.puller = None);
        let guest = self.guest();
        self.context.sweep_fronts_of(guest).await
    }

    async fn end(self) {
        let Self {
            context,
            begun,
            finished: closed,
            giving_up,
            ..
        } = self;
        let Begun {
            entry,
            handover,
            reservation,
            arrival,
            present,
            mut call,
            clock,
            mut rate,
            running,
            mut companions,
            ..
        } = begun;
        if let Some(running) = running
            && let Err(error) = running.await
        {
            tracing::error!(%error, "a companion broke");
        }
        if let Some(entry) = &entry {
            if let Some(clock) = clock
                && let Ok(Some(clock)) = clock.await
            {
                entry.report_with(|report| crate::status::guest_clock::report(clock, report));
                send(&mut call, &ToSource::Clock(clock));
            }
            rate.report_at_end(entry, &mut call);
            match handover.state() {
                DestinationState::Aborted => {
                    let text = "an operator has given the guest to the source";
                    let error = ApiError::new(ErrorCode::PeerGaveUp, text);
                    entry.end(Outcome::Failed, Some(error));
                }
                _ => entry.end(Outcome::Completed, giving_up.outcome()),
            }
            context.archive.keep(entry);
        }
        companions.finished();
        if closed {
            context.closed.add(arrival.source, handover.ledger);
        }
        drop(present);
        drop(reservation);
        if closed {
            send(&mut call, &ToSource::Closed);
        }
        rate.part(context, entry, call.filter(|_| closed));
    }
}

/// Sends a message if the source is connected. A source that is gone connects again, and gets the
/// current state then.
fn send(call: &mut Option<Call>, message: &ToSource) {
    let Some(there) = call else { return };
    if let Err(error) = there.sender.send(message) {
        tracing::info!(%error, "the source is gone");
        *call = None;
    }
}
