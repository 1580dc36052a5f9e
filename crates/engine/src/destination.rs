//! The destination's side of replication: the version of each block, and whether everything that
//! was promised has arrived.

use crate::regions::Regions;
use longhaul_codec::BlockId;
use longhaul_protocol::limits::{ACKNOWLEDGED_MAX, REGIONS_MAX};
use longhaul_protocol::message::Acknowledgement;
use longhaul_protocol::{BlockRange, Epoch, RegionId, RegionSpec};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Limit on rejected blocks that are waited for.
const MISSING_MAX: usize = 1 << 20;

/// A statement of the source that is invalid or exceeds a limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DestinationError {
    /// The regions are not numbered one after the other, or are too large to be counted.
    #[error("the list of regions is not one that can be received")]
    Regions,
    /// The sequence number was used before, or is too large.
    #[error("frame {seq} is not one that can follow")]
    Sequence {
        /// Its number.
        seq: u64,
    },
    /// Hardly any reference holds: the source does not know the destination's content.
    #[error("{blocks} blocks were rejected and did not come again")]
    Rejections {
        /// How many.
        blocks: usize,
    },
}

#[derive(Debug)]
struct Region {
    spec: RegionSpec,
    /// The frame that brought each block's content; 0 before the first. Empty for a durable region:
    /// its [`Presence`](crate::presence::Presence) decides what may be applied.
    versions: Vec<u32>,
    /// Whether the source has listed the region's missing blocks: rejected blocks then belong to
    /// that list.
    listed: bool,
    /// Whether blocks still come when all others are here: its owner takes each of them once.
    follows: bool,
}

/// The incoming state of one guest.
#[derive(Debug)]
pub struct Destination {
    regions: Regions<Region>,
    epoch: Epoch,
    applied_in_epoch: u64,
    unacknowledged: Acknowledgement,
    announced: Option<u64>,
    /// Blocks that were rejected and have not arrived again, with the newest frame that had them.
    /// An older, overtaken frame does not bring the content of that newest one.
    missing: BTreeMap<(RegionId, u64), u64>,
    frames: u64,
    /// Whether nothing is written any more.
    sealed: bool,
}

impl Destination {
    /// Creates the state of an offered guest before the first frame. Its regions are numbered from
    /// 0.
    pub fn new(regions: &[RegionSpec]) -> Result<Self, DestinationError> {
        let ids = (0..).map(RegionId);
        match regions.iter().zip(ids).all(|(spec, id)| spec.id == id) {
            true => Self::of_some(regions),
            false => Err(DestinationError::Regions),
        }
    }

    /// Creates the state of a guest of which only these regions arrive, in the drain. Their ids are
    /// those of the offer, and ascend.
    pub fn of_some(specs: &[RegionSpec]) -> Result<Self, DestinationError> {
        let blocks: u64 = specs.iter().map(|spec| spec.blocks).sum();
        if specs.len() > REGIONS_MAX || blocks >= u64::from(u32::MAX) {
            return Err(DestinationError::Regions);
        }
        let region = |spec: &RegionSpec| Region {
            spec: spec.clone(),
            versions: match spec.durable {
                true => Vec::new(),
                false => vec![0; spec.blocks as usize],
            },
            listed: false,
            follows: false,
        };
        let mut regions = Regions::default();
        if !specs.iter().all(|spec| regions.push(spec.id, region(spec))) {
            return Err(DestinationError::Regions);
        }
        Ok(Self {
            regions,
            epoch: Epoch(1),
            applied_in_epoch: 0,
            unacknowledged: Acknowledgement::default(),
            announced: None,
            missing: BTreeMap::new(),
            frames: 0,
            sealed: false,
        })
    }

    /// Seals the state: everything is here and belongs to the guest. Frames that the source
    /// repeats, because it has not seen their acknowledgement, are acknowledged and change nothing.
    pub fn seal(&mut self) {
        self.sealed = true;
    }

    /// Records that blocks of a region still come when all others are here. Its owner knows which
    /// of them are missing, and takes each once.
    pub fn follows(&mut self, region: RegionId) {
        if let Some(region) = self.regions.get_mut(region) {
            region.follows = true;
        }
    }

