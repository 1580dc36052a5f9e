//! The page tables of x86 guests in long mode (Intel SDM, volume 3, section 4.5).

use longhaul_protocol::BLOCK_SIZE;

pub(super) const PAGE: u64 = BLOCK_SIZE as u64;
pub(super) type Page = [u8; BLOCK_SIZE];

/// Bits of control registers: paging, five levels of tables, and long mode.
const CR0_PG: u64 = 1 << 31;
const CR4_LA57: u64 = 1 << 12;
const EFER_LMA: u64 = 1 << 10;
/// Bits of an entry.
const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
pub(super) const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
const ENTRY_BYTES: usize = 8;
/// The lowest address of a kernel, and that of the range in which it has its own image: the last
/// 2 GiB.
pub(super) const KERNEL: u64 = 0xffff_8000_0000_0000;
pub(super) const IMAGE: u64 = 0xffff_ffff_8000_0000;

/// The page tables of a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Tables {
    pub(super) root: u64,
    pub(super) levels: u32,
}

impl Tables {
    /// Returns those of a CPU with these CR0, CR3, CR4 and EFER, if it is in long mode.
    pub(super) fn of([cr0, cr3, cr4, efer]: [Option<u64>; 4]) -> Option<Self> {
        if cr0? & CR0_PG == 0 || efer? & EFER_LMA == 0 {
            return None;
        }
        let levels = match cr4? & CR4_LA57 {
            0 => 4,
            _ => 5,
        };
        let root = cr3? & ADDRESS;
        Some(Self { root, levels })
    }

    /// Goes through all that they map. `enter` is asked before each table, with its address, its
    /// level, from 0, and the first virtual address that it maps; `content` reads a table.
    pub(super) fn walk(
        self,
        enter: &mut impl FnMut(u64, u32, u64) -> bool,
        content: &mut impl FnMut(u64) -> Option<Box<Page>>,
        leaf: &mut impl FnMut(Leaf),
    ) {
        let everything = Leaf {
            physical: self.root,
            level: self.levels,
            address: 0,
            is_writable: true,
            is_executable: true,
            was_accessed: false,
            was_written: false,
        };
        self.walk_below(everything, enter, content, leaf);
    }

    /// Goes through a table, which an entry points to.
    fn walk_below(
        self,
        above: Leaf,
        enter: &mut impl FnMut(u64, u32, u64) -> bool,
        content: &mut impl FnMut(u64) -> Option<Box<Page>>,
        leaf: &mut impl FnMut(Leaf),
    ) {
        let level = above.level - 1;
        if !enter(above.physical, level, above.address) {
            return;
        }
        let Some(table) = content(above.physical) else {
            return;
        };
        for (number, entry) in Entry::all(&table) {
            let address = above.address | (number as u64) << (12 + 9 * level);
            let found = Leaf {
                physical: entry.maps(level, 0),
                level,
                address: self.sign_extended(address),
                is_writable: above.is_writable && entry.0 & WRITABLE != 0,
                is_executable: above.is_executable && entry.0 & NO_EXECUTE == 0,
                was_accessed: entry.0 & ACCESSED != 0,
                was_written: entry.0 & DIRTY != 0,
            };
            if entry.is_leaf(level) {
                leaf(found);
            } else {
                let physical = entry.address();
                self.walk_below(Leaf { physical, ..found }, enter, content, leaf);
            }
        }
    }

    fn sign_extended(self, address: u64) -> u64 {
        let sign = 64 - (12 + 9 * self.levels);
        ((address << sign) as i64 >> sign) as u64
    }

    /// Returns whether a virtual address is valid: all of its upper bits are equal.
    pub(super) fn can_map(self, address: u64) -> bool {
        self.sign_extended(address) == address
    }
}

/// What an entry maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Leaf {
    /// The physical and the virtual address of its first page.
    pub(super) physical: u64,
    pub(super) address: u64,
    /// The level of its table, from 0: it has 512 times as many pages with each level.
    pub(super) level: u32,
    pub(super) is_writable: bool,
    pub(super) is_executable: bool,
    pub(super) was_accessed: bool,
    pub(super) was_written: bool,
}

impl Leaf {
    /// Returns the physical addresses of its pages.
    pub(super) fn pages(self) -> impl Iterator<Item = u64> {
        (0..1 << (9 * self.level)).map(move |number| self.physical + number * PAGE)
    }
}

/// An entry of a table that maps something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry(u64);

