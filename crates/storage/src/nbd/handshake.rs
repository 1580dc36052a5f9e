//! The handshake ("Fixed newstyle negotiation"), independent of sockets: it turns options into
//! replies.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The server's first bytes ("Newstyle negotiation").
const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
/// The magic number before the server's flags, and before each option.
pub const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
/// The magic number before each reply to an option.
pub const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Fixed newstyle: in the server's flags and in the client's.
pub const FIXED_NEWSTYLE: u32 = 1 << 0;
/// No zeros after the reply to `EXPORT_NAME`, which is not offered.
pub const NO_ZEROES: u32 = 1 << 1;

/// Length of the client's flags, its first bytes.
pub const CLIENT_FLAGS_BYTES: usize = 4;
/// Bytes in front of each option's data.
pub const OPTION_HEADER_BYTES: usize = 16;
/// Longest data of an option. The longest sensible one is a name and a few queries.
pub const OPTION_BYTES_MAX: usize = 16 << 10;
/// Limit on a client's options.
pub const OPTIONS_MAX: usize = 64;
/// Limit on the queries in one option.
const QUERIES_MAX: u32 = 32;
/// Longest text ("Conventions").
const TEXT_BYTES_MAX: usize = 4096;
/// Longest payload of a request: the one that every client may rely on ("Size constraints").
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;
/// Any byte can be read and written by itself.
const BLOCK_BYTES_MIN: u32 = 1;
/// The size that suits file systems best.
const BLOCK_BYTES_PREFERRED: u32 = 4096;

/// The one metadata context ("Metadata querying").
const ALLOCATION: &str = "base:allocation";
/// The context's number once it is selected.
pub const ALLOCATION_ID: u32 = 1;

/// The abilities of every export ("Transmission flags"): has flags, flush, FUA, trim, write zeroes,
/// several connections.
pub const TRANSMISSION_FLAGS: u16 = 1 << 0 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 8;

/// Options ("Option types").
mod option {
    pub(super) const EXPORT_NAME: u32 = 1;
    pub(super) const ABORT: u32 = 2;
    pub(super) const LIST: u32 = 3;
    pub(super) const INFO: u32 = 6;
    pub(super) const GO: u32 = 7;
    pub(super) const STRUCTURED_REPLY: u32 = 8;
    pub(super) const LIST_META_CONTEXT: u32 = 9;
    pub(super) const SET_META_CONTEXT: u32 = 10;
}

/// Replies ("Option reply types").
mod reply {
    pub(super) const ACK: u32 = 1;
    pub(super) const INFO: u32 = 3;
    pub(super) const META_CONTEXT: u32 = 4;
    pub(super) const ERR_UNSUP: u32 = 1 << 31 | 1;
    pub(super) const ERR_POLICY: u32 = 1 << 31 | 2;
    pub(super) const ERR_INVALID: u32 = 1 << 31 | 3;
    pub(super) const ERR_UNKNOWN: u32 = 1 << 31 | 6;
    pub(super) const ERR_TOO_BIG: u32 = 1 << 31 | 9;
}

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

/// The name of an export. Every client that knows it and can reach the socket may use the disk: so
/// it consists of random bytes, new for each guest, disk and export. A QEMU that was left over from
/// an earlier move knows another one.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ExportName(String);

impl ExportName {
    /// Valid lengths of a name in bytes: at least that of 128 random bits in hexadecimal.
    pub const BYTES: std::ops::RangeInclusive<usize> = 32..=256;

    /// Returns a name; `None` when it is too short to be unguessable, or does not consist of ASCII
    /// letters, digits, `-`, `_` and `.`.
    pub fn new(name: String) -> Option<Self> {
        let fits = Self::BYTES.contains(&name.len());
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        (fits && name.bytes().all(plain)).then_some(Self(name))
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for ExportName {
    type Error = &'static str;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        Self::new(name).ok_or("an export's name that is too short, too long, or not plain")
    }
}

impl From<ExportName> for String {
    fn from(name: ExportName) -> Self {
        name.0
    }
}

impl fmt::Debug for ExportName {
    /// Omits the name, which must not appear in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ExportName(..)")
    }
}

/// An export as the handshake knows it.
#[derive(Debug, Clone)]
pub struct Offer {
    /// Its name.
    pub name: ExportName,
    /// Its size.
    pub size_bytes: u64,
}

/// The result of a handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Session {
    /// The index of the chosen export.
    pub export: usize,
    /// Whether structured replies were agreed on.
    pub structured: bool,
    /// Whether the client may query allocation.
    pub allocation: bool,
}

/// What follows an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The next option.
    Next,
    /// Transmission.
    Go(Session),
    /// The end: the client has disconnected.
    End,
}

