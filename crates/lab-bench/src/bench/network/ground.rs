//! Prepares what a bench of networks stands on: two hosts with a way between them, the programs and
//! files of a system, and the machine's processor time.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use longhaul_lab::error::{During, LabError};
use longhaul_lab::installed;
use longhaul_lab::lab::{Host, Lab, Plan, interface_to};
use longhaul_lab::link::spec::LinkSpec;
use longhaul_lab::netns;
use longhaul_lab::process::{self, wait_until};

/// The link of hosts that are joined by a bare pair of interfaces; it stays idle.
const IDLE_LINK_BPS: u64 = 100_000_000;
/// The bare pair, and its addresses.
const WIRE: &str = "wire";
const WIRE_ADDRESSES: [&str; 2] = ["10.79.0.1", "10.79.0.2"];
/// The interface by which a system joins the hosts.
pub(super) const INNER: &str = "inner";
/// The addresses on it.
pub(super) const INNER_ADDRESSES: [&str; 2] = ["10.80.0.1", "10.80.0.2"];
/// The time for a system to let the first packet through.
const START_LIMIT: Duration = Duration::from_secs(45);
/// The end of a log that an error shows.
const LOG_BYTES_SHOWN: i64 = 400;

/// Two hosts, and the way between them that a system has to use.
#[derive(Debug)]
pub(super) struct Ground {
    pub(super) lab: Lab,
    bare: bool,
}

impl Ground {
    /// Creates the hosts with an emulated link, or with a bare pair of interfaces.
    pub(super) fn create(
        purpose: &str,
        link: Option<LinkSpec>,
        seed: u64,
    ) -> Result<Self, LabError> {
        let lab = Lab::create(&Plan {
            purpose: purpose.to_owned(),
            hosts: 2,
            link: link.unwrap_or_else(|| LinkSpec::new(IDLE_LINK_BPS, Duration::ZERO)),
            seed,
        })?;
        let bare = link.is_none();
        if bare {
            let there = lab.host(1)?.namespace().name();
            let add = format!("link add {WIRE} type veth peer name {WIRE} netns {there}\n");
            lab.host(0)?.namespace().configure(&add)?;
            for (host, address) in lab.hosts().iter().zip(WIRE_ADDRESSES) {
                host.namespace().configure(&format!(
                    "link set dev {WIRE} up\naddr add {address}/24 dev {WIRE}\n"
                ))?;
            }
        }
        Ok(Self { lab, bare })
    }

    pub(super) fn hosts(&self) -> Result<[&Host; 2], LabError> {
        Ok([self.lab.host(0)?, self.lab.host(1)?])
    }

    /// Returns the addresses of the hosts on the way.
    pub(super) fn outer(&self) -> Result<[&str; 2], LabError> {
        Ok(match self.bare {
            true => WIRE_ADDRESSES,
            false => self.hosts()?.map(Host::address),
        })
    }

    /// Returns a host's interface to the way.
    pub(super) fn device(&self, host: usize) -> Result<String, LabError> {
        Ok(match self.bare {
            true => WIRE.to_owned(),
            false => interface_to(self.lab.host(1 - host)?),
        })
    }