    /// Returns whether a block of frame `seq`, of connection `epoch`, is newer than the one here.
    pub fn accepts(&self, epoch: Epoch, id: BlockId, seq: u64) -> bool {
        let region = self.region(id.region);
        if region.is_some_and(|region| region.spec.durable) {
            return true;
        }
        if region.is_some_and(|region| region.follows) {
            return epoch == self.epoch && self.region_blocks(id.region) > Some(id.block);
        }
        if self.sealed {
            return false;
        }
        let version = self
            .region(id.region)
            .and_then(|r| r.versions.get(id.block as usize));
        version.is_some_and(|version| u64::from(*version) < seq)
    }

    /// Records that blocks of frame `seq` are about to be written. Returns whether none of them was
    /// written before; such blocks are zero where the region starts as zeros.
    pub fn written(&mut self, region: RegionId, range: BlockRange, seq: u64) -> bool {
        let Some(region_state) = self.regions.get_mut(region) else {
            return false;
        };
        let mut fresh = region_state.spec.starts_zero && !region_state.spec.durable;
        for block in range.blocks() {
            if let Some(version) = region_state.versions.get_mut(block as usize) {
                fresh &= *version == 0;
                *version = u32::try_from(seq).unwrap_or(u32::MAX);
            }
            if let Entry::Occupied(missing) = self.missing.entry((region, block))
                && *missing.get() <= seq
            {
                missing.remove();
            }
        }
        fresh
    }

    /// Records that the source has listed the missing blocks of a region. Returns the rejected
    /// blocks, which are missing as well.
    pub fn listed(&mut self, region: RegionId) -> Vec<u64> {
        if let Some(listed) = self.regions.get_mut(region) {
            listed.listed = true;
        }
        let all = (region, 0)..=(region, u64::MAX);
        let missing: Vec<u64> = self
            .missing
            .range(all)
            .map(|((_, block), _)| *block)
            .collect();
        for block in &missing {
            self.missing.remove(&(region, *block));
        }
        missing
    }

    /// Returns the length of a region in blocks.
    pub fn region_blocks(&self, region: RegionId) -> Option<u64> {
        self.region(region).map(|region| region.spec.blocks)
    }

    fn region(&self, region: RegionId) -> Option<&Region> {
        self.regions.get(region)
    }

    /// Records that a frame of connection `epoch` was applied, except for the `rejected` blocks.
    pub fn applied(
        &mut self,
        epoch: Epoch,
        seq: u64,
        rejected: &[(RegionId, BlockRange)],
    ) -> Result<(), DestinationError> {
        if seq == 0 || u32::try_from(seq).is_err() {
            return Err(DestinationError::Sequence { seq });
        }
        for (region, range) in rejected {
            if self.region(*region).is_some_and(|region| region.listed) {
                continue;
            }
            for block in range.blocks() {
                let newest = self.missing.entry((*region, block)).or_default();
                *newest = seq.max(*newest);
            }
        }
        if self.missing.len() > MISSING_MAX {
            return Err(DestinationError::Rejections {
                blocks: self.missing.len(),
            });
        }
        if epoch != self.epoch {
            return Ok(());
        }
        self.frames += 1;
        self.applied_in_epoch += 1;
        match self.unacknowledged.applied.last_mut() {
            Some((first, count)) if *first + u64::from(*count) == seq => *count += 1,
            _ => self.unacknowledged.applied.push((seq, 1)),
        }
        self.unacknowledged.rejected.extend_from_slice(rejected);
        Ok(())
    }

    /// Begins a new connection: frames that were not acknowledged on the old one arrive again.
    pub fn connected(&mut self, epoch: Epoch) {
        self.epoch = epoch;
        self.applied_in_epoch = 0;
        self.unacknowledged = Acknowledgement::default();
        self.announced = None;
        self.regions
            .iter_mut()
            .for_each(|region| region.listed = false);
    }

    /// Records the source's announcement of how many frames it has sent on this connection in all.
    pub fn announced(&mut self, epoch: Epoch, frames: u64) {
        if epoch == self.epoch {
            self.announced = Some(frames);
        }
    }

