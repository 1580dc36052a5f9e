//! Quotas: the use of this host by each peer. An offer is counted before anything is created for
//! it. A refusal names the limit.
//!
//! [`crate::limits::peer_claims`] checks the ownership of attempts, and
//! [`crate::limits::progress_watchdog`] the progress of arrivals. The limits come from the
//! configuration ([`crate::host::peer_limits`]).

use crate::context::Context;
use crate::host::descriptions;
use crate::host::peer_limits::PeerLimits;
use crate::limits::allowances::{Arriving, State};
use crate::limits::shared_dedup::Others;
use longhaul_hypervisor::config::Network;
use longhaul_hypervisor::description;
use longhaul_hypervisor::manager::Found;
use longhaul_hypervisor::shared_folders;
use longhaul_protocol::guest::{GuestDescription, Nic};
use longhaul_protocol::message::{Offer, Refusal, RefusalCode};
use longhaul_protocol::units::show_bytes;
use longhaul_protocol::{Generation, HostId, MigrationId};
use longhaul_storage::{Holder, Right, file_name};
use longhaul_transport::TrustedHost;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::block_in_place;

pub(crate) use crate::limits::progress_watchdog::Pace;

/// A generation that no guest reaches by migrations.
pub(crate) const GENERATION_MAX: u64 = 1 << 62;

/// An arriving guest's part of its sender's quota. Returned when this is dropped.
pub(crate) struct Admission {
    context: Arc<Context>,
    migration: MigrationId,
    peer: HostId,
    workers: Arc<Semaphore>,
    limits: PeerLimits,
}

impl Admission {
    /// Returns the host that sends the guest.
    pub(crate) fn sender(&self) -> HostId {
        self.peer
    }

    /// Returns the resources that the arrival may use.
    pub(crate) fn means(&self) -> Means {
        Means {
            others: self.context.gangs.others(self.peer),
            workers: self.workers.clone(),
            pace: self.pace(),
        }
    }

    /// Returns the guests that arrive from the same sender. Frames of this guest may refer to their
    /// memory.
    pub(crate) fn others(&self) -> Others {
        self.context.gangs.others(self.peer)
    }

    /// Waits for one of the sender's worker threads.
    pub(crate) async fn worker(&self) -> Option<OwnedSemaphorePermit> {
        self.workers.clone().acquire_owned().await.ok()
    }

    /// Returns the watchdog of an arrival that begins now.
    fn pace(&self) -> Pace {
        Pace::new(
            self.limits.stall,
            self.limits.move_time,
            tokio::time::Instant::now(),
        )
    }
}

/// The resources that an arrival may use.
pub(crate) struct Means {
    /// The guests that arrive from the same sender. Frames of this guest may refer to their memory.
    pub(crate) others: Others,
    /// The sender's worker threads.
    pub(crate) workers: Arc<Semaphore>,
    /// The watchdog of the source's progress.
    pub(crate) pace: Pace,
}

impl Means {
    /// Returns the resources for a guest that already runs here.
    pub(crate) fn of_one_that_is_here(context: &Context, peer: HostId, host: &str) -> Self {
        let limits = context.allowances.limits_of(peer, host);
        Self {
            others: context.gangs.others(peer),
            workers: Arc::new(Semaphore::new(limits.workers as usize)),
            pace: Pace::new(limits.stall, limits.move_time, tokio::time::Instant::now()),
        }
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        let mut state = self.context.allowances.lock();
        state.arriving.remove(&self.migration);
    }
}

pub(crate) fn path_of(context: &Context, migration: MigrationId) -> PathBuf {
    let journals = context.parts.config.state.join("journal");
    journals.join(file_name(migration))
}

/// Admits an offered guest, or refuses it and names the rule or limit. Nothing is created for the
/// offer before this. None of its texts is used before it is validated.
pub(crate) async fn admit(
    context: &Arc<Context>,
    peer: &TrustedHost,
    offer: &Offer,
) -> Result<Admission, Refusal> {
    // The peer's worker limit bounds the threads that concurrent offers use.
    let workers = &context.allowances;
    let workers = workers.with_use(peer, |used, _| used.workers.clone());
    let _worker = workers.acquire().await;
    block_in_place(|| look_at(context, peer, offer))
}

