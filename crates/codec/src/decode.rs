//! Decodes frames at the destination: it validates them and applies their blocks.
//!
//! ```text
//! header -> entries (ranges inside their regions) -> payload (exactly the literals and deltas)
//!        -> stale blocks left out -> references read, deltas applied, both compared
//!        -> one apply for the frame
//! ```
//! Everything left of "stale" is decided before the sink is asked for anything but the lengths of
//! its regions: a frame with an error changes nothing.

mod applying;

use crate::compress::{Decompressor, Method, scratch};
use crate::frame::{
    COMPRESSION_LONG, COMPRESSION_LONG_BEGINS, COMPRESSION_LZ4, COMPRESSION_RAW, COMPRESSION_ZSTD,
    Entry, FRAME_VERSION, HEADER_BYTES, Header, KIND_DELTA, KIND_DUPLICATE, KIND_KEPT,
    KIND_KEPT_RUN, KIND_LITERAL, KIND_REFERENCE, KIND_SHARED, KIND_ZERO, Kind, ORDER_BYTES,
};
use crate::{BlockId, Digest, DigestKey, Hasher, delta};
use applying::Applying;
use longhaul_protocol::limits::{FRAME_BLOCKS_MAX, FRAME_BYTES_MAX};
use longhaul_protocol::{BLOCK_SIZE, BlockRange, MigrationId, RegionId};
use std::{fmt, io};

/// Bytes of a digest in a frame.
const DIGEST_BYTES: usize = 16;

/// The limits of a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Longest frame, in bytes as received.
    pub frame_bytes: usize,
    /// Most blocks that a frame may describe.
    pub frame_blocks: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            frame_bytes: FRAME_BYTES_MAX,
            frame_blocks: FRAME_BLOCKS_MAX,
        }
    }
}

/// The receiver of decoded blocks. It owns the regions and the version of each of their blocks.
///
/// No other frame may come between `accepts` and `apply`: frames decoded concurrently need a lock
/// around [`Decoder::decode`], or an `apply` that checks the versions again.
pub trait BlockSink {
    /// An error of applying blocks.
    type Error;

    /// Returns the length of a region in blocks; `None` when there is no such region.
    fn region_blocks(&self, region: RegionId) -> Option<u64>;

    /// Returns whether version `seq` of a block may be applied: no newer one is there.
    fn accepts(&self, id: BlockId, seq: u64) -> bool;

    /// Reads a block as it was before this frame; `false` when its content cannot be used.
    fn read(&mut self, id: BlockId, content: &mut [u8; BLOCK_SIZE]) -> bool;

    /// Reads a block of another guest from the same source; `false` if it is unknown or not
    /// permitted.
    fn read_shared(
        &mut self,
        migration: MigrationId,
        id: BlockId,
        content: &mut [u8; BLOCK_SIZE],
    ) -> bool;

    /// Reads known content that may have this digest: of this very block, or of any; without a
    /// digest only of this very block. `false` where there is none.
    fn read_kept(
        &mut self,
        _id: BlockId,
        _digest: Option<&Digest>,
        _content: &mut [u8; BLOCK_SIZE],
    ) -> bool {
        false
    }

    /// Applies all blocks of a frame, in order, as version `seq`; called once per frame, and not at
    /// all when there is nothing to apply.
    fn apply(&mut self, seq: u64, writes: &[BlockWrite<'_>]) -> Result<(), Self::Error>;
}

/// New content for consecutive blocks of one region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockWrite<'a> {
    /// The region.
    pub region: RegionId,
    /// The blocks.
    pub range: BlockRange,
    /// Their new content.
    pub content: Content<'a>,
}

/// The content of consecutive blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Content<'a> {
    /// Zero; fresh memory that was never written need not be touched.
    Zero,
    /// These bytes.
    Bytes(&'a [u8]),
}

impl fmt::Debug for Content<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero => f.write_str("Zero"),
            Self::Bytes(bytes) => write!(f, "Bytes({})", bytes.len()),
        }
    }
}

