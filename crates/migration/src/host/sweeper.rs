//! Wakes the tasks that remove what moves of guests have left on this host.

use tokio::sync::watch;

/// Wakes all sweeping tasks at once.
#[derive(Debug, Default)]
pub(crate) struct Sweeper {
    woken: watch::Sender<()>,
}

impl Sweeper {
    /// Lets every task look now for what it has to remove.
    pub(crate) fn wake(&self) {
        self.woken.send_replace(());
    }

    /// Returns a receiver that changes with every [`wake`](Self::wake).
    pub(crate) fn woken(&self) -> watch::Receiver<()> {
        self.woken.subscribe()
    }
}
