//! What moves of guests leave on a host, beyond an attempt or an agent: exports that could not be
//! removed, images of a guest that did not come, cached memory. One task sweeps each kind.

use crate::context::Context;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// When to sweep again: after this time, or only when the sweeper is woken.
pub(crate) type Again = Option<Duration>;

/// A kind of residue.
pub(crate) trait Residue: Send + Sync {
    /// Opens its notes, before an earlier agent's attempts are taken up.
    fn open(&self, _state: &Path) -> io::Result<()> {
        Ok(())
    }

    /// Removes what nothing uses any more. Errors are logged, and it is tried again.
    fn sweep<'a>(
        &'a self,
        context: &'a Arc<Context>,
    ) -> Pin<Box<dyn Future<Output = Again> + Send + 'a>>;
}

/// Sweeps each kind of residue in a task of its own: now, when the sweeper is woken, and as often
/// as the kind asks for.
pub(crate) fn sweep(context: &Arc<Context>, residues: Vec<Box<dyn Residue>>) {
    for residue in residues {
        let (context, woken) = (context.clone(), context.sweeper.woken());
        tokio::spawn(keep(woken, async move || residue.sweep(&context).await));
    }
}

/// Sweeps one kind, again and again.
async fn keep(mut woken: watch::Receiver<()>, mut sweep: impl AsyncFnMut() -> Again) {
    loop {
        woken.mark_unchanged();
        let again = sweep().await;
        let pause = async {
            match again {
                Some(pause) => tokio::time::sleep(pause).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = pause => {}
            woken = woken.changed() => {
                if woken.is_err() {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::sweeper::Sweeper;
    use std::cell::Cell;

    #[tokio::test(start_paused = true)]
    async fn however_often_it_is_woken_one_task_sweeps_and_only_as_long_as_it_has_to() {
        let sweeper = Sweeper::default();
        let (swept, waits) = (Cell::new(0), Cell::new(true));
        let sweep = async || {
            swept.set(swept.get() + 1);
            tokio::time::sleep(Duration::from_millis(10)).await;
            waits.get().then_some(Duration::from_secs(2))
        };
        let moves = async {
            // Many moves fail at the same time.
            (0..100).for_each(|_| sweeper.wake());
            tokio::time::sleep(Duration::from_secs(1)).await;
            let first = swept.get();
            tokio::time::sleep(Duration::from_secs(10)).await;
            let tried = swept.get() - first;
            waits.set(false);
            tokio::time::sleep(Duration::from_secs(10)).await;
            let last = swept.get();
            tokio::time::sleep(Duration::from_secs(1000)).await;
            assert_eq!(swept.get(), last, "nothing is to be swept any more");
            sweeper.wake();
            tokio::time::sleep(Duration::from_secs(1)).await;
            (first, tried, swept.get() - last)
        };
        let (first, tried, again) = tokio::select! {
            () = keep(sweeper.woken(), sweep) => unreachable!("it sweeps for ever"),
            counts = moves => counts,
        };
        assert!((1..=2).contains(&first), "{first}");
        assert!((4..=6).contains(&tried), "{tried}");
        assert_eq!(again, 1);
    }
}
