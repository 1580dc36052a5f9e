//! Tests disk exports as processes: servers that die, hang or only seem to, and supervisors that
//! die.

use crate::client::Client;
use crate::common::{MIB, NAME, wait_until};
use longhaul_storage::disk::{Disk, ExportSize, Extent, ImageLock, ImageUse, RawDisk, Zeros};
use longhaul_storage::front::{
    BEAT_INTERVAL, Control, FrontFolder, FrontSpec, Policy, Programs, Status,
};
use longhaul_storage::front::{Supervisor, pass_through, serve, tracking};
use longhaul_storage::nbd::{Export, ExportName};
use longhaul_storage::pulse;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

const FOLDER: &str = "LONGHAUL_TEST_FRONT_FOLDER";
const ROLE: &str = "LONGHAUL_TEST_FRONT_ROLE";
const HANG: Duration = Duration::from_secs(1);

/// Not a test, but the processes that the other tests run.
#[test]
fn a_process_of_a_front_end() {
    let (Some(folder), Some(role)) = (std::env::var_os(FOLDER), std::env::var_os(ROLE)) else {
        return;
    };
    let folder = FrontFolder::open(Path::new(&folder));
    let tell = |notice| eprintln!("{notice}");
    match role.to_str().unwrap().split_once(' ') {
        None if role == "track" => tracking(&folder, tell).unwrap(),
        None => pass_through(&folder, tell).unwrap(),
        Some(("server", how)) => {
            let spec = folder.spec().unwrap();
            let disk = RawDisk::open(&spec.image, spec.size).unwrap();
            let disk: Arc<dyn Disk> = match how {
                "slow" => Arc::new(Odd { disk, stuck: false }),
                _ => Arc::new(Odd { disk, stuck: true }),
            };
            let name = spec.name;
            serve(&folder, || Ok(Export { name, disk }), tell).unwrap();
        }
        Some((_, server)) => supervise(folder, server.to_owned()),
    }
}

fn supervise(folder: FrontFolder, server: String) {
    let policy = Policy {
        hang: HANG,
        failures: if server == "server stuck" { 2 } else { 1000 },
        ..Policy::default()
    };
    let of = folder.clone();
    let programs = Programs {
        server: Box::new(move || process(&server)),
        fallback: Some(Box::new(|| process("pass-through"))),
    };
    let tell = |event| eprintln!("{event}");
    Supervisor::start(of, programs, policy, tell)
        .unwrap()
        .run()
        .unwrap();
}

/// Returns this program as another process of the same export.
fn process(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "front::a_process_of_a_front_end", "--nocapture"]);
    command.env(ROLE, role).env_remove("RUST_TEST_THREADS");
    command
}

/// A disk with slow writes: in the file system, or for ever in its own code.
#[derive(Debug)]
struct Odd {
    disk: RawDisk,
    stuck: bool,
}

impl Disk for Odd {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }
    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.disk.read(offset, buffer)
    }
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if self.stuck {
            loop {
                thread::park();
            }
        }
        pulse::elsewhere(|| thread::sleep(3 * HANG));
        self.disk.write(offset, bytes)
    }
    fn flush(&self) -> io::Result<()> {
        self.disk.flush()
    }
    fn zero(&self, _: Range<u64>, _: Zeros) -> io::Result<()> {
        Err(Errno::EIO.into())
    }
    fn discard(&self, _: Range<u64>) -> io::Result<()> {
        Err(Errno::EIO.into())
    }
    fn extents(&self, _: Range<u64>, _: usize) -> io::Result<Vec<Extent>> {
        Err(Errno::EIO.into())
    }
}

/// An image, and a disk export of it.
pub(crate) struct Setting {
    _above: TempDir,
    pub(crate) image: PathBuf,
    path: PathBuf,
    pub(crate) folder: FrontFolder,
    control: Control,
}

impl Setting {
    pub(crate) fn new() -> Self {
        Self::made(|above| above.join("image"))
    }

    /// Exports an image of that name.
    fn on(image: &Path) -> Self {
        Self::made(|_| image.to_owned())
    }

    fn made(image: impl FnOnce(&Path) -> PathBuf) -> Self {
        let above = tempfile::tempdir().unwrap();
        let image = image(above.path());
        File::create(&image).unwrap().set_len(MIB).unwrap();
        let spec = FrontSpec {
            image: image.clone(),
            size: ExportSize::OfFile,
            locks: Some(ImageUse::Raw),
            name: ExportName::new(NAME.to_owned()).unwrap(),
            qemu_uid: None,
            arriving: false,
            tracked: false,
            fetched: None,
            socket: None,
        };
        let path = above.path().join("front");
        let folder = FrontFolder::create(&path, &spec).unwrap();
        Self {
            _above: above,
            image,
            path,
            control: Control::new(folder.clone()),
            folder,
        }
    }

