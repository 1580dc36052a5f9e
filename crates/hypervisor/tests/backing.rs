//! Tests that unused parts of shared memory stay unallocated when it is read.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout
)]

mod common;
mod payload;

use common::{MACHINES, emulators};
use longhaul_hypervisor::memory::GuestMemory;
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use payload::{Payload, Qemu, Spec, main_block};
use std::fs;
use std::os::unix::fs::MetadataExt;

/// Returns the allocated size of a process's memory files, in bytes.
fn allocated(pid: i32) -> u64 {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let paths = files.map(|file| file.unwrap().path());
    let memory = paths.filter(|path| {
        let target = fs::read_link(path).unwrap_or_default();
        target.to_string_lossy().starts_with("/memfd:")
    });
    let files = memory.map(|path| fs::metadata(path).unwrap());
    files.map(|file| file.blocks() * 512).sum()
}

fn read_all(memory: &GuestMemory) -> Vec<u8> {
    let main = main_block(memory);
    let mut all = vec![1; memory.blocks()[main].used_bytes as usize];
    let blocks = memory.blocks()[main].blocks();
    memory
        .read(main, &[BlockRange::new(0, blocks)], &mut all)
        .unwrap();
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn reading_shared_memory_fills_no_holes() {
    for (label, path) in emulators() {
        let mut spec = Spec::new(&path, MACHINES[0], Payload::IDLE);
        spec.memory = "256M".to_owned();
        let backend = "memory-backend-memfd,id=pc.ram,size=256M,share=on";
        spec.more = ["-object", backend, "-machine", "memory-backend=pc.ram"]
            .map(str::to_owned)
            .to_vec();
        let source = Qemu::running(&spec).await;
        let memory = source.memory().await;
        let before = allocated(source.pid());
        assert!((40 << 20..200 << 20).contains(&before), "{label}: {before}");
        let content = read_all(&memory);
        assert_eq!(allocated(source.pid()), before, "{label}");
        let filled = &content[300 * BLOCK_SIZE..301 * BLOCK_SIZE];
        assert!(filled.iter().any(|byte| *byte != 0), "{label}: content");

        // A destination has the written blocks, and nothing else.
        let destination = Qemu::waiting(&spec).await;
        let there = destination.memory().await;
        let fresh = allocated(destination.pid());
        let main = main_block(&there);
        there
            .write(main, &[BlockRange::new(300, 1)], filled)
            .unwrap();
        let read = read_all(&there);
        assert_eq!(&read[300 * BLOCK_SIZE..301 * BLOCK_SIZE], filled);
        let grown = allocated(destination.pid()) - fresh;
        println!("{label}: {before} bytes of 256 MiB used; one page took {grown}");
        // A huge page at most.
        assert!(grown <= 2 << 20, "{label}: {grown}");
    }
}
