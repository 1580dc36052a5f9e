//! Tests real moves between two real agents: hooks at every step, on both sides and with a veto,
//! and the fences that keep a guest that moved away from being started again, under any name.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Agent, LIMIT, free_address, qemu};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// Returns a description with one disk.
fn guest(name: &str, image: &str) -> String {
    format!(
        "name = {name:?}\nmachine = \"pc-q35-7.2\"\ncpu = \"qemu64\"\nvcpus = 1\nmemory_mib = 64\n\
         [[disks]]\nname = \"vda\"\nimage = {image:?}\nshared = true\n"
    )
}

/// A host with access to the shared folder, whose hooks log their input.
struct Host(Agent);

impl std::ops::Deref for Host {
    type Target = Agent;

    fn deref(&self) -> &Agent {
        &self.0
    }
}

impl Host {
    fn start(name: &str, address: &str, shared: &Path) -> Self {
        Self(Agent::start_configured(|folder| {
            let disk = |file: &str| {
                format!(
                    "path = {:?}\nformat = \"raw\"\ndirect = false\n",
                    shared.join(file)
                )
            };
            let mut text = common::host(name, address, folder);
            text.push_str(&format!(
                "[images.disk]\n{}[images.link]\n{}",
                disk("disk.raw"),
                disk("link.raw"),
            ));
            let steps = [
                (
                    "source",
                    &[
                        "prepare",
                        "stopping",
                        "stopped",
                        "released",
                        "committed",
                        "aborted",
                    ][..],
                ),
                (
                    "destination",
                    &["arriving", "ready", "committed", "running", "aborted"],
                ),
            ];
            for (side, steps) in steps {
                for step in steps {
                    let script = format!(
                        "echo $LONGHAUL_SIDE $LONGHAUL_STEP $LONGHAUL_GUEST $LONGHAUL_SOURCE \
                         $LONGHAUL_DESTINATION $LONGHAUL_GENERATION >>{0}/steps; \
                         if [ -e {0}/veto-$LONGHAUL_STEP ]; then echo not now; exit 7; fi",
                        folder.display()
                    );
                    text.push_str(&format!(
                        "[hooks.{side}.{step}]\ncommand = [\"/bin/sh\", \"-c\", {script:?}]\n\
                         within = \"60s\"\n"
                    ));
                }
            }
            text
        }))
    }

