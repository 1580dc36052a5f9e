//! Determines what this host can run, and checks a given guest against it.

mod following;
mod huge_pages;
mod modules;

use crate::config::{AcceleratorChoice, HostConfig, Network};
use crate::description;
use crate::guest::{Found, find_all};
use crate::hardware;
use crate::hardware::wiring::Forward;
use crate::probe::{self, ProbeError};
use crate::tested;
use longhaul_protocol::files;
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::machine::{Device, Machine};
use longhaul_protocol::message::{Check, Verdict};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::Mutex;

pub use following::{QemuAccount, USERFAULTFD_HINT, has_huge_pages};

/// The executor of a guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// The processor, by KVM.
    Kvm,
    /// QEMU's own translator.
    Tcg,
}

/// What this host can run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Label of the preferred emulator.
    pub default: String,
    /// The working emulators, by label.
    pub emulators: BTreeMap<String, Emulator>,
    /// The emulators that failed, by label, with the reasons.
    pub broken: BTreeMap<String, String>,
    /// The executor of the guests' instructions.
    pub accelerator: Accelerator,
    /// Why it is not KVM, where KVM was tried.
    pub no_kvm: Option<String>,
    /// Memory for guests.
    pub memory: Memory,
    /// Free huge pages, in bytes, by the size of a page in MiB.
    pub huge_pages: BTreeMap<u32, u64>,
    /// Names of the images.
    pub images: BTreeSet<String>,
    /// Names of the networks.
    pub networks: BTreeSet<String>,
    /// ... of those that are QEMU's user network, and whether that reaches what this host reaches.
    pub user_networks: BTreeMap<String, bool>,
    /// Names of the firmware images.
    pub firmware: BTreeSet<String>,
    /// Names of the kernels.
    pub kernels: BTreeSet<String>,
    /// Names of the folders that guests may share with this host, and whether each is there.
    pub folders: BTreeMap<String, bool>,
}

/// The capabilities of one emulator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Emulator {
    /// Its version, such as `10.0.2`.
    pub version: String,
    /// The machine types that it can build, by name.
    pub machine_types: BTreeMap<String, MachineType>,
    /// The CPU models that it knows, by name, with the features of each that it cannot provide.
    pub cpu_models: BTreeMap<String, Vec<String>>,
    /// The device models of guests that it does not have: some are in modules of their own.
    pub absent_models: BTreeSet<String>,
}

/// A machine type that an emulator can build.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineType {
    /// The maximum number of virtual CPUs of such a machine.
    pub cpus_max: u64,
}

/// Memory for guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Memory available now, in bytes.
    pub available_bytes: u64,
    /// The limit for all guests together, in bytes.
    pub limit_bytes: Option<u64>,
    /// Memory of all guests of this host together, in bytes.
    pub guests_bytes: u64,
}

/// Why the host's capabilities cannot be determined.
#[derive(Debug, thiserror::Error)]
pub enum CapabilitiesError {
    /// The configuration names KVM, which does not work.
    #[error(
        "the configuration asks for KVM, and it does not work here: {0}; write accelerator = \
         \"auto\" or \"tcg\""
    )]
    NoKvm(String),
    /// No emulator works.
    #[error("no emulator of this host works: {0}")]
    NoEmulator(String),
    /// The system cannot be queried.
    #[error("cannot see what this host has: {0}")]
    Host(#[from] io::Error),
}

/// Caches the capabilities of emulators while their files do not change.
#[derive(Debug, Clone)]
pub struct Prober {
    config: Arc<HostConfig>,
    cache: Arc<Mutex<Cache>>,
}

/// The results, kept in the state folder as well.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Cache {
    emulators: BTreeMap<String, Emulator>,
    kvm: BTreeMap<String, Result<(), String>>,
}

impl Accelerator {
    /// Returns QEMU's name for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Prober {
    /// Creates a prober with the content of the state folder.
    pub fn new(config: Arc<HostConfig>) -> Self {
        let cache = fs::read(cache_file(&config.state))
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default();
        Self {
            config,
            cache: Arc::new(Mutex::new(cache)),
        }
    }

