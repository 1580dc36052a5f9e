//! Tests devices of parcels that are attached to another host, a terminal: real agents, real files.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Agent, LIMIT, command, free_address, longhaul};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const IMAGE_BYTES: usize = 96 << 20;

/// An agent, and the address at which others reach it.
struct Host {
    name: &'static str,
    agent: Agent,
    address: String,
}

impl Host {
    fn start(name: &'static str, tables: &str) -> Self {
        let address = free_address();
        let agent = Agent::start_configured(|folder| {
            format!(
                "name = {name:?}\nstate = {:?}\nlisten = {address:?}\napi.socket = {:?}\n{tables}",
                folder.join("state"),
                folder.join("agent.sock"),
            )
        });
        Self {
            name,
            agent,
            address,
        }
    }

    fn trusts(&self, other: &Self, may: &str) {
        let shown = other.agent.json(&["host"]);
        let id = shown["fingerprint"].as_str().unwrap().to_owned();
        let words = [
            "host",
            "trust",
            other.name,
            &id,
            &other.address,
            "--may",
            may,
        ];
        self.agent.succeed(&words);
    }

    /// Returns the words of a command about parcels.
    fn words(&self, words: &[&str]) -> Vec<String> {
        let config = self.agent.folder.path().join("agent.toml");
        let config = config.display().to_string();
        let first = ["--json", "parcel", "--config", &config];
        first
            .iter()
            .chain(words)
            .map(|&word| word.to_owned())
            .collect()
    }

    fn run(&self, words: &[&str]) -> Output {
        let words = self.words(words);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        longhaul(&self.agent.socket(), &words)
    }

    fn begin(&self, words: &[&str]) -> Child {
        let mut command = command(&self.agent.socket());
        let command = command.args(self.words(words)).stdout(Stdio::null());
        command.stderr(Stdio::piped()).spawn().unwrap()
    }

