//! Measures the effect of a move on the guest from outside, and the move's cost.

use longhaul_lab::arena::Beat;
use serde::Serialize;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long before a move the guest's usual rhythm and speed are measured.
pub const BEFORE: Duration = Duration::from_secs(3);
/// How long the guest is observed after a move.
pub const AFTER: Duration = Duration::from_secs(2);
const SAMPLE_EVERY: Duration = Duration::from_millis(100);

/// The effect of a move on the guest.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Observed {
    /// Longest gap between two heartbeats, less the usual one.
    pub downtime_ms: f64,
    /// The usual gap before the move.
    pub usual_gap_ms: f64,
    /// Gaps that were longer than the usual one.
    pub stalls: Stalls,
    /// The workload's units of work per second, or else pages rewritten and verified, before it.
    pub work_before_per_s: f64,
    /// The same, during it.
    pub work_during_per_s: f64,
    /// The same, after it.
    pub work_after_per_s: Option<f64>,
}

/// The numbers of gaps between heartbeats that exceed the usual one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Stalls {
    /// By more than 10 ms.
    pub above_10_ms: u32,
    /// By more than 100 ms.
    pub above_100_ms: u32,
    /// By more than 1000 ms.
    pub above_1000_ms: u32,
}

/// Evaluates the heartbeats around a move; `None` where there are too few of them.
pub fn observe(beats: &[Beat], began: Instant, ended: Instant) -> Option<Observed> {
    let from = began.checked_sub(BEFORE).unwrap_or(began);
    let before = between(beats, from, began);
    let mut usual: Vec<f64> = gaps(before).collect();
    usual.sort_by(f64::total_cmp);
    let usual_gap_ms = *usual.get(usual.len() / 2)?;

    let last_before = before.len().checked_sub(1).map(|last| before[last].at)?;
    let watched = between(beats, last_before, ended + AFTER);
    let mut stalls = Stalls::default();
    let mut longest: f64 = 0.0;
    for gap in gaps(watched) {
        let stall = gap - usual_gap_ms;
        longest = longest.max(stall);
        stalls.above_10_ms += u32::from(stall > 10.0);
        stalls.above_100_ms += u32::from(stall > 100.0);
        stalls.above_1000_ms += u32::from(stall > 1000.0);
    }
    Some(Observed {
        downtime_ms: longest,
        usual_gap_ms,
        stalls,
        work_before_per_s: work_per_s(before)?,
        work_during_per_s: work_per_s(until_heard_again(beats, last_before, ended))?,
        work_after_per_s: work_per_s(between(beats, ended, ended + AFTER)),
    })
}

/// The guest around its switchover.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Switched {
    /// The gap that ended with the first heartbeat from the destination.
    pub gap_ms: f64,
    /// As [`Observed::work_before_per_s`], for as long as the guest was observed from the last
    /// heartbeat at the source on. A guest that waits for missing content right after the
    /// switchover looks the same from outside as one that is still stopped: both do no work.
    pub work_per_s: Option<f64>,
}

/// Evaluates the heartbeats around the first one from the destination, which came at `at`.
/// `observed` is how long the guest was observed from the one before on. `None` where it was never
/// heard at the source.
pub fn switched(beats: &[Beat], at: Instant, observed: Duration) -> Option<Switched> {
    let first = beats.partition_point(|beat| beat.at < at);
    let last_before = beats.get(first.checked_sub(1)?)?;
    let last = between(beats, last_before.at, last_before.at + observed).last()?;
    // The time counts, not the heartbeats: a guest that was silent to the end did nothing then.
    let work = last.work().saturating_sub(last_before.work()) as f64;
    Some(Switched {
        gap_ms: (at - last_before.at).as_secs_f64() * 1000.0,
        work_per_s: (!observed.is_zero()).then(|| work / observed.as_secs_f64()),
    })
}

fn between(beats: &[Beat], from: Instant, to: Instant) -> &[Beat] {
    let start = beats.partition_point(|beat| beat.at < from);
    let end = beats.partition_point(|beat| beat.at <= to);
    &beats[start..end.max(start)]
}

