//! Deaths of agents and daemons.

use crate::stage::{GUEST, LIMIT, Stage};
use longhaul_lab::installed;
use longhaul_lab::libvirt::Release;
use longhaul_lab::process::{run, wait_until};
use longhaul_libvirt::domain::DomainState;
use longhaul_libvirt::message::{Message, REMOTE};
use std::fs;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;

/// Points at which one of the agents dies.
const DEATHS: [(usize, &str); 8] = [
    (0, "source:after-record:began"),
    (0, "source:before-send:complete"),
    (0, "source:after-record:released"),
    (0, "source:after-record:done"),
    (1, "destination:before-send:accepted"),
    (1, "destination:after-record:ready"),
    (1, "destination:after-record:committed"),
    (1, "destination:before-send:committed"),
];
/// Points at which the daemon of one side dies, and comes back.
const RESTARTS: [(usize, &str); 7] = [
    (0, "source:after-receipt:launching"),
    (0, "source:before-send:complete"),
    (0, "source:after-record:released"),
    (0, "source:after-receipt:committed"),
    (1, "destination:before-send:accepted"),
    (1, "destination:after-record:ready"),
    (1, "destination:after-record:committed"),
];

/// Who dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    Agent,
    Daemon,
}

#[test]
fn a_domain_survives_the_death_of_either_agent() {
    if installed::is_its_day(1, 2) {
        survives(Release::Installed, Who::Agent, (&DEATHS, &[]));
    }
}

#[test]
fn a_domain_survives_the_restart_of_either_daemon() {
    if installed::is_its_day(0, 2) {
        survives(Release::Installed, Who::Daemon, (&RESTARTS, &[]));
    }
}

pub(crate) fn survives_on_the_newest() {
    if installed::is_its_day(0, 2) {
        let agents = [DEATHS[0], DEATHS[2], DEATHS[5], DEATHS[6]];
        survives(Release::Newest, Who::Agent, (&agents, &[]));
    }
    if installed::is_its_day(1, 2) {
        let daemons = [RESTARTS[1], RESTARTS[2], RESTARTS[5], RESTARTS[6]];
        survives(Release::Newest, Who::Daemon, (&daemons, &[]));
    }
}

pub(crate) fn survives_with_virtqemud() {
    survives(Release::Modular, Who::Agent, (&[DEATHS[3], DEATHS[7]], &[]));
    let daemons = [RESTARTS[2], RESTARTS[6]];
    survives(Release::Modular, Who::Daemon, (&daemons, &[]));
}

/// Deaths from the last moments before a domain runs whose memory follows until it does.
pub(crate) fn survives_where_memory_follows() {
    let words = ["--strategy", "postcopy"];
    let agents = [DEATHS[2], DEATHS[5], DEATHS[6], DEATHS[7]];
    survives(Release::Newest, Who::Agent, (&agents, &words));
    let daemons = [RESTARTS[2], RESTARTS[5], RESTARTS[6]];
    survives(Release::Newest, Who::Daemon, (&daemons, &words));
}

