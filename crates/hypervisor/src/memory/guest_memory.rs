//! Accesses the RAM of a running QEMU: finds its blocks, proves their addresses, reads and writes
//! them.

use super::address_map::{
    ListedBlock, host_address, is_anonymous, is_writable, parse_ram_blocks, parse_words,
};
use super::backing::Backing;
use super::fingerprints::Fingerprints;
use super::places::{self, Place};
use super::unused::PageMap;
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::Pid;
use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// The maximum size of a block whose content may travel in QEMU's stream.
pub(crate) const KEPT_BLOCK_BYTES_MAX: u64 = 16 << 20;
/// The maximum total size of such blocks.
const KEPT_BYTES_MAX: u64 = 40 << 20;
/// The maximum number of pieces of guest RAM in one system call: more are not faster.
const PIECES_MAX: usize = 256;
/// The maximum length of such a piece, so that no call exceeds the system's limit.
const PIECE_BYTES_MAX: u64 = 4 << 20;
/// The minimum length of a piece for which the query whether it is used pays off.
const UNUSED_BYTES_MIN: usize = 64 << 10;
/// The number of blocks read at once when all RAM is read.
const LOOK_BLOCKS: u64 = 64;
/// Limit on the threads that compare the RAM of a stopped guest.
pub const COMPARERS_MAX: usize = 8;
/// Guest-physical addresses that hold the same RAM on every PC.
const LOW_PROBE: u64 = 1 << 20;
const HIGH_PROBE: u64 = 4 << 30;
/// The number of places compared before an address is accepted, and the tries for each: a running
/// guest may write between the two reads.
const SAMPLES: u64 = 16;
const SAMPLE_TRIES: u32 = 5;
/// The number of places that may differ: firmware can hide its own RAM (SMM) from other readers.
const SAMPLES_DIFFERENT_MAX: u64 = 3;

/// One of QEMU's RAM blocks.
#[derive(Debug, Clone)]
pub struct MemoryBlock {
    /// Its name, the same at both ends.
    pub name: String,
    /// Its size in use, in bytes.
    pub used_bytes: u64,
    /// Its address in QEMU's memory, if that is proven and of use.
    address: Option<u64>,
    /// The file through which it is read, where QEMU shares it.
    backing: Option<Backing>,
    /// Whether it is anonymous memory, without a file.
    anonymous: bool,
}

impl MemoryBlock {
    /// Returns whether its content travels through QEMU's streams instead of [`GuestMemory::read`]
    /// and [`GuestMemory::write`]. This applies to small blocks on every version of QEMU.
    pub fn is_kept(&self) -> bool {
        self.address.is_none()
    }

    /// Returns its length in blocks of 4 KiB.
    pub fn blocks(&self) -> u64 {
        self.used_bytes / BLOCK_SIZE as u64
    }
}

/// The RAM of one QEMU process.
#[derive(Debug, Clone)]
pub struct GuestMemory {
    pid: Pid,
    blocks: Vec<MemoryBlock>,
    page_map: Option<PageMap>,
    /// Hashes of the pages read, for a QEMU that does not see all writes.
    fingerprints: Arc<OnceLock<Fingerprints>>,
}

/// Why a guest's RAM cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// QEMU did not answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// QEMU's answer is not understood.
    #[error("QEMU's answer to `{command}` is not understood: {why}")]
    Answer {
        /// The command.
        command: &'static str,
        /// The error in it.
        why: String,
    },
    /// The process cannot be inspected.
    #[error("cannot look at QEMU's memory (process {pid}): {why}; the agent needs CAP_SYS_PTRACE")]
    Process {
        /// The process.
        pid: i32,
        /// The system's error.
        why: String,
    },
    /// The address of a block is not proven.
    #[error("RAM block `{block}` of QEMU cannot be read from outside: {why}")]
    NotProven {
        /// The block.
        block: String,
        /// The reason.
        why: String,
    },
    /// A block is too large for QEMU's stream.
    #[error(
        "RAM block `{block}` ({bytes} bytes) is too large to travel with the device state, and \
         this QEMU does not say where it lies"
    )]
    TooLarge {
        /// The block.
        block: String,
        /// Its size.
        bytes: u64,
    },
}

