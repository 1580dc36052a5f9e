//! Manages two hosts with their agents and one guest, which are reused by successive cases and
//! monitored all the time.

use super::case::Site;
use super::disk::{self, GuestDisk};
use longhaul_lab::arena::{Arena, ArenaError, Workload};
use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::{CHANNEL_NAME, KernelFiles, Tiny};
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::link::spec::LinkSpec;
use longhaul_lab::process;
use longhaul_lab::product::{Product, Settings, channel_socket};
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The time limit of waits, on any slow machine.
pub(super) const LIMIT: Duration = Duration::from_secs(300);
/// The link between the hosts.
pub(super) const LINK: &str = "400mbit,4ms";
/// So small that a move takes a second.
const MEMORY_MIB: u64 = 128;
const ARENA_BYTES: u64 = 8 << 20;
const PAGES_PER_S: u64 = 100;
/// The number of guests that can be booted on one ground, each with its own disk.
const BOOTS_MAX: u32 = 100;
/// The maximum number of repeated heartbeats: a buffer on its way may be heard twice, once a move.
const REPEATED_MAX: u64 = 60;

/// The environment of cases.
#[derive(Debug)]
pub(super) struct Ground {
    pub(super) product: Product,
    pub(super) lab: Lab,
    pub(super) site: Site,
    pub(super) guest: String,
    pub(super) arena: Arena,
    pub(super) disk: GuestDisk,
    /// The index of the guest's host.
    pub(super) at: usize,
    boots: u32,
    seed: u64,
    /// The folders of the guests' disks on each host.
    folders: [PathBuf; 2],
    /// The number of other processes in each host's namespace.
    others: [usize; 2],
    /// The names of the files of a running guest.
    guest_files: Vec<String>,
}

impl Ground {
    /// Creates the hosts, and boots the guest.
    pub(super) fn make(site: Site, seed: u64) -> Result<Self, LabError> {
        let plan = Plan {
            purpose: "crash matrix".to_owned(),
            hosts: 2,
            link: link(LINK)?,
            seed,
        };
        let mut lab = Lab::create(&plan)?;
        let files = KernelFiles::make_with_history(lab.host(0)?.folder())?;
        let settings = Settings {
            qemus: site.pair.versions().map(str::to_owned).to_vec(),
            // Every machine has it, and it makes no difference to a crash.
            accelerator: "tcg".to_owned(),
        };
        let folders = match site.own.is_some() {
            true => [lab.host(0)?.folder(), lab.host(1)?.folder()].map(Path::to_owned),
            false => [lab.shared_folder()?, lab.shared_folder()?],
        };
        let images = [0, 1].map(|host| disk::images(&folders[host], BOOTS_MAX, site));
        let each = |host: usize| images[host].clone();
        let product = Product::start_each_with(&mut lab, &files, &settings, each)?;
        let mut others = [0; 2];
        for (host, others) in others.iter_mut().enumerate() {
            // The agent itself is counted apart.
            *others = processes(&lab, host)?.len().saturating_sub(1);
        }
        let mut ground = Self {
            disk: GuestDisk::make(&folders, site, 1, seed)?,
            product,
            lab,
            site,
            guest: String::new(),
            arena: Arena::new(),
            at: 0,
            boots: 0,
            seed,
            folders,
            others,
            guest_files: Vec::new(),
        };
        ground.boot_next()?;
        ground.guest_files = ground.files_of_guest(0)?;
        Ok(ground)
    }

    /// Boots a guest on the first host, under a new name and with a disk of its own: a disk that
    /// was handed to another host is not given to a second guest here.
    pub(super) fn boot(&mut self) -> Result<(), LabError> {
        self.disk = GuestDisk::make(&self.folders, self.site, self.boots + 1, self.seed)?;
        self.boot_next()
    }

    fn boot_next(&mut self) -> Result<(), LabError> {
        self.boots += 1;
        self.at = 0;
        let mut tiny = Tiny::calm(&format!("crash-{}", self.boots));
        tiny.memory_mib = MEMORY_MIB;
        tiny.machine_version = self.site.pair.versions()[0].to_owned();
        self.guest.clone_from(&tiny.name);
        self.arena = Arena::new();
        for host in self.lab.hosts() {
            let socket = channel_socket(host, &self.guest, CHANNEL_NAME);
            self.arena
                .attach(&socket)
                .during(|| format!("listen on {}", socket.display()))?;
            let told = |channel: &str| channel_socket(host, &self.guest, channel);
            self.disk.listen(told)?;
        }
        let guest = self.disk.description(&tiny);
        self.product.start_guest(&self.lab, 0, &guest)?;
        self.arena.wait_for_beat(LIMIT).map_err(answer)?;
        let workload = Workload {
            content: "mix".to_owned(),
            arena_bytes: ARENA_BYTES,
            working_set_bytes: ARENA_BYTES / 4,
            pages_per_s: PAGES_PER_S,
            write_bytes: 512,
            writers: 1,
            verify_pages_per_s: 100,
            seed: u64::from(self.boots),
        };
        self.arena
            .start(&workload, LIMIT)
            .map(drop)
            .map_err(answer)?;
        self.disk.begin(&mut self.arena)
    }

