//! Domains whose memory follows when they run at the destination.

use crate::agents::{in_one_line, said};
use crate::deaths;
use crate::monitor::Monitor;
use crate::stage::{GUEST, LIMIT, LINK, Stage};
use longhaul_api::Phase;
use longhaul_lab::installed;
use longhaul_lab::libvirt::Release;
use longhaul_lab::process::{kill_all, wait_until};
use longhaul_lab::product::Product;
use longhaul_libvirt::domain::{DomainState, PausedFor};
use std::fs;

/// The link until the guest is stopped.
const SLOW: &str = "100mbit,4ms";
/// The link while memory follows: so slow that most of it is missing at each trouble.
const NARROW: &str = "1mbit,4ms";
/// The domain's states while its memory follows.
const FOLLOWS: [Option<DomainState>; 2] = [
    Some(DomainState::Paused(PausedFor::Migration)),
    Some(DomainState::Postcopy),
];

/// What happens while memory follows.
#[derive(Debug, Clone, Copy)]
enum Trouble {
    /// The agent of a host is killed and started again.
    Agent(usize),
    /// libvirt's daemon of a host is killed and started again.
    Daemon(usize),
    /// The page server is killed.
    PageServer,
}

impl Trouble {
    fn happens(self, stage: &mut Stage, product: &mut Product) {
        match self {
            Self::Agent(at) => {
                let host = &stage.lab.hosts()[at];
                let agent = product.agent_mut(at).unwrap();
                agent.kill().unwrap();
                agent.restart(host).unwrap();
            }
            Self::Daemon(at) => stage.daemons[at].restart(&stage.lab.hosts()[at]).unwrap(),
            Self::PageServer => {
                // An agent that was started again leaves the monitor alone. A guest that is stopped
                // waits for no page, so QEMU's main loop does not either.
                Self::Agent(1).happens(stage, product);
                let monitor = stage.daemons[1].socket();
                let monitor = monitor.with_file_name("longhaul/qemu");
                let monitor = monitor.join(format!("qmp.tunnelmigrate.dest.{GUEST}"));
                Monitor::connect(&monitor).ask("stop");
                let servers = page_servers(stage);
                assert_eq!(servers.len(), 1, "{servers:?}");
                kill_all(&servers).unwrap();
                let replaced = wait_until(LIMIT, || {
                    let new = page_servers(stage);
                    new.len() == 1 && new != servers
                });
                assert!(replaced, "{}", product.ends_of_logs());
                Monitor::connect(&monitor).ask("cont");
            }
        }
    }
}

/// Returns the page servers on the second host.
fn page_servers(stage: &Stage) -> Vec<i32> {
    let is_one = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0)
            .any(|word| word == b"page-server")
    };
    let processes = stage.lab.hosts()[1].namespace().processes().unwrap();
    processes.into_iter().filter(is_one).collect()
}

/// Checks that the domain runs at one host alone, undamaged and as an administrator expects it.
fn is_whole(stage: &mut Stage, product: &Product, at: usize) {
    let mut expected = [None, None];
    expected[at] = Some(DomainState::Running);
    let settled = wait_until(LIMIT, || stage.states() == expected);
    let logs = product.ends_of_logs();
    assert!(settled, "{:?}\n{logs}", stage.states());
    let defined = wait_until(LIMIT, || {
        let info = stage.daemons[at].run(&["dominfo", GUEST]).unwrap();
        ["Persistent:     yes", "Autostart:      enable"].map(|line| info.contains(line))
            == [true; 2]
    });
    assert!(defined, "it is not defined\n{logs}");
    stage.hear(at);
    stage.arena.forget_beats();
    stage.arena.wait_for_beat(LIMIT).unwrap();
    stage.verify();
}

