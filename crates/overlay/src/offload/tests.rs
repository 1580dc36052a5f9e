//! Tests cutting, merging and finishing on packets that are written and verified by code of their
//! own.

use super::headers::Headers;
use super::short::{RESTORED_BYTES_MAX, restore};
use super::*;
use crate::ethernet::TYPE_IPV4;
use proptest::prelude::*;

/// A packet of a flow.
#[derive(Debug, Clone)]
struct Packet {
    ipv6: bool,
    tcp: bool,
    vlan: bool,
    /// Whether IPv6 has a header of padding.
    extension: bool,
    /// Words of TCP's options.
    options: usize,
    /// Whether the options are time stamps.
    stamps: bool,
    sequence: u32,
    flags: u8,
    identification: u16,
    atomic: bool,
    segment_bytes: u16,
    payload: Vec<u8>,
}

fn add(total: &mut u32, bytes: &[u8]) {
    for pair in bytes.chunks(2) {
        let low = pair.get(1).copied().unwrap_or(0);
        *total += u32::from(pair[0]) << 8 | u32::from(low);
        *total = (*total & 0xffff) + (*total >> 16);
    }
}

impl Packet {
    fn protocol(&self) -> u8 {
        if self.tcp { 6 } else { 17 }
    }

    /// Returns the length of the IP header, with what follows in front of the transport's.
    fn network_bytes(&self) -> usize {
        match (self.ipv6, self.extension) {
            (false, _) => 20,
            (true, false) => 40,
            (true, true) => 48,
        }
    }

    /// Whether its segments may travel as short ones.
    fn is_short(&self) -> bool {
        let plain = self.options == 0 || self.stamps;
        self.tcp && !self.vlan && plain && self.network_bytes() != 48
    }

    fn frame(&self) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 0xb, 2, 0, 0, 0, 0, 0xa];
        if self.vlan {
            frame.extend([0x81, 0, 0x20, 7]);
        }
        let header = if self.tcp { 20 + self.options * 4 } else { 8 };
        let bytes = header + self.payload.len();
        let (source, destination) = if self.ipv6 {
            (vec![0xfd; 16], vec![0xfc; 16])
        } else {
            (vec![10, 0, 0, 1], vec![10, 0, 0, 2])
        };
        if self.ipv6 {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 9]);
            let extension = if self.extension { 8 } else { 0 };
            frame.extend((bytes as u16 + extension).to_be_bytes());
            frame.extend([if self.extension { 0 } else { self.protocol() }, 64]);
            frame.extend([&source[..], &destination].concat());
            if self.extension {
                // A hop-by-hop header of padding.
                frame.extend([self.protocol(), 0, 1, 4, 0, 0, 0, 0]);
            }
        } else {
            frame.extend(TYPE_IPV4.to_be_bytes());
            let mut ip = vec![0x45, 0x02];
            ip.extend((bytes as u16 + 20).to_be_bytes());
            ip.extend(self.identification.to_be_bytes());
            ip.extend([
                if self.atomic { 0x40 } else { 0 },
                0,
                64,
                self.protocol(),
                0,
                0,
            ]);
            ip.extend([&source[..], &destination].concat());
            let mut sum = 0;
            add(&mut sum, &ip);
            ip[10..12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
            frame.extend(ip);
        }
        let mut partial = 0;
        add(&mut partial, &source);
        add(&mut partial, &destination);
        add(&mut partial, &[0, self.protocol()]);
        add(&mut partial, &(bytes as u32).to_be_bytes());
        let partial = (partial as u16).to_be_bytes();
        frame.extend([0x9c, 0x40, 0, 80]);
        if self.tcp {
            frame.extend(self.sequence.to_be_bytes());
            frame.extend([
                0,
                0,
                0,
                7,
                (5 + self.options as u8) << 4,
                self.flags,
                1,
                0xf4,
            ]);
            frame.extend(partial);
            frame.extend([0, 0]);
            if self.stamps {
                frame.extend([1, 1, 8, 10, 0, 1, 2, 3, 4, 5, 6, 7]);
            } else {
                frame.extend(vec![1; self.options * 4]);
            }
        } else {
            frame.extend((bytes as u16).to_be_bytes());
            frame.extend(partial);
        }
        frame.extend(&self.payload);
        frame
    }

    fn virtio(&self) -> VirtioHeader {
        let network = if self.vlan { 18 } else { 14 };
        let transport = network + self.network_bytes() as u16;
        let header = if self.tcp {
            20 + self.options as u16 * 4
        } else {
            8
        };
        VirtioHeader {
            needs_checksum: true,
            checksum_valid: false,
            gso: match (self.tcp, self.ipv6) {
                (true, false) => Gso::Tcp4,
                (true, true) => Gso::Tcp6,
                (false, _) => Gso::Udp,
            },
            ecn: false,
            headers_bytes: transport + header,
            segment_bytes: self.segment_bytes,
            checksum_start: transport,
            checksum_offset: if self.tcp { 16 } else { 6 },
        }
    }
}

