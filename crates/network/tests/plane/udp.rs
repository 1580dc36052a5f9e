//! A plain UDP socket with segmentation offloads, for two ends without QUIC.

use longhaul_network::plane::{Inbox, Outlet, SendError, Way};
use longhaul_paths::SocketId;
use longhaul_protocol::HostId;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg, setsockopt,
    sockopt,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

/// Datagrams that are received before what was merged is written.
const RECEIVES_AT_ONCE: usize = 32;
const BUFFER_BYTES: usize = 8 << 20;

/// A datagram, and where it goes.
pub(crate) type Tapped = (SocketAddr, Vec<u8>);

/// A socket, and what a test does to what it sends.
pub(crate) struct Udp {
    socket: RwLock<Arc<UdpSocket>>,
    /// Of this many datagrams one is lost; 0 for none.
    pub(crate) loses_one_of: AtomicU64,
    sent: AtomicU64,
    /// Copies of what is sent, if someone listens.
    pub(crate) tapped: Mutex<Option<Vec<Tapped>>>,
}

/// The address of a way.
pub(crate) fn address_of(way: &Way) -> SocketAddr {
    match way {
        Way::Direct { address, .. } => *address,
        Way::Relayed { .. } => panic!("there are no relays here"),
    }
}

/// The way to an address.
pub(crate) fn way_to(address: SocketAddr) -> Way {
    Way::Direct {
        socket: SocketId::MAIN,
        address,
    }
}

impl Udp {
    /// Binds in the network namespace of the calling thread.
    pub(crate) fn bind(address: SocketAddr) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            socket: RwLock::new(bind(address)?),
            loses_one_of: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            tapped: Mutex::new(None),
        }))
    }

    fn socket(&self) -> Arc<UdpSocket> {
        self.socket.read().unwrap().clone()
    }

    /// Goes on from another address, as behind a NAT that forgot.
    pub(crate) fn rebind(&self, address: SocketAddr) {
        *self.socket.write().unwrap() = bind(address).unwrap();
    }

    fn send_batch(&self, to: SocketAddr, datagrams: &[u8], stride: usize) -> io::Result<()> {
        let to = SockaddrStorage::from(to);
        let parts = [IoSlice::new(datagrams)];
        let size = stride as u16;
        let segments = [ControlMessage::UdpGsoSegments(&size)];
        let control = if datagrams.len() > stride {
            &segments[..]
        } else {
            &[]
        };
        let socket = self.socket();
        loop {
            let sent = sendmsg(
                socket.as_raw_fd(),
                &parts,
                control,
                MsgFlags::empty(),
                Some(&to),
            );
            match sent {
                Ok(_) => return Ok(()),
                Err(nix::errno::Errno::EAGAIN) => {
                    let mut files = [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)];
                    if poll(&mut files, PollTimeout::from(20u8))? == 0 {
                        return Err(io::ErrorKind::WouldBlock.into());
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends a datagram as it is.
    pub(crate) fn send_raw(&self, to: SocketAddr, datagram: &[u8]) {
        self.send_batch(to, datagram, datagram.len()).unwrap();
    }

    /// Sends what is not lost.
    fn send_some(&self, to: SocketAddr, datagrams: &[u8], stride: usize) -> io::Result<()> {
        let one_of = self.loses_one_of.load(Ordering::Relaxed);
        if one_of == 0 {
            return self.send_batch(to, datagrams, stride);
        }
        for datagram in datagrams.chunks(stride) {
            let number = self.sent.fetch_add(1, Ordering::Relaxed);
            if number % one_of != one_of - 1 {
                self.send_batch(to, datagram, stride)?;
            }
        }
        Ok(())
    }
}

/// What a plane sends by.
pub(crate) struct UdpOutlet(pub(crate) Arc<Udp>);

impl Outlet for UdpOutlet {
    fn send(&self, _: HostId, way: Way, datagrams: &[u8], stride: usize) -> Result<(), SendError> {
        if let Some(tapped) = self.0.tapped.lock().unwrap().as_mut() {
            let to = address_of(&way);
            tapped.extend(datagrams.chunks(stride).map(|one| (to, one.to_vec())));
        }
        let sent = self.0.send_some(address_of(&way), datagrams, stride);
        sent.map_err(|error| match error.raw_os_error() {
            Some(libc::EMSGSIZE) => SendError::TooLong(stride),
            _ if error.kind() == io::ErrorKind::WouldBlock => SendError::Full,
            _ => SendError::Other(error.to_string()),
        })
    }
}

fn bind(address: SocketAddr) -> io::Result<Arc<UdpSocket>> {
    let socket = UdpSocket::bind(address)?;
    setsockopt(&socket, sockopt::RcvBufForce, &BUFFER_BYTES)?;
    setsockopt(&socket, sockopt::SndBufForce, &BUFFER_BYTES)?;
    setsockopt(&socket, sockopt::UdpGroSegment, &true)?;
    do_not_fragment(&socket)?;
    socket.set_nonblocking(true)?;
    Ok(Arc::new(socket))
}

/// Lets a socket send without fragmentation, whatever it knows of the path's MTU.
#[allow(unsafe_code, reason = "nix has no IP_MTU_DISCOVER")]
fn do_not_fragment(socket: &UdpSocket) -> io::Result<()> {
    let (level, option) = match socket.local_addr()?.ip() {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
    };
    let value = libc::IP_PMTUDISC_PROBE;
    // SAFETY: the descriptor is open, and the value is an integer of the given length.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of_val(&value) as u32,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Gives what the socket receives to a plane, until the other end of `stop` is closed.
pub(crate) fn receive(udp: &Udp, mut inbox: Inbox, stop: &UnixStream) {
    let mut buffer = vec![0; 1 << 16];
    loop {
        let socket = udp.socket();
        let mut files = [
            PollFd::new(socket.as_fd(), PollFlags::POLLIN),
            PollFd::new(stop.as_fd(), PollFlags::POLLIN),
        ];
        // The socket may be another one by then.
        poll(&mut files, PollTimeout::from(100u8)).unwrap();
        if files[1].any() == Some(true) {
            return;
        }
        for _ in 0..RECEIVES_AT_ONCE {
            match receive_once(&socket, &mut buffer) {
                Ok((from, length, stride)) => {
                    inbox.take(way_to(from), &mut buffer[..length], stride);
                }
                Err(_) => break,
            }
        }
        inbox.flush();
    }
}

fn receive_once(socket: &UdpSocket, buffer: &mut [u8]) -> nix::Result<(SocketAddr, usize, usize)> {
    let mut space = nix::cmsg_space!(i32);
    let mut parts = [IoSliceMut::new(buffer)];
    let socket = socket.as_raw_fd();
    let flags = MsgFlags::empty();
    let received = recvmsg::<SockaddrStorage>(socket, &mut parts, Some(&mut space), flags)?;
    let mut stride = received.bytes;
    for message in received.cmsgs()? {
        if let ControlMessageOwned::UdpGroSegments(size) = message {
            stride = size as usize;
        }
    }
    let from = received.address.unwrap();
    let from = match (from.as_sockaddr_in(), from.as_sockaddr_in6()) {
        (Some(from), _) => SocketAddr::V4((*from).into()),
        (_, Some(from)) => SocketAddr::V6((*from).into()),
        _ => panic!("an address of another family"),
    };
    Ok((from, received.bytes, stride.max(1)))
}
