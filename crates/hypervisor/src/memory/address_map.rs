//! Finds the places of QEMU's RAM blocks, as reported by QEMU and by the system.

use crate::open_files::FileIdentity;
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use std::collections::BTreeSet;

/// A RAM block as HMP's `info ramblock` lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListedBlock {
    pub(crate) name: String,
    pub(crate) used_bytes: u64,
    pub(crate) max_bytes: u64,
    /// Its address in QEMU's own memory; QEMU 7.2 does not report it.
    pub(crate) address: Option<u64>,
}

/// Parses the table of HMP's `info ramblock`.
pub(crate) fn parse_ram_blocks(table: &str) -> Result<Vec<ListedBlock>, String> {
    let lines = table.lines().map(str::trim).filter(|line| !line.is_empty());
    // A block that nothing uses has no name: `4 KiB  OFFSET ...`. It does not move.
    let rows = lines.filter(|line| !line.starts_with("Block Name") && !is_unnamed(line));
    let blocks: Vec<ListedBlock> = rows
        .map(|line| parse_row(line).ok_or_else(|| format!("line `{line}`")))
        .collect::<Result<_, _>>()?;
    match blocks.is_empty() {
        true => Err("it lists no block".to_owned()),
        false => Ok(blocks),
    }
}

/// Returns whether a row begins with the size of pages.
pub(crate) fn is_unnamed(row: &str) -> bool {
    let words: Vec<&str> = row.split_whitespace().take(3).collect();
    matches!(words.as_slice(), [_, "B" | "KiB" | "MiB" | "GiB", third] if third.starts_with("0x"))
}

/// `pc.ram  4 KiB  OFFSET  USED  TOTAL [HVA  rw]`
fn parse_row(line: &str) -> Option<ListedBlock> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let first = words.iter().position(|word| word.starts_with("0x"))?;
    // The name and two words of page size precede the first number.
    let name = words.get(..first.checked_sub(2)?)?.join(" ");
    let number = |at: usize| words.get(first + at).and_then(|word| hexadecimal(word));
    (!name.is_empty()).then_some(())?;
    Some(ListedBlock {
        name,
        used_bytes: number(1)?,
        max_bytes: number(2)?,
        address: number(3).filter(|address| *address != 0),
    })
}

/// Asks QEMU for the block and the host address of a guest's address; `None` without RAM there.
pub(crate) async fn host_address(
    qmp: &Qmp,
    address: u64,
) -> Result<Option<(String, u64)>, QmpError> {
    let line = format!("gpa2hva {address:#x}");
    let said = qmp.hmp(&line, COMMAND_TIMEOUT).await?;
    Ok(parse_host_address(&said))
}

/// Returns the block and the host address in HMP's `gpa2hva`, if the guest has RAM there.
fn parse_host_address(line: &str) -> Option<(String, u64)> {
    let (_, rest) = line.trim().split_once('(')?;
    let (name, rest) = rest.split_once(") is ")?;
    Some((name.to_owned(), hexadecimal(rest.trim())?))
}

/// Returns the 64-bit words in HMP's `xp /..gx`.
pub(crate) fn parse_words(text: &str) -> Vec<u64> {
    let words = text.lines().filter_map(|line| line.split_once(':'));
    words
        .flat_map(|(_, words)| words.split_whitespace())
        .filter_map(hexadecimal)
        .collect()
}

fn hexadecimal(word: &str) -> Option<u64> {
    u64::from_str_radix(word.strip_prefix("0x")?, 16).ok()
}

/// A mapping of a process's memory, as `/proc/PID/maps` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// Readable and writable.
    pub(crate) writable: bool,
    /// Writes go to its file.
    pub(crate) shared: bool,
    /// Its offset in the file.
    pub(crate) offset: u64,
    /// The file's device, major and minor.
    pub(crate) device: (u64, u64),
    /// The file's inode; 0 where there is none.
    pub(crate) inode: u64,
}

/// Returns the files that a process maps shared, by device and inode: its writes to such memory
/// reach them.
pub(crate) fn shared_files(maps: &str) -> BTreeSet<FileIdentity> {
    let mappings = maps.lines().filter_map(parse_mapping);
    let shared = mappings.filter(|mapping| mapping.shared && mapping.inode != 0);
    shared
        .map(|mapping| (mapping.device, mapping.inode))
        .collect()
}

/// `FROM-TO rw-s OFFSET MAJOR:MINOR INODE [PATH]`
fn parse_mapping(line: &str) -> Option<Mapping> {
    let mut words = line.split_whitespace();
    let number = |text| u64::from_str_radix(text, 16).ok();
    let (from, to) = words.next()?.split_once('-')?;
    let rights = words.next()?;
    let offset = number(words.next()?)?;
    let (major, minor) = words.next()?.split_once(':')?;
    Some(Mapping {
        from: number(from)?,
        to: number(to)?,
        writable: rights.starts_with("rw"),
        shared: rights.ends_with('s'),
        offset,
        device: (number(major)?, number(minor)?),
        inode: words.next()?.parse().ok()?,
    })
}

/// Returns whether all of `[start, start + length)` is mapped readable and writable, by
/// `/proc/PID/maps`.
pub(crate) fn is_writable(maps: &str, start: u64, length: u64) -> bool {
    let Some(end) = start.checked_add(length) else {
        return false;
    };
    let mut reached = start;
    for mapping in maps.lines().filter_map(parse_mapping) {
        if mapping.writable && mapping.from <= reached && reached < mapping.to {
            reached = mapping.to;
        }
        if reached >= end {
            return true;
        }
    }
    false
}