    /// Returns what this host can run now.
    pub async fn capabilities(&self) -> Result<Capabilities, CapabilitiesError> {
        let (accelerator, no_kvm) = self.accelerator().await?;
        let mut emulators = BTreeMap::new();
        let mut broken = BTreeMap::new();
        for (label, path) in &self.config.qemu.emulators {
            match self.emulator(path, accelerator).await {
                Ok(emulator) => {
                    emulators.insert(label.clone(), emulator);
                }
                Err(error) => {
                    tracing::warn!(label, %error, "emulator cannot be used");
                    broken.insert(label.clone(), error.to_string());
                }
            }
        }
        if emulators.is_empty() {
            let reasons: Vec<String> = broken.into_values().collect();
            return Err(CapabilitiesError::NoEmulator(reasons.join("; ")));
        }
        Ok(Capabilities {
            default: self
                .config
                .default_emulator()
                .unwrap_or_default()
                .to_owned(),
            emulators,
            broken,
            accelerator,
            no_kvm,
            memory: memory(&self.config)?,
            huge_pages: huge_pages::free()?,
            images: self.config.all_images().into_keys().collect(),
            networks: self.config.all_networks().into_keys().collect(),
            user_networks: user_networks(&self.config),
            firmware: self.config.firmware.keys().cloned().collect(),
            kernels: self.config.kernels.keys().cloned().collect(),
            folders: folders(&self.config),
        })
    }

    /// Returns the executor of guests' instructions on this host, and why it is not KVM.
    pub async fn accelerator(&self) -> Result<(Accelerator, Option<String>), CapabilitiesError> {
        let choice = self.config.qemu.accelerator;
        if choice == AcceleratorChoice::Tcg {
            return Ok((Accelerator::Tcg, None));
        }
        let label = self.config.default_emulator().unwrap_or_default();
        let works = match self.config.qemu.emulators.get(label) {
            Some(path) => self.kvm_works(path).await,
            None => Err("no emulator is configured".to_owned()),
        };
        match (works, choice) {
            (Ok(()), _) => Ok((Accelerator::Kvm, None)),
            (Err(why), AcceleratorChoice::Kvm) => Err(CapabilitiesError::NoKvm(why)),
            (Err(why), _) => {
                tracing::info!(why, "guests run with TCG");
                Ok((Accelerator::Tcg, Some(why)))
            }
        }
    }

    async fn kvm_works(&self, path: &Path) -> Result<(), String> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let key = match file_key(path) {
            Ok(key) => format!("{key} {}", boot.trim()),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        let mut cache = self.cache.lock().await;
        if let Some(known) = cache.kvm.get(&key) {
            return known.clone();
        }
        let works = probe::kvm_works(path, &self.config.state).await;
        // Results from before this boot are stale.
        cache.kvm.retain(|key, _| key.ends_with(boot.trim()));
        cache.kvm.insert(key, works.clone());
        self.keep(&cache);
        works
    }

    async fn emulator(
        &self,
        path: &Path,
        accelerator: Accelerator,
    ) -> Result<Emulator, ProbeError> {
        let key = file_key(path).map_err(|source| ProbeError::Start {
            path: path.to_owned(),
            source,
        })?;
        let key = format!("{key} {accelerator}");
        let mut cache = self.cache.lock().await;
        if let Some(known) = cache.emulators.get(&key) {
            return Ok(known.clone());
        }
        let emulator = probe::emulator(path, accelerator).await?;
        let same = format!("{} ", path.display());
        let others = format!(" {accelerator}");
        cache
            .emulators
            .retain(|key, _| !(key.starts_with(&same) && key.ends_with(&others)));
        cache.emulators.insert(key, emulator.clone());
        self.keep(&cache);
        Ok(emulator)
    }

    fn keep(&self, cache: &Cache) {
        let write = || -> io::Result<()> {
            let path = cache_file(&self.config.state);
            let new = path.with_extension("new");
            fs::create_dir_all(&self.config.state)?;
            fs::write(&new, serde_json::to_vec(cache)?)?;
            fs::rename(new, path)
        };
        if let Err(error) = write() {
            tracing::debug!(%error, "what emulators can do is not kept on disk");
        }
    }
}

