//! Tests that frames for a stopped guest are kept and delivered once, with real TAP devices.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

use longhaul_hypervisor::held_frames::{Capture, deliver};
use longhaul_protocol::held_frames::{HeldFrame, HeldFrames, TOTAL_BYTES_MAX};
use nix::fcntl::OFlag;
use nix::libc;
use nix::sched::{CloneFlags, unshare};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::Command;

nix::ioctl_write_ptr_bad!(
    /// Creates the requested interface.
    set_interface,
    libc::TUNSETIFF,
    libc::ifreq
);

const GUEST: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
const OTHER: [u8; 6] = [0x52, 0x54, 0, 0, 0, 2];

/// A TAP device, and its queue as QEMU has it.
struct Tap(File);

impl Tap {
    fn new(name: &str) -> Self {
        let mut options = File::options();
        options.read(true).write(true);
        options.custom_flags(OFlag::O_NONBLOCK.bits());
        let file = options.open("/dev/net/tun").unwrap();
        #[allow(unsafe_code)]
        // SAFETY: the request is a whole, zeroed ifreq that outlives the call.
        unsafe {
            let mut request: libc::ifreq = std::mem::zeroed();
            for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
                *place = byte as libc::c_char;
            }
            request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as i16;
            set_interface(file.as_raw_fd(), &raw const request).unwrap();
        }
        run("ip", &["link", "set", "dev", name, "up"]);
        Self(file)
    }

    /// Returns the frames in the queue that a test has sent.
    fn read_all(&mut self) -> Vec<u32> {
        let mut buffer = [0; 2048];
        let mut numbers = Vec::new();
        while let Ok(length) = self.0.read(&mut buffer) {
            numbers.extend(number_of(&buffer[..length]));
        }
        numbers
    }
}

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().unwrap();
    assert!(status.success());
}

fn frame(to: [u8; 6], from: [u8; 6], number: u32) -> Vec<u8> {
    let mut frame = [&to[..], &from[..], &[0x88, 0xb5]].concat();
    frame.extend(number.to_le_bytes());
    frame.resize(60, 0);
    frame
}

/// Returns the number of a frame of this test; the kernel sends others.
fn number_of(frame: &[u8]) -> Option<u32> {
    let number = frame.get(14..18)?.try_into().ok()?;
    (frame[12..14] == [0x88, 0xb5]).then(|| u32::from_le_bytes(number))
}

fn held(card: u16, number: u32) -> HeldFrame {
    HeldFrame {
        card,
        header: [0; 10],
        bytes: frame(GUEST, OTHER, number),
    }
}

fn numbers(held: &HeldFrames) -> Vec<u32> {
    let frames = held.frames.iter();
    frames.filter_map(|frame| number_of(&frame.bytes)).collect()
}

/// Sends frames to a device, as a bridge does.
fn send(devices: &BTreeMap<usize, String>, numbers: std::ops::Range<u32>) {
    let frames = numbers.map(|number| held(0, number)).collect();
    let held = HeldFrames { frames };
    assert_eq!(deliver(devices, &held).unwrap(), held.frames.len());
}

#[test]
fn frames_are_delivered_once_and_only_to_the_guests_cards() {
    // /sys shows the network devices of the namespace that it was mounted in.
    if let Err(error) = unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS) {
        let required = std::env::var("LONGHAUL_LAB_REQUIRE_ALL").is_ok_and(|value| value != "0");
        assert!(!required, "{error}");
        eprintln!("SKIPPED: needs root: {error}");
        return;
    }
    run("mount", &["--make-rprivate", "/"]);
    run("mount", &["-t", "sysfs", "sysfs", "/sys"]);
    // The kernel itself would send on them: IPv6 looks for routers and groups, at any time. Without
    // IPv6 there is no such file.
    let _ = std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1");
    let mut source = Tap::new("source0");
    let mut destination = Tap::new("dest0");
    let at_source = BTreeMap::from([(0, "source0".to_owned())]);
    let at_destination = BTreeMap::from([(0, "dest0".to_owned())]);
    source.read_all();

    let mut capture = Capture::begin(&at_source).unwrap();
    // QEMU still runs, and reads two of five; what it sends is not for it.
    send(&at_source, 0..5);
    source.0.write_all(&frame(OTHER, GUEST, 100)).unwrap();
    let mut buffer = [0; 2048];
    let mut read = Vec::new();
    while read.len() < 2 {
        let length = source.0.read(&mut buffer).unwrap();
        read.extend(number_of(&buffer[..length]));
    }
    assert_eq!(read, [0, 1]);
    capture.stopped().unwrap();
    let first = capture.take().unwrap();
    assert_eq!(numbers(&first), [2, 3, 4]);
    send(&at_source, 5..7);
    let second = capture.take().unwrap();
    assert_eq!(numbers(&second), [5, 6]);
    assert!(capture.take().unwrap().frames.is_empty());

    deliver(&at_destination, &first).unwrap();
    deliver(&at_destination, &second).unwrap();
    assert_eq!(destination.read_all(), [2, 3, 4, 5, 6]);

    // Cards that the guest does not have, and headers that are none.
    let mut wrong = held(0, 8);
    wrong.header = [0xff; 10];
    let frames = vec![held(1, 7), wrong, held(0, 9)];
    deliver(&at_destination, &HeldFrames { frames }).unwrap();
    assert_eq!(destination.read_all(), [9]);

    // The earliest are kept up to the limit.
    let most = (TOTAL_BYTES_MAX / 60) as u32;
    let mut capture = Capture::begin(&at_source).unwrap();
    capture.stopped().unwrap();
    let mut taken = 0;
    for start in (0..most + 1000).step_by(100) {
        // The queue of the device is shorter.
        source.read_all();
        send(&at_source, start..start + 100);
        taken += capture.take().unwrap().frames.len();
    }
    assert!(
        taken <= most as usize && taken > most as usize - 100,
        "{taken}"
    );
    assert!(capture.dropped() > 0);
    assert!(Capture::begin(&BTreeMap::from([(0, "missing".to_owned())])).is_err());
}
