//! Creates and removes network namespaces by name, and enters them by one thread at a time.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::linux::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use nix::sched::{CloneFlags, setns};

use crate::error::{During, LabError};
use crate::process::{self, run};

/// A network namespace with a name, as `ip netns` lists it.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    file: File,
}

impl Namespace {
    /// Creates a namespace with only a loopback interface that is up.
    ///
    /// # Errors
    /// When `ip` is missing or may not create it (it needs root).
    pub fn create(name: &str) -> Result<Self, LabError> {
        run(Command::new("ip").args(["netns", "add", name]))?;
        let namespace = Self::open(name)?;
        namespace.configure("link set dev lo up\n")?;
        // IPv6 addresses would be announced and counted as traffic.
        namespace.enter(|| {
            for key in ["all", "default"] {
                set_sysctl(&format!("net/ipv6/conf/{key}/disable_ipv6"), "1");
            }
            // TCP's buffers must not limit the baselines on a long fast link.
            set_sysctl("net/ipv4/tcp_rmem", "4096 131072 67108864");
            set_sysctl("net/ipv4/tcp_wmem", "4096 131072 67108864");
            // The metrics of one connection must not influence the next measurement.
            set_sysctl("net/ipv4/tcp_no_metrics_save", "1");
        })?;
        Ok(namespace)
    }

    /// Opens an existing namespace.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn open(name: &str) -> Result<Self, LabError> {
        let path = path(name);
        let file = File::open(&path).during(|| format!("open {}", path.display()))?;
        Ok(Self {
            name: name.to_owned(),
            file,
        })
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Turns IPv6 on, for the interfaces that are created from now on. Addresses are used at once.
    ///
    /// # Errors
    /// When the kernel has no IPv6, or refuses.
    pub fn enable_ipv6(&self) -> Result<(), LabError> {
        for (key, value) in [
            ("disable_ipv6", "0"),
            ("accept_dad", "0"),
            ("accept_ra", "0"),
            ("router_solicitations", "0"),
        ] {
            for of in ["all", "default"] {
                self.set(&format!("net/ipv6/conf/{of}/{key}"), value)?;
            }
        }
        Ok(())
    }

    /// Sets a kernel setting of the namespace, by its path below /proc/sys.
    ///
    /// # Errors
    /// When the kernel does not have it, or refuses.
    pub fn set(&self, key: &str, value: &str) -> Result<(), LabError> {
        let path = PathBuf::from("/proc/sys").join(key);
        self.enter(|| fs::write(&path, value))?
            .during(|| format!("set {} of {}", path.display(), self.name))
    }

    /// Runs a task in a thread of its own inside the namespace: its sockets and interfaces belong
    /// to the namespace for as long as they live.
    ///
    /// # Errors
    /// When the namespace cannot be entered (it needs root).
    pub fn enter<T: Send>(&self, task: impl FnOnce() -> T + Send) -> Result<T, LabError> {
        std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    setns(&self.file, CloneFlags::CLONE_NEWNET)
                        .during(|| format!("enter the network namespace {}", self.name))?;
                    Ok(task())
                })
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Starts a process inside the namespace.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn spawn(&self, command: &mut Command) -> Result<Child, LabError> {
        let shown = process::show(command);
        self.enter(|| command.spawn())?
            .during(|| format!("start `{shown}`"))
    }

    /// Runs a process inside the namespace to its end and returns its standard output.
    ///
    /// # Errors
    /// When it cannot be started or fails.
    pub fn output(&self, command: &mut Command) -> Result<String, LabError> {
        self.enter(|| run(command))?
    }

    /// Applies a batch of `ip` commands inside the namespace.
    ///
    /// # Errors
    /// When one of them fails.
    pub fn configure(&self, batch: &str) -> Result<(), LabError> {
        let mut command = Command::new("ip");
        command.args(["-n", &self.name, "-batch", "-"]);
        process::run_with_input(&mut command, batch)?;
        Ok(())
    }

    /// Returns the processes in this network namespace.
    ///
    /// # Errors
    /// When /proc cannot be read.
    pub fn processes(&self) -> Result<Vec<i32>, LabError> {
        let own = self
            .file
            .metadata()
            .during(|| format!("look at the network namespace {}", self.name))?
            .st_ino();
        process::all_where(|pid| {
            fs::metadata(format!("/proc/{pid}/ns/net")).is_ok_and(|other| other.st_ino() == own)
        })
    }

    /// Removes a namespace by name, with its interfaces. A missing one is not an error.
    ///
    /// # Errors
    /// When it exists and cannot be removed.
    pub fn remove(name: &str) -> Result<(), LabError> {
        if !path(name).exists() {
            return Ok(());
        }
        run(Command::new("ip").args(["netns", "delete", name])).map(drop)
    }
}

fn path(name: &str) -> PathBuf {
    PathBuf::from("/run/netns").join(name)
}

/// Sets a kernel setting where the kernel has it; a missing one changes nothing here.
fn set_sysctl(key: &str, value: &str) {
    let path = PathBuf::from("/proc/sys").join(key);
    if path.exists() {
        // Refused inside some containers; the link's own measurement shows whether it matters.
        let _ = fs::write(path, value);
    }
}

/// Returns a command that runs a program without a terminal to read from.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.stdin(Stdio::null());
    command
}
