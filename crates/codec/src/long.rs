//! Compression over frames: one Zstandard frame (RFC 8878) whose parts are the payloads of many
//! frames, so that each part can refer to the content of earlier ones.
//!
//! Memory often resembles memory that was sent some megabytes earlier: another process of the same
//! program, a file that was read twice, tables of a database. This compression costs a window on
//! both sides, and the parts must be decompressed in their order, which [`crate::InOrder`]
//! restores.

use crate::Compression;
use crate::compress::{Compressed, Method, scratch};
use std::io;
use zstd::stream::raw::{CParameter, Decoder, Encoder, InBuffer, Operation, OutBuffer};
use zstd::zstd_safe::DParameter;

/// The window, as the logarithm of bytes: 32 MiB. Four times as much finds 1 to 2 % more, a quarter
/// of it 1 to 5 % less: decision 0011.
const WINDOW_LOG: u32 = 25;
/// The payload for which a level is kept: a new frame loses the window.
const KEEP_LEVEL_BYTES: u64 = 16 << 20;

/// The compressing side.
pub(crate) struct LongCompressor {
    encoder: Encoder<'static>,
    level: i32,
    /// The order number of the next part.
    order: u32,
    /// Payload that the Zstandard frame carries so far; 0 when the next part begins one.
    carried_bytes: u64,
}

impl LongCompressor {
    pub(crate) fn new(level: i32) -> io::Result<Self> {
        let mut encoder = Encoder::new(level)?;
        encoder.set_parameter(CParameter::WindowLog(WINDOW_LOG))?;
        encoder.set_parameter(CParameter::EnableLongDistanceMatching(true))?;
        Ok(Self {
            encoder,
            level,
            order: 0,
            carried_bytes: 0,
        })
    }

    /// Begins a new connection, whose receiver has none of the parts.
    pub(crate) fn forget_frames(&mut self) {
        (self.order, self.carried_bytes) = (0, 0);
    }

    /// Compresses `payload` into the next part, in `output`.
    pub(crate) fn compress<'a>(
        &mut self,
        payload: &[u8],
        level: i32,
        output: &'a mut Vec<u8>,
    ) -> io::Result<Compressed<'a>> {
        if level != self.level && self.carried_bytes > KEEP_LEVEL_BYTES {
            self.carried_bytes = 0;
        }
        let begins = self.carried_bytes == 0;
        if begins {
            self.encoder.reinit()?;
            self.encoder
                .set_parameter(CParameter::CompressionLevel(level))?;
            self.level = level;
        }
        // The frame's header, and a block header for each flush.
        let bound = zstd::zstd_safe::compress_bound(payload.len()) + 64;
        let mut written = OutBuffer::around(scratch(output, bound));
        let mut read = InBuffer::around(payload);
        while read.pos() < payload.len() {
            let before = (read.pos(), written.pos());
            self.encoder.run(&mut read, &mut written)?;
            if before == (read.pos(), written.pos()) {
                return Err(io::Error::other("a compressor that does not get on"));
            }
        }
        if self.encoder.flush(&mut written)? > 0 {
            return Err(io::Error::other("a compressed part that is too long"));
        }
        let length = written.pos();
        let order = self.order;
        self.order = order
            .checked_add(1)
            .ok_or_else(|| io::Error::other("too many parts on one connection"))?;
        self.carried_bytes += payload.len() as u64;
        Ok(Compressed {
            stored: &output[..length],
            method: Method::Long { begins, order },
            compression: Compression::ZstdLong(self.level),
        })
    }
}

/// The decompressing side, of one connection.
#[derive(Default)]
pub(crate) struct LongDecompressor {
    decoder: Option<Decoder<'static>>,
    /// The expected order number.
    order: u32,
}

impl LongDecompressor {
    pub(crate) fn expected(&self) -> u32 {
        self.order
    }

    /// Fills `payload` from the next part; `false` unless it is valid and has exactly that length.
    /// After a failure no more parts can be decoded.
    pub(crate) fn decompress(
        &mut self,
        stored: &[u8],
        begins: bool,
        payload: &mut [u8],
    ) -> io::Result<bool> {
        self.order = self.order.wrapping_add(1);
        let decoder = match (self.decoder.take(), begins) {
            (None, false) => return Ok(false),
            (Some(decoder), false) => decoder,
            (Some(mut decoder), true) => {
                decoder.reinit()?;
                decoder
            }
            (None, true) => {
                let mut decoder = Decoder::new()?;
                decoder.set_parameter(DParameter::WindowLogMax(WINDOW_LOG))?;
                decoder
            }
        };
        let decoder = self.decoder.insert(decoder);
        let length = payload.len();
        let mut written = OutBuffer::around(payload);
        let mut read = InBuffer::around(stored);
        while read.pos() < stored.len() {
            let before = (read.pos(), written.pos());
            let ended = decoder.run(&mut read, &mut written);
            // A frame that has ended has no next part.
            if !ended.is_ok_and(|hint| hint > 0) || before == (read.pos(), written.pos()) {
                self.decoder = None;
                return Ok(false);
            }
        }
        // The part's output is complete if one more byte of room yields nothing.
        let whole = written.pos() == length;
        let mut rest = [0];
        let mut more = OutBuffer::around(&mut rest[..]);
        let flushed = decoder.run(&mut InBuffer::around(&[]), &mut more);
        let valid = whole && flushed.is_ok() && more.pos() == 0;
        if !valid {
            self.decoder = None;
        }
        Ok(valid)
    }
}
