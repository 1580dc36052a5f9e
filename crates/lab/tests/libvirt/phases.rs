//! The phases of a migration, one by one, without agents.

use crate::stage::{FLAGS, GUEST, LIMIT, Stage};
use longhaul_lab::libvirt::{Release, virsh_at};
use longhaul_lab::process::run;
use longhaul_libvirt::domain::{DomainState, PausedFor, Xml};
use longhaul_libvirt::message::{Kind, Message};
use longhaul_libvirt::migration::{Begun, Cookie, Outcome};
use longhaul_libvirt::{Connection, Domain, LaunchedWith};
use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

fn uri(path: &Path) -> String {
    format!("unix://{}", path.display())
}

/// Passes bytes on, both ways, from who connects to the first socket to who listens on the second.
struct Relay(JoinHandle<[u64; 2]>);

impl Relay {
    fn listen(from: &Path, to: &Path) -> Self {
        let listener = UnixListener::bind(from).unwrap();
        let to = to.to_owned();
        Self(thread::spawn(move || {
            let (source, _) = listener.accept().unwrap();
            let destination = UnixStream::connect(to).unwrap();
            let ways = [(&source, &destination), (&destination, &source)];
            let ways = ways.map(|(from, to)| {
                let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                thread::spawn(move || copy(from, to))
            });
            ways.map(|way| way.join().unwrap())
        }))
    }
}

fn copy(mut from: UnixStream, mut to: UnixStream) -> u64 {
    let mut bytes = 0;
    let mut buffer = vec![0; 64 << 10];
    loop {
        match from.read(&mut buffer) {
            Ok(length) if length > 0 => {
                if to.write_all(&buffer[..length]).is_err() {
                    break;
                }
                bytes += length as u64;
            }
            _ => break,
        }
    }
    // The other side may have closed it.
    let _ = to.shutdown(Shutdown::Write);
    bytes
}

/// A migration between two daemons, as far as it has come.
struct Phases {
    ends: [Connection; 2],
    domain: Domain,
    begun: Begun,
    /// The source connects to the first. The destination's QEMU makes the second.
    sockets: [PathBuf; 2],
    /// The path of the second for QEMU.
    seen: PathBuf,
}

impl Phases {
    fn begin(stage: &Stage, [from, to]: [usize; 2]) -> Self {
        let ends = [stage.connect(from), stage.connect(to)];
        let domain = ends[0].domain(GUEST).unwrap().unwrap();
        let begun = ends[0].begin(&domain, FLAGS).unwrap();
        assert!(begun.xml.contains(&domain.uuid_text()));
        // Where QEMU's account can make one.
        let made = format!("qemu/lv-to-{from}");
        let seen = Path::new("/var/lib/libvirt").join(&made);
        let made = stage.daemons[to].folder_of_state().join(made);
        let sockets = [stage.socket(&format!("lv-from-{from}")), made];
        for socket in &sockets {
            let _ = fs::remove_file(socket);
        }
        Self {
            ends,
            domain,
            begun,
            sockets,
            seen,
        }
    }

    fn prepare(&self) -> Cookie {
        let Self { begun, seen, .. } = self;
        let prepared = self.ends[1].prepare(&begun.cookie, &begun.xml, &uri(seen), FLAGS);
        prepared.unwrap()
    }

    fn perform(&self, prepared: &Cookie) -> Cookie {
        let [from, to] = &self.sockets;
        let relay = Relay::listen(from, to);
        let performed = self.ends[0].perform(&self.domain, prepared, &uri(from), FLAGS);
        let performed = performed.unwrap();
        let bytes = relay.0.join().unwrap();
        assert!(bytes[0] > 1 << 20, "{bytes:?}");
        performed
    }

    fn finish(&self, performed: &Cookie) -> Cookie {
        let finished = self.ends[1].finish(GUEST, performed, FLAGS);
        let (domain, cookie) = finished.unwrap();
        assert_eq!(
            (domain.name.as_str(), domain.uuid),
            (GUEST, self.domain.uuid)
        );
        cookie
    }

    fn confirm(&self, finished: &Cookie, outcome: Outcome) {
        let [source, _] = &self.ends;
        source
            .confirm(&self.domain, finished, outcome, FLAGS)
            .unwrap();
    }

    fn all(&self) {
        let performed = self.perform(&self.prepare());
        let finished = self.finish(&performed);
        self.confirm(&finished, Outcome::Moved);
    }
}

#[test]
fn phases_move_a_domain_there_and_back() {
    move_a_domain_there_and_back(Release::Installed);
}

