//! Replications of this host's guests: brings versions of their disks to other hosts, at the times
//! that an operator asked for.
//!
//! ```text
//! STATE/replications/GUEST/    the source of a replica (longhaul_parcel::Replication)
//! ```

mod link;

pub(crate) use link::Superseded;

use crate::context::Context;
use crate::disks::tracked_writes::{self, TrackedExports};
use crate::host::lock::lock;
use crate::host::names::is_name;
use crate::host::retention;
use crate::host::right::Holder;
use crate::host::set_aside::set_aside;
use crate::limits::peer_quota::GENERATION_MAX;
use crate::source::tracking;
use crate::status::failure;
use crate::status::registry::Taken;
use link::{Guard, Link};
use longhaul_api::{ApiError, ErrorCode, ReplicaVersion, ReplicateGuest, ReplicationState};
use longhaul_hypervisor::Guest;
use longhaul_parcel::{JobDisk, JobError, JobGuest, Replicated, Replication, Schedule, Step};
use longhaul_protocol::Generation;
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::replica::{ReplicaOffer, ReplicatedDisk};
use longhaul_storage::disk::{Disk as _, RawDisk, is_volume, qcow2};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{Notify, watch};
use tokio::task::{JoinHandle, block_in_place};
use tokio::time::{sleep, timeout};

/// The wait after a version that failed: at first, and at most.
const AGAIN: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(60)];
/// Time limit for the host to answer when a replication begins. It may compare images for longer.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// Bytes of an image that tell its format.
const HEAD_BYTES: u64 = 64 << 10;

fn now_s() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

fn folder(state: &Path, guest: &str) -> PathBuf {
    state.join("replications").join(guest)
}

/// What a replication does, for those who look.
#[derive(Debug, Default)]
struct Status {
    state: Option<ReplicationState>,
    reading: Option<(String, u8)>,
    trouble: Option<String>,
    /// Why the file systems of the version that is under way were not frozen.
    not_frozen: Option<String>,
    sent_bytes: u64,
    took_ms: Option<u64>,
    longest_behind_s: Option<u64>,
}

/// A replication with its task.
struct Ongoing {
    status: Arc<Mutex<Status>>,
    /// Begins the next version at once.
    now: Arc<Notify>,
    /// Ends the task, and a version that is under way.
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

/// The replications of this host.
#[derive(Default)]
pub(crate) struct Replications(Mutex<BTreeMap<String, Ongoing>>);

/// Why a version was not brought.
#[derive(Debug, thiserror::Error)]
enum NotBrought {
    /// The guest does not run here.
    #[error("{0}")]
    NotHere(String),
    /// The guest belongs to the replica's host.
    #[error("it belongs to {0} since an operator has failed over to its replica there")]
    Superseded(String),
    /// It is tried again.
    #[error("{0}")]
    Failed(String),
}

impl Replications {
    /// Goes on with the replications of an earlier agent.
    pub(crate) fn take_up(&self, context: &Arc<Context>) -> io::Result<()> {
        let all = context.parts.config.state.join("replications");
        let entries = match fs::read_dir(&all) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let name = entry?.file_name().to_string_lossy().into_owned();
            // A folder without a document is one that was not made to its end.
            match Replication::open(&all.join(&name)) {
                Ok(_) => self.begin(context, &name),
                Err(error) => tracing::error!(guest = name, %error, "is not replicated"),
            }
        }
        Ok(())
    }

    fn begin(&self, context: &Arc<Context>, guest: &str) {
        let (status, now) = (Arc::<Mutex<Status>>::default(), Arc::<Notify>::default());
        let (stop, stopped) = watch::channel(false);
        let guard = Guard {
            context: context.clone(),
            guest: guest.to_owned(),
            stopped,
        };
        let ongoing = Ongoing {
            task: tokio::spawn(work(guard, status.clone(), now.clone())),
            status,
            now,
            stop,
        };
        lock(&self.0).insert(guest.to_owned(), ongoing);
    }