/// Why guest RAM was not read or written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// QEMU has ended.
    #[error("QEMU (process {0}) has ended")]
    Ended(i32),
    /// The range is outside the block.
    #[error("there is no such place in RAM block {block}: blocks {start} to {end}")]
    Bounds {
        /// Index of the block in [`GuestMemory::blocks`].
        block: usize,
        /// First block of 4 KiB.
        start: u64,
        /// First one after the range.
        end: u64,
    },
    /// The buffer does not fit the ranges.
    #[error("{ranges} bytes of RAM do not fit a buffer of {buffer} bytes")]
    Buffer {
        /// Bytes in the ranges.
        ranges: u64,
        /// Bytes in the buffer.
        buffer: u64,
    },
    /// A system call failed.
    #[error("cannot reach QEMU's memory (process {pid}): {errno}; the agent needs CAP_SYS_PTRACE")]
    System {
        /// The process.
        pid: i32,
        /// The error.
        errno: Errno,
    },
}

impl GuestMemory {
    /// Finds the RAM of the QEMU behind `qmp`, which is process `pid`, and proves its address.
    pub async fn attach(qmp: &Qmp, pid: i32) -> Result<Self, AttachError> {
        let table = qmp.hmp("info ramblock", COMMAND_TIMEOUT).await?;
        let listed = parse_ram_blocks(&table).map_err(|why| AttachError::Answer {
            command: "info ramblock",
            why,
        })?;
        let mut memory = Self {
            pid: Pid::from_raw(pid),
            blocks: Vec::with_capacity(listed.len()),
            page_map: PageMap::open(pid),
            fingerprints: Arc::default(),
        };
        let layout = Layout::find(qmp, &listed).await?;
        let maps = memory.maps()?;
        let hidden = listed.iter().enumerate().filter(|(index, block)| {
            let large = block.used_bytes > KEPT_BLOCK_BYTES_MAX;
            block.address.is_none() && large && *index != layout.main
        });
        let hidden = hidden.map(|(_, block)| block.name.as_str());
        let shown = places::show(qmp, hidden).await?;
        let mut kept_bytes = 0;
        let mut found = Vec::new();
        for (index, block) in listed.iter().enumerate() {
            let main = index == layout.main;
            let small = !main && block.used_bytes <= KEPT_BLOCK_BYTES_MAX;
            let mut address = block.address.or(main.then_some(layout.base));
            if address.is_none()
                && !small
                && let Some(place) = places::find(qmp, &listed, index).await?
            {
                address = Some(place.base);
                found.push((index, place));
            }
            let address = address.filter(|_| !small);
            let not_proven = |why: &str| AttachError::NotProven {
                block: block.name.clone(),
                why: why.to_owned(),
            };
            match address {
                Some(address) if !is_writable(&maps, address, block.used_bytes) => {
                    return Err(not_proven("there is no memory of that size at its address"));
                }
                Some(address) if main && address != layout.base => {
                    return Err(not_proven("QEMU names two addresses for it"));
                }
                Some(_) => {}
                None => kept_bytes += block.used_bytes,
            }
            if address.is_none() && (!small || kept_bytes > KEPT_BYTES_MAX) {
                return Err(AttachError::TooLarge {
                    block: block.name.clone(),
                    bytes: block.used_bytes,
                });
            }
            memory.blocks.push(MemoryBlock {
                name: block.name.clone(),
                used_bytes: block.used_bytes,
                backing: address
                    .and_then(|address| Backing::find(pid, &maps, address, block.used_bytes)),
                anonymous: address
                    .is_some_and(|address| is_anonymous(&maps, address, block.used_bytes)),
                address,
            });
        }
        let main = memory
            .blocks
            .get(layout.main)
            .map_or(0, MemoryBlock::blocks);
        let first = (LOW_PROBE / BLOCK_SIZE as u64).min(main.saturating_sub(1));
        let addresses = |page| layout.guest_address(page);
        memory
            .prove(qmp, layout.main, first..main, addresses)
            .await?;
        for (index, place) in found {
            let Place {
                guest, page, pages, ..
            } = place;
            let address = |at: u64| guest + at.saturating_sub(page) * BLOCK_SIZE as u64;
            memory
                .prove(qmp, index, page..page + pages, address)
                .await?;
        }
        places::hide(qmp, shown).await?;
        Ok(memory)
    }

