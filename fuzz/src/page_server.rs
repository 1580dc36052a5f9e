//! Fuzzes a page server: what agents and QEMU say to it, whole or torn, in any order. The first
//! byte says whether the first agent hands a QEMU over as it should.

use longhaul_hypervisor::memory::page_server::core::Core;
use longhaul_hypervisor::memory::page_server::line::{
    Known, MESSAGE_BYTES, Message, ToAgent, ToServer,
};
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use longhaul_qemu_stream::return_path::Message as Request;
use longhaul_qemu_stream::{Event, Limits, Parser, RamBlock, Writer};
use std::collections::BTreeSet;

const NAMES: [&str; 2] = ["pc.ram", "vga"];
const PAGES: u64 = 64;

struct Fuzzed {
    core: Core,
    stream: Parser,
    given: BTreeSet<(usize, u64)>,
    told: Vec<u8>,
    /// Whether the stream begins with a command that its parser does not know.
    resumed: bool,
    /// Whether an agent may have said anything.
    raw: bool,
}

/// Carries out the input: QEMU must get each page once at most, and an agent whole messages.
pub(crate) fn run(data: &[u8]) {
    let Some((first, mut rest)) = data.split_first() else {
        return;
    };
    let blocks = NAMES.map(|name| RamBlock {
        name: name.to_owned(),
        used_bytes: PAGES * BLOCK_SIZE as u64,
    });
    let prelude = Writer::prelude("pc-q35-10.0", 2, &blocks);
    let mut stream = Parser::new(Limits::default());
    let begun = stream.next(&mut prelude.as_slice());
    assert!(matches!(begun, Ok(Some(Event::Prelude(_)))), "our own");
    let mut fuzzed = Fuzzed {
        core: Core::default(),
        stream,
        given: BTreeSet::new(),
        told: Vec::new(),
        resumed: first & 2 != 0,
        raw: false,
    };
    fuzzed.core.connected();
    if first & 1 == 0 {
        let prelude_bytes = prelude.len();
        fuzzed.say(ToServer::Begin { prelude_bytes }, &prelude);
    }
    let mut take = |count: usize| {
        let (now, later) = rest.split_at(count.min(rest.len()));
        rest = later;
        now
    };
    while let &[how, block, start, count] = take(4) {
        let (of, start, count) = (usize::from(block) % 3, u64::from(start), u64::from(count));
        let pages = BlockRange::new(start % (PAGES + 1), count % (PAGES + 1));
        match how % 8 {
            0 => {
                fuzzed.raw = true;
                fuzzed.agent(take(count as usize));
            }
            1 if !fuzzed.qemu(take(count as usize)) => return,
            2 => {
                let known = if how & 8 == 0 {
                    Known::Missing
                } else {
                    Known::Given
                };
                let content = (pages.count << 32 | pages.start).to_le_bytes();
                let known = ToServer::Known {
                    block: of,
                    ranges: 1,
                    known,
                };
                fuzzed.say(known, &content);
            }
            3 => {
                let resume = fuzzed.resumed;
                fuzzed.say(ToServer::Serve { resume }, &[]);
            }
            4 => {
                let zero = how & 8 == 0;
                let give = ToServer::Give {
                    block: of,
                    pages,
                    zero,
                };
                fuzzed.say(give, &[how; PAGES as usize * BLOCK_SIZE]);
            }
            5 => fuzzed.say(ToServer::End, &[]),
            6 => {
                let request = Request::RequestPages {
                    block: NAMES.get(of).map(|name| (*name).to_owned()),
                    offset: pages.start * BLOCK_SIZE as u64,
                    length: (pages.count as usize * BLOCK_SIZE) as u32,
                };
                let mut bytes = Vec::new();
                request.write(&mut bytes);
                if !fuzzed.qemu(&bytes) {
                    return;
                }
            }
            _ => {
                fuzzed.core.connected();
                fuzzed.told.clear();
            }
        }
        fuzzed.check();
    }
}

impl Fuzzed {
    fn say(&mut self, message: ToServer, content: &[u8]) {
        let mut bytes = message.to_bytes().to_vec();
        // A message of no pages has no content either, and is refused.
        let length = ToServer::from_bytes(&message.to_bytes()).map_or(0, ToServer::content_bytes);
        bytes.extend(content.get(..length).unwrap_or_default());
        self.agent(&bytes);
    }

    fn agent(&mut self, bytes: &[u8]) {
        if self.core.from_agent(bytes).is_err() {
            self.core.connected();
            self.told.clear();
        }
    }

    /// Returns whether QEMU is served on.
    fn qemu(&mut self, bytes: &[u8]) -> bool {
        self.core.from_qemu(bytes).is_ok()
    }

    fn check(&mut self) {
        self.told.append(&mut self.core.to_agent);
        let mut rest = self.told.as_slice();
        while let Some((head, content)) = rest.split_first_chunk::<MESSAGE_BYTES>() {
            let message = ToAgent::from_bytes(head).expect("a message");
            rest = content.get(message.content_bytes()..).expect("its content");
        }
        assert!(rest.is_empty(), "a message is torn");
        let Some(out) = self.core.to_qemu() else {
            return;
        };
        let out = std::mem::take(out);
        let mut input = out.as_slice();
        while !self.resumed {
            let event = match self.stream.next(&mut input) {
                Ok(Some(event)) => event,
                Ok(None) => return,
                // It was told to resume.
                Err(_) if self.raw => return self.resumed = true,
                Err(error) => panic!("not a stream: {error}"),
            };
            if let Event::Page { block, page, .. } = event {
                assert!(self.given.insert((block, page)), "a page is given twice");
            }
        }
    }
}
