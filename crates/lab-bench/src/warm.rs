//! Manages guests with a whole system on a disk, and their saved states: booted once, warmed by one
//! workload, saved, so that every case begins in the same way and at once.

use crate::image::{self, key};
use crate::moves::{self, Launcher};
use longhaul_lab::arena::{Arena, ArenaError, Workload};
use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::{CHANNEL_NAME, KERNEL_NAME, initramfs, network};
use longhaul_lab::installed;
use longhaul_lab::interrupt;
use longhaul_lab::lab::say;
use longhaul_lab::peer::Begin;
use longhaul_lab::process;
use longhaul_protocol::guest::{Channel, Disk, GuestDescription, Kernel, Nic};
use serde::Deserialize;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The workload of a guest with the arena alone.
pub const IDLE: &str = "idle";
/// The workload of the laboratory's own guest that is driven by clients outside the guest.
pub const WEB: &str = "web";
/// The name of the image of the guest's disk, in each host's configuration.
const IMAGE: &str = "system";
/// The kernel mounts nothing itself: the arena does, from the initial RAM file system.
const COMMAND_LINE: &str =
    "console=ttyS0 quiet panic=-1 mitigations=off cryptomgr.notests -- --root /dev/vda";
/// The time limit of a boot, which takes 10 s under TCG on an idle machine.
const LIMIT: Duration = Duration::from_secs(900);
const MEMORY_MIB: u64 = 1024;
const ARENA_BYTES: u64 = 32 << 20;
const ARENA_PAGES_PER_S: u64 = 100;
/// A guest is warm when its workload has run this long and has completed enough work, on a busy
/// machine too.
const WARM_S: u64 = 60;
const WARM_S_MAX: u64 = 3600;
const WARM_WORK_MAX: u64 = 1_000_000_000;
const WARM_LIMIT: Duration = Duration::from_secs(3600);
/// The work that warms the guest: each of the source's files, half of the pages of the accounts,
/// each of the orders, a fifth of the catalogue's pages.
const DEBIAN_PROGRAMS: [(&str, u64); 4] = [
    ("compile", 100),
    ("database", 1500),
    ("churn", 100),
    (WEB, 500),
];
const LOOK_EVERY: Duration = Duration::from_millis(500);
const MEMORY_MIB_RANGE: std::ops::RangeInclusive<u64> = 128..=65536;
const VCPUS_MAX: u32 = 64;

/// Returns the images of the disks of `guests` guests, by their names in each host's configuration,
/// with their files in a folder. An agent starts nothing on the disk of a guest that moved away
/// from it.
pub fn images(guests: usize, folder: &Path) -> Vec<(String, PathBuf)> {
    let image = |number: usize| match number {
        0 => IMAGE.to_owned(),
        _ => format!("{IMAGE}-{number}"),
    };
    let file = |name: String| {
        let path = folder.join(format!("{name}.img"));
        (name, path)
    };
    (0..guests.max(1)).map(image).map(file).collect()
}

/// A guest with a whole system on a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SystemGuest {
    disk: PathBuf,
    /// The key of its saved states.
    identity: String,
    is_debian: bool,
    memory_mib: u64,
    vcpus: u32,
    /// The workloads' programs, each with the work that warms the guest.
    programs: Vec<(String, u64)>,
    warm_s: u64,
    arena: Workload,
}

/// A file that describes a guest of the user's own.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Described {
    disk: PathBuf,
    #[serde(default = "default_memory_mib")]
    memory_mib: u64,
    #[serde(default = "default_vcpus")]
    vcpus: u32,
    #[serde(default)]
    workloads: Vec<String>,
    #[serde(default = "default_warm_s")]
    warm_s: u64,
    #[serde(default = "default_warm_work")]
    warm_work: u64,
    #[serde(default = "default_arena_bytes")]
    arena_bytes: u64,
    #[serde(default = "default_pages_per_s")]
    pages_per_s: u64,
}

fn default_memory_mib() -> u64 {
    MEMORY_MIB
}

fn default_vcpus() -> u32 {
    1
}

fn default_warm_s() -> u64 {
    WARM_S
}

fn default_warm_work() -> u64 {
    1
}

fn default_arena_bytes() -> u64 {
    ARENA_BYTES
}

