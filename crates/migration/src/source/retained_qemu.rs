//! Retained QEMUs: those of guests that have left, until the guests' memory is in the memory cache
//! ([`KeptMemory`](crate::host::memory_cache::KeptMemory)). The cache is written after the move,
//! and as long as the RAM is not needed for another guest.

use crate::context::Context;
use crate::host::fail_point;
use crate::host::memory_cache::{KeptMemory, Memory, Written};
use crate::host::qemu::is_alive;
use crate::host::retained_qemus::Retained;
use longhaul_api::Phase;
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::memory::GuestMemory;
use longhaul_protocol::BlockRange;
use longhaul_storage::files::{RealFiles, create_folder};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, TryLockError};
use std::thread;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::task::block_in_place;

/// Time limit for a retained QEMU.
const WITHIN: Duration = Duration::from_secs(3600);
/// Interval of the checks whether other moves and retained QEMUs are done.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The QEMU of a guest that runs elsewhere and no longer needs it.
pub(crate) struct RetainedQemu {
    guest: Guest,
    memory: Arc<GuestMemory>,
    /// The indexes of the RAM blocks that were regions of the move.
    places: Vec<usize>,
}

/// The reader of a guest's memory while the cache is written.
struct Read<'a> {
    departed: &'a RetainedQemu,
    context: &'a Context,
    stands: &'a Retained,
    until: Instant,
}

impl Memory for Read<'_> {
    fn regions(&self) -> Vec<u64> {
        let blocks = self.departed.memory.blocks();
        let places = self.departed.places.iter();
        places
            .filter_map(|place| Some(blocks.get(*place)?.blocks()))
            .collect()
    }

    fn read(&self, region: usize, range: BlockRange, into: &mut [u8]) -> Result<(), String> {
        let RetainedQemu {
            guest,
            memory,
            places,
        } = self.departed;
        if range.start > 0 {
            fail_point::keeping();
        }
        let place = places.get(region).ok_or("there is no such region")?;
        let read = memory.read(*place, &[range], into);
        read.map_err(|error| error.to_string())?;
        is_alive(guest)
    }

    fn may_go_on(&self) -> bool {
        loop {
            if self.stands.gives_way.load(Ordering::Relaxed) || Instant::now() > self.until {
                return false;
            }
            if !self.context.somebody_moves() {
                return true;
            }
            thread::sleep(LOOK_EVERY);
        }
    }
}

impl RetainedQemu {
    /// Retains a guest's QEMU. Returns `None` if no memory is to be cached, or the note cannot be
    /// written.
    pub(crate) fn stand(
        context: &Context,
        guest: &Guest,
        memory: &Arc<GuestMemory>,
        places: Vec<usize>,
    ) -> Option<Self> {
        context.parts.kept_memory.as_ref()?;
        let noted = block_in_place(|| note(&context.parts.config.state, guest.name()));
        if let Err(error) = noted {
            tracing::warn!(guest = guest.name(), %error, "its memory is not kept");
            return None;
        }
        Some(Self {
            guest: guest.clone(),
            memory: memory.clone(),
            places,
        })
    }

    /// Returns the guest.
    pub(crate) fn guest(&self) -> &Guest {
        &self.guest
    }

    /// Writes the guest's memory to the cache.
    pub(crate) async fn written(
        self,
        context: &Arc<Context>,
        stands: &Arc<Retained>,
    ) -> io::Result<Written> {
        let (done, written) = oneshot::channel();
        let (context, stands) = (context.clone(), stands.clone());
        let thread = thread::Builder::new().name("kept-memory".to_owned());
        thread.spawn(move || {
            let outcome = match &context.parts.kept_memory {
                Some(kept) => self.write(kept, &context, &stands),
                None => Err(io::Error::other("it is not to be kept")),
            };
            // The receiver waits until this is sent.
            let _ = done.send(outcome);
        })?;
        let broke = |_| Err(io::Error::other("a part of the agent broke"));
        written.await.unwrap_or_else(broke)
    }

    fn write(
        &self,
        kept: &KeptMemory,
        context: &Context,
        stands: &Retained,
    ) -> io::Result<Written> {
        let read = Read {
            departed: self,
            context,
            stands,
            until: Instant::now() + WITHIN,
        };
        let nothing = Written {
            bytes: 0,
            whole: false,
        };
        let _turn = loop {
            if !read.may_go_on() {
                return Ok(nothing);
            }
            match context.retained_qemus.turn.try_lock() {
                Ok(turn) => break turn,
                Err(TryLockError::Poisoned(turn)) => break turn.into_inner(),
                Err(TryLockError::WouldBlock) => thread::sleep(LOOK_EVERY),
            }
        };
        kept.write(self.guest.name(), &read)
    }
}

/// Returns the folder with a note for each guest whose QEMU is retained.
pub(crate) fn folder(state: &Path) -> PathBuf {
    state.join("departed")
}

fn note(state: &Path, guest: &str) -> io::Result<()> {
    let folder = folder(state);
    create_folder(&RealFiles, &folder)?;
    File::create(folder.join(guest))?.sync_all()?;
    File::open(folder)?.sync_all()
}

impl Context {
    /// Returns whether a guest moves to or from this host and has not arrived yet.
    fn somebody_moves(&self) -> bool {
        let entries = self.registry.list();
        entries
            .iter()
            .any(|entry| entry.outcome().is_none() && entry.phase() != Phase::Finishing)
    }
}
