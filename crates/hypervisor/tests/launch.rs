//! Tests launching guests on real QEMUs, finding them again, ending them, and removing their
//! remains.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Host, MACHINES, emulators, guest};
use longhaul_hypervisor::Qmp;
use longhaul_hypervisor::folder::GuestFolder;
use longhaul_hypervisor::guest::{Found, RecordedGuest, find_all};
use longhaul_hypervisor::launch::{LaunchError, Role};
use longhaul_hypervisor::qmp::QmpError;
use longhaul_hypervisor::scope::Scope;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, BufReader};

/// Set for a copy of this program that acts as an agent.
const AGENT: &str = "LONGHAUL_TEST_AGENT_STATE";

fn running(state: &Path) -> RecordedGuest {
    let mut found = find_all(state).unwrap();
    assert_eq!(found.len(), 1, "{found:?}");
    match found.pop() {
        Some(Found::Running(guest)) => guest,
        other => panic!("{other:?}"),
    }
}

fn cgroups(guest: &RecordedGuest) -> Vec<PathBuf> {
    match &guest.record().scope {
        Scope::Cgroups(paths) => paths.clone(),
        Scope::Session | Scope::Unit(_) => Vec::new(),
    }
}

/// Ends a guest and asserts that nothing of it remains.
async fn stop(guest: RecordedGuest, qmp: Option<&Qmp>) {
    let cgroups = cgroups(&guest);
    guest.stop(qmp).await.unwrap();
    // Its parent may not have reaped it yet: it holds nothing any more.
    assert!(guest.process().unwrap().is_none());
    assert!(!guest.folder().path().exists());
    assert!(cgroups.iter().all(|path| !path.exists()), "{cgroups:?}");
    // A second call has nothing to do.
    guest.stop(None).await.unwrap();
}

async fn status(qmp: &Qmp) -> String {
    let status = qmp.query("query-status").await.unwrap();
    status["status"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_guest_is_launched_found_again_and_ended() {
    for (emulator, _) in emulators() {
        for machine in MACHINES {
            let host = Host::new();
            let (guest, qmp) = host
                .launch(&guest(machine), &emulator, Role::Fresh)
                .await
                .unwrap();
            assert_eq!(status(&qmp).await, "running");
            for channel in ["lab.arena", "org.qemu.guest_agent.0"] {
                let socket = guest.folder().channel(channel);
                assert!(socket.exists(), "{}", socket.display());
            }
            drop(qmp);
            let again = running(host.state());
            assert_eq!(again.record(), guest.record());
            assert_eq!(again.description(), guest.description());
            let qmp = again.connect().await.unwrap();
            assert_eq!(status(&qmp).await, "running");
            stop(again, Some(&qmp)).await;
            assert!(find_all(host.state()).unwrap().is_empty());
        }
    }
}

#[tokio::test]
async fn a_second_launch_of_the_same_guest_is_refused() {
    let host = Host::new();
    let (emulator, _) = &emulators()[0];
    let description = guest(MACHINES[0]);
    let (first, _qmp) = host
        .launch(&description, emulator, Role::Fresh)
        .await
        .unwrap();
    let error = host
        .launch(&description, emulator, Role::Destination)
        .await
        .unwrap_err();
    assert!(matches!(error, LaunchError::Exists { .. }), "{error}");
    assert!(first.process().unwrap().is_some());
    stop(first, Some(&_qmp)).await;
}

#[tokio::test]
async fn a_qemu_that_refuses_is_quoted_and_leaves_nothing() {
    for (emulator, _) in emulators() {
        let host = Host::new();
        let mut description = guest(MACHINES[0]);
        description.cpu = "no-such-model".to_owned();
        let error = host
            .launch(&description, &emulator, Role::Fresh)
            .await
            .unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, LaunchError::Ended { .. }), "{text}");
        assert!(
            text.contains("unable to find CPU model 'no-such-model'"),
            "{text}"
        );
        assert!(find_all(host.state()).unwrap().is_empty());
    }
}