    pub(crate) fn supervisor(&self, server: &str) -> Killed {
        let mut program = process(&format!("supervisor {server}"));
        let child = program.env(FOLDER, &self.path).stdout(Stdio::null());
        Killed(child.spawn().unwrap())
    }

    /// Returns the server, once it is another one than the given one.
    pub(crate) fn server_after(&self, before: Option<u32>) -> u32 {
        let mut found = None;
        wait_until(|| {
            found = self.control.status().ok().and_then(|now| now.server_pid);
            found.is_some() && found != before
        });
        found.unwrap()
    }

    fn status(&self) -> Status {
        self.control.status().unwrap()
    }

    pub(crate) fn client(&self) -> Client {
        wait_until(|| self.folder.socket().exists());
        Client::ready_at(&self.folder.socket())
    }

    /// Returns whether the image's locks are free.
    fn is_unlocked(&self) -> bool {
        let image = File::open(&self.image).unwrap();
        ImageLock::alone(&image, ImageUse::Raw).is_ok()
    }

    /// Ends the export, and all processes that a failing test would leave.
    pub(crate) fn stop(&self, supervisor: &mut Killed) {
        let last = self.control.stop().unwrap();
        assert_eq!((last.server_pid, last.locked), (None, false));
        assert!(supervisor.0.wait().unwrap().success());
        assert!(!self.folder.socket().exists());
        assert!(self.is_unlocked());
    }
}

/// A process that ends with the test.
pub(crate) struct Killed(pub(crate) Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn signal(pid: u32, signal: Signal) {
    kill(Pid::from_raw(pid as i32), signal).unwrap();
}

#[test]
fn servers_and_supervisors_that_end_are_replaced() {
    let setting = Setting::new();
    let mut supervisor = setting.supervisor("pass-through");
    let mut client = setting.client();
    assert_eq!(client.write(0, 0, b"first"), 0);
    let first = setting.server_after(None);
    signal(first, Signal::SIGKILL);
    assert!(client.is_cut_off());
    // No client is refused meanwhile.
    let mut client = setting.client();
    assert_eq!(client.read(0, 5).unwrap(), b"first");
    let second = setting.server_after(Some(first));
    signal(second, Signal::SIGSTOP);
    let third = setting.server_after(Some(second));
    assert!(client.is_cut_off());
    let failures = setting.status().failures;
    assert!(failures >= 2, "{failures}");
    assert!(!setting.status().fell_back);

    // Without a supervisor the server continues, even if its heartbeat has no receiver.
    let mut client = setting.client();
    supervisor.0.kill().unwrap();
    supervisor.0.wait().unwrap();
    thread::sleep(2 * BEAT_INTERVAL);
    assert_eq!(client.write(0, 5, b" and second"), 0);
    setting.control.status().unwrap_err();
    // The next supervisor's server answers when that one is dead, whether it hung or not.
    signal(third, Signal::SIGSTOP);
    let mut supervisor = setting.supervisor("pass-through");
    assert!(client.is_cut_off());
    let mut client = setting.client();
    assert_eq!(client.read(0, 16).unwrap(), b"first and second");
    setting.server_after(Some(third));
    // There is never more than one.
    let mut other = setting.supervisor("pass-through");
    assert!(!other.0.wait().unwrap().success());
    assert_eq!(client.write(0, 0, b"First"), 0);
    setting.stop(&mut supervisor);
    assert!(client.is_cut_off());
    let content = std::fs::read(&setting.image).unwrap();
    assert_eq!(&content[..16], b"First and second");
}

#[test]
fn locks_are_held_whichever_server_answers_until_they_are_given_back() {
    let setting = Setting::new();
    let mut supervisor = setting.supervisor("pass-through");
    let server = setting.server_after(None);
    assert!(setting.status().locked && !setting.is_unlocked());
    signal(server, Signal::SIGKILL);
    setting.server_after(Some(server));
    assert!(!setting.is_unlocked());
    assert!(!setting.control.give_locks().unwrap().locked);
    assert!(setting.is_unlocked());
    assert!(setting.control.take_locks().unwrap().locked);
    assert!(!setting.is_unlocked());
    setting.stop(&mut supervisor);
}

#[test]
fn a_slow_disk_is_not_a_server_that_hangs() {
    let setting = Setting::new();
    let mut supervisor = setting.supervisor("server slow");
    let mut client = setting.client();
    assert_eq!(client.write(0, 0, b"late"), 0);
    assert_eq!(setting.status().failures, 0);
    setting.stop(&mut supervisor);
}

#[test]
fn a_server_that_hangs_again_and_again_is_given_up_for_the_fallback() {
    let setting = Setting::new();
    let mut supervisor = setting.supervisor("server stuck");
    for _ in 0..2 {
        let mut client = setting.client();
        client.request(crate::client::WRITE, 0, 0, 4);
        client.send(b"more");
        assert!(client.is_cut_off(), "it was answered");
    }
    let mut client = setting.client();
    assert_eq!(client.write(0, 0, b"done"), 0);
    assert!(setting.status().fell_back && setting.folder.fell_back());
    // The next supervisor continues with the fallback, until the owner acknowledges it.
    setting.stop(&mut supervisor);
    let mut supervisor = setting.supervisor("server stuck");
    assert_eq!(setting.client().write(0, 4, b" again"), 0);
    setting.stop(&mut supervisor);
    setting.folder.forgive_fallback().unwrap();
    let mut supervisor = setting.supervisor("server stuck");
    setting.server_after(None);
    assert!(!setting.status().fell_back);
    setting.stop(&mut supervisor);
    let content = std::fs::read(&setting.image).unwrap();
    assert_eq!(&content[..10], b"done again");
}

#[test]
fn a_server_that_nobody_supervises_does_not_begin() {
    let setting = Setting::new();
    let mut program = process("pass-through");
    program.env(FOLDER, &setting.path);
    // Not started by a supervisor: it prints an error, and ends.
    let output = program.stdin(Stdio::null()).output().unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("NotStarted"), "{said}");
}

