//! This host as a node of Proxmox VE: its files, its guests that run, its commands.

use crate::names::{VmId, vmid};
use crate::storage::Storages;
use longhaul_hypervisor::process::ProcessId;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;

/// Its cluster's files.
const ETC: &str = "/etc/pve";
/// The files of guests that run.
const RUN: &str = "/run/qemu-server";
/// The time limit for a question to a QEMU that nobody moves.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);
/// The time limit for the list of a storage's volumes.
const LIST_TIMEOUT: Duration = Duration::from_secs(60);
/// The number of characters of a command's error that are shown.
const ERROR_CHARS_MAX: usize = 400;
/// Programs whose files are read are not larger.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Why a command of Proxmox VE failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CommandError {
    /// It could not be started.
    #[error("`{command}` cannot be started: {why}")]
    Start {
        /// The command.
        command: String,
        /// The system's error.
        why: String,
    },
    /// It refused or failed.
    #[error("`{command}` failed: {said}")]
    Failed {
        /// The command.
        command: String,
        /// What it said last.
        said: String,
    },
    /// It did not end in time, and goes on.
    #[error("`{command}` has not ended within {} s", waited.as_secs())]
    Timeout {
        /// The command.
        command: String,
        /// The time waited.
        waited: Duration,
    },
}

/// Runs a command, and returns its output.
///
/// # Errors
/// When it fails.
pub async fn run(
    program: &str,
    arguments: &[&str],
    limit: Duration,
) -> Result<String, CommandError> {
    let command = format!("{program} {}", arguments.join(" "));
    let running = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output();
    let output = match tokio::time::timeout(limit, running).await {
        Ok(Ok(output)) => output,
        Ok(Err(error)) => {
            let why = error.to_string();
            return Err(CommandError::Start { command, why });
        }
        Err(_) => {
            let waited = limit;
            return Err(CommandError::Timeout { command, waited });
        }
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    let said = match text(&output.stderr) {
        said if said.is_empty() => output.status.to_string(),
        said => said,
    };
    let more = said.chars().count().saturating_sub(ERROR_CHARS_MAX);
    let said = said.chars().skip(more).collect();
    Err(CommandError::Failed { command, said })
}

/// Returns the volumes of a guest on a storage, as Proxmox VE's commands name them.
///
/// # Errors
/// When the storage cannot be asked.
pub async fn volumes(storage: &str, id: VmId) -> Result<Vec<String>, CommandError> {
    let number = id.to_string();
    let arguments = ["list", storage, "--vmid", &number];
    let said = run("pvesm", &arguments, LIST_TIMEOUT).await?;
    let firsts = said
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    let volumes = firsts.filter(|first| first.contains(':'));
    Ok(volumes.map(str::to_owned).collect())
}

/// Returns the size of the extents of a volume group of LVM, in bytes.
///
/// # Errors
/// When LVM cannot be asked.
pub async fn extent_bytes(group: &str) -> Result<u64, CommandError> {
    let arguments = [
        "--noheadings",
        "--nosuffix",
        "--units",
        "b",
        "-o",
        "vg_extent_size",
        group,
    ];
    let said = run("vgs", &arguments, LIST_TIMEOUT).await?;
    let bytes = said.parse().ok().filter(|bytes: &u64| *bytes > 0);
    bytes.ok_or_else(|| CommandError::Failed {
        command: format!("vgs {}", arguments.join(" ")),
        said: format!("it says {said:?}"),
    })
}

/// Returns whether this host is a node of Proxmox VE.
pub fn is_there() -> bool {
    guests_folder().is_dir()
}

/// Checks that the files of this node are there: they are not while its cluster's file system is
/// down.
///
/// # Errors
/// When they are not.
pub fn present() -> io::Result<()> {
    match is_there() {
        true => Ok(()),
        false => {
            let text = "the files of Proxmox VE are not there (systemctl status pve-cluster)";
            Err(io::Error::other(text))
        }
    }
}

fn guests_folder() -> PathBuf {
    Path::new(ETC).join("qemu-server")
}

/// Returns the path of the file of a guest of this node.
pub fn config_path(id: VmId) -> PathBuf {
    guests_folder().join(format!("{id}.conf"))
}

/// Returns the path of the firewall's rules of a guest.
pub fn firewall_path(id: VmId) -> PathBuf {
    Path::new(ETC).join(format!("firewall/{id}.fw"))
}

/// Returns the path of the control socket of a guest.
pub fn qmp(id: VmId) -> PathBuf {
    Path::new(RUN).join(format!("{id}.qmp"))
}

/// Returns the path of the socket on which the QEMU of an arriving guest takes its stream.
pub fn incoming(id: VmId) -> PathBuf {
    Path::new(RUN).join(format!("{id}.migrate"))
}

/// Returns the name of this node in its cluster.
///
/// # Errors
/// When it cannot be read.
pub fn name() -> io::Result<String> {
    let local = fs::read_link(Path::new(ETC).join("local"))?;
    let name = local.file_name().and_then(|name| name.to_str());
    name.map(str::to_owned)
        .ok_or_else(|| io::Error::other("/etc/pve/local leads to no node"))
}

/// Returns the text of a file, if it is there.
///
/// # Errors
/// When it cannot be read, or is too large.
pub fn read(path: &Path) -> io::Result<Option<String>> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
        Ok(file) if file.len() > FILE_BYTES_MAX => {
            let text = format!("{} is too large", path.display());
            return Err(io::Error::other(text));
        }
        Ok(_) => {}
    }
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some),
    }
}

