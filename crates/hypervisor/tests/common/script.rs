//! Guests that a script started, and their copies on another host.

use super::Host;
use longhaul_hypervisor::attach::{Attach, AttachGuestError, look_again};
use longhaul_hypervisor::config::{Image, ImageFormat, KernelFiles, Network};
use longhaul_hypervisor::guest::{RecordedGuest, find_all};
use longhaul_hypervisor::launch::Role;
use longhaul_hypervisor::observe::observe;
use longhaul_hypervisor::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A QEMU started by a script.
pub(crate) struct Script {
    child: Child,
    socket: PathBuf,
}

impl Drop for Script {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Script {
    /// Starts a QEMU in the host's folder; `line` is split at spaces.
    pub(crate) async fn start(host: &Host, emulator: &Path, line: &str) -> Self {
        let socket = host.folder.path().join("script.sock");
        let child = Command::new(emulator)
            .current_dir(host.folder.path())
            .args(line.split_whitespace())
            .args(["-accel", "tcg", "-display", "none", "-qmp"])
            .arg(format!("unix:{},server=on,wait=off", socket.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut script = Self { child, socket };
        let deadline = Instant::now() + Duration::from_secs(60);
        while let Err(error) = script.connect().await {
            assert!(
                script.child.try_wait().unwrap().is_none(),
                "{line}: it ended"
            );
            assert!(Instant::now() < deadline, "{error}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        script
    }

    pub(crate) async fn connect(&self) -> Result<Qmp, QmpError> {
        Qmp::connect(&self.socket, COMMAND_TIMEOUT).await
    }

    /// Runs commands in QEMU.
    pub(crate) async fn run(&self, commands: &[(&str, Value)]) {
        let qmp = self.connect().await.unwrap();
        for (command, arguments) in commands {
            let done = qmp.execute(command, arguments.clone(), COMMAND_TIMEOUT);
            done.await.unwrap();
        }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub(crate) fn attach<'a>(&'a self, name: &'a str) -> Attach<'a> {
        Attach {
            name,
            socket: &self.socket,
            pid: None,
            generation: 3,
        }
    }
}

pub(crate) async fn attach(
    what: Attach<'_>,
    host: &Host,
) -> Result<RecordedGuest, AttachGuestError> {
    what.look(&host.config).await?.keep(&host.config)
}

/// Returns a host whose configuration names everything that the scripts use.
pub(crate) fn host() -> Host {
    let mut host = Host::new();
    let folder = host.folder.path().to_owned();
    for name in ["vdb", "vdc", "vars"] {
        let path = folder.join(format!("{name}.raw"));
        fs::write(&path, vec![0; 512 << 10]).unwrap();
        let image = Image {
            path,
            format: ImageFormat::Raw,
            direct: Some(false),
            locks: true,
            local: false,
            same_file_as: None,
            volume: None,
        };
        host.config.images.insert(name.to_owned(), image);
    }
    fs::write(folder.join("code.fd"), vec![0xf4; 512 << 10]).unwrap();
    fs::write(folder.join("vmlinuz"), vec![0; 4096]).unwrap();
    let firmware = folder.join("code.fd");
    host.config.firmware.insert("code".to_owned(), firmware);
    for (name, network) in [("own", Network::User), ("outside", Network::Nat)] {
        host.config.networks.insert(name.to_owned(), network);
    }
    let kernel = KernelFiles {
        kernel: folder.join("vmlinuz"),
        initrd: None,
    };
    host.config.kernels.insert("stub".to_owned(), kernel);
    host
}

/// Attaches to a guest, and launches its copy. The description must contain some text.
pub(crate) async fn same_machine(
    label: &str,
    emulator: &Path,
    line: &str,
    expected: &str,
) -> Result<(), String> {
    let host = host();
    let script = Script::start(&host, emulator, line).await;
    copied(&host, &script, label, &[expected]).await
}

pub(crate) async fn copied(
    host: &Host,
    script: &Script,
    label: &str,
    expected: &[&str],
) -> Result<(), String> {
    let guest = attach(script.attach("web"), host).await;
    let guest = guest.map_err(|error| error.to_string())?;
    assert_eq!(guest.pid(), Some(script.pid()));
    let text = toml::to_string(guest.description()).unwrap();
    if let Some(missing) = expected.iter().find(|part| !text.contains(**part)) {
        return Err(format!("no {missing} in {text}"));
    }
    let again = longhaul_hypervisor::description::parse(&text);
    assert_eq!(&again.unwrap(), guest.description());
    let qmp = guest.connect().await.unwrap();
    let there = observe(&qmp).await.unwrap();
    let again = look_again(&guest.handle(), &qmp, &host.config)
        .await
        .unwrap();
    assert_eq!(again.unwrap().1, []);
    drop(qmp);

    let mut other = Host::new();
    other.config.images = host.config.images.clone();
    other.config.networks = host.config.networks.clone();
    other.config.firmware = host.config.firmware.clone();
    other.config.kernels = host.config.kernels.clone();
    let launched = other.launch(guest.description(), label, Role::Destination);
    let (copy, qmp) = launched.await.map_err(|error| format!("{error}\n{text}"))?;
    let here = observe(&qmp).await.unwrap();
    let differences = here.differences(&there);
    let differences: Vec<String> = differences.iter().map(ToString::to_string).collect();
    if !differences.is_empty() {
        return Err(format!("{}\n{text}", differences.join("\n")));
    }
    host.launcher().detach(&guest.handle()).unwrap();
    assert!(find_all(host.state()).unwrap().is_empty());
    let from = script.connect().await.unwrap();
    assert_eq!(
        from.query("query-status").await.unwrap()["status"],
        "running"
    );
    loads(&from, &qmp, &copy.folder().socket("incoming").unwrap()).await?;
    copy.stop(Some(&qmp)).await.unwrap();
    Ok(())
}

/// Equal machines are also loaded by QEMU, with its own migration.
pub(crate) async fn loads(from: &Qmp, to: &Qmp, socket: &Path) -> Result<(), String> {
    let late = json!({"capabilities": [{"capability": "late-block-activate", "state": true}]});
    let target = json!({"uri": format!("unix:{}", socket.display())});
    for (qmp, command, arguments) in [
        (to, "migrate-set-capabilities", late),
        (to, "migrate-incoming", target.clone()),
        (from, "migrate", target),
    ] {
        let done = qmp.execute(command, arguments, COMMAND_TIMEOUT).await;
        done.map_err(|error| error.to_string())?;
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let migration = from.query("query-migrate").await.unwrap();
        let there = to
            .query("query-status")
            .await
            .map_err(|error| error.to_string())?;
        if migration["status"] == "completed" && there["status"] == "paused" {
            return Ok(());
        }
        if migration["status"] == "failed" || Instant::now() > deadline {
            return Err(format!("it does not load: {migration}, {there}"));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
