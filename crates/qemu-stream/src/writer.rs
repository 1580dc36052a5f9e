//! Writes the parts of a stream for a destination QEMU.

use crate::format::{DISCARD_VERSION, DISCARDS_MAX, MAGIC, VERSION};
use crate::format::{PAGE_SIZE, Page, RAM, RAM_VERSION, command, flag, mark};
use crate::parser::{Prelude, RamBlock};
use longhaul_protocol::BlockRange;

/// Appends a stream's parts to a buffer.
///
/// A destination needs this order: the source's prelude unchanged (or [`Writer::prelude`]),
/// sections with pages, the last of them begun with `last`, then the source's device state
/// unchanged. Commands of post-copy go between sections.
#[derive(Debug)]
pub struct Writer {
    ram_section: u32,
    blocks: Vec<RamBlock>,
    recent_block: Option<usize>,
}

impl Writer {
    /// Creates a writer of pages for the RAM that `prelude` lists.
    pub fn new(prelude: &Prelude) -> Self {
        Self {
            ram_section: prelude.ram_section,
            blocks: prelude.blocks.clone(),
            recent_block: None,
        }
    }

    /// Begins a section with pages.
    pub fn section_start(&self, last: bool, out: &mut Vec<u8>) {
        out.push(match last {
            true => mark::SECTION_END,
            false => mark::SECTION_PART,
        });
        out.extend(self.ram_section.to_be_bytes());
    }

    /// Appends a page to a section; no content means zeros. Returns `false` when there is no such
    /// page.
    pub fn page(
        &mut self,
        block: usize,
        page: u64,
        content: Option<&Page>,
        out: &mut Vec<u8>,
    ) -> bool {
        let Some(ram) = self.blocks.get(block).filter(|ram| page < ram.pages()) else {
            return false;
        };
        let mut word = page * PAGE_SIZE as u64;
        word |= match content {
            Some(_) => flag::PAGE,
            None => flag::ZERO,
        };
        if self.recent_block == Some(block) {
            out.extend((word | flag::CONTINUE).to_be_bytes());
        } else {
            out.extend(word.to_be_bytes());
            name(&ram.name, out);
            self.recent_block = Some(block);
        }
        match content {
            Some(content) => out.extend(content),
            None => out.push(0),
        }
        true
    }

    /// Ends a section with pages.
    pub fn section_end(&self, out: &mut Vec<u8>) {
        out.extend(flag::EOS.to_be_bytes());
        out.push(mark::SECTION_FOOTER);
        out.extend(self.ram_section.to_be_bytes());
    }

    /// Announces the last section; 10.0 writes it, and both versions load without it.
    pub fn switchover_start(&self, out: &mut Vec<u8>) {
        command(command::SWITCHOVER_START, &[], out);
    }

    /// Requests a PONG from the destination.
    pub fn ping(&self, value: u32, out: &mut Vec<u8>) {
        command(command::PING, &value.to_be_bytes(), out);
    }

    /// Tells a destination that post-copy may follow, between [`Prelude::commands`] and the rest of
    /// the prelude. It empties all of its RAM. Both ends have pages of [`PAGE_SIZE`].
    pub fn postcopy_advise(out: &mut Vec<u8>) {
        let size = (PAGE_SIZE as u64).to_be_bytes();
        command(command::POSTCOPY_ADVISE, &[size, size].concat(), out);
    }

    /// Names pages of a block that the destination does not have, before
    /// [`Self::postcopy_package`]. Returns `false` when there are no such pages.
    pub fn postcopy_discard(&self, block: usize, pages: &[BlockRange], out: &mut Vec<u8>) -> bool {
        let Some(ram) = self.blocks.get(block) else {
            return false;
        };
        if pages
            .iter()
            .any(|range| range.count == 0 || range.end() > ram.pages())
        {
            return false;
        }
        for some in pages.chunks(DISCARDS_MAX) {
            let mut body = vec![DISCARD_VERSION];
            name(&ram.name, &mut body);
            body.push(0);
            for range in some {
                let bytes = |pages: u64| pages * PAGE_SIZE as u64;
                body.extend(bytes(range.start).to_be_bytes());
                body.extend(bytes(range.count).to_be_bytes());
            }
            command(command::POSTCOPY_RAM_DISCARD, &body, out);
        }
        true
    }

    /// Lets the destination load devices ([`device_sections`](crate::device_sections)) while pages
    /// are missing, serve faults of its guest, and run.
    pub fn postcopy_package(devices: &[u8], out: &mut Vec<u8>) {
        let mut package = Vec::new();
        command(command::POSTCOPY_LISTEN, &[], &mut package);
        package.extend(devices);
        command(command::POSTCOPY_RUN, &[], &mut package);
        command(
            command::PACKAGED,
            &(package.len() as u32).to_be_bytes(),
            out,
        );
        out.extend(package);
    }

