//! Migrations of this host's guests: the attempts in progress, the right to run a guest, and
//! outcomes.
//!
//! [`Manager`] is the interface for the API. The modules `source` and `destination` are the two
//! ends of a migration. They do not import each other. No other module imports either, except
//! `recovery`, which continues the attempts of an earlier agent, `companions`, which lists what
//! moves along with a guest, and `both_ends`, which tests the sender against the receiver.
//! `checks/` enforces this.
//!
//! | module | owns |
//! |---|---|
//! | `source` | planning, sending, and an attempt until the guest has left |
//! | `destination` | admission, receiving, and an attempt until the guest is complete |
//! | `companions` | what moves along with a guest: one list for each end |
//! | `replicas` | replicas that other hosts keep here: versions that arrive, failover |
//! | `replication` | the replications of this host's guests, their schedule |
//! | `terminal` | devices of parcels that are attached to another host, both ends |
//! | `residue` | what moves leave on this host, and its sweeping |
//! | `disks` | disk exports, destination images, base images, with their durable notes |
//! | `handover` | the durable records of attempts, and fencing marks |
//! | `limits` | bandwidth, quotas of peers, shared deduplication |
//! | `status` | progress, reports, failures, hooks |
//! | `left_behind` | an operator's actions on a guest that a migration left paused or lost |
//! | `carrier` | what carries frames from sender to receiver |
//! | `files`, `verify`, `channel` | proof of files on both hosts, digests, typed messages |
//! | `host` | configuration, state folder, content index, memory cache, hooks |

#[cfg(test)]
mod both_ends;
mod carrier;
mod channel;
mod companions;
mod context;
mod destination;
mod disks;
mod files;
mod handover;
pub mod host;
mod left_behind;
mod limits;
mod recovery;
mod replicas;
mod replication;
mod residue;
mod source;
mod status;
mod terminal;
mod verify;

use crate::context::Context;
use crate::destination::Destination;
use crate::destination::page_server;
use crate::destination::recovered::Attempts;
use crate::host::arbiter::{self, Answer};
use crate::host::base_image_orders::Orders;
use crate::host::incarnation;
use crate::host::lazy_exports::ComingExports;
use crate::host::limited_hosts::LimitedHosts;
use crate::host::marks::Marks;
use crate::host::retained_qemus::RetainedQemus;
use crate::host::start_error::StartError;
use crate::host::state::Parts;
use crate::host::sweeper::Sweeper;
use crate::limits::allowances::Allowances;
use crate::limits::bandwidth::Throttle;
use crate::limits::shared_dedup::Gangs;
use crate::replication::Replications;
use crate::source::{Source, memory_file};
use crate::status::archive::Archive;
use crate::status::predictions::Predictions;
use crate::status::registry::Registry;
use crate::status::{failure, in_doubt};
use crate::terminal::Terminals;
use longhaul_api::{
    ApiError, ErrorCode, FailOver, FailedOver, HandoverRecord, Limit, Migration, Outcome, Phase,
    Plan, PlanRequest, Probe, ProbeResult, Progress, ReclaimGuest, Replica, ReplicateGuest,
    Replication, Report, Resolve, Side, StartMigration, TrackedWrites,
};
use longhaul_hypervisor::capabilities::can_run;
use longhaul_hypervisor::guest_agent;
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::message::Verdict;
use longhaul_protocol::{Generation, HostId, MigrationId, wire};
use longhaul_storage::{Journal, Journals, Rights};
use longhaul_transport::{CloseCode, Endpoint, EndpointConfig, Hello, ProbeConfig};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::{JoinHandle, block_in_place};

pub use crate::disks::lazy_base_images::of_guest as coming_bases;
pub use crate::disks::tracked_writes::TrackedExports;
pub use crate::disks::volumes::sizes as disk_sizes;
pub use crate::host::right::{Holder, Right};
pub use crate::replicas::folder_of as replica_folder;
pub use crate::status::events::Events;
pub use crate::status::failure::{UNCHANGED, attach as attach_failure};
pub use crate::status::registry::Reservation;
pub use crate::terminal::DeviceChannel;

/// The migrations of this host, and the durable rights to run its guests.
pub struct Manager {
    context: Arc<Context>,
    source: Arc<Source>,
    destination: Arc<Destination>,
    recovered: Arc<Attempts>,
    replications: Replications,
    terminals: Terminals,
    accepting: JoinHandle<()>,
}

