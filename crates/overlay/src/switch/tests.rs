//! Tests one switch by itself.

use super::testing::{advertisement, arp, frame, solicitation};
use super::*;
use crate::address::Address;

const A: Mac = Mac([2, 0, 0, 0, 0, 0xa]);
const B: Mac = Mac([2, 0, 0, 0, 0, 0xb]);
const C: Mac = Mac([2, 0, 0, 0, 0, 0xc]);
const T: Duration = Duration::from_secs(1000);
const HOST_1: HostId = HostId([1; 32]);
const HOST_2: HostId = HostId([2; 32]);

/// A switch with two ports of its host and two hosts.
struct Net {
    switch: Switch,
    x: PortId,
    y: PortId,
    one: PortId,
    two: PortId,
}

fn net() -> Net {
    net_with(SwitchConfig::new([3, 4]), PortConfig::LOCAL)
}

fn net_with(config: SwitchConfig, port: PortConfig) -> Net {
    let mut switch = Switch::new(config);
    let (x, y) = (
        switch.add_local(port).unwrap(),
        switch.add_local(port).unwrap(),
    );
    let one = switch.add_host(HOST_1, PortConfig::HOST).unwrap();
    let two = switch.add_host(HOST_2, PortConfig::HOST).unwrap();
    Net {
        switch,
        x,
        y,
        one,
        two,
    }
}

impl Net {
    fn send(&mut self, now: Duration, from: PortId, bytes: &[u8]) -> Vec<PortId> {
        self.switch.frame(now, from, bytes).collect()
    }

    fn outputs(&mut self) -> Vec<Output> {
        std::iter::from_fn(|| self.switch.poll()).collect()
    }

    fn dropped(&self, reason: Reason) -> u64 {
        self.switch.counters().not_forwarded(reason)
    }
}

#[test]
fn unknown_addresses_are_replicated_and_known_ones_are_not() {
    let mut net = net();
    let Net { x, y, one, two, .. } = net;
    assert_eq!(net.send(T, x, &frame(B, A, 0, b"1")), [y, one, two]);
    assert_eq!(net.send(T, one, &frame(A, B, 0, b"2")), [x]);
    assert_eq!(net.send(T, x, &frame(B, A, 0, b"3")), [one]);
    assert_eq!(net.send(T, two, &frame(B, C, 0, b"4")), [], "split horizon");
    assert_eq!(net.dropped(Reason::SplitHorizon), 1);
    assert_eq!(net.send(T, two, &frame(Mac::BROADCAST, C, 0, b"5")), [x, y]);
    assert_eq!(net.send(T, x, &frame(A, C, 0, b"6")), [], "same port");
    let later = T + Duration::from_secs(301);
    assert_eq!(net.send(later, x, &frame(B, A, 0, b"7")), [y, one, two]);
    net.switch.tick(later);
    assert_eq!(net.switch.sizes().0, 1);
}

#[test]
fn frames_of_other_vlans_are_dropped_from_both_sides() {
    let mut net = net();
    let Net { x, y, one, two, .. } = net;
    let mut vlans = Vlans::untagged();
    vlans.insert(7, 7);
    net.switch.set_vlans(vlans);
    for (from, to) in [(x, vec![y, one, two]), (one, vec![x, y])] {
        assert_eq!(net.send(T, from, &frame(Mac::BROADCAST, A, 8, b"")), []);
        assert_eq!(net.send(T, from, &frame(Mac::BROADCAST, A, 7, b"")), to);
        assert_eq!(net.send(T, from, &frame(Mac::BROADCAST, A, 0, b"")), to);
    }
    assert_eq!(net.dropped(Reason::Vlan), 2);
    assert_eq!(net.switch.sizes().0, 2, "what is dropped is not learned");
}

#[test]
fn each_vlan_learns_by_itself() {
    let mut net = net();
    let Net { x, y, one, two, .. } = net;
    net.send(T, one, &frame(Mac::BROADCAST, B, 7, b""));
    assert_eq!(net.send(T, x, &frame(B, A, 7, b"")), [one]);
    assert_eq!(net.send(T, x, &frame(B, A, 8, b"")), [y, one, two]);
    assert_eq!(net.switch.place(T, 7, B), Some(one));
    assert_eq!(net.switch.place(T, 0, B), None);
}

