//! Finds the missing pages that the virtual CPUs of a stopped x86 guest use next, without knowing
//! its operating system: those that their registers point to, and those that are pointed to from
//! there.
//!
//! A guest that goes on without some of its memory uses these first: page tables, stacks, the data
//! of the running process and of each processor. It would wait for them one after the other, since
//! each page leads to the next one. Only missing pages are searched for more: after a pass over all
//! memory these are what the guest has written lately, and so what it works with. The result is a
//! hint: what is overlooked is asked for when it is needed, and what is found for nothing travels a
//! little earlier than its neighbours.
//!
//! Registers are read from QEMU's device state, where the section `cpu` of x86 machines has had the
//! same fields in the same places since its version 12 (QEMU 0.12).

use super::GuestMemory;
use super::named::Layout;
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// The name of a CPU's section, after its length.
const NAME: &[u8] = b"\x03cpu";
/// The instance and the version, which follow the name.
const HEAD_BYTES: usize = 8;
const VERSION: u32 = 12;
/// Places of registers in the section.
const STACK_POINTER: usize = 4 * 8;
const REGISTERS: usize = 17;
const SEGMENTS: usize = 236;
const SEGMENT_BYTES: usize = 20;
/// The base follows the selector.
const BASE: usize = 4;
const FS: usize = SEGMENTS + 4 * SEGMENT_BYTES + BASE;
const GS: usize = SEGMENTS + 5 * SEGMENT_BYTES + BASE;
const TASK: usize = 376 + BASE;
const GLOBAL_TABLE: usize = 396 + BASE;
const INTERRUPT_TABLE: usize = 416 + BASE;
const CR0: usize = 456;
const CR3: usize = 472;
const CR4: usize = 480;
const EFER: usize = 816;
const LSTAR: usize = 832;
const KERNEL_GS: usize = 856;
const SECTION_BYTES: usize = 864;

/// Bits of control registers: paging, five levels of tables, and long mode.
const CR0_PG: u64 = 1 << 31;
const CR4_LA57: u64 = 1 << 12;
const EFER_LMA: u64 = 1 << 10;
/// Bits of an entry of a page table.
const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// The lowest address of a kernel, and of a process.
const KERNEL: u64 = 0xffff_8000_0000_0000;
const PROCESS: u64 = 1 << 16;

/// The length of the end of a stream that is searched: ROMs and the like come first.
const STATE_BYTES_MAX: usize = 4 << 20;
/// CPUs that are looked at.
const CPUS_MAX: usize = 256;
/// What a processor's own data takes, from the base of its segment GS on.
const OF_CPU_BYTES: u64 = 256 << 10;
/// A kernel's stack is aligned to its length, which is at least this.
const STACK_BYTES: u64 = 16 << 10;
/// A page of a process that points to more pages is a table of its data, of which it may have much.
const POINTERS_MAX: usize = 64;
/// Limits on the pages that are found, and on the time.
const PAGES_MAX: usize = 4096;
const WITHIN: Duration = Duration::from_millis(25);
const PAGE: u64 = BLOCK_SIZE as u64;

type Page = [u8; BLOCK_SIZE];

impl Layout {
    /// Returns the missing pages that the guest's CPUs probably use next, the first ones first.
    /// `state` is the device state with which the guest was stopped.
    pub fn used_next(
        &self,
        memory: &GuestMemory,
        state: &[u8],
        is_missing: impl Fn(u64) -> bool,
    ) -> Vec<u64> {
        let block = self.block();
        let read = |page: u64, into: &mut Page| {
            let range = [BlockRange::new(page, 1)];
            memory.look(block, &range, into).is_ok()
        };
        let until = Instant::now() + WITHIN;
        let is_over = || Instant::now() > until;
        let mut search = Search::new(self, read, is_missing, is_over);
        let state = &state[state.len().saturating_sub(STATE_BYTES_MAX)..];
        search.run(&cpus(state));
        search.found
    }
}

/// The registers of a CPU that say where its data is.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Cpu {
    tables: Tables,
    /// Addresses that it uses next, the stack pointer first.
    addresses: Vec<u64>,
    /// Where the data of this processor begins: the bases of GS, of the kernel and of a process.
    own: [u64; 2],
}

/// The page tables of a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Tables {
    root: u64,
    levels: u32,
}

/// Returns the CPUs in long mode of a device state.
fn cpus(state: &[u8]) -> Vec<Cpu> {
    let mut found = Vec::new();
    let mut rest = state;
    while let Some(at) = rest.windows(NAME.len()).position(|bytes| bytes == NAME) {
        rest = &rest[at + NAME.len()..];
        found.extend(cpu(rest));
        if found.len() == CPUS_MAX {
            break;
        }
    }
    found
}

