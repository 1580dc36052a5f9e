//! Defines the specification of a link, and its text form: `100mbit,20ms,loss=1%`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use longhaul_protocol::units::{parse_bit_rate, parse_bytes, parse_duration};
use serde::{Deserialize, Serialize};

/// The minimum and maximum rates of the laboratory's links.
const RATE_BPS_MIN: u64 = 10_000;
const RATE_BPS_MAX: u64 = 10_000_000_000;
const RTT_MAX: Duration = Duration::from_secs(10);
/// The minimum size of a queue in bytes: some full frames and an acknowledgement or two.
const QUEUE_BYTES_MIN: u64 = 64 * 1024;

/// A link between two hosts, the same in both directions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinkSpec {
    /// Bits of Ethernet frames (without preamble and checksum) per second and direction.
    pub rate_bps: u64,
    /// Round-trip time of the empty link; each direction delays by half of it.
    pub rtt: Duration,
    /// Each direction's delay varies by up to this, uniformly; frames stay in order.
    pub jitter: Duration,
    /// Share of frames lost, per direction, independently.
    pub loss: f64,
    /// The maximum number of queued bytes at each end; further frames are dropped.
    pub queue_bytes: u64,
}

/// Why a text does not describe a link.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "link `{text}`: {reason} (a link is written as RATE,RTT - say 100mbit,20ms - then loss=1%, \
     jitter=2ms, queue=256KiB or queue=50ms)"
)]
pub struct ParseLinkError {
    text: String,
    reason: String,
}

impl LinkSpec {
    /// Returns a link with this rate and round-trip time, without loss or jitter, whose queue holds
    /// one round trip of data.
    pub fn new(rate_bps: u64, rtt: Duration) -> Self {
        Self {
            rate_bps,
            rtt,
            jitter: Duration::ZERO,
            loss: 0.0,
            queue_bytes: queue_of(rate_bps, rtt),
        }
    }

    /// Returns the same link with a share of its frames lost.
    pub fn with_loss(self, loss: f64) -> Self {
        Self { loss, ..self }
    }
}

fn queue_of(rate_bps: u64, time: Duration) -> u64 {
    ((rate_bps as f64 / 8.0 * time.as_secs_f64()) as u64).max(QUEUE_BYTES_MIN)
}

impl FromStr for LinkSpec {
    type Err = ParseLinkError;

    fn from_str(text: &str) -> Result<Self, ParseLinkError> {
        parse(text).map_err(|reason| ParseLinkError {
            text: text.chars().take(80).collect(),
            reason,
        })
    }
}

fn parse(text: &str) -> Result<LinkSpec, String> {
    let mut parts = text.split(',').map(str::trim);
    let rate = parts.next().unwrap_or_default();
    let rate_bps = parse_bit_rate(rate).map_err(|error| error.to_string())?;
    if !(RATE_BPS_MIN..=RATE_BPS_MAX).contains(&rate_bps) {
        return Err("the rate must be between 10kbit and 10gbit".to_owned());
    }
    let rtt = parts.next().ok_or("the round-trip time is missing")?;
    let rtt = parse_duration(rtt).map_err(|error| error.to_string())?;
    if rtt > RTT_MAX {
        return Err("the round-trip time must be at most 10s".to_owned());
    }
    let mut spec = LinkSpec::new(rate_bps, rtt);
    let mut seen = Vec::new();
    for part in parts {
        let (name, value) = part
            .split_once('=')
            .ok_or_else(|| format!("`{part}` is not NAME=VALUE"))?;
        if seen.contains(&name) {
            return Err(format!("`{name}` is given twice"));
        }
        seen.push(name);
        match name {
            "loss" => spec.loss = parse_share(value)?,
            "jitter" => {
                spec.jitter = parse_duration(value).map_err(|error| error.to_string())?;
                if spec.jitter > rtt / 2 {
                    return Err("the jitter must be at most half of the round trip".to_owned());
                }
            }
            "queue" => spec.queue_bytes = parse_queue(value, rate_bps)?,
            _ => return Err(format!("`{name}` is none of loss, jitter, queue")),
        }
    }
    Ok(spec)
}

/// Parses `1%` or `0.01`.
fn parse_share(text: &str) -> Result<f64, String> {
    let (number, divisor) = match text.strip_suffix('%') {
        Some(percent) => (percent, 100.0),
        None => (text, 1.0),
    };
    match number.trim().parse::<f64>() {
        Ok(value) if (0.0..=1.0).contains(&(value / divisor)) => Ok(value / divisor),
        _ => Err(format!("`{text}` is not a share (say 1% or 0.01)")),
    }
}