    /// Returns the RAM blocks. Other functions refer to them by their index in this list.
    pub fn blocks(&self) -> &[MemoryBlock] {
        &self.blocks
    }

    /// Returns the index of the block of this name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.blocks.iter().position(|block| block.name == name)
    }

    /// Returns the process that has this RAM.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw()
    }

    /// Reads ranges of a block, one after the other, into `out`, which must have their total
    /// length.
    ///
    /// Used at a source for sending: the content read counts as the destination's.
    pub fn read(
        &self,
        block: usize,
        ranges: &[BlockRange],
        out: &mut [u8],
    ) -> Result<(), AccessError> {
        self.look(block, ranges, out)?;
        if let Some(fingerprints) = self.fingerprints.get() {
            fingerprints.remember(block, ranges, out);
        }
        Ok(())
    }

    /// Starts to record what is read; earlier records are dropped.
    pub(crate) fn remember_reads(&self) {
        let lengths = self.blocks.iter().map(|block| match block.is_kept() {
            true => 0,
            false => block.blocks(),
        });
        let none = || Fingerprints::new(lengths);
        self.fingerprints.get_or_init(none).clear();
    }

    /// Returns the pages that were read and have changed since, by block. Reads all of these, with
    /// as many threads as the host has processors for.
    pub(crate) fn changed_since_read(&self) -> Result<Vec<(usize, Vec<BlockRange>)>, AccessError> {
        let Some(fingerprints) = self.fingerprints.get() else {
            return Ok(Vec::new());
        };
        let direct = self.blocks.iter().enumerate();
        let direct = direct.filter(|(_, block)| !block.is_kept());
        let pieces = direct.flat_map(|(index, block)| {
            let starts = (0..block.blocks()).step_by(LOOK_BLOCKS as usize);
            starts.map(move |start| {
                let count = LOOK_BLOCKS.min(block.blocks() - start);
                (index, BlockRange::new(start, count))
            })
        });
        let pieces: Vec<_> = pieces
            .filter(|(index, range)| fingerprints.knows_any(*index, *range))
            .collect();
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let share = pieces.len().div_ceil(processors.min(COMPARERS_MAX)).max(1);
        let parts: Vec<Result<_, AccessError>> = std::thread::scope(|scope| {
            let shares = pieces.chunks(share);
            let compare = |pieces| move || self.compare(fingerprints, pieces);
            let threads: Vec<_> = shares.map(|share| scope.spawn(compare(share))).collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined
                .map(|part| part.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        });
        let mut changed = Vec::<(usize, Vec<BlockRange>)>::new();
        for (index, runs) in parts.into_iter().collect::<Result<Vec<_>, _>>()?.concat() {
            match changed.last_mut() {
                Some((last, all)) if *last == index => all.extend(runs),
                _ => changed.push((index, runs)),
            }
        }
        Ok(changed)
    }

    /// Returns which pages of these ranges have changed since they were read.
    fn compare(
        &self,
        fingerprints: &Fingerprints,
        pieces: &[(usize, BlockRange)],
    ) -> Result<Vec<(usize, Vec<BlockRange>)>, AccessError> {
        let mut content = vec![0; LOOK_BLOCKS as usize * BLOCK_SIZE];
        let mut changed = Vec::new();
        for (index, range) in pieces {
            let content = content
                .get_mut(..range.count as usize * BLOCK_SIZE)
                .unwrap_or_default();
            self.look(*index, &[*range], content)?;
            let runs = fingerprints.changed(*index, range.start, content);
            if !runs.is_empty() {
                changed.push((*index, runs));
            }
        }
        Ok(changed)
    }

    /// As [`Self::read`], without recording that the destination has the content.
    pub fn look(
        &self,
        block: usize,
        ranges: &[BlockRange],
        out: &mut [u8],
    ) -> Result<(), AccessError> {
        let pieces = self.pieces(block, ranges, out.len())?;
        if let Some(known) = self.blocks.get(block)
            && let Some(backing) = &known.backing
        {
            return self.look_through(backing, ranges, out);
        }
        let mut rest = out;
        let mut left = pieces.as_slice();
        while let Some(first) = left.first() {
            let unused = self.is_unused(block, first);
            let alike = |piece: &&RemoteIoVec| self.is_unused(block, piece) == unused;
            let others = left.iter().skip(1).take(PIECES_MAX - 1);
            let count = 1 + others.take_while(alike).count();
            let (batch, others) = left.split_at(count);
            left = others;
            let bytes = batch.iter().map(|piece| piece.len).sum();
            let (head, tail) = std::mem::take(&mut rest).split_at_mut(bytes);
            rest = tail;
            if unused {
                head.fill(0);
                continue;
            }
            self.transfer(batch, bytes, |done, batch| {
                let head = head.get_mut(done..).unwrap_or_default();
                process_vm_readv(self.pid, &mut [IoSliceMut::new(head)], batch)
            })?;
        }
        Ok(())
    }

    /// Returns the block and the page in it at an address of QEMU's.
    pub(super) fn place_of(&self, address: u64) -> Option<(usize, u64)> {
        let mut blocks = self.blocks.iter().enumerate();
        blocks.find_map(|(index, block)| {
            let offset = address.checked_sub(block.address?)?;
            let page = offset / BLOCK_SIZE as u64;
            (offset < block.used_bytes).then_some((index, page))
        })
    }

    /// Returns the parts of a block that are known to be zero because they were never used. Fewer
    /// where that is not known.
    pub fn unused(&self, block: usize) -> Vec<BlockRange> {
        let found = self.blocks.get(block).filter(|block| block.anonymous);
        let place = found.and_then(|found| Some((found.address?, found.blocks())));
        match (&self.page_map, place) {
            (Some(map), Some((address, blocks))) => map.unused(address, blocks),
            _ => Vec::new(),
        }
    }

    /// Returns whether a piece of a block is known to be zero because it was never used.
    fn is_unused(&self, block: usize, piece: &RemoteIoVec) -> bool {
        // A short piece is faster to read than to query.
        let long = piece.len >= UNUSED_BYTES_MIN;
        let anonymous = self.blocks.get(block).is_some_and(|block| block.anonymous);
        let map = self.page_map.as_ref().filter(|_| long && anonymous);
        map.is_some_and(|map| map.is_unused(piece.base as u64, piece.len as u64))
    }

    /// Reads ranges of a block, known to be inside it, through its file.
    fn look_through(
        &self,
        backing: &Backing,
        ranges: &[BlockRange],
        mut out: &mut [u8],
    ) -> Result<(), AccessError> {
        for range in ranges {
            let bytes = range.count as usize * BLOCK_SIZE;
            let (head, tail) = std::mem::take(&mut out).split_at_mut(bytes);
            out = tail;
            let read = backing.read(range.start * BLOCK_SIZE as u64, head);
            read.map_err(|errno| AccessError::System {
                pid: self.pid(),
                errno,
            })?;
        }
        // The file outlives QEMU; content read after QEMU's end belongs to no guest.
        match self.is_alive() {
            true => Ok(()),
            false => Err(AccessError::Ended(self.pid())),
        }
    }

    /// Writes `content` over ranges of a block, one after the other.
    ///
    /// Allowed only for a QEMU that has not begun to load device state, and whose guest does not
    /// run.
    pub fn write(
        &self,
        block: usize,
        ranges: &[BlockRange],
        content: &[u8],
    ) -> Result<(), AccessError> {
        let pieces = self.pieces(block, ranges, content.len())?;
        let mut rest = content;
        for batch in pieces.chunks(PIECES_MAX) {
            let bytes = batch.iter().map(|piece| piece.len).sum();
            let (head, tail) = rest.split_at(bytes);
            rest = tail;
            self.transfer(batch, bytes, |done, batch| {
                let head = head.get(done..).unwrap_or_default();
                process_vm_writev(self.pid, &[IoSlice::new(head)], batch)
            })?;
        }
        Ok(())
    }

    /// Returns the places of the ranges in QEMU's memory.
    fn pieces(
        &self,
        block: usize,
        ranges: &[BlockRange],
        buffer: usize,
    ) -> Result<Vec<RemoteIoVec>, AccessError> {
        let mut pieces = Vec::with_capacity(ranges.len());
        let mut bytes = 0_u64;
        for range in ranges {
            let out_of_bounds = AccessError::Bounds {
                block,
                start: range.start,
                end: range.end(),
            };
            let known = self.blocks.get(block);
            let known = known.filter(|known| range.end() <= known.blocks());
            let Some(base) = known.and_then(|known| known.address) else {
                return Err(out_of_bounds);
            };
            // In bounds, so neither sum nor product exceeds the block's own.
            let (mut at, end) = (
                base + range.start * BLOCK_SIZE as u64,
                base + range.end() * BLOCK_SIZE as u64,
            );
            bytes += end - at;
            while at < end {
                let len = (end - at).min(PIECE_BYTES_MAX);
                pieces.push(RemoteIoVec {
                    base: at as usize,
                    len: len as usize,
                });
                at += len;
            }
        }
        if bytes != buffer as u64 {
            return Err(AccessError::Buffer {
                ranges: bytes,
                buffer: buffer as u64,
            });
        }
        Ok(pieces)
    }

    /// Repeats a call until it has transferred everything.
    fn transfer(
        &self,
        batch: &[RemoteIoVec],
        bytes: usize,
        mut call: impl FnMut(usize, &[RemoteIoVec]) -> Result<usize, Errno>,
    ) -> Result<(), AccessError> {
        let mut done = 0;
        let mut left = batch.to_vec();
        while done < bytes {
            let moved = match call(done, &left) {
                Ok(0) | Err(Errno::ESRCH) => return Err(AccessError::Ended(self.pid())),
                // The memory of an ending process is released first.
                Err(Errno::EFAULT) if !self.is_alive() => {
                    return Err(AccessError::Ended(self.pid()));
                }
                Err(Errno::EINTR) => continue,
                Err(errno) => {
                    return Err(AccessError::System {
                        pid: self.pid(),
                        errno,
                    });
                }
                Ok(moved) => moved,
            };
            done += moved;
            skip(&mut left, moved);
        }
        Ok(())
    }

    fn is_alive(&self) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{}/statm", self.pid));
        // A process without memory is a zombie.
        status.is_ok_and(|status| !status.starts_with("0 "))
    }

    fn maps(&self) -> Result<String, AttachError> {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid));
        maps.map_err(|error| AttachError::Process {
            pid: self.pid(),
            why: error.to_string(),
        })
    }

    /// Compares places all over some pages of a block with QEMU's own reads of them.
    async fn prove(
        &self,
        qmp: &Qmp,
        index: usize,
        pages: Range<u64>,
        guest_address: impl Fn(u64) -> u64,
    ) -> Result<(), AttachError> {
        let Some(block) = self.blocks.get(index) else {
            return Ok(());
        };
        let (first, last) = (pages.start, pages.end.saturating_sub(1).max(pages.start));
        let mut different = 0;
        for sample in 0..SAMPLES {
            let page = first + (last - first) * sample / (SAMPLES - 1);
            let mut equal = false;
            for _ in 0..SAMPLE_TRIES {
                let line = format!("xp /8gx {:#x}", guest_address(page));
                let text = qmp.hmp(&line, COMMAND_TIMEOUT).await?;
                let mut content = vec![0; BLOCK_SIZE];
                self.look(index, &[BlockRange::new(page, 1)], &mut content)
                    .map_err(|error| AttachError::NotProven {
                        block: block.name.clone(),
                        why: error.to_string(),
                    })?;
                let (words, _) = content.as_chunks();
                let words = words.iter().take(8).copied().map(u64::from_le_bytes);
                equal = words.eq(parse_words(&text));
                if equal {
                    break;
                }
            }
            different += u64::from(!equal);
        }
        if different > SAMPLES_DIFFERENT_MAX {
            return Err(AttachError::NotProven {
                block: block.name.clone(),
                why: format!("{different} of {SAMPLES} places differ from what QEMU reads there"),
            });
        }
        Ok(())
    }
}

