//! Counts a host's free huge pages, and those that a guest needs.

use super::{Question, size};
use crate::hardware::families::RAM;
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::message::Check;
use std::collections::BTreeMap;
use std::fs;
use std::io;

const FOLDER: &str = "/sys/kernel/mm/hugepages";

/// Returns the bytes in free huge pages, by the size of a page in MiB.
pub(super) fn free() -> io::Result<BTreeMap<u32, u64>> {
    let mut free = BTreeMap::new();
    let sizes = match fs::read_dir(FOLDER) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(free),
        other => other?,
    };
    for size in sizes {
        let size = size?;
        let name = size.file_name();
        let kib = name.to_str().and_then(|name| {
            let name = name.strip_prefix("hugepages-")?.strip_suffix("kB")?;
            name.parse::<u64>().ok()
        });
        let Some(mib) = kib.and_then(|kib| u32::try_from(kib >> 10).ok()) else {
            continue;
        };
        let pages = fs::read_to_string(size.path().join("free_hugepages"))?;
        let pages: u64 = pages.trim().parse().map_err(io::Error::other)?;
        free.insert(mib, pages.saturating_mul(u64::from(mib) << 20));
    }
    Ok(free)
}

/// Returns the bytes that a guest has in huge pages, by the size of a page in MiB.
pub(super) fn needed(guest: &GuestDescription) -> BTreeMap<u32, u64> {
    let mut needed = BTreeMap::new();
    let Some(hardware) = &guest.hardware else {
        return needed;
    };
    let main = hardware.memory.as_ref();
    if let Some(mib) = main.and_then(|memory| memory.huge_page_mib) {
        needed.insert(mib, guest.memory_mib.saturating_mul(1 << 20));
    }
    for option in RAM.options(&hardware.settings) {
        let number = |key: &str| {
            let value = option.iter().find(|(known, _)| *known == key);
            value.and_then(|(_, value)| value.parse::<u64>().ok())
        };
        let mib = number("huge-page-mib").and_then(|mib| u32::try_from(mib).ok());
        if let (Some(mib), Some(bytes)) = (mib, number("size")) {
            let sum: &mut u64 = needed.entry(mib).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }
    needed
}

impl Question<'_> {
    /// Checks that there are enough free huge pages.
    pub(super) fn huge_pages(&self, checks: &mut Vec<Check>) {
        for (mib, needed) in needed(self.guest) {
            let free = self.capabilities.huge_pages.get(&mib).copied();
            let free = free.unwrap_or_default();
            if free < needed {
                checks.push(self.refuse(
                    format!(
                        "it has {} in free huge pages of {mib} MiB, and the guest has {}",
                        size(free),
                        size(needed)
                    ),
                    format!(
                        "reserve huge pages on {}: write their number to \
                         /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages",
                        self.host,
                        u64::from(mib) << 10
                    ),
                ));
            }
        }
    }
}
