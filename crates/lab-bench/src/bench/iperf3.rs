//! Runs iperf3 between two hosts and reads what it and `ping` print.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde::Serialize;

use longhaul_lab::error::{During, LabError};
use longhaul_lab::lab::Host;
use longhaul_lab::link::stats::DirectionStats;
use longhaul_lab::process;

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Way {
    /// From the first host to the second.
    Forth,
    /// From the second host to the first.
    Back,
}

/// Round trips, in microseconds.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Latency {
    pub(super) p50: Option<f64>,
    pub(super) p99: Option<f64>,
}

/// The results of one transfer.
#[derive(Debug)]
pub(super) struct Transfer {
    /// Bits per second, as the receiver counted.
    pub(super) bps: f64,
    /// The processor time of both ends, where it is known.
    pub(super) cpu_s: Option<f64>,
    /// Intervals of iperf3's receiver: beginning, end and rate.
    pub(super) stretches: Vec<(f64, f64, f64)>,
}

impl Transfer {
    /// Returns the rate over the intervals that are wholly between two moments.
    pub(super) fn bps_between(&self, from: Duration, to: Duration) -> Result<f64, LabError> {
        let (mut bits, mut seconds) = (0.0, 0.0);
        for (began, ended, bps) in &self.stretches {
            if *began >= from.as_secs_f64() - 0.1 && *ended <= to.as_secs_f64() + 0.1 {
                bits += bps * (ended - began);
                seconds += ended - began;
            }
        }
        if seconds > 0.0 {
            return Ok(bits / seconds);
        }
        Err(LabError::Answer {
            what: "iperf3's server".to_owned(),
            message: "it counted nothing in the time that is judged".to_owned(),
        })
    }
}

/// Sends with TCP between two hosts for this long. The second has this address.
pub(super) fn transfer(
    [from, to]: [&Host; 2],
    address: &str,
    algorithm: &str,
    way: Way,
    time: Duration,
) -> Result<Transfer, LabError> {
    let mut server = Iperf3Server::start(to)?;
    let mut command = Command::new("iperf3");
    command.args(["-J", "-c", address, "-C", algorithm]);
    command.args(["-t", &time.as_secs().to_string()]);
    if way == Way::Back {
        command.arg("-R");
    }
    let said = from.output(&mut command);
    let counted = server.finish();
    let mut transfer = parse_iperf3(&said?)?;
    transfer.stretches = parse_stretches(&counted?);
    Ok(transfer)
}

/// An iperf3 server for one client.
struct Iperf3Server {
    process: Child,
    output: PathBuf,
}

impl Iperf3Server {
    fn start(host: &Host) -> Result<Self, LabError> {
        let mut command = Command::new("iperf3");
        let output = host.folder().join("iperf3-server.json");
        let file = File::create(&output).during(|| format!("make {}", output.display()))?;
        command.args(["-J", "-s", "-1"]);
        command.stdin(Stdio::null()).stdout(file);
        let process = host.spawn(&mut command)?;
        let server = Self { process, output };
        let listening = || {
            let table = host
                .namespace()
                .enter(|| std::fs::read_to_string("/proc/thread-self/net/tcp6"));
            matches!(table, Ok(Ok(table)) if has_listener(&table, 5201))
        };
        if process::wait_until(Duration::from_secs(20), listening) {
            return Ok(server);
        }
        Err(LabError::Late {
            what: "iperf3's server did not listen".to_owned(),
            seconds: 20,
            log: server.output.clone(),
        })
    }

    /// Waits for its end, which follows its client's, or forces it; returns its results.
    fn finish(&mut self) -> Result<String, LabError> {
        let limit = Duration::from_secs(5);
        process::wait_until(limit, || !matches!(self.process.try_wait(), Ok(None)));
        self.end();
        let path = &self.output;
        fs::read_to_string(path).during(|| format!("read {}", path.display()))
    }