fn cache_file(state: &Path) -> std::path::PathBuf {
    state.join("emulators.json")
}

/// Returns a key that changes whenever the file does.
fn file_key(path: &Path) -> io::Result<String> {
    let file = fs::metadata(path)?;
    let (seconds, nanos) = (file.mtime(), file.mtime_nsec());
    Ok(format!(
        "{} {} {seconds}.{nanos}",
        path.display(),
        file.len()
    ))
}

fn memory(config: &HostConfig) -> io::Result<Memory> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let available = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok())
        .ok_or_else(|| io::Error::other("/proc/meminfo says nothing of MemAvailable"))?;
    let guests_bytes = find_all(&config.state)?
        .iter()
        .map(|found| match found {
            Found::Running(guest) => guest.description().memory_bytes(),
            Found::Ended(_) | Found::Damaged { .. } => 0,
        })
        .sum();
    Ok(Memory {
        available_bytes: available * 1024,
        limit_bytes: config.qemu.memory_limit,
        guests_bytes,
    })
}

impl Capabilities {
    /// Returns the label of the emulator that a guest would be launched with: the preferred one, or
    /// the newest of those that can build its machine.
    pub fn emulator_for(&self, machine_type: &str) -> Option<&str> {
        let builds = |label: &&String| {
            self.emulators[*label]
                .machine_types
                .contains_key(machine_type)
        };
        let mut labels: Vec<&String> = self.emulators.keys().filter(builds).collect();
        labels.sort_by_key(|label| {
            (
                **label == self.default,
                version(&self.emulators[*label].version),
            )
        });
        labels.pop().map(String::as_str)
    }
}

/// Returns all checks of whether `host` can run a guest; `machine` is that of the guest at its
/// current host.
///
/// The CPU's features are checked as far as the emulator's own list allows. The final check
/// compares the two machines when the destination's QEMU runs ([`Machine::differences`]).
pub fn can_run(
    host: &str,
    description: &GuestDescription,
    machine: Option<&Machine>,
    capabilities: &Capabilities,
) -> Vec<Check> {
    if let Err(error) = description::check(description) {
        // It may be from a peer: nothing in it is shown or looked up.
        return vec![Check {
            verdict: Verdict::Refused,
            text: format!("{host} cannot run this guest: {error}"),
            hint: Some("correct the guest's description".to_owned()),
        }];
    }
    let question = Question {
        host,
        guest: description,
        machine,
        capabilities,
    };
    let mut checks = Vec::new();
    let emulator = question.machine_type(&mut checks);
    if let Some(emulator) = emulator {
        question.cpu(emulator, &mut checks);
        question.devices(emulator, &mut checks);
    }
    question.huge_pages(&mut checks);
    question.accelerator(&mut checks);
    question.memory(&mut checks);
    question.names(&mut checks);
    question.folders(&mut checks);
    question.cards(&mut checks);
    checks
}

struct Question<'a> {
    host: &'a str,
    guest: &'a GuestDescription,
    machine: Option<&'a Machine>,
    capabilities: &'a Capabilities,
}

impl<'a> Question<'a> {
    fn refuse(&self, why: impl fmt::Display, hint: String) -> Check {
        Check {
            verdict: Verdict::Refused,
            text: format!("{} cannot run {}: {why}", self.host, self.guest.name),
            hint: Some(hint),
        }
    }

