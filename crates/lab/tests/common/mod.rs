//! Provides the end-to-end tests with a laboratory with agents, guests in it, and checks.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

pub(crate) mod monitor;

use longhaul_api::GuestState;
use longhaul_lab::agent::both_links;
use longhaul_lab::arena::{Arena, ArenaError, Workload};
use longhaul_lab::guest::{CHANNEL_NAME, Chipset, KernelFiles, Tiny};
use longhaul_lab::installed;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::process::wait_until;
use longhaul_lab::product::{Finished, Move, Product, Settings, channel_socket};
use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The time limit of every wait, on any slow machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(300);
/// Linux with two processors sometimes loses a timer during a boot under TCG, and waits for it
/// forever: one of sixty boots by QEMU 10.0, without any involvement of Longhaul. Such a guest is
/// restarted after this time without a heartbeat, or if it has one and never starts its workload.
const BOOT_LIMIT: Duration = Duration::from_secs(100);
const BOOTS: usize = 4;
/// Filling more takes minutes without KVM.
const ARENA_BYTES_MAX: u64 = 128 << 20;
/// The period in which a second guest, or silence, is detected.
const WINDOW: Duration = Duration::from_millis(500);

/// Guests under TCG share two cores badly: one test at a time.
static TURN: Mutex<()> = Mutex::new(());
/// Two hosts, lyon and paris, each with its agent, and a link between them.
pub(crate) struct Stage {
    pub(crate) product: Product,
    pub(crate) lab: Lab,
    _turn: Option<MutexGuard<'static, ()>>,
}

impl Stage {
    /// Creates it, with a QEMU for each host; `None` where one of them is not installed and need
    /// not be.
    pub(crate) fn new(purpose: &str, qemus: [&str; 2], link: &str) -> Option<Self> {
        Self::with(purpose, qemus, link, &toml::Table::new())
    }

    /// Creates it with more tables in the agents' configuration.
    pub(crate) fn with(
        purpose: &str,
        qemus: [&str; 2],
        link: &str,
        more: &toml::Table,
    ) -> Option<Self> {
        are_installed(purpose, qemus).then(|| {
            let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
            let (lab, product) = laboratory(purpose, &qemus, link, more);
            Self {
                product,
                lab,
                _turn: Some(turn),
            }
        })
    }

    /// Creates it for a test that waits most of its time, and so takes no turn.
    pub(crate) fn beside_others(purpose: &str, qemus: [&str; 2], link: &str) -> Option<Self> {
        are_installed(purpose, qemus).then(|| {
            let (lab, product) = laboratory(purpose, &qemus, link, &toml::Table::new());
            Self {
                product,
                lab,
                _turn: None,
            }
        })
    }

    /// Creates it with two links between the hosts, which the agents use both.
    pub(crate) fn over_two_links(
        purpose: &str,
        qemus: [&str; 2],
        links: [&str; 2],
    ) -> Option<Self> {
        are_installed(purpose, qemus).then(|| {
            let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
            let mut lab = hosts(purpose, links[0]);
            lab.add_second_link((0, 1), links[1].parse().unwrap(), 2)
                .unwrap();
            let files = KernelFiles::make(lab.host(0).unwrap().folder()).unwrap();
            let tables = [0, 1].map(|index| both_links(lab.hosts(), index));
            let settings = settings(&qemus);
            let table = |index: usize| tables[index].clone();
            let product = Product::start_each_with(&mut lab, &files, &settings, table).unwrap();
            Self {
                product,
                lab,
                _turn: Some(turn),
            }
        })
    }

    /// Boots a guest on the first host, with a workload.
    pub(crate) fn boot(&self, tiny: &Tiny, pages_per_s: u64) -> Running {
        self.boot_with(tiny, &workload(tiny, pages_per_s))
    }

