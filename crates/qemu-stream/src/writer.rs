//! Writes the parts of a stream for a destination QEMU.

use crate::format::{MAGIC, VERSION};
use crate::format::{PAGE_SIZE, Page, RAM, RAM_VERSION, command, flag, mark};
use crate::parser::{Prelude, RamBlock};

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
