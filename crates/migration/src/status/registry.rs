//! The migrations of this host, and the guests that they reserve. Tells subscribers of changes.

use crate::host::lock::lock;
use crate::status::changes::{Changes, Notable, Subscription};
use crate::status::held::HeldGuests;
use crate::status::migration::{Entry, Observer};
use longhaul_api::{ApiError, ErrorCode, Outcome, Phase, RegionProgress, ReservedBy, Side, What};
use longhaul_protocol::MigrationId;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Limit on the number of ended migrations in the list.
const ENDED_MAX: usize = 500;
/// Time limit for a migration to clean up while a command waits, and the time between two looks.
const SETTLE_LIMIT: Duration = Duration::from_secs(10);
const SETTLE_PAUSE: Duration = Duration::from_millis(20);

/// The known migrations of this host, and the reserved guests.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    shared: Arc<Shared>,
    /// The guests that cannot be reserved.
    pub(crate) held: HeldGuests,
}

/// The part of the registry that migrations and reservations know.
#[derive(Debug, Default)]
pub(crate) struct Shared(Mutex<Known>);

/// Changes are told with this locked, so that they are told in their order, and a present state has
/// all changes up to its number. No migration's own lock is held by those who lock it.
#[derive(Debug, Default)]
struct Known {
    listed: BTreeMap<MigrationId, Listed>,
    taken: HashMap<String, Taken>,
    changes: Changes,
}

#[derive(Debug)]
struct Listed {
    entry: Arc<Entry>,
    /// The state that subscribers know, and the number of its change.
    told: Notable,
    sequence: u64,
}

/// What has reserved a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    /// The guest is being started or stopped.
    Locally,
    /// Its disk exports are being put in order, which takes a moment.
    Maintained,
    /// The guest is moving.
    Moving(MigrationId, Side),
    /// The guest has left, and its memory is being cached.
    RetainedQemu,
}

impl Taken {
    fn event(self, guest: &str) -> What {
        let (by, migration) = match self {
            Self::Locally | Self::Maintained => (ReservedBy::Agent, None),
            Self::Moving(id, _) => (ReservedBy::Migration, Some(id.to_string())),
            Self::RetainedQemu => (ReservedBy::MemoryCache, None),
        };
        What::GuestReserved {
            guest: guest.to_owned(),
            by,
            migration,
        }
    }
}

/// Reserves a guest until it is dropped.
#[derive(Debug)]
pub struct Reservation {
    shared: Arc<Shared>,
    guest: String,
}

impl Reservation {
    /// Changes what has reserved the guest.
    pub(crate) fn now(&self, what: Taken) {
        lock(&self.shared.0).take(&self.guest, what);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut known = lock(&self.shared.0);
        known.taken.remove(&self.guest);
        known.changes.tell(|| What::GuestReleased {
            guest: self.guest.clone(),
        });
    }
}

impl Known {
    fn take(&mut self, guest: &str, what: Taken) {
        let before = self.taken.insert(guest.to_owned(), what);
        if before != Some(what) {
            self.changes.tell(|| what.event(guest));
        }
    }

    /// Removes the oldest ended migration if there are too many.
    fn remove_excess(&mut self) {
        let ended = || {
            self.listed
                .values()
                .filter(|listed| !is_open(&listed.entry))
        };
        if ended().count() <= ENDED_MAX {
            return;
        }
        let oldest = ended().min_by_key(|listed| listed.entry.report().started_unix_ms);
        if let Some(id) = oldest.map(|listed| listed.entry.id()) {
            self.listed.remove(&id);
            self.changes
                .tell(|| What::MigrationRemoved { id: id.to_string() });
        }
    }
}

/// Passes on the changes of a migration to the registry that it is in.
#[derive(Debug)]
struct Teller(Weak<Shared>);

impl Observer for Teller {
    fn changed(&self, entry: &Entry) {
        if let Some(shared) = self.0.upgrade() {
            shared.changed(entry);
        }
    }
}

impl Shared {
    /// Tells subscribers of a migration if they do not know its state.
    pub(crate) fn changed(&self, entry: &Entry) {
        let mut known = lock(&self.0);
        let Known {
            listed, changes, ..
        } = &mut *known;
        let Some(listed) = listed.get_mut(&entry.id()) else {
            return;
        };
        // A later attempt of the migration may have taken its place.
        let told = entry.notable();
        if std::ptr::eq(&*listed.entry, entry) && listed.told != told {
            listed.told = told;
            listed.sequence = changes.tell(|| event_of(entry));
        }
    }