/// A file system that can be frozen.
struct Frozen {
    folder: PathBuf,
}

fn done(program: &str, arguments: &[&str]) -> bool {
    let output = Command::new(program).args(arguments).output();
    output.is_ok_and(|output| output.status.success())
}

impl Frozen {
    /// Mounts one; `None` where that is not permitted.
    fn mount(above: &Path) -> Option<Self> {
        let (image, folder) = (above.join("file-system"), above.join("mounted"));
        File::create(&image).unwrap().set_len(32 * MIB).unwrap();
        std::fs::create_dir(&folder).unwrap();
        let (image, at) = (image.to_str().unwrap(), folder.to_str().unwrap());
        let mounted =
            done("mkfs.ext4", &["-q", image]) && done("mount", &["-o", "loop", image, at]);
        mounted.then_some(Self { folder })
    }

    fn freeze(&self, how: &str) -> bool {
        done("fsfreeze", &[how, self.folder.to_str().unwrap()])
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.freeze("--unfreeze");
        done("umount", &["--lazy", self.folder.to_str().unwrap()]);
    }
}

fn has_a_thread_that_is_held(pid: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads.flatten().any(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.contains(") D ")
    })
}

#[test]
fn a_server_that_the_system_holds_is_not_killed_before_it_is_let_go() {
    let above = tempfile::tempdir().unwrap();
    let Some(frozen) = Frozen::mount(above.path()) else {
        eprintln!("skipped: nobody may mount a file system here");
        return;
    };
    let setting = Setting::on(&frozen.folder.join("image"));
    let mut supervisor = setting.supervisor("pass-through");
    let mut client = setting.client();
    let server = setting.server_after(None);
    assert!(frozen.freeze("--freeze"));
    client.request(crate::client::WRITE, 0, 0, 4);
    client.send(b"late");
    wait_until(|| has_a_thread_that_is_held(server));
    // A slow disk, with a healthy server.
    thread::sleep(2 * HANG);
    assert_eq!(setting.status().failures, 0);
    // Now it hangs as well; it is left alone while its operation may still be carried out.
    signal(server, Signal::SIGSTOP);
    thread::sleep(2 * HANG);
    assert_eq!(setting.status().server_pid, Some(server));
    assert!(frozen.freeze("--unfreeze"));
    setting.server_after(Some(server));
    assert!(client.is_cut_off());
    // The write was never acknowledged: the end of its server may have interrupted it. It only must
    // not be carried out over later writes.
    let mut client = setting.client();
    assert_eq!(client.write(0, 0, b"next"), 0);
    thread::sleep(HANG);
    assert_eq!(client.read(0, 4).unwrap(), b"next");
    drop(client);
    setting.stop(&mut supervisor);
}
