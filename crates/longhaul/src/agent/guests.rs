//! Lists the guests of this host for the API; starts and stops them.
//!
//! A guest is known here while its QEMU has a folder in the state folder, and from its description,
//! which stays in `descriptions/` when its QEMU has ended.

use crate::agent::attach;
use futures_util::future::join_all;
use longhaul_api::{
    ApiError, ErrorCode, FailOver, FailedOver, Guest, GuestOwner, GuestState, Guests as GuestList,
    Qemu, ReclaimGuest, Side, StartGuest, StopGuest,
};
use longhaul_hypervisor::Guest as Handle;
use longhaul_hypervisor::capabilities::{Accelerator, can_run};
use longhaul_hypervisor::config::RunsAsRoot;
use longhaul_hypervisor::description;
use longhaul_hypervisor::launch::{Launch, LaunchError, Role};
use longhaul_hypervisor::manager::{Found, GuestManager, Owner};
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use longhaul_migration::host::state::Parts;
use longhaul_migration::host::{atomic_file, base_images, descriptions};
use longhaul_migration::{Holder, Manager, Right, coming_bases, disk_sizes};
use longhaul_protocol::guest::{self, GuestDescription};
use longhaul_protocol::message::Verdict;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::block_in_place;
use tokio::time::timeout;

/// The time limit for the state of a guest's QEMU.
const ASK_WAIT: Duration = Duration::from_secs(3);
/// The time limit for a guest to shut down when asked.
const SHUT_DOWN_WAIT: Duration = Duration::from_secs(120);
/// The maximum number of bytes of a stored description.
const DESCRIPTION_BYTES_MAX: u64 = 1 << 20;

/// The guest operations of the API.
pub(crate) struct Guests {
    pub(crate) parts: Parts,
}

/// The knowledge of a guest without asking its QEMU.
pub(crate) enum Known {
    Running(Handle),
    Ended(Handle),
    Foreign {
        name: String,
        by: guest::Manager,
        why: String,
    },
    Damaged {
        name: String,
        why: String,
    },
    Described(Box<GuestDescription>),
}

/// QEMU's report of its guest.
struct Said {
    status: String,
    qemu: String,
    kvm: Option<bool>,
}

impl Guests {
    pub(crate) fn new(parts: Parts) -> Self {
        Self { parts }
    }

    /// Returns all guests that are described or run here.
    pub(crate) async fn list(&self, manager: &Manager) -> Result<GuestList, ApiError> {
        let known = self.known()?;
        let guests = known.values().map(|known| self.show(manager, known));
        Ok(GuestList {
            guests: join_all(guests).await,
        })
    }

    /// Returns one guest.
    pub(crate) async fn get(&self, manager: &Manager, name: &str) -> Result<Guest, ApiError> {
        let known = self.known()?;
        let known = known.get(name).ok_or_else(|| unknown(name))?;
        Ok(self.show(manager, known).await)
    }

    /// Refuses the name of an unknown guest.
    pub(crate) fn require(&self, name: &str) -> Result<(), ApiError> {
        match self.known()?.contains_key(name) {
            true => Ok(()),
            false => Err(unknown(name)),
        }
    }

