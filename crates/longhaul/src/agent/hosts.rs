//! This host as the API shows it, and its trust in others.

use crate::agent::guests::Guests;
use crate::agent::state::Parts;
use longhaul_api::{ApiError, ErrorCode, Host, Trust, TrustedHost, TrustedHosts};

/// Answers for this host and its trust store.
pub(crate) struct Hosts {
    parts: Parts,
}

impl Hosts {
    pub(crate) fn new(parts: Parts) -> Self {
        Self { parts }
    }

    /// What this host is.
    pub(crate) async fn this(&self, _guests: &Guests) -> Host {
        let config = &self.parts.config;
        Host {
            name: config.name.clone(),
            fingerprint: String::new(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            protocol_versions: Vec::new(),
            listen: Some(config.listen.to_string()),
            api_listen: config.api.tcp.as_ref().map(|tcp| tcp.listen.to_string()),
            state_folder: config.state.display().to_string(),
            qemus: Vec::new(),
            kvm: None,
            memory_total_bytes: None,
            memory_free_bytes: None,
            guests_running: None,
            pid: std::process::id(),
        }
    }

    /// The hosts that this one trusts.
    pub(crate) async fn list(&self) -> Result<TrustedHosts, ApiError> {
        Err(not_available())
    }

    /// Trusts one more.
    pub(crate) async fn trust(&self, _trust: Trust) -> Result<TrustedHost, ApiError> {
        Err(not_available())
    }

    /// Trusts one no longer.
    pub(crate) async fn forget(&self, _name: &str) -> Result<(), ApiError> {
        Err(not_available())
    }
}

fn not_available() -> ApiError {
    ApiError::new(ErrorCode::Unavailable, "not yet")
}
