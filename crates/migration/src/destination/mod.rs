//! The destination's side of a migration: admission, receiving, and the attempt until all of the
//! guest is here.

pub(crate) mod admission;
pub(crate) mod attempt;
pub(crate) mod checks;
pub(crate) mod companion;
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
use crate::destination::companion::List;
use crate::destination::recovered::Attempts;
use crate::host::lock::lock;
use longhaul_protocol::{Attempt, HostId, MigrationId};
use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard};

/// The attempts that have this host as their destination.
pub(crate) struct Destination {
    pub(crate) context: Arc<Context>,
    arrivals: Mutex<HashMap<MigrationId, Arc<AttemptHandle>>>,
    /// The attempts without a task.
    pub(crate) attempts: Attempts,
    /// Creates the companions of each guest.
    companions: List,
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
            arrivals: Mutex::default(),
            attempts: Attempts::default(),
            companions,
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

    /// Returns the handle of this attempt from this source, if its task runs.
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
