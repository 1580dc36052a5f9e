//! The VLANs that the frames of a network may belong to.

/// A set of VLANs. Frames without a tag belong to VLAN 0, which is always in it.
#[derive(Clone, PartialEq, Eq)]
pub struct Vlans {
    /// A bit each.
    words: Box<[u64; 64]>,
}

/// The highest VLAN.
pub const VLAN_MAX: u16 = 4094;

impl Vlans {
    /// No tagged frames.
    pub fn untagged() -> Self {
        let mut words = Box::new([0; 64]);
        words[0] = 1;
        Self { words }
    }

    /// All of them.
    pub fn all() -> Self {
        let mut all = Self::untagged();
        all.insert(1, VLAN_MAX);
        all
    }

    /// Adds VLANs from `first` to `last`, both included. Those beyond [`VLAN_MAX`] do not exist.
    pub fn insert(&mut self, first: u16, last: u16) {
        for vlan in first..=last.min(VLAN_MAX) {
            self.words[usize::from(vlan / 64)] |= 1 << (vlan % 64);
        }
    }

    /// Whether a VLAN is one of them.
    #[inline]
    pub fn has(&self, vlan: u16) -> bool {
        let word = self.words.get(usize::from(vlan / 64));
        word.is_some_and(|word| word >> (vlan % 64) & 1 != 0)
    }

    /// Returns the ranges from 1 on, in ascending order.
    pub fn ranges(&self) -> Vec<(u16, u16)> {
        let mut ranges: Vec<(u16, u16)> = Vec::new();
        for vlan in (1..=VLAN_MAX).filter(|vlan| self.has(*vlan)) {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == vlan => *last = vlan,
                _ => ranges.push((vlan, vlan)),
            }
        }
        ranges
    }
}

impl std::fmt::Debug for Vlans {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.ranges()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_what_was_inserted() {
        let mut vlans = Vlans::untagged();
        assert!(vlans.has(0) && !vlans.has(1) && vlans.ranges().is_empty());
        vlans.insert(63, 64);
        vlans.insert(4000, u16::MAX);
        vlans.insert(9, 8);
        assert_eq!(vlans.ranges(), [(63, 64), (4000, 4094)]);
        assert!(vlans.has(63) && vlans.has(64) && !vlans.has(62) && !vlans.has(65));
        assert!(vlans.has(4094) && !vlans.has(4095) && !vlans.has(u16::MAX));
        assert_eq!(Vlans::all().ranges(), [(1, 4094)]);
    }
}