/// As [`between`], with the first heartbeat after: a guest that was silent to the end did no work.
fn until_heard_again(beats: &[Beat], from: Instant, to: Instant) -> &[Beat] {
    let next = beats.partition_point(|beat| beat.at <= to);
    between(
        &beats[..beats.len().min(next + 1)],
        from,
        beats.get(next).map_or(to, |beat| beat.at),
    )
}

fn gaps(beats: &[Beat]) -> impl Iterator<Item = f64> {
    beats
        .windows(2)
        .map(|pair| (pair[1].at - pair[0].at).as_secs_f64() * 1000.0)
}

fn work_per_s(beats: &[Beat]) -> Option<f64> {
    let (first, last) = (beats.first()?, beats.last()?);
    let seconds = (last.at - first.at).as_secs_f64();
    (seconds > 0.0).then(|| last.work().saturating_sub(first.work()) as f64 / seconds)
}

/// The resources that a process used between two moments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Used {
    /// CPU time, in seconds.
    pub cpu_s: f64,
    /// The peak memory in bytes, including memory files created by the process.
    pub peak_bytes: u64,
}

/// Observes a process until stopped, or until the process ends.
#[derive(Debug)]
pub struct ProcessMeter {
    latest: Arc<Mutex<Option<Used>>>,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl ProcessMeter {
    /// Starts to observe the process.
    pub fn start(pid: u32) -> std::io::Result<Self> {
        // Without the right to reset it the peak counts from the process's start.
        let _ = fs::write(format!("/proc/{pid}/clear_refs"), "5");
        let (latest, ended) = (Arc::new(Mutex::new(None)), Arc::new(AtomicBool::new(false)));
        let thread = thread::Builder::new().name("meter".to_owned()).spawn({
            let (latest, ended) = (latest.clone(), ended.clone());
            let first_cpu_s = cpu_s(pid);
            move || {
                loop {
                    let last_time = ended.load(Ordering::Relaxed);
                    let (Some(first), Some(cpu_s)) = (first_cpu_s, cpu_s(pid)) else {
                        break;
                    };
                    let peak_bytes = peak_bytes(pid).unwrap_or(0);
                    let mut latest = latest.lock().unwrap_or_else(PoisonError::into_inner);
                    let before = latest.map_or(0, |used: Used| used.peak_bytes);
                    let peak_bytes = peak_bytes.max(before);
                    *latest = Some(Used {
                        cpu_s: cpu_s - first,
                        peak_bytes,
                    });
                    drop(latest);
                    if last_time {
                        break;
                    }
                    thread::park_timeout(SAMPLE_EVERY);
                }
            }
        })?;
        Ok(Self {
            latest,
            ended,
            thread: Some(thread),
        })
    }

    /// Returns the resources used until now, or until its end; `None` where it never existed.
    pub fn finish(mut self) -> Option<Used> {
        self.stop();
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It only reads; a panic of it would have been printed.
            let _ = thread.join();
        }
    }
}

impl Drop for ProcessMeter {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns the CPU time of a process and its threads so far; `None` where it is gone.
pub fn cpu_s(pid: u32) -> Option<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the name in brackets, which may contain anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    if fields.next()? == "Z" {
        return None;
    }
    let user: u64 = fields.nth(10)?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok()??;
    Some((user + system) as f64 / ticks as f64)
}

/// Returns the peak of a process's resident memory, and all of its memory files beside it: some
/// pages of mapped files may be counted twice, none is missed. Files that it only reads are
/// another's: guests' RAM.
fn peak_bytes(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let resident_kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let mut seen = HashSet::new();
    let mut files_bytes = 0;
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))
        .ok()?
        .filter_map(Result::ok)
    {
        let is_memory_file = fs::read_link(entry.path())
            .is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:"));
        if let (true, Ok(file)) = (
            is_memory_file && !is_read_only(pid, &entry.file_name()),
            fs::metadata(entry.path()),
        ) && seen.insert(file.ino())
        {
            files_bytes += file.blocks() * 512;
        }
    }
    Some((resident_kib << 10) + files_bytes)
}