/// The result of a frame. Every block that it describes is counted in exactly one of the three.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The frame's sequence number.
    pub seq: u64,
    /// Blocks that were applied.
    pub applied: u64,
    /// Blocks omitted because something newer was there.
    pub stale: u64,
    /// Blocks whose reference did not match here: the source must send them in another way.
    pub rejected: Vec<(RegionId, BlockRange)>,
}

/// A reason why a frame is refused. Each is a fault of the peer, and nothing was applied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// It is longer than the limit.
    #[error("a frame of {bytes} bytes, at most {limit} are accepted")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// It ends too early.
    #[error("a frame that is cut off")]
    Truncated,
    /// Bytes remain between the entries and the payload.
    #[error("a frame with {bytes} bytes that belong to nothing")]
    Trailing {
        /// Their number.
        bytes: usize,
    },
    /// It is of another version of the format.
    #[error("a frame of version {0}, this agent reads version {FRAME_VERSION}")]
    Version(u8),
    /// Its compression is unknown.
    #[error("a frame compressed with the unknown method {0}")]
    Compression(u8),
    /// An entry's kind is unknown.
    #[error("an entry of the unknown kind {0}")]
    Kind(u8),
    /// A number is too large, or not in its shortest form.
    #[error("a number in an entry that is too large or written too long")]
    Number,
    /// An entry describes no blocks.
    #[error("an entry of no blocks")]
    Empty,
    /// It describes more blocks than the limit.
    #[error("a frame of more than {limit} blocks")]
    TooManyBlocks {
        /// The limit.
        limit: usize,
    },
    /// A region is not part of this migration.
    #[error("region {} is not part of this migration", .0.0)]
    UnknownRegion(RegionId),
    /// Blocks lie beyond the end of their region.
    #[error("blocks {start}+{count} lie beyond the end of region {} ({blocks} blocks)", region.0)]
    BeyondRegion {
        /// The region.
        region: RegionId,
        /// First block.
        start: u64,
        /// Number of blocks.
        count: u64,
        /// The region's length.
        blocks: u64,
    },
    /// A duplicate refers to a literal that no earlier entry brought.
    #[error("a duplicate of literals that no earlier entry brought")]
    UnknownLiteral,
    /// The declared payload length contradicts the entries.
    #[error("a payload of {declared} bytes where the entries need {least} to {most}")]
    PayloadLength {
        /// The length by the header.
        declared: u64,
        /// The sum of the literals and the shortest deltas.
        least: u64,
        /// The sum of the literals and the longest deltas.
        most: u64,
    },
    /// The stored payload does not decompress to exactly the declared length.
    #[error("a payload that does not decompress to its declared length")]
    Payload,
    /// It does not continue the last frame of its kind.
    #[error("frame {order} of those in order where frame {expected} comes next")]
    Order {
        /// Its order number.
        order: u32,
        /// The expected order number.
        expected: u32,
    },
    /// More frames arrived before their turn than may be in flight.
    #[error("{bytes} bytes of frames that came before their turn, at most {limit} are accepted")]
    TooEarly {
        /// The sum of their lengths.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The bytes behind the literals are not as many deltas as the entries announce.
    #[error("deltas that do not fill the payload, or are longer than a block")]
    Delta,
}

/// A reason why a frame was not applied.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError<E> {
    /// The frame is invalid: the connection has to be ended.
    #[error("the peer sent {0}")]
    Frame(#[from] FrameError),
    /// There is no memory for a decompressor.
    #[error("cannot decompress a frame")]
    Decompressor(#[source] io::Error),
    /// The blocks could not be applied, or not all of them.
    #[error("cannot apply a frame")]
    Sink(#[source] E),
}

/// Decodes frames, and holds the contexts and buffers that are reused for each. There is one per
/// connection: frames of [`crate::Compression::ZstdLong`] continue earlier ones, and have to arrive
/// [in order](crate::InOrder).
pub struct Decoder {
    hasher: Hasher,
    decompressor: Decompressor,
    payload: Vec<u8>,
    referenced: Vec<[u8; BLOCK_SIZE]>,
}

impl fmt::Debug for Decoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decoder").finish_non_exhaustive()
    }
}

