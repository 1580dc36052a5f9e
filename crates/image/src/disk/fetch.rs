//! Fetches the missing stripes of an image in the background.

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

/// Stripes that are fetched concurrently.
const WORKERS: usize = 4;
/// Limit on the time for which the background yields to reads before it checks again.
const YIELD: Duration = Duration::from_secs(1);

/// The result of fetching in the background.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fetched {
    /// The whole image is in its file, durably: from now on the file is the disk.
    All,
    /// This number of stripes could not be fetched. Another call tries again.
    Failed(u32),
    /// The disk was ended before.
    Ended,
}

impl ImageDisk {
    /// Fetches all missing stripes: first in this order, then those that it does not name. Returns
    /// when all of them have arrived or were tried. Reads have priority.
    pub fn fetch(&self, order: &Order) -> io::Result<Fetched> {
        self.fetch_while(order, || true)
    }

    /// Fetches all missing stripes while a condition holds.
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
                    // A failed stripe stays missing, and its owner was told.
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

    /// Marks the file as complete, durably. All of its content must be here.
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
