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
//! A kernel also writes data at each tick of its clock that no such chain of pointers leads to. Of
//! the pages that were written often, those that its processes do not have are the kernel's.
//!
//! Registers are read from QEMU's device state, where the section `cpu` of x86 machines has had the
//! same fields in the same places since its version 12 (QEMU 0.12).

use super::GuestMemory;
use super::named::Layout;
use super::page_tables::{Entry, IMAGE, KERNEL, PAGE, Page, Tables};
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

/// The lowest address of a process.
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
/// Limits on the tables that are read for this, and on the missing ones: 1 GiB is mapped by 512.
const TABLES_MAX: usize = 1 << 14;
const TABLES_MISSING_MAX: usize = 512;
/// Missing pages of a kernel's image up to which they count as its variables.
const VARIABLES_MAX: usize = 512;
/// Often written pages of a kernel that are found.
const OFTEN_MAX: usize = 512;
/// Limits on the pages that are found, and on the time.
const PAGES_MAX: usize = 4096;
const WITHIN: Duration = Duration::from_millis(25);

impl Layout {
    /// Returns the missing pages that the guest's CPUs probably use next, the first ones first.
    /// `state` is the device state with which the guest was stopped, and `often` are missing pages
    /// that it has written often, the most written first.
    pub fn used_next(
        &self,
        memory: &GuestMemory,
        state: &[u8],
        is_missing: impl Fn(u64) -> bool,
        often: &[u64],
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
        search.run(&cpus(state), often);
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
    let tables = Tables::of([CR0, CR3, CR4, EFER].map(register))?;
    let mut addresses = vec![register(STACK_POINTER)?];
    // The instruction pointer stands behind the others.
    let general = (0..REGISTERS).rev().map(|number| register(number * 8));
    let special = [TASK, INTERRUPT_TABLE, GLOBAL_TABLE, LSTAR, FS].map(register);
    addresses.extend(general.chain(special).flatten());
    Some(Cpu {
        tables,
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
    /// The pages of the processes that run, as bits.
    of_processes: Vec<u64>,
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
            of_processes: vec![0; layout.pages().div_ceil(64) as usize],
        }
    }

    fn run(&mut self, cpus: &[Cpu], often: &[u64]) {
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
        let mut mapped: Vec<Tables> = Vec::new();
        for tables in cpus.iter().map(|cpu| cpu.tables) {
            if !mapped.contains(&tables) {
                mapped.push(tables);
                self.map(tables);
            }
        }
        // The ends of stacks stand among much else.
        for part in self.queue.clone().into_iter().filter(|part| part.of_kernel) {
            self.point_to(part, |pointer| pointer.is_multiple_of(PAGE));
        }
        let of_kernel = often.iter().filter(|page| !self.is_of_process(**page));
        let of_kernel: Vec<u64> = of_kernel.take(OFTEN_MAX).copied().collect();
        of_kernel.into_iter().for_each(|page| self.find(page));
        while let Some(part) = self.queue.pop_front() {
            if self.found.len() >= PAGES_MAX || (self.is_over)() {
                break;
            }
            self.point_to(part, |_| true);
        }
    }

    /// Finds the tables of a process and its kernel, and the kernel's variables: the missing pages
    /// of its own image. Either only if few are missing. Marks the pages of the process.
    fn map(&mut self, tables: Tables) {
        let layout = self.layout;
        let mut of_processes = std::mem::take(&mut self.of_processes);
        let (mut on_the_way, mut variables) = (Vec::new(), Vec::new());
        tables.walk(
            &mut |table, _, _| {
                on_the_way.extend(layout.page_of(table));
                on_the_way.len() <= TABLES_MAX
            },
            &mut |table| self.content(layout.page_of(table)?).copied().map(Box::new),
            &mut |leaf| {
                if leaf.level > 1 {
                    return;
                }
                let pages = leaf.pages().filter_map(|page| layout.page_of(page));
                match leaf.address {
                    IMAGE.. if leaf.is_writable => variables.extend(pages),
                    ..KERNEL => pages.for_each(|page| {
                        if let Some(bits) = of_processes.get_mut((page / 64) as usize) {
                            *bits |= 1 << (page % 64);
                        }
                    }),
                    _ => {}
                }
            },
        );
        self.of_processes = of_processes;
        for (mut pages, max) in [(on_the_way, TABLES_MISSING_MAX), (variables, VARIABLES_MAX)] {
            pages.retain(|page| (self.is_missing)(*page));
            if pages.len() <= max {
                pages.into_iter().for_each(|page| self.find(page));
            }
        }
    }

    fn is_of_process(&self, page: u64) -> bool {
        let bits = self.of_processes.get((page / 64) as usize);
        bits.is_some_and(|bits| bits >> (page % 64) & 1 == 1)
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

    /// Finds what the pointers of a part of a page point to. A kernel has those of its processes,
    /// too.
    fn point_to(&mut self, part: Part, which: impl Fn(u64) -> bool) {
        let Some(content) = self.content(part.page) else {
            return;
        };
        let words = content.get(part.from..part.to).unwrap_or_default();
        let words = words.chunks_exact(8);
        let words = words.filter_map(|word| Some(u64::from_le_bytes(word.try_into().ok()?)));
        let words = words.filter(|word| which(*word));
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
        if !tables.can_map(address) {
            return None;
        }
        let mut table = tables.root;
        for level in (0..tables.levels).rev() {
            let page = self.layout.page_of(table)?;
            self.find(page);
            let entry = Entry::of(self.content(page)?, level, address)?;
            if entry.is_leaf(level) {
                return self.layout.page_of(entry.maps(level, address));
            }
            table = entry.address();
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
    use super::super::page_tables::ram::{Ram, TABLES};
    use super::*;

    /// Bits of an entry of a page that is used and written.
    const BITS: u64 = 0x163;

    const STACK: u64 = 0xffff_c900_0000_3d98;
    const OWN: u64 = 0xffff_8880_07a0_0000;
    const CODE: u64 = 0xffff_ffff_8100_3643;

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
        let layout = Layout::of_one_block(ram.bytes());
        let read = |page: u64, into: &mut Page| ram.read(BlockRange::new(page, 1), into);
        let mut search = Search::new(&layout, read, is_missing, || false);
        search.run(&cpus(state), &[]);
        search.found
    }

    #[test]
    fn what_is_written_often_and_is_no_process_s_is_the_kernel_s() {
        let mut ram = Ram::new(TABLES);
        for (address, physical) in [(0x40_0000, 0x20_0000), (OWN, 0x20_2000)] {
            ram.map(address, physical, BITS);
        }
        let layout = Layout::of_one_block(ram.bytes());
        let read = |page: u64, into: &mut Page| ram.read(BlockRange::new(page, 1), into);
        let is_missing = |page: u64| (0x200..0x300).contains(&page);
        let mut search = Search::new(&layout, read, is_missing, || false);
        search.run(&cpus(&running(&[])), &[0x202, 0x200, 0x280, 0x270, 0x300]);
        assert_eq!(search.found, [0x202, 0x280, 0x270]);
    }

    #[test]
    fn what_registers_point_to_comes_first_then_what_that_points_to() {
        let mut ram = Ram::new(TABLES);
        for (address, physical) in [
            (STACK, 0x20_0000),
            (STACK + PAGE, 0x20_5000),
            (CODE, 0x20_1000),
            (OWN, 0x20_2000),
            (OWN + PAGE, 0x20_3000),
            (OWN + 0x10_0000, 0x20_4000),
        ] {
            ram.map(address & !0xfff, physical, BITS);
        }
        // The processor's data points to a page, and below the stack pointer is nothing of use.
        ram.set(0x20_3008, OWN + 0x10_0010);
        ram.set(0x20_0008, OWN + 0x10_0010);
        let state = running(&[(STACK_POINTER, STACK), (16 * 8, CODE), (GS, OWN)]);
        let mut pages = found(&ram, &state);
        let tables = ram.tables();
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
        let mut ram = Ram::new(TABLES);
        ram.map(STACK & !0xfff, 0x20_0000, BITS);
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
        let ram = Ram::of_noise();
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