fn look_at(
    context: &Arc<Context>,
    peer: &TrustedHost,
    offer: &Offer,
) -> Result<Admission, Refusal> {
    let allowances = &context.allowances;
    let here = &context.parts.config.name;
    let limits = allowances.limits(peer);
    let excess = Excess {
        here,
        peer: &peer.name,
    };
    if !allowances.with_use(peer, |used, now| used.attempts.take(now)) {
        return Err(excess.attempts(limits));
    }
    sound(context, offer)?;
    named(context, &excess, limits, &offer.guest)?;
    let mut state = allowances.lock();
    if state.arriving.contains_key(&offer.migration) {
        let text = format!("{here} is busy with migration {}", offer.migration);
        return Err(refusal(RefusalCode::Busy, text, None));
    }
    crate::limits::peer_claims::fits(&path_of(context, offer.migration), offer, peer.id).map_err(
        |text| {
            refusal(
                RefusalCode::Invalid,
                format!("{here} cannot take part: {text}"),
                None,
            )
        },
    )?;
    let arriving = Arriving {
        peer: peer.id,
        guest: offer.guest.name.clone(),
        memory_bytes: offer.guest.memory_bytes(),
        vcpus: offer.guest.vcpus,
    };
    room(context, &state, &excess, limits, &arriving)?;
    state.arriving.insert(offer.migration, arriving);
    drop(state);
    Ok(Admission {
        context: context.clone(),
        migration: offer.migration,
        peer: peer.id,
        workers: allowances.with_use(peer, |used, _| used.workers.clone()),
        limits: limits.clone(),
    })
}

/// Returns why an offer of this guest would not be admitted now, as far as that is known before an
/// offer. Counts nothing.
pub(crate) fn outlook(
    context: &Context,
    peer: &TrustedHost,
    guest: &GuestDescription,
    generation: Option<Generation>,
) -> Vec<Refusal> {
    let allowances = &context.allowances;
    let limits = allowances.limits(peer);
    let excess = Excess {
        here: &context.parts.config.name,
        peer: &peer.name,
    };
    let mut refusals = Vec::new();
    if !allowances.with_use(peer, |used, now| used.attempts.has_one(now)) {
        refusals.push(excess.attempts(limits));
    }
    refusals.extend(is_elsewhere(context, &guest.name).err());
    refusals.extend(generation.and_then(|known| refuse_older(context, &guest.name, known).err()));
    let new = Arriving {
        peer: peer.id,
        guest: guest.name.clone(),
        memory_bytes: guest.memory_bytes(),
        vcpus: guest.vcpus,
    };
    let state = allowances.lock();
    refusals.extend(room(context, &state, &excess, limits, &new).err());
    refusals
}

/// Builds refusals that name a limit.
struct Excess<'a> {
    here: &'a str,
    peer: &'a str,
}

impl Excess<'_> {
    fn attempts(&self, limits: &PeerLimits) -> Refusal {
        let most = limits.attempts_per_hour;
        self.of("attempts_per_hour", format!("begin {most} moves an hour"))
    }

    fn of(&self, key: &str, may: String) -> Refusal {
        let Self { here, peer } = self;
        let text = format!("{here} lets {peer} {may}, and that is reached");
        let hint = format!(
            "wait, or raise `{key}` in {here}'s agent.toml, under [limits] or \
             [hosts.{peer}.limits]"
        );
        refusal(RefusalCode::Busy, text, Some(hint))
    }
}

fn refusal(code: RefusalCode, text: String, hint: Option<String>) -> Refusal {
    Refusal { code, text, hint }
}

/// Checks that guests of this peer may use everything of this host that a description names.
pub(crate) fn may_name(
    context: &Context,
    peer: &TrustedHost,
    guest: &GuestDescription,
) -> Result<(), Refusal> {
    let excess = Excess {
        here: &context.parts.config.name,
        peer: &peer.name,
    };
    named(context, &excess, context.allowances.limits(peer), guest)
}

/// Checks an offer without counting anything.
fn sound(context: &Context, offer: &Offer) -> Result<(), Refusal> {
    let here = &context.parts.config.name;
    let invalid = |text: String| refusal(RefusalCode::Invalid, format!("{here}: {text}"), None);
    description::check(&offer.guest).map_err(|error| invalid(error.to_string()))?;
    is_elsewhere(context, &offer.guest.name)
}

/// Returns the right to run a guest, as this host knows it.
fn right_of(context: &Context, guest: &str) -> Result<Option<Right>, Refusal> {
    context.rights.get(guest).map_err(|error| {
        let here = &context.parts.config.name;
        let text = format!("{here} cannot tell who may run {guest}: {error}");
        refusal(RefusalCode::Busy, text, None)
    })
}

