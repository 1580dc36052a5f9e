//! A guest that runs here while a part of its disks is still at its source: from the commit, or
//! from
//! the start of an agent, until all of it is here.
//!
//! ```text
//! source comes (Resume) -> Resumed -> Committed, Missing for each disk -> frames, to whoever
//! answers the guest
//!    its words: Want, Superseded ->                    <- Unreadable
//! [everything is here: compared with the source's, but for what the guest has written]
//! everything is here, durably: journal ALL-PRESENT -> AllPresent -> the front ends go
//! ```
//!
//! A connection that is lost, a server that dies, a disk without room: the source is let go, comes
//! again,
//! and is told anew what is missing. The guest waits for nothing but that.

mod connection;
mod give_up;
mod notes;
mod progress;
mod verify;

use crate::channel::TalkError;
use crate::destination::Destination;
use crate::destination::attempt::{AttemptHandle, BulkEnd, Present, join, next_message, until};
use crate::destination::disks::{self, Disks, NEWS_MAX};
use crate::destination::dispatch::Call;
use crate::destination::fetch::give_up::GivingUp;
use crate::destination::fetch::verify::Question;
use crate::destination::fetch_client::{FetchClient, News};
use crate::destination::local_content::Kept;
use crate::destination::receiver::{Receiving, Store};
use crate::disks::exports::{self, FrontError, Incomplete};
use crate::disks::images;
use crate::handover::ledger::{
    DestinationHandover, drive_destination, tell_destination, time_destination,
};
use crate::limits::peer_quota::Means;
use crate::status::migration::Entry;
use crate::status::registry::Reservation;
use longhaul_api::{ApiError, ErrorCode, Outcome, Phase, Resolve};
use longhaul_attempt::destination::{Event, FromSource};
use longhaul_codec::{BlockId, BlockWrite, DigestKey};
use longhaul_engine::handover::DestinationState;
use longhaul_protocol::message::{GuestClock, ToDestination, ToSource};
use longhaul_protocol::{BLOCK_SIZE, Epoch, RegionId, RegionSpec};
use longhaul_storage::disk::RawDisk;
use longhaul_storage::front::arriving::line::ToPump;
use longhaul_storage::front::arriving::unwritten::Unwritten;
use longhaul_transport::BulkOffer;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, block_in_place};
use tokio::time::Instant;

/// Between two tries to write a record, and to take front ends out.
const RETRY_EVERY: Duration = Duration::from_secs(1);
/// After trouble here the source is let in again after so long.
const PAUSE: Duration = Duration::from_secs(2);
/// How long a source that has everything said gets to say that its journal is at its end.
const GOODBYE: Duration = Duration::from_secs(60);

/// What the task begins with.
pub(crate) struct Begun {
    pub(crate) entry: Option<Arc<Entry>>,
    pub(crate) handover: DestinationHandover,
    pub(crate) reservation: Option<Reservation>,
    pub(crate) arrival: Arc<AttemptHandle>,
    pub(crate) called: mpsc::Receiver<(Call, Option<Epoch>)>,
    pub(crate) present: Present,
    /// The connection that the source has yet.
    pub(crate) call: Option<Call>,
    pub(crate) clock: Option<JoinHandle<Option<GuestClock>>>,
    pub(crate) running: Option<JoinHandle<()>>,
}

/// A guest's disks as they are fetched.
pub(crate) struct Fetch {
    context: Arc<Destination>,
    begun: Begun,
    disks: BTreeMap<RegionId, Fetched>,
    news: (mpsc::Sender<News>, mpsc::Receiver<News>),
    /// The connections to those who answer the guest, as many as there were.
    connections: u64,
    bulk: Option<JoinHandle<BulkEnd>>,
    /// The source's new connection, which the core has yet to decide about.
    caller: Option<Call>,
    /// What the source's blocks will come over, once it has heard what is missing.
    offered: Option<(Arc<Receiving>, BulkOffer, Epoch)>,
    /// Something here keeps blocks from being taken; the core has yet to hear of it.
    troubled: bool,
    /// Both journals are complete.
    finished: bool,
    retry_at: Instant,
    taken_out: bool,
    /// Why not all of its disks are known.
    lost: Option<String>,
    whole_at: Option<Instant>,
    /// Since when the source is not there.
    lost_at: Option<Instant>,
    /// An operator's word on what is missing.
    giving_up: GivingUp,
    /// What the source asks for, to compare what has come.
    question: Option<Question>,
    /// What has kept blocks from being taken here, since the last one was.
    trouble: Option<String>,
}

