//! Keeps the Ethernet frames that come for a stopped guest, and gives them to its card at the
//! destination.
//!
//! A stopped QEMU does not read its TAP devices. What comes for the guest meanwhile is lost with
//! the QEMU at the source. TCP repeats it only after a time-out that grows with the downtime, so a
//! connection would pause for longer than the guest did. A packet socket on each TAP device gets a
//! copy of what the device is given. The kernel counts what QEMU has read, so nothing is delivered
//! twice.
//!
//! Frames have the kernel's virtio header: long ones (segmentation offload) stay whole, and
//! checksums may be partial.

use longhaul_protocol::held_frames::{
    FRAME_BYTES_MAX, FRAMES_MAX, HEADER_BYTES, HeldFrame, HeldFrames, TOTAL_BYTES_MAX,
};
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socket};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;

/// How much the kernel keeps for one device, in bytes. Its books count more than a frame's length.
const BUFFER_BYTES: libc::c_int = 8 << 20;
/// From `linux/if_packet.h`.
const PACKET_VNET_HDR: libc::c_int = 15;
const PACKET_OUTGOING: u32 = 4;
/// From `linux/filter.h`: load a word, jump if equal, return a constant.
const LOAD: u16 = 0x20;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;

/// The frames that come for the cards of one guest.
#[derive(Debug)]
pub struct Capture {
    cards: Vec<Card>,
    left_bytes: usize,
    dropped: u64,
}

#[derive(Debug)]
struct Card {
    number: u16,
    device: String,
    socket: OwnedFd,
    /// What QEMU had read when the capture began.
    read_before: u64,
    /// What QEMU has read since and the socket has a copy of.
    skip: u64,
}

impl Capture {
    /// Begins to keep frames for these TAP devices, by the cards' numbers. Needs CAP_NET_RAW.
    pub fn begin(devices: &BTreeMap<usize, String>) -> io::Result<Self> {
        let cards = devices.iter().map(|(number, device)| {
            // In this order a frame is rather lost than delivered twice.
            let read_before = frames_read(device)?;
            Ok(Card {
                number: u16::try_from(*number).map_err(io::Error::other)?,
                socket: open(device, Direction::ToGuest)?,
                device: device.clone(),
                read_before,
                skip: 0,
            })
        });
        Ok(Self {
            cards: cards.collect::<io::Result<_>>()?,
            left_bytes: TOTAL_BYTES_MAX,
            dropped: 0,
        })
    }

    /// Notes that the guest is stopped: what its QEMU has read until now is not kept.
    pub fn stopped(&mut self) -> io::Result<()> {
        for card in &mut self.cards {
            card.skip = frames_read(&card.device)?.saturating_sub(card.read_before);
        }
        Ok(())
    }

    /// Returns what has come since the last call, as much as one message may have; nothing if
    /// nothing has come. In all, [`TOTAL_BYTES_MAX`] are kept, the earliest.
    pub fn take(&mut self) -> io::Result<HeldFrames> {
        let mut held = HeldFrames::default();
        let mut buffer = vec![0; HEADER_BYTES + FRAME_BYTES_MAX + 1];
        for card in &mut self.cards {
            while held.frames.len() < FRAMES_MAX {
                let length = match recv(card.socket.as_raw_fd(), &mut buffer, MsgFlags::MSG_TRUNC) {
                    Ok(length) => length,
                    Err(Errno::EAGAIN) => break,
                    Err(Errno::EINTR) => continue,
                    Err(error) => return Err(error.into()),
                };
                if card.skip > 0 {
                    card.skip -= 1;
                    continue;
                }
                let frame = buffer
                    .get(..length)
                    .and_then(|bytes| bytes.split_first_chunk());
                match frame {
                    Some((header, bytes))
                        if bytes.len() <= FRAME_BYTES_MAX.min(self.left_bytes) =>
                    {
                        self.left_bytes -= bytes.len();
                        held.frames.push(HeldFrame {
                            card: card.number,
                            header: *header,
                            bytes: bytes.to_vec(),
                        });
                    }
                    _ => self.dropped += 1,
                }
            }
        }
        Ok(held)
    }

    /// Returns the number of frames that were too many or too long.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }
}