fn packets() -> impl Strategy<Value = Packet> {
    let flags = (
        any::<[bool; 4]>(),
        any::<bool>(),
        any::<u32>(),
        any::<u16>(),
    );
    let segment_bytes = prop_oneof![
        3 => 100..1461u16,
        1 => prop::sample::select(vec![1460u16, 1448, 1440, 1428]),
    ];
    let sizes = (
        0..=10usize,
        segment_bytes,
        1..40_000usize,
        any::<[bool; 3]>(),
    );
    (flags, sizes).prop_map(|((kinds, psh, sequence, identification), sizes)| {
        let [ipv6, tcp, vlan, cwr] = kinds;
        let (options, segment_bytes, bytes, [atomic, extension, stamps]) = sizes;
        Packet {
            ipv6,
            tcp,
            vlan,
            extension,
            options: if stamps { 3 } else { options },
            stamps,
            sequence,
            flags: 0x10 | if psh { 0x09 } else { 0 } | if cwr { 0x80 } else { 0 },
            identification,
            atomic,
            segment_bytes,
            payload: (0..bytes).map(|at| (at * 7 + at / 251) as u8).collect(),
        }
    })
}

/// Verifies a complete frame as its receiver does.
fn verify(frame: &[u8], packet: &Packet) -> (u32, u8, Vec<u8>) {
    let network = if packet.vlan { 18 } else { 14 };
    let mut pseudo = 0;
    let transport = if packet.ipv6 {
        let length = u16::from_be_bytes([frame[network + 4], frame[network + 5]]);
        assert_eq!(usize::from(length), frame.len() - network - 40);
        add(&mut pseudo, &frame[network + 8..network + 40]);
        network + packet.network_bytes()
    } else {
        let length = u16::from_be_bytes([frame[network + 2], frame[network + 3]]);
        assert_eq!(usize::from(length), frame.len() - network);
        let mut sum = 0;
        add(&mut sum, &frame[network..network + 20]);
        assert_eq!(sum, 0xffff, "the header's checksum");
        add(&mut pseudo, &frame[network + 12..network + 20]);
        network + 20
    };
    add(&mut pseudo, &[0, packet.protocol()]);
    add(
        &mut pseudo,
        &((frame.len() - transport) as u32).to_be_bytes(),
    );
    add(&mut pseudo, &frame[transport..]);
    assert_eq!(pseudo, 0xffff, "the transport's checksum");
    if packet.tcp {
        let sequence = *frame[transport + 4..].first_chunk().unwrap();
        let payload = transport + 20 + packet.options * 4;
        let flags = frame[transport + 13];
        return (
            u32::from_be_bytes(sequence),
            flags,
            frame[payload..].to_vec(),
        );
    }
    let length = u16::from_be_bytes([frame[transport + 4], frame[transport + 5]]);
    assert_eq!(usize::from(length), frame.len() - transport);
    (0, 0, frame[transport + 8..].to_vec())
}

