//! Defines the document that every bench prints: the measurements, their environment, and whether
//! the checks hold.

use std::fs;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::Value;

use longhaul_lab::lab::say;
use longhaul_lab::link::measure::Measured;
use longhaul_lab::link::spec::LinkSpec;
use longhaul_lab::process::run;

/// The results of a bench. The document grows while the bench runs, so that an interrupted one can
/// print its results so far.
#[derive(Debug, Serialize)]
pub struct Document {
    bench: String,
    commit: Option<String>,
    /// The time of its beginning, in UTC.
    started: Option<String>,
    /// The command that repeats it.
    command: String,
    machine: Machine,
    /// The link, or the first of several.
    link: Option<LinkFigures>,
    /// All links of a bench that uses several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    links: Vec<LinkFigures>,
    rows: Vec<Value>,
    checks: Vec<Check>,
}

/// The environment of a bench. Irrelevant parts are null.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    /// The processor's name.
    pub cpu: Option<String>,
    /// The number of processors available to this bench.
    pub cores: usize,
    /// The kernel's release.
    pub kernel: Option<String>,
    /// The accelerator of guests: `kvm` or `tcg`.
    pub accel: Option<String>,
    /// The version of QEMU.
    pub qemu: Option<String>,
}

/// A link as requested, in rows.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct AskedLink {
    /// Bits per second.
    pub rate_bps: u64,
    /// Round-trip time in ms.
    pub rtt_ms: f64,
    /// Share of frames lost.
    pub loss: f64,
}

impl From<LinkSpec> for AskedLink {
    fn from(spec: LinkSpec) -> Self {
        Self {
            rate_bps: spec.rate_bps,
            rtt_ms: spec.rtt.as_secs_f64() * 1e3,
            loss: spec.loss,
        }
    }
}

/// The requested properties of a link, and those measured before the bench used it.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct LinkFigures {
    /// The requested properties.
    pub asked: AskedLink,
    /// The measured properties.
    pub measured: Measured,
}

/// The side of the limit that is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sense {
    /// The value holds when it is the limit or less.
    AtMost,
    /// The value holds when it is the limit or more.
    AtLeast,
}

/// A check: a limit for a value of this run.
#[derive(Debug, Clone, Serialize)]
pub struct Check {
    /// The value and its case: `bytes_vs_qemu_default.database`.
    pub name: String,
    /// Computed from the rows; null when they are not sufficient, and then the check does not hold.
    pub value: Option<f64>,
    /// The limit.
    pub limit: f64,
    /// The side of the limit on which the value must be.
    pub sense: Sense,
    /// Whether the check holds.
    pub holds: bool,
    /// The 95 % confidence interval of the true value, where that is what is judged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval: Option<[f64; 2]>,
}

impl Document {
    /// Creates a document without rows, for this machine and commit.
    pub fn new(bench: &str) -> Self {
        Self {
            bench: bench.to_owned(),
            commit: commit(),
            started: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .ok()
                .map(|time| utc(time.as_secs())),
            command: command(),
            machine: Machine::this(),
            link: None,
            links: Vec::new(),
            rows: Vec::new(),
            checks: Vec::new(),
        }
    }

    /// Returns the bench's name.
    pub fn bench(&self) -> &str {
        &self.bench
    }

    /// Returns the environment, to add the accelerator of guests.
    pub fn machine_mut(&mut self) -> &mut Machine {
        &mut self.machine
    }

    /// Adds a link with its measured properties, and prints it.
    pub fn add_link(&mut self, asked: LinkSpec, measured: Measured) {
        say(&format!(
            "link {asked}: measured {:.2} Mbit/s, {:.1} ms round trip, {:.2} % lost",
            measured.rate_bps / 1e6,
            measured.rtt_ms,
            measured.loss * 100.0
        ));
        let figures = LinkFigures {
            asked: asked.into(),
            measured,
        };
        match self.link {
            None => self.link = Some(figures),
            Some(first) => {
                if self.links.is_empty() {
                    self.links.push(first);
                }
                self.links.push(figures);
            }
        }
    }

    /// Adds a row, and prints it as one line.
    pub fn add_row(&mut self, row: &impl Serialize, line: &str) {
        say(line);
        match serde_json::to_value(row) {
            Ok(value) => self.rows.push(value),
            // A row is plain data with names for keys: this cannot happen, and must not be hidden.
            Err(error) => say(&format!("error: a row could not be written: {error}")),
        }
    }

    /// Compares a value with a limit. An absent value, or one that is not a number, does not hold.
    pub fn add_check(&mut self, name: &str, value: Option<f64>, sense: Sense, limit: f64) {
        let value = value.filter(|value| value.is_finite());
        let holds = value.is_some_and(|value| match sense {
            Sense::AtMost => value <= limit,
            Sense::AtLeast => value >= limit,
        });
        self.checks.push(Check {
            name: name.to_owned(),
            value,
            limit,
            sense,
            holds,
            interval: None,
        });
    }

    /// Adds the 95 % confidence interval of the true value to the latest check.
    pub fn add_interval(&mut self, interval: [f64; 2]) {
        if let Some(check) = self.checks.last_mut() {
            check.interval = Some(interval);
        }
    }

    /// Returns the rows so far.
    pub fn rows(&self) -> &[Value] {
        &self.rows
    }

    /// Returns whether every check holds.
    pub fn holds(&self) -> bool {
        self.checks.iter().all(|check| check.holds)
    }

