//! Implements the sending side of a bulk connection: frames over many streams, acknowledgements
//! back.
//!
//! The local queue is kept short, so that a frame's content is fresh when it leaves: the library
//! may hold the congestion window and [`QUEUE_MS`] more, and a few frames wait for that.

use super::receiver::{bulk_error, read_header};
use super::wire::OPENING_ANSWER;
use super::{
    ACKNOWLEDGEMENT_BYTES_MAX, BULK_STREAMS_MAX, BulkBinding, BulkConfig, BulkOpening, BulkPurpose,
    BulkToken, StreamHeader, StreamKind,
};
use crate::endpoint::{Candidates, Dial, EndpointInner, canonical};
use crate::error::{BulkError, CloseCode, ConnectError, LinkError};
use crate::framing::{MessageReader, PREFIX_BYTES};
use crate::keeper::Spread;
use crate::paths::PathTraffic;
use crate::quic::{Link, PathStats, SendStream, header_bytes};
use crate::rate::RateLimit;
use crate::tls::ALPN_BULK;
use crate::trust::TrustedHost;
use bytes::Bytes;
use longhaul_protocol::limits::FRAME_BYTES_MAX;
use std::collections::VecDeque;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// The queue in the library beyond the congestion window, in time at the current rate.
const QUEUE_MS: u64 = 20;
const QUEUE_BYTES_MIN: u64 = 128 << 10;
/// The priority of the last stream in the library: of two with data, that with the higher one sends
/// first. The others have 0.
const PRIORITY_AHEAD: i32 = 1;
const SEND_WINDOW_BYTES_MAX: u64 = 64 << 20;
/// The number of frames that wait to be written, each on a stream of its own: more than one, so
/// that a stream blocked by a loss does not delay the others.
const FRAMES_IN_HAND: u32 = 3;
/// How many times as many streams there are over several network paths.
const STREAMS_TIMES: u8 = 4;
const ADJUST_EVERY: Duration = Duration::from_millis(10);
const RATE_OVER: Duration = Duration::from_millis(500);
const ACKNOWLEDGEMENTS_WAITING: usize = 64;

/// Sends frames on a bulk connection. Cheap to clone; all methods may be called from several
/// tasks. The connection closes when the last clone is dropped.
#[derive(Clone)]
pub struct BulkSender(Arc<Inner>);

struct Inner {
    core: Arc<Core>,
    acknowledgements: tokio::sync::Mutex<mpsc::Receiver<Result<Bytes, BulkError>>>,
}

struct Core {
    link: Link,
    binding: BulkBinding,
    limit: RateLimit,
    header_bytes: u64,
    permits: u32,
    in_hand: Arc<Semaphore>,
    idle: Mutex<VecDeque<SendStream>>,
    /// The last stream, whose frames the receiver hands on first; `None` while it is used, or if it
    /// is the only stream.
    ahead: Mutex<Option<SendStream>>,
    recent: Mutex<Recent>,
}

/// The transmissions of about the last second, for the current rate.
struct Recent {
    samples: VecDeque<(Instant, u64)>,
    rate_bps: u64,
}

/// Statistics of a bulk connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BulkStats {
    /// The smoothed round-trip time; of several paths, the longest.
    pub rtt: Duration,
    /// Congestion window of all paths together, in bytes.
    pub congestion_window_bytes: u64,
    /// Congestion windows per round trip of all paths together, in bits per second.
    pub window_rate_bps: u64,
    /// Bytes sent, with IP and UDP headers and lost packets.
    pub wire_bytes_sent: u64,
    /// Bytes received, with IP and UDP headers.
    pub wire_bytes_received: u64,
    /// Packets sent.
    pub packets_sent: u64,
    /// Packets found lost.
    pub packets_lost: u64,
    /// Bytes sent and not lost over the last half second, in bits per second on the wire.
    pub delivery_rate_bps: u64,
}