    /// Starts a guest.
    pub(crate) async fn start(
        &self,
        manager: &Manager,
        start: StartGuest,
    ) -> Result<Guest, ApiError> {
        let description = match start {
            StartGuest::Description(text) => description::parse(&text).map_err(|error| {
                ApiError::new(ErrorCode::InvalidRequest, error.to_string())
                    .hint("docs/operating.md, \"Guests\", lists what it may hold")
            })?,
            StartGuest::Name(name) => {
                let mut known = self.known()?;
                match known.remove(&name) {
                    Some(Known::Running(_)) => {
                        // Reports where the guest is, if it is only stopped here.
                        manager.reserve(&name).await?;
                        return Err(runs_already(&name));
                    }
                    Some(Known::Ended(guest)) if guest.is_attached() => {
                        return Err(attach::ended(&name));
                    }
                    Some(Known::Ended(guest)) => guest.description().clone(),
                    Some(Known::Described(description)) => *description,
                    Some(Known::Foreign { by, .. }) => return Err(foreign(&name, by)),
                    Some(Known::Damaged { why, .. }) => return Err(damaged(&name, &why)),
                    None => return Err(unknown(&name)),
                }
            }
        };
        let name = description.name.clone();
        // A replica of it may run elsewhere.
        manager.may_start(&description).await?;
        let reservation = manager.reserve(&name).await?;
        manager.may_use_disks(&description)?;
        manager.settle_tracking(&name).await?;
        manager.make_way_for(&description).await;
        let right = manager.right(&name).await;
        // The launch must run to its end even if the client no longer waits for the answer.
        let parts = self.parts.clone();
        let launched = tokio::spawn(async move {
            let launched = launch(&parts, &description, &right).await;
            drop(reservation);
            launched
        });
        launched
            .await
            .map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))??;
        tracing::info!(guest = %name, "started");
        self.get(manager, &name).await
    }

    /// Stops a guest.
    pub(crate) async fn stop(
        &self,
        manager: &Manager,
        name: &str,
        stop: StopGuest,
    ) -> Result<Guest, ApiError> {
        let mut known = self.known()?;
        let guest = match known.remove(name) {
            Some(Known::Running(guest)) => match guest.owner().manager() {
                Some(by) => return Err(foreign(name, by)),
                None => guest,
            },
            Some(Known::Foreign { by, .. }) => return Err(foreign(name, by)),
            Some(Known::Ended(_) | Known::Described(_)) => {
                // Reports where the guest is, if it is elsewhere.
                manager.reserve(name).await?;
                return Err(ApiError::new(
                    ErrorCode::GuestState,
                    format!("{name} does not run here"),
                ));
            }
            Some(Known::Damaged { why, .. }) => return Err(damaged(name, &why)),
            None => return Err(unknown(name)),
        };
        let reservation = match stop.force {
            // A copy that must not run here can be ended.
            true => manager.reserve_to_end(name).await?,
            false => manager.reserve(name).await?,
        };
        self.keep_description(guest.description())?;
        let parts = self.parts.clone();
        let ending = tokio::spawn(async move {
            let ended = end(&parts, &guest, stop.force).await;
            drop(reservation);
            ended
        });
        ending
            .await
            .map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))??;
        tracing::info!(guest = %name, force = stop.force, "stopped");
        self.get(manager, name).await
    }

    /// Resumes a guest that a move has left paused.
    pub(crate) async fn resume(
        &self,
        manager: &Arc<Manager>,
        name: &str,
    ) -> Result<Guest, ApiError> {
        self.require(name)?;
        let (resuming, called) = (manager.clone(), name.to_owned());
        // Runs to its end even if the client no longer waits for the answer.
        let resumed = tokio::spawn(async move { resuming.resume(&called).await }).await;
        resumed.map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))??;
        self.get(manager, name).await
    }

    /// Takes back the right to run a guest from a host that never comes back.
    pub(crate) async fn reclaim(
        &self,
        manager: &Arc<Manager>,
        name: &str,
        reclaim: ReclaimGuest,
    ) -> Result<Guest, ApiError> {
        // One that came here and moved on left no description.
        if manager.right(name).await.generation.is_none() {
            self.require(name)?;
        }
        let (taking, called) = (manager.clone(), name.to_owned());
        // Runs to its end even if the client no longer waits for the answer.
        let taken = tokio::spawn(async move { taking.reclaim(&called, &reclaim).await }).await;
        taken.map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))??;
        match self.known()?.get(name) {
            Some(known) => Ok(self.show(manager, known).await),
            None => Ok(Guest {
                generation: manager.right(name).await.generation,
                ..empty(name, GuestState::Stopped)
            }),
        }
    }

    /// Lets a guest run here from its replica.
    pub(crate) async fn fail_over(
        &self,
        manager: &Arc<Manager>,
        name: &str,
        how: FailOver,
    ) -> Result<FailedOver, ApiError> {
        let (taking, called, asked) = (manager.clone(), name.to_owned(), how.clone());
        // Runs to its end even if the client no longer waits for the answer.
        let taken = tokio::spawn(async move { taking.fail_over(&called, &asked).await }).await;
        let taken = taken.map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
        let (description, mut done) = taken?;
        if description.hardware.is_some() {
            let text = "it was started by another program: let that start it, with these disks";
            done.trouble = (!how.no_start).then(|| text.to_owned());
            return Ok(done);
        }
        self.keep_description(&description)?;
        if !how.no_start {
            match self.start(manager, StartGuest::Name(name.to_owned())).await {
                Ok(_) => done.started = true,
                Err(error) => done.trouble = Some(error.to_string()),
            }
        }
        Ok(done)
    }

    /// Returns the QEMUs of this host, with the versions of those that answer.
    pub(crate) async fn qemus(&self) -> Vec<Qemu> {
        let found = self.parts.prober.capabilities().await;
        let version = |label: &str| {
            let found = found.as_ref().ok()?;
            Some(found.emulators.get(label)?.version.clone())
        };
        let emulators = &self.parts.config.hypervisor.qemu.emulators;
        emulators
            .iter()
            .map(|(label, path)| Qemu {
                name: label.clone(),
                version: version(label),
                path: path.display().to_string(),
            })
            .collect()
    }

    /// Returns whether guests run with KVM here.
    pub(crate) async fn kvm(&self) -> Option<bool> {
        let (accelerator, _) = self.parts.prober.accelerator().await.ok()?;
        Some(accelerator == Accelerator::Kvm)
    }

    /// Returns how many guests have a QEMU here.
    pub(crate) fn running(&self) -> Option<u32> {
        let known = self.known().ok()?;
        let running = known
            .values()
            .filter(|known| matches!(known, Known::Running(_)));
        u32::try_from(running.count()).ok()
    }

    /// Returns all known guests, by name.
    pub(crate) fn known(&self) -> Result<BTreeMap<String, Known>, ApiError> {
        let state = &self.parts.config.state;
        let failed = |error: io::Error| {
            ApiError::new(
                ErrorCode::Internal,
                format!(
                    "the state folder {} cannot be read: {error}",
                    state.display()
                ),
            )
        };
        let mut known = BTreeMap::new();
        for description in self.stored().map_err(failed)? {
            let name = description.name.clone();
            known.insert(name, Known::Described(Box::new(description)));
        }
        for found in self.parts.guests.list().map_err(failed)? {
            let (name, found) = match found {
                Found::Running(guest) => (guest.name().to_owned(), Known::Running(guest)),
                Found::Ended(guest) => (guest.name().to_owned(), Known::Ended(guest)),
                Found::Foreign { name, by, why } => {
                    (name.clone(), Known::Foreign { name, by, why })
                }
                Found::Damaged { name, why, .. } => (name.clone(), Known::Damaged { name, why }),
            };
            known.insert(name, found);
        }
        Ok(known)
    }

    fn stored(&self) -> io::Result<Vec<GuestDescription>> {
        let folder = descriptions::folder(&self.parts.config.state);
        let entries = match std::fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        let mut found = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "toml") {
                continue;
            }
            let text = match std::fs::metadata(&path) {
                Ok(metadata) if metadata.len() > DESCRIPTION_BYTES_MAX => {
                    Err("it is too large".to_owned())
                }
                _ => std::fs::read_to_string(&path).map_err(|error| error.to_string()),
            };
            let read =
                text.and_then(|text| description::parse(&text).map_err(|error| error.to_string()));
            match read {
                Ok(description) => found.push(description),
                Err(error) => {
                    tracing::warn!(file = %path.display(), %error, "not a guest's description");
                }
            }
        }
        Ok(found)
    }

    fn keep_description(&self, description: &GuestDescription) -> Result<(), ApiError> {
        keep_description(&self.parts, description)
    }

    async fn show(&self, manager: &Manager, known: &Known) -> Guest {
        let (mut guest, found, generation) = match known {
            Known::Running(found) => (
                described(found.description(), GuestState::Running),
                Some(found),
                Some(found.generation()),
            ),
            Known::Ended(found) => {
                let mut guest = described(found.description(), GuestState::Stopped);
                guest.state_detail = Some("its QEMU ended by itself".to_owned());
                (guest, None, Some(found.generation()))
            }
            Known::Described(description) => {
                (described(description, GuestState::Stopped), None, None)
            }
            Known::Foreign { name, by, why } => {
                let mut guest = empty(name, GuestState::Running);
                guest.owner = match by {
                    guest::Manager::Libvirt => GuestOwner::Libvirt,
                    guest::Manager::Proxmox => GuestOwner::Proxmox,
                };
                guest.obstacle = Some(why.clone());
                (guest, None, None)
            }
            Known::Damaged { name, why } => {
                let mut guest = empty(name, GuestState::Unresponsive);
                guest.state_detail = Some(format!("its folder is damaged: {why}"));
                (guest, None, None)
            }
        };
        let right = manager.right(&guest.name).await;
        guest.generation = right.generation.or(generation);
        guest.migration = right.moving.map(|(id, _)| id.to_string());
        if let Some(found) = found {
            guest.attached = found.is_attached();
            guest.owner = match found.owner() {
                Owner::Longhaul => GuestOwner::Longhaul,
                Owner::Attached => GuestOwner::Attached,
                Owner::Libvirt => GuestOwner::Libvirt,
                Owner::Proxmox => GuestOwner::Proxmox,
            };
            guest.pid = found.pid().and_then(|pid| u32::try_from(pid).ok());
            let channels = found.channels().iter();
            let shown =
                |(name, socket): (&String, &PathBuf)| (name.clone(), socket.display().to_string());
            guest.channels = channels.map(shown).collect();
            if found.is_paused() {
                guest.state = GuestState::Paused;
            }
            // During a move the migration holds the QEMU's only control connection. That of another
            // program is not used without need: libvirt marks its guest for it.
            if right.moving.is_none() && found.owner().manager().is_none() {
                fill_in(&mut guest, ask(&*self.parts.guests, found).await);
            }
        }
        let state = &self.parts.config.state;
        guest.coming = block_in_place(|| coming_bases(state, &guest.name));
        apply_right(&mut guest, right);
        guest
    }
}

