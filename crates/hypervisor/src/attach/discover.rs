//! Finds the QEMUs of this host in `/proc`: whose they are, where their control sockets are, and
//! what would keep Longhaul from attaching to them. Nothing of a guest is changed.

use super::words::Words;
use super::{command_line, learn};
use crate::config::HostConfig;
use crate::folder::GuestFolder;
use crate::guest::{Found, find_all};
use crate::observe::Blocker;
use crate::process::Account;
use crate::qmp::{Qmp, QmpError};
use crate::starter::Starter;
use nix::unistd::User;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::timeout;

/// The maximum number of QEMUs that are looked at.
const QEMUS_MAX: usize = 1024;
/// The time limit for a control socket to greet.
const GREETING_WITHIN: Duration = Duration::from_millis(500);
/// The time limit for all questions to one QEMU.
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);
/// The longest name of a QEMU's guest that is shown, in characters.
const NAME_CHARS_MAX: usize = 64;

/// The owner of a QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Owner {
    /// This host's agent: it launched the guest of this name.
    Longhaul(String),
    /// This host's agent is attached to it as the guest of this name.
    Attached(String),
    /// Something else, or another agent.
    Other(Starter),
}

/// The state of a control socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketState {
    /// No client has it.
    Free,
    /// Another program has it.
    Busy,
    /// It cannot be reached from here, or is no unix socket that listens.
    Unreachable,
}

/// A QMP socket of a QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControlSocket {
    /// Its path, or its address where it is no unix socket.
    pub path: String,
    /// Its state.
    pub state: SocketState,
}

/// A QEMU of this host.
#[derive(Debug, Clone)]
pub struct Discovered {
    /// Its process.
    pub pid: i32,
    /// The user that it runs as.
    pub user: String,
    /// The name that its command line gives the guest.
    pub name: Option<String>,
    /// Its owner.
    pub owner: Owner,
    /// Its QMP sockets, as its command line names them.
    pub sockets: Vec<ControlSocket>,
    /// The reasons that keep Longhaul from attaching to it; `None` where it was not asked.
    pub refusals: Option<Vec<Blocker>>,
}

/// Returns the QEMUs of this host. A QEMU is asked only if it is nobody's whom Longhaul knows, and
/// has a control socket that no client has.
pub async fn discover(config: &HostConfig) -> io::Result<Vec<Discovered>> {
    let known = known(config)?;
    let mut found = Vec::new();
    for pid in qemus(Path::new("/proc"))?.into_iter().take(QEMUS_MAX) {
        // One that ends meanwhile is left out.
        if let Some(one) = look(pid, config, &known).await {
            found.push(one);
        }
    }
    Ok(found)
}

/// Returns the guests that are known here, by their processes.
fn known(config: &HostConfig) -> io::Result<BTreeMap<i32, Owner>> {
    let guests = find_all(&config.state)?.into_iter();
    let of = |found| match found {
        Found::Running(guest) => {
            let (name, pid) = (guest.name().to_owned(), guest.pid()?);
            let owner = match guest.is_attached() {
                true => Owner::Attached(name),
                false => Owner::Longhaul(name),
            };
            Some((pid, owner))
        }
        Found::Ended(_) | Found::Damaged { .. } => None,
    };
    Ok(guests.filter_map(of).collect())
}

/// Returns the processes that run a QEMU.
fn qemus(proc: &Path) -> io::Result<BTreeSet<i32>> {
    let mut pids = BTreeSet::new();
    for entry in fs::read_dir(proc)? {
        let entry = entry?;
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        // A program that was replaced by an update is shown with ` (deleted)`.
        let program = fs::read_link(entry.path().join("exe")).ok();
        let name = program.as_deref().and_then(Path::file_name);
        if name.and_then(|name| name.to_str()).is_some_and(is_qemu) {
            pids.insert(pid);
        }
    }
    Ok(pids)
}

fn is_qemu(program: &str) -> bool {
    let program = program.strip_suffix(" (deleted)").unwrap_or(program);
    program.starts_with("qemu-system-") || matches!(program, "qemu-kvm" | "kvm")
}

