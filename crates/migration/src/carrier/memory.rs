//! A carrier within the process. It delays frames by seed, so that they overtake each other, and is
//! lost after a number of messages.

use crate::carrier::{CarrierError, CarrierStats, Carrying, FrameSink, FrameSource, Room};
use bytes::Bytes;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};

/// The number of frames that may be under way.
pub(crate) const IN_HAND: usize = 3;
/// The number of frames that have arrived and wait for the receiver.
pub(crate) const WAITING: usize = 2;

/// How a carrier carries.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Settings {
    pub(crate) seed: u64,
    /// Longest time that a frame or an acknowledgement takes.
    pub(crate) delay_max: Duration,
    /// The number of frames and acknowledgements after which it is lost. None if it is never lost.
    pub(crate) lost_after: Option<u64>,
}

/// Random numbers by seed (SplitMix64).
#[derive(Debug, Clone)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// The sender has sent its last frame.
    Finished,
    Lost,
}

#[derive(Debug, thiserror::Error)]
#[error("it was cut")]
struct Cut;

struct Core {
    settings: Settings,
    state: watch::Sender<State>,
    in_hand: Arc<Semaphore>,
    messages: AtomicU64,
    sent_bytes: AtomicU64,
    received_bytes: AtomicU64,
    pace: Mutex<Pace>,
}

struct Pace {
    random: Random,
    limit_bps: Option<u64>,
    /// When the last frame has left.
    free_at: Instant,
}

impl Core {
    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_lost(&self) -> bool {
        *self.state.borrow() == State::Lost
    }

    /// Counts a message. Returns an error if the carrier is lost, or is lost with this message.
    fn count(&self) -> Result<(), CarrierError> {
        let before = self.messages.fetch_add(1, Ordering::SeqCst);
        let lost = self.settings.lost_after.is_some_and(|most| before >= most);
        if lost {
            self.state.send_replace(State::Lost);
        }
        match self.is_lost() {
            true => Err(cut()),
            false => Ok(()),
        }
    }

    fn delay(&self) -> Duration {
        let most = self.settings.delay_max.as_micros() as u64 + 1;
        Duration::from_micros(self.pace().random.below(most))
    }

    /// Returns when a frame of this length has left, at the limit.
    fn leaves_at(&self, bytes: usize) -> Instant {
        let mut pace = self.pace();
        let takes = pace.limit_bps.map_or(Duration::ZERO, |limit| {
            Duration::from_secs_f64(bytes as f64 * 8.0 / limit as f64)
        });
        pace.free_at = pace.free_at.max(Instant::now()) + takes;
        pace.free_at
    }

    async fn lost(&self) {
        let mut state = self.state.subscribe();
        // The sender of the state is a part of this.
        let _ = state.wait_for(|state| *state == State::Lost).await;
    }
}

fn cut() -> CarrierError {
    CarrierError::Lost(Box::new(Cut))
}

pub(crate) struct MemorySink {
    core: Arc<Core>,
    frames: mpsc::Sender<Bytes>,
    acknowledgements: tokio::sync::Mutex<mpsc::UnboundedReceiver<Bytes>>,
}

pub(crate) struct MemorySource {
    core: Arc<Core>,
    frames: tokio::sync::Mutex<mpsc::Receiver<Bytes>>,
    acknowledgements: mpsc::UnboundedSender<Bytes>,
}

struct MemoryRoom {
    core: Arc<Core>,
    frames: mpsc::Sender<Bytes>,
    permit: OwnedSemaphorePermit,
}

/// Creates a carrier. To be called in a runtime.
pub(crate) fn carrier(settings: Settings) -> (MemorySink, MemorySource) {
    let core = Arc::new(Core {
        settings,
        state: watch::Sender::new(State::Open),
        in_hand: Arc::new(Semaphore::new(IN_HAND)),
        messages: AtomicU64::new(0),
        sent_bytes: AtomicU64::new(0),
        received_bytes: AtomicU64::new(0),
        pace: Mutex::new(Pace {
            random: Random(settings.seed),
            limit_bps: None,
            free_at: Instant::now(),
        }),
    });
    let (frames, arrived) = mpsc::channel(WAITING);
    let (acknowledged, mut under_way) = mpsc::unbounded_channel::<Bytes>();
    let (back, acknowledgements) = mpsc::unbounded_channel();
    let carrying = core.clone();
    tokio::spawn(async move {
        while let Some(message) = under_way.recv().await {
            sleep(carrying.delay()).await;
            if carrying.is_lost() || back.send(message).is_err() {
                return;
            }
        }
    });
    let sink = MemorySink {
        core: core.clone(),
        frames,
        acknowledgements: tokio::sync::Mutex::new(acknowledgements),
    };
    let source = MemorySource {
        core,
        frames: tokio::sync::Mutex::new(arrived),
        acknowledgements: acknowledged,
    };
    (sink, source)
}