/// A fault of the client that ends its handshake at once ("Termination of the session during option
/// haggling").
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The client's flags are not offered by this server.
    #[error("a client that does not know the fixed newstyle handshake (flags {0:#x})")]
    Flags(u32),
    /// The magic number of an option is missing.
    #[error("no NBD option ({0:#x})")]
    Magic(u64),
    /// An option is too long.
    #[error("an option of {0} bytes")]
    TooLong(u32),
    /// The option that can only be refused by disconnecting.
    #[error("a client that cannot take an answer to the export that it chose (EXPORT_NAME)")]
    ExportName,
    /// The client sends too many options.
    #[error("a client that sends options and never begins")]
    TooMany,
}

/// Returns the server's first bytes.
pub fn greeting() -> [u8; 18] {
    let mut bytes = [0; 18];
    bytes[..8].copy_from_slice(&NBDMAGIC.to_be_bytes());
    bytes[8..16].copy_from_slice(&IHAVEOPT.to_be_bytes());
    bytes[16] = 0;
    bytes[17] = (FIXED_NEWSTYLE | NO_ZEROES) as u8;
    bytes
}

/// Checks the client's first bytes ("Client flags").
pub fn check_flags(bytes: [u8; CLIENT_FLAGS_BYTES]) -> Result<(), HandshakeError> {
    let flags = u32::from_be_bytes(bytes);
    let known = flags & !(FIXED_NEWSTYLE | NO_ZEROES) == 0;
    if known && flags & FIXED_NEWSTYLE != 0 {
        return Ok(());
    }
    Err(HandshakeError::Flags(flags))
}

/// The header of an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionHeader {
    kind: u32,
    /// Bytes of data that follow.
    pub length: usize,
}

impl OptionHeader {
    /// Parses a header.
    pub fn parse(bytes: &[u8; OPTION_HEADER_BYTES]) -> Result<Self, HandshakeError> {
        let mut fields = Fields(bytes);
        let magic = fields.u64().unwrap_or_default();
        if magic != IHAVEOPT {
            return Err(HandshakeError::Magic(magic));
        }
        let kind = fields.u32().unwrap_or_default();
        let length = fields.u32().unwrap_or_default();
        match usize::try_from(length) {
            Ok(length) if length <= OPTION_BYTES_MAX => Ok(Self { kind, length }),
            Ok(_) | Err(_) => Err(HandshakeError::TooLong(length)),
        }
    }
}

/// Parses fields off the front; `None` when there are not enough bytes.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// Parses a text behind its length.
    fn text(&mut self) -> Option<&'a str> {
        let length = usize::try_from(self.u32()?).ok()?;
        if length > TEXT_BYTES_MAX {
            return None;
        }
        let text = str::from_utf8(self.bytes(length)?).ok()?;
        (!text.contains('\0')).then_some(text)
    }
}

/// A reason why an option is answered with an error.
struct Refusal {
    reply: u32,
    why: &'static str,
}

const MALFORMED: Refusal = Refusal {
    reply: reply::ERR_INVALID,
    why: "the option's data is not of its form",
};
const UNKNOWN_EXPORT: Refusal = Refusal {
    reply: reply::ERR_UNKNOWN,
    why: "no such export",
};

/// A handshake with one client.
#[derive(Debug)]
pub struct Handshake<'a> {
    offers: &'a [Offer],
    structured: bool,
    /// The export of the last option that selected contexts.
    allocation_of: Option<usize>,
    options: usize,
}

impl<'a> Handshake<'a> {
    /// Creates a handshake for these exports.
    pub fn new(offers: &'a [Offer]) -> Self {
        Self {
            offers,
            structured: false,
            allocation_of: None,
            options: 0,
        }
    }

    /// Takes an option, and appends the replies to it.
    pub fn option(
        &mut self,
        header: OptionHeader,
        data: &[u8],
        replies: &mut Vec<u8>,
    ) -> Result<Step, HandshakeError> {
        self.options += 1;
        if self.options > OPTIONS_MAX {
            return Err(HandshakeError::TooMany);
        }
        let kind = header.kind;
        let done = match kind {
            option::EXPORT_NAME => return Err(HandshakeError::ExportName),
            option::ABORT => Ok(Step::End),
            option::LIST => Self::list(data),
            option::INFO => self.info(kind, data, replies).map(|_| Step::Next),
            option::GO => self.info(kind, data, replies).map(|export| self.go(export)),
            option::STRUCTURED_REPLY => self.use_structure(data),
            option::LIST_META_CONTEXT => self.contexts(kind, data, replies),
            option::SET_META_CONTEXT => self.contexts(kind, data, replies),
            _ => Err(Refusal {
                reply: reply::ERR_UNSUP,
                why: "not offered by this server",
            }),
        };
        Ok(match done {
            Ok(step) => {
                append(replies, kind, reply::ACK, &[]);
                step
            }
            Err(Refusal { reply, why }) => {
                append(replies, kind, reply, &[why.as_bytes()]);
                Step::Next
            }
        })
    }