async fn look(pid: i32, config: &HostConfig, known: &BTreeMap<i32, Owner>) -> Option<Discovered> {
    let words = command_line(pid).ok()?;
    let paths = paths(&words);
    let owner = match known.get(&pid) {
        Some(owner) => owner.clone(),
        None => {
            let mut seen = paths.iter().map(|path| seen_from_here(pid, path));
            match seen.any(|path| GuestFolder::is_of_an_agent(&path)) {
                true => Owner::Other(Starter::Longhaul),
                false => Owner::Other(Starter::of(pid, Path::new("/nonexistent")).ok()??),
            }
        }
    };
    let user = Account::of_process(pid).ok()?.uid;
    let named = User::from_uid(user).ok().flatten();
    let mut sockets: Vec<ControlSocket> = paths
        .into_iter()
        .map(|path| {
            let state = state(pid, &path);
            ControlSocket { path, state }
        })
        .collect();
    let is_managed = |starter: &Starter| {
        matches!(
            starter,
            Starter::Longhaul | Starter::Libvirt { .. } | Starter::Proxmox { .. }
        )
    };
    let refusals = match &owner {
        Owner::Other(starter) if !is_managed(starter) => ask(pid, &mut sockets, config).await,
        _ => None,
    };
    Some(Discovered {
        pid,
        user: named.map_or(user.to_string(), |user| user.name),
        name: name(&words),
        owner,
        sockets,
        refusals,
    })
}

/// Asks a QEMU over its first free control socket what would keep Longhaul from attaching to it.
async fn ask(pid: i32, sockets: &mut [ControlSocket], config: &HostConfig) -> Option<Vec<Blocker>> {
    let free = |socket: &&mut ControlSocket| socket.state == SocketState::Free;
    let socket = sockets.iter_mut().find(free)?;
    let path = seen_from_here(pid, &socket.path);
    let qmp = match Qmp::connect(&path, GREETING_WITHIN).await {
        Ok(qmp) => qmp,
        Err(QmpError::Busy { .. }) => {
            socket.state = SocketState::Busy;
            return None;
        }
        Err(_) => {
            socket.state = SocketState::Unreachable;
            return None;
        }
    };
    let learning = learn("discovered", &qmp, pid, config);
    Some(match timeout(ANSWERS_WITHIN, learning).await {
        Ok(Ok(learned)) => learned.refusals,
        Ok(Err(error)) => vec![unanswered(error.to_string())],
        Err(_) => vec![unanswered("its QEMU does not answer in time".to_owned())],
    })
}

fn unanswered(text: String) -> Blocker {
    Blocker {
        text,
        hint: "look at what else uses its control socket".to_owned(),
    }
}

/// Returns the QMP sockets that a command line names: paths, or addresses of another kind.
fn paths(words: &[String]) -> Vec<String> {
    let mut chardevs = BTreeMap::new();
    let mut paths = Vec::new();
    let values = |names: &'static [&'static str]| {
        let pairs = words.windows(2);
        pairs.filter_map(move |pair| {
            let option = pair[0].trim_start_matches('-');
            let is_option = pair[0].starts_with('-') && names.contains(&option);
            is_option.then_some(pair[1].as_str())
        })
    };
    for value in values(&["chardev"]) {
        let chardev = Words::read(value, "backend");
        let path = chardev.get("path").or(chardev.get("addr.data.path"));
        let path = path.or(chardev.get("backend.data.addr.data.path"));
        if let (Some(id), Some(path)) = (chardev.get("id"), path) {
            chardevs.insert(id.to_owned(), path.to_owned());
        }
    }
    for value in values(&["mon"]) {
        let monitor = Words::read(value, "chardev");
        let control = monitor.get("mode") == Some("control");
        let path = monitor.get("chardev").and_then(|id| chardevs.get(id));
        paths.extend(path.filter(|_| control).cloned());
    }
    for value in values(&["qmp", "qmp-pretty"]) {
        let path = match value.strip_prefix("chardev:") {
            Some(id) => chardevs.get(id).cloned(),
            None => {
                let address = Words::read(value, "address");
                let path = address.get("path").or(address.get("address"));
                path.map(|path| path.strip_prefix("unix:").unwrap_or(path).to_owned())
            }
        };
        paths.extend(path);
    }
    paths
}