    /// Begins to replicate a guest, or changes how.
    pub(crate) async fn replicate(
        &self,
        context: &Arc<Context>,
        guest: &str,
        how: ReplicateGuest,
    ) -> Result<(), ApiError> {
        let state = &context.parts.config.state;
        let running = running(context, guest).map_err(|why| {
            ApiError::new(ErrorCode::GuestState, why.to_string())
                .hint("only a guest that runs here is replicated")
        })?;
        let disks = disks_of(context, running.description())?;
        let schedule = Schedule {
            to: how.to,
            every_s: how.every_s,
            keep: retention::asked(how.keep),
            no_freeze: how.no_freeze,
        };
        let path = folder(state, guest);
        let known = block_in_place(|| Replication::open(&path)).ok();
        let known_disks = known.as_ref().and_then(Replication::guest);
        let known_disks = known_disks.map(|guest| guest.disks);
        let goes_there = known
            .as_ref()
            .is_some_and(|known| known.schedule().to == schedule.to);
        if !goes_there || !lock(&self.0).contains_key(guest) {
            // What the other host says against it is said now.
            let mut offer = offer_of(context, running.description(), &disks, &schedule);
            offer.id = known.as_ref().map_or([0; 16], |known| known.id().0);
            let asked = ask(context, &schedule.to, offer);
            match timeout(ANSWER_WITHIN, asked).await {
                // It compares images that are there.
                Err(_) | Ok(Ok(())) => {}
                Ok(Err(error)) => return Err(error),
            }
        }
        if known_disks.is_some_and(|known| known != disks) {
            // A version of the other disks may be under way.
            self.end(guest).await;
        }
        block_in_place(|| set(&path, guest, disks, schedule)).map_err(|error| {
            ApiError::new(
                ErrorCode::Internal,
                format!("{guest} is not replicated: {error}"),
            )
        })?;
        let is_begun = match lock(&self.0).get(guest) {
            Some(ongoing) => {
                ongoing.now.notify_one();
                true
            }
            None => false,
        };
        if !is_begun {
            self.begin(context, guest);
        }
        Ok(())
    }

    /// Ends the replication of a guest.
    pub(crate) async fn stop(&self, context: &Context, guest: &str) -> Result<(), ApiError> {
        if !self.end(guest).await {
            let text = format!("{guest} is not replicated from here");
            return Err(ApiError::new(ErrorCode::GuestState, text));
        }
        let path = folder(&context.parts.config.state, guest);
        block_in_place(|| fs::remove_dir_all(&path))
            .map_err(|error| failure::internal(&format!("{}: {error}", path.display())))
    }

    /// Ends the task of a replication, and waits for it. Returns whether there was one.
    async fn end(&self, guest: &str) -> bool {
        let Some(ongoing) = lock(&self.0).remove(guest) else {
            return false;
        };
        ongoing.stop.send_replace(true);
        if let Err(error) = ongoing.task.await {
            tracing::error!(guest, %error, "the task of its replication broke");
        }
        true
    }

    /// Returns all replications.
    pub(crate) fn list(&self, context: &Context) -> Vec<longhaul_api::Replication> {
        let known = lock(&self.0);
        let each = known.iter().filter_map(|(guest, ongoing)| {
            let path = folder(&context.parts.config.state, guest);
            let source = block_in_place(|| Replication::open(&path)).ok()?;
            Some(shown(context, guest, &source, &lock(&ongoing.status)))
        });
        each.collect()
    }
}

