//! Implements `lab doctor`: checks everything that the laboratory needs, and names the command that
//! installs each missing part.

use std::fs::{self, OpenOptions};
use std::path::PathBuf;
use std::process::Command;

use nix::sys::statvfs::statvfs;
use nix::unistd::geteuid;

use crate::demo;
use longhaul_lab::error::LabError;
use longhaul_lab::installed::{self, QEMU_VERSIONS};
use longhaul_lab::netns::Namespace;
use longhaul_lab::process::{own_binary, run};

/// Space for a guest or two, their saved states and logs.
const DISK_FREE_MIB_MIN: u64 = 2048;
/// Memory for two small guests' QEMUs and agents.
const MEMORY_FREE_MIB_MIN: u64 = 1024;

/// How necessary a part is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    /// The demo cannot run without it.
    Demo,
    /// Tests and benches use it.
    More,
}

/// The result of a check.
#[derive(Debug)]
struct Finding {
    what: String,
    need: Need,
    /// The state, or the fault and the command that repairs it.
    state: Result<String, (String, String)>,
}

/// Runs all checks and returns the report, and whether the demo can run.
pub(crate) fn examine() -> (String, bool) {
    let mut findings = vec![
        root(),
        program("ip", "makes hosts", Need::Demo),
        program("ping", "measures links", Need::Demo),
        program("nice", "keeps links on time", Need::Demo),
        program("nft", "NATs of sites", Need::Demo),
        namespaces(),
        tap(),
    ];
    findings.extend(QEMU_VERSIONS.map(qemu));
    findings.extend([
        kernel(),
        accelerator(),
        product(),
        memory(),
        disk(),
        program(
            "iperf3",
            "TCP's throughput, for lab bench link and network",
            Need::More,
        ),
        program("qemu-img", "qcow2 disks, for lab history", Need::More),
        program(
            "debootstrap",
            "builds the guest debian, for lab bench memory",
            Need::More,
        ),
        program("mke2fs", "makes that guest's disk", Need::More),
        program("qemu-io", "talks to the disk server in tests", Need::More),
        program("nbdcopy", "talks to the disk server in tests", Need::More),
        unpacked(
            "QEMU guest agent",
            "guest-agent/usr/sbin/qemu-ga",
            "--version",
        ),
        unpacked("S3 server", "s3/rclone", "version"),
        program("git", "names the commit in benches' documents", Need::More),
    ]);
    report(&findings)
}

fn report(findings: &[Finding]) -> (String, bool) {
    let mut text = String::new();
    let mut demo_runs = true;
    for finding in findings {
        match &finding.state {
            Ok(there) => text += &format!("ok       {:<20} {there}\n", finding.what),
            Err((wrong, fix)) => {
                let mark = match finding.need {
                    Need::Demo => "MISSING",
                    Need::More => "missing",
                };
                demo_runs &= finding.need != Need::Demo;
                text += &format!(
                    "{mark}  {:<20} {wrong}\n{:30}to fix it: {fix}\n",
                    finding.what, ""
                );
            }
        }
    }
    text += if demo_runs {
        "The demo can run: make demo\n"
    } else {
        "The demo cannot run yet: what is MISSING is needed for it.\n"
    };
    (text, demo_runs)
}

fn finding(what: &str, need: Need, state: Result<String, (String, &str)>) -> Finding {
    Finding {
        what: what.to_owned(),
        need,
        state: state.map_err(|(wrong, fix)| (wrong, fix.to_owned())),
    }
}

fn root() -> Finding {
    let state = if geteuid().is_root() {
        Ok("yes".to_owned())
    } else {
        Err((
            "network namespaces and TAP devices need root".to_owned(),
            "sudo lab doctor",
        ))
    };
    finding("root", Need::Demo, state)
}

fn program(name: &str, purpose: &str, need: Need) -> Finding {
    let found = std::env::var_os("PATH").and_then(|path| {
        std::env::split_paths(&path)
            .map(|folder| folder.join(name))
            .find(|file| file.is_file())
    });
    let state = match found {
        Some(file) => Ok(format!("{} ({purpose})", file.display())),
        None => Err((format!("not found ({purpose})"), "sudo scripts/install lab")),
    };
    finding(name, need, state)
}

/// Creates a namespace and removes it again, which is the only reliable check.
fn namespaces() -> Finding {
    let name = format!("lh-doctor-{}", std::process::id());
    let tried = Namespace::create(&name).and_then(|namespace| namespace.enter(|| ()));
    let removed = Namespace::remove(&name);
    let state = match tried.and(removed) {
        Ok(()) => Ok("made one and removed it".to_owned()),
        Err(error) => Err((
            error.to_string(),
            "run as root, on a machine or in a container that allows them (CAP_SYS_ADMIN)",
        )),
    };
    finding("network namespaces", Need::Demo, state)
}

