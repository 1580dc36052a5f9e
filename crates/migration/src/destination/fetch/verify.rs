//! Answers the source's requests to compare fetched disks. It answers once all blocks are here, and
//! leaves out blocks that the guest has written here. The source keeps its copy until the
//! comparison is complete.

use crate::destination::fetch::{Fetch, Fetched, send};
use crate::verify::{Content, WRITTEN};
use longhaul_codec::DigestKey;
use longhaul_protocol::message::ToSource;
use longhaul_protocol::{BlockRange, RegionId};
use longhaul_storage::disk::RawDisk;
use longhaul_storage::front::arriving::unwritten::{self, Unwritten};
use std::sync::Arc;
use tokio::task::block_in_place;

/// A request of the source for digests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Question {
    pub(crate) region: RegionId,
    pub(crate) range: BlockRange,
    pub(crate) blocks_per_digest: u32,
}

impl Fetch {
    /// Returns whether a disk has yet to be compared.
    pub(crate) fn is_to_be_compared(&self) -> bool {
        self.disks.values().any(|disk| disk.unwritten.is_some())
    }

    /// Answers the source's request, once all blocks are here.
    pub(crate) async fn answer(&mut self) {
        if !self.is_whole() {
            return;
        }
        let Some(question) = self.question.take() else {
            return;
        };
        let disk = self.disks.get(&question.region);
        let digests = block_in_place(|| match disk {
            Some(disk) => disk.digests(question),
            None => Err(format!("region {} is no disk", question.region.0)),
        });
        match digests {
            Ok(digests) => {
                let Question { region, range, .. } = question;
                let answer = ToSource::Digests {
                    region,
                    range,
                    digests,
                };
                send(&mut self.begun.call, &answer);
            }
            Err(why) => self.pause(&why),
        }
    }

    /// Records that the source has found both copies equal.
    pub(crate) fn compared(&mut self) {
        for disk in self.disks.values_mut() {
            if let Err(error) = unwritten::end(&disk.disk.folder) {
                // The source sends `Verified` again.
                return self.pause(&error.to_string());
            }
            disk.unwritten = None;
        }
    }
}

impl Fetched {
    fn digests(&self, question: Question) -> Result<Vec<[u8; 16]>, String> {
        let Question {
            range,
            blocks_per_digest,
            ..
        } = question;
        let failed = |error: &dyn std::fmt::Display| format!("disk {}: {error}", self.disk.name);
        if range.end() > self.disk.masks.blocks {
            return Err(failed(&"the source compares more than there is"));
        }
        let image = RawDisk::open_to_read(&self.disk.image).map_err(|error| failed(&error))?;
        let key = DigestKey(self.disk.digest_key);
        let content = Content::Disk(Arc::new(image));
        let digests = content.digests(range, blocks_per_digest, key);
        let mut digests = digests.map_err(|error| failed(&error))?;
        // Read after the content, since the guest's writes are recorded before they begin.
        let unwritten = self.unwritten.as_ref();
        let pieces = unwritten.map(|it| it.pieces(range, blocks_per_digest.into()));
        let pieces = pieces.transpose().map_err(|error| failed(&error))?;
        let pieces = pieces.unwrap_or_else(|| vec![false; digests.len()]);
        for (digest, is_unwritten) in digests.iter_mut().zip(pieces) {
            if !is_unwritten {
                *digest = WRITTEN;
            }
        }
        Ok(digests)
    }

    /// Opens the record of blocks that the guest has not written, if the disk is to be compared.
    pub(crate) fn look_for_unwritten(&mut self) -> std::io::Result<()> {
        let (folder, blocks) = (&self.disk.folder, self.disk.masks.blocks);
        self.unwritten = Unwritten::open(folder, blocks).map_err(std::io::Error::other)?;
        Ok(())
    }
}