/// Returns the name that a command line gives the guest.
fn name(words: &[String]) -> Option<String> {
    let at = words.iter().position(|word| word == "-name")?;
    let name = Words::read(words.get(at + 1)?, "guest");
    let name = name.get("guest")?;
    let shown = name.chars().filter(|c| !c.is_control());
    Some(shown.take(NAME_CHARS_MAX).collect())
}

/// Returns a path of that process, as this process can open it.
fn seen_from_here(pid: i32, path: &str) -> PathBuf {
    let process = PathBuf::from(format!("/proc/{pid}"));
    match path.strip_prefix('/') {
        Some(inside) => process.join("root").join(inside),
        None => process.join("cwd").join(path),
    }
}

/// Returns the state of a socket, from the kernel's list of unix sockets. Those of its clients
/// have its path as well.
fn state(pid: i32, path: &str) -> SocketState {
    if fs::metadata(seen_from_here(pid, path)).is_err() {
        return SocketState::Unreachable;
    }
    let list = fs::read_to_string(format!("/proc/{pid}/net/unix"));
    list.map_or(SocketState::Unreachable, |list| state_in(&list, path))
}

fn state_in(list: &str, path: &str) -> SocketState {
    const LISTENING: u32 = 0x10000;
    let mut state = SocketState::Unreachable;
    for line in list.lines().skip(1) {
        // Address, references, protocol, flags, type, state, inode, path.
        let mut fields = line.splitn(8, ' ').map(str::trim);
        let flags = fields
            .nth(3)
            .and_then(|flags| u32::from_str_radix(flags, 16).ok());
        let of_path = line
            .split_once(path)
            .is_some_and(|(before, after)| after.is_empty() && before.ends_with(' '));
        if !of_path {
            continue;
        }
        match flags {
            Some(flags) if flags & LISTENING != 0 => state = SocketState::Free,
            // QEMU stops listening while it has its one client.
            _ => return SocketState::Busy,
        }
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn control_sockets_are_found_however_they_are_written() {
        for (line, expected) in [
            ("-qmp unix:/run/a,server=on,wait=off", vec!["/run/a"]),
            (
                "--qmp unix:/run/a,server,nowait -monitor unix:/run/hmp,server",
                vec!["/run/a"],
            ),
            (
                "-chardev socket,id=c,path=/run/a,,b,server=on -mon chardev=c,mode=control",
                vec!["/run/a,b"],
            ),
            (
                "-chardev socket,id=c,path=/run/a,server=on -mon c,mode=readline",
                vec![],
            ),
            (
                "-chardev socket,id=c,path=/run/a,server=on -qmp chardev:c -qmp tcp:[::1]:4444",
                vec!["/run/a", "tcp:[::1]:4444"],
            ),
            ("-qmp", vec![]),
        ] {
            assert_eq!(paths(&words(line)), expected, "{line}");
        }
        assert_eq!(
            name(&words("-name guest=web,debug-threads=on")).as_deref(),
            Some("web")
        );
        assert_eq!(name(&words("-name web -m 1")).as_deref(), Some("web"));
        assert_eq!(name(&words("-m 1")), None);
    }

    #[test]
    fn a_socket_with_a_client_is_busy() {
        let head = "Num       RefCount Protocol Flags    Type St Inode Path\n";
        let line = |flags: &str, state: &str, path: &str| {
            format!("0000000000000000: 00000002 00000000 {flags} 0001 {state} 4711 {path}\n")
        };
        let listens = line("00010000", "01", "/run/a");
        let other = line("00000000", "03", "/run/a2");
        let client = line("00000000", "03", "/run/a");
        let of = |lines: &[&String]| {
            let lines: String = lines.iter().map(|line| line.as_str()).collect();
            state_in(&format!("{head}{lines}"), "/run/a")
        };
        assert_eq!(of(&[&other, &listens]), SocketState::Free);
        assert_eq!(of(&[&listens, &client]), SocketState::Busy);
        assert_eq!(of(&[&client]), SocketState::Busy);
        assert_eq!(of(&[&other]), SocketState::Unreachable);
    }

    #[test]
    fn programs_are_known_by_their_names() {
        let known = [
            "qemu-system-x86_64",
            "qemu-kvm",
            "kvm",
            "qemu-system-x86_64 (deleted)",
        ];
        assert!(known.iter().all(|program| is_qemu(program)));
        assert!(!is_qemu("qemu-img") && !is_qemu("bash"));
    }
}
