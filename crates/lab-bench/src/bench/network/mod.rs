//! Implements `lab bench network`: networks between two hosts, by the product and by its peers.
//!
//! [`system`] says what a system is, [`ground`] has the hosts and the way between them, and a file
//! for each system starts it. [`sites`] measures the product's agents between emulated sites.

mod ground;
mod longhaul;
mod peers;
mod sites;
mod system;

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use self::ground::{Busy, Ground, Tunnel};
use self::system::{Kind, SYSTEMS, System};
use super::document::{AskedLink, Document, Sense, median};
use super::iperf3::{self, Latency, Way, loss_between, parse_pings};
use super::{Bench, Options};
use longhaul_lab::error::LabError;
use longhaul_lab::interrupt;
use longhaul_lab::lab::say;
use longhaul_lab::link::spec::LinkSpec;
use longhaul_lab::netns;

/// The bench's entry of `lab bench --list`.
pub(super) const BENCH: Bench = Bench {
    name: "network",
    about: "networks between hosts: throughput, CPU and latency beside seven peers",
    minutes: (50, 9),
    run,
};

/// A way between two hosts, and what is measured on it.
#[derive(Debug, Clone)]
struct Case {
    name: String,
    /// `None`: a bare pair of interfaces.
    link: Option<LinkSpec>,
    algorithms: &'static [&'static str],
    ways: &'static [Way],
    time: Duration,
    /// Whether peers are measured in every repeat. On links they are measured once: their figures
    /// are shown there, not judged.
    peers_repeat: bool,
}

/// The links: name, link, and whether `--quick` has it.
const LINKS: [(&str, &str, bool); 4] = [
    ("100mbit_20ms", "100mbit,20ms", false),
    ("100mbit_20ms_1%", "100mbit,20ms,loss=1%", false),
    ("1gbit_20ms", "1gbit,20ms", true),
    ("1gbit_20ms_1%", "1gbit,20ms,loss=1%", true),
];
const BARE: &str = "veth";
/// The bars.
const VS_LAYER2: f64 = 4.0;
const VS_LAYER3: f64 = 1.0;
const SHARE_OF_LINK: f64 = 0.95;
const SHARE_OF_LOSSY_LINK: f64 = 0.85;
const ADDED_ROUND_TRIP_US: f64 = 200.0;
/// The machine's processor time in a second before a measurement, above which it is called busy.
const QUIET_CPU_S: f64 = 0.1;
/// How long a system may find its path after the first packet got through.
const WARM_UP_PINGS: &str = "10";

#[derive(Debug, Clone, Serialize)]
struct Row {
    system: &'static str,
    version: Option<String>,
    case: String,
    /// Null for a bare pair of interfaces.
    link: Option<AskedLink>,
    repeat: u32,
    /// `completed`, `skipped: why` or `failed: why`.
    outcome: String,
    mtu: Option<u32>,
    /// Null in a row of round trips.
    way: Option<Way>,
    /// The inner TCP's congestion control.
    congestion: Option<&'static str>,
    throughput_bps: Option<f64>,
    /// Of the whole machine.
    cpu_s_per_gb: Option<f64>,
    latency_us: Latency,
    /// Share of the frames that the emulated link dropped.
    loss_seen: Option<f64>,
}

fn run(options: &Options, document: &mut Document) -> Result<(), LabError> {
    let cases = cases(options)?;
    let systems = chosen(options)?;
    let mut results = Results::default();
    let outcome = measure(&cases, &systems, options, document, &mut results);
    // Also after an interrupt: for the results so far.
    results.judge(document, &systems);
    outcome?;
    match systems.iter().any(|system| system.kind() == Kind::Longhaul) {
        true => sites::measure(options, document),
        false => Ok(()),
    }
}

