//! Runs the processes of one disk export: this program, started again.

use crate::export_name;
use longhaul_hypervisor::disk::Front;
use longhaul_lab::guest::disks::{Format, LocalDisk};
use longhaul_lab::process::wait_until;
use longhaul_storage::disk::{ExportSize, ImageUse};
use longhaul_storage::front::{Control, FrontFolder, FrontSpec, Policy, Programs};
use longhaul_storage::front::{Supervisor, pass_through};
use longhaul_storage::nbd::ExportName;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const FOLDER: &str = "LONGHAUL_TEST_FRONT_FOLDER";
const ROLE: &str = "LONGHAUL_TEST_FRONT_ROLE";

/// Not a test, but the processes of the disk export.
#[test]
fn a_process_of_a_front_end() {
    let (Some(path), Some(role)) = (std::env::var_os(FOLDER), std::env::var_os(ROLE)) else {
        return;
    };
    let folder = FrontFolder::open(Path::new(&path));
    if role == "server" {
        return pass_through(&folder, |_| ()).unwrap();
    }
    let policy = Policy {
        hang: Duration::from_secs(1),
        ..Policy::default()
    };
    let program = || Box::new(|| process("server"));
    let programs = Programs {
        server: program(),
        fallback: match role == "falls back" {
            true => Some(program()),
            false => None,
        },
    };
    let supervisor = Supervisor::start(folder, programs, policy, |_| ());
    supervisor.unwrap().run().unwrap();
}

fn process(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "processes::a_process_of_a_front_end"]);
    command.arg("--nocapture").env(ROLE, role);
    command.env_remove("RUST_TEST_THREADS");
    command
}

/// A disk export of several processes.
pub(crate) struct Processes {
    supervisor: Option<Child>,
    role: &'static str,
    path: PathBuf,
    control: Control,
}

impl Processes {
    pub(crate) fn start(path: &Path, disk: &LocalDisk, falls_back: bool) -> (Front, Self) {
        let (size, image_use) = match disk.kind.format {
            Format::Raw => (ExportSize::OfFile, ImageUse::Raw),
            Format::Qcow2 => (ExportSize::Bytes(1 << 60), ImageUse::Growing),
        };
        let export = export_name(path);
        let spec = FrontSpec {
            image: disk.path.clone(),
            size,
            locks: Some(image_use),
            name: ExportName::new(export.clone()).unwrap(),
            qemu_uid: None,
            arriving: false,
            tracked: false,
            fetched: None,
            socket: None,
        };
        let folder = FrontFolder::create(path, &spec).unwrap();
        let front = Front {
            node: path.file_name().unwrap().to_str().unwrap().to_owned(),
            socket: folder.socket(),
            export,
        };
        let mut processes = Self {
            supervisor: None,
            role: if falls_back {
                "falls back"
            } else {
                "supervisor"
            },
            path: path.to_owned(),
            control: Control::new(folder),
        };
        processes.supervise();
        (front, processes)
    }

    /// Starts a supervisor if there is none, and waits for a server.
    pub(crate) fn supervise(&mut self) {
        if self.supervisor.is_none() {
            let mut supervisor = process(self.role);
            supervisor.env(FOLDER, &self.path).stdout(Stdio::null());
            self.supervisor = Some(supervisor.stderr(Stdio::null()).spawn().unwrap());
        }
        assert!(
            wait_until(LIMIT, || self.server().is_some()),
            "there is no server"
        );
    }

    fn server(&self) -> Option<Pid> {
        let status = self.control.status().ok()?;
        status.server_pid.map(|pid| Pid::from_raw(pid as i32))
    }

    fn signal_server(&self, signal: Signal) {
        if let Some(pid) = self.server() {
            // It may have ended by itself just now.
            let _ = kill(pid, signal);
        }
    }

    pub(crate) fn kill_server(&mut self) -> &'static str {
        self.signal_server(Signal::SIGKILL);
        "server killed"
    }

    /// Stops the server, which hangs until it is killed.
    pub(crate) fn stop_server(&mut self) -> &'static str {
        self.signal_server(Signal::SIGSTOP);
        "server stopped"
    }

    pub(crate) fn kill_supervisor(&mut self) -> &'static str {
        if let Some(mut supervisor) = self.supervisor.take() {
            supervisor.kill().unwrap();
            supervisor.wait().unwrap();
        }
        "supervisor killed"
    }

    pub(crate) fn kill_both(&mut self) -> &'static str {
        let server = self.server();
        self.kill_supervisor();
        if let Some(pid) = server {
            // It is not reaped yet: the number is still its own, or free.
            let _ = kill(pid, Signal::SIGKILL);
        }
        "both killed"
    }

    /// Stops the supervisor, during which its server dies.
    pub(crate) fn hold_supervisor(&mut self, time: Duration) -> &'static str {
        let server = self.server();
        let supervisor = self.supervisor.as_ref().map(Child::id);
        let supervisor = Pid::from_raw(supervisor.unwrap() as i32);
        kill(supervisor, Signal::SIGSTOP).unwrap();
        if let Some(pid) = server {
            let _ = kill(pid, Signal::SIGKILL);
        }
        thread::sleep(time);
        kill(supervisor, Signal::SIGCONT).unwrap();
        "supervisor held"
    }

    pub(crate) fn give_locks(&mut self) {
        self.control.give_locks().unwrap();
    }

    /// Ends it: the image is not accessed any more.
    pub(crate) fn stop(mut self) {
        self.control.stop().unwrap();
        let supervisor = self.supervisor.as_mut().unwrap();
        assert!(supervisor.wait().unwrap().success());
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        // Cleans up after a failed test.
        let server = self.server();
        self.kill_supervisor();
        if let Some(pid) = server {
            let _ = kill(pid, Signal::SIGKILL);
        }
    }
}
