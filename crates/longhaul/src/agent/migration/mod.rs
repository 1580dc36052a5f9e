//! Migrations of this host's guests: who may run what, which are under way, what became of them.
//!
//! [`Manager`] is what the API asks. `departure` and `arrival` are the two ends of a migration, a
//! task each, and `ledger` makes durable what they decide; `settling` and `remembered` are the two ends
//! without a task; `peer` answers the other agents; `recovery` takes up what an earlier agent left.

mod acknowledge;
mod allowance;
mod archive;
mod arrival;
mod clock;
mod convergence;
mod departed;
mod departure;
mod disks;
mod doubt;
mod entry;
mod failure;
mod fence;
mod files;
mod gang;
mod inbound;
mod kept;
mod ledger;
mod left;
mod meter;
mod outbound;
mod peer;
mod plan;
mod prepare;
mod pulling;
mod receive;
mod recovery;
mod registry;
mod remembered;
mod send;
mod session;
mod settling;
mod steps;
mod talk;
mod throttle;
mod verify;

use crate::agent::state::{Parts, StartError};
use allowance::Allowances;
use archive::Archive;
use arrival::Arrival;
use departed::Standing;
use disks::base::Orders;
use disks::coming::ComingFronts;
use disks::making::look_for_room;
use fence::Marks;
use gang::Gangs;
use longhaul_api::{
    ApiError, ErrorCode, Limit, Migration, Phase, Plan, PlanRequest, Probe, ProbeResult, Progress,
    Report, Resolve, Side, StartMigration,
};
use longhaul_hypervisor::capabilities::can_run;
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::machine::Machine;
use longhaul_protocol::message::{Answer, Check, Verdict};
use longhaul_protocol::{Attempt, HostId, MigrationId, wire};
use longhaul_storage::same_file::Contents;
use longhaul_storage::{Journals, Rights};
use longhaul_transport::{Endpoint, EndpointConfig, Hello, ProbeConfig};
use registry::{Registry, Taken};
use remembered::Attempts;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use throttle::Throttle;
use tokio::sync::watch;
use tokio::task::JoinHandle;

pub(crate) use disks::coming::of_guest as coming_bases;
pub(crate) use disks::fronts::set_aside_as;
pub(crate) use disks::is_local;
pub(crate) use registry::Reservation;

/// What one more look at a filled link weighs.
const RATE_WEIGHT: f64 = 0.02;
/// How long a stopping agent waits for its migrations to end.
const SHUT_DOWN_STEP: Duration = Duration::from_millis(20);

/// Owns every migration of this host, and the journal of the right to run its guests.
pub(crate) struct Manager {
    context: Arc<Context>,
    accepting: JoinHandle<()>,
}

/// What this host's journal says of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Right {
    /// How often the right to run it has changed hands; none where it never did.
    pub(crate) generation: Option<u64>,
    /// Who has it.
    pub(crate) holder: Holder,
    /// The migration that the guest is in.
    pub(crate) moving: Option<(MigrationId, Side)>,
}

/// Takes in what a link carries. What carries nothing is not there, and says nothing of the link.
fn note_rate(rates: &mut HashMap<String, f64>, host: &str, bytes_per_s: f64) {
    if bytes_per_s > 0.0 {
        let known = rates.entry(host.to_owned()).or_insert(bytes_per_s);
        *known += RATE_WEIGHT * (bytes_per_s - *known);
    }
}

/// Who has the right to run a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Holder {
    /// This host.
    Here,
    /// Another one, by the name that it is trusted under or by its fingerprint.
    Elsewhere(String),
    /// Nobody can tell until the two agents have met: this host gave it to that one.
    InDoubt(String),
    /// What is written here cannot be read, and why.
    Unknown(String),
}

/// What every migration's task uses.
struct Context {
    parts: Parts,
    endpoint: Endpoint,
    journals: Journals,
    rights: Rights,
    marks: Marks,
    registry: Registry,
    archive: Archive,
    allowances: Allowances,
    gangs: Gangs,
    throttle: Throttle,
    arrivals: Mutex<HashMap<MigrationId, Arc<Arrival>>>,
    attempts: Attempts,
    standing: Standing,
    orders: Orders,
    coming: ComingFronts,
    /// What files hold that were compared with those of other hosts.
    contents: Arc<Contents>,
    /// What the link to a host was seen to carry, in bytes per second.
    rates: Mutex<HashMap<String, f64>>,
}