impl Manager {
    /// Opens the agent's durable state, continues the attempts of an earlier agent in their own
    /// tasks, and starts to accept connections from other hosts.
    pub async fn start_up(parts: Parts) -> Result<Arc<Self>, StartError> {
        let state = &parts.config.state;
        let cannot = |what: &str, error: &dyn std::fmt::Display| {
            StartError::new(format!("cannot {what}: {error}"))
        };
        let residues = companions::residues();
        let opened = residues.iter().try_for_each(|residue| residue.open(state));
        opened
            .map_err(|error| cannot("remove what an earlier agent was noting of disks", &error))?;
        let journals = Journals::open(&state.join("journal"))
            .map_err(|error| cannot("use the journals", &error))?;
        let rights = Rights::open(&state.join("rights"))
            .map_err(|error| cannot("read who may run which guest", &error))?;
        let marks =
            Marks::open(state).map_err(|error| cannot("make the folder of marks", &error))?;
        let archive = Archive::open(&state.join("reports"))
            .map_err(|error| cannot("make the folder of reports", &error))?;
        let software = format!("longhaul {}", env!("CARGO_PKG_VERSION"));
        let hello = Hello {
            version_min: wire::VERSION_OLDEST,
            version_max: wire::VERSION,
            software,
            incarnation: Some(incarnation::of(&state.join("journal"))?),
        };
        let mut config = EndpointConfig::new(parts.config.listen, hello);
        config.paths.clone_from(&parts.config.paths);
        let endpoint = Endpoint::bind(config, parts.identity.clone(), parts.trust.clone())
            .map_err(|error| {
                cannot("open the socket for other agents", &error)
                    .hint("another program may use the port: change `listen`")
            })?;
        let registry = Registry::default();
        let allowances = limits_of_hosts(&parts)?;
        let gangs = Gangs::default();
        let throttle = Throttle::new(parts.config.bandwidth_bps);
        let kept = archive
            .load()
            .map_err(|error| cannot("read the reports", &error))?;
        kept.into_iter()
            .for_each(|entry| registry.add(Arc::new(entry)));
        let predictions = Predictions::open(&parts.config.state);
        let context = Arc::new(Context {
            parts,
            endpoint,
            journals,
            rights,
            marks,
            registry,
            archive,
            allowances,
            gangs,
            throttle,
            retained_qemus: RetainedQemus::default(),
            sweeper: Sweeper::default(),
            orders: Orders::default(),
            coming: ComingExports::default(),
            contents: Arc::default(),
            rates: Mutex::default(),
            links: Mutex::default(),
            predictions,
        });
        let source = Arc::new(Source::new(context.clone(), companions::at_source));
        source.end_all_departed().await.map_err(|error| {
            cannot(
                "end what an earlier agent let stand of guests that left",
                &error,
            )
        })?;
        let swept = page_server::sweep(&context.parts.config.state);
        swept.map_err(|error| cannot("look for page servers that have ended", &error))?;
        let swept = Journal::list(&context.journals)
            .map_err(io::Error::other)
            .and_then(|known| memory_file::sweep(&context.parts.config.state, &known));
        swept.map_err(|error| cannot("remove memory files of earlier moves", &error))?;
        let recovered = Arc::new(Attempts::default());
        let destination = Arc::new(Destination::new(
            context.clone(),
            companions::at_destination,
        ));
        recovery::take_up(&source, &destination, &recovered)
            .await
            .map_err(|error| {
                StartError::new(format!(
                    "cannot take up what an earlier agent left: {error}"
                ))
                .hint(
                    "nothing was changed: repair what the message names, and start the agent again",
                )
            })?;
        residue::sweep(&context, residues);
        let notes = disks::tracked_writes::frozen_notes(&context.parts.config.state);
        tokio::spawn(async move {
            if let Err(error) = guest_agent::freeze::thaw_noted(&notes).await {
                tracing::error!(notes = %notes.display(), %error, "cannot be read");
            }
        });
        let replications = Replications::default();
        let taken_up = replications.take_up(&context);
        taken_up.map_err(|error| cannot("go on with the replications", &error))?;
        let accepting = tokio::spawn(destination::dispatch::accept(
            destination.clone(),
            recovered.clone(),
        ));
        Ok(Arc::new(Self {
            context,
            source,
            destination,
            recovered,
            replications,
            terminals: Terminals::default(),
            accepting,
        }))
    }