/// Returns the segments of a frame as they travel.
fn sent(virtio: VirtioHeader, frame: &[u8], max: usize) -> Result<Vec<Vec<u8>>, CutError> {
    let cut = Cut::new(virtio, frame, max)?;
    let mut segments = Vec::new();
    for index in 0..cut.count() {
        let mut out = vec![0; max];
        let length = cut.write(index, &mut out).unwrap();
        let last = index + 1 == cut.count();
        let expected = if last {
            cut.last_bytes()
        } else {
            cut.segment_bytes()
        };
        assert_eq!(length, expected);
        assert!(length <= max);
        out.truncate(length);
        segments.push(out);
    }
    assert_eq!(cut.write(cut.count(), &mut vec![0; max]), None);
    assert_eq!(cut.write(0, &mut vec![0; cut.segment_bytes() - 1]), None);
    Ok(segments)
}

/// Returns what a receiver makes of a short segment: a virtio header and a frame.
fn restored(segment: &[u8]) -> Option<Vec<u8>> {
    let mut head = [0xee; RESTORED_BYTES_MAX];
    let restored = restore(segment, &mut head)?;
    let head = &head[..restored.headers.payload];
    let virtio = restored.virtio.to_bytes();
    let bytes = [&virtio[..], head, restored.payload].concat();
    // It is a frame that would be taken as well if it travelled as it is.
    let (virtio, frame) = VirtioHeader::split(&bytes).unwrap();
    assert_eq!(virtio, restored.virtio);
    assert_eq!(Headers::parse(frame), Some(restored.headers));
    if virtio.gso != Gso::None {
        assert_eq!(Headers::of_gso(&virtio, frame), Some(restored.headers));
    }
    Some(bytes)
}

/// Returns the segments of a frame with all headers.
fn segments(virtio: VirtioHeader, frame: &[u8], max: usize) -> Result<Vec<Vec<u8>>, CutError> {
    let segments = sent(virtio, frame, max)?;
    let cut = Cut::new(virtio, frame, max)?;
    if !cut.is_short() {
        return Ok(segments);
    }
    let plain = |(index, segment): (usize, Vec<u8>)| {
        let mut plain = vec![0; VIRTIO_BYTES + frame.len()];
        plain[..VIRTIO_BYTES].copy_from_slice(&cut.virtio().to_bytes());
        let length = cut.write_frame(index, &mut plain[VIRTIO_BYTES..]).unwrap();
        plain.truncate(VIRTIO_BYTES + length);
        assert_eq!(restored(&segment).as_ref(), Some(&plain));
        plain
    };
    Ok(segments.into_iter().enumerate().map(plain).collect())
}

fn merged(merger: &mut Merger, segments: &[Vec<u8>]) -> Vec<(VirtioHeader, Vec<u8>)> {
    let mut frames = Vec::new();
    let mut out = |virtio: &VirtioHeader, frame: &[u8]| frames.push((*virtio, frame.to_vec()));
    for segment in segments {
        merger.push(segment, &mut out);
    }
    merger.flush(&mut out);
    frames
}

