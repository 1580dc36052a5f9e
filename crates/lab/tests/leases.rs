//! Tests that a realm's arbiter ends a handover in doubt: the source takes its guest back by itself
//! when the destination is lost after the release, and the destination learns of it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

mod common;

use common::{LIMIT, boot, show_logs_of_failure, tiny};
use longhaul_api::{Check, GuestState, Outcome, Plan, Verdict};
use longhaul_lab::agent::Agent;
use longhaul_lab::arena::{Arena, Workload};
use longhaul_lab::guest::{CHANNEL_NAME, Chipset, KernelFiles};
use longhaul_lab::installed;
use longhaul_lab::internet::{SitePlan, SitesPlan};
use longhaul_lab::lab::Lab;
use longhaul_lab::process::wait_until;
use longhaul_lab::product::{Product, Settings, channel_socket};
use longhaul_lab::realm::{Realm, path_to};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

const QEMU: &str = "10.0";
const POLL: Duration = Duration::from_millis(300);
const GUEST: &str = "arbitrated";

/// Two hosts of a realm whose server is its arbiter, 10 ms from both.
struct World {
    realm: Realm,
    product: Product,
    lab: Lab,
}

impl World {
    fn create() -> Option<Self> {
        if let Err(error) = installed::qemu(QEMU) {
            assert!(!installed::all_required(), "{error}");
            eprintln!("SKIPPED leases: {error}");
            return None;
        }
        let uplink = "100mbit,5ms".parse().unwrap();
        let site = || SitePlan {
            access: "none".parse().unwrap(),
            uplink,
        };
        let plan = SitesPlan {
            purpose: "test: leases".to_owned(),
            sites: vec![site(), site()],
            servers: 1,
            backbone: uplink,
            seed: 1,
        };
        let mut lab = Lab::create_sites(&plan).unwrap();
        let files = KernelFiles::make(lab.host(0).unwrap().folder()).unwrap();
        let settings = Settings {
            qemus: vec![QEMU.to_owned()],
            accelerator: "tcg".to_owned(),
        };
        let none = |_| toml::Table::new();
        let product = Product::start_each_with(&mut lab, &files, &settings, none).unwrap();
        let mut realm = Realm::create(&lab).unwrap();
        let agents = [0, 1].map(|host| product.agent(host).unwrap());
        realm.join(&lab, &agents).unwrap();
        realm.set_arbiter(&lab, 0).unwrap();
        realm.create_network(&lab, "blue", &agents).unwrap();
        Some(Self {
            realm,
            product,
            lab,
        })
    }

    fn agent(&self, host: usize) -> &Agent {
        self.product.agent(host).unwrap()
    }

    /// Waits until both hosts reach each other, and the arbiter.
    fn wait_for_ways(&self) {
        for (from, to) in [(0, 1), (1, 0)] {
            let name = self.agent(to).name();
            let reached = comes(|| {
                let (kind, _) = path_to(self.agent(from), name).unwrap();
                kind.as_deref() == Some("direct") && is_registered(self.agent(from))
            });
            assert!(reached, "host {from} does not reach the others");
        }
    }

    /// Starts the destination's agent again, with these fail points.
    fn restart_destination(&mut self, fail_points: Option<&str>) {
        let host = self.lab.host(1).unwrap();
        let agent = self.product.agent_mut(1).unwrap();
        let restarted = match fail_points {
            Some(points) => agent.restart_to_fail(host, points),
            None => agent.restart(host),
        };
        restarted.unwrap();
    }