    fn machine_type(&self, checks: &mut Vec<Check>) -> Option<&'a Emulator> {
        let (host, wanted) = (self.host, &self.guest.machine);
        let Some(label) = self.capabilities.emulator_for(wanted) else {
            checks.push(self.no_machine_type());
            return None;
        };
        let emulator = &self.capabilities.emulators[label];
        let cpus_max = emulator.machine_types[wanted].cpus_max;
        if u64::from(self.guest.vcpus) > cpus_max {
            let vcpus = self.guest.vcpus;
            checks.push(self.refuse(
                format!("it has {vcpus} vCPUs, and {wanted} has {cpus_max} at most there"),
                format!("give {} fewer vCPUs", self.guest.name),
            ));
        } else {
            checks.push(fine(format!(
                "QEMU {} on {host} loads {wanted}",
                emulator.version
            )));
        }
        let is_virtio = |device: &Device| device.kind.starts_with("virtio");
        if let Some(machine) = self.machine
            && machine.devices.values().any(is_virtio)
            && let Some(why) = tested::does_not_load(&machine.qemu, &emulator.version)
        {
            let hint = format!(
                "move it to a host with QEMU {}, or stop {} and start it with another QEMU",
                machine.qemu, self.guest.name
            );
            checks.push(self.refuse(why, hint));
        }
        if let Some(machine) = self.machine
            && version(&emulator.version) < version(&machine.qemu)
        {
            checks.push(Check {
                verdict: Verdict::Warning,
                text: format!(
                    "{host} has QEMU {}, older than the {} that runs {}: QEMU promises to load the \
                     state of older versions only",
                    emulator.version, machine.qemu, self.guest.name
                ),
                hint: Some(format!("install QEMU {} on {host}", machine.qemu)),
            });
        }
        // Does not apply to a guest that is only to be started.
        let moves = self.machine.is_some();
        if let Some(text) = tested::warning(&emulator.version, host).filter(|_| moves) {
            checks.push(Check {
                verdict: Verdict::Warning,
                text,
                hint: Some(tested::hint(host)),
            });
        }
        Some(emulator)
    }

    fn no_machine_type(&self) -> Check {
        let (host, wanted) = (self.host, &self.guest.machine);
        let mut emulators: Vec<&Emulator> = self.capabilities.emulators.values().collect();
        emulators.sort_by_key(|emulator| version(&emulator.version));
        let versions: Vec<&str> = emulators.iter().map(|e| e.version.as_str()).collect();
        let newest = emulators.last();
        let has = format!("it has QEMU {}", versions.join(" and "));
        let (family, number) = wanted.rsplit_once('-').unwrap_or((wanted, ""));
        let too_old = newest.is_some_and(|newest| version(&newest.version) < version(number));
        let other = newest.and_then(|newest| {
            newest
                .machine_types
                .keys()
                .filter(|name| {
                    name.strip_prefix(family)
                        .is_some_and(|n| n.starts_with('-'))
                })
                .max_by_key(|name| version(name.rsplit_once('-').map_or("", |(_, n)| n)))
        });
        let restart = other.map_or(String::new(), |other| {
            format!(", or restart the guest with machine = \"{other}\"")
        });
        if too_old {
            self.refuse(
                format!("{has}, and the guest's machine type {wanted} needs {number} or newer"),
                format!("install QEMU {number} or newer on {host}{restart}"),
            )
        } else {
            self.refuse(
                format!("{has}, which does not have the guest's machine type {wanted}"),
                format!("add an emulator to {host} that has it{restart}"),
            )
        }
    }

    fn cpu(&self, emulator: &Emulator, checks: &mut Vec<Check>) {
        let cpu = &self.guest.cpu;
        let mut parts = cpu.split(',');
        let model = parts.next().unwrap_or_default();
        let Some(missing) = emulator.cpu_models.get(model) else {
            let version = &emulator.version;
            checks.push(self.refuse(
                format!("its QEMU {version} does not have the guest's CPU model {model}"),
                "restart the guest with a model that both hosts have".to_owned(),
            ));
            return;
        };
        // A feature that the guest does not have now cannot be missing.
        let sees = |feature: &&String| {
            self.machine.is_none_or(|machine| {
                machine.cpu_properties.get(*feature).map(String::as_str) == Some("on")
            })
        };
        let taken: BTreeSet<&str> = parts.filter_map(|part| part.strip_prefix('-')).collect();
        let missing: Vec<&str> = missing
            .iter()
            .filter(|feature| !taken.contains(feature.as_str()))
            .filter(sees)
            .map(String::as_str)
            .collect();
        if missing.is_empty() {
            checks.push(fine(format!(
                "CPU model {model} available on {}",
                self.host
            )));
        } else if self.machine.is_some() {
            checks.push(self.refuse(
                format!(
                    "its CPU cannot give {model} what the guest sees: {}",
                    missing.join(", ")
                ),
                format!(
                    "restart the guest with cpu = \"{}\"",
                    without(cpu, &missing)
                ),
            ));
        } else {
            checks.push(Check {
                verdict: Verdict::Warning,
                text: format!(
                    "{model} on {} comes without {}",
                    self.host,
                    missing.join(", ")
                ),
                hint: None,
            });
        }
    }

    fn accelerator(&self, checks: &mut Vec<Check>) {
        let Some(machine) = self.machine else {
            return;
        };
        let (here, there) = (self.capabilities.accelerator.name(), &machine.accelerator);
        if here == there {
            return;
        }
        let because = match &self.capabilities.no_kvm {
            Some(why) => format!(" (KVM does not work: {why})"),
            None => String::new(),
        };
        checks.push(self.refuse(
            format!("it runs guests with {here}{because}, and the guest runs with {there}"),
            format!("move it to a host that runs guests with {there}"),
        ));
    }

    fn memory(&self, checks: &mut Vec<Check>) {
        let memory = &self.capabilities.memory;
        let needed = self.guest.memory_bytes();
        if needed > memory.available_bytes {
            checks.push(self.refuse(
                format!(
                    "it has {} of memory available, and the guest has {}",
                    size(memory.available_bytes),
                    size(needed)
                ),
                format!("free memory on {}, or choose another host", self.host),
            ));
            return;
        }
        if let Some(limit) = memory.limit_bytes {
            let left = limit.saturating_sub(memory.guests_bytes);
            if needed > left {
                checks.push(self.refuse(
                    format!(
                        "its limit for guests is {}, of which {} are left, and the guest has {}",
                        size(limit),
                        size(left),
                        size(needed)
                    ),
                    format!("raise qemu.memory_limit in {}'s configuration", self.host),
                ));
                return;
            }
        }
        checks.push(fine(format!(
            "{} memory on {} ({} available)",
            size(needed),
            self.host,
            size(memory.available_bytes)
        )));
    }

    /// Checks the cards on QEMU's user network.
    fn cards(&self, checks: &mut Vec<Check>) {
        let host = self.host;
        for (index, nic) in self.guest.nics.iter().enumerate() {
            let Some(user) = hardware::wiring(self.guest, index).user else {
                continue;
            };
            let network = &nic.network;
            let reaches = self.capabilities.user_networks.get(network);
            let wanted = if user.restrict { "user" } else { "nat" };
            if reaches.is_none_or(|outside| !outside && !user.restrict)
                && self.capabilities.networks.contains(network)
            {
                checks.push(self.refuse(
                    format!(
                        "its card {index} is on QEMU's user network, and network {network} there \
                         is not one{}",
                        if reaches.is_some() {
                            " that reaches anything"
                        } else {
                            ""
                        }
                    ),
                    format!(
                        "write {network} = \"{wanted}\" under [networks] in the configuration of \
                         {host}"
                    ),
                ));
            }
            for forward in &user.forwards {
                if let Some(error) = is_taken(forward) {
                    checks.push(self.refuse(
                        format!(
                            "port {} of its card {index} leads to the guest (hostfwd={forward}), \
                             and cannot be used there: {error}",
                            forward.from_port
                        ),
                        format!(
                            "free the port on {host}, or take it from the guest in QEMU's \
                             monitor: hostfwd_remove"
                        ),
                    ));
                }
            }
            if self.machine.is_some() && !(user.restrict && user.forwards.is_empty()) {
                checks.push(Check {
                    verdict: Verdict::Warning,
                    text: format!(
                        "card {index} ({}) is on QEMU's user network: its connections to the \
                         outside end with the move",
                        nic.mac
                    ),
                    hint: Some("give the guest a card on a bridge to keep them".to_owned()),
                });
            }
        }
    }

    fn folders(&self, checks: &mut Vec<Check>) {
        let host = self.host;
        let names: BTreeSet<&str> = hardware::shared_folders(self.guest).collect();
        for name in names {
            let check = match self.capabilities.folders.get(name) {
                Some(true) => Check {
                    verdict: Verdict::Warning,
                    text: format!(
                        "folder {name} that the guest shares is the one of {host} afterwards: its \
                         content does not move along"
                    ),
                    hint: Some("copy it, or use a file system that both hosts have".to_owned()),
                },
                Some(false) => self.refuse(
                    format!("folder {name} of its configuration is not there"),
                    format!("make that folder on {host}"),
                ),
                None => self.refuse(
                    format!("it has no folder called {name}"),
                    format!("add {name} under [folders] in the configuration of {host}"),
                ),
            };
            checks.push(check);
        }
    }

    fn names(&self, checks: &mut Vec<Check>) {
        let (guest, here) = (self.guest, self.capabilities);
        let flash = guest.hardware.as_ref().and_then(|it| it.flash.as_ref());
        let variables = flash.and_then(|flash| flash.variables.as_ref());
        let disks = guest.disks.iter().map(|disk| &disk.image).chain(variables);
        let disks = disks.map(|image| ("image", "[images]", &here.images, image));
        let nics = guest
            .nics
            .iter()
            .map(|nic| ("network", "[networks]", &here.networks, &nic.network));
        let firmware = guest
            .firmware
            .iter()
            .chain(flash.map(|flash| &flash.code))
            .map(|name| ("firmware", "[firmware]", &here.firmware, name));
        let kernel = guest
            .kernel
            .iter()
            .map(|kernel| ("kernel", "[kernels]", &here.kernels, &kernel.name));
        // A file that is not moved must be the same on both hosts; `migration::files` proves and
        // reports that.
        let staying = files::staying(guest);
        let stays = |kind: &str, name: &String| {
            let mut staying = staying.iter();
            staying.any(|file| file.to_string() == format!("{kind} {name}"))
        };
        let mut seen = BTreeSet::new();
        for (kind, table, known, name) in disks.chain(nics).chain(firmware).chain(kernel) {
            if !seen.insert((kind, name)) {
                continue;
            }
            if known.contains(name) && stays(kind, name) {
                continue;
            }
            if known.contains(name) {
                checks.push(fine(format!("{kind} {name} on {}", self.host)));
            } else {
                checks.push(self.refuse(
                    format!("it has no {kind} called {name}"),
                    format!(
                        "add {name} under {table} in the configuration of {}",
                        self.host
                    ),
                ));
            }
        }
    }
}