    /// Cancels all migrations before the phase `Finishing`, waits until they have ended, and closes
    /// the connections. Guests keep running.
    pub async fn shut_down(&self) {
        self.accepting.abort();
        let registry = &self.context.registry;
        let Some(mut changes) = Events::of(registry.shared().clone()) else {
            return;
        };
        let under_way = || {
            let entries = registry.list().into_iter();
            entries
                .filter(|entry| entry.holds_up_a_stop())
                .collect::<Vec<_>>()
        };
        for entry in under_way() {
            entry.cancel("the agent was stopped");
        }
        while !under_way().is_empty() && changes.next().await.is_some() {}
        self.context.retained_qemus.make_way().await;
        registry.end_events();
        self.context.endpoint.close("the agent was stopped").await;
    }

    /// Checks a migration and predicts its course. Changes nothing.
    pub async fn plan(&self, request: PlanRequest) -> Result<Plan, ApiError> {
        source::plan::plan(&self.source, request).await
    }

    /// Starts a migration, or refuses it.
    pub async fn start(&self, request: StartMigration) -> Result<Migration, ApiError> {
        self.context.registry.settled(&request.guest).await;
        let entry = source::prepare::start(&self.source, request)?;
        Ok(entry.migration())
    }

    /// Asks a migration to stop. Its progress reports the outcome.
    pub async fn cancel(&self, id: MigrationId) -> Result<Migration, ApiError> {
        let entry = self.context.registry.get(id)?;
        if entry.outcome().is_some() {
            let text = format!("migration {id} has ended: there is nothing to cancel");
            return Err(ApiError::new(ErrorCode::TooLate, text));
        }
        if entry.phase() == Phase::Finishing {
            let Migration {
                guest, destination, ..
            } = entry.migration();
            let text = format!(
                "{guest} runs on {destination} for good: migration {id} cannot be cancelled"
            );
            let hint = "wait for the rest of its disks: `longhaul migrations` says how much that \
                        is, and what to do if the other host never comes back";
            return Err(ApiError::new(ErrorCode::TooLate, text).hint(hint));
        }
        entry.cancel("it was cancelled");
        Ok(entry.migration())
    }

    /// Applies an operator's decision to a migration whose peer does not answer.
    pub async fn resolve(&self, id: MigrationId, resolve: Resolve) -> Result<Migration, ApiError> {
        let entry = self.context.registry.get(id)?;
        let migration = entry.migration();
        in_doubt::judge(&migration, &resolve)?;
        self.claim_before(&migration, &resolve).await?;
        tracing::warn!(migration = %id, guest = migration.guest, ?resolve, "resolved by hand");
        if !self
            .recovered
            .resolve(&self.destination, id, &resolve)
            .await
        {
            entry.resolve(resolve);
        }
        Ok(entry.migration())
    }

    /// Takes the arbiter's lease for a destination that an operator lets run the guest: afterwards
    /// the source cannot get it back from the arbiter. Refuses if it already has.
    async fn claim_before(&self, migration: &Migration, resolve: &Resolve) -> Result<(), ApiError> {
        let networks = &self.context.parts.networks;
        let waits = resolve.run_on == Side::Destination && migration.side == Side::Destination;
        let doubt = migration.doubt.as_ref().filter(|_| waits);
        let doubt = doubt.filter(|doubt| doubt.record == HandoverRecord::Ready);
        let (Some(doubt), Some(store)) = (doubt, arbiter::named(networks)) else {
            return Ok(());
        };
        let next = Generation(doubt.generation);
        let (guest, source) = (&migration.guest, &migration.source);
        match arbiter::acquire(networks, store, guest, next).await {
            Answer::Granted => Ok(()),
            Answer::Denied(latest, holder) => {
                let host = self.context.parts.trust.by_name(source);
                let is_source = host.is_ok_and(|host| host.is_some_and(|host| host.id == holder));
                if latest != next || !is_source {
                    return Ok(());
                }
                let text = format!(
                    "the realm's arbiter has given {guest} back to {source}, where it has gone on"
                );
                let hint = format!(
                    "give the copy here up: longhaul resolve {} --run-on source; if {source} never \
                     comes back, start {guest} from its disks: longhaul guests reclaim",
                    migration.id
                );
                Err(ApiError::new(ErrorCode::Refused, text).hint(hint))
            }
            Answer::None(why) => {
                tracing::warn!(guest, why, "resolved without the arbiter");
                Ok(())
            }
        }
    }

