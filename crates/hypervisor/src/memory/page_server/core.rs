//! What a page server does, without I/O: bytes of QEMU and of the agent go in, and bytes for them
//! come out.

use super::line::{Inbox, Known, Message, ToAgent, ToServer, not_understood, put_ranges, ranges};
use crate::memory::incoming::read_prelude;
use crate::memory::pages::{Needs, Page, Pages};
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use longhaul_qemu_stream::return_path::{self, ReturnPathError};
use longhaul_qemu_stream::{Prelude, Writer};
use std::io;
use std::ops::Range;

/// A page server without its sockets.
#[derive(Debug, Default)]
pub struct Core {
    inbox: Inbox,
    serving: Option<Serving>,
    /// Whether the agent has said everything that is needed to serve QEMU.
    serves: bool,
    /// What the agent gets next.
    pub to_agent: Vec<u8>,
}

/// Why QEMU cannot be served any more.
#[derive(Debug, thiserror::Error)]
pub enum QemuError {
    /// Its messages are malformed.
    #[error(transparent)]
    ReturnPath(#[from] ReturnPathError),
    /// It asks for a page that the guest does not have.
    #[error("QEMU asks for a page that the guest does not have")]
    NoPage,
}

/// The QEMU that is served.
#[derive(Debug)]
struct Serving {
    prelude: Prelude,
    pages: Pages,
    writer: Writer,
    back: return_path::Parser,
    /// The block of the newest request, which the next one may leave out.
    recent: Option<usize>,
    to_qemu: Vec<u8>,
    ended: bool,
}

impl Core {
    /// Greets an agent, which replaces the one before. What that one has not said whole is dropped.
    pub fn connected(&mut self) {
        self.inbox = Inbox::default();
        self.to_agent.clear();
        let Some(serving) = self.serving.as_ref().filter(|_| self.serves) else {
            self.serving = None;
            self.to_agent.extend(ToAgent::Empty.to_bytes());
            return;
        };
        let out = &mut self.to_agent;
        for missing in serving.pages.missing_pages() {
            let block = missing.block;
            put_ranges(
                &missing.pages,
                |ranges| ToAgent::Missing { block, ranges },
                out,
            );
        }
        out.extend(ToAgent::Serves.to_bytes());
        for block in 0..serving.pages.blocks() {
            for range in serving.pages.ranges(block, &[Page::Wanted]) {
                for page in range.blocks() {
                    want(block, page, out);
                }
            }
        }
    }

    /// Returns whether it serves a QEMU.
    pub fn serves(&self) -> bool {
        self.serves
    }

    /// Returns the number of missing pages.
    pub fn missing(&self) -> u64 {
        let serving = self.serving.as_ref();
        serving.map_or(0, |serving| serving.pages.missing())
    }

    /// Returns what QEMU gets next; `None` while it is not served.
    pub fn to_qemu(&mut self) -> Option<&mut Vec<u8>> {
        let serves = self.serves;
        let serving = self.serving.as_mut().filter(|_| serves);
        serving.map(|serving| &mut serving.to_qemu)
    }

    /// Takes bytes of the agent. After an error its connection has no use any more.
    pub fn from_agent(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut inbox = std::mem::take(&mut self.inbox);
        inbox.fill(bytes);
        while let Some((message, content)) = inbox.next()? {
            self.heard(message, content)?;
        }
        self.inbox = inbox;
        Ok(())
    }

    fn heard(&mut self, message: ToServer, content: &[u8]) -> io::Result<()> {
        match (message, &mut self.serving) {
            (ToServer::Begin { .. }, None) => self.serving = Some(Serving::new(content)?),
            (ToServer::Known { block, known, .. }, Some(serving)) if !self.serves => {
                let to = match known {
                    Known::Missing => Page::Missing,
                    Known::Given => Page::Given,
                };
                for range in ranges(content) {
                    if !serving.pages.set(block, range, to) {
                        return Err(not_understood());
                    }
                }
            }
            (ToServer::Serve { resume }, Some(serving)) if !self.serves => {
                if resume {
                    Writer::postcopy_resume(&mut serving.to_qemu);
                }
                self.serves = true;
                self.to_agent.extend(ToAgent::Serves.to_bytes());
            }
            (ToServer::Give { block, pages, .. }, Some(serving)) if self.serves => {
                let (content, _) = content.as_chunks::<BLOCK_SIZE>();
                let mut content = content.iter();
                let missing = |(page, _): &(u64, _)| serving.pages.give(block, *page);
                let pages = pages.blocks().map(|page| (page, content.next()));
                let new: Vec<_> = pages.filter(missing).collect();
                serving.queue(block, &new);
            }
            (ToServer::End, Some(serving)) if self.serves => serving.end(),
            _ => return Err(not_understood()),
        }
        Ok(())
    }

