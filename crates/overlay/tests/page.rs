//! Tests that the code matches the examples and limits of `docs/frame-plane.md`.
#![allow(clippy::unwrap_used, clippy::panic)]

use longhaul_overlay::NetworkId;
use longhaul_overlay::control::MESSAGES_MAX;
use longhaul_overlay::fragment::{FRAGMENTS_MAX, PARTIAL_FRAMES_MAX, REASSEMBLY_TIME};
use longhaul_overlay::offload::{Cut, HEADERS_BYTES_MAX, Merger, VIRTIO_BYTES, VirtioHeader};
use longhaul_overlay::seal::{
    EXPORTER_LABEL, HEADER_BYTES, KeyLimits, Kind, OVERHEAD_BYTES, Side, Suite, WINDOW_COUNTERS,
    halves,
};
use longhaul_overlay::session::{MTU_STEP_BYTES, SessionConfig};
use longhaul_overlay::switch::{PORTS_MAX, PortConfig};
use longhaul_overlay::{SwitchConfig, ethernet};
use std::time::Duration;

const PAGE: &str = include_str!("../../../docs/frame-plane.md");

/// Returns the bytes of an example.
fn example(name: &str) -> Vec<u8> {
    let fence = format!("```bytes {name}\n");
    let (_, rest) = PAGE
        .split_once(&fence)
        .unwrap_or_else(|| panic!("no example {name}"));
    let (lines, _) = rest.split_once("```").unwrap();
    let bytes = lines.lines().filter_map(|line| line.split('#').next());
    let bytes = bytes.flat_map(str::split_whitespace);
    bytes
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect()
}

fn says(text: &str) {
    let page = PAGE.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(page.contains(text), "the page does not say: {text}");
}

#[test]
fn datagrams_are_as_in_the_examples() {
    let exported: [u8; 32] = std::array::from_fn(|index| index as u8);
    let network = NetworkId(0x1122_3344_5566_7788);
    // Epoch 0 has six datagrams.
    let limits = KeyLimits {
        epoch_packets: 6,
        ..KeyLimits::default()
    };
    for (suite, name) in [
        (Suite::Aes256Gcm, "aes-256-gcm"),
        (Suite::ChaCha20Poly1305, "chacha20-poly1305"),
    ] {
        let now = Duration::ZERO;
        let (mut sealer, _) = halves(now, &exported, Side::Dialler, suite, limits).unwrap();
        let (_, mut opener) = halves(now, &exported, Side::Listener, suite, limits).unwrap();
        for count in 0..7 {
            let mut datagram = [0; OVERHEAD_BYTES + 5];
            datagram[HEADER_BYTES..HEADER_BYTES + 5].copy_from_slice(b"frame");
            sealer
                .seal(now, 2, Kind::Frame, network, &mut datagram)
                .unwrap();
            if count >= 5 {
                let mut expected = example(&format!("{name} epoch {}", count - 5));
                assert_eq!(datagram[..], expected);
                let opened = opener.open(now, &mut expected).unwrap();
                assert_eq!(opened.payload, b"frame");
                assert_eq!((opened.seen, opened.network), (2, network));
            }
        }
    }
}

#[test]
fn super_frames_are_cut_as_in_the_example() {
    let whole = example("super-frame");
    let (virtio, frame) = VirtioHeader::split(&whole).unwrap();
    let cut = Cut::new(virtio, frame, 132).unwrap();
    assert_eq!(
        (cut.count(), cut.segment_bytes(), cut.last_bytes()),
        (3, 132, 90)
    );
    let mut merger = Merger::new();
    let mut merged = Vec::new();
    let mut out = |virtio: &VirtioHeader, frame: &[u8]| {
        merged.push([&virtio.to_bytes()[..], frame].concat());
    };
    for index in 0..3 {
        let mut segment = [0; 132];
        let length = cut.write(index, &mut segment).unwrap();
        assert_eq!(segment[..length], example(&format!("segment {index}")));
        merger.push(&segment[..length], &mut out);
    }
    merger.flush(&mut out);
    assert_eq!(merged, [whole]);
}

