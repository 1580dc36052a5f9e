//! Implements `lab bench streams`: the throughput of one migration over two links at once, compared
//! with each link alone, and after a cut of one of them.

use super::document::{AskedLink, Document, Sense, median};
use super::{Bench, Options};
use longhaul_api::{PathUse, ProbeResult};
use longhaul_lab::agent::{self, Agent, both_links};
use longhaul_lab::error::{During, LabError};
use longhaul_lab::interrupt;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::link::Control;
use longhaul_lab::link::spec::LinkSpec;
use longhaul_lab::process::wait_until;
use serde::Serialize;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The bench's entry of `lab bench --list`.
pub(super) const BENCH: Bench = Bench {
    name: "streams",
    about: "one migration's throughput over two links at once, and after a cut of one of them",
    minutes: (14, 3),
    run,
};

/// The pairs of links: the name of the case, and both.
const PAIRS: [(&str, [&str; 2]); 2] = [
    ("50_and_50", ["50mbit,20ms", "50mbit,20ms"]),
    ("50_and_20", ["50mbit,20ms", "20mbit,20ms"]),
];
/// The share of the sum of both links alone that both together must reach, and the share of one
/// link alone that it must reach after the other was cut.
const TOGETHER: f64 = 0.9;
const AFTER_CUT: f64 = 0.9;
/// Longer than any measurement.
const HOUR: Duration = Duration::from_secs(3600);
/// What a link has carried when a measurement has begun, beyond the agents' messages.
const BEGUN_BYTES: u64 = 100_000;
const BEGIN_LIMIT: Duration = Duration::from_secs(60);
const SETTLING: Duration = Duration::from_secs(1);
/// The share of the time of a measurement at which a link is cut.
const CUT_AT: f64 = 0.3;

/// Which links carry data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Use {
    /// Whatever agents use whose configuration does not name both.
    Unconfigured,
    /// The first alone; the other one is cut from the beginning.
    First,
    Second,
    Both,
    /// Both, until the first is cut, on which the connection was made.
    CutFirst,
    CutSecond,
}

impl Use {
    const ALL: [Self; 6] = [
        Self::Unconfigured,
        Self::First,
        Self::Second,
        Self::Both,
        Self::CutFirst,
        Self::CutSecond,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Unconfigured => "unconfigured",
            Self::First => "first",
            Self::Second => "second",
            Self::Both => "both",
            Self::CutFirst => "cut_first",
            Self::CutSecond => "cut_second",
        }
    }

    /// Returns the index of the link that is cut from the beginning, and in the middle.
    fn cuts(self) -> (Option<usize>, Option<usize>) {
        match self {
            Self::First => (Some(1), None),
            Self::Second => (Some(0), None),
            Self::Unconfigured | Self::Both => (None, None),
            Self::CutFirst => (None, Some(0)),
            Self::CutSecond => (None, Some(1)),
        }
    }
}

#[derive(Debug, Serialize)]
struct Row {
    system: &'static str,
    case: String,
    links: [AskedLink; 2],
    used: Use,
    repeat: u32,
    /// Bits of content per second, counted by the receiver over the whole time.
    throughput_bps: Option<f64>,
    per_second_bps: Vec<u64>,
    /// Seconds from the receiver's beginning to the cut.
    cut_at_s: Option<f64>,
    /// The same rate from the cut to the end.
    after_cut_bps: Option<f64>,
    paths: Vec<PathUse>,
    /// Bytes that each link has carried.
    link_bytes: [u64; 2],
}

/// Runs the bench, adding rows and then checks to the document.
fn run(options: &Options, document: &mut Document) -> Result<(), LabError> {
    let mut rows = Vec::new();
    let outcome = PAIRS
        .iter()
        .filter(|(case, _)| options.wants_workload(case))
        .try_for_each(|(case, links)| {
            let mut place = Place::make(case, links, options, document)?;
            for repeat in 1..=options.repeats() {
                for used in Use::ALL {
                    if options.wants_system(used.name()) {
                        place.start_agents(used != Use::Unconfigured)?;
                        let row = place.measure(used, repeat)?;
                        document.add_row(&row, &show(&row));
                        rows.push(row);
                    }
                }
            }
            Ok(())
        });
    // Also after an interrupt: for the results so far.
    for (case, _) in PAIRS {
        judge(&rows, case, document);
    }
    outcome
}

/// Two hosts with two links, and agents that use both.
struct Place {
    case: String,
    specs: [LinkSpec; 2],
    time: Duration,
    /// The agents, and whether they use both links.
    agents: Option<(bool, Vec<Agent>)>,
    lab: Lab,
}

