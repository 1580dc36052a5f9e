//! The guests of this host as the API shows them; starting and stopping them.

use crate::agent::migration::Manager;
use crate::agent::state::Parts;
use longhaul_api::{ApiError, ErrorCode, Guest, StartGuest, StopGuest};

/// Answers for the guests of this host.
pub(crate) struct Guests {}

impl Guests {
    pub(crate) fn new(_parts: Parts) -> Self {
        Self {}
    }

    /// Every guest that is described or runs here.
    pub(crate) async fn list(&self, _manager: &Manager) -> Result<longhaul_api::Guests, ApiError> {
        Err(not_available())
    }

    /// One of them.
    pub(crate) async fn get(&self, _manager: &Manager, _name: &str) -> Result<Guest, ApiError> {
        Err(not_available())
    }

    /// Starts one.
    pub(crate) async fn start(
        &self,
        _manager: &Manager,
        _start: StartGuest,
    ) -> Result<Guest, ApiError> {
        Err(not_available())
    }

    /// Stops one.
    pub(crate) async fn stop(
        &self,
        _manager: &Manager,
        _name: &str,
        _stop: StopGuest,
    ) -> Result<Guest, ApiError> {
        Err(not_available())
    }
}

fn not_available() -> ApiError {
    ApiError::new(ErrorCode::Unavailable, "not yet")
}
