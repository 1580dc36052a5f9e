//! The state of a process's threads, as the system reports it.

use super::heart::HEART;
use std::fs;

/// Limit on the inspected threads of a process.
const THREADS_MAX: usize = 4096;

/// Returns whether the system holds one of a process's threads in an uninterruptible operation, as
/// the file system of a slow disk does. Killing such a process has no effect until that has ended.
pub(super) fn is_held(pid: u32) -> bool {
    threads(pid).iter().any(|thread| thread.state == 'D')
}

/// Returns whether a process lacks processor time to send beats: its heartbeat thread waits for a
/// processor, or has not been started yet.
pub(super) fn is_starved(pid: u32) -> bool {
    let threads = threads(pid);
    match threads.iter().find(|thread| thread.name == HEART) {
        Some(heart) => heart.state == 'R',
        None => threads.iter().any(|thread| thread.state == 'R'),
    }
}

struct Thread {
    name: String,
    state: char,
}

fn threads(pid: u32) -> Vec<Thread> {
    let threads = fs::read_dir(format!("/proc/{pid}/task"));
    let threads = threads.into_iter().flatten().take(THREADS_MAX).flatten();
    let stats = threads.filter_map(|thread| fs::read_to_string(thread.path().join("stat")).ok());
    stats.filter_map(|stat| Thread::parse(&stat)).collect()
}

impl Thread {
    /// Parses a thread's `stat` file. The second field is the name in brackets, which may hold
    /// anything, and the third is the state.
    fn parse(stat: &str) -> Option<Self> {
        let (name, rest) = stat.rsplit_once(") ")?;
        let (_, name) = name.split_once(" (")?;
        Some(Self {
            name: name.to_owned(),
            state: rest.chars().next()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_read_whatever_the_name() {
        let read = |stat: &str| Thread::parse(stat).map(|thread| (thread.name, thread.state));
        let known = |name: &str, state| Some((name.to_owned(), state));
        assert_eq!(read("7 (a) D (b) S 1 7 7 0"), known("a) D (b", 'S'));
        assert_eq!(read("7 (nbd-1) D 1 7 7 0"), known("nbd-1", 'D'));
        assert_eq!(read("7"), None);
        assert!(!threads(std::process::id()).is_empty());
    }
}
