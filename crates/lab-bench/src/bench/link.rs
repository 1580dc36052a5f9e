//! Implements `lab bench link`: the throughput of one migration on a link, compared with that of
//! TCP.

use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::document::{AskedLink, Document, Sense, median};
use super::iperf3::{self, Latency, Transfer, Way, loss_between, parse_pings};
use super::{Bench, Options};
use crate::measure::cpu_s;
use longhaul_lab::agent::{self, Agent};
use longhaul_lab::error::{During, LabError};
use longhaul_lab::interrupt;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::link::spec::LinkSpec;
use longhaul_lab::process;

/// The bench's entry of `lab bench --list`.
pub(super) const BENCH: Bench = Bench {
    name: "link",
    about: "one migration's throughput beside TCP's (iperf3 with BBR and with CUBIC)",
    minutes: (15, 5),
    run,
};

/// The links, and the share of the best TCP that a migration must reach on each.
const LINKS: [(&str, &str, f64); 3] = [
    ("100mbit_80ms", "100mbit,80ms", 0.9),
    ("1gbit_20ms", "1gbit,20ms", 0.9),
    ("100mbit_80ms_1%", "100mbit,80ms,loss=1%", 0.7),
];
/// The share of a link that a CUBIC flow must keep beside a migration.
const CUBIC_SHARE: f64 = 0.3;
/// The value of `--bandwidth`, as a share of the link, and its tolerance.
const LIMIT_SHARE: f64 = 0.4;
const LIMIT_TOLERANCE: f64 = 0.05;
/// The time for a limited sender to find its rate.
const SETTLING: Duration = Duration::from_secs(3);
/// The window over which a limit must hold.
const LIMIT_WINDOW: Duration = Duration::from_secs(2);
/// How long the first has the link to itself before the other joins, and how long both run.
const LEAD: Duration = Duration::from_secs(5);
const TAIL: Duration = Duration::from_secs(1);
/// How long after its beginning the measurement of a flow that joins a migration starts.
const SLOW_START: Duration = Duration::from_secs(3);
const PING_INTERVAL_S: &str = "0.1";

const LONGHAUL: &str = "longhaul";
const TCP: [(&str, &str); 2] = [("iperf3-tcp-bbr", "bbr"), ("iperf3-tcp-cubic", "cubic")];

/// Which of a flow and a migration has the link to itself before the other joins.
#[derive(Debug, Clone, Copy)]
enum First {
    Flow,
    Migration,
}

impl First {
    fn name(self) -> &'static str {
        match self {
            Self::Flow => "joins_cubic",
            Self::Migration => "joined_by_cubic",
        }
    }
}

#[derive(Debug, Serialize)]
struct Row {
    system: &'static str,
    case: String,
    link: AskedLink,
    repeat: u32,
    throughput_bps: Option<f64>,
    cpu_s_per_gb: Option<f64>,
    latency_us: Latency,
    loss_seen: Option<f64>,
    /// For a flow beside a migration: its share of the link.
    #[serde(skip_serializing_if = "Option::is_none")]
    share_of_link: Option<f64>,
    /// For a limited migration: the limit, and the largest deviation of the link's bytes from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_bps: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_deviation: Option<f64>,
}

fn run(options: &Options, document: &mut Document) -> Result<(), LabError> {
    let cases: Vec<(String, LinkSpec, f64)> = match options.link {
        Some(spec) => vec![("given".to_owned(), spec, 0.9)],
        None => LINKS
            .iter()
            .map(|(name, text, bar)| {
                let spec = text.parse().map_err(|error| LabError::Answer {
                    what: "a link of the bench's own".to_owned(),
                    message: format!("{error}"),
                })?;
                Ok(((*name).to_owned(), spec, *bar))
            })
            .collect::<Result<_, LabError>>()?,
    };
    let mut results = Results::default();
    let outcome = measure(&cases, options, document, &mut results);
    // Also after an interrupt: for the results so far.
    results.judge(document);
    outcome
}

fn measure(
    cases: &[(String, LinkSpec, f64)],
    options: &Options,
    document: &mut Document,
    results: &mut Results,
) -> Result<(), LabError> {
    for (name, spec, bar) in cases {
        let mut place = Place::make(name, *spec, options, document)?;
        place.compare(options, document, results, *bar)?;
        if spec.loss == 0.0 && options.wants_system(LONGHAUL) {
            for first in [First::Flow, First::Migration] {
                place.share_with_cubic(first, options, document, results)?;
            }
            place.keep_to_a_limit(options, document, results)?;
        }
    }
    Ok(())
}

