//! Measures the steps of the frame plane on this machine: `cargo bench -p longhaul-overlay`.
//! Each time is the best of many short ones, so that other load on the machine matters little.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use longhaul_overlay::offload::{Checksums, Cut, Gso, Merger, SCRATCH_BYTES, VirtioHeader, finish};
use longhaul_overlay::seal::{
    HEADER_BYTES, KeyLimits, Kind, OVERHEAD_BYTES, Opener, Sealer, Side, Suite, TAG_BYTES, halves,
};
use longhaul_overlay::switch::PortConfig;
use longhaul_overlay::{NetworkId, Switch, SwitchConfig};
use longhaul_protocol::HostId;
use std::hint::black_box;
use std::time::{Duration, Instant};

const REPEATS: usize = 400;
/// Datagrams of a batch.
const BATCH: usize = 44;
const PAYLOAD_BYTES: usize = 1400;
const STRIDE: usize = PAYLOAD_BYTES + OVERHEAD_BYTES;
const NETWORK: NetworkId = NetworkId(1);
const NOW: Duration = Duration::from_secs(1);

fn main() {
    // Test runs build and start benches too, without this argument.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    for suite in [Suite::Aes256Gcm, Suite::ChaCha20Poly1305] {
        seal_and_open(suite);
    }
    cut_and_merge();
    whole_path(Suite::Aes256Gcm);
    switch();
}

/// Runs steps that prepare and are measured, and prints the best time of the measured ones.
fn report<T>(
    name: &str,
    packets: usize,
    bytes: usize,
    mut prepare: impl FnMut() -> T,
    mut run: impl FnMut(&mut T),
) {
    const TURNS: usize = 10;
    let mut best = f64::INFINITY;
    for _ in 0..REPEATS {
        let mut prepared: Vec<T> = (0..TURNS).map(|_| prepare()).collect();
        let start = Instant::now();
        prepared.iter_mut().for_each(&mut run);
        best = best.min(start.elapsed().as_secs_f64());
    }
    let per_packet = best * 1e9 / (TURNS * packets) as f64;
    let rate = (TURNS * bytes * 8) as f64 / best / 1e9;
    println!("{name:>44} {per_packet:8.1} ns a packet {rate:8.2} Gbit/s");
}

fn keys(suite: Suite) -> (Sealer, Opener) {
    let limits = KeyLimits::default();
    let (sealer, _) = halves(NOW, &[7; 32], Side::Dialler, suite, limits).unwrap();
    let (_, opener) = halves(NOW, &[7; 32], Side::Listener, suite, limits).unwrap();
    (sealer, opener)
}

fn seal_and_open(suite: Suite) {
    let (mut sealer, mut opener) = keys(suite);
    let bytes = BATCH * PAYLOAD_BYTES;
    let plain = vec![0x55; BATCH * STRIDE];
    let mut seal = |batch: &mut Vec<u8>| {
        sealer
            .seal_batch(NOW, 0, Kind::Frame, NETWORK, batch, STRIDE)
            .unwrap();
    };
    let name = format!("seal {PAYLOAD_BYTES} bytes {suite:?}");
    report(&name, BATCH, bytes, || plain.clone(), &mut seal);
    let sealed = || {
        let mut batch = plain.clone();
        seal(&mut batch);
        batch
    };
    let name = format!("open {PAYLOAD_BYTES} bytes {suite:?}");
    report(&name, BATCH, bytes, sealed, |batch| {
        opener.open_batch(NOW, batch, STRIDE, |opened| {
            black_box(opened.unwrap().payload);
        });
    });
}

/// Returns a super-frame of TCP over IPv4, with time stamps.
fn super_frame() -> (VirtioHeader, Vec<u8>) {
    let mut frame = vec![0x55; 65_226];
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0]);
    frame[14..18].copy_from_slice(&[0x45, 0, 0xfe, 0xbc]);
    frame[18..24].copy_from_slice(&[0, 1, 0x40, 0, 64, 6]);
    frame[46..50].copy_from_slice(&[0x80, 0x10, 1, 1]);
    let virtio = VirtioHeader {
        needs_checksum: true,
        gso: Gso::Tcp4,
        segment_bytes: 1448,
        headers_bytes: 66,
        checksum_start: 34,
        checksum_offset: 16,
        ..VirtioHeader::default()
    };
    (virtio, frame)
}