#[test]
fn frames_that_must_not_be_forwarded() {
    let mut net = net();
    let x = net.x;
    for (bytes, reason) in [
        (vec![0; 13], Reason::Malformed),
        (frame(B, Mac::BROADCAST, 0, b""), Reason::BadSource),
        (frame(B, Mac([1, 0, 0, 0, 0, 1]), 0, b""), Reason::BadSource),
        (frame(B, Mac::ZERO, 0, b""), Reason::BadSource),
        (frame(B, A, 0xfff, b""), Reason::Malformed),
        (vec![2; 65_558], Reason::Oversized),
    ] {
        let before = net.dropped(reason);
        assert_eq!(net.send(T, x, &bytes), []);
        assert_eq!(net.dropped(reason), before + 1, "{reason:?}");
    }
    for last in 0..16 {
        let to = Mac([1, 0x80, 0xc2, 0, 0, last]);
        assert_eq!(net.send(T, x, &frame(to, A, 0, b"")), []);
    }
    assert_eq!(net.dropped(Reason::LinkLocal), 16);
    let to = Mac([1, 0x80, 0xc2, 0, 0, 0x10]);
    assert_eq!(net.send(T, x, &frame(to, A, 0, b"")).len(), 3);
    assert!(net.switch.remove(T, x) && !net.switch.remove(T, x));
    let again = net.switch.add_local(PortConfig::LOCAL).unwrap();
    assert_ne!(x, again);
    assert_eq!(net.send(T, x, &frame(B, A, 0, b"")), []);
    assert_eq!(net.dropped(Reason::UnknownPort), 1);
}

#[test]
fn an_address_that_moves_too_often_is_held_and_reported_once() {
    let mut net = net();
    let Net { x, one, two, .. } = net;
    net.send(T, one, &frame(A, B, 0, b""));
    for turn in 1..=20u64 {
        let from = if turn % 2 == 1 { two } else { one };
        net.send(T + Duration::from_millis(turn), from, &frame(A, B, 0, b""));
    }
    let held = Output::Report(Report::Held {
        mac: B,
        vlan: 0,
        port: two,
    });
    assert_eq!(net.outputs(), [held]);
    assert_eq!(net.switch.counters().moves, 5);
    assert_eq!(net.switch.counters().moves_held, 8, "from one, 6 to 20");
    let soon = T + Duration::from_secs(20);
    assert_eq!(net.send(soon, x, &frame(B, A, 0, b"")), [two]);
    // An announcement wins, and moves its address again at once.
    let announcement = Announcement {
        mac: B,
        generation: 1,
    };
    assert!(net.switch.announced(soon, HOST_1, announcement));
    assert_eq!(net.send(soon, x, &frame(B, A, 0, b"")), [one]);
    // Frames of the old place that come late do not move it back.
    net.send(soon, two, &frame(A, B, 0, b""));
    assert_eq!(net.send(soon, x, &frame(B, A, 0, b"")), [one]);
    let settled = soon + Duration::from_secs(3);
    net.send(settled, two, &frame(A, B, 0, b""));
    assert_eq!(net.send(settled, x, &frame(B, A, 0, b"")), [two]);
}

#[test]
fn tables_are_bounded() {
    let mut config = SwitchConfig::new([3, 4]);
    config.macs_max = 6;
    let port = PortConfig {
        macs_max: 4,
        ..PortConfig::LOCAL
    };
    let mut net = net_with(config, port);
    let Net { x, y, .. } = net;
    for last in 0..10 {
        net.send(T, x, &frame(A, Mac([2, 1, 0, 0, 0, last]), 0, b""));
    }
    assert_eq!(net.switch.sizes().0, 4);
    for last in 0..10 {
        net.send(T, y, &frame(A, Mac([2, 2, 0, 0, 0, last]), 0, b""));
    }
    assert_eq!(net.switch.sizes().0, 6);
    assert_eq!(net.switch.counters().not_learned, 6 + 8);
    let full = [Report::Full(x), Report::Full(y)].map(Output::Report);
    assert_eq!(net.outputs(), full);
    // An address that moves does not get around the limit of its new port.
    net.send(T, y, &frame(A, Mac([2, 1, 0, 0, 0, 0]), 0, b""));
    net.send(T, y, &frame(A, Mac([2, 1, 0, 0, 0, 1]), 0, b""));
    net.send(T, y, &frame(A, Mac([2, 1, 0, 0, 0, 2]), 0, b""));
    assert_eq!(net.switch.place(T, 0, Mac([2, 1, 0, 0, 0, 2])), Some(x));
    net.switch.remove(T, y);
    assert_eq!(net.switch.sizes().0, 2);
    net.switch.tick(T + Duration::from_secs(300));
    assert_eq!(net.switch.sizes().0, 0);
    net.send(T, x, &frame(A, Mac([2, 3, 0, 0, 0, 0]), 0, b""));
    assert_eq!(net.switch.sizes().0, 1);
}

