//! The constants of the stream: marks, flags and commands, by QEMU's names.

/// Bytes in a page of the guest, the unit of the stream's records.
pub const PAGE_SIZE: usize = 4096;
/// The content of one page.
pub type Page = [u8; PAGE_SIZE];

pub(crate) const MAGIC: u32 = 0x5145_564d;
pub(crate) const VERSION: u32 = 3;

pub(crate) mod mark {
    pub(crate) const EOF: u8 = 0x00;
    pub(crate) const SECTION_START: u8 = 0x01;
    pub(crate) const SECTION_PART: u8 = 0x02;
    pub(crate) const SECTION_END: u8 = 0x03;
    pub(crate) const SECTION_FULL: u8 = 0x04;
    pub(crate) const SUBSECTION: u8 = 0x05;
    pub(crate) const VMDESCRIPTION: u8 = 0x06;
    pub(crate) const CONFIGURATION: u8 = 0x07;
    pub(crate) const COMMAND: u8 = 0x08;
    pub(crate) const SECTION_FOOTER: u8 = 0x7e;
}

pub(crate) mod command {
    pub(crate) const OPEN_RETURN_PATH: u16 = 1;
    pub(crate) const PING: u16 = 2;
    pub(crate) const POSTCOPY_ADVISE: u16 = 3;
    pub(crate) const POSTCOPY_LISTEN: u16 = 4;
    pub(crate) const POSTCOPY_RUN: u16 = 5;
    pub(crate) const POSTCOPY_RAM_DISCARD: u16 = 6;
    pub(crate) const PACKAGED: u16 = 7;
    pub(crate) const POSTCOPY_RESUME: u16 = 9;
    pub(crate) const RECV_BITMAP: u16 = 10;
    pub(crate) const SWITCHOVER_START: u16 = 11;
}

/// Flags in the low bits of a RAM record's address.
pub(crate) mod flag {
    pub(crate) const ZERO: u64 = 0x02;
    pub(crate) const MEM_SIZE: u64 = 0x04;
    pub(crate) const PAGE: u64 = 0x08;
    pub(crate) const EOS: u64 = 0x10;
    pub(crate) const CONTINUE: u64 = 0x20;
    pub(crate) const XBZRLE: u64 = 0x40;
    pub(crate) const HOOK: u64 = 0x80;
    pub(crate) const COMPRESS_PAGE: u64 = 0x100;
    pub(crate) const MULTIFD_FLUSH: u64 = 0x200;
    pub(crate) const ALL: u64 = 0xfff;
}

/// The form of a list of discarded pages.
pub(crate) const DISCARD_VERSION: u8 = 0;
/// The most ranges that QEMU takes in one list.
pub(crate) const DISCARDS_MAX: usize = 12;

/// The version of section `ram` that 7.2 and 10.0 write.
pub(crate) const RAM_VERSION: u32 = 4;
/// The name of the only iterable section that is supported.
pub(crate) const RAM: &str = "ram";
