//! Tests the switch of a host with a gateway, and of one without.

use crate::address::Mac;
use crate::neighbour::MadeFrame;
use crate::packet::testing::{tcp, udp};
use crate::switch::testing::{arp, frame, solicitation};
use crate::switch::{
    FlowCounts, GatewayConfig, Output, PortConfig, PortId, Reason, Redirect, Report, Switch,
    SwitchConfig,
};
use longhaul_protocol::HostId;
use longhaul_protocol::flows::FlowState;
use std::time::Duration;

const GUEST: Mac = Mac([2, 0, 0, 0, 0, 0xa]);
const OTHER: Mac = Mac([2, 0, 0, 0, 0, 0xb]);
const GATEWAY: Mac = Mac([2, 0x6c, 0x68, 0, 0, 1]);
const ADDRESS: [u8; 4] = [10, 0, 0, 1];
const GUEST_ADDRESS: [u8; 4] = [10, 0, 0, 5];
const ENDS: [([u8; 4], u16); 2] = [(GUEST_ADDRESS, 40_000), ([192, 0, 2, 1], 80)];
const BACK: [([u8; 4], u16); 2] = [ENDS[1], ENDS[0]];
const T: Duration = Duration::from_secs(1000);
const OWN: HostId = HostId([9; 32]);
/// It has the gateway too.
const FAR: HostId = HostId([1; 32]);
/// It has not.
const PLAIN: HostId = HostId([2; 32]);

struct Net {
    switch: Switch,
    guests: PortId,
    gateway: PortId,
    far: PortId,
    plain: PortId,
}

fn ip(to: Mac, from: Mac, packet: &[u8]) -> Vec<u8> {
    let mut frame = [to.0, from.0].concat();
    frame.extend([8, 0]);
    frame.extend(packet);
    frame
}

impl Net {
    /// A host with the gateway, or one without.
    fn new(here: bool) -> Self {
        let mut switch = Switch::new(SwitchConfig::new([3, 4]));
        let guests = switch.add_local(PortConfig::LOCAL).unwrap();
        let gateway = switch.add_gateway(PortConfig::LOCAL).unwrap();
        let far = switch.add_host(FAR, PortConfig::HOST).unwrap();
        let plain = switch.add_host(PLAIN, PortConfig::HOST).unwrap();
        let mut net = Self {
            switch,
            guests,
            gateway,
            far,
            plain,
        };
        net.configure(here, &[FAR]);
        net
    }

    fn configure(&mut self, here: bool, hosts: &[HostId]) {
        let config = GatewayConfig {
            mac: GATEWAY,
            addresses: vec![ADDRESS],
            own: OWN,
            here: here.then_some(self.gateway),
            hosts: hosts.to_vec(),
        };
        self.switch.set_gateway(Some(config));
    }

    fn send(&mut self, from: PortId, bytes: &[u8]) -> Vec<PortId> {
        self.switch.frame(T, from, bytes).collect()
    }

    fn outputs(&mut self) -> Vec<Output> {
        std::iter::from_fn(|| self.switch.poll()).collect()
    }

    fn dropped(&self, reason: Reason) -> u64 {
        self.switch.counters().not_forwarded(reason)
    }
}

