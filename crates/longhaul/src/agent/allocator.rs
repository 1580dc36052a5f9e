//! The C library's allocator: what a move no longer needs goes back to the system.
//!
//! By itself glibc keeps what was freed once: it takes the largest block that was ever given back for a
//! usual size, and has a heap for nearly every thread. After eight moves of a small guest an agent held
//! 101 MB of its own, and holds 13 MB so.

/// Blocks from this size on are the system's own, and go back to it at once. Frames are smaller.
#[cfg(target_env = "gnu")]
const OWN_BYTES: i32 = 1 << 20;
/// Heaps that threads share.
#[cfg(target_env = "gnu")]
const HEAPS_MAX: i32 = 4;

/// Lets the allocator give back what is large.
#[cfg(target_env = "gnu")]
#[allow(unsafe_code)]
pub(crate) fn give_back() {
    use nix::libc::{M_ARENA_MAX, M_MMAP_THRESHOLD, mallopt};
    // SAFETY: mallopt takes two numbers, may be called at any time from any thread, and changes only how
    // the allocator treats what is allocated from then on.
    let set = unsafe {
        mallopt(M_MMAP_THRESHOLD, OWN_BYTES) == 1 && mallopt(M_ARENA_MAX, HEAPS_MAX) == 1
    };
    if !set {
        tracing::warn!("the allocator keeps what moves no longer need");
    }
}

/// Other allocators do so by themselves.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn give_back() {}
