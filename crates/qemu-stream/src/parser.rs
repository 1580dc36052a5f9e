//! The incremental parser of the source's stream.
//!
//! ```text
//! Header -> Configuration -> Section -> SetupRecords <-> Sizes
//!                             ^  |          |
//!                             |  |          v
//!                             |  '-> Records -> Footer -> Section | Devices -> Complete
//!                             |        ^  |
//!                             |        |  v
//!                             '------ Content
//! ```

use crate::format::{MAGIC, PAGE_SIZE, Page, RAM, RAM_VERSION, VERSION, command, flag, mark};
use crate::limits::Limits;
use crate::vmdesc::EndFinder;

/// The longest token that is parsed as a whole: the head of a section or of a record.
const TOKEN_BYTES_MAX: usize = 300;

/// One of the guest's RAM blocks, as listed in the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RamBlock {
    /// Its name, such as `pc.ram`.
    pub name: String,
    /// Bytes in use, a multiple of [`PAGE_SIZE`].
    pub used_bytes: u64,
}

impl RamBlock {
    /// Returns its length in pages.
    pub fn pages(&self) -> u64 {
        self.used_bytes / PAGE_SIZE as u64
    }
}

/// The part of the stream before the first page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prelude {
    /// The bytes, from the header up to the end of `ram`'s first section, which a destination takes
    /// unchanged. The announcement of post-copy is omitted.
    pub bytes: Vec<u8>,
    /// The number of bytes up to section `ram`: further commands may follow there.
    pub commands: usize,
    /// The versioned machine type.
    pub machine_type: String,
    /// The id of section `ram` in this stream.
    pub ram_section: u32,
    /// The RAM blocks. Pages refer to them by their place in this list.
    pub blocks: Vec<RamBlock>,
}

/// The content of a written page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// All zeros.
    Zero,
    /// In the stream, but not wanted.
    Skipped,
    /// In the stream, and wanted (see [`Parser::keep`]).
    Kept(Box<Page>),
}

/// The meaning of a part of the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Everything before the first page.
    Prelude(Prelude),
    /// A section with pages begins.
    SectionStart {
        /// Whether it is `ram`'s last one.
        last: bool,
    },
    /// A page that the guest wrote before its record was made.
    Page {
        /// Place of its RAM block in [`Prelude::blocks`].
        block: usize,
        /// Place in the block.
        page: u64,
        /// Content.
        content: Content,
    },
    /// A section with pages has ended.
    SectionEnd,
    /// QEMU requests a PONG from the other end.
    Ping(u32),
    /// The last section is next (QEMU 10.0).
    SwitchoverStart,
    /// Everything after the last page, complete.
    DeviceState(Vec<u8>),
}