impl BulkStats {
    /// Returns the capacity of all paths, in bits per second, as the congestion controllers
    /// estimate it: their windows are then twice the data in flight (BBR). `None` where there is no
    /// window, for example when the only path is gone.
    pub fn path_rate_bps(&self) -> Option<f64> {
        let rate = self.window_rate_bps as f64 / 2.0;
        (rate > 0.0).then_some(rate)
    }
}

/// Room for one frame.
pub struct BulkPermit {
    core: Arc<Core>,
    permit: OwnedSemaphorePermit,
}

/// Dials a bulk connection to a host with an existing control connection.
pub(crate) async fn connect(
    endpoint: &Arc<EndpointInner>,
    host: &TrustedHost,
    address: SocketAddr,
    token: &BulkToken,
    binding: BulkBinding,
    config: BulkConfig,
) -> Result<BulkSender, ConnectError> {
    let dial = Dial {
        expected: Some(host.id),
        name: host.name.clone(),
        alpn: ALPN_BULK,
        limit: RateLimit::new(config.bandwidth_bps),
        paths: endpoint.paths_to(host),
    };
    let opening = BulkOpening {
        purpose: BulkPurpose::Migration,
        streams: streams_over(config.streams, &dial),
        token: token.clone(),
        binding,
    };
    let link = match dial.paths.is_empty() {
        true => endpoint.dial(&dial, address).await?,
        false => {
            // The path of the control connection may have been lost a moment ago.
            let addresses = dial.addresses(&[canonical(address).to_string()]);
            let candidates = Candidates::configured(&addresses);
            endpoint.dial_any(&dial, candidates).await?.0
        }
    };
    open(endpoint, &dial, link, &opening).await
}

/// Sends the opening on a new connection, and opens its streams.
pub(crate) async fn open(
    endpoint: &Arc<EndpointInner>,
    dial: &Dial,
    link: Link,
    opening: &BulkOpening,
) -> Result<BulkSender, ConnectError> {
    let streams = tokio::time::timeout(endpoint.config.handshake_timeout, async {
        present(&link, opening).await?;
        open_streams(&link, opening).await
    });
    let streams = streams.await.unwrap_or_else(|_| {
        link.close(CloseCode::BadOpening, "the opening was not answered");
        Err(LinkError::TimedOut)
    });
    let streams = streams.map_err(|error| dial.error(error))?;
    let limit = dial.limit.clone();
    endpoint.open_paths(&link, dial, Spread::All);
    Ok(BulkSender::start(link, opening.binding, streams, limit))
}

/// Returns the number of streams. Over several network paths there are more: what is lost with a
/// path holds up all later frames of its stream until the path is given up.
pub(crate) fn streams_over(streams: u8, dial: &Dial) -> u8 {
    let times = if dial.paths.is_empty() {
        1
    } else {
        STREAMS_TIMES
    };
    streams.saturating_mul(times).clamp(1, BULK_STREAMS_MAX)
}

async fn present(link: &Link, opening: &BulkOpening) -> Result<(), LinkError> {
    let streams = link.connection.open_bi().await;
    let (mut send, mut receive) = streams.map_err(|error| link.error(error))?;
    let sent = send.write_all(&opening.encode()).await;
    sent.map_err(|_| link.lost_or_cut())?;
    // Fails only when the stream was finished before.
    let _ = send.finish();
    let mut answer = [0; OPENING_ANSWER.len()];
    let read = receive.read_exact(&mut answer).await;
    read.map_err(|_| link.lost_or_cut())?;
    if answer != OPENING_ANSWER {
        link.close(CloseCode::BadOpening, "the opening was answered wrongly");
        return Err(link.lost_or_cut());
    }
    Ok(())
}

