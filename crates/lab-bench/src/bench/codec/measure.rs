//! Measures processor time in these benches, and the cost of a pass.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use serde::Serialize;

use longhaul_lab::error::{During, LabError};

/// The shares of the time of encoding.
#[derive(Debug, Default, Clone, Copy, Serialize)]
pub(super) struct Share {
    /// Copying into the staging buffer.
    copy: f64,
    /// Zero test and digests.
    stage: f64,
    /// Looking up the destination's content.
    decide: f64,
    /// Gathering, deltas, compression, and building frames.
    frame: f64,
}

/// The cost of a pass.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Cost {
    /// Guest bytes.
    pub(super) bytes: usize,
    /// Bytes after encoding.
    pub(super) sent: usize,
    pub(super) copy: Duration,
    pub(super) stage: Duration,
    pub(super) decide: Duration,
    pub(super) frame: Duration,
    pub(super) decode: Duration,
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.sent += other.sent;
        self.copy += other.copy;
        self.stage += other.stage;
        self.decide += other.decide;
        self.frame += other.frame;
        self.decode += other.decode;
    }
}

impl Cost {
    pub(super) fn encode(&self) -> Duration {
        self.copy + self.stage + self.decide + self.frame
    }

    /// Returns guest bytes per second.
    pub(super) fn rate(&self, time: Duration) -> f64 {
        self.bytes as f64 / time.as_secs_f64()
    }

    /// Returns the ratio of output to input.
    pub(super) fn ratio(&self) -> f64 {
        self.sent as f64 / self.bytes as f64
    }

    pub(super) fn share(&self) -> Share {
        let of = |time: Duration| time.as_secs_f64() / self.encode().as_secs_f64();
        Share {
            copy: of(self.copy),
            stage: of(self.stage),
            decide: of(self.decide),
            frame: of(self.frame),
        }
    }
}

/// The processor time of this thread, so that other work on the machine disturbs less.
pub(super) struct Clock(Duration);

impl Clock {
    pub(super) fn start() -> Result<Self, LabError> {
        Ok(Self(now()?))
    }

    /// Adds the time since the last lap to that of a step.
    pub(super) fn lap(&mut self, step: &mut Duration) -> Result<(), LabError> {
        let time = now()?;
        *step += time - std::mem::replace(&mut self.0, time);
        Ok(())
    }
}

fn now() -> Result<Duration, LabError> {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .map_err(std::io::Error::from)
        .during(|| "read the processor time of this thread".to_owned())?;
    Ok(time.into())
}