impl Decoder {
    /// Creates a decoder for a migration whose digests are made with `key`.
    pub fn new(key: DigestKey) -> Self {
        Self {
            hasher: Hasher::new(key),
            decompressor: Decompressor::new(),
            payload: Vec::new(),
            referenced: Vec::new(),
        }
    }

    /// Validates a frame, and applies its blocks unless newer ones are present.
    pub fn decode<S: BlockSink>(
        &mut self,
        frame: &[u8],
        limits: &Limits,
        sink: &mut S,
    ) -> Result<Outcome, DecodeError<S::Error>> {
        let parsed = Parsed::new(frame, limits, |region| sink.region_blocks(region))?;
        if let Some(Method::Long { order, .. }) = parsed.method {
            let expected = self.decompressor.expected();
            if order != expected {
                return Err(FrameError::Order { order, expected }.into());
            }
        }
        let payload = match parsed.method {
            None => parsed.stored,
            Some(method) => {
                let payload = scratch(&mut self.payload, parsed.payload_bytes);
                let valid = self
                    .decompressor
                    .decompress(parsed.stored, method, payload)
                    .map_err(DecodeError::Decompressor)?;
                if !valid {
                    return Err(FrameError::Payload.into());
                }
                payload
            }
        };
        let deltas = parsed.cut_deltas(payload)?;
        let seq = parsed.seq;
        let mut applying = Applying::default();
        applying.leave_out_stale(&parsed.entries, |id| sink.accepts(id, seq));
        applying.read_references(sink, &self.hasher, &deltas, &mut self.referenced);
        let writes = applying.writes(payload, &self.referenced);
        let applied = writes.iter().map(|write| write.range.count).sum();
        if !writes.is_empty() {
            sink.apply(seq, &writes).map_err(DecodeError::Sink)?;
        }
        let Applying {
            stale, rejected, ..
        } = applying;
        Ok(Outcome {
            seq,
            applied,
            stale,
            rejected,
        })
    }
}

/// A frame whose header and entries are valid.
struct Parsed<'a> {
    seq: u64,
    entries: Vec<ParsedEntry<'a>>,
    method: Option<Method>,
    payload_bytes: usize,
    /// The part of the payload that is literals; the deltas follow.
    literal_bytes: usize,
    deltas: usize,
    stored: &'a [u8],
}

/// An entry, with its digests and its place in the payload.
struct ParsedEntry<'a> {
    entry: Entry,
    /// The first of its blocks in the payload, if it has any.
    literal: usize,
    /// The first of its deltas among those of the frame, if it has any.
    delta: usize,
    /// A digest for each block of a reference, or for the result of each delta.
    digests: &'a [[u8; DIGEST_BYTES]],
}