fn shown(
    context: &Context,
    guest: &str,
    source: &Replication,
    status: &Status,
) -> longhaul_api::Replication {
    let Schedule {
        to,
        every_s,
        keep,
        no_freeze,
    } = source.schedule().clone();
    let last = source.last();
    let behind_s = last.map(|last| now_s().saturating_sub(last.time));
    longhaul_api::Replication {
        guest: guest.to_owned(),
        to,
        every_s,
        keep: retention::shown(keep),
        no_freeze,
        state: status.state.unwrap_or(ReplicationState::Waiting),
        last: last.map(|last| ReplicaVersion {
            version: last.version,
            unix_ms: last.time * 1000,
            consistent: last.consistent,
            frozen: last.frozen,
        }),
        behind_s,
        longest_behind_s: status.longest_behind_s.max(behind_s),
        changed_bytes: block_in_place(|| {
            let state = context.parts.config.state.clone();
            source.changed_bytes(&TrackedExports { state })
        }),
        sent_bytes: status.sent_bytes,
        took_ms: status.took_ms,
        reading: status.reading.clone(),
        trouble: status.trouble.clone(),
    }
}

/// Makes the source of a replica, or changes where it goes and how often. One of other disks is
/// made again.
fn set(path: &Path, guest: &str, disks: Vec<JobDisk>, schedule: Schedule) -> Result<(), JobError> {
    match Replication::open(path) {
        Ok(mut source) if source.guest().is_some_and(|it| it.disks == disks) => {
            return source.set_schedule(schedule);
        }
        Ok(_) | Err(JobError::Unknown(_)) => {}
        Err(error) => return Err(error),
    }
    let name = guest.to_owned();
    Replication::make(path, JobGuest { name, disks }, schedule).map(drop)
}

/// Returns the guest, if it runs here.
fn running(context: &Context, guest: &str) -> Result<Guest, NotBrought> {
    let not_here = |why: &str| NotBrought::NotHere(format!("{guest} {why}"));
    if !is_name(guest) {
        return Err(NotBrought::NotHere(format!("{guest:?} is no guest's name")));
    }
    match context.right(guest).holder {
        Holder::Here => {}
        Holder::Elsewhere(host) => return Err(not_here(&format!("belongs to {host}"))),
        Holder::InDoubt(_) | Holder::Unknown(_) => return Err(not_here("is in doubt")),
    }
    if let Some(Taken::Moving(..)) = context.registry.taken(guest) {
        return Err(NotBrought::Failed(format!("{guest} is moving")));
    }
    let found = block_in_place(|| context.parts.guests.find(guest));
    let found = found.map_err(|error| NotBrought::Failed(error.to_string()))?;
    let runs = found.filter(|found| found.process().is_some());
    runs.ok_or_else(|| not_here("does not run here"))
}

/// Returns the disks that a replica has, or why there can be none.
fn disks_of(context: &Context, guest: &GuestDescription) -> Result<Vec<JobDisk>, ApiError> {
    let refuse = |text: String, hint: &str| {
        Err(ApiError::new(ErrorCode::Refused, text).hint(hint.to_owned()))
    };
    let images = &context.parts.config.hypervisor.images;
    let mut disks = Vec::new();
    for disk in guest.disks.iter().filter(|disk| disk.is_local()) {
        let Some(image) = images.get(&disk.image) else {
            let text = format!("this host's configuration has no image {}", disk.image);
            return refuse(text, "name it under [images]");
        };
        let of = |why: &str| format!("disk {} ({}) {why}", disk.name, image.path.display());
        if is_volume(&image.path) {
            return refuse(of("is a volume"), "only files are replicated yet");
        }
        let opened = block_in_place(|| {
            let raw = RawDisk::open_to_read(&image.path).map_err(|error| error.to_string())?;
            let mut head = vec![0; raw.size_bytes().min(HEAD_BYTES) as usize];
            raw.read(0, &mut head).map_err(|error| error.to_string())?;
            Ok(head)
        });
        let head = opened.map_err(|why: String| ApiError::new(ErrorCode::Refused, of(&why)))?;
        if qcow2::read(&head).is_ok_and(|head| head.backing.is_some()) {
            let hint = "merge them: qemu-img rebase -b '' while the guest is off";
            return refuse(
                of("stands on a base image, which a replica would lack"),
                hint,
            );
        }
        disks.push(JobDisk {
            name: disk.image.clone(),
            path: image.path.clone(),
        });
    }
    match disks.is_empty() {
        false => Ok(disks),
        true => refuse(
            format!("{} has no disks on this host alone", guest.name),
            "a replica has a guest's local disks",
        ),
    }
}