/// Checks that this host itself does not have the right to run a guest.
fn is_elsewhere(context: &Context, guest: &str) -> Result<(), Refusal> {
    let here = &context.parts.config.name;
    match right_of(context, guest)?.map(|right| right.holder) {
        Some(Holder::Here) => Err(refusal(
            RefusalCode::Busy,
            format!("{here} itself has the right to run {guest}: it cannot come from elsewhere"),
            Some(format!("on {here}: longhaul guests")),
        )),
        Some(Holder::InDoubt { host }) => Err(refusal(
            RefusalCode::Busy,
            format!("{here} does not know yet whether {guest} runs at {host}"),
            Some(format!("on {here}: longhaul migrations")),
        )),
        // A local guest that has never moved. While it is stopped, only its description exists.
        None if descriptions::file(&context.parts.config.state, guest).exists() => Err(refusal(
            RefusalCode::Busy,
            format!("{here} has a guest called {guest} of its own, which is stopped"),
            Some(format!(
                "rename one of the two, or remove it on {here}: longhaul guests"
            )),
        )),
        Some(Holder::Elsewhere { .. }) | None => Ok(()),
    }
}

/// Checks that this host knows no later copy of a guest. A generation counts the moves of a guest.
pub(crate) fn refuse_older(
    context: &Context,
    guest: &str,
    generation: Generation,
) -> Result<(), Refusal> {
    let here = &context.parts.config.name;
    if generation.0 > GENERATION_MAX {
        let text = format!("{here}: no guest has moved that often");
        return Err(refusal(RefusalCode::Invalid, text, None));
    }
    let right = right_of(context, guest)?;
    match right.filter(|right| right.generation > generation) {
        None => Ok(()),
        Some(right) => {
            let text = format!(
                "{here} knows {guest} in generation {}, and this is generation {}: an older copy",
                right.generation.0, generation.0
            );
            let hint = format!("end the older copy; on {here}: longhaul guests");
            Err(refusal(RefusalCode::Invalid, text, Some(hint)))
        }
    }
}

fn named(
    context: &Context,
    excess: &Excess<'_>,
    limits: &PeerLimits,
    guest: &GuestDescription,
) -> Result<(), Refusal> {
    listed(excess, limits, guest)?;
    match limits.networks.is_some() {
        true => own_vlans(context, excess, guest),
        false => Ok(()),
    }
}

/// Checks that a peer's limits list what a guest uses of which a replica would be kept.
pub(crate) fn may_use(
    context: &Context,
    peer: &TrustedHost,
    guest: &GuestDescription,
) -> Result<(), Refusal> {
    let limits = context.allowances.limits(peer);
    let excess = Excess {
        here: &context.parts.config.name,
        peer: &peer.name,
    };
    listed(&excess, limits, guest)
}

/// Checks that a peer's limits list every image, network and folder of a guest.
fn listed(
    excess: &Excess<'_>,
    limits: &PeerLimits,
    guest: &GuestDescription,
) -> Result<(), Refusal> {
    let refused = |key: &str, name: &str| {
        let Excess { here, peer } = excess;
        refusal(
            RefusalCode::NotAllowed,
            format!("{here} does not let guests of {peer} use {name} ({key})"),
            Some(format!(
                "add it to `{key}` in {here}'s agent.toml, under [limits] or [hosts.{peer}.limits]"
            )),
        )
    };
    let other = |allowed: &Option<Vec<String>>, name: &str| {
        let is_listed = |list: &Vec<String>| list.iter().any(|listed| listed == name);
        allowed.as_ref().is_some_and(|list| !is_listed(list))
    };
    if let Some(name) = guest.images().find(|name| other(&limits.images, name)) {
        return Err(refused("images", name));
    }
    let mut nics = guest.nics.iter().map(|nic| &nic.network);
    if let Some(name) = nics.find(|name| other(&limits.networks, name)) {
        return Err(refused("networks", name));
    }
    if let Some(name) = shared_folders(guest).find(|name| other(&limits.folders, name)) {
        return Err(refused("folders", name));
    }
    Ok(())
}

