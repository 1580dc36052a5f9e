//! Tests a disk export of several processes below a guest that writes: they are killed and stopped
//! continuously.

use crate::common::emulators;
use crate::load::Load;
use crate::setting::{NAME, PATIENCE, Setting};
use longhaul_hypervisor::disk::{Front, insert, remove};
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use longhaul_storage::disk::{ExportSize, ImageUse};
use longhaul_storage::front::{Control, FrontFolder, FrontSpec, Policy, Programs};
use longhaul_storage::front::{Supervisor, pass_through};
use longhaul_storage::nbd::ExportName;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const FOLDER: &str = "LONGHAUL_TEST_FRONT_FOLDER";
const ROLE: &str = "LONGHAUL_TEST_FRONT_ROLE";

/// Not a test, but the processes of the disk export.
#[test]
fn a_process_of_a_front_end() {
    let (Some(folder), Some(role)) = (std::env::var_os(FOLDER), std::env::var_os(ROLE)) else {
        return;
    };
    let folder = FrontFolder::open(Path::new(&folder));
    if role == "server" {
        return pass_through(&folder, |notice| eprintln!("{notice}")).unwrap();
    }
    let policy = Policy {
        hang: Duration::from_secs(1),
        failures: usize::MAX,
        ..Policy::default()
    };
    let programs = Programs {
        server: Box::new(|| process("server")),
        fallback: None,
    };
    let supervisor = Supervisor::start(folder, programs, policy, |event| eprintln!("{event}"));
    supervisor.unwrap().run().unwrap();
}

/// Returns this program as another process of the same disk export.
fn process(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "supervised::a_process_of_a_front_end"]);
    command.arg("--nocapture").env(ROLE, role);
    command
}

/// A disk export of several processes.
struct Processes {
    supervisor: Child,
    path: PathBuf,
    control: Control,
}

impl Processes {
    fn start(setting: &Setting) -> (Self, Front) {
        let path = setting.folder.path().join("front");
        let spec = FrontSpec {
            image: setting.image.clone(),
            size: ExportSize::OfFile,
            locks: Some(ImageUse::Raw),
            name: ExportName::new(NAME.to_owned()).unwrap(),
            qemu_uid: None,
            arriving: false,
            tracked: false,
            fetched: None,
            socket: None,
        };
        let folder = FrontFolder::create(&path, &spec).unwrap();
        let front = Front {
            socket: folder.socket(),
            ..setting.front.clone()
        };
        let processes = Self {
            supervisor: Self::supervisor(&path),
            path,
            control: Control::new(folder),
        };
        processes.server(None);
        (processes, front)
    }

    fn supervisor(path: &Path) -> Child {
        let mut supervisor = process("supervisor");
        let supervisor = supervisor.env(FOLDER, path).stdout(Stdio::null());
        supervisor.spawn().unwrap()
    }

    /// Waits for another server than this one.
    fn server(&self, before: Option<u32>) -> u32 {
        let until = Instant::now() + PATIENCE;
        loop {
            let now = self.control.status().ok().and_then(|now| now.server_pid);
            match now {
                Some(pid) if now != before => return pid,
                _ => assert!(Instant::now() < until, "no other server is started"),
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn supervise_anew(&mut self) {
        self.supervisor.kill().unwrap();
        self.supervisor.wait().unwrap();
        self.supervisor = Self::supervisor(&self.path);
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        let _ = self.control.stop();
        let _ = self.supervisor.kill();
        let _ = self.supervisor.wait();
    }
}

#[tokio::test]
async fn a_front_end_that_is_killed_or_hangs_takes_nothing_with_it() {
    for (_, emulator) in emulators() {
        let setting = Setting::new();
        let qemu = setting.guest(&emulator, false).await;
        let load = Load::find(&qemu).await;
        let (mut processes, front) = Processes::start(&setting);
        insert(&qemu.qmp, &setting.nodes, &front).await.unwrap();
        let mut server = None;
        for round in 0..8 {
            load.goes_on(6).await;
            let now = processes.server(None);
            assert!(server.is_none_or(|before| now != before));
            server = Some(now);
            let signal = if round % 4 == 3 {
                Signal::SIGSTOP
            } else {
                Signal::SIGKILL
            };
            kill(Pid::from_raw(now as i32), signal).unwrap();
            // Half of the servers that hang are left to the next supervisor.
            if round % 8 == 2 || round % 8 == 7 {
                processes.supervise_anew();
            }
            processes.server(server);
        }
        load.goes_on(6).await;
        // The guest does not notice the supervisor's death alone.
        processes.supervisor.kill().unwrap();
        load.goes_on(6).await;
        processes.supervise_anew();
        processes.server(None);
        processes.control.give_locks().unwrap();
        remove(&qemu.qmp, &setting.nodes, &front).await.unwrap();
        processes.control.stop().unwrap();
        load.goes_on(6).await;
        let stopped = qemu.qmp.execute("stop", json!({}), COMMAND_TIMEOUT);
        stopped.await.unwrap();
        load.check(&std::fs::read(&setting.image).unwrap());
    }
}