fn cases(options: &Options) -> Result<Vec<Case>, LabError> {
    let seconds = |whole, quick| Duration::from_secs(if options.quick { quick } else { whole });
    let bare = Case {
        name: BARE.to_owned(),
        link: None,
        algorithms: &["cubic"],
        ways: &[Way::Forth, Way::Back],
        time: seconds(5, 3),
        peers_repeat: true,
    };
    let on_link = |name: &str, link: LinkSpec| Case {
        name: name.to_owned(),
        link: Some(link),
        algorithms: &["bbr", "cubic"],
        ways: &[Way::Forth],
        time: seconds(8, 8),
        peers_repeat: false,
    };
    let mut cases = Vec::new();
    match options.link {
        Some(link) => cases.push(on_link("given", link)),
        None => {
            cases.push(bare);
            for (name, text, quick) in LINKS {
                if options.quick && !quick {
                    continue;
                }
                let link = text.parse().map_err(|error| LabError::Answer {
                    what: "a link of the bench's own".to_owned(),
                    message: format!("{error}"),
                })?;
                cases.push(on_link(name, link));
            }
        }
    }
    cases.retain(|case| options.wants_workload(&case.name));
    let of_sites = || sites::CASES.iter().any(|case| options.wants_workload(case));
    if cases.is_empty() && !of_sites() {
        let names = LINKS.map(|(name, ..)| name).join(", ");
        let others = sites::CASES.join(", ");
        return Err(LabError::Which(format!(
            "--workload names none of the cases {BARE}, {names}, {others}"
        )));
    }
    Ok(cases)
}

fn chosen(options: &Options) -> Result<Vec<&'static dyn System>, LabError> {
    let all = || SYSTEMS.iter().copied();
    if let Some(unknown) = options
        .system
        .iter()
        .find(|name| !all().any(|system| system.name() == *name))
    {
        let names: Vec<&str> = all().map(System::name).collect();
        return Err(LabError::Which(format!(
            "there is no system `{unknown}`; there are {}",
            names.join(", ")
        )));
    }
    Ok(all()
        .filter(|system| options.wants_system(system.name()))
        .collect())
}

fn measure(
    cases: &[Case],
    systems: &[&'static dyn System],
    options: &Options,
    document: &mut Document,
    results: &mut Results,
) -> Result<(), LabError> {
    let mut ready = Vec::new();
    for system in systems {
        match system.version() {
            Ok(version) => {
                say(&format!("{}: {version}", system.name()));
                ready.push((*system, version));
            }
            Err(why) => {
                let row = Row {
                    outcome: format!("skipped: {why}"),
                    ..Row::of(*system, None, "", None, 0)
                };
                document.add_row(&row, &row.show());
            }
        }
    }
    for case in cases {
        let purpose = format!("bench network {}", case.name);
        let ground = Ground::create(&purpose, case.link, options.seed)?;
        if let Some(link) = case.link {
            document.add_link(link, ground.lab.measure_link(link)?);
        }
        for repeat in 1..=options.repeats() {
            for (system, version) in &ready {
                let is_peer = !matches!(system.kind(), Kind::Raw | Kind::Longhaul);
                let once = is_peer && !case.peers_repeat;
                if once && (repeat > 1 || (options.quick && options.system.is_empty())) {
                    continue;
                }
                interrupt::check()?;
                let blank = Row::of(*system, Some(version), &case.name, case.link, repeat);
                let mut turn = Turn {
                    ground: &ground,
                    case,
                    blank: &blank,
                    document: &mut *document,
                    results: &mut *results,
                };
                if let Err(error) = turn.take(*system) {
                    interrupt::check()?;
                    let row = Row {
                        outcome: format!("failed: {error}"),
                        ..blank.clone()
                    };
                    document.add_row(&row, &row.show());
                }
            }
        }
    }
    Ok(())
}

/// The measurement of one system in one case, once.
struct Turn<'a> {
    ground: &'a Ground,
    case: &'a Case,
    blank: &'a Row,
    document: &'a mut Document,
    results: &'a mut Results,
}