fn survives(release: Release, who: Who, (points, words): (&[(usize, &str)], &[&str])) {
    let Some(mut stage) = Stage::build("deaths", release) else {
        return;
    };
    let mut product = stage.start_agents(&[]);
    stage.start_guest();
    stage.daemons[0].run(&["autostart", GUEST]).unwrap();
    let held = stage.socket("held");
    for (side, point) in points.iter().copied() {
        eprintln!("{who:?}, {point}");
        let host = &stage.lab.hosts()[side];
        let armed = match who {
            Who::Agent => format!("{point}=kill"),
            Who::Daemon => format!("{point}=hold:{}", held.display()),
        };
        let agent = product.agent_mut(side).unwrap();
        agent.restart_to_fail(host, &armed).unwrap();
        let moving = product
            .migrate(0, GUEST, &stage.lab.hosts()[1], words)
            .unwrap();
        let reached = wait_until(LIMIT, || match who {
            Who::Agent => product.agent_mut(side).unwrap().has_ended(),
            Who::Daemon => held.exists(),
        });
        assert!(reached, "{point}: {}", product.ends_of_logs());
        match who {
            Who::Agent => product.agent_mut(side).unwrap().restart(host).unwrap(),
            Who::Daemon => {
                stage.daemons[side].restart(host).unwrap();
                fs::remove_file(&held).unwrap();
            }
        }
        // Where its source has died, nobody reports the end.
        let _ = moving.finish(LIMIT);
        // It runs at one host, and is not known at the other.
        let running = Some(DomainState::Running);
        let settled = wait_until(LIMIT, || {
            let states = stage.states();
            states == [running, None] || states == [None, running]
        });
        let logs = product.ends_of_logs();
        assert!(settled, "{point}: {:?}\n{logs}", stage.states());
        let at = usize::from(stage.states()[1].is_some());
        eprintln!("  it runs at host {at}");
        // It is defined there as it was, and started with that host.
        let defined = wait_until(LIMIT, || {
            let info = stage.daemons[at].run(&["dominfo", GUEST]).unwrap();
            ["Persistent:     yes", "Autostart:      enable"].map(|line| info.contains(line))
                == [true; 2]
        });
        assert!(defined, "{point}: {}", product.ends_of_logs());
        if at == 1 {
            stage.hear(1);
        }
        stage.arena.forget_beats();
        stage.arena.wait_for_beat(LIMIT).unwrap();
        stage.verify();
        if at == 1 {
            let back = product.migrate(1, GUEST, &stage.lab.hosts()[0], &[]);
            let back = back.unwrap().finish(LIMIT).unwrap();
            let logs = product.ends_of_logs();
            assert!(back.completed(), "{point}: {}\n{logs}", back.why());
            stage.hear(0);
            stage.verify();
        }
    }
}

/// While a domain moves, its host does not start it by itself. Where the move ended with the host,
/// the agent starts it.
#[test]
fn a_domain_whose_host_was_started_again_is_started_too() {
    let Some(mut stage) = Stage::build("boots", Release::Installed) else {
        return;
    };
    let mut product = stage.start_agents(&[]);
    stage.start_guest();
    stage.daemons[0].run(&["autostart", GUEST]).unwrap();
    let host = &stage.lab.hosts()[0];
    let agent = product.agent_mut(0).unwrap();
    let point = "source:before-send:complete=kill";
    agent.restart_to_fail(host, point).unwrap();
    let moving = product
        .migrate(0, GUEST, &stage.lab.hosts()[1], &[])
        .unwrap();
    let died = wait_until(LIMIT, || product.agent_mut(0).unwrap().has_ended());
    assert!(died, "{}", product.ends_of_logs());
    drop(moving);
    let info = stage.daemons[0].run(&["dominfo", GUEST]).unwrap();
    assert!(info.contains("Autostart:      disable"), "{info}");
    // A host that is started again has no QEMU, and another id of its boot.
    stage.daemons[0].run(&["destroy", GUEST]).unwrap();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let note = host.folder().join(format!("state/libvirt/{GUEST}.json"));
    let text = fs::read_to_string(&note).unwrap();
    assert!(text.contains(boot.trim()), "{text}");
    fs::write(&note, text.replace(boot.trim(), "another")).unwrap();
    product.agent_mut(0).unwrap().restart(host).unwrap();
    stage.wait_for([Some(DomainState::Running), None]);
    let enabled = wait_until(LIMIT, || {
        let info = stage.daemons[0].run(&["dominfo", GUEST]).unwrap();
        info.contains("Autostart:      enable")
    });
    assert!(enabled, "{}", product.ends_of_logs());
}

/// Where a daemon dies that was told to run the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Finish {
    /// It has not read the call.
    Unread,
    /// It has answered, and the answer is lost.
    Answered,
    /// As before, and the guest's QEMU has ended too.
    Ended,
}

/// Stands between an agent and its daemon, and kills the daemon at a Finish.
struct Relay {
    socket: PathBuf,
    /// When it kills which process.
    armed: Armed,
}

type Armed = Arc<Mutex<Option<(Finish, Vec<u32>)>>>;

impl Relay {
    /// The number of Finish among libvirt's procedures.
    const FINISH: i32 = 306;

