//! What the system says of a process's threads.

use std::fs;

/// Threads of a process that are looked at.
const THREADS_MAX: usize = 4096;

/// Whether the system holds one of a process's threads in something that cannot be interrupted, as
/// the file system of a slow disk does. To kill such a process changes nothing until that has ended.
pub(super) fn is_held(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task"));
    let mut threads = threads.into_iter().flatten().take(THREADS_MAX).flatten();
    threads.any(|thread| {
        let stat = fs::read_to_string(thread.path().join("stat"));
        stat.is_ok_and(|stat| state(&stat) == Some('D'))
    })
}

/// The state of a thread. Its name, in brackets before that, may hold anything.
fn state(stat: &str) -> Option<char> {
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_read_whatever_the_name() {
        assert_eq!(state("7 (a) D (b) S 1 7 7 0"), Some('S'));
        assert_eq!(state("7 (nbd-1) D 1 7 7 0"), Some('D'));
        assert_eq!(state("7"), None);
    }
}
