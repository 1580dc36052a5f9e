//! Tests an agent whose sandbox does not let it write where images are: in a mount namespace with a
//! read-only folder, and in the packaged unit's own sandbox where systemd runs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Agent, command, free_address};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

const BINARY: &str = env!("CARGO_BIN_EXE_longhaul");
const GUEST: &str = "name = \"web-7\"\nmachine = \"pc-q35-7.2\"\ncpu = \"qemu64\"\nvcpus = 1\n\
                     memory_mib = 64\n[[disks]]\nname = \"vda\"\nimage = \"web\"\n";
const UNIT: &str = include_str!("../../../packaging/longhaul-agent.service");

/// Returns the configuration of a host with an image in this folder.
fn configuration(name: &str, address: &str, folder: &Path, images: &Path) -> String {
    let image = images.join("web.raw");
    let image = format!("[images.web]\npath = {image:?}\nformat = \"raw\"\ndirect = false\n");
    common::host(name, address, folder) + &image
}

/// Starts an agent with this configuration by a command.
fn start(folder: TempDir, text: &str, mut how: Command) -> Agent {
    fs::write(folder.path().join("agent.toml"), text).unwrap();
    let log = File::create(folder.path().join("log")).unwrap();
    let child: Child = how
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap();
    let mut agent = Agent { folder, child };
    agent.wait_until_ready();
    agent
}

fn doctor(agent: &Agent) -> String {
    let output = command(&agent.socket())
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .args(["doctor", "--config"])
        .arg(agent.folder.path().join("agent.toml"))
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

fn trust(host: &Agent, name: &str, other: &Agent, address: &str) {
    let fingerprint = other.json(&["host"])["fingerprint"].clone();
    let trust = [
        "host",
        "trust",
        name,
        fingerprint.as_str().unwrap(),
        address,
    ];
    host.succeed(&[&trust[..], &["--may", "query,send"]].concat());
}

#[test]
fn a_disk_does_not_move_to_a_folder_that_is_read_only_for_the_agent() {
    let unshare = ["--mount", "--propagation", "private"];
    let can = Command::new("unshare").args(unshare).arg("true").output();
    if !can.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no mount namespace can be made here");
        return;
    }
    let (here, there) = (free_address(), free_address());
    let lyon = Agent::start_configured(|folder| {
        File::create(folder.join("web.raw"))
            .and_then(|image| image.set_len(1 << 20))
            .unwrap();
        configuration("lyon-1", &here, folder, folder)
    });
    let (folder, images) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let text = configuration("paris-2", &there, folder.path(), images.path());
    let mut how = Command::new("unshare");
    how.args(unshare)
        .args(["sh", "-c"])
        .arg(
            "mount --bind \"$1\" \"$1\" && mount -o remount,bind,ro \"$1\" && \
             exec \"$2\" agent --config \"$3\"",
        )
        .arg("sh")
        .arg(images.path())
        .arg(BINARY)
        .arg(folder.path().join("agent.toml"));
    let paris = start(folder, &text, how);
    trust(&lyon, "paris-2", &paris, &there);
    trust(&paris, "lyon-1", &lyon, &here);

    let shown = images.path().display().to_string();
    assert_eq!(paris.json(&["host"])["not_writable"][0]["path"], shown);
    let found = doctor(&paris);
    assert!(
        found.contains(&format!("may not write in {shown}")),
        "{found}"
    );
    assert!(
        found.contains(&format!("ReadWritePaths={shown}")),
        "{found}"
    );
    assert!(!doctor(&lyon).contains("ReadWritePaths="));

    let description = lyon.folder.path().join("web-7.toml");
    fs::write(&description, GUEST).unwrap();
    lyon.succeed(&["guests", "start", &description.display().to_string()]);
    for arguments in [&["plan"][..], &["migrate"]] {
        let arguments = [arguments, &["web-7", "--to", "paris-2"]].concat();
        let output = lyon.longhaul(&arguments);
        let text =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{text}");
        assert!(text.contains("may not write in the folder of"), "{text}");
        // Where it is on paris-2 is no concern of lyon-1.
        assert!(!text.contains(&shown), "{text}");
    }
    assert_eq!(lyon.json(&["guests"])["guests"][0]["state"], "running");
    lyon.succeed(&["guests", "stop", "--force", "web-7"]);
}

/// Ends a unit of systemd.
struct Unit(String);

impl Drop for Unit {
    fn drop(&mut self) {
        // It has ended already if the test failed to start it.
        let _ = Command::new("systemctl").args(["stop", &self.0]).output();
    }
}

/// Returns the properties of the packaged unit that make its sandbox.
fn sandbox() -> impl Iterator<Item = &'static str> {
    let (_, service) = UNIT.split_once("[Service]").unwrap();
    let (service, _) = service.split_once("[Install]").unwrap();
    let others = [
        "Type",
        "Exec",
        "Restart",
        "StateDirectory",
        "RuntimeDirectory",
    ];
    service
        .lines()
        .filter(|line| !line.starts_with('#') && line.contains('='))
        .filter(move |line| !others.iter().any(|other| line.starts_with(other)))
}

#[test]
fn the_packaged_sandbox_lets_disks_move_with_a_drop_in() {
    let properties: Vec<&str> = sandbox().collect();
    assert!(
        properties.contains(&"ProtectSystem=strict"),
        "{properties:?}"
    );
    if !Path::new("/run/systemd/system").exists() || !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: systemd does not run here, or this is not root");
        return;
    }
    let images = tempfile::tempdir_in("/var/lib").unwrap();
    for allowed in [false, true] {
        let folder = tempfile::tempdir_in("/var/lib").unwrap();
        // The sandbox hides home folders and /tmp, where the program may be.
        let binary = folder.path().join("longhaul");
        fs::copy(BINARY, &binary).unwrap();
        let text = configuration("lyon-1", &free_address(), folder.path(), images.path());
        let unit = Unit(format!("longhaul-test-{}-{allowed}", std::process::id()));
        let mut how = Command::new("systemd-run");
        how.args(["--collect", "--wait", "--pipe", "--unit", &unit.0]);
        for property in &properties {
            how.args(["-p", property]);
        }
        how.arg("-p")
            .arg(format!("ReadWritePaths={}", folder.path().display()));
        if allowed {
            how.arg("-p")
                .arg(format!("ReadWritePaths={}", images.path().display()));
        }
        how.arg(&binary)
            .args(["agent", "--config"])
            .arg(folder.path().join("agent.toml"));
        let agent = start(folder, &text, how);
        let host = agent.json(&["host"]);
        let refused = host["not_writable"].as_array().unwrap();
        assert_eq!(refused.is_empty(), allowed, "{host}");
        if !allowed {
            let hint = refused[0]["hint"].as_str().unwrap();
            assert!(hint.contains("ReadWritePaths="), "{hint}");
        }
    }
}
