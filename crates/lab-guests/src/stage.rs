//! Provides the two hosts on which lines are tried, one after the other, and clears them.

use crate::words;
use longhaul_lab::agent::Agent;
use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::KernelFiles;
use longhaul_lab::lab::{Host, Lab, Plan, say};
use longhaul_lab::link::spec::ParseLinkError;
use longhaul_lab::process::{self, ProcessId};
use longhaul_lab::product::{Product, Settings};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The link between the hosts: fast, because its speed is not tested here.
const LINK: &str = "1gbit,4ms";
/// The bridge on each host.
pub(crate) const BRIDGE: &str = "br0";
/// The hosts, by their indices.
pub(crate) const SOURCE: usize = 0;
pub(crate) const DESTINATION: usize = 1;
/// Files of an agent's state that stay between lines: its identity, the trusted hosts, and what is
/// known about emulators.
const KEPT: [&str; 3] = ["identity.pem", "trust.toml", "emulators.json"];
/// The beginnings of the names of interfaces that belong to a guest.
const INTERFACES: [&str; 4] = ["mt", "mf", "lh", "tap"];

/// Two hosts with agents, and no guest.
#[derive(Debug)]
pub(crate) struct Stage {
    pub(crate) product: Product,
    pub(crate) lab: Lab,
    pub(crate) files: KernelFiles,
    /// The agents' configurations without the tables of a line.
    base: Vec<toml::Table>,
    /// The processes on each host that do not belong to an agent or a guest.
    others: Vec<Vec<i32>>,
}

/// How long the kernel may take to remove what belonged to an ended process.
const CLEAR_LIMIT: Duration = Duration::from_secs(10);

/// The output of a command.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) status: Option<ExitStatus>,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// Lets programs open TAPs that are not root any more, as udev does.
fn open_tun() -> Result<(), LabError> {
    let path = Path::new("/dev/net/tun");
    let during = || format!("open {} to all users", path.display());
    let mode = fs::metadata(path).during(during)?.permissions().mode();
    if mode & 0o666 != 0o666 {
        let all = fs::Permissions::from_mode(mode | 0o666);
        fs::set_permissions(path, all).during(during)?;
        say(&format!(
            "opened {} to all users, as udev does",
            path.display()
        ));
    }
    Ok(())
}

impl Stage {
    pub(crate) fn make() -> Result<Self, LabError> {
        let link = LINK.parse();
        let mut lab = Lab::create(&Plan {
            purpose: "guests".to_owned(),
            hosts: 2,
            link: link.map_err(|error: ParseLinkError| LabError::Link(error.to_string()))?,
            seed: 1,
        })?;
        open_tun()?;
        let mut others = Vec::new();
        for host in lab.hosts() {
            let bridge = format!("link add {BRIDGE} type bridge\nlink set {BRIDGE} up\n");
            host.namespace().configure(&bridge)?;
            others.push(host.namespace().processes()?);
        }
        let files = KernelFiles::make(lab.host(SOURCE)?.folder())?;
        let settings = Settings {
            qemus: vec!["10.0".to_owned()],
            accelerator: "tcg".to_owned(),
        };
        let product = Product::start(&mut lab, &files, &settings)?;
        let base = lab.hosts().iter().map(configuration);
        let base = base.collect::<Result<Vec<toml::Table>, LabError>>()?;
        Ok(Self {
            product,
            base,
            lab,
            files,
            others,
        })
    }

    pub(crate) fn host(&self, host: usize) -> Result<&Host, LabError> {
        self.lab.host(host)
    }

    pub(crate) fn agent(&self, host: usize) -> Result<&Agent, LabError> {
        self.product.agent(host)
    }

    /// Returns the folder of a host's images.
    pub(crate) fn images(&self, host: usize) -> Result<PathBuf, LabError> {
        Ok(self.host(host)?.folder().join("images"))
    }

    /// Returns the folder of a host's agent.
    pub(crate) fn state(&self, host: usize) -> Result<PathBuf, LabError> {
        Ok(self.host(host)?.folder().join("state"))
    }

    /// Returns the folder for sockets and other small files of the line, with a short path.
    pub(crate) fn run_folder(&self) -> Result<PathBuf, LabError> {
        Ok(self.host(SOURCE)?.socket_folder().join("r"))
    }

    /// Starts the agents with these tables.
    pub(crate) fn begin(&mut self, tables: &[toml::Table; 2]) -> Result<(), LabError> {
        for (host, more) in tables.iter().enumerate() {
            let mut table = self.base.get(host).cloned().unwrap_or_default();
            table.extend(more.clone());
            let text = toml::to_string(&table).map_err(|error| LabError::Answer {
                what: "an agent's configuration".to_owned(),
                message: error.to_string(),
            })?;
            let path = self.host(host)?.folder().join("agent.toml");
            fs::write(&path, text).during(|| format!("write {}", path.display()))?;
            let agent = self.product.agent_mut(host)?;
            // It looks there for the bridges of TAPs.
            agent.see_interfaces();
            agent.restart(self.lab.host(host)?)?;
        }
        Ok(())
    }

