//! Measures a link's rate, round-trip time and loss from inside the hosts, and compares them with
//! the request.

use std::net::{SocketAddr, UdpSocket};
use std::process::Command;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::End;
use super::spec::LinkSpec;
use crate::error::{During, LabError};
use crate::lab::say;

/// Payload of a full datagram, and its overhead of Ethernet, IP and UDP.
const PAYLOAD_BYTES: usize = 1400;
const HEADER_BYTES: usize = 14 + 20 + 8;
/// The number of datagrams in a write that the kernel segments; small relative to any link's queue.
const DATAGRAMS_A_WRITE: u64 = 16;
/// How long each direction is filled, and how much of the beginning is ignored.
const FILL: Duration = Duration::from_millis(1600);
const WARM_UP: Duration = Duration::from_millis(300);
/// The tolerance of a rate as a share; that of a round-trip time has 2 ms in addition.
const TOLERANCE: f64 = 0.05;
const RTT_TOLERANCE_MS: f64 = 2.0;
/// The tolerance of a loss, to which four standard deviations for the number of datagrams are
/// added.
const LOSS_TOLERANCE: f64 = 0.002;

/// The measured properties of a link.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Bits of Ethernet frames per second: the slower of the two directions.
    pub rate_bps: f64,
    /// Minimum round-trip time of the empty link, in ms.
    pub rtt_ms: f64,
    /// Share of datagrams lost at a rate well below the link's; both directions.
    pub loss: f64,
    /// The number of datagrams in the measurement of the loss.
    #[serde(skip)]
    pub datagrams: u64,
}