/// Saves a description for the next start.
fn keep_description(parts: &Parts, description: &GuestDescription) -> Result<(), ApiError> {
    let failed = |error: &dyn Display| {
        ApiError::new(
            ErrorCode::Internal,
            format!("{}'s description cannot be kept: {error}", description.name),
        )
    };
    let text = toml::to_string(description).map_err(|error| failed(&error))?;
    let state = &parts.config.state;
    let folder = descriptions::folder(state);
    let path = descriptions::file(state, &description.name);
    std::fs::create_dir_all(&folder)
        .and_then(|()| atomic_file::write(&path, text.as_bytes()))
        .map_err(|error| failed(&error))
}

async fn launch(
    parts: &Parts,
    description: &GuestDescription,
    right: &Right,
) -> Result<(), ApiError> {
    let name = &description.name;
    let config = &parts.config.hypervisor;
    let found = parts.guests.list();
    let found = found.map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
    let mut generation = right.generation;
    for found in found {
        match found {
            Found::Running(guest) if guest.name() == name => return Err(runs_already(name)),
            Found::Ended(guest) if guest.name() == name => {
                generation = generation.or(Some(guest.generation()));
                let ended = parts.launcher.end(name, None);
                ended
                    .await
                    .map_err(|error| ApiError::new(ErrorCode::Qemu, error.to_string()))?;
            }
            _ => {}
        }
    }
    let capabilities = parts.prober.capabilities().await.map_err(|error| {
        ApiError::new(ErrorCode::Refused, error.to_string())
            .hint("name a QEMU under [qemu.emulators] in the agent's configuration")
    })?;
    let checks = can_run(&parts.config.name, description, None, &capabilities);
    if let Some(check) = checks
        .into_iter()
        .find(|check| check.verdict == Verdict::Refused)
    {
        let error = ApiError::new(ErrorCode::Refused, check.text);
        return Err(match check.hint {
            Some(hint) => error.hint(hint),
            None => error,
        });
    }
    config.qemu.check_user().map_err(|error| {
        let text = format!("{} cannot be started: {error}", description.name);
        ApiError::new(ErrorCode::Refused, text).hint(RunsAsRoot::HINT)
    })?;
    let emulator = capabilities
        .emulator_for(&description.machine)
        .unwrap_or(&capabilities.default);
    let bases = block_in_place(|| base_images::for_launch(config, description))?;
    let sizes = block_in_place(|| disk_sizes(config, description))?;
    let launch = Launch {
        description,
        role: Role::Fresh,
        emulator,
        accelerator: capabilities.accelerator,
        generation: generation.unwrap_or(0),
        bases: &bases,
        sizes: &sizes,
    };
    keep_description(parts, description)?;
    launch.run(config).await.map_err(|error| {
        let code = match &error {
            LaunchError::Description(_) => ErrorCode::InvalidRequest,
            LaunchError::Resolve(_)
            | LaunchError::Emulator(_)
            | LaunchError::User(_)
            | LaunchError::Path(_) => ErrorCode::Refused,
            LaunchError::Exists { .. } => ErrorCode::AlreadyExists,
            _ => ErrorCode::Qemu,
        };
        ApiError::new(code, error.to_string())
    })?;
    Ok(())
}

