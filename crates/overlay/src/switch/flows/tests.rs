//! Tests the table of flows by itself.

use super::*;
use crate::packet::testing::{fragment, icmp, tcp, udp};

const GUEST: Mac = Mac([2, 0, 0, 0, 0, 0xa]);
const OTHER: Mac = Mac([2, 0, 0, 0, 0, 0xb]);
const OWN: HostId = HostId([1; 32]);
const OLD: HostId = HostId([2; 32]);
const T: Duration = Duration::from_secs(1_000_000);
const ENDS: [([u8; 4], u16); 2] = [([10, 0, 0, 5], 40_000), ([192, 0, 2, 1], 80)];
const BACK: [([u8; 4], u16); 2] = [ENDS[1], ENDS[0]];
const SYN: u8 = 2;
const SYN_ACK: u8 = 18;
const ACK: u8 = 16;
const FIN: u8 = 17;
const RST: u8 = 4;

fn flows() -> Flows {
    Flows::new(Keyed::new([5, 6]), 1000, 100)
}

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

impl Flows {
    /// A guest's packet; returns where it goes, with this gateway near.
    fn out(&mut self, now: Duration, packet: &[u8], near: HostId) -> HostId {
        let packet = Packet::read(packet).unwrap();
        self.outbound(now, GUEST, &packet, Some(near), |_| true)
            .unwrap()
    }

    fn back(&mut self, now: Duration, packet: &[u8], gateway: HostId) {
        self.inbound(now, GUEST, &Packet::read(packet).unwrap(), gateway);
    }

    fn states(&self, now: Duration) -> Vec<(HostId, FlowState)> {
        let of = self.of(now, GUEST);
        of.iter()
            .map(|(_, gateway, state, _)| (*gateway, *state))
            .collect()
    }
}

#[test]
fn a_flow_stays_at_the_gateway_where_it_began() {
    let mut flows = flows();
    assert_eq!(flows.out(T, &tcp(ENDS, SYN), OLD), OLD);
    // Near is another gateway from now on: the guest has moved.
    assert_eq!(
        flows.out(T, &tcp(ENDS, SYN), OWN),
        OLD,
        "a repeated request"
    );
    assert_eq!(flows.states(T), [(OLD, FlowState::Opening)]);
    flows.back(T, &tcp(BACK, SYN_ACK), OLD);
    assert_eq!(flows.states(T), [(OLD, FlowState::Open)]);
    assert_eq!(flows.out(T, &tcp(ENDS, ACK), OWN), OLD);
    assert_eq!(flows.out(T, &tcp(ENDS, SYN), OWN), OLD, "open still");
    let error = icmp([ENDS[0].0, ENDS[1].0], 3, 0, &tcp(BACK, ACK));
    assert_eq!(flows.out(T, &error, OWN), OLD, "an error about it");
    // Any other end or protocol is another flow.
    let mut others = [ENDS; 4];
    others[0][0].1 += 1;
    others[1][1].1 += 1;
    others[2][0].0[3] += 1;
    others[3][1].0[3] += 1;
    for other in others {
        assert_eq!(flows.out(T, &tcp(other, SYN), OWN), OWN);
    }
    assert_eq!(flows.out(T, &udp(ENDS), OWN), OWN);
    let packet = Packet::read(&tcp(ENDS, SYN)).unwrap();
    let of_other = flows.outbound(T, OTHER, &packet, Some(OWN), |_| true);
    assert_eq!(of_other, Some(OWN), "another guest");
    assert_eq!(flows.sizes(OWN), (7, 1));
}

#[test]
fn a_flow_ends_as_connection_tracking_ends_it() {
    for (end, last_s) in [(FIN, 120), (RST, 10)] {
        for from_guest in [true, false] {
            let mut flows = flows();
            flows.out(T, &tcp(ENDS, SYN), OLD);
            flows.back(T, &tcp(BACK, SYN_ACK), OLD);
            if from_guest {
                flows.out(T, &tcp(ENDS, end), OWN);
            } else {
                flows.back(T, &tcp(BACK, end), OLD);
            }
            let late = T + s(last_s - 1);
            assert_eq!(flows.states(late).len(), 1);
            assert_eq!(flows.states(late + s(1)), []);
            // A packet of the end still goes the old way, and a new connection does not.
            assert_eq!(flows.out(late, &tcp(ENDS, ACK), OWN), OLD);
            assert_eq!(flows.out(late, &tcp(ENDS, SYN), OWN), OWN);
            assert_eq!(flows.states(late), [(OWN, FlowState::Opening)]);
        }
    }
    let mut flows = flows();
    flows.out(T, &tcp(ENDS, SYN), OLD);
    assert_eq!(flows.states(T + s(119)).len(), 1);
    assert_eq!(flows.states(T + s(120)), []);
    flows.back(T, &tcp(BACK, SYN_ACK), OLD);
    let days = s(5 * 86_400);
    assert_eq!(flows.states(T + days - s(1)).len(), 1);
    assert_eq!(flows.out(T + days - s(1), &tcp(ENDS, ACK), OWN), OLD);
    assert_eq!(
        flows.out(T + days * 2, &tcp(ENDS, ACK), OWN),
        OWN,
        "too old"
    );
    flows.sweep(T + days * 2);
    assert_eq!((flows.sizes(OWN), flows.guests.len()), ((0, 0), 0));
}