/// Measures a link; it must be otherwise unused.
///
/// # Errors
/// When no datagram arrives, or the tools for it are missing.
pub fn measure(ends: [End<'_>; 2], spec: LinkSpec) -> Result<Measured, LabError> {
    let [first, second] = ends;
    let rtt_ms = round_trip_ms(first, second)?;
    let forth = blast(first, second, spec, Load::Full)?.rate_bps;
    let back = blast(second, first, spec, Load::Full)?.rate_bps;
    // Light loads do not disturb each other.
    let (forth_light, back_light) = std::thread::scope(|scope| {
        let back = scope.spawn(|| blast(second, first, spec, Load::Light));
        let forth = blast(first, second, spec, Load::Light);
        let back = back
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (forth, back)
    });
    let (forth_light, back_light) = (forth_light?, back_light?);
    let sent = forth_light.sent + back_light.sent;
    let arrived = forth_light.arrived + back_light.arrived;
    Ok(Measured {
        rate_bps: forth.min(back),
        rtt_ms,
        loss: 1.0 - arrived as f64 / sent.max(1) as f64,
        datagrams: sent,
    })
}

/// Measures a link and compares it with the request. Tries again once: a busy machine may have been
/// late.
///
/// # Errors
/// When it cannot be measured, or differs by more than the laboratory's tolerances.
pub fn measure_as_asked(ends: [End<'_>; 2], asked: LinkSpec) -> Result<Measured, LabError> {
    let first = measure(ends, asked)?;
    match judge(asked, first) {
        Ok(()) => Ok(first),
        Err(why) => {
            say(&format!("{why}; measuring again"));
            let second = measure(ends, asked)?;
            judge(asked, second).map(|()| second)
        }
    }
}

/// Compares the measured link with the requested one.
///
/// # Errors
/// With the differences, when they exceed the laboratory's tolerances.
pub fn judge(asked: LinkSpec, measured: Measured) -> Result<(), LabError> {
    let asked_rtt_ms = asked.rtt.as_secs_f64() * 1e3;
    let rate = measured.rate_bps / asked.rate_bps as f64;
    let mut wrong = Vec::new();
    if (rate - 1.0).abs() > TOLERANCE {
        wrong.push(format!(
            "rate {:.1} Mbit/s instead of {:.1}",
            measured.rate_bps / 1e6,
            asked.rate_bps as f64 / 1e6
        ));
    }
    if (measured.rtt_ms - asked_rtt_ms).abs() > RTT_TOLERANCE_MS + TOLERANCE * asked_rtt_ms {
        wrong.push(format!(
            "round trip {:.1} ms instead of {asked_rtt_ms:.1}",
            measured.rtt_ms
        ));
    }
    let chance = asked.loss * (1.0 - asked.loss) / measured.datagrams.max(1) as f64;
    if (measured.loss - asked.loss).abs() > LOSS_TOLERANCE + 4.0 * chance.sqrt() {
        wrong.push(format!(
            "loss {:.2} % instead of {:.2}",
            measured.loss * 100.0,
            asked.loss * 100.0
        ));
    }
    if wrong.is_empty() {
        return Ok(());
    }
    Err(LabError::Link(format!(
        "{} (hint: is this machine busy with something else? ask for a slower link, or wait)",
        wrong.join(", ")
    )))
}

fn round_trip_ms(from: End<'_>, to: End<'_>) -> Result<f64, LabError> {
    // Some pings are lost on a lossy link; the minimum of twenty is that of the empty link.
    let mut command = Command::new("ping");
    command.args(["-n", "-q", "-c", "20", "-i", "0.05", "-W", "5", to.address]);
    let said = from.namespace.output(&mut command)?;
    parse_ping(&said).ok_or_else(|| LabError::Answer {
        what: "ping".to_owned(),
        message: format!("no round-trip time in `{}`", said.trim()),
    })
}

/// Parses the minimum from `rtt min/avg/max/mdev = 20.1/20.2/20.4/0.1 ms`.
fn parse_ping(said: &str) -> Option<f64> {
    let (_, times) = said.split_once("min/avg/max")?;
    let (_, times) = times.split_once('=')?;
    times.split('/').next()?.trim().parse().ok()
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Load {
    /// A little more than the link carries: its rate is that of the arrivals.
    Full,
    /// A third of the link's rate, at most two thousand a second: missing datagrams were lost.
    Light,
}

struct Blast {
    sent: u64,
    arrived: u64,
    rate_bps: f64,
}

/// Sends datagrams in one direction and counts the arrivals.
fn blast(from: End<'_>, to: End<'_>, spec: LinkSpec, load: Load) -> Result<Blast, LabError> {
    let doing = || format!("measure the link from {} to {}", from.name, to.name);
    let address = |end: End<'_>| -> Result<SocketAddr, LabError> {
        format!("{}:0", end.address)
            .parse()
            .map_err(|_| LabError::Answer {
                what: format!("the address of {}", end.name),
                message: end.address.to_owned(),
            })
    };
    let (own, other) = (address(from)?, address(to)?);
    let receiver = to
        .namespace
        .enter(|| UdpSocket::bind(other))?
        .during(doing)?;
    let sender = from
        .namespace
        .enter(|| UdpSocket::bind(own))?
        .during(doing)?;
    let target = receiver.local_addr().during(doing)?;
    sender.connect(target).during(doing)?;
    enlarge(&receiver);
    let quiet = spec.rtt / 2 + spec.jitter + Duration::from_millis(500);
    receiver
        .set_read_timeout(Some(quiet.max(Duration::from_millis(500))))
        .during(doing)?;
    let counting = std::thread::spawn(move || count(&receiver));
    let sent = send(&sender, spec, load);
    let arrivals = counting
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    let sent = sent.during(doing)?;
    let rate_bps = arrivals
        .rate_bps()
        .ok_or_else(|| LabError::Link(format!("nothing got from {} to {}", from.name, to.name)))?;
    Ok(Blast {
        sent,
        arrived: arrivals.all,
        rate_bps,
    })
}

/// Enlarges the buffer for arrivals while the receiver waits for the processor.
fn enlarge(socket: &UdpSocket) {
    use nix::sys::socket::{setsockopt, sockopt};
    // Refused without privileges: the default buffer is used then.
    let _ = setsockopt(socket, sockopt::RcvBufForce, &(8 << 20));
}

/// Returns whether the kernel segments writes to the socket into datagrams.
fn segment(socket: &UdpSocket) -> bool {
    use nix::sys::socket::{setsockopt, sockopt};
    setsockopt(socket, sockopt::UdpGsoSegment, &(PAYLOAD_BYTES as i32)).is_ok()
}

fn send(socket: &UdpSocket, spec: LinkSpec, load: Load) -> std::io::Result<u64> {
    let frame_bits = ((PAYLOAD_BYTES + HEADER_BYTES) * 8) as f64;
    let link_frames_per_s = spec.rate_bps as f64 / frame_bits;
    let frames_per_s = match load {
        Load::Full => link_frames_per_s * 1.1 + 10.0,
        Load::Light => (link_frames_per_s / 3.0).clamp(5.0, 2000.0),
    };
    // On a fast link the kernel segments one large write into the datagrams where it can.
    let fast = load == Load::Full && frames_per_s > 10_000.0 && segment(socket);
    let datagrams = if fast { DATAGRAMS_A_WRITE } else { 1 };
    let payload = vec![0_u8; PAYLOAD_BYTES * datagrams as usize];
    let started = Instant::now();
    let mut sent = 0_u64;
    while started.elapsed() < FILL {
        let due = (started.elapsed().as_secs_f64() * frames_per_s) as u64;
        while sent + datagrams <= due {
            match socket.send(&payload) {
                Ok(_) => sent += datagrams,
                // The interface's queue is full, and so is the link.
                Err(error) if error.raw_os_error() == Some(nix::libc::ENOBUFS) => break,
                Err(error) => return Err(error),
            }
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    Ok(sent)
}

/// The observations of a receiver.
struct Arrivals {
    all: u64,
    /// Time of the first datagram that counts for the rate, and of the last.
    window: Option<(Instant, Instant)>,
    /// The number of datagrams after the first that counts.
    in_window: u64,
}

impl Arrivals {
    fn rate_bps(&self) -> Option<f64> {
        let (from, to) = self.window?;
        let bits = (self.in_window * ((PAYLOAD_BYTES + HEADER_BYTES) * 8) as u64) as f64;
        let seconds = (to - from).as_secs_f64();
        (seconds > 0.0).then(|| bits / seconds)
    }
}

/// Counts datagrams until none arrives within the socket's time-out.
fn count(socket: &UdpSocket) -> Arrivals {
    let mut buffer = [0_u8; 2048];
    let mut first: Option<Instant> = None;
    let mut arrivals = Arrivals {
        all: 0,
        window: None,
        in_window: 0,
    };
    let started = Instant::now();
    loop {
        if socket.recv(&mut buffer).is_err() {
            // At a time-out the sender is done - or has not begun, on the slowest allowed link.
            if arrivals.all > 0 || started.elapsed() > Duration::from_secs(15) {
                return arrivals;
            }
            continue;
        }
        let now = Instant::now();
        arrivals.all += 1;
        let beginning = *first.get_or_insert(now);
        if now - beginning < WARM_UP {
            continue;
        }
        match &mut arrivals.window {
            None => arrivals.window = Some((now, now)),
            Some((_, last)) => {
                *last = now;
                arrivals.in_window += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_time_is_read_from_what_ping_says() {
        let said = "20 packets transmitted, 20 received, 0% packet loss, time 950ms\n\
                    rtt min/avg/max/mdev = 20.114/20.290/20.600/0.100 ms\n";
        assert_eq!(parse_ping(said), Some(20.114));
        assert_eq!(parse_ping("20 packets transmitted, 0 received"), None);
        assert_eq!(parse_ping(""), None);
    }

    #[test]
    fn only_a_link_within_the_tolerances_is_accepted() {
        let asked: LinkSpec = "100mbit,20ms,loss=1%".parse().unwrap();
        let right = Measured {
            rate_bps: 1e8,
            rtt_ms: 20.2,
            loss: 0.011,
            datagrams: 6400,
        };
        let verdict = |measured: Measured| judge(asked, measured).map_err(|it| it.to_string());
        assert_eq!(verdict(right), Ok(()));
        for (measured, named) in [
            (
                Measured {
                    rate_bps: 0.94e8,
                    ..right
                },
                "rate",
            ),
            (
                Measured {
                    rate_bps: 1.06e8,
                    ..right
                },
                "rate",
            ),
            (
                Measured {
                    rtt_ms: 23.1,
                    ..right
                },
                "round trip",
            ),
            (
                Measured {
                    rtt_ms: 16.9,
                    ..right
                },
                "round trip",
            ),
            (Measured { loss: 0.0, ..right }, "loss"),
            (
                Measured {
                    loss: 0.02,
                    ..right
                },
                "loss",
            ),
        ] {
            let error = verdict(measured).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
        let borders = Measured {
            rate_bps: 0.951e8,
            rtt_ms: 22.9,
            ..right
        };
        assert_eq!(verdict(borders), Ok(()));
    }
}