fn offer_of(
    context: &Context,
    guest: &GuestDescription,
    disks: &[JobDisk],
    schedule: &Schedule,
) -> ReplicaOffer {
    let disks = disks.iter().map(|disk| ReplicatedDisk {
        image: disk.name.clone(),
        bytes: RawDisk::open_to_read(&disk.path).map_or(0, |disk| disk.size_bytes()),
        allocated_bytes: fs::metadata(&disk.path).map_or(0, |disk| disk.blocks() * 512),
    });
    ReplicaOffer {
        guest: guest.clone(),
        id: [0; 16],
        keep_last: schedule.keep.last,
        keep_hourly: schedule.keep.hourly,
        keep_daily: schedule.keep.daily,
        keep_weekly: schedule.keep.weekly,
        every_s: schedule.every_s,
        generation: context.right(&guest.name).generation.unwrap_or_default(),
        disks: disks.collect(),
    }
}

/// Asks the host whether it would take a replica.
async fn ask(context: &Context, host: &str, offer: ReplicaOffer) -> Result<(), ApiError> {
    let refused = |error: io::Error| {
        let refused = ApiError::new(ErrorCode::Refused, error.to_string());
        match link::hint_of(&error) {
            Some(hint) => refused.hint(hint),
            None => refused,
        }
    };
    let mut link = Link::connect(context, host, offer).await?;
    link.begin_now().await.map(drop).map_err(refused)
}

/// Brings versions, until it is stopped.
async fn work(guard: Guard, status: Arc<Mutex<Status>>, now: Arc<Notify>) {
    let Guard { context, guest, .. } = guard.clone();
    let path = folder(&context.parts.config.state, &guest);
    let mut stopped = guard.stopped.clone();
    let mut again = AGAIN[0];
    while !*stopped.borrow() {
        let wait = async |limit: Duration, stopped: &mut watch::Receiver<bool>| {
            tokio::select! {
                () = now.notified() => {}
                () = sleep(limit) => {}
                _ = stopped.changed() => {}
            }
        };
        let due = block_in_place(|| Replication::open(&path)).map(|source| {
            let last = source.last().map_or(0, |last| last.time);
            let every_s = source.schedule().every_s;
            Duration::from_secs((last + every_s).saturating_sub(now_s()))
        });
        match due {
            Ok(due) => wait(due, &mut stopped).await,
            Err(error) => {
                tracing::error!(guest, %error, "is replicated no longer");
                return;
            }
        }
        if *stopped.borrow() {
            return;
        }
        let behind = || block_in_place(|| Replication::open(&path)).ok()?.last();
        let begun = behind().map(|last| now_s().saturating_sub(last.time));
        lock(&status).state = Some(ReplicationState::Running);
        let (started, brought) = (Instant::now(), bring(&guard, &path, &status).await);
        let is_done = {
            let mut shown = lock(&status);
            shown.longest_behind_s = shown.longest_behind_s.max(begun);
            shown.took_ms = Some(started.elapsed().as_millis() as u64);
            shown.end(&guest, brought)
        };
        if is_done {
            again = AGAIN[0];
            continue;
        }
        wait(again, &mut stopped).await;
        again = (again * 2).min(AGAIN[1]);
    }
}