/// Reads a CPU's section behind its name.
fn cpu(bytes: &[u8]) -> Option<Cpu> {
    let version = bytes.get(4..HEAD_BYTES)?;
    let section = bytes.get(HEAD_BYTES..HEAD_BYTES + SECTION_BYTES)?;
    if version != VERSION.to_be_bytes() {
        return None;
    }
    let register = |at: usize| {
        let bytes = section.get(at..at + 8)?.try_into().ok()?;
        Some(u64::from_be_bytes(bytes))
    };
    let is_long = register(CR0)? & CR0_PG != 0 && register(EFER)? & EFER_LMA != 0;
    if !is_long {
        return None;
    }
    let levels = match register(CR4)? & CR4_LA57 {
        0 => 4,
        _ => 5,
    };
    let mut addresses = vec![register(STACK_POINTER)?];
    // The instruction pointer stands behind the others.
    let general = (0..REGISTERS).rev().map(|number| register(number * 8));
    let special = [TASK, INTERRUPT_TABLE, GLOBAL_TABLE, LSTAR, FS].map(register);
    addresses.extend(general.chain(special).flatten());
    Some(Cpu {
        tables: Tables {
            root: register(CR3)? & ADDRESS,
            levels,
        },
        addresses,
        own: [register(GS)?, register(KERNEL_GS)?],
    })
}

/// Returns the distances from a pointer in a kernel's page at which there may be more of the same:
/// a process continues below its stack pointer; a kernel knows the ends of its stacks.
fn beside(pointer: u64) -> &'static [i64] {
    const BYTES: i64 = PAGE as i64;
    match pointer {
        pointer if pointer < KERNEL => &[-BYTES],
        pointer if pointer.is_multiple_of(PAGE) => &[-BYTES, BYTES, 2 * BYTES, 3 * BYTES],
        _ => &[],
    }
}

/// Follows pointers through a guest's RAM, the nearest first.
struct Search<'a, R, M, E> {
    layout: &'a Layout,
    read: R,
    is_missing: M,
    is_over: E,
    /// Pages that were read; `None` for those that cannot be.
    pages: HashMap<u64, Option<Box<Page>>>,
    /// Missing pages, in the order in which they were found.
    found: Vec<u64>,
    /// The same, with the offset from which each is searched.
    searched_from: HashMap<u64, usize>,
    queue: VecDeque<Part>,
}

/// A part of a page that has yet to be searched for pointers.
#[derive(Debug, Clone, Copy)]
struct Part {
    tables: Tables,
    page: u64,
    /// Where it begins: what lies before belongs to something else, or is free (a stack).
    from: usize,
    to: usize,
    of_kernel: bool,
}