impl Turn<'_> {
    fn take(&mut self, system: &dyn System) -> Result<(), LabError> {
        let tunnel = system.start(self.ground)?;
        self.ground.wait_until_joined(&tunnel)?;
        self.ping(&tunnel, &["-i", "0.2", "-c", WARM_UP_PINGS])?;
        self.round_trips(&tunnel)?;
        for algorithm in self.case.algorithms {
            for way in self.case.ways {
                self.throughput(&tunnel, algorithm, *way)?;
            }
        }
        Ok(())
    }

    fn ping(&self, tunnel: &Tunnel, how: &[&str]) -> Result<String, LabError> {
        let [first, _] = self.ground.hosts()?;
        let mut command = netns::command("ping");
        command
            .args(["-n", "-W", "2"])
            .args(how)
            .arg(&tunnel.inner[1]);
        first.output(&mut command)
    }

    fn round_trips(&mut self, tunnel: &Tunnel) -> Result<(), LabError> {
        // Between two of them a processor sleeps, as it does between packets that matter.
        let how = match self.case.link {
            None => ["-i", "0.004", "-c", "750"],
            Some(_) => ["-i", "0.02", "-c", "150"],
        };
        let said = self.ping(tunnel, &how)?;
        let row = Row {
            outcome: "completed".to_owned(),
            mtu: self.ground.mtu(&tunnel.device),
            latency_us: parse_pings(&said),
            ..self.blank.clone()
        };
        self.results.add(&row);
        self.document.add_row(&row, &row.show());
        Ok(())
    }

    fn throughput(
        &mut self,
        tunnel: &Tunnel,
        algorithm: &'static str,
        way: Way,
    ) -> Result<(), LabError> {
        let quiet = Busy::now()?;
        interrupt::sleep(Duration::from_secs(1))?;
        let before_s = quiet.elapsed_s()?;
        if before_s > QUIET_CPU_S {
            say(&format!(
                "the machine is busy with something else: {before_s:.2} s of processor time in the \
                 second before"
            ));
        }
        let link = self.ground.lab.link(0, 1)?;
        let before = link.stats()?;
        let busy = Busy::now()?;
        let hosts = self.ground.hosts()?;
        let transfer = iperf3::transfer(hosts, &tunnel.inner[1], algorithm, way, self.case.time)?;
        let busy_s = busy.elapsed_s()?;
        let after = link.stats()?;
        let gigabytes = transfer.bps * self.case.time.as_secs_f64() / 8e9;
        let lost = match way {
            Way::Forth => loss_between(&before.forth, &after.forth),
            Way::Back => loss_between(&before.back, &after.back),
        };
        let row = Row {
            outcome: "completed".to_owned(),
            mtu: self.ground.mtu(&tunnel.device),
            way: Some(way),
            congestion: Some(algorithm),
            throughput_bps: Some(transfer.bps),
            cpu_s_per_gb: Some(busy_s / gigabytes),
            loss_seen: lost.filter(|_| self.case.link.is_some()),
            ..self.blank.clone()
        };
        self.results.add(&row);
        self.document.add_row(&row, &row.show());
        Ok(())
    }
}

impl Row {
    /// Returns a row without figures.
    fn of(
        system: &dyn System,
        version: Option<&String>,
        case: &str,
        link: Option<LinkSpec>,
        repeat: u32,
    ) -> Self {
        Self {
            system: system.name(),
            version: version.cloned(),
            case: case.to_owned(),
            link: link.map(AskedLink::from),
            repeat,
            outcome: String::new(),
            mtu: None,
            way: None,
            congestion: None,
            throughput_bps: None,
            cpu_s_per_gb: None,
            latency_us: Latency::default(),
            loss_seen: None,
        }
    }

    fn show(&self) -> String {
        if self.outcome != "completed" {
            let case = if self.case.is_empty() { "" } else { " in " };
            let Self {
                outcome,
                system,
                case: name,
                ..
            } = self;
            let (word, why) = outcome.split_once(": ").unwrap_or((outcome, ""));
            return format!("{word}: {system}{case}{name}: {why}");
        }
        let mut line = format!("{:<16} {:<18} #{}", self.case, self.system, self.repeat);
        if let (Some(p50), Some(p99)) = (self.latency_us.p50, self.latency_us.p99) {
            line += &format!("  round trip {p50:.0} us, 99 of 100 within {p99:.0} us");
        }
        if let Some(bps) = self.throughput_bps {
            let way = match self.way {
                Some(Way::Back) => "back",
                _ => "forth",
            };
            let congestion = self.congestion.unwrap_or_default();
            line += &format!("  {way:<5} {congestion:<5} {:>8.1} Mbit/s", bps / 1e6);
        }
        if let Some(cpu) = self.cpu_s_per_gb {
            line += &format!("  {cpu:.2} CPU s/GB");
        }
        if let Some(loss) = self.loss_seen {
            line += &format!("  lost {:.2} %", loss * 100.0);
        }
        line
    }
}