    /// Subscribes to changes. For a subscriber that lagged after an event, the present state also
    /// has the migrations that ended since. Returns `None` after the end.
    pub(crate) fn subscribe(&self, after: Option<u64>) -> Option<Subscription> {
        let known = lock(&self.0);
        let lagged = after.is_some();
        let mut events = vec![What::Snapshot { lagged }];
        let mut taken: Vec<_> = known.taken.iter().collect();
        taken.sort_by_key(|(guest, _)| *guest);
        events.extend(taken.into_iter().map(|(guest, what)| what.event(guest)));
        let unseen = |listed: &&Listed| after.is_some_and(|after| listed.sequence > after);
        let shown = known.listed.values();
        let shown = shown.filter(|listed| is_open(&listed.entry) || unseen(listed));
        events.extend(shown.map(|listed| event_of(&listed.entry)));
        events.push(What::Current {});
        known.changes.subscribe(events)
    }
}

fn event_of(entry: &Entry) -> What {
    What::Migration {
        migration: Box::new(entry.migration()),
    }
}

fn is_open(entry: &Entry) -> bool {
    matches!(entry.outcome(), None | Some(Outcome::InDoubt))
}

impl Registry {
    /// Adds a migration.
    pub(crate) fn add(&self, entry: Arc<Entry>) {
        let mut known = lock(&self.shared.0);
        entry.observe(Box::new(Teller(Arc::downgrade(&self.shared))));
        let sequence = known.changes.tell(|| event_of(&entry));
        let listed = Listed {
            told: entry.notable(),
            sequence,
            entry: entry.clone(),
        };
        known.listed.insert(entry.id(), listed);
        known.remove_excess();
    }

    /// Returns the part that subscriptions use.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Ends all subscriptions.
    pub(crate) fn end_events(&self) {
        lock(&self.shared.0).changes.end();
    }

    /// Returns a migration by its id.
    pub(crate) fn get(&self, id: MigrationId) -> Result<Arc<Entry>, ApiError> {
        self.find(id).ok_or_else(|| {
            ApiError::new(
                ErrorCode::MigrationUnknown,
                format!("there is no migration {id} here"),
            )
            .hint("`longhaul migrations` lists those that this host knows")
        })
    }

    fn find(&self, id: MigrationId) -> Option<Arc<Entry>> {
        let known = lock(&self.shared.0);
        known.listed.get(&id).map(|listed| listed.entry.clone())
    }

    /// Returns all migrations, newest first.
    pub(crate) fn list(&self) -> Vec<Arc<Entry>> {
        let known = lock(&self.shared.0);
        let entries = known.listed.values().map(|listed| listed.entry.clone());
        let mut list: Vec<_> = entries.collect();
        drop(known);
        list.sort_by_key(|entry| std::cmp::Reverse(entry.report().started_unix_ms));
        list
    }

    /// Reserves a guest.
    pub(crate) fn take(&self, guest: &str, what: Taken) -> Result<Reservation, ApiError> {
        if let Some(why) = self.held.why(guest) {
            return Err(why);
        }
        let mut known = lock(&self.shared.0);
        if let Some(holder) = known.taken.get(guest).copied() {
            drop(known);
            return Err(self.busy(guest, holder));
        }
        known.take(guest, what);
        Ok(Reservation {
            shared: self.shared.clone(),
            guest: guest.to_owned(),
        })
    }

    /// Reserves a guest for a command, once it is [settled](Self::settled).
    pub(crate) async fn take_settled(&self, guest: &str) -> Result<Reservation, ApiError> {
        self.settled(guest).await;
        self.take(guest, Taken::Locally)
    }

    /// Waits for what ends by itself soon: a migration that has brought the guest here and only
    /// cleans up, as its source may have reported the end already, or work on its disk exports.
    /// After a limit, `take` says why not.
    pub(crate) async fn settled(&self, guest: &str) {
        let busy = || self.taken(guest) == Some(Taken::Maintained) || self.is_cleaning_up(guest);
        let waited = timeout(SETTLE_LIMIT, async {
            while busy() {
                sleep(SETTLE_PAUSE).await;
            }
        });
        let _ = waited.await;
    }