    /// Returns the checks as text, a line each.
    pub fn show_checks(&self) -> String {
        self.checks
            .iter()
            .map(|check| {
                let mark = if check.holds { "holds " } else { "FAILS " };
                let sense = match check.sense {
                    Sense::AtMost => "at most",
                    Sense::AtLeast => "at least",
                };
                let value = check
                    .value
                    .map_or_else(|| "not measured".to_owned(), |value| format!("{value:.3}"));
                let interval = check.interval.map_or_else(String::new, |[low, high]| {
                    format!(", the true value between {low:.3} and {high:.3}")
                });
                format!(
                    "{mark} {}: {value} ({sense} {}){interval}\n",
                    check.name, check.limit
                )
            })
            .collect()
    }
}

impl Machine {
    /// Returns this machine, without the accelerator of guests.
    fn this() -> Self {
        let cpu = fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("model name"))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        });
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").ok();
        Self {
            cpu,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: kernel.map(|text| text.trim().to_owned()),
            accel: None,
            qemu: None,
        }
    }
}

/// Returns the commit of the checkout of this build, marked when it has changes on top.
fn commit() -> Option<String> {
    let mut command = Command::new("git");
    command.args(["-C", env!("CARGO_MANIFEST_DIR")]).args([
        "-c",
        "safe.directory=*",
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]);
    // Without git, or away from the checkout, the commit is unknown: the document has null.
    run(&mut command).ok().map(|text| text.trim().to_owned())
}

/// Returns the command line, without the program's folder.
fn command() -> String {
    let arguments = std::env::args().skip(1);
    let words: Vec<String> = std::iter::once("lab".to_owned()).chain(arguments).collect();
    words.join(" ")
}

/// Returns a time in ISO 8601 form, from seconds since 1970.
fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Years begin in March, so that the leap day is their last; every 400 of them repeat.
    let from_march = days + 719_468;
    let (era, day) = (from_march / 146_097, from_march % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    format!(
        "{:04}-{month:02}-{day:02} {:02}:{:02} UTC",
        year + 400 * era + next,
        rest / 3_600,
        rest / 60 % 60
    )
}

/// Returns the median; the mean of the middle two of an even number.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    if sorted.len() % 2 == 1 {
        return Some(upper);
    }
    Some((sorted.get(middle - 1)? + upper) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_the_keys_that_its_readers_expect() {
        let mut document = Document::new("link");
        let measured = Measured {
            rate_bps: 99.9e6,
            rtt_ms: 20.3,
            loss: 0.0,
            datagrams: 1000,
        };
        document.add_link("100mbit,20ms".parse().unwrap(), measured);
        document.add_row(&serde_json::json!({"system": "longhaul"}), "");
        document.add_check("a.b", Some(0.5), Sense::AtMost, 0.5);
        document.machine_mut().accel = Some("tcg".to_owned());
        let value = serde_json::to_value(&document).unwrap();
        assert_eq!(value["bench"], "link");
        assert_eq!(
            value["link"],
            serde_json::json!({
                "asked": {"rate_bps": 100_000_000, "rtt_ms": 20.0, "loss": 0.0},
                "measured": {"rate_bps": 99.9e6, "rtt_ms": 20.3, "loss": 0.0},
            })
        );
        assert_eq!(value["rows"], serde_json::json!([{"system": "longhaul"}]));
        assert_eq!(
            value["checks"],
            serde_json::json!([
                {"name": "a.b", "value": 0.5, "limit": 0.5, "sense": "at_most", "holds": true}
            ])
        );
        assert_eq!(value["machine"]["accel"], "tcg");
        assert_eq!(value["machine"]["qemu"], Value::Null);
        assert!(value["machine"]["cores"].as_u64().unwrap() >= 1);
        assert!(
            value.get("links").is_none(),
            "one link is not a list of links"
        );
        document.add_link("1gbit,20ms".parse().unwrap(), measured);
        let value = serde_json::to_value(&document).unwrap();
        assert_eq!(value["links"].as_array().unwrap().len(), 2);
        assert_eq!(value["link"]["asked"]["rate_bps"], 100_000_000);
    }

    #[test]
    fn a_check_holds_only_with_a_value_on_the_right_side() {
        let holds = |value: Option<f64>, sense: Sense, limit: f64| {
            let mut document = Document::new("x");
            document.add_check("c", value, sense, limit);
            document.holds()
        };
        assert!(holds(Some(0.9), Sense::AtLeast, 0.9));
        assert!(!holds(Some(0.89), Sense::AtLeast, 0.9));
        assert!(holds(Some(0.6), Sense::AtMost, 0.6));
        assert!(!holds(Some(0.61), Sense::AtMost, 0.6));
        assert!(!holds(None, Sense::AtMost, 1.0));
        assert!(!holds(Some(f64::NAN), Sense::AtLeast, 0.0));
        assert!(!holds(Some(f64::INFINITY), Sense::AtLeast, 0.0));
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (1_709_251_199, "2024-02-29 23:59 UTC"),
            (1_709_251_200, "2024-03-01 00:00 UTC"),
            (1_798_761_599, "2026-12-31 23:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ] {
            assert_eq!(utc(seconds), expected);
        }
    }

    #[test]
    fn the_median_is_the_middle_value() {
        assert_eq!(median([]), None);
        assert_eq!(median([3.0]), Some(3.0));
        assert_eq!(median([9.0, 1.0, 5.0]), Some(5.0));
        assert_eq!(median([1.0, 2.0, 4.0, 100.0]), Some(3.0));
    }
}