async fn end(parts: &Parts, guest: &Handle, force: bool) -> Result<(), ApiError> {
    let name = guest.name();
    let failed = |error: &dyn Display| ApiError::new(ErrorCode::Qemu, error.to_string());
    if !force {
        let lease = parts.guests.lease(guest, COMMAND_TIMEOUT).await;
        let lease = lease.map_err(|error| {
            failed(&error).hint(format!("longhaul guests stop --force {name} ends its QEMU"))
        })?;
        let qmp = lease.qmp();
        qmp.query("system_powerdown")
            .await
            .map_err(|error| failed(&error))?;
        // So that the guest can be queried while it shuts down.
        drop(lease);
        if timeout(SHUT_DOWN_WAIT, guest.ended()).await.is_err() {
            let waited = SHUT_DOWN_WAIT.as_secs();
            return Err(ApiError::new(
                ErrorCode::GuestState,
                format!("{name} was asked to shut down and still runs after {waited} s"),
            )
            .hint(format!(
                "a guest without ACPI does not hear it: longhaul guests stop --force {name} ends \
                 its QEMU, as if the power failed"
            )));
        }
    }
    let ended = parts.launcher.end(name, None).await;
    ended.map_err(|error| failed(&error))
}

async fn ask(guests: &dyn GuestManager, guest: &Handle) -> Result<Said, String> {
    let lease = guests.lease(guest, ASK_WAIT).await;
    let lease = lease.map_err(|error| error.to_string())?;
    let qmp = lease.qmp();
    let answer = async |command| {
        let answer = qmp.execute(command, json!({}), ASK_WAIT).await;
        answer.map_err(|error| error.to_string())
    };
    let status = answer("query-status").await?;
    let kvm = answer("query-kvm").await?;
    Ok(Said {
        status: status["status"].as_str().unwrap_or("unknown").to_owned(),
        qemu: qmp.version().to_string(),
        kvm: kvm.get("enabled").and_then(Value::as_bool),
    })
}