#[tokio::test]
async fn names_and_emulators_that_are_not_here_are_refused() {
    let host = Host::new();
    let (emulator, _) = &emulators()[0];
    let mut description = guest(MACHINES[0]);
    let error = host
        .launch(&description, "9.9", Role::Fresh)
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("no emulator labelled `9.9`"),
        "{error}"
    );
    description.disks[0].image = "elsewhere".to_owned();
    let error = host
        .launch(&description, emulator, Role::Fresh)
        .await
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("no image called `elsewhere` (it has: vda)"),
        "{error}"
    );
    description.name = "../escape".to_owned();
    let error = host
        .launch(&description, emulator, Role::Fresh)
        .await
        .unwrap_err();
    assert!(matches!(error, LaunchError::Description(_)), "{error}");
    assert!(!host.state().join("guests").exists());
}

#[tokio::test]
async fn a_second_client_is_told_who_is_in_the_way() {
    for (emulator, _) in emulators() {
        let host = Host::new();
        let (guest, qmp) = host
            .launch(&guest(MACHINES[0]), &emulator, Role::Fresh)
            .await
            .unwrap();
        let socket = guest.folder().qmp();
        let error = Qmp::connect(&socket, Duration::from_millis(300))
            .await
            .unwrap_err();
        assert!(matches!(error, QmpError::Busy { .. }), "{error}");
        assert_eq!(status(&qmp).await, "running");
        let refused = qmp.query("no-such-command").await.unwrap_err();
        assert!(refused.is_unknown_command(), "{refused}");
        stop(guest, Some(&qmp)).await;
        qmp.closed().await;
    }
}

#[tokio::test]
async fn a_qemu_that_hangs_is_ended_all_the_same() {
    let host = Host::new();
    let (emulator, _) = &emulators()[0];
    let (guest, qmp) = host
        .launch(&guest(MACHINES[0]), emulator, Role::Fresh)
        .await
        .unwrap();
    drop(qmp);
    let pid = nix::unistd::Pid::from_raw(guest.pid().unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).unwrap();
    stop(guest, None).await;
}

#[tokio::test]
async fn a_qemu_that_died_is_told_from_one_that_runs() {
    let host = Host::new();
    let (emulator, _) = &emulators()[0];
    let (guest, qmp) = host
        .launch(&guest(MACHINES[0]), emulator, Role::Fresh)
        .await
        .unwrap();
    guest.process().unwrap().unwrap().kill().unwrap();
    guest.ended().await.unwrap();
    qmp.closed().await;
    let mut found = find_all(host.state()).unwrap();
    let Some(Found::Ended(ended)) = found.pop() else {
        panic!("it seems to run");
    };
    assert!(ended.process().unwrap().is_none());
    stop(ended, None).await;
}

#[tokio::test]
async fn cgroups_that_nobody_came_back_for_are_swept_away() {
    let host = Host::new();
    let (emulator, _) = &emulators()[0];
    let launch = || async {
        let description = guest(MACHINES[0]);
        host.launch(&description, emulator, Role::Fresh)
            .await
            .unwrap()
    };
    let (forgotten, _qmp) = launch().await;
    let cgroups = cgroups(&forgotten);
    if cgroups.is_empty() {
        eprintln!("no cgroup can be made here");
        forgotten.stop(Some(&_qmp)).await.unwrap();
        return;
    }
    forgotten.process().unwrap().unwrap().kill().unwrap();
    forgotten.ended().await.unwrap();
    while Path::new(&format!("/proc/{}", forgotten.pid().unwrap())).exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    fs::remove_dir_all(forgotten.folder().path()).unwrap();

    // Another guest of another host.
    let host = Host::new();
    let (guest, qmp) = host
        .launch(&guest(MACHINES[0]), emulator, Role::Fresh)
        .await
        .unwrap();
    assert!(!cgroups.iter().any(|path| path.exists()), "{cgroups:?}");
    stop(guest, Some(&qmp)).await;
}

#[tokio::test]
async fn a_damaged_folder_is_reported_and_left_alone() {
    let host = Host::new();
    let (emulator, _) = &emulators()[0];
    let (guest, qmp) = host
        .launch(&guest(MACHINES[0]), emulator, Role::Fresh)
        .await
        .unwrap();
    let description = guest.folder().path().join("description.toml");
    let sound = fs::read_to_string(&description).unwrap();
    fs::write(&description, sound.replace("web-7", "../x")).unwrap();
    let found = find_all(host.state()).unwrap();
    let [Found::Damaged { why, .. }] = found.as_slice() else {
        panic!("{found:?}");
    };
    assert!(why.contains("`name` is"), "{why}");
    stop(guest, Some(&qmp)).await;
}

