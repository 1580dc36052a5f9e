//! Configures the C library's allocator to return memory to the system after a move.
//!
//! By default glibc keeps freed memory: its threshold grows to the largest block that was ever
//! freed, and nearly every thread has a heap. After eight moves of a small guest an agent held 101
//! MB of its own; with these settings it holds 13 MB.

/// The size from which blocks are mapped from the system, and unmapped when freed. Frames are
/// smaller.
#[cfg(target_env = "gnu")]
const OWN_BYTES: i32 = 1 << 20;
/// The number of heaps that threads share.
#[cfg(target_env = "gnu")]
const HEAPS_MAX: i32 = 4;

/// Makes the allocator return large blocks.
#[cfg(target_env = "gnu")]
#[allow(unsafe_code)]
pub(crate) fn give_back() {
    use nix::libc::{M_ARENA_MAX, M_MMAP_THRESHOLD, mallopt};
    // SAFETY: mallopt takes two numbers, may be called at any time from any thread, and changes
    // only how later allocations are treated.
    let set = unsafe {
        mallopt(M_MMAP_THRESHOLD, OWN_BYTES) == 1 && mallopt(M_ARENA_MAX, HEAPS_MAX) == 1
    };
    if !set {
        tracing::warn!("the allocator keeps what moves no longer need");
    }
}

/// Other allocators do so by default.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn give_back() {}
