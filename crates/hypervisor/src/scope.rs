//! Places a QEMU outside the agent's own unit, session and cgroup, so that the end of the agent
//! never ends the guests.
//!
//! Where systemd runs this machine, a QEMU is a transient service of its own. Elsewhere it gets a
//! session of its own, and a cgroup where one can be created.

use crate::process::Account;
use longhaul_protocol::guest::GuestDescription;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::process::{Child, Command};

/// Folder of the guests' cgroups in each hierarchy.
const CGROUP_FOLDER: &str = "longhaul";
/// The number of tries to remove a cgroup whose last process is ending.
const CGROUP_TRIES: u32 = 50;
/// The search path of started programs.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The scope of a QEMU.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// A session of its own.
    #[default]
    Session,
    /// A session of its own, and these cgroups.
    Cgroups(Vec<PathBuf>),
    /// A transient unit of systemd.
    Unit(String),
}

/// A program to be started.
pub(crate) struct Program<'a> {
    /// The program's file.
    pub(crate) file: &'a Path,
    pub(crate) arguments: &'a [String],
    pub(crate) account: Option<&'a Account>,
    /// The file of its standard output and error.
    pub(crate) log: &'a Path,
    /// A name that is unique among the scopes of this machine.
    pub(crate) scope_name: &'a str,
    pub(crate) limits: ScopeLimits,
}

/// The resource limits of a QEMU, whatever its guest or the received state does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ScopeLimits {
    /// Memory, in bytes.
    pub(crate) memory_bytes: u64,
    /// Threads.
    pub(crate) tasks: u32,
}

impl ScopeLimits {
    /// The allowance beyond the guest's RAM: video memory, a sixteenth for tables, translated code
    /// (at most 1 GiB under TCG), buffers.
    const OVERHEAD_BYTES: u64 = 2 << 30;
    /// The allowance beyond a thread for each virtual CPU: QEMU's worker pools.
    const OVERHEAD_TASKS: u32 = 256;

    pub(crate) fn of(guest: &GuestDescription) -> Self {
        let memory = guest.memory_bytes();
        Self {
            memory_bytes: memory
                .saturating_add(memory / 16)
                .saturating_add(Self::OVERHEAD_BYTES),
            tasks: guest.vcpus.saturating_add(Self::OVERHEAD_TASKS),
        }
    }
}

/// A program that was started.
pub(crate) struct Started {
    pub(crate) pid: i32,
    pub(crate) scope: Scope,
    /// The child process to be reaped, where it is one of this process.
    pub(crate) child: Option<Child>,
}

/// Returns whether systemd runs this machine, in the same network namespace as this process.
///
/// An agent in a network namespace of its own (as in the laboratory) must keep its QEMUs in it.
fn systemd_serves() -> bool {
    let network = |process| fs::read_link(format!("/proc/{process}/ns/net")).ok();
    let own = network("thread-self");
    Path::new("/run/systemd/system").is_dir()
        && nix::unistd::geteuid().is_root()
        && own.is_some()
        && own == network("1")
}

/// Starts a program in a scope of its own.
pub(crate) async fn start(program: &Program<'_>) -> io::Result<Started> {
    if systemd_serves() {
        start_unit(program).await
    } else {
        start_session(program)
    }
}

fn unit_arguments(program: &Program<'_>, unit: &str) -> Vec<String> {
    let log = program.log.display();
    let mut arguments: Vec<String> = [
        "--quiet",
        "--collect",
        "--no-ask-password",
        "--service-type=exec",
        "--working-directory=/",
        "--property=NoNewPrivileges=yes",
        "--property=StandardInput=null",
    ]
    .map(str::to_owned)
    .into();
    arguments.push(format!("--unit={unit}"));
    arguments.push(format!(
        "--description=Guest of Longhaul ({})",
        program.scope_name
    ));
    arguments.push(format!("--property=StandardOutput=append:{log}"));
    arguments.push(format!("--property=StandardError=append:{log}"));
    let ScopeLimits {
        memory_bytes,
        tasks,
    } = program.limits;
    arguments.push(format!("--property=MemoryMax={memory_bytes}"));
    arguments.push(format!("--property=TasksMax={tasks}"));
    // A core dump would contain the guest's memory.
    arguments.push("--property=LimitCORE=0".to_owned());
    if let Some(account) = program.account {
        arguments.push(format!("--uid={}", account.name));
    }
    arguments.push("--".to_owned());
    arguments.push(program.file.display().to_string());
    // systemd would substitute variables.
    let literal = |argument: &String| argument.replace('$', "$$");
    arguments.extend(program.arguments.iter().map(literal));
    arguments
}