proptest! {
    #[test]
    fn cut_and_merged_is_the_same(packet in packets(), max in 300..3000usize) {
        let (virtio, frame) = (packet.virtio(), packet.frame());
        let mut merger = Merger::new();
        match segments(virtio, &frame, max) {
            Ok(segments) => {
                let frames = merged(&mut merger, &segments);
                prop_assert_eq!(frames.len(), 1);
                prop_assert_eq!(&frames[0].1, &frame);
                let expected = if packet.payload.len() > usize::from(packet.segment_bytes) {
                    virtio
                } else {
                    virtio.without_gso()
                };
                prop_assert_eq!(frames[0].0.gso, expected.gso);
                prop_assert_eq!(frames[0].0.checksum_start, virtio.checksum_start);
            }
            Err(error) => {
                prop_assert_eq!(error, CutError::NeedsSegmentation);
                prop_assert!(!packet.tcp);
            }
        }
        // The guest's own frames, from the super-frame and from each segment, are correct.
        let mut payload = Vec::new();
        let mut scratch = vec![0; SCRATCH_BYTES];
        let mut count = 0u32;
        finish(virtio, &frame, Checksums::Complete, &mut scratch, |virtio, frame| {
            assert_eq!(*virtio, VirtioHeader::default());
            let (sequence, flags, slice) = verify(frame, &packet);
            assert!(slice.len() <= usize::from(packet.segment_bytes));
            if packet.tcp {
                assert_eq!(sequence, packet.sequence.wrapping_add(payload.len() as u32));
                assert_eq!(flags & 0x80 != 0, packet.flags & 0x80 != 0 && count == 0);
                let last = payload.len() + slice.len() == packet.payload.len();
                assert_eq!(flags & 9 != 0, packet.flags & 9 != 0 && last);
            }
            payload.extend(slice);
            count += 1;
        }).unwrap();
        prop_assert_eq!(&payload, &packet.payload);
        let frames = packet.payload.len().div_ceil(usize::from(packet.segment_bytes));
        prop_assert_eq!(count as usize, frames);
    }

    #[test]
    fn short_segments_are_merged_as_others(packet in packets(), max in 300..3000usize) {
        let (virtio, frame) = (packet.virtio(), packet.frame());
        let Ok(cut) = Cut::new(virtio, &frame, max) else { return Ok(()) };
        let fits = VIRTIO_BYTES + frame.len() <= max;
        prop_assert_eq!(cut.is_short(), packet.is_short() && !fits);
        let plain = merged(&mut Merger::new(), &segments(virtio, &frame, max).unwrap());
        if cut.is_short() {
            let mut frames = Vec::new();
            let mut out = |virtio: &VirtioHeader, frame: &[u8]| {
                frames.push((*virtio, frame.to_vec()));
            };
            let mut merger = Merger::new();
            for segment in sent(virtio, &frame, max).unwrap() {
                merger.push_short(&segment, &mut out);
            }
            merger.flush(&mut out);
            prop_assert_eq!(frames, plain);
            prop_assert_eq!(merger.counters().malformed, 0);
        }
    }

    #[test]
    fn whole_frames_are_short_if_they_do_not_fit_otherwise(packet in packets()) {
        let (virtio, frame) = (packet.virtio().without_gso(), packet.frame());
        let max = VIRTIO_BYTES + frame.len() - 1;
        let cut = Cut::new(virtio, &frame, max);
        prop_assert_eq!(cut.is_ok(), packet.is_short());
        if let Ok(cut) = cut {
            prop_assert!(cut.is_short());
            let all = segments(virtio, &frame, max).unwrap();
            prop_assert_eq!(&all, &[[&virtio.to_bytes()[..], &frame].concat()]);
            let mut merger = Merger::new();
            let mut frames = Vec::new();
            let mut out = |virtio: &VirtioHeader, frame: &[u8]| {
                frames.push((*virtio, frame.to_vec()));
            };
            merger.push_short(&sent(virtio, &frame, max).unwrap()[0], &mut out);
            prop_assert_eq!(frames, [(virtio, frame)]);
        }
    }

    #[test]
    fn frames_that_would_not_be_restored_are_not_short(
        packet in packets(),
        // Of the headers of IP and TCP, and of the virtio header.
        changes in prop::collection::vec((14..76usize, any::<u8>()), 0..3),
        changed in prop::option::of((0..10usize, any::<u8>())),
    ) {
        let packet = Packet { vlan: false, extension: false, ..packet };
        let (mut header, mut frame) = (packet.virtio().to_bytes(), packet.frame());
        for (at, byte) in changes {
            if at < frame.len() {
                frame[at] = byte;
            }
        }
        if let Some((at, byte)) = changed {
            header[at] = byte;
        }
        let Ok(virtio) = VirtioHeader::parse(&header, frame.len()) else { return Ok(()) };
        // Compares each short segment with the plain one.
        let _ = segments(virtio, &frame, 900);
    }

    #[test]
    fn short_segments_are_restored_or_dropped(
        form in 0..64u8,
        mut bytes in prop::collection::vec(any::<u8>(), 1..200),
    ) {
        bytes[0] = form;
        if form & 1 != 0 && bytes.len() > 15 {
            (bytes[13], bytes[15]) = (0x60, 0x60);
        }
        // Checks what is restored.
        let kept = restored(&bytes);
        let mut merger = Merger::new();
        let mut count = 0;
        merger.push_short(&bytes, &mut |_, _| count += 1);
        merger.flush(&mut |_, _| count += 1);
        prop_assert_eq!(count, u64::from(kept.is_some()));
        prop_assert_eq!(merger.counters().malformed, u64::from(kept.is_none()));
    }

    #[test]
    fn a_damaged_batch_keeps_the_order_of_its_flow(
        packet in packets(),
        lost in prop::collection::vec(0..40usize, 0..4),
        swapped in prop::option::of(0..40usize),
    ) {
        let (virtio, frame) = (packet.virtio(), packet.frame());
        let Ok(mut segments) = segments(virtio, &frame, 1450) else { return Ok(()) };
        for lost in lost {
            if lost < segments.len() {
                segments.remove(lost);
            }
        }
        if let Some(at) = swapped && at + 1 < segments.len() {
            segments.swap(at, at + 1);
        }
        // The payload arrives as it was sent, whether merged or not.
        let mut scratch = vec![0; SCRATCH_BYTES];
        let mut finished = |virtio: VirtioHeader, frame: &[u8], into: &mut Vec<u8>| {
            finish(virtio, frame, Checksums::Complete, &mut scratch, |_, frame| {
                into.extend(verify(frame, &packet).2);
            }).unwrap();
        };
        let (mut alone, mut together) = (Vec::new(), Vec::new());
        for segment in &segments {
            let (virtio, frame) = VirtioHeader::split(segment).unwrap();
            finished(virtio, frame, &mut alone);
        }
        for (virtio, frame) in merged(&mut Merger::new(), &segments) {
            finished(virtio, &frame, &mut together);
        }
        prop_assert_eq!(alone, together);
    }

    #[test]
    fn any_bytes_are_survived(
        mut bytes in prop::collection::vec(any::<u8>(), 0..200),
        max in 0..300usize,
    ) {
        merged(&mut Merger::new(), std::slice::from_ref(&bytes));
        Merger::new().push_short(&bytes, &mut |_, _| ());
        if bytes.len() > 34 {
            bytes[..2].copy_from_slice(&[1, 1]);
            bytes[22..25].copy_from_slice(&[8, 0, 0x45]);
        }
        let Ok((virtio, frame)) = VirtioHeader::split(&bytes) else { return Ok(()) };
        if let Ok(cut) = Cut::new(virtio, frame, max) {
            for index in 0..cut.count() {
                cut.write(index, &mut [0; 400]);
            }
        }
        let mut scratch = vec![0; SCRATCH_BYTES];
        let _ = finish(virtio, frame, Checksums::Complete, &mut scratch, |_, _| ());
    }
}