#[test]
fn datagrams_age_by_whether_they_are_answered() {
    let mut flows = flows();
    assert_eq!(flows.out(T, &udp(ENDS), OLD), OLD);
    assert_eq!(flows.out(T + s(29), &udp(ENDS), OWN), OLD);
    assert_eq!(flows.states(T + s(58)), [(OLD, FlowState::Unanswered)]);
    assert_eq!(
        flows.out(T + s(59), &udp(ENDS), OWN),
        OWN,
        "30 s without any"
    );
    flows.back(T + s(59), &udp(BACK), OWN);
    assert_eq!(flows.states(T + s(178)), [(OWN, FlowState::Answered)]);
    assert_eq!(flows.states(T + s(179)), []);
    let echo = icmp([ENDS[0].0, ENDS[1].0], 8, 9, b"");
    assert_eq!(flows.out(T, &echo, OLD), OLD);
    flows.back(T, &icmp([ENDS[1].0, ENDS[0].0], 0, 9, b""), OLD);
    assert_eq!(flows.out(T + s(100), &echo, OWN), OLD);
}

#[test]
fn what_a_gateway_sends_says_where_a_flow_began() {
    let mut flows = flows();
    // The agent has restarted: nothing is known. TCP is not taken for a new connection.
    assert_eq!(flows.out(T, &tcp(ENDS, ACK), OWN), OWN);
    assert_eq!(flows.states(T), []);
    flows.back(T, &tcp(BACK, ACK), OLD);
    assert_eq!(flows.states(T), [(OLD, FlowState::Open)]);
    assert_eq!(flows.out(T, &tcp(ENDS, ACK), OWN), OLD);
    // Late packets of an earlier flow at another gateway change nothing, nor do its ends.
    flows.back(T + s(1), &tcp(BACK, RST), OWN);
    flows.back(T + s(1), &tcp(BACK, ACK), OWN);
    assert_eq!(flows.of(T + s(1), GUEST)[0].3, s(1));
    assert_eq!(flows.states(T + s(1)), [(OLD, FlowState::Open)]);
    // A connection from outside, and its beginning again.
    let (to, from) = ([ENDS[1], ENDS[0]], [(ENDS[0].0, 22), ENDS[1]]);
    let inward = [to[0], from[0]];
    flows.back(T, &tcp(inward, SYN), OLD);
    assert_eq!(flows.out(T, &tcp(from, SYN_ACK), OWN), OLD);
    flows.back(T, &tcp(inward, RST), OLD);
    flows.back(T, &tcp(inward, SYN), OWN);
    assert_eq!(flows.out(T, &tcp(from, SYN_ACK), OLD), OWN);
    // The end of something unknown begins nothing; an error neither.
    let unknown = [(ENDS[1].0, 81), ENDS[0]];
    flows.back(T, &tcp(unknown, FIN), OLD);
    flows.back(T, &tcp(unknown, RST), OLD);
    let error = icmp([ENDS[1].0, ENDS[0].0], 3, 0, &udp([ENDS[0], unknown[0]]));
    flows.back(T, &error, OLD);
    assert_eq!(flows.sizes(OWN).0, 2);
    flows.back(T, &udp(BACK), OLD);
    assert_eq!(flows.out(T, &udp(ENDS), OWN), OLD);
}

#[test]
fn fragments_follow_the_first_one() {
    let mut flows = flows();
    flows.out(T, &udp(ENDS), OLD);
    assert_eq!(flows.out(T, &fragment(udp(ENDS), 0), OWN), OLD);
    assert_eq!(flows.out(T, &fragment(udp(ENDS), 9), OWN), OLD);
    let mut other = ENDS;
    other[0].1 += 1;
    assert_eq!(flows.out(T, &fragment(udp(other), 0), OWN), OWN);
    assert_eq!(flows.out(T, &fragment(udp(other), 9), OLD), OWN);
    // Without a first one, and too late.
    let elsewhere = [ENDS[0], ([192, 0, 2, 9], 80)];
    assert_eq!(flows.out(T, &fragment(udp(elsewhere), 9), OWN), OWN);
    assert_eq!(flows.out(T + s(30), &fragment(udp(ENDS), 9), OLD), OLD);
    assert_eq!(flows.sizes(OWN).0, 2);
    flows.back(T, &fragment(udp([elsewhere[1], ENDS[0]]), 9), OLD);
    assert_eq!(flows.sizes(OWN).0, 2, "nothing is known of it");
}

