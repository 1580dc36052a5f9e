//! Starts a line's QEMU on a host and finds its control socket and its process.

use crate::exec::{Descriptor, Order};
use crate::line::{Line, fill};
use crate::material::Material;
use crate::stage::{SOURCE, Stage};
use longhaul_lab::error::{During, LabError};
use longhaul_lab::installed;
use longhaul_lab::interrupt;
use longhaul_lab::peer::qmp::Qmp;
use longhaul_lab::process::{self, ProcessId, own_binary};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How long the start of a QEMU may take, on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long the firmware may take to reach the boot sector. Guests without one are moved while they
/// search for it.
const BOOT_LIMIT: Duration = Duration::from_secs(4);
/// How long a kernel may take to find its disk: its driver sets the disk's write cache.
const DISK_LIMIT: Duration = Duration::from_secs(60);
/// How long the firmware may take to give the screen's memory its addresses.
const SCREEN_LIMIT: Duration = Duration::from_secs(60);
/// The class of a screen, as the first byte of a PCI device's class.
const DISPLAY: u64 = 3;
/// The beginning of the addresses at which the boot sector runs.
const BOOT_ADDRESS: &str = "7c0";
/// Parts of output that every start may have.
const NOISE: [&str; 8] = [
    "warning:",
    "char device redirected",
    "VNC server running",
    "monitor - type 'help'",
    "(qemu)",
    "deprecated",
    "SeaBIOS",
    "iPXE",
];

/// A QEMU that a line started.
#[derive(Debug)]
pub(crate) struct Qemu {
    /// Its control socket, which no other client uses.
    pub(crate) socket: PathBuf,
    /// Its process.
    pub(crate) process: ProcessId,
    launcher: Child,
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // A QEMU that is a daemon has another parent.
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

impl Qemu {
    /// Starts it, executes the line's commands, and lets it reach its boot sector.
    ///
    /// # Errors
    /// When it does not start; with what it printed.
    pub(crate) fn start(stage: &Stage, line: &Line, made: &Material) -> Result<Self, LabError> {
        let mut argv = line.argv.clone();
        let socket = own_socket(line, made).unwrap_or_else(|| {
            let added = ["-qmp", "unix:{QMP},server=on,wait=off"];
            argv.extend(added.map(str::to_owned));
            PathBuf::from(&made.values["QMP"])
        });
        let program = installed::qemu(&line.qemu)?;
        let order = Order {
            program: program.clone(),
            argv,
            values: made.values.clone(),
            open: made.open.clone(),
        };
        let run = stage.run_folder()?;
        let (path, log) = (run.join("order.json"), run.join("qemu.out"));
        let text = serde_json::to_vec(&order).map_err(std::io::Error::from);
        text.and_then(|text| fs::write(&path, text))
            .during(|| format!("write {}", path.display()))?;
        let mut starting = Starting {
            stage,
            launcher: spawn(stage, &path, &log)?,
            socket: &socket,
            daemon: line.argv.iter().any(|word| word == "-daemonize"),
        };
        match starting.wait().and_then(|process| {
            prepare(line, made, &socket)?;
            Ok(process)
        }) {
            Ok(process) => Ok(Self {
                process,
                launcher: starting.launcher,
                socket,
            }),
            Err(error) => {
                let said = fs::read_to_string(&log).unwrap_or_default();
                let lines = said.lines().filter(|line| !is_noise(line));
                let lines: Vec<&str> = std::iter::once("").chain(lines).collect();
                Err(LabError::Which(format!("{error}{}", lines.join(" | "))))
            }
        }
    }
}

/// Executes the line's commands and lets the guest run.
fn prepare(line: &Line, made: &Material, socket: &Path) -> Result<(), LabError> {
    let mut qmp = Qmp::connect(socket)?;
    let mut continued = !line.argv.iter().any(|word| word == "-S");
    for (command, arguments) in &line.after {
        let arguments = fill(&arguments.to_string(), &made.values);
        qmp.execute(command, &crate::words::parse(command, &arguments)?)?;
        continued |= command == "cont" || command == "stop";
    }
    if !continued {
        qmp.execute("cont", &json!({}))?;
    }
    wait_for_boot(&mut qmp)?;
    wait_for_disk(line, made)?;
    wait_for_screen(&mut qmp)
}

fn spawn(stage: &Stage, order: &Path, log: &Path) -> Result<Child, LabError> {
    let opening = || format!("open {}", log.display());
    let out = File::create(log).during(opening)?;
    let err = out.try_clone().during(opening)?;
    let mut command = Command::new(own_binary("lab-exec")?);
    // A relative path of a line is relative to its images.
    command
        .arg(order)
        .current_dir(stage.images(SOURCE)?)
        .stdin(Stdio::piped())
        .stdout(out)
        .stderr(err);
    stage.host(SOURCE)?.spawn(&mut command)
}

/// A QEMU that does not answer yet.
struct Starting<'a> {
    stage: &'a Stage,
    launcher: Child,
    socket: &'a Path,
    daemon: bool,
}