impl Status {
    /// Notes how a version has ended. Returns whether the next one is due at its time.
    fn end(&mut self, guest: &str, brought: Result<Replicated, NotBrought>) -> bool {
        self.reading = None;
        let not_frozen = self.not_frozen.take();
        match brought {
            Ok(replicated) => {
                tracing::info!(guest, ?replicated, sent = self.sent_bytes, "replicated");
                if replicated.consistent {
                    self.trouble = not_frozen;
                }
                // It cannot be failed over to otherwise: the next one may be.
                self.state = Some(match replicated.consistent {
                    true => ReplicationState::Waiting,
                    false => ReplicationState::Failing,
                });
                replicated.consistent
            }
            Err(error) => {
                let text = error.to_string();
                if self.trouble.as_ref() != Some(&text) {
                    tracing::warn!(guest, text, "is not replicated");
                }
                self.state = Some(match error {
                    NotBrought::Failed(_) => ReplicationState::Failing,
                    NotBrought::NotHere(_) | NotBrought::Superseded(_) => ReplicationState::Ended,
                });
                self.trouble = Some(text);
                false
            }
        }
    }
}

/// Brings one version.
async fn bring(
    guard: &Guard,
    path: &Path,
    status: &Arc<Mutex<Status>>,
) -> Result<Replicated, NotBrought> {
    let (context, guest) = (&guard.context, &*guard.guest);
    let failed = |error: &dyn std::fmt::Display| NotBrought::Failed(error.to_string());
    let running = running(context, guest)?;
    let source = block_in_place(|| Replication::open(path)).map_err(|error| failed(&error))?;
    let disks = disks_of(context, running.description()).map_err(|error| failed(&error.message))?;
    if source.guest().is_none_or(|it| it.disks != disks) {
        let why = "its disks are others than those that are replicated: replicate it again";
        return Err(failed(&why));
    }
    let state = context.parts.config.state.clone();
    let why_untracked = track(context, guest, &disks, &state).await;
    let schedule = source.schedule().clone();
    let mut offer = offer_of(context, running.description(), &disks, &schedule);
    offer.id = source.id().0;
    let link = Link::connect(context, &schedule.to, offer).await;
    let mut link = link.map_err(|error| failed(&error.message))?;
    link.guarded(guard.clone());
    let mut source = source.with_tracking(TrackedExports { state });
    let (seen, sent) = (status.clone(), link.sent());
    let run = tokio::task::spawn_blocking(move || {
        source.run(now_s(), &mut link, &mut |step| {
            let mut seen = lock(&seen);
            seen.sent_bytes = sent.load(std::sync::atomic::Ordering::Relaxed);
            match step {
                Step::Exports { disk, done, all } => {
                    let part = (done * 100).checked_div(*all).unwrap_or(100);
                    seen.reading = Some(((*disk).to_owned(), part as u8));
                }
                Step::MomentLost { why, .. } => {
                    seen.trouble = Some(format!("its disks were not held at one moment: {why}"));
                }
                Step::NotFrozen { why, .. } => {
                    seen.not_frozen = Some(format!("its file systems were not frozen: {why}"));
                }
                Step::Seals { .. } => {}
            }
        })
    });
    let ran = run.await.map_err(|error| failed(&error))?;
    match ran {
        Ok(replicated) => {
            if !replicated.consistent
                && let Err(why) = why_untracked
            {
                lock(status).trouble = Some(format!("its writes are not tracked: {why}"));
            }
            Ok(replicated)
        }
        Err(JobError::Link(error)) => match link::superseded(&error) {
            Some(Superseded { generation }) => {
                superseded(context, (guest, &disks), &schedule.to, generation).await;
                Err(NotBrought::Superseded(schedule.to))
            }
            None => Err(failed(&error)),
        },
        Err(error) => Err(failed(&error)),
    }
}