    fn find(&self, name: &str) -> Result<usize, Refusal> {
        let position = self.offers.iter().position(|o| o.name.as_str() == name);
        position.ok_or(UNKNOWN_EXPORT)
    }

    /// Refuses `LIST`: a client that may use an export knows its name.
    fn list(data: &[u8]) -> Result<Step, Refusal> {
        if !data.is_empty() {
            return Err(MALFORMED);
        }
        Err(Refusal {
            reply: reply::ERR_POLICY,
            why: "exports are not listed: ask for one by its name",
        })
    }

    fn use_structure(&mut self, data: &[u8]) -> Result<Step, Refusal> {
        if !data.is_empty() {
            return Err(MALFORMED);
        }
        self.structured = true;
        Ok(Step::Next)
    }

    fn go(&self, export: usize) -> Step {
        Step::Go(Session {
            export,
            structured: self.structured,
            allocation: self.allocation_of == Some(export),
        })
    }

    fn info(&self, kind: u32, data: &[u8], replies: &mut Vec<u8>) -> Result<usize, Refusal> {
        let (name, wanted) = parse_info(data).ok_or(MALFORMED)?;
        let export = self.find(name)?;
        let about_export = [
            &INFO_EXPORT.to_be_bytes()[..],
            &self.offers[export].size_bytes.to_be_bytes(),
            &TRANSMISSION_FLAGS.to_be_bytes(),
        ];
        append(replies, kind, reply::INFO, &about_export);
        if wanted.contains(&INFO_BLOCK_SIZE) {
            let about_blocks = [
                &INFO_BLOCK_SIZE.to_be_bytes()[..],
                &BLOCK_BYTES_MIN.to_be_bytes(),
                &BLOCK_BYTES_PREFERRED.to_be_bytes(),
                &PAYLOAD_BYTES_MAX.to_be_bytes(),
            ];
            append(replies, kind, reply::INFO, &about_blocks);
        }
        Ok(export)
    }

    /// Lists or selects metadata contexts, of which there is one.
    fn contexts(&mut self, kind: u32, data: &[u8], replies: &mut Vec<u8>) -> Result<Step, Refusal> {
        let select = kind == option::SET_META_CONTEXT;
        if select {
            // An earlier selection is void, even if this one fails.
            self.allocation_of = None;
        }
        if !self.structured {
            return Err(Refusal {
                reply: reply::ERR_INVALID,
                why: "ask for structured replies first",
            });
        }
        let (name, queries) = parse_contexts(data)?;
        let export = self.find(name)?;
        let matches = if select {
            queries.contains(&ALLOCATION)
        } else {
            queries.is_empty() || queries.iter().any(|q| [ALLOCATION, "base:"].contains(q))
        };
        if matches {
            let id = if select { ALLOCATION_ID } else { 0 };
            let context = [&id.to_be_bytes()[..], ALLOCATION.as_bytes()];
            append(replies, kind, reply::META_CONTEXT, &context);
            if select {
                self.allocation_of = Some(export);
            }
        }
        Ok(Step::Next)
    }
}

/// Parses the export and the information that `INFO` and `GO` ask for.
fn parse_info(data: &[u8]) -> Option<(&str, Vec<u16>)> {
    let mut fields = Fields(data);
    let name = fields.text()?;
    let count = fields.u16()?;
    if fields.0.len() != usize::from(count) * 2 {
        return None;
    }
    let wanted = (0..count).map_while(|_| fields.u16()).collect();
    Some((name, wanted))
}

/// Parses the export and the queries of an option about metadata contexts.
fn parse_contexts(data: &[u8]) -> Result<(&str, Vec<&str>), Refusal> {
    let mut fields = Fields(data);
    let name = fields.text().ok_or(MALFORMED)?;
    let count = fields.u32().ok_or(MALFORMED)?;
    if count > QUERIES_MAX {
        return Err(Refusal {
            reply: reply::ERR_TOO_BIG,
            why: "too many queries",
        });
    }
    let mut queries = Vec::new();
    for _ in 0..count {
        let query = fields.text().ok_or(MALFORMED)?;
        if !query.contains(':') {
            return Err(MALFORMED);
        }
        queries.push(query);
    }
    if !fields.0.is_empty() {
        return Err(MALFORMED);
    }
    Ok((name, queries))
}

fn append(replies: &mut Vec<u8>, option: u32, reply: u32, parts: &[&[u8]]) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    replies.extend(REPLY_MAGIC.to_be_bytes());
    replies.extend(option.to_be_bytes());
    replies.extend(reply.to_be_bytes());
    // The parts are names and texts of this server: far shorter than 4 GiB.
    replies.extend((length as u32).to_be_bytes());
    parts.iter().for_each(|part| replies.extend(*part));
}
