//! Migrations of this host's guests: who may run what, which are under way, what became of them.

use crate::agent::state::{Parts, StartError};
use longhaul_api::{
    ApiError, ErrorCode, Limit, Migration, Plan, PlanRequest, Probe, ProbeResult, Progress, Report,
    Side, StartMigration,
};
use longhaul_protocol::MigrationId;
use std::sync::Arc;
use tokio::sync::watch;

/// Owns every migration of this host, and the journal of the right to run its guests.
pub(crate) struct Manager {}

/// What this host's journal says of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Right {
    /// How often the right to run it has changed hands; none where it never did.
    pub(crate) generation: Option<u64>,
    /// Who has it.
    pub(crate) holder: Holder,
    /// The migration that the guest is in.
    pub(crate) moving: Option<(MigrationId, Side)>,
}

/// Who has the right to run a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Holder {
    /// This host.
    Here,
    /// Another one, by the name that it is trusted under or by its fingerprint.
    Elsewhere(String),
    /// Nobody can tell until the two agents have met.
    InDoubt(String),
}

/// Keeps migrations off a guest while it is started or stopped; they are let in on drop.
pub(crate) struct Reservation {}

impl Manager {
    /// Reads the journal, takes up what an earlier agent left (in a task of its own) and begins to
    /// accept other hosts' connections.
    pub(crate) async fn start_up(_parts: Parts) -> Result<Arc<Self>, StartError> {
        Ok(Arc::new(Self {}))
    }

    /// Ends every task: what was not released is aborted; guests are left running.
    pub(crate) async fn shut_down(&self) {}

    /// Checks and predicts, changing nothing.
    pub(crate) async fn plan(&self, _request: PlanRequest) -> Result<Plan, ApiError> {
        Err(not_available())
    }

    /// Begins a migration, or refuses it.
    pub(crate) async fn start(&self, _request: StartMigration) -> Result<Migration, ApiError> {
        Err(not_available())
    }

    /// Asks a migration to stop; its progress tells when and how it has.
    pub(crate) async fn cancel(&self, _id: MigrationId) -> Result<Migration, ApiError> {
        Err(not_available())
    }

    /// Changes a migration's limit.
    pub(crate) async fn limit(
        &self,
        _id: MigrationId,
        _limit: Limit,
    ) -> Result<Migration, ApiError> {
        Err(not_available())
    }

    /// The migrations of this host, on either side, the newest first.
    pub(crate) async fn list(&self) -> Vec<Migration> {
        Vec::new()
    }

    /// One migration.
    pub(crate) async fn get(&self, _id: MigrationId) -> Result<Migration, ApiError> {
        Err(not_available())
    }

    /// A migration's report; of one under way, so far.
    pub(crate) async fn report(&self, _id: MigrationId) -> Result<Report, ApiError> {
        Err(not_available())
    }

    /// A migration's progress, as it changes. The last has an outcome; for one that has ended
    /// there is only that.
    pub(crate) async fn watch(
        &self,
        _id: MigrationId,
    ) -> Result<watch::Receiver<Progress>, ApiError> {
        Err(not_available())
    }

    /// Measures the link to a trusted host.
    pub(crate) async fn probe(&self, _host: &str, _probe: Probe) -> Result<ProbeResult, ApiError> {
        Err(not_available())
    }

    /// What the journal says of a guest.
    pub(crate) async fn right(&self, _guest: &str) -> Right {
        Right {
            generation: None,
            holder: Holder::Here,
            moving: None,
        }
    }

    /// Keeps migrations off a guest; refuses while one is under way, and where the right to run
    /// it is not here.
    pub(crate) async fn reserve(&self, _guest: &str) -> Result<Reservation, ApiError> {
        Ok(Reservation {})
    }
}

fn not_available() -> ApiError {
    ApiError::new(
        ErrorCode::Unavailable,
        "this agent does not move guests yet",
    )
}