struct Fetched {
    disk: Incomplete,
    puller: Option<Arc<FetchClient>>,
    missing_blocks: u64,
    waiting: u64,
    /// Why what is here cannot be whole.
    broken: Option<String>,
    /// Blocks that the source has said it cannot read.
    unreadable: BTreeSet<u64>,
    whole: bool,
    /// Where it is to be compared.
    unwritten: Option<Unwritten>,
}

enum Happened {
    Call(Option<Box<(Call, Option<Epoch>)>>),
    Message(Result<ToDestination, TalkError>),
    Bulk(BulkEnd),
    News(Option<News>),
    Timeout,
    Resolved(Resolve),
    Retry,
}

impl Fetch {
    pub(crate) fn new(context: Arc<Destination>, begun: Begun) -> Self {
        let now = Instant::now();
        let asked = begun.entry.as_ref().map(|entry| entry.resolutions());
        Self {
            context,
            giving_up: GivingUp::of(begun.handover.ledger.journal.records(), asked),
            begun,
            disks: BTreeMap::new(),
            news: mpsc::channel(NEWS_MAX),
            connections: 0,
            bulk: None,
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

    /// Fetches everything, to the very end.
    pub(crate) async fn run(mut self) {
        if let Some(entry) = &self.begun.entry {
            entry.enter(Phase::Finishing);
        }
        self.find();
        self.listen().await;
        drive_destination(&mut self).await;
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
                Happened::Bulk(BulkEnd::Broken(why, _)) => self.pause(&why),
                Happened::News(Some(news)) => self.told(news).await,
                Happened::News(None) => {}
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
            // A person has given the guest to the source: what is here is a matter of theirs.
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
            resolve = self.giving_up.asked() => Happened::Resolved(resolve),
            () = until(timeout) => Happened::Timeout,
            () = until(Some(again)) => Happened::Retry,
        }
    }

    /// Connects to those who answer the guest, whose news are then heard; they are told anew.
    async fn listen(&mut self) {
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

    fn disconnect(&mut self) {
        if let Some(bulk) = self.bulk.take() {
            bulk.abort();
        }
        self.question = None;
        self.offered = None;
        self.begun.call = None;
    }

    /// The connection is of no more use; the source comes back.
    async fn lose(&mut self) {
        self.disconnect();
        self.tell_core(Event::Lost { meant: None }).await;
    }

    async fn tell_core(&mut self, event: Event) {
        tell_destination(self, event).await;
    }

    /// Something here keeps blocks from being taken: the source comes again.
    fn pause(&mut self, why: &str) {
        tracing::warn!(
            guest = self.guest(),
            why,
            "what is left cannot be fetched now"
        );
        self.disconnect();
        self.disks
            .values_mut()
            .for_each(|fetched| fetched.puller = None);
        self.troubled = true;
        self.trouble = Some(format!(
            "what comes cannot be taken, and is tried again every 2 s: {why}"
        ));
        self.show();
    }

    // The source.

    /// Where frames go.
    fn receiving(&self) -> Result<Arc<Receiving>, String> {
        let mut regions = Vec::new();
        let mut disks = Vec::new();
        let first = self.disks.keys().next().copied().unwrap_or(RegionId(0));
        let other = |id: u16| RegionSpec {
            id: RegionId(id),
            name: String::new(),
            blocks: 0,
            durable: true,
            starts_zero: true,
        };
        regions.extend((0..first.0).map(other));
        for (region, fetched) in &self.disks {
            let Some(puller) = &fetched.puller else {
                return Err(format!("nobody answers for disk {}", fetched.disk.name));
            };
            if usize::from(region.0) != regions.len() {
                return Err("its disks are not those of its move".to_owned());
            }
            let Incomplete { name, image, .. } = &fetched.disk;
            let disk = RawDisk::open_to_read(image).map_err(|error| error.to_string())?;
            let blocks = fetched.disk.masks.blocks;
            regions.push(RegionSpec {
                blocks,
                ..other(region.0)
            });
            disks.push(disks::Fetched {
                name: name.clone(),
                blocks,
                disk: Arc::new(disk),
                puller: puller.clone(),
            });
        }
        let ledger = &self.begun.handover.ledger;
        let means =
            Means::of_one_that_is_here(&self.context, self.begun.arrival.source, &ledger.host);
        let disks = Disks::pulled(first, disks);
        let key = self.disks.values().next().map(|one| one.disk.digest_key);
        let key = DigestKey(key.unwrap_or_default());
        Receiving::new(
            &regions,
            Box::new(NoMemory),
            (disks, Kept::default()),
            key,
            means,
        )
        .map_err(|error| error.to_string())
    }

    async fn message(&mut self, message: ToDestination) {
        match FromSource::of(&message) {
            // Here it is about the blocks that were fetched.
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
                    return;
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
            // What a source says that has not heard yet that the guest runs here.
            ToDestination::Start { .. }
            | ToDestination::Commit { .. }
            | ToDestination::Cancel { .. }
            | ToDestination::Done
            | ToDestination::Overruled { .. }
            | ToDestination::Complete { .. }
            | ToDestination::List(_)
            | ToDestination::Length { .. } => {}
            ToDestination::Query(_)
            | ToDestination::Offer(_)
            | ToDestination::OfferDisks(_)
            | ToDestination::QueryFiles(_)
            | ToDestination::OfferFiles(_)
            | ToDestination::Resume { .. }
            | ToDestination::Ask { .. } => self.lose().await,
        }
    }

    // Those who answer the guest.

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
                     started anew, and the source's image is needed until then",
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
                let why = format!("the front end of disk {} is gone", fetched.disk.name);
                self.pause(&why);
            }
        }
    }

    /// Tells a source that knows what is missing. One that only asks is told when it comes with
    /// frames.
    async fn tell(&mut self, message: &ToSource) {
        if self.bulk.is_some() {
            send(&mut self.begun.call, message);
        }
    }

    /// Everything may be here.
    async fn whole(&mut self) {
        self.answer().await;
        let whole = self.is_whole() && !self.is_to_be_compared();
        if whole && *self.state() == (DestinationState::Running { all_present: false }) {
            tracing::info!(
                guest = self.guest(),
                "nothing of its disks is left at the source"
            );
            self.tell_core(Event::AllPresent).await;
            // The front ends can go now.
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
        if self.disks.is_empty() && self.lost.is_none() {
            // They were taken out before an earlier agent could write that they were whole.
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
        let listens = self.disks.values().all(|fetched| fetched.puller.is_some());
        if !listens && !self.begun.handover.is_paused() {
            // The guest's words are heard, and whether all is here, also without the source.
            self.listen().await;
        }
    }

    /// Gives the disks back to the guest's QEMU.
    async fn take_out(&mut self) -> Result<(), FrontError> {
        // That they go is no news.
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
            running,
            ..
        } = begun;
        if let Some(running) = running
            && let Err(error) = running.await
        {
            tracing::error!(%error, "a hook broke");
        }
        if let Some(entry) = &entry {
            if let Some(clock) = clock
                && let Ok(Some(clock)) = clock.await
            {
                entry.report_with(|report| crate::status::guest_clock::report(clock, report));
                send(&mut call, &ToSource::Clock(clock));
            }
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
        block_in_place(|| images::sweep(&context));
        if closed {
            context.attempts.close(arrival.source, handover.ledger);
        }
        drop(present);
        drop(reservation);
        if closed {
            send(&mut call, &ToSource::Closed);
            if let Some(call) = &mut call {
                // The source must have read the last message before the channel goes.
                let last = tokio::time::timeout(PAUSE, call.receiver.recv()).await;
                tracing::debug!(?last, "the source's last word");
            }
        }
    }
}

/// Sends, where somebody is there; one that is gone comes again, and is told anew.
fn send(call: &mut Option<Call>, message: &ToSource) {
    let Some(there) = call else { return };
    if let Err(error) = there.sender.send(message) {
        tracing::info!(%error, "the source is gone");
        *call = None;
    }
}

/// What a guest's memory is when only its disks come.
struct NoMemory;

impl Store for NoMemory {
    fn read(&mut self, id: BlockId, _into: &mut [u8; BLOCK_SIZE]) -> Result<(), String> {
        Err(format!("region {} is no disk", id.region.0))
    }

    fn write(&mut self, writes: &[BlockWrite<'_>], _fresh: &[bool]) -> Result<(), String> {
        match writes.first() {
            Some(write) => Err(format!("region {} is no disk", write.region.0)),
            None => Ok(()),
        }
    }
}