#[test]
fn a_port_that_floods_is_limited() {
    let mut net = net();
    let Net { x, y, .. } = net;
    let broadcast = frame(Mac::BROADCAST, A, 0, b"");
    let sent = (0..5000).filter(|_| !net.send(T, x, &broadcast).is_empty());
    assert_eq!(sent.count(), 2000);
    assert_eq!(net.dropped(Reason::FloodLimit), 3000);
    let report = Output::Report(Report::FloodLimited(x));
    assert_eq!(net.outputs(), [report]);
    assert!(net.send(T, x, &frame(C, A, 0, b"")).is_empty(), "unknown");
    assert!(
        !net.send(T, y, &frame(C, B, 0, b"")).is_empty(),
        "another port"
    );
    assert_eq!(net.send(T, x, &frame(B, A, 0, b"")), [y], "known");
    let group = Mac([0x33, 0x33, 0, 0, 0, 1]);
    let sent = (0..20_000).filter(|_| !net.send(T, x, &frame(group, A, 0, b"")).is_empty());
    assert_eq!(sent.count(), 10_000);
}

#[test]
fn a_pinned_address_stays_at_its_port() {
    let mut net = net_with(
        SwitchConfig::new([3, 4]),
        PortConfig {
            only_own_mac: true,
            ..PortConfig::LOCAL
        },
    );
    let Net { x, y, one, .. } = net;
    assert_eq!(net.send(T, x, &frame(B, A, 0, b"")), []);
    assert_eq!(net.dropped(Reason::NotOwnMac), 1);
    net.send(T, one, &frame(Mac::BROADCAST, A, 5, b""));
    assert_eq!(net.switch.place(T, 5, A), Some(one));
    net.switch.pin(T, x, A, 1).unwrap();
    assert_eq!(net.switch.place(T, 5, A), Some(x));
    assert_eq!(net.send(T, x, &frame(B, A, 0, b"")).len(), 3);
    // A frame that the guest sent before it moved here, and one that came too late for that.
    let late = T + Duration::from_secs(3);
    assert_eq!(net.send(T, one, &frame(B, A, 0, b"")), [x, y]);
    assert_eq!(net.send(late, one, &frame(B, A, 0, b"")), []);
    assert_eq!(net.send(T, y, &frame(B, A, 0, b"")), []);
    assert_eq!(net.dropped(Reason::Spoofed), 2);
    assert_eq!(net.switch.place(T, 0, A), Some(x));
    assert_eq!(net.send(T, one, &frame(A, B, 9, b"")), [x]);
    assert_eq!(
        net.switch.pin(T, y, A, 1),
        Err(SwitchError::PinnedElsewhere)
    );
    assert_eq!(net.switch.pin(T, one, B, 1), Err(SwitchError::NotPinnable));
    assert_eq!(
        net.switch.pin(T, x, Mac::BROADCAST, 1),
        Err(SwitchError::NotPinnable)
    );
    let announcement = Announcement {
        mac: A,
        generation: 2,
    };
    net.outputs();
    assert!(!net.switch.announced(T, HOST_1, announcement));
    let report = Report::Contested {
        host: HOST_1,
        announcement,
    };
    assert_eq!(net.outputs(), [Output::Report(report)]);
    assert!(net.switch.unpin(A) && !net.switch.unpin(A));
    assert!(net.switch.announced(T, HOST_1, announcement));
    assert_eq!(net.switch.place(T, 0, A), Some(one));
}

