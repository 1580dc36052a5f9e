//! Applies the blocks of a frame: reads what they refer to, and compares it with its digests.

use super::{BlockSink, BlockWrite, Content, DIGEST_BYTES, ParsedEntry};
use crate::digest::of_run;
use crate::frame::Kind;
use crate::{BlockId, Digest, Hasher, delta};
use longhaul_protocol::{BLOCK_SIZE, BlockRange, MigrationId, RegionId};
use std::ops::Range;

/// The place of the content of consecutive blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Zero,
    /// From this block of the payload on.
    Payload(usize),
    /// From this reference of the frame on; for a delta that is the block itself.
    Reference(usize),
}

/// A frame that is being applied to the sink.
#[derive(Default)]
pub(super) struct Applying {
    /// The blocks to be applied, before rejection.
    wanted: Vec<(RegionId, BlockRange, Place)>,
    pub(super) stale: u64,
    references: Vec<Reference>,
    runs: Vec<Run>,
    pub(super) rejected: Vec<(RegionId, BlockRange)>,
}

/// The holder of a block that is to be read.
#[derive(Debug, Clone, Copy)]
enum Holder {
    /// The guest itself.
    Guest,
    /// Another guest, of that migration.
    Other(MigrationId),
    /// No guest: it is known content.
    Kept,
    /// No guest: it is known content of this very block.
    KeptHere,
}

/// References that hold together, or not at all.
#[derive(Debug)]
struct Run {
    references: Range<usize>,
    digest: [u8; DIGEST_BYTES],
}

/// A block that is to be read at the destination.
struct Reference {
    holder: Holder,
    source: BlockId,
    digest: Digest,
    /// The frame's delta that is applied to it; without one it is the new content itself.
    delta: Option<usize>,
    holds: bool,
}

