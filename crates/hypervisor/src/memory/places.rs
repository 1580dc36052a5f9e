//! Finds the addresses of large RAM blocks beside the main one in a QEMU that does not list them:
//! those of NUMA nodes and of plugged memory.

use super::address_map::{ListedBlock, host_address};
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use longhaul_protocol::BLOCK_SIZE;
use serde_json::Value;
use std::collections::BTreeSet;
use std::ops::Range as Span;

/// Addresses below 4 GiB that are a PC's for PCI devices.
const WINDOW: Span<u64> = 0xe000_0000..0xfe00_0000;
/// Registers of a PCI device, and the bit that makes it answer to its addresses.
const COMMAND: u64 = 4;
const BARS: u64 = 0x10;
const MEMORY: u64 = 2;

/// A range of the guest's addresses that a block fills, and its place in QEMU's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// The address of the block in QEMU's memory.
    pub(super) base: u64,
    /// The guest's address of the range.
    pub(super) guest: u64,
    /// The first page of the range in the block, and the number of its pages.
    pub(super) page: u64,
    pub(super) pages: u64,
}

/// A line of HMP's `info mtree -f`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Range {
    name: String,
    from: u64,
    to: u64,
    offset: u64,
}

/// A device of the first PCI bus that was given addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Shown {
    slot: u64,
    function: u64,
}

/// Gives the devices that have these blocks addresses, in a QEMU that waits for a guest: nothing
/// else does, and the state that arrives replaces them.
pub(super) async fn show<'a>(
    qmp: &Qmp,
    blocks: impl Iterator<Item = &'a str>,
) -> Result<BTreeSet<Shown>, QmpError> {
    let devices: BTreeSet<Shown> = blocks.filter_map(device).collect();
    if devices.is_empty() || qmp.query("query-status").await?["status"] != "inmigrate" {
        return Ok(BTreeSet::new());
    }
    let buses = qmp.query("query-pci").await?;
    let bus = buses.as_array().into_iter().flatten();
    let bus = bus.filter(|bus| bus["bus"] == 0);
    let present: Vec<&Value> = bus
        .flat_map(|bus| bus["devices"].as_array().into_iter().flatten())
        .collect();
    let mut next = WINDOW.start;
    let mut shown = BTreeSet::new();
    for device in devices {
        let is_it = |it: &&&Value| it["slot"] == device.slot && it["function"] == device.function;
        let regions = present.iter().find(is_it).map(|it| &it["regions"]);
        let regions = regions.and_then(Value::as_array).into_iter().flatten();
        for region in regions.filter(|region| region["type"] == "memory") {
            let (bar, size) = (region["bar"].as_u64(), region["size"].as_u64());
            // The sixth is that of the option ROM.
            let (Some(bar @ 0..6), Some(size)) = (bar, size) else {
                continue;
            };
            let address = next.next_multiple_of(size.max(1));
            let end = address.saturating_add(size);
            if end <= WINDOW.end {
                device.write(qmp, BARS + 4 * bar, 4, address).await?;
                next = end;
            }
        }
        device.write(qmp, COMMAND, 2, MEMORY).await?;
        shown.insert(device);
    }
    Ok(shown)
}

/// Takes the addresses away again.
pub(super) async fn hide(qmp: &Qmp, shown: BTreeSet<Shown>) -> Result<(), QmpError> {
    for device in shown {
        device.write(qmp, COMMAND, 2, 0).await?;
        for bar in 0..6 {
            device.write(qmp, BARS + 4 * bar, 4, 0).await?;
        }
    }
    Ok(())
}

impl Shown {
    /// Writes to the device's configuration space, as the guest's firmware does.
    async fn write(self, qmp: &Qmp, at: u64, bytes: u8, value: u64) -> Result<(), QmpError> {
        let place = 1 << 31 | self.slot << 11 | self.function << 8 | at;
        let size = if bytes == 2 { 'h' } else { 'w' };
        for line in [
            format!("o /w 0xcf8 {place:#x}"),
            format!("o /{size} 0xcfc {value:#x}"),
        ] {
            qmp.hmp(&line, COMMAND_TIMEOUT).await?;
        }
        Ok(())
    }
}

/// `0000:00:02.0/vga.vram`: device 2 of the first bus.
fn device(block: &str) -> Option<Shown> {
    let (place, _) = block.strip_prefix("0000:00:")?.split_once('/')?;
    let (slot, function) = place.split_once('.')?;
    let number = |text, max| {
        u64::from_str_radix(text, 16)
            .ok()
            .filter(|number| *number <= max)
    };
    Some(Shown {
        slot: number(slot, 31)?,
        function: number(function, 7)?,
    })
}

/// Returns whether a large block of this name is found in every QEMU.
pub(crate) fn is_findable(name: &str) -> bool {
    device(name).is_some()
}