impl Entry {
    /// Returns the entry for an address in a table of this level, from 0.
    pub(super) fn of(table: &Page, level: u32, address: u64) -> Option<Self> {
        let number = address >> (12 + 9 * level) & 0x1ff;
        Self::at(table, number as usize)
    }

    fn at(table: &Page, number: usize) -> Option<Self> {
        let at = number * ENTRY_BYTES;
        let bytes = table.get(at..at + ENTRY_BYTES)?;
        let entry = u64::from_le_bytes(bytes.try_into().ok()?);
        (entry & PRESENT != 0).then_some(Self(entry))
    }

    /// Returns all entries of a table, with their numbers.
    pub(super) fn all(table: &Page) -> impl Iterator<Item = (usize, Self)> + '_ {
        let numbers = 0..BLOCK_SIZE / ENTRY_BYTES;
        numbers.filter_map(|number| Some((number, Self::at(table, number)?)))
    }

    /// Returns whether it maps pages, and not a table.
    pub(super) fn is_leaf(self, level: u32) -> bool {
        level == 0 || (self.0 & LARGE != 0 && level < 3)
    }

    /// Returns the address of the table, or of the first page.
    pub(super) fn address(self) -> u64 {
        self.0 & ADDRESS
    }

    /// Returns the physical address of a virtual one that a leaf maps.
    pub(super) fn maps(self, level: u32, address: u64) -> u64 {
        let within = (1 << (12 + 9 * level)) - 1;
        (self.address() & !within) | (address & within)
    }
}

#[cfg(test)]
pub(super) mod ram {
    //! The RAM of a guest that does not run.

    use super::*;
    use longhaul_protocol::BlockRange;

    pub(crate) const TABLES: u64 = 0x10_0000;

    /// 4 MiB from address 0 on, with page tables.
    #[derive(Clone)]
    pub(crate) struct Ram {
        content: Vec<u8>,
        root: u64,
        /// Where the next table is put.
        free: u64,
    }

    impl Ram {
        pub(crate) fn new(root: u64) -> Self {
            Self {
                content: vec![0; 4 << 20],
                root,
                free: root + PAGE,
            }
        }

        /// Tables whose entries lie in the RAM, and pointers into what they map.
        pub(crate) fn of_noise() -> Self {
            let (mut ram, mut seed) = (Self::new(TABLES), 7_u64);
            for word in ram.content.chunks_exact_mut(8) {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                let value = match seed % 3 {
                    0 => seed & 0x3f_f000 | 0x63,
                    1 => seed & 0x3f_f000 | 0xe3,
                    _ => seed | KERNEL,
                };
                word.copy_from_slice(&value.to_le_bytes());
            }
            ram
        }

        pub(crate) fn bytes(&self) -> u64 {
            self.content.len() as u64
        }

        /// Returns the pages that hold tables.
        pub(crate) fn tables(&self) -> std::ops::Range<u64> {
            self.root / PAGE..self.free / PAGE
        }

        pub(crate) fn read(&self, range: BlockRange, into: &mut [u8]) -> bool {
            let at = range.start as usize * BLOCK_SIZE;
            let content = self.content.get(at..at + into.len());
            content
                .map(|content| into.copy_from_slice(content))
                .is_some()
        }

        pub(crate) fn set(&mut self, at: u64, value: u64) {
            let at = at as usize;
            self.content[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }

        fn get(&self, at: u64) -> u64 {
            let at = at as usize;
            u64::from_le_bytes(self.content[at..at + 8].try_into().unwrap())
        }

        /// Maps a page, with these bits in its entry.
        pub(crate) fn map(&mut self, address: u64, physical: u64, bits: u64) {
            self.map_large(address, physical, bits, 0);
        }

        /// Maps pages by an entry of a table of this level.
        pub(crate) fn map_large(&mut self, address: u64, physical: u64, bits: u64, level: u32) {
            let mut table = self.root;
            for above in (level + 1..4).rev() {
                let at = table + (address >> (12 + 9 * above) & 0x1ff) * 8;
                if self.get(at) == 0 {
                    self.set(at, self.free | 0x63);
                    self.free += PAGE;
                }
                table = self.get(at) & ADDRESS;
            }
            let at = table + (address >> (12 + 9 * level) & 0x1ff) * 8;
            self.set(at, physical | bits);
        }

        /// Returns the same with a second process, whose tables are mapped into from now on.
        pub(crate) fn clone_root(&self, root: u64) -> Self {
            let mut ram = self.clone();
            for number in 256..512 {
                ram.set(root + number * 8, self.get(self.root + number * 8));
            }
            (ram.root, ram.free) = (root, root + PAGE);
            ram
        }
    }
}