/// Returns the folders of a configuration, and whether each is there.
fn folders(config: &HostConfig) -> BTreeMap<String, bool> {
    let folders = config.folders.iter();
    folders
        .map(|(name, path)| (name.clone(), path.is_dir()))
        .collect()
}

/// Returns the user networks of a configuration, and whether each reaches what this host reaches.
fn user_networks(config: &HostConfig) -> BTreeMap<String, bool> {
    let networks = config.networks.iter();
    let user = networks.filter_map(|(name, network)| match network {
        Network::User => Some((name.clone(), false)),
        Network::Nat => Some((name.clone(), true)),
        Network::Bridge(_) | Network::None => None,
    });
    user.collect()
}

/// Returns why nothing can listen at a port of this host.
fn is_taken(forward: &Forward) -> Option<io::Error> {
    let address = (
        forward.from.unwrap_or(Ipv4Addr::UNSPECIFIED),
        forward.from_port,
    );
    match forward.udp {
        true => UdpSocket::bind(address).err(),
        false => TcpListener::bind(address).err(),
    }
}

fn fine(text: String) -> Check {
    Check {
        verdict: Verdict::Fine,
        text,
        hint: None,
    }
}

/// Returns a CPU description without some features.
fn without(cpu: &str, features: &[&str]) -> String {
    let added = |part: &&str| {
        part.strip_prefix('+')
            .is_none_or(|feature| !features.contains(&feature))
    };
    let kept: Vec<&str> = cpu.split(',').filter(added).collect();
    let taken = features.iter().map(|feature| format!(",-{feature}"));
    kept.join(",") + &taken.collect::<String>()
}

/// Returns the numbers of a version, for comparison.
fn version(text: &str) -> Vec<u32> {
    text.split('.')
        .map_while(|part| part.parse().ok())
        .collect()
}

fn size(bytes: u64) -> String {
    match bytes {
        0..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

#[cfg(test)]
#[path = "capabilities_tests.rs"]
mod tests;
