//! Opens TAP interfaces in the network namespace of the calling thread.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;

use nix::libc;

use crate::error::{During, LabError};

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

/// Opens a TAP, and creates it if it is not there: then it lives as long as the file. `flags` are
/// added to those of a TAP without packet information.
///
/// # Errors
/// When the kernel refuses.
pub fn open(interface: &str, flags: libc::c_int) -> Result<File, LabError> {
    let tap = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .during(|| "open /dev/net/tun (hint: modprobe tun)".to_owned())?;
    attach(&tap, interface, flags).during(|| format!("make the TAP {interface}"))?;
    Ok(tap)
}

fn attach(tap: &File, interface: &str, flags: libc::c_int) -> io::Result<()> {
    let mut request = InterfaceRequest {
        name: [0; 16],
        flags: (libc::IFF_TAP | libc::IFF_NO_PI | flags) as i16,
        unused: [0; 22],
    };
    let name = interface.as_bytes();
    if name.len() >= request.name.len() {
        return Err(io::Error::other("the interface's name is too long"));
    }
    request.name[..name.len()].copy_from_slice(name);
    #[expect(unsafe_code, reason = "there is no safe wrapper of TUNSETIFF")]
    // SAFETY: the descriptor is open, and the request is a whole, initialised ifreq (40 bytes) that
    // outlives the call; the kernel writes nothing beyond it.
    unsafe {
        tun_set_interface(tap.as_raw_fd(), &raw const request)?;
    }
    Ok(())
}