/// Returns the numbers of the guests of this node.
///
/// # Errors
/// When its folder cannot be read.
pub fn guests() -> io::Result<Vec<VmId>> {
    let entries = match fs::read_dir(guests_folder()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut ids = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        let id = name.to_str().and_then(|name| name.strip_suffix(".conf"));
        ids.extend(id.and_then(vmid));
    }
    ids.sort_unstable();
    Ok(ids)
}

/// Returns whether a number is that of a guest or container of any node of the cluster.
///
/// # Errors
/// When the nodes cannot be read.
pub fn is_taken(id: VmId) -> io::Result<bool> {
    for node in fs::read_dir(Path::new(ETC).join("nodes"))? {
        let node = node?.path();
        let file = format!("{id}.conf");
        if ["qemu-server", "lxc"]
            .iter()
            .any(|kind| node.join(kind).join(&file).exists())
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the files of guests with this number at other nodes of this node's cluster.
///
/// # Errors
/// When the nodes cannot be read.
pub fn elsewhere(id: VmId) -> io::Result<Vec<String>> {
    let own = name()?;
    let mut files = Vec::new();
    for node in fs::read_dir(Path::new(ETC).join("nodes"))? {
        let node = node?;
        if node.file_name().to_str() != Some(&own) {
            let file = node.path().join(format!("qemu-server/{id}.conf"));
            files.extend(read(&file)?);
        }
    }
    Ok(files)
}

/// Returns the storages of the cluster.
///
/// # Errors
/// When they cannot be read.
pub fn storages() -> io::Result<Storages> {
    let text = read(&Path::new(ETC).join("storage.cfg"))?;
    Ok(Storages::read(&text.unwrap_or_default()))
}

/// Returns whether the cluster restarts a guest elsewhere when its node is lost.
///
/// # Errors
/// When that cannot be read.
pub fn is_highly_available(id: VmId) -> io::Result<bool> {
    let text = read(&Path::new(ETC).join("ha/resources.cfg"))?.unwrap_or_default();
    let head = format!("vm:{id}");
    let compact = |line: &str| line.split_whitespace().collect::<String>();
    Ok(text.lines().any(|line| compact(line) == head))
}

/// Returns whether a guest's disks are copied to another node from time to time.
///
/// # Errors
/// When that cannot be read.
pub fn is_replicated(id: VmId) -> io::Result<bool> {
    let text = read(&Path::new(ETC).join("replication.cfg"))?.unwrap_or_default();
    let mut heads = text
        .lines()
        .filter_map(|line| line.split_once(':'))
        .filter(|(kind, _)| !kind.starts_with([' ', '\t']));
    let prefix = format!("{id}-");
    Ok(heads.any(|(_, job)| job.trim().starts_with(&prefix)))
}

/// A guest's QEMU.
#[derive(Debug, Clone)]
pub struct Running {
    /// Its process.
    pub process: ProcessId,
    /// Its command line.
    pub words: Vec<String>,
}

/// Returns the QEMU of a guest, if it runs.
///
/// # Errors
/// When its files cannot be read.
pub fn running(id: VmId) -> io::Result<Option<Running>> {
    let Some(text) = read(&Path::new(RUN).join(format!("{id}.pid")))? else {
        return Ok(None);
    };
    let Ok(pid) = text.trim().parse() else {
        return Ok(None);
    };
    let Some(process) = ProcessId::of(pid)? else {
        return Ok(None);
    };
    let line = match fs::read(format!("/proc/{pid}/cmdline")) {
        // It has ended meanwhile.
        Err(_) => return Ok(None),
        Ok(line) => line,
    };
    let words = line.split(|byte| *byte == 0);
    let words: Vec<String> = words
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect();
    // The number may be another process's by now.
    let end = format!("/qemu-server/{id}.pid");
    let is_it = words
        .windows(2)
        .any(|words| words[0] == "-pidfile" && words[1].ends_with(&end));
    Ok(is_it.then_some(Running { process, words }))
}

impl Running {
    /// Returns the value of an option of its command line.
    pub fn option(&self, name: &str) -> Option<&str> {
        let mut pairs = self.words.windows(2);
        pairs.find_map(|words| (words[0] == name).then_some(words[1].as_str()))
    }

    /// Returns the machine type as Proxmox VE wrote it, such as `pc-q35-9.2+pve1` or `pc+pve0`.
    pub fn machine(&self) -> Option<&str> {
        let mut parts = self.option("-machine")?.split(',');
        parts.find_map(|part| {
            let plain = (!part.contains('=')).then_some(part);
            part.strip_prefix("type=").or(plain)
        })
    }

    /// Returns the CPU model.
    pub fn cpu(&self) -> Option<&str> {
        self.option("-cpu")?.split(',').next()
    }
}

/// Asks the QEMU of a guest for the machine that it is, without an alias. It is connected to only
/// briefly; where another program is, the answer is an error after a while.
///
/// # Errors
/// When it does not answer.
pub fn ask_machine(id: VmId) -> io::Result<String> {
    let socket = UnixStream::connect(qmp(id))?;
    socket.set_read_timeout(Some(ASK_TIMEOUT))?;
    socket.set_write_timeout(Some(ASK_TIMEOUT))?;
    let mut writer = socket.try_clone()?;
    let mut lines = BufReader::new(socket).lines();
    let mut next = || -> io::Result<serde_json::Value> {
        let line = lines.next().ok_or(io::ErrorKind::UnexpectedEof)??;
        serde_json::from_str(&line).map_err(io::Error::other)
    };
    next()?;
    let mut ask = |command: &str| -> io::Result<serde_json::Value> {
        writeln!(writer, "{command}")?;
        loop {
            let mut answer = next()?;
            if answer.get("event").is_none() {
                return Ok(answer["return"].take());
            }
        }
    };
    ask(r#"{"execute":"qmp_capabilities"}"#)?;
    let asked = r#"{"execute":"qom-get","arguments":{"path":"/machine","property":"type"}}"#;
    let kind = ask(asked)?;
    let kind = kind.as_str().and_then(|kind| kind.strip_suffix("-machine"));
    kind.map(str::to_owned)
        .ok_or_else(|| io::Error::other("QEMU does not say which machine it is"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_says_what_the_machine_is() {
        let of = |line: &str| {
            let running = Running {
                process: ProcessId::of(1).unwrap().unwrap(),
                words: line.split(' ').map(str::to_owned).collect(),
            };
            let text = |text: Option<&str>| text.map(str::to_owned);
            [text(running.machine()), text(running.cpu())]
        };
        let both = |machine: &str, cpu: &str| [machine, cpu].map(|it| Some(it.to_owned()));
        assert_eq!(
            of("kvm -cpu qemu64,+aes,enforce -machine hpet=off,type=pc-q35-9.2+pve1"),
            both("pc-q35-9.2+pve1", "qemu64")
        );
        assert_eq!(of("kvm -cpu host -machine pc"), both("pc", "host"));
        assert_eq!(of("kvm -m 768"), [None, None]);
    }
}
