//! Wraps the kernel calls that the standard library does not offer.

use std::ffi::{CString, c_char, c_int, c_long, c_ulong, c_void};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

const FINIT_MODULE: c_long = 313;
const MODULE_INIT_COMPRESSED_FILE: c_int = 4;

/// Flag of `open` that makes reads and writes non-blocking.
pub(crate) const O_NONBLOCK: i32 = 0o4000;

#[expect(unsafe_code, reason = "declares functions of the C library")]
// SAFETY: the signatures are those of the C library on 64-bit Linux.
unsafe extern "C" {
    #[link_name = "mount"]
    fn c_mount(
        source: *const c_char,
        target: *const c_char,
        kind: *const c_char,
        flags: c_ulong,
        data: *const c_void,
    ) -> c_int;
    fn syscall(number: c_long, ...) -> c_long;
    fn ioctl(file: c_int, request: c_ulong, ...) -> c_int;
}

/// Mounts a file system: from a device, or one without, such as `proc`.
pub(crate) fn mount(source: &str, target: &str, kind: &str) -> io::Result<()> {
    let source = CString::new(source)?;
    let (target, kind) = (CString::new(target)?, CString::new(kind)?);
    #[expect(unsafe_code, reason = "the standard library has no mount")]
    // SAFETY: the strings end in NUL and outlive the call; no data is passed.
    let result = unsafe {
        c_mount(
            source.as_ptr(),
            target.as_ptr(),
            kind.as_ptr(),
            0,
            std::ptr::null(),
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Loads a kernel module from a file, compressed or not.
pub(crate) fn load_module(file: &File, compressed: bool) -> io::Result<()> {
    let flags = if compressed {
        MODULE_INIT_COMPRESSED_FILE
    } else {
        0
    };
    #[expect(unsafe_code, reason = "the standard library has no finit_module")]
    // SAFETY: the descriptor is open, the parameters are an empty string that ends in NUL.
    let result = unsafe { syscall(FINIT_MODULE, file.as_raw_fd(), c"".as_ptr(), flags) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// A route: `struct rtentry`, which begins with a padding of a word.
#[repr(C)]
pub(crate) struct RouteRequest {
    padding: u64,
    /// `struct sockaddr` each.
    to: [u8; 16],
    gateway: [u8; 16],
    mask: [u8; 16],
    flags: u16,
    /// The metric, the device and limits: none.
    rest: [u8; 62],
}

impl RouteRequest {
    /// Returns a default route through a gateway, of which all addresses are written out.
    pub(crate) fn new(anywhere: [u8; 16], gateway: [u8; 16], flags: u16) -> Self {
        Self {
            padding: 0,
            to: anywhere,
            gateway,
            mask: anywhere,
            flags,
            rest: [0; 62],
        }
    }

    /// Lets the kernel add it.
    pub(crate) fn carry_out(&self, socket: &impl AsRawFd, number: c_ulong) -> io::Result<()> {
        #[expect(unsafe_code, reason = "the standard library has no ioctl")]
        // SAFETY: the descriptor is open, and the request is a whole rtentry (120 bytes), which the
        // kernel only reads; its pointer to the name of a device is null.
        let result = unsafe { ioctl(socket.as_raw_fd(), number, &raw const *self) };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

/// A network interface, and what is asked or set of it: `struct ifreq`.
#[repr(C)]
pub(crate) struct InterfaceRequest {
    name: [u8; 16],
    value: [u8; 24],
}

impl InterfaceRequest {
    /// Returns a request about an interface, with a name of at most 15 bytes.
    pub(crate) fn new(name: &str, value: &[u8]) -> Self {
        let mut request = Self {
            name: [0; 16],
            value: [0; 24],
        };
        let length = name.len().min(15);
        request.name[..length].copy_from_slice(&name.as_bytes()[..length]);
        request.value[..value.len()].copy_from_slice(value);
        request
    }

    /// Lets the kernel carry it out.
    pub(crate) fn carry_out(&self, socket: &impl AsRawFd, number: c_ulong) -> io::Result<()> {
        #[expect(unsafe_code, reason = "the standard library has no ioctl")]
        // SAFETY: the descriptor is open, and the request is a whole ifreq (40 bytes), which the
        // requests of `net` only read.
        let result = unsafe { ioctl(socket.as_raw_fd(), number, &raw const *self) };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}