/// Returns whether all of `[start, start + length)` is private memory of the process without a
/// file.
pub(crate) fn is_anonymous(maps: &str, start: u64, length: u64) -> bool {
    let mapping = covering(maps, start, length);
    mapping.is_some_and(|mapping| !mapping.shared && mapping.inode == 0)
}

/// Returns the one mapping that contains all of `[start, start + length)`. Adjacent pieces that
/// follow each other in one file count as one.
pub(crate) fn covering(maps: &str, start: u64, length: u64) -> Option<Mapping> {
    let end = start.checked_add(length)?;
    let mut found: Option<Mapping> = None;
    for mapping in maps.lines().filter_map(parse_mapping) {
        match &mut found {
            None if mapping.from <= start && start < mapping.to => found = Some(mapping),
            Some(found) if found.to < end => {
                let behind = Mapping {
                    from: found.to,
                    offset: found.offset.checked_add(found.to - found.from)?,
                    to: mapping.to,
                    ..found.clone()
                };
                (mapping == behind).then_some(())?;
                found.to = mapping.to;
            }
            _ => {}
        }
    }
    found.filter(|found| end <= found.to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_tables_are_read() {
        let old = "  Block Name  PSize  Offset  Used  Total
                  pc.ram    4 KiB  0x0000000000000000 0x0000000140000000 0x0000000140000000
    /rom@etc/acpi/tables    4 KiB  0x00000001410c0000 0x0000000000020000 0x0000000000200000
";
        let blocks = parse_ram_blocks(old).unwrap();
        assert_eq!(blocks[0].name, "pc.ram");
        assert_eq!(blocks[0].used_bytes, 5 << 30);
        assert_eq!(blocks[0].address, None);
        assert_eq!(
            (blocks[1].used_bytes, blocks[1].max_bytes),
            (0x20000, 0x200000)
        );
        let new = "  Block Name    PSize   Offset  Used   Total      HVA  RO
    pc.ram    2 MiB  0x0 0x400000 0x400000 0x00007f2cd6000000  rw
";
        let blocks = parse_ram_blocks(new).unwrap();
        assert_eq!(blocks[0].address, Some(0x7f2c_d600_0000));
        let unused = "  Block Name  PSize  Offset  Used  Total
                            4 KiB  0x0000000004300000 0x0000000004000000 0x0000000004000000
                   f0    4 KiB  0x0000000000000000 0x0000000002000000 0x0000000002000000
";
        let blocks = parse_ram_blocks(unused).unwrap();
        assert_eq!(blocks.len(), 1);
        assert_eq!(blocks[0].name, "f0");
        for table in ["", "unknown command", "pc.ram 4 KiB 0x0 many"] {
            assert!(parse_ram_blocks(table).is_err(), "{table}");
        }
    }

    #[test]
    fn addresses_and_words_are_read() {
        let line = "Host virtual address for 0x100000 (pc.ram) is 0x7efcbff00000\r\n";
        let found = parse_host_address(line).unwrap();
        assert_eq!(found, ("pc.ram".to_owned(), 0x7efc_bff0_0000));
        assert_eq!(
            parse_host_address("No memory is mapped at address 0x100000000"),
            None
        );
        let text = "0000000000010000: 0x00000000a27bf35f 0x0000000000000001\n";
        assert_eq!(parse_words(text), [0xa27b_f35f, 1]);
    }

    #[test]
    fn mappings_may_lie_side_by_side() {
        let maps = "1000-3000 rw-p 0 00:00 0\n3000-5000 rw-p 0 00:00 0\n\
                    5000-6000 ---p 0 00:00 0\n";
        assert!(is_writable(maps, 0x1000, 0x4000));
        assert!(is_writable(maps, 0x2000, 0x1000));
        assert!(!is_writable(maps, 0x2000, 0x4000));
        assert!(!is_writable(maps, 0, 0x2000));
        assert!(!is_writable(maps, u64::MAX, 2));
    }

    #[test]
    fn the_file_behind_a_stretch_is_found() {
        let maps = "1000-3000 rw-s 7000 00:01 77 /memfd:ram (deleted)\n\
                    3000-5000 rw-s 9000 00:01 77 /memfd:ram (deleted)\n\
                    5000-6000 rw-s 0 00:01 78 /memfd:other (deleted)\n\
                    7000-9000 rw-p 00000000 00:00 0 \n";
        assert!(shared_files(maps).is_superset(&[((0, 1), 77), ((0, 1), 78)].into()));
        assert!(!shared_files(maps).iter().any(|(_, inode)| *inode == 0));
        let found = covering(maps, 0x2000, 0x3000).unwrap();
        assert_eq!(
            (found.from, found.to, found.offset),
            (0x1000, 0x5000, 0x7000)
        );
        assert_eq!(
            (found.device, found.inode, found.shared),
            ((0, 1), 77, true)
        );
        assert_eq!(covering(maps, 0x2000, 0x3001), None);
        assert_eq!(covering(maps, 0x6000, 0x1000), None);
        let private = covering(maps, 0x7000, 0x2000).unwrap();
        assert_eq!((private.inode, private.shared), (0, false));
        assert_eq!(covering(maps, u64::MAX, 2), None);
    }
}
