//! An index of the content that guests have brought to one destination at the same time, so that
//! each sends content that another has sent as a reference ("gang migration": Deshpande, Wang and
//! Gopalan, HPDC 2011).
//!
//! The index has 16 bytes per slot and holds acknowledged content. It may be stale: the destination
//! compares every reference with its digest, and content that does not match arrives again as a
//! literal. So entries may be evicted, and changes need not be reported.

use longhaul_codec::{BlockId, Digest};
use longhaul_protocol::{MigrationId, RegionId};

const WAYS: usize = 4;
/// Limit on slots: 16 MiB.
const SLOTS_MAX: usize = 1 << 20;
/// Limit on slots while one guest moves alone, which records its content for guests that may
/// follow: 4 MiB.
const SLOTS_ALONE_MAX: usize = 1 << 18;
/// Limit on members recorded for the same content: one may leave before the others need it.
const COPIES_MAX: usize = 2;

/// The content that other guests have brought to one guest's destination; the owner of a gang gives
/// each migration its own.
pub trait Gang: Send {
    /// Returns a block of another guest that had this content when it was acknowledged.
    fn find(&self, digest: &Digest) -> Option<(MigrationId, BlockId)>;

    /// Records that the destination has this content in this block of our guest.
    fn arrived(&mut self, digest: &Digest, block: BlockId);

    /// Records that this block of our guest does not keep this content.
    fn changed(&mut self, digest: &Digest, block: BlockId);
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    tag: u64,
    block: u32,
    region: u16,
    /// The member's number, from 1; 0 is an empty slot.
    member: u16,
}

const EMPTY: Slot = Slot {
    tag: 0,
    block: 0,
    region: 0,
    member: 0,
};

/// A member of a gang.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member(u16);

impl Member {
    /// Returns where this guest begins in its memory, as a share of the whole. Members begin at
    /// different places, so that they do not all send the same content at the same time.
    pub fn start(self) -> f64 {
        const GOLDEN: f64 = 0.618_033_988_749_895;
        (f64::from(self.0 - 1) * GOLDEN).fract()
    }
}

/// The contents that the members of a gang have brought.
#[derive(Debug, Default)]
pub struct GangIndex {
    slots: Vec<Slot>,
    members: Vec<Option<MigrationId>>,
    /// The largest member so far, in blocks.
    blocks: u64,
}

impl GangIndex {
    /// Adds a guest with this number of blocks. Returns `None` when there are too many members.
    pub fn join(&mut self, migration: MigrationId, blocks: u64) -> Option<Member> {
        let is_alone = self.members.iter().all(Option::is_none);
        let slots_max = if is_alone { SLOTS_ALONE_MAX } else { SLOTS_MAX };
        self.blocks = self.blocks.max(blocks);
        // Buckets fill unevenly, and the other members bring content of their own.
        let wanted = usize::try_from(self.blocks.saturating_mul(2)).unwrap_or(usize::MAX);
        self.grow(wanted.clamp(WAYS, slots_max).next_power_of_two());
        // Numbers of members that have left are not used again: their entries stay invalid.
        let member = u16::try_from(self.members.len() + 1).ok()?;
        self.members.push(Some(migration));
        Some(Member(member))
    }

    /// Grows the index to at least `slots` slots, a power of two.
    fn grow(&mut self, slots: usize) {
        if self.slots.len() >= slots {
            return;
        }
        let old = std::mem::replace(&mut self.slots, vec![EMPTY; slots]);
        for slot in old.into_iter().filter(|slot| slot.member != 0) {
            let bucket = self.bucket(slot.tag);
            let new = &mut self.slots[bucket..bucket + WAYS];
            if let Some(free) = new.iter_mut().find(|slot| slot.member == 0) {
                *free = slot;
            }
        }
    }

    /// Removes a guest: its blocks may change unnoticed from now on.
    pub fn leave(&mut self, member: Member) {
        if let Some(place) = self.members.get_mut(usize::from(member.0 - 1)) {
            *place = None;
        }
    }

    /// Returns the migration that a slot belongs to, while it is running.
    fn migration(&self, slot: &Slot) -> Option<MigrationId> {
        let place = usize::from(slot.member).checked_sub(1)?;
        *self.members.get(place)?
    }

    /// Returns a block of another member that had this content.
    pub fn find(&self, member: Member, digest: &Digest) -> Option<(MigrationId, BlockId)> {
        let (bucket, tag) = self.place(digest);
        let slots = self.slots.get(bucket..bucket + WAYS)?;
        let mut others = slots
            .iter()
            .filter(|slot| slot.tag == tag && slot.member != member.0);
        let of_another = |slot: &Slot| {
            let id = BlockId {
                region: RegionId(slot.region),
                block: u64::from(slot.block),
            };
            Some((self.migration(slot)?, id))
        };
        others.find_map(of_another)
    }