async fn open_streams(
    link: &Link,
    opening: &BulkOpening,
) -> Result<VecDeque<SendStream>, LinkError> {
    let header = StreamHeader {
        kind: StreamKind::Frames,
        binding: opening.binding,
    };
    let mut streams = VecDeque::new();
    for _ in 0..opening.streams {
        let stream = link.connection.open_uni().await;
        let mut stream = stream.map_err(|error| link.error(error))?;
        let written = stream.write_all(&header.encode()).await;
        written.map_err(|_| link.lost_or_cut())?;
        streams.push_back(stream);
    }
    if let Some(last) = streams.back().filter(|_| opening.streams > 1) {
        // Fails only when the stream was finished before.
        let _ = last.set_priority(PRIORITY_AHEAD);
    }
    Ok(streams)
}

impl BulkSender {
    fn start(
        link: Link,
        binding: BulkBinding,
        mut idle: VecDeque<SendStream>,
        limit: RateLimit,
    ) -> Self {
        let ahead = match idle.len() {
            0 | 1 => None,
            _ => idle.pop_back(),
        };
        let permits = FRAMES_IN_HAND.min(idle.len() as u32);
        let core = Arc::new(Core {
            header_bytes: header_bytes(link.address()),
            link,
            binding,
            limit,
            permits,
            in_hand: Arc::new(Semaphore::new(permits as usize)),
            idle: Mutex::new(idle),
            ahead: Mutex::new(ahead),
            recent: Mutex::new(Recent {
                samples: VecDeque::new(),
                rate_bps: 0,
            }),
        });
        let (sender, acknowledgements) = mpsc::channel(ACKNOWLEDGEMENTS_WAITING);
        tokio::spawn(read_acknowledgements(core.clone(), sender));
        tokio::spawn(adjust_window(core.clone()));
        Self(Arc::new(Inner {
            core,
            acknowledgements: tokio::sync::Mutex::new(acknowledgements),
        }))
    }

    /// Returns the binding of the connection.
    pub fn binding(&self) -> BulkBinding {
        self.0.core.binding
    }

    /// Waits for room for one frame. The caller should read and encode the content after this
    /// returns, so that it is fresh. Safe to cancel.
    pub async fn reserve(&self) -> Result<BulkPermit, BulkError> {
        let core = &self.0.core;
        let permit = core.in_hand.clone().acquire_owned().await;
        // The semaphore is closed by `finish`.
        let permit = permit.map_err(|_| core.finished())?;
        match core.link.lost() {
            Some(error) => Err(BulkError::Lost(error)),
            None => Ok(BulkPermit {
                core: core.clone(),
                permit,
            }),
        }
    }

    /// Returns the number of frames for which room is reserved, or that are not yet completely with
    /// the library.
    pub fn frames_in_hand(&self) -> usize {
        let core = &self.0.core;
        (core.permits as usize).saturating_sub(core.in_hand.available_permits())
    }

    /// Waits for room and sends a frame; returns once it is on its way to the network. A future
    /// dropped before that sends nothing.
    pub async fn send(&self, frame: Bytes) -> Result<(), BulkError> {
        self.reserve().await?.send(frame)
    }

    /// Returns the next acknowledgement message, or `None` when the receiver has finished. Safe to
    /// cancel.
    pub async fn acknowledgement(&self) -> Result<Option<Bytes>, BulkError> {
        match self.0.acknowledgements.lock().await.recv().await {
            Some(result) => result.map(Some),
            None => match self.0.core.link.lost() {
                Some(error) => Err(BulkError::Lost(error)),
                None => Ok(None),
            },
        }
    }

    /// Changes the limit in bits per second on the wire, headers included; `None` for no limit.
    pub fn set_bandwidth(&self, limit_bps: Option<u64>) {
        self.0.core.limit.set(limit_bps);
        self.0.core.adjust();
    }

    /// Returns the limit in force.
    pub fn bandwidth(&self) -> Option<u64> {
        self.0.core.limit.get()
    }

    /// Returns statistics of the connection.
    pub fn stats(&self) -> BulkStats {
        self.0.core.stats()
    }

    /// Returns what each network path of the connection has carried.
    pub fn traffic(&self) -> Vec<PathTraffic> {
        self.0.core.link.traffic()
    }