impl<'a> Parsed<'a> {
    fn new(
        frame: &'a [u8],
        limits: &Limits,
        region_blocks: impl Fn(RegionId) -> Option<u64>,
    ) -> Result<Self, FrameError> {
        if frame.len() > limits.frame_bytes {
            return Err(FrameError::TooLong {
                bytes: frame.len(),
                limit: limits.frame_bytes,
            });
        }
        let header = parse_header(frame)?;
        let body = &frame[HEADER_BYTES..];
        let (method, body) = method(header.compression, body)?;
        let (rest, stored) = body
            .len()
            .checked_sub(header.stored_bytes as usize)
            .and_then(|entries| body.split_at_checked(entries))
            .ok_or(FrameError::Truncated)?;
        let mut reader = Reader { rest };
        let mut entries = Vec::new();
        let (mut blocks, mut literals, mut deltas) = (0, 0, 0);
        for _ in 0..header.entries {
            let parsed = reader.entry(literals, deltas)?;
            let entry = &parsed.entry;
            // No sum can overflow: each count is at most the rest of the limit.
            if entry.range.count > limits.frame_blocks as u64 - blocks {
                return Err(FrameError::TooManyBlocks {
                    limit: limits.frame_blocks,
                });
            }
            blocks += entry.range.count;
            inside(entry.region, entry.range, &region_blocks)?;
            match entry.kind {
                Kind::Literal => literals += entry.range.count,
                Kind::Delta => deltas += entry.range.count,
                Kind::Reference { region, start } => {
                    inside(
                        region,
                        BlockRange::new(start, entry.range.count),
                        &region_blocks,
                    )?;
                }
                // The length of another guest's region is only known when it is read.
                Kind::Zero | Kind::Duplicate { .. } | Kind::Shared { .. } => {}
                // Known content is looked for.
                Kind::Kept | Kind::KeptRun => {}
            }
            entries.push(parsed);
        }
        if !reader.rest.is_empty() {
            return Err(FrameError::Trailing {
                bytes: reader.rest.len(),
            });
        }
        let literal_bytes = literals * BLOCK_SIZE as u64;
        let least = literal_bytes + deltas * delta::BYTES_MIN as u64;
        let most = literal_bytes + deltas * delta::BYTES_MAX as u64;
        let declared = u64::from(header.payload_bytes);
        if !(least..=most).contains(&declared) {
            return Err(FrameError::PayloadLength {
                declared,
                least,
                most,
            });
        }
        if method.is_none() && stored.len() as u64 != declared {
            return Err(FrameError::Payload);
        }
        Ok(Self {
            seq: header.seq,
            entries,
            method,
            payload_bytes: declared as usize,
            literal_bytes: literal_bytes as usize,
            deltas: deltas as usize,
            stored,
        })
    }

    /// Splits the payload into deltas, which must be all that follows the literals.
    fn cut_deltas<'p>(&self, payload: &'p [u8]) -> Result<Vec<&'p [u8]>, FrameError> {
        let mut rest = payload.get(self.literal_bytes..).unwrap_or_default();
        let mut deltas = Vec::with_capacity(self.deltas);
        for _ in 0..self.deltas {
            let length = delta::length(rest).ok_or(FrameError::Delta)?;
            let (delta, after) = rest.split_at(length);
            deltas.push(delta);
            rest = after;
        }
        if rest.is_empty() {
            Ok(deltas)
        } else {
            Err(FrameError::Delta)
        }
    }
}

fn parse_header(frame: &[u8]) -> Result<Header, FrameError> {
    match frame.first() {
        Some(&FRAME_VERSION) => {}
        Some(&version) => return Err(FrameError::Version(version)),
        None => return Err(FrameError::Truncated),
    }
    match frame.first_chunk() {
        Some(bytes) => Ok(Header::from_bytes(bytes)),
        None => Err(FrameError::Truncated),
    }
}

/// Parses how the payload of a frame is stored. Returns it with the rest of the frame.
fn method(compression: u8, body: &[u8]) -> Result<(Option<Method>, &[u8]), FrameError> {
    let begins = match compression {
        COMPRESSION_RAW => return Ok((None, body)),
        COMPRESSION_LZ4 => return Ok((Some(Method::Lz4), body)),
        COMPRESSION_ZSTD => return Ok((Some(Method::Zstd), body)),
        COMPRESSION_LONG_BEGINS => true,
        COMPRESSION_LONG => false,
        other => return Err(FrameError::Compression(other)),
    };
    let (order, body) = body
        .split_first_chunk::<ORDER_BYTES>()
        .ok_or(FrameError::Truncated)?;
    let order = u32::from_le_bytes(*order);
    Ok((Some(Method::Long { begins, order }), body))
}

/// Returns the order number of a frame that is decoded in order; `None` for all other frames, and
/// for invalid ones.
pub(crate) fn order_of(frame: &[u8]) -> Option<u32> {
    let header = parse_header(frame).ok()?;
    match method(header.compression, &frame[HEADER_BYTES..]).ok()? {
        (Some(Method::Long { order, .. }), _) => Some(order),
        _ => None,
    }
}