/// The place of the guest's main memory, in QEMU and in the guest.
struct Layout {
    /// Its index in the list of blocks.
    main: usize,
    /// Its address in QEMU's memory.
    base: u64,
    /// Its size below the hole under 4 GiB; the whole size when none is above.
    below_4g: u64,
}

impl Layout {
    async fn find(qmp: &Qmp, listed: &[ListedBlock]) -> Result<Self, AttachError> {
        let not_understood = |why: String| AttachError::Answer {
            command: "gpa2hva",
            why,
        };
        let low = host_address(qmp, LOW_PROBE).await?;
        let (name, low) =
            low.ok_or_else(|| not_understood("no RAM at 1 MiB: not a PC?".to_owned()))?;
        // The block of a memory backend has the path of its object, and QEMU's option names the end
        // of that.
        let is_main = |block: &ListedBlock| {
            block.name == name
                || block
                    .name
                    .strip_suffix(&name)
                    .is_some_and(|path| path.ends_with('/'))
        };
        let main = listed.iter().position(is_main);
        let main = main.ok_or_else(|| not_understood(format!("`{name}` is not in the list")))?;
        let used = listed.get(main).map_or(0, |block| block.used_bytes);
        let base = low - LOW_PROBE.min(low);
        let below_4g = match host_address(qmp, HIGH_PROBE).await? {
            Some((high_name, high)) if high_name == name => high
                .checked_sub(base)
                .filter(|offset| *offset < used && offset.is_multiple_of(BLOCK_SIZE as u64))
                .ok_or_else(|| not_understood("the RAM above 4 GiB is elsewhere".to_owned()))?,
            _ => used,
        };
        Ok(Self {
            main,
            base,
            below_4g,
        })
    }