    /// Ends everything of a line on both hosts, and makes its folders empty.
    pub(crate) fn clear(&mut self) -> Result<(), LabError> {
        for host in 0..2 {
            self.product.agent_mut(host)?.kill()?;
            process::kill_all(&self.of_guests(host)?)?;
            self.clear_interfaces(host)?;
            let state = self.state(host)?;
            for path in entries(&state)? {
                let kept = path
                    .file_name()
                    .is_some_and(|name| KEPT.iter().any(|it| name == *it));
                if !kept {
                    remove(&path)?;
                }
            }
            empty(&self.images(host)?)?;
        }
        empty(&self.run_folder()?)
    }

    /// Removes the interfaces of guests. Those of a QEMU that has just ended may still disappear by
    /// themselves meanwhile.
    fn clear_interfaces(&self, host: usize) -> Result<(), LabError> {
        let mut failed = Ok(());
        process::wait_until(CLEAR_LIMIT, || {
            failed = self.delete_interfaces(host);
            failed.is_ok()
        });
        failed
    }

    fn delete_interfaces(&self, host: usize) -> Result<(), LabError> {
        let name = self.host(host)?.namespace().name();
        let words = ["-n", name, "-json", "link"];
        let said = process::run(Command::new("ip").args(words))?;
        let links: Vec<BTreeMap<String, serde_json::Value>> = words::parse("ip -json link", &said)?;
        for link in &links {
            let Some(interface) = link.get("ifname").and_then(|name| name.as_str()) else {
                continue;
            };
            if INTERFACES.iter().any(|it| interface.starts_with(it)) {
                let words = ["-n", name, "link", "delete", interface];
                process::run(Command::new("ip").args(words))?;
            }
        }
        Ok(())
    }

    /// Returns the processes on a host besides the agent and the laboratory's own.
    pub(crate) fn of_guests(&self, host: usize) -> Result<Vec<i32>, LabError> {
        let agent = i32::try_from(self.agent(host)?.pid()).unwrap_or_default();
        let mut found = self.host(host)?.namespace().processes()?;
        let others = self.others.get(host).map_or(&[][..], Vec::as_slice);
        // Ended processes that are not yet reaped are gone.
        found.retain(|pid| *pid != agent && !others.contains(pid) && ProcessId::of(*pid).is_some());
        Ok(found)
    }

    /// Runs a command of the product's against a host's agent; one that exceeds the limit is ended.
    pub(crate) fn say(
        &self,
        host: usize,
        arguments: &[&str],
        limit: Duration,
    ) -> Result<Said, LabError> {
        let mut command = self.agent(host)?.command()?;
        command.args(arguments);
        run_within(&mut command, limit)
    }
}

/// Runs a command to its end, or to the limit.
fn run_within(command: &mut Command, limit: Duration) -> Result<Said, LabError> {
    let shown = process::show(command);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .during(|| format!("start `{shown}`"))?;
    let [out, err] = [
        child.stdout.take().map(reader),
        child.stderr.take().map(reader),
    ];
    let deadline = Instant::now() + limit;
    let mut status = None;
    process::wait_until(limit, || {
        status = child.try_wait().ok().flatten();
        status.is_some() || Instant::now() > deadline
    });
    if status.is_none() {
        // It may have ended just now.
        let _ = child.kill();
        child.wait().during(|| format!("wait for `{shown}`"))?;
    }
    let text = |reader: Option<std::thread::JoinHandle<String>>| {
        reader.and_then(|it| it.join().ok()).unwrap_or_default()
    };
    Ok(Said {
        status,
        out: text(out),
        err: text(err),
    })
}

fn reader(mut from: impl io::Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut text = Vec::new();
        // A torn output is shown as far as it came.
        let _ = from.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    })
}

/// Returns the part of an agent's configuration that no line changes.
fn configuration(host: &Host) -> Result<toml::Table, LabError> {
    let path = host.folder().join("agent.toml");
    let text = fs::read_to_string(&path).during(|| format!("read {}", path.display()))?;
    let mut table: toml::Table = toml::from_str(&text).map_err(|error| LabError::Answer {
        what: path.display().to_string(),
        message: error.to_string(),
    })?;
    table.retain(|key, _| ["name", "state", "listen", "api"].contains(&key));
    Ok(table)
}

/// Returns the paths in a folder; none if it is not there.
pub(crate) fn entries(folder: &Path) -> Result<Vec<PathBuf>, LabError> {
    let reading = || format!("read {}", folder.display());
    let found = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        found => found.during(reading)?,
    };
    let mut paths = Vec::new();
    for entry in found {
        paths.push(entry.during(reading)?.path());
    }
    paths.sort();
    Ok(paths)
}

fn remove(path: &Path) -> Result<(), LabError> {
    let removed = match path.is_dir() && !path.is_symlink() {
        true => fs::remove_dir_all(path),
        false => fs::remove_file(path),
    };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).during(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Makes a folder that is empty, and that any user may write to: some lines change QEMU's user.
fn empty(folder: &Path) -> Result<(), LabError> {
    remove(folder)?;
    make_folder(folder)
}

/// Makes a folder that any user may write to.
pub(crate) fn make_folder(folder: &Path) -> Result<(), LabError> {
    fs::create_dir_all(folder).during(|| format!("make {}", folder.display()))?;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o777))
        .during(|| format!("open {} to others", folder.display()))
}
