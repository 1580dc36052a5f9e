//! The regions of one guest, found by their ids.

use longhaul_protocol::RegionId;
use std::ops::{Deref, DerefMut, Index, IndexMut};

/// Regions with ascending ids. An offer's are consecutive from 0; in a drain, those of regions that
/// have arrived are left out.
#[derive(Debug)]
pub(crate) struct Regions<R> {
    ids: Vec<RegionId>,
    all: Vec<R>,
}

impl<R> Default for Regions<R> {
    fn default() -> Self {
        Self {
            ids: Vec::new(),
            all: Vec::new(),
        }
    }
}

impl<R> Regions<R> {
    /// Adds a region. Returns false, and drops the region, if its id is not above the last one.
    #[must_use]
    pub(crate) fn push(&mut self, id: RegionId, region: R) -> bool {
        let follows = self.ids.last().is_none_or(|last| *last < id);
        if follows {
            self.ids.push(id);
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
        let first = self.ids.first()?;
        let place = usize::from(id.0.checked_sub(first.0)?);
        match self.ids.get(place) {
            Some(there) if *there == id => Some(place),
            _ => self.ids.binary_search(&id).ok(),
        }
    }
}

/// For ids that the engine has given out: panics if there is no such region.
impl<R> Index<RegionId> for Regions<R> {
    type Output = R;

    fn index(&self, id: RegionId) -> &R {
        let place = self.place(id);
        &self.all[place.unwrap_or(usize::MAX)]
    }
}

impl<R> IndexMut<RegionId> for Regions<R> {
    fn index_mut(&mut self, id: RegionId) -> &mut R {
        let place = self.place(id);
        &mut self.all[place.unwrap_or(usize::MAX)]
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
        assert!(!regions.push(RegionId(2), 'c'));
        assert!(regions.push(RegionId(6), 'c'));
        let found = [2, 3, 4, 5, 6, 7].map(|id| regions.get(RegionId(id)).copied());
        assert_eq!(found, [None, Some('a'), Some('b'), None, Some('c'), None]);
        regions[RegionId(6)] = 'd';
        assert_eq!(*regions, ['a', 'b', 'd']);
    }
}
