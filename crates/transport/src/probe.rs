//! Measures a link: sends random frames over the bulk path for some time, counted by the receiver.

use crate::bulk::{
    BulkBinding, BulkOpening, BulkPurpose, BulkReceiver, BulkSender, BulkStats, BulkToken,
};
use crate::endpoint::{Dial, Endpoint};
use crate::error::{BulkError, CloseCode, ConnectError, LinkError};
use crate::gauge::{LinkGauge, LinkRate};
use crate::paths::PathTraffic;
use crate::rate::RateLimit;
use crate::stun::Reflexive;
use crate::tls::ALPN_BULK;
use bytes::Bytes;
use longhaul_protocol::{Attempt, AttemptId, Epoch, MigrationId};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tracing::debug;

/// The maximum duration of a measurement that a receiver accepts.
pub const PROBE_TIME_MAX: Duration = Duration::from_secs(300);
const REPORT_EVERY: Duration = Duration::from_millis(100);
/// The maximum size of a frame of 64 blocks.
const PROBE_FRAME_BYTES: usize = 128 << 10;
const RANDOM_BYTES: usize = 4 << 20;
const REPORT_BYTES: usize = 16;

/// The parameters of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeConfig {
    /// The duration of sending.
    pub duration: Duration,
    /// Limit in bits per second on the wire; `None` for no limit.
    pub bandwidth_bps: Option<u64>,
    /// The number of streams.
    pub streams: u8,
    /// Whether to end as soon as the rate is known, before `duration` is over.
    pub until_known: bool,
}

impl Default for ProbeConfig {
    fn default() -> Self {
        Self {
            duration: Duration::from_secs(5),
            bandwidth_bps: None,
            streams: 16,
            until_known: false,
        }
    }
}

/// One sample of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeSample {
    /// Time since the first frame was sent.
    pub at: Duration,
    /// Bytes of frames counted by the receiver.
    pub bytes_received: u64,
    /// Statistics of the connection.
    pub stats: BulkStats,
}

/// The results of a measurement.
#[derive(Debug, Clone, PartialEq)]
pub struct ProbeReport {
    /// Round-trip time before anything was sent.
    pub rtt_idle: Duration,
    /// Round-trip time while sending, smoothed, at the end.
    pub rtt_loaded: Duration,
    /// Frame bits per second counted by the receiver, from its first frame to its last report.
    pub throughput_bps: u64,
    /// The same over the second half of the time alone.
    pub throughput_late_bps: u64,
    /// The same in each whole second.
    pub per_second_bps: Vec<u64>,
    /// What each network path has carried.
    pub paths: Vec<PathTraffic>,
    /// The rate of the link in frame bits per second; `None` if it still grew at the end.
    pub rate_bps: Option<LinkRate>,
    /// Bits per second on the wire, headers and lost packets included.
    pub wire_bps: u64,
    /// Packets found lost, as a share of those sent.
    pub loss: f64,
    /// The address under which the other host sees this one; `None` if its agent did not answer
    /// while the link was measured. Older agents do not.
    pub reflexive: Option<Reflexive>,
}

/// Why a measurement failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ProbeError {
    /// No connection could be made.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The connection broke.
    #[error(transparent)]
    Bulk(#[from] BulkError),
    /// The receiver counted nothing, or its answer is malformed.
    #[error("the other host counted nothing")]
    NothingCounted,
}

impl Endpoint {
    /// Measures the link to a trusted host that permits queries; `watch` gets every report of the
    /// receiver, about ten a second.
    pub async fn probe(
        &self,
        name: &str,
        config: ProbeConfig,
        watch: impl FnMut(ProbeSample),
    ) -> Result<ProbeReport, ProbeError> {
        let host = self.inner.trusted(name)?;
        let dial = Dial {
            expected: Some(host.id),
            name: host.name.clone(),
            alpn: ALPN_BULK,
            limit: RateLimit::new(config.bandwidth_bps),
            paths: self.inner.paths_to(&host),
        };
        let (link, address) = self.dial_host(&host, &dial).await?;
        let opening = BulkOpening {
            purpose: BulkPurpose::Probe,
            streams: crate::bulk::streams_over(config.streams, &dial),
            token: BulkToken::from_bytes([0; 32]),
            binding: BulkBinding {
                attempt: AttemptId {
                    migration: MigrationId([0; 8]),
                    attempt: Attempt(0),
                },
                epoch: Epoch(0),
            },
        };
        let sender = crate::bulk::open(&self.inner, &dial, link, &opening).await?;
        let mut reflexive = None;
        let ask = async {
            // A peer is asked by what finds ways to it.
            if self.routes().peer_of(address).is_none() {
                match self.reflexive(address).await {
                    Ok(answer) => reflexive = Some(answer),
                    Err(error) => {
                        debug!(host = dial.name, %error, "its view of this host is unknown")
                    }
                }
            }
            std::future::pending::<Infallible>().await
        };
        let measured = tokio::select! {
            biased;
            never = ask => match never {},
            measured = measure(&sender, config, watch) => measured,
        };
        sender.close(CloseCode::Done, "measured");
        Ok(ProbeReport {
            reflexive,
            ..measured?
        })
    }
}