fn cut_all(cut: &Cut<'_>, out: &mut [u8], stride: usize) -> usize {
    let mut end = 0;
    for (index, room) in out.chunks_mut(stride).enumerate() {
        let room = &mut room[HEADER_BYTES..];
        if let Some(length) = cut.write(index, room) {
            end = index * stride + length + OVERHEAD_BYTES;
        }
    }
    end
}

fn cut_and_merge() {
    let (virtio, frame) = super_frame();
    let payload = frame.len() - 66;
    let cut = Cut::new(virtio, &frame, PAYLOAD_BYTES).unwrap();
    let count = cut.count();
    let mut out = vec![0; count * STRIDE];
    report(
        "cut 64 KiB",
        count,
        payload,
        || (),
        |()| {
            let cut = Cut::new(virtio, black_box(&frame), PAYLOAD_BYTES).unwrap();
            black_box(cut_all(&cut, &mut out, STRIDE));
        },
    );
    let mut merger = Merger::new();
    let end = cut_all(&cut, &mut out, STRIDE);
    report(
        "merge 64 KiB",
        count,
        payload,
        || (),
        |()| {
            let mut frames = 0;
            let mut each = |_: &VirtioHeader, merged: &[u8]| {
                frames += usize::from(merged.len() == frame.len());
            };
            for datagram in out[..end].chunks(STRIDE) {
                merger.push(
                    &datagram[HEADER_BYTES..datagram.len() - TAG_BYTES],
                    &mut each,
                );
            }
            merger.flush(&mut each);
            assert_eq!(frames, 1);
        },
    );
    let mut scratch = vec![0; SCRATCH_BYTES];
    report(
        "finish in software",
        45,
        payload,
        || (),
        |()| {
            let each = |_: &VirtioHeader, frame: &[u8]| _ = black_box(frame.len());
            finish(virtio, &frame, Checksums::Complete, &mut scratch, each).unwrap();
        },
    );
}

fn whole_path(suite: Suite) {
    let (virtio, frame) = super_frame();
    let payload = frame.len() - 66;
    let (mut sealer, mut opener) = keys(suite);
    let cut = Cut::new(virtio, &frame, PAYLOAD_BYTES).unwrap();
    let mut out = vec![0; cut.count() * STRIDE];
    let mut merger = Merger::new();
    let name = "cut, seal, open, merge 64 KiB";
    report(
        name,
        cut.count(),
        payload,
        || (),
        |()| {
            let cut = Cut::new(virtio, black_box(&frame), PAYLOAD_BYTES).unwrap();
            let end = cut_all(&cut, &mut out, STRIDE);
            let batch = &mut out[..end];
            sealer
                .seal_batch(NOW, 0, Kind::Frame, NETWORK, batch, STRIDE)
                .unwrap();
            let mut frames = 0;
            let mut each = |_: &VirtioHeader, _: &[u8]| frames += 1;
            opener.open_batch(NOW, batch, STRIDE, |opened| {
                merger.push(opened.unwrap().payload, &mut each);
            });
            merger.flush(&mut each);
            assert_eq!(frames, 1);
        },
    );
}

fn switch() {
    let mut switch = Switch::new(SwitchConfig::new([1, 2]));
    let here = switch.add_local(PortConfig::LOCAL).unwrap();
    let there = switch.add_host(HostId([1; 32]), PortConfig::HOST).unwrap();
    let frame = |to: u8, from: u8| {
        let mut frame = vec![0; 1514];
        frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 8, 0]);
        frame
    };
    let frames: Vec<(Vec<u8>, Vec<u8>)> = (0..64)
        .map(|at| (frame(at, at + 128), frame(at + 128, at)))
        .collect();
    report(
        "switch known addresses",
        128,
        128 * 1514,
        || (),
        |()| {
            for (out, back) in &frames {
                black_box(switch.frame(NOW, here, out).count());
                black_box(switch.frame(NOW, there, back).count());
            }
        },
    );
}
