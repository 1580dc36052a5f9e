//! The destination's side of a migration: admission, receiving, and the attempt until all of the
//! guest is here.

pub(crate) mod admission;
pub(crate) mod arriving_memory;
pub(crate) mod attempt;
pub(crate) mod call;
pub(crate) mod checks;
pub(crate) mod closed;
pub(crate) mod companion;
pub(crate) mod disks;
pub(crate) mod dispatch;
pub(crate) mod fetch;
pub(crate) mod fetch_client;
pub(crate) mod files;
pub(crate) mod guest_clock;
pub(crate) mod guest_rate;
pub(crate) mod handle;
pub(crate) mod local_content;
pub(crate) mod page_server;
pub(crate) mod qemu;
pub(crate) mod receiver;
pub(crate) mod recovered;
pub(crate) mod store;
pub(crate) mod waits;

use crate::context::Context;
use crate::destination::closed::Closed;
use crate::destination::companion::{About, Companions, List};
use crate::destination::handle::{AttemptHandle, Handles};
use crate::replicas::First;
use longhaul_protocol::{AttemptId, HostId};
use std::ops::Deref;
use std::sync::Arc;

/// What the attempts share that have this host as their destination.
pub(crate) struct Destination {
    pub(crate) context: Arc<Context>,
    /// The attempts in progress.
    pub(crate) handles: Arc<Handles>,
    pub(crate) closed: Closed,
    /// Creates the companions of each guest.
    companions: List,
    pub(crate) first_replicas: First,
}

impl Deref for Destination {
    type Target = Context;

    fn deref(&self) -> &Context {
        &self.context
    }
}

impl Destination {
    /// Creates the destination's side without attempts.
    pub(crate) fn new(context: Arc<Context>, companions: List) -> Self {
        Self {
            context,
            handles: Arc::default(),
            closed: Closed::default(),
            companions,
            first_replicas: First::default(),
        }
    }

    /// Returns the handle of this attempt from this source, if its task runs.
    pub(crate) fn attempt(&self, id: AttemptId, source: HostId) -> Option<Arc<AttemptHandle>> {
        self.handles.find(id, source)
    }

    /// Creates the companions of a guest.
    pub(crate) fn companions(&self, about: &About) -> Companions {
        Companions::new((self.companions)(about))
    }
}
