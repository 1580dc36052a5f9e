//! Creates the UDP socket, with buffers for the rates of a migration.

use nix::sys::socket::{setsockopt, sockopt};
use std::io;
use std::net::{SocketAddr, UdpSocket};

/// The buffer size in each direction, in bytes.
const BUFFER_BYTES: usize = 8 << 20;

pub(super) fn bind(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(address)?;
    // Beyond the system's limit only with CAP_NET_ADMIN; else as much as the limit allows.
    if setsockopt(&socket, sockopt::RcvBufForce, &BUFFER_BYTES).is_err() {
        setsockopt(&socket, sockopt::RcvBuf, &BUFFER_BYTES)?;
    }
    if setsockopt(&socket, sockopt::SndBufForce, &BUFFER_BYTES).is_err() {
        setsockopt(&socket, sockopt::SndBuf, &BUFFER_BYTES)?;
    }
    Ok(socket)
}