#[test]
fn a_flow_through_a_gateway_that_is_gone_is_given_up() {
    let mut flows = flows();
    flows.out(T, &tcp(ENDS, SYN), OLD);
    flows.back(T, &tcp(BACK, SYN_ACK), OLD);
    // No answer for less than two minutes; then one comes; then none.
    assert_eq!(flows.out(T, &tcp(ENDS, ACK), OWN), OLD);
    assert_eq!(flows.out(T + s(119), &tcp(ENDS, ACK), OWN), OLD);
    flows.back(T + s(119), &tcp(BACK, ACK), OLD);
    assert_eq!(flows.out(T + s(200), &tcp(ENDS, ACK), OWN), OLD);
    assert_eq!(flows.out(T + s(319), &tcp(ENDS, ACK), OWN), OLD);
    assert_eq!(flows.out(T + s(320), &tcp(ENDS, ACK), OWN), OWN);
    assert_eq!(flows.counted.given_up, 1);
    // That of the near gateway is not: there is no other way.
    flows.out(T, &udp(ENDS), OWN);
    for at in (0..200).step_by(20) {
        assert_eq!(flows.out(T + s(at), &udp(ENDS), OWN), OWN);
    }
    assert_eq!((flows.sizes(OWN), flows.counted.given_up), ((1, 0), 1));
    // A host that has the gateway no longer.
    let mut flows = self::flows();
    flows.out(T, &udp(ENDS), OLD);
    let packet = Packet::read(&udp(ENDS)).unwrap();
    let went = flows.outbound(T, GUEST, &packet, Some(OWN), |host| host == OWN);
    assert_eq!((went, flows.counted.given_up), (Some(OWN), 1));
    assert_eq!(flows.outbound(T, OTHER, &packet, None, |_| true), None);
    assert_eq!(flows.states(T), [(OWN, FlowState::Unanswered)]);
}

#[test]
fn tables_of_flows_are_bounded_for_each_guest_and_in_all() {
    let port = |port: u16| {
        let mut ends = ENDS;
        ends[0].1 = port;
        udp(ends)
    };
    let mut flows = Flows::new(Keyed::new([5, 6]), 150, 100);
    for number in 0..110 {
        let now = T + Duration::from_millis(u64::from(number));
        assert_eq!(flows.out(now, &port(number), OWN), OWN, "{number}");
    }
    // Room was made once: the oldest seven went.
    assert_eq!((flows.sizes(OWN).0, flows.counted.full), (100, 3));
    let now = T + s(1);
    let known = flows.of(now, GUEST);
    let ports: Vec<u16> = known.iter().map(|(flow, ..)| flow.guest.port).collect();
    assert_eq!((ports[0], ports[99]), (106, 7), "the last one first");
    flows.out(T + s(2), &port(500), OWN);
    assert_eq!(flows.sizes(OWN).0, 94);
    // What is too old goes before anything else.
    for number in 0..6 {
        flows.out(T + s(20), &port(600 + number), OWN);
    }
    flows.out(T + s(45), &port(700), OWN);
    assert_eq!(flows.sizes(OWN).0, 7);
    // All guests together.
    let packet = |number: u16| Packet::read(&port(number)).unwrap();
    for guest in 0..2 {
        for number in 0..100 {
            let mac = Mac([2, 9, 0, 0, 0, guest]);
            flows.outbound(T + s(45), mac, &packet(number), Some(OWN), |_| true);
        }
    }
    assert_eq!((flows.sizes(OWN).0, flows.counted.full), (150, 3 + 57));
    flows.forget(Mac([2, 9, 0, 0, 0, 0]));
    assert_eq!(flows.sizes(OWN).0, 50);
    flows.clear();
    assert_eq!((flows.sizes(OWN), flows.guests.len()), ((0, 0), 0));
}

#[test]
fn flows_move_along_with_their_age() {
    let mut old = flows();
    old.out(T, &udp(ENDS), OLD);
    old.out(T + s(9), &tcp(ENDS, SYN), OLD);
    old.back(T + s(10), &tcp(BACK, SYN_ACK), OLD);
    let carried = old.of(T + s(20), GUEST);
    let seen: Vec<_> = carried
        .iter()
        .map(|(_, _, state, idle)| (*state, *idle))
        .collect();
    assert_eq!(
        seen,
        [(FlowState::Open, s(10)), (FlowState::Unanswered, s(20))]
    );
    let mut new = flows();
    for one in carried {
        new.add(T, GUEST, one);
    }
    assert_eq!(new.out(T + s(9), &tcp(ENDS, ACK), OWN), OLD);
    assert_eq!(new.out(T + s(9), &udp(ENDS), OWN), OLD);
    let (flow, gateway, ..) = old.of(T, GUEST)[0];
    new.forget(GUEST);
    new.add(T, GUEST, (flow, gateway, FlowState::Unanswered, s(30)));
    assert_eq!(new.sizes(OWN).0, 0, "too old");
    // It may have been silent for longer than this host's clock runs.
    new.add(s(1), GUEST, (flow, gateway, FlowState::Open, s(100)));
    assert_eq!(new.sizes(OWN), (1, 1));
}