fn unit_name(scope_name: &str) -> String {
    format!("longhaul-guest-{scope_name}.service")
}

async fn start_unit(program: &Program<'_>) -> io::Result<Started> {
    let unit = unit_name(program.scope_name);
    run("systemd-run", &unit_arguments(program, &unit)).await?;
    let shown = run(
        "systemctl",
        &["show", "--property=MainPID", "--value", &unit],
    )
    .await?;
    let pid = shown.trim().parse().unwrap_or(0);
    if pid == 0 {
        return Err(io::Error::other(format!(
            "systemd started {unit}, and it ended at once"
        )));
    }
    Ok(Started {
        pid,
        scope: Scope::Unit(unit),
        child: None,
    })
}

fn start_session(program: &Program<'_>) -> io::Result<Started> {
    close_files_on_exec()?;
    let log = File::options()
        .create(true)
        .append(true)
        .open(program.log)?;
    let mut command = Command::new("setsid");
    if let Some(account) = program.account {
        command
            .arg("setpriv")
            .arg(format!("--reuid={}", account.uid))
            .arg(format!("--regid={}", account.gid))
            .args(["--init-groups", "--inh-caps=-all", "--no-new-privs", "--"]);
    }
    let child = command
        .arg(program.file)
        .args(program.arguments)
        .env_clear()
        .env("PATH", PATH)
        .env("LANG", "C.UTF-8")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .kill_on_drop(false)
        .spawn()?;
    // `None` only for a child that was reaped.
    let pid = child.id().unwrap_or(0) as i32;
    let cgroups = join_cgroups(program.scope_name, pid, program.limits);
    Ok(Started {
        pid,
        scope: match cgroups.is_empty() {
            true => Scope::Session,
            false => Scope::Cgroups(cgroups),
        },
        child: Some(child),
    })
}

/// Keeps files inherited by this process from being inherited by a QEMU.
///
/// Files that Rust opens are closed on exec anyway.
fn close_files_on_exec() -> io::Result<()> {
    for entry in fs::read_dir("/proc/self/fd")? {
        let name = entry?.file_name();
        let Some(number) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        if number <= 2 {
            continue;
        }
        #[expect(
            unsafe_code,
            reason = "files that nothing in this process owns have no safe name"
        )]
        // SAFETY: the borrow lives for this one call, which neither reads nor closes the file. If
        // another thread closed it meanwhile, the call fails, or marks a file of that thread that
        // is closed on exec anyway.
        let file = unsafe { BorrowedFd::borrow_raw(number) };
        match rustix::io::fcntl_setfd(file, rustix::io::FdFlags::CLOEXEC) {
            Ok(()) | Err(rustix::io::Errno::BADF) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Puts a process into a cgroup of its own in each hierarchy where that is possible.
fn join_cgroups(name: &str, pid: i32, limits: ScopeLimits) -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut joined = Vec::new();
    for hierarchy in hierarchies(&mounts) {
        let folder = hierarchy.join(CGROUP_FOLDER);
        sweep(&folder);
        let path = folder.join(name);
        match join_cgroup(&path, pid) {
            Ok(()) => {
                limit_cgroup(&folder, &path, limits);
                joined.push(path);
            }
            Err(error) => {
                tracing::debug!(path = %path.display(), %error, "no cgroup of its own here");
                let _ = fs::remove_dir(&path);
            }
        }
    }
    joined
}

/// Limits a cgroup as far as its hierarchy has the controllers; where it has none, only the
/// description limits the guest.
fn limit_cgroup(folder: &Path, path: &Path, limits: ScopeLimits) {
    // In v2 only: there a folder delegates controllers to its children.
    for controller in ["+memory", "+pids"] {
        let handed = fs::write(folder.join("cgroup.subtree_control"), controller);
        tracing::debug!(folder = %folder.display(), controller, ?handed, "controllers");
    }
    for (file, value) in [
        ("memory.max", limits.memory_bytes),
        ("pids.max", u64::from(limits.tasks)),
    ] {
        let file = path.join(file);
        if file.exists()
            && let Err(error) = fs::write(&file, value.to_string())
        {
            tracing::warn!(file = %file.display(), %error, "a QEMU without this limit");
        }
    }
}

fn join_cgroup(path: &Path, pid: i32) -> io::Result<()> {
    for _ in 0..CGROUP_TRIES {
        fs::create_dir_all(path)?;
        match fs::write(path.join("cgroup.procs"), pid.to_string()) {
            // Another agent removed it before there was a process in it.
            Err(_) if !path.exists() => {}
            other => return other,
        }
    }
    Err(io::Error::other("it is removed again and again"))
}