impl Context {
    fn arrivals(&self) -> MutexGuard<'_, HashMap<MigrationId, Arc<Arrival>>> {
        lock(&self.arrivals)
    }

    fn add_arrival(&self, arrival: Arc<Arrival>) {
        self.arrivals().insert(arrival.migration, arrival);
    }

    fn remove_arrival(&self, arrival: &Arrival) {
        self.arrivals().remove(&arrival.migration);
    }

    /// The arrival of this attempt from this source, if it is under way.
    fn arrival(
        &self,
        migration: MigrationId,
        attempt: Attempt,
        source: HostId,
    ) -> Option<Arc<Arrival>> {
        let found = self.arrivals().get(&migration).cloned();
        found.filter(|arrival| arrival.attempt == attempt && arrival.source == source)
    }

    /// What the link to a host was last seen to carry, in bytes per second.
    fn link_rate(&self, host: &str) -> Option<f64> {
        lock(&self.rates).get(host).copied()
    }

    /// Takes in what the link to a host carries when it is filled.
    fn note_link_rate(&self, host: &str, bytes_per_s: f64) {
        note_rate(&mut lock(&self.rates), host, bytes_per_s);
    }

    /// What the journal says of a guest.
    fn right(&self, guest: &str) -> Right {
        let moving = match self.registry.taken(guest) {
            Some(Taken::Moving(id, side)) => Some((id, side)),
            Some(Taken::Locally | Taken::Departed) | None => None,
        };
        match self.rights.get(guest) {
            Ok(None) => Right {
                generation: None,
                holder: Holder::Here,
                moving,
            },
            Ok(Some(right)) => {
                let generation = Some(right.generation.0);
                let holder = match right.holder {
                    longhaul_storage::Holder::Here => Holder::Here,
                    longhaul_storage::Holder::Elsewhere { host } => Holder::Elsewhere(host),
                    longhaul_storage::Holder::InDoubt { host } => Holder::InDoubt(host),
                };
                Right {
                    generation,
                    holder,
                    moving,
                }
            }
            // Whoever cannot read who may run a guest must not run it.
            Err(error) => {
                tracing::error!(%error, guest, "cannot read who may run a guest");
                Right {
                    generation: None,
                    holder: Holder::Unknown(error.to_string()),
                    moving,
                }
            }
        }
    }

    /// Everything that says whether this host could run a guest.
    async fn local_checks(
        &self,
        guest: &GuestDescription,
        machine: &Machine,
        without_disks: bool,
    ) -> Answer {
        let answer = self.checks_now(guest, machine, without_disks).await;
        let mut verdicts = answer.checks.iter().map(|check| check.verdict);
        let refused = verdicts.any(|verdict| verdict == Verdict::Refused);
        // What is kept of others that left is no reason.
        if refused && self.standing.make_way().await {
            return self.checks_now(guest, machine, without_disks).await;
        }
        answer
    }

    async fn checks_now(
        &self,
        guest: &GuestDescription,
        machine: &Machine,
        without_disks: bool,
    ) -> Answer {
        let host = self.parts.config.name.clone();
        let refused = |text: String, hint: Option<String>| Check {
            verdict: Verdict::Refused,
            text,
            hint,
        };
        let mut checks = match self.parts.prober.capabilities().await {
            Ok(capabilities) => can_run(&host, guest, Some(machine), &capabilities),
            Err(error) => vec![refused(format!("{host}: {error}"), None)],
        };
        let unshared = guest.disks.iter().find(|disk| disks::is_local(disk));
        match longhaul_hypervisor::description::check(guest) {
            Err(error) => {
                let text = format!("{host} cannot run {}: {error}", guest.name);
                checks.push(refused(text, None));
            }
            Ok(()) if without_disks => {}
            Ok(()) => {
                let local = guest.disks.iter().filter(|disk| disks::is_local(disk));
                let room = local.map(|disk| look_for_room(self, guest, &disk.name));
                let refusals = room.filter_map(Result::err);
                checks.extend(refusals.map(|refusal| refused(refusal.text, refusal.hint)));
            }
        }
        if let Some(disk) = unshared.filter(|_| without_disks) {
            checks.push(refused(
                format!(
                    "disk {} of {} is not on storage that both hosts see",
                    disk.name, guest.name
                ),
                Some(
                    "let it move with the guest (--disks auto), or put it on shared storage and write \
                     `shared = true` in its description"
                        .into(),
                ),
            ));
        }
        let folder =
            longhaul_hypervisor::folder::GuestFolder::new(&self.parts.config.state, &guest.name);
        if folder.is_ok_and(|folder| folder.path().exists()) {
            checks.push(refused(
                format!("{host} has a guest called {} already", guest.name),
                Some(format!(
                    "on {host}: longhaul guests, and stop or rename the one there"
                )),
            ));
        }
        checks.extend(self.hook_answers());
        Answer { host, checks }
    }
}