impl Starting<'_> {
    fn wait(&mut self) -> Result<ProcessId, LabError> {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            interrupt::check()?;
            let ended = self.launcher.try_wait().ok().flatten();
            // A daemon is another process, which is there when the first one ends with success.
            let is_daemon = self.daemon && ended.is_some_and(|status| status.success());
            if is_daemon == self.daemon
                && UnixStream::connect(self.socket).is_ok()
                && let Some(process) = self.process()?
            {
                return Ok(process);
            }
            if (ended.is_some() && !is_daemon) || Instant::now() > deadline {
                return Err(LabError::Which("QEMU does not start".to_owned()));
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns the process that has the emulator's file open as its program.
    fn process(&self) -> Result<Option<ProcessId>, LabError> {
        let pids = self.stage.of_guests(SOURCE)?;
        let is_qemu = |pid: &&i32| {
            fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|program| {
                let name = program
                    .file_name()
                    .map(|name| name.to_string_lossy().into_owned());
                name.is_some_and(|name| name.starts_with("qemu-system"))
            })
        };
        Ok(pids
            .iter()
            .rev()
            .find(is_qemu)
            .and_then(|pid| ProcessId::of(*pid)))
    }
}

fn is_noise(line: &str) -> bool {
    line.trim().is_empty() || NOISE.iter().any(|part| line.contains(part))
}

/// Waits until the kernel of a line, if it has one with a console in a file, has found its disk.
fn wait_for_disk(line: &Line, made: &Material) -> Result<(), LabError> {
    const CONSOLE: &str = "file:{RUN}/console.log";
    let has = |wanted: &str| line.argv.iter().any(|word| word == wanted);
    if !has("{KERNEL}") || !has(CONSOLE) {
        return Ok(());
    }
    let console = fill(CONSOLE.trim_start_matches("file:"), &made.values);
    process::wait_until(DISK_LIMIT, || {
        let said = fs::read(&console).unwrap_or_default();
        String::from_utf8_lossy(&said).contains("[vda]") || interrupt::requested()
    });
    interrupt::check()
}

/// Waits until the firmware of a guest that runs has given the memory of its screen an address.
fn wait_for_screen(qmp: &mut Qmp) -> Result<(), LabError> {
    if qmp.execute("query-status", &json!({}))?["status"] != "running" {
        return Ok(());
    }
    process::wait_until(SCREEN_LIMIT, || {
        // Machines without PCI refuse to answer.
        let buses = qmp.execute("query-pci", &json!({}));
        buses.as_ref().map_or(true, has_screen) || interrupt::requested()
    });
    interrupt::check()
}

fn has_screen(buses: &Value) -> bool {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let devices = list(buses)
        .into_iter()
        .flat_map(|bus| list(&bus["devices"]));
    let is_screen =
        |device: &Value| device["class_info"]["class"].as_u64().unwrap_or(0) >> 8 == DISPLAY;
    let mut regions = devices
        .filter(is_screen)
        .flat_map(|device| list(&device["regions"]));
    // The seventh is that of the option ROM.
    regions.all(|region| {
        let placed = region["address"].as_i64().is_some_and(|at| at > 0);
        region["type"] != "memory" || region["bar"] == 6 || placed
    })
}

/// Waits until the guest runs its boot sector; goes on without it after a while.
fn wait_for_boot(qmp: &mut Qmp) -> Result<(), LabError> {
    let mut failed = Ok(());
    process::wait_until(BOOT_LIMIT, || {
        thread::sleep(Duration::from_millis(100));
        let words = json!({"command-line": "info registers"});
        match qmp.execute("human-monitor-command", &words) {
            Ok(Value::String(text)) => at_boot_sector(&text) || interrupt::requested(),
            Ok(_) => true,
            Err(error) => {
                failed = Err(error);
                true
            }
        }
    });
    interrupt::check()?;
    failed
}

fn at_boot_sector(registers: &str) -> bool {
    let mut words = registers.split_ascii_whitespace();
    let pointer = words.find_map(|word| word.strip_prefix("RIP=").or(word.strip_prefix("EIP=")));
    let pointer = pointer.map(|pointer| pointer.trim_start_matches('0'));
    pointer.is_some_and(|pointer| pointer.len() == 4 && pointer.starts_with(BOOT_ADDRESS))
}