#[tokio::test]
async fn a_qemu_without_a_process_in_its_record_is_found_by_its_command_line() {
    let host = Host::new();
    let (emulator, _) = &emulators()[0];
    let (guest, qmp) = host
        .launch(&guest(MACHINES[0]), emulator, Role::Fresh)
        .await
        .unwrap();
    // The state after an agent dies between starting a QEMU and recording its process.
    let record = guest.folder().path().join("record.toml");
    let text = fs::read_to_string(&record).unwrap();
    let start = text.find("[process]").unwrap();
    let length = text[start..].find("\n\n").unwrap_or(text.len() - start);
    fs::write(&record, text.replace(&text[start..start + length], "")).unwrap();
    assert!(guest.folder().record().unwrap().process.is_none());
    drop(qmp);
    let found = running(host.state());
    assert_eq!(found.record().process, guest.record().process);
    assert_eq!(found.record().scope, guest.record().scope);
    // It may be a guest whose launch is under way, and is about to write that itself.
    assert!(guest.folder().record().unwrap().process.is_none());
    stop(found, None).await;
}

/// Acts as the agent of `a_guest_outlives_the_agent`, when this program is started for it.
#[tokio::test]
async fn helper_agent() {
    let Some(state) = std::env::var_os(AGENT) else {
        return;
    };
    let mut host = Host::new();
    host.config.state = PathBuf::from(state);
    let (emulator, _) = &emulators()[0];
    let (guest, _qmp) = host
        .launch(&guest(MACHINES[0]), emulator, Role::Fresh)
        .await
        .unwrap();
    println!("\nlaunched {}", guest.pid().unwrap());
    // Runs until it is killed.
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn a_guest_outlives_the_agent() {
    let host = Host::new();
    let mut agent = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "helper_agent", "--nocapture"])
        .env(AGENT, host.state())
        // So that the agent has files of its parent, as an agent started by another program may.
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(agent.stdout.take().unwrap()).lines();
    let pid: i32 = loop {
        let line = lines.next_line().await.unwrap().expect("the agent ended");
        if let Some(pid) = line.strip_prefix("launched ") {
            break pid.parse().unwrap();
        }
    };
    agent.kill().await.unwrap();

    let guest = running(host.state());
    assert_eq!(guest.pid(), Some(pid));
    assert_inherits_nothing(pid, host.state());
    let qmp = guest.connect().await.unwrap();
    assert_eq!(status(&qmp).await, "running");
    stop(guest, Some(&qmp)).await;
}

/// A QEMU has a session of its own, and no inherited files.
fn assert_inherits_nothing(pid: i32, state: &Path) {
    let process = nix::unistd::Pid::from_raw(pid);
    assert_eq!(nix::unistd::getsid(Some(process)).unwrap(), process);
    for (number, expected) in [(0, "/dev/null"), (1, "qemu.log"), (2, "qemu.log")] {
        let file = fs::read_link(format!("/proc/{pid}/fd/{number}")).unwrap();
        assert!(
            file.ends_with(expected) || file == Path::new(expected),
            "{}",
            file.display()
        );
    }
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let file = match fs::read_link(entry.unwrap().path()) {
            // It runs, and may have closed the file since the folder was read.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            file => file.unwrap(),
        };
        let text = file.display().to_string();
        let own = text.starts_with("anon_inode:")
            || text.starts_with("socket:")
            || text.starts_with("/dev/")
            || text.starts_with("/memfd:")
            || text.contains("vda.raw")
            || file.starts_with(state);
        assert!(own, "{text}");
    }
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap();
    let environment = String::from_utf8_lossy(&environment);
    assert!(!environment.contains(AGENT), "{environment}");
}