/// A reason why a stream cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// Not a migration stream.
    #[error("this is not a QEMU migration stream of version 3")]
    Header,
    /// The configuration section is missing.
    #[error("QEMU's stream has no configuration section: use a machine type that is not ancient")]
    Configuration,
    /// The configuration has an unknown part.
    #[error(
        "QEMU's stream checks `{0}`: switch off the migration capability or property behind it"
    )]
    ConfigurationPart(String),
    /// A device other than RAM sends its content in several parts.
    #[error("device `{0}` migrates content of its own while the guest runs; that cannot be moved")]
    Section(String),
    /// RAM in an unknown version.
    #[error("QEMU writes RAM in form {0}; form 4 is known")]
    RamVersion(u32),
    /// A misplaced mark.
    #[error("QEMU's stream has mark {mark:#04x} where none such belongs ({place})")]
    Mark {
        /// The byte.
        mark: u8,
        /// Where.
        place: &'static str,
    },
    /// A misplaced command.
    #[error("QEMU's stream has command {0}, which belongs to a feature that must be off")]
    Command(u16),
    /// A record of a feature that must be off.
    #[error("QEMU's stream uses {0}: switch that migration capability off")]
    Feature(&'static str),
    /// An invalid record.
    #[error("QEMU's stream has a RAM record that makes no sense (flags {0:#x})")]
    Record(u64),
    /// A section's end has another id than its beginning.
    #[error("QEMU's stream ends or continues section {found}, but `ram` is section {expected}")]
    SectionId {
        /// The announced id.
        expected: u32,
        /// The id found.
        found: u32,
    },
    /// The list of RAM blocks is invalid.
    #[error("QEMU's list of RAM blocks makes no sense: {0}")]
    Blocks(&'static str),
    /// A page beyond its block.
    #[error("QEMU's stream has a page at {offset:#x}, outside RAM block `{block}`")]
    Page {
        /// Block.
        block: String,
        /// Offset in it.
        offset: u64,
    },
    /// An unlisted block.
    #[error("QEMU's stream has a page of RAM block `{0}`, which it did not announce")]
    UnknownBlock(String),
    /// A name that is not valid text.
    #[error("QEMU's stream has a name that is not plain text")]
    Name,
    /// A limit was exceeded.
    #[error("QEMU's stream has more than {limit} {what}")]
    TooMuch {
        /// The limited quantity.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// Bytes after the end.
    #[error("QEMU's stream goes on after its end")]
    AfterEnd,
    /// An earlier error ended the parser.
    #[error("QEMU's stream was given up at an earlier error")]
    GivenUp,
}

#[derive(Debug)]
enum State {
    Header,
    Configuration,
    Section,
    SetupRecords,
    Sizes {
        left: u64,
    },
    Records,
    Content {
        block: usize,
        page: u64,
        left: usize,
        kept: Option<Box<Page>>,
    },
    Footer,
    Devices,
    Complete,
    Failed,
}

/// Reads the stream in pieces of any size.
#[derive(Debug)]
pub struct Parser {
    limits: Limits,
    state: State,
    /// The first bytes of an incomplete token.
    carry: Vec<u8>,
    prelude: Option<Vec<u8>>,
    /// The length of the prelude before section `ram`.
    commands: usize,
    /// Whether the newest token is omitted for a destination.
    left_out: bool,
    machine_type: String,
    ram_section: Option<u32>,
    last_section: bool,
    blocks: Vec<RamBlock>,
    kept: Vec<bool>,
    recent_block: Option<usize>,
    position: (usize, u64),
    pass: u64,
    device_state: Vec<u8>,
    end: EndFinder,
}

impl Parser {
    /// Creates a parser at the beginning of a stream.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            state: State::Header,
            carry: Vec::new(),
            prelude: Some(Vec::new()),
            commands: 0,
            left_out: false,
            machine_type: String::new(),
            ram_section: None,
            last_section: false,
            blocks: Vec::new(),
            kept: Vec::new(),
            recent_block: None,
            position: (0, 0),
            pass: 0,
            device_state: Vec::new(),
            end: EndFinder::default(),
        }
    }

    /// Requests the content of this block's pages from now on.
    pub fn keep(&mut self, block: usize) {
        if let Some(kept) = self.kept.get_mut(block) {
            *kept = true;
        }
    }

    /// Returns the number of the pass that the newest page belongs to, from 1: QEMU walks the
    /// blocks in ascending order, and a step back begins a new pass.
    pub fn pass(&self) -> u64 {
        self.pass
    }

    /// Returns whether the whole stream has been read.
    pub fn is_complete(&self) -> bool {
        matches!(self.state, State::Complete)
    }

    /// Takes bytes from `input` up to the next event; `None` when all of `input` is taken and there
    /// is no event yet.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Option<Event>, ParseError> {
        let result = self.advance(input);
        if result.is_err() {
            self.state = State::Failed;
        }
        result
    }

    fn advance(&mut self, input: &mut &[u8]) -> Result<Option<Event>, ParseError> {
        while !input.is_empty() {
            let event = match &mut self.state {
                State::Content { .. } => self.content(input),
                State::Devices => self.device_state(input)?,
                State::Complete => return Err(ParseError::AfterEnd),
                State::Failed => return Err(ParseError::GivenUp),
                _ => self.token(input)?,
            };
            if event.is_some() {
                return Ok(event);
            }
        }
        Ok(None)
    }

    /// Reads one token, directly from the input if it is complete there.
    fn token(&mut self, input: &mut &[u8]) -> Result<Option<Event>, ParseError> {
        if self.carry.is_empty() {
            let Some((used, event)) = self.read(input)? else {
                self.carry.extend_from_slice(input);
                *input = &[];
                return Ok(None);
            };
            *input = input.get(used..).unwrap_or_default();
            return Ok(event);
        }
        let mut carry = std::mem::take(&mut self.carry);
        let before = carry.len();
        let room = TOKEN_BYTES_MAX.saturating_sub(before).min(input.len());
        let (head, rest) = input.split_at(room);
        carry.extend_from_slice(head);
        let Some((used, event)) = self.read(&carry)? else {
            self.carry = carry;
            *input = rest;
            return Ok(None);
        };
        *input = input.get(used.saturating_sub(before)..).unwrap_or_default();
        carry.clear();
        self.carry = carry;
        Ok(event)
    }

    /// Reads one token if it is complete; changes nothing otherwise.
    fn read(&mut self, bytes: &[u8]) -> Result<Option<(usize, Option<Event>)>, ParseError> {
        let mut cursor = Cursor { bytes, at: 0 };
        let event = match self.state {
            State::Header => self.header(&mut cursor),
            State::Configuration => self.configuration(&mut cursor),
            State::Section => self.section(&mut cursor),
            State::SetupRecords => self.setup_record(&mut cursor),
            State::Sizes { left } => self.size(&mut cursor, left),
            State::Records => self.record(&mut cursor),
            State::Footer => self.footer(&mut cursor),
            _ => Err(Stop::Error(ParseError::GivenUp)),
        };
        let event = match event {
            Ok(event) => event,
            Err(Stop::Incomplete) => return Ok(None),
            Err(Stop::Error(error)) => return Err(error),
        };
        let Some(prelude) = &mut self.prelude else {
            return Ok(Some((cursor.at, event)));
        };
        if !std::mem::take(&mut self.left_out) {
            prelude.extend_from_slice(bytes.get(..cursor.at).unwrap_or_default());
        }
        if self.ram_section.is_none() {
            self.commands = prelude.len();
        }
        if prelude.len() > self.limits.prelude_bytes {
            return Err(ParseError::TooMuch {
                what: "bytes before its first page",
                limit: self.limits.prelude_bytes as u64,
            });
        }
        let ends = self.ram_section.is_some() && matches!(self.state, State::Section);
        let event = if ends { self.take_prelude() } else { event };
        Ok(Some((cursor.at, event)))
    }

    fn take_prelude(&mut self) -> Option<Event> {
        Some(Event::Prelude(Prelude {
            bytes: self.prelude.take()?,
            commands: self.commands,
            machine_type: self.machine_type.clone(),
            ram_section: self.ram_section?,
            blocks: self.blocks.clone(),
        }))
    }

    fn header(&mut self, cursor: &mut Cursor<'_>) -> Result<Option<Event>, Stop> {
        if cursor.be32()? != MAGIC || cursor.be32()? != VERSION {
            return Err(ParseError::Header.into());
        }
        self.state = State::Configuration;
        Ok(None)
    }

    fn configuration(&mut self, cursor: &mut Cursor<'_>) -> Result<Option<Event>, Stop> {
        if cursor.u8()? != mark::CONFIGURATION {
            return Err(ParseError::Configuration.into());
        }
        let length = cursor.be32()?;
        let length = u8::try_from(length).map_err(|_| ParseError::Configuration)?;
        self.machine_type = cursor.name(length)?.to_owned();
        self.state = State::Section;
        Ok(None)
    }

    fn section(&mut self, cursor: &mut Cursor<'_>) -> Result<Option<Event>, Stop> {
        let found = cursor.u8()?;
        match (found, self.ram_section) {
            (mark::COMMAND, ram) => command(cursor, ram.is_some(), &mut self.left_out),
            (mark::SECTION_START | mark::SECTION_FULL, ram) => {
                let id = cursor.be32()?;
                let length = cursor.u8()?;
                let name = cursor.name(length)?;
                if name != RAM || ram.is_some() || found == mark::SECTION_FULL {
                    return Err(ParseError::Section(name.to_owned()).into());
                }
                cursor.be32()?; // instance
                let version = cursor.be32()?;
                if version != RAM_VERSION {
                    return Err(ParseError::RamVersion(version).into());
                }
                self.ram_section = Some(id);
                self.state = State::SetupRecords;
                Ok(None)
            }
            (mark::SUBSECTION, None) => {
                let length = cursor.u8()?;
                Err(ParseError::ConfigurationPart(cursor.name(length)?.to_owned()).into())
            }
            (mark::SECTION_PART | mark::SECTION_END, Some(ram)) => {
                same_section(ram, cursor.be32()?)?;
                self.last_section = found == mark::SECTION_END;
                self.state = State::Records;
                Ok(Some(Event::SectionStart {
                    last: self.last_section,
                }))
            }
            (mark, ram) => {
                let place = match ram {
                    None => "before section `ram`",
                    Some(_) => "between sections of `ram`",
                };
                Err(ParseError::Mark { mark, place }.into())
            }
        }
    }

    fn setup_record(&mut self, cursor: &mut Cursor<'_>) -> Result<Option<Event>, Stop> {
        let word = cursor.be64()?;
        let (value, flags) = (word & !flag::ALL, word & flag::ALL);
        match flags {
            flag::MEM_SIZE if self.blocks.is_empty() && value > 0 => {
                self.state = State::Sizes { left: value };
            }
            flag::EOS if value == 0 && !self.blocks.is_empty() => self.state = State::Footer,
            _ => return Err(feature(flags).into()),
        }
        Ok(None)
    }

    fn size(&mut self, cursor: &mut Cursor<'_>, left: u64) -> Result<Option<Event>, Stop> {
        let length = cursor.u8()?;
        let name = cursor.name(length)?;
        let used_bytes = cursor.be64()?;
        if used_bytes == 0 || !used_bytes.is_multiple_of(PAGE_SIZE as u64) {
            return Err(ParseError::Blocks("a block's size is not in pages").into());
        }
        if self.blocks.iter().any(|block| block.name == name) {
            return Err(ParseError::Blocks("a block is listed twice").into());
        }
        if self.blocks.len() >= self.limits.blocks {
            return Err(too_much("RAM blocks", self.limits.blocks as u64).into());
        }
        if used_bytes > self.limits.block_bytes {
            return Err(too_much("bytes in a RAM block", self.limits.block_bytes).into());
        }
        let left = left
            .checked_sub(used_bytes)
            .ok_or(ParseError::Blocks("the sizes exceed their sum"))?;
        self.blocks.push(RamBlock {
            name: name.to_owned(),
            used_bytes,
        });
        self.kept.push(false);
        self.state = match left {
            0 => State::SetupRecords,
            left => State::Sizes { left },
        };
        Ok(None)
    }

    fn record(&mut self, cursor: &mut Cursor<'_>) -> Result<Option<Event>, Stop> {
        let word = cursor.be64()?;
        let (offset, flags) = (word & !flag::ALL, word & flag::ALL);
        let zero = match flags & !flag::CONTINUE {
            flag::EOS if word == flag::EOS => {
                self.state = State::Footer;
                return Ok(None);
            }
            flag::ZERO => true,
            flag::PAGE => false,
            _ => return Err(feature(flags).into()),
        };
        let block = if flags & flag::CONTINUE != 0 {
            self.recent_block.ok_or(ParseError::Record(flags))?
        } else {
            let length = cursor.u8()?;
            let name = cursor.name(length)?;
            let known = self.blocks.iter().position(|block| block.name == name);
            known.ok_or_else(|| ParseError::UnknownBlock(name.to_owned()))?
        };
        let fits = |block: &&RamBlock| offset < block.used_bytes;
        if self.blocks.get(block).filter(fits).is_none() {
            let block = self.blocks.get(block).map(|block| block.name.clone());
            let block = block.unwrap_or_default();
            return Err(ParseError::Page { block, offset }.into());
        }
        if zero && cursor.u8()? != 0 {
            return Err(ParseError::Record(flags).into());
        }
        let page = offset / PAGE_SIZE as u64;
        self.recent_block = Some(block);
        if zero {
            return Ok(Some(self.written(block, page, Content::Zero)));
        }
        let wanted = self.kept.get(block).copied().unwrap_or(false);
        self.state = State::Content {
            block,
            page,
            left: PAGE_SIZE,
            kept: wanted.then(|| Box::new([0; PAGE_SIZE])),
        };
        Ok(None)
    }

    fn written(&mut self, block: usize, page: u64, content: Content) -> Event {
        if self.pass == 0 || (block, page) <= self.position {
            self.pass += 1;
        }
        self.position = (block, page);
        Event::Page {
            block,
            page,
            content,
        }
    }

    fn content(&mut self, input: &mut &[u8]) -> Option<Event> {
        let State::Content {
            block,
            page,
            left,
            kept,
        } = &mut self.state
        else {
            return None;
        };
        let (head, rest) = input.split_at((*left).min(input.len()));
        if let Some(kept) = kept {
            let at = PAGE_SIZE - *left;
            kept.get_mut(at..at + head.len())?.copy_from_slice(head);
        }
        *left -= head.len();
        *input = rest;
        if *left > 0 {
            return None;
        }
        let content = kept.take().map_or(Content::Skipped, Content::Kept);
        let (block, page) = (*block, *page);
        self.state = State::Records;
        Some(self.written(block, page, content))
    }

    fn footer(&mut self, cursor: &mut Cursor<'_>) -> Result<Option<Event>, Stop> {
        let found = cursor.u8()?;
        if found != mark::SECTION_FOOTER {
            let place = "at the end of section `ram`";
            return Err(ParseError::Mark { mark: found, place }.into());
        }
        same_section(self.ram_section.unwrap_or_default(), cursor.be32()?)?;
        self.state = match self.last_section {
            true => State::Devices,
            false => State::Section,
        };
        Ok(Some(Event::SectionEnd))
    }

    fn device_state(&mut self, input: &mut &[u8]) -> Result<Option<Event>, ParseError> {
        let before = self.device_state.len();
        let limit = self.limits.device_state_bytes;
        let (head, rest) = input.split_at(limit.saturating_sub(before).min(input.len()));
        self.device_state.extend_from_slice(head);
        if let Some(length) = self.end.find(&self.device_state) {
            self.device_state.truncate(length);
            *input = input
                .get(length.saturating_sub(before)..)
                .unwrap_or_default();
            self.state = State::Complete;
            let bytes = std::mem::take(&mut self.device_state);
            return Ok(Some(Event::DeviceState(bytes)));
        }
        *input = rest;
        if !rest.is_empty() {
            return Err(too_much("bytes of device state", limit as u64));
        }
        Ok(None)
    }
}