impl Applying {
    pub(super) fn leave_out_stale(
        &mut self,
        entries: &[ParsedEntry<'_>],
        accepts: impl Fn(BlockId) -> bool,
    ) {
        for ParsedEntry {
            entry,
            literal,
            delta,
            digests,
        } in entries
        {
            let region = entry.region;
            if entry.kind == Kind::KeptRun {
                self.take_run(region, entry.range, digests, &accepts);
                continue;
            }
            let mut continues = false;
            for (index, block) in entry.range.blocks().enumerate() {
                if !accepts(BlockId { region, block }) {
                    self.stale += 1;
                    continues = false;
                    continue;
                }
                let place = match entry.kind {
                    Kind::Zero => Place::Zero,
                    Kind::Literal | Kind::Duplicate { .. } => Place::Payload(literal + index),
                    Kind::Reference { region, start } => {
                        let source = BlockId {
                            region,
                            block: start + index as u64,
                        };
                        self.refer(Holder::Guest, source, digests[index], None)
                    }
                    Kind::Shared {
                        migration,
                        region,
                        start,
                    } => {
                        let source = BlockId {
                            region,
                            block: start + index as u64,
                        };
                        self.refer(Holder::Other(migration), source, digests[index], None)
                    }
                    Kind::Kept => {
                        let source = BlockId { region, block };
                        self.refer(Holder::Kept, source, digests[index], None)
                    }
                    // It was taken as a whole.
                    Kind::KeptRun => continue,
                    Kind::Delta => {
                        let source = BlockId { region, block };
                        self.refer(Holder::Guest, source, digests[index], Some(delta + index))
                    }
                };
                match self.wanted.last_mut() {
                    Some((_, range, _)) if continues => range.count += 1,
                    _ => self.wanted.push((region, BlockRange::new(block, 1), place)),
                }
                continues = true;
            }
        }
    }

    /// Takes a run. All its blocks are read, also those that are not wanted: its digest is that of
    /// all.
    fn take_run(
        &mut self,
        region: RegionId,
        range: BlockRange,
        digests: &[[u8; DIGEST_BYTES]],
        accepts: impl Fn(BlockId) -> bool,
    ) {
        let first = self.references.len();
        let mut continues = false;
        for block in range.blocks() {
            let source = BlockId { region, block };
            let place = self.refer(Holder::KeptHere, source, [0; DIGEST_BYTES], None);
            let accepted = accepts(source);
            match self.wanted.last_mut() {
                _ if !accepted => self.stale += 1,
                Some((_, range, _)) if continues => range.count += 1,
                _ => self.wanted.push((region, BlockRange::new(block, 1), place)),
            }
            continues = accepted;
        }
        self.runs.extend(digests.first().map(|digest| Run {
            references: first..self.references.len(),
            digest: *digest,
        }));
    }

    fn refer(
        &mut self,
        holder: Holder,
        source: BlockId,
        digest: [u8; DIGEST_BYTES],
        delta: Option<usize>,
    ) -> Place {
        self.references.push(Reference {
            holder,
            source,
            digest: Digest(digest),
            delta,
            holds: false,
        });
        Place::Reference(self.references.len() - 1)
    }

    /// Reads referenced blocks, applies deltas to their bases, and checks the digests.
    pub(super) fn read_references(
        &mut self,
        sink: &mut impl BlockSink,
        hasher: &Hasher,
        deltas: &[&[u8]],
        contents: &mut Vec<[u8; BLOCK_SIZE]>,
    ) {
        if contents.len() < self.references.len() {
            contents.resize(self.references.len(), [0; BLOCK_SIZE]);
        }
        let contents = &mut contents[..self.references.len()];
        for (reference, content) in self.references.iter_mut().zip(contents.iter_mut()) {
            reference.holds = match reference.holder {
                Holder::Guest => sink.read(reference.source, content),
                Holder::Other(migration) => sink.read_shared(migration, reference.source, content),
                Holder::Kept => sink.read_kept(reference.source, Some(&reference.digest), content),
                Holder::KeptHere => sink.read_kept(reference.source, None, content),
            };
            if let Some(delta) = reference.delta {
                delta::apply(content, deltas[delta]);
            }
        }
        let mut digests = Vec::with_capacity(contents.len());
        hasher.digest_blocks(contents, &mut digests);
        for run in &self.runs {
            let references = &mut self.references[run.references.clone()];
            let found = &digests[run.references.clone()];
            let bytes: Vec<u8> = found.iter().flat_map(|digest| digest.0).collect();
            let holds = references.iter().all(|reference| reference.holds);
            let holds = holds && of_run(&bytes).0 == run.digest;
            for (reference, digest) in references.iter_mut().zip(found) {
                (reference.digest, reference.holds) = (*digest, holds);
            }
        }
        for (reference, digest) in self.references.iter_mut().zip(&digests) {
            reference.holds &= reference.digest == *digest;
        }
    }

    /// Returns the blocks to be applied, and records rejected ones.
    pub(super) fn writes<'a>(
        &mut self,
        payload: &'a [u8],
        contents: &'a [[u8; BLOCK_SIZE]],
    ) -> Vec<BlockWrite<'a>> {
        let mut writes = Vec::with_capacity(self.wanted.len());
        for &(region, range, place) in &self.wanted {
            let length = range.count as usize * BLOCK_SIZE;
            let content = match place {
                Place::Zero => Content::Zero,
                Place::Payload(first) => Content::Bytes(&payload[first * BLOCK_SIZE..][..length]),
                Place::Reference(first) => {
                    let references = &self.references[first..][..range.count as usize];
                    let mut start = 0;
                    for run in references.chunk_by(|a, b| a.holds == b.holds) {
                        let range = BlockRange::new(range.start + start as u64, run.len() as u64);
                        if run[0].holds {
                            let held = &contents[first + start..][..run.len()];
                            let content = Content::Bytes(held.as_flattened());
                            writes.push(BlockWrite {
                                region,
                                range,
                                content,
                            });
                        } else {
                            self.rejected.push((region, range));
                        }
                        start += run.len();
                    }
                    continue;
                }
            };
            writes.push(BlockWrite {
                region,
                range,
                content,
            });
        }
        writes
    }
}
