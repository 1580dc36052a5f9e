//! Guests that move at once between the same two hosts, a gang: what one of them brings, the others
//! refer to. At the source they share a key for digests and an index of what has arrived; the
//! destination lets each look at the memory of the others.

use crate::host::lock::lock;
use longhaul_codec::{BlockId, Digest};
use longhaul_engine::gang::{self, GangIndex};
use longhaul_engine::source::Source;
use longhaul_protocol::{BLOCK_SIZE, HostId, MigrationId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

/// A block that is looked at.
type Block = [u8; BLOCK_SIZE];

/// The gangs that leave this host, and the guests that arrive at it.
#[derive(Default)]
pub(crate) struct Gangs {
    leaving: Mutex<HashMap<HostId, Weak<Gang>>>,
    arriving: Arc<Mutex<Arriving>>,
}

type Arriving = HashMap<(HostId, MigrationId), Arc<dyn Look>>;

/// The memory of an arriving guest, as another one's frames may look at it.
pub(crate) trait Look: Send + Sync + 'static {
    /// Reads a block; false when it cannot be read.
    fn look(&self, id: BlockId, into: &mut Block) -> bool;
}

impl Gangs {
    /// The gang of those that leave for this host now, or a new one.
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

    /// What the frames of a guest from this host may look at.
    pub(crate) fn others(&self, host: HostId) -> Others {
        Others {
            host,
            arriving: self.arriving.clone(),
        }
    }
}

/// Guests that leave for one host, while any of them does.
pub(crate) struct Gang {
    key: [u8; 32],
    index: Mutex<GangIndex>,
}

impl Gang {
    /// The key of all their digests.
    pub(crate) fn key(&self) -> [u8; 32] {
        self.key
    }

    /// Lets a guest use what the others bring, and the others what it brings.
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
    /// Lets the others look at this one until what is returned is dropped.
    pub(crate) fn show(&self, migration: MigrationId, memory: Arc<dyn Look>) -> Shown {
        let key = (self.host, migration);
        lock(&self.arriving).insert(key, memory);
        Shown {
            key,
            arriving: self.arriving.clone(),
        }
    }

    /// Reads a block of one of them; false when it is not there or cannot be read.
    pub(crate) fn look(&self, migration: MigrationId, id: BlockId, into: &mut Block) -> bool {
        let memory = lock(&self.arriving).get(&(self.host, migration)).cloned();
        memory.is_some_and(|memory| memory.look(id, into))
    }
}

/// An arriving guest whose memory others may look at.
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