    fn qemus(&self, host: usize) -> Vec<i32> {
        let namespace = self.lab.host(host).unwrap().namespace();
        let wanted = format!("guest={GUEST},");
        let is_one = |pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0)
                .any(|word| word.starts_with(wanted.as_bytes()))
        };
        let all = namespace.processes().unwrap();
        all.into_iter().filter(is_one).collect()
    }

    fn outcome(&self, host: usize) -> (Option<Outcome>, String) {
        let latest = self.product.latest_migration(host, GUEST).unwrap();
        let latest = latest.expect("no migration");
        let reason = latest.reason.map(|reason| reason.message);
        (latest.outcome, reason.unwrap_or_default())
    }

    /// Plans a move that requires the arbiter. Returns whether it is possible, and the verdicts of
    /// the source and the destination about the arbiter.
    fn planned(&self, from: usize) -> (bool, [Verdict; 2]) {
        let mut command = self.agent(from).command().unwrap();
        let to = self.lab.host(1 - from).unwrap().name();
        command.args(["--json", "plan", GUEST, "--to", to, "--require-arbiter"]);
        // A plan that is not possible has an exit code of its own.
        let output = command.output().unwrap();
        let plan: Plan = serde_json::from_slice(&output.stdout).unwrap();
        let verdicts = ["arbiter", "destination"].map(|name| {
            let about = |check: &&Check| check.name == name && check.message.contains("arbiter");
            let check = plan.checks.iter().find(about);
            let check = check.expect("the plan says nothing of the arbiter");
            eprintln!("{}", check.message);
            check.verdict
        });
        (plan.possible, verdicts)
    }

    /// Lets the destination's datagrams to the arbiter get lost, or no more.
    fn cut_arbiter(&self, what: &str) {
        let arbiter = self.lab.internet().unwrap().server(0).unwrap().address();
        let destination = self.lab.host(1).unwrap().namespace();
        let route = format!("route {what} blackhole {arbiter}/32\n");
        destination.configure(&route).unwrap();
    }

    fn runs(&self, host: usize) -> bool {
        let guest = self.product.guest(host, GUEST).unwrap();
        guest.is_some_and(|guest| guest.state == GuestState::Running)
    }

    /// Returns the journals of migrations that are not closed.
    fn journals(&self, host: usize) -> Vec<String> {
        let folder = self.lab.host(host).unwrap().folder().join("state/journal");
        let files = fs::read_dir(folder).unwrap();
        let names = files.map(|file| file.unwrap().file_name().to_string_lossy().into_owned());
        names.filter(|name| name.ends_with(".journal")).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        show_logs_of_failure(&self.product);
    }
}

/// Waits for what a command of the product says: each costs as much as some of a guest's time.
fn comes(mut holds: impl FnMut() -> bool) -> bool {
    wait_until(LIMIT, || {
        let is = holds();
        if !is {
            thread::sleep(POLL);
        }
        is
    })
}

fn is_registered(agent: &Agent) -> bool {
    let said = agent.run(&["--json", "host", "realm"]).unwrap();
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    let servers = said["realm"]["servers"].as_array();
    let mut servers = servers.into_iter().flatten();
    servers.any(|server| server["registered"] == true)
}