    /// Returns whether a guest is reserved by a migration that has brought it here completely.
    fn is_cleaning_up(&self, guest: &str) -> bool {
        let Some(Taken::Moving(id, Side::Destination)) = self.taken(guest) else {
            return false;
        };
        let is_complete = |entry: Arc<Entry>| {
            let progress = entry.watch();
            let regions = &progress.borrow().regions;
            let blocks = |region: &RegionProgress| region.blocks_settled == region.blocks_total;
            entry.phase() == Phase::Finishing && regions.iter().all(blocks)
        };
        self.find(id).is_some_and(is_complete)
    }

    /// Returns the error for a guest that is reserved, with a hint.
    pub(crate) fn busy(&self, guest: &str, holder: Taken) -> ApiError {
        let (text, hint) = match holder {
            Taken::Locally => (
                format!("{guest} is being started or stopped"),
                "try again when that is done".to_owned(),
            ),
            Taken::Maintained => (
                format!("the disk exports of {guest} are being put in order"),
                "try again in a moment".to_owned(),
            ),
            Taken::RetainedQemu => (
                format!("what the memory of {guest} held is being kept"),
                "try again when that is done".to_owned(),
            ),
            Taken::Moving(id, Side::Destination) if self.is_finishing(id) => (
                format!("the rest of the disks of {guest} is still being fetched (migration {id})"),
                format!(
                    "it runs here for good, and this cannot be cancelled: wait for it (`longhaul \
                     migrations` says how much is missing, and what to do if the other host never \
                     comes back), or shut {guest} down from inside"
                ),
            ),
            Taken::Moving(id, _) => (
                format!("{guest} is moving already (migration {id})"),
                format!("wait for it, or stop it: longhaul cancel {id}"),
            ),
        };
        ApiError::new(ErrorCode::GuestBusy, text).hint(hint)
    }

    /// Returns whether the guest has been handed over and its migration has not ended yet.
    fn is_finishing(&self, id: MigrationId) -> bool {
        self.find(id)
            .is_some_and(|entry| entry.phase() == Phase::Finishing)
    }