    /// Writes a file of a host, which ends with the laboratory, and returns its path. Files may
    /// hold keys: only the owner reads them.
    pub(super) fn file(&self, host: usize, name: &str, content: &str) -> Result<PathBuf, LabError> {
        use std::os::unix::fs::PermissionsExt;
        let path = self.lab.host(host)?.folder().join(name);
        let doing = || format!("write {}", path.display());
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).during(doing)?;
        }
        fs::write(&path, content).during(doing)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).during(doing)?;
        Ok(path)
    }

    /// Starts a program on a host; it ends with the tunnel. Its output goes to a log.
    pub(super) fn start(
        &self,
        tunnel: &mut Tunnel,
        host: usize,
        mut command: Command,
    ) -> Result<(), LabError> {
        let host = self.lab.host(host)?;
        let number = tunnel.running.len();
        let log = host.folder().join(format!("network-{number}.log"));
        let doing = || format!("write {}", log.display());
        let output = File::create(&log).during(doing)?;
        let errors = output.try_clone().during(doing)?;
        // A program that ends with its standard input ends with the tunnel.
        command.stdin(Stdio::piped()).stdout(output).stderr(errors);
        let process = host.spawn(&mut command)?;
        tunnel.running.push(Running { process, log });
        Ok(())
    }

    /// Waits until a system has made its interface on both hosts, and gives them their
    /// addresses.
    pub(super) fn address(
        &self,
        tunnel: &Tunnel,
        device: &str,
        addresses: [&str; 2],
    ) -> Result<(), LabError> {
        for (host, address) in addresses.into_iter().enumerate() {
            self.address_one(tunnel, host, device, address)?;
        }
        Ok(())
    }

    /// As [`Self::address`], for one host.
    pub(super) fn address_one(
        &self,
        tunnel: &Tunnel,
        host: usize,
        device: &str,
        address: &str,
    ) -> Result<(), LabError> {
        let namespace = self.lab.host(host)?.namespace();
        let there = || namespace.enter(|| has_interface(device)).is_ok_and(|it| it);
        if !wait_until(START_LIMIT, || there() || tunnel.has_ended()) || !there() {
            return Err(tunnel.failed(&format!("{device} did not appear")));
        }
        namespace.configure(&format!(
            "link set dev {device} up\naddr replace {address}/24 dev {device}\n"
        ))
    }

    /// Waits until the second host answers on its inner address.
    pub(super) fn wait_until_joined(&self, tunnel: &Tunnel) -> Result<(), LabError> {
        let [first, _] = self.hosts()?;
        let answers = || {
            let mut ping = netns::command("ping");
            ping.args(["-n", "-q", "-c", "1", "-W", "1", &tunnel.inner[1]]);
            first.output(&mut ping).is_ok()
        };
        if wait_until(START_LIMIT, || answers() || tunnel.has_ended()) && answers() {
            return Ok(());
        }
        Err(tunnel.failed("no packet got through"))
    }

    /// Returns the MTU of an interface of the first host; `None` if it cannot be read.
    pub(super) fn mtu(&self, device: &str) -> Option<u32> {
        let [first, _] = self.hosts().ok()?;
        let mut command = netns::command("ip");
        command.args(["-o", "link", "show", "dev", device]);
        let said = first.output(&mut command).ok()?;
        let mut words = said.split_ascii_whitespace();
        words.find(|word| *word == "mtu")?;
        words.next()?.parse().ok()
    }
}

/// Returns whether the calling thread's network namespace has an interface.
fn has_interface(device: &str) -> bool {
    let table = fs::read_to_string("/proc/thread-self/net/dev").unwrap_or_default();
    let names = table.lines().filter_map(|line| line.split_once(':'));
    names.into_iter().any(|(name, _)| name.trim() == device)
}

/// What joins the hosts while a system runs. Dropping it ends the system.
#[derive(Debug)]
pub(super) struct Tunnel {
    /// The addresses of the hosts on the network that is measured.
    pub(super) inner: [String; 2],
    /// The interface of it.
    pub(super) device: String,
    running: Vec<Running>,
    /// Interfaces that do not end with a process: namespaces and names.
    interfaces: Vec<(String, String)>,
    files: Vec<PathBuf>,
}

impl Tunnel {
    pub(super) fn new(inner: [&str; 2], device: &str) -> Self {
        Self {
            inner: inner.map(str::to_owned),
            device: device.to_owned(),
            running: Vec::new(),
            interfaces: Vec::new(),
            files: Vec::new(),
        }
    }

    /// Has an interface removed with the tunnel.
    pub(super) fn remove_with_it(&mut self, host: &Host, device: &str) {
        let namespace = host.namespace().name().to_owned();
        self.interfaces.push((namespace, device.to_owned()));
    }

    /// Has a file removed with the tunnel.
    pub(super) fn remove_file_with_it(&mut self, file: PathBuf) {
        self.files.push(file);
    }

    fn has_ended(&self) -> bool {
        let ended = |running: &Running| {
            let pid = i32::try_from(running.process.id()).ok();
            pid.and_then(process::ProcessId::of).is_none()
        };
        self.running.iter().any(ended)
    }

    /// Returns an error with the ends of the logs.
    pub(super) fn failed(&self, what: &str) -> LabError {
        let logs: Vec<String> = self.running.iter().map(|it| end_of(&it.log)).collect();
        LabError::Answer {
            what: what.to_owned(),
            message: match logs.is_empty() {
                true => "no program is involved".to_owned(),
                false => format!("the logs end with: {}", logs.join(" / ")),
            },
        }
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        for running in &mut self.running {
            // It may have ended already.
            let _ = running.process.kill();
            let _ = running.process.wait();
        }
        for (namespace, device) in &self.interfaces {
            // It may have ended with its process.
            let _ = process::run(
                Command::new("ip").args(["-n", namespace, "link", "delete", "dev", device]),
            );
        }
        for file in &self.files {
            // Its program may have removed it.
            let _ = fs::remove_file(file);
        }
    }
}

