//! The laboratory's guests.

pub mod cpio;
pub mod initramfs;