#[test]
fn a_source_takes_its_guest_back_through_the_arbiter_when_the_destination_is_lost() {
    let Some(mut world) = World::create() else {
        return;
    };
    let guest = tiny(GUEST, Chipset::Q35, QEMU, 1);
    let mut arena = Arena::new();
    for host in 0..2 {
        let host = world.lab.host(host).unwrap();
        let socket = channel_socket(host, GUEST, CHANNEL_NAME);
        arena.attach(&socket).unwrap();
    }
    let start = || {
        let started = world
            .product
            .start_guest(&world.lab, 0, &guest.description());
        started.unwrap();
    };
    let end = || world.product.stop_guest(0, GUEST).unwrap();
    let workload = Workload {
        content: "mix".to_owned(),
        arena_bytes: 8 << 20,
        working_set_bytes: 1 << 20,
        pages_per_s: 50,
        write_bytes: 512,
        writers: 1,
        verify_pages_per_s: 50,
        seed: 7,
    };
    boot(&mut arena, &workload, start, end);

    // The destination's host is lost when COMMIT arrives: its agent, and its QEMU.
    world.restart_destination(Some("destination:after-receipt:commit=kill"));
    world.wait_for_ways();
    let to = world.lab.host(1).unwrap();
    assert_eq!(world.planned(0), (true, [Verdict::Ok; 2]));
    let moving = world
        .product
        .migrate(0, GUEST, to, &["--require-arbiter"])
        .unwrap();
    let agent = world.product.agent_mut(1).unwrap();
    assert!(wait_until(LIMIT, || agent.has_ended()), "it was not killed");
    let lost = Instant::now();
    for qemu in world.qemus(1) {
        kill(Pid::from_raw(qemu), Signal::SIGKILL).unwrap();
    }
    assert!(comes(|| world.runs(0)), "it was not taken back");
    eprintln!("taken back {:?} after the loss", lost.elapsed());
    let finished = moving.finish(LIMIT).unwrap();
    assert!(!finished.completed());
    let (outcome, reason) = world.outcome(0);
    assert_eq!(outcome, Some(Outcome::Failed), "{reason}");
    assert!(reason.contains("arbiter"), "{reason}");
    let verified = arena.verify(LIMIT).unwrap();
    assert_eq!(verified.errors, 0, "{:?}", arena.faults());

    // The destination is back, and learns of it.
    world.restart_destination(None);
    let closed = wait_until(LIMIT, || {
        world.journals(0).is_empty() && world.journals(1).is_empty()
    });
    let left = (world.journals(0), world.journals(1));
    assert!(closed, "journals stay: {left:?}");
    assert!(world.qemus(1).is_empty() && !world.runs(1) && world.runs(0));

    // A destination that does not reach the arbiter says so before anything begins.
    world.wait_for_ways();
    world.cut_arbiter("add");
    let cut = comes(|| !is_registered(world.agent(1)));
    assert!(cut, "the destination still reaches the arbiter");
    assert_eq!(world.planned(0), (false, [Verdict::Ok, Verdict::Refuse]));
    let to = world.lab.host(1).unwrap();
    let moving = world.product.migrate(0, GUEST, to, &["--require-arbiter"]);
    let finished = moving.unwrap().finish(LIMIT).unwrap();
    let why = format!("{} does not reach the realm's arbiter", to.name());
    assert!(
        !finished.completed() && finished.why().contains(&why),
        "{}",
        finished.why()
    );
    assert!(world.journals(0).is_empty() && world.journals(1).is_empty());
    world.cut_arbiter("del");

    // The next move has the arbiter too, in a later generation.
    world.wait_for_ways();
    let to = world.lab.host(1).unwrap();
    let moving = world.product.migrate(0, GUEST, to, &["--require-arbiter"]);
    let finished = moving.unwrap().finish(LIMIT).unwrap();
    assert!(finished.completed(), "{}", finished.why());
    let report = finished.report.unwrap();
    let arbiter = report.arbiter.unwrap_or_default();
    assert!(arbiter.contains("needed its lease"), "{arbiter}");
    eprintln!("with the arbiter: {:?}", report.downtime);
    assert!(world.runs(1));
    let verified = arena.verify(LIMIT).unwrap();
    assert_eq!(verified.errors, 0, "{:?}", arena.faults());

    // Without the arbiter a move goes on as in any other realm, unless it is required.
    world.realm.kill_server(0).unwrap();
    let gone = comes(|| (0..2).all(|host| !is_registered(world.agent(host))));
    assert!(gone, "the arbiter is still reached");
    assert_eq!(world.planned(1), (false, [Verdict::Refuse; 2]));
    let to = world.lab.host(0).unwrap();
    let moving = world.product.migrate(1, GUEST, to, &["--require-arbiter"]);
    let finished = moving.unwrap().finish(LIMIT).unwrap();
    assert!(
        !finished.completed() && finished.why().contains("arbiter"),
        "{}",
        finished.why()
    );
    let moving = world.product.migrate(1, GUEST, to, &[]);
    let finished = moving.unwrap().finish(LIMIT).unwrap();
    assert!(finished.completed(), "{}", finished.why());
    let report = finished.report.unwrap();
    let arbiter = report.arbiter.unwrap_or_default();
    assert!(arbiter.starts_with("not used"), "{arbiter}");
    eprintln!("without the arbiter: {:?}", report.downtime);
    let verified = arena.verify(LIMIT).unwrap();
    assert_eq!(verified.errors, 0, "{:?}", arena.faults());
    world.product.stop_guest(0, GUEST).unwrap();
}