#[test]
fn a_guest_leaves_by_the_near_gateway_and_flows_of_another_one_go_on_there() {
    let mut net = Net::new(true);
    let Net {
        guests,
        gateway,
        far,
        plain,
        ..
    } = net;
    let carried = crate::packet::Packet::read(&tcp(ENDS, 16)).unwrap();
    let flow = longhaul_protocol::flows::Flow {
        protocol: 6,
        guest: carried.source,
        other: carried.destination,
    };
    net.switch.pin(T, guests, GUEST, 2).unwrap();
    let second = Duration::from_secs(1);
    let of = |host| (flow, host, FlowState::Open, second);
    net.switch.add_flows(T, GUEST, &[of(PLAIN)]);
    assert_eq!(
        net.switch.flow_counts().flows,
        0,
        "that host has no gateway"
    );
    net.switch.add_flows(T, GUEST, &[of(FAR)]);
    let out = ip(GATEWAY, GUEST, &tcp(ENDS, 16));
    assert_eq!(net.send(guests, &out), [far]);
    let mut new = ENDS;
    new[0].1 += 1;
    let first = ip(GATEWAY, GUEST, &tcp(new, 2));
    assert_eq!(net.send(guests, &first), [gateway]);
    let counts = FlowCounts {
        flows: 2,
        elsewhere: 1,
        ..FlowCounts::default()
    };
    assert_eq!(net.switch.flow_counts(), counts);
    // Answers come from both.
    assert_eq!(net.send(far, &ip(GUEST, GATEWAY, &tcp(BACK, 16))), [guests]);
    assert_eq!(
        net.send(gateway, &ip(GUEST, GATEWAY, &tcp([new[1], new[0]], 18))),
        [guests]
    );
    assert_eq!(
        net.switch.place(T, 0, GATEWAY),
        None,
        "its place is not learned"
    );
    let states: Vec<_> = net.switch.flows_of(T, GUEST);
    assert!(
        states
            .iter()
            .all(|(_, _, state, _)| *state == FlowState::Open)
    );
    // What other hosts send to the gateway is for the one here, whatever it is.
    let others = ip(GATEWAY, OTHER, &tcp(ENDS, 16));
    assert_eq!(net.send(far, &others), [gateway]);
    assert_eq!(net.send(plain, &others), [gateway]);
    assert_eq!(net.switch.flow_counts().flows, 2, "not of guests elsewhere");
    // A host that has left.
    net.switch.remove(T, far);
    net.configure(true, &[]);
    assert_eq!(net.send(guests, &out), [gateway]);
    assert_eq!(net.switch.flow_counts().given_up, 1);
    net.switch.set_gateway(None);
    assert_eq!(net.switch.flow_counts().flows, 0);
}

#[test]
fn the_gateway_of_a_guest_that_moved_answers_it_at_its_new_place() {
    let mut net = Net::new(true);
    let Net {
        guests,
        gateway,
        far,
        plain,
        ..
    } = net;
    net.switch.pin(T, guests, GUEST, 2).unwrap();
    let out = ip(GATEWAY, GUEST, &tcp(ENDS, 2));
    assert_eq!(net.send(guests, &out), [gateway]);
    let back = ip(GUEST, GATEWAY, &tcp(BACK, 18));
    assert_eq!(net.send(gateway, &back), [guests]);
    let redirect = Redirect {
        mac: GUEST,
        now_at: FAR,
        generation: 3,
    };
    net.switch.withdraw(T, redirect);
    assert_eq!(net.switch.flows_of(T, GUEST), [], "they have moved along");
    assert_eq!(net.send(gateway, &back), [far]);
    assert_eq!(net.send(far, &out), [gateway]);
    // The gateway there has not heard of the move yet.
    assert_eq!(net.send(far, &back), []);
    assert_eq!(net.dropped(Reason::SamePort), 1);
    // To an unknown guest.
    let unknown = ip(Mac([2, 7, 7, 7, 7, 7]), GATEWAY, &tcp(BACK, 18));
    assert_eq!(net.send(gateway, &unknown), [guests, far, plain]);
    assert_eq!(net.send(far, &unknown), [guests]);
}

#[test]
fn a_host_without_a_gateway_uses_the_first_of_the_others() {
    let mut net = Net::new(false);
    let Net {
        guests,
        gateway,
        far,
        plain,
        ..
    } = net;
    net.configure(false, &[PLAIN, FAR]);
    let out = ip(GATEWAY, GUEST, &udp(ENDS));
    assert_eq!(net.send(guests, &out), [plain]);
    // Another one is nearer now, and the flow stays.
    net.configure(false, &[FAR, PLAIN]);
    assert_eq!(net.send(guests, &out), [plain]);
    let mut new = ENDS;
    new[0].1 += 1;
    assert_eq!(net.send(guests, &ip(GATEWAY, GUEST, &udp(new))), [far]);
    assert_eq!(net.send(guests, &frame(GATEWAY, GUEST, 0, b"no IP")), [far]);
    // Nobody here is meant by others.
    assert_eq!(net.send(far, &ip(GATEWAY, OTHER, &udp(ENDS))), []);
    assert_eq!(net.dropped(Reason::NoGateway), 1);
    net.configure(false, &[]);
    assert_eq!(net.send(guests, &out), []);
    assert_eq!(net.dropped(Reason::NoGateway), 2);
    net.switch.set_gateway(None);
    assert_eq!(net.send(gateway, &ip(GUEST, GATEWAY, &udp(BACK))), []);
    assert_eq!(net.dropped(Reason::NoGateway), 3);
    assert_eq!(
        net.send(guests, &out),
        [far, plain],
        "an address like any other"
    );
}