    /// Changes a migration's bandwidth limit.
    pub async fn limit(&self, id: MigrationId, limit: Limit) -> Result<Migration, ApiError> {
        let entry = self.context.registry.get(id)?;
        if entry.outcome().is_some() || entry.report().side == Side::Destination {
            let text = format!("migration {id} does not send from here");
            return Err(ApiError::new(ErrorCode::TooLate, text)
                .hint("a limit is set at the source, while the guest moves"));
        }
        entry.limit(limit.bandwidth_bps);
        Ok(entry.migration())
    }

    /// Returns the migrations of this host as source or destination, newest first.
    pub async fn list(&self) -> Vec<Migration> {
        let entries = self.context.registry.list();
        entries.into_iter().map(|entry| entry.migration()).collect()
    }

    /// Returns one migration.
    pub async fn get(&self, id: MigrationId) -> Result<Migration, ApiError> {
        Ok(self.context.registry.get(id)?.migration())
    }

    /// Returns the open migrations that need this host: guests that leave for it, and guests that
    /// came from it, run here and are not complete.
    pub fn that_need(&self, host: &str) -> Vec<Migration> {
        let entries = self.context.registry.list().into_iter();
        let open = entries.filter(|entry| matches!(entry.outcome(), None | Some(Outcome::InDoubt)));
        let open = open.map(|entry| (entry.report().side, entry.phase(), entry.migration()));
        open.filter(|(side, phase, migration)| match side {
            Side::Source => migration.destination == host,
            Side::Destination => migration.source == host && *phase == Phase::Finishing,
        })
        .map(|(.., migration)| migration)
        .collect()
    }

    /// Returns the connections of this host.
    pub fn endpoint(&self) -> &Endpoint {
        &self.context.endpoint
    }

    /// Closes all connections with a host that is no longer trusted.
    pub fn disconnect(&self, host: HostId) {
        let reason = "this host is no longer trusted";
        self.context
            .endpoint
            .disconnect(host, CloseCode::NotAllowed, reason);
    }

    /// Records which limits the trusted hosts have. A host keeps its limits when it gets another
    /// name.
    pub fn remember_limits(&self) -> Result<(), ApiError> {
        let cannot = |error: &dyn std::fmt::Display| {
            let text = format!("cannot note which limits the trusted hosts have: {error}");
            ApiError::new(ErrorCode::Internal, text)
        };
        let trusted = self.context.parts.trust.list();
        let trusted = trusted.map_err(|error| cannot(&error))?;
        let noted = self.context.allowances.remember(&trusted);
        noted.map_err(|error| cannot(&error))
    }

    /// Returns a migration's report. The report of a migration in progress is not final.
    pub async fn report(&self, id: MigrationId) -> Result<Report, ApiError> {
        Ok(self.context.registry.get(id)?.report())
    }

    /// Returns a migration's progress as a stream of updates. The last update has an outcome. A
    /// migration that has ended yields only that update.
    pub async fn watch(&self, id: MigrationId) -> Result<watch::Receiver<Progress>, ApiError> {
        Ok(self.context.registry.get(id)?.watch())
    }

    /// Returns the open migrations and the reserved guests of this host, and then their changes,
    /// until the agent stops.
    pub fn events(&self) -> Result<Events, ApiError> {
        let shared = self.context.registry.shared().clone();
        Events::of(shared)
            .ok_or_else(|| ApiError::new(ErrorCode::Unavailable, "the agent is stopping"))
    }

    /// Measures the link to a trusted host.
    pub async fn probe(&self, host: &str, probe: Probe) -> Result<ProbeResult, ApiError> {
        let bandwidth_bps = self.context.throttle.alone(probe.bandwidth_bps);
        let config = ProbeConfig {
            duration: Duration::from_secs(u64::from(probe.seconds.clamp(1, 300))),
            bandwidth_bps,
            ..ProbeConfig::default()
        };
        let report = self.context.endpoint.probe(host, config, |_| {}).await;
        let report = report.map_err(|error| failure::probe(host, &error))?;
        if bandwidth_bps.is_none() {
            self.context
                .note_link_rate(host, report.throughput_bps as f64 / 8.0);
        }
        Ok(source::plan::probe_result(host, &report))
    }

