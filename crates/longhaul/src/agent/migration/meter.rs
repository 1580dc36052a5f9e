//! What a migration costs a host: CPU time of the agent and of QEMU, and the agent's peak of
//! memory. The agent's figures are those of its whole process.

use nix::sys::resource::{UsageWho, getrusage};
use nix::unistd::{SysconfVar, sysconf};
use std::fs;
use std::time::Duration;

/// Counts from when it was started.
#[derive(Debug, Clone, Copy)]
pub(super) struct Meter {
    agent_cpu: Duration,
}

/// What was counted.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Usage {
    pub(super) agent_cpu: Duration,
    pub(super) qemu_cpu: Duration,
    pub(super) agent_peak_bytes: u64,
}

impl Meter {
    pub(super) fn start() -> Self {
        Self {
            agent_cpu: agent_cpu(),
        }
    }

    /// So far; QEMU's time is that of its whole life.
    pub(super) fn usage(&self, qemu: Option<i32>) -> Usage {
        Usage {
            agent_cpu: agent_cpu().saturating_sub(self.agent_cpu),
            qemu_cpu: qemu.and_then(process_cpu).unwrap_or_default(),
            agent_peak_bytes: peak_bytes().unwrap_or(0),
        }
    }
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

/// CPU time of a process, user and system.
pub(super) fn process_cpu(pid: i32) -> Option<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; utime and stime are fields 14 and 15.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    let total = ticks()? + ticks()?;
    let per_second = sysconf(SysconfVar::CLK_TCK).ok()??.unsigned_abs().max(1);
    Some(Duration::from_micros(total * 1_000_000 / per_second))
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
    fn this_process_has_a_past() {
        assert!(peak_bytes().unwrap() > 1 << 16);
        assert!(process_cpu(std::process::id() as i32).is_some());
        assert!(process_cpu(-1).is_none());
    }
}
