//! Tests guests that reset, power off, are paused by their owner, or get a device while they move,
//! in each phase of a move: they move on, or the move is given up. There is never a second copy,
//! and nothing of the move remains. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

use longhaul_api::{Outcome, Phase};
use longhaul_lab::guest::KernelFiles;
use longhaul_lab::installed;
use longhaul_lab::lab::{Host, Lab, Plan};
use longhaul_lab::peer::qmp::Qmp;
use longhaul_lab::process::{ProcessId, wait_until};
use longhaul_lab::product::{Finished, Product, Settings};
use serde_json::json;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// How often a phase is tried that may be over at once.
const ATTEMPTS: usize = 5;
const LIMIT: Duration = Duration::from_secs(120);
const GUEST: &str = "g";
const DISK_BYTES: u64 = 16 << 20;
/// So slow that there is time for actions during the move.
const SLOW: &str = "20mbit";
/// The rate of missing blocks, so that the drain takes some seconds.
const DRAIN: &str = "2mbit";

/// A boot sector that obeys the serial port: `r` resets the machine, `p` powers it off.
const PROGRAM: [u8; 43] = [
    0xba, 0xfd, 0x03, // mov dx, 0x3fd (line status)
    0xec, // in al, dx
    0xa8, 0x01, // test al, 1 (a character is there)
    0x74, 0xf8, // jz 0
    0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xec, // in al, dx
    0x3c, b'p', // cmp al, 'p'
    0x74, 0x0a, // je 26
    0x3c, b'r', // cmp al, 'r'
    0x75, 0xec, // jne 0
    0xb0, 0xfe, // mov al, 0xfe (pulse the reset line)
    0xe6, 0x64, // out 0x64, al
    0xeb, 0xe6, // jmp 0
    0xba, 0x04, 0x06, // mov dx, 0x604 (ACPI: PM1a control)
    0xb8, 0x00, 0x20, // mov ax, 0x2000 (sleep, type 0: off)
    0xef, // out dx, ax
    0xeb, 0xfe, // jmp $
    0, 0, 0, 0, 0, 0, 0, 0,
];

/// What happens to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    Reset,
    PowerOff,
    Pause,
    PlugIn,
}

/// When it happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    /// The destination has accepted the guest, and nothing was sent.
    BeforeThePasses,
    /// Memory and disk are on their way.
    Passes,
    /// The source is about to stop the guest.
    BeforeTheStop,
    /// The guest runs at the destination, and blocks of its disk are missing.
    Drain,
}

const ACTS: [Act; 4] = [Act::Reset, Act::PowerOff, Act::Pause, Act::PlugIn];

/// Two hosts with agents, and a guest with a local disk that a script started on the first one.
struct Stage {
    qemu: Child,
    product: Product,
    lab: Lab,
}

impl Drop for Stage {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

impl Stage {
    fn new(version: &str) -> Option<Self> {
        if let Err(error) = installed::qemu(version) {
            assert!(!installed::all_required(), "{error}");
            eprintln!("SKIPPED phases: {error}");
            return None;
        }
        let mut lab = Lab::create(&Plan {
            purpose: "test: phases".to_owned(),
            hosts: 2,
            link: "400mbit,4ms".parse().unwrap(),
            seed: 1,
        })
        .unwrap();
        let folders: Vec<PathBuf> = lab
            .hosts()
            .iter()
            .map(|it| it.folder().to_owned())
            .collect();
        make_disk(&folders[0].join("d.raw"));
        let files = KernelFiles::make(&folders[0]).unwrap();
        let settings = Settings {
            qemus: vec![version.to_owned()],
            accelerator: "tcg".to_owned(),
        };
        let image = |index: usize| {
            let path = folders[index].join("d.raw").display().to_string();
            let text = format!("[images.d]\npath = {path:?}\nformat = \"raw\"\nlocal = true\n");
            toml::from_str::<toml::Table>(&text).unwrap()
        };
        let product = Product::start_each_with(&mut lab, &files, &settings, image).unwrap();
        let qemu = start(lab.host(0).unwrap(), version);
        let stage = Self { qemu, product, lab };
        let monitor = stage.folder(0).join("q");
        let registers = json!({"command-line": "info registers"});
        let runs = wait_until(LIMIT, || {
            let mut qmp = Qmp::connect(&monitor).unwrap();
            let said = qmp.execute("human-monitor-command", &registers).unwrap();
            let said = said.as_str().unwrap();
            said.contains("EIP=00007c") || said.contains("RIP=0000000000007c")
        });
        assert!(runs, "the guest does not reach its program");
        let words = [
            "guests",
            "attach",
            GUEST,
            "--qmp",
            monitor.to_str().unwrap(),
        ];
        let _: longhaul_api::Guest = stage.product.ask(0, &words).unwrap();
        Some(stage)
    }

    fn folder(&self, host: usize) -> &Path {
        self.lab.host(host).unwrap().folder()
    }