    fn guest_address(&self, page: u64) -> u64 {
        let offset = page * BLOCK_SIZE as u64;
        match offset.checked_sub(self.below_4g) {
            Some(above) => HIGH_PROBE + above,
            None => offset,
        }
    }
}

/// Removes `bytes` from the front of the pieces.
fn skip(pieces: &mut Vec<RemoteIoVec>, mut bytes: usize) {
    let mut whole = 0;
    for piece in pieces.iter_mut() {
        if bytes < piece.len {
            piece.base += bytes;
            piece.len -= bytes;
            break;
        }
        bytes -= piece.len;
        whole += 1;
    }
    pieces.drain(..whole);
}

#[cfg(test)]
mod tests {
    use super::*;

    impl GuestMemory {
        /// Returns this process's own memory as a guest's RAM, and a kept block.
        pub(in crate::memory) fn of_own(name: &str, buffer: &[u8]) -> Self {
            let block = |name: &str, used_bytes, address| MemoryBlock {
                name: name.to_owned(),
                used_bytes,
                address,
                backing: None,
                anonymous: false,
            };
            let address = Some(buffer.as_ptr() as u64);
            Self {
                pid: Pid::this(),
                blocks: vec![
                    block(name, buffer.len() as u64, address),
                    block("pc.bios", 4096, None),
                ],
                page_map: PageMap::open(std::process::id() as i32),
                fingerprints: Arc::default(),
            }
        }
    }

