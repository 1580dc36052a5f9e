//! The compressors of frame payloads, with contexts that persist between frames.

use crate::long::{LongCompressor, LongDecompressor};
use crate::lz4::Places;
use std::io;

const FRAME_BLOCKS: usize = 64;
/// Fewer than a frame may describe: the blocks fit into one frame even if none of them is
/// compressible.
const FRAME_BLOCKS_DEAR: usize = 192;
/// The slowest level for which frames of [`FRAME_BLOCKS`] are enough.
const ZSTD_FRAME_LEVEL: i32 = 3;
/// Matches in earlier frames make large frames unnecessary.
const FRAME_BLOCKS_LONG: usize = 128;

/// The compression of a frame's payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Compression {
    /// None.
    Raw,
    /// LZ4's block format, with matches searched at whole words only.
    Lz4Fast,
    /// LZ4's block format.
    Lz4,
    /// One Zstandard frame of this level (negative levels are faster).
    Zstd(i32),
    /// A part of a Zstandard frame that extends over many frames of a connection, of this level:
    /// content of earlier parts need not be sent again. Such frames are decoded in their order, see
    /// [`crate::InOrder`].
    ZstdLong(i32),
}

impl Compression {
    /// Returns the number of blocks per frame: enough to compress well together, and few enough to
    /// occupy the link only briefly. Slow levels find more in larger frames; for the others larger
    /// frames cost more cache misses.
    pub fn frame_blocks(self) -> usize {
        match self {
            Self::Zstd(level) if level > ZSTD_FRAME_LEVEL => FRAME_BLOCKS_DEAR,
            Self::ZstdLong(_) => FRAME_BLOCKS_LONG,
            Self::Raw | Self::Lz4Fast | Self::Lz4 | Self::Zstd(_) => FRAME_BLOCKS,
        }
    }
}

/// The compression contexts of one worker.
pub(crate) struct Compressor {
    places: Box<Places>,
    lz4: lz4_flex::block::CompressTable,
    zstd: Option<(i32, zstd::bulk::Compressor<'static>)>,
    long: Option<LongCompressor>,
    output: Vec<u8>,
}

impl Compressor {
    pub(crate) fn new() -> Self {
        Self {
            places: Places::new(),
            lz4: lz4_flex::block::CompressTable::large(),
            zstd: None,
            long: None,
            output: Vec::new(),
        }
    }

    /// Restarts compression over frames: no later frame depends on an earlier one.
    pub(crate) fn forget_frames(&mut self) {
        if let Some(long) = &mut self.long {
            long.forget_frames();
        }
    }

    /// Compresses `payload`, and returns the result; `None` when it would save less than a
    /// sixty-fourth.
    pub(crate) fn compress(
        &mut self,
        payload: &[u8],
        compression: Compression,
    ) -> io::Result<Option<Compressed<'_>>> {
        if payload.is_empty() {
            return Ok(None);
        }
        let length = match compression {
            Compression::Raw => return Ok(None),
            Compression::Lz4Fast => {
                let output = scratch(&mut self.output, payload.len());
                match self.places.compress(payload, output) {
                    Some(length) => length,
                    None => return Ok(None),
                }
            }
            Compression::Lz4 => {
                let bound = lz4_flex::block::get_maximum_output_size(payload.len());
                let output = scratch(&mut self.output, bound);
                lz4_flex::block::compress_into_with_table(payload, output, &mut self.lz4)
                    .map_err(io::Error::other)?
            }
            Compression::Zstd(level) => {
                let bound = zstd::zstd_safe::compress_bound(payload.len());
                let output = scratch(&mut self.output, bound);
                zstd_at(&mut self.zstd, level)?.compress_to_buffer(payload, output)?
            }
            Compression::ZstdLong(level) => {
                let long = match self.long.take() {
                    Some(long) => self.long.insert(long),
                    None => self.long.insert(LongCompressor::new(level)?),
                };
                // Sent even if it saves nothing: later parts depend on it.
                return long.compress(payload, level, &mut self.output).map(Some);
            }
        };
        let pays = length + payload.len() / 64 < payload.len();
        let method = match compression {
            Compression::Raw | Compression::Lz4Fast | Compression::Lz4 => Method::Lz4,
            Compression::Zstd(_) | Compression::ZstdLong(_) => Method::Zstd,
        };
        Ok(pays.then_some(Compressed {
            stored: &self.output[..length],
            method,
            compression,
        }))
    }
}

/// A compressed payload.
pub(crate) struct Compressed<'a> {
    pub(crate) stored: &'a [u8],
    pub(crate) method: Method,
    /// The compression used: another level than the requested one where a running frame has that
    /// level.
    pub(crate) compression: Compression,
}

/// Returns the Zstandard context, set to `level`.
fn zstd_at<'a>(
    context: &'a mut Option<(i32, zstd::bulk::Compressor<'static>)>,
    level: i32,
) -> io::Result<&'a mut zstd::bulk::Compressor<'static>> {
    let (_, compressor) = match context.take() {
        Some((set, compressor)) if set == level => context.insert((set, compressor)),
        Some((_, mut compressor)) => {
            compressor.set_compression_level(level)?;
            context.insert((level, compressor))
        }
        None => context.insert((level, zstd::bulk::Compressor::new(level)?)),
    };
    Ok(compressor)
}

/// Returns a buffer's first `length` bytes, with arbitrary content; the buffer grows and never
/// shrinks.
pub(crate) fn scratch(buffer: &mut Vec<u8>, length: usize) -> &mut [u8] {
    if buffer.len() < length {
        buffer.resize(length, 0);
    }
    &mut buffer[..length]
}

/// The decompression contexts of one connection.
pub(crate) struct Decompressor {
    zstd: Option<zstd::bulk::Decompressor<'static>>,
    long: LongDecompressor,
}

impl Decompressor {
    pub(crate) fn new() -> Self {
        Self {
            zstd: None,
            long: LongDecompressor::default(),
        }
    }

    /// Fills `payload` from `stored`; `false` unless `stored` is valid and has exactly that length.
    pub(crate) fn decompress(
        &mut self,
        stored: &[u8],
        method: Method,
        payload: &mut [u8],
    ) -> io::Result<bool> {
        let length = match method {
            Method::Lz4 => lz4_flex::block::decompress_into(stored, payload).ok(),
            Method::Zstd => {
                let context = match self.zstd.take() {
                    Some(context) => self.zstd.insert(context),
                    None => self.zstd.insert(zstd::bulk::Decompressor::new()?),
                };
                context.decompress_to_buffer(stored, payload).ok()
            }
            Method::Long { begins, .. } => {
                return self.long.decompress(stored, begins, payload);
            }
        };
        Ok(length == Some(payload.len()))
    }

    /// Returns the order number that the next long frame must have.
    pub(crate) fn expected(&self) -> u32 {
        self.long.expected()
    }
}

/// The storage method of a payload that is not raw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    Lz4,
    Zstd,
    /// As a part of a Zstandard frame: a new one if it `begins`, or the running one. `order` counts
    /// these parts on a connection, from 0.
    Long {
        begins: bool,
        order: u32,
    },
}