fn fill_in(guest: &mut Guest, said: Result<Said, String>) {
    match said {
        Ok(said) => {
            guest.qemu = Some(said.qemu);
            let name = |kvm| if kvm { "kvm" } else { "tcg" };
            guest.accelerator = said.kvm.map(|kvm| name(kvm).to_owned());
            if said.status != "running" {
                guest.state = GuestState::Paused;
                guest.state_detail = Some(said.status).filter(|status| status != "paused");
            }
        }
        Err(error) => {
            guest.state = GuestState::Unresponsive;
            guest.state_detail = Some(error);
        }
    }
}

fn apply_right(guest: &mut Guest, right: Right) {
    if let Some((_, side)) = right.moving {
        guest.state = match side {
            Side::Source => GuestState::MovingOut,
            Side::Destination => GuestState::MovingIn,
        };
    }
    let (state, detail) = match right.holder {
        Holder::Here => return,
        Holder::Elsewhere(host) => (GuestState::Elsewhere, format!("on {host}")),
        Holder::InDoubt(host) => (GuestState::InDoubt, format!("handed to {host}")),
        Holder::Unknown(why) => (GuestState::InDoubt, why),
    };
    guest.state = state;
    guest.state_detail = Some(detail);
}

fn empty(name: &str, state: GuestState) -> Guest {
    Guest {
        name: name.to_owned(),
        state,
        state_detail: None,
        qemu: None,
        machine_type: None,
        accelerator: None,
        vcpus: None,
        memory_bytes: None,
        pid: None,
        attached: false,
        owner: GuestOwner::Longhaul,
        obstacle: None,
        generation: None,
        migration: None,
        coming: None,
        channels: BTreeMap::new(),
    }
}

fn described(description: &GuestDescription, state: GuestState) -> Guest {
    Guest {
        machine_type: Some(description.machine.clone()),
        vcpus: Some(description.vcpus),
        memory_bytes: description.memory_mib.checked_mul(1 << 20),
        ..empty(&description.name, state)
    }
}

/// Returns the error for an unknown guest.
pub(crate) fn unknown(name: &str) -> ApiError {
    let name: String = name.chars().take(80).collect();
    ApiError::new(
        ErrorCode::GuestUnknown,
        format!("no guest called {name:?} is known here"),
    )
    .hint("`longhaul guests` lists them; `longhaul guests start FILE.toml` makes one known")
}

fn runs_already(name: &str) -> ApiError {
    ApiError::new(ErrorCode::GuestState, format!("{name} runs here already"))
}

/// Returns the error for an order that only the program may carry out that manages a guest.
fn foreign(name: &str, by: guest::Manager) -> ApiError {
    let error = ApiError::new(ErrorCode::Refused, format!("{name} is a guest of {by}"));
    error.hint(match by {
        guest::Manager::Libvirt => format!("virsh start {name}, virsh shutdown {name}"),
        guest::Manager::Proxmox => "qm list, qm start VMID, qm shutdown VMID".to_owned(),
    })
}

fn damaged(name: &str, why: &str) -> ApiError {
    ApiError::new(
        ErrorCode::Internal,
        format!("what is kept of {name} is damaged: {why}"),
    )
}