    /// Returns whether no further guest can be booted.
    pub(super) fn is_worn(&self) -> bool {
        self.boots >= BOOTS_MAX
    }

    /// Returns the guest's channel on a host.
    pub(super) fn channel(&self, host: usize) -> Result<PathBuf, LabError> {
        let host = self.lab.host(host)?;
        Ok(channel_socket(host, &self.guest, CHANNEL_NAME))
    }

    /// Returns the guest's QEMUs on a host, found without its agent.
    pub(super) fn qemus(&self, host: usize) -> Result<Vec<i32>, LabError> {
        let wanted = format!("guest={},", self.guest);
        let is_one = |pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0)
                .any(|word| word.starts_with(wanted.as_bytes()))
        };
        Ok(self.processes(host)?.into_iter().filter(is_one).collect())
    }

    /// Returns the processes of disk exports on a host with this part.
    pub(super) fn fronts(&self, host: usize, part: &str) -> Result<Vec<i32>, LabError> {
        let is_one = |pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
            words
                .windows(2)
                .any(|two| two == [b"disk-front".as_slice(), part.as_bytes()])
        };
        Ok(self.processes(host)?.into_iter().filter(is_one).collect())
    }

    /// Returns the page servers on a host.
    pub(super) fn page_servers(&self, host: usize) -> Result<Vec<i32>, LabError> {
        let is_one = |pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0)
                .any(|word| word == b"page-server")
        };
        Ok(self.processes(host)?.into_iter().filter(is_one).collect())
    }

    /// Changes the link.
    pub(super) fn set_link(&self, spec: &str) -> Result<(), LabError> {
        self.lab.link(0, 1)?.change(link(spec)?)
    }

    fn processes(&self, host: usize) -> Result<Vec<i32>, LabError> {
        processes(&self.lab, host)
    }

    /// Restarts a host's agent with these fail points.
    pub(super) fn restart(&mut self, host: usize, fail_points: &str) -> Result<(), LabError> {
        let of_lab = self.lab.host(host)?;
        self.product
            .agent_mut(host)?
            .restart_to_fail(of_lab, fail_points)
    }

    /// Returns the current length of a host's agent's log.
    pub(super) fn log_bytes(&self, host: usize) -> Result<u64, LabError> {
        let log = self.product.agent(host)?.log();
        Ok(fs::metadata(log).map_or(0, |metadata| metadata.len()))
    }

    /// Returns the log after that length.
    pub(super) fn log_since(&self, host: usize, from: u64) -> Result<String, LabError> {
        let path = self.product.agent(host)?.log();
        let reading = || format!("read {}", path.display());
        let mut log = fs::File::open(path).during(reading)?;
        log.seek(SeekFrom::Start(from)).during(reading)?;
        let mut said = Vec::new();
        log.read_to_end(&mut said).during(reading)?;
        Ok(String::from_utf8_lossy(&said).into_owned())
    }

    /// Returns the file by which an agent reports that it is held.
    pub(super) fn marker(&self) -> Result<PathBuf, LabError> {
        Ok(self.lab.shared_folder()?.join("held"))
    }

    /// Checks by the guest's reports that nothing is damaged, and that there were never two copies.
    pub(super) fn verify(&mut self, since: &longhaul_lab::arena::Origins) -> Result<(), String> {
        let here = self.channel(self.at).map_err(|error| error.to_string())?;
        let arena = &self.arena;
        if !process::wait_until(LIMIT, || arena.heard_on().as_ref() == Some(&here)) {
            return Err(format!("the guest is not heard from host {}", self.at));
        }
        let verified = self
            .arena
            .verify(LIMIT)
            .map_err(|error| error.to_string())?;
        let beat = self.arena.wait_for_beat(LIMIT);
        let errors = beat.map_err(|error| error.to_string())?.errors;
        if verified.errors + errors > 0 {
            let first = self.arena.faults().into_iter().next();
            return Err(format!("the guest found {errors} errors, first {first:?}"));
        }
        self.heard_once(since)
    }

    /// Checks that its disk is on its host, or the one where it died, nowhere else, and has the
    /// required content.
    pub(super) fn judge_disk(&self, owner: Option<usize>) -> Result<(), String> {
        let has = self.disk.owner()?;
        let qemus = match owner {
            Some(owner) if self.site.own.is_some() && has != owner => {
                return Err(format!("host {has} has the disk of the guest on {owner}"));
            }
            Some(owner) => self.qemus(owner).map_err(|error| error.to_string())?,
            None => Vec::new(),
        };
        let monitor = self.monitor(has).map_err(|error| error.to_string())?;
        self.disk.judge(has, (&qemus, &monitor))
    }

    /// Checks that there were never two copies.
    pub(super) fn heard_once(&self, since: &longhaul_lab::arena::Origins) -> Result<(), String> {
        let origins = self.arena.origins();
        let switches = origins.switches - since.switches;
        let repeated = origins.repeated - since.repeated;
        if switches > 1 || repeated > REPEATED_MAX {
            return Err(format!(
                "TWO COPIES: heartbeats changed their host {switches} times, {repeated} came twice"
            ));
        }
        Ok(())
    }

    /// Returns unexpected remains, when the guest runs on that host, or nowhere.
    pub(super) fn left_over(&self, owner: Option<usize>) -> Result<Option<String>, LabError> {
        for host in 0..2 {
            let qemus = self.qemus(host)?;
            let own = owner == Some(host);
            if qemus.len() != usize::from(own) {
                return Ok(Some(format!("host {host} has QEMUs {qemus:?}")));
            }
            let expected = self.others[host] + 1 + qemus.len();
            let there = self.processes(host)?;
            if there.len() != expected {
                return Ok(Some(format!(
                    "host {host} has processes {there:?}, and should have {expected}"
                )));
            }
            let state = self.lab.host(host)?.folder().join("state");
            if owner.is_some() && !own && state.join("guests").join(&self.guest).exists() {
                return Ok(Some(format!("host {host} has the guest's folder")));
            }
            if own {
                let mut files = self.files_of_guest(host)?;
                // The sender is recorded beside a guest that has arrived.
                files.retain(|file| file != "sent-by" && !self.guest_files.contains(file));
                if !files.is_empty() {
                    return Ok(Some(format!(
                        "host {host} has files of the guest's {files:?}"
                    )));
                }
            }
            for kind in ["journal", "fronts", "arriving", "following"] {
                let (folder, mut files) = (state.join(kind), Vec::new());
                if folder.exists() {
                    list(&folder, "", &mut files)?;
                }
                // The journals' incarnation stays as long as their folder.
                files.retain(|file| kind != "journal" || file != "incarnation");
                if !files.is_empty() {
                    return Ok(Some(format!("host {host} has in {kind}: {files:?}")));
                }
            }
            if let Some(name) = unfinished(&state)? {
                return Ok(Some(format!("host {host} has the file {name}")));
            }
        }
        Ok(None)
    }

    fn files_of_guest(&self, host: usize) -> Result<Vec<String>, LabError> {
        let folder = self.lab.host(host)?.folder().join("state/guests");
        let mut found = Vec::new();
        list(&folder.join(&self.guest), "", &mut found)?;
        found.sort();
        Ok(found)
    }

    /// Returns the remains of ended moves on the hosts, when no guest runs any more.
    pub(super) fn remains(&self) -> Result<Option<String>, LabError> {
        for host in 0..2 {
            let guests = self.lab.host(host)?.folder().join("state/guests");
            let mut names = Vec::new();
            list(&guests, "", &mut names)?;
            if let Some(first) = names.first() {
                return Ok(Some(format!("host {host} has a guest's file {first}")));
            }
        }
        Ok(None)
    }

    /// Returns the log of the guest's QEMU on a host.
    pub(super) fn qemu_log(&self, host: usize) -> Result<PathBuf, LabError> {
        let state = self.lab.host(host)?.folder().join("state/guests");
        Ok(state.join(&self.guest).join("qemu.log"))
    }

    /// Returns the monitor of the guest's QEMU on a host.
    pub(super) fn monitor(&self, host: usize) -> Result<PathBuf, LabError> {
        let state = self.lab.host(host)?.folder().join("state/guests");
        Ok(state.join(&self.guest).join("run/qmp"))
    }

    /// Ends the guest on every host.
    pub(super) fn end(&self) -> Result<(), LabError> {
        self.product.stop_guest(self.at, &self.guest)
    }
}