/// A system, and its throughputs in bits per second.
type Reached = (&'static str, Vec<f64>);

/// The inputs of the checks.
#[derive(Debug, Default)]
struct Results {
    /// Case, limit, and the throughput of each system.
    throughput: Vec<(String, f64, Vec<Reached>)>,
    cubic_share: Vec<(String, Vec<f64>)>, // by case and by the first of the two
    limit_deviation: Vec<(String, Vec<f64>)>,
}

impl Results {
    fn judge(&self, document: &mut Document) {
        for (case, bar, systems) in &self.throughput {
            let of = |wanted: &str| {
                let (_, values) = systems.iter().find(|(name, _)| *name == wanted)?;
                median(values.iter().copied())
            };
            let Some(longhaul) = systems.iter().find(|(name, _)| *name == LONGHAUL) else {
                continue; // not selected
            };
            let own = median(longhaul.1.iter().copied());
            let best = TCP
                .iter()
                .filter_map(|(name, _)| of(name))
                .max_by(f64::total_cmp);
            let ratio = own.zip(best).map(|(own, best)| own / best);
            let name = format!("throughput_vs_best_tcp.{case}");
            document.add_check(&name, ratio, Sense::AtLeast, *bar);
        }
        for (case, shares) in &self.cubic_share {
            let share = median(shares.iter().copied());
            let name = format!("share_beside_cubic.{case}");
            document.add_check(&name, share, Sense::AtLeast, CUBIC_SHARE);
        }
        for (case, deviations) in &self.limit_deviation {
            let deviation = median(deviations.iter().copied());
            let name = format!("limit_deviation.{case}");
            document.add_check(&name, deviation, Sense::AtMost, LIMIT_TOLERANCE);
        }
    }
}

/// Two hosts with the link of one case, and agents when the product is measured.
struct Place {
    case: String,
    spec: LinkSpec,
    time: Duration,
    agents: Vec<Agent>,
    lab: Lab,
}

impl Place {
    fn make(
        case: &str,
        spec: LinkSpec,
        options: &Options,
        document: &mut Document,
    ) -> Result<Self, LabError> {
        let mut lab = Lab::create(&Plan {
            purpose: format!("bench link {case}"),
            hosts: 2,
            link: spec,
            seed: options.seed,
        })?;
        document.add_link(spec, lab.measure_link(spec)?);
        let agents = if options.wants_system(LONGHAUL) {
            agent::start_all(&mut lab, &agent::tables()?)?
        } else {
            Vec::new()
        };
        Ok(Self {
            case: case.to_owned(),
            spec,
            time: Duration::from_secs(if options.quick { 8 } else { 12 }),
            agents,
            lab,
        })
    }

    /// Measures each system alone on the link, in turn.
    fn compare(
        &mut self,
        options: &Options,
        document: &mut Document,
        results: &mut Results,
        bar: f64,
    ) -> Result<(), LabError> {
        let mut systems = vec![LONGHAUL];
        systems.extend(TCP.iter().map(|(name, _)| *name));
        systems.retain(|name| options.wants_system(name));
        let mut throughput: Vec<Reached> = systems.iter().map(|name| (*name, Vec::new())).collect();
        let mut failure = Ok(());
        'repeats: for repeat in 1..=options.repeats() {
            for (name, values) in &mut throughput {
                match self.alone(name, repeat, document) {
                    Ok(bps) => values.push(bps),
                    Err(error) => {
                        failure = Err(error);
                        break 'repeats;
                    }
                }
            }
        }
        results
            .throughput
            .push((self.case.clone(), bar, throughput));
        failure
    }

    fn alone(
        &self,
        system: &'static str,
        repeat: u32,
        document: &mut Document,
    ) -> Result<f64, LabError> {
        let before = self.lab.link(0, 1)?.stats()?.forth;
        let (transfer, latency) = self.with_pings(|| self.transfer(system, self.time, None))?;
        let transfer = transfer?;
        let after = self.lab.link(0, 1)?.stats()?.forth;
        let gigabytes = transfer.bps * self.time.as_secs_f64() / 8e9;
        let row = Row {
            throughput_bps: Some(transfer.bps),
            cpu_s_per_gb: transfer.cpu_s.map(|cpu_s| cpu_s / gigabytes),
            latency_us: latency,
            loss_seen: loss_between(&before, &after),
            ..self.row(system, &self.case, repeat)
        };
        document.add_row(&row, &show(&row));
        settle()?;
        Ok(transfer.bps)
    }

    fn transfer(
        &self,
        system: &str,
        time: Duration,
        limit_bps: Option<u64>,
    ) -> Result<Transfer, LabError> {
        match TCP.iter().find(|(name, _)| *name == system) {
            Some((_, algorithm)) => self.iperf3(algorithm, time),
            None => self.longhaul(time, limit_bps),
        }
    }

    /// Measures one migration's data path, driven through the product's own command.
    fn longhaul(&self, time: Duration, limit_bps: Option<u64>) -> Result<Transfer, LabError> {
        #[derive(Deserialize)]
        struct Probe {
            rate_bps: Option<f64>,
        }
        let cpu = || -> Option<f64> { self.agents.iter().map(|agent| cpu_s(agent.pid())).sum() };
        let before = cpu();
        let seconds = time.as_secs().to_string();
        let peer = self.lab.host(1)?.name();
        let mut command = self.agent(0)?.command()?;
        command.args(["--json", "host", "probe", peer, "--seconds", &seconds]);
        if let Some(limit) = limit_bps {
            command.args(["--bandwidth", &format!("{limit}bit")]);
        }
        let said = process::run(&mut command)?;
        let probe: Probe = serde_json::from_str(&said).map_err(|error| LabError::Answer {
            what: "longhaul host probe".to_owned(),
            message: error.to_string(),
        })?;
        let bps = probe.rate_bps.ok_or_else(|| LabError::Answer {
            what: "longhaul host probe".to_owned(),
            message: "it measured no rate".to_owned(),
        })?;
        Ok(Transfer {
            bps,
            cpu_s: before.zip(cpu()).map(|(before, after)| after - before),
            stretches: Vec::new(),
        })
    }

    fn agent(&self, index: usize) -> Result<&Agent, LabError> {
        self.agents
            .get(index)
            .ok_or_else(|| LabError::Which("no agents were started".to_owned()))
    }

    fn iperf3(&self, algorithm: &str, time: Duration) -> Result<Transfer, LabError> {
        let hosts = [self.lab.host(0)?, self.lab.host(1)?];
        iperf3::transfer(hosts, hosts[1].address(), algorithm, Way::Forth, time)
    }

    /// Runs a task while pings go back and forth.
    fn with_pings<T>(&self, task: impl FnOnce() -> T) -> Result<(T, Latency), LabError> {
        let (from, to) = (self.lab.host(0)?, self.lab.host(1)?);
        let mut command = Command::new("ping");
        command.args(["-n", "-i", PING_INTERVAL_S, to.address()]);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let pings = from.spawn(&mut command)?;
        let pid = i32::try_from(pings.id()).unwrap_or(0);
        let result = task();
        // It prints its results and ends.
        let _ = nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(pid),
            nix::sys::signal::Signal::SIGINT,
        );
        let said = pings
            .wait_with_output()
            .during(|| "wait for ping".to_owned())?;
        let latency = parse_pings(&String::from_utf8_lossy(&said.stdout));
        Ok((result, latency))
    }

    /// Measures the share of a CUBIC flow beside a migration on one link, the one joining the
    /// other.
    fn share_with_cubic(
        &self,
        first: First,
        options: &Options,
        document: &mut Document,
        results: &mut Results,
    ) -> Result<(), LabError> {
        let case = format!("{}_{}", self.case, first.name());
        let rate = self.spec.rate_bps as f64;
        let together = 2 * self.time;
        let mut shares = Vec::new();
        for repeat in 1..=options.repeats() {
            let (flow, migration) = match first {
                First::Flow => side_by_side(
                    || self.iperf3("cubic", LEAD + together + TAIL),
                    || self.longhaul(together, None),
                ),
                First::Migration => side_by_side(
                    || self.longhaul(LEAD + together + TAIL, None),
                    || self.iperf3("cubic", together),
                )
                .map(|(migration, flow)| (flow, migration)),
            }?;
            let kept = match first {
                First::Flow => flow.bps_between(LEAD, LEAD + together),
                First::Migration => flow.bps_between(SLOW_START, together),
            }?;
            for (system, bps) in [("iperf3-tcp-cubic", kept), (LONGHAUL, migration.bps)] {
                let row = Row {
                    throughput_bps: Some(bps),
                    share_of_link: Some(bps / rate),
                    ..self.row(system, &case, repeat)
                };
                document.add_row(&row, &show(&row));
            }
            shares.push(kept / rate);
            settle()?;
        }
        results.cubic_share.push((case, shares));
        Ok(())
    }

    /// Measures a migration with a limit, by the link's own counters.
    fn keep_to_a_limit(
        &self,
        options: &Options,
        document: &mut Document,
        results: &mut Results,
    ) -> Result<(), LabError> {
        let limit_bps = (self.spec.rate_bps as f64 * LIMIT_SHARE) as u64;
        let mut deviations = Vec::new();
        for repeat in 1..=options.repeats() {
            let (transfer, deviation) = thread::scope(|scope| {
                let migration = scope.spawn(|| self.longhaul(self.time, Some(limit_bps)));
                let deviation = self.worst_deviation(limit_bps);
                let transfer = migration
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                Ok::<_, LabError>((transfer, deviation?))
            })?;
            let row = Row {
                throughput_bps: Some(transfer.bps),
                limit_bps: Some(limit_bps),
                limit_deviation: deviation,
                ..self.row(LONGHAUL, &format!("{}_limited", self.case), repeat)
            };
            document.add_row(&row, &show(&row));
            deviations.extend(deviation);
            settle()?;
        }
        results
            .limit_deviation
            .push((self.case.clone(), deviations));
        Ok(())
    }

    /// Returns the largest deviation of the link's bytes from a limit, over windows of
    /// [`LIMIT_WINDOW`].
    fn worst_deviation(&self, limit_bps: u64) -> Result<Option<f64>, LabError> {
        let link = self.lab.link(0, 1)?;
        let ends = Instant::now() + self.time;
        interrupt::sleep(SETTLING)?;
        let mut worst: Option<f64> = None;
        let mut before = (Instant::now(), link.stats()?.forth.offered_bytes);
        // The last window must end before the sender does.
        while Instant::now() + LIMIT_WINDOW + Duration::from_millis(500) < ends {
            interrupt::sleep(LIMIT_WINDOW)?;
            let now = (Instant::now(), link.stats()?.forth.offered_bytes);
            let seconds = (now.0 - before.0).as_secs_f64();
            let bps = (now.1 - before.1) as f64 * 8.0 / seconds;
            let deviation = (bps / limit_bps as f64 - 1.0).abs();
            worst = Some(worst.map_or(deviation, |worst| worst.max(deviation)));
            before = now;
        }
        Ok(worst)
    }

    fn row(&self, system: &'static str, case: &str, repeat: u32) -> Row {
        Row {
            system,
            case: case.to_owned(),
            link: self.spec.into(),
            repeat,
            throughput_bps: None,
            cpu_s_per_gb: None,
            latency_us: Latency::default(),
            loss_seen: None,
            share_of_link: None,
            limit_bps: None,
            limit_deviation: None,
        }
    }
}