/// Returns the line's own control socket, if it has one without a client.
fn own_socket(line: &Line, made: &Material) -> Option<PathBuf> {
    let chardevs = chardevs(line, made);
    let pairs = line.argv.iter().zip(line.argv.iter().skip(1));
    let mut found = pairs.filter_map(|(option, value)| match option.as_str() {
        "-qmp" => match value.split_once(':')? {
            ("unix", path) => {
                let path = path.split(',').next().unwrap_or(path);
                Some(PathBuf::from(fill(path, &made.values)))
            }
            ("chardev", id) => chardevs.get(id).cloned(),
            _ => None,
        },
        "-mon" => {
            let keys = keys(value);
            let controls = keys.get("mode") == Some(&"control");
            controls.then(|| chardevs.get(*keys.get("chardev")?).cloned())?
        }
        _ => None,
    });
    found.next()
}

/// Returns the listening sockets of the line's character devices.
fn chardevs(line: &Line, made: &Material) -> BTreeMap<String, PathBuf> {
    let mut found = BTreeMap::new();
    let pairs = line.argv.iter().zip(line.argv.iter().skip(1));
    for (_, value) in pairs.filter(|(option, value)| {
        *option == "-chardev" && value.starts_with("socket,") && value.contains("server")
    }) {
        let keys = keys(value);
        let descriptor = keys.get("fd").map(|text| text.trim_matches(['{', '}']));
        let path = match descriptor.and_then(|key| made.open.get(key)) {
            Some(Descriptor::Listener(path)) => Some(path.clone()),
            _ => keys
                .get("path")
                .map(|path| PathBuf::from(fill(path, &made.values))),
        };
        if let (Some(id), Some(path)) = (keys.get("id"), path) {
            found.insert((*id).to_owned(), path);
        }
    }
    // The same in files for -readconfig.
    for text in line.files.values() {
        for section in text.split("[chardev \"").skip(1) {
            let body = section.split("\n[").next().unwrap_or(section);
            let path = body
                .lines()
                .find_map(|line| line.trim().strip_prefix("path = "));
            if let (Some((id, _)), Some(path)) = (section.split_once('"'), path) {
                let path = fill(path.trim_matches('"'), &made.values);
                found.insert(id.to_owned(), PathBuf::from(path));
            }
        }
    }
    found
}

fn keys(value: &str) -> BTreeMap<&str, &str> {
    value
        .split(',')
        .filter_map(|part| part.split_once('='))
        .collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn socket_of(argv: &[&str], files: &[(&str, &str)]) -> Option<String> {
        let text = json!({"id": "a", "tool": "t", "year": 2026, "source": "s", "qemu": "10.0",
            "argv": argv, "files": files.iter().copied().collect::<BTreeMap<_, _>>()});
        let line: Line = serde_json::from_value(text).unwrap();
        let mut made = Material::default();
        made.values.insert("RUN".to_owned(), "/r".to_owned());
        let listener = Descriptor::Listener(PathBuf::from("/r/qmpfd"));
        made.open.insert("QMPFD".to_owned(), listener);
        own_socket(&line, &made).map(|path| path.display().to_string())
    }

    #[test]
    fn the_line_s_own_control_socket_is_found() {
        let found = |argv: &[&str]| socket_of(argv, &[]);
        let server = "server=on,wait=off";
        assert_eq!(found(&["-qmp", "stdio", "-monitor", "unix:/m"]), None);
        assert_eq!(
            found(&["-qmp", "unix:{RUN}/q,server"]),
            Some("/r/q".to_owned())
        );
        let mon = ["-mon", "chardev=c,mode=control", "-chardev"];
        let path = format!("socket,id=c,path={{RUN}}/c,{server}");
        assert_eq!(
            found(&[&mon[..], &[&path]].concat()),
            Some("/r/c".to_owned())
        );
        let fd = format!("socket,id=c,fd={{QMPFD}},{server}");
        assert_eq!(
            found(&[&mon[..], &[&fd]].concat()),
            Some("/r/qmpfd".to_owned())
        );
        // A client's end of a socket.
        assert_eq!(
            found(&[&mon[..], &["socket,id=c,path=/events"]].concat()),
            None
        );
        let text = "[chardev \"c\"]\n backend = \"socket\"\n path = \"{RUN}/f\"\n[x]\n";
        let found = socket_of(&["-qmp", "chardev:c"], &[("CONF", text)]);
        assert_eq!(found, Some("/r/f".to_owned()));
    }

    #[test]
    fn a_boot_sector_is_known_by_its_address() {
        assert!(at_boot_sector("EAX=0 EBX=1\nEIP=00007c02 EFL=2"));
        assert!(at_boot_sector("RIP=0000000000007c00 RFL=2"));
        assert!(!at_boot_sector("EIP=0000fff0"));
        assert!(!at_boot_sector("EIP=007c0000"));
    }
}
