//! Tasks that own an attempt. A panic in such a task ends the agent.
//!
//! Such a task holds a guest's reservation and its journal. If only the task ended, the guest's
//! name would be free while its QEMU and its journal are in the middle of a handover. The next
//! agent continues the attempt from its journal, which is the best-tested path. Guests do not
//! depend on the agent.

use std::future::Future;
use std::process::abort;
use tokio::task::JoinHandle;

/// Spawns a task that owns an attempt.
pub(crate) fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    tokio::spawn(owning(future))
}

/// Runs a future that owns an attempt in the current task.
pub(crate) async fn owning<F: Future>(future: F) -> F::Output {
    let _guard = AbortOnPanic;
    future.await
}

struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(
                "a migration's task panicked: the agent ends, to take it up from its journal"
            );
            abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    #[test]
    #[ignore = "run by the test below, in a process of its own"]
    fn panics() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        // The test harness would only count a panic.
        let _ = runtime.block_on(async { spawn(async { panic!("on purpose") }).await });
    }

    #[test]
    fn a_panic_of_an_owner_ends_the_process() {
        let test = std::env::current_exe().unwrap();
        let mut command = Command::new(test);
        command.args(["host::task::tests::panics", "--exact", "--ignored"]);
        let output = command.output().unwrap();
        assert_eq!(output.status.signal(), Some(6), "{output:?}");
    }

    #[test]
    fn what_an_owner_returns_is_passed_on() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        let returned = runtime.block_on(async { spawn(async { 7 }).await });
        assert_eq!(returned.unwrap(), 7);
    }
}