#[derive(Debug)]
struct Running {
    process: Child,
    log: PathBuf,
}

/// Returns the end of a log, as one line.
fn end_of(log: &Path) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(log)?;
        let length = i64::try_from(file.metadata()?.len()).unwrap_or(i64::MAX);
        file.seek(SeekFrom::End(-length.min(LOG_BYTES_SHOWN)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Finds a program of a system: in the folder `peers` beside the laboratory's QEMUs, or else on the
/// path. So a newer version than Debian's is measured where there is one.
pub(super) fn program(name: &str, package: &str) -> Result<PathBuf, String> {
    let own = installed::folder().join("peers");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let administration = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    std::iter::once(own)
        .chain(std::env::split_paths(&path))
        .chain(administration)
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
        .ok_or_else(|| format!("not installed: apt-get install {package}"))
}

/// Returns what a program prints, on either output and whatever its exit status: some programs
/// print their version as an error.
pub(super) fn printed(program: &Path, arguments: &[&str]) -> Result<String, LabError> {
    let doing = || format!("start {}", program.display());
    let mut command = netns::command(program);
    let output = command.args(arguments).output().during(doing)?;
    let [out, errors] =
        [output.stdout, output.stderr].map(|it| String::from_utf8_lossy(&it).into_owned());
    Ok(format!("{out}{errors}"))
}

/// Returns the first word that is a version: `1.0.36`, `v22`, `v.3.1.1`.
pub(super) fn version_in(text: &str) -> Option<String> {
    text.split_ascii_whitespace()
        .map(|word| word.trim_start_matches('v').trim_start_matches('.'))
        .find(|word| word.starts_with(|first: char| first.is_ascii_digit()))
        .map(|word| word.trim_end_matches([',', ')']).to_owned())
}

/// The time that the machine's processors were busy, as the kernel counts it: all processes of all
/// hosts, the kernel's own work for packets, and the emulator of a link. Not time that was idle,
/// waited for disks, or was taken by a hypervisor.
#[derive(Debug, Clone, Copy)]
pub(super) struct Busy {
    ticks: u64,
}

impl Busy {
    pub(super) fn now() -> Result<Self, LabError> {
        let text = fs::read_to_string("/proc/stat").during(|| "read /proc/stat".to_owned())?;
        let ticks = busy_ticks(&text).ok_or_else(|| LabError::Answer {
            what: "/proc/stat".to_owned(),
            message: "no times of the processors".to_owned(),
        })?;
        Ok(Self { ticks })
    }

    /// Returns the seconds since then.
    pub(super) fn elapsed_s(self) -> Result<f64, LabError> {
        let now = Self::now()?;
        let ticks_per_s = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)
            .ok()
            .flatten()
            .unwrap_or(100);
        Ok(now.ticks.saturating_sub(self.ticks) as f64 / ticks_per_s as f64)
    }
}

/// Sums user, nice, system, irq and softirq of the line of all processors.
fn busy_ticks(stat: &str) -> Option<u64> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let fields: Vec<u64> = line
        .split_ascii_whitespace()
        .map_while(|field| field.parse().ok())
        .collect();
    [0, 1, 2, 5, 6]
        .into_iter()
        .map(|field| fields.get(field))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_found_in_what_programs_print() {
        for (text, version) in [
            (
                "OpenVPN 2.6.14 x86_64-pc-linux-gnu [SSL (OpenSSL)]",
                "2.6.14",
            ),
            ("tinc version 1.0.36 (built Jan 1 2023)", "1.0.36"),
            ("fastd v22\n", "22"),
            ("Welcome to n2n v.3.1.1 for Debian\nBuilt on 1", "3.1.1"),
            ("Version: 1.12.0", "1.12.0"),
            ("wireguard-go v0.0.20220316\n", "0.0.20220316"),
        ] {
            assert_eq!(version_in(text).as_deref(), Some(version), "{text}");
        }
        assert_eq!(version_in("no version here"), None);
    }

    #[test]
    fn idle_and_stolen_time_is_not_busy() {
        let stat = "cpu  10 20 30 1000 500 6 7 900 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n";
        assert_eq!(busy_ticks(stat), Some(73));
        assert_eq!(busy_ticks("cpu  10 20"), None);
        assert_eq!(busy_ticks("intr 1"), None);
    }

    #[test]
    fn a_missing_program_is_named_with_its_package() {
        let missing = program("longhaul-no-such-program", "some-package").unwrap_err();
        assert_eq!(missing, "not installed: apt-get install some-package");
        assert!(program("sh", "dash").is_ok());
    }
}
