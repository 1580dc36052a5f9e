//! Answers the source's questions about the memory that arrived, within what it may have worked out.

use crate::destination::attempt::Task;
use longhaul_protocol::message::ToSource;
use longhaul_protocol::{BlockRange, RegionId};
use tokio::task::block_in_place;
use tokio::time::Instant;

impl Task {
    /// Sends the digests of a range, as QEMU's RAM holds it.
    pub(crate) async fn compare(
        &mut self,
        region: RegionId,
        range: BlockRange,
        blocks_per_digest: u32,
    ) {
        let worker = self.admission.worker().await;
        let digests = block_in_place(|| self.inbound.digests(region, range, blocks_per_digest));
        drop(worker);
        self.pace.came(range.count, Instant::now());
        match digests {
            Ok(digests) => {
                let answer = ToSource::Digests {
                    region,
                    range,
                    digests,
                };
                self.send(answer).await;
            }
            Err(error) => self.abort(error.to_string()).await,
        }
    }
}