    fn says(&self, words: &[&str]) -> Value {
        let output = self.run(words);
        let errors = String::from_utf8_lossy(&output.stderr);
        let log = self.agent.log();
        assert!(output.status.success(), "{words:?}: {errors}\n{log}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn refuses(&self, words: &[&str], says: &[&str]) {
        let output = self.run(words);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{words:?}");
        for text in says {
            assert!(errors.contains(text), "{words:?}: {errors}");
        }
    }
}

/// Two hosts with images of one name, and a terminal with three folders.
struct Setting {
    folder: TempDir,
    lyon: Host,
    dock: Host,
    paris: Host,
}

impl Setting {
    fn new(limits: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let mut devices = "[parcel_devices]\n".to_owned();
        for device in ["wd0", "wd1", "wd2"] {
            fs::create_dir(path(device)).unwrap();
            writeln!(devices, "{device} = {:?}", path(device)).unwrap();
        }
        fs::create_dir(path("private")).unwrap();
        let image = |host: &str| {
            let path = path(&format!("{host}.raw"));
            format!("[images.root]\npath = {path:?}\nformat = \"raw\"\n")
        };
        let (lyon, paris) = (
            Host::start("lyon", &image("lyon")),
            Host::start("paris", &image("paris")),
        );
        let dock = Host::start("dock", &(devices + limits));
        for host in [&lyon, &paris] {
            host.trusts(&dock, "query");
            dock.trusts(host, "query,send");
        }
        let mut next = 1u32;
        let content = std::iter::repeat_with(|| {
            next = next.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (next >> 24) as u8
        });
        let content: Vec<u8> = content.take(IMAGE_BYTES).collect();
        fs::write(path("lyon.raw"), content).unwrap();
        Self {
            folder,
            lyon,
            dock,
            paris,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn add_parcel(&self) {
        let create = ["create", "box", "--to", "paris", "--lose", "1"];
        self.lyon.says(&create);
        self.lyon.says(&["add", "box", "web=root"]);
    }

    fn written(&self, device: usize) -> u64 {
        let file = self.path(&format!("wd{device}/box-{device}.parcel"));
        fs::metadata(file).map_or(0, |file| file.len())
    }

    /// Kills the terminal's agent when something is the case, and starts it again when the command
    /// has failed. Returns what the command says.
    fn cut(&mut self, mut command: Child, is_time: impl Fn(&Self) -> bool) -> String {
        let until = Instant::now() + LIMIT;
        while !is_time(self) {
            assert!(
                command.try_wait().unwrap().is_none(),
                "it has ended too early"
            );
            assert!(Instant::now() < until, "it does not go on");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.dock.agent.end(Signal::SIGKILL);
        let output = command.wait_with_output().unwrap();
        assert!(!output.status.success());
        self.dock.agent.restart();
        String::from_utf8(output.stderr).unwrap()
    }
}

const DEVICES: [&str; 6] = [
    "--device", "dock:wd0", "--device", "dock:wd1", "--device", "dock:wd2",
];

#[test]
fn a_parcel_at_a_terminal_survives_cuts_and_a_lost_device() {
    let mut setting = Setting::new("");
    setting.add_parcel();
    let export = setting
        .lyon
        .begin(&[&["export", "box"], &DEVICES[..]].concat());
    let said = setting.cut(export, |setting| setting.written(1) > 4 << 20);
    assert!(said.contains("dock:wd"), "{said}");
    // It is begun, and goes on with the same command.
    let status = setting.lyon.says(&["status", "box"]);
    let device = &status["devices"][1];
    assert_eq!(device["path"], "dock:wd1/box-1.parcel");
    assert_eq!(device["state"], "attached", "{status}");
    let exported = setting.lyon.says(&["export", "box"]);
    assert_eq!(exported["devices"][2], "dock:wd2/box-2.parcel");
    assert_eq!(setting.lyon.says(&["status", "box"])["sealed"], true);
    // What has changed since is added.
    let disk = setting.path("lyon.raw");
    let mut content = fs::read(&disk).unwrap();
    content[5 << 20..6 << 20].fill(3);
    fs::write(&disk, &content).unwrap();
    setting.lyon.says(&["top-up", "box"]);

    // One device is lost. Another terminal would be as good: here it is the same.
    fs::remove_file(setting.path("wd1/box-1.parcel")).unwrap();
    let verify = ["verify", "dock:wd2", "dock:wd0"];
    let verified = setting.paris.says(&verify);
    assert_eq!(verified["lost_cells"], 0);
    assert_eq!(verified["devices"][0]["path"], "dock:wd0/box-0.parcel");
    assert_eq!(verified["devices"][1]["path"], Value::Null);
    let key = setting.lyon.run(&["key", "box"]);
    fs::write(setting.path("key"), key.stdout).unwrap();
    let key = setting.path("key").display().to_string();
    let bring = ["import", "--key-file", &key, "dock:wd0", "dock:wd2"];
    let import = setting.paris.begin(&bring);
    let said = setting.cut(import, |setting| {
        let mut files = fs::read_dir(setting.folder.path()).unwrap();
        files.any(|file| {
            let file = file.unwrap();
            let is_part = file.file_name().to_string_lossy().contains(".importing");
            let bytes = || std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) * 512;
            is_part && bytes() > 4 << 20
        })
    });
    assert!(said.contains("lost"), "{said}");
    let imported = setting.paris.says(&bring);
    assert!(imported["recovered_cells"].as_u64().unwrap() > 0);
    let path = imported["disks"][0]["path"].as_str().unwrap().to_owned();
    assert!(fs::read(path).unwrap() == content, "another content");
    let report = imported["report"].as_str().unwrap().to_owned();
    let checked = setting.lyon.says(&["check", "box", &report]);
    assert_eq!(checked["confirmed"], true);
}

#[test]
fn a_terminal_gives_what_it_names_to_whom_it_allows() {
    let limits = "[hosts.paris.limits]\nparcel_devices = [\"wd0\"]\n";
    let mut setting = Setting::new(limits);
    setting.add_parcel();
    let export =
        |device: &'static str| ["export", "box", "--device", device, "--device", "dock:wd2"];
    let lyon = &setting.lyon;
    lyon.refuses(
        &export("dock:private"),
        &[
            "dock:private",
            "dock has no device private",
            "[parcel_devices]",
        ],
    );
    lyon.refuses(&export("rome:wd0"), &["rome:wd0", "rome"]);
    let twice = [
        "export", "box", "--device", "dock:wd0", "--device", "dock:wd0",
    ];
    lyon.refuses(&twice, &["device", "dock:wd0", "twice"]);
    fs::write(setting.path("wd0/box-0.parcel"), vec![7; 2 << 20]).unwrap();
    lyon.refuses(&export("dock:wd0"), &["dock:wd0/box-0.parcel is not empty"]);
    assert_eq!(
        fs::read(setting.path("wd0/box-0.parcel")).unwrap(),
        vec![7; 2 << 20]
    );
    // Nothing is left of the device that was prepared.
    assert_eq!(fs::read_dir(setting.path("wd2")).unwrap().count(), 0);
    lyon.refuses(&["verify", "dock:wd2"], &["dock:wd2 has 0 files"]);
    lyon.refuses(
        &["verify", "dock:wd0/other.parcel"],
        &["dock:wd0/other.parcel", "No such file"],
    );

    let paris = &setting.paris;
    paris.refuses(
        &["verify", "dock:wd2"],
        &[
            "dock does not let paris use the device wd2",
            "[hosts.paris.limits]",
        ],
    );
    paris.refuses(
        &["verify", "dock:wd0"],
        &["none of these devices has a header"],
    );
    setting.dock.trusts(&setting.lyon, "query");
    setting.lyon.refuses(
        &["verify", "dock:wd2"],
        &[
            "dock does not let this host use its parcel devices",
            "--may query,send",
        ],
    );
    setting.dock.agent.end(Signal::SIGTERM);
    let begun = Instant::now();
    let all = ["verify", "dock:wd0", "dock:wd1", "dock:wd2"];
    setting.lyon.refuses(&all, &["dock:wd0", "dock"]);
    assert!(begun.elapsed() < LIMIT);
}

#[test]
fn one_command_at_a_time_writes_a_device_at_a_terminal() {
    let setting = Setting::new("");
    setting.add_parcel();
    let wd0 = setting.path("wd0");
    let file = wd0.join("box-0.parcel");
    let export = setting.lyon.begin(&[
        "export", "box", "--device", "dock:wd0", "--device", "dock:wd1",
    ]);
    let until = Instant::now() + LIMIT;
    while fs::metadata(&file).map_or(0, |file| file.len()) < 4 << 20 {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(1));
    }
    // The lock is that of the file: it is also seen at the terminal itself.
    let held = fs::File::open(&file).unwrap();
    let lock = nix::fcntl::Flock::lock(held, nix::fcntl::FlockArg::LockExclusiveNonblock);
    assert!(lock.is_err(), "it is not locked");
    // Another command reads meanwhile.
    let status = setting.lyon.says(&["status", "box"]);
    assert_eq!(status["devices"][0]["state"], "attached");
    // A command that is killed gives the devices back.
    let pid = nix::unistd::Pid::from_raw(export.id().try_into().unwrap());
    nix::sys::signal::kill(pid, Signal::SIGKILL).unwrap();
    export.wait_with_output().unwrap();
    setting.lyon.says(&["export", "box"]);
    let held = fs::File::open(&file).unwrap();
    let lock = nix::fcntl::Flock::lock(held, nix::fcntl::FlockArg::LockExclusiveNonblock);
    // While it is held here, nobody writes.
    let lock = lock.map_err(|(_, errno)| errno).expect("nobody writes");
    let mut content = fs::read(setting.path("lyon.raw")).unwrap();
    content[0] ^= 1;
    fs::write(setting.path("lyon.raw"), content).unwrap();
    setting
        .lyon
        .refuses(&["top-up", "box"], &["dock:wd0/box-0.parcel is in use"]);
    drop(lock);
    setting.lyon.says(&["top-up", "box"]);
}

#[test]
fn a_channel_needs_its_protocol() {
    let setting = Setting::new("");
    let mut stream = UnixStream::connect(setting.lyon.agent.socket()).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let request = "POST /v1/hosts/dock/parcel-device HTTP/1.1\r\nhost: agent\r\n\
                   connection: close\r\ncontent-length: 0\r\n\r\n";
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    assert!(
        answer.contains("Upgrade: longhaul-parcel-device"),
        "{answer}"
    );
    // A message that is too long ends the channel, and nothing else.
    let mut stream = UnixStream::connect(setting.lyon.agent.socket()).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let request = "POST /v1/hosts/dock/parcel-device HTTP/1.1\r\nhost: agent\r\n\
                   connection: upgrade\r\nupgrade: longhaul-parcel-device\r\n\r\n";
    stream.write_all(request.as_bytes()).unwrap();
    stream.write_all(&u32::MAX.to_le_bytes()).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(
        answer.starts_with(b"HTTP/1.1 101"),
        "{}",
        String::from_utf8_lossy(&answer)
    );
    setting
        .lyon
        .refuses(&["verify", "dock:wd0"], &["has 0 files"]);
}
