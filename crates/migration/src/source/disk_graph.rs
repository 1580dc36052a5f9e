//! A check that the disks of a departing guest use the same block nodes as when its move began.
//!
//! Other clients of the guest's QEMU continue to work during the move: a backup takes a snapshot, a
//! mirror takes over, or a medium is changed. The guest's later writes are then not where the move
//! reads. During a migration, QEMU refuses to plug and unplug devices, but none of these. So the
//! block graph is compared every second, after QEMU's events about jobs and trays, and a last time
//! after QEMU has closed the disks: the guest is stopped then, and no write can go elsewhere any
//! more.

use longhaul_api::{ApiError, ErrorCode};
use longhaul_hypervisor::disk::{DiskNodes, Front, Layout};
use longhaul_hypervisor::qmp::Qmp;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Interval between comparisons of the graph.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Prefixes of QEMU's events that may mean a change.
const EVENTS: [&str; 3] = ["BLOCK_", "JOB_", "DEVICE_"];

/// A guest's block graph when its move began, and the exports that were inserted for the move.
pub(crate) struct GraphWatch {
    qmp: Qmp,
    before: Layout,
    fronts: Vec<(DiskNodes, Front)>,
    seen: watch::Sender<Option<ApiError>>,
    task: Option<JoinHandle<()>>,
}

impl GraphWatch {
    /// Records the graph before anything is changed.
    pub(crate) async fn begin(qmp: &Qmp) -> Result<Self, ApiError> {
        let before = Layout::look(qmp, &[]).await.map_err(unseen)?;
        Ok(Self {
            qmp: qmp.clone(),
            before,
            fronts: Vec::new(),
            seen: watch::Sender::new(None),
            task: None,
        })
    }

    /// Takes these exports as part of the graph, and begins to compare it: now, and every second.
    pub(crate) async fn go_on_with(
        &mut self,
        fronts: Vec<(DiskNodes, Front)>,
    ) -> Result<(), ApiError> {
        self.fronts = fronts;
        self.look().await?;
        let (qmp, before, fronts) = (self.qmp.clone(), self.before.clone(), self.fronts.clone());
        let seen = self.seen.clone();
        self.task = Some(tokio::spawn(async move {
            let mut events = qmp.events();
            loop {
                let told = async {
                    while let Ok(event) = events.recv().await {
                        if EVENTS.iter().any(|begin| event.name.starts_with(begin)) {
                            return;
                        }
                    }
                    std::future::pending::<()>().await;
                };
                // If no event comes, or too many to be buffered, the timeout ends the wait.
                let _ = tokio::time::timeout(LOOK_EVERY, told).await;
                match compare(&qmp, &before, &fronts).await {
                    Ok(()) => {}
                    Err(Changed::Otherwise(error)) => {
                        seen.send_replace(Some(error));
                        return;
                    }
                    // A QEMU that does not answer is noticed elsewhere, and the last comparison
                    // decides.
                    Err(Changed::Unseen(error)) => tracing::warn!(%error, "cannot see the graph"),
                }
            }
        }));
        Ok(())
    }

    /// Returns an error if a change was found so far.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        match &*self.seen.borrow() {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Compares the graph a last time, after QEMU has closed the disks.
    pub(crate) async fn finish(&mut self) -> Result<(), ApiError> {
        self.end();
        self.look().await
    }

    fn end(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }

    async fn look(&self) -> Result<(), ApiError> {
        match compare(&self.qmp, &self.before, &self.fronts).await {
            Ok(()) => Ok(()),
            Err(Changed::Otherwise(error) | Changed::Unseen(error)) => Err(error),
        }
    }
}

impl Drop for GraphWatch {
    fn drop(&mut self) {
        self.end();
    }
}

enum Changed {
    Otherwise(ApiError),
    Unseen(ApiError),
}

async fn compare(qmp: &Qmp, before: &Layout, fronts: &[(DiskNodes, Front)]) -> Result<(), Changed> {
    let now = Layout::look(qmp, fronts).await;
    let now = now.map_err(|error| Changed::Unseen(unseen(error)))?;
    before.compare(&now).map_err(|changed| {
        let text = format!("{changed}: somebody changed the guest's disks while it moved");
        let hint = "let snapshots, backups and mirrors end before the guest moves, and commit or \
                    describe an overlay that they leave";
        Changed::Otherwise(ApiError::new(ErrorCode::GuestState, text).hint(hint))
    })
}

fn unseen(error: longhaul_hypervisor::qmp::QmpError) -> ApiError {
    let text = format!("cannot see what the guest's disks stand on: {error}");
    ApiError::new(ErrorCode::Qemu, text)
}