    fn fail(&self, arguments: &[&str], code: i32, expected: &[&str]) {
        let output = self.longhaul(arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {errors}");
        for text in expected {
            assert!(
                errors.contains(text),
                "{arguments:?}: no {text:?} in {errors}"
            );
        }
    }

    fn state(&self, name: &str) -> String {
        let guests = self.json(&["guests"])["guests"].clone();
        let guests = guests.as_array().unwrap();
        let guest = guests.iter().find(|guest| guest["name"] == name);
        guest.map_or("unknown".to_owned(), |guest| {
            guest["state"].as_str().unwrap().to_owned()
        })
    }

    fn trust(&self, name: &str, other: &Self, address: &str) {
        let fingerprint = other.json(&["host"])["fingerprint"].clone();
        let fingerprint = fingerprint.as_str().unwrap();
        let trust = ["host", "trust", name, fingerprint, address];
        self.succeed(&[&trust[..], &["--may", "query,send"]].concat());
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.folder.path().join(name)
    }

    fn describe(&self, name: &str, image: &str) -> String {
        let path = self.file(&format!("{name}.toml"));
        std::fs::write(&path, guest(name, image)).unwrap();
        path.display().to_string()
    }

    /// Returns the steps since the last call.
    fn steps(&self) -> Vec<String> {
        let steps = std::fs::read_to_string(self.file("steps")).unwrap_or_default();
        std::fs::write(self.file("steps"), "").unwrap();
        steps.lines().map(str::to_owned).collect()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // It may be elsewhere, or stopped.
        self.longhaul(&["guests", "stop", "--force", "web-7"]);
    }
}

struct Two {
    lyon: Host,
    paris: Host,
    _shared: tempfile::TempDir,
}

fn two() -> Two {
    let shared = tempfile::tempdir().unwrap();
    let disk = shared.path().join("disk.raw");
    std::fs::File::create(&disk)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    std::os::unix::fs::symlink(&disk, shared.path().join("link.raw")).unwrap();
    let (here, there) = (free_address(), free_address());
    let lyon = Host::start("lyon-1", &here, shared.path());
    let paris = Host::start("paris-2", &there, shared.path());
    lyon.trust("paris-2", &paris, &there);
    paris.trust("lyon-1", &lyon, &here);
    let file = lyon.describe("web-7", "disk");
    lyon.succeed(&["guests", "start", &file]);
    Two {
        lyon,
        paris,
        _shared: shared,
    }
}

fn told(side: &str, steps: &[&str], more: &str) -> Vec<String> {
    steps
        .iter()
        .map(|step| format!("{side} {step} {more}"))
        .collect()
}

#[test]
fn hooks_run_in_their_order() {
    let Two {
        lyon,
        paris,
        _shared,
    } = two();
    let plan = lyon.succeed(&["plan", "web-7", "--to", "paris-2"]);
    assert!(plan.contains("started by Longhaul"), "{plan}");
    assert!(lyon.steps().is_empty(), "a plan runs nothing");

    lyon.succeed(&["migrate", "web-7", "--to", "paris-2"]);
    let about = "web-7 lyon-1 paris-2 2";
    let source = ["prepare", "stopping", "stopped", "released", "committed"];
    assert_eq!(lyon.steps(), told("source", &source, about));
    let destination = ["arriving", "ready", "committed", "running"];
    assert_eq!(paris.steps(), told("destination", &destination, about));
    let report = lyon.json(&["report"]);
    let hooks = report["hooks"].as_array().unwrap();
    let names: Vec<_> = hooks
        .iter()
        .map(|hook| hook["step"].as_str().unwrap())
        .collect();
    assert_eq!(names, source);
    assert_eq!(hooks[3]["guest_stood_still"], true);
    assert!(hooks.iter().all(|hook| hook["error"].is_null()), "{report}");

    let plan = paris.succeed(&["plan", "web-7", "--to", "lyon-1", "--early-release"]);
    assert!(plan.contains("early release saves about"), "{plan}");
    assert!(plan.contains("stays stopped until"), "{plan}");
    paris.succeed(&["migrate", "web-7", "--to", "lyon-1", "--early-release"]);
    assert_eq!(paris.json(&["report"])["asked"]["early_release"], true);
    let about = "web-7 paris-2 lyon-1 3";
    assert_eq!(paris.steps(), told("source", &source, about));
    assert_eq!(lyon.steps(), told("destination", &destination, about));
}

/// A process that ends with the test.
struct Script(Child);

impl Drop for Script {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Starts a guest on a disk by another program than Longhaul, and returns its control socket.
fn script(folder: &Path, disk: &Path) -> (Script, String) {
    let socket = folder.join("qmp").display().to_string();
    let drive = format!("file={},if=virtio,format=raw", disk.display());
    let child = Command::new(qemu())
        .args(["-M", "pc-q35-7.2", "-m", "64", "-S", "-display", "none"])
        .args(["-net", "none", "-drive", &drive])
        .args(["-qmp", &format!("unix:{socket},server,nowait")])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let script = Script(child);
    let until = Instant::now() + LIMIT;
    while UnixStream::connect(&socket).is_err() {
        assert!(Instant::now() < until, "QEMU does not listen");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    (script, socket)
}

#[test]
fn what_left_is_not_started_again_under_any_name() {
    let Two {
        lyon,
        paris,
        _shared: shared,
    } = two();
    lyon.succeed(&["migrate", "web-7", "--to", "paris-2"]);
    // By its name, by its file, and by its disk under other names.
    let again = lyon.describe("web-7", "disk");
    let moved = ["moved to paris-2", "generation 2"];
    lyon.fail(&["guests", "start", "web-7"], 3, &moved);
    lyon.fail(&["guests", "start", &again], 3, &moved);
    for image in ["disk", "link"] {
        let copy = lyon.describe("copy", image);
        let expected = ["belongs to web-7", "paris-2", "generation 2"];
        lyon.fail(&["guests", "start", &copy], 3, &expected);
    }
    // Nor indirectly. QEMU's own lock would keep it away from the running guest's disk.
    paris.succeed(&["guests", "stop", "--force", "web-7"]);
    let disk = shared.path().join("disk.raw");
    let (copy, socket) = script(lyon.0.folder.path(), &disk);
    let attach = ["guests", "attach", "copy", "--qmp", &socket];
    let expected = ["belongs to web-7", "generation 2", "nothing was changed"];
    lyon.fail(&attach, 3, &expected);
    drop(copy);
    paris.succeed(&["guests", "start", "web-7"]);
    assert_eq!(lyon.state("web-7"), "elsewhere");
    assert_eq!(lyon.state("copy"), "unknown");

    paris.succeed(&["migrate", "web-7", "--to", "lyon-1"]);
    assert_eq!(lyon.state("web-7"), "running");
    paris.fail(
        &["guests", "start", &paris.describe("copy", "link")],
        3,
        &["belongs to web-7"],
    );
    // The mark of a guest that is here again is removed at the agent's next start at the latest.
    lyon.succeed(&["guests", "stop", "--force", "web-7"]);
    lyon.succeed(&["guests", "start", "web-7"]);
}

#[test]
fn a_hook_can_stop_a_move_up_to_the_release() {
    let Two {
        lyon,
        paris,
        _shared,
    } = two();
    for (host, step, destination) in [
        (&lyon, "prepare", false),
        (&lyon, "stopping", true),
        (&lyon, "stopped", true),
        (&lyon, "released", true),
        (&paris, "arriving", false),
        (&paris, "ready", true),
    ] {
        let veto = host.file(&format!("veto-{step}"));
        std::fs::write(&veto, "").unwrap();
        let output = lyon.longhaul(&["migrate", "web-7", "--to", "paris-2"]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            [Some(1), Some(3)].contains(&output.status.code()),
            "{step}: {errors}"
        );
        let expected = format!("the hook `{step}`");
        assert!(
            errors.contains(&expected) && errors.contains("not now"),
            "{step}: {errors}"
        );
        assert!(errors.contains("web-7 runs on lyon-1"), "{step}: {errors}");
        std::fs::remove_file(veto).unwrap();
        assert_eq!(lyon.state("web-7"), "running", "{step}");
        assert_eq!(paris.state("web-7"), "unknown", "{step}");
        let steps = lyon.steps();
        assert!(
            steps.last().unwrap().starts_with("source aborted"),
            "{step}: {steps:?}"
        );
        let steps = paris.steps();
        assert_eq!(
            steps
                .iter()
                .any(|told| told.starts_with("destination aborted")),
            destination || step == "arriving",
            "{step}: {steps:?}"
        );
    }
    // A late failure is reported, and changes nothing.
    for (host, step) in [(&lyon, "committed"), (&paris, "running")] {
        std::fs::write(host.file(&format!("veto-{step}")), "").unwrap();
    }
    lyon.succeed(&["migrate", "web-7", "--to", "paris-2"]);
    assert_eq!(paris.state("web-7"), "running");
    let shown = lyon.succeed(&["report"]);
    assert!(
        shown.contains("committed") && shown.contains("failed: "),
        "{shown}"
    );
    let report = paris.json(&["report"]);
    let failed = report["hooks"]
        .as_array()
        .unwrap()
        .iter()
        .find(|hook| !hook["error"].is_null());
    assert_eq!(failed.unwrap()["step"], "running", "{report}");
}