fn default_pages_per_s() -> u64 {
    ARENA_PAGES_PER_S
}

impl SystemGuest {
    /// Returns the laboratory's own guest, building its disk if it does not exist.
    ///
    /// # Errors
    /// When it cannot be built.
    pub fn debian() -> Result<Self, LabError> {
        Ok(Self {
            disk: image::debian()?,
            identity: format!("debian-{}", image::recipe()),
            is_debian: true,
            memory_mib: MEMORY_MIB,
            vcpus: 1,
            programs: DEBIAN_PROGRAMS
                .map(|(name, work)| (name.to_owned(), work))
                .to_vec(),
            warm_s: WARM_S,
            arena: arena(ARENA_BYTES, ARENA_PAGES_PER_S),
        })
    }

    /// Returns the guest described by a file.
    ///
    /// # Errors
    /// When the file, or the disk that it names, is invalid.
    pub fn described(path: &Path) -> Result<Self, LabError> {
        let text = fs::read_to_string(path).during(|| format!("read {}", path.display()))?;
        let wrong = |what: String| LabError::Which(format!("{}: {what}", path.display()));
        let described: Described =
            toml::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        described.check().map_err(&wrong)?;
        let beside = path.parent().unwrap_or(Path::new("."));
        let disk = beside.join(&described.disk);
        let disk = fs::canonicalize(&disk).during(|| format!("find {}", disk.display()))?;
        let file = fs::metadata(&disk).during(|| format!("look at {}", disk.display()))?;
        let identity = format!(
            "{} {} {} {}",
            disk.display(),
            file.len(),
            file.mtime(),
            file.mtime_nsec()
        );
        Ok(Self {
            disk,
            identity: format!("own-{}", key(&[&identity])),
            is_debian: false,
            memory_mib: described.memory_mib,
            vcpus: described.vcpus,
            programs: described
                .workloads
                .into_iter()
                .map(|name| (name, described.warm_work))
                .collect(),
            warm_s: described.warm_s,
            arena: arena(described.arena_bytes, described.pages_per_s),
        })
    }

    /// Returns its disk's metadata.
    ///
    /// # Errors
    /// When it no longer exists.
    pub fn disk(&self) -> Result<fs::Metadata, LabError> {
        fs::metadata(&self.disk).during(|| format!("look at {}", self.disk.display()))
    }

    /// Copies its disk to a path, replacing an existing file.
    ///
    /// # Errors
    /// When it cannot be copied.
    pub fn lay_out(&self, place: &Path) -> Result<(), LabError> {
        copy(&self.disk, place)
    }

    /// Returns the workload of its arena.
    pub fn arena(&self) -> &Workload {
        &self.arena
    }

    /// Returns its workloads.
    pub fn workloads(&self) -> impl Iterator<Item = &str> {
        let names = self.programs.iter().map(|(name, _)| name.as_str());
        names.chain([IDLE])
    }

    /// Returns the guest's description, valid on every host.
    pub fn description(&self, name: &str, machine: &str, workload: &str) -> GuestDescription {
        GuestDescription {
            name: name.to_owned(),
            machine: machine.to_owned(),
            cpu: "qemu64".to_owned(),
            vcpus: self.vcpus,
            memory_mib: self.memory_mib,
            firmware: None,
            kernel: Some(Kernel {
                name: KERNEL_NAME.to_owned(),
                command_line: COMMAND_LINE.to_owned(),
            }),
            disks: vec![Disk {
                name: "vda".to_owned(),
                image: IMAGE.to_owned(),
                shared: true,
                read_only: false,
            }],
            nics: self.nics(workload),
            channels: vec![Channel {
                name: CHANNEL_NAME.to_owned(),
            }],
            hardware: None,
        }
    }

    /// Returns a network card, where clients must reach the workload.
    fn nics(&self, workload: &str) -> Vec<Nic> {
        let nic = self.has_clients(workload).then(|| Nic {
            network: network::NETWORK.to_owned(),
            mac: network::GUEST_MAC.to_owned(),
            port: None,
        });
        nic.into_iter().collect()
    }

    /// Returns whether clients outside the guest drive a workload.
    pub fn has_clients(&self, workload: &str) -> bool {
        self.is_debian && workload == WEB
    }