fn packet(bytes: usize) -> Packet {
    Packet {
        ipv6: false,
        tcp: true,
        vlan: false,
        extension: false,
        options: 3,
        stamps: false,
        sequence: u32::MAX - 2000,
        flags: 0x10,
        identification: 0xffff,
        atomic: true,
        segment_bytes: 1448,
        payload: vec![5; bytes],
    }
}

#[test]
fn super_frames_continue_each_other_up_to_64_kib() {
    let mut batch = Vec::new();
    let mut packet = packet(30_000);
    for _ in 0..4 {
        batch.extend(segments(packet.virtio(), &packet.frame(), 1450).unwrap());
        packet.sequence = packet.sequence.wrapping_add(30_000);
    }
    let mut merger = Merger::new();
    let frames = merged(&mut merger, &batch);
    assert_eq!(frames.len(), 2);
    assert!(frames[0].1.len() > 64_000 && frames[0].1.len() <= 65_549);
    let payload: usize = frames.iter().map(|(_, frame)| frame.len() - 66).sum();
    assert_eq!(payload, 120_000);
    assert_eq!(merger.counters().segments, batch.len() as u64);
    assert_eq!(merger.counters().frames, 2);
}

#[test]
fn flows_are_merged_side_by_side() {
    let mut flows = Vec::new();
    for port in 0..RUNS as u8 {
        let packet = packet(5000);
        let mut frame = packet.frame();
        frame[35] = port;
        let cut = segments(packet.virtio(), &frame, 1450).unwrap();
        assert_eq!(cut.len(), 4);
        flows.push((frame, cut));
    }
    let batch: Vec<Vec<u8>> = (0..4)
        .flat_map(|index| flows.iter().map(move |(_, cut)| cut[index].clone()))
        .collect();
    let frames = merged(&mut Merger::new(), &batch);
    let expected: Vec<&Vec<u8>> = flows.iter().map(|(frame, _)| frame).collect();
    assert_eq!(
        frames.iter().map(|(_, frame)| frame).collect::<Vec<_>>(),
        expected
    );
}

