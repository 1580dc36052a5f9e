//! Opens a TAP device that carries super-frames, reads and writes frames with virtio headers, and
//! does without the offloads that the kernel does not have or does wrong.

use longhaul_overlay::offload::{
    Checksums, Gso, Offloads, SCRATCH_BYTES, VIRTIO_BYTES, VirtioHeader, finish,
};
use nix::libc;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

const DEVICE: &str = "/dev/net/tun";
/// The longest name of an interface.
pub(super) const NAME_BYTES_MAX: usize = 15;
/// Refused writes with one offload, without a success between them, after which it is switched
/// off.
const REFUSED_MAX: u32 = 8;
/// Bytes that may be on their way from the TAP into the kernel. More are dropped.
const QUEUE_BYTES: libc::c_int = 8 << 20;

const CHECKSUM: u8 = 1;
const TCP4: u8 = 2;
const TCP6: u8 = 4;
const ECN: u8 = 8;
/// `TUN_F_USO4` and `TUN_F_USO6` (Linux 6.2 and later).
const UDP: u8 = 0x60;

/// The kernel's `struct ifreq`, as far as TUNSETIFF reads it.
#[repr(C)]
struct InterfaceRequest {
    name: [u8; 16],
    flags: i16,
    unused: [u8; 22],
}

nix::ioctl_write_ptr_bad!(
    /// Creates or opens the requested interface.
    tun_set_interface,
    nix::request_code_write!(b'T', 202, size_of::<libc::c_int>()),
    InterfaceRequest
);
nix::ioctl_write_int_bad!(
    /// Says what frames with a virtio header the reader takes.
    tun_set_offload,
    nix::request_code_write!(b'T', 208, size_of::<libc::c_uint>())
);
nix::ioctl_write_ptr_bad!(
    /// Sets the bytes that may be on their way into the kernel.
    tun_set_send_buffer,
    nix::request_code_write!(b'T', 212, size_of::<libc::c_int>()),
    libc::c_int
);
nix::ioctl_write_ptr_bad!(
    /// Sets the length of virtio headers.
    tun_set_header_bytes,
    nix::request_code_write!(b'T', 216, size_of::<libc::c_int>()),
    libc::c_int
);
nix::ioctl_write_ptr_bad!(
    /// Makes virtio headers little-endian.
    tun_set_little_endian,
    nix::request_code_write!(b'T', 220, size_of::<libc::c_int>()),
    libc::c_int
);

/// Why there is no TAP device.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The device cannot be opened.
    #[error("cannot open {DEVICE}: {0}; load the module tun, and run as root")]
    NoDevice(io::Error),
    /// The name is empty, too long, or has characters that no interface has.
    #[error("{0:?} is no name of an interface; use 1 to {NAME_BYTES_MAX} characters")]
    Name(String),
    /// The kernel refuses.
    #[error("cannot make the TAP device {name}: {error}")]
    Refused {
        /// Its name.
        name: String,
        /// The system's error.
        error: io::Error,
    },
}

/// What a TAP device counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TapCounters {
    /// Frames and super-frames that were read.
    pub read: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Frames that were read with a virtio header that means nothing here, and dropped.
    pub malformed: u64,
    /// Frames and super-frames that were written.
    pub written: u64,
    /// Their bytes.
    pub written_bytes: u64,
    /// Frames that were dropped because the queue into the kernel is full.
    pub full: u64,
    /// Frames that the kernel refused in every form, or while the device was down.
    pub refused: u64,
    /// Frames that were cut, or whose checksum was completed, in software.
    pub in_software: u64,
    /// Offloads that were switched off because the kernel refused frames with them.
    pub switched_off: u64,
}

#[derive(Debug, Default)]
struct Counters {
    read: AtomicU64,
    read_bytes: AtomicU64,
    malformed: AtomicU64,
    written: AtomicU64,
    written_bytes: AtomicU64,
    full: AtomicU64,
    refused: AtomicU64,
    in_software: AtomicU64,
    switched_off: AtomicU64,
}

fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

/// A TAP device. It exists as long as this value.
#[derive(Debug)]
pub struct Tap {
    file: File,
    name: String,
    offloads: AtomicU8,
    /// Refused writes in a row, by kind: checksum, TCP over IPv4, TCP over IPv6, UDP.
    refused: [AtomicU32; 4],
    counters: Counters,
}

/// What became of a frame.
enum Written {
    Done,
    /// The kernel does not take frames of this kind.
    Refused,
    /// It cannot be written now.
    Dropped,
}