impl Manager {
    /// Reads the journal, takes up what an earlier agent left (in a task of its own) and begins to
    /// accept other hosts' connections.
    pub(crate) async fn start_up(parts: Parts) -> Result<Arc<Self>, StartError> {
        let state = &parts.config.state;
        let cannot = |what: &str, error: &dyn std::fmt::Display| {
            StartError::new(format!("cannot {what}: {error}"))
        };
        disks::remove_unfinished_notes(state)
            .map_err(|error| cannot("remove what an earlier agent was noting of disks", &error))?;
        let journals = Journals::open(&state.join("journal"))
            .map_err(|error| cannot("use the journals", &error))?;
        let rights = Rights::open(&state.join("rights"))
            .map_err(|error| cannot("read who may run which guest", &error))?;
        let marks = Marks::open(&state.join("marks"))
            .map_err(|error| cannot("make the folder of marks", &error))?;
        let archive = Archive::open(&state.join("reports"))
            .map_err(|error| cannot("make the folder of reports", &error))?;
        let software = format!("longhaul {}", env!("CARGO_PKG_VERSION"));
        let hello = Hello {
            version_min: wire::VERSION_OLDEST,
            version_max: wire::VERSION,
            software,
        };
        let config = EndpointConfig::new(parts.config.listen, hello);
        let endpoint = Endpoint::bind(config, parts.identity.clone(), parts.trust.clone())
            .map_err(|error| {
                cannot("open the socket for other agents", &error)
                    .hint("another program may use the port: change `listen`")
            })?;
        let registry = Registry::default();
        let allowances = Allowances::new(parts.config.limits.clone());
        let gangs = Gangs::default();
        let throttle = Throttle::new(parts.config.bandwidth_bps);
        let kept = archive
            .load()
            .map_err(|error| cannot("read the reports", &error))?;
        kept.into_iter()
            .for_each(|entry| registry.add(Arc::new(entry)));
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
            arrivals: Mutex::default(),
            attempts: Attempts::default(),
            standing: Standing::default(),
            orders: Orders::default(),
            coming: ComingFronts::default(),
            contents: Arc::default(),
            rates: Mutex::default(),
        });
        context.end_all_departed().await.map_err(|error| {
            cannot(
                "end what an earlier agent let stand of guests that left",
                &error,
            )
        })?;
        recovery::take_up(&context).await.map_err(|error| {
            StartError::new(format!(
                "cannot take up what an earlier agent left: {error}"
            ))
            .hint("nothing was changed: mend what the message names, and start the agent again")
        })?;
        context.sweep_marks();
        tokio::task::block_in_place(|| disks::making::sweep(&context));
        context.keep_sweeping_fronts();
        context.keep_sweeping_coming();
        context.keep_sweeping_kept_memory();
        let accepting = tokio::spawn(peer::accept(context.clone()));
        Ok(Arc::new(Self { context, accepting }))
    }

    /// Ends every task: what was not released is aborted; guests are left running.
    pub(crate) async fn shut_down(&self) {
        self.accepting.abort();
        let under_way = || {
            let entries = self.context.registry.list();
            entries
                .into_iter()
                .filter(|entry| entry.outcome().is_none())
                .collect::<Vec<_>>()
        };
        for entry in under_way() {
            entry.cancel("the agent was stopped");
        }
        while !under_way().is_empty() {
            tokio::time::sleep(SHUT_DOWN_STEP).await;
        }
        self.context.standing.make_way().await;
        self.context.endpoint.close("the agent was stopped").await;
    }

    /// Checks and predicts, changing nothing.
    pub(crate) async fn plan(&self, request: PlanRequest) -> Result<Plan, ApiError> {
        plan::plan(&self.context, request).await
    }

    /// Begins a migration, or refuses it.
    pub(crate) async fn start(&self, request: StartMigration) -> Result<Migration, ApiError> {
        let entry = prepare::start(&self.context, request)?;
        Ok(entry.migration())
    }

    /// Asks a migration to stop; its progress tells when and how it has.
    pub(crate) async fn cancel(&self, id: MigrationId) -> Result<Migration, ApiError> {
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
            let hint = "wait for what is left of it: `longhaul migrations` says how much that is";
            return Err(ApiError::new(ErrorCode::TooLate, text).hint(hint));
        }
        entry.cancel("it was cancelled");
        Ok(entry.migration())
    }

    /// Ends a doubt as a person says, where that makes sense.
    pub(crate) async fn resolve(
        &self,
        id: MigrationId,
        resolve: Resolve,
    ) -> Result<Migration, ApiError> {
        let entry = self.context.registry.get(id)?;
        let migration = entry.migration();
        doubt::judge(&migration, &resolve)?;
        tracing::warn!(migration = %id, guest = migration.guest, ?resolve, "resolved by hand");
        if !self
            .context
            .attempts
            .resolve(&self.context, id, &resolve)
            .await
        {
            entry.resolve(resolve);
        }
        Ok(entry.migration())
    }

    /// Changes a migration's limit.
    pub(crate) async fn limit(&self, id: MigrationId, limit: Limit) -> Result<Migration, ApiError> {
        let entry = self.context.registry.get(id)?;
        if entry.outcome().is_some() || entry.report().side == Side::Destination {
            let text = format!("migration {id} does not send from here");
            return Err(ApiError::new(ErrorCode::TooLate, text)
                .hint("a limit is set at the source, while the guest moves"));
        }
        entry.limit(limit.bandwidth_bps);
        Ok(entry.migration())
    }

    /// The migrations of this host, on either side, the newest first.
    pub(crate) async fn list(&self) -> Vec<Migration> {
        let entries = self.context.registry.list();
        entries.into_iter().map(|entry| entry.migration()).collect()
    }

    /// One migration.
    pub(crate) async fn get(&self, id: MigrationId) -> Result<Migration, ApiError> {
        Ok(self.context.registry.get(id)?.migration())
    }

    /// A migration's report; of one under way, so far.
    pub(crate) async fn report(&self, id: MigrationId) -> Result<Report, ApiError> {
        Ok(self.context.registry.get(id)?.report())
    }

    /// A migration's progress, as it changes. The last has an outcome; for one that has ended
    /// there is only that.
    pub(crate) async fn watch(
        &self,
        id: MigrationId,
    ) -> Result<watch::Receiver<Progress>, ApiError> {
        Ok(self.context.registry.get(id)?.watch())
    }

    /// Measures the link to a trusted host.
    pub(crate) async fn probe(&self, host: &str, probe: Probe) -> Result<ProbeResult, ApiError> {
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
        Ok(plan::probe_result(host, &report))
    }

    /// What the journal says of a guest.
    pub(crate) async fn right(&self, guest: &str) -> Right {
        self.context.right(guest)
    }

    /// Makes room for a guest that is to be started, where it could not be beside what is kept of others
    /// that left.
    pub(crate) async fn make_way_for(&self, guest: &GuestDescription) {
        let Parts { prober, config, .. } = &self.context.parts;
        // Whoever starts it is told what is wrong with the host.
        let Ok(capabilities) = prober.capabilities().await else {
            return;
        };
        let checks = can_run(&config.name, guest, None, &capabilities);
        if checks.iter().any(|check| check.verdict == Verdict::Refused) {
            self.context.standing.make_way().await;
        }
    }

    /// Keeps migrations off a guest; refuses while one is under way, and where the right to run
    /// it is not here.
    pub(crate) async fn reserve(&self, guest: &str) -> Result<Reservation, ApiError> {
        // Where it is says more than that somebody is busy with it.
        self.require_right(guest)?;
        let reservation = self.context.registry.take(guest, Taken::Locally)?;
        self.require_right(guest)?;
        Ok(reservation)
    }

    fn require_right(&self, guest: &str) -> Result<(), ApiError> {
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_is_gone_for_a_moment_is_no_slower_for_that() {
        let mut rates = HashMap::new();
        note_rate(&mut rates, "lyon", 0.0);
        assert!(rates.is_empty(), "nothing is known yet");
        note_rate(&mut rates, "lyon", 500e3);
        (0..1000).for_each(|_| note_rate(&mut rates, "lyon", 0.0));
        assert_eq!(rates["lyon"], 500e3);
        (0..1000).for_each(|_| note_rate(&mut rates, "lyon", 250e3));
        assert!((rates["lyon"] - 250e3).abs() < 1.0);
    }
}