#[test]
fn memory_follows_a_domain_there_and_back() {
    if !installed::is_its_day(0, 2) {
        return;
    }
    let Some(mut stage) = Stage::build("following", Release::Newest) else {
        return;
    };
    let product = stage.start_agents(&[]);
    stage.start_guest();
    stage.daemons[0].run(&["autostart", GUEST]).unwrap();
    for (from, strategy) in [(0, "postcopy"), (1, "hybrid")] {
        let host = &stage.lab.hosts()[1 - from];
        let moving = product.migrate(from, GUEST, host, &["--strategy", strategy]);
        let finished = moving.unwrap().finish(LIMIT).unwrap();
        let logs = product.ends_of_logs();
        assert!(finished.completed(), "{}\n{logs}", finished.why());
        assert_eq!(finished.report.unwrap().strategy.name(), strategy);
        is_whole(&mut stage, &product, 1 - from);
    }
    // A paused domain arrives paused.
    stage.daemons[0].run(&["suspend", GUEST]).unwrap();
    let words = ["--strategy", "postcopy"];
    let moving = product.migrate(0, GUEST, &stage.lab.hosts()[1], &words);
    let finished = moving.unwrap().finish(LIMIT).unwrap();
    let logs = product.ends_of_logs();
    assert!(finished.completed(), "{}\n{logs}", finished.why());
    let state = stage.daemons[1].run(&["domstate", GUEST]).unwrap();
    assert_eq!(state, "paused");
    stage.daemons[1].run(&["resume", GUEST]).unwrap();
    is_whole(&mut stage, &product, 1);
    // The source's QEMUs may use only these devices.
    let setting = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap();
    if setting.trim() == "0" {
        let list = "cgroup_device_acl = [ \"/dev/null\", \"/dev/urandom\", \"/dev/ptmx\" ]\n";
        stage.daemons[0].configure_qemu(list).unwrap();
        stage.daemons[0].restart(&stage.lab.hosts()[0]).unwrap();
        let words = ["plan", GUEST, "--to", "lyon", "--strategy", "postcopy"];
        let plan = said(&product, 1, &words);
        let expected = "cgroup_device_acl in libvirt's qemu.conf does not list /dev/userfaultfd";
        assert!(in_one_line(&plan).contains(expected), "{plan}");
        let moving = product.migrate(1, GUEST, &stage.lab.hosts()[0], &[]);
        let finished = moving.unwrap().finish(LIMIT).unwrap();
        assert!(finished.completed(), "{}", finished.why());
        assert_eq!(finished.report.unwrap().strategy.name(), "precopy");
        is_whole(&mut stage, &product, 0);
    }
}

#[test]
fn memory_follows_a_domain_in_spite_of_deaths() {
    if !installed::is_its_day(0, 2) {
        return;
    }
    let troubles = [
        Trouble::Agent(0),
        Trouble::Agent(1),
        Trouble::Daemon(0),
        Trouble::Daemon(1),
        Trouble::PageServer,
    ];
    let Some(mut stage) = Stage::build("following in trouble", Release::Newest) else {
        return;
    };
    let mut product = stage.start_agents(&[]);
    stage.start_guest();
    stage.daemons[0].run(&["autostart", GUEST]).unwrap();
    for trouble in troubles {
        eprintln!("{trouble:?}");
        let change = |stage: &Stage, link: &str| {
            let link = link.parse().unwrap();
            stage.lab.link(0, 1).unwrap().change(link).unwrap();
        };
        change(&stage, SLOW);
        let words = ["--strategy", "postcopy"];
        let moving = product.migrate(0, GUEST, &stage.lab.hosts()[1], &words);
        let mut moving = moving.unwrap();
        let follows = moving.wait_for_phase(Phase::Finishing, LIMIT);
        assert!(follows, "{}", moving.so_far().why());
        change(&stage, NARROW);
        stage.wait_for(FOLLOWS);
        // A daemon ends a QEMU of which it has not recorded that it runs.
        let record = stage.daemons[1].socket();
        let record = record.with_file_name("qemu").join(format!("{GUEST}.xml"));
        let is_recorded = wait_until(LIMIT, || {
            let text = fs::read_to_string(&record).unwrap_or_default();
            text.contains("reason='post-copy'")
        });
        assert!(is_recorded, "{}", record.display());
        trouble.happens(&mut stage, &mut product);
        eprintln!("  {:?}", stage.states());
        assert!(stage.states()[0].is_some(), "all of it had come");
        change(&stage, LINK);
        is_whole(&mut stage, &product, 1);
        let back = product.migrate(1, GUEST, &stage.lab.hosts()[0], &[]);
        let back = back.unwrap().finish(LIMIT).unwrap();
        let logs = product.ends_of_logs();
        assert!(back.completed(), "{trouble:?}: {}\n{logs}", back.why());
        is_whole(&mut stage, &product, 0);
    }
}

#[test]
fn memory_follows_a_domain_in_spite_of_deaths_before_it_runs() {
    if installed::is_its_day(1, 2) {
        deaths::survives_where_memory_follows();
    }
}
