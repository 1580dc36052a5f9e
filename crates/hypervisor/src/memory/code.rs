//! Finds the code and the constants that a running x86 guest uses, without knowing its operating
//! system: pages that are mapped and were accessed, and that nobody has written; and its kernel's
//! variables, of which most are seldom written: all of the kernel's own image.
//!
//! A guest that moves before its memory waits for each page of code that it executes, one after the
//! other. These pages do not change, so they can travel while it still runs at the source. The
//! guest's page tables tell which ones: the processor marks the entries of pages that it has
//! accessed and written (Intel SDM, volume 3, section 4.8).
//!
//! The registers of running CPUs tell only the tables of the processes that run at this moment. The
//! top tables of all processes of a kernel have the same last entry, by which the kernel maps
//! itself. The others are found by that entry.
//!
//! The result is a hint: what is overlooked is asked for when it is needed.

use super::GuestMemory;
use super::named::Layout;
use super::page_tables::{IMAGE, KERNEL, Leaf, Page, Tables};
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use std::collections::{BTreeSet, HashSet};
use std::time::{Duration, Instant};

/// How often the CPUs are looked at, and how long after each other.
const LOOKS: u32 = 4;
const LOOK_EVERY: Duration = Duration::from_millis(15);
/// Limits on the tables, on the pages that are found, and on the time.
const TABLES_MAX: usize = 512;
const SEEN_MAX: usize = 1 << 14;
const PAGES_MAX: usize = 1 << 14;
/// The time limits the search for other tables; the known ones are searched in any case.
const WITHIN: Duration = Duration::from_millis(500);
/// The number of blocks read at once in the search for tables.
const BATCH: u64 = 64;
/// A leaf of a higher level is too large to say what of it is used.
const LEVEL_MAX: u32 = 1;

/// The page tables that a guest's CPUs used at some moments.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TablesInUse(Vec<Tables>);

impl TablesInUse {
    /// Asks QEMU for the registers of a guest's CPUs, some times.
    pub async fn of(qmp: &Qmp) -> Result<Self, QmpError> {
        let mut found = Self::default();
        for look in 0..LOOKS {
            if look > 0 {
                tokio::time::sleep(LOOK_EVERY).await;
            }
            found.add(&qmp.hmp("info registers -a", COMMAND_TIMEOUT).await?);
        }
        Ok(found)
    }

    /// Adds the tables in HMP's `info registers -a`.
    fn add(&mut self, said: &str) {
        // Each CPU begins with its name.
        for cpu in said.split("CPU#") {
            let registers = ["CR0=", "CR3=", "CR4=", "EFER="].map(|name| {
                let (_, rest) = cpu.split_once(name)?;
                u64::from_str_radix(rest.split_whitespace().next()?, 16).ok()
            });
            let tables = Tables::of(registers);
            let is_new = |tables: &Tables| !self.0.contains(tables);
            self.0.extend(tables.filter(is_new));
        }
    }
}

impl Layout {
    /// Returns the pages of code and constants that a running guest uses, and of its kernel's
    /// variables, in ascending order by kind. Reads its RAM for half a second or a little longer.
    pub fn code_in_use(&self, memory: &GuestMemory, tables: &TablesInUse) -> Vec<u64> {
        let block = self.block();
        let read = |range: BlockRange, into: &mut [u8]| memory.look(block, &[range], into).is_ok();
        let until = Instant::now() + WITHIN;
        let mut search = Search::new(self, read, || Instant::now() > until);
        search.run(&tables.0);
        search.in_order()
    }
}

/// A kind of pages, in the order of their use.
#[derive(Debug, Clone, Copy)]
enum Kind {
    CodeOfProcesses,
    CodeOfKernel,
    VariablesOfKernel,
    Constants,
}

impl Kind {
    const COUNT: usize = 4;

    /// Returns the kind of the pages of a leaf, if the guest uses them at once.
    fn of(leaf: Leaf) -> Option<Self> {
        let changes = leaf.is_writable && leaf.was_written;
        if !leaf.was_accessed || leaf.level > LEVEL_MAX {
            return None;
        }
        match (leaf.is_executable, leaf.address) {
            (_, IMAGE..) if changes => Some(Self::VariablesOfKernel),
            _ if changes => None,
            (true, KERNEL..) => Some(Self::CodeOfKernel),
            (true, _) => Some(Self::CodeOfProcesses),
            (false, _) => Some(Self::Constants),
        }
    }
}