#[test]
fn the_switch_answers_for_stations_at_other_hosts() {
    let mut net = net();
    let Net { x, y, one, .. } = net;
    let (a, b, c) = ([10, 0, 0, 1], [10, 0, 0, 2], [10, 0, 0, 3]);
    assert_eq!(net.send(T, one, &arp(B, b, a)), [x, y]);
    assert_eq!(net.send(T, y, &arp(C, c, [10, 0, 0, 9])).len(), 3);
    assert_eq!(net.send(T, x, &arp(A, a, b)), []);
    let answer = Output::Answer {
        port: x,
        frame: MadeFrame::arp_reply(None, (B, b), (A, a)),
    };
    assert_eq!(net.outputs(), [answer]);
    assert_eq!(net.dropped(Reason::Answered), 1);
    // Not for stations of this host, for probes, for announcements, or for questions to one.
    assert_eq!(net.send(T, x, &arp(A, a, c)).len(), 3);
    assert_eq!(net.send(T, x, &arp(A, [0; 4], b)).len(), 3);
    assert_eq!(net.send(T, x, &arp(A, b, b)).len(), 3);
    assert_eq!(net.switch.counters().addresses_contested, 1);
    assert_eq!(net.send(T, y, &arp(C, c, b)).len(), 3, "two claim it");
    let later = T + Duration::from_secs(31);
    net.send(later, one, &arp(B, b, a));
    net.send(later, one, &arp(B, b, a));
    assert_eq!(net.send(later, x, &arp(A, a, b)).len(), 3);
    let later = T + Duration::from_secs(62);
    let mut unicast = arp(A, a, b);
    unicast[..6].copy_from_slice(&B.0);
    assert_eq!(net.send(later, x, &unicast), [one]);
    assert_eq!(net.send(later, x, &arp(A, a, b)), []);
    let late = later + Duration::from_secs(120);
    assert_eq!(net.send(late, x, &arp(A, a, b)).len(), 3, "too old");
}

#[test]
fn neighbour_answers_need_the_router_flag() {
    let mut net = net();
    let Net { x, one, .. } = net;
    let (mut a, mut b) = ([0xfd; 16], [0xfd; 16]);
    (a[15], b[15]) = (1, 2);
    net.send(T, one, &solicitation(B, b, a));
    assert_eq!(net.send(T, x, &solicitation(A, a, b)).len(), 3);
    net.send(T, one, &advertisement(B, A, b, 0x80));
    assert_eq!(net.send(T, x, &solicitation(A, a, b)), []);
    let answer = Output::Answer {
        port: x,
        frame: MadeFrame::neighbour_reply(None, (B, b), (A, a), true),
    };
    assert_eq!(net.outputs(), [answer]);
    assert_eq!(net.send(T, x, &solicitation(A, [0; 16], b)).len(), 3);
    let known = KnownAddress {
        vlan: 0,
        address: Address::V6(b),
        router: Some(true),
    };
    assert_eq!(net.switch.addresses_of(B), [known]);
}

#[test]
fn a_guest_that_comes_is_announced() {
    let mut net = net();
    let Net { x, .. } = net;
    assert!(!net.switch.announce(A));
    let known = [
        (0, Address::V4([10, 0, 0, 1]), None),
        (0, Address::V6([0xfd; 16]), Some(true)),
        (7, Address::V4([10, 7, 0, 1]), None),
    ];
    let known = known.map(|(vlan, address, router)| KnownAddress {
        vlan,
        address,
        router,
    });
    net.switch.add_addresses(T, A, &known);
    net.switch.pin(T, x, A, 4).unwrap();
    assert!(net.switch.announce(A));
    let mut frames = vec![MadeFrame::rarp(None, A)];
    frames.extend(MadeFrame::gratuitous_arp(None, A, [10, 0, 0, 1]));
    frames.push(MadeFrame::unsolicited(None, A, [0xfd; 16], true));
    frames.push(MadeFrame::rarp(Some(7), A));
    frames.extend(MadeFrame::gratuitous_arp(Some(7), A, [10, 7, 0, 1]));
    let announcement = Announcement {
        mac: A,
        generation: 4,
    };
    let mut expected = vec![Output::Announce(announcement)];
    expected.extend(
        frames
            .into_iter()
            .map(|frame| Output::Flood { except: x, frame }),
    );
    assert_eq!(net.outputs(), expected);
    assert_eq!(net.switch.flood(x).count(), 3);
}

