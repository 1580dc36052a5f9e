//! The destination's side of replication: which version of each block is here, and whether
//! everything that was promised has come.

use longhaul_codec::BlockId;
use longhaul_protocol::limits::{ACKNOWLEDGED_MAX, REGIONS_MAX};
use longhaul_protocol::message::Acknowledgement;
use longhaul_protocol::{BlockRange, Epoch, RegionId, RegionSpec};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// More rejected blocks than this are not waited for.
const MISSING_MAX: usize = 1 << 20;

/// What a source said that makes no sense, or is too much.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DestinationError {
    /// Regions that are not numbered from 0, or too large to be counted.
    #[error("the list of regions is not one that can be received")]
    Regions,
    /// A sequence number that came before, or that is too large.
    #[error("frame {seq} is not one that can follow")]
    Sequence {
        /// Its number.
        seq: u64,
    },
    /// Hardly any reference holds: the source does not know what is here.
    #[error("{blocks} blocks were rejected and did not come again")]
    Rejections {
        /// How many.
        blocks: usize,
    },
}

#[derive(Debug)]
struct Region {
    spec: RegionSpec,
    /// The frame that each block's content came with; 0 before the first. None of a durable region: its
    /// [`Presence`](crate::presence::Presence) says what may be applied.
    versions: Vec<u32>,
    /// What is left of it is listed: blocks that could not be used are part of that.
    listed: bool,
}

/// One guest's state on its way in.
#[derive(Debug)]
pub struct Destination {
    regions: Vec<Region>,
    epoch: Epoch,
    applied_in_epoch: u64,
    unacknowledged: Acknowledgement,
    announced: Option<u64>,
    /// Blocks that were rejected and have not come again, with the newest frame that had them. An
    /// older frame that was overtaken does not bring what that one meant.
    missing: BTreeMap<(RegionId, u64), u64>,
    frames: u64,
    /// Nothing is written any more.
    sealed: bool,
}

impl Destination {
    /// Nothing has arrived yet.
    pub fn new(regions: &[RegionSpec]) -> Result<Self, DestinationError> {
        let numbered = regions
            .iter()
            .enumerate()
            .all(|(n, spec)| usize::from(spec.id.0) == n);
        let blocks: u64 = regions.iter().map(|spec| spec.blocks).sum();
        if !numbered || regions.len() > REGIONS_MAX || blocks >= u64::from(u32::MAX) {
            return Err(DestinationError::Regions);
        }
        let region = |spec: &RegionSpec| Region {
            spec: spec.clone(),
            versions: match spec.durable {
                true => Vec::new(),
                false => vec![0; spec.blocks as usize],
            },
            listed: false,
        };
        Ok(Self {
            regions: regions.iter().map(region).collect(),
            epoch: Epoch(1),
            applied_in_epoch: 0,
            unacknowledged: Acknowledgement::default(),
            announced: None,
            missing: BTreeMap::new(),
            frames: 0,
            sealed: false,
        })
    }

    /// Everything is here, and is the guest's from now on. What a source sends again, because it did
    /// not hear that it had arrived, is acknowledged and changes nothing.
    pub fn seal(&mut self) {
        self.sealed = true;
    }

    /// Whether a block of frame `seq` is newer than what is here.
    pub fn accepts(&self, id: BlockId, seq: u64) -> bool {
        if self.region(id.region).is_some_and(|r| r.spec.durable) {
            return true;
        }
        if self.sealed {
            return false;
        }
        let version = self
            .region(id.region)
            .and_then(|r| r.versions.get(id.block as usize));
        version.is_some_and(|version| u64::from(*version) < seq)
    }

    /// Blocks of frame `seq` are about to be written. Returns whether none of them was ever
    /// written before, and so is zero where the region starts so.
    pub fn written(&mut self, region: RegionId, range: BlockRange, seq: u64) -> bool {
        let Some(region_state) = self.regions.get_mut(usize::from(region.0)) else {
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

    /// The source has listed what is left of a region. Returns the blocks that could not be used and
    /// are left as well.
    pub fn listed(&mut self, region: RegionId) -> Vec<u64> {
        if let Some(listed) = self.regions.get_mut(usize::from(region.0)) {
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

    /// The length of a region in blocks.
    pub fn region_blocks(&self, region: RegionId) -> Option<u64> {
        self.region(region).map(|region| region.spec.blocks)
    }

    fn region(&self, region: RegionId) -> Option<&Region> {
        self.regions.get(usize::from(region.0))
    }

    /// A frame of the connection `epoch` was applied, except for what is `rejected`.
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

    /// A new connection: what was not acknowledged on the old one will come again.
    pub fn connected(&mut self, epoch: Epoch) {
        self.epoch = epoch;
        self.applied_in_epoch = 0;
        self.unacknowledged = Acknowledgement::default();
        self.announced = None;
        self.regions
            .iter_mut()
            .for_each(|region| region.listed = false);
    }

    /// The source says that it has sent so many frames on this connection, and that is all.
    pub fn announced(&mut self, epoch: Epoch, frames: u64) {
        if epoch == self.epoch {
            self.announced = Some(frames);
        }
    }

    /// What the source should be told, if there is anything.
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

    /// Whether everything that was announced on this connection is here.
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty() && self.announced.is_some_and(|n| self.applied_in_epoch >= n)
    }

    /// The connection's number.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Frames applied in all.
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
    fn nothing_is_accepted_once_it_is_sealed() {
        let mut destination = destination(4);
        let id = BlockId {
            region: MEMORY,
            block: 1,
        };
        assert!(destination.accepts(id, 9));
        destination.seal();
        assert!(!destination.accepts(id, 9));
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
        // It was overtaken on its way.
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