/// What a median is taken of: system, case, way, congestion control.
type Key = (&'static str, String, Option<bool>, Option<&'static str>);

/// The inputs of the checks.
#[derive(Debug, Default)]
struct Results {
    throughput_bps: BTreeMap<Key, Vec<f64>>,
    round_trip_us: BTreeMap<Key, Vec<f64>>,
}

impl Results {
    fn add(&mut self, row: &Row) {
        let back = row.way.map(|way| way == Way::Back);
        let key = (row.system, row.case.clone(), back, row.congestion);
        if let Some(bps) = row.throughput_bps {
            self.throughput_bps
                .entry(key.clone())
                .or_default()
                .push(bps);
        }
        if let Some(p50) = row.latency_us.p50 {
            self.round_trip_us.entry(key).or_default().push(p50);
        }
    }

    fn bps(&self, system: &str, case: &str, back: bool, congestion: &str) -> Option<f64> {
        let of = |(key, values): (&Key, &Vec<f64>)| {
            let wanted = key.0 == system
                && key.1 == case
                && key.2 == Some(back)
                && key.3 == Some(congestion);
            wanted.then(|| median(values.iter().copied())).flatten()
        };
        self.throughput_bps.iter().find_map(of)
    }

    fn round_trip(&self, system: &str, case: &str) -> Option<f64> {
        let of = |(key, values): (&Key, &Vec<f64>)| {
            let wanted = key.0 == system && key.1 == case;
            wanted.then(|| median(values.iter().copied())).flatten()
        };
        self.round_trip_us.iter().find_map(of)
    }

    /// Adds the checks for which the product and what it is compared with were to be measured.
    fn judge(&self, document: &mut Document, systems: &[&'static dyn System]) {
        let of = |kind: Kind| -> Vec<&'static str> {
            let all = systems.iter().filter(|system| system.kind() == kind);
            all.map(|system| system.name()).collect()
        };
        let [own] = of(Kind::Longhaul)[..] else {
            return;
        };
        let measured = |case: &str| {
            let throughput = self.throughput_bps.keys().any(|key| key.1 == case);
            throughput || self.round_trip_us.keys().any(|key| key.1 == case)
        };
        if measured(BARE) {
            for (kind, name, bar) in [
                (Kind::Layer2, "throughput_vs_best_layer2", VS_LAYER2),
                (Kind::Layer3, "throughput_vs_best_layer3", VS_LAYER3),
            ] {
                let peers = of(kind);
                if !peers.is_empty() {
                    let value = self.vs_best(own, &peers);
                    let name = format!("{name}.{BARE}");
                    document.add_check(&name, value, Sense::AtLeast, bar);
                }
            }
        }
        let [raw] = of(Kind::Raw)[..] else {
            return;
        };
        if measured(BARE) {
            let added = self.round_trip(own, BARE).zip(self.round_trip(raw, BARE));
            let added = added.map(|(own, raw)| own - raw);
            let name = format!("added_round_trip_us.{BARE}");
            document.add_check(&name, added, Sense::AtMost, ADDED_ROUND_TRIP_US);
        }
        for (case, bar, algorithms) in [
            ("1gbit_20ms", SHARE_OF_LINK, &["bbr", "cubic"][..]),
            ("1gbit_20ms_1%", SHARE_OF_LOSSY_LINK, &["bbr"][..]),
        ] {
            for algorithm in algorithms.iter().filter(|_| measured(case)) {
                let of = |system: &str| self.bps(system, case, false, algorithm);
                let share = of(own).zip(of(raw)).map(|(own, raw)| own / raw);
                let name = format!("share_of_raw.{case}_{algorithm}");
                document.add_check(&name, share, Sense::AtLeast, bar);
            }
        }
    }

    /// Returns the throughput relative to the best of these peers, in the direction in which this
    /// is less.
    fn vs_best(&self, own: &str, peers: &[&str]) -> Option<f64> {
        let ratio = |back: bool| {
            let of = |system: &str| self.bps(system, BARE, back, "cubic");
            let best = peers
                .iter()
                .filter_map(|peer| of(peer))
                .max_by(f64::total_cmp);
            Some(of(own)? / best?)
        };
        Some(ratio(false)?.min(ratio(true)?))
    }
}

#[cfg(test)]
mod tests;
