//! Replicas: versions of a guest's disks that a source brings to another host again and again.
//!
//! The channel begins with [`ToDestination::Replicate`](crate::message::ToDestination::Replicate).
//! Its other messages are those of this module.

use crate::guest::GuestDescription;
use crate::limits::{
    NAME_BYTES_MAX, REPLICA_BLOCKS_BYTES_MAX, REPLICA_DIGESTS_BYTES_MAX, REPLICA_DISK_BYTES_MAX,
    REPLICA_DISKS_MAX, REPLICA_RECORD_BYTES_MAX,
};
use crate::message::Refusal;
use crate::wire::{Message, WireError, limit};
use serde::{Deserialize, Serialize};

/// A disk of a replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicatedDisk {
    /// The name of its image at both hosts.
    pub image: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// Bytes that it takes of the source's file system.
    pub allocated_bytes: u64,
}

/// Begins to bring a version of a guest's disks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaOffer {
    /// The guest.
    pub guest: GuestDescription,
    /// Identifies what the source keeps of the replica.
    pub id: [u8; 16],
    /// How many of the last versions are kept, at least one.
    pub keep_last: u32,
    /// For how many hours the last version of each is kept.
    pub keep_hourly: u32,
    /// The same for days.
    pub keep_daily: u32,
    /// The same for weeks.
    pub keep_weekly: u32,
    /// The seconds between two versions.
    pub every_s: u64,
    /// The generation of the source's right to run the guest; 0 if it never moved.
    pub generation: u64,
    /// Its disks.
    pub disks: Vec<ReplicatedDisk>,
}

impl ReplicaOffer {
    /// Checks the limits of the format.
    pub(crate) fn check(&self) -> Result<(), WireError> {
        let name = |text: &str| limit("a name", text.len() as u64, NAME_BYTES_MAX as u64);
        let count = self.disks.len() as u64;
        limit("the number of disks", count, REPLICA_DISKS_MAX as u64)?;
        name(&self.guest.name)?;
        self.disks.iter().try_for_each(|disk| {
            name(&disk.image)?;
            limit("the size of a disk", disk.bytes, REPLICA_DISK_BYTES_MAX)?;
            let allocated = disk.allocated_bytes;
            limit("the size of a disk", allocated, REPLICA_DISK_BYTES_MAX)
        })
    }
}

/// A message to the host that keeps a replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToReplica {
    /// A record of the log of a parcel (docs/parcel.md).
    Record {
        /// Its kind.
        kind: u8,
        /// The rest of it.
        rest: Vec<u8>,
    },
    /// Asks for [`FromReplica::Marked`] when everything before it was taken.
    Mark {
        /// Its number.
        number: u32,
        /// Whether everything is to be durable.
        durable: bool,
    },
    /// Asks for digests of the chunks of a disk.
    QueryDigests {
        /// The number of the disk in the offer.
        disk: u32,
        /// The first chunk.
        first: u64,
    },
    /// Asks for [`FromReplica::Blocks`] of a chunk of a disk.
    QueryBlocks {
        /// The number of the disk in the offer.
        disk: u32,
        /// The chunk.
        chunk: u64,
        /// For each block of 4096 bytes, the first 16 bytes of its SHA-256 digest.
        digests: Vec<u8>,
    },
}

/// A message from the host that keeps a replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromReplica {
    /// The replica takes records.
    Begun {
        /// The number of its newest version.
        newest: Option<u64>,
        /// Whether the version before came with the same id.
        same: bool,
    },
    /// The mark was reached.
    Marked {
        /// Its number.
        number: u32,
    },
    /// SHA-256 digests of chunks, in order; none behind the last chunk.
    Digests {
        /// 32 bytes for each chunk.
        digests: Vec<u8>,
    },
    /// The version is not taken.
    Refused(Refusal),
    /// The guest belongs to this host: an operator has failed over to the replica, or it has moved.
    Superseded {
        /// The generation of the right to run it.
        generation: u64,
    },
    /// Which blocks of a chunk have other digests here: a bit for each, from the lowest on.
    Blocks {
        /// The bits.
        mask: u64,
    },
}

impl Message for ToReplica {
    fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Record { rest, .. } => {
                let bytes = rest.len() as u64;
                limit("a record", bytes, REPLICA_RECORD_BYTES_MAX as u64)
            }
            Self::QueryBlocks { digests, .. } => {
                let bytes = digests.len() as u64;
                limit("digests of blocks", bytes, REPLICA_BLOCKS_BYTES_MAX as u64)
            }
            Self::Mark { .. } | Self::QueryDigests { .. } => Ok(()),
        }
    }
}

impl Message for FromReplica {
    fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Digests { digests } => {
                let bytes = digests.len() as u64;
                limit("digests", bytes, REPLICA_DIGESTS_BYTES_MAX as u64)
            }
            Self::Begun { .. }
            | Self::Blocks { .. }
            | Self::Marked { .. }
            | Self::Refused(_)
            | Self::Superseded { .. } => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{decode, encode};

    #[test]
    fn the_examples_are_true() {
        let page = include_str!("../../../docs/wire.md");
        let is_in_page = |bytes: Vec<u8>| {
            let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            let line = format!("\n{}\n", hex.join(" "));
            assert!(page.contains(&line), "docs/wire.md lacks {line}");
        };
        let (number, durable) = (300, true);
        is_in_page(encode(&ToReplica::Mark { number, durable }).unwrap());
        is_in_page(encode(&FromReplica::Marked { number }).unwrap());
        let (newest, same) = (None, false);
        is_in_page(encode(&FromReplica::Begun { newest, same }).unwrap());
        is_in_page(encode(&FromReplica::Superseded { generation: 300 }).unwrap());
        let (disk, chunk, digests) = (1, 300, [0x5a; 16].to_vec());
        let query = ToReplica::QueryBlocks {
            disk,
            chunk,
            digests,
        };
        is_in_page(encode(&query).unwrap());
        is_in_page(encode(&FromReplica::Blocks { mask: 1 }).unwrap());
    }

    #[test]
    fn messages_have_limits() {
        let record = |bytes| ToReplica::Record {
            kind: 2,
            rest: vec![0; bytes],
        };
        let longest = encode(&record(REPLICA_RECORD_BYTES_MAX)).unwrap();
        assert_eq!(
            decode::<ToReplica>(&longest),
            Ok(record(REPLICA_RECORD_BYTES_MAX))
        );
        assert!(encode(&record(REPLICA_RECORD_BYTES_MAX + 1)).is_err());
        let digests = vec![0; REPLICA_DIGESTS_BYTES_MAX + 1];
        assert!(encode(&FromReplica::Digests { digests }).is_err());
        let query = |bytes| ToReplica::QueryBlocks {
            disk: 0,
            chunk: 0,
            digests: vec![0; bytes],
        };
        assert!(encode(&query(REPLICA_BLOCKS_BYTES_MAX)).is_ok());
        assert!(encode(&query(REPLICA_BLOCKS_BYTES_MAX + 1)).is_err());
    }
}
