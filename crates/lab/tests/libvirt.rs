//! Tests the client of libvirt's protocol with libvirt's own daemons and client. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

use longhaul_api::Phase;
use longhaul_lab::arena::{Arena, Workload};
use longhaul_lab::guest::disks::{LocalDisk, local_disks};
use longhaul_lab::guest::{CHANNEL_NAME, KernelFiles, Tiny};
use longhaul_lab::history::task::{History, Task, description};
use longhaul_lab::history::workload::Work;
use longhaul_lab::installed;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::libvirt::{self, Libvirt, domain_xml, virsh_at};
use longhaul_lab::process::{run, wait_until};
use longhaul_lab::product::{Product, Settings};
use longhaul_libvirt::domain::{DomainState, PausedFor, Xml};
use longhaul_libvirt::message::{Kind, Message};
use longhaul_libvirt::migration::{Begun, Cookie, Flags, Outcome};
use longhaul_libvirt::{Connection, Domain};
use longhaul_protocol::guest::Nic;
use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(300);
const GUEST: &str = "web";
/// A version that libvirt 9.0 knows.
const VERSION: &str = "7.2";
/// The bridges of the two hosts.
const BRIDGES: [&str; 2] = ["lv-lyon", "lv-paris"];
const FLAGS: Flags = Flags::LIVE.with(Flags::UNSAFE);

/// Two hosts with a daemon each, and a guest at work on the first.
struct Stage {
    daemons: [Libvirt; 2],
    arena: Arena,
    lab: Lab,
}

impl Stage {
    fn build(purpose: &str) -> Option<Self> {
        let there = installed::qemu(VERSION).and_then(|_| libvirt::installed());
        if let Err(error) = there {
            assert!(!installed::all_required(), "{error}");
            eprintln!("SKIPPED libvirt: {error}");
            return None;
        }
        let lab = Lab::create(&Plan {
            purpose: format!("test: libvirt, {purpose}"),
            hosts: 2,
            link: "1gbit,1ms".parse().unwrap(),
            seed: 1,
        })
        .unwrap();
        let daemons = [0, 1].map(|host| Libvirt::start(&lab.hosts()[host]).unwrap());
        Some(Self {
            daemons,
            arena: Arena::new(),
            lab,
        })
    }

    /// The guest's files on a host.
    fn files(&self, host: usize) -> KernelFiles {
        KernelFiles::make_with_history(self.lab.hosts()[host].folder()).unwrap()
    }

    /// Starts an agent on each host.
    fn start_agents(&mut self, disks: &[LocalDisk]) -> Product {
        let settings = Settings {
            qemus: vec![VERSION.to_owned()],
            accelerator: "tcg".to_owned(),
        };
        let tables: Vec<toml::Table> = [0, 1].map(|host| self.tables(host, disks)).into();
        let files = self.files(0);
        let each = |host: usize| tables[host].clone();
        let mut product = Product::start_each_with(&mut self.lab, &files, &settings, each).unwrap();
        for (number, host) in self.lab.hosts().iter().enumerate() {
            let agent = product.agent_mut(number).unwrap();
            agent.see_interfaces();
            agent.restart(host).unwrap();
        }
        product
    }

    /// Each host has its own daemon, copy of the guest's files, bridge, and place for disks.
    fn tables(&self, host: usize, disks: &[LocalDisk]) -> toml::Table {
        let files = self.files(host);
        let mut text = format!(
            "[networks]\nlan = {{ bridge = {:?} }}\n[libvirt]\nsocket = {:?}\n\
             [kernels.tiny]\nkernel = {:?}\ninitrd = {:?}\n",
            BRIDGES[host],
            self.daemons[host].socket(),
            files.kernel,
            files.initramfs
        );
        for disk in disks {
            text += &format!(
                "[images.{}]\npath = {:?}\nformat = {:?}\nlocal = true\n",
                disk.image,
                self.at(host, disk),
                disk.kind.format.name()
            );
        }
        text.parse().unwrap()
    }

    /// The place of a disk on a host.
    fn at(&self, host: usize, disk: &LocalDisk) -> PathBuf {
        let name = disk.path.file_name().unwrap();
        self.lab.hosts()[host].folder().join(name)
    }

    /// Starts the guest on the first host.
    fn start_guest(&mut self) {
        let files = self.files(0);
        let guest = Tiny::calm(GUEST).description();
        let xml = domain_xml(
            &guest,
            &files,
            &installed::qemu(VERSION).unwrap(),
            &[],
            None,
        )
        .unwrap();
        self.daemons[0].start_domain(GUEST, &xml).unwrap();
        self.hear(0);
        self.arena.wait_for_beat(LIMIT).unwrap();
        let workload = Workload {
            content: "mix".to_owned(),
            arena_bytes: 32 << 20,
            working_set_bytes: 8 << 20,
            pages_per_s: 500,
            write_bytes: 256,
            writers: 1,
            verify_pages_per_s: 0,
            seed: 7,
        };
        self.arena.start(&workload, LIMIT).unwrap();
    }