    fn listen(daemon: &Path) -> Self {
        let socket = daemon.with_file_name("relay-sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let armed = Armed::default();
        let (daemon, all) = (daemon.to_owned(), armed.clone());
        let pid_file = daemon.with_file_name("qemu").join(format!("{GUEST}.pid"));
        thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                // While it is down, its clients are told so.
                if let Ok(daemon) = UnixStream::connect(&daemon) {
                    Self::pass_on(client, daemon, (&all, &pid_file));
                }
            }
        });
        Self { socket, armed }
    }

    fn pass_on(client: UnixStream, daemon: UnixStream, (armed, pid_file): (&Armed, &Path)) {
        let finishing = Arc::new(Mutex::new(None));
        for is_call in [true, false] {
            let (mut from, mut to) = match is_call {
                true => (client.try_clone().unwrap(), daemon.try_clone().unwrap()),
                false => (daemon.try_clone().unwrap(), client.try_clone().unwrap()),
            };
            let (armed, finishing) = (armed.clone(), finishing.clone());
            let pid_file = pid_file.to_owned();
            thread::spawn(move || {
                while let Ok(Some(message)) = Message::read(&mut from) {
                    let header = message.header;
                    if is_call && header.program == REMOTE && header.procedure == Self::FINISH {
                        *finishing.lock().unwrap() = Some(header.serial);
                    }
                    let mut armed = armed.lock().unwrap();
                    let of_finish = *finishing.lock().unwrap() == Some(header.serial);
                    let is_here = |at: Finish| of_finish && is_call == (at == Finish::Unread);
                    if let Some((at, mut pids)) = armed.take_if(|(at, _)| is_here(*at)) {
                        if at == Finish::Ended {
                            let pid = fs::read_to_string(&pid_file).unwrap();
                            pids.push(pid.trim().parse().unwrap());
                        }
                        let pids = pids.iter().map(u32::to_string);
                        run(Command::new("kill").arg("-9").args(pids)).unwrap();
                        break;
                    }
                    drop(armed);
                    if to.write_all(&message.frame()).is_err() {
                        break;
                    }
                }
                let _ = from.shutdown(Shutdown::Both);
                let _ = to.shutdown(Shutdown::Both);
            });
        }
    }
}

/// The daemon at the destination dies in the call that lets the guest run. What QEMU itself says
/// decides where the guest is.
#[test]
fn a_domain_survives_the_death_of_a_daemon_in_finish() {
    if !installed::is_its_day(0, 2) {
        return;
    }
    let Some(mut stage) = Stage::build("finish", Release::Installed) else {
        return;
    };
    let relay = Relay::listen(&stage.daemons[1].socket());
    let mut tables = [0, 1].map(|host| stage.tables(host, &[]));
    let of_libvirt = tables[1]["libvirt"].as_table_mut().unwrap();
    let socket = relay.socket.display().to_string();
    of_libvirt.insert("socket".to_owned(), socket.into());
    let product = stage.start_agents_with(&tables);
    stage.start_guest();
    let running = Some(DomainState::Running);
    for (finish, expected) in [
        (Finish::Unread, [running, None]),
        (Finish::Answered, [None, running]),
        // Where it has run it is started again.
        (Finish::Ended, [None, Some(DomainState::Off)]),
    ] {
        *relay.armed.lock().unwrap() = Some((finish, vec![stage.daemons[1].pid()]));
        let moving = product.migrate(0, GUEST, &stage.lab.hosts()[1], &[]);
        let died = wait_until(LIMIT, || relay.armed.lock().unwrap().is_none());
        assert!(died, "{finish:?}: {}", product.ends_of_logs());
        stage.daemons[1].restart(&stage.lab.hosts()[1]).unwrap();
        let finished = moving.unwrap().finish(LIMIT).unwrap();
        let settled = wait_until(LIMIT, || stage.states() == expected);
        let logs = product.ends_of_logs();
        assert!(settled, "{finish:?}: {:?}\n{logs}", stage.states());
        let has_moved = finish != Finish::Unread;
        assert_eq!(
            finished.completed(),
            has_moved,
            "{}\n{logs}",
            finished.why()
        );
        if finish == Finish::Ended {
            break;
        }
        if has_moved {
            stage.hear(1);
        }
        stage.arena.forget_beats();
        stage.arena.wait_for_beat(LIMIT).unwrap();
        stage.verify();
        if has_moved {
            let back = product.migrate(1, GUEST, &stage.lab.hosts()[0], &[]);
            let back = back.unwrap().finish(LIMIT).unwrap();
            let logs = product.ends_of_logs();
            assert!(back.completed(), "{}\n{logs}", back.why());
        }
    }
}