    /// Boots a guest on the first host, with this workload.
    pub(crate) fn boot_with(&self, tiny: &Tiny, workload: &Workload) -> Running {
        let mut running = Running {
            name: tiny.name.clone(),
            arena: Arena::new(),
        };
        for host in 0..2 {
            running.arena.attach(&running.socket(self, host)).unwrap();
        }
        let start = || {
            let description = tiny.description();
            let started = self.product.start_guest(&self.lab, 0, &description);
            started.unwrap();
        };
        let end = || {
            // Its system may have failed, and its QEMU ended.
            if let Err(error) = self.product.stop_guest(0, &tiny.name) {
                eprintln!("{error}");
            }
        };
        boot(&mut running.arena, workload, start, end);
        running
    }

    /// Returns the guest's QEMUs on a host, found without its agent.
    pub(crate) fn qemus(&self, host: usize, guest: &str) -> Vec<i32> {
        let wanted = format!("guest={guest},");
        let in_namespace = self
            .lab
            .host(host)
            .unwrap()
            .namespace()
            .processes()
            .unwrap();
        let is_one = |pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0)
                .any(|word| word.starts_with(wanted.as_bytes()))
        };
        in_namespace.into_iter().filter(is_one).collect()
    }

    /// Restarts agents that were killed.
    pub(crate) fn restart(&mut self, hosts: &[usize]) {
        for host in hosts {
            let host_of_lab = self.lab.host(*host).unwrap();
            self.product
                .agent_mut(*host)
                .unwrap()
                .restart(host_of_lab)
                .unwrap();
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        show_logs_of_failure(&self.product);
    }
}

/// Prints the ends of the agents' logs when a test fails.
pub(crate) fn show_logs_of_failure(product: &Product) {
    if thread::panicking() {
        eprintln!("{}", product.ends_of_logs());
    }
}

/// Returns whether these QEMUs are installed; they must be where all are required.
fn are_installed(purpose: &str, qemus: [&str; 2]) -> bool {
    for version in qemus {
        if let Err(error) = installed::qemu(version) {
            assert!(!installed::all_required(), "{error}");
            eprintln!("SKIPPED {purpose}: {error}");
            return false;
        }
    }
    true
}

/// The workload of a small guest.
pub(crate) fn workload(tiny: &Tiny, pages_per_s: u64) -> Workload {
    Workload {
        content: "mix".to_owned(),
        arena_bytes: ARENA_BYTES_MAX.min((tiny.memory_mib << 20) / 4),
        working_set_bytes: 8 << 20,
        pages_per_s,
        write_bytes: 512,
        writers: tiny.vcpus,
        verify_pages_per_s: 100,
        seed: 7,
    }
}

/// Starts a guest repeatedly until it has booted and runs this workload.
pub(crate) fn boot(arena: &mut Arena, workload: &Workload, start: impl Fn(), end: impl Fn()) {
    for _ in 0..BOOTS {
        start();
        let heard = arena.wait_for_beat(BOOT_LIMIT);
        match heard.and_then(|_| arena.start(workload, LIMIT)) {
            Ok(_) => return,
            Err(error @ ArenaError::TimedOut { .. }) => {
                let last = arena.last_beat();
                let last = last.map(|beat| (beat.number, beat.at.elapsed()));
                eprintln!("{error} after its boot, last heartbeat {last:?}: it is started again");
            }
            Err(error) => panic!("{error}"),
        }
        end();
        arena.forget_boot();
    }
    panic!("a guest did not boot, {BOOTS} times");
}

fn hosts(purpose: &str, link: &str) -> Lab {
    let plan = Plan {
        purpose: format!("test: {purpose}"),
        hosts: 2,
        link: link.parse().unwrap(),
        seed: 1,
    };
    Lab::create(&plan).unwrap()
}

fn settings(qemus: &[&str]) -> Settings {
    Settings {
        qemus: qemus.iter().map(|version| (*version).to_owned()).collect(),
        accelerator: "auto".to_owned(),
    }
}

fn laboratory(purpose: &str, qemus: &[&str], link: &str, more: &toml::Table) -> (Lab, Product) {
    let mut lab = hosts(purpose, link);
    let files = KernelFiles::make(lab.host(0).unwrap().folder()).unwrap();
    let product = Product::start_with(&mut lab, &files, &settings(qemus), more).unwrap();
    (lab, product)
}