    fn host(&self, host: usize) -> &Host {
        self.lab.host(host).unwrap()
    }

    /// Returns the QEMUs on a host.
    fn qemus(&self, host: usize) -> Vec<i32> {
        let mut pids = self.host(host).namespace().processes().unwrap();
        pids.retain(|pid| {
            let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
            ProcessId::of(*pid).is_some() && program.to_string_lossy().contains("qemu-system")
        });
        pids
    }

    /// Restarts the source's agent, so that it waits at a point until the file is removed.
    fn hold(&mut self, point: &str) -> PathBuf {
        let marker = self.folder(0).join("held");
        let points = format!("{point}=hold:{}", marker.display());
        let agent = self.product.agent_mut(0).unwrap();
        agent
            .restart_to_fail(self.lab.host(0).unwrap(), &points)
            .unwrap();
        marker
    }

    /// Lets something happen to the guest at the source, as its owner or the guest does it: the
    /// agent uses the control socket meanwhile.
    fn act_at_the_source(&self, act: Act) {
        match act {
            Act::Reset => self.serial("r"),
            Act::PowerOff => self.serial("p"),
            Act::Pause => {
                self.monitor("stop");
                let paused = || self.monitor("info status").contains("paused");
                assert!(wait_until(LIMIT, paused), "the guest is not paused");
            }
            Act::PlugIn => {
                self.monitor("device_add virtio-rng-pci,id=hot,bus=rp");
            }
        }
    }

    /// Lets the same happen at the destination.
    fn act_at_the_destination(&self, act: Act) {
        let mut qmp = Qmp::connect(&self.arrived()).unwrap();
        let (command, arguments) = match act {
            Act::Reset => ("system_reset", json!({})),
            // The socket may be closed before the answer.
            Act::PowerOff => ("quit", json!({})),
            Act::Pause => ("stop", json!({})),
            Act::PlugIn => {
                let device = json!({"driver": "virtio-rng-pci", "id": "hot", "bus": "rp"});
                ("device_add", device)
            }
        };
        let done = qmp.execute(command, &arguments);
        assert!(done.is_ok() || act == Act::PowerOff, "{act:?}: {done:?}");
    }

    /// Sends a character to the guest.
    fn serial(&self, character: &str) {
        let mut socket = UnixStream::connect(self.folder(0).join("serial")).unwrap();
        socket.write_all(character.as_bytes()).unwrap();
    }

    /// Gives a command to the monitor that people use, waits until it was carried out, and returns
    /// what the monitor says.
    fn monitor(&self, command: &str) -> String {
        let mut socket = UnixStream::connect(self.folder(0).join("hmp")).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket.write_all(format!("{command}\n").as_bytes()).unwrap();
        let (mut said, mut byte) = (String::new(), [0]);
        // One prompt before the command, and one after it.
        while said.matches("(qemu) ").count() < 2 {
            assert_eq!(socket.read(&mut byte).unwrap(), 1, "the monitor ended");
            said.push(char::from(byte[0]));
        }
        said
    }

    fn state(&self, host: usize) -> PathBuf {
        self.folder(host).join("state")
    }

    fn arrived(&self) -> PathBuf {
        self.state(1).join("guests").join(GUEST).join("run/qmp")
    }

    fn status(&self, host: usize) -> String {
        let socket = match host {
            0 => self.folder(0).join("q"),
            _ => self.arrived(),
        };
        let answer = Qmp::connect(&socket)
            .unwrap()
            .execute("query-status", &json!({}));
        answer.unwrap()["status"].as_str().unwrap().to_owned()
    }

    /// Lets something happen in a phase of a move, and returns how the move ended; nothing if the
    /// guest was stopped before it could happen.
    fn run(&mut self, act: Act, when: When) -> Option<Finished> {
        let held = match when {
            When::BeforeThePasses => Some(self.hold("source:after-receipt:accepted")),
            When::BeforeTheStop => Some(self.hold("source:before-send:verify-region")),
            When::Passes | When::Drain => None,
        };
        let words: &[&str] = match when {
            When::BeforeThePasses => &[],
            When::Passes => &["--bandwidth", SLOW],
            When::BeforeTheStop => &["--verify"],
            When::Drain => &["--disks", "postcopy", "--bandwidth", SLOW],
        };
        let to = self.lab.host(1).unwrap();
        let mut moving = self.product.migrate(0, GUEST, to, words).unwrap();
        if let Some(held) = held {
            assert!(
                wait_until(LIMIT, || held.exists()),
                "{}",
                moving.so_far().why()
            );
            // Nothing is compared ahead of the stop if all blocks are still on their way.
            let is_late = moving.wait_for_phase(Phase::Stopping, Duration::from_millis(500));
            if !is_late {
                self.act_at_the_source(act);
            }
            fs::remove_file(held).unwrap();
            if is_late {
                moving.finish(LIMIT).unwrap();
                return None;
            }
        } else if when == When::Passes {
            assert!(
                moving.wait_for_phase(Phase::Precopy, LIMIT),
                "{}",
                moving.so_far().why()
            );
            self.act_at_the_source(act);
        } else {
            let phase = moving.wait_for_phase(Phase::Finishing, LIMIT);
            assert!(phase, "{}", moving.so_far().why());
            let agent = self.product.agent(0).unwrap();
            agent.run(&["limit", GUEST, DRAIN]).unwrap();
            self.act_at_the_destination(act);
            agent.run(&["limit", GUEST, "none"]).unwrap();
        }
        Some(moving.finish(LIMIT).unwrap())
    }

