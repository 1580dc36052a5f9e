//! Comparing what has come with the source, which asks: answered when all has come, but for what
//! the guest has written here, and before the source may let go of what it has.

use crate::destination::fetch::{Fetch, Fetched, send};
use crate::verify::{Content, WRITTEN};
use longhaul_codec::DigestKey;
use longhaul_protocol::message::ToSource;
use longhaul_protocol::{BlockRange, RegionId};
use longhaul_storage::disk::RawDisk;
use longhaul_storage::front::arriving::unwritten::{self, Unwritten};
use std::sync::Arc;
use tokio::task::block_in_place;

/// What the source asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Question {
    pub(crate) region: RegionId,
    pub(crate) range: BlockRange,
    pub(crate) blocks_per_digest: u32,
}

impl Fetch {
    /// Whether something that has come is yet to be compared.
    pub(crate) fn is_to_be_compared(&self) -> bool {
        self.disks.values().any(|disk| disk.unwritten.is_some())
    }

    /// Answers the source, once all has come.
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

    /// The source has found both to be equal.
    pub(crate) fn compared(&mut self) {
        for disk in self.disks.values_mut() {
            if let Err(error) = unwritten::end(&disk.disk.folder) {
                // The source says so again.
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
        // Looked for after it was read: what the guest writes it notes before.
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

    /// What its guest has not written, where that is to be compared.
    pub(crate) fn look_for_unwritten(&mut self) -> std::io::Result<()> {
        let (folder, blocks) = (&self.disk.folder, self.disk.masks.blocks);
        self.unwritten = Unwritten::open(folder, blocks).map_err(std::io::Error::other)?;
        Ok(())
    }
}