    /// Returns the next acknowledgement for the source, if there is one.
    pub fn poll_acknowledgement(&mut self) -> Option<Acknowledgement> {
        let waiting = &mut self.unacknowledged;
        if waiting.applied.is_empty() && waiting.rejected.is_empty() {
            return None;
        }
        if waiting.applied.len().max(waiting.rejected.len()) <= ACKNOWLEDGED_MAX {
            return Some(std::mem::take(waiting));
        }
        let applied = waiting
            .applied
            .drain(..waiting.applied.len().min(ACKNOWLEDGED_MAX));
        let applied = applied.collect();
        let rejected = waiting
            .rejected
            .drain(..waiting.rejected.len().min(ACKNOWLEDGED_MAX));
        Some(Acknowledgement {
            applied,
            rejected: rejected.collect(),
            ..Acknowledgement::default()
        })
    }

    /// Returns whether everything that was announced on this connection has arrived.
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty() && self.announced.is_some_and(|n| self.applied_in_epoch >= n)
    }

    /// Returns the number of the connection.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Returns the number of frames applied in all.
    pub fn frames(&self) -> u64 {
        self.frames
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: RegionId = RegionId(0);

    fn destination(blocks: u64) -> Destination {
        let spec = RegionSpec {
            id: MEMORY,
            name: "ram".to_owned(),
            blocks,
            durable: false,
            starts_zero: true,
        };
        Destination::new(&[spec]).unwrap()
    }

    #[test]
    fn an_offer_begins_at_region_0_and_a_drain_at_its_first_disk() {
        let disk = |id| RegionSpec {
            id: RegionId(id),
            name: "vda".to_owned(),
            blocks: 4,
            durable: true,
            starts_zero: true,
        };
        assert!(Destination::new(&[disk(2), disk(3)]).is_err());
        assert!(Destination::new(&[disk(0), disk(2)]).is_err());
        assert!(Destination::of_some(&[disk(4), disk(2)]).is_err());
        assert!(Destination::of_some(&[disk(2), disk(2)]).is_err());
        let destination = Destination::of_some(&[disk(0), disk(2), disk(3)]).unwrap();
        let blocks = [0, 1, 2, 3, 4].map(|id| destination.region_blocks(RegionId(id)));
        assert_eq!(blocks, [Some(4), None, Some(4), Some(4), None]);
    }

    #[test]
    fn nothing_is_accepted_once_it_is_sealed() {
        let mut destination = destination(4);
        let id = BlockId {
            region: MEMORY,
            block: 1,
        };
        assert!(destination.accepts(Epoch(1), id, 9));
        destination.seal();
        assert!(!destination.accepts(Epoch(1), id, 9));
        destination.follows(MEMORY);
        assert!(destination.accepts(Epoch(1), id, 9));
        assert!(
            !destination.accepts(Epoch(2), id, 9),
            "of a connection that is gone"
        );
        assert!(!destination.accepts(Epoch(1), BlockId { block: 4, ..id }, 9));
        destination.applied(Epoch(1), 9, &[]).unwrap();
        let told = destination.poll_acknowledgement().unwrap();
        assert_eq!(told.applied, [(9, 1)]);
    }

    #[test]
    fn what_was_rejected_is_missing_until_something_newer_comes() {
        let mut destination = destination(4);
        let block = BlockRange::new(2, 1);
        destination.announced(Epoch(1), 2);
        destination
            .applied(Epoch(1), 7, &[(MEMORY, block)])
            .unwrap();
        // The frame was overtaken.
        destination.written(MEMORY, block, 5);
        destination.applied(Epoch(1), 5, &[]).unwrap();
        assert!(!destination.is_complete());
        destination.written(MEMORY, block, 8);
        assert!(destination.is_complete());
    }

    #[test]
    fn all_that_was_rejected_is_told_however_much_it_is() {
        let mut destination = destination(1 << 16);
        let every_other =
            (0..ACKNOWLEDGED_MAX as u64 + 10).map(|n| (MEMORY, BlockRange::new(n * 2, 1)));
        let every_other: Vec<_> = every_other.collect();
        destination.applied(Epoch(1), 1, &every_other).unwrap();
        let told: Vec<_> = std::iter::from_fn(|| destination.poll_acknowledgement()).collect();
        assert!(
            told.iter()
                .all(|told| told.rejected.len() <= ACKNOWLEDGED_MAX)
        );
        let told = told.iter().flat_map(|told| told.rejected.iter().copied());
        assert_eq!(told.collect::<Vec<_>>(), every_other);
    }
}