#[test]
fn questions_for_the_gateway_are_answered_here_and_leave_no_host() {
    for here in [true, false] {
        let mut net = Net::new(here);
        let guests = net.guests;
        let (tag, gateway) = (None, (GATEWAY, ADDRESS));
        for (sender, question) in [
            (GUEST_ADDRESS, arp(GUEST, GUEST_ADDRESS, ADDRESS)),
            ([0; 4], arp(GUEST, [0; 4], ADDRESS)),
            (GUEST_ADDRESS, {
                let mut unicast = arp(GUEST, GUEST_ADDRESS, ADDRESS);
                unicast[..6].copy_from_slice(&GATEWAY.0);
                unicast
            }),
        ] {
            assert_eq!(net.send(guests, &question), []);
            let answer = Output::Answer {
                port: guests,
                frame: MadeFrame::arp_reply(tag, gateway, (GUEST, sender)),
            };
            assert_eq!(net.outputs(), [answer]);
        }
        assert_eq!(net.dropped(Reason::Answered), 3);
        let mut v6 = [0xfd; 16];
        v6[15] = 1;
        assert_eq!(net.send(guests, &solicitation(GUEST, v6, v6)).len(), 2);
        let in_vlan = {
            let mut tagged = arp(GUEST, GUEST_ADDRESS, ADDRESS);
            tagged.splice(12..12, [0x81, 0, 0, 7]);
            tagged
        };
        assert_eq!(net.send(guests, &in_vlan).len(), 2, "untagged frames only");
    }
}

#[test]
fn a_gateway_s_question_reaches_guests_everywhere_and_the_answer_all_gateways() {
    let mut net = Net::new(true);
    let Net {
        guests,
        gateway,
        far,
        plain,
        ..
    } = net;
    let question = arp(GATEWAY, ADDRESS, GUEST_ADDRESS);
    assert_eq!(net.send(gateway, &question), [guests, far, plain]);
    assert_eq!(
        net.send(far, &question),
        [guests],
        "not to the gateway here"
    );
    let mut answer = arp(GUEST, GUEST_ADDRESS, ADDRESS);
    answer[..6].copy_from_slice(&GATEWAY.0);
    answer[21] = 2;
    assert_eq!(net.send(guests, &answer), [gateway, far]);
    assert_eq!(net.send(plain, &answer), [gateway]);
    assert_eq!(net.outputs(), []);
    // A guest's broadcasts do not reach the gateway.
    assert_eq!(
        net.send(guests, &frame(Mac::BROADCAST, GUEST, 0, b"")),
        [far, plain]
    );
    for _ in 0..3000 {
        net.send(guests, &answer);
    }
    assert!(net.dropped(Reason::FloodLimit) > 900, "a limited rate");
}

#[test]
fn nobody_else_is_the_gateway() {
    let mut net = Net::new(true);
    let Net {
        guests,
        gateway,
        far,
        plain,
        ..
    } = net;
    let spoofed = |port, mac| Output::Report(Report::Spoofed { port, mac });
    let mac = ip(GUEST, GATEWAY, &udp(BACK));
    assert_eq!(net.send(guests, &mac), []);
    assert_eq!(net.send(plain, &mac), [], "a host without the gateway");
    let reports = [spoofed(guests, GATEWAY), spoofed(plain, GATEWAY)];
    assert_eq!(net.outputs(), reports);
    // Its address under another MAC address: told, asked with, and in a packet.
    for frame in [
        arp(GUEST, ADDRESS, GUEST_ADDRESS),
        arp(GUEST, ADDRESS, ADDRESS),
        ip(OTHER, GUEST, &udp([(ADDRESS, 1), ENDS[1]])),
    ] {
        assert_eq!(net.send(guests, &frame), []);
        assert_eq!(net.send(far, &frame), []);
    }
    assert_eq!(net.dropped(Reason::GatewaySpoofed), 8);
    assert_eq!(net.switch.sizes(), (0, 0), "nothing is learned");
    // The kernel sends from the gateway's address alone.
    assert_eq!(net.send(gateway, &ip(GUEST, OTHER, &udp(BACK))), []);
    assert_eq!(net.dropped(Reason::GatewaySpoofed), 9);
    assert_eq!(net.send(gateway, &frame(GUEST, GATEWAY, 7, b"")), []);
    // In a VLAN it is an address like any other.
    assert_eq!(
        net.send(guests, &frame(OTHER, GATEWAY, 7, b"")),
        [far, plain]
    );
}