/// Gives frames to a guest's TAP devices, by the cards' numbers. Returns how many the kernel took.
pub fn deliver(devices: &BTreeMap<usize, String>, held: &HeldFrames) -> io::Result<usize> {
    let mut sockets: BTreeMap<u16, OwnedFd> = BTreeMap::new();
    for (number, device) in devices {
        let number = u16::try_from(*number).map_err(io::Error::other)?;
        if held.frames.iter().any(|frame| frame.card == number) {
            sockets.insert(number, open(device, Direction::Nothing)?);
        }
    }
    let mut delivered = 0;
    for frame in &held.frames {
        let Some(socket) = sockets.get(&frame.card) else {
            continue;
        };
        let whole = [&frame.header[..], &frame.bytes].concat();
        match send(socket.as_raw_fd(), &whole, MsgFlags::empty()) {
            Ok(_) => delivered += 1,
            // The queue is full; or the header is none. A network may lose any frame.
            Err(Errno::ENOBUFS | Errno::EAGAIN | Errno::EINVAL | Errno::EMSGSIZE) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(delivered)
}

/// Returns how many frames the owner of a TAP device has read.
fn frames_read(device: &str) -> io::Result<u64> {
    let path = Path::new("/sys/class/net")
        .join(device)
        .join("statistics/tx_packets");
    let text = fs::read_to_string(path)?;
    text.trim().parse().map_err(io::Error::other)
}

/// What a packet socket receives.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    /// What a TAP device is given: to Linux these frames are outgoing.
    ToGuest,
    Nothing,
}

/// Opens a packet socket on a device.
fn open(device: &str, direction: Direction) -> io::Result<OwnedFd> {
    let index = nix::net::if_::if_nametoindex(device)?;
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    // Without a protocol it receives nothing before it is bound to the device.
    let socket = socket(AddressFamily::Packet, SockType::Raw, flags, None)?;
    let fd = socket.as_raw_fd();
    set(fd, libc::SOL_PACKET, PACKET_VNET_HDR, &1i32)?;
    let protocol = match direction {
        Direction::ToGuest => {
            attach_filter(fd)?;
            // Beyond the system's limit only with CAP_NET_ADMIN.
            if set(fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &BUFFER_BYTES).is_err() {
                set(fd, libc::SOL_SOCKET, libc::SO_RCVBUF, &BUFFER_BYTES)?;
            }
            (libc::ETH_P_ALL as u16).to_be()
        }
        Direction::Nothing => 0,
    };
    bind(fd, index, protocol)?;
    Ok(socket)
}

/// Lets a packet socket receive only what its device is given to send.
fn attach_filter(fd: RawFd) -> io::Result<()> {
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let packet_type = (libc::SKF_AD_OFF + libc::SKF_AD_PKTTYPE) as u32;
    let mut filter = [
        step(LOAD, 0, 0, packet_type),
        step(JUMP_IF_EQUAL, 0, 1, PACKET_OUTGOING),
        step(RETURN, 0, 0, u32::MAX),
        step(RETURN, 0, 0, 0),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    set(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
}

fn set<T>(fd: RawFd, level: libc::c_int, name: libc::c_int, value: &T) -> io::Result<()> {
    let length = size_of::<T>() as libc::socklen_t;
    #[expect(
        unsafe_code,
        reason = "nix does not have these options of packet sockets"
    )]
    // SAFETY: the descriptor is open; the value is whole, of the length that is passed, and
    // outlives the call, as does the filter that it may point to.
    let result = unsafe { libc::setsockopt(fd, level, name, (&raw const *value).cast(), length) };
    Errno::result(result)?;
    Ok(())
}

fn bind(fd: RawFd, index: libc::c_uint, protocol: u16) -> io::Result<()> {
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: protocol,
        sll_ifindex: libc::c_int::try_from(index).map_err(io::Error::other)?,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    #[expect(
        unsafe_code,
        reason = "nix has no way to name a device for a packet socket"
    )]
    // SAFETY: the descriptor is open, and the address is whole and outlives the call.
    let result = unsafe { libc::bind(fd, (&raw const address).cast(), length) };
    Errno::result(result)?;
    Ok(())
}