/// Sends for the given time and reads the receiver's reports.
async fn measure(
    sender: &BulkSender,
    config: ProbeConfig,
    mut watch: impl FnMut(ProbeSample),
) -> Result<ProbeReport, ProbeError> {
    let mut random = vec![0; RANDOM_BYTES];
    getrandom::fill(&mut random)
        .map_err(|e| LinkError::Failed(format!("no random numbers: {e}")))
        .map_err(BulkError::Lost)?;
    let random = Bytes::from(random);
    let idle = sender.stats();
    let start = Instant::now();
    let mut reports: Vec<(Duration, u64)> = Vec::new();
    let mut gauge = LinkGauge::default();
    let until = tokio::time::sleep(config.duration);
    tokio::pin!(until);
    let mut next = 0;
    loop {
        tokio::select! {
            () = &mut until => break,
            report = sender.acknowledgement() => {
                let report = report?.ok_or(ProbeError::NothingCounted)?;
                let (at, bytes) = read_report(&report).ok_or(ProbeError::NothingCounted)?;
                if let Some(before) = reports.last() {
                    let rate = rate(*before, (at, bytes)) as f64;
                    gauge.add(at, sender.stats().rtt, rate);
                }
                reports.push((at, bytes));
                if config.until_known && gauge.known().is_some() {
                    break;
                }
                watch(ProbeSample {
                    at: start.elapsed(),
                    bytes_received: bytes,
                    stats: sender.stats(),
                });
            }
            permit = sender.reserve() => {
                let frame = random.slice(next..next + PROBE_FRAME_BYTES);
                permit?.send(frame)?;
                next = (next + PROBE_FRAME_BYTES) % RANDOM_BYTES;
            }
        }
    }
    let elapsed = start.elapsed().as_secs_f64();
    let end = sender.stats();
    let (last, half) = (reports.last(), reports.get(reports.len() / 2));
    let (Some(last), Some(half)) = (last, half) else {
        return Err(ProbeError::NothingCounted);
    };
    let sent = end.packets_sent - idle.packets_sent;
    let lost = end.packets_lost - idle.packets_lost;
    Ok(ProbeReport {
        rtt_idle: idle.rtt,
        rtt_loaded: end.rtt,
        throughput_bps: rate((Duration::ZERO, 0), *last),
        throughput_late_bps: rate(*half, *last),
        per_second_bps: per_second(&reports),
        paths: sender.traffic(),
        rate_bps: gauge.known(),
        wire_bps: ((end.wire_bytes_sent - idle.wire_bytes_sent) as f64 * 8.0 / elapsed) as u64,
        loss: lost as f64 / sent.max(1) as f64,
        reflexive: None,
    })
}

/// Returns the rates between the first reports of each second.
fn per_second(reports: &[(Duration, u64)]) -> Vec<u64> {
    let mut rates = Vec::new();
    let mut from = (Duration::ZERO, 0);
    for report in reports {
        if report.0.saturating_sub(from.0) >= Duration::from_secs(1) {
            rates.push(rate(from, *report));
            from = *report;
        }
    }
    rates
}

fn rate(from: (Duration, u64), to: (Duration, u64)) -> u64 {
    let seconds = to.0.saturating_sub(from.0).as_secs_f64();
    if seconds > 0.0 {
        (to.1.saturating_sub(from.1) as f64 * 8.0 / seconds) as u64
    } else {
        0
    }
}

/// The right to the one measurement of an endpoint at a time.
pub(crate) struct Turn(Arc<AtomicBool>);

impl Turn {
    pub(crate) fn take(probed: &Arc<AtomicBool>) -> Option<Self> {
        let taken = probed.swap(true, Ordering::AcqRel);
        (!taken).then(|| Self(probed.clone()))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Performs the receiver's side: counts frames, discards them, and reports.
pub(crate) async fn discard(receiver: BulkReceiver, _turn: Turn) {
    let counted = AtomicU64::new(0);
    let count = async {
        while let Ok(Some(frame)) = receiver.recv().await {
            counted.fetch_add(frame.len() as u64, Ordering::Relaxed);
        }
    };
    let report = async {
        let start = Instant::now();
        let mut ticks = tokio::time::interval(REPORT_EVERY);
        loop {
            ticks.tick().await;
            let bytes = counted.load(Ordering::Relaxed);
            let report = write_report(start.elapsed(), bytes);
            if receiver.acknowledge(&report).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = count => {}
        () = report => {}
        () = tokio::time::sleep(PROBE_TIME_MAX) => {}
    }
}

fn write_report(at: Duration, bytes: u64) -> [u8; REPORT_BYTES] {
    let mut report = [0; REPORT_BYTES];
    report[..8].copy_from_slice(&(at.as_micros() as u64).to_le_bytes());
    report[8..].copy_from_slice(&bytes.to_le_bytes());
    report
}

fn read_report(report: &[u8]) -> Option<(Duration, u64)> {
    let report: &[u8; REPORT_BYTES] = report.try_into().ok()?;
    let at = u64::from_le_bytes(*report.first_chunk()?);
    let bytes = u64::from_le_bytes(*report.last_chunk()?);
    Some((Duration::from_micros(at), bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_a_report_are_those_of_the_wire_formats_page() {
        let report = write_report(Duration::from_micros(0x0102), 0x0304);
        assert_eq!(report, *b"\x02\x01\0\0\0\0\0\0\x04\x03\0\0\0\0\0\0");
        let read = read_report(&report);
        assert_eq!(read, Some((Duration::from_micros(0x0102), 0x0304)));
        assert_eq!(read_report(&report[1..]), None);
    }
}