    /// Returns this host's right to a guest, and the migration that the guest is in.
    pub async fn right(&self, guest: &str) -> Right {
        self.context.right(guest)
    }

    /// Refuses a guest whose disks belong to another guest that has left or is moving.
    pub fn may_use_disks(&self, guest: &GuestDescription) -> Result<(), ApiError> {
        self.context.may_use_disks(guest)?;
        disks::volumes::may_use(&self.context, guest)
    }

    /// Ends the retained QEMUs if this host cannot start the guest beside them.
    pub async fn make_way_for(&self, guest: &GuestDescription) {
        let Parts { prober, config, .. } = &self.context.parts;
        // The start of the guest reports this error.
        let Ok(capabilities) = prober.capabilities().await else {
            return;
        };
        let checks = can_run(&config.name, guest, None, &capabilities);
        if checks.iter().any(|check| check.verdict == Verdict::Refused) {
            self.context.retained_qemus.make_way().await;
        }
    }

    /// Takes back the right to run a guest from a host that never returns. An operator requests
    /// this.
    pub async fn reclaim(&self, guest: &str, reclaim: &ReclaimGuest) -> Result<(), ApiError> {
        left_behind::reclaim(&self.context, guest, reclaim).await
    }

    /// Begins to track a guest's writes to its local disks, without a migration. Runs to its end
    /// even if the caller no longer waits.
    pub async fn track_writes(&self, guest: &str) -> Result<TrackedWrites, ApiError> {
        let reservation = self.reserve(guest).await?;
        let (context, name) = (self.context.clone(), guest.to_owned());
        let begin = async move {
            let begun = source::tracking::begin(&context, &name).await;
            drop(reservation);
            begun
        };
        finish(tokio::spawn(begin)).await?;
        self.tracked_writes(guest).await
    }

    /// Returns the tracked writes of a guest.
    pub async fn tracked_writes(&self, guest: &str) -> Result<TrackedWrites, ApiError> {
        Ok(TrackedWrites {
            guest: guest.to_owned(),
            disks: source::tracking::read(&self.context, guest)?,
        })
    }

    /// Ends the tracking of a guest's writes, and forgets them. Runs to its end even if the caller
    /// no longer waits.
    pub async fn stop_tracking(&self, guest: &str) -> Result<(), ApiError> {
        let reservation = self.reserve(guest).await?;
        let (context, name) = (self.context.clone(), guest.to_owned());
        let end = async move {
            let ended = source::tracking::end(&context, &name).await;
            drop(reservation);
            ended
        };
        finish(tokio::spawn(end)).await
    }

    /// Begins to replicate a guest to another host, or changes how.
    pub async fn replicate(
        &self,
        guest: &str,
        how: ReplicateGuest,
    ) -> Result<Replication, ApiError> {
        let replications = &self.replications;
        replications.replicate(&self.context, guest, how).await?;
        let mut all = replications.list(&self.context).into_iter();
        let found = all.find(|replication| replication.guest == guest);
        found.ok_or_else(|| failure::internal("its replication has ended at once"))
    }

    /// Returns the replications of this host's guests.
    pub fn replications(&self) -> Vec<Replication> {
        self.replications.list(&self.context)
    }

    /// Ends the replication of a guest. The other host keeps what it has.
    pub async fn stop_replication(&self, guest: &str) -> Result<(), ApiError> {
        self.replications.stop(&self.context, guest).await
    }

    /// Returns the replicas that this host keeps.
    pub fn replicas(&self) -> Result<Vec<Replica>, ApiError> {
        let replicas = block_in_place(|| replicas::list(&self.context));
        replicas.map_err(|error| failure::internal(&error.to_string()))
    }

    /// Removes a replica with all its versions.
    pub fn remove_replica(&self, guest: &str) -> Result<(), ApiError> {
        block_in_place(|| replicas::remove(&self.context, &self.destination.first_replicas, guest))
    }

    /// Puts the disks of a replica in place, and takes the right to run its guest, whose
    /// description is returned too.
    pub async fn fail_over(
        &self,
        guest: &str,
        how: &FailOver,
    ) -> Result<(GuestDescription, FailedOver), ApiError> {
        replicas::fail_over(&self.context, guest, how).await
    }

