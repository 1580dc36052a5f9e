//! The regions of one guest, found by their ids.

use longhaul_protocol::RegionId;
use std::ops::{Deref, DerefMut, Index, IndexMut};

/// Regions with consecutive ids. The first id is 0, or that of the first disk if only disks travel.
#[derive(Debug)]
pub(crate) struct Regions<R> {
    first: usize,
    all: Vec<R>,
}

impl<R> Default for Regions<R> {
    fn default() -> Self {
        Self {
            first: 0,
            all: Vec::new(),
        }
    }
}

impl<R> Regions<R> {
    /// Adds a region. Returns false, and drops the region, if its id does not follow the last one.
    #[must_use]
    pub(crate) fn push(&mut self, id: RegionId, region: R) -> bool {
        let id = usize::from(id.0);
        if self.all.is_empty() {
            self.first = id;
        }
        let follows = id == self.first + self.all.len();
        if follows {
            self.all.push(region);
        }
        follows
    }

    pub(crate) fn get(&self, id: RegionId) -> Option<&R> {
        self.all.get(self.place(id)?)
    }

    pub(crate) fn get_mut(&mut self, id: RegionId) -> Option<&mut R> {
        let place = self.place(id)?;
        self.all.get_mut(place)
    }

    fn place(&self, id: RegionId) -> Option<usize> {
        usize::from(id.0).checked_sub(self.first)
    }
}

/// For ids that the engine has given out: panics if there is no such region.
impl<R> Index<RegionId> for Regions<R> {
    type Output = R;

    fn index(&self, id: RegionId) -> &R {
        &self.all[usize::from(id.0) - self.first]
    }
}

impl<R> IndexMut<RegionId> for Regions<R> {
    fn index_mut(&mut self, id: RegionId) -> &mut R {
        &mut self.all[usize::from(id.0) - self.first]
    }
}

impl<R> Deref for Regions<R> {
    type Target = [R];

    fn deref(&self) -> &[R] {
        &self.all
    }
}

impl<R> DerefMut for Regions<R> {
    fn deref_mut(&mut self) -> &mut [R] {
        &mut self.all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_found_from_their_first_id_on() {
        let mut regions = Regions::default();
        assert!(regions.get(RegionId(0)).is_none());
        assert!(regions.push(RegionId(3), 'a'));
        assert!(regions.push(RegionId(4), 'b'));
        assert!(!regions.push(RegionId(4), 'c'));
        assert!(!regions.push(RegionId(6), 'c'));
        let found = [2, 3, 4, 5].map(|id| regions.get(RegionId(id)).copied());
        assert_eq!(found, [None, Some('a'), Some('b'), None]);
        regions[RegionId(4)] = 'd';
        assert_eq!(*regions, ['a', 'd']);
    }
}
