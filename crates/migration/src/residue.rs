//! What moves of guests leave on a host, beyond an attempt or an agent: exports that could not be
//! removed, images of a guest that did not come, cached memory. One task sweeps each kind.

use crate::context::Context;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

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
        let context = context.clone();
        let mut woken = context.sweeper.woken();
        tokio::spawn(async move {
            loop {
                woken.mark_unchanged();
                let again = residue.sweep(&context).await;
                let pause = async {
                    match again {
                        Some(pause) => tokio::time::sleep(pause).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    () = pause => {}
                    // The context holds the sender.
                    _ = woken.changed() => {}
                }
            }
        });
    }
}