    /// Opens a channel to a device of a parcel that is attached to another host.
    pub async fn parcel_device(&self, host: &str) -> Result<DeviceChannel, ApiError> {
        terminal::take(&self.context, &self.terminals, host).await
    }

    /// Refuses to start a guest that runs from its replica on another host, if that host says so.
    pub async fn may_start(&self, guest: &GuestDescription) -> Result<(), ApiError> {
        match replication::ask_before_start(&self.context, guest).await {
            None => Ok(()),
            Some(host) => {
                let name = &guest.name;
                let text = format!(
                    "{name} belongs to {host}: an operator has failed over to its replica there"
                );
                Err(ApiError::new(ErrorCode::GuestElsewhere, text).hint(format!(
                    "bring it back while it runs: on {host}: longhaul migrate {name}"
                )))
            }
        }
    }

    /// Releases the images of a reserved guest whose writes were tracked until its QEMU ended.
    pub async fn settle_tracking(&self, guest: &str) -> Result<(), ApiError> {
        let settled = self.context.settle_tracking(guest).await;
        settled.map_err(|error| failure::internal(&error.to_string()))
    }

    /// Refuses a guest whose writes are tracked.
    pub fn refuse_tracked(&self, guest: &str) -> Result<(), ApiError> {
        source::tracking::refuse_tracked(&self.context, guest)
    }

    /// Returns the reasons that prevent a move of a reserved guest until the guest or this host's
    /// configuration is changed. A plan shows the same ones.
    pub async fn lasting_reasons(&self, guest: &str) -> Result<Vec<ApiError>, ApiError> {
        source::checks::lasting(&self.context, guest).await
    }

    /// Resumes a guest that belongs to this host and is paused in QEMU.
    pub async fn resume(&self, guest: &str) -> Result<(), ApiError> {
        let _reservation = self.reserve(guest).await?;
        left_behind::resume(&self.context, guest).await
    }

    /// Reserves a guest, so that no migration takes it. Fails during a migration of the guest, and
    /// if this host does not have the right to run it.
    pub async fn reserve(&self, guest: &str) -> Result<Reservation, ApiError> {
        // Checked first: "the guest is on another host" is more useful to the caller than "busy".
        self.require_right(guest)?;
        let reservation = self.context.registry.take_settled(guest).await?;
        self.require_right(guest)?;
        Ok(reservation)
    }

    /// Reserves a guest in order to end its copy here, even if the guest belongs to another host.
    pub async fn reserve_to_end(&self, guest: &str) -> Result<Reservation, ApiError> {
        let reservation = self.context.registry.take_settled(guest).await?;
        match self.context.right(guest).holder {
            Holder::Here | Holder::Elsewhere(_) => Ok(reservation),
            holder => Err(failure::not_here(guest, &holder)),
        }
    }

    fn require_right(&self, guest: &str) -> Result<(), ApiError> {
        if let Some(why) = self.context.registry.held.why(guest) {
            return Err(why);
        }
        let right = self.context.right(guest);
        match right.holder {
            Holder::Here => Ok(()),
            holder => Err(failure::of_generation(
                failure::not_here(guest, &holder),
                right.generation,
            )),
        }
    }
}

async fn finish(task: JoinHandle<Result<(), ApiError>>) -> Result<(), ApiError> {
    let done = task.await;
    done.unwrap_or_else(|error| Err(failure::internal(&error.to_string())))
}

/// Reads the limits of other hosts. A host that was renamed keeps the limits of its old name.
fn limits_of_hosts(parts: &Parts) -> Result<Allowances, StartError> {
    let Parts { config, trust, .. } = parts;
    let cannot = |error: std::io::Error| {
        StartError::new(format!("cannot use the list of hosts with limits: {error}"))
            .hint("`limited-hosts` in the state folder may be removed: it is made again")
    };
    let limits = LimitedHosts::open(config.limits.clone(), &config.state).map_err(cannot)?;
    match trust.list() {
        Ok(trusted) => limits.remember(&trusted).map_err(cannot)?,
        // While the file cannot be read, no host is trusted.
        Err(error) => tracing::error!(%error, "cannot read the trusted hosts"),
    }
    Ok(Allowances::new(limits))
}