    /// Returns the guest in the state after a workload ran for a while, creating the state if it
    /// does not exist.
    ///
    /// # Errors
    /// When the guest does not come up, or its workload does not work.
    pub fn warm(
        &self,
        workload: &str,
        machine: &str,
        launcher: &Launcher<'_>,
    ) -> Result<Warm, LabError> {
        let known: Vec<&str> = self.workloads().collect();
        if !known.contains(&workload) {
            return Err(LabError::Which(format!(
                "this guest has no workload `{workload}`: it has {}",
                known.join(", ")
            )));
        }
        let guest = self.description("warm", machine, workload);
        let version = installed::qemu_version(&launcher.qemus[0])?;
        let kernel = installed::kernel()?.join("release");
        let kernel = fs::read_to_string(&kernel).during(|| format!("read {}", kernel.display()))?;
        let work = self.programs.iter().find(|(name, _)| name == workload);
        let warm_work = work.map_or(0, |(_, work)| *work);
        let made_of = key(&[
            &format!("{guest:?} {:?} {} {warm_work}", self.arena, self.warm_s),
            &key(&[initramfs::ARENA]),
            &version,
            &kernel,
            launcher.accelerator,
        ]);
        let folder = image::folder()?.join(format!("{}-{workload}-{made_of}", self.identity));
        let warm = Warm {
            workload: workload.to_owned(),
            has_program: workload != IDLE,
            has_clients: self.has_clients(workload),
            arena: self.arena.clone(),
            state: folder.join("state"),
            disk: folder.join("disk.img"),
        };
        let _held = image::hold()?;
        if !folder.is_dir() {
            self.make(&warm, warm_work, &folder, &guest, launcher)?;
        }
        Ok(warm)
    }

    fn make(
        &self,
        warm: &Warm,
        warm_work: u64,
        folder: &Path,
        guest: &GuestDescription,
        launcher: &Launcher<'_>,
    ) -> Result<(), LabError> {
        let began = Instant::now();
        say(&format!(
            "making the state that cases of {} start from: once, {} s or more",
            warm.workload, self.warm_s
        ));
        let new = folder.with_extension("new");
        let making = || format!("make {}", new.display());
        if new.exists() {
            fs::remove_dir_all(&new).during(|| format!("remove {}", new.display()))?;
        }
        fs::create_dir(&new).during(making)?;
        launcher.lay_out(&self.disk, guest)?;
        let mut source = launcher.start(0, guest, Begin::Boot)?;
        let mut arena = moves::attached(source.channel())?;
        self.heat(warm, warm_work, &mut arena, launcher)
            .map_err(|error| match error {
                Heat::Lab(error) => error,
                Heat::Arena(error) => LabError::Answer {
                    what: format!("the guest, warmed by {}", warm.workload),
                    message: error.to_string(),
                },
            })?;
        source.save(&new.join("state"))?;
        drop(source);
        for disk in launcher.disks_of(guest) {
            copy(disk, &new.join("disk.img"))?;
        }
        fs::rename(&new, folder).during(making)?;
        say(&format!("made in {:.0} s", began.elapsed().as_secs_f64()));
        Ok(())
    }

    /// Starts the arena and the workload, and lets them run.
    fn heat(
        &self,
        warm: &Warm,
        warm_work: u64,
        arena: &mut Arena,
        launcher: &Launcher<'_>,
    ) -> Result<(), Heat> {
        arena.wait_for_beat(LIMIT)?;
        arena.start(&warm.arena, LIMIT)?;
        if warm.has_program {
            arena.start_program(&warm.workload, LIMIT)?;
        }
        let clients = launcher.clients(warm.has_clients)?;
        let began = Instant::now();
        interrupt::sleep(Duration::from_secs(self.warm_s))?;
        loop {
            let done = arena.wait_for_beat(LIMIT)?.work.unwrap_or(0);
            if done >= warm_work {
                break;
            }
            if began.elapsed() > WARM_LIMIT {
                let seconds = WARM_LIMIT.as_secs();
                let problem =
                    format!("it did {done} units of work in {seconds} s, not {warm_work}");
                return Err(ArenaError::Refused(problem).into());
            }
            arena.forget_beats();
            interrupt::sleep(LOOK_EVERY)?;
        }
        match clients.and_then(|clients| clients.finish().first_wrong) {
            Some(wrong) => Err(ArenaError::Refused(wrong).into()),
            None => Ok(()),
        }
    }
}

