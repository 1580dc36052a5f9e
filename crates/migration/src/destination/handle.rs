//! The handle of an attempt in progress, through which other tasks see it and pass on its source's
//! connections.

use crate::destination::call::Call;
use crate::host::lock::lock;
use longhaul_attempt::destination::attempt_state;
use longhaul_engine::handover::DestinationState;
use longhaul_protocol::message::ToSource;
use longhaul_protocol::{AttemptId, Epoch, HostId, MigrationId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use tokio::sync::mpsc;

/// A connection of the source, with an epoch if the source has blocks to send.
pub(crate) type Called = (Call, Option<Epoch>);

/// The part of an attempt that other tasks see.
pub(crate) struct AttemptHandle {
    pub(crate) id: AttemptId,
    pub(crate) source: HostId,
    state: Mutex<DestinationState>,
    calls: mpsc::Sender<Called>,
}

impl AttemptHandle {
    /// Returns the state of the handover.
    pub(crate) fn state(&self) -> DestinationState {
        lock(&self.state).clone()
    }

    /// Creates the handle of an attempt, and the receiver of its source's calls.
    pub(crate) fn new(
        id: AttemptId,
        source: HostId,
        state: &DestinationState,
    ) -> (Arc<Self>, mpsc::Receiver<Called>) {
        let (calls, called) = mpsc::channel(4);
        let arrival = Arc::new(Self {
            id,
            source,
            state: Mutex::new(state.clone()),
            calls,
        });
        (arrival, called)
    }

    pub(crate) fn set_state(&self, state: &DestinationState) {
        *lock(&self.state) = state.clone();
    }

    /// Passes on a new connection of the source, with an epoch if the source has blocks to send. If
    /// the task has ended, sends the source the attempt's state.
    pub(crate) async fn resume(&self, call: Call, epoch: Option<Epoch>) {
        if let Err(mpsc::error::SendError((mut call, _))) = self.calls.send((call, epoch)).await {
            let state = attempt_state(&self.state());
            let message = ToSource::Status {
                attempt: self.id.attempt,
                state,
            };
            if let Err(error) = call.sender.send(&message) {
                tracing::debug!(%error, "a source that came back went again");
            }
        }
    }
}

/// The handles of all attempts in progress.
#[derive(Default)]
pub(crate) struct Handles(Mutex<HashMap<MigrationId, Arc<AttemptHandle>>>);

impl Handles {
    /// Returns the handle of this attempt from this source.
    pub(crate) fn find(&self, id: AttemptId, source: HostId) -> Option<Arc<AttemptHandle>> {
        let found = lock(&self.0).get(&id.migration).cloned();
        found.filter(|handle| handle.id == id && handle.source == source)
    }
}

/// Registers an attempt, so that its source finds it, until dropped.
pub(crate) struct Present {
    handles: Arc<Handles>,
    handle: Arc<AttemptHandle>,
}

impl Present {
    pub(crate) fn new(handles: &Arc<Handles>, handle: Arc<AttemptHandle>) -> Self {
        lock(&handles.0).insert(handle.id.migration, handle.clone());
        let handles = handles.clone();
        Self { handles, handle }
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        lock(&self.handles.0).remove(&self.handle.id.migration);
    }
}