    /// Returns what has reserved a guest.
    pub(crate) fn taken(&self, guest: &str) -> Option<Taken> {
        lock(&self.shared.0).taken.get(guest).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::events::Events;
    use crate::status::migration::Facts;
    use longhaul_api::{Asked, Event, HandoverRecord};
    use longhaul_protocol::Generation;

    const ID: MigrationId = MigrationId([1; 8]);

    fn entry(id: MigrationId, side: Side) -> Arc<Entry> {
        Arc::new(Entry::new(Facts {
            strategy: longhaul_api::Strategy::Precopy,
            id,
            guest: "web".to_owned(),
            side,
            source: "lyon".to_owned(),
            destination: "paris".to_owned(),
            asked: Asked::default(),
        }))
    }

    #[test]
    fn a_guest_is_taken_once_and_given_back() {
        let registry = Registry::default();
        let first = registry
            .take("web", Taken::Moving(ID, Side::Source))
            .unwrap();
        let refused = registry.take("web", Taken::Locally).unwrap_err();
        assert_eq!(refused.code, ErrorCode::GuestBusy);
        assert!(
            refused
                .hint
                .is_some_and(|hint| hint.contains(&ID.to_string()))
        );
        drop(first);
        assert!(registry.take("web", Taken::Locally).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_command_waits_for_a_migration_that_cleans_up_and_for_no_other() {
        let registry = Arc::new(Registry::default());
        let entry = entry(ID, Side::Destination);
        registry.add(entry.clone());
        let moving = registry
            .take("web", Taken::Moving(ID, Side::Destination))
            .unwrap();
        let began = tokio::time::Instant::now();
        assert!(registry.take_settled("web").await.is_err(), "it moves");
        entry.enter(Phase::Finishing);
        let region = RegionProgress {
            name: "disk0".to_owned(),
            blocks_total: 2,
            blocks_settled: 1,
            blocks_pending: 1,
            disk: true,
            strategy: None,
            why: None,
            waiting: None,
            unreadable_byte: None,
        };
        entry.progress(|progress| progress.regions = vec![region]);
        assert!(registry.take_settled("web").await.is_err(), "it fetches");
        assert_eq!(began.elapsed(), Duration::ZERO);
        entry.progress(|progress| progress.regions[0].blocks_settled = 2);
        let command = tokio::spawn({
            let registry = registry.clone();
            async move { registry.take_settled("web").await.map(drop) }
        });
        sleep(SETTLE_LIMIT / 2).await;
        assert!(!command.is_finished());
        drop(moving);
        command.await.unwrap().unwrap();
        let _moving = registry
            .take("web", Taken::Moving(ID, Side::Destination))
            .unwrap();
        assert!(registry.take_settled("web").await.is_err(), "the limit");
    }

    #[tokio::test(start_paused = true)]
    async fn a_command_waits_for_work_on_disk_exports() {
        let registry = Arc::new(Registry::default());
        let maintained = registry.take("web", Taken::Maintained).unwrap();
        let refused = registry.take("web", Taken::Locally).unwrap_err();
        assert!(refused.message.contains("put in order"), "{refused:?}");
        let command = tokio::spawn({
            let registry = registry.clone();
            async move { registry.take_settled("web").await.map(drop) }
        });
        sleep(SETTLE_LIMIT / 2).await;
        assert!(!command.is_finished());
        drop(maintained);
        command.await.unwrap().unwrap();
    }

    #[test]
    fn what_is_still_fetched_is_not_said_to_be_cancelled() {
        let registry = Registry::default();
        let entry = entry(ID, Side::Destination);
        registry.add(entry.clone());
        let _moving = registry
            .take("web", Taken::Moving(ID, Side::Destination))
            .unwrap();
        let hint = || {
            let refused = registry.take("web", Taken::Locally).unwrap_err();
            refused.hint.unwrap()
        };
        assert!(hint().contains("longhaul cancel"), "{}", hint());
        entry.enter(Phase::Finishing);
        assert!(hint().contains("cannot be cancelled"), "{}", hint());
        assert!(!hint().contains("longhaul cancel"), "{}", hint());
    }

    /// Returns the events that there are, in words.
    fn told(events: &mut Events) -> Vec<String> {
        std::iter::from_fn(|| next(events))
            .map(|event| words(&event))
            .collect()
    }

    fn next(events: &mut Events) -> Option<Arc<Event>> {
        let mut next = std::pin::pin!(events.next());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match next.as_mut().poll(&mut context) {
            std::task::Poll::Ready(event) => event,
            std::task::Poll::Pending => None,
        }
    }

    fn words(event: &Event) -> String {
        let Event { sequence, what, .. } = event;
        match what {
            What::Snapshot { lagged: false } => format!("{sequence} snapshot"),
            What::Snapshot { lagged: true } => format!("{sequence} lagged"),
            What::Current {} => format!("{sequence} current"),
            What::Migration { migration } => {
                let doubt = migration.doubt.as_ref().map(|doubt| doubt.reachable);
                let (phase, outcome) = (migration.phase, migration.outcome);
                let first = &migration.id[..2];
                match (outcome, doubt) {
                    (None, None) => format!("{sequence} {first} {phase}"),
                    other => format!("{sequence} {first} {phase} {other:?}"),
                }
            }
            What::MigrationRemoved { id } => format!("{sequence} {} removed", &id[..2]),
            What::GuestReserved { guest, by, .. } => format!("{sequence} {guest} {by:?}"),
            What::GuestReleased { guest } => format!("{sequence} {guest} released"),
            What::Unknown => unreachable!("the registry tells nothing unknown"),
        }
    }

    #[test]
    fn changes_follow_the_present_state_in_their_order() {
        let registry = Registry::default();
        let before = registry.take("db", Taken::Locally).unwrap();
        let entry = entry(ID, Side::Source);
        registry.add(entry.clone());
        let mut events = Events::of(registry.shared().clone()).unwrap();
        let mut other = Events::of(registry.shared().clone()).unwrap();
        let moving = registry
            .take("web", Taken::Moving(ID, Side::Source))
            .unwrap();
        drop(before);
        entry.enter(Phase::Precopy);
        moving.now(Taken::RetainedQemu);
        entry.end(Outcome::Completed, None);
        drop(moving);
        let expected = [
            "2 snapshot",
            "2 db Agent",
            "2 01 preparing",
            "2 current",
            "3 web Migration",
            "4 db released",
            "5 01 precopy",
            "6 web MemoryCache",
            "7 01 precopy (Some(Completed), None)",
            "8 web released",
        ];
        assert_eq!(told(&mut events), expected);
        assert_eq!(told(&mut other), expected, "every subscriber");
        assert_eq!(words(&events.current()), "8 current");
        let mut late = Events::of(registry.shared().clone()).unwrap();
        assert_eq!(told(&mut late), ["8 snapshot", "8 current"]);
        registry.end_events();
        assert!(next(&mut late).is_none());
        assert!(Events::of(registry.shared().clone()).is_none());
    }

    #[test]
    fn a_sample_of_the_progress_is_no_change_and_what_it_shows_is() {
        let registry = Registry::default();
        let entry = entry(ID, Side::Source);
        registry.add(entry.clone());
        let mut events = Events::of(registry.shared().clone()).unwrap();
        assert_eq!(told(&mut events).len(), 3);
        for sent in 0..100 {
            entry.progress(|progress| progress.link.sent_bytes = sent);
        }
        entry.limit(Some(1_000_000));
        entry.report_with(|report| report.passes = Some(1));
        assert_eq!(told(&mut events), [""; 0]);
        for ms in [Some(10), Some(20), None] {
            entry.progress(|progress| progress.link.interrupted_ms = ms);
        }
        entry.progress(|progress| progress.trouble = Some("no answer".to_owned()));
        assert_eq!(told(&mut events).len(), 3);
    }

    #[test]
    fn a_doubt_is_a_change_and_when_the_other_was_asked_is_none() {
        let registry = Registry::default();
        let entry = entry(ID, Side::Source);
        entry.enter(Phase::HandingOver);
        registry.add(entry.clone());
        let mut events = Events::of(registry.shared().clone()).unwrap();
        assert_eq!(told(&mut events).len(), 3);
        entry.in_doubt(HandoverRecord::Released, Generation(7));
        entry.end(Outcome::InDoubt, None);
        entry.in_doubt(HandoverRecord::Released, Generation(7));
        entry.silent("no route");
        entry.silent("no route");
        entry.heard(None);
        entry.certain();
        entry.goes_on();
        assert_eq!(
            told(&mut events),
            [
                "2 01 handing_over (None, Some(None))",
                "3 01 handing_over (Some(InDoubt), Some(None))",
                "4 01 handing_over (Some(InDoubt), Some(Some(false)))",
                "5 01 handing_over (Some(InDoubt), Some(Some(true)))",
                "6 01 handing_over (Some(InDoubt), None)",
                "7 01 handing_over",
            ]
        );
    }

    #[test]
    fn a_slow_subscriber_is_told_and_gets_the_present_state() {
        let registry = Registry::default();
        let [ended, open] = [1, 2].map(|id| entry(MigrationId([id; 8]), Side::Source));
        registry.add(ended.clone());
        registry.add(open);
        let mut events = Events::of(registry.shared().clone()).unwrap();
        assert_eq!(told(&mut events).len(), 4);
        ended.end(Outcome::Failed, None);
        for _ in 0..1000 {
            drop(registry.take("web", Taken::Locally).unwrap());
        }
        let held = registry.take("web", Taken::Locally).unwrap();
        assert_eq!(
            told(&mut events),
            [
                "2004 lagged",
                "2004 web Agent",
                "2004 01 preparing (Some(Failed), None)",
                "2004 02 preparing",
                "2004 current",
            ]
        );
        drop(held);
        assert_eq!(told(&mut events), ["2005 web released"], "no change twice");
    }

    #[test]
    fn a_later_attempt_takes_the_place_of_an_earlier_one() {
        let registry = Registry::default();
        let [first, second] = [entry(ID, Side::Destination), entry(ID, Side::Destination)];
        registry.add(first.clone());
        registry.add(second.clone());
        let mut events = Events::of(registry.shared().clone()).unwrap();
        assert_eq!(told(&mut events).len(), 3);
        first.end(Outcome::Failed, None);
        second.enter(Phase::Precopy);
        assert_eq!(told(&mut events), ["3 01 precopy"]);
    }

    #[test]
    fn the_oldest_of_too_many_is_removed() {
        let registry = Registry::default();
        let mut events = Events::of(registry.shared().clone()).unwrap();
        for number in 0..=u16::try_from(ENDED_MAX).unwrap() {
            let [high, low] = number.to_be_bytes();
            let entry = entry(MigrationId([high, low, 0, 0, 0, 0, 0, 0]), Side::Source);
            entry.end(Outcome::Completed, None);
            registry.add(entry);
        }
        assert_eq!(registry.list().len(), ENDED_MAX);
        assert_eq!(told(&mut events)[0], "0 snapshot");
        let last = entry(MigrationId([0xff; 8]), Side::Source);
        last.end(Outcome::Completed, None);
        registry.add(last);
        let told = told(&mut events);
        assert!(told[1].ends_with("removed"), "{told:?}");
        assert!(told[0].contains("ff preparing"), "{told:?}");
    }
}