    /// Sends all queued frames, ends all streams, and waits until the peer's transport has
    /// everything.
    pub async fn finish(&self) -> Result<(), BulkError> {
        let core = &self.0.core;
        let all = core.in_hand.acquire_many(core.permits).await;
        let all = all.map_err(|_| core.finished())?;
        all.forget();
        core.in_hand.close();
        let mut streams = std::mem::take(&mut *core.idle());
        streams.extend(core.ahead().take());
        for stream in &mut streams {
            // Fails only when the stream was finished before.
            let _ = stream.finish();
        }
        for stream in &mut streams {
            match stream.stopped().await {
                Ok(None) => {}
                _ => return Err(BulkError::Lost(core.link.lost_or_cut())),
            }
        }
        Ok(())
    }

    /// Closes the connection with a reason for the receiver.
    pub fn close(&self, code: CloseCode, reason: &str) {
        self.0.core.link.close(code, reason);
    }

    /// Waits until the connection has ended, and returns the reason.
    pub async fn closed(&self) -> LinkError {
        self.0.core.link.closed().await
    }
}

impl fmt::Debug for BulkSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BulkSender({:?})", self.0.core.binding)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let link = &self.core.link;
        link.close(CloseCode::Done, "the sender has finished");
    }
}

impl BulkPermit {
    /// Sends a frame: the stream that was idle longest takes it whole.
    pub fn send(self, frame: Bytes) -> Result<(), BulkError> {
        self.send_over(false, frame)
    }

    /// Sends a frame ahead of all that has not left this host, and of all that the receiver has not
    /// taken.
    pub fn send_ahead(self, frame: Bytes) -> Result<(), BulkError> {
        self.send_over(true, frame)
    }

    fn send_over(self, ahead: bool, frame: Bytes) -> Result<(), BulkError> {
        if frame.len() > FRAME_BYTES_MAX {
            return Err(BulkError::TooLarge {
                bytes: frame.len() as u64,
                limit: FRAME_BYTES_MAX as u64,
            });
        }
        let last = if ahead {
            self.core.ahead().take()
        } else {
            None
        };
        // The last stream may carry another such frame.
        let ahead = last.is_some();
        // There are at least as many others as permits, so one is idle.
        let stream = last.or_else(|| self.core.idle().pop_front());
        let mut stream = stream.ok_or_else(|| self.core.finished())?;
        let Self { core, permit } = self;
        tokio::spawn(async move {
            let prefix = Bytes::copy_from_slice(&(frame.len() as u32).to_le_bytes());
            debug_assert_eq!(prefix.len(), PREFIX_BYTES);
            match stream.write_all_chunks(&mut [prefix, frame]).await {
                Ok(()) if ahead => *core.ahead() = Some(stream),
                Ok(()) => core.idle().push_back(stream),
                // The peer stopped a stream, which the format does not allow.
                Err(_) if core.link.lost().is_none() => {
                    core.link
                        .close(CloseCode::Violation, "a stream was stopped");
                }
                Err(_) => {}
            }
            drop(permit);
        });
        Ok(())
    }
}

impl fmt::Debug for BulkPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BulkPermit")
    }
}

impl Core {
    fn idle(&self) -> std::sync::MutexGuard<'_, VecDeque<SendStream>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ahead(&self) -> std::sync::MutexGuard<'_, Option<SendStream>> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn finished(&self) -> BulkError {
        let reason = "the sender has finished".to_owned();
        let lost = self.link.lost();
        BulkError::Lost(lost.unwrap_or(LinkError::ClosedHere { reason }))
    }

    fn stats(&self) -> BulkStats {
        let stats = self.link.connection.stats();
        let paths = self.link.path_stats();
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        BulkStats {
            rtt: longest(&paths),
            congestion_window_bytes: paths.iter().map(|path| path.cwnd).sum(),
            window_rate_bps: paths.iter().map(|path| window_rate_bps(path, 1000)).sum(),
            wire_bytes_sent: stats.udp_tx.bytes + stats.udp_tx.datagrams * self.header_bytes,
            wire_bytes_received: stats.udp_rx.bytes + stats.udp_rx.datagrams * self.header_bytes,
            packets_sent: stats.sent_packets,
            packets_lost: stats.lost_packets,
            delivery_rate_bps: recent.rate_bps,
        }
    }