/// Removes cgroups without a process: of guests whose QEMU ended and whose agent never returned.
fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        // A cgroup in use cannot be removed, and files never can.
        let _ = fs::remove_dir(entry.path());
    }
    let _ = fs::remove_dir(folder);
}

/// Returns the mount points of the hierarchies by which processes are killed together.
fn hierarchies(mountinfo: &str) -> Vec<PathBuf> {
    let hierarchy = |line: &str| {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut file_system = file_system.split(' ');
        let kind = file_system.next()?;
        let options = file_system.nth(1)?;
        let mut controllers = options.split(',');
        let wanted = match kind {
            "cgroup2" => true,
            "cgroup" => controllers.any(|name| name == "pids" || name == "freezer"),
            _ => false,
        };
        wanted.then(|| mount.split(' ').nth(4).map(PathBuf::from))?
    };
    mountinfo.lines().filter_map(hierarchy).collect()
}

impl Scope {
    /// Returns the scope of a process that was started under this name, where there is no record.
    pub(crate) fn of_name(name: &str) -> Self {
        if systemd_serves() {
            return Self::Unit(unit_name(name));
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let mut paths = hierarchies(&mounts);
        paths
            .iter_mut()
            .for_each(|path| path.extend([CGROUP_FOLDER, name]));
        paths.retain(|path| path.is_dir());
        match paths.is_empty() {
            true => Self::Session,
            false => Self::Cgroups(paths),
        }
    }

    /// Removes the scope once its process has ended.
    pub(crate) async fn remove(&self) -> io::Result<()> {
        match self {
            Self::Session => Ok(()),
            Self::Cgroups(paths) => {
                for path in paths {
                    remove_cgroup(path).await?;
                }
                Ok(())
            }
            Self::Unit(unit) => {
                // A unit that ended successfully is gone already; these then report that it is not
                // loaded.
                for verb in ["stop", "reset-failed"] {
                    if let Err(error) = run("systemctl", &[verb, "--quiet", unit]).await {
                        tracing::debug!(unit, %error, "unit is gone already");
                    }
                }
                Ok(())
            }
        }
    }
}

async fn remove_cgroup(path: &Path) -> io::Result<()> {
    for attempt in 0.. {
        match fs::remove_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => break,
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && attempt < CGROUP_TRIES => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(error) => return Err(error),
            Ok(()) => break,
        }
    }
    path.parent().map(sweep);
    Ok(())
}

/// Runs a system program and returns its output.
pub(crate) async fn run(program: &str, arguments: &[impl AsRef<str>]) -> io::Result<String> {
    let output = Command::new(program)
        .args(arguments.iter().map(AsRef::as_ref))
        .env("PATH", PATH)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .map_err(|error| io::Error::new(error.kind(), format!("{program}: {error}")))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let first = arguments.first().map_or("", AsRef::as_ref);
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.trim();
    Err(io::Error::other(format!(
        "{program} {first}: {}: {said}",
        output.status
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_are_those_that_matter() {
        let mountinfo = "\
            25 1 0:23 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
            26 25 0:24 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n\
            27 25 0:25 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer\n\
            28 25 0:26 / /sys/fs/cgroup/pids rw shared:7 - cgroup cgroup rw,pids\n\
            29 25 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
            nonsense\n";
        let found = hierarchies(mountinfo);
        let expected =
            ["freezer", "pids", "unified"].map(|name| Path::new("/sys/fs/cgroup").join(name));
        assert_eq!(found, expected);
    }

    #[test]
    fn a_units_command_is_literal() {
        let account = Account {
            name: "qemu".to_owned(),
            uid: 5.into(),
            gid: 6.into(),
        };
        let arguments = unit_arguments(
            &Program {
                file: Path::new("/usr/bin/qemu"),
                arguments: &["-append".to_owned(), "a=$HOME %n".to_owned()],
                account: Some(&account),
                log: Path::new("/s/qemu.log"),
                scope_name: "web-7-0123",
                limits: ScopeLimits {
                    memory_bytes: 3 << 30,
                    tasks: 258,
                },
            },
            "u.service",
        );
        let line = arguments.join(" ");
        assert!(
            line.ends_with("--uid=qemu -- /usr/bin/qemu -append a=$$HOME %n"),
            "{line}"
        );
        assert!(
            line.contains("--property=MemoryMax=3221225472 --property=TasksMax=258"),
            "{line}"
        );
        assert!(
            line.contains("--property=StandardOutput=append:/s/qemu.log"),
            "{line}"
        );
    }

    #[tokio::test]
    async fn a_program_that_fails_is_quoted() {
        let error = run("sh", &["-c", "echo no >&2; exit 3"]).await.unwrap_err();
        assert!(error.to_string().contains("exit status: 3: no"), "{error}");
    }
}