#[test]
fn short_segments_are_as_in_the_example() {
    let whole = example("short: super-frame");
    let (virtio, frame) = VirtioHeader::split(&whole).unwrap();
    let cut = Cut::new(virtio, frame, 150).unwrap();
    assert!(cut.is_short());
    assert_eq!(
        (cut.count(), cut.segment_bytes(), cut.last_bytes()),
        (2, 150, 100)
    );
    let [mut merger, mut alone, mut plain] = [Merger::new(), Merger::new(), Merger::new()];
    let mut merged = Vec::new();
    let mut frames = [Vec::new(), Vec::new()];
    let mut segment = [0; 150];
    for index in 0..2 {
        let length = cut.write(index, &mut segment).unwrap();
        assert_eq!(
            segment[..length],
            example(&format!("short: segment {index}"))
        );
        merger.push_short(&segment[..length], &mut |virtio, frame| {
            merged.push([&virtio.to_bytes()[..], frame].concat());
        });
    }
    merger.flush(&mut |virtio, frame| merged.push([&virtio.to_bytes()[..], frame].concat()));
    assert_eq!(merged, [whole]);
    // The last one is the same frame as the payload of kind 4 that it stands for.
    let restored = example("short: segment 1 restored");
    let [short, same] = &mut frames;
    alone.push_short(&segment[..100], &mut |_, frame| short.push(frame.to_vec()));
    plain.push(&restored, &mut |_, frame| same.push(frame.to_vec()));
    assert_eq!(short, same);
    assert_eq!(short[..], [restored[VIRTIO_BYTES..].to_vec()]);
}

#[test]
fn limits_are_as_on_the_page() {
    let config = SwitchConfig::new([0, 0]);
    assert_eq!((config.age.as_secs(), config.hold.as_secs()), (300, 30));
    assert_eq!((config.moves_max, config.moves_window.as_secs()), (5, 10));
    assert_eq!((config.macs_max, config.addresses_max), (16_384, 16_384));
    assert_eq!(config.addresses_per_mac_max, 32);
    assert_eq!(config.address_age.as_secs(), 120);
    assert_eq!(
        (config.flows_max, config.flows_per_guest_max),
        (65_536, 4096)
    );
    assert_eq!(config.settle.as_secs(), 3);
    assert_eq!(PORTS_MAX, 4096);
    assert_eq!(PortConfig::LOCAL.macs_max, 1024);
    assert_eq!(PortConfig::HOST.macs_max, 8192);
    assert_eq!(ethernet::FRAME_BYTES_MAX, 65_557);
    let limits = KeyLimits::default();
    assert_eq!(
        (limits.epoch_packets, limits.packets_max),
        (1 << 23, 1 << 27)
    );
    assert_eq!(
        (limits.epoch_time.as_secs(), limits.grace.as_secs()),
        (120, 10)
    );
    assert_eq!((limits.forged_max, WINDOW_COUNTERS), (1 << 36, 8128));
    says(&format!("`{}`", str::from_utf8(EXPORTER_LABEL).unwrap()));
    assert_eq!((FRAGMENTS_MAX, PARTIAL_FRAMES_MAX), (16, 16));
    assert_eq!((REASSEMBLY_TIME.as_secs(), MESSAGES_MAX), (1, 64));
    assert_eq!(HEADERS_BYTES_MAX, 256);
    let session = SessionConfig::default();
    assert_eq!(
        (session.pulse.as_secs(), session.silent_after.as_secs()),
        (5, 15)
    );
    assert_eq!(session.previous_grace.as_secs(), 10);
    assert_eq!(session.confirm_grace.as_secs(), 1);
    assert_eq!((session.mtu.base, session.mtu.probes_max), (1200, 3));
    assert_eq!(session.mtu.probe_time.as_secs(), 1);
    assert_eq!(session.mtu.confirm_time.as_secs(), 5);
    assert_eq!((session.mtu.raise_time.as_secs(), MTU_STEP_BYTES), (600, 8));
    says("more than 8128 behind");
    says("after 2^23 datagrams or 120 s");
}