    /// Checks that the guest is on at most one host, and that nothing of the move remains.
    fn judge(&self, act: Act, finished: &Finished, why: &str) {
        let completed = finished.outcome == Some(Outcome::Completed);
        let ended = |host| wait_until(LIMIT, || self.qemus(host).is_empty());
        let owner = usize::from(completed);
        assert!(ended(1 - owner), "{why}: a second copy");
        if act == Act::PowerOff {
            assert!(ended(owner), "{why}: it runs although it was powered off");
        } else {
            assert_eq!(self.qemus(owner).len(), 1, "{why}");
            let wanted = if act == Act::Pause {
                "paused"
            } else {
                "running"
            };
            assert_eq!(self.status(owner), wanted, "{why}");
        }
        let mut remains = Vec::new();
        let clean = wait_until(LIMIT, || {
            remains = (0..2).flat_map(|host| self.remains(host)).collect();
            remains.is_empty()
        });
        assert!(clean, "{why}: {remains:?}");
        let there = self.folder(1).join("d.raw").exists();
        assert_eq!(there, completed, "{why}: the image at the destination");
    }

    /// Returns what a move has left on a host.
    fn remains(&self, host: usize) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for folder in ["journal", "fronts", "arriving"] {
            let Ok(entries) = fs::read_dir(self.state(host).join(folder)) else {
                continue;
            };
            found.extend(entries.map(|entry| entry.unwrap().path()));
        }
        found.retain(|path| !path.ends_with("incarnation"));
        for pid in self.host(host).namespace().processes().unwrap() {
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let words = String::from_utf8_lossy(&words);
            if words.contains("\0disk-front\0") {
                found.push(PathBuf::from(words.replace('\0', " ")));
            }
        }
        found
    }
}

/// Starts the guest as a script does.
fn start(host: &Host, version: &str) -> Child {
    let folder = host.folder().display().to_string();
    let file = json!({"driver": "file", "node-name": "f0", "filename": format!("{folder}/d.raw")});
    let disk = json!({"driver": "raw", "node-name": "d0", "file": "f0"});
    let mut command = Command::new(installed::qemu(version).unwrap());
    command
        .args([
            "-M",
            "q35",
            "-accel",
            "tcg",
            "-m",
            "64",
            "-nodefaults",
            "-display",
            "none",
        ])
        .args([
            "-blockdev",
            &file.to_string(),
            "-blockdev",
            &disk.to_string(),
        ])
        .args(["-device", "virtio-blk-pci,drive=d0,id=vda"])
        .args(["-device", "pcie-root-port,id=rp,chassis=1"])
        .args([
            "-serial",
            &format!("unix:{folder}/serial,server=on,wait=off"),
        ])
        .args(["-monitor", &format!("unix:{folder}/hmp,server=on,wait=off")])
        .args(["-qmp", &format!("unix:{folder}/q,server=on,wait=off")])
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    host.spawn(&mut command).unwrap()
}

/// Makes a disk with the program, and content that takes time to send.
fn make_disk(path: &Path) {
    let mut bytes: Vec<u8> = (0..DISK_BYTES / 8)
        .flat_map(|word: u64| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect();
    bytes[..PROGRAM.len()].copy_from_slice(&PROGRAM);
    bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
    fs::write(path, bytes).unwrap();
}

fn every_act(when: When) {
    for act in ACTS {
        // QEMU's monitor does not answer while the agent is held there.
        if act == Act::PlugIn && !matches!(when, When::Drain | When::Passes) {
            continue;
        }
        let mut done = None;
        for _ in 0..ATTEMPTS {
            let Some(mut stage) = Stage::new("10.0") else {
                return;
            };
            done = stage.run(act, when).map(|finished| (stage, finished));
            if done.is_some() {
                break;
            }
        }
        let (stage, finished) = done.expect("the guest is stopped too early");
        let why = format!("{act:?}, {when:?}: {}", finished.why());
        eprintln!("{why}");
        stage.judge(act, &finished, &why);
    }
}

#[test]
fn before_the_passes() {
    every_act(When::BeforeThePasses);
}

#[test]
fn during_the_passes() {
    every_act(When::Passes);
}

#[test]
fn just_before_the_stop() {
    every_act(When::BeforeTheStop);
}

#[test]
fn during_the_drain() {
    every_act(When::Drain);
}