/// Returns the smallest guest, with a chipset and a QEMU version's machine.
pub(crate) fn tiny(name: &str, chipset: Chipset, version: &str, vcpus: u32) -> Tiny {
    let mut tiny = Tiny::calm(name);
    tiny.chipset = chipset;
    tiny.machine_version = version.to_owned();
    tiny.vcpus = vcpus;
    tiny
}

/// A guest that runs.
pub(crate) struct Running {
    pub(crate) name: String,
    pub(crate) arena: Arena,
}

impl Running {
    /// Starts to move it.
    pub(crate) fn migrate(&self, stage: &Stage, from: usize, more: &[&str]) -> Move {
        let to = stage.lab.host(1 - from).unwrap();
        stage.product.migrate(from, &self.name, to, more).unwrap()
    }

    /// Moves it with `--verify`, and checks all figures of that.
    pub(crate) fn move_verified(&mut self, stage: &Stage, from: usize) -> Finished {
        let finished = self
            .migrate(stage, from, &["--verify"])
            .finish(LIMIT)
            .unwrap();
        self.assert_moved(stage, from, &finished);
        let verify = finished.report.as_ref().unwrap().verify.as_ref().unwrap();
        assert_eq!(verify.different_blocks, 0, "{verify:?}");
        assert!(verify.regions > 0, "{verify:?}");
        finished
    }

    /// Checks that it is on the other host, and only there, undamaged.
    pub(crate) fn assert_moved(&mut self, stage: &Stage, from: usize, finished: &Finished) {
        assert!(finished.completed(), "{}: {}", self.name, finished.why());
        self.assert_runs_only_on(stage, 1 - from);
        let gone = wait_until(LIMIT, || stage.qemus(from, &self.name).is_empty());
        assert!(gone, "the source's QEMU is still there");
    }

    /// Checks that it runs there and nowhere else, without errors in its memory.
    pub(crate) fn assert_runs_only_on(&mut self, stage: &Stage, host: usize) {
        self.arena.wait_for_beat(LIMIT).unwrap();
        assert_eq!(
            self.heard(stage),
            [host],
            "{} runs where it should not",
            self.name
        );
        let verified = self.arena.verify(LIMIT).unwrap();
        assert!(verified.pages > 0);
        let errors = self.arena.wait_for_beat(LIMIT).unwrap().errors;
        assert_eq!(
            (verified.errors, errors),
            (0, 0),
            "{:?}",
            self.arena.faults()
        );
    }

    /// Returns the hosts from which it is heard now.
    pub(crate) fn heard(&self, stage: &Stage) -> Vec<usize> {
        let since = Instant::now();
        thread::sleep(WINDOW);
        let heard: Vec<PathBuf> = self.arena.heard_since(since);
        (0..2)
            .filter(|host| heard.contains(&self.socket(stage, *host)))
            .collect()
    }

    /// Checks that nothing of it is on a host: no QEMU, no folder, no heartbeat.
    pub(crate) fn assert_nothing_on(&self, stage: &Stage, host: usize) {
        let name = &self.name;
        let state = stage
            .lab
            .host(host)
            .unwrap()
            .folder()
            .join("state/guests")
            .join(name);
        let mut said = None;
        let gone = wait_until(LIMIT, || {
            said = stage.product.guest(host, name).unwrap();
            let known = said.as_ref().is_some_and(|guest| {
                !matches!(guest.state, GuestState::Elsewhere | GuestState::Stopped)
            });
            !known && !state.join("run").exists() && stage.qemus(host, name).is_empty()
        });
        let left = stage.qemus(host, name);
        assert!(
            gone,
            "left on host {host}: QEMUs {left:?}, {}, {said:?}",
            state.display()
        );
    }

    /// Returns the channel's socket on a host.
    pub(crate) fn socket(&self, stage: &Stage, host: usize) -> PathBuf {
        channel_socket(stage.lab.host(host).unwrap(), &self.name, CHANNEL_NAME)
    }

    /// Ends it, on either host.
    pub(crate) fn end(self, stage: &Stage) {
        for host in 0..2 {
            // One of them does not have it.
            let _ = stage.product.stop_guest(host, &self.name);
            self.assert_nothing_on(stage, host);
        }
    }
}