    /// Takes bytes of QEMU. After an error it cannot be served any more.
    pub fn from_qemu(&mut self, mut bytes: &[u8]) -> Result<(), QemuError> {
        let serves = self.serves;
        let Some(serving) = self.serving.as_mut().filter(|_| serves) else {
            return Ok(());
        };
        while let Some(message) = serving.back.next(&mut bytes)? {
            let return_path::Message::RequestPages {
                block,
                offset,
                length,
            } = message
            else {
                continue;
            };
            if let Some(name) = block {
                let mut blocks = serving.prelude.blocks.iter();
                serving.recent = blocks.position(|block| block.name == name);
            }
            let first = offset / BLOCK_SIZE as u64;
            let count = u64::from(length).div_ceil(BLOCK_SIZE as u64);
            let pages = first..first.saturating_add(count);
            serving.asked(pages, &mut self.to_agent)?;
        }
        Ok(())
    }
}

fn want(block: usize, page: u64, out: &mut Vec<u8>) {
    let pages = BlockRange::new(page, 1);
    out.extend(ToAgent::Want { block, pages }.to_bytes());
}

impl Serving {
    fn new(prelude: &[u8]) -> io::Result<Self> {
        let prelude = read_prelude(prelude).map_err(io::Error::other)?;
        Ok(Self {
            pages: Pages::new(&prelude),
            writer: Writer::new(&prelude),
            prelude,
            // Bitmaps are asked for before the server has the socket.
            back: return_path::Parser::new(0),
            recent: None,
            to_qemu: Vec::new(),
            ended: false,
        })
    }

    fn asked(&mut self, pages: Range<u64>, to_agent: &mut Vec<u8>) -> Result<(), QemuError> {
        let block = self.recent.ok_or(QemuError::NoPage)?;
        let mut zeros = Vec::new();
        for page in pages {
            match self.pages.ask(block, page).ok_or(QemuError::NoPage)? {
                Needs::Content => want(block, page, to_agent),
                Needs::Zeros => zeros.push((page, None)),
                Needs::Nothing => {}
            }
        }
        self.queue(block, &zeros);
        Ok(())
    }

    /// Appends a section with these pages to what QEMU gets. QEMU takes nothing behind its end.
    fn queue(&mut self, block: usize, pages: &[(u64, Option<&[u8; BLOCK_SIZE]>)]) {
        if pages.is_empty() || self.ended {
            return;
        }
        self.writer.section_start(false, &mut self.to_qemu);
        for (page, content) in pages {
            self.writer.page(block, *page, *content, &mut self.to_qemu);
        }
        self.writer.section_end(&mut self.to_qemu);
    }