#[test]
fn a_frame_does_not_overtake_its_flow() {
    let packet = packet(5000);
    let mut batch = segments(packet.virtio(), &packet.frame(), 1450).unwrap();
    let mut alone = packet.clone();
    alone.payload.clear();
    let plain = alone.virtio().without_gso();
    let acknowledgement = [&plain.to_bytes()[..], &alone.frame()].concat();
    batch.insert(2, acknowledgement.clone());
    let frames = merged(&mut Merger::new(), &batch);
    assert_eq!(frames.len(), 3);
    assert_eq!(frames[1].1, acknowledgement[10..]);
    // Another flow's frame goes first.
    batch[2][10 + 35] ^= 1;
    let frames = merged(&mut Merger::new(), &batch);
    assert_eq!(frames.len(), 2);
    assert_eq!(frames[0].1, batch[2][10..]);
    assert_eq!(frames[1].1, packet.frame());
}

#[test]
fn what_differs_is_not_merged() {
    let packet = packet(2800);
    let good = segments(packet.virtio(), &packet.frame(), 1450).unwrap();
    assert_eq!(good.len(), 3);
    // Link address, type of service, time to live, acknowledgement, window, option, segment size.
    for at in [10 + 5, 10 + 15, 10 + 22, 10 + 45, 10 + 49, 10 + 55, 4] {
        let mut batch = good.clone();
        batch[1][at] ^= 1;
        let frames = merged(&mut Merger::new(), &batch);
        assert_eq!(frames.len(), 3, "byte {at}");
    }
    let mut batch = good.clone();
    batch[1][10 + 47] |= 0x04;
    assert_eq!(merged(&mut Merger::new(), &batch).len(), 3, "RST");
    let mut merger = Merger::new();
    batch[1][10 + 23] = 17;
    assert_eq!(merged(&mut merger, &batch).len(), 2, "not TCP: dropped");
    assert_eq!(merger.counters().malformed, 1);
}

#[test]
fn frames_that_are_not_cut() {
    let packet = packet(3000);
    let (virtio, frame) = (packet.virtio(), packet.frame());
    let plain = virtio.without_gso();
    assert_eq!(
        Cut::new(plain, &frame, 1450).err(),
        Some(CutError::NeedsFragments)
    );
    assert_eq!(Cut::new(plain, &frame, 3076).unwrap().count(), 1);
    let small = Cut::new(virtio, &frame, 10 + 66 + 63).err();
    assert_eq!(small, Some(CutError::SmallPath));
    assert_eq!(Cut::new(virtio, &frame, 10 + 66 + 64).unwrap().count(), 47);
    // A path that carries whole frames of the guest gets whole ones.
    assert_eq!(
        Cut::new(virtio, &frame, 3000).unwrap().segment_bytes(),
        76 + 2896
    );
    let mut bad = frame.clone();
    bad[20] |= 0x20;
    assert_eq!(
        Cut::new(virtio, &bad, 1450).err(),
        Some(CutError::Malformed)
    );
    let udp = VirtioHeader {
        gso: Gso::Udp,
        ..virtio
    };
    assert_eq!(Cut::new(udp, &frame, 1450).err(), Some(CutError::Malformed));
    let tiny = VirtioHeader {
        segment_bytes: 1,
        ..virtio
    };
    let mut scratch = vec![0; SCRATCH_BYTES];
    let finished = finish(tiny, &frame, Checksums::Partial, &mut scratch, |_, _| ());
    assert_eq!(finished, Err(CutError::Malformed), "too many frames");
}