/// Why a guest was not warmed.
#[derive(Debug, thiserror::Error)]
enum Heat {
    #[error(transparent)]
    Lab(#[from] LabError),
    #[error(transparent)]
    Arena(#[from] ArenaError),
}

impl Described {
    fn check(&self) -> Result<(), String> {
        if !MEMORY_MIB_RANGE.contains(&self.memory_mib) {
            return Err(format!(
                "memory_mib is from {} to {}, not {}",
                MEMORY_MIB_RANGE.start(),
                MEMORY_MIB_RANGE.end(),
                self.memory_mib
            ));
        }
        if !(1..=VCPUS_MAX).contains(&self.vcpus) {
            return Err(format!(
                "vcpus is from 1 to {VCPUS_MAX}, not {}",
                self.vcpus
            ));
        }
        if self.warm_s > WARM_S_MAX {
            return Err(format!(
                "warm_s is at most {WARM_S_MAX}, not {}",
                self.warm_s
            ));
        }
        if self.arena_bytes > self.memory_mib << 19 {
            return Err(format!(
                "arena_bytes is at most half of the memory, not {}",
                self.arena_bytes
            ));
        }
        let is_name = |name: &&String| {
            let known = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
            !name.is_empty() && name.len() <= 64 && *name != IDLE && name.bytes().all(known)
        };
        if self.warm_work > WARM_WORK_MAX {
            return Err(format!(
                "warm_work is at most {WARM_WORK_MAX}, not {}",
                self.warm_work
            ));
        }
        match self.workloads.iter().find(|name| !is_name(name)) {
            Some(name) => Err(format!("`{name}` is no name of a workload's program")),
            None => Ok(()),
        }
    }
}

/// A saved state of a running workload, in files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warm {
    /// The workload's name.
    pub workload: String,
    /// Whether a program runs beside the arena.
    pub has_program: bool,
    /// Whether clients outside the guest drive it.
    pub has_clients: bool,
    /// The workload of the arena.
    pub arena: Workload,
    /// The state, as QEMU saved it.
    pub state: PathBuf,
    /// The disk that the state needs.
    pub disk: PathBuf,
}

/// Copies a file with its holes.
pub fn copy(from: &Path, to: &Path) -> Result<(), LabError> {
    let mut copying = Command::new("cp");
    copying.args(["--sparse=always", "--reflink=auto", "--"]);
    process::run(copying.args([from, to])).map(drop)
}

fn arena(arena_bytes: u64, pages_per_s: u64) -> Workload {
    Workload {
        content: "mix".to_owned(),
        arena_bytes,
        working_set_bytes: arena_bytes / 2,
        pages_per_s,
        write_bytes: 512,
        writers: 1,
        verify_pages_per_s: 1000,
        seed: 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_described_guest_is_held_against_limits() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("own.img"), "x").unwrap();
        let read = |text: &str| {
            let path = folder.path().join("own.toml");
            fs::write(&path, text).unwrap();
            SystemGuest::described(&path)
        };
        let guest =
            read("disk = \"own.img\"\nworkloads = [\"cache\"]\nmemory_mib = 512\n").unwrap();
        assert_eq!(guest.workloads().collect::<Vec<_>>(), ["cache", "idle"]);
        let description = guest.description("g", "pc-q35-7.2", "cache");
        assert_eq!((description.memory_mib, description.vcpus), (512, 1));
        for wrong in [
            "disk = \"none.img\"",
            "disk = \"own.img\"\ndisks = 2",
            "disk = \"own.img\"\nmemory_mib = 1",
            "disk = \"own.img\"\nvcpus = 0",
            "disk = \"own.img\"\nwarm_s = 99999",
            "disk = \"own.img\"\narena_bytes = 999999999999",
            "disk = \"own.img\"\nworkloads = [\"../cache\"]",
            "disk = \"own.img\"\nworkloads = [\"idle\"]",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        // Another disk in its place is another guest.
        fs::write(folder.path().join("own.img"), "xy").unwrap();
        let other = read("disk = \"own.img\"").unwrap();
        assert_ne!(other.identity, guest.identity);
    }
}