impl Place {
    fn make(
        case: &str,
        links: &[&str; 2],
        options: &Options,
        document: &mut Document,
    ) -> Result<Self, LabError> {
        let [first, second] = links.map(|text| {
            let spec: Result<LinkSpec, _> = text.parse();
            spec.map_err(|error| LabError::Which(format!("{error}")))
        });
        let specs = [first?, second?];
        let mut lab = Lab::create(&Plan {
            purpose: format!("bench streams {case}"),
            hosts: 2,
            link: specs[0],
            seed: options.seed,
        })?;
        lab.add_second_link((0, 1), specs[1], options.seed + 1)?;
        document.add_link(specs[0], lab.measure_link(specs[0])?);
        document.add_link(specs[1], lab.measure_second_link(specs[1])?);
        Ok(Self {
            case: case.to_owned(),
            specs,
            time: Duration::from_secs(if options.quick { 12 } else { 20 }),
            agents: None,
            lab,
        })
    }

    /// Starts agents that use both links, or do not, unless they run.
    fn start_agents(&mut self, both: bool) -> Result<(), LabError> {
        if self.agents.as_ref().is_some_and(|(with, _)| *with == both) {
            return Ok(());
        }
        self.agents = None;
        let tables = [0, 1].map(|index| both_links(self.lab.hosts(), index));
        let qemus = agent::tables()?;
        let agents = agent::start_each(&mut self.lab, |index| {
            let mut table = qemus.clone();
            if both {
                table.extend(tables.get(index).cloned().unwrap_or_default());
            }
            Ok(table)
        })?;
        self.agents = Some((both, agents));
        Ok(())
    }

    fn links(&self) -> Result<[&Control; 2], LabError> {
        Ok([self.lab.link(0, 1)?, self.lab.second_link(0, 1)?])
    }

    fn carried_by_each(&self) -> Result<[u64; 2], LabError> {
        let [first, second] = self.links()?.map(Control::stats);
        Ok([first?.forth.carried_bytes, second?.forth.carried_bytes])
    }

    /// Measures one migration's data path, driven through the product's own command.
    fn measure(&self, used: Use, repeat: u32) -> Result<Row, LabError> {
        let links = self.links()?;
        for link in links {
            link.heal()?;
        }
        // A cut would take what ends the last measurement.
        interrupt::sleep(SETTLING)?;
        let (from_beginning, in_the_middle) = used.cuts();
        if let Some(link) = from_beginning.and_then(|index| links.get(index)) {
            link.cut(HOUR)?;
        }
        let seconds = self.time.as_secs().to_string();
        let peer = self.lab.host(1)?.name();
        let agents = self.agents.as_ref();
        let agent = agents.and_then(|(_, agents)| agents.first());
        let agent = agent.ok_or_else(|| LabError::Which("no agents were started".to_owned()))?;
        let mut command: Command = agent.command()?;
        command.args(["--json", "host", "probe", peer, "--seconds", &seconds]);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let carried = || {
            self.carried_by_each()
                .map(|bytes| bytes.iter().sum::<u64>())
        };
        let before = carried()?;
        let at_first = self.carried_by_each()?;
        let probe = command
            .spawn()
            .during(|| "start a measurement".to_owned())?;
        let begun = || carried().is_ok_and(|now| now > before + BEGUN_BYTES);
        let cut_at = match in_the_middle.and_then(|index| links.get(index)) {
            Some(link) => {
                wait_until(BEGIN_LIMIT, begun);
                let began = Instant::now();
                interrupt::sleep(self.time.mul_f64(CUT_AT))?;
                link.cut(HOUR)?;
                Some(began.elapsed())
            }
            None => None,
        };
        let said = probe.wait_with_output();
        let said = said.during(|| "wait for a measurement".to_owned())?;
        for link in links {
            link.heal()?;
        }
        let [first, second] = self.carried_by_each()?;
        let probe = if said.status.success() {
            serde_json::from_slice(&said.stdout).map_err(|error| error.to_string())
        } else {
            Err(format!("it ended with {}", said.status))
        };
        let probe: ProbeResult = probe.map_err(|message| LabError::Answer {
            what: "longhaul host probe".to_owned(),
            message,
        })?;
        let rates = &probe.per_second_bps;
        Ok(Row {
            system: "longhaul",
            case: self.case.clone(),
            links: self.specs.map(Into::into),
            used,
            repeat,
            throughput_bps: probe.rate_bps.map(|bps| bps as f64),
            cut_at_s: cut_at.map(|at| at.as_secs_f64()),
            after_cut_bps: cut_at.and_then(|at| rate_after(rates, at.as_secs_f64())),
            per_second_bps: probe.per_second_bps,
            paths: probe.paths,
            link_bytes: [first - at_first[0], second - at_first[1]],
        })
    }
}

