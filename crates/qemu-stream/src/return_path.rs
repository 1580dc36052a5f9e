//! The return path: the messages of a destination to a source, on the same socket.

use longhaul_protocol::limits::NAME_BYTES_MAX;

/// The longest body of a message in QEMU.
const BODY_BYTES_MAX: usize = 512;
/// The end mark of a bitmap of received pages.
const BITMAP_END: u64 = 0x0123_4567_89ab_cdef;

const SHUT: u16 = 1;
const PONG: u16 = 2;
const REQ_PAGES_ID: u16 = 3;
const REQ_PAGES: u16 = 4;
const RECV_BITMAP: u16 = 5;
const RESUME_ACK: u16 = 6;
const SWITCHOVER_ACK: u16 = 7;

/// A message of the return path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// The destination is done: 0 when it has loaded everything, another value when it failed.
    Shut(u32),
    /// The answer to a ping.
    Pong(u32),
    /// The destination's guest waits for pages.
    RequestPages {
        /// Their RAM block; `None` means that of the previous request.
        block: Option<String>,
        /// Offset in the block, in bytes.
        offset: u64,
        /// Length in bytes.
        length: u32,
    },
    /// The received pages of a RAM block, one bit per page, lowest bit first.
    ReceivedBitmap {
        /// The block.
        block: String,
        /// The bits.
        bitmap: Vec<u8>,
    },
    /// The destination continues after a pause.
    ResumeAck(u32),
    /// The destination agrees to the switchover.
    SwitchoverAck,
}

impl Message {
    /// Appends the message as QEMU writes it.
    pub fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Shut(value) => frame(SHUT, &value.to_be_bytes(), out),
            Self::Pong(value) => frame(PONG, &value.to_be_bytes(), out),
            Self::ResumeAck(value) => frame(RESUME_ACK, &value.to_be_bytes(), out),
            Self::SwitchoverAck => frame(SWITCHOVER_ACK, &[], out),
            Self::RequestPages {
                block,
                offset,
                length,
            } => {
                let mut body = offset.to_be_bytes().to_vec();
                body.extend(length.to_be_bytes());
                let kind = match block {
                    Some(block) => {
                        body.push(block.len() as u8);
                        body.extend(block.as_bytes());
                        REQ_PAGES_ID
                    }
                    None => REQ_PAGES,
                };
                frame(kind, &body, out);
            }
            Self::ReceivedBitmap { block, bitmap } => {
                let mut body = vec![block.len() as u8];
                body.extend(block.as_bytes());
                frame(RECV_BITMAP, &body, out);
                out.extend((bitmap.len() as u64).to_be_bytes());
                out.extend(bitmap);
                out.extend(BITMAP_END.to_be_bytes());
            }
        }
    }
}

fn frame(kind: u16, body: &[u8], out: &mut Vec<u8>) {
    out.extend(kind.to_be_bytes());
    out.extend((body.len() as u16).to_be_bytes());
    out.extend(body);
}

/// A reason why a return path cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReturnPathError {
    /// A message of an unknown type.
    #[error("QEMU's return path has a message of unknown type {0}")]
    Unknown(u16),
    /// A message of a wrong length.
    #[error("QEMU's return path has a message of type {kind} with {length} bytes")]
    Length {
        /// Type.
        kind: u16,
        /// Bytes of its body.
        length: usize,
    },
    /// A name that is not valid text.
    #[error("QEMU's return path has a name that is not plain text")]
    Name,
    /// An invalid bitmap.
    #[error("QEMU's return path has a bitmap that is too long or ends wrongly")]
    Bitmap,
    /// An earlier error ended the parser.
    #[error("QEMU's return path was given up at an earlier error")]
    GivenUp,
}

/// Reads a return path in pieces of any size.
#[derive(Debug)]
pub struct Parser {
    bitmap_bytes_max: u64,
    held: Vec<u8>,
    bitmap_of: Option<String>,
    failed: bool,
}

impl Parser {
    /// Creates a parser that accepts bitmaps of at most `bitmap_bytes_max` bytes.
    pub fn new(bitmap_bytes_max: u64) -> Self {
        Self {
            bitmap_bytes_max,
            held: Vec::new(),
            bitmap_of: None,
            failed: false,
        }
    }