    fn end(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Iperf3Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// Returns whether the kernel's table of TCP sockets has a listening one (state 0A) on this port.
fn has_listener(table: &str, port: u16) -> bool {
    let end = format!(":{port:04X}");
    table.lines().skip(1).any(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let local = fields.next().unwrap_or_default();
        local.ends_with(&end) && fields.nth(1) == Some("0A")
    })
}

/// Parses the receiver's results, and both ends' processor time, from iperf3's JSON.
fn parse_iperf3(said: &str) -> Result<Transfer, LabError> {
    let wrong = |message: &str| LabError::Answer {
        what: "iperf3".to_owned(),
        message: message.to_owned(),
    };
    let value: serde_json::Value =
        serde_json::from_str(said).map_err(|error| wrong(&error.to_string()))?;
    if let Some(error) = value["error"].as_str() {
        return Err(wrong(error));
    }
    let end = &value["end"];
    let bps = end["sum_received"]["bits_per_second"]
        .as_f64()
        .ok_or_else(|| wrong("it measured no rate"))?;
    let seconds = end["sum_received"]["seconds"].as_f64();
    let cpu = &end["cpu_utilization_percent"];
    let percent = cpu["host_total"].as_f64().zip(cpu["remote_total"].as_f64());
    Ok(Transfer {
        bps,
        cpu_s: percent
            .zip(seconds)
            .map(|((own, other), seconds)| (own + other) / 100.0 * seconds),
        stretches: Vec::new(),
    })
}

/// Parses a receiver's intervals from iperf3's JSON; empty where there are none.
fn parse_stretches(said: &str) -> Vec<(f64, f64, f64)> {
    let value: serde_json::Value = serde_json::from_str(said).unwrap_or_default();
    let Some(intervals) = value["intervals"].as_array() else {
        return Vec::new();
    };
    intervals
        .iter()
        .filter_map(|interval| {
            let sum = &interval["sum"];
            let number = |key: &str| sum[key].as_f64();
            Some((number("start")?, number("end")?, number("bits_per_second")?))
        })
        .collect()
}

/// Parses every `time=20.3 ms` of ping's output.
pub(super) fn parse_pings(said: &str) -> Latency {
    let mut times_us: Vec<f64> = said
        .lines()
        .filter_map(|line| {
            let (_, rest) = line.split_once("time=")?;
            rest.split_ascii_whitespace().next()?.parse::<f64>().ok()
        })
        .map(|ms| ms * 1e3)
        .collect();
    times_us.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let index = (times_us.len() as f64 * share).ceil() as usize;
        times_us.get(index.checked_sub(1)?).copied()
    };
    Latency {
        p50: at(0.5),
        p99: at(0.99),
    }
}

/// Returns the share of the frames between two readings that the link dropped.
pub(super) fn loss_between(before: &DirectionStats, after: &DirectionStats) -> Option<f64> {
    let dropped = |stats: &DirectionStats| {
        stats.dropped_cut + stats.dropped_loss + stats.dropped_queue + stats.refused
    };
    let offered = after.offered_frames - before.offered_frames;
    (offered > 0).then(|| (dropped(after) - dropped(before)) as f64 / offered as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iperf3_is_read_as_its_receiver_counted() {
        let said = r#"{"end": {"sum_sent": {"bits_per_second": 99e6},
            "sum_received": {"bits_per_second": 94e6, "seconds": 10.0},
            "cpu_utilization_percent": {"host_total": 3.0, "remote_total": 2.0}}}"#;
        let transfer = parse_iperf3(said).unwrap();
        assert_eq!(transfer.bps, 94e6);
        assert_eq!(transfer.cpu_s, Some(0.5));
        let error = parse_iperf3(r#"{"error": "unable to connect"}"#)
            .err()
            .unwrap();
        assert!(error.to_string().contains("unable to connect"));
        assert!(parse_iperf3("{}").is_err());
        assert!(parse_iperf3("no JSON").is_err());
    }

    #[test]
    fn a_flow_is_judged_by_the_seconds_in_which_it_was_not_alone() {
        let second = |start: f64, rate: f64| {
            serde_json::json!({
                "sum": {"start": start, "end": start + 1.0, "bits_per_second": rate}
            })
        };
        let intervals: Vec<_> = (0..6)
            .map(|n| second(f64::from(n), if n < 2 { 90e6 } else { 30e6 }))
            .collect();
        let said = serde_json::json!({"intervals": intervals}).to_string();
        let transfer = Transfer {
            bps: 50e6,
            cpu_s: None,
            stretches: parse_stretches(&said),
        };
        let between =
            |from, to| transfer.bps_between(Duration::from_secs(from), Duration::from_secs(to));
        assert_eq!(between(2, 6).unwrap(), 30e6);
        assert_eq!(between(0, 2).unwrap(), 90e6);
        assert!(between(6, 9).is_err());
        assert!(parse_stretches("no JSON").is_empty());
    }

    #[test]
    fn pings_give_percentiles() {
        let said: String = (1..=100)
            .map(|ms| format!("64 bytes from 10.77.0.2: icmp_seq={ms} ttl=64 time={ms}.5 ms\n"))
            .collect();
        let latency = parse_pings(&said);
        assert_eq!(latency.p50, Some(50_500.0));
        assert_eq!(latency.p99, Some(99_500.0));
        assert_eq!(parse_pings("").p50, None);
    }

    #[test]
    fn a_listener_is_found_by_port_and_state() {
        let table = "  sl  local_address remote_address st tx_queue\n\
            0: 00000000:1451 00000000:0000 0A 00000000:00000000 00:00000000\n\
            1: 0100007F:0050 0100007F:1451 01 00000000:00000000 00:00000000\n";
        assert!(has_listener(table, 5201));
        assert!(!has_listener(table, 80), "connected, not listening");
        assert!(!has_listener(table, 443));
    }
}
