//! The cost of a migration on a host: CPU time of the agent and of QEMU, and the agent's peak
//! memory. The agent's figures cover its whole process while the migration is in progress. All of
//! its memory is private: it maps no memory of guests.

use longhaul_api::HostCost;
use longhaul_protocol::message::Used;
use nix::sys::resource::{UsageWho, getrusage};
use nix::unistd::{SysconfVar, sysconf};
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// The peaks of all meters. The kernel has one peak per process, and each new meter resets it.
static PEAKS: Mutex<Vec<Weak<AtomicU64>>> = Mutex::new(Vec::new());

/// Measures usage from its start.
#[derive(Debug)]
pub(crate) struct Meter {
    agent_cpu: Duration,
    /// The agent's peak until the kernel's count was last reset, in bytes.
    peak_bytes: Arc<AtomicU64>,
}

/// The usage that a meter measured.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usage {
    pub(crate) agent_cpu: Duration,
    pub(crate) qemu_cpu: Duration,
    pub(crate) agent_peak_bytes: u64,
}

impl Meter {
    pub(crate) fn start() -> Self {
        Self {
            agent_cpu: agent_cpu(),
            peak_bytes: begin_peak(),
        }
    }

    /// Returns the usage so far. QEMU's time is that since its start.
    pub(crate) fn usage(&self, qemu: Option<i32>) -> Usage {
        Usage {
            agent_cpu: agent_cpu().saturating_sub(self.agent_cpu),
            qemu_cpu: qemu.and_then(process_cpu).unwrap_or_default(),
            agent_peak_bytes: {
                let before = self.peak_bytes.load(Ordering::Relaxed);
                peak_bytes().unwrap_or(0).max(before)
            },
        }
    }
}

/// Resets the kernel's count of the process's peak, after storing it in all existing meters.
fn begin_peak() -> Arc<AtomicU64> {
    let mut peaks = PEAKS.lock().unwrap_or_else(PoisonError::into_inner);
    let until_now = peak_bytes().unwrap_or(0);
    peaks.retain(|peak| match peak.upgrade() {
        Some(peak) => {
            peak.fetch_max(until_now, Ordering::Relaxed);
            true
        }
        None => false,
    });
    // This resets the peak resident set size, see proc(5).
    if let Err(error) = fs::write("/proc/self/clear_refs", "5") {
        tracing::debug!(%error, "the agent's peak of memory counts from its start");
    }
    let peak = Arc::new(AtomicU64::new(0));
    peaks.push(Arc::downgrade(&peak));
    peak
}

fn agent_cpu() -> Duration {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else {
        return Duration::ZERO;
    };
    let time = |value: nix::sys::time::TimeVal| {
        Duration::from_secs(value.tv_sec().unsigned_abs())
            + Duration::from_micros(value.tv_usec().unsigned_abs())
    };
    time(usage.user_time()) + time(usage.system_time())
}

/// Returns the CPU time of a process, user and system.
pub(crate) fn process_cpu(pid: i32) -> Option<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain any characters; utime and stime are fields 14 and 15.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    let total = ticks()? + ticks()?;
    let per_second = sysconf(SysconfVar::CLK_TCK).ok()??.unsigned_abs().max(1);
    Some(Duration::from_micros(total * 1_000_000 / per_second))
}

/// Adds what a move has cost at the destination, when no block was missing any more, to a report.
pub(crate) fn used_there(used: &Used, cost: &mut HostCost) {
    let seconds = |us: u64| us as f64 / 1e6;
    cost.agent_cpu_s = Some(seconds(used.agent_cpu_us));
    cost.agent_peak_bytes = Some(used.agent_peak_bytes);
    cost.page_server_cpu_s = used.page_server_cpu_us.map(seconds);
}

fn peak_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_meter_has_a_peak_of_its_own() {
        const BIG: usize = 96 << 20;
        let first = Meter::start();
        let filled = vec![1_u8; BIG];
        assert!(filled.iter().all(|byte| *byte == 1));
        drop(filled);
        let second = Meter::start();
        assert!(first.usage(None).agent_peak_bytes > BIG as u64);
        let later = second.usage(None).agent_peak_bytes;
        assert!(later > 1 << 16 && later < BIG as u64, "{later}");
    }

    #[test]
    fn this_process_has_a_past() {
        assert!(peak_bytes().unwrap() > 1 << 16);
        assert!(process_cpu(std::process::id() as i32).is_some());
        assert!(process_cpu(-1).is_none());
    }
}
