//! Shared deduplication. Guests that move at once between the same two hosts form a gang. A block
//! that one of them has sent becomes a reference when another sends it. At the source they share a
//! digest key and an index of what has arrived. At the destination each can read the memory of the
//! others.

use crate::host::lock::lock;
use longhaul_codec::{BlockId, Digest};
use longhaul_engine::gang::{self, GangIndex};
use longhaul_engine::source::Source;
use longhaul_protocol::{BLOCK_SIZE, HostId, MigrationId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

/// The content of a block that is read.
type Block = [u8; BLOCK_SIZE];

/// The gangs that leave this host, and the guests that arrive at it.
#[derive(Default)]
pub(crate) struct Gangs {
    leaving: Mutex<HashMap<HostId, Weak<Gang>>>,
    arriving: Arc<Mutex<Arriving>>,
}

type Arriving = HashMap<(HostId, MigrationId), Arc<dyn Look>>;

/// The memory of an arriving guest, which the frames of other guests may refer to.
pub(crate) trait Look: Send + Sync + 'static {
    /// Reads a block. Returns false if it cannot be read.
    fn look(&self, id: BlockId, into: &mut Block) -> bool;
}

impl Gangs {
    /// Returns the gang that leaves for a host now, or a new one.
    pub(crate) fn leaving_for(&self, host: HostId) -> Result<Arc<Gang>, getrandom::Error> {
        let mut leaving = lock(&self.leaving);
        leaving.retain(|_, gang| gang.strong_count() > 0);
        if let Some(gang) = leaving.get(&host).and_then(Weak::upgrade) {
            return Ok(gang);
        }
        let mut key = [0; 32];
        getrandom::fill(&mut key)?;
        let gang = Arc::new(Gang {
            key,
            index: Mutex::default(),
        });
        leaving.insert(host, Arc::downgrade(&gang));
        Ok(gang)
    }

    /// Returns the guests that frames of a guest from this host may refer to.
    pub(crate) fn others(&self, host: HostId) -> Others {
        Others {
            host,
            arriving: self.arriving.clone(),
        }
    }
}

/// The guests that leave for one host at the same time.
pub(crate) struct Gang {
    key: [u8; 32],
    index: Mutex<GangIndex>,
}

impl Gang {
    /// Returns the key of all their digests.
    pub(crate) fn key(&self) -> [u8; 32] {
        self.key
    }

    /// Adds a guest, so that it and the others can refer to each other's blocks.
    pub(crate) fn join(self: &Arc<Self>, migration: MigrationId, engine: &mut Source) {
        let blocks = engine.all_blocks();
        let Some(member) = lock(&self.index).join(migration, blocks) else {
            return;
        };
        let membership = Membership {
            gang: self.clone(),
            member,
        };
        engine.join(Box::new(membership), member.start());
    }
}

struct Membership {
    gang: Arc<Gang>,
    member: gang::Member,
}

impl gang::Gang for Membership {
    fn find(&self, digest: &Digest) -> Option<(MigrationId, BlockId)> {
        lock(&self.gang.index).find(self.member, digest)
    }

    fn arrived(&mut self, digest: &Digest, block: BlockId) {
        lock(&self.gang.index).arrived(self.member, digest, block);
    }

    fn changed(&mut self, digest: &Digest, block: BlockId) {
        lock(&self.gang.index).changed(self.member, digest, block);
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        lock(&self.gang.index).leave(self.member);
    }
}

/// The guests that arrive from one host.
pub(crate) struct Others {
    host: HostId,
    arriving: Arc<Mutex<Arriving>>,
}

impl Others {
    /// Lets the others read this guest's memory until the returned value is dropped.
    pub(crate) fn show(&self, migration: MigrationId, memory: Arc<dyn Look>) -> Shown {
        let key = (self.host, migration);
        lock(&self.arriving).insert(key, memory);
        Shown {
            key,
            arriving: self.arriving.clone(),
        }
    }

    /// Reads a block of one of them. Returns false if it does not exist or cannot be read.
    pub(crate) fn look(&self, migration: MigrationId, id: BlockId, into: &mut Block) -> bool {
        let memory = lock(&self.arriving).get(&(self.host, migration)).cloned();
        memory.is_some_and(|memory| memory.look(id, into))
    }
}

/// An arriving guest whose memory others may read.
pub(crate) struct Shown {
    key: (HostId, MigrationId),
    arriving: Arc<Mutex<Arriving>>,
}

impl Drop for Shown {
    fn drop(&mut self) {
        lock(&self.arriving).remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_protocol::RegionId;

    struct Stars;

    impl Look for Stars {
        fn look(&self, id: BlockId, into: &mut Block) -> bool {
            into.fill(b'*');
            id.block < 10
        }
    }

    #[test]
    fn those_of_one_host_share_a_key_while_they_are_there() {
        let gangs = Gangs::default();
        let (paris, rome) = (HostId([1; 32]), HostId([2; 32]));
        let first = gangs.leaving_for(paris).unwrap();
        assert_eq!(first.key(), gangs.leaving_for(paris).unwrap().key());
        assert_ne!(first.key(), gangs.leaving_for(rome).unwrap().key());
        let key = first.key();
        drop(first);
        assert_ne!(key, gangs.leaving_for(paris).unwrap().key());
    }

    #[test]
    fn only_guests_of_the_same_host_are_looked_at() {
        let gangs = Gangs::default();
        let (lyon, evil) = (gangs.others(HostId([1; 32])), gangs.others(HostId([2; 32])));
        let migration = MigrationId([7; 8]);
        let id = |block| BlockId {
            region: RegionId(0),
            block,
        };
        let mut content = [0; BLOCK_SIZE];
        let shown = lyon.show(migration, Arc::new(Stars));
        assert!(lyon.look(migration, id(3), &mut content));
        assert_eq!(content, [b'*'; BLOCK_SIZE]);
        assert!(!lyon.look(migration, id(10), &mut content));
        assert!(!evil.look(migration, id(3), &mut content));
        drop(shown);
        assert!(!lyon.look(migration, id(3), &mut content));
    }
}