    /// Listens to the guest on a host.
    fn hear(&mut self, host: usize) {
        let mut socket = None;
        wait_until(LIMIT, || {
            socket = self.daemons[host].channel(GUEST, CHANNEL_NAME);
            socket.is_some()
        });
        self.arena.attach(&socket.unwrap()).unwrap();
    }

    fn connect(&self, host: usize) -> Connection {
        Connection::open(&self.daemons[host].socket()).unwrap()
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.lab.hosts()[0].socket_folder().join(name)
    }

    fn states(&self) -> [Option<DomainState>; 2] {
        [0, 1].map(|host| {
            let connection = self.connect(host);
            let domain = connection.domain(GUEST).unwrap()?;
            match connection.state(&domain) {
                Ok(state) => Some(state),
                // It has gone meanwhile.
                Err(error) if error.is_no_domain() => None,
                Err(error) => panic!("{error}"),
            }
        })
    }

    fn wait_for(&self, expected: [Option<DomainState>; 2]) {
        let reached = wait_until(LIMIT, || self.states() == expected);
        assert!(reached, "{:?} is not {expected:?}", self.states());
    }

    /// The guest's memory is as it wrote it.
    fn verify(&mut self) {
        let verified = self.arena.verify(LIMIT).unwrap();
        assert_eq!(verified.errors, 0, "{verified:?}");
    }
}

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
    sockets: [PathBuf; 2],
}

impl Phases {
    fn begin(stage: &Stage, [from, to]: [usize; 2]) -> Self {
        let ends = [stage.connect(from), stage.connect(to)];
        let domain = ends[0].domain(GUEST).unwrap().unwrap();
        let begun = ends[0].begin(&domain, FLAGS).unwrap();
        assert!(begun.xml.contains(&domain.uuid_text()));
        let sockets = ["from", "to"].map(|end| stage.socket(&format!("lv-{end}-{from}")));
        for socket in &sockets {
            let _ = fs::remove_file(socket);
        }
        Self {
            ends,
            domain,
            begun,
            sockets,
        }
    }