fn inside(
    region: RegionId,
    range: BlockRange,
    region_blocks: impl Fn(RegionId) -> Option<u64>,
) -> Result<(), FrameError> {
    let blocks = region_blocks(region).ok_or(FrameError::UnknownRegion(region))?;
    let BlockRange { start, count } = range;
    match start.checked_add(count) {
        Some(end) if end <= blocks => Ok(()),
        _ => Err(FrameError::BeyondRegion {
            region,
            start,
            count,
            blocks,
        }),
    }
}

/// Parses the entries of a frame.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Parses an entry; `literals` are the blocks of the payload, and `deltas` the deltas, that
    /// earlier entries took.
    fn entry(&mut self, literals: u64, deltas: u64) -> Result<ParsedEntry<'a>, FrameError> {
        let kind = self.byte()?;
        let region = self.region()?;
        let start = self.number()?;
        let count = self.number()?;
        if count == 0 {
            return Err(FrameError::Empty);
        }
        let mut literal = 0;
        let mut digests: &[[u8; DIGEST_BYTES]] = &[];
        let kind = match kind {
            KIND_ZERO => Kind::Zero,
            KIND_LITERAL => {
                literal = literals as usize;
                Kind::Literal
            }
            KIND_DUPLICATE => {
                let first = self.number()?;
                if first.checked_add(count).is_none_or(|end| end > literals) {
                    return Err(FrameError::UnknownLiteral);
                }
                literal = first as usize;
                Kind::Duplicate { literal: first }
            }
            KIND_REFERENCE => {
                let (region, start) = (self.region()?, self.number()?);
                digests = self.digests(count)?;
                Kind::Reference { region, start }
            }
            KIND_SHARED => {
                let migration = MigrationId(self.bytes()?);
                let (region, start) = (self.region()?, self.number()?);
                if start.checked_add(count).is_none() {
                    return Err(FrameError::Number);
                }
                digests = self.digests(count)?;
                Kind::Shared {
                    migration,
                    region,
                    start,
                }
            }
            KIND_DELTA => {
                digests = self.digests(count)?;
                Kind::Delta
            }
            KIND_KEPT => {
                digests = self.digests(count)?;
                Kind::Kept
            }
            KIND_KEPT_RUN => {
                digests = self.digests(1)?;
                Kind::KeptRun
            }
            other => return Err(FrameError::Kind(other)),
        };
        let entry = Entry {
            region,
            range: BlockRange::new(start, count),
            kind,
        };
        Ok(ParsedEntry {
            entry,
            literal,
            delta: deltas as usize,
            digests,
        })
    }

    fn byte(&mut self) -> Result<u8, FrameError> {
        let (byte, rest) = self.rest.split_first().ok_or(FrameError::Truncated)?;
        self.rest = rest;
        Ok(*byte)
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        let (bytes, rest) = self.rest.split_first_chunk().ok_or(FrameError::Truncated)?;
        self.rest = rest;
        Ok(*bytes)
    }

    fn region(&mut self) -> Result<RegionId, FrameError> {
        u16::try_from(self.number()?)
            .map(RegionId)
            .map_err(|_| FrameError::Number)
    }

    fn number(&mut self) -> Result<u64, FrameError> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                return Err(FrameError::Number);
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                let too_long = byte == 0 && shift > 0;
                return if too_long {
                    Err(FrameError::Number)
                } else {
                    Ok(value)
                };
            }
        }
        Err(FrameError::Number)
    }

    fn digests(&mut self, count: u64) -> Result<&'a [[u8; DIGEST_BYTES]], FrameError> {
        let (digests, rest) = usize::try_from(count)
            .ok()
            .and_then(|count| count.checked_mul(DIGEST_BYTES))
            .and_then(|bytes| self.rest.split_at_checked(bytes))
            .ok_or(FrameError::Truncated)?;
        self.rest = rest;
        Ok(digests.as_chunks().0)
    }
}
