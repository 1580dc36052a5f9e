//! Controls agents of the product on emulated hosts: configures, starts, kills and restarts them.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Deserialize;

use crate::error::{During, LabError};
use crate::installed::{self, QEMU_VERSIONS};
use crate::lab::{Host, Lab};
use crate::process::{self, own_binary, wait_until};
use crate::proxmox::{Proxmox, entered};

/// The UDP port on which agents listen for each other.
pub const AGENT_PORT: u16 = 7400;
/// The variable that arms an agent's fail points.
const FAIL_POINT_VARIABLE: &str = "LONGHAUL_FAIL_POINT";
/// The time limit for an agent's start, which takes a fraction of a second on an idle machine.
const START_LIMIT: Duration = Duration::from_secs(60);
/// The time limit for an agent's orderly end.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// The agent of an emulated host. It is ended when this is dropped; its guests are not.
#[derive(Debug)]
pub struct Agent {
    name: String,
    api: PathBuf,
    config: PathBuf,
    log: PathBuf,
    process: Child,
    own_sysfs: bool,
    node: Option<Node>,
}

/// The mounts and commands of a node of Proxmox VE's stand-in.
#[derive(Debug, Clone)]
struct Node {
    mounts: Vec<(PathBuf, PathBuf)>,
    commands: PathBuf,
}

/// The fields of `longhaul host --json` that the laboratory needs.
#[derive(Debug, Deserialize)]
struct Identity {
    fingerprint: String,
}

impl Agent {
    /// Starts a host's agent and waits until it answers. `more` holds the tables of its
    /// configuration for the guests of this host.
    ///
    /// # Errors
    /// When it does not come up; the error names its log.
    pub fn start(host: &Host, more: &toml::Table) -> Result<Self, LabError> {
        Self::start_at(host, more, false)
    }

    fn start_at(host: &Host, more: &toml::Table, own_sysfs: bool) -> Result<Self, LabError> {
        let api = host.socket_folder().join(format!("{}.sock", host.name()));
        let config = host.folder().join("agent.toml");
        let log = host.folder().join("agent.log");
        let text = configuration(host, &api, more)?;
        fs::write(&config, text).during(|| format!("write {}", config.display()))?;
        let process = start_process(host, (&config, &log), "", (own_sysfs, None))?;
        let mut agent = Self {
            name: host.name().to_owned(),
            api,
            config,
            log,
            process,
            own_sysfs,
            node: None,
        };
        agent.wait_until_it_answers()?;
        Ok(agent)
    }

    /// Returns the host's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the socket of its API.
    pub fn api(&self) -> &Path {
        &self.api
    }

    /// Returns its log.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Returns its process number.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Returns a command of the product's, addressed to this agent.
    ///
    /// # Errors
    /// When the product has not been built.
    pub fn command(&self) -> Result<Command, LabError> {
        let mut command = Command::new(own_binary("longhaul")?);
        command.arg("--socket").arg(&self.api);
        Ok(command)
    }

    /// Runs a command of the product's against this agent and returns its standard output.
    ///
    /// # Errors
    /// When it fails.
    pub fn run(&self, arguments: &[&str]) -> Result<String, LabError> {
        process::run(self.command()?.args(arguments))
    }