    fn prepare(&self) -> Cookie {
        let Self { begun, sockets, .. } = self;
        let prepared = self.ends[1].prepare(&begun.cookie, &begun.xml, &uri(&sockets[1]), FLAGS);
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
    let Some(mut stage) = Stage::build("there and back") else {
        return;
    };
    stage.start_guest();
    let version = stage.connect(0).version().unwrap();
    let [major, minor, release] = version;
    assert_eq!(
        format!("{major}.{minor}.{release}"),
        libvirt::installed().unwrap()
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
fn agents_move_a_domain_there_and_back() {
    let Some(mut stage) = Stage::build("agents") else {
        return;
    };
    let product = stage.start_agents(&[]);
    stage.start_guest();
    stage.daemons[0].run(&["autostart", GUEST]).unwrap();
    let defined = |stage: &Stage, host: usize| {
        stage.daemons[host]
            .run(&["dumpxml", "--inactive", GUEST])
            .unwrap()
    };
    let at_first = defined(&stage, 0);
    for [from, to] in [[0, 1], [1, 0]] {
        let guest = product.guest(from, GUEST).unwrap().unwrap();
        assert!(guest.pid.is_some(), "{guest:?}");
        let host = &stage.lab.hosts()[to];
        let moving = product.migrate(from, GUEST, host, &["--verify"]).unwrap();
        let finished = moving.finish(LIMIT).unwrap();
        let logs = || {
            let daemons = stage.daemons.iter().map(Libvirt::end_of_log);
            let daemons: Vec<String> = daemons.collect();
            format!(
                "{}\n{}\n{daemons:#?}",
                finished.why(),
                product.ends_of_logs()
            )
        };
        assert!(finished.completed(), "{}", logs());
        stage.hear(to);
        stage.arena.wait_for_beat(LIMIT).unwrap();
        stage.verify();
        let mut expected = [None, None];
        expected[to] = Some(DomainState::Running);
        stage.wait_for(expected);
        let info = stage.daemons[to].run(&["dominfo", GUEST]).unwrap();
        assert!(info.contains("Persistent:     yes"), "{info}");
        assert!(info.contains("Autostart:      enable"), "{info}");
        let initramfs = stage.files(to).initramfs.display().to_string();
        let xml = defined(&stage, to);
        assert!(xml.contains(&initramfs), "{xml}");
    }
    assert_eq!(defined(&stage, 0), at_first);
}

#[test]
fn agents_move_a_domain_with_its_disks() {
    let Some(mut stage) = Stage::build("disks") else {
        return;
    };
    let kinds = ["raw,writeback", "qcow2,writeback"].map(|kind| kind.parse().unwrap());
    let disks = local_disks(stage.lab.hosts()[0].folder(), 24 << 20, &kinds);
    disks.iter().for_each(|disk| disk.create().unwrap());
    let product = stage.start_agents(&disks);
    let mut guest = description(&Tiny::calm(GUEST), &disks);
    guest.disks.clear();
    let qemu = installed::qemu(VERSION).unwrap();
    // Each host has a bridge of its own name for the same network.
    for (host, bridge) in stage.lab.hosts().iter().zip(BRIDGES) {
        let batch = format!("link add {bridge} type bridge\nlink set {bridge} up\n");
        host.namespace().configure(&batch).unwrap();
    }
    let card = |number: usize| Nic {
        network: "lan".to_owned(),
        mac: format!("52:54:00:00:29:0{number}"),
        port: None,
    };
    guest.nics = [1, 2].map(card).into();
    let (files, bridge) = (stage.files(0), Some(BRIDGES[0]));
    let xml = domain_xml(&guest, &files, &qemu, &disks, bridge).unwrap();
    let task = Task {
        disks: &disks,
        seed: 29,
        depth: 4,
        work: Work {
            operations_per_s: 60,
            ..Work::default()
        },
    };
    let mut history = History::new(&task);
    stage.daemons[0].start_domain(GUEST, &xml).unwrap();
    let listen = |stage: &Stage, history: &History, host: usize| {
        history
            .listen(|channel| {
                let mut socket = None;
                wait_until(LIMIT, || {
                    socket = stage.daemons[host].channel(GUEST, channel);
                    socket.is_some()
                });
                socket.unwrap()
            })
            .unwrap();
    };
    listen(&stage, &history, 0);
    history.begin(&task).unwrap();
    history.wait_for(60, LIMIT).unwrap();
    for [from, to] in [[0, 1], [1, 0]] {
        let before = history.heard().told.done;
        let host = &stage.lab.hosts()[to];
        let moving = product.migrate(from, GUEST, host, &["--verify"]).unwrap();
        let finished = moving.finish(LIMIT).unwrap();
        assert!(
            finished.completed(),
            "{}\n{}\n{}",
            finished.why(),
            product.ends_of_logs(),
            stage.daemons[to].end_of_log()
        );
        listen(&stage, &history, to);
        history.wait_for(before + 60, LIMIT).unwrap();
        for disk in &disks {
            assert!(stage.at(to, disk).exists());
            let place = stage.at(to, disk).display().to_string();
            for inactive in [&["dumpxml", GUEST][..], &["dumpxml", "--inactive", GUEST]] {
                let xml = stage.daemons[to].run(inactive).unwrap();
                assert!(xml.contains(&place), "{xml}");
                let cards = format!("<source bridge='{}'/>", BRIDGES[to]);
                assert_eq!(xml.matches(&cards).count(), 2, "{xml}");
            }
        }
    }
    history.stop().unwrap();
    stage.daemons[0].run(&["destroy", GUEST]).unwrap();
    let record = history.finish().unwrap();
    let judgement = record.judge(stage.lab.hosts()[0].folder()).unwrap();
    assert_eq!(judgement.wrong_sectors, 0, "{:?}", judgement.findings);
    assert_eq!(record.errors, 0);
}

#[test]
fn what_keeps_a_domain_from_moving_is_said_before() {
    let Some(mut stage) = Stage::build("refusals") else {
        return;
    };
    let product = stage.start_agents(&[]);
    stage.start_guest();
    let said = |words: &[&str]| {
        let mut command = product.agent(0).unwrap().command().unwrap();
        let said = command.args(words).output().unwrap();
        String::from_utf8([said.stdout, said.stderr].concat()).unwrap()
    };
    let plan = said(&["plan", GUEST, "--to", "paris", "--strategy", "postcopy"]);
    assert!(plan.contains("cannot follow yet"), "{plan}");
    let migrate = said(&["migrate", GUEST, "--to", "paris", "--strategy", "hybrid"]);
    assert!(migrate.contains("cannot follow yet"), "{migrate}");
    // A domain whose files have no names here.
    let mut other = Tiny::calm("other").description();
    other.channels.clear();
    let qemu = installed::qemu(VERSION).unwrap();
    let xml = domain_xml(&other, &stage.files(1), &qemu, &[], None).unwrap();
    stage.daemons[0].start_domain("other", &xml).unwrap();
    for words in [
        &["guests"][..],
        &["plan", "other", "--to", "paris"],
        &["migrate", "other", "--to", "paris"],
    ] {
        let text = said(words);
        assert!(text.contains("[kernels.NAME]"), "{words:?}: {text}");
    }
    let stop = said(&["guests", "stop", GUEST]);
    assert!(stop.contains("virsh shutdown"), "{stop}");
    let tracks = said(&["guests", "track-writes", GUEST]);
    assert!(tracks.contains("not tracked yet"), "{tracks}");
    let running = Some(DomainState::Running);
    assert_eq!(stage.states(), [running, None]);
}

/// A move that an operator gives up leaves the domain running. A paused domain arrives paused.
#[test]
fn a_move_of_a_domain_can_be_given_up() {
    let Some(mut stage) = Stage::build("given up by people") else {
        return;
    };
    let product = stage.start_agents(&[]);
    stage.start_guest();
    let running = Some(DomainState::Running);
    for by in ["longhaul", "virsh"] {
        let to = &stage.lab.hosts()[1];
        let slowly = &["--bandwidth", "4mbit"];
        let mut moving = product.migrate(0, GUEST, to, slowly).unwrap();
        let began = moving.wait_for_phase(Phase::Precopy, LIMIT);
        assert!(began, "{}", product.ends_of_logs());
        match by {
            "longhaul" => drop(product.agent(0).unwrap().run(&["cancel", GUEST]).unwrap()),
            _ => drop(stage.daemons[0].run(&["domjobabort", GUEST]).unwrap()),
        }
        let finished = moving.finish(LIMIT).unwrap();
        assert!(!finished.completed(), "{by}");
        let logs = product.ends_of_logs();
        stage.wait_for([running, None]);
        stage.arena.forget_beats();
        let beat = stage.arena.wait_for_beat(LIMIT);
        assert!(beat.is_ok(), "{by}: {logs}");
        stage.verify();
    }
    // A paused domain arrives paused.
    stage.daemons[0].run(&["suspend", GUEST]).unwrap();
    let to = &stage.lab.hosts()[1];
    let finished = product.migrate(0, GUEST, to, &[]).unwrap();
    let finished = finished.finish(LIMIT).unwrap();
    assert!(
        finished.completed(),
        "{}\n{}",
        finished.why(),
        product.ends_of_logs()
    );
    let state = stage.daemons[1].run(&["domstate", GUEST]).unwrap();
    assert_eq!(state, "paused");
    stage.daemons[1].run(&["resume", GUEST]).unwrap();
    stage.hear(1);
    stage.arena.wait_for_beat(LIMIT).unwrap();
    stage.verify();
}

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

#[test]
fn a_domain_survives_the_death_of_either_agent() {
    let Some(mut stage) = Stage::build("deaths") else {
        return;
    };
    let mut product = stage.start_agents(&[]);
    stage.start_guest();
    for (side, point) in DEATHS {
        eprintln!("{point}");
        let host = &stage.lab.hosts()[side];
        let armed = format!("{point}=kill");
        product
            .agent_mut(side)
            .unwrap()
            .restart_to_fail(host, &armed)
            .unwrap();
        let to = &stage.lab.hosts()[1];
        let moving = product.migrate(0, GUEST, to, &[]).unwrap();
        let died = wait_until(LIMIT, || product.agent_mut(side).unwrap().has_ended());
        assert!(died, "{point}: {}", product.ends_of_logs());
        let host = &stage.lab.hosts()[side];
        product.agent_mut(side).unwrap().restart(host).unwrap();
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
        if at == 1 {
            stage.hear(1);
        }
        stage.arena.forget_beats();
        stage.arena.wait_for_beat(LIMIT).unwrap();
        stage.verify();
        if at == 1 {
            let back = product
                .migrate(1, GUEST, &stage.lab.hosts()[0], &[])
                .unwrap();
            let back = back.finish(LIMIT).unwrap();
            let logs = product.ends_of_logs();
            assert!(back.completed(), "{point}: {}\n{logs}", back.why());
            stage.hear(0);
            stage.verify();
        }
    }
}

#[test]
fn a_migration_that_is_given_up_leaves_the_guest() {
    let Some(mut stage) = Stage::build("given up") else {
        return;
    };
    stage.start_guest();
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
    let Some(mut stage) = Stage::build("monitor") else {
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
    let Some(mut stage) = Stage::build("calls") else {
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
    let pairs: [(&[&str], Call); 9] = [
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