    /// Records that the destination has this content in this block of a member.
    pub fn arrived(&mut self, member: Member, digest: &Digest, id: BlockId) {
        let (bucket, tag) = self.place(digest);
        let (Some(slots), Ok(block)) = (
            self.slots.get(bucket..bucket + WAYS),
            u32::try_from(id.block),
        ) else {
            return;
        };
        let used = |slot: &Slot| self.migration(slot).is_some();
        let same = || slots.iter().filter(|slot| slot.tag == tag && used(slot));
        if same().count() >= COPIES_MAX || same().any(|slot| slot.member == member.0) {
            return;
        }
        let free = slots.iter().position(|slot| !used(slot));
        self.slots[bucket + free.unwrap_or(usize::from(digest.0[8]) % WAYS)] = Slot {
            tag,
            block,
            region: id.region.0,
            member: member.0,
        };
    }

    /// Records that this block of a member does not keep this content.
    pub fn changed(&mut self, member: Member, digest: &Digest, id: BlockId) {
        let (bucket, tag) = self.place(digest);
        let Some(slots) = self.slots.get_mut(bucket..bucket + WAYS) else {
            return;
        };
        for slot in slots {
            let is_it = (slot.tag, slot.member, slot.region) == (tag, member.0, id.region.0);
            if is_it && u64::from(slot.block) == id.block {
                *slot = EMPTY;
            }
        }
    }

    /// Returns the first slot of a digest's bucket, and the digest's tag there.
    fn place(&self, digest: &Digest) -> (usize, u64) {
        let [tag, _] = *digest.0.as_chunks().0 else {
            return (0, 0);
        };
        let tag = u64::from_le_bytes(tag);
        (self.bucket(tag), tag)
    }

    fn bucket(&self, tag: u64) -> usize {
        let buckets = (self.slots.len() / WAYS).max(1);
        (tag as usize & (buckets - 1)) * WAYS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(block: u64) -> BlockId {
        BlockId {
            region: RegionId(2),
            block,
        }
    }

    fn joined() -> (GangIndex, Member, Member) {
        let mut index = GangIndex::default();
        let first = index.join(MigrationId([1; 8]), 1000).unwrap();
        let second = index.join(MigrationId([2; 8]), 10).unwrap();
        (index, first, second)
    }

    #[test]
    fn only_others_find_what_one_brought_and_only_while_it_is_there() {
        let (mut index, first, second) = joined();
        let digest = Digest([7; 16]);
        index.arrived(first, &digest, id(42));
        let found = Some((MigrationId([1; 8]), id(42)));
        assert_eq!(index.find(second, &digest), found);
        assert_eq!(index.find(first, &digest), None);
        assert_eq!(index.find(second, &Digest([8; 16])), None);
        index.changed(first, &digest, id(41));
        assert_eq!(index.find(second, &digest), found);
        index.changed(first, &digest, id(42));
        assert_eq!(index.find(second, &digest), None);
        index.arrived(first, &digest, id(42));
        index.leave(first);
        assert_eq!(index.find(second, &digest), None);
        let third = index.join(MigrationId([3; 8]), 1).unwrap();
        assert_ne!(third, first, "who has brought nothing");
        index.arrived(third, &digest, id(1));
        assert!(index.find(second, &digest).is_some(), "its place is free");
    }

    #[test]
    fn what_one_takes_along_another_still_has() {
        let (mut index, first, second) = joined();
        let third = index.join(MigrationId([3; 8]), 1).unwrap();
        let digest = Digest([7; 16]);
        index.arrived(first, &digest, id(1));
        index.arrived(second, &digest, id(2));
        index.leave(first);
        let found = Some((MigrationId([2; 8]), id(2)));
        assert_eq!(index.find(third, &digest), found);
    }

    #[test]
    fn a_full_index_forgets_but_never_grows() {
        let (mut index, first, second) = joined();
        let size = index.slots.len();
        assert_eq!(size, 2048);
        let digest = |n: u64| {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&n.to_le_bytes());
            bytes[8..].copy_from_slice(&(n + 1).to_le_bytes());
            Digest(bytes)
        };
        (0..5000).for_each(|n| index.arrived(first, &digest(n), id(n)));
        assert_eq!(index.slots.len(), size);
        let found = |index: &GangIndex| {
            let found = (0..5000).filter(|n| index.find(second, &digest(*n)).is_some());
            found.count()
        };
        assert_eq!(found(&index), size);
        index.join(MigrationId([3; 8]), u64::MAX).unwrap();
        assert_eq!(index.slots.len(), SLOTS_MAX);
        assert_eq!(found(&index), size, "all was taken along");
    }

    #[test]
    fn an_index_for_one_guest_stays_small() {
        let mut index = GangIndex::default();
        index.join(MigrationId([1; 8]), u64::MAX).unwrap();
        assert_eq!(index.slots.len(), SLOTS_ALONE_MAX);
        index.join(MigrationId([2; 8]), 1).unwrap();
        assert_eq!(index.slots.len(), SLOTS_MAX);
    }

    #[test]
    fn members_begin_far_from_each_other() {
        let starts: Vec<f64> = (1..=4).map(|n| Member(n).start()).collect();
        for (n, one) in starts.iter().enumerate() {
            assert!((0.0..1.0).contains(one));
            for other in &starts[n + 1..] {
                assert!((one - other).abs() > 0.1, "{starts:?}");
            }
        }
    }
}
