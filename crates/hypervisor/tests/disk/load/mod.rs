//! Runs a guest that writes and checks its disk continuously: a boot sector (`load.S`), whose state
//! is in its memory.

use crate::payload::{Qemu, main_block};
use longhaul_hypervisor::memory::GuestMemory;
use longhaul_protocol::BlockRange;
use std::time::{Duration, Instant};

/// `load.S`, assembled.
const BOOT_SECTOR: &[u8; 512] = include_bytes!("load.bin");
/// The number of the guest's blocks of 4 KiB, and their first sector.
const BLOCKS: usize = 4096;
const FIRST_SECTOR: usize = 61;
/// The size of a disk with room for them all.
const DISK_BYTES: usize = 17 << 20;

const PATIENCE: Duration = Duration::from_secs(120);

/// Returns a disk that boots the load.
pub(crate) fn boot_disk() -> Vec<u8> {
    let mut disk = vec![0; DISK_BYTES];
    disk[..512].copy_from_slice(BOOT_SECTOR);
    disk
}

/// The load in a guest.
pub(crate) struct Load {
    memory: GuestMemory,
    main: usize,
}

impl Load {
    /// Finds the load in a guest, and waits until it writes.
    pub(crate) async fn find(qemu: &Qemu) -> Self {
        let memory = qemu.memory().await;
        let load = Self {
            main: main_block(&memory),
            memory,
        };
        let until = Instant::now() + PATIENCE;
        while load.numbers(0, 4096)[0x508 / 4] != u32::from_le_bytes(*b"DLHL") {
            assert!(Instant::now() < until, "the guest does not boot");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        load
    }

    fn numbers(&self, first_page: u64, bytes: usize) -> Vec<u32> {
        let mut content = vec![0; bytes];
        let range = [BlockRange::new(first_page, bytes as u64 / 4096)];
        self.memory.read(self.main, &range, &mut content).unwrap();
        let numbers = content.chunks_exact(4);
        let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
        numbers.map(number).collect()
    }

    /// Returns the number of rounds of writing and checking so far, after asserting that none found
    /// an error.
    pub(crate) fn rounds(&self) -> u32 {
        let page = self.numbers(0, 4096);
        let wrong = page[0x504 / 4];
        let what = ["", "other content than it wrote", "an error of its disk"];
        assert_eq!(wrong, 0, "the guest saw {}", what[wrong as usize]);
        page[0x500 / 4]
    }

    /// Waits for this number of further rounds.
    pub(crate) async fn goes_on(&self, rounds: u32) {
        let goal = self.rounds() + rounds;
        let until = Instant::now() + PATIENCE;
        while self.rounds() < goal {
            assert!(Instant::now() < until, "the guest's disk is stopped");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Compares a disk with the writes of the guest, which is stopped.
    pub(crate) fn check(&self, disk: &[u8]) {
        let rounds = self.rounds();
        let last = self.numbers(16, BLOCKS * 4);
        // The write of the unfinished round may be present or not.
        let under_way = (rounds.wrapping_mul(0x9e37_79b1) >> 20) as usize;
        for (block, number) in last.iter().enumerate() {
            let start = (FIRST_SECTOR + 8 * block) * 512;
            let content = &disk[start..start + 4096];
            let is =
                |part: &[u8], number: u32| part.chunks(4).all(|word| word == number.to_le_bytes());
            // Firmware may write its sectors one by one.
            let mut sectors = content.chunks(512);
            let may_be_next = block == under_way
                && sectors.all(|sector| is(sector, *number) || is(sector, rounds + 1));
            assert!(
                is(content, *number) || may_be_next,
                "block {block} is not {number}"
            );
        }
        assert_eq!(&disk[..512], BOOT_SECTOR);
    }
}