/// Returns the place of a block, if the guest has it at its addresses.
pub(super) async fn find(
    qmp: &Qmp,
    listed: &[ListedBlock],
    index: usize,
) -> Result<Option<Place>, QmpError> {
    let tree = qmp.hmp("info mtree -f", COMMAND_TIMEOUT).await?;
    let Some(range) = largest(&tree, listed, index) else {
        return Ok(None);
    };
    let found = host_address(qmp, range.from).await?;
    let found = found.filter(|(name, _)| *name == range.name);
    let place = found.and_then(|(_, address)| {
        Some(Place {
            base: address.checked_sub(range.offset)?,
            guest: range.from,
            page: range.offset / BLOCK_SIZE as u64,
            pages: (range.to - range.from + 1) / BLOCK_SIZE as u64,
        })
    });
    Ok(place)
}

/// Returns the largest range of the guest's addresses that only this block can fill.
fn largest(tree: &str, listed: &[ListedBlock], index: usize) -> Option<Range> {
    let block = listed.get(index)?;
    let is_of = |block: &ListedBlock, name: &str| {
        let path = block.name.strip_suffix(name);
        path.is_some_and(|path| path.is_empty() || path.ends_with('/'))
    };
    let ranges = tree.lines().filter_map(parse);
    let own = ranges.filter(|range| {
        let alike = listed.iter().filter(|block| is_of(block, &range.name));
        let end = (range.to - range.from).checked_add(range.offset);
        is_of(block, &range.name)
            && alike.count() == 1
            && end.is_some_and(|end| end < block.used_bytes)
            && (range.from | range.offset).is_multiple_of(BLOCK_SIZE as u64)
    });
    own.max_by_key(|range| range.to - range.from)
}

/// `FROM-TO (prio 0, ram): NAME [@OFFSET]`
fn parse(line: &str) -> Option<Range> {
    let (addresses, rest) = line.trim().split_once(" (prio ")?;
    let (_, rest) = rest.split_once(", ram): ")?;
    let (from, to) = addresses.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let mut words = rest.split_whitespace();
    let name = words.next()?.to_owned();
    let offset = words.next().and_then(|word| word.strip_prefix('@'));
    let (from, to) = (number(from)?, number(to)?);
    (from <= to).then_some(())?;
    Some(Range {
        name,
        from,
        to,
        offset: offset.map_or(Some(0), number)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "FlatView #0
 AS \"memory\", root: system
 Root memory region: system
  0000000000000000-000000000009ffff (prio 0, ram): f0
  00000000000a0000-00000000000bffff (prio 1, i/o): vga-lowmem
  00000000000c0000-00000000000c9fff (prio 0, rom): f0 @00000000000c0000
  0000000000100000-0000000001ffffff (prio 0, ram): f0 @0000000000100000
  0000000002000000-0000000002ffffff (prio 0, ram): f1 kvm
  0000000100000000-0000000100ffffff (prio 0, ram): f1 @0000000001000000 kvm
  0000000200000000-00000002ffffffff (prio 0, ram): vram
";

    fn listed(names: &[&str]) -> Vec<ListedBlock> {
        let block = |name: &&str| ListedBlock {
            name: (*name).to_owned(),
            used_bytes: 32 << 20,
            max_bytes: 32 << 20,
            address: None,
        };
        names.iter().map(block).collect()
    }

    #[test]
    fn devices_of_blocks_are_named() {
        let device = |slot, function| Some(Shown { slot, function });
        for (name, expected) in [
            ("0000:00:02.0/vga.vram", device(2, 0)),
            ("0000:00:1f.7/x", device(31, 7)),
            ("0000:00:20.0/x", None),
            ("0000:00:1e.0:01.0/qxl.vram", None),
            ("pc.ram", None),
            ("/objects/0000:00:02.0", None),
        ] {
            assert_eq!(super::device(name), expected, "{name}");
        }
    }

    #[test]
    fn the_largest_range_of_a_block_is_found() {
        let blocks = listed(&["/objects/f0", "f1", "a/vram", "b/vram", "f2"]);
        let found = |index| largest(TREE, &blocks, index);
        let range = |name: &str, from, to, offset| Range {
            name: name.to_owned(),
            from,
            to,
            offset,
        };
        assert_eq!(
            found(0),
            Some(range("f0", 0x10_0000, 0x1ff_ffff, 0x10_0000))
        );
        assert_eq!(
            found(1),
            Some(range("f1", 1 << 32, (1 << 32) + 0xff_ffff, 0x100_0000))
        );
        // Two have that name; one has no place; one is not in the list.
        assert_eq!([found(2), found(4), found(5)], [None, None, None]);
        // A range that does not fit into its block.
        let one = listed(&["vram"]);
        assert_eq!(largest(TREE, &one, 0), None);
    }
}