/// Returns the mean rate from a moment on, of rates by second. Of the second with the moment in it,
/// the time before counts as the second before.
fn rate_after(rates: &[u64], at_s: f64) -> Option<f64> {
    let second = at_s.floor();
    let within = at_s - second;
    let index = second as usize;
    let before = *rates.get(index.checked_sub(1)?)? as f64;
    let rest: f64 = rates.get(index..)?.iter().map(|rate| *rate as f64).sum();
    let time_s = rates.len() as f64 - at_s;
    (time_s >= 1.0).then(|| (rest - before * within).max(0.0) / time_s)
}

/// Adds the checks of a pair of links.
fn judge(rows: &[Row], case: &str, document: &mut Document) {
    let of = |used: Use, value: fn(&Row) -> Option<f64>| {
        let rows = rows.iter().filter(|row| row.case == case);
        median(rows.filter(|row| row.used == used).filter_map(value))
    };
    if !rows.iter().any(|row| row.case == case) {
        return; // not selected
    }
    let whole = |row: &Row| row.throughput_bps;
    let [first, second] = [Use::First, Use::Second].map(|used| of(used, whole));
    let sum = first.zip(second).map(|(first, second)| first + second);
    let ratio = of(Use::Both, whole).zip(sum).map(|(both, sum)| both / sum);
    let name = format!("both_vs_sum.{case}");
    document.add_check(&name, ratio, Sense::AtLeast, TOGETHER);
    for (used, left) in [(Use::CutFirst, second), (Use::CutSecond, first)] {
        let after = of(used, |row| row.after_cut_bps);
        let ratio = after.zip(left).map(|(after, left)| after / left);
        let name = format!("after_{}_vs_other.{case}", used.name());
        document.add_check(&name, ratio, Sense::AtLeast, AFTER_CUT);
    }
}

fn show(row: &Row) -> String {
    let mbit = |bps: Option<f64>| bps.map_or("-".to_owned(), |bps| format!("{:.1}", bps / 1e6));
    let mut line = format!(
        "{:<10} {:<12} #{} {:>6} Mbit/s  {:.1} and {:.1} MB",
        row.case,
        row.used.name(),
        row.repeat,
        mbit(row.throughput_bps),
        row.link_bytes[0] as f64 / 1e6,
        row.link_bytes[1] as f64 / 1e6,
    );
    if let Some(at_s) = row.cut_at_s {
        let after = mbit(row.after_cut_bps);
        line += &format!("  {after} after the cut at {at_s:.1} s");
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_after_a_cut_leaves_out_what_came_before_it() {
        // 90 until the middle of the third second, then nothing for a quarter, then 40.
        let rates = [90, 90, 45 + 10, 40, 40, 40];
        let after = rate_after(&rates, 2.5).unwrap();
        assert!((after - 130.0 / 3.5).abs() < 1e-9, "{after}");
        assert_eq!(rate_after(&rates, 5.5), None, "too late to say");
        assert_eq!(rate_after(&rates, 0.5), None, "nothing before");
        assert_eq!(rate_after(&[], 2.5), None);
    }

    fn row(used: Use, throughput_bps: f64, after_cut_bps: Option<f64>) -> Row {
        let spec: LinkSpec = "50mbit,20ms".parse().unwrap();
        Row {
            system: "longhaul",
            case: "50_and_50".to_owned(),
            links: [spec, spec].map(Into::into),
            used,
            repeat: 1,
            throughput_bps: Some(throughput_bps),
            per_second_bps: Vec::new(),
            cut_at_s: None,
            after_cut_bps,
            paths: Vec::new(),
            link_bytes: [0, 0],
        }
    }

    #[test]
    fn the_bars_are_the_sum_of_both_links_and_the_one_that_is_left() {
        let rows = [
            row(Use::First, 40e6, None),
            row(Use::Second, 50e6, None),
            row(Use::Both, 81e6, None),
            row(Use::CutFirst, 60e6, Some(40e6)),
        ];
        let mut document = Document::new("streams");
        judge(&rows, "50_and_50", &mut document);
        judge(&rows, "50_and_20", &mut document);
        let value = serde_json::to_value(&document).unwrap();
        let checks = value["checks"].as_array().unwrap();
        assert_eq!(
            checks.len(),
            3,
            "a pair that was not measured is not judged"
        );
        assert_eq!(checks[0]["value"], 0.9);
        assert_eq!(checks[0]["holds"], true);
        assert_eq!(checks[1]["value"], 0.8, "beside the second, which is left");
        assert_eq!(checks[1]["holds"], false);
        assert_eq!(checks[2]["holds"], false, "not measured does not hold");
    }
}