/// Lets a guest's writes be tracked.
async fn track(
    context: &Arc<Context>,
    guest: &str,
    disks: &[JobDisk],
    state: &Path,
) -> Result<(), String> {
    let exports = TrackedExports {
        state: state.to_owned(),
    };
    let images = disks.iter().map(|disk| &*disk.path);
    let is_tracked = || exports.track_all(guest, images);
    let text = |error: &dyn std::fmt::Display| error.to_string();
    if block_in_place(is_tracked).map_err(|error| text(&error))? {
        return Ok(());
    }
    let reserved = context.registry.take_settled(guest).await;
    let reserved = reserved.map_err(|error| error.message)?;
    let tracks = block_in_place(|| tracked_writes::exports_of(state, guest));
    if !tracks.map_err(|error| text(&error))?.is_empty() {
        // They are those of an earlier QEMU.
        let ended = tracking::end(context, guest).await;
        ended.map_err(|error| error.message)?;
    }
    let begun = tracking::begin(context, guest).await;
    drop(reserved);
    begun.map_err(|error| error.message)
}

/// Notes that a guest belongs to the host of its replica. It is not started here any more, and can
/// come back on top of what is here of it.
async fn superseded(
    context: &Context,
    (guest, disks): (&str, &[JobDisk]),
    host: &str,
    generation: u64,
) {
    // The next version asks again.
    let Ok(_reserved) = context.registry.take_settled(guest).await else {
        return;
    };
    if generation > GENERATION_MAX {
        tracing::error!(guest, host, generation, "no guest has moved that often");
        return;
    }
    let known = block_in_place(|| context.rights.get(guest));
    let is_newer = known.as_ref().is_ok_and(|known| {
        known
            .as_ref()
            .is_none_or(|known| known.generation.0 < generation)
    });
    if !is_newer {
        return;
    }
    let right = longhaul_storage::Right {
        guest: guest.to_owned(),
        generation: Generation(generation),
        holder: longhaul_storage::Holder::Elsewhere {
            host: host.to_owned(),
        },
    };
    tracing::error!(
        guest,
        host,
        generation,
        "was failed over: if it runs here, there are two copies; stop one of them"
    );
    if let Err(error) = block_in_place(|| context.rights.set(&right)) {
        tracing::error!(guest, %error, "cannot be noted as the other host's");
        return;
    }
    let runs = block_in_place(|| context.parts.guests.find(guest));
    if !runs.is_ok_and(|found| found.is_none_or(|found| found.process().is_none())) {
        return;
    }
    if let Err(error) = context.parts.guests.confirm(guest, None).await {
        tracing::error!(guest, %error, "something of it is left over");
    }
    let state = &context.parts.config.state;
    let is_tracked = || tracked_writes::exports_of(state, guest).is_ok_and(|it| !it.is_empty());
    if block_in_place(is_tracked)
        && let Err(error) = tracking::end(context, guest).await
    {
        tracing::error!(
            guest,
            error = error.message,
            "its writes are still recorded"
        );
    }
    for disk in disks {
        if let Err(error) = block_in_place(|| set_aside(&disk.path)) {
            let image = disk.path.display();
            tracing::error!(guest, %image, %error, "cannot be set aside");
        }
    }
}

/// Asks the host of a guest's replica, before the guest is started, whether it runs there. `None`
/// if it is not replicated, or the host does not answer in time.
pub(crate) async fn ask_before_start(
    context: &Context,
    description: &GuestDescription,
) -> Option<String> {
    let guest = &description.name;
    let path = folder(&context.parts.config.state, guest);
    let source = block_in_place(|| Replication::open(&path)).ok()?;
    let schedule = source.schedule().clone();
    let disks = source.guest()?.disks;
    let mut offer = offer_of(context, description, &disks, &schedule);
    offer.id = source.id().0;
    let asked = async {
        let mut link = Link::connect(context, &schedule.to, offer).await.ok()?;
        let error = link.begin_now().await.err()?;
        link::superseded(&error)
    };
    let Superseded { generation } = timeout(AGAIN[0], asked).await.ok()??;
    superseded(context, (guest, &disks), &schedule.to, generation).await;
    Some(schedule.to)
}