    /// Asks a destination whose post-copy is paused which pages of a block it got. Returns `false`
    /// when there is no such block.
    pub fn received_bitmap(&self, block: usize, out: &mut Vec<u8>) -> bool {
        let Some(ram) = self.blocks.get(block) else {
            return false;
        };
        let mut body = Vec::new();
        name(&ram.name, &mut body);
        command(command::RECV_BITMAP, &body, out);
        true
    }

    /// Lets a destination whose post-copy is paused go on. It asks again for the pages that its
    /// guest waits for.
    pub fn postcopy_resume(out: &mut Vec<u8>) {
        command(command::POSTCOPY_RESUME, &[], out);
    }

    /// Ends the stream of a post-copy, behind the last section.
    pub fn end(out: &mut Vec<u8>) {
        out.push(mark::EOF);
    }

    /// Writes a prelude with a return path, as QEMU does.
    pub fn prelude(machine_type: &str, ram_section: u32, blocks: &[RamBlock]) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(MAGIC.to_be_bytes());
        out.extend(VERSION.to_be_bytes());
        out.push(mark::CONFIGURATION);
        out.extend((machine_type.len() as u32).to_be_bytes());
        out.extend(machine_type.as_bytes());
        command(command::OPEN_RETURN_PATH, &[], &mut out);
        command(command::PING, &1_u32.to_be_bytes(), &mut out);
        out.push(mark::SECTION_START);
        out.extend(ram_section.to_be_bytes());
        name(RAM, &mut out);
        out.extend(0_u32.to_be_bytes());
        out.extend(RAM_VERSION.to_be_bytes());
        let total: u64 = blocks.iter().map(|block| block.used_bytes).sum();
        out.extend((total | flag::MEM_SIZE).to_be_bytes());
        for block in blocks {
            name(&block.name, &mut out);
            out.extend(block.used_bytes.to_be_bytes());
        }
        out.extend(flag::EOS.to_be_bytes());
        out.push(mark::SECTION_FOOTER);
        out.extend(ram_section.to_be_bytes());
        out
    }
}

fn command(number: u16, body: &[u8], out: &mut Vec<u8>) {
    out.push(mark::COMMAND);
    out.extend(number.to_be_bytes());
    out.extend((body.len() as u16).to_be_bytes());
    out.extend(body);
}

/// Appends a name behind its length. The parser's blocks have names of at most 255 bytes.
fn name(name: &str, out: &mut Vec<u8>) {
    out.push(name.len() as u8);
    out.extend(name.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer() -> Writer {
        Writer {
            ram_section: 2,
            blocks: vec![RamBlock {
                name: "pc.ram".to_owned(),
                used_bytes: 100 * PAGE_SIZE as u64,
            }],
            recent_block: None,
        }
    }

    #[test]
    fn commands_of_post_copy_are_those_of_qemu() {
        let mut out = Vec::new();
        Writer::postcopy_advise(&mut out);
        let page = [0, 0, 0, 0, 0, 0, 0x10, 0];
        assert_eq!(out, [&[8, 0, 3, 0, 16][..], &page, &page].concat());

        out.clear();
        Writer::postcopy_package(b"devices", &mut out);
        let package = [&[8, 0, 4, 0, 0][..], b"devices", &[8, 0, 5, 0, 0]].concat();
        let head = [8, 0, 7, 0, 4, 0, 0, 0, 17];
        assert_eq!(out, [&head[..], &package].concat());

        out.clear();
        assert!(writer().received_bitmap(0, &mut out));
        Writer::postcopy_resume(&mut out);
        assert_eq!(out, b"\x08\0\x0a\0\x07\x06pc.ram\x08\0\x09\0\0");
        assert!(!writer().received_bitmap(1, &mut out));
    }

    #[test]
    fn discarded_pages_are_listed_by_twelve() {
        let pages: Vec<BlockRange> = (0..13).map(|at| BlockRange::new(at * 3, 2)).collect();
        let mut out = Vec::new();
        assert!(writer().postcopy_discard(0, &pages, &mut out));
        let head = |bytes: u8| [&[8, 0, 6, 0, bytes, 0, 6][..], b"pc.ram\0"].concat();
        let range = |at: u64| [(at * 3 * 4096).to_be_bytes(), 8192_u64.to_be_bytes()].concat();
        let first: Vec<u8> = (0..12).flat_map(range).collect();
        let expected = [head(9 + 12 * 16), first, head(9 + 16), range(12)].concat();
        assert_eq!(out, expected);
        for wrong in [(99, 2), (100, 1), (5, 0), (1, u64::MAX)] {
            let wrong = [BlockRange::new(wrong.0, wrong.1)];
            assert!(!writer().postcopy_discard(0, &wrong, &mut out), "{wrong:?}");
        }
        assert_eq!(out, expected);
    }
}
