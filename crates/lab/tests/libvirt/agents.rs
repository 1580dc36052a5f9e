//! Moves by the agents.

use crate::stage::{BRIDGES, GUEST, LIMIT, Stage};
use longhaul_api::Phase;
use longhaul_lab::guest::Tiny;
use longhaul_lab::guest::disks::local_disks;
use longhaul_lab::history::task::{History, Task, description};
use longhaul_lab::history::workload::Work;
use longhaul_lab::installed;
use longhaul_lab::libvirt::{Around, Libvirt, Release, domain_xml};
use longhaul_lab::process::wait_until;
use longhaul_lab::product::Product;
use longhaul_libvirt::domain::DomainState;
use longhaul_protocol::guest::Nic;
use std::fs;
use std::path::Path;

/// Returns all that a command says at a host.
pub(crate) fn said(product: &Product, host: usize, words: &[&str]) -> String {
    let mut command = product.agent(host).unwrap().command().unwrap();
    let said = command.args(words).output().unwrap();
    String::from_utf8([said.stdout, said.stderr].concat()).unwrap()
}

/// Returns a text without its line breaks.
pub(crate) fn in_one_line(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ")
}

#[test]
fn agents_move_a_domain_there_and_back() {
    let Some(mut stage) = Stage::build("agents", Release::Installed) else {
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
fn agents_move_a_domain_with_all_that_it_has() {
    if installed::is_its_day(0, 2) {
        everything_moves_there_and_back(Release::Installed);
    }
}

/// Disks, cards, the variables of its firmware and its TPM move with a domain.
pub(crate) fn everything_moves_there_and_back(release: Release) {
    let Some(mut stage) = Stage::build("disks", release) else {
        return;
    };
    let kinds = ["raw,writeback", "qcow2,writeback"].map(|kind| kind.parse().unwrap());
    let disks = local_disks(stage.lab.hosts()[0].folder(), 24 << 20, &kinds);
    disks.iter().for_each(|disk| disk.create().unwrap());
    let product = stage.start_agents(&disks);
    let mut guest = description(&Tiny::calm(GUEST), &disks);
    guest.disks.clear();
    // UEFI firmware needs more than the test guests have.
    guest.memory_mib = 256;
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
    let around = Around {
        disks: &disks,
        bridge: Some(BRIDGES[0]),
        has_uefi_and_tpm: true,
    };
    let xml = stage.xml(&guest, &around);
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
    let uuid = stage.daemons[0].run(&["domuuid", GUEST]).unwrap();
    let kept = |stage: &Stage, host: usize| {
        let tpm = format!("swtpm/{uuid}/tpm2/tpm2-00.permall");
        [format!("qemu/nvram/{GUEST}_VARS.fd"), tpm]
            .map(|file| fs::read(stage.daemons[host].folder_of_state().join(file)).unwrap())
    };
    let at_first = kept(&stage, 0);
    assert!(
        at_first
            .iter()
            .all(|file| file.iter().any(|byte| *byte != 0))
    );
    let swtpm = Path::new("/usr/bin/swtpm");
    for (hidden, expected) in [(true, "install swtpm"), (false, "To go:")] {
        stage.daemons[1].hide(swtpm, hidden).unwrap();
        let plan = said(&product, 0, &["plan", GUEST, "--to", "paris"]);
        assert!(plan.contains(expected), "{plan}");
    }
    // libvirt 9.0 leaves it to the kernel's setting whether memory can follow.
    let strategy = match release {
        Release::Installed | Release::Modular => "auto",
        Release::Newest => "postcopy",
    };
    for ([from, to], how, strategy) in [([0, 1], "auto", "auto"), ([1, 0], "hybrid", strategy)] {
        let before = history.heard().told.done;
        let host = &stage.lab.hosts()[to];
        let words = ["--verify", "--disks", how, "--strategy", strategy];
        let moving = product.migrate(from, GUEST, host, &words).unwrap();
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
        assert!(
            kept(&stage, to) == at_first,
            "firmware or TPM differ at host {to}"
        );
        // A TPM's secrets do not stay behind.
        let left = stage.daemons[from]
            .folder_of_state()
            .join("swtpm")
            .join(&uuid);
        let gone = wait_until(LIMIT, || !left.exists());
        assert!(gone, "{}", left.display());
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
    let Some(mut stage) = Stage::build("refusals", Release::Installed) else {
        return;
    };
    let mut product = stage.start_agents(&[]);
    stage.start_guest();
    // This version leaves it to the kernel's setting whether memory can follow.
    let setting = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap();
    if setting.trim() == "0" {
        let expected = "libvirt is older than 10.1, so the guest's QEMU cannot use userfaultfd";
        for [what, strategy] in [["plan", "postcopy"], ["migrate", "hybrid"]] {
            let words = [what, GUEST, "--to", "paris", "--strategy", strategy];
            let refused = said(&product, 0, &words);
            assert!(in_one_line(&refused).contains(expected), "{refused}");
        }
    }
    // A domain whose files have no names here.
    let mut other = Tiny::calm("other").description();
    other.channels.clear();
    let qemu = installed::qemu(stage.release.qemu()).unwrap();
    let xml = domain_xml(&other, &stage.files(1), &qemu, &Around::default()).unwrap();
    stage.daemons[0].start_domain("other", &xml).unwrap();
    for words in [
        &["guests"][..],
        &["plan", "other", "--to", "paris"],
        &["migrate", "other", "--to", "paris"],
    ] {
        let text = said(&product, 0, words);
        assert!(text.contains("[kernels.NAME]"), "{words:?}: {text}");
    }
    // What libvirt at the destination lacks.
    let plan = |product: &Product| said(product, 0, &["plan", GUEST, "--to", "paris"]);
    let qemu = installed::qemu(stage.release.qemu()).unwrap();
    stage.daemons[1].hide(&qemu, true).unwrap();
    let without = plan(&product);
    assert!(without.contains("libvirt cannot take web"), "{without}");
    assert!(
        without.contains("needs this emulator at this path"),
        "{without}"
    );
    stage.daemons[1].hide(&qemu, false).unwrap();
    stage.daemons[1].kill().unwrap();
    let without = plan(&product);
    assert!(without.contains("libvirt cannot take web"), "{without}");
    stage.daemons[1].restart(&stage.lab.hosts()[1]).unwrap();
    // Or what it turns out to lack when it is to launch the domain.
    let [before, after] = ["offers", "launches"].map(|name| stage.socket(name));
    let agent = product.agent_mut(0).unwrap();
    let armed = [
        ("before-send:offer", &before),
        ("after-receipt:launching", &after),
    ]
    .map(|(point, held)| format!("source:{point}=hold:{}", held.display()));
    let host = &stage.lab.hosts()[0];
    agent.restart_to_fail(host, &armed.join(",")).unwrap();
    let moving = product.migrate(0, GUEST, &stage.lab.hosts()[1], &[]);
    assert!(wait_until(LIMIT, || before.exists()));
    stage.daemons[1].hide(&qemu, true).unwrap();
    fs::remove_file(&before).unwrap();
    let refused = wait_until(LIMIT, || {
        after.exists() && product.ends_of_logs().contains("not executable")
    });
    assert!(refused, "{}", product.ends_of_logs());
    fs::remove_file(&after).unwrap();
    let why = moving.unwrap().finish(LIMIT).unwrap();
    assert!(why.why().contains("not executable"), "{}", why.why());
    let stop = said(&product, 0, &["guests", "stop", GUEST]);
    assert!(stop.contains("virsh shutdown"), "{stop}");
    let tracks = said(&product, 0, &["guests", "track-writes", GUEST]);
    assert!(tracks.contains("not tracked yet"), "{tracks}");
    let running = Some(DomainState::Running);
    assert_eq!(stage.states(), [running, None]);
}

/// A move that an operator gives up leaves the domain running. A paused domain arrives paused.
#[test]
fn a_move_of_a_domain_can_be_given_up() {
    let Some(mut stage) = Stage::build("given up by people", Release::Installed) else {
        return;
    };
    let product = stage.start_agents(&[]);
    stage.start_guest();
    stage.daemons[0].run(&["autostart", GUEST]).unwrap();
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
        let starts = wait_until(LIMIT, || {
            let info = stage.daemons[0].run(&["dominfo", GUEST]).unwrap();
            info.contains("Autostart:      enable")
        });
        assert!(starts, "{by}: {logs}");
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