    #[test]
    fn scattered_ranges_are_read_and_written() {
        let blocks = 3000_u64;
        let ram = vec![0_u8; blocks as usize * BLOCK_SIZE];
        let memory = GuestMemory::of_own("pc.ram", &ram);
        let odd: Vec<BlockRange> = (0..blocks / 2)
            .map(|i| BlockRange::new(2 * i + 1, 1))
            .collect();
        let content: Vec<u8> = (0..odd.len() * BLOCK_SIZE)
            .map(|i| (i / BLOCK_SIZE) as u8 | 1)
            .collect();
        memory.write(0, &odd, &content).unwrap();
        let mut all = vec![7; ram.len()];
        memory
            .read(0, &[BlockRange::new(0, blocks)], &mut all)
            .unwrap();
        for (index, block) in all.chunks(BLOCK_SIZE).enumerate() {
            let expected = if index % 2 == 0 {
                0
            } else {
                (index / 2) as u8 | 1
            };
            assert!(block.iter().all(|byte| *byte == expected), "block {index}");
        }
        drop(ram);
    }

    #[test]
    fn what_nobody_has_used_is_read_as_zeros_and_stays_unused() {
        const BLOCKS: u64 = 4000;
        let mut ram = vec![0_u8; BLOCKS as usize * BLOCK_SIZE];
        let mut memory = GuestMemory::of_own("pc.ram", &ram);
        memory.blocks[0].anonymous = true;
        ram[2000 * BLOCK_SIZE] = 7;
        let map = memory.page_map.clone().unwrap();
        let unused = |start: u64, count: u64| {
            let from = ram.as_ptr() as u64 + start * BLOCK_SIZE as u64;
            map.is_unused(from, count * BLOCK_SIZE as u64)
        };
        // One written page may allocate a huge page.
        assert!(unused(16, 512) && unused(3000, 512));
        let ranges = [(16, 300), (400, 100), (1000, 1), (1900, 300), (3000, 512)];
        let ranges = ranges.map(|(start, count)| BlockRange::new(start, count));
        let blocks: u64 = ranges.iter().map(|range| range.count).sum();
        let mut out = vec![9; blocks as usize * BLOCK_SIZE];
        memory.read(0, &ranges, &mut out).unwrap();
        let written = out.iter().position(|byte| *byte != 0).unwrap();
        assert_eq!(written, (300 + 100 + 1 + 100) * BLOCK_SIZE);
        assert_eq!(out.iter().filter(|byte| **byte != 0).count(), 1);
        assert!(unused(16, 300) && unused(400, 100) && unused(3000, 512));
        drop(ram);
    }

    #[test]
    fn what_is_not_there_is_refused() {
        let ram = vec![0_u8; 4 * BLOCK_SIZE];
        let memory = GuestMemory::of_own("pc.ram", &ram);
        let mut out = vec![0; BLOCK_SIZE];
        for (block, start, count) in [(0, 4, 1), (0, u64::MAX, 1), (1, 0, 1), (2, 0, 1)] {
            let error = memory.read(block, &[BlockRange::new(start, count)], &mut out);
            assert!(
                matches!(error, Err(AccessError::Bounds { .. })),
                "{error:?}"
            );
        }
        let error = memory.read(0, &[BlockRange::new(0, 2)], &mut out);
        assert!(matches!(error, Err(AccessError::Buffer { .. })));
    }

    #[test]
    fn a_dead_process_is_named() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id() as i32;
        child.wait().unwrap();
        let ram = vec![0_u8; BLOCK_SIZE];
        let mut memory = GuestMemory::of_own("pc.ram", &ram);
        memory.pid = Pid::from_raw(pid);
        let mut out = vec![0; BLOCK_SIZE];
        let error = memory.read(0, &[BlockRange::new(0, 1)], &mut out);
        assert_eq!(error, Err(AccessError::Ended(pid)));
    }
}