/// Parses a size, or a time, which is converted by the link's rate.
fn parse_queue(text: &str, rate_bps: u64) -> Result<u64, String> {
    let bytes = match parse_duration(text) {
        Ok(time) => (rate_bps as f64 / 8.0 * time.as_secs_f64()) as u64,
        Err(_) => parse_bytes(text).map_err(|_| {
            format!("queue `{text}` is neither a size (say 256KiB) nor a time (say 50ms)")
        })?,
    };
    if (2_000..=1 << 30).contains(&bytes) {
        Ok(bytes)
    } else {
        Err("the queue must hold between 2000 bytes and 1GiB".to_owned())
    }
}

impl fmt::Display for LinkSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}", show_rate(self.rate_bps), show_time(self.rtt))?;
        if self.loss > 0.0 {
            write!(f, ",loss={}%", self.loss * 100.0)?;
        }
        if !self.jitter.is_zero() {
            write!(f, ",jitter={}", show_time(self.jitter))?;
        }
        if self.queue_bytes != queue_of(self.rate_bps, self.rtt) {
            write!(f, ",queue={}B", self.queue_bytes)?;
        }
        Ok(())
    }
}

fn show_rate(rate_bps: u64) -> String {
    for (unit, factor) in [
        ("gbit", 1_000_000_000),
        ("mbit", 1_000_000),
        ("kbit", 1_000),
    ] {
        if rate_bps >= factor {
            return format!("{}{unit}", rate_bps as f64 / factor as f64);
        }
    }
    format!("{rate_bps}bit")
}

fn show_time(time: Duration) -> String {
    format!("{}ms", time.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_rate_and_round_trip_time() {
        let spec: LinkSpec = "100mbit,20ms".parse().unwrap();
        assert_eq!(spec.rate_bps, 100_000_000);
        assert_eq!(spec.rtt, Duration::from_millis(20));
        assert_eq!(spec.loss, 0.0);
        assert_eq!(spec.jitter, Duration::ZERO);
        assert_eq!(spec.queue_bytes, 250_000, "one round trip of data");
    }

    #[test]
    fn options_follow_in_any_order() {
        let spec: LinkSpec = "1gbit, 20ms, queue=50ms, jitter=2ms, loss=1%"
            .parse()
            .unwrap();
        assert_eq!(spec.rate_bps, 1_000_000_000);
        assert_eq!(spec.loss, 0.01);
        assert_eq!(spec.jitter, Duration::from_millis(2));
        assert_eq!(spec.queue_bytes, 6_250_000);
        let spec: LinkSpec = "10mbit,5ms,loss=0.001,queue=100KiB".parse().unwrap();
        assert_eq!(spec.loss, 0.001);
        assert_eq!(spec.queue_bytes, 102_400);
    }

    #[test]
    fn what_it_prints_reads_back_as_the_same_link() {
        for text in [
            "100mbit,20ms",
            "1.5gbit,0ms",
            "56kbit,300ms,loss=0.5%,jitter=2.5ms,queue=9000B",
        ] {
            let spec: LinkSpec = text.parse().unwrap();
            assert_eq!(spec.to_string(), text);
            assert_eq!(spec.to_string().parse::<LinkSpec>().unwrap(), spec);
        }
    }

    #[test]
    fn what_is_no_link_is_refused_with_the_reason() {
        for (text, reason) in [
            ("", "a rate"),
            ("100mbit", "round-trip time is missing"),
            ("20ms,100mbit", "a rate"),
            ("0mbit,20ms", "between"),
            ("100gbit,20ms", "between"),
            ("100mbit,20", "a time"),
            ("100mbit,11s", "at most 10s"),
            ("100mbit,20ms,loss=101%", "share"),
            ("100mbit,20ms,loss=-1%", "share"),
            ("100mbit,20ms,loss=NaN", "share"),
            ("100mbit,20ms,jitter=11ms", "half"),
            ("100mbit,20ms,queue=1B", "between"),
            ("100mbit,20ms,loss", "NAME=VALUE"),
            ("100mbit,20ms,loss=1%,loss=2%", "twice"),
            ("100mbit,20ms,colour=red", "none of"),
        ] {
            let error = text.parse::<LinkSpec>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
