//! The rate of a guest: the processor time that its vCPUs use, measured while it runs.

use longhaul_api::GuestRate;
use longhaul_hypervisor::qmp::Qmp;
use longhaul_hypervisor::vcpus::Vcpus;
use longhaul_protocol::message::Rate;
use std::time::Duration;
use tokio::task::block_in_place;
use tokio::time::Instant;

/// A rate that was measured for less than this says nothing: the kernel updates the time of a busy
/// thread every few milliseconds.
const MEASURED_MIN: Duration = Duration::from_millis(50);

/// Measures a guest's rate from a moment on.
#[derive(Debug, Clone)]
pub(crate) struct RateMeter {
    vcpus: Vcpus,
    began: Instant,
    cpu: Duration,
}

impl RateMeter {
    /// Asks a QEMU which of its threads run the guest. It should not be asked while the guest is
    /// stopped: nothing depends on the answer.
    pub(crate) async fn vcpus(qmp: &Qmp, pid: Option<i32>) -> Option<Vcpus> {
        let vcpus = Vcpus::of(qmp, pid?).await;
        let unknown = |error| tracing::warn!(%error, "a guest's vCPUs are not known");
        vcpus.map_err(unknown).ok()
    }

    /// Begins now.
    pub(crate) fn begin(vcpus: Vcpus) -> Option<Self> {
        let (began, cpu) = (Instant::now(), cpu_time(&vcpus)?);
        Some(Self { vcpus, began, cpu })
    }

    /// Begins again.
    pub(crate) fn again(self) -> Option<Self> {
        Self::begin(self.vcpus)
    }

    /// Returns how long it has measured.
    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Returns the processor time used so far. `None` if that is too little to say something, or
    /// QEMU has ended.
    pub(crate) fn so_far(&self) -> Option<Rate> {
        let (time, cpu) = (self.elapsed(), cpu_time(&self.vcpus)?);
        (time >= MEASURED_MIN).then(|| Rate {
            cpu_us: cpu.saturating_sub(self.cpu).as_micros() as u64,
            time_us: time.as_micros() as u64,
            whole_process: self.vcpus.is_whole_process(),
        })
    }
}

fn cpu_time(vcpus: &Vcpus) -> Option<Duration> {
    let time = block_in_place(|| vcpus.cpu_time());
    let unknown = |error| tracing::debug!(%error, "the time of a guest's vCPUs is not known");
    time.map_err(unknown).ok()
}

/// Returns a rate as the API shows it.
pub(crate) fn shown(rate: Rate) -> Option<GuestRate> {
    let measured = Duration::from_micros(rate.time_us);
    (measured >= MEASURED_MIN).then(|| GuestRate {
        vcpu_s_per_s: rate.cpu_us as f64 / rate.time_us as f64,
        measured_ms: measured.as_secs_f64() * 1e3,
        whole_process: rate.whole_process,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_needs_time() {
        let rate = Rate {
            cpu_us: 3_000_000,
            time_us: 2_000_000,
            whole_process: false,
        };
        let shown_rate = shown(rate).unwrap();
        assert_eq!(shown_rate.vcpu_s_per_s, 1.5);
        assert_eq!(shown_rate.measured_ms, 2000.0);
        for time_us in [0, 1000] {
            assert_eq!(shown(Rate { time_us, ..rate }), None);
        }
    }
}