    /// Ends the stream, if no page is missing.
    fn end(&mut self) {
        if self.pages.missing() > 0 || self.ended {
            return;
        }
        self.ended = true;
        self.writer.section_start(true, &mut self.to_qemu);
        self.writer.section_end(&mut self.to_qemu);
        Writer::end(&mut self.to_qemu);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::page_server::line::MESSAGE_BYTES;
    use longhaul_qemu_stream::{Content, Event, Limits, Parser, RamBlock};

    fn prelude() -> Vec<u8> {
        let block = |name: &str| RamBlock {
            name: name.to_owned(),
            used_bytes: 64 * BLOCK_SIZE as u64,
        };
        Writer::prelude("pc-q35-10.0", 2, &[block("pc.ram"), block("vga")])
    }

    fn say(core: &mut Core, message: ToServer, content: &[u8]) -> io::Result<()> {
        core.from_agent(&message.to_bytes())?;
        core.from_agent(content)
    }

    fn give(pages: BlockRange, zero: bool) -> ToServer {
        let block = 0;
        ToServer::Give { block, pages, zero }
    }

    /// Returns a server of a QEMU that lacks the first eight pages.
    fn serving() -> Core {
        let mut core = Core::default();
        core.connected();
        assert_eq!(core.to_agent, ToAgent::Empty.to_bytes());
        let prelude = prelude();
        let prelude_bytes = prelude.len();
        say(&mut core, ToServer::Begin { prelude_bytes }, &prelude).unwrap();
        let known = ToServer::Known {
            block: 0,
            ranges: 1,
            known: Known::Missing,
        };
        say(&mut core, known, &(8_u64 << 32).to_le_bytes()).unwrap();
        assert!(core.to_qemu().is_none());
        say(&mut core, ToServer::Serve { resume: false }, &[]).unwrap();
        assert!(core.serves());
        assert_eq!(core.to_agent[MESSAGE_BYTES..], ToAgent::Serves.to_bytes());
        core.to_agent.clear();
        core
    }

    fn ask(core: &mut Core, page: u64, count: u32) {
        let request = return_path::Message::RequestPages {
            block: Some("pc.ram".to_owned()),
            offset: page * BLOCK_SIZE as u64,
            length: count * BLOCK_SIZE as u32,
        };
        let mut bytes = Vec::new();
        request.write(&mut bytes);
        core.from_qemu(&bytes).unwrap();
    }

    /// Returns the pages that QEMU has got so far.
    fn got(stream: &mut Parser, core: &mut Core) -> Vec<(u64, bool)> {
        let out = std::mem::take(core.to_qemu().unwrap());
        let mut input = out.as_slice();
        let mut pages = Vec::new();
        while let Some(event) = stream.next(&mut input).unwrap() {
            if let Event::Page { page, content, .. } = event {
                pages.push((page, content == Content::Zero));
            }
        }
        pages
    }

    fn stream() -> Parser {
        let mut stream = Parser::new(Limits::default());
        let prelude = prelude();
        stream.next(&mut prelude.as_slice()).unwrap();
        stream
    }

    #[test]
    fn what_an_agent_has_not_said_whole_is_dropped_with_it() {
        let (mut core, mut stream) = (serving(), stream());
        ask(&mut core, 5, 1);
        assert_eq!(core.to_agent.len(), MESSAGE_BYTES);
        let content = [7; 2 * BLOCK_SIZE];
        let pages = BlockRange::new(1, 2);
        say(&mut core, give(pages, false), &content[..5000]).unwrap();
        assert!(got(&mut stream, &mut core).is_empty());
        // The next agent is told all: what is missing, and what the guest waits for.
        core.connected();
        let mut expected = Vec::new();
        let ranges = [BlockRange::new(0, 8)];
        put_ranges(
            &ranges,
            |ranges| ToAgent::Missing { block: 0, ranges },
            &mut expected,
        );
        expected.extend(ToAgent::Serves.to_bytes());
        want(0, 5, &mut expected);
        assert_eq!(core.to_agent, expected);
        say(&mut core, give(pages, false), &content).unwrap();
        say(&mut core, give(BlockRange::new(0, 8), true), &[]).unwrap();
        let all = got(&mut stream, &mut core);
        let order = [1, 2, 0, 3, 4, 5, 6, 7].map(|page| (page, !(1..3).contains(&page)));
        assert_eq!(all, order);
        assert_eq!(core.missing(), 0);
    }

    #[test]
    fn a_page_that_is_not_missing_is_zero_and_the_stream_ends_once() {
        let (mut core, mut stream) = (serving(), stream());
        ask(&mut core, 7, 3);
        ask(&mut core, 8, 1);
        assert_eq!(got(&mut stream, &mut core), [(8, true), (9, true)]);
        core.from_agent(&ToServer::End.to_bytes()).unwrap();
        assert!(core.to_qemu().unwrap().is_empty(), "pages are missing");
        say(&mut core, give(BlockRange::new(0, 8), true), &[]).unwrap();
        core.to_qemu().unwrap().clear();
        core.from_agent(&ToServer::End.to_bytes()).unwrap();
        let end = std::mem::take(core.to_qemu().unwrap());
        assert!(!end.is_empty());
        // An agent that was killed here is followed by one that says it again.
        core.connected();
        core.from_agent(&ToServer::End.to_bytes()).unwrap();
        ask(&mut core, 20, 1);
        assert!(core.to_qemu().unwrap().is_empty());
    }

    #[test]
    fn nonsense_is_refused() {
        let mut core = Core::default();
        core.connected();
        for early in [ToServer::Serve { resume: false }, ToServer::End] {
            core.from_agent(&early.to_bytes()).unwrap_err();
            core.connected();
        }
        let mut core = serving();
        core.from_agent(&ToServer::Serve { resume: true }.to_bytes())
            .unwrap_err();
        let mut bytes = Vec::new();
        let request = return_path::Message::RequestPages {
            block: Some("vga".to_owned()),
            offset: 64 * BLOCK_SIZE as u64,
            length: 1,
        };
        request.write(&mut bytes);
        let refused = core.from_qemu(&bytes);
        assert!(matches!(refused, Err(QemuError::NoPage)), "{refused:?}");
    }
}