    /// Ends it without warning, as a crash would.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn kill(&mut self) -> Result<(), LabError> {
        // It may be dead already.
        let _ = self.process.kill();
        self.process
            .wait()
            .map(drop)
            .during(|| format!("wait for the agent of {}", self.name))
    }

    /// Restarts it after it was killed, with the same state, and waits until it answers.
    ///
    /// # Errors
    /// When it does not come up; the error names its log.
    pub fn restart(&mut self, host: &Host) -> Result<(), LabError> {
        self.restart_to_fail(host, "")
    }

    /// As [`Self::restart`]; the agent fails at these points, in the form of its `fail_point`.
    ///
    /// # Errors
    /// When it does not come up; the error names its log.
    pub fn restart_to_fail(&mut self, host: &Host, fail_points: &str) -> Result<(), LabError> {
        self.kill()?;
        let files = (&*self.config, &*self.log);
        let sees = (self.own_sysfs, self.node.as_ref());
        self.process = start_process(host, files, fail_points, sees)?;
        self.wait_until_it_answers()
    }

    /// Lets it see the interfaces of its host in /sys from its next start on. It then has mounts of
    /// its own.
    pub fn see_interfaces(&mut self) {
        self.own_sysfs = true;
    }

    /// Lets it be on a node of Proxmox VE's stand-in from its next start on.
    pub fn enter(&mut self, node: &Proxmox) {
        self.node = Some(Node {
            mounts: node.mounts(),
            commands: node.commands(),
        });
    }

    /// Returns whether its process has ended.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.process.try_wait(), Ok(None))
    }

    fn wait_until_it_answers(&mut self) -> Result<(), LabError> {
        let mut ended = None;
        let answers = wait_until(START_LIMIT, || {
            ended = self.process.try_wait().ok().flatten();
            ended.is_some() || UnixStream::connect(&self.api).is_ok()
        });
        if let Some(status) = ended {
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            let last: Vec<&str> = log.lines().rev().take(5).collect();
            return Err(LabError::Command {
                command: format!("longhaul agent on {}", self.name),
                message: format!(
                    "{status}: {}",
                    last.into_iter().rev().collect::<Vec<_>>().join(" | ")
                ),
            });
        }
        if answers {
            return Ok(());
        }
        Err(LabError::Late {
            what: format!("the agent of {} did not answer", self.name),
            seconds: START_LIMIT.as_secs(),
            log: self.log.clone(),
        })
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.process.id()) {
            // It may be gone already.
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        let ended = wait_until(STOP_LIMIT, || !matches!(self.process.try_wait(), Ok(None)));
        if !ended {
            let _ = self.kill();
        }
    }
}

/// Returns the tables of an agent's configuration for this machine's QEMUs.
///
/// # Errors
/// When no version of QEMU is there.
pub fn tables() -> Result<toml::Table, LabError> {
    let mut emulators = toml::Table::new();
    let mut missing = None;
    for version in QEMU_VERSIONS {
        match installed::qemu(version) {
            Ok(path) => {
                emulators.insert(version.to_owned(), path.display().to_string().into());
            }
            Err(error) => missing = Some(error),
        }
    }
    match missing {
        Some(error) if emulators.is_empty() => Err(error),
        _ => {
            let mut qemu = toml::Table::new();
            if let Some(version) = emulators.keys().next_back() {
                qemu.insert("default".to_owned(), version.as_str().into());
            }
            run_as_own_user(&mut qemu);
            qemu.insert("emulators".to_owned(), emulators.into());
            Ok(toml::Table::from_iter([("qemu".to_owned(), qemu.into())]))
        }
    }
}

/// Lets QEMU run as the agent's own user, also if that is root.
pub(crate) fn run_as_own_user(qemu: &mut toml::Table) {
    if nix::unistd::geteuid().is_root() {
        qemu.insert("run_as".to_owned(), "root".into());
    }
}

/// Starts an agent on every host and makes each trust every other, unless they are at sites.
///
/// # Errors
/// When an agent does not come up or refuses.
pub fn start_all(lab: &mut Lab, more: &toml::Table) -> Result<Vec<Agent>, LabError> {
    start_each(lab, |_| Ok(more.clone()))
}

