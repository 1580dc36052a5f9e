//! The codec of blocks: zero, same, reference, duplicate, delta or literal, in frames of many
//! blocks.
//!
//! At the source the content of a batch is copied once into a staging buffer; [`Hasher::stage`]
//! finds zero blocks and digests the others; the caller decides per block ([`Decision`]);
//! [`Encoder::encode_frame`] makes one frame of them, self-contained unless its compression extends
//! over frames ([`Compression::ZstdLong`], [`InOrder`]). At the destination [`Decoder::decode`]
//! validates a whole frame before its first block is applied to a [`BlockSink`]. `docs/wire.md`,
//! section 4, is the normative description of a frame.
//!
//! A block of which the destination is known to hold an older version ([`Decision::Changed`])
//! travels as a delta against that version, if the [`Encoder`] remembers enough of it.
//!
//! References into disks will be one more [`Decision`] and one more kind of entry.

mod compress;
mod decode;
mod delta;
mod digest;
mod encode;
mod frame;
mod in_order;
mod long;
mod lz4;
mod pack;
mod policy;
mod verify;
mod versions;

pub use compress::Compression;
pub use decode::{
    BlockSink, BlockWrite, Content, DecodeError, Decoder, FrameError, Limits, Outcome,
};
pub use digest::{Digest, DigestKey, Hasher, Staged, fingerprint, is_zero};
pub use encode::{BlockId, Decision, EncodeError, EncodedFrame, Encoder};
pub use frame::{FRAME_VERSION, RUN_BLOCKS};
pub use in_order::InOrder;
pub use pack::{pack, unpack};
pub use policy::CompressionPolicy;
pub use verify::VERIFY_CHUNK_BLOCKS;