impl Tap {
    /// Makes a TAP device in the network namespace of the calling thread, with the wanted offloads
    /// as far as the kernel has them. It is not up.
    pub fn open(name: &str, wanted: Offloads) -> Result<Self, TapError> {
        let fits = (1..=NAME_BYTES_MAX).contains(&name.len());
        let bad = |c: char| c == '/' || c.is_whitespace() || c.is_control();
        if !fits || name.contains(bad) || name.starts_with('.') || name.contains('%') {
            return Err(TapError::Name(name.to_owned()));
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(DEVICE)
            .map_err(TapError::NoDevice)?;
        let offloads = set_up(&file, name, bits(wanted)).map_err(|error| TapError::Refused {
            name: name.to_owned(),
            error,
        })?;
        Ok(Self {
            file,
            name: name.to_owned(),
            offloads: AtomicU8::new(offloads),
            refused: Default::default(),
            counters: Counters::default(),
        })
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the offloads that are in use.
    pub fn offloads(&self) -> Offloads {
        of_bits(self.offloads.load(Ordering::Relaxed))
    }

    /// Returns what was counted.
    pub fn counters(&self) -> TapCounters {
        let counters = &self.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TapCounters {
            read: get(&counters.read),
            read_bytes: get(&counters.read_bytes),
            malformed: get(&counters.malformed),
            written: get(&counters.written),
            written_bytes: get(&counters.written_bytes),
            full: get(&counters.full),
            refused: get(&counters.refused),
            in_software: get(&counters.in_software),
            switched_off: get(&counters.switched_off),
        }
    }

    /// Reads the next frame into `buffer`. Returns it with its header; `None` if it was dropped,
    /// which is counted. Does not wait: without a frame the error is `WouldBlock`.
    pub fn read<'a>(&self, buffer: &'a mut [u8]) -> io::Result<Option<(VirtioHeader, &'a [u8])>> {
        let length = (&self.file).read(buffer)?;
        add(&self.counters.read, 1);
        add(&self.counters.read_bytes, length as u64);
        let frame = VirtioHeader::split(buffer.get(..length).unwrap_or_default());
        if frame.is_err() {
            add(&self.counters.malformed, 1);
        }
        Ok(frame.ok())
    }

    /// Writes a frame, in software form if the kernel does not take it as it is. A frame that
    /// cannot be written now is dropped and counted. Returns the offloads that are in use from now
    /// on, if one was switched off.
    pub fn write(
        &self,
        virtio: &VirtioHeader,
        frame: &[u8],
        scratch: &mut Vec<u8>,
    ) -> Option<Offloads> {
        let mut off = None;
        if self.offloads().take(virtio) {
            match self.write_as_it_is(virtio, frame) {
                Written::Done => {
                    self.succeeded(virtio);
                    return None;
                }
                Written::Dropped => return None,
                Written::Refused => off = self.failed(virtio),
            }
        }
        self.write_in_software(virtio, frame, scratch);
        off
    }

    fn write_in_software(&self, virtio: &VirtioHeader, frame: &[u8], scratch: &mut Vec<u8>) {
        add(&self.counters.in_software, 1);
        scratch.resize(SCRATCH_BYTES, 0);
        let checksums = match self.offloads().checksum {
            true => Checksums::Partial,
            false => Checksums::Complete,
        };
        let finished = finish(*virtio, frame, checksums, scratch, |virtio, frame| {
            if let Written::Refused = self.write_as_it_is(virtio, frame) {
                add(&self.counters.refused, 1);
            }
        });
        if finished.is_err() {
            add(&self.counters.refused, 1);
        }
    }

    #[inline]
    fn write_as_it_is(&self, virtio: &VirtioHeader, frame: &[u8]) -> Written {
        let head = virtio.to_bytes();
        let parts = [IoSlice::new(&head), IoSlice::new(frame)];
        match (&self.file).write_vectored(&parts) {
            Ok(_) => {
                add(&self.counters.written, 1);
                add(&self.counters.written_bytes, frame.len() as u64);
                Written::Done
            }
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Written::Refused,
            Err(error) => {
                let full = error.kind() == io::ErrorKind::WouldBlock;
                let counters = &self.counters;
                add(
                    if full {
                        &counters.full
                    } else {
                        &counters.refused
                    },
                    1,
                );
                Written::Dropped
            }
        }
    }

    fn kind(&self, virtio: &VirtioHeader) -> Option<(&AtomicU32, u8)> {
        let [checksum, tcp4, tcp6, udp] = &self.refused;
        Some(match virtio.gso {
            Gso::Tcp4 => (tcp4, TCP4),
            Gso::Tcp6 => (tcp6, TCP6),
            Gso::Udp => (udp, UDP),
            Gso::None if virtio.needs_checksum => (checksum, CHECKSUM),
            Gso::None => return None,
        })
    }

    #[inline]
    fn succeeded(&self, virtio: &VirtioHeader) {
        if let Some((refused, _)) = self.kind(virtio)
            && refused.load(Ordering::Relaxed) != 0
        {
            refused.store(0, Ordering::Relaxed);
        }
    }

    fn failed(&self, virtio: &VirtioHeader) -> Option<Offloads> {
        let (refused, offload) = self.kind(virtio)?;
        if refused.fetch_add(1, Ordering::Relaxed) + 1 < REFUSED_MAX {
            return None;
        }
        self.switch_off(offload)
    }

    /// Switches offloads off. Returns what is in use from now on, if anything has changed.
    fn switch_off(&self, offload: u8) -> Option<Offloads> {
        let before = self.offloads.load(Ordering::Relaxed);
        let mut after = before & !offload;
        if after & CHECKSUM == 0 {
            // The kernel knows no segmentation without checksums.
            after = 0;
        }
        if after == before {
            return None;
        }
        add(&self.counters.switched_off, 1);
        // The kernel stops making such frames; if it refuses that, they are read nevertheless.
        let after = negotiate(&self.file, after).unwrap_or(after);
        self.offloads.store(after, Ordering::Relaxed);
        Some(of_bits(after))
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn bits(offloads: Offloads) -> u8 {
    let bit = |on: bool, bit: u8| if on { bit } else { 0 };
    if !offloads.checksum {
        return 0;
    }
    let tcp = offloads.tcp4 || offloads.tcp6;
    CHECKSUM
        | bit(offloads.tcp4, TCP4)
        | bit(offloads.tcp6, TCP6)
        | bit(offloads.ecn && tcp, ECN)
        | bit(offloads.udp, UDP)
}

fn of_bits(bits: u8) -> Offloads {
    Offloads {
        checksum: bits & CHECKSUM != 0,
        tcp4: bits & TCP4 != 0,
        tcp6: bits & TCP6 != 0,
        ecn: bits & ECN != 0,
        udp: bits & UDP != 0,
    }
}

/// Attaches a file to a new interface. Returns the offloads that the kernel has.
fn set_up(file: &File, name: &str, wanted: u8) -> io::Result<u8> {
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_TUN_EXCL;
    let mut request = InterfaceRequest {
        name: [0; 16],
        flags: flags as i16,
        unused: [0; 22],
    };
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    let (header_bytes, little_endian) = (VIRTIO_BYTES as libc::c_int, 1);
    let queue_bytes = QUEUE_BYTES;
    let device = file.as_raw_fd();
    #[expect(
        unsafe_code,
        reason = "there are no safe wrappers of TUNSETIFF and its siblings"
    )]
    // SAFETY: the descriptor is open. Each argument is initialised and outlives its call: a whole
    // ifreq (40 bytes), and integers. The kernel writes nothing beyond them.
    unsafe {
        tun_set_interface(device, &raw const request)?;
        tun_set_header_bytes(device, &raw const header_bytes)?;
        tun_set_little_endian(device, &raw const little_endian)?;
        tun_set_send_buffer(device, &raw const queue_bytes)?;
    }
    negotiate(file, wanted)
}

/// Switches offloads on, as far as the kernel has them. Returns which it has.
fn negotiate(file: &File, wanted: u8) -> io::Result<u8> {
    let mut refused = None;
    for without in [0, UDP, UDP | ECN, UDP | ECN | TCP4 | TCP6, u8::MAX] {
        let offloads = wanted & !without;
        #[expect(unsafe_code, reason = "there is no safe wrapper of TUNSETOFFLOAD")]
        // SAFETY: the descriptor is open, and the argument is a number.
        let set = unsafe { tun_set_offload(file.as_raw_fd(), libc::c_int::from(offloads)) };
        match set {
            Ok(_) => return Ok(offloads),
            Err(error) => refused = Some(error),
        }
    }
    Err(refused.map_or_else(|| io::Error::other("no offloads"), io::Error::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Offloads = Offloads {
        checksum: true,
        tcp4: true,
        tcp6: true,
        ecn: true,
        udp: true,
    };

    #[test]
    fn offloads_are_bits_of_the_kernel() {
        assert_eq!(bits(ALL), 0x6f);
        assert_eq!(of_bits(0x6f), ALL);
        assert_eq!(of_bits(0), Offloads::default());
        let no_checksum = Offloads {
            checksum: false,
            ..ALL
        };
        assert_eq!(bits(no_checksum), 0, "nothing without checksums");
        let no_tcp = Offloads {
            tcp4: false,
            tcp6: false,
            ..ALL
        };
        assert_eq!(bits(no_tcp), 0x61, "no ECN without TCP");
    }

    #[test]
    fn names_are_checked_before_the_kernel_sees_them() {
        for name in ["", "a/b", "sixteen-letters-", "a b", "..", "tap%d"] {
            let error = Tap::open(name, ALL).unwrap_err();
            assert!(matches!(error, TapError::Name(_)), "{name}: {error}");
        }
    }
}