/// As [`start_all`], with each host's own tables, by the host's index.
///
/// # Errors
/// When an agent does not come up or refuses.
pub fn start_each(
    lab: &mut Lab,
    more: impl Fn(usize) -> Result<toml::Table, LabError>,
) -> Result<Vec<Agent>, LabError> {
    // Hosts of sites have no addresses for each other: they meet in a realm, and their agents make
    // interfaces for its networks.
    let at_sites = lab.internet().is_ok();
    let agents = lab
        .hosts()
        .iter()
        .enumerate()
        .map(|(index, host)| Agent::start_at(host, &more(index)?, at_sites))
        .collect::<Result<Vec<Agent>, LabError>>()?;
    let mut fingerprints = Vec::new();
    let to_trust = if at_sites { &[][..] } else { &agents };
    for agent in to_trust {
        let said = agent.run(&["--json", "host"])?;
        let identity: Identity = serde_json::from_str(&said).map_err(|error| LabError::Answer {
            what: format!("the agent of {}", agent.name()),
            message: error.to_string(),
        })?;
        fingerprints.push(identity.fingerprint);
    }
    for agent in to_trust {
        for (host, fingerprint) in lab.hosts().iter().zip(&fingerprints) {
            if host.name() != agent.name() {
                let address = format!("{}:{AGENT_PORT}", host.address());
                let trust = ["host", "trust", host.name(), fingerprint, &address];
                agent.run(&[&trust[..], &["--may", "query,send"]].concat())?;
            }
        }
    }
    for agent in &agents {
        lab.note_agent(agent.name(), agent.api())?;
    }
    Ok(agents)
}

/// Returns the table of the configuration of a host's agent, by the host's index, by which it uses
/// both links to each host that has two.
pub fn both_links(hosts: &[Host], own: usize) -> toml::Table {
    let path = |address: &str| {
        let to = format!("{address}:{AGENT_PORT}").into();
        toml::Value::from(toml::Table::from_iter([("to".to_owned(), to)]))
    };
    let of_host = |host: &Host| {
        let paths = [host.address(), host.second_address()?].map(path);
        let table = toml::Table::from_iter([("paths".to_owned(), paths.to_vec().into())]);
        Some((host.name().to_owned(), table.into()))
    };
    let others = hosts.iter().enumerate().filter(|(index, _)| *index != own);
    let hosts: toml::Table = others.filter_map(|(_, host)| of_host(host)).collect();
    toml::Table::from_iter([("hosts".to_owned(), hosts.into())])
}

fn configuration(host: &Host, api: &Path, more: &toml::Table) -> Result<String, LabError> {
    let text = |path: &Path| toml::Value::String(path.display().to_string());
    let mut table = more.clone();
    table.insert("name".to_owned(), host.name().into());
    table.insert("state".to_owned(), text(&host.folder().join("state")));
    let address = match host.addresses().iter().any(|address| address.contains(':')) {
        // Both families.
        true => "[::]",
        false if host.second_address().is_some() => "0.0.0.0",
        false => host.address(),
    };
    table.insert(
        "listen".to_owned(),
        format!("{address}:{AGENT_PORT}").into(),
    );
    let mut api_table = toml::Table::new();
    api_table.insert("socket".to_owned(), text(api));
    table.insert("api".to_owned(), api_table.into());
    toml::to_string(&table).map_err(|error| LabError::Answer {
        what: format!("the configuration of {}'s agent", host.name()),
        message: error.to_string(),
    })
}

/// Starts an agent in a process group of its own: a Ctrl-C at the terminal is handled by the
/// laboratory.
fn start_process(
    host: &Host,
    (config, log): (&Path, &Path),
    fail_points: &str,
    (own_sysfs, node): (bool, Option<&Node>),
) -> Result<Child, LabError> {
    let output = File::options()
        .create(true)
        .append(true)
        .open(log)
        .during(|| format!("open {}", log.display()))?;
    let errors = output
        .try_clone()
        .during(|| format!("open {}", log.display()))?;
    let program = own_binary("longhaul")?;
    let mut command = match node {
        Some(node) => entered(&node.mounts, &node.commands),
        // It becomes the program.
        None => Command::new("env"),
    };
    if own_sysfs {
        // In a mount namespace with the /sys of the network namespace.
        command.args(["ip", "netns", "exec", host.namespace().name()]);
    }
    command.arg(program);
    command.arg("agent").arg("--config").arg(config);
    command.stdin(Stdio::null()).stdout(output).stderr(errors);
    command.process_group(0);
    command.env(FAIL_POINT_VARIABLE, fail_points);
    host.spawn(&mut command)
}