fn command(
    cursor: &mut Cursor<'_>,
    after_prelude: bool,
    left_out: &mut bool,
) -> Result<Option<Event>, Stop> {
    let number = cursor.be16()?;
    let length = cursor.be16()?;
    match (number, length) {
        (command::OPEN_RETURN_PATH, 0) if !after_prelude => Ok(None),
        (command::PING, 4) => {
            let value = cursor.be32()?;
            Ok(after_prelude.then_some(Event::Ping(value)))
        }
        (command::SWITCHOVER_START, 0) if after_prelude => Ok(Some(Event::SwitchoverStart)),
        // A source that could end in post-copy announces it. It will not do so, so the announcement
        // is omitted for the destination.
        (command::POSTCOPY_ADVISE, 16) if !after_prelude => {
            // With larger pages QEMU would list their sizes as well.
            if cursor.be64()? != PAGE_SIZE as u64 || cursor.be64()? != PAGE_SIZE as u64 {
                return Err(ParseError::Feature("postcopy-ram with huge pages").into());
            }
            *left_out = true;
            Ok(None)
        }
        _ => Err(ParseError::Command(number).into()),
    }
}

fn same_section(expected: u32, found: u32) -> Result<(), ParseError> {
    if expected == found {
        return Ok(());
    }
    Err(ParseError::SectionId { expected, found })
}

