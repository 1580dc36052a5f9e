//! Frames for tests, written out byte by byte.

use crate::address::Mac;
use crate::checksum;

/// Returns a frame with a payload.
pub(crate) fn frame(to: Mac, from: Mac, vlan: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = [to.0, from.0].concat();
    if vlan != 0 {
        frame.extend([0x81, 0]);
        frame.extend(vlan.to_be_bytes());
    }
    frame.extend([0x88, 0xb5]);
    frame.extend(payload);
    frame
}

/// Returns an ARP request to everyone.
pub(crate) fn arp(from: Mac, sender: [u8; 4], target: [u8; 4]) -> Vec<u8> {
    let mut frame = [[0xff; 6], from.0].concat();
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(from.0);
    frame.extend(sender);
    frame.extend([0; 6]);
    frame.extend(target);
    frame
}

/// Returns an IPv6 packet of neighbour discovery in a frame.
fn discovery(to: Mac, from: Mac, addresses: [[u8; 16]; 2], packet: &[u8]) -> Vec<u8> {
    let mut frame = [to.0, from.0].concat();
    frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, packet.len() as u8, 58, 255]);
    frame.extend(addresses.concat());
    let sum = checksum::pseudo(&addresses.concat(), 58, packet.len()) + checksum::sum(packet);
    let at = frame.len();
    frame.extend(packet);
    frame[at + 2..at + 4].copy_from_slice(&(!checksum::fold(sum)).to_be_bytes());
    frame
}

/// Returns a neighbour solicitation for `target`; a probe if `sender` is zero.
pub(crate) fn solicitation(from: Mac, sender: [u8; 16], target: [u8; 16]) -> Vec<u8> {
    let group = Mac([0x33, 0x33, 0xff, target[13], target[14], target[15]]);
    let mut to = [0; 16];
    to[..2].copy_from_slice(&[0xff, 2]);
    to[11..13].copy_from_slice(&[1, 0xff]);
    to[13..].copy_from_slice(&target[13..]);
    let mut packet = vec![135, 0, 0, 0, 0, 0, 0, 0];
    packet.extend(target);
    if sender != [0; 16] {
        packet.extend([1, 1]);
        packet.extend(from.0);
    }
    discovery(group, from, [sender, to], &packet)
}

/// Returns a neighbour advertisement to `to`.
pub(crate) fn advertisement(from: Mac, to: Mac, address: [u8; 16], flags: u8) -> Vec<u8> {
    let mut packet = vec![136, 0, 0, 0, flags, 0, 0, 0];
    packet.extend(address);
    packet.extend([2, 1]);
    packet.extend(from.0);
    discovery(to, from, [address, [0xfe; 16]], &packet)
}