    /// Adjusts the library's send window to the capacity of all paths and a little more.
    fn adjust(&self) {
        let paths = self.link.path_stats();
        if paths.is_empty() {
            return;
        }
        let rtt_us = (longest(&paths).as_micros() as u64).max(100);
        let cwnd = paths.iter().map(|path| path.cwnd).sum::<u64>();
        let window_rate = paths
            .iter()
            .map(|path| window_rate_bps(path, 100) / 8)
            .sum();
        let (rate, flight) = match self.limit.get() {
            Some(limit_bps) => {
                let rate = u64::min(window_rate, limit_bps / 8);
                (rate, cwnd.min(rate.saturating_mul(rtt_us) / 1_000_000))
            }
            None => (window_rate, cwnd),
        };
        // What was lost with a path counts as under way until the library gives it up too.
        let flight = flight + self.link.draining_bytes();
        let queue = (rate.saturating_mul(QUEUE_MS) / 1000).max(QUEUE_BYTES_MIN);
        let window = (flight + queue).min(SEND_WINDOW_BYTES_MAX);
        self.link.connection.set_send_window(window);
    }

    fn sample(&self) {
        let stats = self.link.connection.stats();
        let sent = stats.udp_tx.bytes + stats.udp_tx.datagrams * self.header_bytes;
        let delivered = sent.saturating_sub(stats.lost_bytes);
        let now = Instant::now();
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.samples.push_back((now, delivered));
        while recent.samples.len() > 2 && now - recent.samples[1].0 >= RATE_OVER {
            recent.samples.pop_front();
        }
        if let Some((since, before)) = recent.samples.front().copied() {
            let seconds = (now - since).as_secs_f64();
            if seconds > 0.0 {
                let bits = delivered.saturating_sub(before) as f64 * 8.0;
                recent.rate_bps = (bits / seconds) as u64;
            }
        }
    }
}

/// Returns the longest of the round-trip times.
fn longest(paths: &[PathStats]) -> Duration {
    paths.iter().map(|path| path.rtt).max().unwrap_or_default()
}

/// Returns the congestion window per round trip of at least `rtt_us_min`, in bits per second.
fn window_rate_bps(path: &PathStats, rtt_us_min: u64) -> u64 {
    let rtt_us = (path.rtt.as_micros() as u64).max(rtt_us_min);
    path.cwnd.saturating_mul(8_000_000) / rtt_us
}

async fn adjust_window(core: Arc<Core>) {
    let mut ticks = tokio::time::interval(ADJUST_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut tick = 0u32;
    while core.link.lost().is_none() {
        ticks.tick().await;
        core.adjust();
        if tick.is_multiple_of(5) {
            core.sample();
        }
        tick = tick.wrapping_add(1);
    }
}

async fn read_acknowledgements(core: Arc<Core>, sender: mpsc::Sender<Result<Bytes, BulkError>>) {
    let result = async {
        let stream = core.link.connection.accept_uni().await;
        let mut stream = stream.map_err(|error| BulkError::Lost(core.link.error(error)))?;
        let kind = StreamKind::Acknowledgements;
        read_header(&core.link, &mut stream, kind, &core.binding).await?;
        let limit = ACKNOWLEDGEMENT_BYTES_MAX;
        let mut reader = MessageReader::new(core.link.clone(), stream, limit);
        loop {
            let message = reader.next().await;
            let Some(message) = message.map_err(|error| bulk_error(&core.link, error))? else {
                return Ok(());
            };
            if sender.send(Ok(message)).await.is_err() {
                return Ok(());
            }
        }
    };
    if let Err(error) = result.await {
        // After the sender was dropped there is no one to report to.
        let _ = sender.send(Err(error)).await;
    }
}
