//! Getting what has not come of an image, in the background.

use super::ImageDisk;
use super::order::{Order, Round};
use crate::bases::sealed;
use crate::manifest::Stripe;
use nix::errno::Errno;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

/// Stripes that are fetched at once.
const WORKERS: usize = 4;
/// How long the background waits for reads at most before it looks again.
const YIELD: Duration = Duration::from_secs(1);

/// What the background came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fetched {
    /// All of the image is in its file, durably: the file is the disk from now on.
    All,
    /// So many stripes cannot be had. Calling again tries again.
    Failed(u32),
    /// The disk was ended before.
    Ended,
}

impl ImageDisk {
    /// Fetches all that has not come, in this order, and then what it does not name. It
    /// returns when all has come or was tried, and lets reads go first.
    pub fn fetch(&self, order: &Order) -> io::Result<Fetched> {
        self.fetch_while(order, || true)
    }

    /// The same as long as there is a point in it.
    pub(crate) fn fetch_while(
        &self,
        order: &Order,
        go_on: impl Fn() -> bool + Sync,
    ) -> io::Result<Fetched> {
        let round = Round::new(order, self.manifest.stripe_count());
        let work = &|| {
            while !self.has_ended() && go_on() {
                let Some(index) = round.next() else { break };
                let Stripe::Stored(digest) = self.manifest.stripe(index) else {
                    continue;
                };
                self.let_reads_go_first();
                if !self.is_here(index) {
                    // What fails stays missing, and its owner was told.
                    let _ = self.obtain(index, digest);
                }
            }
        };
        thread::scope(|scope| {
            let workers = [(); WORKERS].map(|()| scope.spawn(work));
            let results = workers.map(thread::ScopedJoinHandle::join);
            let ended = results.into_iter().all(|result| result.is_ok());
            ended.then_some(()).ok_or(Errno::EIO)
        })?;
        if self.missing() == 0 {
            self.file.sync_all()?;
            return Ok(Fetched::All);
        }
        if self.has_ended() {
            return Ok(Fetched::Ended);
        }
        Ok(Fetched::Failed(self.missing()))
    }

    /// Has the file, all of which is here, say so, durably.
    pub(crate) fn seal(&self) -> io::Result<()> {
        self.file.set_permissions(Permissions::from_mode(0o444))?;
        self.file.set_modified(sealed())?;
        self.file.sync_all()
    }

    fn let_reads_go_first(&self) {
        let waits = || self.waiting.load(Ordering::Acquire) > 0;
        while waits() && !self.has_ended() {
            self.wait(YIELD, waits);
        }
    }
}
