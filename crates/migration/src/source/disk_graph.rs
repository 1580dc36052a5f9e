//! Whether the disks of a departing guest still stand on what they stood on when its move began.
//!
//! Other monitors of the guest's QEMU go on working while it moves: a backup takes a snapshot, a
//! mirror takes over, a medium is changed. What the guest writes then is not where the move looks
//! for it. QEMU refuses to plug devices in and out while it migrates, and nothing of the above. So
//! the block graph is looked at every second, when QEMU tells of a job or a tray, and for the last
//! time when QEMU has let go of the disks: with the guest stopped, nothing it wrote can go
//! elsewhere any more.

use longhaul_api::{ApiError, ErrorCode};
use longhaul_hypervisor::disk::{DiskNodes, Front, Layout};
use longhaul_hypervisor::qmp::Qmp;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Between two looks at the graph.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Events of QEMU's that begin like this may tell of a change.
const EVENTS: [&str; 3] = ["BLOCK_", "JOB_", "DEVICE_"];

/// A guest's block graph when its move began, and what was put into it for the move.
pub(crate) struct GraphWatch {
    qmp: Qmp,
    before: Layout,
    fronts: Vec<(DiskNodes, Front)>,
    seen: watch::Sender<Option<ApiError>>,
    task: Option<JoinHandle<()>>,
}

impl GraphWatch {
    /// Looks at the graph as it is before anything is changed.
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

    /// From here on these front ends are part of the graph. It is compared now, and every second.
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
                // No event, or too many to be kept: both end with the time.
                let _ = tokio::time::timeout(LOOK_EVERY, told).await;
                match compare(&qmp, &before, &fronts).await {
                    Ok(()) => {}
                    Err(Changed::Otherwise(error)) => {
                        seen.send_replace(Some(error));
                        return;
                    }
                    // A QEMU that answers nothing is noticed elsewhere, and the last look counts.
                    Err(Changed::Unseen(error)) => tracing::warn!(%error, "cannot see the graph"),
                }
            }
        }));
        Ok(())
    }

    /// What was seen so far.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        match &*self.seen.borrow() {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Looks for the last time: QEMU has let go of the disks, or the move ends.
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