    /// Takes bytes from `input` up to the end of the next message; `None` when all of it is taken.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Option<Message>, ReturnPathError> {
        if self.failed {
            return Err(ReturnPathError::GivenUp);
        }
        let result = self.advance(input);
        self.failed = result.is_err();
        result
    }

    fn advance(&mut self, input: &mut &[u8]) -> Result<Option<Message>, ReturnPathError> {
        loop {
            let wanted = self.wanted()?;
            let missing = wanted.saturating_sub(self.held.len());
            let (head, rest) = input.split_at(missing.min(input.len()));
            self.held.extend_from_slice(head);
            *input = rest;
            if head.len() < missing {
                return Ok(None);
            }
            if missing > 0 && self.wanted()? > wanted {
                continue;
            }
            let held = std::mem::take(&mut self.held);
            let message = match self.bitmap_of.take() {
                Some(block) => Some(bitmap(block, &held)?),
                None => self.message(&held)?,
            };
            if message.is_some() {
                return Ok(message);
            }
        }
    }

    /// Returns the length of the message at the head of the buffer, as far as it is known.
    fn wanted(&self) -> Result<usize, ReturnPathError> {
        if self.bitmap_of.is_some() {
            let Some(size) = self.held.first_chunk().copied().map(u64::from_be_bytes) else {
                return Ok(8);
            };
            let allowed = Some(size).filter(|size| *size <= self.bitmap_bytes_max);
            let size = allowed.and_then(|size| usize::try_from(size).ok());
            return Ok(16 + size.ok_or(ReturnPathError::Bitmap)?);
        }
        let Some(&[a, b, c, d]) = self.held.first_chunk() else {
            return Ok(4);
        };
        let kind = u16::from_be_bytes([a, b]);
        let length = usize::from(u16::from_be_bytes([c, d]));
        let fits = match kind {
            SHUT | PONG | RESUME_ACK => length == 4,
            REQ_PAGES => length == 12,
            SWITCHOVER_ACK => length == 0,
            REQ_PAGES_ID => length > 13,
            RECV_BITMAP => length > 1,
            kind => return Err(ReturnPathError::Unknown(kind)),
        };
        if !fits || length > BODY_BYTES_MAX {
            return Err(ReturnPathError::Length { kind, length });
        }
        Ok(4 + length)
    }

    fn message(&mut self, held: &[u8]) -> Result<Option<Message>, ReturnPathError> {
        let (Some(&[a, b]), Some(body)) = (held.first_chunk(), held.get(4..)) else {
            return Ok(None);
        };
        let kind = u16::from_be_bytes([a, b]);
        let wrong = ReturnPathError::Length {
            kind,
            length: body.len(),
        };
        let value = body.first_chunk().copied().map(u32::from_be_bytes);
        let message = match (kind, value) {
            (SHUT, Some(value)) => Message::Shut(value),
            (PONG, Some(value)) => Message::Pong(value),
            (RESUME_ACK, Some(value)) => Message::ResumeAck(value),
            (SWITCHOVER_ACK, _) => Message::SwitchoverAck,
            (REQ_PAGES | REQ_PAGES_ID, _) => {
                let (offset, rest) = body.split_first_chunk().ok_or_else(|| wrong.clone())?;
                let (length, rest) = rest.split_first_chunk().ok_or_else(|| wrong.clone())?;
                Message::RequestPages {
                    block: (kind == REQ_PAGES_ID)
                        .then(|| name(rest, wrong))
                        .transpose()?,
                    offset: u64::from_be_bytes(*offset),
                    length: u32::from_be_bytes(*length),
                }
            }
            (RECV_BITMAP, _) => {
                self.bitmap_of = Some(name(body, wrong)?);
                return Ok(None);
            }
            _ => return Err(wrong),
        };
        Ok(Some(message))
    }
}

fn bitmap(block: String, held: &[u8]) -> Result<Message, ReturnPathError> {
    let (bits, end) = held.split_last_chunk().ok_or(ReturnPathError::Bitmap)?;
    if u64::from_be_bytes(*end) != BITMAP_END {
        return Err(ReturnPathError::Bitmap);
    }
    let bitmap = bits.get(8..).ok_or(ReturnPathError::Bitmap)?.to_vec();
    Ok(Message::ReceivedBitmap { block, bitmap })
}

/// Parses a name behind its length, which must fill `bytes`.
fn name(bytes: &[u8], wrong: ReturnPathError) -> Result<String, ReturnPathError> {
    let (length, name) = bytes.split_first().ok_or_else(|| wrong.clone())?;
    if usize::from(*length) != name.len() || name.len() > NAME_BYTES_MAX {
        return Err(wrong);
    }
    let plain = name.iter().all(|byte| (0x20..0x7f).contains(byte));
    let name = std::str::from_utf8(name).ok().filter(|_| plain);
    name.map(str::to_owned).ok_or(ReturnPathError::Name)
}