/// Returns whether a process has a file open for reading only.
fn is_read_only(pid: u32, descriptor: &OsStr) -> bool {
    let path = format!("/proc/{pid}/fdinfo/{}", descriptor.display());
    let info = fs::read_to_string(path).unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    // In octal; the access mode is the last digit.
    flags.is_some_and(|flags| matches!(flags.trim().chars().last(), Some('0' | '4')))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    fn beat(start: Instant, ms: u64, number: u64) -> Beat {
        let at = start + Duration::from_millis(ms);
        Beat {
            at,
            number,
            clock_us: 0,
            writes: number * 10,
            verified: 0,
            errors: 0,
            work: None,
        }
    }

    #[test]
    fn downtime_is_the_longest_gap_less_the_usual_one() {
        let start = Instant::now();
        let mut times: Vec<u64> = (0..800).map(|number| number * 5).collect();
        times.extend((0..20).map(|number| 4_250 + number * 25));
        times.extend((0..400).map(|number| 5_000 + number * 5));
        let beats: Vec<Beat> = times
            .iter()
            .zip(1..)
            .map(|(ms, number)| beat(start, *ms, number))
            .collect();
        let at = |ms| start + Duration::from_millis(ms);
        let observed = observe(&beats, at(3_900), at(5_000)).unwrap();
        assert!((observed.usual_gap_ms - 5.0).abs() < 0.01);
        // From 3995 to 4250, and from 4725 to 5000.
        assert!((observed.downtime_ms - 270.0).abs() < 0.01, "{observed:?}");
        let stalls = Stalls {
            above_10_ms: 21,
            above_100_ms: 2,
            above_1000_ms: 0,
        };
        assert_eq!(observed.stalls, stalls);
        assert!(
            (observed.work_before_per_s - 2000.0).abs() < 10.0,
            "{observed:?}"
        );
        assert!(observed.work_during_per_s < 500.0, "{observed:?}");
        assert!((observed.work_after_per_s.unwrap() - 2000.0).abs() < 10.0);
    }

    #[test]
    fn a_gap_that_begins_before_the_move_counts() {
        let start = Instant::now();
        let times = (0..100)
            .map(|n| n * 5)
            .chain((0..100).map(|n| 1_000 + n * 5));
        let beats: Vec<Beat> = times.zip(1..).map(|(ms, n)| beat(start, ms, n)).collect();
        let at = |ms| start + Duration::from_millis(ms);
        let observed = observe(&beats, at(600), at(900)).unwrap();
        assert!((observed.downtime_ms - 500.0).abs() < 0.01, "{observed:?}");
        assert!(observe(&beats[..0], at(600), at(900)).is_none());
        assert!(observe(&beats, at(0), at(900)).is_none());
    }

    #[test]
    fn work_after_the_switchover_counts_silence() {
        let start = Instant::now();
        // Silent from 495 to 900, and again from 1395.
        let times = (0..100)
            .map(|n| n * 5)
            .chain((0..100).map(|n| 900 + n * 5))
            .chain([5_000]);
        let beats: Vec<Beat> = times.zip(1..).map(|(ms, n)| beat(start, ms, n)).collect();
        let at = start + Duration::from_millis(900);
        let work_per_s = |observed: u64| {
            let seen = switched(&beats, at, Duration::from_millis(observed)).unwrap();
            assert!((seen.gap_ms - 405.0).abs() < 0.01, "{seen:?}");
            seen.work_per_s
        };
        // 100 heartbeats of 10 units each.
        assert!((work_per_s(2000).unwrap() - 500.0).abs() < 0.01);
        assert_eq!(work_per_s(400), Some(0.0));
        assert_eq!(work_per_s(0), None);
        assert_eq!(switched(&beats, start, Duration::from_secs(2)), None);
    }

    #[test]
    fn a_process_is_measured_to_its_end() {
        let mut child = Command::new("sh")
            .args([
                "-c",
                "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; sleep 0.3",
            ])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let meter = ProcessMeter::start(child.id()).unwrap();
        child.wait().unwrap();
        let used = meter.finish().unwrap();
        assert!(used.cpu_s > 0.0, "{used:?}");
        assert!(used.peak_bytes > 100_000, "{used:?}");
        assert!(ProcessMeter::start(child.id()).unwrap().finish().is_none());
    }
}