/// Runs the first task, and [`LEAD`] later the second beside it.
fn side_by_side(
    first: impl FnOnce() -> Result<Transfer, LabError> + Send,
    second: impl FnOnce() -> Result<Transfer, LabError>,
) -> Result<(Transfer, Transfer), LabError> {
    thread::scope(|scope| {
        let first = scope.spawn(first);
        let second = interrupt::sleep(LEAD).and_then(|()| second());
        let first = first
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok((first?, second?))
    })
}

/// Waits for the link's queue to drain before the next transfer.
fn settle() -> Result<(), LabError> {
    interrupt::sleep(Duration::from_millis(500))
}

fn show(row: &Row) -> String {
    let mbit = |bps: Option<f64>| bps.map_or("-".to_owned(), |bps| format!("{:.1}", bps / 1e6));
    let mut line = format!(
        "{:<28} {:<17} #{} {:>7} Mbit/s",
        row.case,
        row.system,
        row.repeat,
        mbit(row.throughput_bps)
    );
    if let Some(p50) = row.latency_us.p50 {
        line += &format!("  ping {:.1} ms", p50 / 1e3);
    }
    if let Some(loss) = row.loss_seen {
        line += &format!("  lost {:.2} %", loss * 100.0);
    }
    if let Some(cpu) = row.cpu_s_per_gb {
        line += &format!("  {cpu:.1} CPU s/GB");
    }
    if let Some(share) = row.share_of_link {
        line += &format!("  {:.0} % of the link", share * 100.0);
    }
    if let Some(deviation) = row.limit_deviation {
        line += &format!("  off its limit by {:.1} % at most", deviation * 100.0);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bars_are_computed_from_medians_of_the_best_peer() {
        let mut results = Results::default();
        results.throughput.push((
            "a".to_owned(),
            0.9,
            vec![
                (LONGHAUL, vec![80e6, 90e6, 10e6]),
                ("iperf3-tcp-bbr", vec![88e6, 88e6, 88e6]),
                ("iperf3-tcp-cubic", vec![100e6, 1e6, 90e6]),
            ],
        ));
        results.cubic_share.push(("a".to_owned(), vec![0.2]));
        results.limit_deviation.push(("a".to_owned(), vec![]));
        let mut document = Document::new("link");
        results.judge(&mut document);
        let value = serde_json::to_value(&document).unwrap();
        assert_eq!(value["checks"][0]["value"], 80.0 / 90.0);
        assert_eq!(value["checks"][0]["holds"], false);
        assert_eq!(value["checks"][1]["holds"], false);
        assert_eq!(value["checks"][2]["value"], serde_json::Value::Null);
        assert_eq!(
            value["checks"][2]["holds"], false,
            "not measured does not hold"
        );
    }
}
