//! Fuzzes what guests and members of a network may send: frames to a switch, and super-frames that
//! are cut, merged, finished and split.

use longhaul_overlay::fragment::{Reassembler, Split};
use longhaul_overlay::offload::{Checksums, Cut, Gso, Merger, SCRATCH_BYTES, VirtioHeader, finish};
use longhaul_overlay::switch::{
    Announcement, Behind, GatewayConfig, Output, PortConfig, PortId, Redirect, SwitchConfig,
};
use longhaul_overlay::{Mac, NetworkId, Switch};
use longhaul_protocol::HostId;
use std::time::Duration;

/// The maximum number of frames of one input.
const FRAMES_MAX: usize = 64;

/// What an input did, so that seeds can be judged.
#[derive(Debug, Default)]
pub(crate) struct Done {
    pub(crate) forwarded: usize,
    pub(crate) outputs: usize,
    pub(crate) cut: usize,
    pub(crate) short: usize,
    pub(crate) merged: usize,
}

/// Runs `data`: records of a port or an action (one byte), a length (one byte), and a frame.
pub(crate) fn run(data: &[u8]) -> Done {
    let mut done = Done::default();
    let mut net = Net::new();
    let mut merger = Merger::new();
    let mut rest = data;
    for step in 0..FRAMES_MAX {
        let Some((&[what, length], more)) = rest.split_first_chunk::<2>() else {
            break;
        };
        let (record, more) = more.split_at(usize::from(length).min(more.len()));
        rest = more;
        let now = Duration::from_millis(step as u64 * 100);
        if what & 0x80 == 0 {
            net.step(now, what, record, &mut done);
        } else {
            offload(now, what, record, &mut merger, &mut done);
        }
    }
    merger.flush(&mut |_, _| done.merged += 1);
    done
}

struct Net {
    switch: Switch,
    ports: [PortId; 4],
}

impl Net {
    fn new() -> Self {
        let mut config = SwitchConfig::new([1, 2]);
        (config.macs_max, config.addresses_max) = (8, 8);
        (config.flows_max, config.flows_per_guest_max) = (4, 3);
        let mut switch = Switch::new(config);
        let own = PortConfig {
            only_own_mac: true,
            ..PortConfig::LOCAL
        };
        let ports = [
            switch.add_local(PortConfig::LOCAL),
            switch.add_local(own),
            switch.add_host(HostId([1; 32]), PortConfig::HOST),
            switch.add_host(HostId([2; 32]), PortConfig::HOST),
        ];
        let ports = ports.map(|port| port.expect("there is room"));
        let gateway = switch
            .add_gateway(PortConfig::LOCAL)
            .expect("there is room");
        switch.set_gateway(Some(GatewayConfig {
            mac: Mac([2, 0x6c, 0x68, 0, 0, 1]),
            addresses: vec![[10, 0, 0, 1]],
            own: HostId([9; 32]),
            here: Some(gateway),
            hosts: vec![HostId([1; 32])],
        }));
        Self { switch, ports }
    }

    fn step(&mut self, now: Duration, what: u8, record: &[u8], done: &mut Done) {
        let port = self.ports[usize::from(what % 4)];
        let mac = record.first_chunk().map_or(Mac::ZERO, |mac| Mac(*mac));
        let generation = u64::from(what >> 5);
        let host = HostId([what % 4; 32]);
        let switch = &mut self.switch;
        match what >> 2 & 7 {
            0 => _ = switch.pin(now, port, mac, generation),
            1 => _ = switch.announce(mac),
            2 => {
                let now_at = HostId([record.len() as u8 % 3; 32]);
                let redirect = Redirect {
                    mac,
                    now_at,
                    generation,
                };
                if what & 0x40 == 0 {
                    switch.withdraw(now, redirect);
                } else {
                    switch.redirected(now, host, redirect);
                }
            }
            3 => _ = switch.announced(now, host, Announcement { mac, generation }),
            _ => {
                let to: Vec<PortId> = switch.frame(now, port, record).collect();
                let is_here = |port| {
                    let behind = self.switch.behind(port);
                    matches!(behind, Some(Behind::Local | Behind::Gateway))
                };
                let local = is_here(port);
                for other in &to {
                    assert_ne!(*other, port);
                    assert_eq!(to.iter().filter(|to| *to == other).count(), 1);
                    assert!(local || is_here(*other));
                }
                done.forwarded += to.len();
            }
        }
        assert!(self.switch.sizes().0 <= 8 && self.switch.sizes().1 <= 8);
        assert!(self.switch.flow_counts().flows <= 4);
        while let Some(output) = self.switch.poll() {
            done.outputs += 1;
            if let Output::Answer { frame, .. } | Output::Flood { frame, .. } = output {
                assert!(frame.bytes().len() >= 60);
            }
        }
    }
}

/// Cuts, merges, finishes and splits one frame.
fn offload(now: Duration, what: u8, record: &[u8], merger: &mut Merger, done: &mut Done) {
    merger.push(record, &mut |virtio, frame| {
        done.merged += 1;
        VirtioHeader::parse(&virtio.to_bytes(), frame.len()).expect("what is written can be read");
    });
    merger.push_short(record, &mut |virtio, frame| {
        done.merged += 1;
        VirtioHeader::parse(&virtio.to_bytes(), frame.len()).expect("what is written can be read");
    });
    let Ok((virtio, frame)) = VirtioHeader::split(record) else {
        return;
    };
    let max = usize::from(what & 0x7f) * 2;
    if let Ok(cut) = Cut::new(virtio, frame, max) {
        done.cut += cut.count();
        for index in 0..cut.count() {
            let mut out = [0; 600];
            let length = cut.write(index, &mut out).expect("there is room");
            assert!(length <= max && length <= cut.segment_bytes());
            if cut.is_short() {
                done.short += 1;
                let malformed = merger.counters().malformed;
                merger.push_short(&out[..length], &mut |_, _| done.merged += 1);
                assert_eq!(merger.counters().malformed, malformed);
                continue;
            }
            VirtioHeader::split(&out[..length]).expect("what is written can be read");
            merger.push(&out[..length], &mut |_, _| done.merged += 1);
        }
    }
    let mut scratch = vec![0; SCRATCH_BYTES];
    let _ = finish(
        virtio,
        frame,
        Checksums::Complete,
        &mut scratch,
        |virtio, _| {
            assert!(!virtio.needs_checksum && virtio.gso == Gso::None);
        },
    );
    if let Ok(split) = Split::new(7, record.len(), max) {
        let (virtio, frame) = record.split_at(10);
        let mut reassembler = Reassembler::new();
        let mut whole = None;
        for index in 0..split.count() {
            let mut out = [0; 300];
            if let Some(length) = split.write(index, virtio, frame, &mut out) {
                let pushed = reassembler.push(now, NetworkId(1), &out[..length]);
                whole = pushed.expect("fragments of one frame").map(<[u8]>::to_vec);
            }
        }
        assert!(whole.is_none_or(|whole| whole == record));
    }
}