struct Search<'a, R, E> {
    layout: &'a Layout,
    read: R,
    is_over: E,
    /// Tables that were searched, and their level.
    seen: HashSet<(u64, u32)>,
    found: [BTreeSet<u64>; Kind::COUNT],
}

impl<'a, R, E> Search<'a, R, E>
where
    R: FnMut(BlockRange, &mut [u8]) -> bool,
    E: FnMut() -> bool,
{
    fn new(layout: &'a Layout, read: R, is_over: E) -> Self {
        Self {
            layout,
            read,
            is_over,
            seen: HashSet::new(),
            found: Default::default(),
        }
    }

    fn run(&mut self, known: &[Tables]) {
        known.iter().for_each(|tables| self.search(*tables));
        // This takes long in a large guest.
        let alike = known.first().map(|first| self.alike(*first, known));
        let alike = alike.unwrap_or_default();
        alike.into_iter().for_each(|tables| self.search(tables));
    }

    /// Returns other tables of the same kernel, as far as there is time for the search.
    fn alike(&mut self, one: Tables, known: &[Tables]) -> Vec<Tables> {
        let mut alike = Vec::new();
        let root = content(self.layout, &mut self.read, one.root);
        let kernel = root.and_then(|root| root.last_chunk::<8>().copied());
        let Some(kernel) = kernel.filter(|entry| *entry != [0; 8]) else {
            return alike;
        };
        let pages = self.layout.pages();
        let mut content = vec![0; BATCH as usize * BLOCK_SIZE];
        for start in (0..pages).step_by(BATCH as usize) {
            if alike.len() >= TABLES_MAX || (self.is_over)() {
                break;
            }
            let count = BATCH.min(pages - start);
            let content = &mut content[..count as usize * BLOCK_SIZE];
            if !(self.read)(BlockRange::new(start, count), content) {
                continue;
            }
            for (page, content) in (start..).zip(content.chunks_exact(BLOCK_SIZE)) {
                let root = self.layout.address_of(page);
                let found = Tables { root, ..one };
                if content.ends_with(&kernel) && !known.contains(&found) {
                    alike.push(found);
                }
            }
        }
        alike
    }

    /// Finds what tables map.
    fn search(&mut self, tables: Tables) {
        let Self {
            layout,
            read,
            seen,
            found,
            ..
        } = self;
        tables.walk(
            &mut |table, level, _| seen.insert((table, level)) && seen.len() <= SEEN_MAX,
            &mut |table| content(layout, read, table),
            &mut |leaf| {
                let Some(kind) = Kind::of(leaf) else { return };
                let found = &mut found[kind as usize];
                if found.len() < PAGES_MAX {
                    found.extend(leaf.pages().filter_map(|page| layout.page_of(page)));
                }
            },
        );
    }

    fn in_order(self) -> Vec<u64> {
        let mut seen = HashSet::new();
        let pages = self.found.into_iter().flatten();
        let once = pages.filter(|page| seen.insert(*page));
        once.take(PAGES_MAX).collect()
    }
}

/// Reads a table.
fn content(
    layout: &Layout,
    read: &mut impl FnMut(BlockRange, &mut [u8]) -> bool,
    address: u64,
) -> Option<Box<Page>> {
    let page = layout.page_of(address)?;
    let mut content = Box::new([0; BLOCK_SIZE]);
    read(BlockRange::new(page, 1), &mut content[..]).then_some(content)
}

#[cfg(test)]
mod tests {
    use super::super::page_tables::PAGE;
    use super::super::page_tables::ram::{Ram, TABLES};
    use super::*;

    const CODE: u64 = 0x40_0000;
    const KERNEL_CODE: u64 = 0xffff_ffff_8100_0000;
    /// Bits of entries: present and accessed; writable; written; not executable; large.
    const USED: u64 = 0x21;
    const WRITABLE: u64 = 2;
    const WRITTEN: u64 = 0x42;
    const DATA: u64 = 1 << 63;
    const LARGE: u64 = 1 << 7;