pub(crate) fn move_a_domain_there_and_back(release: Release) {
    let Some(mut stage) = Stage::build("there and back", release) else {
        return;
    };
    stage.start_guest();
    stage.calm_guest();
    let version = stage.connect(0).version().unwrap();
    let [major, minor, release] = version;
    assert_eq!(
        format!("{major}.{minor}.{release}"),
        stage.release.version().unwrap()
    );
    let source = stage.connect(0);
    let domain = source.domain(GUEST).unwrap().unwrap();
    assert_eq!(source.domains().unwrap(), std::slice::from_ref(&domain));
    assert!(source.is_persistent(&domain).unwrap());
    source.set_autostart(&domain, true).unwrap();
    assert!(source.autostarts(&domain).unwrap());
    assert_eq!(source.snapshots(&domain).unwrap(), 0);
    assert!(!source.has_saved_state(&domain).unwrap());
    for which in [Xml::Live, Xml::Defined] {
        let xml = source.xml(&domain, which).unwrap();
        assert_eq!(xml.contains("<alias name="), which == Xml::Live);
    }
    let absent = source.domain("absent").unwrap();
    assert_eq!(absent, None);
    let uuid = stage.daemons[0].run(&["domuuid", GUEST]).unwrap();
    assert_eq!(uuid, domain.uuid_text());

    let running = Some(DomainState::Running);
    for [from, to] in [[0, 1], [1, 0]] {
        Phases::begin(&stage, [from, to]).all();
        stage.hear(to);
        stage.arena.wait_for_beat(LIMIT).unwrap();
        stage.verify();
        let mut expected = [None, None];
        expected[to] = running;
        assert_eq!(stage.states(), expected);
        assert_eq!(stage.daemons[to].run(&["domuuid", GUEST]).unwrap(), uuid);
        // The phases alone do not define it. The agents do that.
        let there = stage.connect(to);
        let domain = there.domain(GUEST).unwrap().unwrap();
        assert!(!there.is_persistent(&domain).unwrap());
    }
}

#[test]
fn a_migration_that_is_given_up_leaves_the_guest() {
    let Some(mut stage) = Stage::build("given up", Release::Installed) else {
        return;
    };
    stage.start_guest();
    stage.calm_guest();
    let running = [Some(DomainState::Running), None];
    // It is given up by the caller, with the phases that are left,
    let phases = Phases::begin(&stage, [0, 1]);
    phases.perform(&phases.prepare());
    let migrating = Some(DomainState::Paused(PausedFor::Migration));
    assert_eq!(stage.states()[0], migrating);
    phases.ends[1].finish_cancelled(GUEST, FLAGS).unwrap();
    phases.confirm(&Cookie::default(), Outcome::Cancelled);
    stage.wait_for(running);
    // or the end of its connections: after Begin, after Prepare,
    drop(Phases::begin(&stage, [0, 1]));
    stage.wait_for(running);
    let phases = Phases::begin(&stage, [0, 1]);
    phases.prepare();
    drop(phases);
    stage.wait_for(running);
    // in Perform,
    let phases = Phases::begin(&stage, [0, 1]);
    let prepared = phases.prepare();
    let listener = UnixListener::bind(&phases.sockets[0]).unwrap();
    let [source, _] = &phases.ends;
    thread::scope(|scope| {
        let performing = scope.spawn(|| {
            let from = uri(&phases.sockets[0]);
            source.perform(&phases.domain, &prepared, &from, FLAGS)
        });
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 4096]).unwrap();
        drop(stream);
        let refused = performing.join().unwrap().unwrap_err();
        assert!(refused.to_string().contains("migration out"), "{refused}");
    });
    drop(phases);
    stage.wait_for(running);
    // and after Perform: then the guest is stopped, and waits for who decides.
    let phases = Phases::begin(&stage, [0, 1]);
    phases.perform(&phases.prepare());
    drop(phases);
    stage.wait_for([migrating, None]);
    let source = stage.connect(0);
    let domain = source.domain(GUEST).unwrap().unwrap();
    source.resume(&domain).unwrap();
    stage.arena.forget_beats();
    stage.arena.wait_for_beat(LIMIT).unwrap();
    stage.verify();
    Phases::begin(&stage, [0, 1]).all();
    stage.hear(1);
    stage.verify();
}

#[test]
fn qemu_is_reached_through_libvirt_while_a_migration_has_begun() {
    let Some(mut stage) = Stage::build("monitor", Release::Installed) else {
        return;
    };
    stage.start_guest();
    let query = r#"{"execute":"query-migrate-capabilities"}"#;
    let phases = Phases::begin(&stage, [0, 1]);
    let other = stage.connect(0);
    for connection in [&phases.ends[0], &other] {
        let said = connection.monitor_command(&phases.domain, query).unwrap();
        assert!(said.contains("pause-before-switchover"), "{said}");
    }
    let unknown = r#"{"execute":"no-such-command"}"#;
    let refused = other.monitor_command(&phases.domain, unknown).unwrap();
    assert!(refused.contains("CommandNotFound"), "{refused}");
    drop(phases);
    stage.wait_for([Some(DomainState::Running), None]);
}