fn tap() -> Finding {
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun");
    let state = match opened {
        Ok(_) => Ok("/dev/net/tun".to_owned()),
        Err(error) => Err((
            format!("/dev/net/tun: {error}"),
            "sudo modprobe tun (in a container: pass the device in)",
        )),
    };
    finding("TAP devices", Need::Demo, state)
}

fn qemu(version: &str) -> Finding {
    // The demo needs one version. Tests need all.
    let need = if version == demo::QEMU {
        Need::Demo
    } else {
        Need::More
    };
    let state = match installed::qemu(version).and_then(|path| installed::qemu_version(&path)) {
        Ok(found) if found.starts_with(version) => Ok(found),
        Ok(found) => Err((
            format!("it says that it is {found}"),
            "sudo scripts/install lab",
        )),
        Err(error) => Err((error.to_string(), "sudo scripts/install lab")),
    };
    finding(&format!("QEMU {version}"), need, state)
}

fn kernel() -> Finding {
    let state = match installed::kernel() {
        Ok(folder) => Ok(fs::read_to_string(folder.join("release")).map_or_else(
            |_| folder.display().to_string(),
            |text| text.trim().to_owned(),
        )),
        Err(error) => Err((error.to_string(), "sudo scripts/install lab")),
    };
    finding("guests' kernel", Need::Demo, state)
}

/// Returns a program for one test, which was unpacked beside the QEMUs.
fn unpacked(what: &str, path: &str, version: &str) -> Finding {
    let path = installed::folder().join(path);
    let state = match run(Command::new(&path).arg(version)) {
        Ok(_) => Ok(format!("{} (for a test)", path.display())),
        Err(error) => Err((format!("{error} (for a test)"), "sudo scripts/install lab")),
    };
    finding(what, Need::More, state)
}

/// Never fails: without KVM guests are slower, and the agent determines whether KVM really works.
fn accelerator() -> Finding {
    let opened = OpenOptions::new().read(true).write(true).open("/dev/kvm");
    let state = match opened {
        Ok(_) => "/dev/kvm opens; used where a guest really runs with it".to_owned(),
        Err(_) => "no /dev/kvm: guests run under TCG, slowly".to_owned(),
    };
    finding("accelerator", Need::More, Ok(state))
}

fn product() -> Finding {
    let state = match own_binary("longhaul").and_then(|path| version_of(&path)) {
        Ok(version) => Ok(version),
        Err(error) => Err((error.to_string(), "make build")),
    };
    finding("longhaul", Need::Demo, state)
}

fn version_of(path: &PathBuf) -> Result<String, LabError> {
    run(Command::new(path).arg("--version")).map(|text| text.trim().to_owned())
}

fn memory() -> Finding {
    let available = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text
            .lines()
            .find(|line| line.starts_with("MemAvailable:"))?;
        let kib: u64 = line.split_ascii_whitespace().nth(1)?.parse().ok()?;
        Some(kib / 1024)
    });
    let state = match available {
        Some(mib) if mib < MEMORY_FREE_MIB_MIN => Err((
            format!("{mib} MiB are available, {MEMORY_FREE_MIB_MIN} are needed"),
            "end something that uses much memory",
        )),
        Some(mib) => Ok(format!("{mib} MiB available")),
        None => Ok("not known".to_owned()),
    };
    finding("memory", Need::Demo, state)
}

fn disk() -> Finding {
    let state = match statvfs("/var/tmp") {
        Ok(stat) => {
            let mib = stat.blocks_available() * stat.fragment_size() / (1 << 20);
            if mib < DISK_FREE_MIB_MIN {
                Err((
                    format!("{mib} MiB are free in /var/tmp, {DISK_FREE_MIB_MIN} are needed"),
                    "make room there",
                ))
            } else {
                Ok(format!("{mib} MiB free in /var/tmp"))
            }
        }
        Err(error) => Err((format!("/var/tmp: {error}"), "sudo mkdir -m 1777 /var/tmp")),
    };
    finding("disk", Need::Demo, state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_demo_needs_keeps_it_from_running() {
        let there = || finding("a", Need::Demo, Ok("1.0".to_owned()));
        let missing = |need| finding("b", need, Err(("gone".to_owned(), "get it")));
        let (text, runs) = report(&[there(), missing(Need::More)]);
        assert!(runs);
        assert!(
            text.contains("gone") && text.contains("to fix it: get it"),
            "{text}"
        );
        let (text, runs) = report(&[there(), missing(Need::Demo)]);
        assert!(!runs);
        assert!(
            text.contains("MISSING") && text.contains("cannot run"),
            "{text}"
        );
    }
}