fn too_much(what: &'static str, limit: u64) -> ParseError {
    ParseError::TooMuch { what, limit }
}

fn feature(flags: u64) -> ParseError {
    let features = [
        (flag::XBZRLE, "xbzrle"),
        (flag::HOOK, "rdma"),
        (flag::COMPRESS_PAGE, "compress"),
        (flag::MULTIFD_FLUSH, "multifd"),
    ];
    let used = features.iter().find(|(flag, _)| flags & flag != 0);
    used.map_or(ParseError::Record(flags), |(_, name)| {
        ParseError::Feature(name)
    })
}

/// A reason why a token was not read.
enum Stop {
    Incomplete,
    Error(ParseError),
}

impl From<ParseError> for Stop {
    fn from(error: ParseError) -> Self {
        Self::Error(error)
    }
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], Stop> {
        let end = self.at.saturating_add(length);
        let taken = self.bytes.get(self.at..end).ok_or(Stop::Incomplete)?;
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        self.take(N)?.try_into().map_err(|_| Stop::Incomplete)
    }

    fn u8(&mut self) -> Result<u8, Stop> {
        self.array().map(u8::from_be_bytes)
    }

    fn be16(&mut self) -> Result<u16, Stop> {
        self.array().map(u16::from_be_bytes)
    }

    fn be32(&mut self) -> Result<u32, Stop> {
        self.array().map(u32::from_be_bytes)
    }

    fn be64(&mut self) -> Result<u64, Stop> {
        self.array().map(u64::from_be_bytes)
    }

    fn name(&mut self, length: u8) -> Result<&'a str, Stop> {
        let name = self.take(usize::from(length))?;
        let plain = !name.is_empty() && name.iter().all(|byte| (0x20..0x7f).contains(byte));
        let name = std::str::from_utf8(name).ok().filter(|_| plain);
        name.ok_or(Stop::Error(ParseError::Name))
    }
}