/// What libvirt's own client calls, as it goes by.
fn overheard(socket: &Path, to: &Path) -> mpsc::Receiver<Message> {
    let listener = UnixListener::bind(socket).unwrap();
    let to = to.to_owned();
    let (sender, calls) = mpsc::channel();
    thread::spawn(move || {
        while let Ok((client, _)) = listener.accept() {
            let daemon = UnixStream::connect(&to).unwrap();
            let (answers, back) = (daemon.try_clone().unwrap(), client.try_clone().unwrap());
            thread::spawn(move || copy(answers, back));
            let (mut client, mut daemon, sender) = (client, daemon, sender.clone());
            thread::spawn(move || {
                while let Ok(Some(message)) = Message::read(&mut client) {
                    // Before its answer can arrive.
                    let frame = message.frame();
                    let _ = sender.send(message);
                    if daemon.write_all(&frame).is_err() {
                        break;
                    }
                }
                let _ = daemon.shutdown(Shutdown::Write);
            });
        }
    });
    calls
}

/// Every call of this crate is one that libvirt's own client makes, with the same bytes.
#[test]
fn calls_are_those_of_libvirts_own_client() {
    let Some(mut stage) = Stage::build("calls", Release::Installed) else {
        return;
    };
    stage.start_guest();
    let daemon = stage.daemons[0].socket();
    let [theirs, ours] = ["theirs", "ours"].map(|name| stage.socket(&format!("lv-{name}")));
    let calls = [&theirs, &ours].map(|socket| overheard(socket, &daemon));
    let connection = Connection::open(&ours).unwrap();
    let domain = connection.domain(GUEST).unwrap().unwrap();
    let command = r#"{"execute":"query-status"}"#;
    type Call = fn(&Connection, &Domain);
    let pairs: [(&[&str], Call); 11] = [
        (&["list", "--all"], |it, _| drop(it.domains().unwrap())),
        (&["dumpxml", GUEST], |it, domain| {
            drop(it.xml(domain, Xml::Live).unwrap());
        }),
        (&["dumpxml", "--inactive", GUEST], |it, domain| {
            drop(it.xml(domain, Xml::Defined).unwrap());
        }),
        (&["domstate", GUEST], |it, domain| {
            it.state(domain).unwrap();
        }),
        (&["autostart", GUEST], |it, domain| {
            it.set_autostart(domain, true).unwrap();
        }),
        (&["dominfo", GUEST], |it, domain| {
            it.autostarts(domain).unwrap();
            it.is_persistent(domain).unwrap();
            it.has_saved_state(domain).unwrap();
        }),
        (
            &[
                "domcapabilities",
                "--emulatorbin=/usr/bin/qemu-system-x86_64",
                "--arch=x86_64",
                "--machine=pc-q35-7.2",
                "--virttype=qemu",
            ],
            |it, _| {
                let with = LaunchedWith {
                    emulator: "/usr/bin/qemu-system-x86_64",
                    arch: "x86_64",
                    machine: "pc-q35-7.2",
                    kind: "qemu",
                };
                it.domain_capabilities(&with).unwrap();
            },
        ),
        (&["capabilities"], |it, _| {
            it.account_of_qemu().unwrap().unwrap();
        }),
        (&["version", "--daemon"], |it, _| {
            it.version().unwrap();
        }),
        (&["resume", GUEST], |it, domain| {
            // It runs, so libvirt refuses either way.
            let _ = it.resume(domain);
        }),
        (&["qemu-monitor-command", GUEST, command], |it, domain| {
            let command = r#"{"execute":"query-status"}"#;
            drop(it.monitor_command(domain, command).unwrap());
        }),
    ];
    let seen = |calls: &mpsc::Receiver<Message>| -> Vec<Message> {
        let mut all: Vec<Message> = calls.try_iter().collect();
        all.retain(|message| message.header.kind == Kind::Call);
        all
    };
    for (words, call) in pairs {
        seen(&calls[1]);
        // It fails where libvirt refuses.
        let _ = run(&mut virsh_at(&theirs, words));
        let theirs = seen(&calls[0]);
        call(&connection, &domain);
        let ours = seen(&calls[1]);
        assert!(!ours.is_empty());
        for our in ours {
            let same = theirs.iter().any(|their| {
                let [one, other] = [&our, their].map(|it| (it.header.program, it.header.procedure));
                one == other && our.payload == their.payload
            });
            assert!(same, "{words:?}: {our:?} is none of {theirs:?}");
        }
    }
}
