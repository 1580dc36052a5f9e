//! Provides a running agent, commands against it, and golden texts for their output.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    dead_code,
    missing_docs
)]
#![allow(unreachable_pub)]

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// A generous time limit, reached only when something is broken.
pub const LIMIT: Duration = Duration::from_secs(60);

/// The same for one command, which may move a guest on a busy machine.
const COMMAND_LIMIT: Duration = Duration::from_secs(240);

/// An agent with a state folder of its own, and without any QEMU.
pub struct Agent {
    pub folder: tempfile::TempDir,
    pub child: Child,
}

impl Agent {
    pub fn start() -> Self {
        Self::start_with("")
    }

    /// Starts an agent with additions to the first, nameless table of its configuration.
    pub fn start_with(more: &str) -> Self {
        Self::start_configured(|folder| configuration(folder, more))
    }

    pub fn start_configured(configuration: impl FnOnce(&Path) -> String) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text = configuration(folder.path());
        std::fs::write(folder.path().join("agent.toml"), text).unwrap();
        let child = spawn(folder.path());
        let mut agent = Self { folder, child };
        agent.wait_until_ready();
        agent
    }

    pub fn wait_until_ready(&mut self) {
        let deadline = Instant::now() + LIMIT;
        while std::os::unix::net::UnixStream::connect(self.socket()).is_err() {
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("the agent ended ({status}): {}", self.log());
            }
            assert!(Instant::now() < deadline, "no agent: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("agent.sock")
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Returns a command for this agent.
    pub fn longhaul(&self, arguments: &[&str]) -> Output {
        longhaul(&self.socket(), arguments)
    }

    /// Runs a command that must succeed, and returns its output.
    pub fn succeed(&self, arguments: &[&str]) -> String {
        let output = self.longhaul(arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        let log = self.log();
        assert!(output.status.success(), "{arguments:?}: {errors}\n{log}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a command that must succeed, and returns its JSON output.
    pub fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let arguments = [&["--json"], arguments].concat();
        serde_json::from_str(&self.succeed(&arguments)).unwrap()
    }

    /// Compares a command's output and exit code with `golden/NAME.txt`.
    pub fn check(&self, name: &str, arguments: &[&str]) {
        let output = self.longhaul(arguments);
        check(name, arguments, &output, self.folder.path());
    }

    pub fn end(&mut self, signal: nix::sys::signal::Signal) -> std::process::ExitStatus {
        let pid = nix::unistd::Pid::from_raw(self.child.id().try_into().unwrap());
        nix::sys::signal::kill(pid, signal).unwrap();
        wait(&mut self.child)
    }

    pub fn restart(&mut self) {
        self.restart_failing_at("");
    }

    /// Restarts the agent with these fail points.
    pub fn restart_failing_at(&mut self, points: &str) {
        self.child = spawn_failing_at(self.folder.path(), points);
        self.wait_until_ready();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the QEMU that runs the real guests of these tests.
pub fn qemu() -> PathBuf {
    let lab = std::env::var_os("LONGHAUL_LAB_DIR").unwrap_or("/var/lib/longhaul-lab".into());
    let candidates = [
        Path::new(&lab).join("qemu/7.2/qemu-system-x86_64"),
        PathBuf::from("/usr/bin/qemu-system-x86_64"),
    ];
    let found = candidates.into_iter().find(|path| path.exists());
    found.expect("no QEMU here: scripts/install lab")
}

/// Returns an address on this machine that only the caller uses, even before anything listens
/// there: this process owns its address, and the system never assigns such a port to a socket that
/// asks for any.
pub fn free_address() -> String {
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    let host = Ipv4Addr::new(127, high, middle, low);
    SocketAddr::from((host, NEXT.fetch_add(1, Ordering::Relaxed))).to_string()
}

/// Returns the configuration of a host that runs guests; tables may follow.
pub fn host(name: &str, address: &str, folder: &Path) -> String {
    format!(
        "name = {name:?}\nstate = {:?}\nlisten = {address:?}\napi.socket = {:?}\n\
         {}[qemu.emulators]\nqemu = {:?}\n",
        folder.join("s"),
        folder.join("agent.sock"),
        qemu_table(),
        qemu(),
    )
}

/// Returns the table `[qemu]` of an agent whose QEMUs run as its own user, also if that is root.
pub fn qemu_table() -> &'static str {
    match nix::unistd::geteuid().is_root() {
        true => "[qemu]\naccelerator = \"tcg\"\nrun_as = \"root\"\n",
        false => "[qemu]\naccelerator = \"tcg\"\n",
    }
}

pub fn configure(folder: &Path, more: &str) {
    std::fs::write(folder.join("agent.toml"), configuration(folder, more)).unwrap();
}

pub fn configuration(folder: &Path, more: &str) -> String {
    format!(
        "name = \"lyon-1\"\nstate = {:?}\nlisten = \"127.0.0.1:0\"\n{more}\n\
         api.socket = {:?}\n\
         [qemu.emulators]\nmissing = \"/nonexistent/qemu\"\n",
        folder.join("state"),
        folder.join("agent.sock"),
    )
}

pub fn spawn(folder: &Path) -> Child {
    spawn_failing_at(folder, "")
}

fn spawn_failing_at(folder: &Path, points: &str) -> Child {
    let log = std::fs::File::options()
        .create(true)
        .append(true)
        .open(folder.join("log"))
        .unwrap();
    Command::new(env!("CARGO_BIN_EXE_longhaul"))
        .args(["agent", "--config"])
        .arg(folder.join("agent.toml"))
        .env("LONGHAUL_FAIL_POINT", points)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap()
}

pub fn wait(child: &mut Child) -> std::process::ExitStatus {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("it does not end");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub fn command(socket: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_longhaul"));
    command
        .env_clear()
        .env("LONGHAUL_SOCKET", socket)
        .stdin(Stdio::null());
    command
}

/// Runs a command to its end; fails at the time limit.
pub fn longhaul(socket: &Path, arguments: &[&str]) -> Output {
    let child = command(socket)
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = nix::unistd::Pid::from_raw(child.id().try_into().unwrap());
    let (sender, receiver) = std::sync::mpsc::channel();
    let waiting = std::thread::spawn(move || {
        let output = child.wait_with_output();
        // The receiver is gone when the limit was reached.
        let _ = sender.send(());
        output.unwrap()
    });
    if receiver.recv_timeout(COMMAND_LIMIT).is_err() {
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
        let output = waiting.join().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        panic!("{arguments:?} did not end within {COMMAND_LIMIT:?}: {errors}");
    }
    waiting.join().unwrap()
}

/// Compares exit code, stdout and stderr with `golden/NAME.txt`, after replacing the parts that
/// differ between runs. With `LONGHAUL_BLESS` set the file is written instead.
pub fn check(name: &str, arguments: &[&str], output: &Output, folder: &Path) {
    let mut text = format!(
        "$ longhaul {}\nexit {}\n",
        arguments.join(" "),
        output.status.code().unwrap_or(-1)
    );
    for (title, bytes) in [("stdout", &output.stdout), ("stderr", &output.stderr)] {
        if !bytes.is_empty() {
            text.push_str(&format!("--- {title}\n{}", String::from_utf8_lossy(bytes)));
        }
    }
    let text = normalized(&text, folder);
    let path = format!("{}/tests/golden/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("LONGHAUL_BLESS").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let good = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        good == text,
        "{path} differs; if what follows is good, set LONGHAUL_BLESS=1\n{text}"
    );
}

fn normalized(text: &str, folder: &Path) -> String {
    let mut out = String::new();
    for line in text
        .replace(&folder.display().to_string(), "[FOLDER]")
        .lines()
    {
        let changes_with_the_machine = ["  KVM", "  memory"];
        if changes_with_the_machine
            .iter()
            .any(|start| line.starts_with(start))
        {
            continue;
        }
        let words: Vec<String> = line
            .split(' ')
            .map(|word| normalized_word(word).to_owned())
            .collect();
        out.push_str(&words.join(" "));
        out.push('\n');
    }
    let mut parts = out.split("pid ");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let rest = part.trim_start_matches(|c: char| c.is_ascii_digit());
        out.push_str("pid [PID]");
        out.push_str(rest);
    }
    out
}

fn normalized_word(word: &str) -> &str {
    let fingerprint = word.len() == 79
        && word.split('-').count() == 16
        && word.chars().all(|c| c == '-' || c.is_ascii_hexdigit());
    let known = word.starts_with("1111-") || word.starts_with("2222-");
    match fingerprint && !known {
        true => "[FINGERPRINT]",
        false => word,
    }
}