fn link(spec: &str) -> Result<LinkSpec, LabError> {
    let parsed = spec.parse();
    parsed.map_err(|error| LabError::Which(format!("{error}")))
}

fn processes(lab: &Lab, host: usize) -> Result<Vec<i32>, LabError> {
    let mut all = lab.host(host)?.namespace().processes()?;
    // Processes that ended and are not yet reaped are gone.
    all.retain(|pid| process::ProcessId::of(*pid).is_some());
    Ok(all)
}

fn answer(error: ArenaError) -> LabError {
    LabError::Answer {
        what: "the guest's arena".to_owned(),
        message: error.to_string(),
    }
}

/// Returns the names of all files below a folder.
fn list(folder: &Path, prefix: &str, found: &mut Vec<String>) -> Result<(), LabError> {
    let reading = || format!("read {}", folder.display());
    for entry in fs::read_dir(folder).during(reading)? {
        let entry = entry.during(reading)?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.file_type().during(reading)?.is_dir() {
            list(&entry.path(), &format!("{name}/"), found)?;
        } else {
            found.push(name);
        }
    }
    Ok(())
}

/// Returns a file whose replacement was interrupted.
fn unfinished(state: &Path) -> Result<Option<String>, LabError> {
    let mut names = Vec::new();
    list(state, "", &mut names)?;
    Ok(names.into_iter().find(|name| name.ends_with(".new")))
}