#[test]
fn the_old_place_tells_who_still_sends_there() {
    let mut net = net();
    let Net { x, y, one, two, .. } = net;
    net.switch.pin(T, x, A, 4).unwrap();
    assert_eq!(net.send(T, one, &frame(A, B, 0, b"")), [x]);
    let redirect = Redirect {
        mac: A,
        now_at: HOST_2,
        generation: 5,
    };
    net.switch.withdraw(T, redirect);
    assert_eq!(net.send(T, y, &frame(A, C, 0, b"")), [two]);
    for _ in 0..1000 {
        assert_eq!(net.send(T, one, &frame(A, B, 3, b"")), []);
    }
    assert_eq!(net.dropped(Reason::Moved), 1000);
    let told = Output::Redirect {
        to: HOST_1,
        redirect,
    };
    let outputs = net.outputs();
    assert_eq!(outputs.len(), 100, "a limited rate");
    assert!(outputs.iter().all(|output| *output == told));
    assert_eq!(net.send(T, two, &frame(A, B, 0, b"")), [], "not to itself");
    assert_eq!(net.outputs(), []);
    // It comes back: it is here again.
    net.switch.pin(T, x, A, 6).unwrap();
    assert_eq!(net.send(T, one, &frame(A, B, 0, b"")), [x]);
    net.switch.withdraw(T, redirect);
    let late = T + Duration::from_secs(300);
    assert_eq!(net.send(late, y, &frame(A, C, 0, b"")).len(), 3);
}

#[test]
fn a_guest_s_last_frames_do_not_bring_it_back_to_the_old_place() {
    let mut net = net();
    let Net { x, y, one, two, .. } = net;
    net.switch.pin(T, x, A, 4).unwrap();
    let redirect = Redirect {
        mac: A,
        now_at: HOST_2,
        generation: 5,
    };
    net.switch.withdraw(T, redirect);
    // It sent this before it stopped.
    assert_eq!(net.send(T, x, &frame(B, A, 0, b"")).len(), 3, "forwarded");
    assert_eq!(net.switch.place(T, 0, A), Some(two), "and not learned");
    assert_eq!(net.send(T, one, &frame(A, B, 0, b"")), []);
    assert_eq!(net.outputs().len(), 1, "the sender gets a redirect");
    // Nor do they once it was heard at its new place.
    net.send(T, two, &frame(C, A, 0, b""));
    net.send(T, x, &frame(B, A, 0, b""));
    assert_eq!(net.send(T, y, &frame(A, C, 0, b"")), [two]);
    // It comes back by other means.
    let settled = T + Duration::from_secs(3);
    net.send(settled, x, &frame(B, A, 0, b""));
    assert_eq!(net.send(settled, one, &frame(A, B, 0, b"")), [x]);
}

#[test]
fn a_redirect_counts_from_the_place_that_was_known() {
    let mut net = net();
    let Net { one, two, .. } = net;
    net.send(T, one, &frame(Mac::BROADCAST, B, 0, b""));
    net.send(T, one, &frame(Mac::BROADCAST, B, 7, b""));
    let redirect = Redirect {
        mac: B,
        now_at: HOST_2,
        generation: 3,
    };
    assert!(!net.switch.redirected(T, HOST_2, redirect));
    assert!(!net.switch.redirected(T, HostId([9; 32]), redirect));
    assert_eq!(net.switch.place(T, 0, B), Some(one));
    assert!(net.switch.redirected(T, HOST_1, redirect));
    assert_eq!(net.switch.place(T, 0, B), Some(two));
    assert_eq!(net.switch.place(T, 7, B), Some(two));
    let older = Announcement {
        mac: B,
        generation: 2,
    };
    assert!(!net.switch.announced(T, HOST_1, older));
    assert_eq!(net.switch.counters().told_stale, 1);
    assert!(!net.switch.announced(T, HostId([9; 32]), older));
    // To a host that is not known here: the address is unknown.
    let unknown = Redirect {
        now_at: HostId([9; 32]),
        ..redirect
    };
    assert!(net.switch.redirected(T, HOST_2, unknown));
    assert_eq!(net.switch.place(T, 7, B), None);
    assert_eq!(net.switch.sizes().0, 0);
}

#[test]
fn announcements_are_limited() {
    let mut net = net();
    let told = (0..3000u16).filter(|number| {
        let [high, low] = number.to_be_bytes();
        let announcement = Announcement {
            mac: Mac([2, 0, 0, 0, high, low]),
            generation: 1,
        };
        net.switch.announced(T, HOST_1, announcement)
    });
    assert_eq!(told.count(), 1000);
    let group = Announcement {
        mac: Mac::BROADCAST,
        generation: 1,
    };
    assert!(!net.switch.announced(T, HOST_2, group));
    assert_eq!(
        net.switch.add_host(HOST_1, PortConfig::HOST),
        Err(SwitchError::KnownHost)
    );
    assert_eq!(net.switch.behind(net.one), Some(Behind::Host(HOST_1)));
    assert_eq!(net.switch.host_port(HOST_2), Some(net.two));
    assert_eq!(net.switch.ports().len(), 4);
}