    fn found(ram: &Ram, known: &[Tables]) -> Vec<u64> {
        let layout = Layout::of_one_block(ram.bytes());
        let read = |range: BlockRange, into: &mut [u8]| ram.read(range, into);
        let mut search = Search::new(&layout, read, || false);
        search.run(known);
        search.in_order()
    }

    fn of(root: u64) -> Tables {
        Tables { root, levels: 4 }
    }

    #[test]
    fn what_was_accessed_and_not_written_is_found_by_kind() {
        let mut ram = Ram::new(TABLES);
        ram.map(CODE, 0x20_0000, USED);
        ram.map(CODE + PAGE, 0x20_1000, USED | WRITABLE);
        ram.map(CODE + 2 * PAGE, 0x20_2000, USED | WRITTEN);
        ram.map(CODE + 3 * PAGE, 0x20_3000, 1);
        ram.map(CODE + 4 * PAGE, 0x20_4000, USED | DATA);
        // Copied when it is written again.
        ram.map(
            CODE + 5 * PAGE,
            0x20_5000,
            USED | DATA | WRITTEN & !WRITABLE,
        );
        ram.map(KERNEL_CODE, 0x21_0000, USED);
        ram.map(KERNEL_CODE + PAGE, 0x21_1000, USED | WRITTEN | DATA);
        ram.map(0xffff_8880_0000_0000, 0x22_0000, USED | WRITTEN | DATA);
        let expected = [0x200, 0x201, 0x210, 0x211, 0x204, 0x205];
        assert_eq!(found(&ram, &[of(TABLES)]), expected);
    }

    #[test]
    fn large_pages_are_found_and_larger_ones_say_too_little() {
        let mut ram = Ram::new(TABLES);
        ram.map_large(KERNEL_CODE, 0x20_0000, USED | LARGE, 1);
        ram.map_large(0xffff_8880_4000_0000, 0, USED | LARGE, 2);
        let pages = found(&ram, &[of(TABLES)]);
        assert_eq!(pages, (0x200..0x400).collect::<Vec<u64>>());
    }

    #[test]
    fn other_processes_of_the_kernel_are_found() {
        let mut ram = Ram::new(TABLES);
        ram.map(CODE, 0x20_0000, USED);
        ram.map(KERNEL_CODE, 0x21_0000, USED);
        let mut other = ram.clone_root(0x30_0000);
        other.map(CODE, 0x20_7000, USED);
        assert_eq!(found(&other, &[of(TABLES)]), [0x200, 0x207, 0x210]);
        assert!(found(&other, &[]).is_empty());
        // A root outside the RAM.
        assert!(found(&other, &[of(1 << 40)]).is_empty());
    }

    #[test]
    fn registers_are_read_from_what_qemu_says() {
        let cpu = |cr3: &str| {
            format!(
                "\nCPU#0\nRAX=0000000000000000 RBX=ffff888003a0b800\nGS =0000 ffff88800f800000 \
                 00000000 00000000\nCR0=80050033 CR2=00007f {cr3} CR4=000006f0\n\
                 DR6=00000000ffff0ff0\nEFER=0000000000000d01\n"
            )
        };
        let mut tables = TablesInUse::default();
        tables.add(&(cpu("CR3=0000000003a0a006") + &cpu("CR3=0000000003b00000")));
        tables.add(&cpu("CR3=0000000003a0a000"));
        assert_eq!(tables.0, [of(0x3a0_a000), of(0x3b0_0000)]);
        for nothing in ["", "CPU#0\nCR0=", &cpu("CR3=x"), &cpu("")] {
            tables.add(nothing);
        }
        tables.add(&cpu("CR3=0000000000001000").replace("d01", "800"));
        assert_eq!(tables.0.len(), 2);
    }

    #[test]
    fn any_content_is_searched_within_limits() {
        let ram = Ram::of_noise();
        let pages = found(&ram, &[of(TABLES)]);
        let once: HashSet<&u64> = pages.iter().collect();
        assert_eq!(once.len(), pages.len());
        assert!(pages.len() <= PAGES_MAX);
    }
}