/// Returns the short segments of a packet, and the bytes of payload in the first one.
fn short_segments(packet: &Packet) -> (Vec<Vec<u8>>, usize) {
    let (virtio, frame) = (packet.virtio(), packet.frame());
    let all = sent(virtio, &frame, 1432).unwrap();
    let plain = segments(virtio, &frame, 1432).unwrap();
    let head = usize::from(virtio.headers_bytes) + VIRTIO_BYTES;
    let payload = plain[0].len() - head;
    (all, payload)
}

#[test]
fn headers_of_short_segments_have_these_lengths() {
    // What a datagram of 1472 bytes carries: with and without time stamps, with the segment size
    // of an MTU of 1500 and with another one.
    for (ipv6, stamps, segment_bytes, payload) in [
        (false, true, 1448, 1432 - 48),
        (false, true, 1400, 1432 - 50),
        (false, false, 1460, 1432 - 40),
        (false, false, 1400, 1432 - 42),
        (true, true, 1428, 1432 - 73),
        (true, true, 1400, 1432 - 75),
        (true, false, 1440, 1432 - 65),
        (true, false, 1448, 1432 - 67),
    ] {
        let packet = Packet {
            ipv6,
            stamps,
            options: if stamps { 3 } else { 0 },
            segment_bytes,
            ..packet(5000)
        };
        let (all, carried) = short_segments(&packet);
        assert_eq!((all[0].len(), carried), (1432, payload), "{packet:?}");
    }
}

#[test]
fn short_segments_that_are_dropped() {
    let v4 = Packet {
        stamps: true,
        ..packet(5000)
    };
    let v6 = Packet {
        ipv6: true,
        segment_bytes: 1400,
        ..v4.clone()
    };
    let ((v4, _), (v6, _)) = (short_segments(&v4), short_segments(&v6));
    let (v4, v6) = (&v4[0], &v6[0]);
    assert_eq!((v4[0], v6[0]), (2 | 4 | 8 | 32, 1 | 4 | 8));
    let dropped = |segment: &[u8], at: usize, byte: u8| {
        let mut segment = segment.to_vec();
        segment[at] = byte;
        restored(&segment).is_none()
    };
    assert!(!dropped(v4, 0, v4[0]) && !dropped(v6, 0, v6[0]));
    for bit in [64, 128] {
        assert!(
            dropped(v4, 0, v4[0] | bit) && dropped(v6, 0, v6[0] | bit),
            "{bit}"
        );
    }
    assert!(dropped(v6, 0, v6[0] | 2), "IPv6 with DF");
    assert!(
        dropped(v4, 0, 2 | 4 | 32),
        "a segment size without segmentation"
    );
    assert!(dropped(v4, 0, 2 | 4 | 16), "CWR without segmentation");
    assert!(!dropped(v4, 0, 2 | 4));
    assert!(dropped(v6, 15, 0x45), "not the version of IPv6");
    let mut empty = v6.clone();
    empty[13..15].fill(0);
    assert_eq!(restored(&empty), None, "segments of no bytes");
    for (segment, head) in [(v4, 48), (v6, 75)] {
        for length in 0..=head {
            assert_eq!(restored(&segment[..length]), None, "{length} bytes");
        }
        assert!(restored(&segment[..head + 1]).is_some());
    }
    // A frame that is no segment may be empty, and none is longer than IP allows.
    let mut whole = v4.clone();
    whole[0] = 2 | 4;
    assert!(restored(&whole[..48]).is_some());
    whole.resize(48 + 65_535 - 52, 0);
    assert!(restored(&whole).is_some());
    whole.push(0);
    assert_eq!(restored(&whole), None);
}