impl<'a, R, M, E> Search<'a, R, M, E>
where
    R: FnMut(u64, &mut Page) -> bool,
    M: Fn(u64) -> bool,
    E: FnMut() -> bool,
{
    fn new(layout: &'a Layout, read: R, is_missing: M, is_over: E) -> Self {
        Self {
            layout,
            read,
            is_missing,
            is_over,
            pages: HashMap::new(),
            found: Vec::new(),
            searched_from: HashMap::new(),
            queue: VecDeque::new(),
        }
    }

    fn run(&mut self, cpus: &[Cpu]) {
        for cpu in cpus {
            for address in &cpu.addresses {
                self.point(cpu.tables, *address);
            }
            let Some(stack) = cpu.addresses.first().copied() else {
                continue;
            };
            // What will be called, and what has called the running code.
            self.point(cpu.tables, stack.wrapping_sub(PAGE));
            if stack >= KERNEL {
                let end = (stack | (STACK_BYTES - 1)).saturating_add(1);
                self.span(cpu.tables, stack, end);
            }
        }
        for cpu in cpus {
            for own in cpu.own.iter().filter(|own| **own >= KERNEL) {
                self.span(cpu.tables, *own, own.saturating_add(OF_CPU_BYTES));
            }
        }
        while let Some(part) = self.queue.pop_front() {
            if self.found.len() >= PAGES_MAX || (self.is_over)() {
                break;
            }
            self.search(part);
        }
    }

    /// Finds the pages of a range of addresses after its first one.
    fn span(&mut self, tables: Tables, from: u64, to: u64) {
        self.point(tables, from);
        let mut address = (from | (PAGE - 1)).saturating_add(1);
        while address < to {
            self.point(tables, address);
            address = address.saturating_add(PAGE);
        }
    }

    /// Finds the page at a virtual address, and searches it later if it is missing.
    fn point(&mut self, tables: Tables, address: u64) {
        let Some(page) = self.translate(tables, address) else {
            return;
        };
        self.find(page);
        let Some(searched_from) = self.searched_from.get_mut(&page) else {
            return;
        };
        let from = (address % PAGE) as usize & !7;
        if from < *searched_from {
            self.queue.push_back(Part {
                tables,
                page,
                from,
                to: std::mem::replace(searched_from, from),
                of_kernel: address >= KERNEL,
            });
        }
    }

    /// Searches a part of a page for pointers. A kernel has those of its processes, too.
    fn search(&mut self, part: Part) {
        let Some(content) = self.content(part.page) else {
            return;
        };
        let words = content.get(part.from..part.to).unwrap_or_default();
        let words = words.chunks_exact(8);
        let words = words.filter_map(|word| Some(u64::from_le_bytes(word.try_into().ok()?)));
        let mut pointers: Vec<u64> = match part.of_kernel {
            true => words.filter(|word| *word >= PROCESS).collect(),
            false => words
                .filter(|word| (PROCESS..KERNEL).contains(word))
                .collect(),
        };
        // Empty lists point to themselves.
        pointers.dedup_by_key(|pointer| *pointer / PAGE);
        if !part.of_kernel {
            pointers.retain(|pointer| self.translate(part.tables, *pointer).is_some());
            if pointers.len() > POINTERS_MAX {
                return;
            }
        }
        for pointer in pointers {
            self.point(part.tables, pointer);
            let beside = match part.of_kernel {
                true => beside(pointer),
                false => &[],
            };
            for distance in beside {
                let address = pointer.wrapping_add_signed(*distance);
                self.point(part.tables, address);
            }
        }
    }

    /// Returns the page of RAM at a virtual address. The tables on the way are used, too.
    fn translate(&mut self, tables: Tables, address: u64) -> Option<u64> {
        let sign = 64 - (12 + 9 * tables.levels);
        if ((address << sign) as i64 >> sign) as u64 != address {
            return None;
        }
        let mut table = tables.root;
        for level in (0..tables.levels).rev() {
            let page = self.layout.page_of(table)?;
            self.find(page);
            let shift = 12 + 9 * level;
            let index = (address >> shift & 0x1ff) as usize * 8;
            let entry = self.content(page)?.get(index..index + 8)?;
            let entry = u64::from_le_bytes(entry.try_into().ok()?);
            if entry & PRESENT == 0 {
                return None;
            }
            if level == 0 || (entry & LARGE != 0 && level < 3) {
                let within = (1 << shift) - 1;
                let physical = (entry & ADDRESS & !within) | (address & within);
                return self.layout.page_of(physical);
            }
            table = entry & ADDRESS;
        }
        None
    }

    /// Adds a page to those that were found, if it is missing and new.
    fn find(&mut self, page: u64) {
        let has_room = self.found.len() < PAGES_MAX;
        if has_room && (self.is_missing)(page) && !self.searched_from.contains_key(&page) {
            self.searched_from.insert(page, BLOCK_SIZE);
            self.found.push(page);
        }
    }

    fn content(&mut self, page: u64) -> Option<&Page> {
        let read = &mut self.read;
        let content = self.pages.entry(page).or_insert_with(|| {
            let mut content = Box::new([0; BLOCK_SIZE]);
            read(page, &mut content).then_some(content)
        });
        content.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLES: u64 = 0x10_0000;
    const STACK: u64 = 0xffff_c900_0000_3d98;
    const OWN: u64 = 0xffff_8880_07a0_0000;
    const CODE: u64 = 0xffff_ffff_8100_3643;

    /// A guest's RAM of 4 MiB, from address 0 on.
    struct Ram(Vec<u8>);

    impl Ram {
        fn new() -> Self {
            Self(vec![0; 4 << 20])
        }

        fn set(&mut self, at: u64, value: u64) {
            let at = at as usize;
            self.0[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }

        /// Maps a page, with tables that are taken from `free` on.
        fn map(&mut self, address: u64, physical: u64, free: &mut u64) {
            let mut table = TABLES;
            for level in (1..4).rev() {
                let at = table + (address >> (12 + 9 * level) & 0x1ff) * 8;
                let entry: [u8; 8] = self.0[at as usize..at as usize + 8].try_into().unwrap();
                let mut entry = u64::from_le_bytes(entry);
                if entry == 0 {
                    entry = *free | 0x63;
                    *free += PAGE;
                    self.set(at, entry);
                }
                table = entry & ADDRESS;
            }
            self.set(table + (address >> 12 & 0x1ff) * 8, physical | 0x163);
        }
    }

    /// A device state with one CPU's section.
    fn state(registers: &[(usize, u64)]) -> Vec<u8> {
        let mut section = vec![0; SECTION_BYTES];
        for (at, value) in registers {
            section[*at..at + 8].copy_from_slice(&value.to_be_bytes());
        }
        let mut state = b"\x04\0\0\0\x07\x03cpux".to_vec();
        state.extend(b"\x04\0\0\0\x08\x03cpu\0\0\0\0\0\0\0\x0c");
        state.extend(section);
        state.extend(b"\x7e\0\0\0\x08");
        state
    }

    fn running(more: &[(usize, u64)]) -> Vec<u8> {
        let paging = [
            (CR0, 0x8005_0033),
            (CR3, TABLES | 0x18),
            (CR4, 0x6b0),
            (EFER, 0xd01),
        ];
        state(&[&paging, more].concat())
    }

    fn found(ram: &Ram, state: &[u8]) -> Vec<u64> {
        missing(ram, state, |_| true)
    }

    fn missing(ram: &Ram, state: &[u8], is_missing: impl Fn(u64) -> bool) -> Vec<u64> {
        let layout = Layout::of_one_block(ram.0.len() as u64);
        let read = |page: u64, into: &mut Page| {
            let at = page as usize * BLOCK_SIZE;
            let content = ram.0.get(at..at + BLOCK_SIZE);
            content
                .map(|content| into.copy_from_slice(content))
                .is_some()
        };
        let mut search = Search::new(&layout, read, is_missing, || false);
        search.run(&cpus(state));
        search.found
    }

    #[test]
    fn what_registers_point_to_comes_first_then_what_that_points_to() {
        let (mut ram, mut free) = (Ram::new(), TABLES + PAGE);
        for (address, physical) in [
            (STACK, 0x20_0000),
            (STACK + PAGE, 0x20_5000),
            (CODE, 0x20_1000),
            (OWN, 0x20_2000),
            (OWN + PAGE, 0x20_3000),
            (OWN + 0x10_0000, 0x20_4000),
        ] {
            ram.map(address & !0xfff, physical, &mut free);
        }
        // The processor's data points to a page, and below the stack pointer is nothing of use.
        ram.set(0x20_3008, OWN + 0x10_0010);
        ram.set(0x20_0008, OWN + 0x10_0010);
        let state = running(&[(STACK_POINTER, STACK), (16 * 8, CODE), (GS, OWN)]);
        let mut pages = found(&ram, &state);
        let tables = TABLES / PAGE..free / PAGE;
        assert_eq!(pages[0], TABLES / PAGE);
        assert!(
            tables.clone().all(|table| pages.contains(&table)),
            "{pages:x?}"
        );
        pages.retain(|page| !tables.contains(page));
        assert_eq!(pages, [0x200, 0x201, 0x202, 0x203, 0x204]);
        // A process that runs has its own data at the kernel's base.
        let state = running(&[(STACK_POINTER, 0x7fff_0000), (KERNEL_GS, OWN)]);
        assert!(found(&ram, &state).contains(&0x204));
    }

    #[test]
    fn without_long_mode_or_with_another_version_nothing_is_found() {
        let (mut ram, mut free) = (Ram::new(), TABLES + PAGE);
        ram.map(STACK & !0xfff, 0x20_0000, &mut free);
        let good = running(&[(STACK_POINTER, STACK)]);
        assert!(found(&ram, &good).contains(&0x200));
        let stopped = state(&[(STACK_POINTER, STACK), (CR3, TABLES)]);
        assert!(found(&ram, &stopped).is_empty());
        let mut newer = good.clone();
        let at = newer.iter().rposition(|byte| *byte == 0x0c).unwrap();
        newer[at] = 13;
        assert!(found(&ram, &newer).is_empty());
        // Tables outside the RAM.
        let outside = running(&[(STACK_POINTER, STACK), (CR3, 1 << 40)]);
        assert!(found(&ram, &outside).is_empty());
        for length in 0..good.len() {
            found(&ram, &good[..length]);
        }
    }

    #[test]
    fn any_content_is_searched_within_limits() {
        let (mut ram, mut seed) = (Ram::new(), 7_u64);
        for word in ram.0.chunks_exact_mut(8) {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            // Tables whose entries lie in the RAM, and pointers into what they map.
            let value = match seed % 3 {
                0 => seed & 0x3f_f000 | 0x63,
                1 => seed & 0x3f_f000 | 0xe3,
                _ => seed | KERNEL,
            };
            word.copy_from_slice(&value.to_le_bytes());
        }
        let state = running(&[
            (STACK_POINTER, u64::MAX - 7),
            (GS, KERNEL),
            (KERNEL_GS, u64::MAX),
        ]);
        let pages = found(&ram, &state);
        assert!(!pages.is_empty() && pages.len() <= 1024);
        let once: std::collections::HashSet<&u64> = pages.iter().collect();
        assert_eq!(once.len(), pages.len());
    }
}
