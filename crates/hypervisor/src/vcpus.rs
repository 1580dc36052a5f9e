//! Reads how much processor time a guest's vCPUs have used, without asking QEMU each time.

use crate::qmp::{Qmp, QmpError};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The threads of a QEMU that run its guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vcpus {
    pid: i32,
    /// Empty if QEMU does not tell them apart from its others.
    threads: BTreeSet<i32>,
}

impl Vcpus {
    /// Asks a QEMU which of its threads run the guest.
    pub async fn of(qmp: &Qmp, pid: i32) -> Result<Self, QmpError> {
        let cpus = qmp.query("query-cpus-fast").await?;
        let threads = threads(&cpus);
        Ok(Self { pid, threads })
    }

    /// Returns whether all threads of QEMU are counted.
    pub fn is_whole_process(&self) -> bool {
        self.threads.is_empty()
    }

    /// Returns the processor time that they have used since they started.
    pub fn cpu_time(&self) -> io::Result<Duration> {
        let folder = PathBuf::from(format!("/proc/{}/task", self.pid));
        let of = |thread: &str| on_cpu(&folder.join(thread).join("schedstat"));
        if !self.is_whole_process() {
            let mut threads = self.threads.iter();
            return threads.try_fold(Duration::ZERO, |sum, it| Ok(sum + of(&it.to_string())?));
        }
        let mut sum = Duration::ZERO;
        for thread in fs::read_dir(&folder)? {
            match of(&thread?.file_name().to_string_lossy()) {
                Ok(time) => sum += time,
                // It has ended meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(sum)
    }
}

/// Returns the threads in an answer to `query-cpus-fast`. Without one for each vCPU they are not
/// known.
fn threads(cpus: &Value) -> BTreeSet<i32> {
    let cpus = cpus.as_array().map_or(&[][..], Vec::as_slice);
    let thread = |cpu: &Value| i32::try_from(cpu["thread-id"].as_i64()?).ok();
    let threads: Option<BTreeSet<i32>> = cpus.iter().map(thread).collect();
    threads.unwrap_or_default()
}

/// Reads the first figure of a `schedstat`: nanoseconds on a processor.
fn on_cpu(path: &Path) -> io::Result<Duration> {
    let text = match fs::read_to_string(path) {
        // The thread ended while it was read.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {
            return Err(io::ErrorKind::NotFound.into());
        }
        other => other?,
    };
    let time_ns = text.split_whitespace().next();
    let time_ns = time_ns.and_then(|time_ns| time_ns.parse().ok());
    let time_ns = time_ns.ok_or_else(|| io::Error::other("not a schedstat"))?;
    Ok(Duration::from_nanos(time_ns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::sync::mpsc;

    #[test]
    fn vcpus_that_share_a_thread_are_counted_once() {
        let of = |ids: &[Value]| {
            let cpus = ids
                .iter()
                .map(|id| json!({"cpu-index": 0, "thread-id": id}));
            threads(&Value::Array(cpus.collect()))
        };
        assert_eq!(of(&[json!(7), json!(8)]), BTreeSet::from([7, 8]));
        assert_eq!(of(&[json!(7), json!(7)]), BTreeSet::from([7]));
        assert_eq!(of(&[json!(7), Value::Null]), BTreeSet::new());
        assert_eq!(threads(&Value::Null), BTreeSet::new());
    }

    #[test]
    fn threads_are_told_apart_from_the_rest_of_their_process() {
        let pid = std::process::id() as i32;
        let (done, ends) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let busy = std::thread::spawn(move || {
            let own = fs::read_link("/proc/thread-self").unwrap();
            let own = own.file_name().unwrap().to_str().unwrap().to_owned();
            tell.send(own.parse::<i32>().unwrap()).unwrap();
            while ends.try_recv() == Err(mpsc::TryRecvError::Empty) {
                std::hint::black_box(0);
            }
        });
        let one = Vcpus {
            pid,
            threads: BTreeSet::from([told.recv().unwrap()]),
        };
        let all = Vcpus {
            pid,
            threads: BTreeSet::new(),
        };
        assert!(all.is_whole_process() && !one.is_whole_process());
        let before = one.cpu_time().unwrap();
        let used = loop {
            let used = one.cpu_time().unwrap();
            if used > before + Duration::from_millis(50) {
                break used;
            }
            std::thread::yield_now();
        };
        assert!(all.cpu_time().unwrap() >= used);
        drop(done);
        busy.join().unwrap();
        // The kernel removes a thread after it was joined.
        let gone = loop {
            match one.cpu_time() {
                Ok(_) => std::thread::yield_now(),
                Err(error) => break error,
            }
        };
        assert_eq!(gone.kind(), io::ErrorKind::NotFound);
    }
}