/// Refuses VLANs that a peer chooses which may only use some networks: a network is then what this
/// host's configuration says.
fn own_vlans(
    context: &Context,
    excess: &Excess<'_>,
    guest: &GuestDescription,
) -> Result<(), Refusal> {
    let networks = context.parts.config.hypervisor.all_networks();
    let chosen = |nic: &&Nic| {
        let vlans = nic.port.as_ref().is_some_and(|port| !port.vlans.is_empty());
        let says = match networks.get(&nic.network) {
            Some(Network::Bridge(port)) => port.vlan.is_some(),
            _ => true,
        };
        vlans && !says
    };
    let Some(nic) = guest.nics.iter().find(chosen) else {
        return Ok(());
    };
    let (Excess { here, peer }, network) = (excess, &nic.network);
    let text = format!(
        "{here} lets guests of {peer} use only some networks, and card {} asks for VLANs itself",
        nic.mac
    );
    let hint = format!("write vlan = ... for {network} under [networks] in {here}'s agent.toml");
    Err(refusal(RefusalCode::NotAllowed, text, Some(hint)))
}

/// Checks that the peer's limits allow one more guest.
fn room(
    context: &Context,
    state: &State,
    excess: &Excess<'_>,
    limits: &PeerLimits,
    new: &Arriving,
) -> Result<(), Refusal> {
    let arriving: Vec<&Arriving> = state
        .arriving
        .values()
        .filter(|arriving| arriving.peer == new.peer)
        .collect();
    if arriving.len() >= limits.arriving as usize {
        let may = format!("have {} guests on their way at once", limits.arriving);
        return Err(excess.of("arriving", may));
    }
    let (mut guests, mut memory, mut vcpus) = (arriving.len(), 0, 0);
    for one in &arriving {
        memory += one.memory_bytes;
        vcpus += one.vcpus;
    }
    let is_arriving = |name: &str| arriving.iter().any(|one| one.guest == name);
    let counts = |name: &str| !is_arriving(name) && !context.retained_qemus.has(name);
    let found = context.parts.guests.list().unwrap_or_default();
    let sent = |found: &&Found| found.sender() == Some(new.peer) && counts(found.name());
    for found in found.iter().filter(sent) {
        if let Some(description) = found.description() {
            guests += 1;
            memory = memory.saturating_add(description.memory_bytes());
            vcpus += description.vcpus;
        }
    }
    if guests >= limits.guests as usize {
        let may = format!("have {} guests here", limits.guests);
        return Err(excess.of("guests", may));
    }
    if memory.saturating_add(new.memory_bytes) > limits.memory_bytes {
        let may = format!(
            "have guests with {} of memory here",
            show_bytes(limits.memory_bytes)
        );
        return Err(excess.of("memory", may));
    }
    if vcpus.saturating_add(new.vcpus) > limits.vcpus {
        let may = format!("have guests with {} virtual CPUs here", limits.vcpus);
        return Err(excess.of("vcpus", may));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_a_guest_uses_has_to_be_listed() {
        let guest: GuestDescription = toml::from_str(
            "name = \"web-7\"\nmachine = \"pc-q35-7.2\"\ncpu = \"qemu64\"\nvcpus = 1\n\
             memory_mib = 64\ndisks = [{ name = \"vda\", image = \"own\" }, \
             { name = \"backing0\", image = \"template\", read_only = true }]\n\
             nics = [{ network = \"office\", mac = \"52:54:00:00:00:01\" }]\n\
             [hardware.settings]\n\"backing.vda\" = \"backing0\"\n\
             \"fsdev.000.id\" = \"f\"\n\"fsdev.000.folder\" = \"public\"\n",
        )
        .unwrap();
        let excess = Excess {
            here: "paris",
            peer: "lyon",
        };
        let all = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect());
        let mut limits = PeerLimits::defaults(1 << 30, 4);
        assert_eq!(listed(&excess, &limits, &guest), Ok(()));
        limits.images = all(&["own", "template"]);
        limits.networks = all(&["office"]);
        limits.folders = all(&["public"]);
        assert_eq!(listed(&excess, &limits, &guest), Ok(()));
        for (key, name) in [
            ("images", "template"),
            ("networks", "office"),
            ("folders", "public"),
        ] {
            let mut limits = limits.clone();
            match key {
                "images" => limits.images = all(&["own"]),
                "networks" => limits.networks = all(&["other"]),
                _ => limits.folders = all(&[]),
            }
            let refusal = listed(&excess, &limits, &guest).unwrap_err();
            assert_eq!(refusal.code, RefusalCode::NotAllowed);
            assert!(
                refusal.text.ends_with(&format!("use {name} ({key})")),
                "{refusal:?}"
            );
            assert!(
                refusal
                    .hint
                    .is_some_and(|hint| hint.contains(&format!("`{key}`")))
            );
        }
    }
}
