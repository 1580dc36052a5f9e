//! The destination side of a migration: admission, receiving, and an attempt until the guest is
//! whole.

pub(crate) mod admission;
pub(crate) mod attempt;
pub(crate) mod checks;
pub(crate) mod disks;
pub(crate) mod dispatch;
pub(crate) mod fetch;
pub(crate) mod fetch_client;
pub(crate) mod files;
pub(crate) mod guest_clock;
pub(crate) mod local_content;
pub(crate) mod qemu;
pub(crate) mod receiver;
pub(crate) mod recovered;

use crate::context::Context;
use crate::destination::attempt::AttemptHandle;
use crate::destination::recovered::Attempts;
use crate::host::lock::lock;
use longhaul_protocol::{Attempt, HostId, MigrationId};
use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard};

/// The attempts of which this host is the destination.
pub(crate) struct Destination {
    pub(crate) context: Arc<Context>,
    arrivals: Mutex<HashMap<MigrationId, Arc<AttemptHandle>>>,
    /// Those that no task is busy with.
    pub(crate) attempts: Attempts,
}

impl Deref for Destination {
    type Target = Context;

    fn deref(&self) -> &Context {
        &self.context
    }
}

impl Destination {
    /// None yet.
    pub(crate) fn new(context: Arc<Context>) -> Self {
        Self {
            context,
            arrivals: Mutex::default(),
            attempts: Attempts::default(),
        }
    }

    pub(crate) fn arrivals(&self) -> MutexGuard<'_, HashMap<MigrationId, Arc<AttemptHandle>>> {
        lock(&self.arrivals)
    }

    pub(crate) fn add_arrival(&self, arrival: Arc<AttemptHandle>) {
        self.arrivals().insert(arrival.migration, arrival);
    }

    pub(crate) fn remove_arrival(&self, arrival: &AttemptHandle) {
        self.arrivals().remove(&arrival.migration);
    }

    /// The arrival of this attempt from this source, if it is under way.
    pub(crate) fn arrival(
        &self,
        migration: MigrationId,
        attempt: Attempt,
        source: HostId,
    ) -> Option<Arc<AttemptHandle>> {
        let found = self.arrivals().get(&migration).cloned();
        found.filter(|arrival| arrival.attempt == attempt && arrival.source == source)
    }
}