impl FrameSink for MemorySink {
    fn reserve(&self) -> Carrying<'_, Result<Box<dyn Room>, CarrierError>> {
        Box::pin(async {
            let permit = self.core.in_hand.clone().acquire_owned().await;
            let room = MemoryRoom {
                core: self.core.clone(),
                frames: self.frames.clone(),
                permit: permit.map_err(|_| cut())?,
            };
            match self.core.is_lost() {
                true => Err(cut()),
                false => Ok(Box::new(room) as Box<dyn Room>),
            }
        })
    }

    fn frames_in_hand(&self) -> usize {
        IN_HAND - self.core.in_hand.available_permits()
    }

    fn acknowledgement(&self) -> Carrying<'_, Result<Bytes, CarrierError>> {
        Box::pin(async {
            let mut acknowledgements = self.acknowledgements.lock().await;
            tokio::select! {
                message = acknowledgements.recv() => {
                    let message = message.ok_or_else(cut)?;
                    let bytes = message.len() as u64;
                    self.core.received_bytes.fetch_add(bytes, Ordering::SeqCst);
                    Ok(message)
                }
                () = self.core.lost() => Err(cut()),
            }
        })
    }

    fn set_bandwidth(&self, limit_bps: Option<u64>) {
        self.core.pace().limit_bps = limit_bps;
    }

    fn stats(&self) -> CarrierStats {
        let limit_bps = self.core.pace().limit_bps;
        CarrierStats {
            rtt: self.core.settings.delay_max * 2,
            path_rate_bps: limit_bps.map(|limit| limit as f64),
            window_bytes: 0,
            delivery_rate_bps: limit_bps.unwrap_or_default(),
            sent_bytes: self.core.sent_bytes.load(Ordering::SeqCst),
            received_bytes: self.core.received_bytes.load(Ordering::SeqCst),
        }
    }
}

impl Drop for MemorySink {
    fn drop(&mut self) {
        self.core.state.send_if_modified(|state| {
            let ends = *state == State::Open;
            if ends {
                *state = State::Finished;
            }
            ends
        });
    }
}

impl Room for MemoryRoom {
    fn send(self: Box<Self>, frame: Bytes, _urgent: bool) -> Result<(), CarrierError> {
        self.core.count()?;
        let bytes = frame.len();
        self.core
            .sent_bytes
            .fetch_add(bytes as u64, Ordering::SeqCst);
        let arrives_at = self.core.leaves_at(bytes) + self.core.delay();
        tokio::spawn(async move {
            let Self {
                core,
                frames,
                permit,
            } = *self;
            let arrives = async {
                sleep_until(arrives_at).await;
                // Without a receiver the carrier is lost.
                let _ = frames.send(frame).await;
            };
            tokio::select! {
                biased;
                () = core.lost() => {}
                () = arrives => {}
            }
            drop(permit);
        });
        Ok(())
    }
}

impl FrameSource for MemorySource {
    async fn recv(&self) -> Result<Option<Bytes>, CarrierError> {
        let mut frames = self.frames.lock().await;
        tokio::select! {
            biased;
            () = self.core.lost() => Err(cut()),
            frame = frames.recv() => Ok(frame),
        }
    }

    async fn acknowledge(&self, message: &[u8]) -> Result<(), CarrierError> {
        self.core.count()?;
        let message = Bytes::copy_from_slice(message);
        self.acknowledgements.send(message).map_err(|_| cut())
    }

    async fn lost(&self) -> CarrierError {
        let mut state = self.core.state.subscribe();
        // The sender of the state is a part of this.
        let _ = state.wait_for(|state| *state != State::Open).await;
        cut()
    }
}

impl Drop for MemorySource {
    fn drop(&mut self) {
        self.core.state.send_replace(State::Lost);
    }
}
