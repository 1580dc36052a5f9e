//! Answers the source's requests for digests of received content, within the quota of the source.

use crate::destination::attempt::DestinationAttempt;
use longhaul_protocol::message::ToSource;
use longhaul_protocol::{BlockRange, RegionId, RegionSpec};
use tokio::task::block_in_place;
use tokio::time::Instant;

/// Returns an error unless the region has these blocks. Without this check a peer could have far
/// more blocks digested than it has sent.
fn fits(regions: &[RegionSpec], region: RegionId, range: BlockRange) -> Result<(), String> {
    let spec = regions.iter().find(|spec| spec.id == region);
    let blocks = spec.map_or(0, |spec| spec.blocks);
    match range.end() <= blocks {
        true => Ok(()),
        false => Err(format!(
            "the source asks for digests of blocks {} to {} of region {}, which has {blocks}",
            range.start,
            range.end(),
            region.0
        )),
    }
}

impl DestinationAttempt {
    /// Sends the digests of a range, as QEMU's RAM or the disk's image holds it.
    pub(crate) async fn compare(
        &mut self,
        region: RegionId,
        range: BlockRange,
        blocks_per_digest: u32,
    ) {
        if let Err(why) = fits(&self.offer.regions, region, range) {
            return self.abort(why).await;
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_of_blocks_that_a_region_has() {
        let region = |id, blocks| RegionSpec {
            id: RegionId(id),
            name: format!("region {id}"),
            blocks,
            durable: id > 0,
            starts_zero: id > 0,
        };
        let regions = [region(0, 100), region(1, 8)];
        let of = |id, start, count| fits(&regions, RegionId(id), BlockRange::new(start, count));
        assert!(of(0, 0, 100).is_ok());
        assert!(of(1, 7, 1).is_ok());
        assert!(of(0, 1, 100).is_err());
        assert!(of(1, 8, 4096 << 17).is_err());
        assert!(of(2, 0, 1).is_err());
    }
}