#[tokio::test]
async fn qemu_runs_sandboxed_and_as_somebody_else() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("not root: QEMU can run as nobody else");
        return;
    }
    for (emulator, _) in emulators() {
        let mut host = Host::new();
        host.config.qemu.run_as = Some("nobody".to_owned());
        let nobody = nix::unistd::User::from_name("nobody").unwrap().unwrap();
        // As created by an agent with a restrictive umask.
        fs::create_dir(host.state()).unwrap();
        fs::set_permissions(host.state(), fs::Permissions::from_mode(0o700)).unwrap();
        let image = host.folder.path().join("vda.raw");
        nix::unistd::chown(&image, Some(nobody.uid), None).unwrap();
        let (guest, qmp) = host
            .launch(&guest(MACHINES[0]), &emulator, Role::Destination)
            .await
            .unwrap();
        let pid = guest.pid().unwrap();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap();
            line[name.len()..]
                .split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let uid = nobody.uid.to_string();
        assert_eq!(field("Uid:"), vec![uid; 4]);
        assert_eq!(field("Seccomp:"), ["2"]);
        assert_eq!(field("NoNewPrivs:"), ["1"]);
        assert_eq!(field("CapEff:"), ["0000000000000000"]);
        // It can create a socket of its own, for the incoming state.
        let socket = guest.folder().socket("incoming").unwrap();
        let target = serde_json::json!({"uri": format!("unix:{}", socket.display())});
        let listen = qmp.execute("migrate-incoming", target, Duration::from_secs(30));
        listen.await.unwrap();
        assert!(socket.exists());
        stop(guest, Some(&qmp)).await;
    }
}

#[tokio::test]
async fn a_card_on_a_bridge_gets_a_port_and_loses_it() {
    let root = nix::unistd::geteuid().is_root();
    if !root || !Path::new("/dev/net/tun").exists() {
        eprintln!("no TAP devices here");
        return;
    }
    // In namespaces of this thread, which QEMU and `ip` inherit. /sys shows the network devices of
    // the namespace that it was mounted in.
    let thread = std::thread::spawn(|| {
        use nix::sched::CloneFlags;
        nix::sched::unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).unwrap();
        for words in [
            &["--make-rprivate", "/"][..],
            &["-t", "sysfs", "sysfs", "/sys"],
        ] {
            assert!(
                Command::new("mount")
                    .args(words)
                    .status()
                    .unwrap()
                    .success()
            );
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(launch_on_bridge());
    });
    thread.join().unwrap();
}

fn ip(arguments: &str) -> String {
    let output = Command::new("ip")
        .args(arguments.split(' '))
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

async fn launch_on_bridge() {
    use longhaul_hypervisor::bridge_port;
    use longhaul_hypervisor::config::{BridgePort, Network};
    use longhaul_protocol::port::{Port, PortFlag};
    ip("link add br-test type bridge");
    let (emulator, _) = &emulators()[0];
    let mut host = Host::new();
    let bridge = |name: &str| Network::Bridge(BridgePort::of(name));
    host.config
        .networks
        .insert("lab".to_owned(), bridge("br-test"));
    let everyone = fs::metadata("/dev/net/tun").unwrap().permissions().mode() & 0o006 == 0o006;
    if everyone {
        host.config.qemu.run_as = Some("nobody".to_owned());
    }
    let mut description = guest(MACHINES[0]);
    description.disks.clear();
    let mut port = Port {
        mtu: Some(9000),
        flags: [(PortFlag::Learning, false), (PortFlag::Isolated, true)].into(),
        ..Port::default()
    };
    // Not every kernel filters VLANs.
    let mut filter = Command::new("ip");
    filter.args([
        "link",
        "set",
        "br-test",
        "type",
        "bridge",
        "vlan_filtering",
        "1",
    ]);
    if filter.output().unwrap().status.success() {
        port.vlans = Port::untagged(10);
    }
    description.nics[0].port = Some(port.clone());
    let (guest, qmp) = host
        .launch(&description, emulator, Role::Fresh)
        .await
        .unwrap();
    let ports = bridge_port::of_guest(&qmp, guest.pid(), &description).await;
    assert_eq!(ports.unwrap(), [(0, port)].into());
    let [tap] = guest.record().taps.as_slice() else {
        panic!("{:?}", guest.record());
    };
    let ports = ip("-o link show master br-test");
    assert!(ports.contains(tap.as_str()), "{ports}");
    let machine = longhaul_hypervisor::observe::observe(&qmp).await.unwrap();
    assert_eq!(machine.devices["nic0"].kind, "virtio-net-pci");
    let tap = tap.clone();
    stop(guest, Some(&qmp)).await;
    assert!(!ip("-o link").contains(&tap));

    host.config
        .networks
        .insert("lab".to_owned(), bridge("br-gone"));
    let error = host
        .launch(&description, emulator, Role::Fresh)
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("making its TAP device"),
        "{error}"
    );
    assert!(!ip("-o link").contains(&tap));
    assert!(GuestFolder::all(host.state()).unwrap().is_empty());
}
